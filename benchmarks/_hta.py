"""One attempt by HTA, in its own environment; prints one line of JSON last. Imports nothing of ours but the clock.

Its defaults are left alone, and they spare it work: it leaves out the last step of a trace and all that begins after
it, and rounds time stamps with nanoseconds inwards to whole µs (common/trace.py, common/trace_parser.py). A trace of
one rank is read without its pool of processes. It looks for the step of every event one step after the other, so that
an event costs it more the more steps a trace has (`add_iteration` in common/trace.py).
"""

import argparse
import functools
from typing import Any

from _two_stages import attempt
from hta.trace_analysis import TraceAnalysis

ANALYSES = (
    "get_temporal_breakdown",
    "get_gpu_kernel_breakdown",
    "get_idle_time_breakdown",
    "get_comm_comp_overlap",
    "get_cuda_kernel_launch_stats",
)


def main() -> None:
    """Load the trace of one rank, run the analyses without their plots and print what they cost."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace")
    path = parser.parse_args().trace
    attempt(
        load=functools.partial(TraceAnalysis, trace_files={0: path}),
        analyse=_analyse,
        say=_say,
        packages=("traceinsight", "pandas", "numpy"),
    )


def _analyse(analysis: TraceAnalysis) -> list[Any]:
    return [getattr(analysis, name)(visualize=False) for name in ANALYSES]


def _say(analysis: TraceAnalysis, found: list[Any]) -> str:
    temporal, launches = found[0].iloc[0], found[-1][0]
    kept = len(analysis.t.get_trace(0))
    idle = f"GPU idle {temporal['idle_time(us)'] / 1e3:.3f} of {temporal['kernel_time(us)'] / 1e3:.3f} ms"
    return f"{kept} events kept, {idle}, {len(launches)} launches"


if __name__ == "__main__":
    main()
