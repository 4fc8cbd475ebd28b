"""A plan never serves what it was not made for, and where none can be kept, every call is right.

What changes between two calls stands in a table.
"""

import concurrent.futures
import contextlib
import gc
import operator
import threading
import time
import weakref
from functools import partial
from unittest import mock

import helpers
import pytest
import shared
import torch

GPU = torch.cuda.is_available()


def change(layer, name, make):
    """What stands at `name` becomes make(of it)."""
    owner, last = helpers.owner_of(name, layer)
    setattr(owner, last, make(getattr(owner, last)))


def others(tensor):
    """Other values in other memory."""
    return tensor * 1.5 if tensor.numel() == 1 else tensor.flip(0)


def in_place(tensor):
    return tensor.copy_(others(tensor))


def by_data(tensor):
    """The object stays."""
    tensor.data = others(tensor)
    return tensor


def as_integers(tensor):
    return tensor.flatten().view(torch.int16 if tensor.itemsize == 1 else torch.int32)


def requiring_grad(weight):
    return weight.flatten().view(torch.float16).requires_grad_()


def elsewhere(weight):
    """On a GPU pinned memory, whose address the GPU can read: only the device tells."""
    return weight.cpu().pin_memory() if GPU else weight.to("meta")


WEIGHT, STATE = "weight", "quant_state."
TABLES = [STATE + name for name in ("absmax", "offset", "state2.absmax", "state2.code")]
CHANGES = {  # {what: (where, what it becomes, "plan" | "operator" | the message)}
    "dtype": (STATE + "dtype", lambda dtype: torch.bfloat16, "operator"),
    "shape": (STATE + "shape", lambda shape: shape[::-1], "operator"),
    "shape a list": (STATE + "shape", list, "plan"),
    "state2.blocksize": (STATE + "state2.blocksize", lambda size: 512, "operator"),
    "blocksize": (STATE + "blocksize", lambda size: 128, "absmax must have 16 elements"),
    "quant_type": (STATE + "quant_type", lambda name: "fp4", "must be 'nf4', got 'fp4'"),
    "state2": (STATE + "state2", lambda state2: None, "absmax must be in one of .*float32"),
    "offset in bf16": (STATE + "offset", lambda offset: offset.bfloat16(), "operator"),
    "fp16 offset, 2 bytes on": (STATE + "offset", lambda t: helpers.moved(t.half(), 2), "operator"),
    "offset in fp64": (STATE + "offset", lambda offset: offset.double(), "operator"),
    "offset in fp64, with a dimension": (
        STATE + "offset", lambda offset: offset.double().view(1), "must have no dimension"
    ),
    "code": (STATE + "code", lambda code: code, "plan"),
    "weight one byte on": (WEIGHT, partial(helpers.moved, offset=1), "plan"),
    "weight that requires grad": (WEIGHT, requiring_grad, "operator"),
    "weight as int8": (WEIGHT, lambda weight: weight.view(torch.int8), "operator"),
    "weight as fp64": (WEIGHT, lambda weight: weight.view(-1).view(torch.float64), "operator"),
    "weight sparse": (WEIGHT, lambda weight: weight.to_sparse(), "be a strided tensor"),
    "weight on another device": (WEIGHT, elsewhere, "be on"),
    "weight freed, of every second byte": (
        WEIGHT, lambda weight: helpers.resized(helpers.every_second(weight), 0), "storage, got 0"
    ),
}  # fmt: skip
for name in (WEIGHT, *TABLES):
    CHANGES[f"{name}.data = others"] = name, by_data, "plan"
    CHANGES[f"{name} = others"] = name, others, "plan"
    CHANGES[f"{name}.copy_(others)"] = name, in_place, "plan"
    CHANGES[f"{name} freed"] = name, partial(helpers.resized, n_bytes=0), "of storage, got 0"
    CHANGES[f"{name} = None"] = name, lambda tensor: None, "expected a 4-bit weight|got None"
