"""The notebook as a document: it runs without a GPU, installs what it must, and states what the record holds."""

import ast
import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import helpers
import nbformat
import pytest
import record
import torch
from bitsandbytes.functional import dequantize_4bit

ROOT = helpers.ROOT
CELLS = {cell.id: cell for cell in helpers.cells()}
CODE = {name: cell.source for name, cell in CELLS.items() if cell.cell_type == "code"}
MARKDOWN = {name: cell.source for name, cell in CELLS.items() if cell.cell_type == "markdown"}
STATED = {**MARKDOWN, "README.md": (ROOT / "README.md").read_text()}


# It runs.


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebook run as the README says, and what that printed."""
    if torch.cuda.is_available():
        pytest.skip("on a GPU this takes minutes: tools/record.py execute")
    folder = tmp_path_factory.mktemp("run")
    command = [sys.executable, ROOT / "tools" / "record.py", "execute", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, nbformat.read(folder / "nf4_triton.ipynb", as_version=4), done


def test_runs_from_top_to_bottom_without_a_gpu(executed):
    folder, notebook, _ = executed
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert "no speed is claimed" in text
    checked, differing = re.search(
        r"CPU mode: ([\d,]+) weights went through the interpreter, (\d+) differ", text
    ).groups()
    assert int(checked.replace(",", "")) > 900_000 and differing == "0"
    assert not (folder / "results").exists(), "the CPU mode must not leave a record"
    assert record.code_hashes(notebook) == record.code_hashes(nbformat.read(helpers.NOTEBOOK, as_version=4))


def test_the_run_command_speaks(executed):
    folder, _, done = executed
    assert re.search(r"Executing: +\d+%", done.stderr)
    assert "CPU mode: " in done.stdout and " 0 differ" in done.stdout and "no speed is claimed" in done.stdout
    assert str(folder / "nf4_triton.ipynb") in done.stdout


def repository(folder, changed=None):
    """A copy of what record.py works on; `changed` is the source of its first code cell."""
    for name in ("tools", "results"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", folder)
    notebook = nbformat.read(helpers.NOTEBOOK, as_version=4)
    if changed:
        next(cell for cell in notebook.cells if cell.cell_type == "code").source = changed
    nbformat.write(notebook, folder / "nf4_triton.ipynb")
    return folder


def test_a_cell_that_fails_is_named(tmp_path):
    copy = repository(tmp_path / "copy", "1 / 0")
    command = [sys.executable, copy / "tools" / "record.py", "execute", tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "failed: cell 2: ZeroDivisionError: division by zero" in done.stderr
    assert "division by zero" in (tmp_path / "run" / "nf4_triton.ipynb").read_text()


# What it installs.


def requirements(path):
    lines = (ROOT / path).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "--"))]


def test_requirements_are_the_install_cells():
    (listed,) = re.findall(r'REQUIREMENTS = "(.*)"', CODE["install"])
    (more,) = re.findall(r"\[\*REQUIREMENTS.split\(\), (.*)\]", CODE["install"])
    assert requirements("requirements.txt") == [*listed.split(), *re.findall(r'"(\w+)"', more)]
    assert set(requirements("requirements.txt")) - {"unsloth", "torch>=2.8"} <= set(
        requirements("tests/requirements.txt")
    )
    names = {re.match(r"\w+", line)[0] for line in requirements("requirements.txt")}
    imported = {
        line.split()[1].split(".")[0]
        for _, source in helpers.exports()
        for line in source.splitlines()
        if re.match(r"(from|import) ", line)
    }
    assert imported - set(sys.stdlib_module_names) <= names


@pytest.fixture
def install(monkeypatch):
    """Runs the install cell where `versions` ({name: version, None: missing}) are not as here; what it asks pip for."""

    def run(versions, gpu=False, status=0):
        real, asked = importlib.metadata.version, []

        def version(name):
            found = versions.get(name, "9999" if name == "unsloth" else real(name))
            if found is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr("shutil.which", lambda _: "nvidia-smi" if gpu else None)
        monkeypatch.setattr("subprocess.call", lambda command: asked.append(command[5:]) or status)
        exec(compile(CODE["install"], "install cell", "exec"), {})
        return asked

    return run


CPU_TORCH = ["torch==2.13.0", "--retries=1", "--extra-index-url=https://download.pytorch.org/whl/cpu"]


def test_install_cell_is_silent_where_all_is_present(install, capfd):
    assert install({}) == install({}, gpu=True) == [] and capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "gpu, missing, expected",
    [
        (True, ("bitsandbytes", "unsloth"), ["bitsandbytes>=0.50", "unsloth"]),
        (False, ("bitsandbytes", "unsloth"), ["bitsandbytes>=0.50"]),
        (False, ("torch", "peft"), [*CPU_TORCH, "peft>=0.15"]),
        (True, ("torch", "tqdm"), ["torch>=2.8", "tqdm"]),
        (False, ("unsloth",), None),
    ],
)
def test_install_cell_installs_only_what_is_missing(install, gpu, missing, expected):
    assert install(dict.fromkeys(missing), gpu) == ([expected] if expected else [])


def test_install_cell_says_what_to_do_without_a_network(install):
    with pytest.raises(RuntimeError, match=r"pip could not install peft>=0\.15: connect to a network"):
        install({"peft": None}, status=1)


@pytest.mark.parametrize("name, old", [("torch", "2.7.1"), ("triton", "3.3.1"), ("bitsandbytes", "0.49.2")])
def test_install_cell_names_what_is_too_old(install, name, old):
    with pytest.raises(RuntimeError, match=rf"{name} {old} is too old: `%pip install '{name}>=.*'`, then restart"):
        install({name: old})


@pytest.mark.parametrize(
    "name, version", [("torch", "2.11.0+cu130"), ("triton", "3.6.0"), ("torch", "2.12.0.dev20261101")]
)
def test_install_cell_takes_colabs_and_newer_versions(install, name, version):
    assert install({name: version}, gpu=True) == []


def test_an_older_card_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla P100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 0))
    names = {"GPU": True, "torch": torch, "importlib": importlib, "subprocess": subprocess}
    with pytest.raises(RuntimeError, match=r"Tesla P100 has capability \(6, 0\); Triton needs 7.0 or newer"):
        exec(compile(CODE["origin"], "origin cell", "exec"), names)


# How it is made.


def test_definition_cells_are_plain_python_for_3_10():
    assert len(helpers.exports("#| export\n")) >= 12
    for name, source in helpers.exports():
        tree = ast.parse(source, name, feature_version=(3, 10))
        allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AugAssign, ast.If)
        assert all(isinstance(node, allowed) for node in tree.body), name


def lines(*names):
    return sum(len(CODE[name].splitlines()) for name in names)


def test_it_is_short():
    names = list(CODE)
    assert len(CELLS) <= 60 and lines(*names) <= 1000
    assert lines(*names[names.index("kernel") : names.index("host-function")]) <= 90, "the kernel's section"
    assert lines(*names[names.index("host-function") : names.index("harness-layers")]) <= 300, "the host's road"
    assert [name for name in names if lines(name) > 60] == [], "longer than a screen"
    words = {name: len(re.sub(r"<!--.*?-->|<.*?>|[#|*·-]", " ", text).split()) for name, text in MARKDOWN.items()}
    assert sum(words.values()) <= 3000
    assert {name: count for name, count in words.items() if count < 15} == {}, "filler"


def test_headings_are_the_sections_in_order():
    headings = re.findall(r"^## (\d+) · ", "\n".join(MARKDOWN.values()), re.M)
    assert headings == [str(n) for n in range(1, 12)]
    anchors = re.findall(r'<a name="([\w-]+)" id="([\w-]+)"></a>', "".join(MARKDOWN.values()))
    assert all(name == same for name, same in anchors)
    assert set(re.findall(r"\]\(#([\w-]+)\)", "".join(MARKDOWN.values()))) <= {name for name, _ in anchors}


def test_notebook_is_made_for_a_t4():
    metadata = nbformat.read(helpers.NOTEBOOK, as_version=4).metadata
    assert metadata.accelerator == "GPU" and metadata.colab.gpuType == "T4"
    assert helpers.NOTEBOOK.stat().st_size < 3_000_000
    attached = {name for cell in CELLS.values() for name in cell.get("attachments", ())}
    assert set(re.findall(r"attachment:([\w.]+)", "".join(MARKDOWN.values()))) == attached == {"warp.png"}


def test_a_comment_may_change_without_a_run_and_code_may_not():
    def hashed(source):
        return record.code_hashes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source, id="a")]))

    assert hashed("x = 1  # one\n# two\ny = 2") == hashed("x = 1\ny = 2  # three")
    assert len({str(hashed(source)) for source in ("x = 1", "x = 2", "#| export\nx = 1", "x = '#1'", "x = '#2'")}) == 5


def test_outputs_belong_to_the_code():
    document = nbformat.read(helpers.NOTEBOOK, as_version=4)
    assert document.metadata.record.cells == record.code_hashes(document), "a code cell changed: run on a GPU and adopt"
    cells = record.code_cells(document)
    assert all(cell.execution_count for cell in cells)
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]


def test_ci_runs_the_readme_command():
    command = re.search(r"<!-- test -->\n```bash\n(.*?)```", STATED["README.md"], re.S).group(1)
    done = subprocess.run(["bash", ".ci/run", "--print"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == command and "pytest tests" in command and command.count("\n") == 1


def test_every_file_is_explained():
    readme = STATED["README.md"]
    programs = [path.name for folder in ("tools", "tests") for path in (ROOT / folder).glob("*.py")]
    unnamed = [name for name in programs if name not in readme and Path(name).stem not in readme]
    assert set(unnamed) <= {"conftest.py", "helpers.py"}
    for folder in ("tools", "tests"):
        for path in (ROOT / folder).glob("*.py"):
            assert path.name == "conftest.py" or ast.get_docstring(ast.parse(path.read_text())), path


def test_the_readmes_use_of_the_module(nf4, device, monkeypatch):
    """Its three lines put ours in the place of bitsandbytes' and Unsloth's functions."""
    modules = {f"unsloth.kernels.{name}": types.ModuleType(name) for name in ("fast_lora", "utils")}
    kernels = types.ModuleType("kernels")
    kernels.__path__, kernels.fast_lora, kernels.utils = [], *modules.values()
    modules |= {"unsloth": types.ModuleType("unsloth"), "unsloth.kernels": kernels, "nf4_triton": nf4}
    modules["unsloth"].kernels = kernels
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("bitsandbytes.functional.dequantize_4bit", dequantize_4bit)
    calls, real = [], nf4.dequantize_nf4
    monkeypatch.setattr(nf4, "dequantize_nf4", lambda *given: calls.append(given) or real(*given))
    (source,) = re.findall(r"```python\n(.*?)```", STATED["README.md"], re.S)
    exec(source, {})
    layer = nf4.bnb_Linear4bit(64, 128).to(device)
    x = torch.randn(16, 64, dtype=torch.float16, device=device, requires_grad=True)
    layer(x).sum().backward()
    assert len(calls) == 1, "bitsandbytes' backward calls ours"
    for module in (kernels.utils, kernels.fast_lora):
        out = module.fast_dequantize(layer.weight, layer.weight.quant_state, out=None, use_global_buffer=True)
        assert nf4.bits_differing(out, dequantize_4bit(layer.weight.data, layer.weight.quant_state)) == 0
        assert module.fast_dequantize(x) is x, "a weight that is not quantized"


# What it states.


def test_stated_figures_are_the_recorded_ones():
    for where, text in STATED.items():
        assert record.restated(text) == text, f"{where}: run tools/record.py refresh"
        assert not re.search(r"^\W*<!-- =", text, re.M), f"{where}: a mark at a line's beginning breaks the paragraph"
    assert len(record.FIGURE.findall("".join(STATED.values()))) > 20
    for mark in ("record", "roads"):
        assert f"<!-- {mark}:start -->" in "".join(STATED.values())


QUOTED = {  # numbers that stand in no record, and where they come from
    "2.516": "bytes a weight, by the format: 1/2 + 1/64 + 2",
    "1.9": "601 GB at the nominal 320 GB/s, seconds",
    "2.5": "601 GB at the 240 GB/s of copies, seconds; the assumed slowness of Colab's host",
    "1.08": "an estimate, section 10", "1.10": "an estimate, section 10", "1.14": "an estimate, section 10",
    "1.18": "an estimate, section 10", "1.35": "an estimate, section 10", "2.9": "an estimate, section 10",
    "8.5": "µs a call on the H200's faster hosts",
    "1.15": "the challenge's bar",
    "3.300": "published: github.com/Talel-bm/Optimized-NF4-dequantization",
    "4.116": "published: github.com/Talel-bm/Optimized-NF4-dequantization",
    "3.911": "published: github.com/huseyincavusbi/unsloth_puzzles",
    "3.10": "Python", "3.13": "Python", "2026.10": "Unsloth", "3.3.1": "Triton", "3.9.0": "Triton", "2.0": "Apache",
}  # fmt: skip


def unmarked(text):
    """The decimal numbers outside of tables and marked figures, of code and of links' targets."""
    text = re.sub(r"<!-- (\w+):start -->(?<!unmeasured:start -->).*?<!-- \1:end -->", " ", text, flags=re.S)
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", record.FIGURE.sub(" ", text), flags=re.S)
    return re.findall(r"(?<![\w.])\d+(?:\.\d+)+", text)


