"""A small Llama with NF4 weights and LoRA adapters, trained through a given dequantize function.

    python tools/training.py    through Unsloth's fused MLP, its dequantization and ours: prints {dtype: facts}

Unsloth patches transformers and PEFT when it is imported, so it has a process of its own.
"""

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import types
from pathlib import Path

if __name__ == "__main__":  # before transformers
    os.environ |= {"UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_COMPILE_LOCATION": tempfile.mkdtemp()}
    with contextlib.redirect_stdout(sys.stderr):
        import unsloth.kernels.fast_lora
        import unsloth.kernels.utils

import bitsandbytes as bnb
import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.bnb import Linear4bit as LoraLinear4bit
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16}


def build(device, dtype):
    """The PEFT model, its adapters' parameters, and a batch of token ids; tiny on a CPU."""
    set_seed(3407)
    size, batch = (SMALL, (4, 256)) if device == "cuda" else (TINY, (1, 8))
    # Eager attention is deterministic.
    model = LlamaForCausalLM(LlamaConfig(**size, vocab_size=512, attn_implementation="eager")).to(dtype)
    for name, linear in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in PROJECTIONS:
            features = linear.in_features, linear.out_features
            quantized = bnb.nn.Linear4bit(*features, False, dtype, quant_type="nf4", device="meta")
            quantized.weight = bnb.nn.Params4bit(linear.weight.data, quant_type="nf4")
            setattr(model.get_submodule(parent), last, quantized)
    model.is_loaded_in_4bit = True  # what PEFT asks for
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=list(PROJECTIONS), init_lora_weights=False)  # B not zero
    model = get_peft_model(model.to(device), lora)
    layers = [module for module in model.modules() if isinstance(module, LoraLinear4bit)]
    assert len(layers) == 7 * size["num_hidden_layers"]
    assert all(layer.base_layer.weight.quant_state.state2 is not None for layer in layers)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, adapters, torch.randint(512, batch, device=device)


class DequantizedLinear(torch.autograd.Function):
    """x @ W.t() with the frozen W dequantized anew in forward and backward, as QLoRA does."""

    @staticmethod
    def forward(ctx, x, weight, dequantize):
        ctx.weight, ctx.dequantize = weight, dequantize
        return F.linear(x, dequantize(weight, weight.quant_state))

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.dequantize(ctx.weight, ctx.weight.quant_state), None, None


@contextlib.contextmanager
def dequantizing(dequantize):
    """Inside, every Linear4bit layer dequantizes by `dequantize`. (bitsandbytes' own forward is one fused product.)"""
    forward = bnb.nn.Linear4bit.forward
    bnb.nn.Linear4bit.forward = lambda self, x: DequantizedLinear.apply(x, self.weight, dequantize)
    try:
        yield
    finally:
        bnb.nn.Linear4bit.forward = forward