for name in TABLES:
    CHANGES[f"{name} as integers"] = name, as_integers, "must be in one of"
    if name != STATE + "absmax":  # that is bytes
        CHANGES[f"{name} one byte on"] = name, helpers.one_byte_on, "must be at a multiple of 4"


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen(planned, what):
    layer = planned.layer_with_plan()
    where, make, wanted = CHANGES[what]
    change(layer, where, make)
    if wanted in ("plan", "operator"):
        assert [planned.ran(layer) for _ in range(2)] == [wanted, "plan"]
    else:
        with pytest.raises((ValueError, TypeError), match=wanted):
            planned.ran(layer)
        assert planned.ran(planned.made()) == "plan", "an error leaves the plan as it was"


def test_a_weight_with_gaps_is_copied_at_each_call(planned):
    """No plan reads the bytes between; and no call leaves one more."""
    layer = planned.layer_with_plan()
    layer.weight = helpers.every_second(layer.weight)
    assert [planned.ran(layer) for _ in range(3)] == ["operator"] * 3
    assert planned.n_plans() == 1


def test_each_form_of_a_weight_has_its_plan(planned):
    """As with offloading or FSDP, or of a model on many GPUs: there may be a dozen in turn."""
    layer = planned.layer_with_plan()
    packed = layer.weight
    forms = [packed, packed.t(), packed.view(-1), torch.nn.Parameter(packed, requires_grad=False)]
    forms += [packed.view(-1, 2**i) for i in range(1, 8)]
    for wanted in ("operator", "plan", "plan"):
        for form in forms:
            layer.weight = form
            assert planned.ran(layer) == ("plan" if form is packed else wanted)


def test_no_kind_gets_anothers_plan(planned):
    """A second layer of each has the first one's plan."""
    kinds = [{}, {"dtype": torch.bfloat16}, {"blocksize": 128}, {"nested": False}]
    kinds += [{"shape": (64, 32)}, {"shape": (64, 65)}]  # the last takes three programs
    for wanted in ("operator", "plan"):
        for kind in kinds:
            ran = [planned.ran(planned.made(seed, **kind)) for seed in range(2)]
            assert ran == [wanted, "plan"]


def test_the_layer_of_a_plan_may_go(planned):
    layer = planned.layer_with_plan()
    names = [name for name in (WEIGHT, *TABLES) if "code" not in name]  # that is one for all layers
    held = [weakref.ref(operator.attrgetter(name)(layer)) for name in names]
    del layer
    gc.collect()
    assert [ref() for ref in held] == [None] * 4
    assert planned.ran(planned.made(1)) == "plan"


def test_each_output_is_fresh(planned):
    layers = [planned.layer_with_plan(), planned.made(1), planned.made()]
    outs = [planned.nf4.your_dequantize_nf4(layer) for layer in layers]
    assert planned.n_by_operator == 1 and len({out.data_ptr() for out in outs}) == 3
    assert [planned.n_wrong(*pair) for pair in zip(outs, layers)] == [0, 0, 0]


def test_the_output_of_a_first_call_may_be_written_to(planned):
    """Of a weight passed as [1, n], too; as of any later call."""
    layer = planned.made(dtype=torch.float32)
    more = torch.ones(64, 32, device=planned.device, requires_grad=True)
    for _ in range(3):
        out = planned.nf4.dequantize_nf4(layer.weight.t(), layer.quant_state)
        want = planned.nf4.spec(layer.weight, layer.quant_state).t() + more
        torch.testing.assert_close(out.add_(more), want, rtol=0, atol=0)


def test_inference_mode_and_autocast_get_their_own(planned):
    """They change dispatch keys: each has a plan of its own, and outputs of its kind."""
    autocast = partial(torch.autocast, planned.device, dtype=torch.bfloat16)
    layer = planned.made()
    contexts = 2 * [contextlib.nullcontext, torch.no_grad, torch.inference_mode, autocast]
    for turn, context in enumerate(contexts):
        with context():
            ran = planned.ran(layer)
            out = planned.nf4.your_dequantize_nf4(layer)
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


