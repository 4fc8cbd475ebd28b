"""Keeps the record true. Two steps, because the GPU is often on another machine:

    python results/record.py execute DIR   where the GPU is: runs the notebook, leaves it and its record in DIR
    python results/record.py adopt DIR     in the repository: takes outputs, JSON, figures in, refreshes what is stated

A notebook that Colab ran is adopted the same way: put it (as nf4_triton.ipynb) and its results/ into DIR. What the gpu
tests counted comes along as DIR/robustness.json (`pytest tests --tally FILE`) and DIR/t4_ptx.json (`tests/t4_ptx.py
FILE`).
`python results/record.py refresh` only rewrites the stated figures from results/.
"""

import ast
import datetime
import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "nf4_triton.ipynb"
README = ROOT / "README.md"
RESULTS = ROOT / "results"
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "original": "original mix"}
BASELINES = {
    "unsloth_today": "today's Unsloth `fast_dequantize`",
    "unsloth_puzzle": "the puzzle's three-launch `fast_dequantize`",
    "peft": "PEFT `dequantize_module_weight`",
}
FROM_TESTS = ("robustness", "t4_ptx")  # entries of the record that the gpu tests measure


def code_hashes(notebook):
    """{cell id: hash} of the code cells: outputs belong to the sources they were made from."""
    return {c.id: hashlib.sha256(c.source.encode()).hexdigest()[:16] for c in notebook.cells if c.cell_type == "code"}


def changed_since_run(notebook):
    """Ids of the code cells that are not what they were in the run whose outputs the notebook shows."""
    then, now = notebook.metadata.record.cells, code_hashes(notebook)
    return sorted(cell for cell in then.keys() | now.keys() if then.get(cell) != now.get(cell))


def from_notebook(name):
    """A function out of the notebook's definition cells, alone: record.py runs where torch is not installed yet."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    definitions = [node for c in cells if c.source.startswith("#| export") for node in ast.parse(c.source).body]
    (found,) = (node for node in definitions if isinstance(node, ast.FunctionDef) and node.name == name)
    namespace = {"re": re}
    exec(compile(ast.Module([found], []), NOTEBOOK.name, "exec"), namespace)
    return namespace[name]


slug, speedup_points = from_notebook("slug"), from_notebook("speedup_points")


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def records():
    """The record of each GPU, a T4's first, then by name."""
    found = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    found = [record for record in found if isinstance(record, dict) and "harness" in record]
    return sorted(found, key=lambda record: ("T4" not in record["gpu"], record["gpu"]))


def ratio_text(record):
    """The recorded ratios of one GPU, and what they were measured on, as markdown."""
    ratios = {(e["baseline"], e["dtypes"]): e["ratio"] for e in record["harness"]}
    versions, exact, score = record["versions"], record["exact"], record["score"]
    lines = [f"| speedup over | {' | '.join(DTYPES.values())} |", "|---" * (len(DTYPES) + 1) + "|"]
    for baseline, label in BASELINES.items():
        cells = (ratios[baseline, dtype] for dtype in DTYPES)
        cells = (f"**{r['median']:.2f}×** ({r['p20']:.2f}–{r['p80']:.2f})" for r in cells)
        lines.append(f"| {label} | {' | '.join(cells)} |")
    pairs = len(record["harness"][0]["ours_s"])
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "bitsandbytes", "unsloth", "peft"))
    lines += [
        "",
        f"Measured on one **{record['gpu']}**, {record['date']}, {packages}: the timed loops of the challenge's "
        f"harness, {pairs} interleaved pairs, median (20th to 80th percentile); *original mix*: each option in the "
        "dtype that the challenge gives it, out of the same loops. "
        f"**Bit-exact**: {exact['checked']:,} comparisons of single weights in raw bits, {exact['differing']} differ. "
        f"**Score** by the challenge's marking, on this GPU: {score['total']} of {score['possible']}.",
    ]
    return "\n".join(lines)


