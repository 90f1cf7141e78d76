"""Mistakes that look right: engines of two models, layouts without a model's name, two engines of one name."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from asynckv import Engine, EngineConfig, GeometryRefused, PrefillRanks, Registration
from asynckv.core.types import Reason
from asynckv.testing import ManualClock, SimControl, SimData, SimNetwork
from tests.engines import memory
from tests.world import World, make_layout, reason

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


@pytest.fixture
def logs() -> Iterator[list[EventDict]]:
    with capture_logs() as logs:
        yield logs


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


def doubts(logs: list[EventDict]) -> list[tuple[str, str]]:
    return [(e["engine_id"], e["detail"]) for e in logs if e["event"] == "setup_doubtful"]


@pytest.mark.anyio
async def test_engines_without_a_models_name_say_so_once_each(logs: list[EventDict]) -> None:
    await exchange(("prefill", "decode"), ("", ""))
    assert [engine_id for engine_id, _ in doubts(logs)] == ["prefill", "decode"]
    assert all("give it model=" in detail for _, detail in doubts(logs))


@pytest.mark.anyio
async def test_another_model_is_refused_with_both_names(logs: list[EventDict]) -> None:
    with pytest.raises(GeometryRefused, match="model: local qwen, remote llama"):
        await exchange(("prefill", "decode"), ("llama", "qwen"))
    assert doubts(logs) == []


@pytest.mark.anyio
async def test_a_rank_that_reads_from_one_of_its_own_name_says_so(logs: list[EventDict]) -> None:
    await exchange(("engine", "engine"), ("llama", "llama"))
    ((engine_id, detail),) = doubts(logs)
    assert engine_id == "engine"
    assert "are both engine/tp0; give each engine an engine_id of its own" in detail
