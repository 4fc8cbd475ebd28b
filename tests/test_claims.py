"""Protects the reader: what the page says of itself is tested with inputs whose answer is known.

Each function that counts, times, divides or draws gets stand-ins here: spoiled paths, known times,
contenders that turn wrong. On a GPU the notebook itself runs the same functions, and its cells
assert what they find.
"""

import ast
import contextlib
import inspect
import random
import re
import types
import weakref
from unittest import mock

import matplotlib
import pytest
import shared
import torch
from bitsandbytes.functional import dequantize_4bit

matplotlib.use("Agg")
N_TOKENS = 2048 if torch.cuda.is_available() else 20  # for fewer, a GPU multiplies without weights
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
WIDTHS = (64, 128, 192)  # of the three small layers here
SHAPES = {"2048 x 8192": 16_777_216, "1024 x 4096": 4_194_304, "4096 x 14336": 58_720_256}


@pytest.fixture
def options(nf4):
    """Three small options, each of another width."""
    small = zip(nf4.OPTIONS, WIDTHS)
    return [option._replace(bsz=1, qlen=N_TOKENS, hd=hd, m=256) for option, hd in small]


@pytest.fixture
def shown(nf4, monkeypatch):
    """The tables that were displayed, each as a list of lines, with the caption first."""
    tables = []

    def display(markdown):
        caption, _, header, _, *rows = markdown.data.splitlines()
        rows = [re.sub(r" *\| *", " | ", row).strip(" |") for row in (header, *rows)]
        tables.append([caption.strip("*"), *rows])

    monkeypatch.setattr(nf4, "display", display)
    return tables


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
    assert nf4.COPY_BYTES_PER_S == 240e9 and nf4.PUBLISHED_S == (3.714, 4.116)
    assert nf4.BYTES_PER_WEIGHT == 2.515625 and nf4.SPLIT_BYTES_PER_WEIGHT == 2.765625


