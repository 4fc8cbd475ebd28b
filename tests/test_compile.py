"""Compilers, tracers and transforms see one operator: one graph, equal bits, no constant weight."""

import copy
import sys
from functools import partial
from unittest import mock

import helpers
import pytest
import shared
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

GPU = torch.cuda.is_available()
BACKEND = "inductor" if GPU else "aot_eager"  # which traces as Inductor does


def compiled(function, backend=BACKEND, dynamic=None):
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)


def test_section_6_misses_no_wrong_bit_recompilation_or_break(nf4, monkeypatch):
    run = mock.Mock(wraps=nf4.run_operator)
    monkeypatch.setattr(nf4.NF4_OPS, "run", run)
    mlps = [
        nf4.build(nf4.SMALL_OPTIONS[1]._replace(seed=seed), torch.float16)[1] for seed in (0, 1)
    ]
    first = mlps[0]

    def right(mlp):
        return nf4.dequantize_bits(mlp, nf4.your_dequantize_nf4)

    def another_shape(mlp):
        return [nf4.your_dequantize_nf4(mlp.up_proj if mlp is first else mlp.down_proj)]

    def broken(mlp):
        torch._dynamo.graph_break()
        return right(mlp)

    outs, is_compiled = nf4.compiled_once(right, mlps)
    wanted = [out for mlp in mlps for out in nf4.dequantize_bits(mlp, nf4.bnb_dequantize)]
    assert is_compiled and len(outs) == 6 and all(map(torch.equal, outs, wanted))
    assert type(run.call_args.args[0]) is torch.Tensor, "Params4bit.__torch_function__ is slow"
    with pytest.raises(RuntimeError, match="recompil"):
        nf4.compiled_once(another_shape, mlps)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        nf4.compiled_once(broken, mlps)


@pytest.mark.parametrize("dynamic", [None, True])
def test_all_weights_of_a_kind_share_one_graph(planned, dynamic):
    """At any address, with plans and without."""
    for dtype, shape in ((torch.float16, (32, 64)), (torch.float32, (3, 5))):
        counter = CompileCounterWithBackend(BACKEND)
        function = compiled(planned.nf4.dequantize_nf4, counter, dynamic)
        planned.nf4.PLANS.clear()
        for _ in range(2):
            for offset in (4, 5, 7, 8):
                layer = planned.made(offset, dtype, shape)
                out = function(helpers.moved(layer.weight, offset), layer.quant_state)
                assert planned.n_wrong(out, layer) == 0
            planned.ran(layer)
        assert counter.frame_count == 1


