"""Stand-ins for a GPU, with which the tests run on a CPU.

Triton's interpreter runs the kernel there. This file has what the interpreter lacks, and what plans
use of CUDA. On a GPU none of it is used, and the same tests run on the real things. Each stand-in
names a test that would fail there if the real thing did less than the stand-in.

What stands for CUDA or for a launcher also checks how it is called. Then it raises Misused, which
no `except Exception` of the code under test takes for a failure that it has to cope with.
"""

import contextlib
import ctypes
import functools
import inspect
import re
import sys
import types
import weakref
from collections import namedtuple
from unittest import mock

import bits
import numpy as np
import torch


class Misused(BaseException):
    """A stand-in was called as the real thing must not be called."""


def expect(is_so, what):
    if not is_so:
        raise Misused(what)


def emulate_assembly():
    """Teach Triton's interpreter the kernel's two instructions. Row i of a block is thread i.

    On a GPU: test_kernel.py, test_the_pages_cases_have_bitsandbytes_bits.
    """
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


def by_formula(tensors, kind):
    """Do what by_bitsandbytes does, by the page's formula: a CPU's bitsandbytes rounds otherwise.

    On a GPU: test_kernel.py, test_the_pages_cases_have_bitsandbytes_bits.
    """
    (weight, absmax, offset, absmax2, code2), (shape, dtype, blocksize, blocksize2) = tensors, kind
    state = types.SimpleNamespace(absmax=absmax, shape=shape, dtype=dtype, blocksize=blocksize)
    code = sys.modules["nf4_triton"].NF4_CODE.value
    state.code = torch.tensor(list(code), dtype=torch.float32)
    state.nested, state.offset = blocksize2 > 0, offset
    state.state2 = types.SimpleNamespace(absmax=absmax2, code=code2, blocksize=blocksize2)
    return bits.formula(weight.detach(), state)


METADATA = {"num_warps": 4, "shared": 0, "num_ctas": 1, "launch_pdl": False}
METADATA |= {"launch_cooperative_grid": False, "global_scratch_size": 0, "profile_scratch_size": 0}
Metadata = namedtuple("Metadata", METADATA)


class Compiled:
    """What Triton compiles of a kernel for these dtypes and constants, and Triton's launcher.

    On a GPU: test_trial.py, test_a_trial_is_right_in_any_surroundings,
    test_a_kernel_with_a_plan_is_not_unloaded, test_torchs_launcher_refuses_a_kernel_that_asks_more.
    """

    metadata = Metadata(**METADATA)

    def __init__(self, kernel, dtypes, constants):
        self.kernel, self.dtypes, self.constants = kernel, dtypes, constants
        self.function = weakref.ref(self)  # unloaded as soon as nobody holds this
        signature = ["constexpr" if dtype is None else "*" for dtype in dtypes]
        signature += ["i64"] + ["constexpr"] * len(constants)
        self.src = types.SimpleNamespace(signature=dict(enumerate(signature)))

    def __getitem__(self, grid):
        """Return what launches as Triton's own launcher does."""

        def start(*given, stream):
            *addresses, n_weights, _, _, _ = given
            expect(given[7:] == self.constants and len(addresses) == 6, "other arguments")
            expect(CURRENT.gpu is None, "another GPU is current")
            self.run(grid, [each for each in addresses if each is not None], n_weights, stream)

        return start

    def run(self, grid, addresses, n_weights, stream):
        """Run the kernel on the memory at these addresses, and round to bf16 as a GPU does.

        On a stream that is not the current one it runs too early, and what it writes is wrong.
        """
        expect(all(addresses), "freed memory")
        found = []
        for i, address in enumerate(addresses):
            count = n_weights if i == 0 else 1  # the interpreter asks for no tensor's length
            memory = (ctypes.c_char * (count * self.dtypes[i].itemsize)).from_address(address)
            found.append(torch.frombuffer(memory, dtype=self.dtypes[i], count=count))
        # The interpreter cuts bits off in place of rounding to bf16, and errs for its subnormals.
        out, *inputs = [each.float() if each.dtype == torch.bfloat16 else each for each in found]
        absent = [None] * (5 - len(inputs))
        self.kernel[grid](out, *inputs, *absent, n_weights, *self.constants)
        found[0].copy_(out if stream == CURRENT.stream else torch.zeros_like(out))


CURRENT = types.SimpleNamespace(gpu=None, stream=0)  # a CPU tensor's device has the index None


