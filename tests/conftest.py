"""What all tests get: the notebook's definitions and a device; the tally of a run on GPUs."""

import os
import time
from pathlib import Path

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton

import helpers  # noqa: E402
import pytest  # noqa: E402
import shared  # noqa: E402

if not GPU:
    helpers.emulate_assembly()


def pytest_addoption(parser):
    parser.addoption("--tally", metavar="FILE", type=Path, help="write how the tests end to FILE")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "longest" not in item.keywords)  # it begins at once
    for item in items:
        if "gpu" in item.keywords and not GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_terminal_summary(terminalreporter, config):
    path = config.getoption("--tally")
    if path:
        found = {"gpu": torch.cuda.get_device_name() if GPU else "CPU (Triton interpreter)"}
        found |= {"gpus": torch.cuda.device_count(), "date": time.strftime("%Y-%m-%d")}
        for outcome in ("passed", "failed", "error", "skipped"):
            found[outcome] = len(terminalreporter.stats.get(outcome, []))
        shared.write({path: found})


@pytest.fixture(scope="session")
def nf4():
    """The notebook's definitions. On a CPU, too, they run the assembly, which is emulated."""
    nf4 = shared.load()
    nf4.SHUFFLES = nf4.tl.constexpr(True)
    return nf4


@pytest.fixture(autouse=True)
def alone(nf4, caplog):
    """Each test leaves no plans behind, and no word of a refused plan that it did not expect."""
    torch._dynamo.reset()
    yield
    nf4.PLANS.clear()
    nf4.TRIED.clear()
    assert not [each for each in caplog.get_records("call") if each.name == "nf4_triton"]


@pytest.fixture
def planned(nf4, device, monkeypatch):
    """The notebook's definitions, with plans by stand-ins on a CPU; counts what calls ran."""
    return helpers.Planned(nf4, device, monkeypatch)


@pytest.fixture(scope="session")
def device():
    return "cuda" if GPU else "cpu"
