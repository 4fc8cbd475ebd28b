"""The ladder: the way from a naive kernel to the notebook's, and what was tried beside it.

    python tools/roads.py FILE            on a GPU: checks each road's bits, times it, counts its
                                          instructions; writes JSON
    python tools/roads.py --check         compares each road's bits on small matrices; without a GPU
                                          by the interpreter
    python tools/roads.py --instructions  prints {road: {dtype: instructions per weight in sm_75
                                          code}}; needs no GPU

Each is a process of its own, as tools/sm_75.py says. What is right is what bitsandbytes'
dequantize_4bit gives. A road is a kernel, or an edit of the notebook's, and serves what is timed:
nested absmax and blocks of 64, whole programs.
"""

import datetime
import json
import os
import sys
from functools import partial
from pathlib import Path

import torch

os.environ.pop("TRITON_INTERPRET", None)
if "--check" in sys.argv[1:] and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [
    str(Path(__file__).resolve().parent.parent / folder) for folder in ("tests", "tools")
]

import helpers  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from bitsandbytes.functional import dequantize_4bit  # noqa: E402

SHAPE = (4096, 14336)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

ours = helpers.load()

# Two loops: the first loads all scales, then the words are loaded, and the second does the rest.
WORDS_LOADED = "    words = _load_words(byte_ptr, thread, n_valid, STEPS, WHOLE)"
LOOKED_UP = "        codes = _look_up(words[step], code_ptr)  # [WORDS, 8]\n"
SECOND_LOOP = "    for step in tl.static_range(STEPS):\n"
two_loops = helpers.load(
    "roads_two_loops",
    (WORDS_LOADED + "  # issued first: the slowest", "    scales = ()"),
    (
        LOOKED_UP,
        "        scales = scales + (scale,)\n" + WORDS_LOADED + "\n" + SECOND_LOOP + LOOKED_UP,
    ),
    ("_mul_rn(codes, scale[:, None])", "_mul_rn(codes, scales[step][:, None])"),
)

POLICIES = {  # address: what our kernel does with what it loads there
    "word_ptr + step * WORDS": "evict_first",
    "absmax2_ptr + first_block // BLOCKSIZE2": "evict_last",
    "offset_ptr": "evict_last",
    "code2_ptr + absmax.to(tl.int32)": "evict_last",
}
without_policies = []
for address, policy in POLICIES.items():
    loaded = f'tl.load({address}, eviction_policy="{policy}")'
    without_policies.append((loaded, f"tl.load({address})"))
without_policies.append(("ld.global.nc.L1::evict_last.b32", "ld.global.nc.b32"))
no_policy = helpers.load("roads_no_policy", *without_policies)

STORED = "tl.store(out_ptr + index, weights"
output_first = helpers.load(
    "roads_output_first",
    (STORED + ")", STORED + ', eviction_policy="evict_first")'),
)

by_hand = helpers.load(
    "roads_by_hand",
    ("if INTERPRETED and DTYPE == tl.bfloat16:", "if DTYPE == tl.bfloat16:"),
)

for module in (ours, two_loops, no_policy, output_first, by_hand):
    module.SHUFFLES = tl.constexpr(True)  # in the interpreter, too, which is taught them
by_loads = helpers.load("roads_by_loads")
by_loads.SHUFFLES = tl.constexpr(False)

# What the kernels below share with ours.
INTERPRETED = ours.INTERPRETED
_mul_rn = ours._mul_rn
_rounded = by_hand._rounded
_SHUFFLE = tl.constexpr("shfl.sync.idx.b32 $0, $1, $2, 0x101f, -1;")
_SHARE = tl.constexpr(
    "shfl.sync.idx.b32 $0, $2, $3, 0x101f, -1; shfl.sync.idx.b32 $1, $2, $4, 0x101f, -1;"
)


@triton.jit
def _scale(absmax, absmax2, offset, code2_ptr):
    code2 = tl.load(code2_ptr + absmax.to(tl.int32), eviction_policy="evict_last")
    return _mul_rn(code2, absmax2) + offset


