"""Protects the reader: the notebook runs, says what was measured; README's lines work."""

import contextlib
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from unittest import mock

import blocks
import helpers
import nbformat
import pytest
import record

ROOT = helpers.ROOT
BLOCK = re.compile(r"<!-- (\w+):start -->.*?<!-- \1:end -->", re.S)


def cell_named(name):
    (cell,) = [cell for cell in helpers.cells() if cell.id == name]
    return cell


# It runs, and its outputs are its own.


@pytest.mark.longest
@pytest.mark.skipif(helpers.torch.cuda.is_available(), reason="on a GPU the record's run shows it")
def test_it_runs_on_a_cpu_from_top_to_bottom(tmp_path):
    command = [sys.executable, "-m", "papermill", "--cwd", tmp_path, "-k", "python3"]
    command += [helpers.NOTEBOOK, tmp_path / "run.ipynb"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    notebook = nbformat.read(tmp_path / "run.ipynb", as_version=4)
    outputs = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert "passes on small layers" in outputs and "no speed claimed" in outputs
    assert "Warning" not in outputs and not list(tmp_path.glob("results/*"))


def test_every_code_cell_was_run_and_none_ended_in_an_error():
    for cell in helpers.cells():
        if cell.cell_type == "code":
            assert cell.execution_count, f"{cell.id} was not run: {record.TO_RUN}"
            errors = [output for output in cell.outputs if output.output_type == "error"]
            assert not errors, f"{cell.id} ended in an error: {record.TO_RUN}"


def test_the_outputs_shown_are_of_the_gpu_that_the_headline_names():
    shown = blocks.shown_record()
    headline = f"**{shown['gpu']}, {shown['date']}; host"
    cure = "take a run in by tools/record.py, or `git checkout nf4_triton.ipynb` for its outputs"
    outputs = json.dumps(cell_named("versions").outputs)
    assert headline in outputs, f"the outputs are of another run than {headline}: {cure}"


# What is stated.


def test_what_notebook_and_readme_state_is_what_is_recorded():
    found = blocks.generated()
    notebook = [cell.source for cell in helpers.cells() if cell.cell_type == "markdown"]
    readme = (ROOT / "README.md").read_text()
    assert set(BLOCK.findall("\n".join(notebook))) == {"record", "ladder", "t4"}
    assert set(BLOCK.findall(readme)) == {"record", "training"}
    assert set(found) == {"record", "ladder", "t4", "training"}
    for text in [*notebook, readme]:
        assert blocks.with_blocks(text, found) == text, "run .venv/bin/python tools/record.py"


ROWS = {  # of the record: the fields of each
    "kernels": {"shape", "format", "dtype", "ours_us", "unsloth_us", "copy_us"},
    "official": {"dtype", "who", "seconds"},
    "race": {"dtype", "who", "kernels", "ratio", "low", "high", "us", "issue_us"},
    "compile": {"function", "dtype", "graphs", "graph_breaks", "recompiles"}
    | {"bit_equal", "compiled"},
    "score": {"criterion", "possible", "evidence"},
}


def test_the_record_has_the_form_that_others_read():
    shown = blocks.shown_record()
    assert set(record.FIELDS) == set(shown)
    for name, fields in ROWS.items():
        for row in shown[name]:
            assert set(row) == fields, name
    # By the operator and by a plan: one of them alone would be 278 million.
    assert shown["exact"]["checked"] > 500_000_000 and shown["exact"]["differing"] == 0
    gpu = blocks.slug(shown["gpu"])
    expected = {f"{gpu}.json", f"{gpu}-calls.png", f"{gpu}-race.png", "warp.png"}
    for name in ("runs", "sm_75", "ladder", "t4", "tests", "training"):
        expected.add(f"{name}.json")
    assert {path.name for path in (ROOT / "results").iterdir()} == expected


# Taking a run in.


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the README and the notebook, as if it had just run; without results."""
    folder = tmp_path / "project"
    (folder / "results").mkdir(parents=True)
    (folder / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    notebook = nbformat.read(helpers.NOTEBOOK, as_version=4)
    notebook.metadata["code"] = record.code_hash(notebook)
    nbformat.write(notebook, folder / "nf4_triton.ipynb")
    monkeypatch.setattr(record, "ROOT", folder)
    monkeypatch.setattr(blocks, "RESULTS", folder / "results")
    return folder


@pytest.fixture
def run(tmp_path, project):
    """A folder with the run that is shown, to be taken into the project."""
    folder = tmp_path / "run"
    (folder / "results").mkdir(parents=True)
    (folder / "nf4_triton.ipynb").write_bytes(helpers.NOTEBOOK.read_bytes())
    latest = json.loads((ROOT / "results" / "runs.json").read_text())[-1]
    for path in (ROOT / "results").glob(f"{blocks.slug(latest['gpu'])}*"):
        (folder / "results" / path.name).write_bytes(path.read_bytes())
    return folder


def test_a_run_is_taken_in_whole(run):
    """In the place of another GPU's: of that its line stays."""
    before = {"gpu": "Tesla T4", "ratios": {"unsloth": {"mix": 1.2}}}
    (blocks.RESULTS / "runs.json").write_text(json.dumps([before]))
    for name in ("tesla-t4.json", "tesla-t4-race.png"):
        (blocks.RESULTS / name).write_text("")
    race = json.loads(next(run.glob("results/*.json")).read_text())["race"]
    (row,) = [row for row in race if (row["dtype"], row["who"]) == ("mix", "unsloth")]
    row["ratio"] = 98.76  # of this run alone, like the output
    edit_record(run, race=race)
    output = nbformat.v4.new_output("stream", text="as this run says")
    edit_notebook(run, outputs=[output])
    record.take(run)
    record.write_blocks()
    shown = blocks.shown_record()
    assert shown["race"] == race
    assert [each["gpu"] for each in blocks.stored("runs")] == ["Tesla T4", shown["gpu"]]
    names = {path.name for path in (run / "results").iterdir()}
    assert {path.name for path in blocks.RESULTS.iterdir()} == {*names, "runs.json"}
    notebook = nbformat.read(record.ROOT / "nf4_triton.ipynb", as_version=4)
    assert record.code_cells(notebook)[3].outputs == [output]
    for text in (nbformat.writes(notebook), (record.ROOT / "README.md").read_text()):
        assert " 98.76 |" in text
        assert "range of 2 runs" not in text, "one of them is of another GPU"


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


def add_a_cell(run):
    notebook = nbformat.read(run / "nf4_triton.ipynb", as_version=4)
    notebook.cells.insert(3, nbformat.v4.new_code_cell("# a comment", execution_count=1))
    nbformat.write(notebook, run / "nf4_triton.ipynb")


REFUSED = {  # what is wrong with a run: (how, the words that are said)
    "a cell more": (add_a_cell, "code differs"),
    "another notebook's": (lambda run: edit_notebook(run, source="x = 1"), "code differs"),
    "a cell that was not run": (lambda run: edit_notebook(run, execution_count=None), "not run"),
    "a cell that failed": (lambda run: edit_notebook(run, outputs=[ERROR]), "failed"),
    "wrong bits": (lambda run: edit_record(run, exact={"checked": 9, "differing": 1}), "differ"),
    "no race": (lambda run: edit_record(run, race=[]), "lacks race"),
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
    assert not list(blocks.RESULTS.iterdir())


def test_the_record_stays_valid_after_a_comment_and_says_what_to_run_after_code(project):
    path = project / "nf4_triton.ipynb"
    notebook = nbformat.read(path, as_version=4)
    for cell in record.code_cells(notebook):
        cell.source += "\n\n# a comment"
    nbformat.write(notebook, path)
    record.main(["check"])
    record.code_cells(notebook)[-1].source += "\nprint()"
    nbformat.write(notebook, path)
    with pytest.raises(SystemExit, match="code cells differ.*run the notebook.*record.py run"):
        record.main(["check"])


def test_a_run_on_a_t4_takes_the_place_of_the_estimate(run):
    t4 = json.loads((ROOT / "results" / "t4.json").read_text())
    t4["record"]["host_us"]["ours"] += 1  # of another GPU's host
    (blocks.RESULTS / "t4.json").write_text(json.dumps(t4))
    edit_record(run, gpu="Tesla T4")
    name = next(run.glob("results/*.json")).stem
    for path in (run / "results").iterdir():
        path.rename(path.with_name(path.name.replace(name, "tesla-t4")))
    record.main([str(run)])
    record.main(["check"])
    readme = (record.ROOT / "README.md").read_text()
    assert "**Tesla T4, " in readme and "No time has been measured" not in readme


def test_a_run_without_the_three_launches_is_taken_in_and_asks_for_no_estimate(run):
    (blocks.RESULTS / "t4.json").write_bytes((ROOT / "results" / "t4.json").read_bytes())
    race = json.loads(next(run.glob("results/*.json")).read_text())["race"]
    edit_record(run, race=[row for row in race if row["who"] != "three_launches"])
    record.main([str(run)])
    record.main(["check"])


def test_an_estimate_of_another_run_than_the_one_shown_is_noticed(project):
    for path in (ROOT / "results").glob("*.json"):
        (project / "results" / path.name).write_bytes(path.read_bytes())
    t4 = blocks.stored("t4")
    assert t4["record"]["host_us"] == record.host_us(blocks.shown_record()), "run t4.py estimate"
    t4["record"]["host_us"]["ours"] += 1
    (project / "results" / "t4.json").write_text(json.dumps(t4))
    with pytest.raises(SystemExit, match="another run: run tools/t4.py estimate"):
        record.check()


# How it is installed, run, tested and used.

MISSING = "missing"  # in the place of a version
PINNED = ("torch", "triton", "numpy")  # where pip runs, it gets the versions at hand of these, too
CASES = {  # what is installed: (versions, GPUs; None without a driver; what else pip is asked for)
    "nothing is missing": ({}, 0, []),
    "bitsandbytes on Colab": (
        {"bitsandbytes": MISSING, "unsloth": MISSING, "torch": "2.11.0+cu128"},
        1,
        ["bitsandbytes>=0.50", "unsloth", "torch==2.11.0+cu128"],
    ),
    "unsloth, which wants a GPU": ({"unsloth": MISSING}, None, []),
    "torch without a GPU": (
        {"torch": MISSING},
        None,
        ["torch==2.13.0", "--extra-index-url=https://download.pytorch.org/whl/cpu"],
    ),
    "NGC's torch": ({"torch": "2.9.0a0+nv25.9", "unsloth": "2026.10.9"}, 1, []),
    "too old a torch": ({"torch": "2.8.0"}, 0, ["torch>=2.9", "torch==2.8.0"]),
    "a package that half an install left": ({"tqdm": None}, 0, ["tqdm"]),
}
FAILED = subprocess.CompletedProcess([], 1, stderr="WARNING: slow\nERROR: no match for x\nnotice")


def driver_of(n_gpus):
    """Stands for what ctypes finds of CUDA's driver; None: it finds none."""
    if n_gpus is None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    def count(reference):
        reference._obj.value = n_gpus

    return mock.Mock(cuDeviceGetCount=count)


@contextlib.contextmanager
def machine(versions, n_gpus):
    """There these versions are installed, the others are those at hand; gives the stand-in of pip.

    Its nvidia-smi is missing, as in many a container.
    """
    at_hand = importlib.metadata.version

    def version(package):
        found = versions[package] if package in versions else at_hand(package)
        if found == MISSING:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    with (
        mock.patch("importlib.metadata.version", version),
        mock.patch("ctypes.CDLL", lambda name: driver_of(n_gpus)),
        mock.patch("shutil.which", return_value=None),
        mock.patch("subprocess.run", return_value=FAILED) as pip,
    ):
        yield pip


def install():
    """Runs the cell up to where torch is imported; gives its names."""
    names = {}
    exec(cell_named("install").source.split("\nimport torch\n")[0], names)
    return names


@pytest.mark.parametrize("case", CASES)
def test_pip_gets_what_is_missing_and_moves_nothing_else(case):
    versions, n_gpus, asked = CASES[case]
    with machine(versions, n_gpus) as pip:
        if not asked:
            install()
            assert not pip.called
            return
        with pytest.raises(RuntimeError, match="^ERROR: no match for x\npip failed .no network"):
            install()
    (command,) = pip.call_args[0]
    at_hand = [name for name in PINNED if name not in versions]
    pins = [f"{name}=={importlib.metadata.version(name)}" for name in at_hand]
    assert command[:6] == [sys.executable, "-m", "pip", "install", "-qq", "--retries=1"]
    assert sorted(command[6:]) == sorted(asked + pins)


def test_without_pip_a_sentence_says_so():
    with machine({"tqdm": MISSING, "pip": MISSING}, None) as pip:
        with pytest.raises(RuntimeError, match="has no pip: run .* -m ensurepip, then again"):
            install()
    assert not pip.called


def test_a_gpu_too_old_for_triton_is_named():
    with machine({"unsloth": "2026.10.9"}, 1):
        names = install()
    p100 = {"get_device_capability": lambda: (6, 0), "get_device_name": lambda: "Tesla P100"}
    with mock.patch.multiple("torch.cuda", is_available=lambda: True, **p100):
        with mock.patch.dict("os.environ"), pytest.raises(RuntimeError, match="P100 is too old"):
            exec("import torch" + cell_named("install").source.split("\nimport torch")[1], names)


def test_requirements_are_those_of_the_install_cell():
    with machine({}, None):
        names = install()
    listed = (ROOT / "requirements.txt").read_text().splitlines()
    assert set(listed) == set(names["PACKAGES"])


def readme_command(heading):
    """The README's shell lines below a heading that begins so."""
    text = (ROOT / "README.md").read_text()
    return re.search(rf"## {heading}.*?```bash\n(.*?)\n```", text, re.S)[1]


def test_ci_runs_the_readmes_test_command():
    done = subprocess.run(["bash", ".ci/run", "--print"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == readme_command("Test")


USE = """
import sys
sys.modules.update(dict.fromkeys(("pandas", "peft", "IPython", "matplotlib", "tqdm")))  # not there
import nf4_triton, torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
weight, state = quantize_4bit(torch.randn(64, 64).half(), quant_type="nf4")
assert torch.equal(nf4_triton.dequantize_nf4(weight, state), dequantize_4bit(weight, state))
print(nf4_triton.your_dequantize_nf4.__doc__)
"""


@pytest.mark.skipif(importlib.util.find_spec("nbdev") is None, reason="needs nbdev")
def test_the_readmes_line_makes_a_module_that_needs_torch_triton_and_bitsandbytes_alone(tmp_path):
    line = re.search(r'python -c "(.*?)"', readme_command("Use"))[1]
    line = line.replace("'nf4_triton.ipynb', '.'", f"{str(helpers.NOTEBOOK)!r}, {str(tmp_path)!r}")
    subprocess.run([sys.executable, "-c", line], cwd=tmp_path, check=True, capture_output=True)
    used = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, capture_output=True, text=True)
    assert "The dequantized weight" in used.stdout, used.stderr
