"""What is in host memory is written to the file tier as well, in the background: what has waited for longest first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from asynckv.offload.entry import Entry, EntryEvent, EntryState
from asynckv.offload.job import Item, Move, MoveKind
from asynckv.offload.keys import StoredGroup
from asynckv.offload.tier import Tier
from asynckv.offload.traffic import Running, Traffic

TRIES = 3  # a block that could not be written so often is left where it is


class WriteBack:
    """Writes the file tier.

    Attributes:
        without_room: Blocks for which the file tier had no room.
        failed: Blocks that could not be written, however often it was tried.
        lost: Blocks that were to be written to a file tier that takes no more.
    """

    def __init__(self, groups: Sequence[StoredGroup], host: Tier, file: Tier, traffic: Traffic) -> None:
        self._groups, self._host, self._file, self._traffic = groups, host, file, traffic
        self.without_room = self.failed = self.lost = 0

    def want(self, entry: Entry) -> None:
        """A block of host memory is to be written, unless the file tier has it."""
        if entry.hash in self._file.index[entry.group]:
            return
        if self._file.takes_more:
            self._host.onward[entry] = None
        else:
            self.lost += 1

    def switch_off(self) -> None:
        self._file.takes_more = False
        self.lost += len(self._host.onward)
        self._host.onward.clear()

    def moves(self, now: float) -> tuple[list[Move], float]:
        """Cut moves within budget and rate; returns also when there is more to be had."""
        moves: list[Move] = []
        if not self._file.takes_more:
            return moves, math.inf
        kind, onward = MoveKind.WRITE_BACK, self._host.onward
        while onward and self._traffic.fits(kind, 0, self._size(next(iter(onward)))):
            if (when := self._traffic.write_back_at(now)) > now:
                return moves, when
            items, sources = self._take()
            if items:
                num_bytes = sum(self._size(item.entry) for item in items)
                self._traffic.wrote_back(num_bytes)
                moves.append(self._traffic.begin(kind, None, items, self._host, sources, num_bytes))
        return moves, math.inf

    def _take(self) -> tuple[list[Item], list[Entry]]:
        """Find room for as much as one move carries; returns what is written, and what is read for it."""
        chosen, num_bytes = list[Entry](), 0
        for entry in self._host.onward:
            if not self._traffic.fits(MoveKind.WRITE_BACK, num_bytes, self._size(entry)):
                break
            chosen.append(entry)
            num_bytes += self._size(entry)
        by_group: dict[int, list[Entry]] = {}
        for entry in chosen:
            del self._host.onward[entry]
            if entry.hash not in self._file.index[entry.group]:
                by_group.setdefault(entry.group, []).append(entry)
        items, sources = list[Item](), list[Entry]()
        for g, entries in by_group.items():
            made = self._file.make(g, [entry.hash for entry in entries])
            self.without_room += len(entries) - len(made)
            items += [Item(0, entry) for entry in made]
            sources += entries[: len(made)]
        return items, sources

    def ended(self, running: Running, i: int, is_good: bool) -> None:
        """Note how a block's write-back ended; one that failed is tried again, a few times."""
        entry, source, move_id = running.items[i].entry, running.sources[i], running.move.move_id
        if is_good:
            self._file.written(entry)
        else:
            self._file.failed(entry, EntryEvent.FAILED)
            source.tries += 1
            if source.tries < TRIES and source.state is EntryState.READY:
                self.want(source)
            else:
                self.failed += 1
        self._file.end(entry, move_id)
        self._host.end(source, move_id)

    def _size(self, entry: Entry) -> int:
        return self._groups[entry.group].record_bytes
