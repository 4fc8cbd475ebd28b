"""Runs the notebook, and keeps what is stated true to what was measured.

    python tools/record.py execute DIR    runs the notebook in DIR and leaves it there, on a GPU with its record
    python tools/record.py adopt DIR      takes such a run in: outputs, record, picture, and all that is stated
    python tools/record.py refresh        only states anew what stands in results/

A run of Colab's is adopted the same way: put its notebook (as nf4_triton.ipynb) and its results/ into DIR. Two files
may lie beside them, robustness.json (`pytest tests --tally FILE`) and t4_rehearsal.json (`tools/rehearse_t4.py`).

Stated in markdown are tables, between <!-- record:start --> and <!-- record:end -->, and figures, between their place
in results/, as in <!-- =nvidia-h200/exact/checked -->, and <!-- / -->. What lies between <!-- unmeasured:start --> and
<!-- unmeasured:end --> goes when a T4's run is adopted.
"""

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK, README, RESULTS = ROOT / "nf4_triton.ipynb", ROOT / "README.md", ROOT / "results"
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "original": "the challenge's mix"}
BASELINES = {
    "unsloth_today": "today's Unsloth ({unsloth})",
    "unsloth_puzzle": "the three launches of the challenge's day",
    "peft": "PEFT ({peft})",
}
MEASURED = "gpu capability date versions harness floor kernel formats host call memory launches exact compile score"
FROM_TESTS = "robustness", "t4_rehearsal"  # entries of the record that lie beside a run
FIGURE = re.compile(r"<!-- =(\S+) -->(.*?)<!-- / -->")
UNMEASURED = re.compile(r"<!-- unmeasured:start -->.*?<!-- unmeasured:end -->\n*", re.S)


def run(folder):
    """The notebook, executed in the folder and left there; SystemExit names the cell that fails."""
    import papermill

    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(path) for path in (NOTEBOOK, folder / NOTEBOOK.name, folder)]
    try:
        return papermill.execute_notebook(*paths[:2], cwd=paths[2], kernel_name="python3", coalesce_streams=True)
    except papermill.PapermillExecutionError as error:
        raise SystemExit(f"failed: cell {error.cell_index}: {error.ename}: {error.evalue}") from None


def execute(folder):
    """Runs the notebook and says what came of it."""
    notebook, paths = run(folder), list((folder / "results").glob("*.json"))
    for record in (json.loads(path.read_text()) for path in paths):
        print(f"\n{ratios(record, [summary(record)])}\n\nlaunches are kept: {record['host']['kept']}")
        for dtype, facts in record["compile"].items():
            print(f"torch.compile, {dtype}: {', '.join(f'{name} {value}' for name, value in facts.items())}")
    if not paths:
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
        print(*(o.text for o in outputs if "differ" in o.get("text", "")), sep="", end="No GPU: no speed is claimed.\n")
    print(f"\nexecuted: {folder / NOTEBOOK.name}", *(f"record: {path}" for path in paths))


def slug(gpu):
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower())


def load(name, default=None):
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if default is None or path.exists() else default


