"""Keeps the record: what was measured, in results/, and the tables that the page and README show.

    python tools/record.py run/           takes in the run that README's commands left there
    python tools/record.py FILE.json      takes in what training.py, t4.py or tally.py wrote
    python tools/record.py                writes the tables anew, after an edit of measured code
    python tools/record.py check          says whether page, README, results/ and outputs agree
    python tools/record.py check --fresh  asks as well that all was measured with the present code

People write sentences, and this program writes tables: each lies between <!-- NAME:start --> and
<!-- NAME:end -->, with a line that says where and when it was measured, and whether the code has
changed since. A measurement with a fault is refused with reasons, and then no file changes.
"""

import hashlib
import json
import re
import sys
from pathlib import Path

import nbformat
import pandas as pd
import shared

NEEDED = {  # {kind: what its data must have}; the training's is a list
    "run": ("gpu", "host", "date", "versions", "kernels", "compared", "official", "race")
    + ("official_speedups", "race_speedups", "estimate", "seconds"),
    "training": (),
    "rehearsal": ("kernels", "compared", "pipes"),
    "tests": ("GPUs", "passed", "failed", "skipped"),
}
TAKE = "python tools/record.py"
COMMANDS = {
    "run": f"run the notebook on a GPU (README, Run it), then {TAKE} run/",
    "training": f"run python tools/training.py FILE.json on a GPU, then {TAKE} FILE.json",
    "rehearsal": f"run python tools/t4.py rehearse DIR on a GPU, then {TAKE} DIR/rehearsal.json",
    "tests": f"run python tools/tally.py FILE.json on a GPU, then {TAKE} FILE.json",
}
TOOLS = [kind for kind in COMMANDS if kind != "run"]  # each writes one file
SEAL = "sha256"  # the hash of what was measured, which taking it in adds
ADDED = ("code", SEAL)  # to the notebook's JSON
PROGRESS = re.compile(r"\r?rounds:[^\r\n]*|\r *")  # a bar, and what clears its line
ROWS = {  # of the first table: {contender: what the reader sees}
    "Unsloth": "today's Unsloth ({unsloth})",
    "Unsloth, buffer": "Unsloth, buffer: it overwrites its last result",
    "three launches": "three launches: Unsloth's path when the challenge was set",
    "PEFT": "PEFT ({peft})",
}


def read_json(path):
    """Return the file's object, or end with a sentence."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"expected a JSON object, got {type(found).__name__}")
        return found
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be read: {error}\nNothing was changed.") from None


def results():
    return shared.ROOT / "results"


def read_runs():
    """Return {file name: run} of results/runs, the oldest first."""
    runs = {path.name: read_json(path) for path in (results() / "runs").glob("*.json")}
    return dict(sorted(runs.items(), key=lambda item: (item[1].get("date", ""), item[0])))


def text_of(measured, added=ADDED):
    """Return the text that the notebook or a tool wrote: all but what taking it in has added."""
    written = {key: measured[key] for key in measured if key not in added}
    return json.dumps(written, indent=1) + "\n"


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def outputs_of(notebook):
    """Return a digest of all that the notebook's code cells show."""
    cells = [cell for cell in shared.code_cells(notebook) if cell.execution_count]
    shown = [(cell.id, cell.execution_count, cell.outputs) for cell in cells]
    return digest(json.dumps(shown, sort_keys=True))


def shown_run(notebook):
    """Return (file name, digest) of the run whose outputs the notebook has, as its last cell said.

    Both are None where it says nothing.
    """
    found = re.findall(r"runs/([\w.-]+\.json), sha256 (\w{64})", json.dumps(notebook))
    return found[-1] if found else (None, None)


def objections_to_outputs(notebook, is_new):
    """Yield a sentence for each cell that failed, or was not run once, after those before it.

    is_new  whether all cells must have been run; an edit may have added some that were not
    """
    n_run = 0
    for cell in shared.code_cells(notebook):
        title = cell.source.partition("\n")[0]
        if any(output.output_type == "error" for output in cell.outputs):
            yield f"this cell failed: {title}"
        elif cell.execution_count or cell.outputs or is_new:
            n_run += 1
            if cell.execution_count != n_run:
                yield f"this cell was not run once, after those before it: {title}"


