"""Compiles the notebook's kernel for sm_75 (a T4), without a GPU, and reads the machine code.

    python tests/sm_75.py            prints one JSON object {dtype: facts}
    python tests/sm_75.py --record   also writes it into results/sm_75.json under the Triton at hand

A process of its own: the interpreter, which the other tests run, and the compiler cannot live together.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).parent))

import notebook  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def compile_kernel(kernel, types, constants, num_warps, unaligned=()):
    """The CompiledKernel for sm_75. `types`: what is no fp32 pointer; all 16-byte aligned but `unaligned`."""
    names = kernel.arg_names
    types = dict.fromkeys(names, "*fp32") | types | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in {*constants, *unaligned}}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, types, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 75, 32), options={"num_warps": num_warps})


def compile_for(nf4, dtype, setting, n_weights=4096 * 4096):
    """The notebook's kernel compiled for n_weights weights in 16-byte aligned tensors, and its number of programs."""
    constants, programs = nf4.launch_plan(n_weights, dtype, 64, 256, True, True, setting)
    types = {"out_ptr": f"*{TYPES[dtype]}", "weight_ptr": "*u8", "absmax_ptr": "*u8", "n_weights": "i32"}
    unaligned = {"n_weights"} if n_weights % 16 else ()
    return compile_kernel(nf4._dequantize_nf4_kernel, types, constants, setting.num_warps, unaligned), programs


def disassemble(compiled):
    """(instructions up to the last EXIT, the resource usage line), by the tools in Triton's wheel."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        text = subprocess.run([tools / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run(
            [tools / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
    instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", text, re.M)
    last = max(i for i, instruction in enumerate(instructions) if "EXIT" in instruction)
    return instructions[: last + 1], usage


def facts(compiled, setting):
    """Registers, spills, instructions per weight, widths of global loads and stores in bits, shared memory."""
    instructions, usage = disassemble(compiled)

    def widths(name):
        found = [re.sub(r"@!?U?P\d+\s+", "", i) for i in instructions]
        return sorted(
            int((re.search(r"\.U?S?(8|16|64|128)\b", i.split()[0]) or [0, 32])[1]) for i in found if i.startswith(name)
        )

    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": int(re.search(r"LOCAL:(\d+)", usage)[1]),
        "instructions_per_weight": len(instructions) / (setting.steps * 8),
        "load_bits": widths("LDG"),
        "store_bits": widths("STG"),
        "shared": compiled.metadata.shared,
    }


def all_facts(nf4):
    setting = nf4.Setting()
    report = {"triton": triton.__version__, "setting": [setting.num_warps, setting.steps]}
    for dtype in TYPES:
        report[str(dtype).removeprefix("torch.")] = {
            "compiled": True,
            **facts(compile_for(nf4, dtype, setting)[0], setting),
        }
    return report


if __name__ == "__main__":
    report = all_facts(notebook.load())
    if "--record" in sys.argv:
        path = notebook.ROOT / "results" / "sm_75.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | {report["triton"]: report}, indent=1, sort_keys=True) + "\n")
    print(json.dumps(report))
