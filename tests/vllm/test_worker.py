"""The worker's half: orders in, every request told once, whatever becomes of it. Real engines, real NIXL."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.worker.utils import allocate_kv_cache

from asynckv import EngineThread, PrefillRanks
from asynckv.edges.survivor.process import ServingPlane
from asynckv.embed import Announce, Cancel, Failed, Finished, Follow, Lend, Offer, Pull, WithdrawTicket
from asynckv.embed.orders import EndPieces, LendPiece, StartEarly
from asynckv.errors import (
    BlocksRetired,
    ConfigError,
    EngineClosed,
    LocalProtocolError,
    NoOffer,
    PeerUnreachable,
    ReadFailed,
)
from asynckv.geometry.pairing import Padding
from asynckv.integrations.vllm.connector import AsyncKVConnector
from asynckv.integrations.vllm.handover import FollowReports, StepOrders, WorkerAddress
from asynckv.integrations.vllm.options import Options
from asynckv.integrations.vllm.worker import WorkerHalf, unpinned
from asynckv.results import LeaseEnd, PullResult
from asynckv.told import PromptsCounted
from tests.vllm.keeps import Attention, Recurrent, mamba2
from tests.vllm.planned import plan, vllm_config
from tests.ways import Stuck

LAYERS: Mapping[str, Attention | Recurrent] = {f"model.layers.{i}.self_attn.attn": Attention() for i in range(2)}
NUM_BLOCKS = 80
WITHIN_S = 30.0


class Worker:
    """A worker half with its memory, and what it has told."""

    def __init__(self, half: WorkerHalf, tensors: dict[str, torch.Tensor]) -> None:
        self.half, self.tensors = half, tensors
        self.sent: list[str] = []
        self.received: list[str] = []
        self.failed: list[str] = []
        self.offered: list[Offer] = []
        self.not_offered: list[Failed] = []
        self.followed: list[str] = []

    @property
    def thread(self) -> EngineThread:
        assert self.half._thread is not None
        return self.half._thread

    @property
    def counters(self) -> Mapping[str, int]:
        return self.thread.statistics(0.0).counters

    @property
    def address(self) -> WorkerAddress:
        address = self.half.address()
        assert address is not None
        return address

    def params(self, request_id: str, blocks: list[int], **more: Any) -> dict[str, Any]:
        """What the scheduler's half would make, were this the only rank."""
        endpoints, epoch = [self.address.endpoint], self.address.memory_epoch
        group = PrefillRanks("prefill", endpoints, memory_epoch=epoch, null_block=0)
        return group.make_params(request_id, [(0, blocks)], num_tokens=16 * len(blocks), written=True, **more)

    def lend(self, request_id: str, blocks: list[int]) -> dict[str, Any]:
        params = self.params(request_id, blocks)
        self.step(Lend(params))
        return params

    def load(self, groups: list[tuple[int, list[int]]], params: dict[str, Any], **more: Any) -> None:
        """Load what one request has, all of it."""
        self.step(Pull(request_id="d", groups=groups, params=params, **more))
        self.until(lambda: self.received == ["d"])
        assert not self.failed

    def step(self, *orders: Any) -> None:
        """As vLLM does it: orders, then results."""
        self.half.start_load(StepOrders(orders))
        self.look()

    def look(self) -> None:
        results = self.half.take_results()
        assert results.failed_recving <= results.finished_recving
        self.sent += results.finished_sending
        self.received += results.finished_recving
        self.failed += results.failed_recving
        if (reports := self.half.take_reports()) is not None:
            self.offered += reports.offered
            self.not_offered += reports.not_offered
            self.followed += reports.followed

    def until(self, is_so: Callable[[], bool]) -> None:
        """Make empty steps until something is so, and a few more: nothing may be told twice."""
        deadline = time.monotonic() + WITHIN_S
        while not is_so():
            assert time.monotonic() < deadline, (self.sent, self.received, self.failed)
            if self.half._thread is not None:
                self.half._thread.wait(0.1)
            self.look()


