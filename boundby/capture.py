"""Record a few steps of a program with torch.profiler: the one wrapper of it, for the pipeline and every callback.

The profiler must not harm what it watches. A failure of the profiler, a missing device or a trace that grows too big
ends as a remark in the manifest; only the program's own exceptions are raised. The trace is exported once and every
table is derived from that file (`boundby.trace`): a second export of the same cycle fails, and torch's own tables cost
the profiled process about 35 µs per event.
"""

import contextlib
import gc
import gzip
import itertools
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.profiler

from boundby import files
from boundby.device import synchronizer
from boundby.trace import folded_stacks, read_trace, step_count
from boundby.trace.reader import DEVICE_CATEGORIES

MAX_TRACE_BYTES = 256 * 2**20  # of JSON before compression; viewers that run in a browser still open it
GZIP_LEVEL = 1  # torch's own .gz export uses 9: 18 times as long for a file a third smaller (a trace of 26 MB)
STACK_STEPS = 1
MESSAGE_CHARACTERS = 300  # a failed assertion of torch brings a page of C++ frames along


@dataclass(frozen=True)
class Remark:
    """One thing that was given up or cannot be given, and why."""

    what: str
    reason: str


@dataclass(frozen=True)
class CaptureOptions:
    """What is recorded beside names and times."""

    stacks_path: Path | None = None  # folded Python stacks, from steps of their own; None records none
    shapes: bool = True
    memory: bool = True
    max_trace_bytes: int = MAX_TRACE_BYTES  # of JSON before compression


@dataclass(frozen=True)
class CaptureManifest:
    """What was recorded, and everything that is less than was asked for."""

    torch_version: str
    activities: tuple[str, ...]  # "CPU", "CUDA"
    steps_expected: int
    steps_recorded: int  # different `ProfilerStep` marks in the trace
    trace_path: Path | None  # None where there is no trace; `downgrades` says why
    trace_bytes: int | None
    stacks_path: Path | None
    seconds: float  # of the whole capture, with warm-up, export and compression
    downgrades: tuple[Remark, ...]
    unavailable: tuple[Remark, ...]  # what this device cannot give
    warnings: tuple[str, ...]  # that torch gave about the profiler


@dataclass
class Record:
    """The remarks and warnings that gather while a capture runs."""

    downgrades: list[Remark] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def downgrade(self, what: str, reason: str) -> None:
        """Note that `what` is less than was asked for."""
        self.downgrades.append(Remark(what, reason))


class Session:
    """A torch profiler that never raises: `start`, `step` after every step of the program, `stop`.

    The first failure is noted as a downgrade of `what` and ends the recording; later calls do nothing. Call the three
    from one thread and one depth of calls: torch's recorder of stacks asserts on it.
    """

    def __init__(self, what: str, record: Record, make: Callable[[], torch.profiler.profile]) -> None:
        self._what = what
        self._record = record
        self._make = make
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        """Make the profiler and begin its schedule."""
        with _quiet_kineto():
            self._guarded(self._create)
            if self._profile is not None:
                self._guarded(self._profile.start)

    def step(self) -> None:
        """Tell the profiler that a step of the program has ended."""
        if self._profile is not None:
            self._guarded(self._profile.step)

    def stop(self, *, export: bool = True) -> None:
        """End the recording and let go of the profiler; without `export` an unfinished cycle is thrown away."""
        if self._profile is not None:
            if not export:
                self._profile.on_trace_ready = None
            self._guarded(self._profile.stop)
        self._profile = None
        gc.collect()  # the profiler object is a circle of references that holds every event

    def _create(self) -> None:
        if torch.autograd._profiler_enabled():  # a second one would throw away what the first has recorded
            raise RuntimeError("another torch profiler is at work in this process")
        self._profile = self._make()

    def _guarded(self, action: Callable[[], None]) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                action()
            except Exception as error:
                self._give_up(error)
        self._record.warnings += [str(warning.message) for warning in caught]

    def _give_up(self, error: Exception) -> None:
        text = (str(error).splitlines() or [""])[0][:MESSAGE_CHARACTERS]
        self._record.downgrade(self._what, f"{type(error).__name__}: {text}")
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.on_trace_ready = None
            with contextlib.suppress(Exception):  # it may be running still, or stopped half-way
                profile.stop()


def capture(
    step: Callable[[int], object],
    *,
    device: torch.device,
    steps: int,
    warmup: int,
    trace_path: Path,
    options: CaptureOptions | None = None,
) -> CaptureManifest:
    """Run `step(0)`, `step(1)`, … and record `steps` of them after `warmup`; return what was obtained.

    `trace_path` ends with `.json` or `.json.gz`. Stacks, and a second try after a trace above `max_trace_bytes`, run
    further steps. An exception of `step` passes through, with the profiler stopped and no file written.
    """
    if not trace_path.name.endswith((".json", ".json.gz")):
        raise ValueError(f"trace_path is {trace_path}; it must end with .json or .json.gz")
    if steps < 1 or warmup < 0:
        raise ValueError(f"steps is {steps} and warmup is {warmup}; at least 1 and 0 are needed")
    started = time.perf_counter()
    job = _Job(step, device, warmup, options or CaptureOptions())
    trace = job.record_trace(trace_path, steps)
    stacks_path = job.record_stacks()
    return CaptureManifest(
        torch_version=str(torch.__version__),
        activities=tuple(activity.name for activity in job.activities),
        steps_expected=steps,
        steps_recorded=trace.steps if trace else 0,
        trace_path=trace_path if trace else None,
        trace_bytes=trace_path.stat().st_size if trace else None,
        stacks_path=stacks_path,
        seconds=time.perf_counter() - started,
        downgrades=tuple(job.record.downgrades),
        unavailable=_unavailable_on(device, job.activities),
        warnings=tuple(dict.fromkeys(job.record.warnings)),
    )


