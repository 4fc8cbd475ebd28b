"""Share among the tests how bits are compared, odd tensors, and the stand-ins for a GPU."""

import contextlib
import copy
import ctypes
import functools
import inspect
import os
import re
import subprocess
import sys
import types
import weakref
from concurrent import futures
from unittest import mock

import numpy as np
import pytest
import shared
import torch
from bitsandbytes.functional import dequantize_4bit

GPU = torch.cuda.is_available()
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
NAMES = ["fp16", "bf16", "fp32"]  # readable ids
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # what bitsandbytes quantizes with
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)


def expected(weight, state):
    """Return bitsandbytes' own result; on a CPU, where it errs for some, the page's formula."""
    *rest, columns = state.shape
    if weight.is_cuda or (rest and columns % state.blocksize == 0 and weight.is_contiguous()):
        return dequantize_4bit(weight.data.view(torch.uint8), state)
    return formula(weight, state)


def formula(weight, state):
    """Return the weights by the page's `spec`; those of a [1, n] weight are transposed."""
    state = copy.copy(state)
    if state.nested:  # a GPU cannot read a float at an odd address
        state.offset, state.state2 = readable(state.offset), copy.copy(state.state2)
        state.state2.absmax = readable(state.state2.absmax)
        state.state2.code = readable(state.state2.code)
    out = sys.modules["nf4_triton"].spec(weight, state)
    return out.t() if weight.shape[:1] == (1,) and out.dim() == 2 else out


def readable(table):
    is_odd = table.is_contiguous() and table.data_ptr() % table.itemsize
    return table.cpu().to(table.device) if is_odd else table


