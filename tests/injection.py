"""Make the n-th operation on files below a folder fail, or end the process there, or let the disk forget.

    with injected(folder, Fault("write", 7, errno.ENOSPC)): …

In-process and by functions of Python alone: what a library writes by itself, as the profiler its trace, is not seen.
`in_child` pays for imports once: it forks a process that has them, and a fork that dies costs nothing.
"""

import builtins
import contextlib
import errno
import fcntl
import io
import json
import os
import select
import shutil
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

KILLED, TORN, LOST_DATA, LOST_NAMES = "killed", "torn", "power lost", "power and names lost"
ERRORS = {  # one of each kind: the disk is full, it fails, this user may not, the file system has no locks
    "open": (errno.ENOSPC, errno.EACCES),
    "read": (errno.EIO,),
    "write": (errno.ENOSPC, errno.EIO),
    "fsync": (errno.ENOSPC, errno.EIO),
    "rename": (errno.ENOSPC, errno.EACCES),
    "unlink": (errno.EIO,),
    "mkdir": (errno.ENOSPC,),
    "lock": (errno.ENOLCK,),
}
KILLS = {  # how a process ends at which operations
    KILLED: ("write", "fsync", "rename", "unlink", "mkdir", "lock"),
    TORN: ("write",),
    LOST_DATA: ("fsync", "rename", "unlink"),
    LOST_NAMES: ("fsync", "rename", "unlink"),
    signal.SIGINT: ("write", "rename"),
    signal.SIGTERM: ("write", "rename"),
}
LIMIT_S = 300.0  # after which a child hangs
MOST_LOOKS, LOOK_S = 600, 0.05  # for processes that were told to end


@dataclass(frozen=True)
class Fault:
    """What happens at the operation `number`, counted from 1 among its own kind.

    It is an error number, a signal, an end, or something that is done, such as an edit of a file. With `stays` every
    later one of the kind fails too, as on a disk that is full.
    """

    operation: str
    number: int
    what: int | signal.Signals | Literal["killed", "torn", "power lost", "power and names lost"] | Callable[[], object]
    stays: bool = False

    @property
    def kind(self) -> str:
        """The fault without its number."""
        if callable(self.what):
            return self.what.__name__
        number = isinstance(self.what, int) and not isinstance(self.what, signal.Signals)
        name = errno.errorcode[self.what] if number else getattr(self.what, "name", self.what)
        return f"{self.operation}: {name}{', and from then on' if self.stays else ''}"


@dataclass
class Disk:
    """What would be left of a folder if the power went: content that was synced, under names that were."""

    root: Path
    synced: dict[int, bytes] = field(default_factory=dict)  # by inode
    names: dict[int, dict[str, int]] = field(default_factory=dict)  # by inode of a folder
    pins: dict[int, int] = field(default_factory=dict)  # an open file for entry, so that no inode is given to another

    def __post_init__(self) -> None:
        for folder, _, names in os.walk(self.root):
            self.sync(folder)
            for name in names:
                self.sync(f"{folder}/{name}")

    def sync(self, path: str) -> None:
        """Note that this file or folder is on disk as it is."""
        pin = os.open(path, os.O_RDONLY)
        inode = os.fstat(pin).st_ino
        if inode not in self.pins:
            self.pins[inode] = pin
        if os.path.isdir(path):
            self.names[inode] = self._listed(path)
        else:
            self.synced[inode] = os.pread(pin, os.fstat(pin).st_size, 0)
        if self.pins[inode] != pin:
            os.close(pin)

    def lose_power(self, forgets_names: bool) -> None:
        """Bring the folder to what is on disk; unless it `forgets_names`, those of now are."""
        if not forgets_names:
            for folder, _, _ in os.walk(self.root):
                self.names[os.stat(folder).st_ino] = self._listed(folder)
        left = self.root.with_name(f"left-{uuid.uuid4().hex}")
        self._restore(os.stat(self.root).st_ino, left)
        shutil.rmtree(self.root)
        left.rename(self.root)

    def _listed(self, folder: str) -> dict[str, int]:
        entries = [entry for entry in os.scandir(folder) if not entry.is_symlink()]
        for entry in entries:
            if entry.inode() not in self.pins:
                self.pins[entry.inode()] = os.open(entry.path, os.O_RDONLY)
            if entry.is_dir():
                self.names.setdefault(entry.inode(), {})  # a new folder is empty as long as it is not synced itself
        return {entry.name: entry.inode() for entry in entries}

    def _restore(self, inode: int, folder: Path) -> None:
        folder.mkdir()
        for name, inner in self.names[inode].items():
            if inner in self.names:
                self._restore(inner, folder / name)
            else:
                (folder / name).write_bytes(self.synced.get(inner, b""))


