"""A kept launch may never serve stale weights.

Each change below must be noticed. Each condition of the kept launch is also removed in turn: the
case that is there for it must then fail, or it tests nothing. On a CPU `helpers.keep_on_cpu` stands
in for allocator, device, stream and launcher.
"""

import contextlib
import dataclasses
import functools
import gc
import io
import re
import types
import warnings
import weakref

import helpers
import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from torch._C._dynamo.guards import TensorGuards
from torch.fx.experimental.proxy_tensor import make_fx

GPU = torch.cuda.is_available()


@pytest.fixture
def kept(nf4, monkeypatch):
    """The notebook's definitions, with launches that are kept on a CPU, too."""
    return keeping(nf4, monkeypatch)


def keeping(nf4, monkeypatch):
    nf4.world = types.SimpleNamespace() if GPU else helpers.keep_on_cpu(nf4, monkeypatch)
    return nf4


def fresh(nf4, device, shape=(64, 128), dtype=torch.float16, seed=0, nested=True):
    weight, state = nf4.quantized(shape, dtype, device, nested=nested, seed=seed)
    return torch.nn.Parameter(weight, requires_grad=False), state


def called(nf4, device, **options):
    """A weight and its state with a kept launch."""
    weight, state = fresh(nf4, device, **options)
    nf4.dequantize_nf4(weight, state)
    assert state._nf4_launch is not None, "no launch was kept, so nothing is tested"
    return weight, state


def data_swapped(name):
    """The tensor object stays, its memory is another: only an address tells."""

    def change(weight, state, other_weight, other_state):
        tensor, other = (
            (weight, other_weight)
            if name == "weight"
            else (field(state, name), field(other_state, name))
        )
        # The codes of two states are equal; flipped they differ.
        tensor.data = other.data.flip(0) if tensor.dim() else other.data.clone()

    return change


def object_replaced(name):
    """Another object over the same memory, with another dtype: only the identity tells."""

    def change(weight, state, *_):
        if name == "weight":
            return weight.data.view(torch.int8)
        tensor = field(state, name)
        setattr(
            *place(state, name),
            tensor.view(torch.int8 if tensor.dtype == torch.uint8 else torch.int32),
        )

    return change


def attribute_set(name, value):
    def change(weight, state, *_):
        setattr(*place(state, name), value)

    return change


def place(state, name):
    """(the state or its state2, the attribute there) of a name like "absmax" or "state2.absmax"."""
    return (state.state2, name.removeprefix("state2.")) if "." in name else (state, name)


def field(state, name):
    return getattr(*place(state, name))


def every_second_byte(weight):
    roomy = torch.zeros(2 * weight.numel(), dtype=torch.uint8, device=weight.device)
    roomy[::2] = weight.data.view(-1)
    return roomy[::2]


def shortened(weight):
    """Another buffer, whose storage ends a byte too early."""
    other = weight.data.clone()
    other.untyped_storage().resize_(other.numel() - 1)
    return other