@triton.jit
def _chain(nibble, code_ptr):
    """Fifteen selects, each of which waits for the one before."""
    code = tl.load(code_ptr) + tl.zeros_like(nibble).to(tl.float32)
    for i in tl.static_range(1, 16):
        code = tl.where(nibble == i, tl.load(code_ptr + i), code)
    return code


@triton.jit
def _tree(nibble, code_ptr):
    """Eight selects by the lowest bit, four by the next, two, one."""
    pairs = ()
    for i in tl.static_range(8):
        even, odd = tl.load(code_ptr + 2 * i), tl.load(code_ptr + 2 * i + 1)
        pairs = pairs + (tl.where((nibble & 1) != 0, odd, even),)
    bit1 = (nibble & 2) != 0
    bit2 = (nibble & 4) != 0
    a = tl.where(bit1, pairs[1], pairs[0])
    b = tl.where(bit1, pairs[3], pairs[2])
    c = tl.where(bit1, pairs[5], pairs[4])
    d = tl.where(bit1, pairs[7], pairs[6])
    return tl.where((nibble & 8) != 0, tl.where(bit2, d, c), tl.where(bit2, b, a))


@triton.jit
def _code(nibble, code_ptr, DECODE: tl.constexpr):
    if DECODE == "chain":
        code = _chain(nibble, code_ptr)
    elif DECODE == "tree":
        code = _tree(nibble, code_ptr)
    else:
        code = tl.load(code_ptr + nibble, eviction_policy="evict_last")
    return code


@triton.jit
def _bytes_kernel(
    out_ptr,
    weight_ptr,
    absmax_ptr,
    code_ptr,
    offset_ptr,
    absmax2_ptr,
    code2_ptr,
    n_weights,
    BLOCKSIZE: tl.constexpr,
    BLOCKSIZE2: tl.constexpr,
    WORDS: tl.constexpr,
    STEPS: tl.constexpr,
    WHOLE: tl.constexpr,
    DECODE: tl.constexpr,  # "chain", "tree" or "loads"
):
    """Bytes, all of them masked, each with a scale of its own. Nested."""
    BYTES: tl.constexpr = WORDS * STEPS * 4
    start = tl.program_id(0).to(tl.int64) * BYTES
    at = start + tl.arange(0, BYTES)
    inside = at * 2 < n_weights
    block = at * 2 // BLOCKSIZE
    byte = tl.load(weight_ptr + at, mask=inside, other=0, eviction_policy="evict_first")
    byte = byte.to(tl.int32)
    absmax = tl.load(absmax_ptr + block, mask=inside, other=0)
    absmax2_ptr += block // BLOCKSIZE2
    absmax2 = tl.load(absmax2_ptr, mask=inside, other=0.0, eviction_policy="evict_last")
    offset = tl.load(offset_ptr, eviction_policy="evict_last")
    scale = _scale(absmax, absmax2, offset, code2_ptr)
    first = _mul_rn(_code(byte >> 4, code_ptr, DECODE), scale)
    second = _mul_rn(_code(byte & 0xF, code_ptr, DECODE), scale)
    weights = _rounded(tl.interleave(first, second), out_ptr.dtype.element_ty)
    index = start * 2 + tl.arange(0, BYTES * 2)
    tl.store(out_ptr + index, weights, mask=index < n_weights)


