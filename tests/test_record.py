"""Protects whoever reads the record or adds to it: page, README, results/ and outputs agree."""

import contextlib
import json
import math
import re
import shutil
import types
from unittest.mock import DEFAULT, patch

import conftest
import nbformat
import pytest
import record
import shared
import t4
import torch
import training

ROOT = shared.ROOT
VERSIONS = {"torch": "2.11.0", "triton": "3.6.0", "bitsandbytes": "0.50.2"}
VERSIONS |= {"unsloth": "2026.10.9", "peft": "0.21.0"}
COMPARED = [{"case": "a", "path": path, "weights": 9, "differing": 0} for path in ("one", "two")]
COMPARED += [{"case": "odd", "path": "bitsandbytes", "weights": 5, "differing": 0}]


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


def measured(kind, data, **others):
    made = {"kind": kind, "gpu": "NVIDIA H200", "host": "a host", "date": "2026-01-02"}
    return made | {"versions": VERSIONS, "code": shared.code_of(kind), "data": data} | others


TOOLS = {
    "training": [{"state": "bf16", "tokens": "1 x 256", "stock_ms": 3.0, "ours_ms": 2.0}],
    "rehearsal": {
        "kernels": 50,
        "compared": COMPARED,
        "pipes": [{"instructions per weight": "ALU", "threads a cycle": 64, "ours, fp16": 5.188}],
    },
    "tests": {"GPUs": 2, "passed": 300, "failed": 1, "skipped": 9},
}


@pytest.fixture
def project(clone, monkeypatch):
    """Return the folder of a copy of the project, without results."""
    shutil.rmtree(clone / "results")
    monkeypatch.setattr(shared, "ROOT", clone)
    monkeypatch.setattr(shared, "NOTEBOOK", clone / "nf4_triton.ipynb")
    return clone


def write_run(folder, run):
    """Write what README's commands leave of this run, and return the folder."""
    notebook = nbformat.read(shared.NOTEBOOK, as_version=4)
    name, text = f"{run['gpu']}.json".replace(" ", "-"), json.dumps(run, indent=1) + "\n"
    for i, cell in enumerate(shared.code_cells(notebook), 1):
        cell.execution_count, cell.outputs = i, []
    said = f"written: results/runs/{name}, sha256 {record.digest(text)}"
    cells = shared.code_cells(notebook)
    cells[0].outputs = [nbformat.v4.new_output("stream", text="\rrounds: 100%|####| 50/50")]
    after_a_bar = "\rrounds: 100%|####| 9/9\r      \rleft out: PEFT\n"
    cells[4].outputs = [nbformat.v4.new_output("stream", text=after_a_bar)]
    cells[5].outputs = [nbformat.v4.new_output("stream", text="FMA instructions 0")]
    cells[-1].outputs = [nbformat.v4.new_output("stream", text=said)]
    shared.write(folder / "nf4_triton.ipynb", nbformat.writes(notebook))
    shared.write(folder / "results" / "runs" / name, text)
    shared.write(folder / "results" / "runs" / "an-earlier-run.json", "{}")  # README's lines twice
    return folder


def take_all(tmp_path, *runs):
    for i, run in enumerate(runs or [made_up_run()]):
        record.main([str(write_run(tmp_path / f"run{i}", run))])
    for kind, data in TOOLS.items():
        shared.write(tmp_path / f"{kind}.json", measured(kind, data))
        record.main([str(tmp_path / f"{kind}.json")])


def readme():
    return re.sub(" +", " ", (shared.ROOT / "README.md").read_text(encoding="utf-8"))


def found_by_check(*fresh):
    notebook = nbformat.read(shared.NOTEBOOK, as_version=4)
    found = list(
        record.disagreements(notebook, (shared.ROOT / "README.md").read_text(encoding="utf-8"))
    )
    return found + list(record.stale(record.record_of(notebook))) if fresh else found


def test_this_repository_agrees_with_its_record():
    assert found_by_check() == []


def test_what_was_taken_in_is_shown_and_agrees(tmp_path, project, capsys):
    take_all(tmp_path, made_up_run("NVIDIA H100", 2.0), made_up_run())
    record.main(["check", "--fresh"])
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


# What check must see.


def edit_cell(edit):
    def change(project):
        notebook = nbformat.read(shared.NOTEBOOK, as_version=4)
        edit(shared.code_cells(notebook))
        shared.write(shared.NOTEBOOK, nbformat.writes(notebook) + "\n")

    return change


