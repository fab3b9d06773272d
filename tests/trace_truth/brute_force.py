"""The arithmetic of a trace once more, in plain Python from the JSON: exact, slow and independent of boundby.trace.

It knows when the device was idle and not why: whether a cause is right is no arithmetic (see the simulator).
"""

import bisect
import re
from collections import Counter, defaultdict
from fractions import Fraction
from typing import Any

from tests.trace_truth.events import (
    CALLS,
    DEVICE,
    HOST,
    KINDS,
    STEP,
    Event,
    Thread,
    is_operator,
    kind_of_work,
)

Pieces = list[tuple[int, int, str]]


def united(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if start >= end:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def total(spans: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)


def without(spans: list[tuple[int, int]], others: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what of disjoint sorted spans lies in none of the others, which are so too."""
    result = []
    index = 0
    for start, end in spans:
        while index < len(others) and others[index][1] <= start:
            index += 1
        at, next_one = start, index
        while next_one < len(others) and others[next_one][0] < end:
            result.append((at, others[next_one][0]))
            at = others[next_one][1]
            next_one += 1
        result.append((at, end))
    return [(start, end) for start, end in result if start < end]


def whole(pieces: Pieces, names: tuple[str, ...]) -> dict[str, int]:
    sums = dict.fromkeys(names, 0)
    for start, end, name in pieces:
        sums[name] += end - start
    return sums


def per_span(pieces: Pieces, names: tuple[str, ...], edges: list[int]) -> list[dict[str, int]]:
    result = [dict.fromkeys(names, 0) for _ in edges[1:]]
    for start, end, name in pieces:
        index = bisect.bisect_right(edges, start) - 1
        while index < len(result) and edges[index] < end:
            result[index][name] += max(0, min(end, edges[index + 1]) - max(start, edges[index]))
            index += 1
    return result


def spread(values: list[int]) -> dict[str, int] | None:
    if not values:
        return None
    values = sorted(values)
    last = len(values) - 1
    return {"median_ns": values[-(-last // 2)], "p95_ns": values[-(-last * 95 // 100)], "max_ns": values[last]}


SPANS = 400


class BruteForce:
    """All that the events say; `expected` gives it the structure in which it is compared."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.work = sorted((e for e in events if e.category in DEVICE), key=lambda e: (e.start, e.order))
        self.call_of: dict[Event, Event | None] = {}
        by_correlation: dict[int, Event] = {}
        for event in events:
            if event.category in CALLS and "correlation" in event.args:
                by_correlation.setdefault(event.args["correlation"], event)
        for item in self.work:
            self.call_of[item] = by_correlation.get(item.args.get("correlation", -1))
        on_thread = defaultdict(list)
        for event in events:
            if event.category in HOST:
                on_thread[event.thread].append(event)
        self.threads = {thread: Thread(of_thread) for thread, of_thread in on_thread.items()}
        self.main = next(iter(self.main_threads()), None)
        self.steps, self.edges, self.end = self._window()
        self.start = self.edges[0]

    def main_threads(self) -> list[tuple]:
        """Return the threads with the most marks, or events; where there are several, `main` may be any of them."""
        lasting = {thread for thread, item in self.threads.items() if item.moments}
        marks = Counter(e.thread for e in self.events if STEP.fullmatch(e.name) and e.thread in lasting)
        marks = marks or Counter(e.thread for e in self.events if e.thread in lasting)
        return [thread for thread, count in marks.items() if count == max(marks.values())]

    def _window(self) -> tuple[list[int], list[int], int]:
        """Return the numbers of the steps, their edges and the end of the window."""
        marks = [e for e in self.events if STEP.fullmatch(e.name) and e.category != "gpu_user_annotation"]
        if not marks:
            seen = [e for e in self.events if e.category in HOST + DEVICE]
            return [], [min((e.start for e in seen), default=0)], max((e.end for e in seen), default=0)
        begun: dict[int, int] = {}
        for mark in marks:
            number = int(mark.name.partition("#")[2])
            begun[number] = min(begun.get(number, mark.start), mark.start)
        last = max(mark.end for mark in marks)
        launched = [e.end for e in self.work if self.call_of[e] and self.call_of[e].start < last]
        steps = sorted(begun, key=lambda number: (begun[number], number))
        return steps, [begun[number] for number in steps] + [last], max([last, *launched])

    def clipped(self, events: list[Event]) -> list[tuple[int, int]]:
        return united([(max(e.start, self.start), min(e.end, self.end)) for e in events])

    def _launched(self, event: Event) -> float:
        call = self.call_of[event]
        return call.start if call else float("inf")

    def device(self, members: list[Event]) -> dict[str, Any]:
        lasting = [e for e in members if e.length > 0]  # of equal ones the first in the file
        by_kind = {kind: self.clipped([e for e in members if kind_of_work(e) == kind]) for kind in KINDS}
        return self._spent(by_kind, lasting)

    def host(self) -> dict[str, Any]:
        operators = [e for e in self.events if is_operator(e)]
        lasting = sorted((e for e in operators if e.length > 0), key=lambda e: -e.length)
        self.call_of = {e: e for e in lasting}  # nobody launches an operator beforehand
        result = self._spent({"operators": self.clipped(operators)}, lasting)
        self.call_of = {}
        return result

    def _spent(self, by_kind: dict[str, list[tuple[int, int]]], lasting: list[Event]) -> dict[str, Any]:
        busy = united([span for spans in by_kind.values() for span in spans])
        edges = [self.start, *(moment for span in busy for moment in span), self.end]
        gaps = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        lasting = sorted(lasting, key=lambda e: (e.start, self._launched(e)))
        first_at: dict[int, Event] = {}
        for item in lasting:
            first_at.setdefault(item.start, item)
        longest = []
        for start, end in gaps:
            ender = first_at.get(end) if end < self.end else None
            longest.append((start, end - start, ender.name if ender else None))
        idle: Pieces = [(start, end, "idle") for start, end in gaps]
        exposed: Pieces = []
        covered: list[tuple[int, int]] = []
        for kind, spans in by_kind.items():
            exposed += [(left, right, kind) for left, right in without(spans, covered)]
            covered = united(covered + spans)
        steps = self._steps(exposed, tuple(by_kind), idle)
        length = self.end - self.start
        parts = min(SPANS, max(1, length))
        ticks = [self.start + item * length // parts for item in range(parts + 1)]
        result = {
            "busy_ns": total(busy),
            "idle_ns": total(gaps),
            "gaps": len(gaps),
            "by_kind_ns": {kind: total(spans) for kind, spans in by_kind.items()},
            "exposed_ns": whole(exposed, tuple(by_kind)),
            "longest": sorted(longest, key=lambda item: (-item[1], item[0]))[:5],
            "steps": steps,
            "quartiles": quartiles(steps),
            "timeline": (ticks, per_span(exposed, tuple(by_kind), ticks), per_span(idle, ("idle",), ticks)),
            "communication_overlap": None,
        }
        if total(by_kind.get("communication", [])):
            alone = without(by_kind["communication"], by_kind["compute"])
            result["communication_overlap"] = float(1 - Fraction(total(alone), total(by_kind["communication"])))
        return result

    def _steps(self, busy: Pieces, kinds: tuple[str, ...], idle: Pieces) -> list[tuple]:
        lengths = [end - start for start, end in zip(self.edges, self.edges[1:], strict=False)]
        spent = per_span(busy, kinds, self.edges), per_span(idle, ("idle",), self.edges)
        return [
            (number, self.edges[index], lengths[index], spent[0][index], spent[1][index])
            for index, number in enumerate(self.steps)
        ]

    def devices(self) -> dict[int | None, dict[str, Any]]:
        members = defaultdict(list)
        for item in self.work:
            pid = item.thread[0]
            members[item.args.get("device", pid if isinstance(pid, int) else 0)].append(item)
        return {number: self.device(item) for number, item in members.items()} or {None: self.host()}

    def launches(self) -> dict[str, Any]:
        def inside(item: Event) -> bool:
            return self.start <= item.start < self.end

        launching = re.compile(r"(cuda|cu|hip)(Memcpy|Memset|(Graph)?Launch|ExtLaunch|ModuleLaunch)")
        calls = [e for e in self.events if e.category in CALLS and launching.match(e.name) and inside(e)]
        with_work = set(self.call_of.values())
        work = [e for e in self.work if inside(e)]
        joined = [e for e in work if self.call_of[e]]
        kernels = [e for e in joined if e.category == "kernel"]
        queued = [(self.call_of[e].start, e.start) for e in joined if self.call_of[e].start < e.start]
        depth, reached, waiting, empty, deepest = 0, self.start, 0, 0, 0
        for moment, change in sorted([(a, -1) for a, _ in queued] + [(b, 1) for _, b in queued]):
            moment = min(max(moment, self.start), self.end)
            waiting += depth * (moment - reached)
            empty += (moment - reached) * (depth == 0)
            depth, reached = depth - change, moment
            deepest = max(deepest, depth)
        empty += (self.end - reached) * (depth == 0)
        length = self.end - self.start
        return {
            "calls": len(calls),
            "calls_without_work": sum(e not in with_work for e in calls),
            "work": len(work),
            "work_without_call": len(work) - len(joined),
            "call": spread([max(e.length, 0) for e in {self.call_of[e] for e in joined}]),
            "delay": spread([e.start - self.call_of[e].start for e in joined]),
            "shorter_than_call": sum(e.end - e.start < self.call_of[e].end - self.call_of[e].start for e in kernels),
            "mean_queue": Fraction(waiting, length) if length else None,
            "deepest_queue": deepest if length else 0,
            "empty_queue_share": Fraction(empty, length) if length else None,
        }


def quartiles(steps: list[tuple]) -> dict[str, tuple[Fraction, ...]]:
    """Return the quartiles over the steps of the duration and of each part, interpolated."""
    rows = [{"duration": duration, **busy} for _, _, duration, busy, _ in steps]
    result = {}
    for name in rows[0] if rows else ():
        values = sorted(row[name] for row in rows)
        positions = [divmod(part * (len(values) - 1), 4) for part in (1, 2, 3)]
        result[name] = tuple(
            values[whole] + Fraction(quarters, 4) * (values[min(whole + 1, len(values) - 1)] - values[whole])
            for whole, quarters in positions
        )
    return result
