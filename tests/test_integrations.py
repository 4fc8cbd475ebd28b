"""bitsandbytes and Unsloth keep their results, to the bit, while they use nf4_triton."""

import copy
import functools
import importlib
import inspect
import multiprocessing
import re
import sys
import types
from unittest import mock

import bits
import bitsandbytes as bnb
import helpers
import pytest
import shared
import torch
import training
from helpers import GPU

OPS, PRODUCT = "bitsandbytes.backends.cuda.ops", "_dequant_linear_fallback"
STOCK = bnb.functional.dequantize_4bit


@pytest.fixture
def integrations(nf4, monkeypatch):
    """The module, with this session's nf4_triton."""
    module = importlib.import_module("nf4_integrations")
    monkeypatch.setattr(module, "nf4_triton", nf4)
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
def n_ours(nf4, calls, monkeypatch):
    """Returns how many outputs dequantize_nf4 has given so far; a refusal is none."""
    outputs, dequantize_nf4 = [], nf4.dequantize_nf4

    def dequantize_and_count(weight, quant_state):
        out = dequantize_nf4(weight, quant_state)
        outputs.append(out.shape)
        return out

    monkeypatch.setattr(nf4, "dequantize_nf4", dequantize_and_count)
    return lambda: len(outputs)


@pytest.fixture
def given(nf4, device):
    """A packed weight of more than 256 blocks, and its QuantState."""
    return nf4.quantized((300, 64), torch.float16, device)


LAYERS = {  # {what is unusual: how it is made}
    "more than 256 blocks": {"rows": 300},  # state2 has a second absmax from there on
    "plain absmax": {"nested": False},
    "a bias": {"bias": True},
    "its state in fp32": {"state": torch.float32},
    "a row that ends inside a byte": {"columns": 5, "rows": 3},
    "FP4": {"quant_type": "fp4"},  # which bitsandbytes dequantizes itself
}


def layer_of(device, columns=64, rows=128, quant_type="nf4", nested=True, bias=False, state=None):
    """A frozen Linear4bit that computes in bf16, unless its state says otherwise."""
    layer = bnb.nn.Linear4bit(columns, rows, bias, torch.bfloat16, nested, quant_type).to(device)
    if state:
        layer.weight.quant_state.dtype = state
    return layer


# bitsandbytes


def product_on_cpu(
    A, B, shapeB, absmax, blocksize, quant_type,
    bias=None, absmax_8bit=None, absmax_code=None, absmax_offset=None,
):  # fmt: skip
    """What bitsandbytes' product does on a GPU, by its operators for a CPU.

    On a GPU: test_a_product_keeps_stocks_bits asks the real one.
    """
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
        monkeypatch.setitem(sys.modules, OPS, types.SimpleNamespace(**{PRODUCT: product_on_cpu}))
    return sys.modules[OPS]


@pytest.mark.parametrize("tokens", [8, 2000] if GPU else [8])  # stock's fused kernel, its product
@pytest.mark.parametrize("what", LAYERS)
def test_outputs_and_gradients_keep_stocks_bits(device, integrations, n_ours, what, tokens):
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
        bits.assert_same_results(results(), expected)
    assert (n_ours() > 0) == (what != "FP4"), "at least the backward pass uses ours"


@helpers.each_dtype
@pytest.mark.parametrize("what", ["more than 256 blocks", "plain absmax", "a bias", "FP4"])
def test_a_product_keeps_stocks_bits(device, integrations, n_ours, calls, cuda_ops, what, dtype):
    """It is in A's dtype, whatever the state's is: this function gets no QuantState."""
    layer = layer_of(device, **LAYERS[what])
    state = layer.weight.quant_state
    A = torch.randn(3, 100, layer.in_features, device=device).to(dtype)
    bias = None if layer.bias is None else layer.bias.data.to(dtype)
    absmax, nested = state.absmax, {}
    if state.nested:
        absmax = state.state2.absmax
        nested = {"absmax_8bit": state.absmax, "absmax_offset": state.offset}
        nested["absmax_code"] = state.state2.code
    shape = list(state.shape)  # as bitsandbytes' operator hands it over
    given = (A, layer.weight.data, shape, absmax, state.blocksize, state.quant_type, bias)
    expected = getattr(cuda_ops, PRODUCT)(*given, **nested)
    with integrations.in_bitsandbytes():
        product = getattr(cuda_ops, PRODUCT)
        outs = [product(*given, **nested) for _ in range(2)]
    bits.assert_same_results([*outs, product(*given, **nested)], 3 * [expected])
    assert n_ours() == 2 * (what != "FP4"), "expected two calls of ours, within the context"
    assert calls.n_by_operator == (what != "FP4"), "the second call is a plan's"


