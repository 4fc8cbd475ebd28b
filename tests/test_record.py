"""Protects whoever takes a run in, or runs a tool: right figures, or a sentence; none half done."""

import json
import math
import os
import shutil

import nbformat
import pytest
import record
import shared
import t4
import torch
import training

ROOT = shared.ROOT
ROWS = {  # of the record: the fields of each
    "kernels": {"shape", "dtype", "ours_us", "unsloth_us", "copy_us"},
    "official": {"dtype", "who", "seconds"},
    "race": {"dtype", "who", "ratio", "us"},
    "call": {"rung", "us", "issue_us"},
    "compile": {"dtype", "bit_equal", "compiled"},
}


def notebook_of(folder):
    return nbformat.read(folder / "nf4_triton.ipynb", as_version=4)


def readme_of(folder):
    return (folder / "README.md").read_text(encoding="utf-8")


def test_what_notebook_and_readme_state_is_what_is_recorded():
    found = record.generated()
    cells = [cell.source for cell in notebook_of(ROOT).cells if cell.cell_type == "markdown"]
    texts = {"\n".join(cells): {"record", "t4"}, readme_of(ROOT): {"record", "training"}}
    for text, names in texts.items():
        assert {name for name in found if f"<!-- {name}:start -->" in text} == names
        assert record.with_blocks(text, found) == text, "run .venv/bin/python tools/record.py"
    assert set(found) == {"record", "t4", "training"}


def test_the_record_is_whole_and_of_the_outputs_that_are_shown():
    shown = shared.shown_record()
    assert set(record.FIELDS) == set(shown)
    for name, fields in ROWS.items():
        assert all(set(row) == fields for row in shown[name]), name
    # By kernel[grid], by the operator and by a plan: two of them would be 600 million.
    assert shown["exact"]["checked"] > 800_000_000 and shown["exact"]["differing"] == 0
    gpu = shared.slug(shown["gpu"])
    expected = {f"{gpu}.json", f"{gpu}-call.png", "warp.png"}
    expected |= {f"{name}.json" for name in ("runs", "sm_75", "t4", "tests", "training")}
    assert {path.name for path in (ROOT / "results").iterdir()} == expected
    outputs = json.dumps([cell.get("outputs") for cell in notebook_of(ROOT).cells])
    assert "{gpu}, {date}; host: {cpu}, {cores} cores".format(**shown) in outputs


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the README and the notebook, as if it had just run; without results."""
    monkeypatch.setattr(shared, "ROOT", tmp_path / "project")
    monkeypatch.setattr(shared, "RESULTS", tmp_path / "project" / "results")
    shared.RESULTS.mkdir(parents=True)
    shutil.copy(ROOT / "README.md", shared.ROOT)
    notebook = notebook_of(ROOT)
    notebook.metadata["code"] = shared.code_hash(notebook)
    nbformat.write(notebook, shared.ROOT / "nf4_triton.ipynb")
    return shared.ROOT


@pytest.fixture
def run(tmp_path, project):
    """A folder with a run, to be taken into the project."""
    folder = tmp_path / "run"
    (folder / "results").mkdir(parents=True)
    for path in (ROOT / "results").glob("nvidia-*"):
        shutil.copy(path, folder / "results")
    notebook = notebook_of(project)
    for cell in shared.code_cells(notebook):
        cell.execution_count, cell.outputs = 1, []
    nbformat.write(notebook, folder / "nf4_triton.ipynb")
    return folder


def record_in(run):
    return next(run.glob("results/*.json"))


def edit_record(run, **fields):
    content = json.loads(record_in(run).read_text()) | fields
    record_in(run).write_text(json.dumps(content))


def edit_ratios(run, ratio):
    race = json.loads(record_in(run).read_text())["race"]
    edit_record(run, race=[row | {"ratio": ratio} for row in race])


def edit_notebook(run, **fields):
    notebook = notebook_of(run)
    shared.code_cells(notebook)[3].update(fields)
    nbformat.write(notebook, run / "nf4_triton.ipynb")


def add_a_cell(run):
    notebook = notebook_of(run)
    notebook.cells.insert(3, nbformat.v4.new_code_cell("# a comment", execution_count=1))
    nbformat.write(notebook, run / "nf4_triton.ipynb")


def test_a_run_is_taken_in_whole_and_once(run, project):
    """In the place of another GPU's: of that its line stays."""
    before = {"gpu": "Tesla T4", "ratios": {"unsloth": {"mix": 1.2}}}
    shared.write({shared.RESULTS / "runs.json": [before]})
    for name in ("tesla-t4.json", "tesla-t4-call.png"):
        (shared.RESULTS / name).write_text("")
    edit_ratios(run, 98.76)
    output = nbformat.v4.new_output("stream", text="as this run says: → 98.76")
    edit_notebook(run, outputs=[output])
    for _ in range(2):
        record.main([str(run)])
    gpus = [each["gpu"] for each in shared.stored("runs")]
    assert gpus == ["Tesla T4", shared.shown_record()["gpu"]]
    names = {path.name for path in (run / "results").iterdir()}
    assert {path.name for path in shared.RESULTS.iterdir()} == {*names, "runs.json"}
    notebook = notebook_of(project)
    assert shared.code_cells(notebook)[3].outputs == [output]
    for text in (nbformat.writes(notebook), readme_of(project)):
        assert " 98.76 |" in text and "range of 2 runs" not in text, "one is of another GPU"
    edit_ratios(run, 1.23)
    record.main([str(run)])
    readme = readme_of(project)
    assert "range of 2 runs" in readme and "1.23 to 98.76" in readme and "→" in readme


