"""Takes a run of the notebook in, and writes the generated blocks of the notebook and the README.

    .venv/bin/python tools/record.py run      the run in run/ that README's commands left there
    .venv/bin/python tools/record.py          the blocks alone, from what stands in results/
    .venv/bin/python tools/record.py check    whether outputs and record are of the code as it is

A block lies between <!-- NAME:start --> and <!-- NAME:end -->. results/runs.json lists all runs;
the latest is shown. Where anything speaks against a run, it is said, and nothing changes.
"""

import ast
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
from t4 import host_us

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "mix": "mix"}
BASELINES = {
    "unsloth": "today's Unsloth ({unsloth})",
    "unsloth_buffer": "Unsloth into one buffer, its way in training",
    "three_launches": "Unsloth's three launches, its path until 2026.9",
    "peft": "PEFT ({peft})",
}
FIELDS = ("gpu", "capability", "date", "cpu", "cores", "versions", "exact", "kernels", "official")
FIELDS += ("race", "compile", "memory", "score", "seconds")
PROGRESS = re.compile(r"\s*(race:.*)?", re.S)  # bars that have come to their end
TO_RUN = "run the notebook on a GPU (README, Run it), then tools/record.py run"
EXPECTED = """**What to expect: an estimate, not a measurement.** For the test's 9000 calls,

    seconds = bytes / (share x a copy's speed on a T4) + 9000 x host's time a call x factor

The host's time is what a call takes beyond its kernel in the race of {gpu}, {date}. The factor, for
Colab's slower host, is the one with which the three launches take a published time; we assume that
it is the same for all three."""
DOUBT = "The published times come from two hosts that drift; no kernel like ours was timed on a T4."


def stored(name):
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def shown_record():
    """The record of the run that is shown: the latest in runs.json."""
    runs = stored("runs") or []
    return stored(slug(runs[-1]["gpu"])) if runs else None


def slug(gpu):
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower())


def of_race(record, who):
    """{dtype: ratio} of a contender."""
    return {row["dtype"]: row["ratio"] for row in record["race"] if row["who"] == who}


# The blocks.


def markdown(rows):
    """Numbers, which are texts already, stand at the right, words at the left."""
    table = pd.DataFrame(rows)
    words = ("step", "speedup over", "idea", "a training step of")
    sides = ["left" if column in words else "right" for column in table]
    return table.to_markdown(index=False, disable_numparse=True, colalign=sides)


def from_to(values, digits=2):
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def record_block(record, runs, t4, tests):
    rows = []
    for who, label in BASELINES.items():
        if ratios := of_race(record, who):  # not every machine has every contender
            row = {"speedup over": label.format(**record["versions"])}
            for dtype, short in DTYPES.items():
                row[short] = f"{ratios[dtype]:.2f}"
            if len(runs) > 1:
                others = [run["ratios"][who]["mix"] for run in runs if who in run["ratios"]]
                row[f"mix in all {len(runs)} runs"] = from_to(others)
            rows.append(row)
    origin = f"{record['gpu']}, {record['date']}; host: {record['cpu']}, {record['cores']} cores"
    exact = "{checked:,} weights compared bit for bit, {differing} differ".format(**record["exact"])
    line = f"**{origin}.** {exact}. *Run all* took {record['seconds'] / 60:.0f} minutes."
    if tests:
        text = " The tests on {gpus} x {gpu}: {passed} passed, {failed} failed, {skipped} skipped."
        line += text.format(**tests)
    paragraphs = [markdown(rows), line]
    if t4 and "T4" not in record["gpu"]:
        over = from_to([row["over_unsloth"] for row in t4["estimate"]])
        older = from_to([row["over_three_launches"] for row in t4["estimate"]])
        paragraphs.append(
            "**No time has been measured on a Tesla T4**: we had none. Our estimate there is "
            f"{over} times today's Unsloth, where the challenge asks for 1.15, and {older} times "
            "the three launches."
        )
    return "\n\n".join(paragraphs)


