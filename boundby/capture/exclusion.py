"""One torch profiler at a time, and the program's own goes first.

To prepare one throws away what another one records, unseen; when that one ends, torch 2.13 follows a null pointer, and
the process is gone. The prepared one of two that are both in warm-up ends the same way.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.profiler
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerAction

from boundby.patches import Patches

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
        self.asked, self._ended = (
            threading.Event(),
            threading.Event(),
        )  # a profiler of another thread waits; ours has ended

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
    """Tell whether it is prepared to record; one that was stopped in its warm-up has no step left."""
    is_running = getattr(profile, "step_rec_fn", None) is not None
    return is_running and getattr(profile, "current_action", None) == ProfilerAction.WARMUP
