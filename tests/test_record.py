"""Protects whoever takes a run in or runs a tool: right figures, else a sentence, nothing half done."""

import json
import math
import os
import subprocess
import sys
import types

import nbformat
import pytest
import record
import shared
import t4
import torch
import training

ROOT = shared.ROOT


def test_what_notebook_and_readme_state_is_what_is_recorded():
    found = record.generated()
    notebook = nbformat.read(ROOT / "nf4_triton.ipynb", as_version=4)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for names, text in (({"record", "t4"}, "\n".join(cells)), ({"record", "training"}, readme)):
        assert {name for name in found if f"<!-- {name}:start -->" in text} == names
        assert record.with_blocks(text, found) == text, "run .venv/bin/python tools/record.py"
    assert set(found) == {"record", "t4", "training"}


ROWS = {  # of the record: the fields of each
    "kernels": {"shape", "format", "dtype", "ours_us", "unsloth_us", "copy_us"},
    "official": {"dtype", "who", "seconds"},
    "race": {"dtype", "who", "ratio", "low", "high", "us", "issue_us"},
    "call": {"rung", "us", "issue_us"},
    "compile": {"function", "dtype", "bit_equal", "compiled"},
}


def test_the_record_is_whole_and_of_the_outputs_that_are_shown():
    shown = record.shown_record()
    assert set(record.FIELDS) == set(shown)
    for name, fields in ROWS.items():
        assert all(set(row) == fields for row in shown[name]), name
    # By kernel[grid], by the operator and by a plan: two of them would be 600 million.
    assert shown["exact"]["checked"] > 800_000_000 and shown["exact"]["differing"] == 0
    gpu = shared.slug(shown["gpu"])
    expected = {f"{gpu}.json", f"{gpu}-call.png", f"{gpu}-race.png", "warp.png"}
    expected |= {f"{name}.json" for name in ("runs", "sm_75", "t4", "tests", "training")}
    assert {path.name for path in (ROOT / "results").iterdir()} == expected
    outputs = json.dumps([cell.get("outputs") for cell in notebook_of(ROOT).cells])
    assert "{gpu}, {date}; host: {cpu}, {cores} cores".format(**shown) in outputs


def notebook_of(folder):
    return nbformat.read(folder / "nf4_triton.ipynb", as_version=4)


# Taking a run in.


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the README and the notebook, as if it had just run; without results."""
    folder = tmp_path / "project"
    (folder / "results").mkdir(parents=True)
    (folder / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    notebook = notebook_of(ROOT)
    notebook.metadata["code"] = record.code_hash(notebook)
    nbformat.write(notebook, folder / "nf4_triton.ipynb")
    monkeypatch.setattr(shared, "ROOT", folder)
    monkeypatch.setattr(shared, "RESULTS", folder / "results")
    return folder


@pytest.fixture
def run(tmp_path, project):
    """A folder with a run, to be taken into the project."""
    folder = tmp_path / "run"
    (folder / "results").mkdir(parents=True)
    notebook = notebook_of(project)
    for cell in record.code_cells(notebook):
        cell.execution_count, cell.outputs = 1, []
    nbformat.write(notebook, folder / "nf4_triton.ipynb")
    for path in (ROOT / "results").glob("nvidia-*"):
        (folder / "results" / path.name).write_bytes(path.read_bytes())
    return folder


def edit_record(run, **fields):
    (path,) = (run / "results").glob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_notebook(run, **fields):
    notebook = notebook_of(run)
    for name, value in fields.items():
        setattr(record.code_cells(notebook)[3], name, value)
    nbformat.write(notebook, run / "nf4_triton.ipynb")


def race_of(run, **ratios):
    """The run's race, with other ratios over Unsloth in these dtypes."""
    race = json.loads(next(run.glob("results/*.json")).read_text())["race"]
    for row in race:
        if row["who"] == "unsloth" and row["dtype"] in ratios:
            row["ratio"] = ratios[row["dtype"]]
    return race


