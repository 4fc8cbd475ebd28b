"""A long run over many layers that come, change and go: right bits throughout, and no growth of memory.

Wrong functions are run as well: one that holds on to old results, and two that leak.
"""

import collections
import ctypes
import gc
import os
import random

import peer
import pytest
import torch
from bitsandbytes.functional import quantize_4bit

GPU = torch.cuda.is_available()
LAYERS, WARM_UP, CALLS = (300, 20_000, 80_000) if GPU else (12, 60, 300)
CHANGES, CHECKS = (20, 50) if GPU else (4, 5)  # one in so many calls
SHAPES = [(512, 1024), (256, 256), (1024, 64), (128, 1000), (96, 640), (33, 65), (1, 4097), (7, 9)]
SHAPES = SHAPES if GPU else [(32, 64), (8, 100), (3, 5), (1, 700)]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TOLERANCE = 8 << 20  # bytes of the process, whose heap is never quite still: 105 in each of 80 000 calls


def make(device, shape, dtype, nested):
    values = torch.randn(shape, device=device).to(dtype)
    weight, state = quantize_4bit(values, compress_statistics=nested, quant_type="nf4")
    return torch.nn.Parameter(weight, requires_grad=False), state


def bytes_like(tensor):
    return torch.randint(0, 256, tensor.shape, dtype=torch.uint8, device=tensor.device)


def change(layers, i, kind):
    """Changes layer i in one of the ways of real life; sizes stay the same, and with them what all layers hold."""
    weight, state = layers[i]
    if kind == "layer":
        layers[i] = make(weight.device, state.shape, state.dtype, state.state2 is not None)
    elif kind == "weight":
        layers[i] = torch.nn.Parameter(bytes_like(weight), requires_grad=False), state
    elif kind == "weight.data":
        weight.data = bytes_like(weight)
    elif kind == "contents":
        weight.data.copy_(bytes_like(weight))
    elif kind == "absmax":
        state.absmax = state.absmax.flip(0)
    elif kind == "absmax.data":
        state.absmax.data = state.absmax.flip(0)
    elif state.state2 is not None:
        state.state2.absmax = state.state2.absmax * 1.5 if state.state2.absmax[0] < 1 else state.state2.absmax / 2


KINDS = ("layer", "weight", "weight.data", "contents", "absmax", "absmax.data", "state2.absmax")


class Load:
    def __init__(self, nf4, device, tally):
        torch.manual_seed(0)
        self.nf4, self.tally, self.random = nf4, tally, random.Random(0)
        self.layers = [make(device, SHAPES[i % len(SHAPES)], DTYPES[i % 3], nested=i % 5 > 0) for i in range(LAYERS)]

    def run(self, function, calls):
        """Calls function for random layers, changes some of them, and counts what differs from bitsandbytes."""
        wrong = 0
        for call in range(calls):
            i = self.random.randrange(LAYERS)
            if call % CHANGES == 0:
                change(self.layers, i, self.random.choice(KINDS))
            out = function(*self.layers[i])
            if call % CHECKS == 0:
                wrong += peer.differing(self.nf4, self.tally, out, peer.expected(self.nf4, *self.layers[i]))
        return wrong


def memory():
    """Bytes that torch holds on the GPU, and bytes of this process in the machine's memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory that the heap still holds would hide a leak
    if GPU:
        torch.cuda.synchronize()
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return torch.cuda.memory_allocated() if GPU else 0, pages * os.sysconf("SC_PAGE_SIZE")


def growth(load, function, calls):
    """How many bytes were added on the GPU and in the process by so many calls; how many weights differed."""
    before = memory()
    wrong = load.run(function, calls)
    return *(after - start for after, start in zip(memory(), before)), wrong


def test_long_run(nf4, device, tally):
    load = Load(nf4, device, tally)
    assert load.run(nf4.dequantize_nf4, WARM_UP) == 0
    on_gpu, in_process, wrong = growth(load, nf4.dequantize_nf4, CALLS)
    tally["load_calls"] += WARM_UP + CALLS
    tally["load_growth_bytes"] += on_gpu
    tally["load_process_growth_bytes"] += max(0, in_process)
    assert wrong == 0 and on_gpu == 0 and in_process < TOLERANCE, (on_gpu, in_process)


def test_held_results_are_found(nf4, device):
    held = {}
    load = Load(nf4, device, collections.Counter())
    function = lambda weight, state: held.setdefault(id(state), nf4.dequantize_nf4(weight, state))  # noqa: E731
    try:
        assert load.run(function, WARM_UP) > 0
    except ValueError as error:  # another layer's, whose state had the same id
        assert "expected equal shapes and dtypes" in str(error)


@pytest.mark.parametrize("where", ["gpu", "process"])
def test_leaks_are_found(nf4, device, where):
    if where == "gpu" and not GPU:
        pytest.skip("needs a CUDA GPU")
    kept, calls = [], WARM_UP
    load = Load(nf4, device, collections.Counter())

    def leaking(weight, state):
        out = nf4.dequantize_nf4(weight, state)
        if where == "gpu":
            kept.append(out[:1, :1].clone())
        else:
            kept.append(bytearray(4 * TOLERANCE // calls))
        return out

    load.run(nf4.dequantize_nf4, WARM_UP)
    on_gpu, in_process, _ = growth(load, leaking, calls)
    assert on_gpu > 0 if where == "gpu" else in_process > TOLERANCE
