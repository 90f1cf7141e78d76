"""The holders of every block, with reason and time.

Lenders share, so one cached block may be lent for many requests. A writer is exclusive. A block that a transfer may
still write stays in its holding, however long that takes. The engine, not the ledger, knows which blocks are free.

Besides the holdings, arrays count lenders and mark writers, so that conflicts are found cheaply. Groups that see the
same pages share their arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np
from msgspec import Struct

from asynckv.errors import LocalProtocolError
from asynckv.geometry.bounds import NULL, BlockRuns, Int64s

Kind = Literal["lent", "writing"]

FEW = 16  # blocks up to which a loop is faster than an array: one array operation costs as much as several of them
ONE = np.int32(1)  # one in the type of the counts, because numpy takes a hundred times as long with a Python integer


class Occupant(Protocol):
    """A holder of blocks that is neither a lease nor a pull: an offload's `store` or `load`, as `what` says."""

    begun_at: float

    @property
    def what(self) -> str: ...

    @property
    def held_as(self) -> tuple[str, float]:
        """Return why the occupant holds its blocks, and until when at most."""

    def waits_for(self) -> tuple[str, ...]: ...


class Holding(Struct, frozen=True, eq=False):
    """The blocks of one holder (a pull by its id, a lease by its key's token, or an occupant)."""

    holder: str
    kind: Kind
    request_id: str
    since: float
    blocks: Mapping[int, Int64s]

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.blocks.values()))


