"""tools/roads.py: every road gives bitsandbytes' bits; results/roads.json counts its code."""

import ast
import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT

RECORD = json.loads((ROOT / "results" / "roads.json").read_text())
FACTS = {"step", "dtype", "us", "ceiling_us", "sm_75_instructions"}
BY_HAND = "bf16 rounded by hand on its bits"


def python(*arguments):
    """What a process of its own prints, in the tools' folder, without this one's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    tools = ROOT / "tools"
    done = subprocess.run(command, cwd=tools, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def counts():
    """{road: {dtype: instructions per weight}}, as it is compiled now."""
    return json.loads(python("roads.py", "--instructions").splitlines()[-1])


def test_every_road_gives_the_same_bits():
    assert python("roads.py", "--check").count("no bit differs") == 4


def test_a_wrong_road_is_found():
    script = """
import sys

sys.argv.append("--check")
import roads

by_loads = ("word >> (4 * (i ^ 1))", "word >> (4 * i)")
by_shuffles = ("4, 0, 12, 8, 20, 16, 28, 24", "0, 4, 8, 12, 16, 20, 24, 28")
wrong = roads.helpers.load("roads_wrong", by_loads, by_shuffles)
roads.ROADS["wrong"] = wrong, roads.SIZE
try:
    roads.main(["--check"])
except RuntimeError as error:
    print(error)
"""
    assert "wrong: " in python("-c", script)


def test_the_edits_of_our_kernel_are_there():
    """Those whose counts are the same: the cache policies, and which loads come first."""
    script = """
import re

import roads
import sm_75

found = {}
edited = roads.ours, roads.two_loops, roads.no_policy, roads.output_first, roads.by_hand
for label, (module, size) in roads.ROADS.items():
    if module in edited and size == roads.SIZE:
        code = sm_75.compile_for(module, roads.torch.bfloat16).asm
        policies = sorted(set(re.findall(r"(?:ld|st)[.]global[.]L1::evict_[a-z]+", code["ptx"])))
        loads = re.findall(r"tt[.]load .*tensor<128x!tt[.]ptr<(i8|i32)>>", code["ttir"])
        found[label] = policies, loads
print(found)
"""
    found = ast.literal_eval(python("-c", script).splitlines()[-1])
    policies = ["ld.global.L1::evict_first", "ld.global.L1::evict_last"]
    words, absmax = "i32", "i8"
    loads = [words, words, absmax, absmax]
    assert found == {
        "words, the code by shuffles: ours": (policies, loads),
        "two loops: all scales first": (policies, [absmax, absmax, words, words]),
        "no eviction policy at all": ([], loads),
        "the output evicted first, too": ([*policies, "st.global.L1::evict_first"], loads),
        BY_HAND: (policies, loads),
    }


def test_the_record_is_complete(counts):
    """Every label of the tool, in both dtypes and the tool's order; fp16 is not rounded by hand."""
    wanted = []
    for dtype in ("float16", "bfloat16"):
        for label in counts:
            if label != BY_HAND or dtype == "bfloat16":
                wanted.append((label, dtype))
    assert [(row["step"], row["dtype"]) for row in RECORD["rows"]] == wanted
    assert list(RECORD["taught"]) == list(counts)
    assert all(3 <= len(taught.split()) <= 5 for taught in RECORD["taught"].values())


def test_the_record_has_facts():
    assert RECORD["gpu"] and RECORD["date"] and len(RECORD["shape"]) == 2
    for row in RECORD["rows"]:
        assert set(row) == FACTS, row
        assert row["us"] > 0 and row["ceiling_us"] > 0, row


def test_the_record_counts_what_is_compiled_now(counts):
    triton = pytest.importorskip("triton")
    if RECORD["triton"] != triton.__version__:
        pytest.skip(f"the record is of Triton {RECORD['triton']}")
    for row in RECORD["rows"]:
        assert counts[row["step"]][row["dtype"]] == row["sm_75_instructions"], row
