"""The two halves of asynckv's spec by themselves: what they refuse, and what they do when something fails."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    Medium,
    ReqContext,
    ScheduleEndContext,
    TierFilter,
    TierMatcher,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request

from asynckv.config import OffloadConfig
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import TransferId
from asynckv.errors import BackendError, ConfigError
from asynckv.geometry.layout import Memory
from asynckv.geometry.plan import ReadRequest
from asynckv.integrations.vllm.offload import files
from asynckv.integrations.vllm.offload import region as regions
from asynckv.integrations.vllm.offload import spec as specs
from asynckv.integrations.vllm.offload import worker as workers
from asynckv.integrations.vllm.offload.manager import COUNTED, GAUGES, PREFIX, Manager
from asynckv.integrations.vllm.offload.region import Region, Shape
from asynckv.integrations.vllm.offload.seen import OpenMoves
from asynckv.integrations.vllm.offload.spec import AsyncKVOffloadingSpec, stored
from asynckv.integrations.vllm.offload.worker import Worker, device_layout
from asynckv.offload.job import Move, MoveKind, Piece
from asynckv.ports import CopyOp, Record, RecordsEnded, RecordsLost
from asynckv.tools.offload.folder import look
from tests.lab.offload_audit import audit, entries_of
from tests.lab.tiers import SimDisk, SimRecords

PAGE = 4096
WITHIN_S = 20.0


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    """Other tests may have set vLLM's logger to INFO."""
    caplog.set_level("WARNING", "vllm.asynckv")


def config(extra: Mapping[str, Any] | None = None, block_bytes: int = PAGE, **fields: Any) -> OffloadingConfig:
    given = {"spec_name": "AsyncKVOffloadingSpec", "spec_module_path": "asynckv.integrations.vllm.offload"}
    return OffloadingConfig(
        **{
            "groups": (OffloadingGroupConfig(16, ("layer",), 0),),
            "worker_kv_bytes_per_block": block_bytes,
            "enable_kv_cache_events": True,
            "extra_config": given | {"host_bytes": 64 * PAGE} | dict(extra or {}),
            "engine_id": uuid.uuid4().hex,
            "model": OffloadingModelConfig("m", "float16"),
            "cache": OffloadingCacheConfig(16, 1),
            "parallel": OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        }
        | fields
    )


# -- the spec --------------------------------------------------------------------------------------


