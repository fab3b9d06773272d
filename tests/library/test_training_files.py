"""Stage times on disk: of runs that ended, run still, were killed, or lost their disk."""

import errno
import json
import multiprocessing
import os
import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from boundby import files
from boundby.training import StageTimer, StageTimes, TimerOptions, ranks_in, read_stage_times, reader
from boundby.training.records import bytes_of, times_from
from boundby.training.store import DOCUMENT, LOG, Pace
from tests.fakes import FakeClock, FakeNanoseconds
from tests.monitor_runs import HOSTILE, USUAL, write_run

S = 1_000_000_000
NAME = 'x,"occurrences":{"y' + HOSTILE  # of a stage


def timer_in(folder: Path, *, start: bool = True, said: list[str] | None = None, **options) -> StageTimer:
    say = None if said is None else said.append
    timer = StageTimer(folder, clock=FakeNanoseconds(), say=say, options=TimerOptions(in_background=False, **options))
    if start:
        timer.start()
    return timer


def steps(timer: StageTimer, number: int) -> None:
    for _ in range(number):
        with timer.stage("forward"):
            timer.clock.advance(1)
        timer.metrics({"loss": 0.5})
        timer.step()


def forwards(folder, rank=None):
    return read_stage_times(folder, rank).stage("forward").host_s.n


@pytest.fixture(autouse=True)
def disk_clock(monkeypatch):
    """The clock by which the document is due: while it stands still only the log is written."""
    clock = FakeClock()
    monkeypatch.setattr("boundby.training.store.monotonic", clock)
    return clock


def totals(times: StageTimes) -> tuple:
    return times.status, times.last_step, times.num_occurrences, len(times.occurrences), times.stages, times.metrics


def test_a_finished_run_reads_back_as_it_was_from_strict_json_without_stand_ins(tmp_path):
    with timer_in(tmp_path) as timer:
        timer.metrics({"loss": float("nan")})
        with timer.span("epoch"), timer.stage("update"):
            steps(timer, 40)
    times, written = read_stage_times(tmp_path), timer.snapshot()
    assert totals(times) == totals(written) == totals(times_from(bytes_of(written)))
    assert (times.status, times.pid, times.remarks) == ("finished", os.getpid(), written.remarks)
    assert (times.occurrences == written.occurrences).all()
    assert np.array_equal(times.metric_rows["value"], written.metric_rows["value"], equal_nan=True)
    document = json.loads((tmp_path / DOCUMENT).read_text(), parse_constant=lambda text: pytest.fail(text))
    assert document["metrics"]["value"][:2] == [None, 0.5]
    assert document["occurrences"]["device_ns"] is None


def test_a_run_that_goes_on_is_read_to_its_last_flush_from_the_log_where_the_document_ends(tmp_path, disk_clock):
    timer = timer_in(tmp_path)
    steps(timer, 35)
    timer.disturb()
    steps(timer, 1)
    with timer.stage("new"):
        timer.clock.advance(4)
        disk_clock.advance(10)
        timer.flush()
        assert [(stage.name, stage.since_s) for stage in read_stage_times(tmp_path).open] == [("new", 4)]
        steps(timer, 10)
    timer.flush()
    times = read_stage_times(tmp_path)
    assert json.loads((tmp_path / DOCUMENT).read_text())["num_occurrences"] < times.num_occurrences
    assert totals(times) == totals(timer.snapshot())
    assert (times.stage("forward").host_s.p90, times.elapsed_s) == (1, 50)
    timer.stop()


@pytest.mark.parametrize("content", [None, "", '{"schema_version": 2, "status"', "[]", '{"schema_version": 99}'])
def test_the_log_alone_tells_the_run(tmp_path, content):
    timer = timer_in(tmp_path)
    steps(timer, 10)
    timer.flush()
    timer.stop()
    if content is None:
        (tmp_path / DOCUMENT).unlink()
    else:
        (tmp_path / DOCUMENT).write_text(content)
    times = read_stage_times(tmp_path)
    assert times.stages == timer.snapshot().stages
    assert (times.status, times.last_step) == ("running", 9)
    assert times.remarks[0].what == DOCUMENT


