"""Rules of the engine's calls that only show where something else fails at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import pytest

from asynckv import (
    Engine,
    EngineClosed,
    EngineConfig,
    GeometryRefused,
    LeaseConfig,
    LeaseRefused,
    LocalProtocolError,
    PeerUnreachable,
    PrefillRanks,
    PullConfig,
    PullError,
    Registration,
)
from asynckv.core.types import Reason
from asynckv.core.wire import Claim
from asynckv.engine.ending import GRACE_S
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.ports import AgentInfo
from asynckv.testing import ManualClock, SimControl, SimData, SimNetwork
from tests.documented import Lines
from tests.engines import Bench, cancel, memory, pass_by, reading, turn_loop, until
from tests.offloads import Rank, layout_of
from tests.test_log_evidence import drops
from tests.world import World, make_layout, reason


async def test_a_pull_from_an_address_that_may_not_be_talked_to_fails_at_once(
    sim: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the pull would say hello until the end of its handshake."""
    async with sim.pair() as (prefill, decode, group):
        control: Any = decode.engine._driver.control
        monkeypatch.setattr(control, "send", lambda to, packet: False)
        monkeypatch.setattr(control, "refusal", lambda address: "its address names no key")
        params, began = group.make_params("r", [(0, [1])], 16, written=True), sim.clock.now()
        prefill.engine.lend(params)
        with anyio.fail_after(5), pytest.raises(PeerUnreachable, match="its address names no key"):
            await decode.engine.pull("d", [(0, [6])], params)
        assert sim.clock.now() == began
        monkeypatch.undo()


async def test_a_caller_that_cancels_again_waits_all_the_same_while_its_blocks_may_be_written(sim: Bench) -> None:
    async with sim.pair() as (prefill, decode, group):
        _, task, data = await reading(prefill, decode, group)
        for _ in range(3):
            task.cancel()
            await turn_loop(9)
            assert not task.done()
        data.finish()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_pull_that_is_cancelled_ends_as_cancelled_and_not_by_its_deadline(sim: Bench) -> None:
    async with sim.pair() as (prefill, decode, group):
        sim.network.fate = drops(Claim)
        params, _ = prefill.lent(group, "r", [1])
        task = asyncio.create_task(decode.engine.pull("d", [(0, [6])], params))
        await until(lambda: decode.engine.statistics().gauges["pulls"])
        await cancel(task)
        await until(lambda: decode.engine.statistics().counters.get("pulls.cancelled") == 1)
        sim.network.fate = lambda sender, to, packet: "deliver"


async def test_returned_waits_for_the_blocks_of_a_cancelled_read(sim: Bench) -> None:
    async with sim.pair(pull=PullConfig(drain_s=0.1)) as (prefill, decode, group):
        _, task, data = await reading(prefill, decode, group, timeout_s=1.0)
        sim.clock.advance(1.1)
        with pytest.raises(PullError):
            await task
        returned = asyncio.create_task(decode.engine.returned("d"))
        await turn_loop(10)
        assert not returned.done()
        data.finish()
        with anyio.fail_after(5):
            await returned
        assert not decode.engine.holds()


@pytest.mark.parametrize(("timeout_s", "waits_s"), [(0.0, GRACE_S), (3.0, 3.0), (1e6, 5.0)])
async def test_a_close_waits_for_what_loads_within_its_own_time(
    sim: Bench, monkeypatch: pytest.MonkeyPatch, timeout_s: float, waits_s: float
) -> None:
    side, waited = sim.side("alone", 1, pull=PullConfig(handshake_s=5.0)), list[float]()
    await side.engine.start()
    driver = side.engine._driver

    async def end_loading(timeout_s: float) -> None:
        waited.append(timeout_s)

    monkeypatch.setattr(driver, "end_loading", end_loading)
    with anyio.fail_after(5):
        await side.engine.aclose(timeout_s)
    assert waited == [pytest.approx(waits_s, abs=0.1)]


