"""Layer by layer: what each module of a model costs, where it is called, and how far that can be trusted."""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
