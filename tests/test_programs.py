"""The ways in which a program uses the function: gradients, threads, devices, long runs, training, harness, races."""

import collections
import concurrent.futures
import contextlib
import ctypes
import functools
import gc
import importlib.util
import json
import os
import random
import subprocess
import sys
import threading
import types

import bitsandbytes as bnb
import helpers
import numpy as np
import pytest
import torch
import torch.utils.flop_counter
import training
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from helpers import DTYPES

GPU = torch.cuda.is_available()


@pytest.fixture
def pair(nf4, device):
    return nf4.quantized((64, 128), torch.float16, device)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_gradient_modes(nf4, device, mode):
    weight, state = nf4.quantized((64, 128), torch.float16, device)
    for _ in range(2):
        with mode():
            out = nf4.dequantize_nf4(weight, state)
        assert not out.requires_grad and out.is_inference() == (mode is torch.inference_mode)
        assert nf4.bits_differing(out.clone(), dequantize_4bit(weight, state)) == 0
    out = nf4.dequantize_nf4(weight, state)  # a launch that was kept in inference mode
    assert not out.is_inference()


def test_gradients_through_the_weight(nf4, pair, device):
    weight, state = pair
    x = torch.randn(5, 128, dtype=torch.float16, device=device)
    gradients = []
    for dequantize in (nf4.dequantize_nf4, dequantize_4bit):
        leaf = x.clone().requires_grad_()
        (leaf @ dequantize(weight, state).t()).square().sum().backward()
        gradients.append(leaf.grad)
    assert nf4.bits_differing(*gradients) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_backward_of_bitsandbytes_own_matmul(nf4, device, tally, monkeypatch, dtype):
    """matmul_4bit dequantizes when it differentiates: with our function its gradients stay the same."""
    dim = 256 if GPU else 64
    layer = bnb.nn.Linear4bit(dim, dim, False, dtype, True, "nf4").to(device)
    layer.weight.quant_state.dtype = dtype
    x, gradients, calls = torch.randn(16, dim, device=device).to(dtype), [], []

    def ours(weight, quant_state):
        calls.append(weight)
        return nf4.dequantize_nf4(weight, quant_state)

    for function in (bnb.functional.dequantize_4bit, ours):
        monkeypatch.setattr(bnb.functional, "dequantize_4bit", function)
        leaf = x.clone().requires_grad_()
        layer(leaf).backward(torch.ones_like(x))
        gradients.append(leaf.grad)
    assert len(calls) == 1
    assert helpers.differing(nf4, tally, *gradients) == 0


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
    assert [helpers.differing(nf4, tally, *pair) for pair in pairs] == [0, 0, 0]
    (ours,) = gradients(dequantized(nf4.dequantize_nf4), adapted=False)
    (theirs,) = gradients(lambda x: bnb.matmul_4bit(x, layer.weight, layer.weight.quant_state), adapted=False)
    assert helpers.differing(nf4, tally, ours, theirs) == 0
    (wrong,) = gradients(dequantized(training.one_bit_off(dequantize_4bit)), adapted=False)
    assert nf4.bits_differing(wrong, theirs) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_with_bitsandbytes_or_ours(nf4, device, tally, dtype):
    """A Llama with NF4 weights and LoRA adapters trains bit for bit alike."""
    model, adapters, ids = training.build(device, dtype)
    functions = {"stock": dequantize_4bit, "ours": nf4.dequantize_nf4, "wrong": training.one_bit_off(dequantize_4bit)}
    contexts = {name: functools.partial(training.dequantizing, function) for name, function in functions.items()}
    facts = training.compared(nf4, model, adapters, ids, contexts)
    count(tally, facts["differing"], facts["compared"])
    assert facts["wrong_differing"] > 0, "one wrong bit goes unnoticed"
    record(tally, dtype, {"stock": facts["stock_us"], "ours": facts["ours_us"]})


def test_training_is_timed_in_turn(monkeypatch):
    order = []

    @contextlib.contextmanager
    def context(name):
        order.append(name)
        yield

    monkeypatch.setattr(training, "step", lambda *_: None)
    contexts = {name: functools.partial(context, name) for name in "ab"}
    us = training.step_us(None, [torch.zeros(1, requires_grad=True)], torch.zeros(1), contexts)
    assert "".join(order) == "baabba" and list(us) == ["a", "b"]


def count(tally, differing, compared):
    tally["cases"] += 1
    tally["weights"] += compared
    tally["differing"] += differing
    assert compared and differing == 0


