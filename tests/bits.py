"""How outputs are compared, bit by bit, and with what: bitsandbytes, or the page's formula.

The formula is `spec` of the module nf4_triton, which the fixture `nf4` has loaded.
"""

import copy
import math
import sys

import torch
from bitsandbytes.functional import dequantize_4bit


def expected(weight, state):
    """Return bitsandbytes' result; on a CPU, for what its kernels get wrong there, the formula's.

    Those are weights with gaps, and shapes whose rows are no whole blocks.
    """
    *rest, columns = state.shape
    if weight.is_cuda or (rest and columns % state.blocksize == 0 and weight.is_contiguous()):
        return dequantize_4bit(weight.data.view(torch.uint8), state)
    return formula(weight, state)


def right(layer):
    """Return bitsandbytes' result for a Linear4bit layer."""
    return dequantize_4bit(layer.weight.data, layer.weight.quant_state)


def formula(weight, state):
    """Return the weights by the page's `spec`; those of a [1, n] weight are transposed."""
    state = copy.copy(state)
    if state.nested:
        state.offset, state.state2 = aligned(state.offset), copy.copy(state.state2)
        state.state2.absmax = aligned(state.state2.absmax)
        state.state2.code = aligned(state.state2.code)
    out = sys.modules["nf4_triton"].spec(weight, state)
    return out.t() if weight.shape[:1] == (1,) and out.dim() == 2 else out


def aligned(table):
    """Return the table at an address that a GPU can read its dtype from."""
    is_odd = table.is_contiguous() and table.data_ptr() % table.itemsize
    return table.cpu().to(table.device) if is_odd else table


def assert_same_bits(out, wanted):
    """Compare the forms and all bits of two outputs. The payload of a NaN does not matter."""
    forms = [(each.dtype, each.device, tuple(each.shape), each.stride()) for each in (out, wanted)]
    assert forms[0] == forms[1], f"expected {forms[1]}, got {forms[0]}"
    integer = torch.int16 if out.itemsize == 2 else torch.int32
    bits = [torch.where(each.isnan(), math.nan, each).view(integer) for each in (out, wanted)]
    what = "These are bits, as integers. The formula is `spec`, in section 2 of the notebook."
    torch.testing.assert_close(*bits, rtol=0, atol=0, msg=lambda text: f"{text}\n{what}")


def assert_same_results(results, expected):
    """Compare all bits of two lists of tensors."""
    for out, wanted in zip(results, expected, strict=True):
        assert_same_bits(out, wanted)
