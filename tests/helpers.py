"""What the tests share: the notebook's definitions as a module, what is expected, and stand-ins.

The stand-ins let a machine without a GPU run what only a GPU has: `emulate_assembly` teaches
Triton's interpreter the kernel's one instruction, `plan_on_cpu` gives a plan an allocator, a
device, a stream and a launcher.
"""

import contextlib
import ctypes
import functools
import json
import linecache
import operator
import os
import re
import subprocess
import sys
import types
import weakref
from concurrent import futures
from pathlib import Path

import nbformat
import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "nf4_triton.ipynb"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FULL = (  # edits that leave of the kernel what a full program runs, with words at multiples of 4
    ("tl.minimum(n_weights - program_start, SPAN).to(tl.int32)", "SPAN"),
    ("is_aligned & (n_valid == WORDS * 8)", "True"),
)
DEFINITION = re.compile(r"(# @title .*\n)?#\| export")  # how a definition cell begins


def cells():
    return nbformat.read(NOTEBOOK, as_version=4).cells


def exports(name="nf4_triton"):
    """(file name, source) of each definition cell, in order; the file name goes into tracebacks.

    name  the operator's namespace: a module of another name has an operator of its own
    """
    code = [cell for cell in cells() if cell.cell_type == "code" and DEFINITION.match(cell.source)]
    found = []
    for cell in code:
        source = cell.source.replace("nf4_triton::", f"{name}::")
        source = source.replace("ops.nf4_triton", f"ops.{name}")
        found.append((f"{NOTEBOOK.name}[{cell.id}]", source))
    return found


def load(name="nf4_triton", *edits):
    """A module made of the definition cells.

    edits  (text, replacement) pairs: each text must stand exactly once; for tests of the tests
    """
    module, found = types.ModuleType(name), exports(name)
    sys.modules[name] = module
    for text, _ in edits:
        count = sum(source.count(text) for _, source in found)
        if count != 1:
            raise ValueError(
                f"{text!r} must stand once in the notebook's definition cells, not {count} times. "
                "A test or a tool quotes it: where you changed it there, change the quotation, too "
                "(grep -rn finds it in tests and tools)"
            )
    for file, source in found:
        for edit in edits:
            source = source.replace(*edit)
        execute(source, file if name == "nf4_triton" else f"{name} {file}", vars(module))
    return module


def execute(source, file, namespace):
    """Runs the source under a file name of its own: Triton reads kernels through `inspect`."""
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec"), namespace)


def expected(weight, state):
    """bitsandbytes' own result; on a CPU, unless rows are whole blocks, that of the formula.

    There bitsandbytes 0.50.2 adds a dimension to 1-D shapes and goes wrong where a row ends inside
    a block.
    """
    *rest, columns = state.shape
    if weight.is_cuda or (rest and columns % state.blocksize == 0):
        return dequantize_4bit(weight.data, state)
    out = sys.modules["nf4_triton"].spec(weight, state)
    return out.t() if weight.shape[0] == 1 else out


def moved(tensor, offset):
    """A copy of the tensor's bytes at an offset in a larger buffer, in the same shape and dtype."""
    flat = tensor.reshape(-1).view(torch.uint8)
    buffer = torch.zeros(offset + flat.numel() + 16, dtype=torch.uint8, device=tensor.device)
    return buffer[offset : offset + flat.numel()].copy_(flat).view(tensor.dtype).view(tensor.shape)


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
    environment["PYTHONPATH"] = ":".join(map(str, [ROOT / "tests", ROOT / "tools", *sys.path]))
    how = {"env": os.environ | environment, "capture_output": True, "text": True, "timeout": 600}
    return subprocess.run([sys.executable, "-c", script], **how)


def write_json(path, content):
    """Writes the file, whole or not at all, and says where."""
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written: {unfinished.rename(path)}")


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


def plan_on_cpu(nf4, monkeypatch):
    """Plans are made as on a GPU; their launcher rebuilds tensors at the addresses it is given.

    returns  a namespace to change: `device` and `stream` are the current ones
    """
    world = types.SimpleNamespace(device=None, stream=0, scratch=0)
    kernel = nf4._dequantize_nf4_kernel

    def launch(grid, *arguments):
        kernel[grid](*arguments)
        tensors, (n_weights, *constants) = arguments[:7], arguments[7:]
        facts = [(each.dtype, each.numel()) for each in tensors if each is not None]

        def function(programs, warps, types_given, given):
            assert (programs, warps) == (*grid, metadata.num_warps)
            assert types_given == "O" * len(facts) + "iOO"
            *addresses, n_given, scratch, profile_scratch = given
            assert (n_given, scratch, profile_scratch) == (n_weights, None, None)
            assert all(addresses), "memory that was freed"
            found = [at(address, *fact) for address, fact in zip(addresses, facts, strict=True)]
            found += [None] * (7 - len(found))
            kernel[grid](*found, n_weights, *constants)

        metadata = types.SimpleNamespace(
            num_warps=4, shared=0, global_scratch_size=0, profile_scratch_size=world.scratch
        )
        handle = weakref.proxy(function)  # it lasts as long as the CompiledKernel
        return types.SimpleNamespace(function=handle, metadata=metadata, loaded=function)

    class Launching:  # as Triton's, a launch returns what was compiled
        def __getitem__(self, grid):
            return functools.partial(launch, grid)

    def launch_kernel(function, x, y, z, num_warps, shared, types_given, arguments, stream):
        assert (y, z, shared) == (1, 1, 0) and stream == world.stream and world.device is None
        # In another thread: modes and transforms are thread-local; they see no real launch, either.
        with futures.ThreadPoolExecutor(1) as pool:
            pool.submit(function, x, num_warps, types_given, arguments).result()

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
        "cuda.is_current_stream_capturing": lambda: False,
        "cuda.get_sync_debug_mode": lambda: 0,
    }
    for name, stand_in in stand_ins.items():
        replace_in_torch(monkeypatch, name, stand_in)
    monkeypatch.setattr(nf4, "PLANNING", True)
    monkeypatch.setattr(nf4, "_dequantize_nf4_kernel", Launching())
    return world


def replace_in_torch(monkeypatch, name, stand_in):
    """What stands at a dotted name becomes the stand-in."""
    owner, last = owner_of(name, torch)
    monkeypatch.setattr(owner, last, stand_in, raising=False)


def owner_of(name, root):
    """(the object that has it, its last part) of a dotted name below the root."""
    owner, _, last = f"root.{name}".rpartition(".")
    return operator.attrgetter(owner)(types.SimpleNamespace(root=root)), last


def numbers(nf4, kind):
    """What the operator takes beside tensors."""
    shape, dtype, *blocksizes = kind
    return shape, nf4.DTYPES.index(dtype), *blocksizes


class Planned:
    """A right or wrong module that keeps plans (on a CPU by stand-ins), and what its calls ran."""

    def __init__(self, nf4, device, patch):
        self.nf4, self.device, self.patch = nf4, device, patch
        self.world = None if torch.cuda.is_available() else plan_on_cpu(nf4, patch)
        self.n_by_operator, self.run_operator = 0, nf4.run_operator
        patch.setattr(nf4.NF4_OPS, "run", self.count_and_run)
        self.said = []  # in the log
        log = types.SimpleNamespace(warning=lambda text, *how: self.said.append(text % how))
        patch.setattr(nf4, "LOG", log)

    def count_and_run(self, *given, is_fake=False):
        if not is_fake:
            self.n_by_operator += 1
        return self.run_operator(*given, is_fake=is_fake)

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


def at(address, dtype, numel):
    """The tensor whose values begin at a CPU address."""
    memory = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=numel)
