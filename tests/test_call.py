"""A plan serves the calls that it is right for, bitsandbytes all others, and the log says why."""

import concurrent.futures
import contextlib
import gc
import threading
import weakref
from functools import partial
from unittest import mock

import helpers
import numpy as np
import pytest
import stand_ins
import torch
from helpers import GPU, NEW_PLAN, ServedBy
from torch.overrides import TorchFunctionMode

PLAN, OPERATOR, BITSANDBYTES = ServedBy


# A field of the layer changes.


def others(tensor):
    """Return other values in the same form."""
    return tensor * 1.5 if tensor.numel() == 1 else tensor.flip(0)


def with_others_data(tensor):
    """Keep the object, and give it other memory."""
    tensor.data = others(tensor)
    return tensor


def with_one_table_for_two(state):
    state.offset = state.state2.absmax
    return state


def with_grad(weight):
    return weight.view(-1).view(torch.half).requires_grad_()


SAME_PLAN = [PLAN, PLAN]  # what serves the two calls after a change
NO_PLAN = [BITSANDBYTES, BITSANDBYTES]
WEIGHT, STATE = "weight", "quant_state"
ABSMAX, ABSMAX2 = "quant_state.absmax", "quant_state.state2.absmax"
OFFSET, CODE2 = "quant_state.offset", "quant_state.state2.code"
CHANGES = {  # {id: (where, what it becomes, what serves the next two calls)}
    "dtype": (f"{STATE}.dtype", lambda dtype: torch.bfloat16, NEW_PLAN),
    "shape": (f"{STATE}.shape", lambda shape: shape[::-1], NEW_PLAN),
    "shape a list": (f"{STATE}.shape", list, [OPERATOR, OPERATOR]),  # a list has no hash
    "blocksize of numpy": (f"{STATE}.blocksize", np.int64, SAME_PLAN),
    "state2.blocksize": (f"{STATE}.state2.blocksize", lambda size: 512, NEW_PLAN),
    "code": (f"{STATE}.code", torch.clone, SAME_PLAN),
    "one table for two": (STATE, with_one_table_for_two, NO_PLAN),
    "offset with a dimension": (OFFSET, lambda offset: offset.view(1), NEW_PLAN),
    "offset in fp16": (OFFSET, lambda offset: offset.half(), NEW_PLAN),
    "offset in bf16": (OFFSET, lambda offset: offset.bfloat16(), NEW_PLAN),
    "offset in fp64": (OFFSET, lambda offset: offset.double(), NO_PLAN),
    "weight a word on": (WEIGHT, partial(helpers.moved, offset=4), SAME_PLAN),
    "weight a byte on": (WEIGHT, partial(helpers.moved, offset=1), NO_PLAN),
    "absmax a byte on": (ABSMAX, partial(helpers.moved, offset=1), SAME_PLAN),
    "offset a byte on": (OFFSET, helpers.one_byte_on, NO_PLAN),
    "state2.absmax a byte on": (ABSMAX2, helpers.one_byte_on, NO_PLAN),
    "state2.code a byte on": (CODE2, helpers.one_byte_on, NO_PLAN),
    "weight with gaps": (WEIGHT, helpers.every_second, NO_PLAN),
    "absmax with gaps": (ABSMAX, helpers.every_second, NO_PLAN),
    "state2.code with gaps": (CODE2, helpers.every_second, NO_PLAN),
    "weight as int8": (WEIGHT, lambda weight: weight.view(torch.int8), NEW_PLAN),
    "weight as fp64": (WEIGHT, lambda weight: weight.view(-1).view(torch.float64), NEW_PLAN),
    "weight with gradients": (WEIGHT, with_grad, NEW_PLAN),
}
for name in (WEIGHT, ABSMAX, OFFSET, ABSMAX2, CODE2):
    CHANGES[f"{name}.data = others"] = name, with_others_data, SAME_PLAN
    CHANGES[f"{name} = others"] = name, others, SAME_PLAN
    copy_in = lambda tensor: tensor.copy_(others(tensor))  # noqa: E731
    CHANGES[f"{name}.copy_(others)"] = name, copy_in, SAME_PLAN


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_field_gets_right_weights(calls, what):
    layer = calls.layer_with_plan()
    where, make, wanted = CHANGES[what]
    helpers.replace_field(layer, where, make)
    calls.assert_served_by(layer, *wanted)
    assert calls.n_plans() == (2 if wanted == NEW_PLAN else 1), "one for each form"
    calls.assert_served_by(calls.layer(), PLAN)  # the first plan is still there


