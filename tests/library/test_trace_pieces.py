"""What a trace says does not depend on the pieces in which its file is read."""

import gzip
import json

import numpy as np
import pytest
from msgspec.structs import asdict

from boundby.trace import Trace, read_trace, source
from tests.traces import call, event, step, work

HEADER = {
    "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
    "deviceProperties": [{"id": 0, "name": "NVIDIA A100"}, {"id": 1, "name": "NVIDIA A100"}],
    "otherData": {"list": [{"a": 1}, {"b": [{"c": 2}, {"d": '},{"'}]}], "text": '"traceEvents": ['},
}
EVENTS = (
    step(4, 0, 50),
    step(5, 50, 40),
    event("aten::mm", 1, 9, Input_Dims=[[2, 3], [3, 4]], External_id=3),
    event('a name with },{" and \\ and "quotes" and }, {', 2, 1),
    event("é ö 漢字 🎲 \u2028", 3, 1),
    event("nested", 4, 1, extra=[{"a": 1}, {"b": [{"c": "},{"}, {"d": [[]]}]}]),
    call(5, 1, 70),
    work(20, 10, 70),
    {"ph": "M", "name": "process_labels", "args": {"labels": [{}, {}]}},
    event("[memory]", 6, 0, Bytes=64, Device_Type=1, Device_Id=0) | {"ph": "i"},
    {"ph": "B", "name": "span", "cat": "cpu_op", "pid": 1, "tid": 9, "ts": 11},
    event("aten::add", 12, 3, tid="a thread"),
    {"ph": "E", "name": "span", "cat": "cpu_op", "pid": 1, "tid": 9, "ts": 31},
    call(40, 5, 71, "cudaMemcpyAsync"),
    work(60, 1.25, 71, name="Memcpy HtoD (Pinned -> Device)", category="gpu_memcpy", stream=0),
)


def layouts() -> dict[str, bytes]:
    before = json.dumps(HEADER | {"traceEvents": EVENTS})
    after = json.dumps({"schemaVersion": 1, "traceEvents": EVENTS} | HEADER, indent=1)
    packed = gzip.compress(before.encode(), mtime=0)
    members = gzip.compress(before.encode()[:700], mtime=0) + gzip.compress(before.encode()[700:], mtime=0)
    return {
        "header first": before.encode(),
        "header last": after.encode(),
        "array": json.dumps(EVENTS, indent=2, ensure_ascii=False).encode(),
        "gzip": packed,
        "gzip of two members": members,
    }


def rows_of(trace: Trace) -> list[tuple]:
    """Return what the trace tells of each event; spans with a begin and an end may stand anywhere among them."""
    texts = {
        "name": trace.names,
        "category": trace.categories,
        "thread": trace.threads,
        "input_shapes": (*trace.shapes, None),
    }
    columns = [
        [texts[name][value] if name in texts else value for value in getattr(trace, name).tolist()]
        for name in trace.__struct_fields__
        if isinstance(getattr(trace, name), np.ndarray)
    ]
    return sorted(zip(*columns, strict=True), key=repr)


def whole_of(trace: Trace) -> tuple:
    memory = {name: column.tolist() for name, column in asdict(trace.memory).items() if name != "thread"}
    said = trace.base_ns, trace.rank, trace.world_size, trace.device_names, trace.faults
    return said, memory, rows_of(trace)


@pytest.mark.parametrize("layout", layouts())
def test_says_the_same_in_whatever_pieces_the_file_is_read(tmp_path, monkeypatch, layout):
    path = tmp_path / "trace.json"
    path.write_bytes(layouts()[layout])
    whole = read_trace(path)
    assert (whole.faults, len(whole.name)) == ((), 12)
    wanted = whole_of(whole)
    if layout != "array":
        assert (whole.rank, whole.world_size, whole.device_names) == (3, 8, ("NVIDIA A100", "NVIDIA A100"))
    wrong = {}
    for piece in (*range(1, 64, 6), *range(64, len(layouts()[layout]) + 2, 47)):
        monkeypatch.setattr(source, "PIECE_BYTES", piece)
        found = read_trace(path)
        if whole_of(found) != wanted:
            wrong[piece] = (len(found.name), found.rank, found.faults)
    assert wrong == {}
