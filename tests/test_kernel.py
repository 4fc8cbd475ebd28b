"""Each weight has bitsandbytes' bits, whatever the tensor; nothing is written beyond the output."""

import json
import math
import os
import subprocess
import sys
from importlib import metadata

import helpers
import hypothesis
import pytest
import sanitize
import shared
import torch
from bitsandbytes.functional import dequantize_4bit
from helpers import DTYPES
from hypothesis import strategies as st

GPU = torch.cuda.is_available()
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
SHAPES = [(3, 5), (64, 128), (288, 64), (1, 1), (2, 1), (128,), (2, 3, 64), (33, 65), (4, 1000)]
FACTORS = (1, 1e-30)  # of all scales
if GPU:  # there products below the smallest normal number are flushed; a CPU keeps them
    FACTORS += (1e-38, 3e-39)
PASSED = {  # how the packed weight may come: bytes are bytes
    "one byte on": lambda weight: helpers.moved(weight, 1),
    "transposed": lambda weight: weight.t(),
    "every second byte of a buffer": helpers.every_second,
    "one row, expanded": lambda weight: weight[:1].expand(weight.shape),
    "columns first": lambda weight: weight.view(8, -1).t().contiguous().t(),
}
for name in "int8 int16 int32 int64 float16 bfloat16 float32 float64 float8_e4m3fn bool".split():
    storage = getattr(torch, name)
    PASSED[f"in {name}"] = lambda weight, as_=storage: weight.view(-1).view(as_).view(-1, 1)
