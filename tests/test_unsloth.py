"""Unsloth's own LoRA functions keep their results, to the bit, on a GPU, while they use ours."""

import importlib.util
from unittest import mock

import bits
import helpers
import pytest
import shared
import torch
import training


def compare_unsloths_functions():
    """Each LoRA function of Unsloth, forward and backward, as it is and within the context."""
    from unsloth.kernels import fast_lora

    nf4 = shared.load()
    from nf4_integrations import in_unsloth

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1}
    layer = training.build(sizes, "cuda").get_submodule("base_model.model.model.layers.0")
    attention = layer.self_attn
    functions = {  # {what: (the function, the weights that it dequantizes in both directions)}
        "MLP": (lambda x: [fast_lora.apply_lora_mlp_swiglu(layer.mlp, x, inplace=False)], 6),
        "QKV": (lambda x: fast_lora.apply_lora_qkv(attention, x, inplace=False), 6),
        "O": (lambda x: [fast_lora.apply_lora_o(attention, x)], 2),
    }
    x = torch.randn(2, 64, 512, device="cuda", dtype=torch.bfloat16)

    def eager(function):
        """Return the outputs, the gradient of x, and those of the adapters."""
        leaves = [x.clone().requires_grad_(), *training.adapters_of(layer)]
        outs = function(leaves[0])
        loss = sum(out.float().square().sum() for out in outs)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)  # other layers' adapters
        return [each.detach() for each in (*outs, *grads) if each is not None]

    def compiled(function):
        torch._dynamo.reset()
        return eager(torch.compile(function, fullgraph=True))

    def in_a_cuda_graph(function):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # what is compiled or planned, is so before
                eager(function)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = eager(function)
        for each in results:
            each.zero_()
        graph.replay()
        return results

    for how in (eager, compiled, in_a_cuda_graph):
        # A counter in what is compiled would break its graph: there the operator's body is counted.
        name = "run_operator" if how is compiled else "dequantize_nf4"
        for what, (function, n_weights) in functions.items():
            print(what, how.__name__)  # the last one printed is the one that failed
            with mock.patch.object(nf4, name, wraps=getattr(nf4, name)) as ours:
                expected = how(function)
                assert not ours.called
                with in_unsloth():
                    bits.assert_same_results(how(function), expected)
                assert ours.call_count >= n_weights, f"ours ran {ours.call_count} times"
                ours.reset_mock()
                bits.assert_same_results(how(function), expected)
                assert not ours.called, "after the context"


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="needs unsloth")
def test_unsloths_lora_functions_keep_their_bits(tmp_path):
    """In a process of its own: Unsloth changes transformers and peft when it is imported."""
    script = "import unsloth, test_unsloth as tests; tests.compare_unsloths_functions()"
    environment = {"UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_COMPILE_LOCATION": str(tmp_path)}
    helpers.run_in_a_process(script, **environment)
