"""What a move of blocks is to the planes that carry it out: descriptors between the device and slots, or records.

A tier's memory is a packed layout of the device's own, so both sides of a store have the same blocks, kernel block by
kernel block: a pair of numbers, a block and a slot, is all that has to be known of each. Blocks that another geometry
stored are planned as those of a remote rank are (`asynckv/engine/archive.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from asynckv.geometry.bounds import Int64s
from asynckv.geometry.kept import kept_tables, plan_copies
from asynckv.geometry.layout import Layout, fingerprint
from asynckv.geometry.packed import record_form, record_sizes
from asynckv.geometry.plan import ReadRequest
from asynckv.ports import Record

__all__ = ["MAX_DESCRIPTORS", "Carrier"]

MAX_DESCRIPTORS = 4096
"""In one copy: as many as take no longer than the bytes of `max_post_bytes`."""

NOTHING: tuple[list[int], list[int]] = [], []


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
        (tables,) = kept_tables(device, [host], itertools.count(1))
        assert tables is not None
        self._tables = tables
        self.strides = tuple(size.stride for size in record_sizes(host))
        """Bytes from slot to slot, per group."""
        self.form = fingerprint(record_form(device))
        """Of what is in a record."""

    def pieces(self, copies: Mapping[int, tuple[Int64s, Int64s]]) -> Iterator[ReadRequest]:
        """What is copied between blocks and slots, per group, whichever way; each made when it is asked for."""
        blocks = [copies.get(index, NOTHING) for index in range(len(self._groups))]
        return plan_copies(self._tables, blocks).posts(self._max_bytes, MAX_DESCRIPTORS)

    def record(self, group: int, hash_: bytes, near: int, far: int) -> Record:
        """A slot of the range, and the one that its record has in a file."""
        stride = self.strides[group]
        key, name = self._keys[group] + hash_, self._groups[group].name
        return Record(key, near * stride, far * stride, stride, self.form, name[:64])
