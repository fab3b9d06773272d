"""One attempt to make the reader or the analysis fail, by its seed; each returns the fault or None."""

import gzip
import random
import traceback
from pathlib import Path

from boundby.trace import Analysis, Trace, analyze, folded_stacks, op_stats, read_trace, source
from tests.trace_truth.comparison import difference
from tests.trace_truth.generator import random_trace, with_damaged_bytes, with_hostile_values

WHOLE = source.PIECE_BYTES


def sound_attempt(seed: int, folder: Path) -> str | None:
    """Analyse a random trace and hold it against brute force."""
    text = random_trace(seed)
    path = folder / "trace.json"
    path.write_text(text)
    try:
        trace = read_trace(path)
        analysis = analyze(trace)
        different = [*difference(analysis, text), *filter(None, [imbalance(analysis)])]
    except Exception:  # of any kind: an attempt is to be counted, and told with its seed
        return traceback.format_exc(limit=-3)
    return "; ".join([*(fault.text for fault in trace.faults), *different]) or None


def unsound_attempt(seed: int, folder: Path) -> str | None:
    """Analyse a trace with odd values or damaged bytes, sometimes in small pieces."""
    choose = random.Random(seed)
    content = with_hostile_values(seed) if choose.random() < 0.5 else _damaged(seed, choose)
    path = folder / "damaged.json"
    path.write_bytes(content)
    try:
        source.PIECE_BYTES = choose.choice((WHOLE, 50, 700))
        return _outcome(path)
    finally:
        source.PIECE_BYTES = WHOLE


def _damaged(seed: int, choose: random.Random) -> bytes:
    content = random_trace(seed).encode()
    if choose.random() < 0.3:
        return with_damaged_bytes(gzip.compress(content, mtime=0), choose)
    damaged = with_damaged_bytes(content, choose)
    return gzip.compress(damaged, mtime=0) if choose.random() < 0.1 else damaged


def _outcome(path: Path) -> str | None:
    try:
        trace = read_trace(path)
    except (ValueError, OSError) as error:
        return None if path.name in str(error) else f"does not name the file: {error!r}"
    except Exception:
        return traceback.format_exc(limit=-3)
    try:
        analysis = analyze(trace)
        op_stats(trace, ("shapes", "stack", "module"))
        folded_stacks(trace)
    except Exception:
        return traceback.format_exc(limit=-3)
    return imbalance(analysis)


def imbalance(analysis: Analysis) -> str | None:
    """Return what of an analysis does not add up or is negative."""
    for device in analysis.devices:
        if device.busy_ns + device.idle_ns != device.window_ns or device.window_ns != analysis.window_ns:
            return "busy and idle time are not the window"
        if sum(device.causes_ns.values()) != device.idle_ns or sum(device.exposed_ns.values()) != device.busy_ns:
            return "causes or kinds do not add up"
        parts = [*device.steps, device.timeline]
        spans = [item for part in parts for row in (part.busy_ns, part.idle_ns) for item in row.values()]
        numbers = [ns for span in spans for ns in (span if isinstance(span, tuple) else (span,))]
        if min([*numbers, *device.causes_ns.values(), *device.by_kind_ns.values(), *device.exposed_ns.values()]) < 0:
            return "something lasts less than nothing"
        if sum(sum(row) for part in (device.timeline.busy_ns, device.timeline.idle_ns) for row in part.values()) != (
            device.window_ns
        ):
            return "the timeline does not add up"
    for stat in analysis.operators:
        if min(stat.cpu_self_ns, stat.cpu_total_ns, stat.device_total_ns or 0, stat.device_self_ns or 0) < 0:
            return f"operator {stat.name!r} lasts less than nothing"
    for kernel in analysis.kernels:
        if min(kernel.total_ns, kernel.median_ns, kernel.max_ns) < 0:
            return f"kernel {kernel.name!r} lasts less than nothing"
    return None


def survives(folder: Path, content: bytes) -> tuple[Trace, Analysis]:
    """Write, read and analyse what adds up whatever it holds."""
    path = folder / "odd.json"
    path.write_bytes(content)
    trace = read_trace(path)
    analysis = analyze(trace)
    op_stats(trace, ("shapes", "stack", "module"))
    folded_stacks(trace)
    assert imbalance(analysis) is None
    return trace, analysis