class Side:
    """All ranks of an engine."""

    def __init__(
        self,
        name: str,
        folder: Path,
        stack: ExitStack,
        options: Options,
        stages: Sequence[Sequence[str]],
        layers: Mapping[str, Attention | Recurrent],
    ) -> None:
        self.name, self.pp = name, len(stages)
        modes = [layer.mode for layer in layers.values() if isinstance(layer, Recurrent)]
        block_size = max(layer.block_size for layer in layers.values() if isinstance(layer, Attention))
        config = vllm_config(
            folder,
            pp=len(stages),
            num_blocks=NUM_BLOCKS,
            engine_id=name,
            block_size=block_size,
            mamba_mode=modes[0] if modes else None,
        )
        planned = plan(config, [{n: layers[n].spec(1) for n in stage} for stage in stages])
        self.workers = []
        for rank, one in enumerate(planned):
            own = copy.copy(config)
            own.parallel_config = copy.copy(config.parallel_config)
            own.parallel_config.rank = rank
            worker = Worker(WorkerHalf(options, own, one.config), one.tensors)
            stack.callback(worker.half.shutdown)
            assert worker.half.address() is None
            worker.half.register_kv_caches(one.tensors)
            self.workers.append(worker)

    @property
    def worker(self) -> Worker:
        (worker,) = self.workers
        return worker

    def params(self, request_id: str, blocks: list[int]) -> dict[str, Any]:
        """What the scheduler's half would make."""
        addresses = [worker.address for worker in self.workers]
        group = PrefillRanks(
            self.name,
            [address.endpoint for address in addresses],
            memory_epoch=max(address.memory_epoch for address in addresses),
            pp_size=self.pp,
            null_block=0,
        )
        return group.make_params(request_id, [(0, blocks)], num_tokens=16 * len(blocks), written=True)


Make = Callable[..., Side]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def made(
            name: str,
            *,
            options: Options | None = None,
            stages: Sequence[Sequence[str]] = (),
            layers: Mapping[str, Attention | Recurrent] = LAYERS,
        ) -> Side:
            return Side(name, tmp_path / "model", stack, options or Options(), stages or [list(layers)], layers)

        yield made


def test_a_request_is_told_once_on_both_sides(make: Make) -> None:
    prefill, decode = make("prefill").worker, make("decode").worker
    for tensor in prefill.tensors.values():
        tensor.copy_(torch.randn(tensor.shape))
    params = {f"p{i}": prefill.params(f"p{i}", [7 * i + 1, 7 * i + 3]) for i in range(5)}
    prefill.step(*(Lend(p) for p in params.values()))
    decode.step(*(Announce(f"d{i}", p) for i, p in enumerate(params.values())))
    pulls = [
        Pull(request_id=f"d{i}", groups=[(0, [5 * i + 2, 5 * i + 1])], params=p) for i, p in enumerate(params.values())
    ]
    decode.step(*pulls)
    decode.until(lambda: len(decode.received) == 5)
    prefill.until(lambda: len(prefill.sent) == 5)
    assert sorted(decode.received) == [f"d{i}" for i in range(5)]
    assert sorted(prefill.sent) == [f"p{i}" for i in range(5)]
    assert not decode.failed
    for name, tensor in decode.tensors.items():
        for i in range(5):
            assert torch.equal(tensor[[5 * i + 2, 5 * i + 1]], prefill.tensors[name][[7 * i + 1, 7 * i + 3]])


def test_loads_that_are_given_up_are_told_once_as_failed(make: Make) -> None:
    worker = make("decode").worker
    worker.half.start_load(StepOrders([], ["a", "b"]))
    results = worker.half.take_results()
    assert results.finished_recving == results.failed_recving == {"a", "b"}
    assert not worker.half.take_results().finished_recving


def test_stages_of_a_pipeline_tell_each_for_itself(make: Make) -> None:
    names = list(LAYERS)
    prefill, decode = make("prefill"), make("decode", stages=[names[:1], names[1:]])
    params = prefill.params("p", [3, 4])
    for tensor in prefill.worker.tensors.values():
        tensor.copy_(torch.randn(tensor.shape))
    prefill.worker.step(Lend(params))
    for worker, name in zip(decode.workers, names, strict=True):
        worker.step(Announce("d", params), Pull(request_id="d", groups=[(0, [6, 5])], params=params))
        worker.until(lambda worker=worker: worker.received == ["d"])  # type: ignore[misc]
        assert torch.equal(worker.tensors[name][[6, 5]], prefill.worker.tensors[name][[3, 4]])
    prefill.worker.until(lambda: prefill.worker.sent == ["p"])


@pytest.mark.parametrize("announced", [True, False])
def test_a_load_that_is_refused_before_it_begins_keeps_nothing_lent(make: Make, announced: bool) -> None:
    prefill, decode = make("prefill").worker, make("decode").worker
    params = prefill.lend("p", [1, 2])
    if announced:
        decode.step(Announce("d", params))
        decode.until(lambda: any(rank.granted_s for rank in granted(decode)))
    decode.step(Pull(request_id="d", groups=[(0, [NUM_BLOCKS + 7, 3])], params=params))
    decode.until(lambda: decode.received == ["d"])
    assert decode.failed == ["d"]
    prefill.until(lambda: prefill.sent == ["p"])  # long before the lease or the announcement ends


