"""Files that are no traces, damaged ones and such as are meant to do harm: a clean error or a finding, never more."""

import errno
import gzip
import json
from collections.abc import Iterator

import pytest

from boundby.trace import NotATrace, analyze, read_trace, source
from tests.injection import Fault, injected
from tests.trace_truth.attempts import sound_attempt, survives, unsound_attempt
from tests.trace_truth.large import BOMBS, bomb, launching_threads, measured
from tests.traces import call, event, step, work

EVENTS = [
    step(1, 0, 100),
    event("aten::mm", 1, 8, Input_Dims=[[2, 3], [3, 4]], External_id=1),
    call(2, 1, 70),
    work(10, 20, 70),
    call(40, 1, 71),
    work(60, 20, 71),
]
VALID = json.dumps({"traceEvents": EVENTS}).encode()


def beside(odd: str) -> bytes:
    texts = [json.dumps(record) for record in EVENTS]
    return ('{"traceEvents": [' + ", ".join([*texts[:3], odd, *texts[3:]]) + "]}").encode()


@pytest.mark.parametrize(
    "content",
    [
        *(b" \n ", b"\0" * 1000, b"{", b"[", b"3", b'"traceEvents"', b'{"traceEvents": 3}', b'{"traceEvents": null}'),
        *(b'{"a": {"traceEvents": [] } }', b'{"a": "\\"traceEvents\\": ["}', b'{"a": ' + b"[" * 20_000, b"[" * 20_000),
        *(b"\x1f\x8b", gzip.compress(b"", mtime=0), b"\x1f\x8b" + b"\0" * 1000, b"PK\x03\x04" + b"\0" * 100),
    ],
)
def test_names_the_file_that_is_no_trace_or_finds_nothing_in_it(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    try:
        trace = read_trace(path)
    except ValueError as error:
        assert "broken.json is not a readable Chrome trace" in str(error)
    else:
        assert len(trace.name) == 0
        assert not analyze(trace).is_conclusive


@pytest.mark.parametrize(
    ("content", "is_other"),
    [
        (b"", True),
        (b"not a trace", True),
        (b'{"events": []}', True),
        (gzip.compress(b"{}", mtime=0), True),
        (gzip.compress(VALID, mtime=0)[:12], False),
        (gzip.compress(VALID, mtime=0)[:12] + b"\xff" * 40, False),
    ],
)
def test_a_file_that_is_something_else_is_told_from_a_damaged_one(tmp_path, content, is_other):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="broken.json is not a readable Chrome trace") as raised:
        read_trace(path)
    assert isinstance(raised.value, NotATrace) == is_other


def test_what_cannot_be_opened_or_read_is_an_os_error_that_names_it(tmp_path):
    (tmp_path / "gone.json").write_text('{"traceEvents": []}')
    with injected(tmp_path, Fault("read", 1, errno.EIO)), pytest.raises(OSError, match="gone.json"):
        read_trace(tmp_path / "gone.json")
    with pytest.raises(FileNotFoundError, match="absent"):
        read_trace(tmp_path / "absent.json")
    with pytest.raises(OSError, match=tmp_path.name):
        read_trace(tmp_path)


def cuts(content: bytes) -> Iterator[bytes]:
    for length in sorted({*range(0, len(content), 11), len(content) - 1, len(content) - 8}):
        yield content[:length]


@pytest.mark.parametrize("piece", [source.PIECE_BYTES, 40])
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_cut_anywhere_is_refused_or_told_to_be_cut(tmp_path, monkeypatch, packed, piece):
    monkeypatch.setattr(source, "PIECE_BYTES", piece)
    path = tmp_path / "cut.json"
    events = 0
    for content in cuts(gzip.compress(VALID, mtime=0) if packed else VALID):
        path.write_bytes(content)
        try:
            trace = read_trace(path)
        except ValueError as error:
            assert "cut.json" in str(error)
            continue
        assert trace.faults
        assert not analyze(trace).is_conclusive
        assert len(trace.name) >= events  # a longer file never holds less
        events = len(trace.name)
    assert events == len(EVENTS)


@pytest.mark.parametrize("padding", [b"\0", b"\0" * 100_000])
def test_zeros_behind_a_gzip_file_are_padding(tmp_path, padding):
    trace, analysis = survives(tmp_path, gzip.compress(VALID, mtime=0) + padding)
    assert (len(trace.name), trace.faults, analysis.is_conclusive) == (len(EVENTS), (), True)


def test_a_false_checksum_is_refused_or_told(tmp_path):
    packed = bytearray(gzip.compress(VALID, mtime=0))
    packed[-8] ^= 1
    try:
        _, analysis = survives(tmp_path, bytes(packed))
    except ValueError as error:
        assert "odd.json" in str(error)
    else:
        assert not analysis.is_conclusive


