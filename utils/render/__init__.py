"""What people read, as blocks that are rendered as text or as a page; the report and every tool build on it."""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
