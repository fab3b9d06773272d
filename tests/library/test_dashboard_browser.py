"""The page of a profile by layer in a real browser: it works, and says nothing on the console."""

import pytest

from boundby.layers.dashboard import page
from boundby.layers.records import Coverage
from tests import browser
from tests.layer_profiles import HOSTILE, gpt2, hostile, layer, many, model_profile, nested, with_memory

PROGRAM = browser.executable()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=f"there is no browser: none of {', '.join(browser.NAMES)}")
ROWS = "#table tbody tr"
FIRST_NAME = f"{ROWS} th .name"
LABELS = "#plot-latency .ytick text"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A function that opens the page of a profile and returns the browser, which must have nothing to complain of."""
    folder = tmp_path_factory.mktemp("dashboard")
    here = browser.Browser(PROGRAM, folder / "profile")

    def of(profile, **how):
        path = folder / "page.html"
        path.write_text(page(profile), encoding="utf-8")
        here.open(path, **how)
        return here

    yield of
    here.close()


@pytest.fixture
def of_gpt2(opened):
    page = opened(with_memory(gpt2()))
    yield page
    assert page.said == []
    assert [request for request in page.requests if not request.startswith("file:")] == [] and len(page.requests) == 1


def names(shown) -> list[str]:
    return shown.texts(FIRST_NAME)


def sort_by(shown, title: str) -> list[str]:
    """Click the header that is called so; return the state of all headers after it."""
    heads = shown.texts("#table thead button")
    shown.click(f"#table thead th:nth-child({heads.index(title) + 1}) button")
    return shown.run("[...document.querySelectorAll('#table thead th')].map((each) => each.ariaSort)")


def test_switch_collapse_and_search_and_sort(of_gpt2):
    shown = of_gpt2
    assert "20 of 151 layers by self time" in shown.text("#summary-latency")
    assert shown.texts(LABELS)[0] == "lm_head"
    shown.click("[value=inclusive]")
    assert "by inclusive time. Longest: (model) 258 ms (100.0 %)" in shown.text("#summary-latency")
    assert shown.texts(LABELS)[:2] == ["(model)", "transformer"]
    shown.click("[value=self]")
    shown.set("#collapse", "types")
    assert "11 of 11 classes by self time, 100.0 % of the time of all layers" in shown.text("#summary-latency")
    shown.set("#collapse", "2")
    assert "19 of 19 blocks by self time, 100.0 % of the time" in shown.text("#summary-latency")
    shown.set("#arrangement", "calls")
    assert shown.texts(LABELS)[:3] == ["(model) (self)", "transformer (self)", "transformer.wte"]

    assert names(shown)[:2] == ["(model)", "transformer"] and len(names(shown)) == 50
    shown.click("#query")
    shown.write("H.3 conv1d")
    blocks = [name.removeprefix("transformer.h.3.") for name in names(shown)]
    assert blocks == ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    assert shown.text("#found") == "4 of 151 layers, rows 1 to 4"
    states = sort_by(shown, "Self mean (ms)")
    assert states.count("descending") == 1 and states.count("none") == len(states) - 1
    assert names(shown)[0] == "transformer.h.3.mlp.c_proj"
    assert sort_by(shown, "Self mean (ms)").count("ascending") == 1
    assert names(shown)[0] == "transformer.h.3.attn.c_proj"
    shown.set("#query", "no such layer")
    assert names(shown) == [] and shown.text("#found") == "0 of 151 layers"


def test_hovering_tells_a_layer_and_the_table_is_turned_and_sorted_by_keyboard_with_unknown_values_last(of_gpt2):
    shown = of_gpt2
    shown.point("#plot-latency .bars .point path")
    shown.wait_for("#plot-latency .hovertext")
    words = shown.text("#plot-latency .hoverlayer")
    assert "lm_head" in words and "p95" in words and "60 runs" in words
    shown.run("document.getElementById('next').focus()")
    shown.press("Enter", 13, "\r")
    assert shown.text("#found") == "151 of 151 layers, rows 51 to 100"
    shown.run("document.querySelector('#table thead button').focus()")
    shown.press("Enter", 13, "\r")
    assert shown.text("#found") == "151 of 151 layers, rows 1 to 50"
    assert names(shown)[:2] == ["(model)", "lm_head"]
    shown.press("Tab", 9)
    shown.press(" ", 32, " ")
    assert names(shown)[0] == "lm_head"
    shown.set("#query", "GPT2Block")
    sort_by(shown, "Layer")
    assert names(shown)[1:3] == ["transformer.h.1", "transformer.h.2"] and names(shown)[-1] == "transformer.h.11"
    shown.set("#query", "")
    for _ in range(2):
        sort_by(shown, "Bound")
        bounds = shown.texts(f"{ROWS} td:nth-child(7)")
        assert bounds[0] in ("compute", "launch")
    colour = "getComputedStyle(document.querySelector('#plot-latency .bars path')).fill"
    light = shown.run(colour)
    shown.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    shown.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert shown.run(colour) != light, "charts follow light and dark"


@pytest.mark.parametrize("text", [HOSTILE, "x" * 10_000], ids=["markup", "long"])
def test_hostile_names_run_nothing_and_change_nothing(opened, text):
    hostile_page = opened(hostile(text), width=390)
    for click in ("[value=inclusive]", "#table thead th:nth-child(5) button"):
        hostile_page.click(click)
    hostile_page.click("#query")
    hostile_page.write("</SCRIPT>")
    assert "</script>" in names(hostile_page)
    for chart in ("types", "roofline", "memory"):
        hostile_page.point(f"#plot-{chart} .point")
        hostile_page.wait_for(f"#plot-{chart} .hovertext")
        shown = "".join(hostile_page.texts(f"#plot-{chart} .hovertext"))
        assert text != HOSTILE or "<b>bold</b>" in shown, chart
    for kind in ("img", "iframe", "main a:not(nav a)", ".plot a", "figure b", "main script", "main style"):
        assert hostile_page.run(f"document.querySelectorAll('{kind}').length") == 0, kind
    assert hostile_page.run("document.querySelectorAll('script').length") == 3
    assert hostile_page.run("document.documentElement.scrollWidth <= innerWidth")
    assert hostile_page.said == [] and len(hostile_page.requests) == 1


@pytest.mark.parametrize("width", [400, 900, 1300, 2560])
def test_nothing_is_cut_on_screens_of_any_width(opened, width):
    shown = opened(with_memory(gpt2()), width=width)
    within = (
        "[...document.querySelectorAll('.short')].every((each) => each.scrollWidth <= each.parentElement.clientWidth)"
    )
    assert shown.run(within)
    assert shown.run("document.documentElement.scrollWidth <= innerWidth") and shown.said == []


def test_thousand_layers_fit_a_phone(opened):
    shown = opened(many(1000), width=390, scheme="dark")
    assert "20 of 1,001 layers by self time" in shown.text("#summary-latency")
    assert shown.text("#found") == "1,001 of 1,001 layers, rows 1 to 50" and len(names(shown)) == 50
    assert shown.run("document.documentElement.scrollWidth <= innerWidth")
    assert shown.said == []


def test_labels_of_a_narrow_chart_keep_the_number_of_the_block(opened):
    paths = [f"encoder.layer.{at}.intermediate.projection" for at in (3, 11)] + ["encoder.layer.7.out", "plain_" * 5]
    shown = opened(model_profile(nested([layer(""), *map(layer, paths)])), width=390)
    inside = {"…3…iate.projection", "…11…ate.projection", "…coder.layer.7.out", "…lain_plain_plain_"}
    assert set(shown.texts(LABELS)) == {"(model) (self)", *inside}


def test_profile_that_is_not_representative_is_grey_and_shows_no_gains(opened):
    shown = opened(gpt2(coverage=Coverage(0.71, "not representative", 0.5)))
    fill = "getComputedStyle(document.querySelector('#plot-latency .bars path')).fill"
    red, green, blue = shown.run(f"{fill}.match(/\\d+/g).map(Number)")
    assert max(red, green, blue) - min(red, green, blue) < 16
    assert "Gain (ms)" not in shown.texts("#table thead button") and shown.said == []
