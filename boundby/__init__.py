"""Boundby: what is your model bound by? `boundby.explain(model, batch)`; other names come from their modules."""

from typing import Any

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Return `explain`, which loads torch; nothing else here does."""
    if name == "explain":
        from boundby.explanation import explain

        return explain
    raise AttributeError(f"module 'boundby' has no attribute {name!r}")
