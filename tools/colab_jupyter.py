"""Executes the whole notebook, without a GPU, under the IPython and ipykernel that Colab has.

    python tools/colab_jupyter.py                    installs all into a temporary environment,
                                                     torch, too
    python tools/colab_jupyter.py --packages .venv   takes all but Jupyter from that environment, of
                                                     the same Python
    python tools/colab_jupyter.py --environment DIR  makes the environment there and leaves it

Prints the versions, as the kernel itself tells them, and the notebook's last line.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JUPYTER = {
    "ipython": "7.34.0",
    "ipykernel": "6.17.1",
    "jupyter_client": "7.4.9",
    "tornado": "6.5.7",
}
TORCH = [
    "--retries=1",
    "torch==2.13.0",
    "--extra-index-url=https://download.pytorch.org/whl/cpu",
]
ASK = """
import json, sys
import nbformat
from nbclient import NotebookClient
source = "import sys, IPython, ipykernel; "
source += "print(IPython.__version__, ipykernel.__version__, sys.version.split()[0])"
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
print(notebook.cells[0].outputs[0].text)
"""


def make_environment(folder, packages):
    """The Python of a new environment: Colab's Jupyter, the rest from pip or `packages`."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    pins = [f"{name}=={number}" for name, number in JUPYTER.items()]
    subprocess.run([*pip, *pins], check=True)
    if packages:
        (other,) = packages.resolve().glob(f"lib/{version}/site-packages")
        (folder / "lib" / version / "site-packages" / "packages.pth").write_text(f"{other}\n")
    else:
        subprocess.run([*pip, *TORCH], check=True)
        subprocess.run([*pip, "-r", ROOT / "tests" / "requirements.txt", *pins], check=True)
    return python


def execute(python, folder):
    """The last line of the notebook, run by record.py. Prints what went to stderr."""
    command = [python, ROOT / "tools" / "record.py", "execute", folder]
    if subprocess.run(command, timeout=1200).returncode:
        raise SystemExit("the notebook fails under this Jupyter; the reason stands above")
    cells = json.loads((folder / "nf4_triton.ipynb").read_text())["cells"]
    outputs = [
        output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]
    ]
    for output in outputs:
        if output.get("name") == "stderr":
            print("on stderr:", "".join(output["text"]).strip())
    texts = ["".join(output["text"]) for output in outputs if output.get("name") == "stdout"]
    last_line = texts[-1].strip().splitlines()[-1]
    if not last_line.startswith("CPU mode:") or " 0 differ" not in last_line:
        raise SystemExit(f"expected the CPU mode's last line, got {last_line!r}")
    return last_line


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packages", type=Path, metavar="ENVIRONMENT")
    parser.add_argument("--environment", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    minor = sys.version_info[1]
    packages = arguments.packages
    if packages and not list(packages.glob(f"lib/python3.{minor}/site-packages")):
        parser.error(f"{packages} is no environment of Python 3.{minor}")
    if arguments.environment and arguments.environment.exists():
        parser.error(f"{arguments.environment} exists already")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = arguments.environment or folder / "environment"
        python = make_environment(environment.resolve(), packages)
        command = [python, "-c", ASK]
        asked = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
        ipython, ipykernel, version = asked.stdout.split()
        print(f"IPython {ipython}, ipykernel {ipykernel}, Python {version}", flush=True)
        expected = JUPYTER["ipython"], JUPYTER["ipykernel"]
        if (ipython, ipykernel) != expected:
            raise SystemExit("expected IPython {} and ipykernel {} in the kernel".format(*expected))
        last_line = execute(python, folder / "run")
    print(last_line)


if __name__ == "__main__":
    main()
