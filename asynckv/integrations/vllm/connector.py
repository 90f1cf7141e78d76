"""The class that vLLM makes in the scheduler and in every worker. Each hook only calls the half of its process."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

from asynckv.integrations.vllm import compat
from asynckv.integrations.vllm.early import watch_executors
from asynckv.integrations.vllm.handover import FollowReports, StepOrders
from asynckv.integrations.vllm.memory import check_supported
from asynckv.integrations.vllm.options import Options, remarks
from asynckv.integrations.vllm.scheduler import SchedulerHalf
from asynckv.integrations.vllm.stats import AsyncKVPromMetrics, AsyncKVStats
from asynckv.integrations.vllm.worker import WorkerHalf

logger = logging.getLogger("vllm.asynckv")


class AsyncKVConnector(compat.KVConnectorBase_V1, compat.SupportsHMA):
    """A drop-in for `NixlConnector`."""

    _cache_hit_source = getattr(compat.CacheHitSource, "P2P", None)
    _scheduler: SchedulerHalf  # in the scheduler's process alone
    _worker: WorkerHalf  # in a worker alone

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = Options.parse(transfer.kv_connector_extra_config)
        options.check_addresses()
        for remark in remarks(options, compat.version(), os.environ, compat.lacking()):
            logger.warning("%s", remark)
        self._groups = compat.transfer_group_ids(kv_cache_config)
        self._is_worker = role is not compat.KVConnectorRole.SCHEDULER
        if not self._is_worker:
            check_supported(vllm_config, kv_cache_config)
            if not transfer.is_kv_consumer and vllm_config.parallel_config.prefill_context_parallel_size == 1:
                # With overlapping steps vLLM keeps freed blocks from a load until no step writes them, but only in
                # a consumer. Any of our engines may read, so every one has to be a consumer.
                transfer.kv_role = "kv_both"
            self._scheduler = SchedulerHalf(options, vllm_config, kv_cache_config)
        else:
            self._worker = WorkerHalf(options, vllm_config, kv_cache_config)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return True  # every load brings the recurrent state after its last token

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        # Any order works, but this one takes the fewest descriptors. With MLA there is only one head.
        return None if vllm_config.model_config is None or vllm_config.model_config.use_mla else "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> AsyncKVStats:
        return AsyncKVStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> AsyncKVPromMetrics:
        return AsyncKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        self._scheduler.set_workers(metadata)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        self._scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return self._groups

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        return self._scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.loaded(
            connector_output.finished_recving,
            connector_output.finished_sending,
            getattr(connector_output, "failed_recving", None),
        )
        reports = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(reports, FollowReports):
            self._scheduler.reported(reports)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids)

    def reset_cache(self) -> None:
        if not self._is_worker:
            self._scheduler.pieces.reset()

    def has_pending_push_work(self) -> bool:
        return not self._is_worker and self._scheduler.has_orders

    def get_mem_pool_context(self) -> contextlib.AbstractContextManager[Any] | None:
        return self._worker.allocation()

    def register_kv_caches(self, kv_caches: Any) -> None:
        self._worker.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        self._worker.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        self._worker.restore_kv_caches()

    def get_handshake_metadata(self) -> Any:
        return self._worker.address()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        # vLLM calls it before the forward pass, but some versions and runners not with these orders.
        if isinstance(kv_connector_metadata, StepOrders):
            self._worker.start_load(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.has_connector_metadata() and isinstance(orders := self._get_connector_metadata(), StepOrders):
            self._worker.start_load(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # vLLM schedules a request only after its load

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # blocks are read where they are

    def wait_for_save(self) -> None:
        pass

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return self._worker.take_results()

    def build_connector_worker_meta(self) -> Any:
        return self._worker.take_reports()

    def get_kv_connector_stats(self) -> Any:
        # The scheduler's counts go at once, because no later step may come.
        return self._worker.statistics() if self._is_worker else self._scheduler.tally.take(at_once=True)

    def shutdown(self) -> None:
        if self._is_worker:
            self._worker.shutdown()


watch_executors()
# MultiConnector looks up a child's class by its name to log statistics. If that raised, the API server would serve no
# request any more.
with contextlib.suppress(ValueError, AttributeError):  # it may be registered already
    compat.KVConnectorFactory.register_connector(
        AsyncKVConnector.__name__, "asynckv.integrations.vllm", AsyncKVConnector.__name__
    )
