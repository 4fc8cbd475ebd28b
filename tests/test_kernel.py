"""Each weight has bitsandbytes' bits, whatever the tensor; nothing is touched beyond its memory."""

import ctypes
import math
import mmap
import multiprocessing
import os
import subprocess
import sys
from functools import partial

import helpers
import hypothesis
import pytest
import sanitize
import shared
import torch
from helpers import BLOCKSIZES, DTYPES, assert_same_bits, each_dtype
from hypothesis import strategies as st

GPU = torch.cuda.is_available()


# Each case is made by a function of (nf4, dtype, device), and returns (weight, QuantState).


def of_shape(nf4, dtype, device, *, shape):
    return nf4.quantized(shape, dtype, device)


def every_combination(nf4, dtype, device, *, factor):
    return nf4.every_combination(dtype, device, factor)


def in_blocks(nf4, dtype, device, *, blocksize, nested):
    return nf4.quantized((2, max(blocksize, 1024)), dtype, device, blocksize, nested)


def passed(nf4, dtype, device, *, make):
    weight, state = nf4.quantized((16, 128), dtype, device)  # one full program
    return make(weight), state


def with_scales(nf4, dtype, device, *, absmax2, offset):
    weight, state = nf4.quantized((16, 64), dtype, device)
    state.state2.absmax.fill_(absmax2)
    state.offset.fill_(offset)
    return weight, state


def with_offset(nf4, dtype, device, *, offset_dtype, shape):
    weight, state = nf4.quantized((64, 64), dtype, device)
    state.offset = state.offset.to(offset_dtype).view(shape)
    return weight, state


def with_ties(nf4, dtype, device, *, scale):
    weight, state = nf4.quantized((5, 64), dtype, device, nested=False)
    state.absmax.fill_(scale)
    return weight, state