def test_the_spec_is_found_by_its_path_and_names_its_metrics() -> None:
    given = config()
    kind = OffloadingSpecFactory.get_spec_cls(given.extra_config)
    assert kind is AsyncKVOffloadingSpec
    assert {PREFIX + name for name in (*COUNTED, *GAUGES)} == set(kind.build_metric_definitions(given.extra_config))
    manager = OffloadingSpecFactory.create_spec(given).get_manager()
    manager.prepare_store([key(1)], ReqContext("r"))
    manager.complete_store([key(1)], ReqContext("r"))
    manager.touch([key(1), key(1)], ReqContext("r"))  # groups may name a block each
    stats = manager.get_stats().reduce()
    assert stats[PREFIX + "stored_blocks"] == 1
    assert stats[PREFIX + "host_blocks"] == 1
    assert stats[PREFIX + "asked_blocks"] == 0  # an alert looks whether it is there
    manager.lookup(key(1), ReqContext("s"))
    manager.lookup(key(2), ReqContext("s"))
    later = manager.get_stats().reduce()
    assert later[PREFIX + "stored_blocks"] == 0
    assert later[PREFIX + "asked_blocks"] == 2


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"cpu_bytes_to_use": 1}, 'say "host_bytes"'),
        ({"host_bytes": 7 * PAGE}, f"host_bytes is {7 * PAGE}, but one slot takes {PAGE} bytes .* give {8 * PAGE}"),
        ({"directory": "/x", "file_bytes": 7 * PAGE}, f"file_bytes is {7 * PAGE}, .* give {8 * PAGE}"),
    ],
)
def test_options_are_refused_before_anything_is_made(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OffloadingSpecFactory.create_spec(config(extra))


def names(given: OffloadingConfig, offload: OffloadConfig, shape: Shape) -> list[str]:
    return [group.namespace for group in stored(given, offload, shape)]


def test_records_are_found_only_where_their_bytes_mean_the_same() -> None:
    groups = (OffloadingGroupConfig(16, ("a",), 0), OffloadingGroupConfig(16, ("b",), 1))
    given, shape = config(groups=groups), Shape(PAGE, 1, 1, 8)
    offload = OffloadConfig(model="m", hash_tokens=16, host_bytes=1)
    said = [
        names(given, offload, shape),
        names(given, replace(offload, model="other"), shape),
        names(replace(given, model=OffloadingModelConfig("m", "bfloat16")), offload, shape),
        names(replace(given, cache=replace(given.cache, tokens_per_hash=32)), offload, shape),
        names(replace(given, kv_cache_layout="LBNHC"), offload, shape),
        names(replace(given, replicated_layout=True), offload, shape),
        names(given, offload, shape._replace(block_bytes=2 * PAGE)),
        names(given, offload, shape._replace(blocks=2)),
        names(given, offload, shape._replace(ranks=2)),
        *(
            names(replace(given, parallel=replace(given.parallel, **{size: 2})), offload, shape)
            for size in ("tp_size", "pp_size", "pcp_size", "dcp_size")
        ),
        *(
            names(replace(given, groups=tuple(replace(group, **more) for group in groups)), offload, shape)
            for more in ({"tokens_per_block": 32}, {"sliding_window_size_in_chunks": 3}, {"layer_names": ("c",)})
        ),
    ]
    # The last: layers of two groups have one name, and the groups' numbers tell them apart.
    assert len({name for each in said for name in each}) == 2 * len(said)
    assert names(given, offload, shape._replace(slots=99)) == said[0], "how many there are changes no bytes"


@pytest.mark.parametrize(("is_replicated", "rank"), [(False, 1), (True, 0)])
def test_ranks_that_hold_the_same_share_one_part_of_a_slot(
    is_replicated: bool, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specs, "Worker", lambda shape, rank, *_: (shape.ranks, rank))
    parallel = OffloadingParallelConfig(1, 2, 2, 1, 1, 1, 0, 1, None, False)
    spec = AsyncKVOffloadingSpec(config(parallel=parallel, replicated_layout=is_replicated))
    assert spec.get_worker(CanonicalKVCaches([], [])) == (1 if is_replicated else 2, rank)
    spec.get_manager().shutdown()


@pytest.mark.parametrize("seed", [None, "", "0"])
@pytest.mark.parametrize("has_files", [True, False])
def test_files_that_the_next_start_will_not_find_are_warned_of(
    has_files: bool, seed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    extra = {"directory": str(tmp_path), "file_bytes": 8 * PAGE} if has_files else {}
    with caplog.at_level("WARNING", "vllm.asynckv"):
        manager = OffloadingSpecFactory.create_spec(config(extra)).get_manager()
    manager.shutdown()
    said = [text for text in caplog.messages if "set PYTHONHASHSEED" in text]
    assert len(said) == (has_files and not seed), caplog.messages


@pytest.mark.parametrize("window", [1, None])
def test_a_budget_that_may_end_an_engine_is_warned_of(window: int | None, caplog: pytest.LogCaptureFixture) -> None:
    groups = (OffloadingGroupConfig(16, ("layer",), 0, window),)
    with caplog.at_level("WARNING", "vllm.asynckv"):
        OffloadingSpecFactory.create_spec(config({"sync_load_budget_bytes": 1}, groups=groups)).get_manager()
    said = [record.message for record in caplog.records if record.name == "vllm.asynckv"]
    assert len(said) == (window == 1), said


@pytest.mark.parametrize(("is_within_step", "taken"), [(True, 7), (False, 5)])
def test_vllm_reserves_a_block_too_few_for_a_load_of_a_state_within_a_step(is_within_step: bool, taken: int) -> None:
    """What the warning says, in vLLM's block manager alone: when this fails, the warning may go."""
    size, init = 32, {"block_size": 32, "dtype": torch.float32}
    groups = [
        KVCacheGroupSpec(["attention"], FullAttentionSpec(num_kv_heads=1, head_size=1, **init)),
        KVCacheGroupSpec(["state"], MambaSpec(size, ((1, 1),), (torch.float32,), mamba_cache_mode="align")),
    ]
    init_none_hash(sha256)
    outcomes = []
    for free in (taken - 2, taken - 1, taken):
        blocks = KVCacheManager(
            KVCacheConfig(free + 1, [], groups), max_model_len=1024, scheduler_block_size=size, hash_block_size=size
        )
        sampling = SamplingParams(max_tokens=1)
        hasher = get_request_block_hasher(size, sha256)
        request = Request("r", [*range(4 * size + 8)], sampling, None, block_hasher=hasher)
        try:
            found = blocks.allocate_slots(
                request,
                8 if is_within_step else 0,
                num_external_computed_tokens=4 * size,
                delay_cache_blocks=not is_within_step,
            )
        except ValueError as exc:
            outcomes.append(str(exc))
        else:
            outcomes.append("" if found is None else f"{free - blocks.block_pool.get_num_free_blocks()}")
    assert outcomes == ["", "Cannot get 1 free blocks from the pool" if is_within_step else "", f"{taken}"]


# -- the worker ------------------------------------------------------------------------------------


class Copies:
    """A copy plane of which a test says how everything ends; it copies nothing."""

    def __init__(self, ending: Ending | None) -> None:
        self.ending, self.news = ending, list[TransferEnded]()
        self.on_ready: Callable[[], None] = lambda: None

    def start(self, near: Sequence[Memory], far: Mapping[str, Sequence[Memory]], on_ready: Callable[[], None]) -> None:
        self.on_ready = on_ready

    def post(self, move_id: TransferId, op: CopyOp, far: str, pieces: Iterator[ReadRequest]) -> None:
        if self.ending is not None:
            self.news.append(TransferEnded(move_id, self.ending, "as the test says"))
            asyncio.get_running_loop().call_soon(self.on_ready)

    def poll(self) -> list[TransferEnded]:
        news, self.news = self.news, []
        return news

    async def quiesce(self) -> None: ...

    def close(self) -> None:
        if self.ending is None:
            raise BackendError("a copy does not end")


def made(copies: Any, blocks: int = 8) -> tuple[Worker, list[torch.Tensor], Region]:
    tensors = [torch.zeros((blocks, 1000), dtype=torch.int8) for _ in range(3)]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(each, 1000) for each in tensors],
        [[CanonicalKVCacheRef(0, 1000), CanonicalKVCacheRef(1, 900)], [CanonicalKVCacheRef(2, 1000)]],
    )
    shape = Shape(PAGE, 2, 2, 16)
    name = uuid.uuid4().hex
    region = Region(name, shape)
    return Worker(shape, 1, name, caches, region, 1 << 20, copies), tensors, region