def why_text(record):
    """Where the lead comes from."""
    large = [e for e in record["kernel"] if e["shape"][0] * e["shape"][1] >= 4096 * 14336]
    kernel = [e["unsloth_today_us"] / e["ours_us"] for e in large]
    fractions = [e["fraction"] for e in large]
    faster = " to ".join(dict.fromkeys((f"{min(kernel):.2f}", f"{max(kernel):.2f}")))
    ours, theirs = (record["parts"]["issued_us"][name] for name in ("ours", "unsloth_today"))
    return (
        f"Where the lead comes from: from 4096 x 14336 weights on the kernel alone runs at {min(fractions):.2f} or "
        f"more of the speed of one that moves the same bytes and decodes nothing, and is {faster} times as fast as "
        f"today's Unsloth's. The rest is the host: it issues a call in {ours:.0f} instead of {theirs:.0f} µs, and the "
        "harness waits for each. Where nobody waits and the GPU is always busy, only the kernel's part remains."
    )


def runs_text(runs):
    """How far the runs on one kind of GPU lie apart, as markdown."""
    medians = [median for run in runs for median in run["ratios"]["unsloth_today"].values()]
    hosts = [run["host"]["unsloth_today_us"] for run in runs]
    return (
        f"The machines were lent and their processors differ (issuing one call of today's `fast_dequantize` "
        f"took {min(hosts):.0f} to {max(hosts):.0f} µs): over all {len(runs)} runs of the notebook "
        f"medians over today's Unsloth lay from {min(medians):.2f} to {max(medians):.2f}. The table is the last run."
    )


def record_text():
    """Every GPU's ratios; what no GPU has shown yet; which cells are ahead of the run."""
    parts = []
    for record in records():
        runs = load(slug(record["gpu"]) + "-runs")
        parts.append(ratio_text(record) + "\n\n" + why_text(record) + (" " + runs_text(runs) if len(runs) > 1 else ""))
    if not any("T4" in record["gpu"] for record in records()):
        parts.append(
            "No T4 has been measured yet. There the kernel takes longer and the launch weighs less: expect other "
            "ratios, and read your own (section 11 has a prediction)."
        )
    changed = nbformat.read(NOTEBOOK, as_version=4).metadata.record.get("changed", {}).values()
    if changed:
        parts.append(f"Since that run cells were changed: {'; '.join(changed)}.")
    return "\n\n".join(parts)


def roads_text(roads):
    """The decodes that lost, as markdown."""
    gpu, shape = roads["gpu"], "{} x {}".format(*roads["shape"])
    lines = [
        f"Other ways to look up the code, each bit-exact: kernel time at {shape} on one {gpu} ({roads['date']}, "
        "cold cache, median) and "
        f"instructions per weight in the machine code for sm_75 (Triton {roads['triton']}), by `results/roads.py`.",
        "",
        "| decode | fp16, µs | bf16, µs | fp16, instr. | bf16, instr. |",
        "|---|---|---|---|---|",
    ]
    for row in roads["rows"]:
        times = [f"{row[dtype]['us']:.1f}" for dtype in ("float16", "bfloat16")]
        counts = [f"{row[dtype]['sm_75_instructions']:.1f}" for dtype in ("float16", "bfloat16")]
        lines.append(f"| {row['decode']} | {' | '.join(times + counts)} |")
    return "\n".join(lines)


