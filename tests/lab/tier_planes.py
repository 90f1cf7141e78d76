"""Planes of tiers in a simulated world: each move takes its time, and fate decides how it goes on.

What lands, and when a process hears of it, are events of the world: between them the process goes on, cancels, gives
blocks away, is paused or dies. A disk outlives its processes, and has one of them at a time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from asynckv.core.types import TransferId
from asynckv.errors import BackendError
from asynckv.geometry.plan import ReadRequest
from asynckv.ports import CopyOp, Record, StoredRecord
from tests.lab.tiers import SimCopies, SimDisk, SimRecords, digest
from tests.lab.world import Process


@dataclass(frozen=True, slots=True)
class MoveFate:
    """The fate of one move.

    Attributes:
        piece_s: How long each piece takes.
        ending: How it ends; `stuck` says nothing.
        after: Pieces that land before it goes wrong.
        late_s: When what was in doubt, or stuck, ends after all.
        late: How.
    """

    piece_s: float
    ending: Literal["done", "fail", "doubt", "stuck"] = "done"
    after: int = 0
    late_s: float = math.inf
    late: Literal["finish", "fail"] = "fail"

    def __str__(self) -> str:
        late = f", {self.late} {self.late_s:.3f} s later" if self.late_s < math.inf else ""
        return f"({self.ending} after {self.after} pieces of {self.piece_s:.6f} s{late})"


Fate = Callable[[random.Random], MoveFate]


class WorldCopies(SimCopies):
    """A copy plane of a process: pieces land one by one."""

    def __init__(self, process: Process, fate_of: Fate) -> None:
        super().__init__()
        self.deferred, self._process, self._fate_of = True, process, fate_of
        self._random = process.world.random_of("copies", process.name)

    def post(self, move_id: TransferId, op: CopyOp, far: str, pieces: Iterable[ReadRequest]) -> None:
        """Begin a move."""
        self._process.spend()
        super().post(move_id, op, far, iter(pieces))
        fate = self._fate_of(self._random)
        self._process.world.note(self._process.name, f"copy {move_id} {op.value}", fate)
        self._follow(move_id, fate, 0)

    def _follow(self, move_id: TransferId, fate: MoveFate, landed: int) -> None:
        world = self._process.world
        world.at(max(self._process.now, world.now) + fate.piece_s, partial(self._go, move_id, fate, landed))

    def _go(self, move_id: TransferId, fate: MoveFate, landed: int) -> None:
        if self._process.is_dead or move_id not in self.moves:
            return
        if fate.ending != "done" and landed >= fate.after:
            self._go_wrong(move_id, fate)
        elif self.step(move_id):
            self._follow(move_id, fate, landed + 1)

    def _go_wrong(self, move_id: TransferId, fate: MoveFate) -> None:
        if fate.ending == "fail":
            self.fail(move_id)
            return
        if fate.ending == "doubt":
            self.doubt(move_id)
        if fate.late_s < math.inf:
            self._process.world.at(self._process.world.now + fate.late_s, partial(self._end, move_id, fate))

    def _end(self, move_id: TransferId, fate: MoveFate) -> None:
        if not self._process.is_dead and move_id in self.moves:
            getattr(self, fate.late)(move_id)

    def _ring(self, on_ready: Callable[[], None]) -> None:
        self._process.call_at(self._process.world.now, on_ready)


class WorldDisk(SimDisk):
    """A disk of a world.

    Attributes:
        owner: The process that has it, if that lives.
        opened_at: When it was last opened.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.owner: Process | None = None
        self.opened_at = -math.inf


class WorldRecords(SimRecords):
    """A record plane of a process: a move is done in one go, after a while.

    Args:
        is_shared: It only reads what others have left, beside others that do.
    """

    disk: WorldDisk

    def __init__(self, process: Process, disk: WorldDisk, fate_of: Fate, *, is_shared: bool = False) -> None:
        super().__init__(disk)
        self._is_shared = is_shared
        self.deferred, self._process, self._fate_of = True, process, fate_of
        self._random = process.world.random_of("records", process.name)

    def start(self, *args: Any) -> Sequence[StoredRecord]:
        """Open the disk, unless another process has it."""
        owner = self.disk.owner
        if not self._is_shared:
            if owner is not None and not owner.is_dead:
                raise BackendError(f"{owner.name} has the directory")
            self.disk.owner, self.disk.opened_at = self._process, self._process.now
        return super().start(*args)

    def post(self, move_id: TransferId, op: CopyOp, records: Sequence[Record]) -> None:
        """Begin a move."""
        assert op is CopyOp.READ or not self._is_shared, "what others have left is written"
        self._process.spend()
        super().post(move_id, op, records)
        fate, world = self._fate_of(self._random), self._process.world
        world.note(self._process.name, f"records {move_id} {op.value}", fate)
        world.at(max(self._process.now, world.now) + fate.piece_s, partial(self._go, move_id, fate))

    def _go(self, move_id: TransferId, fate: MoveFate) -> None:
        if self._process.is_dead or move_id not in self.moves:
            return
        if fate.ending == "done":
            self.finish(move_id)
        elif fate.ending == "fail":
            self.fail(move_id)
        else:
            if fate.ending == "stuck":  # which is noticed: the disk is given up, and only this may still be done
                move = self.moves.pop(move_id)
                self.lose("the disk does not answer")
                self.moves[move_id] = move
            self.doubt(move_id)
            if fate.late_s < math.inf:
                self._process.world.at(self._process.world.now + fate.late_s, partial(self._end, move_id, fate))

    def _end(self, move_id: TransferId, fate: MoveFate) -> None:
        if not self._process.is_dead and move_id in self.moves:
            getattr(self, fate.late)(move_id)

    def tear(self) -> None:
        """The process was killed: what it was writing is there, is not, or is torn."""
        for op, records in self.moves.values():
            for record in records if op is CopyOp.WRITE else ():
                what, data = self._random.random(), self._memory[record.near : record.near + record.size].tobytes()
                if what < 0.3:
                    self.disk.put(record, data)
                elif what < 0.6:
                    cut = self._random.randrange(1, 64)
                    self.disk.put(record, bytes(cut) + data[cut:], digest(record.key, data))

    def close(self) -> None:
        """Let others in."""
        if self.is_open and not self._is_shared:
            self.disk.owner = None
        super().close()

    def forget(self, places: Iterable[int]) -> None:
        """Drop what is stored, but nothing that others have left."""
        if not self._is_shared:
            super().forget(places)

    def _ring(self, on_ready: Callable[[], None]) -> None:
        self._process.call_at(self._process.world.now, on_ready)
