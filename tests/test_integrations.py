"""bitsandbytes and Unsloth keep their results, to the bit, while they use nf4_triton."""

import contextlib
import copy
import functools
import importlib
import inspect
import os
import pickle
import re
import signal
import sys
import threading
import types
from concurrent import futures
from unittest import mock

import bitsandbytes as bnb
import helpers
import pytest
import shared
import torch
import training

GPU = torch.cuda.is_available()
OPS, PRODUCT = "bitsandbytes.backends.cuda.ops", "_dequant_linear_fallback"
STOCK = bnb.functional.dequantize_4bit


@pytest.fixture
def integrations(nf4, monkeypatch):
    """The module, as it is in a process that has not failed or logged anything yet."""
    module = importlib.import_module("nf4_integrations")
    monkeypatch.setattr(module, "nf4_triton", nf4)
    monkeypatch.setattr(module, "BROKEN", False)
    module.log_once.cache_clear()
    yield module
    module.log_once.cache_clear()


@pytest.fixture
def said(integrations, caplog):
    """Returns the lines that the integrations have logged so far."""

    def said():
        return [each.getMessage() for each in caplog.records if each.name == "nf4_integrations"]

    return said


@pytest.fixture
def ours(nf4, planned, monkeypatch):
    """Counts the outputs of dequantize_nf4; a refusal is none."""
    ours, dequantize_nf4 = mock.Mock(), nf4.dequantize_nf4

    def dequantize_and_count(weight, quant_state):
        out = dequantize_nf4(weight, quant_state)
        ours()
        return out

    monkeypatch.setattr(nf4, "dequantize_nf4", dequantize_and_count)
    return ours


def stock_product(
    A, B, shapeB, absmax, blocksize, quant_type,
    bias=None, absmax_8bit=None, absmax_code=None, absmax_offset=None,
):  # fmt: skip
    """What bitsandbytes' product does on a GPU, by its operators for a CPU."""
    ops = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        outer = (absmax, absmax_code, 256, torch.float32)
        absmax = ops.dequantize_blockwise.default(absmax_8bit, *outer) + absmax_offset
    weight = ops.dequantize_4bit.default(B, absmax, blocksize, quant_type, shapeB, A.dtype)
    return torch.nn.functional.linear(A, weight, bias)


@pytest.fixture
def cuda_ops(monkeypatch):
    """The module of bitsandbytes' product; on a CPU one that stands in for it."""
    if not GPU:
        stand_in = types.SimpleNamespace(**{PRODUCT: stock_product})
        monkeypatch.setitem(sys.modules, OPS, stand_in)
    return sys.modules[OPS]


def n_differing(nf4, results, expected):
    return sum(nf4.bits_differing(*pair) for pair in zip(results, expected, strict=True))


LAYERS = {  # {what is unusual: how it is made}
    "nothing": {},
    "a second absmax of state2": {"rows": 300},  # 300 blocks; the first serves 256
    "plain absmax": {"nested": False},
    "plain absmax with a leftover state2": {"nested": False, "leftover": True},
    "a bias": {"bias": True},
    "its state in fp32": {"state": torch.float32},
    "its state in fp16": {"state": torch.float16},
    "a single row": {"rows": 1},
    "a single byte": {"columns": 2, "rows": 1},
    "a row that ends inside a byte": {"columns": 5, "rows": 3},
    "square": {"rows": 64},
    "FP4": {"quant_type": "fp4"},  # which bitsandbytes dequantizes itself
}


def layer_of(
    device, columns=64, rows=128, quant_type="nf4", nested=True, bias=False, state=None,
    leftover=False,
):  # fmt: skip
    """A frozen Linear4bit that computes in bf16, unless its state says otherwise."""
    layer = bnb.nn.Linear4bit(columns, rows, bias, torch.bfloat16, nested, quant_type).to(device)
    if state:
        layer.weight.quant_state.dtype = state
    if leftover:
        layer.weight.quant_state.state2 = layer_of(device).weight.quant_state.state2
    return layer


