"""Protects the reader: what the page says of itself is tested with inputs whose answer is known.

Each function that counts, times, divides or draws gets stand-ins here: spoiled paths, known times,
contenders that turn wrong. On a GPU the notebook itself runs the same functions, and its cells
assert what they find.
"""

import contextlib
import inspect
import itertools
import random
import types
import weakref
from functools import partial
from unittest import mock

import helpers
import matplotlib
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit

matplotlib.use("Agg")
GPU = torch.cuda.is_available()
N_TOKENS = 2048 if GPU else 20  # for fewer, a GPU multiplies without weights
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
WIDTHS = (64, 128, 192)  # of the three small layers here
MIX = {"2048 x 8192": "fp16", "1024 x 4096": "bf16", "4096 x 14336": "bf16"}


@pytest.fixture
def options(nf4):
    """Three small options, each of another width."""
    small = zip(nf4.OPTIONS, WIDTHS)
    return [option._replace(bsz=1, qlen=N_TOKENS, hd=hd, m=256) for option, hd in small]


def right(layer):
    return dequantize_4bit(layer.weight.data, layer.weight.quant_state)


def dtypes_of(mlp):
    return {layer.weight.quant_state.dtype for layer in mlp.layers()}


def default(function, name):
    return inspect.signature(function).parameters[name].default


# The challenge


def test_the_challenges_constants_are_those_that_it_names(nf4):
    fp16, bf16 = DTYPES.values()
    assert nf4.SHAPES == ((2048, 8192), (1024, 4096), (4096, 14336))
    assert nf4.NAME == {fp16: "fp16", bf16: "bf16"}
    assert list(map(tuple, nf4.OPTIONS)) == [  # bsz, qlen, hd, m, seed, dtype
        (2, 3333, 2048, 8192, 3407, fp16),
        (5, 777, 1024, 4096, 3409, bf16),
        (3, 2048, 4096, 14336, 3408, bf16),
    ]
    mlp = nf4.MLP(64, 128)
    assert mlp.layers() == (mlp.up_proj, mlp.gate_proj, mlp.down_proj)
    assert default(nf4.test_dequantize, "options") is default(nf4.race, "options") is nf4.OPTIONS
    assert default(nf4.test_dequantize, "loops") == nf4.N_LOOPS == 1000
    assert default(nf4.test_dequantize, "dtype") is None, "each option in its own dtype"
    assert (default(nf4.race, "rounds"), default(nf4.race, "loops")) == (50, 100)
    assert default(nf4.time_kernels, "rounds") == 9 and default(nf4.official_runs, "runs") == 5
    assert nf4.COPY_BYTES_PER_S == 240e9 and nf4.PUBLISHED_S == (3.714, 4.116)
    assert nf4.STEPS == (1.05, 1.10, 1.15)
    assert nf4.BYTES_PER_WEIGHT == 2.515625 and nf4.SPLIT_BYTES_PER_WEIGHT == 2.765625


def test_layers_come_from_the_options_seed(nf4, options):
    seeds = (options[0].seed, options[0].seed, 1)
    made = [nf4.build(options[0]._replace(seed=seed), torch.float16) for seed in seeds]
    for first, second in (made[:2], made[1:]):
        are_equal = torch.equal(first[1].up_proj.weight, second[1].up_proj.weight)
        assert are_equal == torch.equal(first[0], second[0]) == (second is made[1])


OTHERS = {"quant_type": "fp4", "blocksize": 128, "absmax": torch.ones(1), "dtype": torch.float32}
OTHERS["state2"] = types.SimpleNamespace(absmax=torch.ones(1), code=torch.ones(1), blocksize=128)


@pytest.mark.parametrize("field", OTHERS)
def test_a_layer_that_is_not_the_challenges_is_refused(nf4, field):
    layer = nf4.MLP(64, 128).up_proj
    nf4.assert_correct_bnb(layer, torch.float16)
    setattr(layer.weight.quant_state, field, OTHERS[field])
    with pytest.raises(AssertionError):
        nf4.assert_correct_bnb(layer, torch.float16)


