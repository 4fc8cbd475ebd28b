"""Runs the notebook on a newer NVIDIA GPU that is made to look like a Tesla T4, to the first error.

    python tools/rehearse_t4.py DIR    leaves in DIR the executed notebook, what it wrote, and
                                       t4_rehearsal.json

How: the kernel's process and its children start with a sitecustomize that calls `disguise`. From
then on torch describes the card as a T4, so Triton, Inductor and Unsloth compile for sm_75. ptxas
must accept that code, but in the place of its machine code, which no newer card runs, the PTX is
handed on: the driver translates it for the real card. What is written is marked `rehearsed`; its
times are not a T4's. `fractions` says how near that code comes to the real card's traffic ceiling.

Exit status 0: every code cell ran without an error, no weight differs, Inductor compiled all that
was compiled in fp16 and bf16; 1: not so, and why; 2: it cannot be tried here, and why.
"""

import argparse
import datetime
import functools
import importlib.util
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "nf4_triton.ipynb"
LARGEST = "8192 x 28672"  # of the formats that are timed: larger than any card's L2 cache
SITECUSTOMIZE = f"""
import importlib.util, os, sys

spec = importlib.util.spec_from_file_location("rehearse_t4", {str(Path(__file__).resolve())!r})
sys.modules["rehearse_t4"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["rehearse_t4"])
sys.modules["rehearse_t4"].disguise(os.path.dirname(__file__))
"""


@dataclass(frozen=True, repr=False)
class T4:
    """What torch says of a card, in the place of its own object, which takes no other values."""

    real: object = None
    name = "Tesla T4"
    major, minor = 7, 5
    multi_processor_count = 40
    total_memory = 15_828_320_256
    L2_cache_size = 4 * 2**20
    shared_memory_per_block = 48 * 2**10
    shared_memory_per_block_optin = shared_memory_per_multiprocessor = 64 * 2**10
    regs_per_multiprocessor = 64 * 2**10
    max_threads_per_multi_processor = 1024
    warp_size = 32

    def __getattr__(self, name):
        return getattr(self.real, name)

    def __repr__(self):
        return f"{self.name} in the place of {self.real!r}"


def disguise_torch(cuda):
    """torch.cuda reads the name, the capability and the answer about bf16 off the properties."""
    ask = cuda.get_device_properties

    @functools.wraps(ask)
    def get_device_properties(device=None):
        return T4(ask(device) if cuda.is_available() else None)

    def limit_memory():
        fraction = T4.total_memory / ask(cuda.current_device()).total_memory
        cuda.set_per_process_memory_fraction(min(1.0, fraction))

    cuda.get_device_properties = get_device_properties
    cuda._lazy_call(limit_memory)  # as soon as CUDA is initialized


def disguise_triton(backends):
    """Triton asks torch for the capability, the driver for the rest; its last stage gives PTX."""
    nvidia = backends.backends["nvidia"]
    assemble, start = nvidia.compiler.make_cubin, nvidia.driver.__init__

    @functools.wraps(assemble)
    def make_cubin(self, ptx, *arguments, **named):
        assemble(self, ptx, *arguments, **named)  # raises where ptxas refuses
        return ptx.encode() + b"\0"

    @functools.wraps(start)
    def init(self):
        start(self)
        ask = self.utils.get_device_properties
        facts = {"max_shared_mem": 64 * 2**10, "multiprocessor_count": 40}
        self.utils.get_device_properties = lambda device: {**ask(device), **facts}

    nvidia.compiler.make_cubin, nvidia.driver.__init__ = make_cubin, init


class Disguise:
    """An import hook: changes a module once it was executed, before anyone takes names from it."""

    changes = {"torch.cuda": disguise_torch, "triton.backends": disguise_triton}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name in cls.changes else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                cls.changes[name](module)

            spec.loader.exec_module = exec_module
        return spec


