"""What the tests share: the notebook's definitions as a module, what results are compared with, and stand-ins.

The stand-ins let a machine without a GPU run what only a GPU has: `emulate_assembly` teaches Triton's interpreter the
kernel's two instructions, `keep_on_cpu` gives a kept launch an allocator, a device, a stream and a launcher.
"""

import contextlib
import ctypes
import linecache
import math
import re
import sys
import types
import warnings
from concurrent import futures
from pathlib import Path

import nbformat
import torch
from bitsandbytes.functional import dequantize_4bit

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "nf4_triton.ipynb"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
STORAGES = [torch.uint8, *DTYPES]


def cells():
    return nbformat.read(NOTEBOOK, as_version=4).cells


def exports(mark="#| export"):
    """(file name, source) of each definition cell, in order; the name goes into tracebacks."""
    code = [(f"{NOTEBOOK.name}[cell {i}]", cell.source) for i, cell in enumerate(cells()) if cell.cell_type == "code"]
    return [(name, source) for name, source in code if source.startswith(mark)]


def load(name="nf4_triton", *edits):
    """A module made of the definition cells.

    edits  (text, replacement) pairs: each text must stand exactly once; for tests of the tests
    """
    module = types.ModuleType(name)
    sys.modules[name] = module
    for text, _ in edits:
        if sum(source.count(text) for _, source in exports()) != 1:
            raise ValueError(f"{text!r} must stand exactly once in the notebook's definitions")
    for file, source in exports():
        for edit in edits:
            source = source.replace(*edit)
        if name != "nf4_triton":  # a torch operator of its own: registering one again leaves the first one dangling
            file, source = f"{name} {file}", source.replace("nf4_triton::", f"{name}::")
        execute(source, file, module.__dict__)
    return module


def run_cell(name, namespace):
    """Runs the notebook's cell of that id, which need not be a definition, in the namespace."""
    (source,) = (cell.source for cell in cells() if cell.id == name)
    exec(source, namespace)


def execute(source, file, namespace):
    """Runs the source under a file name that exists nowhere else. Triton reads kernels through `inspect`."""
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec"), namespace)


def reference(weight, state):
    """NF4 dequantization in plain PyTorch: each operation rounds once, as the format's formula does.

    weight   two weights a byte, the first in the high nibble
    state    bitsandbytes' QuantState, its absmax nested or plain
    returns  state.shape, state.dtype
    """
    n_weights, scale, state2 = math.prod(state.shape), state.absmax, state.state2
    packed = weight.data.reshape(-1).view(torch.uint8)
    nibbles = torch.stack((packed >> 4, packed & 0xF), dim=1).reshape(-1)[:n_weights].int()
    if state2 is not None:
        absmax2 = state2.absmax.repeat_interleave(state2.blocksize)[: scale.numel()]
        scale = state2.code[scale.int()] * absmax2 + state.offset
    scale = scale.repeat_interleave(state.blocksize)[:n_weights]
    return (state.code[nibbles] * scale).to(state.dtype).reshape(state.shape)


def expected(weight, state):
    """bitsandbytes' own result; on a CPU, unless rows are whole blocks, that of the PyTorch reference.

    There bitsandbytes 0.50.2 adds a dimension to 1-D shapes, goes wrong in even rows and compiles itself for odd ones.
    """
    *rest, columns = state.shape
    if weight.is_cuda or (rest and columns % state.blocksize == 0):
        return dequantize_4bit(weight.data, state)
    out = reference(weight.data.reshape(-1, 1), state).reshape(state.shape)
    return out.t() if weight.shape[0] == 1 else out


def differing(nf4, tally, out, want):
    """How many elements differ in their raw bits; counted before anything is asserted."""
    count = nf4.bits_differing(out, want)
    tally["cases"] += 1
    tally["weights"] += want.numel()
    tally["differing"] += count
    return count


def same(nf4, tally, weight, state):
    """Our result, which has bitsandbytes' shape, dtype, device and bits."""
    out, want = nf4.dequantize_nf4(weight, state), expected(weight, state)
    assert out.shape == want.shape and out.dtype == state.dtype and out.device == weight.device
    assert differing(nf4, tally, out, want) == 0
    return out


def moved(weight, offset):
    """A copy of the weight's bytes at an offset in a larger buffer, in the same shape and dtype."""
    flat = weight.view(-1).view(torch.uint8)
    buffer = torch.zeros(offset + flat.numel() + 16, dtype=torch.uint8, device=weight.device)
    return buffer[offset : offset + flat.numel()].copy_(flat).view(weight.dtype).view(weight.shape)


