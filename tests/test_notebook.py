"""Protects the reader: the notebook runs, is light, says what was measured; README's lines work."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from unittest import mock

import helpers
import nbformat
import pytest
import record

ROOT = helpers.ROOT
BLOCK = re.compile(r"<!-- (\w+):start -->.*?<!-- \1:end -->", re.S)
EXPORT = re.compile(r"(# @title .*\n)?#\| export\n")


def sources(kind):
    return [cell.source for cell in helpers.cells() if cell.cell_type == kind]


def source_of(name):
    (source,) = [cell.source for cell in helpers.cells() if cell.id == name]
    return source


# How light it is.

LIMITS = {  # name: at most
    "cells": 42,
    "folded code cells": 12,
    "lines of code": 1100,
    "lines exported": 450,
    "lines of the longest exported function": 60,
    "lines of plan and call": 140,
    "words, tables aside": 1500,
    "columns": 100,
    "lines in tests": 2800,
    "lines of the longest test file": 450,
    "lines in tools": 1100,
    "lines of the longest tool": 250,
    "lines of README": 80,
}


def n_lines(text):
    return len(text.splitlines())


def weights():
    code = sources("code")
    exported = [source for source in code if EXPORT.match(source)]
    functions = []
    for source in exported:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                functions.append(node.end_lineno - node.lineno + 1)
    prose = re.sub(r"<!--.*?-->|^\|.*$", "", "\n".join(sources("markdown")), flags=re.S | re.M)
    folded = [c for c in helpers.cells() if c.metadata.get("jupyter", {}).get("source_hidden")]
    tests = [n_lines(path.read_text()) for path in (ROOT / "tests").glob("*.py")]
    tools = [n_lines(path.read_text()) for path in (ROOT / "tools").glob("*.py")]
    return {
        "cells": len(helpers.cells()),
        "folded code cells": len(folded),
        "lines of code": sum(map(n_lines, code)),
        "lines exported": sum(map(n_lines, exported)),
        "lines of the longest exported function": max(functions),
        "lines of plan and call": n_lines(source_of("plan")) + n_lines(source_of("call")),
        "words, tables aside": len(prose.split()),
        "columns": max(len(line) for source in code for line in source.splitlines()),
        "lines in tests": sum(tests),
        "lines of the longest test file": max(tests),
        "lines in tools": sum(tools),
        "lines of the longest tool": max(tools),
        "lines of README": n_lines((ROOT / "README.md").read_text()),
    }


def test_it_stays_as_light_as_it_was_promised():
    over = [f"{name}: {n} of {LIMITS[name]}" for name, n in weights().items() if n > LIMITS[name]]
    assert not over, "\n".join(over)


def test_plan_and_call_are_in_sight():
    for name in ("kernel", "lookup", "operator", "plan", "call", "harness"):
        assert not source_of(name).startswith("# @title"), f"{name} is folded"


# It runs, and its outputs are its own.


def executed(tmp_path, **environment):
    command = [sys.executable, "-m", "papermill", "--cwd", str(tmp_path), "-k", "python3"]
    command += [str(helpers.NOTEBOOK), str(tmp_path / "run.ipynb")]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return nbformat.read(tmp_path / "run.ipynb", as_version=4)


@pytest.mark.longest
@pytest.mark.skipif(helpers.torch.cuda.is_available(), reason="on a GPU the record's run shows it")
def test_it_runs_on_a_cpu_from_top_to_bottom(tmp_path):
    notebook = executed(tmp_path)
    outputs = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert "'differing': 0}" in outputs and "no speed claimed" in outputs
    assert "Warning" not in outputs and not list(tmp_path.glob("results/*"))


def test_the_outputs_shown_are_of_this_code_and_none_is_an_error():
    notebook = nbformat.read(helpers.NOTEBOOK, as_version=4)
    assert notebook.metadata["code"] == record.code_hash(notebook)
    for cell in record.code_cells(notebook):
        assert cell.execution_count, f"{cell.id} was not run"
        assert not [output for output in cell.outputs if output.output_type == "error"], cell.id


# What is stated.


def test_every_figure_stands_in_a_block_that_says_what_is_recorded():
    found = record.blocks()
    assert {"record", "ladder", "variants", "t4"} == set(found)
    for text in [*sources("markdown"), (ROOT / "README.md").read_text()]:
        assert record.with_blocks(text, found) == text
        prose = BLOCK.sub("", text).replace("Python 3.10 to 3.13", "")
        assert not re.search(r"\b\d+\.\d\d\b|\d ?(µs|ms|GB/s)\b", prose), prose
    texts = "\n".join(sources("markdown"))
    assert {name for name in BLOCK.findall(texts)} == set(found)


def test_the_record_has_the_form_that_others_read():
    shown = record.shown_record()
    assert set(record.FIELDS) == set(shown)
    rows = {
        "kernels": "shape format dtype ours_us unsloth_us copy_us",
        "calls": "who kernels issue_us call_us",
        "official": "dtype who seconds",
        "race": "dtype who ratio low high us",
        "compile": "function options dtype graphs graph_breaks recompiles bit_equal compiled",
        "score": "criterion points possible evidence",
    }
    for name, fields in rows.items():
        for row in shown[name]:
            assert set(row) == set(fields.split()), name
    assert shown["exact"]["checked"] > 200_000_000 and shown["exact"]["differing"] == 0
    names = {path.name for path in (ROOT / "results").iterdir()}
    gpu = record.slug(shown["gpu"])
    data = "runs sm_75 ladder t4 tests training".split()
    expected = {f"{name}.json" for name in [gpu, *data]}
    expected |= {"warp.png", f"{gpu}-calls.png", f"{gpu}-race.png"}
    assert names == expected


# Taking a run in.


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A folder with a run as it was taken in, and a copy of the project to take it into."""
    shown = record.shown_record()
    project, folder = tmp_path / "project", tmp_path / "run"
    for place in (project, folder):
        (place / "results").mkdir(parents=True)
        (place / "nf4_triton.ipynb").write_bytes(helpers.NOTEBOOK.read_bytes())
    (project / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    for path in (ROOT / "results").glob(f"{record.slug(shown['gpu'])}*"):
        (folder / "results" / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(record, "ROOT", project)
    monkeypatch.setattr(record, "RESULTS", project / "results")
    return folder


def test_a_run_is_taken_in_whole(run):
    """In the place of another GPU's: of that its line stays."""
    before = {"gpu": "Tesla T4", "ratios": {"unsloth": {"mix": 1.2}}}
    (record.RESULTS / "runs.json").write_text(json.dumps([before]))
    for name in ("tesla-t4.json", "tesla-t4-race.png"):
        (record.RESULTS / name).write_text("")
    record.take(run)
    record.write_blocks()
    shown = record.shown_record()
    assert [each["gpu"] for each in record.stored("runs")] == ["Tesla T4", shown["gpu"]]
    names = {path.name for path in (run / "results").iterdir()}
    assert {path.name for path in record.RESULTS.iterdir()} == {*names, "runs.json"}
    assert f" {shown['race'][2]['ratio']:.2f} |" in (record.ROOT / "README.md").read_text()


def edit_record(run, **fields):
    (path,) = (run / "results").glob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_notebook(run, **fields):
    notebook = nbformat.read(run / "nf4_triton.ipynb", as_version=4)
    cell = record.code_cells(notebook)[3]
    for name, value in fields.items():
        setattr(cell, name, value)
    nbformat.write(notebook, run / "nf4_triton.ipynb")


ERROR = nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])
REFUSED = {  # what is wrong with a run: (how, the words that are said)
    "another notebook's": (lambda run: edit_notebook(run, source="x = 1"), "code differs"),
    "a cell that was not run": (lambda run: edit_notebook(run, execution_count=None), "not run"),
    "a cell that failed": (lambda run: edit_notebook(run, outputs=[ERROR]), "failed"),
    "wrong bits": (lambda run: edit_record(run, exact={"checked": 9, "differing": 1}), "differ"),
    "no race": (lambda run: edit_record(run, race=[]), "lacks race"),
    "no picture": (lambda run: next(run.glob("results/*race.png")).unlink(), "no picture"),
    "no record": (lambda run: next(run.glob("results/*.json")).unlink(), "expected"),
    "half a record": (
        lambda run: next(run.glob("results/*.json")).write_text('{"gpu'),
        "cannot be read",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_with_a_fault_changes_nothing(run, name):
    spoil, words = REFUSED[name]
    spoil(run)
    with pytest.raises(SystemExit, match=words):
        record.take(run)
    assert not list(record.RESULTS.iterdir())


# How it is installed, run, tested and used.


def test_requirements_are_those_of_the_install_cell():
    listed = re.search(r'REQUIREMENTS = """(.*?)"""', source_of("install"), re.S)[1].split()
    assert (ROOT / "requirements.txt").read_text().split() == listed


FAILED = subprocess.CompletedProcess([], 1, stderr="no matching distribution")
INSTALLS = {  # what is installed: (versions, has a GPU, what pip is asked for; None if not asked)
    "nothing is missing": ({}, False, None),
    "bitsandbytes on Colab": (
        {"bitsandbytes": None, "unsloth": None, "torch": "2.11.0+cu128"},
        True,
        ["bitsandbytes>=0.50", "unsloth", "torch==2.11.0+cu128"],
    ),
    "torch without a GPU": ({"torch": None}, False, ["torch>=2.9", "torch==2.13.0"]),
    "NGC's torch": ({"torch": "2.9.0a0+nv25.9", "unsloth": "2026.10.9"}, True, None),
    "too old a torch": ({"torch": "2.8.0"}, False, ["torch>=2.9", "torch==2.8.0"]),
}


@pytest.mark.parametrize("name", INSTALLS)
def test_pip_gets_what_is_missing_and_moves_nothing_else(name):
    versions, has_gpu, asked = INSTALLS[name]
    real = importlib.metadata.version

    def version(package):
        found = versions[package] if package in versions else real(package)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    with (
        mock.patch("importlib.metadata.version", version),
        mock.patch("shutil.which", lambda _: "/usr/bin/nvidia-smi" if has_gpu else None),
        mock.patch("subprocess.run", return_value=FAILED) as pip,
    ):
        if asked is None:
            exec(source_of("install").split("\nimport torch\n")[0], {})
            assert not pip.called
        else:
            with pytest.raises(RuntimeError, match="pip failed .no network"):
                exec(source_of("install"), {})
            assert set(asked) <= set(pip.call_args[0][0])


def readme_command(mark):
    """The shell line that follows <!-- mark --> in the README."""
    text = (ROOT / "README.md").read_text()
    return re.search(rf"<!-- {mark} -->\n```bash\n(.*?)\n```", text, re.S)[1]


def test_ci_runs_the_readmes_test_command():
    done = subprocess.run(["bash", ".ci/run", "--print"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == readme_command("test")


USE = """
import sys
sys.modules.update(dict.fromkeys(("pandas", "peft", "IPython", "matplotlib", "tqdm")))  # not there
import nf4_triton, torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
weight, state = quantize_4bit(torch.randn(64, 64).half(), quant_type="nf4")
assert torch.equal(nf4_triton.dequantize_nf4(weight, state), dequantize_4bit(weight, state))
print(nf4_triton.your_dequantize_nf4.__doc__)
"""


def test_the_readmes_line_makes_a_module_that_needs_torch_triton_and_bitsandbytes_alone(tmp_path):
    line = re.search(r'python -c "(.*?)"', readme_command("export"))[1]
    line = line.replace("'nf4_triton.ipynb', '.'", f"{str(helpers.NOTEBOOK)!r}, {str(tmp_path)!r}")
    subprocess.run([sys.executable, "-c", line], cwd=tmp_path, check=True, capture_output=True)
    used = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, capture_output=True, text=True)
    assert "The dequantized weight" in used.stdout, used.stderr