# fmt: off
ODD = '{"ph": "X", "name": "odd", '
REST = [  # of an event that begins so
    '"dur": 1}', '"ts": 1}', '"ts": NaN, "dur": 1}', '"ts": 1, "dur": NaN}', '"ts": -Infinity, "dur": 1}',
    '"ts": 1, "dur": Infinity}', '"ts": 1e300, "dur": 1}', '"ts": 1, "dur": 1e300}', '"ts": 1, "dur": 1e999}',
    '"ts": 1e9999999, "dur": 1}', '"ts": -1e9999999, "dur": 1}', '"ts": "1e9999999", "dur": 1}',
    '"ts": 1e99999999999999999999999, "dur": 1}', '"ts": 1, "dur": 1e99999999999999999999999}',
    '"ts": 1' + "0" * 5000 + ', "dur": 1}', '"ts": 1, "dur": 1' + "0" * 5000 + "}", '"ts": "sNaN", "dur": 1}',
    '"ts": "", "dur": 1}', '"ts": "now", "dur": 1}', '"ts": [1, 2], "dur": 1}', '"ts": {"a": 1}, "dur": 1}',
    '"ts": null, "dur": 1}', '"ts": true, "dur": 1}', '"ts": 1, "dur": []}', '"cat": [1], "ts": 1, "dur": 1}',
    '"pid": {}, "ts": 1, "dur": 1}', '"tid": [[], {}], "ts": 1, "dur": 1}',
    '"ts": 1, "dur": 1, "args": ' + "[" * 20_000 + "]" * 20_000 + "}",
    '"ts": 1, "dur": 1, "args": ' + '{"a":' * 20_000 + "1" + "}" * 20_001, '"ts": 1, "dur": 1, "args": {"a": tru}}',
]
# fmt: on
LEFT_OUT = [
    *(ODD + rest for rest in REST),
    *('{"ph": "X", "name": ' + name + ', "ts": 1, "dur": 1}' for name in ("3", '{"a": [{}, {}]}', '"\\ud800"')),
    '{"ph": "X", "name": "odd", nonsense, "args": {"list": [{"a": 1}, {"b": 2}]}}',
    '{"ph": "X", "name": "odd", nonsense, "args": {"list": [[{"a": 1}], {"b": [2]}]}}',
    *('{"ph": "X", "name": "odd" "ts": 1}', '{"name": "odd", "ts": 1, "dur": 1}'),
    *('{"ph": ' + kind + ', "name": "odd", "ts": 1, "dur": 1}' for kind in ("3", '"unknown"')),
    *("{}", "3", "null", '"text"', "[1, 2]", "[{}, {}]"),
]


@pytest.mark.parametrize("odd", LEFT_OUT, ids=lambda odd: odd[:70])
def test_an_odd_event_is_left_out_and_told_and_the_others_are_kept(tmp_path, monkeypatch, odd):
    trace, analysis = survives(tmp_path, beside(odd))
    kept = [trace.names[name] for name in trace.name.tolist()]
    assert [name for name in kept if name != "odd"] == [record["name"] for record in EVENTS]
    if "dur" not in odd or kept == [record["name"] for record in EVENTS]:
        assert trace.faults
        assert not analysis.is_conclusive
    monkeypatch.setattr(source, "PIECE_BYTES", 397)
    pieces, _ = survives(tmp_path, beside(odd))
    assert [pieces.names[name] for name in pieces.name.tolist()] == kept


FIELDS = ("correlation", "stream", "device", "bytes", "External id")
NUMBERS = (10**30, -(10**30), 2**31, 2**32, 2**63, 2**64, -(2**63), -1, "7", "x", None, 1.5, [], {})


def odd_work(**odd: object) -> str:
    known = {"ph": "X", "cat": "kernel", "name": "odd", "pid": 0, "tid": 7, "ts": 1, "dur": 1}
    args = {"correlation": 70, "stream": 7, "device": 0}
    return json.dumps(known | {"args": args | odd.pop("args", {})} | odd)