@pytest.mark.skipif(GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_may_be_current(planned):
    """At the first call and at later ones; it is current again afterwards."""
    devices = ("cuda:0", "cuda:1") if GPU else ("cpu",)
    layers = [planned.made(device=device) for device in devices]
    for turn, current in enumerate((1, 0, 1)):
        with torch.cuda.device(current):
            for layer in layers:
                assert planned.ran(layer) == ("operator" if turn == 0 else "plan")
            assert torch._C._cuda_getDevice() == current


# What a first call does, and does not.


@pytest.fixture
def trials(planned):
    """Counts the trials of compiled kernels."""
    trials = mock.Mock(wraps=planned.nf4.try_start)
    planned.patch.setattr(planned.nf4, "try_start", trials)
    return trials


def test_each_compiled_kernel_is_tried_once_whatever_the_shape(planned, trials):
    for n in range(1, 9):
        for dtype in helpers.DTYPES:
            layer = planned.made(shape=(n, 64), dtype=dtype)
            assert [planned.ran(layer) for _ in range(2)] == ["operator", "plan"]
    assert trials.call_count == 3


def test_shapes_without_end_do_not_fill_the_memory(planned):
    planned.nf4.PLANS.update({((n, 1), 0, 64, 256): [] for n in range(4095)})
    for n_plans in (4096, 1):
        planned.ran(planned.made(shape=(n_plans, 64)))
        assert len(planned.nf4.PLANS) == n_plans


def no_waiting(planned):
    """As sync debug mode forbids it."""
    if GPU:
        torch.cuda.set_sync_debug_mode("error")
    else:
        planned.patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 2)


def no_more_of_it(planned):
    if GPU:
        torch.cuda.set_sync_debug_mode("default")
    else:
        planned.patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)


def test_where_waiting_is_forbidden_the_trial_is_left_to_a_later_call(planned, trials):
    for during in ("sync debug mode", "a capture"):
        planned.nf4.TRIED.clear(), planned.nf4.PLANS.clear()
        layer, fx = planned.made(), planned.nf4.your_dequantize_nf4
        with planned.patch.context() as patch:
            if during == "a capture":
                patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            else:
                no_waiting(planned)
            outs = [fx(layer) for _ in range(2)]
            no_more_of_it(planned)
        assert not trials.called and [planned.n_wrong(out, layer) for out in outs] == [0, 0]
        assert [planned.ran(layer) for _ in range(2)] == ["operator", "plan"], during
        trials.reset_mock()


def test_a_known_kernels_new_shape_waits_for_nobody(planned):
    """Behind queued work its call returns at once, and leaves a plan."""
    planned.layer_with_plan()
    layer = planned.made(shape=(96, 64))
    no_waiting(planned)
    out = planned.nf4.your_dequantize_nf4(layer)
    no_more_of_it(planned)
    assert planned.n_wrong(out, layer) == 0 and planned.ran(layer) == "plan"


def test_out_of_memory_in_a_trial_leaves_it_to_a_later_call(planned):
    with planned.patch.context() as patch:
        patch.setattr(planned.nf4, "try_start", mock.Mock(side_effect=torch.OutOfMemoryError))
        assert planned.ran(planned.made()) == "operator"
    assert [planned.ran(planned.made(1)) for _ in range(2)] == ["operator", "plan"]


def test_one_table_that_stands_for_two_leaves_no_plan_and_no_word(planned):
    layer = planned.made()
    layer.quant_state.offset = layer.quant_state.state2.absmax
    assert [planned.ran(layer) for _ in range(2)] == ["operator"] * 2
    assert [planned.ran(planned.made(1)) for _ in range(2)] == ["operator", "plan"]


def test_a_lazy_negation_is_resolved(planned):
    layer = planned.made()
    state2 = layer.quant_state.state2
    state2.absmax = torch._neg_view(-state2.absmax)
    assert [planned.ran(layer) for _ in range(2)] == ["operator"] * 2
    assert planned.ran(planned.made(1)) == "plan"


