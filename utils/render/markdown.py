"""Blocks as Markdown for a comment on GitHub; text stays text: it makes no markup, no link and mentions nobody."""

import re
from collections.abc import Sequence

from boundby.formatting import clean
from utils.render.blocks import Block, BulletList, DefinitionList, Details, Heading, Paragraph, Table

MARKUP = re.compile(r"([\\`*_\[\]|~#<>&])")
LONGEST = 4000  # characters of one text


def text(blocks: Sequence[Block]) -> str:
    """Return the blocks, an empty line between two. Raises TypeError for a kind that has no place in a comment."""
    return "\n\n".join(filter(None, map(_text, blocks)))


def _text(block: Block) -> str:
    match block:
        case Heading(title):
            return f"### {_plain(title)}"
        case Paragraph(running):
            return _plain(running)
        case BulletList(items):
            return "\n".join(f"- {_plain(item)}" for item in items)
        case DefinitionList(pairs):
            return "\n".join(f"- **{_plain(label)}**: {_plain(value)}" for label, value in pairs)
        case Table(headers, cells, left):
            rule = [":--" if column in left else "--:" for column in range(len(headers))]
            rows = [[_plain(header.replace("\n", " ")) for header in headers], rule]
            rows += [[_plain(cell) for cell in row] for row in cells]
            lines = [f"| {' | '.join(row)} |" for row in rows]
            return "\n".join([*lines, *(f"\n{_plain(note)}" for note in block.notes)])
        case Details(title, inside):
            inner = text(inside)
            return f"<details><summary>{_plain(title)}</summary>\n\n{inner}\n\n</details>" if inner else ""
    raise TypeError(f"{type(block).__name__} has no place in a comment")


def _plain(value: str) -> str:
    escaped = MARKUP.sub(r"\\\1", clean(value, LONGEST))
    return escaped.replace("@", "@<!-- -->")  # no account is told of it