def test_no_other_figure_is_stated():
    found = {number for text in STATED.values() for number in unmarked(text)}
    assert found <= set(QUOTED), f"mark them, or list them with their source: {found - set(QUOTED)}"
    assert unmarked("1.5 times <!-- =a/b -->2.5<!-- / --> `3.5` [x](4.5)") == ["1.5"]
    assert unmarked("<!-- record:start -->\n1.5\n<!-- record:end --> 2.5") == ["2.5"]
    assert unmarked("<!-- unmeasured:start -->\n1.5\n<!-- unmeasured:end -->") == ["1.5"]


@pytest.mark.parametrize("found", record.records(), ids=lambda found: found["gpu"])
def test_record_has_its_format(found):
    assert set(record.MEASURED.split()) <= set(found) and not found.get("rehearsed")
    assert {"python", "torch", "triton", "cuda", "driver", "bitsandbytes", "unsloth"} <= set(found["versions"])
    assert {(e["dtypes"], e["baseline"]) for e in found["harness"]} == {
        (dtypes, baseline) for dtypes in record.DTYPES for baseline in record.BASELINES
    }
    for entry in found["harness"]:
        assert len(entry["baseline_s"]) == len(entry["ours_s"]) >= 5
        assert len(entry["baseline_us"]) == len(entry["ours_us"]) == 3
        ratio = entry["ratio"]
        assert ratio["low"] <= ratio["median"] <= ratio["high"]
    kernels = found["kernel"] + found["formats"]
    assert all(e["ours_us"] > 0 and e["unsloth_today_us"] > 0 and e["ceiling_us"] > 0 for e in kernels)
    formats = " ".join(e["format"] for e in found["formats"])
    for kind in ("50257 x 768", "4097 x 14337", "blocks of 32", "blocks of 128", "blocks of 4096", "plain", "odd"):
        assert kind in formats
    assert {e["dtype"] for e in kernels} == {"float16", "bfloat16", "float32"}
    assert found["exact"]["differing"] == 0 and found["exact"]["checked"] > 1_000_000_000
    assert found["memory"]["peak_extra_bytes"] == 0 and found["launches"] == ["_dequantize_nf4_kernel"]
    assert all(entry["recompiles"] == entry["graph_breaks"] == 0 for entry in found["compile"].values())
    assert found["host"]["kept"] and found["host"]["ours_us"] < 0.5 * found["host"]["unsloth_today_us"], "the claim"
    assert {label: set(floor) for label, floor in found["floor"].items()} == dict.fromkeys(
        ("float16", "bfloat16"), {"least", "median"}
    )
    assert found["score"]["total"] == sum(row["points"] for row in found["score"]["rows"].values())
    assert record.load(record.slug(found["gpu"]) + "-runs")[-1] == record.summary(found)