ONES = torch.ones(2, 2, dtype=torch.float16)
DIFFERENT = {  # {what: (x, y)}; the first three by a little more than torch tolerates
    "0.2 % in fp16": (1.002 * ONES, ONES),
    "2.3 % in bf16": (1.023 * ONES.bfloat16(), ONES.bfloat16()),
    "0.00002 at 0": (0 * ONES + 2e-5, 0 * ONES),
    "a NaN": (ONES.clone().fill_diagonal_(torch.nan), ONES),
    "another dtype": (ONES.float(), ONES),
    "other strides": (ONES, ONES.t()),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_weights_that_differ_are_refused(nf4, what):
    x, y = DIFFERENT[what]
    with pytest.raises(AssertionError, match="^a weight: "):
        nf4.assert_same(x, y, "a weight", y.dtype)


OTHERS = {"quant_type": "fp4", "blocksize": 128, "absmax": torch.ones(1), "dtype": torch.float32}


@pytest.mark.parametrize("field", OTHERS)
def test_a_layer_that_is_not_the_challenges_is_refused(nf4, field):
    layer = nf4.MLP(64, 128).up_proj
    nf4.assert_correct_bnb(layer, torch.float16)
    setattr(layer.weight.quant_state, field, OTHERS[field])
    with pytest.raises(AssertionError):
        nf4.assert_correct_bnb(layer, torch.float16)


def test_the_clock_starts_after_a_wait_and_each_dequantization_is_waited_for(nf4, monkeypatch):
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
def test_each_option_is_checked_twice_and_timed_and_the_seconds_add_up(
    nf4, options, monkeypatch, dtype
):
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
    "the layer is zeroed": zeroing,
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_weights_are_not_timed(nf4, options, monkeypatch, what):
    monkeypatch.setattr(nf4, "timed", pytest.fail)
    with pytest.raises(AssertionError):
        nf4.test_dequantize(WRONG[what], loops=1, options=options)


def test_the_official_runs_meet_a_drift_of_the_host_alike(nf4, shown):
    """The host slows down all the while; the first run of all is not counted."""
    ran = []

    def test(fx, dtype=None):
        ran.append((fx, dtype))
        return float(len(ran))

    contenders = {"Unsloth": "Unsloth", "ours": "ours"}
    rows = nf4.official_runs(contenders, {"fp16": torch.float16}, test)
    order = ("ours", "Unsloth", "Unsloth", "ours")
    assert ran == [("ours", None)] + [(fx, torch.float16) for fx in order]
    assert rows == [
        {"dtype": "fp16", "contender": "ours", "seconds": [2, 5]},
        {"dtype": "fp16", "contender": "Unsloth", "seconds": [3, 4]},
    ]
    rows[1]["seconds"] = [9.5, 4.5]  # 14 s of Unsloth, 7 s of ours
    nf4.show_official({"official": rows, "gpu": "Some GPU"})
    assert shown[0][1:] == [
        "dtype | ours, first, s | ours, last, s | Unsloth, first, s | Unsloth, last, s | speedup",
        "fp16 | 2.000 | 5.000 | 9.500 | 4.500 | 2.000",
    ]


# The race


def test_the_race_returns_median_microseconds_of_a_call_in_the_columns_own_dtype(
    nf4, options, monkeypatch, capsys
):
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
    contenders = {
        "ours": right,
        "Unsloth": nf4.bnb_dequantize,
        "PEFT": lambda layer: 1.01 * right(layer),
    }
    rows = nf4.race(contenders, DTYPES.values(), options=options)
    found = {(row["dtype"], row["contender"]): row["us"] for row in rows}
    assert found == {
        ("fp16", "ours"): pytest.approx([192, 384, 576]),
        ("fp16", "Unsloth"): pytest.approx([320, 640, 960]),
        ("bf16", "ours"): pytest.approx([1920, 3840, 5760]),
        ("bf16", "Unsloth"): pytest.approx([3200, 6400, 9600]),
    }
    assert set(n_rounds.values()) == {50} and len(n_rounds) == 2 * 2 * 3
    assert "left out: PEFT: " in capsys.readouterr().out


@pytest.mark.parametrize("spoils", [False, True], ids=["wrong bits later", "a spoiled layer"])
def test_a_contender_that_cheats_in_the_race_ends_it(nf4, options, spoils):
    kept = {}

    def fx(layer):
        if layer not in kept:
            kept[layer] = right(layer)
        elif spoils:
            layer.weight.data.zero_()
        else:
            return 2 * kept[layer]
        return kept[layer].clone()

    with pytest.raises(ValueError, match="changed a layer, or gave wrong bits later"):
        nf4.race({"ours": fx}, DTYPES.values(), rounds=1, loops=1, options=options)


def test_jobs_run_in_another_order_in_each_round_and_in_each_run(nf4):
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


RACE = [
    {"dtype": "fp16", "contender": "ours", "us": [10.0, 10.0, 10.0]},
    {"dtype": "fp16", "contender": "Unsloth", "us": [15.0, 20.0, 40.0]},
    {"dtype": "bf16", "contender": "ours", "us": [20.0, 20.0, 40.0]},
    {"dtype": "bf16", "contender": "Unsloth", "us": [30.0, 40.0, 50.0]},
]


def test_a_speedup_is_what_a_reader_divides_and_the_mix_has_the_challenges_dtypes(nf4, shown):
    assert nf4.by_dtype(RACE)["mix"] == {"ours": [10, 20, 40], "Unsloth": [15, 40, 50]}
    assert nf4.speedups(RACE) == {
        "ours": {"fp16": 1.0, "bf16": 1.0, "mix": 1.0},
        "Unsloth": {"fp16": 75 / 30, "bf16": 120 / 80, "mix": 105 / 70},
    }
    nf4.show_race({"race": RACE, "gpu": "Some GPU"})
    assert shown[0] == [
        "Speedup of ours over each contender: Some GPU",
        "over | fp16 | bf16 | mix",
        "ours | 1.00 | 1.00 | 1.00",
        "Unsloth | 2.50 | 1.50 | 1.50",
    ]


# All bits


def test_one_wrong_bit_is_counted_for_its_case_and_its_path(nf4, device, shown):
    def wrong(weight, state):
        out = nf4.spec(weight, state)
        if state.shape == (4, 128):
            out[1, 5:6].view(torch.int16).bitwise_xor_(1)
        return out

    shapes = [("square", (8, 64)), ("wide", (4, 128)), ("square", (16, 64))]
    cases = [(name, *nf4.quantized(shape, torch.float16, device)) for name, shape in shapes]
    rows = nf4.compare(cases, {"wrong": wrong, "right": nf4.spec})
    assert rows == [
        {"case": "square", "path": "wrong", "weights": 1536, "differing": 0},
        {"case": "square", "path": "right", "weights": 1536, "differing": 0},
        {"case": "wide", "path": "wrong", "weights": 512, "differing": 1},
        {"case": "wide", "path": "right", "weights": 512, "differing": 0},
    ]
    nf4.show_comparison({"compared": rows, "gpu": "Some GPU"})
    assert shown[0] == [
        "Compared with bitsandbytes: Some GPU",
        "case | weights | right: differ | wrong: differ",
        "square | 1,536 | 0 | 0",
        "wide | 512 | 0 | 1",
    ]


KEPT = torch.zeros(8, 64, dtype=torch.float16)
NOT_COMPARED = {  # {what: (the paths, the reference)}
    "the reference as a path": ([dequantize_4bit], dequantize_4bit),
    "the reference's memory": ([lambda *_: KEPT], lambda *_: KEPT),
    "another path's memory": ([lambda *_: KEPT, lambda *_: KEPT], dequantize_4bit),
    "no weights": ([lambda *_: KEPT[:0]], lambda *_: KEPT[:0]),
}


@pytest.mark.parametrize("what", NOT_COMPARED)
def test_what_would_compare_nothing_is_refused(nf4, what):
    paths, reference = NOT_COMPARED[what]
    case = ("a case", *nf4.quantized(KEPT.shape, KEPT.dtype, "cpu"))
    with pytest.raises(ValueError, match="expected (each path to make an output|weights)"):
        nf4.compare([case], dict(enumerate(paths)), reference)


def test_without_cases_nothing_is_claimed(nf4):
    with pytest.raises(ValueError, match="expected cases to compare"):
        nf4.compare([], {"a path": nf4.spec})


BLOCKS = "blocks of 32 to 4096, nested and plain absmax"
ODD = "the same weights at odd addresses"
FLAT = "the same weights, passed as [1, n]"
PAIRS = "16 nibbles x 256 absmax, with tiny and huge scales"


@pytest.fixture(scope="module")
def found_cases(nf4, device):
    """{name: [(weight, QuantState), ...]} of the page's cases."""
    found = {}
    for name, *case in nf4.cases(device):
        found.setdefault(name, []).append(case)
    return found


def test_no_case_is_forgotten(found_cases):
    assert list(found_cases) == [
        "the challenge's shapes, and ragged ones", FLAT, PAIRS, BLOCKS, ODD
    ]  # fmt: skip
    three = {torch.float16, torch.bfloat16, torch.float32}
    for made in found_cases.values():
        assert {state.dtype for _, state in made} == three
    assert all(len(weight) == 1 for weight, _ in found_cases[FLAT])
    sizes = (32, 64, 128, 256, 512, 1024, 2048, 4096)
    every = {(dtype, size, nested) for dtype in three for size in sizes for nested in (True, False)}
    for name in (BLOCKS, ODD):
        found = {(state.dtype, state.blocksize, state.nested) for _, state in found_cases[name]}
        assert found == every
    assert all(weight.data_ptr() % 2 == 1 for weight, _ in found_cases[ODD])


def test_every_nibble_meets_every_absmax_and_products_underflow_or_overflow(
    nf4, device, found_cases
):
    n_zeros = n_infinite = 0
    for weight, state in found_cases[PAIRS]:
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
    "an FMA": (PTX.replace("mul.rn", "fma.rn"), 0, "FMA.* found 1"),
    "a spill": (PTX, 1, "spilled registers, found 1"),
}


