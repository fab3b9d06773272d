"""What a file holds, by hash: what a result rests on is verified by content where it is used.

A file is read again unless size, times, inode and device are those of an earlier reading and were settled then. The
change time tells of content that was swapped under the same size and time: no program can set it.
"""

import os
import time
from pathlib import Path

import msgspec

from boundby import files

SETTLED_NS = 2 * 10**9  # a file touched later than this before it was hashed may change again under the same times
LARGE_BYTES = 2**24  # from which a hash is kept for the next process: below, reading takes some 10 ms
MOST_KEPT = 1000

_Key = tuple[int, int, int, int, int]
_known: dict[str, tuple[_Key, str]] = {}


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of the file's content.

    A file is read once per process as long as its state stays the same, a large one once per user of this machine; in
    doubt it is read again. Raises OSError.
    """
    name = os.path.realpath(path)
    key, now = _key(name), time.time_ns()
    if max(key[1], key[2]) < now - SETTLED_NS:
        known = _known.get(name) or (_kept().get(name) if key[0] >= LARGE_BYTES else None)
        if known is not None and known[0] == key:
            return known[1]
    digest = files.sha256(name)
    _known.pop(name, None)
    if max(key[1], key[2]) < now - SETTLED_NS and _key(name) == key:
        _known[name] = key, digest
        if key[0] >= LARGE_BYTES:
            _keep(name)
    return digest


def _key(path: str) -> _Key:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev


def _store() -> Path:
    return files.user_cache() / "hashes.json"


def _kept() -> dict[str, tuple[_Key, str]]:
    try:
        return msgspec.json.decode(_store().read_bytes(), type=dict[str, tuple[_Key, str]])
    except (OSError, ValueError, RuntimeError):  # RuntimeError: there is no home
        return {}


def _keep(name: str) -> None:
    """Note the hash of a file for the next process, the latest ones last; where that cannot be, it is read again."""
    kept = {other: state for other, state in _kept().items() if other != name}
    latest = dict([*kept.items(), (name, _known[name])][-MOST_KEPT:])
    try:
        files.write_json(_store(), latest)
    except (OSError, ValueError, RuntimeError):  # ValueError: a name that is not UTF-8
        return
