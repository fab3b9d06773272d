"""Check a profile against the receipt of step 03: the last file the step writes, with size and hash of all others."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from boundby import files
from utils import steps
from utils.profile_check.subject import STEP, Check, Subject, read_strictly


class Output(msgspec.Struct):
    """One file that the step wrote."""

    path: str
    bytes: int
    sha256: str


class TraceSettings(msgspec.Struct):
    """The settings of the trace."""

    enabled: bool = True


class Settings(msgspec.Struct):
    """The settings that the step has read."""

    trace: TraceSettings = msgspec.field(default_factory=TraceSettings)


class Parts(msgspec.Struct):
    """What the result of the step depends on."""

    config: Settings = msgspec.field(default_factory=Settings)


class Receipt(msgspec.Struct):
    """What is read of a receipt."""

    schema_version: int
    status: str
    outputs: list[Output]
    parts: Parts = msgspec.field(default_factory=Parts)

    @property
    def is_without_trace(self) -> bool:
        """Whether the settings asked for none."""
        return not self.parts.config.trace.enabled


def read(subject: Subject) -> tuple[Receipt | None, list[Check]]:
    """Return the receipt of a run of the pipeline, and what is to be said about it and about the files it lists."""
    path, marker = subject.layout.receipt(STEP), subject.layout.marker(STEP)
    if not subject.is_pipeline:
        return None, []
    if not path.exists():
        found = f"step {STEP} has started and not finished" if marker.exists() else f"step {STEP} left no receipt"
        remedy = "wait for it, or python run_pipeline.py --from 3 --resume" if marker.exists() else None
        return None, [subject.fault("receipt", path, found, remedy)]
    try:
        receipt = read_strictly(path, Receipt)
    except (OSError, ValueError) as error:
        return None, [subject.unreadable("receipt", path, error)]
    return receipt, [*_of_itself(subject, receipt, path), *_outputs(subject, receipt, path)]


def _of_itself(subject: Subject, receipt: Receipt, path: Path) -> Iterator[Check]:
    if receipt.schema_version != steps.SCHEMA_VERSION:
        text = f"its schema version is {receipt.schema_version}, not {steps.SCHEMA_VERSION}"
        yield subject.fault("receipt", path, text)
    elif receipt.status != "ok":
        yield subject.fault("receipt", path, f"step {STEP} ended with status {receipt.status}")
    elif receipt.is_without_trace:
        yield subject.note("receipt", path, "trace.enabled was false: no trace was recorded")
    else:
        yield subject.ok("receipt", path, f"step {STEP} finished, {len(receipt.outputs)} file(s) listed")


def _outputs(subject: Subject, receipt: Receipt, path: Path) -> Iterator[Check]:
    written = path.stat().st_mtime_ns
    listed = {_place(subject, output.path): output for output in receipt.outputs}
    touched = []
    for place, output in listed.items():
        yield (check := _output(subject, place, output, written))
        if not check.is_fatal and place.stat().st_mtime_ns > written:
            touched.append(place.name)
    if touched:
        text = f"older than {len(touched)} file(s) whose content is as listed: they were copied or touched since"
        yield subject.note("age", path, text)
    for place in sorted(subject.folder.rglob("*")):
        if place.is_file() and place not in listed and not place.name.startswith(files.TEMPORARY_PREFIX):
            age = "newer" if place.stat().st_mtime_ns > written else "older"
            yield subject.note("listing", place, f"the receipt does not list it, and it is {age} than the receipt")


def _output(subject: Subject, place: Path, output: Output, written: int) -> Check:
    if not place.is_file():
        return subject.fault("existence", place, "it is missing; the receipt lists it")
    size = place.stat().st_size
    since = ", after the receipt" if place.stat().st_mtime_ns > written else ""
    if size != output.bytes:
        return subject.fault("size", place, f"it has {size:,} bytes, {output.bytes:,} were written: changed{since}")
    found = files.sha256(place)
    if found != output.sha256:
        return subject.fault(
            "hash", place, f"its SHA-256 is {found[:12]}..., not {output.sha256[:12]}...: changed{since}"
        )
    return subject.ok("hash", place, f"{size:,} bytes, as written")


def _place(subject: Subject, recorded: str) -> Path:
    """Return where a listed file is to be now, also when the folder of the run has moved."""
    parts = Path(recorded).parts
    if subject.folder.name not in parts:
        return Path(recorded)
    last = len(parts) - 1 - parts[::-1].index(subject.folder.name)
    return subject.folder.joinpath(*parts[last + 1 :])
