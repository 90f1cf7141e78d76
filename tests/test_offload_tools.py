"""What operators' tools say of engines that store and load: from their logs, and asked while they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asynckv import BlocksRetired, EngineConfig, LogConfig, PullError
from asynckv.errors import ConfigError
from asynckv.tools.cli import app
from asynckv.tools.diagnose.join import join
from asynckv.tools.diagnose.leaks_copies import late_copies
from asynckv.tools.diagnose.leaks_live import records_of
from tests.observed import answer_of
from tests.offloads import SIZE, chain, hybrid, layout_of, offloading


def leaks(log: Path, *argv: str) -> tuple[int, str, dict[str, Any]]:
    out = log.with_suffix(".json")
    told = CliRunner().invoke(app, ["why", *argv, str(log), "--json", str(out)])
    if isinstance(told.exception, ConfigError):
        raise told.exception
    return told.exit_code, told.stdout, json.loads(out.read_text())


async def test_running_engines_tell_of_copies_that_do_not_end() -> None:
    async with offloading(layout_of(), held_s=60.0) as (rank, offload):
        await offload.store("a", [(0, [1, 2])], chain("p", 2))
        rank.copies.fate = lambda move_id, op: "doubt"
        for name, block in (("back", 5), ("lost", 6)):
            with pytest.raises(PullError):
                await offload.load(name, [(0, [block])], chain("p", 1), num_tokens=SIZE)
        rank.clock.advance(61.0)
        with pytest.raises(BlocksRetired):
            await offload.returned("lost")
        with pytest.raises(PullError):
            await offload.load("late", [(0, [7])], chain("p", 1), num_tokens=SIZE)
        rank.clock.advance(5.0)
        service = join(records_of([await answer_of(rank.engine)], 1e9))
        found = late_copies(service)
        assert [(x.request_id, x.what, x.state, x.blocks) for x in found] == [
            ("back", "load", "retired", 1),
            ("lost", "load", "retired", 1),
            ("late", "load", "held", 1),
        ]
        assert [x.seconds for x in found] == pytest.approx([66.0, 66.0, 5.0], abs=0.1)
        assert late_copies(service, ["late"]) == found[2:] == late_copies(service, [found[2].job])
        rank.copies.finish()


async def test_a_request_that_only_stored_or_loaded_is_found_by_its_id(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    async with offloading(layout_of(), engine={"log": LogConfig(file=str(log))}) as (rank, offload):
        await offload.store("a", [(0, [1, 2])], chain("p", 2))
        rank.copies.fate = lambda move_id, op: "fail"
        assert (await offload.load("missed", [(0, [5])], chain("p", 1), num_tokens=SIZE)).num_tokens == 0
        rank.copies.fate = lambda move_id, op: "doubt"
        with pytest.raises(PullError):
            await offload.load("late", [(0, [6])], chain("p", 1), num_tokens=SIZE)
        rank.clock.advance(2.0)
        rank.copies.finish()
        await offload.returned("late")
    status, text, found = leaks(log, "missed")
    assert (status, found["copies"]) == (0, [])
    assert "its load on worker/tp0@" in text
    assert "(failed: " in text
    status, text, found = leaks(log, "late")
    assert (status, [x["request_id"] for x in found["copies"]]) == (1, ["late"])
    assert leaks(log, found["copies"][0]["job"])[2]["copies"] == found["copies"]
    assert "load of late on worker/tp0@" in text
    assert (len(found["read"]["offload"]), found["read"]["quiet"]) == (1, [])
    with pytest.raises(ConfigError, match="the nearest ids are missed"):
        leaks(log, "misse")


async def test_an_ended_lease_counts_the_blocks_that_it_held(tmp_path: Path) -> None:
    """A window's lease has places without a block."""
    log = tmp_path / "host.log"
    network = EngineConfig(engine_id="worker-host", log=LogConfig(file=str(log)))
    async with offloading(hybrid(), network_=network, host_bytes=1 << 20) as (_, offload):
        blocks = [(0, [1, 2, 3, 4, 5, 6]), (0, [1, 2, 3, 4, 5, 6]), (0, [1, 2, 3])]
        await offload.store("a", blocks, chain("p", 6))
        assert offload.network is not None
        await offload.lend("lent", chain("p", 6), num_tokens=96)
        [held] = offload.network.holds()
        most = sum(map(len, held.blocks.values()))
    [ended] = [x for x in map(json.loads, log.read_text().splitlines()) if x["event"] == "lease_ended"]
    assert ended["blocks"] == most < 6 + 6 + 3


async def test_what_was_moved_is_logged_soon_and_then_ever_more_rarely(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    async with offloading(layout_of(), host_bytes=1 << 20, engine={"log": LogConfig(file=str(log))}) as (rank, offload):
        for second in range(300):
            rank.clock.advance(1.0)
            await offload.store("a", [(0, [1])], chain(f"p{second}", 1))
    lines = log.read_text().splitlines(keepends=True)
    told = [(at, x) for at, x in enumerate(map(json.loads, lines)) if x["event"] == "offload_moved"]
    assert [round(x["seconds"]) for _, x in told[:-1]] == [1, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert sum(x["counters"]["blocks.store"] for _, x in told[:-1]) == 244  # as a killed process tells it
