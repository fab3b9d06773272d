"""The work of a forward: FLOPs and bytes by operator as eager torch does them, and what a formula says they should be.

`counter` watches a call, `operators` knows what one operator does, `transformer` has the formulas and the work that
would remain without padding.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
