"""What can be known of a T4 without one: machine code, a rehearsal, what is installed on Colab.

How bf16 crosses the border of a graph where Inductor refuses it is asked in test_compile.py.
"""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import colab
import colab_jupyter
import helpers
import nbformat
import pytest
import rehearse_t4
import t4_kernels
import torch
from helpers import ROOT
from packaging.requirements import Requirement
from triton.backends import backends

# The machine code for sm_75 and newer, which needs no GPU.

AT_HAND = importlib.metadata.version("triton")
VERSIONS = ["3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0"]
NEWEST = "3.9.0" if sys.version_info >= (3, 11) else "3.8.0"  # for Python 3.10 there is no 3.9
COMPILED_NOW = sorted({AT_HAND, "3.6.0", NEWEST})  # Colab's and the newest, which pip installs
ARCHITECTURES = ["80", "86", "89", "90", "100", "120"]
DTYPES = {"float16", "bfloat16", "float32"}
MOST = {"float16": 7.6, "bfloat16": 11.6}  # instructions per weight
MOST_BY_LOADS = {"float16": 10.5, "bfloat16": 14.5}
MOST_REGISTERS = 40  # with 64 a T4 is full
SM_75 = json.loads((ROOT / "results" / "sm_75.json").read_text())


def python(*arguments):
    """A process of its own, as sm_75.py says, in the folder of that program."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT / "tools", capture_output=True, text=True)


def compiled_by(version):
    """What sm_75.py prints with this Triton."""
    done = python("sm_75.py", *([] if version == AT_HAND else [version]))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(report):
    """On any card: compiled, no spills, read by words, written by 16 bytes.

    What is written in 16 bits goes through no shared memory.
    """
    look_ups = {"assembly": report, "loads": report["loads"], "ragged": report["ragged"]}
    for look_up, by_dtype in look_ups.items():
        for dtype in DTYPES:
            facts, case = by_dtype[dtype], (look_up, dtype)
            assert facts["compiled"] and facts["spills"] == 0, case
            loads, stores = facts["packed_load_bits"], facts["store_bits"]
            assert loads and min(map(int, loads)) >= 32, case
            assert "128" in stores, case
            assert len(stores) == 1 or look_up == "ragged", case
            assert facts["shared"] == 0 or dtype == "float32", case
            assert (facts["shuffles"] > 0) == (look_up != "loads"), case


def check_t4(report):
    check(report)
    for by_dtype in (report, report["loads"], report["ragged"]):
        assert max(by_dtype[dtype]["registers"] for dtype in DTYPES) <= MOST_REGISTERS
    for dtype in MOST:
        assert report[dtype]["instructions_per_weight"] <= MOST[dtype]
        assert report["loads"][dtype]["instructions_per_weight"] <= MOST_BY_LOADS[dtype]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU, but a package index")
def test_the_record_is_what_is_compiled_now():
    """All at once, in one test: a process takes half a minute."""
    with ThreadPoolExecutor() as pool:
        reports = dict(zip(COMPILED_NOW, pool.map(compiled_by, COMPILED_NOW)))
    for version, report in reports.items():
        assert report["triton"] == version
        check_t4(report)
    known = {version: report for version, report in reports.items() if version in VERSIONS}
    assert known == {version: SM_75[version] for version in known}, "run tools/sm_75.py --matrix"


def test_the_matrix_is_complete():
    assert list(SM_75) == VERSIONS
    for version, report in SM_75.items():
        compiled = [report]
        if version in ("3.6.0", "3.9.0"):
            assert list(report["architectures"]) == ARCHITECTURES
            compiled += report["architectures"].values()
        assert report["triton"] == version and set(report["settings"]) == DTYPES
        for entry in compiled:
            facts = set(entry) - {"triton", "settings", "architectures"}
            assert facts == {*DTYPES, "loads", "ragged"}
            assert set(entry["loads"]) == set(entry["ragged"]) == DTYPES


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_machine_code(version):
    check_t4(SM_75[version])


@pytest.mark.parametrize("version", ["3.6.0", "3.9.0"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_recorded_machine_code_of_newer_cards(version, architecture):
    check(SM_75[version]["architectures"][architecture])


def test_an_unknown_version_is_refused():
    done = python("sm_75.py", "2.0.0")
    assert done.returncode == 1 and "expected nothing, --matrix or one of 3.5.1" in done.stderr


def test_what_does_not_compile_is_reported():
    """The tool itself: what ptxas refuses fails every look-up by the assembly, and no other."""
    script = """
