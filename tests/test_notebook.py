"""Protects the reader: the notebook installs what it needs and runs, and README's commands work."""

import base64
import contextlib
import importlib.metadata
import itertools
import json
import re
import subprocess
import sys
import time
import types
from unittest import mock

import nbformat
import pandas as pd
import pytest
import record
import shared
import torch

ROOT = shared.ROOT
GPU = torch.cuda.is_available()
README = (ROOT / "README.md").read_text(encoding="utf-8")
STAND_INS = {  # {command: a shell script in its place}
    "python3": 'test "$*" = "-m venv .venv"',  # makes nothing: the environment is there
    "python": f'exec {sys.executable} "$@"',
    "pip": f'exec {sys.executable} -m pip "$@" --no-index',  # fails for a package that is not here
    "papermill": f'exec {sys.executable} -m papermill "$@"',
}


@pytest.fixture
def clone(clone, monkeypatch):
    """A copy of the repository, where README's commands find this test's own environment."""
    commands = clone / ".venv" / "bin"
    commands.mkdir(parents=True)
    for name, script in STAND_INS.items():
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    return clone


def run_readme(heading, clone):
    """Run the commands below one of README's headings; return the finished process."""
    commands = re.search(rf"^## {heading}$.*?^```bash\n(.*?)^```$", README, re.S | re.M)[1]
    how = {"cwd": clone, "capture_output": True, "text": True, "timeout": 600}
    return subprocess.run(["bash", "-euo", "pipefail", "-c", commands], **how)


@pytest.mark.longest
@pytest.mark.skipif(GPU, reason="on a GPU the record's run shows it")
def test_readmes_commands_run_the_notebook(clone):
    done = run_readme("Run it", clone)
    assert done.returncode == 0, done.stderr[-3000:]
    notebook = nbformat.read(clone / "run" / "nf4_triton.ipynb", as_version=4)
    outputs = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert "no speed is claimed" in outputs and "passes on small layers" in outputs
    assert "Warning" not in outputs and not (clone / "run" / "results").exists()


USE = """
import sys
others = "accelerate IPython matplotlib pandas peft tabulate tqdm transformers unsloth".split()
sys.modules.update(dict.fromkeys(others))  # as if these were not installed
import nf4_integrations, nf4_triton, torch
from bitsandbytes import functional
weight, state = functional.quantize_4bit(torch.randn(64, 64).half(), quant_type="nf4")
expected = functional.dequantize_4bit(weight, state)
assert torch.equal(nf4_triton.dequantize_nf4(weight, state), expected)
with nf4_integrations.in_bitsandbytes():
    assert torch.equal(functional.dequantize_4bit(weight, state), expected)
"""


def test_readmes_command_makes_a_module_with_few_needs(clone, monkeypatch):
    if GPU:
        pytest.importorskip("nbdev")  # a GPU machine may lack tests/requirements.txt
    else:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = run_readme("Use it", clone)
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-c", USE]
    used = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert used.returncode == 0, used.stderr


def test_colab_and_github_show_the_warps_picture():
    """Colab shows no attachments: a data URI, by reference. README's file is the same picture."""
    cells = nbformat.read(shared.NOTEBOOK, as_version=4).cells
    assert not any(cell.get("attachments") for cell in cells)
    (source,) = [cell.source for cell in cells if "data:image" in cell.source]
    name, picture = re.search(r"^\[(\w+)\]: data:image/png;base64,(\S+)$", source, re.M).groups()
    assert f"][{name}]" in source.split(f"[{name}]:")[0]
    assert base64.b64decode(picture) == (ROOT / "results" / "warp.png").read_bytes()
    assert "(results/warp.png)" in README


@pytest.mark.parametrize("name", ["differing", "median"], ids=["defined", "imported"])
def test_a_cell_that_takes_a_definitions_name_is_refused(monkeypatch, name):
    """In the notebook, all later calls would find something else there, and trials would fail."""
    cells = [*shared.marked_cells(), ("run", f"{name} = 0", 99)]
    monkeypatch.setattr(shared, "marked_cells", lambda: cells)
    with pytest.raises(ValueError, match=f"^code cell 99 takes the name of .*: {name}$"):
        shared.load("nf4_taken")


# Sentences on the page that compare, against the run whose outputs the page shows.


@pytest.fixture
def run():
    notebook = nbformat.read(shared.NOTEBOOK, as_version=4)
    found = record.record_of(notebook)["run"]
    if not found:
        pytest.skip("the notebook shows no recorded run")
    return found


