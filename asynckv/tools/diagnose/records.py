"""What logs say: one record per event of asynckv's, from JSON lines of any number of processes, in any order.

Logs reach whoever reads them in all states: rotated, compressed, cut short in the middle of a line, given twice, mixed
with what other programs say, wrapped by a container runtime or by journald, and written by configurations that call a
time `ts` and an event `message`. `read_logs` takes whatever is there. A line counts as asynckv's if it names an event
and the start of a process (`incarnation`), as every event does; unknown events are kept, for logs may be newer than
their reader. What looks like asynckv's and cannot be read is counted, with the first of each kind, and told: nothing is
left out in silence.

Files are read in pieces, and only records are kept. What comes from outside is hostile: lines, nesting, numbers and
counts are bounded, and whoever uses a record asks it for values of the type that he needs (`text`, `number`,
`entries`).
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from asynckv.core import told
from asynckv.core.types import rank_name
from asynckv.edges.file_io import no_collection
from asynckv.errors import ConfigError

CHUNK = 1 << 20
MAX_LINE = 1 << 20
"""Bytes of one line; asynckv's longest, a request's whole history, has some 100 KB."""

MAX_FILES = 10_000
"""In all directories that were named."""

MAX_RECORDS = 20_000_000
MAX_WRAPPED = 3
"""A container's log may itself be wrapped by whoever collects it."""

SHOWN = 160
"""Letters of a line that is shown for its kind."""

TIMES = ("timestamp", "time", "ts", "@timestamp", "asctime", "__REALTIME_TIMESTAMP")
EVENTS = ("event", "message", "msg")
LEVELS = ("level", "levelname", "severity", "log_level")
WRAPS = ("log", "MESSAGE", "message", "msg", "jsonPayload")
ALIKE = {told.LeasesEndedAlike.event: told.LeaseEnded.event, told.PullsEndedAlike.event: told.PullEnded.event}
"""Lines that tell of many requests, which are read as one line for each."""

BOUND = ("engine_id", "rank", "incarnation", "timestamp", "level", "event")
MOST = 1e24
"""What no number of a log exceeds, so that sums of millions are finite: of nanoseconds since 1970, 1e18 are enough."""

_NAME = re.compile(r"[a-z][a-z0-9_]{2,63}\Z")
_EPOCH = re.compile(r"([0-9]{1,20})(?:[.,]([0-9]{1,20}))?\Z")
_LEAP = re.compile(r"([T ][0-9]{2}(:?)[0-9]{2}\2)60(?![0-9])")
_LEVEL = {"warn": "warning", "critical": "error", "fatal": "error", "err": "error"}

