"""What a capture was asked for and what it obtained: the record of `manifest.json`, written and read as one type."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from boundby.capture.remarks import Guard, Remark, summary

SCHEMA_VERSION = 1

MAX_TRACE_MB = 256  # of JSON before compression; viewers that run in a browser still open it


@dataclass(frozen=True)
class CaptureOptions:
    """What is recorded beside names and times."""

    stacks_path: Path | None = None  # folded Python stacks; None records none
    snapshot_path: Path | None = None  # allocator history with stacks, for pytorch.org/memory_viz; None records none
    shapes: bool = True
    memory: bool = True
    max_trace_bytes: int = MAX_TRACE_MB * 10**6  # of JSON before compression
    stacks: bool = False  # let a `Recorder` record Python stacks also where `stacks_path` is None
    nvtx: bool = False  # a range `step_{n}` around every step, for Nsight

    @property
    def records_stacks(self) -> bool:
        """Whether a trace is to hold Python stacks."""
        return self.stacks or self.stacks_path is not None


class Cycle(msgspec.Struct, frozen=True):
    """One recording of consecutive steps."""

    number: int  # from 1
    first_step: int  # of those recorded, as in `ProfilerStep#k`
    steps_expected: int
    steps_recorded: int
    stacks: bool = False  # recorded with Python stacks, whose cost is in its times
    trace_path: Path | None = None  # None where there is no trace; `downgrades` of the manifest says why
    trace_bytes: int | None = None
    json_bytes: int | None = None  # before compression; None where the profiler gave nothing


class CaptureManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What was recorded, and everything that falls short of the request: what `manifest.json` holds."""

    schema_version: int = SCHEMA_VERSION
    activities: tuple[str, ...] = ()  # "CPU", "CUDA"
    steps_expected: int = 0
    steps_recorded: int = 0  # different `ProfilerStep` marks of whole steps in the traces
    trace_path: Path | None = None  # the first trace without stacks, or else the first; None where there is none
    trace_bytes: int | None = None
    stacks_path: Path | None = None
    seconds: float = 0.0  # of the whole capture, with warm-up, export and compression
    downgrades: tuple[Remark, ...] = ()
    unavailable: tuple[Remark, ...] = ()  # what this device cannot give
    warnings: tuple[str, ...] = ()  # that torch gave about the profiler
    snapshot_path: Path | None = None
    estimated_bytes: int | None = None  # of JSON: what the steps asked for were expected to make
    estimate_reason: str | None = None  # why there is no estimate
    rank: int = 0
    world_size: int = 1
    cycles: tuple[Cycle, ...] = ()
    trace_wanted: bool = True
    trace_reason: str | None = None  # why none was wanted, and the way to one; None where one was
    # Of the batch that step 03 traces; None of a loop.
    batch_size: int | None = None
    batch_size_reason: str | None = None
    shape: str | None = None
    dtype: str | None = None

    @property
    def files(self) -> dict[Path, str]:
        """Every file that it names, and what it is."""
        named = [(cycle.trace_path, "trace") for cycle in self.cycles]
        named += [(self.trace_path, "trace"), (self.stacks_path, "stacks"), (self.snapshot_path, "memory snapshot")]
        return {path: what for path, what in named if path is not None}


@dataclass
class Record:
    """The remarks and warnings that gather while a capture runs."""

    downgrades: list[Remark] = field(default_factory=list)
    unavailable: list[Remark] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def downgrade(self, what: str, reason: str) -> None:
        """Note that `what` is less than was asked for."""
        self.downgrades.append(Remark(what, reason))

    def guard(self, what: str) -> Guard:
        """Return a context whose errors become downgrades of `what`."""
        return Guard(lambda error: self.downgrade(what, summary(error)))

    def foresee(self, what: str, reason: str) -> None:
        """Note that `what` is less than was asked for by the settings themselves, or by the length of the loop."""
        self.downgrades.append(Remark(what, reason, is_foreseen=True))

    def lacks(self, what: str, reason: str) -> None:
        """Note that this device or this torch cannot give `what`."""
        self.unavailable.append(Remark(what, reason, is_foreseen=True))
