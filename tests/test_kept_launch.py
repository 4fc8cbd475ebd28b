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
    assert nf4.kept_launches(state), "no launch was kept, so nothing is tested"
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


def freed(name):
    """As FSDP frees what it has gathered."""

    def change(weight, state, *_):
        (weight if name == "weight" else field(state, name)).untyped_storage().resize_(0)

    return change


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
    **{f"{name} freed": freed(name) for name in ("weight", *STATE)},
}


def apply_and_call(nf4, device, change):
    weight, state = called(nf4, device)
    nf4.dequantize_nf4(weight.data, state)  # a launch is kept for a plain tensor, too
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
    owner, _, field = name.rpartition(".")
    delattr(state.state2 if owner else state, field)
    with pytest.raises(TypeError, match=f"no attribute '{field}'"):
        kept.dequantize_nf4(weight, state)


def test_an_error_of_the_start_is_not_taken_for_a_lost_field(kept, device):
    weight, state = called(kept, device)

    def failing(*_):
        raise AttributeError("in the launcher")

    kept.kept_launches(state)[0].start_kernel = failing
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
    count = plain_launches(kept, monkeypatch)
    for turn in range(6):
        buffer = buffers[turn % 2]
        weight.data = buffer  # the parameter's object stays
        for packed in (weight, buffer, buffer.t(), buffer.view(-1)):
            want = dequantize_4bit(buffer, state)
            want = want.t() if packed.shape[0] == 1 else want
            assert kept.bits_differing(kept.dequantize_nf4(packed, state), want) == 0
    assert count == [3], "one for each form in which it comes, but the first, which was kept before"
    assert len(kept.kept_launches(state)) == 4


def test_tables_that_move_keep_the_launch(kept, device, monkeypatch):
    """As when a layer goes to the CPU and back: other tensors, of the same kind."""
    weight, state = called(kept, device)
    count = plain_launches(kept, monkeypatch)
    for name in STATE:
        table = field(state, name)
        setattr(*place(state, name), table.flip(0) if name == "absmax" else table.clone())
        check_right(kept, weight, state)
    assert count == [0]


def test_so_many_launches_are_kept_and_no_more(kept, device):
    """The latest: they are the ones that are asked for."""
    weight, state = called(kept, device, shape=(1, 4096))
    shapes = [torch.Size((2**n, 2 ** (12 - n))) for n in range(1, 11)]
    for state.shape in shapes:
        assert (
            kept.bits_differing(kept.dequantize_nf4(weight, state), kept.spec(weight, state)) == 0
        )
    found = [launch.facts[0] for launch in kept.kept_launches(state)]
    assert found == shapes[: -1 - kept.KEPT_AT_MOST : -1]


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, "autocast"])
def test_a_switched_mode_keeps_the_launch(kept, device, monkeypatch, context):
    """Autocast and inference mode change dispatch keys, but nothing that the kernel reads."""
    if context == "autocast":
        context = functools.partial(torch.autocast, device, dtype=torch.bfloat16)
    for first, second in ((context, contextlib.nullcontext), (contextlib.nullcontext, context)):
        with first():
            weight, state = called(kept, device)
        with second():
            check_right(kept, weight, state)
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
        assert len(nf4.kept_launches(state)) == 1, "a launch that somebody looks at is not kept"

    return check


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_no_hook_and_a_plain_function_as_a_hook(kept, device, monkeypatch, which):
    """Triton allows both; with a function nothing is kept, and it sees each launch."""
    weight, state = fresh(kept, device)
    seen, count = [], plain_launches(kept, monkeypatch)
    for hook, plain in ((None, 1), (seen.append, 1 + 3)):
        monkeypatch.setattr(kept.RUNTIME, which, hook)
        for _ in range(3):
            check_right(kept, weight, state)
        assert len(kept.kept_launches(state)) == 1 and count == [plain]
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
    assert nf4.kept_launches(state)


