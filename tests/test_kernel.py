"""Each weight has bitsandbytes' bits, whatever the tensor; nothing is written beyond the output.

Without a GPU the kernel runs through Triton's interpreter, its assembly emulated.
"""

import math
import os
import subprocess
import sys

import helpers
import hypothesis
import pytest
import sanitize
import shared
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from helpers import DTYPES
from hypothesis import strategies as st

GPU = torch.cuda.is_available()
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
SHAPES = [(3, 5), (64, 128), (288, 64), (1, 1), (2, 1), (128,), (2, 3, 64), (33, 65), (4, 1000)]
SCALES = {  # what is filled in: (state2.absmax, offset)
    "NaN": (math.nan, 0.0),
    "infinite": (math.inf, 0.0),
    "huge": (1e30, 1e30),
    "zeros of both signs": (0.0, -0.0),
    "subnormal in fp16": (1e-5, 1e-5),
    "the offset is NaN": (1.0, math.nan),
}
FACTORS = (1, 1e-30)  # of all scales
if GPU:  # there products below the smallest normal number are flushed; a CPU keeps them
    FACTORS += (1e-38, 3e-39)
STORAGES = "int8 int16 int32 int64 float16 bfloat16 float32 float64 float8_e4m3fn bool".split()
PASSED = {  # how the packed weight may come: bytes are bytes
    "one byte on": lambda weight: helpers.moved(weight, 1),
    "transposed": lambda weight: weight.t(),
    "every second byte of a buffer": helpers.every_second,
    "columns first": lambda weight: weight.view(8, -1).t().contiguous().t(),
}
CODES = {  # what stands in `code`, which bitsandbytes never reads
    "another code": lambda code: code.flip(0) * 1.5,
    "no code": lambda code: None,
    "a list": lambda code: code.tolist(),
    "a code in bf16": lambda code: code.bfloat16(),
}


def table(nf4, dtype, device):
    """Rows (what is special, weight, QuantState, what is expected)."""
    for factor in FACTORS:
        weight, state = nf4.every_combination(dtype, device, factor)
        yield f"nibbles x absmax, scales x {factor}", weight, state, dequantize_4bit(weight, state)
    for shape in SHAPES:
        weight, state = nf4.quantized(shape, dtype, device)
        yield f"shape {shape}", weight, state, helpers.expected(weight, state)
    for blocksize in BLOCKSIZES:
        for nested in (True, False):
            shape = (2, max(blocksize, 1024))
            weight, state = nf4.quantized(shape, dtype, device, blocksize, nested)
            want = dequantize_4bit(weight, state)
            yield f"blocks of {blocksize}, nested absmax: {nested}", weight, state, want
    weight, state = nf4.quantized((16, 128), dtype, device)  # one full program
    for how, passed in PASSED.items():
        packed = passed(weight)
        yield f"the weight comes {how}", packed, state, helpers.expected(packed, state)
    for storage in STORAGES:
        packed = weight.view(-1).view(getattr(torch, storage)).view(-1, 1)
        yield f"quant_storage {storage}", packed, state, helpers.expected(weight, state)
    for what, make in CODES.items():
        weight, state = nf4.quantized((5, 64), dtype, device)
        want = dequantize_4bit(weight, state)
        state.code = make(state.code)
        yield what, weight, state, want
    for name, (absmax2, offset) in SCALES.items():
        weight, state = nf4.quantized((16, 64), dtype, device)
        state.state2.absmax.fill_(absmax2)
        state.offset.fill_(offset)
        yield f"scales: {name}", weight, state, dequantize_4bit(weight, state)
    for offset_dtype in (torch.float16, torch.float64):
        weight, state = nf4.quantized((16, 64), dtype, device)
        state.offset = state.offset.to(offset_dtype)
        yield f"offset in {offset_dtype}", weight, state, dequantize_4bit(weight, state)
    for blocksize2 in (32, 1024):  # bitsandbytes has 256
        weight, state = nf4.quantized((3, 1000), dtype, device, blocksize=32)
        state.state2.blocksize = blocksize2
        state.state2.absmax = torch.rand(-(-94 // blocksize2), device=device) + 0.5
        yield f"nested blocks of {blocksize2}", weight, state, nf4.spec(weight, state)
    for scale in (1 + 2**-8, 1 + 2**-11):  # half-way between two in bf16, in fp16
        weight, state = nf4.quantized((5, 64), dtype, device, nested=False)
        state.absmax.fill_(scale)
        yield f"ties: 1.0 x {scale}", weight, state, dequantize_4bit(weight, state)


def n_differing(nf4, tally, out, want):
    """How many weights differ in their bits, which is counted; a NaN's payload does not matter."""
    facts = [(x.shape, x.stride(), x.dtype, x.device) for x in (out, want)]
    assert facts[0] == facts[1]
    are_nan = out.isnan() & want.isnan()
    count = nf4.bits_differing(out.masked_fill(are_nan, 1), want.masked_fill(are_nan, 1))
    tally["cases"] += 1
    tally["weights"] += want.numel()
    tally["differing"] += count
    return count


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_weight_has_bitsandbytes_bits(nf4, device, look_up, tally, dtype):
    for what, weight, state, want in table(nf4, dtype, device):
        for _ in range(2 if GPU else 1):  # on a GPU the second is a plan's
            assert n_differing(nf4, tally, nf4.dequantize_nf4(weight, state), want) == 0, what


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_written_beyond_the_output_nor_read_beyond_the_weight(
    nf4, device, look_up, tally, dtype
):
    for shape in ((1, 1), (3, 5), (1, 2049), (33, 65), (3, 64), (64, 96)):
        weight, state = nf4.quantized(shape, dtype, device)
        want = nf4.spec(weight, state)
        for offset in (0, 1):
            buffer = torch.full((want.numel() + 64,), math.nan, dtype=dtype, device=device)
            out = buffer[: want.numel()].view(shape)
            nf4.launch(out, *nf4.read(helpers.moved(weight, offset), state))
            assert buffer[want.numel() :].isnan().all(), shape
            assert n_differing(nf4, tally, out, want) == 0, shape


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0,)])
@pytest.mark.parametrize("nested", [True, False])
def test_no_weights_give_an_empty_tensor(nf4, device, nested, shape):
    weight, state = nf4.quantized((64, 64), torch.float16, device, nested=nested)
    state.shape, state.absmax = torch.Size(shape), state.absmax[:0]
    if nested:
        state.state2.absmax = state.state2.absmax[:0]
    for _ in range(2):
        out = nf4.dequantize_nf4(weight[:0], state)
        assert (out.shape, out.dtype, out.device) == (shape, torch.float16, weight.device)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_states_made_under_another_default_dtype(nf4, device, look_up, tally, default):
    """Their code, or once loaded their offset, is of that dtype; bitsandbytes takes them, too."""
    torch.set_default_dtype(default)
    try:
        quantized = nf4.quantized((64, 128), torch.float32, device)
        weight, state = nf4.quantized((64, 128), torch.float32, device)
        loaded = QuantState.from_dict(state.as_dict(packed=True), device=torch.device(device))
    finally:
        torch.set_default_dtype(torch.float32)
    assert default in (quantized[1].code.dtype, loaded.offset.dtype)
    for packed, other in (quantized, (weight, loaded)):
        for _ in range(2):
            out = nf4.dequantize_nf4(packed, other)
            assert n_differing(nf4, tally, out, dequantize_4bit(packed, other)) == 0


