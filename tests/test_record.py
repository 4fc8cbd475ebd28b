"""Protects whoever reads the record or adds to it: figures of the present code, or a sentence."""

import copy
import json
import math
import re
import shutil
from unittest.mock import DEFAULT, patch

import blocks
import nbformat
import pytest
import record
import shared
import torch
import training

ROOT = shared.ROOT
KERNEL_US = {(2048, 8192): 20.0, (1024, 4096): 8.0, (4096, 14336): 50.0}  # mean 26
CPU_US = {"ours": 10.0, "floor": 6.0, "compiled[grid]": 14.0, "kernel[grid]": 28.0}
CPU_US |= {"Unsloth": 30.0, "Unsloth, buffer": 13.0, "three launches": 45.0, "PEFT": 80.0}
WITHOUT_A_RUN = "there is no run of the present code: tools/record.py check says what to do"


def entry_of(kind, data, gpu="NVIDIA H200"):
    """Return a made-up entry of the present code."""
    made = shared.entry(kind, data, gpu)
    made["versions"] |= {"unsloth": "2026.10.9", "peft": "0.21.0"}
    return made


def made_up_run(gpu="NVIDIA H200", unsloth_us=CPU_US["Unsloth"]):
    """Return the entry of a run in which every call takes its kernel's time and its CPU time."""
    cpu_us = CPU_US | {"Unsloth": unsloth_us}
    kernels = [
        {"shape": f"{rows} x {columns}", "dtype": dtype, "weights": rows * columns}
        | {"ours_us": us, "unsloth_us": us + 1, "copy_us": us}
        for dtype in ("fp16", "bf16")
        for (rows, columns), us in KERNEL_US.items()
    ]
    race = [
        {"dtype": dtype, "contender": contender, "us": [us + cpu for us in KERNEL_US.values()]}
        for dtype in ("fp16", "bf16")
        for contender, cpu in cpu_us.items()
    ]
    official = [
        {"dtype": dtype, "contender": contender, "seconds": seconds}
        for dtype, ratio in {"fp16": 1.4, "bf16": 1.5, "mix": 1.6}.items()
        for contender, seconds in {"ours": [0.25, 0.35], "Unsloth": [0.3 * ratio] * 2}.items()
    ]
    compared = [
        {"case": case, "path": path, "weights": weights, "differing": 0}
        for case, weights in {"a case": 1_000_000, "another": 234_567}.items()
        for path in ("kernel[grid]", "operator", "plan")
    ]
    data = {"kernels": kernels, "official": official, "race": race, "compared": compared}
    return entry_of("run", data | {"seconds": 120.0}, gpu)


OTHERS = {  # {kind of entry: made-up data}
    "training": [
        {"model": "a model", "state": "bf16", "tokens": "1 x 256", "stock_ms": 3.0, "ours_ms": 2.0}
    ],
    "rehearsal": {
        "as": "Tesla T4",
        "kernels": 50,
        "compared": [{"case": "a case", "path": "plan", "weights": 7_000, "differing": 0}],
    },
    "machine code": [
        {"triton": triton, "dtype": dtype, "absmax": "nested", "spills": 0, "ffma": 0}
        | {"instructions": instructions}
        for triton, dtype, instructions in (
            ("3.6.0", "float16", 270),
            ("3.6.0", "bfloat16", 341),
            ("3.9.0", "float16", 269),
            ("3.9.0", "bfloat16", 364),
        )
    ],
    "tests": {"gpus": 2, "passed": 300, "failed": 1, "skipped": 9},
}


