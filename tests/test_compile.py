"""Compilers, tracers and transforms see one operator: one graph, equal bits, no constant weight."""

import sys
from functools import partial
from unittest import mock

import bitsandbytes as bnb
import helpers
import pytest
import shared
import torch
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

GPU = torch.cuda.is_available()
BACKEND = "inductor" if GPU else "aot_eager"  # which traces as Inductor does


@pytest.fixture(autouse=True)
def forgotten():
    torch._dynamo.reset()


def compiled(function, backend=BACKEND, **options):
    return torch.compile(function, fullgraph=True, backend=backend, **options)


@pytest.fixture
def mlps(nf4):
    """Two inputs (X, mlp), as section 6 has them."""
    option = nf4.SMALL_OPTIONS[1]
    return [nf4.build(option._replace(seed=seed), torch.float32) for seed in (0, 1)]


def test_section_6_calls_with_another_mlp_and_misses_no_wrong_bit_recompilation_or_break(nf4, mlps):
    (_, first), (_, second) = mlps

    def right(X, mlp):
        return [nf4.your_dequantize_nf4(mlp.up_proj)]

    def another_shape(X, mlp):
        return [nf4.your_dequantize_nf4(mlp.up_proj if mlp is first else mlp.down_proj)]

    def broken(X, mlp):
        torch._dynamo.graph_break()
        return right(X, mlp)

    outs, is_compiled = nf4.compiled_once(right, mlps)
    wanted = [nf4.bnb_dequantize(mlp.up_proj) for mlp in (first, second)]
    assert [nf4.bits_differing(*pair) for pair in zip(outs, wanted, strict=True)] == [0, 0]
    assert is_compiled == GPU
    with pytest.raises(RuntimeError, match="recompil"):
        nf4.compiled_once(another_shape, mlps)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        nf4.compiled_once(broken, mlps)


def test_section_6_says_which_bits_differ(nf4, device, monkeypatch):
    """Of each function; and its two MLPs are not one."""
    seeds = []
    build = nf4.build
    monkeypatch.setattr(
        nf4, "build", lambda option, dtype: seeds.append(option.seed) or build(option, dtype)
    )
    option = nf4.SMALL_OPTIONS[1]
    rows = nf4.compile_rows(option, torch.float16, device)
    assert [row["function"] for row in rows] == ["dequantization", "training_step"]
    assert all(row["bit_equal"] and row["compiled"] == GPU for row in rows)
    assert len(set(seeds)) == 2, "one MLP twice: nothing could recompile"
    monkeypatch.setattr(nf4, "dequantize_nf4", helpers.one_bit_off(nf4.dequantize_nf4))
    rows = nf4.compile_rows(option, torch.float16, device)
    assert not any(row["bit_equal"] for row in rows)


@pytest.mark.parametrize("dynamic", [None, True])
def test_all_weights_of_a_kind_share_one_graph(planned, dynamic):
    """For all weights of a kind, at any address, with plans and without."""
    for dtype, shape in ((torch.float16, (32, 64)), (torch.float32, (3, 5))):
        counter = CompileCounterWithBackend(BACKEND)
        function = compiled(planned.nf4.dequantize_nf4, counter, dynamic=dynamic)
        planned.nf4.PLANS.clear()
        for _ in range(2):
            for offset in (4, 5, 7, 8):
                layer = planned.made(offset, dtype, shape)
                out = function(helpers.moved(layer.weight, offset), layer.quant_state)
                assert planned.n_wrong(out, layer) == 0
            planned.ran(layer)
        assert counter.frame_count == 1


def test_compiled_code_makes_no_detour_through_params4bit(nf4, device, monkeypatch):
    """Its __torch_function__ takes longer than all else that the operator does in Python."""
    layer = nf4.bnb_Linear4bit(64, 64).to(device)
    function = compiled(nf4.your_dequantize_nf4, "inductor")
    function(layer)
    run = mock.Mock(wraps=nf4.run_operator)
    monkeypatch.setattr(nf4.NF4_OPS, "run", run)
    assert nf4.bits_differing(function(layer), nf4.bnb_dequantize(layer)) == 0
    assert type(run.call_args.args[0]) is torch.Tensor


def test_the_operator_keeps_torchs_rules(nf4, device):
    for dtype, nested in ((torch.bfloat16, True), (torch.float32, False)):
        tensors, kind = nf4.read(*nf4.quantized((64, 64), dtype, device, nested=nested))
        torch.library.opcheck(nf4.dequantize_op, (*tensors, *kind))