def test_results_are_data():
    assert {path.suffix for path in (ROOT / "results").iterdir()} == {".json", ".png"}
    pictures = {f"{record.slug(found['gpu'])}-call.png" for found in record.records()}
    assert {path.name for path in (ROOT / "results").glob("*.png")} == pictures


def test_what_the_gpu_tests_counted():
    found = next(entry["robustness"] for entry in record.records() if entry.get("robustness"))
    assert found["passed"] and found["differing"] == found["sanitizer_errors"] == found["load_growth_bytes"] == 0
    assert found["cases"] >= 3000 and found["errors"] >= 40 and found["load_calls"] >= 100_000
    assert found["second_gpu_ours_us"] <= 0.6 * found["second_gpu_unsloth_us"]


# A run is taken in.


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the repository on which record.py works, and in `run` what a T4's run would leave."""
    folder = repository(tmp_path / "copy")
    names = {"NOTEBOOK": "nf4_triton.ipynb", "README": "README.md", "RESULTS": "results"}
    for name, path in names.items():
        monkeypatch.setattr(record, name, folder / path)
    run, source = tmp_path / "run", record.load("nvidia-h200")
    (run / "results").mkdir(parents=True)
    notebook = nbformat.read(helpers.NOTEBOOK, as_version=4)
    for cell in record.code_cells(notebook):
        cell.execution_count, cell.outputs = 1, [nbformat.v4.new_output("stream", text="a T4's")]
    nbformat.write(notebook, run / "nf4_triton.ipynb")
    for entry in record.FROM_TESTS:
        source.pop(entry, None)
    source |= {"gpu": "Tesla T4", "capability": [7, 5]}
    source["harness"][0]["ratio"]["median"] = 1.2345
    (run / "results" / "tesla-t4.json").write_text(json.dumps(source))
    (run / "results" / "tesla-t4-call.png").write_bytes(b"png")
    return types.SimpleNamespace(folder=folder, run=run, record=source)


