"""Programs stay right, to the bit, in which bitsandbytes dequantizes by ours."""

import contextlib
import copy
import importlib.util
import inspect
import pickle
import re
import sys
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
OPS, PRIVATE = "bitsandbytes.backends.cuda.ops", "_dequant_linear_fallback"
STOCK = bnb.functional.dequantize_4bit


def n_differing(nf4, results, wanted):
    return sum(nf4.bits_differing(*pair) for pair in zip(results, wanted, strict=True))


@pytest.fixture
def ours(nf4, planned, monkeypatch):
    ours = mock.Mock(wraps=nf4.dequantize_nf4)
    monkeypatch.setattr(nf4, "dequantize_nf4", ours)
    return ours


@pytest.fixture
def cuda_ops(monkeypatch):
    """The module of bitsandbytes' product; on a CPU one that stands in for it."""

    def product(
        A, B, shapeB, absmax, blocksize, quant_type,
        bias=None, absmax_8bit=None, absmax_code=None, absmax_offset=None,
    ):  # fmt: skip
        raise NotImplementedError

    if not GPU:
        monkeypatch.setitem(sys.modules, OPS, types.SimpleNamespace(**{PRIVATE: product}))
    return sys.modules[OPS]


LAYERS = {  # {what is unusual: how it is made}
    "nothing": {},
    "plain absmax": {"nested": False},
    "a bias": {"bias": True},
    "its state in fp32": {"state": torch.float32},
    "its state in fp16": {"state": torch.float16},
    "a single row": {"rows": 1},
    "a single byte": {"columns": 2, "rows": 1},
    "a row that ends inside a byte": {"columns": 5, "rows": 3},
    "square": {"rows": 64},
    "FP4": {"quant_type": "fp4"},  # which bitsandbytes dequantizes
}


def layer_of(device, columns=64, rows=128, quant_type="nf4", nested=True, bias=False, state=None):
    """A frozen Linear4bit that computes in bf16, unless that is what its state says."""
    layer = bnb.nn.Linear4bit(columns, rows, bias, torch.bfloat16, nested, quant_type).to(device)
    if state:
        layer.weight.quant_state.dtype = state
    return layer


@pytest.mark.parametrize("tokens", [1, 8, 64, 2000] if GPU else [8])
@pytest.mark.parametrize("what", sorted(set(LAYERS) - {"a single byte"}))  # stock's backward fails
def test_outputs_and_gradients_are_stocks_to_the_bit(nf4, device, ours, cuda_ops, what, tokens):
    layer = layer_of(device, **LAYERS[what])
    x = torch.randn(2, tokens, layer.in_features, device=device, dtype=torch.bfloat16)

    def results():
        leaves = [x.clone().requires_grad_(), *(p for p in layer.parameters() if p.requires_grad)]
        out = layer(leaves[0])
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
        with torch.no_grad():
            return [layer(x), out, *grads]

    wanted = results()
    with nf4.in_bitsandbytes():
        replaced = bnb.functional.dequantize_4bit
        assert inspect.signature(replaced) == inspect.signature(STOCK)
        assert pickle.loads(pickle.dumps(replaced)) is replaced
        assert n_differing(nf4, results(), wanted) == 0
    assert n_differing(nf4, results(), wanted) == 0, "and after it"
    returned = [call for call in ours.call_args_list if call.args[1].quant_type == "nf4"]
    assert bool(returned) == (what != "FP4"), "the backward pass, at least"


@pytest.mark.parametrize("dtype", helpers.DTYPES)
@pytest.mark.parametrize("what", LAYERS)
def test_the_product_of_many_tokens_is_theirs_in_as_dtype(nf4, device, ours, cuda_ops, what, dtype):
    """Whatever the state's dtype is; bitsandbytes gives this function no QuantState."""
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
    state.dtype = dtype
    want = torch.nn.functional.linear(A, nf4.spec(packed, state), bias)
    if GPU:
        want = getattr(cuda_ops, PRIVATE)(*given, **nested)
    with nf4.in_bitsandbytes():
        got = getattr(cuda_ops, PRIVATE)(*given, **nested)
    assert nf4.bits_differing(got, want) == 0
    assert ours.called or what == "FP4"