STATES = {  # {what: (where in the state, what it becomes)}; `code` bitsandbytes never reads
    "another code": ("code", lambda code: code.flip(0) * 1.5),
    "no code": ("code", lambda code: None),
    "a list of a code": ("code", lambda code: code.tolist()),
    "code in bf16": ("code", lambda code: code.bfloat16()),
    "offset in fp16": ("offset", lambda offset: offset.half()),
    "offset in bf16": ("offset", lambda offset: offset.bfloat16()),
    "offset in fp64": ("offset", lambda offset: offset.double()),
}
SCALES = {  # what is filled in: (state2.absmax, offset)
    "NaN": (math.nan, 0.0),
    "infinite": (math.inf, 0.0),
    "huge": (1e30, 1e30),
    "zeros of both signs": (0.0, -0.0),
    "subnormal in fp16": (1e-5, 1e-5),
    "the offset is NaN": (1.0, math.nan),
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
    for what, change in STATES.items():
        weight, state = nf4.quantized((5, 64), dtype, device)
        helpers.change(state, *change)
        yield what, weight, state, dequantize_4bit(weight, state)
    for name, (absmax2, offset) in SCALES.items():
        weight, state = nf4.quantized((16, 64), dtype, device)
        state.state2.absmax.fill_(absmax2)
        state.offset.fill_(offset)
        yield f"scales: {name}", weight, state, dequantize_4bit(weight, state)
    weight, state = nf4.quantized((16, 64), dtype, device)
    state.state2.absmax.view(torch.int32).fill_(0x7FFFFFFF)
    yield "scales: a NaN of ones, which rounds up to no NaN", weight, state, nf4.spec(weight, state)
    for blocksize2 in (32, 1024):  # bitsandbytes has 256
        weight, state = nf4.quantized((3, 1000), dtype, device, blocksize=32)
        state.state2.blocksize = blocksize2
        state.state2.absmax = torch.rand(-(-94 // blocksize2), device=device) + 0.5
        yield f"nested blocks of {blocksize2}", weight, state, nf4.spec(weight, state)
    for scale in (1 + 2**-8, 1 + 2**-11):  # half-way between two in bf16, in fp16
        weight, state = nf4.quantized((5, 64), dtype, device, nested=False)
        state.absmax.fill_(scale)
        yield f"ties: 1.0 x {scale}", weight, state, dequantize_4bit(weight, state)
    for shape in ((0, 64), (64, 0), (0,)):
        for nested in (True, False):
            weight, state = nf4.quantized((64, 64), dtype, device, nested=nested)
            state.shape, state.absmax = torch.Size(shape), state.absmax[:0]
            if nested:
                state.state2.absmax = state.state2.absmax[:0]
            yield f"no weights, {shape}", weight[:0], state, weight.new_empty(shape, dtype=dtype)


def n_differing(nf4, out, want):
    """How many weights differ in their bits; a NaN's payload does not matter."""
    facts = [(x.shape, x.stride(), x.dtype, x.device) for x in (out, want)]
    assert facts[0] == facts[1]
    are_nan = out.isnan() & want.isnan()
    return nf4.bits_differing(out.masked_fill(are_nan, 1), want.masked_fill(are_nan, 1))


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_weight_has_bitsandbytes_bits(nf4, device, dtype):
    for what, weight, state, want in table(nf4, dtype, device):
        for _ in range(2 if GPU else 1):  # on a GPU the second is a plan's
            assert n_differing(nf4, nf4.dequantize_nf4(weight, state), want) == 0, what


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_written_nor_read_beyond(nf4, device, dtype):
    for shape in ((1, 1), (3, 5), (1, 2049), (33, 65), (3, 64), (64, 96)):
        weight, state = nf4.quantized(shape, dtype, device)
        want = nf4.spec(weight, state)
        for offset in (0, 1):
            buffer = torch.full((want.numel() + 64,), math.nan, dtype=dtype, device=device)
            out = buffer[: want.numel()].view(shape)
            nf4.launch(out, *nf4.read(helpers.moved(weight, offset), state))
            assert buffer[want.numel() :].isnan().all(), shape
            assert n_differing(nf4, out, want) == 0, shape


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
    want = helpers.expected(packed, state)
    outs = [nf4.dequantize_nf4(packed, state) for _ in range(2)]
    assert outs[0].data_ptr() != outs[1].data_ptr(), "fresh"
    for out in outs:
        assert n_differing(nf4, out, want) == 0
        assert out.untyped_storage().nbytes() == out.nbytes, "no more than the output"
    assert torch.equal(packed.view(-1), weight.view(-1)), "the weight was written to"


COUNTS = [40_000]  # on a CPU: a test of the test
COUNTS += [pytest.param(2**31 + more, marks=pytest.mark.gpu) for more in (2**25, 77)]


@pytest.mark.parametrize("n_weights", COUNTS)
def test_more_than_two_to_the_31_weights(nf4, device, n_weights):
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
        assert n_differing(nf4, tail, want[: len(tail)]) == 0
        for part in out[: -len(tail)].view(n_repeats, -1).split(512):
            wanted = want.expand_as(part).contiguous()
            assert n_differing(nf4, part, wanted) == 0
        del out, tail, part


@pytest.mark.gpu
@pytest.mark.skipif(not os.path.exists(sanitize.SANITIZER), reason="no compute-sanitizer")
def test_the_sanitizer_finds_no_access_out_of_bounds_and_no_race():
    command = [sys.executable, shared.ROOT / "tools" / "sanitize.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


VERSIONS = ["3.5.1", "3.6.0", "3.9.0"]  # the lowest that is allowed, Colab's, the newest
MOST_INSTRUCTIONS = {"float16": 272, "bfloat16": 368, "float32": 272}


@pytest.mark.longest
@pytest.mark.parametrize("version", VERSIONS)
def test_the_record_is_what_this_triton_compiles(version):
    if GPU and version != metadata.version("triton"):
        pytest.skip("needs a package index")
    if version == "3.9.0" and sys.version_info < (3, 11):
        pytest.skip("not published for this Python")
    # In a process of its own: the interpreter and the compiler cannot share one.
    command = [sys.executable, shared.ROOT / "tools" / "sm_75.py", version]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout.splitlines()[-1])
    assert not any(row["ffma"] for row in compiled), "an FMA skips a rounding: use _mul_rn(a, b)"
    recorded = [row for row in shared.stored("sm_75") if row["triton"] == version]
    assert compiled == recorded, "to be recorded by .venv/bin/python tools/sm_75.py --record"


def test_the_code_for_a_t4_is_lean():
    """A T4 has 64 registers for each of its threads when it is full of them: these are no more."""
    rows = shared.stored("sm_75")
    assert len(rows) == 3 * 3 * 2, "of each version and dtype: nested and plain"
    for row in rows:
        assert row["triton"] in VERSIONS
        assert row["registers"] <= 64 and row["spills"] == 0 and row["ffma"] == 0, row
        assert row["shared"] == 0 or row["dtype"] == "float32", row
        assert row["word_load_bits"] == "32" and row["shuffles"] == 2 * 8, row
        assert row["store_bits"].split()[-1] == "128", row  # of all programs but the last
        assert row["instructions"] <= MOST_INSTRUCTIONS[row["dtype"]], row