_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class Record:
    """One event of one process.

    Attributes:
        at: When it was logged, in seconds since 1970 by that process's own clock.
        event: Its name, of `asynckv.core.told.EVENTS`, or one that is not known here.
        level: `debug`, `info`, `warning`, `error`.
        engine_id: Which engine said it.
        rank: Which rank and which start of its process, as in all logs: `prefill/pp1/tp3@0a1b2c3d`.
        incarnation: Which start of the process, in full.
        fields: Everything else that the line says.
        where: File and line, for people.
    """

    at: float
    event: str
    level: str
    engine_id: str
    rank: str
    incarnation: str
    fields: Mapping[str, Any]
    where: str = ""

    def text(self, name: str) -> str:
        """Return a field that is text; empty if it is missing or something else."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""

    def number(self, name: str, default: float = math.nan) -> float:
        """Return a field that is a finite number."""
        return number(self.fields.get(name), default)

    def integer(self, name: str, default: int = -1) -> int:
        """Return a field that is a whole number."""
        return integer(self.fields.get(name), default)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a field that is a list of texts, without whatever else is in it."""
        value = self.fields.get(name)
        return tuple(x for x in value if isinstance(x, str)) if isinstance(value, list) else ()

    def entries(self, name: str) -> list[Mapping[str, Any]]:
        """Return a field that is a list of objects, without whatever else is in it."""
        value = self.fields.get(name)
        return [x for x in value if isinstance(x, dict)] if isinstance(value, list) else []

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return a field that is an object."""
        value = self.fields.get(name)
        return value if isinstance(value, dict) else {}


def number(value: object, default: float = math.nan) -> float:
    """Return a value if it is a number of this world."""
    if isinstance(value, int | float) and not isinstance(value, bool) and -MOST <= value <= MOST:
        return float(value)
    return default


def integer(value: object, default: int = -1) -> int:
    """Return a value if it is a whole number that counts something."""
    if isinstance(value, int) and not isinstance(value, bool) and -MOST <= value <= MOST:
        return value
    return default


@dataclass(frozen=True, slots=True)
class Skipped:
    """Lines that were left out, of one kind.

    Attributes:
        reason: Why, in words.
        lines: How many.
        where: File and line of the first.
        first: How it begins.
    """

    reason: str
    lines: int
    where: str
    first: str


@dataclass(frozen=True, slots=True)
class Source:
    """One file that was read.

    Attributes:
        path: As it was given or found.
        num_bytes: Read of it, uncompressed.
        num_lines: Lines of whoever.
        num_records: Events of asynckv's, without those that were known already.
        num_others: Lines of other programs.
        num_repeated: Lines that were there before, in this file or another.
    """

    path: str
    num_bytes: int
    num_lines: int
    num_records: int
    num_others: int = 0
    num_repeated: int = 0


@dataclass(frozen=True, slots=True)
class Logs:
    """All that some logs say.

    Attributes:
        records: By the time that they give, whoever's clock that is.
        sources: The files.
        skipped: What was left out, and why.
        num_others: Lines of other programs: nothing is wrong with them.
        num_repeated: Lines that were there twice.
        num_text: Among the lines of others, those that look like asynckv's in another form than JSON.
    """

    records: Sequence[Record] = ()
    sources: Sequence[Source] = ()
    skipped: Sequence[Skipped] = ()
    num_others: int = 0
    num_repeated: int = 0
    num_text: int = 0

    @property
    def num_bytes(self) -> int:
        """Read in all, uncompressed."""
        return sum(x.num_bytes for x in self.sources)

    @property
    def num_lines(self) -> int:
        """Read in all."""
        return sum(x.num_lines for x in self.sources)

    @property
    def nothing(self) -> str:
        """Say why there is no record; empty if there is one."""
        if self.records:
            return ""
        lines = f"{self.num_lines:,} line{'' if self.num_lines == 1 else 's'}"
        read = f"no event of asynckv's in {lines} of {_files(len(self.sources))}"
        if self.num_text:
            return (
                f"{read}, but {self.num_text:,} of these look like its events as text; this command reads JSON: "
                f'log with asynckv.configure_logging("info", form="json"), or a JSON formatter on the logger "asynckv"'
            )
        if self.skipped:
            kinds = "; ".join(f"{x.lines:,} lines: {x.reason} (first {x.where})" for x in self.skipped[:4])
            return f"{read}, and what looks like one cannot be read: {kinds}"
        if not self.num_lines:
            return f"{read}: nothing is in there"
        return (
            f"{read}: all are of other programs. Are these the workers' logs, and does the application's "
            f'configuration let the logger "asynckv" say anything (level info, or warning at least)?'
        )


def _files(count: int) -> str:
    return "one file" if count == 1 else f"{count:,} files"


def read_logs(
    paths: Iterable[str | Path],
    on_progress: Callable[[int, int], None] | None = None,
    *,
    keep: Callable[[str], bool] | None = None,
) -> Logs:
    """Read logs.

    Args:
        paths: Files, directories (everything in them), or `-` for stdin; compressed by gzip or not.
        on_progress: Called with the bytes that were read so far and those that there are (as they lie on disk; 0 if
            that is not known).
        keep: Which events are wanted, by name; all if left out.

    Raises:
        ConfigError: There is no such file, it cannot be read, or nothing was given.
    """
    names = [str(x) for x in paths]
    if not names:
        raise ConfigError("no logs were given; name files or directories, or - for stdin")
    files = list(_found(names))
    sizes = [os.stat(x).st_size if x != "-" else 0 for x in files]
    total = 0 if "-" in files else sum(sizes)
    reader = _Reader(keep)
    done = 0

    def progress(read: int) -> None:
        if on_progress is not None:
            on_progress(done + read, total)

    with no_collection():
        for path, size in zip(files, sizes, strict=True):
            reader.read(path, progress)
            done += size
        return reader.finished()


def _found(names: Sequence[str]) -> Iterator[str]:
    """List files, each once, however often and by whatever name it was given."""
    seen: set[object] = set()
    left = MAX_FILES
    for name in names:
        if name == "-":
            if "-" not in seen:
                yield name
            seen.add("-")
            continue
        try:
            is_directory = stat.S_ISDIR(os.stat(name).st_mode)
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{name}: {getattr(exc, 'strerror', None) or exc}; name a log, or - for stdin") from exc
        inside = sorted(Path(name).rglob("*")) if is_directory else [Path(name)]
        for path in inside:
            try:
                found = path.stat()
            except OSError:
                continue  # a link to nowhere
            if is_directory and not stat.S_ISREG(found.st_mode):
                continue
            if (found.st_dev, found.st_ino) in seen:
                continue
            seen.add((found.st_dev, found.st_ino))
            left -= 1
            if left < 0:
                raise ConfigError(f"{name}: more than {MAX_FILES:,} files; name those that matter")
            yield str(path)


class _Reader:
    """Reads files, one after the other."""

    def __init__(self, keep: Callable[[str], bool] | None) -> None:
        self._keep = keep
        self._records: list[Record] = []
        self._seen: set[int] = set()
        self._sources: list[Source] = []
        self._skipped: dict[str, list[Any]] = {}
        self._others = self._repeated = self._text = 0

    def finished(self) -> Logs:
        self._records.sort(key=attrgetter("at"))
        return Logs(
            records=self._records,
            sources=self._sources,
            skipped=[Skipped(reason, *found) for reason, found in self._skipped.items()],
            num_others=self._others,
            num_repeated=self._repeated,
            num_text=self._text,
        )

    def read(self, path: str, progress: Callable[[int], None]) -> None:
        """Read a file."""
        before, lines, size, pending = len(self._records), 0, 0, ""
        others, repeated = self._others, self._repeated
        shown = "stdin" if path == "-" else path
        damage: list[str] = []
        if path == "-" and sys.stdin is None:
            raise ConfigError("-: the standard input is closed; name a log")
        try:
            # The standard input stays open.
            file = io.FileIO(sys.stdin.fileno() if path == "-" else path, closefd=path != "-")
            with io.BufferedReader(file, CHUNK) as raw:
                for line, length in _lines(raw, damage.append):
                    lines += 1
                    size += length
                    if size // CHUNK > (size - length) // CHUNK:
                        progress(size if path == "-" else file.tell())
                    if length > MAX_LINE + 1:
                        self._skip(f"longer than {MAX_LINE:,} bytes", f"{shown}:{lines}", line)
                        continue
                    pending = self._line(line, shown, lines, pending)
        except OSError as exc:
            raise ConfigError(f"{path}: {exc.strerror or exc}; name a log that can be read, or - for stdin") from exc
        for why in damage:
            self._skip(why, f"{shown}:{lines}", b"")
        if pending:
            self._skip("cut short", f"{shown}:{lines}", pending.encode(errors="replace"))
        others, repeated = self._others - others, self._repeated - repeated
        self._sources.append(Source(shown, size, lines, len(self._records) - before, others, repeated))

    def _line(self, line: bytes, path: str, number: int, pending: str) -> str:
        """Take one line; return what a container's runtime will go on with in the next."""
        if b"incarnation" not in line and not pending:
            self._others += bool(line.strip())
            return ""
        start = line.find(b"{")
        if start < 0:
            self._other(line)
            return ""
        where = f"{path}:{number}"
        fields = self._decoded(line[start:], where)
        if fields is None:
            return ""
        outer: Mapping[str, Any] = {}
        for _ in range(MAX_WRAPPED):
            if "incarnation" in fields:
                break
            if (within := _within(fields)) is not None:
                outer, fields = {**outer, **fields}, within
                continue
            inner = next((x for key in WRAPS if isinstance(x := fields.get(key), str) and ("{" in x or pending)), None)
            if inner is None:
                self._other(line)
                return ""
            outer, inner, pending = {**outer, **fields}, pending + inner, ""
            # Docker's runtime cuts lines at 16 KB, and only the last piece ends with a newline.
            if "log" in fields and not inner.endswith("\n") and len(inner) < MAX_LINE and not _is_whole(inner):
                return inner
            if "{" not in inner:
                self._other(line)
                return ""
            decoded = self._decoded(inner[inner.index("{") :].encode(errors="replace"), where)
            if decoded is None:
                return ""
            fields = decoded
        self._take(fields, outer, line, where)
        return ""

    def _take(self, fields: dict[str, Any], outer: Mapping[str, Any], line: bytes, where: str) -> None:
        """Make a record of what a line says."""
        incarnation, engine_id = fields.get("incarnation"), fields.get("engine_id")
        event = _first_text(fields, EVENTS) or _first_text(outer, EVENTS)
        # In the standard logger's message the fields follow the name.
        event = event.split(" ", 1)[0]
        if not (isinstance(incarnation, str) and incarnation and isinstance(engine_id, str) and _NAME.match(event)):
            self._other(line)
            return
        if self._keep is not None and not self._keep(event):
            return
        if (at := _time_of(fields) or _time_of(outer)) is None:
            self._skip("without a time that can be read (timestamp, time, ts, @timestamp, asctime)", where, line)
            return
        # The wrapping differs between two collectors of one line, its content does not.
        identity = hash((line if not outer else msgspec.json.encode(fields), incarnation))
        if identity in self._seen:
            self._repeated += 1
            return
        if len(self._records) >= MAX_RECORDS:
            self._skip(f"beyond the first {MAX_RECORDS:,} events; give fewer logs at once", where, line)
            return
        self._seen.add(identity)
        level = (_first_text(fields, LEVELS) or _first_text(outer, LEVELS)).lower()
        rank = fields.get("rank")
        for key in BOUND:
            fields.pop(key, None)
        record = Record(
            at=at,
            event=sys.intern(ALIKE.get(event, event)),
            level=sys.intern(_LEVEL.get(level, level)),
            engine_id=sys.intern(engine_id),
            rank=sys.intern(rank if isinstance(rank, str) else _rank_of(fields, engine_id, incarnation)),
            incarnation=sys.intern(incarnation),
            fields=fields,
            where=where,
        )
        self._records.extend(_each(record) if event in ALIKE else (record,))

    def _decoded(self, text: bytes, where: str) -> dict[str, Any] | None:
        """Decode an object, or say why not."""
        why = "cut short"
        try:
            value = _decode(text)
        except RecursionError:
            self._skip("nested too deeply", where, text)
            return None
        except (msgspec.DecodeError, ValueError):
            try:  # what Python's own encoder writes besides JSON: NaN and Infinity (no numbers), lone surrogates
                value = _without_surrogates(json.loads(text, parse_constant=lambda name: None))
            except RecursionError:
                value, why = None, "nested too deeply"
            except ValueError:
                value, why = None, "cut short" if not text.rstrip().endswith(b"}") else "no JSON"
        if isinstance(value, dict):
            return value
        self._skip(why if value is None else "no JSON object", where, text)
        return None

    def _other(self, line: bytes) -> None:
        self._others += 1
        self._text += b"engine_id=" in line and b"incarnation=" in line

    def _skip(self, reason: str, where: str, line: bytes) -> None:
        found = self._skipped.setdefault(reason, [0, where, line[:SHOWN].decode(errors="replace")])
        found[0] += 1


