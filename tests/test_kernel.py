"""The kernel: raw bits against bitsandbytes, by assembly and by loads.

Where there is no GPU, it runs through Triton's interpreter. The cases include those that
bitsandbytes' own tests name for 4-bit dequantization (test_functional.py, test_ops.py).
"""

import collections
import json
import math
from typing import NamedTuple

import helpers
import hypothesis
import pytest
import sanitize
import torch
from bitsandbytes.functional import (
    QuantState,
    create_dynamic_map,
    dequantize_4bit,
    get_4bit_type,
    quantize_4bit,
)
from helpers import DTYPES, STORAGES, same
from hypothesis import strategies as st

GPU = torch.cuda.is_available()
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
SHAPES = [
    (1, 1),
    (1, 7),
    (3, 5),
    (1, 64),
    (1, 4096),
    (33, 65),
    (127, 129),
    (8, 1000),
    (64, 64),
    (2048, 8),
    (8, 2048),
    (96, 640),
]
quick = pytest.mark.quick


# (warps, steps): the default, few and many words, and steps that a program's absmax2 cuts short
SIZES = [(4, 2), (1, 1), (2, 4), (4, 16)]


def launched(nf4, weight, state, size=(4, 2)):
    with helpers.sized(nf4, *size):
        return nf4.launched(weight, state)


