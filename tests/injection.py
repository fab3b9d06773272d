"""Make the n-th operation on files below a folder fail, or end the process there, or let the disk forget.

    with injected(folder, Fault("write", 7, errno.ENOSPC)): …

In-process and by functions of Python alone: what a library writes by itself, as the profiler its trace, is not seen.
`in_child` pays for imports once: it forks a process that has them, and a fork that dies costs nothing.
"""

import builtins
import contextlib
import csv
import errno
import fcntl
import importlib
import io
import json
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

KILLED, TORN, LOST_DATA, LOST_NAMES = "killed", "torn", "power lost", "power and names lost"
ERRORS = {
    "open": (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.EACCES),
    "read": (errno.EIO, errno.ESTALE),
    "write": (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG),
    "fsync": (errno.ENOSPC, errno.EIO, errno.EDQUOT),
    "rename": (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES),
    "unlink": (errno.EIO, errno.EROFS, errno.EACCES),
    "mkdir": (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMLINK),
    "lock": (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO),
}
DONE: list[tuple[str, str]] = []  # what was done with files so far, as (operation, path); a fork goes on with it
DISKS: list["Disk"] = []  # that of the block, where the power will be lost; a fork goes on with it too
SLICE_S = 0.5  # of waiting; a machine that stands still for longer counts as one
MOST_LOOKS, LOOK_S = 600, 0.05  # for processes that were told to end
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


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
        """The fault without its place."""
        if isinstance(self.what, signal.Signals):
            name = self.what.name
        elif callable(self.what):
            return self.what.__name__.replace("_", " ")
        else:
            name = errno.errorcode[self.what] if isinstance(self.what, int) else self.what
        return f"{self.operation}: {name}{', and from then on' if self.stays else ''}"


@dataclass
class Disk:
    """What would be left of a folder if the power went: content that was synced, under names that were."""

    root: Path
    synced: dict[int, bytes] = field(default_factory=dict)  # by inode
    names: dict[int, dict[str, int]] = field(default_factory=dict)  # by inode of a folder
    pins: dict[int, int] = field(default_factory=dict)  # an open file for each, so that no inode is given to another

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

    def take_over(self, other: "Disk", process: int) -> None:
        """Go on with what another process, which has not ended, knows of the same disk."""
        self.synced, self.names = other.synced, other.names
        for inode, pin in other.pins.items():
            if inode not in self.pins:
                self.pins[inode] = os.open(f"/proc/{process}/fd/{pin}", os.O_RDONLY)

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
        entries = [each for each in os.scandir(folder) if not each.is_symlink()]
        for each in entries:
            if each.inode() not in self.pins:
                self.pins[each.inode()] = os.open(each.path, os.O_RDONLY)
            if each.is_dir():
                self.names.setdefault(each.inode(), {})  # a new folder is empty as long as it is not synced itself
        return {each.name: each.inode() for each in entries}

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
    DONE.clear()
    top, real = f"{root.resolve()}{os.sep}", {"open": io.open, "os.open": os.open}
    disk = Disk(root.resolve()) if fault and fault.what in (LOST_DATA, LOST_NAMES) else None
    DISKS[:] = [disk] if disk else []

    def place(where: Any) -> str:
        path = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else os.fspath(where)
        return os.path.abspath(os.fsdecode(path))

    def reach(operation: str, where: Any, tear: Callable[[], object] | None = None) -> None:
        path = place(where)
        if not f"{path}{os.sep}".startswith(top):
            return
        DONE.append((operation, path))
        if fault is None or fault.operation != operation:
            return
        count = sum(each == operation for each, _ in DONE)
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
        if isinstance(file, int) or not f"{place(file)}{os.sep}".startswith(top):
            return real["open"](file, mode, buffering, encoding, errors, newline, closefd, opener)
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
        if disk and f"{place(descriptor)}{os.sep}".startswith(top):
            disk.sync(place(descriptor))

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
        yield DONE


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


def faults(done: list[tuple[str, str]], first: int = 0) -> Iterator[Fault]:
    """Yield every fault at every operation that an undisturbed run has `done`, after the `first` of each kind."""
    for operation, errors in ERRORS.items():
        count = sum(each == operation for each, _ in done)
        for number in range(first + 1, count + 1):
            yield from (Fault(operation, number, error) for error in errors)
            if operation in ("open", "write", "fsync", "rename", "mkdir"):
                full = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
                yield from (Fault(operation, number, error, stays=True) for error in errors if error in full)
            yield from (Fault(operation, number, signum) for signum in SIGNALS if operation in ("write", "rename"))
            if operation in ("write", "fsync", "rename", "unlink", "mkdir", "lock"):
                yield Fault(operation, number, KILLED)
            if operation == "write":
                yield Fault(operation, number, TORN)
            if operation in ("fsync", "rename", "unlink"):
                yield Fault(operation, number, LOST_DATA)
                yield Fault(operation, number, LOST_NAMES)


