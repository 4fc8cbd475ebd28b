"""The ways in which a program uses the function: tracing, gradients, threads, streams, devices, very large weights."""

import concurrent.futures
import threading
import types
import warnings

import notebook
import pytest
import torch
import torch.utils.flop_counter
from bitsandbytes.functional import dequantize_4bit
from torch._subclasses import FakeTensorMode

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


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


def test_deterministic_algorithms(nf4, pair):
    weight, state = pair
    expected = dequantize_4bit(weight, state)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            assert nf4.bits_differing(nf4.dequantize_nf4(weight, state), expected) == 0
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("transposed", [False, True])
def test_fake_tensors(nf4, pair, transposed):
    weight, state = pair
    weight = weight.t() if transposed else weight
    expected = nf4.dequantize_nf4(weight, state)  # and keeps a launch, which must not be taken
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(weight)
    outputs = [nf4.dequantize_nf4(fake, state)]
    with mode:
        outputs += [nf4.dequantize_nf4(fake, state), nf4.dequantize_nf4(weight, state)]
    for out in outputs:
        assert isinstance(out, type(fake)) and out.device == weight.device
        assert (out.shape, out.stride(), out.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_meta_tensors(nf4, pair):
    weight, state = pair
    for name in ("absmax", "code", "offset"):
        setattr(state, name, getattr(state, name).to("meta"))
    state.state2.absmax, state.state2.code = state.state2.absmax.to("meta"), state.state2.code.to("meta")
    for moved, shape in ((weight.to("meta"), (64, 128)), (weight.to("meta").t(), (128, 64))):
        out = nf4.dequantize_nf4(moved, state)
        assert out.is_meta and out.shape == shape and out.dtype == torch.float16


class Dequantize(torch.nn.Module):
    def __init__(self, function, layer):
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, x):
        return x @ self.function(self.layer).t()


@pytest.mark.parametrize("strict", [True, False])
def test_export(nf4, device, strict):
    layer = nf4.bnb_Linear4bit(64, 128).to(device)
    layer.weight.quant_state.dtype = torch.float16
    x = torch.randn(3, 64, dtype=torch.float16, device=device)
    module = Dequantize(nf4.your_dequantize_nf4, layer)
    program = torch.export.export(module, (x,), strict=strict)
    assert any("dequantize" in str(node.target) or "triton" in str(node.target) for node in program.graph.nodes)
    assert nf4.bits_differing(program.module()(x), module(x)) == 0


def test_compiled_for_aligned_weights_then_given_unaligned_ones(nf4, device):
    torch._dynamo.reset()
    weight, state = nf4.quantized((64, 128), torch.float16, device)
    compiled = torch.compile(nf4.dequantize_nf4, fullgraph=True, backend=nf4.GraphCounter(device))
    expected = dequantize_4bit(weight, state)
    buffer = torch.zeros(weight.numel() + 16, dtype=torch.uint8, device=device)
    for offset in (0, 1, 2, 4, 8):
        moved = buffer[offset : offset + weight.numel()].view(weight.shape)
        moved.copy_(weight)
        assert nf4.bits_differing(compiled(moved, state), expected) == 0


