"""One axis for the moments of all threads, and that the cost of an analysis does not depend on how many there are."""

import sys

import numpy as np
import pytest

from boundby.trace import analyze, read_trace
from boundby.trace.intervals import Lanes
from tests.trace_truth.large import launching_threads
from tests.traces import analysis_of, call, event, work

# When something happens last, in µs. Years later, eight threads one behind another are more than an int64 holds, and
# without another way out those of the ninth would lie among those of the first.
NEAR, FAR = 20, 2**61 // 1000 - 3
MOMENTS = np.array([5, 3, 9, 3])


@pytest.mark.parametrize("scale", [1, 2**58])
def test_places_are_in_the_order_of_threads_and_then_of_moments(scale):
    threads = [-1, 0, 1, 2**20 - 1]
    moments = np.array([-1, 0, 3, 4, 5, 8, 9, 10]) * scale
    lanes = Lanes(2**20, MOMENTS * scale)
    places = [lanes.place(thread, moments) for thread in threads]
    assert all((np.diff(each) >= 0).all() for each in places)
    assert all(before.max() < after.min() for before, after in zip(places, places[1:], strict=False))
    for each in places[1:]:
        known = lanes.moments(each[[2, 4, 6]])
        assert known.tolist() == [3 * scale, 5 * scale, 9 * scale]
        assert each[2] <= each[3] < each[4] <= each[5] < each[6] == each[7]


OTHERS = [event("other", 1, 1, tid=100 + k) for k in range(20)]


@pytest.mark.parametrize("last", [NEAR, FAR])
def test_threads_are_told_apart_however_far_apart_their_events_are(tmp_path, last):
    events = [event("outer", 0, 10, tid=1), event("inner", 2, 3, tid=1), event("alone", 1, 10, tid=2)]
    events += [event("last", last, 4.5, tid=3)]
    stats = {each.name: (each.calls, each.cpu_self_ns) for each in analysis_of(tmp_path, *events, *OTHERS).operators}
    expected = {"outer": (1, 7000), "inner": (1, 3000), "alone": (1, 10_000), "last": (1, 4500)}
    assert stats == expected | {"other": (20, 20_000)}


@pytest.mark.parametrize("last", [NEAR, FAR])
def test_one_thread_whose_events_overlap_leaves_the_others_as_they_are(tmp_path, last):
    events = [event("outer", 0, 10, tid=1), event("inner", 2, 3, tid=1)]
    events += [event("early", 1, 5, tid=2), event("late", 4, 6, tid=2), event("last", last, 4.5, tid=3)]
    stats = {each.name: each.cpu_self_ns for each in analysis_of(tmp_path, *events, *OTHERS).operators}
    assert stats == {"outer": 7000, "inner": 3000, "early": 3000, "late": 6000, "last": 4500, "other": 20_000}


@pytest.mark.parametrize("last", [NEAR, FAR])
def test_what_a_launching_thread_does_not_tell_the_main_one_does(tmp_path, last):
    events = [work(0, 1, 70), call(0, 0.5, 70, tid=2), work(100, 1, 71), call(99, 0.5, 71, tid=2)]
    events += [event("enumerate(DataLoader)#_SingleProcess.__next__", 10, 40, tid=1), event("aten::mm", 30, 60, tid=2)]
    events += [event("aten::add", last + 100 - 0.5 * k, 0.1, tid=1) for k in range(9)]
    (device,) = analysis_of(tmp_path, *events, *OTHERS).devices
    assert (99_000, "launch") in [(each.duration_ns, each.cause) for each in device.longest_gaps]
    assert device.causes_ns["input"] == 20_000


def test_as_many_calls_are_made_for_a_thousand_launching_threads_as_for_ten(tmp_path):
    counts = {}
    for threads in (10, 1000):
        trace = read_trace(launching_threads(tmp_path, threads, 2000))
        counts[threads] = calls_of(lambda trace=trace: analyze(trace))
    assert counts[1000] < 1.2 * counts[10]


def calls_of(action: object) -> int:
    count = 0

    def note(_: object, happening: str, __: object) -> None:
        nonlocal count
        count += happening in ("call", "c_call")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count