def with_outputs(notebook, run):
    """Return an executed copy of the notebook, whose first cell displays the run's tables."""
    executed = copy.deepcopy(notebook)
    for cell in shared.code_cells(executed):
        cell.execution_count, cell.outputs = 1, []
    for table in blocks.tables(run):
        output = nbformat.v4.new_output("display_data", {"text/markdown": table})
        shared.code_cells(executed)[0].outputs.append(output)
    return executed


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return the folder of a copy of the project, without results."""
    folder = tmp_path / "project"
    (folder / "tools").mkdir(parents=True)
    files = ["README.md", "nf4_triton.ipynb", *sum(shared.FILES.values(), ())]
    for name in set(files):
        shutil.copy(ROOT / name, folder / name)
    monkeypatch.setattr(shared, "ROOT", folder)
    monkeypatch.setattr(shared, "NOTEBOOK", folder / "nf4_triton.ipynb")
    return folder


@pytest.fixture
def run_folder(tmp_path, project):
    return write_run(tmp_path / "run", made_up_run())


def write_run(folder, run):
    """Write what README's commands leave of this run, and return the folder."""
    notebook = nbformat.read(shared.NOTEBOOK, as_version=4)
    shared.write(folder / "nf4_triton.ipynb", nbformat.writes(with_outputs(notebook, run)))
    content = {name: run[name] for name in ("gpu", "host", "date", "versions")}
    shared.write(folder / "results" / "gpu.json", content | run["data"])
    return folder


def take_in(*entries):
    """Let tools/record.py take in entries that are no runs."""
    for entry in entries:
        path = shared.ROOT / "entry.json"
        shared.write(path, entry)
        record.main([str(path)])


def readme():
    return (shared.ROOT / "README.md").read_text(encoding="utf-8")


def test_notebook_and_readme_say_what_the_record_says():
    notebook = nbformat.read(shared.NOTEBOOK, as_version=4)
    stale = list(record.stale_blocks(notebook, shared.entries()))
    assert stale == []


def test_the_tables_of_the_latest_run_stand_in_the_notebooks_outputs():
    runs = shared.current("run")
    if not runs:
        pytest.skip(WITHOUT_A_RUN)
    assert record.not_shown(runs[-1], nbformat.read(shared.NOTEBOOK, as_version=4)) == []


def test_sentences_that_compare_hold_in_all_runs():
    """They stand in sections 3, 4 and 6, and under the table of the first screen."""
    runs = shared.current("run")
    if not runs:
        pytest.skip(WITHOUT_A_RUN)
    for run in runs:
        kernels, race = run["data"]["kernels"], run["data"]["race"]
        for row in kernels[: 2 * len(KERNEL_US)]:
            assert row["ours_us"] <= 1.06 * min(row["unsloth_us"], row["copy_us"]), row
        cpu = {name: us for name, (_, us) in blocks.notebook().parts(kernels, race).items()}
        names = ("Unsloth", "kernel[grid]", "compiled[grid]", "ours", "floor")
        steps = [cpu[name] for name in names]
        about_nothing, most, launcher, questions = (a - b for a, b in zip(steps, steps[1:]))
        assert abs(about_nothing) < 0.15 * cpu["Unsloth"], "about the same"
        assert most > max(about_nothing, launcher, questions), "saves the most"
        assert launcher > 0 and questions > 0


def test_the_first_screen_says_what_is_worked_out_by_hand():
    """A call of ours takes 26 + 10 µs in the mean of the mix, Unsloth's 26 + 30."""
    text = blocks.record_block([made_up_run()])
    text = re.sub(" +", " ", text)
    for words in (
        "| today's Unsloth (2026.10.9) | 1.56 | 1.56 | 1.56 |",
        "| today's Unsloth, by `test_dequantize` | 1.40 | 1.50 | 1.60 |",
        "| PEFT (0.21.0) | 2.94 |",
        "1,234,567 weights were dequantized on each of 3 paths",
        "compared with bitsandbytes' bits: 0 differ",
        "takes 27.0 µs where ours takes 26.0 µs",
        "29.0 µs in Unsloth's call, and 10.0 µs in ours",
        "the CPU time is 28.0 µs, and the call is only 1.04 times as fast",
    ):
        assert words in text
    assert "range of" not in text