def t4_text(record):
    """What is known of a T4: checked without it, predicted, or only to be measured there."""
    sm_75, colab, jupyter, ptx = load("sm_75"), load("colab"), load("jupyter"), record["t4_ptx"]
    fp16, bf16 = sm_75["3.6.0"]["float16"], sm_75["3.6.0"]["bfloat16"]
    assert all(sm_75[version][dtype]["compiled"] for version in sm_75 for dtype in ("float16", "bfloat16", "float32"))
    assert fp16["spills"] == bf16["spills"] == fp16["shared"] == bf16["shared"] == ptx["differing"] == 0
    versions = sorted(sm_75, key=lambda version: [int(part) for part in version.split(".")])
    ours, theirs = ([run["seconds"][name] for run in record["t4_prediction"]] for name in ("ours", "unsloth_today"))
    ratios = [their / our for their, our in zip(theirs, ours)]
    gpu, host = (record["memory"][f"run_{where}_bytes"] / 1e9 for where in ("gpu", "host"))
    untouched = ", ".join(f"{name} {colab['untouched'][name]}" for name in ("torch", "triton", "numpy"))
    minutes = [seconds / 60 for seconds in t4_run_all_s(record)]
    rows = {
        "**checked** without the card": [
            f"compiles for sm_75 with Triton {', '.join(versions)}, by shuffle and by table",
            f"on 3.6.0, which Colab ships, {fp16['instructions_per_weight']:.2f} instructions per weight in fp16 and "
            f"{bf16['instructions_per_weight']:.2f} in bf16, {fp16['registers']} and {bf16['registers']} registers, no "
            "spills, no shared memory, stores of 128 bits (`results/sm_75.json`)",
            f"its PTX for sm_75, translated by the driver of an {ptx['gpu']}, gave {ptx['checked']:,} weights, of "
            f"which {ptx['differing']} differ from bitsandbytes",
            "where Inductor refuses bf16 tensors (imitated), the bf16 dequantization still compiles: its bits leave "
            "the graph as int16; a whole bf16 MLP stays eager there",
            f"the install cell leaves {untouched} and the CUDA packages of Colab's image ({colab['list']}) as they are",
            f"in its CPU mode the notebook passes under Colab's IPython {jupyter['ipython']} and ipykernel "
            f"{jupyter['ipykernel']}",
            f"the notebook's tensors take at most {gpu:.1f} GB on the GPU and its process {host:.1f} GB on the host "
            f"(on the {record['gpu']})",
        ],
        "**predicted**": [
            f"the harness in fp16: {min(ours):.1f} to {max(ours):.1f} s, today's Unsloth {min(theirs):.1f} to "
            f"{max(theirs):.1f} s, a ratio of {min(ratios):.2f} to {max(ratios):.2f} (section 11); "
            f"by the marking {score_with(record, 0.98 * min(ratios))} to {score_with(record, max(ratios))} points "
            "(counting 2 % as noise)",
            f"*Run all*: {min(minutes):.0f} to {max(minutes):.0f} minutes, installation included",
        ],
        "**only your run** can show": [
            "any time, and so whether 1.15 over *today's* `fast_dequantize` is reached there in every dtype",
            "whether what Colab ships on that day still behaves as what was checked",
        ],
    }
    lines = ["| on a Tesla T4 | |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {';<br>'.join(facts)} |" for name, facts in rows.items()])


def t4_run_all_s(record):
    """Low and high estimate of a T4's seconds for the whole notebook.

    The races of two dtypes as predicted; the checks' matrix products (34 Tflop in fp16 at 20 Tflop/s, 62 in bf16, which
    a T4 has no instruction for, at 4 to 2 Tflop/s); the rest of the record's run 2 to 4 times slower; 2 minutes of
    installation.
    """
    runs = [sum(run["seconds"].values()) for run in record["t4_prediction"]]
    raced = [entry for entry in record["harness"] if entry["dtypes"] != "original"]
    here = sum(sum(e["baseline_s"]) for e in raced) + sum(sum(e["ours_s"]) for e in raced if e["baseline"] == "peft")
    rest, pairs = sum(record["section_s"].values()) - here, 2 * len(raced[0]["ours_s"])
    products = (34 / 20 + 62 / 4, 34 / 20 + 62 / 2)
    return [
        pairs * run + product + slower * rest + 120
        for run, product, slower in zip((min(runs), max(runs)), products, (2, 4))
    ]


def score_with(record, speedup):
    """The record's total with the points of another speedup."""
    rows = record["score"]["rows"]
    return sum(speedup_points(speedup) if row["criterion"] == "speedup" else row["points"] for row in rows)


def robustness_text(record):
    found = record["robustness"]
    return (
        "By `pytest tests --tally` and `tests/training.py`, kept in the record under `robustness`. "
        f"On the {found['gpu']} ({found['date']}): {found['cases']:,} cases of shape, block size, dtype, "
        f"nesting, alignment and storage, {found['weights']:,} weights in all, {found['differing']} differ from "
        f"bitsandbytes; {found['errors']} malformed inputs, each refused by name; {found['load_calls']:,} calls over "
        f"300 layers whose weights come and go, {found['load_growth_bytes']:,} bytes of GPU memory more at the end; "
        f"{found['sanitizer_errors']} errors by compute-sanitizer (memcheck, racecheck, initcheck).\n\n"
        "Three training steps of a small Llama (4 layers, hidden size 1024, bf16, LoRA on all projections) give the "
        "same losses, gradients and adapters, bit for bit. A step takes "
        f"{found['training_step_us_ours'] / 1000:.1f} ms with ours and "
        f"{found['training_step_us_stock'] / 1000:.1f} ms with bitsandbytes' `dequantize_4bit`; in Unsloth's fused "
        "MLP, ours put in the place of `fast_dequantize`, "
        f"{found['training_step_us_unsloth_ours'] / 1000:.1f} instead of "
        f"{found['training_step_us_unsloth'] / 1000:.1f} ms."
    )