import sm_75
import helpers

load, sm_75.WITH_ARCHITECTURES = helpers.load, ()
edit = ("shfl.sync.idx.b32", "shfl.sync.nonsense.b32")
helpers.load = lambda name="broken": load(name, edit)
raise SystemExit(sm_75.main([]))
"""
    done = python("-c", script)
    assert done.returncode == 1 and "does not compile: float16: " in done.stderr, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    for dtype in DTYPES:
        assert not report[dtype]["compiled"] and not report["ragged"][dtype]["compiled"]
        assert "\n" not in report[dtype]["error"]
        assert f"does not compile: ragged {dtype}: " in done.stderr
        assert report["loads"][dtype]["compiled"]


# The rehearsal: the notebook on a newer GPU that is made to look like a T4.


def rehearse(program, folder):
    reason = rehearse_t4.refusal(folder, rehearse_t4.real_card())
    if reason:
        pytest.skip(reason)
    return subprocess.run([sys.executable, program, folder], capture_output=True, text=True)


@pytest.mark.gpu
@pytest.mark.longest
def test_the_rehearsal(tmp_path):
    done = rehearse(ROOT / "tools" / "rehearse_t4.py", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "t4_rehearsal.json").read_text())
    helpers.check_rehearsal(found)
    assert found["cells"] == sum(cell.cell_type == "code" for cell in helpers.cells())
    written = json.loads((tmp_path / "results" / "tesla-t4.json").read_text())
    assert written["rehearsed"] is True
    assert written["rehearsed_on"] == found["gpu"] == torch.cuda.get_device_name()
    assert (written["gpu"], written["capability"]) == ("Tesla T4", [7, 5])


@pytest.mark.gpu
def test_the_rehearsal_finds_what_fails_on_a_t4_alone(tmp_path):
    """A copy of the repository whose notebook has one cell that no other card refuses."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=ignored)
    notebook = nbformat.read(helpers.NOTEBOOK, as_version=4)
    (cell,) = (cell for cell in notebook.cells if cell.id == "by-hand")
    a_t4 = "if torch.cuda.get_device_capability() == (7, 5):\n"
    cell.source = a_t4 + '    raise RuntimeError("broken on a T4")\n' + cell.source
    nbformat.write(notebook, tmp_path / helpers.NOTEBOOK.name)
    done = rehearse(tmp_path / "tools" / "rehearse_t4.py", tmp_path / "run")
    assert done.returncode == 1, done.stdout + done.stderr
    where = f"cell {notebook.cells.index(cell)} (by-hand)"
    assert f"failed: {where}: RuntimeError: broken on a T4\n" in done.stderr, done.stderr
    assert not (tmp_path / "run" / "t4_rehearsal.json").exists()


# A small notebook goes through the same program without a GPU: the disguise, and what ends it.

