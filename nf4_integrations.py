"""Let bitsandbytes and Unsloth dequantize NF4 weights with nf4_triton, within a context."""

import contextlib
import functools
import inspect
import logging
import math
import os
import sys
import threading
import weakref

import nf4_triton
import torch
from bitsandbytes import functional as bnb

LOG = logging.getLogger("nf4_integrations")
LOCK = threading.RLock()  # reentrant: a handler of the log may open a context, or fork
ORIGINALS = weakref.WeakKeyDictionary()  # {our stand-in: the function that it stands for}
BROKEN = False  # whether nf4_triton failed in this process
OPS = "bitsandbytes.backends.cuda.ops"
PRODUCT = "_dequant_linear_fallback"  # bitsandbytes 0.50 multiplies by a dequantized weight there
log_once = functools.lru_cache(maxsize=256)(LOG.warning)


def in_bitsandbytes():
    """Return a context in which bitsandbytes dequantizes NF4 weights with nf4_triton.

    These are its backward passes, and on a GPU the forward passes that its fused kernel does not
    take. Results have the same bits, shapes and dtypes as without the context. What nf4_triton
    refuses, FP4 for example, bitsandbytes dequantizes itself.

    All threads see the context, until the last such context ends. A compiled function asks at each
    call whether one is open; its backward pass then does what its forward pass was compiled for.
    A program that is exported or traced in the context calls bitsandbytes' functions (if exported
    with strict=True, from torch 2.11 on); a CUDA graph that is captured there keeps our kernel.
    """
    return BITSANDBYTES.context()


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
    return UNSLOTH.context()


class Integration:
    """The functions of one package that have a stand-in of ours while a context is open."""

    def __init__(self, find):
        self.find = find  # returns [(owner, name, make)]; make(original) returns our stand-in
        self.is_open = False  # stand-ins ask it at each call, and compiled code guards on it
        self.contexts = {}  # {each open context: the thread that entered it}
        self.places = []  # (owner, name) of what was replaced

    @contextlib.contextmanager
    def context(self):
        context = object()
        try:
            with LOCK:
                if not self.contexts:
                    self.replace()
                self.contexts[context] = threading.get_ident()
            yield
        finally:
            with LOCK:
                self.contexts.pop(context, None)
                if not self.contexts:
                    self.restore()

    def replace(self):
        """Put our stand-ins into their places. Whatever may fail comes before the first of them."""
        if not has_device():
            log_once("There is no NVIDIA GPU, and Triton does not interpret: nothing was replaced.")
            return
        stand_ins, places = {}, []
        for owner, name, make in self.find():
            original = original_of(getattr(owner, name))  # another tool may have put ours back
            key = id(original)  # it need not have a hash
            if key not in stand_ins:
                stand_ins[key] = make(original)
                ORIGINALS[stand_ins[key]] = original
            places.append((owner, name, stand_ins[key]))
        self.places = [(owner, name) for owner, name, _ in places]
        self.is_open = True
        for owner, name, stand_in in places:
            setattr(owner, name, stand_in)

    def restore(self):
        """Put the originals back where a stand-in of ours still is; leave other tools' patches."""
        self.is_open = False
        for owner, name in self.places:
            current = getattr(owner, name, None)
            if original_of(current) is not current:
                setattr(owner, name, original_of(current))


def original_of(function):
    """Return what a stand-in of ours stands for, and any other function itself."""
    try:
        return ORIGINALS.get(function, function)
    except TypeError:  # it has no weak reference or no hash, so it is none of ours
        return function


def has_device():
    """Tell whether nf4_triton can run: on an NVIDIA GPU, or in Triton's interpreter."""
    return nf4_triton.INTERPRETED.value or bool(torch.version.cuda and torch.cuda.is_available())


def dequantize(weight, state):
    """Return nf4_triton's output, or None where the original function has to do the work."""
    if getattr(state, "quant_type", None) != "nf4":
        return None
    if torch.compiler.is_dynamo_compiling():  # compiled code cannot catch a refusal or a breakage
        if not is_accepted(weight, state):
            return None
        for blocksize in nf4_triton.BLOCKSIZES:  # a constant; the state's may be symbolic
            if blocksize == state.blocksize:
                if is_working(weight.device, state.dtype, blocksize, state.nested):
                    return nf4_triton.dequantize_nf4(weight, state)
        return None
    if BROKEN or torch.compiler.is_exporting() or torch.jit.is_tracing():
        return None  # what is exported or traced runs outside the context, too
    try:
        return nf4_triton.dequantize_nf4(weight, state)
    except (TypeError, ValueError):  # a refusal
        return None
    except torch.OutOfMemoryError:  # the original needs as much, and reports it; a retry may fit
        return None
    except Exception as error:
        with contextlib.suppress(Exception):  # fields that is_accepted cannot ask
            if is_accepted(weight, state):
                # What interrupted us, a caller's time limit for example, need not last.
                if is_working(weight.device, state.dtype, state.blocksize, state.nested):
                    log_once("nf4_triton failed, and will be tried again: %s", repr(error))
        return None


