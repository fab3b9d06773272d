"""A device that moves only when told to, and loops whose stages take known times on them."""

from boundby.training import StageTimer
from tests.fakes import FakeNanoseconds

S = 1_000_000_000


class Device:
    """A stream whose marks get their time when the test lets the device reach them."""

    def __init__(self) -> None:
        self.queued: list[list] = []  # [time or None]
        self.reused = 0
        self.stream = 0

    def mark(self) -> list:
        self.queued.append([None, self.stream])
        return self.queued[-1]

    def reach(self, *times: float) -> None:
        waiting = [mark for mark in self.queued if mark[0] is None]
        for mark, at in zip(waiting, times, strict=False):
            mark[0] = at

    def has_passed(self, mark: list) -> bool:
        return mark[0] is not None

    def seconds_between(self, start: list, end: list) -> float | None:
        return end[0] - start[0] if start[1] == end[1] else None

    def reuse(self, mark: list) -> None:
        self.reused += 1


def run(timer: StageTimer, clock: FakeNanoseconds, **seconds: float) -> None:
    for name, duration in seconds.items():
        with timer.stage(name):
            clock.advance(duration)


def reasons(timer: StageTimer) -> list[str]:
    return [remark.reason for remark in timer.remarks.all()]


def host_ns(timer: StageTimer, name: str, kind: str = "stage") -> list[int]:
    return timer.snapshot().rows_of(name, kind)["host_ns"].tolist()
