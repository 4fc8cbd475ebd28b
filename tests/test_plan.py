"""A plan never serves what it was not made for, and where none can be kept, every call is right.

What changes between two calls stands in a table. Each question that a plan asks, and each condition
under which one is kept, is also taken away: the check beside it must then fail.
"""

import contextlib
import gc
import operator
import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest import mock

import helpers
import pytest
import test_compile
import torch

GPU = torch.cuda.is_available()


def change(layer, name, make):
    """What stands at `name` becomes make(of it)."""
    owner, last = helpers.owner_of(name, layer)
    setattr(owner, last, make(getattr(owner, last)))


def others(tensor):
    """Other values in other memory."""
    return tensor * 1.5 if tensor.numel() == 1 else tensor.flip(0)


def in_place(tensor):
    return tensor.copy_(others(tensor))


def by_data(tensor):
    """The object stays."""
    tensor.data = others(tensor)
    return tensor


def as_integers(tensor):
    return tensor.flatten().view(torch.int16 if tensor.itemsize == 1 else torch.int32)


def requiring_grad(weight):
    return weight.flatten().view(torch.float16).requires_grad_()


def every_second(weight):
    """Of the same sizes, in a buffer twice as long."""
    return torch.cat((weight, weight), dim=1)[:, :1]


def elsewhere(weight):
    """On a GPU pinned memory, whose address the GPU can read: only the device tells."""
    return weight.cpu().pin_memory() if GPU else weight.to("meta")


WEIGHT, STATE = "weight", "quant_state."
TENSORS = [WEIGHT, STATE + "absmax", STATE + "code", STATE + "offset"]
TENSORS += [STATE + "state2.absmax", STATE + "state2.code"]
CHANGES = {  # {what: (where, what it becomes, "plan" | "operator" | the message)}
    "dtype": (STATE + "dtype", lambda dtype: torch.bfloat16, "operator"),
    "shape": (STATE + "shape", lambda shape: shape[::-1], "operator"),
    "shape a list": (STATE + "shape", list, "plan"),
    "state2.blocksize": (STATE + "state2.blocksize", lambda size: 512, "operator"),
    "blocksize": (STATE + "blocksize", lambda size: 128, "absmax must have 16 elements"),
    "quant_type": (STATE + "quant_type", lambda name: "fp4", "must be 'nf4', got 'fp4'"),
    "state2": (STATE + "state2", lambda state2: None, "absmax must be torch.float32"),
    "offset in bf16": (STATE + "offset", lambda offset: offset.bfloat16(), "operator"),
    "fp16 offset, 2 bytes on": (STATE + "offset", lambda t: helpers.moved(t.half(), 2), "operator"),
    "offset in fp64": (STATE + "offset", lambda offset: offset.double(), "operator"),
    "weight one byte on": (WEIGHT, partial(helpers.moved, offset=1), "plan"),
    "weight that requires grad": (WEIGHT, requiring_grad, "operator"),
    "weight as int8": (WEIGHT, lambda weight: weight.view(torch.int8), "operator"),
    "weight as fp64": (WEIGHT, lambda weight: weight.view(-1).view(torch.float64), "operator"),
    "every second byte": (WEIGHT, every_second, "be contiguous"),
    "weight sparse": (WEIGHT, lambda weight: weight.to_sparse(), "be a strided tensor"),
    "weight on another device": (WEIGHT, elsewhere, "be on"),
}
for name in TENSORS:
    CHANGES[f"{name}.data = others"] = name, by_data, "plan"
    CHANGES[f"{name} = others"] = name, others, "plan"
    CHANGES[f"{name}.copy_(others)"] = name, in_place, "plan"
    CHANGES[f"{name} as integers"] = name, as_integers, "must be torch"
    CHANGES[f"{name} freed"] = name, partial(helpers.resized, n_bytes=0), "of storage, got 0"
    CHANGES[f"{name} = None"] = name, lambda tensor: None, "expected a 4-bit weight|got None"


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen(planned, what):
    layer = planned.layer_with_plan()
    where, make, wanted = CHANGES[what]
    change(layer, where, make)
    if wanted in ("plan", "operator"):
        assert [planned.ran(layer) for _ in range(2)] == [wanted, "plan"]
    else:
        with pytest.raises((ValueError, TypeError), match=wanted):
            planned.ran(layer)
        assert planned.ran(planned.made()) == "plan", "an error leaves the plan as it was"