@triton.jit
def _pack(first, second, DTYPE: tl.constexpr):
    """Two fp32 rounded to 16 bits each, as one int32, the first in the low half."""
    first = _rounded(first, DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
    second = _rounded(second, DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
    return (first & 0xFFFF) | (second << 16)


@triton.jit
def _halves(first, second, upper):
    """The low halves of two registers as one int32, or the high halves."""
    first = first.to(tl.int32, bitcast=True)
    second = second.to(tl.int32, bitcast=True)
    if INTERPRETED:  # the emulation knows no prmt
        shift = tl.where(upper, 16, 0)
        return ((first >> shift) & 0xFFFF) | ((second >> shift) << 16)
    asm: tl.constexpr = "prmt.b32 $0, $1, $2, $3;"
    operands = [first, second, tl.where(upper, 0x7632, 0x5410)]
    return tl.inline_asm_elementwise(asm, "=r,r,r,r", operands, tl.int32, is_pure=True, pack=1)


@triton.jit
def _scaled_kernel(
    out_ptr,
    weight_ptr,
    absmax_ptr,
    code_ptr,
    offset_ptr,
    absmax2_ptr,
    code2_ptr,
    n_weights,
    BLOCKSIZE: tl.constexpr,
    BLOCKSIZE2: tl.constexpr,
    WORDS: tl.constexpr,
    STEPS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """A lane holds its entry of the code times the scale, in 16 bits each for the two blocks of
    its segment of 16 lanes. Nested, WHOLE, blocks of 64."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    start = tl.program_id(0).to(tl.int64) * (WORDS * STEPS)
    thread = tl.arange(0, WORDS)
    zero = tl.zeros_like(thread)
    upper = (thread & 8) != 0
    word_ptr = weight_ptr.to(tl.pointer_type(tl.int32)) + start + thread
    pair_ptr = out_ptr.to(tl.pointer_type(tl.int32)) + start * 4 + tl.arange(0, WORDS * 4)
    absmax2 = tl.load(absmax2_ptr + start // 8 // BLOCKSIZE2, eviction_policy="evict_last")
    offset = tl.load(offset_ptr, eviction_policy="evict_last")
    code = tl.load(code_ptr + thread % 16, eviction_policy="evict_last")
    words = ()
    scales = ()
    for step in tl.static_range(STEPS):
        words = words + (tl.load(word_ptr + step * WORDS, eviction_policy="evict_first"),)
        absmax = tl.load(absmax_ptr + start // 8 + thread // 8 + step * (WORDS // 8))
        scales = scales + (_scale(absmax, absmax2, offset, code2_ptr),)
    for step in tl.static_range(STEPS):
        operands = [scales[step], zero, zero + 8]  # the lanes that lead the two blocks
        first, second = tl.inline_asm_elementwise(
            _SHARE, "=&r,=&r,r,r,r", operands, (tl.float32,) * 2, is_pure=True, pack=1
        )
        table = _pack(_mul_rn(code, first), _mul_rn(code, second), DTYPE)
        table = table.to(tl.float32, bitcast=True)
        pairs = ()
        for i in tl.static_range(8):
            operands = [table, words[step] >> (4 * (i ^ 1))]
            pair = tl.inline_asm_elementwise(
                _SHUFFLE, "=r,r,r", operands, tl.float32, is_pure=True, pack=1
            )
            pairs = pairs + (pair,)
        even = tl.join(_halves(pairs[0], pairs[1], upper), _halves(pairs[4], pairs[5], upper))
        odd = tl.join(_halves(pairs[2], pairs[3], upper), _halves(pairs[6], pairs[7], upper))
        tl.store(pair_ptr + step * WORDS * 4, tl.reshape(tl.join(even, odd), [WORDS * 4]))


def bytewise(decode):
    """The notebook's launch, of the kernel over bytes."""
    module = helpers.load(f"roads_bytes_by_{decode}")
    plan = module.plan

    def plan_with_decode(nf4, aligned):
        programs, options = plan(nf4, aligned)
        return programs, options | {"DECODE": decode}

    module.plan = plan_with_decode
    module._dequantize_nf4_kernel = _bytes_kernel
    return module


scaled = helpers.load("roads_scaled")
scaled._dequantize_nf4_kernel = _scaled_kernel

OURS = "words, the code by shuffles: ours"
BY_HAND = "bf16 rounded by hand on its bits"
SIZE = (4, 2)  # warps, steps
ROADS = {  # label: module, (warps, steps); first the way to ours, then what is beside it
    "bytes, chain of 15 selects": (bytewise("chain"), SIZE),
    "bytes, tree of 15 selects": (bytewise("tree"), SIZE),
    "bytes, the code by loads": (bytewise("loads"), SIZE),
    "words, the code by loads": (by_loads, SIZE),
    OURS: (ours, SIZE),
    "one step, not two": (ours, (4, 1)),
    "four steps": (ours, (4, 4)),
    "two warps, not four": (ours, (2, 2)),
    "two loops: all scales first": (two_loops, SIZE),
    "no eviction policy at all": (no_policy, SIZE),
    "the output evicted first, too": (output_first, SIZE),
    BY_HAND: (by_hand, SIZE),
    "the scaled table in the lanes, shuffled": (scaled, SIZE),
}
TAUGHT = {  # what a step taught; the figures are in the rows
    "bytes, chain of 15 selects": "the naive start",
    "bytes, tree of 15 selects": "fewer selects in a row",
    "bytes, the code by loads": "a cache is a table",
    "words, the code by loads": "one scale, eight weights",
    OURS: "the warp is a table",
    "one step, not two": "all sizes are alike",
    "four steps": "all sizes are alike",
    "two warps, not four": "all sizes are alike",
    "two loops: all scales first": "one loop is enough",
    "no eviction policy at all": "policies gain nothing here",
    "the output evicted first, too": "does not help either",
    BY_HAND: "slower than the compiler's",
    "the scaled table in the lanes, shuffled": "for blocks of 64 alone",
}


def roads(dtype):
    """(label, module, (warps, steps)) of each road; fp16 is not rounded by hand."""
    found = []
    for label, (module, size) in ROADS.items():
        if label != BY_HAND or dtype == torch.bfloat16:
            found.append((label, module, size))
    return found


def launch(module, size, nf4):
    with helpers.sized(module, *size):
        return module.launch(nf4)


def runs(weight, state):
    """{road: a function that dequantizes}, each compared with bitsandbytes before.

    Raises where a bit differs.
    """
    expected = dequantize_4bit(weight, state)
    nf4 = helpers.described(ours, weight, state)
    found = {}
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh outputs hold NaN, no old bits
    for label, module, size in roads(state.dtype):
        found[label] = partial(launch, module, size, nf4)
        differing = ours.bits_differing(found[label]()[0], expected)
        if differing:
            weights = f"{differing} of {expected.numel()} weights in {state.dtype}"
            raise RuntimeError(f"{label}: {weights} differ")
    torch.use_deterministic_algorithms(False)
    return found


def check(device):
    """Every road and dtype: a random matrix, and one with every nibble and every absmax."""
    for dtype in DTYPES.values():
        cases = ours.quantized((64, 512), dtype, device), ours.every_combination(dtype, device)
        for weight, state in cases:
            compared = len(runs(weight, state))
            print(f"{compared} roads, {state.shape} in {dtype}: no bit differs")


def instructions():
    """{road: {dtype: instructions per weight}} for sm_75."""
    import sm_75  # not at the top: it is for processes without the interpreter

    counts = {label: {} for label in ROADS}
    for name, dtype in DTYPES.items():
        for label, module, (warps, steps) in roads(dtype):
            with helpers.sized(module, warps, steps):
                compiled = sm_75.compile_for(module, dtype)
            counts[label][name] = len(sm_75.disassemble(compiled)[0]) / (steps * 8)
    return counts


def measure():
    counts = instructions()
    rows = []
    for name, dtype in DTYPES.items():
        weight, state = ours.quantized(SHAPE, dtype, "cuda")
        traffic = ours.ceilings(helpers.described(ours, weight, state))
        times = ours.kernel_us(runs(weight, state) | traffic, rounds=5)
        ceiling = min(times.pop(name) for name in traffic)
        for label, us in times.items():
            row = {"step": label, "dtype": name, "us": us, "ceiling_us": ceiling}
            rows.append(row | {"sm_75_instructions": counts[label][name]})
    origin = {"gpu": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat()}
    origin |= {"triton": triton.__version__, "shape": list(SHAPE)}
    return {**origin, "rows": rows, "taught": TAUGHT}


def main(arguments):
    if arguments == ["--check"]:
        if INTERPRETED.value:
            helpers.emulate_assembly()
        check("cpu" if INTERPRETED.value else "cuda")
    elif arguments == ["--instructions"]:
        print(json.dumps(instructions()))
    elif len(arguments) == 1 and not arguments[0].startswith("-"):
        Path(arguments[0]).write_text(json.dumps(measure(), indent=1) + "\n")
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
