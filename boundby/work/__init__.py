"""What a forward has to do: FLOPs and bytes by operator, and the least time that limits allow for them.

In: a call, or the sizes of a transformer. Out: work by operator as eager torch does it, what a formula says it
should be, the work that padding adds, and the roofline's least time.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
