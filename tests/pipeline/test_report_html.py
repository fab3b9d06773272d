"""The report for a browser: one file, nothing but what we put there, whatever the names in it are."""

import base64
import re
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest

from tests import baseline_document as results
from tests import predicted_quality as predicted
from tests.diagnosed_rows import diagnosed
from tests.report_reading import answered, draw, pod, traced
from utils.console import printable
from utils.render import html_page, plain_text
from utils.render.blocks import (
    Admonition,
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
    assert all(re.fullmatch(r"#[a-z0-9-]+", each["href"]) for each in page.all("a"))
    assert all(re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/]+=*", each["src"]) for each in page.all("img"))
    assert [each["content"] for each in page.all("meta") if "http-equiv" in each] == [POLICY]
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
    assert page.all("img")[0]["alt"] == shown and shown in [each.get("aria-label") for each in page.all("div")]
    assert rendered.encode("utf-8")


PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAJYAAABLCAAAAABnI0lSAAAADklEQVR42mNgGAWjAAMAAAJSAAE5W4C8AAAAAElFTkSuQmCC"
)  # the first bytes of a PNG of 150 x 75


def test_pictures_are_inside_beside_their_sections(read):
    data = read(results.document(answered(diagnosed(results.cpu_rows([1, 2])))), **traced())
    draw(data)
    page = page_of(data)
    assert_is_inert(page)
    inside = [base64.b64decode(each["src"].partition(",")[2]) for each in page.all("img")]
    drawn = [drawing for drawing in assembly.report(data).drawings if drawing.reason is None]
    names = ["owners.png", "batch_size_comparison.png", "roofline.png", "metrics_heatmap.png", "operators.png"]
    assert [drawing.path.name for drawing in drawn] == names
    assert inside == [drawing.path.read_bytes() for drawing in drawn]
    assert [each["alt"] for each in page.all("img")] == [drawing.description for drawing in drawn]
    places = [each.get("id") or "picture" for tag, each in page.tags if tag in ("h2", "details", "img")]
    assert places[places.index("where-the-time-goes") :][:2] == ["where-the-time-goes", "picture"]
    assert places[places.index("batch-sizes") :][:3] == ["batch-sizes", "picture", "picture"]
    assert places[places.index("operators-and-batches") :][:2] == ["operators-and-batches", "picture"]


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
    anchors = [each["id"] for each in page.all("h2")]
    assert [each["href"] for each in page.all("a")] == [f"#{anchor}" for anchor in anchors]
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
    said, shown = (Counter(re.findall(r"[a-z0-9.,]+", each.casefold())) for each in (text, page.text))
    assert said - shown == Counter()
