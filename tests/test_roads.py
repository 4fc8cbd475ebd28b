"""tools/roads.py: every road gives bitsandbytes' bits, and its machine code is as long as results/roads.json says."""

import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT

RECORD = json.loads((ROOT / "results" / "roads.json").read_text())


def roads(argument):
    """What the tool prints, in a process of its own, without this one's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, ROOT / "tools" / "roads.py", argument]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_road_gives_the_same_bits():
    assert roads("--check").count("no bit differs") == 4


def test_the_record_is_complete():
    assert RECORD["rows"] and all(set(row) == {"decode", "float16", "bfloat16"} for row in RECORD["rows"])


def test_the_record_counts_what_is_compiled_now():
    triton = pytest.importorskip("triton")
    if RECORD["triton"] != triton.__version__:
        pytest.skip(f"the record is of Triton {RECORD['triton']}")
    counts = json.loads(roads("--instructions").splitlines()[-1])
    for row in RECORD["rows"]:
        recorded = {dtype: row[dtype] and row[dtype]["sm_75_instructions"] for dtype in ("float16", "bfloat16")}
        assert counts.pop(row["decode"]) == recorded, row["decode"]
    assert not counts
