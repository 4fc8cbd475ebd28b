"""Keeps the record true. Two steps, because the GPU is often on another machine:

    python results/record.py execute DIR   where the GPU is: runs the notebook, leaves it and its record in DIR
    python results/record.py adopt DIR     in the repository: takes outputs, JSON, figures in, refreshes what is stated

`python results/record.py refresh` only rewrites the stated figures from results/.
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "nf4_triton.ipynb"
README = ROOT / "README.md"
HOME_RECORD = ROOT / "results" / "nvidia-h200.json"  # the run whose outputs the notebook is committed with
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "original": "original mix"}
BASELINES = {
    "unsloth_today": "today's Unsloth `fast_dequantize`",
    "unsloth_puzzle": "the puzzle's three-launch `fast_dequantize`",
    "peft": "PEFT `dequantize_module_weight`",
}


def code_hashes(notebook):
    """{cell id: hash} of the code cells: outputs belong to the sources they were made from."""
    return {c.id: hashlib.sha256(c.source.encode()).hexdigest()[:16] for c in notebook.cells if c.cell_type == "code"}


def changed_since_run(notebook):
    """Ids of the code cells that are not what they were in the run whose outputs the notebook shows."""
    then, now = notebook.metadata.record.cells, code_hashes(notebook)
    return sorted(cell for cell in then.keys() | now.keys() if then.get(cell) != now.get(cell))


def record_table(record):
    """The recorded ratios as markdown."""
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
        f"Measured on one **{record['gpu']}**, {record['date']}, {packages}: the timed loops of the official harness, "
        f"{pairs} interleaved pairs, median (20th to 80th percentile). "
        f"Bit-exact: {exact['checked']:,} weights compared in raw bits, {exact['differing']} differ. "
        f"Score by the challenge's marking: {score['total']} of {score['possible']}." + why(record),
    ]
    return "\n".join(lines)


def roads_table(roads):
    """The decodes that lost, as markdown."""
    gpu, shape = roads["gpu"], "{} x {}".format(*roads["shape"])
    lines = [
        f"Other ways to look up the code, each bit-exact: kernel time at {shape} on one {gpu} ({roads['date']}, "
        "cold cache, median) and "
        f"instructions per weight in the machine code for sm_75 (Triton {roads['triton']}).",
        "",
        "| decode | fp16, µs | bf16, µs | fp16, instr. | bf16, instr. |",
        "|---|---|---|---|---|",
    ]
    for row in roads["rows"]:
        times = [f"{row[dtype]['us']:.1f}" for dtype in ("float16", "bfloat16")]
        counts = [f"{row[dtype]['sm_75_instructions']:.1f}" for dtype in ("float16", "bfloat16")]
        lines.append(f"| {row['decode']} | {' | '.join(times + counts)} |")
    return "\n".join(lines)


def why(record):
    """Where the lead comes from, and what that means for a T4."""
    large = [e for e in record["kernel"] if e["shape"][0] * e["shape"][1] >= 4096 * 14336]
    kernel = [e["unsloth_today_us"] / e["ours_us"] for e in large]
    ours, theirs = record["host"]["ours_us"], record["host"]["unsloth_today_us"]
    return " ".join(
        (
            " Where the lead comes from: on large matrices the kernel alone runs at",
            f"{min(e['fraction'] for e in large):.2f} or more of the ceiling and is {min(kernel):.2f} to",
            f"{max(kernel):.2f} times as fast as today's Unsloth's; the rest is the launch, {ours:.0f} instead of",
            f"{theirs:.0f} µs of host time per call. No T4 has been measured yet. There the kernel takes longer, the",
            "launch weighs less, so expect smaller ratios and read your own.",
        )
    )


def t4_text(sm_75, t4_ptx):
    """What is known of a T4 without one, as markdown."""
    fp16, bf16 = sm_75["3.6.0"]["float16"], sm_75["3.6.0"]["bfloat16"]
    assert all(sm_75[version][dtype]["compiled"] for version in sm_75 for dtype in ("float16", "bfloat16", "float32"))
    assert fp16["spills"] == bf16["spills"] == fp16["shared"] == bf16["shared"] == t4_ptx["differing"] == 0
    versions = sorted(sm_75, key=lambda version: [int(part) for part in version.split(".")])
    return " ".join(
        (
            f"The kernel compiles for sm_75 with Triton {', '.join(versions)}. On 3.6.0, which Colab ships, it takes",
            f"{fp16['instructions_per_weight']:.2f} instructions per weight in fp16 and",
            f"{bf16['instructions_per_weight']:.2f} in bf16, {fp16['registers']} and {bf16['registers']} registers,",
            "no spills, no shared memory, and stores 128 bits at a time (`results/sm_75.json`). Its PTX for sm_75,",
            f"translated by the driver of an {t4_ptx['gpu']}, gave {t4_ptx['checked']:,} weights, of which",
            f"{t4_ptx['differing']} differ from bitsandbytes (`results/t4_ptx.json`).",
        )
    )


def runs_text(runs):
    """How far the runs on one kind of GPU lie apart, as markdown."""
    medians = [median for run in runs for median in run["ratios"]["unsloth_today"].values()]
    hosts = [run["host"]["unsloth_today_us"] for run in runs]
    return (
        f"The machines were lent, their processors not equally fast (issuing one call of today's `fast_dequantize` "
        f"took {min(hosts):.0f} to {max(hosts):.0f} µs): over all {len(runs)} runs of the notebook with this launch "
        f"medians over today's Unsloth lay from {min(medians):.2f} to {max(medians):.2f}. The table is the last run."
    )


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


def stated():
    """{mark: markdown} of all that is stated from results/."""
    record, runs = (json.loads(path.read_text()) for path in (HOME_RECORD, runs_of(HOME_RECORD)))
    changed = nbformat.read(NOTEBOOK, as_version=4).metadata.record.get("changed", {}).values()
    since = f" Since that run definition cells were changed: {'; '.join(changed)}." if changed else ""
    parts = {"record": record_table(record) + " " + runs_text(runs) + since}
    roads, sm_75, t4_ptx = (
        json.loads((ROOT / "results" / f"{name}.json").read_text()) for name in ("roads", "sm_75", "t4_ptx")
    )
    return parts | {"roads": roads_table(roads), "t4": t4_text(sm_75, t4_ptx)}


def runs_of(record_path):
    return record_path.with_name(record_path.stem + "-runs.json")


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


def adopt(folder):
    folder = Path(folder)
    executed, notebook = (nbformat.read(path, as_version=4) for path in (folder / NOTEBOOK.name, NOTEBOOK))
    if code_hashes(executed) != code_hashes(notebook):
        raise SystemExit("the executed notebook's code differs from the repository's: run it again")
    outputs = iter(cell for cell in executed.cells if cell.cell_type == "code")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            done = next(outputs)
            cell.outputs, cell.execution_count = done.outputs, done.execution_count
    notebook.metadata["record"] = {"cells": code_hashes(notebook)}
    nbformat.write(notebook, NOTEBOOK)
    for file in (folder / "results").glob("*"):
        shutil.copy(file, ROOT / "results" / file.name)
        if file.suffix == ".json":
            path = runs_of(ROOT / "results" / file.name)
            runs = json.loads(path.read_text()) if path.exists() else []
            path.write_text(json.dumps([*runs, summary(json.loads(file.read_text()))], indent=1) + "\n")
    refresh()


if __name__ == "__main__":
    steps = {"execute": execute, "adopt": adopt, "refresh": refresh}
    if len(sys.argv) < 2 or sys.argv[1] not in steps:
        raise SystemExit(__doc__)
    steps[sys.argv[1]](*sys.argv[2:])
