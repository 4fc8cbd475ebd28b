"""What the tests share: the notebook's definitions as a module, what is expected, and stand-ins.

The stand-ins let a machine without a GPU run what only a GPU has: `emulate_assembly` teaches
Triton's interpreter the kernel's one instruction, `keep_on_cpu` gives a kept launch an allocator,
a device, a stream and a launcher.
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


def exports(mark=r"#\| export"):
    """(file name, source) of each definition cell, in order; the name goes into tracebacks.

    mark  a pattern: what such a cell begins with, under the title of a folded one
    """
    code = [
        (f"{NOTEBOOK.name}[cell {i}]", cell.source)
        for i, cell in enumerate(cells())
        if cell.cell_type == "code"
    ]
    begins = re.compile(rf"(# @title .*\n)?{mark}")
    return [(name, source) for name, source in code if begins.match(source)]


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
        if name != "nf4_triton":
            # a torch operator of its own: registering one again leaves the first one dangling
            file, source = f"{name} {file}", source.replace("nf4_triton::", f"{name}::")
        execute(source, file, module.__dict__)
    return module


def run_cell(name, namespace):
    """Runs the notebook's cell of that id, which need not be a definition, in the namespace."""
    (source,) = (cell.source for cell in cells() if cell.id == name)
    exec(source, namespace)


def execute(source, file, namespace):
    """Runs the source under a file name of its own: Triton reads kernels through `inspect`."""
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec"), namespace)


def expected(weight, state):
    """bitsandbytes' own result; on a CPU, unless rows are whole blocks, that of nf4.spec.

    There bitsandbytes 0.50.2 adds a dimension to 1-D shapes, goes wrong in even rows and compiles
    itself for odd ones.
    """
    *rest, columns = state.shape
    if weight.is_cuda or (rest and columns % state.blocksize == 0):
        return dequantize_4bit(weight.data, state)
    out = sys.modules["nf4_triton"].spec(weight, state)
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


def described(nf4, weight, state):
    """The NF4 of a weight and its state."""
    return nf4.nf4_of(*nf4.read(weight, state))


@contextlib.contextmanager
def sized(nf4, warps, steps):
    """Inside, a program has so many warps, and so many steps from an aligned address."""
    before = nf4.WARPS, nf4.STEPS_OF
    nf4.WARPS, nf4.STEPS_OF = warps, dict.fromkeys(before[1], steps)
    try:
        yield
    finally:
        nf4.WARPS, nf4.STEPS_OF = before


def moved(weight, offset):
    """A copy of the weight's bytes at an offset in a larger buffer, in the same shape and dtype."""
    flat = weight.view(-1).view(torch.uint8)
    buffer = torch.zeros(offset + flat.numel() + 16, dtype=torch.uint8, device=weight.device)
    return buffer[offset : offset + flat.numel()].copy_(flat).view(weight.dtype).view(weight.shape)


def emulate_assembly():
    """Teaches Triton's interpreter shuffles; a block's element i stands for thread i."""
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_inline_asm = run_assembly


def run_assembly(builder, asm, constraints, values, types_, is_pure, pack):
    """What the assembly leaves in its outputs, for all threads. Anything unknown is an error."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    kinds = constraints.split(",")
    n_outputs = sum(kind.startswith("=") for kind in kinds)
    early = asm.count(";") > 1  # an output is written while inputs are still read
    assert all(kind.startswith("=&") or not early for kind in kinds[:n_outputs]), (
        "outputs are written early"
    )
    registers = {}
    for i, value in enumerate(values, n_outputs):
        registers[f"${i}"] = value.data.view({"r": "uint32", "l": "uint64"}[kinds[i]])
    n_threads = values[0].data.size
    registers["%laneid"] = (np.arange(n_threads) % 32).astype("uint32")

    def value_of(operand):
        return registers[operand] if operand in registers else int(operand, 0)

    for instruction in re.findall(r"[^;{}]+(?=;)", asm):
        name, *operands = instruction.replace(",", " ").split()
        if name == ".reg":
            continue
        to, *sources = operands
        if name == "shfl.sync.idx.b32":
            register, lane, segments, mask = sources
            registers[to] = shuffle(registers[register], registers[lane], int(segments, 0))
            assert mask == "-1", f"every thread takes part, got the mask {mask}"
        elif name == "mov.u32":
            registers[to] = value_of(sources[0])
        elif name == "and.b32":
            registers[to] = value_of(sources[0]) & value_of(sources[1])
        elif name == "shr.u32":
            registers[to] = value_of(sources[0]) >> value_of(sources[1])
        elif name == "mad.wide.u32":
            a, b, c = map(value_of, sources)
            registers[to] = a.astype("uint64") * b + c
        elif name.startswith("ld.global.") and name.endswith(".b32"):
            addresses = registers[sources[0].strip("[]")]
            read = [ctypes.c_uint32.from_address(int(address)).value for address in addresses]
            registers[to] = np.array(read, dtype="uint32")
        else:
            raise NotImplementedError(f"the emulation knows no {name}")
    handles = [
        TensorHandle(registers[f"${i}"].view("float32"), tl.float32) for i in range(n_outputs)
    ]
    return types.SimpleNamespace(get_result=lambda i: handles[i])


def shuffle(values, lanes, segments):
    """shfl.sync.idx by PTX's rules.

    segments  its bits 8 to 12 mask a segment's lane bits, 0 to 4 are a clamp
    """
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


SCRATCHES = ("global_scratch_size", "profile_scratch_size")
POINTERS = {  # Triton's names of the types
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
}


def keep_on_cpu(nf4, monkeypatch, scratches=SCRATCHES):
    """Launches are kept as on a GPU; the launcher rebuilds tensors at the addresses it is given.

    scratches  the scratch arguments that the compiled kernel has: Triton 3.5 has both
    returns    a namespace to change: `device` and `stream` are the current ones
    """
    world = types.SimpleNamespace(device=None, stream=0)
    launch, plan = nf4.launch, nf4.plan
    plans = []

    def noted_plan(*arguments, **options):
        plans.append(plan(*arguments, **options))
        return plans[-1]

    def launch_and_compile(described, *arguments, **options):
        launched = launch(described, *arguments, **options)
        if launched.programs == 0:
            return launched
        planned, constants = plans[-1]  # what the kernel was just launched with
        assert launched.programs == planned
        compiled = compiled_for(nf4, described, constants, world, scratches)
        return launched._replace(compiled=compiled)

    def launch_kernel(function, x, y, z, num_warps, shared, kinds, arguments, stream):
        assert (y, z) == (1, 1)
        assert stream == world.stream, "the launch's stream is not the current one"
        with futures.ThreadPoolExecutor(1) as pool:  # tracers and transforms watch a thread
            pool.submit(function, x, num_warps, shared, kinds, arguments).result()

    @contextlib.contextmanager
    def current(index):
        before = world.device
        world.device = index
        try:
            yield
        finally:
            world.device = before

    empty = torch._C._dynamo.guards._empty_strided_cpu  # seen by nobody, either
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(nf4, "current", lambda device: current(device.index))
    monkeypatch.setattr(nf4, "plan", noted_plan)
    monkeypatch.setattr(nf4, "launch", launch_and_compile)
    launch_by(launch_kernel, monkeypatch)
    give_torch(empty, lambda: world.device, lambda index: world.stream, monkeypatch)
    monkeypatch.setattr(nf4, "KEEPING", {})
    return world


class Compiled(types.SimpleNamespace):
    """Stands for Triton's CompiledKernel."""

    __hash__ = object.__hash__


