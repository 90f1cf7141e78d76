"""The port by which bytes get into files and out of them; NIXL's POSIX back end implements it (`nixl.py`).

`FileIO` takes a *batch* of extents, and reports later whether all of it is in place. NIXL queues several batches if
they bypass the page cache. It reports that a batch has failed, but not which extent, and not whether a part of it still
runs. `reset` ends all that runs, and `transfer` finds out what is wrong with one extent.
"""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

ALIGN = 4096  # places in files, and sizes, are multiples of this


class Extent(NamedTuple):
    near: int  # offset in the memory
    fd: int
    offset: int  # in the file
    size: int


class FileTooShort(OSError):
    """Raised if a file ends before an extent does: the file was cut, which does not mean that the disk fails."""


class FileIO(Protocol):
    def submit(self, number: int, extents: Sequence[Extent], is_write: bool) -> None: ...

    def collect(self) -> list[tuple[int, bool]]:
        """Return the batches that ended since the last call, and whether all of each is in place; do not wait."""

    def reset(self) -> None:
        """Make sure that nothing runs, or raise `BackendError`; batches not yet collected have then ended or failed."""

    def close(self) -> None: ...


def transfer(view: memoryview, extent: Extent, is_write: bool) -> None:
    """Move one extent by system calls; raise `FileTooShort` if the file ends before the extent does."""
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
    """Pause Python's collector while many tuples are made: its repeated scans would take half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
