"""A user who passes what cannot be decoded is told what and why, and the process stays usable.

Each fault comes to a first call, to one that has a plan, to the operator, to fake tensors and to
a compiled function. What was right before gives the right bits afterwards.
"""

import re
import types

import helpers
import pytest
import torch
from bitsandbytes.functional import _convert_weight_packed_for_cpu, dequantize_4bit
from torch._subclasses.fake_tensor import FakeTensorMode

GPU = torch.cuda.is_available()


def put(name, make):
    """A change of a state's field: `make` has its present value."""

    def change(weight, state):
        owner, _, field = name.rpartition(".")
        owner = getattr(state, owner) if owner else state
        setattr(owner, field, make(getattr(owner, field)))
        return weight, state

    return change


def passed(make):
    """A change of the packed weight."""
    return lambda weight, state: (make(weight), state)


def resized(tensor, n_bytes):
    tensor.untyped_storage().resize_(n_bytes)
    return tensor


def one_byte_on(table):
    """A copy at an odd address, as DLPack can hand one over."""
    moved = torch.from_dlpack(helpers.moved(table.view(torch.uint8), 1))
    return moved.view(table.dtype)


def strided(tensor):
    return torch.stack((tensor, tensor), -1)[..., 0]


BY_READ = {  # what is wrong: (exception, words, how to make it)
    "the state is None": (TypeError, "is the layer on the GPU", lambda weight, state: (weight, None)),
    "neither weight nor state": (TypeError, "is the layer on the GPU", lambda *_: (None, None)),
    "repacked for a CPU": (ValueError, "a CPU's repacked one", _convert_weight_packed_for_cpu),
    "fp4": (ValueError, "quant_type must be 'nf4', got 'fp4'", put("quant_type", lambda _: "fp4")),
    "shape None": (TypeError, "'NoneType' object", put("shape", lambda _: None)),
    "state2 without fields": (TypeError, "'absmax'", put("state2", lambda _: types.SimpleNamespace())),
    "state2.dtype": (ValueError, "got torch.float16 in", put("state2.dtype", lambda _: torch.half)),
    "state2.blocksize 0": (ValueError, "blocks of 0", put("state2.blocksize", lambda _: 0)),
}
BY_CHECK = {
    "the weight is None": (ValueError, "the weight must be .*, got None", passed(lambda _: None)),
    "dtype": (ValueError, "dtype must be .*, got torch.float64", put("dtype", lambda _: torch.double)),
    "dtype None": (RuntimeError, "'dtype'", put("dtype", lambda _: None)),
    "blocksize 63": (ValueError, "blocksize must be .*, got 63", put("blocksize", lambda _: 63)),
    "blocksize 64.0": (RuntimeError, "'blocksize'.*'float'", put("blocksize", float)),
    "blocksize None": (RuntimeError, "'blocksize'.*'NoneType'", put("blocksize", lambda _: None)),
    "another blocksize": (ValueError, "absmax must have 32 bytes", put("blocksize", lambda _: 128)),
    "state2.blocksize 100": (
        ValueError,
        r"state2\.blocksize must be .*, got 100",
        put("state2.blocksize", lambda _: 100),
    ),
    "a byte too few": (ValueError, "2048 bytes .* got 2047", passed(lambda weight: weight[:-1])),
}
