"""Takes a run of the notebook in, and writes the generated blocks of the notebook and the README.

    .venv/bin/python tools/record.py run/     takes in the run that README's commands left in run/
    .venv/bin/python tools/record.py          the blocks alone, from what stands in results/
    .venv/bin/python tools/record.py check    whether outputs and record are of the code as it is

Where anything speaks against a run, it is said, and nothing changes.
"""

import hashlib
import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import blocks
import nbformat
from t4 import host_us

ROOT = Path(__file__).resolve().parent.parent
FIELDS = ("gpu", "capability", "date", "cpu", "cores", "versions", "exact", "kernels", "official")
FIELDS += ("race", "compile", "memory", "score", "seconds")
PROGRESS = re.compile(r"\s*(race:.*)?", re.S)  # bars that have come to their end
TO_RUN = "run the notebook on a GPU (README, Run it), then tools/record.py run/"


def write_blocks():
    found = blocks.generated()
    notebook = nbformat.read(ROOT / "nf4_triton.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = blocks.with_blocks(cell.source, found)
    files = {ROOT / "nf4_triton.ipynb": nbformat.writes(notebook) + "\n"}
    files[ROOT / "README.md"] = blocks.with_blocks((ROOT / "README.md").read_text(), found)
    replace(files)


def replace(files):
    """Writes {path: text or bytes}, all or nothing: first beside each file, then in its place."""
    beside = {path: path.with_name(path.name + ".tmp") for path in files}
    for path, value in files.items():
        beside[path].write_bytes(value.encode() if isinstance(value, str) else value)
    for path in files:
        beside[path].replace(path)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def code_hash(notebook):
    """Says which code the outputs are of, cell by cell; comments and empty lines do not count."""
    lines = []
    for cell in code_cells(notebook):
        source = cell.source.splitlines()
        for token in tokenize.generate_tokens(io.StringIO(cell.source).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                source[row - 1] = source[row - 1][:column]
        lines += [line.rstrip() for line in source if line.strip()]
        lines.append("# the end of a cell")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def check():
    """Ends with a sentence unless outputs and record are of the code as it stands."""
    notebook = nbformat.read(ROOT / "nf4_triton.ipynb", as_version=4)
    if notebook.metadata.get("code") != code_hash(notebook):
        raise SystemExit(f"code cells differ from those whose outputs and record stand: {TO_RUN}")
    shown, t4 = blocks.shown_record(), blocks.stored("t4")
    # A T4's own run needs no estimate, and none is made without the three launches: it stays.
    is_basis = shown and "T4" not in shown["gpu"] and blocks.of_race(shown, "three_launches")
    if t4 and is_basis and t4["record"]["host_us"] != host_us(shown):
        raise SystemExit("the T4's estimate is of another run: run tools/t4.py estimate")
    print("outputs and record are of the code as it stands")


def objections(record, executed, notebook, pictures):
    """A sentence for all that speaks against taking this run in."""
    if code_hash(executed) != code_hash(notebook):
        yield "its code differs from the repository's: run the notebook again"
    for cell in code_cells(executed):
        errors = [output for output in cell.outputs if output.output_type == "error"]
        if errors or not cell.execution_count:
            yield f"this cell was not run, or failed: {cell.source.splitlines()[0]}"
    lacking = [field for field in FIELDS if not record.get(field)]
    if lacking:
        yield f"the record lacks {', '.join(lacking)}"
        return
    if record["exact"]["differing"]:
        yield "{differing} of {checked} weights differ".format(**record["exact"])
    if set(blocks.of_race(record, "unsloth")) != set(blocks.DTYPES):
        yield "there is no race against today's Unsloth in fp16, bf16 and mix"
    for picture in pictures:
        if not picture.exists():
            yield f"there is no picture {picture.name}"


def take(folder):
    paths = list((folder / "results").glob("*.json"))
    if len(paths) != 1 or not (folder / "nf4_triton.ipynb").exists():
        raise SystemExit(f"expected nf4_triton.ipynb and one results/*.json in {folder}: {TO_RUN}")
    try:
        record = json.loads(paths[0].read_text())
        executed = nbformat.read(folder / "nf4_triton.ipynb", as_version=4)
    except ValueError as error:
        raise SystemExit(f"the run in {folder} cannot be read: {error}") from None
    notebook = nbformat.read(ROOT / "nf4_triton.ipynb", as_version=4)
    pictures = [paths[0].with_name(f"{paths[0].stem}-{name}.png") for name in ("calls", "race")]
    wrong = list(objections(record, executed, notebook, pictures))
    if wrong:
        raise SystemExit("\n".join([*wrong, "nothing was taken in"]))
    for cell, ran in zip(code_cells(notebook), code_cells(executed), strict=True):
        shown = [each for each in ran.outputs if not PROGRESS.fullmatch(each.get("text", "x"))]
        cell.outputs, cell.execution_count = shown, ran.execution_count
    ask = ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(ask, capture_output=True, text=True).stdout.strip() or None
    run = {name: record[name] for name in ("gpu", "cpu", "date")} | {"commit": commit}
    run["ratios"] = {}
    for who in blocks.BASELINES:
        if ratios := blocks.of_race(record, who):
            run["ratios"][who] = ratios
    runs = [*(blocks.stored("runs") or []), run]
    files = {blocks.RESULTS / "runs.json": json.dumps(runs, indent=1) + "\n"}
    for path in (paths[0], *pictures):
        files[blocks.RESULTS / path.name] = path.read_bytes()
    notebook.metadata["code"] = code_hash(notebook)
    files[ROOT / "nf4_triton.ipynb"] = nbformat.writes(notebook) + "\n"
    replace(files)
    for listed in runs:
        for old in blocks.RESULTS.glob(f"{blocks.slug(listed['gpu'])}*"):
            if old not in files:  # another GPU's: its ratios stand in runs.json
                old.unlink()
    print(f"taken in: {record['gpu']}, {record['date']}; {len(runs)} runs are listed")


def main(arguments):
    match arguments:
        case ["check"]:
            check()
        case []:
            write_blocks()
        case [folder]:
            take(Path(folder).resolve())
            write_blocks()
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
