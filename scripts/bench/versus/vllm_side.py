"""One process of vLLM's NixlConnector, driven as by its model runner; `scripts.bench.vs_vllm` runs it.

It uses the real connector classes, their own ZMQ handshake and real NIXL, on CPU memory, without a model or a GPU. Only
the metadata that vLLM's scheduler would make is made here. It needs vLLM's Python files, but not its kernels.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from scripts.bench.versus.workload import (
    BLOCK_TOKENS,
    SERVE_S,
    Checks,
    Memory,
    Setup,
    Window,
    board,
    lend_ahead,
    minor_faults,
    numbers,
)

LEASE_S = 3600.0
POLL_S = 0.001
"""Seconds between steps of the prefill process."""


def free_port() -> int:
    """Return a free port.

    vLLM binds it some twenty seconds later. So it is outside the range of ports that the system assigns, because the
    system once gave such a port to a connection of ours meanwhile.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port of 127.0.0.1 from 20000 to 32000 is free")


def write_config(setup: Setup) -> None:
    """Write the configuration of a model with this geometry; there are no weights.

    It is written once for both processes, because they compare the paths of their models.
    """
    heads, size = setup.heads
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "float16",
        "num_hidden_layers": setup.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": size,
        "hidden_size": heads * size,
        "intermediate_size": 4 * heads * size,
        "max_position_embeddings": 8192,
        "vocab_size": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
    }
    (Path(setup.folder) / "config.json").write_text(json.dumps(config))


