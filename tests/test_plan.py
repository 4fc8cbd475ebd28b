"""A plan never serves what it was not made for; without one, or where none can be, a call is right.

What is changed between two calls stands in one table. Each question that a plan asks, and each
condition under which one is kept, is then taken away: a check named beside it must fail.
"""

import concurrent.futures
import contextlib
import gc
import operator
import re
import threading
import types
import warnings
import weakref
from functools import partial

import helpers
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

GPU = torch.cuda.is_available()
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
pytestmark = pytest.mark.filterwarnings("error:no plan is kept")  # where none is expected


class Planned:
    """The notebook's definitions, which keep plans (on a CPU by stand-ins), and what its calls ran.

    nf4  a module, right or wrong; its launcher, allocator and all that `patch` changes come back
    """

    def __init__(self, nf4, device, patch):
        self.nf4, self.device, self.patch, self.n_by_operator = nf4, device, patch, 0
        self.world = None if GPU else helpers.plan_on_cpu(nf4, patch)
        self.op = nf4.dequantize_op
        patch.setattr(nf4, "dequantize_op", self.counted_op)

    def counted_op(self, *arguments):
        self.n_by_operator += 1
        return self.op(*arguments)

    def made(self, seed=0, dtype=torch.float16, **how):
        """A layer that was never called; its weight is whole words for whole programs."""
        shape, device = how.pop("shape", (32, 64)), how.pop("device", self.device)
        weight, state = self.nf4.quantized(shape, dtype, device, seed=seed, **how)
        return types.SimpleNamespace(weight=weight, quant_state=state)

    def called(self, seed=0):
        """A layer for whose kind there is a plan."""
        layer = self.made(seed)
        assert self.ran(layer) == "operator"
        return layer

    def ran(self, layer):
        """What a call ran, "plan" or "operator"; its bits are right."""
        before = self.n_by_operator
        out, want = self.nf4.your_dequantize_nf4(layer), self.nf4.spec(*vars(layer).values())
        want = want.t() if layer.weight.shape[0] == 1 else want
        assert self.nf4.bits_differing(out, want) == 0
        assert out.device == layer.weight.device and not out.requires_grad
        return "plan" if self.n_by_operator == before else "operator"

    def n_plans(self):
        return sum(map(len, self.nf4.PLANS.values()))

    def start_by(self, function):
        launcher = types.SimpleNamespace(_launch_kernel=function)
        self.patch.setattr(torch._C, "_StaticCudaLauncher", launcher)


@pytest.fixture
def planned(nf4, device, monkeypatch):
    return Planned(nf4, device, monkeypatch)


def of(layer, name):
    return operator.attrgetter(name)(layer)


def put(name, make):
    """A change: what stands at `name` becomes make(of it)."""

    def change(layer):
        owner, _, last = name.rpartition(".")
        setattr(of(layer, owner) if owner else layer, last, make(of(layer, name)))

    return change


def others(tensor):
    """Other values in other memory."""
    return tensor * 1.5 if tensor.numel() == 1 else tensor.flip(0)


def put_data(name):
    """The tensor's object stays."""

    def change(layer):
        of(layer, name).data = others(of(layer, name))

    return change


def as_integers(tensor):
    return tensor.view(torch.int8 if tensor.itemsize == 1 else torch.int32)


def elsewhere(tensor):
    """On a GPU pinned memory, whose address the GPU can read: only the device tells."""
    return tensor.cpu().pin_memory() if GPU else tensor.to("meta")


def negated(weight):
    """The same bytes, of which a view says that they are -weight."""
    return torch._neg_view(weight)


WEIGHT, ABSMAX = "weight", "quant_state.absmax"
TENSORS = (WEIGHT, ABSMAX, "quant_state.code", "quant_state.offset")
TENSORS += ("quant_state.state2.absmax", "quant_state.state2.code")
CHANGES = {}  # {name: (change(layer), "plan" | "operator" | the message)}
for name in TENSORS:
    CHANGES[f"{name}.data = ..."] = put_data(name), "plan"
    CHANGES[f"{name} = a tensor that has moved"] = put(name, torch.clone), "plan"
    CHANGES[f"{name} = another tensor"] = put(name, others), "plan"
    CHANGES[f"{name}.copy_(...)"] = put(name, lambda old: old.copy_(others(old))), "plan"
    CHANGES[f"{name} as integers"] = put(name, as_integers), "must be torch"
    CHANGES[f"{name} = None"] = put(name, lambda old: None), "expected a 4-bit weight|got None"
    freed = put(name, lambda old: old.untyped_storage().resize_(0) and None or old)
    CHANGES[f"{name} freed"] = freed, "freed or resized"