def test_what_ours_refuses_is_theirs(nf4, device, monkeypatch):
    theirs = mock.Mock(return_value="theirs")
    monkeypatch.setattr(bnb.functional, "dequantize_4bit", theirs)
    weight, state = nf4.quantized((64, 64), torch.float16, device)
    refused = copy.deepcopy(state)
    refused.state2.dtype = torch.float16  # as a weight has it that was on a CPU
    of_python = copy.deepcopy(state)
    of_python.offset = 0.5
    out = torch.empty(64, 64, dtype=torch.float16, device=device)
    with nf4.in_bitsandbytes():
        for given, filled in ((None, None), (refused, None), (of_python, None), (state, out)):
            assert bnb.functional.dequantize_4bit(weight, given, None, filled) == "theirs"
            theirs.assert_called_with(weight, given, None, filled)
        no_compiler = mock.Mock(side_effect=FileNotFoundError("gcc"))
        monkeypatch.setattr(nf4, "launch", no_compiler)
        assert bnb.functional.dequantize_4bit(weight, state) == "theirs" and no_compiler.called


@pytest.mark.parametrize("place", [{}, {PRIVATE: lambda A, weight, bias=None: None}])
def test_without_the_private_place_forward_stays_theirs(nf4, monkeypatch, caplog, place):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, OPS, types.SimpleNamespace(**place))
    nf4.warn_once.cache_clear()
    for _ in range(3):
        with nf4.in_bitsandbytes():
            assert vars(sys.modules[OPS]) == place
            assert bnb.functional.dequantize_4bit is not STOCK, "the backward pass is ours"
    assert caplog.text.count("forward passes stay its own") == 1, "it is said once"
    nf4.warn_once.cache_clear()
    caplog.clear()


def crosswise(nf4):
    """The second by the same cell, run again; so it is by another copy of the module."""
    names = dict(vars(nf4))
    a = nf4.in_bitsandbytes()
    a.__enter__()
    shared.execute(shared.defining("in_bitsandbytes"), "again", names)
    b = names["in_bitsandbytes"]()
    b.__enter__()
    a.__exit__(None, None, None)
    assert bnb.functional.dequantize_4bit is not STOCK, "b is still open"
    b.__exit__(None, None, None)


def in_threads(nf4):
    def enter(_):
        for _ in range(30):
            with nf4.in_bitsandbytes():
                assert bnb.functional.dequantize_4bit is not STOCK

    with futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(enter, range(4)))


def with_an_error(nf4):
    with contextlib.suppress(KeyError), nf4.in_bitsandbytes():
        raise KeyError


@pytest.mark.parametrize("way", [crosswise, in_threads, with_an_error])
def test_the_last_context_puts_bitsandbytes_back(nf4, cuda_ops, way):
    product = getattr(cuda_ops, PRIVATE)
    way(nf4)
    assert bnb.functional.dequantize_4bit is STOCK and getattr(cuda_ops, PRIVATE) is product


def test_a_layer_is_traced_vmapped_and_differentiated_as_without_us(nf4, device):
    layer = layer_of(device, rows=32).requires_grad_(False)
    x = torch.randn(5, 3, 64, device=device, dtype=torch.bfloat16)
    scale = torch.tensor(2.0, device=device)

    def results():
        yield torch.jit.trace(layer, (x,))(x)
        yield torch.func.vmap(layer)(x)
        yield torch.func.grad(lambda scale: (layer(x) * scale).float().sum())(scale)

    wanted = list(results())
    with nf4.in_bitsandbytes():
        assert n_differing(nf4, list(results()), wanted) == 0


def test_a_layer_on_the_cpu_is_compiled_as_without_us(nf4, monkeypatch):
    """Where Triton compiles for a GPU, ours refuses it, and compiled code takes no exception."""
    monkeypatch.setattr(nf4, "INTERPRETED", nf4.tl.constexpr(False))
    layer = layer_of("cpu")
    x = torch.randn(5, 64, dtype=torch.bfloat16, requires_grad=True)

    def step(layer):
        out = layer(x)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), x)]

    wanted = step(layer)
    with nf4.in_bitsandbytes():
        got = step(torch.compile(layer, fullgraph=True, backend="aot_eager"))
    assert n_differing(nf4, got, wanted) == 0


