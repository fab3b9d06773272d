"""The numbered steps: what each reads and writes, whether it must run, and the record that it has.

In: settings and what lies in the results folder. Out: a decision with its reason, receipts, run.json, and how long a
step takes.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
