"""Texts that keep clear of points, lines and one another; to be used when the layout of the figure is final."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.transforms import Bbox

STEP = 4.0  # points between the boxes that stand for a line
RADII = (11, 15, 20, 26, 33, 41, 50, 60, 72, 85, 100)  # points from a point to the middle of its text
ANGLES = (45, 90, 135, 0, 180, 315, 270, 225, 22, 67, 112, 157, 338, 292, 248, 202)
LED_FROM = 18  # points from which a thin line leads from a text to its point
SPOTS = 25  # along a line where its name may stand
CLEAR = 3.0  # points around the name of a point
OUTSIDE = 3.0  # times worse than to cover something

Place = tuple[float, float]
Box = tuple[float, float, float, float]


class Places:
    """What is taken in `axes`, in pixels; a text goes where it covers least of it."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.pixels = axes.figure.dpi / 72
        self.area: Bbox = axes.get_window_extent()
        self._taken: list[Box] = []

    def take_point(self, x: float, y: float, points: float) -> None:
        """Keep texts off a mark of this size at a place in data coordinates."""
        self._taken.append(_around(self._at(x, y), points * self.pixels, points * self.pixels))

    def take_line(self, start: Place, end: Place) -> None:
        """Keep texts off a line between two places in data coordinates."""
        first, last = self._at(*start), self._at(*end)
        for spot in _between(first, last, STEP * self.pixels):
            self._taken.append(_around(spot, self.pixels, self.pixels))

    def distance(self, start: Place, end: Place) -> float:
        """Return the points between two places in data coordinates."""
        return math.dist(self._at(*start), self._at(*end)) / self.pixels

    def name_point(self, x: float, y: float, text: str, **look: Any) -> Text:
        """Write `text` beside a place in data coordinates, with a leading line where it had to go far."""
        name = self.axes.annotate(
            text, (x, y), (0, 0), textcoords="offset points", ha="center", va="center", annotation_clip=True, **look
        )
        width, height = (size + CLEAR * self.pixels for size in _size(name))
        middle = self._at(x, y)
        offsets = [(radius * _cos(angle), radius * _sin(angle)) for radius in RADII for angle in ANGLES]
        boxes = [
            _around((middle[0] + dx * self.pixels, middle[1] + dy * self.pixels), width, height) for dx, dy in offsets
        ]
        best = self._freest([[box] for box in boxes])
        name.set_position(offsets[best])
        self._taken.append(boxes[best])
        if math.hypot(*offsets[best]) > LED_FROM:
            end = self._place(np.mean(np.reshape(boxes[best], (2, 2)), axis=0))
            self.axes.plot(*zip((x, y), end, strict=True), color=look.get("color"), linewidth=0.7, zorder=1.5)
            self.take_line((x, y), end)
        return name

    def name_line(self, start: Place, end: Place, text: str, **look: Any) -> Text:
        """Write `text` along the line between two places in data coordinates, over or under it."""
        first, last = np.array(self._at(*start)), np.array(self._at(*end))
        along = (last - first) / np.linalg.norm(last - first)
        turn = math.degrees(math.atan2(along[1], along[0]))
        name = self.axes.text(*start, text, ha="center", va="center", rotation=turn, rotation_mode="anchor", **look)
        name.set_rotation(0)
        width, height = _size(name)
        name.set_rotation(turn)
        across = np.array([-along[1], along[0]]) * 0.75 * height
        shares = [(spot + 0.5) / SPOTS for spot in range(SPOTS)]
        middles = [first + share * (last - first) + side * across for side in (1, -1) for share in shares]
        boxes = [
            [
                _around(spot, 0.8 * height, 0.8 * height)
                for spot in _between(middle - along * width / 2, middle + along * width / 2, height / 2)
            ]
            for middle in middles
        ]
        best = self._freest(boxes)
        name.set_position(self._place(middles[best]))
        self._taken += boxes[best]
        return name

    def _freest(self, candidates: Sequence[Sequence[Box]]) -> int:
        """Return the first candidate that covers nothing and stays inside, else the one that covers least."""
        taken = np.array(self._taken).reshape(-1, 4)
        least, best = math.inf, 0
        for index, boxes in enumerate(candidates):
            cost = sum(_covered(box, taken) + OUTSIDE * self._outside(box) for box in boxes)
            if cost < least:
                least, best = cost, index
            if cost < 1:
                break
        return best

    def _outside(self, box: Box) -> float:
        """Return how many square pixels of `box` lie outside the axes."""
        left, bottom, right, top = box
        return (right - left) * (top - bottom) - _covered(box, np.array([self.area.extents]))

    def _at(self, x: float, y: float) -> Place:
        found = self.axes.transData.transform((x, y))
        return float(found[0]), float(found[1])

    def _place(self, pixels: Any) -> Place:
        """Return the data coordinates of a pixel."""
        x, y = self.axes.transData.inverted().transform(pixels)
        return float(x), float(y)


def apart(wanted: Sequence[float], gap: float, top: float) -> list[float]:
    """Return ascending positions, each as near to the one wanted as a least `gap` and `top` allow."""
    found: list[float] = []
    for each in wanted:
        found.append(max(each, found[-1] + gap) if found else each)
    ceiling = top
    for index in range(len(found) - 1, -1, -1):
        found[index] = min(found[index], ceiling)
        ceiling = found[index] - gap
    return found


def _between(first: Any, last: Any, step: float) -> Iterator[Place]:
    first, last = np.array(first), np.array(last)
    pieces = max(1, math.ceil(float(np.linalg.norm(last - first)) / step))
    for index in range(pieces + 1):
        x, y = first + (last - first) * index / pieces
        yield float(x), float(y)


def _covered(box: Box, taken: Any) -> float:
    """Return how many square pixels of `box` the boxes `taken` cover; where two do, twice."""
    left, bottom, right, top = box
    wide = np.minimum(right, taken[:, 2]) - np.maximum(left, taken[:, 0])
    high = np.minimum(top, taken[:, 3]) - np.maximum(bottom, taken[:, 1])
    return float(np.sum(np.clip(wide, 0, None) * np.clip(high, 0, None)))


def _cos(degrees: float) -> float:
    return math.cos(math.radians(degrees))


def _sin(degrees: float) -> float:
    return math.sin(math.radians(degrees))


def _size(name: Text) -> Place:
    box = Text.get_window_extent(name)  # that of an annotation would include its arrow
    return box.width, box.height


def _around(middle: Iterable[float], width: float, height: float) -> Box:
    x, y = middle
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2
