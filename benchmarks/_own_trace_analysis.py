"""One attempt by Boundby; prints one line of JSON last."""

import argparse
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find the packages of this checkout

from benchmarks._two_stages import attempt
from boundby.trace import Trace, analyze, read_trace


def main() -> None:
    """Read a trace, analyse it and print what that costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    path = parser.parse_args().trace
    attempt(load=functools.partial(read_trace, path), analyse=analyze, say=_say, packages=("numpy", "msgspec"))


def _say(trace: Trace, analysis: object) -> str:
    return f"{len(trace.start_ns)} events kept"


if __name__ == "__main__":
    main()
