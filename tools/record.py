"""Runs the notebook, and keeps what is stated true to what was measured.

    python tools/record.py execute DIR          runs the notebook in DIR and leaves it there, on a
                                                GPU with its record
    python tools/record.py adopt DIR [DIR ...]  takes such runs in: outputs, record, pictures, and
                                                all that is stated
    python tools/record.py refresh              only states anew what stands in results/

All runs of a day on one GPU are adopted by one command. Each goes into the list of runs,
results/<gpu>-runs.json. The record, the outputs and the pictures that are shown are those of the
median run among the folders given, by its ratio over today's Unsloth in fp16 (of an even number,
the lower of the two in the middle). A run that had not its host to itself is listed with a note
that says so, and is not shown where another had. One marked "earlier" is of the notebook before
its last changes; no table counts it. Where anything speaks against one of the runs, it is said,
and nothing changes.

A run of Colab's is adopted the same way: put its notebook (as nf4_triton.ipynb) and its results/
into DIR. Four files may lie beside them: robustness.json (`pytest tests --tally FILE`), timed.json
(the same, of the tests that time something, run alone: its times are taken, and no others),
t4_rehearsal.json (`tools/rehearse_t4.py`) and note.txt, what else its host was doing.

Stated in markdown are tables, between <!-- record:start --> and <!-- record:end --> (`ladder` and
`variants`, of results/roads.json, likewise), and figures, between their place in results/, as in
<!-- =nvidia-h200/exact/checked -->, and <!-- / -->, with as many digits as stand there (of two
places with a colon between, the quotient). What lies between
<!-- unmeasured:start --> and <!-- unmeasured:end --> goes when a T4's run is adopted.
"""

import ast
import hashlib
import importlib
import json
import os
import re
import shlex
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "nf4_triton.ipynb"
README = ROOT / "README.md"
RESULTS = ROOT / "results"
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "original": "mix"}
BASELINES = {  # the rows of the table; a contender that does not exist on a machine has none
    "unsloth_today": "today's Unsloth ({unsloth})",
    "unsloth_buffer": "today's Unsloth, all results in one buffer",
    "unsloth_puzzle": "the three launches, Unsloth's older path",
    "peft": "PEFT ({peft})",
}
MEASURED = (
    "gpu capability date versions cpu cores exact formats bandwidth calls host official_s "
    "harness floor compile compile_times t4_estimate launches memory score"
).split()
PICTURES = ("formats", "calls", "race")  # <gpu>-formats.png and so on
FROM_TESTS = ("robustness", "timed", "t4_rehearsal")  # entries of the record beside a run
TIME = re.compile(r".*_(us|ms_.*)")  # the name of what a test timed
SILENT = ("install", "environment")  # cells that may have nothing to say
DEFINITION = re.compile(r"(# @title .*\n)?#\| export")  # how such a cell begins
FIGURE = re.compile(r"<!-- =(\S+) -->(.*?)<!-- / -->")
UNMEASURED = re.compile(r"<!-- unmeasured:start -->.*?<!-- unmeasured:end -->\n*", re.S)
INSTALL = "python3 -m venv .venv && .venv/bin/pip install -q papermill ipykernel"
NOTHING = "nothing was adopted"