def in_nested_blocks(nf4, dtype, device, *, blocksize2):
    weight, state = nf4.quantized((3, 1000), dtype, device, blocksize=32)
    state.state2.blocksize = blocksize2
    state.state2.absmax = torch.rand(-(-94 // blocksize2), device=device) + 0.5
    return weight, state


CASES = {}  # {id: function of (nf4, dtype, device)}
for factor in (1, 1e-30, 1e-38, 3e-39) if GPU else (1, 1e-30):  # a GPU flushes, a CPU keeps
    name = f"16 nibbles x 256 absmax, scales x {factor}"
    CASES[name] = partial(every_combination, factor=factor)
for shape in ((3, 5), (64, 128), (1, 1), (2, 1), (128,), (2, 3, 64), (33, 65), (4, 1000)):
    CASES[f"shape {shape}"] = partial(of_shape, shape=shape)
CASES["more than 256 blocks"] = partial(of_shape, shape=(288, 64))
for blocksize in BLOCKSIZES:
    for nested in (True, False):
        name = f"blocks of {blocksize}, {'nested' if nested else 'plain'}"
        CASES[name] = partial(in_blocks, blocksize=blocksize, nested=nested)
FORMS = {
    "one byte on": lambda weight: helpers.moved(weight, 1),
    "transposed": lambda weight: weight.t(),
    "as one row": lambda weight: weight.view(1, -1),
    "with gaps": helpers.every_second,
    "of one byte with stride 0": lambda weight: weight[:1].expand(weight.shape),
    "columns first": lambda weight: weight.view(8, -1).t().contiguous().t(),
}
for name in "int8 int16 int32 int64 float16 bfloat16 float32 float64 float8_e4m3fn bool".split():
    storage = getattr(torch, name)
    FORMS[f"in {name}"] = lambda weight, as_=storage: weight.view(-1).view(as_).view(-1, 1)
for name, make in FORMS.items():
    CASES[f"weight {name}"] = partial(passed, make=make)
SCALES = {  # {id: (state2.absmax, offset)}
    "NaN": (math.nan, 0.0),
    "infinite": (math.inf, 0.0),
    "huge": (1e30, 1e30),
    "zeros of both signs": (0.0, -0.0),
    "subnormal in fp16": (1e-5, 1e-5),
    "offset NaN": (1.0, math.nan),
}
for name, (absmax2, offset) in SCALES.items():
    CASES[f"scales {name}"] = partial(with_scales, absmax2=absmax2, offset=offset)
CASES["ties in bf16"] = partial(with_ties, scale=1 + 2**-8)
CASES["ties in fp16"] = partial(with_ties, scale=1 + 2**-11)
for offset_dtype in (torch.float16, torch.bfloat16, torch.float64):
    for shape in ((), (1,)):
        make = partial(with_offset, offset_dtype=offset_dtype, shape=shape)
        CASES[f"offset in {offset_dtype} of shape {shape}"] = make
for blocksize2 in (32, 1024):  # bitsandbytes makes 256
    CASES[f"nested blocks of {blocksize2}"] = partial(in_nested_blocks, blocksize2=blocksize2)


@pytest.mark.quick
@each_dtype
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_each_weight_has_bitsandbytes_bits(nf4, device, make, dtype):
    weight, state = make(nf4, dtype, device)
    if make.func is in_nested_blocks:  # of which bitsandbytes makes only 256
        wanted = nf4.spec(weight, state)
    else:
        wanted = helpers.expected(weight, state)
    for _ in range(2 if GPU else 1):  # on a GPU the second is a plan's
        assert_same_bits(nf4.dequantize_nf4(weight, state), wanted, weight, state)


@pytest.mark.quick
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0,)], ids=str)
def test_a_weight_of_nothing_gives_bitsandbytes_empty_output(nf4, device, shape, nested):
    weight, state = nf4.quantized((64, 64), torch.float16, device, nested=nested)
    state.shape, state.absmax = torch.Size(shape), state.absmax[:0]
    if nested:
        state.state2.absmax = state.state2.absmax[:0]
    wanted = weight.new_empty(shape, dtype=torch.float16)
    forms = {weight[:0]: wanted}
    if len(shape) == 2:
        forms[weight[:0].view(1, 0)] = wanted.t()  # of strides (1, 1), as bitsandbytes'
    for form, wanted in forms.items():
        assert_same_bits(nf4.dequantize_nf4(form, state), wanted, form, state)


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
def test_nothing_is_touched_beyond_a_tensor(nf4, shape, nested):
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
    assert process.exitcode == 0, "a status of -11 says that memory beyond a tensor was touched"
    assert_same_bits(out, nf4.spec(weight, state), weight, state)  # the memory is shared


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
    nf4, device, shape, dtype, blocksize, nested, offset, is_turned, scale, seed
):
    weight, state = nf4.quantized(shape, dtype, device, blocksize, nested, seed)
    for scales in (state.state2.absmax, state.offset) if nested else (state.absmax,):
        scales.mul_(scale)
    packed = helpers.moved(weight.t() if is_turned else weight, offset)
    wanted = helpers.expected(packed, state)
    outs = [nf4.dequantize_nf4(packed, state) for _ in range(2)]
    assert outs[0].data_ptr() != outs[1].data_ptr(), "the output is not fresh"
    for out in outs:
        assert_same_bits(out, wanted, packed, state)
        assert out.untyped_storage().nbytes() == out.nbytes, "memory beside the output is kept"
    assert torch.equal(packed.view(-1), weight.view(-1)), "the weight was written to"