def test_each_form_of_a_weight_has_its_plan(planned):
    """As with offloading or FSDP, or of a model on many GPUs: there may be a dozen in turn."""
    layer = planned.layer_with_plan()
    packed = layer.weight
    forms = [packed, packed.t(), packed.view(-1), torch.nn.Parameter(packed, requires_grad=False)]
    forms += [packed.view(-1, 2**i) for i in range(1, 8)]
    for wanted in ("operator", "plan", "plan"):
        for form in forms:
            layer.weight = form
            assert planned.ran(layer) == ("plan" if form is packed else wanted)


def test_no_kind_gets_anothers_plan(planned):
    """A second layer of each has the first one's plan."""
    kinds = [{}, {"dtype": torch.bfloat16}, {"blocksize": 128}, {"nested": False}]
    kinds += [{"shape": (64, 32)}, {"shape": (64, 65)}]  # the last takes three programs
    for wanted in ("operator", "plan"):
        for kind in kinds:
            ran = [planned.ran(planned.made(seed, **kind)) for seed in range(2)]
            assert ran == [wanted, "plan"]


def test_the_layer_of_a_plan_may_go(planned):
    layer = planned.layer_with_plan()
    names = [name for name in TENSORS if "code" not in name]  # that is one for all layers
    held = [weakref.ref(operator.attrgetter(name)(layer)) for name in names]
    del layer
    gc.collect()
    assert [ref() for ref in held] == [None] * 4
    assert planned.ran(planned.made(1)) == "plan"


def test_each_output_is_fresh(planned):
    layers = [planned.layer_with_plan(), planned.made(1), planned.made()]
    outs = [planned.nf4.your_dequantize_nf4(layer) for layer in layers]
    assert planned.n_by_operator == 1 and len({out.data_ptr() for out in outs}) == 3
    assert [planned.n_wrong(*pair) for pair in zip(outs, layers)] == [0, 0, 0]


def test_inference_mode_and_autocast_get_their_own(planned):
    """They change dispatch keys: each has a plan of its own, and outputs of its kind."""
    autocast = partial(torch.autocast, planned.device, dtype=torch.bfloat16)
    layer = planned.made()
    contexts = 2 * [contextlib.nullcontext, torch.no_grad, torch.inference_mode, autocast]
    for turn, context in enumerate(contexts):
        with context():
            ran = planned.ran(layer)
            out = planned.nf4.your_dequantize_nf4(layer)
        if turn >= 4:  # each context's second time
            assert ran == "plan"
        assert out.is_inference() == (context is torch.inference_mode)


def test_the_current_stream_is_used(planned):
    layer = planned.layer_with_plan()
    if not GPU:
        planned.world.stream = 7  # the launcher's stand-in compares
        assert planned.ran(layer) == "plan"
        return
    layer, other = planned.made(shape=(4096, 4096)), planned.made(1, shape=(4096, 4096))
    planned.ran(layer)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        layer.weight.copy_(other.weight)  # ordered on this stream alone
        assert planned.ran(layer) == "plan"


