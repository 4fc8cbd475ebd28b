"""Give all tests the notebook's definitions and a device."""

import os
import shutil

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton
    torch.set_num_threads(1)  # the tests' tensors are small, and several processes run

import helpers  # noqa: E402
import pytest  # noqa: E402
import shared  # noqa: E402
import stand_ins  # noqa: E402

if not GPU:
    stand_ins.emulate_assembly()


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "longest" not in item.keywords)  # it begins at once
    for item in items:
        if "gpu" in item.keywords and not GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def load(name):
    """Return the notebook's definitions. On a CPU a stand-in runs the kernel's assembly."""
    nf4 = shared.load(name)
    if not GPU:
        stand_ins.let_the_interpreter_run_assembly(nf4)
    return nf4


@pytest.fixture(scope="session")
def nf4():
    return load("nf4_triton")


@pytest.fixture(scope="session")
def device():
    return "cuda" if GPU else "cpu"


@pytest.fixture(autouse=True)
def alone(nf4, caplog):
    """Leave no plans behind; fail where the log has a line that the test did not expect."""
    torch._dynamo.reset()
    yield
    nf4.PLANS.clear()
    nf4.TRIALS.clear()
    said = [each.getMessage() for each in caplog.get_records("call") if each.name == "nf4_triton"]
    assert not said, "lines in the log that this test did not expect (caplog.clear() drops them)"


@pytest.fixture
def calls(nf4, device, monkeypatch):
    """Calls of the notebook's definitions; they keep plans, on a CPU by stand-ins."""
    return helpers.Calls(nf4, device, monkeypatch)


@pytest.fixture
def make_copy(device, monkeypatch):
    """Returns, for a name, calls of a copy of the definitions, whose cells may be edited."""
    return lambda name: helpers.Calls(load(name), device, monkeypatch)


@pytest.fixture
def copied(make_copy):
    return make_copy("nf4_edited")


@pytest.fixture
def repository(tmp_path):
    """The folder of a copy of the repository, without hidden files and what runs leave."""
    ignored = shutil.ignore_patterns(".*", "run", "nf4_triton.py")
    return shutil.copytree(shared.ROOT, tmp_path / "repository", ignore=ignored)
