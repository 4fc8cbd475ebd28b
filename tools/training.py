"""Times training by bitsandbytes and Unsloth as they are, and inside our contexts.

    python tools/training.py FILE    on a GPU, two minutes: writes an entry for tools/record.py

Models have random weights in NF4, PEFT's LoRA on all seven projections, and compute in bf16. Their
QuantStates are in bf16, or in fp32, as layers made by default have them.

* A training step of a Llama by bitsandbytes, and the same inside `in_bitsandbytes()`.
* Unsloth's LoRA MLP, forward and backward, and the same inside `in_unsloth()`.

The two of a row take turns, in a new random order each round. Nothing is written unless losses, or
the MLP's output and gradients, have the same bits.
"""

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

if sys.argv[1:2] == ["--mlps"]:
    import unsloth  # noqa: F401  wants to be imported before transformers and peft
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
NAME = {torch.bfloat16: "bf16", torch.float32: "fp32"}


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


def measure(what, step, context, rounds):
    """Return the row {**what, stock_ms, ours_ms} of a step as it is, and inside the context.

    The times are medians of the rounds. The context is entered outside the clock, as a training
    enters it once. Ends the program where the tensors that the step returns differ in their bits.
    """
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    contexts = {"stock_ms": contextlib.nullcontext, "ours_ms": context}
    for _ in range(3):  # the first makes plans
        results = []
        for open_context in contexts.values():
            with open_context():
                results.append([tensor.cpu() for tensor in step()])
        for stock, ours in zip(*results, strict=True):
            if not torch.equal(stock, ours) or not stock.isfinite().all():
                raise SystemExit(f"{what}: results differ, or are not finite: nothing was written")
    times = {name: [] for name in contexts}
    for _ in tqdm(range(rounds), " ".join(what.values()), disable=None):
        for name in random.sample(list(contexts), 2):
            with contexts[name]():
                wait()
                began = time.perf_counter()
                step()
                wait()
                times[name].append((time.perf_counter() - began) * 1e3)
    return what | {name: statistics.median(ms) for name, ms in times.items()}


def train(model, optimizer, ids):
    """Make a training step; return [its loss]."""
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    return [loss.detach()]


def measure_llamas(context, device, sizes=LLAMA_8B, tokens=TOKENS, rounds=60):
    rows = []
    for state in STATES:
        model = build(sizes, device, state)
        optimizer = torch.optim.AdamW(adapters_of(model), lr=0.0)  # so each step is the first
        for shape in tokens:
            ids = torch.randint(512, shape, device=device)
            what = {"model": "2 layers of Llama-3-8B's size, LoRA", "state": NAME[state]}
            what["tokens"] = f"{shape[0]} x {shape[1]}"
            rows.append(measure(what, partial(train, model, optimizer, ids), context, rounds))
    return rows


def measure_mlps(context, device, rounds=150):
    from unsloth.kernels import fast_lora

    sizes = LLAMA_8B | {"num_hidden_layers": 1}
    mlp = build(sizes, device).get_submodule("base_model.model.model.layers.0.mlp")

    def step(x, grad):
        """Return [the output, the gradient of x, those of the adapters]."""
        leaves = [x.detach().requires_grad_(), *adapters_of(mlp)]
        out = fast_lora.apply_lora_mlp_swiglu(mlp, leaves[0], inplace=False)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    rows = []
    for length in MLP_TOKENS:
        shape = (1, length, sizes["hidden_size"])
        x, grad = torch.randn(2, *shape, device=device, dtype=torch.bfloat16)
        what = {"model": "Unsloth's LoRA MLP, 4096 x 14336", "state": "bf16"}
        what["tokens"] = f"1 x {length}"
        rows.append(measure(what, partial(step, x, grad), context, rounds))
    return rows


def main(arguments):
    if not arguments:
        raise SystemExit(__doc__)
    if not torch.cuda.is_available():
        raise SystemExit("Training steps are timed on a GPU, and there is none here.")
    ours = shared.load_integrations()
    path = Path(arguments[-1]).resolve()
    if arguments[0] == "--mlps":  # in a process of its own: Unsloth changes transformers and peft
        shared.write(path, measure_mlps(ours.in_unsloth, "cuda"))
        return
    rows = measure_llamas(ours.in_bitsandbytes, "cuda")
    with tempfile.TemporaryDirectory() as folder:  # Unsloth writes files where it runs
        command = [sys.executable, __file__, "--mlps", f"{folder}/rows.json"]
        environment = os.environ | {"UNSLOTH_DISABLE_STATISTICS": "1"}
        if subprocess.call(command, cwd=folder, env=environment):
            raise SystemExit("Unsloth's MLPs failed, see above: nothing was written.")
        rows += json.loads((Path(folder) / "rows.json").read_text())
    shared.write(path, shared.entry("training", rows, torch.cuda.get_device_name()))


if __name__ == "__main__":
    main(sys.argv[1:])