# Where none can be kept.


def check_that_none_is_kept(planned, fault):
    """Every call is right, of another shape, too; the fault is said once for the kernel."""
    for kind in ({}, {}, {"shape": (96, 64)}):
        assert planned.ran(planned.made(**kind)) == "operator"
    (said,) = planned.said
    assert "without a plan" in said and fault in said
    planned.said.clear()


def start_another(*given):
    """Begins at another weight than it is told."""
    *how, values, stream = given
    out_address, _weight_address, *rest = values
    start_another.start(*how, (out_address, start_another.weight.data_ptr(), *rest), stream)


def start_nothing(*given):
    """Writes no output."""


@pytest.mark.parametrize("start", [start_another, start_nothing])
def test_a_start_that_gives_other_bits_is_not_kept(planned, start):
    """For its compiled kernel alone: another's, and the kernel's after an edit, begin anew."""
    start_another.start = torch._C._StaticCudaLauncher._launch_kernel
    start_another.weight = planned.made(2).weight
    planned.start_by(start)
    check_that_none_is_kept(planned, "other bits")
    planned.start_by(start_another.start)
    assert [planned.ran(planned.made()) for _ in range(2)] == ["operator"] * 2
    another_kind = partial(planned.made, dtype=torch.bfloat16)
    assert [planned.ran(another_kind()) for _ in range(2)] == ["operator", "plan"]
    again = with_kernel_again(planned)
    assert [again.ran(again.made()) for _ in range(2)] == ["operator", "plan"]


RARE = ["num_ctas", "launch_pdl", "global_scratch_size", "profile_scratch_size"]


@pytest.mark.skipif(GPU, reason="there the kernel is compiled as it is")
@pytest.mark.parametrize("what", RARE)
def test_a_kernel_that_wants_what_the_launcher_drops_gets_none(planned, what):
    make = helpers.Compiled

    def compiled(*given):
        compiled = make(*given)
        setattr(compiled.metadata, what, 2)
        return compiled

    planned.patch.setattr(helpers, "Compiled", compiled)
    check_that_none_is_kept(planned, "the kernel wants")


PRIVATE = [  # of torch, one that could be renamed
    "_C._dynamo.guards.TensorGuards",
    "_C._dynamo.guards._empty_strided_cuda",
    "_C._StaticCudaLauncher",
    "_C._len_torch_dispatch_stack",
]
if not GPU:  # there Triton's own launch needs these, too
    PRIVATE += ["_C._cuda_getDevice", "_C._cuda_getCurrentRawStream"]


@pytest.mark.parametrize("missing", PRIVATE)
def test_all_is_right_where_torch_lacks_a_private_function(planned, missing):
    planned.patch.delattr(*helpers.owner_of(missing, torch))
    check_that_none_is_kept(planned, f"'{missing.rpartition('.')[2]}'")


# What a reader edits.


def with_kernel_again(planned, helper=""):
    """The kernel's cell runs again, after a helper was defined anew."""
    nf4, names = planned.nf4, dict(vars(planned.nf4))  # a copy: other tests have the module, too
    shared.execute(helper + shared.defining("_dequantize_nf4_kernel"), "again", names)
    for name in ("_look_up", "_mul_rn", "_rounded", "_load_words"):
        names.setdefault(name, getattr(nf4, name))
    planned.patch.setattr(nf4, "_dequantize_nf4_kernel", names["_dequantize_nf4_kernel"])
    return helpers.Planned(nf4, planned.device, planned.patch)


DOUBLED = """
@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    return (x + x).to(DTYPE)


"""


def test_an_edited_kernel_is_followed(planned):
    layer = planned.layer_with_plan()
    with_kernel_again(planned, DOUBLED)
    outs = [planned.nf4.your_dequantize_nf4(layer) for _ in range(2)]
    want = 2 * planned.nf4.spec(layer.weight, layer.quant_state)
    assert [planned.nf4.bits_differing(out, want) for out in outs] == [0, 0]


