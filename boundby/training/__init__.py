"""The stages of a training loop, timed as it runs, and what the loop is bound by.

In: a loop (`ProfilerManager`), a Trainer of transformers or Lightning (their callbacks), or a script (`boundby
train`). Out: files that grow with the run and can be read at any time, seconds by stage, and a verdict. Only what
runs loads torch.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
