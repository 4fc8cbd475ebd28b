"""Takes measurements into results/record.json, and writes what notebook and README say of them.

    .venv/bin/python tools/record.py run/         takes in the run that README's commands left there
    .venv/bin/python tools/record.py FILE.json    takes in what a tool or `pytest --tally` wrote
    .venv/bin/python tools/record.py              writes the blocks alone
    .venv/bin/python tools/record.py check        says whether all of it is of the present code

An entry is {kind, gpu, host, date, code, versions, data}, and `code` is the hash of the code that
was measured. Only entries of the present code are shown. A block lies between <!-- NAME:start -->
and <!-- NAME:end -->. What speaks against a measurement is said, and then nothing changes.
"""

import json
import re
import sys
from pathlib import Path

import blocks
import nbformat
import shared

KEYS = ("kind", "gpu", "host", "date", "code", "versions", "data")
OF_RUN = ("kernels", "official", "race", "compared", "seconds")  # what of RECORD is kept
PROGRESS = re.compile(r"\s*(rounds:.*)?", re.S)  # progress bars that ended


def read_json(path):
    """Return the file's content, or end with a sentence."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be read: {error}\nNothing was changed.") from None


def read_entries():
    """Return the record's entries, or end with a sentence."""
    path = shared.ROOT / "results" / "record.json"
    return read_json(path) if path.exists() else []


def read_run(folder):
    """Return (entry, executed notebook) of the run in this folder."""
    paths = list((folder / "results").glob("*.json"))
    if len(paths) != 1 or not (folder / "nf4_triton.ipynb").exists():
        expected = f"expected nf4_triton.ipynb and one results/*.json in {folder}"
        raise SystemExit(f"{expected}: {shared.COMMANDS['run']}")
    record = read_json(paths[0])
    executed = nbformat.reads(json.dumps(read_json(folder / "nf4_triton.ipynb")), as_version=4)
    entry = {"kind": "run", "code": shared.code_of("run", executed)}
    entry |= {name: record[name] for name in KEYS if name in record}
    entry["data"] = {name: record[name] for name in OF_RUN if name in record}
    return {name: entry[name] for name in KEYS if name in entry}, executed


def objections(entry, executed):
    """Yield a sentence for each thing that speaks against taking this entry in.

    executed  a run's notebook, None for other kinds
    """
    kind = entry.get("kind")
    if kind not in shared.FILES or (kind == "run" and executed is None):
        yield f"expected the folder of a run, or an entry of a tool, got the kind {kind!r}"
        return
    lacking = [name for name in ("host", "date", "code", "versions") if not entry.get(name)]
    lacking += [name for name in ("gpu", "data") if name not in entry]
    if kind == "run":
        lacking += [name for name in OF_RUN if not entry["data"].get(name)]
    if lacking:
        yield f"it lacks {', '.join(lacking)}: {shared.COMMANDS[kind]}"
        return
    if entry["code"] != shared.code_of(kind):
        yield f"its code differs from the repository's: {shared.COMMANDS[kind]}"
        return
    if kind != "machine code" and not entry["gpu"]:
        yield f"it was made without a GPU: {shared.COMMANDS[kind]}"
    if kind in ("run", "rehearsal"):
        n_differing = sum(row["differing"] for row in entry["data"]["compared"])
        if n_differing:
            yield f"the bits of {n_differing:,} weights differ from bitsandbytes'"
    if kind == "run":
        yield from objections_to_run(entry, executed)


def objections_to_run(entry, executed):
    """Yield a sentence for each thing in the executed notebook that speaks against the run."""
    for cell in shared.code_cells(executed):
        title = cell.source.splitlines()[0]
        if any(output.output_type == "error" for output in cell.outputs):
            yield f"this cell failed: {title}"
        elif not cell.execution_count:
            yield f"this cell was not run: {title}"
    raced = {row["dtype"] for row in entry["data"]["race"] if row["contender"] == "Unsloth"}
    if raced != {"fp16", "bf16"}:
        yield "there is no race against Unsloth in fp16 and bf16"
    elif lacking := not_shown(entry, executed):
        yield f"its outputs do not show the tables of its record: {lacking[0]}"


