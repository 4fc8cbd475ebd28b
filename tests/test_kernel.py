"""Each weight has bitsandbytes' bits, whatever the tensor; nothing is touched beyond its memory."""

import ctypes
import math
import mmap
import multiprocessing
import os
import subprocess
import sys
from functools import partial

import bits
import helpers
import hypothesis
import pytest
import sanitize
import shared
import t4
import torch
import triton
import triton.language as tl
from bits import assert_same_bits
from helpers import GPU, each_dtype
from hypothesis import strategies as st


@pytest.mark.quick
def test_the_pages_cases_have_bitsandbytes_bits(nf4, device):
    paths = {"dequantize_nf4": nf4.dequantize_nf4}
    rows = nf4.compare(nf4.cases(device), paths, bits.expected)
    rows += nf4.compare(nf4.cases_for_bitsandbytes(device), paths, bits.expected)
    assert len(rows) == 7 and not any(row["differing"] for row in rows), rows


# Weights that the page's cases do not have.

FORMS = {  # {what is unusual: what makes it of packed bytes}
    "transposed": lambda weight: weight.t(),
    "of one byte with stride 0": lambda weight: weight[:1].expand(weight.shape),
    "columns first": lambda weight: weight.view(8, -1).t().contiguous().t(),
}
for storage in "int8 int16 int32 int64 float16 bfloat16 float32 float64 float8_e4m3fn bool".split():
    dtype = getattr(torch, storage)
    FORMS[f"stored as {storage}"] = lambda weight, as_=dtype: weight.view(-1).view(as_).view(-1, 1)
SCALES = {  # {what is unusual: (state2.absmax, offset)}
    "NaN": (math.nan, 0.0),
    "infinite": (math.inf, 0.0),
    "huge": (1e30, 1e30),
    "zeros of both signs": (0.0, -0.0),
    "subnormal in fp16": (1e-5, 1e-5),
    "offset NaN": (1.0, math.nan),
}
DOUBLE = "offset in fp64 with a dimension"
TIES = {"fp16": 1 + 2**-11, "bf16": 1 + 2**-8}  # {dtype: a scale that it has to round}
SHAPES = [(128,), (2, 3, 64), (2, 1), (4, 1000), (288, 64)]  # the last has more than 256 blocks


@pytest.mark.quick
@each_dtype
@pytest.mark.parametrize("unusual", [*FORMS, *SCALES, DOUBLE, *TIES, *SHAPES], ids=str)
def test_unusual_weights_have_bitsandbytes_bits(nf4, device, unusual, dtype):
    if unusual in SHAPES:
        weight, state = nf4.quantized(unusual, dtype, device)
    elif unusual in TIES:
        weight, state = nf4.quantized((5, 64), dtype, device, nested=False)
        state.absmax.fill_(TIES[unusual])
    else:
        weight, state = nf4.quantized((16, 128), dtype, device)  # one whole program
    if unusual in FORMS:
        weight = FORMS[unusual](weight)
    if unusual in SCALES:
        absmax2, offset = SCALES[unusual]
        state.state2.absmax.fill_(absmax2)
        state.offset.fill_(offset)
    if unusual == DOUBLE:
        state.offset = state.offset.double().view(1)
    for _ in range(2 if GPU else 1):  # on a GPU a plan serves the second call
        assert_same_bits(nf4.dequantize_nf4(weight, state), bits.expected(weight, state))


@pytest.mark.quick
@each_dtype
@pytest.mark.parametrize("blocksize2", [32, 1024])
def test_nested_blocks_of_any_size_are_decoded(nf4, device, dtype, blocksize2):
    """bitsandbytes makes only those of 256, so they are compared with the page's formula."""
    weight, state = nf4.quantized((36, 1000), dtype, device, blocksize=32)
    state.state2.blocksize = blocksize2
    n_nested = -(-state.absmax.numel() // blocksize2)  # more than one in either size
    state.state2.absmax = torch.rand(n_nested, device=device) + 0.5
    assert_same_bits(nf4.dequantize_nf4(weight, state), nf4.spec(weight, state))


@pytest.mark.quick
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0,)], ids=str)
def test_an_empty_weight_gives_bitsandbytes_empty_output(nf4, device, shape, nested):
    weight, state = nf4.quantized((64, 64), torch.float16, device, nested=nested)
    state.shape, state.absmax = torch.Size(shape), state.absmax[:0]
    if nested:
        state.state2.absmax = state.state2.absmax[:0]
    wanted = weight.new_empty(shape, dtype=torch.float16)
    assert_same_bits(nf4.dequantize_nf4(weight[:0], state), wanted)
    if len(shape) == 2:  # of strides (1, 1), as bitsandbytes' is
        assert_same_bits(nf4.dequantize_nf4(weight[:0].view(1, 0), state), wanted.t())


