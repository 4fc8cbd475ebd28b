"""A rehearsal of the notebook as on a Tesla T4, on a newer GPU.

    python tools/t4.py rehearse DIR    on a newer NVIDIA GPU: runs the notebook to its end, or to
                                       the first error; leaves it in DIR, and rehearsal.json

The rehearsal's first cell is `disguise`: torch then describes the GPU as a T4, so Triton, Inductor
and Unsloth compile for sm_75. ptxas must accept that code, but in the place of its machine code,
which no newer GPU runs, the driver gets the PTX. Its times are not a T4's.
"""

import dataclasses
import functools
import json
import os
import sys
import tempfile
from pathlib import Path

import shared


@dataclasses.dataclass(frozen=True, repr=False)
class T4:
    """What torch says of a GPU, in the place of its own object, which takes no other values."""

    real: object
    name = "Tesla T4"
    major, minor = 7, 5
    multi_processor_count = 40
    total_memory = 15_828_320_256
    L2_cache_size = 4 * 2**20
    shared_memory_per_block_optin = shared_memory_per_multiprocessor = 64 * 2**10
    max_threads_per_multi_processor = 1024

    def __getattr__(self, name):
        return getattr(self.real, name)


def disguise():
    """In a process that has used no GPU yet: from here on it compiles for a T4."""
    import torch
    from triton.backends import backends

    ask = torch.cuda.get_device_properties
    nvidia = backends["nvidia"]
    assemble, start = nvidia.compiler.make_cubin, nvidia.driver.__init__

    @functools.wraps(ask)
    def get_device_properties(device=None):  # name, capability and native bf16 are read off it
        return T4(ask(device))

    def make_cubin(self, ptx, *arguments, **named):
        assemble(self, ptx, *arguments, **named)  # raises where ptxas refuses
        return ptx.encode() + b"\0"

    def init(self):
        start(self)
        ask_driver = self.utils.get_device_properties
        facts = {"max_shared_mem": 64 * 2**10, "multiprocessor_count": 40}
        self.utils.get_device_properties = lambda device: {**ask_driver(device), **facts}

    share = T4.total_memory / ask(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    torch.cuda.get_device_properties = get_device_properties
    nvidia.compiler.make_cubin, nvidia.driver.__init__ = make_cubin, init


def environment(scratch):
    """The notebook's, with caches of its own."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "TMPDIR"):
        kept[name] = tempfile.mkdtemp(dir=scratch)
    # Inductor compiles in the same process, and starts kernels by Triton's launcher: it takes PTX
    kept |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0"}
    return kept


def rehearse(folder):
    """Run the notebook disguised, and write DIR/rehearsal.json unless something is wrong."""
    import nbclient
    import nbformat
    import torch

    has_gpu = torch.cuda.is_available() and torch.version.cuda is not None
    if not has_gpu or torch.cuda.get_device_capability() < (7, 5):
        raise SystemExit("The rehearsal needs an NVIDIA GPU of capability 7.5 or newer: none here.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rehearsal.json").unlink(missing_ok=True)
    notebook = nbformat.read(shared.NOTEBOOK, as_version=4)
    begin = f"import sys; sys.path.append({str(shared.ROOT / 'tools')!r})"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(f"{begin}; import t4; t4.disguise()"))
    notebook.cells.append(nbformat.v4.new_code_cell("assert PLANS and all(TRIALS.values())"))
    faults, compared = [], []
    with tempfile.TemporaryDirectory(prefix="t4-", ignore_cleanup_errors=True) as scratch:
        resources = {"metadata": {"path": scratch}}
        client = nbclient.NotebookClient(notebook, resources=resources)
        client.on_cell_start = lambda cell, cell_index: print(cell.id, flush=True)
        try:
            client.execute(env=environment(scratch))
            record = Path(scratch) / "results" / "tesla-t4.json"
            compared = json.loads(record.read_text(encoding="utf-8"))["compared"]
        except Exception as fault:  # a cell's error, a kernel that died, or no record of a T4
            faults.append(str(fault)[-2000:])
        compiled = [path.read_bytes() for path in Path(scratch).rglob("*.cubin")]
    nbformat.write(notebook, folder / "nf4_triton.ipynb")
    others = [code for code in compiled if b".target sm_75" not in code]
    if not faults and (others or not compiled):
        faults.append(f"all kernels must be for sm_75: {len(others)} of {len(compiled)} are not")
    if any(row["differing"] for row in compared):
        faults.append(f"expected no weights that differ, got {compared}")
    if faults:
        raise SystemExit("\n".join(["The rehearsal failed, and nothing is to record:", *faults]))
    data = {"as": T4.name, "kernels": len(compiled), "compared": compared}
    shared.write(
        folder / "rehearsal.json", shared.entry("rehearsal", data, torch.cuda.get_device_name())
    )


def main(arguments):
    match arguments:
        case ["rehearse", folder]:
            rehearse(Path(folder))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
