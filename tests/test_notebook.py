"""Protects the reader: the notebook installs and runs, shows its picture; README's lines work."""

import base64
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from unittest import mock

import nbformat
import pytest
import shared
import torch

ROOT = shared.ROOT
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.longest
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the record's run shows it")
def test_it_runs_on_a_cpu_from_top_to_bottom(tmp_path):
    command = [sys.executable, "-m", "papermill", "--cwd", tmp_path, "-k", "python3"]
    command += [shared.NOTEBOOK, tmp_path / "run.ipynb"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    notebook = nbformat.read(tmp_path / "run.ipynb", as_version=4)
    outputs = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert "passes on small layers" in outputs and "no speed claimed" in outputs
    assert "Warning" not in outputs and not list(tmp_path.glob("results/*"))


def test_colab_and_github_show_the_warps_picture():
    """Colab shows no attachments: a data URI, by reference. README's file is the same picture."""
    cells = nbformat.read(shared.NOTEBOOK, as_version=4).cells
    assert not any(cell.get("attachments") for cell in cells)
    (cell,) = [cell.source for cell in cells if "data:image" in cell.source]
    name, picture = re.search(r"^\[(\w+)\]: data:image/png;base64,(\S+)$", cell, re.M).groups()
    assert f"][{name}]" in cell.split(f"[{name}]:")[0]
    assert base64.b64decode(picture) == (ROOT / "results" / "warp.png").read_bytes()
    assert "(results/warp.png)" in README


def driver(n_gpus):
    """Stands for what ctypes finds of CUDA's driver."""

    def count(reference):
        reference._obj.value = n_gpus

    return mock.Mock(cuDeviceGetCount=count)


NO_DRIVER, STUB = OSError("libcuda.so.1: cannot open shared object file"), object()
NONE = {"torch": "missing", "triton": "missing", "numpy": "missing"}  # in the place of versions
COLAB = {"torch": "2.11.0+cu128", "bitsandbytes": "missing", "unsloth": "missing"}
COLAB_LACKS = ["bitsandbytes>=0.50", "unsloth>=2026.10.9"]
CPU_TORCH = ["torch>=2.9", "torch==2.13.0"]
CPU_TORCH += ["--extra-index-url=https://download.pytorch.org/whl/cpu"]
CASES = {  # what is installed: (versions, the driver, what is asked of pip)
    "nothing is missing": ({}, driver(0), []),
    "Colab's": (COLAB, driver(1), [*COLAB_LACKS, "torch==2.11.0+cu128"]),
    "an older Unsloth": ({"unsloth": "2026.3.11"}, driver(1), ["unsloth>=2026.10.9"]),
    "unsloth, which wants a GPU": ({"unsloth": "missing"}, NO_DRIVER, []),
    "a libcuda without its symbols": ({"unsloth": "missing"}, STUB, []),
    "torch without a GPU": (NONE, NO_DRIVER, [*CPU_TORCH, "triton>=3.5", "numpy"]),
    "too old a torch": ({"torch": "2.8.0"}, driver(0), ["torch>=2.9", "torch==2.8.0"]),
    "too old a tabulate": ({"tabulate": "0.8.9"}, driver(0), ["tabulate>=0.9"]),
    "a package that half an install left": ({"tqdm": None}, driver(0), ["tqdm"]),
}
SAID = "error: externally-managed-environment\n\n× This environment → is managed\nhint: a help page"


@contextlib.contextmanager
def machine(versions, driver, pips_status=1):
    """There these versions are installed, the others are those at hand; gives pip's stand-in."""
    at_hand = importlib.metadata.version

    def version(package):
        found = versions[package] if package in versions else at_hand(package)
        if found == "missing":
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    done = subprocess.CompletedProcess([], pips_status, stderr=SAID)
    with (
        mock.patch("importlib.metadata.version", version),
        mock.patch("ctypes.CDLL", side_effect=[driver, driver]),
        mock.patch("subprocess.run", return_value=done) as pip,
    ):
        yield pip


def cell(word):
    """The source of the one code cell with the word."""
    (source,) = [each.source for each in shared.code_cells() if word in each.source]
    return source


def install():
    """The names that the install cell leaves."""
    names = {}
    exec(cell("PACKAGES = "), names)
    return names


@pytest.mark.parametrize("case", CASES)
def test_pip_gets_what_is_missing_and_moves_nothing_else(case):
    versions, driver, asked = CASES[case]
    with machine(versions, driver) as pip:
        if not asked:
            install()
            assert not pip.called
            return
        with pytest.raises(RuntimeError, match=f"^pip failed:\n{SAID}$"):
            install()
    (command,), how = pip.call_args
    at_hand = set(NONE) - set(versions)  # these stay as they are
    pins = [f"{name}=={importlib.metadata.version(name)}" for name in at_hand]
    assert command[:6] == [sys.executable, "-m", "pip", "install", "-qq", "--retries=1"]
    assert sorted(command[6:]) == sorted(asked + pins)
    assert how["encoding"] == "utf-8", "whatever the locale is"


def test_what_pip_installed_where_python_does_not_look_asks_for_a_restart():
    """As with PIP_USER, and a user site made just now."""
    with machine({"tabulate": "missing"}, NO_DRIVER, pips_status=0):
        with pytest.raises(RuntimeError, match="restart it, then run again"):
            install()


GPUS = {"Tesla P100": ((6, 0), None), "AMD Instinct MI300X": ((9, 4), "7.0")}


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_that_the_kernel_is_not_for_is_named(name):
    capability, hip = GPUS[name]
    found = {"get_device_capability": lambda: capability, "get_device_name": lambda: name}
    with (
        mock.patch.multiple("torch.cuda", is_available=lambda: True, **found),
        mock.patch("torch.version.hip", hip),
        mock.patch.dict("os.environ"),
        pytest.raises(RuntimeError, match=f"only NVIDIA GPUs .* not {name}"),
    ):
        exec(cell("GPU = "), {"os": os})


def test_requirements_are_those_of_the_install_cell():
    with machine({}, NO_DRIVER):
        names = install()
    listed = (ROOT / "requirements.txt").read_text().splitlines()
    assert set(listed) == set(names["PACKAGES"])


def readme_command(heading):
    return re.search(rf"## {heading}.*?```bash\n(.*?)\n```", README, re.S)[1]


def test_ci_runs_the_readmes_test_command():
    done = subprocess.run(["bash", ".ci/run", "--print"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == readme_command("Test")


USE = """
import sys
sys.modules.update(dict.fromkeys(("pandas", "peft", "IPython", "matplotlib", "tqdm")))  # not there
import nf4_triton, torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
weight, state = quantize_4bit(torch.randn(64, 64).half(), quant_type="nf4")
with nf4_triton.in_bitsandbytes():
    assert torch.equal(nf4_triton.dequantize_nf4(weight, state), dequantize_4bit(weight, state))
print(nf4_triton.dequantize_nf4.__doc__)
"""


@pytest.mark.skipif(importlib.util.find_spec("nbdev") is None, reason="needs nbdev")
def test_the_readmes_line_makes_a_module_that_needs_torch_triton_and_bitsandbytes_alone(
    tmp_path, monkeypatch
):
    """Of the notebook as black writes it, too, which tests and tools load as well."""
    text = shared.NOTEBOOK.read_text(encoding="utf-8")
    line = re.search(r'python -c "(.*?)"', readme_command("Use"))[1]
    notebook, module = tmp_path / "nf4_triton.ipynb", tmp_path / "nf4_triton.py"
    found = []
    for mark in ("#| export", "# | export"):
        notebook.write_text(text.replace("#| export", mark), encoding="utf-8")
        subprocess.run([sys.executable, "-c", line], cwd=tmp_path, check=True, capture_output=True)
        monkeypatch.setattr(shared, "NOTEBOOK", notebook)
        exported = module.read_text(encoding="utf-8").replace(mark, "")  # below a title it stays
        found.append((exported, len(shared.definitions())))
    assert found[0] == found[1]
    used = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, capture_output=True, text=True)
    assert "with bitsandbytes' bits" in used.stdout, used.stderr
