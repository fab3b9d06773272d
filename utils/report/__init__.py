"""The report that people read: `sources` reads what the steps left, one file per section says it, `assembly` joins.

A section is a function `section(data: ReportData) -> list[Block]`; it writes nothing and changes nothing. `plain_text`
and `html_page` render the blocks. Our own words are ASCII, so that a console without UTF-8 shows them too.
"""
