"""A document as one HTML file that needs nothing else: no script, no request, its pictures inside."""

import base64
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

from boundby.formatting import printable
from boundby.layers import environment
from utils.render.blocks import Document, Heading

TEMPLATES = Path(__file__).parent
TEMPLATE = "page.html.j2"
PICTURE_DPI, CSS_DPI = 150, 96


class Image(NamedTuple):
    """A picture as an address that holds it, and its size in CSS pixels."""

    address: str
    width: int
    height: int


def render(document: Document) -> str:
    """Return the whole page; a list of its sections stands before the first of them."""
    is_heading = [isinstance(block, Heading) for block in document.blocks]
    start = is_heading.index(True) if any(is_heading) else len(is_heading)
    made = environment(TEMPLATES, finalize=_inert)
    made.filters |= {"kind": lambda block: type(block).__name__, "anchor": _anchor, "image": _image}
    return made.get_template(TEMPLATE).render(
        document=document,
        opening=document.blocks[:start],
        sections=document.blocks[start:],
        headings=[block for block in document.blocks if isinstance(block, Heading)],
    )


def _inert(value: Any) -> Any:
    """Return text without the control characters that escaping leaves; everything a template prints passes here."""
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _anchor(heading: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


def _image(picture: Path) -> Image | None:
    """Return the picture of a PNG file, or None where the file cannot be read."""
    try:
        content = picture.read_bytes()
        pixels = struct.unpack(">II", content[16:24])
    except (OSError, struct.error):
        return None
    width, height = (side * CSS_DPI // PICTURE_DPI for side in pixels)
    return Image(f"data:image/png;base64,{base64.b64encode(content).decode('ascii')}", width, height)
