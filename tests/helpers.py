"""What the tests share: what is expected, tensors in odd places, and stand-ins for a GPU.

The stand-ins let a machine without a GPU run what only a GPU has: `emulate_assembly` teaches
Triton's interpreter the kernel's two instructions, `plan_on_cpu` gives a plan an allocator, a
device, a stream and a launcher.
"""

import contextlib
import ctypes
import functools
import operator
import os
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


def expected(weight, state):
    """bitsandbytes' own result; on a CPU, unless rows are whole blocks, that of the formula.

    There bitsandbytes 0.50.2 adds a dimension to 1-D shapes, goes wrong where a row ends inside a
    block, and reads a strided weight as if it were none.
    """
    *rest, columns = state.shape
    if weight.is_cuda or (rest and columns % state.blocksize == 0 and weight.is_contiguous()):
        return dequantize_4bit(weight.data, state)
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


def one_bit_off(dequantize_nf4):
    """Like this dequantize_nf4, but in one bit."""

    def wrong(weight, quant_state):
        out = dequantize_nf4(weight, quant_state)
        out[0, :1].view(torch.int16 if out.itemsize == 2 else torch.int32)[0] ^= 256
        return out

    return wrong


def in_a_process(script, **environment):
    """What became of the script in a Python of its own, which sees the tests and the tools."""
    environment["PYTHONPATH"] = ":".join(map(str, [shared.ROOT / "tests", *sys.path]))
    how = {"env": os.environ | environment, "capture_output": True, "text": True, "timeout": 600}
    return subprocess.run([sys.executable, "-c", script], **how)


# Triton's interpreter learns the assembly. Row i of a block stands for thread i.


def emulate_assembly():
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_inline_asm = run_assembly
    InterpreterBuilder.create_splat = functools.partialmethod(
        splat, InterpreterBuilder.create_splat
    )


def splat(builder, otherwise, block, scalar):
    """A scalar that has a value for each of 32 lanes, as a block."""
    from triton.runtime.interpreter import TensorHandle

    if scalar.data.size != 32:
        return otherwise(builder, block, scalar)
    of_rows = scalar.data[np.arange(block.shape[0]) % 32]
    return TensorHandle(np.repeat(of_rows[:, None], block.shape[1], axis=1), scalar.dtype.scalar)


def shuffle(values, lanes, segments, mask):
    """shfl.sync.idx by PTX's rules.

    segments  its bits 8 to 12 mask a segment's lane bits, 0 to 4 are a clamp
    """
    assert mask == -1, "a lane does not take part"
    fixed, most = (segments >> 8) & 0x1F, segments & 0x1F
    row = np.arange(len(values))[:, None]
    lane = row % 32
    source = (lane & fixed) | (lanes & ~fixed & 0x1F)
    source = np.where(source <= ((lane & fixed) | (most & ~fixed)), source, lane)
    return np.take_along_axis(values, row - lane + source, axis=0)


OPERATIONS = {"mov.u32": lambda lane: lane, "shfl.sync.idx.b32": shuffle}


def run_assembly(builder, asm, constraints, values, types_, is_pure, pack):
    """What one instruction leaves in $0, for all threads."""
    from triton.runtime.interpreter import TensorHandle

    name, _, *operands = asm.strip(";").replace(",", " ").split()
    if name not in OPERATIONS:
        cure = "teach it what that does, in OPERATIONS of tests/helpers.py"
        raise ValueError(f"the tests' emulator does not know the instruction {name}: {cure}")
    registers = {"%laneid": np.arange(32, dtype="int32")}
    for i, value in enumerate(values, 1):
        registers[f"${i}"] = value.data
    read = [registers[each] if each in registers else int(each, 0) for each in operands]
    handle = TensorHandle(OPERATIONS[name](*read), types_[0].scalar)
    return types.SimpleNamespace(get_result=lambda i: handle)


# Plans without a GPU.


