"""The report for a browser: one file, nothing but what we put there, whatever the names in it are."""

import base64
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from boundby.formatting import WIDTH, clean, command_lines, number, paragraph, table, times
from tests import baseline_document as results
from tests import predicted_quality as predicted
from tests.diagnosed_rows import diagnosed
from tests.report_reading import answered, draw, pod, traced
from utils.command.console import printable
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
from utils.report import assembly, sources

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
    assert [type(block) for block in EXAMPLES] == list(get_args(Block))
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
    [block] = [kind for kind in EXAMPLES if isinstance(kind, example)]
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


ALLOWED = {
    "html": {"lang"},
    "meta": {"charset", "http-equiv", "content", "name"},
    "nav": {"aria-label"},
    "a": {"href"},
    "h2": {"id"},
    "p": {"class"},
    "ul": {"class"},
    "section": {"class", "aria-label"},
    "details": {"id"},
    "span": {"class"},
    "summary": set(),
    "div": {"class", "role", "tabindex", "aria-label"},
    "th": {"scope", "class"},
    "td": {"class"},
    "img": {"src", "width", "height", "alt"},
    **dict.fromkeys(
        ["head", "title", "style", "body", "main", "header", "h1", "li", "ol", "dl", "dt", "dd", "strong", "aside"],
        set(),
    ),
    **dict.fromkeys(["figure", "figcaption", "table", "thead", "tbody", "tr", "pre", "code"], set()),
}
VOID = {"meta", "img"}
CLASSES = {"kind", "card", "title", "badge", "sure", "detail", "caption", "scroll", "left", "notes"}
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
HOSTILE = (
    "</title></style><script>alert(1)</script>\" onload='alert(2)' x=\"><img src=x onerror=alert(3)>"
    "{{ 7 * 7 }}{% include 'page.css' %}&lt;b&gt;<!-- ]]>\x00\x1b[2J\x7f\x9b\u202e\u2028\ud800"
)


