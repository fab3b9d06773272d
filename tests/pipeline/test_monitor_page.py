"""The page of the monitor, run by Streamlit's own test client: each tab on runs of every kind."""

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.monitor_runs import HOSTILE, USUAL, Loop, write_run

testing = pytest.importorskip("streamlit.testing.v1", reason="Streamlit is not installed")
TABS = ("Overview", "Timing", "Memory", "Artifacts")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "plain", 120)
    write_run(root / HOSTILE.replace("/", "|"), 60, USUAL | {HOSTILE: 2.0})
    for rank in (0, 1):
        write_run(root / "two ranks", 60, rank=rank, world_size=2)
    Loop(root / "killed").steps(25).timer.flush()
    Loop(root / "no steps").timer.flush()
    failed = Loop(root / "failed").steps(3)
    failed.timer.stop(RuntimeError(HOSTILE))
    broken = root / "broken"
    broken.mkdir()
    (broken / "stage_times.json").write_bytes((root / "plain" / "stage_times.json").read_bytes()[:5000])
    shutil.copytree(root / "plain", root / "bad documents")
    for name in ("config.json", "manifest.json", "profiler_summary.json", "op_stats.csv"):
        (root / "bad documents" / name).write_bytes(b'{"a": \xff[[')
    return root


def page(root: str) -> None:
    from pathlib import Path

    from utils.training.monitor import app

    app.main(Path(root), 30.0)


def opened(root: Path, run: str | None = None, tab: str = "Overview"):
    shown = testing.AppTest.from_function(page, args=(str(root),), default_timeout=60)
    shown.session_state["tab"] = tab
    if run is not None:
        shown.session_state["run"] = run
    shown.run()
    assert not shown.exception
    return shown


def words(shown) -> str:
    kinds = ("text", "caption", "code", "subheader", "info", "warning", "error")
    result = [str(element.value) for kind in kinds for element in getattr(shown, kind)]
    return "\n".join([*result, *(f"{metric.label}: {metric.value}" for metric in shown.metric)])


@pytest.mark.parametrize("tab", TABS)
def test_every_tab_shows_every_kind_of_run(runs, tab):
    shown = opened(runs, "plain", tab)
    for name in shown.selectbox(key="run").options:
        shown.selectbox(key="run").select(name).run()
        assert not shown.exception, name
        assert "cannot be shown" not in words(shown), (name, words(shown))
        assert "Traceback" not in words(shown)


def test_overview_gives_state_speed_verdict_and_rules_or_explains_why_not(runs, tmp_path):
    said = words(opened(runs, "plain"))
    for text in (
        "Last step: 119",
        "Step, median: 10.4 ms",
        "Processes: 1 of 1",
        "What:",
        "Next:",
        "Throttling (not wa",
    ):
        assert text in said, text
    for root, run, text in (
        (runs, "failed", "RuntimeError: <script>alert(1)</script>"),
        (runs, "broken", "stage_times.json: Input data was truncated"),
        (tmp_path, None, "no run in this folder yet"),
    ):
        assert text in words(opened(root, run)), text


def test_timing_lists_the_stages_of_the_process_that_is_chosen_and_memory_what_the_run_records(runs):
    tables = [run.value for run in opened(runs, "plain", "Timing").dataframe]
    stages = next(table for table in tables if "stage" in table)
    assert stages["stage"].tolist()[:2] == ["backward", "forward"]
    assert stages["share (%)"].tolist()[:2] == pytest.approx([50.0, 30.0])
    operators = next(table for table in tables if "cpu_self_ms" in table)
    assert operators["name"].tolist() == ["aten::mm"] and operators["cpu_self_ms"].tolist() == [1.5]
    shown = opened(runs, "two ranks", "Timing")
    shown.selectbox(key="rank-timing").select(1).run()
    assert not shown.exception and shown.selectbox(key="rank-timing").options == ["rank 0", "rank 1"]
    table = opened(runs, "plain", "Memory").dataframe[-1].value
    assert table["metric"].tolist() == ["process_memory_bytes"] and table["largest"].tolist() == ["1.0 GiB"]
    assert "profiler.metrics({" in words(opened(runs, "killed", "Memory"))


def test_artifacts_list_the_files_and_what_is_missing(runs):
    shown = opened(runs, "plain", "Artifacts")
    assert "stage_times.json" in shown.dataframe[1].value["file"].tolist()
    assert "manifest.json: trace: not asked for\nmanifest.json: device times: a CPU keeps none" in words(shown)
    assert shown.get("download_button")[0].label == "Download"
    shown.selectbox(key="file").select("metrics.json").run()
    assert '"loss": [' in words(shown)


def test_a_run_that_appears_while_the_page_is_open_leaves_the_choice(runs, tmp_path):
    write_run(tmp_path / "first", 30)
    write_run(tmp_path / "second", 30)
    shown = opened(tmp_path, "first")
    write_run(tmp_path / "third", 30)
    shown.run()
    assert shown.selectbox(key="run").options[0] == "third" and shown.selectbox(key="run").value == "first"


@pytest.mark.parametrize("hours", [-2, 2], ids=["behind", "ahead"])
def test_a_run_of_another_machine_is_judged_by_what_it_has_written_not_by_its_clock(tmp_path, monkeypatch, hours):
    now = time.time()
    with monkeypatch.context() as there:
        there.setattr("time.time", lambda: now + 3600 * hours)
        there.setattr("boundby.training.timer.host_id", lambda: "another")
        for name in ("live", "stuck"):
            Loop(tmp_path / name).steps(25).timer.flush()
            (tmp_path / name / "config.json").write_text('{"output": "/mnt/there/runs/live", "host": "another"}')
    for name, written in (("live", now), ("stuck", now - 3600)):
        for path in (tmp_path / name).iterdir():
            os.utime(path, (written, written))
    monkeypatch.setattr("utils.training.monitor.app.time", SimpleNamespace(time=lambda: now))
    for name, is_stalled in (("live", False), ("stuck", True)):
        shown = opened(tmp_path, name)
        assert ("Stalled run" in [error.value for error in shown.error]) is is_stalled
        assert "What:" in words(shown) and "/mnt/there" not in words(shown)


def test_a_tab_that_fails_says_so_in_one_line(runs, monkeypatch):
    from utils.training.monitor import app

    def fail(shown):
        raise RuntimeError("out of order")

    monkeypatch.setitem(app.TABS, "Overview", fail)
    said = words(opened(runs, "plain"))
    assert "This part of the run cannot be shown." in said and "Overview: RuntimeError: out of order" in said
