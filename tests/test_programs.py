"""Programs stay right: training by transformers, peft and Unsloth, copies and files, threads, long
runs. Weights and gradients are, to the bit, those of bitsandbytes' dequantization and a product."""

import concurrent.futures
import copy
import gc
import importlib.util
import sys
import threading
from unittest import mock

import bitsandbytes as bnb
import helpers
import pytest
import torch
import training
from bitsandbytes.functional import quantize_4bit
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM


def product(A, B, quant_state, out=None, bias=None):
    """What bitsandbytes.matmul_4bit is compared with."""
    matrix = sys.modules["nf4_triton"].spec(B, quant_state)
    return torch.nn.functional.linear(A, matrix.to(A.dtype), bias)


def n_differing(nf4, results, wanted):
    return sum(nf4.bits_differing(*pair) for pair in zip(results, wanted, strict=True))


USUAL = {"tokens": (64,), "columns": 64, "fewest": 64, "bias": False, "by_ours": True}
USUAL |= {"shape": (32, 64), "quantized": {"quant_type": "nf4", "compress_statistics": True}}
CASES = {  # {case: what is unusual}; by_ours: ours multiplies, else bitsandbytes does
    "64 tokens": {},
    "two sequences": {"tokens": (2, 32)},
    "a bias": {"tokens": (2, 32), "bias": True},
    "one token": {"tokens": (), "fewest": 1},
    "one token and a bias": {"tokens": (1, 1), "fewest": 1, "bias": True},
    "plain absmax": {"quantized": {"quant_type": "nf4"}},
    "a row that ends inside a byte": {"shape": (3, 5), "columns": 5},
    "a single row": {"shape": (1, 64)},
    "a single byte": {"shape": (2, 1), "columns": 1},
    "63 tokens": {"tokens": (63,), "by_ours": False},
    "FP4": {"quantized": {"quant_type": "fp4"}, "by_ours": False},
    "a weight quantized transposed": {"columns": 32, "by_ours": False},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_in_bitsandbytes_products_and_gradients_are_the_same(nf4, device, world, dtype, case):
    """Forward, and the gradients of the input and the bias."""
    how = USUAL | CASES[case]
    values = torch.randn(how["shape"], device=device)
    weight, state = quantize_4bit(values, **how["quantized"])
    given = [torch.randn(*how["tokens"], how["columns"], device=device).to(dtype)]
    if how["bias"]:
        given.append(torch.randn(how["shape"][0], device=device).to(dtype))

    def results(multiply):
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        out = multiply(leaves[0], weight.t(), state, bias=leaves[1] if how["bias"] else None)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    wanted = results(product if how["by_ours"] else bnb.matmul_4bit)
    with mock.patch.object(nf4, "dequantize_nf4", wraps=nf4.dequantize_nf4) as dequantize:
        with nf4.in_bitsandbytes(how["fewest"]):
            got = results(bnb.matmul_4bit)
    assert dequantize.call_count == (2 if how["by_ours"] else 0)
    assert n_differing(nf4, got, wanted) == 0


def test_in_bitsandbytes_takes_no_given_output_hides_no_error_and_ends_with_its_block(nf4, device):
    """After an error, and nested, as well."""
    weight, state = nf4.quantized((32, 64), torch.float32, device)
    x, out = torch.ones(64, 64, device=device), torch.zeros(64, 32, device=device)
    theirs = bnb.matmul_4bit
    with pytest.raises(KeyError), nf4.in_bitsandbytes():
        outer = bnb.matmul_4bit
        with nf4.in_bitsandbytes(fewest=1), mock.patch.object(nf4, "dequantize_nf4") as dequantize:
            bnb.matmul_4bit(x, weight.t(), state, out=out)
            with pytest.raises(ValueError, match="quant_state is required"):
                bnb.matmul_4bit(x, weight.t(), None)
        assert bnb.matmul_4bit is outer
        assert outer is not theirs
        assert not dequantize.called
        raise KeyError
    assert bnb.matmul_4bit is theirs
    assert nf4.bits_differing(out, theirs(x, weight.t(), state)) == 0


def frozen_layer(nf4, device):
    layer = bnb.nn.Linear4bit(64, 32, False, torch.float32, True, "nf4").to(device)
    return layer.requires_grad_(False), nf4.your_dequantize_nf4(layer)


def test_where_nothing_wants_a_gradient_it_is_a_plain_product(nf4, device):
    """So torch.func takes a frozen layer, as it takes bitsandbytes' own."""
    layer, weight = frozen_layer(nf4, device)
    x = torch.randn(5, 3, 64, device=device)
    with nf4.in_bitsandbytes(fewest=1):
        torch.testing.assert_close(torch.func.vmap(layer)(x), x @ weight.t())
        scale = torch.tensor(2.0, device=device)
        got = torch.func.grad(lambda scale: (layer(x) * scale).sum())(scale)
        torch.testing.assert_close(got, (x @ weight.t()).sum())
        with torch.no_grad():
            assert not layer(x.clone().requires_grad_()).requires_grad


class Product(torch.nn.Module):
    """A frozen layer whose packed weight is a buffer, which torch.export takes."""

    def __init__(self, layer):
        super().__init__()
        self.register_buffer("weight", layer.weight.data)
        self.quant_state = layer.weight.quant_state

    def forward(self, x):
        return bnb.matmul_4bit(x, self.weight.t(), self.quant_state)


def test_a_compiler_need_not_know_how_many_tokens_come(nf4, device):
    """No size is guarded: programs of dynamic shapes compile and are exported as without us."""
    layer, weight = frozen_layer(nf4, device)
    module = Product(layer)
    backend = "inductor" if device == "cuda" else "aot_eager"
    function = torch.compile(module, fullgraph=True, backend=backend)
    with nf4.in_bitsandbytes():
        for n_tokens in (100, 30):
            x = torch.randn(n_tokens, 64, device=device)
            torch._dynamo.mark_dynamic(x, 0)
            with torch._dynamo.config.patch(error_on_recompile=n_tokens == 30):
                torch.testing.assert_close(function(x), x @ weight.t())
        sizes = {0: torch.export.Dim("n_tokens", min=2, max=4096)}
        program = torch.export.export(module, (x,), dynamic_shapes=(sizes,))
        torch.testing.assert_close(program.module()(x[:9]), x[:9] @ weight.t())


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
    """The losses and gradients of two steps of a copy of the model."""
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
    return seen


def one_bit_off(function):
    def wrong(weight, quant_state):
        out = function(weight, quant_state)
        out[0, :1].view(torch.int16 if out.itemsize == 2 else torch.int32)[0] ^= 256
        return out

    return wrong


@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_by_transformers_and_peft(nf4, device, world, tmp_path, checkpointed):
    model = llama(device, tmp_path)
    layers = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    wanted = [helpers.expected(layer.weight, layer.weight.quant_state) for layer in layers]
    got = [nf4.your_dequantize_nf4(layer) for layer in layers]
    assert len(layers) == 7 and n_differing(nf4, got, wanted) == 0
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(model, lora)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(128, (2, 8), device=device)
    with mock.patch.object(bnb, "matmul_4bit", product):
        wanted = trained(model, ids)
    with nf4.in_bitsandbytes(fewest=1):
        assert n_differing(nf4, trained(model, ids), wanted) == 0
        with mock.patch.object(nf4, "dequantize_nf4", one_bit_off(nf4.dequantize_nf4)):
            assert n_differing(nf4, trained(model, ids), wanted) > 0, "wrong bits go unnoticed"


def train_by_unsloth():
    """Unsloth's fused MLP by its own dequantization, by ours as the README says, and by a wrong."""
    import unsloth.kernels.fast_lora as fast_lora

    nf4 = helpers.load()
    config = LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=1)
    model = training.build(config, "cuda")
    (mlp,) = [module for name, module in model.named_modules() if name.endswith(".mlp")]
    adapters = training.adapters_of(mlp)
    x = torch.randn(2, 64, 512, device="cuda", dtype=torch.bfloat16)

    def results():
        leaves = [x.clone().requires_grad_(), *adapters]
        out = fast_lora.apply_lora_mlp_swiglu(mlp, leaves[0], inplace=False)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    wanted = results()
    for is_right in (True, False):
        function = nf4.dequantize_nf4 if is_right else one_bit_off(nf4.dequantize_nf4)
        ours = mock.Mock(wraps=function)
        exec(training.lines_for_unsloth(), {})
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
    monkeypatch.setitem(sys.modules, "unsloth.kernels.utils", utils)
    monkeypatch.setitem(sys.modules, "unsloth.kernels.fast_lora", fast_lora)
    exec(training.lines_for_unsloth(), {})
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


def test_the_output_of_a_first_call_may_be_written_to(planned):
    """Of a weight passed as [1, n], too; as of any later call."""
    layer = planned.made(dtype=torch.float32)
    more = torch.ones(64, 32, device=planned.device, requires_grad=True)
    for _ in range(3):
        out = planned.nf4.dequantize_nf4(layer.weight.t(), layer.quant_state)
        want = planned.nf4.spec(layer.weight, layer.quant_state).t() + more
        torch.testing.assert_close(out.add_(more), want, rtol=0, atol=0)


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
            return n_differing(nf4, outs, [wanted[turn] for turn in turns])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [0, 0, 0, 0]
    assert len(nf4.PLANS) == 3


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


@pytest.mark.gpu
@pytest.mark.parametrize("has_plan", [True, False])
def test_a_graph_is_captured_and_replayed(planned, has_plan):
    layer = planned.layer_with_plan()
    if not has_plan:
        planned.nf4.PLANS.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = planned.nf4.your_dequantize_nf4(layer)
    assert planned.n_plans() == (1 if has_plan else 0), "none is made meanwhile"
    layer.weight.copy_(layer.weight.flip(0))
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert planned.n_wrong(out, layer) == 0
