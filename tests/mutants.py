"""Each fault, put into the notebook, must fail the file of tests that is there for it.

    .venv/bin/python tests/mutants.py            all of them, two at a time
    .venv/bin/python tests/mutants.py "an FMA"   those that are named so

This is the only file of tests that quotes the notebook's code. Where a quotation is not found, or
not once, its row is named: change it here as you changed it there.
"""

import importlib
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest

TESTS = Path(__file__).parent
NOTEBOOK = TESTS.parent / "nf4_triton.ipynb"
BITS = "each_weight"
ROWS = {  # {file: {fault: (text, replacement, which of its tests, to be quick)}}
    "test_kernel.py": {
        "a byte's low nibble first": ("4 * (tl.arange(0, 8) ^ 1)", "4 * tl.arange(0, 8)", BITS),
        "quarter segments": ("$2, 0x101f", "$2, 0x1007", BITS),
        "the last odd byte is unread": ("at * 2 < n_valid", "at * 2 + 1 < n_valid", "nothing_is"),
        "a weight too many": ("mask=index < n_valid", "mask=index <= n_valid", "nothing_is"),
        "an FMA": ("_mul_rn(code2, absmax2) +", "code2.to(tl.float64) * absmax2 +", BITS),
        "a NaN that becomes a number": ("tl.where(x == x, nearest, 0x7FFF0000)", "nearest", BITS),
        "a digit of NF4": ("0.1609302", "0.1609303", BITS),
        "state2.blocksize ignored": ("blocksize2 = state2.blocksize", "blocksize2 = 256", BITS),
        "never transposed": ("(1,) and len(shape) == 2:", "(1,) and False:", BITS),
        "gaps are read": ("torch.uint8 or not weight.is_contiguous():", "torch.uint8:", BITS),
        "a product may be contracted": ("return libdevice.mul_rn(a, b)", "return a * b", "3.9.0"),
    },
    "test_call.py": {
        "the current GPU's": ("if current_gpu() != index:", "if False:", "another_gpu"),
        "kept without its trial": ("            try_start(start", "            str(start", "bits"),
        "not fresh": ("def plan(t", "allocate = functools.cache(allocate)\n    def plan(t", "is_f"),
        "an old kernel's plan": (" or kernel is not _dequantize_nf4_kernel:", ":", "edited"),
        "no guard": ("if not are_alike(*given):", "if False:", "a_change"),
        "odd addresses are read": ("if addresses[i] % itemsize:", "if False:", "a_change"),
        "gradients": ('"Autograd", torch', '"AutogradXPU", torch', "a_change"),
        "the first stream": ("None, None), current_stream(index))", "None, None), 0)", "stream"),
        "a trial in a capture": ("torch.cuda.is_current_stream_capturing() or", "", "forbidden"),
        "one table twice": ("len(set(map(id, present))) < len(present) or", "", "a_change"),
        "another kind's plan": ("= PLANS.get(kind, ())", "= sum(PLANS.values(), [])", "kind"),
        "scratch memory is not given": ("if any(rare):", "if False:", "drops"),
        "kinds without end": ("if len(PLANS) >= 4096:", "if False:", "without_end"),
    },
    "test_errors.py": {
        "freed tables": ("if held < n_bytes:", "if False:", "freed or shrunk or cut"),
    },
    "test_compile.py": {
        "modes are passed over": ("if n_modes() or", "if", "constant or dispatch"),
        "plans are compiled": ("not torch.compiler.is_dynamo_compiling()", "True", "share_one"),
        "sizes without a hash": ("except TypeError:  # a", "except KeyError:  # a", "symbolic"),
        "recompiled": ('set_stance("fail', 'set_stance("default") or ("fail', "section_6"),
    },
    "test_programs.py": {
        "absmax and offset exchanged": (
            "absmax_8bit, absmax_offset, T", "absmax_offset, absmax_8bit, T", "many_tokens"
        ),
        "in another dtype": ("quant_type, A.dtype)", "quant_type, torch.float32)", "many_tokens"),
        "backward left to stock": ('_4bit", ours)', '_4bit", theirs)', "stocks"),
        "forward left to stock": ("(ops, PRIVATE, linear))", "(ops, PRIVATE))", "many_tokens"),
        "contexts are not counted": ("OPEN.pop()", "OPEN.clear()", "puts"),
        "no output is filled": ("if out is None and (", "if (", "refuses"),
        "a refusal is the end": ("except Exception:\n", "except KeyError:\n", "refuses"),
        "a CPU's weight is ours": ("(A.is_cuda and torch.version.cuda)", "True", "on_the_cpu"),
    },
    "test_harness.py": {
        "against itself": ("fx, layers), right))", "fx, layers), map(fx, layers)))", "wrong_bits"),
        "a race without its wait": ("- before\n            wait()", "- before", "waited"),
        "a loop without its wait": ("synchronize()\n    re", "is_available()\n    re", "waited"),
        "upside down": ("= table[who].sum() / t", "= 1 / table[who].sum() * t", "divides"),
        "half a mix": ("set(mix) <= set(us.index)", "set(mix) & set(us.index)", "divides"),
        "a changed layer": ("layers), right)) > 0:", "layers), right)) > 1e9:", "changed"),
    },
    "test_notebook.py": {
        "numpy free to move": ('("torch", "triton", "numpy")', '("torch", "triton")', "pip_gets"),
        "the locale's own words": ('encoding="utf-8", errors="replace"', "text=True", "pip_gets"),
    },
}  # fmt: skip


