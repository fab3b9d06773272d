"""Record a few steps of a program with torch.profiler: the one wrapper of it, for the pipeline and every callback.

In: a callable, or a loop that somebody else drives. Out: one trace file and its manifest; every table is made of
that file by `boundby.trace`. A failure of the profiler is a remark in the manifest, and only the program's own
exceptions are raised.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
