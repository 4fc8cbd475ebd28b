"""Protects whoever reads the record or adds to it: page, README, results/ and outputs agree."""

import json
import re
import shutil
from unittest.mock import DEFAULT, patch

import nbformat
import pytest
import record
import shared

PAGE = "nf4_triton.ipynb"
VERSIONS = {"torch": "2.11.0", "triton": "3.6.0", "bitsandbytes": "0.50.2"}
VERSIONS |= {"unsloth": "2026.10.9", "peft": "0.21.0"}
COMPARED = [{"case": "a", "path": path, "weights": 9, "differing": 0} for path in ("one", "two")]
COMPARED += [{"case": "odd", "path": "bitsandbytes", "weights": 5, "differing": 0}]
DATA = {  # {tool: what it measured}
    "training": [{"state": "bf16", "tokens": "1 x 256", "stock_ms": 3.0, "ours_ms": 2.0}],
    "rehearsal": {
        "kernels": 50,
        "compared": COMPARED,
        "pipes": [{"instructions per weight": "ALU", "threads a cycle": 64, "ours, fp16": 5.188}],
    },
    "tests": {"GPUs": 2, "passed": 300, "failed": 1, "skipped": 9},
}


def made_up_run(gpu="NVIDIA H200", unsloth=1.5, **others):
    """Return what the notebook's last cell writes of a run with these speedups over Unsloth."""
    row = {"over": "Unsloth", "fp16": unsloth, "bf16": unsloth, "mix": unsloth}
    run = {"gpu": gpu, "host": "a host", "date": "2026-01-02", "versions": VERSIONS, "seconds": 9}
    run |= {"kernels": [], "official": [], "compared": COMPARED}
    run["race"] = [{"contender": "Unsloth", "dtype": each} for each in ("fp16", "bf16", "mix")]
    run["official_speedups"] = [row | {"mix": unsloth + 1}]
    run["race_speedups"] = [row, row | {"over": "PEFT", "mix": 3.0}]
    run["estimate"] = [] if gpu == "Tesla T4" else [{"over Unsloth": 1.04}, {"over Unsloth": 1.22}]
    return run | others


@pytest.fixture
def project(repository, monkeypatch):
    """Return the folder of a copy of the project, in which nothing was measured yet."""
    shutil.rmtree(repository / "results")
    monkeypatch.setattr(shared, "ROOT", repository)
    monkeypatch.setattr(shared, "NOTEBOOK", repository / PAGE)
    notebook = nbformat.read(shared.NOTEBOOK, as_version=4)
    for cell in shared.code_cells(notebook):
        cell.execution_count, cell.outputs = None, []
    shared.write(shared.NOTEBOOK, nbformat.writes(notebook) + "\n")
    record.main([])
    return repository


def write_run(folder, run):
    """Write what README's commands leave of this run, and return the folder."""
    notebook = nbformat.read(shared.NOTEBOOK, as_version=4)
    name, text = f"{run['gpu']}.json".replace(" ", "-"), json.dumps(run, indent=1) + "\n"
    said = {
        0: "\rrounds: 100%|####| 50/50",
        4: "\rrounds: 100%|####| 9/9\r      \rleft out: PEFT\n",
        5: "FMA instructions 0",
        -1: f"written: results/runs/{name}, sha256 {record.digest(text)}",
    }
    cells = shared.code_cells(notebook)
    for i, cell in enumerate(cells, 1):
        cell.execution_count, cell.outputs = i, []
    for i, printed in said.items():
        cells[i].outputs = [nbformat.v4.new_output("stream", text=printed)]
    shared.write(folder / "nf4_triton.ipynb", nbformat.writes(notebook))
    shared.write(folder / "results" / "runs" / name, text)
    shared.write(folder / "results" / "runs" / "an-earlier-run.json", "{}")  # README's lines twice
    return folder


def take_all(tmp_path, *runs):
    for i, run in enumerate(runs or [made_up_run()]):
        record.main([str(write_run(tmp_path / f"run{i}", run))])
    for kind in DATA:
        made = shared.measurement(kind, DATA[kind], "NVIDIA H200")
        shared.write(tmp_path / f"{kind}.json", made)
        record.main([str(tmp_path / f"{kind}.json")])


def readme():
    return re.sub(" +", " ", (shared.ROOT / "README.md").read_text(encoding="utf-8"))