@pytest.mark.parametrize(
    "odd",
    [
        *({"args": {field: value}} for field in FIELDS for value in NUMBERS),
        *({field: value} for field in ("pid", "tid") for value in (10**30, -(10**30), 2**63, -(2**63) - 1, None, "x")),
        {"args": {"Input Dims": "\ud7ff"}, "cat": "cpu_op"},
        *(
            {"args": {"Input Dims": dims}, "cat": "cpu_op", "name": "aten::mm"}
            for dims in ([[10**30] * 2] * 2, {"0": [1]}, [["1", 2], [2, 10**30]], [["1", 2], [2, 10**12]])
        ),
        {"args": {"Python id": 10**30, "Python parent id": 10**30}, "cat": "python_function"},
        *(
            {"name": f"ProfilerStep#{number}", "cat": "user_annotation"}
            for number in ("9" * 5000, "9" * 30, 2**63, "٣", "1\n")
        ),
        *({"name": name} for name in ("\x00\x1b[31m\x07\u202e", "", "x" * 1_000_000)),
        *({name: sign * 2.0**60 / 1000} for name in ("dur", "ts") for sign in (-1, 1)),
        *({"cat": ""}, {"ts": "1.5", "dur": "2.5"}),
    ],
    ids=lambda odd: repr(odd)[:70],
)
def test_an_odd_value_is_unknown_or_leaves_its_event_out(tmp_path, odd):
    trace, analysis = survives(tmp_path, beside(odd_work(**odd)))
    assert len(trace.name) in (len(EVENTS), len(EVENTS) + 1)
    assert len(trace.name) == len(EVENTS) + 1 or trace.faults
    assert all(isinstance(number, int) for number in analysis.step_numbers)


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"aten::mm", b"aten::\xff\xfe"), (b"[[2, 3], [3, 4]]", b'"\xff"'), (b"aten::mm", b"a\x01\n\t")],
)
def test_invalid_bytes_in_a_text_are_survived(tmp_path, before, after):
    trace, _ = survives(tmp_path, VALID.replace(before, after))
    assert len(trace.name) >= len(EVENTS) - 1
    assert "gemm" in trace.names


@pytest.mark.parametrize(
    "header",
    [
        '"distributedInfo": {"rank": "x", "world_size": 1.5}',
        '"distributedInfo": 3',
        '"distributedInfo": {"rank": ' + "1" * 5000 + "}",
        '"deviceProperties": [3, null]',
        '"deviceProperties": {"name": "x"}',
        '"deviceProperties": [{"name": {"a": [{}, {}]}}, {}]',
        '"record_shapes": "x"',
        '"schemaVersion": 1e99999999999999999999999, "distributedInfo": 3',
        '"a": NaN, "b": "\\ud800"',
        '"a": ' + "[" * 20_000 + "]" * 20_000,
        '"a": "\\"traceEvents\\": ["',
        '"a": {"traceEvents": [{"ph": "X", "name": "decoy", "ts": 1, "dur": 1}, {"a": 1}]}',
    ],
    ids=lambda header: header[:60],
)
def test_an_odd_header_costs_at_most_itself(tmp_path, header):
    events = json.dumps(EVENTS)
    for content in (f'{{"traceEvents": {events}, {header}}}', f'{{{header}, "traceEvents": {events}}}'):
        try:
            trace, _ = survives(tmp_path, content.encode())
        except ValueError as error:
            assert "odd.json" in str(error)
            assert "[[[[" in header or "1111" in header  # too deep or too long to be told from damage
        else:
            assert [trace.names[name] for name in trace.name.tolist()] == [record["name"] for record in EVENTS]


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
    sums = [operator.cpu_total_ns for operator in analysis.operators] + [kernel.total_ns for kernel in analysis.kernels]
    assert trace.faults or sums == [10 * 2**60, 10 * 2**60]


def test_zip_bombs_are_refused_in_bounded_memory(tmp_path):
    outcomes = measured(*(bomb(tmp_path, name, 24) for name in BOMBS), max_json_bytes=16 * 2**20)
    for (grown, text), name in zip(outcomes, BOMBS, strict=True):
        assert f"{name}.json.gz is not a readable Chrome trace" in text
        assert grown < 150, name


def test_two_thousand_launching_threads_need_bounded_memory(tmp_path):
    [(grown, text)] = measured(launching_threads(tmp_path, 2000, 10_000))
    assert (text, grown < 150) == ("14000", True)


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
    [(grown, text)] = measured(path)
    assert (text, grown < 300) == (str(count + 2), True)


SEEDS = range(100)


def test_a_random_trace_is_analysed_as_by_brute_force(tmp_path):
    faults = {seed: sound_attempt(seed, tmp_path) for seed in SEEDS}
    assert {seed: fault for seed, fault in faults.items() if fault} == {}


def test_a_damaged_trace_ends_in_a_clean_error_or_in_an_analysis_that_adds_up(tmp_path):
    faults = {seed: unsound_attempt(seed, tmp_path) for seed in SEEDS}
    assert {seed: fault for seed, fault in faults.items() if fault} == {}
