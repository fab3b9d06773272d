"""What this machine is, can do, and does meanwhile.

In: a device. Out: its description and identity, its measured ceilings (FLOP/s by dtype, bytes/s, the cost of a
dispatch), memory in use, readings of power, clocks and load while something runs, joules, and what else disturbed
the machine.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