def found_by_check(*fresh):
    """Return what `tools/record.py check` says of what does not agree; it fails then."""
    try:
        record.main(["check", *fresh])
    except SystemExit as ended:
        assert ended.code, "what does not agree must end the program with a status"
        return str(ended.code)
    return ""


def test_this_repository_agrees_with_its_record():
    assert found_by_check() == ""


def test_what_was_taken_in_is_shown_and_agrees(tmp_path, project, capsys):
    take_all(tmp_path, made_up_run("NVIDIA H100", 2.0), made_up_run())
    assert found_by_check("--fresh") == ""
    assert capsys.readouterr().out.endswith("agree\n")
    for words in (
        "| today's Unsloth (2026.10.9), by `test_dequantize` | 1.50 | 1.50 | 2.50 | 2.50 to 3.00 |",
        "| today's Unsloth (2026.10.9) | 1.50 | 1.50 | 1.50 | 1.50 to 2.00 | 1.04 to 1.22 |",
        "mix, all 2 recorded runs | mix on a T4, estimated |",
        "with the GPU NVIDIA H200 and the host a host (torch 2.11.0, Triton 3.6.0, bitsandbytes",
        "Other recorded runs: 1, made on NVIDIA H100 with a host.",
        "| bf16 | 1 x 256 | 3.00 | 2.00 | 1.50 |",
        "| 2 | 300 | 1 | 9 |",
    ):
        assert words in readme()
    page = re.sub(" +", " ", shared.NOTEBOOK.read_text(encoding="utf-8"))
    assert "| ALU | 64 | 5.188 |" in page and "| 50 | 9 | 0 |" in page
    cells = shared.code_cells()
    assert cells[0].outputs == [], "progress bars go"
    assert [cells[i].outputs[0].text for i in (4, 5)] == ["left out: PEFT\n", "FMA instructions 0"]


@pytest.mark.parametrize("gpu, is_t4", [("Tesla T4", True), ("NVIDIA T400 4GB", False)])
def test_a_run_on_a_tesla_t4_and_no_other_counts_as_one(tmp_path, project, gpu, is_t4):
    take_all(tmp_path, made_up_run(gpu))
    assert ("mix, on a Tesla T4" in readme()) == is_t4
    assert ("on a T4, estimated" in readme()) != is_t4


def test_a_run_is_found_by_what_the_last_cell_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = shared.code_cells()[-1].source
    names = {"GPU": True, "gpu": "NVIDIA H200", "BEGAN": 0.0, "RECORD": made_up_run()}
    exec(f"import hashlib, json, re, time\nfrom pathlib import Path\n{source}", names)
    name, sha256 = record.shown_run({"outputs": capsys.readouterr().out})
    assert record.digest((tmp_path / "results" / "runs" / name).read_text()) == sha256


# What was changed by hand. A change is a function of a folder.


def edit(pattern, before, after):
    def change(folder):
        [path] = folder.glob(pattern)
        text = path.read_text(encoding="utf-8")
        assert before in text
        path.write_text(text.replace(before, after, 1), encoding="utf-8")

    return change


def delete(pattern):
    def change(folder):
        for path in folder.glob(pattern):
            path.unlink()

    return change


def let_a_cell_fail(folder):
    notebook = nbformat.read(folder / PAGE, as_version=4)
    error = nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])
    shared.code_cells(notebook)[3].outputs = [error]
    shared.write(folder / PAGE, nbformat.writes(notebook) + "\n")


