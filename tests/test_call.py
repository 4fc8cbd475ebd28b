"""A plan never serves what it was not made for, and where none can be kept, every call is right."""

import concurrent.futures
import contextlib
import gc
import threading
import time
import types
from functools import partial
from unittest import mock

import helpers
import pytest
import shared
import torch

GPU = torch.cuda.is_available()


def others(tensor):
    return tensor * 1.5 if tensor.numel() == 1 else tensor.flip(0)


def by_data(tensor):
    """The object stays."""
    tensor.data = others(tensor)
    return tensor


def elsewhere(weight):
    """On a GPU pinned memory, whose address the GPU can read: only the device tells."""
    return weight.cpu().pin_memory() if GPU else weight.to("meta")


def one_for_two(state):
    """One table stands for two, which torch's guard does not take."""
    state.offset = state.state2.absmax
    return state


RAN = {  # by this call and the next
    "plan": ["plan", "plan"],
    "operator": ["operator", "plan"],
    "never a plan": ["operator", "operator"],
}
WEIGHT, STATE = "weight", "quant_state"
ABSMAX, ABSMAX2 = "quant_state.absmax", "quant_state.state2.absmax"
OFFSET, CODE2 = "quant_state.offset", "quant_state.state2.code"
CHANGES = {  # {what: (where, what it becomes, of RAN or the message)}
    "dtype": (f"{STATE}.dtype", lambda dtype: torch.bfloat16, "operator"),
    "shape": (f"{STATE}.shape", lambda shape: shape[::-1], "operator"),
    "shape a list": (f"{STATE}.shape", list, "plan"),
    "state2.blocksize": (f"{STATE}.state2.blocksize", lambda size: 512, "operator"),
    "blocksize": (f"{STATE}.blocksize", lambda size: 128, "absmax must have 16 elements"),
    "quant_type": (f"{STATE}.quant_type", lambda name: "fp4", "must be 'nf4', got 'fp4'"),
    "state2": (f"{STATE}.state2", lambda state2: None, "absmax must be in one of .*float32"),
    "code": (f"{STATE}.code", lambda code: code, "plan"),
    "one table for two": (STATE, one_for_two, "never a plan"),
    "offset in bf16": (OFFSET, lambda offset: offset.bfloat16(), "operator"),
    "fp16 offset, 2 bytes on": (OFFSET, lambda t: helpers.moved(t.half(), 2), "operator"),
    "offset in fp64": (OFFSET, lambda offset: offset.double(), "operator"),
    "fp64 offset [1]": (OFFSET, lambda t: t.double().view(1), "must have no dimension"),
    "weight one byte on": (WEIGHT, partial(helpers.moved, offset=1), "plan"),
    "weight with gaps": (WEIGHT, helpers.every_second, "never a plan"),
    "weight as int8": (WEIGHT, lambda weight: weight.view(torch.int8), "operator"),
    "weight as fp64": (WEIGHT, lambda weight: weight.view(-1).view(torch.float64), "operator"),
    "with grad": (WEIGHT, lambda w: w.view(-1).view(torch.half).requires_grad_(), "operator"),
    "weight sparse": (WEIGHT, lambda weight: weight.to_sparse(), "be a strided tensor"),
    "weight on another device": (WEIGHT, elsewhere, "be on"),
}
for name in (WEIGHT, ABSMAX, OFFSET, ABSMAX2, CODE2):
    CHANGES[f"{name}.data = others"] = name, by_data, "plan"
    CHANGES[f"{name} = others"] = name, others, "plan"
    CHANGES[f"{name}.copy_(others)"] = name, lambda tensor: tensor.copy_(others(tensor)), "plan"
    CHANGES[f"{name} freed"] = name, partial(helpers.resized, n_bytes=0), "of storage, got 0"
    CHANGES[f"{name} = None"] = name, lambda tensor: None, "expected a 4-bit weight|got None"
CHANGES[f"{ABSMAX} as int8"] = ABSMAX, lambda tensor: tensor.view(torch.int8), "must be in one of"
for name in (OFFSET, ABSMAX2, CODE2):
    CHANGES[f"{name} as int32"] = name, lambda table: table.view(torch.int32), "must be in one of"
    CHANGES[f"{name} one byte on"] = name, helpers.one_byte_on, "must be at a multiple of 4"


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen(planned, what):
    layer = planned.layer_with_plan()
    where, make, wanted = CHANGES[what]
    helpers.change(layer, where, make)
    if wanted in RAN:
        assert [planned.ran(layer) for _ in range(2)] == RAN[wanted]
    else:
        with pytest.raises((ValueError, TypeError), match=wanted):
            planned.ran(layer)
    assert planned.n_plans() == (2 if wanted == "operator" else 1)
    assert planned.ran(planned.made()) == "plan", "the first stays as it was"


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


def test_each_output_is_fresh(planned):
    layers = [planned.layer_with_plan(), planned.made(1), planned.made()]
    outs = [planned.dequantize(layer) for layer in layers]
    assert planned.n_by_operator == 1 and len({out.data_ptr() for out in outs}) == 3
    assert [planned.n_wrong(*pair) for pair in zip(outs, layers)] == [0, 0, 0]


def test_inference_mode_and_autocast_get_their_own(planned):
    """They change dispatch keys: each has a plan of its own, and outputs of its kind."""
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


@pytest.fixture
def trials(planned):
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


