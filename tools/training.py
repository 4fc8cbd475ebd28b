"""A Llama with NF4 weights and LoRA adapters, trained with bitsandbytes' functions or with ours.

    python tools/training.py    with Unsloth's fused MLP, by its function or by ours: {dtype: facts}

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
from functools import partial
from pathlib import Path
from unittest import mock

if __name__ == "__main__":  # before transformers
    os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"
    os.environ["UNSLOTH_COMPILE_LOCATION"] = tempfile.mkdtemp()
    with contextlib.redirect_stdout(sys.stderr):
        import unsloth.kernels.fast_lora as fast_lora
        import unsloth.kernels.utils as utils

import bitsandbytes as bnb
import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.bnb import Linear4bit as LoraLinear4bit
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZES = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    "small": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
    },
    "llama8b": {  # two layers of Llama-3-8B's size
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
RUNS = {  # {size: [(sequences, tokens of each)]}
    "tiny": [(1, 8)],
    "small": [(4, 256)],
    "llama8b": [(2, 1024), (1, 256)],
}
TURNS = {"tiny": 2, "small": 40, "llama8b": 15}  # timed steps of each contender


def build(device, dtype, size):
    """The PEFT model, and its adapters' parameters."""
    set_seed(3407)
    # Eager attention is deterministic.
    config = LlamaConfig(**SIZES[size], vocab_size=512, attn_implementation="eager")
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype)
    for name, linear in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in PROJECTIONS:
            features = linear.in_features, linear.out_features
            quantized = bnb.nn.Linear4bit(*features, False, dtype, quant_type="nf4", device="meta")
            quantized.weight = bnb.nn.Params4bit(linear.weight.data, quant_type="nf4")
            setattr(model.get_submodule(parent), last, quantized)
    model.is_loaded_in_4bit = True  # what PEFT asks for
    lora = LoraConfig(  # B is not zero
        r=8, lora_alpha=16, target_modules=list(PROJECTIONS), init_lora_weights=False
    )
    model = get_peft_model(model.to(device), lora)
    layers = [module for module in model.modules() if isinstance(module, LoraLinear4bit)]
    assert len(layers) == 7 * SIZES[size]["num_hidden_layers"]
    for layer in layers:
        state = layer.base_layer.weight.quant_state
        assert state.state2 is not None and state.dtype == dtype
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, adapters


def token_ids(device, batch):
    return torch.randint(512, batch, generator=torch.Generator().manual_seed(0)).to(device)


def contexts_of(nf4, fewest):
    """{name: makes the context in which a step is taken}.

    stock     bitsandbytes as it is: its forward is one fused product, its backward dequantizes
    replaced  the one line: ours in the place of bitsandbytes' dequantize_4bit, so in the backward
    ours      in_bitsandbytes: ours in forward and backward
    theirs    dequantized by bitsandbytes, then multiplied, in both directions: the bits to have
    wrong     in_bitsandbytes, one bit of ours changed
    """
    one_bit = one_bit_off(nf4.dequantize_nf4)

    @contextlib.contextmanager
    def wrong():
        with mock.patch.object(nf4, "dequantize_nf4", one_bit), nf4.in_bitsandbytes(fewest):
            yield

    replaced = partial(mock.patch.object, bnb.functional, "dequantize_4bit", nf4.dequantize_nf4)
    return {
        "stock": contextlib.nullcontext,
        "replaced": replaced,
        "ours": partial(nf4.in_bitsandbytes, fewest),
        "theirs": partial(dequantizing, dequantize_4bit),
        "wrong": wrong,
    }


class DequantizedLinear(torch.autograd.Function):
    """x @ W.t() with the frozen W dequantized anew in forward and backward, as QLoRA does."""

    @staticmethod
    def forward(ctx, x, weight, dequantize):
        ctx.weight, ctx.dequantize = weight, dequantize
        return F.linear(x, dequantize(weight, weight.quant_state))

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.dequantize(ctx.weight, ctx.weight.quant_state), None, None


def dequantizing(dequantize):
    """Inside, every Linear4bit layer dequantizes by `dequantize`, forward and backward."""

    def forward(self, x):
        return DequantizedLinear.apply(x, self.weight, dequantize)

    return mock.patch.object(bnb.nn.Linear4bit, "forward", forward)


