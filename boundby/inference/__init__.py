"""From texts to predictions at the machine's limit: tokens, batches, strategies, precision.

In: a classifier, its tokenizer and texts. Out: float32 logits in the order of the texts, by the fastest strategy
(packed, sorted, compiled, in fewer bits) that a check against the model's own forward allows, and what that does to
the labels.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
