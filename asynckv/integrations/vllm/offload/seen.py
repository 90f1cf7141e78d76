"""The blocks of host memory that vLLM knows of, and the moves of workers that it has yet to report as ended."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

from asynckv.integrations.vllm.compat import Medium, OffloadingEvent, OffloadKey
from asynckv.offload.entry import EntryState
from asynckv.offload.job import Move
from asynckv.offload.tier import Tier


class Seen:
    """The block of each slot. vLLM is told of a block once it can be loaded, and again when its slot is reused."""

    def __init__(self, host: Tier, is_known: Callable[[OffloadKey], bool], has_events: bool) -> None:
        self._host, self._is_known = host, is_known
        self._has_events, self._events = has_events, list[OffloadingEvent]()
        self._at: dict[int, OffloadKey] = {}
        self.evicted: list[OffloadKey] = []  # since the caller cleared it

    def stored(self, move: Move) -> None:
        keys = []
        for piece in move.pieces:
            for hash_, slot in zip(piece.hashes, piece.host_slots, strict=True):
                entry = self._host.index[piece.group].get(hash_)
                if entry is not None and entry.slot == slot and entry.state is EntryState.READY:
                    if slot in self._at:
                        continue  # another request brought it from files as well
                    key = OffloadKey(hash_)
                    self._at[slot] = key
                    keys.append(key)
        self._tell(keys, removed=False)

    def reuse(self, move: Move) -> None:
        """Report the earlier blocks of the slots that a move writes as evicted."""
        slots = [slot for piece in move.pieces for slot in piece.host_slots]
        gone = [key for slot in slots if (key := self._at.pop(slot, None)) is not None and not self._is_known(key)]
        self.evicted += gone
        self._tell(gone, removed=True)

    def _tell(self, keys: list[OffloadKey], removed: bool) -> None:
        if keys and self._has_events:
            self._events.append(OffloadingEvent(keys, Medium.CPU, removed=removed))

    def clear(self) -> None:
        self._at.clear()

    def take(self) -> list[OffloadingEvent]:
        events, self._events = self._events, []
        return events


class OpenMoves:
    """Moves of one direction that workers carry out; vLLM reports their keys one by one."""

    def __init__(self) -> None:
        self._by_key: defaultdict[OffloadKey, deque[tuple[Move, set[OffloadKey]]]] = defaultdict(deque)

    def open(self, move: Move, keys: Sequence[OffloadKey]) -> dict[OffloadKey, int]:
        where = {
            keys[position]: slot
            for piece in move.pieces
            for position, slot in zip(piece.positions, piece.host_slots, strict=True)
        }
        opened = move, set(where)
        for key in where:
            self._by_key[key].append(opened)
        return where

    def completed(self, keys: Iterable[OffloadKey]) -> list[Move]:
        """Return the moves that have no unreported key left. A key counts for the oldest move that has it."""
        over = []
        for key in dict.fromkeys(keys):
            if (some := self._by_key.get(key)) is None:
                continue
            move, left = some.popleft()
            if not some:
                del self._by_key[key]
            left.discard(key)
            if not left:
                over.append(move)
        return over

    def abandon(self) -> list[Move]:
        """Expect no more reports; returns every open move once."""
        moves = {move.move_id: move for some in self._by_key.values() for move, _ in some}
        self._by_key.clear()
        return list(moves.values())