def mutated(fault, text, replacement, folder):
    """The path of the notebook with the replacement, in a file of its own in the folder."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    count = sum(cell.source.count(text) for cell in cells)
    if count != 1:
        raise SystemExit(f"{fault}: {text!r} must stand once in the code cells, not {count} times")
    for cell in cells:
        cell.source = cell.source.replace(text, replacement)
    path = Path(folder) / f"{fault}.ipynb"
    nbformat.write(notebook, path)
    return path


def run(file, notebook, which):
    """In a fork: its exit status is 0 where all of these tests pass, 1 where one fails."""
    os.environ["NF4_NOTEBOOK"] = str(notebook)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    how = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", which]
    os._exit(pytest.main([str(TESTS / file), *how]))


def complaint(row):
    """None where a row's tests end as they must; a fault may also crash them, or never end."""
    file, fault, notebook, which = row
    process = multiprocessing.get_context("fork").Process(target=run, args=(file, notebook, which))
    process.start()
    process.join(120)
    process.kill()
    process.join()
    status = process.exitcode
    print("." if fault else file, end="", flush=True)
    if status != (1 if fault else 0) and not (fault and status < 0):
        return f"{file}, {fault or 'without a fault'}: exit status {status}"


def main(named):
    os.environ["TRITON_INTERPRET"] = "1"
    for module in ("bitsandbytes", "hypothesis", "matplotlib.pyplot", "pandas", "peft", "triton"):
        importlib.import_module(module)  # which no fork need import again
    rows = []  # (file, fault or None, notebook, which tests)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        for file, faults in ROWS.items():
            chosen = {fault: row for fault, row in faults.items() if not named or fault in named}
            for fault, (text, replacement, which) in chosen.items():
                rows.append((file, fault, mutated(fault, text, replacement, folder), which))
            if chosen:  # the control
                rows.append(
                    (file, None, NOTEBOOK, " or ".join({row[2] for row in chosen.values()}))
                )
        wrong = list(filter(None, pool.map(complaint, rows)))
    print("", *wrong, f"{len(rows) - len(wrong)} of {len(rows)} runs ended as they must", sep="\n")
    raise SystemExit(bool(wrong) or not rows)


if __name__ == "__main__":
    main(sys.argv[1:])
