"""The ladder: from a naive kernel up to the notebook's, one idea a step.

    python tools/ladder.py    on a GPU: checks each step's bits, times it, counts its instructions
                              for a T4; writes results/ladder.json

Each step is an edit of the notebook's kernel; it serves nested absmax. Counted is what a full
program runs.
"""

import datetime
import inspect
import re
import sys
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

import helpers  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

BYTE_BY_BYTE = """
    BYTES: tl.constexpr = WORDS * 4
    start = tl.program_id(0).to(tl.int64) * BYTES
    at = start + tl.arange(0, BYTES)
    is_there = at * 2 < n_weights
    byte = tl.load(weight_ptr + at, mask=is_there, other=0).to(tl.int32)
    block = at * 2 // BLOCKSIZE  # each byte finds its own scale
    absmax = tl.load(absmax_ptr + block, mask=is_there, other=0)
    absmax2 = tl.load(absmax2_ptr + block // BLOCKSIZE2, mask=is_there, other=0)
    scale = _mul_rn(tl.load(code2_ptr + absmax.to(tl.int32)), absmax2) + tl.load(offset_ptr)
    first = _mul_rn(LOOK_UP(byte >> 4, code_ptr), scale)
    second = _mul_rn(LOOK_UP(byte & 0xF, code_ptr), scale)
    weights = _rounded(tl.interleave(first, second), out_ptr.dtype.element_ty)
    index = start * 2 + tl.arange(0, BYTES * 2)
    tl.store(out_ptr + index, weights, mask=index < n_weights)
"""
BY_LOADS = (("if not SHUFFLES:", "if True:"),)  # pairs: a text of the notebook, its replacement
NO_POLICY = (
    ('word_ptr + index, eviction_policy="evict_first"', "word_ptr + index"),
    ('mask=is_there, other=0, eviction_policy="evict_last"', "mask=is_there, other=0"),
    ('tl.load(offset_ptr, eviction_policy="evict_last"', "tl.load(offset_ptr"),
    ('absmax.to(tl.int32), eviction_policy="evict_last"', "absmax.to(tl.int32)"),
    ('code_ptr + index, eviction_policy="evict_last"', "code_ptr + index"),
)


@triton.jit
def chain(nibble, code_ptr):
    code = tl.load(code_ptr)
    for i in tl.static_range(1, 16):
        code = tl.where(nibble == i, tl.load(code_ptr + i), code)
    return code


@triton.jit
def loads(nibble, code_ptr):
    return tl.load(code_ptr + nibble)


def edited(step, *edits):
    """The notebook's definitions, edited."""
    module = helpers.load("ladder_" + re.sub(r"\W+", "_", step), *edits)
    module.SHUFFLES = tl.constexpr(True)  # in the interpreter, too
    module.chain, module.loads = chain, loads
    return module


OURS = edited("ours")
BODY = inspect.getsource(OURS._dequantize_nf4_kernel.fn).rpartition('"""\n')[2]
BY_CHAIN = ((BODY, BYTE_BY_BYTE.replace("LOOK_UP", "chain")),)
BYTES_BY_LOADS = ((BODY, BYTE_BY_BYTE.replace("LOOK_UP", "loads")),)
LADDER = [  # (step, what it taught, the edits that make it)
    ("bytes, chain of 15 selects", "the naive start", BY_CHAIN),
    ("bytes, the code by loads", "a cache is a table", BYTES_BY_LOADS),
    ("words, the code by loads", "a load and a store for eight weights", BY_LOADS),
    ("words, the code by shuffles: ours", "the warp is a table", ()),
    ("no eviction policy", "what the policies buy", NO_POLICY),
]


def agreeing(weight, state):
    """{step: a function that dequantizes}. Ends the program where one's bits are not right."""
    expected = OURS.dequantize_4bit(weight, state)
    functions = {}
    for step, _, edits in LADDER:
        functions[step] = partial(edited(step, *edits).by_kernel_grid, weight, state)
        torch.use_deterministic_algorithms(True)  # what is not written is a NaN
        differing = OURS.bits_differing(functions[step](), expected)
        torch.use_deterministic_algorithms(False)
        if differing:
            raise SystemExit(f"{step}: {differing} weights differ; nothing was written: mend it")
    return functions


def measure():
    import sm_75  # not above: it compiles, which a process with the interpreter cannot

    median_ms = partial(triton.testing.do_bench, return_mode="median")
    dtype = torch.float16
    weight, state = OURS.quantized((4096, 14336), dtype, "cuda")
    functions = agreeing(weight, state)
    n_bytes = weight.nbytes + state.absmax.nbytes + weight.numel() * 2 * dtype.itemsize
    source = torch.empty(n_bytes // 2, dtype=torch.uint8, device="cuda")  # read and written
    copy_us = 1e3 * median_ms(partial(torch.empty_like(source).copy_, source))
    rows = []
    for step, taught, edits in LADDER:
        full = edited(f"{step}, full", *edits, *helpers.FULL)
        row = {"step": step, "taught": taught, "us": 1e3 * median_ms(functions[step])}
        row["instructions_per_weight"] = sm_75.instructions_per_weight(full, dtype)
        rows.append(row | {"copy_us": copy_us})
    return rows


def main():
    if not torch.cuda.is_available():
        raise SystemExit("The ladder is timed on a GPU, and there is none here.")
    found = {"gpu": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat()}
    found |= {"triton": triton.__version__, "rows": measure()}
    helpers.write_json(ROOT / "results" / "ladder.json", found)


if __name__ == "__main__":
    main()
