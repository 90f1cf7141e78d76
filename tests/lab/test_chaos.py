"""Real workers broken on purpose and under pressure: short runs of the scenarios of `tests/lab`, and command lines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from asynckv.edges.control import zmq as edge
from tests.lab import attack, chaos, pressure
from tests.lab.arena import Arena, arena
from tests.lab.pressure import Sizes

pytestmark = [pytest.mark.slow, pytest.mark.nixl, pytest.mark.timeout(90)]

DEADLINE_S = 60.0
SHORT = {
    "load": Sizes(pulls=1500),
    # A peer that holds up others does so for seconds; what neighbours on this machine do is no matter here.
    "isolate": Sizes(rounds=1, round_s=1.2, peers=3, crowd=3, ratio=8.0),
    "drain": Sizes(mib=32),
    "sleep": Sizes(cycles=2, trials=1),
    "retry": Sizes(trials=1),
}


async def misled(arena: Arena, *sizes: Sizes) -> None:
    """Compare what is published with another request's bytes."""
    prefill = await arena.start("prefill")
    if sizes:
        await arena.decode.start()
    lent = await prefill.lend(4, reads=True)
    await prefill.pull(lent | {"number": 1 << 20, "cached": 0})
    await (pressure.settle(arena, prefill, arena.decode) if sizes else arena.finish())


def children() -> set[str]:
    """Processes that this one has started and not collected."""
    return set(Path("/proc/thread-self/children").read_text().split())


@pytest.mark.parametrize("name", sorted(chaos.SCENARIOS.keys() - {"survive"}))  # which is the next test
async def test_what_is_published_is_right_whatever_breaks(name: str) -> None:
    before = children()
    async with asyncio.timeout(DEADLINE_S):
        record = await chaos.run(name, seconds=1.0, seed=1)
    assert record["problems"] == []
    assert sum(pulls["complete"] for pulls in record["pulls"].values()) > 0
    assert {pulls["bytes_wrong"] for pulls in record["pulls"].values()} == {0}
    assert children() <= before


@pytest.mark.timeout(200)
@pytest.mark.parametrize("transport", ["tcp", "cma"])
async def test_who_is_not_hurt_survives_whatever_happens_to_the_other_side(transport: str) -> None:
    before = children()
    async with asyncio.timeout(180):
        record = await chaos.run("survive", seed=2, transport=transport, cycles=2 * len(chaos.SURVIVED))
    assert record["problems"] == []
    assert record["survivors_lost"] == 0
    # Both sides were hurt in every way, and each was read meanwhile.
    assert record["faults"] == dict.fromkeys(chaos.SURVIVED, 2)
    assert {name: len(seen["fds"]) for name, seen in record["usage"].items()} == {"decode": 5, "prefill": 5}
    assert min(record["pulls"]["prefill"]["complete"], record["pulls_from_decode"]["complete"]) > 40
    assert record["pulls_from_decode"]["bytes_wrong"] == 0
    assert children() <= before


@pytest.mark.parametrize(("name", "transport"), [*((name, "tcp") for name in SHORT), ("sleep", "auto")])
async def test_what_is_promised_holds_under_pressure(name: str, transport: str) -> None:
    before = children()
    async with asyncio.timeout(80.0):
        record = await pressure.run(name, sizes=SHORT[name], seed=1, transport=transport)
    assert record["problems"] == []
    assert {pulls["bytes_wrong"] for pulls in record["pulls"].values()} == {0}
    assert children() <= before


def test_every_scenario_has_a_short_run() -> None:
    assert SHORT.keys() == pressure.SCENARIOS.keys()


@pytest.mark.parametrize(("module", "options"), [(chaos, ["--seconds", "1"]), (pressure, [])])
def test_wrong_bytes_end_a_run_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: Any, options: list[str]
) -> None:
    monkeypatch.setitem(module.SCENARIOS, "misled", misled)
    assert module.main(["misled", *options]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["problems"] == ["prefill: wrong bytes were published"]
    assert record["pulls"]["prefill"]["bytes_wrong"] > 0


def test_a_ratio_compares_medians_and_has_an_interval() -> None:
    found = pressure.ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert found == {"median": 4.0, "alone": 2.0, "ratio": 2.0, "low": 2.0, "high": 2.0}
    wide = pressure.ratio([1.0, 1.0, 9.0], [1.0, 1.0, 1.0])
    assert (wide["ratio"], wide["low"], wide["high"]) == (1.0, 1.0, 9.0)


# -- attacks, and a short run of them --------------------------------------------------------------------------


FRAMES = 10_000


@pytest.mark.timeout(240)
def test_nobody_notices_an_attack(capsys: pytest.CaptureFixture[str]) -> None:
    status = attack.main(["--frames", str(FRAMES), "--seed", "3", "--json", "-"])
    record = json.loads(capsys.readouterr().out)
    assert record["problems"] == []
    assert status == 0
    with_keys, without = record["rounds"]
    for each in (with_keys, without):
        assert each["pulls"]["complete"] > 60
        assert each["pulls"]["failed"] == {}
        assert each["pulls"]["bytes_wrong"] == 0
        assert each["left"] == {"decode": {}, "prefill": {}}
        assert each["sent"]["mutated_to_prefill"] + each["sent"]["mutated_to_decode"] == FRAMES // 2
        assert each["prefill"]["rejected.timeout"] >= attack.SLOW
        assert {k: v for k, v in each["sent"].items() if k.startswith("rude")} == dict.fromkeys(
            ("rude_parts", "rude_queues", "rude_ids"), attack.RUDE
        )
        assert each["prefill"]["dropped_frames"] > 0
        assert list(each["felt"]) == ["quiet", "raw", "packets", "huge", "parts", "queues", "ids", "afterwards"]
        assert all(felt["asked"] > 0 and felt["longest_turn_ms"] > 0 for felt in each["felt"].values())
    # A peer that sends too much rubbish is not listened to for a while, unless limits are lifted.
    assert with_keys["prefill"]["dropped.malformed"] > 100
    assert with_keys["prefill"]["dropped.too_many"] > FRAMES // 10
    assert without["prefill"]["dropped.malformed"] > FRAMES // 10
    causes = {"rejected.no_key", "rejected.unlisted_key", "rejected.wrong_key", "rejected.handshake"}
    assert causes <= with_keys["prefill"].keys()


async def test_a_stranger_that_is_answered_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with arena("open", 1) as place:
        work = attack.Attack(place, 100, lambda _: None)
        work.make_keys(tmp_path)
        await place.decode.start()
        await work.victim.start()
        assert work.mallory is not None
        listed = work.mallory
        monkeypatch.setattr(edge, "make_pair", lambda: listed)  # what is to be unlisted is not
        await work.strangers()
    assert any("(unlisted_key) was answered" in x for x in place.problems)
    assert any("(unlisted_key) was sent" in x for x in place.problems)
    assert any("(unlisted_key) was not counted" in x for x in place.problems)
    assert not any("(no_key)" in x for x in place.problems)
