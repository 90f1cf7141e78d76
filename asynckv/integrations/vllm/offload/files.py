"""The thread for an engine's files, which are in one directory per model and geometry."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from asynckv.core.types import TransferId
from asynckv.edges.files.index import INDEX
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.integrations.vllm.compat import OffloadingConfig
from asynckv.offload.keys import StoredGroup
from asynckv.ports import CopyOp, CopyPlane, Record, RecordNews, RecordPlane, StoredRecord

log = logging.getLogger("vllm.asynckv")
JOIN_S = 1.0  # for a thread to end when its loop has stopped
START_S = 600.0  # the start takes disk space, which takes long if the file system writes zeros


T = TypeVar("T")


class LoopThread:
    """A thread with an event loop until `close`, because vLLM's processes have no loop of their own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop, after earlier calls; does nothing once it is closed."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *args)

    def call(self, function: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        return asyncio.run_coroutine_threadsafe(function(), self.loop).result(timeout_s)

    def end(self, plane: CopyPlane | RecordPlane, timeout_s: float) -> Exception | None:
        """End a plane, and the thread; return the cause if something may still touch the plane's memory."""

        async def end() -> None:
            await plane.quiesce()
            plane.close()

        try:
            self.call(end, timeout_s)
        except (BackendError, TimeoutError) as exc:
            return exc
        finally:
            self.close()
        return None

    def close(self) -> None:
        self.is_closed = True
        self.soon(self.loop.stop)
        self._thread.join(JOIN_S)


class Files:
    """A record plane on a thread. `on_news` gets the results, and `on_time` is called when `wake_in` has passed."""

    def __init__(
        self, plane: RecordPlane, on_news: Callable[[Sequence[RecordNews]], None], on_time: Callable[[], None]
    ) -> None:
        self._plane, self._on_news, self._on_time = plane, on_news, on_time
        self._thread = LoopThread("asynckv-files")
        self._timer = 0

    def start(self, memory: Memory) -> Sequence[StoredRecord]:
        """Open the files and return the stored records, or raise `BackendError`."""

        async def start() -> Sequence[StoredRecord]:
            return self._plane.start(memory, self._ready)

        try:
            return self._thread.call(start, START_S)
        except BaseException as exc:
            self._thread.close()
            if isinstance(exc, TimeoutError):
                raise BackendError(
                    f"the files were not open after {START_S:g} s: the disk hangs or is too slow; check it, "
                    f"use a directory on another disk, lower file_bytes, or leave both out"
                ) from None
            raise

    def post(self, move_id: int, op: CopyOp, records: Sequence[Record]) -> None:
        self._thread.soon(self._plane.post, TransferId(move_id), op, records)

    def forget(self, places: Iterable[int]) -> None:
        self._thread.soon(self._plane.forget, list(places))

    def wake_in(self, seconds: float) -> None:
        """Call `on_time` after these seconds; a new call replaces the last one."""
        self._timer += 1
        self._thread.soon(lambda number: self._thread.loop.call_later(seconds, self._due, number), self._timer)

    def _due(self, number: int) -> None:
        if number == self._timer:
            self._on_time()

    def _ready(self) -> None:
        if news := self._plane.poll():
            self._on_news(news)

    def close(self, timeout_s: float) -> bool:
        """Finish running moves, write the index and end the thread; return False if the memory may still be written."""
        return self._thread.is_closed or self._thread.end(self._plane, timeout_s) is None


def folder_of(directory: str | os.PathLike[str], config: OffloadingConfig, groups: Sequence[StoredGroup]) -> Path:
    what = hashlib.sha256("".join(group.namespace for group in groups).encode()).hexdigest()[:16]
    rank = f"-dp{config.parallel.data_parallel_index}" if config.parallel.data_parallel_size > 1 else ""
    return Path(directory) / f"vllm-{what}{rank}"


def tell_of_start(folder: Path, num_bytes: int) -> None:
    """Log that the start waits for the files, and that other directories beside them keep their space."""
    log.info(
        "opening %s before the engine starts: %d bytes are taken from the disk unless they are there, and the index is "
        "read. This takes seconds, or minutes if the file system writes zeros",
        *(folder, num_bytes),
    )
    mine, _, _ = folder.name.partition("-dp")
    with suppress(OSError):  # the start itself reports a directory that cannot be read
        beside = sorted(path.parent.name for path in folder.parent.glob(f"vllm-*/{INDEX}"))
        if others := [name for name in beside if name.partition("-dp")[0] != mine]:
            log.warning(
                "%s has files of another model, dtype, block size, memory order or parallel size as well, in %s%s; "
                "they keep their disk space. Remove unused ones with `asynckv offload prune %s/NAME --all`",
                *(folder.parent, ", ".join(others[:4]), ", ..." * (len(others) > 4), folder.parent),
            )