def ended(worker: Worker, count: int) -> list[Any]:
    deadline, found = time.monotonic() + WITHIN_S, list[Any]()
    while len(found) < count:
        found += worker.get_finished()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return found


def test_blocks_come_back_byte_for_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Region, "pin", lambda *_: pytest.fail("no device is there to pin memory for"))
    worker, tensors, region = made(None)
    before = [each.random_().clone() for each in tensors]
    # Blocks 5, 2, 7 of the first group are the second half of slot 3 and slot 9; block 1 of the other is half of 4.
    device = GPULoadStoreSpec([5, 2, 7, 1], group_sizes=(3, 1), block_indices=(1, 0))
    assert worker.submit_store(1, device, CPULoadStoreSpec([3, 9, 4]))
    worker.wait({1})
    (result,) = ended(worker, 1)
    assert (result.job_id, result.success, result.transfer_size) == (1, True, 3 * 1900 + 1000)
    written: Any = region.array.reshape(-1, 2, 2, PAGE).any(axis=3)
    assert not written[:, 0].any(), "another rank's part was written"
    assert np.argwhere(written[:, 1]).tolist() == [[3, 1], [4, 0], [9, 0], [9, 1]]
    for each in tensors:
        each.zero_()
    assert worker.submit_load(2, CPULoadStoreSpec([3, 9, 4]), device)
    worker.wait({2})
    ended(worker, 1)
    for index, blocks, size in ((0, [5, 2, 7], 1000), (1, [5, 2, 7], 900), (2, [1], 1000)):
        expected = torch.zeros_like(before[index])
        expected[blocks, :size] = before[index][blocks, :size]
        assert torch.equal(tensors[index], expected), index
    worker.shutdown()
    worker.shutdown()


def test_bytes_that_nobody_can_copy_end_the_rank() -> None:
    worker, _, _ = made(Copies(Ending.FAILED))
    worker.submit_store(1, GPULoadStoreSpec([5, 2], (2, 0), (0, 0)), CPULoadStoreSpec([3]))
    for ask in (lambda: worker.wait({1}), worker.get_finished):
        with pytest.raises(BackendError, match=r"job 1, a .*: as the test says.*has no failed jobs, so this rank ends"):
            ask()
    worker.shutdown()


def test_waiting_and_shutting_down_are_bounded_when_a_copy_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "WAIT_S", 0.1)
    copies = Copies(None)
    worker, _, region = made(copies)
    worker.submit_load(1, CPULoadStoreSpec([3]), GPULoadStoreSpec([5, 2], (2, 0), (0, 0)))
    with pytest.raises(BackendError, match=r"jobs \[1\] do not end: 0 stores and 1 loads, of 3800 bytes"):
        worker.wait({1})
    worker.shutdown()
    assert len(region.array), "memory that may still be written was given back"
    region.close()


