"""Protects the record's reader: tools measure what they say, and refuse what shows nothing."""

import contextlib
import json
import math
import os
import types

import pytest
import shared
import t4
import tally
import torch
import training


class FalseTraining:
    """A training step of known milliseconds, and a clock that it moves."""

    def __init__(self, nf4):
        self.nf4, self.small = nf4, nf4.quantized((8, 64), torch.float16, "cpu")
        self.ms, self.is_inside, self.log = 0.0, False, []
        self.uses_ours, self.results = True, {"stock": 1.0, "ours": 1.0}

    @contextlib.contextmanager
    def context(self):
        self.is_inside, self.ms = True, self.ms + 100  # outside the clock
        yield
        self.is_inside = False

    def step(self):
        """Take 2 ms inside the context and 3 outside; of five steps, one is slow and one fast."""
        name = "ours" if self.is_inside else "stock"
        self.log.append(name)
        self.ms += {"ours": 2, "stock": 3}[name] + {0: 7, 1: -1}.get(self.log.count(name) % 5, 0)
        if self.is_inside and self.uses_ours:
            self.nf4.dequantize_nf4(*self.small)
        return [torch.tensor(self.results[name])]

    def wait(self):
        self.log.append("wait")
        self.ms += 0.25


@pytest.fixture
def false_training(nf4, monkeypatch):
    false_training = FalseTraining(nf4)
    monkeypatch.setattr(torch.cuda, "synchronize", false_training.wait)
    monkeypatch.setattr(training.time, "perf_counter", lambda: false_training.ms / 1e3)
    return false_training


def test_training_steps_do_equal_work_and_are_waited_for(nf4, false_training):
    """A time is a median, and includes one wait of 0.25 ms."""
    row = training.measure(false_training.step, false_training.context, nf4, rounds=25)
    assert row == {"stock_ms": pytest.approx(3.25), "ours_ms": pytest.approx(2.25)}
    timed = false_training.log[false_training.log.index("wait") :]
    assert len(timed) == 25 * 2 * 3 and set(timed[::3]) == set(timed[2::3]) == {"wait"}
    rounds = [tuple(timed[i : i + 6 : 3]) for i in range(1, len(timed), 6)]
    assert set(rounds) == {("stock", "ours"), ("ours", "stock")}, "in a random order"


SHOWS_NOTHING = {  # {what shows nothing: (does ours run?, the results of stock and of ours)}
    "ours does not run": (False, 1.0, 1.0),
    "infinite losses": (True, math.inf, math.inf),
    "other losses": (True, 1.0, 1.0000001),
}


@pytest.mark.parametrize("what", SHOWS_NOTHING)
def test_training_steps_that_show_nothing_are_not_recorded(nf4, false_training, what):
    uses_ours, stock, ours = SHOWS_NOTHING[what]
    false_training.uses_ours, false_training.results = uses_ours, {"stock": stock, "ours": ours}
    with pytest.raises(SystemExit, match="nothing was written"):
        training.measure(false_training.step, false_training.context, nf4, rounds=1)
    assert "wait" not in false_training.log, "nothing was timed"


def test_the_clock_that_a_t4_needs_is_that_of_the_busiest_pipe():
    """Of the ALU's 32 instructions a weight, at 64 a cycle; conversions need 2 at 16 a cycle."""
    names = ["IADD3"] * 64 + ["FFMA.FTZ"] * 6 + ["F2F.F16.F32"] * 4 + ["SHFL.IDX"] * 2
    *rows, clock = t4.table({"ours": t4.by_pipe([*names, "EXIT", "NO_SUCH.NAME"], 2)})
    found = [(row["threads a cycle"], row["ours"]) for row in rows]
    assert found == [(64, 32), (64, 3), (16, 2), (32, 1), ("", 0), ("", 1)]
    weights_per_s = 240e9 / (1 / 2 + 1 / 64 + 2) / 40  # for each multiprocessor
    assert clock["ours"] == round(weights_per_s * 32 / 64 / 1e6)


@pytest.mark.parametrize("status", [0, 1, 2], ids=["passed", "some failed", "interrupted"])
def test_a_tally_is_of_all_tests_and_of_errors_as_failures(tmp_path, monkeypatch, status):
    stats = {"passed": [1, 2], "failed": [3], "error": [4], "skipped": [5], "warnings": [6]}

    def run_pytest(arguments, plugins):
        assert arguments == [str(shared.ROOT / "tests"), "-q", "-n", "8"], "no part of the tests"
        assert "PYTEST_ADDOPTS" not in os.environ, "which may choose some"
        plugins[0].pytest_terminal_summary(types.SimpleNamespace(stats=stats))
        return status

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(pytest, "main", run_pytest)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k bits")
    file = tmp_path / "tests.json"
    with pytest.raises(SystemExit) if status == 2 else contextlib.nullcontext():
        tally.main([str(file)])
    assert file.exists() == (status != 2)
    if file.exists():
        counts = {"passed": 2, "failed": 2, "skipped": 1}
        data = json.loads(file.read_text())["data"]
        assert data == {"GPUs": torch.cuda.device_count()} | counts


@pytest.mark.parametrize("name", ["differing", "median"], ids=["defined", "imported"])
def test_a_cell_that_takes_a_definitions_name_is_refused(monkeypatch, name):
    """In the notebook, all later calls would find something else there, and trials would fail."""
    cells = [*shared.marked_cells(), ("run", f"{name} = 0", 99)]
    monkeypatch.setattr(shared, "marked_cells", lambda: cells)
    with pytest.raises(ValueError, match=f"^code cell 99 takes the name of .*: {name}$"):
        shared.load("nf4_taken")


def test_a_hash_counts_the_sources_own_text():
    """Whatever Python reads it: 3.12 writes what it has parsed in another way than 3.11."""
    source = '"""A docstring."""\n\nx = f"{a[\'b\']!r}" + (1)  # a comment\n'
    assert shared.bare(source) == "x = f\"{a['b']!r}\" + (1)"
