"""The pictures of the report: sections say which stands where, and of what; here they are drawn or explained."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib.figure import Figure

from boundby import files
from utils.render import Block, blocks
from utils.report.pictures import style
from utils.report.pictures.style import Picture
from utils.report.sources import Missing, ReportData


@dataclass(frozen=True)
class Drawing:
    """A picture in its place in a section; `reason` says why it is not drawn, None where it is."""

    path: Path
    description: str
    reason: str | None
    make: Callable[[], Figure]


@dataclass(frozen=True)
class Folded:
    """What a page shows when its title is opened, and a text leaves out."""

    title: str
    content: Sequence["Content"]


Content: TypeAlias = Block | Drawing | Folded


def show(data: ReportData, picture: Picture[Any], values: Any, *more: Any) -> Drawing:
    """Return the picture of these values in its place; one of them may be missing, which says why it is not drawn."""
    missing = next((value for value in (values, *more) if isinstance(value, Missing)), None)
    return Drawing(
        data.layout.plots / picture.file,
        picture.description,
        None if missing is None else f"not drawn: {missing.reason}",
        lambda: picture(
            values, style.subject(data.document, data.machine.hardware.get("cpu") if data.machine else None), *more
        ),
    )


def draw(drawings: Sequence[Drawing]) -> None:
    """Write the pictures there are values for, and take away the others: they would pass for this run's."""
    for drawing in drawings:
        if drawing.reason is None:
            with files.replacing(drawing.path) as temporary:
                drawing.make().savefig(temporary)
        else:
            drawing.path.unlink(missing_ok=True)


def drawings(content: Sequence[Content]) -> list[Drawing]:
    """Return the pictures in their order, those that are folded away among them."""
    flat: list[Drawing] = []
    for part in content:
        flat += [part] if isinstance(part, Drawing) else drawings(part.content) if isinstance(part, Folded) else []
    return flat


def placed(content: Sequence[Content]) -> list[Block]:
    """Return the blocks of a section, with a figure for each picture that is drawn; nothing folded is empty."""
    shown: list[Block] = []
    for part in content:
        if isinstance(part, Drawing):
            shown += [] if part.reason else [blocks.Figure(part.path, part.description)]
        elif isinstance(part, Folded):
            inside = placed(part.content)
            shown += [blocks.Details(part.title, inside)] if inside else []
        else:
            shown.append(part)
    return shown
