"""The host's road: what is refused, which layers and states are read, where a launch goes."""

import contextlib
import copy
import io
import pickle
import subprocess
import sys
import types
from collections import namedtuple

import bitsandbytes as bnb
import helpers
import numpy as np
import pytest
import torch
from bitsandbytes.functional import (
    _convert_weight_packed_for_cpu,
    dequantize_4bit,
    quantize_4bit,
)
from helpers import DTYPES, STORAGES, same

GPU = torch.cuda.is_available()


@pytest.fixture
def pair(nf4, device):
    return nf4.quantized((64, 64), torch.float16, device)


def replaced(name, value):
    def change(weight, state):
        owner, _, field = name.rpartition(".")
        setattr(getattr(state, owner) if owner else state, field, value(state, weight))
        return weight, state

    return change


def freed(tensor):
    tensor.untyped_storage().resize_(0)


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
    "code dtype": (replaced("code", lambda s, w: s.code.int()), "code must be .*int32"),
    "code too short, another dtype": (
        replaced("code", lambda s, w: s.code[:8].bfloat16()),
        "code must be 16 .*bfloat16",
    ),
    "offset dtype": (replaced("offset", lambda s, w: s.offset.int()), "offset must be .*int32"),
    "state2.absmax too short": (
        replaced("state2.absmax", lambda s, w: s.state2.absmax[:0]),
        r"state2\.absmax must be 1",
    ),
    "state2.code too short": (
        replaced("state2.code", lambda s, w: s.state2.code[:255]),
        r"state2\.code must be 256",
    ),
    "shape missing": (replaced("shape", lambda s, w: None), "shape must be .* got None"),
    "absmax missing": (
        replaced("absmax", lambda s, w: None),
        "absmax must be a tensor, got NoneType",
    ),
    "absmax nested": (
        replaced("absmax", lambda s, w: torch.nested.nested_tensor([s.absmax])),
        "absmax must be a tensor, got a nested one",
    ),
    "offset missing": (
        replaced("offset", lambda s, w: None),
        "offset must be a tensor, got NoneType",
    ),
    "blocksize 0": (
        replaced("blocksize", lambda s, w: 0),
        "blocksize must be a power of two .* got 0",
    ),
    "blocksize 16": (
        replaced("blocksize", lambda s, w: 16),
        "blocksize must be a power of two .* got 16",
    ),
    "blocksize 96": (
        replaced("blocksize", lambda s, w: 96),
        "blocksize must be a power of two .* got 96",
    ),
    "state2.blocksize 100": (
        replaced("state2.blocksize", lambda s, w: 100),
        r"state2\.blocksize must be a power of two .* got 100",
    ),
    "absmax on another device": (replaced("absmax", lambda s, w: s.absmax.to("meta")), "meta"),
    "weight on another device": (lambda w, s: (w.to("meta"), s), "meta"),
    "weight missing": (lambda w, s: (None, s), "NoneType"),
    "weight is a list": (lambda w, s: (w.tolist(), s), "list"),
    "weight dtype int8": (lambda w, s: (w.view(torch.int8), s), "int8"),
    "weight dtype int64": (lambda w, s: (w.view(-1, 8).view(torch.int64), s), "int64"),
    "weight sparse": (lambda w, s: (w.to_sparse(), s), "sparse"),
    "weight 0-d": (
        lambda w, s: (w[0, 0], replaced("shape", lambda *_: torch.Size((1, 2)))(w, s)[1]),
        r"weight \(\)",
    ),
    "weight empty": (lambda w, s: (w[:0], s), "got 0"),
    "weight too long": (lambda w, s: (torch.cat((w, w)), s), "got 4096"),
    "weight negated": (lambda w, s: (torch._neg_view(w), s), "the weight is a lazily negated view"),
    "weight freed": (lambda w, s: (freed(w), (w, s))[1], "the weight needs 2048 bytes .* holds 0"),
    "weight shortened": (
        lambda w, s: (w.untyped_storage().resize_(2047), (w, s))[1],
        "the weight needs 2048 bytes .* holds 2047",
    ),
    "absmax negated": (replaced("absmax", lambda s, w: torch._neg_view(s.absmax)), "negated"),
    "absmax freed": (lambda w, s: (freed(s.absmax), (w, s))[1], "absmax needs 64 bytes .* holds 0"),
    "state2.absmax freed": (
        lambda w, s: (freed(s.state2.absmax), (w, s))[1],
        r"state2\.absmax needs 4 bytes .* holds 0",
    ),
    "transposed, but three axes": (
        lambda w, s: (w.t(), replaced("shape", lambda *_: torch.Size((2, 32, 64)))(w, s)[1]),
        r"\(2, 32, 64\)",
    ),
    "state missing": (lambda w, s: (w, None), "quant_state NoneType"),
    "state is a list": (lambda w, s: (w, [s.absmax, s.shape]), "got .* list: .*'absmax'"),
    "state without fields": (
        lambda w, s: (w, types.SimpleNamespace(absmax=s.absmax)),
        "SimpleNamespace: .*'code'",
    ),
    "state of another tensor": (
        lambda w, s: (w, quantize_4bit(w.float(), quant_type="nf4")[1]),
        "got 2048",
    ),
    "state2 without fields": (
        replaced("state2", lambda s, w: types.SimpleNamespace(code=1)),
        "'absmax'",
    ),
    "state2 missing": (
        replaced("state2", lambda s, w: None),
        "absmax must be torch.float32, got torch.uint8",
    ),
    "state2.dtype": (
        replaced("state2.dtype", lambda s, w: torch.float16),
        r"state2\.dtype must be float32",
    ),
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
    "blocksize np.int64": (replaced("blocksize", lambda s, w: np.int64(64)), "two .* got .*64"),
    "blocksize np.int32": (replaced("blocksize", lambda s, w: np.int32(64)), "two .* got .*64"),
    "blocksize a tensor": (
        replaced("blocksize", lambda s, w: torch.tensor(64)),
        "two .* got .*64",
    ),
    "state2.blocksize np.int64": (
        replaced("state2.blocksize", lambda s, w: np.int64(256)),
        r"state2\.blocksize must be a power of two .* got .*256",
    ),
    "absmax of another size": (
        replaced("absmax", lambda s, w: torch.cat((s.absmax, s.absmax))),
        "got 128 torch",
    ),
    "absmax not contiguous": (
        replaced("absmax", lambda s, w: s.absmax.repeat_interleave(2)[::2]),
        "must be 64 contiguous .* contiguous: False",
    ),
    "absmax int8": (replaced("absmax", lambda s, w: s.absmax.view(torch.int8)), "int8"),
    "code missing": (replaced("code", lambda s, w: None), "code must be a tensor, got NoneType"),
    "code a list": (
        replaced("code", lambda s, w: s.code.tolist()),
        "code must be a tensor, got list",
    ),
    "code too long": (replaced("code", lambda s, w: torch.cat((s.code, s.code))), "got 32 torch"),
    "offset a number": (replaced("offset", lambda s, w: 0.5), "offset must be a tensor, got float"),
    "offset of two": (replaced("offset", lambda s, w: s.offset.repeat(2)), "got 2 torch"),
    "offset on another device": (replaced("offset", lambda s, w: s.offset.to("meta")), "meta"),
    "offset requires grad": (
        replaced("offset", lambda s, w: s.offset.clone().requires_grad_()),
        "offset requires grad",
    ),
    "state2.absmax dtype": (
        replaced("state2.absmax", lambda s, w: s.state2.absmax.half()),
        "float16",
    ),
    "state2.absmax missing": (
        replaced("state2.absmax", lambda s, w: None),
        r"state2\.absmax must be a tensor",
    ),
    "state2.code missing": (
        replaced("state2.code", lambda s, w: None),
        r"state2\.code must be a tensor",
    ),
    "state2.blocksize None": (replaced("state2.blocksize", lambda s, w: None), "got None"),
}