def test_every_half_of_a_log_can_be_read(tmp_path):
    timer = timer_in(tmp_path)
    for _ in range(4):
        steps(timer, 2)
        timer.flush()
    whole = (tmp_path / LOG).read_bytes()
    ends = [offset for offset, byte in enumerate(whole) if byte == ord("\n")]
    assert len(ends) == 5
    for size in range(0, len(whole), 97):
        (tmp_path / LOG).write_bytes(whole[:size])
        complete = sum(end < size for end in ends)
        forward = read_stage_times(tmp_path).stage("forward")
        assert (forward.host_s.n if forward else 0) == max(0, 2 * (complete - 1))
    timer.stop()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("occurrences", value) for value in ("AAAA", "nonsense!", 7)),
        *(("names", value) for value in ([["forward", "no kind"]], None)),
        *(("first_name", "x"), ("num_occurrences", None), ("every", None)),
    ],
)
def test_a_damaged_line_spoils_itself_alone(tmp_path, key, value):
    timer = timer_in(tmp_path)
    steps(timer, 3)
    timer.flush()
    steps(timer, 2)
    timer.flush()
    killed = shutil.copytree(tmp_path, tmp_path / "killed")
    timer.stop()
    lines = (killed / LOG).read_text().splitlines()
    lines[2] = json.dumps({**json.loads(lines[2]), key: value})
    (killed / LOG).write_text("\n".join([*lines, "[]", "3", '"x"', ""]))
    assert forwards(killed) == 3


def test_a_changed_document_is_read_or_refused(tmp_path):
    with timer_in(tmp_path) as timer:
        steps(timer, 3)
    document = json.loads(bytes_of(timer.snapshot()))
    draw = random.Random(3)
    values = [None, -1, 2**70, "x", [], {}, [[]], [None], 1.5, True]

    def entries(node):
        keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        return [(node, key) for key in keys] + [entry for key in keys for entry in entries(node[key])]

    for _ in range(400):
        copy = json.loads(json.dumps(document))
        node, key = draw.choice(entries(copy))
        node[key] = draw.choice(values)
        (tmp_path / DOCUMENT).write_text(json.dumps(copy))
        try:
            read_stage_times(tmp_path)
        except ValueError:
            pytest.fail("the log was there")


