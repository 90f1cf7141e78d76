"""An engine's process: vLLM's `EngineCore` over ranks without devices, driven as `EngineCoreProc` drives it.

The loop is that of `EngineCoreProc.run_busy_loop`: an engine without requests waits for questions and makes no steps,
one with requests answers what has been asked and makes the next. A test may also `hold` it, and make single steps.
Outputs go to the test when they are made. The module is imported by a server that forks (`engines`), because importing
vLLM takes twenty seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import random
import resource
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, KVTransferConfig, ObservabilityConfig, ParallelConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.tracing import maybe_init_worker_tracer
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import RequestStatus

from scripts.bench.versus.vllm_side import free_port
from tests.lab.offload_audit import audit
from tests.vllm import rank as _rank  # noqa: F401  loaded before the fork
from tests.vllm.configs import LLAMA, config_of
from tests.vllm.executor import RankExecutor
from tests.vllm.models import VOCABULARY, Attention
from tests.vllm.setups import Setup, die_with_parent


def run(connection: Connection, setup: Setup, folder: Path) -> None:
    """Be an engine, until the other end of the connection closes; models are written into the folder."""
    die_with_parent()
    os.environ.update(setup.environment)
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
    torch.set_num_threads(1)
    if setup.traces is not None:
        os.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = setup.traces  # as the API server leaves it to its children
    try:
        maybe_init_worker_tracer("vllm.engine_core", "engine_core", "EngineCore")
        process = Process(connection, setup, make_config(setup, folder))
        connection.send(("ready", None, None))
        process.serve()
    except Exception:
        with contextlib.suppress(OSError):
            connection.send(("died", None, traceback.format_exc()))


def make_config(setup: Setup, folder: Path) -> Any:
    """vLLM's configuration, of a model that consists of a `config.json`."""
    model = setup.model
    config = LLAMA | {
        "num_hidden_layers": sum(not isinstance(each, Attention) or not each.is_draft for each in model.layers),
        "num_attention_heads": max(8, model.kv_heads),
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": setup.max_model_len,
        "vocab_size": VOCABULARY,
    }
    if model.is_mla:
        config |= {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 48}
        config |= {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": None}
        config |= {"n_routed_experts": 8, "first_k_dense_replace": len(model.layers)}
    else:
        config["head_dim"] = 16
    text = json.dumps(config)
    # Engines of one model find it at one path, which NixlConnector compares.
    folder = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    # At once: the processes of several engines write the same, and read it.
    (whole := folder / f"config.{os.getpid()}").write_text(text)
    whole.replace(folder / "config.json")
    cache = CacheConfig(
        block_size=model.block_size,
        enable_prefix_caching=setup.prefix_caching,
        num_gpu_blocks_override=setup.num_blocks,
    )
    if model.has_state:
        cache.mamba_cache_mode = model.mamba_mode
    ranks = setup.tp * setup.pp * setup.pcp
    vllm_config = config_of(
        folder,
        cache,
        max_len=setup.max_model_len,
        max_seqs=setup.max_num_seqs,
        max_batched=setup.max_num_batched_tokens,
        asynchronous=setup.async_scheduling,
        drafts=setup.drafts,
        parallel_config=ParallelConfig(
            tensor_parallel_size=setup.tp,
            pipeline_parallel_size=setup.pp,
            decode_context_parallel_size=setup.dcp if setup.pcp == 1 else 1,
            cp_kv_cache_interleave_size=setup.interleave,
            distributed_executor_backend=RankExecutor if ranks > 1 else UniProcExecutor,
            worker_cls="tests.vllm.rank.Rank",
        ),
        kv_transfer_config=KVTransferConfig(**setup.connector_fields()) if setup.connector else None,
        observability_config=ObservabilityConfig(otlp_traces_endpoint=setup.traces),
        additional_config={"model": model},
    )
    vllm_config.cache_config.kv_cache_layout = setup.layout
    vllm_config.cache_config.block_size = model.block_size
    # With latents on CPUs vLLM switches both off, and then allows no size of blocks for states.
    vllm_config.cache_config.enable_prefix_caching = setup.prefix_caching
    vllm_config.scheduler_config.enable_chunked_prefill = True
    vllm_config.scheduler_config.max_num_batched_tokens = setup.max_num_batched_tokens
    if model.has_state:
        of_states = model.block_size if model.mamba_mode == "align" else setup.max_model_len
        vllm_config.cache_config.mamba_block_size = of_states
    vllm_config.parallel_config.worker_cls = "tests.vllm.rank.Rank"
    vllm_config.parallel_config.data_parallel_index = setup.replica
    # On CPUs vLLM has only the runner that does not support it.
    vllm_config.parallel_config.prefill_context_parallel_size = setup.pcp
    vllm_config.parallel_config.world_size = ranks
    vllm_config.parallel_config.decode_context_parallel_size = setup.dcp
    if setup.drafts:
        vllm_config.speculative_config.method = "eagle"  # whose own model would need weights
    return vllm_config


class Process:
    """Everything that a test may ask of an engine, and its loop."""

    def __init__(self, connection: Connection, setup: Setup, config: Any) -> None:
        self.connection, self.setup, self.config = connection, setup, config
        executor = RankExecutor if config.parallel_config.world_size > 1 else UniProcExecutor
        self.core = EngineCore(config, executor, log_stats=True)
        self.is_held, self.is_closed = False, False
        self.steps = 0
        self.counts = {kind: Counter[str]() for kind in ("prompts", "computed_locally")}
        self.used = resource.getrusage(resource.RUSAGE_SELF)

    def serve(self) -> None:
        while not self.is_closed:
            for number, method, args in self._questions():
                try:
                    answer: Any = getattr(self, method)(*args)
                except Exception:
                    self.connection.send(("raised", number, traceback.format_exc()))
                else:
                    self.connection.send(("answer", number, answer))
            if self._has_work() and not self.is_closed:
                self._step()

    def _has_work(self) -> bool:
        return not self.is_held and bool(self.core.scheduler.has_requests() or self.core.batch_queue)

    def _questions(self) -> Iterator[tuple[int, str, tuple[Any, ...]]]:
        """What has been asked; waits for it while there is nothing else to do."""
        while self.connection.poll(None if not self._has_work() else 0):
            try:
                yield self.connection.recv()
            except EOFError:
                self.is_closed = True
            if self.is_closed:
                return

    def _step(self) -> None:
        outputs, is_executed = self.core.step_fn()
        self.core.post_step(is_executed)
        self.steps += 1
        for each in (outputs or {}).values():
            if each.scheduler_stats is not None and (sent := each.scheduler_stats.kv_connector_stats):
                for kind, counts in self.counts.items():
                    counts.update(sent.get(kind, {}))
            for output in each.outputs:
                told = {
                    "tokens": list(output.new_token_ids),
                    "reason": None if output.finish_reason is None else str(output.finish_reason),
                    "params": output.kv_transfer_params,
                }
                self.connection.send(("output", output.request_id, told))
        if not is_executed and self.core.scheduler.has_requests():
            # As EngineCoreProc does while there is nothing but transfers to wait for.
            time.sleep(0.001)

    # -- questions

    def add(
        self,
        request_id: str,
        tokens: list[int],
        most: int,
        fields: dict[str, Any],
        immediately: bool,
        trace: Mapping[str, str] | None = None,
        adapter: tuple[int, str, str] | None = None,
    ) -> None:
        """A request arrives; `fields` are further sampling parameters, `trace` the headers of a trace."""
        sampling = SamplingParams(max_tokens=most, ignore_eos=True, temperature=0.0, **fields)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=tokens,
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None if adapter is None else LoRARequest(adapter[1], adapter[0], adapter[2]),
            cache_salt=None,
            data_parallel_rank=None,
            abort_immediately=immediately,
            trace_headers=trace,
        )
        self.core.add_request(*self.core.preprocess_add_request(request))

    def abort(self, request_ids: list[str]) -> None:
        """Clients leave between two steps."""
        self.core.abort_requests(request_ids)

    def abort_in_step(self, request_ids: list[str]) -> None:
        """Clients leave while the next step is computed."""
        self.core.aborts_queue.put_nowait(request_ids)

    def hold(self) -> None:
        self.is_held = True

    def go(self) -> None:
        self.is_held = False

    def step(self, count: int) -> int:
        """Make steps while held; returns how many requests the scheduler has."""
        for _ in range(count):
            if self.core.scheduler.has_requests() or self.core.batch_queue:
                self._step()
        return len(self.core.scheduler.requests)

    def state(self) -> dict[str, Any]:
        """Where the engine stands."""
        scheduler = self.core.scheduler
        return {
            "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
            "requests": {name: request.status.name for name, request in scheduler.requests.items()},
            "computed": {name: request.num_computed_tokens for name, request in scheduler.requests.items()},
            "has_work": bool(scheduler.has_requests()),
            "unreported": self._unreported(),
            "steps": self.steps,
        }

    def _unreported(self) -> list[str]:
        """Requests of which some ranks have said that they are through, and others have not."""
        merged = self.core.model_executor.kv_output_aggregator
        if merged is None or self.config.parallel_config.world_size == 1:
            return []
        return [*merged._recv_remaining_count, *merged._send_remaining_count]

    def wrong(self) -> list[str]:
        """What ranks have found wrong in their caches since the last question."""
        return [text for rank in self.core.collective_rpc("take_wrong") for text in rank]

    def scribble(self) -> None:
        """Spoil the first layer's cache."""
        self.core.collective_rpc("scribble")

    def look(self) -> list[dict[str, Any]]:
        """What the connectors' engines say of themselves."""
        return list(self.core.collective_rpc("look"))

    def met(self) -> dict[str, int]:
        """How often the first rank was told of preemptions, chunks of prompts and cached prefixes."""
        return dict(self.core.collective_rpc("take_met")[0])

    def kill_rank(self, rank: int) -> None:
        """End one rank's process at once."""
        self.core.model_executor.kill(rank)

    def kept(self) -> dict[str, int]:
        """What the manager of an `OffloadingConnector` counts; it must add up."""
        connector = self.core.scheduler.connector
        (half,) = filter(
            None, (getattr(c, "connector_scheduler", None) for c in getattr(connector, "_connectors", [connector]))
        )
        manager = half.manager
        with manager.lock:
            assert audit(manager.catalogue) == []
            return {**manager.catalogue.statistics(), **manager.counts}

    def judge(self, is_judged: bool) -> None:
        """Have ranks write and compare the model's bytes, or not, so that steps are only the connector's."""
        self.core.collective_rpc("judge", args=(is_judged,))

    def touch(self) -> None:
        """Have ranks write every page of their caches."""
        self.core.collective_rpc("touch")

    def arrange(self, order: str, seed: int) -> None:
        """Have free blocks follow each other in the order of their ids, or by chance."""
        pool = self.core.scheduler.kv_cache_manager.block_pool
        blocks = sorted(pool.get_new_blocks(pool.get_num_free_blocks()), key=lambda block: block.block_id)
        if order == "random":
            random.Random(seed).shuffle(blocks)
        pool.free_blocks(blocks)

    def model_time(self, python_s: float, outside_s: float) -> None:
        """Have each forward of a rank take so long in Python, and then outside of it."""
        self.core.collective_rpc("model_time", args=(python_s, outside_s))

    def counted(self) -> dict[str, dict[str, int]]:
        """What vLLM's frontend has been told to count, by kind."""
        return {kind: dict(counts) for kind, counts in self.counts.items()}

    def times(self) -> dict[str, Any]:
        """Since the last question: seconds of each step on the first rank's thread; CPU and faults of the process."""
        before, self.used = self.used, resource.getrusage(resource.RUSAGE_SELF)
        now = self.used
        return {
            "steps_s": self.core.collective_rpc("take_hook_s")[0],
            "cpu_s": now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime,
            "faults": now.ru_minflt - before.ru_minflt,
        }

    def sleep(self, mode: str = "abort") -> None:
        """Go to sleep as `EngineCoreProc` does, which steps on until it has no work."""
        scheduler = self.core.scheduler
        if mode == "abort":
            scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
        while scheduler.has_requests() or self.core.batch_queue:
            self._step()
        self.core._finish_pause(clear_cache=True)
        self.core.model_executor.sleep(1)

    def wake(self) -> None:
        self.core.wake_up()

    def forget_prefixes(self, everywhere: bool = False) -> bool:
        """Empty the prefix cache, and what the connector keeps, if it is asked for."""
        return bool(self.core.reset_prefix_cache(reset_connector=everywhere))

    def preempt(self, request_id: str) -> None:
        """Take a running request's blocks between two steps, as vLLM does when they run out."""
        scheduler = self.core.scheduler
        scheduler.running.remove(request := scheduler.requests[request_id])
        scheduler._preempt_request(request, time.monotonic())

    def plant(self, module: str, kind: str, name: str) -> None:
        """Plant a bug: have a method do nothing."""
        setattr(getattr(importlib.import_module(module), kind), name, lambda *args, **fields: None)

    def clock(self) -> float:
        return time.monotonic()

    def close(self) -> float:
        """Shut down as vLLM does; returns how long it took."""
        began = time.monotonic()
        self.core.shutdown()
        self.is_closed = True
        return time.monotonic() - began