class Clock:
    """What the worker takes for the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(workers, "time", self)

    def monotonic(self) -> float:
        return self.now


def loading(worker: Worker, job_id: int) -> None:
    worker.submit_load(job_id, CPULoadStoreSpec([3]), GPULoadStoreSpec([5, 2], (2, 0), (0, 0)))


def storing(worker: Worker, job_id: int) -> None:
    worker.submit_store(job_id, GPULoadStoreSpec([4], (0, 1), (0, 0)), CPULoadStoreSpec([4]))


def test_a_copy_that_does_not_end_ends_the_rank_and_gives_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    worker, _, region = made(Copies(None))
    loading(worker, 1)
    storing(worker, 2)
    clock.now += workers.WAIT_S
    assert worker.get_finished() == []
    clock.now += 30
    assert worker.get_finished() == [], "the process may have been stopped itself"
    clock.now += workers.GRACE_S
    with pytest.raises(BackendError, match=r"jobs \[1, 2\] do not end: 1 stores and 1 loads, of 4800 bytes, .* 91 s"):
        worker.get_finished()
    worker.shutdown()
    assert len(region.array), "memory that may still be written was given back"
    region.close()


class StuckStores(Copies):
    """Loads end, and of stores nothing is heard, or that they are in doubt."""

    def post(self, move_id: TransferId, op: CopyOp, far: str, pieces: Iterator[ReadRequest]) -> None:
        was, self.ending = self.ending, Ending.DONE if op is CopyOp.READ else self.ending
        super().post(move_id, op, far, pieces)
        self.ending = was


@pytest.mark.parametrize("ending", [None, Ending.IN_DOUBT])
def test_a_job_that_waits_while_others_end_is_not_late_unless_it_is_in_doubt(
    ending: Ending | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    worker, _, _ = made(StuckStores(ending))
    storing(worker, 1)
    for job_id in range(2, 6):
        loading(worker, job_id)
        worker.wait({job_id})
        assert [each.job_id for each in worker.get_finished()] == [job_id]
        if ending is not None and clock.now > 1000 + workers.WAIT_S:
            break
        clock.now += 40
    else:
        clock.now += workers.WAIT_S
        assert worker.get_finished() == []
    clock.now += workers.GRACE_S
    with pytest.raises(BackendError, match=r"jobs \[1\] do not end: 1 stores and 0 loads"):
        worker.get_finished()
    worker.shutdown()


def test_what_cannot_be_handed_over_ends_the_rank() -> None:
    class Refuses(Copies):
        def post(self, *_: Any) -> None:
            raise RuntimeError("the tables do not fit")

    worker, _, _ = made(Refuses(Ending.DONE))
    worker.submit_store(1, GPULoadStoreSpec([5, 2], (2, 0), (0, 0)), CPULoadStoreSpec([3]))
    with pytest.raises(BackendError, match="the tables do not fit"):
        worker.wait({1})
    worker.shutdown()


class Passing:
    """An event of a GPU, which is passed when a test says so."""

    def __init__(self) -> None:
        self.is_passed, self.synchronize = threading.Event(), lambda: self.is_passed.wait(WITHIN_S)

    def query(self) -> bool:
        return self.is_passed.is_set()


def test_a_copy_waits_until_its_device_has_come_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _, _ = made(Copies(Ending.DONE))
    event, post = Passing(), worker._post

    async def turn() -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(worker, "_post", lambda job_id, op, plan, _: post(job_id, op, plan, event))
    storing(worker, 1)
    worker._thread.call(turn, timeout_s=WITHIN_S)
    assert worker.get_finished() == []
    monkeypatch.setattr(worker, "_post", post)
    event.is_passed.set()
    worker.wait({1})
    assert [each.job_id for each in ended(worker, 1)] == [1]
    worker.shutdown()


def test_memory_is_given_back_once_no_copy_can_write_it_and_what_cannot_be_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Ordered(Copies):
        is_quiet = False

        async def quiesce(self) -> None:
            self.is_quiet = True

        def close(self) -> None:
            if not self.is_quiet:
                raise BackendError("copies still go on")

    worker, _, region = made(Ordered(Ending.DONE))
    worker.shutdown()
    assert len(region.array) == 0
    assert "host memory is kept" not in caplog.text
    worker, _, region = made(Copies(None))
    with caplog.at_level("ERROR", "vllm.asynckv"):
        worker.shutdown()
    assert "so the host memory is kept: a copy does not end" in caplog.text
    assert len(region.array) > 0
    region.close()


def test_a_region_asks_for_large_pages() -> None:
    region = Region(uuid.uuid4().hex, Shape(PAGE, 2, 2, 16))
    maps = Path("/proc/self/smaps").read_text().split("VmFlags:")
    [flags] = [after for before, after in itertools.pairwise(maps) if f"{region.memory.base:x}-" in before]
    assert "hg" in flags.partition("\n")[0].split()
    region.path.unlink()
    region.close()


def test_what_engines_left_is_removed_and_nothing_that_a_link_leads_to_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "FOLDER", tmp_path)
    left, link, other = regions.path_of("left"), regions.path_of("link"), tmp_path / "other"
    left.touch()
    other.touch()
    link.symlink_to(other)
    regions.sweep()
    assert not left.exists()
    assert link.is_symlink()
    assert other.exists()


def test_a_job_whose_slots_do_not_match_its_blocks_is_refused() -> None:
    worker, _, _ = made(Copies(Ending.DONE))
    with pytest.raises(BackendError, match="has 3 blocks and 1 slots, but its groups take 3 and 2"):
        worker.submit_store(1, GPULoadStoreSpec([5, 2, 7], (3, 0), (1, 0)), CPULoadStoreSpec([3]))
    worker.shutdown()


def test_host_memory_is_pinned_for_the_device_of_the_caches_and_copies_go_on_where_it_cannot_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def pin(_: Region, device: int) -> None:
        asked.append(device)
        raise BackendError("no driver")

    def on_device(caches: CanonicalKVCaches) -> Any:
        layout = device_layout(caches)
        memories = tuple(msgspec.structs.replace(memory, kind="cuda", device=3) for memory in layout.memories)
        return msgspec.structs.replace(layout, memories=memories)

    monkeypatch.setattr(Region, "pin", pin)
    made(Copies(Ending.DONE))[0].shutdown()
    assert not asked
    monkeypatch.setattr(workers, "device_layout", on_device)
    with caplog.at_level("WARNING", "vllm.asynckv"):
        made(Copies(Ending.DONE))[0].shutdown()
    assert asked == [3]
    assert "host memory cannot be pinned (no driver)" in caplog.text


# -- the manager -----------------------------------------------------------------------------------


def a_manager(
    slots: int = 8, *, given: Any = None, records: Any = None, clock: Any = time.monotonic, **fields: Any
) -> Manager:
    """A manager of one rank's slots, with these options."""
    given, shape = given or config(), Shape(PAGE, 1, 1, slots)
    options: dict[str, Any] = {"model": "m", "hash_tokens": 16, "host_bytes": 1} | fields
    offload = OffloadConfig(**options)
    return Manager(given, offload, shape, stored(given, offload, shape), records, clock=clock)


