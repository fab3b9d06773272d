"""Traces and layers for people: step 03, `boundby trace`, `boundby layers` and `boundby check-profile`.

In: the reference batch, a model, or any trace file. Out: the trace with its manifest, one JSON document, text, a
flame graph, a profile by layer; and whether a recorded profile is whole and true.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
