"""Inside torch.compile, torch.export and torch.func: one graph, equal bits.

Inductor compiles on a GPU, AOT eager on a CPU.
"""

import contextlib
import copy
import itertools
import random
from unittest import mock

import bitsandbytes as bnb
import helpers
import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit
from helpers import DTYPES
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def forgotten():
    torch._dynamo.reset()


@pytest.fixture
def pair(nf4, device):
    return nf4.quantized((64, 128), torch.float16, device)


def compiled(nf4, device, function, **options):
    return torch.compile(function, fullgraph=True, backend=nf4.GraphCounter(device), **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_graph_for_layers_of_two_shapes_and_two_networks(nf4, device, dtype, tmp_path):
    option = nf4.OPTIONS[1] if GPU else nf4.SMALL_OPTIONS[1]
    with torch._dynamo.config.patch(debug_dir_root=str(tmp_path)):
        rows = nf4.compile_reports(option, dtype, device)
    expected = {("dequantization", options) for options in nf4.COMPILE_RUNS}
    # The forward pass runs with static shapes.
    static = [options for options in nf4.COMPILE_RUNS if options != "dynamic=True"]
    expected |= {("forward pass", options) for options in static}
    expected |= {("training step", "default")}
    assert {(row["function"], row["options"]) for row in rows} == expected
    assert len(rows) == len(expected)
    wanted = {"graphs": 1, "graph_breaks": 0, "recompiles": 0, "bit_equal": True, "compiled": GPU}
    for row in rows:
        assert row["dtype"] == nf4.name_of(dtype), row
        assert {name: row[name] for name in wanted} == wanted, row


def test_a_missing_output_is_no_equal_bit(nf4, device, pair):
    wanted = [nf4.spec(*pair)]

    def function(weight, state):
        return [nf4.dequantize_nf4(weight, state)]

    with pytest.raises(ValueError, match="longer"):
        nf4.compile_report(function, [pair], [2 * wanted], device)
    with pytest.raises(ValueError, match="longer"):
        nf4.compile_report(function, [pair], [wanted, wanted], device)


def test_compiled_calls_are_timed_beside_others(nf4, monkeypatch):
    """Times are imitated; what another cannot compile has an error, our own failure is one."""
    monkeypatch.setattr(nf4, "unsloth_dequantize", nf4.bnb_dequantize)
    compiled, turns = set(), []

    def imitated(function):
        run = lambda *call: function(*call)  # noqa: E731
        compiled.add(run)
        return run

    def imitated_us(stepped, call):
        (function,) = stepped.args
        outs = stepped(call)
        assert len(outs) in (1, 3)  # a forward pass, or three weights
        turns.append(function)
        return 100 - len(turns) + (0.5 if function in compiled else 0.0)

    monkeypatch.setattr(torch, "compile", imitated)
    monkeypatch.setattr(nf4, "call_us", imitated_us)
    option = nf4.SMALL_OPTIONS[0]
    rows = nf4.compile_times(option, rounds=2)
    whos = ["ours", "unsloth_today", "bitsandbytes"]
    expected = list(itertools.product(["dequantization", "forward pass"], whos))
    assert [(row["function"], row["who"]) for row in rows] == expected
    # All six take a turn before the first has its second; in each, eager comes before compiled.
    assert [row["eager_us"] for row in rows] == [100.0 - n for n in range(13, 24, 2)]
    assert [row["compiled_us"] for row in rows] == [100.5 - n for n in range(14, 25, 2)]
    assert [row["error"] for row in rows] == 6 * [None]


def test_to_time_a_compiled_function_compiles_nothing(nf4):
    """The timer runs it with as many threads as it was compiled with."""
    counter = nf4.GraphCounter("cpu")
    run = torch.compile(lambda x: x + 1, backend=counter)
    run(torch.ones(3))
    for _ in range(2):
        assert nf4.call_us(run, torch.ones(3)) > 0
    assert counter.graphs == 1


def test_a_timed_call_is_waited_for(nf4, monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    nf4.call_us(done.append, "call")
    assert "call" in done and done[-1] == "wait"
    assert ("call", "call") not in zip(done, done[1:])


def halved(function):
    return lambda *call: [out / 2 for out in function(*call)]


def refused(function):
    def run(*call):
        raise RuntimeError("a graph break")

    return run


@pytest.mark.parametrize("who", ["unsloth_dequantize", "your_dequantize_nf4"])
@pytest.mark.parametrize("fault, told", [(refused, "a graph break"), (halved, "it disagrees")])
def test_what_does_not_compile_right_has_no_time(nf4, monkeypatch, who, fault, told):
    """An error in the row; where it is ours, the cell's."""
    monkeypatch.setattr(nf4, "unsloth_dequantize", lambda layer: nf4.bnb_dequantize(layer))
    monkeypatch.setattr(nf4, "call_us", lambda stepped, call: len(stepped(call)))
    failing = getattr(nf4, who)

    def imitated(function):
        closure = [cell.cell_contents for cell in function.__closure__ or ()]
        return fault(function) if failing in closure else function

    monkeypatch.setattr(torch, "compile", imitated)
    if who == "your_dequantize_nf4":
        with pytest.raises((RuntimeError, AssertionError), match=told):
            nf4.compile_times(nf4.SMALL_OPTIONS[0], rounds=1)
        return
    rows = nf4.compile_times(nf4.SMALL_OPTIONS[0], rounds=1)
    failed = [row for row in rows if row["error"]]
    assert {row["who"] for row in failed} == {"unsloth_today"} and len(failed) == 2
    assert all(row["compiled_us"] is None and told in row["error"] for row in failed)


def test_the_report_can_fail(nf4, device):
    """It counts a recompilation and sees wrong bits."""
    layers = [(nf4.bnb_Linear4bit(64, 64 * n).to(device),) for n in (1, 2)]
    for (layer,) in layers:
        layer.weight.quant_state.dtype = torch.float16
    function = lambda layer: [nf4.your_dequantize_nf4(layer)]  # noqa: E731
    right = [function(*layer) for layer in layers]
    report = nf4.compile_report(function, layers, right, device)
    assert report["bit_equal"] and (report["graphs"], report["recompiles"]) == (2, 1)
    wrong = [[out * 2] for (out,) in right]
    report = nf4.compile_report(function, layers, wrong, device)
    assert not report["bit_equal"]


@pytest.mark.parametrize("shape", [(3, 5), (64, 64), (1, 1)])
def test_ragged_and_float32(nf4, device, shape):
    for dtype in DTYPES:
        weight, state = nf4.quantized(shape, dtype, device)
        want = [[nf4.dequantize_nf4(weight, state)]]
        report = nf4.compile_report(
            lambda *pair: [nf4.dequantize_nf4(*pair)], [(weight, state)], want, device
        )
        assert report["bit_equal"] and report["graphs"] == 1


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_compiled_call_assumes_no_alignment(nf4, device, dtype, dynamic):
    """Each offset, first and later: nothing guards the address that the first call had."""
    weight, state = nf4.quantized((64 if GPU else 4, 128), dtype, device)
    want = dequantize_4bit(weight, state)
    buffer = torch.zeros(weight.numel() + 16, dtype=torch.uint8, device=device)
    for seed in range(2):
        torch._dynamo.reset()
        function = compiled(nf4, device, nf4.dequantize_nf4, dynamic=dynamic)
        offsets = [4, 1, *range(17), *range(17)]
        if seed:
            random.Random(seed).shuffle(offsets)
        for offset in offsets:
            moved = buffer[offset : offset + weight.numel()].view(weight.shape)
            moved.copy_(weight)
            assert nf4.bits_differing(function(moved, state), want) == 0, offset


def test_a_compiled_layer_whose_parameter_moves(nf4, device):
    """As offloading does: `weight.data` becomes a slice of another buffer, at any address."""
    layer = nf4.bnb_Linear4bit(128, 64).to(device)
    layer.weight.quant_state.dtype = torch.float16
    packed = layer.weight.data.clone()
    want, function = (
        dequantize_4bit(packed, layer.weight.quant_state),
        compiled(nf4, device, nf4.your_dequantize_nf4),
    )
    for offset in (0, 3, 16, 1, 4, 8, 2):
        layer.weight.data = helpers.moved(packed, offset)
        assert nf4.bits_differing(function(layer), want) == 0, offset


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(2, 64, dtype=x.dtype, device=x.device))[
        0
    ],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func(nf4, device, name):
    """Around the first call and around later ones; the dtype is one that a CPU multiplies."""
    weight, state = nf4.quantized((64, 128), torch.float32, device)
    x = torch.randn(2, 128, device=device)
    want = TRANSFORMS[name](lambda x: x @ dequantize_4bit(weight, state).t(), x)
    for _ in range(3):
        out = TRANSFORMS[name](lambda x: x @ nf4.dequantize_nf4(weight, state).t(), x)
        assert nf4.bits_differing(out, want) == 0


def test_vmap_over_packed_weights(nf4, device):
    weight, state = nf4.quantized((64, 128), torch.float16, device)
    other, _ = nf4.quantized((64, 128), torch.float16, device, seed=1)
    want = torch.stack([dequantize_4bit(packed, state) for packed in (weight, other)])
    for _ in range(2):
        outs = torch.func.vmap(lambda packed: nf4.dequantize_nf4(packed, state))(
            torch.stack((weight, other))
        )
        assert nf4.bits_differing(outs, want) == 0


def test_bits_cross_the_border_as_int16(nf4, device):
    weight, state = nf4.quantized((64, 128), torch.bfloat16, device)
    want = nf4.dequantize_nf4(weight, state)
    bits = compiled(nf4, device, lambda *pair: nf4.dequantize_nf4(*pair).view(torch.int16))(
        weight, state
    )
    assert bits.dtype == torch.int16 and nf4.bits_differing(bits.view(torch.bfloat16), want) == 0


def test_bits_pass_a_backend_that_refuses_bf16_at_the_border(nf4, device):
    """Inductor's refusal on a T4, as a backend, so that it is tested without a GPU as well."""

    def refusing(graph_module, example_inputs):
        (output,) = [node for node in graph_module.graph.nodes if node.op == "output"]
        values = [node.meta["example_value"] for node in output.args[0]] + list(example_inputs)
        if any(
            isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 for value in values
        ):
            raise RuntimeError("BF16 is not supported")
        return nf4.GraphCounter(device)(graph_module, example_inputs)

    weight, state = nf4.quantized((64, 128), torch.bfloat16, device)
    bits = lambda *pair: nf4.dequantize_nf4(*pair).view(torch.int16)  # noqa: E731
    out = torch.compile(bits, fullgraph=True, backend=refusing)(weight, state).view(torch.bfloat16)
    assert nf4.bits_differing(out, nf4.dequantize_nf4(weight, state)) == 0
    with pytest.raises(Exception, match="BF16 is not supported"):
        torch.compile(nf4.dequantize_nf4, fullgraph=True, backend=refusing)(weight, state)


def t4s_answers(monkeypatch):
    """A GPU without native bf16, as torch and Inductor ask for it."""
    from torch._dynamo.device_interface import CudaInterface

    monkeypatch.setattr(
        CudaInterface, "is_bf16_supported", staticmethod(lambda including_emulation=False: False)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(
        torch._inductor.config, "force_disable_caches", True
    )  # a cached graph is not asked again


def only_the_dequantization(rows):
    assert [row["function"] for row in rows] == ["dequantization"] * 3
    assert all(row["bit_equal"] and row["graphs"] == 1 for row in rows)


@pytest.mark.gpu
def test_bf16_really_compiles_where_inductor_refuses_bf16(nf4, monkeypatch, tmp_path):
    option = nf4.OPTIONS[1]._replace(hd=512, m=1024)
    weight, state = nf4.quantized((64, 128), torch.bfloat16, "cuda")
    want = nf4.dequantize_nf4(weight, state)
    t4s_answers(monkeypatch)
    with torch._dynamo.config.patch(debug_dir_root=str(tmp_path)):
        rows = nf4.compile_reports(option, torch.bfloat16, "cuda")
    only_the_dequantization(rows)
    assert all(row["compiled"] for row in rows)
    try:  # the control: bf16 across the border is refused
        report = nf4.compile_report(
            lambda *pair: [nf4.dequantize_nf4(*pair)], [(weight, state)], [[want]], "cuda"
        )
    except Exception as refusal:
        assert "bf" in str(refusal).lower()
    else:
        assert not report["compiled"]


@pytest.mark.skipif(GPU, reason="there the test above asks Inductor itself")
def test_without_native_bf16_only_the_dequantization_is_compiled(
    nf4, device, monkeypatch, tmp_path
):
    """The branch that a T4 takes; on a CPU its answer is imitated, the compiler is AOT eager."""
    counter, report_of, borders = nf4.GraphCounter, nf4.compile_report, []

    def noting(function, calls, expected, *how, **options):
        borders.append({out.dtype for outs in expected for out in outs})
        return report_of(function, calls, expected, *how, **options)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(nf4, "GraphCounter", lambda device: counter("cpu"))
    monkeypatch.setattr(nf4, "compile_report", noting)
    with torch._dynamo.config.patch(debug_dir_root=str(tmp_path)):
        rows = nf4.compile_reports(nf4.SMALL_OPTIONS[1], torch.bfloat16, "cuda")
    only_the_dequantization(rows)
    assert borders == [{torch.int16}] * 3


def test_bad_input_is_refused_while_tracing(nf4, device, pair):
    weight, state = pair
    state.quant_type = "fp4"
    with pytest.raises(Exception, match="fp4"):
        compiled(nf4, device, nf4.dequantize_nf4)(weight, state)


def test_opcheck(nf4, device):
    for dtype, nested in ((torch.bfloat16, True), (torch.float32, False)):
        weight, state = nf4.quantized((64, 64), dtype, device, nested=nested)
        torch.library.opcheck(nf4.dequantize_op, tuple(helpers.described(nf4, weight, state)))


def test_definitions_may_be_run_twice(device):
    """As a reader does who runs all cells again in one kernel."""
    helpers.load("nf4_again")
    nf4 = helpers.load("nf4_again")
    weight, state = nf4.quantized((64, 64), torch.float16, device)
    want = [[nf4.spec(weight, state)]]
    report = nf4.compile_report(
        lambda *pair: [nf4.dequantize_nf4(*pair)], [(weight, state)], want, device
    )
    assert report["bit_equal"] and report["graphs"] == 1


def test_strings_for_inductor_have_no_line_breaks(nf4):
    """Inductor (torch 2.11) writes a constexpr inside a string: a line break ends it early."""
    strings = [
        v.value
        for v in vars(nf4).values()
        if isinstance(v, nf4.tl.constexpr) and isinstance(v.value, str)
    ]
    assert strings and not any("\n" in string for string in strings)


@pytest.mark.parametrize("transposed", [False, True])
def test_fake_tensors(nf4, pair, transposed):
    weight, state = pair
    weight = weight.t() if transposed else weight
    want = nf4.dequantize_nf4(weight, state)  # and keeps a launch, which must not be taken
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(weight)
    outputs = [nf4.dequantize_nf4(fake, state)]
    with mode:
        outputs += [nf4.dequantize_nf4(fake, state), nf4.dequantize_nf4(weight, state)]
    for out in outputs:
        assert isinstance(out, type(fake)) and out.device == weight.device
        assert (out.shape, out.stride(), out.dtype) == (want.shape, want.stride(), want.dtype)


def test_meta_tensors(nf4, pair):
    weight, state = pair
    for name in ("absmax", "code", "offset"):
        setattr(state, name, getattr(state, name).to("meta"))
    state.state2.absmax, state.state2.code = (
        state.state2.absmax.to("meta"),
        state.state2.code.to("meta"),
    )
    for moved, shape in ((weight.to("meta"), (64, 128)), (weight.to("meta").t(), (128, 64))):
        out = nf4.dequantize_nf4(moved, state)
        assert out.is_meta and out.shape == shape and out.dtype == torch.float16


class Dequantize(torch.nn.Module):
    def __init__(self, function, layer):
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, x):
        return x @ self.function(self.layer).t()


@pytest.mark.parametrize("strict", [True, False])
def test_export(nf4, device, strict):
    layer = nf4.bnb_Linear4bit(64, 128).to(device)
    layer.weight.quant_state.dtype = torch.float16
    x = torch.randn(3, 64, dtype=torch.float16, device=device)
    module = Dequantize(nf4.your_dequantize_nf4, layer)
    program = torch.export.export(module, (x,), strict=strict)
    assert any(
        "dequantize" in str(node.target) or "triton" in str(node.target)
        for node in program.graph.nodes
    )
    assert nf4.bits_differing(program.module()(x), module(x)) == 0


def network(device, dtype, compressed):
    dim = 256 if GPU else 64
    layers = [
        bnb.nn.Linear4bit(dim, dim, False, dtype, compressed, "nf4").to(device) for _ in range(4)
    ]
    for layer in layers:
        layer.weight.quant_state.dtype = dtype
    return layers, torch.randn(16, dim, device=device).to(dtype)


@pytest.mark.parametrize(
    "dtype, compressed, mode, fullgraph",
    [
        (torch.bfloat16, True, "default", True),
        (torch.bfloat16, False, "reduce-overhead", True),
        (torch.float16, True, "reduce-overhead", True),
        (torch.float16, False, "default", False),
        (torch.float32, True, "default", True),
    ],
)
def test_compiled_network(nf4, device, tally, dtype, compressed, mode, fullgraph):
    """As bitsandbytes' own test of compiled layers, with our function; with gradients."""
    layers, x = network(device, dtype, compressed)

    def forward(x):
        weights = [nf4.your_dequantize_nf4(layer) for layer in layers]
        y = x
        for weight in weights:
            y = F.linear(y, weight)
        return y, weights

    how = {"mode": mode} if GPU else {"backend": nf4.GraphCounter("cpu")}
    by_compiler = torch.compile(forward, fullgraph=fullgraph, **how)
    y, weights = forward(x)
    for _ in range(3):  # in reduce-overhead: warm-up, recording, replay
        got, got_weights = by_compiler(x)
        torch.testing.assert_close(got, y)
        assert sum(helpers.differing(nf4, tally, *both) for both in zip(got_weights, weights)) == 0
    gradients = []
    for function in (forward, by_compiler):
        leaf = x.clone().requires_grad_()
        function(leaf)[0].float().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


@contextlib.contextmanager
def ours_in_bitsandbytes(nf4, place):
    """In the place of its dequantize_4bit: the backward's alone; or in both directions."""
    if place == "both directions":
        with nf4.in_bitsandbytes(fewest=1):
            yield
    else:
        with mock.patch.object(bnb.functional, "dequantize_4bit", nf4.dequantize_nf4):
            yield


class Net(torch.nn.Module):
    """Four Linear4bit layers, as QLoRA trains through them."""

    def __init__(self, device, dtype, compressed, checkpointed):
        super().__init__()
        dim = 256 if GPU else 64
        self.checkpointed = checkpointed
        self.layers = torch.nn.ModuleList()
        for columns, rows in ((dim, 2 * dim), (2 * dim, dim), (dim, dim), (dim, dim)):
            layer = bnb.nn.Linear4bit(columns, rows, False, dtype, compressed, "nf4").to(device)
            layer.weight.quant_state.dtype = dtype
            self.layers.append(layer)

    def forward(self, x):
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x


def trained(net, x):
    """The output, and the gradient of the input."""
    leaf = x.clone().requires_grad_()
    out = net(leaf)
    out.float().square().sum().backward()
    return out.detach().clone(), leaf.grad.clone()


MODES = ["default", "reduce-overhead"] if GPU else ["aot_eager"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("compressed", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("place", ["backward", "both directions"])
def test_compiled_training(nf4, device, tally, place, dtype, compressed, checkpointed, mode):
    """Through bitsandbytes' layers, in one graph, forward and backward; as eager, to the bit.

    On a GPU within torch.testing's defaults, since Inductor may round elsewhere.
    """
    net = Net(device, dtype, compressed, checkpointed)
    x = torch.randn(16, net.layers[0].in_features, device=device).to(dtype)
    how = {"mode": mode} if GPU else {"backend": nf4.GraphCounter("cpu")}
    with ours_in_bitsandbytes(nf4, place):
        wanted = trained(net, x)
        by_compiler = torch.compile(net, fullgraph=True, **how)
        for _ in range(3):  # in reduce-overhead: warm-up, recording, replay
            torch.compiler.cudagraph_mark_step_begin()
            got = trained(by_compiler, x)
            for ours, eager in zip(got, wanted):
                if GPU:
                    torch.testing.assert_close(ours, eager)
                else:
                    assert helpers.differing(nf4, tally, ours, eager) == 0
    assert wanted[1].any()


def every_second_byte(weight):
    return torch.cat((weight, weight), dim=1)[:, :1]


def test_a_weight_that_is_not_contiguous_is_refused_where_it_is_compiled(nf4, device, pair):
    weight, state = pair
    function = compiled(nf4, device, nf4.dequantize_nf4)
    with pytest.raises(Exception, match="contiguous: False"):
        function(every_second_byte(weight), state)
    assert nf4.bits_differing(function(weight, state), dequantize_4bit(weight, state)) == 0


class InBackward(torch.autograd.Function):
    """Dequantizes in the backward alone, where Dynamo forbids some questions about tensors."""

    @staticmethod
    def forward(ctx, x, weight, quant_state, dequantize):
        ctx.weight, ctx.quant_state, ctx.dequantize = weight, quant_state, dequantize
        return x.new_ones(x.shape[0], quant_state.shape[0])

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.dequantize(ctx.weight, ctx.quant_state), None, None, None


def test_a_weight_that_is_not_contiguous_is_refused_inside_a_backward(nf4, device, pair):
    weight, state = pair

    def gradient(packed, dequantize):
        leaf = torch.ones(3, 128, dtype=torch.float16, device=device, requires_grad=True)
        compiled(nf4, device, InBackward.apply)(leaf, packed, state, dequantize).sum().backward()
        return leaf.grad

    with pytest.raises(Exception, match="contiguous: False"):
        gradient(every_second_byte(weight), nf4.dequantize_nf4)
    torch._dynamo.reset()
    ones = torch.ones(3, 64, dtype=torch.float16, device=device)
    want = ones @ dequantize_4bit(weight, state)
    assert nf4.bits_differing(gradient(weight, nf4.dequantize_nf4), want) == 0


def test_a_copied_layer_is_compiled_as_well(nf4, device):
    layer = nf4.bnb_Linear4bit(64, 128).to(device)
    layer.weight.quant_state.dtype = torch.float16
    want, function = nf4.your_dequantize_nf4(layer), compiled(nf4, device, nf4.your_dequantize_nf4)
    for copied in (layer, copy.deepcopy(layer)):
        assert nf4.bits_differing(function(copied), want) == 0


def test_jit_trace_records_the_operator(nf4, pair):
    weight, state = pair
    want = dequantize_4bit(weight, state)
    traced = helpers.jit_traced(lambda packed: nf4.dequantize_nf4(packed, state), weight)
    assert "nf4_triton::dequantize" in str(traced.graph)
    assert nf4.bits_differing(traced(weight), want) == 0