class Compiled:
    """Stands for what Triton compiles for arguments of these dtypes; `kernel` is interpreted."""

    def __init__(self, kernel, arguments):
        *tensors, n_weights, blocksize, blocksize2, words = arguments
        dtypes = [tensor.dtype for tensor in tensors if tensor is not None]

        def start(programs, values):
            *addresses, n_weights, scratch, profile_scratch = values
            assert scratch is None and profile_scratch is None and all(addresses), "freed memory"
            n_blocks = -(-n_weights // blocksize)
            n_blocks2 = -(-n_blocks // (blocksize2 or 1))
            sizes = [n_weights, -(-n_weights // 2), n_blocks, 1, n_blocks2, 256]
            facts = zip(addresses, dtypes, sizes, strict=False)
            found = [at(*fact) for fact in facts] + [None] * (6 - len(addresses))
            kernel[(programs,)](*found, n_weights, blocksize, blocksize2, words)

        rare = dict.fromkeys(("launch_pdl", "global_scratch_size", "profile_scratch_size"), 0)
        self.metadata = types.SimpleNamespace(num_warps=4, num_ctas=1, shared=0, **rare)
        self.loaded = start  # it lasts as long as this
        self.function = weakref.proxy(start)
        signature = ["constexpr" if tensor is None else "*" for tensor in tensors]
        signature += ["i32"] + ["constexpr"] * 3
        self.src = types.SimpleNamespace(signature=dict(enumerate(signature)))


class Launching:
    """Stands for the kernel: interprets it, and gives back what was compiled, once for a kind."""

    def __init__(self, kernel):
        self.kernel, self.compiled = kernel, {}

    def __getitem__(self, grid):
        return functools.partial(self.launch, grid)

    def launch(self, grid, *arguments):
        self.kernel[grid](*arguments)
        *tensors, _n_weights, blocksize, blocksize2, words = arguments
        dtypes = [getattr(tensor, "dtype", None) for tensor in tensors]
        key = (*dtypes, blocksize, blocksize2, words)
        if key not in self.compiled:
            self.compiled[key] = Compiled(self.kernel, arguments)
        return self.compiled[key]


def plan_on_cpu(nf4, monkeypatch):
    """Plans are made as on a GPU; their launcher rebuilds tensors at the addresses it is given.

    returns  a namespace to change: `device` and `stream` are the current ones
    """
    world = types.SimpleNamespace(device=None, stream=0)

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

    stand_ins = {
        "_C._cuda_getDevice": lambda: world.device,
        "_C._cuda_getCurrentRawStream": lambda index: world.stream,
        "_C._StaticCudaLauncher": types.SimpleNamespace(_launch_kernel=launch_kernel),
        # the CPU's allocator is as invisible to tracers
        "_C._dynamo.guards._empty_strided_cuda": torch._C._dynamo.guards._empty_strided_cpu,
        "cuda.device": current,
        "cuda.device_of": lambda tensor: current(None),
        "cuda.is_current_stream_capturing": lambda: False,
        "cuda.get_sync_debug_mode": lambda: 0,
    }
    for name, stand_in in stand_ins.items():
        replace_in_torch(monkeypatch, name, stand_in)
    monkeypatch.setattr(nf4, "_dequantize_nf4_kernel", Launching(nf4._dequantize_nf4_kernel))
    return world


def replace_in_torch(monkeypatch, name, stand_in):
    """What stands at a dotted name becomes the stand-in."""
    owner, last = owner_of(name, torch)
    monkeypatch.setattr(owner, last, stand_in, raising=False)


def owner_of(name, root):
    """(the object that has it, its last part) of a dotted name below the root."""
    owner, _, last = f"root.{name}".rpartition(".")
    return operator.attrgetter(owner)(types.SimpleNamespace(root=root)), last


def at(address, dtype, numel):
    """The tensor whose values begin at a CPU address."""
    memory = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=numel)


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
        self.said = []  # in the log
        log = types.SimpleNamespace(warning=lambda text, *how: self.said.append(text % how))
        patch.setattr(nf4, "LOG", log)

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

    def ran(self, layer):
        """What a call ran, "plan" or "operator"; its bits are right."""
        before = self.n_by_operator
        out = self.nf4.your_dequantize_nf4(layer)
        assert out.dtype == layer.quant_state.dtype and not out.requires_grad
        assert self.n_wrong(out, layer) == 0
        return "plan" if self.n_by_operator == before else "operator"

    def n_wrong(self, out, layer):
        want = self.nf4.spec(layer.weight, layer.quant_state)
        return self.nf4.bits_differing(out, want.t() if layer.weight.shape[0] == 1 else want)

    def n_plans(self):
        return sum(map(len, self.nf4.PLANS.values()))

    def replace(self, name, stand_in):
        replace_in_torch(self.patch, name, stand_in)

    def start_by(self, function):
        launcher = types.SimpleNamespace(_launch_kernel=function)
        self.replace("_C._StaticCudaLauncher", launcher)