def test_whoever_waits_for_a_lend_that_was_refused_hears_of_it_at_once(make: Make) -> None:
    prefill, decode = make("prefill").worker, make("decode").worker
    params = prefill.params("p", [3, 3])
    began = time.monotonic()
    decode.step(Pull(request_id="d", groups=[(0, [1, 2])], params=params))
    prefill.step(Lend(params))
    prefill.until(lambda: prefill.sent == ["p"])
    decode.until(lambda: decode.received == ["d"])
    assert decode.failed == ["d"]
    assert time.monotonic() - began < Options().pull.timeout_s / 2


def test_the_first_worker_alone_takes_the_schedulers_counts(make: Make) -> None:
    names = list(LAYERS)
    side = make("decode", stages=[names[:1], names[1:]])
    counts = PromptsCounted(3, 2, {"no_params": 1})
    for worker in side.workers:
        worker.half.start_load(StepOrders((), (), counts))

    def counted(worker: Worker) -> dict[str, int]:
        return {name: n for name, n in worker.counters.items() if name.startswith(("prompts.", "computed_locally."))}

    first, other = side.workers
    expected = {"prompts.with_params": 3, "prompts.without_params": 2, "computed_locally.no_params": 1}
    first.until(lambda: counted(first) == expected)
    assert counted(other) == {}
    first.half.unregister_kv_caches()
    first.half.restore_kv_caches()
    first.thread.statistics(0.0)
    first.until(lambda: counted(first) == expected)  # and they outlive a sleep


def test_counts_that_come_before_the_memory_or_after_the_end_are_dropped(half: WorkerHalf) -> None:
    half.start_load(StepOrders((), (), PromptsCounted(1)))


def test_sleep_and_wake_up_do_nothing_twice(make: Make) -> None:
    prefill, decode = make("prefill").worker, make("decode").worker
    prefill.lend("lost", [1])
    before = prefill.address.memory_epoch
    for _ in range(2):
        prefill.half.unregister_kv_caches()
        assert prefill.half.address() is None
    prefill.until(lambda: prefill.sent == ["lost"])
    for _ in range(2):
        prefill.half.restore_kv_caches()
    assert prefill.address.memory_epoch > before
    decode.load([(0, [1])], prefill.lend("p", [1]))
    prefill.until(lambda: prefill.sent == ["lost", "p"])


def test_memory_that_is_registered_anew_takes_the_place_of_the_old(make: Make) -> None:
    prefill, decode = make("prefill").worker, make("decode").worker
    before = prefill.address.memory_epoch
    prefill.tensors = {n: torch.randn(t.shape).to(t.dtype) for n, t in prefill.tensors.items()}
    prefill.half.register_kv_caches(prefill.tensors)
    assert prefill.address.memory_epoch > before
    decode.load([(0, [5])], prefill.lend("p", [3]))
    for name, tensor in decode.tensors.items():
        assert torch.equal(tensor[5], prefill.tensors[name][3])


def test_what_the_last_block_lacks_is_zeroed_where_vllm_relies_on_it(make: Make) -> None:
    """With recurrent layers vLLM zeroes new blocks, but for those that are loaded."""
    mixers = [f"model.layers.{i}.mixer" for i in range(3)]
    page = 64 * 8 * 64
    layers = {mixers[0]: Attention(block_size=64), **dict.fromkeys(mixers[1:], mamba2(page=page, is_dim_first=False))}
    prefill = make("prefill", layers=layers).worker
    decode = make("decode", layers=layers).worker
    for worker, byte in ((prefill, 3), (decode, 7)):
        for tensor in worker.tensors.values():
            tensor.view(torch.uint8).fill_(byte)
    groups = decode.half._kv_cache_config.kv_cache_groups
    lists = [(0, [9, 10]) if mixers[0] in group.layer_names else (0, [11 + i]) for i, group in enumerate(groups)]
    group = PrefillRanks("prefill", [prefill.address.endpoint], null_block=0)
    params = group.make_params("p", lists, num_tokens=70, written=True)
    prefill.step(Lend(params))
    decode.load(lists, params, num_tokens=70)
    loaded = decode.tensors[mixers[0]].view(torch.uint8)[[9, 10]]
    assert (loaded[0] == 3).all()
    assert (loaded[1, :, :6] == 3).all()
    assert (loaded[1, :, 6:] == 0).all()
    assert (decode.tensors[mixers[0]].view(torch.uint8)[8] == 7).all()


def test_sleep_before_anything_is_registered(tmp_path: Path) -> None:
    config = vllm_config(tmp_path / "model", num_blocks=NUM_BLOCKS)
    (planned,) = plan(config, [{n: x.spec(1) for n, x in LAYERS.items()}])
    half = WorkerHalf(Options(), config, planned.config)
    half.unregister_kv_caches()
    half.restore_kv_caches()
    assert half.take_results() == KVConnectorTransferResults()
    with pytest.raises(LocalProtocolError, match="registered"):
        half.start_load(StepOrders([Cancel("x")]))
    half.start_load(StepOrders())
    half.shutdown()


