"""The kernel's machine code for a T4 (sm_75), which needs no GPU: registers, widths, instructions.

python tools/sm_75.py            by the Triton at hand: prints rows of facts, as JSON
python tools/sm_75.py 3.6.0      by that Triton, which pip puts into .venv/nf4-triton
python tools/sm_75.py --record   by each of VERSIONS: writes results/sm_75.json

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

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.5.1", "3.6.0", "3.9.0")  # the lowest that is allowed, Colab's, the newest


def installed(version):
    """The folder that holds this Triton and nothing else, made by pip when first asked for."""
    folder = ROOT / ".venv" / "nf4-triton" / f"{version}-{sys.implementation.cache_tag}"
    if not folder.exists():
        part = folder.with_name(f"part-of-{folder.name}")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--no-deps", "--target"]
        if subprocess.call([*pip, part, f"triton=={version}"], stdout=sys.stderr):
            raise SystemExit(f"pip could not install triton {version}.\n\n{__doc__}")
        part.rename(folder)
    return folder


asked = " ".join(sys.argv[1:]) if __name__ == "__main__" else ""
if asked not in ("", "--record", metadata.version("triton")):
    sys.path.insert(0, str(installed(asked)))
os.environ.pop("TRITON_INTERPRET", None)  # the interpreter cannot live beside the compiler
sys.path.insert(0, str(ROOT / "tests"))

import helpers  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from tqdm import tqdm  # noqa: E402


def compile_for(nf4, dtype, absmax="nested"):
    """The CompiledKernel, for sm_75; it is the same for all shapes."""
    out = torch.empty((4096, 4096), dtype=dtype, device="meta")
    byte, number = torch.empty(0, dtype=torch.uint8), torch.empty(0)
    if absmax == "nested":
        tensors, blocksize2 = (byte, byte, *[number] * 4), 256
    else:
        tensors, blocksize2 = (byte, number, number, *[None] * 3), 0
    _, arguments = nf4.launch_of(out, tensors, (out.shape, dtype, 64, blocksize2))
    kernel = nf4._dequantize_nf4_kernel
    by_name = dict(zip(kernel.arg_names, arguments, strict=True))
    types, constants = {}, {}
    for name, value in by_name.items():
        if isinstance(value, torch.Tensor):
            dtype_name = str(value.dtype).removeprefix("torch.")
            types[name] = "*" + triton._utils.type_canonicalisation_dict[dtype_name]
        elif name == "n_weights":
            types[name] = "i32"
        else:
            types[name] = "constexpr"
            constants[(kernel.arg_names.index(name),)] = value
    aligned = {(0,): [["tt.divisibility", 16]]}  # the output alone: it is fresh
    source = triton.compiler.ASTSource(kernel, types, constants, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", 75, 32)
    return triton.compile(source, target=target)


def facts(compiled):
    """What the code uses, and how often; the widths of its global accesses in bits: "16 128"."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        code = subprocess.check_output([tools / "nvdisasm", "-c", "-ndf", cubin], text=True)
        usage = subprocess.check_output([tools / "cuobjdump", "-res-usage", cubin], text=True)
    operations = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)", code, re.M)
    # What follows the last EXIT only fills the code up.
    n_instructions = max(i for i, each in enumerate(operations, 1) if each.startswith("EXIT"))

    def those(name):
        return [each for each in operations if each.startswith(name)]

    def widths(accesses):
        # LDG.E.128 has a number; LDG.E has none, so the pattern matches the end: 32 bits
        bits = {re.search(r"\.[US]?(8|16|64|128)\b|$", each)[1] or "32" for each in accesses}
        return " ".join(sorted(bits, key=int))

    words = [each for each in those("LDG") if ".EF" in each]  # evict first: words alone
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": int(re.search(r"LOCAL:(\d+)", usage)[1]),
        "shared": compiled.metadata.shared,
        "instructions": n_instructions,
        "shuffles": len(those("SHFL")),
        "ffma": len(those("FFMA")),  # HFMA2, in fp16, is how ptxas loads constants
        "word_load_bits": widths(words),
        "store_bits": widths(those("STG")),
    }


def instructions_per_weight(full, dtype, absmax="nested"):
    """Of a full program's thread: `full` is the notebook with helpers.FULL's edits."""
    compiled = compile_for(full, dtype, absmax)
    n_threads = 32 * compiled.metadata.num_warps
    return facts(compiled)["instructions"] * n_threads / (full.WORDS * 8)


def main():
    if asked == "--record":
        found = []
        for version in tqdm(VERSIONS, "Triton", disable=None):
            done = subprocess.run([sys.executable, __file__, version], stdout=subprocess.PIPE)
            if done.returncode:
                raise SystemExit(f"Triton {version} failed, see above: nothing was written.")
            found += json.loads(done.stdout.splitlines()[-1])  # Triton prints there, too
        helpers.write_json(ROOT / "results" / "sm_75.json", found)
        return
    nf4, full = helpers.load(), helpers.load("nf4_full", *helpers.FULL)
    rows = []
    for dtype in helpers.DTYPES:
        for absmax in ("nested", "plain"):
            row = {"triton": triton.__version__, "dtype": str(dtype).removeprefix("torch.")}
            row |= {"absmax": absmax} | facts(compile_for(nf4, dtype, absmax))
            row["instructions_per_weight"] = instructions_per_weight(full, dtype, absmax)
            rows.append(row)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
