"""Results of `baseline_document` stored and read as step 04 does, and the parts of the report that tests look at."""

import argparse
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import baseline_document as results
from utils.artifacts import Layout
from utils.cli import DEFAULT_CONFIG, Run
from utils.console import Console
from utils.render import plain_text
from utils.report import advice, assembly, pictures, sources

REMARKS = [{"what": "device events", "reason": "the profiler of this torch records none for cpu"}]
POD = {
    "model": {"name": "codefactory4791/intent-classification-qwen"},
    "dataset": {"hf_name": "codefactory4791/amazon_test"},
    "targets": {},
}


class Reader:
    """Stores results in a folder and reads them: `read(document, settings=…, overrides=…, **what_else_is_stored)`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self,
        document: Mapping[str, Any],
        settings: Mapping[str, Any] | None = None,
        overrides: Sequence[str] = (),
        **stored: Any,
    ) -> sources.ReportData:
        """Return what step 04 reads of `document`."""
        run = run_in(self.folder, overrides, **(settings or {}))
        results.store(run.layout, document, **stored)
        return sources.read(run)


def run_in(folder: Path, overrides: Sequence[str] = (), **settings: Any) -> Run:
    """Return a run of step 04 with its results in `folder`."""
    config = results.config(folder, **settings)
    args = argparse.Namespace(config=DEFAULT_CONFIG, overrides=list(overrides), trust_remote_code=False)
    return Run(config, Layout.of(config), args, Console(io.StringIO(), io.StringIO()))


def traced(device: bool = False) -> dict[str, Any]:
    """Return what step 03 leaves."""
    return {"op_rows": results.operators(device), "trace": results.manifest(unavailable=[] if device else REMARKS)}


def pod(read: Reader, document: Mapping[str, Any] | None = None, **others: Any) -> sources.ReportData:
    """Read the results of the pod run."""
    settings = {**POD, **others.pop("settings", {})}
    return read(document or results.gpu_document(), settings, machine=results.GPU_MACHINE, **others)


def text(data: sources.ReportData) -> str:
    """Return the report as text."""
    return plain_text.render(assembly.report(data).document)


def section(data: sources.ReportData, title: str) -> str:
    """Return one section of the report as one line, so that line breaks do not matter."""
    _, _, rest = text(data).partition(f"\n\n{title}\n{'-' * len(title)}\n")
    return flat(rest.partition("\n\n\n")[0])


def flat(lines: str) -> str:
    """Return `lines` as one."""
    return " ".join(lines.split())


def head(data: sources.ReportData) -> str:
    """Return what stands before the first section, as one line."""
    return flat(text(data).partition("What was measured on what")[0])


def drawings(data: sources.ReportData) -> dict[str, str | None]:
    """Return why each picture is not drawn by the name of its file, None where it is."""
    return {drawing.path.name: drawing.reason for drawing in assembly.report(data).drawings}


def draw(data: sources.ReportData, *names: str) -> None:
    """Draw the pictures of these names, or take away those that cannot be drawn; all without a name."""
    pictures.draw([each for each in assembly.report(data).drawings if not names or each.path.name in names])


def advised(data: sources.ReportData) -> list[str]:
    """Return the titles of the advice."""
    return [each.title for each in advice.advice(data)]


def commands(data: sources.ReportData) -> dict[str, str | None]:
    """Return the commands of the advice by their titles."""
    return {each.title: each.command for each in advice.advice(data)}
