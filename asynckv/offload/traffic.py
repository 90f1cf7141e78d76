"""Moves in flight, within budgets of bytes.

Every kind of move has a budget of its own, and so has a single move. One move of a kind may always run, and one block
may always move. A move in doubt counts for no budget, because it may stay in doubt for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asynckv.errors import LocalProtocolError
from asynckv.offload.entry import Entry
from asynckv.offload.job import Item, Job, Move, MoveKind, Piece
from asynckv.offload.tier import Tier


@dataclass(slots=True, eq=False)
class Running:
    """A posted move, and the entries that it touches."""

    move: Move
    job: Job | None  # the job with the device's blocks that it reads or writes; None for a move between tiers
    items: list[Item]  # entries of host memory that it reads or writes; for a write-back, entries of the file tier
    sources: list[Entry]  # entries that a promotion or a write-back reads
    is_doubtful: bool = False


MOVE_BYTES = 64 << 20  # most bytes of one move
BUDGETS: Mapping[MoveKind, int] = {
    **dict.fromkeys((MoveKind.LOAD, MoveKind.STORE), 1 << 30),
    **dict.fromkeys((MoveKind.PROMOTION, MoveKind.WRITE_BACK), 256 << 20),
}
"""Most bytes of all moves of a kind that are in flight."""


class Traffic:
    def __init__(self, limits: Mapping[MoveKind, int], move_bytes: int) -> None:
        self.limits, self._move_bytes = limits, move_bytes
        self.running: dict[int, Running] = {}
        self.under_way = dict.fromkeys(MoveKind, 0)  # bytes by kind, without moves in doubt
        self._last_id = 0

    def fits(self, kind: MoveKind, num_bytes: int, more: int) -> bool:
        under_way = self.under_way[kind] + num_bytes
        if under_way == 0:
            return True
        return under_way + more <= self.limits[kind] and (num_bytes == 0 or num_bytes + more <= self._move_bytes)

    def is_idle(self) -> bool:
        return all(running.is_doubtful for running in self.running.values())

    def begin(
        self, kind: MoveKind, job: Job | None, items: list[Item], of: Tier, sources: list[Entry], num_bytes: int
    ) -> Move:
        """Make a move, and note it on all entries that it touches; `sources` are entries of the tier `of`."""
        self._last_id += 1
        groups: dict[int, list[int]] = {}
        for i, item in enumerate(items):
            groups.setdefault(item.entry.group, []).append(i)
        by_group = [([items[i] for i in x], [sources[i] for i in x] if sources else []) for x in groups.values()]
        pieces = tuple(piece_of(kind, *some) for some in by_group)
        items, sources = [x for here, _ in by_group for x in here], [x for _, there in by_group for x in there]
        move = Move(self._last_id, kind, job.job_id if job is not None else "", pieces, num_bytes)
        for _, entry in items:
            entry.hold(move.move_id)
        for entry in sources:
            of.hold(entry, move.move_id)
        self.under_way[kind] += num_bytes
        is_device = kind in (MoveKind.LOAD, MoveKind.STORE)
        self.running[move.move_id] = Running(move, job if is_device else None, items, sources)
        return move

    def get(self, move_id: int) -> Running:
        running = self.running.get(move_id)
        if running is None:
            raise LocalProtocolError(f"move {move_id} is not under way")
        return running

    def doubt(self, running: Running) -> None:
        running.is_doubtful = True
        self.under_way[running.move.kind] -= running.move.num_bytes

    def end(self, running: Running) -> None:
        del self.running[running.move.move_id]
        if not running.is_doubtful:
            self.under_way[running.move.kind] -= running.move.num_bytes


def piece_of(kind: MoveKind, here: list[Item], there: list[Entry]) -> Piece:
    own, others = tuple(item.entry.slot for item in here), tuple(entry.slot for entry in there)
    is_device = kind in (MoveKind.LOAD, MoveKind.STORE)
    return Piece(
        here[0].entry.group,
        tuple(item.entry.hash for item in here),
        tuple(item.position for item in here) if is_device else (),
        others if kind is MoveKind.WRITE_BACK else own,
        own if kind is MoveKind.WRITE_BACK else others,
    )