def replace(file, before, after):
    def change(project):
        path = project / file
        text = path.read_text(encoding="utf-8")
        assert before in text
        path.write_text(text.replace(before, after), encoding="utf-8")

    return change


def delete_tests(project):
    for path in (project / "tests").glob("test_*.py"):
        path.unlink()


def fail(cells):
    cells[3].outputs = [nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])]


WRONG_BITS = '"path": "two",\n    "weights": 9,\n    "differing": 7'
RIGHT_BITS = WRONG_BITS.replace("7", "0")
RUN = "results/runs/NVIDIA-H200.json"
TAMPERED = {  # {what was changed: (how, words of what check says)}
    "wrong bits in a rehearsal": (
        replace("results/rehearsal.json", RIGHT_BITS, WRONG_BITS), "bits of 7 weights"
    ),
    "a speedup in a run": (replace(RUN, '"mix": 1.5', '"mix": 9.67'), "not as it was taken in"),
    "a speedup in another run": (
        replace("results/runs/NVIDIA-H100.json", '"mix": 2.0', '"mix": 9.9'), "not as it was taken"
    ),
    "no table in a rehearsal": (
        replace("results/rehearsal.json", '"pipes"', '"pipe"'), "it lacks pipes"
    ),
    "a run's hash": (replace(RUN, '"code": ', '"codes": '), "not as it was taken in"),
    "a run that is gone": (lambda project: (project / RUN).unlink(), "lacks the run"),
    "a figure in README": (replace("README.md", "1.50", "9.67"), "README.md does not show"),
    "a figure on the page": (
        replace("nf4_triton.ipynb", "1.04 to 1.22", "1.20 to 1.22"), "the page does not show"
    ),
    "marks that are gone": (replace("README.md", "<!-- speedups:end -->", ""), "speedups:start"),
    "a mark that stands twice": (
        replace("README.md", "# nf4-triton", "<!-- tests:start -->"), "tests:start"
    ),
    "an output": (replace("nf4_triton.ipynb", "FMA instructions 0", "FMA instructions 9"), "those"),
    "a cell that ran again": (edit_cell(lambda c: c[5].update(execution_count=99)), "not run once"),
    "a cell that failed": (edit_cell(fail), "cell failed"),
    "tests that are gone": (delete_tests, "README.md does not show"),
}  # fmt: skip


@pytest.mark.parametrize("what", TAMPERED)
def test_check_sees_what_does_not_agree(tmp_path, project, what):
    take_all(tmp_path, made_up_run("NVIDIA H100", 2.0), made_up_run())
    assert found_by_check() == []
    change, words = TAMPERED[what]
    change(project)
    assert words in "\n".join(found_by_check())


# An edit: figures stay, and say that they are of earlier code.


def edit_source(cell_id, before, after):
    def edit(cells):
        [cell] = [cell for cell in cells if cell.id == cell_id]
        assert before in cell.source
        cell.source = cell.source.replace(before, after)

    return edit_cell(edit)