def at_the_end_of_memory(tensor):
    """Copy the tensor to the end of a page; whoever touches a byte beyond it crashes."""
    n_pages = -(-tensor.nbytes // mmap.PAGESIZE)
    pages = mmap.mmap(-1, (n_pages + 1) * mmap.PAGESIZE)
    end = ctypes.addressof(ctypes.c_char.from_buffer(pages)) + n_pages * mmap.PAGESIZE
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), mmap.PAGESIZE, 0) == 0  # PROT_NONE
    offset = n_pages * mmap.PAGESIZE - tensor.nbytes
    copy = torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return copy.view(tensor.shape).copy_(tensor)


@pytest.mark.quick
@pytest.mark.skipif(GPU, reason="there compute-sanitizer looks, in a test below")
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("shape", [(1, 8), (3, 40), (1, 2040), (1, 2056), (64, 64)], ids=str)
def test_no_byte_beyond_a_tensor_is_touched(nf4, shape, nested):
    """Memory beyond a tensor need not exist. A fork launches the kernel, and may crash."""
    weight, state = nf4.quantized(shape, torch.float16, "cpu", nested=nested)
    tensors, kind = nf4.unpack(weight, state)
    tensors = [tensor if tensor is None else at_the_end_of_memory(tensor) for tensor in tensors]
    out = at_the_end_of_memory(torch.zeros(shape, dtype=torch.float16))
    launch = partial(nf4.launch, out, tensors, kind)
    process = multiprocessing.get_context("fork").Process(target=launch)
    process.start()
    process.join(30)
    process.kill()
    process.join()
    status = process.exitcode
    assert status == 0, f"status {status}; -11: memory beyond a tensor was touched, -9: it hung"
    assert_same_bits(out, nf4.spec(weight, state))  # the memory is shared


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
    dtype=st.sampled_from(helpers.DTYPES),
    blocksize=st.sampled_from((32, 256, 2048)),  # each is another kernel to compile
    nested=st.booleans(),
    offset=st.one_of(st.just(0), st.integers(0, 15)),
    is_turned=st.booleans(),
    scale=st.sampled_from((1.0, 1e-4, 1e3)),  # 1e-4 makes subnormal fp16
    seed=st.integers(0, 2**32),
)
def test_any_weight_is_decoded_and_left_as_it_was(
    nf4, device, shape, dtype, blocksize, nested, offset, is_turned, scale, seed
):
    weight, state = nf4.quantized(shape, dtype, device, blocksize, nested, seed)
    for scales in (state.state2.absmax, state.offset) if nested else (state.absmax,):
        scales.mul_(scale)
    packed = helpers.moved(weight.t() if is_turned else weight, offset)
    wanted = bits.expected(packed, state)
    outs = [nf4.dequantize_nf4(packed, state) for _ in range(2)]
    assert outs[0].data_ptr() != outs[1].data_ptr(), "the output is not fresh"
    for out in outs:
        assert_same_bits(out, wanted)
        assert out.untyped_storage().nbytes() == out.nbytes, "memory beside the output is kept"
    assert torch.equal(packed.view(-1), weight.view(-1)), "the weight was written to"


