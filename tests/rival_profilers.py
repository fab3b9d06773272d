"""A recorder of ours and a torch profiler of the program in one process, in orders that would end it.

python -m tests.rival_profilers FOLDER writes what each case came to; without the rule that one gives way, most of them
are a segmentation fault.
"""

import json
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile, schedule

from boundby.capture import CaptureManifest, CaptureOptions, Naming, Recorder, Schedule, session

STEPS = 10  # of each loop; ours is in warm-up in step 2 and records the steps 3 and 4
OURS = Schedule(2, 1, 2)
CPU = [ProfilerActivity.CPU]


@dataclass
class Case:
    """The program's own profiler, from the begin of one step until that of another, beside ours in a loop."""

    first: int = 0
    end: int = STEPS
    retries: bool = False  # whether there are steps for another cycle of ours
    stacks: bool = False
    schedule: dict[str, int] = field(default_factory=dict)

    def run(self, folder: Path) -> tuple[CaptureManifest, list[int]]:
        """Return what ours left, and the steps in every export of theirs."""
        recorded: list[int] = []

        def export(theirs: Any) -> None:
            theirs.export_chrome_trace(str(folder / "theirs.json"))
            recorded.append(products_in(folder / "theirs.json"))

        given = {"schedule": schedule(**self.schedule), "on_trace_ready": export} if self.schedule else {}
        theirs = profile(activities=CPU, with_stack=self.stacks, **given)

        def act(number: int) -> None:
            if number == self.first:
                theirs.start()
            elif number > self.first and self.schedule:
                theirs.step()
            if number == self.end:
                theirs.stop()
                if not self.schedule:
                    export(theirs)

        return looped(folder, act, retries=self.retries, stacks=self.stacks), recorded


def looped(
    folder: Path, act: Callable[[int], object], *, retries: bool = False, stacks: bool = False
) -> CaptureManifest:
    """Run our loop; call `act` with the number of each step at its begin, and with `STEPS` after the last one."""
    options = CaptureOptions(stacks_path=folder / "stacks.txt" if stacks else None)
    recorder = Recorder(OURS, folder / "ours.json", device=torch.device("cpu"), options=options, naming=Naming())
    recorder.start(None if retries else OURS.steps)
    for number in range(STEPS):
        act(number)
        work()
        recorder.step()
    act(STEPS)
    return recorder.stop()


def work() -> None:
    """Do what is recorded: one product forward, two backward."""
    a = torch.ones(4, 4, requires_grad=True)
    (a @ a).sum().backward()


def products_in(path: Path) -> int:
    """Return how many of the steps are in a trace."""
    return sum(event.get("name") == "aten::mm" for event in json.loads(path.read_text())["traceEvents"]) // 3


def of_another_thread(folder: Path, *, before: bool = False) -> tuple[CaptureManifest, list[int]]:
    """Let a thread of its own record one step: around our whole loop, or from the first step that ours records on."""
    may_end, recorded = threading.Event(), []
    answer = session.Watch.answer

    def record() -> None:
        with profile(activities=CPU) as theirs:
            work()
            may_end.wait()
        theirs.export_chrome_trace(str(folder / "theirs.json"))
        recorded.append(products_in(folder / "theirs.json"))

    thread = threading.Thread(target=record)

    def act(number: int) -> None:
        if number == 3 and not before:
            may_end.set()
            thread.start()
            session.Watch.answer = lambda watch: watch.asked.wait() and answer(watch)
        if number == 4 and not before:
            thread.join()
            session.Watch.answer = answer

    if before:
        thread.start()
        while not autograd_profiler._is_profiler_enabled:
            pass
    manifest = looped(folder, act)
    may_end.set()
    thread.join()
    return manifest, recorded


CASES = {
    "alone": Case(0, 1).run,
    "around": Case(retries=True).run,
    # Theirs is in warm-up from step 1 on, ours would be from step 2 on.
    "warm_before": Case(1, schedule={"wait": 0, "warmup": 2, "active": 2, "repeat": 1}).run,
    "begun_in_warm_up": Case(2, 4, retries=True).run,  # ours is tried again when theirs has ended
    "begun_in_recording": Case(4, 7, stacks=True).run,
    "warm_in_recording": Case(4, schedule={"wait": 0, "warmup": 2, "active": 2, "repeat": 1}).run,
    "in_turns": Case(retries=True, schedule={"wait": 1, "warmup": 1, "active": 2}).run,  # two of every four steps
    "of_another_thread": of_another_thread,
    "before_in_another_thread": lambda folder: of_another_thread(folder, before=True),
}


def outcome(case: Callable[[Path], tuple[CaptureManifest, list[int]]], place: Path) -> dict[str, Any]:
    """Return what a case came to: the steps in every export of theirs, in ours, and in that of a profiler behind it."""
    place.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about cycles of theirs
        manifest, theirs = case(place)
    with profile(activities=CPU) as later:
        work()
    later.export_chrome_trace(str(place / "later.json"))
    return {
        "theirs": theirs,
        "ours": manifest.steps_recorded,
        "traced": products_in(manifest.trace_path) if manifest.trace_path else 0,
        "later": products_in(place / "later.json"),
        "downgrades": [f"{downgrade.what}: {downgrade.reason}" for downgrade in manifest.downgrades],
    }


if __name__ == "__main__":
    for name, case in CASES.items():
        (Path(sys.argv[1]) / f"{name}.json").write_text(json.dumps(outcome(case, Path(sys.argv[1]) / name)))
