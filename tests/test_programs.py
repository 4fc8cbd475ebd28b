"""How a program uses the function: gradients, threads, devices, long runs, training, harness."""

import collections
import concurrent.futures
import contextlib
import ctypes
import functools
import gc
import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import types
from unittest import mock

import bitsandbytes as bnb
import helpers
import pytest
import torch
import torch.utils.flop_counter
import training
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from helpers import DTYPES
from torch.multiprocessing.reductions import StorageWeakRef

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
    """matmul_4bit dequantizes when it differentiates: by ours its gradients stay the same."""
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
    """Of the input and both adapters; through the weight alone also as matmul_4bit has it."""
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

    pairs = zip(
        gradients(dequantized(nf4.dequantize_nf4)),
        gradients(dequantized(dequantize_4bit)),
        strict=True,
    )
    assert [helpers.differing(nf4, tally, *pair) for pair in pairs] == [0, 0, 0]
    (ours,) = gradients(dequantized(nf4.dequantize_nf4), adapted=False)
    (theirs,) = gradients(
        lambda x: bnb.matmul_4bit(x, layer.weight, layer.weight.quant_state), adapted=False
    )
    assert helpers.differing(nf4, tally, ours, theirs) == 0
    wrong_one = training.one_bit_off(dequantize_4bit)
    (wrong,) = gradients(dequantized(wrong_one), adapted=False)
    assert nf4.bits_differing(wrong, theirs) > 0


SIZES = [((2, 7), False), ((2, 7), True), ((2, 1), True), ((), True)]  # (), one token alone


