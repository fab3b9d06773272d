"""Plan how to split a model over devices, and run that plan.

In: profiles by layer and a file of nodes. Out: a plan with its proof, a picture, and the run beside its prediction.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