class PlansOnCPU:
    """Lets a module make plans as on a GPU, and keep to the current GPU and stream of CURRENT.

    On a GPU: test_call.py, test_a_changed_field_gets_right_weights (launcher, guard, allocator),
    test_the_current_stream_is_used, test_another_gpu_may_be_current; test_trial.py,
    test_a_hindered_trial_is_left_to_a_later_call. That a trial sleeps before it copies the weight,
    a GPU alone shows.
    """

    def __init__(self, nf4, monkeypatch):
        CURRENT.gpu, CURRENT.stream = None, 0
        self.nf4 = nf4
        in_the_module = {
            "HAS_PRIVATE": True,
            "INTERPRETED": False,
            "suits_kernel": self.as_interpreted(inspect.unwrap(nf4.suits_kernel)),
            "launch": self.launch_and_compile(inspect.unwrap(nf4.launch)),
            "by_bitsandbytes": self.with_bf16_by_formula(inspect.unwrap(nf4.by_bitsandbytes)),
            "DisableTorchFunction": torch._C.DisableTorchFunction,
            "TensorGuards": torch._C._dynamo.guards.TensorGuards,
            "_len_torch_dispatch_stack": torch._C._len_torch_dispatch_stack,
            "_empty_strided_cuda": torch._C._dynamo.guards._empty_strided_cpu,
            "_cuda_getDevice": lambda: CURRENT.gpu,
            "_cuda_exchangeDevice": self.exchange,
            "_cuda_maybeExchangeDevice": self.exchange,
            "_cuda_getCurrentRawStream": lambda index: CURRENT.stream,
            "_cuda_sleep": lambda cycles: None,
        }
        for name, value in in_the_module.items():
            monkeypatch.setattr(nf4, name, value, raising=False)
        launcher = types.SimpleNamespace(_launch_kernel=self.launch_kernel)
        stream = lambda: types.SimpleNamespace(cuda_stream=CURRENT.stream)  # noqa: E731
        in_torch = {
            "torch._C._StaticCudaLauncher": launcher,
            "torch.cuda.device": self.on_gpu,
            "torch.cuda.Stream": lambda device: 5,
            "torch.cuda.stream": self.on_stream,
            "torch.cuda.current_stream": stream,
            "torch.cuda.is_current_stream_capturing": lambda: False,
            "torch.cuda.get_sync_debug_mode": lambda: 0,
        }
        for name, value in in_torch.items():
            monkeypatch.setattr(name, value, raising=False)

    def as_interpreted(self, function):
        @functools.wraps(function)
        def run(*given):
            with mock.patch.object(self.nf4, "INTERPRETED", True):
                return function(*given)

        return run

    def with_bf16_by_formula(self, by_bitsandbytes):
        def dequantize(tensors, kind):
            _, dtype, _, _ = kind
            return (by_formula if dtype == torch.bfloat16 else by_bitsandbytes)(tensors, kind)

        return dequantize

    def launch_and_compile(self, launch):
        @functools.wraps(launch)
        def launch_and_return(out, tensors, kind):
            self.as_interpreted(launch)(out, tensors, kind)
            _, _, blocksize, blocksize2 = kind
            tables = [getattr(table, "dtype", None) for table in tensors[1:]]
            dtypes, constants = (out.dtype, torch.uint8, *tables), (blocksize, blocksize2)
            constants = (*constants, self.nf4.WORDS)
            return Compiled(self.nf4._dequantize_nf4_kernel, dtypes, constants)

        return launch_and_return

    def launch_kernel(self, function, x, y, z, num_warps, n_shared, type_codes, values, stream):
        """Do what torch's launcher does, which takes no keyword."""
        *addresses, n_weights, scratch, profile_scratch = values
        compiled = function()
        expect(compiled, "the kernel was unloaded")
        expect((y, z, num_warps, n_shared) == (1, 1, 4, 0), "another grid or block")
        expect(CURRENT.gpu is None, "another GPU is current")
        expect(scratch is None and profile_scratch is None, "scratch memory")
        expect(type_codes == "O" * len(addresses) + "lOO", f"types {type_codes}")
        compiled.run((x, y, z), addresses, n_weights, stream)

    def exchange(self, index):
        before, CURRENT.gpu = CURRENT.gpu, index
        return before

    @contextlib.contextmanager
    def on_gpu(self, device):
        before = self.exchange(device if isinstance(device, int) else None)
        try:
            yield
        finally:
            CURRENT.gpu = before

    @contextlib.contextmanager
    def on_stream(self, stream):
        expect(CURRENT.gpu is None, "torch.cuda.stream makes a context on the current GPU, too")
        before = vars(CURRENT).copy()
        CURRENT.stream = stream
        try:
            yield
        finally:
            vars(CURRENT).update(before)