def test_the_plans_cell_run_again_drops_plans(planned):
    planned.layer_with_plan()
    names = dict(vars(planned.nf4))
    shared.execute(shared.defining("PLANS"), "again", names)
    assert not names["PLANS"] and not names["TRIED"]


# Threads, graphs, long runs.


@pytest.mark.gpu  # Triton's interpreter is no place for threads
def test_threads_that_begin_at_once_get_right_weights(nf4):
    """Four begin at once, each on a stream of its own, when no plan is there."""
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
@pytest.mark.parametrize("has_plan", [True, False])
def test_a_graph_is_captured_and_replayed(planned, has_plan):
    """Another thread's first call for a new shape, meanwhile, breaks nothing."""
    layer = planned.layer_with_plan()
    other = planned.made(shape=(96, 64))
    if not has_plan:
        planned.nf4.PLANS.clear()
    graph = torch.cuda.CUDAGraph()
    with concurrent.futures.ThreadPoolExecutor(1) as pool, torch.cuda.graph(graph):
        out = planned.nf4.your_dequantize_nf4(layer)
        beside = pool.submit(planned.nf4.your_dequantize_nf4, other).result()
    layer.weight.copy_(layer.weight.flip(0))
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert planned.n_wrong(out, layer) == planned.n_wrong(beside, other) == 0


@pytest.mark.gpu
def test_a_first_call_for_a_shape_returns_before_queued_work_ends(nf4):
    nf4.dequantize_nf4(*nf4.quantized((64, 64), torch.float16, "cuda"))
    pair = nf4.quantized((96, 64), torch.float16, "cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    began = time.perf_counter()
    out = nf4.dequantize_nf4(*pair)
    assert time.perf_counter() - began < 0.3
    assert nf4.bits_differing(out, nf4.spec(*pair)) == 0


def growth(nf4, dequantize, calls):
    """Bytes that calls for layers that come and go add on the GPU; each 50th result is compared."""
    shapes = [(512, 1024), (96, 640), (33, 65), (1, 4097)]
    gc.collect()
    before = torch.cuda.memory_allocated()
    for call in range(calls):
        how = {"nested": call % 5 > 0, "seed": call}
        pair = nf4.quantized(shapes[call % 4], helpers.DTYPES[call % 3], "cuda", **how)
        for _ in range(2):
            out = dequantize(*pair)
        if call % 50 == 0:
            assert nf4.bits_differing(out, nf4.spec(*pair)) == 0
    del pair, out
    gc.collect()
    return torch.cuda.memory_allocated() - before


@pytest.mark.gpu
def test_a_long_run_does_not_grow(nf4):
    leaked = []

    def leaking(*pair):
        out = nf4.dequantize_nf4(*pair)
        leaked.append(out.view(-1)[:1].clone())
        return out

    growth(nf4, nf4.dequantize_nf4, 100)
    assert growth(nf4, nf4.dequantize_nf4, 3000) == 0
    assert growth(nf4, leaking, 100) > 0, "a leak goes unnoticed"


def test_a_layer_whose_weight_was_replaced_has_the_new_ones_state(nf4, device):
    """layer.quant_state is still the old weight's: of another dtype, and other scales."""
    layer = nf4.bnb_Linear4bit(64, 32).to(device)
    other = nf4.bnb_Linear4bit(64, 32).to(device)
    stale = layer.weight.quant_state
    stale.dtype = torch.float32
    layer.weight = other.weight
    assert layer.quant_state is stale, "bitsandbytes forgets it: nothing is tested"
    for _ in range(2):
        got, want = nf4.your_dequantize_nf4(layer), nf4.your_dequantize_nf4(other)
        assert nf4.bits_differing(got, want) == 0
    layer.weight = torch.nn.Parameter(layer.weight.data, requires_grad=False)  # as FSDP leaves it
    layer.quant_state = other.weight.quant_state
    assert nf4.bits_differing(nf4.your_dequantize_nf4(layer), want) == 0
