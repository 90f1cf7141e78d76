"""What vLLM has been told of host memory, and what it has told of the moves that workers carry out."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

from asynckv.integrations.vllm.compat import Medium, OffloadingEvent, OffloadKey
from asynckv.offload.entry import EntryState
from asynckv.offload.job import Move
from asynckv.offload.tier import Tier


class Seen:
    """Which block lies in which slot; vLLM hears of each once it can be loaded, and when its slot is given away."""

    def __init__(self, host: Tier, is_known: Callable[[OffloadKey], bool], has_events: bool) -> None:
        self._host, self._is_known = host, is_known
        self._events: list[OffloadingEvent] | None = [] if has_events else None
        self._at: dict[int, OffloadKey] = {}
        self.evicted: list[OffloadKey] = []  # since somebody has emptied it

    def stored(self, move: Move) -> None:
        keys = []
        for piece in move.pieces:
            for hash_, slot in zip(piece.hashes, piece.host_slots, strict=True):
                entry = self._host.index[piece.group].get(hash_)
                if entry is not None and entry.slot == slot and entry.state is EntryState.READY:
                    if slot in self._at:
                        continue  # it was brought from files for another request as well
                    key = OffloadKey(hash_)
                    self._at[slot] = key
                    keys.append(key)
        self._tell(keys, removed=False)

    def reuse(self, move: Move) -> None:
        """What was in the slots that a move writes anew has been given up."""
        slots = [slot for piece in move.pieces for slot in piece.host_slots]
        gone = [key for slot in slots if (key := self._at.pop(slot, None)) is not None and not self._is_known(key)]
        self.evicted += gone
        self._tell(gone, removed=True)

    def _tell(self, keys: list[OffloadKey], removed: bool) -> None:
        if keys and self._events is not None:
            self._events.append(OffloadingEvent(keys, Medium.CPU, removed=removed))

    def clear(self) -> None:
        self._at.clear()

    def take(self) -> list[OffloadingEvent]:
        if self._events is None:
            return []
        events, self._events = self._events, []
        return events


class OpenMoves:
    """Moves of one direction that workers carry out; vLLM tells of their keys, one by one."""

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
        """Moves of which the last key has been told of. Of moves that share a key, the oldest is told of first."""
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
        """Expect to hear of none any more; returns all of them, once each."""
        moves = {move.move_id: move for some in self._by_key.values() for move, _ in some}
        self._by_key.clear()
        return list(moves.values())