def test_the_kernels_take_about_as_long_as_a_copy(run):
    """Section 6 and the first screen."""
    us = {(row["kernel"], row["shape"], row["dtype"]): row["us"] for row in run["kernels"]}
    for shape, dtype in itertools.product(("2048 x 8192", "4096 x 14336"), ("fp16", "bf16")):
        ours, unsloth, copy = (us[name, shape, dtype] for name in ("ours", "Unsloth", "copy"))
        assert 1 < ours / copy < 1.06, "a few per cent longer"
        assert 1 < unsloth / ours < 1.06, "Unsloth's a few per cent longer than ours"
    for dtype in ("fp16", "bf16"):
        ours, copy, unsloth = (
            us[name, "1024 x 4096", dtype] for name in ("ours", "copy", "Unsloth")
        )
        assert ours < copy < unsloth, "less time than the copy, and more"
    rates = {row["shape"]: row["weights"] / row["us"] for row in run["kernels"]
             if (row["kernel"], row["dtype"]) == ("ours", "fp16")}  # fmt: skip
    assert rates["4096 x 14336"] > 0.8 * max(rates.values()), "nearly waits for the memory"


def test_what_is_said_of_the_shown_run_holds_for_it(run):
    """The first screen and sections 1 and 6."""
    assert 140 < run["seconds"] < 220, "about three minutes"
    official = pd.DataFrame(run["official"]).groupby(["dtype", "contender"])["seconds"]
    assert (official.max() / official.min()).max() > 1.1, "runs differ much"


def test_where_the_time_goes_is_as_the_text_says(run):
    """Section 6, from top to bottom, and the first screen on what is left without a launcher."""
    cpu = {row["contender"]: row["cpu_us"] for row in run["parts"]}
    names = ("Unsloth", "kernel[grid]", "Triton's launcher", "ours", "floor")
    same, most, launcher, questions = (cpu[a] - cpu[b] for a, b in itertools.pairwise(names))
    assert most > max(same, launcher, questions), "the largest step"
    assert launcher > 0 and questions > 0
    over = {row["over"]: row["mix"] for row in run["race_speedups"]}
    usual = over["kernel[grid]"] / over["Unsloth"]
    assert 0.95 < usual < 1.05, "launched in the usual way, about as fast as Unsloth"
    assert over["Unsloth"] > 1.2 * over["Triton's launcher"] > 1.2, "still faster than Unsloth"
    about = over["Triton's launcher"] / over["Unsloth, buffer"]
    assert 0.9 < about < 1.1, "about as fast as Unsloth into its buffer"
    assert 1 < over["Unsloth, buffer"] < 1.2, "over that one, we are only a little faster"


def test_what_a_t4_may_miss_is_what_the_estimate_says(run, nf4):
    """The first screen and README."""
    assert run["estimate"], "after a run on a T4, write the first screen and section 8 anew"
    over = [row["over Unsloth"] for row in run["estimate"]]
    assert min(over) < 1.05 and max(over) > 1.15, "any of the three steps may be missed"
    assert min(row["over three launches"] for row in run["estimate"]) > 1.12, "near 1.15"
    lowest = min(run["estimate"], key=lambda row: row["over Unsloth"])
    assert lowest["factor"] < 1, "an unlikely row sets the low end"
    assert all(over[i] < over[i + 3] for i in range(3)), "a longer published time gives more"
    over = [row["over Unsloth"] for row in nf4.estimate_t4(run["parts"], slowness=1.05)]
    assert min(over) < 1.01, "there might be no speedup at all"


def test_the_memory_sets_the_pace_on_a_t4_by_the_count():
    """Section 8: all four kernels, by the ALU, at a clock below the lowest of a T4."""
    rehearsal = record.record_of(nbformat.read(shared.NOTEBOOK, as_version=4))["rehearsal"]
    if not rehearsal:
        pytest.skip("no rehearsal is recorded")
    *rows, clock = rehearsal["data"]["pipes"]
    columns = [name for name in clock if ", " in name and "weight" not in name]
    assert sorted(columns) == ["Unsloth's, bf16", "Unsloth's, fp16", "ours, bf16", "ours, fp16"]
    for column in columns:
        per_cycle = {row["instructions per weight"]: row[column] / row["threads a cycle"]
                     for row in rows if row["threads a cycle"]}  # fmt: skip
        assert max(per_cycle, key=per_cycle.get).startswith("ALU") and clock[column] < 585
        all_started = sum(row[column] for row in rows) / 128 / max(per_cycle.values())
        if column == "ours, fp16":
            assert round(all_started * clock[column]) == 201, "MHz to start all instructions"
        else:
            assert all_started < 1, "the others need less than for the ALU"
    for dtype in ("fp16", "bf16"):
        assert clock[f"ours, {dtype}"] < clock[f"Unsloth's, {dtype}"], "fewer instructions"


# The first two cells. Stand-ins: the versions that Python sees, the files of GPUs, and pip.


