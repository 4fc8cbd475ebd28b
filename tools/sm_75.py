"""Compiles the notebook's kernel for sm_75 (a T4) and newer GPUs, without a GPU; reads the code.

    python tools/sm_75.py            the Triton at hand: prints one JSON object {dtype: facts}
    python tools/sm_75.py 3.6.0      the same with that Triton, put by pip into .venv/nf4-triton
    python tools/sm_75.py --matrix   with every Triton of VERSIONS, one process each; writes
                                     results/sm_75.json

Beside the look-up by assembly the object holds one by `loads`, the kernel for `ragged` tensors
(its last program is masked, an odd address is gathered from bytes: the instructions of all branches
are counted), and for the Tritons of WITH_ARCHITECTURES the same for newer `architectures`. What
does not compile is reported as {"compiled": false, "error": ...}; the exit status is then 1.
A process of its own: the interpreter, which the other tests run, and the compiler cannot live
together.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import helpers  # noqa: E402
import triton  # noqa: E402
from tqdm import tqdm  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

VERSIONS = ("3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")
WITH_ARCHITECTURES = ("3.6.0", "3.9.0")  # Colab's and the newest
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
CACHE = helpers.ROOT / ".venv" / "nf4-triton"
RECORD = helpers.ROOT / "results" / "sm_75.json"


def compile_for(nf4, dtype, n_weights=4096 * 4096, capability=75):
    """The notebook's CompiledKernel for sm_<capability>: n_weights weights in aligned tensors."""
    described = nf4.NF4(*[None] * 6, (n_weights,), dtype, 64, 256)
    _, constants = nf4.plan(described, aligned=True)
    options = {"num_warps": constants.pop("num_warps")}
    kernel = nf4._dequantize_nf4_kernel
    names = kernel.arg_names
    types = dict.fromkeys(names, "*fp32")
    types |= {"out_ptr": helpers.POINTERS[dtype], "weight_ptr": "*u8", "absmax_ptr": "*u8"}
    types |= {"n_weights": "i32"}
    types |= dict.fromkeys(constants, "constexpr")
    multiples = ["out_ptr"]  # of 16; the kernel is not specialized on the others' addresses
    if n_weights % 16 == 0:
        multiples.append("n_weights")
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in multiples}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, types, values, aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options)


