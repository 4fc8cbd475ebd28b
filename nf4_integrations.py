"""Let bitsandbytes and Unsloth dequantize NF4 weights with nf4_triton, within a context."""

import contextlib
import functools
import inspect
import logging
import os
import sys
import threading
import weakref

import nf4_triton
import torch
from bitsandbytes import functional as bnb

LOG = logging.getLogger("nf4_integrations")
OPS = "bitsandbytes.backends.cuda.ops"
PRODUCT = "_dequant_linear_fallback"  # bitsandbytes 0.50 multiplies by a dequantized weight there


def in_bitsandbytes():
    """Return a context in which bitsandbytes dequantizes NF4 weights with nf4_triton.

    These are its backward passes, and on a GPU the forward passes that its fused kernel does not
    take. Results have the same bits, shapes and dtypes as without the context (but on a CPU, where
    bitsandbytes errs for odd shapes). What nf4_triton refuses, FP4 for example, bitsandbytes
    dequantizes itself. But a field that is no tensor is an error, and in compiled code, so is what
    does not fit together.

    All threads see the context, until the last such context ends. A compiled function asks at each
    call whether one is open; its backward pass then does what its forward pass was compiled for.
    What torch.export or torch.jit.trace make in the context calls bitsandbytes' functions (with
    strict=True, from torch 2.11 on); a CUDA graph that is captured there, and what other tracers
    make, keep our kernel.
    """
    return opened(BITSANDBYTES, find_in_bitsandbytes)


def in_unsloth():
    """Return a context in which Unsloth's fast_dequantize uses nf4_triton for NF4 weights.

    Each call then returns a fresh tensor [rows, columns] in quant_state.dtype, or its transpose for
    a weight that is passed as [1, n]. Calls with `out` and other formats stay Unsloth's own.
    All threads see the context, until the last such context ends. Raises ImportError without
    Unsloth.
    """
    try:
        from unsloth.kernels.utils import fast_dequantize  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "unsloth":
            raise  # Unsloth is there, and names what it misses itself
        raise ImportError("in_unsloth() needs Unsloth: run `pip install unsloth` first.") from None
    return opened(UNSLOTH, find_in_unsloth)


@contextlib.contextmanager
def opened(integration, find):
    """Open a context: the first one replaces what find() returns, the last one restores it."""
    with LOCK:
        if integration.n_contexts == 0:
            replace(integration, find())
        integration.n_contexts += 1
    try:
        yield
    finally:
        with LOCK:
            integration.n_contexts -= 1
            if integration.n_contexts == 0:
                restore(integration)


def replace(integration, found):
    """Put our stand-ins into their places.

    found  [(owner, name, make)], where make(original) returns the stand-in
    """
    stand_ins, places = {}, []
    for owner, name, make in found:
        original = original_of(getattr(owner, name))  # another tool may have put ours back
        key = id(original)  # it need not have a hash
        if key not in stand_ins:
            stand_ins[key] = make(original)
            ORIGINALS[stand_ins[key]] = original
        places.append((owner, name, stand_ins[key]))
    integration.places = [(owner, name) for owner, name, _ in places]
    for owner, name, stand_in in places:
        setattr(owner, name, stand_in)
    integration.is_open = True  # last: after an interruption, stand-ins call what they stand for


def restore(integration):
    """Put the originals back where a stand-in of ours still is; leave other tools' patches."""
    integration.is_open = False
    for owner, name in integration.places:
        current = getattr(owner, name, None)
        if original_of(current) is not current:
            setattr(owner, name, original_of(current))


def original_of(function):
    """Return what a stand-in of ours stands for, and any other function itself."""
    try:
        return ORIGINALS.get(function, function)
    except TypeError:  # it has no weak reference or no hash, so it is none of ours
        return function


def dequantize(weight, state):
    """Return nf4_triton's output, or None where the original function has to do the work."""
    if getattr(state, "quant_type", None) != "nf4" or may_outlive_the_context():
        return None
    try:
        return nf4_triton.dequantize_nf4(weight, state)
    except (TypeError, ValueError):  # a refusal
        return None