def required(name):
    """The module; SystemExit says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        command = f"{INSTALL} && .venv/bin/python tools/record.py execute run"
        raise SystemExit(f"{sys.executable} has no {name}; run `{command}`") from None


nbformat = required("nbformat")


# Running.


def run(folder):
    """The notebook, executed in the folder and left there; SystemExit says what to repeat."""
    papermill, _ = required("papermill"), required("ipykernel")
    command = [sys.executable, str(Path(__file__).resolve()), "execute", str(folder)]
    columns = shutil.get_terminal_size().columns  # 80 where a terminal does not know its width
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            os.environ["TMPDIR"] = temporary  # for what the notebook, torch and Unsloth leave
            return papermill.execute_notebook(
                NOTEBOOK,
                folder / NOTEBOOK.name,
                cwd=folder,
                kernel_name="python3",
                coalesce_streams=True,
                # A bar that asked for the screen's rows would stay hidden where there are 0.
                progress_bar={"ascii": True, "ncols": max(20, columns - 1), "nrows": 24},
                # Else ipykernel begins with a warning about TCP, and ends an interrupted run with
                # a traceback of its own. What a cell prints or raises is in the notebook.
                extra_arguments=["--IPKernelApp.log_level=CRITICAL"],
            )
    except papermill.PapermillExecutionError as error:
        what = f"failed: cell {error.cell_index}: {error.ename}: {error.evalue}"
    except KeyboardInterrupt:
        what = "interrupted"
    except Exception as error:  # a full disk, a kernel that died
        what = f"failed: {type(error).__name__}: {error}"
    raise SystemExit(f"\n{what}\nto run it again: {shlex.join(command)}")


def execute(folder):
    """Runs the notebook and says what came of it."""
    notebook = run(folder)
    paths = list((folder / "results").glob("*.json"))
    for path in paths:
        record = json.loads(path.read_text())
        if missing := lacking(record):  # no race against today's Unsloth, say
            print(f"\n{path.name} lacks {', '.join(missing)}: no table\n")
        else:
            print(f"\n{record_table([(record, [summary(record)])])}\n")
        print(f"launches are kept: {record['host']['kept']}")
        for row in record["compile"]:
            print("torch.compile:", ", ".join(f"{name} {value}" for name, value in row.items()))
    if not paths:
        for line in texts(notebook).splitlines():
            if "differ" in line:
                print(line)
        print("No GPU: no speed is claimed.")
    print(f"\nexecuted: {folder / NOTEBOOK.name}", *(f"record: {path}" for path in paths))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook):
    """What the cells printed."""
    found = []
    for cell in code_cells(notebook):
        found += [output.get("text", "") for output in cell.outputs]
    return "".join(found)


# What is stated.


def slug(gpu):
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower())


def load_all():
    """{name: what results/<name>.json holds}"""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def records(results):
    """The record of each GPU: a T4's first, then those of GPUs on which the tests were run.

    A record with a `commit` is of the notebook as it was then; no table shows it.
    """

    def place(record):
        return "T4" not in record["gpu"], "robustness" not in record, record["gpu"]

    current = [found for found in results.values() if "harness" in found and "commit" not in found]
    return sorted(current, key=place)


def summary(record):
    """A run in a few figures, for the list of runs."""
    ratios = {}
    for entry in record["harness"]:
        ratios.setdefault(entry["baseline"], {})[entry["dtypes"]] = entry["ratio"]["median"]
    found = {name: record[name] for name in ("date", "cpu", "cores")} | {"ratios": ratios}
    return found | {name: record[name] for name in ("host", "official_s")}


def is_listed(found, runs):
    """Whether a run's summary is in the list, whatever note it has there."""
    return any(found.items() <= run.items() for run in runs)


def record_table(shown):
    """A markdown table: a row for each of the BASELINES that was raced, three columns for each GPU.

    shown  (record, list of all runs on its GPU) of each; a cell is the range over those of this
           notebook
    """
    shown = [(record, [run for run in runs if "earlier" not in run]) for record, runs in shown]
    titles = ["speedup over"]
    rows = {}
    for baseline, title in BASELINES.items():
        named = [title.format(**record["versions"]) for record, _ in shown]
        rows[baseline] = [" or ".join(dict.fromkeys(named))]  # versions may differ
    for record, runs in shown:
        all_runs = [summary(record), *others_than(record, runs)]
        titles += [f"{short_name(record['gpu'])} {dtype}" for dtype in DTYPES.values()]
        for baseline, row in rows.items():
            with_it = [run["ratios"][baseline] for run in all_runs if baseline in run["ratios"]]
            row += [spread([run[dtype] for run in with_it]) for dtype in DTYPES]
    raced = [row for row in rows.values() if any(row[1:])]
    today = rows["unsloth_today"][0]
    rows["unsloth_today"][0] = f"{today}, taking turns"
    by_the_harness = [f"{today}, one `test_dequantize` after the other"]
    for record, runs in shown:
        all_runs = [summary(record), *others_than(record, runs)]
        by_the_harness += [official_spread(all_runs, dtype) for dtype in DTYPES]
    table = markdown_table(titles, [by_the_harness, *raced])
    return "\n\n".join([table, *(told_of(record, runs) for record, runs in shown)])


def told_of(record, runs):
    """What stands below the table of each GPU."""
    exact = record["exact"]
    host = f"{record['cpu']}, {record['cores']} cores"
    told = f"**{name_of(record)}**, {record['date']}, {host}:"
    told += f" {exact['checked']:,} weights compared bit for bit, {exact['differing']} differ."
    if record.get("median_of") and len(runs) > 1:
        noted = [run for run in runs if "note" in run]
        alone = bool(noted) and not is_listed(summary(record), noted)
        shown = rule(record["median_of"], alone, listed=len(runs))
        told += f" Ranges are of the medians of {len(runs)} runs; the outputs are of {shown}."
    return told


