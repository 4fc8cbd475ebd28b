"""Protects the graders: the challenge's loop to the letter, a fair race, a record without loss."""

import json
import random
import time
import types
import weakref
from unittest import mock

import pandas as pd
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit

HD, M = 64, 128
N_TOKENS = 2048 if torch.cuda.is_available() else 20  # of few, bitsandbytes makes no weights there


def small_options(nf4):
    return [option._replace(qlen=N_TOKENS) for option in nf4.SMALL_OPTIONS]


@pytest.fixture(scope="module")
def layer(nf4):
    return nf4.MLP(HD, M).up_proj


OTHERWISE = {"quant_type": "fp4", "blocksize": 128, "compress_statistics": False}


@pytest.mark.parametrize("name", OTHERWISE)
def test_layers_quantized_otherwise_are_not_timed(nf4, monkeypatch, name):
    """All else agrees: everyone dequantizes them right."""
    make = nf4.bnb_Linear4bit

    def otherwise(*sizes, **options):
        layer = make(*sizes, **options)
        setattr(layer.weight, name, OTHERWISE[name])  # before it is quantized
        return layer

    monkeypatch.setattr(nf4, "bnb_Linear4bit", otherwise)
    monkeypatch.setattr(nf4, "mlp_dequantize", lambda *_: pytest.fail("they were timed"))
    options = [option._replace(hd=128, m=256) for option in small_options(nf4)]
    with pytest.raises(AssertionError) as refused:
        nf4.test_dequantize(nf4.bnb_dequantize, loops=1, options=options)
    assert refused.traceback[-1].name == "assert_correct_bnb"