@quick
@pytest.mark.skipif(GPU, reason="the emulation is for CPUs")
def test_the_emulated_assembly_is_what_runs(nf4, device, monkeypatch):
    """It is no silent fallback: each step looks every word up once."""
    monkeypatch.setattr(nf4, "SHUFFLES", nf4.tl.constexpr(True))
    run, asked = helpers.run_assembly, []

    def counting(*arguments):
        asked.append(arguments[1])
        return run(*arguments)

    monkeypatch.setattr(
        nf4.triton.runtime.interpreter.InterpreterBuilder, "create_inline_asm", counting
    )
    weight, state = nf4.quantized((64, 128), torch.float16, device)
    out = launched(nf4, weight, state)
    assert nf4.bits_differing(out, dequantize_4bit(weight, state)) == 0
    assert asked == [nf4._LOOK_UP.value] * (64 * 128 // 1024)


@quick
def test_the_emulated_shuffle():
    """32 threads in two segments of 16: a lane's bits above the fourth do not matter."""
    values = torch.arange(100, 164, dtype=torch.int32).numpy()
    lanes = (torch.arange(64, dtype=torch.int32) * 7 + 0x50).numpy()
    by_hand = [values[i // 16 * 16 + (i * 7 + 0x50) % 16] for i in range(64)]
    assert helpers.shuffle(values, lanes, 0x101F).tolist() == by_hand
    whole = [values[i // 32 * 32 + (i * 7 + 0x50) % 32] for i in range(64)]
    assert helpers.shuffle(values, lanes, 0x1F).tolist() == whole != by_hand
    clamped = helpers.shuffle(
        values, lanes, 0x1007
    )  # beyond lane 7 of a segment a thread gets its own value
    assert clamped[0] == values[0x50 % 16] and clamped[2] == values[2]


WRONG_ASSEMBLY = {
    "the other nibble": ("4, 0, 12, 8, 20, 16, 28, 24", "0, 4, 8, 12, 16, 20, 24, 28"),
    "lanes beyond 7 out of reach": ('"0x101f"', '"0x1007"'),
    "the word instead of the entry": ("entry, shifted, {half", "$8, shifted, {half"),
    "every second entry": ("lane, lane, 15;", "lane, lane, 14;"),
}


@quick
@pytest.mark.parametrize("name", WRONG_ASSEMBLY)
def test_wrong_assembly_shows(device, name):
    """By the emulation on a CPU, by the card on a GPU."""
    wrong = helpers.load("nf4_wrong_assembly", WRONG_ASSEMBLY[name])
    wrong.SHUFFLES = wrong.tl.constexpr(True)
    weight, state = wrong.every_combination(torch.float16, device)
    out = launched(wrong, weight, state)
    assert wrong.bits_differing(out, wrong.spec(weight, state)) > 0


@quick
@pytest.mark.skipif(GPU, reason="the compiled kernel is measured there")
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype, ints", [(torch.float16, 4), (torch.float32, 8)])
def test_the_same_traffic_is_all_that_a_dequantization_moves(nf4, nested, dtype, ints):
    """Each word and its block's absmax arrive in what is written."""
    weight, state = nf4.quantized((64, 64), dtype, "cpu", nested=nested)
    out = torch.empty((64, 64), dtype=dtype)
    arguments = (out, weight, state.absmax, 32, 2, ints, 8)
    nf4._same_traffic_kernel[(64 * 64 // (32 * 2 * 8),)](*arguments)
    words = weight.view(-1).view(torch.int32) + state.absmax.int().repeat_interleave(8)
    assert torch.equal(out.view(torch.int32).view(-1), words.repeat_interleave(ints))


@quick
@pytest.mark.skipif(GPU, reason="the emulation is for CPUs")
@pytest.mark.parametrize("edit", [("shfl.sync.idx.b32", "shfl.sync.up.b32"), ("=&r,", "=r,")])
def test_the_emulation_refuses_what_it_does_not_know(edit):
    """And outputs that may share a register with the word, which is read after they are written."""
    wrong = helpers.load("nf4_unknown_assembly", edit)
    wrong.SHUFFLES = wrong.tl.constexpr(True)
    with pytest.raises(Exception, match="knows no shfl.sync.up.b32|outputs are written early"):
        launched(wrong, *wrong.quantized((64, 64), torch.float16, "cpu"))


@quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(nf4, device, look_up, shape, dtype):
    weight, state = nf4.quantized(shape, dtype, device)
    want = nf4.spec(weight, state)
    if GPU or shape[1] % 64 == 0:
        assert nf4.bits_differing(want, dequantize_4bit(weight, state)) == 0
    for _ in range(2 if GPU else 1):  # on a GPU the second call is the kept launch
        out = nf4.dequantize_nf4(weight, state)
        assert (
            out.dtype == dtype
            and nf4.bits_differing(out, want.t() if weight.shape[0] == 1 else want) == 0
        )


@quick
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_nibble_with_every_absmax_code(nf4, device, look_up, dtype):
    weight, state = nf4.every_combination(dtype, device)
    blocks = state.absmax.repeat_interleave(32).long() * 16
    packed = weight.view(-1)
    for nibbles in (packed >> 4, packed & 15):
        assert (blocks + nibbles.long()).unique().numel() == 16 * 256
    want = nf4.spec(weight, state)
    assert nf4.bits_differing(want, dequantize_4bit(weight, state)) == 0
    for size in SIZES:
        assert nf4.bits_differing(launched(nf4, weight, state, size), want) == 0, size


@pytest.mark.parametrize("offset", [pytest.param(0, marks=quick), 1])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_sizes(nf4, device, look_up, dtype, blocksize, nested, offset):
    # Rows of whole blocks: where blocks cross rows, bitsandbytes 0.50.2 goes wrong on the CPU.
    weight, state = nf4.quantized((2, 4096), dtype, device, blocksize, nested)
    want = dequantize_4bit(weight, state)
    packed = helpers.moved(weight, offset) if offset else weight
    assert nf4.bits_differing(nf4.dequantize_nf4(packed, state), want) == 0


@pytest.mark.parametrize("blocksize2", (32, 64, 1024))
@pytest.mark.parametrize("blocksize", (32, 512))
def test_other_sizes_of_the_nested_blocks(nf4, device, look_up, blocksize, blocksize2):
    """bitsandbytes takes 256. Where a program would need two absmax2, it takes fewer steps."""
    weight, state = nf4.quantized((2, 1024 * 5), torch.float16, device, blocksize)
    state.state2.blocksize = blocksize2
    state.state2.absmax = torch.rand(-(-state.absmax.numel() // blocksize2), device=device) + 0.5
    want = nf4.spec(weight, state)
    for size in SIZES:
        assert nf4.bits_differing(launched(nf4, weight, state, size), want) == 0, size


@pytest.mark.parametrize("blocksize", [128, 512, 4096])
def test_blocks_across_rows(nf4, device, look_up, blocksize):
    weight, state = nf4.quantized((128, 192), torch.float16, device, blocksize)
    assert nf4.bits_differing(nf4.dequantize_nf4(weight, state), nf4.spec(weight, state)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (1, 4097), (64, 64), (64, 96)])
def test_every_element_is_written_and_nothing_beyond(nf4, device, shape, dtype):
    weight, state = nf4.quantized(shape, dtype, device)
    described, n = helpers.described(nf4, weight, state), math.prod(shape)
    for size in SIZES:
        buffer = torch.full((n + 64,), float("nan"), dtype=dtype, device=device)
        with helpers.sized(nf4, *size):
            programs, options = nf4.plan(described, aligned=True)
        kernel = nf4._dequantize_nf4_kernel[(programs,)]
        kernel(buffer, *described[:6], n, **options)
        assert nf4.bits_differing(buffer[:n].view(shape), nf4.spec(weight, state)) == 0
        assert buffer[n:].isnan().all()


@quick
@pytest.mark.parametrize("offset", range(1, 17))
def test_addresses(nf4, device, look_up, offset):
    weight, state = nf4.quantized((64, 128), torch.bfloat16, device)
    want = dequantize_4bit(weight, state)
    packed = helpers.moved(weight, offset)
    for _ in range(2 if GPU else 1):
        assert nf4.bits_differing(nf4.dequantize_nf4(packed, state), want) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e30, 1e-30, 0.0])
def test_extreme_scales(nf4, device, look_up, scale, dtype):
    weight, state = nf4.quantized((64, 64), dtype, device)
    state.state2.absmax.fill_(scale)
    ours, theirs = nf4.dequantize_nf4(weight, state), dequantize_4bit(weight, state)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert nf4.bits_differing(ours.nan_to_num(123.0), theirs.nan_to_num(123.0)) == 0


@pytest.mark.parametrize("offset", [-1.0, 0.0, float("nan"), float("-inf")])
def test_strange_offsets(nf4, device, look_up, offset):
    weight, state = nf4.quantized((64, 64), torch.float16, device)
    state.offset.fill_(offset)
    ours, theirs = nf4.dequantize_nf4(weight, state), dequantize_4bit(weight, state)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert nf4.bits_differing(ours.nan_to_num(1.0), theirs.nan_to_num(1.0)) == 0


SMALLEST = torch.finfo(torch.float32).smallest_normal  # 1.2e-38
TINY = [(scale, offset) for scale in (1e-30, 1e-37, 1e-38, 3e-39) for offset in (0.0, -0.0, scale)]


def with_scales(nf4, dtype, nested, scale, offset):
    """A weight on the CPU, and its state: products at and below the smallest normal number."""
    weight, state = nf4.quantized((64, 128), dtype, "cpu", nested=nested)
    if nested:
        state.state2.absmax.fill_(scale)
        state.offset.fill_(offset)
    else:
        state.absmax.mul_(scale)
    return weight, state


def compiled_call(nf4, device):
    torch._dynamo.reset()
    backend = nf4.GraphCounter(device)
    return torch.compile(nf4.dequantize_nf4, fullgraph=True, backend=backend), backend


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_below_the_smallest_normal_number(nf4, device, look_up, tally, dtype, nested):
    """On a GPU they are flushed to zero, as bitsandbytes' build does; on a CPU they are kept.

    There bitsandbytes itself is compared in fp16 and fp32 only: AVX512's rounding to bf16, which
    it uses where the processor has it, flushes.
    """
    compiled, backend = compiled_call(nf4, device)
    told_apart = 0  # weights whose bits depend on whether products are flushed
    for scale, offset in TINY if nested else TINY[::3]:
        weight, state = with_scales(nf4, dtype, nested, scale, offset)
        kept = nf4.spec(weight, state)
        weight = weight.to(device)
        state.to(device)
        want = dequantize_4bit(weight, state) if GPU or dtype != torch.bfloat16 else kept
        told_apart += nf4.bits_differing(kept, want.cpu())
        outs = {
            "first call": nf4.dequantize_nf4(weight, state),
            "later call": nf4.dequantize_nf4(weight, state),
            "compiled": compiled(weight, state),
        }
        for name, out in outs.items():
            assert helpers.differing(nf4, tally, out, want) == 0, (name, scale, offset)
    assert backend.graphs == 1 and backend.compiled == GPU
    if dtype != torch.float16:  # where all of these are zeros
        assert (kept.abs() < SMALLEST).float().mean() > 0.9
        assert (told_apart > 0) == GPU


@pytest.mark.gpu
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_that_flushes_nothing_is_noticed(device, dtype, nested):
    plain = helpers.load("nf4_plain_products", ("libdevice.mul_rn(a, b)", "a * b"))
    weight, state = with_scales(plain, dtype, nested, 1e-38, 0.0)
    weight = weight.to(device)
    state.to(device)
    want = dequantize_4bit(weight, state)
    assert plain.bits_differing(launched(plain, weight, state), want) > 1000


@pytest.mark.parametrize("dtype", DTYPES)
def test_signs_of_zeros(nf4, device, look_up, tally, dtype):
    """The product is a zero of either sign, the offset -0.0: their sum has the product's sign."""
    weight, state = with_scales(nf4, dtype, nested=True, scale=0.0, offset=-0.0)
    want = nf4.spec(weight, state)
    negative = want.signbit().sum()
    assert not want.any() and 0 < negative < want.numel()
    weight = weight.to(device)
    state.to(device)
    assert helpers.differing(nf4, tally, dequantize_4bit(weight, state).cpu(), want) == 0
    compiled, _ = compiled_call(nf4, device)
    for dequantize in (nf4.dequantize_nf4, nf4.dequantize_nf4, compiled):
        assert helpers.differing(nf4, tally, dequantize(weight, state).cpu(), want) == 0


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_states_made_under_another_default_dtype(nf4, device, look_up, tally, dtype, default):
    """bitsandbytes adds an offset of any dtype in fp32, and never reads the code."""
    torch.set_default_dtype(default)
    try:
        quantized = nf4.quantized((64, 128), dtype, device)
        weight, state = nf4.quantized((64, 128), dtype, device)
        loaded = QuantState.from_dict(state.as_dict(packed=True), device=torch.device(device))
    finally:
        torch.set_default_dtype(torch.float32)
    assert default in (quantized[1].code.dtype, loaded.offset.dtype)
    compiled, _ = compiled_call(nf4, device)
    for packed, other in (quantized, (weight, loaded)):
        want = dequantize_4bit(packed, other)
        for dequantize in (nf4.dequantize_nf4, nf4.dequantize_nf4, compiled):
            assert helpers.differing(nf4, tally, dequantize(packed, other), want) == 0


@pytest.mark.skipif(GPU, reason="rounding by hand is the interpreter's")
def test_bf16_is_rounded_to_nearest_even_on_the_cpu(nf4):
    """All the patterns that decide a rounding: ties, carries, subnormals, infinities, NaN."""
    high = (
        torch.tensor([0, 1, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x0080, 0x8001], dtype=torch.int32)
        << 16
    )
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    values = (high[:, None] | low).view(torch.float32).flatten()
    values = torch.nn.functional.pad(values, (0, 64 - values.numel()))
    want, out = values.to(torch.bfloat16), torch.empty(64, dtype=torch.bfloat16)
    rounding = {"nf4": nf4, "tl": nf4.tl, "triton": nf4.triton}
    source = """
@triton.jit
def round_kernel(out_ptr, in_ptr):
    at = tl.arange(0, 64)
    tl.store(out_ptr + at, nf4._rounded(tl.load(in_ptr + at), tl.bfloat16))
"""
    helpers.execute(source, "round", rounding)
    rounding["round_kernel"][(1,)](out, values)
    assert torch.equal(out.isnan(), want.isnan())
    assert nf4.bits_differing(out.nan_to_num(9.0), want.nan_to_num(9.0)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_states_own_code_is_followed(nf4, device, look_up, dtype):
    """bitsandbytes' kernels have NF4 built in; we follow what the state says."""
    for shape in ((64, 128), (3, 5)):
        weight, state = nf4.quantized(shape, dtype, device)
        state.code = state.code.flip(0).contiguous() * 1.5
        want = nf4.spec(weight, state)
        outputs = [nf4.dequantize_nf4(weight, state) for _ in range(2)]
        outputs += [
            torch.compile(nf4.dequantize_nf4, backend=nf4.GraphCounter(device))(weight, state)
        ]
        assert all(nf4.bits_differing(out, want) == 0 for out in outputs)


# Mean absolute and mean relative error of normally distributed weights, as bitsandbytes'
# test_functional.py has them.
PUBLISHED = {
    64: (0.072792, 0.203299),
    128: (0.076835, 0.215252),
    256: (0.080326, 0.226044),
    512: (0.083535, 0.236021),
    1024: (0.086603, 0.245365),
    2048: (0.089592, 0.254146),
    4096: (0.092537, 0.262457),
}
TOLERANCE = (
    1e-3 if GPU else 8e-3
)  # over 16 million weights (they deviate by up to 3e-4), over 33 thousand


def errors(values, out):
    """Mean absolute and mean relative error."""
    error = (values - out).abs().float()
    return error.mean().item(), (error / (values.abs().float() + 1e-8)).mean().item()


def normal(device, dtype, rows=None):
    rows = rows or (4096 if device == "cuda" else 8)
    values = torch.randn(rows, 4096, generator=torch.Generator().manual_seed(0))
    return values.to(device=device, dtype=dtype)


@pytest.mark.parametrize("blocksize", PUBLISHED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_the_published_ones(nf4, device, tally, dtype, blocksize):
    values = normal(device, dtype)
    weight, state = quantize_4bit(values, blocksize=blocksize, quant_type="nf4")
    state = QuantState.from_dict(state.as_dict(), device=values.device)
    assert errors(values, same(nf4, tally, weight, state)) == pytest.approx(
        PUBLISHED[blocksize], abs=TOLERANCE
    )


def test_the_published_errors_tell_a_wrong_kernel(device):
    """Wrong by as little as a code that is one step off."""
    broken = helpers.load("nf4_off_by_one", WRONG_ASSEMBLY["every second entry"])
    broken.SHUFFLES = broken.tl.constexpr(True)
    values = normal(device, torch.float32, rows=1)
    weight, state = quantize_4bit(values, blocksize=64, quant_type="nf4")
    error, relative = errors(values, broken.dequantize_nf4(weight, state).view(values.shape))
    assert error > PUBLISHED[64][0] + 8e-3 and relative > PUBLISHED[64][1] + 8e-3


@pytest.mark.parametrize("blocksize", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_compressed_statistics(nf4, device, tally, dtype, blocksize):
    values = normal(device, dtype)
    for compressed in (False, True):
        weight, state = quantize_4bit(
            values, blocksize=blocksize, compress_statistics=compressed, quant_type="nf4"
        )
        error, relative = errors(values, same(nf4, tally, weight, state))
        assert error < 0.11 and relative < 0.28


@pytest.mark.parametrize("blocksize", [32, 64, 128, 256, 512])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_bytes_and_signed_scales(nf4, device, tally, dtype, storage, blocksize):
    shape = torch.Size((128, 128) if GPU else (8, 512))
    random = torch.Generator().manual_seed(blocksize)
    weight = torch.randint(0, 256, (shape.numel() // 2, 1), dtype=torch.uint8, generator=random).to(
        device
    )
    absmax = torch.randn(shape.numel() // blocksize, generator=random).to(device)
    code = get_4bit_type("nf4", device=device)
    state = QuantState(
        absmax, shape=shape, code=code, blocksize=blocksize, quant_type="nf4", dtype=dtype
    )
    same(nf4, tally, weight.view(-1).view(storage).view(-1, 1), state)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("blocksize", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_that_no_block_divides(nf4, device, tally, dtype, blocksize, compressed):
    weight, state = nf4.quantized((7, blocksize - 1), dtype, device, blocksize, compressed)
    out = same(nf4, tally, weight, state)
    assert out.shape == (7, blocksize - 1) and out.isfinite().all()


@pytest.mark.parametrize("blocksize", [64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_four_dimensions_not_contiguous(nf4, device, tally, dtype, blocksize):
    values = torch.randn(3, 4, 2, 256, device=device).to(dtype)[:, ::2]
    for source in (values, values.contiguous()):
        weight, state = quantize_4bit(source, blocksize=blocksize, quant_type="nf4")
        out = same(nf4, tally, weight, state)
    assert out.shape == (3, 2, 2, 256)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 576, 1280, 5120, 8192] if GPU else [64, 128])
def test_the_identity_comes_back_exactly(nf4, device, tally, dim, dtype):
    identity = torch.eye(dim, dtype=dtype, device=device)
    weight, state = quantize_4bit(identity, quant_type="nf4")
    assert torch.equal(same(nf4, tally, weight, state), identity)


class Case(NamedTuple):
    """Any NF4 tensor, and how it is passed."""

    shape: tuple
    dtype: torch.dtype
    blocksize: int
    nested: bool
    storage: torch.dtype
    offset: int  # of the packed weight in a larger buffer, in bytes
    form: str  # the packed weight's shape
    assembly: bool  # on a CPU: the code is looked up by the assembly, emulated, or by loads
    scale: float  # of the weights: 1e-4 makes subnormal fp16
    seed: int

    def whole(self):
        """Whether its programs are full and its words aligned."""
        return math.prod(self.shape) % 2048 == 0 and self.offset % 4 == 0


FORMS = {"(n, 1)": (-1, 1), "(1, n)": (1, -1), "flat": (-1,)}


def ragged_shapes():
    longest = 300 if GPU else 80
    matrix = st.tuples(st.integers(1, longest), st.integers(1, longest))
    vector = st.tuples(st.integers(1, longest**2))
    corner = st.sampled_from(
        ((1,), (1, 1), (2, 1), (1, 2), (8,), (1, 8), (8, 1), (1, 4096), (4096, 1))
    )
    return st.sampled_from((matrix, vector, corner)).flatmap(lambda kind: kind)


def whole_shapes():
    """Full programs: multiples of 2048 weights."""
    programs = st.integers(1, 150 if GPU else 3)
    return st.builds(
        lambda n, columns: (n * 2048 // columns, columns),
        programs,
        st.sampled_from((32, 64, 512, 2048)),
    )


@st.composite
def tensors(draw):
    def one_of(*choices):
        return draw(st.sampled_from(choices))

    whole = one_of(True, False)
    shape = draw(whole_shapes() if whole else ragged_shapes())
    n_bytes = (math.prod(shape) + 1) // 2
    offset = one_of(0, 0, 4, 8, 12) if whole else one_of(*[0] * 16, *range(16))
    possible = [
        dtype
        for dtype in STORAGES
        if n_bytes % dtype.itemsize == 0 and offset % dtype.itemsize == 0
    ]
    storage = one_of(torch.uint8, torch.uint8, *possible)
    blocksizes = (
        BLOCKSIZES if storage == torch.uint8 or not GPU else BLOCKSIZES[1::3]
    )  # each compiles for 0.1 s
    return Case(
        shape,
        one_of(*DTYPES),
        one_of(*blocksizes),
        one_of(True, False),
        storage,
        offset,
        one_of(*FORMS),
        one_of(True, True, False),
        one_of(1.0, 1e-4, 1e3),
        draw(st.integers(0, 2**32)),
    )


def packed(weight, case, form, offset):
    """A copy of the weight's bytes at an offset, in the case's storage dtype and the given form."""
    return helpers.moved(weight, offset).view(-1).view(case.storage).view(FORMS[form])


def check(nf4, device, tally, case):
    weight, state = nf4.quantized(
        case.shape, case.dtype, device, case.blocksize, case.nested, case.seed
    )
    for scale in (state.state2.absmax, state.offset) if case.nested else (state.absmax,):
        scale.mul_(case.scale)
    turned = (
        "(n, 1)" if case.form == "(1, n)" else "(1, n)"
    )  # as a backward pass asks, for the same bytes
    ours, outs = packed(weight, case, case.form, case.offset), []
    assert ours.data_ptr() % 16 == case.offset
    for form in (case.form, case.form, turned) if GPU else (case.form, turned):
        outs.append(
            out := nf4.dequantize_nf4(ours.view(FORMS[form]) if form == turned else ours, state)
        )
        want = helpers.expected(packed(weight, case, form, 0), state)
        assert out.shape == want.shape and out.dtype == want.dtype and out.stride() == want.stride()
        assert helpers.differing(nf4, tally, out, want) == 0, form
        assert out.untyped_storage().nbytes() == out.numel() * out.element_size()
    assert (
        len({tensor.untyped_storage().data_ptr() for tensor in (*outs, ours)}) == len(outs) + 1
    ), "not fresh"
    assert torch.equal(ours.view(-1).view(torch.uint8), weight.view(-1)), (
        "the packed weight was written to"
    )
    if GPU:
        assert state._nf4_launches, "no launch was kept, so the later calls test nothing new"


# More than 256 blocks, so two absmax2, with a ragged and an aligned weight.
RAGGED = Case((1, 9000), torch.float32, 32, True, torch.uint8, 3, "(n, 1)", True, 1.0, 0)
WHOLE = Case((288, 64), torch.float16, 64, True, torch.uint8, 0, "(n, 1)", True, 1.0, 0)


def run(nf4, device, tally, examples, **options):
    """Checks `examples` cases; how many of them were whole and how many not."""
    seen, shuffles = collections.Counter(), nf4.SHUFFLES

    @hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        **options,
    )
    @hypothesis.example(RAGGED)
    @hypothesis.example(RAGGED._replace(assembly=False))
    @hypothesis.example(WHOLE)
    @hypothesis.example(WHOLE._replace(assembly=False))
    @hypothesis.given(tensors())
    def each(case):
        seen["whole" if case.whole() else "ragged"] += 1
        if not GPU:
            nf4.SHUFFLES = nf4.tl.constexpr(case.assembly)
        check(nf4, device, tally, case)

    try:
        each()
    finally:
        nf4.SHUFFLES = shuffles
    return seen


def test_any_tensor(nf4, device, tally):
    examples = 3000 if GPU else 300
    seen = run(nf4, device, tally, examples)
    assert min(seen["whole"], seen["ragged"]) > examples / 6, seen


WRONG = {  # what is made wrong -> (text in the kernel, its replacement)
    "the look-up by loads": ("(word >> (4 * (i ^ 1)))", "(word >> (4 * i))"),
    "the look-up by assembly": WRONG_ASSEMBLY["the other nibble"],
    "a word out of bytes": ("byte.to(tl.int32) << (8 * i)", "byte.to(tl.int32) << (8 * (i ^ 1))"),
    "the last program's mask": (
        "is_there = index * 2 < n_valid",
        "is_there = index * 2 + 2 < n_valid",
    ),
    "the scale's place": ("absmax_ptr += first_block", "absmax_ptr += first_block + 1"),
    "one rounding of the scale too few": (
        "_mul_rn(code2, absmax2) + offset",
        "tl.fma(code2, absmax2, offset)",
    ),
    "absmax2": ("block // BLOCKSIZE2", "block // (BLOCKSIZE2 * 2)"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_is_caught(nf4, device, wrong):  # nf4 has the reference
    if wrong == "one rounding of the scale too few" and not GPU:
        pytest.skip("the interpreter rounds twice")
    if wrong == "the look-up by loads" and GPU:
        pytest.skip("loads are for the interpreter")
    broken, tally = helpers.load("nf4_wrong", WRONG[wrong]), collections.Counter()
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    with pytest.raises(AssertionError):
        run(broken, device, tally, 300, phases=phases)
    assert tally["differing"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2048, 8192), (1024, 4096), (4096, 14336)])
def test_harness_shapes_with_every_size(nf4, tally, shape, dtype):
    weight, state = nf4.quantized(shape, dtype, "cuda")
    want = dequantize_4bit(weight, state)
    for size in SIZES:
        for moved in (weight, helpers.moved(weight, 1)):
            out = launched(nf4, moved, state, size)
            assert helpers.differing(nf4, tally, out, want) == 0, size


def piece(weight, state, start, stop):
    """Weights start .. stop as a vector; start is a multiple of what one absmax2 covers."""
    block, block2 = state.blocksize, state.blocksize * 256
    absmax2 = state.state2.absmax[start // block2 : -(-stop // block2)]
    state2 = QuantState(absmax2, code=state.state2.code, blocksize=256, dtype=torch.float32)
    absmax = state.absmax[start // block : -(-stop // block)]
    part = QuantState(
        absmax,
        torch.Size((stop - start,)),
        state.code,
        block,
        "nf4",
        state.dtype,
        state.offset,
        state2,
    )
    return weight[start // 2 : -(-stop // 2)], part


COUNTS = [
    (1 << 15) - 3,
    *(pytest.param((1 << 31) + more, marks=pytest.mark.gpu) for more in (1 << 25, 77)),
]


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("blocksize", [64, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_than_two_to_the_31_weights(nf4, device, tally, dtype, blocksize, n):
    """Piece by piece, because bitsandbytes counts in 32 bits. (Small, to test the test.)"""
    if GPU and blocksize == 32 and dtype != torch.bfloat16:
        pytest.skip("one dtype with the other block size is enough for 10 GB each")
    blocks, byte = -(-n // blocksize), {"dtype": torch.uint8, "device": device}
    weight = torch.randint(0, 256, ((n + 1) // 2, 1), **byte)
    absmax2, code2 = (
        torch.rand(-(-blocks // 256), device=device) + 0.5,
        create_dynamic_map().to(device),
    )
    state = QuantState(
        torch.randint(0, 256, (blocks,), **byte),
        shape=torch.Size((n,)),
        code=get_4bit_type("nf4", device=device),
        blocksize=blocksize,
        quant_type="nf4",
        dtype=dtype,
        offset=torch.tensor(0.25, device=device),
        state2=QuantState(absmax2, code=code2, blocksize=256, dtype=torch.float32),
    )
    step = 1 << 28 if n > 1 << 30 else 1 << 14
    for _ in range(2 if GPU else 1):
        out = nf4.dequantize_nf4(weight, state)
        for start in range(0, n, step):
            stop = min(start + step, n)
            want = helpers.expected(*piece(weight, state, start, stop)).view(-1)
            assert helpers.differing(nf4, tally, out[start:stop], want) == 0, start
        del out


@pytest.mark.gpu
@pytest.mark.parametrize("compressed", [False, True])
def test_the_shape_of_bitsandbytes_benchmark(nf4, tally, compressed):
    values = torch.rand(49152, 12288, dtype=torch.float16, device="cuda")
    weight, state = quantize_4bit(
        values, blocksize=256, compress_statistics=compressed, quant_type="nf4"
    )
    del values
    for _ in range(2):
        same(nf4, tally, weight, state)


def watched(tool, *arguments):
    if sanitize.find_sanitizer() is None:
        pytest.skip("needs compute-sanitizer")
    errors, output = sanitize.watch(tool, *arguments)
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer: Device not supported")
    assert errors is not None, f"no summary in: {output[-3000:]}"
    return errors, output


@pytest.mark.gpu
@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_the_sanitizer_finds_nothing(tally, tool):
    """No access out of bounds, no race, no read of unwritten memory."""
    errors, output = watched(tool)
    tally["sanitizer_errors"] += errors
    assert errors == 0, output[-6000:]
    counts = json.loads(next(line for line in output.splitlines() if line.startswith('{"checked"')))
    tally["weights"] += counts["checked"]
    tally["differing"] += counts["differing"]
    assert counts["checked"] > 500_000 and counts["differing"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("tool", sanitize.BREAKABLE)
def test_the_sanitizer_finds_a_broken_launch(tool):
    errors, output = watched(tool, "--broken")
    assert errors > 0 and "_dequantize_nf4_kernel" in output, output[-3000:]


@pytest.mark.skipif(GPU, reason="on a GPU the sanitizer's runs do this")
def test_the_sanitizers_cases_on_a_cpu(nf4, tally):
    counts = sanitize.run(nf4, "cpu", shapes=sanitize.SHAPES[3:6])
    tally["weights"] += counts["checked"]
    tally["differing"] += counts["differing"]
    assert counts["checked"] > 50_000 and counts["differing"] == 0


def test_the_sanitizers_summaries_are_read():
    assert sanitize.errors_in("========= ERROR SUMMARY: 0 errors\n") == 0
    assert sanitize.errors_in("========= ERROR SUMMARY: 1 error\n") == 1
    assert (
        sanitize.errors_in(
            "========= RACECHECK SUMMARY: 16 hazards displayed (9 errors, 7 warnings)\n"
        )
        == 16
    )
    assert (
        sanitize.errors_in(
            "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
        )
        == 0
    )
    assert (
        sanitize.errors_in("Target application terminated before first instrumented API call")
        is None
    )
