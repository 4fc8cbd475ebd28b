"""Protects the reader from wrong speedups: who is timed, for what, how often, and who is left out.

What the page measures is tested with contenders and clocks whose answer is known. On a GPU the
notebook itself runs the same functions.
"""

import contextlib
import inspect
import random
import types
from functools import partial
from unittest import mock

import helpers
import matplotlib
import pytest
import torch
from bits import right
from helpers import GPU

matplotlib.use("Agg")
N_TOKENS = 2048 if GPU else 20  # for fewer, a GPU multiplies without weights
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
MIX = {"2048 x 8192": "fp16", "1024 x 4096": "bf16", "4096 x 14336": "bf16"}
WIDTHS = (64, 128, 192)  # of the three small layers here


@pytest.fixture
def options(nf4):
    """Three small options, each of another width."""
    small = zip(nf4.OPTIONS, WIDTHS)
    return [option._replace(bsz=1, qlen=N_TOKENS, hd=hd, m=256) for option, hd in small]


# The challenge's test


def default(function, name):
    return inspect.signature(function).parameters[name].default


def test_the_challenges_constants_are_those_that_it_names(nf4):
    fp16, bf16 = DTYPES.values()
    assert nf4.SHAPES == ((2048, 8192), (1024, 4096), (4096, 14336))
    assert nf4.NAME == {fp16: "fp16", bf16: "bf16"}
    assert list(map(tuple, nf4.OPTIONS)) == [  # bsz, qlen, hd, m, seed, dtype
        (2, 3333, 2048, 8192, 3407, fp16),
        (5, 777, 1024, 4096, 3409, bf16),
        (3, 2048, 4096, 14336, 3408, bf16),
    ]
    mlp = nf4.MLP(64, 128)  # its test dequantizes up, gate and down
    assert mlp.layers() == (mlp.up_proj, mlp.gate_proj, mlp.down_proj)
    assert default(nf4.test_dequantize, "options") is default(nf4.race, "options") is nf4.OPTIONS
    assert default(nf4.test_dequantize, "loops") == nf4.N_LOOPS == 1000
    assert default(nf4.test_dequantize, "dtype") is None, "each option in its own dtype"
    # What the page's text says, and of a T4 by what it cites:
    assert (default(nf4.race, "rounds"), default(nf4.race, "loops")) == (50, 100)
    assert default(nf4.time_kernels, "rounds") == 9 and default(nf4.official_runs, "runs") == 5
    assert nf4.COPY_BYTES_PER_S == 240e9 and nf4.PUBLISHED_S == (3.714, 4.116)
    assert nf4.STEPS == (1.05, 1.10, 1.15)
    assert nf4.BYTES_PER_WEIGHT == 2.515625 and nf4.SPLIT_BYTES_PER_WEIGHT == 2.765625


def test_layers_come_from_the_options_seed(nf4, options):
    built = nf4.build(options[0], torch.float16)
    again = nf4.build(options[0], torch.float16)
    other = nf4.build(options[0]._replace(seed=1), torch.float16)
    (x, mlp), (x_again, mlp_again), (x_other, mlp_other) = built, again, other
    assert torch.equal(x, x_again) and not torch.equal(x, x_other), "X depends on the seed"
    weight, weight_again = mlp.up_proj.weight, mlp_again.up_proj.weight
    assert torch.equal(weight, weight_again), "the same seed must give the same weights"
    assert not torch.equal(weight, mlp_other.up_proj.weight), "another seed must give others"


OTHER_FIELDS = {"quant_type": "fp4", "blocksize": 128, "state2.blocksize": 128}
OTHER_FIELDS |= {"dtype": torch.float32, "absmax": torch.ones(1)}
for table in ("code", "offset", "state2.absmax", "state2.code"):
    OTHER_FIELDS[table] = torch.ones(1, dtype=torch.float16)


@pytest.mark.parametrize("field", OTHER_FIELDS)
def test_a_layer_that_is_not_the_challenges_is_refused(nf4, field):
    layer = nf4.MLP(64, 128).up_proj
    nf4.assert_correct_bnb(layer, torch.float16)
    helpers.replace_field(layer.weight.quant_state, field, lambda old: OTHER_FIELDS[field])
    with pytest.raises(AssertionError):
        nf4.assert_correct_bnb(layer, torch.float16)