ANY_SHAPE = st.one_of(
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
    st.tuples(st.integers(1, 5000)),
    st.tuples(st.integers(1, 6), st.sampled_from((32, 512, 1024, 2048))),
)


@hypothesis.settings(
    max_examples=300 if GPU else 40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(
    shape=ANY_SHAPE,
    dtype=st.sampled_from(DTYPES),
    blocksize=st.sampled_from(BLOCKSIZES[::3]),  # each is another kernel to compile
    nested=st.booleans(),
    offset=st.one_of(st.just(0), st.integers(0, 15)),
    is_turned=st.booleans(),
    scale=st.sampled_from((1.0, 1e-4, 1e3)),  # 1e-4 makes subnormal fp16
    seed=st.integers(0, 2**32),
)
def test_any_tensor_is_decoded_and_left_as_it_was(
    nf4, device, tally, shape, dtype, blocksize, nested, offset, is_turned, scale, seed
):
    weight, state = nf4.quantized(shape, dtype, device, blocksize, nested, seed)
    for scales in (state.state2.absmax, state.offset) if nested else (state.absmax,):
        scales.mul_(scale)
    packed = helpers.moved(weight.t() if is_turned else weight, offset)
    want = helpers.expected(packed, state)
    outs = [nf4.dequantize_nf4(packed, state) for _ in range(2)]
    assert outs[0].data_ptr() != outs[1].data_ptr(), "fresh"
    for out in outs:
        assert n_differing(nf4, tally, out, want) == 0
        assert out.untyped_storage().nbytes() == out.nbytes, "no more than the output"
    assert torch.equal(packed.view(-1), weight.view(-1)), "the weight was written to"


COUNTS = [40_000]  # on a CPU: a test of the test
COUNTS += [pytest.param(2**31 + more, marks=pytest.mark.gpu) for more in (2**25, 77)]


@pytest.mark.parametrize("n_weights", COUNTS)
def test_more_than_two_to_the_31_weights(nf4, device, tally, n_weights):
    """Of a length that divides no power of two: an index that overflows lands on other values."""
    rows = 61 if n_weights > 2**31 else 1
    weight, state = nf4.quantized((rows, 64 * 256), torch.bfloat16, device)
    want = dequantize_4bit(weight, state).view(-1)
    n_repeats = n_weights // len(want)
    weight = weight.view(-1).repeat(n_repeats + 1)[: -(-n_weights // 2)]
    n_blocks = -(-n_weights // 64)
    state.absmax = state.absmax.repeat(n_repeats + 1)[:n_blocks]
    state.state2.absmax = state.state2.absmax.repeat(n_repeats + 1)[: -(-n_blocks // 256)]
    state.shape = torch.Size((n_weights,))
    for _ in range(2):
        out = nf4.dequantize_nf4(weight, state)
        tail = out[n_repeats * len(want) :]
        assert n_differing(nf4, tally, tail, want[: len(tail)]) == 0
        for part in out[: -len(tail)].view(n_repeats, -1).split(512):
            wanted = want.expand_as(part).contiguous()
            assert n_differing(nf4, tally, part, wanted) == 0
        del out, tail, part


@pytest.mark.gpu
@pytest.mark.skipif(not os.path.exists(sanitize.SANITIZER), reason="no compute-sanitizer")
def test_the_sanitizer_finds_no_access_out_of_bounds_and_no_race():
    command = [sys.executable, shared.ROOT / "tools" / "sanitize.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
