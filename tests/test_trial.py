"""No plan is used before a trial was right; what fails or may pass leaves right weights."""

import contextlib
import errno
import gc
import itertools
import types
from functools import partial
from unittest import mock

import helpers
import pytest
import shared
import torch
from helpers import GPU, NEW_PLAN, ServedBy

PLAN, OPERATOR, BITSANDBYTES = ServedBy


# The trial: a sample whose bits a plan must get right before plans are trusted.

FMA = "scale = (code2.to(tl.float64) * absmax2 + offset).to(tl.float32)"
FLUSHED = "scale = tl.where(tl.abs(code2 * absmax2) < 2.0**-126, 0.0, code2 * absmax2) + offset"
WRONG_KERNELS = {  # {what a kernel does: (a text of its cell, what stands there instead)}
    "an FMA": ("scale = _mul_rn(code2, absmax2) + offset", FMA),
    "reads the first state2.absmax alone": ("block // BLOCKSIZE2\n", "block * 0\n"),
    "looks at half of absmax": ("absmax.to(tl.int32), ev", "(absmax.to(tl.int32) & 15), ev"),
    "takes a low nibble for 0": (
        "words[:, None] >> shifts[None, :]",
        "(words[:, None] >> shifts[None, :]) * (shifts[None, :] // 4 % 2)",
    ),
    "shuffles within half of a segment": ('$2, 0x101f, -1;"', '$2, 0x1007, -1;"'),
    "leaves out the last program": (
        "mask=index < n_valid)",
        "mask=index < n_valid // SPAN * SPAN)",
    ),
    "sets subnormal weights to 0": (
        "    weights = tl.reshape(weights.to(",
        "    weights = tl.where(tl.abs(weights) < 2.0**-14, 0.0, weights)\n"
        "    weights = tl.reshape(weights.to(",
    ),
}
FLUSHES = "sets a scale's subnormal product to 0"  # in fp16 such weights are 0 in any case
if not GPU:  # a GPU does so, and bitsandbytes' kernels, too
    WRONG_KERNELS[FLUSHES] = ("scale = _mul_rn(code2, absmax2) + offset", FLUSHED)


@pytest.mark.parametrize("what", WRONG_KERNELS)
def test_a_trial_sees_a_kernel_that_is_wrong(copied, caplog, what):
    """By the bits, and not because the kernel could not run."""
    copied.run_again("_dequantize_nf4_kernel", *WRONG_KERNELS[what])
    dtypes = helpers.DTYPES
    if what == FLUSHES:
        dtypes = [torch.bfloat16, torch.float32]
    for dtype, offset_dtype in itertools.product(dtypes, helpers.DTYPES):
        layer = copied.layer(dtype=dtype)
        layer.quant_state.offset = layer.quant_state.offset.to(offset_dtype)
        copied.assert_served_by(layer, BITSANDBYTES)
        assert caplog.text.count("bytes of a sample differ") == 2, "with each launcher"
        caplog.clear()


def test_no_two_trials_have_the_same_weight(nf4):
    """Else a launcher that writes nothing could pass: freed memory may hold the right output."""
    kind = (torch.device("cpu"), torch.float16, torch.float32, 64, 256)
    samples = [nf4.sample(*kind)[0] for _ in range(2)]
    assert (samples[0] != samples[1]).float().mean() > 0.5


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SURROUNDINGS = {
    "bf16 as default": partial(default_dtype, torch.bfloat16),
    "fp64 as default": partial(default_dtype, torch.float64),
    "meta as default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "autocast": partial(torch.autocast, "cuda" if GPU else "cpu", torch.bfloat16),
}


@pytest.mark.parametrize("what", SURROUNDINGS)
def test_a_trial_is_right_in_any_surroundings(calls, what):
    for dtype, nested in itertools.product(helpers.DTYPES, (True, False)):
        layer = calls.layer(dtype=dtype, nested=nested)
        with SURROUNDINGS[what]():
            out = calls.dequantize(layer)
        calls.assert_right(out, layer)
    trusted = [getattr(found, "func", None) for found in calls.nf4.TRIALS.values()]
    assert trusted == 6 * [calls.nf4.torch_launcher], "a trial went wrong: see the log"


# What fails for good: Triton's launcher or bitsandbytes does the work, and the log says so once.


def let_torchs_launcher_do(calls, wrong):
    launch = torch._C._StaticCudaLauncher._launch_kernel
    wrongly = types.SimpleNamespace(_launch_kernel=partial(wrong, launch))
    calls.patch.setattr("torch._C._StaticCudaLauncher", wrongly)


def let_launch_do(calls, wrong):
    calls.patch.setattr(calls.nf4, "launch", wrong)


