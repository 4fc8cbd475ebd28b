"""A plan never serves what it was not made for, and where none can be kept, every call is right."""

import concurrent.futures
import contextlib
import gc
import threading
import time
import tracemalloc
import types
import weakref
from functools import partial
from unittest import mock

import helpers
import numpy as np
import pytest
import shared
import torch

GPU = torch.cuda.is_available()
needs_two = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")

# What the two calls after a change run.
SAME_PLAN = ["plan", "plan"]
NEW_PLAN = ["operator", "plan"]
NO_PLAN = ["operator", "operator"]


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


WEIGHT, STATE = "weight", "quant_state"
ABSMAX, ABSMAX2 = "quant_state.absmax", "quant_state.state2.absmax"
OFFSET, CODE2 = "quant_state.offset", "quant_state.state2.code"
CHANGES = {  # {id: (where, what it becomes, what the next two calls run)}
    "dtype": (f"{STATE}.dtype", lambda dtype: torch.bfloat16, NEW_PLAN),
    "shape": (f"{STATE}.shape", lambda shape: shape[::-1], NEW_PLAN),
    "shape a list": (f"{STATE}.shape", list, NO_PLAN),  # the operator's body runs the first plan
    "blocksize of numpy": (f"{STATE}.blocksize", np.int64, NO_PLAN),
    "state2.blocksize": (f"{STATE}.state2.blocksize", lambda size: 512, NEW_PLAN),
    "code": (f"{STATE}.code", torch.clone, SAME_PLAN),
    "one table for two": (STATE, with_one_table_for_two, NO_PLAN),
    "offset with a dimension": (OFFSET, lambda offset: offset.view(1), NEW_PLAN),
    "weight one byte on": (WEIGHT, partial(helpers.moved, offset=1), SAME_PLAN),
    "weight with gaps": (WEIGHT, helpers.every_second, NO_PLAN),
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
def test_a_change_is_seen(planned, what):
    layer = planned.layer_with_plan()
    where, make, wanted = CHANGES[what]
    helpers.change(layer, where, make)
    assert [planned.ran(layer) for _ in range(2)] == wanted
    assert planned.n_plans() == (2 if wanted == NEW_PLAN else 1)
    assert planned.ran(planned.made()) == "plan", "the first plan is lost"


def test_each_form_of_a_weight_has_its_plan(planned):
    """As with offloading or FSDP, or with a model on many GPUs: a dozen forms may take turns."""
    layer = planned.layer_with_plan()
    packed = layer.weight
    forms = [packed, packed.t(), packed.view(-1), torch.nn.Parameter(packed, requires_grad=False)]
    forms += [packed.view(-1, 2**i) for i in range(1, 8)]
    for wanted in ("operator", "plan", "plan"):
        for form in forms:
            layer.weight = form
            assert planned.ran(layer) == ("plan" if form is packed else wanted)


def test_no_kind_gets_anothers_plan(planned):
    """A second layer of each kind is served by the first one's plan."""
    kinds = [{}, {"dtype": torch.bfloat16}, {"blocksize": 128}, {"nested": False}]
    kinds += [{"shape": (64, 32)}, {"shape": (64, 65)}]  # the last takes three programs
    for wanted in ("operator", "plan"):
        for kind in kinds:
            ran = [planned.ran(planned.made(seed, **kind)) for seed in range(2)]
            assert ran == [wanted, "plan"]


@pytest.mark.parametrize("names", [("nf4_one", "nf4_two"), ("nf4_same", "nf4_same")], ids=str)
def test_each_copy_of_the_code_has_its_own_plans(device, monkeypatch, names):
    """As a reload leaves them, or the exported module beside the notebook."""
    copies = [helpers.Planned(shared.load(name), device, monkeypatch) for name in names]
    for wanted in ("operator", "plan"):
        for copy in copies:
            assert copy.ran(copy.made()) == wanted


def test_each_output_is_fresh(planned):
    layers = [planned.layer_with_plan(), planned.made(1), planned.made()]
    outs = [planned.dequantize(layer) for layer in layers]
    assert planned.n_by_operator == 1 and len({out.data_ptr() for out in outs}) == 3
    for out, layer in zip(outs, layers):
        planned.assert_right(out, layer)


def test_inference_mode_and_autocast_get_their_own_plans(planned):
    """They change dispatch keys, and inference mode the kind of output."""
    autocast = partial(torch.autocast, planned.device, dtype=torch.bfloat16)
    layer = planned.made()
    contexts = 2 * [contextlib.nullcontext, torch.no_grad, torch.inference_mode, autocast]
    for turn, context in enumerate(contexts):
        with context():
            ran = planned.ran(layer)
            out = planned.dequantize(layer)
        if turn >= 4:  # each context's second time
            assert ran == "plan"
        assert out.is_inference() == (context is torch.inference_mode)


def test_the_current_stream_is_used(planned):
    layer = planned.layer_with_plan()
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


@needs_two
def test_another_gpu_may_be_current(planned):
    """A call launches on its weight's GPU, and leaves the other one current."""
    devices = ("cuda:0", "cuda:1") if GPU else ("cpu",)
    layers = [planned.made(device=device) for device in devices]
    for turn, current in enumerate((1, 0, 1)):
        with torch.cuda.device(current):
            for layer in layers:
                assert planned.ran(layer) == ("operator" if turn == 0 else "plan")
                assert torch._C._cuda_getDevice() == current


def as_launcher(launch_kernel):
    return "torch._C._StaticCudaLauncher", types.SimpleNamespace(_launch_kernel=launch_kernel)


@needs_two
def test_another_gpu_stays_current_where_a_launch_fails(planned):
    launch_kernel = mock.Mock(wraps=torch._C._StaticCudaLauncher._launch_kernel)
    with planned.replaced(*as_launcher(launch_kernel)):
        layer = planned.layer_with_plan()
    launch_kernel.side_effect = torch.OutOfMemoryError("no memory")
    with torch.cuda.device(1):
        with pytest.raises(torch.OutOfMemoryError):
            planned.dequantize(layer)
        assert torch._C._cuda_getDevice() == 1


ONLY_GPU_1 = """
import shared, torch
nf4 = shared.load()
weight, state = nf4.quantized((64, 64), torch.float16, "cpu")
expected = nf4.spec(weight, state)
weight = weight.to("cuda:1")
state.to("cuda:1")
assert not torch._C._cuda_hasPrimaryContext(0), "the set-up of this test made a context"
for _ in range(3):  # by the operator, then by the plan
    out = nf4.dequantize_nf4(weight, state)
    assert nf4.bits_differing(out.cpu(), expected) == 0
assert nf4.PLANS and torch.cuda.current_device() == 0
assert not torch._C._cuda_hasPrimaryContext(0), "a call made a context on GPU 0"
"""


@pytest.mark.gpu
@needs_two
def test_a_process_that_uses_gpu_1_makes_no_context_on_gpu_0():
    """A context takes hundreds of MB of a GPU that may be another user's."""
    done = helpers.in_a_process(ONLY_GPU_1)
    assert done.returncode == 0, done.stderr


# The trial, which each compiled kernel has to pass before it is trusted.


@pytest.fixture
def trials(planned):
    trials = mock.Mock(wraps=planned.nf4.trial)
    planned.patch.setattr(planned.nf4, "trial", trials)
    return trials


def test_each_compiled_kernel_is_tried_once_whatever_the_shape(planned, trials):
    for n in (1, 2, 65):
        for dtype in helpers.DTYPES:
            layer = planned.made(shape=(n, 64), dtype=dtype)
            assert [planned.ran(layer) for _ in range(2)] == NEW_PLAN
    assert trials.call_count == 3


def break_shuffles(planned):
    """Let lanes 8 to 15 of each segment keep their own entry, as a broken Triton might."""
    source = shared.defining("_SHFL")
    assert source.count('$2, 0x101f, -1;"') == 1, "the segment mask stands elsewhere now"
    broken = source.replace('$2, 0x101f, -1;"', '$2, 0x1007, -1;"')
    kernel = helpers.kernel_after(planned.nf4, broken)
    planned.patch.setattr(planned.nf4, "_dequantize_nf4_kernel", kernel)


@pytest.mark.parametrize("has_equal_nibbles", [False, True], ids=["any nibbles", "all equal"])
def test_broken_shuffles_raise_at_every_call(planned, has_equal_nibbles):
    """Even where the weight at hand would not show them."""
    break_shuffles(planned)
    layer = planned.made()
    if has_equal_nibbles:
        layer.weight.fill_(0x33)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="shuffles .*: use another Triton"):
            planned.dequantize(layer)
    assert planned.n_plans() == 0


