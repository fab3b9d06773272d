"""The report that people read: `sources` reads what the steps left, the sections tell it, `assembly` joins them.

A section is a function of `ReportData`; it returns blocks and pictures in their places, writes nothing and changes
nothing. `plain_text` and `html_page` render the blocks. Our own words are ASCII, so that a console without UTF-8 shows
them too.
"""

from boundby import hand_on

__getattr__, __dir__, __all__ = hand_on(__name__, __file__)
