"""Give all tests the notebook's definitions and a device; write the tally of a run on GPUs."""

import os
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
        stats = {name: len(found) for name, found in terminalreporter.stats.items()}
        data = {"gpus": torch.cuda.device_count(), "passed": stats.get("passed", 0)}
        data["failed"] = stats.get("failed", 0) + stats.get("error", 0)
        data["skipped"] = stats.get("skipped", 0)
        gpu = torch.cuda.get_device_name() if GPU else None
        shared.write(path, shared.entry("tests", data, gpu))


@pytest.fixture(scope="session")
def nf4():
    """The notebook's definitions. On a CPU, too, they run the assembly, which is emulated."""
    nf4 = shared.load()
    nf4.HAS_SHUFFLES = True
    return nf4


@pytest.fixture(autouse=True)
def alone(nf4, caplog):
    """Leave no plans behind; fail where the log has a line that the test did not expect."""
    torch._dynamo.reset()
    yield
    nf4.PLANS.clear()
    nf4.TRIALS.clear()
    nf4.warn_once.cache_clear()
    nf4.private.cache_clear()
    said = [each.getMessage() for each in caplog.get_records("call") if each.name == "nf4_triton"]
    assert not said


@pytest.fixture
def planned(nf4, device, monkeypatch):
    """The notebook's definitions, with plans by stand-ins on a CPU; counts what calls ran."""
    return helpers.Planned(nf4, device, monkeypatch)


@pytest.fixture(scope="session")
def device():
    return "cuda" if GPU else "cpu"