@pytest.mark.parametrize("tokens", [1, 8, 64, 2000] if GPU else [8])
@pytest.mark.parametrize("what", sorted(set(LAYERS) - {"a single byte"}))  # stock's backward fails
def test_outputs_and_gradients_keep_stocks_bits(
    nf4, device, integrations, ours, cuda_ops, what, tokens
):
    layer = layer_of(device, **LAYERS[what])
    x = torch.randn(2, tokens, layer.in_features, device=device, dtype=torch.bfloat16)

    def results():
        leaves = [x.clone().requires_grad_(), *(p for p in layer.parameters() if p.requires_grad)]
        out = layer(leaves[0])
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
        with torch.no_grad():
            return [layer(x), out, *grads]

    expected = results()
    with integrations.in_bitsandbytes():
        assert n_differing(nf4, results(), expected) == 0
    assert ours.called == (what != "FP4"), "at least the backward pass uses ours"
    n_calls = ours.call_count
    assert n_differing(nf4, results(), expected) == 0, "after the context"
    assert ours.call_count == n_calls


def test_the_replaced_function_looks_like_stocks(integrations):
    """Tools read its signature, and processes pickle it by its name."""
    with integrations.in_bitsandbytes():
        replaced = bnb.functional.dequantize_4bit
        assert replaced is not STOCK
        assert inspect.signature(replaced) == inspect.signature(STOCK)
        assert pickle.loads(pickle.dumps(replaced)) is replaced


@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=str)
@pytest.mark.parametrize("what", LAYERS)
def test_a_product_of_many_tokens_keeps_stocks_bits_in_the_dtype_of_a(
    nf4, device, integrations, ours, cuda_ops, what, dtype
):
    """Whatever the state's dtype is: bitsandbytes gives this function no QuantState."""
    layer = layer_of(device, **LAYERS[what])
    state, packed = layer.weight.quant_state, layer.weight.data
    A = torch.randn(3, 100, layer.in_features, device=device).to(dtype)
    bias = None if layer.bias is None else layer.bias.data.to(dtype)
    absmax, nested = state.absmax, {}
    if state.nested:
        absmax = state.state2.absmax
        nested = {"absmax_8bit": state.absmax, "absmax_offset": state.offset}
        nested["absmax_code"] = state.state2.code
    given = (A, packed, state.shape, absmax, state.blocksize, state.quant_type, bias)
    if not GPU and layer.in_features % 64:  # stock errs there on a CPU with AVX512
        state.dtype = dtype
        expected = torch.nn.functional.linear(A, nf4.spec(packed, state), bias)
    else:
        expected = getattr(cuda_ops, PRODUCT)(*given, **nested)
    with integrations.in_bitsandbytes():
        out = getattr(cuda_ops, PRODUCT)(*given, **nested)
    assert nf4.bits_differing(out, expected) == 0
    assert ours.called == (what != "FP4")


def test_a_product_that_ours_refuses_is_stocks(device, integrations, cuda_ops, monkeypatch):
    theirs = mock.Mock(return_value="theirs")
    monkeypatch.setattr(cuda_ops, PRODUCT, functools.wraps(stock_product)(lambda *a: theirs(*a)))
    state = layer_of(device).weight.quant_state
    packed = torch.zeros(7, 1, dtype=torch.uint8, device=device)  # too few bytes
    given = (torch.ones(1, 64, device=device), packed, state.shape, state.absmax, 64, "nf4", None)
    with integrations.in_bitsandbytes():
        assert getattr(cuda_ops, PRODUCT)(*given) == "theirs"
    theirs.assert_called_once_with(*given, None, None, None)


REFUSED = ["state2 in fp16", "an offset in fp16", "a number as offset", "tables too long"]


def refused_states(state):
    """{what ours refuses: a state like it}, which bitsandbytes dequantizes."""
    states = {name: copy.deepcopy(state) for name in REFUSED}
    states["state2 in fp16"].state2.dtype = torch.float16  # this and the next: back from a CPU
    states["an offset in fp16"].offset = state.offset.half()
    states["a number as offset"].offset = 0.5
    long = states["tables too long"]
    long.absmax = torch.cat((long.absmax, long.absmax[:1]))
    long.state2.absmax = torch.cat((long.state2.absmax, long.state2.absmax[:1]))
    return states


def test_what_ours_refuses_goes_to_stock_in_silence(nf4, device, integrations, monkeypatch, said):
    theirs = mock.Mock(return_value="theirs")
    monkeypatch.setattr(bnb.functional, "dequantize_4bit", theirs)
    weight, state = nf4.quantized((64, 64), torch.float16, device)
    out = torch.empty(64, 64, dtype=torch.float16, device=device)
    with integrations.in_bitsandbytes():
        refused = [(each, None) for each in (None, *refused_states(state).values())]
        for given, filled in (*refused, (state, out)):
            assert bnb.functional.dequantize_4bit(weight, given, None, filled) == "theirs"
            theirs.assert_called_with(weight, given, None, filled)
        n_calls = theirs.call_count
        kept = bnb.functional.dequantize_4bit(weight, state)
    assert nf4.bits_differing(kept, helpers.expected(weight, state)) == 0
    assert theirs.call_count == n_calls and said() == []


