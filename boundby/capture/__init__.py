"""Record a few steps of a program with torch.profiler: the one wrapper of it, for the pipeline and every callback.

`capture` drives a callable; `Recorder` follows a loop that somebody else drives. The profiler must not harm what it
watches: a failure of the profiler, a missing device or a trace that grows too big ends as a remark in the manifest, and
only the program's own exceptions are raised. The trace is exported once and every table is derived from that file
(`boundby.trace`).
"""

from boundby.capture.engine import capture
from boundby.capture.export import Naming, naming_of_process
from boundby.capture.instruments import nsight_variable
from boundby.capture.manifest import CaptureManifest, CaptureOptions, Cycle
from boundby.capture.recorder import Recorder
from boundby.capture.schedule import Schedule
from boundby.capture.session import Session
from boundby.remarks import Remark

__all__ = [
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
]