@dataclass(frozen=True)
class Ended:
    """How a forked child ended: its exit code, negative for a signal, None where it hung; and what it printed.

    `seconds` are those it took, without what the machine stood still for; `left` tells whether a process that it
    started went on.
    """

    code: int | None
    said: str
    done: list[tuple[str, str]]
    seconds: float
    left: bool


def in_child(
    act: Callable[[], int | None], root: Path | None = None, fault: Fault | None = None,
    kill_after_s: float | None = None, limit_s: float = 120.0,
) -> Ended:  # fmt: skip
    """Run `act` in a forked child, with `fault` below `root`, and kill it with all it started; return how it ended."""
    log = os.memfd_create("said")
    answer, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.setpgid(0, 0)
            for stream in (1, 2):
                os.dup2(log, stream)
            sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
            forget_handlers()
            with injected(root, fault) if root else contextlib.nullcontext([]) as done:
                code = act() or 0
            with os.fdopen(report, "w") as file:
                json.dump(done, file)
        except BaseException:
            os.write(log, traceback.format_exc().encode())  # the streams may be dead
        finally:
            os._exit(code)
    os.close(report)
    with contextlib.suppress(OSError):  # whoever comes first
        os.setpgid(pid, pid)
    code, done, seconds = _awaited(pid, answer, kill_after_s, limit_s)
    said = os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")
    os.close(log)
    return Ended(code, said, done, seconds, is_left(pid))


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


def forget_handlers() -> None:
    """Let every signal to stop do what it does to a new process."""
    for signum in SIGNALS:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)


class ForkedStep:
    """Stand in for the `subprocess.Popen` of a script of this project: a fork, which has its imports.

    It goes on with what was counted and synced before it, and whoever waits for it goes on with what it has.
    """

    def __init__(self, command: Sequence[str], preexec_fn: Callable[[], None], stdout: None = None) -> None:
        script = importlib.import_module(f"scripts.{Path(command[1]).stem}")
        self._report = os.memfd_create("report")
        self._line, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                self._line.close()
                preexec_fn()
                forget_handlers()
                code = script.main(command[2:])
                with open(self._report, "wb", closefd=False) as file:
                    pickle.dump((DONE, DISKS), file)
                theirs.send(b"ready")
                theirs.recv(1)  # what is pinned here must stay so until it is pinned there
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        theirs.close()

    def send_signal(self, signum: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, signum)

    def wait(self) -> int:
        """Wait for its end; return its exit code, negative for a signal."""
        with self._line, open(self._report, "rb") as report:
            if self._line.recv(5):  # nothing where it has died
                report.seek(0)  # a fork shares the place in the file
                done, disks = pickle.load(report)
                DONE[:] = done
                for disk, theirs in zip(DISKS, disks, strict=True):
                    disk.take_over(theirs, self.pid)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _awaited(
    pid: int, answer: int, kill_after_s: float | None, limit_s: float
) -> tuple[int | None, list[tuple[str, str]], float]:
    most_s = limit_s if kill_after_s is None else kill_after_s
    content, left_s, is_open = b"", most_s, True
    with open(os.pidfd_open(pid)) as ended, os.fdopen(answer, "rb") as report:
        while left_s > 0:
            before = time.monotonic()
            ready, _, _ = select.select([ended, *([report] if is_open else [])], [], [], min(left_s, SLICE_S))
            left_s -= min(time.monotonic() - before, SLICE_S)
            if report in ready:
                piece = os.read(report.fileno(), 1 << 16)
                content, is_open = content + piece, bool(piece)
            elif ended in ready:
                break
        hung = left_s <= 0 and kill_after_s is None
        if left_s <= 0:
            os.killpg(pid, signal.SIGKILL)  # it cannot be gone: nobody has asked for its exit code
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    done = [tuple(each) for each in json.loads(content)] if content else []
    return None if hung else code, done, most_s - left_s


def visits(results: Path) -> set[tuple]:
    """Return the committed visits of the sweep as (log, batch size, round, session)."""
    found = set()
    for log in results.rglob("02-visits-*.jsonl"):
        for line in log.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                visit = json.loads(line)
                found.add((log.name, visit["batch_size"], visit["round"], visit["session"]))
    return found


def unreadable(results: Path) -> list[str]:
    """Return what a reader of the results would stumble over."""
    import pyarrow.parquet

    problems = []
    for path in sorted(results.rglob("*")):
        if not path.is_file() or path.name.startswith(".tmp-"):
            continue
        try:
            if path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            elif path.suffix == ".csv":
                with path.open(encoding="utf-8", newline="") as file:
                    widths = {len(row) for row in csv.reader(file)}
                assert len(widths) == 1, f"rows of {widths} cells"
            elif path.suffix == ".parquet":
                pyarrow.parquet.read_table(path)
            elif path.suffix == ".png":
                assert path.read_bytes().endswith(b"IEND\xaeB`\x82"), "torn picture"
        except (ValueError, AssertionError, OSError) as error:
            problems.append(f"{path.name}: {error}")
    return problems
