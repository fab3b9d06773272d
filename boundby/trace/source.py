"""The bytes of a trace file, decompressed piece by piece, so that neither a large file nor a zip bomb fills memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from isal import isal_zlib  # three times as fast as zlib

GZIP_MAGIC = b"\x1f\x8b"
GZIP_WINDOW = 31  # zlib's number for "with the header and checksum of gzip"
PIECE_BYTES = 2**20  # what is decoded of it still fits a cache; 2**18 and 2**22 are slower by a tenth to a half


class Source:
    """Yields the JSON text of a trace, plain or gzip whatever its suffix, in pieces of about `PIECE_BYTES`.

    `fault` says afterwards why the text ends early; None where it is whole. Nothing is unpacked ahead: a thread that
    does gets the interpreter only when the caller waits for it.
    """

    def __init__(self, path: Path) -> None:
        self.fault: str | None = None
        self._path = path

    def __iter__(self) -> Iterator[bytes]:
        """Raise OSError when the file cannot be read."""
        with self._path.open("rb") as file:
            packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            file.seek(0)
            yield from self._unpacked(file) if packed else _plain(file)

    def _unpacked(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the content of all members of a gzip file, as far as it is sound."""
        stream, packed = isal_zlib.decompressobj(GZIP_WINDOW), b""
        wanted, gathered = PIECE_BYTES, []
        while packed := packed or file.read(PIECE_BYTES):
            if stream.eof:  # anything but another member is padding
                packed = packed.lstrip(b"\0")
                if not packed:
                    continue
                if not packed.startswith(GZIP_MAGIC[: len(packed)]):
                    break
                stream = isal_zlib.decompressobj(GZIP_WINDOW)
            try:
                gathered.append(stream.decompress(packed, wanted))
            except isal_zlib.error as error:  # type: ignore[misc]  # its stubs call it a variable
                self.fault = f"the gzip data is damaged: {error}"
                break
            packed = stream.unused_data if stream.eof else stream.unconsumed_tail
            wanted -= len(gathered[-1])
            if not wanted:
                yield b"".join(gathered)
                wanted, gathered = PIECE_BYTES, []
        if self.fault is None and not stream.eof:
            self.fault = "the gzip data ends too early: the file was cut short"
        if any(gathered):
            yield b"".join(gathered)


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(PIECE_BYTES):
        yield piece
