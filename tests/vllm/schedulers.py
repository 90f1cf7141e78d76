"""vLLM's real scheduler and KV cache manager with the connector's scheduler half, and nobody who computes.

A test says what the workers would report. Everything between a request's arrival and its blocks' return is vLLM's.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from asynckv.embed.orders import Order

CORES = os.sched_getaffinity(0)

from vllm.config import CacheConfig, KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from asynckv.integrations.vllm.handover import WorkerAddress  # noqa: E402
from tests.vllm.configs import LLAMA, config_of  # noqa: E402

os.sched_setaffinity(0, CORES)

ABORTED, MAX_LEN = RequestStatus.FINISHED_ABORTED, 4096

Group = tuple[Any, ...]

DENSE: tuple[Group, ...] = (("attention", 16),)
WINDOW: tuple[Group, ...] = (("attention", 16), ("window", 16, 64))
MIXED: tuple[Group, ...] = (("attention", 32), ("window", 16, 48))
HYBRID: tuple[Group, ...] = (("attention", 16), ("states", 16, "align"))
STATES: tuple[Group, ...] = (("attention", 16), ("states", 4096, "none"))


def model_folder() -> str:
    """A model that is nothing but a configuration."""
    folder = Path(tempfile.gettempdir()) / f"asynckv-scheduler-tests-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | {"head_dim": 16, "max_position_embeddings": MAX_LEN}))
    return str(folder)


def spec_of(kind: str, block_size: int, *more: Any) -> Any:
    if kind == "states":
        return MambaSpec(
            block_size=block_size,
            shapes=((8, 3),),
            dtypes=(torch.float32,),
            mamba_cache_mode=more[0],
            page_size_padded=None,
        )
    common = {"block_size": block_size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    return SlidingWindowSpec(sliding_window=more[0], **common) if kind == "window" else FullAttentionSpec(**common)


@dataclass(slots=True)
class Told:
    """What came out of a step."""

    orders: Sequence[Order]
    tokens: dict[str, list[int]] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Told({[type(o).__name__ for o in self.orders]}, {self.reasons})"

    def kinds(self) -> list[type[Order]]:
        return [type(order) for order in self.orders]

    def only(self, kind: type[Any]) -> Any:
        """The one order of this kind."""
        (found,) = [order for order in self.orders if isinstance(order, kind)]
        return found


class Side:
    """An engine's scheduler, and what its workers were asked for."""

    def __init__(
        self,
        groups: tuple[Group, ...] = DENSE,
        *,
        name: str = "engine",
        num_blocks: int = 1000,
        policy: str = "fail",
        role: str = "kv_both",
        prefix_caching: bool = True,
        asynchronous: bool = False,
        max_batched: int = 2048,
        max_seqs: int = 64,
        extra: dict[str, Any] | None = None,
        beside: Sequence[dict[str, Any]] = (),
        is_last: bool = False,
        drafts: int | None = None,
        is_connected: bool = True,
        connector: str = "AsyncKVConnector",
        pcp: int = 1,
        dcp: int = 1,
    ) -> None:
        self.name = name
        ours = {
            "kv_connector": connector,
            "kv_connector_module_path": "asynckv.integrations.vllm",
            "kv_role": role,
            "kv_connector_extra_config": extra or {},
        }
        common = {"kv_load_failure_policy": policy, "kv_buffer_device": "cpu", "engine_id": name}
        if beside:
            children = [*beside, ours] if is_last else [ours, *beside]
            transfer = {
                "kv_connector": "MultiConnector",
                "kv_role": role,
                "kv_connector_extra_config": {"connectors": children},
            }
        else:
            transfer = ours
        specs = [spec_of(*group) for group in groups]
        cache = CacheConfig(block_size=specs[0].block_size, enable_prefix_caching=prefix_caching)
        modes = [spec.mamba_cache_mode for spec in specs if isinstance(spec, MambaSpec)]
        if modes:
            cache.mamba_cache_mode = modes[0]
            cache.mamba_block_size = max(spec.block_size for spec in specs if isinstance(spec, MambaSpec))
            if modes[0] == "none":
                cache.enable_prefix_caching = False
        cache.kv_cache_layout = "LBHNC"
        self.config = config_of(
            model_folder(),
            cache,
            max_len=MAX_LEN,
            max_seqs=min(max_seqs, max_batched),
            max_batched=max_batched,
            asynchronous=asynchronous,
            drafts=drafts,
            kv_transfer_config=KVTransferConfig(**common, **transfer),
        )
        self.config.parallel_config.prefill_context_parallel_size = pcp
        self.config.parallel_config.decode_context_parallel_size = dcp
        cache.block_size = specs[0].block_size
        cache.num_gpu_blocks = num_blocks
        layers = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
        self.kv = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=layers)
        self.block_size, self.hash_block_size = resolve_kv_cache_block_sizes(self.kv, self.config)
        kind = AsyncScheduler if asynchronous else Scheduler
        self.scheduler = kind(
            vllm_config=self.config,
            kv_cache_config=self.kv,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=self.block_size,
            hash_block_size=self.hash_block_size,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        self.free_blocks = self.num_free()
        if is_connected:
            self.connect(ranks=[(0, rank) for rank in range(dcp)])

    # -- parts

    def connect(self, epoch: int = 0, ranks: Sequence[tuple[int, int]] = ((0, 0),)) -> None:
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(pp, tp): WorkerAddress(self.endpoint(pp, tp), epoch) for pp, tp in ranks}
        )

    def endpoint(self, pp: int = 0, tp: int = 0) -> dict[str, Any]:
        return {"tp_rank": tp, "pp_stage": pp, "address": "tcp://127.0.0.1:9", "incarnation": f"{self.name}-{pp}-{tp}"}

    @property
    def half(self) -> Any:
        """Ours, wherever it is."""
        for each in getattr(self.connector, "_connectors", [self.connector]):
            if type(each).__name__ == "AsyncKVConnector":
                return each._scheduler
        raise AssertionError("no connector of ours")

    def num_free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def is_idle(self) -> bool:
        """EngineCore makes no further step."""
        return not self.scheduler.has_requests()

    # -- a request

    def add(
        self,
        request_id: str,
        prompt: Sequence[int] | None,
        params: Any = None,
        most: int = 1,
        given: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Request:
        """A request arrives; `given` is what it has besides tokens, `fields` are of its sampling."""
        sampling = SamplingParams(max_tokens=most, ignore_eos=True, **fields)
        init_none_hash(sha256)
        request = Request(
            request_id=request_id,
            prompt_token_ids=None if prompt is None else list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=get_request_block_hasher(self.hash_block_size, sha256),
            **given or {},
        )
        request.kv_transfer_params = params
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str, status: Any = ABORTED) -> None:
        self.scheduler.finish_requests(request_id, status)

    def step(self, **reported: Any) -> Told:
        """One step: what the workers report, as `finish` takes it, comes with its output."""
        return self.finish(self.scheduler.schedule(), **reported)

    def finish(
        self,
        out: Any,
        loaded: Collection[str] = (),
        failed: Collection[str] = (),
        sent: Collection[str] = (),
        token: int = 7,
        reports: Any = None,
    ) -> Told:
        """Take the output of a step. Failed loads are loads, too."""
        ids = list(out.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = self.scheduler.requests.get(request_id)
            whole = request is not None and request.num_computed_tokens >= request.num_tokens
            sampled.append([token] if whole else [])
        told = Told(self._of("orders", out.kv_connector_metadata))
        failed = {*failed, *self._of("failing", out.kv_connector_metadata)}  # which workers report at once
        output = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={each: i for i, each in enumerate(ids)}, sampled_token_ids=sampled
        )
        if reports is not None and (parts := getattr(self.connector, "_connectors", ())):
            ours = [reports if type(each).__name__ == "AsyncKVConnector" else None for each in parts]
            reports = MultiKVConnectorWorkerMetadata(tuple(ours))
        if loaded or failed or sent or reports:
            output.kv_connector_output = KVConnectorOutput(
                finished_sending=set(sent) or None,
                finished_recving={*loaded, *failed} or None,
                failed_recving=set(failed),
                kv_connector_worker_meta=reports,
            )
        for each in (self.scheduler.update_from_output(out, output) or {}).values():
            for one in each.outputs:
                told.tokens[one.request_id] = list(one.new_token_ids)
                if one.kv_transfer_params is not None:
                    told.params[one.request_id] = one.kv_transfer_params
                if one.finish_reason is not None:
                    told.reasons[one.request_id] = str(one.finish_reason)
        return told

    def _of(self, field: str, metadata: Any) -> Sequence[Any]:
        parts = getattr(metadata, "metadata", [metadata])
        return [each for part in parts for each in getattr(part, field, ())]

    def prefill(self, request_id: str, prompt: Sequence[int] | None, **fields: Any) -> Any:
        """Prefill a prompt for another engine, and return what comes out; its blocks stay lent."""
        self.add(request_id, prompt, {"do_remote_decode": True}, **fields)
        return self.ended(request_id).params.get(request_id)

    def read(self, request_id: str, *given: Any, **fields: Any) -> Request:
        """Take a request, and have its blocks loaded."""
        request = self.add(request_id, *given, **fields)
        self.step()
        self.step(loaded=[request_id])
        return request

    def compute(self, request_id: str, prompt: Sequence[int], most: int, steps: int = 1) -> None:
        """Take a request that brings nothing, and make so many steps."""
        self.add(request_id, prompt, None, most)
        for _ in range(steps):
            self.step()

    def ended(self, request_id: str) -> Told:
        """Make steps until a request has ended."""
        for _ in range(1000):
            if request_id in (told := self.step()).reasons:
                return told
        raise AssertionError("it never ends")
