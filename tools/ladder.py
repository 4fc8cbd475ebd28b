"""The ladder: from a naive kernel up to the notebook's, one idea a step, and what lost beside it.

    python tools/ladder.py            on a GPU: checks each step's bits, times it, counts its
                                      instructions for a T4; writes results/ladder.json
    python tools/ladder.py --check    compares the bits alone; without a GPU by the interpreter

A step is an edit of the notebook's kernel, or a kernel of its own in its place. It serves what is
timed: nested absmax, blocks of 64, whole programs.
"""

import datetime
import os
import sys
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]
if sys.argv[1:] == ["--check"] and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import helpers  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

SHAPE = (4096, 14336)
DTYPES = (torch.float16, torch.bfloat16)
LOADED = {  # {what our kernel loads: its cache policy}
    "tl.load(word_ptr + step * WORDS": "evict_first",
    "tl.load(absmax2_ptr + first_block // BLOCKSIZE2": "evict_last",
    "tl.load(offset_ptr": "evict_last",
    "tl.load(code2_ptr + absmax.to(tl.int32)": "evict_last",
}
NO_POLICY = [
    (f'{load}, eviction_policy="{policy}")', f"{load})") for load, policy in LOADED.items()
]
NO_POLICY.append(("ld.global.nc.L1::evict_last.b32", "ld.global.nc.b32"))
SCALED = [
    ("codes = _look_up(words[step], code_ptr)", "weights = _weights(words[step], scale, code_ptr"),
    ("  # [WORDS, 8]\n        weights = _rounded(_mul_rn(codes, scale[:, None])", ""),
]
helpers.OPERATIONS["ld.global.nc.b32"] = helpers.load_words  # for the interpreter


def edited(name, *edits, shuffles=True, **names):
    """The notebook's definitions, edited, with other values of some names."""
    module = helpers.load(f"ladder_{name}", *edits)
    vars(module).update(names, SHUFFLES=tl.constexpr(shuffles))
    return module


def by_bytes(decode):
    """The notebook's launch, of _bytes_kernel."""
    module = edited(decode, _dequantize_nf4_kernel=_bytes_kernel)
    launch_of = module.launch_of

    def launch_of_bytes(*arguments):
        programs, arguments, options = launch_of(*arguments)
        return programs, arguments, options | {"DECODE": decode}

    module.launch_of = launch_of_bytes
    return module