@torch.compiler.assume_constant_result  # a compiler calls it, and keeps what it returns
def may_outlive_the_context():
    """Tell whether a program is exported or traced, which runs outside the context, too."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def make_dequantize_4bit(original):
    """Return a stand-in for bitsandbytes.functional.dequantize_4bit."""

    @functools.wraps(original)
    def dequantize_4bit(
        A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4"
    ):  # code that another thread compiles meanwhile is guarded by these very defaults
        if BITSANDBYTES.is_open and out is None:
            weight = dequantize(A, quant_state)
            if weight is not None:
                return weight
        return original(A, quant_state, absmax, out, blocksize, quant_type)

    return dequantize_4bit


def make_product(original):
    """Return a stand-in for PRODUCT, which dequantizes straight to A's dtype.

    A is [..., columns], shapeB (rows, columns); the product is [..., rows]. Nested blocks have 256
    absmax each, and `absmax` is then the outer one.
    """

    def product(
        A, B, shapeB, absmax, blocksize, quant_type,
        bias=None, absmax_8bit=None, absmax_code=None, absmax_offset=None,
    ):  # fmt: skip
        weight = None
        if BITSANDBYTES.is_open and quant_type == "nf4":
            shape = torch.Size(shapeB)  # a list has no hash, and would find no plan
            state = bnb.QuantState(absmax, shape, None, blocksize, quant_type, A.dtype)
            if absmax_8bit is not None:
                state.absmax, state.offset, state.nested = absmax_8bit, absmax_offset, True
                state.state2 = bnb.QuantState(absmax, None, absmax_code, 256, None, torch.float32)
            # Every weight that is passed as [1, n] comes back transposed, one of a byte, too.
            weight = dequantize(B.reshape(1, -1), state)
        if weight is None:
            nested = (absmax_8bit, absmax_code, absmax_offset)
            return original(A, B, shapeB, absmax, blocksize, quant_type, bias, *nested)
        return torch.nn.functional.linear(A, weight.t(), bias)

    return product if original is None else functools.wraps(original)(product)


def make_fast_dequantize(original):
    """Return a stand-in for unsloth.kernels.utils.fast_dequantize, old (without dtype) or new."""
    n_parameters = 0 if original is None else len(parameters(original))

    def fast_dequantize(W, quant_state=None, out=None, use_global_buffer=False, dtype=None):
        if UNSLOTH.is_open and out is None:
            weight = dequantize(W, quant_state)
            if weight is not None:
                return weight
        return original(*(W, quant_state, out, use_global_buffer, dtype)[:n_parameters])

    return fast_dequantize if original is None else functools.wraps(original)(fast_dequantize)


def find_in_bitsandbytes():
    """Return the places to replace: the product only if its signature is the one we know."""
    found = [(bnb, "dequantize_4bit", make_dequantize_4bit)]
    ops = sys.modules.get(OPS)  # it cannot be imported where torch has no CUDA
    if ops is None and not torch.cuda.is_available():
        return found
    if parameters(getattr(ops, PRODUCT, None)) == parameters(make_product(None)):
        return [*found, (ops, PRODUCT, make_product)]
    log_once(f"{OPS}.{PRODUCT} is missing or unknown: bitsandbytes' forward passes stay its own.")
    return found


def find_in_unsloth():
    """Return each loaded module of Unsloth that has taken the name fast_dequantize."""
    original, found = original_of(sys.modules["unsloth.kernels.utils"].fast_dequantize), []
    known = parameters(make_fast_dequantize(None))
    if parameters(original) not in (known, known[:-1]):  # in August 2026 it had no dtype
        log_once("Unsloth's fast_dequantize has an unknown signature, and stays as it is.")
        return found
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("unsloth", "unsloth_zoo"):
            taken = getattr(module, "__dict__", {}).get("fast_dequantize")
            if taken is not None and original_of(taken) is original:
                found.append((module, "fast_dequantize", make_fast_dequantize))
    return found


def parameters(function):
    """Return each parameter's name, kind and default; None where inspect cannot read them."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [(each.name, each.kind, each.default) for each in found]


@functools.cache
def log_once(message):
    LOG.warning(message)


class Integration:
    """What is known of the contexts of one package."""

    def __init__(self):
        self.is_open = False  # stand-ins ask it at each call, and compiled code guards on it
        self.n_contexts = 0
        self.places = []  # (owner, name) of what was replaced


def renew_lock():
    """Make the lock anew: in a forked child, the thread that held it may be missing."""
    global LOCK
    LOCK = threading.RLock()  # reentrant: garbage that is collected meanwhile may be a context


if "LOCK" not in globals():  # a reload keeps all this, and contexts that are open
    renew_lock()
    ORIGINALS = weakref.WeakKeyDictionary()  # {our stand-in: the function that it stands for}
    BITSANDBYTES, UNSLOTH = Integration(), Integration()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: renew_lock())