T4S_ANSWERS = """
import torch

card = torch.cuda.get_device_properties()
assert (torch.cuda.get_device_name(), torch.cuda.get_device_capability()) == ("Tesla T4", (7, 5))
assert card.multi_processor_count == 40 and card.total_memory < 16e9
assert not torch.cuda.is_bf16_supported(including_emulation=False)
"""
KERNEL = """
import triton
import triton.language as tl


@triton.jit
def kernel(out_ptr):
    tl.store(out_ptr, 1.0)


source = triton.compiler.ASTSource(kernel, {"out_ptr": "*fp32"})
target = triton.backends.compiler.GPUTarget("cuda", 75, 32)
code = triton.compile(source, target=target).asm["cubin"]
assert b".target sm_75" in code and b"ELF" not in code[:4]
"""
COMPILED = {"function": "dequantization", "bit_equal": True, "compiled": True, "graphs": 1}
FLOAT16 = {"dtype": "float16", **COMPILED}
BFLOAT16 = {"dtype": "bfloat16", **COMPILED}
RIGHT = {"exact": {"checked": 7, "differing": 0}, "compile": [FLOAT16, BFLOAT16], "kept": True}
WRITE = """
import json, os

os.makedirs("results")
with open("results/tesla-t4.json", "w") as file:
    json.dump(RECORD, file)
"""
CUBIN = """
import os

with open(os.environ["TRITON_CACHE_DIR"] + "/kernel.cubin", "wb") as file:
    file.write(b"CONTENT")
"""
SM_75_KERNEL = CUBIN.replace("CONTENT", ".target sm_75")
SM_90_KERNEL = CUBIN.replace("CONTENT", ".target sm_90")


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Rehearses a notebook of these code cells; the exit status."""

    def run(*sources, record=RIGHT):
        written = record | {"host": {"kept": record["kept"]}}
        sources = [*sources, WRITE.replace("RECORD", repr(written))]
        code = []
        for i, source in enumerate(sources):
            code.append(nbformat.v4.new_code_cell(source, id=f"code-{i}"))
        title = nbformat.v4.new_markdown_cell("## 1 · Small")
        notebook = nbformat.v4.new_notebook(cells=[title, *code])
        nbformat.write(notebook, tmp_path / "small.ipynb")
        monkeypatch.setattr(rehearse_t4, "NOTEBOOK", tmp_path / "small.ipynb")
        monkeypatch.setattr(rehearse_t4, "real_card", lambda: ("NVIDIA H200", (9, 0)))
        return rehearse_t4.main([str(tmp_path / "run")])

    return run


def test_a_small_notebook_is_rehearsed(small, tmp_path, capfd):
    rows = [{"format": "8192 x 28672", "dtype": "float16", "fraction": 0.98765}]
    rows += [{"format": "1024 x 4096", "dtype": "float16", "fraction": 0.5}]
    right = RIGHT | {"formats": rows}
    assert small(T4S_ANSWERS, KERNEL, record=right) == 0, capfd.readouterr().err
    found = json.loads((tmp_path / "run" / "t4_rehearsal.json").read_text())
    assert (found["gpu"], found["as"]) == ("NVIDIA H200", "Tesla T4")
    assert (found["cells"], found["errors"]) == (3, 0)
    assert {key: found[key] for key in RIGHT} == RIGHT
    assert found["fractions"] == {"float16": 0.988}
    written = json.loads((tmp_path / "run" / "results" / "tesla-t4.json").read_text())
    right |= {"host": {"kept": True}}
    assert written == right | {"rehearsed": True, "rehearsed_on": "NVIDIA H200"}
    notebook = nbformat.read(tmp_path / "run" / "small.ipynb", as_version=4)
    assert notebook.metadata.rehearsed_on == "NVIDIA H200"
    assert "no time below is a T4's" in notebook.cells[0].source
    assert "cell 1 (code-0), in 1 · Small\n" in capfd.readouterr().out


@pytest.mark.parametrize(
    "cells, reasons",
    [
        (
            ["", "1 / 0"],
            ["cell 2 (code-1): ZeroDivisionError: division by zero", "1 of 2 code cells were run"],
        ),
        (["import os\nos._exit(1)"], ["cell 1 (code-0): DeadKernelError"]),
        (
            [SM_75_KERNEL, SM_90_KERNEL],
            ["expected kernels that are PTX for sm_75; of 1 in Triton's cache 1 are not"],
        ),
        ([], ["expected kernels that are PTX for sm_75; of 0 in Triton's cache 0 are not"]),
    ],
    ids=["a cell raises", "the kernel dies", "another card's code", "no code"],
)
def test_what_ends_the_rehearsal(small, tmp_path, capfd, cells, reasons):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "t4_rehearsal.json").write_text("an earlier one's")
    assert small(*cells) == 1
    said = capfd.readouterr().err
    assert all(f"failed: {reason}" in said for reason in reasons), said
    assert not (tmp_path / "run" / "t4_rehearsal.json").exists()


def compared(checked, differing):
    return RIGHT | {"exact": {"checked": checked, "differing": differing}}


def compiled(*rows):
    return RIGHT | {"compile": list(rows)}


@pytest.mark.parametrize(
    "record, reason",
    [
        (RIGHT, None),
        (compared(7, 1), "expected that weights were checked and none differs"),
        (compared(0, 0), "expected that weights were checked and none differs"),
        (RIGHT | {"kept": False}, "expected that launches are kept with a T4's code"),
        (RIGHT | {"exact": None}, "none differs, got no record of a Tesla T4"),
        (compiled(FLOAT16), "expected that something was compiled in bfloat16"),
        (compiled(BFLOAT16), "expected that something was compiled in float16"),
        (compiled(FLOAT16, BFLOAT16 | {"compiled": False}), "in one graph with equal bits"),
        (compiled(FLOAT16, BFLOAT16 | {"bit_equal": False}), "in one graph with equal bits"),
        (compiled(FLOAT16, BFLOAT16, FLOAT16 | {"graphs": 2}), "in one graph with equal bits"),
    ],
)
def test_the_rehearsal_judges_the_record(record, reason):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")])
    found = rehearse_t4.failures(notebook, {"cells": 1, **record})
    assert [] == found if reason is None else len(found) == 1 and reason in found[0]


def test_the_recorded_shares_are_those_of_the_times():
    found = json.loads((ROOT / "results" / "t4_kernels.json").read_text())
    assert found.pop("commit") == "8b4ab41", "of the kernel as it was then"
    again = t4_kernels.result(found["rows"], found["gpu"])
    assert again | {"date": found["date"]} == found
    assert {row["dtype"] for row in found["rows"]} == {"float16", "bfloat16"}
    assert found["as"] == "Tesla T4" and "T4" not in found["gpu"]


@pytest.mark.parametrize(
    "code, status, told",
    [
        (b".target sm_75", 0, None),
        (b".target sm_90", 0, "PTX for sm_75; of 1 in Triton's cache 1 are not"),
        (None, 0, "PTX for sm_75; of 0 in Triton's cache 0 are not"),
        (b".target sm_75", 1, "it ended with 1: what it said"),
    ],
)
def test_kernels_in_disguise_are_for_a_t4(monkeypatch, code, status, told):
    rows = [{"format": "8192 x 28672", "dtype": "float16"}]

    def run(command, env, **options):
        if code:
            (Path(env["TRITON_CACHE_DIR"]) / "kernel.cubin").write_bytes(code)
        said = "what it said\n" if status else f"a banner\n{json.dumps(rows)}\n"
        return subprocess.CompletedProcess(command, status, stdout=said)

    monkeypatch.setattr(subprocess, "run", run)
    if told is None:
        assert t4_kernels.in_disguise() == rows
        return
    with pytest.raises(RuntimeError, match=told):
        t4_kernels.in_disguise()


NO_GPU, H200 = (False, "", (0, 0), "12.8"), (True, "NVIDIA H200", (9, 0), "12.8")


@pytest.mark.parametrize(
    "card, folder, reason",
    [
        (NO_GPU, "run", "needs an NVIDIA GPU that torch can use"),
        (
            (True, "AMD Instinct MI300X", (9, 4), None),
            "run",
            "needs an NVIDIA GPU that torch can use",
        ),
        (
            (True, "Tesla V100", (7, 0), "12.8"),
            "run",
            "Tesla V100 has capability 7.0, but code for a T4 needs 7.5",
        ),
        (H200, "run", "This Triton has no CUDABackend.make_cubin"),
        (H200, ROOT / "results", "keeps what was measured"),
        (H200, ROOT, "keeps what was measured"),
    ],
    ids=["no GPU", "AMD's", "older", "another Triton", "results/", "the repository"],
)
def test_what_the_rehearsal_refuses(monkeypatch, tmp_path, capsys, card, folder, reason):
    there, name, capability, cuda = card
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(rehearse_t4, "rehearse", lambda *_: pytest.fail("it was tried"))
    if "make_cubin" in reason:
        monkeypatch.delattr(backends["nvidia"].compiler, "make_cubin")
    assert rehearse_t4.main([str(tmp_path / folder)]) == 2
    said = capsys.readouterr().err
    assert reason in said and said.endswith(".\n") and said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_newer_card_is_rehearsed_on(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.version, "cuda", "12.8")

    def rehearse(folder, gpu, scratch):
        return folder, gpu, scratch.is_dir()

    monkeypatch.setattr(rehearse_t4, "rehearse", rehearse)
    assert rehearse_t4.main([str(tmp_path / "run")]) == (tmp_path / "run", "Tesla T4", True)


# What the install cell does to Colab: the record, and how Colab's list is read. colab.py asks pip.


def test_the_install_cell_leaves_torch_and_cuda_alone():
    recorded = json.loads(colab.RECORD.read_text())
    assert set(recorded["untouched"]) == {"torch", "triton", "numpy", "nvidia packages"}
    assert recorded["untouched"]["nvidia packages"] > 20
    for name in {**recorded["new"], **recorded["changed"]}:
        assert not colab.protected(name), name
    assert {"bitsandbytes", "unsloth"} <= set(recorded["new"])
    assert set(recorded["new"]).isdisjoint(recorded["changed"])
    assert recorded["untouched"]["triton"] in COMPILED_NOW


def test_colabs_packages_are_not_too_old():
    recorded = json.loads(colab.RECORD.read_text())
    versions, checked = recorded["new"] | recorded["untouched"], 0
    for requirement in map(Requirement, (ROOT / "requirements.txt").read_text().split()):
        if requirement.name in versions:
            version = versions[requirement.name]
            assert requirement.specifier.contains(version, prereleases=True), requirement
            checked += 1
    assert checked >= 5


PROTECTED = ["torch", "triton", "numpy", "nvidia-cudnn-cu12", "cuda-python", "numba-cuda"]


@pytest.mark.parametrize("name", PROTECTED)
def test_protected(name):
    assert colab.protected(name)


@pytest.mark.parametrize("name", ["torchao", "datasets", "xformers", "numpydoc"])
def test_not_protected(name):
    assert not colab.protected(name)


COLABS = """# comment
NumPy==2.1.3
torch==2.11.0+cu128
triton==3.6.0
pip==24.1.2
pydantic_core==2.46.4
"""


def test_list_is_read(tmp_path):
    path = tmp_path / "list.txt"
    from_a_file = "google-colab @ file:///dist/google_colab-1.0.0.tar.gz\n"
    from_git = "kernel @ git+https://example.org/kernel@b134\n"
    path.write_text(COLABS + from_a_file + from_git)
    packages = colab.read_list(path)
    assert packages["numpy"] == "2.1.3" and packages["torch"] == "2.11.0+cu128"
    assert packages["pydantic-core"] == "2.46.4"
    assert packages["google-colab"] == "1.0.0" and packages["kernel"] == "0"


@pytest.mark.parametrize(
    "text, message", [("torch>=2\n", "expected `name==version`"), ("tqdm==4.0\n", "is no list")]
)
def test_another_file_is_refused(tmp_path, text, message):
    path = tmp_path / "list.txt"
    path.write_text(text)
    with pytest.raises(SystemExit, match=message):
        colab.read_list(path)


def test_what_the_list_lacks_is_asked_of_pip():
    packages = {"torch": "2.11.0+cu128", "pydantic-core": "2.46.4", "peft": "0.9", "tqdm": "4.0"}
    requirements = "torch>=2.6\nunsloth\n\ntriton>=3.3\nPydantic_Core>=2.46\npeft>=0.9.0\ntqdm\n"
    assert colab.missing(requirements, packages) == ["unsloth", "triton>=3.3"]
    assert colab.missing("\n".join(packages), packages) == []


@pytest.mark.parametrize(
    "line, message",
    [
        ("torch>=2.12", "the list has torch 2.11.0.cu128, which is older than torch>=2.12"),
        ("torch>=2.11.0.1", "older than"),
        ("torch>=10", "older than"),
        ("torch<3", "expected `name` or `name>=version` in requirements.txt, got 'torch<3'"),
    ],
)
def test_what_the_install_cell_would_refuse_is_named(line, message):
    with pytest.raises(SystemExit, match=message):
        colab.missing(line, {"torch": "2.11.0+cu128"})


@pytest.mark.parametrize(
    "installed, broken", [({"tqdm": "5.0"}, ""), ({"tqdm": "5.0", "torch": "2.13.0"}, "torch")]
)
def test_a_change_of_torch_is_an_error(monkeypatch, tmp_path, installed, broken):
    (tmp_path / "list.txt").write_text(COLABS + "tqdm==4.0\nnvidia-nccl-cu12==2.27\n")
    (tmp_path / "requirements.txt").write_text("torch>=2.6\nunsloth\n")
    asked, installed = [], [*installed.items(), ("unsloth", "2026.10.7")]
    monkeypatch.setattr(colab, "sys", types.SimpleNamespace(version_info=(3, 13), platform="linux"))
    monkeypatch.setattr(colab.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(colab, "ROOT", tmp_path)
    monkeypatch.setattr(colab, "RECORD", tmp_path / "colab.json")

    def resolve(packages, wanted, folder):
        asked.extend(wanted)
        return installed

    monkeypatch.setattr(colab, "resolve", resolve)
    if broken:
        with pytest.raises(SystemExit, match="must stay as they are, pip would touch torch$"):
            colab.main(tmp_path / "list.txt", record=True)
    else:
        colab.main(tmp_path / "list.txt", record=True)
    recorded = json.loads((tmp_path / "colab.json").read_text())
    assert asked == ["unsloth"] and recorded["new"] == {"unsloth": "2026.10.7"}
    assert recorded["changed"]["tqdm"] == "4.0 -> 5.0"
    assert recorded["untouched"]["nvidia packages"] == 1
    assert ("torch" in recorded["changed"]) == bool(broken)
    assert ("torch" in recorded["untouched"]) != bool(broken)


@pytest.mark.parametrize(
    "status, line, message",
    [
        (0, "CPU mode: 1,000 weights went through the interpreter, 0 differ.", None),
        (
            0,
            "CPU mode: 1,000 weights went through the interpreter, 10 differ.",
            "expected the CPU mode's last line",
        ),
        (0, "35 of 14 points", "expected the CPU mode's last line"),
        (1, "", "the notebook fails under this Jupyter"),
    ],
)
def test_the_last_line_under_colabs_jupyter(monkeypatch, tmp_path, status, line, message):
    cells = [nbformat.v4.new_markdown_cell("text"), nbformat.v4.new_code_cell("print()")]
    cells[1].outputs = [nbformat.v4.new_output("stream", name="stdout", text=f"first\n{line}\n")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "nf4_triton.ipynb")
    started, done = [], subprocess.CompletedProcess("", status)
    monkeypatch.setattr("subprocess.run", lambda command, **_: started.append(command) or done)
    if message:
        with pytest.raises(SystemExit, match=message):
            colab_jupyter.execute("python", tmp_path)
    else:
        assert colab_jupyter.execute("python", tmp_path) == line
    assert started == [["python", ROOT / "tools" / "record.py", "execute", tmp_path]]
    assert started[0][1].exists()