def raising(error):
    return mock.Mock(side_effect=error)


AcceleratorError = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)  # torch 2.8 has it
HINDRANCES = {  # {id: (what is replaced meanwhile, by what)}; no trial can be finished then
    "a graph is captured": ("torch.cuda.is_current_stream_capturing", lambda: True),
    "waiting is forbidden": ("torch.cuda.get_sync_debug_mode", lambda: 2),
    "no memory": ("torch.full", raising(torch.OutOfMemoryError("no memory"))),
    "no memory for a launch": as_launcher(raising(torch.OutOfMemoryError("no memory"))),
    "an earlier kernel's error": ("torch.equal", raising(AcceleratorError("late"))),
}
WAITS_FOR_NOBODY = ("a graph is captured", "waiting is forbidden")


@contextlib.contextmanager
def hindered(planned, why):
    """Hinder trials; where waiting is forbidden, CUDA raises an error on a GPU if one waits."""
    with planned.replaced(*HINDRANCES[why]):
        if GPU and why in WAITS_FOR_NOBODY:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if GPU:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("why", HINDRANCES)
def test_a_hindered_trial_is_left_to_a_later_call(planned, why):
    """Meanwhile the kernel without shuffles fills the output."""
    launch = mock.Mock(wraps=planned.nf4.launch)
    planned.patch.setattr(planned.nf4, "launch", launch)
    layer = planned.made()
    for _ in range(2):
        with hindered(planned, why):
            out = planned.dequantize(layer)
        filled, *_ = launch.call_args.args
        assert filled is out and launch.call_args.kwargs == {"shuffle": False}
        planned.assert_right(out, layer)
        assert planned.n_plans() == 0
    assert [planned.ran(layer) for _ in range(2)] == NEW_PLAN


