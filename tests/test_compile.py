"""Compilers, tracers and transforms see one operator: one graph, equal bits, no constant weight."""

import copy
from functools import partial

import helpers
import pytest
import shared
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

GPU = torch.cuda.is_available()
BACKEND = "inductor" if GPU else "aot_eager"  # which traces as Inductor does


def compiled(function, backend=BACKEND, dynamic=None):
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [None, True], ids=["sizes fixed", "sizes dynamic"])
def test_all_weights_of_a_kind_share_one_graph(planned, dynamic):
    """At any address, with plans and without."""
    for dtype, shape in ((torch.float16, (32, 64)), (torch.float32, (3, 40))):
        counter = CompileCounterWithBackend(BACKEND)
        function = compiled(planned.nf4.dequantize_nf4, counter, dynamic)
        planned.nf4.PLANS.clear()
        for _ in range(2):
            for offset in (4, 5, 7, 8):  # of which the kernel takes the first and the last
                layer = planned.made(offset, dtype, shape)
                layer.weight = helpers.moved(layer.weight, offset)
                out = function(layer.weight, layer.quant_state)
                planned.assert_right(out, layer)
            planned.ran(layer)
        assert counter.frame_count == 1


@pytest.mark.parametrize("as_parameter", [False, True], ids=["a tensor", "a Parameter"])
def test_a_compiled_1_by_n_weight_comes_back_transposed(planned, as_parameter):
    layer = planned.made(shape=(32, 128))
    layer.weight = layer.weight.view(1, -1)
    if as_parameter:
        layer.weight = torch.nn.Parameter(layer.weight, requires_grad=False)
    out = compiled(planned.nf4.dequantize_nf4)(layer.weight, layer.quant_state)
    planned.assert_right(out, layer)
    assert out.shape == (128, 32)


def test_a_compiled_weight_of_one_byte_keeps_its_shape(planned):
    """A tensor without dimensions, and a state of (1, 2): eager and compiled code give [1, 2]."""
    layer = planned.made(shape=(1, 2))
    packed = layer.weight.reshape(())
    for weight in (packed, torch.nn.Parameter(packed, requires_grad=False)):
        layer.weight = weight
        outs = [planned.dequantize(layer)]
        outs.append(compiled(planned.nf4.dequantize_nf4)(layer.weight, layer.quant_state))
        assert [out.shape for out in outs] == [(1, 2), (1, 2)]
        for out in outs:
            planned.assert_right(out, layer)


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


symbolic = partial(make_fx, tracing_mode="symbolic", _allow_non_fake_inputs=True)
TRACERS = {  # each gives a function of other packed bytes
    "make_fx": lambda function, packed: make_fx(function)(packed),
    "before autograd": lambda function, packed: make_fx(function, pre_dispatch=True)(packed),
    "jit.trace": lambda function, packed: torch.jit.trace(function, packed, check_trace=False),
    "vmap": lambda function, packed: lambda other: torch.func.vmap(function)(other[None])[0],
    "symbolic_trace": lambda function, packed: torch.fx.symbolic_trace(function),
    "functionalize": lambda function, packed: torch.func.functionalize(function),
    "vjp": written_into,
    "export": exported,
    "symbolic make_fx": lambda function, packed: symbolic(function)(packed),
    "symbolic export": partial(exported, sizes=({0: torch.export.Dim.AUTO},)),
}
if torch.__version__ >= (2, 10):  # before, no tensor of a closure
    TRACERS["strict export"] = partial(exported, strict=True)


@pytest.mark.parametrize("how", TRACERS)
def test_tracers_make_no_weight_constant(planned, how):
    """With a plan and without, whatever an earlier trace left."""
    layer, other = planned.made(), planned.made(1)
    other.quant_state = layer.quant_state
    sized = copy.copy(layer.quant_state)

    def function(packed):
        state = layer.quant_state
        if how.startswith("symbolic "):
            state = sized
            state.shape = packed.new_empty(packed.shape[0] // 32, 64).shape
        return planned.nf4.dequantize_nf4(packed, state)

    for _has_plan in (False, True):
        for _again in (False, True):
            traced = TRACERS[how](function, layer.weight)
            planned.assert_right(traced(other.weight), other)
        planned.ran(layer)
    assert planned.ran(layer) == "plan", "a trace made its kind slow"


INVERTED = """
def run_operator(tensors, kind, run=run_operator):
    weight, *tables = tensors
    return run((~weight, *tables), kind)


PLANS.clear()
"""


@pytest.mark.parametrize("what", ["the kernel", "the operator"])
def test_compiled_code_follows_an_edit(copied, what):
    """Cells run again, by a reader who edits them; what was compiled before gives what they say."""
    layer, nf4 = copied.made(), copied.nf4
    function = compiled(lambda packed: nf4.dequantize_nf4(packed, layer.quant_state) * 1)
    for _ in range(3):  # by the kernel, then by plans
        before = function(layer.weight)
    if what == "the operator":
        shared.execute(INVERTED, "edited run_operator", vars(nf4))
        assert nf4.bits_differing(function(layer.weight), before) > 0
    else:
        copied.run_again("_dequantize_nf4_kernel")
        assert nf4.bits_differing(function(layer.weight), before) == 0
        assert copied.n_trials == 1, "the kernel was not compiled into the function"


def test_every_cell_of_the_call_can_run_again(copied):
    """Without a second operator: what was compiled before would keep the first one."""
    layer, operator = copied.made(), copied.nf4.OPERATOR
    for name in ("_dequantize_nf4_kernel", "launch", "dequantize_nf4", "make_plan"):
        copied.run_again(name)
        assert [copied.ran(layer) for _ in range(2)][1] == "plan"
    for name in ("torch_launcher", "run_operator", "check", "trial", "register"):
        copied.run_again(name)
        assert [copied.ran(layer) for _ in range(2)][1] == "plan"
    assert copied.nf4.OPERATOR is operator
