"""Several processes of one run: each has its files, and one summary holds all that are there."""

import json
from pathlib import Path

import pytest

from boundby import files
from boundby.bound.verdict import Verdict
from boundby.training import StageTimer, TimerOptions, ranks_in
from boundby.training.results import SUMMARY, RunFiles
from boundby.training.summary import (
    job_summary,
    merge_at_stop,
    read_trace_verdict,
    run_summary,
    trace_verdict_of,
    write_job_summary,
)
from tests.fakes import FakeNanoseconds

TRACE = Verdict("launch", (), 0.5, "medium", "untested", (), ())


def leave(folder, rank, world_size=2, *, data_s=1.0, backward_s=1.0, is_killed=False, error=None):
    clock = FakeNanoseconds()
    options = TimerOptions(rank=rank, world_size=world_size, in_background=False)
    timer = StageTimer(folder, options=options, clock=clock)
    timer.start()
    with timer.span("epoch"):
        for _ in range(20):
            for name, seconds in {"data": data_s, "forward": 2.0, "backward": backward_s}.items():
                with timer.stage(name):
                    clock.advance(seconds)
            timer.step()
    timer.flush()
    if is_killed:
        left = {path: path.read_bytes() for path in folder.glob(f"rank{rank}_*")}
        timer.stop()
        for path, content in left.items():
            path.write_bytes(content)
        return
    timer.stop(error)
    document = run_summary(timer.snapshot(), None, TRACE if rank else None)
    files.write_json(RunFiles(folder, rank, world_size).path(SUMMARY), document)


def summary_in(folder: Path) -> dict:
    return json.loads((folder / SUMMARY).read_text())


def merged_summary(folder: Path) -> dict:
    return json.loads(files.encode_json(job_summary(folder)))


def straggler_of(folder: Path) -> dict | None:
    return merged_summary(folder)["verdict"]["straggler"]


def test_stages_are_compared_over_the_processes(tmp_path):
    for rank, (data, backward) in enumerate([(1, 6), (1, 6), (6, 1), (2, 5)]):
        leave(tmp_path, rank, 4, data_s=data, backward_s=backward)
    merged = merged_summary(tmp_path)
    assert (merged["world_size"], merged["missing_ranks"], merged["unreadable_ranks"]) == (4, [], {})
    by_name = {stage["name"]: stage for stage in merged["stages"]}
    assert list(by_name) == ["step", "data", "forward", "backward"]  # an epoch holds steps, and is no part of one
    data = by_name["data"]
    assert data["per_step_s"] == {"0": 1, "1": 1, "2": 6, "3": 2}
    assert (data["median_s"], data["slowest_rank"], data["slowest_over_median"]) == (1.5, 2, 4)
    assert by_name["backward"]["slowest_rank"] == 0 and by_name["step"]["median_s"] == 9
    straggler = straggler_of(tmp_path)
    assert (straggler["rank"], straggler["stage"], straggler["slower_by"]) == (2, "data", pytest.approx(9 / 4))


def test_the_merged_summary_has_the_names_of_a_single_one_and_every_process(tmp_path):
    leave(tmp_path, 0, data_s=6.0)
    leave(tmp_path, 1, backward_s=6.0)
    write_job_summary(tmp_path)
    document = summary_in(tmp_path)
    single = json.loads((tmp_path / f"rank0_{SUMMARY}").read_text())
    alone = {"rank", "step_s", "in_no_stage_share", "metrics"}
    assert set(single) - set(document) == alone
    assert (document["status"], document["first_step"], document["last_step"]) == ("finished", 0, 19)
    processes = [(rank["rank"], rank["status"], rank["step_s"]["n"]) for rank in document["ranks"]]
    assert processes == [(0, "finished", 20), (1, "finished", 20)]
    assert document["verdict"]["straggler"]["rank"] == 0
    assert document["verdict"]["text"][0].startswith("What:  input")
    data = next(stage for stage in document["stages"] if stage["name"] == "data")
    assert data["per_step_s"] == {"0": 6.0, "1": 1.0}


