"""Stand-ins for time and threads, so that a test compares with `==` and never waits."""

import pytest


class FakeClock:
    """A clock that moves only when told to. Steps that are sums of powers of two stay exact."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FakeNanoseconds:
    """A clock of whole nanoseconds, as `time.perf_counter_ns`, that moves only when told to."""

    def __init__(self, now: int = 0) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now

    def advance(self, seconds: float) -> None:
        self.wait(round(seconds * 1_000_000_000))

    def wait(self, nanoseconds: int) -> None:
        self.now += nanoseconds


class FakeThreads:
    """The number of threads that torch is asked for and told, without any that would wait for a core."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int = 1) -> None:
        self.number = number
        monkeypatch.setattr("torch.get_num_threads", lambda: self.number)
        monkeypatch.setattr("torch.set_num_threads", self.set)

    def set(self, number: int) -> None:
        self.number = number
