"""The notebook as the tests see it: its cells, and its definitions loaded into one module."""

import linecache
import sys
import types
from pathlib import Path

import nbformat

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "nf4_triton.ipynb"


def cells():
    return nbformat.read(NOTEBOOK, as_version=4).cells


def exports():
    """(file name, source) of each definition cell, in order; the name goes into tracebacks."""
    code = [(f"{NOTEBOOK.name}[cell {i}]", cell.source) for i, cell in enumerate(cells()) if cell.cell_type == "code"]
    return [(name, source) for name, source in code if source.startswith("#| export")]


def load(name="nf4_triton", edit=None):
    """A module made of the definition cells. Triton reads kernel sources through `inspect`, hence linecache.

    edit  (text, replacement): the text must stand exactly once; for tests of the tests
    """
    module = types.ModuleType(name)
    sys.modules[name] = module
    if edit and sum(source.count(edit[0]) for _, source in exports()) != 1:
        raise ValueError(f"{edit[0]!r} must stand exactly once in the notebook's definitions")
    for file, source in exports():
        if edit and edit[0] in source:
            file, source = f"{file} edited", source.replace(*edit)
        if name != "nf4_triton":  # a torch operator of its own: registering one again leaves the first one dangling
            file, source = f"{name} {file}", source.replace("nf4_triton::", f"{name}::")
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        exec(compile(source, file, "exec"), module.__dict__)
    return module
