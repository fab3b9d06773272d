"""The model: where its files are, whether they are whole, and what it is for.

In: a name on the Hub or a folder, and a task. Out: a loaded model with its tokenizer and dtype, its identity, and
the check that a batch gives a text what it gets alone. Nothing is unpickled, and code of others runs only where the
user says so.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
