"""compute-sanitizer finds nothing in the kernel: no access out of bounds, no race, no read of unwritten memory."""

import json

import pytest
import sanitize
import torch


def watched(tool, *arguments):
    if sanitize.find_sanitizer() is None:
        pytest.skip("needs compute-sanitizer")
    errors, output = sanitize.watch(tool, *arguments)
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer: Device not supported")
    assert errors is not None, f"no summary in: {output[-3000:]}"
    return errors, output


@pytest.mark.gpu
@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_nothing_is_found(tally, tool):
    errors, output = watched(tool)
    tally["sanitizer_errors"] += errors
    assert errors == 0, output[-6000:]
    counts = json.loads(next(line for line in output.splitlines() if line.startswith('{"checked"')))
    tally["weights"] += counts["checked"]
    tally["differing"] += counts["differing"]
    assert counts["checked"] > 500_000 and counts["differing"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("tool", sanitize.BREAKABLE)
def test_a_broken_launch_is_found(tool):
    errors, output = watched(tool, "--broken")
    assert errors > 0 and "_dequantize_nf4_kernel" in output, output[-3000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the sanitizer's runs do this")
def test_the_cases_on_a_cpu(nf4, tally):
    counts = sanitize.run(nf4, "cpu")
    tally["weights"] += counts["checked"]
    tally["differing"] += counts["differing"]
    assert counts["checked"] > 500_000 and counts["differing"] == 0


def test_summaries_are_read():
    assert sanitize.errors_in("========= ERROR SUMMARY: 0 errors\n") == 0
    assert sanitize.errors_in("========= ERROR SUMMARY: 1 error\n") == 1
    assert sanitize.errors_in("========= RACECHECK SUMMARY: 16 hazards displayed (9 errors, 7 warnings)\n") == 16
    assert sanitize.errors_in("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n") == 0
    assert sanitize.errors_in("Target application terminated before first instrumented API call") is None
