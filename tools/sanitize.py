"""The kernel over aligned, ragged and unaligned weights, for compute-sanitizer to watch.

    python tools/sanitize.py            runs the cases and compares raw bits (on a CPU through the
                                        interpreter)
    python tools/sanitize.py --broken   reads what was never written, then beyond a weight's end
    python tools/sanitize.py --all      each tool over the cases, and over --broken; prints
                                        {tool: errors}

Nothing but our kernel is watched, and what it reads comes from the CPU: what other kernels write,
initcheck does not see, so that outputs are compared on the CPU, too. Each tensor is an allocation
of its own, so that no access beyond its end meets a neighbour.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import helpers  # noqa: E402

SHAPES = [(64, 64), (8, 1024), (16, 68), (33, 65), (1, 1), (3, 5), (1, 4097), (8, 1000)]
OFFSETS = [0, 1, 4]  # of the packed weight, in bytes; the buffer ends where the weight does
TOOLS = ["memcheck", "racecheck", "initcheck"]
BREAKABLE = ["memcheck", "initcheck"]  # there is no shared memory in which to plant a race
OPTIONS = [
    "--kernel-name=kns=_dequantize_nf4_kernel",
    "--report-api-errors=no",
    "--target-processes=application-only",  # not the compilers that Triton starts
    "--error-exitcode=9",
]


def cases(nf4, device, shapes):
    """(weight, state, expected) on the device; made on the CPU; expected is nf4.spec's."""
    for shape in shapes:
        for dtype in nf4.DTYPES:
            for nested in (True, False):
                weight, state = nf4.quantized(shape, dtype, "cpu", nested=nested)
                expected = nf4.spec(weight, state)
                state.to(device)
                for offset in OFFSETS:
                    buffer = torch.zeros(offset + weight.numel(), dtype=torch.uint8)
                    buffer[offset:] = weight.view(-1)
                    yield buffer.to(device)[offset:].view(-1, 1), state, expected.reshape(shape)


def run(nf4, device, shapes=SHAPES):
    """First launches, kept ones, and one after absmax was replaced.

    returns  {checked, differing}
    """
    counts = {"checked": 0, "differing": 0}
    for weight, state, expected in cases(nf4, device, shapes):
        if weight.shape[0] == 1:
            expected = expected.t()
        outs = [nf4.dequantize_nf4(weight, state), nf4.dequantize_nf4(weight, state)]
        state.absmax = state.absmax.to("cpu", copy=True).to(device)
        outs.append(nf4.dequantize_nf4(weight, state))
        outs.append(nf4.launched(weight, state).view(state.shape).view(expected.shape))
        for out in outs:
            counts["checked"] += out.numel()
            counts["differing"] += nf4.bits_differing(out.cpu(), expected)
    return counts


def compared_on_the_cpu():
    """Inside, torch.equal is: initcheck would take the answer, which torch's kernel wrote, for
    unwritten."""
    equal = torch.equal
    return mock.patch.object(torch, "equal", lambda x, y: equal(x.cpu(), y.cpu()))


def run_broken(nf4, device):
    weight, state = nf4.quantized((64, 128), torch.float16, "cpu")
    state.to(device)
    nf4.launched(torch.empty_like(weight, device=device), state).cpu()
    nf4.check = lambda *_, **__: None  # which would refuse a weight that is too short
    nf4.launched(weight[: weight.numel() // 2].to(device), state).cpu()


def find_sanitizer():
    """compute-sanitizer's path, or None."""
    name = "compute-sanitizer"
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")


def errors_in(report):
    """The number of errors in a tool's summary; None where there is none."""
    counts = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", report)
    return sum(map(int, counts)) if counts else None


def watch(tool, *arguments):
    """Runs this script under a tool: (errors, everything that was printed)."""
    padding = ["--padding=4096"] if tool == "memcheck" else []
    command = [find_sanitizer(), f"--tool={tool}", *OPTIONS, *padding]
    command += [sys.executable, __file__, *arguments]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    return errors_in(done.stdout), done.stdout


def main():
    if "--all" in sys.argv:
        report = {tool: watch(tool)[0] for tool in TOOLS}
        report |= {f"{tool}, broken": watch(tool, "--broken")[0] for tool in BREAKABLE}
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with compared_on_the_cpu():
            report = (run_broken if "--broken" in sys.argv else run)(helpers.load(), device)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