class _Raw(io.FileIO):
    """A file whose reads and writes are counted."""

    def __init__(self, reach: Callable[..., None], path: Any, mode: str, closefd: bool, opener: Any) -> None:
        super().__init__(path, mode, closefd, opener)
        self._reach = reach

    def write(self, data: Any) -> int:
        self._reach("write", self.name, lambda: super(_Raw, self).write(bytes(data)[: len(data) // 2]))
        return super().write(data)

    def readinto(self, buffer: Any) -> int:
        self._reach("read", self.name)
        return super().readinto(buffer)

    def readall(self) -> bytes:
        self._reach("read", self.name)
        return super().readall()

    def read(self, size: int = -1) -> bytes:
        self._reach("read", self.name)
        return super().read(size)


@contextlib.contextmanager
def injected(root: Path, fault: Fault | None = None) -> Iterator[list[tuple[str, str]]]:
    """Count what is done with files below `root` in the block, and let `fault` happen; yield (operation, path)s."""
    performed: list[tuple[str, str]] = []
    top, real_open = f"{root.resolve()}{os.sep}", io.open
    disk = Disk(root.resolve()) if fault and fault.what in (LOST_DATA, LOST_NAMES) else None

    def path_of(where: Any) -> str:
        path = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else os.fspath(where)
        return os.path.abspath(os.fsdecode(path))

    def reach(operation: str, where: Any, tear: Callable[[], object] | None = None) -> None:
        path = path_of(where)
        if not f"{path}{os.sep}".startswith(top):
            return
        performed.append((operation, path))
        if fault is None or fault.operation != operation:
            return
        count = sum(name == operation for name, _ in performed)
        if count == fault.number or (fault.stays and count > fault.number):
            _befall(fault, None if isinstance(where, int) or operation in ("read", "write") else path, disk, tear)

    def counted(operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(where: Any, *others: Any, **options: Any) -> Any:
            if options.get("dir_fd") is None:
                reach(operation, where)
            return function(where, *others, **options)

        return call

    def opened(
        file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None, newline: Any = None,
        closefd: bool = True, opener: Any = None,
    ) -> Any:  # fmt: skip
        if isinstance(file, int) or not f"{path_of(file)}{os.sep}".startswith(top):
            return real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        reach("open", file)
        raw: Any = _Raw(reach, file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        kind = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
        buffer = kind(raw, buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)
        if "b" in mode:
            return buffer
        text = io.TextIOWrapper(buffer, io.text_encoding(encoding), errors, newline, buffering == 1)
        text.mode = mode
        return text

    def synced(descriptor: int, fsync: Callable[[int], None] = os.fsync) -> None:
        reach("fsync", descriptor)
        fsync(descriptor)
        if disk and f"{path_of(descriptor)}{os.sep}".startswith(top):
            disk.sync(path_of(descriptor))

    def locked(descriptor: Any, operation: int, flock: Callable[..., None] = fcntl.flock) -> None:
        if operation != fcntl.LOCK_UN:
            reach("lock", descriptor if isinstance(descriptor, int) else descriptor.fileno())
        flock(descriptor, operation)

    with contextlib.ExitStack() as patches:
        for module in (io, builtins):
            patches.enter_context(patch.object(module, "open", opened))
        names = {"rename": "rename", "replace": "rename", "unlink": "unlink", "remove": "unlink", "mkdir": "mkdir"}
        for name, operation in {**names, "open": "open"}.items():
            patches.enter_context(patch.object(os, name, counted(operation, getattr(os, name))))
        patches.enter_context(patch.object(os, "fsync", synced))
        patches.enter_context(patch.object(fcntl, "flock", locked))
        yield performed


def _befall(fault: Fault, path: str | None, disk: Disk | None, tear: Callable[[], object] | None) -> None:
    if isinstance(fault.what, signal.Signals):
        os.killpg(0, fault.what)  # as a terminal sends it
        return
    if callable(fault.what):
        fault.what()
        return
    if isinstance(fault.what, int):
        raise OSError(fault.what, os.strerror(fault.what), *([path] if path else []))
    if disk:
        disk.lose_power(forgets_names=fault.what == LOST_NAMES)
        os.killpg(0, signal.SIGKILL)
    elif fault.what == TORN and tear:
        tear()
    os.kill(os.getpid(), signal.SIGKILL)


def faults(done: list[tuple[str, str]]) -> Iterator[Fault]:
    """Yield every fault at every operation that an undisturbed run has `done`."""
    for operation, errors in ERRORS.items():
        for number in range(1, 1 + sum(name == operation for name, _ in done)):
            yield from (Fault(operation, number, error) for error in errors)
            yield from (Fault(operation, number, error, stays=True) for error in errors if error == errno.ENOSPC)
            yield from (Fault(operation, number, kill) for kill, operations in KILLS.items() if operation in operations)


@dataclass(frozen=True)
class Ended:
    """How a forked child ended: its exit code, negative for a signal; what it printed and did with files.

    `left` tells whether a process that it started went on.
    """

    code: int
    said: str
    done: list[tuple[str, str]]
    seconds: float
    left: bool


def in_child(
    act: Callable[[], int | None], root: Path | None = None, fault: Fault | None = None, kill_after_s: float = LIMIT_S
) -> Ended:
    """Run `act` in a forked child, with `fault` below `root`, and kill it with all it started; return how it ended."""
    log, report = os.memfd_create("said"), os.memfd_create("done")
    began, pid = time.monotonic(), os.fork()
    if pid == 0:
        code = 70
        try:
            os.setpgid(0, 0)
            for stream in (1, 2):
                os.dup2(log, stream)
            sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with injected(root, fault) if root else contextlib.nullcontext([]) as done:
                code = act() or 0
            os.write(report, json.dumps(done).encode())
        except BaseException:
            os.write(log, traceback.format_exc().encode())
        finally:
            os._exit(code)
    with contextlib.suppress(OSError):  # whoever comes first
        os.setpgid(pid, pid)
    with open(os.pidfd_open(pid)) as ended:
        if not select.select([ended], [], [], kill_after_s)[0]:
            os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    said, done = (os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace") for file in (log, report))
    os.close(log)
    os.close(report)
    operations = [(operation, path) for operation, path in json.loads(done or "[]")]
    return Ended(code, said, operations, time.monotonic() - began, is_left(pid))


def is_left(group: int) -> bool:
    """Tell whether a process of the group is still there after a while; end it then."""
    for _ in range(MOST_LOOKS):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(LOOK_S)
    os.killpg(group, signal.SIGKILL)
    return True