# What a kept launch does not see: these sizes equal those that it was kept for.
FIRST_CALLS = ("shape of floats", "blocksize 64.0")
FIRST_CALLS += ("blocksize np.int64", "blocksize np.int32", "blocksize a tensor")
FIRST_CALLS += ("state2.blocksize np.int64", "absmax nested")


@pytest.mark.parametrize("nested", [True, False])
def test_a_weight_that_was_repacked_is_refused(nf4, device, nested):
    """By bitsandbytes, for its CPU kernels; where absmax was nested, that is said."""
    weight, state = nf4.quantized((64, 128), torch.float16, device, nested=nested)
    nf4.dequantize_nf4(weight, state)
    weight, state = _convert_weight_packed_for_cpu(weight, state)
    told = (
        "was repacked for bitsandbytes' CPU kernels"
        if nested
        else "absmax must be torch.float32, got torch.bfloat16"
    )
    with pytest.raises(ValueError, match=told):
        nf4.dequantize_nf4(weight, state)


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_states(nf4, pair, monkeypatch, tally, case):
    change, message = MALFORMED[case]
    weight, state = pair
    if case not in FIRST_CALLS:  # else a launch that is already kept must not get in the way
        nf4.dequantize_nf4(weight, state)
    weight, state = change(weight, state)
    monkeypatch.setattr(nf4, "launch", lambda *_: pytest.fail("launched"))
    with pytest.raises((ValueError, TypeError), match=message):
        nf4.dequantize_nf4(weight, state)
    tally["errors"] += 1