def test_each_dequantization_is_timed_and_waited_for(nf4, monkeypatch):
    seen, outs, times = [], [], [7.0, 5.0]

    def fx(layer):
        seen.append(layer)
        alive = [out() is not None for out in outs[len(outs) // 3 * 3 :]]
        assert all(alive), "the challenge keeps all three results of a loop"
        out = torch.ones(2, 3)
        outs.append(weakref.ref(out))
        return out

    def perf_counter():
        seen.append("clock")
        return times.pop()

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    monkeypatch.setattr(nf4, "time", types.SimpleNamespace(perf_counter=perf_counter))
    mlp = types.SimpleNamespace(layers=lambda: ("up", "gate", "down"))
    on_gpu = types.SimpleNamespace(is_cuda=True)
    assert nf4.timed(on_gpu, mlp, fx, loops=2) == 2.0
    loop = ["up", "wait", "gate", "wait", "down", "wait"]
    assert seen == ["wait", "clock", *loop, *loop, "clock"]
    assert [tuple(out.shape) for out in nf4.mlp_dequantize(on_gpu, mlp, fx)] == [(3, 2)] * 3


@pytest.mark.parametrize("dtype", [None, *DTYPES.values()], ids=["mix", *DTYPES])
def test_each_option_is_checked_twice_and_the_seconds_add_up(nf4, options, monkeypatch, dtype):
    fx, checks = mock.Mock(wraps=right), mock.Mock(wraps=nf4.assert_correct_bnb)
    seen = []

    def timed(X, mlp, function, loops):
        assert function is fx and loops == 7
        seen.append((X.shape[-1], X.dtype, *dtypes_of(mlp)))
        # In each round of checks: the forward pass, and each weight by itself.
        assert fx.call_count == len(seen) * 2 * (3 + 3)
        assert checks.call_count == len(seen) * 2 * 3
        return 10.0 ** len(seen)

    monkeypatch.setattr(nf4, "assert_correct_bnb", checks)
    monkeypatch.setattr(nf4, "timed", timed)
    assert nf4.test_dequantize(fx, dtype, loops=7, options=options) == 1110.0
    dtypes = [dtype or option.dtype for option in options]
    assert seen == [(width, each, each) for width, each in zip(WIDTHS, dtypes)]


def zeroing(layer):
    """With the weight, this contender spoils what it is compared with."""
    layer.weight.quant_state.absmax.zero_()
    layer.weight.quant_state.offset.zero_()
    layer.weight.quant_state.state2.code.zero_()
    return right(layer)


def wrong_down(layer):
    return right(layer) * (1.5 if layer.out_features < layer.in_features else 1)


WRONG = {  # {what: a contender whose weights test_dequantize must refuse}
    "0.1 % off": lambda layer: right(layer) * 1.001,
    "wrong in the third weight alone": wrong_down,
    "other strides": lambda layer: right(layer).t().contiguous().t(),
    "the layer is zeroed": zeroing,
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_weights_are_not_timed(nf4, options, monkeypatch, what):
    monkeypatch.setattr(nf4, "timed", pytest.fail)
    with pytest.raises(AssertionError):
        nf4.test_dequantize(WRONG[what], loops=1, options=options)


def test_the_official_runs_meet_a_drift_alike(nf4):
    """The host slows down all the while; the first run of a dtype is not counted."""
    ran, layers = [], nf4.MLP(64, 128).layers()

    def test(fx, dtype=None):
        ran.append((fx, dtype))
        return float(len(ran))

    ours, unsloth = mock.Mock(wraps=right), mock.Mock(wraps=right)
    contenders = {"Unsloth": unsloth, "ours": ours}
    rows = nf4.official_runs(contenders, {"fp16": torch.float16, "mix": None}, layers, test)
    order = (ours, ours, unsloth, unsloth, ours, ours, unsloth, unsloth, ours, ours, unsloth)
    assert ran == [(fx, dtype) for dtype in (torch.float16, None) for fx in order]
    seconds = {"ours": [2, 5, 6, 9, 10], "Unsloth": [3, 4, 7, 8, 11]}
    for name, expected in seconds.items():
        found = [row for row in rows if row["contender"] == name and row["dtype"] == "fp16"]
        assert [row["seconds"] for row in found] == expected
        assert [row["run"] for row in found] == [1, 2, 3, 4, 5]
    found = nf4.speedups(rows, "seconds", "median")
    assert found == [{"over": "Unsloth", "fp16": 7 / 6, "mix": 18 / 17}]


def test_without_right_bits_of_unsloth_no_test_is_reported(nf4, capsys):
    contenders = {"ours": right, "Unsloth": lambda layer: right(layer) + 1}
    rows = nf4.official_runs(contenders, {"mix": None}, nf4.MLP(64, 128).layers(), pytest.fail)
    assert rows == nf4.speedups(rows, "seconds", "median") == []
    assert "left out: Unsloth: " in capsys.readouterr().out


# Who races


@pytest.fixture
def called(nf4, monkeypatch):
    """What stands for Unsloth's module; each of its functions returns its name and arguments."""
    names = ("fast_dequantize", "_fast_dequantize_ctypes")
    functions = {name: lambda *given, _name=name, **how: (_name, given, how) for name in names}
    monkeypatch.setattr(nf4, "unsloth_kernels", types.SimpleNamespace(**functions))
    return functions


def test_each_contender_is_what_its_name_says(nf4, called):
    """Without a GPU, for the functions are not run."""
    layer = types.SimpleNamespace(weight=types.SimpleNamespace(quant_state="its state"))
    given, calls = (layer.weight, "its state"), {}
    for name in ("Unsloth", "Unsloth, buffer", "three launches"):
        calls[name] = nf4.CONTENDERS[name](layer)
    assert calls == {
        "Unsloth": ("fast_dequantize", given, {}),
        "Unsloth, buffer": ("fast_dequantize", given, {"use_global_buffer": True}),
        "three launches": ("_fast_dequantize_ctypes", given, {}),
    }
    assert nf4.trusted_dequantize in (nf4.unsloth_dequantize, nf4.bnb_dequantize), "never ours"
    from peft.utils.integrations import dequantize_module_weight

    assert nf4.CONTENDERS["PEFT"] is dequantize_module_weight
    timed = {name: nf4.CONTENDERS[name] for name in ("ours", "Unsloth")}
    assert nf4.ONE_KERNEL == timed, "whose kernels are timed"
    with mock.patch.multiple(nf4, dequantize_nf4=mock.DEFAULT, by_kernel_grid=mock.DEFAULT) as ours:
        assert nf4.CONTENDERS["ours"](layer) is ours["dequantize_nf4"].return_value
        assert nf4.CONTENDERS["kernel[grid]"](layer) is ours["by_kernel_grid"].return_value
    for each in ours.values():
        each.assert_called_once_with(*given)


def test_the_launchers_race_without_checks_or_with_tritons_own(planned, monkeypatch):
    nf4, layer = planned.nf4, planned.nf4.MLP(64, 128).up_proj
    by_torch, by_triton = mock.Mock(wraps=nf4.torch_launcher), mock.Mock(wraps=nf4.triton_launcher)
    monkeypatch.setattr(nf4, "torch_launcher", by_torch)
    monkeypatch.setattr(nf4, "triton_launcher", by_triton)
    nf4.tritons_plan.cache_clear()
    nf4.known_launch.cache_clear()
    for _ in range(2):
        assert nf4.bits_differing(nf4.CONTENDERS["Triton's launcher"](layer), right(layer)) == 0
        assert not by_torch.called and by_triton.call_count == 1
    with mock.patch.object(nf4, "unpack", wraps=nf4.unpack) as unpack:
        for _ in range(2):
            assert nf4.bits_differing(nf4.CONTENDERS["floor"](layer), right(layer)) == 0
    assert unpack.call_count == 1, "the floor asks nothing at its second call"
    assert by_torch.call_count == by_triton.call_count == 1
    nf4.tritons_plan.cache_clear()
    nf4.known_launch.cache_clear()


# The race


def test_the_race_returns_median_microseconds_of_a_call(nf4, options, monkeypatch, capsys):
    """Not those of a loop, which makes three calls, and not the best or the worst round."""
    rounds = {right: (2, 3, 3, 4, 1), nf4.bnb_dequantize: (4, 5, 90, 5, 1)}
    n_rounds = {}

    def timed(X, mlp, fx, loops):
        assert dtypes_of(mlp) == {X.dtype} and loops == 100
        job = (fx, X.dtype, X.shape[-1])
        n = n_rounds[job] = n_rounds.get(job, 0) + 1
        us = rounds[fx][n % 5] * X.shape[-1] * (10 if X.dtype == torch.bfloat16 else 1)
        return 1e-6 * us * 3 * loops

    monkeypatch.setattr(nf4, "timed", timed)
    contenders = {"ours": right, "Unsloth": nf4.bnb_dequantize}
    contenders["PEFT"] = lambda layer: 1.01 * right(layer)
    rows = nf4.race(contenders, DTYPES.values(), options=options)
    found = {(row["dtype"], row["contender"], row["shape"]): row["us"] for row in rows}
    assert len(rows) == len(found) == 3 * 2 * 3
    for name, us in (("ours", 3), ("Unsloth", 5)):
        for i, width in enumerate(WIDTHS):
            shape = f"{width} x 256"
            assert found["fp16", name, shape] == pytest.approx(us * width)
            assert found["bf16", name, shape] == pytest.approx(10 * us * width)
            is_fp16 = options[i].dtype == torch.float16
            assert found["mix", name, shape] == found["fp16" if is_fp16 else "bf16", name, shape]
    assert set(n_rounds.values()) == {50} and len(n_rounds) == 2 * 2 * 3
    assert "left out: PEFT: " in capsys.readouterr().out


def cached(kept):
    return lambda layer: kept.setdefault(layer, right(layer))


def right_at_first(kept):
    def fx(layer):
        kept[layer] = kept.get(layer, -1) + 1
        return right(layer) + kept[layer]

    return fx


@pytest.mark.parametrize("make", [cached, right_at_first])
def test_only_the_buffer_may_overwrite_its_results(nf4, options, monkeypatch, capsys, make):
    """And bits are those of a later call, too, for a plan may serve that."""
    monkeypatch.setattr(nf4, "timed", lambda *given: 1.0)
    contenders = {name: make({}) for name in nf4.CONTENDERS}
    rows = nf4.race(contenders, DTYPES.values(), rounds=1, options=options)
    working = {"Unsloth, buffer"} if make is cached else set()
    assert {row["contender"] for row in rows} == working
    assert capsys.readouterr().out.count("left out: ") == len(contenders) - len(working)


@pytest.mark.parametrize("n", [0, -1], ids=["the first layer", "the last layer"])
@pytest.mark.parametrize("when", ["at the start", "later", "a spoiled layer"])
def test_a_contender_that_cheats_is_seen(nf4, options, monkeypatch, n, when):
    """Left out where its bits are wrong at the start; an error where they are later."""
    built, build, is_timed = [], nf4.build, []

    def build_and_keep(*given):
        built.append(build(*given))
        return built[-1]

    def fx(layer):
        out = right(layer)
        is_its_turn = layer is [each for _, mlp in built for each in mlp.layers()][n]
        if is_its_turn and bool(is_timed) == (when != "at the start"):
            if when == "a spoiled layer":
                layer.weight.data.zero_()
            else:
                out[-1, -1] += 1
        return out

    def timed(X, mlp, fx, loops):
        is_timed.append(fx)
        return 1.0

    monkeypatch.setattr(nf4, "build", build_and_keep)
    monkeypatch.setattr(nf4, "timed", timed)
    run = lambda: nf4.race(  # noqa: E731
        {"ours": right, "another": fx}, DTYPES.values(), rounds=1, loops=1, options=options
    )
    if when == "at the start":
        assert {row["contender"] for row in run()} == {"ours"}
    else:
        with pytest.raises(ValueError, match="changed a layer, or gave wrong bits later"):
            run()


def test_jobs_take_turns_in_another_order_each_time(nf4):
    """Though `build` seeds Python's own generator. Each job's results are its own."""
    orders = []
    for _ in range(2):
        random.seed(0)
        ran = []
        jobs = {i: lambda i=i: ran.append(i) or -i for i in range(12)}
        assert nf4.interleaved(jobs, rounds=2) == {i: [-i, -i] for i in range(12)}
        orders += [ran[:12], ran[12:]]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len(set(map(tuple, orders))) == 4


def race_rows(**us):
    """Return rows of a race with these microseconds in fp16, and twice as many in bf16."""
    rows = []
    for contender, (first, second, third) in us.items():
        for shape, each in zip(MIX, (first, second, third)):
            row = {"contender": contender, "shape": shape}
            rows.append(row | {"dtype": "fp16", "us": each})
            rows.append(row | {"dtype": "bf16", "us": 2 * each})
            rows.append(row | {"dtype": "mix", "us": each if MIX[shape] == "fp16" else 2 * each})
    return rows


def test_a_speedup_is_their_time_over_ours(nf4):
    rows = race_rows(ours=(10, 10, 20), Unsloth=(15, 20, 45))
    assert nf4.speedups(rows, "us", "sum") == [
        {"over": "Unsloth", "fp16": 80 / 40, "bf16": 160 / 80, "mix": 145 / 70},
    ]


def test_a_table_keeps_the_order_of_its_rows(nf4):
    table = nf4.pivot(race_rows(ours=(1, 2, 3), another=(4, 5, 6)), "contender", "shape", "us")
    assert list(table.columns) == ["contender", *MIX] and list(table["contender"]) == [
        "ours",
        "another",
    ]
    assert table["1024 x 4096"].tolist() == pytest.approx([10 / 3, 25 / 3])


# All bits


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


def test_each_path_is_what_its_name_says(planned):
    nf4, layer = planned.nf4, planned.made()
    given = layer.weight, layer.quant_state
    launch = mock.Mock(wraps=nf4.launch)
    planned.patch.setattr(nf4, "launch", launch)
    with pytest.raises(ValueError, match="expected a plan .* got none"):
        nf4.by_plan(*given)
    for n in (1, 2):
        planned.assert_right(nf4.by_kernel_grid(*given), layer)
        assert launch.call_count == n and planned.n_by_operator == 0
    for n in (1, 2):
        planned.assert_right(nf4.by_first_call(*given), layer)
        assert planned.n_by_operator == n, "no plan was there before"
    planned.assert_right(nf4.by_plan(*given), layer)
    assert planned.n_by_operator == 2, "no operator ran"
    with pytest.raises(ValueError, match="expected bitsandbytes to do the work, got a plan"):
        nf4.by_fallback(*given)
    layer = planned.made(shape=(3, 5))
    planned.assert_right(nf4.by_fallback(layer.weight, layer.quant_state), layer)


BLOCKS = "blocks of 32 to 4096, nested and plain absmax"
PAIRS = "16 nibbles x 256 absmax, with tiny and huge scales"
FLAT = "a weight that is passed as [1, n]"


THREE = set(helpers.DTYPES)


def test_no_case_is_forgotten(nf4, device):
    found = {}
    for name, *case in nf4.cases(device):
        found.setdefault(name, []).append(case)
    assert len(found) == 6
    for made in found.values():
        assert {state.dtype for _, state in made} == THREE
    assert all(len(weight) == 1 for weight, _ in found[FLAT])
    assert {s.offset.dtype for _, s in found["an offset in fp16 or bf16"]} == set(DTYPES.values())
    for _, state in found["shapes whose last program is not whole"]:
        assert state.shape.numel() % (nf4.WORDS * 8) > 0
    every = set(itertools.product(THREE, helpers.BLOCKSIZES, (True, False)))
    assert {(s.dtype, s.blocksize, s.nested) for _, s in found[BLOCKS]} == every


def test_on_a_gpu_the_cases_are_the_challenges_shapes(nf4, monkeypatch):
    """With extreme scales, and with three state2.absmax for each block size."""
    shapes, factors = set(), set()

    def quantized(shape, dtype, device, blocksize=64, nested=True):
        shapes.add((shape, dtype, blocksize))
        return made

    def every_combination(dtype, device, factor):
        factors.add((dtype, factor))
        return made

    made = nf4.quantized((64, 64), torch.float16, "cpu")
    monkeypatch.setattr(nf4, "quantized", quantized)
    monkeypatch.setattr(nf4, "every_combination", every_combination)
    list(nf4.cases("cuda"))
    assert {(shape, dtype, 64) for shape in nf4.SHAPES for dtype in THREE} <= shapes
    assert factors == {(dtype, factor) for dtype in THREE for factor in (1, 1e-38, 1e-30, 1e30)}
    for blocksize in nf4.BLOCKSIZES:
        assert ((blocksize // 8 + 1, 4096), torch.float16, blocksize) in shapes


def test_cases_show_what_the_kernel_refuses(nf4, device):
    """In size, in address, by gaps, or by an offset in fp64; each in all dtypes."""
    found = {"size": set(), "address": set(), "gaps": set(), "offset": set()}
    for _, weight, state in nf4.cases_for_bitsandbytes(device):
        oddities = {
            "size": state.shape.numel() % 8 > 0,
            "address": weight.data_ptr() % 4 > 0,
            "gaps": not weight.is_contiguous(),
            "offset": state.offset.dtype == torch.float64,
        }
        assert any(oddities.values())
        for name in oddities:
            found[name] |= {state.dtype} if oddities[name] else set()
    assert all(dtypes == THREE for dtypes in found.values()), found


def test_every_nibble_meets_every_absmax_and_extreme_scales(nf4, device):
    n_zeros = n_infinite = 0
    for name, weight, state in nf4.cases(device):
        if name == PAIRS:
            rows = zip(state.absmax.tolist(), weight.view(256, -1).tolist())
            seen = [(absmax, byte >> 4, byte & 15) for absmax, row in rows for byte in row]
            assert len({(absmax, high) for absmax, high, _ in seen}) == 16 * 256
            assert len({(absmax, low) for absmax, _, low in seen}) == 16 * 256
            out = nf4.spec(weight, state)
            n_zeros = max(n_zeros, int((out == 0).sum()))
            n_infinite = max(n_infinite, int(out.isinf().sum()))
    assert n_zeros > 256 * 64 // 2
    # No case overflows on a CPU, because Triton's interpreter warns of it.
    assert n_infinite > 256 * 64 // 2 if device == "cuda" else n_infinite == 0


def test_bits_are_compared_where_values_are_equal_or_no_numbers(nf4):
    x = torch.tensor([0.0, torch.nan, 1.0, 1.0], dtype=torch.float16)
    y = torch.tensor([-0.0, torch.nan, 1.0, 1.0009765625], dtype=torch.float16)
    assert nf4.bits_differing(x, y) == 2 and nf4.bits_differing(x, x.clone()) == 0
    assert nf4.bits_differing(x.float(), y.float()) == 2
    for other in (y[:3], y.float(), y.view(2, 2)):
        with pytest.raises(AssertionError):
            nf4.bits_differing(x, other)


# The compiled kernel, and the kernel alone


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


def test_a_kernels_time_is_a_median_of_replays(nf4, monkeypatch):
    """Else a slow CPU would make it longer."""
    do_bench, graph, job = mock.Mock(return_value=1.5), mock.Mock(), mock.Mock()
    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    clock = nf4.gpu_clock(job)
    assert clock() == clock() == 1.5 and job.call_count == 1, "captured once"
    assert do_bench.call_args.args == (graph.replay,)
    assert do_bench.call_args.kwargs["return_mode"] == "median"


@pytest.mark.parametrize("wrong", ["nobody", "Unsloth", "ours"])
def test_kernel_times_are_medians_in_microseconds(nf4, device, capsys, wrong):
    """Who has wrong bits is left out."""

    def contender(name):
        return lambda layer: seen.append(name) or right(layer) * (2 if wrong == name else 1)

    def milliseconds(job):
        """Other ones in each round."""
        seen.clear()
        result = job()
        name = seen[0] if seen else "copy"
        if name == "copy":
            assert result.nbytes + job.args[0].nbytes == 1024 // 2 + 1024 // 64 + 2 * 1024
        n = rounds[name] = rounds.get(name, -1) + 1
        return {"ours": (1, 2, 6), "Unsloth": (3, 4, 5), "copy": (7, 8, 9)}[name][n % 3] / 1000

    seen, rounds = [], {}
    contenders = {name: contender(name) for name in ("ours", "Unsloth")}
    clock = lambda job: partial(milliseconds, job)  # noqa: E731
    rows = nf4.time_kernels(contenders, [(64, 16)], DTYPES.values(), clock, device, rounds=3)
    us = {"ours": 2, "Unsloth": 4, "copy": 8}
    us.pop(wrong, None)
    n_left_out = capsys.readouterr().out.count(f"left out: {wrong}: ")
    assert n_left_out == (0 if wrong == "nobody" else len(DTYPES))
    same = {"shape": "64 x 16", "weights": 1024}
    assert rows == [
        same | {"kernel": kernel, "dtype": dtype, "us": pytest.approx(each)}
        for dtype in DTYPES
        for kernel, each in us.items()
    ]


def kernel_rows():
    """Return rows as of time_kernels: bf16 takes twice as long; 8192 x 4096 is no challenge's."""
    us = {"ours": 10.0, "Unsloth": 20.0, "copy": 5.0}
    weights = {"2048 x 8192": 16_777_216, "1024 x 4096": 4_194_304, "4096 x 14336": 58_720_256}
    rows = []
    for factor, dtype in ((1, "fp16"), (2, "bf16")):
        for i, shape in enumerate(MIX):
            same = {"shape": shape, "dtype": dtype, "weights": weights[shape]}
            rows += [same | {"kernel": name, "us": (i + 1) * factor * us[name]} for name in us]
    other = {"shape": "8192 x 4096", "dtype": "fp16", "weights": 33_554_432}
    return rows + [other | {"kernel": name, "us": us[name]} for name in us]


def test_the_plot_shows_gigabytes_per_second(nf4):
    axes = nf4.plot_bandwidth({"kernels": kernel_rows(), "gpu": "Some GPU"})
    lines = {line.get_label(): line.get_xydata() for line in axes.get_lines()[:3]}
    # By weights: 4,194,304 in 20 µs, 16,777,216 in 10, 33,554,432 in 10, 58,720,256 in 30 of ours;
    # 2.515625 bytes a weight
    ours = [527.5648, 4220.5184, 8441.0368, 4923.938133]
    for name, factor in {"ours": 1, "Unsloth": 1 / 2, "copy": 2}.items():
        weights, gb_per_s = lines[name].T.tolist()
        assert weights == [4_194_304, 16_777_216, 33_554_432, 58_720_256]
        assert gb_per_s == pytest.approx([factor * rate for rate in ours])


def test_each_kernel_of_a_call_is_told(nf4, monkeypatch):
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


def test_bytes_beyond_the_output_are_told(nf4):
    """Those that were freed again count, too."""
    allocated = [100]

    def call():
        allocated[0] += 64 + 7
        return torch.ones(16)

    assert nf4.bytes_of_call(call, lambda: allocated[0]) == (64, 7)


# Where the time goes, and the estimate


def known_parts(nf4, *left_out):
    """Return the parts of a race for kernel_rows: a call's CPU time is 100 µs times its rank."""
    rows = []
    for contender in set(RANKS) - set(left_out):
        factor = 1 if contender in OUR_KERNEL else 2
        factor *= 2.765625 / 2.515625 if contender in ("three launches", "PEFT") else 1
        for shape, ours_us in zip(MIX, (10, 40, 60)):
            us = factor * ours_us + 100 * RANKS[contender]
            rows.append({"dtype": "mix", "contender": contender, "shape": shape, "us": us})
            rows.append({"dtype": "fp16", "contender": contender, "shape": shape, "us": 1e9})
    return nf4.parts(kernel_rows(), rows)


RANKS = {"ours": 1, "floor": 0.5, "Triton's launcher": 1.5, "kernel[grid]": 2.5}
OUR_KERNEL = tuple(RANKS)
RANKS |= {"Unsloth": 3, "Unsloth, buffer": 2, "three launches": 4, "PEFT": 5}


def test_the_chart_has_a_bar_for_each_contender(nf4):
    axes = nf4.plot_parts({"parts": known_parts(nf4), "gpu": "Some GPU"})
    labels = [each.get_text() for each in axes.get_yticklabels()]
    order = ["PEFT", "three launches", "Unsloth", "kernel[grid]", "Unsloth, buffer"]
    order += ["Triton's launcher", "ours", "floor"]
    assert labels == order and axes.yaxis_inverted()
    cpu, kernel = axes.containers
    assert [bar.get_width() for bar in cpu] == pytest.approx([100 * RANKS[name] for name in order])
    kernel_us = [110 / 3 if name in OUR_KERNEL else 220 / 3 for name in order]
    kernel_us[:2] = 2 * [220 / 3 * 2.765625 / 2.515625]  # these were not timed
    assert [bar.get_width() for bar in kernel] == pytest.approx(kernel_us)
    assert [bar.get_x() for bar in kernel] == pytest.approx([100 * RANKS[name] for name in order])


ESTIMATE = [  # worked out by hand: published_s, share, factor, ours, over Unsloth
    (3.714, 1.0, 0.266397, 2.745690, 3.225206 / 2.745690),
    (3.714, 0.9, 0.181367, 2.947600, 3.274062 / 2.947600),
    (3.714, 0.8, 0.075080, 3.199988, 3.335132 / 3.199988),
    (4.116, 1.0, 0.378064, 2.846190, 3.526706 / 2.846190),
    (4.116, 0.9, 0.293034, 3.048100, 3.575562 / 3.048100),
    (4.116, 0.8, 0.186747, 3.300488, 3.636632 / 3.300488),
]


def test_the_estimate_for_a_t4_is_the_formula_of_the_page(nf4):
    """9000 calls for 3000 times 79,691,776 weights; CPU times of 100, 300 and 400 µs a call."""
    rows = nf4.estimate_t4(known_parts(nf4))
    for row, expected in zip(rows, ESTIMATE, strict=True):
        names = ("published_s", "share", "factor", "ours_s", "over Unsloth")
        assert [row[name] for name in names] == pytest.approx(expected, abs=1e-6)
        assert row["over three launches"] == pytest.approx(expected[0] / expected[3])
    assert rows[0]["over Unsloth, buffer"] == pytest.approx(1.087321)
    # PEFT's calls take 100 µs of CPU time more than the three launches', 9000 x factor of them.
    assert rows[0]["over PEFT"] == pytest.approx((3.714 + 0.9 * 0.266397) / 2.745690, abs=1e-5)
    [slower] = [row for row in nf4.estimate_t4(known_parts(nf4), 1.05) if row["share"] == 0.8][:1]
    ours_s = rows[2]["ours_s"] + 0.05 * 3.132418
    assert slower["ours_s"] == pytest.approx(ours_s, abs=1e-5)
    over_triton = (ours_s + 0.45 * 0.075080) / ours_s  # 50 µs more of CPU time, the same kernel
    assert slower["over Triton's launcher"] == pytest.approx(over_triton, abs=1e-5)


def test_the_estimate_says_what_is_reached_and_what_5_percent_do(nf4, monkeypatch, capsys):
    monkeypatch.setattr(nf4, "display", mock.Mock())
    parts = known_parts(nf4)
    record = {"parts": parts, "estimate": nf4.estimate_t4(parts), "gpu": "Some GPU"}
    nf4.show_estimate(record)
    said = capsys.readouterr().out
    # 1.1746, 1.1108, 1.0422, 1.2391, 1.1730, 1.1018
    assert "of these 6 rows 5 reach 1.05, 5 reach 1.10, 3 reach 1.15." in said
    # 5 % of the bytes' 2.506 s at full speed, and of their 3.132 s at 80 %
    more = f"{3.335132 / 3.356609:.2f} to {3.526706 / 2.971486:.2f}"
    less = f"{3.335132 / 3.043367:.2f} to {3.526706 / 2.720894:.2f}"
    assert f"5% more time there than Unsloth's, the speedups would be {more}." in said
    assert f"5% less time there than Unsloth's, the speedups would be {less}." in said


@pytest.mark.parametrize("contender", ["Unsloth", "three launches", "Unsloth, buffer", "floor"])
def test_a_left_out_contender_ends_no_cell(nf4, monkeypatch, capsys, contender):
    monkeypatch.setattr(nf4, "display", mock.Mock())
    parts = known_parts(nf4, contender)
    record = {"parts": parts, "estimate": nf4.estimate_t4(parts), "gpu": "Some GPU"}
    nf4.plot_parts(record)
    nf4.show_estimate(record)
    is_needed = contender in ("Unsloth", "three launches")
    assert ("There is no estimate" in capsys.readouterr().out) == is_needed
    assert not any(f"over {contender}" in row for row in record["estimate"])


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


def test_whether_ours_ran_in_a_compiled_function_is_told(planned, mlps):
    """By the kinds that have a plan then: two shapes. bitsandbytes leaves none."""
    nf4 = planned.nf4
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
    assert reset.called


def break_the_graph(layer):
    torch._dynamo.graph_break()
    return right(layer)


def depend_on_the_layer(layer):
    return right(layer) * getattr(layer, "factor", 1)


@pytest.mark.parametrize("fx", [break_the_graph, depend_on_the_layer])
def test_a_graph_break_or_a_recompilation_raises(nf4, mlps, fx):
    mlps[1].up_proj.factor = 2
    with pytest.raises(RuntimeError, match="graph_break|recompil"):
        nf4.compare_compiled(fx, mlps)
