"""Protects the graders: the challenge's loop to the letter, a fair race, a record without loss."""

import json
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
    seen, outs = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))

    def fx(name):
        assert all(out() is not None for out in outs), "a result was dropped"
        out = torch.ones(2, 3)
        seen.append(name)
        outs.append(weakref.ref(out))
        return out

    mlp = types.SimpleNamespace(layers=lambda: ("up", "gate", "down"))
    on_gpu = types.SimpleNamespace(is_cuda=True)
    results = nf4.mlp_dequantize(on_gpu, mlp, fx)
    assert seen == ["up", "wait", "gate", "wait", "down", "wait"]
    assert [tuple(out.shape) for out in results] == [(3, 2)] * 3


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


WRONG_FX = {
    "values off by 1 %": off_by(0.01),
    "another dtype": lambda layer: off_by(0)(layer).float(),
    "other strides": lambda layer: off_by(0)(layer).t().contiguous().t(),
    "a NaN": lambda layer: off_by(0)(layer).fill_(torch.nan),
}


@pytest.mark.parametrize("name", WRONG_FX)
def test_wrong_weights_are_not_timed(nf4, name, monkeypatch):
    monkeypatch.setattr(nf4, "mlp_dequantize", lambda *_: pytest.fail("it was timed"))
    with pytest.raises((AssertionError, RuntimeError)):
        nf4.test_dequantize(WRONG_FX[name], loops=1, options=small_options(nf4))


def test_a_contender_that_fails_is_named_and_left_out_but_never_ours(nf4, layer, capsys):
    fine = nf4.bnb_dequantize
    working = nf4.checked({"ours": fine, "peft": off_by(0.01)}, [layer])
    assert list(working) == ["ours"] and "left out: peft: " in capsys.readouterr().out
    with pytest.raises(ValueError, match="wrong weights"):
        nf4.checked({"ours": off_by(0.01)}, [layer])


def test_the_time_to_issue_is_taken_without_the_wait(nf4, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(0.02))
    mlp = types.SimpleNamespace(layers=lambda: ("up", "gate", "down"))
    on_gpu = types.SimpleNamespace(is_cuda=True)
    whole, issue = nf4.call_us(on_gpu, mlp, lambda layer: torch.ones(2, 3), loops=2)
    assert 0 < issue < 20_000 <= whole


def test_in_the_race_everyone_runs_once_a_round_and_wrong_bits_stop_it(nf4):
    contenders = {"ours": nf4.your_dequantize_nf4, "peft": nf4.bnb_dequantize}
    small = {"rounds": 2, "loops": 1, "options": nf4.SMALL_OPTIONS}
    frame = nf4.race(contenders, [torch.float16, torch.bfloat16], **small)
    assert len(frame) == 2 * 2 * 2 * 3
    assert not frame.duplicated(["dtype", "option", "round", "who"]).any()
    orders = [part.who.tolist() for _, part in frame.groupby("round")]
    assert orders[0] != orders[1], "the order is the same in each round"
    with pytest.raises(ValueError, match="not all contenders give the right bits"):
        nf4.race(contenders | {"peft": off_by(0.01)}, [torch.float16], **small)


def test_ratios_are_taken_within_a_round_and_the_mix_has_the_challenges_dtypes(nf4):
    rows = []
    theirs = {("float16", 0): 10.0, ("float16", 1): 20.0, ("float16", 2): 30.0}
    theirs |= {("bfloat16", 0): 40.0, ("bfloat16", 1): 50.0, ("bfloat16", 2): 60.0}
    for (dtype, option), us in theirs.items():
        for i_round, factor in enumerate((1.0, 2.0, 4.0)):
            row = {"dtype": dtype, "option": option, "round": i_round}
            rows.append(row | {"who": "ours", "us": 10.0, "issue_us": 1.0})
            rows.append(row | {"who": "peft", "us": us * factor, "issue_us": factor})
    found = {(row["dtype"], row["who"]): row for row in nf4.ratios(pd.DataFrame(rows))}
    assert found["float16", "ours"]["ratio"] == 1.0
    row = found["float16", "peft"]  # 60 / 30, then twice and four times that
    assert (row["low"], row["ratio"], row["high"]) == (3.0, 4.0, 6.0), "quartiles and median"
    assert row["us"] == [20.0, 40.0, 60.0] and row["issue_us"] == [2.0, 2.0, 2.0]
    assert found["mix", "peft"]["ratio"] == 2 * (10 + 50 + 60) / 30


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
    assert json.loads(path.read_text()) == {"gpu": "Tesla T4"}
    write = nf4.Path.write_text

    def write_half(path, text):
        write(path, text[: len(text) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr(nf4.Path, "write_text", write_half)
    with pytest.raises(OSError, match="no space left"):
        nf4.save({"gpu": "Tesla T4", "date": "2026-11-26"}, {})
    assert json.loads(path.read_text()) == {"gpu": "Tesla T4"}, "the earlier one was lost"


@pytest.mark.gpu
def test_on_a_gpu_ours_is_one_kernel_and_all_contenders_work(nf4, capsys, monkeypatch):
    unsloth = pytest.importorskip("unsloth.kernels.utils")
    monkeypatch.setattr(nf4, "unsloth_kernels", unsloth)
    layer = nf4.MLP(512, 1024).up_proj
    working = nf4.checked(nf4.CONTENDERS, [layer])
    assert list(working) == list(nf4.CONTENDERS), capsys.readouterr().out
    assert len(nf4.kernels_of(working["ours"], layer)) == 1
    assert len(nf4.kernels_of(working["three_launches"], layer)) >= 3
    monkeypatch.setattr(nf4, "trusted_dequantize", nf4.unsloth_dequantize)
    options = small_options(nf4)
    assert nf4.test_dequantize(nf4.your_dequantize_nf4, loops=3, options=options) > 0
