import collections
import datetime
import json
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

if not GPU:
    helpers.emulate_assembly()


def pytest_addoption(parser):
    parser.addoption(
        "--tally",
        metavar="FILE",
        type=Path,
        help="add what the tests counted to FILE (the record's `robustness`)",
    )


def pytest_configure(config):
    path = config.getoption("--tally")
    if path and not hasattr(config, "workerinput"):  # the workers of pytest-xdist report
        config.pluginmanager.register(Tally(path))


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "longest" not in item.keywords)  # it begins at once
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords and not GPU:
            item.add_marker(skip)


class Tally:
    """Writes what the tests counted after each of them, so that a run that is cut keeps it.

    finished  every run that counted into the file came to its end
    passed, failed, skipped  tests; then what they counted themselves
    """

    def __init__(self, path):
        self.path, self.finished = path, True
        gpu = torch.cuda.get_device_name() if GPU else "CPU (Triton interpreter)"
        self.origin = {"gpu": gpu, "date": datetime.date.today().isoformat()}
        self.counts = collections.Counter(passed=0, failed=0, skipped=0)
        if path.exists():  # more than one run may count: what is timed wants the machine to itself
            before = json.loads(path.read_text())
            if self.origin != {name: before.pop(name) for name in self.origin}:
                raise pytest.UsageError(f"{path} was counted elsewhere; expected {self.origin}")
            self.finished = before.pop("finished")
            self.counts.update(before)
        self.write(finished=False)

    def write(self, finished):
        unfinished = self.path.with_name(self.path.name + ".tmp")
        found = self.origin | {"finished": finished} | dict(self.counts)
        unfinished.write_text(json.dumps(found, indent=1) + "\n")
        unfinished.replace(self.path)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.when == "teardown":
            for name, counted in report.user_properties:
                if name == "tally":
                    self.counts.update(counted)
            self.write(finished=False)

    def pytest_sessionfinish(self, exitstatus):
        to_its_end = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        self.write(self.finished and to_its_end)


@pytest.fixture(scope="session")
def nf4():
    """The notebook's definitions."""
    return helpers.load()


@pytest.fixture(params=["assembly", "loads"])
def look_up(nf4, monkeypatch, request):
    """Runs the test by the assembly (emulated on a CPU) and, on a CPU, by loads."""
    by_assembly = request.param == "assembly"
    if GPU and not by_assembly:
        pytest.skip("loads are for the interpreter")
    monkeypatch.setattr(nf4, "SHUFFLES", nf4.tl.constexpr(by_assembly))
    return request.param


@pytest.fixture(scope="session")
def device():
    return "cuda" if GPU else "cpu"


@pytest.fixture
def tally(request):
    """A Counter for the record: cases, weights, differing, errors, sanitizer_errors, load_calls,
    load_growth_bytes."""
    counted = collections.Counter()
    yield counted
    request.node.user_properties.append(("tally", dict(counted)))
