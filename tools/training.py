"""How long training takes by others' dequantization and by ours in its place.

    python tools/training.py    on a GPU, two minutes: writes results/training.json

Models have random weights in NF4, peft's LoRA on all seven projections, and compute in bf16; their
QuantStates are in bf16, or in fp32, as layers made by default have them.

* A training step of a Llama by bitsandbytes, "stock", and within `in_bitsandbytes`, "ours".
* Unsloth's MLP, forward and backward, by its own `fast_dequantize`, "stock", and by ours.

The two take turns, in a new random order each round. Nothing is written unless losses, or the
MLP's output and gradients, are equal in every bit.
"""

import contextlib
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

import bitsandbytes
import shared
import torch
from peft import LoraConfig, get_peft_model
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2}
LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8}
STATES = (torch.bfloat16, torch.float32)
TOKENS = ((2, 1024), (1, 256))  # sequences, and of each
MLP_TOKENS = (256, 2048)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PACKAGES = ("torch", "triton", "bitsandbytes", "unsloth", "transformers", "peft")


def build(sizes, device, state=torch.bfloat16):
    """A Llama of random weights: NF4 projections with adapters that are not zero."""
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
    model.is_loaded_in_4bit = True  # what peft asks for
    lora = LoraConfig(r=16, target_modules=PROJECTIONS, init_lora_weights=False)
    model = get_peft_model(model.to(device), lora)
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.weight.quant_state.dtype = state
    return model


def adapters_of(module):
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def measured(what, steps, rounds):
    """Rows {**what, who, ms} of steps that take turns, {who: a function that returns tensors}.

    ms is the median of the rounds. A sentence ends the program where tensors differ in their bits.
    """
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(3):  # the first makes plans
        returned = [[tensor.cpu() for tensor in step()] for step in steps.values()]
    for tensors in zip(*returned):
        if not torch.equal(*tensors) or not tensors[0].isfinite().all():
            raise SystemExit(f"{what}: results differ, or are not finite: nothing was written")
    times = {who: [] for who in steps}
    for _ in tqdm(range(rounds), " ".join(what.values()), disable=None):
        for who in random.sample(list(steps), len(steps)):
            wait()
            began = time.perf_counter()
            steps[who]()
            wait()
            times[who].append((time.perf_counter() - began) * 1e3)
    return [what | {"who": who, "ms": statistics.median(times[who])} for who in steps]


def train(model, optimizer, ids, context):
    """A training step within a context; returns [its loss]."""
    with context():
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
    return [loss.detach()]


def measure_llamas(nf4, device, rounds=60):
    rows = []
    for state in STATES:
        model = build(LLAMA_8B, device, state)
        optimizer = torch.optim.AdamW(adapters_of(model), lr=0.0)  # so each step is the first
        for shape in TOKENS:
            ids = torch.randint(512, shape, device=device)
            what = {"model": "2 layers of Llama-3-8B's size, LoRA", "state": str(state)[6:]}
            what["tokens"] = f"{shape[0]} x {shape[1]}"
            step = partial(train, model, optimizer, ids)
            contexts = {"stock": contextlib.nullcontext, "ours": nf4.in_bitsandbytes}
            rows += measured(
                what, {who: partial(step, each) for who, each in contexts.items()}, rounds
            )
    return rows


def measure_mlps(nf4, device, rounds=150):
    """In a process of its own: Unsloth changes transformers and peft."""
    from unsloth.kernels import fast_lora, utils

    theirs = utils.fast_dequantize

    def ours(W, quant_state=None, *args, **kwargs):
        return nf4.dequantize_nf4(W, quant_state)

    sizes = LLAMA_8B | {"num_hidden_layers": 1}
    mlp = build(sizes, device).get_submodule("base_model.model.model.layers.0.mlp")

    def run(x, grad, fast_dequantize):
        """[its output, the gradient of x, those of its adapters], by this dequantization."""
        utils.fast_dequantize = fast_lora.fast_dequantize = fast_dequantize
        leaves = [x.detach().requires_grad_(), *adapters_of(mlp)]
        out = fast_lora.apply_lora_mlp_swiglu(mlp, leaves[0], inplace=False)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    rows = []
    for length in MLP_TOKENS:
        shape = (1, length, sizes["hidden_size"])
        x, grad = torch.randn(2, *shape, device=device, dtype=torch.bfloat16)
        what = {"model": "Unsloth's LoRA MLP, 4096 x 14336", "state": "bfloat16"}
        what["tokens"] = f"1 x {length}"
        steps = {"stock": partial(run, x, grad, theirs), "ours": partial(run, x, grad, ours)}
        rows += measured(what, steps, rounds)
    return rows


def main():
    if not torch.cuda.is_available():
        raise SystemExit("Training steps are timed on a GPU, and there is none here.")
    found = {"gpu": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat()}
    found["versions"] = {package: version(package) for package in PACKAGES}
    found["rows"] = measure_llamas(shared.load(), "cuda")
    command = "import unsloth, json, shared, training as t; from pathlib import Path; "
    command += "rows = t.measure_mlps(shared.load(), 'cuda'); "
    command += "Path('rows.json').write_text(json.dumps(rows))"
    paths = ":".join([str(shared.ROOT / "tools"), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths, "UNSLOTH_DISABLE_STATISTICS": "1"}
    with tempfile.TemporaryDirectory() as folder:  # Unsloth writes files where it runs, too
        if subprocess.call([sys.executable, "-c", command], cwd=folder, env=environment):
            raise SystemExit("Unsloth's MLPs failed, see above: nothing was written.")
        found["rows"] += json.loads((Path(folder) / "rows.json").read_text())
    shared.write({shared.RESULTS / "training.json": found})


if __name__ == "__main__":
    main()