def give_torch(empty, device, stream, monkeypatch):
    """These in the place of private functions of torch, which that of a CPU lacks."""
    private = {"raising": False}
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", empty, **private)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", device, **private)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", stream, **private)


def launch_by(function, monkeypatch):
    """From now on the C++ launcher is this function."""
    launcher = types.SimpleNamespace(_launch_kernel=function)
    monkeypatch.setattr(torch._C, "_StaticCudaLauncher", launcher, raising=False)


def compiled_for(nf4, described, constants, world, scratches):
    """What Triton would have compiled for this launch; its `function` runs the interpreter."""
    kernel = nf4._dequantize_nf4_kernel
    dtype, index = described.dtype, described.weight.device.index
    n_weights = math.prod(described.shape)
    kinds = [tensor.dtype for tensor in described[:6]]
    sizes = [tensor.numel() for tensor in described[:6]]
    n_tensors = 3 if described.code2 is described.code else 6  # plain absmax: the others are unread
    alignment = 4 if constants["WHOLE"] else 1
    signature = {"out_ptr": POINTERS[dtype]}
    names = ("weight", "absmax", "code", "offset", "absmax2", "code2")
    for name, kind in zip(names, kinds):
        signature[f"{name}_ptr"] = POINTERS[kind]
    signature["n_weights"] = "constexpr" if n_weights == 1 else "i32"  # Triton makes a 1 constant
    for name in constants:
        if name != "num_warps":
            signature[name] = "constexpr"
    numbers = [] if n_weights == 1 else [n_weights]
    types_wanted = "OOOOOOO" + "i" * len(numbers) + "O" * len(scratches)
    metadata = types.SimpleNamespace(num_warps=constants["num_warps"], shared=0)
    for scratch in scratches:
        setattr(metadata, scratch, 0)

    def function(programs, num_warps, shared, types_given, arguments):
        assert (num_warps, shared) == (metadata.num_warps, metadata.shared)
        assert world.device == index, "the launch's device is not the current one"
        assert types_given == types_wanted
        addresses, rest = arguments[:7], list(arguments[7:])
        assert rest == numbers + [None] * len(scratches)
        assert all(addresses[: 1 + n_tensors]), "an address where no memory is"
        assert addresses[1] % alignment == 0, "misaligned address"
        out = at(addresses[0], dtype, n_weights)
        tensors = [at(*each) for each in zip(addresses[1 : 1 + n_tensors], kinds, sizes)]
        tensors += [tensors[2]] * (6 - n_tensors)
        kernel[(programs,)](out, *tensors, n_weights, **constants)

    source = types.SimpleNamespace(signature=signature)
    return Compiled(function=function, metadata=metadata, src=source)


def at(address, dtype, numel):
    """The tensor whose values begin at a CPU address."""
    memory = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=numel)


def check_rehearsal(found):
    assert found["as"] == "Tesla T4" and found["errors"] == found["exact"]["differing"] == 0
    assert found["exact"]["checked"] > 1_000_000_000
    assert {row["dtype"] for row in found["compile"]} == {"float16", "bfloat16"}
    for row in found["compile"]:
        assert row["compiled"] and row["bit_equal"], row
    assert set(found["fractions"]) == {"float16", "bfloat16", "float32"} and found["kept"]
