"""What tests share: odd tensors, and calls that tell what served them."""

import enum
import functools
import inspect
import os
import subprocess
import sys
import types

import bits
import pytest
import shared
import stand_ins
import torch

GPU = torch.cuda.is_available()
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16", "fp32"])


# Odd tensors


def moved(tensor, offset):
    """Copy the tensor's bytes to an offset in a larger buffer; keep its shape and dtype."""
    flat = tensor.reshape(-1).view(torch.uint8)
    buffer = torch.zeros(offset + flat.numel() + 16, dtype=torch.uint8, device=tensor.device)
    return buffer[offset : offset + flat.numel()].copy_(flat).view(tensor.dtype).view(tensor.shape)


def one_byte_on(table):
    """Copy the table to an odd address, as DLPack can hand one over."""
    shifted = torch.from_dlpack(moved(table.reshape(-1).view(torch.uint8), 1))
    return shifted.view(table.dtype).view(table.shape)


def every_second(tensor):
    """Return the same tensor as every second element of a buffer."""
    return torch.stack((tensor, tensor), -1)[..., 0]


def freed(tensor):
    """Free the tensor's memory, as FSDP does."""
    tensor.untyped_storage().resize_(0)
    return tensor


def replace_field(root, name, make):
    """Replace what stands at the dotted name below the root by make(of it)."""
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, root)
    setattr(owner, last, make(getattr(owner, last)))


# Calls


def run_in_a_process(script, **environment):
    """Run the script in a Python of its own, which finds the tests and tools; it must succeed."""
    environment["PYTHONPATH"] = ":".join(map(str, [shared.ROOT / "tests", *sys.path]))
    how = {"env": os.environ | environment, "capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run([sys.executable, "-c", script], **how)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-4000:]


class ServedBy(enum.Enum):
    """What does the work of a call."""

    PLAN = "a plan, at once"
    OPERATOR = "a plan, which the operator found or made"
    BITSANDBYTES = "bitsandbytes"


NEW_PLAN = [ServedBy.OPERATOR, ServedBy.PLAN]  # what serves two calls of a form without a plan


class Calls:
    """Calls a module that keeps plans (on a CPU by stand-ins), and sees what served its calls."""

    def __init__(self, nf4, device, patch):
        self.nf4, self.device, self.patch = nf4, device, patch
        self.watch()

    def watch(self):
        """Put the stand-ins and the counters into the module, over what its cells define."""
        if not GPU:
            stand_ins.PlansOnCPU(self.nf4, self.patch)
        self.n_by_operator = self.n_trials = 0
        self.shapes_by_bitsandbytes = []  # those of trials' samples, too
        for name, count in {
            "run_operator": self.count_operator,
            "by_bitsandbytes": self.count_bitsandbytes,
            "trial": self.count_trial,
        }.items():
            function = inspect.unwrap(getattr(self.nf4, name))  # so that none is counted twice
            counting = functools.wraps(function)(functools.partial(count, function))
            self.patch.setattr(self.nf4, name, counting)

    def count_operator(self, function, *given):
        self.n_by_operator += 1
        return function(*given)

    def count_bitsandbytes(self, function, tensors, kind):
        shape, *_ = kind
        self.shapes_by_bitsandbytes.append(tuple(shape))
        return function(tensors, kind)

    def count_trial(self, function, *given):
        self.n_trials += 1
        return function(*given)

    def run_again(self, name, text="", replacement=""):
        """Run the cell that defines this name again, with its text replaced, as a reader edits it.

        What the cell defines anew is watched and, on a CPU, has its stand-ins as before.
        """
        source = shared.defining(name)
        assert text in source, f"the cell of {name} does not say {text!r} any more"
        shared.execute(source.replace(text, replacement), f"{name} again", vars(self.nf4))
        if not GPU:
            stand_ins.let_the_interpreter_run_assembly(self.nf4)
        self.watch()

    def layer(self, seed=0, dtype=torch.float16, shape=(32, 64), **how):
        """Return a layer that was never called."""
        how.setdefault("device", self.device)
        weight, state = self.nf4.quantized(shape, dtype, seed=seed, **how)
        return types.SimpleNamespace(weight=weight, quant_state=state)

    def layer_with_plan(self):
        """Return a layer whose first call has left a plan for its kind."""
        layer = self.layer()
        self.assert_served_by(layer, ServedBy.OPERATOR)
        assert self.n_plans() > 0, "the first call left no plan"
        return layer

    def dequantize(self, layer):
        return self.nf4.dequantize_nf4(layer.weight, layer.quant_state)

    def served_by(self, layer):
        """Call, compare the output's bits, and return what did the work."""
        self.shapes_by_bitsandbytes.clear()
        before = self.n_by_operator
        self.assert_right(self.dequantize(layer), layer)
        if self.n_by_operator == before:
            return ServedBy.PLAN
        if tuple(layer.quant_state.shape) in self.shapes_by_bitsandbytes:
            return ServedBy.BITSANDBYTES
        return ServedBy.OPERATOR

    def assert_served_by(self, layer, *wanted):
        """Call once for each of `wanted`, compare the bits, and fail where another did the work."""
        found = [self.served_by(layer).value for _ in wanted]
        expected = [each.value for each in wanted]
        assert found == expected, f"expected calls to be served by {expected}, got {found}"

    def assert_right(self, out, layer):
        """Compare the bits with the page's formula.

        On a CPU the stand-in for bitsandbytes uses the formula for bf16, too, so this shows nothing
        of bitsandbytes there. test_kernel.py asks bitsandbytes itself.
        """
        assert not out.requires_grad
        bits.assert_same_bits(out, bits.formula(layer.weight, layer.quant_state))

    def n_plans(self):
        return sum(map(len, self.nf4.PLANS.values()))