def test_the_range_covers_all_runs_and_names_their_gpus():
    runs = [made_up_run("NVIDIA H100", unsloth_us=46.0), made_up_run(), made_up_run()]
    text = blocks.record_block(runs)
    assert "mix, range of 3 runs" in text and " 1.56 to 2.00 |" in text
    assert "NVIDIA H100 (1 run), NVIDIA H200 (2 runs)" in text
    assert "Over all recorded runs (3)" in blocks.t4_block(runs)


def test_readme_says_how_the_tests_ended_on_a_gpu():
    text = blocks.generated([entry_of("tests", OTHERS["tests"])])["tests"]
    assert "2 x NVIDIA H200: 300 passed, 1 failed and 9 were skipped" in text


def test_section_8_says_what_was_checked_without_a_t4():
    entries = [entry_of(kind, OTHERS[kind]) for kind in ("machine code", "rehearsal")]
    text = blocks.generated(entries)["checked"]
    for words in (
        "Triton 3.6.0, 3.9.0",
        "269 to 270 instructions in fp16 and 341 to 364 in bf16",
        "0 spilled bytes and 0 FMA instructions",
        "NVIDIA H200 that told torch it was a Tesla T4",
        "7,000 weights were compared on each of 1 paths, and 0 differ",
    ):
        assert words in text
    text = blocks.generated(entries[:1])["checked"]
    assert "There is no measurement of the present code" in text and "tools/t4.py rehearse" in text


STEPS = {  # {a made-up CPU time of Unsloth's calls: what it leaves of the steps}
    30.0: "any of",
    50.0: "the two highest of",
    80.0: "the highest of",
    90.0: "the whole range is above",
}


@pytest.mark.parametrize("unsloth_us", STEPS)
def test_the_first_screen_says_which_steps_a_t4_may_miss(unsloth_us):
    text = blocks.record_block([made_up_run(unsloth_us=unsloth_us)])
    assert f"today's Unsloth, {STEPS[unsloth_us]} the challenge's three steps" in text


def test_a_run_on_a_t4_takes_the_estimates_place_on_the_first_screen(tmp_path, project):
    write_run(tmp_path / "t4", made_up_run("Tesla T4"))
    record.main([str(tmp_path / "t4")])
    text = readme()
    assert "Measured on a Tesla T4" in text and "1.56 over today's Unsloth" in text
    assert "it misses none of the challenge's three steps" in text
    assert "nothing was measured" not in text and "we estimate" not in text


