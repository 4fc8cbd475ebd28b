"""Programs stay right in which bitsandbytes dequantizes by ours: training, merges, copies, threads.

Outputs and gradients are, to the bit, stock bitsandbytes'.
"""

import asyncio
import contextlib
import copy
import importlib.util
import inspect
import re
import sys
import threading
import types
from unittest import mock

import bitsandbytes as bnb
import helpers
import pytest
import shared
import torch
import training
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

GPU = torch.cuda.is_available()
OPS, PRIVATE = "bitsandbytes.backends.cuda.ops", "_dequant_linear_fallback"
STOCK = bnb.functional.dequantize_4bit


def n_differing(nf4, results, wanted):
    return sum(nf4.bits_differing(*pair) for pair in zip(results, wanted, strict=True))


@pytest.fixture
def ours(nf4, planned, monkeypatch):
    """Counts our dequantizations. On a CPU, where bitsandbytes has no such product, stands in."""
    ours = mock.Mock(wraps=nf4.dequantize_nf4)
    monkeypatch.setattr(nf4, "dequantize_nf4", ours)
    return ours


def their_linear(
    A, B, shapeB, absmax, blocksize, quant_type, bias=None,
    absmax_8bit=None, absmax_code=None, absmax_offset=None,
):  # fmt: skip
    """bitsandbytes' product by a dequantized weight, as its CUDA backend has it."""
    if absmax_8bit is not None:
        state2 = bnb.functional.QuantState(absmax, None, absmax_code, 256, None, torch.float32)
        absmax = bnb.functional.dequantize_blockwise(absmax_8bit, state2) + absmax_offset
    op = torch.ops.bitsandbytes.dequantize_4bit.default
    return torch.nn.functional.linear(
        A, op(B, absmax, blocksize, quant_type, shapeB, A.dtype), bias
    )


@pytest.fixture
def cuda_ops(monkeypatch):
    """The module of bitsandbytes' product; on a CPU one that stands in for it."""
    if not GPU:
        monkeypatch.setitem(sys.modules, OPS, types.SimpleNamespace(**{PRIVATE: their_linear}))
    return sys.modules[OPS]


def layer_of(columns, rows, quant_type="nf4", nested=True, bias=False, state=None, device="cpu"):
    """A frozen Linear4bit that computes in bf16, unless that is what its state says."""
    layer = bnb.nn.Linear4bit(columns, rows, bias, torch.bfloat16, nested, quant_type)
    layer = layer.to(device)
    if state:
        layer.weight.quant_state.dtype = state
    return layer


LAYERS = {  # {what is unusual: (how it is made, whether ours dequantizes)}
    "nothing": ({}, True),
    "plain absmax": ({"nested": False}, True),
    "a bias": ({"bias": True}, True),
    "its state in fp32": ({"state": torch.float32}, True),
    "its state in fp16": ({"state": torch.float16}, True),
    "a single row": ({"rows": 1}, True),
    "a single byte": ({"columns": 2, "rows": 1}, True),
    "a row that ends inside a byte": ({"columns": 5, "rows": 3}, True),
    "square": ({"rows": 64}, True),
    "FP4": ({"quant_type": "fp4"}, False),
}


@pytest.mark.parametrize("tokens", [1, 8, 64, 2000] if GPU else [8])
@pytest.mark.parametrize(
    "what", sorted(set(LAYERS) - {"a single byte"})
)  # stock's own backward fails
def test_outputs_and_gradients_are_stocks_to_the_bit(nf4, device, ours, cuda_ops, what, tokens):
    how, by_ours = LAYERS[what]
    layer = layer_of(**{"columns": 64, "rows": 128, "device": device} | how)
    x = torch.randn(2, tokens, layer.in_features, device=device, dtype=torch.bfloat16)

    def results():
        leaves = [x.clone().requires_grad_(), *(p for p in layer.parameters() if p.requires_grad)]
        out = layer(leaves[0])
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
        with torch.no_grad():
            return [layer(x), out, *grads]

    wanted = results()
    with nf4.in_bitsandbytes():
        assert n_differing(nf4, results(), wanted) == 0
    assert n_differing(nf4, results(), wanted) == 0, "and after it"
    returned = [call for call in ours.call_args_list if call.args[1].quant_type == "nf4"]
    assert bool(returned) == by_ours, "the backward pass, at least"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("what", LAYERS)