def exported(function, packed, strict=False):
    module = torch.nn.Module()
    module.forward = function
    try:
        return torch.export.export(module, (packed,), strict=strict).module()
    except torch._dynamo.exc.UserError as refused:
        if "neither buffers" not in str(refused):
            raise
        pytest.skip("torch 2.9 strictly exports no tensor of a closure")


TRACERS = {  # each gives a function of other packed bytes
    "make_fx": lambda function, packed: make_fx(function)(packed),
    "before autograd": lambda function, packed: make_fx(function, pre_dispatch=True)(packed),
    "jit.trace": lambda function, packed: torch.jit.trace(function, packed, check_trace=False),
    "vmap": lambda function, packed: lambda other: torch.func.vmap(function)(other[None])[0],
    "symbolic_trace": lambda function, packed: torch.fx.symbolic_trace(function),
    "functionalize": lambda function, packed: torch.func.functionalize(function),
    "export": exported,
    "strict export": partial(exported, strict=True),
}


def with_sizes_of(planned, x, packed, state):
    """Dequantized in the shape of x, whatever that is when it is traced."""
    sizes = (x.shape[0], x.shape[1])
    fields = (state.code, state.blocksize, "nf4", state.dtype, state.offset, state.state2)
    return planned.nf4.dequantize_nf4(
        packed, bnb.functional.QuantState(state.absmax, sizes, *fields)
    )


def test_symbolic_sizes_are_traced(planned):
    """With a plan for the kind, and without."""
    layer, other = planned.made(), planned.made(1)
    other.quant_state = layer.quant_state
    x = torch.zeros(32, 64)

    def function(x, packed):
        return with_sizes_of(planned, x, packed, layer.quant_state)

    module = torch.nn.Module()
    module.forward = function
    auto = torch.export.Dim.AUTO
    sizes = ({0: auto, 1: auto}, {0: auto})
    for _has_plan in (False, True):
        symbolic = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)
        traced = [symbolic(x, layer.weight)]
        program = torch.export.export(module, (x, layer.weight), dynamic_shapes=sizes, strict=False)
        for each in (*traced, program.module()):
            assert planned.n_wrong(each(x, other.weight), other) == 0
        planned.ran(layer)


@pytest.mark.parametrize("how", TRACERS)
def test_tracers_make_no_weight_constant(planned, how):
    """No weight becomes a constant, with a plan and without, whatever an earlier trace left."""
    layer, other = planned.made(), planned.made(1)
    other.quant_state = layer.quant_state
    for _has_plan in (False, True):
        for _again in (False, True):
            traced = TRACERS[how](
                lambda packed: planned.nf4.dequantize_nf4(packed, layer.quant_state), layer.weight
            )
            assert planned.n_wrong(traced(other.weight), other) == 0
        planned.ran(layer)
    assert planned.ran(layer) == "plan", "a trace made its kind slow"


def test_a_transform_may_write_into_the_output(planned):
    """As it may into any function's."""
    layer = planned.made()
    x = torch.zeros(32, 64, dtype=torch.float16, device=planned.device)

    def function(x):
        return planned.nf4.your_dequantize_nf4(layer).add_(x).float().sum()

    for _has_plan in (False, True):
        for _again in (False, True):
            assert (torch.func.grad(function)(x) == 1).all()
        planned.ran(layer)


def test_a_dispatch_mode_sees_the_operator(planned):
    """With a plan and without."""
    layer = planned.made()
    for _ in range(3):
        with FlopCounterMode(display=False):
            assert planned.ran(layer) == "operator"
    ran = [planned.ran(layer) for _ in range(2)]
    assert ran[-1] == "plan"


def test_fake_tensors_get_fake_outputs(planned):
    layer, mode = planned.made(), FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(layer.weight)
    for has_plan in (False, True):
        outs = [planned.nf4.dequantize_nf4(fake, layer.quant_state)]
        with mode:
            outs.append(planned.nf4.your_dequantize_nf4(layer))
            outs.append(planned.nf4.dequantize_nf4(layer.weight.t(), layer.quant_state).t())
        for out in outs:
            assert isinstance(out, type(fake)) and out.dtype == torch.float16
            assert out.device == layer.weight.device and tuple(out.shape) == (32, 64)
        assert planned.n_plans() == (1 if has_plan else 0)
        planned.ran(layer)


NEGATED = """
@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    return (-x).to(DTYPE)


"""
INVERTED = """
def run_operator(weight, *others, run=run_operator):
    return run(~weight, *others)
"""
EDITS = {  # {what is edited: (what is defined anew, whose cell runs again, whether bits change)}
    "a helper of the kernel": (NEGATED, "_dequantize_nf4_kernel", True),
    "the launch": ("", "WORDS", False),
    "the operator": (INVERTED, None, True),
}


