"""Who holds which block, why, since when and until when.

Lenders share: one cached block may be lent to many requests. A writer is exclusive. The truth is the
set of holds; the arrays beside it only make conflicts cheap to find and are audited against it. The
engine owns the free list; asynckv audits holders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from asynckv.errors import LocalProtocolError
from asynckv.geometry.bounds import NULL

__all__ = ["Hold", "Int64s", "Ledger"]

Int64s = npt.NDArray[np.int64]

FEW = 8
"""Blocks that are looked up one by one: faster than as an array."""


@dataclass(slots=True, eq=False)
class Hold:
    """One holder's blocks.

    Attributes:
        holder: Pull id, or the lease's key token.
        kind: Lenders share, a writer is exclusive.
        since: When it began.
        blocks: Group -> block ids.
    """

    holder: str
    kind: Literal["lent", "writing"]
    request_id: str
    since: float
    blocks: Mapping[int, Int64s]

    @property
    def num_blocks(self) -> int:
        """Blocks over all groups."""
        return sum(map(len, self.blocks.values()))


class Ledger:
    """Every block's holders.

    Args:
        num_blocks: Each group's number of blocks, as declared.
        pools: Each group's pool: groups that see the same pages share one, and an id there is one block.
    """

    def __init__(self, num_blocks: Sequence[int], pools: Sequence[int] = ()) -> None:
        self._holds: dict[str, Hold] = {}
        self._pools = tuple(pools) or tuple(range(len(num_blocks)))
        most = [max(n for n, q in zip(num_blocks, self._pools, strict=True) if q == p) for p in self._pools]
        lent = {p: np.zeros(n, np.int32) for p, n in zip(self._pools, most, strict=True)}
        writing = {p: np.zeros(n, np.bool_) for p, n in zip(self._pools, most, strict=True)}
        self._lent = [lent[p] for p in self._pools]
        self._writing = [writing[p] for p in self._pools]

    def __len__(self) -> int:
        return len(self._holds)

    def __iter__(self) -> Iterator[Hold]:
        return iter(self._holds.values())

    def get(self, holder: str) -> Hold | None:
        """Return a holder's hold."""
        return self._holds.get(holder)

    def num_held(self, kind: Literal["lent", "writing"]) -> int:
        """Blocks with at least one holder of this kind."""
        arrays = self._lent if kind == "lent" else self._writing
        return sum(int(np.count_nonzero(arrays[p])) for p in set(self._pools))

    def take(
        self,
        holder: str,
        kind: Literal["lent", "writing"],
        request_id: str,
        groups: Mapping[int, Sequence[int] | Int64s],
        now: float,
    ) -> None:
        """Record a hold.

        Raises:
            LocalProtocolError: The holder has one already, or a block is held in a way that excludes it.
        """
        self.hold(holder, kind, request_id, self.check(kind, groups), now)

    def hold(
        self, holder: str, kind: Literal["lent", "writing"], request_id: str, blocks: Mapping[int, Int64s], now: float
    ) -> None:
        """Record a hold of what `check` has just returned.

        Raises:
            LocalProtocolError: The holder has one already.
        """
        if holder in self._holds:
            raise LocalProtocolError(f"{holder} holds blocks already")
        for group, ids in blocks.items():
            if kind == "lent":
                np.add.at(self._lent[group], ids, 1)
            else:
                self._writing[group][ids] = True
        self._holds[holder] = Hold(holder, kind, request_id, now, blocks)

    def check(
        self, kind: Literal["lent", "writing"], groups: Mapping[int, Sequence[int] | Int64s]
    ) -> dict[int, Int64s]:
        """Return the blocks as arrays, if they could be taken now.

        Raises:
            LocalProtocolError: A block is held in a way that excludes it.
        """
        blocks: dict[int, Int64s] = {}
        for group, given in groups.items():
            ids = np.asarray(given, np.int64)
            if len(ids) and ids.min() <= NULL:
                ids = ids[ids != NULL]
            if len(ids):
                blocks[group] = ids
                self._check(kind, group, ids)
        for pool in {self._pools[g] for g in blocks} if len(blocks) > 1 else ():
            shared = [ids for g, ids in blocks.items() if self._pools[g] == pool]
            ids = np.sort(np.concatenate(shared)) if len(shared) > 1 else shared[0]
            if len(shared) > 1 and (twice := np.flatnonzero(ids[1:] == ids[:-1])).size:
                raise LocalProtocolError(
                    f"block {int(ids[twice[0]])} is named in two groups that share its page; every page holds one thing"
                )
        return blocks

    def holders_of(self, group: int, block: int) -> list[Hold]:
        """Return everybody who holds a block, through whatever group its page is seen."""
        groups = [g for g, pool in enumerate(self._pools) if pool == self._pools[group]]
        return [h for h in self._holds.values() if any(block in h.blocks.get(g, ()) for g in groups)]

    def drop(self, holder: str) -> None:
        """Forget a hold; harmless if there is none."""
        hold = self._holds.pop(holder, None)
        if hold is None:
            return
        for group, ids in hold.blocks.items():
            if hold.kind == "lent":
                np.subtract.at(self._lent[group], ids, 1)
            else:
                self._writing[group][ids] = False

    def audit(self) -> list[str]:
        """Recount everything from the holds; a list of what does not add up."""
        lent = {p: np.zeros_like(self._lent[p]) for p in self._pools}
        writers = {p: np.zeros(len(self._writing[p]), np.int32) for p in self._pools}
        for hold in self._holds.values():
            for group, ids in hold.blocks.items():
                np.add.at((lent if hold.kind == "lent" else writers)[self._pools[group]], ids, 1)
        wrong = []
        for group in sorted(lent):
            if (bad := np.flatnonzero(lent[group] != self._lent[group])).size:
                wrong.append(f"group {group}: lent index is wrong for blocks {bad[:8].tolist()}")
            if (bad := np.flatnonzero((writers[group] > 0) != self._writing[group])).size:
                wrong.append(f"group {group}: writing index is wrong for blocks {bad[:8].tolist()}")
            if (bad := np.flatnonzero((writers[group] > 1) | ((writers[group] > 0) & (lent[group] > 0)))).size:
                wrong.append(f"group {group}: blocks {bad[:8].tolist()} are written while held by others")
        return wrong

    def _check(self, kind: str, group: int, ids: Int64s) -> None:
        writers, lenders = self._writing[group], self._lent[group]
        if len(ids) <= FEW:
            for block in ids.tolist():
                if writers[block]:
                    self._conflict(kind, group, block, "writing")
                if kind == "writing" and lenders[block]:
                    self._conflict(kind, group, block, "lent")
            return
        writing = writers[ids]
        if writing.any():
            self._conflict(kind, group, int(ids[writing.argmax()]), "writing")
        if kind == "writing" and (lent := lenders[ids]).any():
            self._conflict(kind, group, int(ids[lent.argmax()]), "lent")

    def _conflict(self, kind: str, group: int, block: int, other: str) -> None:
        holders = [h for h in self.holders_of(group, block) if h.kind == other]
        names = ", ".join(f"{h.request_id!r}" for h in holders) or "nobody"
        what = "be lent" if kind == "lent" else "be filled"
        held = "is still being written by a pull" if other == "writing" else "is lent to"
        raise LocalProtocolError(
            f"block {block} of group {group} cannot {what}: it {held} ({names}); wait until it is returned or released"
        )