RUN = "results/runs/NVIDIA-H200.json"
WRONG_BITS = '"path": "two",\n    "weights": 9,\n    "differing": 7'
RIGHT_BITS = WRONG_BITS.replace("7", "0")
COUNT = '"execution_count": 6'
TAMPERED = {  # {what was changed: (how, words of what check says)}
    "wrong bits in a rehearsal": (
        edit("results/rehearsal.json", RIGHT_BITS, WRONG_BITS), "bits of 7 weights"
    ),
    "a speedup in a run": (edit(RUN, '"mix": 1.5', '"mix": 9.67'), "not as it was taken in"),
    "a speedup in another run": (
        edit("results/runs/NVIDIA-H100.json", '"mix": 2.0', '"mix": 9.9'), "not as it was taken"
    ),
    "a time in the training": (
        edit("results/training.json", '"ours_ms": 2.0', '"ours_ms": 1.0'), "not as it was taken in"
    ),
    "no table in a rehearsal": (
        edit("results/rehearsal.json", '"pipes"', '"pipe"'), "it lacks pipes"
    ),
    "a rehearsal without kernels": (
        edit("results/rehearsal.json", '"kernels": 50', '"kernels": 0'), "compiled no kernel"
    ),
    "a run's hash": (edit(RUN, '"code": ', '"codes": '), "not as it was taken in"),
    "a run that is gone": (delete(RUN), "lacks the run"),
    "a figure in README": (edit("README.md", "1.50", "9.67"), "README.md does not show"),
    "a figure on the page": (edit(PAGE, "1.04 to 1.22", "1.20 to 1.22"), "does not show"),
    "marks that are gone": (edit("README.md", "<!-- speedups:end -->", ""), "speedups:start"),
    "an output": (edit(PAGE, "FMA instructions 0", "FMA instructions 9"), "not those that"),
    "a cell that ran again": (edit(PAGE, COUNT, '"execution_count": 99'), "not run once"),
    "a cell that failed": (let_a_cell_fail, "cell failed"),
    "test files that are deleted": (delete("tests/test_*.py"), "README.md does not show"),
}  # fmt: skip


@pytest.mark.parametrize("what", TAMPERED)
def test_check_sees_what_does_not_agree(tmp_path, project, what):
    take_all(tmp_path, made_up_run("NVIDIA H100", 2.0), made_up_run())
    assert found_by_check() == ""
    change, words = TAMPERED[what]
    change(project)
    assert words in found_by_check()


