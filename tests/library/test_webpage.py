"""What all HTML pages have in common: one base style, and a template engine that escapes and hides no mistake."""

import re
from pathlib import Path

import jinja2
import pytest

from boundby.layers.webpage import FOLDER, environment

ROOT = Path(__file__).resolve().parents[2]
BASE = FOLDER / "base.css"
TEMPLATES = ("boundby/layers/dashboard/page.html.j2", "utils/render/page.html.j2", "utils/render/flame_graph.html.j2")
STYLES = ("boundby/layers/dashboard/page.css", "utils/render/page.css", "utils/render/flame_graph.html.j2")


def declarations(text: str) -> set[tuple[str, str]]:
    """Return selector and declaration of every rule, those of media queries too."""
    rules = re.findall(r"([^{};]+)\{([^{}]*)\}", text)
    return {(" ".join(rule.split()), line.strip()) for rule, body in rules for line in body.split(";") if line.strip()}


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_page_begins_with_the_base_style(template):
    assert '<style>\n{% include "base.css" %}\n' in (ROOT / template).read_text(encoding="utf-8")


@pytest.mark.parametrize("style", STYLES)
def test_no_style_repeats_what_the_base_says(style):
    base, own = (declarations(path.read_text(encoding="utf-8")) for path in (BASE, ROOT / style))
    assert len(base) > 60 and own and not base & own


def test_base_style_prints_dark_ink_on_white_whatever_the_screen_is():
    style = BASE.read_text(encoding="utf-8")
    dark, printed = style.index("prefers-color-scheme: dark"), style.index("@media print")
    assert dark < printed and ":root:where(:not(.printing))" in style  # equal specificity: the later one wins


def test_templates_escape_what_they_are_given_and_stop_at_what_is_missing(tmp_path):
    (tmp_path / "page").write_text('{{ text }}{% include "base.css" %}')
    template = environment(tmp_path).get_template("page")
    assert template.render(text="<b>") == "&lt;b&gt;" + BASE.read_text(encoding="utf-8").rstrip("\n")
    with pytest.raises(jinja2.UndefinedError, match="'text' is undefined"):
        template.render()
