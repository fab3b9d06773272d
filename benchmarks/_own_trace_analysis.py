"""One attempt by Boundby, from the file to the text on the terminal; prints one line of JSON last."""

import argparse
import functools
import gc
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if __name__ == "__main__":
    gc.disable()  # both as scripts/analyze_trace.py does

from benchmarks._two_stages import attempt
from boundby.trace import Trace, analyze, read_trace
from boundby.trace.operator_table import by_name
from utils import cli  # noqa: F401  (scripts/analyze_trace.py loads it too, and the whole process is what is timed)
from utils.trace_analysis import text
from utils.trace_analysis.traces import Examination, Examined


def main() -> None:
    """Read a trace, analyse it and print what that costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    path = parser.parse_args().trace
    attempt(load=functools.partial(read_trace, path), analyse=_analyse, say=_say, packages=("numpy", "msgspec"))


def _analyse(trace: Trace) -> list[str]:
    analysis = analyze(trace)
    return text.lines(Examination((Examined.of(analysis, tuple(by_name(analysis.operators))),), (), "name"))


def _say(trace: Trace, lines: list[str]) -> str:
    return f"{len(trace.start_ns)} events kept; {lines[0]}"


if __name__ == "__main__":
    main()
