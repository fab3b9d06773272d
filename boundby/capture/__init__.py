"""Record a few steps of a program with torch.profiler: the one wrapper of it, for the pipeline and every callback.

`capture` drives a callable; `Recorder` follows a loop that somebody else drives. The profiler must not harm what it
watches: a failure of the profiler, a missing device or a trace that grows too big ends as a remark in the manifest, and
only the program's own exceptions are raised. The trace is exported once and every table is derived from that file
(`boundby.trace`). The records of `manifest.json` load no torch; the names that record do.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from boundby.capture.manifest import MAX_TRACE_MB, CaptureManifest, CaptureOptions, Cycle
from boundby.capture.remarks import Remark

if TYPE_CHECKING:
    from boundby.capture.engine import capture
    from boundby.capture.export import Naming, naming_of_process, trace_limit
    from boundby.capture.instruments import nsight_variable
    from boundby.capture.recorder import Recorder
    from boundby.capture.schedule import Schedule
    from boundby.capture.session import Session

__all__ = [
    "MAX_TRACE_MB",
    "CaptureManifest",
    "CaptureOptions",
    "Cycle",
    "Naming",
    "Recorder",
    "Remark",
    "Schedule",
    "Session",
    "capture",
    "naming_of_process",
    "nsight_variable",
    "trace_limit",
]
_WITH_TORCH = {
    "capture": "engine",
    "Naming": "export",
    "naming_of_process": "export",
    "trace_limit": "export",
    "nsight_variable": "instruments",
    "Recorder": "recorder",
    "Schedule": "schedule",
    "Session": "session",
}


def __getattr__(name: str) -> Any:
    """Return a name whose module loads torch."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'boundby.capture' has no attribute {name!r}")
    return getattr(import_module(f"boundby.capture.{_WITH_TORCH[name]}"), name)
