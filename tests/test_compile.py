"""Inside torch.compile: one graph, no break, no recompilation, equal bits. Inductor on a GPU, AOT eager on a CPU."""

import notebook
import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_graph_and_equal_bits(nf4, device, dtype, tmp_path):
    option = nf4.OPTIONS[1] if device == "cuda" else nf4.SMALL_OPTIONS[1]
    X, mlp = nf4.build(option, dtype)
    with torch._dynamo.config.patch(debug_dir_root=str(tmp_path)):
        reports = nf4.compile_reports(X, mlp, dtype, device)
    assert len(reports) == 2 * len(nf4.COMPILE_RUNS)
    for name, report in reports.items():
        expected = {
            "graphs": 1,
            "graph_breaks": 0,
            "recompiles": 0,
            "bit_equal": True,
            "compiled": device == "cuda",
        }
        assert report == expected, name


def test_the_report_can_fail(nf4, device):
    layers = [(nf4.bnb_Linear4bit(64, 64 * n).to(device),) for n in (1, 2)]
    for (layer,) in layers:
        layer.weight.quant_state.dtype = torch.float16
    wrong = [nf4.your_dequantize_nf4(*layer) * 2 for layer in layers]
    report = nf4.compile_report(nf4.your_dequantize_nf4, layers, wrong, device)
    assert not report["bit_equal"] and report["recompiles"] == 1


@pytest.mark.parametrize("shape", [(3, 5), (64, 64), (1, 1)])
def test_ragged_and_float32(nf4, device, shape):
    for dtype in nf4.DTYPES:
        weight, state = nf4.quantized(shape, dtype, device)
        expected = [nf4.dequantize_nf4(weight, state)]
        report = nf4.compile_report(nf4.dequantize_nf4, [(weight, state)], expected, device)
        assert report["bit_equal"] and report["graphs"] == 1


def test_bits_cross_the_border_as_int16(nf4, device):
    layer = nf4.bnb_Linear4bit(64, 128).to(device)
    layer.weight.quant_state.dtype = torch.bfloat16
    expected = nf4.your_dequantize_nf4(layer)
    bits = torch.compile(nf4.dequantize_bits, fullgraph=True, backend=nf4.GraphCounter(device))(layer)
    assert bits.dtype == torch.int16
    assert nf4.bits_differing(bits.view(torch.bfloat16), expected) == 0


def test_bad_input_is_refused_while_tracing(nf4, device):
    weight, state = nf4.quantized((64, 64), torch.float16, device)
    state.quant_type = "fp4"
    with pytest.raises(Exception, match="fp4"):
        torch.compile(nf4.dequantize_nf4, fullgraph=True, backend=nf4.GraphCounter(device))(weight, state)


def test_opcheck(nf4, device):
    weight, state = nf4.quantized((64, 64), torch.bfloat16, device)
    arguments = (weight, *nf4.state_tensors(state), [64, 64], torch.bfloat16, 64, 256)
    torch.library.opcheck(nf4.dequantize_op, arguments)


def test_definitions_may_be_run_twice(device):
    """As a reader does who runs all cells again in one kernel."""
    notebook.load("nf4_again")
    nf4 = notebook.load("nf4_again")
    weight, state = nf4.quantized((64, 64), torch.float16, device)
    report = nf4.compile_report(
        nf4.dequantize_nf4, [(weight, state)], [nf4.dequantize_reference(weight, state)], device
    )
    assert report["bit_equal"] and report["graphs"] == 1


def test_strings_for_inductor_have_no_line_breaks(nf4):
    """Inductor (torch 2.11) writes a module-level constexpr string inside a string: a line break ends it early."""
    strings = [v.value for v in vars(nf4).values() if isinstance(v, nf4.tl.constexpr) and isinstance(v.value, str)]
    assert strings and not any("\n" in string for string in strings)
