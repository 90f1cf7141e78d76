"""The class that vLLM makes in every process of an engine, and the shape of a record.

vLLM tells a spec the bytes of a block on one worker, the groups of the layers, and the number of workers; the
scheduler's half never sees a tensor. So every rank has an equal part of a slot, of one block after another, each
padded to pages, and all groups have slots of one size.
"""

from __future__ import annotations

import hashlib
import logging
import os
from typing import Any

import msgspec

from asynckv.config import OffloadConfig
from asynckv.errors import ConfigError
from asynckv.geometry.packed import ALIGN
from asynckv.integrations.vllm import compat
from asynckv.integrations.vllm.offload.manager import COUNTED, GAUGES, PREFIX, Manager
from asynckv.integrations.vllm.offload.options import parse
from asynckv.integrations.vllm.offload.region import Region, Shape
from asynckv.integrations.vllm.offload.worker import Worker
from asynckv.integrations.vllm.options import WHERE
from asynckv.offload.keys import StoredGroup

log = logging.getLogger("vllm.asynckv")


class AsyncKVOffloadingSpec(compat.OffloadingSpec):
    """asynckv's spec: `AsyncKVOffloadingSpec` of `asynckv.integrations.vllm.offload`, as vLLM is told."""

    def __init__(self, config: compat.OffloadingConfig) -> None:
        super().__init__(config)
        if not hasattr(compat.OffloadingManager, "lock"):
            raise ConfigError(
                f"{WHERE}.spec_name: vLLM {compat.version()} does not lock a manager while it decides on a step, but "
                f"AsyncKVOffloadingSpec has another thread; use vLLM 0.33 or later, or another spec"
            )
        self.offload = parse(config.extra_config, config.model.name, config.cache.tokens_per_hash)
        self.replicated_layout = config.replicated_layout
        self.shape = shape_of(config, self.offload)
        self._manager: compat.OffloadingManager | None = None
        self._worker: compat.OffloadingWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, compat.OffloadingMetricMetadata]:
        counters = {PREFIX + name: compat.OffloadingCounterMetadata(told) for name, told in COUNTED.items()}
        return counters | {PREFIX + name: compat.OffloadingGaugeMetadata(told) for name, told in GAUGES.items()}

    def get_manager(self) -> compat.OffloadingManager:
        if self._manager is None:
            groups = stored(self.config, self.offload, self.shape)
            if self.offload.directory and not os.environ.get("PYTHONHASHSEED"):
                log.warning(
                    "blocks in %s will not be found by the next start: vLLM's hashes begin with a random number; "
                    "set PYTHONHASHSEED",
                    self.offload.directory,
                )
            if self.extra_config.get("sync_load_budget_bytes") and any(
                group.sliding_window_size_in_chunks == 1 for group in self.config.groups
            ):
                log.warning(
                    "if this model is recurrent, leave %s.sync_load_budget_bytes out: vLLM 0.33.0 reserves one block "
                    "too few per group of states for such a load, and may end with 'Cannot get 1 free blocks'",
                    WHERE,
                )
            self._manager = Manager(self.config, self.offload, self.shape, groups)
        return self._manager

    def get_worker(self, kv_caches: compat.CanonicalKVCaches) -> compat.OffloadingWorker:
        if self._worker is None:
            region = Region(self.config.engine_id, self.shape)
            rank = 0 if self.replicated_layout else self.config.parallel.rank
            name = f"{self.config.engine_id}-{self.config.parallel.rank}"
            try:
                region.join(self.config.parallel.rank)
                self._worker = Worker(self.shape, rank, name, kv_caches, region, self.offload.max_post_bytes)
            except BaseException:
                region.close()
                raise
        return self._worker


def shape_of(config: compat.OffloadingConfig, offload: OffloadConfig) -> Shape:
    """Divide the host memory into slots; raise `ConfigError` with the least size if there are too few."""
    ranks = 1 if config.replicated_layout else config.parallel.world_size
    block_bytes = -(-max(1, config.worker_kv_bytes_per_block) // ALIGN) * ALIGN
    shape = Shape(block_bytes, config.cache.blocks_per_chunk, ranks, 0)
    slots = offload.host_bytes // shape.slot_bytes
    if slots < LEAST_SLOTS:
        raise ConfigError(
            f"{WHERE}.host_bytes is {offload.host_bytes}, but one slot takes {shape.slot_bytes} bytes ({shape.blocks} "
            f"blocks of {block_bytes} bytes on each of {ranks} ranks); give {LEAST_SLOTS * shape.slot_bytes} or more"
        )
    if offload.file_bytes and offload.file_bytes < LEAST_SLOTS * shape.slot_bytes:
        raise ConfigError(
            f"{WHERE}.file_bytes is {offload.file_bytes}, but one block takes {shape.slot_bytes} bytes; give "
            f"{LEAST_SLOTS * shape.slot_bytes} or more, or leave directory and file_bytes out"
        )
    return shape._replace(slots=slots)


LEAST_SLOTS = 8  # a tier gives slots to groups in such chunks


def stored(config: compat.OffloadingConfig, offload: OffloadConfig, shape: Shape) -> tuple[StoredGroup, ...]:
    """Describe vLLM's groups to the catalogue, with one key as one block of one token."""
    return tuple(
        StoredGroup(
            name=f"group{group.group_id}",
            block_size=1,
            record_bytes=shape.slot_bytes,
            namespace=namespace(config, offload, shape, index),
        )
        for index, group in enumerate(config.groups)
    )


def namespace(config: compat.OffloadingConfig, offload: OffloadConfig, shape: Shape, index: int) -> str:
    """Return a digest of all that decides whether a record can be used: the model, and the order of the bytes."""
    group, parallel = config.groups[index], config.parallel
    said: tuple[Any, ...] = (
        *(1, offload.model, config.model.dtype, config.cache.tokens_per_hash, config.kv_cache_layout or ""),
        *(group.tokens_per_block, group.sliding_window_size_in_chunks, group.layer_names, group.group_id),
        *(tuple(shape._replace(slots=0)), config.replicated_layout),
        *(parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size),
    )
    return hashlib.sha256(msgspec.msgpack.encode(said)).hexdigest()[:32]
