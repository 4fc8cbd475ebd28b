"""What a result is compared with, and how it is counted."""

from bitsandbytes.functional import dequantize_4bit


def expected(nf4, weight, state):
    """bitsandbytes' own result; on a CPU, unless rows are whole blocks, that of the notebook's PyTorch reference.

    There bitsandbytes 0.50.2 adds a dimension to 1-D shapes, goes wrong in even rows and compiles itself for odd ones.
    """
    *rest, columns = state.shape
    if weight.is_cuda or (rest and columns % state.blocksize == 0):
        return dequantize_4bit(weight.data, state)
    out = nf4.dequantize_reference(weight.data.reshape(-1, 1), state).reshape(state.shape)
    return out.t() if weight.shape[0] == 1 else out


def differing(nf4, tally, out, want):
    """How many elements differ in their raw bits; counted before anything is asserted."""
    count = nf4.bits_differing(out, want)
    tally["cases"] += 1
    tally["weights"] += want.numel()
    tally["differing"] += count
    return count