# A plan is made once, and runs as an ordinary function of torch.


def test_a_plan_is_made_once_and_none_for_what_has_none(calls):
    """None for an odd address or for a table in two fields; one for a weight a word on."""
    make_plan = mock.Mock(wraps=calls.nf4.make_plan)
    calls.patch.setattr(calls.nf4, "make_plan", make_plan)
    layer, twice = calls.layer(), calls.layer()
    layer.weight = helpers.moved(layer.weight, 1)
    with_one_table_for_two(twice.quant_state)
    for _ in range(100):
        calls.dequantize(layer)
        calls.dequantize(twice)
    assert not make_plan.called and calls.n_plans() == 0, "nothing to keep, so nothing to make"
    layer.weight = helpers.moved(layer.weight, 4)
    layer.quant_state.absmax = helpers.moved(layer.quant_state.absmax, 1)
    for _ in range(100):
        calls.dequantize(layer)
    assert make_plan.call_count == 2, "one of the trial, and one that is kept"
    assert calls.n_plans() == 1


@pytest.mark.parametrize("names", [("nf4_one", "nf4_two"), ("nf4_same", "nf4_same")], ids=str)
def test_each_copy_of_the_code_has_its_own_plans(make_copy, names):
    """As a reload leaves them, or the exported module beside the notebook."""
    copies = list(map(make_copy, names))
    for wanted in (OPERATOR, PLAN):
        for copy in copies:
            copy.assert_served_by(copy.layer(), wanted)


def test_each_output_is_fresh(calls):
    layers = [calls.layer_with_plan(), calls.layer(1), calls.layer()]
    outs = [calls.dequantize(layer) for layer in layers]
    assert calls.n_by_operator == 1, "the plan served them"
    assert len({out.data_ptr() for out in outs}) == 3, "two outputs share their memory"
    for out, layer in zip(outs, layers):
        calls.assert_right(out, layer)


def test_inference_mode_and_autocast_get_plans_of_their_own(calls):
    """They change dispatch keys, and inference mode the kind of output."""
    autocast = partial(torch.autocast, calls.device, dtype=torch.bfloat16)
    layer = calls.layer()
    contexts = 2 * [contextlib.nullcontext, torch.no_grad, torch.inference_mode, autocast]
    for turn, context in enumerate(contexts):
        with context():
            served_by = calls.served_by(layer)
            out = calls.dequantize(layer)
        if turn >= 4:  # each context's second time
            assert served_by is PLAN, f"in {context}, got {served_by.value}"
        assert out.is_inference() == (context is torch.inference_mode)


def test_a_plan_asks_no_mode_for_functions(calls):
    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, classes, args=(), kwargs=None):
            asked.append(function)
            return function(*args, **(kwargs or {}))

    asked, layer = [], calls.layer_with_plan()
    with Mode():
        out = calls.dequantize(layer)
    assert not asked, "the plan called a function that the mode sees"
    calls.assert_right(out, layer)