def disassemble(compiled):
    """(instructions up to the last EXIT, the resource usage), by the tools in Triton's wheel."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        # -ndf: jump targets are not worked out, which takes time and changes no instruction
        text = output_of(tools / "nvdisasm", "-c", "-ndf", cubin)
        usage = output_of(tools / "cuobjdump", "-res-usage", cubin)
    instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", text, re.M)
    last = max(i for i, instruction in enumerate(instructions) if "EXIT" in instruction)
    return instructions[: last + 1], usage


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def facts(compiled, steps):
    """Counts from the machine code; its global loads and stores as {bits: number}."""
    instructions, usage = disassemble(compiled)
    operations = []
    for instruction in instructions:
        predicate = r"^@!?U?P\w+\s+"
        operations.append(re.sub(predicate, "", instruction).split()[0])

    def widths(name, policy=""):
        counts = Counter()
        for operation in operations:
            if operation.startswith(name) and policy in operation:
                width = re.search(r"\.[US]?(8|16|64|128|256)\b", operation)
                counts[int(width[1]) if width else 32] += 1
        return {str(bits): counts[bits] for bits in sorted(counts)}

    return {
        "compiled": True,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": int(re.search(r"LOCAL:(\d+)", usage)[1]),
        "shared": compiled.metadata.shared,
        "instructions_per_weight": len(instructions) / (steps * 8),
        "shuffles": sum(o.startswith("SHFL") for o in operations),
        "load_bits": widths("LDG"),
        "packed_load_bits": widths("LDG", ".EF"),  # evict first: only packed words are read so
        "store_bits": widths("STG"),
    }


def facts_of(nf4, capability, n_weights=4096 * 4096):
    """{dtype: facts} for one architecture, and the reason where it does not compile."""
    found = {}
    for dtype in helpers.DTYPES:
        steps = nf4.STEPS_OF[dtype.itemsize]
        try:
            entry = facts(compile_for(nf4, dtype, n_weights, capability), steps)
        except Exception as failure:
            entry = failed(f"{type(failure).__name__}: {failure}")
        found[name_of(dtype)] = entry
    return found


def failed(reason):
    return {"compiled": False, "error": " ".join(reason.split())[:300]}


def all_facts(nf4):
    """What this process's Triton makes of the kernel."""
    by_loads = helpers.load("nf4_by_loads")
    by_loads.SHUFFLES = by_loads.tl.constexpr(False)

    def every(capability):
        found = facts_of(nf4, capability)
        found["loads"] = facts_of(by_loads, capability)
        found["ragged"] = facts_of(nf4, capability, n_weights=4097 * 4095)
        return found

    settings = {}  # warps, steps
    for dtype in helpers.DTYPES:
        settings[name_of(dtype)] = [nf4.WARPS, nf4.STEPS_OF[dtype.itemsize]]
    report = {"triton": triton.__version__, "settings": settings, **every(75)}
    if triton.__version__ in WITH_ARCHITECTURES:
        architectures = {str(capability): every(capability) for capability in ARCHITECTURES}
        report["architectures"] = architectures
    return report


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def installed(version):
    """The folder that holds this Triton and nothing else, made by pip when first asked for."""
    folder = CACHE / f"triton-{version}-{sys.implementation.cache_tag}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        # Elsewhere first: a broken-off installation must not stay.
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            target = Path(temporary) / "triton"
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            pip += ["--target", target, f"triton=={version}"]
            if subprocess.run(pip, stdout=sys.stderr).returncode:
                raise SystemExit(f"pip could not install triton {version}")
            target.rename(folder)
    return folder


def report_with(version):
    """all_facts by that Triton, in a process of its own.

    A process that dies, as LLVM can, counts as not compiled.
    """
    environment = os.environ | {"PYTHONPATH": str(installed(version))}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    last = done.stdout.splitlines()[-1:]
    if last and last[0].startswith('{"triton"'):  # Triton prints there, too
        return json.loads(last[0])
    entry = failed(f"exit status {done.returncode}: {done.stderr[-300:]}")
    found = {name_of(dtype): entry for dtype in helpers.DTYPES}
    return {"triton": version, **found, "loads": found, "ragged": found}


def failures(report, path=()):
    """(where, error) of all that did not compile."""
    if not isinstance(report, dict):
        return []
    if report.get("compiled") is False:
        return [(" ".join(path), report["error"])]
    return [failure for key, value in report.items() for failure in failures(value, (*path, key))]


def as_json(report, indent=""):
    """JSON with one line for each compilation."""
    if not isinstance(report, dict) or "compiled" in report:
        return json.dumps(report)
    lines = []
    for key, value in report.items():
        lines.append(f"{indent} {json.dumps(key)}: {as_json(value, indent + ' ')}")
    return "{\n" + ",\n".join(lines) + "\n" + indent + "}"


def main(arguments):
    if not arguments:
        report = all_facts(helpers.load())
        print(json.dumps(report))
    elif arguments == ["--matrix"]:
        versions = tqdm(VERSIONS, desc="Triton", file=sys.stderr, mininterval=1)
        report = {version: report_with(version) for version in versions}
        RECORD.write_text(as_json(report) + "\n")
    elif len(arguments) == 1 and arguments[0] in VERSIONS:
        report = report_with(arguments[0])
        print(json.dumps(report))
    else:
        expected = f"expected nothing, --matrix or one of {', '.join(VERSIONS)}"
        raise SystemExit(f"{expected}, got {arguments}\n\n{__doc__}")
    for where, error in failures(report):
        print(f"does not compile: {where}: {error}", file=sys.stderr)
    return bool(failures(report))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