def test_the_end_takes_a_few_seconds_at_most_with_a_reader_under_way(make: Make) -> None:
    prefill, decode = make("prefill").worker, make("decode").worker
    params = prefill.lend("p", [1])
    decode.step(Announce("d", params))  # claimed and granted, and never pulled
    decode.until(lambda: any(rank.granted_s for rank in granted(decode)))
    began = time.monotonic()
    prefill.half.shutdown()
    prefill.half.shutdown()
    assert time.monotonic() - began < 5.0


def granted(worker: Worker) -> list[Any]:
    async def asked() -> list[Any]:
        return [rank for request in worker.thread.engine.requests() for rank in request.ranks]

    return worker.thread.call(asked(), 5.0)


# -- what is told when --------------------------------------------------------------------------------------


@pytest.fixture
def half(tmp_path: Path) -> WorkerHalf:
    """A half without an engine, to which ends are told."""
    config = vllm_config(tmp_path / "model", num_blocks=NUM_BLOCKS)
    (planned,) = plan(config, [{n: x.spec(1) for n, x in LAYERS.items()}])
    half = WorkerHalf(Options(), config, planned.config)
    half._pulling |= {name: Pull(request_id=name, groups=[], params={}) for name in "ab"}
    half._lent |= {"a"}
    return half


def told(half: WorkerHalf, **news: Any) -> KVConnectorTransferResults:
    results = KVConnectorTransferResults()
    half._tell(Finished(**news), results)
    return results


def counted(half: WorkerHalf, what: str) -> Any:
    half._pulling.clear()
    half._lent.clear()
    stats = half.statistics()
    assert stats is not None
    return stats.data[what]


def test_blocks_that_may_still_be_written_are_told_when_they_are_not(half: WorkerHalf) -> None:
    error = ReadFailed("lost", request_id="a", held={0: (1,)})
    assert told(half, failed=[Failed("a", error)]) == KVConnectorTransferResults()
    assert told(half, returned=["a"]) == KVConnectorTransferResults(finished_recving={"a"}, failed_recving={"a"})
    assert told(half, returned=["a"]) == KVConnectorTransferResults()


def test_held_and_returned_in_one_step(half: WorkerHalf) -> None:
    error = ReadFailed("lost", request_id="a", held={0: (1,)})
    results = told(half, failed=[Failed("a", error), Failed("b", PeerUnreachable("no"))], returned=["a"])
    assert results == KVConnectorTransferResults(finished_recving={"a", "b"}, failed_recving={"a", "b"})
    assert counted(half, "failed") == {"ReadFailed": 1, "PeerUnreachable": 1}


def test_blocks_that_are_given_up_end_the_worker(half: WorkerHalf) -> None:
    with pytest.raises(BlocksRetired, match=r"requests a: .*600 s"):
        told(half, retired=["a"])


def test_a_request_id_may_be_lent_and_pulled_at_once(half: WorkerHalf) -> None:
    result = PullResult("a", "x", 10, 1, 1, 1, {"read": 0.5}, (Padding(0, 1, 3, 13),), 3)
    results = told(half, finished_recving=[result], finished_sending=[LeaseEnd("a", "released", {}, (), 1.0)])
    assert results == KVConnectorTransferResults(finished_recving={"a"}, finished_sending={"a"})
    # vLLM ends when it hears of a request twice.
    again = told(half, finished_recving=[result], finished_sending=[LeaseEnd("a", "released", {}, (), 1.0)])
    assert again == KVConnectorTransferResults()
    assert counted(half, "leases") == {"released": 2}


# -- surroundings -------------------------------------------------------------------------------------------


def test_the_engine_is_not_confined_to_the_core_of_the_thread_that_computes(make: Make) -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.fail("needs two cores to tell")
    os.sched_setaffinity(0, {min(allowed)})
    try:
        half = make("prefill").worker.half
        assert os.sched_getaffinity(0) == {min(allowed)}
        assert half._thread is not None
        assert os.sched_getaffinity(half._thread._thread.native_id or 0) == allowed
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_thread_that_may_go_elsewhere_is_left_alone() -> None:
    allowed = os.sched_getaffinity(0)
    with unpinned():
        assert os.sched_getaffinity(0) == allowed
    assert threading.active_count()


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_each_worker_of_a_host_has_a_port_of_its_own(tmp_path: Path, replica: int, rank: int) -> None:
    config = vllm_config(tmp_path / "model", num_blocks=NUM_BLOCKS, tp=2, pp=2)
    planned = plan(vllm_config(tmp_path / "model", num_blocks=NUM_BLOCKS), [{n: x.spec(1) for n, x in LAYERS.items()}])
    config.parallel_config.rank, config.parallel_config.data_parallel_index = rank, replica
    half = WorkerHalf(Options.parse({"bind": "tcp://127.0.0.1:7000"}), config, planned[0].config)
    assert half._config.bind == f"tcp://127.0.0.1:{7000 + 4 * replica + rank}"


