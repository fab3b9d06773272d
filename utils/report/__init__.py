"""The report that people read: `sources` reads what the steps left, one file per section says it, `assembly` joins.

A section is a function `section(data: ReportData) -> list[str]`; it writes nothing and changes nothing. Our own words
are ASCII, so that a console without UTF-8 shows them too.
"""
