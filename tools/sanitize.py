"""Our kernel, and plans, under NVIDIA's compute-sanitizer, on small and ragged tensors.

    python tools/sanitize.py    on a GPU: a line for each run; exit status 0 where all are clean

memcheck finds accesses out of bounds, and initcheck reads of what was never written. Broken
launches are the control of both. The kernel uses no shared memory, so there is nothing for
racecheck. Only our kernel is watched. initcheck takes what other kernels write for unwritten, so
all that our kernel reads is made on the CPU and copied. Trials are left out, because they compare
with what bitsandbytes' kernels write.
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
from multiprocessing.pool import ThreadPool

import shared
import torch

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
OPTIONS = (
    "--report-api-errors=no",
    "--error-exitcode=9",
    "--kernel-name=kns=_dequantize_nf4_kernel",
    "--target-processes=application-only",  # not the compilers that Triton starts
)
RUNS = list(itertools.product(("memcheck", "initcheck"), ("right", "broken")))


def run_right(nf4):
    """Launch the kernel in the three ways: by kernel[grid], and by plans with either launcher."""
    shapes = ((64, 64), (1, 8), (33, 192))
    for shape, dtype, nested in itertools.product(shapes, nf4.DTYPES, (True, False)):
        weight, state = nf4.quantized(shape, dtype, "cpu", nested=nested)
        expected = nf4.spec(weight, state)
        weight = weight.cuda()
        state.to("cuda")
        tensors, kind = nf4.unpack(weight, state)
        outs = [nf4.empty_output(weight, kind)]
        compiled = nf4.launch(outs[0], tensors, kind)
        for make_launcher in (nf4.torch_launcher, nf4.triton_launcher):
            plan = nf4.make_plan(make_launcher(compiled, kind), tensors, kind)
            outs.append(plan(tensors))
        for out in outs:
            assert nf4.bits_differing(out.cpu(), expected) == 0, (shape, dtype)


def run_broken(nf4):
    """Read what was never written, then beyond the weight's end."""
    weight, state = nf4.quantized((64, 128), torch.float16, "cpu")
    state.to("cuda")
    nf4.by_kernel_grid(torch.empty_like(weight, device="cuda"), state).cpu()
    nf4.by_kernel_grid(weight[: len(weight) // 2].cuda(), state).cpu()


def watch(tool, launches):
    """Tell whether the tool finds nothing in right launches, and something in broken ones."""
    command = [SANITIZER, f"--tool={tool}", *OPTIONS]
    if tool == "memcheck":
        command.append("--padding=4096")
    command += [sys.executable, __file__, launches]
    done = subprocess.run(command, capture_output=True, text=True)
    counts = re.findall(r"SUMMARY: (\d+) error", done.stdout)
    n_errors = sum(map(int, counts))
    if launches == "broken":
        is_expected = n_errors > 0
    else:
        is_expected = len(counts) > 0 and n_errors == 0 and done.returncode == 0
    print(f"{tool}, {launches} launches: {n_errors} errors, exit status {done.returncode}")
    if not is_expected:
        print(f"NOT expected, of {tool}:\n{(done.stdout + done.stderr)[-4000:]}")
    return is_expected


def main(arguments):
    if not (torch.cuda.is_available() and os.path.exists(SANITIZER)):
        raise SystemExit("This needs an NVIDIA GPU and, of the CUDA toolkit, compute-sanitizer.")
    if arguments == ["right"]:  # in a process that is watched, like the next
        run_right(shared.load())
    elif arguments == ["broken"]:
        run_broken(shared.load())
    else:
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # else tensors have neighbours
        if not all(ThreadPool().starmap(watch, RUNS)):
            raise SystemExit("not all is as expected, see above")


if __name__ == "__main__":
    main(sys.argv[1:])
