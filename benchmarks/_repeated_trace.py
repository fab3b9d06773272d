"""Repeats a real trace in time; prints one line of JSON last. A process of its own: it holds a copy as Python objects.

Every copy follows the one before it, with later time stamps and steps and with identifiers of its own, so that each
launch still finds its kernel, each operator its launches and each backward operator its forward one, and no other.
Work that was launched before the recording began stands in the first copy alone: in the midst it would be a fault.
"""

import argparse
import contextlib
import gzip
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP = re.compile(r"ProfilerStep#(\d+)")
IDENTIFIERS = ("correlation", "External id", "Sequence number", "Record function id", "Ev Idx")
CALLS, WORK = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")
COMPACT = (",", ":")

Event = dict[str, Any]


@dataclass(frozen=True)
class Strides:
    """What lies between a copy and the next one."""

    time_us: int
    identifiers: int
    steps: int


def main() -> None:
    """Write a trace of each number of copies into a folder and print where, how large and how many events."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("copies", type=int, nargs="+")
    args = parser.parse_args()
    with gzip.open(args.source) as file:
        trace = json.load(file)
    events, later = len(trace["traceEvents"]), len(with_launches(trace["traceEvents"]))
    paths = {copies: args.folder / f"{copies}-copies.pt.trace.json" for copies in args.copies}
    write(trace, paths)
    made = [
        {"copies": copies, "path": str(path), "events": events + (copies - 1) * later, "bytes": path.stat().st_size}
        for copies, path in paths.items()
    ]
    print(json.dumps(made))


def write(trace: dict[str, Any], paths: dict[int, Path]) -> None:
    """Write the trace as often in a row as each key of `paths` says; its events are those of the last copy then."""
    events = trace.pop("traceEvents")
    strides = strides_of(events)
    head = json.dumps(trace, separators=COMPACT).removesuffix("}") + ("," if trace else "")
    with contextlib.ExitStack() as stack:
        files = {copies: stack.enter_context(path.open("w", encoding="utf-8")) for copies, path in paths.items()}
        for file in files.values():
            file.write(f'{head}"traceEvents":[')
        for copy in range(max(files)):
            if copy == 1:
                events = with_launches(events)
            text = ("," if copy else "") + json.dumps(events, separators=COMPACT)[1:-1]
            for copies, file in files.items():
                if copy < copies:
                    file.write(text)
            shift(events, strides)
        for file in files.values():
            file.write("]}")


def with_launches(events: Sequence[Event]) -> list[Event]:
    """Return the events without the work of a device that no call in the trace has launched."""
    known = {event["args"].get("correlation") for event in events if event.get("cat") in CALLS and "args" in event}
    return [event for event in events if event.get("cat") not in WORK or event["args"].get("correlation") in known]


def strides_of(events: Sequence[Event]) -> Strides:
    """Return the distance at which two copies share no moment, no identifier and no step."""
    start = min(event["ts"] for event in events)
    end = max(event["ts"] + event.get("dur", 0) for event in events)
    identifiers = max((value for event in events for value in _identifiers(event)), default=0)
    steps = [int(match[1]) for event in events if (match := STEP.fullmatch(event["name"]))]
    return Strides(end - start + 1, identifiers + 1, max(steps) - min(steps) + 1 if steps else 0)


def shift(events: Iterable[Event], strides: Strides) -> None:
    """Move the events on by one copy, in place. Identifiers of 0 and less mean "none" and stay."""
    for event in events:
        event["ts"] += strides.time_us
        args = event.get("args", {})
        for holder, names in ((args, IDENTIFIERS), (event, ("id",))):
            for name in names:
                if holder.get(name, 0) > 0:
                    holder[name] += strides.identifiers
        if match := STEP.fullmatch(event["name"]):
            event["name"] = f"ProfilerStep#{int(match[1]) + strides.steps}"


def _identifiers(event: Event) -> list[int]:
    args = event.get("args", {})
    return [event.get("id", 0), *(args.get(name, 0) for name in IDENTIFIERS)]


if __name__ == "__main__":
    main()