@pytest.mark.skipif(GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_may_be_current(planned):
    """At the first call and at later ones; it is current again afterwards."""
    devices = ("cuda:0", "cuda:1") if GPU else ("cpu",)
    layers = [planned.made(device=device) for device in devices]
    for turn, current in enumerate((1, 0, 1)):
        with torch.cuda.device(current):
            for layer in layers:
                assert planned.ran(layer) == ("operator" if turn == 0 else "plan")
            assert torch._C._cuda_getDevice() == current


def test_none_is_made_during_a_capture(planned):
    """What a plan tries would be captured, and every replay would do it again."""
    with planned.patch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert [planned.ran(planned.made()) for _ in range(2)] == ["operator", "operator"]
    planned.layer_with_plan()


def with_kernel_again(planned, text="", replacement=""):
    """The kernel's cell runs again; in it the text, if any, became its replacement."""
    nf4, names = planned.nf4, dict(vars(planned.nf4))  # a copy: other tests have the module, too
    source = dict(helpers.exports())["nf4_triton.ipynb[kernel]"]
    helpers.execute(source.replace(text, replacement), "again", names)
    planned.patch.setattr(nf4, "_dequantize_nf4_kernel", names["_dequantize_nf4_kernel"])
    return helpers.Planned(nf4, planned.device, planned.patch)


def check_that_none_is_kept(planned, fault, prepare=lambda layer: None):
    """Every call is right, and each trial's fault is said: the third call tries nothing."""
    planned.said.clear()
    for seed in (0, 0, 1, 1):
        layer = planned.made(seed)
        prepare(layer)
        assert planned.ran(layer) == "operator"
    assert len(planned.said) == 3
    assert all("no plan" in said and fault in said for said in planned.said)
    planned.said.clear()


def test_other_bits_are_refused(planned):
    """Of its kind alone; what is edited begins anew, at once."""
    start, other = torch._C._StaticCudaLauncher._launch_kernel, planned.made(2)

    def start_another(*given):
        *how, arguments, stream = given
        out_address, _weight_address, *rest = arguments
        start(*how, (out_address, other.weight.data_ptr(), *rest), stream)

    planned.start_by(start_another)
    check_that_none_is_kept(planned, "other bits")
    planned.start_by(start)
    another_kind = partial(planned.made, dtype=torch.bfloat16)
    assert [planned.ran(another_kind()) for _ in range(2)] == ["operator", "plan"]
    for edited in ("launch_of", "make_plan"):
        with planned.patch.context() as patch:
            patch.setattr(planned.nf4, edited, partial(getattr(planned.nf4, edited)))
            assert [planned.ran(planned.made()) for _ in range(2)] == ["operator", "plan"]
        planned.nf4.PLANS.clear()
    again = with_kernel_again(planned)
    assert [again.ran(again.made()) for _ in range(2)] == ["operator", "plan"]


def test_a_start_that_writes_nothing_is_not_kept(planned):
    """The memory that the trial's output gets held the right bits before."""
    tried, addresses = [], set()

    def leave_the_right_bits(layer):
        right = planned.nf4.spec(layer.weight, layer.quant_state)
        blocks = [right, *(right.clone() for _ in range(64))]  # all that the allocator may give
        addresses.update(block.data_ptr() for block in blocks)
        if not GPU:  # an allocator of one block
            planned.patch.setattr(torch, "full_like", lambda out, value: right.fill_(value))
            planned.replace("_C._dynamo.guards._empty_strided_cuda", lambda *how: right)

    def write_nothing(*given):
        *_, (out_address, *_), _stream = given
        tried.append(out_address)

    planned.start_by(write_nothing)
    check_that_none_is_kept(planned, "other bits", leave_the_right_bits)
    assert tried and addresses.issuperset(tried), "else nothing is tested"


@pytest.mark.skipif(GPU, reason="there the kernel is compiled as it is")
def test_a_kernel_with_scratch_memory_gets_none(planned):
    planned.world.scratch = 8
    check_that_none_is_kept(planned, "scratch memory")


PRIVATE = [  # of torch, one that could be renamed
    "_C._dynamo.guards.TensorGuards",
    "_C._dynamo.guards._empty_strided_cuda",
    "_C._StaticCudaLauncher",
    "_C._len_torch_dispatch_stack",
]
if not GPU:  # there Triton's own launch needs these, too
    PRIVATE += ["_C._cuda_getDevice", "_C._cuda_getCurrentRawStream"]


@pytest.mark.parametrize("missing", PRIVATE)
def test_all_is_right_where_torch_lacks_a_private_function(planned, missing):
    planned.patch.delattr(*helpers.owner_of(missing, torch))
    check_that_none_is_kept(planned, f"'{missing.rpartition('.')[2]}'")


def no_memory(planned):
    with planned.patch.context() as patch:
        patch.setattr(torch, "full_like", mock.Mock(side_effect=torch.OutOfMemoryError))
        planned.ran(planned.made())


def no_waiting(planned):
    layer = planned.made()
    if GPU:
        torch.cuda.set_sync_debug_mode("error")
        planned.nf4.your_dequantize_nf4(layer)
        torch.cuda.set_sync_debug_mode("default")
    else:
        with planned.patch.context() as patch:
            patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 2)
            patch.setattr(torch, "equal", mock.Mock(side_effect=RuntimeError))
            planned.nf4.your_dequantize_nf4(layer)
    assert not planned.nf4.WITHOUT_PLAN


