"""A plan serves the calls that it is right for, bitsandbytes all others, and the log says why."""

import concurrent.futures
import contextlib
import errno
import gc
import itertools
import threading
import types
import weakref
from functools import partial
from unittest import mock

import helpers
import numpy as np
import pytest
import shared
import torch
from torch.overrides import TorchFunctionMode

GPU = torch.cuda.is_available()
needs_two = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")

# What does the work of the two calls after a change.
SAME_PLAN = ["plan", "plan"]
NEW_PLAN = ["operator", "plan"]
NO_PLAN = ["bitsandbytes", "bitsandbytes"]


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
CHANGES = {  # {id: (where, what it becomes, what does the work of the next two calls)}
    "dtype": (f"{STATE}.dtype", lambda dtype: torch.bfloat16, NEW_PLAN),
    "shape": (f"{STATE}.shape", lambda shape: shape[::-1], NEW_PLAN),
    "shape a list": (f"{STATE}.shape", list, ["operator", "operator"]),  # by the first plan
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
def test_a_change_is_seen(planned, what):
    layer = planned.layer_with_plan()
    where, make, wanted = CHANGES[what]
    helpers.change(layer, where, make)
    assert [planned.ran(layer) for _ in range(2)] == wanted
    assert planned.n_plans() == (2 if wanted == NEW_PLAN else 1)
    assert planned.ran(planned.made()) == "plan", "the first plan is lost"


def test_a_plan_is_made_once_and_none_for_what_has_none(planned):
    """Of 100 calls with a weight at an odd address, none makes a plan, or a trial."""
    make_plan = mock.Mock(wraps=planned.nf4.make_plan)
    planned.patch.setattr(planned.nf4, "make_plan", make_plan)
    layer, twice = planned.made(), planned.made()
    layer.weight = helpers.moved(layer.weight, 1)
    with_one_table_for_two(twice.quant_state)
    for _ in range(100):
        planned.dequantize(layer)
        planned.dequantize(twice)
    assert not make_plan.called and planned.n_plans() == 0
    layer.weight = helpers.moved(layer.weight, 4)
    layer.quant_state.absmax = helpers.moved(layer.quant_state.absmax, 1)
    for _ in range(100):
        planned.dequantize(layer)
    assert make_plan.call_count == 2, "one of the trial, and one that is kept"
    assert planned.n_plans() == 1


@pytest.mark.parametrize("names", [("nf4_one", "nf4_two"), ("nf4_same", "nf4_same")], ids=str)
def test_each_copy_of_the_code_has_its_own_plans(device, monkeypatch, names):
    """As a reload leaves them, or the exported module beside the notebook."""
    copies = []
    for name in names:
        copy = shared.load(name)
        if not GPU:
            helpers.let_the_interpreter_run_assembly(copy)
        copies.append(helpers.Planned(copy, device, monkeypatch))
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


def test_no_mode_for_functions_sees_a_plan_at_work(planned):
    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            asked.append(function)
            return function(*args, **(kwargs or {}))

    asked, layer = [], planned.layer_with_plan()
    with Mode():
        out = planned.dequantize(layer)
    assert not asked
    planned.assert_right(out, layer)


def test_the_current_stream_is_used(planned):
    layer = planned.layer_with_plan()
    if not GPU:
        helpers.CURRENT.stream = 7  # the launcher's stand-in compares
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
                assert planned.nf4._cuda_getDevice() == current


def as_launcher(launch_kernel):
    return "torch._C._StaticCudaLauncher", types.SimpleNamespace(_launch_kernel=launch_kernel)


# The trial: a sample whose bits a plan must get right before plans are trusted.


WRONG_KERNELS = {  # {what a kernel does: (a text of its cell, what stands there instead)}
    "an FMA": (
        "scale = _mul_rn(code2, absmax2) + offset",
        "scale = (code2.to(tl.float64) * absmax2 + offset).to(tl.float32)",
    ),
    "reads the first state2.absmax alone": ("block // BLOCKSIZE2\n", "block * 0\n"),
    "looks at half of absmax": ("absmax.to(tl.int32), ev", "(absmax.to(tl.int32) & 15), ev"),
    "takes a low nibble for 0": (
        "words[:, None] >> shifts[None, :]",
        "(words[:, None] >> shifts[None, :]) * (shifts[None, :] // 4 % 2)",
    ),
    "shuffles within half of a segment": ('$2, 0x101f, -1;"', '$2, 0x1007, -1;"'),
    "leaves out the last program": (
        "mask=index < n_valid)", "mask=index < n_valid // SPAN * SPAN)"
    ),
    "sets subnormal weights to 0": (
        "    weights = tl.reshape(weights.to(",
        "    weights = tl.where(tl.abs(weights) < 2.0**-14, 0.0, weights)\n"
        "    weights = tl.reshape(weights.to(",
    ),
}  # fmt: skip
PRODUCT = "sets a scale's subnormal product to 0"
if not GPU:  # a GPU does so, and bitsandbytes' kernels, too
    WRONG_KERNELS[PRODUCT] = (
        "scale = _mul_rn(code2, absmax2) + offset",
        "product = _mul_rn(code2, absmax2)\n"
        "        scale = tl.where(tl.abs(product) < 2.0**-126, 0.0, product) + offset",
    )


@pytest.mark.parametrize("what", WRONG_KERNELS)
def test_a_trial_sees_what_a_kernel_does_wrong(copied, caplog, what):
    """By the bits, and not because the kernel could not run."""
    copied.run_again("_dequantize_nf4_kernel", *WRONG_KERNELS[what])
    dtypes = helpers.DTYPES
    if what == PRODUCT:  # in fp16 its weights are 0 anyway
        dtypes = [torch.bfloat16, torch.float32]
    for dtype, offset_dtype in itertools.product(dtypes, helpers.DTYPES):
        layer = copied.made(dtype=dtype)
        layer.quant_state.offset = layer.quant_state.offset.to(offset_dtype)
        assert copied.ran(layer) == "bitsandbytes", (dtype, offset_dtype)
        assert caplog.text.count("bytes of a sample differ") == 2, "with each launcher"
        caplog.clear()


def test_each_trial_has_a_weight_of_its_own(nf4):
    """Else a launcher that writes nothing could pass: freed memory may hold the right output."""
    kind = (torch.device("cpu"), torch.float16, torch.float32, 64, 256)
    samples = [nf4.sample(*kind)[0] for _ in range(2)]
    assert (samples[0] != samples[1]).float().mean() > 0.5


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


SURROUNDINGS = {
    "bf16 as default": partial(default_dtype, torch.bfloat16),
    "fp64 as default": partial(default_dtype, torch.float64),
    "meta as default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "autocast": partial(torch.autocast, "cuda" if GPU else "cpu", torch.bfloat16),
}


@pytest.mark.parametrize("what", SURROUNDINGS)
def test_a_trial_does_not_depend_on_its_surroundings(planned, what):
    for dtype, nested in itertools.product(helpers.DTYPES, (True, False)):
        layer = planned.made(dtype=dtype, nested=nested)
        with SURROUNDINGS[what]():
            out = planned.dequantize(layer)
        planned.assert_right(out, layer)
    assert all(found.func is planned.nf4.torch_launcher for found in planned.nf4.TRIALS.values())
    assert len(planned.nf4.TRIALS) == 6


# What fails for good: bitsandbytes or Triton's launcher does the work, and the log says so once.


def let_launches_raise(planned, error):
    planned.patch.setattr(planned.nf4, "launch", mock.Mock(side_effect=error))


def launch_wrongly(planned, does):
    launch_kernel, another = torch._C._StaticCudaLauncher._launch_kernel, planned.made(2).weight

    def launch(function, x, y, z, num_warps, shared_bytes, types_, values, stream):
        out_address, weight_address, *others = values
        if does == "nothing":
            return
        if does == "half":
            x = x // 2
        if does == "another weight":
            weight_address = another.data_ptr()
        if does == "its own stream":
            stream = 0
        values = (out_address, weight_address, *others)
        launch_kernel(function, x, y, z, num_warps, shared_bytes, types_, values, stream)

    planned.patch.setattr(*as_launcher(launch))


class Changed:
    """A compiled kernel with other metadata."""

    def __init__(self, compiled, **others):
        self.compiled, self.src, self.function = compiled, compiled.src, compiled.function
        names = [*UNUSUAL, "num_warps", "shared"]
        values = {name: getattr(compiled.metadata, name) for name in names}
        self.metadata = types.SimpleNamespace(**values | others)

    def __getitem__(self, grid):
        return self.compiled[grid]


def change_metadata(planned, name):
    """Let Triton compile what torch's launcher drops in silence."""
    launch = planned.nf4.launch
    changed = lambda *given: Changed(launch(*given), **{name: 2})  # noqa: E731
    planned.patch.setattr(planned.nf4, "launch", changed)


UNUSUAL = ["num_ctas", "launch_pdl", "launch_cooperative_grid"]
UNUSUAL += ["global_scratch_size", "profile_scratch_size"]
BY_TRITON, BY_BITSANDBYTES = "with Triton's launcher", "by bitsandbytes"
FAILURES = {  # {id: (how it fails, what the log says)}
    "torch's launcher is missing": (
        lambda planned: planned.patch.delattr("torch._C._StaticCudaLauncher"), BY_TRITON
    ),
    "torch's launcher has another signature": (
        lambda planned: planned.patch.setattr(*as_launcher(lambda function: None)), BY_TRITON
    ),
    "no compiler": (partial(let_launches_raise, error=FileNotFoundError("cc")), BY_BITSANDBYTES),
    "a ptxas that may not run": (
        partial(let_launches_raise, error=PermissionError(errno.EACCES, "ptxas")), BY_BITSANDBYTES
    ),
    "a cache that cannot be written": (
        partial(let_launches_raise, error=OSError(errno.EROFS, "cache")), BY_BITSANDBYTES
    ),
    "Triton's hook gives no compiled kernel": (
        lambda planned: planned.patch.setattr(planned.nf4, "launch", lambda *given: None),
        BY_BITSANDBYTES,
    ),
}  # fmt: skip
for does in ("nothing", "half", "another weight", "its own stream"):
    FAILURES[f"torch's launcher writes {does}"] = partial(launch_wrongly, does=does), BY_TRITON
for name in UNUSUAL:
    FAILURES[f"a kernel with {name}"] = partial(change_metadata, name=name), BY_TRITON


@pytest.mark.parametrize("what", FAILURES)
def test_what_fails_is_said_once_and_all_calls_are_right(copied, caplog, what):
    fail, how = FAILURES[what]
    fail(copied)
    for shape in ((32, 64), (32, 64), (96, 64)):
        layer = copied.made(shape=shape)
        assert (copied.ran(layer) == "bitsandbytes") == (how == BY_BITSANDBYTES)
    assert copied.n_trials == 1, "no second trial for the same"
    [line] = [each.getMessage() for each in caplog.records if each.name == "nf4_triton"]
    what = f"NF4 on {layer.weight.device} to torch.float16 in blocks of 64 and 256 "
    assert line.startswith(what) and how in line
    caplog.clear()


def test_a_missing_private_function_is_said_once_for_all(copied, caplog):
    copied.patch.delattr(torch._C._dynamo.guards, "TensorGuards")
    copied.patch.setattr(torch.version, "cuda", "13.0")
    shared.execute(shared.defining("make_plan"), "make_plan again", vars(copied.nf4))
    for dtype in helpers.DTYPES:
        assert copied.ran(copied.made(dtype=dtype)) == "bitsandbytes"
    assert caplog.text.count("because of this torch: cannot import name") == 1
    caplog.clear()


# What may pass: bitsandbytes does the work meanwhile, and nothing is kept.


def raising(error):
    return mock.Mock(side_effect=error)


HINDRANCES = {  # {id: (what is replaced meanwhile, by what)}; no trial can be finished then
    "a graph is captured": ("torch.cuda.is_current_stream_capturing", lambda: True),
    "waiting is forbidden": ("torch.cuda.get_sync_debug_mode", lambda: 2),
    "a dispatch mode is active": ("nf4._len_torch_dispatch_stack", lambda: 1),
}
PASSING = {
    "no memory": torch.OutOfMemoryError("no memory"),
    "no memory of the host": MemoryError(),
    "no memory for Triton": RuntimeError("Triton Error [CUDA]: out of memory"),
    "a full disk": OSError(errno.ENOSPC, "full"),
    "a full quota": OSError(errno.EDQUOT, "full"),
    "no memory for a compiler": OSError(errno.ENOMEM, "fork"),
    "no process for a compiler": OSError(errno.EAGAIN, "fork"),
    "too many open files": OSError(errno.EMFILE, "open"),
    "no folder for a compiler": FileNotFoundError("No usable temporary directory found in"),
    "a warning that is an error": UserWarning("TRITON_DEFAULT_FP_FUSION is unset"),
    "a capture elsewhere": RuntimeError(
        "CUDA error: operation not permitted when stream is capturing"
    ),
}
for name, error in PASSING.items():
    HINDRANCES[name] = "nf4.sample", raising(error)
    HINDRANCES[f"{name}, for a launch"] = as_launcher(raising(error))


@contextlib.contextmanager
def hindered(planned, why):
    """Hinder trials; where waiting is forbidden, CUDA raises an error on a GPU if one waits."""
    where, value = HINDRANCES[why]
    with planned.patch.context() as patch:
        if where.startswith("nf4."):
            patch.setattr(planned.nf4, where.removeprefix("nf4."), value)
        else:
            patch.setattr(where, value)
        if GPU and why == "waiting is forbidden":
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if GPU:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("why", HINDRANCES)
def test_a_hindered_trial_is_left_to_a_later_call(planned, why):
    layer = planned.made()
    for _ in range(2):
        with hindered(planned, why):
            out = planned.dequantize(layer)
        planned.assert_right(out, layer)
        assert planned.n_plans() == 0 and not planned.nf4.TRIALS
    assert [planned.ran(layer) for _ in range(2)] == NEW_PLAN


def test_while_a_thread_makes_a_trial_bitsandbytes_serves_others(planned):
    is_trying, may_end, trial = threading.Event(), threading.Event(), planned.nf4.trial

    def slow_trial(*given):
        is_trying.set()
        assert may_end.wait(10)
        return trial(*given)

    planned.patch.setattr(planned.nf4, "trial", slow_trial)
    layer, other = planned.made(), planned.made(1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(planned.dequantize, layer)
        assert is_trying.wait(60)
        assert planned.ran(other) == "bitsandbytes"
        may_end.set()
        planned.assert_right(first.result(), layer)
    assert planned.n_trials == 1 and planned.ran(other) in ("plan", "operator")


@pytest.mark.parametrize("why", ["a graph is captured", "waiting is forbidden"])
def test_a_new_shape_of_a_tried_kernel_waits_for_nobody(planned, why):
    planned.layer_with_plan()
    layer = planned.made(shape=(96, 64))
    with hindered(planned, why):
        out = planned.dequantize(layer)
    planned.assert_right(out, layer)
    assert planned.ran(layer) == "plan"


RAISED = {
    "an earlier kernel's error": torch.AcceleratorError("CUDA error: an illegal memory access"),
    "a timeout by a signal": TimeoutError(),
    "an interruption": KeyboardInterrupt(),
}


@pytest.mark.parametrize("what", RAISED)
def test_a_users_own_trouble_is_raised_and_nothing_is_kept(planned, what):
    layer = planned.made()
    with planned.patch.context() as patch:
        patch.setattr(planned.nf4, "sample", raising(RAISED[what]))
        with pytest.raises(type(RAISED[what])):
            planned.dequantize(layer)
    assert not planned.nf4.TRIALS and planned.n_plans() == 0
    assert [planned.ran(layer) for _ in range(2)] == NEW_PLAN


# Edits of cells that are run again.

EDITS = {  # {what is edited: (a name that its cell defines, the text, its replacement)}
    "the kernel": ("_dequantize_nf4_kernel", "# 4. The output.", "# 4. The output:"),
    "a helper of the kernel": ("_look_up", "in the low four bits;", "in the lowest four bits;"),
    "the launch": ("launch", "two for each of", "two for each one of"),
    "a launcher": ("torch_launcher", "leave out in silence what", "drop in silence what"),
    "make_plan": ("make_plan", "# the others are None", "# all others are None"),
    "the sample": ("sample", "makes weights that are", "makes some weights that are"),
}


@pytest.mark.parametrize("what", EDITS)
def test_after_an_edit_the_new_code_is_tried_and_used(copied, what):
    layer = copied.layer_with_plan()
    copied.run_again(*EDITS[what])
    assert [copied.ran(layer) for _ in range(2)] == NEW_PLAN
    assert copied.n_trials == 1


def test_another_count_of_words_gets_a_trial(copied):
    """For one who tries what is faster: the count is compiled into the kernel."""
    copied.layer_with_plan()
    copied.patch.setattr(copied.nf4, "WORDS", 512)
    layer = copied.made(shape=(256, 64))
    assert [copied.ran(layer) for _ in range(2)] == NEW_PLAN
    assert copied.n_trials == 2


# Memory.


def test_shapes_without_end_do_not_fill_the_memory(planned):
    planned.nf4.PLANS.update({(n, "another kind"): () for n in range(4095)})
    for n in (1, 2, 3):
        planned.ran(planned.made(shape=(n, 64)))
        assert len(planned.nf4.PLANS) == 4096
    assert list(planned.nf4.PLANS)[0] == (2, "another kind"), "the oldest go first"


def test_strides_without_end_do_not_fill_the_memory(planned):
    _, kind = planned.nf4.unpack(*vars(planned.made()).values())
    planned.nf4.PLANS[kind] = 64 * (lambda tensors: None,)  # as those for other strides
    assert [planned.ran(planned.made()) for _ in range(2)] == NEW_PLAN
    assert planned.n_plans() == 64


@pytest.fixture
def no_collector():
    """Switch the garbage collector off, as training loops do."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_plans_and_layers_are_freed_without_a_collector(planned, no_collector):
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


def test_a_kernel_with_a_plan_is_not_unloaded(planned):
    """Triton unloads a kernel that nobody holds, for one after its cell was run again."""
    layer = planned.made()
    tensors, kind = planned.nf4.unpack(layer.weight, layer.quant_state)
    compiled = planned.nf4.launch(planned.nf4.empty_output(layer.weight, kind), tensors, kind)
    held = Changed(compiled, num_ctas=1)  # which nothing but the launcher holds
    launcher, held = planned.nf4.torch_launcher(held, kind), weakref.ref(held)
    assert held() is not None and callable(launcher)


@pytest.mark.gpu
def test_a_kernels_first_call_needs_little_more_than_the_output(planned):
    layer = planned.made(dtype=torch.bfloat16, shape=(16384, 4096))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = planned.dequantize(layer)
    assert planned.nf4.TRIALS, "the peak is that of a call with a trial"
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
