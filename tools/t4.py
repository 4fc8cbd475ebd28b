"""What can be known of a Tesla T4 without one: a rehearsal on a newer GPU, and an estimate.

    python tools/t4.py rehearse DIR      on a newer NVIDIA GPU: runs the notebook as on a T4, to the
                                         first error; leaves it in DIR, with rehearsal.json
    python tools/t4.py estimate [DIR]    takes DIR's rehearsal in, estimates a T4's test_dequantize
                                         from the run that is shown; writes results/t4.json

The rehearsal's first cell is `disguise`: torch then describes the GPU as a T4, so Triton, Inductor
and Unsloth compile for sm_75. ptxas must accept that code, but in the place of its machine code,
which no newer GPU runs, the driver gets the PTX. Its times are not a T4's.

The estimate: a call takes its bytes at a share of a copy's speed, and the host's time beyond its
kernel. That is the record's, times one factor, by which the three launches take as long as was
published.
"""

import dataclasses
import datetime
import functools
import itertools
import os
import statistics
import sys
import tempfile
from pathlib import Path

import shared

GITHUB = "https://github.com/"
COPY_GB_S = 240.0  # a T4's
COPY_URL = GITHUB + "router-gao/cuda-demo/blob/HEAD/cuda-samples/02-cuda-bandwidth.md"
PUBLISHED = {  # seconds of the three launches on a T4, the second the least of thirty runs: where
    3.714: GITHUB + "daver987/unsloth-mojo/blob/aaac3fdaa1374f1d8c1ed67c9fab43c7ef73ea18/"
    "Unsloth_Mojo_Puzzles.ipynb",
    4.116: GITHUB + "Talel-bm/Optimized-NF4-dequantization/blob/"
    "75714c480d9a78ce8755c4e7fd9fd995a71cb208/README.md",
}
SHARES = (1.0, 0.9, 0.8)  # of a copy's speed
MIX = (("2048 x 8192", "float16"), ("1024 x 4096", "bfloat16"), ("4096 x 14336", "bfloat16"))
N_CALLS = 9000  # of test_dequantize: 1000 loops of three for each shape
N_WEIGHTS = 3000 * (2048 * 8192 + 1024 * 4096 + 4096 * 14336)
FUSED = 1 / 2 + 1 / 64 + 2  # bytes moved for a weight in 16 bits
SPLIT = FUSED + 2 * (4 + 4) / 64  # and two fp32 scales for a block, each written and read
MOVED = {"ours": FUSED, "unsloth": FUSED, "three_launches": SPLIT}


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
    import nbclient
    import nbformat
    import torch

    has_gpu = torch.cuda.is_available() and torch.version.cuda is not None
    if not has_gpu or torch.cuda.get_device_capability() < (7, 5):
        raise SystemExit("The rehearsal needs an NVIDIA GPU of capability 7.5 or newer: none here.")
    if folder.resolve() in (shared.ROOT, shared.RESULTS):
        raise SystemExit(f"{folder} keeps what was measured: name another for the rehearsal.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rehearsal.json").unlink(missing_ok=True)
    notebook = nbformat.read(shared.ROOT / "nf4_triton.ipynb", as_version=4)
    n_cells = len(shared.code_cells(notebook))
    begin = f"import sys; sys.path.append({str(shared.ROOT / 'tools')!r})"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(f"{begin}; import t4; t4.disguise()"))
    notebook.cells.append(nbformat.v4.new_code_cell("assert PLANS and all(TRIED.values())"))
    faults, record = [], {}
    with tempfile.TemporaryDirectory(prefix="t4-", ignore_cleanup_errors=True) as scratch:
        resources = {"metadata": {"path": scratch}}
        client = nbclient.NotebookClient(notebook, resources=resources)
        client.on_cell_start = lambda cell, cell_index: print(cell.id, flush=True)
        try:
            client.execute(env=environment(scratch))
            record = shared.stored("tesla-t4", Path(scratch) / "results")
        except Exception as fault:  # a cell's error, or the kernel died
            faults.append(str(fault)[-2000:])
        compiled = [path.read_bytes() for path in Path(scratch).rglob("*.cubin")]
    nbformat.write(notebook, folder / "nf4_triton.ipynb")
    others = [code for code in compiled if b".target sm_75" not in code]
    exact = (record or {}).get("exact", {"checked": 0})
    if not faults and (exact["checked"] == 0 or exact["differing"] > 0):
        faults.append(f"weights must be compared, and none differ: {exact}")
    if not faults and (others or not compiled):
        faults.append(f"all kernels must be for sm_75: {len(others)} of {len(compiled)} are not")
    if faults:
        raise SystemExit("\n".join(["The rehearsal failed:", *faults]))
    found = {"gpu": torch.cuda.get_device_name(), "as": T4.name}
    found |= {"date": datetime.date.today().isoformat(), "cells": n_cells, "errors": 0}
    found |= {"exact": exact, "kernels": len(compiled), "planned": True}
    shared.write({folder / "rehearsal.json": found | {"rows": record["kernels"]}})