def test_a_run_is_taken_in_whole_and_once(run):
    """In the place of another GPU's: of that its line stays."""
    before = {"gpu": "Tesla T4", "ratios": {"unsloth": {"mix": 1.2}}}
    shared.write({shared.RESULTS / "runs.json": [before]})
    for name in ("tesla-t4.json", "tesla-t4-race.png"):
        (shared.RESULTS / name).write_text("")
    edit_record(run, race=race_of(run, mix=98.76))
    output = nbformat.v4.new_output("stream", text="as this run says: → 98.76")
    edit_notebook(run, outputs=[output])
    for _ in range(2):
        record.main([str(run)])
    assert [each["gpu"] for each in shared.stored("runs")] == [
        "Tesla T4",
        record.shown_record()["gpu"],
    ]
    names = {path.name for path in (run / "results").iterdir()}
    assert {path.name for path in shared.RESULTS.iterdir()} == {*names, "runs.json"}
    notebook = notebook_of(shared.ROOT)
    assert record.code_cells(notebook)[3].outputs == [output]
    readme = (shared.ROOT / "README.md").read_text(encoding="utf-8")
    for text in (nbformat.writes(notebook), readme):
        assert " 98.76 |" in text and "range of 2 runs" not in text, "one is of another GPU"
    edit_record(run, race=race_of(run, mix=1.23))
    record.main([str(run)])
    readme = (shared.ROOT / "README.md").read_text(encoding="utf-8")
    assert "range of 2 runs" in readme and "1.23 to 98.76" in readme and "→" in readme


LATIN_1 = """
import sys, shared, record
from pathlib import Path
shared.ROOT = Path(sys.argv[1])
shared.RESULTS = shared.ROOT / "results"
record.main([sys.argv[2]])
"""


def test_files_are_utf_8_in_any_locale(run, project):
    edit_notebook(run, outputs=[nbformat.v4.new_output("stream", text="→")])
    environment = os.environ | {"LC_ALL": "en_US.ISO-8859-1", "PYTHONUTF8": "0"}
    environment |= {"PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT / "tools")}
    command = [sys.executable, "-c", LATIN_1, project, run]
    before = (project / "README.md").read_text(encoding="utf-8").count("→")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (project / "README.md").read_text(encoding="utf-8").count("→") == before > 0
    assert "→" in (project / "nf4_triton.ipynb").read_text(encoding="utf-8")


ERROR = nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])


def add_a_cell(run):
    notebook = notebook_of(run)
    notebook.cells.insert(3, nbformat.v4.new_code_cell("# a comment", execution_count=1))
    nbformat.write(notebook, run / "nf4_triton.ipynb")


