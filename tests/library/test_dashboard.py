"""The page of a profile by layer: it tells what is known, why the rest is not, and holds what we put there alone."""

import base64
import hashlib
import re
import subprocess
import sys

import pytest
from msgspec.structs import replace

from boundby import formatting
from boundby.layers import dashboard
from boundby.layers.dashboard import outliers, page
from boundby.layers.records import Coverage, LayerProfile, ModelProfile
from tests.layer_profiles import HOSTILE as HOSTILE_NAME
from tests.layer_profiles import REPOSITORY, gpt2, hostile, layer, many, model_profile, nested, spread, with_memory
from tests.web_page import WebPage


def page_of(profile: ModelProfile, title: str | None = None) -> WebPage:
    return WebPage(page(profile, title))


@pytest.fixture(scope="module")
def of_gpt2():
    return page_of(gpt2())


@pytest.fixture(scope="module")
def of_gpu():
    return page_of(with_memory(gpt2()))


@pytest.fixture(autouse=True)
def _short_plotly(of_gpt2, monkeypatch):
    """Spare all pages but that of GPT-2 the 5 MB of plotly.js."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly.js */")


def test_banner_comes_first_and_holds_what_the_profile_rests_on(of_gpt2):
    start = of_gpt2.sections[""]
    for words in ("gpt2", "End to end, median", "mean", "100.4 %", "✓ pass", "0.4 %", "Runs 60", "cpu", "float32"):
        assert words in start, words
    assert "not representative" not in of_gpt2.text
    for answer in ("What lm_head is the longest block, 27.3 %", "Why 94.5 % of the time", "Next Make the work itself"):
        assert answer in start
    titled = page_of(gpt2(), title="Before the change")
    assert "Before the change" in titled.sections[""] and "gpt2" in titled.sections["environment"]


def test_where_launches_limit_the_advice_names_graphs_on_a_gpu_alone():
    launching = gpt2()
    launching = replace(launching, layers=tuple(replace(layer, bound="launch") for layer in launching.layers))
    assert "CUDA" not in page_of(launching).sections[""] and "less Python" in page_of(launching).sections[""]
    assert "CUDA graphs" in page_of(with_memory(launching)).sections[""]


def test_profile_that_is_not_representative_withholds_gains_everywhere_and_one_to_be_read_with_care_does_not():
    shown = page_of(gpt2(coverage=Coverage(0.71, "not representative", 0.5)))
    assert shown.sections[""].index("This profile is not representative") < shown.sections[""].index("End to end")
    assert "71.0 %" in shown.sections[""] and "✗ not representative" in shown.sections[""]
    for key in ("bottlenecks", "latency", "types", "memory", "parameters", "roofline", "layers"):
        assert "not representative" in shown.sections[key], key
    assert "Gain" not in shown.sections["bottlenecks"]
    assert ("html", {"lang": "en", "class": "untrusted"}) in shown.tags
    shown = page_of(gpt2(coverage=Coverage(0.95, "warn", 0.5), doubts=("another process used a core",)))
    assert "⚠ warn: read with care" in shown.text and "not representative" not in shown.text
    assert "another process used a core" in shown.sections[""], "doubts stand in the banner"


def test_bottlenecks_are_the_five_longest_blocks_with_their_shares(of_gpt2):
    words = of_gpt2.sections["bottlenecks"]
    assert re.findall(r"(?:lm_head|transformer\.h\.\d+) (?:Linear|GPT2Block) [\d.]+ ms [\d.]+ %", words)[:2] == [
        "lm_head Linear 70.6 ms 27.3 %",
        "transformer.h.11 GPT2Block 16.0 ms 6.2 %",
    ]
    assert words.count("GPT2Block") == 4 and "longest 5 of 17 blocks" in words


def test_script_gets_every_layer_with_times_in_seconds_and_sizes_in_bytes(of_gpu):
    profile = with_memory(gpt2())
    columns = of_gpu.data["layers"]
    assert {len(column) for column in columns.values()} == {len(profile.layers)}
    at = columns["path"].index("transformer.h.3.mlp.c_fc")
    made = profile.layers[at]
    assert made.self_s and columns["selfMean"][at] == pytest.approx(made.self_s.mean, rel=1e-5)
    assert columns["before"][at] == made.memory_before_bytes and columns["parameters"][at] == made.parameters
    assert columns["path"][columns["parent"][at]] == "transformer.h.3.mlp" and columns["parent"][0] == -1
    assert of_gpu.data["total"]["self"] == pytest.approx(of_gpu.data["total"]["inclusive"], rel=1e-6)


def test_device_time_counts_where_it_is_known_types_add_up_and_every_chart_has_a_name_and_a_summary(of_gpt2, of_gpu):
    assert "host time" in of_gpt2.sections[""]
    assert "device time" in of_gpu.sections[""] and "host time" not in of_gpu.sections[""]
    shares = re.findall(r"\w+ \d+ [\d.]+ [mµ]?s ([\d.]+) %", of_gpt2.sections["types"])
    assert sum(map(float, shares)) == pytest.approx(100, abs=0.6) and len(shares) == 11
    plots = [attrs for _, attrs in of_gpu.tags if attrs.get("class") == "plot"]
    ids = {attrs.get("id") for _, attrs in of_gpu.tags}
    assert len(plots) == 5
    for plot in plots:
        assert plot["role"] == "img" and plot["aria-label"] and plot["aria-describedby"] in ids


def test_layer_of_another_thread_adds_to_no_sum_and_says_so():
    beside = replace(layer("beside", "Odd", 1.0), is_concurrent=True)
    shown = page_of(model_profile([*nested([layer("", "Model"), layer("a", "Linear")]), beside]))
    assert "Odd" not in shown.sections["types"] and shown.data["total"]["self"] < 0.1
    assert shown.data["layers"]["counted"] == [True, True, False]
    assert "another thread" in shown.data["layers"]["doubts"][2]


def test_outliers_are_named_with_how_far_they_are_and_memory_with_the_layer_of_the_peak(of_gpt2, of_gpu):
    words = of_gpt2.sections["parameters"]
    assert re.search(r"transformer\.wte \(38\.6 M parameters, 56\.\d µs, \d+ times faster than expected\)", words)
    names = [of_gpt2.data["layers"]["path"][at] for at in of_gpt2.data["outliers"]["outliers"]]
    assert names == ["transformer.wte", "transformer.wpe", "lm_head"]
    assert re.search(r"From 498 MB before a layer to [\d.]+ MB at most, inside lm_head", of_gpu.sections["memory"])
    assert "nothing to draw: cpu has no allocator statistics" in of_gpt2.sections["memory"]
    assert "plot-memory" not in {attrs.get("id") for _, attrs in of_gpt2.tags}


def test_roofline_has_the_limits_of_main_memory_and_of_the_smallest_cache_or_the_reason_for_none(of_gpt2):
    words = [name for name, _ in of_gpt2.data["roofs"]["bytes"]]
    assert words == ["32.0 GB/s at 268 MB", "150 GB/s at 1.00 MB"] and of_gpt2.data["roofs"]["flops"] == 1.8e11
    assert "launch 76 and compute 49" in of_gpt2.sections["roofline"]
    shown = page_of(gpt2(limits=None))
    assert "No limits are drawn: the machine was not calibrated." in shown.sections["roofline"]
    assert shown.data["roofs"] is None and "plot-roofline" in {attrs.get("id") for _, attrs in shown.tags}


@pytest.mark.parametrize(
    "profile", [model_profile([layer("", "Model", None), layer("a", "X", None)]), model_profile([])]
)
def test_nothing_known_gives_a_page_of_reasons(profile):
    shown = page_of(profile)
    assert not [attrs for _, attrs in shown.tags if attrs.get("class") == "plot"]
    assert "cpu has no allocator statistics" in shown.sections["memory"]
    assert "device times: cpu has no device clock of its own" in shown.sections["layers"]
    assert "None" not in shown.text and "nan" not in shown.text.lower().split()


def test_each_layer_may_lack_what_others_have_and_percentiles_are_missing_with_the_reason_of_the_profile():
    few = layer("", "Model", host_self_s=spread(1e-3, 9), host_inclusive_s=spread(1e-3, 9))
    shown = page_of(model_profile([few], num_runs=9, reasons={"p95": "9 runs are too few; it takes 20"}))
    assert "95th percentiles: 9 runs are too few; it takes 20" in shown.sections["layers"]
    assert "59" not in shown.sections["layers"]
    assert shown.data["layers"]["selfP95"] == [None] and shown.data["layers"]["selfMax"][0] > 0
    whole = with_memory(gpt2())
    kept = ("path", "parent", "name", "type", "depth", "order", "calls")
    bare = [LayerProfile(**{name: getattr(layer, name) for name in kept}) for layer in whole.layers]
    layers = tuple(bare[at] if at % 3 else full for at, full in enumerate(whole.layers))
    shown = page_of(replace(whole, layers=layers))
    assert "None" not in shown.text and shown.data["layers"]["selfMean"].count(None) == 100


def test_hostile_names_leave_the_page_as_it_is_and_hold_no_control_and_no_direction_characters():
    raw = page(hostile(HOSTILE_NAME))
    assert not {"\u2028", "\u2029", "\u202e", "\x1b", "\x00", "\u200b"} & set(raw)
    tame, shown = page_of(hostile("tame")), WebPage(raw)
    kinds = ("script", "style", "img", "svg", "b", "a", "i", "title", "section", "iframe")
    count = [[sum(tag == kind for tag, _ in html.tags) for kind in kinds] for html in (tame, shown)]
    assert count[0] == count[1] and shown.open == []
    assert not [name for _, attrs in shown.tags for name in attrs if name.startswith("on")]
    assert "<script>alert(1)</script>" in shown.data["layers"]["type"][1]  # as text, for a script that makes no tags


def test_long_and_unprintable_names_have_a_name_still():
    made = model_profile([layer("", "Model"), layer("begin" + "x" * 10_000 + "end", parent="", depth=1)])
    shown = page_of(made)
    name = shown.data["layers"]["path"][1]
    assert (len(name), name[:6], name[-4:]) == (
        dashboard.LONGEST_NAME,
        "beginx",
        "xend",
    ) and "x" * 200 not in shown.text
    shown = page_of(model_profile([layer("", "Model"), layer("\u202e", "\u200b", parent="", depth=1)]))
    assert shown.data["layers"]["path"][1] == "(unprintable name)" and "(unprintable name)" in shown.sections["types"]


def test_page_allows_its_two_scripts_and_fetches_nothing(of_gpt2):
    [policy] = [attrs["content"] for _, attrs in of_gpt2.tags if attrs.get("http-equiv")]
    _, plotly_js, ours = of_gpt2.scripts
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in (plotly_js, ours)]
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hashes[0]}' 'sha256-{hashes[1]}'"
    )
    assert not [attrs for tag, attrs in of_gpt2.tags if "src" in attrs or tag == "link"]
    assert plotly_js.count("plotly.js v") == 1 and "plotly.js v" not in ours


def test_the_same_profile_gives_the_same_page_and_a_thousand_layers_add_little():
    assert page(gpt2()) == page(gpt2())
    assert len(page(many(1000))) - len(page(many(0))) < 300_000


@pytest.mark.parametrize(("missing", "imports"), [("plotly", "plotly.offline"), ("jinja2", "jinja2")])
def test_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, missing, imports):
    monkeypatch.setitem(sys.modules, imports, None)
    with pytest.raises(ImportError, match=rf"the dashboard needs {missing}: pip install 'boundby\[dashboard\]'"):
        page(gpt2())


def test_import_loads_neither_torch_nor_plotly():
    code = "import sys, boundby.layers.dashboard; print({'torch', 'plotly', 'jinja2', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_outliers_are_those_far_from_the_line_and_the_farthest_comes_first():
    line = [(10.0**at, 2e-9 * 10.0**at) for at in range(1, 8)]
    assert outliers(line) == []
    outlying = outliers([*line, (1e4, 2e-4), (1e5, 1e-7)])
    assert [outlier.at for outlier in outlying] == [8, 7]
    assert [outlier.factor for outlier in outlying] == pytest.approx([1 / 2000, 10], rel=1e-6)
    assert outliers([(100, 1e-3)] * 8) == [], "equal ones"
    assert [outlier.at for outlier in outliers([*[(100, 1e-3)] * 8, (100, 2.1e-3)])] == [8]
    assert outliers([*[(100, 1e-3)] * 8, (100, 1.9e-3)]) == []
    assert outliers([(1, 1.0), (10, 1e-6), (100, 1.0), (1000, 1.0)]) == [] == outliers([]), "few"


def test_quantities_are_written_with_their_units():
    seconds, sizes = (0.0123, 2.5, 4.56e-5, 0.0), (498_000_000, 768)
    assert [formatting.duration(spent_s) for spent_s in seconds] == ["12.3 ms", "2.50 s", "45.6 µs", "0 µs"]
    assert [formatting.size(size) for size in sizes] == ["498 MB", "768 B"]
    assert [dashboard.count(number) for number in (124_439_808, 1536)] == ["124 M", "1,536"]
    assert (dashboard.percent(0.173), dashboard.whole(151.0), dashboard.whole(1.5)) == ("17.3 %", "151", "1.5")
    assert formatting.listed(["a", "b", "c"]) == "a, b and c"
