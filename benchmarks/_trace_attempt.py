"""One attempt at a trace, by ours or by HTA in its own environment; prints one line of JSON last.

Ours goes from the file to the text on the terminal. The environment of HTA has nothing of ours, so what both share, the
clock and the memory gauge, needs the standard library alone. Its defaults are left alone, and they spare it work: it
leaves out the last step of a trace and all that begins after it, and rounds time stamps with nanoseconds inwards to
whole µs (common/trace.py, common/trace_parser.py). A trace of one rank is read without its pool of processes. It looks
for the step of every event one step after the other, so that an event costs it more the more steps a trace has
(`add_iteration` in common/trace.py).

    python benchmarks/_trace_attempt.py ours|HTA TRACE
"""

import functools
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

ANALYSES = (
    "get_temporal_breakdown",
    "get_gpu_kernel_breakdown",
    "get_idle_time_breakdown",
    "get_comm_comp_overlap",
    "get_cuda_kernel_launch_stats",
)
Loaded = TypeVar("Loaded")
Found = TypeVar("Found")
TELL_VERSIONS = "BENCHMARK_TELLS_VERSIONS"  # in the environment; looking them up takes a while, which does not count


def attempt(
    load: Callable[[], Loaded],
    analyse: Callable[[Loaded], Found],
    say: Callable[[Loaded, Found], str],
    packages: Sequence[str],
) -> None:
    """Print the seconds of both stages and the peak of memory as one line of JSON; imports lie before the clock."""
    start = time.perf_counter()
    loaded = load()
    between = time.perf_counter()
    result = analyse(loaded)
    end = time.perf_counter()
    peak = _peak_bytes()
    message = {
        "load_s": between - start,
        "analyses_s": end - between,
        "peak_bytes": peak,
        "said": say(loaded, result),
        "versions": _versions(packages) if os.environ.get(TELL_VERSIONS) else {},
    }
    print(json.dumps(message))


def _versions(packages: Sequence[str]) -> dict[str, str]:
    from importlib import metadata

    return {name: metadata.version(name) for name in packages}


def _peak_bytes() -> int:
    """Return the most memory that this process held, plus that of its largest child.

    VmHWM, not `ru_maxrss`: Linux lets that one begin at the peak of the process that started this one (`exec_mmap`
    takes over the peak of the memory it replaces).
    """
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    own = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return 1024 * (own + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


def by_ours(path: str) -> None:
    """Read a trace, analyse it and print what that costs, as scripts/analyze_trace.py does."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()
    from boundby.trace import Trace, analyze, by_name, read_trace
    from utils.command import cli  # noqa: F401  (the script loads it too, and the whole process is what is timed)
    from utils.tracing import Examination, Examined
    from utils.tracing import trace_text as text

    def analyse(trace: Trace) -> list[str]:
        analysis = analyze(trace)
        return text.lines(Examination((Examined.of(analysis, tuple(by_name(analysis.operators))),), (), "name"))

    def say(trace: Trace, lines: list[str]) -> str:
        return f"{len(trace.start_ns)} events kept; {lines[0]}"

    attempt(functools.partial(read_trace, path), analyse, say, packages=("numpy", "msgspec"))


def by_hta(path: str) -> None:
    """Load the trace of one rank, run the analyses without their plots and print what they cost."""
    from hta.trace_analysis import TraceAnalysis

    def analyse(analysis: TraceAnalysis) -> list[Any]:
        return [getattr(analysis, name)(visualize=False) for name in ANALYSES]

    def say(analysis: TraceAnalysis, found: list[Any]) -> str:
        temporal, launches = found[0].iloc[0], found[-1][0]
        kept = len(analysis.t.get_trace(0))
        idle = f"GPU idle {temporal['idle_time(us)'] / 1e3:.3f} of {temporal['kernel_time(us)'] / 1e3:.3f} ms"
        return f"{kept} events kept, {idle}, {len(launches)} launches"

    attempt(
        functools.partial(TraceAnalysis, trace_files={0: path}),
        analyse,
        say,
        packages=("traceinsight", "pandas", "numpy"),
    )


if __name__ == "__main__":
    {"ours": by_ours, "HTA": by_hta}[sys.argv[1]](sys.argv[2])
