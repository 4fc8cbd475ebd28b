"""Protects the reader from evidence that shows nothing: what is compared, on which path, counted.

The page's own functions are tested with paths and kernels that are wrong in a known way. On a GPU
the notebook itself runs the same functions, and its cells assert what they find.
"""

import collections
import contextlib
import types
from unittest import mock

import helpers
import pytest
import torch
from bits import right
from bitsandbytes.functional import dequantize_4bit

THREE_DTYPES = set(helpers.DTYPES)


# The comparison of all bits


def test_bits_are_compared_where_values_are_equal_or_no_numbers(nf4):
    x = torch.tensor([0.0, torch.nan, 1.0, 1.0], dtype=torch.float16)
    y = torch.tensor([-0.0, torch.nan, 1.0, 1.0009765625], dtype=torch.float16)
    assert nf4.bits_differing(x, y) == 2 and nf4.bits_differing(x, x.clone()) == 0
    assert nf4.bits_differing(x.float(), y.float()) == 2
    for other in (y[:3], y.float(), y.view(2, 2)):
        with pytest.raises(AssertionError):
            nf4.bits_differing(x, other)


def test_one_wrong_bit_is_counted_for_its_case_and_path(nf4, device):
    def wrong(weight, state):
        out = nf4.spec(weight, state)
        if state.shape == (4, 128):
            out[1, 5:6].view(torch.int16).bitwise_xor_(1)
        return out

    shapes = [("square", (8, 64)), ("wide", (4, 128)), ("square", (16, 64))]
    cases = [(name, *nf4.quantized(shape, torch.float16, device)) for name, shape in shapes]
    rows = nf4.compare(cases, {"wrong": wrong, "right": nf4.spec}, dequantize_4bit)
    assert rows == [
        {"case": "square", "path": "wrong", "weights": 1536, "differing": 0},
        {"case": "square", "path": "right", "weights": 1536, "differing": 0},
        {"case": "wide", "path": "wrong", "weights": 512, "differing": 1},
        {"case": "wide", "path": "right", "weights": 512, "differing": 0},
    ]


def test_each_path_is_what_its_name_says(calls):
    nf4, layer = calls.nf4, calls.layer()
    given = layer.weight, layer.quant_state
    launch = mock.Mock(wraps=nf4.launch)
    calls.patch.setattr(nf4, "launch", launch)
    with pytest.raises(ValueError, match="expected a plan .* got none"):
        nf4.by_plan(*given)
    for n in (1, 2):
        calls.assert_right(nf4.by_kernel_grid(*given), layer)
        assert launch.call_count == n and calls.n_by_operator == 0, "one launch, and no operator"
    for n in (1, 2):
        calls.assert_right(nf4.by_first_call(*given), layer)
        assert calls.n_by_operator == n, "no plan was there before"
    calls.assert_right(nf4.by_plan(*given), layer)
    assert calls.n_by_operator == 2, "no operator ran"
    with pytest.raises(ValueError, match="expected bitsandbytes to do the work, got a plan"):
        nf4.by_fallback(*given)
    layer = calls.layer(shape=(3, 5))
    calls.assert_right(nf4.by_fallback(layer.weight, layer.quant_state), layer)


# The cases


N_CASES = {  # {name: how many on a CPU}, in three dtypes
    "random weights in the challenge's shapes": 3 * 2,
    "shapes whose last program is not whole": 3 * 4,
    "a weight that is passed as [1, n]": 3,
    "an offset in fp16 or bf16": 3 * 2,
    "16 nibbles x 256 absmax, with tiny and huge scales": 3 * 3,
    "blocks of 32 to 4096, nested and plain absmax": 3 * 8 * 2,
}


def test_no_case_is_forgotten(nf4):
    found = collections.Counter()
    for name, weight, state in nf4.cases("cpu"):
        found[name] += 1
        if name.startswith("16 nibbles"):
            rows = zip(state.absmax.tolist(), weight.view(256, -1).tolist())
            seen = [(absmax, byte >> 4, byte & 15) for absmax, row in rows for byte in row]
            assert len({(absmax, high) for absmax, high, _ in seen}) == 16 * 256
            assert len({(absmax, low) for absmax, _, low in seen}) == 16 * 256
    assert found == N_CASES, "a case is missing or new"