@pytest.mark.parametrize("what", EDITS)
def test_compiled_code_follows_an_edit(device, monkeypatch, what):
    """Cells run again, by a reader who edits them; what was compiled before gives what they say."""
    edit, cell, changes_bits = EDITS[what]
    nf4 = shared.load("nf4_followed")
    if what == "the operator" and not GPU:  # it alone keeps the kernel that plan_on_cpu patches
        helpers.plan_on_cpu(nf4, monkeypatch)
    weight, state = nf4.quantized((64, 64), torch.float16, device)
    function = compiled(lambda packed: nf4.dequantize_nf4(packed, state) * 1)
    for _ in range(3):  # by the kernel, then by plans
        before = function(weight)
    source = shared.defining(cell, "nf4_followed") if cell else ""
    shared.execute(edit + source, f"edited {what}", vars(nf4))
    if what == "the operator":
        nf4.NF4_OPS.run = nf4.run_operator
        nf4.PLANS.clear()
    eager = nf4.dequantize_nf4(weight, state)
    assert nf4.bits_differing(function(weight), eager) == 0
    assert (nf4.bits_differing(eager, before) > 0) == changes_bits


IN_A_PROCESS = """
import shared, torch
nf4 = shared.load()
shared.execute({edit!r} + shared.defining("_dequantize_nf4_kernel"), "edited", vars(nf4))
weight, state = nf4.quantized((64, 64), torch.float16, {device!r})
function = torch.compile(lambda packed: nf4.dequantize_nf4(packed, state) * 1, fullgraph=True)
print("differing:", nf4.bits_differing(function(weight), nf4.spec(weight, state)))
"""


@pytest.mark.gpu  # on a CPU no kernel was ever in what is cached
def test_the_next_process_follows_an_edit_with_warm_caches(device, tmp_path):
    """Inductor's caches lie on disk; the first process has a wrong kernel."""
    said = []
    for edit in (NEGATED, ""):
        script = IN_A_PROCESS.format(edit=edit, device=device)
        done = helpers.in_a_process(script, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split("differing:")[1].strip())
    assert said[0] != "0" and said[1] == "0"


def test_a_second_module_takes_the_operator_over_both_bodies(nf4, device, monkeypatch):
    """A reload, or the exported module beside the notebook: calls by either, and compiled code."""
    for body in ("run", "run_fake"):  # the session's, afterwards, too
        monkeypatch.setattr(nf4.NF4_OPS, body, getattr(nf4.NF4_OPS, body))
    monkeypatch.setitem(sys.modules, "nf4_triton", nf4)
    weight, state = nf4.quantized((64, 64), torch.float16, device)
    want = nf4.dequantize_nf4(weight, state)
    function = compiled(lambda packed: nf4.dequantize_nf4(packed, state))
    function(weight)
    beside = shared.load()
    for dequantize in (function, nf4.dequantize_nf4, beside.dequantize_nf4):
        args = (weight,) if dequantize is function else (weight, state)
        assert nf4.bits_differing(dequantize(*args), want) == 0
    assert nf4.NF4_OPS.run is beside.run_operator and nf4.NF4_OPS.run_fake is beside.run_fake
    assert nf4.PLANS is not beside.PLANS


class Frozen(torch.nn.Module):
    """A layer whose packed weight and tables become constants of the graph."""

    def __init__(self, nf4, device, nested):
        super().__init__()
        self.dequantize = nf4.dequantize_nf4
        weight, self.quant_state = nf4.quantized((32, 64), torch.float32, device, nested=nested)
        self.register_buffer("weight", weight)

    def forward(self, x):
        weight = self.dequantize(self.weight, self.quant_state)
        return x @ weight.t(), weight


@pytest.mark.parametrize("nested", [True, False])
def test_a_frozen_graph_keeps_the_bits(nf4, device, nested):
    module, x = Frozen(nf4, device, nested), torch.randn(4, 64, device=device)
    with torch.no_grad(), inductor_config.patch(freezing=True):
        (out, weight), (want, wanted_weight) = compiled(module, "inductor")(x), module(x)
    assert nf4.bits_differing(weight, wanted_weight) == 0
    torch.testing.assert_close(out, want)  # a compiler may sum in another order


PACKAGED = """
import shared, torch
from test_compile import Frozen
nf4 = shared.load()
module, x = {module}, torch.randn(4, 64, device={device!r})
program = torch.export.export(module, (x,))
path = torch._inductor.aoti_compile_and_package(program, package_path={path!r})
got, want = torch._inductor.aoti_load_package(path)(x), module(x)
"""
COMPARED = """
torch.testing.assert_close(got[0], want[0])
assert nf4.bits_differing(got[1], want[1]) == 0  # the weights
"""


