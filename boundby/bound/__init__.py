"""What a model is bound by, and what fixing that would gain: the answer.

In: a model and a batch (`explain`), or the measured facts of a run, a trace or a layer. A forward is recorded, its
operators are replayed, the time is split, fixes are predicted and tried, and the facts are judged. Out: a verdict
(bound, confidence, doubts, gains) and the card that says it. No decision reads a sentence: texts are made of values.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
