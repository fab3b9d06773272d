"""One recording with torch.profiler that never raises, and what the profiler of this torch and device can do."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.profiler

from boundby.capture.exclusion import AT_WORK, BEGUN, Watch, is_another_at_work
from boundby.capture.manifest import Record
from boundby.capture.schedule import Span
from boundby.remarks import summary

Use = Callable[[torch.profiler.profile], object]  # of the stopped profiler


class Session:
    """A torch profiler over one span of steps: `start`, `step` after every step of the program, `stop`.

    `use` receives the stopped profiler once there is something to export. The first failure is noted as a downgrade of
    `what` and ends the recording; later calls do nothing. So does another profiler of the program, at work before or
    begun meanwhile, which is left alone. Call `step` from one thread and one depth of calls: torch's recorder of stacks
    asserts on it.
    """

    def __init__(
        self,
        what: str,
        record: Record,
        span: Span,
        use: Use,
        settings: dict[str, Any],
    ) -> None:
        self._what = what
        self._record = record
        self._span = span
        self._use = use
        self._settings = settings
        self._profile: torch.profiler.profile | None = None
        self._at = 0
        self._is_ready = False
        self._watch = Watch(self._give_way)
        self.has_failed = False
        self.has_given_way = False

    @property
    def is_at_work(self) -> bool:
        """Tell whether a profiler slows the program: this one, or the one that it has given way to."""
        return self._profile is not None or self.has_given_way

    def start(self) -> None:
        """Make the profiler and begin the span."""
        if is_another_at_work():
            self.has_given_way = True
            self._record.downgrade(self._what, AT_WORK)
            return
        with _quiet_kineto(), _noted_warnings(self._record):
            self._attempt(self._create)
            if self._profile is not None:
                self._watch.on()
                self._attempt(self._profile.start)

    def record(self) -> None:
        """Do nothing: the profiler has a schedule of its own."""

    def step(self) -> None:
        """Tell the profiler that a step of the program has ended; once it has recorded, stop."""
        self._at += 1
        if self._profile is not None:
            self._watch.answer()
        if self._profile is None:
            return
        # Catching warnings is slow and holds for all threads: only where torch starts or stops to record.
        is_transition = self._at in (self._span.warmup, self._span.length) or _has_device_stopped()
        with _noted_warnings(self._record) if is_transition else contextlib.nullcontext():
            self._attempt(self._profile.step)
        if self._is_ready:
            self.stop()

    def stop(self, *, export: bool = True) -> None:
        """End the recording and let go of the profiler; without `export` an unfinished span is thrown away."""
        if self._profile is None:
            return
        with _noted_warnings(self._record):
            self._attempt(self._profile.stop)
        self._watch.off()
        if self._profile is not None and export and self._is_ready:
            profile = self._profile
            self._attempt(lambda: self._use(profile))
        self._let_go()

    def _create(self) -> None:
        profile = torch.profiler.profile(
            schedule=self._span.action, on_trace_ready=self._note_ready, **with_configuration(self._settings)
        )
        profile.step_num = self._span.first  # so that a mark `ProfilerStep#k` bears the program's own number
        self._profile = profile

    def _note_ready(self, _: torch.profiler.profile) -> None:
        self._is_ready = True

    def _give_way(self) -> None:
        """End at once and keep nothing: another profiler is about to begin."""
        self.has_given_way = True
        self._record.downgrade(self._what, BEGUN)
        self._abandon()

    def _let_go(self) -> None:
        """Drop the profiler, and what holds its events: it is a circle of references itself.

        A collection of garbage would free them too, and takes 0.4 s among 430,000 objects.
        """
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.profiler = None

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            self._watch.own(action)
        except Exception as error:
            self._record.downgrade(self._what, summary(error))
            self.has_failed = True
            self._abandon()

    def _abandon(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            with contextlib.suppress(Exception):  # it may be running still, or stopped half-way
                self._watch.own(profile.stop)
            profile.profiler = None
        self._watch.off()


def with_configuration(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the experimental ones that this torch knows; it adds and removes some every release.

    `trace_only` spares the program torch's own tables: leaving the recording takes a quarter of the time. It excludes
    stacks. `enable_cuda_sync_events` shows which stream waits for which.
    """
    wanted = {"trace_only": not settings.get("with_stack", False), "enable_cuda_sync_events": True}
    make: Callable[..., Any] | None = getattr(torch._C._profiler, "_ExperimentalConfig", None)
    if make is None:
        return settings
    known = {}
    for name, value in wanted.items():
        with contextlib.suppress(TypeError):
            make(**{name: value})
            known[name] = value
    return {**settings, "experimental_config": make(**known)} if known else settings


def activities_on(device: torch.device) -> list[torch.profiler.ProfilerActivity]:
    """Return what torch can record for a program on `device`: the CPU and, where supported, the device."""
    supported: set[torch.profiler.ProfilerActivity] = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
    names = dict.fromkeys(["CPU", device.type.upper()])
    return [activity for name in names for activity in supported if activity.name == name]


def _has_device_stopped() -> bool:
    """Tell whether the device collects no more, as when CUPTI has no buffer left; False where torch does not say."""
    return hasattr(torch.autograd, "_is_kineto_stopped") and torch.autograd._is_kineto_stopped()


@contextlib.contextmanager
def _noted_warnings(record: Record) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    record.warnings += [str(warning.message) for warning in caught]


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