CHANGES = {  # {what was changed: (the table in the data, its rows, their field, the factor)}
    "the race's microseconds, tripled": ("race", slice(None), "us", 3),
    "a microsecond of the race": ("race", slice(8, 9), "us", 1.01),
    "a kernel's time": ("kernels", slice(4, 5), "ours_us", 1.1),
    "a copy's time": ("kernels", slice(1), "copy_us", 0.5),
    "the number of weights compared": ("compared", slice(1), "weights", 1000),
    "the seconds of a test": ("official", slice(1), "seconds", 0.004),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_figure_is_not_what_the_outputs_show(project, change):
    run = made_up_run()
    executed = with_outputs(nbformat.read(shared.NOTEBOOK, as_version=4), run)
    assert record.not_shown(run, executed) == []
    table, rows, field, factor = CHANGES[change]
    for row in run["data"][table][rows]:
        value = row[field]
        changed = [each * factor for each in value] if isinstance(value, list) else value * factor
        row[field] = changed
    assert record.not_shown(run, executed) != []


def test_a_run_is_taken_in_once_and_its_outputs_are_shown(run_folder, project):
    bar = nbformat.v4.new_output("stream", text="\rrounds: 100%|####| 50/50")
    executed = nbformat.read(run_folder / "nf4_triton.ipynb", as_version=4)
    shown = list(shared.code_cells(executed)[0].outputs)
    shared.code_cells(executed)[0].outputs.append(bar)
    shared.write(run_folder / "nf4_triton.ipynb", nbformat.writes(executed))
    for _ in range(2):
        record.main([str(run_folder)])
    (run,) = shared.current("run")
    assert run == made_up_run()
    notebook = nbformat.read(shared.NOTEBOOK, as_version=4)
    assert shared.code_cells(notebook)[0].outputs == shown
    assert " 1.56 |" in readme() and not list(record.stale_blocks(notebook, [run]))


def test_check_passes_where_all_is_of_the_present_code(run_folder, capsys):
    record.main([str(run_folder)])
    take_in(*(entry_of(kind, data) for kind, data in OTHERS.items()))
    record.main(["check"])
    assert "are of the present code" in capsys.readouterr().out


@pytest.mark.parametrize("code", ["0123456789abcdef", None], ids=["of other code", "no hash"])
@pytest.mark.parametrize("kind", shared.FILES)
def test_check_names_an_entry_of_other_code_and_its_command(project, kind, code):
    entries = [entry_of(each, data) for each, data in OTHERS.items()] + [made_up_run()]
    for entry in entries:
        if entry["kind"] == kind:
            entry["code"] = code
    shared.write(project / "results" / "record.json", entries)
    found = "\n".join(record.faults())
    assert f"{kind}: an entry (NVIDIA H200, " in found and shared.COMMANDS[kind] in found
    assert found.count(": an entry") == 1 and ": there is no entry" not in found


@pytest.mark.parametrize("kind", shared.FILES)
def test_check_names_a_kind_without_an_entry_and_its_command(project, kind):
    with pytest.raises(SystemExit, match=f"{kind}: there is no entry: ") as error:
        record.main(["check"])
    assert shared.COMMANDS[kind] in str(error.value)


EDITS = {  # {what is edited: (its file, the cell's id in a notebook, kinds that measure it)}
    "the integrations": ("nf4_integrations.py", None, {"training", "tests"}),
    "a tool that trains": ("tools/training.py", None, {"training"}),
    "a tool that rehearses": ("tools/t4.py", None, {"rehearsal"}),
    "a tool that compiles": ("tools/sm_75.py", None, {"machine code"}),
    "the kernel's cell": ("nf4_triton.ipynb", "kernel", set(shared.FILES)),
    "the race's cell": ("nf4_triton.ipynb", "race", {"run", "rehearsal", "tests"}),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_makes_the_entries_old_that_measured_it_but_a_comment_does_not(project, what):
    name, cell_id, kinds = EDITS[what]

    def append(text):
        if cell_id is None:
            path.write_text(f"{path.read_text()}\n{text}\n")
            return
        notebook = nbformat.read(path, as_version=4)
        [cell] = [cell for cell in notebook.cells if cell.id == cell_id]
        cell.source += f"\n\n{text}"
        nbformat.write(notebook, path)

    path, before = project / name, {kind: shared.code_of(kind) for kind in shared.FILES}
    append('def documented():\n    """A docstring."""\n    return 1')
    documented = {kind: shared.code_of(kind) for kind in shared.FILES}
    assert {kind for kind in before if documented[kind] != before[kind]} == kinds
    append("# a comment")
    path.write_text(path.read_text().replace("A docstring.", "Another docstring."))
    assert {kind: shared.code_of(kind) for kind in shared.FILES} == documented


def test_what_is_taken_in_drops_entries_of_other_code_of_its_kind_only(project):
    old = [entry_of(kind, data) | {"code": "other"} for kind, data in OTHERS.items()]
    shared.write(project / "results" / "record.json", old)
    new = entry_of("training", OTHERS["training"])
    take_in(new)
    assert shared.entries() == [each for each in old if each["kind"] != "training"] + [new]
    assert "a model" in readme() and " 1.50 |" in readme()


def edit_record(**fields):
    """Return a function that changes these fields of a run's record."""

    def edit(folder):
        path = folder / "results" / "gpu.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def edit_cell(**fields):
    """Return a function that changes these fields of a cell of a run's notebook."""

    def edit(folder):
        path = folder / "nf4_triton.ipynb"
        notebook = nbformat.read(path, as_version=4)
        shared.code_cells(notebook)[3].update(fields)
        nbformat.write(notebook, path)

    return edit


def edit_file(name, text):
    """Return a function that writes this text to a file of a run; None deletes it."""
    return lambda folder: (
        (folder / name).unlink() if text is None else (folder / name).write_text(text)
    )


ERROR = nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])
WRONG = [{"case": "a case", "path": "plan", "weights": 9, "differing": 1}]
ONLY_OURS = made_up_run()["data"]["race"][:1]
FASTER = made_up_run(unsloth_us=90.0)["data"]["race"]
REFUSED = {  # {what is wrong with a run: (what makes it so, the words of the sentence)}
    "another notebook's code": (edit_cell(source="x = 1"), "code differs.*run the notebook"),
    "a cell was not run": (edit_cell(execution_count=None), "was not run"),
    "a cell failed": (edit_cell(outputs=[ERROR]), "cell failed"),
    "wrong bits": (edit_record(compared=WRONG), "bits of 1 weights differ"),
    "no race": (edit_record(race=[]), "lacks race"),
    "no Unsloth in the race": (edit_record(race=ONLY_OURS), "no race against Unsloth"),
    "no host": (edit_record(host=""), "lacks host"),
    "another run's times": (edit_record(race=FASTER), "outputs do not show"),
    "a truncated record": (edit_file("results/gpu.json", '{"gpu": '), "cannot be read"),
    "no record": (edit_file("results/gpu.json", None), "expected nf4_triton.ipynb"),
    "a truncated notebook": (edit_file("nf4_triton.ipynb", "{"), "cannot be read"),
    "no notebook": (edit_file("nf4_triton.ipynb", None), "expected nf4_triton.ipynb"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_run_with_a_fault_is_refused_and_changes_nothing(run_folder, project, wrong):
    spoil, words = REFUSED[wrong]
    spoil(run_folder)
    before = {path: path.read_bytes() for path in project.rglob("*.*")}
    with pytest.raises(SystemExit, match=words):
        record.main([str(run_folder)])
    assert {path: path.read_bytes() for path in project.rglob("*.*")} == before


REFUSED_ENTRIES = {  # {what is wrong: (fields of the entry that are others, the words)}
    "of other code": ({"code": "other"}, "code differs.*run tools/training.py"),
    "without a hash": ({"code": None}, "lacks code: run tools/training.py"),
    "of an unknown kind": ({"kind": "estimate"}, "got the kind 'estimate'"),
    "a run without its notebook": ({"kind": "run"}, "expected the folder of a run"),
    "without a GPU": ({"gpu": None}, "without a GPU"),
}


@pytest.mark.parametrize("wrong", REFUSED_ENTRIES)
def test_an_entry_with_a_fault_is_refused_and_changes_nothing(project, wrong):
    fields, words = REFUSED_ENTRIES[wrong]
    with pytest.raises(SystemExit, match=words):
        take_in(entry_of("training", OTHERS["training"]) | fields)
    assert not (project / "results").exists()


@pytest.mark.parametrize("n_written", [0, 1, 2], ids=["at once", "notebook", "and README"])
def test_what_is_interrupted_leaves_the_record_as_it_was(run_folder, project, n_written):
    take_in(entry_of("training", OTHERS["training"]))
    before = (project / "results" / "record.json").read_bytes()
    outcomes = [DEFAULT] * n_written + [KeyboardInterrupt]
    with patch("shared.write", wraps=shared.write, side_effect=outcomes):
        with pytest.raises(KeyboardInterrupt):
            record.main([str(run_folder)])
    assert (project / "results" / "record.json").read_bytes() == before
    record.main([str(run_folder)])
    assert len(shared.entries()) == 2


def test_training_steps_with_other_results_are_not_recorded():
    results = iter([1.0, math.nan])
    with pytest.raises(SystemExit, match="results differ, or are not finite: nothing was written"):
        training.measure(
            {"model": "a model"}, lambda: [torch.tensor(next(results))], torch.no_grad, rounds=1
        )