def test_on_a_gpu_the_cases_are_the_challenges_shapes(nf4, monkeypatch):
    """With extreme scales, and with three state2.absmax for each block size."""
    made = nf4.quantized((64, 64), torch.float16, "cpu")
    quantized, every_combination = mock.Mock(return_value=made), mock.Mock(return_value=made)
    monkeypatch.setattr(nf4, "quantized", quantized)
    monkeypatch.setattr(nf4, "every_combination", every_combination)
    found = collections.Counter(name for name, *_ in nf4.cases("cuda"))
    more = {"random weights in the challenge's shapes": 3 * 3}
    more["16 nibbles x 256 absmax, with tiny and huge scales"] = 3 * 4
    assert found == N_CASES | more, "a case is missing or new"
    asked = [call.args for call in quantized.call_args_list]
    assert all((shape, dtype, "cuda") in asked for shape in nf4.SHAPES for dtype in THREE_DTYPES)
    for blocksize in nf4.BLOCKSIZES:
        assert ((blocksize // 8 + 1, 4096), torch.float16, "cuda", blocksize, True) in asked
    factors = {call.args[2] for call in every_combination.call_args_list}
    assert factors == {1, 1e-38, 1e-30, 1e30}


def test_cases_show_what_the_kernel_does_not_take(nf4, device):
    """In size, in address, by gaps, or by an offset in fp64; each in all dtypes."""
    found = {"size": set(), "address": set(), "gaps": set(), "offset": set()}
    for _, weight, state in nf4.cases_for_bitsandbytes(device):
        unusual = {
            "size": state.shape.numel() % 8 > 0,
            "address": weight.data_ptr() % 4 > 0,
            "gaps": not weight.is_contiguous(),
            "offset": state.offset.dtype == torch.float64,
        }
        assert any(unusual.values()), "a case that the kernel takes"
        for name in unusual:
            found[name] |= {state.dtype} if unusual[name] else set()
    assert all(dtypes == THREE_DTYPES for dtypes in found.values()), found


# The compiled kernel, and what the GPU runs


SHUFFLE = "shfl.sync.idx.b32 %r41, %r39, %r40, 0x101f, -1;\n"
PTX = f"""
createpolicy.fractional.L2::evict_last.b64 %rd7, 1.0;
@%p1 ld.global.L1::evict_first.v2.b32 {{ %r1, %r2 }}, [ %rd1 + 0 ];
@%p2 ld.global.L1::evict_last.L2::cache_hint.b32 {{ %r4 }}, [ %rd8 + 0 ], %rd7;
mul.rn.f32 %f3, %f1, %f2;
add.f32 %f4, %f3, %f5;
{16 * SHUFFLE}
st.global.v4.b32 [ %rd10 + 0 ], {{ %r60, %r61, %r62, %r63 }};
st.global.v4.b32 [ %rd10 + 16 ], {{ %r64, %r65, %r66, %r67 }};
"""
OTHER_PTX = {  # {what: (PTX, registers spilled, what the error names)}
    "a shuffle less": (PTX.replace(SHUFFLE, "", 1), 0, "warp shuffles.* found 15"),
    "words without a hint": (PTX.replace("L1::evict_first.", ""), 0, "evict_first"),
    "a policy that no load uses": (PTX.replace("L1::evict_last.L2::cache_hint.", ""), 0, "evict_l"),
    "narrow stores": (PTX.replace("st.global.v4", "st.global.v2"), 0, "stores of 16 bytes"),
    "a read of shared memory": (PTX + "ld.shared.v4.b32 { }, [ %r9 ];", 0, "shared memory"),
    "a store to shared memory": (PTX + "st.shared.v4.b32 [ %r9 ], { };", 0, "shared memory"),
    "an FMA": (PTX.replace("mul.rn", "fma.rn"), 0, "FMA.* found 1"),
    "a spill": (PTX, 1, "spilled registers, found 1"),
}


@pytest.mark.parametrize("what", OTHER_PTX)
def test_a_compiled_kernel_that_contradicts_the_page_is_refused(nf4, what):
    assert [row["found"] for row in nf4.evidence(PTX, 0)] == [16, 1, 1, 2, 0, 0, 0]
    ptx, n_spills, named = OTHER_PTX[what]
    with pytest.raises(ValueError, match=named):
        nf4.evidence(ptx, n_spills)


def test_each_kernel_of_a_call_is_listed(nf4, monkeypatch):
    """The stand-in for the profiler sees what ran until the wait; a helper runs on the CPU."""
    ran, waited_for, events = [], [], []

    def call():
        for device, name in (("CPU", "a"), ("CUDA", "kernel"), ("CUDA", "fill"), ("CUDA", "fill")):
            device_type = types.SimpleNamespace(name=device)
            ran.append(types.SimpleNamespace(name=name, device_type=device_type))

    @contextlib.contextmanager
    def profile():
        yield types.SimpleNamespace(events=lambda: events)
        events.extend(waited_for)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited_for.extend(ran))
    assert nf4.kernels_of(call, profile) == ["kernel", "fill", "fill"]


def test_bytes_beyond_the_output_are_counted(nf4):
    """Those that were freed again count, too."""
    allocated = [100]

    def call():
        allocated[0] += 64 + 7
        return torch.ones(16)

    assert nf4.bytes_of_call(call, lambda: allocated[0]) == (64, 7)


# torch.compile


@pytest.fixture
def mlps(nf4):
    torch.manual_seed(0)
    return [nf4.MLP(64, 128) for _ in range(2)]


@pytest.mark.parametrize("ok, total", [(0, 0), (1, 2)], ids=["never asked", "failed once"])
def test_a_function_that_was_not_compiled_is_told(nf4, mlps, monkeypatch, ok, total):
    """As some versions of torch run in silence what they cannot compile. Old counts are gone."""
    counts = torch._dynamo.utils.counters["aot_autograd"]
    counts.update(ok=3, total=3)

    def run_uncompiled(function, **_):
        counts.update(ok=ok, total=total)
        return function

    monkeypatch.setattr(torch, "compile", run_uncompiled)
    assert nf4.compare_compiled(right, mlps) == (0, False, 0)


def test_wrong_weights_of_a_compiled_function_are_counted(nf4, mlps):
    assert nf4.compare_compiled(right, mlps) == (0, True, 0)
    counts = nf4.compare_compiled(lambda layer: right(layer) + 100, mlps)
    assert counts == (2 * 3 * 64 * 128, True, 0)


def test_whether_ours_ran_in_a_compiled_function_is_told(calls, mlps):
    """By the kinds that have a plan then: two shapes. bitsandbytes leaves none."""
    nf4 = calls.nf4
    for _ in range(2):
        assert nf4.compare_compiled(nf4.your_dequantize_nf4, mlps) == (0, True, 2)
    assert nf4.compare_compiled(right, mlps) == (0, True, 0)


def test_on_a_gpu_inductor_compiles_anew(nf4, monkeypatch):
    """Not what an earlier function left, and not by the compiler that is used on a CPU."""
    compile_, reset = mock.Mock(side_effect=lambda function, **_: function), mock.Mock()
    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(torch._dynamo, "reset", reset)
    weight = types.SimpleNamespace(is_cuda=True)
    mlp = types.SimpleNamespace(up_proj=types.SimpleNamespace(weight=weight), layers=tuple)
    nf4.compare_compiled(right, [mlp])
    assert compile_.call_args.kwargs == {"fullgraph": True, "backend": "inductor"}
    assert reset.called, "an earlier function's graph may be used"


def breaks_the_graph(layer):
    torch._dynamo.graph_break()
    return right(layer)


def depends_on_the_layer(layer):
    return right(layer) * getattr(layer, "factor", 1)


@pytest.mark.parametrize("fx", [breaks_the_graph, depends_on_the_layer])
def test_a_graph_break_or_a_recompilation_raises(nf4, mlps, fx):
    mlps[1].up_proj.factor = 2
    with pytest.raises(RuntimeError, match="graph_break|recompil"):
        nf4.compare_compiled(fx, mlps)
