"""Causes injected into real processes, on real NIXL and ZMQ, logged as by default: each is named, and nothing else."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from asynckv.edges.zmq import make_pair
from asynckv.keys import write_pair
from asynckv.tools.diagnose.ask import ask_all
from asynckv.tools.diagnose.axis import make_axis
from asynckv.tools.diagnose.causes import CAUSE, Owner
from asynckv.tools.diagnose.join import join
from asynckv.tools.diagnose.leaks import find_leaks
from asynckv.tools.diagnose.leaks_live import records_of
from asynckv.tools.diagnose.leaks_values import Leak
from asynckv.tools.diagnose.records import read_logs
from asynckv.tools.diagnose.timeline_model import ground
from tests.lab.fleet import Fleet, Process
from tests.leaky import LEASE_S

pytestmark = [pytest.mark.anyio, pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(180)]

C = CAUSE
PREFILL = ("prefill", "other", "guarded", "short", "closing")

EXPECTED = {
    "before": C.NEVER_CLAIMED,  # of several decode engines one had died, and no log tells for which it was
    "reading": C.READER_DIED,
    "announced": C.ANNOUNCED_AND_FORGOTTEN,
    "renamed": C.OTHER_REQUEST_ID,
    "unmet": C.NEVER_SHOOK_HANDS,
    "keys": C.KEYS_REFUSED,
    "away": C.DECODE_LOOP_AWAY,
    "killed": C.PREFILL_DIED,
    "retry": C.NO_ATTEMPT_FOLLOWED,
    "lost": C.NEVER_HEARD_OF,
    "late": C.LEASE_TOO_SHORT,
    "elsewhere": C.WRONG_TARGET,
    "stale": C.STALE_PARAMS,
    "longest": C.MAX_LEASE,
    "early": C.RELEASE_TOO_EARLY,
    "closed": C.PREFILL_CLOSED,
}
PREFILL_ONLY = {
    "before": C.NEVER_CLAIMED,
    "reading": C.READER_SILENT,
    "renamed": C.OTHER_REQUEST_ID,
    "unmet": C.NEVER_CLAIMED,
    "keys": C.NEVER_CLAIMED,
    "away": C.READER_SILENT,
    "retry": C.NO_ATTEMPT_FOLLOWED,
    "lost": C.NEVER_CLAIMED,
    "late": C.NEVER_CLAIMED,
    "elsewhere": C.NEVER_CLAIMED,
    "stale": C.NEVER_CLAIMED,
    "longest": C.MAX_LEASE,
    "early": C.RELEASE_TOO_EARLY,
    "closed": C.PREFILL_CLOSED,
}
DECODE_ONLY = {
    "announced": C.ANNOUNCED_AND_FORGOTTEN,
    "another": C.OTHER_REQUEST_ID,
    "unmet": C.NEVER_SHOOK_HANDS,
    "keys": C.KEYS_REFUSED,
    "elsewhere": C.WRONG_TARGET,
}


def named(leaks: list[Leak]) -> dict[str, str]:
    # A pull that is given no time at all may fail while its read is under way, and have its blocks a moment later.
    assert {x.request_id for x in leaks if x.side == "decode"} <= {"retry"}
    return {x.request_id: x.cause.value for x in leaks if x.side == "prefill"}


async def written(folder: Path, name: str, text: str) -> None:
    """Wait until a log says something: what a process logs in its last tenth of a second dies with it."""

    def is_there() -> bool:
        return any(text in path.read_text() for path in folder.glob(name))

    async with asyncio.timeout(10.0):
        while not is_there():  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.01)


async def leak(fleet: Fleet, folder: Path, keys: dict[str, str]) -> None:
    """Leak one request by each cause, and let some go well."""

    async def start(name: str, *engines: str) -> Process:
        return await fleet.start(name, "tests.leaky:Side", engines=list(engines), folder=str(folder), keys=keys)

    async def lend(name: str, engine: str = "prefill") -> dict[str, Any]:
        owner = other if engine == "other" else prefill
        params: dict[str, Any] = await owner.ask("lend", 60.0, engine=engine, request_id=name)  # once it has started
        return params

    prefill, other, alive, doomed, reading, away = await asyncio.gather(
        start("p", "prefill", "guarded", "short", "closing"),
        start("q", "other"),
        start("a", "alive", "stranger"),
        start("b", "doomed"),
        start("c", "reading"),
        start("d", "away"),
    )
    for reader, engine in ((alive, "alive"), (doomed, "doomed"), (away, "away")):
        params = await lend(f"well-{engine}")
        assert await reader.ask("pull", engine=engine, request_id=f"well-{engine}", params=params) == "complete"

    before = await lend("before")
    assert before
    await doomed.kill()
    again = asyncio.create_task(start("b", "doomed"))
    for process, engine, name in ((reading, "reading", "reading"), (away, "away", "away")):
        await process.ask("announce", engine=engine, request_id=name, params=await lend(name), wait_s=60.0)
        await process.ask("claimed", engine=engine, request_id=name)
    await reading.kill()
    blocked = asyncio.create_task(away.ask("block", seconds=LEASE_S + 1.5))
    await alive.ask("announce", engine="alive", request_id="announced", params=await lend("announced"))
    params = await lend("killed", "other")
    await alive.ask("announce", engine="alive", request_id="killed", params=params, wait_s=60.0)
    await alive.ask("claimed", engine="alive", request_id="killed")
    await written(folder, "other-*.log", "killed")
    await other.kill()
    early = await prefill.ask("make", engine="short", request_id="early")
    await alive.ask("discharge", engine="alive", request_id="early", params=early)
    await prefill.ask("forgotten", engine="short")
    await prefill.ask("lend", engine="short", request_id="early", params=early)
    await alive.ask(
        "announce", engine="alive", request_id="longest", params=await lend("longest", "short"), wait_s=60.0
    )
    await alive.ask(
        "announce", engine="alive", request_id="closed", params=await lend("closed", "closing"), wait_s=60.0
    )
    await alive.ask("claimed", engine="alive", request_id="closed")
    await prefill.ask("close", engine="closing")
    renamed = {**await lend("renamed"), "request_id": "another"}
    unmet = await lend("unmet")
    unmet["endpoints"] = [{**x, "address": "tcp://127.0.0.1:9"} for x in unmet["endpoints"]]
    elsewhere, stale = await lend("elsewhere"), await lend("stale")
    address = await prefill.ask("address", engine="short")
    elsewhere["endpoints"] = [{**x, "address": address} for x in elsewhere["endpoints"]]
    stale["endpoints"] = [{**x, "incarnation": x["incarnation"][::-1]} for x in stale["endpoints"]]
    foreign = await lend("keys", "guarded")
    retry = await prefill.ask("make", engine="prefill", request_id="retry")
    pulls = [
        alive.ask("pull", engine="alive", request_id="renamed", params=renamed),
        alive.ask("pull", engine="alive", request_id="unmet", params=unmet),
        alive.ask("pull", engine="alive", request_id="elsewhere", params=elsewhere),
        alive.ask("pull", engine="alive", request_id="stale", params=stale),
        alive.ask("pull", engine="stranger", request_id="keys", params=foreign),
        alive.ask("pull", engine="alive", request_id="retry", params=retry, timeout_s=0.1, is_last=False),
    ]
    assert "complete" not in await asyncio.gather(*pulls)
    await prefill.ask("lend", engine="prefill", request_id="retry", params=retry)
    await (await again).ask("idle", engine="doomed")  # it has started
    ended = [prefill.ask("ended", request_id=x) for x in ("before", "reading", "renamed", "unmet", "keys", "retry")]
    assert set(await asyncio.gather(*ended)) == {"expired"}
    await prefill.ask("ended", request_id="announced")  # expired or released: its promise and its time end at once
    assert await prefill.ask("ended", request_id="away") == "expired"
    await blocked
    # Who fell silent is taken for dead when logs of others go on for long.
    patient = await lend("well-patient")
    await alive.ask("announce", engine="alive", request_id="well-patient", params=patient, wait_s=60.0)
    await alive.ask("held", engine="alive", seconds=4.0)
    assert await alive.ask("pull", engine="alive", request_id="well-patient", params=patient) == "complete"
    # By now nobody can have died with the params of these: they may come to readers before they are lent.
    await lend("lost")
    late = await lend("late")
    assert {await prefill.ask("ended", request_id=x) for x in ("lost", "late")} == {"expired"}
    assert await alive.ask("pull", engine="alive", request_id="late", params=late) != "complete"
    for process, engine in ((alive, "alive"), (alive, "stranger"), (away, "away")):
        await process.ask("idle", 60.0, engine=engine)
    await asyncio.gather(*(x.end() for x in (prefill, alive, away, await again)))  # what is killed loses its last lines


async def leak_one(fleet: Fleet, folder: Path) -> None:
    """Kill the only reader that there is, before it knows of a request."""

    async def start(name: str) -> Process:
        return await fleet.start(name, "tests.leaky:Side", engines=[name], folder=str(folder), keys={})

    prefill, doomed = await asyncio.gather(start("prefill"), start("doomed"))
    well = await prefill.ask("lend", engine="prefill", request_id="well")
    assert await doomed.ask("pull", engine="doomed", request_id="well", params=well) == "complete"
    await doomed.ask("idle", engine="doomed")  # its release was heard
    await prefill.ask("lend", engine="prefill", request_id="before")
    await doomed.kill()
    assert await prefill.ask("ended", request_id="before") == "expired"
    again = await start("doomed")
    await again.ask("idle", engine="doomed")  # it has started
    await asyncio.gather(prefill.end(), again.end())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where logs go."""
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Keys of two engines; the one is not known to the other."""
    authorized = tmp_path / "authorized"
    authorized.mkdir()
    found: dict[str, str] = {}
    for name in ("guarded", "stranger"):
        secret, public = write_pair(tmp_path, name, make_pair())
        found |= {name: str(secret), f"{name}.authorized": str(authorized)}
        if name == "guarded":
            shutil.copy(public, authorized)
    return found


async def test_each_cause_is_named_and_nothing_else(folder: Path, keys: dict[str, str]) -> None:
    async with Fleet() as fleet:
        await leak(fleet, folder, keys)
    judge(folder)


async def test_of_a_request_that_nobody_spoke_of_it_is_told_who_died_meanwhile(folder: Path) -> None:
    """Had it had the params by then? If they had been lost, the logs would be the same."""
    async with Fleet() as fleet:
        await leak_one(fleet, folder)
    both, alone, theirs = (sorted(folder.glob(x)) for x in ("*.log", "prefill-*", "doomed-*"))  # noqa: ASYNC240
    [leak] = find_leaks(join(read_logs(both)))
    assert (leak.request_id, leak.cause) == ("before", C.NEVER_CLAIMED)
    told = "its params never arrived there, or whoever had them died, as doomed/tp0@[0-9a-f]{8} did about then"
    assert re.search(told, leak.sentence)
    [leak] = find_leaks(join(read_logs(alone)))
    assert (leak.request_id, leak.cause) == ("before", C.NEVER_CLAIMED)
    assert not find_leaks(join(read_logs(theirs)))


async def test_running_engines_say_what_they_hold_and_why(folder: Path) -> None:
    async with Fleet() as fleet:
        prefill, alive = await asyncio.gather(
            *(
                fleet.start(x, "tests.leaky:Side", engines=[x], folder=str(folder), keys={})
                for x in ("prefill", "alive")
            )
        )
        addresses = [await prefill.ask("address", engine="prefill"), await alive.ask("address", engine="alive")]
        announced = await prefill.ask("lend", engine="prefill", request_id="announced")
        await alive.ask("announce", engine="alive", request_id="announced", params=announced, wait_s=3.0)
        waiting = await prefill.ask("lend", engine="prefill", request_id="waiting")
        await alive.ask("announce", engine="alive", request_id="waiting", params=waiting, wait_s=60.0)
        await prefill.ask("lend", engine="prefill", request_id="unclaimed")
        await asyncio.gather(
            prefill.ask("held", engine="prefill", seconds=1.2), alive.ask("held", engine="alive", seconds=1.2)
        )
        answers = await ask_all(addresses)
        assert not any(x.error for x in answers)
        both = {x.request_id: x.cause for x in find_leaks(join(records_of(answers, time.time())))}
        alone = {x.request_id: x.cause for x in find_leaks(join(records_of(answers[:1], time.time())))}
        run = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "asynckv",
            "why",
            *addresses,
            "--json",
            "-",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, _ = await run.communicate()
    # What is announced, or waits for its turn, and is renewed is not late; one side alone cannot tell.
    assert both == {"unclaimed": C.NEVER_CLAIMED}
    assert alone == {"announced": C.STILL_HELD, "unclaimed": C.NEVER_CLAIMED, "waiting": C.STILL_HELD}
    assert {x["request_id"] for x in json.loads(out)["late"]} <= {"unclaimed"}, "whose lease may be over by then"


def judge(folder: Path) -> None:
    """Compare what is said with both sides' logs, and with one side's, to what was done."""
    logs = sorted(folder.iterdir())
    assert logs
    mine = [x for x in logs if x.name.startswith(PREFILL)]
    theirs = [x for x in logs if x not in mine]
    leaks = find_leaks(join(read_logs(logs)))
    assert named(leaks) == {k: v.value for k, v in EXPECTED.items()}
    owners = {x.request_id: x.cell[0] for x in leaks}
    assert (owners["reading"], owners["late"]) == (Owner.CLAIMED, Owner.UNCLAIMED)
    # A timeline marks those that were killed, and nobody else.
    gone = [(x.process.engine_id, x.gone.kind == "died") for x in ground(make_axis(join(read_logs(logs)))) if x.gone]
    assert sorted(gone) == [("doomed", True), ("other", True), ("reading", True)]
    alone = named(find_leaks(join(read_logs(mine))))
    assert alone.pop("announced", "reader_silent") == "reader_silent"
    assert alone.pop("killed", "prefill_died") == "prefill_died"  # if others go on for long
    assert alone == {k: v.value for k, v in PREFILL_ONLY.items()}
    assert named(find_leaks(join(read_logs(theirs)))) == {k: v.value for k, v in DECODE_ONLY.items()}
