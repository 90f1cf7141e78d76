"""Records of logs: one per event of asynckv's, from JSON lines of any number of processes, in any order.

Logs may be rotated, compressed, cut short, given twice, mixed with other programs' lines, wrapped by a container
runtime, journald or Loki, and written by configurations that call a time `ts` and an event `message`. `read_logs` takes
them all. A line counts as asynckv's if it names an event and the start of a process (`incarnation`), as every event
does; unknown events are kept, because logs may be newer than their reader. Lines that look like asynckv's and cannot be
read are counted and reported, with the first of each kind.

Most lines are about requests that went well. They are kept packed until all files are read. Then the lines of requests
with a line of another kind become records, and so does a sample (`MAX_WELL`) of the others; the rest is only counted.

Input from outside is hostile: lines, nesting, numbers and counts are bounded, and a record is asked for values of
the type that is needed (`text`, `number`, `entries`).
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from asynckv import told
from asynckv.core.types import rank_name
from asynckv.edges.files.io import no_collection
from asynckv.errors import ConfigError
from asynckv.tools.diagnose.files import CHUNK, MAX_LINE, PIECE, Pieces, found, lines_of
from asynckv.tools.diagnose.well import Head, Well

MAX_WRAPPED = 3  # a collector may wrap a container's log once more
SHOWN = 160  # letters of a line that is shown for its kind
MAX_NAMED = 10_000  # lines that are kept because they name the request that is asked about: what begins so may be many
TIMES = ("timestamp", "time", "ts", "@timestamp", "asctime", "__REALTIME_TIMESTAMP")
EVENTS = ("event", "message", "msg")
LEVELS = ("level", "levelname", "severity", "log_level")
WRAPS = ("log", "MESSAGE", "message", "msg", "line", "jsonPayload")
ALIKE = {told.LeasesEndedAlike.event: told.LeaseEnded.event, told.PullsEndedAlike.event: told.PullEnded.event}
"""Events about many requests, which are read as one line for each."""

TRANSITIONS = {told.LeaseTransition.event, told.PullTransition.event}
MANY = {told.LeaseHeld.event, told.PullHeld.event, *ALIKE}

BOUND = ("engine_id", "rank", "incarnation", "timestamp", "level", "event")
MOST = 1e24
"""Largest number in a log, so that sums of millions are finite. Nanoseconds since 1970 are about 1e18."""

_NAME = re.compile(r"[a-z][a-z0-9_]{2,63}\Z")
_EPOCH = re.compile(r"([0-9]{1,20})(?:[.,]([0-9]{1,20}))?\Z")
_LEVEL = {"warn": "warning", "critical": "error", "fatal": "error", "err": "error"}
_LEVELS = frozenset({"debug", "info", "warning", "error"})


_decode = msgspec.json.Decoder().decode
_head = msgspec.json.Decoder(Head).decode


@lru_cache(maxsize=4096)
def _fields(text: bytes) -> dict[str, Any]:
    fields = _decoded(text)
    for name in BOUND:
        fields.pop(name, None)
    return fields


@dataclass(slots=True, eq=False)
class Record:
    at: float  # when it was logged, in seconds since 1970 by that process's own clock
    event: str  # its name, of `asynckv.told.EVENTS`, or one that is not known here
    level: str  # `debug`, `info`, `warning`, `error`
    engine_id: str  # which engine said it
    rank: str  # which rank and which start of its process, as in all logs: `prefill/pp1/tp3@0a1b2c3d`
    incarnation: str  # which start of the process, in full
    said: Mapping[str, Any] | bytes  # everything else that the line says, or the line itself
    where: str = ""  # file and line, for people
    ago_s: float = 0.0  # how long before its line it happened, if that is about several requests

    @property
    def fields(self) -> Mapping[str, Any]:
        """All other fields of the line, decoded at the first access."""
        return _fields(self.said) if isinstance(self.said, bytes) else self.said

    def text(self, name: str) -> str:
        """Return a field that is text; empty if it is missing or something else."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""

    def number(self, name: str, default: float = math.nan) -> float:
        return number(self.fields.get(name), default)

    def integer(self, name: str, default: int = -1) -> int:
        return integer(self.fields.get(name), default)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a field that is a list of texts, without other items."""
        value = self.fields.get(name)
        return tuple(x for x in value if isinstance(x, str)) if isinstance(value, list) else ()

    def entries(self, name: str) -> list[Mapping[str, Any]]:
        """Return a field that is a list of objects, without other items."""
        value = self.fields.get(name)
        return [x for x in value if isinstance(x, dict)] if isinstance(value, list) else []

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.fields.get(name)
        return value if isinstance(value, dict) else {}

    def objects(self, name: str) -> Mapping[str, Mapping[str, Any]]:
        """Return a field that is an object of objects, without other values."""
        return {key: x for key, x in self.mapping(name).items() if isinstance(x, dict)}


def number(value: object, default: float = math.nan) -> float:
    """Return a value if it is a finite number within `MOST`."""
    if isinstance(value, int | float) and not isinstance(value, bool) and -MOST <= value <= MOST:
        return float(value)
    return default


def integer(value: object, default: int = -1) -> int:
    """Return a value if it is a whole number of 0 or more."""
    if isinstance(value, int) and not isinstance(value, bool) and -MOST <= value <= MOST:
        return value
    return default


@dataclass(slots=True)
class Skipped:
    """Lines that were left out for one reason; `where` and `first` are of the first of them."""

    reason: str
    lines: int
    where: str
    first: str


@dataclass(slots=True)
class Source:
    path: str  # as it was given or found
    num_bytes: int = 0  # read of it, uncompressed
    num_lines: int = 0  # lines of any program
    num_others: int = 0  # lines of other programs: nothing is wrong with them
    num_repeated: int = 0  # lines that were there before, in this file or another


@dataclass(frozen=True, slots=True)
class Logs:
    records: Sequence[Record] = ()  # by the time that they give, by whichever clock
    sources: Sequence[Source] = ()  # the files
    skipped: Sequence[Skipped] = ()  # what was left out, and why
    num_text: int = 0  # lines of other programs that look like asynckv's in another form than JSON
    counted: Mapping[str, int] = field(default_factory=dict)  # lines that were only counted, by incarnation
    num_well: int = 0  # requests that went well and were only counted

    @property
    def total(self) -> Source:
        names = ("num_bytes", "num_lines", "num_others", "num_repeated")
        return Source("", *(sum(getattr(x, name) for x in self.sources) for name in names))

    @property
    def nothing(self) -> str:
        """Return the reason for which there is no record; empty if there is one."""
        if self.records:
            return ""
        lines = self.total.num_lines
        read = f"no event of asynckv's among the lines ({lines:,}) of the files ({len(self.sources):,})"
        if self.num_text:
            return (
                f"{read}, but {self.num_text:,} of these look like its events as text; this command reads JSON: "
                f'log with asynckv.configure_logging("info", form="json"), or a JSON formatter on the logger "asynckv"'
            )
        if self.skipped:
            kinds = "; ".join(f"{x.lines:,} lines: {x.reason} (first {x.where})" for x in self.skipped[:4])
            return f"{read}, and what looks like one cannot be read: {kinds}"
        if not lines:
            return f"{read}: nothing is in there"
        return (
            f"{read}: all are of other programs. Are these the workers' logs, and does the application's "
            f'configuration let the logger "asynckv" say anything (level info, or warning at least)?'
        )


def read_logs(
    paths: Iterable[str | Path], on_progress: Callable[[str], None] = lambda said: None, *, request: str = ""
) -> Logs:
    """Read logs.

    Lines at level debug about transitions are read only for a request, because the ends of others repeat them.

    Args:
        paths: Files, directories (everything in them), or `-` for stdin; compressed by gzip, xz or zstd, or not.
        on_progress: Called with which file is read, and how far.
        request: An id of either side, the beginning of one, a pull id, or a sequence: what is said of this request is
            kept, also if it went well and only a sample of such requests is.

    Raises:
        ConfigError: There is no such file, it cannot be read, or nothing was given.
    """
    names = [str(x) for x in paths]
    if not names:
        raise ConfigError("no logs were given; name files or directories, or - for stdin")
    reader = _Reader(request)
    with no_collection():
        for path in list(found(names)):
            reader.read(path, on_progress)
        return reader.finished()


class _Reader:
    def __init__(self, request: str) -> None:
        self._needles = {json.dumps(request, ensure_ascii=x)[:-1].encode(errors="replace") for x in (True, False)}
        self._sequence = int(x) if (x := request.removeprefix("#")[:18]).isdecimal() else -1
        self._has_request, self._num_named = bool(request), 0 if request else MAX_NAMED
        self._records: list[Record] = []
        self._seen = set[bytes]()  # the texts of the records: a line names its process and its time
        self._well, self._wrong = Well(), set[tuple[str, int]]()
        self._sources: list[Source] = []
        self._skipped: dict[str, Skipped] = {}
        self._pieces = Pieces()
        self._num_text, self._is_end = 0, False
        self._source = Source("")

    def read(self, path: str, on_progress: Callable[[str], None]) -> None:
        if path == "-" and sys.stdin is None:
            raise ConfigError("-: the standard input is closed; name a log")
        self._source, self._pieces = Source("stdin" if path == "-" else path), Pieces()
        self._sources.append(source := self._source)
        damage: list[str] = []
        try:
            # The standard input stays open.
            file = io.FileIO(path if path != "-" else sys.stdin.fileno(), closefd=path != "-")
            with io.BufferedReader(file, CHUNK) as raw:
                for line, length in lines_of(raw, damage.append):
                    source.num_lines += 1
                    source.num_bytes += length
                    if source.num_bytes // CHUNK > (source.num_bytes - length) // CHUNK:
                        on_progress(f"{source.path}, {source.num_bytes >> 20:,} MiB")
                    if length > MAX_LINE + 1:
                        self._skip(f"longer than {MAX_LINE:,} bytes", line)
                    else:
                        self._line(line)
        except OSError as exc:
            raise ConfigError(f"{path}: {exc.strerror or exc}; name a log that can be read, or - for stdin") from exc
        for text in self._pieces.begun.values():
            if b"incarnation" in text:
                self._skip("cut short: its last piece is missing, as a rotation may leave it", text)
        for why in damage:
            self._skip(why, b"")

    def finished(self) -> Logs:
        """Choose the lines of requests that went well, and sort all records."""
        chosen = self._well.chosen(self._wrong)
        for source, repeated in zip(self._sources, chosen.repeated, strict=False):
            source.num_repeated += repeated
        for text, i, number in chosen.lines:
            if (head := _head_of(text)) is not None:
                self._add(_record(head, text, f"{self._sources[i].path}:{number}"), text, self._sources[i])
        return Logs(
            records=sorted(self._records, key=attrgetter("at")),
            sources=self._sources,
            skipped=list(self._skipped.values()),
            num_text=self._num_text,
            counted=chosen.counted,
            num_well=chosen.num_requests,
        )

    def _add(self, record: Record, text: bytes, source: Source) -> None:
        """Add a record if it is new, or those of each of its requests."""
        if text in self._seen:
            source.num_repeated += 1
            return
        self._seen.add(text)
        if record.event in MANY:
            self._wrong |= {_key(x, record.engine_id) for x in _rows(record)}
        self._records += _each(record) if record.event in ALIKE else (record,)

    def _line(self, line: bytes) -> None:
        """Take one line, without everything that is wrapped around it."""
        if line.startswith(b'{"') and b"incarnation" in line and self._is_taken(line):
            return
        self._is_end = not line.endswith(b"\n")  # perhaps it is being written just now
        line, time = self._pieces.of_cri(line)
        if b"incarnation" not in line and not (self._pieces.begun and b'"log"' in line):
            self._other(line)
            return
        text, outer = _object(line), dict[str, Any](time=time) if time else {}
        for _ in range(MAX_WRAPPED + 1 if text else 0):
            if self._is_taken(text):
                return
            try:
                fields = _decoded(text)
            except ValueError as exc:
                if not self._is_end:
                    self._skip(str(exc), text)
                return
            if "incarnation" in fields:
                self._take_unusual(fields, outer, line)
                return
            outer |= fields
            texts = (x for key in WRAPS if isinstance(x := fields.get(key), str) and ("{" in x or self._pieces.begun))
            if (inner := next(texts, None)) is not None:
                piece = inner.encode(errors="replace")
                # Docker's runtime ends only the last piece with a newline; others take it off.
                is_last = "log" not in fields or inner.endswith("\n") or (inner[-1:] == "}" and len(piece) != PIECE)
                whole = self._pieces.whole(fields.get("stream"), piece, is_last)
                if whole is None:
                    return
                text = _object(whole)
            elif (within := _within(fields)) is not None:
                text = msgspec.json.encode(within)
            else:
                break
        self._other(line)

    def _is_taken(self, text: bytes) -> bool:
        """Take an object, if it is an event with a process and a time, under asynckv's own names."""
        head = _head_of(text)
        if head is None or head.at is None or head.level not in _LEVELS or not _is_event(head):
            return False
        self._take(head, text)
        return True

    def _take_unusual(self, fields: dict[str, Any], outer: Mapping[str, Any], line: bytes) -> None:
        """Take a line with its time, level or event outside of the object, or with other names or types."""
        (event, level, at), around = _said(fields), _said(outer)
        event, level, at = event or around[0], level or around[1], at or around[2]
        text = msgspec.json.encode(fields | {"event": event, "level": level, "timestamp": at})
        if (head := _head_of(text)) is None:
            head = Head(_first_text(fields, ["incarnation"]), _first_text(fields, ["engine_id"]), event, level, at=at)
        if not _is_event(head):
            self._other(line)
        elif head.at is None:
            self._skip("without a time that can be read (timestamp, time, ts, @timestamp, asctime)", line)
        else:
            self._take(head, text)

    def _take(self, head: Head, text: bytes) -> None:
        if not self._has_request and head.event in TRANSITIONS:
            return
        text, number = text.rstrip(), self._source.num_lines
        if (kind := head.kind) and b"\n" not in text and not self._names(head, text):
            self._well.add(head, kind, head.at, len(self._sources) - 1, number, text)
            return
        if head.sequence >= 0:
            self._wrong.add(head.key)
        self._add(_record(head, text, f"{self._source.path}:{number}"), text, self._source)

    def _names(self, head: Head, text: bytes) -> bool:
        if self._num_named >= MAX_NAMED or not (
            head.sequence == self._sequence or any(x in text for x in self._needles)
        ):
            return False
        self._num_named += 1
        return True

    def _other(self, line: bytes) -> None:
        self._source.num_others += bool(line.strip())
        self._num_text += b"engine_id=" in line and b"incarnation=" in line

    def _skip(self, reason: str, line: bytes) -> None:
        where, first = f"{self._source.path}:{self._source.num_lines}", line[:SHOWN].decode(errors="replace")
        self._skipped.setdefault(reason, Skipped(reason, 0, where, first)).lines += 1


