"""Protects the graders: the challenge's loop to the letter, and a fair race."""

import itertools
import random
import time
import types
import weakref
from unittest import mock

import pandas as pd
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit

N_TOKENS = 2048 if torch.cuda.is_available() else 20  # of few, bitsandbytes makes no weights there


@pytest.fixture
def options(nf4):
    return [option._replace(qlen=N_TOKENS) for option in nf4.SMALL_OPTIONS]


OTHERS = {"quant_type": "fp4", "blocksize": 128, "absmax": torch.ones(1), "dtype": torch.float32}


@pytest.mark.parametrize("field", OTHERS)
def test_a_layer_that_is_not_the_challenges_is_refused(nf4, field):
    layer = nf4.MLP(64, 128).up_proj
    nf4.assert_correct_bnb(layer, torch.float16)
    setattr(layer.weight.quant_state, field, OTHERS[field])
    with pytest.raises(AssertionError):
        nf4.assert_correct_bnb(layer, torch.float16)


def test_each_dequantization_is_waited_for_and_all_three_stay_alive(nf4, monkeypatch):
    """In the challenge's loop, and in the race's."""
    seen, outs = [], []

    def wait():
        seen.append("wait")
        time.sleep(0.02)

    def fx(layer):
        assert all(out() is not None for out in outs[len(outs) // 3 * 3 :]), "one was dropped"
        out = torch.ones(2, 3)
        seen.append(layer.name)
        outs.append(weakref.ref(out))
        return out

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    on_gpu = types.SimpleNamespace(is_cuda=True)
    layers = [types.SimpleNamespace(name=name, weight=on_gpu) for name in ("up", "gate", "down")]
    results = nf4.mlp_dequantize(on_gpu, types.SimpleNamespace(layers=lambda: layers), fx)
    assert seen == ["up", "wait", "gate", "wait", "down", "wait"]
    assert [tuple(out.shape) for out in results] == [(3, 2)] * 3
    seen.clear()
    us, issue_us = nf4.call_us(layers, fx, loops=2)
    assert 0 < issue_us < 20_000 <= us, "the time to issue is without the wait"
    assert seen == ["wait"] + 2 * ["up", "wait", "gate", "wait", "down", "wait"]


def test_the_timed_loop_runs_as_often_as_it_is_told(nf4, options, monkeypatch):
    fx = mock.Mock(wraps=nf4.bnb_dequantize)
    checks = mock.Mock(wraps=nf4.assert_correct_bnb)
    monkeypatch.setattr(nf4, "assert_correct_bnb", checks)
    nf4.test_dequantize(fx, loops=3, options=options)
    warm_up = 2 * (3 + 3)  # the forward pass and each weight
    assert fx.call_count == len(options) * (warm_up + 3 * 3)
    assert checks.call_count == len(options) * 2 * 3


def off_by(relative):
    return lambda layer: dequantize_4bit(layer.weight, layer.weight.quant_state) * (1 + relative)


def zeroing(layer):
    """A cheat: with the weight it spoils what it is compared with."""
    layer.weight.quant_state.absmax.zero_()
    layer.weight.quant_state.offset.zero_()
    layer.weight.quant_state.state2.code.zero_()
    return off_by(0)(layer)


WRONG_FX = {
    "values off by 1 %": off_by(0.01),
    "another dtype": lambda layer: off_by(0)(layer).float(),
    "other strides": lambda layer: off_by(0)(layer).t().contiguous().t(),
    "a NaN": lambda layer: off_by(0)(layer).fill_(torch.nan),
    "one that zeroes the layer": zeroing,
}


@pytest.mark.parametrize("name", WRONG_FX)
def test_wrong_weights_are_not_timed(nf4, options, monkeypatch, name):
    monkeypatch.setattr(nf4, "mlp_dequantize", lambda *_: pytest.fail("it was timed"))
    with pytest.raises((AssertionError, RuntimeError)):
        nf4.test_dequantize(WRONG_FX[name], loops=1, options=options)


@pytest.mark.parametrize("name", sorted(set(WRONG_FX) - {"other strides"}))  # of equal bits
def test_a_contender_with_wrong_bits_is_named_and_left_out(nf4, name, capsys):
    layers = nf4.MLP(64, 128).layers()
    working = nf4.checked({"ours": nf4.bnb_dequantize, "peft": WRONG_FX[name]}, layers)
    assert list(working) == ["ours"] and "left out: peft: " in capsys.readouterr().out


def race(nf4, peft, dtypes=(torch.float16,)):
    contenders = {"ours": nf4.bnb_dequantize, "peft": peft}
    return nf4.race(contenders, dtypes, rounds=2, loops=1, options=nf4.SMALL_OPTIONS)


def test_wrong_bits_are_left_out_and_a_changed_layer_stops_the_race(nf4, capsys):
    assert list(race(nf4, off_by(0.01))) == ["ours"]
    assert "left out: peft: " in capsys.readouterr().out
    calls = []

    def late(layer):
        calls.append(layer)
        return zeroing(layer) if len(calls) > 20 else off_by(0)(layer)  # 9 before the race

    with pytest.raises(ValueError, match="changed a layer"):
        race(nf4, late)


def test_turns_have_another_order_in_each_round_and_in_each_run(nf4):
    """Though `build` seeds Python's own generator."""
    orders = []
    for _ in range(2):
        random.seed(0)
        ran = []
        nf4.in_turns({i: lambda i=i: ran.append(i) for i in range(12)}, rounds=2)
        orders += [ran[:12], ran[12:]]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len(set(map(tuple, orders))) == 4


def test_the_race_takes_medians_of_its_rounds(nf4, monkeypatch):
    monkeypatch.setattr(
        nf4, "call_us", mock.Mock(side_effect=itertools.cycle([(1, 0), (9, 0), (2, 0)]))
    )
    us = nf4.race({"ours": nf4.bnb_dequantize}, [torch.float16], 3, 1, nf4.SMALL_OPTIONS[:1])
    assert us.loc[("float16", 0), "ours"] == 2


def test_ratios_are_what_a_reader_divides_and_the_mix_has_the_challenges_dtypes(nf4):
    options = [(dtype, i) for dtype in ("float16", "bfloat16") for i in range(3)]
    theirs = dict(zip(options, (20.0, 40.0, 60.0, 80.0, 100.0, 120.0)))
    us = pd.DataFrame({"ours": dict.fromkeys(options, 10.0), "peft": theirs})
    found = {(row["dtype"], row["who"]): row for row in nf4.ratios(us)}
    assert found["float16", "ours"]["ratio"] == 1.0
    row = found["float16", "peft"]
    assert row["us"] == [20.0, 40.0, 60.0] and row["ratio"] == 120 / 30
    assert found["mix", "peft"]["us"] == [20.0, 100.0, 120.0]
    assert found["mix", "peft"]["ratio"] == 240 / 30
    for lacking in (("float16", 0), ("bfloat16", 2)):
        assert {row["dtype"] for row in nf4.ratios(us.drop(lacking))} == {"float16", "bfloat16"}


def test_a_fourth_shape_is_one_more_entry(nf4, options, monkeypatch):
    options.append(options[0]._replace(hd=128))
    monkeypatch.setattr(nf4, "OPTIONS", options)
    monkeypatch.setattr(nf4, "SMALL_OPTIONS", options)
    rows = nf4.ratios(race(nf4, nf4.bnb_dequantize, [torch.float16, torch.bfloat16]))
    assert len(rows) == 3 * 2
    for row in rows:
        assert len(row["us"]) == len(options)


@pytest.mark.gpu
def test_on_a_gpu_all_contenders_work(nf4, options, capsys, monkeypatch):
    unsloth = pytest.importorskip("unsloth.kernels.utils")
    monkeypatch.setattr(nf4, "unsloth_kernels", unsloth)
    working = nf4.checked(nf4.CONTENDERS, [nf4.MLP(512, 1024).up_proj])
    assert list(working) == list(nf4.CONTENDERS), capsys.readouterr().out
    monkeypatch.setattr(nf4, "trusted_dequantize", nf4.unsloth_dequantize)
    assert nf4.test_dequantize(nf4.your_dequantize_nf4, loops=3, options=options) > 0