def test_plain_absmax_that_requires_grad(nf4, device):
    weight, state = nf4.quantized((64, 64), torch.float16, device, nested=False)
    state.absmax.requires_grad_()
    for _ in range(2):
        with pytest.raises(ValueError, match="absmax requires grad"):
            nf4.dequantize_nf4(weight, state)


OPERATOR = {  # what a direct call of the operator passes wrongly -> what it says
    "weight not contiguous": (
        {"weight": lambda t: torch.stack((t, t), 1)[:, 0]},
        "contiguous: False",
    ),
    "weight too short": ({"weight": lambda t: t[:-1]}, "2047"),
    "weight freed": ({"weight": lambda t: (freed(t), t)[1]}, "the weight needs 2048 bytes"),
    "blocksize 16": ({"blocksize": lambda _: 16}, "blocksize must be a power of two .* got 16"),
    "blocksize 128": ({"blocksize": lambda _: 128}, "absmax must be 32"),
    "state2.blocksize 0": ({"blocksize2": lambda _: 0}, r"state2\.blocksize must be"),
    "absmax on another device": ({"absmax": lambda t: t.to("meta")}, "meta"),
    "absmax in fp64": ({"absmax": torch.Tensor.double}, "absmax must be 64 contiguous torch.uint8"),
    "absmax in fp32": ({"absmax": torch.Tensor.float}, "absmax must be 64 contiguous torch.uint8"),
    "code too short": ({"code": lambda t: t[:8]}, "code must be 16"),
    "offset of two": ({"offset": lambda t: t.repeat(2)}, "offset must be 1"),
    "offset requires grad": (
        {"offset": lambda t: t.clone().requires_grad_()},
        "offset requires grad",
    ),
    "shape negative": ({"shape": lambda _: [-64, -64]}, "-64"),
    "dtype": ({"dtype": lambda _: torch.float64}, "float64"),
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("case", OPERATOR)
def test_the_operator_called_directly_checks_as_well(nf4, pair, monkeypatch, tally, case, traced):
    if traced and case in ("weight freed", "absmax on another device"):
        pytest.skip("no memory is looked at while tracing")
    change, message = OPERATOR[case]
    ((field, value),) = change.items()
    described = helpers.described(nf4, *pair)
    described = described._replace(**{field: value(getattr(described, field))})
    call = torch.ops.nf4_triton.dequantize
    if traced:
        call = torch.compile(
            call, fullgraph=True, backend=nf4.GraphCounter("cuda" if GPU else "cpu")
        )
        torch._dynamo.reset()
    monkeypatch.setattr(nf4, "launch", lambda *_: pytest.fail("launched"))
    with pytest.raises(Exception, match=message):
        call(*described)
    tally["errors"] += 1


def test_the_operator_called_directly_gives_the_right_bits(nf4, pair):
    weight, state = pair
    out = torch.ops.nf4_triton.dequantize(*helpers.described(nf4, weight, state))
    assert nf4.bits_differing(out, dequantize_4bit(weight, state)) == 0


def test_a_state_that_takes_no_attribute(nf4, pair):
    """It is read as any other; only no launch can be kept with it."""
    weight, state = pair
    fields = ("absmax", "blocksize", "code", "dtype", "offset", "quant_type", "shape", "state2")
    frozen = namedtuple("Frozen", fields)(*(getattr(state, field) for field in fields))
    for _ in range(2):
        assert (
            nf4.bits_differing(nf4.dequantize_nf4(weight, frozen), dequantize_4bit(weight, state))
            == 0
        )


def test_freed_memory_is_refused_also_where_a_mode_watches(nf4, pair, monkeypatch):
    from torch.utils.flop_counter import FlopCounterMode

    weight, state = pair
    freed(weight)
    monkeypatch.setattr(nf4, "launch", lambda *_: pytest.fail("launched"))
    with (
        FlopCounterMode(display=False),
        pytest.raises(ValueError, match="the weight needs 2048 bytes .* holds 0"),
    ):
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


def test_a_mixture_of_two_states_of_one_size_is_followed_as_bitsandbytes_follows_it(nf4, pair):
    """Nothing marks a state as another weight's; bitsandbytes cannot tell either."""
    weight, _ = pair
    _, other = nf4.quantized((64, 64), torch.float16, weight.device, seed=1)
    assert (
        nf4.bits_differing(nf4.dequantize_nf4(weight, other), dequantize_4bit(weight, other)) == 0
    )


def test_an_unaligned_table_is_refused(nf4):
    """A CPU tensor can be made at any address; on a GPU such a load would end the process."""
    weight, state = nf4.quantized((64, 64), torch.float16, "cpu")
    state.code = torch.frombuffer(bytearray(100), dtype=torch.float32, count=16, offset=1)
    with pytest.raises(ValueError, match="code is torch.float32 at address 0x"):
        helpers.described(nf4, weight, state)


def test_a_subclass_without_data_is_not_launched(nf4, pair, monkeypatch):
    weight, state = pair

    class Dataless(torch.Tensor):
        @staticmethod
        def __new__(cls, like):
            return torch.Tensor._make_wrapper_subclass(
                cls, like.shape, dtype=like.dtype, device=like.device
            )

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
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp4_is_refused_by_name(nf4, device, dtype, compressed):
    values = torch.randn(64, 64, device=device).to(dtype)
    weight, state = quantize_4bit(values, quant_type="fp4", compress_statistics=compressed)
    with pytest.raises(ValueError, match="'fp4'"):
        nf4.dequantize_nf4(weight, state)


def test_a_cpu_weight_needs_the_interpreter(nf4, monkeypatch):
    monkeypatch.setattr(nf4, "INTERPRETED", nf4.tl.constexpr(False))
    weight, state = nf4.quantized((64, 64), torch.float16, "cpu")
    with pytest.raises(ValueError, match="cpu.*expected a CUDA device"):
        nf4.dequantize_nf4(weight, state)


KINDS = {
    "fc1": (4, 1),
    "fc2": (1, 4),
    "attn": (1, 1),
    "attn_packed": (3, 1),
}  # multiples of the model's dimension


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_passed_transposed(nf4, device, tally, kind, storage):
    """As bitsandbytes' gemv tests pass them: as [1, n], which stands for the transposed matrix."""
    for dim in (128, 256, 512, 1024) if GPU else (64,):
        rows, columns = (factor * dim for factor in KINDS[kind])
        for dtype in DTYPES if GPU else DTYPES[:1]:
            values = torch.randn(rows, columns, device=device).to(dtype) / dim**0.5
            for compressed in (False, True):
                weight, state = quantize_4bit(
                    values, compress_statistics=compressed, quant_type="nf4", quant_storage=storage
                )
                assert same(nf4, tally, weight.t(), state).shape == (columns, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (64, 128), (3, 5), (128,)])
