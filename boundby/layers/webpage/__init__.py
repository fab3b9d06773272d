"""What the HTML pages of ours have in common: a base style, and one strict way to make them. Loads no torch."""

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent


def environment(templates: Path, finalize: Callable[[Any], Any] | None = None) -> "Environment":
    """Return what makes pages of the templates in a folder, which may include `base.css`; all text is escaped.

    `finalize` is given everything that a template prints. Raises ImportError where jinja2 is missing.
    """
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader([templates, FOLDER]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["csp_source"] = csp_source
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return made


def csp_source(script: str) -> str:
    """Return the source expression by which a Content-Security-Policy allows this very script and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode('ascii')}'"