def record(tally, dtype, us):
    """Prints the times per step; those of a GPU in bfloat16 go into the record."""
    print(f"{dtype}:", *(f"{name} {value:,} us per step" for name, value in us.items()), sep="  ")
    if GPU and dtype == torch.bfloat16:
        tally.update({f"training_step_ms_{name}": value / 1000 for name, value in us.items()})


@pytest.fixture(scope="module")
def unsloth_report():
    if importlib.util.find_spec("unsloth") is None:
        pytest.skip("needs unsloth")
    command = [sys.executable, helpers.ROOT / "tools" / "training.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
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


def test_deterministic_algorithms(nf4, pair):
    weight, state = pair
    want = dequantize_4bit(weight, state)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            assert nf4.bits_differing(nf4.dequantize_nf4(weight, state), want) == 0
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu  # Triton's interpreter is no place for threads
def test_threads(nf4):
    pairs = [nf4.quantized((64, 128), dtype, "cuda", seed=seed) for seed in range(3) for dtype in DTYPES]
    wanted = [dequantize_4bit(*pair) for pair in pairs]
    torch.cuda.synchronize()
    start = threading.Barrier(4)

    def work(first):
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            turns = [i % len(pairs) for i in range(first, first + 200)]
            return sum(nf4.bits_differing(nf4.dequantize_nf4(*pairs[i]), wanted[i]) for i in turns)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(0, 12, 3))) == [0, 0, 0, 0]


