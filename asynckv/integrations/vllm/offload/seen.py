"""What vLLM has been told of host memory: which block lies in which slot; it hears of each once, and of its end.

A block is told of when it can be loaded, and is gone when its slot is given to another one.
"""

from __future__ import annotations

from collections.abc import Callable

from asynckv.integrations.vllm.compat import Medium, OffloadingEvent, OffloadKey
from asynckv.offload.entry import EntryState
from asynckv.offload.job import Move
from asynckv.offload.tier import Tier


class Seen:
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
