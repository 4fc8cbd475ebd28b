"""What tests and tools share: the notebook's cells as a module, and the hash of what was measured.

A cell that a line `#| export...` marks is a definition cell, which tests and tools load:

    #| export          the kernel and the call, which become the module nf4_triton
    #| export-harness  what measures and compares
    #| export-display  tables and plots, which change no figure

The cells before the first of them are the set-up. The others run what was defined.
"""

import ast
import dis
import functools
import hashlib
import importlib
import io
import json
import linecache
import os
import re
import sys
import time
import tokenize
import types
from importlib import metadata
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "nf4_triton.ipynb"
MARK = re.compile(r"^# ?\| ?export(-harness|-display|)\s*$", re.M)
MEASURED = {  # {kind of measurement: (the marks of cells, the files) whose code it measures}
    "run": (("", "-harness", "run"), ()),
    "training": (("",), ("nf4_integrations.py", "tools/training.py")),
    "rehearsal": (("", "-harness", "run"), ("tools/t4.py",)),
    "tests": (("", "-harness", "-display"), ("nf4_integrations.py", "tools/*.py", "tests/*.py")),
}
PACKAGES = ("torch", "triton", "bitsandbytes", "unsloth", "transformers", "peft")


def code_cells(notebook=None):
    """Return a notebook's code cells; by default those of NOTEBOOK."""
    notebook = notebook or nbformat.read(NOTEBOOK, as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def marked_cells(notebook=None):
    """Return (mark, source, number among the code cells) of each code cell, in order.

    The mark is what follows `#| export`, "set-up" before the first such cell, "run" after it.
    """
    found, other = [], "set-up"
    for i, cell in enumerate(code_cells(notebook)):
        mark = MARK.search(cell.source)
        other = "run" if mark else other
        found.append((mark[1] if mark else other, cell.source, i))
    return found


def definitions(found=None):
    """Return (source, number among the code cells) of each definition cell, in order.

    found  what marked_cells returned; by default NOTEBOOK's
    """
    found = found or marked_cells()
    return [(source, i) for mark, source, i in found if mark not in ("set-up", "run")]


def defining(what):
    """Return the source of the one definition cell that defines a function, class or constant."""
    begins = re.compile(rf"^((def|class) {what}\b|{what}\b.* = )", re.M)
    found = [source for source, _ in definitions() if begins.search(source)]
    if len(found) != 1:
        raise ValueError(f"one definition cell must define {what}, {len(found)} do")
    return found[0]


def bound(source):
    """Return the names that a cell assigns, defines or imports.

    They are read off its bytecode, because from Python 3.12 on `symtable` counts a comprehension's
    variable as one of the cell's.
    """
    code = dis.get_instructions(compile(source, "a cell", "exec"))
    return {each.argval for each in code if each.opname == "STORE_NAME"}


def load(name="nf4_triton"):
    """Return a module of this name made of the definition cells; `import` then finds it, too.

    Raises ValueError where a cell that runs takes a name that a definition cell defines or
    imports: in the notebook, all later calls would find something else there.
    """
    found = marked_cells()
    cells = definitions(found)
    needed = set().union(*(bound(source) for source, _ in cells))
    for mark, source, i in found:
        taken = needed & bound(source) if mark == "run" else ()
        if taken:
            names = ", ".join(sorted(taken))
            raise ValueError(f"code cell {i} takes the name of a definition: {names}")
    module = sys.modules[name] = types.ModuleType(name)
    for source, i in cells:
        execute(source, f"{name}, code cell {i}", vars(module))
    return module


def load_integrations():
    """Return the module nf4_integrations, which uses the notebook's definitions."""
    load()
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module("nf4_integrations")


def execute(source, file, namespace):
    """Run the source under a file name of its own: Triton reads kernels through `inspect`."""
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec"), namespace)


def code_of(kind, notebook=None):
    """Return the hash of the code that a measurement of this kind measures.

    Comments, docstrings and blank lines do not count. The cells are the notebook's, by
    default NOTEBOOK's.
    """
    marks, patterns = MEASURED[kind]
    sources = [source for mark, source, _ in marked_cells(notebook) if mark in marks]
    for pattern in patterns:
        sources += [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(pattern))]
    code = "\n# the next cell or file\n".join(map(bare, sources))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


@functools.cache
def bare(source):
    """Return the source's own lines, which any Python reads alike, but for comments, docstrings
    and blank lines.
    """
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                text = node.body[0]
                n_lines = text.end_lineno - text.lineno + 1
                lines[text.lineno - 1 : text.end_lineno] = [""] * n_lines
    return "\n".join(line.rstrip() for line in lines if line.strip())


def measurement(kind, data, gpu):
    """Return what was measured here and now, with the code at hand, as a record keeps it."""
    cpu = re.search(r"model name\s*: *(\S.*)", Path("/proc/cpuinfo").read_text())
    versions = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "kind": kind,
        "gpu": gpu,
        "host": f"{cpu[1] if cpu else 'unknown'}, {len(os.sched_getaffinity(0))} cores",
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions,
        "code": code_of(kind),
        "data": data,
    }


def write(path, content):
    """Write a text, or anything else as JSON: beside the file first, then in its place."""
    path = Path(path)
    if not isinstance(content, str):
        content = json.dumps(content, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text(content, encoding="utf-8")
    beside.replace(path)
    print(f"written: {path}")