RACE = edit(PAGE, "loops=100", "loops=99")
EDITED_CODE = {  # {what is edited: (how, the kinds whose code it is)}
    "a comment": (edit(PAGE, "# 4. The output.", "# 4. Output."), set()),
    "a docstring": (edit(PAGE, "Dequantize NF4 to", "Decode NF4 to"), set()),
    "spaces in a title": (edit(PAGE, "# @title Kernel", "# @title  Kernel "), set()),
    "a plot": (edit(PAGE, "colors", "colours"), {"tests"}),
    "the set-up": (edit(PAGE, "installing", "getting"), set()),
    "the call": (
        edit(PAGE, "plans = PLANS.get(kind, ())", "plans = PLANS.get(kind, [])"),
        {"run", "training", "rehearsal", "tests"},
    ),
    "the race": (RACE, {"run", "rehearsal", "tests"}),
    "a cell that runs": (edit(PAGE, "NAME) if GPU", "NAME) if not GPU"), {"run", "rehearsal"}),
    "the training": (edit("tools/training.py", "rounds=60", "rounds=6"), {"training", "tests"}),
    "the rehearsal": (edit("tools/t4.py", "minor = 7, 5", "minor = 7, 6"), {"rehearsal", "tests"}),
    "the integrations": (
        edit("nf4_integrations.py", "is_open = False", "is_open = 0"), {"training", "tests"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", EDITED_CODE)
def test_after_an_edit_the_figures_stay_and_say_so(tmp_path, project, what):
    take_all(tmp_path)
    change, kinds = EDITED_CODE[what]
    change(project)
    record.main([])
    assert found_by_check() == "", "green for a contributor without a GPU"
    stale = {line.partition(":")[0] for line in found_by_check("--fresh").splitlines()}
    assert stale == kinds
    # The tables of the rehearsal are on the page, and not in README.
    assert readme().count("Measured with earlier code") == len(kinds - {"rehearsal"})
    assert "| 1.50 | 1.50 | 2.50 |" in readme() and "| 3.00 | 2.00 | 1.50 |" in readme()


def test_other_runs_of_earlier_code_are_counted(tmp_path, project):
    take_all(tmp_path, made_up_run("NVIDIA H100", 2.0))
    RACE(project)
    take_all(tmp_path / "again", made_up_run())
    assert "Other recorded runs: 1, of which 1 with earlier code, made on" in readme()
    assert "Measured with earlier code" not in readme()


# What must not be taken in.

RECORDED = "results/runs/N*.json"
REFUSED_RUNS = {  # {what is wrong with a run: (what makes it so, the words of the sentence)}
    "another notebook's code": (edit(PAGE, "import subprocess", "import os"), "other code"),
    "a cell was not run": (edit(PAGE, COUNT, '"execution_count": null'), "not run"),
    "a cell ran again": (edit(PAGE, COUNT, '"execution_count": 99'), "not run once"),
    "a cell failed": (let_a_cell_fail, "cell failed"),
    "a field that only the record adds": (
        edit(RECORDED, "{", '{ "code": "01",'), "not the one that the notebook's last"
    ),
    "another run's times": (
        edit(RECORDED, '"seconds": 9', '"seconds": 1'), "not the one that the notebook's outputs"
    ),
    "a run without a GPU": (edit(PAGE, ".json, sha256 ", ""), "ran without a GPU, or not to its"),
    "a truncated record": (edit(RECORDED, "{", ""), "cannot be read"),
    "no record": (delete(RECORDED), "it lacks the run .*NVIDIA-H200.json"),
    "a truncated notebook": (edit(PAGE, "{", ""), "cannot be read"),
    "no notebook": (delete(PAGE), "it has no nf4_triton.ipynb"),
}  # fmt: skip
ONE_WRONG_BIT = [{"case": "a", "path": "one", "weights": 9, "differing": 1}]
REFUSED_DATA = {  # {what is wrong in a run: (its fields, the words of the sentence)}
    "wrong bits": ({"compared": ONE_WRONG_BIT}, "bits of 1 weights differ"),
    "no bits": ({"compared": []}, "compared no bits"),
    "no Unsloth": ({"race": [{"contender": "ours", "dtype": "mix"}]}, "Unsloth is not in its race"),
    "the mix alone": ({"race": [{"contender": "Unsloth", "dtype": "mix"}]}, "Unsloth is not in"),
}


@pytest.mark.parametrize("wrong", [*REFUSED_RUNS, *REFUSED_DATA])
def test_a_run_with_a_fault_is_refused_and_changes_nothing(tmp_path, project, wrong):
    fields, words = REFUSED_DATA.get(wrong, ({}, ""))
    folder = write_run(tmp_path / "run", made_up_run(**fields))
    if wrong in REFUSED_RUNS:
        change, words = REFUSED_RUNS[wrong]
        change(folder)
    before = {path: path.read_bytes() for path in project.rglob("*.*") if path.is_file()}
    with pytest.raises(SystemExit, match=words):
        record.main([str(folder)])
    assert {path: path.read_bytes() for path in project.rglob("*.*") if path.is_file()} == before


REFUSED_FILES = {  # {what is wrong: (fields that are others, the words)}
    "of other code": ({"code": "other"}, "other code.*\n.*tools/training.py"),
    "of an unknown kind": ({"kind": "estimate"}, "got the kind 'estimate'"),
    "a run without its notebook": ({"kind": "run"}, "got the kind 'run'"),
    "without a GPU": ({"gpu": None}, "without a GPU"),
    "without a row": ({"data": []}, "it lacks data"),
    "with a hash of its own": ({"sha256": "01"}, "not the file that the tool wrote"),
}


@pytest.mark.parametrize("wrong", REFUSED_FILES)
def test_a_tools_file_with_a_fault_is_refused(tmp_path, project, wrong):
    fields, words = REFUSED_FILES[wrong]
    made = shared.measurement("training", DATA["training"], "NVIDIA H200")
    shared.write(tmp_path / "file.json", made | fields)
    with pytest.raises(SystemExit, match=words):
        record.main([str(tmp_path / "file.json")])
    assert not (project / "results").exists()


@pytest.mark.parametrize("n_written", [1, 2], ids=["the notebook", "and README"])
def test_what_is_interrupted_leaves_results_as_they_were(tmp_path, project, n_written):
    folder = write_run(tmp_path / "run", made_up_run())
    outcomes = [DEFAULT] * n_written + [KeyboardInterrupt]
    with patch("shared.write", wraps=shared.write, side_effect=outcomes):
        with pytest.raises(KeyboardInterrupt):
            record.main([str(folder)])
    assert not (project / "results").exists()
    with pytest.raises(SystemExit, match="lacks the run of the outputs"):
        record.main([])  # would write that nothing was measured
    record.main([str(folder)])
    assert "| 1.50 | 1.50 | 2.50 |" in readme()
