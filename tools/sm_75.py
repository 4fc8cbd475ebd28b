"""Compiles the notebook's kernel for sm_75 (a T4) and newer GPUs, without a GPU, and reads the machine code.

    python tools/sm_75.py            the Triton at hand: prints one JSON object {dtype: facts}
    python tools/sm_75.py 3.6.0      the same with that Triton, which pip installs into ~/.cache/nf4-triton
    python tools/sm_75.py --matrix   with every Triton of VERSIONS, one process each; writes results/sm_75.json

Beside the look-up by assembly the object holds the one by `loads`, the kernel for `ragged` tensors (its last program is
masked, an odd address is gathered from bytes: the instructions of all branches are counted), and for the Tritons of
WITH_ARCHITECTURES the same for newer `architectures`. What does not compile is reported as {"compiled": false, "error":
...}; the exit status is then 1.
A process of its own: the interpreter, which the other tests run, and the compiler cannot live together.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import helpers  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from tqdm import tqdm  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
VERSIONS = ("3.3.1", "3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")
WITH_ARCHITECTURES = ("3.6.0", "3.9.0")  # Colab's and the newest: older ones do not know sm_100 and sm_120
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
CACHE = Path.home() / ".cache" / "nf4-triton"
RECORD = helpers.ROOT / "results" / "sm_75.json"


def compile_for(nf4, dtype, setting, n_weights=4096 * 4096, capability=75):
    """The notebook's CompiledKernel for n_weights weights in 16-byte aligned tensors, for sm_<capability>."""
    meta = torch.empty(0, device="meta")
    nf4.ASSEMBLY[meta.device] = ""  # nothing can be tried on a device without memory
    described = nf4.NF4(*[meta] * 6, (n_weights,), dtype, 64, 256)
    _, constants = nf4.plan(described, setting, aligned=True)
    kernel = nf4._dequantize_nf4_kernel
    names, types = kernel.arg_names, {"out_ptr": f"*{TYPES[dtype]}", "weight_ptr": "*u8", "absmax_ptr": "*u8"}
    types = dict.fromkeys(names, "*fp32") | types | {"n_weights": "i32"} | dict.fromkeys(constants, "constexpr")
    unaligned = {*constants, *(["n_weights"] if n_weights % 16 else [])}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in unaligned}
    values = {(names.index(name),): value for name, value in constants.items()}
    source, target = ASTSource(kernel, types, values, aligned), GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": setting.num_warps})


def disassemble(compiled):
    """(instructions up to the last EXIT, the resource usage line), by the tools in Triton's wheel."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        # -ndf: jump targets are not worked out, which takes time and changes no instruction
        commands = ["nvdisasm", "-c", "-ndf", cubin], ["cuobjdump", "-res-usage", cubin]
        text, usage = (
            subprocess.run([tools / name, *options], capture_output=True, text=True, check=True).stdout
            for name, *options in commands
        )
    instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", text, re.M)
    last = max(i for i, instruction in enumerate(instructions) if "EXIT" in instruction)
    return instructions[: last + 1], usage


def facts(compiled, setting):
    """Registers, spills, shared memory, instructions per weight, shuffles; global accesses as {bits: number}."""
    instructions, usage = disassemble(compiled)
    operations = [re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0] for instruction in instructions]

    def widths(name, policy=""):
        found = [o for o in operations if o.startswith(name) and policy in o]
        counts = Counter(int((re.search(r"\.[US]?(8|16|64|128|256)\b", o) or [0, 32])[1]) for o in found)
        return {str(bits): counts[bits] for bits in sorted(counts)}

    return {
        "compiled": True,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": int(re.search(r"LOCAL:(\d+)", usage)[1]),
        "shared": compiled.metadata.shared,
        "instructions_per_weight": len(instructions) / (setting.steps * 8),
        "shuffles": sum(o.startswith("SHFL") for o in operations),
        "load_bits": widths("LDG"),
        "packed_load_bits": widths("LDG", ".EF"),  # evict first: only the packed weights are read so
        "store_bits": widths("STG"),
    }


def facts_of(nf4, capability, assembly=True, n_weights=4096 * 4096):
    """{dtype: facts} for one architecture, and the reason where it does not compile."""
    found = {}
    for dtype in TYPES:
        setting = replace(nf4.DEFAULTS[dtype.itemsize], assembly=assembly)
        try:
            entry = facts(compile_for(nf4, dtype, setting, n_weights, capability), setting)
        except Exception as failure:
            entry = failed(f"{type(failure).__name__}: {failure}")
        found[str(dtype).removeprefix("torch.")] = entry
    return found


def failed(reason):
    return {"compiled": False, "error": " ".join(reason.split())[:300]}


def all_facts(nf4):
    """What this process's Triton makes of the kernel."""

    def every(capability):
        loads, ragged = facts_of(nf4, capability, assembly=False), facts_of(nf4, capability, n_weights=4097 * 4095)
        return {**facts_of(nf4, capability), "loads": loads, "ragged": ragged}

    settings = {str(dtype).removeprefix("torch."): nf4.DEFAULTS[dtype.itemsize] for dtype in TYPES}
    report = {"triton": triton.__version__, "settings": {d: [s.num_warps, s.steps] for d, s in settings.items()}}
    report |= every(75)
    if triton.__version__ in WITH_ARCHITECTURES:
        report["architectures"] = {str(capability): every(capability) for capability in ARCHITECTURES}
    return report


def installed(version):
    """The folder that holds this Triton and nothing else, made by pip when first asked for."""
    folder = CACHE / f"triton-{version}-{sys.implementation.cache_tag}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:  # a broken-off installation must not stay
            target = Path(temporary) / "triton"
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, f"triton=={version}"]
            if subprocess.run(pip, stdout=sys.stderr).returncode:
                raise SystemExit(f"pip could not install triton {version}")
            target.rename(folder)
    return folder


def report_with(version):
    """all_facts by that Triton, in a process of its own. One that dies, as LLVM can, counts as not compiled."""
    environment = os.environ | {"PYTHONPATH": str(installed(version))}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    last = done.stdout.splitlines()[-1:]
    if last and last[0].startswith('{"triton"'):  # Triton prints there, too
        return json.loads(last[0])
    entry = failed(f"exit status {done.returncode}: {done.stderr[-300:]}")
    found = {str(dtype).removeprefix("torch."): entry for dtype in TYPES}
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
    lines = (f"{indent} {json.dumps(key)}: {as_json(value, indent + ' ')}" for key, value in report.items())
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
        raise SystemExit(f"expected nothing, --matrix or one of {', '.join(VERSIONS)}, got {arguments}\n\n{__doc__}")
    for where, error in failures(report):
        print(f"does not compile: {where}: {error}", file=sys.stderr)
    return bool(failures(report))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
