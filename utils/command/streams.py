"""Write to streams that may die, such as a terminal that is closed or a file on a full disk: no work ends for that.

The runner loads it too, which loads little of ours, so it needs nothing that has to be installed.
"""

import contextlib
import os
from typing import TextIO


def open_standard() -> None:
    """Open what is closed of stdin, stdout and stderr to nowhere: the next file opened would take its place."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


def write(stream: TextIO | None, text: str) -> None:
    """Write a line and flush it; a stream that cannot take it leads nowhere from then on."""
    if stream is None:
        return
    try:
        stream.write(text + "\n")
        stream.flush()
    except (OSError, ValueError):  # ValueError: it is closed
        with contextlib.suppress(OSError, ValueError):  # what is in its buffer must not fail at the end of the program
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