def _lines(raw: io.BufferedReader[io.FileIO], failed: Callable[[str], None]) -> Iterator[tuple[bytes, int]]:
    """Split a file into lines, each with its length; of one that is too long only the beginning is kept.

    A file that is compressed is unzipped, one archive after the other as they follow; of one that is cut short all that
    can be read is.
    """
    file = gzip.GzipFile(fileobj=raw) if raw.peek(2).startswith(b"\x1f\x8b") else raw
    try:
        while line := file.readline(MAX_LINE + 1):
            length, last = len(line), line
            while not last.endswith(b"\n") and (last := file.readline(MAX_LINE)):
                length += len(last)
            yield line.removesuffix(b"\n"), length
    except (EOFError, gzip.BadGzipFile, zlib.error) as exc:
        failed(f"compressed, and cut short or damaged ({exc})")


def _each(record: Record) -> Iterator[Record]:
    """Split a line about many requests."""
    columns = {name: values for name, values in record.mapping("each").items() if isinstance(values, list)}
    for row in zip(*columns.values(), strict=False):
        own = {name: value for name, value in zip(columns, row, strict=True) if value is not None}
        fields = {**record.mapping("alike"), **own}
        yield replace(record, at=record.at - min(max(number(fields.get("ago_s"), 0.0), 0.0), 60.0), fields=fields)


