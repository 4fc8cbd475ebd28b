"""Bad input: an error that names what came, before anything is launched; or what bitsandbytes gives."""

import contextlib
import types

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit


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
    "weight missing": (lambda w, s: (None, s), "NoneType"),
    "weight is a list": (lambda w, s: (w.tolist(), s), "list"),
    "weight dtype int8": (lambda w, s: (w.view(torch.int8), s), "int8"),
    "weight dtype int64": (lambda w, s: (w.view(-1, 8).view(torch.int64), s), "int64"),
    "weight sparse": (lambda w, s: (w.to_sparse(), s), "sparse"),
    "weight 0-d": (lambda w, s: (w[0, 0], replaced("shape", lambda *_: torch.Size((1, 2)))(w, s)[1]), r"got \(\)"),
    "weight empty": (lambda w, s: (w[:0], s), "got 0"),
    "weight too long": (lambda w, s: (torch.cat((w, w)), s), "got 4096"),
    "weight freed": (
        lambda w, s: (w.untyped_storage().resize_(0), (w, s))[1],
        "the weight needs 2048 bytes .* holds 0",
    ),
    "absmax negated": (replaced("absmax", lambda s, w: torch._neg_view(s.absmax)), "negated"),
    "absmax freed": (
        lambda w, s: (s.absmax.untyped_storage().resize_(0), (w, s))[1],
        "absmax needs 64 bytes .* holds 0",
    ),
    "transposed, but three axes": (
        lambda w, s: (w.t(), replaced("shape", lambda *_: torch.Size((2, 32, 64)))(w, s)[1]),
        r"\(2, 32, 64\)",
    ),
    "state missing": (lambda w, s: (w, None), "quant_state NoneType"),
    "state is a list": (lambda w, s: (w, [s.absmax, s.shape]), "got list without"),
    "state without fields": (lambda w, s: (w, types.SimpleNamespace(absmax=s.absmax)), "without .*'blocksize'"),
    "state of another tensor": (lambda w, s: (w, quantize_4bit(w.float(), quant_type="nf4")[1]), "got 2048"),
    "state2 without fields": (replaced("state2", lambda s, w: types.SimpleNamespace(code=1)), "state2, .* without"),
    "state2 missing": (replaced("state2", lambda s, w: None), "absmax must be 64 contiguous torch.float32"),
    "state2.dtype": (replaced("state2.dtype", lambda s, w: torch.float16), r"state2\.dtype must be float32"),
    "dtype missing": (replaced("dtype", lambda s, w: None), "got None"),
    "dtype as text": (replaced("dtype", lambda s, w: "float16"), "got float16"),
    "quant_type missing": (replaced("quant_type", lambda s, w: None), "got None"),
    "quant_type in capitals": (replaced("quant_type", lambda s, w: "NF4"), "'NF4'"),
    "shape negative": (replaced("shape", lambda s, w: (-64, -64)), r"\(-64, -64\)"),
    "shape of floats": (replaced("shape", lambda s, w: (64.0, 64)), r"\(64\.0, 64\)"),
    "shape a number": (replaced("shape", lambda s, w: 4096), "got 4096"),
    "shape empty": (replaced("shape", lambda s, w: torch.Size(())), "2048"),
    "blocksize 64.0": (replaced("blocksize", lambda s, w: 64.0), r"blocksize must be .* got 64\.0"),
    "blocksize -64": (replaced("blocksize", lambda s, w: -64), "got -64"),
    "blocksize 8192": (replaced("blocksize", lambda s, w: 8192), "got 8192"),
    "blocksize None": (replaced("blocksize", lambda s, w: None), "got None"),
    "blocksize as text": (replaced("blocksize", lambda s, w: "64"), "got '64'"),
    "absmax of another size": (replaced("absmax", lambda s, w: torch.cat((s.absmax, s.absmax))), r"got \(128,\)"),
    "absmax not contiguous": (replaced("absmax", lambda s, w: s.absmax.repeat_interleave(2)[::2]), "64 contiguous"),
    "absmax int8": (replaced("absmax", lambda s, w: s.absmax.view(torch.int8)), "int8"),
    "code missing": (replaced("code", lambda s, w: None), "code must be a tensor, got NoneType"),
    "code a list": (replaced("code", lambda s, w: s.code.tolist()), "code must be a tensor, got list"),
    "code too long": (replaced("code", lambda s, w: torch.cat((s.code, s.code))), r"got \(32,\)"),
    "offset a number": (replaced("offset", lambda s, w: 0.5), "offset must be a tensor, got float"),
    "offset of two": (replaced("offset", lambda s, w: s.offset.repeat(2)), r"got \(2,\)"),
    "offset on another device": (replaced("offset", lambda s, w: s.offset.to("meta")), "meta"),
    "state2.absmax dtype": (replaced("state2.absmax", lambda s, w: s.state2.absmax.half()), "float16"),
    "state2.absmax missing": (replaced("state2.absmax", lambda s, w: None), r"state2\.absmax must be a tensor"),
    "state2.code missing": (replaced("state2.code", lambda s, w: None), r"state2\.code must be a tensor"),
    "state2.blocksize None": (replaced("state2.blocksize", lambda s, w: None), "got None"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_states(nf4, nf4_pair, monkeypatch, tally, case):
    change, message = MALFORMED[case]
    weight, state = nf4_pair
    # A launch that is already kept must not get in the way. (Repacking, in life, replaces the packed bytes as well, and
    # a kept launch would see it by them; and 64.0 is the 64 that it was kept for.)
    if case not in ("repacked for the CPU", "blocksize 64.0", "shape of floats"):
        nf4.dequantize_nf4(weight, state)
    weight, state = change(weight, state)
    monkeypatch.setattr(nf4, "launch", lambda *_: pytest.fail("launched"))
    with pytest.raises((ValueError, TypeError), match=message):
        nf4.dequantize_nf4(weight, state)
    tally["errors"] += 1


def test_views_that_a_kept_launch_must_not_take(nf4, device):
    for shape, view in (((1, 2), lambda weight: weight.view(())), ((2, 8, 8), lambda weight: weight.t())):
        weight, state = nf4.quantized(shape, torch.float16, device)
        state.shape = torch.Size(shape)
        nf4.dequantize_nf4(weight, state)
        with pytest.raises(ValueError, match="expected packed bytes"):
            nf4.dequantize_nf4(view(weight), state)


def test_freed_memory_is_refused_also_where_a_mode_watches(nf4, nf4_pair, monkeypatch):
    from torch.utils.flop_counter import FlopCounterMode

    weight, state = nf4_pair
    weight.untyped_storage().resize_(0)
    monkeypatch.setattr(nf4, "launch", lambda *_: pytest.fail("launched"))
    with FlopCounterMode(display=False), pytest.raises(ValueError, match="the weight needs 2048 bytes .* holds 0"):
        nf4.dequantize_nf4(weight, state)


@pytest.mark.parametrize("watched", [False, True])
def test_an_odd_address_without_an_offset(nf4, device, watched):
    """As DLPack hands over a slice; also where a mode watches, and the operator is called."""
    from torch.utils.flop_counter import FlopCounterMode

    weight, state = nf4.quantized((64, 128), torch.bfloat16, device)
    buffer = torch.zeros(weight.numel() + 1, dtype=torch.uint8, device=device)
    moved = torch.from_dlpack(buffer[1:]).view(weight.shape)
    moved.copy_(weight)
    assert moved.storage_offset() == 0 and moved.data_ptr() % 4 == 1
    with FlopCounterMode(display=False) if watched else contextlib.nullcontext():
        out = nf4.dequantize_nf4(moved, state)
    assert nf4.bits_differing(out, dequantize_4bit(weight, state)) == 0


def test_a_mixture_of_two_states_of_one_size_is_followed_as_bitsandbytes_follows_it(nf4, nf4_pair):
    """Nothing marks a state as another weight's; bitsandbytes cannot tell either."""
    weight, _ = nf4_pair
    _, other = nf4.quantized((64, 64), torch.float16, weight.device, seed=1)
    assert nf4.bits_differing(nf4.dequantize_nf4(weight, other), dequantize_4bit(weight, other)) == 0


@pytest.mark.parametrize("offset", [-1.0, 0.0, float("nan"), float("-inf")])
def test_strange_offsets_give_what_bitsandbytes_gives(nf4, nf4_pair, offset):
    weight, state = nf4_pair
    state.offset.fill_(offset)
    ours, expected = nf4.dequantize_nf4(weight, state), dequantize_4bit(weight, state)
    assert torch.equal(ours.isnan(), expected.isnan())
    assert nf4.bits_differing(ours.nan_to_num(1.0), expected.nan_to_num(1.0)) == 0


def test_an_unaligned_table_is_refused(nf4):
    """A CPU tensor can be made at any address; on a GPU such a load would end the process."""
    weight, state = nf4.quantized((64, 64), torch.float16, "cpu")
    state.code = torch.frombuffer(bytearray(100), dtype=torch.float32, count=16, offset=1)
    with pytest.raises(ValueError, match="code is torch.float32 at address 0x"):
        nf4.check_memory(weight, state)


def test_a_subclass_without_data_is_not_launched(nf4, nf4_pair, monkeypatch):
    weight, state = nf4_pair

    class Dataless(torch.Tensor):
        @staticmethod
        def __new__(cls, like):
            return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError(f"{func} on a tensor without data")

    monkeypatch.setattr(nf4, "launch", lambda *_: pytest.fail("launched"))
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="nf4_triton.dequantize.* without data"):
            nf4.dequantize_nf4(Dataless(weight), state)


def test_layers_that_are_not_quantized(nf4, device):
    with pytest.raises(TypeError, match="quant_state NoneType"):
        nf4.your_dequantize_nf4(torch.nn.Linear(4, 4))
    with pytest.raises(TypeError, match="Params4bit with quant_state NoneType"):
        nf4.your_dequantize_nf4(nf4.bnb_Linear4bit(64, 64))
    with pytest.raises(TypeError, match="NoneType"):
        nf4.dequantize_nf4(None, None)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_fp4_is_refused_by_name(nf4, device, dtype, compressed):
    values = torch.randn(64, 64, device=device).to(dtype)
    weight, state = quantize_4bit(values, quant_type="fp4", compress_statistics=compressed)
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
