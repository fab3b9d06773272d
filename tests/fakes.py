"""Stand-ins for time, so that a test compares with `==` and never waits."""


class FakeClock:
    """A clock that moves only when told to. Steps that are sums of powers of two stay exact."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