@pytest.mark.parametrize(("tp", "pcp", "dcp"), [(2, 2, 1), (1, 2, 2)])
def test_of_replicas_the_first_alone_has_an_engine(tmp_path: Path, tp: int, pcp: int, dcp: int) -> None:
    config = vllm_config(tmp_path / "model", num_blocks=NUM_BLOCKS, tp=tp)
    layers = {name: Attention(is_mla=True) for name in LAYERS}
    (planned,) = plan(
        vllm_config(tmp_path / "model", num_blocks=NUM_BLOCKS), [{n: x.spec(1) for n, x in layers.items()}]
    )
    parallel = config.parallel_config
    parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size = pcp, dcp
    config.kv_transfer_config.kv_role = "kv_producer"
    places, ports = [], set()
    for parallel.rank in range(tp * pcp):
        half = WorkerHalf(Options.parse({"metrics": {"port": 7000}}), config, planned.config)
        ports.add(half._number)
        half._metrics = None
        half.register_kv_caches(planned.tensors)
        if (address := half.address()) is not None:
            layout = half._thread.engine.registration.layout if half._thread is not None else None
            assert layout is not None
            places.append((address.endpoint["tp_rank"], layout.tp_size, str(layout.shard(0))))
        else:
            follow, gone = Follow("c", {"ticket": TICKET}), WithdrawTicket(TICKET)
            pieces = [LendPiece({}, TICKET), EndPieces(TICKET)]
            lend = Lend({"request_id": "a"}, ticket=TICKET)
            half.start_load(StepOrders([lend, Cancel("b", {}), follow, gone, *pieces]))
            assert half.take_results().finished_sending == {"a"}
            assert half.take_reports() is None  # another worker tells
            assert not half.take_results().finished_sending
        half.shutdown()
    assert ports == set(range(tp * pcp))
    assert places == [(r, 2, "all tokens" if dcp == 1 else f"tokens {r} of 2 by 1") for r in range(2)]


def test_what_is_unsupported_is_refused_in_the_constructor(tmp_path: Path) -> None:
    config = vllm_config(tmp_path / "model", num_blocks=NUM_BLOCKS)
    (planned,) = plan(config, [{n: x.spec(1) for n, x in LAYERS.items()}])
    config.parallel_config.prefill_context_parallel_size = 2
    with pytest.raises(ConfigError, match="--prefill-context-parallel-size 2"):
        WorkerHalf(Options(), config, planned.config)


def test_events_go_where_the_lines_of_vllm_go(half: WorkerHalf) -> None:
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    theirs, ours = logging.getLogger("vllm"), logging.getLogger("asynckv")
    kept, before = Kept(), (list(ours.handlers), ours.level, ours.propagate)
    theirs.addHandler(kept)
    try:
        logging.getLogger("asynckv").warning("peer_lost peer=x")
    finally:
        theirs.removeHandler(kept)
        ours.handlers, ours.propagate = before[0], before[2]
        ours.setLevel(before[1])
    assert lines == ["peer_lost peer=x"]


def test_vllm_allocates_host_caches_where_a_process_of_nixls_own_can_map_them(tmp_path: Path) -> None:
    config = vllm_config(tmp_path, num_blocks=NUM_BLOCKS, engine_id="e", block_size=16)
    (planned,) = plan(config, [{name: layer.spec(1) for name, layer in LAYERS.items()}])
    layout = config.cache_config.get_resolved_kv_cache_layout()
    unprotected = WorkerHalf(Options.parse({"nixl": {"process": "never"}}), config, planned.config)
    assert unprotected.allocation() is None
    half = WorkerHalf(Options.parse({"nixl": {"process": "serving"}}), config, planned.config)
    pool = half.allocation()
    assert pool is not None
    with pool:  # as `gpu_worker.Worker.initialize_from_config` does
        tensors = allocate_kv_cache(planned.config, torch.device("cpu"), layout, None)
    try:
        half.register_kv_caches(tensors)
        assert half._thread is not None
        assert isinstance(half._thread.engine._driver.data, ServingPlane)
        assert half.address() is not None
    finally:
        half.shutdown()


# -- tickets ------------------------------------------------------------------------------------------------

TICKET = "0123456789abcdef" * 2


