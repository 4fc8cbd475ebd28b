"""The texts that tools/record.py computes from the record and puts into the notebook and README."""

import collections
import functools
import math
import re
import statistics

import pandas as pd
import shared

DTYPES = ("fp16", "bf16", "mix")
ROWS = {  # of the first table: {contender: what the reader sees}
    "Unsloth": "today's Unsloth ({unsloth})",
    "Unsloth, buffer": "Unsloth into its own buffer, as in its forward passes",
    "three launches": "Unsloth's older path, three launches",
    "PEFT": "PEFT ({peft})",
}
IN_THE_TEST = "today's Unsloth, by `test_dequantize`"
STEPS = (1.05, 1.10, 1.15)  # speedups for which the challenge gives points
THE_STEPS = "the challenge's three steps (1.05, 1.10 and 1.15)"
HOW_TO_READ = (
    "A speedup is the time of the other function divided by the time of ours, for one call in the "
    "challenge's timed loop. *mix* is the challenge's own choice of dtypes: one shape in fp16 and "
    "two in bf16. The second row is what our rewrite of the challenge's test gave, from two runs "
    "of each function. All other rows are from a race in which the functions take turns, so that a "
    "drift of the host's speed meets them all (section 6)."
)
ESTIMATED = {
    "Unsloth": "today's Unsloth",
    "Unsloth, buffer": "Unsloth into its buffer",
    "three launches": "the three launches",
}


@functools.cache
def notebook():
    """Return the notebook's definitions, in a module that nobody else uses."""
    return shared.load("nf4_record")


def record_of(run):
    """Return a run's entry as what the notebook's functions take, its RECORD."""
    return {"gpu": run["gpu"], **run["data"]}


def tables(run):
    """Return the Markdown of the tables that the notebook's own functions display for a run."""
    module, found, record = notebook(), [], record_of(run)
    module.display = lambda markdown: found.append(markdown.data)
    shows = [module.show_kernels, module.show_comparison, module.show_official, module.show_race]
    if not is_t4(run):
        shows.append(module.show_estimate)
    for show in shows:
        show(record)
    return found


def is_t4(run):
    return "T4" in run["gpu"]


def speedups(run):
    return notebook().speedups(run["data"]["race"])


def estimates(runs):
    """Return the rows of the estimates for a T4 from all these runs."""
    return [
        row
        for run in runs
        if not is_t4(run)
        for row in notebook().estimate_t4(run["data"]["kernels"], run["data"]["race"])
    ]


def markdown(rows):
    """Return a Markdown table of texts. Those that are numbers, or ranges, stand at the right."""
    table = pd.DataFrame(rows)
    numbers = [
        all(re.fullmatch(r"[\d.]+( (to|x) [\d.]+)?", text) for text in table[name])
        for name in table
    ]
    sides = ["right" if is_number else "left" for is_number in numbers]
    return table.to_markdown(index=False, disable_numparse=True, colalign=sides)


def from_to(values, text="{:.2f} to {:.2f}"):
    return text.format(min(values), max(values))


def ranges_over(estimated):
    """Return "1.1 to 1.2 over today's Unsloth, ..." for the rows of estimates."""
    ranges = {name: from_to([row["over"][name] for row in estimated]) for name in ESTIMATED}
    return ", ".join(f"{ranges[name]} over {label}" for name, label in ESTIMATED.items())


def counted(names):
    """Return "A (2 runs), B (1 run)" for a list of names."""
    counts = collections.Counter(names).items()
    return ", ".join(f"{name} ({n} run{'s' * (n > 1)})" for name, n in counts)


def record_block(runs):
    """Return the first screen's text, for the latest of the runs."""
    run = runs[-1]
    of_all = list(map(speedups, runs))
    rows = []
    for contender, label in ROWS.items():
        if contender not in of_all[-1]:
            continue
        over = [each[contender] for each in of_all if contender in each]
        rows.append(record_row(label.format(**run["versions"]), over, len(runs)))
    rows.insert(1, record_row(IN_THE_TEST, list(map(speedups_in_the_test, runs)), len(runs)))
    items = [origin(runs), correctness(run), where_from(run), on_a_t4(runs)]
    return "\n\n".join([markdown(rows), HOW_TO_READ, "\n".join(f"* {item}" for item in items)])


def record_row(label, over, n_runs):
    """Return a row of the first table, for {dtype: speedup} of each run, the latest last."""
    row = {"speedup over": label} | {dtype: f"{over[-1][dtype]:.2f}" for dtype in DTYPES}
    if n_runs > 1:
        row[f"mix, range of {n_runs} runs"] = from_to([each["mix"] for each in over])
    return row


