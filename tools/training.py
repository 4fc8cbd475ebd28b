"""Times a training step by bitsandbytes as it is, and inside `in_bitsandbytes()`.

    python tools/training.py FILE    on a GPU, two minutes: writes what tools/record.py takes in

The model is two layers of Llama-3-8B's size with random weights in NF4 and PEFT's LoRA on all seven
projections, and computes in bf16. Its QuantStates are in bf16, or in fp32, as layers made by
default have them. The two ways take turns, in a new random order each round.
"""

import contextlib
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import bitsandbytes
import shared
import torch
from peft import LoraConfig, get_peft_model
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2}
LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8}
NAME = {torch.bfloat16: "bf16", torch.float32: "fp32"}  # the dtypes of QuantStates
TOKENS = ((2, 1024), (1, 256))  # sequences, and of each
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def build(sizes, device, state=torch.bfloat16):
    """Return a Llama of random weights: NF4 projections with adapters that are not zero."""
    set_seed(3407)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes)).to(torch.bfloat16)
    for name, linear in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in PROJECTIONS:
            shape = linear.in_features, linear.out_features
            layer = bitsandbytes.nn.Linear4bit(*shape, False, torch.bfloat16, device="meta")
            layer.weight = bitsandbytes.nn.Params4bit(linear.weight.data, quant_type="nf4")
            setattr(model.get_submodule(parent), last, layer)
    model.is_loaded_in_4bit = True  # what PEFT asks for
    lora = LoraConfig(r=16, target_modules=PROJECTIONS, init_lora_weights=False)
    model = get_peft_model(model.to(device), lora)
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.weight.quant_state.dtype = state
    return model


def adapters_of(module):
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def train(model, optimizer, ids):
    """Make a training step; return [its loss]."""
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    return [loss.detach()]


def compare(step, contexts, nf4):
    """Run the step in both contexts; end the program unless results and their makers are right."""
    results = []
    for name, context in contexts.items():
        with mock.patch.object(nf4, "dequantize_nf4", wraps=nf4.dequantize_nf4) as ours, context():
            results.append([tensor.cpu() for tensor in step()])
        if ours.called != (name == "ours_ms"):
            raise SystemExit(f"ours ran {ours.call_count} times for {name}: nothing was written")
    for stock, ours in zip(*results, strict=True):
        if not torch.equal(stock, ours) or not stock.isfinite().all():
            raise SystemExit("results differ, or are not finite: nothing was written")


def measure(step, context, nf4, rounds=60):
    """Return {stock_ms, ours_ms} of a step: medians of the rounds, as it is and in the context.

    The context is entered outside the clock, as a training enters it once.
    """
    contexts = {"stock_ms": contextlib.nullcontext, "ours_ms": context}
    for _ in range(3):  # the first makes plans
        compare(step, contexts, nf4)
    times = {name: [] for name in contexts}
    for _ in tqdm(range(rounds), "rounds", disable=None):
        for name in random.sample(list(contexts), 2):
            with contexts[name]():
                torch.cuda.synchronize()
                began = time.perf_counter()
                step()
                torch.cuda.synchronize()
                times[name].append((time.perf_counter() - began) * 1e3)
    return {name: statistics.median(ms) for name, ms in times.items()}


def main(arguments):
    if len(arguments) != 1:
        raise SystemExit(__doc__)
    if not torch.cuda.is_available():
        raise SystemExit("Training steps are timed on a GPU, and there is none here.")
    in_bitsandbytes = shared.load_integrations().in_bitsandbytes
    rows = []
    for state, name in NAME.items():
        model = build(LLAMA_8B, "cuda", state)
        optimizer = torch.optim.AdamW(adapters_of(model), lr=0.0)  # so each step is the first
        for shape in TOKENS:
            ids = torch.randint(512, shape, device="cuda")
            step = partial(train, model, optimizer, ids)
            row = {"state": name, "tokens": f"{shape[0]} x {shape[1]}"}
            rows.append(row | measure(step, in_bitsandbytes, sys.modules["nf4_triton"]))
    measured = shared.measurement("training", rows, torch.cuda.get_device_name())
    shared.write(Path(arguments[0]), measured)


if __name__ == "__main__":
    main(sys.argv[1:])