def one_table_twice(planned):
    for _ in range(9):  # were they failures, the 16th would be tried next
        layer = planned.made()
        layer.quant_state.offset = layer.quant_state.state2.absmax
        planned.ran(layer)


def a_lazy_negation(planned):
    layer = planned.made()
    state2 = layer.quant_state.state2
    state2.absmax = torch._neg_view(-state2.absmax)
    planned.ran(layer)


@pytest.mark.parametrize("trouble", [no_memory, no_waiting, one_table_twice, a_lazy_negation])
def test_a_trouble_passes(planned, trouble):
    """It is about a call, not its kind: that call is right, and nothing is said."""
    trouble(planned)
    planned.ran(planned.made(1))  # leaves a plan
    assert planned.ran(planned.made(1)) == "plan"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_trial_is_repeated(planned, error):
    """But seldom: after each failure twice as many calls go by."""
    tried = mock.Mock(side_effect=error)
    with planned.patch.context() as patch:
        patch.setattr(torch, "full_like", tried)
        for _ in range(100):
            assert planned.ran(planned.made()) == "operator"
    assert 2 < tried.call_count < 10
    assert len(planned.said) == (tried.call_count if error is RuntimeError else 0)
    planned.said.clear()
    ran = [planned.ran(planned.made()) for _ in range(100)]
    assert ran[1] == "operator" and ran[-1] == "plan"


def test_a_code_of_another_default_dtype_has_its_plan(planned):
    """With bitsandbytes' own entries, which it rounds."""
    layer = planned.made()
    want = planned.nf4.your_dequantize_nf4(layer)
    layer.quant_state.code = layer.quant_state.code.bfloat16()
    for _ in range(2):
        out = planned.nf4.your_dequantize_nf4(layer)
        assert planned.nf4.bits_differing(out, want) == 0
    assert planned.n_by_operator == planned.n_plans() == 2


def test_a_table_at_an_odd_address_is_refused(planned):
    """As a loader that copies nothing hands one over: a plan's kernel would end CUDA's context."""
    for name in TENSORS[2:]:
        layer = planned.made()
        planned.ran(layer)
        change(layer, name, helpers.one_byte_on)
        with pytest.raises(ValueError, match="must be at a multiple of 4, got address"):
            planned.ran(layer)


def test_an_edited_kernel_or_plan_is_followed(planned):
    """A reader has offset count twice in the kernel's cell, then runs the plan's cell again."""
    layer = planned.layer_with_plan()
    edited = with_kernel_again(planned, "+ offset", "+ offset + offset")
    outs = [planned.nf4.your_dequantize_nf4(layer) for _ in range(2)]
    layer.quant_state.offset *= 2
    assert [edited.n_wrong(out, layer) for out in outs] == [0, 0] and edited.n_by_operator == 1
    source = dict(helpers.exports())["nf4_triton.ipynb[plan]"]
    helpers.execute(source, "plan again", dict(vars(planned.nf4)))
    assert not planned.n_plans(), "a plan as it was before an edit"