def origin(runs):
    run = runs[-1]
    text = "**Where it was measured:** this run was made on {date} with the GPU {gpu} and the host "
    text += "{host}. It used torch {torch}, Triton {triton} and bitsandbytes {bitsandbytes}."
    text = text.format(**run, **run["versions"])
    if len(runs) > 1:
        text += " The range is over all recorded runs of this code, none left out: "
        text += f"{counted(each['gpu'] for each in runs)}."
    return text


def correctness(run):
    compared = pd.DataFrame(run["data"]["compared"])
    by_path = compared.groupby("path", sort=False)["weights"].sum()
    text = f"**Is it right?** {by_path.iloc[0]:,} weights were dequantized on each of "
    text += f"{len(by_path)} paths through our code, and compared with bitsandbytes' bits: "
    text += f"{compared['differing'].sum():,} differ (section 5)."
    return text


def speedups_in_the_test(run):
    return notebook().official_speedups(run["data"]["official"])


def where_from(run):
    us = notebook().parts(run["data"]["kernels"], run["data"]["race"])
    (theirs, theirs_cpu), (ours, ours_cpu) = us["Unsloth"], us["ours"]
    usual, usual_cpu = us["kernel[grid]"]
    ratio = (theirs + theirs_cpu) / (usual + usual_cpu)
    return (
        "**Where the speedup comes from:** today's Unsloth is one fused kernel, too. Its kernel "
        f"takes {theirs:.1f} µs where ours takes {ours:.1f} µs (mean over the mix, section 3). The "
        "difference is in the CPU time, which is the time of a call in the race minus the time of "
        f"its kernel: {theirs_cpu:.1f} µs in Unsloth's call, and {ours_cpu:.1f} µs in ours. When "
        f"our kernel is launched with `kernel[grid]`, Triton's usual way, the CPU time is "
        f"{usual_cpu:.1f} µs, and the call is only {ratio:.2f} times as fast as Unsloth's. Our "
        "call needs functions that are private to torch; where one is missing, it is slower than "
        "Unsloth's (section 4)."
    )


def on_a_t4(runs):
    """Return what the latest run on a T4 gave, or the estimate if there is no such run."""
    measured = [run for run in runs if is_t4(run)]
    if measured:
        run = measured[-1]
        ratios = {name: over["mix"] for name, over in speedups(run).items() if name in ROWS}
        over = ", ".join(f"{ratio:.2f} over {ROWS[name]}" for name, ratio in ratios.items())
        text = (
            f"**Measured on a Tesla T4** on {run['date']} with the host {run['host']}: the mix's "
        )
        text += f"speedup is {over.format(**run['versions'])}. "
        n_missed = sum(ratios["Unsloth"] < step for step in STEPS)
        missed = ("none", "the highest", "the two highest", "all")[n_missed]
        return f"{text}Against today's Unsloth, it misses {missed} of {THE_STEPS}."
    rows = estimates(runs)
    lowest = min(row["over"]["Unsloth"] for row in rows)
    text = "**On a Tesla T4** nothing was measured, because we had none. From the times of the "
    text += f"recorded runs we estimate speedups there (section 8): {ranges_over(rows)}. Against "
    n_missed = sum(lowest < step for step in STEPS)
    if n_missed == 0:
        return f"{text}today's Unsloth, the whole range is above {THE_STEPS}."
    missed = ("the highest", "the two highest", "any")[n_missed - 1]
    return f"{text}today's Unsloth, {missed} of {THE_STEPS} may be missed."


def n_calls(run):
    """Return how many calls the tests and the race of a run made."""
    n_tests = 1 + sum(len(row["seconds"]) for row in run["data"]["official"])  # 1 is not counted
    return n_tests * 9000 + len(run["data"]["race"]) * 3 * 50 * 100 * 3  # shapes, rounds, loops


def t4_block(runs):
    """Return the text after the estimate's table in section 8."""
    estimated = estimates(runs)
    if not estimated:
        return "All recorded runs were made on a Tesla T4, so nothing has to be estimated."
    others = [run for run in runs if not is_t4(run)]
    hosts = counted(f"{run['gpu']} with {run['host']}" for run in others)
    text = f"**Over all recorded runs ({len(others)}),** each estimated from its own times, the "
    text += f"speedups on a T4 are {ranges_over(estimated)}. The runs were made on these hosts: "
    text += f"{hosts}."
    of_run = estimates(runs[-1:])
    if of_run:
        took = runs[-1]["data"]["seconds"] / 60
        module = notebook()
        n_bytes = (
            n_calls(runs[-1])
            * statistics.mean(map(math.prod, module.SHAPES))
            * module.BYTES_PER_WEIGHT
        )
        moving = n_bytes / module.COPY_BYTES_PER_S / 60
        minutes = [took * row["factor"] + moving for row in of_run]
        text += f" *Run all* took {took:.1f} minutes here. On a T4 it may take "
        text += from_to(minutes, "{:.0f} to {:.0f} minutes: ")
        text += "this time multiplied by the table's factors, and "
        text += f"{moving:.0f} minutes more for the bytes that the calls of one run move."
    return text