def test_the_operator_keeps_torchs_rules(nf4, device):
    for dtype, nested in ((torch.bfloat16, True), (torch.float32, False)):
        tensors, kind = nf4.read(*nf4.quantized((64, 64), dtype, device, nested=nested))
        torch.library.opcheck(nf4.NF4_OPS.dequantize.default, (*tensors, *kind))


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
            state.shape = (packed.shape[0] // 32, 64)
        return planned.nf4.dequantize_nf4(packed, state)

    for _has_plan in (False, True):
        for _again in (False, True):
            traced = TRACERS[how](function, layer.weight)
            assert planned.n_wrong(traced(other.weight), other) == 0
        planned.ran(layer)
    assert planned.ran(layer) == "plan", "a trace made its kind slow"


def test_a_dispatch_mode_sees_the_operator(planned):
    """With a plan and without."""
    layer = planned.made()
    for _ in range(3):
        with FlopCounterMode(display=False):
            assert planned.ran(layer) == "operator"
    planned.ran(layer)
    assert planned.ran(layer) == "plan"


def test_fake_tensors_get_fake_outputs(planned):
    layer, mode = planned.made(), FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(layer.weight)
    for n_plans in (0, 1):
        outs = [planned.nf4.dequantize_nf4(fake, layer.quant_state)]
        with mode:
            outs.append(planned.dequantize(layer))
            outs.append(planned.nf4.dequantize_nf4(layer.weight.t(), layer.quant_state).t())
        for out in outs:
            assert isinstance(out, type(fake)) and out.dtype == torch.float16
            assert out.device == layer.weight.device and tuple(out.shape) == (32, 64)
        assert planned.n_plans() == n_plans
        planned.ran(layer)


INVERTED = """
def run_operator(weight, *others, run=run_operator):
    return run(~weight, *others)


NF4_OPS.run = run_operator
PLANS.clear()
"""


@pytest.mark.parametrize("what", ["a helper of the kernel", "the operator"])
def test_compiled_code_follows_an_edit(device, monkeypatch, what):
    """Cells run again, by a reader who edits them; what was compiled before gives what they say."""
    nf4 = shared.load("nf4_followed")
    if not GPU:
        helpers.plan_on_cpu(nf4, monkeypatch)
    weight, state = nf4.quantized((64, 64), torch.float16, device)
    function = compiled(lambda packed: nf4.dequantize_nf4(packed, state) * 1)
    for _ in range(3):  # by the kernel, then by plans
        before = function(weight)
    edited = INVERTED
    if what == "a helper of the kernel":
        edited = helpers.DOUBLED + shared.defining("_dequantize_nf4_kernel", "nf4_followed")
    shared.execute(edited, f"edited {what}", vars(nf4))
    eager = nf4.dequantize_nf4(weight, state)
    assert nf4.bits_differing(function(weight), eager) == 0
    assert nf4.bits_differing(eager, before) > 0


IN_A_PROCESS = """
import shared, torch
nf4 = shared.load()
shared.execute({!r} + shared.defining("_dequantize_nf4_kernel"), "edited", vars(nf4))
weight, state = nf4.quantized((64, 64), torch.float16, "{}")
out = torch.compile(lambda packed: nf4.dequantize_nf4(packed, state) * 1, fullgraph=True)(weight)
assert nf4.bits_differing(out, nf4.spec(weight, state) * {}) == 0
"""


@pytest.mark.gpu  # on a CPU no kernel was ever in what is cached
def test_the_next_process_follows_an_edit_with_warm_caches(tmp_path, device):
    """Inductor's caches lie on disk; the first process has a wrong kernel."""
    for edit, factor in ((helpers.DOUBLED, 2), ("", 1)):
        script = IN_A_PROCESS.format(edit, device, factor)
        done = helpers.in_a_process(script, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        assert done.returncode == 0, done.stderr


def test_a_second_module_takes_the_operator_over_both_bodies(nf4, device, monkeypatch):
    """A reload, or the exported module beside the notebook: calls by either, and compiled code."""
    for body in ("run", "run_fake"):  # the session's, afterwards, too
        monkeypatch.setattr(nf4.NF4_OPS, body, getattr(nf4.NF4_OPS, body))
    monkeypatch.setitem(sys.modules, "nf4_triton", nf4)
    weight, state = nf4.quantized((64, 64), torch.float16, device)
    want = nf4.dequantize_nf4(weight, state)
    function = compiled(lambda weight, state: nf4.dequantize_nf4(weight, state))
    function(weight, state)
    beside = shared.load()
    for dequantize in (function, nf4.dequantize_nf4, beside.dequantize_nf4):
        assert nf4.bits_differing(dequantize(weight, state), want) == 0
    assert nf4.NF4_OPS.run is beside.run_operator and nf4.NF4_OPS.run_fake is beside.run_fake
    assert nf4.PLANS is not beside.PLANS


def test_a_module_is_loaded_twice_before_any_call(device):
    """As by importlib.reload: the operator is there already."""
    for _ in range(2):
        nf4 = shared.load("nf4_twice")
    weight, state = nf4.quantized((64, 64), torch.float16, device)
    assert nf4.bits_differing(nf4.dequantize_nf4(weight, state), nf4.spec(weight, state)) == 0