def key(number: int) -> Any:
    return make_offload_key(f"block{number}".encode(), 0)


class Records:
    """A record plane whose moves end when a test says so."""

    def __init__(self) -> None:
        self.posted: list[tuple[TransferId, CopyOp, Sequence[Record]]] = []
        self.news: list[Any] = []
        self.changed = threading.Condition()
        self.on_ready: Callable[[], None] = lambda: None
        self.loop: asyncio.AbstractEventLoop | None = None

    def start(self, memory: Memory, on_ready: Callable[[], None]) -> list[Any]:
        self.on_ready, self.loop = on_ready, asyncio.get_running_loop()
        return []

    def post(self, move_id: TransferId, op: CopyOp, records: Sequence[Record]) -> None:
        with self.changed:
            self.posted.append((move_id, op, records))
            self.changed.notify_all()

    def forget(self, places: Any) -> None: ...

    def statistics(self) -> dict[str, int]:
        return {}

    def poll(self) -> list[Any]:
        news, self.news = self.news, []
        return news

    async def quiesce(self) -> None: ...

    def close(self) -> None: ...

    def take(self) -> tuple[TransferId, CopyOp, Sequence[Record]]:
        with self.changed:
            assert self.changed.wait_for(lambda: bool(self.posted), WITHIN_S)
            return self.posted.pop(0)

    def tell(self, *news: Any) -> None:
        assert self.loop is not None

        async def tell() -> None:
            self.news += news
            self.on_ready()

        asyncio.run_coroutine_threadsafe(tell(), self.loop).result(WITHIN_S)


class Kept:
    """A manager with files, and the blocks of a prompt in them alone."""

    def __init__(self, slots: int = 8, blocks: int = 8, is_joined: bool = True) -> None:
        self.records = Records()
        given = config()
        self.region = Region(given.engine_id, Shape(PAGE, 1, 1, slots))
        if is_joined:
            self.region.join(0)
        self.manager = a_manager(slots, given=given, records=self.records, directory="/x", file_bytes=64 * PAGE)
        self.keys = [key(i) for i in range(blocks)]
        for each in self.keys:
            context = ReqContext("first")
            self.manager.prepare_store([each], context)
            self.manager.complete_store([each], context)
            move_id, op, _ = self.records.take()
            assert op is CopyOp.WRITE
            self.records.tell(RecordsEnded(move_id, Ending.DONE))
            self.manager.on_request_finished(context)
        for entry in entries_of(self.manager.catalogue.host):
            self.manager.catalogue.host.drop(entry)
        assert len(list(self.manager.take_events())) >= blocks

    def lookup(self, context: ReqContext) -> list[LookupResult]:
        with self.manager.lock:
            return [self.manager.lookup(each, context) for each in self.keys]

    def end_step(self) -> None:
        with self.manager.lock:
            self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def fetch(self, context: ReqContext) -> TransferId:
        """Have the blocks brought; return the move."""
        self.lookup(context)
        self.end_step()
        return self.records.take()[0]

    def close(self) -> None:
        with self.manager.lock:
            assert audit(self.manager.catalogue) == []
            assert not self.manager.catalogue.pins
        self.manager.shutdown()
        self.manager.shutdown()
        self.region.close()


@pytest.fixture
def kept() -> Iterator[Kept]:
    found = Kept()
    yield found
    found.close()


def test_a_block_in_files_is_brought_while_vllm_asks_again(kept: Kept) -> None:
    context = ReqContext("r")
    assert kept.lookup(context) == [LookupResult.HIT_PENDING] * 8
    kept.end_step()
    move_id, op, records = kept.records.take()
    assert (op, len(records)) == (CopyOp.READ, 8)
    assert kept.lookup(context) == [LookupResult.HIT_PENDING] * 8
    kept.records.tell(RecordsEnded(move_id, Ending.DONE))
    assert kept.lookup(context) == [LookupResult.HIT] * 8
    assert kept.manager.get_load_source(kept.keys[0], context) is CacheHitSource.DISK
    kept.manager.prepare_load(kept.keys, context)
    kept.manager.complete_load(kept.keys, context)
    assert kept.manager.get_load_source(kept.keys[0], ReqContext("s")) is CacheHitSource.HOST


def test_a_request_that_wants_files_alone_finds_in_memory_only_what_was_brought_for_it(kept: Kept) -> None:
    context = ReqContext("r", load_tier_filter=TierFilter((TierMatcher(Medium.STORAGE),)))
    kept.records.tell(RecordsEnded(kept.fetch(context), Ending.DONE))
    assert kept.lookup(context) == [LookupResult.HIT] * 8
    other = ReqContext("s", load_tier_filter=context.load_tier_filter)
    kept.manager.on_new_request(other)
    assert kept.lookup(other) == [LookupResult.MISS] * 8
    kept.manager.on_request_finished(context)
    kept.manager.on_request_finished(other)


def test_what_was_brought_is_kept_until_its_request_begins_without_it(kept: Kept) -> None:
    context = ReqContext("r")
    kept.records.tell(RecordsEnded(kept.fetch(context), Ending.DONE))
    kept.end_step()
    other = [key(i) for i in range(100, 108)]
    assert kept.manager.prepare_store(other, ReqContext("s")) is None
    with kept.manager.lock:
        kept.manager.on_schedule_end(ScheduleEndContext(("r",), ()))
    assert kept.manager.prepare_store(other, ReqContext("s")) is not None
    kept.manager.complete_store(other, ReqContext("s"))