@pytest.mark.gpu
@pytest.mark.skipif(GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu_that_is_not_current(nf4, tally):
    for dtype in DTYPES:
        for shape in ((256, 512), (33, 65)):
            with torch.cuda.device(1):
                weight, state = nf4.quantized(shape, dtype, "cuda:1")
                want = dequantize_4bit(weight, state)
                torch.cuda.synchronize()
            for current in (0, 1, 0, 1, 1):
                with torch.cuda.device(current):
                    out = nf4.dequantize_nf4(weight, state)
                    assert out.device == weight.device and torch.cuda.current_device() == current
                    assert nf4.bits_differing(out, want) == 0
                    tally["second_gpu"] += 1
            with torch.utils.flop_counter.FlopCounterMode(display=False):  # through the operator
                out = nf4.dequantize_nf4(weight, state)
            assert out.device == weight.device and nf4.bits_differing(out, want) == 0
            moved = weight.to("cuda:0")
            with pytest.raises(ValueError, match="cuda:1.*cuda:0"):
                nf4.dequantize_nf4(moved, state)
    layer = nf4.bnb_Linear4bit(64, 128).to("cuda:0")
    want = nf4.your_dequantize_nf4(layer)
    layer = layer.to("cuda:1")
    assert nf4.bits_differing(nf4.your_dequantize_nf4(layer).to("cuda:0"), want) == 0


# A long run over many layers that come, change and go: right bits throughout, and no growth of memory. Wrong functions
# are run as well: one that holds on to old results, and two that leak.
LAYERS, WARM_UP, CALLS = (300, 20_000, 80_000) if GPU else (12, 60, 300)
CHANGES, CHECKS = (20, 50) if GPU else (4, 5)  # one in so many calls
LOADED = [(512, 1024), (256, 256), (1024, 64), (128, 1000), (96, 640), (33, 65), (1, 4097), (7, 9)]
LOADED = LOADED if GPU else [(32, 64), (8, 100), (3, 5), (1, 700)]
TOLERANCE = 8 << 20  # bytes of the process, whose heap is never quite still: 105 in each of 80 000 calls


def make(device, shape, dtype, nested):
    values = torch.randn(shape, device=device).to(dtype)
    weight, state = quantize_4bit(values, compress_statistics=nested, quant_type="nf4")
    return torch.nn.Parameter(weight, requires_grad=False), state


def bytes_like(tensor):
    return torch.randint(0, 256, tensor.shape, dtype=torch.uint8, device=tensor.device)


def change(layers, i, kind):
    """Changes layer i in one of the ways of real life; sizes stay the same, and with them what all layers hold."""
    weight, state = layers[i]
    if kind == "layer":
        layers[i] = make(weight.device, state.shape, state.dtype, state.state2 is not None)
    elif kind == "weight":
        layers[i] = torch.nn.Parameter(bytes_like(weight), requires_grad=False), state
    elif kind == "weight.data":
        weight.data = bytes_like(weight)
    elif kind == "contents":
        weight.data.copy_(bytes_like(weight))
    elif kind == "absmax":
        state.absmax = state.absmax.flip(0)
    elif kind == "absmax.data":
        state.absmax.data = state.absmax.flip(0)
    elif state.state2 is not None:
        state.state2.absmax = state.state2.absmax * 1.5 if state.state2.absmax[0] < 1 else state.state2.absmax / 2


KINDS = ("layer", "weight", "weight.data", "contents", "absmax", "absmax.data", "state2.absmax")


class Load:
    def __init__(self, nf4, device, tally):
        torch.manual_seed(0)
        self.nf4, self.tally, self.random = nf4, tally, random.Random(0)
        self.layers = [make(device, LOADED[i % len(LOADED)], DTYPES[i % 3], nested=i % 5 > 0) for i in range(LAYERS)]

    def run(self, function, calls):
        """Calls function for random layers, changes some of them, and counts what differs from bitsandbytes."""
        wrong = 0
        for call in range(calls):
            i = self.random.randrange(LAYERS)
            if call % CHANGES == 0:
                change(self.layers, i, self.random.choice(KINDS))
            out = function(*self.layers[i])
            if call % CHECKS == 0:
                wrong += helpers.differing(self.nf4, self.tally, out, helpers.expected(*self.layers[i]))
        return wrong


def memory():
    """Bytes that torch holds on the GPU, and bytes of this process in the machine's memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory that the heap still holds would hide a leak
    if GPU:
        torch.cuda.synchronize()
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return torch.cuda.memory_allocated() if GPU else 0, pages * os.sysconf("SC_PAGE_SIZE")


def growth(load, function, calls):
    """How many bytes were added on the GPU and in the process by so many calls; how many weights differed."""
    before = memory()
    wrong = load.run(function, calls)
    return *(after - start for after, start in zip(memory(), before)), wrong


def test_long_run(nf4, device, tally):
    load = Load(nf4, device, tally)
    assert load.run(nf4.dequantize_nf4, WARM_UP) == 0
    on_gpu, in_process, wrong = growth(load, nf4.dequantize_nf4, CALLS)
    tally["load_calls"] += WARM_UP + CALLS
    tally["load_growth_bytes"] += on_gpu
    tally["load_process_growth_bytes"] += max(0, in_process)
    assert wrong == 0 and on_gpu == 0 and in_process < TOLERANCE, (on_gpu, in_process)


def test_held_results_are_found(nf4, device):
    held = {}
    load = Load(nf4, device, collections.Counter())
    function = lambda weight, state: held.setdefault(id(state), nf4.dequantize_nf4(weight, state))  # noqa: E731
    try:
        assert load.run(function, WARM_UP) > 0
    except ValueError as error:  # another layer's, whose state had the same id
        assert "expected equal shapes and dtypes" in str(error)


@pytest.mark.parametrize("where", ["gpu", "process"])
def test_leaks_are_found(nf4, device, where):
    if where == "gpu" and not GPU:
        pytest.skip("needs a CUDA GPU")
    leaked, calls = [], WARM_UP
    load = Load(nf4, device, collections.Counter())

    def leaking(weight, state):
        out = nf4.dequantize_nf4(weight, state)
        leaked.append(out[:1, :1].clone() if where == "gpu" else bytearray(4 * TOLERANCE // calls))
        return out

    load.run(nf4.dequantize_nf4, WARM_UP)
    on_gpu, in_process, _ = growth(load, leaking, calls)
    assert on_gpu > 0 if where == "gpu" else in_process > TOLERANCE


def test_the_comparison_can_fail(nf4):
    x = torch.ones(4, dtype=torch.bfloat16)
    y = x.clone()
    y.view(torch.int16)[2] += 1
    assert nf4.bits_differing(x, y) == 1
    with pytest.raises(ValueError, match="float32"):
        nf4.bits_differing(x, x.float())
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        nf4.bits_differing(torch.zeros(2), torch.zeros(3))


def test_the_harness_accepts_ours_and_refuses_a_wrong_one(nf4):
    options = nf4.OPTIONS[1:2] if GPU else nf4.SMALL_OPTIONS  # bitsandbytes multiplies small matrices in its own way
    assert nf4.test_dequantize(nf4.your_dequantize_nf4, loops=1, options=options) > 0
    wrong = lambda layer: nf4.your_dequantize_nf4(layer) * 1.01  # noqa: E731
    with pytest.raises(AssertionError):
        nf4.test_dequantize(wrong, loops=1, options=options)
    x = torch.ones(4, 4, dtype=torch.float16)
    with pytest.raises(AssertionError, match=r"expected torch\.float16, got torch\.float32"):
        nf4.assert_same(x.float(), x, "line", torch.float16)
    with pytest.raises(AssertionError, match="line: .*stride"):
        nf4.assert_same(x, x[:, ::2].repeat(1, 2).t(), "line", torch.float16)


def test_the_harness_refuses_other_layers(nf4, device):
    layer = nf4.build(nf4.SMALL_OPTIONS[0], torch.float16)[1].gate_proj
    nf4.assert_correct_bnb(layer, torch.float16)
    layer.weight.quant_state.blocksize = 128
    with pytest.raises(AssertionError, match="128, 256"):
        nf4.assert_correct_bnb(layer, torch.float16)
    layer.weight.quant_state.dtype = torch.float32
    with pytest.raises(AssertionError, match=r"torch\.float32"):
        nf4.assert_correct_bnb(layer, torch.float16)


def test_races(nf4):
    """A race times nothing whose bits are wrong."""
    right = ("ours", nf4.your_dequantize_nf4, contextlib.nullcontext)
    wrong = ("wrong", lambda layer: nf4.your_dequantize_nf4(layer) * 1.001, contextlib.nullcontext)
    with pytest.raises(AssertionError, match="b: wrong weights"):
        nf4.race({"a": right, "b": wrong}, torch.float16, 1, 1, nf4.SMALL_OPTIONS)
    seconds = nf4.race({"a": right}, torch.float16, 2, 1, nf4.SMALL_OPTIONS)["a"]
    assert seconds.shape == (2, 3) and (seconds > 0).all()


def test_a_slower_host_leaves_the_floor_as_it_is(nf4):
    """The host is slower for half of the race, and turns while a round runs: ours meets it once more than bare."""

    def race(contenders, dtype, rounds=5, loops=1000):
        turns = np.arange(rounds)[:, None].repeat(len(nf4.OPTIONS), axis=1)
        seconds = {name: np.where(turns < rounds // 2, 1.4, 1.0) for name in contenders}
        return seconds | {"ours": np.where(turns <= rounds // 2, 1.4, 1.0) * 1.05}

    names = {"GPU": True, "RECORD": {}, "NOT_KEPT": [], "display": lambda _: None, "race": race}
    helpers.run_cell("race-run", {**vars(nf4), **names})
    assert names["RECORD"]["floor"] == dict.fromkeys(("float16", "bfloat16"), {"least": 1.05, "median": 1.05})


@pytest.mark.gpu
def test_a_candidate_that_fails_or_is_wrong_is_not_taken(nf4, monkeypatch):
    launch, default = nf4.launch, nf4.DEFAULTS[2]

    def sometimes(described, setting=None, **options):
        if setting and (setting.num_warps, setting.steps) == (2, 2):
            raise RuntimeError("out of resources")
        out, *rest = launch(described, setting, **options)
        return out * 2 if setting and (setting.num_warps, setting.steps) == (4, 4) else out, *rest

    monkeypatch.setattr(nf4, "launch", sometimes)
    monkeypatch.setattr(nf4, "SETTINGS", {})
    (results,) = nf4.tune((torch.float16,), (1024, 1024), (256, 256)).values()
    assert "out of resources" in results["2 warps x 2 steps"] and "weights differ" in results["4 warps x 4 steps"]
    assert sum("taken" in str(result) for result in results.values()) == 1
    assert list(nf4.SETTINGS) == [(0, 2)] and nf4.SETTINGS[0, 2] not in (nf4.Setting(2, 2), nf4.Setting(4, 4))
    assert default == nf4.DEFAULTS[2]


@pytest.mark.parametrize(
    "us, slowed, taken",
    [
        ({}, False, "4 warps x 2 steps"),  # all alike: the default stays
        ({"2 warps x 4 steps": 39.5}, False, "4 warps x 2 steps"),  # 1.25 % are not enough
        ({"2 warps x 4 steps": 39.0}, False, "2 warps x 4 steps"),
        ({"evict output": 30.0}, False, "evict output"),
        ({"evict output": 30.0}, True, "4 warps x 2 steps"),
    ],
)
def test_tuning_takes_what_wins_by_two_percent(nf4, monkeypatch, us, slowed, taken):
    """With imitated times: `slowed` is the matmul that reads an output which has left the cache."""

    def imitated(functions):
        if len(functions) == 2:  # the matmul after two of the settings
            return {name: 12.0 if slowed and name == "evict output" else 10.0 for name in functions}
        return {name: us.get(name, 40.0) for name in functions}

    monkeypatch.setattr(nf4, "kernel_us", imitated)
    monkeypatch.setattr(nf4, "SETTINGS", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    if not GPU:
        real, ones = nf4.quantized, torch.ones
        monkeypatch.setattr(nf4, "quantized", lambda shape, dtype, device: real(shape, dtype, "cpu"))
        monkeypatch.setattr(nf4.torch, "ones", lambda *size, device=None, **options: ones(*size, **options))
    (results,) = nf4.tune((torch.float16,), (32, 256), (16, 64)).values()
    assert [name for name, result in results.items() if "taken" in str(result)] == [taken]
    setting = nf4.SETTINGS[0, 2]
    assert taken == ("evict output" if setting.evict == 2 else f"{setting.num_warps} warps x {setting.steps} steps")
    assert len(results) <= 10 and ("with the matmul" in str(results["evict output"])) == slowed


@pytest.fixture
def marked(nf4):
    """A record that is worth every point, and the code of its kernel."""
    compiled = dict(compiled=True, bit_equal=True, graphs=1)
    harness = [
        {"dtypes": dtypes, "baseline": baseline, "ratio": {"median": 1.2}}
        for dtypes in ("float16", "bfloat16", "original")
        for baseline in nf4.BASELINES
    ]
    record = {"exact": {"checked": 5, "differing": 0}, "launches": ["_dequantize_nf4_kernel"], "harness": harness}
    record["compile"] = {"float16": compiled, "bfloat16": dict(compiled)}
    return types.SimpleNamespace(record=record, ptx="shfl.sync.idx.b32 ld.global.L1::evict_first.b32")


POINTS = {  # what is worse -> (how, the criterion, the points that are left)
    "nothing": (lambda m: None, "speedup", 5),
    "12 %": (lambda m: m.record["harness"][0]["ratio"].update(median=1.12), "speedup", 3),
    "6 %": (lambda m: m.record["harness"][3]["ratio"].update(median=1.06), "speedup", 1),
    "1 %": (lambda m: m.record["harness"][6]["ratio"].update(median=1.01), "speedup", 0),
    "slower": (lambda m: m.record["harness"][0]["ratio"].update(median=1.0), "speedup", -3),
    "two kernels": (lambda m: m.record["launches"].append("copy"), "single Triton kernel", 0),
    "not compiled": (lambda m: m.record["compile"]["bfloat16"].update(compiled=False), "works in torch.compile", -1),
    "no assembly": (lambda m: setattr(m, "ptx", "evict"), "custom asm works", 0),
    "wrong bits": (lambda m: m.record["exact"].update(differing=1), "custom asm works", 0),
    "no hints": (lambda m: setattr(m, "ptx", "shfl.sync.idx"), "uses cache eviction", 0),
    "no bf16": (lambda m: m.record.update(harness=m.record["harness"][:3]), "tested in f16 and bf16", -1),
}


@pytest.mark.parametrize("case", POINTS)
def test_the_marking_follows_the_challenge(nf4, marked, case):
    worsen, criterion, points = POINTS[case]
    worsen(marked)
    rows = nf4.score(marked.record, marked.ptx)
    assert rows[criterion]["points"] == points
    assert sum(row["possible"] for row in rows.values()) == 14
    if case == "nothing":
        assert sum(row["points"] for row in rows.values()) == 14


@pytest.mark.gpu
@pytest.mark.parametrize("more", [0, 1 << 20])
def test_memory_beyond_the_output(nf4, marked, monkeypatch, tmp_path, more):
    """What is freed while the one call runs hides nothing that the call allocates."""
    monkeypatch.chdir(tmp_path)
    garbage = [torch.empty(1 << 23, device="cuda") for _ in range(2)]

    def call(layer):
        garbage.pop()
        torch.empty(more, dtype=torch.uint8, device="cuda")
        return nf4.dequantize_nf4(layer.weight, layer.weight.quant_state)

    figure = types.SimpleNamespace(savefig=lambda *_, **__: None)
    names = {"GPU": True, "gpu": "NVIDIA Test", "RECORD": marked.record, "your_dequantize_nf4": call, "display": print}
    names["axes"] = types.SimpleNamespace(figure=figure)
    helpers.run_cell("score-run", {**vars(nf4), **names})
    found = json.loads((tmp_path / "results" / "nvidia-test.json").read_text())
    assert found["memory"]["peak_extra_bytes"] == more
