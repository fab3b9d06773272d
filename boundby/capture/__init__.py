"""Record a few steps of a program with torch.profiler: the one wrapper of it, for the pipeline and every callback.

`capture` drives a callable; `Recorder` follows a loop that somebody else drives. The profiler must not harm what it
watches: a failure of the profiler, a missing device or a trace that grows too big ends as a remark in the manifest, and
only the program's own exceptions are raised. The trace is exported once and every table is derived from that file
(`boundby.trace`). The records of `manifest.json` load no torch; the names that record do.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