FAILURES = {  # {what fails: (the error, whether it is tried once only and logged)}
    "no C compiler": (FileNotFoundError("/nonexistent"), True),
    "an unsupported GPU": (RuntimeError("no kernel image"), True),
    "a full disk": (OSError(28, "No space left on device"), True),
    "a refusal by its type": (TypeError("expected a QuantState"), False),
    "a refusal by its value": (ValueError("expected uint8"), False),
    "no memory at this moment": (torch.OutOfMemoryError("out of memory"), False),
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_breakage_is_logged_once_and_not_tried_again(
    nf4, device, integrations, monkeypatch, said, what
):
    error, is_breakage = FAILURES[what]
    ours = mock.Mock(side_effect=error)
    monkeypatch.setattr(nf4, "dequantize_nf4", ours)
    weight, state = nf4.quantized((64, 64), torch.float16, device)
    for _ in range(2):  # steps
        with integrations.in_bitsandbytes():
            for _ in range(3):  # layers
                out = bnb.functional.dequantize_4bit(weight, state)
                assert nf4.bits_differing(out, helpers.expected(weight, state)) == 0
    assert ours.call_count == (1 if is_breakage else 6)
    assert [repr(error) in line for line in said()] == ([True] if is_breakage else [])


def with_another_default(
    A, B, shapeB, absmax, blocksize, quant_type,
    bias=None, absmax_8bit=None, absmax_code=None, absmax_offset=0.0,
):  # fmt: skip
    return "theirs"


def with_a_keyword(
    A, B, shapeB, absmax, blocksize, quant_type,
    bias=None, absmax_8bit=None, absmax_code=None, absmax_offset=None, *, out=None,
):  # fmt: skip
    return "theirs"


def unreadable(error):
    """A function whose signature `inspect` cannot read."""

    class Unreadable:
        @property
        def __signature__(self):
            raise error

        def __call__(self, *given):
            return "theirs"

    return Unreadable()


UNKNOWN = {
    "no product": {},
    "other arguments": {PRODUCT: lambda A, weight, bias=None: "theirs"},
    "another default": {PRODUCT: with_another_default},
    "a keyword-only argument": {PRODUCT: with_a_keyword},
    "a signature that raises ValueError": {PRODUCT: unreadable(ValueError("no signature"))},
    "a signature that raises TypeError": {PRODUCT: unreadable(TypeError("no function"))},
    "no function": {PRODUCT: 3},
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_an_unknown_product_is_left_alone_and_that_is_logged_once(
    nf4, device, integrations, ours, monkeypatch, said, what
):
    monkeypatch.setitem(sys.modules, OPS, types.SimpleNamespace(**UNKNOWN[what]))
    weight, state = nf4.quantized((32, 64), torch.float16, device)
    for _ in range(3):
        with integrations.in_bitsandbytes():
            assert vars(sys.modules[OPS]) == UNKNOWN[what]
            bnb.functional.dequantize_4bit(weight, state)
    assert bnb.functional.dequantize_4bit is STOCK
    assert ours.call_count == 3, "the backward pass is ours"
    assert len(said()) == 1 and "forward passes" in said()[0]


def test_a_context_that_cannot_begin_replaces_nothing(integrations, monkeypatch):
    monkeypatch.setattr(integrations.BITSANDBYTES, "find", mock.Mock(side_effect=KeyError))
    with pytest.raises(KeyError), integrations.in_bitsandbytes():
        raise AssertionError("it began")
    assert bnb.functional.dequantize_4bit is STOCK and not integrations.BITSANDBYTES.is_open


def test_a_context_without_a_device_changes_nothing_and_says_so_once(
    nf4, device, integrations, ours, monkeypatch, said
):
    monkeypatch.setattr(nf4, "INTERPRETED", nf4.tl.constexpr(False))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    weight, state = nf4.quantized((32, 64), torch.float16, device)
    for _ in range(2):
        with integrations.in_bitsandbytes():
            assert bnb.functional.dequantize_4bit is STOCK
            out = bnb.functional.dequantize_4bit(weight, state)
    assert nf4.bits_differing(out, helpers.expected(weight, state)) == 0
    assert not ours.called and len(said()) == 1


class Tool:
    """Another package, which wraps bitsandbytes' function and later takes that back."""

    def __init__(self):
        self.found = bnb.functional.dequantize_4bit
        self.wrapper = functools.wraps(self.found)(lambda *given, **how: self.found(*given, **how))
        bnb.functional.dequantize_4bit = self.wrapper

    def undo(self):
        bnb.functional.dequantize_4bit = self.found


def kept_by_import(context):
    """`from bitsandbytes.functional import dequantize_4bit` within the context."""
    with context():
        return [bnb.functional.dequantize_4bit]


def wrapped_inside_and_undone_outside(context):
    with context():
        tool = Tool()
    assert bnb.functional.dequantize_4bit is tool.wrapper, "its patch is its own to take back"
    tool.undo()
    return [tool.wrapper, bnb.functional.dequantize_4bit]


def undone_and_entered_again(context):
    kept = wrapped_inside_and_undone_outside(context)
    with context():
        kept.append(bnb.functional.dequantize_4bit)
    assert bnb.functional.dequantize_4bit is STOCK
    return kept


def undone_in_the_next_context(context):
    with context():
        tool = Tool()
    with context():
        assert bnb.functional.dequantize_4bit is not tool.wrapper
        tool.undo()
    assert bnb.functional.dequantize_4bit is STOCK
    return [tool.wrapper]


def wrapped_before_and_undone_inside(context):
    tool = Tool()
    with context():
        kept = bnb.functional.dequantize_4bit
        tool.undo()
    assert bnb.functional.dequantize_4bit is STOCK
    return [kept, tool.wrapper]


def replaced_by_an_object_without_a_hash(context):
    class Unhashable:
        __slots__, __hash__ = (), None

        def __call__(self, *given):
            return STOCK(*given)

    with context():
        bnb.functional.dequantize_4bit = Unhashable()
    with context():
        pass
    assert isinstance(bnb.functional.dequantize_4bit, Unhashable)
    return []


def wrapped_before_and_undone_after(context):
    tool = Tool()
    with context():
        kept = bnb.functional.dequantize_4bit
    assert bnb.functional.dequantize_4bit is tool.wrapper
    tool.undo()
    return [kept, tool.wrapper]


STORIES = [kept_by_import, wrapped_inside_and_undone_outside, undone_and_entered_again]
STORIES += [undone_in_the_next_context, wrapped_before_and_undone_inside]
STORIES += [wrapped_before_and_undone_after, replaced_by_an_object_without_a_hash]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_outside_every_context_nothing_of_ours_runs(
    nf4, device, integrations, ours, monkeypatch, story
):
    """Whatever a user kept, and whatever another tool did meanwhile."""
    monkeypatch.setattr(bnb.functional, "dequantize_4bit", STOCK)  # puts it back after the test
    weight, state = nf4.quantized((32, 64), torch.float16, device)
    expected = helpers.expected(weight, state)
    for function in [*story(integrations.in_bitsandbytes), bnb.functional.dequantize_4bit]:
        assert nf4.bits_differing(function(weight, state), expected) == 0
    assert not ours.called
    with integrations.in_bitsandbytes():
        bnb.functional.dequantize_4bit(weight, state)
    assert ours.call_count == 1, "a later context works, and wraps nothing twice"


def crosswise(context):
    first, second = context(), context()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert bnb.functional.dequantize_4bit is not STOCK, "the second is still open"
    second.__exit__(None, None, None)


def in_threads(context):
    def enter(_):
        for _ in range(30):
            with context():
                assert bnb.functional.dequantize_4bit is not STOCK

    with futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(enter, range(4)))


def with_an_error(context):
    with contextlib.suppress(KeyError), context():
        raise KeyError


def as_a_decorator(context):
    @context()
    def step():
        assert bnb.functional.dequantize_4bit is not STOCK

    step()
    step()


WAYS = [crosswise, in_threads, with_an_error, as_a_decorator]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_last_context_puts_bitsandbytes_back(integrations, cuda_ops, way):
    product = getattr(cuda_ops, PRODUCT)
    way(integrations.in_bitsandbytes)
    assert bnb.functional.dequantize_4bit is STOCK and getattr(cuda_ops, PRODUCT) is product


def exit_status_of_child(action):
    """0 where the action ended well in a fork; a fork that hangs is killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_while_a_thread_enters_a_context_can_use_contexts(
    integrations, cuda_ops, monkeypatch
):
    """The child has no such thread: its own last context puts bitsandbytes back."""
    product, find = getattr(cuda_ops, PRODUCT), integrations.BITSANDBYTES.find
    is_entering, can_end = threading.Event(), threading.Event()

    def find_slowly():
        is_entering.set()
        can_end.wait(0.5)  # while the fork begins
        return find()

    def enter():
        with integrations.in_bitsandbytes():
            can_end.wait(60)

    def use():
        integrations.BITSANDBYTES.find = find
        assert bnb.functional.dequantize_4bit is STOCK
        with integrations.in_bitsandbytes():  # CUDA cannot be used in a fork
            assert GPU or bnb.functional.dequantize_4bit is not STOCK
        assert bnb.functional.dequantize_4bit is STOCK and getattr(cuda_ops, PRODUCT) is product

    monkeypatch.setattr(integrations.BITSANDBYTES, "find", find_slowly)
    thread = threading.Thread(target=enter)
    thread.start()
    is_entering.wait(60)
    try:
        assert exit_status_of_child(use) == 0
        assert bnb.functional.dequantize_4bit is not STOCK, "the parent's thread is in its context"
    finally:
        can_end.set()
        thread.join()
    assert bnb.functional.dequantize_4bit is STOCK


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_within_a_context_stays_in_it(integrations):
    def leave():
        assert bnb.functional.dequantize_4bit is not STOCK
        context.__exit__(None, None, None)
        assert bnb.functional.dequantize_4bit is STOCK

    context = integrations.in_bitsandbytes()
    with context:
        assert exit_status_of_child(leave) == 0
        assert bnb.functional.dequantize_4bit is not STOCK


def test_a_layer_is_traced_vmapped_and_differentiated_as_without_us(
    nf4, device, integrations, said
):
    layer = layer_of(device, rows=32).requires_grad_(False)
    x = torch.randn(5, 3, 64, device=device, dtype=torch.bfloat16)
    scale = torch.tensor(2.0, device=device)

    def results():
        yield torch.jit.trace(layer, (x,))(x)
        yield torch.func.vmap(layer)(x)
        yield torch.func.grad(lambda scale: (layer(x) * scale).float().sum())(scale)

    expected = list(results())
    with integrations.in_bitsandbytes():
        assert n_differing(nf4, list(results()), expected) == 0
    assert said() == []


@pytest.fixture
def n_runs(nf4, monkeypatch):
    """Returns how often the operator's body ran, which compiled code calls."""
    run = mock.Mock(wraps=nf4.run_operator)
    monkeypatch.setattr(nf4, "run_operator", run)
    return lambda: run.call_count


def compiled(layer, x):
    """step() gives a layer's output and the gradient of x, by one compiled function."""
    torch._dynamo.reset()
    function = torch.compile(layer, fullgraph=True, backend="inductor" if GPU else "aot_eager")

    def step():
        out = function(x)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), x)]

    return step