EDITS = {  # {what is edited: (how, the kinds whose code it is)}
    "a comment": (edit_source("kernel", "# 4. The output.", "# 4. Output."), set()),
    "a docstring": (edit_source("call", "Dequantize NF4", "Decode NF4"), set()),
    "a plot": (edit_source("plots", "colors", "colours"), {"tests"}),
    "the set-up": (edit_source("install", "installing", "getting"), set()),
    "the call": (
        edit_source("call", "plans = PLANS.get(kind, ())", "plans = PLANS.get(kind, [])"),
        {"run", "training", "rehearsal", "tests"},
    ),
    "the race": (edit_source("race", "loops=100", "loops=99"), {"run", "rehearsal", "tests"}),
    "a cell that runs": (edit_source("race-run", "if GPU", "if not GPU"), {"run", "rehearsal"}),
    "a tool that trains": (replace("tools/training.py", "rounds=60", "rounds=6"), {"training"}),
    "a tool": (replace("tools/t4.py", "minor = 7, 5", "minor = 7, 6"), {"rehearsal"}),
    "the integrations": (
        replace("nf4_integrations.py", "is_open = False", "is_open = 0"), {"training", "tests"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", EDITS)
def test_after_an_edit_the_figures_stay_and_say_so(tmp_path, project, what):
    take_all(tmp_path)
    edit, kinds = EDITS[what]
    edit(project)
    record.main([])
    assert found_by_check() == [], "green for a contributor without a GPU"
    stale = {line.partition(":")[0] for line in found_by_check("--fresh")}
    assert stale == kinds
    assert readme().count("Measured with earlier code") == len(kinds - {"rehearsal"})
    assert "| 1.50 | 1.50 | 2.50 |" in readme() and "| 3.00 | 2.00 | 1.50 |" in readme()


def test_other_runs_of_earlier_code_are_counted(tmp_path, project):
    take_all(tmp_path, made_up_run("NVIDIA H100", 2.0))
    edit_source("race", "loops=100", "loops=99")(project)
    take_all(tmp_path / "again", made_up_run())
    assert "Other recorded runs: 1, of which 1 with earlier code, made on" in readme()
    assert "Measured with earlier code" not in readme()


def test_a_hash_is_the_same_in_each_python():
    """Of the source's own text: Python 3.12 writes what it has parsed in another way than 3.11."""
    source = '"""A docstring."""\n\nx = f"{a[\'b\']!r}" + (1)  # a comment\n'
    assert shared.bare(source) == "x = f\"{a['b']!r}\" + (1)"


def test_a_space_more_after_a_title_loses_no_cell(project):
    before = shared.code_of("run")
    edit_source("times", "# @title Kernel times", "# @title  Kernel times ")(project)
    assert shared.code_of("run") == before and "def time_kernels" in shared.defining("time_kernels")


# What must not be taken in.


def edit_run(**fields):
    def edit(folder):
        [path] = (folder / "results" / "runs").glob("N*.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | fields, indent=1) + "\n")

    return edit


def edit_executed(edit):
    def change(folder):
        notebook = nbformat.read(folder / "nf4_triton.ipynb", as_version=4)
        edit(shared.code_cells(notebook))
        nbformat.write(notebook, folder / "nf4_triton.ipynb")

    return change


def spoil(pattern, text):
    """Return a function that writes this text to a file of a run; None deletes it."""

    def change(folder):
        [path] = folder.glob(pattern)
        path.unlink() if text is None else path.write_text(text)

    return change


WRONG = [{"case": "a", "path": "one", "weights": 9, "differing": 1}]
REFUSED = {  # {what is wrong with a run: (what makes it so, the words of the sentence)}
    "another notebook's code": (edit_executed(lambda c: c[3].update(source="x = 1")), "other code"),
    "a cell was not run": (edit_executed(lambda c: c[3].update(execution_count=None)), "not run"),
    "a cell ran again": (edit_executed(lambda c: c[3].update(execution_count=99)), "not run once"),
    "a cell failed": (edit_executed(fail), "cell failed"),
    "its own hash": (edit_run(code="0123"), "not the one that the notebook's last cell wrote"),
    "another run's times": (edit_run(seconds=1), "not the one that the notebook's outputs name"),
    "a truncated record": (spoil("results/runs/N*.json", '{"gpu": '), "cannot be read"),
    "no record": (spoil("results/runs/N*.json", None), "it lacks the run .*NVIDIA-H200.json"),
    "a truncated notebook": (spoil("nf4_triton.ipynb", "{"), "cannot be read"),
    "no notebook": (spoil("nf4_triton.ipynb", None), "it has no nf4_triton.ipynb"),
}
REFUSED_DATA = {  # {what is wrong in a run: (its fields, the words of the sentence)}
    "wrong bits": ({"compared": WRONG}, "bits of 1 weights differ"),
    "no bits": ({"compared": []}, "compared no bits"),
    "no Unsloth": ({"race": [{"contender": "ours", "dtype": "mix"}]}, "Unsloth is not in its race"),
    "the mix alone": ({"race": [{"contender": "Unsloth", "dtype": "mix"}]}, "Unsloth is not in"),
}


@pytest.mark.parametrize("wrong", [*REFUSED, *REFUSED_DATA])
def test_a_run_with_a_fault_is_refused_and_changes_nothing(tmp_path, project, wrong):
    fields, words = REFUSED_DATA.get(wrong, ({}, ""))
    folder = write_run(tmp_path / "run", made_up_run(**fields))
    if wrong in REFUSED:
        change, words = REFUSED[wrong]
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
}


@pytest.mark.parametrize("wrong", REFUSED_FILES)
def test_a_tools_file_with_a_fault_is_refused(tmp_path, project, wrong):
    fields, words = REFUSED_FILES[wrong]
    shared.write(tmp_path / "file.json", measured("training", TOOLS["training"]) | fields)
    with pytest.raises(SystemExit, match=words):
        record.main([str(tmp_path / "file.json")])
    assert not (project / "results").exists()


@pytest.mark.parametrize("n_written", [0, 1, 2], ids=["at once", "notebook", "and README"])
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


# The tools that measure.


@pytest.mark.parametrize("part", ["all", "a file is missing", "-k", "-x", "test_call.py::test"])
def test_a_tally_of_a_part_of_the_tests_is_refused(part):
    options = {"--tally": "tally.json", "maxfail": 1 if part == "-x" else 0}
    config = types.SimpleNamespace(getoption=options.get, args=[part])
    files = sorted(path for path in (ROOT / "tests").glob("test_*.py") if "faults" not in path.name)
    items = [types.SimpleNamespace(path=path, keywords=(), config=config) for path in files]
    if part == "-k":
        conftest.pytest_deselected(items[:1])
    session = types.SimpleNamespace(config=config, items=items[part == "a file is missing" :])
    is_refused = pytest.raises(pytest.UsageError, match="the tally must be of all tests")
    with contextlib.nullcontext() if part == "all" else is_refused:
        conftest.pytest_collection_finish(session)


def test_a_tally_counts_errors_as_failures():
    stats = {"passed": [1, 2], "failed": [3], "error": [4], "skipped": [5], "warnings": [6]}
    assert conftest.tally(stats) == {"passed": 2, "failed": 2, "skipped": 1}


@pytest.fixture
def training_step(nf4, monkeypatch):
    """What stands for a training step in two contexts: a clock that each part of it moves."""
    world = types.SimpleNamespace(now=0.0, is_inside=False, log=[], works=True, results=[1.0, 1.0])

    class Inside:
        def __enter__(self):
            world.is_inside, world.now = True, world.now + 100  # outside the clock

        def __exit__(self, *error):
            world.is_inside = False

    def step():
        world.log.append(world.is_inside)
        n = world.log.count(world.is_inside)
        world.now += (2 if world.is_inside else 3) + {0: 7, 1: -1}.get(n % 5, 0)
        if world.is_inside and world.works:
            nf4.dequantize_nf4(*small)
        return [torch.tensor(world.results[world.is_inside])]

    def wait():
        world.log.append("wait")
        world.now += 0.25

    small = nf4.quantized((8, 64), torch.float16, "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(training.time, "perf_counter", lambda: world.now)
    world.step, world.context = step, Inside
    return world


def test_training_steps_do_equal_work_and_are_waited_for(nf4, training_step):
    """A time is a median: a slow round and a fast one of five do not count."""
    row = training.measure(training_step.step, training_step.context, nf4, rounds=25)
    assert row == {"stock_ms": pytest.approx(3250), "ours_ms": pytest.approx(2250)}
    timed = training_step.log[training_step.log.index("wait") :]
    assert len(timed) == 25 * 2 * 3 and set(timed[::3]) == set(timed[2::3]) == {"wait"}
    rounds = [tuple(timed[i : i + 6 : 3]) for i in range(1, len(timed), 6)]
    assert set(rounds) == {(False, True), (True, False)}, "in a random order"


NOTHING = {  # {what shows nothing: (does ours run?, the results of stock and of ours)}
    "ours does not run": (False, [1.0, 1.0]),
    "NaNs": (True, [math.nan, math.nan]),
    "other losses": (True, [1.0, 1.0000001]),
}


@pytest.mark.parametrize("what", NOTHING)
def test_training_steps_that_show_nothing_are_not_recorded(nf4, training_step, what):
    training_step.works, training_step.results = NOTHING[what]
    with pytest.raises(SystemExit, match="nothing was written"):
        training.measure(training_step.step, training_step.context, nf4, rounds=1)
    assert "wait" not in training_step.log, "nothing was timed"


def test_the_clock_that_a_t4_needs_is_that_of_the_busiest_pipe():
    """Of the ALU's 32 instructions a weight, at 64 a cycle; conversions need 2 at 16 a cycle."""
    names = ["IADD3"] * 64 + ["F2F.F16.F32"] * 4 + ["SHFL.IDX"] * 2 + ["EXIT", "NO_SUCH.NAME"]
    *rows, clock = t4.table({"ours": t4.by_pipe(names, 2)})
    found = {row["instructions per weight"]: (row["threads a cycle"], row["ours"]) for row in rows}
    assert list(found.values()) == [(64, 32), (64, 0), (16, 2), (32, 1), ("", 0), ("", 1)]
    weights_per_s = 240e9 / (1 / 2 + 1 / 64 + 2) / 40  # for each multiprocessor
    assert clock["ours"] == round(weights_per_s * 32 / 64 / 1e6)
