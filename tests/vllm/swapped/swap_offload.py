"""A pytest plug-in for vLLM's own tests of offloading: they run with asynckv's manager and worker in place of vLLM's.

The tests stay as they are. What is put in the place of `CPUOffloadingManager` takes its arguments, and is asynckv's
manager with slots of a page; what is put in the place of `CPUOffloadingWorker` shows its memory as vLLM's would, tensor
by tensor, because the tests fill and compare it.
"""

from __future__ import annotations

import importlib
import uuid
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest

PAGE = 4096


def manager(
    num_chunks: int, cache_policy: Literal["lru", "s3-fifo"] = "lru", enable_events: bool = False, **fields: Any
) -> Any:
    """asynckv's manager, of as many slots."""
    from vllm.v1.kv_offload.base import Medium
    from vllm.v1.kv_offload.config import OffloadingGroupConfig

    from asynckv.config import OffloadConfig
    from asynckv.integrations.vllm.offload.manager import Manager
    from asynckv.integrations.vllm.offload.region import Shape
    from asynckv.integrations.vllm.offload.spec import stored

    if fields.get("store_threshold") or fields.get("cache_policy_module_path"):
        pytest.fail("asynckv's manager has no such option")
    tests: Any = importlib.import_module("tests.v1.kv_offload.conftest")
    groups = tuple(OffloadingGroupConfig(16, (f"layer{i}",), i) for i in range(3))
    config = replace(tests.make_offloading_config(groups=groups), enable_kv_cache_events=enable_events)
    offload = OffloadConfig(model="m", hash_tokens=16, host_bytes=num_chunks * PAGE, policy=cache_policy)
    shape = Shape(PAGE, 1, 1, num_chunks)
    made: Any = Manager(config, offload, shape, stored(config, offload, shape))
    made.medium = Medium.CPU
    return made


class Transfers:
    """The jobs of a worker, as a list of what has not been told of."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def __iter__(self) -> Any:
        ended = [result.job_id for result in self.worker._ended]
        return iter([SimpleNamespace(job_id=job_id) for job_id in {*self.worker._jobs, *ended}])


def worker(kv_caches: Any, blocks_per_chunk: int, num_cpu_chunks: int, mmap_region: Any = None) -> Any:
    """asynckv's worker, of one rank."""
    import torch

    from asynckv.integrations.vllm.offload.region import Region, Shape
    from asynckv.integrations.vllm.offload.worker import Worker

    if mmap_region is not None:
        mmap_region.cleanup()
    size = max(sum(ref.page_size_bytes for ref in refs) for refs in kv_caches.group_data_refs)
    shape = Shape(-(-size // PAGE) * PAGE, blocks_per_chunk, 1, num_cpu_chunks)
    name = uuid.uuid4().hex
    made: Any = Worker(shape, 0, name, kv_caches, Region(name, shape), 16 << 20)
    memory = torch.from_numpy(made._region.array).view(torch.int8)
    here = [kv_caches.tensors[int(view.layer.split(".")[1])].tensor for view in made._layout.views]
    there = [
        memory.as_strided(
            (num_cpu_chunks * blocks_per_chunk, view.parts[0].dims[0].size),
            (view.stride, 1),
            view.offset + view.parts[0].offset,
        )
        for view in made._far.views
    ]
    handler = SimpleNamespace(layer_refs_per_group=kv_caches.group_data_refs, _transfers=Transfers(made))
    made._store_handler = SimpleNamespace(**vars(handler), src_tensors=here, dst_tensors=there)
    made._load_handler = SimpleNamespace(**vars(handler), src_tensors=there, dst_tensors=here)
    return made


def pytest_configure(config: pytest.Config) -> None:
    from vllm.v1.kv_offload.cpu import gpu_worker
    from vllm.v1.kv_offload.cpu import manager as managers

    importlib.import_module("vllm.v1.kv_offload.tiering.spec")  # has classes that are made from vLLM's
    managers.CPUOffloadingManager = manager
    gpu_worker.CPUOffloadingWorker = worker
