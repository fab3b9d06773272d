"""What all figures share: a canvas without global state, colours, units, and a heading that says what was measured."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

from boundby.bound import Bound, CauseKind
from boundby.formatting import clean
from utils.baseline import Document, Row

Arguments = ParamSpec("Arguments")
Rows = Sequence[Row]

DPI = 150
INK, MUTED, ALARM = "#222222", "#6b6b6b", "#b5340a"
# Okabe & Ito's colours, which people with any colour vision tell apart; shapes say the same again.
COLOURS = {"float32": "#0072B2", "bfloat16": "#D55E00", "float16": "#009E73"}
MARKERS = {"float32": "o", "bfloat16": "s", "float16": "^"}
HEADING_POINTS = 16.0
LETTER_WIDTH = 0.6  # of the average letter, in font sizes
LONGEST_NAME = 60  # characters of a model or dataset name
SETTINGS = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that a picture looks the same on every machine
    "font.size": 12.0,
    "axes.titlesize": 14.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "text.color": INK,
    "text.parse_math": False,  # a "$" in a name is a dollar sign
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "legend.framealpha": 0.85,
    "legend.edgecolor": "none",
    "legend.fontsize": 10.5,
    "hatch.linewidth": 0.6,
}

STATUS_TEXT = {"oom": "out of memory", "skipped_oom": "not tried (memory)", "failed": "failed"}
TIMES = ((1e-3, "µs"), (1.0, "ms"), (1e3, "s"), (60e3, "min"))  # of one unit, in ms
SIZES = ((1.0, "MB"), (1e3, "GB"), (1e6, "TB"))  # in MB
# What limits a batch, in the words of a table.
CAUSES: dict[CauseKind, str] = {
    "padding": "padding",
    "compute": "compute",
    "memory": "memory",
    "kernels": "kernels below peak",
    "around": "cold caches",
    "host": "dispatch overhead",
    "unexplained": "unexplained",
    "input": "tokenizing",
    "transfer": "transfer",
}
BOUNDS: dict[Bound, str] = {
    "compute": "compute",
    "memory": "memory",
    "launch": "dispatch overhead",
    "transfer": "transfer",
    "input": "tokenizing",
    "under_utilised": "small shapes",
    "mixed": "several",
}


@dataclass(frozen=True)
class Picture(Generic[Arguments]):
    """A kind of figure: the name of its file, what a person who cannot see it misses, and what draws it."""

    file: str
    description: str
    draw: Callable[Arguments, Figure]

    def __call__(self, *arguments: Arguments.args, **options: Arguments.kwargs) -> Figure:
        """Return the figure, in the style of all."""
        with rc_context(SETTINGS):
            return self.draw(*arguments, **options)


def picture(file: str, description: str) -> Callable[[Callable[Arguments, Figure]], Picture[Arguments]]:
    """Make a picture of the results of a function that returns a figure: `@picture("operators.png", "where …")`."""
    return lambda draw: Picture(file, description, draw)


@dataclass(frozen=True)
class Subject:
    """What was measured on what, as the heading of a figure says it."""

    title: str
    detail: str
    is_synthetic: bool
    device_memory_mb: float | None = None


def subject(document: Document, cpu: str | None = None) -> Subject:
    """Return the subject of a document of step 02; `cpu` is the name of its CPU."""
    model, data, device = document["model"], document["dataset"], document["device"]
    dtypes = dict.fromkeys(row["dtype"] for row in document["batch_sizes"])
    machine = device.get("name") or cpu or "an unknown CPU"
    source = shortened((data.get("source") or {}).get("name") or "unknown data")
    rows, memory = data.get("rows"), device.get("memory_bytes")
    texts = f"{source} ({rows:,} texts)" if rows else source
    return Subject(
        title=f"{shortened(model.get('name') or 'unknown model')}, {' and '.join(dtypes) or 'no dtype measured'}",
        detail=f"on {shortened(machine)}, {texts}, measured {document['written'][:10]}",
        is_synthetic=bool(document["synthetic"]),
        device_memory_mb=memory / 1e6 if memory else None,
    )


def new_figure(about: Subject, width: float, height: float) -> Figure:
    """Return an empty figure of this many inches, headed by its subject."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    note = "synthetic data" if about.is_synthetic else ""
    longest = max(len(about.title) + (3 + len(note) if note else 0), len(about.detail))
    size = min(HEADING_POINTS, width * 72 / (LETTER_WIDTH * longest))
    figure.suptitle(f"{about.title}\n{about.detail}", x=0.01, ha="left", fontsize=size, linespacing=1.5)
    figure.text(0.99, 0.985, note, ha="right", va="top", fontsize=size, color=ALARM, weight="bold")
    return figure


def shortened(text: str, longest: int = LONGEST_NAME) -> str:
    """Return `text` on one line, its middle left out where it is long, without characters that the font lacks."""
    known = _glyphs()
    return "".join(character if ord(character) in known else "?" for character in clean(text, longest))


def limited_by(row: Row) -> str:
    """Return in a word or two what a row is limited by, with "?" where this is not settled."""
    verdict = row.get("verdict")
    causes = verdict.limited_by if verdict else ()
    words = CAUSES[causes[0].kind] if causes else BOUNDS.get(row.get("bound") or "inconclusive", "not known")
    return words + ("" if verdict is None or verdict.settled or words == "not known" else "?")


def number(value: float, _position: object = None) -> str:
    """Return three significant digits, short enough for a tick or a cell: 0.00123, 4.2, 187, 12.3k, 4.56M."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if 0.9995 * size <= abs(value) < 1e12:
            return f"{value / (1e3 if suffix == 'k' else size):.3g}{suffix}"
    if 1 <= abs(value) < 1e4:
        return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"
    return f"{value:.3g}"


def unit(values: Iterable[float | None], units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Return the largest unit in which the largest value is at least one, as (its size, its name)."""
    largest = max((value for value in values if value is not None), default=1.0)
    return max((known for known in units if known[0] <= largest), default=units[0])


def bars(
    axes: Axes, names: Sequence[str], values: Sequence[float], texts: Sequence[str], room: float, **look: Any
) -> None:
    """Draw horizontal bars from the top down, with a name and a text each; the axis is `room` times the longest."""
    axes.bar_label(axes.barh(range(len(values)), values, height=0.72, **look), texts, padding=5, fontsize=11)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, room * max(values, default=0.0) or 1.0)
    axes.xaxis.set_major_formatter(number)


@functools.cache
def _glyphs() -> Mapping[int, int]:
    """Return the code points that the font of the figures has."""
    return get_font(findfont(str(SETTINGS["font.family"]))).get_charmap()