def halve(weight):
    weight.data = weight.data[: len(weight) // 2]


def replace_state2(state):
    state.state2 = types.SimpleNamespace(absmax=state.state2.absmax)


def elsewhere(weight):
    """On a GPU its copy in pinned memory, whose address the GPU can read: only the device tells."""
    return weight.data.cpu().pin_memory() if GPU else weight.data.to("meta")


STATE = ("absmax", "code", "offset", "state2.absmax", "state2.code")
NOTICED = {f"{name}.data = ...": data_swapped(name) for name in ("weight", *STATE)}
NOTICED |= {
    "dtype = bfloat16": attribute_set("dtype", torch.bfloat16),
    "shape = 128 x 64": attribute_set("shape", torch.Size((128, 64))),
    "weight at an odd address": lambda weight, *_: helpers.moved(weight.data, 1),
    "another weight": lambda weight, state, other, _: other,
}
REFUSED = {f"another {name} object": object_replaced(name) for name in ("weight", *STATE)}
REFUSED |= {
    "weight = None": None,
    "weight.data = its first half": lambda weight, *_: halve(weight),
    "weight as a list": lambda weight, *_: weight.tolist(),
    **{f"{name} = None": attribute_set(name, None) for name in STATE},
    "blocksize = 128": attribute_set("blocksize", 128),
    "state2.blocksize = 32": attribute_set("state2.blocksize", 32),
    "state2.dtype = float16": attribute_set("state2.dtype", torch.float16),
    "state2 = None": attribute_set("state2", None),
    "quant_type = fp4": attribute_set("quant_type", "fp4"),
    "another state2 object": lambda weight, state, *_: replace_state2(state),
    "weight sparse": lambda weight, *_: weight.data.to_sparse_csr(),
    "weight on another device": lambda weight, *_: elsewhere(weight),
    "weight shortened": lambda weight, *_: shortened(weight),
    "zeros without memory": lambda weight, *_: torch._efficientzerotensor(
        weight.shape, dtype=weight.dtype, device=weight.device
    ),
}


def apply_and_call(nf4, device, change):
    weight, state = called(nf4, device)
    nf4.dequantize_nf4(weight, state)
    replacement = change(weight, state, *fresh(nf4, device, seed=1))
    weight = weight if replacement is None else replacement
    return nf4.dequantize_nf4(weight, state), weight, state


def check_noticed(nf4, device, name):
    out, weight, state = apply_and_call(nf4, device, NOTICED[name])
    want = nf4.spec(weight, state)  # bitsandbytes on a GPU does not read the state's code
    assert out.dtype == want.dtype and out.shape == want.shape
    assert nf4.bits_differing(out, want) == 0


def check_refused(nf4, device, name):
    ours = "^(?!descriptor)"  # in our words, not torch's
    with pytest.raises((ValueError, TypeError), match=ours):
        if name == "weight = None":  # and the weight is gone
            state = apply_and_call(nf4, device, attribute_set("dtype", torch.float16))[2]
            nf4.dequantize_nf4(None, state)
        else:
            apply_and_call(nf4, device, REFUSED[name])


def check_right(nf4, weight, state):
    want = dequantize_4bit(weight.data, state)
    assert nf4.bits_differing(nf4.dequantize_nf4(weight, state), want) == 0


FIELDS_OF_A_STATE = (
    "absmax",
    "code",
    "offset",
    "shape",
    "dtype",
    "blocksize",
    "quant_type",
    "state2",
)
FIELDS_OF_STATE2 = ("state2.absmax", "state2.code", "state2.dtype", "state2.blocksize")


@pytest.mark.parametrize("name", FIELDS_OF_A_STATE + FIELDS_OF_STATE2)
def test_a_field_that_goes_after_the_first_call_is_named(kept, device, name):
    """As at a first call, though a kept launch asks for it first."""
    weight, state = called(kept, device)
    assert state._nf4_launch
    owner, _, field = name.rpartition(".")
    delattr(state.state2 if owner else state, field)
    with pytest.raises(TypeError, match=f"no attribute '{field}'"):
        kept.dequantize_nf4(weight, state)


def test_an_error_of_the_start_is_not_taken_for_a_lost_field(kept, device, monkeypatch):
    weight, state = called(kept, device)

    def failing(*_):
        raise AttributeError("in the launcher")

    monkeypatch.setattr(kept, "launch_kernel", failing)
    with pytest.raises(AttributeError, match="in the launcher"):
        kept.dequantize_nf4(weight, state)


@pytest.mark.parametrize("name", NOTICED)
def test_changes_are_noticed(kept, device, name):
    check_noticed(kept, device, name)


@pytest.mark.parametrize("name", REFUSED)
def test_changes_are_refused(kept, device, name):
    check_refused(kept, device, name)


def test_contents_changed_in_place(kept, device):
    weight, state = called(kept, device)
    other_weight, other_state = fresh(kept, device, seed=1)
    weight.data.copy_(other_weight)
    for name in STATE:
        field(state, name).copy_(field(other_state, name))
    want = dequantize_4bit(other_weight.data, other_state)
    assert kept.bits_differing(kept.dequantize_nf4(weight, state), want) == 0


def test_a_shape_that_is_a_list_and_changes_is_noticed(kept, device):
    """The state's own list is equal to itself, whatever is in it by now."""
    weight, state = fresh(kept, device)
    state.shape = list(state.shape)
    kept.dequantize_nf4(weight, state)
    state.shape.reverse()
    assert kept.dequantize_nf4(weight, state).shape == (128, 64)


def test_nothing_is_kept_alive(kept, device):
    weight, state = called(kept, device)
    kept.dequantize_nf4(weight, state)
    watched = [weakref.ref(weight), weakref.ref(state.absmax)]
    state.absmax = state.absmax.clone()
    del weight
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


def plain_launches(nf4, monkeypatch):
    """Counts the launches through Triton from now on."""
    count, launch = [0], nf4.launch

    def counting(*arguments, **options):
        count[0] += 1
        return launch(*arguments, **options)

    monkeypatch.setattr(nf4, "launch", counting)
    return count


def check_repeated(nested):
    """The repeated call is the kept one."""

    def check(nf4, monkeypatch, device):
        weight, state = called(nf4, device, nested=nested)
        count = plain_launches(nf4, monkeypatch)
        check_right(nf4, weight, state)
        assert count == [0]

    return check


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", helpers.DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (33, 65), (2, 64)])
def test_launches_of_all_sizes_are_kept(kept, device, monkeypatch, shape, dtype, nested):
    """Triton makes a constant of a single weight's number: its launch has an argument less."""
    weight, state = called(kept, device, shape=shape, dtype=dtype, nested=nested)
    count = plain_launches(kept, monkeypatch)
    want = kept.spec(weight, state)
    assert kept.bits_differing(kept.dequantize_nf4(weight, state), want) == 0
    assert count == [0]


@pytest.mark.skipif(GPU, reason="a GPU's compiled kernels have what their Triton gives them")
@pytest.mark.parametrize("n_scratches", [0, 1, 2])
def test_each_scratch_argument_gets_an_address(nf4, monkeypatch, device, n_scratches):
    helpers.keep_on_cpu(nf4, monkeypatch, helpers.SCRATCHES[:n_scratches])
    check_right(nf4, *called(nf4, device))


def test_weights_that_alternate_between_two_buffers_keep_the_launch(kept, device, monkeypatch):
    """As with offloading or FSDP: one state, its packed bytes now here, now there."""
    weight, state = called(kept, device)
    buffers = [fresh(kept, device, seed=seed)[0].data for seed in (1, 2)]
    first, count = state._nf4_launch, plain_launches(kept, monkeypatch)
    for turn in range(6):
        buffer = buffers[turn % 2]
        weight.data = buffer  # the parameter's object stays
        for packed in (weight, buffer, buffer.t(), buffer.view(-1)):
            want = dequantize_4bit(buffer, state)
            want = want.t() if packed.shape[0] == 1 else want
            assert kept.bits_differing(kept.dequantize_nf4(packed, state), want) == 0
    assert count == [0] and state._nf4_launch is first


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, "autocast"])
def test_a_switched_mode_keeps_the_launch(kept, device, monkeypatch, context):
    """Autocast and inference mode change dispatch keys, but nothing that the kernel reads."""
    if context == "autocast":
        context = functools.partial(torch.autocast, device, dtype=torch.bfloat16)
    for first, second in ((context, contextlib.nullcontext), (contextlib.nullcontext, context)):
        with first():
            weight, state = called(kept, device)
        count = plain_launches(kept, monkeypatch)
        for mode in (second, first, second):
            with mode():
                check_right(kept, weight, state)
        assert count == [0]


def check_stream(nf4, monkeypatch, device):
    if not GPU:  # the launcher's stand-in compares
        weight, state = called(nf4, device)
        nf4.world.stream = 7
        return nf4.dequantize_nf4(weight, state)
    weight, state = called(nf4, "cuda", shape=(4096, 4096))
    other_weight, _ = fresh(nf4, "cuda", (4096, 4096), seed=1)
    want = dequantize_4bit(other_weight.data, state)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        weight.data.copy_(other_weight)  # ordered on this stream only
        out = nf4.dequantize_nf4(weight, state)
    torch.cuda.synchronize()
    assert nf4.bits_differing(out, want) == 0