def test_each_dequantization_is_waited_for_and_all_three_stay_alive(nf4, monkeypatch):
    """In the challenge's loop, and in the race's."""
    seen, outs = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))

    def fx(layer):
        assert all(out() is not None for out in outs[len(outs) // 3 * 3 :]), "one was dropped"
        out = torch.ones(2, 3)
        seen.append(layer.name)
        outs.append(weakref.ref(out))
        return out

    on_gpu = types.SimpleNamespace(is_cuda=True)
    layers = [types.SimpleNamespace(name=name, weight=on_gpu) for name in ("up", "gate", "down")]
    results = nf4.mlp_dequantize(on_gpu, types.SimpleNamespace(layers=lambda: layers), fx)
    assert seen == ["up", "wait", "gate", "wait", "down", "wait"]
    assert [tuple(out.shape) for out in results] == [(3, 2)] * 3
    seen.clear()
    nf4.call_us(layers, fx, loops=2)
    assert seen == ["wait"] + 2 * ["up", "wait", "gate", "wait", "down", "wait"]


def test_the_timed_loop_runs_as_often_as_it_is_told(nf4):
    calls = []

    def counted(layer):
        calls.append(layer)
        return nf4.your_dequantize_nf4(layer)

    nf4.test_dequantize(counted, loops=3, options=small_options(nf4))
    warm_up = 2 * (3 + 3)  # the forward pass and each weight
    assert len(calls) == 3 * (warm_up + 3 * 3)


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
def test_wrong_weights_are_not_timed(nf4, name, monkeypatch):
    monkeypatch.setattr(nf4, "mlp_dequantize", lambda *_: pytest.fail("it was timed"))
    with pytest.raises((AssertionError, RuntimeError)):
        nf4.test_dequantize(WRONG_FX[name], loops=1, options=small_options(nf4))


@pytest.mark.parametrize("name", sorted(set(WRONG_FX) - {"other strides"}))  # of equal bits
def test_a_contender_with_wrong_bits_is_named_and_left_out(nf4, name, capsys):
    layers = nf4.MLP(HD, M).layers()
    working = nf4.checked({"ours": nf4.your_dequantize_nf4, "peft": WRONG_FX[name]}, layers)
    assert list(working) == ["ours"] and "left out: peft: " in capsys.readouterr().out


def test_a_contender_that_changes_a_layer_during_the_race_stops_it(nf4):
    calls = []

    def late(layer):
        calls.append(layer)
        return zeroing(layer) if len(calls) > 20 else off_by(0)(layer)

    contenders = {"ours": nf4.your_dequantize_nf4, "peft": late}
    with pytest.raises(ValueError, match="changed a layer"):
        nf4.race(contenders, [torch.float16], rounds=3, loops=1, options=nf4.SMALL_OPTIONS)


def test_the_time_to_issue_is_taken_without_the_wait(nf4, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(0.02))
    layers = 3 * [types.SimpleNamespace(weight=types.SimpleNamespace(is_cuda=True))]
    us, issue_us = nf4.call_us(layers, lambda layer: torch.ones(2, 3), loops=2)
    assert 0 < issue_us < 20_000 <= us


def test_in_the_race_everyone_runs_once_a_round_and_wrong_bits_stop_it(nf4):
    contenders = {"ours": nf4.your_dequantize_nf4, "peft": nf4.bnb_dequantize}
    small = {"rounds": 2, "loops": 1, "options": nf4.SMALL_OPTIONS}
    frame = nf4.race(contenders, [torch.float16, torch.bfloat16], **small)
    assert len(frame) == 2 * 2 * 2 * 3 and (frame.us > 0).all() and (frame.issue_us > 0).all()
    assert not frame.duplicated(["dtype", "option", "round", "who"]).any()
    with pytest.raises(ValueError, match="not all contenders give the right bits"):
        nf4.race(contenders | {"peft": off_by(0.01)}, [torch.float16], **small)


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


def frame_of(theirs):
    """A race's frame of {(dtype, option): microseconds}: ours takes 10, in each of three rounds."""
    rows = []
    for (dtype, option), us in theirs.items():
        for i_round, factor in enumerate((1.0, 2.0, 4.0)):
            row = {"dtype": dtype, "option": option, "round": i_round}
            rows.append(row | {"who": "ours", "us": 10.0, "issue_us": 1.0})
            rows.append(row | {"who": "peft", "us": us * factor, "issue_us": factor})
    return pd.DataFrame(rows)


def test_ratios_are_what_a_reader_divides_and_the_mix_has_the_challenges_dtypes(nf4):
    theirs = {("float16", 0): 10.0, ("float16", 1): 20.0, ("float16", 2): 30.0}
    theirs |= {("bfloat16", 0): 40.0, ("bfloat16", 1): 50.0, ("bfloat16", 2): 60.0}
    found = {(row["dtype"], row["who"]): row for row in nf4.ratios(frame_of(theirs))}
    assert found["float16", "ours"]["ratio"] == 1.0
    row = found["float16", "peft"]  # in the median round 120 / 30; 60 / 30 and 240 / 30 are beside
    assert row["us"] == [20.0, 40.0, 60.0] and row["issue_us"] == [2.0, 2.0, 2.0]
    assert row["ratio"] == sum(row["us"]) / sum(found["float16", "ours"]["us"]) == 4.0
    assert (row["low"], row["high"]) == (3.0, 6.0), "quartiles"
    assert found["mix", "peft"]["ratio"] == 2 * (10 + 50 + 60) / 30


@pytest.mark.parametrize("lacking", [("float16", 0), ("bfloat16", 2)])
def test_a_mix_that_lacks_an_option_is_none(nf4, lacking):
    theirs = {(dtype, i): 10.0 for dtype in ("float16", "bfloat16") for i in range(3)}
    del theirs[lacking]
    assert {row["dtype"] for row in nf4.ratios(frame_of(theirs))} == {"float16", "bfloat16"}


def test_a_fourth_shape_is_one_more_entry(nf4, monkeypatch):
    options = small_options(nf4)
    options.append(options[0]._replace(hd=128))
    monkeypatch.setattr(nf4, "OPTIONS", options)
    contenders = {"ours": nf4.your_dequantize_nf4, "peft": nf4.bnb_dequantize}
    dtypes = [torch.float16, torch.bfloat16]
    rows = nf4.ratios(nf4.race(contenders, dtypes, rounds=1, loops=1, options=options))
    assert len(rows) == 3 * 2
    for row in rows:
        assert len(row["us"]) == len(row["issue_us"]) == 4
    timed = mock.Mock()
    monkeypatch.setattr(nf4, "mlp_dequantize", timed)
    nf4.test_dequantize(nf4.your_dequantize_nf4, loops=2, options=options)
    assert timed.call_count == 4 * 2


def test_a_record_is_saved_whole_or_not_at_all(nf4, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = nf4.save({"gpu": "Tesla T4"}, {})
    assert json.loads(path.read_text()) == {"gpu": "Tesla T4"} and path.name == "tesla-t4.json"
    with pytest.raises(TypeError):
        nf4.save({"gpu": "Tesla T4", "bad": object()}, {})
    assert [each.name for each in path.parent.iterdir()] == ["tesla-t4.json"]
    write = nf4.Path.write_text

    def write_half(path, text, **how):
        write(path, text[: len(text) // 2], **how)
        raise OSError("no space left on device")

    monkeypatch.setattr(nf4.Path, "write_text", write_half)
    with pytest.raises(OSError, match="no space left"):
        nf4.save({"gpu": "Tesla T4", "date": "2026-11-26"}, {})
    assert json.loads(path.read_text()) == {"gpu": "Tesla T4"}, "the earlier one was lost"


@pytest.mark.gpu
def test_on_a_gpu_all_contenders_work(nf4, capsys, monkeypatch):
    unsloth = pytest.importorskip("unsloth.kernels.utils")
    monkeypatch.setattr(nf4, "unsloth_kernels", unsloth)
    working = nf4.checked(nf4.CONTENDERS, [nf4.MLP(512, 1024).up_proj])
    assert list(working) == list(nf4.CONTENDERS), capsys.readouterr().out
    monkeypatch.setattr(nf4, "trusted_dequantize", nf4.unsloth_dequantize)
    options = small_options(nf4)
    assert nf4.test_dequantize(nf4.your_dequantize_nf4, loops=3, options=options) > 0
