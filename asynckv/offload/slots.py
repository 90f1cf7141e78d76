"""Free slots of a tier, for groups with different record sizes.

Slot `b` of a group lies at `b * record_bytes`. The tier is cut into *chunks*, so that records of several sizes share
it. A chunk belongs to one record size at a time, until its last slot is free, as in a slab allocator (Bonwick, USENIX
1994). Slots are handed out in *runs*, because neighbours become one descriptor. Free runs are kept by the power of two
of their length, as in two-level segregated fits (Masmano et al., ECRTS 2004), for constant time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from asynckv.errors import ConfigError

RECORDS_PER_CHUNK = 8  # least number of the largest records, so that little space is lost at a chunk's ends
MAX_CHUNKS = 256


class Runs:
    def __init__(self) -> None:
        self.total = 0
        self._lengths: dict[int, int] = {}
        self._starts: dict[int, int] = {}  # end of a run (exclusive) -> its start
        self._by_size: list[dict[int, None]] = []  # starts of runs, by the number of bits of their length

    def add(self, start: int, length: int, lo: int, hi: int) -> tuple[int, int]:
        """Free a run, and merge it with neighbours in `[lo, hi)`; return the merged run."""
        self.total += length
        end = start + length
        if start > lo and (before := self._starts.get(start)) is not None:
            self._remove(before)
            start = before
        if end < hi and (after := self._lengths.get(end)) is not None:
            self._remove(end)
            end += after
        self._insert(start, end - start)
        return start, end - start

    def take(self, n: int) -> list[int]:
        """Take up to `n` slots, in few runs as far as that is cheap."""
        found: list[int] = []
        while (left := n - len(found)) > 0 and self.total:
            # Any run with one bit more is long enough; if there is none, the longest runs are used first.
            sizes = range(left.bit_length() + 1, len(self._by_size))
            size = next((s for s in sizes if self._by_size[s]), 0)
            size = size or next(s for s in range(len(self._by_size) - 1, 0, -1) if self._by_size[s])
            start = next(iter(self._by_size[size]))
            found += self.cut(start, start, min(left, self._lengths[start]))
        return found

    def cut(self, run: int, start: int, length: int) -> range:
        end = run + self._remove(run)
        if start > run:
            self._insert(run, start - run)
        if end > start + length:
            self._insert(start + length, end - start - length)
        self.total -= length
        return range(start, start + length)

    def _insert(self, start: int, length: int) -> None:
        self._lengths[start], self._starts[start + length] = length, start
        while len(self._by_size) <= length.bit_length():
            self._by_size.append({})
        self._by_size[length.bit_length()][start] = None

    def _remove(self, start: int) -> int:
        length = self._lengths.pop(start)
        del self._starts[start + length]
        del self._by_size[length.bit_length()][start]
        return length


class Room(NamedTuple):
    slots: list[int]  # free or idle slots in chunks that hold a block which stays
    whole: list[int]  # chunks that each record size could give away
    free: int  # chunks without an owner
    per_chunk: list[int]  # slots per chunk, by record size

    def fits(self, wanted: Sequence[int]) -> bool:
        return self.over(wanted) >= 0

    def over(self, wanted: Sequence[int]) -> int:
        """Return the chunks that are left over; less than 0 if there are too few."""
        chunks = (max(0, -(-(n - m) // per)) for n, m, per in zip(wanted, self.slots, self.per_chunk, strict=True))
        return sum(self.whole) + self.free - sum(chunks)

    def short(self, wanted: Sequence[int], kind: int) -> int:
        """Return the chunks that a record size must take from others; less than 0 if it has some over."""
        return -(-(wanted[kind] - self.slots[kind]) // self.per_chunk[kind]) - self.whole[kind]


class TierSlots:
    """The slots of one tier. `record_bytes` are each group's bytes from slot to slot; `name` is the size's setting."""

    def __init__(self, num_bytes: int, record_bytes: Sequence[int], name: str = "num_bytes") -> None:
        self.num_bytes = num_bytes
        self.sizes = sorted(set(record_bytes))
        self.kinds = tuple(self.sizes.index(size) for size in record_bytes)  # per group, the index of its record size
        least = RECORDS_PER_CHUNK * max(self.sizes) * len(self.sizes)
        if len(self.sizes) == 1:
            least, self.chunk_bytes = self.sizes[0], num_bytes or 1
        else:
            self.chunk_bytes = max(RECORDS_PER_CHUNK * max(self.sizes), -(-num_bytes // MAX_CHUNKS))
            every = math.lcm(*self.sizes)
            if every <= self.chunk_bytes:  # a multiple of all sizes loses nothing at a chunk's ends
                self.chunk_bytes = -(-self.chunk_bytes // every) * every
            self.chunk_bytes = min(self.chunk_bytes, num_bytes // len(self.sizes) or 1)
        if 0 < num_bytes < least:
            raise ConfigError(
                f"{name} is {num_bytes}, which cannot hold records of {', '.join(map(str, self.sizes))} bytes; "
                f"give {least} or more"
            )
        self.num_chunks = num_bytes // self.chunk_bytes
        self.owners: list[int | None] = [None] * self.num_chunks  # per chunk, the record size that it holds
        self._free_chunks = dict.fromkeys(range(self.num_chunks))
        self._per_chunk = [
            min((hi - lo for lo, hi in (self.bounds(kind, chunk) for chunk in range(self.num_chunks))), default=0)
            for kind in range(len(self.sizes))
        ]
        self._runs = [Runs() for _ in self.sizes]

    def bounds(self, kind: int, chunk: int) -> tuple[int, int]:
        size = self.sizes[kind]
        return -(-chunk * self.chunk_bytes // size), (chunk + 1) * self.chunk_bytes // size

    def chunk(self, kind: int, slot: int) -> int:
        return slot * self.sizes[kind] // self.chunk_bytes

    def room(self) -> Room:
        return Room([run.total for run in self._runs], [0] * len(self.sizes), len(self._free_chunks), self._per_chunk)

    def reserve(self, kind: int, n: int) -> int:
        """Take chunks until `n` slots are free; return the number of free slots, at most `n`."""
        runs = self._runs[kind]
        while runs.total < n and self._free_chunks:
            self._own(kind, next(iter(self._free_chunks)))
        return min(n, runs.total)

    def take(self, kind: int, n: int) -> list[int]:
        return self._runs[kind].take(self.reserve(kind, n))

    def put(self, kind: int, slot: int) -> None:
        chunk = self.chunk(kind, slot)
        lo, hi = self.bounds(kind, chunk)
        start, length = self._runs[kind].add(slot, 1, lo, hi)
        if length == hi - lo:
            self._runs[kind].cut(start, start, length)
            self.owners[chunk] = None
            self._free_chunks[chunk] = None

    def claim(self, wanted: Iterable[tuple[int, int]]) -> list[bool]:
        """Take slots by `(record size, slot)` in an empty tier, for a recovery.

        Return for each whether it was taken: it must be in the tier, in a chunk of its record size, and not repeated.
        """
        taken: dict[int, set[int]] = {}
        answers = []
        for kind, slot in wanted:
            chunk = self.chunk(kind, slot)
            is_good = 0 <= chunk < self.num_chunks and self.owners[chunk] in (None, kind)
            if is_good:
                lo, hi = self.bounds(kind, chunk)
                is_good = lo <= slot < hi and slot not in taken.get(chunk, ())
            if is_good:
                self.owners[chunk] = kind
                self._free_chunks.pop(chunk, None)
                taken.setdefault(chunk, set()).add(slot)
            answers.append(is_good)
        for chunk, slots in taken.items():
            owner = self.owners[chunk]
            assert owner is not None
            start, hi = self.bounds(owner, chunk)
            for slot in [*sorted(slots), hi]:  # walks taken slots only, because a chunk may have far more slots
                if slot > start:
                    self._runs[owner].add(start, slot - start, start, slot)
                start = slot + 1
        return answers

    def _own(self, kind: int, chunk: int) -> None:
        del self._free_chunks[chunk]
        self.owners[chunk] = kind
        lo, hi = self.bounds(kind, chunk)
        self._runs[kind].add(lo, hi - lo, lo, hi)
