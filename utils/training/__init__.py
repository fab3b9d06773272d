"""Training runs: their folders, their comparison, and the monitor.

In: settings or a program of the user. Out: a run folder with stage times, trace and verdict, and a page that shows
runs as they grow.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