@dataclass(frozen=True)
class _Saved:
    steps: int
    device_events: bool


class _Job:
    """The cycles of one capture, which share the program, its step numbers, the device and the record."""

    def __init__(
        self, step: Callable[[int], object], device: torch.device, warmup: int, options: CaptureOptions
    ) -> None:
        self.record = Record()
        self.activities = _activities_on(device)
        self._step = step
        self._numbers = itertools.count()
        self._synchronize = synchronizer(device)
        self._warmup = warmup
        self._options = options

    def record_trace(self, path: Path, steps: int) -> _Saved | None:
        """Record and save the trace, less and less of it until it fits; None where there is none in the end."""
        limit = self._options.max_trace_bytes
        shapes, memory = self._options.shapes, self._options.memory
        while True:
            json_bytes, saved = self._try_trace(path, steps, record_shapes=shapes, profile_memory=memory)
            if json_bytes <= limit:
                break
            excess = f"{steps} step(s) made {json_bytes / 1e6:.1f} MB of JSON, above the limit of {limit / 1e6:.1f} MB"
            if steps > 1:
                steps = max(1, steps * limit // json_bytes)
                self.record.downgrade("steps", f"{excess}; recorded {steps} instead")
            elif shapes or memory:
                shapes = memory = False
                self.record.downgrade("shapes and memory", f"{excess}; left out")
            else:
                self.record.downgrade("trace", f"{excess}; not written")
                break
        if saved:
            self._note_gaps(saved, steps)
        return saved

    def record_stacks(self) -> Path | None:
        """Record folded stacks in steps of their own, as they swell a trace; return their path, None without them."""
        path, limit = self._options.stacks_path, self._options.max_trace_bytes
        if path is None:
            return None
        written = None

        def fold(raw: Path) -> None:
            nonlocal written
            if raw.stat().st_size > limit:
                raise ValueError(f"the trace with stacks is larger than {limit / 1e6:.1f} MB")
            lines = folded_stacks(read_trace(raw))
            if not lines:
                raise ValueError("the trace holds no Python frames")
            files.write_text(path, "\n".join(lines) + "\n")
            written = path

        self._run("stacks", STACK_STEPS, path.parent, fold, with_stack=True)
        return written

    def _try_trace(self, path: Path, steps: int, **settings: bool) -> tuple[int, _Saved | None]:
        """Return the bytes of JSON that the steps made, 0 if the profiler failed, and what was saved of them."""
        json_bytes, saved = 0, None

        def keep(raw: Path) -> None:
            nonlocal json_bytes, saved
            json_bytes = raw.stat().st_size
            if json_bytes <= self._options.max_trace_bytes:
                trace = read_trace(raw)
                _publish(raw, path)
                saved = _Saved(step_count(trace), bool(trace.in_categories(DEVICE_CATEGORIES).any()))

        self._run("trace", steps, path.parent, keep, **settings)
        return json_bytes, saved

    def _run(self, what: str, steps: int, folder: Path, use: Callable[[Path], None], **settings: bool) -> None:
        """Run warm-up and `steps` under the profiler; hand the exported trace, a file that then goes, to `use`."""

        def export(profile: torch.profiler.profile) -> None:
            with _exported(profile, folder) as raw:
                use(raw)

        def make() -> torch.profiler.profile:
            cycle = torch.profiler.schedule(wait=0, warmup=self._warmup, active=steps, repeat=1)
            return torch.profiler.profile(activities=self.activities, schedule=cycle, on_trace_ready=export, **settings)

        session = Session(what, self.record, make)
        self._synchronize()
        try:
            session.start()
            for number in range(self._warmup + steps):
                self._step(next(self._numbers))
                if number == self._warmup - 1:  # recording starts here: without work that was queued before
                    self._synchronize()
                session.step()
        except BaseException:
            session.stop(export=False)
            raise
        session.stop()

    def _note_gaps(self, saved: _Saved, steps: int) -> None:
        if saved.steps < steps:
            self.record.downgrade("steps", f"{saved.steps} of {steps} are in the trace")
        if len(self.activities) > 1 and not saved.device_events:
            self.record.downgrade("device events", "the trace holds none; run with KINETO_LOG_LEVEL=0 to see why")


def _activities_on(device: torch.device) -> list[torch.profiler.ProfilerActivity]:
    """Return what torch can record for a program on `device`: the CPU and, where supported, the device."""
    supported = torch.profiler.supported_activities()
    names = dict.fromkeys(["CPU", device.type.upper()])
    return [activity for name in names for activity in supported if activity.name == name]


def _unavailable_on(device: torch.device, activities: Sequence[torch.profiler.ProfilerActivity]) -> tuple[Remark, ...]:
    remarks = []
    if len(activities) == 1:
        remarks.append(Remark("device events", f"the profiler of this torch records none for {device.type}"))
    if device.type != "cuda":
        remarks.append(Remark("memory snapshot", f"torch keeps one for CUDA only; the program runs on {device.type}"))
    return tuple(remarks)


@contextlib.contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep the `USDT:` lines of torch 2.13 off the terminal, unless the user has set a log level.

    The library below the profiler reads the level once, when the process prepares its first profiler. 6 is above all
    messages; its errors show as a trace without device events.
    """
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = "6"
    try:
        yield
    finally:
        del os.environ["KINETO_LOG_LEVEL"]


@contextlib.contextmanager
def _exported(profile: torch.profiler.profile, folder: Path) -> Iterator[Path]:
    """Yield the path of the trace as plain JSON, a temporary file that goes when the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = folder / f"{files.TEMPORARY_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}.json"
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
