"""How bytes get into files and out of them: by NIXL's POSIX back end (`file_nixl.py`).

It takes a *batch* of extents, and says later whether all of it is in place. NIXL queues several batches if they bypass
the page cache. It says that a batch has failed, but not which extent nor that nothing of it runs any more: that is what
`reset` is for, and `transfer` tells what is wrong with one extent.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from asynckv.geometry.layout import Memory

ALIGN = 4096  # places in files, and sizes, are multiples of it


class Extent(NamedTuple):
    near: int  # offset in the memory
    fd: int
    offset: int  # in the file
    size: int


class FileTooShort(OSError):
    """A file ends before an extent does: somebody cut it, and the disk may be well."""


class FileIO(Protocol):
    def submit(self, number: int, extents: Sequence[Extent], is_write: bool) -> None: ...

    def collect(self) -> list[tuple[int, bool]]:
        """The batches that have ended since the last call, and whether all of each is in place; does not wait."""

    def reset(self) -> None:
        """See that nothing runs any more, or raise `BackendError`; what was not collected has ended or failed then."""

    def close(self) -> None: ...


def view_of(memory: Memory) -> memoryview:
    return memoryview((ctypes.c_char * memory.length).from_address(memory.base)).cast("B")


def transfer(view: memoryview, extent: Extent, is_write: bool) -> None:
    """Move one extent by system calls; `FileTooShort` if the file ends before it does."""
    near, offset, end = extent.near, extent.offset, extent.near + extent.size
    while near < end:
        if is_write:
            moved = os.pwrite(extent.fd, view[near:end], offset)
        else:
            moved = os.preadv(extent.fd, [view[near:end]], offset)
        if moved <= 0:
            length, needed = os.fstat(extent.fd).st_size, extent.offset + extent.size
            raise FileTooShort(errno.EIO, f"its file was cut short to {length} bytes, and {needed} are needed")
        near, offset = near + moved, offset + moved


@contextmanager
def no_collection() -> Iterator[None]:
    """Make many tuples at once: Python's collector would look through all of them again and again, half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
