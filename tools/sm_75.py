"""What the kernel is on a T4 (sm_75): compiles the notebook's, without a GPU, and reads the code.

    python tools/sm_75.py            the Triton at hand: prints rows of facts, as JSON
    python tools/sm_75.py 3.6.0      the same with that Triton, put by pip into .venv/nf4-triton
    python tools/sm_75.py --record   with each Triton of VERSIONS; writes results/sm_75.json

Rows are {triton, dtype, absmax, tensor, look_up, compiled, ...}. In a ragged tensor, and in one at
an odd address or in a compiled graph, the instructions of all branches are counted. What does not
compile has an `error`, and the exit status is 1. Each Triton has a process of its own, as the
compiler has beside the interpreter, which the tests run.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import helpers  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from tqdm import tqdm  # noqa: E402

VERSIONS = ("3.5.1", "3.6.0", "3.9.0")  # the lowest that is allowed, Colab's, the newest
TENSORS = {"whole": (4096, 4096), "ragged": (4097, 4095), "odd address": (4096, 4096)}
CASES = [(True, "whole", "loads")]  # nested absmax, tensor, look-up
CASES += [(nested, tensor, "shuffles") for nested in (True, False) for tensor in TENSORS]


def compile_for(nf4, dtype, nested=True, tensor="whole"):
    """The CompiledKernel for sm_75 that such a weight gets."""
    shape, kernel = TENSORS[tensor], nf4._dequantize_nf4_kernel
    out = torch.empty(shape, dtype=dtype, device="meta")
    place = "meta" if tensor == "odd address" else "cpu"  # one that is not known counts as odd
    weight = torch.empty(-(-out.numel() // 2), dtype=torch.uint8, device=place)
    tensors = (weight, *[None] * (5 if nested else 2))
    _, _, constants = nf4.launch_of(out, tensors, (shape, dtype, 64, 256 if nested else 0))
    options = {"num_warps": constants.pop("num_warps")}
    if not nested:
        constants |= dict.fromkeys(("offset_ptr", "absmax2_ptr", "code2_ptr"))
    types = dict.fromkeys(kernel.arg_names, "*fp32")
    types |= {"out_ptr": helpers.POINTERS[dtype], "weight_ptr": "*u8", "n_weights": "i32"}
    types |= {"absmax_ptr": "*u8" if nested else "*fp32", **dict.fromkeys(constants, "constexpr")}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(0,): [["tt.divisibility", 16]]}  # the output alone: it is fresh
    source = triton.compiler.ASTSource(kernel, types, values, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", 75, 32)
    return triton.compile(source, target=target, options=options)


def output_of(tool, *arguments):
    """What a tool of Triton's wheel prints."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def facts(compiled, steps):
    """What the machine code uses; widths of its global loads and stores in bits, as "8 32"."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        text = output_of("nvdisasm", "-c", "-ndf", cubin)  # -ndf: jump targets are not worked out
        usage = output_of("cuobjdump", "-res-usage", cubin)
    operations = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)", text, re.M)
    last = max(i for i, operation in enumerate(operations) if operation.startswith("EXIT"))

    def widths(name, policy=""):
        found = [each for each in operations if each.startswith(name) and policy in each]
        bits = [re.search(r"\.[US]?(8|16|64|128)\b", each) for each in found]
        return " ".join(map(str, sorted({int(each[1]) if each else 32 for each in bits})))

    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": int(re.search(r"LOCAL:(\d+)", usage)[1]),
        "shared": compiled.metadata.shared,
        "instructions_per_weight": (last + 1) / (steps * 8),
        "shuffles": sum(each.startswith("SHFL") for each in operations),
        "load_bits": widths("LDG"),
        "word_load_bits": widths("LDG", ".EF"),  # evict first: only packed words are read so
        "store_bits": widths("STG"),
    }


def rows():
    """The facts of each case, by this process's Triton."""
    modules = {"shuffles": helpers.load(), "loads": helpers.load("nf4_by_loads")}
    modules["loads"].SHUFFLES = triton.language.constexpr(False)
    for dtype in helpers.DTYPES:
        for nested, tensor, look_up in CASES:
            absmax = "nested" if nested else "plain"
            more = 2 if tensor == "odd address" else 1  # steps
            row = {"triton": triton.__version__, "dtype": str(dtype).removeprefix("torch.")}
            row |= {"absmax": absmax, "tensor": tensor, "look_up": look_up, "compiled": True}
            try:
                compiled = compile_for(modules[look_up], dtype, nested, tensor)
                row |= facts(compiled, modules[look_up].STEPS[dtype.itemsize] * more)
            except Exception as error:
                row |= {"compiled": False, "error": repr(error)[:300]}
            yield row


def installed(version):
    """The folder that holds this Triton and nothing else, made by pip when first asked for."""
    folder = helpers.ROOT / ".venv" / "nf4-triton" / f"{version}-{sys.implementation.cache_tag}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            target = Path(unfinished) / "triton"
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            pip += ["--target", target, f"triton=={version}"]
            if subprocess.run(pip, stdout=sys.stderr).returncode:
                raise SystemExit(f"pip could not install triton {version}: nothing was written.")
            target.rename(folder)
    return folder


def rows_by(version):
    """The rows of that Triton, by a process of its own."""
    environment = dict(os.environ)
    if version != triton.__version__:
        environment["PYTHONPATH"] = str(installed(version))
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    last = done.stdout.splitlines()[-1:]
    if not last or not last[0].startswith("[{"):  # it died, as LLVM can
        why = f"ended with {done.returncode}: {done.stderr[-300:]}"
        raise SystemExit(f"The compilation by triton {version} {why}\nNothing was written.")
    return json.loads(last[0])


def main(arguments):
    if not arguments:
        found = list(rows())
    elif arguments == ["--record"]:
        found = []
        for version in tqdm(VERSIONS, desc="Triton", file=sys.stderr, mininterval=1):
            found += rows_by(version)
    elif len(arguments) == 1 and re.fullmatch(r"\d+\.\d+\.\d+", arguments[0]):
        found = rows_by(arguments[0])
    else:
        raise SystemExit(__doc__)
    failed = [row for row in found if not row["compiled"]]
    for row in failed:
        print(f"does not compile: {row}", file=sys.stderr)
    if arguments != ["--record"]:
        print(json.dumps(found))
    elif not failed:
        helpers.write_json(helpers.ROOT / "results" / "sm_75.json", found)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
