"""Compilers, tracers and transforms see one operator: one graph, equal bits, no constant weight."""

import copy
from functools import partial

import helpers
import pytest
import shared
import torch
from helpers import GPU, ServedBy
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

BACKEND = "inductor" if GPU else "aot_eager"  # which traces as Inductor does


def compiled(function, backend=BACKEND, dynamic=None):
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [None, True], ids=["sizes fixed", "sizes dynamic"])
def test_all_weights_of_a_kind_share_one_graph(calls, dynamic):
    """At any address, with plans and without."""
    for dtype, shape in ((torch.float16, (32, 64)), (torch.float32, (3, 40))):
        counter = CompileCounterWithBackend(BACKEND)
        function = compiled(calls.nf4.dequantize_nf4, counter, dynamic)
        calls.nf4.PLANS.clear()
        for _ in range(2):
            for offset in (4, 5, 7, 8):  # of which the kernel takes the first and the last
                layer = calls.layer(offset, dtype, shape)
                layer.weight = helpers.moved(layer.weight, offset)
                calls.assert_right(function(layer.weight, layer.quant_state), layer)
            calls.served_by(layer)
        assert counter.frame_count == 1, "a later weight was compiled anew"


PASSED_AS = {"a tensor": lambda weight: weight}
PASSED_AS["a Parameter"] = partial(torch.nn.Parameter, requires_grad=False)


@pytest.mark.parametrize("form", PASSED_AS)
@pytest.mark.parametrize("shape", [(32, 128), (1, 2)], ids=["1 x n", "one byte"])
def test_compiled_and_eager_outputs_have_one_form(calls, form, shape):
    """A [1, n] weight comes back transposed, and one byte without dimensions as it is."""
    layer = calls.layer(shape=shape)
    packed = layer.weight.reshape(()) if shape == (1, 2) else layer.weight.view(1, -1)
    layer.weight = PASSED_AS[form](packed)
    for function in (calls.nf4.dequantize_nf4, compiled(calls.nf4.dequantize_nf4)):
        out = function(layer.weight, layer.quant_state)
        calls.assert_right(out, layer)
        assert out.shape == ((1, 2) if shape == (1, 2) else (128, 32))


@pytest.mark.parametrize(
    "dtype, nested", [(torch.bfloat16, True), (torch.float32, False)], ids=["bf16", "fp32, plain"]
)
def test_the_operator_keeps_torchs_rules(nf4, device, dtype, nested):
    given = nf4.quantized((64, 64), dtype, device, nested=nested)
    tensors, (shape, _, *blocksizes) = nf4.unpack(*given)
    kind = (shape, nf4.DTYPES.index(dtype), *blocksizes)
    torch.library.opcheck(nf4.OPERATOR, (*tensors, *kind))


def exported(function, packed, strict=False, sizes=None):
    module = torch.nn.Module()
    module.forward = function
    program = torch.export.export(module, (packed,), dynamic_shapes=sizes, strict=strict)
    return program.module()


def written_into(function, packed):
    """A transform may write into the output, as into any function's."""
    one = torch.tensor(1.0)
    return lambda other: torch.func.vjp(lambda one: function(other).mul_(one), one)[0]


TRACERS = {  # each gives a function of other packed bytes
    "make_fx": lambda function, packed: make_fx(function)(packed),
    "before autograd": lambda function, packed: make_fx(function, pre_dispatch=True)(packed),
    "jit.trace": lambda function, packed: torch.jit.trace(function, packed, check_trace=False),
    "vmap": lambda function, packed: lambda other: torch.func.vmap(function)(other[None])[0],
    "symbolic_trace": lambda function, packed: torch.fx.symbolic_trace(function),
    "functionalize": lambda function, packed: torch.func.functionalize(function),
    "vjp": written_into,
    "export": exported,
    "export of any size": partial(exported, sizes=({0: torch.export.Dim.AUTO},)),
}
if torch.__version__ >= (2, 10):  # before, no tensor of a closure
    TRACERS["strict export"] = partial(exported, strict=True)


@pytest.mark.parametrize("how", TRACERS)
def test_tracers_make_no_weight_constant(calls, how):
    """Traced twice without a plan, and twice with one."""
    layer, other = calls.layer(), calls.layer(1)
    other.quant_state = layer.quant_state
    sized = copy.copy(layer.quant_state)

    def function(packed):
        state = layer.quant_state
        if how == "export of any size":
            state = sized
            state.shape = packed.new_empty(packed.shape[0] // 32, 64).shape
        return calls.nf4.dequantize_nf4(packed, state)

    for _has_plan in (False, True):
        for _again in (False, True):
            traced = TRACERS[how](function, layer.weight)
            calls.assert_right(traced(other.weight), other)
        calls.served_by(layer)
    calls.assert_served_by(layer, ServedBy.PLAN)  # no trace made its kind slow


INVERTED = """
def run_operator(tensors, kind, run=run_operator):
    weight, *tables = tensors
    return run((~weight, *tables), kind)


PLANS.clear()
"""


def test_compiled_code_follows_edited_cells(copied):
    """What was compiled before gives what the edited cells say, by the first operator."""
    layer, nf4 = copied.layer(), copied.nf4
    operator = nf4.OPERATOR
    function = compiled(lambda packed: nf4.dequantize_nf4(packed, layer.quant_state) * 1)
    before = function(layer.weight)
    copied.run_again("_dequantize_nf4_kernel")
    assert nf4.bits_differing(function(layer.weight), before) == 0
    assert copied.n_trials == 1, "the kernel was not compiled into the function"
    copied.run_again("register")
    assert nf4.OPERATOR is operator, "compiled code would keep the first one"
    shared.execute(INVERTED, "edited run_operator", vars(nf4))
    assert nf4.bits_differing(function(layer.weight), before) > 0
