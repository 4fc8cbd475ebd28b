"""What can be checked of a Tesla T4 without one: the machine code, and a rehearsal.

    python tools/t4.py count           counts our kernel's machine code for a T4, on any machine
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
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import shared

# {pipe of a multiprocessor: (threads that it serves in a cycle, instructions)}. The rates are those
# of compute capability 7.5 in the CUDA programming guide, "Throughput of Native Arithmetic
# Instructions", which has none for loads and stores.
PIPES = {
    "ALU: integers, compares, selects, shifts, logic": (
        64, "IADD3 LOP3 SHF LEA ISETP FSETP SEL FSEL PRMT SGXT IMNMX FMNMX PLOP3 IABS MOV BMSK"
    ),
    "fp32: products and sums; also moves and addresses": (64, "FMUL FADD FFMA IMAD"),
    "conversions": (16, "F2F F2I I2F I2I F2FP FRND"),
    "warp shuffles": (32, "SHFL"),
    "loads and stores": (None, "LDG STG LDS STS LDC LDL STL"),
}  # fmt: skip
OTHERS = "others: branches, special registers, uniform"
WEIGHTS_PER_S = 240e9 / 2.515625 / 40  # at a copy's speed, for each of a T4's 40 multiprocessors
CUBINS = {}  # {PTX: the machine code that the disguise replaced by it}


def instructions(compiled):
    """Return the names of a compiled kernel's machine instructions, without padding."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(CUBINS.get(compiled.asm["ptx"], compiled.asm["cubin"]))
        file.flush()
        how = {"text": True, "stderr": subprocess.DEVNULL}
        code = subprocess.check_output([folder / "nvdisasm", "-c", "-ndf", file.name], **how)
    # A line is "        /*0a30*/   @!P0 LDG.E.SYS R5, ...": its address, a condition, the name.
    names = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)", code, re.M)
    return [name for name in names if name != "NOP"]


def by_pipe(names, n_weights):
    """Return {pipe: instructions per weight} of a thread that makes n_weights."""
    counts = dict.fromkeys([*PIPES, OTHERS], 0)
    for name in names:
        for pipe, (_, members) in PIPES.items():
            if name.partition(".")[0] in members.split():
                counts[pipe] += 1
                break
        else:
            counts[OTHERS] += 1
    return {pipe: count / n_weights for pipe, count in counts.items()}


def table(kernels):
    """Return rows {instructions per weight, threads a cycle, a column for each kernel}.

    The last row is the clock in MHz at which a T4's busiest pipe keeps up with its memory.

    kernels  {column: {pipe: instructions per weight}}
    """
    rates = {pipe: rate for pipe, (rate, _) in PIPES.items()} | {OTHERS: None}
    rows = []
    for pipe, rate in rates.items():
        row = {"instructions per weight": pipe, "threads a cycle": rate or ""}
        rows.append(row | {column: counts[pipe] for column, counts in kernels.items()})
    clock = {"instructions per weight": "**clock that the busiest pipe needs, MHz**"}
    clock["threads a cycle"] = ""
    for column, counts in kernels.items():
        busiest = max(counts[pipe] / rate for pipe, rate in rates.items() if rate)
        clock[column] = round(busiest * WEIGHTS_PER_S / 1e6)
    return [*rows, clock]


def compile_ours(nf4, dtype):
    """Return our kernel, compiled for sm_75 with nested absmax; it is the same for all shapes."""
    import triton

    kernel = nf4._dequantize_nf4_kernel
    tables = ("offset_ptr", "absmax2_ptr", "code2_ptr")
    types = {"out_ptr": dtype, "weight_ptr": "*u8", "absmax_ptr": "*u8", "n_weights": "i64"}
    types |= dict.fromkeys(tables, "*fp32")
    constants = {"BLOCKSIZE": 64, "BLOCKSIZE2": 256, "WORDS": nf4.WORDS}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(0,): [["tt.divisibility", 16]]}  # the output alone: it is fresh
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", 75, 32)
    return triton.compile(source, target=target)