CHANGES |= {
    "nothing": (lambda layer: None, "plan"),
    "dtype": (put("quant_state.dtype", lambda old: torch.bfloat16), "operator"),
    "shape": (put("quant_state.shape", lambda old: old[::-1]), "operator"),
    "shape is a list": (put("quant_state.shape", list), "plan"),
    "state2.blocksize": (put("quant_state.state2.blocksize", lambda old: 512), "operator"),
    "blocksize": (put("quant_state.blocksize", lambda old: 128), "absmax must have 16 bytes"),
    "quant_type": (put("quant_state.quant_type", lambda old: "fp4"), "must be 'nf4', got 'fp4'"),
    "weight transposed": (put(WEIGHT, torch.t), "operator"),
    "weight flat": (put(WEIGHT, torch.flatten), "operator"),
    "weight at an odd address": (put(WEIGHT, partial(helpers.moved, offset=1)), "operator"),
    "weight at the next word": (put(WEIGHT, partial(helpers.moved, offset=4)), "plan"),
    "weight in another dtype": (put(WEIGHT, lambda old: old.view(torch.bfloat16)), "operator"),
    "weight that requires grad": (
        put(WEIGHT, lambda old: old.view(torch.float16).requires_grad_()),
        "operator",
    ),
    "weight a Parameter": (put(WEIGHT, partial(torch.nn.Parameter, requires_grad=False)), "operator"),
    "every second byte": (
        put(WEIGHT, lambda old: torch.cat((old, old), dim=1)[:, :1]),
        "contiguous",
    ),
    "half of the weight": (put(WEIGHT, lambda old: old[: len(old) // 2]), "1024 bytes"),
    "weight sparse": (put(WEIGHT, torch.Tensor.to_sparse), "strided"),
    "weight on another device": (put(WEIGHT, elsewhere), "be on"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_two_calls(planned, name):
    layer = planned.called()
    change, wanted = CHANGES[name]
    change(layer)
    if wanted in ("plan", "operator"):
        assert planned.ran(layer) == wanted
        assert planned.ran(layer) == "plan"
    else:
        with pytest.raises((ValueError, TypeError), match=wanted):
            planned.ran(layer)
        assert planned.ran(planned.made()) == "plan", "an error leaves the plan as it was"


def test_forms_that_alternate(planned):
    """As with offloading or FSDP: the packed bytes are now here, now there."""
    layer = planned.called()
    packed = layer.weight
    forms = [packed, helpers.moved(packed, 1), packed.t(), packed.view(-1)]
    for wanted in ("operator", "plan", "plan"):
        for layer.weight in forms:
            assert planned.ran(layer) == ("plan" if layer.weight is packed else wanted)


def test_kinds_that_differ_in_one_thing(planned):
    kinds = [{}, {"dtype": torch.bfloat16}, {"blocksize": 128}, {"nested": False}]
    kinds += [{"shape": (64, 32)}]
    for wanted in ("operator", "plan"):
        for kind in kinds:
            for seed in range(2):
                assert planned.ran(planned.made(seed, **kind)) == ("plan" if seed else wanted)
    assert planned.n_plans() == len(kinds)


def test_the_layer_of_a_plan_may_go(planned):
    layer = planned.called()
    assert planned.ran(layer) == "plan"
    held = [weakref.ref(of(layer, name)) for name in TENSORS if "code" not in name]
    del layer
    gc.collect()
    assert [ref() for ref in held] == [None] * 4, "a code is shared by all; of these none is held"
    assert planned.ran(planned.made(1)) == "plan"


def test_each_output_is_fresh(planned):
    layers = [planned.called(), planned.made(1), planned.made()]
    outs = [planned.nf4.your_dequantize_nf4(layer) for layer in layers]
    assert planned.n_by_operator == 1 and len({out.data_ptr() for out in outs}) == 3
    for out, layer in zip(outs, layers):
        assert planned.nf4.bits_differing(out, planned.nf4.spec(*vars(layer).values())) == 0


def test_inference_mode_and_autocast(planned):
    """They change dispatch keys: each gets a plan of its own, and an output of its kind."""
    autocast = partial(torch.autocast, planned.device, dtype=torch.bfloat16)
    contexts = [contextlib.nullcontext, torch.no_grad, torch.inference_mode, autocast]
    layer = planned.made()
    for context in contexts:
        with context():
            planned.ran(layer)
    for context in contexts:
        with context():
            assert planned.ran(layer) == "plan"
            out = planned.nf4.your_dequantize_nf4(layer)
        assert out.is_inference() == (context is torch.inference_mode)


def test_a_later_call_asks_nothing_in_python(planned):
    """Neither the layer's own class of weight nor a mode, as torch.set_default_device sets one."""

    class Seen(torch.overrides.TorchFunctionMode):
        functions = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.functions.append(function)
            return function(*args, **(kwargs or {}))

    layer = planned.nf4.bnb_Linear4bit(64, 32).to(planned.device)
    planned.ran(types.SimpleNamespace(weight=layer.weight, quant_state=layer.weight.quant_state))
    with Seen():
        planned.nf4.dequantize_nf4(layer.weight, layer.weight.quant_state)
    assert planned.n_by_operator == 1 and Seen.functions == []


def test_the_current_stream(planned):
    layer = planned.called()
    if not GPU:
        planned.world.stream = 7  # the launcher's stand-in compares
        assert planned.ran(layer) == "plan"
        return
    layer, other = planned.made(shape=(4096, 4096)), planned.made(1, shape=(4096, 4096))
    planned.ran(layer)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        layer.weight.copy_(other.weight)  # ordered on this stream alone
        assert planned.ran(layer) == "plan"


def test_another_gpu_is_current(planned):
    """At the first call and at later ones; it is current again afterwards."""
    world = planned.world or types.SimpleNamespace(device=None)
    world.device = 1
    assert planned.ran(planned.made()) == "operator"
    assert planned.ran(planned.made(1)) == "plan"
    assert world.device == 1


@pytest.mark.gpu
@needs_two_gpus
def test_two_gpus(planned):
    first, second = planned.made(), planned.made(1, device="cuda:1")
    for turn, current in enumerate((0, 1, 0, 1)):
        with torch.cuda.device(current):
            for layer in (first, second):
                assert planned.ran(layer) == ("plan" if turn else "operator")
            assert torch.cuda.current_device() == current
    second.weight = second.weight.to("cuda:0")
    with pytest.raises(ValueError, match="cuda:0"):
        planned.ran(second)


def test_none_is_made_while_a_graph_is_captured(planned):
    """What a plan tries would be captured, and every replay would do it again."""
    planned.patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(2):
        assert planned.ran(planned.made()) == "operator"
    planned.patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    planned.called()
    assert planned.n_plans() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("has_plan", [True, False])
def test_a_graph_is_captured_and_replayed(planned, has_plan):
    layer, other = planned.called(), planned.made(1)
    if not has_plan:
        planned.nf4.PLANS.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = planned.nf4.your_dequantize_nf4(layer)
    assert planned.n_plans() == has_plan
    for _ in range(2):
        layer.weight.copy_(other.weight)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert planned.nf4.bits_differing(out, planned.nf4.spec(*vars(layer).values())) == 0


@pytest.mark.gpu  # Triton's interpreter is no place for threads
def test_threads(planned):
    """Four begin at once, each on a stream of its own, when no plan is there."""
    layers = []
    for dtype in helpers.DTYPES:
        layers += [planned.made(seed, dtype) for seed in range(3)]
    torch.cuda.synchronize()
    start = threading.Barrier(4)

    def work(first):
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(first, first + 200):
                planned.ran(layers[turn % len(layers)])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(planned.nf4.PLANS) == 3


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operator(planned):
    """With a plan and without; none is made under it, and none is refused."""
    layer = planned.made()
    for _ in range(2):
        for mode in (Seen(), FlopCounterMode(display=False)):
            n_plans = planned.n_plans()
            with mode:
                assert planned.ran(layer) == "operator"
            assert isinstance(mode, FlopCounterMode) or "dequantize" in "".join(mode.names)
            assert planned.n_plans() == n_plans
        planned.ran(layer)
    assert planned.ran(layer) == "plan"


def test_fake_tensors(planned):
    """Where there is a plan for real ones, and where there is none."""
    layer, mode = planned.made(), FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(layer.weight)
    for _ in range(2):
        outs = [planned.nf4.dequantize_nf4(fake, layer.quant_state)]
        with mode:
            outs.append(planned.nf4.your_dequantize_nf4(layer))
        for out in outs:
            assert isinstance(out, type(fake)) and tuple(out.shape) == (32, 64)
        planned.ran(layer)
    assert planned.n_plans() == 1


def jit_traced(function, packed):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        return torch.jit.trace(function, packed, check_trace=False)


TRACERS = {
    "make_fx": lambda function, packed: make_fx(function)(packed),
    "make_fx before autograd": lambda function, packed: make_fx(function, pre_dispatch=True)(packed),
    "torch.jit.trace": jit_traced,
    "torch.func.vmap": lambda function, packed: torch.func.vmap(function),
}
