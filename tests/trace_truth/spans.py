"""Arithmetic on lists of spans of integers."""

import bisect

Pieces = list[tuple[int, int, str]]


def united(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if start >= end:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def total(spans: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)


def without(spans: list[tuple[int, int]], others: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what of disjoint sorted spans lies in none of the others, which are so too."""
    found = []
    place = 0
    for start, end in spans:
        while place < len(others) and others[place][1] <= start:
            place += 1
        at, next_one = start, place
        while next_one < len(others) and others[next_one][0] < end:
            found.append((at, others[next_one][0]))
            at = others[next_one][1]
            next_one += 1
        found.append((at, end))
    return [(start, end) for start, end in found if start < end]


def whole(pieces: Pieces, names: tuple[str, ...]) -> dict[str, int]:
    sums = dict.fromkeys(names, 0)
    for start, end, name in pieces:
        sums[name] += end - start
    return sums


def per_span(pieces: Pieces, names: tuple[str, ...], edges: list[int]) -> list[dict[str, int]]:
    found = [dict.fromkeys(names, 0) for _ in edges[1:]]
    for start, end, name in pieces:
        place = bisect.bisect_right(edges, start) - 1
        while place < len(found) and edges[place] < end:
            found[place][name] += max(0, min(end, edges[place + 1]) - max(start, edges[place]))
            place += 1
    return found


def spread(values: list[int]) -> tuple[int, int, int] | None:
    values = sorted(values)
    last = len(values) - 1
    return (values[-(-last // 2)], values[-(-last * 95 // 100)], values[last]) if values else None
