"""The bytes of a trace file, decompressed piece by piece, so that neither a large file nor a zip bomb fills memory."""

import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from isal import igzip_lib  # three times as fast as zlib

from boundby import files

GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
ZSTD_MODULES = ("compression.zstd", "backports.zstd")  # of Python 3.14, and for those before
NO_ZSTD = (
    "it is zstd data, and nothing that unpacks it is installed: unpack it with `zstd -d`, or install backports.zstd"
)
PIECE_BYTES = 2**20  # what is decoded of it still fits a cache; 2**18 and 2**22 are slower by a tenth to a half


class Source:
    """Yields the JSON text of a trace in pieces of about `PIECE_BYTES`: plain, gzip or zstd.

    The content says which, not the suffix. `fault` says afterwards why the text ends early; None where it is whole.
    Nothing is unpacked ahead: a thread that does gets the interpreter only when the caller waits for it.
    """

    def __init__(self, path: Path) -> None:
        self.fault: str | None = None
        self._path = path

    def __iter__(self) -> Iterator[bytes]:
        """Raise OSError when the file cannot be read, and ValueError where nothing here unpacks it."""
        with files.naming(self._path), self._path.open("rb") as file:
            begin = file.read(len(ZSTD_MAGIC))
            file.seek(0)
            packed = iter(lambda: file.read(PIECE_BYTES), b"")
            if begin.startswith(GZIP_MAGIC):
                error: Any = igzip_lib.error  # its stubs call it a variable
                yield from self._unpacked(packed, "gzip", GZIP_MAGIC, _gzip, error)
            elif begin.startswith(ZSTD_MAGIC):
                zstd = _zstd()
                yield from self._unpacked(packed, "zstd", ZSTD_MAGIC, zstd.ZstdDecompressor, zstd.ZstdError)
            else:
                yield from packed

    def _unpacked(
        self, packed: Iterator[bytes], what: str, magic: bytes, make: Callable[[], Any], failure: type[Exception]
    ) -> Iterator[bytes]:
        """Yield the content of all members of a file, as far as it is sound; anything but another one is padding."""
        stream, piece = make(), b""
        while True:
            if stream.eof:
                behind = (more.lstrip(b"\0") for more in itertools.chain([stream.unused_data], packed))
                piece = next(filter(None, behind), b"")
                if not piece or not piece.startswith(magic[: len(piece)]):
                    return
                stream = make()
            elif stream.needs_input:
                piece = next(packed, b"")
                if not piece:
                    self.fault = f"the {what} data ends too early: the file was cut short"
                    return
            try:
                text = stream.decompress(piece, PIECE_BYTES)
            except failure as error:
                self.fault = f"the {what} data is damaged: {error}"
                return
            piece = b""
            if text:
                yield text


def _gzip() -> Any:
    return igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)


def _zstd() -> Any:
    for name in ZSTD_MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ValueError(NO_ZSTD)
