"""What the install cell does to Colab: the record, and the reading of Colab's list. pip itself is asked by colab.py."""

import json

import colab
import pytest


def test_record_leaves_torch_and_cuda_alone():
    record = json.loads(colab.RECORD.read_text())
    assert set(record["untouched"]) == {"torch", "triton", "numpy", "nvidia packages"}
    assert record["untouched"]["nvidia packages"] > 20
    assert not [name for name in {**record["new"], **record["changed"]} if colab.protected(name)]
    assert {"bitsandbytes", "unsloth"} <= set(record["new"])
    assert set(record["new"]).isdisjoint(record["changed"])


@pytest.mark.parametrize("name", ["torch", "triton", "numpy", "nvidia-cudnn-cu12", "cuda-python", "numba-cuda"])
def test_protected(name):
    assert colab.protected(name)


@pytest.mark.parametrize("name", ["torchao", "datasets", "xformers", "numpydoc"])
def test_not_protected(name):
    assert not colab.protected(name)


def test_list_is_read(tmp_path):
    path = tmp_path / "list.txt"
    pinned = "# comment\nNumPy==2.1.3\ntorch==2.11.0+cu128\ntriton==3.6.0\npip==24.1.2\npydantic_core==2.46.4\n"
    elsewhere = "google-colab @ file:///dist/google_colab-1.0.0.tar.gz\nkernel @ git+https://example.org/kernel@b134\n"
    path.write_text(pinned + elsewhere)
    packages = colab.read_list(path)
    assert packages["numpy"] == "2.1.3" and packages["torch"] == "2.11.0+cu128"
    assert packages["pydantic-core"] == "2.46.4"
    assert packages["google-colab"] == "1.0.0" and packages["kernel"] == "0"


@pytest.mark.parametrize("text, message", [("torch>=2\n", "expected `name==version`"), ("tqdm==4.0\n", "is no list")])
def test_another_file_is_refused(tmp_path, text, message):
    path = tmp_path / "list.txt"
    path.write_text(text)
    with pytest.raises(SystemExit, match=message):
        colab.read_list(path)
