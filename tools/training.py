"""How long training takes by others' dequantization and by ours in its place, and how much memory.

    python tools/training.py    on a GPU, a minute: writes results/training.json

Models have random weights in NF4, peft's LoRA on all seven projections, and compute in bf16:

* A training step of a Llama by bitsandbytes, "stock", and within `in_bitsandbytes`, "ours". Losses
  must be close; bits differ, as bitsandbytes' own forward pass is one fused product.
* Unsloth's MLP, forward and backward, by its own `fast_dequantize`, "stock", and by the one that
  README's lines put in its place, "ours". Output and gradients must be equal in every bit.

The two take turns, in a new random order each round. Nothing is written unless results agree.
"""

import contextlib
import datetime
import gc
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

import bitsandbytes
import torch
from peft import LoraConfig, get_peft_model
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import helpers  # noqa: E402

LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2}
LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8}
LLAMAS = (  # (model, its sizes, sequences, tokens of each)
    ("2 layers of Llama-3-8B's size, LoRA", LLAMA_8B, 2, 1024),
)
MLPS = ((4096, 14336, 256), (4096, 14336, 2048))  # hidden, intermediate, tokens
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PACKAGES = ("torch", "triton", "bitsandbytes", "unsloth", "transformers", "peft")
MOST = 0.02  # by which losses may differ: bf16 is rounded to three digits, in another order
WARM_UP = 3  # steps; the first makes plans, and to try them takes memory


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


def adapters_of(module):
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def timed(step):
    """(what step() returns, its milliseconds, the bytes that were allocated at most meanwhile)."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    began = time.perf_counter()
    returned = step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    ms = (time.perf_counter() - began) * 1e3
    return returned, ms, torch.cuda.max_memory_allocated()  # 0 without a GPU


def measured(model, tokens, steps, fault_of, rounds):
    """Rows {model, tokens, who, ms, peak_bytes} of steps that take turns; ms is the median.

    steps     {who: a function that returns tensors}
    fault_of  a function of {who: these tensors}: what is wrong with them, or None
    """
    returned, peak_bytes = {}, {}
    for who in ("ours", "stock"):  # in this order: Unsloth's own leaves a buffer behind
        for _ in range(WARM_UP):
            tensors, _, peak_bytes[who] = timed(steps[who])
            returned[who] = [tensor.cpu() for tensor in tensors]
            del tensors
    fault = fault_of(returned)
    if fault:
        raise SystemExit(f"{model}, {tokens} tokens: nothing was written, as {fault}")
    times = {who: [] for who in steps}
    for _ in tqdm(range(rounds), f"{model}, {tokens}", disable=None):
        for who in random.sample(list(steps), len(steps)):
            _, ms, _ = timed(steps[who])
            times[who].append(ms)
    rows = []
    for who in steps:
        row = {"model": model, "tokens": tokens, "who": who, "ms": statistics.median(times[who])}
        rows.append(row | {"peak_bytes": peak_bytes[who]})
    return rows


def train(model, optimizer, ids, context):
    """A training step within a context; returns [its loss]."""
    with context():
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
    return [loss.detach()]


def fault_of_losses(returned):
    stock, ours = returned["stock"][0].item(), returned["ours"][0].item()
    if not abs(stock - ours) < MOST:  # a NaN is not, either
        return f"losses differ: stock {stock}, ours {ours}"


def measure_llamas(nf4, runs, device, rounds=100):
    rows = []
    for name, sizes, sequences, length in runs:
        gc.collect()  # else the last model counts among this one's bytes
        config = LlamaConfig(vocab_size=512, **sizes)
        model = build(config, device)
        optimizer = torch.optim.AdamW(adapters_of(model), lr=0.0)  # so each step is the first
        ids = torch.randint(config.vocab_size, (sequences, length), device=device)
        steps = {
            "stock": partial(train, model, optimizer, ids, contextlib.nullcontext),
            "ours": partial(train, model, optimizer, ids, nf4.in_bitsandbytes),
        }
        rows += measured(name, f"{sequences} x {length}", steps, fault_of_losses, rounds)
        del model, optimizer, steps
    return rows


def rows_of_mlps():
    """measure_mlps' of MLPS, in a process of its own: Unsloth changes transformers and peft."""
    command = "import unsloth, training; training.write_rows_of_mlps()"
    paths = [str(ROOT / "tools"), *sys.path]
    environment = os.environ | {"PYTHONPATH": ":".join(paths), "UNSLOTH_DISABLE_STATISTICS": "1"}
    with tempfile.TemporaryDirectory() as folder:  # Unsloth writes files where it runs, too
        if subprocess.call([sys.executable, "-c", command], cwd=folder, env=environment):
            raise SystemExit("Unsloth's MLPs failed, see above: nothing was written.")
        return json.loads((Path(folder) / "rows.json").read_text())


