"""Chrome traces of torch.profiler, ours or anyone's: columns, tables, causes. Loads neither torch nor pandas.

`table` turns a file into columns of integer nanoseconds and `analysis` these into what they say: where the time of
every device went, and why it was idle. `operators` has the calls of operators and the folded Python stacks.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
