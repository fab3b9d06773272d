"""The stages of a training loop: timed as it runs, written as it runs, and read again at any time.

Nothing here loads torch but an enabled `ProfilerManager`, when it starts, and `boundby.training.cuda`.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