@torch.compiler.assume_constant_result  # a compiler calls it, and keeps what it returns
def is_working(device, dtype, blocksize, nested):
    """Tell whether nf4_triton can dequantize a small weight of this kind.

    Where it fails, the original functions do the work until the process ends, and the log says so.
    """
    global BROKEN
    if BROKEN or torch.compiler.is_exporting():  # which torch 2.11 always affirms in traced code
        return False
    try:
        ones = torch.ones(64, device=device, dtype=dtype)
        small = bnb.quantize_4bit(ones, None, None, blocksize, nested, "nf4")
    except Exception:  # bitsandbytes makes no such weight, so nothing was tried
        return False
    try:
        nf4_triton.dequantize_nf4(*small)
    except torch.OutOfMemoryError:
        return False
    except Exception as error:
        BROKEN = True
        log_once("nf4_triton failed, and is not used again in this process: %s", repr(error))
        return False
    return True


def is_accepted(weight, state):
    """Tell whether nf4_triton accepts a weight.

    Its `unpack` says so of the fields. Its `check` cannot be asked: torch.compile does not trace a
    question for a tensor's layout in a backward pass.
    """
    try:
        (weight, absmax, *others), kind = nf4_triton.unpack(weight, state)
    except (TypeError, ValueError):
        return False
    shape, _, blocksize, blocksize2 = kind
    if blocksize2 not in (0, *nf4_triton.BLOCKSIZES):
        return False
    if not (nf4_triton.INTERPRETED.value or (weight.is_cuda and torch.version.cuda)):
        return False
    n_weights = math.prod(shape)
    if weight.numel() * weight.element_size() != nf4_triton.cdiv(n_weights, 2):
        return False
    n_blocks = nf4_triton.cdiv(n_weights, blocksize)
    if blocksize2 == 0:
        rows = [(absmax, torch.float32, n_blocks)]
    else:
        sizes = 1, nf4_triton.cdiv(n_blocks, blocksize2), 256
        rows = [(absmax, torch.uint8, n_blocks)]
        rows += [(table, torch.float32, size) for table, size in zip(others, sizes)]
    for table, dtype, size in rows:
        if not isinstance(table, torch.Tensor) or table.device != weight.device:
            return False
        if table.dtype != dtype or table.numel() != size or not table.is_contiguous():
            return False
    return True


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
        if BITSANDBYTES.is_open and quant_type == "nf4" and len(shapeB) == 2:
            state = bnb.QuantState(absmax, shapeB, None, blocksize, quant_type, A.dtype)
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
    """Return a stand-in for unsloth.kernels.utils.fast_dequantize."""

    @functools.wraps(original)
    def fast_dequantize(W, quant_state=None, out=None, use_global_buffer=False, dtype=None):
        if UNSLOTH.is_open and out is None:
            weight = dequantize(W, quant_state)
            if weight is not None:
                return weight
        return original(W, quant_state, out, use_global_buffer, dtype)

    return fast_dequantize


def find_in_bitsandbytes():
    """Return the places to replace: the product only if its signature is the one we know."""
    found = [(bnb, "dequantize_4bit", make_dequantize_4bit)]
    ops = sys.modules.get(OPS)  # it cannot be imported where torch has no CUDA
    if ops is None and not torch.cuda.is_available():
        return found
    try:
        is_known = parameters(getattr(ops, PRODUCT)) == parameters(make_product(None))
    except Exception:  # it is missing, or inspect cannot read it
        is_known = False
    if is_known:
        return [*found, (ops, PRODUCT, make_product)]
    log_once(
        "This bitsandbytes has no %s.%s that we know: forward passes stay its own.", OPS, PRODUCT
    )
    return found


def parameters(function):
    """Return each parameter's name, kind and default."""
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


def find_in_unsloth():
    """Return each loaded module of Unsloth that has taken the name fast_dequantize."""
    original, found = original_of(sys.modules["unsloth.kernels.utils"].fast_dequantize), []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("unsloth", "unsloth_zoo"):
            taken = getattr(module, "__dict__", {}).get("fast_dequantize")
            if taken is not None and original_of(taken) is original:
                found.append((module, "fast_dequantize", make_fast_dequantize))
    return found


BITSANDBYTES, UNSLOTH = Integration(find_in_bitsandbytes), Integration(find_in_unsloth)


def end_contexts_of_lost_threads():
    """In a forked child, end the contexts of threads that only its parent has."""
    for integration in (BITSANDBYTES, UNSLOTH):
        contexts, own = integration.contexts, threading.get_ident()
        integration.contexts = {each: thread for each, thread in contexts.items() if thread == own}
        if not integration.contexts:
            integration.restore()
    LOCK.release()


if hasattr(os, "register_at_fork"):
    # A fork waits until no thread is between two replacements, so the child finds all or none.
    os.register_at_fork(
        before=LOCK.acquire,
        after_in_parent=LOCK.release,
        after_in_child=end_contexts_of_lost_threads,
    )
