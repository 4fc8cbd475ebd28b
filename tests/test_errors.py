"""Who passes what cannot be decoded is told what is wrong, and the process stays usable."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import helpers
import pytest
import torch
from bitsandbytes.functional import _convert_weight_packed_for_cpu
from helpers import every_second, resized
from torch._subclasses.fake_tensor import FakeTensorMode


class Fault(NamedTuple):
    words: str  # what must be said
    where: str  # "weight", or "quant_state" and its field
    make: Callable  # make(old value) -> new value
    error: type | tuple = ValueError


def strided(tensor):
    return torch.stack((tensor, tensor), -1)[..., 0]


def nested(tensor):
    return torch.nested.nested_tensor([tensor])


def repacked(state):
    """As bitsandbytes leaves it with a weight for its CPU kernels."""
    weight = torch.zeros(1024, 1, dtype=torch.uint8, device=state.absmax.device)
    return _convert_weight_packed_for_cpu(weight, state)[1]


BY_READ = {
    "the state is None": Fault("layer on the GPU", "state", lambda _: None, TypeError),
    "repacked for a CPU's kernels": Fault("a CPU's repacked one", "state", repacked),
    "quant_type": Fault("quant_type must be 'nf4', got 'fp4'", "quant_type", lambda _: "fp4"),
    "no shape": Fault("4-bit weight", "shape", lambda _: None, TypeError),
    "no fields in state2": Fault("4-bit", "state2", lambda _: SimpleNamespace(), TypeError),
    "state2.dtype": Fault("got .*16: set quant_state.s", "state2.dtype", lambda _: torch.float16),
    "state2.blocksize 0": Fault("blocksize 0 .*must be None", "state2.blocksize", lambda _: 0),
    "dtype": Fault("dtype must be .* got torch.float64", "dtype", lambda _: torch.float64),
    "no dtype": Fault("dtype must be .* got None", "dtype", lambda _: None),
}
BY_CHECK = {
    "no weight": Fault("the weight must be .* got None", "weight", lambda w: None),
    "a byte too few": Fault("weight must have 1024 bytes .* 1023", "weight", lambda w: w[:-1]),
    "as many elements, not bytes": Fault("1024 bytes .* got 2048", "weight", lambda w: w.short()),
    "weight sparse": Fault("strided|[Ss]parse", "weight", lambda w: w.to_sparse()),
    "weight on meta": Fault("must be on meta, got c", "weight", lambda w: w.to("meta")),
    "an odd shape": Fault("1008 bytes .* got 1024", "shape", lambda _: torch.Size((32, 63))),
    "blocksize 63": Fault("blocksizes must be .* got 63 and 256", "blocksize", lambda _: 63),
    "blocksize 64.0": Fault("'blocksize'.*float", "blocksize", lambda _: 64.0, RuntimeError),
    "another blocksize": Fault("absmax must have 16 elements", "blocksize", lambda _: 128),
    "state2.blocksize": Fault("must be .* got 64 and 100", "state2.blocksize", lambda _: 100),
    "no absmax": Fault("absmax must be .* got None", "absmax", lambda _: None),
    "absmax not nested": Fault("absmax must be in one of .*float32", "state2", lambda _: None),
    "absmax strided": Fault("absmax must have 32 elements without gaps", "absmax", strided),
    "absmax in fp32": Fault("absmax must be in one of .*uint8", "absmax", lambda t: t.float()),
    "absmax a list": Fault("'absmax'.*list", "absmax", lambda t: t.tolist(), RuntimeError),
    "no offset": Fault("offset must be .* got None", "offset", lambda _: None),
    "offset of integers": Fault("offset must be .* torch.int32", "offset", lambda t: t.int()),
    "absmax2 in fp16": Fault("state2.absmax must be", "state2.absmax", lambda t: t.half()),
    "code2 of 255": Fault("state2.code .* 256 .*, got .255", "state2.code", lambda t: t[:255]),
    "offset in fp64": Fault("no dimension, got .*1", "offset", lambda t: t.double().view(1)),
}
OF_MEMORY = {  # what is looked at where there is memory: not while a compiler traces
    "weight freed": Fault("1024 .* storage, got 0", "weight", lambda w: resized(w, 0)),
    "gaps, cut": Fault("2047 .* got 2046", "weight", lambda w: resized(every_second(w), 2046)),
    "weight shrunk": Fault("1024 .* storage, got 1023", "weight", lambda w: resized(w, 1023)),
    "view cut": Fault("1028 .* got 1027", "weight", lambda w: resized(helpers.moved(w, 4), 1027)),
    "absmax freed": Fault("absmax .* 32 .* storage, got 0", "absmax", lambda t: resized(t, 0)),
    "code2 one byte on": Fault("at a multiple of 4", "state2.code", helpers.one_byte_on),
    "absmax nested tensor": Fault("[Nn]ested", "absmax", nested, (ValueError, RuntimeError)),
}
FAULTS = BY_READ | BY_CHECK | OF_MEMORY


def faulty(what, weight, state):
    passed, where = SimpleNamespace(weight=weight, state=state), FAULTS[what].where
    where = where if where in ("weight", "state") else f"state.{where}"
    helpers.change(passed, where, FAULTS[what].make)
    return passed.weight, passed.state


@pytest.fixture
def right(nf4, device):
    """A weight and its state; after the test they, made anew, still get the right bits."""
    yield nf4.quantized((32, 64), torch.float16, device)
    packed, quant_state = nf4.quantized((32, 64), torch.float16, device)
    out = nf4.dequantize_nf4(packed, quant_state)
    assert nf4.bits_differing(out, helpers.expected(packed, quant_state)) == 0


@pytest.mark.parametrize("what", FAULTS)
def test_a_first_call_the_operator_and_fake_tensors_refuse_in_words(nf4, right, what):
    weight, state = faulty(what, *right)
    with pytest.raises(FAULTS[what].error, match=FAULTS[what].words):
        nf4.dequantize_nf4(weight, state)
    assert not nf4.PLANS
    if what not in BY_READ:
        tensors, kind = nf4.read(weight, state)
        with pytest.raises(FAULTS[what].error, match=FAULTS[what].words):
            torch.ops.nf4_triton.dequantize(*tensors, *kind)
    if what not in OF_MEMORY:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = None if weight is None else mode.from_tensor(weight)
            with pytest.raises(FAULTS[what].error, match=FAULTS[what].words):
                nf4.dequantize_nf4(fake, state)


@pytest.mark.parametrize("what", FAULTS)
def test_a_compiled_function_refuses_and_goes_on(nf4, device, right, what):
    """The words are in what the compiler raises; some versions of torch leave some of them out."""
    compiled = torch.compile(nf4.dequantize_nf4, fullgraph=True, backend="aot_eager")
    passed = faulty(what, *right)
    words = FAULTS[what].words
    if FAULTS[what].error is RuntimeError:  # by the schema, of which torch 2.14 says no more
        words += "|Observed exception"
    if what in BY_READ and torch.__version__ < (2, 13):
        words += "|Observed exception|Failed to trace"
    with pytest.raises(Exception, match=words):
        compiled(*passed)
    again = nf4.quantized((32, 64), torch.float16, device)
    assert nf4.bits_differing(compiled(*again), nf4.spec(*again)) == 0


def test_the_operator_refuses_what_read_never_gives(nf4, device):
    """A table on another device would lead to its kernel, and to an output that nobody filled."""
    pair = nf4.quantized((32, 64), torch.float16, device, nested=False)
    (weight, absmax, *_), (shape, dtype, *blocksizes) = nf4.read(*pair)
    operator = nf4.NF4_OPS.dequantize.default
    for table in (absmax, absmax.to("meta")):
        with pytest.raises(ValueError, match="must be None"):
            operator(weight, absmax, None, None, table, shape, dtype, *blocksizes)
    for dtype in (-1, 3):
        with pytest.raises(ValueError, match=f"dtype must be an index of .* got {dtype}"):
            operator(weight, absmax, None, None, None, shape, dtype, *blocksizes)


@pytest.mark.parametrize("device, cuda", [("cpu", "13.0"), ("cuda:0", None)])
def test_no_cpu_and_no_amd_gpu_is_taken(nf4, monkeypatch, device, cuda):
    """An AMD GPU is "cuda", too, and Triton cannot assemble the kernel's instructions for it."""
    monkeypatch.setattr(nf4, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    tensors, kind = nf4.read(*nf4.quantized((32, 64), torch.float16, "cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [torch.empty_like(tensor, device=device) for tensor in tensors]
        with pytest.raises(ValueError, match=f"NVIDIA GPUs only, got {device}"):
            nf4.check(tensors, kind, has_memory=False)


CHANGED = """
import os
os.environ.pop("TRITON_INTERPRET", None)
{}
import triton
{}
import shared
shared.execute(shared.defining("_dequantize_nf4_kernel"), "its cell", {{}})
"""
SET, UNSET = 'os.environ["TRITON_INTERPRET"] = "1"', 'os.environ.pop("TRITON_INTERPRET")'


@pytest.mark.parametrize("before, after", [("", SET), (SET, UNSET)])
def test_an_interpreter_that_comes_or_goes_after_tritons_import_is_refused(before, after):
    done = helpers.in_a_process(CHANGED.format(before, after))
    assert "TRITON_INTERPRET must be as it was when triton was first imported" in done.stderr