@triton.jit
def _code(nibble, code_ptr, DECODE: tl.constexpr):
    """Each nibble's entry of the code: by selects in a chain or in a tree, or by a load."""
    if DECODE == "load":
        return tl.load(code_ptr + nibble)
    codes = ()
    for i in tl.static_range(16):
        codes = codes + (tl.load(code_ptr + i),)
    if DECODE == "chain":
        code = codes[0]
        for i in tl.static_range(1, 16):
            code = tl.where(nibble == i, codes[i], code)
        return code
    for bit in tl.static_range(4):  # the lowest first: 16 become 8, 4, 2, 1
        is_odd = ((nibble >> bit) & 1) != 0
        halved = ()
        for i in tl.static_range(8 >> bit):
            halved = halved + (tl.where(is_odd, codes[2 * i + 1], codes[2 * i]),)
        codes = halved
    return codes[0]


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
    DECODE: tl.constexpr,  # "chain", "tree" or "load"
):
    """Byte by byte, each masked and with a scale of its own."""
    BYTES: tl.constexpr = WORDS * STEPS * 4
    start = tl.program_id(0).to(tl.int64) * BYTES
    at = start + tl.arange(0, BYTES)
    is_there = at * 2 < n_weights
    block = at * 2 // BLOCKSIZE
    byte = tl.load(weight_ptr + at, mask=is_there, other=0).to(tl.int32)
    absmax = tl.load(absmax_ptr + block, mask=is_there, other=0)
    absmax2 = tl.load(absmax2_ptr + block // BLOCKSIZE2, mask=is_there, other=0.0)
    scale = _mul_rn(tl.load(code2_ptr + absmax.to(tl.int32)), absmax2) + tl.load(offset_ptr)
    first = _mul_rn(_code(byte >> 4, code_ptr, DECODE), scale)
    second = _mul_rn(_code(byte & 0xF, code_ptr, DECODE), scale)
    weights = _rounded(tl.interleave(first, second), out_ptr.dtype.element_ty)
    index = start * 2 + tl.arange(0, BYTES * 2)
    tl.store(out_ptr + index, weights, mask=index < n_weights)


@triton.jit
def _shuffle(entry, lane):
    asm: tl.constexpr = "shfl.sync.idx.b32 $0, $1, $2, 0x101f, -1;"
    return tl.inline_asm_elementwise(asm, "=&r,r,r", [entry, lane], tl.float32, True, 1)


@triton.jit
def _weights(word, scale, code_ptr, DTYPE: tl.constexpr):
    """Sixteen lanes hold the code times the scales of their two blocks, rounded to 16 bits each."""
    thread = tl.arange(0, word.shape[0])
    code = tl.load(code_ptr + thread % 16)
    table = tl.zeros_like(word)
    for i in tl.static_range(2):
        of_block = _shuffle(scale, thread * 0 + 8 * i)  # the block's first lane
        scaled = _rounded(_mul_rn(code, of_block), DTYPE).to(tl.int16, bitcast=True)
        table |= (scaled.to(tl.int32) & 0xFFFF) << (16 * i)
    table = table.to(tl.float32, bitcast=True)
    is_second = (thread & 8) != 0
    halves = ()
    for i in tl.static_range(4):
        first = _shuffle(table, word >> (8 * i + 4)).to(tl.int32, bitcast=True)
        second = _shuffle(table, word >> (8 * i)).to(tl.int32, bitcast=True)
        if INTERPRETED:
            shift = tl.where(is_second, 16, 0)
            both = ((first >> shift) & 0xFFFF) | ((second >> shift) << 16)
        else:
            which = tl.where(is_second, 0x7632, 0x5410)
            asm: tl.constexpr = "prmt.b32 $0, $1, $2, $3;"
            operands = [first, second, which]
            both = tl.inline_asm_elementwise(asm, "=r,r,r,r", operands, tl.int32, True, 1)
        halves = halves + (both.to(tl.int16), (both >> 16).to(tl.int16))
    even = tl.join(tl.join(halves[0], halves[4]), tl.join(halves[2], halves[6]))
    odd = tl.join(tl.join(halves[1], halves[5]), tl.join(halves[3], halves[7]))
    return tl.reshape(tl.join(even, odd), [word.shape[0], 8]).to(DTYPE, bitcast=True)


ours = edited("ours")
INTERPRETED, _mul_rn, _rounded = ours.INTERPRETED, ours._mul_rn, ours._rounded
LADDER = [  # (step, what it taught, the notebook's definitions so changed); five up to ours
    ("bytes, chain of 15 selects", "the naive start", by_bytes("chain")),
    ("bytes, tree of 15 selects", "fewer selects in a row", by_bytes("tree")),
    ("bytes, the code by loads", "a cache is a table", by_bytes("load")),
    ("words, the code by loads", "one scale, eight weights", edited("loads", shuffles=False)),
    ("words, the code by shuffles: ours", "the warp is a table", ours),
    ("no eviction policy", "policies gain nothing here", edited("no_policy", *NO_POLICY)),
    ("one step, not two", "all sizes are alike", edited("one_step", STEPS={2: 1})),
    ("four steps", "all sizes are alike", edited("four_steps", STEPS={2: 4})),
    ("a scaled table", "for blocks of 64 alone", edited("scaled", *SCALED, _weights=_weights)),
]


def agreeing(weight, state):
    """{step: a function that dequantizes}. Ends the program where one's bits are not right."""
    expected = ours.dequantize_4bit(weight, state)
    functions = {}
    for step, _, module in LADDER:
        functions[step] = partial(module.by_kernel_grid, weight, state)
        torch.use_deterministic_algorithms(True)  # what is not written is NaN
        differing = ours.bits_differing(functions[step](), expected)
        torch.use_deterministic_algorithms(False)
        if differing:
            what = f"{differing} of {expected.numel()} weights differ in {state.dtype}"
            raise SystemExit(f"{step}: {what}. Nothing was written; mend this step.")
    return functions


def check(device):
    for dtype in DTYPES:
        cases = ours.quantized((64, 512), dtype, device), ours.every_combination(dtype, device)
        for weight, state in cases:
            steps = len(agreeing(weight, state))
            print(f"{steps} steps, {tuple(state.shape)} in {dtype}: no bit differs")


def measure():
    import sm_75  # not above: it compiles, which a process with the interpreter cannot

    rows = []
    for dtype in DTYPES:
        weight, state = ours.quantized(SHAPE, dtype, "cuda")
        functions = agreeing(weight, state)
        n_bytes = weight.nbytes + state.absmax.nbytes + weight.numel() * 2 * dtype.itemsize
        source = torch.empty(n_bytes // 2, dtype=torch.uint8, device="cuda")
        functions["copy"] = partial(torch.empty_like(source).copy_, source)
        us = {}
        for step, function in functions.items():
            us[step] = 1e3 * triton.testing.do_bench(function, return_mode="median")
        for step, taught, module in LADDER:
            facts = sm_75.facts(sm_75.compile_for(module, dtype), module.STEPS[2])
            row = {"step": step, "taught": taught, "dtype": ours.name_of(dtype), "us": us[step]}
            row |= {"copy_us": us["copy"]}
            rows.append(row | {"instructions_per_weight": facts["instructions_per_weight"]})
    return rows


def main(arguments):
    has_gpu = torch.cuda.is_available()
    if arguments == ["--check"]:
        if INTERPRETED.value:
            helpers.emulate_assembly()
        return check("cpu" if INTERPRETED.value else "cuda")
    if arguments:
        raise SystemExit(__doc__)
    if not has_gpu:
        raise SystemExit("The ladder is timed on a GPU, and there is none. Try --check here.")
    found = {"gpu": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat()}
    found |= {"triton": triton.__version__, "rows": measure()}
    helpers.write_json(ROOT / "results" / "ladder.json", found)


if __name__ == "__main__":
    main(sys.argv[1:])