def test_the_current_stream_is_used(calls):
    layer = calls.layer_with_plan()
    if not GPU:
        stand_ins.CURRENT.stream = 7  # on others, the stand-ins' kernels write zeros
        calls.assert_served_by(layer, PLAN)
        return
    layer, other = calls.layer(shape=(4096, 4096)), calls.layer(1, shape=(4096, 4096))
    calls.served_by(layer)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        layer.weight.copy_(other.weight)  # ordered on this stream alone
        calls.assert_served_by(layer, PLAN)


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
def test_another_gpu_may_be_current(calls):
    """A call launches on its weight's GPU, and leaves the other one current."""
    devices = ("cuda:0", "cuda:1") if GPU else ("cpu",)
    layers = [calls.layer(device=device) for device in devices]
    for turn, current in enumerate((1, 0, 1)):
        with torch.cuda.device(current):
            for layer in layers:
                calls.assert_served_by(layer, OPERATOR if turn == 0 else PLAN)
                assert calls.nf4._cuda_getDevice() == current


# Memory.


def test_shapes_and_strides_without_end_do_not_fill_the_memory(calls):
    calls.nf4.PLANS.update({(n, "another kind"): () for n in range(4095)})
    for n in (1, 2, 3):
        calls.served_by(calls.layer(shape=(n, 64)))
        assert len(calls.nf4.PLANS) == 4096, "plans are kept for the newest kinds only"
    assert list(calls.nf4.PLANS)[0] == (2, "another kind"), "the oldest go first"
    _, kind = calls.nf4.unpack(*vars(calls.layer()).values())
    calls.nf4.PLANS[kind] = 64 * (lambda tensors: None,)  # as those for other strides
    calls.assert_served_by(calls.layer(), *NEW_PLAN)
    assert len(calls.nf4.PLANS[kind]) == 64, "and for the newest strides"


@pytest.fixture
def no_collector():
    """Switch the garbage collector off, as training loops do."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_plans_and_layers_are_freed_without_a_collector(calls, no_collector):
    """A plan holds no weight and no table, and nothing but PLANS holds a plan."""
    layer = calls.layer_with_plan()
    [[plan]] = calls.nf4.PLANS.values()
    state = layer.quant_state
    held = [weakref.ref(each) for each in (layer.weight, state, state.absmax, plan)]
    del layer, state
    assert [each() for each in held] == [None, None, None, plan], "the plan holds a tensor"
    del plan
    calls.nf4.PLANS.clear()
    assert held[-1]() is None, "something else holds the plan"


@pytest.mark.gpu
def test_a_first_call_needs_little_more_than_the_output(calls):
    layer = calls.layer(dtype=torch.bfloat16, shape=(16384, 4096))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = calls.dequantize(layer)
    assert calls.nf4.TRIALS, "the peak is that of a call with a trial"
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * out.nbytes


# Threads and graphs.


@pytest.mark.gpu  # Triton's interpreter is no place for threads
def test_threads_that_begin_at_once_get_right_weights(nf4):
    pairs = []
    for dtype in helpers.DTYPES:
        pairs += [nf4.quantized((64, 128), dtype, "cuda", seed=seed) for seed in range(3)]
    wanted = [nf4.spec(*pair) for pair in pairs]
    torch.cuda.synchronize()
    start = threading.Barrier(4)

    def work(first):
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            turns = [turn % len(pairs) for turn in range(first, first + 200)]
            outs = [nf4.dequantize_nf4(*pairs[turn]) for turn in turns]
            return sum(nf4.bits_differing(out, wanted[turn]) for out, turn in zip(outs, turns))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [0, 0, 0, 0]
    assert len(nf4.PLANS) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("has_plan", [True, False], ids=["with a plan", "without a plan"])
def test_a_cuda_graph_replays_right_weights(calls, has_plan):
    """Another thread's first call for a new shape, meanwhile, breaks nothing."""
    layer = calls.layer_with_plan()
    other = calls.layer(shape=(96, 64))
    if not has_plan:
        calls.nf4.PLANS.clear()
    graph = torch.cuda.CUDAGraph()
    with concurrent.futures.ThreadPoolExecutor(1) as pool, torch.cuda.graph(graph):
        out = calls.dequantize(layer)
        beside = pool.submit(calls.dequantize, other).result()
    layer.weight.copy_(layer.weight.flip(0))
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    calls.assert_right(out, layer)
    calls.assert_right(beside, other)
