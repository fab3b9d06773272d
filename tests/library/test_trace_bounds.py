"""Traces of very many or very large things, and zip bombs: memory stays bounded; larger ones in tests/truth."""

import json

from boundby.trace import read_trace
from tests.trace_truth.attempts import survives
from tests.trace_truth.large import BOMBS, bomb, launching_threads, measured
from tests.traces import call, event, work


def test_tens_of_thousands_of_categories_names_threads_and_shapes_are_read(tmp_path):
    count = 40_000  # more than an int16 holds
    events = ",".join(
        f'{{"ph":"X","cat":"c{k}","name":"n{k}","pid":{k},"tid":"t{k}","ts":{k},"dur":1}}' for k in range(count)
    )
    trace, analysis = survives(tmp_path, f'{{"traceEvents":[{events}]}}'.encode())
    assert (len(trace.categories), len(trace.names), len(trace.threads)) == (count, count, count)


def test_times_of_many_decades_are_left_out_or_add_up(tmp_path):
    longest = 2.0**60 / 1000
    calls = [call(k, longest, 70 + k) for k in range(10)]
    works = [work(k, longest, 70 + k, stream=k) for k in range(10)]
    ops = [event("aten::mm", k, longest, tid=k) for k in range(10)]
    trace, analysis = survives(tmp_path, json.dumps([*calls, *works, *ops]).encode())
    assert not analysis.is_conclusive
    told = [each.cpu_total_ns for each in analysis.operators] + [each.total_ns for each in analysis.kernels]
    assert trace.faults or told == [10 * 2**60, 10 * 2**60]


def test_zip_bombs_are_refused_in_bounded_memory(tmp_path):
    told = measured(*(bomb(tmp_path, name, 24) for name in BOMBS), max_json_bytes=16 * 2**20)
    for (grown, said), name in zip(told, BOMBS, strict=True):
        assert f"{name}.json.gz is not a readable Chrome trace" in said
        assert grown < 150, name


def test_two_thousand_launching_threads_need_bounded_memory(tmp_path):
    [(grown, said)] = measured(launching_threads(tmp_path, 2000, 10_000))
    assert (said, grown < 150) == ("14000", True)


def test_a_nest_without_end_is_given_up_a_level_at_a_time_and_not_a_bracket(tmp_path):
    nest = b'{"x":[{},' * 20_000
    path = tmp_path / "nest.json"
    path.write_bytes(b'{"traceEvents":[' + nest)
    (damaged,) = [fault for fault in read_trace(path).faults if fault.kind == "damaged"]
    assert damaged.events < 1000  # of 20,000 brackets


def test_five_thousand_nested_events_are_analysed(tmp_path):
    count = 5000
    nested = [event("aten::mm", k, 3 * count - 2 * k) for k in range(count)]
    path = tmp_path / "nested.json"
    path.write_text(json.dumps([*nested, call(count, 1, 70), work(count + 5, 5, 70)]))
    [(grown, said)] = measured(path)
    assert (said, grown < 300) == (str(count + 2), True)