@pytest.mark.parametrize("tokens, bias", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_bitsandbytes(nf4, device, tally, dtype, tokens, bias):
    """A layer multiplies by what bitsandbytes would dequantize, to the bit."""
    layer = bnb.nn.Linear4bit(64, 128, bias, dtype, True, "nf4").to(device)
    layer.weight.quant_state.dtype = dtype
    weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    x = torch.randn(*tokens, 64, device=device).to(dtype)
    upstream = torch.randn(*tokens, 128, device=device).to(dtype)
    if bias:
        layer.bias.data = layer.bias.data.to(dtype)

    def trained(function):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        out = function(leaf)
        out.backward(upstream)
        return [out.detach(), leaf.grad] + ([layer.bias.grad.clone()] if bias else [])

    def theirs(leaf):
        return torch.nn.functional.linear(leaf, weight, layer.bias)

    before = bnb.matmul_4bit
    with nf4.in_bitsandbytes(fewest=1):
        got = trained(layer)
    assert bnb.matmul_4bit is before
    wanted = trained(theirs)
    # Autograd multiplies the rows as one matrix, too, and sums the bias' gradients over them.
    assert [helpers.differing(nf4, tally, *pair) for pair in zip(got, wanted, strict=True)] == [
        0
    ] * len(got)


def test_what_in_bitsandbytes_leaves_to_bitsandbytes(nf4, device, monkeypatch):
    """Few tokens, other formats, an output that is given, and weights quantized transposed."""
    dtype = torch.float32
    taken = []

    def noted(*arguments):
        taken.append(arguments)
        return torch.nn.functional.linear(arguments[0], nf4.matrix_of(*arguments[1:3]))

    monkeypatch.setattr(nf4.DequantizedProduct, "apply", noted)
    values = torch.randn(128, 64, device=device)
    weight, state = quantize_4bit(values, quant_type="nf4")
    x = torch.randn(64, 64, device=device)
    fp4 = quantize_4bit(values, quant_type="fp4")
    wide = torch.randn(64, 128, device=device)
    out = torch.empty(64, 128, device=device, dtype=dtype)
    left = {  # arguments of matmul_4bit
        "63 tokens": ((x[:63], weight, state), {}),
        "fp4": ((x, *fp4), {}),
        "an output": ((x, weight, state), {"out": out}),
        "transposed": ((wide, weight, state), {}),
    }
    wanted = {name: bnb.matmul_4bit(*given, **options) for name, (given, options) in left.items()}
    with nf4.in_bitsandbytes():
        for name, (given, options) in left.items():
            got = bnb.matmul_4bit(*given, **options)
            assert nf4.bits_differing(got, wanted[name]) == 0, name
        assert taken == []
        bnb.matmul_4bit(x, weight, state)
        bnb.matmul_4bit(x.view(2, 32, 64), weight.t(), state)
        assert len(taken) == 2
        with pytest.raises(ValueError, match="quant_state is required"):
            bnb.matmul_4bit(x, weight, None)


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (3, 2)])
def test_in_bitsandbytes_takes_a_weight_of_one_byte(nf4, device, shape):
    """Packed as [1, 1] it looks transposed, and is not."""
    weight, state = quantize_4bit(torch.randn(shape, device=device), quant_type="nf4")
    matrix = nf4.spec(weight, state)
    x = torch.randn(64, shape[1], device=device, requires_grad=True)
    with nf4.in_bitsandbytes():
        out = bnb.matmul_4bit(x, weight, state)
        (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(out, x @ matrix.t())
    torch.testing.assert_close(grad, torch.ones_like(out) @ matrix)


def test_in_bitsandbytes_is_undone_after_an_error(nf4):
    before = bnb.matmul_4bit
    with pytest.raises(KeyError), nf4.in_bitsandbytes():
        assert bnb.matmul_4bit is not before
        raise KeyError
    assert bnb.matmul_4bit is before


TRAININGS = [("small", torch.float16), ("small", torch.bfloat16), ("llama8b", torch.bfloat16)]
TRAININGS = TRAININGS if GPU else [("tiny", torch.float16), ("tiny", torch.bfloat16)]


@pytest.mark.parametrize("size, dtype", TRAININGS)
def test_training_in_bitsandbytes(nf4, device, tally, size, dtype):
    """A Llama with NF4 weights and LoRA adapters trains bit for bit alike, and is timed."""
    model, adapters = training.build(device, dtype, size)
    contexts = training.contexts_of(nf4, fewest=64 if GPU else 1)
    trained = {name: contexts[name] for name in ("theirs", "ours", "wrong")}
    timed = {name: contexts[name] for name in ("stock", "replaced", "ours")}
    for batch in training.RUNS[size]:
        ids = training.token_ids(device, batch)
        facts = training.compared(nf4, model, adapters, ids, trained)
        count(tally, facts)
        ms = training.step_ms(model, adapters, ids, timed, training.TURNS[size])
        record(tally, dtype, f"{size}_{ids.numel()}", ms)


def test_the_contexts_of_training_replace_what_they_say(nf4, device):
    """How often a training step of the tiny model calls which function, forward and backward."""
    model, adapters = training.build(device, torch.bfloat16, "tiny")
    ids = training.token_ids(device, (1, 8))
    optimizer = torch.optim.AdamW(adapters, lr=0.0)
    layers = 7 * training.SIZES["tiny"]["num_hidden_layers"]
    ours = Calls(nf4.dequantize_nf4)
    theirs = Calls(dequantize_4bit)
    with (
        mock.patch.object(nf4, "dequantize_nf4", ours),
        mock.patch.object(bnb.functional, "dequantize_4bit", theirs),
    ):
        contexts = training.contexts_of(nf4, fewest=1)
        counted = {}
        for name in ("stock", "replaced", "ours"):
            before = ours.number, theirs.number
            with contexts[name]():
                training.step(model, optimizer, ids)
            counted[name] = ours.number - before[0], theirs.number - before[1]
    # The first layer's q, k and v need no gradient of their input, the embedding.
    assert counted == {
        "stock": (0, layers - 3),
        "replaced": (layers - 3, 0),
        "ours": (2 * layers - 3, 0),
    }


class Calls:
    """The function, and how often it was called."""

    def __init__(self, function):
        self.function, self.number = function, 0

    def __call__(self, *arguments):
        self.number += 1
        return self.function(*arguments)


def test_training_is_timed_in_turn(monkeypatch):
    order = []

    @contextlib.contextmanager
    def context(name):
        order.append(name)
        yield

    monkeypatch.setattr(training, "step", lambda *_: None)
    contexts = {name: functools.partial(context, name) for name in "ab"}
    adapters = [torch.zeros(1, requires_grad=True)]
    ms = training.step_ms(None, adapters, torch.zeros(1), contexts, turns=2)
    assert "".join(order) == "baabba" and list(ms) == ["a", "b"]


def count(tally, facts):
    tally["cases"] += 1
    tally["weights"] += facts["compared"]
    tally["differing"] += facts["ours_differing"]
    assert facts["compared"] and facts["ours_differing"] == 0
    assert facts["wrong_differing"] > 0, "one wrong bit goes unnoticed"


def record(tally, dtype, run, ms):
    """Prints the times per step; those of a GPU in bfloat16 go into the record."""
    print(f"{run}, {dtype}:", *(f"{name} {value:.2f} ms" for name, value in ms.items()), sep="  ")
    if GPU and dtype == torch.bfloat16:
        tally.update({f"training_ms_{run}_{name}": value for name, value in ms.items()})


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
def test_training_with_unsloth_or_ours(nf4, unsloth_report, tally, dtype):
    facts = unsloth_report[nf4.name_of(dtype)]
    count(tally, facts)
    assert facts["stock_calls"] == facts["ours_calls"] > facts["ours_transposed"] > 0
    record(tally, dtype, "unsloth", facts["ms"])


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
    pairs = [
        nf4.quantized((64, 128), dtype, "cuda", seed=seed) for seed in range(3) for dtype in DTYPES
    ]
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


# A long run over many layers that come, change and go: right bits throughout, and no growth of
# memory. Wrong functions are run as well: one that holds on to old results, and two that leak.
LAYERS, WARM_UP, CALLS = (300, 20_000, 80_000) if GPU else (12, 60, 300)
CHANGES, CHECKS = (20, 50) if GPU else (4, 5)  # one in so many calls
LOADED = [(512, 1024), (256, 256), (1024, 64), (128, 1000), (96, 640), (33, 65), (1, 4097), (7, 9)]
LOADED = LOADED if GPU else [(32, 64), (8, 100), (3, 5), (1, 700)]
TOLERANCE = (
    8 << 20
)  # bytes of the process, whose heap is never quite still: 105 in each of 80 000 calls


def make(device, shape, dtype, nested):
    values = torch.randn(shape, device=device).to(dtype)
    weight, state = quantize_4bit(values, compress_statistics=nested, quant_type="nf4")
    return torch.nn.Parameter(weight, requires_grad=False), state


def bytes_like(tensor):
    return torch.randint(0, 256, tensor.shape, dtype=torch.uint8, device=tensor.device)


def change(layers, i, kind):
    """Changes layer i in one of the ways of real life; all sizes stay the same."""
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
        state.state2.absmax = (
            state.state2.absmax * 1.5 if state.state2.absmax[0] < 1 else state.state2.absmax / 2
        )


KINDS = ("layer", "weight", "weight.data", "contents", "absmax", "absmax.data", "state2.absmax")


class Load:
    def __init__(self, nf4, device, tally):
        torch.manual_seed(0)
        self.nf4, self.tally, self.random = nf4, tally, random.Random(0)
        self.layers = [
            make(device, LOADED[i % len(LOADED)], DTYPES[i % 3], nested=i % 5 > 0)
            for i in range(LAYERS)
        ]

    def run(self, function, calls):
        """Calls function for random layers, changes some of them, counts what differs."""
        wrong = 0
        for call in range(calls):
            i = self.random.randrange(LAYERS)
            if call % CHANGES == 0:
                change(self.layers, i, self.random.choice(KINDS))
            out = function(*self.layers[i])
            if call % CHECKS == 0:
                wrong += helpers.differing(
                    self.nf4, self.tally, out, helpers.expected(*self.layers[i])
                )
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
    """Bytes added on the GPU and in the process by so many calls; how many weights differed."""
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

    def function(weight, state):
        return held.setdefault(id(state), nf4.dequantize_nf4(weight, state))

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
    options = (
        nf4.OPTIONS[1:2] if GPU else nf4.SMALL_OPTIONS
    )  # bitsandbytes multiplies small matrices in its own way
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


def alive(out):
    return StorageWeakRef(out.untyped_storage())


def outputs_of(loop, X, mlp):
    """What a loop of the harness holds: how many results live at each call, and their addresses."""
    results, living = [], []

    def fx(layer):
        living.append(sum(not result.expired() for result in results))
        out = torch.ones(4, 4, device=X.device)
        results.append(alive(out))
        addresses.append(out.data_ptr())
        return out

    addresses = []
    returned = loop(X, mlp, fx)
    living.append(sum(not result.expired() for result in results))
    return living, addresses, returned


def test_three_outputs_live_until_the_last_wait(nf4, device):
    """As in the challenge's loop: each output is a block of its own, and the three are returned."""
    mlp = types.SimpleNamespace(up_proj=1, gate_proj=2, down_proj=3, layers=lambda: (1, 2, 3))
    X = torch.ones(1, device=device)
    living, addresses, returned = outputs_of(nf4.mlp_dequantize, X, mlp)
    assert living == [0, 1, 2, 3]
    assert len(set(addresses)) == 3
    assert [out.data_ptr() for out in returned] == addresses

    def dropping(X, mlp, fx):  # as the loop once was
        for layer in mlp.layers():
            fx(layer).t()

    living, _, returned = outputs_of(dropping, X, mlp)
    assert living == [0, 0, 0, 0] and returned is None


def test_each_output_is_waited_for(nf4, monkeypatch):
    order = []

    def fx(layer):
        order.append(layer)
        return torch.ones(2, 3)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
    mlp = types.SimpleNamespace(up_proj="up", gate_proj="gate", down_proj="down")
    X = types.SimpleNamespace(is_cuda=True)
    outs = nf4.mlp_dequantize(X, mlp, fx)
    assert order == ["up", "wait", "gate", "wait", "down", "wait"]
    assert [tuple(out.shape) for out in outs] == [(3, 2)] * 3


def test_races(nf4):
    """A race times nothing whose bits are wrong; in each round all contenders take a turn."""
    order, made = [], {}

    def noted(name, factor=1):
        def fx(layer):
            order.append(name)
            if layer not in made:  # once: Triton's interpreter takes its time
                made[layer] = nf4.your_dequantize_nf4(layer)
            return made[layer] * factor

        return nf4.Contender(fx)

    options = nf4.SMALL_OPTIONS
    with pytest.raises(AssertionError, match=r"b: \d+ wrong weights"):
        nf4.race({"a": noted("a"), "b": noted("b", 1.001)}, (torch.float16,), 1, 1, options)
    order.clear()
    dtypes = torch.float16, torch.bfloat16
    rows = nf4.race({"a": noted("a"), "b": noted("b")}, dtypes, 3, 2, options)
    n_mlps = len(options) * len(dtypes)
    checks, once = "ab" * 3, 6  # two loops of three layers
    timed = "".join(order).removeprefix(checks * n_mlps)[::once]
    pairs = [timed[i : i + 2] for i in range(0, len(timed), 2)]
    assert set(pairs) == {"ab", "ba"} and len(pairs) == 3 * n_mlps
    cells = [(row["dtype"], row["option"]) for row in rows[::2]]
    rounds = [cells[i : i + n_mlps] for i in range(0, len(cells), n_mlps)]
    assert len(set(map(tuple, rounds))) == 3, "each round has an order of its own"
    names = [nf4.name_of(dtype) for dtype in dtypes]
    expected = sorted(itertools.product(names, range(3), range(3), "ab"))
    found = [(row["dtype"], row["option"], row["round"], row["who"]) for row in rows]
    assert sorted(found) == expected
    for row in rows:
        assert set(row) == {"dtype", "option", "round", "who", "us"} and row["us"] > 0


def test_a_race_counts_a_call_of_three(nf4, monkeypatch):
    """1.5 s for 250 loops of three calls are 2,000 us a call."""
    monkeypatch.setattr(nf4, "timed", lambda X, mlp, fx, loops: 1.5 * loops / 250)
    ours = {"ours": nf4.CONTENDERS["ours"]}
    rows = nf4.race(ours, (torch.float16,), rounds=1, options=nf4.SMALL_OPTIONS[:1])
    assert [row["us"] for row in rows] == pytest.approx([2000.0])


def made_up_rows(nf4):
    """Of ours: 1 us an option, 2 in the second round; another takes 1.5, 2 and 3 times as long."""
    rows = []
    for dtype, turn in itertools.product(("float16", "bfloat16"), range(3)):
        ours = 2.0 if turn == 1 else 1.0
        factor = (1.5, 3.0, 2.0)[turn] * (2 if dtype == "bfloat16" else 1)
        for option in range(3):
            row = {"dtype": dtype, "option": option, "round": turn}
            rows.append(row | {"who": "ours", "us": ours})
            rows.append(row | {"who": "peft", "us": ours * factor})
    return rows


def test_the_mix_takes_each_option_in_its_own_dtype(nf4):
    *_, mix = nf4.entries_of(made_up_rows(nf4))
    assert mix["dtypes"] == "original"
    assert mix["baseline_us"] == [2.0, 4.0, 4.0]  # the medians in fp16, bf16, bf16


def test_entries_take_ratios_within_a_round(nf4):
    found = nf4.entries_of(made_up_rows(nf4), loops=100)
    by_dtype = {entry["dtypes"]: entry for entry in found}
    assert list(by_dtype) == ["float16", "bfloat16", "original"] and len(found) == 3
    expected = {"float16": (2.0, 1.5, 3.0), "bfloat16": (4.0, 3.0, 6.0)}
    expected["original"] = (10 / 3, 2.5, 5.0)
    for dtype, (median, low, high) in expected.items():
        ratio = by_dtype[dtype]["ratio"]
        assert ratio == pytest.approx({"median": median, "low": low, "high": high})
    entry = by_dtype["float16"]
    assert entry["baseline"] == "peft"
    # The medians of the rounds; and 100 loops of three calls for each of three options.
    assert entry["ours_us"] == [1.0] * 3 and entry["baseline_us"] == [2.0] * 3
    assert entry["ours_s"] == pytest.approx([9e-4, 18e-4, 9e-4])
    assert entry["baseline_s"] == pytest.approx([13.5e-4, 54e-4, 18e-4])


def on_a_slower_host(nf4, contenders, dtypes, rounds=20, loops=250):
    """It is slower for half of the race, and turns in a round: ours meets it once more."""
    rows = []
    cases = itertools.product(dtypes, range(len(nf4.OPTIONS)), range(rounds))
    for dtype, option, turn in cases:
        us = dict.fromkeys(contenders, 1.4 if turn < rounds // 2 else 1.0)
        us["ours"] = 1.05 * (1.4 if turn <= rounds // 2 else 1.0)
        for who in contenders:
            row = {"dtype": nf4.name_of(dtype), "option": option, "round": turn}
            rows.append(row | {"who": who, "us": us[who]})
    return rows


@pytest.fixture
def race_cell(nf4):
    """What the cell of the race is run with, on a host that slows down; no table, no picture."""
    names = {**vars(nf4), "GPU": True, "RECORD": {}, "gpu": "here", "cpu": "a host"}
    names |= {"contenders": dict(nf4.CONTENDERS), "race": functools.partial(on_a_slower_host, nf4)}
    silent = ("show", "us_table", "draw_race")
    return names | {name: lambda *_, **__: [] for name in silent}


def test_a_slower_host_leaves_the_floor_as_it_is(nf4, race_cell):
    helpers.run_cell("race-run", race_cell)
    found = race_cell["RECORD"]["floor"]
    assert len(found) == 2 * 3 and {entry["baseline"] for entry in found} == set(nf4.NO_CHECKS)
    for entry in found:
        assert entry["ratio"]["median"] == pytest.approx(1 / 1.05)


def test_without_bare_calls_there_is_no_floor(race_cell):
    del race_cell["contenders"]["bare"]
    helpers.run_cell("race-run", race_cell)
    assert set(race_cell["RECORD"]) == {"harness"}


def test_without_unsloths_bare_call_the_floor_is_ours(race_cell):
    del race_cell["contenders"]["unsloth_bare"]
    helpers.run_cell("race-run", race_cell)
    assert {entry["baseline"] for entry in race_cell["RECORD"]["floor"]} == {"bare"}


def test_ratios_stand_below_their_dtypes(nf4):
    table = nf4.ratio_table(nf4.entries_of(made_up_rows(nf4)))
    assert list(table) == ["float16", "bfloat16", "original"]
    assert table.loc["peft"].tolist() == pytest.approx([2.0, 4.0, 10 / 3])


def test_who_is_raced(nf4, race_cell):
    """All but the calls that check nothing."""
    helpers.run_cell("race-run", race_cell)
    baselines = {entry["baseline"] for entry in race_cell["RECORD"]["harness"]}
    assert baselines == set(nf4.CONTENDERS) - {"ours", *nf4.NO_CHECKS}


def fx_of(call):
    contender, _ = call.args
    return contender.fx


@pytest.fixture
def two_contenders(nf4, monkeypatch):
    """two_contenders(who, **changes): "ours" and another, which run a kernel and three."""
    kernels = {}

    def make(who, **changes):
        ours = nf4.Contender(lambda layer: nf4.your_dequantize_nf4(layer))
        three = {"has_one_kernel": False}
        other = nf4.Contender(lambda layer: nf4.bnb_dequantize(layer), **three)
        contenders = {"ours": ours, "peft": other}
        kernels.update({ours.fx: 1, other.fx: 3})
        for name in ("fx", "context", "has_one_kernel"):
            if name in changes:
                contenders[who] = contenders[who]._replace(**{name: changes[name]})
        if "fx" in changes:
            kernels[changes["fx"]] = 1
        monkeypatch.setattr(nf4, "CONTENDERS", contenders)

    monkeypatch.setattr(nf4, "kernels_of", lambda call: ["kernel"] * kernels[fx_of(call)])
    return make


def raising(layer):
    raise RuntimeError("out of order")


def wrong(layer):
    state = layer.weight.quant_state
    return torch.zeros(tuple(state.shape), dtype=state.dtype, device=layer.weight.device)


def in_one(layer):
    """Right, but as two_contenders counts, in one kernel."""
    return dequantize_4bit(layer.weight.data, layer.weight.quant_state)


FAULTS = {
    "it raises": ({"fx": raising}, "RuntimeError('out of order')"),
    "wrong bits": ({"fx": wrong}, "wrong weights"),
    "too many kernels": ({"has_one_kernel": True}, "a call ran 3 kernels"),
    "too few kernels": ({"fx": in_one}, "a call ran 1 kernels"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_contender_that_fails_is_left_out_and_ours_is_an_error(
    nf4, two_contenders, capsys, fault
):
    """A newer PEFT or Unsloth may break its part of the comparison, not the notebook."""
    changes, told = FAULTS[fault]
    layers = [nf4.build(nf4.SMALL_OPTIONS[0], torch.float16)[1].gate_proj]
    two_contenders("peft")
    assert list(nf4.contenders_here(layers)) == ["ours", "peft"]
    assert not capsys.readouterr().out
    two_contenders("peft", **changes)
    assert list(nf4.contenders_here(layers)) == ["ours"]
    said = capsys.readouterr().out
    assert said.startswith("Not compared with PEFT: ") and told in said
    if fault in ("it raises", "wrong bits"):
        two_contenders("ours", **changes)
        with pytest.raises((RuntimeError, AssertionError), match="out of order|wrong weights"):
            nf4.contenders_here(layers)


def test_where_the_profiler_sees_nothing_no_contender_is_left_out(nf4, two_contenders, monkeypatch):
    monkeypatch.setattr(nf4, "kernels_of", lambda call: [])
    layers = [nf4.build(nf4.SMALL_OPTIONS[0], torch.float16)[1].gate_proj]
    two_contenders("peft")
    assert list(nf4.contenders_here(layers)) == ["ours", "peft"]


def test_a_contender_that_is_wrong_in_one_dtype_is_left_out(nf4, two_contenders, capsys):
    """Else the race, which runs both, would stop there."""
    dtypes = (torch.float16, torch.bfloat16)
    layers = [nf4.build(nf4.SMALL_OPTIONS[0], dtype)[1].gate_proj for dtype in dtypes]
    two_contenders("peft", fx=lambda layer: nf4.bnb_dequantize(layer).half())
    assert list(nf4.contenders_here(layers)) == ["ours"]
    assert "bfloat16" in capsys.readouterr().out


def test_the_three_launches_need_the_switch(nf4, monkeypatch, two_contenders, capsys):
    """Without it today's path would be measured twice; so it is left out, and that is said."""
    layers = [nf4.build(nf4.SMALL_OPTIONS[0], torch.float16)[1].gate_proj]
    kernels = types.SimpleNamespace(_USE_NF4_KERNELS=True)
    monkeypatch.setattr(nf4, "unsloth_kernels", kernels)
    two_contenders("peft", context=nf4.three_launches)
    assert list(nf4.contenders_here(layers)) == ["ours", "peft"]
    with nf4.three_launches():
        assert kernels._USE_NF4_KERNELS is False
    assert kernels._USE_NF4_KERNELS is True
    monkeypatch.setattr(nf4, "unsloth_kernels", types.SimpleNamespace(_USE_KERNELS=True))
    assert list(nf4.contenders_here(layers)) == ["ours"]
    assert "_USE_NF4_KERNELS" in capsys.readouterr().out


def test_without_kept_launches_there_is_no_bare_call(nf4, monkeypatch, capsys):
    monkeypatch.setattr(nf4, "keep", lambda *_: None)
    monkeypatch.setattr(nf4, "kernels_of", lambda call: ["kernel"])
    contenders = {name: nf4.CONTENDERS[name] for name in ("ours", "bare")}
    monkeypatch.setattr(nf4, "CONTENDERS", contenders)
    layers = [nf4.build(nf4.SMALL_OPTIONS[0], torch.float16)[1].gate_proj]
    assert list(nf4.contenders_here(layers)) == ["ours"]
    told = "Not compared with ours, no checks: RuntimeError('launches are not kept here')"
    assert told in capsys.readouterr().out


def test_unsloths_kernel_is_started_with_what_it_was_launched_with(nf4, monkeypatch):
    """But with a fresh output each time."""
    table = torch.ones(3)
    signature = {"W": "*u8", "T": "*fp32", "out": "*fp16", "n": "i32", "ROWS": "constexpr"}
    metadata = types.SimpleNamespace(num_warps=2, shared=64, global_scratch_size=0)
    source = types.SimpleNamespace(signature=signature)
    compiled = types.SimpleNamespace(src=source, metadata=metadata, function=17)
    module = types.SimpleNamespace(launch=lambda *_: pytest.fail("launched, and not noted"))

    def fast_dequantize(weight, state):
        out = torch.zeros(2, 4, dtype=torch.float16)
        kernel = {(5,): lambda *args, ROWS, num_warps: compiled}
        module.launch(kernel, (5,), (weight, table, out, 9), 3, {"ROWS": 2}, 0, num_warps=2)
        return out

    def allocate(shape, stride, dtype):
        return torch.empty_strided(shape, stride, dtype=dtype)

    started = []
    monkeypatch.setitem(sys.modules, "unsloth.kernels.nf4", module)
    monkeypatch.setattr(nf4, "fast_dequantize", fast_dequantize)
    helpers.give_torch(allocate, lambda: None, lambda index: "the stream", monkeypatch)
    helpers.launch_by(lambda *how: started.append(how), monkeypatch)
    layer = nf4.build(nf4.SMALL_OPTIONS[0], torch.float16)[1].gate_proj
    nf4.CONTENDERS["unsloth_bare"].prepare(layer)
    outs = [nf4.unsloth_bare_dequantize(layer) for _ in range(2)]
    inputs = (layer.weight.data_ptr(), table.data_ptr())
    how = (17, 5, 1, 1, 2, 64, "OOOiO")
    assert started == [(*how, (*inputs, out.data_ptr(), 9, None), "the stream") for out in outs]
    assert outs[0].data_ptr() != outs[1].data_ptr()
    assert outs[0].shape == (2, 4) and outs[0].dtype == torch.float16


@pytest.fixture
def imitated_calls(nf4, monkeypatch):
    """{what a contender's fx is: how many kernels it runs}; a host that is slower at first."""
    kernels, times = {}, collections.Counter()

    def imitated_us(function, layer):
        function(layer)
        times[function] += 1
        return (90.0, 40.0) if times[function] == 1 else (10.0, 40.0 + times[function])

    monkeypatch.setattr(nf4, "kernels_of", lambda call: ["kernel"] * kernels[fx_of(call)])
    monkeypatch.setattr(nf4, "issue_and_wait_us", imitated_us)
    return kernels


@pytest.fixture
def layer(nf4):
    return nf4.build(nf4.SMALL_OPTIONS[0], torch.float16)[1].gate_proj


def test_calls_are_counted_and_timed(nf4, imitated_calls, layer):
    inside = []

    @contextlib.contextmanager
    def context():
        inside.append(True)
        yield
        inside.pop()

    def in_context(layer):
        assert inside
        return nf4.bnb_dequantize(layer)

    imitated_calls |= {nf4.your_dequantize_nf4: 1, in_context: 4}
    contenders = {
        "ours": nf4.Contender(nf4.your_dequantize_nf4),
        "three": nf4.Contender(in_context, has_one_kernel=False, context=context),
    }
    times = {"issue_us": 10.0, "wait_us": 42.0, "call_us": 52.0}  # the medians of the rounds
    assert nf4.time_calls(contenders, layer, rounds=3) == [
        {"who": "ours", "kernels": 1, **times},
        {"who": "three", "kernels": 4, **times},
    ]


def test_wrong_bits_are_not_timed(nf4, imitated_calls, layer):
    def fx(layer):
        return nf4.your_dequantize_nf4(layer) * 1.001

    imitated_calls[fx] = 1
    with pytest.raises(AssertionError, match=r"ours: \d+ wrong weights"):
        nf4.time_calls({"ours": nf4.Contender(fx)}, layer)


def test_a_call_is_issued_then_waited_for(nf4, monkeypatch):
    """By a clock that a call moves by 2 us, then by 4, and waiting by 5."""
    now, moves = [0.0], iter([2e-6, 4e-6] * 5)

    def fx(layer):
        now[0] += next(moves)

    def wait():
        now[0] += 5e-6

    monkeypatch.setattr(nf4.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    assert nf4.issue_and_wait_us(fx, None, calls=10) == pytest.approx((3.0, 5.0))


def test_what_the_contenders_claim(nf4):
    """How many kernels may run in a call."""
    for name, contender in nf4.CONTENDERS.items():
        assert contender.has_one_kernel == (name not in ("unsloth_puzzle", "peft")), name


@pytest.mark.gpu
def test_kernels_are_counted_by_the_profiler(nf4):
    layer = nf4.build(nf4.OPTIONS[0], torch.float16)[1].gate_proj
    contenders = {name: nf4.CONTENDERS[name] for name in ("ours", "bare", "kernel_grid")}
    nf4.prepare_and_check(contenders, [layer])
    found = []
    for contender in contenders.values():
        names = nf4.kernels_of(functools.partial(nf4.dequantized_by, contender, layer))
        assert ["_dequantize_nf4_kernel" in name for name in names] == [True]
        found.append(names)
    assert found[0] == found[1] == found[2]
    assert len(nf4.kernels_of(functools.partial(nf4.bnb_dequantize, layer))) > 1


@pytest.fixture
def marked(nf4):
    """A record that is worth every point, and the code of its kernel."""
    dtypes = ("float16", "bfloat16")
    official = []
    for dtype, ratio in itertools.product((*dtypes, "original"), (0.9, 1.2, 1.3)):
        official.append({"dtype": dtype, "ratio": ratio})
    compiled = []
    for dtype, options in itertools.product(dtypes, nf4.COMPILE_RUNS):
        row = {"function": "dequantization", "options": options, "dtype": dtype}
        row |= {"graphs": 1, "graph_breaks": 0, "recompiles": 0}
        compiled.append(row | {"bit_equal": True, "compiled": True})
    record = {"gpu": "Tesla T4", "exact": {"checked": 5, "differing": 0}}
    record |= {"launches": ["_dequantize_nf4_kernel"], "official_s": official, "compile": compiled}
    ptx = "shfl.sync.idx.b32 ld.global.L1::evict_first.b32 shfl.sync.idx.b32"
    return types.SimpleNamespace(record=record, ptx=ptx)


def timed(marked, dtype, median):
    _, row, _ = (row for row in marked.record["official_s"] if row["dtype"] == dtype)
    row["ratio"] = median


def without(marked, key, dtype):
    """The record's rows of that key without those in the dtype."""
    marked.record[key] = [row for row in marked.record[key] if row["dtype"] != dtype]


COMPILES = "works in torch.compile"
TESTED = "tested in f16 and bf16"
POINTS = {  # what is worse -> (how, the criterion, the points that are left, what is said)
    "nothing": (lambda m: None, "speedup", 5, "1.20 over today's Unsloth"),
    "12 %": (lambda m: timed(m, "float16", 1.12), "speedup", 3, "1.12"),
    "6 %": (lambda m: timed(m, "bfloat16", 1.06), "speedup", 1, "1.06"),
    "1 %": (lambda m: timed(m, "original", 1.01), "speedup", 0, "1.01"),
    "slower": (lambda m: timed(m, "float16", 1.0), "speedup", -3, "1.00"),
    "no time in bf16": (lambda m: without(m, "official_s", "bfloat16"), "speedup", -3, "not timed"),
    "no times": (lambda m: m.record.pop("official_s"), "speedup", -3, "not timed"),
    "two kernels": (
        lambda m: m.record["launches"].append("copy"),
        "single Triton kernel",
        0,
        "_dequantize_nf4_kernel, copy",
    ),
    "no kernel": (lambda m: m.record["launches"].clear(), "single Triton kernel", 0, ""),
    "all compiled": (lambda m: None, COMPILES, 1, "6 of 6"),
    "not compiled": (
        lambda m: m.record["compile"][4].update(compiled=False),
        COMPILES,
        -1,
        "5 of 6",
    ),
    "other bits": (
        lambda m: m.record["compile"][0].update(bit_equal=False),
        COMPILES,
        -1,
        "5 of 6",
    ),
    "two graphs": (lambda m: m.record["compile"][5].update(graphs=2), COMPILES, -1, "5 of 6"),
    "nothing compiled": (lambda m: m.record["compile"].clear(), COMPILES, -1, "0 of 0"),
    "bf16 not compiled": (lambda m: without(m, "compile", "bfloat16"), COMPILES, -1, "3 of 3"),
    "fp16 not compiled": (lambda m: without(m, "compile", "float16"), COMPILES, -1, "3 of 3"),
    "assembly": (lambda m: None, "custom asm works", 3, "2 shuffles"),
    "no assembly": (lambda m: setattr(m, "ptx", "evict"), "custom asm works", 0, "0 shuffles"),
    "wrong bits": (
        lambda m: m.record["exact"].update(differing=1),
        "custom asm works",
        0,
        "2 shuffles",
    ),
    "hints": (lambda m: None, "uses cache eviction", 1, "L1::evict_first"),
    "no hints": (lambda m: setattr(m, "ptx", "shfl.sync.idx"), "uses cache eviction", 0, ""),
    "tested": (lambda m: None, TESTED, 1, "5 weights compared, 0 differ; timed in fp16, bf16"),
    "no bf16": (lambda m: without(m, "official_s", "bfloat16"), TESTED, -1, "timed in fp16, "),
    "bits differ": (lambda m: m.record["exact"].update(differing=1), TESTED, -1, "1 differ"),
    "nothing compared": (
        lambda m: m.record["exact"].update(checked=0),
        TESTED,
        -1,
        "0 weights compared",
    ),
}


@pytest.mark.parametrize("case", POINTS)
def test_the_marking_follows_the_challenge(nf4, marked, case):
    worsen, criterion, points, said = POINTS[case]
    worsen(marked)
    rows = nf4.score(marked.record, marked.ptx)
    (row,) = [row for row in rows if row["criterion"] == criterion]
    assert row["points"] == points
    assert said in row["evidence"]
    assert sum(row["possible"] for row in rows) == 14
    if case == "nothing":
        assert sum(row["points"] for row in rows) == 14


@pytest.mark.parametrize("ratio", [1.2, 1.12, 1.0])
def test_only_a_t4s_speedup_earns_points(nf4, marked, ratio):
    timed(marked, "float16", ratio)
    marked.record["gpu"] = "NVIDIA H200"
    rows = nf4.score(marked.record, marked.ptx)
    (row,) = [row for row in rows if row["criterion"] == "speedup"]
    assert row["points"] == 0 and row["possible"] == 5
    assert row["evidence"].endswith("; only a T4's earns points")
    assert sum(row["points"] for row in rows) == 9


def test_on_another_gpu_no_time_costs_nothing_either(nf4, marked):
    """It did, though one that was worse than theirs did not."""
    marked.record |= {"gpu": "NVIDIA H200", "official_s": []}
    (row,) = [row for row in nf4.score(marked.record, marked.ptx) if row["criterion"] == "speedup"]
    assert row["points"] == 0 and "not timed" in row["evidence"]


@pytest.mark.gpu
@pytest.mark.parametrize("more", [0, 1 << 20])
def test_memory_beyond_the_output(nf4, marked, monkeypatch, tmp_path, more):
    """What is freed while the one call runs hides nothing that the call allocates."""
    monkeypatch.chdir(tmp_path)
    garbage = [torch.empty(1 << 23, device="cuda") for _ in range(3)]

    def call(layer):  # twice to see its kernels, then once
        garbage.pop()
        torch.empty(more, dtype=torch.uint8, device="cuda")
        return nf4.dequantize_nf4(layer.weight, layer.weight.quant_state)

    figure = types.SimpleNamespace(savefig=lambda *_, **__: None)
    measured = marked.record | {"gpu": "NVIDIA Test"}
    names = {"GPU": True, "gpu": "NVIDIA Test", "RECORD": measured}
    names |= {"your_dequantize_nf4": call, "show": lambda *_: None}
    names |= {f"{name}_figure": figure for name in ("formats", "calls", "race")}
    helpers.run_cell("score-run", {**vars(nf4), **names})
    found = json.loads((tmp_path / "results" / "nvidia-test.json").read_text())
    assert found["memory"]["peak_extra_bytes"] == more and garbage == []
    assert ["_dequantize_nf4_kernel" in name for name in found["launches"]] == [True]
    assert (found["score"]["total"], found["score"]["possible"]) == (9, 14), "it is no T4"
