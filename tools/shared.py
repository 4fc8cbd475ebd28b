"""What tests and tools share: the notebook's definition cells as a module, and the record."""

import ast
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
DEFINITION = re.compile(r"(# @title .*\n)?# ?\| ?export")  # how a definition cell begins
EXPORTED = re.compile(r"(# @title .*\n)?# ?\| ?export\s*$", re.M)  # of the module nf4_triton alone
NEED_EXPORTED = ("training", "machine code")  # other kinds of entry need all of the cells
FILES = {  # {kind of entry: the files whose code counts, beside the notebook's cells}
    "run": (),
    "training": ("nf4_integrations.py", "tools/training.py"),
    "rehearsal": ("tools/t4.py",),
    "machine code": ("tools/sm_75.py",),
    "tests": ("nf4_integrations.py",),
}
COMMANDS = {  # {kind of entry: what makes a new one}
    "run": "run the notebook on a GPU (README, Run it), then tools/record.py run/",
    "training": "run tools/training.py training.json on a GPU, then tools/record.py training.json",
    "rehearsal": "run tools/t4.py rehearse DIR on a GPU, then tools/record.py DIR/rehearsal.json",
    "machine code": "run tools/sm_75.py --record sm_75.json, then tools/record.py sm_75.json",
    "tests": "run pytest tests --tally tests.json on a GPU, then tools/record.py tests.json",
}
PACKAGES = ("torch", "triton", "bitsandbytes", "unsloth", "transformers", "peft")


def code_cells(notebook=None):
    """Return a notebook's code cells; by default those of NOTEBOOK."""
    notebook = notebook or nbformat.read(NOTEBOOK, as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def definitions(name="nf4_triton"):
    """Return (file name, source) of each definition cell, in order.

    name  begins the file name, which tracebacks show
    """
    found = []
    for i, cell in enumerate(code_cells()):
        if DEFINITION.match(cell.source):
            found.append((f"{name}, code cell {i}", cell.source))
    return found


def defining(what, name="nf4_triton"):
    """Return the source of the one definition cell that defines a function, class or constant."""
    begins = re.compile(rf"^((def|class) {what}\b|{what}\b.* = )", re.M)
    found = [source for _, source in definitions(name) if begins.search(source)]
    if len(found) != 1:
        raise ValueError(f"one definition cell must define {what}, {len(found)} do")
    return found[0]


def load(name="nf4_triton"):
    """Return a module of this name made of the definition cells; `import` then finds it, too."""
    module = sys.modules[name] = types.ModuleType(name)
    for file, source in definitions(name):
        execute(source, file, vars(module))
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
    """Return the hash of the code that an entry of this kind measures.

    Comments, docstrings and blank lines do not count. The cells are the notebook's, by default
    NOTEBOOK's.
    """
    sources = [cell.source for cell in code_cells(notebook)]
    if kind in NEED_EXPORTED:
        sources = [source for source in sources if EXPORTED.match(source)]
    sources += [(ROOT / name).read_text(encoding="utf-8") for name in FILES[kind]]
    code = "\n# the end of a cell or file\n".join(map(bare, sources))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def bare(source):
    """Return the source without comments, docstrings and blank lines."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            text = node.body[0]
            lines[text.lineno - 1 : text.end_lineno] = [""] * (text.end_lineno - text.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def entry(kind, data, gpu=None):
    """Return an entry for the record: what was measured here and now, with the code at hand.

    gpu  the name of the GPU that was used, None if there was none
    """
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
        "code": code_of(kind),
        "versions": versions,
        "data": data,
    }


def entries():
    """Return all entries of results/record.json, the oldest first."""
    path = ROOT / "results" / "record.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def current(kind, among=None):
    """Return the entries of this kind that measured the present code, the oldest first."""
    among = entries() if among is None else among
    code = code_of(kind)
    return [each for each in among if each["kind"] == kind and each.get("code") == code]


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
