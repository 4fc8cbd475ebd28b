"""What the tests share: what is expected, tensors in odd places, and stand-ins for a GPU."""

import contextlib
import ctypes
import functools
import os
import re
import subprocess
import sys
import types
import weakref
from concurrent import futures

import numpy as np
import shared
import torch
from bitsandbytes.functional import dequantize_4bit

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
DOUBLED = """
@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    return (x + x).to(DTYPE)


"""  # in the place of the kernel's own, an edit


def expected(weight, state):
    """bitsandbytes' own result; the formula's on a CPU, where theirs errs on ragged rows."""
    *rest, columns = state.shape
    if weight.is_cuda or (rest and columns % state.blocksize == 0 and weight.is_contiguous()):
        return dequantize_4bit(weight.data.view(torch.uint8), state)
    out = sys.modules["nf4_triton"].spec(weight, state)
    return out.t() if weight.shape[0] == 1 else out


def moved(tensor, offset):
    """A copy of the tensor's bytes at an offset in a larger buffer, in the same shape and dtype."""
    flat = tensor.reshape(-1).view(torch.uint8)
    buffer = torch.zeros(offset + flat.numel() + 16, dtype=torch.uint8, device=tensor.device)
    return buffer[offset : offset + flat.numel()].copy_(flat).view(tensor.dtype).view(tensor.shape)


def every_second(weight):
    """The same weight, in a buffer twice as long."""
    return torch.cat((weight, weight), dim=1)[:, :1]


def resized(tensor, n_bytes):
    """With n_bytes of memory; none: as FSDP frees what it has gathered."""
    tensor.untyped_storage().resize_(n_bytes)
    return tensor


def one_byte_on(table):
    """A copy at an odd address, as DLPack can hand one over."""
    shifted = torch.from_dlpack(moved(table.reshape(-1).view(torch.uint8), 1))
    return shifted.view(table.dtype).view(table.shape)


def in_a_process(script, **environment):
    """What became of the script in a Python of its own, which sees the tests and the tools."""
    environment["PYTHONPATH"] = ":".join(map(str, [shared.ROOT / "tests", *sys.path]))
    how = {"env": os.environ | environment, "capture_output": True, "text": True, "timeout": 600}
    return subprocess.run([sys.executable, "-c", script], **how)


def emulate_assembly():
    """Triton's interpreter learns the kernel's two instructions. Row i of a block is thread i."""
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
        """A scalar that has a value for each of 32 lanes, as a block."""
        if scalar.data.size != 32:
            return splat(builder, block, scalar)
        rows = scalar.data[np.arange(block.shape[0]) % 32]
        return TensorHandle(np.repeat(rows[:, None], block.shape[1], axis=1), scalar.dtype.scalar)

    InterpreterBuilder.create_inline_asm = run_assembly
    InterpreterBuilder.create_splat = splat_lanes


def shuffle(values, lanes, segments):
    """shfl.sync.idx by PTX's rules: bits 8 to 12 of segments mask a segment's lane, 0 to 4 clamp"""
    fixed, most = (segments >> 8) & 0x1F, segments & 0x1F
    row = np.arange(len(values))[:, None]
    lane = row % 32
    source = (lane & fixed) | (lanes & ~fixed & 0x1F)
    source = np.where(source <= ((lane & fixed) | (most & ~fixed)), source, lane)
    return np.take_along_axis(values, row - lane + source, axis=0)


class Compiled:
    """Stands for what Triton compiles of a kernel. Called with addresses, it rebuilds tensors."""

    metadata = types.SimpleNamespace(num_warps=4, num_ctas=1, shared=0, launch_pdl=False)
    metadata.launch_cooperative_grid = False
    metadata.global_scratch_size = metadata.profile_scratch_size = 0

    def __init__(self, kernel, dtypes, *constants):
        self.kernel, self.dtypes, self.constants = kernel, dtypes, constants
        self.function = weakref.proxy(self)  # it lasts as long as this
        signature = ["constexpr" if dtype is None else "*" for dtype in dtypes]
        signature += ["i32"] + ["constexpr"] * 3
        self.src = types.SimpleNamespace(signature=dict(enumerate(signature)))

    def __call__(self, programs, values):
        *addresses, n_weights, scratch, profile_scratch = values
        assert scratch is None and profile_scratch is None and all(addresses), "freed memory"
        found = [None] * 6
        for i, address in enumerate(addresses):  # the interpreter asks for no tensor's length
            memory = ctypes.c_int64.from_address(address)
            found[i] = torch.frombuffer(memory, dtype=self.dtypes[i], count=1)
        self.kernel[(programs,)](*found, n_weights, *self.constants)


