"""What a file holds, by hash: what a result rests on is verified by content where it is used."""

import os
import time
from pathlib import Path

from boundby import files

SETTLED_NS = 2 * 10**9  # a file touched later than this before it was hashed may change again under the same times

_Key = tuple[int, int, int, int, int]
_known: dict[str, tuple[_Key, str]] = {}


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of the file's content.

    A file is read once per process as long as its size, times and inode stay the same and were settled when it was
    read; in doubt it is read again. Raises OSError.
    """
    name = os.path.abspath(path)
    key, now = _key(name), time.time_ns()
    if name in _known and _known[name][0] == key:
        return _known[name][1]
    found = files.sha256(name)
    _known.pop(name, None)
    if max(key[1], key[2]) < now - SETTLED_NS and _key(name) == key:
        _known[name] = key, found
    return found


def _key(path: str) -> _Key:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev
