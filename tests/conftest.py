import collections
import datetime
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

import helpers  # noqa: E402
import pytest  # noqa: E402

if not GPU:
    helpers.emulate_assembly()
TALLY = collections.Counter()


def pytest_addoption(parser):
    parser.addoption(
        "--tally",
        metavar="FILE",
        help="add what the tests counted to FILE (the record's `robustness`)",
    )


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords and not GPU:
            item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """What a worker of pytest-xdist counted."""
    TALLY.update(getattr(node, "workeroutput", {}).get("tally", {}))


def pytest_sessionfinish(session, exitstatus):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tally"] = dict(TALLY)
        return
    path = session.config.getoption("--tally")
    if path:  # more than one run may count: what is timed wants the machine to itself
        gpu = torch.cuda.get_device_name() if GPU else "CPU (Triton interpreter)"
        facts = {"gpu": gpu, "date": datetime.date.today().isoformat()}
        before = (
            json.loads(Path(path).read_text()) if Path(path).exists() else facts | {"passed": True}
        )
        if facts != {name: before.pop(name) for name in facts}:
            raise pytest.UsageError(f"{path} was counted elsewhere; expected {facts}")
        facts["passed"] = before.pop("passed") and exitstatus == 0
        TALLY.update(before)
        Path(path).write_text(json.dumps(facts | dict(TALLY), indent=1) + "\n")


@pytest.fixture(scope="session")
def nf4():
    """The notebook's definitions."""
    return helpers.load()


@pytest.fixture(params=["assembly", "loads"])
def look_up(nf4, monkeypatch, request):
    """Runs the test by the assembly (emulated on a CPU) and by loads."""
    by = {}
    for itemsize, setting in nf4.DEFAULTS.items():
        by[itemsize] = replace(setting, assembly=request.param == "assembly")
    monkeypatch.setattr(nf4, "DEFAULTS", by)
    return request.param


@pytest.fixture(scope="session")
def device():
    return "cuda" if GPU else "cpu"


@pytest.fixture(scope="session")
def tally():
    """A Counter for the record: cases, weights, differing, errors, sanitizer_errors, load_calls,
    load_growth_bytes."""
    return TALLY