async def test_a_tier_that_may_still_write_memory_is_said_by_the_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller must not free memory then; the next call tries again."""
    rank = Rank(layout_of())
    async with rank.running():
        [shelf, *_] = rank.offload._mover.shelves
        close = shelf.close

        async def stuck(timeout_s: float) -> None:
            monkeypatch.setattr(shelf, "close", close)
            raise BackendError("something may still write")

        monkeypatch.setattr(shelf, "close", stuck)
        with anyio.fail_after(5), pytest.raises(BackendError, match="something may still write"):
            await rank.offload._tiers._let_go_of_planes(rank.clock.now() + 1.0)
        await rank.offload._tiers._let_go_of_planes(rank.clock.now() + 1.0)


async def test_the_data_plane_is_told_from_which_host_metadata_comes(
    sim: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sim.pair() as (prefill, decode, group):
        hosts, load = list[str](), decode.data.add_remote_agent

        async def add_remote_agent(agent: AgentInfo, memories: Sequence[Memory]) -> None:
            hosts.append(agent.host)
            await load(agent, memories)

        monkeypatch.setattr(decode.data, "add_remote_agent", add_remote_agent)
        monkeypatch.setattr(decode.engine._driver.control, "host", lambda address: f"host of {address}")
        params, _ = prefill.lent(group, "r", [1], written=True)
        await decode.engine.pull("d", [(0, [6])], params)
        assert hosts == [f"host of {prefill.engine.endpoint.address}"]


# -- engines of two models or of one name ----------------------------------------------------------------------


MODELS = [("llama", ""), ("", "llama"), ("llama", "qwen"), ("", ""), ("llama", "llama")]


@pytest.mark.parametrize(("here", "there"), MODELS)
def test_models_are_compared_by_name_at_the_handshake_and_no_name_is_another_one(here: str, there: str) -> None:
    world = World()
    prefill = world.add("prefill", make_layout(model=there))
    decode = world.add("decode", make_layout(model=here), seed=1)
    params, _ = world.lent(prefill, "request", [3], written=True)
    pull = world.pull(decode, "d", [5], params)
    world.run()
    if here == there:
        assert reason(pull) is Reason.COMPLETE
        return
    assert reason(pull) is Reason.GEOMETRY
    assert f"local {here or 'without a name'}, remote {there or 'without a name'}" in pull.detail
    assert ("give both layouts its name" in pull.detail) is (not here or not there)


def side(network: SimNetwork, clock: ManualClock, engine_id: str, seed: int, model: str) -> Engine:
    registration, _ = memory(seed)
    registration = Registration(msgspec.structs.replace(registration.layout, model=model), registration.owners)
    return Engine(
        EngineConfig(engine_id=engine_id),
        registration,
        data=SimData(network, f"{engine_id}-{seed}"),
        control=SimControl(network),
        clock=clock,
    )


async def exchange(names: tuple[str, str], models: tuple[str, str]) -> None:
    """Lend a block and pull it, from one engine to the other."""
    network, clock = SimNetwork(), ManualClock()
    prefill, decode = (
        side(network, clock, name, seed, model) for seed, (name, model) in enumerate(zip(names, models, strict=True))
    )
    async with prefill, decode:
        params = PrefillRanks(names[0], [prefill.endpoint]).make_params("p", [(0, [3])], 16, written=True)
        prefill.lend(params)
        try:
            await decode.pull("d", [(0, [5])], params)
        finally:
            await decode.aclose()
            await prefill.aclose()


def doubts(logs: Lines) -> list[tuple[str, str]]:
    return [(e["engine_id"], e["detail"]) for e in logs.of("setup_doubtful")]


async def test_engines_without_a_models_name_say_so_once_each(logs: Lines) -> None:
    await exchange(("prefill", "decode"), ("", ""))
    assert [engine_id for engine_id, _ in doubts(logs)] == ["prefill", "decode"]
    assert all("give it model=" in detail for _, detail in doubts(logs))


async def test_another_model_is_refused_with_both_names(logs: Lines) -> None:
    with pytest.raises(GeometryRefused, match="model: local qwen, remote llama"):
        await exchange(("prefill", "decode"), ("llama", "qwen"))
    assert doubts(logs) == []


async def test_a_rank_that_reads_from_one_of_its_own_name_says_so(logs: Lines) -> None:
    await exchange(("engine", "engine"), ("llama", "llama"))
    ((engine_id, detail),) = doubts(logs)
    assert engine_id == "engine"
    assert "are both engine/tp0; give each engine an engine_id of its own" in detail


# -- an engine without room ------------------------------------------------------------------------------------


async def test_a_reader_engine_that_only_announces_makes_room_for_another() -> None:
    """The slow one's oldest requests end as revoked, at its next renewal; it is told so when it pulls. Others live."""
    bench = Bench(False)
    config: dict[str, Any] = {"lease": LeaseConfig(lease_s=30.0, grant_s=3.0)}
    prefill, slow, quick = [bench.side(name, i, **config) for i, name in enumerate(("prefill", "slow", "quick"))]
    with pytest.raises(EngineClosed):
        prefill.engine.reclaim(1)
    async with prefill.engine, slow.engine, quick.engine:
        group = PrefillRanks("prefill", [prefill.engine.endpoint])
        params = [group.make_params(f"r{i}", [(0, [*range(6 * i, 6 * i + 6)])], 96) for i in range(5)]
        leases = [prefill.engine.lend(each) for each in params]
        for i, each in enumerate(params):
            (quick if i == 4 else slow).engine.announce(f"d{i}", each)
        await until(lambda: all(lease._lease.grants for lease in leases))
        assert prefill.engine.reclaim(6) == 0
        ended: list[str] = []
        for lease in leases:
            task = asyncio.ensure_future(lease.wait_released())
            task.add_done_callback(lambda done: ended.append(f"{done.result().request_id} {done.result().cause}"))

        await pass_by(bench, 3.0, 0.1)
        assert prefill.engine.reclaim(6) == 1
        assert prefill.engine.reclaim(6) == 0, "its blocks are on their way"
        await pass_by(bench, 1.5, 0.1)  # a third of a grant, and some turns
        assert ended == ["r0 revoked"]
        with pytest.raises(LeaseRefused, match="revoked"):
            await slow.engine.pull("d0", [(0, [*range(6)])], params[0])
        assert (await quick.engine.pull("d4", [(0, [*range(6)])], params[4])).num_tokens == 96
        assert (await slow.engine.pull("d1", [(0, [*range(6, 12)])], params[1])).num_tokens == 96
        for wrong in (-1, 1.5, None, "many"):
            with pytest.raises(LocalProtocolError, match="num_blocks"):
                prefill.engine.reclaim(wrong)  # type: ignore[arg-type]
        for i in (2, 3):
            slow.engine.cancel(f"d{i}")
        await pass_by(bench, 1.0, 0.1)
        assert len(ended) == 5