@pytest.mark.parametrize(
    "n_weights",
    [
        pytest.param(40_000, id="40,000: shows that this test can pass"),
        pytest.param(2**31 + 2**25, marks=pytest.mark.gpu, id="2^31 + 2^25"),
        pytest.param(2**31 + 72, marks=pytest.mark.gpu, id="2^31 + 72"),
    ],
)
def test_more_than_two_to_the_31_weights(nf4, device, n_weights):
    """The weight repeats a length that divides no power of two: indices that overflow are seen."""
    rows = 61 if n_weights > 2**31 else 1
    weight, state = nf4.quantized((rows, 64 * 256), torch.bfloat16, device)
    wanted = helpers.expected(weight, state).view(-1)
    n_repeats = n_weights // len(wanted)
    weight = weight.view(-1).repeat(n_repeats + 1)[: -(-n_weights // 2)]
    n_blocks = -(-n_weights // 64)
    state.absmax = state.absmax.repeat(n_repeats + 1)[:n_blocks]
    state.state2.absmax = state.state2.absmax.repeat(n_repeats + 1)[: -(-n_blocks // 256)]
    state.shape = torch.Size((n_weights,))
    for _ in range(2):
        out = nf4.dequantize_nf4(weight, state)
        whole, tail = out.split((n_repeats * len(wanted), n_weights % len(wanted)))
        assert_same_bits(tail, wanted[: len(tail)], weight, state)
        for part in whole.view(n_repeats, -1).split(512):
            assert_same_bits(part, wanted.expand_as(part).contiguous(), weight, state)
        del out, whole, tail, part


def test_2_to_the_31_weights_without_a_plan_are_refused(nf4):
    """From 2^31 weights on, its kernels would write nothing, or a part, in silence."""
    kind = ((2**31 + 1,), torch.float16, 64, 256)
    with pytest.raises(ValueError, match="fewer than 2.31 weights, .* got 2147483649"):
        nf4.by_bitsandbytes((None,) * 5, kind)


@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (64, 64)], ids=str)
def test_bitsandbytes_output_is_an_ordinary_tensor(nf4, device, shape):
    """It takes part in training, although it was made without gradients."""
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
def test_the_sanitizer_finds_no_access_out_of_bounds():
    command = [sys.executable, shared.ROOT / "tools" / "sanitize.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# The machine code for a T4, which any machine can compile; in a process without the interpreter.

FUSED = """
import triton, triton.language as tl

@triton.jit
def fused(out_ptr, a_ptr, n, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    a = tl.load(a_ptr + i)
    tl.store(out_ptr + i, a * a + n)
"""
ON_A_T4 = (
    f"FUSED = {FUSED!r}"
    + """
import os
os.environ.pop("TRITON_INTERPRET", None)
import shared, t4, triton
nf4 = shared.load()
shared.execute(FUSED, "fused", globals())

signature = {"out_ptr": "*fp32", "a_ptr": "*fp32", "n": "fp32", "SIZE": "constexpr"}
source = triton.compiler.ASTSource(fused, signature, {(3,): 128})
target = triton.backends.compiler.GPUTarget("cuda", 75, 32)
control = t4.instructions(triton.compile(source, target=target))
assert any(name.startswith("FFMA") for name in control), "the count sees no FMA"
pipe = "fp32: products and sums; also moves and addresses"
assert t4.by_pipe(["FFMA"], 2)[pipe] == 1 / 2
columns = t4.count_ours(nf4)
for dtype, most in (("fp16", 173), ("bf16", 235)):
    compiled = t4.compile_ours(nf4, f"*{dtype}")
    nf4.evidence(compiled.asm["ptx"], n_spills=0)  # raises; the spills are looked for below
    names = t4.instructions(compiled)
    per_weight = sum(columns[f"ours, {dtype}"].values())
    assert 16 * per_weight == len(names), "a thread makes 16 weights"
    assert not any(name.startswith("FFMA") for name in names), "an FMA skips a rounding"
    stores = [name for name in names if name.startswith("STG")]
    assert len(stores) == 2 and all(".128" in name for name in stores), stores
    assert not any(name.startswith(("LDS", "STS", "LDL", "STL")) for name in names)
    assert len([name for name in names if name.startswith("SHFL")]) == 2 * 8
    assert len(names) <= most, (dtype, len(names))
    assert compiled.metadata.shared == 0
"""
)


def test_the_machine_code_for_a_t4_is_lean():
    """Without an FMA (a control has one), without spills, with two stores of 16 bytes."""
    done = helpers.in_a_process(ON_A_T4)
    assert done.returncode == 0, done.stderr