@contextlib.contextmanager
def machine(has_gpu, versions, pip):
    """A machine with these versions in the place of those at hand.

    versions  {package: its version, or "missing"}
    """
    at_hand = importlib.metadata.version

    def version(package):
        found = versions[package] if package in versions else at_hand(package)
        if found == "missing":
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    def glob(folder, pattern):
        assert (str(folder), pattern) == ("/dev", "nvidia[0-9]*"), "nvidiactl is no GPU"
        return [folder / "nvidia0"] if has_gpu else []

    with (
        mock.patch("importlib.metadata.version", version),
        mock.patch("pathlib.Path.glob", glob),
        mock.patch("pathlib.Path.exists", lambda path: False),
        mock.patch("subprocess.run", pip),
    ):
        yield


def run_cell(cell_id, **names):
    """Run one of the notebook's code cells with these names; return the names that it leaves."""
    (source,) = [cell.source for cell in shared.code_cells() if cell.id == cell_id]
    exec(source, names)
    return names


ABSENT = {"torch": "missing", "triton": "missing", "numpy": "missing"}
COLAB = {"torch": "2.11.0+cu128", "bitsandbytes": "missing", "unsloth": "missing"}
COLABS_PIP = ["bitsandbytes>=0.50", "unsloth>=2026.10.9", "torch==2.11.0+cu128"]
CPU_TORCH = ["torch==2.13.0", "--extra-index-url=https://download.pytorch.org/whl/cpu"]
UNSLOTH = {"unsloth": "2026.10.9"}
CASES = {  # {what is installed: (is there a GPU, versions, what pip is asked for, beside pins)}
    "nothing is missing": (False, {}, []),
    "Colab's": (True, COLAB, COLABS_PIP),
    "a nightly torch": (True, UNSLOTH | {"torch": "2.12.0.dev20260301+cu128"}, []),
    "no torch, and no GPU": (False, ABSENT, ["torch>=2.9", "triton>=3.5", "numpy", *CPU_TORCH]),
}
SAID = "error: externally-managed-environment\n\n× This environment → is managed\nhint: a help page"


@pytest.mark.parametrize("case", CASES)
def test_pip_gets_what_is_missing_and_moves_nothing_else(case):
    has_gpu, versions, asked = CASES[case]
    pip = mock.Mock(return_value=subprocess.CompletedProcess([], 1, stderr=SAID))
    fails = pytest.raises(RuntimeError, match=f"^pip failed:\n{SAID}$")
    with machine(has_gpu, versions, pip), fails if asked else contextlib.nullcontext():
        run_cell("install")
    assert pip.called == bool(asked)
    if asked:
        (command,), how = pip.call_args
        at_hand = set(ABSENT) - set(versions)  # these stay as they are
        pins = [f"{name}=={importlib.metadata.version(name)}" for name in at_hand]
        assert command[:4] == [sys.executable, "-m", "pip", "install"]
        assert sorted(part for part in command[4:] if part[0] != "-" or "=http" in part) == sorted(
            asked + pins
        )
        assert how["encoding"] == "utf-8", "whatever the locale is"


def see_gpu(name, capability, hip=None):
    """Run the cell that looks for a GPU where there is this one; return the names it leaves."""
    found = {"get_device_capability": lambda: capability, "get_device_name": lambda: name}
    modules = ("unsloth", "unsloth.kernels", "unsloth.kernels.utils")
    with (
        mock.patch.multiple("torch.cuda", is_available=lambda: True, **found),
        mock.patch("torch.version.hip", hip),
        mock.patch.dict("os.environ"),
        mock.patch.dict("sys.modules", {name: types.ModuleType(name) for name in modules}),
    ):
        return run_cell("versions", installed=lambda name: "1.0", sys=sys, time=time)


@pytest.mark.parametrize("name, capability", [("V100", (7, 0)), ("T4", (7, 5)), ("B200", (10, 0))])
def test_a_gpu_that_the_kernel_is_for_is_used(name, capability):
    names = see_gpu(name, capability)
    assert names["GPU"] and names["DEVICE"] == "cuda" and names["RECORD"]["gpu"] == name


@pytest.mark.parametrize(
    "name, capability, hip", [("Tesla P100", (6, 0), None), ("AMD Instinct MI300X", (9, 4), "7.0")]
)
def test_a_gpu_that_the_kernel_is_not_for_is_named(name, capability, hip):
    with pytest.raises(RuntimeError, match=f"^expected an NVIDIA GPU of capability .* got {name}"):
        see_gpu(name, capability, hip)


def test_requirements_are_those_of_the_install_cell():
    with machine(False, {}, pytest.fail):
        names = run_cell("install")
    listed = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert set(listed) == set(names["PACKAGES"])
