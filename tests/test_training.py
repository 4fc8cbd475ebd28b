"""Real use: a Llama with NF4 weights and LoRA adapters trains bit for bit as with bitsandbytes or with Unsloth."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import bitsandbytes as bnb
import peer
import pytest
import torch
import training
from bitsandbytes.functional import dequantize_4bit

GPU = torch.cuda.is_available()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_with_bitsandbytes_or_ours(nf4, device, tally, dtype):
    model, adapters, ids = training.build(device, dtype)
    functions = {"stock": dequantize_4bit, "ours": nf4.dequantize_nf4, "wrong": training.one_bit_off(dequantize_4bit)}
    seen, us = {}, {}
    for name, function in functions.items():
        with training.dequantizing(function):
            seen[name] = training.train(model, adapters, ids)
            if name != "wrong":
                us[name] = training.step_us(model, adapters, ids, 10 if GPU else 1)
    count(tally, *training.differing(nf4, seen["stock"], seen["ours"]))
    assert training.differing(nf4, seen["stock"], seen["wrong"])[0] > 0, "one wrong bit goes unnoticed"
    record(tally, dtype, us)


def count(tally, differing, compared):
    tally["cases"] += 1
    tally["weights"] += compared
    tally["differing"] += differing
    assert compared and differing == 0


def record(tally, dtype, us):
    """Prints the times per step; those of a GPU in bfloat16 go into the record."""
    print(f"{dtype}:", *(f"{name} {value:,} us per step" for name, value in us.items()), sep="  ")
    if GPU and dtype == torch.bfloat16:
        tally.update({f"training_step_us_{name}": value for name, value in us.items()})


@pytest.fixture(scope="module")
def unsloth_report():
    if importlib.util.find_spec("unsloth") is None:
        pytest.skip("needs unsloth")
    script = Path(__file__).with_name("training.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_with_unsloth_or_ours(unsloth_report, tally, dtype):
    facts = unsloth_report[str(dtype).removeprefix("torch.")]
    count(tally, facts["differing"], facts["compared"])
    assert facts["wrong_differing"] > 0, "one wrong bit goes unnoticed"
    assert facts["stock_calls"] == facts["ours_calls"] > facts["ours_transposed"] > 0, "the hook was not used"
    record(tally, dtype, {"unsloth": facts["stock_us"], "unsloth_ours": facts["ours_us"]})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_a_lora_layer(nf4, device, tally, dtype):
    """Of the input and both adapters; the input's through the weight alone also as bitsandbytes' matmul_4bit has it."""
    features = (1024, 512) if GPU else (64, 32)
    layer = nf4.bnb_Linear4bit(*features, dtype).to(device)
    layer.weight.quant_state.dtype = dtype
    x, down, up = (torch.randn(n, features[i], device=device) for n, i in ((16, 0), (8, 0), (8, 1)))
    upstream = torch.randn(16, features[1], device=device).to(dtype)

    def gradients(product, adapted=True):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (x, down, up)]
        y = product(leaves[0])
        if adapted:
            y = y + leaves[0] @ leaves[1].t() @ leaves[2]
        y.backward(upstream)
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    def dequantized(function):
        return lambda x: training.DequantizedLinear.apply(x, layer.weight, function)

    pairs = zip(gradients(dequantized(nf4.dequantize_nf4)), gradients(dequantized(dequantize_4bit)), strict=True)
    assert [peer.differing(nf4, tally, *pair) for pair in pairs] == [0, 0, 0]
    (ours,) = gradients(dequantized(nf4.dequantize_nf4), adapted=False)
    (theirs,) = gradients(lambda x: bnb.matmul_4bit(x, layer.weight, layer.weight.quant_state), adapted=False)
    assert peer.differing(nf4, tally, ours, theirs) == 0
    (wrong,) = gradients(dequantized(training.one_bit_off(dequantize_4bit)), adapted=False)
    assert nf4.bits_differing(wrong, theirs) > 0
