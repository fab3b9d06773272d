"""Keep what is installed known: locks with hashes, licences, and advisories. For whoever changes a requirement.

    python setup/lock.py              make setup/locks/*.txt anew from setup/requirements*.txt; needs uv
    python setup/lock.py --licences   make docs/licences.md anew from the locks and what is installed here
    python setup/lock.py --audit      ask which locked versions have known vulnerabilities; exit code 1 for any

The locks hold all but torch and what comes with it, which fit the driver of the machine. That of the core is whole;
that of another environment holds all that this one needs beyond the core, and can be installed without the others.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SETUP = Path(__file__).resolve().parent
PAGE = SETUP.parent / "docs" / "licences.md"
ENVIRONMENTS = ("core", "training", "monitor", "ray", "engines", "test", "docs")
WITH_TORCH = re.compile(r"torch|torchvision|torchaudio|triton|(nvidia|cuda)-(?!ml-py).+")
LOCKED = re.compile(r"^([a-z0-9][a-z0-9._-]*)==([^\s;\\]+)", re.MULTILINE)
ENTRY = re.compile(r"^\S.*\n(?:\s.*\n)*", re.MULTILINE)  # a package with its marker and hashes
LONGEST_LICENCE = 60  # characters: some packages put the whole text where its name belongs
RESOLVE_S, AUDIT_S = 600, 120  # a network that hangs ends then


def requirements(environment: str) -> Path:
    """Return the file of the packages that we ask for by name."""
    return SETUP / ("requirements.txt" if environment == "core" else f"requirements-{environment}.txt")


def locked(environment: str) -> list[tuple[str, str]]:
    """Return name and version of what a lock holds; a package may stand twice, for two versions of Python."""
    return LOCKED.findall((SETUP / "locks" / f"{environment}.txt").read_text(encoding="utf-8"))


def lock() -> None:
    """Resolve all environments together, so that they agree; write what each adds to the core."""
    (SETUP / "locks").mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as agreed:
        agreed.write(_resolved(*map(str, map(requirements, ENVIRONMENTS))))
        agreed.flush()
        with_torch = {name for name, _ in LOCKED.findall(Path(agreed.name).read_text()) if WITH_TORCH.fullmatch(name)}
        options = ["-c", agreed.name, *(f"--no-emit-package={name}" for name in sorted(with_torch))]
        core: set[str] = set()
        for environment in ENVIRONMENTS:
            sources = [str(requirements(name)) for name in dict.fromkeys(["core", environment])]
            entries = ENTRY.findall(_resolved(*sources, *options))
            # Equal entries are left out, not equal names: colorama is the core's on Windows, mkdocs's everywhere.
            text = "".join(entry for entry in entries if entry not in core)
            core = core or set(entries)
            head = f"# Made by `python setup/lock.py` from {requirements(environment).name}; change that, not this.\n"
            (SETUP / "locks" / f"{environment}.txt").write_text(head + text, encoding="utf-8")


def licences() -> str:
    """Return the page of all locked packages; a licence is what the package says of itself."""
    lines = [
        "# Licences of what is installed",
        "",
        "What each package says of itself, from its metadata. Made by `python setup/lock.py --licences` where all",
        "environments are installed. torch, which is not locked, is under BSD-3-Clause.",
    ]
    listed: set[str] = set()  # a package that several environments need stands under the first of them
    for environment in ENVIRONMENTS:
        lines += ["", f"## {environment}", "", "| package | version | licence |", "| --- | --- | --- |"]
        versions: dict[str, list[str]] = {}
        for name, version in locked(environment):
            if name not in listed:
                versions.setdefault(name, []).append(version)
        listed |= versions.keys()
        said = {name: _licence(name) for name in versions}  # None for what another platform needs
        lines += [f"| {name} | {', '.join(versions[name])} | {text} |" for name, text in said.items() if text]
    return "\n".join([*lines, ""])


def audit() -> int:
    """Print what is known against the locked versions; return 1 for any, 0 where none is known or nothing answers."""
    locks = [f"--requirement={SETUP / 'locks' / f'{environment}.txt'}" for environment in ENVIRONMENTS]
    command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--no-deps", "--format=json", *locks]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=AUDIT_S, check=False)
        packages = json.loads(answer.stdout)["dependencies"]
    except subprocess.TimeoutExpired:
        print(f"audit: skipped, no answer within {AUDIT_S} s")
        return 0
    except (ValueError, KeyError):
        print(f"audit: skipped, {(answer.stderr.strip().splitlines() or ['no answer'])[-1]}")
        return 0
    asked = [package for package in packages if "vulns" in package]
    known = [(package["name"], package["version"], fault) for package in asked for fault in package["vulns"]]
    for name, version, fault in known:
        print(f"audit: {name} {version}: {fault['id']}, mended in {', '.join(fault['fix_versions']) or 'no version'}")
    if not asked:
        print("audit: skipped, the index has no advisories")
    elif not known:
        print(
            f"audit: no known vulnerability in {len(asked)} of {len(packages)} locked packages; no word on the others"
        )
    return 1 if known else 0


def main(asked: list[str]) -> int:
    """Do what is asked; return the exit code."""
    if asked == ["--audit"]:
        return audit()
    if asked == ["--licences"]:
        PAGE.write_text(licences(), encoding="utf-8")
        return 0
    if asked:
        print(__doc__, file=sys.stderr)
        return 2
    lock()
    return 0


def _resolved(*arguments: str) -> str:
    """Return the lock of these requirements for every platform and Python that we support."""
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version=3.11", "--generate-hashes"]
    command += ["--no-header", "--no-annotate", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=RESOLVE_S, check=True).stdout


def _licence(name: str) -> str | None:
    try:
        about = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    classified = [text.rpartition(" :: ")[2] for text in about.get_all("Classifier", []) if text.startswith("License")]
    said = about.get("License-Expression") or ", ".join(classified) or (about.get("License") or "").partition("\n")[0]
    return said[:LONGEST_LICENCE].replace("|", "/") or "not said"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
