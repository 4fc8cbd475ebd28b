"""Measures the roads not taken: the notebook's kernel with one thing done otherwise, and two kernels it had before.

    python tools/roads.py FILE            on a GPU: checks each road's bits, times it, counts; writes JSON
    python tools/roads.py --check         compares each road's bits on small matrices; without a GPU by the interpreter
    python tools/roads.py --instructions  prints {road: {dtype: instructions per weight in sm_75 code}}; needs no GPU

Each is a process of its own, as tools/sm_75.py says. What is right is what bitsandbytes' dequantize_4bit gives.
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
sys.path[:0] = [str(Path(__file__).resolve().parent.parent / folder) for folder in ("tests", "tools")]

import helpers  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from bitsandbytes.functional import dequantize_4bit  # noqa: E402

SHAPE = (4096, 14336)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

TWO_LOOPS = """    words = _load_words(word_ptr, lane, left, by_word, STEPS, EVICT)
    for step in tl.static_range(STEPS):
"""
ONE_LOOP = "        words = _load_words(word_ptr + step * WORDS, lane, left - step * WORDS * 8, by_word, 1, EVICT)\n"
CODE = 'tl.load(code_ptr + ((word >> 4 * (i ^ 1)) & 0xF), eviction_policy="evict_last")'
SELECT = "_select((word >> 4 * (i ^ 1)) & 0xF, code_ptr)"

ours = helpers.load()
in_turn = helpers.load("roads_in_turn", (TWO_LOOPS, ONE_LOOP), ("_look_up(words[step],", "_look_up(words[0],"))
by_hand = helpers.load("roads_by_hand", ("if INTERPRETED and DTYPE == tl.bfloat16:", "if DTYPE == tl.bfloat16:"))
tree, chain = (helpers.load(name, (CODE, SELECT)) for name in ("roads_tree", "roads_chain"))
scaled, by_bytes = helpers.load("roads_scaled"), helpers.load("roads_bytes")

_look_up, _rounded, INTERPRETED = ours._look_up, by_hand._rounded, ours.INTERPRETED
_SHARE = tl.constexpr("shfl.sync.idx.b32 $0, $2, $3, 0x101f, -1; shfl.sync.idx.b32 $1, $2, $4, 0x101f, -1;")


@triton.jit
def _tree(nibble, code_ptr):
    values = ()
    for i in tl.static_range(8):
        values = values + (tl.where((nibble & 1) != 0, tl.load(code_ptr + 2 * i + 1), tl.load(code_ptr + 2 * i)),)
    bit1, bit2 = (nibble & 2) != 0, (nibble & 4) != 0
    a, b = tl.where(bit1, values[1], values[0]), tl.where(bit1, values[3], values[2])
    c, d = tl.where(bit1, values[5], values[4]), tl.where(bit1, values[7], values[6])
    return tl.where((nibble & 8) != 0, tl.where(bit2, d, c), tl.where(bit2, b, a))


@triton.jit
def _chain(nibble, code_ptr):
    value = tl.load(code_ptr) + tl.zeros_like(nibble).to(tl.float32)
    for i in tl.static_range(1, 16):
        value = tl.where(nibble == i, tl.load(code_ptr + i), value)
    return value


@triton.jit
def _scale(absmax, absmax2, offset, code2_ptr):
    code2 = tl.load(code2_ptr + absmax.to(tl.int32), eviction_policy="evict_last")
    return tl.fma(code2, absmax2, 0.0) + offset


@triton.jit
def _pack(first, second, DTYPE: tl.constexpr):
    """Two fp32 rounded to 16 bits each, as one int32, the first in the low half."""
    first = _rounded(first, DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
    return (first & 0xFFFF) | (_rounded(second, DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _halves(first, second, upper):
    """The low halves of two registers as one int32, or the high halves."""
    first, second = first.to(tl.int32, bitcast=True), second.to(tl.int32, bitcast=True)
    if INTERPRETED:  # the emulation knows no prmt
        shift = tl.where(upper, 16, 0)
        return ((first >> shift) & 0xFFFF) | ((second >> shift) << 16)
    asm: tl.constexpr = "prmt.b32 $0, $1, $2, $3;"
    operands = [first, second, tl.where(upper, 0x7632, 0x5410)]
    return tl.inline_asm_elementwise(asm, "=r,r,r,r", operands, tl.int32, is_pure=True, pack=1)


@triton.jit
def _scaled_kernel(
    out_ptr, weight_ptr, absmax_ptr, code_ptr, offset_ptr, absmax2_ptr, code2_ptr, n_weights,
    BLOCKSIZE: tl.constexpr, BLOCKSIZE2: tl.constexpr, WORDS: tl.constexpr, STEPS: tl.constexpr,
    WHOLE: tl.constexpr, ASSEMBLY: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """A register of each lane holds the code times the scale for the two blocks of 16 lanes. WHOLE, nested, by 64."""
    start = tl.program_id(0).to(tl.int64) * (WORDS * STEPS)
    lane = tl.arange(0, WORDS)
    zero, upper = tl.zeros_like(lane), (lane & 8) != 0
    word_ptr = weight_ptr.to(tl.pointer_type(tl.int32)) + start + lane
    pair_ptr = out_ptr.to(tl.pointer_type(tl.int32)) + start * 4 + tl.arange(0, WORDS * 4)
    absmax2 = tl.load(absmax2_ptr + start // 8 // BLOCKSIZE2, eviction_policy="evict_last")
    offset = tl.load(offset_ptr, eviction_policy="evict_last")
    code = tl.load(code_ptr + lane % 16, eviction_policy="evict_last")
    words, scales = (), ()
    for step in tl.static_range(STEPS):
        words = words + (tl.load(word_ptr + step * WORDS, eviction_policy="evict_first"),)
        absmax = tl.load(absmax_ptr + start // 8 + lane // 8 + step * (WORDS // 8))
        scales = scales + (_scale(absmax, absmax2, offset, code2_ptr),)
    for step in tl.static_range(STEPS):
        operands = [scales[step], zero, zero + 8]  # the lanes that lead the two blocks
        first, second = tl.inline_asm_elementwise(_SHARE, "=&r,=&r,r,r,r", operands, (tl.float32,) * 2, True, 1)
        table = _pack(code * first, code * second, out_ptr.dtype.element_ty).to(tl.float32, bitcast=True)
        w0, w1, w2, w3, w4, w5, w6, w7 = _look_up(words[step], table, code_ptr, True)
        even = tl.join(_halves(w0, w1, upper), _halves(w4, w5, upper))
        odd = tl.join(_halves(w2, w3, upper), _halves(w6, w7, upper))
        tl.store(pair_ptr + step * WORDS * 4, tl.reshape(tl.join(even, odd), [WORDS * 4]))


@triton.jit
def _bytes_kernel(
    out_ptr, weight_ptr, absmax_ptr, code_ptr, offset_ptr, absmax2_ptr, code2_ptr, n_weights,
    BLOCKSIZE: tl.constexpr, BLOCKSIZE2: tl.constexpr, WORDS: tl.constexpr, STEPS: tl.constexpr,
    WHOLE: tl.constexpr, ASSEMBLY: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Bytes, all of them masked, each with a scale of its own. Nested."""
    BYTES: tl.constexpr = WORDS * STEPS * 4
    start = tl.program_id(0).to(tl.int64) * BYTES
    byte = start + tl.arange(0, BYTES)
    inside, block = byte * 2 < n_weights, byte * 2 // BLOCKSIZE
    packed = tl.load(weight_ptr + byte, mask=inside, other=0, eviction_policy="evict_first").to(tl.int32)
    absmax = tl.load(absmax_ptr + block, mask=inside, other=0)
    absmax2 = tl.load(absmax2_ptr + block // BLOCKSIZE2, mask=inside, other=0.0, eviction_policy="evict_last")
    scale = _scale(absmax, absmax2, tl.load(offset_ptr), code2_ptr)
    first = tl.load(code_ptr + (packed >> 4), eviction_policy="evict_last") * scale
    second = tl.load(code_ptr + (packed & 0xF), eviction_policy="evict_last") * scale
    weights = _rounded(tl.interleave(first, second), out_ptr.dtype.element_ty)
    index = start * 2 + tl.arange(0, BYTES * 2)
    tl.store(out_ptr + index, weights, mask=index < n_weights)


tree._select, chain._select = _tree, _chain
scaled._dequantize_nf4_kernel, by_bytes._dequantize_nf4_kernel = _scaled_kernel, _bytes_kernel

SHUFFLES, LOADS = ours.Setting(4, 2), ours.Setting(4, 2, assembly=False)
ROADS = {
    "**ours: the bare code in the lanes, shuffled**": (ours, SHUFFLES),
    "ours, the code looked up by loads": (ours, LOADS),
    "ours, each step's loads after the last step's store": (in_turn, SHUFFLES),
    "ours, bf16 rounded by hand on its bits": (by_hand, SHUFFLES),
    "the scaled table in the lanes, shuffled": (scaled, LOADS),
    "bytes instead of words, the code looked up by loads": (by_bytes, LOADS),
    "tree of 15 selects": (tree, LOADS),
    "chain of 15 selects": (chain, LOADS),
}


def roads(dtype):
    """(label, module, setting) of each road; fp16 is not rounded by hand."""
    return [(label, *road) for label, road in ROADS.items() if road[0] is not by_hand or dtype == torch.bfloat16]


def runs(weight, state):
    """{road: a function that dequantizes}, each compared with bitsandbytes before. Raises where a bit differs."""
    expected, nf4, found = dequantize_4bit(weight, state), ours.nf4_of(weight, state), {}
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh outputs hold NaN, not what a road left there
    for label, module, setting in roads(state.dtype):
        if setting.assembly and not module.assembly_works(weight.device):
            raise RuntimeError(f"{label}: {module.ASSEMBLY}")
        found[label] = partial(module.launch, nf4, setting)
        if differing := ours.bits_differing(found[label]()[0], expected):
            raise RuntimeError(f"{label}: {differing} of {expected.numel()} weights in {state.dtype} differ")
    torch.use_deterministic_algorithms(False)
    return found


def check(device):
    """Every road and dtype, on a random matrix and on one with every nibble and every absmax code."""
    for dtype in DTYPES.values():
        for weight, state in (ours.quantized((64, 512), dtype, device), ours.every_combination(dtype, device)):
            print(f"{len(runs(weight, state))} roads, {state.shape} in {dtype}: no bit differs")


def instructions():
    import sm_75  # not at the top: it is for processes without the interpreter

    counts = {label: dict.fromkeys(DTYPES) for label in ROADS}
    for name, dtype in DTYPES.items():
        for label, module, setting in roads(dtype):
            compiled = sm_75.compile_for(module, dtype, setting)
            counts[label][name] = len(sm_75.disassemble(compiled)[0]) / (setting.steps * 8)
    return counts


def measure():
    counts, rows = instructions(), {label: {"decode": label} | dict.fromkeys(DTYPES) for label in ROADS}
    for name, dtype in DTYPES.items():
        times = ours.kernel_us(runs(*ours.quantized(SHAPE, dtype, "cuda")), rounds=5)
        for label, us in times.items():
            rows[label][name] = {"us": us, "sm_75_instructions": counts[label][name]}
    origin = {"gpu": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat()}
    return {**origin, "triton": triton.__version__, "shape": list(SHAPE), "rows": list(rows.values())}


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
