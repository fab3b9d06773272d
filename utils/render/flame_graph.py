"""Folded stacks as a flame graph: one HTML file with its data and its drawing script inside, that fetches nothing."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import accumulate, groupby
from pathlib import Path
from typing import NamedTuple

from boundby.formatting import clean, number, printable
from boundby.layers import environment

TEMPLATES = Path(__file__).parent
TEMPLATE = "flame_graph.html.j2"
ROOT = "all stacks"
LEAST_SHARE = 0.0005  # of the total; a narrower frame is less than a pixel wide on most screens
MAX_DATA_CHARACTERS = 1_900_000  # with style and script the page stays below 2 MB
BOX_CHARACTERS = 13  # a level, a frame and commas
LONGEST_FRAME = 300
HEAVIEST = 10
LINE = re.compile(r"(.+) ([0-9]{1,18})", re.DOTALL)  # 18 digits of nanoseconds are 31 years
MODULE = re.compile(r"nn\.Module:[_ ]?(.+)")
PYTHON = re.compile(r"(?P<path>.+)\((?P<line>[0-9]+)\):[_ ]?(?P<function>.+)")
BUILT_IN = re.compile(r"<built-in[_ ](?:method|function)[_ ](?P<function>.+?)(?:[_ ]of[_ ].+[_ ]object)?>")
TORCH = re.compile(r"(?:^|[/\\](?:site|dist)-packages[/\\])torch[/\\]")
KINDS = {
    "module": "nn.Module",
    "model": "Python of the model (files that define a forward)",
    "torch": "Python of torch",
    "builtin": "built-in function (C or C++)",
    "other": "other Python",
    "small": "small frames together",
}


class Stack(NamedTuple):
    """The places of its frames among the names, outermost first, and the stack's own time."""

    frames: tuple[int, ...]
    weight_ns: int


class Box(NamedTuple):
    """What is drawn: a frame at its level with all it calls, or (negative) how many frames stand together in grey."""

    level: int
    frame: int
    total_ns: int
    first: int  # of the sorted stacks that pass through the box
    last: int  # exclusive
    caller_last: int


class Graph(NamedTuple):
    """Full name, short name and kind of each frame that is drawn, the boxes, and what could not be drawn."""

    frames: dict[int, list[str]]
    boxes: list[Box]
    widest_missing_ns: int  # 0 where there was room for every frame of at least `LEAST_SHARE`


def page(lines: Iterable[str], title: str, detail: str) -> str:
    """Return the page for lines `outer;inner;innermost weight`, the weight being the stack's own time in ns.

    Raises ValueError naming a line that is something else. Blank lines are skipped.
    """
    names, stacks = _read(lines)
    total_ns = sum(stack.weight_ns for stack in stacks)
    own_ns: Counter[int] = Counter()
    for stack in stacks:
        own_ns[stack.frames[-1]] += stack.weight_ns
    graph = _graph(names, stacks)
    merged = sum(-box.frame for box in graph.boxes if box.frame < 0)
    return _render(
        title=printable(title),
        detail=printable(detail),
        kinds=KINDS,
        data=_data(graph),
        total=_duration(total_ns),
        stacks=f"{len(stacks):,}",
        merged=f"{merged:,}" if merged else None,
        least_percent=f"{100 * LEAST_SHARE:g}",
        missing_percent=f"{100 * graph.widest_missing_ns / total_ns:.2g}" if graph.widest_missing_ns else None,
        heaviest=[
            (names[frame], _duration(weight_ns), f"{100 * weight_ns / total_ns:.1f}")
            for frame, weight_ns in own_ns.most_common(HEAVIEST)
        ],
    )


def _read(lines: Iterable[str]) -> tuple[list[str], list[Stack]]:
    """Return the names of the root and of the frames, and the stacks, sorted.

    The order of the names is the natural one: layer 2 before layer 10.
    """
    numbers: dict[str, int] = {}
    read: list[tuple[list[int], int]] = []
    for at, line in enumerate(lines, start=1):
        if line.strip():
            frames, weight_ns = _parsed(line.rstrip("\r\n"), at)
            read.append(([numbers.setdefault(frame, len(numbers)) for frame in frames], weight_ns))
    shown = [clean(frame, LONGEST_FRAME) or "(unprintable name)" for frame in numbers]
    names = sorted(set(shown), key=_natural)
    rank = {name: at for at, name in enumerate(names, start=1)}
    ranks = [rank[name] for name in shown]
    return [ROOT, *names], sorted(
        Stack(tuple(ranks[frame] for frame in frames), weight_ns) for frames, weight_ns in read
    )


def _parsed(line: str, at: int) -> tuple[list[str], int]:
    match = LINE.fullmatch(line)
    frames = match[1].split(";") if match else []
    if not match or not all(frames) or int(match[2]) == 0:
        raise ValueError(
            f"line {at} of the stacks is '{clean(line)}'; it must be frames joined by ';', a space "
            "and a whole number of nanoseconds above 0, of at most 18 digits"
        )
    return frames, int(match[2])