def test_the_verdict_on_the_trace_of_any_process_counts(tmp_path):
    for rank in range(2):
        leave(tmp_path, rank)
    merged = merged_summary(tmp_path)
    assert trace_verdict_of(merged) == TRACE and merged["verdict"]["bound"] == "launch"
    (tmp_path / f"rank1_{SUMMARY}").write_text('{"trace_verdict": {"bound": "magic"}}')
    assert merged_summary(tmp_path)["trace_verdict"] is None


@pytest.mark.parametrize(
    "summary", [None, [], {}, {"trace_verdict": None}, {"trace_verdict": 3}, {"trace_verdict": {"bound": "magic"}}]
)
def test_a_summary_without_a_verdict_on_a_trace_gives_none(summary, tmp_path):
    files.write_json(tmp_path / SUMMARY, {"trace_verdict": TRACE.as_dict()})
    assert read_trace_verdict(RunFiles(tmp_path, 0, 1)) == TRACE
    assert trace_verdict_of(summary) is None
    (tmp_path / SUMMARY).write_text("{")
    assert read_trace_verdict(RunFiles(tmp_path, 0, 1)) is None
    assert read_trace_verdict(RunFiles(tmp_path / "absent", 0, 1)) is None


def test_a_killed_process_and_missing_ones_are_named(tmp_path):
    leave(tmp_path, 1, 4, is_killed=True)
    leave(tmp_path, 2, 4, error=RuntimeError("out of memory"))
    document = merged_summary(tmp_path)
    assert [(rank["rank"], rank["status"]) for rank in document["ranks"]] == [(1, "running"), (2, "failed")]
    assert (document["status"], document["error"]) == ("failed", "RuntimeError: out of memory")
    assert document["missing_ranks"] == [0, 3]
    assert "ranks: nothing is known of 0, 3 of 4" in document["verdict"]["doubts"]
    assert document["verdict"]["steps"] == 20


def test_what_cannot_be_read_is_named_with_its_reason(tmp_path):
    leave(tmp_path, 0)
    (tmp_path / "rank1_stage_times.json").write_text("{")
    document = merged_summary(tmp_path)
    assert list(document["unreadable_ranks"]) == ["1"]
    assert "rank1_stage_times.json" in document["unreadable_ranks"]["1"]
    (tmp_path / "rank0_stage_times.json").write_text("{")
    (tmp_path / "rank0_stage_log.jsonl").unlink()
    nothing = merged_summary(tmp_path)
    assert (nothing["verdict"], nothing["status"], nothing["ranks"]) == (None, None, [])