def _without_surrogates(value: Any) -> Any:
    """Replace halves of letters, which no file can be written with."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_surrogates(x) for x in value]
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return value


def _rank_of(fields: Mapping[str, Any], engine_id: str, incarnation: str) -> str:
    tp_rank = fields.get("tp_rank")
    return rank_name(engine_id, tp_rank if isinstance(tp_rank, int) else 0, 0, incarnation)


def _is_whole(text: str) -> bool:
    """Whether a piece is an object by itself: other runtimes than Docker's take the newline off."""
    return text.rstrip().endswith("}") and "{" in text


def _within(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the object in which an event lies, where a collector has decoded lines: under any name, or deeper."""
    found = [x for x in fields.values() if isinstance(x, dict)]
    named = (x for key in WRAPS if isinstance(x := fields.get(key), dict))
    return next((x for x in found if "incarnation" in x), None) or next(named, None)


def _first_text(fields: Mapping[str, Any], names: Sequence[str]) -> str:
    for name in names:
        if isinstance(value := fields.get(name), str):
            return value
    return ""


def _time_of(fields: Mapping[str, Any]) -> float | None:
    for name in TIMES:
        if name in fields and (at := _time(fields[name])) is not None:
            return at
    return None


def _time(value: object) -> float | None:
    """Read a time: ISO, taken for UTC where it names no zone, or a number of s, ms, us or ns since 1970.

    A leap second is the one that follows, as clocks count that know none.
    """
    if isinstance(value, str):
        try:
            when = datetime.fromisoformat(value)
        except ValueError:
            if (epoch := _EPOCH.match(value)) is not None:  # journald's numbers are text
                value = float(f"{epoch[1]}.{epoch[2]}") if epoch[2] else int(epoch[1])
            elif (text := _LEAP.sub(r"\g<1>59", value, count=1)) != value and (before := _time(text)) is not None:
                return before + 1.0
            else:
                return None
        else:
            try:
                return (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()
            except (OverflowError, ValueError):
                return None
    at = number(value)
    if not 0 < at < 1e20:
        return None
    for bound, scale in ((1e11, 1.0), (1e14, 1e3), (1e17, 1e6), (1e20, 1e9)):
        if at < bound:
            return at / scale
    return None
