"""The kernel compiles for a T4 and newer GPUs, without a GPU, and its machine code is as good as it was.

Compiled now are the Triton at hand, Colab's and the newest recorded one; pip installs what is not there.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import notebook
import pytest

VERSIONS = ["3.3.1", "3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0"]
COMPILED_NOW = sorted({importlib.metadata.version("triton"), "3.6.0", "3.9.0"})
ARCHITECTURES = {"80", "86", "89", "90", "100", "120"}
DTYPES = {"float16", "bfloat16", "float32"}
MOST = {"float16": 7.0, "bfloat16": 8.5}  # instructions per weight; 8 and 10 would still do
MOST_PORTABLE = {"float16": 10.5, "bfloat16": 15.5}
RECORD = json.loads((notebook.ROOT / "results" / "sm_75.json").read_text())


def run_python(*arguments, **environment):
    """Python in a process of its own, in this folder, without the interpreter (sm_75.py says why)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=Path(__file__).parent, capture_output=True, text=True)


def sm_75(*arguments):
    return run_python("sm_75.py", *arguments)


@pytest.fixture(scope="module", params=COMPILED_NOW)
def report(request):
    at_hand = request.param == importlib.metadata.version("triton")
    done = sm_75(*([] if at_hand else [request.param]))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["triton"] == request.param
    return report


def check_words(facts, most, shuffled):
    """16-bit output: by words, without spills, without shared memory, in few instructions."""
    assert facts["compiled"] and facts["spills"] == 0 and facts["shared"] == 0
    assert set(facts["store_bits"]) == {"128"}
    assert facts["packed_load_bits"] and all(int(bits) >= 32 for bits in facts["packed_load_bits"])
    assert facts["instructions_per_weight"] <= most
    assert (facts["shuffles"] > 0) == shuffled


def check_report(report):
    for dtype, most in MOST.items():
        check_words(report[dtype], most, shuffled=True)
        check_words(report["portable"][dtype], MOST_PORTABLE[dtype], shuffled=False)
    for facts in (report["float32"], report["portable"]["float32"]):  # by bytes: no bar on reads and instructions
        assert facts["compiled"] and facts["spills"] == 0 and set(facts["store_bits"]) == {"128"}


def test_machine_code(report):
    check_report(report)


def test_record_is_what_is_compiled_now(report):
    if report["triton"] not in RECORD:
        pytest.skip(f"Triton {report['triton']} is not in the matrix yet: add it to VERSIONS")
    assert RECORD[report["triton"]] == report, "run tests/sm_75.py --matrix"


def test_matrix_is_complete():
    assert list(RECORD) == VERSIONS
    for version, report in RECORD.items():
        assert report["triton"] == version
        assert DTYPES < set(report) and set(report["portable"]) == DTYPES
    for version in ("3.6.0", "3.9.0"):
        architectures = RECORD[version]["architectures"]
        assert set(architectures) == ARCHITECTURES
        assert all(set(a) == DTYPES | {"portable"} and set(a["portable"]) == DTYPES for a in architectures.values())


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_machine_code(version):
    check_report(RECORD[version])


@pytest.mark.parametrize("version", ["3.6.0", "3.9.0"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES, key=int))
def test_newer_architectures(version, architecture):
    report = RECORD[version]["architectures"][architecture]
    for decode in (report, report["portable"]):
        for dtype in DTYPES:
            assert decode[dtype]["compiled"] and decode[dtype]["spills"] == 0
            assert set(decode[dtype]["store_bits"]) == {"128"}
        assert all(decode[dtype]["shared"] == 0 for dtype in MOST)


def test_an_unknown_version_is_refused():
    done = sm_75("2.0.0")
    assert done.returncode == 1 and "expected nothing, --matrix or one of 3.3.1" in done.stderr


def test_what_does_not_compile_is_reported():
    """The tool itself: assembly that ptxas refuses fails the default decode of the 16-bit dtypes, nothing else."""
    script = """
import notebook
import sm_75

load = notebook.load
notebook.load = lambda: load("broken", edit=("shfl.sync.idx.b32 $0, $2", "shfl.sync.nonsense.b32 $0, $2"))
raise SystemExit(sm_75.main([]))
"""
    done = run_python("-c", script)
    assert done.returncode == 1 and "does not compile: float16: " in done.stderr, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert {dtype for dtype in DTYPES if not report[dtype]["compiled"]} == set(MOST)
    assert not [dtype for dtype in MOST if "\n" in report[dtype]["error"]]
    assert all(report["portable"][dtype]["compiled"] for dtype in DTYPES)


def printed(script, **environment):
    """The lines that the script prints."""
    done = run_python("-c", script, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_quoted_machine_code_is_the_disassemblys():
    """The table of section 6, line by line and register by register, on Colab's Triton."""
    (table,) = (cell.source for cell in notebook.cells() if "| what a lane does |" in cell.source)
    quoted = [line.split("|")[3].strip(" `") for line in table.splitlines() if line.startswith("| `")]
    assert len(quoted) == 10
    script = """
import notebook, sm_75, torch
nf4 = notebook.load()
print(*sm_75.disassemble(sm_75.compile_for(nf4, torch.float16, nf4.Setting())[0])[0], sep="\\n")
"""
    folder = printed("import sm_75; print(sm_75.installed('3.6.0'))")[-1]
    instructions = printed(script, PYTHONPATH=folder)
    assert [line for line in quoted if line not in instructions] == []