def short_name(gpu):
    """NVIDIA H100 80GB HBM3 is an H100."""
    return re.sub(r"^(NVIDIA|Tesla) ", "", gpu).split()[0]


def name_of(record):
    if record.get("rehearsed"):
        return f"{record['gpu']}, only rehearsed on {record['rehearsed_on']}"
    return record["gpu"]


def others_than(record, runs):
    return [run for run in runs if not is_listed(summary(record), [run])]


def spread(ratios):
    """One figure, or the range of several; nothing of none."""
    if not ratios:
        return ""
    least, greatest = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return least if least == greatest else f"{least}–{greatest}"


def official_spread(runs, dtype):
    """Today's Unsloth over ours, by test_dequantize: each run's median of its turns' ratios."""
    return spread([statistics.median(turns) for turns in official_ratios(runs, dtype)])


def official_ratios(runs, dtype):
    """For each run, the ratios of its turns of test_dequantize in this dtype."""
    found = []
    for run in runs:
        found.append([row["ratio"] for row in run["official_s"] if row["dtype"] == dtype])
    return found


def rule(n_runs, alone, listed):
    """Which run is shown, of n_runs.

    alone   other runs had not their host to themselves
    listed  how many runs there are in all, with those of other days
    """
    if n_runs == 1:
        return "the one alone on its host" if alone else "the last"
    which = "lower" if n_runs == 2 else "middle"
    those = f"the last {n_runs}" if listed > n_runs else f"the {n_runs}"
    if alone:
        those = f"the {n_runs} alone on their host"
    return f"the one with the {which} fp16 speedup of {those}"


def ladder_table(roads, variants=False):
    """The steps to the kernel as a markdown table, in the order in which they were measured; or
    ours and its variants, which follow."""
    facts, steps = {}, []
    for row in roads["rows"]:
        facts[row["step"], row["dtype"]] = row
        if row["step"] not in steps:
            steps.append(row["step"])
    titles = ["step", "% of the ceiling, fp16", "bf16", "T4 instructions, fp16", "bf16"]
    if not variants:
        titles.append("what it taught")
    rows = []
    after_ours = next(i for i, step in enumerate(steps, 1) if step.endswith(": ours"))
    for step in steps[after_ours - 1 :] if variants else steps[:after_ours]:
        both = [facts.get((step, dtype), {}) for dtype in ("float16", "bfloat16")]
        shares = [
            f"{100 * row['ceiling_us'] / row['us']:.0f}" if row.get("us") else "" for row in both
        ]
        counts = [row.get("sm_75_instructions") for row in both]
        counts = ["" if count is None else f"{count:.1f}" for count in counts]
        taught = [] if variants else [roads["taught"].get(step, "")]
        rows.append([step, *shares, *counts, *taught])
    return markdown_table(titles, rows)


