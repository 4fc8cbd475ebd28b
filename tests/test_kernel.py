"""Each weight has bitsandbytes' bits, whatever the tensor; nothing is written beyond the output.

Without a GPU the kernel runs through Triton's interpreter, its assembly emulated.
"""

import collections
import math
import os
import subprocess
import sys

import helpers
import hypothesis
import pytest
import sanitize
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from helpers import DTYPES, ROOT
from hypothesis import strategies as st

GPU = torch.cuda.is_available()
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
SHAPES = [(3, 5), (64, 128), (288, 64), (1, 1), (128,), (2, 3, 64), (33, 65), (4, 1000)]
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
PASSED = {  # how the packed weight may come
    "one byte on": lambda weight: helpers.moved(weight, 1),
    "transposed": lambda weight: weight.t(),
    "in fp16": lambda weight: weight.view(-1).view(torch.float16).view(-1, 1),
    "in fp32": lambda weight: weight.view(-1).view(torch.float32).view(-1, 1),
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
    for name, (absmax2, offset) in SCALES.items():
        weight, state = nf4.quantized((16, 64), dtype, device)
        state.state2.absmax.fill_(absmax2)
        state.offset.fill_(offset)
        yield f"scales: {name}", weight, state, dequantize_4bit(weight, state)
    for blocksize2 in (32, 1024):  # bitsandbytes has 256
        weight, state = nf4.quantized((3, 1000), dtype, device, blocksize=32)
        state.state2.blocksize = blocksize2
        state.state2.absmax = torch.rand(-(-94 // blocksize2), device=device) + 0.5
        yield f"nested blocks of {blocksize2}", weight, state, nf4.spec(weight, state)
    for scale in (1 + 2**-8, 1 + 2**-11):  # half-way between two in bf16, in fp16
        weight, state = nf4.quantized((5, 64), dtype, device, nested=False)
        state.absmax.fill_(scale)
        yield f"ties: 1.0 x {scale}", weight, state, dequantize_4bit(weight, state)
    weight, state = nf4.quantized((5, 64), dtype, device)
    state.code = state.code.flip(0) * 1.5  # bitsandbytes has its own built in
    yield "another code", weight, state, nf4.spec(weight, state)


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


def guarded(nf4, weight, state):
    """(the kernel's output in a larger buffer of NaNs, what comes after it there)."""
    tensors, kind = nf4.read(weight, state)
    n_weights = math.prod(state.shape)
    buffer = torch.full((n_weights + 64,), math.nan, dtype=state.dtype, device=weight.device)
    out = buffer[:n_weights].view(state.shape)
    grid, arguments = nf4.launch_of(out, tensors, kind)
    nf4._dequantize_nf4_kernel[grid](*arguments)
    return out, buffer[n_weights:]


def ragged(nf4, dtype, device):
    """Rows (weight, QuantState, what is expected); the last is whole."""
    for shape in ((1, 1), (3, 5), (1, 2049), (33, 65), (3, 64), (64, 96)):
        weight, state = nf4.quantized(shape, dtype, device)
        for offset in (0, 1):
            yield helpers.moved(weight, offset), state, nf4.spec(weight, state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_written_beyond_the_output(nf4, device, look_up, tally, dtype):
    for weight, state, want in ragged(nf4, dtype, device):
        out, beyond = guarded(nf4, weight, state)
        assert beyond.isnan().all(), state.shape
        assert n_differing(nf4, tally, out, want) == 0, state.shape


@pytest.mark.quick
@pytest.mark.skipif(GPU, reason="there compute-sanitizer watches")
def test_each_load_is_aligned_and_inside_its_tensor(nf4, monkeypatch):
    """Another ends a process that has a GPU."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, inputs = InterpreterBuilder.create_masked_load, []

    def watched(builder, pointers, mask, *others):
        n_bytes = pointers.get_element_ty().primitive_bitwidth // 8
        for address in pointers.data[mask.data].astype("int64"):
            assert address % n_bytes == 0, "a load at an address that is not aligned"
            inside = [0 <= address - t.data_ptr() <= t.nbytes - n_bytes for t in inputs]
            assert any(inside), "a load beyond a tensor"
        return load(builder, pointers, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched)
    for weight, state, _ in ragged(nf4, torch.float16, "cpu"):
        inputs[:] = nf4.read(weight, state)[0]
        nf4.by_kernel_grid(weight, state)


TRUNCATED = "(_mul_rn(entries, scale[:, None]).to(tl.int32, bitcast=True) & -8192)"
FUSED = "code2.to(tl.float64) * absmax2.to(tl.float64) + offset.to(tl.float64)"
WRONG = {  # what is wrong: (text in the notebook, its replacement)
    "nibbles swapped": ("4 * (tl.arange(0, 8) ^ 1)", "4 * tl.arange(0, 8)"),
    "bytes exchanged by the shifts": ("4 * (tl.arange(0, 8) ^ 1)", "4 * (tl.arange(0, 8) ^ 3)"),
    "a nibble's high bit is lost, by loads": ("nibbles & 0xF", "nibbles & 0x7"),
    "a lane loads its neighbour's entry": ("lane & 0xF", "lane & 0xE"),
    "half of the entries out of reach": ("$2, 0x101f, -1", "$2, 0x1007, -1"),
    "bytes of a word exchanged": ("<< (8 * i)", "<< (8 * (i ^ 1))"),
    "the last byte is not read": ("byte_index * 2 < n_valid", "byte_index * 2 + 2 < n_valid"),
    "a weight too many is written": ("mask=index < n_valid", "mask=index <= n_valid"),
    "another block's absmax": ("word_start) // BLOCKSIZE", "word_start) // (2 * BLOCKSIZE)"),
    "another block's absmax2": ("+ block // BLOCKSIZE2", "+ block // (2 * BLOCKSIZE2)"),
    "product and sum fused": ("_mul_rn(code2, absmax2) + offset", f"({FUSED}).to(tl.float32)"),
    "truncated": ("_mul_rn(entries, scale[:, None])", f"{TRUNCATED}.to(tl.float32, bitcast=True)"),
    "subnormals kept": ("libdevice.mul_rn(a, b)", "a * b"),
}
BY_LOADS = "a nibble's high bit is lost, by loads"
ELSEWHERE = {BY_LOADS: GPU, "subnormals kept": not GPU}  # never run there


@pytest.mark.quick
@pytest.mark.parametrize("what", [what for what in WRONG if not ELSEWHERE.get(what)])
def test_a_wrong_kernel_is_found(nf4, device, what):
    wrong, counted = helpers.load("nf4_wrong", WRONG[what]), collections.Counter()
    wrong.SHUFFLES = wrong.tl.constexpr(what != BY_LOADS)
    for weight, state, want in ragged(nf4, torch.float32, device):
        out, beyond = guarded(wrong, weight, state)
        if n_differing(nf4, counted, out, want) or not beyond.isnan().all():
            return
    for _, weight, state, want in table(nf4, torch.float32, device):
        out = wrong.dequantize_nf4(weight, state)
        if n_differing(nf4, counted, out, want):
            return
    pytest.fail(f"{what}: not found among {counted['cases']} cases")


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
    command = [sys.executable, ROOT / "tools" / "sanitize.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
