"""Protects whoever runs a tool: right steps and figures, else a sentence, and nothing written."""

import json
import math
import sys
import types

import helpers
import ladder
import pytest
import t4
import torch
import training


def record(**other):
    """A record whose host times are 10, 30 and 50 us in fp16, and 4 us more in bf16."""
    kernels, race = [], []
    for dtype, more in (("float16", 0), ("bfloat16", 4)):
        for shape in ("2048 x 8192", "1024 x 4096", "4096 x 14336"):
            row = {"shape": shape, "format": "", "dtype": dtype}
            kernels.append(row | {"ours_us": 20, "unsloth_us": 4 * 2.515625})
            kernels.append(row | {"format": "ragged", "ours_us": 999, "unsloth_us": 999})
        us = {"ours": 20 + 10, "unsloth": 4 * 2.515625 + 30, "three_launches": 4 * 2.765625 + 50}
        for who in us:
            race.append({"dtype": dtype, "who": who, "us": [us[who] + more] * 3})
            race.append({"dtype": "mix", "who": who, "us": [999] * 3})
    race.append({"dtype": "float16", "who": "peft", "us": [999] * 3})
    return {"gpu": "H100", "date": "2026-11-26", "kernels": kernels, "race": race} | other


def write(folder, **contents):
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name.replace('_', '-')}.json").write_text(text)  # nvidia_h100: nvidia-h100
    return folder


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_step_of_the_ladder_has_the_right_bits(nf4, device, dtype):
    for pair in (nf4.quantized((64, 512), dtype, device), nf4.every_combination(dtype, device)):
        assert len(ladder.agreeing(*pair)) == len(ladder.LADDER)


def test_a_wrong_step_of_the_ladder_is_found(nf4, device, monkeypatch):
    edit = ("4 * (tl.arange(0, 8) ^ 1)", "4 * (tl.arange(0, 8) ^ 3)")
    monkeypatch.setattr(ladder, "LADDER", [("wrong", "", [edit])])
    with pytest.raises(SystemExit, match="wrong: [0-9]+ weights differ; nothing was written"):
        ladder.agreeing(*nf4.quantized((64, 512), torch.float16, device))


def test_an_instruction_that_the_emulator_does_not_know_is_named(nf4):
    """And where to teach it: so the assembly is edited without a GPU."""
    edited = ladder.edited("up", ("shfl.sync.idx", "shfl.sync.up"))
    if torch.cuda.is_available():
        pytest.skip("there it is assembled")
    with pytest.raises(
        Exception, match="know the instruction shfl.sync.up.b32: .* OPERATIONS of tests/"
    ):
        edited.dequantize_nf4(*nf4.quantized((64, 512), torch.float16, "cpu"))


def test_a_quotation_of_the_notebook_that_is_not_found_is_named():
    """With the cure: a name inside the kernel is quoted by tests and tools."""
    with pytest.raises(ValueError, match="'absmax3' must stand once .* not 0 times.*grep -rn"):
        helpers.load("nf4_quoted", ("absmax3", "absmax4"))


def test_a_llama_is_trained_both_ways_and_their_losses_compared(nf4, device, monkeypatch):
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    runs = [("tiny", tiny, 1, 64)]
    rows = training.measure_llamas(nf4, runs, device, rounds=2)
    assert [row["who"] for row in rows] == ["stock", "ours"]
    for row in rows:
        assert (row["model"], row["tokens"]) == ("tiny", "1 x 64") and row["ms"] > 0
        assert (row["peak_bytes"] > 0) == torch.cuda.is_available()
    nan = torch.full((), math.nan, device=device)
    monkeypatch.setattr(nf4, "dequantize_nf4", lambda weight, state: nan.expand(state.shape[::-1]))
    with pytest.raises(SystemExit, match="tiny, 1 x 64 tokens: nothing was written, as losses"):
        training.measure_llamas(nf4, runs, device, rounds=2)


@pytest.fixture
def unsloth(nf4, monkeypatch):
    """Stands for the modules of Unsloth that README's lines change; it needs a GPU."""
    utils = types.ModuleType("unsloth.kernels.utils")
    fast_lora = types.ModuleType("unsloth.kernels.fast_lora")
    used = []  # the function of each dequantization

    def fast_dequantize(W, quant_state=None, out=None, use_global_buffer=False, dtype=None):
        return nf4.spec(W, quant_state)

    def linear(layer, x, kernels):
        weight = layer.base_layer.weight
        used.append(kernels.fast_dequantize)
        how = {"use_global_buffer": True, "dtype": x.dtype}
        matrix = kernels.fast_dequantize(weight, weight.quant_state, **how)
        adapted = layer.lora_B["default"](layer.lora_A["default"](x.float()))
        return x @ matrix.t() + adapted.bfloat16()

    def apply_lora_mlp_swiglu(mlp, x, inplace=True):
        assert not inplace
        gate = mlp.act_fn(linear(mlp.gate_proj, x, utils))
        return linear(mlp.down_proj, gate * linear(mlp.up_proj, x, fast_lora), utils)

    utils.fast_dequantize = fast_lora.fast_dequantize = fast_dequantize
    fast_lora.apply_lora_mlp_swiglu = apply_lora_mlp_swiglu
    kernels = types.ModuleType("unsloth.kernels")
    kernels.utils, kernels.fast_lora = utils, fast_lora
    package = types.ModuleType("unsloth")
    package.kernels = kernels
    for module in (package, kernels, utils, fast_lora):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return used


