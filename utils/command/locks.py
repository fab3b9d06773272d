"""Hold the lock of a file; a wait has a limit and is announced."""

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from boundby.files import naming
from utils.command.errors import EnvironmentLacksError, InputError

HAVE_NONE = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of a file system without locks
AT_ONCE_S = 1.0  # in which a short piece of work ends, so that nothing need be said


@contextlib.contextmanager
def held(path: Path, limit_s: float, note: Callable[[str], object], way_out: str) -> Iterator[None]:
    """Hold the lock at `path` in the block; one that is not free is waited for `limit_s` at most, which `note` is told.

    Raises InputError, with the `way_out`, when it is not free by then, and EnvironmentLacksError where
    the file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, fallback_to_soft=False)  # a soft lock outlives a holder that is killed
    try:
        with naming(path):
            try:
                lock.acquire(timeout=min(AT_ONCE_S, limit_s))
            except Timeout:
                if limit_s <= AT_ONCE_S:
                    raise
                note(f"waiting for another program, which works in {path.parent}, for {limit_s / 60:.0f} min at most")
                lock.acquire(timeout=limit_s)
    except Timeout:
        waited = f" for {limit_s / 60:.0f} min" if limit_s else ""
        raise InputError(f"{path.parent}: another program is writing there{waited}; {way_out}") from None
    except OSError as error:
        if error.errno not in HAVE_NONE:
            raise
        raise EnvironmentLacksError(
            f"{path}: the file system there has no locks ({error.strerror}), which keep two programs apart; "
            "choose a folder on another disk"
        ) from None
    try:
        yield
    finally:
        lock.release()
