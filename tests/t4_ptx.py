"""Runs the T4's own PTX on the GPU at hand: Triton compiles for sm_75, the driver translates, the bits are compared.

    python tests/t4_ptx.py            prints one JSON object {gpu, triton, checked, differing}
    python tests/t4_ptx.py FILE       also writes it to FILE (the record keeps it as results/t4_ptx.json)

A process of its own, like sm_75.py.
"""

import json
import sys
import tempfile
from pathlib import Path

import cupy
import notebook
import sm_75
import torch
import triton
from bitsandbytes.functional import dequantize_4bit

SHAPES = [(4096, 14336), (4096, 4096), (1024, 4096), (33, 65), (1, 4097), (8, 1000), (1, 1)]


def run(nf4, weight, state, setting, folder):
    """The dequantized weight, by the sm_75 PTX; unwritten elements stay NaN."""
    n = state.shape.numel()
    compiled, programs = sm_75.compile_for(nf4, state.dtype, setting, n)
    assert ".target sm_75" in compiled.asm["ptx"]
    path = Path(folder) / f"{compiled.hash}.ptx"  # cupy remembers modules by their path
    path.write_text(compiled.asm["ptx"])
    function = cupy.RawModule(path=str(path)).get_function(compiled.metadata.name)
    out = torch.full(state.shape, float("nan"), dtype=state.dtype, device="cuda")
    addresses = [cupy.uint64(tensor.data_ptr()) for tensor in (out, weight, *nf4.state_tensors(state))]
    scratch = [cupy.uint64(0)] * 2  # Triton's two scratch buffers, unused
    arguments = (*addresses, cupy.int32(n), *scratch)
    torch.cuda.synchronize()
    function((programs,), (setting.num_warps * 32,), arguments, shared_mem=compiled.metadata.shared)
    cupy.cuda.runtime.deviceSynchronize()
    return out


def main():
    nf4 = notebook.load()
    report = {"gpu": torch.cuda.get_device_name(), "triton": triton.__version__, "checked": 0, "differing": 0}
    with tempfile.TemporaryDirectory() as folder:
        for shape in SHAPES:
            for dtype in nf4.DTYPES:
                weight, state = nf4.quantized(shape, dtype, "cuda")
                expected = dequantize_4bit(weight, state)
                for setting in nf4.CANDIDATES:
                    report["differing"] += nf4.bits_differing(run(nf4, weight, state, setting, folder), expected)
                    report["checked"] += expected.numel()
    return report


if __name__ == "__main__":
    report = main()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
