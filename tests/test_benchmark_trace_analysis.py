"""How `benchmarks/trace_analysis.py` judges what it measured, and the trace that it makes by repeating one."""

import copy
import json
from dataclasses import replace

import pytest

from benchmarks import _repeated_trace, trace_analysis
from benchmarks.trace_analysis import Compared

LARGE = Compared(
    "20 x real",
    ours_s=[4.0, 5.0, 4.5],
    peer_s=[90.0],
    ours_bytes=[900, 1000, 950],
    peer_bytes=[2000],
    least_speedup=15.0,
    most_memory=0.5,
)
TRACE = {
    "schemaVersion": 1,
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 100, "args": {"name": "python"}},
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#7", "pid": 1, "tid": 1, "ts": 100, "dur": 40,
         "args": {"External id": 1}},
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#8", "pid": 1, "tid": 1, "ts": 140, "dur": 40},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 101, "dur": 9,
         "args": {"External id": 2, "Sequence number": 30}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 102, "dur": 3,
         "args": {"External id": 2, "correlation": 50}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 50, "pid": 1, "tid": 1, "ts": 102},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 50, "pid": 0, "tid": 7, "ts": 150, "bp": "e"},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 150, "dur": 60,
         "args": {"External id": 2, "correlation": 50, "stream": 7}},
        {"ph": "X", "cat": "kernel", "name": "lost", "pid": 0, "tid": 7, "ts": 149, "dur": 1,
         "args": {"correlation": 0, "stream": 7}},
    ],
}  # fmt: skip


def test_medians_pass_where_they_are_fast_small_and_linear():
    assert (LARGE.speedup, LARGE.memory) == (20.0, 0.475)
    assert trace_analysis.failures([LARGE], 1.2) == []
    assert trace_analysis.unjudged([LARGE], 1.2) == []
    compared = replace(LARGE, ours_s=[1.0, 50.0, 1.2], peer_s=[24.0, 23.0, 500.0])
    assert compared.speedup == 20.0


@pytest.mark.parametrize(
    ("changes", "limit", "said"),
    [
        ({"ours_s": [10.0], "peer_s": [149.0]}, "least_speedup", "ours is 14.90 times as fast, 15 are wanted"),
        ({"ours_bytes": [51], "peer_bytes": [100]}, "most_memory", "ours holds 0.51 of the peer's memory, 0.5 at most"),
    ],
)
def test_speed_and_memory_are_held_against_the_limits_of_their_trace(changes, limit, said):
    compared = replace(LARGE, **changes)
    assert trace_analysis.failures([compared], 1.0) == [f"20 x real: {said}"]
    assert trace_analysis.failures([replace(compared, **{limit: None})], 1.0) == []
    exact = replace(LARGE, ours_s=[10.0], peer_s=[150.0], ours_bytes=[50], peer_bytes=[100])
    assert trace_analysis.failures([exact], 1.0) == []


def test_growth_is_that_of_the_time_per_event_and_a_quadratic_one_fails():
    seconds = {2_000_000: [5.2, 5.0, 5.1], 100_000: [0.2, 0.2, 9.0], 1_000_000: [99.0]}
    assert trace_analysis.growth(seconds) == pytest.approx(1.275)
    sizes = {"quadratic": (1.0, 400.0), "sort": (17.0, 21.0 * 20)}
    grown = {name: trace_analysis.growth({100: [least], 2000: [most]}) for name, (least, most) in sizes.items()}
    assert trace_analysis.failures([], grown["sort"]) == []
    assert trace_analysis.failures([], grown["quadratic"]) == [
        "ours takes 20.00 times as long per event at the largest size, 1.3 at most"
    ]
    assert trace_analysis.growth({100: [1.0]}) is None
    assert trace_analysis.growth({}) is None