def ladder_block(ladder, variants):
    """The steps up to ours, or ours and its variants, which follow it."""
    steps = list(dict.fromkeys(row["step"] for row in ladder["rows"]))
    ours = steps.index(next(step for step in steps if step.endswith("ours")))
    rows = {step: {"step": step} for step in (steps[ours:] if variants else steps[: ours + 1])}
    for row in ladder["rows"]:
        if line := rows.get(row["step"]):
            dtype, speed = DTYPES[row["dtype"]], 100 * row["copy_us"] / row["us"]
            line[f"% of a copy's speed, {dtype}"] = f"{speed:.0f}"
            line[f"T4 instructions, {dtype}"] = f"{row['instructions_per_weight']:.1f}"
    if not variants:
        for row in ladder["rows"]:
            if row["step"] in rows:
                rows[row["step"]]["idea"] = row["taught"]
    where = f"4096 x 14336 weights, {ladder['gpu']}, {ladder['date']}."
    return f"{markdown(rows.values())}\n\n{where}"


def t4_block(t4):
    rows = []
    for row in t4["estimate"]:
        line = {"three launches, s": f"{row['published_s']:.3f}"}
        line["of a copy's speed"] = f"{100 * row['share']:.0f} %"
        line["host factor"] = f"{row['factor']:.2f}"
        line["Unsloth, s"] = f"{row['unsloth_s']:.2f}"
        line["ours, s"] = f"{row['ours_s']:.2f}"
        line["over Unsloth"] = f"{row['over_unsloth']:.2f}"
        rows.append(line | {"over three launches": f"{row['over_three_launches']:.2f}"})
    reached = [row for row in t4["estimate"] if row["over_unsloth"] >= 1.15]
    count = f"Rows that reach 1.15 over today's Unsloth: {len(reached)} of {len(rows)}."
    sources = [f"[{each['what']}]({each['url']}): {each['value']:g}" for each in t4["sources"]]
    expected = EXPECTED.format(**t4["record"])
    paragraphs = [expected, markdown(rows), f"{DOUBT} {count}", f"Sources: {'; '.join(sources)}."]
    return "\n\n".join(paragraphs)


def training_block(training):
    rows = {}
    for row in training["rows"]:
        line = rows.setdefault((row["model"], row["tokens"]), {"a training step of": row["model"]})
        line["tokens"] = row["tokens"]
        line[f"{row['who']}, ms"] = f"{row['ms']:.2f}"
        line[f"{row['who']}, GB"] = f"{row['peak_bytes'] / 1e9:.2f}"
    return f"{markdown(rows.values())}\n\n{training['gpu']}, {training['date']}."


def blocks():
    """{name: what stands in results/ for it}."""
    found, record = {}, shown_record()
    ladder, t4, training = stored("ladder"), stored("t4"), stored("training")
    if record:
        found["record"] = record_block(record, stored("runs"), t4, stored("tests"))
    if ladder:
        found["ladder"] = ladder_block(ladder, variants=False)
        found["variants"] = ladder_block(ladder, variants=True)
    if t4:
        found["t4"] = t4_block(t4)
    if training:
        found["training"] = training_block(training)
    return found


def with_blocks(text, found):
    for name, block in found.items():
        between = re.compile(rf"(<!-- {name}:start -->\n).*?(<!-- {name}:end -->)", re.S)
        text = between.sub(lambda mark: f"{mark[1]}{block}\n{mark[2]}", text)
    return text