def disguise(folder):
    """What the sitecustomize in `folder` calls; ends with the one that this one hides, if any."""
    sys.meta_path.insert(0, Disguise)
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if entry != folder])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def environment(scratch):
    """The kernel's: disguised, with caches of its own in `scratch`.

    Inductor compiles in the same process, and starts kernels through Triton's launcher, which loads
    PTX as well.
    """
    folders = {
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "CUDA_CACHE_PATH": "cuda",
        "TMPDIR": "tmp",  # because Unsloth drops Inductor's setting
    }
    folders = {name: str(scratch / folder) for name, folder in folders.items()}
    for folder in (*folders.values(), scratch / "site"):
        os.mkdir(folder)
    (scratch / "site" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    kept = dict(os.environ)
    for name in ("TRITON_INTERPRET", "TRITON_OVERRIDE_ARCH"):
        kept.pop(name, None)
    settings = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0"}
    path = os.pathsep.join(filter(None, (str(scratch / "site"), kept.get("PYTHONPATH"))))
    return {**kept, **folders, **settings, "PYTHONPATH": path}


def real_card():
    """(name, capability) of the NVIDIA GPU that torch uses, None without one."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return None
    return torch.cuda.get_device_name(), torch.cuda.get_device_capability()


def has_stage():
    """Whether Triton assembles PTX in the method that the disguise replaces."""
    try:
        from triton.backends import backends
    except ImportError:
        return False
    return hasattr(getattr(backends.get("nvidia"), "compiler", None), "make_cubin")


def refusal(folder, card):
    """Why the rehearsal cannot be tried, in one sentence; "" where it can."""
    if folder in (ROOT, ROOT / "results"):
        return f"{folder} keeps what was measured; name another folder for what is only rehearsed."
    if card is None:
        return "The rehearsal needs an NVIDIA GPU that torch can use, and there is none here."
    name, capability = card
    if capability < (7, 5):
        major, minor = capability
        return f"{name} has capability {major}.{minor}, but code for a T4 needs 7.5 or newer."
    if not has_stage():
        lacking = "This Triton has no CUDABackend.make_cubin"
        return f"{lacking}, in whose place PTX could be handed on."
    return ""


def run(notebook, folder, environment):
    """Executes the notebook in `folder`, printing a line for each code cell.

    returns  why it ended, if no cell's output says
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    start, section, where = time.time(), "", "the kernel's start"

    def on_cell_start(cell, cell_index):
        nonlocal section, where
        if cell.cell_type == "code":
            where = f"cell {cell_index} ({cell.id})"
            print(f"{time.time() - start:6.1f} s  {where}, in {section}", flush=True)
        else:
            titles = [line[3:] for line in cell.source.splitlines() if line.startswith("## ")]
            section = titles[0] if titles else section

    client = NotebookClient(
        notebook,
        on_cell_start=on_cell_start,
        timeout=None,
        startup_timeout=300,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    try:
        client.execute(env=environment)
    except CellExecutionError:
        pass  # the cell's output
    except Exception as error:  # the kernel died, or did not start
        return f"{where}: {type(error).__name__}: {error}"
    return ""


def report(notebook, record, gpu, seconds):
    """The record's t4_rehearsal."""
    ran, errors = 0, 0
    for cell in notebook.cells:
        if cell.cell_type == "code":
            ran += cell.execution_count is not None
            errors += sum(output.output_type == "error" for output in cell.outputs)
    fractions = {}  # of the traffic ceiling
    for row in record.get("formats") or ():
        if row["format"] == LARGEST:
            fractions[row["dtype"]] = round(row["fraction"], 3)
    return {
        "gpu": gpu,
        "as": T4.name,
        "date": datetime.date.today().isoformat(),
        "cells": ran,
        "errors": errors,
        "exact": record.get("exact"),
        "compile": record.get("compile"),
        "fractions": fractions,
        "kept": record.get("host", {}).get("kept"),
        "seconds": round(seconds, 1),
    }


def failures(notebook, report):
    """A sentence for each thing that is not as it must be; none if the rehearsal passed."""
    n_cells, errors = 0, []
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and cell.source:
            n_cells += 1
            for output in cell.outputs:
                if output.output_type == "error":
                    error = f"{output.ename}: {output.evalue[:2000]}"
                    errors.append(f"cell {i} ({cell.id}): {error}")
    if errors or report["cells"] != n_cells:
        return [*errors, f"{report['cells']} of {n_cells} code cells were run"]
    found = []
    exact = report["exact"] or {}
    if exact.get("differing") != 0 or not exact.get("checked"):
        got = exact or "no record of a Tesla T4"
        found.append(f"expected that weights were checked and none differs, got {got}")
    if not report["kept"]:
        found.append("expected that launches are kept with a T4's code, but none is")
    rows = report["compile"] or []
    for dtype in ("float16", "bfloat16"):
        if dtype not in [row["dtype"] for row in rows]:
            found.append(f"expected that something was compiled in {dtype}, got {rows}")
    for row in rows:
        if not (row["bit_equal"] and row["compiled"] and row["graphs"] == 1):
            found.append(f"expected it compiled in one graph with equal bits, got {row}")
    return found


def cached_kernels(scratch):
    """What Triton left in its cache there."""
    return [kernel.read_bytes() for kernel in (scratch / "triton").rglob("*.cubin")]


def objections(kernels):
    """A sentence where they are not all a T4's code, or none is there; else nothing."""
    strange = sum(b".target sm_75" not in kernel for kernel in kernels)
    if kernels and not strange:
        return []
    got = f"of {len(kernels)} in Triton's cache {strange} are not"
    return [f"expected kernels that are PTX for sm_75; {got}"]


def rehearse(folder, gpu, scratch):
    """Runs the notebook, marks what came of it and judges that: the exit status."""
    import nbformat

    start = time.time()
    path = folder / "results" / "tesla-t4.json"
    summary = folder / "t4_rehearsal.json"
    for earlier in (path, summary):
        earlier.unlink(missing_ok=True)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    ended = run(notebook, folder, environment(scratch))
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                print(f"on stderr: {output.text[:2000].strip()}")
    notebook.metadata["rehearsed_on"] = gpu
    warning = f"**Rehearsed on {gpu}: no time below is a T4's.**"
    notebook.cells[0].source = f"{warning}\n\n{notebook.cells[0].source}"
    nbformat.write(notebook, folder / NOTEBOOK.name)
    record = {"rehearsed": True, "rehearsed_on": gpu}
    if path.exists():
        record |= json.loads(path.read_text())
        path.write_text(json.dumps(record, indent=1) + "\n")
    found = report(notebook, record, gpu, time.time() - start)
    kernels = cached_kernels(scratch)
    wrong = [ended] * bool(ended) + failures(notebook, found)
    wrong = wrong or objections(kernels)
    if wrong:
        for sentence in wrong:
            print(f"failed: {sentence}", file=sys.stderr)
        return 1
    summary.write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"{gpu} as a {T4.name}: {found['cells']} code cells, no error; "
        f"{found['exact']['checked']:,} weights compared, 0 differ; fp16 and bf16 compiled; "
        f"{len(kernels)} kernels, all for sm_75; {found['seconds']:.0f} s. "
        f"That time and those in {folder} are not a T4's."
    )
    return 0


def main(arguments=None):
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args(arguments).folder.resolve()
    card = real_card()
    reason = refusal(folder, card)
    if reason:
        print(reason, file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="t4-", ignore_cleanup_errors=True) as scratch:
        return rehearse(folder, card[0], Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
