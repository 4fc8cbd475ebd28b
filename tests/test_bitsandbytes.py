"""The cases that bitsandbytes' own tests name for 4-bit dequantization, with our function in its place.

The list follows its test_functional.py, test_ops.py and test_linear4bit.py: dtypes, block sizes, storage dtypes,
compressed statistics, sizes that no block divides, layers saved, copied and compiled. On a CPU the tensors are smaller.
"""

import copy
import io
import pickle

import bitsandbytes as bnb
import notebook
import peer
import pytest
import torch
import torch.nn.functional as F
from bitsandbytes.functional import QuantState, create_dynamic_map, get_4bit_type, quantize_4bit

GPU = torch.cuda.is_available()
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
STORAGES = [torch.uint8, torch.float16, torch.bfloat16, torch.float32]

# Mean absolute and mean relative error of normally distributed weights, as its test_functional.py states them for NF4.
PUBLISHED = {
    64: (0.072792, 0.203299),
    128: (0.076835, 0.215252),
    256: (0.080326, 0.226044),
    512: (0.083535, 0.236021),
    1024: (0.086603, 0.245365),
    2048: (0.089592, 0.254146),
    4096: (0.092537, 0.262457),
}
TOLERANCE = 1e-3 if GPU else 8e-3  # over 16 million weights (they deviate by up to 3e-4), over 33 thousand


def same(nf4, tally, weight, state):
    """Our result, which has bitsandbytes' shape, dtype, device and bits."""
    out, want = nf4.dequantize_nf4(weight, state), peer.expected(nf4, weight, state)
    assert out.shape == want.shape and out.dtype == state.dtype and out.device == weight.device
    assert peer.differing(nf4, tally, out, want) == 0
    return out


def errors(values, out):
    """Mean absolute and mean relative error."""
    error = (values - out).abs().float()
    return error.mean().item(), (error / (values.abs().float() + 1e-8)).mean().item()


def normal(device, dtype, rows=None):
    rows = rows or (4096 if device == "cuda" else 8)
    values = torch.randn(rows, 4096, generator=torch.Generator().manual_seed(0))
    return values.to(device=device, dtype=dtype)


def roundtrip(nf4, tally, values, blocksize):
    weight, state = quantize_4bit(values, blocksize=blocksize, quant_type="nf4")
    state = QuantState.from_dict(state.as_dict(), device=values.device)
    return errors(values, same(nf4, tally, weight, state))