@pytest.mark.gpu  # Triton's interpreter is no place for threads
def test_threads(nf4):
    pairs = [nf4.quantized((64, 128), dtype, "cuda", seed=seed) for seed in range(3) for dtype in DTYPES]
    expected = [dequantize_4bit(*pair) for pair in pairs]
    torch.cuda.synchronize()
    start = threading.Barrier(4)

    def work(first):
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            calls = range(first, first + 200)
            return sum(
                nf4.bits_differing(nf4.dequantize_nf4(*pairs[i % len(pairs)]), expected[i % len(pairs)]) for i in calls
            )

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(0, 12, 3))) == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (64, 128), (3, 5), (128,)])
def test_transposed_weights(nf4, device, shape, dtype):
    """What bitsandbytes and Unsloth answer to a packed weight passed as [1, n]."""
    weight, state = nf4.quantized(shape, dtype, device)
    expected = nf4.dequantize_reference(weight, state).reshape(shape)
    for packed in (weight, weight.t(), weight.view(-1)):
        want = expected.t() if packed.shape[0] == 1 else expected
        if device == "cuda":
            answer = dequantize_4bit(packed, state)
            assert answer.shape == want.shape and answer.stride() == want.stride()
        for _ in range(2):
            out = nf4.dequantize_nf4(packed, state)
            assert out.stride() == want.stride() and nf4.bits_differing(out, want) == 0


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0,)])
def test_no_weights_at_all(nf4, device, shape):
    for nested in (True, False):
        _, state = nf4.quantized((64, 64), torch.float16, device, nested=nested)
        state.shape, state.absmax = torch.Size(shape), state.absmax[:0]
        if nested:
            state.state2.absmax = state.state2.absmax[:0]
        for _ in range(2):
            out = nf4.dequantize_nf4(torch.empty((0, 1), dtype=torch.uint8, device=device), state)
            assert out.shape == shape and out.dtype == torch.float16 and out.device.type == device


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_states_own_code_is_followed(nf4, device, dtype):
    """bitsandbytes' kernels have NF4 built in; we follow what the state says, on every path."""
    pairs = [nf4.quantized(shape, dtype, device) for shape in ((64, 128), (3, 5))]
    for weight, state in pairs:
        state.code = state.code.flip(0).contiguous() * 1.5
        expected = nf4.dequantize_reference(weight, state)
        settings = [nf4.Setting(shuffle=False)] + ([nf4.Setting()] if device == "cuda" else [])
        outputs = [nf4.launched(weight, state, setting) for setting in settings]
        outputs += [nf4.dequantize_nf4(weight, state) for _ in range(2)]
        outputs += [torch.compile(nf4.dequantize_nf4, backend=nf4.GraphCounter(device))(weight, state)]
        assert all(nf4.bits_differing(out, expected) == 0 for out in outputs)


@pytest.mark.parametrize("storage", [torch.uint8, torch.float16, torch.bfloat16, torch.float32])
def test_storage_dtypes_of_a_real_layer(nf4, device, storage):
    layers = []
    for dtype in (torch.uint8, storage):
        torch.manual_seed(0)
        layer = torch.nn.Linear(64, 128, bias=False)
        quantized = nf4.bnb.nn.Linear4bit(64, 128, False, torch.float16, True, "nf4", quant_storage=dtype)
        quantized.load_state_dict(layer.state_dict())
        layers.append(quantized.to(device))
    assert layers[1].weight.dtype == storage
    for _ in range(2):
        outputs = [nf4.your_dequantize_nf4(layer) for layer in layers]
        assert nf4.bits_differing(*outputs) == 0
    assert nf4.bits_differing(outputs[0], nf4.dequantize_reference(layers[0].weight, layers[0].weight.quant_state)) == 0