def emulate_assembly():
    """Teaches Triton's interpreter inline assembly of shifts and shuffles: element i of a block stands for thread i."""
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_inline_asm = run_assembly


def run_assembly(builder, asm, constraints, values, types_, is_pure, pack):
    """What the assembly leaves in its output registers, for all threads at once. Anything unknown is an error."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    outputs = constraints.count("=")
    registers = {f"${outputs + i}": value.data.view("uint32") for i, value in enumerate(values)}
    for instruction in re.findall(r"[^;{}]+(?=;)", asm):
        name, *operands = instruction.replace(",", " ").split()
        if name == "shr.b32":
            to, register, shift = operands
            registers[to] = registers[register] >> int(shift)
        elif name == "shfl.sync.idx.b32":
            to, register, lane, segments, mask = operands
            registers[to] = shuffle(registers[register], registers[lane], int(segments, 0))
            assert mask == "-1", f"every thread takes part, got the mask {mask}"
        elif name != ".reg":
            raise NotImplementedError(f"the emulation knows no {name}")
    handles = [TensorHandle(registers[f"${i}"].view("float32"), tl.float32) for i in range(outputs)]
    return types.SimpleNamespace(get_result=lambda i: handles[i])


def shuffle(values, lanes, segments):
    """shfl.sync.idx by PTX's rules: bits 8 to 12 of `segments` mask a segment's lane bits, 0 to 4 are a clamp."""
    import numpy as np

    fixed, most = (segments >> 8) & 0x1F, segments & 0x1F
    lane = np.arange(values.size) % 32
    source = (lane & fixed) | (lanes.astype(np.int64) & ~fixed & 0x1F)
    source = np.where(source <= ((lane & fixed) | (most & ~fixed)), source, lane)
    return values[np.arange(values.size) - lane + source]


def jit_traced(function, *inputs, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return torch.jit.trace(function, inputs, **options)


def keep_on_cpu(nf4, monkeypatch):
    """Launches are kept as on a GPU; the launcher rebuilds tensors at the addresses and runs the interpreter.

    returns  a namespace to change: `device` and `stream` are the current ones, `starts` counts the launcher's calls
    """
    world, launch = types.SimpleNamespace(device=None, stream=0, starts=0), nf4.launch

    def launch_and_compile(described, *arguments, **options):
        out, _, programs, constants = launch(described, *arguments, **options)
        if not programs:
            return out, None, programs, constants
        kinds = [(torch.uint8 if i == 0 else t.dtype, t.numel() * (t.element_size() if i == 0 else 1)) for i, t in
                 enumerate(described[:6])]  # fmt: skip
        kernel, index, dtype = nf4._dequantize_nf4_kernel, described.weight.device.index, described.dtype

        def run(x, y, z, stream, function, metadata, info, enter, leave, to, *rest):
            assert (y, z, stream, info, enter, leave) == (1, 1, world.stream, None, None, None)
            assert world.device == index, "the launch's device is not the current one"
            tensors = [at(address, *kind) for address, kind in zip(rest, kinds)]
            n_weights, values = rest[6], dict(zip(constants, rest[7:]))
            assert not values["WHOLE"] or rest[0] % 4 == 0, "misaligned address"
            kernel[(x,)](at(to, dtype, n_weights), *tensors, n_weights, **values)
            world.starts += 1

        def run_unseen(*arguments):  # by tracers and transforms, which watch a thread
            with futures.ThreadPoolExecutor(1) as pool:
                pool.submit(run, *arguments).result()

        return out, Compiled(run=run_unseen, function=1, packed_metadata=()), programs, constants

    @contextlib.contextmanager
    def current(device):
        before, world.device = world.device, device
        try:
            yield
        finally:
            world.device = before

    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(nf4, "launch", launch_and_compile)
    monkeypatch.setattr(nf4, "empty_cuda", torch._C._dynamo.guards._empty_strided_cpu)  # seen by nobody, either
    monkeypatch.setattr(nf4, "current_stream", lambda index: world.stream)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 2, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: world.device, raising=False)
    return world


class Compiled(types.SimpleNamespace):
    """Stands for Triton's CompiledKernel."""


def at(address, dtype, numel):
    """The tensor whose values begin at a CPU address."""
    memory = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=numel)
