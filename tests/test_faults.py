"""Protects the tests: a fault that is put into the code must make one of them fail.

    .venv/bin/python -m pytest tests -m faults -n 2         all faults
    .venv/bin/python -m pytest tests -m faults -k FMA       those with this word in their name

A fault is seen if a test fails; an error in a fixture or in Triton's interpreter, a crash and the
time limit do not count. A row quotes the code. Where the code was edited, the row's test fails and
says what it quotes: write there what the code says now. A fault that no test sees needs a test.
"""

import json
import multiprocessing
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 180
Fault = namedtuple("Fault", ("name", "text", "replacement", "tests"))  # tests: as for pytest's -k
PAGE = "nf4_triton.ipynb"
BITS = "each_weight or any_tensor"  # the tests of test_kernel.py that compare weights

# {(the file that gets the faults, the file of tests that must see them): rows of Fault}
ROWS = {
    (PAGE, "test_kernel.py"): [
        ("a byte's low nibble first", "4 * (tl.arange(0, 8) ^ 1)", "4 * tl.arange(0, 8)", BITS),
        ("quarter segments", "$2, 0x101f", "$2, 0x1007", BITS),
        ("a byte too many is read", "byte_index * 2 < n_valid",
         "byte_index * 2 <= n_valid", "touched_beyond"),
        ("a weight too many is written", "mask=index < n_valid",
         "mask=index <= n_valid", "nothing_is_written"),
        ("an FMA", "scale = _mul_rn(code2, absmax2) + offset",
         "scale = (code2.to(tl.float64) * absmax2 + offset).to(tl.float32)", BITS),
        ("a NaN becomes a number", "tl.where(x == x, nearest, 0x7FFF0000)", "nearest", BITS),
        ("a digit of NF4", "0.1609302", "0.1609303", BITS),
        ("state2.blocksize is 256", "blocksize2 = state2.blocksize", "blocksize2 = 256", BITS),
        ("never transposed", "is_row = weight.shape", "is_row = False and weight.shape", BITS),
        ("absmax is read beyond its end", "tl.load(absmax_ptr + block, mask=in_range, other=0)",
         "tl.load(absmax_ptr + block)", "touched_beyond"),
        ("gaps are read", "torch.uint8 or not weight.is_contiguous():", "torch.uint8:", BITS),
    ],
    (PAGE, "test_call.py"): [
        ("a plan on the current GPU", "if previous_gpu != gpu:\n            api.ex",
         "if False:\n            api.ex", "another_gpu"),
        ("an output is not fresh", "    def plan(tensors)",
         "    allocate = functools.cache(allocate)\n\n    def plan(tensors)", "is_fresh"),
        ("an old kernel's plan", " or kernel is not _dequantize_nf4_kernel:", ":", "edited"),
        ("no guard", "if not are_alike(*inputs):", "if False:", "a_change"),
        ("a gradient", '"Autograd", torch', '"AutogradXPU", torch', "a_change"),
        ("the first stream", "current_stream(gpu))", "0)", "stream"),
        ("a trial where no one may wait", "if torch.cuda.is_current_stream_capturing() or",
         "if", "hindered or must_not_wait"),
        ("one table for two", "if len(set(map(id, inputs))) < len(inputs):",
         "if False:", "a_change"),
        ("what torch's launcher drops", "if any(unusual):", "if False:", "drops"),
        ("no trial", "= trial(compiled, kind, device)", "= True", "trial or bits"),
        ("the trial's output is right before", "stream = private().",
         "by_torch.copy_(expected)\n        stream = private().", "other_bits"),
        ("a plan refers to itself", "        return fresh\n\n    return plan",
         "        return fresh\n\n    plan.itself = plan\n    return plan", "collector"),
        ("the shuffle is compared with itself", "kind, shuffle=False)\n    relaunch",
         "kind)\n    relaunch", "broken_shuffles"),
        ("an untried kernel serves a call", "            launch(out, tensors, kind, shuffle=False)",
         "            pass", "must_not_wait"),
        ("a trial without memory is the last", "    except CUDA_ERRORS:\n        return False",
         "    except ZeroDivisionError:\n        return False", "hindered"),
    ],
    (PAGE, "test_errors.py"): [
        ("memory that is too short", "if held < n_bytes:", "if False:", "refused_in_words"),
        ("state2.absmax of any length", "absmax2, torch.float32, cdiv(n_blocks, blocksize2)",
         "absmax2, torch.float32, absmax2.numel()", "fake_tensors and absmax2"),
        ("an odd address", "if dtype and address % itemsize:", "if False:", "in_words and byte"),
        ("a plan takes an odd address", "if addresses[i] % itemsize:",
         "if False:", "after_a_plan and byte"),
        ("a plan takes freed memory", "if 0 in addresses:", "if False:", "after_a_plan and freed"),
        ("a leftover state2 counts", "if state.nested:  # as",
         "if state.state2 is not None:  # as", "whether_it_is_nested"),
    ],
    (PAGE, "test_compile.py"): [
        ("modes are passed over", "if n_modes() or", "if", "constant or dispatch"),
        ("plans are compiled", "if not torch.compiler.is_dynamo_compiling():",
         "if True:", "share_one"),
        ("symbolic sizes have a hash", "except TypeError:  # the",
         "except KeyError:  # the", "symbolic or tracers or fake"),
        ("a compiled [1, n] is not transposed", "(weight.unsqueeze(-1), *",
         "(weight.view(-1), *", "1_by_n"),
        ("the fake body is fixed", "lambda *given: run_fake(*given)",
         "run_fake", "fake_body or edit"),
    ],
    ("nf4_integrations.py", "test_integrations.py"): [
        ("absmax and offset exchanged", "state.nested = absmax_8bit, absmax_offset, True",
         "state.nested = absmax_offset, absmax_8bit, True", "many_tokens"),
        ("a product in another dtype", "quant_type, A.dtype)",
         "quant_type, torch.float32)", "many_tokens"),
        ("state2 in blocks of 128", "absmax_code, 256, None",
         "absmax_code, 128, None", "many_tokens"),
        ("no output is filled", "if BITSANDBYTES.is_open and out is None:",
         "if BITSANDBYTES.is_open:", "silence or refuses"),
        ("ours runs outside a context", "if BITSANDBYTES.is_open and out is None:",
         "if out is None:", "outside_every"),
        ("contexts begin without the lock", "with LOCK:\n                if",
         "if True:\n                if", "another_leaves"),
        ("contexts end without the lock", "with LOCK:\n                self",
         "if True:\n                self", "another_leaves"),
        ("originals do not come back", "if original_of(current) is not current:",
         "if False:", "last_context"),
        ("an unknown product is replaced", "    if is_known:", "    if True:", "unknown_product"),
        ("a fork keeps lost contexts", "after_in_child=end_contexts_of_lost_threads",
         "after_in_child=LOCK.release", "fork_while"),
        ("a fork ends every context", "if thread == own}", "if False}", "forked_within"),
        ("compiled code runs what is broken",
         "if is_working(weight.device, state.dtype, blocksize, state.nested):",
         "if True:", "compiled_code_is_stocks"),
        ("only plain weights are tried", 'blocksize, nested, "nf4")',
         '64, False, "nf4")', "compiled_code_is_stocks"),
        ("compiled code reads gaps", " or not table.is_contiguous()",
         "", "compiled_dequantization"),
        ("what is exported is ours", " or torch.compiler.is_exporting() or torch.jit.is_tracing()",
         "", "outlives"),
        ("what is exported strictly is ours", "BROKEN or torch.compiler.is_exporting():",
         "BROKEN:", "outlives"),
        ("another name", "@functools.wraps(original)\n    def dequantize_4bit",
         "def dequantize_4bit", "pickled"),
    ],
    (PAGE, "test_claims.py"): [
        # The comparison of all bits
        ("the reference is our own output", "expected = reference(weight, state)",
         "expected = next(iter(paths.values()))(weight, state)", "one_wrong_bit"),
        ("a tensor is compared with itself", "bits_differing(out, expected)})",
         "bits_differing(out, out)})", "one_wrong_bit"),
        ("weights are counted twice", '"path": path, "weights": out.numel()',
         '"path": path, "weights": 2 * out.numel()', "one_wrong_bit"),
        ("the reference may be a path", "reference in paths.values() or ", "", "compare_nothing"),
        ("values are compared, not bits", "(x.view(integer) != y.view(integer))",
         "(x != y)", "bits_are"),
        ("no weight is [1, n]", "weight.view(1, -1), state", "weight, state", "forgotten"),
        # The compiled kernel, and the kernel alone
        ("missing shuffles pass", "if not least <= count <= most:",
         "if count > most:", "contradicts"),
        ("an FMA in the PTX passes", '(r"\\bfma\\.rn", 0, 0)',
         '(r"\\bfma\\.rn", 0, math.inf)', "contradicts"),
        ("milliseconds called microseconds", "name: 1e3 * median(ms)",
         "name: median(ms)", "medians"),
        ("Unsloth's wrong bits are timed", "theirs()) > 0", "theirs()) > 1e9", "unsloths_kernel"),
        ("a copy of half as many bytes", "torch.empty(n_moved // 2",
         "torch.empty(n_moved // 4", "medians"),
        ("the profiler ends before the GPU", "torch.cuda.synchronize()\n    extra",
         "pass\n    extra", "beyond_the_output"),
        # The challenge's test
        ("another shape", "(2048, 8192), (1024, 4096)", "(2048, 2048), (1024, 4096)", "constants"),
        ("ten loops", "loops=1000", "loops=10", "constants"),
        ("wider tolerances", "check_stride=True,",
         "check_stride=True, rtol=5e-3, atol=5e-3,", "differ_are_refused"),
        ("one round of checks", "for _ in range(2):", "for _ in range(1):", "checked_twice"),
        ("one weight of three is checked", "zip(mlp.layers(), weights)",
         "zip(mlp.layers()[:1], weights)", "checked_twice"),
        ("the last option is the time", "elapsed += timed", "elapsed = timed", "add_up"),
        ("the asked dtype is ignored", "dtype or option.dtype", "option.dtype", "add_up"),
        ("no wait before the clock", "if X.is_cuda:\n        torch",
         "if False:\n        torch", "clock_starts"),
        ("a result is dropped", "results.append(fx(layer).t())",
         "results = [fx(layer).t()]", "clock_starts"),
        ("no wait for a dequantization", "if X.is_cuda:\n            torch",
         "if False:\n            torch", "clock_starts"),
        ("Unsloth is always second", '("ours", "Unsloth", "Unsloth", "ours")',
         '("ours", "Unsloth", "ours", "Unsloth")', "drift"),
        ("the best speedup of two", 'sum(row["seconds"]) for row',
         '(min if row["contender"] == "ours" else max)(row["seconds"]) for row', "drift"),
        # The race
        ("a race of one round and one loop", "rounds=50, loops=100",
         "rounds=1, loops=1", "race_returns or constants"),
        ("layers in another dtype than the column", "build(option, dtype) for dtype",
         "build(option, option.dtype) for dtype", "race_returns"),
        ("three calls called one", "1e6 * each / 3", "1e6 * each", "race_returns"),
        ("the best round for ours, the worst for others", "[median(seconds[",
         '[(min if contender == "ours" else max)(seconds[', "race_returns"),
        ("wrong bits may race", "differing == 0, f", "differing >= 0, f", "race_returns"),
        ("bits are not compared again", 'if set(again) != {"bitsandbytes", *working}:',
         "if False:", "cheats"),
        ("nobody asks whether a layer changed", '{"bitsandbytes": bnb_dequantize}',
         '{"bitsandbytes": lambda layer: expected[layers.index(layer)]}', "cheats"),
        ("one order for all rounds", "order.sample(list(jobs), len(jobs))",
         "list(jobs)", "another_order"),
        ("speedups upside down", 'sum(us[contender]) / sum(us["ours"])',
         'sum(us["ours"]) / sum(us[contender])', "divides"),
        # The chart, the estimate, torch.compile, and cells that run on a GPU only
        ("kernels exchanged", 'for name in ("ours_us", "unsloth_us"))',
         'for name in ("unsloth_us", "ours_us"))', "cpu_time"),
        ("CPU time with the kernel's", "mean(call_us[contender]) - us",
         "mean(call_us[contender])", "cpu_time"),
        ("bars exchanged", "(each, found[each][1], found[each][0])",
         "(each, *found[each])", "chart"),
        ("always compiled", 'counts["ok"] == counts["total"] > 0', "True", "not_compiled"),
        ("counts of an earlier function", "counts.clear()", "counts.copy()", "not_compiled"),
        ("graph breaks pass", "fullgraph=True, backend", "fullgraph=False, backend",
         "recompilation_raises"),
        ("recompilations pass", '("fail_on_recompile")', '("default")', "recompilation_raises"),
        ("a GPU's cell computes", "    plot_parts(RECORD)",
         "    plot_parts(RECORD)\n    faster = min(RECORD['race'][0]['us'])", "gpu_only"),
    ],
    (PAGE, "test_notebook.py"): [
        ("no driver is asked", "    driver.cuDeviceGetCount(ctypes.byref(n_gpus))",
         "    pass", "pip_gets"),
        ("pre-releases do not count", "prereleases=True", "prereleases=False", "pip_gets"),
        ("pip's success is not asked", "if not all(installed",
         "if False and not all(installed", "restart"),
        ("a V100 is refused", "capability < (7, 0)", "capability <= (7, 0)", "is_used"),
    ],
    ("README.md", "test_notebook.py"): [
        ("README's tests are only collected", "-m pytest tests -n 2",
         "-m pytest tests -n 2 --collect-only", "fail_if_a_test"),
        ("README's run is nonsense", ".venv/bin/papermill --cwd",
         ".venv/bin/papermill --nonsense", "top_to_bottom"),
    ],
}  # fmt: skip
FAULTS = [(*group, Fault(*row)) for group, rows in ROWS.items() for row in rows]
NAMES = [fault.name for _, _, fault in FAULTS]
if len(set(NAMES)) < len(NAMES):
    raise ValueError(f"used twice: {sorted({name for name in NAMES if NAMES.count(name) > 1})}")

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(torch.cuda.is_available(), reason="faults are put in on a CPU"),
]
# The tests run in forks of a process that has imported what takes long, and has no threads.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    "bitsandbytes hypothesis matplotlib.pyplot nbformat pandas peft pytest torch._dynamo triton "
    "transformers.activations IPython.display".split()
)


