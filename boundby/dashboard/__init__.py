"""A profile by layer as one self-contained HTML page. Loads no torch, and plotly and jinja2 only to make a page."""

from boundby.dashboard.page import page

__all__ = ["page"]
