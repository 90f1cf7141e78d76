"""The packed copies of lent blocks that an owner makes for readers.

A copy belongs to a grant. It is made while the grant runs, and its slot is used again once the grant has ended or the
reader needs the copy no more; in either case not before the copy is made, because the memory follows the writer. So the
proof of a read covers a copy as it covers blocks. A pull with a grant that ran out is granted nothing again.

An owner lets few wishes of a reader wait for a slot, and refuses others (`core/asks.py` has the reader's side).
"""

from __future__ import annotations

from dataclasses import dataclass

from asynckv.core.lease import Lease
from asynckv.core.outbox import Outbox, PackBlocks
from asynckv.core.slots import Slots
from asynckv.core.types import Key, PullId, ReplyTo
from asynckv.core.wire import Pack, Packed, Unpack
from asynckv.geometry.gather import Gathered, Packing

MAX_WAITING, MAX_WAITING_IN_ALL = 16, 512  # copies that wait for a slot: of one reader, and of all
NO_SLOT = -1


@dataclass(slots=True, eq=False)
class _Copy:
    key: Key
    pull_id: PullId
    nonce: int
    sender: str
    reply_to: ReplyTo
    gathered: Gathered
    slot: int = NO_SLOT
    is_made: bool = False
    is_wanted: bool = True


class Copies:
    def __init__(self, packing: Packing | None, outbox: Outbox) -> None:
        self.slot_bytes = packing.slot_bytes if packing is not None else 0
        self._outbox = outbox
        self.slots: Slots[_Copy] = Slots(packing.num_slots if packing is not None else 0)
        self.by_key: dict[Key, dict[tuple[PullId, int], _Copy]] = {}
        """Copies that are waited for, made or kept, by the lent request and by pull and nonce."""
        self._waiting: dict[_Copy, None] = {}
        self._making: dict[int, _Copy] = {}

    def ask(self, pack: Pack, gathered: Gathered, sender: str, reply_to: ReplyTo) -> bool:
        """Take a reader's wish; return False if too many of its connection wait, because it may make up names."""
        pull_id = PullId(pack.pull_id)
        if (known := self.by_key.get(pack.key, {}).get((pull_id, pack.nonce))) is not None:
            if known.is_made:
                self._answer(known, known.slot)
            return True
        theirs = sum([copy.reply_to == reply_to for copy in self._waiting])
        if theirs >= MAX_WAITING or len(self._waiting) >= MAX_WAITING_IN_ALL:
            return False
        copy = _Copy(pack.key, pull_id, pack.nonce, sender, reply_to, gathered)
        self.by_key.setdefault(pack.key, {})[pull_id, pack.nonce] = copy
        self._waiting[copy] = None
        self._outbox.counters["copies.asked"] += 1
        self._go_on()
        return True

    def made(self, slot: int, failure: str) -> None:
        """Take the end of the work on a slot."""
        copy = self._making.pop(slot)
        if failure and copy.is_wanted:
            self._answer(copy, NO_SLOT)
            self._drop(copy)
        copy.is_made = True
        if copy.is_wanted:
            self._outbox.counters["copies.made"] += 1
            self._answer(copy, slot)
        else:
            self._free(copy)

    def unpack(self, unpack: Unpack) -> None:
        if (copy := self.by_key.get(unpack.key, {}).get((PullId(unpack.pull_id), unpack.nonce))) is not None:
            self._drop(copy)

    def settle(self, lease: Lease) -> None:
        """Drop the copies of grants that have ended."""
        copies = self.by_key[lease.lent.key].values()
        ended = [copy for copy in copies if lease.is_over or copy.pull_id not in lease.grants]
        for copy in ended:
            self._waiting.pop(copy, None)  # or it would be made in the slot of another one that has ended
        for copy in ended:
            self._drop(copy)

    def _drop(self, copy: _Copy) -> None:
        copy.is_wanted = False
        copies = self.by_key[copy.key]
        del copies[copy.pull_id, copy.nonce]
        if not copies:
            del self.by_key[copy.key]
        self._waiting.pop(copy, None)
        if copy.is_made:
            self._free(copy)

    def _free(self, copy: _Copy) -> None:
        self.slots.give_back(copy)
        self._go_on()

    def _go_on(self) -> None:
        for copy in list(self._waiting):
            if self.slots.has_room(copy.reply_to):
                del self._waiting[copy]
                copy.slot = self.slots.take(copy, copy.reply_to)
                self._making[copy.slot] = copy
                self._outbox.commands.append(PackBlocks(copy.slot, copy.gathered))

    def _answer(self, copy: _Copy, slot: int) -> None:
        self._outbox.send(copy.reply_to, copy.sender, Packed(copy.key, copy.pull_id, copy.nonce, slot))