def test_the_product_of_many_tokens_is_theirs_in_as_dtype(nf4, device, ours, cuda_ops, what, dtype):
    """Whatever the state's dtype is; bitsandbytes gives this function no QuantState."""
    how, by_ours = LAYERS[what]
    layer = layer_of(**{"columns": 64, "rows": 128, "device": device} | how)
    state, packed = layer.weight.quant_state, layer.weight.data
    A = torch.randn(3, 100, layer.in_features, device=device).to(dtype)
    nested = {"absmax_8bit": state.absmax, "absmax_offset": state.offset} if state.nested else {}
    if state.nested:
        nested["absmax_code"] = state.state2.code
    absmax = state.state2.absmax if state.nested else state.absmax
    bias = None if layer.bias is None else layer.bias.data.to(dtype)
    given = (A, packed, state.shape, absmax, state.blocksize, state.quant_type, bias)
    want = getattr(cuda_ops, PRIVATE)(*given, **nested)
    if not GPU and layer.in_features % 64:  # bitsandbytes' CPU kernel goes wrong there
        matrix = nf4.spec(packed, copy_of(state, dtype))
        want = torch.nn.functional.linear(A, matrix, bias)
    with nf4.in_bitsandbytes():
        got = getattr(cuda_ops, PRIVATE)(*given, **nested)
    assert nf4.bits_differing(got, want) == 0
    assert ours.called or not by_ours


def copy_of(state, dtype):
    state = copy.copy(state)
    state.dtype = dtype
    return state


def test_what_stands_in_their_places_has_their_signatures_and_says_what_they_say(nf4, cuda_ops):
    names = [(bnb.functional, "dequantize_4bit"), (cuda_ops, PRIVATE)]
    before = [list(inspect.signature(getattr(*name)).parameters) for name in names]
    weight, state = nf4.quantized((32, 64), torch.float16, "cuda" if GPU else "cpu")
    with nf4.in_bitsandbytes():
        assert [list(inspect.signature(getattr(*name)).parameters) for name in names] == before
        if GPU:  # bitsandbytes takes none on a CPU
            out = torch.empty(32, 64, dtype=torch.float16, device="cuda")
            assert (
                bnb.functional.dequantize_4bit(weight, state, out=out).data_ptr() == out.data_ptr()
            )
            assert nf4.bits_differing(out, nf4.spec(weight, state)) == 0
        with pytest.raises(ValueError, match="requires both absmax and out"):
            bnb.functional.dequantize_4bit(weight)
        state.blocksize = 63
        with pytest.raises(ValueError, match="invalid blocksize 63"):
            bnb.functional.dequantize_4bit(weight, state)


def test_where_ours_refuses_and_bitsandbytes_works_it_works(nf4, device):
    weight, state = nf4.quantized((64, 64), torch.float16, device)
    state.state2.dtype = torch.float16  # as a weight has it that was on a CPU
    want = STOCK(weight, state)
    with nf4.in_bitsandbytes():
        assert nf4.bits_differing(bnb.functional.dequantize_4bit(weight, state), want) == 0


@pytest.mark.parametrize("theirs", [None, lambda A, weight, bias=None: None])
def test_without_the_private_place_forward_stays_theirs_and_the_log_says_so_once(
    nf4, cuda_ops, monkeypatch, caplog, theirs
):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    nf4.warn_once.cache_clear()
    if theirs is None:
        monkeypatch.delattr(cuda_ops, PRIVATE)
    else:
        monkeypatch.setattr(cuda_ops, PRIVATE, theirs)
    for _ in range(3):
        with nf4.in_bitsandbytes():
            assert getattr(cuda_ops, PRIVATE, None) is theirs
            assert bnb.functional.dequantize_4bit is not STOCK, "the backward pass is ours"
    assert caplog.text.count("forward passes stay its own") == 1
    nf4.warn_once.cache_clear()
    caplog.clear()


def crosswise(context):
    a, b = context(), context()
    a.__enter__(), b.__enter__()
    a.__exit__(None, None, None)
    assert bnb.functional.dequantize_4bit is not STOCK, "b is still open"
    b.__exit__(None, None, None)


def in_threads(context):
    def enter():
        for _ in range(30):
            with context():
                assert bnb.functional.dequantize_4bit is not STOCK

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def in_tasks(context):
    async def enter():
        with context():
            await asyncio.sleep(0.01)

    async def both():
        await asyncio.gather(enter(), enter(), enter())

    asyncio.run(both())


def nested(context):
    with context(), context():
        pass


def with_an_error(context):
    with contextlib.suppress(KeyError), context():
        raise KeyError