def refused(name):
    """A function that makes a layer with such a state."""

    def make(device):
        layer = layer_of(device)
        layer.weight.quant_state = refused_states(layer.weight.quant_state)[name]
        return layer

    return make


COMPILED = {  # {what is unusual: (a layer on a device, whether ours takes it in compiled code)}
    "nothing": (layer_of, True),
    "a second absmax of state2": (functools.partial(layer_of, rows=300), True),
    "plain absmax": (functools.partial(layer_of, nested=False), True),
    "its state in fp32": (functools.partial(layer_of, state=torch.float32), True),
    "FP4": (functools.partial(layer_of, quant_type="fp4"), False),
    "a leftover state2": (functools.partial(layer_of, nested=False, leftover=True), False),
    "state2 in fp16": (refused("state2 in fp16"), False),
    "tables too long": (refused("tables too long"), False),
}


@pytest.mark.parametrize("what", COMPILED)
def test_a_compiled_layer_keeps_stocks_bits(nf4, device, integrations, n_runs, what):
    make, is_ours = COMPILED[what]
    layer = make(device)
    x = torch.randn(8, layer.in_features, device=device, dtype=torch.bfloat16, requires_grad=True)
    expected = compiled(layer, x)()
    with integrations.in_bitsandbytes():
        assert n_differing(nf4, compiled(layer, x)(), expected) == 0
    assert bool(n_runs()) == is_ours


