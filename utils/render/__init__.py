"""Blocks of text, tables and figures, rendered for a terminal, a page or Markdown.

In: blocks. Out: plain text, an HTML page that needs no network, Markdown, a flame graph.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