def refused(state):
    """Return a copy of the state that ours refuses, and bitsandbytes dequantizes."""
    state = copy.deepcopy(state)
    state.state2.dtype = torch.float16
    return state


def test_stock_gets_what_ours_refuses_without_a_word(given, integrations, monkeypatch, said):
    theirs = mock.Mock(return_value="theirs")
    monkeypatch.setattr(bnb.functional, "dequantize_4bit", theirs)
    weight, state = given
    out = torch.empty(300, 64, dtype=torch.float16, device=weight.device)
    cases = [(refused(state), None), (None, None), (state, out)]
    with integrations.in_bitsandbytes():
        for each, filled in cases:
            assert bnb.functional.dequantize_4bit(weight, each, None, filled) == "theirs"
            theirs.assert_called_with(weight, each, None, filled, None, "fp4")
        kept = bnb.functional.dequantize_4bit(weight, state)
    bits.assert_same_results([kept], [STOCK(weight, state)])
    assert theirs.call_count == len(cases) and said() == []


def product_with_another_default(
    A, B, shapeB, absmax, blocksize, quant_type,
    bias=None, absmax_8bit=None, absmax_code=None, absmax_offset=0.0,
):  # fmt: skip
    return "theirs"


@pytest.mark.parametrize("theirs", [product_with_another_default, torch.add])  # without a signature
def test_an_unknown_product_stays_and_is_logged_once(
    given, integrations, n_ours, monkeypatch, said, theirs
):
    monkeypatch.setitem(sys.modules, OPS, types.SimpleNamespace(**{PRODUCT: theirs}))
    for _ in range(3):
        with integrations.in_bitsandbytes():
            assert getattr(sys.modules[OPS], PRODUCT) is theirs
            bnb.functional.dequantize_4bit(*given)
    assert n_ours() == 3, "the backward pass is ours"
    assert len(said()) == 1 and "forward passes" in said()[0]


# Where a context ends


class Tool:
    """Another package, which wraps bitsandbytes' function and later takes that back."""

    def __init__(self):
        self.found = bnb.functional.dequantize_4bit
        self.wrapper = functools.wraps(self.found)(lambda *given, **how: self.found(*given, **how))
        bnb.functional.dequantize_4bit = self.wrapper

    def undo(self):
        bnb.functional.dequantize_4bit = self.found


@pytest.mark.parametrize("is_wrapped_inside", [False, True])
def test_outside_a_context_nothing_of_ours_runs(
    given, integrations, n_ours, monkeypatch, is_wrapped_inside
):
    """Whatever a user kept, and whatever another tool did meanwhile."""
    monkeypatch.setattr(bnb.functional, "dequantize_4bit", STOCK)  # puts it back after the test
    tool = None if is_wrapped_inside else Tool()
    with integrations.in_bitsandbytes():
        tool = tool or Tool()
        kept = bnb.functional.dequantize_4bit  # as `from bitsandbytes.functional import` does
    assert bnb.functional.dequantize_4bit is tool.wrapper, "its patch is its own to take back"
    tool.undo()
    with integrations.in_bitsandbytes():
        pass
    assert bnb.functional.dequantize_4bit is STOCK
    for function in (kept, tool.wrapper, STOCK):
        bits.assert_same_results([function(*given)], [STOCK(*given)])
    assert n_ours() == 0, "ours ran outside a context"
    with integrations.in_bitsandbytes():
        bnb.functional.dequantize_4bit(*given)
    assert n_ours() == 1, "a later context works, and wraps nothing twice"


def test_an_error_in_a_context_puts_bitsandbytes_back(integrations):
    with pytest.raises(KeyError), integrations.in_bitsandbytes():
        raise KeyError
    assert bnb.functional.dequantize_4bit is STOCK


def test_a_forked_child_has_a_lock_of_its_own(integrations):
    """The thread that held the parent's lock may be missing there."""
    lock = integrations.LOCK
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=lambda: sys.exit(int(integrations.LOCK is lock)))
    child.start()
    child.join(30)
    assert child.exitcode == 0, "the child has its parent's lock"


@pytest.mark.parametrize("how", ["reloaded", "run twice"])
def test_a_context_survives_a_module_that_is_loaded_again(nf4, integrations, how):
    """As by autoreload, or by a cell that is run again."""
    with integrations.in_bitsandbytes():
        if how == "reloaded":
            importlib.reload(integrations)
        else:
            exec(compile(inspect.getsource(integrations), "again", "exec"), vars(integrations))
        integrations.nf4_triton = nf4
        with integrations.in_bitsandbytes():
            pass
        assert bnb.functional.dequantize_4bit is not STOCK
    assert bnb.functional.dequantize_4bit is STOCK