@pytest.mark.parametrize("what", REFUSED)
def test_a_compiled_dequantization_of_what_ours_refuses_is_stocks(
    nf4, device, integrations, n_runs, what
):
    """Some of these states no layer takes, but merges and adapters dequantize them."""
    weight, state = nf4.quantized((128, 64), torch.float16, device)
    given = weight, refused_states(state)[what]
    expected = STOCK(*given)
    with integrations.in_bitsandbytes():
        function = bnb.functional.dequantize_4bit
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert nf4.bits_differing(function(*given), expected) == 0
    assert n_runs() == 0


def test_what_was_compiled_in_a_context_runs_nothing_of_ours_outside(
    nf4, device, integrations, n_runs
):
    """And the next context, or one within it, compiles nothing again."""
    layer = layer_of(device)
    x = torch.randn(8, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    expected, step = compiled(layer, x)(), compiled(layer, x)
    with integrations.in_bitsandbytes():
        assert n_differing(nf4, step(), expected) == 0
        n_inside = n_runs()
    assert n_inside > 0
    assert n_differing(nf4, step(), expected) == 0
    assert n_runs() == n_inside
    with torch.compiler.set_stance("fail_on_recompile"):
        with integrations.in_bitsandbytes(), integrations.in_bitsandbytes():
            assert n_differing(nf4, step(), expected) == 0
        assert n_runs() == 2 * n_inside
        assert n_differing(nf4, step(), expected) == 0
    assert n_runs() == 2 * n_inside


def test_a_function_kept_from_a_context_and_compiled_outside_is_stocks(
    nf4, device, integrations, n_runs
):
    weight, state = nf4.quantized((32, 64), torch.float16, device)
    with integrations.in_bitsandbytes():
        kept = torch.compile(bnb.functional.dequantize_4bit, fullgraph=True, backend="aot_eager")
    expected = helpers.expected(weight, state)
    assert nf4.bits_differing(kept(weight, state), expected) == 0 and n_runs() == 0
    with integrations.in_bitsandbytes():
        assert nf4.bits_differing(kept(weight, state), expected) == 0 and n_runs() == 1


def test_a_compiled_layer_on_the_cpu_is_stocks_where_triton_compiles_for_a_gpu(
    nf4, integrations, monkeypatch, n_runs
):
    """Ours refuses such a weight, and compiled code cannot catch that."""
    monkeypatch.setattr(nf4, "INTERPRETED", nf4.tl.constexpr(False))
    monkeypatch.setattr(integrations, "has_device", lambda: True)
    layer = layer_of("cpu")
    x = torch.randn(5, 64, dtype=torch.bfloat16, requires_grad=True)
    expected = compiled(layer, x)()
    with integrations.in_bitsandbytes():
        assert bnb.functional.dequantize_4bit is not STOCK
        assert n_differing(nf4, compiled(layer, x)(), expected) == 0
    assert n_runs() == 0


def test_a_compiled_training_step_keeps_stocks_bits(nf4, device, integrations, n_runs):
    layers = torch.nn.Sequential(layer_of(device), layer_of(device, 128, 300))
    n_tokens = 2000 if GPU else 8
    x = torch.randn(n_tokens, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    expected = compiled(layers, x)()
    with integrations.in_bitsandbytes():
        assert n_differing(nf4, compiled(layers, x)(), expected) == 0
    assert n_runs() >= 2


def trained(model, ids):
    """The losses and gradients of two steps of a copy of the model, and its merged weights."""
    model, seen = copy.deepcopy(model).train(), []
    adapters = training.adapters_of(model)
    optimizer = torch.optim.SGD(adapters, lr=0.1)
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), *(adapter.grad for adapter in adapters)]
        assert all(adapter.grad.any() for adapter in adapters)
        optimizer.zero_grad(set_to_none=True)
    merged = model.merge_and_unload()
    layers = [module for module in merged.modules() if isinstance(module, bnb.nn.Linear4bit)]
    return seen + [STOCK(layer.weight.data, layer.weight.quant_state) for layer in layers]


@pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit")
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_training_and_merging_by_transformers_and_peft_keep_stocks_bits(
    nf4, device, integrations, ours, checkpointed
):
    sizes = {"hidden_size": 64, "intermediate_size": 320, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "attn_implementation": "eager"}  # others add in any order
    model = training.build(sizes, device)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(128, (2, 8), device=device)
    expected = trained(model, ids)
    with integrations.in_bitsandbytes():
        assert n_differing(nf4, trained(model, ids), expected) == 0
        assert ours.call_count >= 2 * 4 + 7, "backward passes (q, k, v need none) and the merge"


@pytest.fixture
def unsloth(monkeypatch):
    """Stands in for Unsloth's modules; each has taken the name fast_dequantize."""

    def theirs(W, quant_state=None, out=None, use_global_buffer=False):
        return fast_dequantize(W, quant_state, out, use_global_buffer=use_global_buffer)

    fast_dequantize = mock.Mock(return_value="theirs")
    names = ["unsloth.kernels", "unsloth.kernels.utils", "unsloth.kernels.fast_lora"]
    names += ["unsloth.save", "unsloth_zoo.saving_utils"]
    found = types.SimpleNamespace(mock=fast_dequantize, theirs=theirs, modules=[])
    for name in ("unsloth", "unsloth_zoo", *names, "unslothful", "another_package"):
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
        if name in (*names, "unslothful"):
            module.fast_dequantize = theirs
        if name in names:
            found.modules.append(module)
    sys.modules["another_package"].fast_dequantize = "its own"
    monkeypatch.setitem(sys.modules, "unsloth.lazy", None)  # an import that was refused
    found.utils, found.others = found.modules[1], [sys.modules["unslothful"]]
    return found


