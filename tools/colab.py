"""Asks pip what the install cell does to Colab: what is new, what changes; CUDA and torch must not.

    python3.13 tools/colab.py LIST            LIST is Colab's `pip freeze`
    python3.13 tools/colab.py LIST --record   also writes results/colab.json

Google publishes the list on GitHub, in googlecolab/backend-info, as pip-freeze.gpu.txt. A fresh
environment is made to look like Colab to pip: every package of the list is there by its name,
version and requirements, without its files, and pip has Colab's version. Then `pip install
--dry-run` resolves those of requirements.txt that the list lacks. It takes Colab's Python on Linux
x86-64, because pip picks wheels and evaluates markers for the Python that it runs on. The exit
status is 1 if torch, Triton, numpy or anything of CUDA would change or come in a second time, or if
a package of the list is older than requirements.txt allows: the install cell then refuses it.

Not known are torch's own CUDA requirements: its +cu128 build is not on PyPI. They are taken to be
the list's *-cu12 packages in the list's versions.
"""

import datetime
import json
import platform
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = "3.13"
RECORD = ROOT / "results" / "colab.json"


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def read_list(path):
    """{name: version} of a `pip freeze`; 0 for what comes neither from an index nor from a file."""
    packages = {}
    for line in path.read_text().splitlines():
        if pinned := re.match(r"([\w.-]+)==(\S+)$", line):
            packages[canonical(pinned[1])] = pinned[2]
        elif elsewhere := re.match(r"([\w.-]+) @ (\S+)$", line):
            version = re.search(r"-(\d[\d.]*)\.tar\.gz$", elsewhere[2])
            packages[canonical(elsewhere[1])] = version[1] if version else "0"
        elif line.strip() and not line.startswith("#"):
            raise SystemExit(f"{path}: expected `name==version`, got {line!r}")
    if not {"torch", "triton", "numpy", "pip"} <= packages.keys():
        raise SystemExit(
            f"{path} is no list of Colab's packages: torch, triton, numpy and pip must be in it"
        )
    return packages


def release(version):
    """Its first four numbers: 2.11.0+cu128 is [2, 11, 0, 0]."""
    return [*map(int, re.findall(r"\d+", re.match(r"[\d.]*", version)[0])), 0, 0, 0, 0][:4]


def missing(requirements, packages):
    """What the install cell asks pip for: the lines whose name the list lacks."""
    lacking = []
    for line in filter(None, map(str.strip, requirements.splitlines())):
        requirement = re.fullmatch(r"([\w.-]+)(?:>=([\d.]+))?", line)
        if requirement is None:
            raise SystemExit(
                f"expected `name` or `name>=version` in requirements.txt, got {line!r}"
            )
        name, lowest = requirement.groups()
        version = packages.get(canonical(name))
        if version is None:
            lacking.append(line)
        elif lowest and release(version) < release(lowest):
            raise SystemExit(f"the list has {name} {version}, which is older than {line}")
    return lacking


def protected(name):
    """What must stay: torch, Triton, numpy and all of CUDA."""
    return name in ("torch", "triton", "numpy") or name.startswith("nvidia-") or "cuda" in name


def pip_install(python, folder, *arguments):
    """pip's report and what it said, of `pip install --dry-run`."""
    report = folder / "report.json"
    pip = [
        python,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--report",
        report,
        "--disable-pip-version-check",
    ]
    done = subprocess.run([*pip, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"pip install {' '.join(arguments)} fails:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return json.loads(report.read_text())["install"], done.stdout


def write_stub(site, name, version, metadata):
    """A package as pip sees an installed one. metadata: of that version on the index, or {}."""
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Provides-Extra: {extra}" for extra in metadata.get("provides_extra", ())]
    lines += [f"Requires-Dist: {requirement}" for requirement in metadata.get("requires_dist", ())]
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    (folder / "INSTALLER").write_text("pip\n")
    (folder / "RECORD").write_text("")


def requirements_of(python, folder, packages, names):
    """{name: metadata} of these packages in the list's versions, by pip."""
    pins = [f"{name}=={packages[name].split('+')[0]}" for name in sorted(names)]
    found, _ = pip_install(python, folder, "--ignore-installed", "--no-deps", *pins)
    known = {canonical(entry["metadata"]["name"]): entry["metadata"] for entry in found}
    if "torch" in known:
        cuda = [
            f"{name}=={version}"
            for name, version in packages.items()
            if re.fullmatch(r"nvidia-.*-cu12", name)
        ]
        others = [r for r in known["torch"]["requires_dist"] if not re.match(r"nvidia-|cuda-", r)]
        known["torch"]["requires_dist"] = others + cuda
    return known


def resolve(packages, wanted, folder):
    """[(name, version)] that pip would install. What packages that it met require is filled in."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "-q", f"pip=={packages['pip']}"],
        check=True,
        stdout=sys.stderr,
    )
    site = folder / "venv" / "lib" / f"python{PYTHON}" / "site-packages"
    for name, version in packages.items():
        if name != "pip":
            write_stub(site, name, version, {})
    filled = set()
    while True:
        install, said = pip_install(python, folder, *wanted)
        met = {
            canonical(name)
            for name in re.findall(r"^Requirement already satisfied: ([\w.-]+)", said, re.M)
        }
        unfilled = (met & packages.keys()) - filled
        if not unfilled:
            return [
                (canonical(entry["metadata"]["name"]), entry["metadata"]["version"])
                for entry in install
            ]
        print(f"pip met {len(unfilled)} more packages of Colab's", flush=True)
        for name, metadata in requirements_of(python, folder, packages, unfilled).items():
            write_stub(site, name, packages[name], metadata)
        filled |= unfilled


def main(path, record):
    if sys.version_info[:2] != (3, 13) or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SystemExit(
            f"takes Python {PYTHON} on Linux x86-64, as Colab's; this is {platform.platform()}"
        )
    packages = read_list(path)
    wanted = missing((ROOT / "requirements.txt").read_text(), packages)
    with tempfile.TemporaryDirectory() as folder:
        install = resolve(packages, wanted, Path(folder))
    new = {name: version for name, version in install if name not in packages}
    changed = {
        name: f"{packages[name]} -> {version}" for name, version in install if name in packages
    }
    broken = sorted(name for name in {**new, **changed} if protected(name))
    kept = {name: version for name, version in packages.items() if name not in changed}
    untouched = {name: kept[name] for name in ("torch", "triton", "numpy") if name in kept}
    untouched["nvidia packages"] = sum(protected(name) for name in kept) - len(untouched)
    print(f"pip install {' '.join(wanted)}")
    for title, entries in (("new", new), ("changed", changed), ("untouched", untouched)):
        print(
            f"{title}: "
            + (", ".join(f"{name} {value}" for name, value in entries.items()) or "nothing")
        )
    if record:
        facts = {
            "list": path.name,
            "python": PYTHON,
            "pip": packages["pip"],
            "date": datetime.date.today().isoformat(),
        }
        facts |= {"new": new, "changed": changed, "untouched": untouched}
        RECORD.write_text(json.dumps(facts, indent=1) + "\n")
    if broken:
        raise SystemExit(
            "torch, triton, numpy and CUDA must stay as they are, "
            f"pip would touch {', '.join(broken)}"
        )


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--record"]
    if len(arguments) != 1 or not Path(arguments[0]).is_file():
        raise SystemExit(__doc__)
    main(Path(arguments[0]), "--record" in sys.argv)
