"""Share among the tests how bits are compared, odd tensors, and the stand-ins for a GPU."""

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
import pytest
import shared
import torch
from bitsandbytes.functional import dequantize_4bit

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
NAMES = ["fp16", "bf16", "fp32"]  # readable ids
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
DOUBLED = """
@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    return (x + x).to(DTYPE)


"""  # an edit of the kernel's helper, after which all weights are doubled


def expected(weight, state):
    """Return bitsandbytes' own result, or the formula's where bitsandbytes errs on a CPU."""
    *rest, columns = state.shape
    if weight.is_cuda or (rest and columns % state.blocksize == 0 and weight.is_contiguous()):
        return dequantize_4bit(weight.data.view(torch.uint8), state)
    return formula(weight, state)


def formula(weight, state):
    """Return the weights by the notebook's `spec`; those of a [1, n] weight are transposed."""
    out = sys.modules["nf4_triton"].spec(weight, state)
    return out.t() if weight.shape[0] == 1 and out.dim() == 2 else out


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


def every_second(weight):
    """Return the same weight as every second byte of a buffer."""
    return torch.cat((weight, weight), dim=1)[:, :1]


def resized(tensor, n_bytes):
    """Leave the tensor n_bytes of memory; with 0 it is as FSDP leaves what it frees."""
    tensor.untyped_storage().resize_(n_bytes)
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


def kernel_after(nf4, edit):
    """Return the kernel as it is after this source and the kernel's cell were run again."""
    names = dict(vars(nf4))  # a copy: other tests use the module, too
    shared.execute(edit + shared.defining("_dequantize_nf4_kernel"), "edited", names)
    return names["_dequantize_nf4_kernel"]


# Stand-ins for a GPU. On a machine without one, Triton's interpreter runs the kernel, and three
# things take the place of hardware. On a GPU none of them is used, and the same tests run on the
# real things; the tests named here would fail there if a stand-in promised too much.
#
#   emulate_assembly  the kernel's two instructions      test_kernel: ..._has_bitsandbytes_bits
#   Compiled          what Triton compiles of a kernel   test_call: test_each_compiled_kernel_is_...
#   plan_on_cpu       torch's launcher and allocator     test_call: test_a_change_is_seen
#                     the current stream                 test_call: test_the_current_stream_is_used
#                     the current GPU                    test_call: test_another_gpu_may_be_current
#                     whether a graph is captured        test_call: test_a_graph_is_captured_...


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


class Compiled:
    """Stand for what Triton compiles of a kernel. Called with addresses, it rebuilds tensors."""

    metadata = types.SimpleNamespace(num_warps=4, num_ctas=1, shared=0, launch_pdl=False)
    metadata.launch_cooperative_grid = False
    metadata.global_scratch_size = metadata.profile_scratch_size = 0

    def __init__(self, kernel, dtypes, *constants):
        self.kernel, self.dtypes, self.constants = kernel, dtypes, constants
        self.function = weakref.proxy(self)  # it lasts as long as this
        signature = ["constexpr" if dtype is None else "*" for dtype in dtypes]
        signature += ["i32"] + ["constexpr"] * len(constants)
        self.src = types.SimpleNamespace(signature=dict(enumerate(signature)))

    def __getitem__(self, grid):
        """Launch as Triton's own launcher does, with tensors."""
        return lambda *given: self.kernel[grid](*given)

    def __call__(self, programs, values):
        *addresses, n_weights, scratch, profile_scratch = values
        assert scratch is None and profile_scratch is None and all(addresses), "freed memory"
        found = [None] * 6
        for i, address in enumerate(addresses):  # the interpreter asks for no tensor's length
            memory = ctypes.c_int64.from_address(address)
            found[i] = torch.frombuffer(memory, dtype=self.dtypes[i], count=1)
        self.kernel[(programs,)](*found, n_weights, *self.constants)


def plan_on_cpu(nf4, monkeypatch):
    """Let plans be made as on a GPU. Return the current device and stream, which can be set."""
    world = types.SimpleNamespace(device=None, stream=0)  # a CPU's index is None
    launch, compiled = nf4.launch, {}

    def launch_and_compile(out, tensors, kind, shuffle=True):
        launch(out, tensors, kind, shuffle)
        dtypes = [getattr(table, "dtype", None) for table in tensors[1:]]
        dtypes = (out.dtype, torch.uint8, *dtypes)
        key = (nf4._dequantize_nf4_kernel, dtypes, *kind[2:], nf4.WORDS, shuffle)
        if key not in compiled:
            compiled[key] = Compiled(*key)
        return compiled[key]

    def launch_kernel(function, x, y, z, num_warps, shared_bytes, types_given, values, stream):
        assert (y, z, num_warps, shared_bytes) == (1, 1, 4, 0)
        assert stream == world.stream and world.device is None, "another GPU is current"
        assert types_given == "O" * (len(values) - 3) + "iOO"
        # In another thread: modes and transforms are thread-local; they see no real launch, either.
        with futures.ThreadPoolExecutor(1) as pool:
            pool.submit(function, x, values).result()

    def exchange(index):
        before, world.device = world.device, index
        return before

    @contextlib.contextmanager
    def current(index):
        before = exchange(index)
        yield
        world.device = before

    patch = functools.partial(monkeypatch.setattr, raising=False)
    patch(nf4, "launch", launch_and_compile)
    patch("torch._C._StaticCudaLauncher", types.SimpleNamespace(_launch_kernel=launch_kernel))
    patch("torch._C._cuda_getDevice", lambda: world.device)
    patch("torch._C._cuda_exchangeDevice", exchange)
    patch("torch._C._cuda_maybeExchangeDevice", exchange)
    patch("torch._C._cuda_getCurrentRawStream", lambda index: world.stream)
    guards = torch._C._dynamo.guards
    patch(guards, "_empty_strided_cuda", guards._empty_strided_cpu)  # as invisible to tracers
    patch("torch.cuda.device", current)
    patch("torch.cuda.device_of", lambda tensor: current(None))
    patch("torch.cuda.is_current_stream_capturing", lambda: False)
    patch("torch.cuda.get_sync_debug_mode", lambda: 0)
    nf4.private.cache_clear()  # it may hold torch's own
    return world


class Planned:
    """Call a module that keeps plans (on a CPU by stand-ins), and see what its calls ran."""

    def __init__(self, nf4, device, patch):
        self.nf4, self.device, self.patch = nf4, device, patch
        self.world = None if torch.cuda.is_available() else plan_on_cpu(nf4, patch)
        self.n_by_operator, run = 0, nf4.run_operator

        def count_and_run(*given):
            self.n_by_operator += 1
            return run(*given)

        patch.setattr(nf4, "run_operator", count_and_run)

    @contextlib.contextmanager
    def replaced(self, name, value):
        """Replace a function of torch, which the module may have gathered already."""
        with self.patch.context() as patch:
            patch.setattr(name, value)
            self.nf4.private.cache_clear()
            yield
        self.nf4.private.cache_clear()

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
        """Call, compare the output's bits, and return what the call ran: "plan" or "operator"."""
        before = self.n_by_operator
        self.assert_right(self.dequantize(layer), layer)
        return "plan" if self.n_by_operator == before else "operator"

    def assert_right(self, out, layer):
        wanted = formula(layer.weight, layer.quant_state)
        assert not out.requires_grad
        assert_same_bits(out, wanted, layer.weight, layer.quant_state)

    def n_plans(self):
        return sum(map(len, self.nf4.PLANS.values()))