def test_each_dequantization_is_timed_and_waited_for(nf4, monkeypatch):
    seen, times = [], [7.0, 5.0]

    def fx(layer):
        seen.append(layer)
        return torch.ones(2, 3)

    def perf_counter():
        seen.append("clock")
        return times.pop()

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    monkeypatch.setattr(nf4, "time", types.SimpleNamespace(perf_counter=perf_counter))
    mlp = types.SimpleNamespace(layers=lambda: ("up", "gate", "down"))
    on_gpu = types.SimpleNamespace(is_cuda=True)
    assert nf4.timed(on_gpu, mlp, fx, loops=2) == 2.0, "seconds between the clock's two times"
    loop = ["up", "wait", "gate", "wait", "down", "wait"]
    assert seen == ["wait", "clock", *loop, *loop, "clock"], "a wait after each dequantization"
    kept = [tuple(out.shape) for out in nf4.mlp_dequantize(on_gpu, mlp, fx)]
    assert kept == [(3, 2), (3, 2), (3, 2)], "the challenge keeps all three results of a loop"


@pytest.mark.parametrize("dtype", [None, *DTYPES.values()], ids=["mix", *DTYPES])
def test_the_tests_seconds_are_those_of_all_options(nf4, options, monkeypatch, dtype):
    seen = []

    def timed(X, mlp, fx, loops):
        assert fx is right and loops == 7
        seen.append((X.shape[-1], X.dtype, mlp.up_proj.weight.quant_state.dtype))
        return 10.0 ** len(seen)

    monkeypatch.setattr(nf4, "timed", timed)
    seconds = nf4.test_dequantize(right, dtype, loops=7, options=options)
    assert seconds == 10.0 + 100.0 + 1000.0, "those of all three options"
    dtypes = [dtype or option.dtype for option in options]
    assert seen == [(width, each, each) for width, each in zip(WIDTHS, dtypes)], "in these dtypes"


def that_zeroes_the_layer(layer):
    """With the weight, this contender spoils what it is compared with."""
    layer.weight.quant_state.absmax.zero_()
    layer.weight.quant_state.offset.zero_()
    layer.weight.quant_state.state2.code.zero_()
    return right(layer)


def of_0_point_1_percent_more(layer):
    return right(layer) * 1.001


def whose_third_weight_has_other_strides(layer):
    is_third = layer.out_features < layer.in_features
    return right(layer).t().contiguous().t() if is_third else right(layer)


def must_not_be_timed(*given):
    pytest.fail("it was timed, although its weights are wrong")


WRONG_CONTENDERS = [
    that_zeroes_the_layer,
    of_0_point_1_percent_more,
    whose_third_weight_has_other_strides,
]


@pytest.mark.parametrize("contender", WRONG_CONTENDERS)
def test_a_contender_with_wrong_weights_is_not_timed(nf4, options, monkeypatch, contender):
    monkeypatch.setattr(nf4, "timed", must_not_be_timed)
    with pytest.raises(AssertionError):
        nf4.test_dequantize(contender, loops=1, options=options)


def test_a_slowing_host_favours_nobody_in_the_official_runs(nf4):
    """Each run takes a second longer; the first run of a dtype is not counted."""
    ran, layers = [], nf4.MLP(64, 128).layers()

    def test(fx, dtype=None):
        ran.append((fx, dtype))
        return float(len(ran))

    ours, unsloth = mock.Mock(wraps=right), mock.Mock(wraps=right)
    contenders = {"Unsloth": unsloth, "ours": ours}
    rows = nf4.official_runs(contenders, {"fp16": torch.float16, "mix": None}, layers, test)
    order = (ours, ours, unsloth, unsloth, ours, ours, unsloth, unsloth, ours, ours, unsloth)
    wanted = [(fx, dtype) for dtype in (torch.float16, None) for fx in order]
    assert ran == wanted, "from pair to pair another one is first"
    for name, seconds in {"ours": [2, 5, 6, 9, 10], "Unsloth": [3, 4, 7, 8, 11]}.items():
        found = [row for row in rows if (row["contender"], row["dtype"]) == (name, "fp16")]
        assert [(row["run"], row["seconds"]) for row in found] == list(enumerate(seconds, 1))
    found = nf4.speedups(rows, "seconds", "median")
    assert found == [{"over": "Unsloth", "fp16": 7 / 6, "mix": 18 / 17}]