def save(name, value):
    (RESULTS / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")


def records():
    """The record of each GPU, a T4's first, then by name."""
    found = [record for record in map(load, (path.stem for path in RESULTS.glob("*.json"))) if "harness" in record]
    return sorted(found, key=lambda record: ("T4" not in record["gpu"], record["gpu"]))


def summary(record):
    """A run in a few figures, for the list of runs."""
    entries = [(entry["baseline"], entry["dtypes"], entry["ratio"]["median"]) for entry in record["harness"]]
    medians = {name: {dtypes: ratio for baseline, dtypes, ratio in entries if baseline == name} for name in BASELINES}
    return {"date": record["date"], "ratios": medians, "host": record["host"], "floor": record["floor"]}


def ratios(record, runs):
    """The last run's medians as a markdown table, each with the least and the greatest of the runs on that GPU."""
    name = record["gpu"] + (f", only rehearsed on {record['rehearsed_on']}" if record.get("rehearsed") else "")
    lines = [f"| **{name}**, {record['date']}: speedup over | {' | '.join(DTYPES.values())} |", "|---|---|---|---|"]
    for baseline, label in BASELINES.items():
        medians = [[run["ratios"][baseline][dtype] for run in runs] for dtype in DTYPES]
        cells = " | ".join(f"**{each[-1]:.2f}** ({min(each):.2f} to {max(each):.2f})" for each in medians)
        lines.append(f"| {label.format(**record['versions'])} | {cells} |")
    lines += ["", "| compared bit for bit | differ | points on this GPU | recorded runs |", "|---|---|---|---|"]
    exact, points = record["exact"], "{total} of {possible}".format(**record["score"])
    return "\n".join([*lines, f"| {exact['checked']:,} | {exact['differing']} | {points} | {len(runs)} |"])


def roads(rows):
    """The decodes that lost, as a markdown table."""
    lines = ["| decode | fp16, µs | bf16, µs | fp16, instructions | bf16, instructions |", "|---|---|---|---|---|"]
    for row in rows:
        facts = [(row[dtype], key) for key in ("us", "sm_75_instructions") for dtype in ("float16", "bfloat16")]
        cells = " | ".join(f"{fact[key]:.1f}" if fact else "" for fact, key in facts)
        lines.append(f"| {row['decode']} | {cells} |")
    return "\n".join(lines)


def figure(found):
    """A figure's mark with what stands at its place in results/, rounded as what it replaces was."""
    name, *keys = found[1].split("/")
    value = load(name)
    for key in keys:
        value = value[int(key)] if isinstance(value, list) else value[key]
    digits = f".{len(found[2].partition('.')[2])}f" if isinstance(value, float) else ""
    return f"<!-- ={found[1]} -->{value if isinstance(value, str) else format(value, ',' + digits)}<!-- / -->"


def restated(text):
    """A markdown text with its tables and figures as they are recorded."""
    found = records()
    tables = {
        "record": "\n\n".join(ratios(record, load(slug(record["gpu"]) + "-runs")) for record in found),
        "roads": roads(load("roads")["rows"]),
    }
    for name, table in tables.items():
        start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
        if start in text:
            text = f"{text.split(start)[0]}{start}\n{table}\n{end}{text.split(end)[1]}"
    measured = any("T4" in record["gpu"] for record in found)
    return FIGURE.sub(figure, UNMEASURED.sub("", text) if measured else text)


def refresh():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = restated(cell.source)
    nbformat.write(notebook, NOTEBOOK)
    README.write_text(restated(README.read_text()))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def code_hashes(notebook):
    """{cell id: hash} of the code cells, comments aside: outputs belong to the code that they were made by."""
    code = {cell.id: re.sub(r"(^|\s+)# .*$", "", cell.source, flags=re.M) for cell in code_cells(notebook)}
    return {name: hashlib.sha256(source.encode()).hexdigest()[:16] for name, source in code.items()}


def missing(executed, notebook, record, name):
    """A sentence for all that speaks against taking this run in."""
    done, cells = code_cells(executed), code_cells(notebook)
    if [cell.source for cell in done] != [cell.source for cell in cells]:
        yield "the executed notebook's code differs from the repository's: run it again"
    unfinished = [c.id for c in done if not c.execution_count or any(o.output_type == "error" for o in c.outputs)]
    if unfinished:
        yield f"these cells were not run, or failed: {', '.join(unfinished)}"
    if lacking := set(MEASURED.split()) - set(record):
        yield f"{name}.json lacks {', '.join(sorted(lacking))}"
    elif name != slug(record["gpu"]):
        yield f"{name}.json is the record of a {record['gpu']}"


def adopt(folder, rehearsed=False):
    """Takes a run in; where something is missing, says what, and changes nothing. `rehearsed` is for a test's copy."""
    found = list((folder / "results").glob("*.json"))
    if len(found) != 1 or not (folder / NOTEBOOK.name).exists():
        raise SystemExit(f"expected {NOTEBOOK.name} and one results/*.json in {folder}: nothing was adopted")
    executed, notebook = (nbformat.read(path, as_version=4) for path in (folder / NOTEBOOK.name, NOTEBOOK))
    record, name = json.loads(found[0].read_text()), found[0].stem
    wrong = list(missing(executed, notebook, record, name))
    wrong += ["it is only a rehearsal"] if record.get("rehearsed") and not rehearsed else []
    if wrong:
        raise SystemExit("\n".join([*wrong, "nothing was adopted"]))
    for cell, done in zip(code_cells(notebook), code_cells(executed)):
        cell.outputs, cell.execution_count = done.outputs, done.execution_count
    notebook.metadata["record"] = {"cells": code_hashes(notebook)}
    nbformat.write(notebook, NOTEBOOK)
    beside = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json") if path.stem in FROM_TESTS}
    known = {entry: facts for entry, facts in load(name, {}).items() if entry in FROM_TESTS}
    save(name, record | known | beside)
    save(f"{name}-runs", [*load(f"{name}-runs", []), summary(record)])
    for picture in found[0].parent.glob(f"{name}*.png"):
        shutil.copy(picture, RESULTS)
    refresh()


if __name__ == "__main__":
    steps = {"execute": (execute, 3), "adopt": (adopt, 3), "refresh": (refresh, 2)}
    step, length = steps.get(sys.argv[1] if sys.argv[1:] else "", (None, 0))
    if len(sys.argv) != length:
        raise SystemExit(__doc__)
    step(*(Path(folder).resolve() for folder in sys.argv[2:]))
