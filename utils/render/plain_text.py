"""A document as plain text of at most `WIDTH` columns, for a terminal, a mail or a ticket."""

import functools
from collections.abc import Sequence

from utils.render.blocks import (
    Admonition,
    Block,
    BulletList,
    Card,
    CodeBlock,
    DefinitionList,
    Details,
    Document,
    Figure,
    Heading,
    OrderedList,
    Paragraph,
    Table,
)
from utils.render.formatting import WIDTH, command_lines, paragraph, table

NARROWEST_LABEL, WIDEST_LABEL = 22, 40  # columns


def render(document: Document) -> str:
    """Return the whole document."""
    rule = "=" * WIDTH
    title = paragraph(f"{document.kind.upper()}: {document.title}")
    top = [rule, *title, *paragraph(document.detail), rule]
    return "\n".join([*top, *lines(document.blocks)]) + "\n"


def lines(blocks: Sequence[Block], indent: str = "", is_tight: bool = False) -> list[str]:
    """Return the lines of `blocks`; between two of them is an empty one, unless `is_tight` or they belong together."""
    found: list[str] = []
    before: Block | None = None
    for block in blocks:
        if isinstance(block, Details):
            continue
        if isinstance(block, Heading) or not (is_tight or before is None or _belong_together(before, block)):
            found.append("")
        found += _lines(block, indent)
        before = block
    return [line.rstrip() for line in found]


def _belong_together(above: Block, below: Block) -> bool:
    if isinstance(above, Paragraph):
        return above.text.endswith(":")
    return isinstance(above, Heading) or isinstance(below, Figure)


@functools.singledispatch
def _lines(block: Block, indent: str) -> list[str]:
    raise TypeError(f"{type(block).__name__} is no block")


@_lines.register
def _heading(block: Heading, indent: str) -> list[str]:
    [title, *more] = paragraph(block.text, indent)
    return [title, *more, indent + "-" * (len(title) - len(indent))]


@_lines.register
def _paragraph(block: Paragraph, indent: str) -> list[str]:
    return paragraph(f"{block.strong} {block.text}".strip(), indent)


@_lines.register
def _bullet_list(block: BulletList, indent: str) -> list[str]:
    return [line for item in block.items for line in paragraph(item, f"{indent}  ", f"{indent}- ")]


@_lines.register
def _ordered_list(block: OrderedList, indent: str) -> list[str]:
    found = []
    for number, item in enumerate(block.items, start=1):
        mark = f"{indent}{number}. "
        [first, *rest] = lines(item, " " * len(mark), is_tight=True)
        found += [mark + first.lstrip(), *rest]
    return found


@_lines.register
def _definition_list(block: DefinitionList, indent: str) -> list[str]:
    longest = max((len(label) + 1 for label, _ in block.pairs), default=0)
    width = min(max(longest, NARROWEST_LABEL), WIDEST_LABEL)
    hanging = " " * (len(indent) + width + 2)
    return [
        line for label, value in block.pairs for line in paragraph(value, hanging, f"{indent}{label + ':':<{width}}  ")
    ]


@_lines.register
def _table(block: Table, indent: str) -> list[str]:
    rows = [indent + line for line in table(block.headers, block.rows, block.left)]
    notes = [line for note in block.notes for line in paragraph(note, f"{indent}    ", f"{indent}  ")]
    caption = paragraph(f"{block.caption}:", indent) if block.caption else []
    return [*caption, *rows, *notes]


@_lines.register
def _card(block: Card, indent: str) -> list[str]:
    return [indent + line for line in block.lines]


@_lines.register
def _code_block(block: CodeBlock, indent: str) -> list[str]:
    return command_lines(block.command, f"{indent}  ")


@_lines.register
def _figure(block: Figure, indent: str) -> list[str]:
    return paragraph(f"Picture: {'/'.join(block.path.parts[-2:])}", indent)


@_lines.register
def _admonition(block: Admonition, indent: str) -> list[str]:
    return lines(block.blocks, indent)