@pytest.mark.parametrize(
    "n_weights",
    [
        pytest.param(40_000, id="40,000, a control"),
        pytest.param(2**31 + 2**25, marks=pytest.mark.gpu, id="2^31 + 2^25"),
        pytest.param(2**31 + 72, marks=pytest.mark.gpu, id="2^31 + 72"),
    ],
)
def test_more_than_2_to_the_31_weights_are_right(nf4, device, n_weights):
    """The weight repeats a length that divides no power of two: indices that overflow are seen."""
    rows = 61 if n_weights > 2**31 else 1
    weight, state = nf4.quantized((rows, 64 * 256), torch.bfloat16, device)
    wanted = bits.expected(weight, state).view(-1)
    n_repeats = n_weights // len(wanted)
    weight = weight.view(-1).repeat(n_repeats + 1)[: -(-n_weights // 2)]
    n_blocks = -(-n_weights // 64)
    state.absmax = state.absmax.repeat(n_repeats + 1)[:n_blocks]
    state.state2.absmax = state.state2.absmax.repeat(n_repeats + 1)[: -(-n_blocks // 256)]
    state.shape = torch.Size((n_weights,))
    for _ in range(2):
        out = nf4.dequantize_nf4(weight, state)
        whole, tail = out.split((n_repeats * len(wanted), n_weights % len(wanted)))
        assert_same_bits(tail, wanted[: len(tail)])
        for part in whole.view(n_repeats, -1).split(512):
            assert_same_bits(part, wanted.expand_as(part).contiguous())
        del out, whole, tail, part


def test_bitsandbytes_is_not_asked_for_2_to_the_31_weights(nf4):
    """From there on, its kernels would write nothing, or a part, in silence."""
    n_weights = 2**31 + 64
    bytes_on_meta = partial(torch.empty, dtype=torch.uint8, device="meta")  # without memory
    floats_on_meta = partial(torch.empty, dtype=torch.float32, device="meta")
    tables = bytes_on_meta(n_weights // 64), floats_on_meta(()), floats_on_meta(131_073)
    tensors = bytes_on_meta(n_weights // 2), *tables, floats_on_meta(256)
    with pytest.raises(ValueError, match="fewer than 2.31 weights, .* got 2147483712"):
        nf4.by_bitsandbytes(tensors, ((n_weights,), torch.float16, 64, 256))


def test_bitsandbytes_is_not_given_gaps_at_an_odd_address(nf4):
    table = helpers.one_byte_on(torch.ones(8, 2))[:, 0]
    with pytest.raises(ValueError, match="float32 without gaps or at a multiple of 4 bytes, got"):
        nf4.readable(table)


@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (64, 64)], ids=str)
def test_an_output_of_bitsandbytes_can_be_trained_with(nf4, device, shape):
    """Although it was made without gradients."""
    weight, state = nf4.quantized(shape, torch.bfloat16, device)
    weight = torch.cat((weight[:1], weight))[1:]  # at an odd address
    with torch.no_grad():
        out = nf4.dequantize_nf4(weight, state)
    assert not out.requires_grad and not out._is_view()
    assert out.untyped_storage().nbytes() == out.nbytes
    out += torch.ones_like(out, requires_grad=True)
    assert out.requires_grad


@pytest.mark.gpu
@pytest.mark.longest
@pytest.mark.skipif(not os.path.exists(sanitize.SANITIZER), reason="no compute-sanitizer")
def test_compute_sanitizer_finds_no_wrong_access():
    command = [sys.executable, shared.ROOT / "tools" / "sanitize.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# The machine code for a T4. Triton can compile it on any machine, but not beside its interpreter.


@triton.jit
def fused(out_ptr, a_ptr, n, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    a = tl.load(a_ptr + i)
    tl.store(out_ptr + i, a * a + n)


def check_the_machine_code():
    signature = {"out_ptr": "*fp32", "a_ptr": "*fp32", "n": "fp32", "SIZE": "constexpr"}
    source = triton.compiler.ASTSource(fused, signature, {(3,): 128})
    target = triton.backends.compiler.GPUTarget("cuda", 75, 32)
    control = t4.instructions(triton.compile(source, target=target))
    assert any(name.startswith("FFMA") for name in control), "the count sees no FMA"
    nf4 = shared.load()
    columns = t4.count_ours(nf4)
    # Triton 3.6 and 3.9 make no more. If another one does, section 8 has to say so.
    for dtype, most in (("fp16", 173), ("bf16", 235)):
        compiled = t4.compile_ours(nf4, f"*{dtype}")
        nf4.evidence(compiled.asm["ptx"], n_spills=0)  # raises; spills are looked for below
        names = t4.instructions(compiled)
        assert len(names) <= most, (dtype, len(names))
        assert 16 * sum(columns[f"ours, {dtype}"].values()) == len(names), "16 weights a thread"
        assert not any(name.startswith("FFMA") for name in names), "an FMA skips a rounding"
        assert not any(name.startswith(("LDS", "STS", "LDL", "STL")) for name in names)
        stores = [name for name in names if name.startswith("STG")]
        assert len(stores) == 2 and all(".128" in name for name in stores), stores
        assert len([name for name in names if name.startswith("SHFL")]) == 2 * 8


def test_a_t4_gets_machine_code_without_fma_and_spills():
    """Two stores of 16 bytes are in it, too. A control has an FMA, so that the count can fail."""
    script = "import test_kernel; test_kernel.check_the_machine_code()"
    helpers.run_in_a_process(script, TRITON_INTERPRET="0")
