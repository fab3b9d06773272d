"""Blocks as Markdown for a comment on GitHub; text stays text: it makes no markup, no link and mentions nobody."""

import functools
import re
from collections.abc import Sequence

from utils.render.blocks import Block, BulletList, DefinitionList, Details, Heading, Paragraph, Table
from utils.render.formatting import clean

MARKUP = re.compile(r"([\\`*_\[\]|~#<>&])")
LONGEST = 4000  # characters of one text


def text(blocks: Sequence[Block]) -> str:
    """Return the blocks, an empty line between two. Raises TypeError for a kind that has no place in a comment."""
    return "\n\n".join(filter(None, map(_text, blocks)))


@functools.singledispatch
def _text(block: Block) -> str:
    raise TypeError(f"{type(block).__name__} has no place in a comment")


@_text.register
def _heading(block: Heading) -> str:
    return f"### {_plain(block.text)}"


@_text.register
def _paragraph(block: Paragraph) -> str:
    return _plain(block.text)


@_text.register
def _bullet_list(block: BulletList) -> str:
    return "\n".join(f"- {_plain(item)}" for item in block.items)


@_text.register
def _definition_list(block: DefinitionList) -> str:
    return "\n".join(f"- **{_plain(label)}**: {_plain(value)}" for label, value in block.pairs)


@_text.register
def _table(block: Table) -> str:
    rule = [":--" if place in block.left else "--:" for place in range(len(block.headers))]
    rows = [rule, *([_plain(cell) for cell in row] for row in block.rows)]
    header = [_plain(header.replace("\n", " ")) for header in block.headers]
    lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    return "\n".join([*lines, *(f"\n{_plain(note)}" for note in block.notes)])


@_text.register
def _details(block: Details) -> str:
    inside = text(block.blocks)
    return f"<details><summary>{_plain(block.title)}</summary>\n\n{inside}\n\n</details>" if inside else ""


def _plain(value: str) -> str:
    escaped = MARKUP.sub(r"\\\1", clean(value, LONGEST))
    return escaped.replace("@", "@<!-- -->")  # no account is told of it