class Failed:
    """A plugin of pytest that gathers the tests that failed, and not those that met an error."""

    def __init__(self):
        self.tests = []

    def pytest_runtest_logreport(self, report):
        is_crash = "InterpreterError" in report.longreprtext  # Triton could not run the kernel
        if report.when == "call" and report.failed and not is_crash:
            self.tests.append(report.nodeid)


def run_tests(clone, file, expression):
    """Run the tests of a clone in this process; write how they ended to ended.json there."""
    torch.set_num_threads(1)  # a test that forks would wait for ever for threads of OpenMP
    os.chdir(clone)
    with open("output.txt", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    failed = Failed()
    how = ["-q", "-x", "--disable-warnings", "-k", expression]
    # Without what takes a second each time: other packages' plugins, and a collection of garbage.
    how += ["--disable-plugin-autoload", "-p", "no:unraisableexception", "-p", "no:cacheprovider"]
    status = pytest.main([str(clone / "tests" / file), *how], [failed])
    Path("ended.json").write_text(json.dumps([int(status), failed.tests]))


def ending(clone, file, expression):
    """Return (pytest's exit status, the tests that failed, its output) of a clone's tests."""
    process = FORKS.Process(target=run_tests, args=(clone, file, expression))
    process.start()
    process.join(LIMIT_S)
    process.kill()
    process.join()
    output = (clone / "output.txt").read_text()
    if not (clone / "ended.json").exists():
        pytest.fail(f"{file} did not end within {LIMIT_S} s, or crashed:\n{output[-3000:]}")
    return (*json.loads((clone / "ended.json").read_text()), output)


@pytest.fixture
def clone(tmp_path):
    """A copy of the repository."""
    ignored = shutil.ignore_patterns(".*", "run", "nf4_triton.py")
    return shutil.copytree(ROOT, tmp_path / "clone", ignore=ignored)


def put_in(path, fault):
    """Replace the fault's text, which must stand once in the file (of a notebook: in its code)."""
    if path.suffix == ".ipynb":
        notebook = json.loads(path.read_text(encoding="utf-8"))
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    else:
        cells = [{"source": [path.read_text(encoding="utf-8")]}]
    sources = ["".join(cell["source"]) for cell in cells]
    n_found = sum(source.count(fault.text) for source in sources)
    if n_found != 1:
        found = f"{n_found} times in the code of {path.name}, expected once"
        pytest.fail(f"the row {fault.name!r} quotes a text that stands {found}:\n{fault.text}")
    changed = [source.replace(fault.text, fault.replacement) for source in sources]
    if path.suffix == ".ipynb":
        for cell, source in zip(cells, changed):
            cell["source"] = source
        path.write_text(json.dumps(notebook), encoding="utf-8")
    else:
        path.write_text(changed[0], encoding="utf-8")


@pytest.mark.parametrize("code, tests, fault", FAULTS, ids=NAMES)
def test_a_fault_is_seen(clone, code, tests, fault):
    put_in(clone / code, fault)
    status, failed, output = ending(clone, tests, fault.tests)
    assert status == 1 and failed, f"no test of {tests} sees it:\n{output[-3000:]}"


@pytest.mark.parametrize("tests", sorted({tests for _, tests, _ in FAULTS}))
def test_without_a_fault_the_same_tests_pass(clone, tests):
    """Those of README's commands, which take a minute, are left to the run without faults."""
    found = [fault for code, file, fault in FAULTS if file == tests and code != "README.md"]
    expressions = dict.fromkeys(fault.tests for fault in found)
    status, failed, output = ending(clone, tests, " or ".join(expressions))
    assert status == 0, output[-3000:]