def test_no_official_run_is_reported_without_right_bits(nf4, capsys):
    contenders = {"ours": right, "Unsloth": lambda layer: right(layer) + 1}
    layers = nf4.MLP(64, 128).layers()
    rows = nf4.official_runs(contenders, {"mix": None}, layers, must_not_be_timed)
    assert rows == nf4.speedups(rows, "seconds", "median") == []
    assert "left out: Unsloth: " in capsys.readouterr().out


# Who races


def test_each_contender_is_what_its_name_says(nf4, monkeypatch):
    """By a stand-in for Unsloth's module; each of its functions returns its name and arguments."""
    functions = {
        name: lambda *given, _name=name, **how: (_name, given, how)
        for name in ("fast_dequantize", "_fast_dequantize_ctypes")
    }
    monkeypatch.setattr(nf4, "unsloth_kernels", types.SimpleNamespace(**functions))
    layer = mock.Mock()
    layer.weight.quant_state = "its state"
    given, found = (layer.weight, "its state"), {}
    for name in ("Unsloth", "Unsloth, buffer", "three launches"):
        found[name] = nf4.CONTENDERS[name](layer)
    assert found == {
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
        for _ in range(2):
            assert nf4.CONTENDERS["ours"](layer) is ours["dequantize_nf4"].return_value
            assert nf4.CONTENDERS["kernel[grid]"](layer) is ours["by_kernel_grid"].return_value
    for each in ours.values():
        assert each.mock_calls == 2 * [mock.call(*given)], "each call must do its work"


def test_the_launchers_race_without_checks_or_with_tritons_own(calls, monkeypatch):
    nf4, layer = calls.nf4, calls.nf4.MLP(64, 128).up_proj
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


def keeping(kept):
    """A contender that makes each result once."""
    return lambda layer: kept.setdefault(layer, right(layer))


def right_at_first(kept):
    def fx(layer):
        kept[layer] = kept.get(layer, -1) + 1
        return right(layer) + kept[layer]

    return fx


def test_contenders_with_wrong_or_shared_results_are_left_out(nf4, capsys):
    layers = nf4.MLP(64, 128).layers()
    contenders = {
        "right": right,
        "wrong in the first layer": lambda layer: right(layer) + (layer is layers[0]),
        "wrong in the last layer": lambda layer: right(layer) + (layer is layers[2]),
        "right at its first call": right_at_first({}),  # a later one may have a plan
        "keeps its results": keeping({}),
        "a buffer": keeping({}),
    }
    expected = list(map(right, layers))
    found = nf4.with_right_bits(contenders, layers, expected, into_buffer=["a buffer"])
    assert list(found) == ["right", "a buffer"], "only these may race"
    said = capsys.readouterr().out
    assert all(f"left out: {name}: " in said for name in set(contenders) - set(found))


# The race


def test_the_race_returns_median_microseconds_of_a_call(nf4, options, monkeypatch, capsys):
    """Not those of a loop, which makes three calls, and not the best or the worst round."""
    fxs = {"ours": right, "Unsloth": nf4.bnb_dequantize, "Unsloth, buffer": keeping({})}
    rounds = {"ours": (2, 3, 3, 4, 1), "Unsloth": (4, 5, 90, 5, 1), "Unsloth, buffer": (7,) * 5}
    rounds = {fxs[name]: us for name, us in rounds.items()}
    n_rounds = {}

    def timed(X, mlp, fx, loops):
        assert mlp.up_proj.weight.quant_state.dtype == X.dtype and loops == 100
        assert fx in rounds, "PEFT has wrong bits here, and must not race"
        job = (fx, X.dtype, X.shape[-1])
        n = n_rounds[job] = n_rounds.get(job, 0) + 1
        us = rounds[fx][n % 5] * X.shape[-1] * (10 if X.dtype == torch.bfloat16 else 1)
        return 1e-6 * us * 3 * loops

    monkeypatch.setattr(nf4, "timed", timed)
    contenders = fxs | {"PEFT": lambda layer: 1.01 * right(layer)}
    rows = nf4.race(contenders, DTYPES.values(), options=options)
    found = {(row["dtype"], row["contender"], row["shape"]): row["us"] for row in rows}
    assert len(rows) == len(found) == 3 * 3 * 3
    for name, us in {"ours": 3, "Unsloth": 5, "Unsloth, buffer": 7}.items():
        for i, width in enumerate(WIDTHS):
            shape = f"{width} x 256"
            assert found["fp16", name, shape] == pytest.approx(us * width)
            assert found["bf16", name, shape] == pytest.approx(10 * us * width)
            is_fp16 = options[i].dtype == torch.float16
            assert found["mix", name, shape] == found["fp16" if is_fp16 else "bf16", name, shape]
    assert len(n_rounds) == 3 * 2 * 3, "each contender in each dtype and shape"
    assert set(n_rounds.values()) == {50}, "as often as the page says"
    assert "left out: PEFT: " in capsys.readouterr().out


@pytest.mark.parametrize("n", [0, -1], ids=["the first layer", "the last layer"])
@pytest.mark.parametrize("spoils_the_layer", [False, True])
def test_a_contender_that_turns_wrong_ends_the_race(nf4, options, monkeypatch, n, spoils_the_layer):
    """By wrong bits once it is timed, or by a layer that it has changed."""
    layers, build, is_timed = [], nf4.build, []

    def build_and_note(*given):
        X, mlp = build(*given)
        layers.extend(mlp.layers())
        return X, mlp

    def turning_wrong(layer):
        out = right(layer)
        if is_timed and layer is layers[n]:
            spoilt = layer.weight.data if spoils_the_layer else out[-1, -1:]
            spoilt += 1
        return out

    def timed(X, mlp, fx, loops):
        is_timed.append(fx)
        return 1.0

    monkeypatch.setattr(nf4, "build", build_and_note)
    monkeypatch.setattr(nf4, "timed", timed)
    contenders = {"ours": right, "another": turning_wrong}
    with pytest.raises(ValueError, match="changed a layer, or gave wrong bits later"):
        nf4.race(contenders, DTYPES.values(), rounds=1, loops=1, options=options)


def test_jobs_take_turns_in_another_order_each_time(nf4):
    """Though `build` seeds Python's own generator. Each job's results are its own."""
    orders = []
    for _ in range(2):
        random.seed(0)
        ran = []
        jobs = {i: lambda i=i: ran.append(i) or -i for i in range(12)}
        assert nf4.interleaved(jobs, rounds=2) == {i: [-i, -i] for i in range(12)}
        orders += [ran[:12], ran[12:]]
    assert all(sorted(order) == list(range(12)) for order in orders), "each job once a round"
    assert len(set(map(tuple, orders))) == 4, "in a new order each round"


def test_a_speedup_is_their_time_over_ours(nf4):
    """And a table keeps the order of its rows."""
    us = {"ours": {"wide": 10, "long": 20}, "Unsloth": {"wide": 15, "long": 45}}
    rows = [
        {"contender": contender, "dtype": "mix", "shape": shape, "us": us[contender][shape]}
        for contender in us
        for shape in ("wide", "long")
    ]
    found = nf4.speedups(rows, "us", "sum")
    assert found == [{"over": "Unsloth", "mix": 60 / 30}], "their sum over ours"
    table = nf4.pivot(rows, "contender", "shape", "us")
    assert list(table) == ["contender", "wide", "long"]
    assert table.values.tolist() == [["ours", 10, 20], ["Unsloth", 15, 45]]


# The kernel alone


def test_a_kernels_time_is_a_median_of_replays(nf4, monkeypatch):
    """Else a slow CPU would make it longer."""
    do_bench, graph, job = mock.Mock(return_value=1.5), mock.Mock(), mock.Mock()
    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    clock = nf4.gpu_clock(job)
    assert clock() == clock() == 1.5 and job.call_count == 1, "captured once"
    assert do_bench.call_args.args == (graph.replay,), "the graph is timed, and not the job"
    assert do_bench.call_args.kwargs["return_mode"] == "median"


def test_kernel_times_are_medians_in_microseconds(nf4, device, capsys):
    """Who has wrong bits is left out."""
    called = []

    def ours(layer):
        called.append("ours")
        return right(layer)

    def milliseconds(job, turns):
        """Run the job, as the clock does; other contenders take other times, in each turn."""
        called.clear()
        result = job()
        if not called:
            moved = result.nbytes + job.args[0].nbytes  # read and written
            assert moved == 1024 // 2 + 1024 // 64 + 2 * 1024, "as many bytes as the kernels"
        return (1e-3 if called else 1e-2) * next(turns)

    clock = lambda job: partial(milliseconds, job, iter((1, 6, 2)))  # noqa: E731
    contenders = {"ours": ours, "Unsloth": lambda layer: 2 * right(layer)}
    rows = nf4.time_kernels(contenders, [(64, 16)], DTYPES.values(), clock, device, rounds=3)
    assert "left out: Unsloth: " in capsys.readouterr().out
    us = {"ours": pytest.approx(2), "copy": pytest.approx(20)}
    assert rows == [
        {"kernel": kernel, "shape": "64 x 16", "dtype": dtype, "weights": 1024, "us": us[kernel]}
        for dtype in DTYPES
        for kernel in us
    ]


# Where the time goes, and the estimate


def kernel_rows():
    """Return rows as of time_kernels: bf16 takes twice as long."""
    us, same = {"ours": 10.0, "Unsloth": 20.0, "copy": 5.0}, {"weights": 4_194_304}
    return [
        same | {"shape": shape, "dtype": dtype, "kernel": name, "us": (i + 1) * factor * us[name]}
        for factor, dtype in ((1, "fp16"), (2, "bf16"))
        for i, shape in enumerate(MIX)
        for name in us
    ]


OUR_KERNEL = {"ours": 100, "floor": 50, "Triton's launcher": 150, "kernel[grid]": 250}
CPU_US = OUR_KERNEL | {"Unsloth": 300, "Unsloth, buffer": 200, "three launches": 400, "PEFT": 500}
SPLIT = 2.765625 / 2.515625  # of the bytes, where scales are written and read again


def known_parts(nf4, *left_out):
    """Return the parts of a race in which calls take the kernel's time and CPU_US."""
    rows = []
    for contender in set(CPU_US) - set(left_out):
        factor = 1 if contender in OUR_KERNEL else 2
        factor *= SPLIT if contender in ("three launches", "PEFT") else 1
        for shape, ours_us in zip(MIX, (10, 40, 60)):
            same = {"contender": contender, "shape": shape}
            rows.append(same | {"dtype": "mix", "us": factor * ours_us + CPU_US[contender]})
            rows.append(same | {"dtype": "fp16", "us": 1e9})
    return nf4.parts(kernel_rows(), rows)


def test_the_chart_has_a_bar_for_each_contender(nf4):
    axes = nf4.plot_parts({"parts": known_parts(nf4), "gpu": "Some GPU"})
    labels = [each.get_text() for each in axes.get_yticklabels()]
    order = ["PEFT", "three launches", "Unsloth", "kernel[grid]", "Unsloth, buffer"]
    order += ["Triton's launcher", "ours", "floor"]
    assert labels == order and axes.yaxis_inverted()
    cpu, kernel = axes.containers
    assert [bar.get_width() for bar in cpu] == pytest.approx([CPU_US[name] for name in order])
    assert [bar.get_x() for bar in kernel] == pytest.approx([CPU_US[name] for name in order])
    kernel_us = [110 / 3 if name in OUR_KERNEL else 220 / 3 for name in order]
    kernel_us[:2] = 2 * [220 / 3 * SPLIT]  # these were not timed
    assert [bar.get_width() for bar in kernel] == pytest.approx(kernel_us)


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
    slower = nf4.estimate_t4(known_parts(nf4), 1.05)[2]
    ours_s = rows[2]["ours_s"] + 0.05 * 3.132418
    assert slower["ours_s"] == pytest.approx(ours_s, abs=1e-5)
    over_triton = (ours_s + 0.45 * 0.075080) / ours_s  # 50 µs more of CPU time, the same kernel
    assert slower["over Triton's launcher"] == pytest.approx(over_triton, abs=1e-5)


def show_last_cells(nf4, monkeypatch, parts):
    monkeypatch.setattr(nf4, "display", mock.Mock())
    record = {"parts": parts, "estimate": nf4.estimate_t4(parts), "gpu": "Some GPU"}
    nf4.plot_bandwidth(record | {"kernels": kernel_rows()})
    nf4.plot_parts(record)
    nf4.show_estimate(record)
    return record["estimate"]


def test_the_estimate_says_what_is_reached_and_what_5_percent_do(nf4, monkeypatch, capsys):
    show_last_cells(nf4, monkeypatch, known_parts(nf4))
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
    estimate = show_last_cells(nf4, monkeypatch, known_parts(nf4, contender))
    is_needed = contender in ("Unsloth", "three launches")
    assert ("There is no estimate" in capsys.readouterr().out) == is_needed
    assert not any(f"over {contender}" in row for row in estimate)