def step(model, optimizer, ids):
    """One training step; the loss."""
    logits = model(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    (loss * 1024).backward()  # gradients that fp16 can hold; AdamW does not mind
    optimizer.step()
    return loss.detach()


def train(model, adapters, ids, steps=3):
    """Each step's loss and gradients, and the trained adapters, then put back as they were."""
    before = [adapter.detach().clone() for adapter in adapters]
    seen = []
    optimizer = torch.optim.AdamW(adapters, lr=1e-3)
    for _ in range(steps):
        seen.append(step(model, optimizer, ids))
        for adapter in adapters:
            assert adapter.grad.any()
            seen.append(adapter.grad.clone())
    seen += [adapter.detach().clone() for adapter in adapters]
    for adapter, start in zip(adapters, before):
        adapter.data.copy_(start)
    assert all(tensor.isfinite().all() for tensor in seen)
    return seen


def compared(nf4, model, adapters, ids, contexts):
    """Trains in each context: what was compared with the first, and {name}_differing of the rest.

    contexts  {name: makes its context}; the first is the reference
    """
    seen = {}
    for name, context in contexts.items():
        with context():
            seen[name] = train(model, adapters, ids)
    first, *others = contexts
    facts = {"compared": sum(tensor.numel() for tensor in seen[first])}
    for name in others:
        pairs = zip(seen[first], seen[name], strict=True)
        facts[f"{name}_differing"] = sum(nf4.bits_differing(*pair) for pair in pairs)
    return facts


def step_ms(model, adapters, ids, contexts, turns):
    """{name: median milliseconds of a step}; in turn, as a host has slower moments."""
    optimizer = torch.optim.AdamW(adapters, lr=0.0)
    times = {name: [] for name in contexts}
    for turn in range(turns + 1):  # the first is a warm-up
        names = list(contexts)
        if turn % 2 == 0:
            names.reverse()
        for name in names:
            with contexts[name]():
                start = time.perf_counter()
                step(model, optimizer, ids)
                if ids.is_cuda:
                    torch.cuda.synchronize()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) * 1e3 for name, values in times.items()}


def one_bit_off(dequantize):
    """A wrong function: the last bit of the first row's weights is the other one."""

    def wrong(weight, quant_state, **options):
        out = dequantize(weight, quant_state, **options)
        bits = (out if out.is_contiguous() else out.t()).view(torch.int16)
        bits[0] ^= 1
        return out

    return wrong


class Counted:
    """Unsloth's fast_dequantize, or what stands in its place, and how often it is called."""

    def __init__(self, function):
        self.function, self.calls, self.transposed = function, 0, 0

    def __call__(self, W, quant_state=None, *hints, **options):
        if quant_state is not None:
            self.calls += 1
            self.transposed += W.shape[0] == 1
        return self.function(W, quant_state, *hints, **options)


@contextlib.contextmanager
def in_unsloth(function):
    """Inside, Unsloth's fused functions call `function`: what the README's two lines replace.

    Nothing else is: the attention's layers are plain Linear4bit, so bitsandbytes'.
    """
    stock = utils.fast_dequantize
    assert fast_lora.fast_dequantize is stock
    utils.fast_dequantize = function
    fast_lora.fast_dequantize = utils.fast_dequantize
    try:
        yield
    finally:
        utils.fast_dequantize = fast_lora.fast_dequantize = stock


def as_in_the_readme(ours):
    return lambda W, quant_state=None, *_, **__: W if quant_state is None else ours(W, quant_state)


def through_unsloth(nf4, dtype):
    """Trains with each Llama MLP as Unsloth's fused function, by its dequantization and by ours."""
    model, adapters = build("cuda", dtype, "small")
    ids = token_ids("cuda", RUNS["small"][0])
    for name, mlp in model.named_modules():
        if name.endswith(".mlp"):
            fused = fast_lora.apply_lora_mlp_swiglu
            mlp.forward = types.MethodType(lambda self, x: fused(self, x, inplace=False), mlp)
    functions = {
        "stock": utils.fast_dequantize,
        "ours": as_in_the_readme(nf4.dequantize_nf4),
        "wrong": as_in_the_readme(one_bit_off(nf4.dequantize_nf4)),
    }
    counted = {name: Counted(function) for name, function in functions.items()}
    contexts = {name: partial(in_unsloth, counter) for name, counter in counted.items()}
    facts = compared(nf4, model, adapters, ids, contexts)
    for name, counter in counted.items():
        facts |= {f"{name}_calls": counter.calls, f"{name}_transposed": counter.transposed}
    timed = {  # and nothing is counted
        "stock": contextlib.nullcontext,
        "ours": partial(in_unsloth, functions["ours"]),
    }
    facts["ms"] = step_ms(model, adapters, ids, timed, TURNS["small"])
    return facts


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    import helpers

    nf4 = helpers.load()
    report = {}
    for dtype in (torch.bfloat16, torch.float16):
        report[nf4.name_of(dtype)] = through_unsloth(nf4, dtype)
    print(json.dumps(report))