@pytest.mark.parametrize("what", OTHER_PTX)
def test_a_compiled_kernel_that_contradicts_the_page_is_refused(nf4, what):
    assert [row["found"] for row in nf4.evidence(PTX, 0)] == [16, 1, 1, 2, 0, 0, 0]
    ptx, n_spills, named = OTHER_PTX[what]
    with pytest.raises(ValueError, match=named):
        nf4.evidence(ptx, n_spills)


# The kernel alone


def test_kernel_times_are_medians_in_microseconds_of_each_dtype(nf4, device):
    dtypes, rounds, bytes_moved = [], {}, set()

    def unsloth(weight, state, out, use_global_buffer):
        assert out is None and use_global_buffer is True
        return nf4.spec(weight, state)

    def clock(job):
        """Return milliseconds, others in each round."""
        name = {nf4.relaunch: "ours", unsloth: "Unsloth"}.get(job.func, "copy")
        n = rounds[name] = rounds.get(name, -1) + 1
        if name == "ours":
            _, out, (weight, absmax, *_), _ = job.args
            dtypes.append(out.dtype)
            bytes_moved.add(out.nbytes + weight.nbytes + absmax.nbytes)
        if name == "copy":
            bytes_moved.add(job.func.__self__.nbytes + job.args[0].nbytes)
            assert job.func(*job.args) is job.func.__self__
        return {"ours": (1, 2, 6), "Unsloth": (3, 4, 5), "copy": (7, 8, 9)}[name][n % 3] / 1000

    rows = nf4.time_kernels([(16, 64)], DTYPES.values(), unsloth, clock, device, rounds=3)
    same = {"shape": "16 x 64", "weights": 1024}
    us = {"ours_us": 2, "unsloth_us": 4, "copy_us": 8}
    assert rows == [pytest.approx(same | {"dtype": name} | us) for name in DTYPES]
    assert dtypes == [torch.float16] * 3 + [torch.bfloat16] * 3
    assert bytes_moved == {1024 // 2 + 1024 // 64 + 2 * 1024}


def test_unsloths_kernel_is_not_timed_with_wrong_bits(nf4, device):
    def wrong(weight, state, out, use_global_buffer):
        return nf4.spec(weight, state).neg()

    with pytest.raises(ValueError, match="expected the same bits from Unsloth's kernel"):
        nf4.time_kernels([(16, 64)], [torch.float16], wrong, pytest.fail, device)


def kernel_rows():
    """Return rows as of time_kernels: bf16 takes twice as long; 8192 x 4096 is no challenge's."""
    us = {"ours_us": 10.0, "unsloth_us": 20.0, "copy_us": 5.0}
    rows = []
    for factor, dtype in ((1, "fp16"), (2, "bf16")):
        for i, (shape, weights) in enumerate(SHAPES.items()):
            row = {"shape": shape, "dtype": dtype, "weights": weights}
            rows.append(row | {name: (i + 1) * factor * each for name, each in us.items()})
    other = {"shape": "8192 x 4096", "dtype": "fp16", "weights": 33_554_432}
    return [*rows, other | us]


def test_the_table_and_the_plot_of_kernels_show_the_record(nf4, shown):
    record = {"kernels": kernel_rows(), "gpu": "Some GPU"}
    nf4.show_kernels(record)
    assert shown[0][1:3] == [
        "shape | dtype | ours, µs | Unsloth, µs | copy, µs",
        "2048 x 8192 | fp16 | 10.0 | 20.0 | 5.0",
    ]
    assert shown[0][7:] == ["4096 x 14336 | bf16 | 60.0 | 120.0 | 30.0"], "not 8192 x 4096"
    axes = nf4.plot_bandwidth(record)
    lines = {line.get_label(): line.get_xydata() for line in axes.get_lines()[:3]}
    # By weights: 4,194,304 in 20 µs, 16,777,216 in 10, 33,554,432 in 10, 58,720,256 in 30 of ours;
    # 2.515625 bytes a weight
    ours = [527.5648, 4220.5184, 8441.0368, 4923.938133]
    names = {"ours": 1, "Unsloth's kernel": 1 / 2, "a copy of as many bytes": 2}
    for name, factor in names.items():
        weights, gb_per_s = lines[name].T.tolist()
        assert weights == [4_194_304, 16_777_216, 33_554_432, 58_720_256]
        assert gb_per_s == pytest.approx([factor * rate for rate in ours])


def test_kernels_and_bytes_beyond_the_output_are_told(nf4, monkeypatch):
    """The stand-in for the profiler sees what ran until the wait; a helper runs on the CPU."""
    allocated, ran, waited_for, events = [100], [], [], []

    def call():
        allocated[0] += 64 + 7  # an output of 64 bytes, and 7 bytes that were freed again
        for device, name in (("CPU", "a helper"), ("CUDA", "a kernel"), ("CUDA", "a fill")):
            device_type = types.SimpleNamespace(name=device)
            ran.append(types.SimpleNamespace(name=name, device_type=device_type))
        return torch.ones(16)

    @contextlib.contextmanager
    def profile():
        yield types.SimpleNamespace(events=lambda: events)
        events.extend(waited_for)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited_for.extend(ran))
    seen = nf4.observe(call, lambda: allocated[0], profile)
    assert seen == {"kernels": ["a kernel", "a fill"], "output_bytes": 64, "extra_bytes": 7}


