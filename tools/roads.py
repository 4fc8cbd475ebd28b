"""Measures the roads not taken: other ways to look up the code, in the frame of the notebook's path by words.

    python results/roads.py FILE    on a GPU: checks each against bitsandbytes, times it, counts sm_75 instructions

Not part of what graders run. What the decodes share with the notebook's kernel is taken from the notebook.
"""

import datetime
import json
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl
from bitsandbytes.functional import dequantize_4bit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import notebook  # noqa: E402
import sm_75  # noqa: E402

nf4 = notebook.load()
_LOOK_UP, _pack, _block_scale = nf4._LOOK_UP, nf4._pack, nf4._block_scale
_decode_by_shuffle, _decode_by_table = nf4._decode_by_shuffle, nf4._decode_by_table

DECODES = {
    "scaled": "**scaled table in the lanes, shuffled (ours)**",
    "in turn": "the same, each step's loads after the last step's store",
    "shuffle": "bare code in the lanes, shuffled, then scaled",
    "table": "table in the L1 cache (our portable decode)",
    "tree": "tree of 15 selects",
    "chain": "chain of 15 selects",
}
WORDS, STEPS, WARPS = 128, 2, 4


@triton.jit
def _chain(nibble, code_ptr):
    value = tl.load(code_ptr) + tl.zeros_like(nibble).to(tl.float32)
    for i in tl.static_range(1, 16):
        value = tl.where(nibble == i, tl.load(code_ptr + i), value)
    return value


@triton.jit
def _tree(nibble, code_ptr):
    leaves = ()
    for i in tl.static_range(8):
        leaves = leaves + (tl.where((nibble & 1) != 0, tl.load(code_ptr + 2 * i + 1), tl.load(code_ptr + 2 * i)),)
    bit1 = (nibble & 2) != 0
    a, b = tl.where(bit1, leaves[1], leaves[0]), tl.where(bit1, leaves[3], leaves[2])
    c, d = tl.where(bit1, leaves[5], leaves[4]), tl.where(bit1, leaves[7], leaves[6])
    bit2 = (nibble & 4) != 0
    return tl.where((nibble & 8) != 0, tl.where(bit2, d, c), tl.where(bit2, b, a))


@triton.jit
def _select_pair(word, SHIFT: tl.constexpr, scale, code_ptr, DTYPE: tl.constexpr, TREE: tl.constexpr):
    if TREE:
        first, second = _tree((word >> (SHIFT + 4)) & 0xF, code_ptr), _tree((word >> SHIFT) & 0xF, code_ptr)
    else:
        first, second = _chain((word >> (SHIFT + 4)) & 0xF, code_ptr), _chain((word >> SHIFT) & 0xF, code_ptr)
    return _pack(first * scale, second * scale, DTYPE)


@triton.jit
def _decode(word, scale, code, half, code_ptr, DTYPE: tl.constexpr, DECODE: tl.constexpr):
    if DECODE == "scaled" or DECODE == "in turn":
        pairs = _decode_by_shuffle(word, scale, code, half, DTYPE)
    elif DECODE == "table":
        pairs = _decode_by_table(word, scale, code_ptr, DTYPE)
    elif DECODE == "shuffle":
        w0, w1, w2, w3, w4, w5, w6, w7 = tl.inline_asm_elementwise(
            _LOOK_UP,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            [code, word],
            dtype=(tl.float32,) * 8,
            is_pure=True,
            pack=1,
        )
        pairs = (
            _pack(w0 * scale, w1 * scale, DTYPE),
            _pack(w2 * scale, w3 * scale, DTYPE),
            _pack(w4 * scale, w5 * scale, DTYPE),
            _pack(w6 * scale, w7 * scale, DTYPE),
        )
    else:
        pairs = (
            _select_pair(word, 0, scale, code_ptr, DTYPE, DECODE == "tree"),
            _select_pair(word, 8, scale, code_ptr, DTYPE, DECODE == "tree"),
            _select_pair(word, 16, scale, code_ptr, DTYPE, DECODE == "tree"),
            _select_pair(word, 24, scale, code_ptr, DTYPE, DECODE == "tree"),
        )
    return pairs


@triton.jit
def _road_kernel(
    out_ptr, weight_ptr, absmax_ptr, code_ptr, offset_ptr, absmax2_ptr, code2_ptr,
    WORDS: tl.constexpr, STEPS: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """The notebook's path by words for blocks of 64 and 256, with another decode."""
    start = tl.program_id(0).to(tl.int64) * (WORDS * STEPS)
    lane = tl.arange(0, WORDS)
    absmax_ptr += start // 8 + lane // 8
    word_ptr = weight_ptr.to(tl.pointer_type(tl.int32)) + start + lane
    quad_ptr = out_ptr.to(tl.pointer_type(tl.int32)) + start * 4 + tl.arange(0, WORDS * 4)
    absmax2, offset = tl.load(absmax2_ptr + start // 8 // 256), tl.load(offset_ptr)
    code = tl.load(code_ptr + lane % 16, eviction_policy="evict_last")
    half = tl.where((lane & 8) != 0, 0x7632, 0x5410)
    AHEAD: tl.constexpr = 1 if DECODE == "in turn" else STEPS
    for first in tl.static_range(0, STEPS, AHEAD):
        words, scales = (), ()
        for step in tl.static_range(AHEAD):
            words = words + (tl.load(word_ptr + (first + step) * WORDS, eviction_policy="evict_first"),)
            absmax = tl.load(absmax_ptr + (first + step) * (WORDS // 8))
            scales = scales + (_block_scale(absmax, absmax2, offset, code2_ptr),)
        for step in tl.static_range(AHEAD):
            w01, w23, w45, w67 = _decode(
                words[step], scales[step], code, half, code_ptr, out_ptr.dtype.element_ty, DECODE
            )
            quad = tl.reshape(tl.join(tl.join(w01, w45), tl.join(w23, w67)), [WORDS * 4])
            tl.store(quad_ptr + (first + step) * WORDS * 4, quad)


def sm_75_instructions(dtype, decode):
    types = {"out_ptr": f"*{sm_75.TYPES[dtype]}", "weight_ptr": "*u8", "absmax_ptr": "*u8"}
    constants = {"WORDS": WORDS, "STEPS": STEPS, "DECODE": decode}
    compiled = sm_75.compile_kernel(_road_kernel, types, constants, WARPS)
    return len(sm_75.disassemble(compiled)[0]) / (STEPS * 8)


def measure(shape=(4096, 14336)):
    rows = {decode: {"decode": label} for decode, label in DECODES.items()}
    for dtype in (torch.float16, torch.bfloat16):
        weight, state = nf4.quantized(shape, dtype, "cuda")
        expected, out, runs = dequantize_4bit(weight, state), torch.empty(shape, dtype=dtype, device="cuda"), {}
        programs = out.numel() // (WORDS * STEPS * 8)
        for decode in DECODES:

            def run(decode=decode):
                tensors = nf4.state_tensors(state)
                _road_kernel[(programs,)](out, weight, *tensors, WORDS, STEPS, decode, num_warps=WARPS)

            out.fill_(float("nan"))
            run()
            assert nf4.bits_differing(out, expected) == 0, decode
            runs[decode] = run
        for decode, microseconds in nf4.kernel_us(runs, rounds=5).items():
            facts = {"us": microseconds, "sm_75_instructions": sm_75_instructions(dtype, decode)}
            rows[decode][str(dtype).removeprefix("torch.")] = facts
    origin = {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "triton": triton.__version__,
    }
    return {**origin, "shape": list(shape), "rows": list(rows.values())}


if __name__ == "__main__":
    result = measure()
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
