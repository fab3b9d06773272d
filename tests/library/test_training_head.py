"""The head of a document of stage times: the summary of a run without reading its rows."""

from pathlib import Path

from boundby.training import read_stage_times, reader
from tests.monitor_runs import HOSTILE, USUAL, write_run

NAME = 'x,"occurrences":{"y' + HOSTILE


def test_the_summary_without_rows_is_that_of_the_whole_document(tmp_path: Path) -> None:
    write_run(tmp_path, 50, USUAL | {NAME: 1.0})
    whole, head = read_stage_times(tmp_path), read_stage_times(tmp_path, with_rows=False)
    assert (head.stages, head.metrics, head.names, head.last_step) == (
        whole.stages,
        whole.metrics,
        whole.names,
        whole.last_step,
    )
    assert any(each.name == NAME for each in head.stages) and len(head.occurrences) == len(head.metric_rows) == 0


def test_rows_are_not_read_for_a_summary(tmp_path: Path) -> None:
    write_run(tmp_path, 50)
    document = tmp_path / "stage_times.json"
    content = document.read_bytes()
    document.write_bytes(content[: content.index(reader.ROWS) + len(reader.ROWS)])
    assert read_stage_times(tmp_path, with_rows=False).last_step == 49


def test_a_document_whose_rows_come_late_is_read_as_a_whole(tmp_path: Path, monkeypatch) -> None:
    write_run(tmp_path, 50)
    monkeypatch.setattr(reader, "HEAD_BYTES", 100)
    assert read_stage_times(tmp_path, with_rows=False).last_step == 49
