"""A pytest plug-in for vLLM's own tests: they run with the connector that `ASYNCKV_SWAP` names.

vLLM's tests of remote prefill and decode drive its real scheduler with `NixlConnector` in it, through three helpers of
`tests.v1.kv_connector.unit.utils`. Those are replaced before a test module imports them; the tests stay as they are:

- `create_vllm_config` names the other class, without options that only NixlConnector knows.
- `create_scheduler` tells the scheduler's half where its workers are, as EngineCore does once they have registered
  their memory. One real worker's half, with real memory and a real engine, stands for all of them.
- `create_request(do_remote_prefill=True)` makes params up, which NixlConnector believes until it reads. Here they are
  what a prefill scheduler with the same connector says at the end of the same prompt.

`ASYNCKV_SWAP` is JSON: `{"name": ..., "module": ..., "inside": true to put it into MultiConnector}`.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import socket
import tempfile
from typing import Any

import pytest

SWAP: dict[str, Any] = json.loads(os.environ["ASYNCKV_SWAP"])
OTHERS = {"bidirectional_kv_xfer", "kv_recompute_threshold", "kv_lease_duration", "decoder_kv_blocks_ttl"}
MOST_STEPS = 100


class Swap:
    """The replaced helpers, and what they remember."""

    def __init__(self, utils: Any) -> None:
        self.utils = utils
        self.config_of, self.scheduler_of = utils.create_vllm_config, utils.create_scheduler
        self.request_of = utils.create_request
        self.worker: Any = None
        self.last: tuple[Any, Any] | None = None
        self.schedulers: list[Any] = []
        self.prompts = 0
        utils.create_vllm_config, utils.create_scheduler = self.create_vllm_config, self.create_scheduler
        utils.create_request = self.create_request

    @property
    def is_ours(self) -> bool:
        return str(SWAP["name"]) != "NixlConnector"

    def create_vllm_config(self, *args: Any, **fields: Any) -> Any:
        if "kv_connector" in fields:
            return self.config_of(*args, **fields)
        given = fields.get("kv_connector_extra_config") or {}
        extra = {name: value for name, value in given.items() if not self.is_ours or name not in OTHERS}
        role = fields.setdefault("kv_role", "kv_both")
        if SWAP.get("inside"):
            inner = {"kv_connector": SWAP["name"], "kv_connector_module_path": SWAP["module"], "kv_role": role}
            extra = {"connectors": [inner | {"kv_connector_extra_config": extra}]}
            fields["kv_connector"] = "MultiConnector"
        else:
            fields |= {"kv_connector": SWAP["name"], "kv_connector_module_path": SWAP["module"]}
        return self.config_of(*args, **(fields | {"kv_connector_extra_config": extra}))

    def create_scheduler(self, vllm_config: Any, *args: Any, **fields: Any) -> Any:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(s.getsockname()[1])
        scheduler = self.scheduler_of(vllm_config, *args, **fields)
        self.last = vllm_config, scheduler.kv_cache_config
        metadata = copy.deepcopy(self.handshake())
        if metadata is not None:
            scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})
        # NixlConnector's half ends its threads when it is collected, in the middle of another test.
        self.schedulers.append(scheduler)
        if self.is_ours:
            self.count_blocks(scheduler)
        return scheduler

    def handshake(self) -> Any:
        """What a real worker's half tells the scheduler's."""
        if self.worker is None:
            self.worker = make_worker(self.create_vllm_config(block_size=32))
        return self.worker.get_handshake_metadata()

    def create_request(self, *args: Any, **fields: Any) -> Any:
        request = self.request_of(*args, **fields)
        if fields.get("do_remote_prefill") and self.is_ours:
            request.kv_transfer_params = self.prefilled(request.prompt_token_ids, fields.get("block_size", 16))
        return request

    def prefilled(self, tokens: list[int], block_size: int) -> dict[str, Any]:
        """What a prefill engine hands out at the end of this very prompt, as a client sees it."""
        from vllm.v1.outputs import ModelRunnerOutput

        last, groups = self.last, None
        fields: dict[str, Any] = {"block_size": block_size}
        if last is not None:
            config, groups = last[0], copy.deepcopy(last[1])
            groups.num_blocks = 10_000
            fields["block_size"] = config.cache_config.block_size
            fields["disable_hybrid_kv_cache_manager"] = config.scheduler_config.disable_hybrid_kv_cache_manager
        mine = self.create_vllm_config(max_num_batched_tokens=8192, kv_role="kv_producer", **fields)
        if last is not None:
            mine.cache_config.enable_prefix_caching = last[0].cache_config.enable_prefix_caching
            mine.cache_config.mamba_cache_mode = last[0].cache_config.mamba_cache_mode
        hashed = 16 if groups is not None and len(groups.kv_cache_groups) > 1 else None
        scheduler = self.create_scheduler(mine, kv_cache_config=groups, hash_block_size=hashed)
        self.last = last
        self.prompts += 1
        request = self.request_of(
            request_id=10**6 + self.prompts, num_tokens=len(tokens), block_size=block_size, do_remote_decode=True
        )
        request.prompt_token_ids = list(tokens)
        request._all_token_ids[:] = tokens
        scheduler.add_request(request)
        name = request.request_id
        for _ in range(MOST_STEPS):
            step = scheduler.schedule()
            is_last = request.num_computed_tokens >= request.num_tokens
            output = ModelRunnerOutput([name], {name: 0}, sampled_token_ids=[[1] if is_last else []])
            said = scheduler.update_from_output(step, output)
            if is_last:
                params: dict[str, Any] = json.loads(json.dumps(said[0].outputs[0].kv_transfer_params))
                assert params["do_remote_prefill"], params
                return params
        raise AssertionError(f"a prompt of {len(tokens)} tokens took more than {MOST_STEPS} steps")

    def count_blocks(self, scheduler: Any) -> None:
        """Have params answer `remote_block_ids`, by which two tests count the blocks that are lent."""
        update = scheduler.update_from_output

        def update_and_answer(*args: Any, **fields: Any) -> Any:
            said = update(*args, **fields)
            for outputs in (said or {}).values():
                for output in outputs.outputs:
                    if output.kv_transfer_params is not None:
                        output.kv_transfer_params = KVTransferParams(output.kv_transfer_params)
            return said

        scheduler.update_from_output = update_and_answer


KEY = pytest.StashKey[Swap]()


class KVTransferParams(dict[str, Any]):
    """asynckv's params, which name blocks as runs, with NixlConnector's name for them."""

    def __missing__(self, key: str) -> Any:
        if key != "remote_block_ids":
            raise KeyError(key)
        groups = find(self, "groups")
        return tuple([first + i for first, count in runs for i in range(count) if first >= 0] for _, runs in groups)


def find(value: Any, key: str) -> Any:
    """What lies under a key, however deep."""
    if not isinstance(value, dict):
        return None
    if key in value:
        return value[key]
    return next((found for inner in value.values() if (found := find(inner, key)) is not None), None)


def make_worker(config: Any) -> Any:
    """A worker's half on a little real memory."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, parallel_state
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    layout = KVCacheLayout.LBHNC
    config.cache_config.kv_cache_layout = layout.name
    spec = FullAttentionSpec(block_size=32, num_kv_heads=12, head_size=64, dtype=torch.float16)
    specs = {f"model.layers.{i}.attn": spec for i in range(2)}
    planning: Any = kv_cache_utils  # before 0.33
    with contextlib.suppress(ImportError):
        planning = importlib.import_module("vllm.v1.core.kv_cache_planning")
    groups = planning.get_kv_cache_groups(config, specs)
    size = 8 * sum(each.page_size_bytes for each in specs.values())
    kv = planning.get_kv_cache_config_from_groups(config, groups, size)
    cores = os.sched_getaffinity(0)
    is_mine = not torch.distributed.is_initialized()
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        if is_mine:
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
        worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv)
        worker.register_kv_caches(allocate_kv_cache(kv, torch.device("cpu"), layout, None))
        metadata = worker.get_handshake_metadata()
        if is_mine:
            cleanup_dist_env_and_memory()
    # vLLM's connector binds the thread to one core.
    os.sched_setaffinity(0, cores)
    worker.get_handshake_metadata = lambda: metadata
    return worker


def swap_of_core_tests() -> None:
    """`tests.v1.core.utils.create_scheduler(use_kv_connector=True)` means the other class as well."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if SWAP["module"]:
        KVConnectorFactory.register_connector(SWAP["name"], SWAP["module"], SWAP["name"])
    utils: Any = importlib.import_module("tests.v1.core.utils")
    theirs = utils.create_scheduler

    def create_scheduler(*args: Any, **fields: Any) -> Any:
        if fields.get("use_kv_connector") is True:
            fields["use_kv_connector"] = SWAP["name"]
        return theirs(*args, **fields)

    utils.create_scheduler = create_scheduler


def pytest_configure(config: Any) -> None:
    config.stash[KEY] = Swap(importlib.import_module("tests.v1.kv_connector.unit.utils"))
    swap_of_core_tests()


def pytest_unconfigure(config: Any) -> None:
    worker = config.stash[KEY].worker
    if worker is not None:
        worker.shutdown()


def pytest_report_header(config: Any) -> str:
    return f"connector: {SWAP}"
