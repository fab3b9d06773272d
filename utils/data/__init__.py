"""The labelled texts: `sources` reads them, `checks` looks at each row, `normalised` keeps the copy that steps read."""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
