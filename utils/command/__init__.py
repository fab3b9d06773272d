"""ROOM."""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
