"""What the attempts of `trace_analysis.py` amount to: plain numbers in, plain sentences out.

An attempt without a value is None. Medians are compared: of the largest trace the peer has one attempt, ours several.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

LEAST_SPEEDUP = {1: 8.0, 2: 8.0, 10: 12.0, 20: 17.0}  # by how often the trace of 109 thousand events is repeated
MOST_MEMORY = 0.3  # of the peer's
# Time per event on the largest trace over that on the smallest, which has 20 times fewer events. A sort, n log n, grows
# by 21/17 = 1.26 from 0.11 to 2.2 million; what grows faster than n^1.09 is beyond 1.3; n^2 would be at 20.
MOST_GROWTH = 1.3

Values = Sequence[float | None]


@dataclass(frozen=True)
class Compared:
    """One trace by both tools, an entry per attempt; a limit of None is not judged."""

    trace: str
    ours_s: Values
    peer_s: Values
    ours_bytes: Values
    peer_bytes: Values
    least_speedup: float | None = None
    most_memory: float | None = None

    @property
    def speedup(self) -> float | None:
        """The peer's time over ours; None where one is unknown."""
        return _ratio(self.peer_s, self.ours_s)

    @property
    def memory(self) -> float | None:
        """Our peak of memory over the peer's; None where one is unknown."""
        return _ratio(self.ours_bytes, self.peer_bytes)


def middle(values: Values) -> float | None:
    """Return the median of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def growth(seconds: Mapping[int, Values]) -> float | None:
    """Return the time per event of the largest trace over that of the smallest; `seconds` by number of events."""
    if len(seconds) < 2:
        return None
    least, most = min(seconds), max(seconds)
    found = _ratio(seconds[most], seconds[least])
    return None if found is None else found * least / most


def failures(traces: Sequence[Compared], grown: float | None) -> list[str]:
    """Return what falls short, one sentence each; [] where all that is known holds."""
    found = []
    for each in traces:
        if missing := sum(value is None for value in each.ours_s):
            found.append(f"{each.trace}: ours gave no value in {missing} of {len(each.ours_s)} attempts")
        if each.least_speedup is not None and each.speedup is not None and each.speedup < each.least_speedup:
            found.append(f"{each.trace}: ours is {each.speedup:.2f} times as fast, {each.least_speedup:.0f} are wanted")
        if each.most_memory is not None and each.memory is not None and each.memory > each.most_memory:
            found.append(f"{each.trace}: ours holds {each.memory:.2f} of the peer's memory, {each.most_memory} at most")
    if grown is not None and grown > MOST_GROWTH:
        found.append(f"ours takes {grown:.2f} times as long per event at the largest size, {MOST_GROWTH} at most")
    return found


def unjudged(traces: Sequence[Compared], grown: float | None) -> list[str]:
    """Return what has a limit and could not be held against it, a few words each."""
    found = []
    for each in traces:
        if each.least_speedup is not None and each.speedup is None:
            found.append(f"the speed on {each.trace}")
        if each.most_memory is not None and each.memory is None:
            found.append(f"the memory on {each.trace}")
    if grown is None:
        found.append("the time per event as traces grow")
    return found


def _ratio(above: Values, below: Values) -> float | None:
    upper, lower = middle(above), middle(below)
    return None if upper is None or lower is None else upper / lower