def test_turned_and_flat_weights(nf4, device, shape, dtype):
    """What bitsandbytes and Unsloth answer to a packed weight passed as [1, n], or flat."""
    weight, state = nf4.quantized(shape, dtype, device)
    want_straight = nf4.spec(weight, state)
    for packed in (weight, weight.t(), weight.view(-1)):
        want = want_straight.t() if packed.shape[0] == 1 else want_straight
        if GPU:
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


def linear(device, compressed, storage, blocksize=64, shape=(300, 400)):
    """A Linear4bit layer quantized from fp16 weights."""
    features = shape if GPU else (30, 40)
    layer = bnb.nn.Linear4bit(*features, bias=False, device="meta")
    values = torch.randn(
        features[1], features[0], generator=torch.Generator().manual_seed(1)
    ).half()
    options = {"blocksize": blocksize, "compress_statistics": compressed, "quant_storage": storage}
    layer.weight = bnb.nn.Params4bit(values, requires_grad=False, quant_type="nf4", **options)
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
    """Copied before and after the first call; the copy stands on its own, without a launch."""
    want = same(nf4, tally, *weight_of(linear(device, compressed, torch.uint8)))
    for called in (False, True):
        layer = linear(device, compressed, storage)
        assert layer.weight.dtype == storage
        if called:
            same(nf4, tally, *weight_of(layer))
        clone = COPIES[how](layer)
        if how not in (
            "copy",
            "to the CPU and back",
        ):  # a shallow copy shares tensors and state, so it may share more
            assert not getattr(clone.weight.quant_state, "_nf4_launches", None)
        for _ in range(2 if GPU else 1):
            assert helpers.differing(nf4, tally, same(nf4, tally, *weight_of(clone)), want) == 0
        if how not in ("copy", "to the CPU and back"):
            layer.weight.data.zero_()
            assert helpers.differing(nf4, tally, nf4.your_dequantize_nf4(clone), want) == 0