def test_nothing_is_kept_for_a_request_that_ends_before_its_blocks_come(kept: Kept) -> None:
    context = ReqContext("r")
    move_id = kept.fetch(context)
    kept.manager.on_request_finished(context)
    kept.records.tell(RecordsEnded(move_id, Ending.DONE))


def test_what_is_lost_on_the_way_is_a_miss(kept: Kept) -> None:
    context = ReqContext("r")
    move_id = kept.fetch(context)
    kept.records.tell(RecordsEnded(move_id, Ending.FAILED, "spoiled", (3,)))
    found = kept.lookup(context)
    assert [each is LookupResult.HIT for each in found] == [i != 3 for i in range(8)]
    assert found[3] is LookupResult.MISS
    said = kept.manager.counts
    assert (said["fetched_blocks"], said["unfetched_blocks"]) == (7, 1)
    kept.manager.on_request_finished(context)


def test_what_was_in_doubt_and_came_is_counted_as_what_it_is(kept: Kept) -> None:
    context = ReqContext("r")
    move_id = kept.fetch(context)
    kept.records.tell(RecordsEnded(move_id, Ending.IN_DOUBT, "the disk does not answer"))
    assert kept.manager.counts["fetched_blocks"] == 0
    kept.records.tell(RecordsEnded(move_id, Ending.DONE))
    assert kept.manager.counts["fetched_blocks"] == 8
    kept.manager.on_request_finished(context)


@pytest.mark.parametrize("reads", [True, False])
def test_files_that_are_lost_are_misses(kept: Kept, reads: bool) -> None:
    context = ReqContext("r")
    kept.records.tell(RecordsLost("the disk is gone", reads))
    assert kept.lookup(context) == [LookupResult.MISS if reads else LookupResult.HIT_PENDING] * 8
    kept.manager.on_request_finished(context)
    kept.end_step()