def test_unsloths_mlp_is_run_both_ways_and_its_bits_compared(nf4, device, unsloth):
    runs = [(64, 128, 64), (64, 256, 64)]
    rows = training.measure_mlps(nf4, runs, device, rounds=2)
    assert [row["who"] for row in rows] == ["stock", "ours", "stock", "ours"]
    assert rows[3]["model"] == "Unsloth's LoRA MLP, 64 x 256" and rows[3]["tokens"] == "1 x 64"
    n_calls = [unsloth.count(function) for function in set(unsloth)]
    assert n_calls == [30, 30]  # 3 of an MLP, in 5 steps, of 2 runs


def test_wrong_bits_in_unsloths_mlp_are_found(nf4, device, monkeypatch, unsloth):
    monkeypatch.setattr(nf4, "dequantize_nf4", lambda weight, state: -nf4.spec(weight, state))
    with pytest.raises(SystemExit, match="nothing was written, as [0-9]+ values of output and"):
        training.measure_mlps(nf4, [(64, 128, 64)], device, rounds=2)


def test_the_estimate_is_what_is_worked_out_by_hand(tmp_path):
    """79,691,776 weights 3000 times are 239.075 G, of 2.515625 bytes 601.424 GB: 2.505933 s.

    The three launches move 2.765625 bytes: 2.754970 s at 240 GB/s. Of 3.714 s, 0.959030 s are left
    for 9000 calls of 52 us, 0.468 s: the factor is 2.049209. Ours, 12 us, take 0.108 s times that,
    0.221315 s; today's Unsloth, 32 us, 0.590172 s.
    """
    results = write(tmp_path / "results", nvidia_h100=record())
    t4.estimate(results, write(tmp_path / "run", rehearsal={"as": "Tesla T4"}))
    found = json.loads((results / "t4.json").read_text())
    assert found["rehearsal"] == {"as": "Tesla T4"} and found["record"]["gpu"] == "H100"
    host_us = {"ours": 12, "unsloth": 32, "three_launches": 52}
    assert found["record"]["host_us"] == pytest.approx(host_us)
    first, *others = found["estimate"]
    ours_s, unsloth_s = 2.505933 + 0.221315, 2.505933 + 0.590172
    wanted = {"published_s": 3.714, "share": 1.0, "factor": 2.049209, "ours_s": ours_s}
    wanted |= {"unsloth_s": unsloth_s, "over_unsloth": unsloth_s / ours_s}
    assert first == pytest.approx(wanted | {"over_three_launches": 3.714 / ours_s}, rel=1e-5)
    assert [row["share"] for row in others] == [0.9, 0.8, 1.0, 0.9, 0.8]
    assert others[0]["factor"] == pytest.approx((3.714 - 2.754970 / 0.9) / 0.468, rel=1e-5)
    t4.estimate(results)  # once more: the rehearsal stays
    assert json.loads((results / "t4.json").read_text()) == found


LACKING = {  # {what is wrong: (the files in results, what must be said)}
    "no record": ({}, "must hold one record of an NVIDIA GPU, not 0: run the notebook"),
    "two records": ({"nvidia_a100": record(), "nvidia_h100": record()}, "one record .* not 2: run"),
    "an old record": ({"nvidia_h100": {"harness": []}}, "lacks times of all three contenders"),
    "a broken record": ({"nvidia_h100": '{"race": ['}, "cannot be read"),
    "no race": ({"nvidia_h100": record(race=[])}, "lacks times of all three contenders"),
    "no kernels": ({"nvidia_h100": record(kernels=[])}, "lacks times of all three contenders"),
    "no rehearsal": ({"nvidia_h100": record()}, "rehearse on a newer GPU: python tools/t4.py"),
}


@pytest.mark.parametrize("lacking", LACKING)
def test_no_estimate_without_what_it_needs(tmp_path, lacking):
    contents, words = LACKING[lacking]
    results = write(tmp_path / "results", **contents)
    before = sorted(results.iterdir())
    with pytest.raises(SystemExit, match=words):
        t4.estimate(results)
    assert sorted(results.iterdir()) == before