def followed(prefill: Worker, ticket: str = TICKET) -> dict[str, Any]:
    """What a router gives a decode engine to follow."""
    params = prefill.params("any", [1])
    return {"ticket": ticket, **{name: params[name] for name in ("engine_id", "tp_size", "pp_size", "endpoints")}}


@pytest.mark.parametrize("is_early", [True, False])
def test_a_ticket_is_followed_until_its_request_is_lent(make: Make, is_early: bool) -> None:
    prefill, decode = make("prefill").worker, make("decode").worker
    params = prefill.params("p", [3, 4])
    if not is_early:
        prefill.step(Lend(params, ticket=TICKET))
    decode.step(Follow("d", followed(prefill)))
    if is_early:
        prefill.until(lambda: bool(prefill.counters.get("received.follow")))
        assert not decode.offered
        prefill.step(Lend(params, ticket=TICKET))
    decode.until(lambda: bool(decode.offered))
    (offer,) = decode.offered
    assert (offer.request_id, offer.params["key"]) == ("d", list(params["key"]))
    decode.step(Pull(request_id="d", groups=[(0, [6, 5])], params=offer.params))
    decode.until(lambda: decode.received == ["d"])
    prefill.until(lambda: prefill.sent == ["p"])
    assert decode.half.take_reports() is None
    assert len(decode.offered) == 1
    assert not decode.not_offered


@pytest.mark.parametrize("is_early", [True, False])
def test_what_is_offered_to_a_request_that_needs_it_no_more_is_released_without_a_step(
    make: Make, is_early: bool
) -> None:
    prefill, decode = make("prefill").worker, make("decode").worker
    params = prefill.params("p", [3, 4])
    if not is_early:
        prefill.step(Lend(params, ticket=TICKET))
    decode.half.start_load(StepOrders([Follow("d", followed(prefill)), Cancel("d", follows_on=True)]))
    if is_early:
        prefill.until(lambda: bool(prefill.counters.get("received.follow")))
        prefill.step(Lend(params, ticket=TICKET))
    prefill.until(lambda: prefill.sent == ["p"])  # long before the lease ends
    assert counted(prefill.half, "leases") == {"released": 1}
    assert decode.thread._desk.untaken == []
    decode.look()
    assert [offer.request_id for offer in decode.offered] == ["d"]


def test_the_end_of_a_follow_that_was_given_up_is_not_waited_for(make: Make) -> None:
    """vLLM may make no step any more, and `asynckv why` would call it stuck."""
    prefill, decode = make("prefill").worker, make("decode").worker
    decode.half.start_load(StepOrders([Follow("d", followed(prefill))]))
    prefill.until(lambda: bool(prefill.counters.get("received.follow")))
    decode.half.start_load(StepOrders([Cancel("d")]))
    prefill.until(lambda: bool(prefill.counters.get("received.unfollow")))
    assert decode.thread._desk.has_news
    assert decode.thread._desk.untaken == []
    decode.look()
    assert [failed.request_id for failed in decode.not_offered] == ["d"]


@pytest.mark.parametrize("how", ["withdrawn", "refused", "asleep", "closed"])
def test_a_ticket_that_is_not_offered_is_told_once(make: Make, how: str) -> None:
    prefill, decode = make("prefill").worker, make("decode").worker
    if how == "closed":
        decode.thread.close()
    if how == "asleep":
        decode.half.unregister_kv_caches()
    if how == "closed":
        with pytest.raises(EngineClosed):
            decode.step(Follow("d", followed(prefill)))
        return
    decode.step(Follow("d", followed(prefill)))
    if how == "withdrawn":
        prefill.step(WithdrawTicket(TICKET))
    elif how == "refused":
        prefill.step(Lend(prefill.params("p", [3, 3]), ticket=TICKET))
        prefill.until(lambda: prefill.sent == ["p"])
    decode.until(lambda: bool(decode.not_offered))
    decode.look()
    (failed,) = decode.not_offered
    assert failed.request_id == "d"
    assert isinstance(failed.error, EngineClosed if how == "asleep" else NoOffer)
    assert not decode.received


def test_a_follower_hears_of_a_sleep_once_it_is_over(make: Make) -> None:
    prefill, decode = make("prefill").worker, make("decode").worker
    decode.step(Follow("d", followed(prefill)))
    prefill.until(lambda: bool(prefill.counters.get("received.follow")))
    decode.half.unregister_kv_caches()
    decode.half.restore_kv_caches()
    decode.look()
    assert [getattr(failed.error, "reason", "") for failed in decode.not_offered] == ["engine_closed"]


