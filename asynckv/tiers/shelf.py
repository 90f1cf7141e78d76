"""One place where blocks are kept: its catalogue, its range of host memory, and the files behind it.

A rank stores on a shelf of its own. What ranks of another geometry have left in files is on shelves that are only read:
records pass through a small range of host memory in the form in which they were stored, and the planner puts them into
the device's blocks.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import msgspec

from asynckv.config import OffloadConfig
from asynckv.edges.files.block_records import BlockRecords
from asynckv.edges.host_pool import HostPool
from asynckv.geometry.layout import Layout, fingerprint
from asynckv.geometry.packed import placed, record_sizes
from asynckv.offload.catalogue import Catalogue
from asynckv.offload.job import MoveKind
from asynckv.offload.keys import stored_groups
from asynckv.offload.traffic import MOVE_BYTES
from asynckv.ports import RecordPlane


class Shelf:
    """Where blocks of one form are kept; raises `ConfigError` if a group or a size does not allow it.

    Args:
        far: Its name among what the copy plane knows.
        is_own: The form is this rank's, and blocks are stored here; else it is only read.
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
        self.files_lost = ""  # why its files take no more writes, or nothing; empty while they do
        self._config, self._host_bytes = config, host_bytes
        strides = [size.stride for size in record_sizes(form)]
        groups = stored_groups(form, strides, config.hash_tokens, config.model)
        # Groups of the form that this rank has a part of; what the catalogue calls a group is a place in it.
        self.kept = [index for index, stride in enumerate(strides) if stride]
        self.groups = tuple(groups[index] for index in self.kept)
        self.align = math.lcm(*(group.block_size for group in self.groups))
        self.block_records = BlockRecords(self.groups, self.form_id)
        self.catalogue = Catalogue(
            self.groups,
            config.hash_tokens,
            host_bytes,
            file_bytes,
            policy=config.policy,
            budgets=dict.fromkeys(MoveKind, config.max_bytes),
            move_bytes=min(config.max_bytes, MOVE_BYTES),
        )
        self.unfit = 0  # blocks of its files that were dropped, because they are of another length
        self.memory: HostPool | None = None

    # -- life ----------------------------------------------------------------------------------------

    def take_memory(self, device: Layout) -> None:
        """Take the memory, pinned if the device is a GPU; raise `BackendError` if the system has not so much."""
        gpu = next((memory.device for memory in device.memories if memory.kind == "cuda"), None)
        self.memory = HostPool(self._host_bytes, device=gpu)

    @property
    def layout(self) -> Layout:
        assert self.memory is not None
        return placed(self.form, self.memory.memory.base, self.memory.memory.length)

    def open_files(self, on_ready: Callable[[], None], loop: asyncio.AbstractEventLoop) -> int:
        """Take in what the files have, away from the loop; return how many blocks. What has another form is dropped,
        and what is of another model stays until its room is needed.
        """
        if self.records is None:
            return 0
        assert self.memory is not None
        layouts = {self.form_id: msgspec.msgpack.encode(self.form)} if self._is_own else {}
        stored = self.records.start(self.memory.memory, on_ready, loop, layouts)
        found, others, strange = self.block_records.known(stored)
        if self._is_own:
            self.unfit = len(strange)
            self.records.forget(strange)
            return self.catalogue.recover(found, others)
        count = self.catalogue.recover(found)
        self.catalogue.switch_off(reads=False)  # what the files lose is not written there again: they are another's
        return count

    async def close(self, timeout_s: float) -> None:
        """End the files within `timeout_s` and give the memory back; `BackendError` if it may still be written."""
        if self.records is not None:
            await self.records.quiesce(timeout_s)
            self.records.close()
        if self.memory is not None:
            memory, self.memory = self.memory, None
            # Off the loop: the system may take milliseconds to have it back.
            await asyncio.get_running_loop().run_in_executor(None, memory.close)

    # -- what moves ----------------------------------------------------------------------------------

    def forget(self) -> None:
        """Remove evicted blocks from the files' index."""
        freed = self.catalogue.forgotten()
        if freed and self.records is not None and self._is_own:
            self.records.forget(self.block_records.places(freed))