@pytest.mark.gpu
def test_a_cuda_graph(nf4):
    weight, state = called(nf4, "cuda")
    other_weight, _ = fresh(nf4, "cuda", seed=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = nf4.dequantize_nf4(weight, state)
    weight.data.copy_(other_weight)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert nf4.bits_differing(out, dequantize_4bit(other_weight.data, state)) == 0


def check_hook(which, add):
    """A hook that comes after the launch was kept sees the next call."""

    def check(nf4, monkeypatch, device):
        weight, state = called(nf4, device)
        hook = getattr(nf4.RUNTIME, which)
        monkeypatch.setattr(nf4.RUNTIME, which, hook)  # put back at the end
        seen, count = [], plain_launches(nf4, monkeypatch)
        note = seen.append
        if add:
            hook.add(note)
        else:
            setattr(nf4.RUNTIME, which, note)
        try:
            nf4.dequantize_nf4(weight, state)
        finally:
            if add:
                hook.remove(note)
        assert count == [1] and len(seen) == (1 if GPU else 0)  # the interpreter calls no hooks
        assert state._nf4_launch is None, "each call would ask it in vain, and then launch anew"

    return check


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_no_hook_and_a_plain_function_as_a_hook(kept, device, monkeypatch, which):
    """Triton allows both; with a function nothing is kept, and it sees each launch."""
    called(kept, device)  # the assembly's trial launches, too
    weight, state = fresh(kept, device)
    seen, count = [], plain_launches(kept, monkeypatch)
    for hook, plain in ((None, 1), (seen.append, 1 + 3)):
        monkeypatch.setattr(kept.RUNTIME, which, hook)
        for _ in range(3):
            check_right(kept, weight, state)
        assert bool(state._nf4_launch) == (hook is None) and count == [plain]
    assert len(seen) == (3 if GPU else 0)


def check_device(nf4, monkeypatch, device):
    """Another GPU is current, at the first call, too; the launch is kept, and calls nobody above.

    Afterwards that GPU is current again.
    """
    call = nf4.dequantize_nf4
    if not GPU:
        nf4.world.device = 1
        weight, state = called(nf4, device)
    else:
        guarded, elsewhere, real = [], [], torch.cuda.device

        def guard(index):
            guarded.append(index)
            return real(index)

        monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 2)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: len(elsewhere) - len(guarded))
        weight, state = called(nf4, device)
        elsewhere.append(1)
        monkeypatch.setattr(torch.cuda, "device", guard)
    want, count = dequantize_4bit(weight.data, state), plain_launches(nf4, monkeypatch)
    monkeypatch.setattr(nf4, "dequantize_nf4", lambda *_: pytest.fail("called from below"))
    out = call(weight, state)
    assert guarded == [0] if GPU else nf4.world.device == 1
    assert count == [0] and nf4.bits_differing(out, want) == 0


def check_modes(nf4, monkeypatch, device):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    weight, state = called(nf4, device)
    with Seen():
        nf4.dequantize_nf4(weight, state)
    assert any("dequantize" in name for name in Seen.names)


def check_traced_before_autograd(nf4, monkeypatch, device):
    """As torch.export does: no dispatch mode is on the usual stack."""
    weight, state = called(nf4, device)
    other_weight, _ = fresh(nf4, device, seed=1)
    function = lambda packed: nf4.dequantize_nf4(packed, state)  # noqa: E731
    traced = make_fx(function, pre_dispatch=True)(weight.data)
    want = dequantize_4bit(other_weight.data, state)
    assert nf4.bits_differing(traced(other_weight.data), want) == 0
    check_traced_by_make_fx(nf4, monkeypatch, device, pre_dispatch=True)


def check_traced_by_make_fx(nf4, monkeypatch, device, **options):
    """Its mode is one that the newest torch's guard does not look at."""
    weight, state = called(nf4, device)
    x = torch.zeros(state.shape, dtype=state.dtype, device=device)
    traced = make_fx(lambda x: x + nf4.dequantize_nf4(weight, state), **options)(x)
    assert any("dequantize" in str(node.target) for node in traced.graph.nodes)


