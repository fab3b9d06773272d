"""Zip bombs and very large traces, read in a process of their own whose memory is measured."""

import json
import subprocess
import sys
import zlib
from pathlib import Path

from boundby.trace.decoding import MAX_JSON_BYTES
from tests.traces import REPOSITORY, call, event, work

MEASURED = """
import resource, sys
from boundby.trace import analyze, read_trace
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
limit, *paths = sys.argv[1:]
for path in paths:
    try:
        said = str(analyze(read_trace(path, max_json_bytes=int(limit))).events)
    except ValueError as error:
        said = str(error)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, said, sep="|")
"""


def measured(*paths: Path, max_json_bytes: int = MAX_JSON_BYTES, timeout_s: float = 60) -> list[tuple[float, str]]:
    """Return, for one after another, by how many MiB a process had grown after it, and what it said."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(max_json_bytes), *map(str, paths)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=True,
    )
    parted = (line.partition("|") for line in done.stdout.splitlines())
    return [(float(grown), text) for grown, _, text in parted]


BOMBS = {
    "zeros": (b"", b"\0" * 2**20),
    "spaces in the list": (b'{"traceEvents":[', b" " * 2**20),
    "zeros in a name": (b'{"traceEvents":[{"ph":"X","name":"', b"0" * 2**20),
    "open brackets": (b'{"traceEvents":[', b"[" * 2**20),
    "open events": (b'{"traceEvents":[', b'{"ph":"X","args":' * 2**16),
    "events of one name": (b'{"traceEvents":[', b'{"ph":"M","name":"a"},' * 2**16),
    "a long header": (b'{"a":"', b"0" * 2**20),
    "a long trailer": (b'{"traceEvents":[{"ph":"X","name":"a","ts":1,"dur":1}],"a":"', b"0" * 2**20),
}


def bomb(folder: Path, name: str, pieces: int) -> Path:
    """Write a bomb of about `pieces` MiB in a few KiB."""
    opening, piece = BOMBS[name]
    packer = zlib.compressobj(1, wbits=31)
    path = folder / f"{name}.json.gz"
    with path.open("wb") as file:
        for part in (opening, *[piece] * pieces):
            file.write(packer.compress(part))
        file.write(packer.flush())
    assert path.stat().st_size < 10_000 * pieces
    return path


def launching_threads(folder: Path, threads: int, events: int) -> Path:
    """Write a trace in which each of the threads launches once, beside a main thread of many events."""
    main = (event("aten::add", k, 0.5) for k in range(events))
    every = events / threads
    calls = (call(every * k, 0.1, 70 + k, tid=k + 2) for k in range(threads))
    works = (work(every * k + 0.3, 0.1, 70 + k, stream=k % 1000) for k in range(threads))
    path = folder / "threads.json"
    path.write_text(json.dumps([*main, *calls, *works]))
    return path
