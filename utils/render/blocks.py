"""What a report is made of: a document of blocks, which `plain_text` and `html_page` render.

A block holds text, never markup: the renderers escape it, take out control characters and choose the layout. A block
whose text ends with a colon announces the one below it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec


class Heading(msgspec.Struct, frozen=True):
    """The title of a section, which lasts until the next heading."""

    text: str


class Paragraph(msgspec.Struct, frozen=True):
    """Running text; `strong` are its opening words."""

    text: str
    strong: str = ""


class BulletList(msgspec.Struct, frozen=True):
    """Findings of equal rank."""

    items: Sequence[str]


class OrderedList(msgspec.Struct, frozen=True):
    """Entries of falling rank, each of blocks of its own."""

    items: Sequence[Sequence["Block"]]


class DefinitionList(msgspec.Struct, frozen=True):
    """Labels with their values."""

    pairs: Sequence[tuple[str, str]]


class Table(msgspec.Struct, frozen=True):
    """Rows of cells below `headers`, which may have several lines; columns of numbers but for those listed in `left`.

    `notes` stand below the table: what its gaps mean, what makes its figures doubtful.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[int] = ()
    caption: str = ""
    notes: Sequence[str] = ()


class CodeBlock(msgspec.Struct, frozen=True):
    """A command line for a shell."""

    command: str


class Figure(msgspec.Struct, frozen=True):
    """A picture in a PNG file; `description` says what a person who cannot see it misses."""

    path: Path
    description: str


class Card(msgspec.Struct, frozen=True):
    """The answer: its title, entries of a label with texts and perhaps a command, and the same as lines of text."""

    title: str
    entries: Sequence[tuple[str, Sequence[str], str | None]]
    lines: Sequence[str]


class Details(msgspec.Struct, frozen=True):
    """What a page shows when its title is opened, and a text leaves out."""

    title: str
    blocks: Sequence["Block"]


class Admonition(msgspec.Struct, frozen=True):
    """A warning about the whole report."""

    blocks: Sequence["Block"]


Block: TypeAlias = (
    Card
    | Heading
    | Paragraph
    | BulletList
    | OrderedList
    | DefinitionList
    | Table
    | CodeBlock
    | Figure
    | Details
    | Admonition
)


class Document(msgspec.Struct, frozen=True):
    """A report: what kind it is, what it is about, a line of detail, its content, and a word or two on its standing."""

    kind: str
    title: str
    detail: str
    blocks: Sequence[Block]
    badge: str = ""