def _record(head: Head, text: bytes, where: str) -> Record:
    rank = head.rank or rank_name(head.engine_id, integer(_fields(text).get("tp_rank"), 0), 0, head.incarnation)
    names = map(sys.intern, (head.event, head.level, head.engine_id, rank, head.incarnation))
    event, level, engine_id, rank, incarnation = names
    return Record(head.at, event, level, engine_id, rank, incarnation, text, where)


def _each(record: Record) -> Iterator[Record]:
    """Split a line about many requests."""
    for fields in _rows(record)[1:]:
        ago_s = min(max(number(fields.get("ago_s"), 0.0), 0.0), 60.0)
        yield replace(record, at=record.at - ago_s, ago_s=ago_s, event=ALIKE[record.event], said=fields)


def _rows(record: Record) -> list[Mapping[str, Any]]:
    """Return the common fields of a line, and those of each of its requests."""
    rows = [record.fields, *record.entries("oldest")]
    columns = {name: x for name, x in record.mapping("each").items() if isinstance(x, list)}
    for row in zip(*columns.values(), strict=False):
        own = {name: value for name, value in zip(columns, row, strict=True) if value is not None}
        rows.append({**record.mapping("alike"), **own})
    return rows


def _key(row: Mapping[str, Any], engine_id: str) -> tuple[str, int]:
    """Name the request of a row: its prefill engine, and its number there."""
    peer = row.get("peer")
    return peer if isinstance(peer, str) else engine_id, integer(row.get("sequence"))