def test_broken_shuffles_serve_no_call_that_must_not_wait(planned):
    """Such a call is right; the first one that may wait raises the error."""
    break_shuffles(planned)
    layer = planned.made()
    with hindered(planned, "waiting is forbidden"):
        out = planned.dequantize(layer)
    planned.assert_right(out, layer)
    with pytest.raises(RuntimeError, match="shuffles"):
        planned.dequantize(layer)


@pytest.mark.parametrize("why", WAITS_FOR_NOBODY)
def test_a_new_shape_of_a_known_kernel_waits_for_nobody(planned, why):
    planned.layer_with_plan()
    layer = planned.made(shape=(96, 64))
    with hindered(planned, why):
        out = planned.dequantize(layer)
    planned.assert_right(out, layer)
    assert planned.ran(layer) == "plan"


@pytest.mark.gpu
def test_a_first_call_for_a_shape_returns_before_queued_work_ends(planned):
    planned.layer_with_plan()
    layer = planned.made(shape=(96, 64))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    began = time.perf_counter()
    out = planned.dequantize(layer)
    assert time.perf_counter() - began < 0.3
    planned.assert_right(out, layer)


# Where no plan can be kept.


def check_that_none_is_kept(planned, caplog, fault):
    """Every call is right, of another shape, too; the log names the fault once."""
    for kind in ({}, {}, {"shape": (96, 64)}):
        assert planned.ran(planned.made(**kind)) == "operator"
    assert caplog.text.count("no plan can be made") == 1 and fault in caplog.text
    caplog.clear()