@pytest.mark.parametrize("blocksize", PUBLISHED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_the_published_ones(nf4, device, tally, dtype, blocksize):
    error, relative = roundtrip(nf4, tally, normal(device, dtype), blocksize)
    assert (error, relative) == pytest.approx(PUBLISHED[blocksize], abs=TOLERANCE)


def test_the_published_errors_tell_a_wrong_kernel(device):
    """Wrong by as little as a code that is one step off."""
    broken = notebook.load("nf4_off_by_one", edit=("code_ptr + (packed >> 4)", "code_ptr + (packed >> 4 ^ 1)"))
    values = normal(device, torch.float32, rows=1)
    weight, state = quantize_4bit(values, blocksize=64, quant_type="nf4")
    error, relative = errors(values, broken.dequantize_nf4(weight, state))
    assert error > PUBLISHED[64][0] + 8e-3 and relative > PUBLISHED[64][1] + 8e-3


@pytest.mark.parametrize("blocksize", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_compressed_statistics(nf4, device, tally, dtype, blocksize):
    values = normal(device, dtype)
    for compressed in (False, True):
        weight, state = quantize_4bit(values, blocksize=blocksize, compress_statistics=compressed, quant_type="nf4")
        error, relative = errors(values, same(nf4, tally, weight, state))
        assert error < 0.11 and relative < 0.28


@pytest.mark.parametrize("blocksize", [32, 64, 128, 256, 512])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_bytes_and_signed_scales(nf4, device, tally, dtype, storage, blocksize):
    shape = torch.Size((128, 128) if GPU else (32, 128))
    random = torch.Generator().manual_seed(blocksize)
    weight = torch.randint(0, 256, (shape.numel() // 2, 1), dtype=torch.uint8, generator=random).to(device)
    absmax = torch.randn(shape.numel() // blocksize, generator=random).to(device)
    code = get_4bit_type("nf4", device=device)
    state = QuantState(absmax, shape=shape, code=code, blocksize=blocksize, quant_type="nf4", dtype=dtype)
    same(nf4, tally, weight.view(-1).view(storage).view(-1, 1), state)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("blocksize", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_that_no_block_divides(nf4, device, tally, dtype, blocksize, compressed):
    weight, state = nf4.quantized((7, blocksize - 1), dtype, device, blocksize, compressed)
    out = same(nf4, tally, weight, state)
    assert out.shape == (7, blocksize - 1) and out.isfinite().all()


@pytest.mark.parametrize("blocksize", [64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_four_dimensions_not_contiguous(nf4, device, tally, dtype, blocksize):
    values = torch.randn(3, 4, 2, 256, device=device).to(dtype)[:, ::2]
    for source in (values, values.contiguous()):
        weight, state = quantize_4bit(source, blocksize=blocksize, quant_type="nf4")
        out = same(nf4, tally, weight, state)
    assert out.shape == (3, 2, 2, 256)


KINDS = {"fc1": (4, 1), "fc2": (1, 4), "attn": (1, 1), "attn_packed": (3, 1)}  # multiples of the model's dimension


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_passed_transposed(nf4, device, tally, kind, storage):
    """As its gemv tests pass them: the packed weight as [1, n] stands for the transposed matrix."""
    for dim in (128, 256, 512, 1024) if GPU else (64,):
        rows, columns = (factor * dim for factor in KINDS[kind])
        for dtype in DTYPES:
            values = torch.randn(rows, columns, device=device).to(dtype) / dim**0.5
            for compressed in (False, True):
                weight, state = quantize_4bit(
                    values, compress_statistics=compressed, quant_type="nf4", quant_storage=storage
                )
                assert same(nf4, tally, weight.t(), state).shape == (columns, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 576, 1280, 5120, 8192] if GPU else [64, 128])
def test_the_identity_comes_back_exactly(nf4, device, tally, dim, dtype):
    identity = torch.eye(dim, dtype=dtype, device=device)
    weight, state = quantize_4bit(identity, quant_type="nf4")
    assert torch.equal(same(nf4, tally, weight, state), identity)


def linear(device, compressed, storage, blocksize=64, shape=(300, 400)):
    """A Linear4bit layer quantized from fp16 weights."""
    features = shape if GPU else (30, 40)
    layer = bnb.nn.Linear4bit(*features, bias=False, device="meta")
    values = torch.randn(features[1], features[0], generator=torch.Generator().manual_seed(1)).half()
    layer.weight = bnb.nn.Params4bit(
        values,
        requires_grad=False,
        blocksize=blocksize,
        compress_statistics=compressed,
        quant_type="nf4",
        quant_storage=storage,
    )
    return layer.to(device)


def saved_and_loaded(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def from_state_dict(layer):
    state = saved_and_loaded(layer.state_dict())
    weight = state.pop("weight")
    clone = bnb.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, device="meta")
    clone.weight = bnb.nn.Params4bit.from_prequantized(weight, state, device=weight.device)
    return clone.to(weight.device)


def there_and_back(layer):
    device = layer.weight.device
    return layer.to("cpu").to(device)


COPIES = {
    "state_dict": from_state_dict,
    "torch.save": saved_and_loaded,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "to the CPU and back": there_and_back,
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("how", COPIES)
def test_copied_layers(nf4, device, tally, how, storage, compressed):
    """Copied before and after the first call; the copy stands on its own."""
    expected = same(nf4, tally, *weight_of(linear(device, compressed, torch.uint8)))
    for called in (False, True):
        layer = linear(device, compressed, storage)
        assert layer.weight.dtype == storage
        if called:
            same(nf4, tally, *weight_of(layer))
        clone = COPIES[how](layer)
        for _ in range(2):
            assert peer.differing(nf4, tally, same(nf4, tally, *weight_of(clone)), expected) == 0
        if how not in ("copy", "to the CPU and back"):
            layer.weight.data.zero_()
            assert peer.differing(nf4, tally, nf4.your_dequantize_nf4(clone), expected) == 0


def weight_of(layer):
    return layer.weight, layer.weight.quant_state


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("blocksize", [32, 64, 128])
def test_copied_parameters(nf4, device, tally, blocksize, compressed):
    weight = linear(device, compressed, torch.uint8, blocksize).weight
    expected = same(nf4, tally, weight, weight.quant_state)
    for clone in (copy.copy(weight), copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert peer.differing(nf4, tally, same(nf4, tally, clone, clone.quant_state), expected) == 0


def test_a_parameter_of_four_weights(nf4, device, tally):
    weight = bnb.nn.Params4bit(torch.tensor([1.0, 2.0, 3.0, 4.0]), quant_type="nf4").to(device)
    assert same(nf4, tally, weight, weight.quant_state).shape == (4,)


@pytest.mark.parametrize("storage", STORAGES)
def test_sharded_and_gathered_bytes(nf4, device, tally, storage):
    """What FSDP does with the packed weight: flat, in four shards, put together again."""
    values = torch.randn(256 if GPU else 64, 128, device=device).half()
    weight, state = quantize_4bit(values, quant_type="nf4", quant_storage=storage)
    expected = same(nf4, tally, weight, state)
    gathered = torch.cat(weight.flatten().chunk(4)).reshape(weight.shape)
    assert peer.differing(nf4, tally, nf4.dequantize_nf4(gathered, state), expected) == 0


def network(device, dtype, compressed):
    dim = 256 if GPU else 64
    layers = [bnb.nn.Linear4bit(dim, dim, False, dtype, compressed, "nf4").to(device) for _ in range(4)]
    for layer in layers:
        layer.weight.quant_state.dtype = dtype
    return layers, torch.randn(16, dim, device=device).to(dtype)


@pytest.mark.parametrize(
    "dtype, compressed, mode, fullgraph",
    [
        (torch.bfloat16, True, "default", True),
        (torch.bfloat16, False, "reduce-overhead", True),
        (torch.float16, True, "reduce-overhead", True),
        (torch.float16, False, "default", False),
        (torch.float32, True, "default", True),
    ],
)
def test_compiled_network(nf4, device, tally, dtype, compressed, mode, fullgraph):
    layers, x = network(device, dtype, compressed)

    def forward(x):
        weights = [nf4.your_dequantize_nf4(layer) for layer in layers]
        y = x
        for weight in weights:
            y = F.linear(y, weight)
        return y, weights

    torch._dynamo.reset()
    how = {"mode": mode} if GPU else {"backend": nf4.GraphCounter("cpu")}
    compiled = torch.compile(forward, fullgraph=fullgraph, **how)
    y, weights = forward(x)
    for _ in range(3):  # in reduce-overhead: warm-up, recording, replay
        got, got_weights = compiled(x)
        torch.testing.assert_close(got, y)
        assert sum(peer.differing(nf4, tally, *pair) for pair in zip(got_weights, weights)) == 0
    gradients = []
    for function in (forward, compiled):
        leaf = x.clone().requires_grad_()
        function(leaf)[0].float().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_backward_of_its_own_matmul(nf4, device, tally, monkeypatch, dtype):
    """bitsandbytes' matmul_4bit dequantizes when it differentiates: with our function its gradients stay the same."""
    (layer, *_), x = network(device, dtype, True)
    gradients, calls = [], []

    def ours(weight, quant_state):
        calls.append(weight)
        return nf4.dequantize_nf4(weight, quant_state)

    for function in (bnb.functional.dequantize_4bit, ours):
        monkeypatch.setattr(bnb.functional, "dequantize_4bit", function)
        leaf = x.clone().requires_grad_()
        layer(leaf).backward(torch.ones_like(x))
        gradients.append(leaf.grad)
    assert len(calls) == 1
    assert peer.differing(nf4, tally, *gradients) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("compressed", [False, True])
def test_its_benchmark_shape(nf4, tally, compressed):
    values = torch.rand(49152, 12288, dtype=torch.float16, device="cuda")
    weight, state = quantize_4bit(values, blocksize=256, compress_statistics=compressed, quant_type="nf4")
    del values
    for _ in range(2):
        same(nf4, tally, weight, state)


def piece(weight, state, start, stop):
    """Weights start .. stop as a vector of their own; both multiples of what one absmax2 covers."""
    block, block2 = state.blocksize, state.blocksize * 256
    absmax2 = state.state2.absmax[start // block2 : stop // block2]
    state2 = QuantState(absmax2, code=state.state2.code, blocksize=256, dtype=torch.float32)
    absmax = state.absmax[start // block : stop // block]
    part = QuantState(absmax, torch.Size((stop - start,)), state.code, block, "nf4", state.dtype, state.offset, state2)
    return weight[start // 2 : stop // 2], part


SIZES = [(1 << 15, 1 << 14), pytest.param((1 << 31) + (1 << 24), 1 << 24, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("n, step", SIZES)
@pytest.mark.parametrize("blocksize", [64, 32])  # by words, by bytes
def test_more_than_two_to_the_31_weights(nf4, device, tally, blocksize, n, step):
    """In bfloat16, compared piece by piece. (Small, to test the test.)"""
    blocks, byte = n // blocksize, {"dtype": torch.uint8, "device": device}
    weight = torch.randint(0, 256, (n // 2, 1), **byte)
    absmax2, code2 = torch.rand(blocks // 256, device=device) + 0.5, create_dynamic_map().to(device)
    state = QuantState(
        torch.randint(0, 256, (blocks,), **byte),
        shape=torch.Size((n // 4096, 4096)),
        code=get_4bit_type("nf4", device=device),
        blocksize=blocksize,
        quant_type="nf4",
        dtype=torch.bfloat16,
        offset=torch.tensor(0.25, device=device),
        state2=QuantState(absmax2, code=code2, blocksize=256, dtype=torch.float32),
    )
    for _ in range(2):
        out = nf4.dequantize_nf4(weight, state).view(-1)
        for start in range(0, n, step):
            want = peer.expected(nf4, *piece(weight, state, start, start + step))
            assert peer.differing(nf4, tally, out[start : start + step], want) == 0, start
        del out