ERROR = nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])
REFUSED = {  # what is wrong with a run: (how, the words that are said)
    "a cell more": (add_a_cell, "code differs"),
    "another notebook's": (lambda run: edit_notebook(run, source="x = 1"), "code differs"),
    "a cell that was not run": (lambda run: edit_notebook(run, execution_count=None), "not run"),
    "a cell that failed": (lambda run: edit_notebook(run, outputs=[ERROR]), "failed"),
    "wrong bits": (lambda run: edit_record(run, exact={"checked": 9, "differing": 1}), "differ"),
    "no race": (lambda run: edit_record(run, race=[]), "lacks race"),
    "no name of the processor": (lambda run: edit_record(run, cpu=""), "lacks cpu: run the"),
    "no picture": (lambda run: next(run.glob("results/*call.png")).unlink(), "no picture"),
    "no record": (lambda run: record_in(run).unlink(), "expected"),
    "cut short": (lambda run: record_in(run).write_text("{"), "cannot be read"),
    "no git": (lambda run: os.environ.update(PATH=""), "git, .* is missing: install it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_with_a_fault_changes_nothing(run, monkeypatch, name):
    monkeypatch.setenv("PATH", os.environ["PATH"])  # which is put back
    spoil, words = REFUSED[name]
    spoil(run)
    with pytest.raises(SystemExit, match=words):
        record.take(run)
    assert not list(shared.RESULTS.iterdir())


def test_what_is_interrupted_leaves_what_was_there(tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.replace", lambda *given: pytest.fail("already"))
    files = {tmp_path / "a.json": [1], tmp_path / "b.json": object()}
    with pytest.raises(TypeError):
        shared.write(files)


def test_the_record_stays_valid_after_a_comment_and_says_what_to_run_after_code(project):
    notebook, path = notebook_of(project), project / "nf4_triton.ipynb"
    for cell in shared.code_cells(notebook):
        cell.source += "\n\n# a comment"
    nbformat.write(notebook, path)
    record.main(["check"])
    cell.source += "\nprint()"
    nbformat.write(notebook, path)
    with pytest.raises(SystemExit, match="code cells differ.*run the notebook.*record.py run"):
        record.main(["check"])


def test_an_estimate_of_another_run_is_noticed_until_a_t4s_own_run_takes_its_place(run, project):
    estimate = shared.stored("t4", ROOT / "results")
    estimate["record"]["host_us"]["ours"] += 1
    shared.write({shared.RESULTS / "t4.json": estimate})
    record.main([str(run)])
    with pytest.raises(SystemExit, match="another run: run tools/t4.py estimate"):
        record.check()
    edit_record(run, gpu="Tesla T4")
    name = record_in(run).stem
    for path in (run / "results").iterdir():
        path.rename(path.with_name(path.name.replace(name, "tesla-t4")))
    record.main([str(run)])
    record.main(["check"])
    readme = readme_of(project)
    assert "**Tesla T4, " in readme and "No time has been measured" not in readme


def record_of(**other):
    """A record whose mix has host times of 10, 30 and 50 us."""
    us = {"ours": 20 + 10, "unsloth": 4 * 2.515625 + 30, "three_launches": 4 * 2.765625 + 50}
    race = [{"dtype": "mix", "who": who, "us": [us[who]] * 3} for who in us]
    race.append({"dtype": "float16", "who": "ours", "us": [999] * 3})
    row = {"ours_us": 20, "unsloth_us": 4 * 2.515625}
    kernels = [row | {"shape": shape, "dtype": dtype} for shape, dtype in t4.MIX]
    return {"gpu": "H100", "date": "2026-11-26", "kernels": kernels, "race": race} | other


RUNS = {"runs": [{"gpu": "H100"}]}


def test_the_estimate_is_what_is_worked_out_by_hand(tmp_path):
    """79,691,776 weights 3000 times are 239.075 G, of 2.515625 bytes 601.424 GB: 2.505933 s.

    The three launches move 2.765625 bytes: 2.754970 s at 240 GB/s. Of 3.714 s, 0.959030 s are left
    for 9000 calls of 50 us, 0.450 s: the factor is 2.131178. Ours take 0.2 of that, 0.191806 s;
    today's Unsloth 0.6, 0.575418 s. A factor below 1, at 80 %, does not set the range shown.
    """
    results, run = tmp_path / "results", tmp_path / "run"
    shared.write({results / "runs.json": RUNS["runs"], results / "h100.json": record_of()})
    shared.write({run / "rehearsal.json": {"as": "T4"}})
    t4.estimate(results, run)
    found = shared.stored("t4", results)
    assert found["rehearsal"] == {"as": "T4"} and found["record"]["gpu"] == "H100"
    assert list(found["record"]["host_us"].values()) == pytest.approx([10, 30, 50])
    first, *others = found["estimate"]
    ours_s, unsloth_s = 2.505933 + 0.191806, 2.505933 + 0.575418
    wanted = {"published_s": 3.714, "share": 1.0, "factor": 2.131178, "ours_s": ours_s}
    wanted |= {"unsloth_s": unsloth_s, "over_unsloth": unsloth_s / ours_s}
    assert first == pytest.approx(wanted | {"over_three_launches": 3.714 / ours_s}, rel=1e-5)
    assert [row["share"] for row in others] == [0.9, 0.8, 1.0, 0.9, 0.8]
    run = record_of(cpu="x", cores=2, seconds=60, exact={"checked": 1, "differing": 0}, race=[])
    assert f"{others[-1]['over_unsloth']:.2f} to " in record.record_block(run, [], found, None)
    t4.estimate(results)  # once more: the rehearsal stays
    assert shared.stored("t4", results) == found


LACKING = {  # {what is wrong: (the files in results, what must be said)}
    "no record": ({}, "must show a run .*: run the notebook"),
    "an old record": (RUNS | {"h100": {"harness": []}}, "times of all three contenders"),
    "no race": (RUNS | {"h100": record_of(race=[])}, "times of all three contenders"),
    "no rehearsal": (RUNS | {"h100": record_of()}, "run tools/t4.py rehearse"),
}


@pytest.mark.parametrize("lacking", LACKING)
def test_no_estimate_without_what_it_needs(tmp_path, lacking):
    contents, words = LACKING[lacking]
    shared.write({tmp_path / f"{name}.json": content for name, content in contents.items()})
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit, match=words):
        t4.estimate(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_training_steps_of_other_results_are_not_written():
    steps = {who: lambda x=x: [torch.tensor(x)] for who, x in (("stock", 1.0), ("ours", math.nan))}
    with pytest.raises(SystemExit, match="results differ, or are not finite: nothing was written"):
        training.measured({"model": "a model"}, steps, rounds=1)
