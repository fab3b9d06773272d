"""What a trace of torch.profiler says, ours or anyone's. Loads neither torch nor pandas.

In: a file, plain or packed with gzip or zstd. Out: columns of integer nanoseconds, links from launch to kernel,
where the time of every device went and why it was idle, memory, and the difference between two traces.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