def weight_of(layer):
    return layer.weight, layer.weight.quant_state


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("blocksize", [32, 64, 128])
def test_copied_parameters(nf4, device, tally, blocksize, compressed):
    weight = linear(device, compressed, torch.uint8, blocksize).weight
    want = same(nf4, tally, weight, weight.quant_state)
    for clone in (copy.copy(weight), copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert helpers.differing(nf4, tally, same(nf4, tally, clone, clone.quant_state), want) == 0


def test_a_parameter_of_four_weights(nf4, device, tally):
    weight = bnb.nn.Params4bit(torch.tensor([1.0, 2.0, 3.0, 4.0]), quant_type="nf4").to(device)
    assert same(nf4, tally, weight, weight.quant_state).shape == (4,)


@pytest.mark.parametrize("storage", STORAGES)
def test_sharded_and_gathered_bytes(nf4, device, tally, storage):
    """What FSDP does with the packed weight: flat, in four shards, put together again."""
    values = torch.randn(256 if GPU else 64, 128, device=device).half()
    weight, state = quantize_4bit(values, quant_type="nf4", quant_storage=storage)
    want = same(nf4, tally, weight, state)
    gathered = torch.cat(weight.flatten().chunk(4)).reshape(weight.shape)
    assert helpers.differing(nf4, tally, nf4.dequantize_nf4(gathered, state), want) == 0


@pytest.mark.parametrize("instead", ["no attribute", "None"])
def test_a_state_that_only_the_layer_has(nf4, device, instead):
    """Where FSDP or torch.export put a bare tensor in the parameter's place."""
    layer = nf4.bnb_Linear4bit(64, 128).to(device)
    want = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    layer.quant_state = layer.weight.quant_state
    if instead == "None":
        layer.weight.quant_state = None
    else:
        layer.weight = torch.nn.Parameter(layer.weight.data, requires_grad=False)
    for _ in range(2):
        assert nf4.bits_differing(nf4.your_dequantize_nf4(layer), want) == 0


def test_load_state_dict(nf4, device):
    layer, other = (nf4.bnb_Linear4bit(64, 128).to(device) for _ in range(2))
    nf4.your_dequantize_nf4(layer)
    state = layer.weight.quant_state
    layer.load_state_dict({"weight": other.weight.data}, strict=False)
    want = dequantize_4bit(other.weight.data, state)
    assert nf4.bits_differing(nf4.your_dequantize_nf4(layer), want) == 0


@pytest.mark.gpu
def test_moved_away_and_back(nf4):
    layer = nf4.bnb_Linear4bit(64, 128).to("cuda")
    want = nf4.your_dequantize_nf4(layer)
    layer = layer.to("cpu")
    with pytest.raises(ValueError, match="cpu"):
        nf4.your_dequantize_nf4(layer)
    layer = layer.to("cuda")
    for _ in range(2):
        assert nf4.bits_differing(nf4.your_dequantize_nf4(layer), want) == 0


def test_each_call_gives_a_fresh_tensor(nf4, device):
    weight, state = nf4.quantized((64, 64), torch.float16, device)
    outputs = [nf4.dequantize_nf4(weight, state) for _ in range(3)]
    want = outputs[0].clone()
    assert len({out.data_ptr() for out in outputs}) == 3
    outputs[0].zero_()
    assert torch.equal(nf4.dequantize_nf4(weight, state), want)


EXPORTED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import nf4_triton
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

assert nf4_triton.__file__.startswith(sys.argv[1])
for name in ("transformers", "peft", "pandas"):
    assert name not in sys.modules, "more than the launch needs"
device = "cuda" if torch.cuda.is_available() else "cpu"
for dtype in (torch.float16, torch.bfloat16, torch.float32):
    weight, state = quantize_4bit(torch.randn(64, 128, device=device).to(dtype), quant_type="nf4")
    for _ in range(2):
        out = nf4_triton.dequantize_nf4(weight, state)
        assert torch.equal(out, dequantize_4bit(weight, state)), dtype
for change, message in ((("quant_type", "fp4"), "'fp4'"), (("blocksize", 96), "got 96")):
    weight, state = quantize_4bit(torch.randn(64, 128, device=device), quant_type="nf4")
    setattr(state, *change)
    try:
        nf4_triton.dequantize_nf4(weight, state)
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(change)
print("it works")
"""


def test_the_module_that_nbdev_writes(tmp_path):
    """The README's line: the kernel and its launch alone, importable, with the same errors."""
    export = pytest.importorskip("nbdev.export")
    export.nb_export(helpers.NOTEBOOK, tmp_path)
    assert [path.name for path in tmp_path.glob("*.py")] == ["nf4_triton.py"]
    source = (tmp_path / "nf4_triton.py").read_text()
    assert (
        "test_dequantize" not in source
        and "class MLP" not in source
        and "_dequantize_nf4_kernel" in source
    )
    script = tmp_path / "try_it" / "script.py"
    script.parent.mkdir()
    script.write_text(EXPORTED)
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0 and "it works" in done.stdout, done.stderr[-3000:]
