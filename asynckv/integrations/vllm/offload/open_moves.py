"""Moves that workers carry out, and which of their keys vLLM has told of: it tells of keys, one by one."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from asynckv.integrations.vllm.compat import OffloadKey
from asynckv.offload.job import Move


class OpenMoves:
    def __init__(self) -> None:
        self._by_key: defaultdict[OffloadKey, deque[tuple[Move, set[OffloadKey]]]] = defaultdict(deque)
        """Those that have a key, the oldest first, each with the keys that have not been told of."""

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
