"""The events of a trace in exact integers, and what each thread of the host was in at each moment."""

import bisect
import heapq
import json
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

STEP = re.compile(r"ProfilerStep#[0-9]+")
OLD = {"Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "Runtime": "cuda_runtime"}
OLD["Operator"] = "cpu_op"
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
HOST = ("cpu_op", "user_annotation", "python_function", *CALLS)
KINDS = ("compute", "communication", "memcpy", "memset")


@dataclass(eq=False)
class Event:
    order: int
    name: str
    category: str
    thread: tuple
    start: int
    length: int
    args: dict
    parent: "Event | None" = None

    @property
    def end(self) -> int:
        return self.start + max(self.length, 0)

    def chain(self) -> "list[Event]":
        """Return the event and what encloses it, the innermost first."""
        result, at = [], self
        while at is not None:
            result.append(at)
            at = at.parent
        return result


def nanoseconds(microseconds: Any) -> int:
    return int((Decimal(microseconds) * 1000).to_integral_value())


def exact_times(text: bytes | str) -> tuple[list[int], list[int]]:
    """Return start and duration of each event that has some, in ns as the file has them."""
    rows = [row for row in json.loads(text, parse_float=Decimal)["traceEvents"] if row.get("ph") == "X"]
    return [nanoseconds(row["ts"]) for row in rows], [nanoseconds(row["dur"]) for row in rows]


def load(text: bytes | str) -> list[Event]:
    document = json.loads(text, parse_float=Decimal)
    rows = [
        item for item in (document["traceEvents"] if isinstance(document, dict) else document) if item.get("ph") == "X"
    ]
    events = [
        Event(
            order=index,
            name=row["name"],
            category=OLD.get(row.get("cat"), row.get("cat")),
            thread=(row.get("pid"), row.get("tid")),
            start=nanoseconds(row["ts"]),
            length=nanoseconds(row["dur"]),
            args=row.get("args") or {},
        )
        for index, row in enumerate(rows)
    ]
    base = min((event.start for event in events), default=0)
    for event in events:
        event.start -= base
    return events


def kind_of_work(event: Event) -> str:
    if event.category == "kernel":
        return "communication" if "nccl" in event.name.lower() else "compute"
    return {"gpu_memcpy": "memcpy", "gpu_memset": "memset"}[event.category]


class Thread:
    """The innermost event of one thread at each moment, and who encloses whom."""

    def __init__(self, events: list[Event]) -> None:
        lasting = sorted((event for event in events if event.length > 0), key=lambda e: (e.start, -e.length, e.order))
        self.moments = sorted({moment for item in lasting for moment in (item.start, item.end)})
        self.innermost: list[Event | None] = []
        running: list[tuple[int, int, int, Event]] = []
        waiting = lasting[::-1]
        for moment in self.moments:
            while running and running[0][3].end <= moment:
                heapq.heappop(running)
            while waiting and waiting[-1].start == moment:
                entry = waiting.pop()
                entry.parent = running[0][3] if running else None
                heapq.heappush(running, (-entry.start, entry.length, -entry.order, entry))
            self.innermost.append(running[0][3] if running else None)
        for event in events:
            if event.length <= 0:
                event.parent = self.at(event.start)

    def at(self, moment: int) -> Event | None:
        index = bisect.bisect_right(self.moments, moment) - 1
        return self.innermost[index] if index >= 0 else None


def is_operator(event: Event) -> bool:
    return event.category == "cpu_op" and not STEP.fullmatch(event.name)


def operator_of(event: Event | None) -> Event | None:
    return None if event is None else next((item for item in event.chain() if is_operator(item)), None)
