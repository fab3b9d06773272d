"""A document as plain text of at most `WIDTH` columns, for a terminal, a mail or a ticket."""

from collections.abc import Sequence

from boundby.formatting import WIDTH, command_lines, paragraph, table
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

NARROWEST_LABEL, WIDEST_LABEL = 22, 40  # columns


def render(document: Document) -> str:
    """Return the whole document."""
    rule = "=" * WIDTH
    title = paragraph(f"{document.kind.upper()}: {document.title}")
    top = [rule, *title, *paragraph(document.detail), rule]
    return "\n".join([*top, *lines(document.blocks)]) + "\n"


def lines(blocks: Sequence[Block], indent: str = "", is_tight: bool = False) -> list[str]:
    """Return the lines of `blocks`; between two of them is an empty one, unless `is_tight` or they belong together."""
    text: list[str] = []
    before: Block | None = None
    for block in blocks:
        if isinstance(block, Details):
            continue
        if isinstance(block, Heading) or not (is_tight or before is None or _belong_together(before, block)):
            text.append("")
        text += _lines(block, indent)
        before = block
    return [line.rstrip() for line in text]


def _belong_together(above: Block, below: Block) -> bool:
    if isinstance(above, Paragraph):
        return above.text.endswith(":")
    return isinstance(above, Heading) or isinstance(below, Figure)


def _lines(block: Block, indent: str) -> list[str]:
    match block:
        case Heading(text):
            [title, *more] = paragraph(text, indent)
            return [title, *more, indent + "-" * (len(title) - len(indent))]
        case Paragraph(text, strong):
            return paragraph(f"{strong} {text}".strip(), indent)
        case BulletList(items):
            return [line for item in items for line in paragraph(item, f"{indent}  ", f"{indent}- ")]
        case OrderedList(items):
            return [
                line for number, item in enumerate(items, start=1) for line in _numbered(f"{indent}{number}. ", item)
            ]
        case DefinitionList(pairs):
            return _definitions(pairs, indent)
        case Table():
            rows = [indent + line for line in table(block.headers, block.rows, block.left)]
            notes = [line for note in block.notes for line in paragraph(note, f"{indent}    ", f"{indent}  ")]
            caption = paragraph(f"{block.caption}:", indent) if block.caption else []
            return [*caption, *rows, *notes]
        case Card():
            return [indent + line for line in block.lines]
        case CodeBlock(command):
            return command_lines(command, f"{indent}  ")
        case Figure(path):
            return paragraph(f"Picture: {'/'.join(path.parts[-2:])}", indent)
        case Admonition(blocks):
            return lines(blocks, indent)
    raise TypeError(f"{type(block).__name__} is no block")


def _numbered(mark: str, item: Sequence[Block]) -> list[str]:
    [first, *rest] = lines(item, " " * len(mark), is_tight=True)
    return [mark + first.lstrip(), *rest]


def _definitions(pairs: Sequence[tuple[str, str]], indent: str) -> list[str]:
    longest = max((len(label) + 1 for label, _ in pairs), default=0)
    width = min(max(longest, NARROWEST_LABEL), WIDEST_LABEL)
    hanging = " " * (len(indent) + width + 2)
    return [line for label, value in pairs for line in paragraph(value, hanging, f"{indent}{label + ':':<{width}}  ")]