def write_blocks():
    found = blocks()
    notebook = nbformat.read(ROOT / "nf4_triton.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = with_blocks(cell.source, found)
    files = {ROOT / "nf4_triton.ipynb": nbformat.writes(notebook) + "\n"}
    files[ROOT / "README.md"] = with_blocks((ROOT / "README.md").read_text(), found)
    replace(files)


def replace(files):
    """Writes {path: text or bytes}, all or nothing: first beside each file, then in its place."""
    beside = {path: path.with_name(path.name + ".tmp") for path in files}
    for path, value in files.items():
        beside[path].write_bytes(value.encode() if isinstance(value, str) else value)
    for path in files:
        beside[path].replace(path)


# Taking a run in.


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def code_hash(notebook):
    """Says which code the outputs are of; comments and layout do not count."""
    trees = [ast.dump(ast.parse(cell.source)) for cell in code_cells(notebook)]
    return hashlib.sha256("\0".join(trees).encode()).hexdigest()[:16]


def check():
    """Ends with a sentence unless outputs and record are of the code as it stands."""
    notebook = nbformat.read(ROOT / "nf4_triton.ipynb", as_version=4)
    if notebook.metadata.get("code") != code_hash(notebook):
        raise SystemExit(f"code cells differ from those whose outputs and record stand: {TO_RUN}")
    shown, t4 = shown_record(), stored("t4")
    if t4 and t4["record"]["host_us"] != host_us(shown):
        raise SystemExit("the T4's estimate is of another run: run tools/t4.py estimate")
    print("outputs and record are of the code as it stands")


def objections(record, executed, notebook, pictures):
    """A sentence for all that speaks against taking this run in."""
    if code_hash(executed) != code_hash(notebook):
        yield "its code differs from the repository's: run the notebook again"
    for cell in code_cells(executed):
        errors = [output for output in cell.outputs if output.output_type == "error"]
        if errors or not cell.execution_count:
            yield f"this cell was not run, or failed: {cell.source.splitlines()[0]}"
    lacking = [field for field in FIELDS if not record.get(field)]
    if lacking:
        yield f"the record lacks {', '.join(lacking)}"
        return
    if record["exact"]["differing"]:
        yield "{differing} of {checked} weights differ".format(**record["exact"])
    if set(of_race(record, "unsloth")) != set(DTYPES):
        yield "there is no race against today's Unsloth in fp16, bf16 and mix"
    for picture in pictures:
        if not picture.exists():
            yield f"there is no picture {picture.name}"


def take(folder):
    paths = list((folder / "results").glob("*.json"))
    if len(paths) != 1 or not (folder / "nf4_triton.ipynb").exists():
        raise SystemExit(f"expected nf4_triton.ipynb and one results/*.json in {folder}: {TO_RUN}")
    try:
        record = json.loads(paths[0].read_text())
        executed = nbformat.read(folder / "nf4_triton.ipynb", as_version=4)
    except ValueError as error:
        raise SystemExit(f"the run in {folder} cannot be read: {error}") from None
    notebook = nbformat.read(ROOT / "nf4_triton.ipynb", as_version=4)
    pictures = [paths[0].with_name(f"{paths[0].stem}-{name}.png") for name in ("calls", "race")]
    wrong = list(objections(record, executed, notebook, pictures))
    if wrong:
        raise SystemExit("\n".join([*wrong, "nothing was taken in"]))
    for cell, ran in zip(code_cells(notebook), code_cells(executed)):
        shown = [each for each in ran.outputs if not PROGRESS.fullmatch(each.get("text", "x"))]
        cell.outputs, cell.execution_count = shown, ran.execution_count
    ask = ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(ask, capture_output=True, text=True).stdout.strip() or None
    run = {name: record[name] for name in ("gpu", "cpu", "date")} | {"commit": commit}
    run["ratios"] = {who: of_race(record, who) for who in BASELINES if of_race(record, who)}
    files = {RESULTS / "runs.json": json.dumps([*(stored("runs") or []), run], indent=1) + "\n"}
    for path in (paths[0], *pictures):
        files[RESULTS / path.name] = path.read_bytes()
    notebook.metadata["code"] = code_hash(notebook)
    files[ROOT / "nf4_triton.ipynb"] = nbformat.writes(notebook) + "\n"
    replace(files)
    for listed in stored("runs"):
        for old in RESULTS.glob(f"{slug(listed['gpu'])}*"):
            if old not in files:  # another GPU's: its ratios stand in runs.json
                old.unlink()
    print(f"taken in: {record['gpu']}, {record['date']}; {len(stored('runs'))} runs are listed")


def main(arguments):
    match arguments:
        case ["check"]:
            check()
        case []:
            write_blocks()
        case [folder]:
            take(Path(folder).resolve())
            write_blocks()
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