BY_TRITON, BY_BITSANDBYTES = "with Triton's launcher", "by bitsandbytes"
WRONG_LAUNCHERS = {  # {what torch's launcher does: f(the real one, its arguments)}
    "takes other arguments": lambda launch: None,
    "writes nothing": lambda launch, *given: None,
    "writes half": lambda launch, function, x, *given: launch(function, x // 2, *given),
    "uses the first stream": lambda launch, *given: launch(*given[:-1], 0),
}
ERRORS = {
    "there is no compiler": FileNotFoundError("cc"),
    "ptxas may not run": PermissionError(errno.EACCES, "ptxas"),
    "the cache cannot be written": OSError(errno.EROFS, "cache"),
}
FAILURES = {  # {what fails: (what makes it so, what the log says)}
    "torch's launcher is missing": (
        lambda calls: calls.patch.delattr("torch._C._StaticCudaLauncher"), BY_TRITON
    ),
    "a hook of Triton gives no kernel": (
        partial(let_launch_do, wrong=lambda *given: None), BY_BITSANDBYTES
    ),
}  # fmt: skip
for what, wrong in WRONG_LAUNCHERS.items():
    fail = partial(let_torchs_launcher_do, wrong=wrong)
    FAILURES[f"torch's launcher {what}"] = fail, BY_TRITON
for what, error in ERRORS.items():
    FAILURES[what] = partial(let_launch_do, wrong=mock.Mock(side_effect=error)), BY_BITSANDBYTES


@pytest.mark.parametrize("what", FAILURES)
def test_what_fails_is_logged_once_and_weights_are_right(copied, caplog, what):
    fail, how = FAILURES[what]
    fail(copied)
    by_plans = how == BY_TRITON
    layer, other = copied.layer(), copied.layer(shape=(96, 64))
    copied.assert_served_by(layer, *(NEW_PLAN if by_plans else 2 * [BITSANDBYTES]))
    copied.assert_served_by(other, OPERATOR if by_plans else BITSANDBYTES)
    assert copied.n_trials == 1, "no second trial for the same"
    lines = [each.getMessage() for each in caplog.records if each.name == "nf4_triton"]
    assert len(lines) == 1, "said once"
    what = f"NF4 on {layer.weight.device} to torch.float16 in blocks of 64 and 256"
    assert lines[0].startswith(f"{what} is dequantized {how}, because of ")
    caplog.clear()


def test_torchs_launcher_refuses_a_kernel_that_asks_more(calls):
    """It would leave out in silence what it does not know."""
    layer = calls.layer()
    tensors, kind = calls.nf4.unpack(layer.weight, layer.quant_state)
    compiled = calls.nf4.launch(calls.nf4.empty_output(layer.weight, kind), tensors, kind)
    same = {"src": compiled.src, "function": compiled.function}
    names = "num_ctas launch_pdl launch_cooperative_grid global_scratch_size profile_scratch_size"
    for name in names.split():
        more = types.SimpleNamespace(metadata=compiled.metadata._replace(**{name: 2}), **same)
        with pytest.raises(RuntimeError, match=f"expected a kernel of .*, got .*{name}': 2"):
            calls.nf4.torch_launcher(more, kind)


def test_a_missing_private_function_is_logged_once(copied, caplog):
    names = "exchangeDevice getCurrentRawStream getDevice maybeExchangeDevice sleep"
    for name in () if GPU else names.split():  # a torch without CUDA has none of these
        copied.patch.setattr(torch._C, f"_cuda_{name}", None, raising=False)
    copied.patch.delattr(torch._C._dynamo.guards, "TensorGuards")
    copied.patch.setattr(torch.version, "cuda", "13.0")
    shared.execute(shared.defining("make_plan"), "make_plan again", vars(copied.nf4))
    for dtype in helpers.DTYPES:
        copied.assert_served_by(copied.layer(dtype=dtype), BITSANDBYTES)
    assert caplog.text.count("because of this torch: cannot import name 'TensorGuards'") == 1
    caplog.clear()


# What may pass: bitsandbytes does the work meanwhile, and nothing is kept.


def while_replaced(name, value):
    """Return f(calls), a context in which the value stands at this name."""

    @contextlib.contextmanager
    def context(calls):
        with calls.patch.context() as patch:
            if name.startswith("nf4."):
                patch.setattr(calls.nf4, name.removeprefix("nf4."), value)
            else:
                patch.setattr(name, value)
            yield

    return context


@contextlib.contextmanager
def waiting_forbidden(calls):
    """On a GPU CUDA then raises an error if someone waits."""
    if not GPU:
        with while_replaced("torch.cuda.get_sync_debug_mode", lambda: 2)(calls):
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def another_thread_tries(calls):
    """The lock is held; a call that released it would make a trial beside the other thread's."""
    lock = calls.nf4.TRYING
    lock.acquire()
    try:
        yield
        assert lock.locked(), "the other thread's lock was released"
    finally:
        if lock.locked():
            lock.release()


HINDRANCES = {  # {why a trial cannot end now: f(calls), a context in which it cannot}
    "a graph is captured": while_replaced("torch.cuda.is_current_stream_capturing", lambda: True),
    "waiting is forbidden": waiting_forbidden,
    "a dispatch mode is active": while_replaced("nf4._len_torch_dispatch_stack", lambda: 1),
    "another thread makes a trial": another_thread_tries,
}
PASSING_ERRORS = {
    "no memory": torch.OutOfMemoryError("no memory"),
    "no memory of the host": MemoryError(),
    "no memory for Triton": RuntimeError("Triton Error [CUDA]: out of memory"),
    "a full disk": OSError(errno.ENOSPC, "full"),
    "a full quota": OSError(errno.EDQUOT, "full"),
    "no memory for a compiler": OSError(errno.ENOMEM, "fork"),
    "no process for a compiler": OSError(errno.EAGAIN, "fork"),
    "too many open files": OSError(errno.EMFILE, "open"),
    "too many open files of all": OSError(errno.ENFILE, "open"),
    "a full disk, for a compiler": RuntimeError("ptxas: No space left on device"),
    "no folder for a compiler": FileNotFoundError("No usable temporary directory found in"),
    "a warning that is an error": UserWarning("TRITON_DEFAULT_FP_FUSION is unset"),
    "a capture elsewhere": RuntimeError(
        "CUDA error: operation not permitted when stream is capturing"
    ),
    "a capture that ended": RuntimeError("CUDA error: an error during capture"),
}
for why, error in PASSING_ERRORS.items():
    HINDRANCES[why] = while_replaced("nf4.sample", mock.Mock(side_effect=error))


@pytest.mark.parametrize("why", HINDRANCES)
def test_a_hindered_trial_is_left_to_a_later_call(calls, why):
    layer = calls.layer()
    for _ in range(2):
        with HINDRANCES[why](calls):
            out = calls.dequantize(layer)
        calls.assert_right(out, layer)
        assert calls.n_plans() == 0 and not calls.nf4.TRIALS, "something was kept"
    calls.assert_served_by(layer, *NEW_PLAN)


@pytest.mark.parametrize("why", ["a graph is captured", "waiting is forbidden"])
def test_a_new_shape_of_a_tried_kernel_waits_for_nobody(calls, why):
    calls.layer_with_plan()
    layer = calls.layer(shape=(96, 64))
    with HINDRANCES[why](calls):
        out = calls.dequantize(layer)
    calls.assert_right(out, layer)
    calls.assert_served_by(layer, PLAN)


USERS_ERRORS = {
    "an earlier kernel's error": torch.AcceleratorError("CUDA error: an illegal memory access"),
    "a timeout by a signal": TimeoutError(),
    "an interruption": KeyboardInterrupt(),
}


@pytest.mark.parametrize("what", USERS_ERRORS)
def test_a_users_own_error_is_raised_and_nothing_is_kept(calls, what):
    layer, error = calls.layer(), USERS_ERRORS[what]
    with while_replaced("nf4.sample", mock.Mock(side_effect=error))(calls):
        with pytest.raises(type(error)):
            calls.dequantize(layer)
    assert not calls.nf4.TRIALS and calls.n_plans() == 0, "something was kept"
    calls.assert_served_by(layer, *NEW_PLAN)


# Edits of cells that are run again.

EDITED = {  # {what is edited: (a name that its cell defines, the text, its replacement)}
    "the kernel": ("_dequantize_nf4_kernel", "# 4. The output.", "# 4. The output:"),
    "the launch": ("launch", "two for each of", "two for each one of"),
    "a launcher": ("torch_launcher", "leave out in silence what", "drop in silence what"),
    "make_plan": ("make_plan", "# the others are None", "# all others are None"),
    "the sample": ("sample", "makes weights that are", "makes some weights that are"),
}


@pytest.mark.parametrize("what", EDITED)
def test_edited_code_is_tried_and_used(copied, what):
    layer = copied.layer_with_plan()
    copied.run_again(*EDITED[what])
    copied.assert_served_by(layer, *NEW_PLAN)
    assert copied.n_trials == 1, "the edited code must be tried, once"


def test_another_count_of_words_gets_a_trial(copied):
    """For one who tries what is faster: the count is compiled into the kernel."""
    copied.layer_with_plan()
    copied.patch.setattr(copied.nf4, "WORDS", 512)
    layer = copied.layer(shape=(256, 64))
    copied.assert_served_by(layer, *NEW_PLAN)
    assert copied.n_trials == 2


def test_a_kernel_with_a_plan_is_not_unloaded(calls):
    """Triton unloads a kernel that nobody holds, for one after its cell was run again."""
    layer = calls.layer_with_plan()
    calls.nf4.TRIALS.clear()
    gc.collect()
    calls.assert_served_by(layer, PLAN)
