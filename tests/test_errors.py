"""Who passes what cannot be decoded is told what is wrong, and the process stays usable.

Each fault comes to a first call, to one that has a plan, to the operator, to fake tensors and to
a compiled function. Each time the right weight gives the right bits afterwards.
"""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import helpers
import pytest
import torch
from bitsandbytes.functional import _convert_weight_packed_for_cpu as repacked
from torch._subclasses.fake_tensor import FakeTensorMode

GPU = torch.cuda.is_available()


class Fault(NamedTuple):
    words: str  # what must be said
    make: Callable  # (weight, state) -> those that are passed
    error: type | tuple = ValueError


def state(name, make):
    """Makes a field of the state of its present value."""

    def change(weight, quant_state):
        owner, field = quant_state, name
        if name.startswith("state2."):
            owner, field = quant_state.state2, name.removeprefix("state2.")
        setattr(owner, field, make(getattr(owner, field)))
        return weight, quant_state

    return change


def to(value):
    return lambda _: value


def weight(make):
    return lambda packed, quant_state: (make(packed), quant_state)


def resized(n_bytes):
    def resize(tensor):
        tensor.untyped_storage().resize_(n_bytes)
        return tensor

    return resize


def strided(tensor):
    return torch.stack((tensor, tensor), -1)[..., 0]


def nested(tensor):
    return torch.nested.nested_tensor([tensor])


BY_READ = {
    "the state is None": Fault("is the layer on the GPU", lambda w, s: (w, None), TypeError),
    "no weight, no state": Fault("is the layer on the GPU", lambda w, s: (None, None), TypeError),
    "repacked for a CPU's kernels": Fault("a CPU's repacked one", repacked),
    "quant_type": Fault("quant_type must be 'nf4', got 'fp4'", state("quant_type", to("fp4"))),
    "no shape": Fault("4-bit weight", state("shape", to(None)), TypeError),
    "no fields in state2": Fault("4-bit weight", state("state2", to(SimpleNamespace())), TypeError),
    "state2.dtype": Fault(
        "got torch.float16 .* set quant_state.state2.dtype",
        state("state2.dtype", to(torch.float16)),
    ),
    "state2.blocksize 0": Fault("in blocks of 0", state("state2.blocksize", to(0))),
}
BY_CHECK = {
    "no weight": Fault("the weight must be .* got None", weight(to(None))),
    "dtype": Fault("dtype must be .* got torch.float64", state("dtype", to(torch.float64))),
    "no dtype": Fault("'dtype'.*NoneType", state("dtype", to(None)), RuntimeError),
    "blocksize 63": Fault("blocksize must be .* got 63", state("blocksize", to(63))),
    "blocksize 64.0": Fault("'blocksize'.*float", state("blocksize", float), RuntimeError),
    "no blocksize": Fault("'blocksize'.*NoneType", state("blocksize", to(None)), RuntimeError),
    "another blocksize": Fault("absmax must have 16 elements, got 32", state("blocksize", to(128))),
    "state2.blocksize": Fault("blocksize must be .* got 100", state("state2.blocksize", to(100))),
    "a byte too few": Fault("weight must have 1024 bytes .* 1023", weight(lambda w: w[:-1])),
    "twice the bytes": Fault("must have 1024 bytes .* 2048", weight(lambda w: torch.cat((w, w)))),
    "an odd shape": Fault("must have 1008 bytes .* 1024", state("shape", to(torch.Size((32, 63))))),
    "weight of int8": Fault(
        "be torch.uint8 .* got torch.int8", weight(lambda w: w.view(torch.int8))
    ),
    "weight strided": Fault("weight must be contiguous, got strides", weight(strided)),
    "weight sparse": Fault("strided|[Ss]parse", weight(torch.Tensor.to_sparse)),
    "weight on meta": Fault("must be on meta, got c", weight(lambda w: w.to("meta"))),
    "no absmax": Fault("absmax must be .* got None", state("absmax", to(None))),
    "absmax too short": Fault("absmax must have 32 elements", state("absmax", lambda t: t[:-1])),
    "absmax not nested": Fault("absmax must be torch.float32, got", state("state2", to(None))),
    "absmax in fp32": Fault("absmax must be torch.uint8, got", state("absmax", torch.Tensor.float)),
    "absmax strided": Fault("absmax must be contiguous, got", state("absmax", strided)),
    "absmax on meta": Fault("absmax must be .* meta", state("absmax", lambda t: t.to("meta"))),
    "code of integers": Fault("code must be .* got torch.int32", state("code", torch.Tensor.int)),
    "code of 8": Fault("code must have 16 elements, got 8", state("code", lambda t: t[:8])),
    "code a list": Fault("'code'.*list", state("code", torch.Tensor.tolist), RuntimeError),
    "no offset": Fault("offset must be .* got None", state("offset", to(None))),
    "offset of integers": Fault("offset must be .* torch.int32", state("offset", torch.Tensor.int)),
    "absmax2 in fp16": Fault("state2.absmax must be", state("state2.absmax", torch.Tensor.half)),
    "code2 of 255": Fault(
        "state2.code must have 256 elements, got 255", state("state2.code", lambda t: t[:255])
    ),
}
OF_MEMORY = {  # what is looked at where there is memory: not while a compiler traces
    "weight freed": Fault("1024 bytes of storage, got 0", weight(resized(0))),
    "weight shrunk": Fault("1024 bytes of storage, got 1023", weight(resized(1023))),
    "view shrunk": Fault("1028 .* got 1027", weight(lambda w: resized(1027)(helpers.moved(w, 4)))),
    "absmax freed": Fault(
        "absmax must have 32 bytes of storage, got 0", state("absmax", resized(0))
    ),
    "code one byte on": Fault(
        "code must be at a multiple of 4", state("code", helpers.one_byte_on)
    ),
    "absmax nested tensor": Fault("[Nn]ested", state("absmax", nested), (ValueError, RuntimeError)),
}
FAULTS = BY_READ | BY_CHECK | OF_MEMORY
UNSEEN = {
    "blocksize 64.0",
    "weight shrunk",
    "view shrunk",
    "code one byte on",
    "absmax nested tensor",
}


