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
    found = opened(with_memory(gpt2()))
    yield found
    assert found.said == []
    assert [each for each in found.requests if not each.startswith("file:")] == [] and len(found.requests) == 1


def names(found) -> list[str]:
    return found.texts(FIRST_NAME)


def sort_by(found, title: str) -> list[str]:
    """Click the header that is called so; return the state of all headers after it."""
    heads = found.texts("#table thead button")
    found.click(f"#table thead th:nth-child({heads.index(title) + 1}) button")
    return found.run("[...document.querySelectorAll('#table thead th')].map((each) => each.ariaSort)")


def test_switch_collapse_and_search_and_sort(of_gpt2):
    found = of_gpt2
    assert "20 of 151 layers by self time" in found.text("#summary-latency")
    assert found.texts(LABELS)[0] == "lm_head"
    found.click("[value=inclusive]")
    assert "by inclusive time. Longest: (model) 258 ms (100.0 %)" in found.text("#summary-latency")
    assert found.texts(LABELS)[:2] == ["(model)", "transformer"]
    found.click("[value=self]")
    found.set("#collapse", "types")
    assert "11 of 11 classes by self time, 100.0 % of the time of all layers" in found.text("#summary-latency")
    found.set("#collapse", "2")
    assert "19 of 19 blocks by self time, 100.0 % of the time" in found.text("#summary-latency")
    found.set("#arrangement", "calls")
    assert found.texts(LABELS)[:3] == ["(model) (self)", "transformer (self)", "transformer.wte"]

    assert names(found)[:2] == ["(model)", "transformer"] and len(names(found)) == 50
    found.click("#query")
    found.write("H.3 conv1d")
    blocks = [each.removeprefix("transformer.h.3.") for each in names(found)]
    assert blocks == ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    assert found.text("#found") == "4 of 151 layers, rows 1 to 4"
    states = sort_by(found, "Self mean (ms)")
    assert states.count("descending") == 1 and states.count("none") == len(states) - 1
    assert names(found)[0] == "transformer.h.3.mlp.c_proj"
    assert sort_by(found, "Self mean (ms)").count("ascending") == 1
    assert names(found)[0] == "transformer.h.3.attn.c_proj"
    found.set("#query", "no such layer")
    assert names(found) == [] and found.text("#found") == "0 of 151 layers"


def test_hovering_tells_a_layer_and_the_table_is_turned_and_sorted_by_keyboard_with_unknown_values_last(of_gpt2):
    found = of_gpt2
    found.point("#plot-latency .bars .point path")
    found.wait_for("#plot-latency .hovertext")
    words = found.text("#plot-latency .hoverlayer")
    assert "lm_head" in words and "p95" in words and "60 runs" in words
    found.run("document.getElementById('next').focus()")
    found.press("Enter", 13, "\r")
    assert found.text("#found") == "151 of 151 layers, rows 51 to 100"
    found.run("document.querySelector('#table thead button').focus()")
    found.press("Enter", 13, "\r")
    assert found.text("#found") == "151 of 151 layers, rows 1 to 50"
    assert names(found)[:2] == ["(model)", "lm_head"]
    found.press("Tab", 9)
    found.press(" ", 32, " ")
    assert names(found)[0] == "lm_head"
    found.set("#query", "GPT2Block")
    sort_by(found, "Layer")
    assert names(found)[1:3] == ["transformer.h.1", "transformer.h.2"] and names(found)[-1] == "transformer.h.11"
    found.set("#query", "")
    for _ in range(2):
        sort_by(found, "Bound")
        bounds = found.texts(f"{ROWS} td:nth-child(7)")
        assert bounds[0] in ("compute", "launch")
    colour = "getComputedStyle(document.querySelector('#plot-latency .bars path')).fill"
    light = found.run(colour)
    found.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    found.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert found.run(colour) != light, "charts follow light and dark"


@pytest.mark.parametrize("text", [HOSTILE, "x" * 10_000], ids=["markup", "long"])
def test_hostile_names_run_nothing_and_change_nothing(opened, text):
    found = opened(hostile(text), width=390)
    for click in ("[value=inclusive]", "#table thead th:nth-child(5) button"):
        found.click(click)
    found.click("#query")
    found.write("</SCRIPT>")
    assert "</script>" in names(found)
    for chart in ("types", "roofline", "memory"):
        found.point(f"#plot-{chart} .point")
        found.wait_for(f"#plot-{chart} .hovertext")
        shown = "".join(found.texts(f"#plot-{chart} .hovertext"))
        assert text != HOSTILE or "<b>bold</b>" in shown, chart
    for kind in ("img", "iframe", "main a:not(nav a)", ".plot a", "figure b", "main script", "main style"):
        assert found.run(f"document.querySelectorAll('{kind}').length") == 0, kind
    assert found.run("document.querySelectorAll('script').length") == 3
    assert found.run("document.documentElement.scrollWidth <= innerWidth")
    assert found.said == [] and len(found.requests) == 1


@pytest.mark.parametrize("width", [400, 900, 1300, 2560])
def test_nothing_is_cut_on_screens_of_any_width(opened, width):
    found = opened(with_memory(gpt2()), width=width)
    within = (
        "[...document.querySelectorAll('.short')].every((each) => each.scrollWidth <= each.parentElement.clientWidth)"
    )
    assert found.run(within)
    assert found.run("document.documentElement.scrollWidth <= innerWidth") and found.said == []


def test_thousand_layers_fit_a_phone(opened):
    found = opened(many(1000), width=390, scheme="dark")
    assert "20 of 1,001 layers by self time" in found.text("#summary-latency")
    assert found.text("#found") == "1,001 of 1,001 layers, rows 1 to 50" and len(names(found)) == 50
    assert found.run("document.documentElement.scrollWidth <= innerWidth")
    assert found.said == []


def test_labels_of_a_narrow_chart_keep_the_number_of_the_block(opened):
    paths = [f"encoder.layer.{at}.intermediate.projection" for at in (3, 11)] + ["encoder.layer.7.out", "plain_" * 5]
    found = opened(model_profile(nested([layer(""), *map(layer, paths)])), width=390)
    inside = {"…3…iate.projection", "…11…ate.projection", "…coder.layer.7.out", "…lain_plain_plain_"}
    assert set(found.texts(LABELS)) == {"(model) (self)", *inside}


def test_profile_that_is_not_representative_is_grey_and_shows_no_gains(opened):
    found = opened(gpt2(coverage=Coverage(0.71, "not representative", 0.5)))
    fill = "getComputedStyle(document.querySelector('#plot-latency .bars path')).fill"
    red, green, blue = found.run(f"{fill}.match(/\\d+/g).map(Number)")
    assert max(red, green, blue) - min(red, green, blue) < 16
    assert "Gain (ms)" not in found.texts("#table thead button") and found.said == []