def objections_to_data(kind, data):
    """Yield a sentence for each thing in a measurement that no table should show."""
    lacking = [name for name in NEEDED[kind] if name not in data]
    if lacking or not data:
        yield f"it lacks {', '.join(lacking) or 'data'}"
        return
    if kind in ("run", "rehearsal"):
        if not data["compared"]:
            yield "it compared no bits"
        n_differing = sum(abs(row["differing"]) for row in data["compared"])
        if n_differing:
            yield f"the bits of {n_differing:,} weights differ from bitsandbytes'"
    if kind == "rehearsal" and not (data["kernels"] and data["pipes"]):
        yield "it compiled no kernel, or counted none"
    if kind == "run":
        if not {row["dtype"] for row in data["race"] if row["contender"] == "Unsloth"} > {"mix"}:
            yield "Unsloth is not in its race"


def take(path):
    """Take in a run's folder or a tool's file, and write the tables."""
    if path.is_dir():
        take_run(path)
        return
    found = read_json(path)
    kind = found.get("kind")
    if kind not in TOOLS:
        raise SystemExit(f"{path}: expected what a tool measured, got the kind {kind!r}.")
    wrong = [] if found.get("gpu") else ["it was made without a GPU"]
    if found.get("code") != shared.code_of(kind):
        wrong.append("it measured other code than the repository's")
    if SEAL in found:
        wrong.append("it is not the file that the tool wrote")
    wrong += objections_to_data(kind, found.get("data") or {})
    refuse(path, wrong, kind)
    found[SEAL] = digest(text_of(found, [SEAL]))
    write_tables(nbformat.read(shared.NOTEBOOK, as_version=4), {kind: found})
    shared.write(results() / f"{kind}.json", found)


def take_run(folder):
    if not (folder / "nf4_triton.ipynb").exists():
        refuse(folder, ["it has no nf4_triton.ipynb"], "run")
    executed = nbformat.reads(json.dumps(read_json(folder / "nf4_triton.ipynb")), as_version=4)
    wrong = list(objections_to_outputs(executed, is_new=True))
    name, sha256 = shown_run(executed)
    if name is None:
        refuse(folder, [*wrong, "its notebook ran without a GPU, or not to its end"], "run")
    path = folder / "results" / "runs" / name
    if not path.is_file():
        refuse(folder, [*wrong, f"it lacks the run that its outputs name: {path}"], "run")
    run = read_json(path)
    if set(ADDED) & set(run):
        wrong.append("its JSON is not the one that the notebook's last cell wrote")
    elif digest(text_of(run)) != sha256:
        wrong.append("its JSON is not the one that the notebook's outputs name")
    else:
        wrong += objections_to_data("run", run)
    sources = [[cell.source for cell in shared.code_cells(each)] for each in (executed, None)]
    if sources[0] != sources[1]:
        wrong.append("its notebook has other code than the repository's")
    refuse(folder, wrong, "run")
    notebook = nbformat.read(shared.NOTEBOOK, as_version=4)
    for cell, ran in zip(shared.code_cells(notebook), shared.code_cells(executed), strict=True):
        for output in ran.outputs:
            if "text" in output:
                output.text = PROGRESS.sub("", output.text)
        cell.outputs = [output for output in ran.outputs if output.get("text", "x").strip()]
        cell.execution_count = ran.execution_count
    notebook.metadata["outputs"] = outputs_of(notebook)
    run |= {"code": shared.code_of("run", executed), SEAL: sha256}
    write_tables(notebook, {"runs": read_runs() | {name: run}})
    shared.write(results() / "runs" / name, run)


def refuse(path, wrong, kind):
    """End the program with sentences if something is wrong."""
    if wrong:
        raise SystemExit("\n".join([f"{path} was not taken in:", *wrong, f"{COMMANDS[kind]}."]))


def write_tables(notebook, new=None):
    """Write the notebook and README with the tables of the record, in which `new` is newer."""
    readme = shared.ROOT / "README.md"
    record = record_of(notebook, new)
    name, _ = shown_run(notebook)
    if name and not record["run"]:  # else its table would be lost
        lacking = f"results/runs/ lacks the run of the outputs, {name}"
        raise SystemExit(f"{lacking}: put it back, or {COMMANDS['run']}.")
    tables = tables_of(record)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = with_tables(cell.source, tables)
    text = with_tables(readme.read_text(encoding="utf-8"), tables)
    shared.write(shared.NOTEBOOK, nbformat.writes(notebook) + "\n")
    shared.write(readme, text)


def record_of(notebook, new=None):
    """Return {"runs": {file name: run}, "run": the one of the notebook's outputs, tool: ...}.

    What was not measured is None.
    """
    record = {"runs": read_runs()}
    for kind in TOOLS:
        path = results() / f"{kind}.json"
        record[kind] = read_json(path) if path.exists() else None
    record |= new or {}
    record["run"] = record["runs"].get(shown_run(notebook)[0])
    return record