def compiled_step(layer):
    """step() gives a layer's output and the gradient of its input, by one compiled function."""
    torch._dynamo.reset()
    function = torch.compile(layer, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    x = torch.linspace(-1, 1, 512, device=layer.weight.device, dtype=torch.bfloat16).view(8, 64)
    x.requires_grad_()

    def step():
        out = function(x)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), x)]

    return step


@pytest.mark.parametrize("what", ["more than 256 blocks", "plain absmax", "its state in fp32"])
def test_compiled_code_uses_ours_only_within_a_context(device, integrations, calls, what):
    """Compiled code calls the operator. A later context, or one within it, compiles nothing."""
    layer = layer_of(device, **LAYERS[what])
    expected, step = compiled_step(layer)(), compiled_step(layer)
    with integrations.in_bitsandbytes():
        bits.assert_same_results(step(), expected)
        n_inside = calls.n_by_operator
    assert n_inside > 0, "ours did not run inside the context"
    bits.assert_same_results(step(), expected)
    assert calls.n_by_operator == n_inside, "ours ran after the context"
    with torch.compiler.set_stance("fail_on_recompile"):
        with integrations.in_bitsandbytes(), integrations.in_bitsandbytes():
            bits.assert_same_results(step(), expected)
        assert calls.n_by_operator == 2 * n_inside, "ours did not run in the next context"
        bits.assert_same_results(step(), expected)
    assert calls.n_by_operator == 2 * n_inside, "ours ran after the context"


OUTLIVING = {  # {what outlives the context: how it is made of a module without inputs}
    "exported": lambda module: torch.export.export(module, (), strict=False).module(),
    "exported strictly": lambda module: torch.export.export(module, (), strict=True).module(),
    "traced": lambda module: torch.jit.trace(module, ()),
}


@pytest.mark.parametrize("how", OUTLIVING)
def test_what_outlives_the_context_runs_nothing_of_ours(given, integrations, calls, how):
    class Module(torch.nn.Module):
        def forward(self):
            return bnb.functional.dequantize_4bit(*given)

    if how == "exported strictly" and torch.__version__ < (2, 11):
        pytest.skip("a strict export of this torch does not say that it exports")
    with integrations.in_bitsandbytes():
        made = OUTLIVING[how](Module())
    n_inside = calls.n_by_operator  # jit.trace runs what it traced once more
    bits.assert_same_results([made()], [STOCK(*given)])
    assert calls.n_by_operator == n_inside, "ours ran after the context"


# Training


def trained(model, ids):
    """The losses and gradients of two steps of a copy of the model, and its merged weights."""
    model, seen = copy.deepcopy(model).train(), []
    adapters = training.adapters_of(model)
    optimizer = torch.optim.SGD(adapters, lr=0.1)
    for _ in range(2):
        seen += [*training.train(model, optimizer, ids), *(adapter.grad for adapter in adapters)]
        assert all(adapter.grad.any() for adapter in adapters)
    merged = model.merge_and_unload()
    layers = [module for module in merged.modules() if isinstance(module, bnb.nn.Linear4bit)]
    return seen + [STOCK(layer.weight.data, layer.weight.quant_state) for layer in layers]


@pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit")
def test_training_and_merging_with_peft_keep_stocks_bits(device, integrations, n_ours):
    sizes = {"hidden_size": 64, "intermediate_size": 320, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "attn_implementation": "eager"}  # others add in any order
    model = training.build(sizes, device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(128, (2, 8), device=device)
    expected = trained(model, ids)
    with integrations.in_bitsandbytes():
        bits.assert_same_results(trained(model, ids), expected)
    assert n_ours() >= 2 * 4 + 7, "backward passes (q, k, v need none) and the merge"


# Unsloth


@pytest.fixture
def unsloth(monkeypatch):
    """Stands in for Unsloth's modules, and for two that have another right to the name.

    On a GPU: test_unsloth.py uses the real one.
    """
    called = mock.Mock(return_value="theirs")

    def theirs(W, quant_state=None, out=None, use_global_buffer=False, dtype=None):
        return called(W, quant_state, out, use_global_buffer, dtype)

    def module(name, function):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules[name].fast_dequantize = function
        return sys.modules[name]

    monkeypatch.setitem(sys.modules, "unsloth", types.ModuleType("unsloth"))
    monkeypatch.setitem(sys.modules, "unsloth.lazy", None)  # an import that was refused
    took = ["unsloth.kernels", "unsloth.kernels.utils", "unsloth.save", "unsloth_zoo.saving_utils"]
    others = {"unslothful": theirs, "unsloth.another": lambda W: "its own"}
    return types.SimpleNamespace(
        called=called,
        theirs=theirs,
        took=[module(name, theirs) for name in took],
        others=[(module(name, function), function) for name, function in others.items()],
        utils=sys.modules["unsloth.kernels.utils"],
    )


def test_each_module_of_unsloth_uses_ours_within_the_context(given, integrations, n_ours, unsloth):
    """And only those: another package keeps what it took, and another function stays."""
    weight, state = given
    expected, kept = STOCK(weight, state), []
    with integrations.in_unsloth():
        for module in unsloth.took:
            kept.append(module.fast_dequantize)
            out = module.fast_dequantize(weight, quant_state=state, use_global_buffer=True)
            row = module.fast_dequantize(weight.view(1, -1), state, None, True)
            bits.assert_same_results([out, row], [expected, expected.t()])
        assert all(module.fast_dequantize is function for module, function in unsloth.others)
        assert not unsloth.called.called, "Unsloth's own function ran"
        assert bnb.functional.dequantize_4bit is STOCK, "bitsandbytes has a context of its own"
    n_calls = n_ours()
    assert n_calls == 2 * len(unsloth.took) and len(set(kept)) == 1
    assert all(module.fast_dequantize is unsloth.theirs for module in unsloth.took)
    assert kept[0](weight, state) == "theirs" and n_ours() == n_calls


def test_unsloth_gets_what_ours_refuses_without_a_word(given, integrations, unsloth, said):
    weight, state = given
    fp4, int4 = copy.copy(state), types.SimpleNamespace(bits=4)
    fp4.quant_type = "fp4"
    out = torch.empty(300, 64, dtype=torch.float16, device=weight.device)
    states = [None, fp4, int4, [state.absmax], state.absmax, refused(state)]
    with integrations.in_unsloth():
        for each, filled in [*((each, None) for each in states), (state, out)]:
            found = unsloth.utils.fast_dequantize(weight, each, filled, True, dtype=torch.half)
            assert found == "theirs"
            unsloth.called.assert_called_with(weight, each, filled, True, torch.half)
    assert said() == []


def of_august_2026(*given):
    assert len(given) <= 4, "an argument too many"
    return "theirs"


of_august_2026.__signature__ = inspect.signature(
    lambda W, quant_state=None, out=None, use_global_buffer=False: None
)


def with_an_unknown_signature(W, state, buffer):
    return "theirs"


def test_an_unsloth_of_four_arguments_gets_four(given, integrations, n_ours, unsloth, monkeypatch):
    monkeypatch.setattr(unsloth.utils, "fast_dequantize", of_august_2026)
    with integrations.in_unsloth():
        bits.assert_same_results([unsloth.utils.fast_dequantize(*given)], [STOCK(*given)])
        assert unsloth.utils.fast_dequantize(given[0], None) == "theirs"
    assert n_ours() == 1


def test_an_unsloth_that_we_do_not_know_is_left_alone(integrations, unsloth, said):
    unsloth.utils.fast_dequantize = with_an_unknown_signature
    for _ in range(2):
        with integrations.in_unsloth():
            assert unsloth.utils.fast_dequantize is with_an_unknown_signature
    assert len(said()) == 1 and "unknown signature" in said()[0]


def test_without_unsloth_an_import_error_says_what_to_install(integrations, monkeypatch):
    monkeypatch.setitem(sys.modules, "unsloth", None)
    with pytest.raises(ImportError, match="^in_unsloth.* needs Unsloth.*`pip install unsloth`"):
        integrations.in_unsloth()


@pytest.mark.parametrize("context", ["in_bitsandbytes", "in_unsloth"])
def test_readmes_lines_open_one_context_and_close_it(integrations, monkeypatch, unsloth, context):
    readme = (shared.ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.S | re.M)
    (block,) = [block for block in blocks if f"with {context}():" in block]
    seen = []

    def are_stock():
        functions = bnb.functional.dequantize_4bit, unsloth.utils.fast_dequantize
        return functions[0] is STOCK, functions[1] is unsloth.theirs

    def model(x):
        seen.append(are_stock())
        return types.SimpleNamespace(loss=x.sum())

    exec(block, {"model": model, "batch": {"x": torch.ones(1, requires_grad=True)}})
    assert seen == [(context == "in_unsloth", context == "in_bitsandbytes")]
    assert are_stock() == (True, True)