def check_nested(nf4, monkeypatch, device):
    """A torch.Tensor without strides, at which torch's guard would end the process."""
    weight, state = called(nf4, device)
    nf4.dequantize_nf4(weight.data, state)
    with pytest.raises(TypeError, match="the weight must be a tensor, got a nested one"):
        nf4.dequantize_nf4(torch.nested.nested_tensor([weight.data.view(-1)]), state)


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
    nf4.dequantize_nf4(weight.data.view(-1), state)
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
    for _ in range(4):
        assert torch.equal(nf4.dequantize_nf4(weight, state), want)
        weight.data, want = weight.data.t(), want.t()
    assert count == [1]


def check_transposed_3d(nf4, monkeypatch, device):
    """Only a matrix can be transposed: the error is that of a first call."""
    weight, state = fresh(nf4, device)
    state.shape = torch.Size((4, *state.shape[1:], state.shape[0] // 4))
    nf4.dequantize_nf4(weight, state)
    assert nf4.kept_launches(state), "no launch was kept, so nothing is tested"
    with pytest.raises(ValueError, match="contiguous packed bytes"):
        nf4.dequantize_nf4(weight.data.t(), state)


def check_0d(nf4, monkeypatch, device):
    weight, state = called(nf4, device, shape=(1, 2))
    nf4.dequantize_nf4(weight.data, state)
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
    assert nf4.kept_launches(state), "no launch was kept, so nothing is tested"
    state.state2 = fresh(nf4, device)[1].state2
    with pytest.raises(ValueError, match="absmax must be torch.uint8, got torch.float32"):
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
    assert nf4.kept_launches(state), "no launch was kept, so nothing is tested"
    weight.data = weight.data.view(-1).view(torch.uint8)[: len(weight)].view(-1, 1)
    with pytest.raises(ValueError, match="contiguous packed bytes"):
        nf4.dequantize_nf4(weight, state)


def check_shape_a_list(nf4, monkeypatch, device):
    weight, state = fresh(nf4, device)
    state.shape = list(state.shape)
    nf4.dequantize_nf4(weight, state)
    assert not nf4.kept_launches(state), "it would be used after the list has changed"


def check_no_weights(nf4, monkeypatch, device):
    """No kernel ran, so none can be kept; that says nothing of the device."""
    monkeypatch.setattr(nf4, "KEEPING", {})
    _, state = fresh(nf4, device, nested=False)
    state.shape, state.absmax = torch.Size((0, 64)), state.absmax[:0]
    weight = torch.empty((0, 1), dtype=torch.uint8, device=device)
    for _ in range(2):
        assert nf4.dequantize_nf4(weight, state).shape == (0, 64)
    assert not nf4.kept_launches(state)
    called(nf4, device)  # and others are kept as before


def check_captured(nf4, monkeypatch, device):
    """While a graph is captured (so it is said here) nothing is kept, and nothing is dropped."""
    weight, state = fresh(nf4, device)
    kept_weight, kept_state = called(nf4, device, seed=1)
    first = nf4.kept_launches(kept_state)
    kept_state.dtype = torch.bfloat16
    monkeypatch.setattr(nf4, "is_capturing", lambda device: True)
    check_right(nf4, weight, state)
    assert not nf4.kept_launches(state)
    for _ in range(2):
        check_right(nf4, kept_weight, kept_state)
        assert nf4.kept_launches(kept_state) is first, "in a capture, what was kept stays"
    monkeypatch.setattr(nf4, "is_capturing", lambda device: False)
    check_right(nf4, kept_weight, kept_state)
    assert len(nf4.kept_launches(kept_state)) == 2, "out of it, a new launch is kept"


def test_a_capture_is_asked_of_the_outputs_gpu(nf4, monkeypatch):
    """Whichever GPU is current."""
    gpu, entered = torch.device("cuda", 1), []

    @contextlib.contextmanager
    def current(device):
        entered.append(device)
        yield
        entered.pop()

    monkeypatch.setattr(nf4, "current", current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: entered == [gpu])
    assert nf4.is_capturing(gpu) and not nf4.is_capturing(torch.device("cuda", 0))


def check_two_that_are_one(nf4, monkeypatch, device):
    """torch's guard wants tensors that are not one another: what it refuses is not kept."""
    weight, state = fresh(nf4, device)
    state.offset = state.state2.absmax[:1]
    state.state2.absmax = state.offset
    for _ in range(3):
        check_right(nf4, weight, state)
    assert not nf4.kept_launches(state), "each call would keep another one, and use none"


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
        assert not nf4.kept_launches(state)

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
    "weight nested": check_nested,
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
    "two that are one": check_two_that_are_one,
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

    def noting(*given):
        held.append(weakref.ref(given[0].compiled))
        return keep(*given)

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
    count, launch_kernel = [0], torch._C._StaticCudaLauncher._launch_kernel

    def counting(*arguments):
        count[0] += 1
        launch_kernel(*arguments)

    helpers.launch_by(counting, monkeypatch)
    return count


def test_a_launch_is_tried_once_on_each_device(kept, device, monkeypatch):
    monkeypatch.setattr(kept, "KEEPING", {})
    count = starts(kept, monkeypatch)
    layers = [called(kept, device, seed=seed) for seed in range(3)]
    assert count == [1] and list(kept.KEEPING.values()) == [True]
    for weight, state in layers:
        check_right(kept, weight, state)
    assert count == [4]


def shown(nf4, device, monkeypatch, cell, is_kept=True):
    """Runs a cell that shows what a kept launch does: its names, and the tables that it showed."""
    tables = []
    names = {**vars(nf4), "DEVICE": device, "gpu": "here", "RECORD": {}, "EXACT": {"differing": 0}}
    names |= {"compare": lambda out, *pair: nf4.bits_differing(out, dequantize_4bit(*pair))}
    names |= {"show": lambda table, caption: tables.append(table)}
    if not is_kept:
        index = 0 if GPU else None
        monkeypatch.setitem(nf4.KEEPING, torch.device(device, index), False)
    helpers.run_cell(cell, names)
    return names, tables


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_kept_launch_is_shown(kept, device, monkeypatch, capsys, is_kept):
    shown(kept, device, monkeypatch, "steps-run", is_kept)
    told = capsys.readouterr().out
    assert ("not kept here" in told) is not is_kept and ("0 of 262,144 differ" in told) is is_kept


def test_a_kept_launch_that_returns_the_first_output_is_noticed(kept, device, monkeypatch):
    held = []

    def launch_and_hold(*given):
        held.append(kept.launch(given[0]).out)
        return held[0]

    monkeypatch.setattr(kept, "launch_and_keep", launch_and_hold)
    monkeypatch.setattr(kept, "start_if_kept", lambda *_: held[0])
    with pytest.raises(AssertionError):
        shown(kept, device, monkeypatch, "steps-run")


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
            assert not nf4.kept_launches(each[1])


def test_nothing_is_kept_where_the_trial_gives_other_bits(kept, device, monkeypatch):
    monkeypatch.setattr(kept, "KEEPING", {})
    launch_kernel = torch._C._StaticCudaLauncher._launch_kernel
    other_weight, _ = fresh(kept, device, seed=9)
    tried = []

    def launch_another(*arguments):
        *fixed, (out_at, _, *rest), stream = arguments
        tried.append(out_at)
        launch_kernel(*fixed, (out_at, other_weight.data_ptr(), *rest), stream)

    helpers.launch_by(launch_another, monkeypatch)
    check_nothing_is_kept(kept, device, r"RuntimeError\('other bits'\)")
    assert len(tried) == 1 and list(kept.KEEPING.values()) == [False]


PRIVATE = {  # what a kept launch needs of torch._C -> where it is
    "_launch_kernel": lambda: torch._C._StaticCudaLauncher,
    "_StaticCudaLauncher": lambda: torch._C,
    "_empty_strided_cuda": lambda: torch._C._dynamo.guards,
    "TensorGuards": lambda: torch._C._dynamo.guards,
    "_cuda_getDevice": lambda: torch._C,
    "_cuda_getCurrentRawStream": lambda: torch._C,
}


@pytest.mark.parametrize("missing", PRIVATE)
def test_falls_back_where_torch_lacks_a_private_function(kept, device, monkeypatch, missing):
    """The warning names it."""
    if GPU and missing.startswith("_cuda_get"):
        pytest.skip("Triton's own launch needs it, too")
    helpers.launch_by(torch._C._StaticCudaLauncher._launch_kernel, monkeypatch)  # one to delete
    monkeypatch.setattr(kept, "KEEPING", {})
    monkeypatch.delattr(PRIVATE[missing](), missing)
    check_nothing_is_kept(kept, device, f".*AttributeError.*'{missing}'")
    assert list(kept.KEEPING.values()) == [False]


def test_falls_back_where_the_compiled_kernel_is_not_as_expected(kept, device, monkeypatch):
    """A renamed attribute of Triton's costs the kept launch, not the call."""
    monkeypatch.setattr(kept, "KEEPING", {})

    def renamed(*_):
        raise AttributeError("no function")

    monkeypatch.setattr(kept, "make_kept", renamed)
    check_nothing_is_kept(kept, device, ".*no function")


def test_a_trial_that_runs_out_of_memory_decides_nothing(kept, device, monkeypatch):
    weight, state = fresh(kept, device)
    make_kept = kept.make_kept

    def starved(*_):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(kept, "KEEPING", {})
    monkeypatch.setattr(kept, "make_kept", starved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_right(kept, weight, state)
    assert not kept.kept_launches(state) and kept.KEEPING == {}
    monkeypatch.setattr(kept, "make_kept", make_kept)
    called(kept, device)
    assert list(kept.KEEPING.values()) == [True]


def test_a_launch_that_cannot_be_kept_says_nothing_of_others(kept, device, monkeypatch):
    """Where the device's first was good, one failure switches nothing off."""
    called(kept, device)
    weight, state = fresh(kept, device, seed=1)

    def failing(*_):
        raise TypeError("a strange tensor")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(kept, "make_kept", failing)
        check_right(kept, weight, state)
    assert not kept.kept_launches(state) and list(kept.KEEPING.values()) == [True]
    called(kept, device, seed=2)


class Refuses:
    """A state whose attributes are set once."""

    def __init__(self, **fields):
        self.__dict__.update(fields)

    def __setattr__(self, name, value):
        raise ValueError(f"{name} cannot be set")


@pytest.mark.parametrize("how", ["frozen", "refuses"])
def test_a_state_that_takes_no_attributes_keeps_nothing(kept, device, monkeypatch, how):
    """And leaves the launches of other states alone."""
    monkeypatch.setattr(kept, "KEEPING", {})
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
    assert not hasattr(frozen, "_nf4_launches") and list(kept.KEEPING.values()) == [True]
    called(kept, device)


def test_no_function_mode_is_asked(kept, device):
    """As torch.set_default_device sets one: in Python, at every method of every tensor."""

    class Seen(torch.overrides.TorchFunctionMode):
        names = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    weight, state = called(kept, device)
    kept.dequantize_nf4(weight.data, state)
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
    assert loaded._nf4_launches == ()
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
    assert not nf4.kept_launches(state)
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


SHOWN_ANEW = ["a first call", "the output's dtype", "the weight comes transposed"]


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_a_kept_launch_is_shown_to_do(kept, device, monkeypatch, capsys, is_kept):
    _, tables = shown(kept, device, monkeypatch, "kept-run", is_kept)
    assert ("not kept here" in capsys.readouterr().out) is not is_kept
    assert len(tables) == is_kept
    if is_kept:
        new = tables[0]["what ran"] == "a new launch"
        assert list(tables[0].index[new]) == SHOWN_ANEW and not tables[0]["differ"].any()


def test_one_thing_changes_at_a_time(kept, device, monkeypatch):
    """The weight's buffer is another one once, and no later change takes it back."""
    names, _ = shown(kept, device, monkeypatch, "kept-run")
    addresses = [weight.data_ptr() for _, weight, _ in names["changes"]()]
    changed = [i for i in range(1, 9) if addresses[i] != addresses[i - 1]]
    assert changed == [3] and len(addresses) == 9


FIELDS = ("dtype = bfloat16", "shape = 128 x 64", "blocksize = 128", "quant_type = fp4")
FIELDS += ("state2.blocksize = 32", "state2.dtype = float16")


@pytest.mark.parametrize("name", FIELDS)
def test_a_state_that_changes_during_its_first_launch(kept, device, monkeypatch, name):
    """In another thread, say, while the kernel is compiled: later calls go by what it says now.

    What is kept is for what it said before.
    """
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
    for _ in range(2):
        if name in NOTICED:
            want = kept.spec(weight, state)
            assert kept.bits_differing(kept.dequantize_nf4(weight, state), want) == 0
        else:
            with pytest.raises(ValueError):
                kept.dequantize_nf4(weight, state)


def try_a_start_that_writes_nothing(nf4, monkeypatch):
    """The weight and state of a first call, whose trial got a block that held the same weight."""
    monkeypatch.setattr(nf4, "KEEPING", {})
    tried = []
    helpers.launch_by(lambda *given: tried.append(given[-2][0]), monkeypatch)
    weight, state = fresh(nf4, "cuda")
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
    assert not nf4.kept_launches(state)


@pytest.mark.gpu
def test_without_its_nans_such_a_start_would_be_taken(monkeypatch):
    weakened = helpers.load("nf4_without_nans", ("torch.full_like(out, math.nan)", "None"))
    _, state = try_a_start_that_writes_nothing(weakened, monkeypatch)
    assert weakened.kept_launches(state)


CONDITIONS = {  # of a kept launch -> the cases above that must fail without it
    "facts == kept.facts": (
        *("dtype = bfloat16", "shape = 128 x 64", "blocksize = 128", "quant_type = fp4"),
        *("state2.blocksize = 32", "state2.dtype = float16"),
    ),
    "type(weight) is kept.weight_type": ("weight as a list", "weight = None"),
    "not weight.is_nested": ("weight nested",),
    "kept.are_alike(*tensors)": (
        *("another weight object", "weight.data = its first half", "weight on another device"),
        *(f"another {name} object" for name in STATE),
        *(f"{name} = None" for name in STATE),
        *("halved", "strided", "another, strided", "transposed in place", "transposed first"),
        *("traced", "traced before autograd", "transformed", "negated", "weight 0-d"),
        "weight sparse",
    ),
    "not dispatch_modes()": ("traced by make_fx",),
    "not is_profiled()": ("enter hook", "exit hook", "another enter hook", "another exit hook"),
    "kept.kernel is _dequantize_nf4_kernel": ("kernel redefined",),
    "(addresses[0] % 4 == 0) != kept.is_aligned": ("weight at an odd address",),
    "fits(kept, tensors, facts)": ("dtype = bfloat16", "enter hook"),
    "addresses == kept.checked_addresses": ("weight shortened", "weight freed", "absmax freed"),
    "recheck_memory(kept, tensors, addresses)": (
        *("weight shortened", "weight freed", "absmax freed"),
        "weight at an odd address",
    ),
    "torch._C._cuda_getDevice() != kept.gpu": ("device",),
}
OTHERS = {  # what else makes it right -> (its replacement, the case that must then fail)
    "first.compiled is not None  #": ("True  #", "no weights"),
    "and not is_capturing(device)": ("", "captured"),
    "and not is_profiled()\n        and as_given": ("and as_given", "enter hook"),
    "and as_given  #": ("#", "offset in torch.bfloat16"),
    "and isinstance(shape, tuple)": ("", "shape a list"),
    "if not kept.are_alike(*tensors):": ("if False:", "two that are one"),
    "    check_memory(tensors)\n    if (addresses": ("    if (addresses", "weight shortened"),
    "[0] * (6 - len(tensors))": ("[]", "repeated, plain"),
    'getattr(enter, "calls", enter) or ': ("", "enter hook"),
    ' or getattr(leave, "calls", leave)': ("", "exit hook"),
    "with no_torch_function():  # Params4bit": (
        "with contextlib.nullcontext():  # Params4bit",
        "torch function",
    ),
    "result = out.t() if is_transposed(nf4.weight) else out": ("result = out", "transposed first"),
    "arguments, torch._C._cuda_getCurrentRawStream(kept.gpu)": ("arguments, 0", "stream"),
}
ENDS_THE_PROCESS = {  # without its condition: anywhere, or on a GPU
    "weight nested": True,
    "weight freed": GPU,
    "absmax freed": GPU,
    "weight on another device": GPU,
    "weight at an odd address": GPU,
}


def again():
    """The text of the functions that hold the conditions."""
    cells = "\n\n\n".join(source for _, source in helpers.exports())
    functions = []
    for name in ("recheck_memory", "start_if_kept", "fits", "start"):
        functions += re.findall(rf"def {name}\(.*?\n\n\n", cells, re.S)
    assert len(functions) == 4
    return "".join(functions)


def test_the_removals_cover_the_whole_check():
    """A condition that is added must come with a removal above, and one that goes takes its own."""
    block = re.search(r"return \(\n(.*?)\n *\)\n", again(), re.S)[1]
    found = []
    for line in block.splitlines():
        found.append(line.split("  #")[0].strip().removeprefix("and "))
    for condition in re.findall(r"^ *if (.*):(?:  #.*)?$", again(), re.M):
        found += re.split(" and | or ", condition)
    assert found == list(CONDITIONS)
    loops = re.findall(r"^ *(?:elif|while|for) .*", again(), re.M)
    assert [loop.strip() for loop in loops] == ["for kept in kept_launches(quant_state):"]


def check_fails_without(text, replacement, name, monkeypatch, device):
    if ENDS_THE_PROCESS.get(name):
        pytest.skip("this would end the process")
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


def test_new_addresses_are_checked_once(kept, device, monkeypatch):
    """Else each later call would look at the memory again."""
    looked = []
    check_memory = kept.check_memory

    def counted(tensors):
        looked.append(tensors)
        check_memory(tensors)

    weight, state = called(kept, device)
    monkeypatch.setattr(kept, "check_memory", counted)
    kept.dequantize_nf4(weight, state)
    assert len(looked) == 0, "no address is new"
    weight.data = weight.data.clone()
    for _ in range(3):
        kept.dequantize_nf4(weight, state)
    assert len(looked) == 1


def removals():
    """(condition, case) for each case that must fail without the condition."""
    for condition, cases in CONDITIONS.items():
        for case in cases:
            yield condition, case


@pytest.mark.parametrize("condition, case", removals())
def test_each_condition_is_needed(condition, case, monkeypatch, device):
    if condition == "not dispatch_modes()" and guard_sees_every_mode():
        pytest.skip("this torch's guard asks it, too; torch 2.13's does not")
    lines = [line for line in again().splitlines() if not line.startswith("def ")]
    (line,) = (line for line in lines if condition in line.split("  #")[0])
    always = "False" if "!=" in condition else "True"
    check_fails_without(line, line.replace(condition, always), case, monkeypatch, device)


@pytest.mark.parametrize("text", OTHERS)
def test_what_else_makes_it_right_is_needed(text, monkeypatch, device):
    check_fails_without(text, *OTHERS[text], monkeypatch, device)