def test_each_module_of_unsloth_uses_ours_within_the_context(
    nf4, device, integrations, ours, unsloth
):
    """And only those: another package keeps what it took."""
    weight, state = nf4.quantized((300, 64), torch.float16, device)
    expected = nf4.spec(weight, state)
    kept = []
    with integrations.in_unsloth():
        for module in unsloth.modules:
            kept.append(module.fast_dequantize)
            for given in ((weight, state), (weight, state, None), (weight, state, None, True)):
                assert nf4.bits_differing(module.fast_dequantize(*given), expected) == 0
            how = {"quant_state": state, "use_global_buffer": True}
            assert nf4.bits_differing(module.fast_dequantize(weight, **how), expected) == 0
            out = module.fast_dequantize(weight.view(1, -1), state)
            assert nf4.bits_differing(out, expected.t()) == 0, "a [1, n] weight, transposed"
        assert unsloth.others[0].fast_dequantize is unsloth.theirs
        assert not unsloth.mock.called
        assert bnb.functional.dequantize_4bit is STOCK, "bitsandbytes has a context of its own"
    n_calls = ours.call_count
    assert n_calls == 5 * len(unsloth.modules) and len(set(kept)) == 1
    assert all(module.fast_dequantize is unsloth.theirs for module in unsloth.modules)
    assert kept[0](weight, state) == "theirs" and ours.call_count == n_calls


def test_what_ours_does_not_take_stays_unsloths(
    nf4, device, integrations, monkeypatch, unsloth, said
):
    weight, state = nf4.quantized((32, 64), torch.float16, device)
    fp4, int4 = copy.copy(state), types.SimpleNamespace(bits=4)
    fp4.quant_type = "fp4"
    out = torch.empty(32, 64, dtype=torch.float16, device=device)
    scales = torch.ones(32, 1, device=device)
    states = [None, fp4, int4, [state.absmax, state.shape], scales, *refused_states(state).values()]
    with integrations.in_unsloth():
        assert unsloth.utils.fast_dequantize(weight) == "theirs"
        for each in states:
            assert unsloth.utils.fast_dequantize(weight, each) == "theirs"
            unsloth.mock.assert_called_with(weight, each, None, use_global_buffer=False)
        filled = unsloth.utils.fast_dequantize(weight, state, out=out, use_global_buffer=True)
        assert filled == "theirs"
        unsloth.mock.assert_called_with(weight, state, out, use_global_buffer=True)
    assert said() == []


