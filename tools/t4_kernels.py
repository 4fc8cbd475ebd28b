"""Our kernel and today's Unsloth's as code for a T4, on a newer NVIDIA GPU: how near does each come
to that GPU's traffic ceiling?

    python tools/t4_kernels.py FILE    writes JSON: the times, and the shares at 8192 x 28672

They are timed in a process in the rehearsal's disguise (tools/rehearse_t4.py): Triton compiles for
sm_75, and the driver translates the PTX for the real card. No time is a T4's.
"""

import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "tools")]

import rehearse_t4  # noqa: E402

NAMES = ("ours_us", "unsloth_today_us", "ceiling_us", "copy_us")


def time_in_disguise():
    """Prints the rows of time_formats for the harness's shapes and the largest, in 16 bits."""
    import unsloth.kernels.utils  # before transformers

    # isort: split
    import helpers

    nf4 = helpers.load()
    nf4.FORMATS, nf4.DTYPES = nf4.FORMATS[:4], nf4.DTYPES[:2]
    rows = nf4.time_formats(unsloth.kernels.utils.fast_dequantize)
    print(json.dumps(rows))


def in_disguise():
    """The rows that such a process prints. RuntimeError where a kernel was not for sm_75."""
    with tempfile.TemporaryDirectory(prefix="t4-", ignore_cleanup_errors=True) as scratch:
        environment = rehearse_t4.environment(Path(scratch))
        command = [sys.executable, __file__, "--in-disguise"]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        kernels = rehearse_t4.cached_kernels(Path(scratch))
    if done.returncode:
        raise RuntimeError(f"it ended with {done.returncode}: {done.stdout[-2000:]}")
    wrong = rehearse_t4.objections(kernels)
    if wrong:
        raise RuntimeError(wrong[0])
    return json.loads(done.stdout.splitlines()[-1])


def result(rows, gpu):
    """What is written. Shares of the ceiling: {dtype: {ours, unsloth_today}}."""
    found = {"gpu": gpu, "as": rehearse_t4.T4.name, "date": datetime.date.today().isoformat()}
    for row in rows:
        if row["format"] == rehearse_t4.LARGEST:
            shares = {}
            for who in ("ours", "unsloth_today"):
                shares[who] = round(row["ceiling_us"] / row[f"{who}_us"], 3)
            found[row["dtype"]] = shares
    found["rows"] = []
    for row in rows:
        times = {name: round(row[name], 3) for name in NAMES}
        found["rows"].append({"format": row["format"], "dtype": row["dtype"]} | times)
    return found


def main(arguments):
    if arguments == ["--in-disguise"]:
        return time_in_disguise()
    card = rehearse_t4.real_card()
    refusal = rehearse_t4.refusal(Path(tempfile.gettempdir()), card)
    if refusal:
        raise SystemExit(refusal)
    text = json.dumps(result(in_disguise(), card[0]), indent=1)
    Path(arguments[0]).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