@pytest.fixture
def right(nf4, device):
    """A weight and its state; after the test they, made anew, still get the right bits."""
    yield nf4.quantized((32, 64), torch.float16, device)
    packed, quant_state = nf4.quantized((32, 64), torch.float16, device)
    out = nf4.dequantize_nf4(packed, quant_state)
    assert nf4.bits_differing(out, helpers.expected(packed, quant_state)) == 0


@pytest.mark.parametrize("what", FAULTS)
def test_a_first_call(nf4, right, tally, what):
    fault = FAULTS[what]
    passed = fault.make(*right)
    with pytest.raises(fault.error, match=fault.words):
        nf4.dequantize_nf4(*passed)
    assert not nf4.PLANS
    tally["errors"] += 1


@pytest.mark.parametrize("what", [what for what in FAULTS if what not in UNSEEN])
def test_a_call_that_has_a_plan(nf4, world, right, tally, what):
    fault = FAULTS[what]
    nf4.dequantize_nf4(*right)
    (plans,) = nf4.PLANS.values()
    before, passed = list(plans), fault.make(*right)
    with pytest.raises(fault.error, match=fault.words):
        nf4.dequantize_nf4(*passed)
    assert list(nf4.PLANS.values()) == [before], "the plan stays, and there is no other"
    assert world is None or world.starts == 1, "in its trial alone"
    tally["errors"] += 1


@pytest.mark.parametrize("what", BY_CHECK | OF_MEMORY)
def test_the_operator_called_directly(nf4, right, what):
    fault = FAULTS[what]
    tensors, kind = nf4.read(*fault.make(*right))
    absent = [None] * (6 - len(tensors))
    with pytest.raises(fault.error, match=fault.words):
        torch.ops.nf4_triton.dequantize(*tensors, *absent, *kind)


@pytest.mark.parametrize("what", BY_READ | BY_CHECK)
def test_fake_tensors(nf4, right, what):
    fault = FAULTS[what]
    passed = fault.make(*right)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        if isinstance(passed[0], torch.Tensor):
            passed = (mode.from_tensor(passed[0]), passed[1])
        with pytest.raises(fault.error, match=fault.words):
            nf4.dequantize_nf4(*passed)


@pytest.mark.parametrize("what", FAULTS)
def test_a_compiled_function(nf4, device, right, what):
    """The words are in what the compiler raises, but for an error that it met while tracing read.

    On a GPU nothing looks at memory: a compiled function starts the kernel itself.
    """
    if GPU and what in OF_MEMORY:
        pytest.skip("would be started")
    torch._dynamo.reset()
    compiled = torch.compile(nf4.dequantize_nf4, fullgraph=True, backend="aot_eager")
    passed = FAULTS[what].make(*right)
    with pytest.raises(Exception) as caught:
        compiled(*passed)
    words = FAULTS[what].words
    if FAULTS[what].error is RuntimeError:  # by the schema, of which torch 2.14 says no more
        words += "|Observed exception"
    assert what in BY_READ or re.search(words, str(caught.value)), caught.value
    again = nf4.quantized((32, 64), torch.float16, device)
    assert nf4.bits_differing(compiled(*again), nf4.spec(*again)) == 0


def test_a_layer_that_is_not_quantized_yet(nf4):
    for layer in (nf4.bnb_Linear4bit(64, 64), torch.nn.Linear(4, 4)):
        with pytest.raises(TypeError, match="is the layer on the GPU.* quant_state NoneType"):
            nf4.your_dequantize_nf4(layer)


def test_a_cpus_weight_needs_the_interpreter(nf4, monkeypatch):
    monkeypatch.setattr(nf4, "INTERPRETED", nf4.tl.constexpr(False))
    with pytest.raises(ValueError, match="the weight must be on CUDA, got cpu"):
        nf4.dequantize_nf4(*nf4.quantized((32, 64), torch.float16, "cpu"))
