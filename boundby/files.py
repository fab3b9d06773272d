"""Write results so that a reader never meets half a file: the only writer of the library and the pipeline.

Every file is written to a temporary name in its own folder, flushed to disk and renamed. A program killed at any
instruction leaves either the old file or the new one, and at worst a `.tmp-*` file that `remove_orphans` sweeps. Its
name has the process and the machine of its writer, since several machines may share a folder.
"""

import contextlib
import csv
import hashlib
import io
import itertools
import json
import math
import os
import platform
import re
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

import msgspec

Value = TypeVar("Value")

TEMPORARY_PREFIX = ".tmp-"
WRITER = re.compile(re.escape(TEMPORARY_PREFIX) + r"(\d+)-([0-9a-f]{8})\b")  # its process and its machine
SILENT_S = 24 * 3600.0  # after which a writer elsewhere, who cannot be asked, is taken for dead
CLOCKS_DIFFER_S = 60.0  # that of the file system, and that of the table of processes
LARGEST_DOCUMENT = 64 * 2**20  # bytes: ours have some MB; as values of Python it may take forty times as much memory
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")  # CWE-1236: a spreadsheet would run such a cell


def process_space() -> str:
    """Return which boot of which machine, and which namespace there, gives processes their numbers; " " if unknown."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{boot} {namespace}"


# In a name, short: where a process id means something. Two containers may have one name and other processes.
HOST = hashlib.sha256(f"{platform.node()} {process_space()}".encode()).hexdigest()[:8]


def user_cache() -> Path:
    """Return the folder for what may be made again at any time, of this user. Raises RuntimeError without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "boundby"


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; when the block ends well it becomes `path`, else it is removed.

    The temporary name ends like the final one, so a writer that chooses its format by suffix chooses the same.
    """
    path = Path(path)
    temporary = path.with_name(temporary_name(path.name))
    with naming(path):
        make_folder(path.parent)
        try:
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
        finally:
            with contextlib.suppress(OSError):  # it is swept later, and must hide no error that led here
                temporary.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Make a folder with the folders above it; when this returns, their names are on disk."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Have an OSError of the block that names no file, or a temporary one, name `path`."""
    try:
        yield
    except OSError as error:
        named = error.filename is not None and not Path(os.fsdecode(error.filename)).name.startswith(TEMPORARY_PREFIX)
        if named or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def temporary_name(name: str) -> str:
    """Return a new name, ending in `name`, for a file that is swept once this process is done or dead."""
    return f"{TEMPORARY_PREFIX}{os.getpid()}-{HOST}-{uuid.uuid4().hex[:8]}-{name}"


