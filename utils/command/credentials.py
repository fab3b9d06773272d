"""Cut credentials from what is recorded or printed: the one place that knows how they look in a text.

The runner loads it too, which loads nothing else of ours, so it needs nothing that has to be installed.
"""

import argparse
import difflib
import json
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from boundby.cli import COMMANDS, IS_INSTALLED, PIPELINE

REMOVED = "***"
# `//user:password@`; a password may hold "/", "@" or ":", but what begins with a port and a path is no user.
USER = re.compile(r"""(?<=://)(?:[^\s"'<>/?#]*@|[^\s"'<>/?#:@]*:(?!\d*[/?#])[^\s"'<>]*@)""")
# Amazon, Google, Azure and CloudFront sign by such parameters; others carry a token or a key.
SIGNATURE = re.compile(
    r"""(?i)(?<=[?&;])([\w.%-]*(?:sig|signature|credential|token|key|key-pair-id|secret|passw\w*|pwd|auth|policy)"""
    r"""[\w.%-]*=)[^\s&;#"'<>]+"""
)
TOKEN = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|(?:AKIA|ASIA)[A-Z0-9]{12,})\b")


def without(text: str) -> str:
    """Return `text` with `***` for the user info of its URLs, the values of parameters that sign them, and tokens."""
    if "://" in text:
        text = SIGNATURE.sub(rf"\g<1>{REMOVED}", USER.sub(f"{REMOVED}@", text))
    return TOKEN.sub(REMOVED, text)


def removed(value: Any) -> Any:
    """Return a JSON value with `without` applied to each of its texts, keys too."""
    if isinstance(value, str):
        return without(value)
    if isinstance(value, dict):
        return {without(key) if isinstance(key, str) else key: removed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [removed(item) for item in value]
    return value


class Parser(argparse.ArgumentParser):
    """A command line whose usage errors repeat no credentials, and whose help names commands as they are typed here."""

    def __init__(self, *, description: str | None = None, **options: Any) -> None:
        for word, (file, _) in COMMANDS.items() if IS_INSTALLED else ():
            description = (description or "").replace(f"python {file}", f"boundby {word}")
            if Path(sys.argv[0]).resolve() == PIPELINE / file:
                options = {"prog": f"boundby {word}", **options}
        super().__init__(description=description, **options)
        self._is_documented = False

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and note whether an error is to be a document."""
        self._is_documented = "--json" in (sys.argv[1:] if args is None else args)
        return super().parse_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and end the program with 2."""
        message = without(message.replace(", key.sub=value", ""))  # which argparse calls required beside one that is
        unknown = message.removeprefix("unrecognized arguments: ").split()[0]
        near = difflib.get_close_matches(unknown.partition("=")[0], self._option_string_actions, 1)
        if message.startswith("unrecognized") and near:
            message += f"; did you mean {near[0]}?"
        if self._is_documented:
            sys.stdout.write(json.dumps({"error": message, "exit_code": 2}) + "\n")
        super().error(message)