def guard_sees_every_mode():
    """Whether TensorGuards, on this torch, notices the mode of make_fx by itself."""
    x = torch.ones(2)
    guard = TensorGuards(x, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    seen = []
    make_fx(lambda y: seen.append(guard.check(x)) or y + 1)(x)
    return not any(seen)


def check_no_offset(nf4, monkeypatch, device):
    """Plain absmax needs none, and a state of somebody else's may lack it; its launch is kept."""
    weight, state = fresh(nf4, device, nested=False)
    del state.offset
    for _ in range(2):
        want = nf4.spec(weight, state)
        assert nf4.bits_differing(nf4.dequantize_nf4(weight, state), want) == 0
    assert state._nf4_launch is not None


def check_guarded(nf4, monkeypatch, device):
    """The guard is asked of the weight itself alone: a nested tensor would end the process there.

    It knows a class by its address, too, which another class may have later.
    """
    asked = []

    class Noting:
        def __init__(self, *tensors, **sizes):
            self.guard = TensorGuards(*tensors, **sizes)

        def check(self, weight):
            asked.append(weight)
            return self.guard.check(weight)

    monkeypatch.setattr(nf4, "TensorGuards", Noting)
    weight, state = called(nf4, device)
    for packed in (weight, weight.data, weight.data.clone()):
        check_right(nf4, packed, state)
    assert len(asked) == 1 and asked[0] is weight


def check_strided(nf4, monkeypatch, device):
    """The same object, address and number of bytes, but every second one."""
    weight, state = fresh(nf4, device)
    roomy = torch.zeros(2 * weight.numel(), dtype=torch.uint8, device=device)
    roomy[: weight.numel()] = weight.data.view(-1)
    weight.data = roomy[: weight.numel()]
    nf4.dequantize_nf4(weight, state)
    weight.data = roomy[::2]
    with pytest.raises(ValueError, match="contiguous: False"):
        nf4.dequantize_nf4(weight, state)


def check_another_strided(nf4, monkeypatch, device):
    weight, state = called(nf4, device)
    with pytest.raises(ValueError, match="contiguous: False"):
        nf4.dequantize_nf4(every_second_byte(weight), state)


def check_transposed(nf4, monkeypatch, device):
    weight, state = called(nf4, device)
    want = nf4.dequantize_nf4(weight, state)
    for view in (weight.data.t(), weight.t()):
        assert torch.equal(nf4.dequantize_nf4(view, state), want.t())


def check_transposed_in_place(nf4, monkeypatch, device):
    weight, state = called(nf4, device)
    want = nf4.dequantize_nf4(weight, state)
    weight.data = weight.data.t()
    assert torch.equal(nf4.dequantize_nf4(weight, state), want.t())


def check_transposed_first(nf4, monkeypatch, device):
    """The launch is kept for a weight passed as [1, n]; and then transposed back."""
    weight, state = fresh(nf4, device)
    weight.data = weight.data.t()
    nf4.dequantize_nf4(weight, state)
    count = plain_launches(nf4, monkeypatch)
    want = dequantize_4bit(weight.data, state)
    for _ in range(2):
        assert torch.equal(nf4.dequantize_nf4(weight, state), want)
        weight.data, want = weight.data.t(), want.t()
    assert count == [0]


def check_transposed_3d(nf4, monkeypatch, device):
    """Only a matrix can be transposed: the error is that of a first call."""
    weight, state = fresh(nf4, device)
    state.shape = torch.Size((4, *state.shape[1:], state.shape[0] // 4))
    nf4.dequantize_nf4(weight, state)
    assert state._nf4_launch is not None, "no launch was kept, so nothing is tested"
    with pytest.raises(ValueError, match="contiguous packed bytes"):
        nf4.dequantize_nf4(weight.data.t(), state)


def check_0d(nf4, monkeypatch, device):
    weight, state = called(nf4, device, shape=(1, 2))
    with pytest.raises(ValueError, match=r"\[n, 1\] or flat"):
        nf4.dequantize_nf4(weight.data.view(()), state)


def check_subclass(nf4, monkeypatch, device):
    """Over the same memory, but it wants to see operators."""

    class Watching(torch.Tensor):
        names = []

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            cls.names.append(str(func))
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))

    weight, state = called(nf4, device)
    want = nf4.dequantize_nf4(weight, state)
    watching = torch.Tensor._make_subclass(Watching, weight.data)
    assert watching.data_ptr() == weight.data_ptr()
    assert nf4.bits_differing(nf4.dequantize_nf4(watching, state), want) == 0
    assert any("dequantize" in name for name in Watching.names)


def check_torch_function(nf4, monkeypatch, device):
    """A layer's weight answers every method in Python; the repeated call must not ask it."""
    layer = nf4.bnb_Linear4bit(64, 128).to(device)
    nf4.your_dequantize_nf4(layer)
    kind, asked = type(layer.weight), []
    answer = kind.__torch_function__

    def counting(cls, func, types, args=(), kwargs=None):
        asked.append(func)
        return answer(func, types, args, kwargs or {})

    monkeypatch.setattr(kind, "__torch_function__", classmethod(counting))
    nf4.your_dequantize_nf4(layer)
    assert not asked


def check_state2_appears(nf4, monkeypatch, device):
    """A launch kept for plain absmax."""
    weight, state = nf4.quantized((64, 128), torch.float16, device, nested=False)
    want = dequantize_4bit(weight, state)
    for _ in range(2):
        assert nf4.bits_differing(nf4.dequantize_nf4(weight, state), want) == 0
    assert state._nf4_launch is not None, "no launch was kept, so nothing is tested"
    state.state2 = fresh(nf4, device)[1].state2
    with pytest.raises(TypeError, match="offset must be a tensor"):
        nf4.dequantize_nf4(weight, state)


def check_kernel_redefined(nf4, monkeypatch, device):
    """As when its cell is run again: launches of the old one are over."""
    weight, state = called(nf4, device)
    kernel, count = nf4._dequantize_nf4_kernel, plain_launches(nf4, monkeypatch)

    class Redefined:
        def __getitem__(self, grid):
            return kernel[grid]

    monkeypatch.setattr(nf4, "_dequantize_nf4_kernel", Redefined())
    for _ in range(3):
        check_right(nf4, weight, state)
    assert count == [1]


def check_traced(nf4, monkeypatch, device):
    weight, state = called(nf4, device)
    other = fresh(nf4, device, seed=1)[0].data
    traced = helpers.jit_traced(
        lambda packed: nf4.dequantize_nf4(packed, state), weight.data, check_trace=False
    )
    assert nf4.bits_differing(traced(other), dequantize_4bit(other, state)) == 0
    x = torch.zeros(state.shape, dtype=state.dtype, device=device)
    traced = helpers.jit_traced(lambda x: x + nf4.dequantize_nf4(weight, state), x)
    assert "dequantize" in str(traced.graph), "the weight itself became a constant"


def check_transformed(nf4, monkeypatch, device):
    """What a transform gets may be changed in place."""
    weight, state = called(nf4, device)
    x = torch.zeros(state.shape, dtype=state.dtype, device=device)
    grad = torch.func.grad(lambda x: nf4.dequantize_nf4(weight, state).add_(x).float().sum())(x)
    assert (grad == 1).all()


def check_negated(nf4, monkeypatch, device):
    """The same object and address, but a view whose values are others, which no kernel sees."""
    weight, state = called(nf4, device)
    weight.data = torch._neg_view(weight.data)
    with pytest.raises(ValueError, match="lazily negated"):
        nf4.dequantize_nf4(weight, state)


def check_halved(nf4, monkeypatch, device):
    """The same object, address and shape, but half the bytes."""
    weight, state = fresh(nf4, device)
    weight.data = weight.data.view(-1).view(torch.float16).view(-1, 1)
    nf4.dequantize_nf4(weight, state)
    assert state._nf4_launch is not None, "no launch was kept, so nothing is tested"
    weight.data = weight.data.view(-1).view(torch.uint8)[: len(weight)].view(-1, 1)
    with pytest.raises(ValueError, match="contiguous packed bytes"):
        nf4.dequantize_nf4(weight, state)


def check_shape_a_list(nf4, monkeypatch, device):
    weight, state = fresh(nf4, device)
    state.shape = list(state.shape)
    nf4.dequantize_nf4(weight, state)
    assert state._nf4_launch is None, "it would never be used"


def check_no_weights(nf4, monkeypatch, device):
    """No kernel ran, so none can be kept."""
    _, state = fresh(nf4, device, nested=False)
    state.shape, state.absmax = torch.Size((0, 64)), state.absmax[:0]
    weight = torch.empty((0, 1), dtype=torch.uint8, device=device)
    for _ in range(2):
        assert nf4.dequantize_nf4(weight, state).shape == (0, 64)
    assert state._nf4_launch is None
    called(nf4, device)  # and others are kept as before


def check_captured(nf4, monkeypatch, device):
    """While a graph is captured (so it is said here) nothing is kept, and nothing is dropped."""
    called(nf4, device)  # the assembly is tried
    weight, state = fresh(nf4, device)
    kept_weight, kept_state = called(nf4, device, seed=1)
    first = kept_state._nf4_launch
    kept_state.code = kept_state.code.clone()
    monkeypatch.setattr(nf4, "is_capturing", lambda device: True)
    check_right(nf4, weight, state)
    assert getattr(state, "_nf4_launch", None) is None
    for _ in range(2):
        check_right(nf4, kept_weight, kept_state)
        assert kept_state._nf4_launch is first, "in a capture, what was kept stays"
    monkeypatch.setattr(nf4, "is_capturing", lambda device: False)
    check_right(nf4, kept_weight, kept_state)
    assert kept_state._nf4_launch not in (first, None), "out of it, a new launch is kept"


def check_default_dtype(what, dtype):
    """A state made under another default dtype: bitsandbytes' bits, and nothing kept."""

    def check(nf4, monkeypatch, device):
        weight, state = fresh(nf4, device)  # first, so that tables made once have the usual dtype
        usual = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            if what == "offset":
                state = QuantState.from_dict(state.as_dict(), device=device)
            else:
                weight, state = fresh(nf4, device, seed=1)
            check_right(nf4, weight, state)
        finally:
            torch.set_default_dtype(usual)
        assert field(state, what).dtype == dtype, "nothing is tested"
        check_right(nf4, weight, state)
        assert state._nf4_launch is None

    return check


WATCHED = {
    "repeated": check_repeated(nested=True),
    "repeated, plain": check_repeated(nested=False),
    "stream": check_stream,
    "enter hook": check_hook("launch_enter_hook", add=True),
    "exit hook": check_hook("launch_exit_hook", add=True),
    "another enter hook": check_hook("launch_enter_hook", add=False),
    "another exit hook": check_hook("launch_exit_hook", add=False),
    "device": check_device,
    "modes": check_modes,
    "traced by make_fx": check_traced_by_make_fx,
    "traced before autograd": check_traced_before_autograd,
    "no offset": check_no_offset,
    "guarded": check_guarded,
    "strided": check_strided,
    "another, strided": check_another_strided,
    "transposed": check_transposed,
    "transposed in place": check_transposed_in_place,
    "transposed first": check_transposed_first,
    "transposed, three dimensions": check_transposed_3d,
    "halved": check_halved,
    "negated": check_negated,
    "traced": check_traced,
    "transformed": check_transformed,
    "weight 0-d": check_0d,
    "subclass": check_subclass,
    "torch function": check_torch_function,
    "state2 appears": check_state2_appears,
    "kernel redefined": check_kernel_redefined,
    "no weights": check_no_weights,
    "shape a list": check_shape_a_list,
    "captured": check_captured,
}
for dtype in (torch.bfloat16, torch.float16, torch.float64):
    for what in ("offset", "code"):
        WATCHED[f"{what} in {dtype}"] = check_default_dtype(what, dtype)


@pytest.mark.parametrize("name", WATCHED)
def test_the_world_around(kept, monkeypatch, device, name):
    WATCHED[name](kept, monkeypatch, device)


def test_the_compiled_kernel_is_held(kept, device):
    """Triton 3.9 unloads one that nobody holds."""
    weight, state = fresh(kept, device)
    held, keep = [], kept.keep

    def noting(quant_state, described, out, compiled, *rest):
        held.append(weakref.ref(compiled))
        return keep(quant_state, described, out, compiled, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "keep", noting)
        kept.dequantize_nf4(weight, state)
    if GPU:
        kept._dequantize_nf4_kernel.device_caches.clear()
    gc.collect()
    assert held[0]() is not None
    check_right(kept, weight, state)


def starts(nf4, monkeypatch):
    """Counts the launches that do not go through Triton from now on."""
    count, launch_kernel = [0], nf4.launch_kernel

    def counting(*arguments):
        count[0] += 1
        launch_kernel(*arguments)

    monkeypatch.setattr(nf4, "launch_kernel", counting)
    return count


def test_a_launch_is_tried_once_on_each_device(kept, device, monkeypatch):
    monkeypatch.setattr(kept, "KEEPING_FAULT", {})
    count = starts(kept, monkeypatch)
    layers = [called(kept, device, seed=seed) for seed in range(3)]
    assert count == [1] and list(kept.KEEPING_FAULT.values()) == [None]
    for weight, state in layers:
        check_right(kept, weight, state)
    assert count == [4]


def check_nothing_is_kept(nf4, device, reason):
    """Said once, and not tried again, neither for this state nor for another."""
    weight, state = fresh(nf4, device)
    with pytest.warns(UserWarning, match=f"so each call is slower: {reason}"):
        check_right(nf4, weight, state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in [(weight, state), fresh(nf4, device, seed=1)]:
            for _ in range(2):
                check_right(nf4, *each)
            assert each[1]._nf4_launch is None


def test_nothing_is_kept_where_the_trial_gives_other_bits(kept, device, monkeypatch):
    monkeypatch.setattr(kept, "KEEPING_FAULT", {})
    launch_kernel = kept.launch_kernel
    other_weight, _ = fresh(kept, device, seed=9)
    tried = []

    def launch_another(*arguments):
        *fixed, (out_at, _, *rest), stream = arguments
        tried.append(out_at)
        launch_kernel(*fixed, (out_at, other_weight.data_ptr(), *rest), stream)

    monkeypatch.setattr(kept, "launch_kernel", launch_another)
    check_nothing_is_kept(kept, device, "other bits")
    assert len(tried) == 1 and list(kept.KEEPING_FAULT.values()) == ["other bits"]


@pytest.mark.parametrize(
    "missing", ["launch_kernel", "empty_cuda", "current_stream", "TensorGuards"]
)
def test_falls_back_where_internals_are_not_as_expected(kept, device, monkeypatch, missing):
    monkeypatch.setattr(kept, "KEEPING_FAULT", {})
    monkeypatch.setattr(kept, missing, None)
    check_nothing_is_kept(kept, device, ".*'NoneType' object is not callable")
    assert len(kept.KEEPING_FAULT) == 1


def test_falls_back_where_the_compiled_kernel_is_not_as_expected(kept, device, monkeypatch):
    """A renamed attribute of Triton's costs the kept launch, not the call."""
    monkeypatch.setattr(kept, "KEEPING_FAULT", {})

    def renamed(*_):
        raise AttributeError("no function")

    monkeypatch.setattr(kept, "starter", renamed)
    check_nothing_is_kept(kept, device, ".*no function")


def test_a_trial_that_runs_out_of_memory_decides_nothing(kept, device, monkeypatch):
    weight, state = fresh(kept, device)
    starter = kept.starter

    def starved(*_):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(kept, "KEEPING_FAULT", {})
    monkeypatch.setattr(kept, "starter", starved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_right(kept, weight, state)
    assert state._nf4_launch is None and kept.KEEPING_FAULT == {}
    monkeypatch.setattr(kept, "starter", starter)
    called(kept, device)
    assert list(kept.KEEPING_FAULT.values()) == [None]


class Refuses:
    """A state whose attributes are set once."""

    def __init__(self, **fields):
        self.__dict__.update(fields)

    def __setattr__(self, name, value):
        raise ValueError(f"{name} cannot be set")


@pytest.mark.parametrize("how", ["frozen", "refuses"])
def test_a_state_that_takes_no_attributes_keeps_nothing(kept, device, monkeypatch, how):
    """And leaves the launches of other states alone."""
    monkeypatch.setattr(kept, "KEEPING_FAULT", {})
    weight, state = fresh(kept, device)
    names = ("absmax", "code", "offset", "state2", "shape", "dtype", "blocksize", "quant_type")
    fields = {name: getattr(state, name) for name in names}
    make = Refuses
    if how == "frozen":
        make = dataclasses.make_dataclass("Frozen", names, frozen=True)
    frozen = make(**fields)
    for _ in range(2):
        out = kept.dequantize_nf4(weight, frozen)
        assert kept.bits_differing(out, dequantize_4bit(weight.data, state)) == 0
    assert not hasattr(frozen, "_nf4_launch") and list(kept.KEEPING_FAULT.values()) == [None]
    called(kept, device)


def test_no_function_mode_is_asked(kept, device):
    """As torch.set_default_device sets one: in Python, at every method of every tensor."""

    class Seen(torch.overrides.TorchFunctionMode):
        names = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    weight, state = called(kept, device)
    with Seen():
        for packed in (weight, weight.data.clone()):
            Seen.names.clear()
            out = kept.dequantize_nf4(packed, state)
            assert Seen.names == []
    assert kept.bits_differing(out, dequantize_4bit(weight.data, state)) == 0


def test_a_dropped_launch_goes_without_the_collector(kept, device):
    gc.collect()
    gc.disable()
    try:
        weight, state = called(kept, device)
        kept.dequantize_nf4(weight, state)
        dropped = [
            weakref.ref(tensor) for tensor in (state.code, state.offset, state.state2.absmax)
        ]
        del weight, state
        assert [ref() for ref in dropped] == [None] * 3
    finally:
        gc.enable()


def test_a_state_with_a_kept_launch_loads_as_weights_only(kept, device):
    weight, state = called(kept, device)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    with torch.serialization.safe_globals([QuantState]):
        loaded = torch.load(file, weights_only=True)
    assert not loaded._nf4_launch
    for _ in range(2):
        check_right(kept, weight, loaded)


@pytest.mark.gpu
def test_a_first_call_in_a_cuda_graph_keeps_nothing(nf4):
    """What a kept launch tries would be captured, and every replay would do it again."""
    called(nf4, "cuda")  # compiles
    weight, state = fresh(nf4, "cuda", seed=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = nf4.dequantize_nf4(weight, state)
    assert getattr(state, "_nf4_launch", None) is None
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert nf4.bits_differing(out, dequantize_4bit(weight.data, state)) == 0


@pytest.mark.gpu
@pytest.mark.skipif(GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_weight_on_a_gpu_that_is_not_the_current_one(nf4, tally):
    """At most 0.6 of what Unsloth's call costs there; the current GPU is the same afterwards."""
    unsloth = pytest.importorskip("unsloth.kernels.utils")
    from torch.utils.benchmark import Timer

    weight, state = fresh(nf4, "cuda:1", (512, 512))
    functions = {"ours": nf4.dequantize_nf4, "unsloth": unsloth.fast_dequantize}
    for function in functions.values():
        for _ in range(3):
            assert (
                nf4.bits_differing(function(weight, state), dequantize_4bit(weight.data, state))
                == 0
            )
            assert torch.cuda.current_device() == 0
    timers = {
        n: Timer("f(w, s)", globals={"f": f, "w": weight, "s": state}) for n, f in functions.items()
    }
    us = dict.fromkeys(timers, 1e9)
    for name in list(timers) * 5:  # in turn, and the least: the host has slower moments
        us[name] = min(us[name], timers[name].blocked_autorange(min_run_time=0.2).median * 1e6)
    tally.update({f"second_gpu_{name}_us": round(value, 2) for name, value in us.items()})
    assert us["ours"] <= 0.6 * us["unsloth"], us


@pytest.fixture
def shown(kept, device):
    """What the cells of section 4 are run with; their tables are noted."""
    tables = []
    names = {"GPU": True, "DEVICE": device, "gpu": "here", "tables": tables}
    names |= {"compare": lambda out, *pair: kept.bits_differing(out, dequantize_4bit(*pair))}
    names |= {"show": lambda table, caption, digits=1: tables.append(table)}
    return {**vars(kept), **names}


@pytest.mark.parametrize("sizes", [(2, 2), (4, 1), (4, 4)])
def test_the_started_launch_is_right_whatever_was_tuned(shown, kept, monkeypatch, capsys, sizes):
    """It has as many programs as its kernel needs. Of five times, in turn, the least is told."""
    index = 0 if GPU else None
    monkeypatch.setitem(shown["SETTINGS"], (index, 2), shown["Setting"](*sizes))
    timed, outs = [], {}

    def imitated_us(fx, layer, wait):
        timed.append(fx.__name__)
        assert not wait
        if fx.__name__ not in outs:  # once: Triton's interpreter takes seconds
            outs[fx.__name__] = fx(layer)
        return 20.0 - len(timed)

    shown["call_us"] = imitated_us
    count = starts(kept, monkeypatch)
    helpers.run_cell("start-run", shown)
    told = capsys.readouterr().out
    assert "directly: the same bits as through kernel[grid]" in told
    assert "through kernel[grid]: 11.0 µs" in told and "directly: 10.0 µs" in told
    assert timed == ["grid_dequantize", "<lambda>"] * 5
    assert count == [1 + 1], "what is timed as a direct start is one"
    weight = shown["layer"].weight
    want = dequantize_4bit(weight.data, weight.quant_state)
    for out in outs.values():
        assert shown["bits_differing"](out, want) == 0


@pytest.mark.parametrize("fault", ["not compiled", "refused", "other bits"])
def test_what_is_not_started_or_wrong_is_not_timed(shown, monkeypatch, capsys, fault, kept):
    """And where a direct start fails, it is still open whether launches are kept."""
    launch, before = shown["launch"], dict(kept.KEEPING_FAULT)

    def not_compiled(nf4):
        out, _, programs = launch(nf4)
        return out, None, programs

    def start_of_zeros(nf4, out, compiled, programs):
        return lambda: torch.zeros_like(out)

    def refusing(*_):
        raise TypeError("another launcher")

    shown["call_us"] = lambda *_, **__: pytest.fail("it was timed")
    if fault == "not compiled":
        shown["launch"] = not_compiled
        told = "cannot be started directly here: only on a GPU"
    elif fault == "refused":
        shown["starter"] = refusing
        told = "cannot be started directly here: TypeError('another launcher')"
    else:
        shown["starter"] = start_of_zeros
        told = "cannot be started directly here: it gives other bits"
    helpers.run_cell("start-run", shown)
    assert told in capsys.readouterr().out and kept.KEEPING_FAULT == before


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_a_kept_launch_is_shown_to_do(shown, kept, monkeypatch, capsys, is_kept):
    if not is_kept:
        index = 0 if GPU else None
        monkeypatch.setitem(kept.KEEPING_FAULT, torch.device("cuda" if GPU else "cpu", index), "no")
    helpers.run_cell("kept-run", shown)
    assert ("not kept here" in capsys.readouterr().out) is not is_kept
    assert len(shown["tables"]) == is_kept


FIELDS = ("dtype = bfloat16", "shape = 128 x 64", "blocksize = 128", "quant_type = fp4")
FIELDS += ("state2.blocksize = 32", "state2.dtype = float16")


@pytest.mark.parametrize("name", FIELDS)
def test_a_state_that_changes_during_its_first_launch(kept, device, monkeypatch, name):
    """In another thread, say, while the kernel is compiled: later calls go by what it says now."""
    change = (NOTICED | REFUSED)[name]
    called(kept, device)
    weight, state = fresh(kept, device)
    launch = kept.launch

    def changing(*arguments, **options):
        launched = launch(*arguments, **options)
        change(weight, state, None, None)
        return launched

    monkeypatch.setattr(kept, "launch", changing)
    kept.dequantize_nf4(weight, state)
    monkeypatch.setattr(kept, "launch", launch)
    assert state._nf4_launch is None, "each call would ask it in vain, and then launch anew"
    for _ in range(2):
        if name in NOTICED:
            want = kept.spec(weight, state)
            assert kept.bits_differing(kept.dequantize_nf4(weight, state), want) == 0
        else:
            with pytest.raises(ValueError):
                kept.dequantize_nf4(weight, state)


def try_a_start_that_writes_nothing(nf4, monkeypatch):
    """The weight and state of a first call, whose trial got a block that held the same weight."""
    monkeypatch.setattr(nf4, "KEEPING_FAULT", {})
    tried = []
    monkeypatch.setattr(nf4, "launch_kernel", lambda *given: tried.append(given[-2][0]))
    weight, state = fresh(nf4, "cuda")
    nf4.assembly_works(weight.device)  # its trial would write into those blocks
    alike = [dequantize_4bit(weight.data, state) for _ in range(8)]
    blocks = {out.data_ptr() for out in alike}
    del alike
    nf4.dequantize_nf4(weight, state)
    assert len(tried) == 1 and tried[0] in blocks, "it held something else: nothing is tested"
    return weight, state


@pytest.mark.gpu
def test_a_start_that_writes_nothing_is_refused(nf4, monkeypatch):
    with pytest.warns(UserWarning, match="launches are not kept here.*other bits"):
        weight, state = try_a_start_that_writes_nothing(nf4, monkeypatch)
    for _ in range(2):
        check_right(nf4, weight, state)
    assert state._nf4_launch is None


@pytest.mark.gpu
def test_without_its_nans_such_a_start_would_be_taken(monkeypatch):
    weakened = helpers.load("nf4_without_nans", ("torch.full_like(out, math.nan)", "None"))
    _, state = try_a_start_that_writes_nothing(weakened, monkeypatch)
    assert state._nf4_launch is not None


CONDITIONS = {  # of a kept launch -> the case above that must fail without it
    # Is it the same weight, where it was?
    "weight_ref() is weight": "guarded",
    "looks_alike(weight)": (
        *("halved", "strided", "weight.data = its first half", "transposed in place"),
        *("traced", "traced before autograd", "transformed", "negated"),
    ),
    "data_ptr(weight) == weight_at": "weight.data = ...",
    # Does the kernel fit another weight?
    "isinstance(weight, torch.Tensor)": "weight as a list",
    "is_plain(weight)": "subclass",
    "weight.layout == torch.strided": "weight sparse",
    "weight.dtype == dtype": "another weight object",
    "weight.device == device": "weight on another device",
    "weight.numel() == numel": "weight.data = its first half",
    "weight.is_contiguous()": "another, strided",
    "weight.dim() > 0": "weight 0-d",
    "(is_matrix or not is_transposed(weight))": "transposed, three dimensions",
    "weight.untyped_storage().nbytes() >= bytes_used(weight)": "weight shortened",
    "weight.data_ptr() != 0": "zeros without memory",
    "weight.data_ptr() % 16 == remainder": "weight at an odd address",
    "not weight.is_neg()": "negated",
    "not wants_operators()": ("traced", "traced before autograd", "transformed"),
    # Do the state's tables lie where they lay,
    "absmax_ref() is absmax": "another absmax object",
    "absmax is not None": "absmax = None",
    "data_ptr(absmax) == absmax_at": "absmax.data = ...",
    "data_ptr(code) == code_at": "code.data = ...",
    "data_ptr(offset) == offset_at": "offset.data = ...",
    "data_ptr(absmax2) == absmax2_at": "state2.absmax.data = ...",
    "data_ptr(code2) == code2_at": "state2.code.data = ...",
    # does it say the same, and does nobody interfere?
    "quant_state.code is code": "another code object",
    "quant_state.state2 is state2": "another state2 object",
    "quant_state.offset is offset": "another offset object",
    "state2.absmax is absmax2": "another state2.absmax object",
    "state2.code is code2": "another state2.code object",
    "state2.blocksize == blocksize2": "state2.blocksize = 32",
    "state2.dtype is torch.float32": "state2.dtype = float16",
    "quant_state.shape == shape": "shape = 128 x 64",
    "quant_state.dtype is dtype": "dtype = bfloat16",
    "quant_state.blocksize == blocksize": "blocksize = 128",
    'quant_state.quant_type == "nf4"': "quant_type = fp4",
    "not is_profiled()": ("enter hook", "exit hook", "another enter hook", "another exit hook"),
    "_dequantize_nf4_kernel is kernel": "kernel redefined",
    "not modes()": "traced by make_fx",
}
OTHERS = {  # what else makes it right -> (its replacement, the case that must then fail)
    "if compiled is not None and ": ("if ", "no weights"),
    "is not None and is_unchanged(quant_state):": ("is not None:", "shape a list"),
    "start(data_ptr(weight))": ("start()", "another weight"),
    "if is_capturing(nf4.weight.device):": ("if False:", "captured"),
    "if is_the_same(weight):": ("if True:", "another weight"),
    "elif fits(weight):": ("elif True:", "weight shortened"),
    "state2 is None or (": ("(", "repeated, plain"),
    "says_the_same and state2_says_the_same": ("says_the_same", "another state2.absmax object"),
    "tables_are_there and state_is": ("state_is", "absmax.data = ..."),
    "state_is_unchanged and nobody_interferes": ("state_is_unchanged", "kernel redefined"),
    'getattr(enter, "calls", enter) or ': ("", "enter hook"),
    ' or getattr(leave, "calls", leave)': ("", "exit hook"),
    "if not is_unchanged(quant_state):": ("if False:", "shape = 128 x 64"),
    "with no_torch_function():": ("with contextlib.nullcontext():", "torch function"),
    "return out.t() if transposed else out": ("return out", "transposed in place"),
    "was_transposed = is_transposed(nf4.weight)": ("was_transposed = False", "transposed first"),
    ", is_transposed(weight)\n": (", False\n", "transposed"),
    "if torch._C._cuda_getDevice() == index:": ("if True:", "device"),
    "current_stream(index)": ("0", "stream"),
}
ENDS_THE_PROCESS = (  # on a GPU
    "weight.data_ptr() != 0",
    "weight.data_ptr() % 16 == remainder",
)


def guards():
    """The text of the functions that hold the conditions."""
    cells = "\n".join(source for _, source in helpers.exports())
    text = ""
    for name in ("call", "is_the_same", "fits", "is_unchanged"):
        head = re.search(rf"^( *)def {name}\(.*\n", cells, re.M)
        indent = len(head[1])
        for line in cells[head.end() :].splitlines(True):
            if line.strip() and not line.startswith(" " * (indent + 1)):
                break
            text += line
    return text


def conditions():
    """{condition: its line}: within `if (`, `return (` and `name = (`, one on a line."""
    found = {}
    block_of_conditions = r"(?:if|return|\w+ =).* \((?:  #.*)?\n((?:.*\n)*?) *\)\n"
    for block in re.findall(block_of_conditions, guards()):
        first, *others = [line for line in block.splitlines() if not line.strip().startswith("#")]
        lines = [(first.strip(), first)]
        for line in others:
            assert line.strip().startswith("and "), f"not one condition on a line: {line}"
            lines.append((line.strip().removeprefix("and "), line))
        for condition, line in lines:
            condition = condition.split("  #")[0]
            assert condition not in found, f"{condition} stands twice"
            found[condition] = line
    return found


def test_the_removals_cover_the_whole_check():
    """A condition that is added must come with a removal above, and one that goes takes its own."""
    assert set(conditions()) == set(CONDITIONS)
    decisions = re.findall(
        r"^ *(if .*?|elif .*?|while .*|for .*|.*continue)(?:  #.*)?$", guards(), re.M
    )
    assert decisions == [
        "if not is_unchanged(quant_state):",
        "if is_the_same(weight):",
        "elif fits(weight):",
    ]


def check_fails_without(text, replacement, name, monkeypatch, device):
    weakened = keeping(helpers.load("nf4_weakened", (text, replacement)), monkeypatch)
    check_right(weakened, *called(weakened, device))  # the rest of it works
    failures = (AssertionError, AttributeError, IndexError, RuntimeError, pytest.fail.Exception)
    with pytest.raises(failures):
        if name in NOTICED:
            check_noticed(weakened, device, name)
        elif name in REFUSED:
            check_refused(weakened, device, name)
        else:
            WATCHED[name](weakened, monkeypatch, device)


def skip_on_a_gpu(text):
    if GPU and text in ENDS_THE_PROCESS:
        pytest.skip("such an address would end the process; the stand-in on a CPU asserts")


def removals():
    """(condition, case) for each case that must fail without the condition."""
    for condition, cases in CONDITIONS.items():
        for case in [cases] if isinstance(cases, str) else cases:
            yield condition, case


@pytest.mark.parametrize("condition, case", removals())
def test_each_condition_is_needed(condition, case, monkeypatch, device):
    skip_on_a_gpu(condition)
    if condition == "weight.device == device" and not GPU:
        pytest.skip("a weight elsewhere is a meta tensor here, which has no address, either")
    if condition == "not modes()" and guard_sees_every_mode():
        pytest.skip("this torch's guard asks it, too; torch 2.13's does not")
    line = conditions()[condition]
    text, replacement = f"\n{line}\n", f"\n{line.replace(condition, 'True')}\n"
    check_fails_without(text, replacement, case, monkeypatch, device)


@pytest.mark.parametrize("text", OTHERS)
def test_what_else_makes_it_right_is_needed(text, monkeypatch, device):
    skip_on_a_gpu(text)
    check_fails_without(text, *OTHERS[text], monkeypatch, device)