def test_files_are_not_used_where_workers_have_another_memory(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(blocks=0, is_joined=False)
    context = ReqContext("r")
    kept.manager.prepare_store([key(1)], context)
    with caplog.at_level("ERROR", "vllm.asynckv"):
        kept.manager.complete_store([key(1)], context)
        (said,) = caplog.messages
        assert said.startswith("only 0 of 1 ranks share host memory")
        # Said once, though each of these would go to the files.
        kept.manager.prepare_store([key(2)], context)
        kept.manager.complete_store([key(2)], context)
        assert not kept.manager._check(), "one that was cut at the same time"
    assert caplog.messages == [said]
    assert not kept.records.posted
    assert kept.manager.catalogue.file is not None
    assert kept.manager.catalogue.file.is_off
    assert kept.manager.lookup(key(1), context) is LookupResult.HIT
    kept.close()


def test_two_requests_do_not_evict_what_the_other_waits_for() -> None:
    kept = Kept(slots=8, blocks=16)
    one, other = ReqContext("one"), ReqContext("other")
    first, last = kept.keys[:8], kept.keys[8:]
    for keys, context in ((first, one), (last, other)):
        with kept.manager.lock:
            assert all(kept.manager.lookup(each, context) is LookupResult.HIT_PENDING for each in keys)
    kept.end_step()
    move_id, _, _ = kept.records.take()
    kept.records.tell(RecordsEnded(move_id, Ending.DONE))
    with kept.manager.lock:
        assert all(kept.manager.lookup(each, one) is LookupResult.HIT for each in first)
        assert all(kept.manager.lookup(each, other) is LookupResult.MISS for each in last)
    kept.manager.prepare_load(first, one)
    kept.manager.complete_load(first, one)
    kept.manager.on_request_finished(other)
    kept.close()


def test_slots_that_workers_may_still_write_are_not_given_away_after_a_reset() -> None:
    manager = a_manager()
    context = ReqContext("r")
    first = [key(i) for i in range(8)]
    assert manager.prepare_store(first, context) is not None
    manager.reset_cache()
    assert manager.lookup(first[0], context) is LookupResult.MISS
    assert manager.prepare_store([key(9)], context) is None
    manager.on_reset_flushed()
    assert [manager.lookup(each, context) for each in first] == [LookupResult.MISS] * 8
    assert manager.prepare_store([key(9)], context) is not None
    manager.complete_store([key(9)], context)
    assert audit(manager.catalogue) == []


@pytest.mark.parametrize(("is_over", "is_known", "lost"), [(False, True, 7), (True, True, 8), (True, False, 8)])
def test_lru_gives_up_the_end_of_a_prompt_that_was_stored_step_by_step(
    is_over: bool, is_known: bool, lost: int
) -> None:
    """The order is made anew when an eighth of the prompt is new, so the ninth block is taken in at the end alone."""
    manager = a_manager(9, policy="lru")
    context = ReqContext("r")
    for number in range(9):
        if is_known:
            context.set_offload_key_position(key(number), 16 * (number + 1))
        manager.prepare_store([key(number)], context)
        manager.complete_store([key(number)], context)
    if is_over:
        manager.on_request_finished(context)
    output = manager.prepare_store([key(20)], ReqContext("other"))
    assert output is not None
    assert list(output.evicted_keys) == [key(lost)]


def test_slots_that_workers_may_still_read_are_not_given_away_after_a_reset() -> None:
    manager = a_manager()
    context, first = ReqContext("r"), [key(i) for i in range(8)]
    manager.prepare_store(first, context)
    manager.complete_store(first, context)
    manager.prepare_load(first, context)
    manager.reset_cache()
    assert manager.prepare_store([key(9)], context) is None
    manager.on_reset_flushed()
    assert manager.prepare_store([key(9)], context) is not None


def test_blocks_whose_copy_failed_are_not_stored() -> None:
    manager = a_manager()
    context = ReqContext("r")
    manager.prepare_store([key(1)], context)
    manager.complete_store([key(1)], context, success=False)
    assert manager.lookup(key(1), context) is LookupResult.MISS
    assert manager.counts["stored_blocks"] == 0
    assert audit(manager.catalogue) == []


def test_who_keeps_all_slots_is_said_once_and_not_in_every_step(caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    manager = a_manager(clock=lambda: now[0])
    context = ReqContext("r")
    first, more = [key(i) for i in range(8)], [key(9)]
    manager.prepare_store(first, context)
    with caplog.at_level("WARNING", "vllm.asynckv"):
        assert manager.prepare_store(more, context) is None
        assert manager.prepare_store(more, context) is None
        (said,) = caplog.messages
        now[0] += 61.0
        assert manager.prepare_store(more, context) is None
        assert caplog.messages == [said, said]
    assert "of 8 slots workers write 8 and read 0, 0 are being written to files" in said
    assert manager.counts["refused_blocks"] == 3
    manager.complete_store(first, context)
    assert manager.prepare_store(more, context) is not None


class AtOnce(SimRecords):
    """Writes before `post` returns; so a place that is forgotten too late has lost its new block."""

    def post(self, move_id: TransferId, op: CopyOp, records: Sequence[Record]) -> None:
        super().post(move_id, op, records)
        self.finish(move_id)


class Filed:
    """A manager with files, whose blocks hold what their keys say."""

    def __init__(self, folder: Path, disk: SimDisk | None, model: str = "m", **fields: Any) -> None:
        given = config(**fields)
        self.region = Region(given.engine_id, Shape(PAGE, 1, 1, 8))
        self.region.join(0)
        records = None if disk is None else AtOnce(disk)
        options: dict[str, Any] = {"directory": str(folder), "file_bytes": 8 * PAGE, "policy": "lru"}
        self.manager = a_manager(given=given, records=records, model=model, **options)
        self.slots = self.region.array.reshape(8, PAGE)

    def until_written(self) -> dict[str, int]:
        deadline = time.monotonic() + WITHIN_S
        while True:
            with self.manager.lock:
                said = self.manager.catalogue.statistics() | self.manager.counts
            if not said["moves"] and not said["to_write_back"]:
                return said
            assert time.monotonic() < deadline, said
            time.sleep(0.001)

    def store(self, numbers: Sequence[int], name: str) -> None:
        keys, context = [key(number) for number in numbers], ReqContext(name)
        with self.manager.lock:
            output = self.manager.prepare_store(keys, context)
            assert output is not None
            assert list(output.keys_to_store) == keys
            self.slots[output.store_spec.block_ids] = np.array(numbers)[:, None]
            self.manager.complete_store(keys, context)
            self.manager.on_request_finished(context)

    def load(self, number: int) -> bytes | None:
        """Bring a block from wherever it is; None if it is not to be had."""
        context, deadline = ReqContext(f"load{number}"), time.monotonic() + WITHIN_S
        while True:
            with self.manager.lock:
                found = self.manager.lookup(key(number), context)
                self.manager.on_schedule_end(ScheduleEndContext((), ()))
            if found is not LookupResult.HIT_PENDING:
                break
            assert time.monotonic() < deadline
            time.sleep(0.001)
        if found is LookupResult.MISS:
            return None
        with self.manager.lock:
            (slot,) = self.manager.prepare_load([key(number)], context).block_ids
            data: bytes = self.slots[slot].tobytes()
            self.manager.complete_load([key(number)], context)
            self.manager.on_request_finished(context)
        return data

    def close(self) -> None:
        with self.manager.lock:
            assert audit(self.manager.catalogue) == []
        self.manager.shutdown()
        self.region.close()


@pytest.mark.parametrize("is_real", [True, False], ids=["files", "simulated"])
def test_a_place_in_the_files_that_changes_hands_keeps_its_new_block(tmp_path: Path, is_real: bool) -> None:
    disk = None if is_real else SimDisk(8 * PAGE)
    kept = Filed(tmp_path, disk)
    for i in range(12):
        kept.store(range(3 * i, 3 * i + 3), f"r{i}")
        said = kept.until_written()
    assert (said["file_evicted"], said["file_blocks"]) == (28, 8)
    kept.close()
    assert (sum(look(each).blocks for each in tmp_path.iterdir()) if disk is None else len(disk.records)) == 8
    again = Filed(tmp_path, disk)
    found = {number: data for number in range(36) if (data := again.load(number)) is not None}
    assert len(found) == 8
    assert set(range(30, 36)) < set(found)
    assert all(data == bytes([number]) * PAGE for number, data in found.items())
    again.close()


def test_another_model_beside_is_told_of_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Filed(tmp_path, None)
    first.store(range(3), "r")
    first.until_written()
    first.close()
    with caplog.at_level("INFO", "vllm.asynckv"):
        # As large, but more blocks: it would write over all that is there.
        other = Filed(tmp_path, None, model="another")
    said = [record.message for record in caplog.records if record.name == "vllm.asynckv"]
    assert f"{8 * PAGE} bytes are taken from the disk" in said[0]
    assert f"{tmp_path} has files of another model" in said[1]
    assert f"prune {tmp_path}/NAME --all" in said[1]
    found = re.fullmatch(rf"0 blocks were found in {tmp_path}/\S+, within (\d+\.\d) s", said[2])
    assert found, said[2]
    assert float(found[1]) < WITHIN_S, "a start that took longer than the test"
    other.store(range(8), "r")
    other.until_written()
    other.close()
    ranks = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 1, 2, None, False)
    Filed(tmp_path, None, parallel=ranks).close()
    assert sorted(look(each).blocks for each in tmp_path.iterdir()) == [0, 3, 8]
    caplog.clear()
    again = Filed(tmp_path, None)
    assert [again.load(number) for number in range(4)] == [bytes([number]) * PAGE for number in range(3)] + [None]
    again.close()


def test_files_that_do_not_open_are_an_error_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()

    class Hangs(Records):
        def start(self, memory: Memory, on_ready: Callable[[], None]) -> list[Any]:
            hangs.wait(WITHIN_S)
            return []

    monkeypatch.setattr(files, "START_S", 0.05)
    with pytest.raises(BackendError, match=r"not open after 0.05 s: the disk hangs"):
        a_manager(records=Hangs(), directory="/x", file_bytes=8 * PAGE)
    hangs.set()


def used(policy: str, num_blocks: int) -> tuple[Manager, list[int], Callable[[int], None], ReqContext]:
    """A manager, the order in which its policy is told of the blocks of a prompt, and how to store them one by one."""
    manager = a_manager(num_blocks, policy=policy)
    numbers = {manager._find(key(i))[1]: i for i in range(num_blocks)}
    told: list[int] = []
    use = manager.catalogue.host.use

    def note(entries: Iterator[Any]) -> None:
        found = list(entries)
        told.extend(numbers[entry.hash] for entry in found)
        use(found)

    manager.catalogue.host.use = note  # type: ignore[method-assign, assignment]
    context = ReqContext("r")

    def store(number: int) -> None:
        context.set_offload_key_position(key(number), 16 * (number + 1))
        manager.prepare_store([key(number)], context)
        told.clear()
        manager.complete_store([key(number)], context)

    return manager, told, store, context


def test_lru_hears_of_a_whole_prompt_its_end_first_when_an_eighth_of_it_is_new() -> None:
    _, told, store, _ = used("lru", 25)
    heard = []
    for number in range(25):
        store(number)
        if told:
            assert told == [*range(number, -1, -1)]
            heard.append(number + 1)
    # Each time at eight times as much as is new: one block up to 8, two up to 16, three up to 24.
    assert heard == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 19, 22]


