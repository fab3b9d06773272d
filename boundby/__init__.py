"""Boundby: what is your model bound by? Public names are imported from their modules."""

__version__ = "0.1.0"
