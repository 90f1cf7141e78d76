"""One place where blocks are kept: its catalogue, its range of host memory, and the files behind it.

A rank has a shelf of its own, on which it stores. What ranks of another geometry have left in files is on shelves that
are only read: each has a small range of host memory through which its records pass, in the form in which they were
stored, and from there the planner that reads remote ranks puts them into the device's blocks. The catalogue of such a
shelf decides as any other does: what is promoted, into which slots, and what may be loaded next.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec
import numpy as np

from asynckv.config import OffloadConfig
from asynckv.edges.block_records import BlockRecords
from asynckv.edges.host_pool import HostPool
from asynckv.geometry.blocks import BlockList, runs_of
from asynckv.geometry.bounds import BlockRuns, Int64s
from asynckv.geometry.kept import kept_tables, plan_copies, plan_loads
from asynckv.geometry.layout import Layout, fingerprint
from asynckv.geometry.packed import placed, record_sizes
from asynckv.geometry.plan import PeerTables, ReadRequest
from asynckv.offload.catalogue import Budgets, Catalogue
from asynckv.offload.job import Move
from asynckv.offload.keys import stored_groups
from asynckv.ports import Record, RecordPlane

__all__ = ["Shelf", "reading"]

MAX_DESCRIPTORS = 4096
"""In one copy: as many as take no longer than the bytes of `max_post_bytes`."""

MOVE_BYTES = 64 << 20
"""In one move at most, which then has one ending for all of it."""

NOTHING: tuple[list[int], list[int]] = [], []


class Lists(Protocol):
    """Whose blocks are moved."""

    @property
    def blocks(self) -> Sequence[BlockList]:
        """Per group of the device, the first token and the blocks."""


class Shelf:
    """Where blocks of one form are kept.

    Args:
        far: Its name among what the copy plane knows.
        form: What a record is.
        config: The offload's.
        host_bytes: Of host memory.
        file_bytes: Of files; 0 for none.
        records: Where its files are.
        is_own: The form is this rank's, and blocks are stored here; else it is only read.

    Attributes:
        kept: Groups of the form that this rank has a part of; what the catalogue calls a group is a place in it.
        form_id: Short for the form.

    Raises:
        ConfigError: A block size is not a multiple of `hash_tokens`, a group cannot be kept, or the tier is too small.
    """

    def __init__(
        self,
        far: str,
        form: Layout,
        config: OffloadConfig,
        *,
        host_bytes: int,
        file_bytes: int,
        records: RecordPlane | None = None,
        is_own: bool = True,
    ) -> None:
        self.far, self.form, self.form_id, self.records = far, form, fingerprint(form), records
        self._is_own = is_own
        self._config, self._host_bytes = config, host_bytes
        strides = [size.stride for size in record_sizes(form)]
        groups = stored_groups(form, strides, config.hash_tokens, config.model)
        self.kept = [index for index, stride in enumerate(strides) if stride]
        self.groups = tuple(groups[index] for index in self.kept)
        self.align = math.lcm(*(group.block_size for group in self.groups))
        self._blocks = BlockRecords(self.groups, self.form_id)
        self.catalogue = Catalogue(
            self.groups,
            config.hash_tokens,
            host_bytes,
            file_bytes,
            policy=config.policy,
            budgets=Budgets(
                move_bytes=min(config.max_bytes, MOVE_BYTES),
                load_bytes=config.max_bytes,
                store_bytes=config.max_bytes,
                promotion_bytes=config.max_bytes,
                write_back_bytes=config.max_bytes,
                write_back_bytes_per_s=config.write_back_bytes_per_s or math.inf,
            ),
        )
        self.memory: HostPool | None = None
        self._tables: PeerTables | None = None
        self._device: Layout | None = None

    # -- life ----------------------------------------------------------------------------------------

    def take_memory(self) -> None:
        """Take the memory.

        Raises:
            BackendError: The system has not so much.
        """
        self.memory = HostPool(self._host_bytes, populate=True)

    @property
    def layout(self) -> Layout:
        """Its memory, slot by slot."""
        assert self.memory is not None
        return placed(self.form, self.memory.memory.base, self.memory.memory.length)

    def open_files(self, on_ready: Callable[[], None], loop: asyncio.AbstractEventLoop) -> int:
        """Take in what the files have; returns how many blocks. What has another form is dropped.

        It takes seconds where there is much, so it runs on another thread than the loop's.
        """
        if self.records is None:
            return 0
        assert self.memory is not None
        found, strange = self._blocks.known(self.records.start(self.memory.memory, on_ready, loop))
        if self._is_own:
            self.records.forget(strange)
            self.records.keep_layout(self.form_id, msgspec.msgpack.encode(self.form))
        return self.catalogue.recover(found)

    async def close(self) -> None:
        """End the files, and give the memory back; nothing touches it afterwards.

        Raises:
            BackendError: Something may still write it.
        """
        if self.records is not None:
            await self.records.quiesce()
            self.records.close()
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    # -- what moves ----------------------------------------------------------------------------------

    def use(self, device: Layout, tables: PeerTables | None = None) -> None:
        """Plan for a device's memory; with tables of its own where the form is another's."""
        self._device = device
        if tables is not None:
            self._tables = tables
        else:
            (self._tables,) = kept_tables(device, [self.layout], itertools.count(1))

    def pieces(self, move: Move, lists: Lists) -> Iterator[ReadRequest]:
        """What is copied between the device and this shelf; each piece is made when it is asked for."""
        assert self._tables is not None
        assert self._device is not None
        if not self._is_own:
            return self._by_tokens(move, lists)
        copies: dict[int, tuple[Int64s, Int64s]] = {}
        for piece in move.pieces:
            index = self.kept[piece.group]
            first, ids = lists.blocks[index]
            at = np.asarray(piece.positions) - first // self._device.groups[index].block_size
            copies[index] = ids[at], np.asarray(piece.host_slots)
        blocks = [copies.get(index, NOTHING) for index in range(len(self._device.groups))]
        return plan_copies(self._tables, blocks).posts(self._config.max_post_bytes, MAX_DESCRIPTORS)

    def _by_tokens(self, move: Move, lists: Lists) -> Iterator[ReadRequest]:
        """The same out of another geometry's records: by the tokens that they hold, one run of blocks at a time."""
        assert self._device is not None
        partners = {pair.remote_index: pair.local_index for pair in self._tables.group_pairs} if self._tables else {}
        for piece in move.pieces:
            index = self.kept[piece.group]
            mine, size = partners[index], self.groups[piece.group].block_size
            slots = dict(zip(piece.positions, piece.host_slots, strict=True))
            for first, stop in _stretches(sorted(slots)):
                local: list[BlockList] = [(0, np.zeros(0, np.int64)) for _ in self._device.groups]
                local[mine] = _from(lists.blocks[mine], first * size, self._device.groups[mine].block_size)
                kept = [BlockRuns(0, ()) for _ in self.form.groups]
                kept[index] = BlockRuns(first * size, runs_of(np.array([slots[p] for p in range(first, stop)])))
                (plan,) = plan_loads([self._tables], local, [kept], stop * size)
                if plan is not None:
                    yield from plan.posts(self._config.max_post_bytes, MAX_DESCRIPTORS)

    def record_list(self, move: Move) -> list[Record]:
        """What is moved between this shelf's memory and its files."""
        return self._blocks.of(move)

    def forget(self) -> None:
        """What was given up is to be found in the files no more."""
        freed = self.catalogue.forgotten()
        if freed and self.records is not None:
            self.records.forget(self._blocks.places(freed))


