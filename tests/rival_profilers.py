"""A recorder of ours and a torch profiler of the program in one process, in orders that would end it.

python -m tests.rival_profilers FOLDER writes what each case came to; without the rule that one gives way, most of them
are a segmentation fault.
"""

import json
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile, schedule

from boundby.capture import CaptureManifest, CaptureOptions, Naming, Recorder, Schedule, exclusion

STEPS = 10  # of each loop; ours is in warm-up in step 2 and records the steps 3 and 4
OURS = Schedule(2, 1, 2)


@dataclass
class Loop:
    """A loop with our recorder, whose steps multiply two matrices, and the program's own profiler."""

    folder: Path
    stacks: bool = False
    retries: bool = False  # whether there are steps for another cycle of ours

    def run(self, theirs: Callable[[int], object]) -> CaptureManifest:
        """Call `theirs` with the number of each step at its begin, and with `STEPS` after the last one."""
        options = CaptureOptions(stacks_path=self.folder / "stacks.txt" if self.stacks else None)
        recorder = Recorder(
            OURS, self.folder / "ours.json", device=torch.device("cpu"), options=options, naming=Naming()
        )
        recorder.start(None if self.retries else OURS.steps)
        for number in range(STEPS):
            theirs(number)
            work()
            recorder.step()
        theirs(STEPS)
        return recorder.stop()


def work() -> None:
    """Do what is recorded: one product forward, two backward."""
    a = torch.ones(4, 4, requires_grad=True)
    (a @ a).sum().backward()


def products_in(path: Path) -> int:
    """Return how many of the steps are in a trace."""
    return sum(event.get("name") == "aten::mm" for event in json.loads(path.read_text())["traceEvents"]) // 3


class Theirs:
    """The program's own profiler, from the begin of one step until that of another."""

    def __init__(self, folder: Path, first: int, end: int, **settings: Any) -> None:
        self.folder, self.first, self.end = folder, first, end
        self.profile = profile(activities=[ProfilerActivity.CPU], **settings)
        self.recorded: list[int] = []  # steps, by export

    def __call__(self, number: int) -> None:
        if number == self.first:
            self.profile.start()
        if number == self.end:
            self.profile.stop()
            self.export(self.profile)

    def export(self, profile: Any) -> None:
        path = self.folder / "theirs.json"
        profile.export_chrome_trace(str(path))
        self.recorded.append(products_in(path))


def alone(folder: Path) -> tuple[CaptureManifest, list[int]]:
    theirs = Theirs(folder, 0, 1)
    return Loop(folder).run(theirs), theirs.recorded


def around(folder: Path) -> tuple[CaptureManifest, list[int]]:
    theirs = Theirs(folder, 0, STEPS)
    return Loop(folder, retries=True).run(theirs), theirs.recorded


def warm_before(folder: Path) -> tuple[CaptureManifest, list[int]]:
    """Theirs is in warm-up from step 1 on, ours would be from step 2 on."""
    theirs = Theirs(folder, 1, -1, schedule=schedule(wait=0, warmup=2, active=2, repeat=1))
    theirs.profile.on_trace_ready = theirs.export
    return Loop(folder).run(_stepped(theirs)), theirs.recorded


def begun_in_warm_up(folder: Path) -> tuple[CaptureManifest, list[int]]:
    """Theirs begins behind the begin of our warm-up, and ours is tried again when theirs has ended."""
    theirs = Theirs(folder, 2, 4)
    return Loop(folder, retries=True).run(theirs), theirs.recorded


def begun_in_recording(folder: Path) -> tuple[CaptureManifest, list[int]]:
    theirs = Theirs(folder, 4, 7, with_stack=True)
    return Loop(folder, stacks=True).run(theirs), theirs.recorded


def warm_in_recording(folder: Path) -> tuple[CaptureManifest, list[int]]:
    theirs = Theirs(folder, 4, -1, schedule=schedule(wait=0, warmup=2, active=2, repeat=1))
    theirs.profile.on_trace_ready = theirs.export
    return Loop(folder).run(_stepped(theirs)), theirs.recorded


def in_turns(folder: Path) -> tuple[CaptureManifest, list[int]]:
    """Theirs records two of every four steps; it collides with ours wherever that opens."""
    theirs = Theirs(folder, 0, -1, schedule=schedule(wait=1, warmup=1, active=2))
    theirs.profile.on_trace_ready = theirs.export
    return Loop(folder, retries=True).run(_stepped(theirs)), theirs.recorded


def of_another_thread(folder: Path) -> tuple[CaptureManifest, list[int]]:
    """Theirs, of a thread of its own, begins in the first step that ours records."""
    may_end = threading.Event()
    may_end.set()
    thread, found = _thread(folder, may_end)
    answer = exclusion.Watch.answer

    def theirs(number: int) -> None:
        if number == 3:
            thread.start()
            exclusion.Watch.answer = lambda watch: watch.asked.wait() and answer(watch)
        if number == 4:
            thread.join()
            exclusion.Watch.answer = answer

    return Loop(folder).run(theirs), found


def before_in_another_thread(folder: Path) -> tuple[CaptureManifest, list[int]]:
    may_end = threading.Event()
    thread, found = _thread(folder, may_end)
    thread.start()
    while not autograd_profiler._is_profiler_enabled:
        pass
    manifest = Loop(folder).run(lambda number: None)
    may_end.set()
    thread.join()
    return manifest, found


CASES = (
    *(alone, around, warm_before, begun_in_warm_up, begun_in_recording, warm_in_recording, in_turns),
    *(of_another_thread, before_in_another_thread),
)


def _thread(folder: Path, may_end: threading.Event) -> tuple[threading.Thread, list[int]]:
    """Return a thread that records a product, and the list that will hold what it found in its trace."""
    found: list[int] = []

    def record() -> None:
        with profile(activities=[ProfilerActivity.CPU]) as theirs:
            work()
            may_end.wait()
        theirs.export_chrome_trace(str(folder / "theirs.json"))
        found.append(products_in(folder / "theirs.json"))

    return threading.Thread(target=record), found


def _stepped(theirs: Theirs) -> Callable[[int], None]:
    """Return what starts a profiler with a schedule at its first step, and tells it of every other one."""

    def tell(number: int) -> None:
        theirs(number)
        if number > theirs.first:
            theirs.profile.step()
        if number == STEPS:
            theirs.profile.stop()

    return tell


def outcome(case: Callable[[Path], tuple[CaptureManifest, list[int]]], place: Path) -> dict[str, Any]:
    """Return what a case came to: the steps in every export of theirs, in ours, and in that of a profiler behind it."""
    place.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about cycles of theirs
        manifest, theirs = case(place)
    with profile(activities=[ProfilerActivity.CPU]) as later:
        work()
    later.export_chrome_trace(str(place / "later.json"))
    return {
        "theirs": theirs,
        "ours": manifest.steps_recorded,
        "traced": products_in(manifest.trace_path) if manifest.trace_path else 0,
        "later": products_in(place / "later.json"),
        "downgrades": [f"{each.what}: {each.reason}" for each in manifest.downgrades],
    }


if __name__ == "__main__":
    target = Path(sys.argv[1])
    for each in CASES:
        found = outcome(each, target / each.__name__)
        (target / f"{each.__name__}.json").write_text(json.dumps(found))
