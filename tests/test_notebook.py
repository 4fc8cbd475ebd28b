"""Protects who runs the notebook: README's commands work, and cells install the right things."""

import contextlib
import importlib.metadata
import json
import re
import subprocess
import sys
import time
import types
from unittest import mock

import nbformat
import pytest
import shared
from helpers import GPU

ROOT = shared.ROOT
README = (ROOT / "README.md").read_text(encoding="utf-8")


# README's commands

COMMANDS = {  # {command: a shell script in its place}
    "python3": 'test "$*" = "-m venv .venv"',  # makes nothing: the environment is there
    "python": f'exec {sys.executable} "$@"',
    "pip": f'exec {sys.executable} -m pip "$@" --no-index',  # fails for a package that is not here
    "papermill": f'exec {sys.executable} -m papermill "$@"',
}


@pytest.fixture
def run_readme(repository, monkeypatch):
    """Returns a function that runs the commands below one of README's headings, in a copy."""
    folder = repository / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name, script in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def run_readme(heading):
        commands = re.search(rf"^## {heading}$.*?^```bash\n(.*?)^```$", README, re.S | re.M)[1]
        how = {"cwd": repository, "capture_output": True, "text": True, "timeout": 600}
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", commands], **how)
        assert done.returncode == 0, done.stderr[-3000:]

    return run_readme


@pytest.mark.longest
@pytest.mark.skipif(GPU, reason="on a GPU the record's run shows it")
def test_readmes_commands_run_the_notebook(repository, run_readme):
    run_readme("Run it")
    notebook = nbformat.read(repository / "run" / "nf4_triton.ipynb", as_version=4)
    outputs = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert "no speed is claimed" in outputs and "passes on small layers" in outputs
    assert "Warning" not in outputs and not (repository / "run" / "results").exists()


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


def test_readmes_commands_make_a_module_with_few_needs(repository, run_readme, monkeypatch):
    if GPU:
        pytest.importorskip("nbdev")  # a GPU machine may lack tests/requirements.txt
    else:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    run_readme("Use it")
    command = [sys.executable, "-c", USE]
    used = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert used.returncode == 0, used.stderr


# The first two cells. Stand-ins: the versions that Python sees, the files of GPUs, and pip.


@contextlib.contextmanager
def machine(has_gpu, versions, pip):
    """A machine with these {package: version} in the place of those at hand; None is missing."""
    at_hand = importlib.metadata.version

    def version(package):
        found = versions[package] if package in versions else at_hand(package)
        if found is None:
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


CPU_TORCH = ["torch==2.13.0", "--extra-index-url=https://download.pytorch.org/whl/cpu"]
PIP = {  # {where: (is there a GPU, versions, what pip is asked for, which of these stay)}
    "Colab": (
        True,
        {"torch": "2.11.0+cu128", "bitsandbytes": None, "unsloth": None},
        ["bitsandbytes>=0.50", "unsloth>=2026.10.9", "torch==2.11.0+cu128"],
        ["triton", "numpy"],
    ),
    "a machine without torch and GPU": (
        False,
        {"torch": None, "triton": None, "numpy": None},
        ["torch>=2.9", "triton>=3.5", "numpy", *CPU_TORCH],
        [],
    ),
}
SAID = "error: externally-managed-environment\n\n× This environment → is managed\nhint: a help page"


@pytest.mark.parametrize("where", PIP)
def test_pip_gets_what_is_missing_and_moves_nothing_else(where):
    """And what it says where it fails is shown."""
    has_gpu, versions, asked, stay = PIP[where]
    pip = mock.Mock(return_value=subprocess.CompletedProcess([], 1, stderr=SAID))
    with machine(has_gpu, versions, pip):
        with pytest.raises(RuntimeError, match=f"^pip failed:\n{SAID}$"):
            run_cell("install")
    (command,), how = pip.call_args
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    found = [part for part in command[4:] if part[0] != "-" or "=http" in part]
    pins = [f"{name}=={importlib.metadata.version(name)}" for name in stay]
    assert sorted(found) == sorted(asked + pins)
    assert how["encoding"] == "utf-8", "whatever the locale is"


def test_requirements_are_those_of_the_install_cell():
    pip = mock.Mock(side_effect=AssertionError("nothing is missing"))
    with machine(False, {}, pip):
        names = run_cell("install")
    listed = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert set(listed) == set(names["PACKAGES"])
    tested = (ROOT / "tests" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    others = [each for each in listed if not each.startswith(("torch>", "unsloth"))]
    assert set(others) <= set(tested), "the tests use the same"


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


def test_a_gpu_that_the_kernel_is_not_for_is_named():
    names = see_gpu("Tesla V100", (7, 0))
    assert names["DEVICE"] == "cuda" and names["RECORD"]["gpu"] == "Tesla V100"
    for name, *other in (("Tesla P100", (6, 0)), ("AMD Instinct MI300X", (9, 4), "7.0")):
        with pytest.raises(RuntimeError, match=f"^expected an NVIDIA GPU of .* got {name}"):
            see_gpu(name, *other)