def host_us(record):
    """{who: microseconds that a call of the mix takes beyond its kernel}, means over its shapes.

    The kernels of the three launches were not timed: they count by their bytes.
    """
    rows = {(row["shape"], row["dtype"]): row for row in record["kernels"]}
    ours_us = statistics.mean(rows[each]["ours_us"] for each in MIX)
    unsloth_us = statistics.mean(rows[each]["unsloth_us"] for each in MIX)
    kernel_us = {"ours": ours_us, "unsloth": unsloth_us}
    kernel_us["three_launches"] = unsloth_us * SPLIT / FUSED
    call_us = {row["who"]: row["us"] for row in record["race"] if row["dtype"] == "mix"}
    return {who: statistics.mean(call_us[who]) - kernel_us[who] for who in MOVED}


def estimated(host):
    """Rows {published_s, share, factor, ours_s, unsloth_s, over_unsloth, over_three_launches}."""
    rows = []
    for published_s, share in itertools.product(PUBLISHED, SHARES):
        speed = share * COPY_GB_S * 1e9  # in bytes a second
        bytes_s = {who: N_WEIGHTS * each / speed for who, each in MOVED.items()}
        host_s = {who: N_CALLS * us * 1e-6 for who, us in host.items()}
        factor = (published_s - bytes_s["three_launches"]) / host_s["three_launches"]
        seconds = {who: bytes_s[who] + factor * host_s[who] for who in MOVED}
        row = {"published_s": published_s, "share": share, "factor": factor}
        row |= {"ours_s": seconds["ours"], "unsloth_s": seconds["unsloth"]}
        row["over_unsloth"] = seconds["unsloth"] / seconds["ours"]
        row["over_three_launches"] = published_s / seconds["ours"]
        rows.append(row)
    return rows


def estimate(results, folder=None):
    record = shared.shown_record(results)
    try:
        host = host_us(record)
    except (KeyError, TypeError, ValueError):
        wanted = f"{results} must show a run with times of all three contenders: run the notebook"
        raise SystemExit(f"{wanted} on an NVIDIA GPU, then tools/record.py") from None
    before = (shared.stored("t4", results) or {}).get("rehearsal")
    rehearsal = shared.stored("rehearsal", folder) if folder else before  # else it stays
    if not rehearsal:
        raise SystemExit("there is no rehearsal: run tools/t4.py rehearse DIR, then estimate DIR")
    content = {"rehearsal": rehearsal, "estimate": estimated(host)}
    content["record"] = {"gpu": record["gpu"], "date": record["date"], "host_us": host}
    shared.write({results / "t4.json": content})


def main(arguments):
    match arguments:
        case ["rehearse", folder]:
            rehearse(Path(folder))
        case ["estimate", *folder] if len(folder) < 2:
            estimate(shared.RESULTS, *map(Path, folder))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
