"""What the reader makes of sound traces."""

import gzip
from decimal import Decimal

import pytest

from boundby.trace import folded_stacks, op_stats, read_trace, step_count
from tests.traces import event, memory_change, write


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".trace"])
def test_reads_plain_and_gzip_whatever_the_suffix(tmp_path, suffix):
    content = write(tmp_path, event("aten::add", 5, 2)).read_bytes()
    path = tmp_path / f"other{suffix}"
    path.write_bytes(gzip.compress(content, mtime=0) if suffix != ".json" else content)
    trace = read_trace(path)
    assert (trace.names, trace.base_ns) == (("aten::add",), 5000)
    assert (trace.start_ns.tolist(), trace.duration_ns.tolist()) == ([0], [2000])


@pytest.mark.parametrize("start", ["1712195495519689.047", "4503599627370.497", "4458676522690.655", "17.25", "-3.001"])
def test_neighbouring_timestamps_stay_one_nanosecond_apart(tmp_path, start):
    path = tmp_path / "trace.json"
    times = [Decimal(start) + Decimal(k) / 1000 for k in range(300)]
    events = ",".join(f'{{"ph": "X", "name": "op", "ts": {time}, "dur": 0.001}}' for time in times)
    path.write_text(f'{{"traceEvents": [{events}]}}')
    trace = read_trace(path)
    assert trace.base_ns == int(Decimal(start) * 1000)
    assert trace.start_ns.tolist() == list(range(300))
    assert set(trace.duration_ns.tolist()) == {1}


def test_keeps_complete_events_only_and_takes_numbers_written_as_text(tmp_path):
    numeric_text = event("op", 1, 1) | {"ts": "1.5", "dur": "2.5", "args": {"External id": "7", "correlation": 8}}
    flow = {"ph": "s", "id": 1, "pid": 1, "tid": 1, "ts": 4, "cat": "ac2g", "name": "ac2g"}
    label = {"ph": "M", "name": "process_name", "pid": "Spans", "tid": "x", "args": {"name": "python", "extra": [{}]}}
    bare = {"ph": "X", "name": "bare", "ts": 3.5, "dur": 1}
    trace = read_trace(write(tmp_path, numeric_text, flow, label, bare))
    assert trace.names == ("op", "bare")
    assert trace.start_ns.tolist() == [0, 2000]
    assert trace.external_id.tolist() == [7, -1]
    assert trace.correlation.tolist() == [-1, -1]


def test_an_empty_trace_gives_empty_tables(tmp_path):
    trace = read_trace(write(tmp_path))
    assert (op_stats(trace), folded_stacks(trace), step_count(trace)) == ([], [], 0)


def test_counts_each_step_once_though_the_gpu_repeats_its_mark(tmp_path):
    marks = [event(f"ProfilerStep#{k}", 10 * k, 9, "user_annotation") for k in (2, 3)]
    again = event("ProfilerStep#3", 31, 9, "gpu_user_annotation", tid=7)
    assert step_count(read_trace(write(tmp_path, *marks, again, event("ProfilerStep", 50, 1)))) == 2


def test_reads_a_field_only_of_events_that_are_known_to_carry_it(tmp_path):
    fields = {"External_id": 7, "correlation": 8, "stream": 9, "device": 1, "bytes": 5}
    kinds = ("cpu_op", "cuda_runtime", "kernel", "cuda_sync", "user_annotation")
    trace = read_trace(write(tmp_path, *(event(kind, 0, 1, kind, **fields) for kind in kinds)))
    assert trace.external_id.tolist() == [7, -1, 7, 7, -1]
    assert trace.correlation.tolist() == [-1, 8, 8, 8, -1]
    assert trace.stream.tolist() == trace.device.tolist()[:2] + [9, 9, -1]
    assert trace.bytes.tolist() == [-1, -1, 5, 5, -1]


def test_times_of_any_length_and_sign_stand_side_by_side(tmp_path):
    texts = ["1000000.5", "-17.001", "0", "1712195495519689.047", "1e3", "0.0015", "7"]
    path = tmp_path / "trace.json"
    for order in (texts, texts[::-1], sorted(texts)):
        events = ",".join(f'{{"ph":"X","name":"op","ts":{text},"dur":1}}' for text in order)
        path.write_text(f'{{"traceEvents":[{events}]}}')
        trace = read_trace(path)
        wanted = [int((Decimal(text) * 1000).to_integral_value()) for text in order]
        assert (trace.start_ns + trace.base_ns).tolist() == wanted


def test_the_old_capital_names_of_categories_mean_the_new_ones(tmp_path):
    names = ("Kernel", "Memcpy", "Memset", "Runtime", "Operator")
    trace = read_trace(write(tmp_path, *(event("e", 0, 1, name) for name in names)))
    assert trace.categories == ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cpu_op")


def test_an_old_and_a_new_name_of_one_category_are_both_seen(tmp_path):
    trace = read_trace(write(tmp_path, event("a", 0, 1, "Operator"), event("b", 2, 1, "cpu_op")))
    assert trace.in_categories(["cpu_op"]).tolist() == [True, True]


@pytest.mark.parametrize("rank", [0, 7])
def test_each_rank_of_a_job_tells_which_one_it_is(tmp_path, rank):
    trace = read_trace(write(tmp_path, event("aten::mm", 0, 1), distributedInfo={"rank": rank, "world_size": 8}))
    assert (trace.rank, trace.world_size) == (rank, 8)


def test_changes_of_memory_are_a_table_of_their_own(tmp_path):
    changes = (11.5, 4096, 512, 512, 1), (12, 4096, -512), (13, 4096, 2**70, None, 0)
    memory = read_trace(write(tmp_path, event("op", 10, 1), *(memory_change(*change) for change in changes))).memory
    assert memory.start_ns.tolist() == [1500, 2000, 3000]
    assert memory.bytes.tolist() == [512, -512, -1]
    assert memory.device.tolist() == [1, -1, 0]
    assert memory.allocated_bytes.tolist() == [512, -1, -1]
