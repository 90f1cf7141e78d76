"""Blocks of a catalogue as records of files: the key is namespace and hash, and the place is that of the slot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from asynckv.offload.job import Move
from asynckv.offload.keys import NAMESPACE_BYTES, StoredGroup
from asynckv.ports import Record, StoredRecord

MAX_TAG = 64


class BlockRecords:
    def __init__(self, groups: Sequence[StoredGroup], form: str) -> None:
        self._groups, self._form = groups, form
        self._spaces = [bytes.fromhex(group.namespace) for group in groups]

    def of(self, move: Move) -> list[Record]:
        out = []
        for piece in move.pieces:
            group, space = self._groups[piece.group], self._spaces[piece.group]
            size, tag = group.record_bytes, group.name[:MAX_TAG]
            for key, near, far in zip(piece.hashes, piece.host_slots, piece.file_slots, strict=True):
                out.append(Record(space + key, near * size, far * size, size, self._form, tag))
        return out

    def known(
        self, found: Iterable[StoredRecord]
    ) -> tuple[list[tuple[int, int, bytes]], list[tuple[int, int]], list[int]]:
        fits, others, strange = [], [], []
        spaces = {space: at for at, space in enumerate(self._spaces)}
        sizes = {group.record_bytes: at for at, group in enumerate(self._groups)}
        for stored in found:
            at, size = spaces.get(stored.key[:NAMESPACE_BYTES], -1), stored.size
            is_sized = size in sizes if at < 0 else size == self._groups[at].record_bytes
            if stored.layout != self._form or not is_sized or stored.far % size:
                strange.append(stored.far)
            elif at < 0:
                others.append((sizes[size], stored.far // size))
            else:
                fits.append((at, stored.far // size, stored.key[NAMESPACE_BYTES:]))
        return fits, others, strange

    def places(self, freed: Iterable[tuple[int, int]]) -> Iterator[int]:
        return (slot * self._groups[at].record_bytes for at, slot in freed)