class Ledger:
    """The holders of every block. Groups that see the same pages share a pool, in which an id is one block."""

    def __init__(self, num_blocks: Sequence[int], pools: Sequence[int] = ()) -> None:
        self._holdings: dict[str, Holding] = {}
        self.occupants: dict[str, Occupant] = {}  # by holder
        self._pools = tuple(pools) or tuple(range(len(num_blocks)))
        most = [max(n for n, q in zip(num_blocks, self._pools, strict=True) if q == p) for p in self._pools]
        lent = {p: np.zeros(n, np.int32) for p, n in zip(self._pools, most, strict=True)}
        writing = {p: np.zeros(n, np.bool_) for p, n in zip(self._pools, most, strict=True)}
        self._lent = [lent[p] for p in self._pools]
        self._writing = [writing[p] for p in self._pools]

    def __len__(self) -> int:
        return len(self._holdings)

    def __iter__(self) -> Iterator[Holding]:
        return iter(self._holdings.values())

    def get(self, holder: str) -> Holding | None:
        return self._holdings.get(holder)

    @property
    def num_blocks(self) -> int:
        return sum(len(self._lent[p]) for p in set(self._pools))

    def num_held(self, kind: Kind) -> int:
        arrays = self._lent if kind == "lent" else self._writing
        return sum(int(np.count_nonzero(arrays[p])) for p in set(self._pools))

    def hold(self, holder: str, kind: Kind, request_id: str, blocks: Mapping[int, Int64s], now: float) -> None:
        """Record a holding of blocks that `check` has just returned."""
        if holder in self._holdings:
            raise LocalProtocolError(f"request {request_id[:200]!r} holds blocks already")
        for group, ids in blocks.items():
            if kind == "writing":
                self._writing[group][ids] = True
            elif len(ids) <= FEW:
                lent = self._lent[group]
                for block in ids.tolist():
                    lent[block] += 1
            else:
                np.add.at(self._lent[group], ids, ONE)
        self._holdings[holder] = Holding(holder, kind, request_id, now, blocks)

    def check(self, kind: Kind, groups: Mapping[int, Sequence[int] | Int64s]) -> dict[int, Int64s]:
        """Return the blocks as arrays, or raise `LocalProtocolError` if another holding excludes this kind of use."""
        blocks: dict[int, Int64s] = {}
        for group, given in groups.items():
            ids = np.asarray(given, np.int64)
            if NULL in (ids.tolist() if len(ids) <= FEW else ids):
                ids = ids[ids != NULL]
            if not len(ids):
                continue
            blocks[group] = ids
            if len(ids) > FEW:
                self._check_many(kind, group, ids)
                continue
            writing, lent = self._writing[group], self._lent[group]
            for block in ids.tolist():
                if writing[block] or (kind == "writing" and lent[block]):
                    raise self._conflict(kind, group, block, "writing" if writing[block] else "lent")
        if len(blocks) > 1:
            self._check_pages(blocks)
        return blocks

    def _check_many(self, kind: Kind, group: int, ids: Int64s) -> None:
        writing, lent = self._writing[group], self._lent[group]
        if (written := writing[ids]).any():
            raise self._conflict(kind, group, int(ids[written.argmax()]), "writing")
        if kind == "writing" and (shared := lent[ids]).any():
            raise self._conflict(kind, group, int(ids[shared.argmax()]), "lent")

    def _check_pages(self, blocks: Mapping[int, Int64s]) -> None:
        for pool in {self._pools[g] for g in blocks}:
            shared = [ids for g, ids in blocks.items() if self._pools[g] == pool]
            ids = np.sort(np.concatenate(shared)) if len(shared) > 1 else shared[0]
            if len(shared) > 1 and (twice := np.flatnonzero(ids[1:] == ids[:-1])).size:
                raise LocalProtocolError(
                    f"block {int(ids[twice[0]])} is named in two groups that share its page; every page holds one thing"
                )

    def _conflict(self, kind: Kind, group: int, block: int, other: Kind) -> LocalProtocolError:
        names: dict[str, list[str]] = {}
        for holder in self.holders_of(group, block):
            if holder.kind == other:
                occupant = self.occupants.get(holder.holder)
                what = occupant.what if occupant is not None else ""
                if other == "writing":
                    verb = f"still being written by a {what or 'pull'} of"
                else:
                    verb = f"still being read by a {what} of" if what else "lent to"
                names.setdefault(verb, []).append(repr(holder.request_id[:200]))
        said = [f"{verb} {', '.join(some)}" for verb, some in names.items()]
        return LocalProtocolError(
            f"block {block} of group {group} cannot be {'read' if kind == 'lent' else 'filled'}: it is "
            f"{' and '.join(said) or 'held by no request'}; wait until it is returned or released"
        )

    def shared(self, requests: Iterable[Sequence[BlockRuns]]) -> list[Holding]:
        """Return the holdings of blocks that lists name (one per group), and of each only those blocks."""
        named = {p: np.zeros(len(self._lent[p]), np.bool_) for p in self._pools}
        for groups in requests:
            for pool, listed in zip(self._pools, groups, strict=False):
                for first, count in listed.runs:
                    if first != NULL:
                        named[pool][first : first + count] = True
        if not any((x & ((self._lent[p] > 0) | self._writing[p])).any() for p, x in named.items()):
            return []
        return [
            msgspec.structs.replace(holding, blocks=blocks)
            for holding in self._holdings.values()
            if (
                blocks := {g: some for g, ids in holding.blocks.items() if len(some := ids[named[self._pools[g]][ids]])}
            )
        ]

    def holders_of(self, group: int, block: int) -> list[Holding]:
        groups = [g for g, pool in enumerate(self._pools) if pool == self._pools[group]]
        return [h for h in self._holdings.values() if any(block in h.blocks.get(g, ()) for g in groups)]

    def drop(self, holder: str) -> None:
        holding = self._holdings.pop(holder, None)
        if holding is None:
            return
        self.occupants.pop(holder, None)
        for group, ids in holding.blocks.items():
            if holding.kind == "writing":
                self._writing[group][ids] = False
            elif len(ids) <= FEW:
                lent = self._lent[group]
                for block in ids.tolist():
                    lent[block] -= 1
            else:
                np.subtract.at(self._lent[group], ids, ONE)

    def audit(self) -> list[str]:
        lent = {p: np.zeros_like(self._lent[p]) for p in self._pools}
        writers = {p: np.zeros(len(self._writing[p]), np.int32) for p in self._pools}
        for holding in self._holdings.values():
            for group, ids in holding.blocks.items():
                np.add.at((lent if holding.kind == "lent" else writers)[self._pools[group]], ids, 1)
        wrong = []
        for group in sorted(lent):
            if (bad := np.flatnonzero(lent[group] != self._lent[group])).size:
                wrong.append(f"group {group}: lent index is wrong for blocks {bad[:8].tolist()}")
            if (bad := np.flatnonzero((writers[group] > 0) != self._writing[group])).size:
                wrong.append(f"group {group}: writing index is wrong for blocks {bad[:8].tolist()}")
            if (bad := np.flatnonzero((writers[group] > 1) | ((writers[group] > 0) & (lent[group] > 0)))).size:
                wrong.append(f"group {group}: blocks {bad[:8].tolist()} are written while held by others")
        return wrong
