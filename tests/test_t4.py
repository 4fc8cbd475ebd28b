"""A T4 gets lean machine code of the kernel from each Triton that users have, and it is recorded.

No GPU is needed: tools/sm_75.py compiles and disassembles.
"""

import json
import subprocess
import sys
from importlib import metadata

import pytest
import shared
import torch

VERSIONS = ["3.5.1", "3.6.0", "3.9.0"]  # the lowest that is allowed, Colab's, the newest
RECORD = shared.stored("sm_75")
MOST_INSTRUCTIONS = {"float16": 11, "bfloat16": 17, "float32": 11}  # per weight


@pytest.mark.longest
@pytest.mark.parametrize("version", VERSIONS)
def test_the_record_is_what_this_triton_compiles(version):
    if torch.cuda.is_available() and version != metadata.version("triton"):
        pytest.skip("needs a package index")
    if version == "3.9.0" and sys.version_info < (3, 11):
        pytest.skip("not published for this Python")
    # In a process of its own: the interpreter and the compiler cannot share one.
    command = [sys.executable, shared.ROOT / "tools" / "sm_75.py", version]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout.splitlines()[-1])
    fused = [row for row in compiled if row["ffma"] > 0]
    why = "an FMA (a product contracted with a sum) skips a rounding, and gives other bits"
    assert not fused, f"{why}: write that product as _mul_rn(a, b). {fused}"
    recorded = [row for row in RECORD if row["triton"] == version]
    cure = "new machine code goes on record by: .venv/bin/python tools/sm_75.py --record"
    assert compiled == recorded, cure


@pytest.mark.parametrize("version", VERSIONS)
def test_the_code_is_lean(version):
    """A T4 has 64 registers for each of its threads when it is full of them: these are no more."""
    rows = [row for row in RECORD if row["triton"] == version]
    assert len(rows) == 3 * 2, "of each dtype: nested and plain"
    for row in rows:
        assert row["registers"] <= 64 and row["spills"] == 0 and row["ffma"] == 0, row
        assert row["shared"] == 0 or row["dtype"] == "float32", row
        assert row["word_load_bits"] == "32" and row["shuffles"] == 2 * 8, row
        assert row["store_bits"].split()[-1] == "128", row  # of all programs but the last
        assert row["instructions_per_weight"] <= MOST_INSTRUCTIONS[row["dtype"]], row