@pytest.mark.parametrize("num_blocks", [8, 9])
def test_lru_hears_of_a_prompt_at_its_end_if_anything_is_new(num_blocks: int) -> None:
    manager, told, store, context = used("lru", num_blocks)
    for number in range(num_blocks):
        store(number)
    is_new = num_blocks == 9
    assert told == ([] if is_new else [*range(7, -1, -1)])
    told.clear()
    manager.on_request_finished(context)
    assert told == ([*range(8, -1, -1)] if is_new else [])


def test_lru_hears_of_blocks_by_their_places_however_they_were_stored() -> None:
    _, told, store, _ = used("lru", 3)
    for number in (2, 0, 1):
        store(number)
    assert told == [2, 1, 0]


def test_a_policy_that_counts_uses_hears_of_each_once() -> None:
    manager, told, store, context = used("s3-fifo", 9)
    for number in range(9):
        store(number)
        assert told == []
    manager.on_request_finished(context)
    assert told == []


def test_a_key_that_a_report_names_twice_ends_one_move() -> None:
    moves = OpenMoves()
    first, second = (Move(n, MoveKind.LOAD, "", (Piece(0, (key(1),), (0,), (n,), ()),), PAGE) for n in range(2))
    for move in (first, second):
        moves.open(move, [key(1)])
    assert moves.completed([key(1), key(1)]) == [first]
    assert moves.completed([key(1)]) == [second]


def test_a_key_that_is_there_twice_does_no_harm() -> None:
    manager = a_manager()
    context, twice = ReqContext("r"), [key(1), key(2), key(1)]
    output = manager.prepare_store(twice, context)
    assert output is not None
    assert output.keys_to_store == twice[:2]
    manager.complete_store(output.keys_to_store, context)
    manager.touch(twice, context)
    slots = manager.prepare_load(twice, context).block_ids
    assert slots[0] == slots[2] != slots[1]
    manager.complete_load(twice, context)
    assert manager.counts["loaded_blocks"] == 2
    assert audit(manager.catalogue) == []
    assert not manager.catalogue.traffic.running
