"""The packed copies of lent blocks that an owner makes for readers.

A copy belongs to a grant. It is made while the grant runs, and its slot is used again once the grant has ended or the
reader needs the copy no more; in either case not before the copy is made, because the memory follows the writer. So the
proof of a read covers a copy as it covers blocks. A pull with a grant that ran out is granted nothing again.

Readers share the slots and the thread that copies: by key, or by host without keys, because a peer can have many
connections. Each waits in a line of its own, and lines take turns. An owner lets few wishes of a line wait, and refuses
others (`core/asks.py` has the reader's side).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from asynckv.core.lease import Lease
from asynckv.core.outbox import Outbox, PackBlocks
from asynckv.core.slots import Slots
from asynckv.core.types import Key, PullId, ReplyTo
from asynckv.core.wire import Pack, Packed, Unpack
from asynckv.geometry.gather import Gathered, Packing

MAX_WAITING, MAX_WAITING_IN_ALL = 16, 512  # copies that wait to be made: of one line, and of all
MAX_MAKING = 4  # copies of one line that the thread is given at a time: as many as an honest reader asks for
NO_SLOT = -1


@dataclass(slots=True, eq=False)
class _Copy:
    key: Key
    pull_id: PullId
    nonce: int
    sender: str
    reply_to: ReplyTo
    line: str | ReplyTo
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
        self._lines: OrderedDict[str | ReplyTo, deque[_Copy]] = OrderedDict()
        """Copies that wait, by reader; the line whose turn it is comes first."""
        self.num_waiting = 0
        self._making: dict[int, _Copy] = {}
        self._making_of = Counter[str | ReplyTo]()

    def find(self, pack: Pack) -> bool:
        """Return True if a reader's wish is known already, and answer it again if its copy is made."""
        known = self.by_key.get(pack.key, {}).get((PullId(pack.pull_id), pack.nonce))
        if known is not None and known.is_made:
            self._answer(known, known.slot)
        return known is not None

    def ask(self, pack: Pack, gathered: Gathered, sender: str, reply_to: ReplyTo, principal: str) -> bool:
        """Take a reader's wish; return False if too many of its line wait."""
        line = principal or reply_to
        waiting = self._lines.get(line) or deque()
        if len(waiting) >= MAX_WAITING or self.num_waiting >= MAX_WAITING_IN_ALL:
            return False
        copy = _Copy(pack.key, PullId(pack.pull_id), pack.nonce, sender, reply_to, line, gathered)
        self.by_key.setdefault(pack.key, {})[copy.pull_id, pack.nonce] = copy
        self._lines[line] = waiting
        waiting.append(copy)
        self.num_waiting += 1
        self._outbox.counters["copies.asked"] += 1
        self._make(line)  # no other line waits for this
        return True

    def made(self, slot: int, failure: str) -> None:
        """Take the end of the work on a slot."""
        copy = self._making.pop(slot)
        self._making_of -= Counter([copy.line])
        copy.is_made = True
        if not copy.is_wanted:
            self.slots.give_back(copy)
        elif failure:
            self._answer(copy, NO_SLOT)
            self._drop(copy)
        else:
            self._outbox.counters["copies.made"] += 1
            self._answer(copy, slot)
        self._go_on()

    def unpack(self, unpack: Unpack) -> None:
        if (copy := self.by_key.get(unpack.key, {}).get((PullId(unpack.pull_id), unpack.nonce))) is not None:
            self._drop(copy)
            if copy.is_made:
                self._go_on()

    def settle(self, lease: Lease) -> None:
        """Drop the copies of grants that have ended."""
        copies = self.by_key[lease.lent.key].values()
        for copy in [copy for copy in copies if lease.is_over or copy.pull_id not in lease.grants]:
            self._drop(copy)
        self._go_on()

    def _drop(self, copy: _Copy) -> None:
        copy.is_wanted = False
        copies = self.by_key[copy.key]
        del copies[copy.pull_id, copy.nonce]
        if not copies:
            del self.by_key[copy.key]
        self._leave_line(copy)
        if copy.is_made:
            self.slots.give_back(copy)

    def _leave_line(self, copy: _Copy) -> None:
        waiting = self._lines.get(copy.line)
        if waiting is not None and copy in waiting:
            waiting.remove(copy)
            self.num_waiting -= 1
            if not waiting:
                del self._lines[copy.line]

    def _go_on(self) -> None:
        """Begin the copies that have room now, one of each line in turn."""
        lines = [*self._lines]
        while lines:
            lines = [line for line in lines if self._make(line) and line in self._lines]

    def _make(self, line: str | ReplyTo) -> bool:
        if not self.slots.has_room(line) or self._making_of[line] >= MAX_MAKING:
            return False
        copy = self._lines[line][0]
        self._leave_line(copy)
        if line in self._lines:
            self._lines.move_to_end(line)
        copy.slot = self.slots.take(copy, line)
        self._making[copy.slot] = copy
        self._making_of[line] += 1
        self._outbox.commands.append(PackBlocks(copy.slot, copy.gathered))
        return True

    def _answer(self, copy: _Copy, slot: int) -> None:
        self._outbox.send(copy.reply_to, copy.sender, Packed(copy.key, copy.pull_id, copy.nonce, slot))
