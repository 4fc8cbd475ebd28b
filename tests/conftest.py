"""Give all tests the notebook's definitions and a device; write the tally of a run on GPUs."""

import os
import shutil
from pathlib import Path

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton
    torch.set_num_threads(1)  # the tests' tensors are small, and several processes run

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


def pytest_deselected(items):
    """Note that a tally would be of a part of the tests; faults are left out of it on purpose."""
    for item in items:
        if "faults" not in item.keywords:
            item.config.is_a_part = True


def pytest_collection_finish(session):
    config = session.config
    if config.getoption("--tally"):
        files = {item.path.name for item in session.items} | {"test_faults.py"}
        all_files = {path.name for path in Path(__file__).parent.glob("test_*.py")}
        is_a_part = files != all_files or any("::" in each for each in config.args)
        is_a_part |= getattr(config, "is_a_part", False)
        if is_a_part or config.getoption("maxfail"):  # -x ends a run before all tests have run
            raise pytest.UsageError("the tally must be of all tests: run pytest tests --tally FILE")


def tally(stats):
    """Return {passed, failed, skipped} of {outcome: reports}; an error is a failure."""
    counts = {name: len(reports) for name, reports in stats.items()}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    return {
        "passed": counts.get("passed", 0),
        "failed": failed,
        "skipped": counts.get("skipped", 0),
    }


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    path = config.getoption("--tally")
    is_worker = hasattr(config, "workerinput")  # of pytest-xdist, which has a part of the tests
    if path and not is_worker and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        data = {"GPUs": torch.cuda.device_count()} | tally(terminalreporter.stats)
        gpu = torch.cuda.get_device_name() if GPU else None
        shared.write(path, shared.measurement("tests", data, gpu))


@pytest.fixture(scope="session")
def nf4():
    """The notebook's definitions. On a CPU, too, they run the assembly, which is emulated."""
    nf4 = shared.load()
    if not GPU:
        helpers.let_the_interpreter_run_assembly(nf4)
    return nf4


@pytest.fixture(autouse=True)
def alone(nf4, caplog):
    """Leave no plans behind; fail where the log has a line that the test did not expect."""
    torch._dynamo.reset()
    yield
    nf4.PLANS.clear()
    nf4.TRIALS.clear()
    said = [each.getMessage() for each in caplog.get_records("call") if each.name == "nf4_triton"]
    assert not said


@pytest.fixture
def planned(nf4, device, monkeypatch):
    """The notebook's definitions, with plans by stand-ins on a CPU; sees what did the work."""
    return helpers.Planned(nf4, device, monkeypatch)


@pytest.fixture
def copied(device, monkeypatch):
    """A copy of the notebook's definitions, whose cells may be edited, like `planned`."""
    nf4 = shared.load("nf4_edited")
    if not GPU:
        helpers.let_the_interpreter_run_assembly(nf4)
    return helpers.Planned(nf4, device, monkeypatch)


@pytest.fixture
def clone(tmp_path):
    """A copy of the repository, without hidden files and what runs leave."""
    ignored = shutil.ignore_patterns(".*", "run", "nf4_triton.py")
    return shutil.copytree(shared.ROOT, tmp_path / "clone", ignore=ignored)


@pytest.fixture(scope="session")
def device():
    return "cuda" if GPU else "cpu"
