"""Packed copies of the rank's own memory, made on one thread, in memory that remote readers reach.

A serving process maps that memory too, so it is shared. Its pages are allocated before the first copy, and by no engine
that makes none.

Numpy copies without Python's lock, so the event loop goes on (`staging.py` has the measurement).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

import anyio.to_thread
import numpy as np

from asynckv.edges.aside import end_at_exit
from asynckv.edges.nic.staging import Items, as_index, bytes_at, item_bytes
from asynckv.edges.pages import PIECE, populate
from asynckv.edges.sharing import map_shared
from asynckv.errors import AsyncKVError, BackendError
from asynckv.geometry.gather import PACK_BYTES, Gathered, Packing
from asynckv.geometry.layout import Memory
from asynckv.ports import CopyMade

CLOSE_S = 10.0  # seconds that `close` waits for the copy under way, which takes less than a millisecond


class Packer:
    """A thread that makes packed copies of `memories`; it starts with the first one. `made` has the ends."""

    def __init__(
        self, memories: Sequence[Memory], num_slots: int, loop: asyncio.AbstractEventLoop, on_ready: Callable[[], None]
    ) -> None:
        try:
            self._area = np.frombuffer(map_shared(num_slots * PACK_BYTES), np.uint8)
        except AsyncKVError as exc:
            raise BackendError(f"no room for packed copies: {exc}; lower nixl.packing_bytes") from exc
        self.packing = Packing(self._area.ctypes.data, num_slots)
        self.made: deque[CopyMade] = deque()
        self._memories = [bytes_at(memory) for memory in memories]
        self.name = "asynckv packs"
        self._loop, self._on_ready = loop, on_ready
        self._orders: SimpleQueue[tuple[int, Gathered] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_stopping = False

    def pack(self, slot: int, gathered: Gathered) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:  # the process has no room for a thread
                return self._tell(CopyMade(slot, repr(exc)))
            self._thread = thread
            end_at_exit(self)
        self._orders.put((slot, gathered))

    def stop(self) -> None:
        self._is_stopping = True
        self._orders.put(None)

    def wait(self, timeout_s: float) -> bool:
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    async def quiesce(self) -> None:
        self.stop()
        await anyio.to_thread.run_sync(self.wait, CLOSE_S)

    def close(self) -> None:
        """Wait for the copy under way, or raise `BackendError` if it does not end."""
        self.stop()
        if not self.wait(CLOSE_S):
            raise BackendError("a packed copy is still being made")

    def _run(self) -> None:
        with suppress(BackendError):  # copies work without, but wait for pages
            populate(self._area[-PIECE:], "packed copies")  # slots are taken from the end; more would take too long
        while (order := self._orders.get()) is not None and not self._is_stopping:
            slot, gathered = order
            try:
                self._gather(slot, gathered)
                self._tell(CopyMade(slot))
            except Exception as exc:  # the reader has to be answered whatever it is
                self._tell(CopyMade(slot, repr(exc)))

    def _tell(self, made: CopyMade) -> None:
        self.made.append(made)
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._on_ready)

    def _gather(self, slot: int, gathered: Gathered) -> None:
        at, ids = slot * PACK_BYTES, gathered.blocks
        blocks, last = as_index(ids), int(ids.max())
        for memory, offset, stride, piece, shape, strides in gathered.rows:
            item = item_bytes(piece)
            kind, shape = f"V{item}", (*shape, piece // item)
            ours: Items = np.ndarray((last + 1, *shape), kind, self._memories[memory], offset, (stride, *strides, item))
            copy: Items = np.ndarray((len(ids), *shape), kind, self._area, at)
            copy[...] = ours[blocks]
            at += copy.nbytes
