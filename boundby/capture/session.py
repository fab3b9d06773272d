"""One recording with torch.profiler that never raises: what the profiler can do here, and who goes first of two.

To prepare one torch profiler throws away what another one records, unseen; when that one ends, torch 2.13 follows a
null pointer, and the process is gone. The prepared one of two that are both in warm-up ends the same way. So one is at
work at a time, and the program's own goes first.
"""

import contextlib
import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.profiler
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerAction

from boundby.capture.instruments import Instrument
from boundby.capture.manifest import Record
from boundby.capture.patches import Patches
from boundby.capture.remarks import summary
from boundby.capture.schedule import Span
from boundby.machine import is_sticky

WAY_OUT = "two at once would end the process: leave it out to record this"
AT_WORK = f"another torch profiler is at work, and slows the program; {WAY_OUT}"
BEGUN = f"another torch profiler began; {WAY_OUT}"
LONGEST_WAIT_S = 10.0  # of a thread that begins a profiler, for the step of the loop that ends ours


def is_another_at_work() -> bool:
    """Tell whether a torch profiler of this process records or is in warm-up, whichever thread has begun it.

    The search for one in warm-up, of which torch itself tells nothing, takes 0.1 s with 1.7 million objects.
    """
    is_recording = autograd_profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled()
    return is_recording or any(_is_in_warm_up(profile) for profile in _instances(torch.profiler.profile))


class Watch:
    """Ends our profiler before another one begins: `on` from before ours is prepared, `off` when it has ended.

    `give_way` is called in the thread that `on` was; a profiler that begins in another one waits for `answer`, which
    the loop calls after each step. What ours does itself is done within `own`.
    """

    def __init__(self, give_way: Callable[[], None]) -> None:
        self._give_way = give_way
        self._patches = Patches()
        self._thread: int | None = None
        self._is_own = False
        self.asked, self._ended = threading.Event(), threading.Event()  # a profiler of another thread waits; ours ended

    def on(self) -> None:
        """Begin to watch."""
        self._thread = threading.get_ident()
        self._patches.put(autograd_profiler, "_prepare_profiler", self._before)
        self._patches.put(autograd_profiler, "_run_on_profiler_start", self._before)

    def off(self) -> None:
        """Cease to watch: ours has ended."""
        self._patches.undo()
        self._ended.set()

    def own(self, action: Callable[[], object]) -> None:
        """Run an action of our own profiler, which must not make us give way."""
        self._is_own = True
        try:
            action()
        finally:
            self._is_own = False

    def answer(self) -> None:
        """Give way to a profiler that waits in another thread."""
        if self.asked.is_set():
            self._give_way()

    def _before(self, begin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            self.asked.set()
            self._ended.wait(LONGEST_WAIT_S)
        elif not self._is_own:
            self._give_way()
        return begin(*args, **kwargs)


def _instances(kind: type) -> Iterator[Any]:
    """Yield the objects of a class and of those derived from it."""
    yield from (referrer for referrer in gc.get_referrers(kind) if type(referrer) is kind)
    subclasses: list[type] = kind.__subclasses__()
    for derived in subclasses:
        yield from _instances(derived)


def _is_in_warm_up(profile: Any) -> bool:
    """Tell whether it is prepared to record; one that was stopped in its warm-up has results, and no step left.

    Before torch 2.13 it keeps the step. With `acc_events` results stay from cycle to cycle, and tell nothing.
    """
    inner, step = getattr(profile, "profiler", None), getattr(profile, "step_rec_fn", None)
    has_ended = getattr(inner, "kineto_results", None) is not None and not getattr(profile, "acc_events", False)
    is_running = None not in (inner, step) and not has_ended
    return is_running and getattr(profile, "current_action", None) == ProfilerAction.WARMUP


Use = Callable[[torch.profiler.profile], object]  # of the stopped profiler


class Session(Instrument):
    """A torch profiler over one span of steps: `start`, `step` after every step of the program, `stop`.

    `use` receives the stopped profiler once there is something to export. The first failure is noted as a downgrade of
    `what` and ends the recording; later calls do nothing. So does another profiler of the program, at work before or
    begun meanwhile, which is left alone. Call `step` from one thread and one depth of calls: torch's recorder of stacks
    asserts on it.
    """

    def __init__(self, what: str, record: Record, span: Span, use: Use, settings: dict[str, Any]) -> None:
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
        with quiet_kineto(), _noted_warnings(self._record):
            self._attempt(self._create)
            if self._profile is not None:
                self._watch.on()
                self._attempt(self._profile.start)

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
            if is_sticky(error):
                self.leave()
            self._abandon()

    def leave(self) -> None:
        """End the recording of a GPU that is lost: to stop the profiler would be to wait for it."""
        with contextlib.suppress(RuntimeError):  # it was in its warm-up
            torch._C._autograd._disable_profiler()
        self._let_go()
        self._watch.off()

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
def quiet_kineto() -> Iterator[None]:
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