def test_orders_are_begun_once_although_vllm_hands_them_over_twice(make: Make) -> None:
    prefill, decode = make("prefill").worker, make("decode").worker
    params = prefill.lend("p", [3])
    connector: Any = object.__new__(AsyncKVConnector)
    connector._worker = decode.half
    step = StepOrders([Pull(request_id="d", groups=[(0, [6])], params=params)], ["gone"], PromptsCounted(3))
    connector.handle_preemptions({"preempted"})  # as in versions that name requests
    connector.handle_preemptions(step)
    assert decode.thread._desk.num_handovers == 2  # before the forward pass
    connector._connector_metadata = step
    connector.start_load_kv(None)
    assert connector.get_transfer_results(set()).failed_recving == {"gone"}
    connector.start_load_kv(None)
    decode.until(lambda: decode.received == ["d"])
    assert decode.thread._desk.num_handovers == 2
    connector._connector_metadata = StepOrders([Cancel("x")])
    connector.start_load_kv(None)  # of a runner that calls only this
    assert decode.thread._desk.num_handovers == 3


class Passed(threading.Event):
    """An event of a device, which a test sets."""

    def synchronize(self) -> None:
        assert self.wait(WITHIN_S)


def test_with_a_drafter_on_a_gpu_orders_leave_behind_its_work_and_in_turn(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Passed] = []

    def recorded() -> Passed:
        events.append(Passed())
        return events[-1]

    prefill, decode = make("prefill").worker, make("decode").worker
    monkeypatch.setattr("asynckv.integrations.vllm.worker.stream_event", recorded)
    with ThreadPoolExecutor(1) as line:
        prefill.half._line = line
        params = prefill.params("p", [3])
        prefill.step(Lend(params, ticket=TICKET))
        prefill.lend("q", [4])
        decode.step(Follow("d", followed(prefill)))
        prefill.until(lambda: bool(prefill.counters.get("received.follow")))
        events[1].set()
        assert "leases.lent" not in prefill.counters
        assert not decode.offered
        events[0].set()
        decode.until(lambda: bool(decode.offered))
        prefill.until(lambda: prefill.counters.get("leases.lent") == 2)
        prefill.half.shutdown()


def test_reports_and_orders_of_tickets_cross_processes_and_show_none() -> None:
    error = NoOffer("no", request_id="d", reason="withdrawn", failed_in="follow")
    told = FollowReports([Offer("d", {"key": [1]})], [Failed("e", error)])
    both = pickle.loads(pickle.dumps(told.aggregate(FollowReports([Offer("f", {})], [], [TICKET]))))
    assert both.followed == [TICKET]
    assert [offer.request_id for offer in both.offered] == ["d", "f"]
    assert (both.not_offered[0].error.reason, both.not_offered[0].is_unbegun) == ("withdrawn", False)
    step = StepOrders([Follow("d", {"ticket": TICKET}), Lend({}, ticket=TICKET), WithdrawTicket(TICKET)])
    assert pickle.loads(pickle.dumps(step)) == step
    assert TICKET not in repr(step)


def test_sleep_waits_for_reads_promises_and_the_memory(half: WorkerHalf) -> None:
    asked: list[tuple[str, float]] = []

    class Engine:
        def suspend(self, *, timeout_s: float) -> str:
            return f"suspend {timeout_s:g}"

    class Thread:
        engine = Engine()

        def call(self, work: str, timeout_s: float) -> None:
            asked.append((work, timeout_s))

    half._thread = Thread()  # type: ignore[assignment]
    half.unregister_kv_caches()
    half.unregister_kv_caches()
    half._thread = None
    assert asked == [("suspend 2", 2 + half._config.lease.grant_s + 30)]


# -- pieces -------------------------------------------------------------------------------------------------


def lend_piece(worker: Worker) -> None:
    """Lend the first 32 tokens of what is under way, in blocks 3 and 4."""
    worker.step(LendPiece(worker.params("p/32", [3, 4], recall=True), TICKET))


def num_pieces(worker: Worker) -> int:
    return len(worker.thread.engine._driver.core.prefill.offers.pieces)


def test_a_follower_reads_pieces_and_then_the_rest(make: Make) -> None:
    prefill, decode = make("prefill").worker, make("decode").worker
    for tensor in prefill.tensors.values():
        tensor.copy_(torch.randn(tensor.shape))
    decode.step(Follow("d", followed(prefill), takes_pieces=True))
    prefill.until(lambda: bool(prefill.followed))
    assert set(prefill.followed) == {TICKET}
    lend_piece(prefill)
    decode.until(lambda: bool(decode.offered))
    (piece,) = decode.offered
    assert piece.is_piece
    blocks = [(0, [11, 12, 13, 14])]
    decode.step(StartEarly(request_id="d", groups=blocks, params=piece.params, num_tokens=64))
    assert list(decode.half._pulling) == ["d"]
    decode.until(lambda: decode.counters.get("pieces.complete") == 1)
    prefill.step(Lend(prefill.params("p", [3, 4, 5, 6]), ticket=TICKET))
    decode.until(lambda: len(decode.offered) == 2)
    offer = decode.offered[1]
    decode.load(blocks, offer.params, num_tokens=64, goes_on=True)
    prefill.until(lambda: prefill.sent == ["p"])
    for name, tensor in decode.tensors.items():
        assert torch.equal(tensor[[11, 12, 13, 14]], prefill.tensors[name][[3, 4, 5, 6]])
    assert num_pieces(prefill) == 0
    decode.look()
    assert decode.received == ["d"]


