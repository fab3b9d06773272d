"""The clock and the memory gauge of one attempt at a trace, the same for both tools.

It needs the standard library alone: the environment of the peer has nothing of ours.
"""

import json
import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

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
    found = analyse(loaded)
    end = time.perf_counter()
    peak = _peak_bytes()
    told = {
        "load_s": between - start,
        "analyses_s": end - between,
        "peak_bytes": peak,
        "said": say(loaded, found),
        "versions": _versions(packages) if os.environ.get(TELL_VERSIONS) else {},
    }
    print(json.dumps(told))


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
