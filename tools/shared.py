"""What tests and tools share: the notebook's definition cells as a module; files written whole."""

import hashlib
import io
import json
import linecache
import os
import re
import sys
import tokenize
import types
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
NOTEBOOK = Path(os.environ.get("NF4_NOTEBOOK", ROOT / "nf4_triton.ipynb"))  # tests/mutants.py
DEFINITION = re.compile(r"(# @title .*\n)?# ?\| ?export")  # how a definition cell begins


def code_cells(notebook=None):
    """A notebook's code cells; by default those of NOTEBOOK."""
    notebook = notebook or nbformat.read(NOTEBOOK, as_version=4)
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


def definitions(name="nf4_triton"):
    """(file name, source) of each definition cell, in order; the file name goes into tracebacks.

    name  the operator's namespace: a module of another name has an operator of its own
    """
    found = []
    for i, cell in enumerate(code_cells()):
        if DEFINITION.match(cell.source):
            source = cell.source.replace("nf4_triton::", f"{name}::")
            source = source.replace("ops.nf4_triton", f"ops.{name}")
            found.append((f"{name}, code cell {i}", source))
    return found


def defining(what, name="nf4_triton"):
    """The source of the one definition cell that defines a function, class or constant."""
    begins = re.compile(rf"^((def|class) {what}\b|{what}\b.* = )", re.M)
    found = [source for _, source in definitions(name) if begins.search(source)]
    if len(found) != 1:
        raise ValueError(f"one definition cell must define {what}, {len(found)} do")
    return found[0]


def load(name="nf4_triton"):
    """A module made of the definition cells."""
    module = sys.modules[name] = types.ModuleType(name)
    for file, source in definitions(name):
        execute(source, file, vars(module))
    return module


def execute(source, file, namespace):
    """Runs the source under a file name of its own: Triton reads kernels through `inspect`."""
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec"), namespace)


def write(files):
    """Writes {path: text, bytes or JSON}, all or nothing: beside each file, then in its place."""
    for path, content in files.items():
        if not isinstance(content, (str, bytes)):
            content = json.dumps(content, indent=1) + "\n"
        content = content.encode() if isinstance(content, str) else content
        path.parent.mkdir(exist_ok=True)
        path.with_name(path.name + ".tmp").write_bytes(content)
    for path in files:
        path.with_name(path.name + ".tmp").replace(path)
        print(f"written: {path}")


def stored(name, folder=None):
    """What results/NAME.json holds; None where it is missing."""
    path = (folder or RESULTS) / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def slug(gpu):
    """As in the names of a record's files."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower())


def shown_record(folder=None):
    """The record of the run that is shown: the latest in runs.json; None where there is none."""
    runs = stored("runs", folder) or []
    return stored(slug(runs[-1]["gpu"]), folder) if runs else None
