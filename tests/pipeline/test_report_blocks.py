"""The blocks of a report, each kind shown by both renderers."""

from pathlib import Path
from typing import get_args

import pytest

from boundby.formatting import WIDTH, clean, command_lines, number, paragraph, table, times
from utils.render import html_page, plain_text
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

EXAMPLES = [
    Card("a card", [("Label", ["a text"], "do that")], ["a card", "Label  a text"]),
    Heading("a heading"),
    Paragraph("running text", strong="Opening:"),
    BulletList(["a finding", "another finding"]),
    OrderedList([[Paragraph("an entry"), CodeBlock("do this")], [Paragraph("the next entry")]]),
    DefinitionList([("label", "value")]),
    Table(["head\ning", "name"], [["12", "cell"]], left=[1], caption="a caption", notes=["a note"]),
    CodeBlock("python run_pipeline.py 'a.b=c d'"),
    Figure(Path("plots/absent.png"), "a description"),
    Details("folded away", [Paragraph("a secret of the page")]),
    Admonition([Paragraph("a warning")]),
]
TEXT = """\
a card
Label  a text

a heading
---------
Opening: running text

- a finding
- another finding

1. an entry
     do this
2. the next entry

label:                  value

a caption:
head
 ing  name
----  ----
  12  cell
  a note

  python run_pipeline.py 'a.b=c d'
Picture: plots/absent.png

a warning
"""


def test_every_kind_of_block_has_its_text_and_nothing_else_is_a_block():
    assert [type(each) for each in EXAMPLES] == list(get_args(Block))
    rendered = plain_text.render(Document("Example report", "of blocks", "made for a test", EXAMPLES))
    rule = "=" * WIDTH
    assert rendered == f"{rule}\nEXAMPLE REPORT: of blocks\nmade for a test\n{rule}\n{TEXT}"
    with pytest.raises(TypeError, match="str is no block"):
        plain_text.lines(["text"])


def test_text_stands_in_its_columns():
    blocks = [Paragraph("These are known:"), BulletList(["one"]), Paragraph("Nothing else is."), Paragraph("Really.")]
    assert plain_text.lines(blocks) == ["These are known:", "- one", "", "Nothing else is.", "", "Really."]
    [first, second] = plain_text.lines([DefinitionList([("short", "1"), ("a label of 30 characters, or so", "2")])])
    assert first.index("1") == second.rindex("2") == len("a label of 30 characters, or so:") + 2
    [narrow] = plain_text.lines([DefinitionList([("short", "1")])])
    assert narrow == f"{'short:':<{plain_text.NARROWEST_LABEL}}  1"
    lines = plain_text.lines([DefinitionList([("x" * 70, "word " * 40)])])
    assert max(map(len, lines)) <= WIDTH
    lines = plain_text.lines([OrderedList([[Paragraph("word " * 30)]] * 10)])
    assert lines[-2].startswith("10. word") and lines[-1].startswith("    word")
    assert max(map(len, lines)) <= WIDTH


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        (Heading, '<h2 id="a-heading">a heading</h2>'),
        (Paragraph, "<p><strong>Opening:</strong> running text</p>"),
        (BulletList, "<ul> <li>a finding</li> <li>another finding</li> </ul>"),
        (OrderedList, "<ol> <li> <p>an entry</p> <pre><code>do this</code></pre> </li> <li> <p>the next entry</p>"),
        (DefinitionList, "<dl> <dt>label</dt><dd>value</dd> </dl>"),
        (Table, '<tr><th scope="col">head ing</th><th scope="col" class="left">name</th></tr>'),
        (Table, '<tr><td>12</td><td class="left">cell</td></tr>'),
        (Table, '<ul class="notes"> <li>a note</li> </ul>'),
        (CodeBlock, "<pre><code>python run_pipeline.py &#39;a.b=c d&#39;</code></pre>"),
        (Card, "<dt>Label</dt><dd><p>a text</p><pre><code>do that</code></pre></dd>"),
        (Details, '<details id="folded-away"> <summary>folded away</summary> <p>a secret of the page</p> </details>'),
        (Figure, "<figure> <figcaption>a description (absent.png cannot be read)</figcaption> </figure>"),
        (Admonition, "<aside> <p>a warning</p> </aside>"),
    ],
)  # fmt: skip
def test_html_of_every_kind(example, expected):
    [block] = [each for each in EXAMPLES if isinstance(each, example)]
    page = html_page.render(Document("Example report", "of blocks", "made for a test", [block]))
    assert expected in " ".join(page.split())


def test_html_of_the_whole():
    page = " ".join(html_page.render(Document("Example report", "of blocks", "made for a test", [])).split())
    assert "<title>Example report: of blocks</title>" in page
    assert "<h1>of blocks</h1>" in page and "made for a test" in page
    assert "<nav" not in page and "badge" not in page.partition("<body>")[2]
    page = html_page.render(Document("Example report", "of blocks", "made for a test", [], "settled"))
    assert '<span class="badge sure">settled</span>' in page


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.012345, "0.01235"), (4.3214, "4.321"), (99.999, "100.00"), (1264.4, "1,264"), (301_412.3, "301,412"),
     (1e-7, "1.000e-07"), (2.5e12, "2.500e+12")],
)  # fmt: skip
def test_numbers_have_four_digits(value, shown):
    assert number(value) == shown


def test_factors_are_short():
    assert [times(factor) for factor in (1.0849, 4.907, 31.4)] == ["1.08", "4.9", "31"]


def test_long_names_lose_their_middle():
    assert clean("a" * 100 + "z" * 100, longest=11) == "aaaaa...zzz"
    assert clean("two\n words\x1b") == "two words"


def test_percent_sign_stays_with_its_number():
    lines = paragraph("word " * 19 + "9999 % more")
    assert lines[0].endswith("word") and lines[1] == "9999 % more"


def test_table_is_aligned():
    assert table(["size\n", "a\nname"], [["1", "x"], ["100", "yy"]], left=[1]) == [
        "size  a",
        "      name",
        "----  ----",
        "   1  x",
        " 100  yy",
    ]


def test_long_command_is_continued_where_its_words_end():
    lines = command_lines("python run.py " + " ".join(f"key{index}=value" for index in range(20)), "  ")
    assert all(len(line) <= WIDTH for line in lines) and len(lines) > 1
    joined = " ".join(line.rstrip("\\").strip() for line in lines)
    assert joined == "python run.py " + " ".join(f"key{index}=value" for index in range(20))
    assert all(line.endswith(" \\") for line in lines[:-1])