def assert_same_bits(out, wanted, weight, state):
    """Compare the form and all bits of an output, and name the first weight that differs.

    The payload of a NaN does not matter.
    """
    forms = [(x.dtype, x.device, tuple(x.shape), x.stride()) for x in (out, wanted)]
    assert forms[0] == forms[1], f"expected {forms[1]}, got {forms[0]}"
    integer = torch.int16 if out.itemsize == 2 else torch.int32
    differ = (out.view(integer) != wanted.view(integer)) & ~(out.isnan() & wanted.isnan())
    if not differ.any():
        return
    index = tuple(differ.nonzero()[0].tolist())
    number = sum(i * stride for i, stride in zip(index, out.stride()))  # in the order of memory
    packed = weight.data.contiguous().view(-1).view(torch.uint8)
    nibble = int(packed[number // 2]) >> (0 if number % 2 else 4) & 0xF
    absmax = state.absmax[number // state.blocksize].item()
    values = []
    for x in (wanted, out):
        bits = x[index].view(integer).item() % 2 ** (8 * x.itemsize)
        values.append(f"{x[index].item()} (bits {bits:#x})")
    raise AssertionError(
        f"{int(differ.sum())} of {out.numel()} weights differ in {out.dtype}.\n"
        f"The first is weight {index}: expected {values[0]}, got {values[1]}.\n"
        f"Its nibble is {nibble}, its absmax {absmax}, in a block of {state.blocksize}.\n"
        "The formula stands in section 2 of the notebook, in `spec`. To check the kernel alone:\n"
        ".venv/bin/python -m pytest tests/test_kernel.py -m quick"
    )


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


def change(root, name, make):
    """Replace what stands at the dotted name below the root by make(of it)."""
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, root)
    setattr(owner, last, make(getattr(owner, last)))


def in_a_process(script, **environment):
    """Run the script in a Python of its own, which finds the tests and tools; return what ended."""
    environment["PYTHONPATH"] = ":".join(map(str, [shared.ROOT / "tests", *sys.path]))
    how = {"env": os.environ | environment, "capture_output": True, "text": True, "timeout": 600}
    return subprocess.run([sys.executable, "-c", script], **how)


# Stand-ins for a GPU. On a machine without one, Triton's interpreter runs the kernel, and these
# take the place of hardware. On a GPU none of them is used, and the same tests run on the real
# things; the tests named here would fail there if a stand-in promised too much.
#
#   emulate_assembly  the kernel's two instructions    test_kernel: ..._has_bitsandbytes_bits
#   Compiled          what Triton compiles, and its    test_call: test_a_trial_does_not_depend...
#                     own launcher                     test_call: test_what_fails_...
#   PlansOnCPU        torch's launcher and allocator   test_call: test_a_change_is_seen
#                     the current stream               test_call: test_the_current_stream_is_used
#                     the current GPU                  test_call: test_another_gpu_may_be_current
#                     by_bitsandbytes, by the page's   test_kernel: ..._has_bitsandbytes_bits
#                     formula


def emulate_assembly():
    """Teach Triton's interpreter the kernel's two instructions. Row i of a block is thread i."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    splat = InterpreterBuilder.create_splat

    def run_assembly(builder, asm, constraints, values, types_, is_pure, pack):
        if "%laneid" in asm:
            data = np.arange(32, dtype="int32")
        else:
            segments = re.fullmatch(r"shfl\.sync\.idx\.b32 \$0, \$1, \$2, (\w+), -1;", asm)[1]
            data = shuffle(values[0].data, values[1].data, int(segments, 0))
        handle = TensorHandle(data, types_[0].scalar)
        return types.SimpleNamespace(get_result=lambda i: handle)

    def splat_lanes(builder, block, scalar):
        """Make a block of a scalar that has a value for each of 32 lanes."""
        if scalar.data.size != 32:
            return splat(builder, block, scalar)
        rows = scalar.data[np.arange(block.shape[0]) % 32]
        return TensorHandle(np.repeat(rows[:, None], block.shape[1], axis=1), scalar.dtype.scalar)

    InterpreterBuilder.create_inline_asm = run_assembly
    InterpreterBuilder.create_splat = splat_lanes


def shuffle(values, lanes, segments):
    """Do shfl.sync.idx as PTX has it: bits 8 to 12 mask a segment's lane, bits 0 to 4 clamp it."""
    fixed, most = (segments >> 8) & 0x1F, segments & 0x1F
    row = np.arange(len(values))[:, None]
    lane = row % 32
    source = (lane & fixed) | (lanes & ~fixed & 0x1F)
    source = np.where(source <= ((lane & fixed) | (most & ~fixed)), source, lane)
    return np.take_along_axis(values, row - lane + source, axis=0)


def let_the_interpreter_run_assembly(nf4):
    """Let the kernel take its way with assembly; its product keeps subnormals, as on a CPU."""
    nf4.HAS_ASSEMBLY = nf4.tl.constexpr(True)
    nf4.libdevice = types.SimpleNamespace(mul_rn=lambda a, b: a * b)


class Compiled:
    """Stands for what Triton compiles of a kernel, and for the ways to launch that."""

    metadata = types.SimpleNamespace(num_warps=4, num_ctas=1, shared=0, launch_pdl=False)
    metadata.launch_cooperative_grid = False
    metadata.global_scratch_size = metadata.profile_scratch_size = 0

    def __init__(self, kernel, dtypes, constants):
        self.kernel, self.dtypes, self.constants = kernel, dtypes, constants
        self.function = weakref.proxy(self)  # it lasts as long as this
        signature = ["constexpr" if dtype is None else "*" for dtype in dtypes]
        signature += ["i64"] + ["constexpr"] * len(constants)
        self.src = types.SimpleNamespace(signature=dict(enumerate(signature)))

    def __getitem__(self, grid):
        """Return what launches as Triton's own launcher does."""

        def start(*given, stream):
            *addresses, n_weights, _, _, _ = given
            assert given[7:] == self.constants and len(addresses) == 6
            assert stream == CURRENT.stream and CURRENT.device is None
            self.run(grid, [each for each in addresses if each is not None], n_weights)

        return start

    def run(self, grid, addresses, n_weights):
        """Run the kernel in another thread: modes are thread-local, and see no real launch."""
        with futures.ThreadPoolExecutor(1) as pool:
            pool.submit(self.run_here, grid, addresses, n_weights).result()

    def run_here(self, grid, addresses, n_weights):
        """Run the kernel on the memory at these addresses, and round to bf16 as a GPU does."""
        assert all(addresses), "freed memory"
        found = []
        for i, address in enumerate(addresses):
            count = n_weights if i == 0 else 1  # the interpreter asks for no tensor's length
            memory = (ctypes.c_char * (count * self.dtypes[i].itemsize)).from_address(address)
            found.append(torch.frombuffer(memory, dtype=self.dtypes[i], count=count))
        # The interpreter cuts bits off in place of rounding to bf16, and errs for its subnormals.
        out, *inputs = [each.float() if each.dtype == torch.bfloat16 else each for each in found]
        absent = [None] * (5 - len(inputs))
        self.kernel[grid](out, *inputs, *absent, n_weights, *self.constants)
        found[0].copy_(out)


CURRENT = types.SimpleNamespace(device=None, stream=0)  # the GPU and the stream; a CPU's is None


class PlansOnCPU:
    """Lets a module make plans as on a GPU. The current GPU and stream can be set in CURRENT."""

    def __init__(self, nf4, monkeypatch):
        CURRENT.device, CURRENT.stream = None, 0
        self.nf4, self.compiled = nf4, {}
        patch = functools.partial(monkeypatch.setattr, raising=False)
        guards = torch._C._dynamo.guards
        patch(nf4, "HAS_PRIVATE", True)
        patch(nf4, "INTERPRETED", False)
        patch(nf4, "suits_kernel", self.as_interpreted(inspect.unwrap(nf4.suits_kernel)))
        patch(nf4, "by_bitsandbytes", by_formula)
        patch(nf4, "launch", self.launch_and_compile(inspect.unwrap(nf4.launch)))
        patch(nf4, "DisableTorchFunction", torch._C.DisableTorchFunction)
        patch(nf4, "_len_torch_dispatch_stack", torch._C._len_torch_dispatch_stack)
        patch(nf4, "TensorGuards", guards.TensorGuards)
        patch(nf4, "_empty_strided_cuda", guards._empty_strided_cpu)  # as invisible to tracers
        patch(nf4, "_cuda_getDevice", lambda: CURRENT.device)
        patch(nf4, "_cuda_exchangeDevice", self.exchange)
        patch(nf4, "_cuda_maybeExchangeDevice", self.exchange)
        patch(nf4, "_cuda_getCurrentRawStream", lambda index: CURRENT.stream)
        launcher = types.SimpleNamespace(_launch_kernel=self.launch_kernel)
        patch("torch._C._StaticCudaLauncher", launcher)
        patch("torch.cuda.device", self.current)
        patch("torch.cuda.Stream", lambda device: 5)
        patch("torch.cuda.stream", self.on_stream)
        patch(
            "torch.cuda.current_stream", lambda: types.SimpleNamespace(cuda_stream=CURRENT.stream)
        )
        patch(nf4, "_cuda_sleep", lambda cycles: None)
        patch("torch.cuda.is_current_stream_capturing", lambda: False)
        patch("torch.cuda.get_sync_debug_mode", lambda: 0)

    def as_interpreted(self, function):
        @functools.wraps(function)
        def run(*given):
            with mock.patch.object(self.nf4, "INTERPRETED", True):
                return function(*given)

        return run

    def launch_and_compile(self, launch):
        @functools.wraps(launch)
        def launch_and_return(out, tensors, kind):
            self.as_interpreted(launch)(out, tensors, kind)
            _, _, blocksize, blocksize2 = kind
            tables = [getattr(table, "dtype", None) for table in tensors[1:]]
            dtypes, constants = (out.dtype, torch.uint8, *tables), (blocksize, blocksize2)
            made = self.nf4._dequantize_nf4_kernel, dtypes, (*constants, self.nf4.WORDS)
            return self.compiled.setdefault(made, Compiled(*made))

        return launch_and_return

    def launch_kernel(
        self, function, x, y, z, num_warps, n_shared_bytes, type_codes, values, stream
    ):
        assert (y, z, num_warps, n_shared_bytes) == (1, 1, 4, 0)
        assert CURRENT.device is None, "another GPU is current"
        assert stream == CURRENT.stream, "another stream is current"
        *addresses, n_weights, scratch, profile_scratch = values
        assert scratch is None and profile_scratch is None
        assert type_codes == "O" * len(addresses) + "lOO"
        function.run((x, y, z), addresses, n_weights)

    def exchange(self, index):
        before, CURRENT.device = CURRENT.device, index
        return before

    @contextlib.contextmanager
    def current(self, device):
        before = self.exchange(device if isinstance(device, int) else None)
        try:
            yield
        finally:
            CURRENT.device = before

    @contextlib.contextmanager
    def on_stream(self, stream):
        assert CURRENT.device is None, "torch.cuda.stream makes a context on the current GPU, too"
        before = vars(CURRENT).copy()
        CURRENT.stream = stream
        try:
            yield
        finally:
            vars(CURRENT).update(before)


def by_formula(tensors, kind):
    """Do what by_bitsandbytes does, by the page's formula: for bf16, a CPU's bitsandbytes errs."""
    (weight, absmax, offset, absmax2, code2), (shape, dtype, blocksize, blocksize2) = tensors, kind
    state = types.SimpleNamespace(absmax=absmax, shape=shape, dtype=dtype, blocksize=blocksize)
    code = sys.modules["nf4_triton"].NF4_CODE.value
    state.code = torch.tensor(list(code), dtype=torch.float32)
    state.nested, state.offset = blocksize2 > 0, offset
    state.state2 = types.SimpleNamespace(absmax=absmax2, code=code2, blocksize=blocksize2)
    return formula(weight.detach(), state)


class Planned:
    """Calls a module that keeps plans (on a CPU by stand-ins), and sees what its calls ran."""

    def __init__(self, nf4, device, patch):
        self.nf4, self.device, self.patch = nf4, device, patch
        self.install()

    def install(self):
        """Put the stand-ins and the counters into the module, over what its cells define."""
        nf4, patch = self.nf4, self.patch
        if not GPU:
            PlansOnCPU(nf4, patch)
        self.n_by_operator = self.n_trials = 0
        self.shapes_by_bitsandbytes = []  # those of trials' samples, too
        run_operator, trial = inspect.unwrap(nf4.run_operator), inspect.unwrap(nf4.trial)
        by_bitsandbytes = inspect.unwrap(nf4.by_bitsandbytes)

        @functools.wraps(run_operator)
        def count_operator(*given):
            self.n_by_operator += 1
            return run_operator(*given)

        @functools.wraps(by_bitsandbytes)
        def count_bitsandbytes(tensors, kind):
            self.shapes_by_bitsandbytes.append(tuple(kind[0]))
            return by_bitsandbytes(tensors, kind)

        @functools.wraps(trial)
        def count_trial(*given):
            self.n_trials += 1
            return trial(*given)

        patch.setattr(nf4, "run_operator", count_operator)
        patch.setattr(nf4, "by_bitsandbytes", count_bitsandbytes)
        patch.setattr(nf4, "trial", count_trial)

    def run_again(self, name, text="", replacement=""):
        """Run the cell that defines this name again, with its text replaced, as a reader edits it.

        What the cell defines anew is seen and, on a CPU, has its stand-ins as before.
        """
        source = shared.defining(name)
        assert text in source, f"the cell of {name} does not say {text!r} any more"
        shared.execute(source.replace(text, replacement), f"{name} again", vars(self.nf4))
        if not GPU:
            let_the_interpreter_run_assembly(self.nf4)
        self.install()

    def made(self, seed=0, dtype=torch.float16, shape=(32, 64), **how):
        """Return a layer that was never called."""
        how.setdefault("device", self.device)
        weight, state = self.nf4.quantized(shape, dtype, seed=seed, **how)
        return types.SimpleNamespace(weight=weight, quant_state=state)

    def layer_with_plan(self):
        """Return a layer whose first call has left a plan for its kind."""
        layer = self.made()
        assert self.ran(layer) == "operator" and self.n_plans() > 0
        return layer

    def dequantize(self, layer):
        return self.nf4.dequantize_nf4(layer.weight, layer.quant_state)

    def ran(self, layer):
        """Call, compare the output's bits, and return what did the work.

        "plan": a plan, at once. "operator": a plan, by the operator. "bitsandbytes": no plan.
        """
        self.shapes_by_bitsandbytes.clear()
        before = self.n_by_operator
        self.assert_right(self.dequantize(layer), layer)
        if self.n_by_operator == before:
            return "plan"
        is_theirs = tuple(layer.quant_state.shape) in self.shapes_by_bitsandbytes
        return "bitsandbytes" if is_theirs else "operator"

    def assert_right(self, out, layer):
        wanted = formula(layer.weight, layer.quant_state)
        assert not out.requires_grad
        assert_same_bits(out, wanted, layer.weight, layer.quant_state)

    def n_plans(self):
        return sum(map(len, self.nf4.PLANS.values()))
