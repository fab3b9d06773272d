"""The files of a recording: their names, and one export from which everything else is derived.

A second export of the same cycle fails, and torch's own tables cost the profiled process about 35 µs per event.
"""

import contextlib
import gzip
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.profiler

from boundby import files
from boundby.trace import DEVICE_CATEGORIES, MAX_JSON_BYTES, Trace, folded_stacks, read_trace, step_count

GZIP_LEVEL = 1  # torch's own .gz export uses 9: 18 times as long for a file a third smaller (a trace of 26 MB)


def check_suffix(trace_path: Path) -> None:
    """Raise ValueError where the name of a trace says neither plain nor packed JSON."""
    if not trace_path.name.endswith((".json", ".json.gz")):
        raise ValueError(f"trace_path is {trace_path}; it must end with .json or .json.gz")


def trace_limit(max_trace_mb: float) -> int:
    """Return a limit in bytes; raise ValueError, in the name of a callback's `max_trace_mb`, where it cannot be."""
    is_number = isinstance(max_trace_mb, int | float) and not isinstance(max_trace_mb, bool)
    if is_number and 0 < max_trace_mb * 10**6 <= MAX_JSON_BYTES:
        return round(max_trace_mb * 10**6)
    most = MAX_JSON_BYTES // 10**6
    raise ValueError(f"max_trace_mb is {max_trace_mb!r}; give a number above 0 and of at most {most}")


@dataclass(frozen=True)
class Naming:
    """This process among those of its job, and what that does to the names of its files."""

    rank: int = 0
    world_size: int = 1

    def path(self, path: Path, cycle: int | None = None) -> Path:
        """Return `trace.json.gz` as `rank3_trace_cycle2.json.gz`: the rank if there are several, the cycle if given."""
        stem, dot, suffix = path.name.partition(".")
        prefix = f"rank{self.rank}_" if self.world_size > 1 else ""
        number = f"_cycle{cycle}" if cycle is not None else ""
        return path.with_name(f"{prefix}{stem}{number}{dot}{suffix}")


def naming_of_process() -> Naming:
    """Return rank and size of the job from torch.distributed, or else from RANK and WORLD_SIZE, or else one process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Naming(torch.distributed.get_rank(), torch.distributed.get_world_size())
    try:
        rank = int(os.environ["RANK"])
        return Naming(rank, max(rank + 1, int(os.environ.get("WORLD_SIZE", "1"))))
    except (KeyError, ValueError):
        return Naming()


@dataclass(frozen=True)
class Exported:
    """What one recording gave."""

    json_bytes: int
    trace: Trace | None  # None where it is too large

    @property
    def steps(self) -> int:
        """Return the number of different `ProfilerStep` marks."""
        return step_count(self.trace) if self.trace else 0

    @property
    def has_device_events(self) -> bool:
        """Tell whether a kernel, copy or fill of a device is in the trace."""
        return self.trace is not None and bool(self.trace.in_categories(DEVICE_CATEGORIES).any())

    def write_stacks(self, path: Path) -> None:
        """Write the folded Python stacks; raise ValueError where there are none."""
        lines = folded_stacks(self.trace) if self.trace else []
        if not lines:
            raise ValueError("the trace holds no Python frames")
        files.write_text(path, "\n".join(lines) + "\n")


def export(
    profile: torch.profiler.profile, path: Path, admits: Callable[[int], bool], *, keep: bool = True
) -> Exported:
    """Return what the profiler recorded and, with `keep`, publish it at `path`.

    Nothing is read or kept where `admits` refuses the bytes of its JSON. The suffix of `path` decides whether the file
    is compressed.
    """
    with _raw(profile, path.parent) as raw:
        json_bytes = raw.stat().st_size
        if not admits(json_bytes):
            return Exported(json_bytes, None)
        trace = read_trace(raw)
        if keep:
            _publish(raw, path)
    return Exported(json_bytes, trace)


def exported_bytes(profile: torch.profiler.profile, folder: Path) -> int:
    """Return the bytes of JSON that the recording makes; nothing is kept."""
    with _raw(profile, folder) as raw:
        return raw.stat().st_size


@contextlib.contextmanager
def _raw(profile: torch.profiler.profile, folder: Path) -> Iterator[Path]:
    """Yield the path of the trace as plain JSON, a temporary file that goes when the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = folder / files.temporary_name("raw.json")
    try:
        profile.export_chrome_trace(str(raw))
        yield raw
    finally:
        raw.unlink(missing_ok=True)


def _publish(raw: Path, path: Path) -> None:
    with files.replacing(path) as temporary:
        if path.suffix == ".gz":
            with raw.open("rb") as source, gzip.open(temporary, "wb", compresslevel=GZIP_LEVEL) as target:
                shutil.copyfileobj(source, target)
        else:
            shutil.copyfile(raw, temporary)