@pytest.mark.parametrize("does", ["read another weight", "write nothing"])
def test_a_launcher_that_gives_other_bits_is_not_used(planned, caplog, does):
    """Other kinds, and the kernel after its cell was run again, are tried anew."""
    launch_kernel, another = torch._C._StaticCudaLauncher._launch_kernel, planned.made(2).weight
    planned.layer_with_plan()  # its trial leaves memory that holds the right bits
    planned.nf4.TRIALS.clear()
    planned.nf4.PLANS.clear()

    def launch_wrong(*given):
        *how, (out_address, _weight_address, *others), stream = given
        if does == "read another weight":
            launch_kernel(*how, (out_address, another.data_ptr(), *others), stream)

    with planned.replaced(*as_launcher(launch_wrong)):
        check_that_none_is_kept(planned, caplog, "other bits")
    layer, another_kind = planned.made(), planned.made(dtype=torch.bfloat16)
    assert [planned.ran(layer) for _ in range(2)] == NO_PLAN
    assert [planned.ran(another_kind) for _ in range(2)] == NEW_PLAN
    kernel = helpers.kernel_after(planned.nf4, "")
    planned.patch.setattr(planned.nf4, "_dequantize_nf4_kernel", kernel)
    assert [planned.ran(layer) for _ in range(2)] == NEW_PLAN


UNUSUAL = ["num_ctas", "launch_pdl", "launch_cooperative_grid"]
UNUSUAL += ["global_scratch_size", "profile_scratch_size"]


@pytest.mark.skipif(GPU, reason="there the kernel is compiled as it is")
@pytest.mark.parametrize("what", UNUSUAL)
def test_a_kernel_that_wants_what_torchs_launcher_drops_gets_no_plan(planned, caplog, what):
    planned.patch.setattr(helpers.Compiled.metadata, what, 2)
    check_that_none_is_kept(planned, caplog, "expected a kernel without")


PRIVATE = ["_dynamo.guards.TensorGuards", "_dynamo.guards._empty_strided_cuda"]
PRIVATE += ["_StaticCudaLauncher", "_len_torch_dispatch_stack"]
if not GPU:  # there Triton's own launch needs these, too
    PRIVATE += ["_cuda_getDevice", "_cuda_getCurrentRawStream"]
    PRIVATE += ["_cuda_exchangeDevice", "_cuda_maybeExchangeDevice", "DisableTorchFunction"]


@pytest.mark.parametrize("missing", PRIVATE)
def test_all_is_right_where_torch_lacks_a_private_function(planned, caplog, missing):
    planned.patch.delattr(f"torch._C.{missing}")
    planned.nf4.private.cache_clear()
    check_that_none_is_kept(planned, caplog, f"'{missing.rpartition('.')[2]}'")


def test_a_mistake_in_one_shapes_plan_leaves_others_their_plans(planned, caplog):
    make_plan = planned.nf4.make_plan

    def make_or_fail(compiled, inputs, out):
        if out.shape == (32, 64):
            raise ZeroDivisionError("a mistake")
        return make_plan(compiled, inputs, out)

    planned.patch.setattr(planned.nf4, "make_plan", make_or_fail)
    for shape, wanted in (((32, 64), NO_PLAN), ((96, 64), NEW_PLAN)):
        layer = planned.made(shape=shape)
        assert [planned.ran(layer) for _ in range(2)] == wanted
    assert caplog.text.count("ZeroDivisionError('a mistake')") == 1
    caplog.clear()


def test_an_edited_kernel_is_followed(planned):
    layer = planned.layer_with_plan()
    kernel = helpers.kernel_after(planned.nf4, helpers.DOUBLED)
    planned.patch.setattr(planned.nf4, "_dequantize_nf4_kernel", kernel)
    wanted = 2 * planned.nf4.spec(layer.weight, layer.quant_state)
    for _ in range(2):
        out = planned.dequantize(layer)
        helpers.assert_same_bits(out, wanted, layer.weight, layer.quant_state)


# Memory.