@contextlib.contextmanager
def forbidden(planned, asked):
    """Waiting for the GPU, as torch.cuda says where it is asked so."""
    with planned.patch.context() as patch:
        patch.setattr(torch.cuda, asked, lambda: True)
        if GPU:
            torch.cuda.set_sync_debug_mode("error")
        yield
        if GPU:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("asked", ["is_current_stream_capturing", "get_sync_debug_mode"])
def test_where_waiting_is_forbidden_a_trial_is_left_to_a_later_call(planned, trials, asked):
    """But a known kernel's new shape waits for nobody, and leaves a plan."""
    layer, fx = planned.made(), planned.dequantize
    with forbidden(planned, asked):
        outs = [fx(layer) for _ in range(2)]
    assert not trials.called and [planned.n_wrong(out, layer) for out in outs] == [0, 0]
    assert [planned.ran(layer) for _ in range(2)] == ["operator", "plan"]
    other = planned.made(shape=(96, 64))
    with forbidden(planned, asked):
        out = fx(other)
    assert planned.n_wrong(out, other) == 0 and planned.ran(other) == "plan"


def test_out_of_memory_in_a_trial_leaves_it_to_a_later_call(planned, trials):
    trials.side_effect = torch.OutOfMemoryError
    assert planned.ran(planned.made()) == "operator"
    trials.side_effect = None
    assert [planned.ran(planned.made(1)) for _ in range(2)] == ["operator", "plan"]


def check_that_none_is_kept(planned, caplog, fault):
    """Every call is right, of another shape, too; the fault is said once for the kernel."""
    for kind in ({}, {}, {"shape": (96, 64)}):
        assert planned.ran(planned.made(**kind)) == "operator"
    assert caplog.text.count("without a plan") == 1 and fault in caplog.text
    caplog.clear()


def edit_kernel(planned, helper=""):
    """The kernel's cell runs again, after a helper was defined anew."""
    names = dict(vars(planned.nf4))  # a copy: other tests have the module, too
    shared.execute(helper + shared.defining("_dequantize_nf4_kernel"), "again", names)
    planned.patch.setattr(planned.nf4, "_dequantize_nf4_kernel", names["_dequantize_nf4_kernel"])


@pytest.mark.parametrize("started", ["another weight", "nothing"])
def test_a_start_that_gives_other_bits_is_not_kept(planned, caplog, started):
    start, another = torch._C._StaticCudaLauncher._launch_kernel, planned.made(2).weight

    def start_wrong(*given):
        *how, (out_address, _weight_address, *others), stream = given
        if started == "another weight":
            start(*how, (out_address, another.data_ptr(), *others), stream)

    wrong = types.SimpleNamespace(_launch_kernel=start_wrong)
    with planned.patch.context() as patch:
        patch.setattr(torch._C, "_StaticCudaLauncher", wrong)
        check_that_none_is_kept(planned, caplog, "other bits")
    assert [planned.ran(planned.made()) for _ in range(2)] == ["operator"] * 2
    another_kind = planned.made(dtype=torch.bfloat16)
    assert [planned.ran(another_kind) for _ in range(2)] == ["operator", "plan"]
    edit_kernel(planned)
    assert [planned.ran(planned.made()) for _ in range(2)] == ["operator", "plan"]


RARE = ["num_ctas", "launch_pdl", "launch_cooperative_grid"]
RARE += ["global_scratch_size", "profile_scratch_size"]


@pytest.mark.skipif(GPU, reason="there the kernel is compiled as it is")
@pytest.mark.parametrize("what", RARE)
def test_a_kernel_that_wants_what_the_launcher_drops_gets_none(planned, caplog, what):
    planned.patch.setattr(helpers.Compiled.metadata, what, 2)
    check_that_none_is_kept(planned, caplog, "are wanted")


PRIVATE = ["_dynamo.guards.TensorGuards", "_dynamo.guards._empty_strided_cuda"]
PRIVATE += ["_StaticCudaLauncher", "_len_torch_dispatch_stack"]
if not GPU:  # there Triton's own launch needs these, too
    PRIVATE += ["_cuda_getDevice", "_cuda_getCurrentRawStream"]


@pytest.mark.parametrize("missing", PRIVATE)
def test_all_is_right_where_torch_lacks_a_private_function(planned, caplog, missing):
    planned.patch.delattr(f"torch._C.{missing}")
    check_that_none_is_kept(planned, caplog, f"'{missing.rpartition('.')[2]}'")


def test_an_edited_kernel_is_followed(planned):
    layer = planned.layer_with_plan()
    edit_kernel(planned, helpers.DOUBLED)
    want = 2 * planned.nf4.spec(layer.weight, layer.quant_state)
    for _ in range(2):
        out = planned.dequantize(layer)
        assert planned.nf4.bits_differing(out, want) == 0


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
@pytest.mark.parametrize("has_plan", [True, False])
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


@pytest.mark.gpu
def test_a_long_run_does_not_grow(nf4):
    """Layers come and go; each 50th result is compared."""
    shapes = [(512, 1024), (96, 640), (33, 65), (1, 4097)]
    held = []
    for call in range(3100):
        how = {"nested": call % 5 > 0, "seed": call}
        pair = nf4.quantized(shapes[call % 4], helpers.DTYPES[call % 3], "cuda", **how)
        for _ in range(2):
            out = nf4.dequantize_nf4(*pair)
        if call % 50 == 0:
            assert nf4.bits_differing(out, nf4.spec(*pair)) == 0
        del pair, out
        if call in (100, 3099):
            gc.collect()
            held.append(torch.cuda.memory_allocated())
    assert held[0] == held[1]
