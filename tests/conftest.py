import os

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton

import notebook  # noqa: E402
import pytest  # noqa: E402


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords and not GPU:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def nf4():
    """The notebook's definitions."""
    return notebook.load()


@pytest.fixture(scope="session")
def device():
    return "cuda" if GPU else "cpu"