def test_a_folder_without_a_run_is_told_apart(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither stage_times.json nor stage_log.jsonl"):
        read_stage_times(tmp_path)
    (tmp_path / LOG).write_text("\n")
    with pytest.raises(ValueError, match="holds no run either"):
        read_stage_times(tmp_path)
    assert ranks_in(tmp_path) == (None,)


def test_the_summary_without_rows_is_that_of_the_whole_document_and_needs_none_unless_they_come_late(
    tmp_path, monkeypatch
):
    write_run(tmp_path, 50, USUAL | {NAME: 1.0})
    document, whole = tmp_path / DOCUMENT, read_stage_times(tmp_path)
    content = document.read_bytes()
    for most, kept in ((reader.HEAD_BYTES, content.index(reader.ROWS) + len(reader.ROWS)), (100, len(content))):
        document.write_bytes(content[:kept])
        monkeypatch.setattr(reader, "HEAD_BYTES", most)
        head = read_stage_times(tmp_path, with_rows=False)
        for field in ("stages", "metrics", "names", "last_step", "num_occurrences"):
            assert getattr(head, field) == getattr(whole, field), field
        assert any(stage.name == NAME for stage in head.stages) and len(head.occurrences) == len(head.metric_rows) == 0


def test_of_two_runs_in_one_folder_the_last_is_read(tmp_path, monkeypatch):
    for number, at in ((5, 100.0), (2, 200.0)):
        monkeypatch.setattr("time.time", lambda at=at: at)
        timer = timer_in(tmp_path)
        steps(timer, number)
        timer.stop()
    assert read_stage_times(tmp_path).last_step == 1
    (tmp_path / DOCUMENT).unlink()
    assert read_stage_times(tmp_path).last_step == 1
    assert len(files.read_json_lines(tmp_path / LOG)) == 4


def test_the_log_thins_out_by_its_rule_and_ends(tmp_path):
    said: list[str] = []
    pace = Pace(log_share=2000, log_shares=3)
    timer = timer_in(tmp_path, said=said, pace=pace)
    for number in range(200):
        with timer.span("epoch"):
            steps(timer, 3 if number == 0 else 4)
        timer.flush()
    assert (tmp_path / LOG).stat().st_size < 12000
    every = [line["every"] for line in files.read_json_lines(tmp_path / LOG) if line["kind"] == "rows"]
    assert sorted(set(every)) == [1, 2, 4]
    assert every == sorted(every)
    assert said == ["log of stage times: it has reached its largest size; the document goes on"]
    logged = read_stage_times(tmp_path)
    assert "every 4th step" in logged.remarks[-1].reason
    spans = logged.rows_of("epoch", "span")["step"]
    assert spans.tolist() == [3 + 4 * at for at in range(len(spans))]  # none of them left out
    timer.stop()
    assert forwards(tmp_path) == 799


@pytest.mark.parametrize("name", ["append_json_line", "write_bytes"])
def test_a_full_disk_is_said_once_and_forgotten_when_there_is_room(tmp_path, monkeypatch, disk_clock, name):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    said: list[str] = []
    timer = timer_in(tmp_path, said=said)
    with monkeypatch.context() as broken:
        broken.setattr(files, name, full)
        for _ in range(3):
            steps(timer, 2)
            disk_clock.advance(10)
            timer.flush()
    what = "log of stage times" if "append" in name else DOCUMENT
    assert said == [f"{what}: OSError: [Errno 28] No space left on device"]
    steps(timer, 1)
    timer.stop()
    assert forwards(tmp_path) == 7
    (tmp_path / DOCUMENT).unlink()
    assert forwards(tmp_path) == 7


def test_a_folder_that_is_removed_comes_back_readable_and_one_that_cannot_be_is_a_remark(tmp_path):
    timer = timer_in(tmp_path / "run")
    steps(timer, 3)
    timer.flush()
    shutil.rmtree(tmp_path / "run")
    steps(timer, 2)
    timer.flush()
    assert forwards(tmp_path / "run") == 2
    timer.stop()
    assert forwards(tmp_path / "run") == 5
    (tmp_path / "file").write_text("")
    said: list[str] = []
    with timer_in(tmp_path / "file" / "run", said=said) as timer:
        steps(timer, 2)
    assert timer.snapshot().stage("forward").host_s.n == 2
    assert [text.split(":")[0] for text in said] == ["log of stage times", DOCUMENT]


@pytest.mark.parametrize("error", [RuntimeError("diverged"), KeyboardInterrupt()])
def test_what_ended_the_loop_is_written(tmp_path, error):
    with pytest.raises(type(error)), timer_in(tmp_path) as timer:
        steps(timer, 2)
        raise error
    times = read_stage_times(tmp_path)
    assert (times.status, times.last_step) == ("failed", 1)
    assert times.error.startswith(type(error).__name__)


def test_it_writes_by_itself_from_a_thread_that_ends_with_it(tmp_path, monkeypatch):
    written = threading.Event()
    append = files.append_json_line

    def noted(path, line):
        append(path, line)
        if line.get("num_occurrences") == 6:  # three stages and three steps; a line before may hold some of them
            written.set()

    monkeypatch.setattr(files, "append_json_line", noted)
    timer = StageTimer(tmp_path, clock=FakeNanoseconds(), options=TimerOptions(pace=Pace(flush_s=0.001)))
    timer.start()
    steps(timer, 3)
    assert written.wait(60)
    assert forwards(tmp_path) == 3
    timer.stop()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("boundby")]


def test_a_document_that_takes_long_is_written_seldom(tmp_path, monkeypatch, disk_clock):
    written = []
    monkeypatch.setattr(files, "write_bytes", lambda path, content: (written.append(1), disk_clock.advance(3)))
    timer = timer_in(tmp_path)
    for seconds in (599, 1):
        disk_clock.advance(seconds)
        timer.flush()
    assert len(written) == 2  # the first, and one after 200 times the 3 s that it took
    timer.stop()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork")
def test_a_forked_worker_writes_nothing(tmp_path):
    timer = timer_in(tmp_path)
    steps(timer, 1)
    timer.flush()
    before = (tmp_path / LOG).read_bytes(), (tmp_path / DOCUMENT).read_bytes()

    def work():
        steps(timer, 5)
        timer.flush()
        timer.stop()

    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert ((tmp_path / LOG).read_bytes(), (tmp_path / DOCUMENT).read_bytes()) == before
    timer.stop()
