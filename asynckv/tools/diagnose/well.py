"""Lines of requests that went well: most of a log, and nearly all of it is only counted.

A request went well if all that is said of it, on both sides, is that it was lent, granted, pulled and released. That is
known only at the end, because the line that says otherwise may be in the last file. Until then the lines are packed,
with a few numbers of each.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from asynckv import told

MAX_WELL = 50_000  # most lines of successful requests that are kept as a sample of whole requests
PACKED = 512  # lines in one packed block
_SEQUENCES = 1 << 40
_NUMBERS = np.dtype(
    [("at", "f8"), *((x, "i8") for x in ("text", "sequence", "process", "engine", "kind", "source", "line"))]
)
_packed = struct.Struct("=d7q").pack
_OPENS, _ENDS, _OTHER = 1, 2, 3
_KINDS = dict.fromkeys((told.LeaseLent.event, told.LeaseGranted.event), _OPENS) | {told.LeaseEnded.event: _ENDS}
_KINDS |= dict.fromkeys((told.PullEnded.event, told.LeaseTransition.event, told.PullTransition.event), _OTHER)
Packed = tuple[bytes, int, int]
_CAUSES = {told.LeaseEnded.event: "released", told.PullEnded.event: "complete"}


class Head(msgspec.Struct, gc=False):
    """Fields that are decoded of every line: its process, its request, and whether that went well."""

    incarnation: str = ""
    engine_id: str = ""
    event: str = ""
    level: str = ""
    timestamp: Any = None
    at: Any = None  # when, in seconds since 1970; None if it does not say
    rank: str = ""
    sequence: int = -1
    peer: str = ""
    cause: str = ""
    attempt: int | None = None
    held_transfers: int | None = None
    unanswered: msgspec.Raw | None = None
    owed: msgspec.Raw | None = None
    refused: msgspec.Raw | None = None
    log_dropped: msgspec.Raw | None = None

    @property
    def key(self) -> tuple[str, int]:
        """The prefill engine, and the number of the request there: what all lines of one request share."""
        return self.peer or self.engine_id, self.sequence

    @property
    def kind(self) -> int:
        """The kind of a line about a successful request; 0 for all other lines."""
        kind = _KINDS.get(self.event, 0)
        if not kind or self.level not in ("info", "debug") or not 0 <= self.sequence < _SEQUENCES:
            return 0
        if self.cause != _CAUSES.get(self.event, ""):
            return 0
        troubles = (self.attempt, self.held_transfers, self.unanswered, self.owed, self.refused, self.log_dropped)
        return kind if troubles == (None, None, None, None, None, None) else 0


class Well:
    """The lines of requests that seem to have gone well, packed."""

    def __init__(self) -> None:
        self._columns = bytearray()
        self._numbers: dict[str, int] = {}
        self._blocks: list[bytes] = []
        self._open: list[bytes] = []

    def add(self, head: Head, kind: int, at: float, source: int, line: int, text: bytes) -> None:
        """Take a line without its newline."""
        numbers = self._numbers
        process = numbers.setdefault(head.incarnation, len(numbers))
        engine = numbers.setdefault(head.peer or head.engine_id, len(numbers))
        self._columns += _packed(at, hash(text), head.sequence, process, engine, kind, source, line)
        self._open.append(text)
        if len(self._open) >= PACKED:
            self._pack()

    def _pack(self) -> None:
        self._blocks.append(zlib.compress(b"\n".join(self._open), 1))
        self._open = []

    def chosen(self, wrong: Iterable[tuple[str, int]]) -> Chosen:
        """Choose the lines to read; `wrong` are requests that other lines mention too."""
        self._pack()
        columns = np.frombuffer(self._columns, _NUMBERS)
        at, sequence, kind, process = columns["at"], columns["sequence"], columns["kind"], columns["process"]
        is_first = np.zeros(len(at), bool)
        is_first[np.unique(columns["text"], return_index=True)[1]] = True  # a line names its process and its time
        repeated = np.bincount(columns["source"][~is_first])
        group = columns["engine"] * _SEQUENCES + sequence
        lease = process * _SEQUENCES + sequence
        is_open = (kind == _OPENS) & ~np.isin(lease, lease[kind == _ENDS])
        numbers = self._numbers
        named = [numbers[x] * _SEQUENCES + y for x, y in wrong if x in numbers and 0 <= y < _SEQUENCES]
        order = np.lexsort((at, process))
        _, begin, number = np.unique(process[order], return_index=True, return_counts=True)
        edges = order[np.concatenate((begin, begin + number - 1))]
        is_wanted = np.isin(group, group[is_open]) | np.isin(group, named) | np.isin(group, group[edges])
        keep = is_wanted | _sampled(sequence, is_first & ~is_wanted)
        counted = is_first & ~keep
        names = list(numbers)
        lines = zip(*np.unique(process[counted], return_counts=True), strict=True)
        return Chosen(
            self._lines(np.flatnonzero(is_first & keep), columns),
            {names[x]: int(y) for x, y in lines},
            len(np.unique(group[counted])),
            repeated.tolist(),
        )

    def _lines(self, chosen: npt.NDArray[np.intp], columns: npt.NDArray[np.void]) -> Iterator[Packed]:
        block, texts = -1, list[bytes]()
        for i in chosen.tolist():
            if i // PACKED != block:
                block = i // PACKED
                texts = zlib.decompress(self._blocks[block]).split(b"\n")
            yield texts[i % PACKED], int(columns["source"][i]), int(columns["line"][i])


class Chosen(msgspec.Struct):
    """The choice of lines of successful requests that become records."""

    lines: Iterator[Packed]  # those that are to be read, among them the first and the last of each process
    counted: dict[str, int]  # how many lines of each process are only counted
    num_requests: int  # requests that are only counted
    repeated: list[int]  # how many lines of each source were there before


def _sampled(sequence: npt.NDArray[np.int64], among: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Choose at most `MAX_WELL` lines, of whole requests, spread evenly."""
    spread = (sequence * 2_654_435_761) & 0xFFFFFFFF
    if np.count_nonzero(among) <= MAX_WELL:
        return among
    chosen: npt.NDArray[np.bool_] = among & (spread < np.partition(spread[among], MAX_WELL)[MAX_WELL])
    return chosen