def test_shapes_without_end_do_not_fill_the_memory(planned):
    planned.nf4.PLANS.update({((n, 1), 0, 64, 256): [] for n in range(4095)})
    for n_plans in (4096, 1):
        planned.ran(planned.made(shape=(n_plans, 64)))
        assert len(planned.nf4.PLANS) == n_plans


def test_strides_without_end_do_not_fill_the_memory(planned):
    _, kind = planned.nf4.unpack(*vars(planned.made()).values())
    planned.nf4.PLANS[kind] = 64 * [lambda tensors: None]  # as those for other strides
    assert [planned.ran(planned.made()) for _ in range(2)] == NEW_PLAN
    assert planned.n_plans() == 64


@pytest.fixture
def no_collector():
    """Switch the garbage collector off, as training loops do."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_plans_and_layers_are_freed_without_the_garbage_collector(planned, no_collector):
    """A plan holds no weight and no table, and nothing but PLANS holds a plan."""
    layer = planned.layer_with_plan()
    [[plan]] = planned.nf4.PLANS.values()
    state = layer.quant_state
    held = [weakref.ref(each) for each in (layer.weight, state, state.absmax, plan)]
    del layer, state
    assert [each() for each in held] == [None, None, None, plan]
    del plan
    planned.nf4.PLANS.clear()
    assert held[-1]() is None


@pytest.mark.gpu  # Triton's interpreter leaves objects to the collector
def test_new_shapes_leave_no_memory_behind_without_the_garbage_collector(planned, no_collector):
    n_shapes = 2000
    layer = planned.made(shape=(n_shapes, 64))
    weight, state = layer.weight, layer.quant_state
    absmax, absmax2 = state.absmax, state.state2.absmax

    def call(n):
        layer.weight = weight[: 32 * n]
        state.shape, state.absmax = torch.Size((n, 64)), absmax[:n]
        state.state2.absmax = absmax2[: -(-n // 256)]
        planned.dequantize(layer)

    def call_all():
        for n in range(1, n_shapes + 1):
            call(n)
        assert planned.n_plans() == n_shapes
        planned.nf4.PLANS.clear()

    call_all()  # compiles, and fills the lists in which Python keeps freed tuples
    tracemalloc.start()
    try:
        call_all()
        n_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert n_bytes < 500 * n_shapes


@pytest.mark.gpu
def test_a_kernels_first_call_needs_little_more_than_the_output(planned):
    layer = planned.made(dtype=torch.bfloat16, shape=(16384, 4096))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = planned.dequantize(layer)
    assert planned.nf4.TRIALS, "the peak is that of a call with a trial"
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * out.nbytes


@pytest.mark.gpu
def test_no_allocation_fails_where_memory_is_short(planned):
    """bitsandbytes, too, makes do with room for one output."""
    layer = planned.made(dtype=torch.bfloat16, shape=(16384, 4096))
    n_bytes = 2 * 16384 * 4096
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    failures = ("num_ooms", "num_alloc_retries")
    before = [torch.cuda.memory_stats()[name] for name in failures]
    room = torch.cuda.memory_reserved() + 1.4 * n_bytes
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        out = None
        for _ in range(8):
            del out  # its memory is for the next one
            out = planned.dequantize(layer)
        after = [torch.cuda.memory_stats()[name] for name in failures]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert after == before
    assert planned.n_by_operator == 1, "the first call left a plan"
    planned.assert_right(out, layer)


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
def test_a_graph_is_captured_and_replayed(planned, has_plan):
    """Another thread's first call for a new shape, meanwhile, breaks nothing."""
    layer = planned.layer_with_plan()
    other = planned.made(shape=(96, 64))
    if not has_plan:
        planned.nf4.PLANS.clear()
    graph = torch.cuda.CUDAGraph()
    with concurrent.futures.ThreadPoolExecutor(1) as pool, torch.cuda.graph(graph):
        out = planned.dequantize(layer)
        beside = pool.submit(planned.dequantize, other).result()
    layer.weight.copy_(layer.weight.flip(0))
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    planned.assert_right(out, layer)
    planned.assert_right(beside, other)