def write_bytes(path: str | Path, content: bytes) -> None:
    """Replace the file at `path` by `content`, all or nothing."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: str | Path, text: str) -> None:
    """Replace the file at `path` by `text` in UTF-8, all or nothing."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """Replace the file at `path` by `value` as strict JSON, all or nothing.

    Raises ValueError naming the place of a NaN or an infinity: unknown is None with a reason beside it.
    """
    write_text(path, encode_json(value, indent=2) + "\n")


def encode_json(value: Any, indent: int | None = None, *, ascii_only: bool = False) -> str:
    """Return `value` as strict JSON; NumPy scalars become numbers, records objects.

    Raises ValueError on NaN or infinity.
    """
    where = _path_to_non_finite(value, "$")
    if where:
        raise ValueError(f"{where} is NaN or infinite; store None and a reason instead")
    return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=ascii_only, default=_plain)


def read_json(path: str | Path) -> Any:
    """Return the JSON value stored at `path`. Raises OSError, or ValueError that names the file."""
    try:
        return json.loads(read_bytes(path).decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {_message(error)}") from None


def read_as(path: str | Path, kind: type[Value]) -> Value:
    """Return the JSON stored at `path` as a `kind`, a type that `msgspec` reads, without what that does not name.

    Raises OSError, or ValueError that names the file and the place in it for any other shape.
    """
    try:
        return msgspec.json.decode(read_bytes(path), type=kind, dec_hook=_from_plain)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {_message(error)}") from None


def read_bytes(path: str | Path, most: int = LARGEST_DOCUMENT) -> bytes:
    """Return the content of a plain file. Raises OSError, or ValueError for anything else and for more than `most`."""
    with naming(path), _plain_file(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most >> 20} MiB")
    return content


def write_csv(path: str | Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> int:
    """Replace `path` by a CSV table with these columns, all or nothing; return the number of rows.

    None becomes an empty cell. Text that a spreadsheet would take for a formula, a column's name too, is prefixed with
    an apostrophe; numbers are left alone. Use `write_table` for data that must be read back unchanged.
    """
    shown = {name: _harmless(name) for name in columns}
    guarded = ({head: _harmless(row.get(name)) for name, head in shown.items()} for row in rows)
    return write_table(path, guarded, list(shown.values()))


def write_table(path: str | Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> int:
    """Replace `path` by a CSV table of the values as they are, all or nothing; return the number of rows."""
    count = 0
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(_LineFeeds(file), columns, extrasaction="ignore")
        writer.writeheader()
        for row in rows:
            writer.writerow(row)
            count += 1
    return count


def append_json_line(path: str | Path, value: Any) -> None:
    """Append `value` as one line of JSON and wait until it is on disk.

    A line torn by an earlier kill is closed first, so that it spoils itself alone.
    """
    path = Path(path)
    make_folder(path.parent)
    line = (encode_json(value) + "\n").encode("utf-8")
    is_new = not path.exists()
    with naming(path), path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, io.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync(path.parent)


def read_json_lines(path: str | Path) -> list[Any]:
    """Return the values of a log written by `append_json_line`, without lines that a kill has torn; [] if absent."""
    try:
        with naming(path):
            file = _plain_file(path)
    except FileNotFoundError:
        return []
    values = []
    with naming(path), file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                values.append(json.loads(line.decode("utf-8", errors="replace"), parse_constant=_refuse))
    return values


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of the file's content in hexadecimal."""
    with naming(path), Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of(value: Any) -> str:
    """Return the SHA-256 of a JSON value, independent of the order of its keys."""
    canonical = json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False, default=_plain)
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


def remove_orphans(folder: str | Path, recursive: bool = True) -> int:
    """Remove temporary files in (and below) `folder` whose writer is no longer alive; return how many.

    One of another machine counts as alive until a day after it has last written to the file.
    """
    removed = 0
    pattern = f"{TEMPORARY_PREFIX}*"
    for path in Path(folder).rglob(pattern) if recursive else Path(folder).glob(pattern):
        if path.is_file() and _is_orphan(path):
            path.unlink(missing_ok=True)
            removed += 1
    return removed


def is_alive(pid: int, since_unix_s: float) -> bool:
    """Tell whether a process of this number lives here that may have written then; a later one may have got it."""
    if pid == os.getpid():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user, whose processes may be hidden
        return True
    import psutil  # takes 10 ms, and is needed where a process has the number of a writer

    try:
        return bool(psutil.Process(pid).create_time() <= since_unix_s + CLOCKS_DIFFER_S)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def _plain_file(path: str | Path) -> BinaryIO:
    """Return a plain file, opened: a pipe or a device could be read for ever."""
    descriptor = os.open(os.fspath(path), os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no plain file")
    return open(descriptor, "rb")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _message(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


class _LineFeeds:
    """Ends rows with a line feed alone; if `csv` did so itself, it would leave a carriage return in a cell unquoted."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, row: str) -> None:
        self._file.write(row.removesuffix("\r\n") + "\n")


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_orphan(path: Path) -> bool:
    writer = WRITER.match(path.name)
    if writer is None:
        return False
    try:
        written_unix_s = path.stat().st_mtime
    except FileNotFoundError:  # its writer has just finished
        return False
    if writer[2] == HOST:
        return not is_alive(int(writer[1]), written_unix_s)
    return time.time() - written_unix_s > SILENT_S


def _from_plain(kind: type, value: Any) -> Any:
    return Path(value) if kind is Path else value  # a path is text in JSON


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):  # NumPy and torch scalars
        return value.item()
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")


def _path_to_non_finite(value: Any, path: str) -> str | None:
    if hasattr(value, "dtype") or isinstance(value, msgspec.Struct):  # float32 is no float
        value = _plain(value)
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    if isinstance(value, Mapping):
        parts: Iterable[tuple[Any, str]] = ((item, f"{path}.{key}") for key, item in value.items())
    elif isinstance(value, list | tuple):
        parts = ((item, f"{path}[{index}]") for index, item in enumerate(value))
    else:
        return None
    return next(filter(None, itertools.starmap(_path_to_non_finite, parts)), None)


def _harmless(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value
