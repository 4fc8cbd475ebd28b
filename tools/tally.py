"""Runs all tests, and tallies how they end.

    python tools/tally.py FILE    on a GPU, three minutes: writes what tools/record.py takes in

It takes no choice of tests, so a tally is always of all of them (but the faults, which are for a
CPU).
"""

import os
import sys

import pytest
import shared
import torch


class Tally:
    """A plugin of pytest that counts, of all tests together, how they ended."""

    def pytest_terminal_summary(self, terminalreporter):
        counts = {name: len(reports) for name, reports in terminalreporter.stats.items()}
        self.data = {"GPUs": torch.cuda.device_count(), "passed": counts.get("passed", 0)}
        self.data["failed"] = counts.get("failed", 0) + counts.get("error", 0)
        self.data["skipped"] = counts.get("skipped", 0)


def main(arguments):
    if len(arguments) != 1:
        raise SystemExit(__doc__)
    if not torch.cuda.is_available():
        raise SystemExit("The tally is of a run on a GPU, and there is none here.")
    os.environ.pop("PYTEST_ADDOPTS", None)
    tally = Tally()
    status = pytest.main([str(shared.ROOT / "tests"), "-q", "-n", "8"], [tally])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit("the tests were interrupted, or could not be set up: nothing was written")
    measured = shared.measurement("tests", tally.data, torch.cuda.get_device_name())
    shared.write(arguments[0], measured)


if __name__ == "__main__":
    main(sys.argv[1:])