def markdown_table(titles, rows):
    """Columns of numbers, or of ranges, stand at the right, words at the left."""
    rules = []
    for column in zip(*rows):
        numbers = all(re.fullmatch(r"[\d.–]*", cell) for cell in column) and any(column)
        rules.append("---:" if numbers else ":---")
    lines = [titles, rules, *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def figure(found, results):
    """A figure's mark with what stands at its place in results/, with as many digits as before.

    A place of the form a:b is the quotient of what stands at a and at b.
    """
    place, stated = found[1], found[2]
    values = [at_place(part, stated, results) for part in place.split(":")]
    value = values[0] / values[1] if len(values) == 2 else values[0]
    if isinstance(value, float):
        digits = len(stated.partition(".")[2])
        value = f"{value:,.{digits}f}"
    elif not isinstance(value, str):
        value = f"{value:,}"
    return f"<!-- ={place} -->{value}<!-- / -->"


def at_place(place, stated, results):
    value = results
    try:
        for key in place.split("/"):
            value = value[int(key)] if isinstance(value, list) else value[key]
    except (LookupError, TypeError, ValueError):
        raise LookupError(f"results/ has nothing at {place}, which is stated as {stated}") from None
    return value


def restated(text, results):
    """A markdown text with its tables and figures as they are recorded."""
    found = records(results)
    for name in ("record", "ladder", "variants"):
        start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
        if start not in text:
            continue
        if name == "record":
            runs = [results[f"{slug(each['gpu'])}-runs"] for each in found]
            tables = [record_table(list(zip(found, runs)))]
        else:
            tables = [ladder_table(results["roads"], variants=name == "variants")]
        table = "\n\n".join(tables)
        text = f"{text.split(start)[0]}{start}\n{table}\n{end}{text.split(end)[1]}"
    if any("T4" in record["gpu"] for record in found):
        text = UNMEASURED.sub("", text)
    return FIGURE.sub(lambda mark: figure(mark, results), text)


def stated_files(notebook, results):
    """{path: contents} of the documents; the notebook's markdown is changed in place."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = restated(cell.source, results)
    readme = restated(README.read_text(), results)
    return {NOTEBOOK: (nbformat.writes(notebook) + "\n").encode(), README: readme.encode()}


def refresh():
    try:
        write(stated_files(nbformat.read(NOTEBOOK, as_version=4), load_all()))
    except (LookupError, OSError) as error:
        raise SystemExit(f"{said(error)}: nothing was changed") from None


def write(files):
    """Writes all or nothing: first beside each file, then in its place."""
    unfinished = {path.with_name(path.name + ".tmp"): path for path in files}
    try:
        for path, final in unfinished.items():
            path.write_bytes(files[final])
    except OSError:
        for path in unfinished:
            path.unlink(missing_ok=True)
        raise
    for path, final in unfinished.items():
        path.replace(final)


def said(error):
    """An error's text; a KeyError's is the key alone."""
    return f"no {error}" if isinstance(error, KeyError) else str(error)


# Taking runs in.


def code_hash(cell):
    """Of what a cell's code and its marks (#| export) say, not of its layout and other comments."""
    marks = re.findall(r"^#\|.*", cell.source, re.M)
    code = structure(ast.parse(cell.source))
    return hashlib.sha256(repr((marks, code)).encode()).hexdigest()[:16]


def structure(node):
    """A syntax tree as tuples, without what is empty, where Python's versions differ."""
    if isinstance(node, list):
        return [structure(each) for each in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
    return type(node).__name__, [(name, structure(value)) for name, value in fields]


def code_hashes(notebook):
    """{cell id: hash} of the code cells."""
    return {cell.id: code_hash(cell) for cell in code_cells(notebook)}


class Run:
    """What a run left in a folder; ValueError for what cannot be read."""

    def __init__(self, folder):
        self.folder = folder
        found = list((folder / "results").glob("*.json"))
        if len(found) != 1 or not (folder / NOTEBOOK.name).exists():
            raise ValueError(f"expected {NOTEBOOK.name} and one results/*.json")
        self.name = found[0].stem
        self.record = readable(found[0])
        note = folder / "note.txt"
        self.note = {"note": note.read_text().strip()} if note.exists() else {}
        self.beside = {}
        for entry in FROM_TESTS:
            if (folder / f"{entry}.json").exists():
                self.beside[entry] = without_the_others(entry, readable(folder / f"{entry}.json"))
        self.pictures = [folder / "results" / f"{self.name}-{kind}.png" for kind in PICTURES]
        try:
            self.notebook = nbformat.read(folder / NOTEBOOK.name, as_version=4)
        except Exception as error:  # nbformat has many kinds
            raise ValueError(f"{NOTEBOOK.name} cannot be read: {type(error).__name__}") from None


def without_the_others(entry, found):
    """Of tests that were run in parallel only the counts, of those that were timed only times."""
    if entry == "robustness":
        return {name: value for name, value in found.items() if not TIME.fullmatch(name)}
    if entry == "timed":
        origin = ("gpu", "date")
        times = {name: value for name, value in found.items() if TIME.fullmatch(name)}
        return {name: found.get(name) for name in origin} | times
    return found


def readable(path):
    """The object in a JSON file."""
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path.name} is not complete JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return value


def lacking(record):
    """The entries of a complete record that this one has not."""
    needed = set(MEASURED)
    if "T4" in record.get("gpu", ""):
        needed.discard("t4_estimate")  # it was measured
    if not record.get("host", {}).get("kept"):
        needed.discard("floor")  # there is no bare call to compare with
    return sorted(needed - set(record))


def objections(run, notebook, listed, rehearsed):
    """A sentence for all that speaks against taking this run in."""
    yield from objections_to_outputs(run, notebook)
    record = run.record
    if missing := lacking(record):
        yield f"{run.name}.json lacks {', '.join(missing)}"
        return
    if run.name != slug(record["gpu"]):
        yield f"{run.name}.json is the record of a {record['gpu']}"
    if record.get("rehearsed") and not rehearsed:
        yield "it is only a rehearsal"
    if record["exact"]["differing"] or not record["exact"]["checked"]:
        yield "of {checked:,} weights {differing:,} differ".format(**record["exact"])
    if "total" not in record["score"]:
        yield "its score has no total"
    found = summary(record)
    for baseline in {"unsloth_today", *found["ratios"]}:
        if unraced := set(DTYPES) - set(found["ratios"].get(baseline, ())):
            yield f"no race against {baseline} in {', '.join(sorted(unraced))}"
    if is_listed(found, listed):
        yield "it is adopted already"
    for picture in run.pictures:
        if not picture.exists() or not picture.stat().st_size:
            yield f"no picture results/{picture.name}"


def objections_to_outputs(run, notebook):
    """Cells are told apart by their places: Colab saves no ids."""
    done, cells = code_cells(run.notebook), code_cells(notebook)
    if list(map(code_hash, done)) != list(map(code_hash, cells)):
        yield "the executed notebook's code differs from the repository's: run it again"
        return
    unfinished, silent = [], []
    for cell, executed in zip(cells, done):
        failed = any(output.output_type == "error" for output in executed.outputs)
        definition = DEFINITION.match(cell.source)
        if failed or not executed.execution_count:
            unfinished.append(cell.id)
        elif not definition and cell.id not in SILENT and not executed.outputs:
            silent.append(cell.id)
    if unfinished:
        yield f"these cells were not run, or failed: {', '.join(unfinished)}"
    if silent:
        yield f"the outputs of these cells are missing: {', '.join(silent)}"


def adopt(*folders, rehearsed=False):
    """Takes runs in, or says what is wrong and changes nothing. `rehearsed`: for a test's copy."""
    notebook, results = nbformat.read(NOTEBOOK, as_version=4), load_all()
    runs, listed, wrong = [], [], []
    for folder in folders:
        try:
            run = Run(folder)
            listed = listed or list(results.get(f"{run.name}-runs", []))
            wrong += [f"{folder}: {what}" for what in objections(run, notebook, listed, rehearsed)]
            listed.append(summary(run.record) | run.note)
            runs.append(run)
        except ValueError as error:
            wrong.append(f"{folder}: {error}")
        except (LookupError, TypeError, AttributeError) as error:
            wrong.append(
                f"{folder}: its record is not as expected: {type(error).__name__}, {said(error)}"
            )
    if len({run.name for run in runs}) > 1:
        wrong.append("the runs are of different GPUs: adopt those of each by a command of its own")
    if wrong:
        raise SystemExit("\n".join([*wrong, NOTHING]))
    alone = with_a_host_of_their_own(runs)
    shown = median_run(alone)
    try:
        files = files_of(shown, len(alone), runs, listed, notebook, results)
        write(files)
    except (LookupError, TypeError, ValueError, OSError) as error:
        raise SystemExit(f"{type(error).__name__}: {said(error)}\n{NOTHING}") from None
    gpu = shown.record["gpu"]
    print(f"adopted: {len(runs)} runs on {gpu}; {len(listed)} are recorded now")
    ratio = over_todays_unsloth(summary(shown.record))
    which = rule(len(alone), len(alone) < len(runs), len(listed))
    print(f"shown is {shown.folder}, {ratio:.3f}: {which}")


def over_todays_unsloth(found):
    """A summary's ratio in fp16."""
    return found["ratios"]["unsloth_today"]["float16"]


def median_run(runs):
    """By the ratio over today's Unsloth in fp16; the lower of two in the middle."""

    def ratio(run):
        return over_todays_unsloth(summary(run.record))

    return sorted(runs, key=ratio)[(len(runs) - 1) // 2]


def with_a_host_of_their_own(runs):
    """The runs that may be shown: those without a note, or all where each has one."""
    return [run for run in runs if not run.note] or runs


def files_of(shown, median_of, runs, listed, notebook, results):
    """{path: contents} of all that changes when these runs are taken in."""
    record = shown.record | {"median_of": median_of}
    before = results.get(shown.name, {})
    record |= {entry: before[entry] for entry in FROM_TESTS if entry in before}
    for run in runs:
        record |= run.beside
    changed = {shown.name: record, f"{shown.name}-runs": listed}
    for cell, executed in zip(code_cells(notebook), code_cells(shown.notebook)):
        cell.outputs, cell.execution_count = executed.outputs, executed.execution_count
    notebook.metadata["record"] = {"cells": code_hashes(notebook)}
    files = stated_files(notebook, results | changed)
    for name, value in changed.items():
        files[RESULTS / f"{name}.json"] = (json.dumps(value, indent=1) + "\n").encode()
    for picture in shown.pictures:
        files[RESULTS / picture.name] = picture.read_bytes()
    return files


def main(arguments):
    step, *given = arguments or [""]
    folders = [Path(folder).resolve() for folder in given]
    if step == "execute" and len(folders) == 1:
        execute(*folders)
    elif step == "adopt" and folders:
        adopt(*folders)
    elif step == "refresh" and not folders:
        refresh()
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
