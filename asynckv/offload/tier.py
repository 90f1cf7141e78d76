"""One tier: its blocks by their keys, their slots, and their eviction.

Entries are found, given slots and dropped here. A written block can be found and evicted, a dropped block cannot be
found, and a block that is gone gives its slot back.

A group evicts its own blocks first. If it has none, or has evicted a chunk's worth, it may take a whole chunk from
records of another size: the least recently used chunk. In the second case every block in it must have been used before
the last evicted block, so that the eviction agrees with the policy.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from asynckv.core.types import members
from asynckv.offload.entry import Entry, EntryEvent, EntryState, Holder
from asynckv.offload.eviction import Policy, S3Fifo, policy_named
from asynckv.offload.keys import StoredGroup
from asynckv.offload.slots import Room, TierSlots


class Place(enum.StrEnum):
    HOST = "host"
    FILE = "file"


S, E = members(EntryState), members(EntryEvent)
BEFORE = -2  # tick of other models' blocks: before all others, and never a spared tick
SLICE = 512  # blocks that are dropped in one turn, in about a millisecond


class Tier:
    def __init__(self, place: Place, groups: Sequence[StoredGroup], num_bytes: int, policy: str) -> None:
        self.place = place
        self.slots = TierSlots(num_bytes, [group.record_bytes for group in groups], f"{place}_bytes")
        self.index: list[dict[bytes, Entry]] = [{} for _ in groups]  # WRITING and READY entries, by group
        self.writing: list[set[bytes]] = [set() for _ in groups]  # per group, the hashes of WRITING entries
        self.leaving: set[Entry] = set()
        kind = policy_named(policy)
        self.policies: list[Policy[Entry]] = [
            kind(lambda entry: (entry.group, entry.hash)) if kind is S3Fifo else kind() for _ in self.slots.sizes
        ]
        """Per record size, the policy for WRITING and READY entries."""
        self.onward: dict[Entry, None] = {}  # entries to copy to the next tier, oldest first
        self.others = [OrderedDict[Entry, None]() for _ in self.slots.sizes]  # other models' blocks, the oldest first
        self._doomed: list[dict[bytes, Entry]] = []  # entries that are not found any more, and are dropped in slices
        self.freed: list[tuple[int, int]] = []  # `(group, slot)` that the files' index must forget
        self.tick = 0
        self.is_off = not num_bytes  # True if nothing is found in it
        self.takes_more = num_bytes > 0
        self.evicted = self.lost = 0  # evicted blocks, and blocks that left before the next tier got them
        self._spared = -1
        self.may_take = math.inf  # chunks that a size may take from others though it has blocks to evict
        self._idle = [0] * len(self.slots.sizes)  # per record size, the READY entries without holders
        self._idle_in = [0] * self.slots.num_chunks  # the same per chunk
        self._evictions = [0] * len(self.slots.sizes)
        self._is_mixed = len(self.slots.sizes) > 1
        self._in_chunk: list[set[Entry]] = [set() for _ in range(self.slots.num_chunks)]  # if sizes are mixed
        self._used = [0] * self.slots.num_chunks  # tick of the last use in each chunk

    def make(self, group: int, hashes: Sequence[bytes], *, spares: bool = False) -> list[Entry]:
        """Make entries for as many blocks as there is room for; if it `spares`, entries used in this tick stay."""
        if not self.takes_more:
            return []
        kind, self._spared = self.slots.kinds[group], self.tick if spares else -1
        while self.slots.reserve(kind, len(hashes)) < len(hashes) and self._evict(kind):
            pass
        slots = self.slots.take(kind, len(hashes))
        made = [self._entry(group, h, slot, S.WRITING) for h, slot in zip(hashes, slots, strict=False)]
        self.index[group].update((entry.hash, entry) for entry in made)
        self.writing[group].update(entry.hash for entry in made)
        for entry in reversed(made):
            self.policies[kind].add(entry)
        self._place(made)
        return made

    def room(self, spared: Iterable[Entry]) -> Room:
        """Return the room after evicting every idle block except those that were used in this tick."""
        free, num_whole = self.slots.room(), [0] * len(self._idle)
        have = [n + m for n, m in zip(free.slots, self._idle, strict=True)]
        for entry in spared:
            have[entry.kind] -= self._is_idle(entry)
        if self._is_mixed:
            self._spared = self.tick
            for chunk, kind in enumerate(self.slots.owners):
                if kind is not None and self._is_idle_chunk(chunk):
                    lo, hi = self.slots.bounds(kind, chunk)
                    have[kind] -= hi - lo
                    num_whole[kind] += 1
        return Room(have, num_whole, free.free, free.per_chunk)

    def _entry(self, group: int, hash_: bytes, slot: int, state: EntryState) -> Entry:
        kind = self.slots.kinds[group]
        return Entry(group, hash_, slot, state, self.tick, kind, self.slots.chunk(kind, slot))

    def _place(self, entries: Sequence[Entry]) -> None:
        if self._is_mixed:
            for entry in entries:
                self._in_chunk[entry.chunk].add(entry)
                self._mark(entry)

    def _mark(self, entry: Entry) -> None:
        entry.used = self.tick
        if self._is_mixed:
            self._used[entry.chunk] = self.tick

    def _is_busy(self, entry: Entry) -> bool:
        if entry.holders or entry.state is not S.READY:
            return True
        return entry.used == self._spared  # `use` follows, and informs the policy

    def _is_idle(self, entry: Entry) -> bool:
        return entry.state is S.READY and not entry.holders

    def _count(self, entry: Entry, more: int) -> None:
        self._idle[entry.kind] += more
        self._idle_in[entry.chunk] += more

    def _evict(self, kind: int) -> bool:
        if self.others[kind]:
            self.evicted += 1
            self.drop(next(iter(self.others[kind])))
            return True
        if any(self.others) and self._evict_chunk(kind, BEFORE + 1):
            return True
        victim = self.policies[kind].choose(self._is_busy) if self._idle[kind] else None
        if victim is None:
            return self._evict_chunk(kind)
        self.evicted += 1
        self._forget(victim)
        if self._is_mixed:
            self._evictions[kind] += 1
            lo, hi = self.slots.bounds(kind, 0)
            if self._evictions[kind] >= hi - lo and self.may_take > 0:
                self._evictions[kind] = 0
                self.may_take -= self._evict_chunk(kind, victim.used)
        return True

    def _evict_chunk(self, kind: int, before: float = math.inf) -> bool:
        """Evict a chunk of records of another size, all used before `before`; return False if there is none."""
        owners = self.slots.owners
        others = [
            (used, chunk)
            for chunk, used in enumerate(self._used)
            if used < before and owners[chunk] not in (None, kind) and self._is_idle_chunk(chunk)
        ]
        if not others:
            return False
        entries = self._in_chunk[min(others)[1]]
        self.evicted += len(entries)
        for entry in sorted(entries, key=lambda entry: entry.slot):
            self.drop(entry)
        return True

    def _is_idle_chunk(self, chunk: int) -> bool:
        """Return True if a chunk has blocks, and all of them may be evicted."""
        return 0 < self._idle_in[chunk] == len(self._in_chunk[chunk]) and self._used[chunk] != self._spared

    def recover(self, found: Iterable[tuple[int, int, bytes]], others: Iterable[tuple[int, int]] = ()) -> int:
        """Take in `(group, slot, hash)` of an empty tier, least recently used first; return the number of blocks taken.

        A block outside the tier, in the slot of another, or repeated is freed. `others` are `(group, slot)` of other
        models' blocks.
        """
        found, tick = list(found), self.tick
        wanted = [(g, slot, h) for (g, h), slot in {(g, h): slot for g, slot, h in found}.items()]
        num_own = len(wanted)
        wanted += [(group, slot, b"") for group, slot in others]
        claimed = self.slots.claim((self.slots.kinds[group], slot) for group, slot, _ in wanted)
        kept = set[tuple[int, int]]()
        # A later use makes a chunk newer, so other models' blocks come first, as if used before all others.
        for n in (*range(num_own, len(wanted)), *range(num_own)):
            group, slot, hash_ = wanted[n]
            if claimed[n]:
                self.tick = tick if n < num_own else BEFORE
                entry = self._entry(group, hash_, slot, S.READY)
                if n < num_own:
                    self.index[group][hash_] = entry
                else:
                    self.others[entry.kind][entry] = None
                self.policies[entry.kind].add(entry)
                self._count(entry, 1)
                self._place([entry])
                kept.add((group, slot))
        self.tick = tick
        self.freed += dict.fromkeys(each[:2] for each in (*found, *wanted) if each[:2] not in kept)
        return sum(map(len, self.index))

    def use(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._mark(entry)
            self.policies[entry.kind].use(entry)

    def spare(self, entries: Iterable[Entry]) -> None:
        """Note that blocks are about to be used, so that `make` can spare them."""
        for entry in entries:
            self._mark(entry)

    def written(self, entry: Entry) -> bool:
        self._take(entry, E.WRITTEN)
        if entry.state is not S.READY:
            return False
        self.writing[entry.group].remove(entry.hash)
        self._settle(entry)
        return True

    def failed(self, entry: Entry) -> None:
        if entry.state is S.WRITING:
            self.policies[entry.kind].remove(entry)
        self._hide(entry)
        self._take(entry, E.FAILED)

    def drop(self, entry: Entry) -> None:
        """Remove a block from the index; its slot is free when no holder and no transfer needs it."""
        if entry.state in (S.READY, S.WRITING):
            self.others[entry.kind].pop(entry, None)
            self.policies[entry.kind].remove(entry)
            self._forget(entry)

    def drop_all(self, but: Collection[Entry] = ()) -> list[Entry]:
        """Remove all blocks except some from the index at once; return those that were being written."""
        left: list[dict[bytes, Entry]] = [{} for _ in self.index]
        for entry in but:
            if self.index[entry.group].get(entry.hash) is entry:
                left[entry.group][entry.hash] = self.index[entry.group].pop(entry.hash)
        writing = [index[hash_] for index, some in zip(self.index, self.writing, strict=True) for hash_ in some]
        for entry in writing:
            self.drop(entry)
        self._doomed += self.index
        self.index = left
        onward = {entry: None for entry in self.onward if left[entry.group].get(entry.hash) is entry}
        self.lost += len(self.onward) - len(onward)
        self.onward = onward
        self.drop_some()
        return writing

    def drop_some(self) -> bool:
        left = SLICE
        while self._doomed and left:
            if not self._doomed[-1]:
                self._doomed.pop()
                continue
            _, entry = self._doomed[-1].popitem()
            if entry.state is S.READY:  # it may have been evicted meanwhile
                self.drop(entry)
            left -= 1
        return bool(self._doomed)

    def hold(self, entry: Entry, holder: Holder) -> None:
        if self._is_idle(entry):
            self._count(entry, -1)
        entry.hold(holder)

    def let_go(self, entry: Entry, holder: Holder) -> None:
        if holder in entry.holders:
            if entry.let_go(holder):
                self._gone(entry)
            elif entry.state is S.READY:
                self._settle(entry)

    def _settle(self, entry: Entry) -> None:
        """Count a READY entry as idle if it has no holders any more."""
        if not entry.holders:
            self._count(entry, 1)
            self.policies[entry.kind].idle(entry)

    def _forget(self, entry: Entry) -> None:
        if self._is_idle(entry):
            self._count(entry, -1)
        self._hide(entry)
        self._take(entry, E.DROPPED)

    def _hide(self, entry: Entry) -> None:
        """Remove an entry from the index, unless another entry has its key by now."""
        if entry.state in (S.READY, S.WRITING):
            if self.index[entry.group].get(entry.hash) is entry:
                del self.index[entry.group][entry.hash]
            if entry.state is S.WRITING:
                self.writing[entry.group].remove(entry.hash)
            self.leaving.add(entry)
            if entry in self.onward:
                del self.onward[entry]
                self.lost += 1

    def _take(self, entry: Entry, event: EntryEvent) -> None:
        if entry.receive(event):
            self._gone(entry)

    def _gone(self, entry: Entry) -> None:
        self.leaving.discard(entry)
        if self._is_mixed:
            self._in_chunk[entry.chunk].discard(entry)
        self.slots.put(entry.kind, entry.slot)
        if self.place is Place.FILE:
            self.freed.append((entry.group, entry.slot))

    @property
    def num_idle(self) -> int:
        return sum(self._idle)