# Where the time goes, and the estimate


def known_race():
    """Return rows as of the race for kernel_rows: a call's CPU time is 100 µs times its rank."""
    kernel_us = {"fp16": (10.0, 20.0, 30.0), "bf16": (20.0, 40.0, 60.0)}
    ranks = {"ours": 1, "floor": 0.5, "Unsloth": 3, "Unsloth, buffer": 2, "three launches": 4}
    rows = []
    for dtype, ours_us in kernel_us.items():
        for contender, rank in ranks.items():
            factor = 1 if contender in ("ours", "floor") else 2
            factor *= 2.765625 / 2.515625 if contender == "three launches" else 1
            us = [factor * each + 100 * rank for each in ours_us]
            rows.append({"dtype": dtype, "contender": contender, "us": us})
    return rows


def test_a_call_is_its_kernel_and_cpu_time_over_the_mix(nf4):
    """The mix is the first shape in fp16 and the others in bf16: 10, 40 and 60 µs of ours."""
    ours_us, theirs_us = 110 / 3, 220 / 3
    found = nf4.parts(kernel_rows(), known_race())
    assert found == {
        "ours": pytest.approx((ours_us, 100)),
        "floor": pytest.approx((ours_us, 50)),
        "Unsloth": pytest.approx((theirs_us, 300)),
        "Unsloth, buffer": pytest.approx((theirs_us, 200)),
        "three launches": pytest.approx((theirs_us * 2.765625 / 2.515625, 400)),
    }