@pytest.mark.skipif(torch.__version__ < (2, 11), reason="torch 2.9 packages no such constants")
@pytest.mark.parametrize("nested", [True, False])
def test_a_packaged_graph_keeps_the_bits(device, nested, tmp_path):
    """In a process of its own, which native code may end."""
    frozen = f"Frozen(nf4, {device!r}, {nested})"
    script = PACKAGED.format(module=frozen, device=device, path=str(tmp_path / "module.pt2"))
    done = helpers.in_a_process(script + COMPARED)
    if done.returncode < 0:  # by a signal
        plain = f"torch.nn.Linear(64, 32, device={device!r})"
        control = PACKAGED.format(module=plain, device=device, path=str(tmp_path / "plain.pt2"))
        if helpers.in_a_process(control).returncode == done.returncode:
            pytest.skip("here a package of torch.nn.Linear ends the process, too")
    assert done.returncode == 0, done.stderr[-3000:]


def test_compiled_training_keeps_no_dequantized_weight(planned):
    """The backward pass dequantizes anew: no activation of a weight's size is kept for it."""
    layer = bnb.nn.Linear4bit(64, 256, False, torch.float32, True, "nf4").to(planned.device)
    x = torch.randn(128, 64, device=planned.device, requires_grad=True)
    with planned.nf4.in_bitsandbytes():
        out = compiled(lambda x: layer(x).sin())(x)
        before = planned.n_by_operator
        assert not [t for t in out.grad_fn.saved_tensors if t.shape in ((256, 64), (64, 256))]
        out.sum().backward()
    assert planned.n_by_operator == before + 1


class Net(torch.nn.Module):
    """Linear4bit layers of three shapes, as QLoRA trains through them."""

    def __init__(self, device, dtype, compressed, checkpointed):
        super().__init__()
        self.checkpointed, dim = checkpointed, 256 if GPU else 64
        self.layers = torch.nn.ModuleList()
        for columns, rows in ((dim, 2 * dim), (2 * dim, dim), (dim, dim)):
            bias = not GPU  # Inductor may add it before or after rounding
            layer = bnb.nn.Linear4bit(columns, rows, bias, dtype, compressed, "nf4")
            self.layers.append(layer.to(device, dtype))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def trained(net, x):
    """The output, and the gradients of the input and of biases."""
    leaf = x.clone().requires_grad_()
    out = net(leaf)
    out.float().square().sum().backward()
    grads = [tensor.grad for tensor in (leaf, *net.parameters()) if tensor.grad is not None]
    return [out.detach().clone(), *(grad.clone() for grad in grads)]


CASES = [  # dtype, nested absmax, checkpointed, Inductor's mode on a GPU
    (torch.bfloat16, True, False, "default"),
    (torch.bfloat16, True, True, "reduce-overhead"),
    (torch.float32, False, False, "reduce-overhead"),
    (torch.float32, False, True, "default"),
]


@pytest.mark.parametrize("dtype, compressed, checkpointed, mode", CASES)
def test_compiled_training_has_eager_trainings_gradients(
    planned, device, dtype, compressed, checkpointed, mode
):
    """One graph, forward and backward; on a CPU as eager, to the bit. Inductor rounds elsewhere."""
    net = Net(device, dtype, compressed, checkpointed)
    x = torch.randn(16, net.layers[0].in_features, device=device, dtype=dtype)
    with planned.nf4.in_bitsandbytes():
        wanted = trained(net, x)
        by_compiler = compiled(net, mode=mode if GPU else None)
        for _ in range(3):  # in reduce-overhead: warm-up, recording, replay
            net.zero_grad()
            torch.compiler.cudagraph_mark_step_begin()
            for got, want in zip(trained(by_compiler, x), wanted, strict=True):
                torch.testing.assert_close(got, want, **({} if GPU else {"rtol": 0, "atol": 0}))


@pytest.mark.gpu
def test_a_t4s_bf16_is_really_compiled(nf4, monkeypatch, tmp_path):
    """Torch and Inductor are told that the GPU is one; Triton has asked before, and knows."""
    triton.runtime.driver.active.get_current_target()
    is_supported = staticmethod(lambda including_emulation=False: False)
    monkeypatch.setattr(CudaInterface, "is_bf16_supported", is_supported)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    option = nf4.OPTIONS[1]._replace(hd=512, m=1024)
    with torch._dynamo.config.patch(debug_dir_root=str(tmp_path)):
        rows = nf4.compile_rows(option, torch.bfloat16, "cuda")
    assert [row["function"] for row in rows] == ["dequantization"]
    assert all(row["compiled"] and row["bit_equal"] for row in rows)
