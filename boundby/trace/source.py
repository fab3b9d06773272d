"""The bytes of a trace file, decompressed piece by piece, so that neither a large file nor a zip bomb fills memory."""

import importlib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from isal import isal_zlib  # three times as fast as zlib

from boundby import files

GZIP_MAGIC = b"\x1f\x8b"
XZ_MAGIC, BZIP2_MAGIC, ZSTD_MAGIC, ZIP_MAGIC = b"\xfd7zXZ\x00", b"BZh", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"
# What no well-kept library here unpacks, and how to get at what is in it.
NAMED = {
    b"\x04\x22\x4d\x18": ("lz4 data", "unpack it with `lz4 -d`"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it with `7z x`"),
    b"\xff\xfe": ("text in UTF-16", "write it as UTF-8"),
    b"\xfe\xff": ("text in UTF-16", "write it as UTF-8"),
}
ZSTD_MODULES = ("compression.zstd", "backports.zstd", "pyzstd", "zstandard")  # the first three are of one interface
NO_ZSTD = "it is zstd data, and no library that unpacks it is installed: unpack it with `zstd -d`, or install zstandard"
GZIP_WINDOW = 31  # zlib's number for "with the header and checksum of gzip"
PIECE_BYTES = 2**20  # what is decoded of it still fits a cache; 2**18 and 2**22 are slower by a tenth to a half
MOST_UNPACKER_BYTES = 2**28  # that the header of an xz file may ask for; `xz -9` takes 65 MB


class Source:
    """Yields the JSON text of a trace in pieces of about `PIECE_BYTES`: plain, gzip, xz, bzip2, zstd, or one in a zip.

    The content says which, not the suffix. `fault` says afterwards why the text ends early; None where it is whole.
    Nothing is unpacked ahead: a thread that does gets the interpreter only when the caller waits for it.
    """

    def __init__(self, path: Path) -> None:
        self.fault: str | None = None
        self._path = path

    def __iter__(self) -> Iterator[bytes]:
        """Raise OSError when the file cannot be read, and ValueError where nothing here unpacks it."""
        with files.naming(self._path), self._path.open("rb") as file:
            begin = file.read(len(XZ_MAGIC))
            file.seek(0)
            for magic, (what, way_out) in NAMED.items():
                if begin.startswith(magic):
                    raise ValueError(f"it is {what}: {way_out}")
            yield from self._reader(begin)(file)

    def _reader(self, begin: bytes) -> Callable[[BinaryIO], Iterator[bytes]]:
        for magic, reader in {
            GZIP_MAGIC: self._unpacked,
            XZ_MAGIC: self._xz,
            BZIP2_MAGIC: self._bzip2,
            ZSTD_MAGIC: self._zstd,
            ZIP_MAGIC: self._zip,
        }.items():
            if begin.startswith(magic):
                return reader
        return _plain

    def _xz(self, file: BinaryIO) -> Iterator[bytes]:
        import lzma

        def make() -> lzma.LZMADecompressor:
            return lzma.LZMADecompressor(memlimit=MOST_UNPACKER_BYTES)

        return self._streams(file, "xz", XZ_MAGIC, make, lzma.LZMAError)

    def _bzip2(self, file: BinaryIO) -> Iterator[bytes]:
        import bz2

        return self._streams(file, "bzip2", BZIP2_MAGIC, bz2.BZ2Decompressor, OSError)

    def _zstd(self, file: BinaryIO) -> Iterator[bytes]:
        for name in ZSTD_MODULES:
            try:
                module: Any = importlib.import_module(name)
            except ImportError:
                continue
            if name == ZSTD_MODULES[-1]:
                reader = module.ZstdDecompressor(max_window_size=MOST_UNPACKER_BYTES).stream_reader(
                    file, read_across_frames=True
                )
                return self._read(reader, "zstd", module.ZstdError)
            return self._streams(file, "zstd", ZSTD_MAGIC, module.ZstdDecompressor, module.ZstdError)
        raise ValueError(NO_ZSTD)

    def _zip(self, file: BinaryIO) -> Iterator[bytes]:
        import zipfile

        try:
            archive = zipfile.ZipFile(file)
        except zipfile.BadZipFile as error:
            raise ValueError(f"the zip archive is damaged or cut short: {error}") from None
        inside = [entry for entry in archive.infolist() if not entry.is_dir()]
        traces = [entry for entry in inside if entry.filename.lower().endswith(".json")]
        if len(traces) != 1:
            raise ValueError(f"it is a zip archive with {len(traces)} .json files among {len(inside)}: unpack it first")
        try:
            entry = archive.open(traces[0])
        except (RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:  # a password, an unknown method
            raise ValueError(f"the zip archive cannot be unpacked here: {error}") from None
        return self._read(entry, "zip", zipfile.BadZipFile)

    def _read(self, packed: Any, what: str, failure: type[Exception]) -> Iterator[bytes]:
        """Yield what a file-like object unpacks, as far as it is sound."""
        try:
            while piece := packed.read(PIECE_BYTES):
                yield piece
        except (failure, EOFError, zlib.error, ValueError) as error:
            self.fault = f"the {what} data is damaged or cut short: {error}"

    def _streams(
        self, file: BinaryIO, what: str, magic: bytes, make: Callable[[], Any], failure: type[Exception]
    ) -> Iterator[bytes]:
        """Yield the content of all streams of a file, as far as it is sound."""
        stream, packed = make(), b""
        while True:
            if stream.eof:
                packed = (stream.unused_data or file.read(PIECE_BYTES)).lstrip(b"\0")
                if not packed.startswith(magic):  # the end, or padding
                    return
                stream = make()
            elif stream.needs_input:
                packed = file.read(PIECE_BYTES)
                if not packed:
                    self.fault = f"the {what} data ends too early: the file was cut short"
                    return
            try:
                piece = stream.decompress(packed, PIECE_BYTES)
            except failure as error:
                self.fault = f"the {what} data is damaged: {error}"
                return
            packed = b""
            if piece:
                yield piece

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