def everything(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_t4s_run_is_adopted(copy):
    """The T4 comes first, everywhere, and "no T4 has been measured" is gone; the other GPU's record stays."""
    record.adopt(copy.run)
    notebook = nbformat.read(record.NOTEBOOK, as_version=4)
    text = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for stated in (text, record.README.read_text()):
        assert stated.index("**Tesla T4**") < stated.index("**NVIDIA H200**")
        assert "**1.23** (1.23 to 1.23)" in stated and "| 14 of 14 | 1 |" in stated
        assert "unmeasured" not in stated and "no time has been measured" not in stated
        assert record.restated(stated) == stated
    assert not {"1.10", "1.35", "3.300"} & set(unmarked(text)), "what was expected goes with what was measured"
    assert (record.RESULTS / "tesla-t4-call.png").exists() and (record.RESULTS / "nvidia-h200-call.png").exists()
    assert all(cell.outputs[0].text == "a T4's" for cell in record.code_cells(notebook))
    assert notebook.metadata.record.cells == record.code_hashes(notebook)
    assert "Run it on a T4" in text and "Rehearsed." in text
    assert [found["gpu"] for found in record.records()] == ["Tesla T4", "NVIDIA H200"]


def test_a_second_run_lengthens_the_list(copy):
    (copy.run / "robustness.json").write_text('{"cases": 5}')
    record.adopt(copy.run)
    copy.record["harness"][0]["ratio"]["median"] = 1.5
    (copy.run / "results" / "tesla-t4.json").write_text(json.dumps(copy.record))
    (copy.run / "robustness.json").unlink()
    record.adopt(copy.run)
    assert len(record.load("tesla-t4-runs")) == 2 and record.load("tesla-t4")["robustness"] == {"cases": 5}
    assert "**1.50** (1.23 to 1.50)" in record.README.read_text() and "| 14 of 14 | 2 |" in record.README.read_text()


def test_a_rehearsal_is_adopted_only_where_that_is_wanted(copy):
    copy.record |= {"rehearsed": True, "rehearsed_on": "NVIDIA H200"}
    (copy.run / "results" / "tesla-t4.json").write_text(json.dumps(copy.record))
    before = everything(copy.folder)
    with pytest.raises(SystemExit, match="it is only a rehearsal\nnothing was adopted"):
        record.adopt(copy.run)
    assert everything(copy.folder) == before
    record.adopt(copy.run, rehearsed=True)
    assert "**Tesla T4, only rehearsed on NVIDIA H200**" in record.README.read_text()


WRONG = {
    "no notebook": (lambda run: (run / "nf4_triton.ipynb").unlink(), "expected nf4_triton.ipynb and one results"),
    "no record": (
        lambda run: (run / "results" / "tesla-t4.json").unlink(),
        "expected nf4_triton.ipynb and one results",
    ),
    "two records": (
        lambda run: (run / "results" / "a.json").write_text("{}"),
        "expected nf4_triton.ipynb and one results",
    ),
    "not a record": (
        lambda run: (run / "results" / "tesla-t4.json").write_text("{}"),
        "tesla-t4.json lacks call, capa",
    ),
    "half a record": (lambda run: edit_record(run, lambda found: found.pop("floor")), "tesla-t4.json lacks floor"),
    "another's": (
        lambda run: edit_record(run, lambda found: found.update(gpu="NVIDIA L4")),
        "the record of a NVIDIA L4",
    ),
    "other code": (lambda run: edit_cell(run, source="pass"), "code differs from the repository's"),
    "cells missing": (lambda run: drop_last_cells(run), "code differs from the repository's"),
    "a failed cell": (lambda run: edit_cell(run, outputs=[nbformat.v4.new_output("error")]), "or failed: install"),
    "not run": (lambda run: edit_cell(run, execution_count=None), "not run, or failed: install"),
}


def edit_record(run, change):
    path = run / "results" / "tesla-t4.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def edit_cell(run, **fields):
    notebook = nbformat.read(run / "nf4_triton.ipynb", as_version=4)
    record.code_cells(notebook)[0].update(fields)
    nbformat.write(notebook, run / "nf4_triton.ipynb")


def drop_last_cells(run):
    notebook = nbformat.read(run / "nf4_triton.ipynb", as_version=4)
    notebook.cells = notebook.cells[:-4]
    nbformat.write(notebook, run / "nf4_triton.ipynb")


@pytest.mark.parametrize("case", WRONG)
def test_an_incomplete_or_foreign_run_changes_nothing(copy, case):
    spoil, message = WRONG[case]
    spoil(copy.run)
    before = everything(copy.folder)
    with pytest.raises(SystemExit, match=f"(?s){message}.*nothing was adopted"):
        record.adopt(copy.run)
    assert everything(copy.folder) == before
