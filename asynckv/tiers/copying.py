"""Copies between the blocks of a device and a shelf, move by move.

If a shelf has the rank's own form, blocks are copied one for one. Blocks that ranks of another geometry left are placed
by their tokens, with the planner of remote reads. Pieces are made when a plane takes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from asynckv.config import EngineConfig
from asynckv.geometry.blocks import BlockList, runs_of
from asynckv.geometry.bounds import BlockRuns, Int64s
from asynckv.geometry.kept import kept_tables, plan_copies, plan_load
from asynckv.geometry.layout import Group, Layout
from asynckv.geometry.plan import ReadRequest
from asynckv.geometry.staging import WITHIN
from asynckv.geometry.tables import PeerTables
from asynckv.offload.job import Move
from asynckv.offload.keys import StoredGroup, needed
from asynckv.tiers.shelf import Shelf

MAX_DESCRIPTORS = 4096  # descriptors in one copy: as many as take no longer than the bytes of `max_post_bytes`
NOTHING: tuple[list[int], list[int]] = [], []


class SlotBySlot:
    """The shelf has the rank's own form."""

    def __init__(self, shelf: Shelf, device: Layout, max_bytes: int) -> None:
        self._shelf, self._groups, self._max_bytes = shelf, device.groups, max_bytes
        (tables,) = kept_tables(device, [shelf.layout], itertools.count(1))
        assert tables is not None
        self._tables = tables

    def pieces(self, move: Move, blocks: Sequence[BlockList]) -> Iterator[ReadRequest]:
        copies: dict[int, tuple[Int64s, Int64s]] = {}
        for piece in move.pieces:
            index = self._shelf.kept[piece.group]
            first, ids = blocks[index]
            at = np.asarray(piece.positions) - first // self._groups[index].block_size
            copies[index] = ids[at], np.asarray(piece.host_slots)
        plan = plan_copies(self._tables, [copies.get(index, NOTHING) for index in range(len(self._groups))])
        yield from plan.posts(self._max_bytes, MAX_DESCRIPTORS)


class ByTokens:
    """The shelf has another form, of which a part is needed.

    A block of the device is loaded whole, because it may be stored later. So of a window all is read that lies in the
    blocks in which it lies.
    """

    def __init__(self, shelf: Shelf, device: Layout, tables: PeerTables, max_bytes: int) -> None:
        self._shelf, self._groups, self._tables, self._max_bytes = shelf, device.groups, tables, max_bytes
        self.groups: dict[int, StoredGroup] = {}  # by place on the shelf, those that are read, with the windows read
        self.partners: dict[int, list[int]] = {}  # by the same places, the groups of the device that they fill
        for place, (index, group) in enumerate(zip(shelf.kept, shelf.groups, strict=True)):
            # Of what another rank has left as well nothing is read.
            if mine := [pair.local_index for pair in tables.group_pairs if pair.remote_index == index]:
                wide = [_in_whole_blocks(device.groups[at]) for at in mine]
                self.groups[place] = msgspec.structs.replace(group, window=max(wide) if all(wide) else 0)
                self.partners[place] = mine

    def wanted(self, blocks: Sequence[BlockList], tokens: int) -> list[list[int]]:
        """Say which blocks of the shelf's groups hold a prefix of `tokens`, a multiple of all block sizes."""
        places: list[list[int]] = [[] for _ in self._shelf.groups]
        for place, group in self.groups.items():
            first = min(blocks[mine][0] for mine in self.partners[place])
            places[place] = list(needed(group, first, tokens))
        return places

    def pieces(self, move: Move, blocks: Sequence[BlockList]) -> Iterator[ReadRequest]:
        for piece in move.pieces:
            index = self._shelf.kept[piece.group]
            size = self._shelf.groups[piece.group].block_size
            slots = dict(zip(piece.positions, piece.host_slots, strict=True))
            for mine, (first, count) in itertools.product(self.partners[piece.group], runs_of(sorted(slots))):
                stop = first + count
                local: list[BlockList] = [(0, np.zeros(0, np.int64)) for _ in self._groups]
                local[mine] = _from(blocks[mine], first * size, self._groups[mine].block_size)
                kept = [BlockRuns(0, ()) for _ in self._shelf.form.groups]
                kept[index] = BlockRuns(first * size, runs_of(np.array([slots[p] for p in range(first, stop)])))
                plan = plan_load(self._tables, local, kept, stop * size)
                yield from plan.posts(self._max_bytes, MAX_DESCRIPTORS)


Copying = SlotBySlot | ByTokens


def reading(device: Layout, shelves: Sequence[Shelf], config: EngineConfig, max_bytes: int) -> dict[Shelf, ByTokens]:
    """Say how shelves of all ranks of another engine are read into a device's memory; raise `LayoutError` if they do
    not fit, or lack something.
    """
    plain, is_on_host = _without_windows(device), all(memory.kind == "cpu" for memory in device.memories)
    costs = WITHIN if is_on_host and config.nixl.staging_bytes else None
    tables = kept_tables(plain, [_without_windows(shelf.layout) for shelf in shelves], itertools.count(1), costs)
    return {
        shelf: ByTokens(shelf, device, some, max_bytes)
        for shelf, some in zip(shelves, tables, strict=True)
        if some is not None
    }


def _in_whole_blocks(group: Group) -> int:
    """Return a group's window, made wider so that it begins where a block does whenever it ends where one does."""
    return -(-(group.window - 1) // group.block_size) * group.block_size + 1 if group.window else 0


def _without_windows(layout: Layout) -> Layout:
    """Which blocks a window needs is decided by their keys; here all are wanted that are named."""
    groups = tuple(msgspec.structs.replace(group, window=0) for group in layout.groups)
    return msgspec.structs.replace(layout, groups=groups)


def _from(given: BlockList, first: int, size: int) -> BlockList:
    listed, ids = given
    return given if first <= listed else (first, ids[first // size - listed // size :])
