"""How long machines and devices were busy with an evaluation, from what its shards cost."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from utils.evaluation.parts import Cost

Span = tuple[float, float]  # start and length in seconds, by the clock of one machine


def busy_seconds(spans: Sequence[Span]) -> float:
    """Return the seconds in which at least one of the spans was going on.

    So workers that ran beside each other count once, and pauses between two attempts not at all.
    """
    total, until = 0.0, float("-inf")
    for start, length in sorted(spans):
        end = start + length
        if start >= until:
            total += length
        elif end > until:
            total += end - until
        until = max(until, end)
    return total


def occupancy(costs: Sequence[Cost]) -> dict[str, Any]:
    """Return the busy seconds of each machine, added up, and those of each device; None with a reason if unknown.

    Workers that share a GPU, or the cores of a machine, are on one device. Clocks of two machines are not compared.
    """
    if any(each.host is None for each in costs):
        reason = "parts of an earlier version do not tell on which machine and device they were predicted"
        return {"machine_time_s": None, "device_time_s": None, "machine_time_reason": reason}
    spans = [(each, (each.started_unix_s, each.seconds)) for each in costs]
    return {
        "machine_time_s": _added_up((each.host, span) for each, span in spans),
        "device_time_s": _added_up(((each.host, each.device_id), span) for each, span in spans),
        "machine_time_reason": None,
    }


def _added_up(spans: Iterable[tuple[Hashable, Span]]) -> float:
    """Return the busy seconds of each place, added up."""
    places: defaultdict[Hashable, list[Span]] = defaultdict(list)
    for place, span in spans:
        places[place].append(span)
    return sum(busy_seconds(each) for each in places.values())