def test_the_portable_decode_runs_where_the_assembly_is_refused(nf4, pair, monkeypatch):
    weight, state = pair
    asked = []

    class Refusing:
        def __getitem__(self, grid):
            def start(*arguments, **constants):
                asked.append(constants["SHUFFLE"])
                if constants["SHUFFLE"]:
                    raise RuntimeError("ptxas: no shfl today")
                return nf4._dequantize_nf4_kernel[grid](*arguments, **constants)

            return start

    monkeypatch.setattr(nf4, "INTERPRETED", False)
    monkeypatch.setattr(nf4, "ASSEMBLY_REFUSED", [])
    arguments = (weight, nf4.state_tensors(state), state.shape, state.dtype, 64, 256, nf4.Setting(), True)
    with pytest.warns(UserWarning, match="portable one runs .*no shfl today"):
        out, _, _ = nf4.launch(Refusing(), *arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        again, _, _ = nf4.launch(Refusing(), *arguments)
    assert asked == [True, False, False]
    for answer in (out, again):
        assert nf4.bits_differing(answer, dequantize_4bit(weight, state)) == 0


def test_an_error_that_is_not_the_assemblys_is_raised(nf4, pair, monkeypatch):
    weight, state = pair

    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("out of resources")

    monkeypatch.setattr(nf4, "INTERPRETED", False)
    monkeypatch.setattr(nf4, "ASSEMBLY_REFUSED", [])
    with pytest.raises(RuntimeError, match="out of resources"):
        nf4.launch(Broken(), weight, nf4.state_tensors(state), state.shape, state.dtype, 64, 256, nf4.Setting(), True)
    assert nf4.ASSEMBLY_REFUSED == []


@pytest.mark.parametrize("shape", [(64, 128), (3, 5)])
def test_a_triton_without_join(device, shape):
    """The path by bytes then runs, with two stores."""
    nf4 = notebook.load("nf4_no_join", edit=('hasattr(tl, "join")', "False"))
    for dtype in DTYPES:
        weight, state = nf4.quantized(shape, dtype, device)
        constants, _ = nf4.launch_plan(64 * 128, dtype, 64, 256, True, True, nf4.Setting())
        assert not constants["WHOLE"]
        for _ in range(2):
            assert nf4.bits_differing(nf4.dequantize_nf4(weight, state), dequantize_4bit(weight, state)) == 0


def test_a_card_that_is_too_old_is_told_so():
    """Before anything is compiled."""
    source = next(cell.source for cell in notebook.cells() if "Triton needs 7.0 or newer" in cell.source)
    facts = {"gpu": "Tesla P100", "capability": [6, 0]}
    names = {"gpu_facts": lambda: (facts, "580"), "versions": lambda driver: {}, "GPU": True, "table": pytest.fail}
    import datetime

    with pytest.raises(RuntimeError, match=r"Tesla P100 has capability \[6, 0\]; Triton needs 7\.0"):
        exec(source, names | {"datetime": datetime, "types": types})


def random_weight(nf4, n_weights, dtype):
    """Packed bytes and scales without quantizing anything; the code tables are real ones."""
    _, state = nf4.quantized((64, 64), dtype, "cuda")
    n_blocks = -(-n_weights // 64)
    state.shape = torch.Size((n_weights,))
    state.absmax = torch.randint(256, (n_blocks,), dtype=torch.uint8, device="cuda")
    state.state2.absmax = torch.rand(-(-n_blocks // 256), device="cuda")
    return torch.randint(256, ((n_weights + 1) // 2, 1), dtype=torch.uint8, device="cuda"), state


@pytest.mark.gpu
@pytest.mark.parametrize("n_weights", [2**31 + 2**25, 2**31 + 77])
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_than_2_to_the_31_weights(nf4, tally, n_weights, dtype):
    """By words and by bytes; compared in chunks, because bitsandbytes counts in 32 bits."""
    weight, state = random_weight(nf4, n_weights, dtype)
    outputs = [nf4.dequantize_nf4(weight, state)]
    outputs.append(nf4.dequantize_nf4(weight, state))  # the kept launch
    chunk = 2**28  # a multiple of 64 * 256
    for start in range(0, n_weights, chunk):
        stop = min(start + chunk, n_weights)
        _, part = nf4.quantized((64, 64), dtype, "cuda")
        part.shape, part.absmax = torch.Size((stop - start,)), state.absmax[start // 64 : -(-stop // 64)]
        part.state2.absmax = state.state2.absmax[start // 2**14 : -(-stop // 2**14)]
        part.offset = state.offset
        expected = dequantize_4bit(weight[start // 2 : -(-stop // 2)], part).view(-1)
        for out in outputs:
            tally["weights"] += expected.numel()
            assert nf4.bits_differing(out[start:stop], expected) == 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu_that_is_not_current(nf4, tally):
    for dtype in DTYPES:
        for shape in ((256, 512), (33, 65)):
            with torch.cuda.device(1):
                weight, state = nf4.quantized(shape, dtype, "cuda:1")
                expected = dequantize_4bit(weight, state)
                torch.cuda.synchronize()
            for current in (0, 1, 0, 1, 1):
                with torch.cuda.device(current):
                    out = nf4.dequantize_nf4(weight, state)
                    assert out.device == weight.device and torch.cuda.current_device() == current
                    assert nf4.bits_differing(out, expected) == 0
                    tally["second_gpu"] += 1
            with torch.utils.flop_counter.FlopCounterMode(display=False):  # through the operator
                out = nf4.dequantize_nf4(weight, state)
            assert out.device == weight.device and nf4.bits_differing(out, expected) == 0
            moved = weight.to("cuda:0")
            with pytest.raises(ValueError, match="cuda:1.*cuda:0"):
                nf4.dequantize_nf4(moved, state)
    layer = nf4.bnb_Linear4bit(64, 128).to("cuda:0")
    expected = nf4.your_dequantize_nf4(layer)
    layer = layer.to("cuda:1")
    assert nf4.bits_differing(nf4.your_dequantize_nf4(layer).to("cuda:0"), expected) == 0
