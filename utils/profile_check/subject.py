"""What is checked: the profile of a run of the pipeline, or any folder with the manifest of a recording."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from boundby.cli import typed
from boundby.training import ranks_in
from utils.artifacts import Layout
from utils.cli import Run
from utils.errors import InputError
from utils.training.run_folder import is_run

STEP = "03"
State = Literal["ok", "note", "fault"]
Content = TypeVar("Content")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: in which file, what was found there, and for a fault how to get it right."""

    what: str
    file: str
    state: State
    found: str
    remedy: str | None = None

    @property
    def is_fatal(self) -> bool:
        """Whether the artefact must not be used as it is."""
        return self.state == "fault"


@dataclass(frozen=True)
class Subject:
    """A folder with a profile. `layout` gives its places; a recording of a training loop has all files in `folder`.

    Of several processes each is a subject of its own, with `prefix` in front of the names of its files.
    """

    run: Path
    folder: Path  # of the manifest, the trace and what was derived from it
    layout: Layout
    is_pipeline: bool
    prefix: str = ""
    has_table: bool = False  # a training run leaves a table of operators beside its trace; a bare recording need not

    @property
    def manifest(self) -> Path:
        """The manifest of the recording."""
        return self.folder / f"{self.prefix}{self.layout.trace_manifest.name}"

    @property
    def op_stats(self) -> Path:
        """The table of operators."""
        return self.folder / f"{self.prefix}{self.layout.op_stats.name}"

    @property
    def trace_analysis(self) -> Path:
        """The analysis of the trace that was stored."""
        return self.folder / f"{self.prefix}{self.layout.trace_analysis.name}"

    @property
    def again(self) -> str:
        """How to make the whole profile anew."""
        if self.is_pipeline:
            return f"make it again: {typed('run', '--from', '3')}, with the settings of this run"
        return "record it again"

    def resolved(self, recorded: str) -> Path:
        """Return where a file of the profile lies now, which was written as `recorded`; the folder may have moved."""
        parts = Path(recorded).parts
        below = [self.folder.joinpath(*parts[start:]) for start in range(1, len(parts))]
        return next((path for path in below if path.is_file()), self.folder / Path(recorded).name)

    def named(self, path: Path) -> str:
        """Return the path as seen from the folder of the run."""
        return str(path.relative_to(self.run)) if path.is_relative_to(self.run) else str(path)

    def ok(self, what: str, path: Path, found: str) -> Check:
        """Return that all is well."""
        return Check(what, self.named(path), "ok", found)

    def note(self, what: str, path: Path, found: str) -> Check:
        """Return something worth knowing that spoils nothing."""
        return Check(what, self.named(path), "note", found)

    def fault(self, what: str, path: Path, found: str, remedy: str | None = None) -> Check:
        """Return a fault; without a `remedy` the profile has to be made again."""
        return Check(what, self.named(path), "fault", found, remedy or self.again)

    def unreadable(self, what: str, path: Path, error: Exception) -> Check:
        """Return that a file is not what it should be."""
        return self.fault(what, path, f"it cannot be read: {type(error).__name__}: {error}")

    def read(
        self, what: str, path: Path, kind: type[Content], missing: str, remedy: str | None = None
    ) -> tuple[Content | None, list[Check]]:
        """Return the document at `path`; or None, and the fault that it is `missing` or not of this kind."""
        try:
            return read_strictly(path, kind), []
        except FileNotFoundError:
            return None, [self.fault("existence", path, f"it is missing: {missing}", remedy)]
        except (OSError, ValueError) as error:
            return None, [self.unreadable(what, path, error)]


def folder_of(run: Run) -> Path | None:
    """Return the folder to check: RUN, else the results of the settings; None where these ask for no trace."""
    if run.args.run is not None:
        return Path(run.args.run)
    return run.layout.results if run.config.trace.enabled else None


def locate(path: Path, layout: Layout) -> Subject:
    """Return what is to be checked in the folder `path`; `layout` gives the names of files.

    Raises InputError where there is no folder or no profile in it.
    """
    if not path.is_dir():
        raise InputError(f"{path} is no folder; give the results folder of a run, or one with a profiler's manifest")
    if (
        path.resolve().name == layout.traces.name
        and replace(layout, results=path.resolve().parent).receipt(STEP).exists()
    ):
        path = path.resolve().parent
    own = replace(layout, results=path)
    if any(each.exists() for each in (own.traces, own.receipt(STEP), own.marker(STEP))):
        return Subject(path, own.traces, own, is_pipeline=True)
    if (path / own.trace_manifest.name).is_file() or is_run(path) or ranks_in(path):
        return Subject(path, path, own, is_pipeline=False)
    hint = "run step 03, or give the folder of a recording" if own.run.exists() else "give the results folder of a run"
    raise InputError(f"{path} holds no profile: neither {own.traces.name}/ nor {own.trace_manifest.name}; {hint}")


def read_strictly(path: Path, kind: type[Content]) -> Content:
    """Return the JSON document at `path`. Raises OSError, and ValueError for no strict JSON (NaN) or another `kind`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
