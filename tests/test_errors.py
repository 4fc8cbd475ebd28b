"""Bad input: an error that names what came, before anything is launched."""

import types

import pytest
import torch
from bitsandbytes.functional import quantize_4bit


@pytest.fixture
def nf4_pair(nf4, device):
    return nf4.quantized((64, 64), torch.float16, device)


def replaced(name, value):
    def change(weight, state):
        owner, _, field = name.rpartition(".")
        setattr(getattr(state, owner) if owner else state, field, value(state, weight))
        return weight, state

    return change


MALFORMED = {
    "quant_type": (replaced("quant_type", lambda s, w: "fp4"), "'fp4'"),
    "dtype": (replaced("dtype", lambda s, w: torch.float64), "float64"),
    "shape too large": (replaced("shape", lambda s, w: torch.Size((64, 66))), "2112"),
    "shape too small": (replaced("shape", lambda s, w: torch.Size((64, 62))), "1984"),
    "weight too short": (lambda w, s: (w[:-1], s), "2047"),
    "weight not contiguous": (lambda w, s: (torch.stack((w, w), 1)[:, 0], s), "contiguous: False"),
    "absmax too short": (replaced("absmax", lambda s, w: s.absmax[:-1]), "absmax must be 64"),
    "absmax dtype": (replaced("absmax", lambda s, w: s.absmax.float()), "float32"),
    "code too short": (replaced("code", lambda s, w: s.code[:8]), "code must be 16"),
    "code dtype": (replaced("code", lambda s, w: s.code.half()), "float16"),
    "offset dtype": (replaced("offset", lambda s, w: s.offset.double()), "float64"),
    "state2.absmax too short": (
        replaced("state2.absmax", lambda s, w: s.state2.absmax[:0]),
        r"state2\.absmax must be 1",
    ),
    "state2.code too short": (
        replaced("state2.code", lambda s, w: s.state2.code[:255]),
        r"state2\.code must be 256",
    ),
    "shape missing": (replaced("shape", lambda s, w: None), "shape must be .* got None"),
    "absmax missing": (replaced("absmax", lambda s, w: None), "absmax must be a tensor, got NoneType"),
    "offset missing": (replaced("offset", lambda s, w: None), "offset must be a tensor, got NoneType"),
    "blocksize 0": (replaced("blocksize", lambda s, w: 0), "blocksize must be a power of two .* got 0"),
    "blocksize 96": (replaced("blocksize", lambda s, w: 96), "blocksize must be a power of two .* got 96"),
    "state2.blocksize 100": (
        replaced("state2.blocksize", lambda s, w: 100),
        r"state2\.blocksize must be a power of two .* got 100",
    ),
    "repacked for the CPU": (replaced("packing_format_for_cpu", lambda s, w: True), "repacked"),
    "absmax on another device": (replaced("absmax", lambda s, w: s.absmax.to("meta")), "meta"),
    "weight on another device": (lambda w, s: (w.to("meta"), s), "meta"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_states(nf4, nf4_pair, monkeypatch, case):
    change, message = MALFORMED[case]
    weight, state = nf4_pair
    # A launch that is already kept must not get in the way. (Repacking, in life, replaces the packed bytes as well, and
    # a kept launch would see it by them.)
    if case != "repacked for the CPU":
        nf4.dequantize_nf4(weight, state)
    weight, state = change(weight, state)
    monkeypatch.setattr(nf4, "launch", lambda *_: pytest.fail("launched"))
    with pytest.raises((ValueError, TypeError), match=message):
        nf4.dequantize_nf4(weight, state)


def test_layers_that_are_not_quantized(nf4, device):
    with pytest.raises(TypeError, match="quant_state NoneType"):
        nf4.your_dequantize_nf4(torch.nn.Linear(4, 4))
    with pytest.raises(TypeError, match="Params4bit with quant_state NoneType"):
        nf4.your_dequantize_nf4(nf4.bnb_Linear4bit(64, 64))
    with pytest.raises(TypeError, match="NoneType"):
        nf4.dequantize_nf4(None, None)


def test_fp4_is_refused_by_name(nf4, device):
    weight, state = quantize_4bit(torch.randn(64, 64, device=device), quant_type="fp4", compress_statistics=True)
    with pytest.raises(ValueError, match="'fp4'"):
        nf4.dequantize_nf4(weight, state)


def test_a_cpu_weight_needs_the_interpreter(nf4, monkeypatch):
    monkeypatch.setattr(nf4, "INTERPRETED", False)
    weight, state = nf4.quantized((64, 64), torch.float16, "cpu")
    with pytest.raises(ValueError, match="cpu.*expected a CUDA device"):
        nf4.dequantize_nf4(weight, state)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_warps": 3},
        {"num_warps": 32},
        {"num_warps": 0},
        {"steps": 5},
        {"steps": "2"},
        {"steps": -1},
        {"shuffle": 1},
    ],
)
def test_settings(nf4, wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{name} must be .*{value!r}"):
        nf4.Setting(**wrong)


def test_a_setting_that_does_not_exist(nf4):
    with pytest.raises(TypeError, match="colour"):
        nf4.Setting(colour=1)


def test_bits_differing_names_shapes(nf4):
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        nf4.bits_differing(torch.zeros(2), torch.zeros(3))


def test_assert_correct_bnb_refuses(nf4):
    state = types.SimpleNamespace(dtype=torch.float16)
    layer = types.SimpleNamespace(weight=types.SimpleNamespace(dtype=torch.int8, quant_state=state))
    with pytest.raises(AssertionError, match="int8"):
        nf4.assert_correct_bnb(layer, torch.float16)