def test_the_chart_has_a_bar_for_each_contender_in_the_texts_order(nf4):
    axes = nf4.plot_parts({"kernels": kernel_rows(), "race": known_race(), "gpu": "Some GPU"})
    labels = [each.get_text() for each in axes.get_yticklabels()]
    assert labels == ["Unsloth", "ours", "floor", "Unsloth, buffer"] and axes.yaxis_inverted()
    cpu, kernel = axes.containers
    assert [bar.get_width() for bar in cpu] == pytest.approx([300, 100, 50, 200])
    assert [3 * bar.get_width() for bar in kernel] == pytest.approx([220, 110, 110, 220])
    assert [bar.get_x() for bar in kernel] == pytest.approx([300, 100, 50, 200])
    legend = [each.get_text() for each in axes.get_legend().get_texts()]
    assert legend == ["CPU time", "kernel"]


ESTIMATE = [  # worked out by hand: published_s, share, factor, Unsloth's seconds, ours
    (3.714, 1.0, 0.266397, 3.225206, 2.745690),
    (3.714, 0.9, 0.181367, 3.274062, 2.947600),
    (3.714, 0.8, 0.075080, 3.335132, 3.199988),
    (4.116, 1.0, 0.378064, 3.526706, 2.846190),
    (4.116, 0.9, 0.293034, 3.575562, 3.048100),
    (4.116, 0.8, 0.186747, 3.636632, 3.300488),
]