def test_a_folder_of_one_process_has_nothing_to_merge(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run of several processes"):
        merged_summary(tmp_path)
    leave(tmp_path, 0, 1)
    with pytest.raises(FileNotFoundError, match="no run of several processes"):
        write_job_summary(tmp_path)
    merge_at_stop(RunFiles(tmp_path, 0, 1))
    assert "ranks" not in summary_in(tmp_path)


def test_processes_of_an_earlier_run_are_not_merged_and_what_cannot_be_read_counts_with_the_newest(tmp_path):
    for rank in range(4):
        leave(tmp_path, rank, 4, data_s=6.0 if rank == 3 else 1.0)
    assert ranks_in(tmp_path) == (0, 1, 2, 3) and straggler_of(tmp_path)["rank"] == 3
    for rank in range(2):
        leave(tmp_path, rank, 2)
    merged = merged_summary(tmp_path)
    assert ranks_in(tmp_path) == (0, 1)
    assert (merged["world_size"], merged["missing_ranks"], straggler_of(tmp_path)) == (2, [], None)
    assert {rank for stage in merged["stages"] for rank in stage["per_step_s"]} == {"0", "1"}
    for rank in (1, 2):
        (tmp_path / f"rank{rank}_stage_times.json").write_text("{")
    assert ranks_in(tmp_path) == (0, 1)
    for rank, world_size, expected in ((1, 2, (1,)), (0, 1, (None,)), (1, 2, (1,)), (0, 2, (0, 1))):
        leave(tmp_path / "sizes", rank, world_size)
        assert ranks_in(tmp_path / "sizes") == expected


@pytest.mark.parametrize(
    ("began", "ended", "launchers", "expected"),
    [
        (1000.0, 1010.0, (7, 7), (0,)),
        (1000.0, 2030.0, (7, 8), (0, 1)),
        (1950.0, 1960.0, (7, 7), (0, 1)),
        (1950.0, 1960.0, (7, 8), (0,)),
    ],
    ids=["long before", "long before, and at work since", "a little before", "a rerun a little later"],
)
def test_a_process_of_an_earlier_run_of_the_same_size_is_told_by_time_and_by_who_launched_it(
    tmp_path, monkeypatch, began, ended, launchers, expected
):
    for rank, times in ((1, [began, ended]), (0, [2000.0, 2040.0])):
        monkeypatch.setattr("os.getppid", lambda rank=rank: launchers[1 - rank])
        monkeypatch.setattr("time.time", lambda times=times: times.pop(0) if len(times) > 1 else times[0])
        leave(tmp_path, rank)
    assert ranks_in(tmp_path) == expected
    assert merged_summary(tmp_path)["missing_ranks"] == ([] if len(expected) == 2 else [1])


def test_the_merged_summary_tells_what_each_process_gave_up_and_could_not_give(tmp_path):
    for rank in range(3):
        leave(tmp_path, rank, 3, is_killed=rank == 2)
    for rank, seconds in ((0, 0.0), (1, 2.5)):
        path = tmp_path / f"rank{rank}_{SUMMARY}"
        document = json.loads(path.read_text())
        document["given_up"] = [{"what": "trace", "reason": f"broken on {rank}"}]
        document["unavailable"] = [{"what": "device events", "reason": "no device"}]
        files.write_json(path, document | {"profiler_s": seconds})
    write_job_summary(tmp_path)
    document = summary_in(tmp_path)
    given_up = {rank: [remark["reason"] for remark in remarks] for rank, remarks in document["given_up"].items()}
    assert given_up == {"0": ["broken on 0"], "1": ["broken on 1"]}
    assert {rank: remark["what"] for rank, [remark] in document["unavailable"].items()} == {
        rank: "device events" for rank in "01"
    }
    assert document["profiler_s"] == 2.5
    assert [rank["profiler_s"] for rank in document["ranks"]] == [0.0, 2.5, None]


@pytest.mark.parametrize("summary", ["", "[]", '{"given_up": 3}', '{"given_up": ["text"]}'])
def test_of_a_process_without_a_sound_summary_the_stage_times_tell_what_it_gave_up(tmp_path, summary):
    timer = StageTimer(tmp_path, options=TimerOptions(rank=1, world_size=2, in_background=False))
    timer.start()
    timer.remarks.add("readings", "the driver is gone")
    timer.stop()
    (tmp_path / f"rank1_{SUMMARY}").write_text(summary)
    write_job_summary(tmp_path)
    assert [remark["what"] for remark in summary_in(tmp_path)["given_up"]["1"]] == ["readings"]
    assert summary_in(tmp_path)["profiler_s"] is None


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_whoever_stops_last_completes_the_summary(tmp_path, order):
    written = []
    for rank in order:
        leave(tmp_path, rank, 3)
        merge_at_stop(RunFiles(tmp_path, rank, 3))
        written.append((tmp_path / SUMMARY).is_file() and [rank["rank"] for rank in summary_in(tmp_path)["ranks"]])
    assert written[-1] == [0, 1, 2]
    assert written[order.index(0)] == sorted(order[: order.index(0) + 1])  # the first process needs no other
    assert not any(written[: order.index(0)])


def test_a_process_that_stops_while_another_writes_is_not_lost(tmp_path, monkeypatch):
    leave(tmp_path, 0)
    write_json, stops = files.write_json, [lambda: leave(tmp_path, 1)]

    def write_late(path, document):
        if path.name == SUMMARY and stops:
            stops.pop()()
        write_json(path, document)

    monkeypatch.setattr(files, "write_json", write_late)
    write_job_summary(tmp_path)
    assert [rank["rank"] for rank in summary_in(tmp_path)["ranks"]] == [0, 1]