def _natural(name: str) -> list[str | int]:
    parts: list[str | int] = list(re.split(r"([0-9]+)", name))
    parts[1::2] = map(int, parts[1::2])
    return parts


def _graph(names: Sequence[str], stacks: Sequence[Stack]) -> Graph:
    """Return the widest boxes that there is room for; what is left of a box's callees stands in one grey box.

    Widest first means that no missing box is wider than one that is drawn, whatever the shape of the stacks.
    """
    ends_ns = [0, *accumulate(stack.weight_ns for stack in stacks)]
    forwards = {match["path"] for match in map(PYTHON.fullmatch, names) if match and match["function"] == "forward"}
    frames = {0: [ROOT, ROOT, "root"]}
    room = MAX_DATA_CHARACTERS
    root = Box(0, 0, ends_ns[-1], 0, len(stacks), len(stacks))
    drawn, narrow, waiting = [], [], [(-root.total_ns, 0, 0, root)]
    while waiting and room > 0:
        box = heappop(waiting)[-1]
        drawn.append(box)
        if box.frame not in frames:
            frames[box.frame] = [names[box.frame], *_short_and_kind(names[box.frame], forwards)]
            room -= sum(map(_characters, frames[box.frame]))
        room -= 2 * (len(str(box.total_ns)) + BOX_CHARACTERS)  # itself and the grey box it may call
        for callee in _callees(box, stacks, ends_ns):
            if callee.total_ns >= LEAST_SHARE * root.total_ns:
                heappush(waiting, (-callee.total_ns, callee.level, callee.first, callee))
            else:
                narrow.append(callee)
    without_room = [box for *_, box in waiting]
    boxes = sorted([*drawn, *_merged([*narrow, *without_room])], key=_place)
    return Graph(frames, boxes, max((box.total_ns for box in without_room), default=0))


def _characters(text: str) -> int:
    """Return the length of the text in the page, with quotes and a comma."""
    from jinja2.utils import htmlsafe_json_dumps

    return len(htmlsafe_json_dumps(text)) + 1


def _callees(box: Box, stacks: Sequence[Stack], ends_ns: Sequence[int]) -> list[Box]:
    deeper = [at for at in range(box.first, box.last) if len(stacks[at].frames) > box.level]
    callees = []
    for frame, group in groupby(deeper, key=lambda at: stacks[at].frames[box.level]):
        run = list(group)
        first, last = run[0], run[-1] + 1
        callees.append(Box(box.level + 1, frame, ends_ns[last] - ends_ns[first], first, last, box.last))
    return callees


def _merged(boxes: Iterable[Box]) -> list[Box]:
    """Return one grey box for each caller of these; the level and the end of its run tell callers apart."""
    count: Counter[tuple[int, int]] = Counter()
    total_ns: Counter[tuple[int, int]] = Counter()
    for box in boxes:
        count[box.level, box.caller_last] += 1
        total_ns[box.level, box.caller_last] += box.total_ns
    return [Box(level, -number, total_ns[level, last], last, last, last) for (level, last), number in count.items()]


def _place(box: Box) -> tuple[int, int]:
    """Return the sorting key that puts a box before those it calls, and a grey one behind all that its caller calls."""
    return (2 * box.first - 1, -box.level) if box.frame < 0 else (2 * box.first, box.level)


def _data(graph: Graph) -> dict[str, object]:
    """Return what the script draws: the table of frames, and the boxes by column."""
    numbers = {frame: at for at, frame in enumerate(graph.frames)}
    return {
        "frames": list(graph.frames.values()),
        "level": [box.level for box in graph.boxes],
        "frame": [numbers.get(box.frame, box.frame) for box in graph.boxes],
        "total": [box.total_ns for box in graph.boxes],
    }


def _short_and_kind(name: str, forwards: set[str]) -> tuple[str, str]:
    """Return what stands in the box, and the key in `KINDS`; `forwards` are the files that define a `forward`."""
    if match := MODULE.fullmatch(name):
        return match[1], "module"
    if match := PYTHON.fullmatch(name):
        path = match["path"]
        kind = "torch" if TORCH.search(path) else "model" if path in forwards else "other"
        return f"{_file(path)}({match['line']}): {match['function']}", kind
    if match := BUILT_IN.fullmatch(name):
        return match["function"], "builtin"
    return name, "builtin" if name[0] + name[-1] == "<>" else "other"


def _file(path: str) -> str:
    """Return the name of a file, with its folder where the name alone says nothing."""
    parts = re.split(r"[/\\]", path)
    return "/".join(parts[-2:] if parts[-1] == "__init__.py" else parts[-1:])


def _duration(nanoseconds: int) -> str:
    for unit, size in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if nanoseconds >= size:
            return f"{number(nanoseconds / size)} {unit}"
    return f"{nanoseconds} ns"


def _render(**values: object) -> str:
    return environment(TEMPLATES).get_template(TEMPLATE).render(values)
