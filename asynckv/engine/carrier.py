"""What a move of blocks is to the planes that carry it out: descriptors between the device and slots, or records.

A tier's memory is a packed layout of the device's own, so both sides of a store have the same blocks, kernel block by
kernel block: a pair of numbers, a block and a slot, is all that has to be known of each. Blocks that another geometry
stored are planned as those of a remote rank are (`asynckv/engine/archive.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from asynckv.geometry.bounds import Int64s
from asynckv.geometry.layout import Layout, fingerprint
from asynckv.geometry.match import assign
from asynckv.geometry.packed import record_form, record_sizes
from asynckv.geometry.plan import PeerTables, Plan, ReadRequest, Section
from asynckv.ports import Record

__all__ = ["Carrier"]

MAX_DESCRIPTORS = 4096
"""In one copy: as many as take no longer than the bytes of `max_post_bytes`."""


class Carrier:
    """A device's blocks and the slots of a range of memory.

    Args:
        device: Layout of the device.
        host: Packed layout of the range.
        keys: Per group, what its hashes mean; goes before them in a record's key.
        max_post_bytes: Most bytes in one copy.
    """

    def __init__(self, device: Layout, host: Layout, keys: Sequence[bytes], max_post_bytes: int) -> None:
        self._groups, self._keys, self._max_bytes = device.groups, keys, max_post_bytes
        self._tables = PeerTables(device, host, assign(device, [host])[0], itertools.count(1))
        self._pairs = {pair.local_index: pair for pair in self._tables.group_pairs}
        self.strides = tuple(size.stride for size in record_sizes(host))
        """Bytes from slot to slot, per group."""
        self.form = fingerprint(record_form(device))
        """Of what is in a record."""

    def num_bytes(self, group: int) -> int:
        """Bytes of one block that are copied."""
        table, ratio = self._tables.table(self._pairs[group].whole), self._groups[group].ratio
        return table.block_bytes * ratio

    def pieces(self, group: int, blocks: Int64s, slots: Int64s) -> Iterator[ReadRequest]:
        """What is copied between blocks of a group and slots, whichever way; made when it is asked for."""
        pair, ratio = self._pairs[group], self._groups[group].ratio
        order = np.argsort(slots, kind="stable")
        local, remote = blocks[order], slots[order]
        if ratio > 1:
            kernel = np.arange(ratio)
            local = (local[:, None] * ratio + kernel).ravel()
            remote = (remote[:, None] * ratio + kernel).ravel()
        section = Section(self._tables.table(pair.whole), local.astype(np.int32), remote.astype(np.int32))
        return Plan((section,)).posts(self._max_bytes, MAX_DESCRIPTORS)

    def record(self, group: int, hash_: bytes, near: int, far: int) -> Record:
        """A slot of the range, and the one that its record has in a file."""
        stride = self.strides[group]
        key, name = self._keys[group] + hash_, self._groups[group].name
        return Record(key, near * stride, far * stride, stride, self.form, name[:64])
