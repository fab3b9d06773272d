"""List what people and programs rely on: public names, commands with their flags, artefacts, columns and keys of a run.

    python docs/list_surface.py results > before.json                      # of a finished quickstart run
    python docs/list_surface.py results --against before.json              # what is lost (exit 1) and what is new

Names of the library count by themselves, wherever they stand: what moved to another module is printed as moved.
"""

import argparse
import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z-]+)")
VARYING = re.compile(r"\d{4,}\w*|(?<=[_.-])\d+(?=[_.-])")  # of file names: time stamps, numbers of processes and parts
DOCUMENTS = (
    "baseline_metrics.json",
    "run.json",
    "profiler_traces/trace_analysis.json",
    "profiler_traces/manifest.json",
)


def main() -> int:
    """Print the surface of this checkout, or how it differs from an earlier one; 1 where something is lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="folder of a finished run of configs/quickstart.yaml")
    parser.add_argument("--against", type=Path, help="an earlier surface, as this program printed it")
    given = parser.parse_args()
    surface = {
        "public names": library_names(),
        "commands": sorted(commands()),
        "make targets": make_targets(),
        "artefacts": sorted({VARYING.sub("N", str(path)) for path in files_of(given.results)}),
        "columns": sorted(columns(given.results)),
        "keys": sorted(set(keys(given.results))),
    }
    if given.against is None:
        print(json.dumps(surface, indent=1))
        return 0
    return report(json.loads(given.against.read_text(encoding="utf-8")), surface)


def report(before: dict, after: dict) -> int:
    """Print a line for each kind of thing, and each thing that is lost or new; return 1 where something is lost."""
    print(f"{'':14} {'before':>7} {'after':>7} {'lost':>5} {'new':>5}")
    differences = {kind: (set(before[kind]) - set(after[kind]), set(after[kind]) - set(before[kind])) for kind in after}
    for kind, (lost, new) in differences.items():
        print(f"{kind:14} {len(before[kind]):7} {len(after[kind]):7} {len(lost):5} {len(new):5}")
    for kind, (lost, new) in differences.items():
        print("".join(f"lost  {kind}: {name}\n" for name in sorted(lost)), end="")
        print("".join(f"new   {kind}: {name}\n" for name in sorted(new)), end="")
    shared = set(before["public names"]) & set(after["public names"])
    for name in sorted(shared):
        was, now = before["public names"][name], after["public names"][name]
        if not set(was) & set(now):
            print(f"moved {name}: {', '.join(was)} -> {', '.join(now)}")
    return int(any(lost for lost, _ in differences.values()))


def library_names() -> dict[str, list[str]]:
    """Return the modules in which each public name of the library stands, as the reference lists them."""
    import generate_api

    names: dict[str, list[str]] = {}
    for module in generate_api.public_modules():
        for name in generate_api.public_names(module):
            names.setdefault(name, []).append(module.name)
    return dict(sorted(names.items()))


def commands() -> Iterator[str]:
    """Yield every flag of every program, behind the program's name."""
    for program in (
        "run_pipeline.py",
        "setup/verify.py",
        *(f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.py")),
    ):
        answer = subprocess.run(
            [sys.executable, str(ROOT / program), "--help"], capture_output=True, text=True, check=True
        )
        yield program
        yield from (f"{program} {flag}" for flag in set(FLAG.findall(answer.stdout)))


def make_targets() -> list[str]:
    """Return the targets that `make` explains."""
    return re.findall(r"^([a-z][a-z-]*):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def files_of(results: Path) -> Iterator[Path]:
    """Yield the files of a run, from its folder on; those of earlier runs are left out."""
    for path in sorted(results.rglob("*")):
        name = path.relative_to(results)
        if path.is_file() and name.parts[0] not in ("previous", "logs") and not path.name.startswith(".tmp-"):
            yield name


def columns(results: Path) -> Iterator[str]:
    """Yield the columns of every CSV file of a run."""
    for name in files_of(results):
        if name.suffix == ".csv":
            with open(results / name, encoding="utf-8", newline="") as lines:
                yield from (f"{name}: {column}" for column in next(csv.reader(lines), []))


def keys(results: Path) -> Iterator[str]:
    """Yield the keys of the documents that programs read, as paths; entries of a list count as one."""
    for name in DOCUMENTS:
        path = results / name
        if path.exists():
            yield from (f"{name}: {key}" for key in _paths(json.loads(path.read_text(encoding="utf-8"))))


def _paths(value: object, above: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield f"{above}{key}"
            yield from _paths(below, f"{above}{key}.")
    elif isinstance(value, list):
        for below in value[:50]:
            yield from _paths(below, above)


if __name__ == "__main__":
    sys.exit(main())