def plan_on_cpu(nf4, monkeypatch):
    """Plans are made as on a GPU. Returns a namespace: the current device and stream."""
    world = types.SimpleNamespace(device=None, stream=0)
    launch, compiled = nf4.launch, {}

    def launch_and_compile(out, tensors, kind):
        launch(out, tensors, kind)
        dtypes = [getattr(table, "dtype", None) for table in tensors[1:]]
        dtypes = (out.dtype, torch.uint8, *dtypes)
        key = (nf4._dequantize_nf4_kernel, dtypes, *kind[2:], nf4.WORDS)
        if key not in compiled:
            compiled[key] = Compiled(*key)
        return compiled[key]

    def launch_kernel(function, x, y, z, num_warps, shared_bytes, types_given, values, stream):
        assert (y, z, num_warps, shared_bytes) == (1, 1, 4, 0)
        assert stream == world.stream and world.device is None
        assert types_given == "O" * (len(values) - 3) + "iOO"
        # In another thread: modes and transforms are thread-local; they see no real launch, either.
        with futures.ThreadPoolExecutor(1) as pool:
            pool.submit(function, x, values).result()

    @contextlib.contextmanager
    def current(index):
        before, world.device = world.device, index
        yield
        world.device = before

    patch = functools.partial(monkeypatch.setattr, raising=False)
    patch(nf4, "launch", launch_and_compile)
    patch("torch._C._StaticCudaLauncher", types.SimpleNamespace(_launch_kernel=launch_kernel))
    patch("torch._C._cuda_getDevice", lambda: world.device)
    patch("torch._C._cuda_getCurrentRawStream", lambda index: world.stream)
    guards = torch._C._dynamo.guards
    patch(guards, "_empty_strided_cuda", guards._empty_strided_cpu)  # as invisible to tracers
    patch("torch.cuda.device", current)
    patch("torch.cuda.device_of", lambda tensor: current(None))
    patch("torch.cuda.is_current_stream_capturing", lambda: False)
    patch("torch.cuda.get_sync_debug_mode", lambda: 0)
    return world


def change(root, name, make):
    """What stands at the dotted name below the root becomes make(of it)."""
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, root)
    setattr(owner, last, make(getattr(owner, last)))


class Planned:
    """A module that keeps plans (on a CPU by stand-ins), and what its calls ran."""

    def __init__(self, nf4, device, patch):
        self.nf4, self.device, self.patch = nf4, device, patch
        self.world = None if torch.cuda.is_available() else plan_on_cpu(nf4, patch)
        self.n_by_operator, run = 0, nf4.run_operator

        def count_and_run(*given):
            self.n_by_operator += 1
            return run(*given)

        patch.setattr(nf4.NF4_OPS, "run", count_and_run)

    def made(self, seed=0, dtype=torch.float16, shape=(32, 64), **how):
        """A layer that was never called."""
        how.setdefault("device", self.device)
        weight, state = self.nf4.quantized(shape, dtype, seed=seed, **how)
        return types.SimpleNamespace(weight=weight, quant_state=state)

    def layer_with_plan(self):
        """A layer whose first call has left a plan for its kind."""
        layer = self.made()
        assert self.ran(layer) == "operator" and self.nf4.PLANS
        return layer

    def dequantize(self, layer):
        return self.nf4.dequantize_nf4(layer.weight, layer.quant_state)

    def ran(self, layer):
        """What a call ran, "plan" or "operator"; its bits are right."""
        before = self.n_by_operator
        out = self.dequantize(layer)
        assert out.dtype == layer.quant_state.dtype and not out.requires_grad
        assert self.n_wrong(out, layer) == 0
        return "plan" if self.n_by_operator == before else "operator"

    def n_wrong(self, out, layer):
        want = self.nf4.spec(layer.weight, layer.quant_state)
        return self.nf4.bits_differing(out, want.t() if layer.weight.shape[0] == 1 else want)

    def n_plans(self):
        return sum(map(len, self.nf4.PLANS.values()))