class Page(HTMLParser):
    """What a browser finds in a page: tags in order with their attributes, and the text outside `style`."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text, self.style = "", ""
        self.comments: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"{tag} has an attribute twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.text += " "

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["style"]:
            self.style += data
        else:
            self.text += data

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(data: sources.ReportData) -> Page:
    return Page(html_page.render(assembly.report(data).document))


def assert_is_inert(page: Page) -> None:
    """Fail on a tag, attribute or address that the template does not write, and on what would fetch something."""
    for tag, attributes in page.tags:
        assert tag in ALLOWED and set(attributes) <= ALLOWED[tag], (tag, attributes)
        assert set((attributes.get("class") or "").split()) <= CLASSES
    assert page.open == [] and page.comments == []
    assert all(re.fullmatch(r"#[a-z0-9-]+", element["href"]) for element in page.all("a"))
    assert all(re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/]+=*", element["src"]) for element in page.all("img"))
    assert [element["content"] for element in page.all("meta") if "http-equiv" in element] == [POLICY]
    assert "url(" not in page.style and "@import" not in page.style
    assert page.text == printable(page.text)


DOCUMENTS = {
    "offline default": (lambda: results.document(results.cpu_rows()), traced()),
    "nothing measured yet": (lambda: results.document([], complete=False, full_dataset_metrics=None), {}),
    "no trace": (lambda: results.document(results.cpu_rows([1, 2])), {}),
    "failed": (lambda: results.document(results.cpu_rows(failed=[4])), traced()),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_page_holds_what_the_template_writes_and_fetches_nothing(read, name):
    document, stored = DOCUMENTS[name]
    page = page_of(read(document(), **stored))
    assert_is_inert(page)
    assert len(page.all("h1")) == len(page.all("title")) == 1


def test_page_of_a_gpu_holds_what_the_template_writes(read):
    assert_is_inert(page_of(pod(read, **traced(device=True), settings={"pod": {"price_per_hour": 2.0}})))


def test_hostile_names_in_the_results_are_text(read):
    document = results.document(results.cpu_rows([1], rounds=1), doubts=[f"doubt about {HOSTILE}"[:-1]])
    name = HOSTILE[:-1]  # JSON in UTF-8 cannot hold half a surrogate pair
    document["model"] |= {"name": name, "revision": name, "type": name}
    document["dataset"]["source"] |= {"name": name, "split": name}
    document["full_dataset_metrics"] |= {"gpu_mem_used_reason": name}
    document["boundby_version"] = document["device"]["name"] = name
    rows = [{**row, "name": name} for row in results.operators()[:1]]
    lost = [{"what": name, "reason": name}]
    machine = {**results.CPU_MACHINE, "cpu": name}
    trace = results.manifest(dtype=name, unavailable=lost, warnings=[name])
    data = read(document, op_rows=rows, trace=trace, machine=machine)
    page, plain = page_of(data), page_of(read(results.document(results.cpu_rows([1], rounds=1)), **traced()))
    assert_is_inert(page)
    assert "<script>alert(1)</script>" in page.text and "{{ 7 * 7 }}" in page.text
    for tag in ("script", "title", "style", "h1", "h2", "table", "figure", "a"):
        assert len(page.all(tag)) == len(plain.all(tag)), tag


def test_hostile_classes_and_texts_are_text(read):
    hostile = HOSTILE[:-1]
    data = read(results.document(results.cpu_rows([1])))
    mistakes = predicted.mistakes(3, text=hostile, name=hostile)
    predicted.store(data.layout.evaluated, (hostile, "b"), np.array([[3, 2], [1, 4]]), mistakes=mistakes)
    page = page_of(read(data.document))
    assert_is_inert(page)
    assert page.text.count("<script>alert(1)</script>") == 3  # the texts; of the long name the middle is left out
    assert page.text.count("</title></style>") >= 6


def test_hostile_text_is_inert_in_every_field_of_every_block(tmp_path):
    missing, present = tmp_path / "<script>.png", tmp_path / "a.png"
    present.write_bytes(PIXEL)
    blocks = [
        Admonition([Paragraph(HOSTILE, HOSTILE), CodeBlock(HOSTILE)]),
        Heading(HOSTILE),
        Card(HOSTILE, [(HOSTILE, [HOSTILE], HOSTILE)], []),
        Details(HOSTILE, [Paragraph(HOSTILE)]),
        BulletList([HOSTILE]),
        OrderedList([[Paragraph(HOSTILE), Table([HOSTILE], [[HOSTILE]])]]),
        DefinitionList([(HOSTILE, HOSTILE)]),
        Table([HOSTILE, HOSTILE], [[HOSTILE, HOSTILE]], left=[0], caption=HOSTILE, notes=[HOSTILE]),
        Figure(missing, HOSTILE),
        Figure(present, HOSTILE),
    ]
    rendered = html_page.render(Document(HOSTILE, HOSTILE, HOSTILE, blocks))
    page = Page(rendered)
    assert_is_inert(page)
    shown = printable(HOSTILE)
    assert page.text.count(shown) == 30
    assert page.all("img")[0]["alt"] == shown and shown in [element.get("aria-label") for element in page.all("div")]
    assert rendered.encode("utf-8")


PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAJYAAABLCAAAAABnI0lSAAAADklEQVR42mNgGAWjAAMAAAJSAAE5W4C8AAAAAElFTkSuQmCC"
)  # the first bytes of a PNG of 150 x 75


def test_pictures_are_inside_beside_their_sections(read):
    data = read(results.document(answered(diagnosed(results.cpu_rows([1, 2])))), **traced())
    draw(data)
    page = page_of(data)
    assert_is_inert(page)
    inside = [base64.b64decode(element["src"].partition(",")[2]) for element in page.all("img")]
    drawn = [drawing for drawing in assembly.report(data).drawings if drawing.reason is None]
    names = ["breakdown.png", "batch_size_comparison.png", "roofline.png", "metrics_heatmap.png", "operators.png"]
    assert [drawing.path.name for drawing in drawn] == names
    assert inside == [drawing.path.read_bytes() for drawing in drawn]
    assert [element["alt"] for element in page.all("img")] == [drawing.description for drawing in drawn]
    positions = [attributes.get("id") or "picture" for tag, attributes in page.tags if tag in ("h2", "details", "img")]
    assert positions[positions.index("where-the-time-goes") :][:2] == ["where-the-time-goes", "picture"]
    assert positions[positions.index("batch-sizes") :][:3] == ["batch-sizes", "picture", "picture"]
    assert positions[positions.index("operators-of-the-trace") :][:2] == ["operators-of-the-trace", "picture"]


def test_picture_has_its_printed_size(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(PIXEL)
    [image] = Page(html_page.render(Document("k", "t", "d", [Figure(path, "what it shows")]))).all("img")
    assert (image["width"], image["height"]) == ("96", "48")  # an inch of 96 CSS pixels; drawn with 150 dots


@pytest.mark.parametrize("content", [None, b"torn"])
def test_picture_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / "a.png"
    if content:
        path.write_bytes(content)
    page = Page(html_page.render(Document("k", "t", "d", [Figure(path, "what it shows")])))
    assert page.all("img") == [] and "what it shows (a.png cannot be read)" in page.text


def test_page_leads_to_each_section_and_holds_whole_commands(read):
    page = page_of(read(results.document(results.cpu_rows([1, 2])), **traced()))
    order = [tag for tag, _ in page.tags if tag in ("h1", "section", "aside", "nav", "h2")]
    assert order[:5] == ["h1", "section", "aside", "nav", "h2"]
    anchors = [element["id"] for element in page.all("h2")]
    assert [element["href"] for element in page.all("a")] == [f"#{anchor}" for anchor in anchors]
    assert max(Counter(anchors).values()) == 1
    data = read(results.document(results.cpu_rows(noisy=[4])))
    rendered = html_page.render(assembly.report(data).document)
    command = data.trial("again", "profiling.batch_sizes=[4]", "profiling.max_seconds_per_batch_size=30")
    assert command.split(" output.")[0].replace("'", "&#39;") in rendered


def test_page_and_text_say_the_same(read):
    document = assembly.report(pod(read, **traced(device=True))).document
    page = Page(html_page.render(document))
    # A browser numbers the entries itself, and shows a picture where the text names its file.
    text = re.sub(r"(?m)^[0-9]+\. |^Picture: .*", "", plain_text.render(document))
    said, shown = (Counter(re.findall(r"[a-z0-9.,]+", whole.casefold())) for whole in (text, page.text))
    assert said - shown == Counter()
