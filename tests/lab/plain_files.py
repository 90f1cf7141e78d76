"""Bytes to and from files by system calls: what the file tier's thread does without NIXL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asynckv.edges.files.io import Extent, FileIO, transfer
from asynckv.edges.nic.staging import bytes_at
from asynckv.geometry.layout import Memory


class PlainFiles:
    def __init__(self, memory: Memory) -> None:
        self._view = bytes_at(memory).data
        self._ended: list[tuple[int, bool]] = []

    def submit(self, number: int, extents: Sequence[Extent], is_write: bool) -> None:
        try:
            for extent in extents:
                transfer(self._view, extent, is_write)
        except OSError:
            self._ended.append((number, False))
        else:
            self._ended.append((number, True))

    def collect(self) -> list[tuple[int, bool]]:
        ended, self._ended = self._ended, []
        return ended

    def reset(self) -> None: ...

    def close(self) -> None: ...


def plain(name: str, memory: Memory, fds: Mapping[int, int]) -> FileIO:
    return PlainFiles(memory)