def checked_block(machine_code, rehearsals):
    """Return what could be checked without a T4: the machine code, and the notebook's rehearsal.

    Both are entries of the record, of which the latest counts.
    """
    rows = pd.DataFrame(machine_code[-1]["data"]).query("absmax == 'nested'")
    counts = rows.groupby("dtype", sort=False)["instructions"].agg(["min", "max"])
    fp16, bf16 = counts.loc["float16"], counts.loc["bfloat16"]
    worst = rows[["spills", "ffma"]].max()
    text = "What we could check without one:\n\n* The kernel compiles for sm_75, the T4's "
    text += f"architecture, with Triton {', '.join(rows['triton'].unique())}. For the 16 weights "
    text += (
        f"of a thread, the machine code has {fp16['min']} to {fp16['max']} instructions in fp16 "
    )
    text += f"and {bf16['min']} to {bf16['max']} in bf16, with {worst['spills']} spilled bytes "
    text += f"and {worst['ffma']} FMA instructions."
    entry = rehearsals[-1]
    compared = pd.DataFrame(entry["data"]["compared"])
    weights = compared.groupby("path")["weights"].sum().iloc[0]
    text += f"\n* On {entry['date']} an {entry['gpu']} that told torch it was a Tesla T4 ran this "
    text += (
        f"whole notebook. Triton compiled all {entry['data']['kernels']} kernels for sm_75, and "
    )
    text += f"the driver ran their PTX. {weights:,} weights were compared on each of "
    text += f"{compared['path'].nunique()} paths, and {compared['differing'].sum()} differ."
    return text


def tests_block(tests):
    """Return README's sentence on the tests, from the latest tally."""
    text = (
        "On {date} the tests ran on {gpus} x {gpu}: {passed} passed, {failed} failed and {skipped} "
    )
    text += "were skipped, which are for other machines."
    return text.format(**tests[-1], **tests[-1]["data"])


def training_block(training):
    """Return README's table of training times, from the latest entry."""
    entry, rows = training[-1], []
    for row in entry["data"]:
        line = {"a training step of": row["model"], "`quant_state.dtype`": row["state"]}
        line |= {"tokens": row["tokens"], "stock, ms": f"{row['stock_ms']:.2f}"}
        line |= {"ours, ms": f"{row['ours_ms']:.2f}"}
        rows.append(line | {"stock / ours": f"{row['stock_ms'] / row['ours_ms']:.2f}"})
    gained = [row["stock_ms"] / row["ours_ms"] for row in entry["data"]]
    text = "*stock* is bitsandbytes or Unsloth as it is, *ours* is the same step inside "
    text += "`in_bitsandbytes()` or `in_unsloth()`. Both took turns, and a time is the median. "
    text += "Their results have the same bits. It was measured on {date} with the GPU {gpu} and "
    text += "the host {host}; compare within a row, because the host's speed drifts."
    text = text.format(**entry)
    if min(gained) < 1.01:
        text += " Where the ratio is about 1 or below, nothing is gained."
    return f"{markdown(rows)}\n\n{text}"


BLOCKS = {  # {name: (the kinds of entries that it needs, what writes it from those)}
    "record": (("run",), record_block),
    "t4": (("run",), t4_block),
    "checked": (("machine code", "rehearsal"), checked_block),
    "tests": (("tests",), tests_block),
    "training": (("training",), training_block),
}


def generated(entries):
    """Return {name of a block: its text} for the current ones among these entries."""
    found = {}
    for name, (kinds, write) in BLOCKS.items():
        current = {kind: shared.current(kind, entries) for kind in kinds}
        missing = [kind for kind in kinds if not current[kind]]
        if missing:
            nothing = "There is no measurement of the present code. To make one, {}."
            found[name] = nothing.format(shared.COMMANDS[missing[0]])
        else:
            found[name] = write(*current.values())
    return found


def with_blocks(text, found):
    """Return the text with {name: block} between the marks of each name."""
    for name, block in found.items():
        between = re.compile(rf"(<!-- {name}:start -->\n).*?(<!-- {name}:end -->)", re.S)
        text = between.sub(lambda mark: f"{mark[1]}{block}\n{mark[2]}", text)
    return text