def test_a_compiled_training_step_has_stocks_bits(nf4, device, monkeypatch):
    layers = torch.nn.Sequential(layer_of(device), layer_of(device, 128, 64))
    x = torch.randn(2000 if GPU else 8, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    run = mock.Mock(wraps=nf4.run_operator)
    monkeypatch.setattr(nf4.NF4_OPS, "run", run)

    def step():
        torch._dynamo.reset()
        backend = "inductor" if GPU else "aot_eager"
        out = torch.compile(layers, fullgraph=True, backend=backend)(x)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), x)]

    wanted = step()
    with nf4.in_bitsandbytes():
        assert n_differing(nf4, step(), wanted) == 0
    assert run.called


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
@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_and_merging_by_transformers_and_peft(nf4, device, ours, checkpointed):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "attn_implementation": "eager"}  # others add in any order
    model = training.build(sizes, device)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(128, (2, 8), device=device)
    wanted = trained(model, ids)
    with nf4.in_bitsandbytes():
        assert n_differing(nf4, trained(model, ids), wanted) == 0
        assert ours.call_count >= 2 * 4 + 7, "backward passes (q, k, v need none) and the merge"


def lines_for_unsloth():
    """README's, which put nf4_triton.dequantize_nf4 in the place of Unsloth's own."""
    readme = (shared.ROOT / "README.md").read_text(encoding="utf-8")
    return re.search(r"```python\n(.*?)```", readme, re.S)[1]


def train_by_unsloth():
    """Unsloth's fused MLP by its own dequantization, and by ours as the README says."""
    from unsloth.kernels import fast_lora

    nf4 = shared.load()
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1}
    mlp = training.build(sizes, "cuda").get_submodule("base_model.model.model.layers.0.mlp")
    x = torch.randn(2, 64, 512, device="cuda", dtype=torch.bfloat16)

    def results():
        leaves = [x.clone().requires_grad_(), *training.adapters_of(mlp)]
        out = fast_lora.apply_lora_mlp_swiglu(mlp, leaves[0], inplace=False)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    wanted = results()
    ours = nf4.dequantize_nf4 = mock.Mock(wraps=nf4.dequantize_nf4)
    exec(lines_for_unsloth(), {})
    assert n_differing(nf4, results(), wanted) == 0
    assert ours.call_count >= 5, f"called {ours.call_count} times"


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="needs unsloth")
def test_training_by_unsloth(tmp_path):
    """In a process of its own: Unsloth changes transformers and peft when it is imported."""
    command = "import unsloth, test_programs; test_programs.train_by_unsloth()"
    environment = {"UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_COMPILE_LOCATION": str(tmp_path)}
    done = helpers.in_a_process(command, **environment)
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_readmes_lines_leave_what_is_not_nf4_to_unsloth(nf4, device, monkeypatch):
    theirs = mock.Mock(return_value="theirs")
    utils, fast_lora = mock.Mock(fast_dequantize=theirs), mock.Mock(fast_dequantize=theirs)
    kernels = mock.Mock(utils=utils, fast_lora=fast_lora)
    monkeypatch.setitem(sys.modules, "unsloth", mock.Mock(kernels=kernels))
    monkeypatch.setitem(sys.modules, "unsloth.kernels", kernels)
    exec(lines_for_unsloth(), {})
    assert utils.fast_dequantize is fast_lora.fast_dequantize is not theirs
    weight, state = nf4.quantized((32, 64), torch.float16, device)
    want = nf4.spec(weight, state)
    for given in ((weight, state), (weight, state, None), (weight, state, None, True)):
        out = utils.fast_dequantize(*given, dtype=torch.float16)
        assert nf4.bits_differing(out, want) == 0
    assert not theirs.called
    fp4 = copy.copy(state)
    fp4.quant_type = "fp4"
    for given in ((weight,), (weight, None), (weight, fp4), (weight, [1, 2]), (weight, weight)):
        assert utils.fast_dequantize(*given) == "theirs"
    assert utils.fast_dequantize(weight, state, out=want, use_global_buffer=True) == "theirs"
    theirs.assert_called_with(weight, state, want, use_global_buffer=True)


def test_the_error_for_a_weight_back_from_a_cpu_says_what_mends_it(nf4, device):
    """And that does mend it: bitsandbytes' way back rounds absmax to fp16, and ours would not."""
    weight, state = nf4.quantized((64, 64), torch.float16, "cpu")
    weight, state = bnb.functional._convert_weight_packed_for_cpu(weight, state)
    weight, state = bnb.functional._convert_weight_packed_for_cpu_inverse(weight, state)
    weight = weight.to(device)
    state.to(device)
    with pytest.raises(ValueError, match="set (quant_state.*)$") as caught:
        nf4.dequantize_nf4(weight, state)
    exec(str(caught.value).rpartition(" set ")[2], {"quant_state": state, "torch": torch})
    out = nf4.dequantize_nf4(weight, state)
    assert nf4.bits_differing(out, helpers.expected(weight, state)) == 0
