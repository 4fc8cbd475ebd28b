"""The kernel compiles for a T4, without a GPU, and its machine code is as good as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def report():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).with_name("sm_75.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("dtype, most", [("float16", 7.0), ("bfloat16", 8.5)])
def test_machine_code(report, dtype, most):
    facts = report[dtype]
    assert facts["compiled"] and facts["spills"] == 0 and facts["shared"] == 0
    assert set(facts["store_bits"]) == {128}
    assert facts["load_bits"].count(32) >= report["setting"][1]
    assert facts["instructions_per_weight"] <= most


def test_float32_compiles_without_spills(report):
    assert report["float32"]["compiled"] and report["float32"]["spills"] == 0
