"""Raw bits against bitsandbytes: through the interpreter on a CPU, on the real kernel where there is a GPU."""

import contextlib

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SHAPES = [
    (1, 1),
    (1, 7),
    (3, 5),
    (1, 64),
    (1, 4096),
    (33, 65),
    (127, 129),
    (8, 1000),
    (64, 64),
    (2048, 8),
    (8, 2048),
    (96, 640),
]


def settings(nf4, device):
    portable = [nf4.Setting(shuffle=False), nf4.Setting(1, 8, False), nf4.Setting(8, 1, False)]
    return portable + (
        [nf4.Setting(), nf4.Setting(4, 4), nf4.Setting(8, 2), nf4.Setting(1, 1)] if device == "cuda" else []
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(nf4, device, shape, dtype):
    weight, state = nf4.quantized(shape, dtype, device)
    expected = dequantize_4bit(weight, state)
    for _ in range(2):  # on a GPU the second call is the kept launch
        out = nf4.dequantize_nf4(weight, state)
        assert out.shape == state.shape and out.dtype == dtype and out.is_contiguous()
        assert nf4.bits_differing(out, expected) == 0
    assert nf4.bits_differing(nf4.dequantize_reference(weight, state), expected) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_nibble_with_every_absmax_code(nf4, device, dtype):
    weight, state = nf4.every_combination(dtype, device)
    blocks = state.absmax.repeat_interleave(32).long() * 16
    packed = weight.view(-1)
    for nibbles in (packed >> 4, packed & 15):
        assert (blocks + nibbles.long()).unique().numel() == 16 * 256
    expected = nf4.dequantize_reference(weight, state)
    assert nf4.bits_differing(expected, dequantize_4bit(weight, state)) == 0
    for setting in settings(nf4, device):
        assert nf4.bits_differing(nf4.launched(weight, state, setting), expected) == 0, setting


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("blocksize", [32, 64, 128, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_sizes(nf4, device, dtype, blocksize, nested):
    # Rows of whole blocks: bitsandbytes 0.50.2 on the CPU (not on the GPU) goes wrong where some blocks cross rows.
    weight, state = nf4.quantized((6, 4096), dtype, device, blocksize, nested)
    for setting in settings(nf4, device)[-2:]:
        assert nf4.bits_differing(nf4.launched(weight, state, setting), dequantize_4bit(weight, state)) == 0


@pytest.mark.parametrize("blocksize", [128, 512, 4096])
def test_blocks_across_rows(nf4, device, blocksize):
    weight, state = nf4.quantized((128, 192), torch.float16, device, blocksize)
    for setting in settings(nf4, device):
        assert nf4.bits_differing(nf4.launched(weight, state, setting), nf4.dequantize_reference(weight, state)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (1, 4097), (64, 64), (64, 96)])
def test_every_element_is_written_and_nothing_beyond(nf4, device, shape, dtype):
    weight, state = nf4.quantized(shape, dtype, device)
    n = weight.numel() * 2 - (state.shape.numel() % 2)
    for setting in settings(nf4, device):
        buffer = torch.full((n + 64,), float("nan"), dtype=dtype, device=device)
        constants, programs = nf4.launch_plan(n, dtype, 64, 256, True, True, setting)
        kernel = nf4._dequantize_nf4_kernel[(programs,)]
        kernel(buffer, weight, *nf4.state_tensors(state), n, **constants, num_warps=setting.num_warps)
        assert nf4.bits_differing(buffer[:n].view(shape), nf4.dequantize_reference(weight, state)) == 0
        assert buffer[n:].isnan().all()


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_unaligned_weight(nf4, device, offset):
    weight, state = nf4.quantized((64, 128), torch.bfloat16, device)
    buffer = torch.zeros(weight.numel() + 16, dtype=torch.uint8, device=device)
    moved = buffer[offset : offset + weight.numel()].view(weight.shape)
    moved.copy_(weight)
    for _ in range(2):
        assert nf4.bits_differing(nf4.dequantize_nf4(moved, state), dequantize_4bit(weight, state)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e30, 1e-30, 0.0])
def test_extreme_scales(nf4, device, scale, dtype):
    weight, state = nf4.quantized((64, 64), dtype, device)
    state.state2.absmax.fill_(scale)
    ours, expected = nf4.dequantize_nf4(weight, state), dequantize_4bit(weight, state)
    assert torch.equal(ours.isnan(), expected.isnan())
    assert nf4.bits_differing(ours.nan_to_num(123.0), expected.nan_to_num(123.0)) == 0


def test_each_call_gives_a_fresh_tensor(nf4, device):
    weight, state = nf4.quantized((64, 64), torch.float16, device)
    outputs = [nf4.dequantize_nf4(weight, state) for _ in range(3)]
    expected = outputs[0].clone()
    assert len({out.data_ptr() for out in outputs}) == 3
    outputs[0].zero_()
    assert torch.equal(nf4.dequantize_nf4(weight, state), expected)


def test_the_comparison_can_fail(nf4):
    x = torch.ones(4, dtype=torch.bfloat16)
    y = x.clone()
    y.view(torch.int16)[2] += 1
    assert nf4.bits_differing(x, y) == 1
    with pytest.raises(ValueError, match="float32"):
        nf4.bits_differing(x, x.float())


def test_harness_accepts_ours_and_refuses_a_wrong_one(nf4):
    assert nf4.test_dequantize(nf4.your_dequantize_nf4, loops=1, options=nf4.SMALL_OPTIONS) > 0
    wrong = lambda layer: nf4.your_dequantize_nf4(layer) * 1.01  # noqa: E731
    with pytest.raises(AssertionError):
        nf4.test_dequantize(wrong, loops=1, options=nf4.SMALL_OPTIONS)
    x = torch.ones(4, 4, dtype=torch.float16)
    with pytest.raises(AssertionError, match="expected torch.float16, got torch.float32"):
        nf4.assert_same(x.float(), x, "line", torch.float16)
    with pytest.raises(AssertionError, match="line: .*stride"):
        nf4.assert_same(x, x[:, ::2].repeat(1, 2).t(), "line", torch.float16)


def test_races_and_their_mix(nf4):
    """A race times nothing whose bits are wrong; the original mix takes each option from the race in its dtype."""
    right = ("ours", nf4.your_dequantize_nf4, contextlib.nullcontext)
    wrong = ("wrong", lambda layer: nf4.your_dequantize_nf4(layer) * 1.001, contextlib.nullcontext)
    with pytest.raises(AssertionError, match="b: wrong weights"):
        nf4.race({"a": right, "b": wrong}, torch.float16, 1, 1, nf4.SMALL_OPTIONS)
    races = {dtype: nf4.race({"a": right}, dtype, 2, 1, nf4.SMALL_OPTIONS) for dtype in DTYPES[:2]}
    fp16, bf16 = (races[dtype]["a"] for dtype in DTYPES[:2])
    assert all(second > 0 for pair in fp16 + bf16 for second in pair)
    assert nf4.original_mix(races)["a"] == [[a[0], b[1], b[2]] for a, b in zip(fp16, bf16)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2048, 8192), (1024, 4096), (4096, 14336)])
def test_harness_shapes_with_every_setting(nf4, shape, dtype):
    weight, state = nf4.quantized(shape, dtype, "cuda")
    expected = dequantize_4bit(weight, state)
    for setting in nf4.CANDIDATES:
        assert nf4.bits_differing(nf4.launched(weight, state, setting), expected) == 0, setting
