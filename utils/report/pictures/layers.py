"""The blocks of a model and the layers inside that take most of the time, as horizontal bars."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from boundby.layers import ModelProfile, Ranked, blocks, by_self_time
from utils.report.pictures.style import Subject, bars, new_figure, number, picture, shortened

SHOWN = 14
LONGEST_LAYER = 46  # characters
BLOCK, LAYER, GAIN = "#0072B2", "#56B4E9", "#E69F00"


@picture("layers.png", "the layers that take most of the time")
def figure(profile: ModelProfile, about: Subject) -> Figure:
    """Return the figure: blocks that together are the whole model, and layers by their own time alone."""
    wholes, own = blocks(profile)[:SHOWN], by_self_time(profile)[:SHOWN]
    drawn = new_figure(about, width=19.0, height=2.6 + 0.42 * max(len(wholes), len(own), 3))
    left, right = drawn.subplots(1, 2)
    batch = f" (batch of {profile.shape})" if profile.shape else ""
    _bars(left, wholes, BLOCK)
    left.set_title(f"Blocks, with everything inside{batch}")
    _bars(right, own, LAYER)
    right.set_title("Layers by their own time, without the layers inside")
    return drawn


def _bars(axes: Axes, rows: Sequence[Ranked], colour: str) -> None:
    milliseconds = [1e3 * row.seconds for row in rows]
    texts = [f"{number(time)} ms ({100 * row.share:.1f} %)" for time, row in zip(milliseconds, rows, strict=True)]
    names = [shortened(row.label, LONGEST_LAYER) for row in rows]
    bars(axes, names, milliseconds, texts, 1.4, color=colour, label="mean time")
    gains = [1e3 * (row.gain_at_limit_s or 0.0) for row in rows]
    if any(gains):
        left = [time - gain for time, gain in zip(milliseconds, gains, strict=True)]
        name = "at most to gain at the limits of the machine"
        axes.barh(range(len(rows)), gains, left=left, color=GAIN, height=0.28, label=name)
        axes.legend(loc="lower right")
    axes.set_xlabel("ms per batch")