@pytest.mark.parametrize("how", ["cancel", "withdrawn", "bad blocks"])
def test_a_head_start_that_ends_early_is_told_once_as_failed(make: Make, how: str) -> None:
    prefill, decode = make("prefill").worker, make("decode").worker
    decode.step(Follow("d", followed(prefill), takes_pieces=True))
    lend_piece(prefill)
    decode.until(lambda: bool(decode.offered))
    blocks = [(0, [NUM_BLOCKS + 3, 12] if how == "bad blocks" else [11, 12, 13])]
    decode.step(StartEarly(request_id="d", groups=blocks, params=decode.offered[0].params, num_tokens=48))
    if how == "cancel":
        decode.step(Cancel("d"))
    elif how == "withdrawn":
        decode.until(lambda: decode.counters.get("pieces.complete") == 1)
        prefill.step(EndPieces(TICKET), WithdrawTicket(TICKET))
        decode.until(lambda: bool(decode.not_offered))
        decode.step(Cancel("d"))  # as the scheduler's half does
    decode.until(lambda: decode.received == ["d"])
    assert decode.failed == ["d"]
    params = prefill.params("p", [3, 4, 5])
    decode.step(
        Pull(request_id="d", groups=blocks, params=params, goes_on=True)
    )  # of a scheduler that knows nothing yet
    decode.look()
    assert (decode.received, decode.half._pulling) == (["d"], {})


@pytest.mark.parametrize("is_planted", [False, True])
@pytest.mark.parametrize("has_line", [False, True])
def test_a_step_begins_once_pieces_are_taken_back(
    make: Make, is_planted: bool, has_line: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the wait the forward pass writes blocks of which a read may still be proven."""
    passed = Passed()
    passed.set()
    monkeypatch.setattr("asynckv.integrations.vllm.worker.stream_event", lambda: passed)
    monkeypatch.setattr("asynckv.integrations.vllm.worker.RECALL_S", 0.05)
    if is_planted:
        monkeypatch.setattr(WorkerHalf, "_await_end_of_pieces", lambda self, thread: None)
    prefill = make("prefill").worker
    with ThreadPoolExecutor(1) as line, ThreadPoolExecutor(1) as runner:
        prefill.half._line = line if has_line else None
        lend_piece(prefill)
        prefill.until(lambda: num_pieces(prefill) == 1)
        with Stuck(prefill.thread):
            begun = runner.submit(prefill.half.start_load, StepOrders([EndPieces(TICKET), WithdrawTicket(TICKET)]))
            while not (is_planted or "taken back" in caplog.text):
                assert not begun.done()
            if is_planted:
                begun.result(WITHIN_S)
                assert num_pieces(prefill) == 1  # caught
        begun.result(WITHIN_S)
        assert is_planted or num_pieces(prefill) == 0
        prefill.half.shutdown()


def test_a_step_that_waits_too_long_for_pieces_ends_the_worker(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options.parse({"lease": {"grant_s": 0.5}})
    monkeypatch.setattr("asynckv.integrations.vllm.worker.RECALL_S", 0.05)
    prefill = make("prefill", options=options).worker
    lend_piece(prefill)
    with Stuck(prefill.thread), pytest.raises(TimeoutError, match="recall"):
        prefill.half.start_load(StepOrders([EndPieces(TICKET)]))


@pytest.mark.parametrize("is_planted", [False, True])
def test_pieces_are_taken_back_in_turn_although_a_drafter_runs(
    make: Make, is_planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If only their ends overtake the drafter, a piece is lent behind its end."""
    prefill, passed = make("prefill").worker, Passed()
    monkeypatch.setattr("asynckv.integrations.vllm.worker.stream_event", lambda: passed)
    if is_planted:
        monkeypatch.setattr("asynckv.integrations.vllm.worker.OF_PIECES", (EndPieces,))
    with ThreadPoolExecutor(1) as line:
        prefill.half._line = line
        lend_piece(prefill)
        prefill.step(EndPieces(TICKET))
        passed.set()
        line.submit(lambda: None).result(WITHIN_S)
        prefill.thread.recall([], WITHIN_S)
        assert num_pieces(prefill) == is_planted  # caught
        prefill.half.shutdown()
