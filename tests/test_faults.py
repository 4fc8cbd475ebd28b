"""Protects the tests: a fault that is put into the code must make one of them fail.

    .venv/bin/python -m pytest tests -m faults -n 2         all faults
    .venv/bin/python -m pytest tests -m faults -k FMA       those with this word in their name

A fault is seen if a test fails. An error of a fixture, a fault that cannot run (a name or an
attribute that is missing, a wrong type), a crash and the time limit do not count. A row quotes the
code. Where the code was edited, the row's test fails and shows the quoted text: write there what
the code says now. A fault that no test sees needs a test.
"""

import json
import multiprocessing
import os
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch

LIMIT_S = 180
PAGE = "nf4_triton.ipynb"
Fault = namedtuple("Fault", ("name", "text", "replacement", "tests"))  # tests: as for pytest's -k
# {(the file that gets the faults, the file of tests that must see them): rows of Fault}
ROWS = {
    (PAGE, "test_kernel.py"): [
        ("a byte's low nibble first", "4 * (tl.arange(0, 8) ^ 1)", "4 * tl.arange(0, 8)",
         "pages_cases"),
        ("a weight too many is written", "mask=index < n_valid", "mask=index <= n_valid",
         "byte_beyond"),
        ("words beyond the end are read", "tl.load(word_ptr, mask=is_valid, other=0,",
         "tl.load(word_ptr,", "byte_beyond"),
        ("absmax is read beyond its end", "tl.load(absmax_ptr + block, mask=is_valid, other=0)",
         "tl.load(absmax_ptr + block)", "byte_beyond"),
        ("an FMA", "scale = _mul_rn(code2, absmax2) + offset",
         "scale = (code2.to(tl.float64) * absmax2 + offset).to(tl.float32)",
         "pages_cases"),
        ("state2.blocksize is 256", "block // BLOCKSIZE2\n", "block // 256\n",
         "nested_blocks"),
        ("never transposed", "if len(shape) == 2 and weight", "if False and weight",
         "pages_cases"),
        ("bitsandbytes reads gaps", "    return tensor.contiguous()", "    return tensor",
         "pages_cases"),
        ("bitsandbytes' output is a view",
         "flat.new_empty(0).set_(flat.untyped_storage(), 0, *output_form(weight, kind))",
         "flat.as_strided(*output_form(weight, kind))", "trained_with"),
        ("bitsandbytes' counter may overflow", "if n_weights >= 2**31:", "if False:",
         "is_not_asked"),
    ],
    (PAGE, "test_call.py"): [
        ("a plan on the current GPU", "if current_gpu != gpu:\n                    _cuda_ex",
         "if False:\n                    _cuda_ex", "another_gpu"),
        ("an output is not fresh", "out = _empty_strided_cuda(shape, strides, dtype)",
         "out = vars(plan).setdefault(0, _empty_strided_cuda(shape, strides, dtype))", "is_fresh"),
        ("32 bits of n_weights", '+ "l" + "OO"', '+ "i" + "OO"', "is_fresh"),
        ("no guard", "if not are_alike(*inputs):", "if False:", "changed_field"),
        ("the first stream", "addresses, _cuda_getCurrentRawStream(gpu))", "addresses, 0)",
         "current_stream"),
        ("a plan at an odd address", "if addresses[i] % 4:", "if False:", "changed_field"),
        ("a plan refers to itself", "        return out\n\n    return plan",
         "        return out\n\n    plan.itself = plan\n    return plan", "collector"),
        ("a mode for functions is asked", "with DisableTorchFunction():  # Params4bit",
         "if True:  # Params4bit", "asks_no_mode"),
        ("a plan that did not serve is kept", "            out = plan(tensors)\n            if out",
         "            keep(plan, kind)\n            out = plan(tensors)\n            if out",
         "changed_field"),
        ("plans without end", "[:-4096]", "[:0]", "without_end"),
        ("a context on another GPU", "with torch.cuda.device(weight.device):  #", "if True:  #",
         "another_gpu"),
    ],
    (PAGE, "test_trial.py"): [
        ("what torch's launcher drops", "if found != plain:", "if False:", "asks_more"),
        ("its verdict is ignored", "if n_differing == 0:", "if True:", "logged_once"),
        ("two threads make trials", "if not TRYING.acquire(blocking=False):",
         "if TRYING.acquire(blocking=False) and False:", "hindered"),
        ("a launcher lets its kernel go", "    launcher.compiled = compiled  #", "    pass  #",
         "not_unloaded"),
        ("a trial where no one may wait", "if torch.cuda.is_current_stream_capturing() or", "if",
         "hindered"),
        ("what may pass is kept", "            if not may_pass(error):\n                raise\n",
         "            TRIALS[key] = None\n", "hindered"),
        ("a user's error is swallowed", "(torch.AcceleratorError, TimeoutError)", "TimeoutError",
         "own_error"),
        ("a trial on the current stream", "with torch.cuda.stream(torch.cuda.Stream(device)):",
         "if True:", "logged_once"),
        ("a trial in the default dtype", "torch.arange(256, dtype=torch.float32, device=device)",
         "(torch.linspace(0, 255, 256, device=device))", "surroundings"),
        ("the sample: low nibbles do not vary", "nibbles[:, ::2] << 4 | nibbles[:, 1::2]",
         "nibbles[:, ::2] << 4", "kernel_that_is_wrong"),
        ("the sample: whole programs only", "torch.arange(65, dtype=torch.uint8, ",
         "torch.arange(64, dtype=torch.uint8, ", "kernel_that_is_wrong"),
        ("the sample: one state2.absmax", "(1 - 2**-13) / (1 + counts)",
         "(1 - 2**-13) / (1 + 0 * counts)", "kernel_that_is_wrong"),
        ("the sample: linear scales", "code2[0::4] = 1 + 2**-13", "code2[0::4] *= 1",
         "kernel_that_is_wrong"),
        ("the sample: no subnormal product", "code2[1::4] = 2**-126", "code2[1::4] *= 1",
         "kernel_that_is_wrong"),
        ("the sample: the same weight", "bytearray(os.urandom(256))", "bytearray(256)",
         "same_weight"),
        ("one trial for all WORDS", "key = (WORDS, *tried)  #", "key = tried  #", "count_of_words"),
        ("plans survive an edited kernel", "PLANS, TRIALS = {}, {}  #",
         'PLANS = globals().get("PLANS", {})\nTRIALS = globals().get("TRIALS", {})  #',
         "edited_code"),
    ],
    (PAGE, "test_errors.py"): [
        ("state2.absmax of any dtype", '("state2.absmax", absmax2, torch.float32,',
         '("state2.absmax", absmax2, None,', "first_call and absmax2"),
        ("a plan takes freed memory", "if 0 in addresses:", "if False:", "with_a_plan and freed"),
        ("AMD's GPUs get the kernel", "(weight.is_cuda and torch.version.cuda)", "weight.is_cuda",
         "no_amd"),
    ],
    (PAGE, "test_compile.py"): [
        ("modes are passed over", "if _len_torch_dispatch_stack():\n            return None",
         "if False:\n            return None", "constant"),
        ("plans are compiled", "if not torch.compiler.is_dynamo_compiling():", "if True:",
         "share_one"),
        ("a compiled [1, n] is not transposed", "(weight.unsqueeze(-1), *", "(weight.view(-1), *",
         "one_form"),
        ("the operator's body is fixed", "lambda *args: run_operator(*split(*args))",
         "(lambda run: lambda *args: run(*split(*args)))(run_operator)", "follows_edited"),
    ],
    ("nf4_integrations.py", "test_integrations.py"): [
        ("a product finds no plan", "shape = torch.Size(shapeB)", "shape = shapeB",
         "a_product_keeps"),
        ("a product falls back always", "weight = dequantize(B.reshape(1, -1), state)",
         "weight = None", "a_product_keeps"),
        ("ours runs outside a context", "if BITSANDBYTES.is_open and out is None:",
         "if out is None:", "outside_a_context"),
        ("originals do not come back", "if original_of(current) is not current:", "if False:",
         "outside_a_context or loaded_again"),
        ("an unknown product is replaced",
         "if parameters(getattr(ops, PRODUCT, None)) == parameters(make_product(None)):",
         "if True:", "unknown_product"),
        ("a reload forgets contexts", 'if "LOCK" not in globals():', "if True:", "loaded_again"),
        ("what is exported is ours", " or may_outlive_the_context():", ":", "outlives"),
        ("Unsloth gets an argument too many", "[:n_parameters])", ")", "four_arguments"),
    ],
    (PAGE, "test_speed.py"): [
        ("Unsloth is its three launches",
         "return unsloth_kernels.fast_dequantize(layer.weight, layer.weight.quant_state)",
         "return unsloth_kernels._fast_dequantize_ctypes(layer.weight, layer.weight.quant_state)",
         "name_says"),
        ("Unsloth's buffer without one", "weight.quant_state, use_global_buffer=True)\n\n\ndef uns",
         "weight.quant_state, use_global_buffer=False)\n\n\ndef uns", "name_says"),
        ("ours is cached", "def your_dequantize_nf4(layer):",
         "@cache\ndef your_dequantize_nf4(layer):", "name_says or launchers_race"),
        ("results may share their memory", "assert is_fresh or name in into_buffer,",
         "assert True,", "shared_results"),
        ("torch's launcher as Triton's",
         "make_plan(triton_launcher(compiled, kind), tensors, kind)",
         "make_plan(torch_launcher(compiled, kind), tensors, kind)", "launchers_race"),
        ("the floor checks", "stream, form = known_launch(layer)",
         "stream, form = (unpack(layer.weight, layer.weight.quant_state), known_launch(layer))[1]",
         "launchers_race"),
        ("ours is checked against ours",
         "trusted_dequantize = unsloth_dequantize if unsloth_kernels else bnb_dequantize",
         "trusted_dequantize = your_dequantize_nf4", "name_says"),
        ("milliseconds called microseconds", 'n_weights, "us": 1e3 * median(ms)',
         'n_weights, "us": median(ms)', "kernel_times"),
        ("the kernel that is timed is not Unsloth's", '"Unsloth": unsloth_dequantize}',
         '"Unsloth": unsloth_three_launches}', "name_says"),
        ("the least time of a kernel", 'return_mode="median"', 'return_mode="min"', "is_a_median"),
        ("ten loops", "N_LOOPS = 1000", "N_LOOPS = 10", "constants"),
        ("seeds are ignored", "set_seed(option.seed)", "set_seed(0)", "options_seed"),
        ("wider tolerances", "check_stride=True,", "check_stride=True, rtol=5e-3, atol=5e-3,",
         "is_not_timed"),
        ("any block size of state2", 'state.blocksize, state.state2.blocksize) == ("nf4", 64, 256)',
         'state.blocksize, 256) == ("nf4", 64, 256)', "not_the_challenges"),
        ("one weight of three is checked", "zip(mlp.layers(), weights)",
         "zip(mlp.layers()[:1], weights)", "is_not_timed"),
        ("the last option is the time", "elapsed += timed", "elapsed = timed", "seconds"),
        ("Unsloth is always second", 'if run % 2 else ("Unsloth", "ours")',
         'if run % 2 else ("ours", "Unsloth")', "slowing_host"),
        ("fp16 alone", "for dtype in dtypes for option in options}",
         "for dtype in [*dtypes][:1] for option in options}", "race_returns"),
        ("the mix from the wrong dtypes", "if dtype == option.dtype:", "if dtype != option.dtype:",
         "race_returns"),
        ("wrong bits may race", "assert n_differing == 0, f", "assert n_differing >= 0, f",
         "race_returns"),
        ("the first layer alone is compared",
         "for layer, wanted in zip(layers, expected, strict=True):",
         "for layer, wanted in [*zip(layers, expected, strict=True)][:1]:", "turns_wrong"),
        ("bits are not compared again", "< len(right):", "< 0:", "turns_wrong"),
        ("bits are compared at the end alone", "    jobs = {}\n    for (contender",
         "    right = dict(contenders)\n    jobs = {}\n    for (contender",
         "turns_wrong or race_returns"),
        ("all rounds of a job in a row", "            results[job].append(jobs[job]())",
         "            results[job] = results[job] or [jobs[job]() for _ in range(rounds)]",
         "another_order"),
        ("speedups upside down", 'table / table.loc["ours"]', 'table.loc["ours"] / table',
         "over_ours"),
        ("a table's columns are sorted", "values=values, sort=False)", "values=values)",
         "over_ours"),
        ("kernels exchanged", '"Unsloth": ("Unsloth", 1),', '"Unsloth": ("ours", 1),', "chart"),
        ("CPU time with the kernel's", "cpu_us = mean(call_us) - mean(kernel_us)",
         "cpu_us = mean(call_us)", "chart"),
        ("T4 steps shifted", "each >= step for each", "each >= step - 0.05 for each", "5_percent"),
    ],
    (PAGE, "test_evidence.py"): [
        ("the reference is our own output", "expected = reference(weight, state)",
         "expected = next(iter(paths.values()))(weight, state)", "one_wrong_bit"),
        ("plan is the whole function", "out = run_plan(*unpack(weight, state))",
         "out = dequantize_nf4(weight, state)", "each_path"),
        ("the first call finds a plan", "    PLANS.clear()\n    return deq", "    return deq",
         "each_path"),
        ("kernel[grid] twice", "    return out\n\n\ndef by_first_call",
         "    launch(out, tensors, kind)\n    return out\n\n\ndef by_first_call", "each_path"),
        ("the challenge's shapes are not cases", "shapes, factors = SHAPES, (1, 1e-38",
         "shapes, factors = SHAPES[:2], (1, 1e-38", "on_a_gpu_the_cases"),
        ("ten cases", "rows = 2 if device",
         "if blocksize > 64:\n            return\n        rows = 2 if device", "forgotten"),
        ("stores to shared memory pass", '(r"(?:ld|st)\\.shared", 0, 0)', '(r"ld\\.shared", 0, 0)',
         "contradicts"),
        ("equal kernels count once", "return [event.name for event in profiler.events()",
         "return [event.name for event in {e.name: e for e in profiler.events()}.values()",
         "each_kernel_of_a_call"),
        ("plans of other calls count", "    PLANS.clear()\n    results = compiled",
         "    results = compiled", "whether_ours_ran"),
        ("graph breaks pass", "fullgraph=True, backend", "fullgraph=False, backend",
         "recompilation_raises"),
        ("recompilations pass", '("fail_on_recompile")', '("default")', "recompilation_raises"),
        ("aot_eager on a GPU", '"inductor" if mlps', '"aot_eager" if mlps', "inductor"),
        ("no reset before compiling", "    torch._dynamo.reset()\n    counts", "    counts",
         "inductor"),
        ("compiled results are compared with themselves", "zip(results, expected, strict",
         "zip(results, results, strict", "are_counted"),
    ],
    (PAGE, "test_notebook.py"): [
        ("a GPU is overlooked", 'any(Path("/dev").glob("nvidia[0-9]*"))', "False", "pip_gets"),
    ],
    ("tools/record.py", "test_record.py"): [
        ("wrong bits in a rehearsal pass", 'if kind in ("run", "rehearsal"):', 'if kind == "run":',
         "does_not_agree"),
        ("any 4 in a GPU's name is a T4", 'each["gpu"] == "Tesla T4"', '"4" in each["gpu"]',
         "counts_as_one"),
        ("check always succeeds", '                raise SystemExit("\\n".join(found))',
         "                print(found)", "does_not_agree"),
        ("check without the outputs' hash",
         'if notebook.metadata.get("outputs") != outputs_of(notebook):', "if False:",
         "does_not_agree"),
        ("check without tables", "if with_tables(text, tables) != text", "if False",
         "does_not_agree"),
        ("check without the runs' hashes", 'or run.get(SEAL) != digest(text_of(run)):',
         "or False:", "does_not_agree"),
        ("a run's own hash is taken in", "if set(ADDED) & set(run):", "if False:", "with_a_fault"),
        ("no other run is of earlier code",
         'n_earlier = sum(each.get("code") != shared.code_of("run") for each in others)',
         "n_earlier = 0", "earlier_code_are_counted"),
        ("old figures look new", 'if measured.get("code") != shared.code_of(kind):', "if False:",
         "say_so"),
    ],
    ("tools/tally.py", "test_tools.py"): [
        ("errors are no failures", ' + counts.get("error", 0)', "", "errors_as_failures"),
    ],
    ("tools/training.py", "test_tools.py"): [
        ("training times stock twice", "            with contexts[name]():",
         '            with contexts["stock_ms"]():', "equal_work"),
        ("nobody asks whether ours trained", 'if ours.called != (name == "ours_ms"):', "if False:",
         "show_nothing"),
    ],
    ("tools/shared.py", "test_record.py"): [
        ("cells that run do not count", '"run": (("", "-harness", "run"), ()),',
         '"run": (("", "-harness"), ()),', "say_so"),
    ],
    ("tools/shared.py", "test_tools.py"): [
        ("a cell may take a definition's name", "        if taken:\n", "        if False:\n",
         "takes_a_definitions"),
    ],
    ("tools/t4.py", "test_tools.py"): [
        ("a T4 of 80 multiprocessors", "240e9 / 2.515625 / 40", "240e9 / 2.515625 / 80", "busiest"),
        ("FMAs are not counted as such", '"FMUL FADD FFMA IMAD"', '"FMUL FADD IMAD"', "busiest"),
    ],
    (PAGE, "test_sentences.py"): [
        ("a sentence is edited", "ours takes less time than the copy",
         "ours takes more time than the copy", "kernels_times"),
    ],
    ("README.md", "test_notebook.py"): [
        ("README's run is nonsense", ".venv/bin/papermill --cwd", ".venv/bin/papermill --nonsense",
         "run_the_notebook"),
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
    """A plugin of pytest that gathers the tests that failed, unless the fault could not run."""

    CRASHES = (NameError, AttributeError, TypeError)

    def __init__(self):
        self.tests = []

    def pytest_exception_interact(self, node, call, report):
        could_not_run = "InterpreterError" in report.longreprtext  # Triton's, for the kernel
        is_crash = could_not_run or call.excinfo.errisinstance(self.CRASHES)
        if report.when == "call" and not is_crash:
            self.tests.append(node.nodeid)


def run_tests(repository, file, expression):
    """Run the tests of a copy in this process; write how they ended to ended.json there."""
    torch.set_num_threads(1)  # a test that forks would wait for ever for threads of OpenMP
    os.chdir(repository)
    with open("output.txt", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    failed = Failed()
    how = ["-q", "-x", "--disable-warnings", "-k", expression]
    # Without what takes a second each time: other packages' plugins, and a collection of garbage.
    how += ["--disable-plugin-autoload", "-p", "no:unraisableexception", "-p", "no:cacheprovider"]
    status = pytest.main([str(repository / "tests" / file), *how], [failed])
    Path("ended.json").write_text(json.dumps([int(status), failed.tests]))


def ending(repository, file, expression):
    """Return (pytest's exit status, the tests that failed, its output) of a copy's tests."""
    process = FORKS.Process(target=run_tests, args=(repository, file, expression))
    process.start()
    process.join(LIMIT_S)
    process.kill()
    process.join()
    output = (repository / "output.txt").read_text()
    if not (repository / "ended.json").exists():
        pytest.fail(f"{file} did not end within {LIMIT_S} s, or crashed:\n{output[-3000:]}")
    return (*json.loads((repository / "ended.json").read_text()), output)


def put_in(path, fault):
    """Replace the fault's text, which must stand once in the file (of a notebook: in its cells)."""
    text = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4) if path.suffix == ".ipynb" else None
    holders = notebook.cells if notebook else [SimpleNamespace(source=text)]
    n_found = sum(each.source.count(fault.text) for each in holders)
    if n_found != 1:
        found = f"{n_found} times in {path.name}, expected once"
        pytest.fail(f"the row {fault.name!r} quotes a text that stands {found}:\n{fault.text}")
    for each in holders:
        each.source = each.source.replace(fault.text, fault.replacement)
    path.write_text(nbformat.writes(notebook) if notebook else holders[0].source, encoding="utf-8")


@pytest.mark.parametrize("code, tests, fault", FAULTS, ids=NAMES)
def test_a_fault_is_seen(repository, code, tests, fault):
    put_in(repository / code, fault)
    status, failed, output = ending(repository, tests, fault.tests)
    assert status != 5, f"{fault.tests!r} selects no test of {tests}"
    assert status != 0, f"no test of {tests} sees it:\n{output[-3000:]}"
    assert failed, f"no test failed; a set-up, the kernel or the fault did:\n{output[-3000:]}"


UNFIT = {  # {a row that shows nothing: what is said of it}
    Fault("gone", "a text that stands nowhere", "", "constants"): "0 times in nf4_triton",
    Fault("no test", "N_LOOPS = 1000", "N_LOOPS = 10", "no_such_test"): "selects no test",
    Fault("no set-up", "import itertools\n", "import itertoolz\n", "chart"): "no test failed",
    Fault("crash", "elapsed += timed(", "elapsed += timer(", "seconds"): "no test failed",
    Fault("unseen", "N_LOOPS = 1000", "N_LOOPS = 10", "chart"): "no test of test_speed.py sees it",
}


@pytest.mark.parametrize("fault", UNFIT, ids=lambda fault: fault.name)
def test_a_row_that_shows_nothing_says_so(repository, fault):
    with pytest.raises((AssertionError, pytest.fail.Exception), match=UNFIT[fault]):
        test_a_fault_is_seen(repository, PAGE, "test_speed.py", fault)


@pytest.mark.parametrize("tests", sorted({tests for _, tests, _ in FAULTS}))
def test_without_a_fault_the_same_tests_pass(repository, tests):
    """README's commands, which take a minute, are skipped here: the plain run has them."""
    found = [fault for code, file, fault in FAULTS if file == tests and code != "README.md"]
    expressions = dict.fromkeys(fault.tests for fault in found)
    status, failed, output = ending(repository, tests, " or ".join(expressions))
    assert status == 0, output[-3000:]