def test_without_unsloth_an_import_error_says_what_to_install(integrations, monkeypatch):
    monkeypatch.setitem(sys.modules, "unsloth", None)
    for name in ("unsloth.kernels", "unsloth.kernels.utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match="^in_unsloth.* needs Unsloth.*`pip install unsloth`"):
        integrations.in_unsloth()


def test_unsloth_without_fast_dequantize_is_an_import_error(integrations, unsloth):
    del unsloth.utils.fast_dequantize
    with pytest.raises(ImportError, match="fast_dequantize"):
        integrations.in_unsloth()


def blocks_of_readme(context):
    """README's blocks of Python that use the context, below "Use it"."""
    readme = (shared.ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("\n## Use it\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```", section, re.S | re.M)
    return [block for block in blocks if "nf4_integrations" in block and f"{context}(" in block]


@pytest.mark.parametrize("context", ["in_bitsandbytes", "in_unsloth"])
def test_readmes_lines_train_with_ours(
    nf4, device, integrations, ours, monkeypatch, unsloth, context
):
    """With a model of one layer; its loss asks bitsandbytes' backward pass and Unsloth's name."""
    layer = layer_of(device, rows=300, state=torch.bfloat16)
    x = torch.randn(4, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    unsloth.mock.side_effect = lambda W, state, *_, **__: STOCK(W, state)
    fast_lora = sys.modules["unsloth.kernels.fast_lora"]

    def model(**batch):
        weight = fast_lora.fast_dequantize(layer.weight, layer.weight.quant_state)
        loss = (layer(batch["x"]) + batch["x"] @ weight.t()).float().square().sum()
        return types.SimpleNamespace(loss=loss)

    model(x=x).loss.backward()
    expected, x.grad = x.grad, None
    blocks = blocks_of_readme(context)
    assert blocks, f"README shows {context}"
    for block in blocks:
        n_calls = ours.call_count
        monkeypatch.setitem(sys.modules, "nf4_triton", nf4)
        exec(block, {"model": model, "batch": {"x": x}, "optimizer": mock.Mock(), "torch": torch})
        assert ours.call_count > n_calls
        assert nf4.bits_differing(x.grad, expected) == 0
        x.grad = None
        assert bnb.functional.dequantize_4bit is STOCK
        assert fast_lora.fast_dequantize is unsloth.theirs


def train_by_unsloth():
    """Unsloth's fused MLP, QKV and O, forward and backward, without the context and within it."""
    from unsloth.kernels import fast_lora

    nf4 = shared.load()
    from nf4_integrations import in_unsloth

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1}
    layer = training.build(sizes, "cuda").get_submodule("base_model.model.model.layers.0")
    x = torch.randn(2, 64, 512, device="cuda", dtype=torch.bfloat16)
    mlp, attention = layer.mlp, layer.self_attn
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    cases = {  # {name: (function of x, its adapters, at least so many calls of ours)}
        "MLP": (
            lambda x: [fast_lora.apply_lora_mlp_swiglu(mlp, x, inplace=False)],
            training.adapters_of(mlp),
            5,
        ),
        "QKV": (
            lambda x: fast_lora.apply_lora_qkv(attention, x, inplace=False),
            [adapter for each in projections for adapter in training.adapters_of(each)],
            5,
        ),
        "O": (
            lambda x: [fast_lora.apply_lora_o(attention, x)],
            training.adapters_of(attention.o_proj),
            2,
        ),
    }
    ours = nf4.dequantize_nf4 = mock.Mock(wraps=nf4.dequantize_nf4)
    for name, (function, adapters, least) in cases.items():

        def results():
            leaves = [x.clone().requires_grad_(), *adapters]
            outs = function(leaves[0])
            loss = sum(out.float().square().sum() for out in outs)
            return [*(out.detach() for out in outs), *torch.autograd.grad(loss, leaves)]

        expected = results()
        assert not ours.called, name
        with in_unsloth():
            assert n_differing(nf4, results(), expected) == 0, name
        assert ours.call_count >= least, f"{name}: ours was called {ours.call_count} times"
        ours.reset_mock()
        assert n_differing(nf4, results(), expected) == 0, f"{name}, after the context"
        assert not ours.called, name


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="needs unsloth")
def test_training_by_unsloth_keeps_its_bits(tmp_path):
    """In a process of its own: Unsloth changes transformers and peft when it is imported."""
    command = "import unsloth, test_integrations; test_integrations.train_by_unsloth()"
    environment = {"UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_COMPILE_LOCATION": str(tmp_path)}
    done = helpers.in_a_process(command, **environment)
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_errors_for_a_weight_back_from_a_cpu_say_what_mends_it(nf4, device):
    """And that does mend it: bitsandbytes' way back rounds absmax to fp16, and ours would not."""
    weight, state = nf4.quantized((64, 64), torch.float16, "cpu")
    weight, state = bnb.functional._convert_weight_packed_for_cpu(weight, state)
    weight, state = bnb.functional._convert_weight_packed_for_cpu_inverse(weight, state)
    weight = weight.to(device)
    state.to(device)
    for _ in range(2):  # at most two fields are as ours refuses them
        with contextlib.suppress(ValueError):
            nf4.dequantize_nf4(weight, state)
            break
        with pytest.raises(ValueError, match="set (quant_state.*)$") as caught:
            nf4.dequantize_nf4(weight, state)
        exec(str(caught.value).rpartition(" set ")[2], {"quant_state": state, "torch": torch})
    out = nf4.dequantize_nf4(weight, state)
    assert nf4.bits_differing(out, helpers.expected(weight, state)) == 0