def test_a_missing_attempt_of_ours_fails_and_the_others_are_still_compared():
    compared = replace(LARGE, ours_s=[None, 5.0], ours_bytes=[None, 900])
    assert compared.speedup == 18.0
    assert trace_analysis.failures([compared], 1.0) == ["20 x real: ours gave no value in 1 of 2 attempts"]
    compared = replace(LARGE, ours_s=[None], ours_bytes=[None])
    grown = trace_analysis.growth({100: [None], 2000: [5.0]})
    assert grown is None
    assert len(trace_analysis.unjudged([compared], grown)) == 3
    assert len(trace_analysis.failures([compared], grown)) == 1


@pytest.mark.parametrize("peer", [[], [None]])
def test_without_a_value_of_the_peer_nothing_fails_and_what_was_not_judged_is_named(peer):
    compared = replace(LARGE, peer_s=peer, peer_bytes=peer)
    assert trace_analysis.failures([compared], None) == []
    assert trace_analysis.unjudged([compared], None) == [
        "the speed on 20 x real",
        "the memory on 20 x real",
        "the time per event as traces grow",
    ]


def test_limits_and_times_are_those_of_their_trace():
    attempt = trace_analysis.Attempt(1.0, 0.5, 100, "", whole_s=1.75)
    result = {(name, trace_analysis.OURS): [attempt] for name in ("a100-nccl", "1 x a100-rank0", "20 x a100-rank0")}
    compared = {item.trace: item for item in trace_analysis.compared(result)}
    limits = {name: (item.least_speedup, item.most_memory) for name, item in compared.items()}
    assert limits == {"a100-nccl": (None, None), "1 x a100-rank0": (8.0, 0.3), "20 x a100-rank0": (17.0, 0.3)}
    assert {tuple(value.ours_s) for value in compared.values()} == {(1.75,)}
    assert attempt.stages_s == 1.5
    assert trace_analysis.Attempt(None, None, None, "killed").stages_s is None


def repeated(tmp_path, *copies):
    paths = {copy: tmp_path / f"{copy}.json" for copy in copies}
    _repeated_trace.write(copy.deepcopy(TRACE), paths)
    return [json.loads(paths[copy].read_text()) for copy in copies]


def test_copies_follow_each_other_in_time_each_with_its_own_launches(tmp_path):
    once, thrice = repeated(tmp_path, 1, 3)
    assert once == TRACE
    assert thrice["traceEvents"][: len(TRACE["traceEvents"])] == TRACE["traceEvents"]
    assert [event["name"] for event in thrice["traceEvents"]].count("lost") == 1  # what no call launched
    assert len(thrice["traceEvents"]) == 3 * len(TRACE["traceEvents"]) - 2
    (events,) = (trace["traceEvents"] for trace in repeated(tmp_path, 2))
    events = [event for event in events if event["name"] != "lost"]
    first, second = events[: len(events) // 2], events[len(events) // 2 :]
    assert max(event["ts"] + event.get("dur", 0) for event in first) < min(event["ts"] for event in second)
    assert {later["ts"] - event["ts"] for event, later in zip(first, second, strict=True)} == {111}
    assert [event.get("dur") for event in first] == [event.get("dur") for event in second]
    steps = [event["name"] for event in events if event["name"].startswith("ProfilerStep")]
    assert steps == [f"ProfilerStep#{step}" for step in (7, 8, 9, 10)]


def test_a_launch_finds_the_kernel_of_its_own_copy_and_no_other(tmp_path):
    (events,) = (trace["traceEvents"] for trace in repeated(tmp_path, 4))
    ids = {
        cat: [event["args"]["correlation"] for event in events if event.get("cat") == cat and event["name"] != "lost"]
        for cat in ("cuda_runtime", "kernel")
    }
    assert ids["cuda_runtime"] == ids["kernel"]
    assert len(set(ids["kernel"])) == 4
    assert [event["id"] for event in events if event["ph"] == "f"] == ids["kernel"]


@pytest.mark.parametrize(("name", "distinct"), [("External id", 8), ("Sequence number", 4), ("correlation", 5)])
def test_no_identifier_of_two_copies_is_the_same_but_the_one_that_means_none(tmp_path, name, distinct):
    (events,) = (trace["traceEvents"] for trace in repeated(tmp_path, 4))
    assert len({event["args"][name] for event in events if name in event.get("args", {})}) == distinct
