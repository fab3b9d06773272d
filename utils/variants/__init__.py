"""Step 05: `ways` to run texts, timed in `rounds`; `recommendation` has the rule, `comparison` puts all together."""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