def stated():
    """{mark: markdown} of all that is stated from results/."""
    tested = next(record for record in records() if record.get("robustness"))  # where the gpu tests were run
    pictures = "\n".join(
        f"![Speedup over the three baselines on {r['gpu']}](results/{slug(r['gpu'])}-speedup.png)" for r in records()
    )
    return {
        "record": record_text(),
        "roads": roads_text(load("roads")),
        "t4": t4_text(tested),
        "robustness": robustness_text(tested),
        "pictures": pictures,
    }


def summary(record):
    """A run in a few figures, for the list of runs."""
    ratios = {baseline: {} for baseline in BASELINES}
    for entry in record["harness"]:
        ratios[entry["baseline"]][entry["dtypes"]] = entry["ratio"]["median"]
    return {"date": record["date"], "ratios": ratios, "host": record["host"]}


def between(text, name, inside):
    """`text` with what stands between the marks of `name` replaced."""
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    if start not in text:
        return text
    head, rest = text.split(start)
    return head + start + "\n" + inside + "\n" + end + rest.split(end)[1]


def refresh():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    readme = README.read_text()
    for name, inside in stated().items():
        readme = between(readme, name, inside)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = between(cell.source, name, inside)
    README.write_text(readme)
    nbformat.write(notebook, NOTEBOOK)


def section_seconds(notebook):
    """{section: seconds} of an executed notebook."""
    seconds, section = {}, ""
    for cell in notebook.cells:
        heading = re.search(r"^## (\d+) ", cell.source, re.M)
        section = heading[1] if cell.cell_type == "markdown" and heading else section
        times = cell.metadata.get("execution", {})
        if "shell.execute_reply" in times:
            start, end = (
                datetime.datetime.fromisoformat(times[key].replace("Z", "+00:00"))
                for key in ("iopub.status.busy", "shell.execute_reply")
            )
            seconds[section] = round(seconds.get(section, 0.0) + (end - start).total_seconds(), 1)
    return seconds


def execute(folder):
    from nbclient import NotebookClient

    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # the notebook writes its results/ here
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    try:
        NotebookClient(notebook, timeout=None, kernel_name="python3", coalesce_streams=True).execute()
    finally:
        nbformat.write(notebook, folder / NOTEBOOK.name)
    for path in Path("results").glob("*.json"):
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"section_s": section_seconds(notebook)}, indent=1) + "\n"
        )


def adopt(folder):
    folder = Path(folder)
    executed, notebook = (nbformat.read(path, as_version=4) for path in (folder / NOTEBOOK.name, NOTEBOOK))
    if list(code_hashes(executed).values()) != list(code_hashes(notebook).values()):
        raise SystemExit("the executed notebook's code differs from the repository's: run it again")
    outputs = iter(cell for cell in executed.cells if cell.cell_type == "code")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            done = next(outputs)
            cell.outputs, cell.execution_count = done.outputs, done.execution_count
    notebook.metadata["record"] = {"cells": code_hashes(notebook)}
    nbformat.write(notebook, NOTEBOOK)
    for file in (folder / "results").glob("*"):
        if file.suffix == ".json":
            adopt_record(json.loads(file.read_text()), RESULTS / file.name, folder)
        else:
            shutil.copy(file, RESULTS / file.name)
    refresh()


def adopt_record(record, path, folder):
    """Writes the record, with what the gpu tests counted (of this run, or else as it was), and lengthens the runs."""
    known = json.loads(path.read_text()) if path.exists() else {}
    for name in FROM_TESTS:
        found = folder / f"{name}.json"
        record[name] = json.loads(found.read_text()) if found.exists() else known.get(name)
    path.write_text(json.dumps(record, indent=1) + "\n")
    runs_path = path.with_name(path.stem + "-runs.json")
    runs = json.loads(runs_path.read_text()) if runs_path.exists() else []
    runs_path.write_text(json.dumps([*runs, summary(record)], indent=1) + "\n")


if __name__ == "__main__":
    steps = {"execute": execute, "adopt": adopt, "refresh": refresh}
    if len(sys.argv) < 2 or sys.argv[1] not in steps:
        raise SystemExit(__doc__)
    steps[sys.argv[1]](*sys.argv[2:])