def _object(line: bytes) -> bytes:
    """Return a line from the beginning of its object; labels of Loki may come before it."""
    start = line.find(b'{"')
    return line[start if start >= 0 else line.find(b"{") :] if b"{" in line else b""


def _head_of(text: bytes) -> Head | None:
    """Decode the head of a line whose fields have asynckv's own names and types; None for any other."""
    try:
        head = _head(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    head.at = _time(head.timestamp)
    return head


def _said(fields: Mapping[str, Any]) -> tuple[str, str, float | None]:
    """Return event, level and time of a line, under any of their names."""
    # In the standard logger's message the fields follow the name.
    event = _first_text(fields, EVENTS).partition(" ")[0]
    level = _first_text(fields, LEVELS).lower()
    times = (at for x in TIMES if (at := _time(fields.get(x))) is not None)
    return event, _LEVEL.get(level, level), next(times, None)


def _is_event(head: Head) -> bool:
    return bool(head.incarnation and head.engine_id and _NAME.match(head.event))


def _decoded(text: bytes) -> dict[str, Any]:
    """Decode an object, or raise `ValueError` with the reason."""
    try:
        try:
            value = _decode(text)
        except (msgspec.DecodeError, ValueError):
            # Python's own encoder writes more than JSON: NaN and Infinity (no numbers), lone surrogates.
            plain = json.dumps(json.loads(text, parse_constant=lambda name: None), ensure_ascii=False)
            value = json.loads(plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError:
        raise ValueError("no JSON" if text.rstrip().endswith(b"}") else "cut short") from None
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _within(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the object of an event in a collector's decoded line, under any name and at any depth."""
    found = [x for x in fields.values() if isinstance(x, dict)]
    named = (x for key in WRAPS if isinstance(x := fields.get(key), dict))
    return next((x for x in found if "incarnation" in x), None) or next(named, None)


def _first_text(fields: Mapping[str, Any], names: Sequence[str]) -> str:
    return next((x for name in names if isinstance(x := fields.get(name), str)), "")


def _time(value: object) -> float | None:
    """Read a time: ISO, taken for UTC where it names no zone, or a number of s, ms, us or ns since 1970."""
    if isinstance(value, str):
        try:
            when = datetime.fromisoformat(value)
        except ValueError:
            if (epoch := _EPOCH.match(value)) is None:  # journald's numbers are text
                return None
            value = float(f"{epoch[1]}.{epoch[2]}") if epoch[2] else int(epoch[1])
        else:
            try:
                return (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()
            except (OverflowError, ValueError):
                return None
    at = number(value)
    if not 0 < at < 1e20:
        return None
    return at / next(scale for bound, scale in ((1e11, 1.0), (1e14, 1e3), (1e17, 1e6), (1e20, 1e9)) if at < bound)
