"""How long a QLoRA step takes by bitsandbytes as it is, and by our weights in its place.

    python tools/training.py    on a GPU, a minute: writes results/training.json

Llamas of random weights in NF4, with peft's LoRA on all seven projections, in bf16. Stock and ours,
which is `in_bitsandbytes`, take turns once their first losses are close. (No bits are compared:
bitsandbytes' own forward pass is one fused product.)
"""

import contextlib
import datetime
import random
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

import bitsandbytes
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import helpers  # noqa: E402

SMALL = LlamaConfig(
    vocab_size=512,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=4,
    num_attention_heads=16,
)
LLAMA_8B = LlamaConfig(
    vocab_size=512,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=2,
    num_attention_heads=32,
    num_key_value_heads=8,
)
RUNS = (  # (model, its configuration, sequences, tokens of each)
    ("4 layers of 1024 x 2816", SMALL, 4, 256),
    ("2 layers of Llama-3-8B", LLAMA_8B, 2, 1024),
    ("2 layers of Llama-3-8B", LLAMA_8B, 1, 256),
)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MOST = 0.01  # by which first losses may differ: bf16 is rounded to three digits, in another order


def build(config, device):
    """A model of random weights: NF4 projections with adapters that are not zero."""
    set_seed(3407)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    for name, linear in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in PROJECTIONS:
            sizes = linear.in_features, linear.out_features
            layer = bitsandbytes.nn.Linear4bit(*sizes, False, torch.bfloat16, device="meta")
            layer.weight = bitsandbytes.nn.Params4bit(linear.weight.data, quant_type="nf4")
            setattr(model.get_submodule(parent), last, layer)
    model.is_loaded_in_4bit = True  # what peft asks for
    lora = LoraConfig(r=16, target_modules=PROJECTIONS, init_lora_weights=False)
    return get_peft_model(model.to(device), lora)


def timed_step(model, optimizer, ids):
    """(its loss, milliseconds) of a training step."""
    wait = torch.cuda.synchronize if ids.is_cuda else lambda: None
    wait()
    began = time.perf_counter()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    wait()
    return loss.item(), (time.perf_counter() - began) * 1e3


def measure(nf4, runs, device, rounds=40):
    """Rows {model, tokens, who, ms}: the median of so many steps. Raises where losses differ."""
    contexts = {"stock": contextlib.nullcontext, "ours": nf4.in_bitsandbytes}
    rows = []
    for name, config, sequences, length in runs:
        model = build(config, device)
        adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(adapters, lr=0.0)  # so each step is the first
        ids = torch.randint(config.vocab_size, (sequences, length), device=device)
        times = {who: [] for who in contexts}
        for i_round in range(-2, rounds):
            losses = {}
            for who in random.sample(list(contexts), len(contexts)):
                with contexts[who]():
                    losses[who], ms = timed_step(model, optimizer, ids)
                if i_round >= 0:  # else it warms up
                    times[who].append(ms)
            if not abs(losses["stock"] - losses["ours"]) < MOST:
                raise SystemExit(f"{name}: nothing was written, as losses differ: {losses}")
        for who, ms in times.items():
            row = {"model": name, "tokens": f"{sequences} x {length}", "who": who}
            rows.append(row | {"ms": statistics.median(ms)})
    return rows


def main():
    if not torch.cuda.is_available():
        raise SystemExit("Training steps are timed on a GPU, and there is none here.")
    found = {"gpu": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat()}
    packages = "torch triton bitsandbytes transformers peft".split()
    found["versions"] = {package: version(package) for package in packages}
    found["rows"] = measure(helpers.load(), RUNS, "cuda")
    helpers.write_json(ROOT / "results" / "training.json", found)


if __name__ == "__main__":
    main()