def not_shown(run, notebook):
    """Return the captions of the run's tables that are not among the notebook's outputs."""
    outputs = [output for cell in shared.code_cells(notebook) for output in cell.outputs]
    shown = [output.data.get("text/markdown", "") for output in outputs if "data" in output]
    shown = {squeezed(text) for text in shown}
    missing = [table for table in blocks.tables(run) if squeezed(table) not in shown]
    return [table.splitlines()[0] for table in missing]


def squeezed(table):
    """Return the table without what only sets its columns' widths."""
    return re.sub(r" +|--+", " ", table)


def take(path):
    """Take in a run's folder or an entry's file, and write the blocks."""
    if path.is_dir():
        entry, executed = read_run(path)
    else:
        entry, executed = read_json(path), None
    if not isinstance(entry, dict):
        raise SystemExit(f"expected an entry in {path}, got {type(entry).__name__}")
    wrong = list(objections(entry, executed))
    if wrong:
        raise SystemExit("\n".join([f"{path} was not taken in:", *wrong]))
    others = [each for each in read_entries() if each != entry]  # a run counts once
    stale = [each for each in others if each["kind"] == entry["kind"] and not is_current(each)]
    entries = [each for each in others if each not in stale] + [entry]
    notebook = nbformat.read(shared.NOTEBOOK, as_version=4)
    if executed:
        for cell, ran in zip(shared.code_cells(notebook), shared.code_cells(executed), strict=True):
            outputs = [out for out in ran.outputs if not PROGRESS.fullmatch(out.get("text", "x"))]
            cell.outputs, cell.execution_count = outputs, ran.execution_count
        notebook.metadata["code"] = entry["code"]
    save(notebook, entries)
    shared.write(shared.ROOT / "results" / "record.json", entries)
    print(f"taken in: {entry['kind']}, {entry['date']}; dropped, of other code: {len(stale)}")


def is_current(entry):
    return entry.get("code") == shared.code_of(entry["kind"])


def save(notebook, entries):
    """Write the notebook and README with the blocks of these entries."""
    found = blocks.generated(entries)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = blocks.with_blocks(cell.source, found)
    shared.write(shared.NOTEBOOK, nbformat.writes(notebook) + "\n")
    readme = shared.ROOT / "README.md"
    shared.write(readme, blocks.with_blocks(readme.read_text(encoding="utf-8"), found))


def faults():
    """Yield a sentence, with what to do, for all that is not of the present code."""
    entries = read_entries()
    for kind, command in shared.COMMANDS.items():
        stale = [each for each in entries if each["kind"] == kind and not is_current(each)]
        for entry in stale:
            origin = f"{entry.get('gpu') or 'no GPU'}, {entry.get('date')}"
            yield f"{kind}: an entry ({origin}) is of other code: {command}"
        if not stale and not shared.current(kind, entries):
            yield f"{kind}: there is no entry: {command}"
    notebook = nbformat.read(shared.NOTEBOOK, as_version=4)
    if notebook.metadata.get("code") != shared.code_of("run", notebook):
        yield f"the notebook's outputs are of other code: {shared.COMMANDS['run']}"
    runs = shared.current("run", entries)
    if runs and (missing := not_shown(runs[-1], notebook)):
        yield f"the notebook's outputs do not show {missing[0]}: {shared.COMMANDS['run']}"
    yield from stale_blocks(notebook, entries)


def stale_blocks(notebook, entries):
    """Yield a sentence for each text that does not say what these entries say."""
    found = blocks.generated(entries)
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    texts = {"the notebook": texts, "README.md": [(shared.ROOT / "README.md").read_text("utf-8")]}
    for name, parts in texts.items():
        if any(blocks.with_blocks(part, found) != part for part in parts):
            yield f"{name} does not say what the record says: run tools/record.py"


def main(arguments):
    match arguments:
        case ["check"]:
            found = list(faults())
            if found:
                raise SystemExit("\n".join(found))
            print("the notebook's outputs and the record are of the present code")
        case []:
            notebook = nbformat.read(shared.NOTEBOOK, as_version=4)
            save(notebook, read_entries())
        case [path]:
            take(Path(path).resolve())
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        again = " ".join(["tools/record.py", *sys.argv[1:]])
        raise SystemExit(f"interrupted, and the record is as it was: run {again} again") from None