def reading(device: Layout, shelves: Sequence[Shelf]) -> list[Shelf]:
    """Let shelves of all ranks of another engine be read into a device's memory; returns those that are needed.

    Raises:
        LayoutError: What they hold cannot be compared, or is not all that the device has.
    """
    plain = _without_windows(device)
    tables = kept_tables(plain, [_without_windows(shelf.layout) for shelf in shelves], itertools.count(1))
    needed = []
    for shelf, some in zip(shelves, tables, strict=True):
        if some is not None:
            shelf.use(device, some)
            needed.append(shelf)
    return needed


def _without_windows(layout: Layout) -> Layout:
    """Which blocks a window needs is decided by their keys; here all are wanted that are named."""
    groups = tuple(msgspec.structs.replace(group, window=0) for group in layout.groups)
    return msgspec.structs.replace(layout, groups=groups)


def _stretches(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return `[first, stop)` of places that follow each other."""
    for _, run in itertools.groupby(enumerate(places), key=lambda each: each[1] - each[0]):
        some = [place for _, place in run]
        yield some[0], some[-1] + 1


def _from(given: BlockList, first: int, size: int) -> BlockList:
    """The rest of a list of blocks, from the one on that holds a token."""
    listed, ids = given
    if first <= listed:
        return given
    return first, ids[first // size - listed // size :]
