"""Files of logs: finding them, unpacking them, and taking the lines out of what other programs wrap around them.

A file may be compressed (gzip, xz, zstd) and cut at its end. It holds lines, or one JSON document: an answer of Loki's
HTTP API, or what Grafana's Explore lets people download.
"""

from __future__ import annotations

import gzip
import importlib
import io
import lzma
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asynckv.errors import ConfigError

CHUNK = 1 << 20
MAX_LINE = 1 << 20  # bytes of one line; asynckv's longest, a request's whole history, has some 100 KB
PIECE = 1 << 14  # bytes of all pieces but the last into which Docker's runtime cuts a longer line
MAX_DOCUMENT = 256 << 20  # bytes of one JSON document, which is decoded as a whole
MAX_FILES = 10_000  # in all directories that were named
ZSTD = b"\x28\xb5\x2f\xfd"
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
_DOCUMENT = re.compile(rb'\s*(\[\s*\{|\{\s*"(status"\s*:\s*"success"\s*,\s*"data|data"\s*:\s*\{\s*"result\w*)")')
_CRI = re.compile(rb"(\d{4}-\d\d-\d\dT\S+) (stdout|stderr) ([PF])(?::\S*)? ")


class _Streams(msgspec.Struct):
    """A stream of Loki's: `[nanoseconds, line]` for each line."""

    values: list[list[Any]]


class _Result(msgspec.Struct):
    result: list[_Streams]


class _Answer(msgspec.Struct):
    data: _Result


def found(names: Sequence[str]) -> Iterator[str]:
    """List files, each once, under any of its names."""
    seen: set[object] = set()
    for name in dict.fromkeys(names):
        if name == "-":
            yield name
            continue
        try:
            is_directory = stat.S_ISDIR(os.stat(name).st_mode)
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{name}: {getattr(exc, 'strerror', None) or exc}; name a log, or - for stdin") from exc
        for path in sorted(Path(name).rglob("*")) if is_directory else [Path(name)]:
            try:
                status = path.stat()
            except OSError:
                continue  # a link to nowhere
            if (is_directory and not stat.S_ISREG(status.st_mode)) or (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            if len(seen) > MAX_FILES:
                raise ConfigError(f"{name}: more than {MAX_FILES:,} files; name those that matter")
            yield str(path)


def lines_of(raw: io.BufferedReader[io.FileIO], failed: Callable[[str], None]) -> Iterator[tuple[bytes, int]]:
    """Split a file into lines with their lengths, and cut lines that are too long.

    The last line has no newline if the file was cut there. A damaged archive yields the part that can be read.
    """
    try:
        if (file := _unpacked(raw)) is None:
            failed("compressed by zstd: pip install backports.zstd, or unpack it first (zstd -d)")
            return
        if _DOCUMENT.match(file.peek(CHUNK)):
            text = file.read(MAX_DOCUMENT + 1)
            if len(text) > MAX_DOCUMENT:
                failed(f"a JSON document of more than {MAX_DOCUMENT >> 20} MiB; export fewer lines at once")
                return
            if (rows := _rows(text)) is not None:
                for row in rows:
                    line = msgspec.json.encode(row) + b"\n"
                    yield line, len(line)
                return
            file = io.BufferedReader(io.BytesIO(text))  # lines that begin as a document does
        while line := file.readline(MAX_LINE + 1):
            length, last = len(line), line
            while not last.endswith(b"\n") and (last := file.readline(MAX_LINE)):
                length += len(last)
            yield line, length
    except Exception as exc:
        # No module that defines zstd's error need be there.
        if not isinstance(exc, DAMAGE) and type(exc).__name__ != "ZstdError":
            raise
        failed(f"compressed, and cut short or damaged ({exc})")


def _unpacked(raw: io.BufferedReader[io.FileIO]) -> Any:
    """Return the content of a file, one archive after the other; None if no installed module can unpack it."""
    begin = raw.peek(6)
    if begin.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=raw)
    if begin.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMAFile(raw)
    if not begin.startswith(ZSTD):
        return raw
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name).ZstdFile(raw)
        except ImportError:
            continue
    return None


def _rows(text: bytes) -> list[Any] | None:
    """Return the lines in a JSON document; None if it is no such document."""
    try:
        if text.lstrip().startswith(b"["):
            return msgspec.json.decode(text, type=list[dict[str, Any]])
        streams = msgspec.json.decode(text, type=_Answer).data.result
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    values = (x for stream in streams for x in stream.values if len(x) >= 2)
    return [{"line": line, "timestamp": nanoseconds} for nanoseconds, line, *_ in values]


class Pieces:
    """Join lines that a container runtime has cut at 16 KB, for each stream."""

    def __init__(self) -> None:
        self.begun: dict[object, bytes] = {}  # lines that are not whole, by stream

    def whole(self, stream: object, piece: bytes, is_last: bool) -> bytes | None:
        """Return a line once its last piece is there."""
        text = self.begun.pop(stream, b"") + piece
        if is_last or len(text) >= MAX_LINE:
            return text
        self.begun[stream] = text
        return None

    def of_cri(self, line: bytes) -> tuple[bytes, str]:
        """Remove Kubernetes's prefix: return the line, empty if it continues, and the prefix's time."""
        if not (begin := _CRI.match(line)):
            return line, ""
        text = self.whole(begin[2], line[begin.end() :].removesuffix(b"\n"), begin[3] == b"F")
        return text or b"", begin[1].decode()
