"""Draw the card that the README shows as text: docs/card.svg, light or dark as the reader's browser is.

python docs/draw_card.py
"""

import html
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "card.svg"
CARD = re.compile(r"```text\n(.*?)```", re.DOTALL)
FACTOR = re.compile(r"(?<![\d.])[1-9]\d*(?:\.\d+)?×")  # from 1 on: what is less gained nothing
LABEL = 12  # columns, as boundby.bound.card has them
WIDE, HIGH, MARGIN = 8.43, 21, 24  # pixels: of a character at 14 px, of a line, around
STYLE = """
  text { font: 14px "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre; fill: #1f2328 }
  .title { font-weight: bold } .label { fill: #0550ae; font-weight: bold } .command { fill: #57606a }
  .gain { fill: #1a7f37; font-weight: bold } .page { fill: #f6f8fa; stroke: #d0d7de }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .label { fill: #79c0ff } .command { fill: #9198a1 } .gain { fill: #56d364 }
    .page { fill: #161b22; stroke: #30363d }
  }
"""


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(drawn(card_of_readme()), encoding="utf-8")


def card_of_readme() -> list[str]:
    """Return the lines of the card in the README."""
    card = CARD.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert card, "the README shows no card"
    return card[1].splitlines()


def drawn(lines: list[str]) -> str:
    """Return the card as SVG: its first line the title, labels at the start of the others."""
    width, height = round(max(map(len, lines)) * WIDE + 2 * MARGIN), len(lines) * HIGH + 2 * MARGIN
    said = html.escape(" ".join(" ".join(lines).split()), quote=True)
    shown = [
        f'<text x="{MARGIN}" y="{MARGIN + HIGH * number - 6}" xml:space="preserve">{text}</text>'
        for number, text in enumerate(_coloured(lines), 1)
    ]
    page = f'<rect class="page" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join([f'{head} role="img" aria-label="{said}">', f"<style>{STYLE}</style>", page, *shown, "</svg>", ""])


def _coloured(lines: list[str]) -> Iterator[str]:
    title, *others = lines
    yield f'<tspan class="title">{html.escape(title)}</tspan>'
    is_command = False
    for line in others:
        is_command = is_command or bool(re.match(r" +(python|boundby) ", line))
        label, text = line[:LABEL], line[LABEL:]
        shown = html.escape(text) if is_command else FACTOR.sub(r'<tspan class="gain">\g<0></tspan>', html.escape(text))
        kind = "command" if is_command else "said"
        yield f'<tspan class="label">{label}</tspan><tspan class="{kind}">{shown}</tspan>'
        is_command = is_command and line.endswith("\\")


if __name__ == "__main__":
    main()
