"""The report that people read.

In: what the steps left. Out: text, page and pictures of a run, its card, its summary, its export, and what a dry run
would do. A section is a function of `ReportData`; it returns blocks and figures, writes nothing and changes nothing.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