# Each question that is asked is also taken away. A test of this folder must then fail.


class Lacking(NamedTuple):
    text: str  # in the notebook
    test: Callable  # of a module so changed
    replacement: str = "False"
    error: type = AssertionError  # in which the test ends


PLANS_OF_ANY_KIND = """
class Plans(dict):
    def get(self, kind, default):
        return sum(self.values(), [])
PLANS = NF4_OPS.plans = Plans()"""
LACKING = [
    Lacking("kernel is not _dequantize_nf4_kernel", test_an_edited_kernel_or_plan_is_followed),
    Lacking("not are_alike(*given)", partial(test_a_change_is_seen, what="every second byte")),
    Lacking("n_modes()", partial(test_compile.test_tracers_make_no_weight_constant, how="make_fx")),
    Lacking("0 in addresses", partial(test_a_change_is_seen, what="weight freed")),
    Lacking(
        "addresses[i] % itemsize",
        test_a_table_at_an_odd_address_is_refused,
        error=pytest.fail.Exception,  # no ValueError came
    ),
    Lacking("current_gpu() != index", test_another_gpu_may_be_current),
    Lacking("current_stream(index))", test_the_current_stream_is_used, "0)"),
    Lacking("metadata.profile_scratch_size", test_a_kernel_with_scratch_memory_gets_none),
    Lacking(
        "not torch.equal(plan(present).view(bits), out.view(bits))", test_other_bits_are_refused
    ),
    Lacking("torch.full_like(out, math.nan)", test_a_start_that_writes_nothing_is_not_kept, "None"),
    Lacking("n_calls.bit_count() > 1", partial(test_a_trial_is_repeated, error=RuntimeError)),
    Lacking("torch.cuda.get_sync_debug_mode()", partial(test_a_trouble_passes, trouble=no_waiting)),
    Lacking("torch.cuda.is_current_stream_capturing()", test_none_is_made_during_a_capture),
    Lacking(
        "len(set(map(id, present))) < len(present)",
        partial(test_a_trouble_passes, trouble=one_table_twice),
    ),
    Lacking(
        '"Autograd", torch.library.fallthrough_kernel',
        partial(test_a_change_is_seen, what="weight that requires grad"),
        '"AutogradXPU", torch.library.fallthrough_kernel',  # a device nobody has: not at all
    ),
    Lacking(
        'PLANS = vars(NF4_OPS).setdefault("plans", {})',
        test_no_kind_gets_anothers_plan,
        PLANS_OF_ANY_KIND,
    ),
    Lacking(
        "torch.compiler.is_dynamo_compiling()",
        partial(test_compile.test_all_weights_of_a_kind_share_one_graph, dynamic=None),
        error=torch._dynamo.exc.Unsupported,
    ),
]
SEEN_BY_OLD_GUARDS = ("n_modes()", "torch.compiler.is_dynamo_compiling()")


@pytest.mark.skipif(GPU, reason="some would end the process")
@pytest.mark.parametrize("lacking", LACKING, ids=operator.attrgetter("text"))
def test_each_condition_is_needed(lacking, device, monkeypatch):
    if torch.__version__ < (2, 11) and lacking.text in SEEN_BY_OLD_GUARDS:
        pytest.skip("torch 2.9's guard sees traces itself")
    name = f"nf4_lacking_{LACKING.index(lacking)}"
    wrong = helpers.load(name, (lacking.text, lacking.replacement))
    control = helpers.load("nf4_control"), contextlib.nullcontext()
    for nf4, outcome in (control, (wrong, pytest.raises(lacking.error))):
        with monkeypatch.context() as patch:
            planned = helpers.Planned(nf4, device, patch)
            planned.layer_with_plan()
            assert planned.ran(planned.made(1)) == "plan", "the rest of it works"
            nf4.PLANS.clear()
            with outcome:
                lacking.test(planned)
                assert not planned.said
