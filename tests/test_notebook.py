"""The notebook as a document: it runs without a GPU, and what it states is what the record holds."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import notebook
import pytest
import torch

ROOT = notebook.ROOT
sys.path.insert(0, str(ROOT / "results"))
import record as recorder  # noqa: E402

CODE = [(i, cell) for i, cell in enumerate(notebook.cells()) if cell.cell_type == "code"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU results/record.py executes the notebook")
def test_runs_from_top_to_bottom_without_a_gpu(tmp_path):
    subprocess.run([sys.executable, ROOT / "results" / "record.py", "execute", tmp_path], check=True, timeout=600)
    executed = nbformat.read(tmp_path / "nf4_triton.ipynb", as_version=4)
    outputs = [output for cell in executed.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert "no speed is claimed" in text
    assert re.search(r"CPU mode: [\d,]+ weights checked through Triton's interpreter, 0 differ", text)
    assert not (tmp_path / "results").exists(), "the CPU mode must not leave a record"


def test_requirements_are_the_install_cell():
    source = next(cell.source for _, cell in CODE if "PACKAGES = " in cell.source)
    packages = ast.literal_eval(re.search(r"PACKAGES = (\[.*?\])", source, re.S).group(1))
    assert packages == (ROOT / "requirements.txt").read_text().split()
    imported = {
        line.split()[1].split(".")[0]
        for _, s in notebook.exports()
        for line in s.splitlines()
        if re.match(r"(from|import) ", line)
    }
    assert imported - set(sys.stdlib_module_names) <= set(packages)
    tests = (ROOT / "tests" / "requirements.txt").read_text().split("\n")
    assert set(packages) - {"torch", "unsloth"} <= set(tests)


def test_install_cell_is_silent_where_all_is_present(monkeypatch, capfd):
    source = next(cell.source for _, cell in CODE if "PACKAGES = " in cell.source)
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("subprocess.check_call", lambda *_: pytest.fail("pip was called"))
    exec(compile(source, "install cell", "exec"), {})
    assert capfd.readouterr() == ("", "")


def test_install_cell_installs_only_what_is_missing(monkeypatch):
    source = next(cell.source for _, cell in CODE if "PACKAGES = " in cell.source)
    for gpu, missing, expected in (
        (True, {"bitsandbytes", "unsloth"}, [["bitsandbytes", "unsloth"]]),
        (False, {"bitsandbytes", "unsloth"}, [["bitsandbytes"]]),
        (
            False,
            {"torch", "peft"},
            [["torch==2.13.0", "--retries=1", "--extra-index-url=https://download.pytorch.org/whl/cpu"], ["peft"]],
        ),
    ):
        calls = []
        monkeypatch.setattr("shutil.which", lambda _, gpu=gpu: "nvidia-smi" if gpu else None)
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name, missing=missing: None if name in missing else object()
        )
        monkeypatch.setattr("subprocess.check_call", lambda command: calls.append(command[5:]))
        exec(compile(source, "install cell", "exec"), {})
        assert calls == expected


def test_install_cell_says_what_to_do_without_a_network(monkeypatch):
    source = next(cell.source for _, cell in CODE if "PACKAGES = " in cell.source)

    def fail(command):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "peft" else object())
    monkeypatch.setattr("subprocess.check_call", fail)
    with pytest.raises(RuntimeError, match="pip could not install peft: connect to a network"):
        exec(compile(source, "install cell", "exec"), {})


def test_definition_cells_are_plain_python_for_3_10():
    assert notebook.exports()
    for name, source in notebook.exports():
        tree = ast.parse(source, name, feature_version=(3, 10))
        allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.If, ast.Expr)
        assert all(isinstance(node, allowed) for node in tree.body), name


def test_cells_fit_a_screen_and_follow_prose():
    cells = notebook.cells()
    for i, cell in CODE:
        assert cells[i - 1].cell_type == "markdown", f"cell {i} has no prose above it"
        assert len(cell.source.splitlines()) <= 60, f"cell {i} is longer than a screen"


def test_notebook_is_made_for_a_t4():
    metadata = nbformat.read(notebook.NOTEBOOK, as_version=4).metadata
    assert metadata.accelerator == "GPU" and metadata.colab.gpuType == "T4"
    assert Path(notebook.NOTEBOOK).stat().st_size < 3_000_000


def test_outputs_belong_to_the_code():
    document = nbformat.read(notebook.NOTEBOOK, as_version=4)
    changed = document.metadata.record.get("changed", {})  # {cell id: reason}, stated in the first cell and the README
    assert recorder.changed_since_run(document) == sorted(changed), "a code cell changed: run on a GPU and adopt"
    for cell in document.cells:
        if cell.id in changed:
            assert cell.source.startswith("#| export") and not cell.outputs, "only definitions may be ahead of a run"
    assert all(cell.execution_count for _, cell in CODE)
    assert not [o for _, cell in CODE for o in cell.outputs if o.output_type == "error"]


def test_stated_figures_are_the_recorded_ones():
    texts = {"README.md": (ROOT / "README.md").read_text()}
    texts |= {f"cell {i}": cell.source for i, cell in enumerate(notebook.cells()) if cell.cell_type == "markdown"}
    for name, inside in recorder.stated().items():
        holders = [where for where, text in texts.items() if f"<!-- {name}:start -->" in text]
        assert holders, name
        for where in holders:
            assert recorder.between(texts[where], name, inside) == texts[where], (
                f"{where}: run results/record.py refresh"
            )


def test_no_other_ratio_is_stated():
    known = json.dumps([json.loads(path.read_text()) for path in (ROOT / "results").glob("*.json")])
    numbers = [float(n) for n in re.findall(r"\d+\.\d+", known)]
    for where in [
        (ROOT / "README.md").read_text(),
        *(cell.source for cell in notebook.cells() if cell.cell_type == "markdown"),
    ]:
        for ratio in re.findall(r"(\d+\.\d+)\s*[x×]", where):
            digits = len(ratio.split(".")[1])
            assert any(round(n, digits) == float(ratio) for n in numbers), ratio


@pytest.mark.parametrize("record", recorder.records(), ids=lambda record: record["gpu"])
def test_record_has_its_format(record):
    assert {"gpu", "capability", "date", "versions", "harness", "kernel", "host", "memory"} <= set(record)
    assert {"exact", "compile", "score", "calls", "parts", "launches", "t4_prediction", "section_s"} <= set(record)
    assert {(e["dtypes"], e["baseline"]) for e in record["harness"]} == {
        (d, b) for d in recorder.DTYPES for b in recorder.BASELINES
    }
    for entry in record["harness"]:
        assert len(entry["baseline_s"]) == len(entry["ours_s"]) >= 5
        assert len(entry["baseline_us"]) == len(entry["ours_us"]) == 3
    assert record["exact"]["differing"] == 0 and record["memory"]["peak_extra_bytes"] == 0
    assert record["memory"]["run_gpu_bytes"] < 15e9 and record["memory"]["run_host_bytes"] < 12e9
    assert all(seconds < 15 * 60 for seconds in recorder.t4_run_all_s(record)), "Run all takes too long on a T4"


def test_what_the_gpu_tests_counted():
    tested = next(record for record in recorder.records() if record.get("robustness"))
    found, ptx = tested["robustness"], tested["t4_ptx"]
    assert found["passed"] and found["differing"] == found["sanitizer_errors"] == ptx["differing"] == 0
    assert found["cases"] >= 3000 and found["errors"] >= 40 and found["load_calls"] >= 100_000
    assert ptx["checked"] > 1_000_000_000


def test_the_models_instruction_counts_are_the_disassemblys(nf4):
    for dtype in ("float16", "bfloat16"):
        facts = recorder.load("sm_75")["3.6.0"][dtype]
        assert nf4.T4_INSTRUCTIONS["ours", dtype] == facts["instructions_per_weight"]


def test_a_t4s_record_would_be_stated(monkeypatch):
    """Another GPU's record comes first, with its own numbers, and the sentence that none was measured goes."""
    (record,) = (r for r in recorder.records() if r.get("robustness"))
    other = json.loads(json.dumps(record)) | {"gpu": "Tesla T4", "robustness": None}
    other["harness"][0]["ratio"]["median"] = 1.2345
    runs = {"tesla-t4-runs": [recorder.summary(other)]}
    load = recorder.load
    monkeypatch.setattr(recorder, "load", lambda name: runs.get(name) or load(name))
    monkeypatch.setattr(recorder, "records", lambda: [other, record])
    stated = recorder.stated()
    assert stated["record"].index("Tesla T4") < stated["record"].index(record["gpu"])
    assert "1.23×" in stated["record"] and "No T4 has been measured" not in stated["record"]
    assert "tesla-t4-speedup.png" in stated["pictures"]


def test_ci_runs_the_readme_command():
    readme = (ROOT / "README.md").read_text()
    command = re.search(r"<!-- test -->\n```bash\n(.*?)```", readme, re.S).group(1)
    printed = subprocess.run(
        ["bash", ".ci/run", "--print"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert printed == command and "pytest tests" in command