def write_rows_of_mlps():
    rows = measure_mlps(helpers.load(), MLPS, "cuda")
    Path("rows.json").write_text(json.dumps(rows))


def lines_for_unsloth():
    """README's, which put nf4_triton.dequantize_nf4 in the place of Unsloth's own."""
    readme = (ROOT / "README.md").read_text()
    return re.search(r"```python\n(.*?)```", readme, re.S)[1]


def measure_mlps(nf4, runs, device, rounds=200):
    import unsloth.kernels.utils as utils

    functions = {"stock": utils.fast_dequantize}
    exec(lines_for_unsloth(), {})
    functions["ours"] = utils.fast_dequantize
    rows = []
    for hidden, intermediate, length in runs:
        sizes = {"hidden_size": hidden, "intermediate_size": intermediate}
        config = LlamaConfig(vocab_size=512, num_hidden_layers=1, **sizes)
        mlp = build(config, device).get_submodule("base_model.model.model.layers.0.mlp")
        gc.collect()  # the rest of the model, and the last MLP
        getattr(utils, "_SCRATCH", {}).clear()  # Unsloth's buffer, which ours does not need
        x = torch.randn(1, length, hidden, device=device, dtype=torch.bfloat16)
        grad = torch.randn_like(x)
        steps = {who: partial(run_mlp, mlp, x, grad, each) for who, each in functions.items()}
        name = f"Unsloth's LoRA MLP, {hidden} x {intermediate}"
        rows += measured(name, f"1 x {length}", steps, partial(fault_of_bits, nf4), rounds)
        del mlp, steps
    return rows


def run_mlp(mlp, x, grad, fast_dequantize):
    """[its output, the gradient of x, those of its adapters], by this dequantization."""
    import unsloth.kernels.fast_lora as fast_lora
    import unsloth.kernels.utils as utils

    utils.fast_dequantize = fast_dequantize
    fast_lora.fast_dequantize = fast_dequantize
    leaves = [x.detach().requires_grad_(), *adapters_of(mlp)]
    out = fast_lora.apply_lora_mlp_swiglu(mlp, leaves[0], inplace=False)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def fault_of_bits(nf4, returned):
    differing = 0
    for stock, ours in zip(returned["stock"], returned["ours"], strict=True):
        differing += nf4.bits_differing(stock, ours)
        assert stock.isfinite().all(), "equal bits of what is not finite say little"
    if differing:
        return f"{differing} values of output and gradients differ in their bits"


def main():
    if not torch.cuda.is_available():
        raise SystemExit("Training steps are timed on a GPU, and there is none here.")
    found = {"gpu": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat()}
    found["versions"] = {package: version(package) for package in PACKAGES}
    found["rows"] = measure_llamas(helpers.load(), LLAMAS, "cuda")
    found["rows"] += rows_of_mlps()
    helpers.write_json(ROOT / "results" / "training.json", found)


if __name__ == "__main__":
    main()