def step(model, optimizer, ids):
    """One training step; the loss."""
    logits = model(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    (loss * 1024).backward()  # gradients that fp16 can hold; AdamW does not mind
    optimizer.step()
    return loss.detach()


def train(model, adapters, ids, steps=3):
    """Each step's loss and adapter gradients, and the trained adapters, which are then put back as they were."""
    before, seen = [adapter.detach().clone() for adapter in adapters], []
    optimizer = torch.optim.AdamW(adapters, lr=1e-3)
    for _ in range(steps):
        seen += [step(model, optimizer, ids), *(adapter.grad.clone() for adapter in adapters)]
        assert all(adapter.grad.any() for adapter in adapters)
    seen += [adapter.detach().clone() for adapter in adapters]
    for adapter, start in zip(adapters, before):
        adapter.data.copy_(start)
    assert all(tensor.isfinite().all() for tensor in seen)
    return seen


def step_us(model, adapters, ids, contexts):
    """{name: median microseconds of a step} of {name: makes its context}; in turn, as a host has slower moments."""
    optimizer, times = torch.optim.AdamW(adapters, lr=0.0), {name: [] for name in contexts}
    for turn in range(41 if ids.is_cuda else 3):  # the first is a warm-up
        for name in list(contexts)[:: 1 if turn % 2 else -1]:
            with contexts[name]():
                start = time.perf_counter()
                step(model, optimizer, ids)
                if ids.is_cuda:
                    torch.cuda.synchronize()
                times[name].append(time.perf_counter() - start)
    return {name: round(statistics.median(values[1:]) * 1e6) for name, values in times.items()}


def differing(nf4, seen, others):
    """How many elements of two runs differ in their raw bits, and how many were compared."""
    return sum(nf4.bits_differing(*pair) for pair in zip(seen, others)), sum(tensor.numel() for tensor in seen)


def compared(nf4, model, adapters, ids, contexts):
    """Trains in contexts "stock", "ours", "wrong": how many elements differ from stock; the times of the first two."""
    seen = {}
    for name, context in contexts.items():
        with context():
            seen[name] = train(model, adapters, ids)
    count, total = differing(nf4, seen["stock"], seen["ours"])
    facts = {"differing": count, "compared": total, "wrong_differing": differing(nf4, seen["stock"], seen["wrong"])[0]}
    us = step_us(model, adapters, ids, {name: contexts[name] for name in ("stock", "ours")})
    return facts | {f"{name}_us": value for name, value in us.items()}


def one_bit_off(dequantize):
    """A wrong function: the last bit of the first row's weights is the other one."""

    def wrong(weight, quant_state, **options):
        out = dequantize(weight, quant_state, **options)
        bits = (out if out.is_contiguous() else out.t()).view(torch.int16)
        bits[0] ^= 1
        return out

    return wrong


class UnslothHook:
    """Unsloth's `fast_dequantize` by a given function, in its fused MLP and in every Linear4bit; counts the calls."""

    def __init__(self, dequantize):
        self.dequantize, self.calls, self.transposed = dequantize, 0, 0

    def __call__(self, W, quant_state=None, **options):
        if quant_state is None:
            return W
        assert options.get("out") is None
        self.calls += 1
        self.transposed += W.shape[0] == 1
        return self.dequantize(W, quant_state, **options)

    @contextlib.contextmanager
    def installed(self):
        modules = unsloth.kernels.utils, unsloth.kernels.fast_lora
        stock = [module.fast_dequantize for module in modules]
        for module in modules:
            module.fast_dequantize = self
        try:
            with dequantizing(self):
                yield
        finally:
            for module, function in zip(modules, stock):
                module.fast_dequantize = function


def without_options(dequantize):
    """Without Unsloth's hints: a buffer to use again, the dtype of what is multiplied."""
    return lambda W, quant_state, **hints: dequantize(W, quant_state)


def through_unsloth(nf4, device, dtype):
    """Trains with each Llama MLP as Unsloth's fused function; its attention dequantizes by the same hook."""
    stock = unsloth.kernels.utils.fast_dequantize if device == "cuda" else without_options(dequantize_4bit)
    model, adapters, ids = build(device, dtype)
    for name, mlp in model.named_modules():
        if name.endswith(".mlp"):
            fused = unsloth.kernels.fast_lora.apply_lora_mlp_swiglu
            mlp.forward = types.MethodType(lambda self, x: fused(self, x, inplace=False), mlp)
    ours = without_options(nf4.dequantize_nf4)
    hooks = {"stock": UnslothHook(stock), "ours": UnslothHook(ours), "wrong": UnslothHook(one_bit_off(ours))}
    facts = compared(nf4, model, adapters, ids, {name: hook.installed for name, hook in hooks.items()})
    for name, hook in hooks.items():
        facts |= {f"{name}_calls": hook.calls, f"{name}_transposed": hook.transposed}
    return facts


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    import helpers

    nf4, device = helpers.load(), "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = (torch.bfloat16, torch.float16)
    print(json.dumps({str(dtype).removeprefix("torch."): through_unsloth(nf4, device, dtype) for dtype in dtypes}))