REFUSED = {  # what is wrong with a run: (how, the words that are said)
    "a cell more": (add_a_cell, "code differs"),
    "another notebook's": (lambda run: edit_notebook(run, source="x = 1"), "code differs"),
    "a cell that was not run": (lambda run: edit_notebook(run, execution_count=None), "not run"),
    "a cell that failed": (lambda run: edit_notebook(run, outputs=[ERROR]), "failed"),
    "wrong bits": (lambda run: edit_record(run, exact={"checked": 9, "differing": 1}), "differ"),
    "no race": (lambda run: edit_record(run, race=[]), "lacks race"),
    "no name of the processor": (lambda run: edit_record(run, cpu=""), "lacks cpu: run the"),
    "no picture": (lambda run: next(run.glob("results/*race.png")).unlink(), "no picture"),
    "no record": (lambda run: next(run.glob("results/*.json")).unlink(), "expected"),
    "cut short": (lambda run: next(run.glob("results/*.json")).write_text("{"), "cannot be read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_with_a_fault_changes_nothing(run, name):
    spoil, words = REFUSED[name]
    spoil(run)
    with pytest.raises(SystemExit, match=words):
        record.take(run)
    assert not list(shared.RESULTS.iterdir())


def test_without_git_a_sentence_says_so_and_nothing_changes(run, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="git, .* is missing: install it"):
        record.take(run)
    assert not list(shared.RESULTS.iterdir())


def test_what_is_interrupted_leaves_what_was_there(tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.replace", lambda *given: pytest.fail("already"))
    files = {tmp_path / "a.json": [1], tmp_path / "b.json": object()}
    with pytest.raises(TypeError):
        shared.write(files)


def test_the_record_stays_valid_after_a_comment_and_says_what_to_run_after_code(project):
    path = project / "nf4_triton.ipynb"
    notebook = notebook_of(project)
    for cell in record.code_cells(notebook):
        cell.source += "\n\n# a comment"
    nbformat.write(notebook, path)
    record.main(["check"])
    marked = notebook.copy()
    record.code_cells(notebook)[-1].source += "\nprint()"
    nbformat.write(notebook, path)
    with pytest.raises(SystemExit, match="code cells differ.*run the notebook.*record.py run"):
        record.main(["check"])
    del marked.metadata["code"]
    nbformat.write(marked, path)
    with pytest.raises(SystemExit, match="code cells differ.*run the notebook"):
        record.main(["check"])


def test_a_run_on_a_t4_takes_the_place_of_the_estimate(run):
    estimate = shared.stored("t4", ROOT / "results")
    estimate["record"]["host_us"]["ours"] += 1  # of another GPU's host
    sm_75 = shared.stored("sm_75", ROOT / "results")
    shared.write({shared.RESULTS / "t4.json": estimate, shared.RESULTS / "sm_75.json": sm_75})
    edit_record(run, gpu="Tesla T4")
    name = next(run.glob("results/*.json")).stem
    for path in (run / "results").iterdir():
        path.rename(path.with_name(path.name.replace(name, "tesla-t4")))
    record.main([str(run)])
    record.main(["check"])
    readme = (shared.ROOT / "README.md").read_text(encoding="utf-8")
    assert "**Tesla T4, " in readme and "No time has been measured" not in readme


def test_an_estimate_of_another_run_than_the_one_shown_is_noticed(project):
    for path in (ROOT / "results").glob("*.json"):
        (project / "results" / path.name).write_bytes(path.read_bytes())
    estimate = shared.stored("t4")
    estimate["record"]["host_us"]["ours"] += 1
    shared.write({shared.RESULTS / "t4.json": estimate})
    with pytest.raises(SystemExit, match="another run: run tools/t4.py estimate"):
        record.check()


# The estimate for a T4.


def record_of(**other):
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


def test_the_estimate_is_what_is_worked_out_by_hand(tmp_path):
    """79,691,776 weights 3000 times are 239.075 G, of 2.515625 bytes 601.424 GB: 2.505933 s.

    The three launches move 2.765625 bytes: 2.754970 s at 240 GB/s. Of 3.714 s, 0.959030 s are left
    for 9000 calls of 52 us, 0.468 s: the factor is 2.049209. Ours, 12 us, take 0.108 s times that,
    0.221315 s; today's Unsloth, 32 us, 0.590172 s.
    """
    results, run = tmp_path / "results", tmp_path / "run"
    shared.write({results / "nvidia-h100.json": record_of(), run / "rehearsal.json": {"as": "T4"}})
    t4.estimate(results, run)
    found = shared.stored("t4", results)
    assert found["rehearsal"] == {"as": "T4"} and found["record"]["gpu"] == "H100"
    host_us = {"ours": 12, "unsloth": 32, "three_launches": 52}
    assert found["record"]["host_us"] == pytest.approx(host_us)
    first, *others = found["estimate"]
    ours_s, unsloth_s = 2.505933 + 0.221315, 2.505933 + 0.590172
    wanted = {"published_s": 3.714, "share": 1.0, "factor": 2.049209, "ours_s": ours_s}
    wanted |= {"unsloth_s": unsloth_s, "over_unsloth": unsloth_s / ours_s}
    assert first == pytest.approx(wanted | {"over_three_launches": 3.714 / ours_s}, rel=1e-5)
    assert [row["share"] for row in others] == [0.9, 0.8, 1.0, 0.9, 0.8]
    t4.estimate(results)  # once more: the rehearsal stays
    assert shared.stored("t4", results) == found


def test_an_unlikely_row_of_the_estimate_does_not_set_the_first_screens_range():
    estimate = [{"factor": 0.5, "over_unsloth": 1.04, "over_three_launches": 1.1}]
    estimate += [
        {"factor": 2, "over_unsloth": over, "over_three_launches": 1.3} for over in (1.1, 1.2)
    ]
    run = record_of(cpu="x", cores=2, seconds=60, exact={"checked": 1, "differing": 0}, race=[])
    text = record.record_block(run, [], {"estimate": estimate}, None)
    assert "1.10 to 1.20 times today's Unsloth" in text


LACKING = {  # {what is wrong: (the files in results, what must be said)}
    "no record": ({}, "must hold one record of an NVIDIA GPU, not 0: run the notebook"),
    "two records": ({"nvidia-a": record_of(), "nvidia-h": record_of()}, "one record .* not 2: run"),
    "an old record": ({"nvidia-h": {"harness": []}}, "lacks times of all three contenders"),
    "a broken record": ({"nvidia-h": '{"race": ['}, "cannot be read"),
    "no race": ({"nvidia-h": record_of(race=[])}, "lacks times of all three contenders"),
    "no rehearsal": ({"nvidia-h": record_of()}, "rehearse on a newer GPU: python tools/t4.py"),
}


@pytest.mark.parametrize("lacking", LACKING)
def test_no_estimate_without_what_it_needs(tmp_path, lacking):
    contents, words = LACKING[lacking]
    shared.write({tmp_path / f"{name}.json": content for name, content in contents.items()})
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit, match=words):
        t4.estimate(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


# What training gains.

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 2}


def test_a_llama_is_trained_both_ways_in_both_states_and_wrong_losses_are_found(
    nf4, device, monkeypatch
):
    rows = training.measure_llamas(nf4, TINY, device, ((1, 64),), rounds=2)
    assert [(row["state"], row["who"]) for row in rows] == [
        ("bfloat16", "stock"), ("bfloat16", "ours"), ("float32", "stock"), ("float32", "ours")
    ]  # fmt: skip
    assert all(row["ms"] > 0 for row in rows)
    steps = {who: lambda x=x: [torch.tensor(x)] for who, x in (("stock", 1.0), ("ours", math.nan))}
    with pytest.raises(SystemExit, match="results differ, or are not finite: nothing was written"):
        training.measured({"model": "a model"}, steps, rounds=1)


def test_unsloths_mlp_is_run_both_ways_and_its_bits_compared(nf4, device, monkeypatch):
    used = []  # the function of each dequantization, by a stand-in of Unsloth, which needs a GPU
    utils, fast_lora = types.ModuleType("utils"), types.ModuleType("fast_lora")
    utils.fast_dequantize = fast_lora.fast_dequantize = lambda W, quant_state: nf4.spec(
        W, quant_state
    )

    def linear(layer, x, kernels):
        weight = layer.base_layer.weight
        used.append(kernels.fast_dequantize)
        adapted = layer.lora_B["default"](layer.lora_A["default"](x.float()))
        return x @ kernels.fast_dequantize(weight, weight.quant_state).t() + adapted.bfloat16()

    def apply_lora_mlp_swiglu(mlp, x, inplace):
        gate = mlp.act_fn(linear(mlp.gate_proj, x, utils))
        return linear(mlp.down_proj, gate * linear(mlp.up_proj, x, fast_lora), utils)

    fast_lora.apply_lora_mlp_swiglu = apply_lora_mlp_swiglu
    kernels = types.SimpleNamespace(utils=utils, fast_lora=fast_lora)
    monkeypatch.setitem(sys.modules, "unsloth", types.SimpleNamespace(kernels=kernels))
    monkeypatch.setitem(sys.modules, "unsloth.kernels", kernels)
    rows = training.measure_mlps(nf4, TINY, device, (64,), rounds=2)
    assert [(row["tokens"], row["who"]) for row in rows] == [
        ("1 x 64", "stock"),
        ("1 x 64", "ours"),
    ]
    assert [used.count(function) for function in set(used)] == [15, 15]  # 3 of an MLP, in 5 steps
    monkeypatch.setattr(nf4, "dequantize_nf4", lambda weight, state: -nf4.spec(weight, state))
    with pytest.raises(SystemExit, match="results differ"):
        training.measure_mlps(nf4, TINY, device, (64,), rounds=2)
