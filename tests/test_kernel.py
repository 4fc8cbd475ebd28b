"""Each weight has bitsandbytes' bits, whatever the tensor; nothing is written beyond the output.

Without a GPU the kernel runs through Triton's interpreter, its assembly emulated.
"""

import collections
import math
import shutil
import subprocess
import sys

import helpers
import hypothesis
import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from helpers import DTYPES, ROOT
from hypothesis import strategies as st

GPU = torch.cuda.is_available()
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
SHAPES = [(3, 5), (64, 128), (288, 64), (1, 1), (128,), (2, 3, 64), (33, 65), (8, 1000)]
SCALES = {  # what is filled in: (state2.absmax, offset)
    "NaN": (math.nan, 0.0),
    "infinite": (math.inf, 0.0),
    "huge": (1e30, 1e30),
    "zero": (0.0, 0.0),
    "zeros of both signs": (0.0, -0.0),
    "subnormal in fp16": (1e-5, 1e-5),
    "the offset is NaN": (1.0, math.nan),
    "the offset is infinite": (1.0, -math.inf),
}
FACTORS = (1, 1e-30, 1e3, 1e30)  # of all scales
if GPU:  # there products below the smallest normal number are flushed; a CPU keeps them
    FACTORS += (1e-38, 3e-39)
PASSED = {  # how the packed weight may come
    "one byte on": lambda weight: helpers.moved(weight, 1),
    "two bytes on": lambda weight: helpers.moved(weight, 2),
    "three bytes on": lambda weight: helpers.moved(weight, 3),
    "four bytes on": lambda weight: helpers.moved(weight, 4),
    "flat": lambda weight: weight.view(-1),
    "transposed": lambda weight: weight.t(),
    "transposed, one byte on": lambda weight: helpers.moved(weight, 1).t(),
    "in fp16": lambda weight: weight.view(-1).view(torch.float16).view(-1, 1),
    "in bf16": lambda weight: weight.view(-1).view(torch.bfloat16).view(-1, 1),
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
            weight, state = nf4.quantized((2, 4096), dtype, device, blocksize, nested)
            want = dequantize_4bit(weight, state)
            yield f"blocks of {blocksize}, nested absmax: {nested}", weight, state, want
    weight, state = nf4.quantized((32, 128), dtype, device)
    for how, passed in PASSED.items():
        packed = passed(weight)
        yield f"the weight comes {how}", packed, state, helpers.expected(packed, state)
    for name, (absmax2, offset) in SCALES.items():
        weight, state = nf4.quantized((16, 64), dtype, device)
        state.state2.absmax.fill_(absmax2)
        state.offset.fill_(offset)
        yield f"scales: {name}", weight, state, dequantize_4bit(weight, state)
    for blocksize2 in (32, 1024):  # bitsandbytes has 256: a program may have fewer steps
        weight, state = nf4.quantized((3, 1000), dtype, device, blocksize=32)
        state.state2.blocksize = blocksize2
        state.state2.absmax = torch.rand(-(-94 // blocksize2), device=device) + 0.5
        yield f"nested blocks of {blocksize2}", weight, state, nf4.spec(weight, state)
    weight, state = nf4.quantized((5, 64), dtype, device)
    state.code = state.code.flip(0) * 1.5  # bitsandbytes has its own built in
    yield "another code", weight, state, nf4.spec(weight, state)


def differing(nf4, tally, out, want):
    """How many weights differ in their bits; NaNs must be the same ones, of any payload."""
    facts = [(x.shape, x.stride(), x.dtype, x.device) for x in (out, want)]
    assert facts[0] == facts[1]
    is_nan = want.isnan()
    assert torch.equal(out.isnan(), is_nan)
    return helpers.differing(nf4, tally, out.masked_fill(is_nan, 1), want.masked_fill(is_nan, 1))