@pytest.mark.parametrize("way", [crosswise, in_threads, in_tasks, nested, with_an_error])
def test_the_last_context_puts_bitsandbytes_back(nf4, cuda_ops, way):
    product = getattr(cuda_ops, PRIVATE)
    way(nf4.in_bitsandbytes)
    assert bnb.functional.dequantize_4bit is STOCK and getattr(cuda_ops, PRIVATE) is product


def test_a_layer_is_traced_vmapped_and_differentiated_as_without_us(nf4, device):
    layer = layer_of(64, 32, device=device).requires_grad_(False)
    x = torch.randn(5, 3, 64, device=device, dtype=torch.bfloat16)
    scale = torch.tensor(2.0, device=device)

    def results():
        yield torch.jit.trace(layer, (x,))(x)
        yield torch.func.vmap(layer)(x)
        yield torch.func.grad(lambda scale: (layer(x) * scale).float().sum())(scale)

    wanted = list(results())
    with nf4.in_bitsandbytes():
        assert n_differing(nf4, list(results()), wanted) == 0


@pytest.mark.gpu
def test_autocast_to_fp16_of_bf16_layers_stays_finite(nf4, device):
    layer = layer_of(512, 2048, device=device)  # bitsandbytes' fused kernel multiplies
    x = (torch.rand(200, 512, device=device) * 3e4).bfloat16().requires_grad_()
    with torch.autocast("cuda", torch.float16):
        want = layer(x)
        with nf4.in_bitsandbytes():
            got = layer(x)
    assert want.isfinite().all() and nf4.bits_differing(got, want) == 0


def llama(device, folder):
    """A tiny one of random weights, as transformers loads it in 4 bits."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).save_pretrained(folder)
    how = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **how)
    how = {"quantization_config": how, "attn_implementation": "eager"}  # others add in any order
    try:
        return AutoModelForCausalLM.from_pretrained(folder, device_map=device, **how)
    except RuntimeError as refused:
        if "available devices" not in str(refused):
            raise
        pytest.skip("transformers 4.51 has bitsandbytes on no CPU")


def trained(model, ids):
    """The losses and gradients of two steps of a copy of the model, and its merged weights."""
    model, seen = copy.deepcopy(model).train(), []
    adapters = training.adapters_of(model)
    optimizer = torch.optim.SGD(adapters, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
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
def test_training_and_merging_by_transformers_and_peft(nf4, device, ours, tmp_path, checkpointed):
    model = llama(device, tmp_path)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(model, lora)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(128, (2, 8), device=device)
    wanted = trained(model, ids)
    with nf4.in_bitsandbytes():
        assert n_differing(nf4, trained(model, ids), wanted) == 0
        assert ours.call_count >= 2 * 4 + 7, "backward passes (q, k, v need none) and the merge"
        with mock.patch.object(nf4, "dequantize_nf4", helpers.one_bit_off(nf4.dequantize_nf4)):
            assert n_differing(nf4, trained(model, ids), wanted) > 0, "wrong bits go unnoticed"


def lines_for_unsloth():
    """README's, which put nf4_triton.dequantize_nf4 in the place of Unsloth's own."""
    readme = (shared.ROOT / "README.md").read_text(encoding="utf-8")
    return re.search(r"```python\n(.*?)```", readme, re.S)[1]


def train_by_unsloth():
    """Unsloth's fused MLP by its own dequantization, by ours as the README says, and by a wrong."""
    import unsloth.kernels.fast_lora as fast_lora

    nf4 = shared.load()
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1}
    model = training.build(sizes, "cuda")
    (mlp,) = [module for name, module in model.named_modules() if name.endswith(".mlp")]
    adapters = training.adapters_of(mlp)
    x = torch.randn(2, 64, 512, device="cuda", dtype=torch.bfloat16)

    def results():
        leaves = [x.clone().requires_grad_(), *adapters]
        out = fast_lora.apply_lora_mlp_swiglu(mlp, leaves[0], inplace=False)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    wanted = results()
    for is_right in (True, False):
        function = nf4.dequantize_nf4 if is_right else helpers.one_bit_off(nf4.dequantize_nf4)
        ours = mock.Mock(wraps=function)
        exec(lines_for_unsloth(), {})
        with mock.patch.object(nf4, "dequantize_nf4", ours):
            differing = n_differing(nf4, results(), wanted)
        assert (differing == 0) == is_right, f"{differing} differ where it is right: {is_right}"
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