def test_the_estimate_for_a_t4_is_the_formula_of_the_page(nf4, shown):
    """9000 calls for 3000 times 79,691,776 weights; CPU times of 100, 300 and 400 µs a call."""
    rows = nf4.estimate_t4(kernel_rows(), known_race())
    for row, expected in zip(rows, ESTIMATE, strict=True):
        published_s, _, _, unsloth_s, ours_s = expected
        names = ("published_s", "share", "factor", "unsloth_s", "ours_s")
        assert [row[name] for name in names] == pytest.approx(expected, abs=1e-6)
        assert row["over"]["Unsloth"] == pytest.approx(unsloth_s / ours_s)
        assert row["over"]["three launches"] == pytest.approx(published_s / ours_s)
    assert rows[0]["over"]["Unsloth, buffer"] == pytest.approx(1.087321)
    nf4.show_estimate({"kernels": kernel_rows(), "race": known_race(), "gpu": "Some GPU"})
    columns = "published | speed | factor | Unsloth, s | ours, s | over Unsloth"
    assert shown[0][1] == f"{columns} | over Unsloth, buffer | over three launches"
    assert shown[0][2] == "3.714 s | 100% | 0.27 | 3.23 | 2.75 | 1.17 | 1.09 | 1.35"
    assert len(shown[0]) == 2 + len(ESTIMATE)


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
    results, compiled = nf4.compiled_once(lambda mlp: nf4.dequantize_bits(mlp, right), mlps)
    assert compiled is False and len(results) == 6


def break_the_graph(mlp):
    torch._dynamo.graph_break()
    return [mlp.up_proj.weight + 1]


def depend_on_the_mlp(mlp):
    return [mlp.up_proj.weight * getattr(mlp, "factor", 1)]


@pytest.mark.parametrize("function", [break_the_graph, depend_on_the_mlp])
def test_a_graph_break_or_a_recompilation_raises(nf4, mlps, function):
    mlps[1].factor = 2
    with pytest.raises(RuntimeError, match="graph_break|recompil"):
        nf4.compiled_once(function, mlps)


# The cells that run on a GPU only


LIBRARY_CALLS = """print len partial RuntimeError NAME.items call torch.cuda.get_device_name
torch.cuda.get_device_capability torch.cuda.memory_stats""".split()
STATEMENTS = r"""
RECORD["kernels"] += rows
RECORD["seconds"] = time.monotonic() - BEGAN
path = Path("results") / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower())}.json"
path.parent.mkdir(exist_ok=True)
path.write_text(json.dumps(RECORD, indent=1) + "\n")
"""
ALLOWED = {ast.dump(statement) for statement in ast.parse(STATEMENTS).body}


def nodes_below(node):
    """Yield the node and all below it, except the statements that are allowed."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt) or ast.dump(child) not in ALLOWED:
            yield from nodes_below(child)


def test_what_runs_on_a_gpu_only_calls_and_shows(nf4):
    """Nothing is computed where no CPU can try it. What is called here is tested above."""
    cells = [cell.source for cell in shared.code_cells()]
    cells = [ast.parse(source) for source in cells if not shared.DEFINITION.match(source)]
    nodes = [node for cell in cells for node in ast.walk(cell) if isinstance(node, ast.If)]
    blocks = [node.body for node in nodes if "GPU" in ast.unparse(node.test)]
    assert len(blocks) > 7
    for node in nodes_below(ast.Module([part for body in blocks for part in body], [])):
        is_right = not isinstance(node, (ast.AugAssign, ast.UnaryOp, ast.While))
        if isinstance(node, ast.BinOp):
            is_right = isinstance(node.op, ast.BitOr)  # of two dicts
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            is_ours = getattr(vars(nf4).get(name), "__module__", None) == nf4.__name__
            is_right = is_ours or name in LIBRARY_CALLS
        assert is_right, f"move it to a function: {ast.unparse(node)}"


@pytest.mark.gpu
def test_on_a_gpu_all_contenders_have_right_bits(nf4, options, capsys, monkeypatch):
    monkeypatch.setattr(nf4, "unsloth_kernels", pytest.importorskip("unsloth.kernels.utils"))
    layers = [nf4.MLP(512, 1024).up_proj]
    working = nf4.with_right_bits(nf4.CONTENDERS, layers, list(map(right, layers)))
    nf4.launched.cache_clear()
    assert list(working) == list(nf4.CONTENDERS), capsys.readouterr().out
    monkeypatch.setattr(nf4, "trusted_dequantize", nf4.unsloth_dequantize)
    assert nf4.test_dequantize(nf4.your_dequantize_nf4, loops=3, options=options) > 0
