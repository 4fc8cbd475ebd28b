"""What can be known of a T4 without one: its own PTX gives the right bits, bf16 really compiles where it is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.config


@pytest.mark.gpu
def test_the_t4s_own_ptx_on_this_gpu():
    pytest.importorskip("cupy")
    done = subprocess.run([sys.executable, Path(__file__).with_name("t4_ptx.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["checked"] > 1_000_000_000 and report["differing"] == 0


def bf16_layer(nf4, device):
    layer = nf4.bnb_Linear4bit(64, 128).to(device)
    layer.weight.quant_state.dtype = torch.bfloat16
    return layer


@pytest.mark.gpu
def test_bf16_really_compiles_where_inductor_refuses_bf16(nf4, monkeypatch, tmp_path):
    """Inductor's own refusal, told that this GPU has no native bf16."""
    from torch._dynamo.device_interface import CudaInterface

    monkeypatch.setattr(CudaInterface, "is_bf16_supported", staticmethod(lambda including_emulation=False: False))
    monkeypatch.setattr(nf4, "native_bf16", lambda device: False)
    X, mlp = nf4.build(nf4.OPTIONS[1], torch.bfloat16)
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)  # a cached graph is not asked again
    with torch._dynamo.config.patch(debug_dir_root=str(tmp_path)):
        reports = nf4.compile_reports(X, mlp, torch.bfloat16, "cuda")
    assert {function for function, _ in reports} == {"dequantization"}
    assert all(report["compiled"] and report["bit_equal"] and report["graphs"] == 1 for report in reports.values())
    try:  # the control: bf16 across the border is refused
        layer = (mlp.gate_proj,)
        report = nf4.compile_report(nf4.your_dequantize_nf4, [layer], [nf4.your_dequantize_nf4(*layer)], "cuda")
    except Exception as refusal:
        assert "bf" in str(refusal).lower()
    else:
        assert not report["compiled"]


def test_bits_pass_a_backend_that_refuses_bf16_at_the_border(nf4, device):
    """The same refusal as a backend, so that it is tested without a GPU as well."""

    def refusing(graph_module, example_inputs):
        (output,) = [node for node in graph_module.graph.nodes if node.op == "output"]
        values = [node.meta["example_value"] for node in output.args[0]] + list(example_inputs)
        if any(isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 for value in values):
            raise RuntimeError("BF16 is not supported")
        return nf4.GraphCounter(device)(graph_module, example_inputs)

    layer = bf16_layer(nf4, device)
    bits = torch.compile(nf4.dequantize_bits, fullgraph=True, backend=refusing)(layer)
    assert nf4.bits_differing(bits.view(torch.bfloat16), nf4.your_dequantize_nf4(layer)) == 0
    torch._dynamo.reset()
    with pytest.raises(Exception, match="BF16 is not supported"):
        torch.compile(nf4.your_dequantize_nf4, fullgraph=True, backend=refusing)(layer)
