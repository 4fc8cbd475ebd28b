"""What all tests get: the notebook's definitions, a device, and the tally of a run on GPUs."""

import collections
import datetime
import os
import sys
from pathlib import Path

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

import helpers  # noqa: E402
import pytest  # noqa: E402
import shared  # noqa: E402

if not GPU:
    helpers.emulate_assembly()


def pytest_addoption(parser):
    parser.addoption("--tally", metavar="FILE", type=Path, help="write what was counted to FILE")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "longest" not in item.keywords)  # it begins at once
    for item in items:
        if "gpu" in item.keywords and not GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_terminal_summary(terminalreporter, config):
    """Writes results/tests.json's facts: tests by outcome, and what they counted themselves."""
    path = config.getoption("--tally")
    if not path:
        return
    found = {"gpu": torch.cuda.get_device_name() if GPU else "CPU (Triton interpreter)"}
    found |= {"gpus": torch.cuda.device_count(), "date": datetime.date.today().isoformat()}
    counts = collections.Counter()
    for outcome in ("passed", "failed", "error", "skipped"):
        reports = terminalreporter.stats.get(outcome, [])
        found[outcome] = len(reports)
        for report in reports:
            counts.update(dict(report.user_properties).get("tally", {}))
    shared.write({path: found | counts})


@pytest.fixture(scope="session")
def nf4():
    """The notebook's definitions."""
    return shared.load()


@pytest.fixture(autouse=True)
def forget_plans(nf4):
    """Each test begins without plans, and leaves none of its stand-ins' behind."""
    for kept in (nf4.PLANS, nf4.TRIED):
        kept.clear()
    yield
    for kept in (nf4.PLANS, nf4.TRIED):
        kept.clear()


@pytest.fixture(autouse=True)
def nothing_is_said(caplog):
    """Where a test does not expect it, no plan is refused."""
    yield
    assert not [each for each in caplog.get_records("call") if each.name == "nf4_triton"]


@pytest.fixture(params=["assembly", "selects"])
def look_up(nf4, monkeypatch, request):
    """Runs the test by the assembly (emulated on a CPU) and, on a CPU, without it."""
    by_assembly = request.param == "assembly"
    if GPU and not by_assembly:
        pytest.skip("that is for the interpreter")
    monkeypatch.setattr(nf4, "SHUFFLES", nf4.tl.constexpr(by_assembly))


@pytest.fixture
def planned(nf4, device, monkeypatch):
    """The notebook's definitions, with plans by stand-ins on a CPU; counts what calls ran."""
    planned = helpers.Planned(nf4, device, monkeypatch)
    yield planned
    assert not planned.said


@pytest.fixture(scope="session")
def device():
    return "cuda" if GPU else "cpu"


@pytest.fixture
def tally(request):
    """Counts for the record, which a test adds to."""
    counted = dict.fromkeys(("cases", "weights", "differing", "errors"), 0)
    request.node.user_properties.append(("tally", counted))  # reported when the test has run
    return counted
