"""Who passes what cannot be decoded is told what is wrong, and the process stays usable."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import bits
import helpers
import pytest
import torch
from helpers import GPU, freed, moved
from torch._subclasses.fake_tensor import FakeTensorMode


class BadArgument(NamedTuple):
    words: str  # what the error must say, as a regular expression
    where: str  # "weight", "state" or a field of the state
    make: Callable  # make(old value) -> new value
    error: type | tuple = ValueError


def as_(value):
    return lambda old: value


def repacked(state):
    """Return the state as bitsandbytes leaves it with a weight for its CPU kernels."""
    from bitsandbytes.functional import _convert_weight_packed_for_cpu  # private, so not at the top

    weight = torch.zeros(1024, 1, dtype=torch.uint8, device=state.absmax.device)
    return _convert_weight_packed_for_cpu(weight, state)[1]


BAD_ALWAYS = {  # {what is wrong: BadArgument}
    "no state": BadArgument("a layer gets it on a GPU", "state", as_(None), TypeError),
    "repacked for a CPU": BadArgument("repacked for a CPU: load it again", "state", repacked),
    "quant_type": BadArgument("quant_type 'nf4', got 'fp4'", "quant_type", as_("fp4")),
    "a state without fields": BadArgument(
        "a 4-bit weight", "state", as_(SimpleNamespace()), TypeError
    ),
    "state2.dtype": BadArgument("got torch.float16: set quant", "state2.dtype", as_(torch.float16)),
    "state2.blocksize 0": BadArgument(
        "state2.blocksize of 32 to .* got 0", "state2.blocksize", as_(0)
    ),
    "dtype": BadArgument("quant_state.dtype in .* got torch.float64", "dtype", as_(torch.float64)),
    "no weight": BadArgument("the weight to be .* got None", "weight", as_(None)),
    "a byte too few": BadArgument("have 1024 bytes, got 1023", "weight", lambda w: w[:-1]),
    "as many elements": BadArgument("have 1024 bytes, got 2048", "weight", lambda w: w.short()),
    "weight sparse": BadArgument("strided|[Ss]parse", "weight", lambda w: w.to_sparse()),
    "weight on meta": BadArgument("absmax on meta, got it on c", "weight", lambda w: w.to("meta")),
    "blocksize 63": BadArgument("block sizes in .* got 63 and", "blocksize", as_(63)),
    "another blocksize": BadArgument("absmax to have 16 elements", "blocksize", as_(128)),
    "state2.blocksize": BadArgument("block sizes in .* 100", "state2.blocksize", as_(100)),
    "no absmax": BadArgument("absmax to be .* got None", "absmax", as_(None)),
    "uint8 as plain absmax": BadArgument("absmax in torch.float32, got", "nested", as_(False)),
    "absmax in fp32": BadArgument("absmax in torch.uint8", "absmax", lambda t: t.float()),
    "absmax a list": BadArgument("absmax.*list", "absmax", lambda t: t.tolist(), RuntimeError),
    "absmax a nested tensor": BadArgument(  # torch's guard would end the process
        "[Nn]ested",
        "absmax",
        lambda t: torch.nested.nested_tensor([t]),
        (ValueError, RuntimeError),
    ),
    "no offset": BadArgument("offset to be .* got None", "offset", as_(None)),
    "two offsets": BadArgument("offset to have 1 elem", "offset", lambda t: torch.stack((t, t))),
    "offset of two dimensions": BadArgument(
        "one floating-point .*1, 1", "offset", lambda t: t[None, None]
    ),
    "offset in int32": BadArgument("one floating-point .*int32", "offset", lambda t: t.int()),
    "no absmax2": BadArgument("state2.absmax to be .* got None", "state2.absmax", as_(None)),
    "absmax2 too short": BadArgument("state2.absmax to have 1 ", "state2.absmax", lambda t: t[:0]),
    "absmax2 in fp16": BadArgument(
        "state2.absmax in .*float32", "state2.absmax", lambda t: t.half()
    ),
    "no code2": BadArgument("state2.code to be .* got None", "state2.code", as_(None)),
    "code2 of 255": BadArgument("code to have 256 .*, got .*255", "state2.code", lambda t: t[:255]),
    "weight freed": BadArgument("the weight to have memory, .* was freed", "weight", freed),
    "absmax freed": BadArgument("absmax to have memory", "absmax", freed),
    "offset freed": BadArgument("offset to have memory", "offset", freed),
    "state2.absmax freed": BadArgument("state2.absmax to have memory", "state2.absmax", freed),
    "state2.code freed": BadArgument("state2.code to have memory", "state2.code", freed),
}
if GPU:  # memory that a GPU can read: only the device tells
    pinned = BadArgument("absmax on cpu, got it on cuda", "weight", lambda w: w.cpu().pin_memory())
    BAD_ALWAYS["weight in pinned memory"] = pinned
UNSEEN_BY_PLANS = {  # a limit of plans, which the page states
    "a view into freed memory": BadArgument(
        "to have memory", "weight", lambda w: freed(moved(w, 4))
    ),
}
BAD_AT_FIRST = BAD_ALWAYS | UNSEEN_BY_PLANS


def spoiled(bad, weight, state):
    """Return the weight and its state with a bad argument in them."""
    passed = SimpleNamespace(weight=weight, state=state)
    where = bad.where if bad.where in ("weight", "state") else f"state.{bad.where}"
    helpers.replace_field(passed, where, bad.make)
    return passed.weight, passed.state


@pytest.fixture
def pair(nf4, device):
    """A weight and its state; after the test others of their kind must get the right bits."""
    yield nf4.quantized((32, 64), torch.float16, device)
    again = nf4.quantized((32, 64), torch.float16, device)
    bits.assert_same_bits(nf4.dequantize_nf4(*again), bits.expected(*again))


@pytest.mark.parametrize("bad", BAD_AT_FIRST.values(), ids=BAD_AT_FIRST)
def test_a_first_call_says_what_is_wrong(nf4, pair, bad):
    with pytest.raises(bad.error, match=bad.words):
        nf4.dequantize_nf4(*spoiled(bad, *pair))
    assert not nf4.PLANS


@pytest.mark.parametrize("bad", BAD_ALWAYS.values(), ids=BAD_ALWAYS)
def test_a_call_with_a_plan_says_what_is_wrong(calls, pair, bad):
    calls.layer_with_plan()
    with pytest.raises(bad.error, match=bad.words):
        calls.nf4.dequantize_nf4(*spoiled(bad, *pair))
    assert calls.n_plans() == 1


def test_the_operator_refuses_what_unpack_never_passes(nf4, device):
    given = nf4.quantized((32, 64), torch.float16, device, nested=False)
    (weight, absmax, *_), (shape, dtype, *blocksizes) = nf4.unpack(*given)
    index = nf4.DTYPES.index(dtype)
    with pytest.raises(ValueError, match="expected None for offset, .* got a tensor"):
        nf4.OPERATOR(weight, absmax, None, None, absmax, shape, index, *blocksizes)
    for index in (-1, 3):
        with pytest.raises(ValueError, match=f"an index of .* got {index}"):
            nf4.OPERATOR(weight, absmax, None, None, None, shape, index, *blocksizes)


@pytest.mark.parametrize("device, cuda", [("cpu", "13.0"), ("cuda:0", None)], ids=["CPU", "AMD"])
def test_no_cpu_and_no_amd_gpu_gets_the_kernel(nf4, monkeypatch, device, cuda):
    """An AMD GPU is "cuda", too, and Triton cannot assemble the kernel's instructions for it."""
    monkeypatch.setattr(nf4, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    tensors, kind = nf4.unpack(*nf4.quantized((32, 64), torch.float16, "cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [torch.empty_like(tensor, device=device) for tensor in tensors]
        assert not nf4.suits_kernel(tensors, kind)


@helpers.each_dtype
def test_a_cpu_without_the_interpreter_gets_right_weights(nf4, monkeypatch, dtype):
    """By bitsandbytes' own operators for a CPU."""
    monkeypatch.setattr(nf4, "INTERPRETED", False)
    launch = mock.Mock()
    monkeypatch.setattr(nf4, "launch", launch)
    for nested in (True, False):
        given = nf4.quantized((32, 64), dtype, "cpu", nested=nested)
        bits.assert_same_bits(nf4.dequantize_nf4(*given), nf4.spec(*given))
    assert not launch.called