# The tables


def tables_of(record):
    """Return {name of a table: its text}; where nothing was measured, a sentence says so."""
    tables = {}
    for name, (kind, write_rows, line, _) in TABLES.items():
        measured = record[kind]
        tables[name] = f"Nothing was measured yet: {COMMANDS[kind]}."
        if measured:
            tables[name] = f"{markdown(write_rows(record))}\n\n{origin(kind, measured, line)}"
    if record["run"]:
        tables["speedups"] += other_runs(record)
    return tables


def markdown(rows):
    """Return a Markdown table of texts; columns of numbers, or of ranges, stand at the right."""
    table = pd.DataFrame(rows)
    number = re.compile(r"[\d.,]*( (to|x) [\d.]+)?")
    are_numbers = [all(map(number.fullmatch, table[name])) for name in table]
    sides = ["right" if each else "left" for each in are_numbers]
    return table.to_markdown(index=False, disable_numparse=True, colalign=sides)


def origin(kind, measured, line):
    """Return the line below a table, with versions, and whether the code is another one by now."""
    text = line.format(**measured)
    text += " (torch {torch}, Triton {triton}, bitsandbytes {bitsandbytes}).".format(
        **measured["versions"]
    )
    if measured.get("code") != shared.code_of(kind):
        text += " **Measured with earlier code.**"
    return text


def speedups_table(record):
    """Return the rows of the first screen: the shown run, the range of all, and a T4."""
    run, runs = record["run"], list(record["runs"].values())
    on_t4 = [each for each in runs if each["gpu"] == "Tesla T4"]
    test = ("official_speedups", "Unsloth", f"{ROWS['Unsloth']}, by `test_dequantize`")
    race = [("race_speedups", contender, label) for contender, label in ROWS.items()]
    rows = []
    for table, contender, label in [test, *race]:
        mine = speedup(run, table, contender)
        if mine is None:
            continue
        row = {"speedup over": label.format(**run["versions"])}
        row |= {dtype: f"{mine[dtype]:.2f}" for dtype in ("fp16", "bf16", "mix")}
        if len(runs) > 1:
            name = f"mix, all {len(runs)} recorded runs"
            row[name] = from_to(speedup(each, table, contender) for each in runs)
        if on_t4:
            row["mix, on a Tesla T4"] = from_to(speedup(each, table, contender) for each in on_t4)
        else:
            estimates = [each.get(f"over {contender}") for each in run["estimate"]]
            row["mix on a T4, estimated"] = from_to({"mix": each} for each in estimates if each)
        rows.append(row)
    return rows


def speedup(run, table, contender):
    """Return a run's row of speedups over a contender, or None where it was left out."""
    return next((row for row in run[table] if row["over"] == contender), None)


def from_to(rows):
    mixes = [row["mix"] for row in rows if row]
    return f"{min(mixes):.2f} to {max(mixes):.2f}" if mixes else ""


def other_runs(record):
    """Return a sentence on the recorded runs beside the one that is shown."""
    others = [each for each in record["runs"].values() if each is not record["run"]]
    if not others:
        return ""
    where = "; ".join(dict.fromkeys(f"{each['gpu']} with {each['host']}" for each in others))
    n_earlier = sum(each.get("code") != shared.code_of("run") for each in others)
    earlier = f", of which {n_earlier} with earlier code" if n_earlier else ""
    return f" Other recorded runs: {len(others)}{earlier}, made on {where}."


def pipes_table(record):
    """Return the rows of section 8's table of machine code, whose numbers tools/t4.py counted."""
    return [
        {name: value if isinstance(value, str) else f"{value:.4g}" for name, value in row.items()}
        for row in record["rehearsal"]["data"]["pipes"]
    ]


def rehearsal_table(record):
    data = record["rehearsal"]["data"]
    # Where bitsandbytes does the work, no kernel of sm_75 was rehearsed.
    weights = {
        row["case"]: row["weights"] for row in data["compared"] if row["path"] != "bitsandbytes"
    }
    differing = sum(row["differing"] for row in data["compared"])
    row = {"kernels, all compiled for sm_75": f"{data['kernels']}"}
    return [row | {"weights compared": f"{sum(weights.values()):,}", "differ": f"{differing}"}]


