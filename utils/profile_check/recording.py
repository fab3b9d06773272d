"""Check what a recording says of itself: its manifest, the files that this names, and the folded stacks."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from utils.profile_check.subject import Check, Subject, read_strictly

PATH_ENDING = "_path"  # of the keys of a manifest that name a file
FOLDED = re.compile(r"\S.* [1-9]\d*")  # outer;inner;innermost weight
NAMED = 80  # characters of a line that a message quotes


class Remark(msgspec.Struct):
    """One thing that was given up or cannot be given, and why."""

    what: str
    reason: str


class Cycle(msgspec.Struct):
    """One recording of consecutive steps."""

    steps_recorded: int
    stacks: bool = False
    steps_expected: int | None = None
    trace_path: str | None = None
    trace_bytes: int | None = None
    json_bytes: int | None = None


class Manifest(msgspec.Struct):
    """What is read of a manifest."""

    steps_expected: int
    steps_recorded: int
    trace_path: str | None
    downgrades: list[Remark]
    unavailable: list[Remark]
    trace_bytes: int | None = None
    stacks_path: str | None = None
    warnings: list[str] = []
    cycles: list[Cycle] = []
    trace_wanted: bool = True
    trace_reason: str | None = None

    @property
    def recordings(self) -> dict[str, Cycle]:
        """The recording of each trace by the path that was written down; that of `trace_path` is the first."""
        found = {}
        if self.trace_path:
            found[self.trace_path] = Cycle(self.steps_recorded, trace_bytes=self.trace_bytes)
        return found | {each.trace_path: each for each in self.cycles if each.trace_path}


def read(subject: Subject) -> tuple[Manifest | None, list[Check]]:
    """Return the manifest, and what is to be said about it and the files that it names."""
    path = subject.manifest
    try:
        document, manifest = read_strictly(path, dict[str, Any]), read_strictly(path, Manifest)
    except FileNotFoundError:
        return None, [subject.fault("existence", path, "it is missing: what the trace holds is not known")]
    except (OSError, ValueError) as error:
        return None, [subject.unreadable("manifest", path, error)]
    return manifest, [*_of_itself(subject, manifest), *_named_files(subject, document), *_stacks(subject, manifest)]


def _of_itself(subject: Subject, manifest: Manifest) -> Iterator[Check]:
    path = subject.manifest
    steps = f"{manifest.steps_recorded} of {manifest.steps_expected} steps recorded"
    reasons = "; ".join(f"{each.what}: {each.reason}" for each in manifest.downgrades)
    if not manifest.trace_wanted:
        yield subject.note("trace", path, f"no trace was wanted: {manifest.trace_reason or 'no reason is given'}")
    elif manifest.trace_path is None:
        yield subject.fault("trace", path, f"there is no trace ({reasons or 'and no reason'})")
    elif manifest.steps_recorded < manifest.steps_expected and not reasons:
        yield subject.fault("steps", path, f"{steps}, and no reason is given")
    else:
        yield subject.ok("steps", path, steps)
    for kind, remarks in (("downgraded", manifest.downgrades), ("unavailable", manifest.unavailable)):
        for each in remarks:
            yield subject.note(kind, path, f"{kind}: {each.what}: {each.reason}")
    for text in manifest.warnings:
        yield subject.note("warning", path, f"torch warned: {text}")


def _named_files(subject: Subject, document: dict[str, Any]) -> Iterator[Check]:
    cycles = document.get("cycles") or []
    named = {
        value: key.removesuffix(PATH_ENDING)
        for part in (*cycles, document)
        for key, value in part.items()
        if key.endswith(PATH_ENDING) and isinstance(value, str)
    }
    for recorded, what in named.items():
        place = subject.resolved(recorded)
        if not place.is_file():
            yield subject.fault("existence", place, f"it is missing; {subject.manifest.name} names it as {what}")
        elif not place.stat().st_size:
            yield subject.fault("size", place, f"it is empty; {subject.manifest.name} names it as {what}")
        else:
            yield subject.ok("existence", place, f"the {what} of the manifest")


def _stacks(subject: Subject, manifest: Manifest) -> Iterator[Check]:
    path = subject.resolved(manifest.stacks_path) if manifest.stacks_path else None
    if path is None or not path.is_file() or not path.stat().st_size:
        return
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except ValueError as error:
        yield subject.unreadable("stacks", path, error)
        return
    wrong = [number for number, line in enumerate(lines, start=1) if not FOLDED.fullmatch(line)]
    if wrong:
        line = lines[wrong[0] - 1][:NAMED]
        text = f"{len(wrong)} of {len(lines)} lines are not `frames weight`; the first is line {wrong[0]}: {line!r}"
        yield subject.fault("stacks", path, text)
    else:
        yield subject.ok("stacks", path, f"{len(lines):,} stacks")