class Side:
    """A worker's connector with its KV caches registered."""

    def __init__(self, **fields: Any) -> None:
        setup = Setup(**fields)
        self.setup, self.memory, self.board = setup, Memory(setup), board(setup.folder)
        self._port, self._peer = free_port(), dict[str, Any]()
        os.environ |= {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._port),
            "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "0",
        }
        self._folder = tempfile.TemporaryDirectory()
        self._connect(setup)

    def _connect(self, setup: Setup) -> None:
        import torch
        from vllm.config import (
            CacheConfig,
            DeviceConfig,
            KVTransferConfig,
            ModelConfig,
            SchedulerConfig,
            VllmConfig,
            set_current_vllm_config,
        )
        from vllm.distributed import parallel_state
        from vllm.distributed.kv_transfer.kv_connector.v1 import nixl
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        torch.set_num_threads(1)
        heads, size = setup.heads
        self.new_metadata = nixl.NixlConnectorMetadata
        cache = CacheConfig(block_size=BLOCK_TOKENS, cache_dtype="auto", enable_prefix_caching=True)
        cache.kv_cache_layout = "LBHNC"
        config = VllmConfig(
            model_config=ModelConfig(model=setup.folder, skip_tokenizer_init=True, dtype="float16", seed=0),
            cache_config=cache,
            scheduler_config=SchedulerConfig(
                max_num_seqs=256,
                max_num_batched_tokens=8192,
                max_model_len=8192,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="NixlConnector", kv_role=f"kv_{setup.role}", kv_buffer_device="cpu"
            ),
            device_config=DeviceConfig("cpu"),
        )
        names = [f"model.layers.{i}.self_attn.attn" for i in range(setup.layers)]
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=heads, head_size=size, dtype=torch.float16)
        assert spec.page_size_bytes == setup.block_bytes, (spec.page_size_bytes, setup.block_bytes)
        groups = KVCacheConfig(
            num_blocks=setup.num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
        )
        # Blocks first, with keys and values adjacent, so that a block of a layer is one piece of memory.
        shape = (setup.num_blocks, heads, BLOCK_TOKENS, 2 * size)
        caches = {
            name: torch.frombuffer(array, dtype=torch.float16).view(shape)
            for name, array in zip(names, self.memory.arrays, strict=True)
        }
        if not setup.progress_thread:
            # vLLM has no switch for this; its code is the same otherwise.
            base_worker.nixl_agent_config = functools.partial(base_worker.nixl_agent_config, enable_prog_thread=False)
        affinity = os.sched_getaffinity(0)
        with set_current_vllm_config(config):
            parallel_state.init_distributed_environment(1, 0, f"file://{self._folder.name}/rendezvous", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
            self.connector = nixl.NixlConnector(config, KVConnectorRole.WORKER, groups)
            os.sched_setaffinity(0, affinity)  # vLLM pins its worker
            self.connector.register_kv_caches(caches)
        self.worker = self.connector.connector_worker
        self._make_scheduler: Callable[[], Any] = lambda: nixl.NixlConnector(config, KVConnectorRole.SCHEDULER, groups)

    async def __aenter__(self) -> Self:
        if self.setup.role == "producer":
            self.memory.fill()
            # The scheduler's half serves this worker's metadata over ZMQ.
            self._scheduler = self._make_scheduler()
            self._scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): self.connector.get_handshake_metadata()})
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.setup.role == "producer":
            self._scheduler.shutdown()
        self.connector.shutdown()
        self._folder.cleanup()
        # Otherwise NIXL's threads outlive the interpreter's teardown.
        os._exit(0)

    def ready(self) -> dict[str, Any]:
        """Return a description of this process, with its address."""
        from vllm import __version__

        where = {"engine_id": self.connector.engine_id, "port": self._port}
        return {"versions": {"vllm": __version__}, "num_blocks": self.setup.num_blocks, **where}

    def meet(self, peer: dict[str, Any]) -> None:
        """Store the description of the prefill process."""
        self._peer = peer

    def window(self, **fields: Any) -> dict[str, Any]:
        """Lend a window's requests, or pull them."""
        window = Window(**fields)
        return self._serve(window) if self.setup.role == "producer" else self._pull(window, self._peer)

    def step(self, metadata: Any, seconds: float = 0.0) -> tuple[set[str], set[str]]:
        """Run one step as the model runner does: begin loads, run the model, collect finished requests."""
        self.connector.bind_connector_metadata(metadata)
        self.connector.start_load_kv(None)
        if seconds:
            time.sleep(seconds)
        results = self.connector.get_transfer_results(set())
        self.connector.clear_connector_metadata()
        return results.finished_sending, results.finished_recving

    def _serve(self, window: Window) -> dict[str, Any]:
        """Keep requests ready ahead of the reader until all of them were read (prefill)."""
        ids = [f"p-{i}" for i in numbers(window)]
        waiting, ready, cpu, faults = set(ids), 0, time.process_time(), minor_faults()
        deadline = time.perf_counter() + SERVE_S
        while waiting and time.perf_counter() < deadline:
            metadata = self.new_metadata()
            upto = min(len(ids), len(ids) - len(waiting) + lend_ahead(window))
            for name in ids[ready:upto]:
                metadata.reqs_in_batch.add(name)
                metadata.reqs_to_send[name] = time.perf_counter() + LEASE_S
            ready = max(ready, upto)
            sent, _ = self.step(metadata)
            # Offer only requests that the worker knows, because an unknown id in a notification is an error there.
            self.board.value = window.first + ready
            waiting -= sent
            time.sleep(POLL_S)
        return {"left": len(waiting), "cpu_s": time.process_time() - cpu, "faults": minor_faults() - faults}

    def _pull(self, window: Window, peer: dict[str, Any]) -> dict[str, Any]:
        """Pull in a closed loop of steps (decode)."""
        checks = Checks(self.memory, window, peer["num_blocks"])
        step_s, todo = window.step_ms / 1e3, iter(numbers(window))
        number = next(todo, None)
        running: dict[str, tuple[int, list[int], float]] = {}
        while number is not None or running:
            metadata, began = self.new_metadata(), time.perf_counter()
            while checks.free and number is not None and number < self.board.value:
                local = checks.free.popleft()
                metadata.add_new_req_to_recv(
                    f"d-{number}",
                    (local,),
                    {
                        "remote_block_ids": (checks.source(number),),
                        "remote_engine_id": peer["engine_id"],
                        "remote_request_id": f"p-{number}",
                        "remote_host": "127.0.0.1",
                        "remote_port": peer["port"],
                        "tp_size": 1,
                    },
                    awaiting_kvs=True,
                )
                running[f"d-{number}"] = (number, local, time.perf_counter())
                number = next(todo, None)
            _, received = self.step(metadata, step_s)
            now = time.perf_counter()
            checks.steps.append(now - began)
            for name in received:
                which, local, since = running.pop(name)
                checks.done(which, local, now - since)
        found = checks.result()
        statistics = self.worker.get_kv_connector_stats()
        found["failed"] = len(statistics.data.get("num_failed_transfers", [])) if statistics else 0
        return found