def training_table(record):
    rows = []
    for row in record["training"]["data"]:
        line = {"`quant_state.dtype`": row["state"], "tokens": row["tokens"]}
        line |= {"stock, ms": f"{row['stock_ms']:.2f}", "ours, ms": f"{row['ours_ms']:.2f}"}
        rows.append(line | {"stock / ours": f"{row['stock_ms'] / row['ours_ms']:.2f}"})
    return rows


def tests_table(record):
    data = record["tests"]["data"]
    return [{name: str(data[name]) for name in ("GPUs", "passed", "failed", "skipped")}]


LINE = "Measured on {date} with the GPU {gpu} and the host {host}"
TABLES = {  # {name: (the kind of its measurement, what writes its rows, its line, where it stands)}
    "speedups": ("run", speedups_table, LINE, ("the page", "README.md")),
    "pipes": ("rehearsal", pipes_table, "Counted on {date}", ("the page",)),
    "rehearsal": ("rehearsal", rehearsal_table, LINE, ("the page",)),
    "training": ("training", training_table, LINE, ("README.md",)),
    "tests": ("tests", tests_table, LINE, ("README.md",)),
}


def with_tables(text, tables):
    """Return the text with {name: table} between the marks of each name."""
    for name, table in tables.items():
        between = re.compile(rf"(<!-- {name}:start -->\n).*?(<!-- {name}:end -->)", re.S)
        text = between.sub(lambda mark: f"{mark[1]}{table}\n{mark[2]}", text)
    return text


# The check


def objections_to_marks(texts):
    """Yield a sentence for each mark that does not stand once where it should."""
    for name, (*_, places) in TABLES.items():
        for where in places:
            marks = re.findall(rf"<!-- {name}:(start|end) -->", texts[where])
            if marks != ["start", "end"]:
                yield f"{where} must have the marks {name}:start and {name}:end, each once"


def objections_to_record(notebook, record):
    """Yield a sentence for what does not agree in results/ and the notebook's outputs."""
    if notebook.metadata.get("outputs") != outputs_of(notebook):
        yield f"the notebook's outputs are not those that were taken in: {COMMANDS['run']}"
    name, sha256 = shown_run(notebook)
    if not record["run"] or record["run"].get(SEAL) != sha256:
        yield f"results/runs/ lacks the run of the notebook's outputs, {name}, as it was written"
    for file, run in record["runs"].items():
        yield from (f"results/runs/{file}: {each}" for each in objections_to_data("run", run))
        if "code" not in run or run.get(SEAL) != digest(text_of(run)):
            yield f"results/runs/{file} is not as it was taken in: {COMMANDS['run']}"
    for kind in TOOLS:
        if record[kind]:
            objections = objections_to_data(kind, record[kind].get("data") or {})
            yield from (f"results/{kind}.json: {each}" for each in objections)
            if record[kind].get(SEAL) != digest(text_of(record[kind], [SEAL])):
                yield f"results/{kind}.json is not as it was taken in: {COMMANDS[kind]}"


def disagreements(notebook, readme):
    """Return sentences, with what to do, for all that does not agree."""
    page = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    texts = {"the page": page, "README.md": readme}
    record = record_of(notebook)
    found = [*objections_to_marks(texts), *objections_to_record(notebook, record)]
    if not found:  # else tables cannot be written
        tables = tables_of(record)
        found = [
            f"{where} does not show the record's tables: run {TAKE}"
            for where, text in texts.items()
            if with_tables(text, tables) != text
        ]
    return [*objections_to_outputs(notebook, is_new=False), *found]


def stale(record):
    """Yield a sentence, with what to do, for what was not measured with the present code."""
    for kind, command in COMMANDS.items():
        if not record[kind]:
            yield f"{kind}: nothing was measured: {command}"
        elif record[kind].get("code") != shared.code_of(kind):
            yield f"{kind}: measured with earlier code: {command}"


def main(arguments):
    notebook = nbformat.read(shared.NOTEBOOK, as_version=4)
    match arguments:
        case ["check", *fresh] if fresh in ([], ["--fresh"]):
            readme = (shared.ROOT / "README.md").read_text(encoding="utf-8")
            found = disagreements(notebook, readme)
            if fresh:
                found += stale(record_of(notebook))
            if found:
                raise SystemExit("\n".join(found))
            print("page, README, results/ and the notebook's outputs agree")
        case []:
            write_tables(notebook)
        case [path]:
            take(Path(path).resolve())
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        again = " ".join([TAKE, *sys.argv[1:]])
        raise SystemExit(f"interrupted, and results/ is as it was: run {again} again") from None
