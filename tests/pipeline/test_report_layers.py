"""What the report says of the layers, and the figure of them; made-up profiles stand in for step 03."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from msgspec.structs import replace

from boundby import files
from boundby.layers.ranking import blocks, by_self_time
from boundby.layers.records import ModelProfile
from boundby.layers.report import write_summary
from tests import baseline_document as results
from tests import layer_profiles as profiles
from tests.diagnosed_rows import diagnosed
from tests.report_reading import Reader, draw, drawings, run_in, section, text, traced
from utils.render import html_page
from utils.report import assembly, profiling, sources
from utils.report.pictures import layers as figure_of_layers
from utils.report.pictures import style
from utils.report.pictures.style import BOUNDS
from utils.report.sources import ReportData

HEADING = "Layer by layer"
ABOUT = style.Subject("a model, float32", "on a machine, texts, measured 2026-11-21", is_synthetic=False)


def reported(
    read: Reader, profile: ModelProfile | None, overrides: tuple[str, ...] = (), **changes: object
) -> ReportData:
    """Read the results of the offline default with this profile of step 03."""
    summary = run_in(read.folder).layout.layer_summary
    if profile is not None:
        summary.parent.mkdir(parents=True, exist_ok=True)
        write_summary(summary, profile)
    return read(results.document(diagnosed(results.cpu_rows([8]))), **traced(), **changes)


def said(read: Reader, profile: ModelProfile | None) -> str:
    return section(reported(read, profile), HEADING)


def summary_path(read: Reader) -> Path:
    path = run_in(read.folder).layout.layer_summary
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


# The section


def test_rows_are_those_of_the_rankings_as_many_as_fit_and_without_zeros(read):
    profile = profiles.gpt2()
    whole = said(read, profile)
    head = blocks(profile)[0]
    [layer] = [row for row in profile.layers if row.path == head.path]
    time = f"{1e3 * head.seconds:.2f} {100 * head.share:.1f}"
    gain = f"{1e3 * head.gain_at_limit_s:.2f} {BOUNDS[layer.bound]} {100 * layer.share_of_limit:.0f}"
    assert f"{head.label} {head.type} {time} {gain}" in whole
    assert whole.count("transformer.h.") >= profiling.SHOWN_LAYERS - 1
    profile = profiles.many(200)
    shown = said(read, profile)
    assert shown.count("stack.blocks.") <= 2 * profiling.SHOWN_LAYERS
    assert blocks(profile)[profiling.SHOWN_LAYERS].label not in shown
    unknown = {"bound": None, "share_of_limit": None, "gain_at_limit_s": None}
    profile = profiles.gpt2()
    profile = replace(profile, layers=tuple(replace(layer, **unknown) for layer in profile.layers))
    head = blocks(profile)[0]
    assert f"{100 * head.share:.1f} - - -" in said(read, profile)
    assert "doubt" not in said(read, profiles.gpt2())


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"schema_version": 99, "profile": {}}', '{"schema_version": 2, "profile": {"device": 1}}']
)
def test_damaged_profile_is_one_sentence_and_the_rest_of_the_report_stands(read, content):
    summary_path(read).write_text(content)
    data = reported(read, None)
    result = section(data, HEADING)
    assert result.startswith("There is no profile by layer: model_summary.json cannot be read: ")
    assert "Batch sizes" in text(data)


def test_profile_of_another_model_is_not_shown(read):
    data = reported(read, profiles.gpt2())
    files.write_json(data.layout.receipt("03"), {"parts": {"inputs": {"model": "another"}}})
    other = sources.read(run_in(read.folder))
    assert other.layers == sources.Missing("step 03 was run on another model than the sweep")


def test_hostile_names_stay_text_in_both_reports(read):
    data = reported(read, profiles.hostile(profiles.HOSTILE))
    result = text(data)
    assert "\x1b" not in result and "\u202e" not in result and "\x00" not in result
    page = html_page.render(assembly.report(data).document)
    assert "<script>alert(1)" not in page and "<img src=x" not in page and "<svg onload" not in page


# The figure


def drawn(profile: ModelProfile) -> Figure:
    """Lay the figure out; any warning is an error."""
    figure = figure_of_layers.figure(profile, ABOUT)
    figure.draw_without_rendering()
    return figure


def names(axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def widths(axes) -> list[float]:
    return [bar.get_width() for bar in axes.containers[0]]


def test_figure_shows_both_rankings_and_gains_within_their_times():
    profile = profiles.gpt2()
    left, right = drawn(profile).axes
    assert names(left)[:2] == [row.label for row in blocks(profile)[:2]]
    assert names(right)[:2] == [row.label for row in by_self_time(profile)[:2]]
    for axes in (left, right):
        assert widths(axes) == sorted(widths(axes), reverse=True) and axes.yaxis_inverted()
    assert widths(left)[0] == pytest.approx(1e3 * blocks(profile)[0].seconds)
    left, _ = drawn(profiles.gpt2()).axes
    times, gains = left.containers[:2]
    ends = [bar.get_x() + bar.get_width() for bar in gains]
    assert ends == pytest.approx([bar.get_width() for bar in times])
    assert left.get_legend() is not None
    profile = replace(profile, layers=tuple(replace(layer, gain_at_limit_s=None) for layer in profile.layers))
    for axes in drawn(profile).axes:
        assert len(axes.containers) == 1 and axes.get_legend() is None


@pytest.mark.parametrize(
    "profile",
    [
        profiles.gpt2(),
        profiles.with_memory(profiles.gpt2()),
        profiles.many(1),
        profiles.many(1000),
        profiles.hostile(profiles.HOSTILE),
    ],
    ids=["gpt2", "gpu", "two layers", "a thousand", "hostile"],
)
def test_every_profile_is_drawn_with_as_many_rows_as_fit(profile):
    for axes in drawn(profile).axes:
        assert 1 <= len(axes.containers[0]) <= figure_of_layers.SHOWN


def test_picture_is_written_and_shown_only_with_a_profile(read):
    data = reported(read, profiles.gpt2())
    draw(data, "layers.png")
    assert drawings(data)["layers.png"] is None and (data.layout.plots / "layers.png").stat().st_size > 10_000
    data.layout.layer_summary.unlink()
    without = reported(read, None)
    draw(without, "layers.png")
    assert drawings(without)["layers.png"] == "not drawn: step 03 has not run"
    assert not (data.layout.plots / "layers.png").exists()
