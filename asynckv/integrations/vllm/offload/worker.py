"""The workers' half: copies between the device's blocks and this rank's part of the slots.

A job of vLLM names blocks of groups and their slots; the copy plane moves them on a thread. vLLM's thread hands over
jobs and asks for results, and waits only where vLLM itself waits.

vLLM 0.33.0 has no failed jobs. So if a copy fails or does not end, this rank ends with an error, and the engine with
it, because otherwise it would serve wrong bytes. A job is reported only after its end, so vLLM reuses its blocks and
slots only then.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from asynckv.core.events import Ending
from asynckv.core.types import TransferId
from asynckv.edges.nic.copies import NixlCopies
from asynckv.edges.torch import stream_event, synchronize
from asynckv.errors import BackendError, ConfigError
from asynckv.geometry.bounds import Int64s
from asynckv.geometry.check import check_layout
from asynckv.geometry.kept import kept_tables, plan_copies
from asynckv.geometry.layout import Dim, Group, Layout, Memory, Part, View
from asynckv.geometry.packed import placed, record_form, record_sizes
from asynckv.geometry.plan import Plan
from asynckv.integrations.vllm import compat
from asynckv.integrations.vllm.offload.files import LoopThread
from asynckv.integrations.vllm.offload.region import Region, Shape
from asynckv.ports import CopyOp, CopyPlane

log = logging.getLogger("vllm.asynckv")
HOST = "host"
MAX_DESCRIPTORS = 4096
WAIT_S = 60.0  # most for a wait of vLLM's, a doubt, or jobs without an end: copies take milliseconds, or hang
GRACE_S = 1.0  # late jobs get this long again, because a process that was stopped for a minute could not copy
HUNG = (
    "their blocks may still be written, and vLLM cannot set them aside, so this rank ends. Start the engine anew. "
    "If it recurs, look for swapping (`vmstat 1`: si, so) or a device that hangs (`dmesg`)"
)

CLOSE_S = 3.0  # vLLM kills a worker five seconds after it asked it to end


class _Job(NamedTuple):
    op: CopyOp
    num_bytes: int
    begun_at: float


class Worker(compat.OffloadingWorker):
    """Copies one rank's blocks; `rank` is the index of its part of a slot."""

    def __init__(
        self,
        shape: Shape,
        rank: int,
        name: str,
        caches: compat.CanonicalKVCaches,
        region: Region,
        max_post_bytes: int,
        copies: CopyPlane | None = None,
    ) -> None:
        self._shape, self._rank, self._region, self._max = shape, rank, region, max_post_bytes
        self._layout = device_layout(caches)
        form = record_form(self._layout)
        for size, group in zip(record_sizes(form), self._layout.groups, strict=True):
            if size.stride > shape.block_bytes:
                raise ConfigError(
                    f"a block of {group.name} has {size.num_bytes} bytes on rank {rank}, but vLLM's configuration "
                    f"allows {shape.block_bytes}: ranks with different numbers of layers cannot be offloaded; use a "
                    f"pipeline-parallel size that divides the number of layers"
                )
        views = tuple(replace(view, stride=shape.block_bytes) for view in form.views)  # slots of one size on all ranks
        self._far = placed(replace(form, views=views), region.memory.base, region.num_bytes)
        (self._tables,) = kept_tables(self._layout, [self._far], itertools.count(1))
        device = next((memory.device for memory in self._layout.memories if memory.kind == "cuda"), None)
        self._is_cuda = device is not None
        if device is not None:
            try:
                region.pin(device)
            except BackendError as exc:
                log.warning("host memory cannot be pinned (%s): copies will be slower", exc)
        self._jobs: dict[int, _Job] = {}  # the oldest first
        self._doubtful: dict[int, float] = {}  # times since which it is unknown whether a copy goes on
        self._ended_at = -math.inf  # when the last job ended
        self._late_at = math.inf  # when a job was first found late
        self._ended: list[compat.TransferResult] = []
        self._changed = threading.Condition()
        self._broken: BaseException | None = None
        self._copies: CopyPlane = copies if copies is not None else NixlCopies(name)
        self._thread = LoopThread(f"asynckv-offload-{rank}")
        try:
            self._thread.call(self._start, WAIT_S)
        except BaseException:
            self._thread.close()
            raise

    async def _start(self) -> None:
        self._copies.start(self._layout.memories, {HOST: [self._region.memory]}, self._on_copies)

    def submit_store(self, job_id: int, src_spec: compat.GPULoadStoreSpec, dst_spec: compat.LoadStoreSpec) -> bool:
        return self._submit(job_id, CopyOp.WRITE, src_spec, dst_spec)

    def submit_load(
        self, job_id: int, src_spec: compat.LoadStoreSpec, dst_spec: compat.GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        return self._submit(job_id, CopyOp.READ, dst_spec, src_spec)

    def _submit(self, job_id: int, op: CopyOp, device: compat.GPULoadStoreSpec, slots: compat.LoadStoreSpec) -> bool:
        assert isinstance(slots, compat.CPULoadStoreSpec)
        assert self._tables is not None
        plan = plan_copies(self._tables, self._pairs(device, slots))
        # NIXL ignores streams. Earlier work of this stream writes the stored blocks, or zeroes the loaded ones, so the
        # copy waits for it.
        event = stream_event() if self._is_cuda else None
        with self._changed:
            self._jobs[job_id] = _Job(op, plan.num_bytes, time.monotonic())
        self._thread.soon(lambda: asyncio.ensure_future(self._post(job_id, op, plan, event)))
        return True

    def _pairs(self, device: compat.GPULoadStoreSpec, slots: compat.CPULoadStoreSpec) -> list[tuple[Int64s, Int64s]]:
        """Return per group the device's blocks and those of this rank's parts; the first may be within a slot."""
        size = self._shape.blocks
        groups = list(zip(device.group_sizes, (first % size for first in device.block_indices), strict=True))
        chunks = [-(-(first + count) // size) if count else 0 for count, first in groups]
        if sum(device.group_sizes) != len(device.block_ids) or sum(chunks) != len(slots.block_ids):
            raise BackendError(
                f"a job has {len(device.block_ids)} blocks and {len(slots.block_ids)} slots, but its groups take "
                f"{sum(device.group_sizes)} and {sum(chunks)}"
            )
        ids, mine, out = device.block_ids.astype(np.int64), slots.block_ids.astype(np.int64), []
        for (count, first), some in zip(groups, chunks, strict=True):
            places = first + np.arange(count)
            far = (mine[:some][places // size] * self._shape.ranks + self._rank) * size + places % size
            out.append((ids[:count], far))
            ids, mine = ids[count:], mine[some:]
        return out

    async def _post(self, job_id: int, op: CopyOp, plan: Plan, event: Any) -> None:
        """Post a job once its event was reached in the stream, or break if either failed."""
        try:
            if event is not None:
                await synchronize(event)
            self._copies.post(TransferId(job_id), op, HOST, plan.posts(self._max, MAX_DESCRIPTORS))
        except Exception as exc:  # the loop would only log it
            self._break(exc)

    def _on_copies(self) -> None:
        for news in self._copies.poll():
            if news.ending is Ending.IN_DOUBT:
                log.error(
                    "it is not known whether a copy of job %d goes on (%s): this rank ends if that lasts %g s",
                    *(news.transfer_id, news.cause, WAIT_S),
                )
                with self._changed:
                    self._doubtful.setdefault(news.transfer_id, time.monotonic())
                continue
            with self._changed:
                job = self._jobs.get(news.transfer_id)
            if job is None:
                continue
            if news.ending is not Ending.DONE:
                what = f"job {news.transfer_id}, a {job.op.name.lower()} of {job.num_bytes} bytes"
                self._break(BackendError(f"{what}: {news.cause}; if it recurs, run without AsyncKVOffloadingSpec"))
                continue
            with self._changed:
                self._ended_at = time.monotonic()
                del self._jobs[news.transfer_id]
                self._doubtful.pop(news.transfer_id, None)
                passed = self._ended_at - job.begun_at
                self._ended.append(compat.TransferResult(news.transfer_id, True, job.num_bytes, passed))
                self._changed.notify_all()

    def _break(self, exc: BaseException) -> None:
        with self._changed:
            self._broken = exc
            self._changed.notify_all()

    def get_finished(self) -> list[compat.TransferResult]:
        """Return the jobs that ended since the last call; raise `BackendError` if a copy failed or does not end."""
        with self._changed:
            self._check()
            ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Wait until jobs have ended; after `BackendError` their blocks must not be reused."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken is not None or self._jobs.keys().isdisjoint(job_ids), WAIT_S)
            self._check()
            if late := self._jobs.keys() & job_ids:
                raise self._hung(late)

    def _check(self) -> None:
        if self._broken is not None:
            raise BackendError(
                f"blocks could not be copied: {self._broken!r}; vLLM has no failed jobs, so this rank ends"
            ) from self._broken
        long_ago = time.monotonic() - WAIT_S
        late = {job_id for job_id, since in self._doubtful.items() if since < long_ago}
        if self._jobs and self._ended_at < long_ago and next(iter(self._jobs.values())).begun_at < long_ago:
            late |= self._jobs.keys()
        self._late_at = min(self._late_at, time.monotonic()) if late else math.inf
        if late and time.monotonic() - self._late_at >= GRACE_S:
            raise self._hung(late)

    def _hung(self, late: Collection[int]) -> BackendError:
        jobs = [self._jobs[job_id] for job_id in late]
        stores = sum(job.op is CopyOp.WRITE for job in jobs)
        return BackendError(
            f"jobs {sorted(late)[:8]} do not end: {stores} stores and {len(jobs) - stores} loads, of "
            f"{sum(job.num_bytes for job in jobs)} bytes, the oldest of them for "
            f"{time.monotonic() - min(job.begun_at for job in jobs):.0f} s, which is more than {WAIT_S:g} s; {HUNG}"
        )

    def shutdown(self) -> None:
        """Post nothing more, end the thread, and return the memory, within a few seconds. Idempotent."""
        if self._thread.is_closed:
            return
        self._region.path.unlink(missing_ok=True)
        if (cause := self._thread.end(self._copies, CLOSE_S)) is None:
            self._region.close()
        else:
            log.error("a copy is still under way, so the host memory is kept: %s", cause)


def device_layout(caches: compat.CanonicalKVCaches) -> Layout:
    """Declare vLLM's registered tensors as blocks of plain bytes."""
    memories: dict[int, tuple[int, Memory]] = {}
    views: list[View] = []
    groups: list[Group] = []
    for g, refs in enumerate(caches.group_data_refs):
        pages: dict[int, int] = {}
        for ref in refs:
            pages[ref.tensor_idx] = max(ref.page_size_bytes, pages.get(ref.tensor_idx, 0))
        for index, page in pages.items():
            tensor = caches.tensors[index].tensor
            storage = tensor.untyped_storage()
            base = storage.data_ptr()
            memory = Memory(base, storage.nbytes(), "cuda" if tensor.is_cuda else "cpu", tensor.device.index or 0)
            at, _ = memories.setdefault(base, (len(memories), memory))
            part = Part("bytes", "uint8", 1, 0, (Dim("byte", page, 1),))
            views.append(View(at, g, f"{g}.{index}", tensor.data_ptr() - base, tensor.stride(0), (part,)))
        # A pipeline's stage may have no layer of a group.
        groups.append(Group(f"group{g}", 1, min(len(each.tensor) for each in caches.tensors)))
    layout = Layout(memories=tuple(memory for _, memory in memories.values()), groups=tuple(groups), views=tuple(views))
    check_layout(layout)
    return layout
