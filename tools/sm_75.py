"""The kernel's machine code for a T4 (sm_75), which needs no GPU: registers, widths, instructions.

python tools/sm_75.py                  by the Triton at hand: prints rows of facts, as JSON
python tools/sm_75.py 3.6.0            by that Triton, which pip puts into .venv/nf4-triton
python tools/sm_75.py --record FILE    by each of VERSIONS: writes an entry for tools/record.py

Among the facts are the fused multiply-adds, `ffma`, and there must be none: where a compiler makes
one of a scale's product and sum, the product is not rounded, and some bits are not bitsandbytes'.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import shared

VERSIONS = ("3.5.1", "3.6.0", "3.9.0")  # the lowest that is allowed, Colab's, the newest


def installed(version):
    """Return the folder with this Triton and nothing else. pip makes it when it is first used."""
    folder = shared.ROOT / ".venv" / "nf4-triton" / f"{version}-{sys.implementation.cache_tag}"
    if not folder.exists():
        part = folder.with_name(f"part-of-{folder.name}")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--no-deps", "--target"]
        if subprocess.call([*pip, part, f"triton=={version}"], stdout=sys.stderr):
            raise SystemExit(f"pip could not install triton {version}.\n\n{__doc__}")
        part.rename(folder)
    return folder


arguments = sys.argv[1:] if __name__ == "__main__" else []
if len(arguments) == 1 and arguments != [metadata.version("triton")]:
    sys.path.insert(0, str(installed(arguments[0])))
os.environ.pop("TRITON_INTERPRET", None)  # the interpreter cannot live beside the compiler

import triton  # noqa: E402
from tqdm import tqdm  # noqa: E402

TYPES = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}


def compile_for(nf4, dtype, absmax):
    """Return the kernel compiled for sm_75, which is the same for all shapes."""
    kernel = nf4._dequantize_nf4_kernel
    types = {"out_ptr": TYPES[dtype], "weight_ptr": "*u8", "n_weights": "i32"}
    constants = {"BLOCKSIZE": 64, "WORDS": nf4.WORDS, "SHUFFLE": True}
    tables = ("offset_ptr", "absmax2_ptr", "code2_ptr")
    if absmax == "nested":
        types |= {"absmax_ptr": "*u8"} | dict.fromkeys(tables, "*fp32")
        constants["BLOCKSIZE2"] = 256
    else:
        types["absmax_ptr"] = "*fp32"
        constants |= {"BLOCKSIZE2": 0} | dict.fromkeys(tables)
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(0,): [["tt.divisibility", 16]]}  # the output alone: it is fresh
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", 75, 32)
    return triton.compile(source, target=target)


def facts(compiled):
    """Return what the code uses, and how often; widths of global accesses in bits: "16 128"."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        code = subprocess.check_output([tools / "nvdisasm", "-c", "-ndf", cubin], text=True)
        usage = subprocess.check_output([tools / "cuobjdump", "-res-usage", cubin], text=True)
    # A line is "        /*0a30*/   @!P0 LDG.E.SYS R5, ...": its address, a condition, the name.
    names = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)", code, re.M)

    def widths(begin, mark=""):
        # LDG.E.128 has a number; LDG.E has none, so the pattern matches the end: 32 bits
        accesses = [name for name in names if name.startswith(begin) and mark in name]
        bits = {re.search(r"\.[US]?(8|16|64|128)\b|$", name)[1] or "32" for name in accesses}
        return " ".join(sorted(bits, key=int))

    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": int(re.search(r"LOCAL:(\d+)", usage)[1]),
        "shared": compiled.metadata.shared,
        "shuffles": len([name for name in names if name.startswith("SHFL")]),
        "ffma": len([name for name in names if name.startswith("FFMA")]),  # HFMA2: constants
        "word_load_bits": widths("LDG", ".EF"),
        "store_bits": widths("STG"),
        "instructions": len([name for name in names if name != "NOP"]),  # there is no loop
    }


def compile_all():
    """Return rows of facts by the Triton at hand."""
    nf4, rows = shared.load(), []
    for dtype in TYPES:
        for absmax in ("nested", "plain"):
            row = {"triton": triton.__version__, "dtype": dtype, "absmax": absmax}
            rows.append(row | facts(compile_for(nf4, dtype, absmax)))
    return rows


def compile_by_each():
    """Return the rows of all VERSIONS, each in a process of its own."""
    found = []
    for version in tqdm(VERSIONS, "Triton", disable=None):
        done = subprocess.run([sys.executable, __file__, version], stdout=subprocess.PIPE)
        if done.returncode:
            raise SystemExit(f"Triton {version} failed, see above: nothing was written.")
        found += json.loads(done.stdout.splitlines()[-1])  # Triton prints there, too
    return found


def main():
    match arguments:
        case ["--record", path]:
            shared.write(path, shared.entry("machine code", compile_by_each()))
        case [] | [_]:
            print(json.dumps(compile_all()))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