def count_ours(nf4):
    """Return {column: {pipe: instructions per weight}} of our kernel in fp16 and bf16."""
    columns = {}
    for dtype in ("fp16", "bf16"):
        names = instructions(compile_ours(nf4, f"*{dtype}"))
        columns[f"ours, {dtype}"] = by_pipe(names, nf4.WORDS * 8 / 128)
    return columns


def count_unsloths():
    """Return the same of Unsloth's kernel for nested absmax, as this process has compiled it."""
    from unsloth.kernels import nf4

    columns = {}
    for kernel in (each for each in vars(nf4).values() if hasattr(each, "device_caches")):
        for compiled in kernel.device_caches[0][0].values():
            names = [kernel.arg_names[i] for (i,) in compiled.src.constants]
            constants = dict(zip(names, compiled.src.constants.values()))
            if constants.get("NESTED") and constants.get("HALF") == 32:
                n_weights = 2 * constants["HALF"] * constants["ROWS"]
                n_threads = 32 * compiled.metadata.num_warps
                for dtype in {"*fp16", "*bf16"} & set(compiled.src.signature.values()):
                    column = f"Unsloth's, {dtype.strip('*')}"
                    columns[column] = by_pipe(instructions(compiled), n_weights / n_threads)
    if len(columns) != 2:
        raise ValueError(f"expected Unsloth's kernel in fp16 and in bf16, got {list(columns)}")
    return dict(sorted(columns.items(), reverse=True))


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
        CUBINS[ptx] = assemble(self, ptx, *arguments, **named)  # raises where ptxas refuses
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
    """Return the environment for the notebook, with caches of its own."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "TMPDIR"):
        kept[name] = tempfile.mkdtemp(dir=scratch)
    # Inductor compiles in the same process, and starts kernels by Triton's launcher: it takes PTX
    kept |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0"}
    return kept


FIRST_CELL = "import sys; sys.path.append({!r}); import t4; t4.disguise()"
LAST_CELL = """
assert PLANS and all(found.func is torch_launcher for found in TRIALS.values())
pipes = t4.table({**t4.count_ours(sys.modules["__main__"]), **t4.count_unsloths()})
Path("pipes.json").write_text(json.dumps(pipes))
"""


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
    first = FIRST_CELL.format(str(shared.ROOT / "tools"))
    notebook.cells.insert(0, nbformat.v4.new_code_cell(first))
    notebook.cells.append(nbformat.v4.new_code_cell(LAST_CELL))
    faults, data = [], {}
    with tempfile.TemporaryDirectory(prefix="t4-", ignore_cleanup_errors=True) as scratch:
        resources = {"metadata": {"path": scratch}}
        client = nbclient.NotebookClient(notebook, resources=resources)
        client.on_cell_start = lambda cell, cell_index: print(cell.id, flush=True)
        try:
            client.execute(env=environment(scratch))
            [record] = Path(scratch).glob("results/runs/tesla-t4-*.json")
            data["compared"] = json.loads(record.read_text(encoding="utf-8"))["compared"]
            data["pipes"] = json.loads((Path(scratch) / "pipes.json").read_text(encoding="utf-8"))
        except Exception as fault:  # a cell's error, a kernel that died, or no record of a T4
            faults.append(str(fault)[-2000:])
        compiled = [path.read_bytes() for path in Path(scratch).rglob("*.cubin")]
    nbformat.write(notebook, folder / "nf4_triton.ipynb")
    others = [code for code in compiled if b".target sm_75" not in code]
    if not faults and (others or not compiled):
        faults.append(f"all kernels must be for sm_75: {len(others)} of {len(compiled)} are not")
    if faults:
        raise SystemExit("\n".join(["The rehearsal failed, and nothing is to record:", *faults]))
    data["kernels"] = len(compiled)
    measured = shared.measurement("rehearsal", data, torch.cuda.get_device_name())
    shared.write(folder / "rehearsal.json", measured)


def main(arguments):
    match arguments:
        case ["count"]:
            os.environ.pop("TRITON_INTERPRET", None)
            nf4 = shared.load()
            rows = table(count_ours(nf4))
            print(nf4.pd.DataFrame(rows).to_markdown(index=False, floatfmt=".2f"))
        case ["rehearse", folder]:
            rehearse(Path(folder))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
