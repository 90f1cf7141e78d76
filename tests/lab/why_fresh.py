"""Faults that nobody wrote `asynckv why` for, in real processes, and what it says of them.

The truth of each case was written by somebody who had not read `asynckv/tools/diagnose`, before the program was asked.
Engines, logs and the five ways of asking are those of `tests.lab.why_live`; the command runs as an operator runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asynckv import Announce, AsyncKVError, EngineDesk, EngineThread, Lend, LogConfig, Pull
from asynckv.core import outbox, peer, peers, wire
from asynckv.edges.control.zmq import make_pair
from asynckv.keys import write_pair
from tests import inspected
from tests.lab.fleet import Process
from tests.lab.stepper import Scheduler
from tests.lab.why_live import GRANT_S, LEASE_S, ONE_AT_A_TIME, PULL, Fault, Service, fault, main

CPU = Path("/sys/fs/cgroup/cpu")
NAMESPACE = 'exec unshare --pid --fork --kill-child --mount-proc sh -c \'"$@"; exit $?\' sh {python} "$@"'
OTHER_HOST = 'exec unshare --uts sh -c \'hostname host-b; exec "$@"\' sh {python} "$@"'


# -- in the processes --------------------------------------------------------------------------------------------------


class Rank(inspected.Side):
    """An engine that can do and suffer more.

    Args:
        log_options: Fields of its `LogConfig`.
        ahead_s: How far the wall clock of its host is ahead.
        major: Version of the protocol that it speaks, if another.
    """

    def __init__(
        self, *, log_options: dict[str, Any] | None = None, ahead_s: float = 0.0, major: int = 0, **setup: Any
    ) -> None:
        if log_options:
            vars(inspected)["LogConfig"] = functools.partial(LogConfig, **log_options)
        now, self._ahead_s = time.time, ahead_s
        time.time = lambda: now() + self._ahead_s
        if major:
            for module in (outbox, peer, peers, wire):
                module.MAJOR = major  # type: ignore[attr-defined]
        super().__init__(**setup)

    async def drain(self) -> None:
        """End what is under way, and begin nothing new."""
        await self.engine.drain(30.0)

    async def sleep(self) -> None:
        """Let go of the memory, as vLLM's sleep does, and take it again."""
        await self.engine.suspend()
        await self.engine.resume()

    def crash(self) -> None:
        """End as a process does that cannot go on."""
        os._exit(1)

    def announce_often(self, params: dict[str, Any], times: int) -> None:
        """Announce one request under so many ids."""
        for number in range(100, 100 + times):
            self.engine.announce(f"req-{number}", params, wait_s=3.0)

    def jump(self, seconds: float) -> None:
        """Put the wall clock forward or back."""
        self._ahead_s += seconds

    def reclaim(self, blocks: int) -> int:
        """Take lent blocks back for other prompts."""
        return self.engine.reclaim(blocks)

    async def pull_at_once(self, first: int, params: list[dict[str, Any]]) -> list[str]:
        """Pull several requests, all at one moment."""
        return await asyncio.gather(*(self.pull(n, each, n % 32) for n, each in enumerate(params, first)))

    async def pull_tokens(self, number: int, params: dict[str, Any], tokens: int) -> str:
        """Pull more or fewer tokens than are lent."""
        try:
            await self.engine.pull(f"req-{number}", [(0, [0, 1])], params, num_tokens=tokens)
        except AsyncKVError as exc:
            return type(exc).__name__
        return "complete"


class Desk(Rank):
    """An engine with a desk on its own loop. Its embedder gives orders, and never takes a result."""

    async def __aenter__(self) -> Desk:
        await super().__aenter__()
        self._desk = EngineDesk(self.engine)
        return self

    async def order(self, number: int, params: dict[str, Any]) -> None:
        self._desk.submit([Pull(request_id=f"req-{number}", groups=[(0, [number])], params=params)])


class Stepper(Rank):
    """An engine on a thread of its own. Its embedder makes steps while it has work, and none while it has not."""

    async def __aenter__(self) -> Stepper:
        self.thread = EngineThread(self.engine.config, self.engine.registration)
        self.engine, self._scheduler = self.thread.engine, Scheduler(self.thread, 0.01)
        await asyncio.to_thread(self.thread.start)
        self._scheduler.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.thread.close, 2.0)

    def hang(self, *, with_orders: bool = False) -> None:
        """Have the embedder make no more steps, or submit all orders that wait, and take no results of them."""
        (self._scheduler.hang_in_step if with_orders else self._scheduler.hang)()

    def forget(self) -> None:
        """Have the embedder make steps that give orders, and take no results."""
        self._scheduler.forget()

    def go_on(self) -> None:
        """Have the embedder make steps again."""
        self._scheduler.go_on()

    def lend_it(self, params: dict[str, Any], ticket: str = "") -> None:
        self._scheduler.give(Lend(params))

    def lend(self, number: int, first: int = 0) -> list[dict[str, Any]]:
        params = [self.make(n) for n in range(first, first + number)]
        self._scheduler.give(*map(Lend, params))
        return params

    def announce(self, number: int, params: dict[str, Any], wait_s: float | None = None) -> str:
        self._scheduler.give(Announce(f"req-{number}", params, wait_s))
        return ""

    async def pull(
        self, number: int, params: dict[str, Any], block: int = 0, timeout_s: float = 2.0, is_last: bool = True
    ) -> str:
        options: dict[str, Any] = {"timeout_s": timeout_s, "is_last": is_last}
        order = Pull(request_id=f"req-{number}", groups=[(0, [block])], params=params, **options)
        return await self._scheduler.ended(order)


# -- cases -------------------------------------------------------------------------------------------------------------

CASES: dict[str, Fault] = {}
case = functools.partial(fault, CASES)
STEPPER = {"target": "Stepper"}
STEPS = r"scheduler|embedder|main loop|\bsteps?\b|take_finished|py-spy"
LENT = r"\blen[dt]s?\b"


class Fresh(Service):
    """A service, and what befalls it."""

    faults = CASES
    target = "tests.lab.why_fresh:Rank"

    async def start(self, name: str, *, target: str = "", shell: str = "", **setup: Any) -> Process:
        if target:
            setup["target"] = self.target.replace("Rank", target)
        if shell:
            script = self.directory.parent / f"{name}.sh"
            script.write_text(f"#!/bin/sh\n{shell.format(python=sys.executable)}\n")
            script.chmod(0o755)
            setup["python"] = str(script)
        return await super().start(name, **setup)

    async def hears(self, name: str, event: str, times: int = 1) -> None:
        """Wait until a log has an event so many times."""
        await self.until(lambda: sum(x["event"] == event for x in self.lines(name)) >= times)

    async def lives(self, seconds: float) -> None:
        """Let the service go on for a while, which is what some faults are made of."""
        await asyncio.sleep(seconds)

    async def throttle(self, *processes: Process, seconds: float) -> None:
        """Give processes together a thousandth of a processor, as a container's limit may."""
        with self.grouped(CPU, processes) as group:
            (group / "cpu.cfs_period_us").write_text("1000000")
            (group / "cpu.cfs_quota_us").write_text("1000")
            await asyncio.sleep(seconds)

    async def decode_pair(self, sizes: Sequence[int] = (2, 2), **setup: Any) -> list[Process]:
        return [await self.start(f"decode.{x}", rank=x, ranks=n, **setup) for x, n in enumerate(sizes)]

    async def prefill_pair(self) -> tuple[list[Process], list[Any]]:
        pair = [await self.start(f"pair.{x}", rank=x, ranks=2) for x in range(2)]
        return pair, [await x.ask("endpoint") for x in pair]

    # -- 1: well is a claim --------------------------------------------------------------------------------------------

    @case(1, "DROPPED STOPPED", r"decode/tp1", guilty="decode.1", knows="logs live both")
    async def half_an_order(self) -> None:
        """Rank 0 of decode gets the order to pull; rank 1 has announced the request, and renews it for ever."""
        first, second = await self.decode_pair()
        params = await self.lend()
        await second.ask("announce", number=1, params=params, wait_s=300.0)
        assert await first.ask("pull", number=1, params=params) == "complete"
        await self.hears("prefill", "lease_held", 3)
        await self.idle()

    @case(1, "STOPPED", r"pair/tp1", LENT, guilty="pair.1", knows="logs live both decode")
    async def a_prefill_rank_never_lends(self) -> None:
        """Rank 1 of prefill never gets the order to lend; the pull has a minute, and waits."""
        pair, ends = await self.prefill_pair()
        params = await pair[0].ask("make", number=1, endpoints=ends)
        await pair[0].ask("lend_it", params=params)
        await self.decode.ask("begin", number=1, params=params, timeout_s=60.0)
        await self.hears("decode", "pull_held", 3)
        await self.idle()

    @case(1, "NEVER_CAME", r"router|never|heard", guilty="", knows="logs live both", prefill={"lease_s": 24.0})
    async def params_that_got_lost_and_a_long_lease(self) -> None:
        """The router loses the params of a request, and its lease still runs; all engines are well."""
        await self.lend()
        await self.hears("prefill", "lease_held")
        await self.lives(GRANT_S)

    @case(1, open="logs prefill decode")
    async def an_engine_without_a_log(self) -> None:
        """One decode engine has no log, but answers; all are well, which logs alone cannot tell."""
        silent = await self.start("silent", log="")
        assert await silent.ask("pull", number=1, params=await self.lend()) == "complete"
        del self.processes["silent"]  # whose log nobody can wait for
        await self.idle()

    @case(1, open="logs")
    async def a_rank_without_a_log(self) -> None:
        """Rank 1 of prefill has no log, but answers; a read from both ranks is complete."""
        pair = [await self.start(f"pair.{x}", rank=x, ranks=2, log="" if x else "pair.0") for x in range(2)]
        params = await pair[0].ask("make", number=1, endpoints=[await x.ask("endpoint") for x in pair])
        for rank in pair:
            await rank.ask("lend_it", params=params)
        assert await self.decode.ask("pull", number=1, params=params) == "complete"
        del self.processes["pair.1"]  # whose log nobody can wait for
        await self.idle()

    # -- 2: more evidence never knows less -----------------------------------------------------------------------------

    @case(
        2,
        "DROPPED",
        r"decode/tp1",
        guilty="decode.1",
        knows="logs both prefill",
        prefill={"log_options": {"max_bytes": 6000, "backups": 1}},
    )
    async def a_silent_rank_and_a_log_that_was_rotated(self) -> None:
        """Rank 1 of decode never hears of a request; the beginning of prefill's log is gone."""
        first, _ = await self.decode_pair()
        for number in range(50, 70):
            assert await self.other.ask("pull", number=number, params=await self.lend(number)) == "complete"
        assert await first.ask("pull", number=1, params=await self.lend()) == "complete"
        await self.expired()
        await self.idle()
        assert not any(x["event"] == "engine_started" for x in self.lines("prefill"))

    @case(2, "WRONG", r"changed|request id", knows="logs both prefill")
    async def an_id_changed_and_a_log_that_was_cut(self) -> None:
        """The router changes an id; later `copytruncate` empties decode's log, and it goes on from there."""
        await self.fails(await self.lend() | {"request_id": "changed"})
        log = next(x for x in self.directory.glob("decode-*.jsonl"))
        os.truncate(log, 0)
        await self.idle()

    @case(2, "DROPPED", r"999|\bblocks?\b", knows="logs both decode", decode={"log_options": {"level": "warning"}})
    async def a_log_of_warnings_only(self) -> None:
        """Decode's log has level warning; its scheduler gives blocks that do not exist."""
        await self.fails(await self.lend(), block=999)
        await self.lives(GRANT_S)

    @case(2, "DROPPED WRONG", r"decode/tp1", r"changed", guilty="decode.1 other", knows="logs both prefill")
    async def two_faults_at_once(self) -> None:
        """Rank 1 of decode never hears of one request; the router changes the id of another, for another engine."""
        first, _ = await self.decode_pair()
        params = [await self.lend(x) for x in (1, 2)]
        assert await first.ask("pull", number=1, params=params[0]) == "complete"
        assert await self.other.ask("pull", number=2, params=params[1] | {"request_id": "changed"}) != "complete"
        for number in (1, 2):
            await self.says("prefill", "lease_ended", request_id=f"cmpl-{number}")
        await self.idle()

    # -- 3: silence of an embedder -------------------------------------------------------------------------------------

    @case(3, "STOPPED", r"decode/tp0", STEPS, knows="logs both decode", decode=STEPPER)
    async def decode_hangs_with_announcements(self) -> None:
        """The main loop of decode hangs after it has announced two requests; the engine's thread lives."""
        params = [await self.lend(x) for x in (1, 2)]
        for number, each in enumerate(params, 1):
            await self.decode.ask("announce", number=number, params=each)
            await self.says("prefill", "lease_granted", request_id=f"cmpl-{number}")
        await self.decode.ask("hang")
        for number in (1, 2):
            await self.says("prefill", "lease_ended", request_id=f"cmpl-{number}")
        await self.idle()

    @case(3, "STOPPED", r"decode/tp0", STEPS, knows="logs live both decode", decode=STEPPER)
    async def decode_hangs_with_results(self) -> None:
        """The main loop of decode hangs, and two pulls have completed that nobody takes."""
        params = [await self.lend(x) for x in (1, 2)]
        await self.decode.ask("hang")
        for number, each in enumerate(params, 1):
            await self.decode.ask("begin", number=number, params=each, block=number)
        await self.decode.ask("hang", with_orders=True)
        for number in (1, 2):
            await self.says("prefill", "lease_ended", request_id=f"cmpl-{number}", cause="released")
        await self.lives(3 * LEASE_S)
        await self.idle()

    @case(3, "STOPPED", r"decode/tp0", STEPS, knows="logs both decode", decode=STEPPER)
    async def decode_hung_for_a_while(self) -> None:
        """The main loop of decode hangs for two leases after it has announced a request, and then goes on."""
        await self.announced()
        await self.decode.ask("hang")
        await self.expired()
        await self.lives(LEASE_S)
        await self.decode.ask("go_on")
        assert await self.decode.ask("pull", number=2, params=await self.lend(2)) == "complete"
        await self.idle()

    @case(3, "STOPPED", r"prefill/tp0", LENT, knows="logs live both decode", guilty="prefill", prefill=STEPPER)
    async def prefill_hangs_before_it_lends(self) -> None:
        """The main loop of prefill hangs when the params are out; the engine's thread lives, and parks claims."""
        await self.prefill.ask("hang")
        for number, decode in ((1, self.decode), (2, self.other)):
            params = await self.prefill.ask("make", number=number)
            await decode.ask("begin", number=number, params=params, timeout_s=60.0)
        await self.hears("decode", "pull_held", 3)
        await self.idle()

    @case(3, "STOPPED", r"prefill/tp0", STEPS, knows="logs live both prefill", guilty="prefill", prefill=STEPPER)
    async def prefill_hangs_with_results(self) -> None:
        """The main loop of prefill hangs when two requests were read, so it never has their blocks back."""
        params = [await self.prefill.ask("make", number=x) for x in (1, 2)]
        await self.prefill.ask("hang")
        for each in params:
            await self.prefill.ask("lend_it", params=each)
        await self.prefill.ask("hang", with_orders=True)
        for number, each in enumerate(params, 1):
            assert await self.decode.ask("pull", number=number, params=each, block=number) == "complete"
        await self.lives(3 * LEASE_S)
        await self.idle()

    @case(3, prefill=STEPPER, decode=STEPPER)
    async def idle_embedders_make_no_steps(self) -> None:
        """Both main loops have nothing to do for three leases: as vLLM's, they wait for a request."""
        assert await self.decode.ask("pull", number=1, params=await self.lend()) == "complete"
        await self.lives(3 * LEASE_S)
        await self.idle()

    @case(3, "STOPPED", r"decode/tp0", STEPS, knows="logs live both decode", decode=STEPPER)
    async def an_embedder_that_takes_no_results(self) -> None:
        """The main loop of decode goes on giving orders, and never calls `take_finished` any more."""
        await self.decode.ask("forget")
        for number in range(1, 4):
            await self.decode.ask("begin", number=number, params=await self.lend(number), block=number)
            await self.says("prefill", "lease_ended", request_id=f"cmpl-{number}", cause="released")
            await self.lives(LEASE_S)
        await self.idle()

    @case(3, "STOPPED", r"decode/tp0", STEPS, knows="logs live both decode", decode={"target": "Desk"})
    async def a_desk_whose_results_nobody_takes(self) -> None:
        """Two pulls that a desk was given have completed, and its user never takes the results."""
        for number in (1, 2):
            await self.decode.ask("order", number=number, params=await self.lend(number))
            await self.says("prefill", "lease_ended", request_id=f"cmpl-{number}", cause="released")
        await self.lives(3 * LEASE_S)
        await self.idle()

    # -- 4: pids belong to a namespace ---------------------------------------------------------------------------------

    @case(4, decode={"shell": NAMESPACE})
    async def a_container_with_the_name_of_its_host(self) -> None:
        """Decode has pids of its own, and prefill has those of the host (`hostNetwork`); both are well."""
        await self.lives(LEASE_S)
        await self.idle()

    @case(
        4,
        "LEASE DROPPED",
        r"announce_s|wait_s",
        knows="logs both decode",
        prefill={"shell": NAMESPACE},
        decode={"shell": NAMESPACE, "pull": PULL | {"announce_s": 1.5}},
    )
    async def announced_too_shortly_in_containers(self) -> None:
        """Each container has its pids; decode's queue is longer than `announce_s`, so the pull is refused."""
        params = await self.announced()
        await self.expired()
        assert await self.decode.ask("pull", number=1, params=params) != "complete"
        await self.idle()

    # -- 5: every reason has a cause -----------------------------------------------------------------------------------

    @case(5, "WRONG DROPPED", r"cohort|\bTP\b|tp_size|size", guilty="decode.0 decode.1", knows="logs both decode")
    async def ranks_with_different_sizes(self) -> None:
        """Rank 0 of decode was started as one of two, rank 1 as one of four."""
        first, second = await self.decode_pair((2, 4))
        params = await self.lend()
        assert await first.ask("pull", number=1, params=params) == "complete"
        assert await second.ask("pull", number=1, params=params) != "complete"
        await self.expired()
        await self.idle()

    @case(5, "STOPPED LEASE WRONG", r"pair/tp1", LENT, guilty="pair.1", knows="logs both decode")
    async def an_order_to_lend_that_was_lost(self) -> None:
        """Rank 1 of prefill does not get one order to lend, and gets the next one; the pull fails in time."""
        pair, ends = await self.prefill_pair()
        params = [await pair[0].ask("make", number=x, endpoints=ends) for x in (1, 2)]
        for rank, lent in ((pair[0], params), (pair[1], params[1:])):
            for each in lent:
                await rank.ask("lend_it", params=each)
        assert await self.decode.ask("pull", number=2, params=params[1], block=2) == "complete"
        assert await self.decode.ask("pull", number=1, params=params[0]) != "complete"
        await self.expired("pair.0")
        await self.idle()

    @case(5, "WRONG DROPPED", r"protocol|version|upgrade", guilty="newer", knows="logs both prefill decode")
    async def another_version_of_the_protocol(self) -> None:
        """A decode engine of the next major version meets this prefill engine."""
        newer = await self.start("newer", major=2)
        assert await newer.ask("pull", number=1, params=await self.lend()) != "complete"
        await self.expired()
        await self.idle()

    @case(5, "WRONG DROPPED", r"overload|attempts|\b70\b|more than once|twice|same params|same key", most=1)
    async def a_router_that_repeats_itself(self) -> None:
        """The params of one request reach decode under 70 ids."""
        params = await self.lend()
        await self.decode.ask("announce_often", params=params, times=70)
        await self.lives(2.0)
        await self.decode.ask("pull", number=100, params=params)
        await self.expired()
        await self.idle()

    @case(5)
    async def aborts_that_both_sides_hear_of(self) -> None:
        """Clients leave, and prefill withdraws their requests, as documented: one before it is lent, one after it."""
        params = [await self.prefill.ask("make", number=1), await self.lend(2)]
        for number, each in enumerate(params, 1):
            await self.decode.ask("announce", number=number, params=each)
        await self.says("prefill", "lease_granted", request_id="cmpl-2")
        for each in params:
            await self.prefill.ask("withdraw", params=each)
        await self.says("prefill", "lease_ended", request_id="cmpl-2", cause="revoked")
        for number, each in enumerate(params, 1):
            assert await self.decode.ask("pull", number=number, params=each, block=number) != "complete"
        await self.idle()

    @case(
        5,
        "LEASE",
        r"reclaim|\broom\b|no_room|memory|taken back",
        most=1,
        knows="logs both prefill",
        prefill={"lease_s": 60.0},
    )
    async def blocks_that_were_taken_back(self) -> None:
        """Requests wait long in decode's queue; prefill needs their blocks (`reclaim`), so that some pulls fail."""
        params = {number: await self.lend(number) for number in range(30, 54)}
        for number, each in params.items():
            await self.decode.ask("announce", number=number, params=each)
        while (await self.prefill.ask("states")).count("granted") < len(params):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await self.lives(2 * GRANT_S)
        assert await self.prefill.ask("reclaim", blocks=8)
        await self.says("prefill", "lease_ended", cause="revoked")
        pulls = [await self.decode.ask("pull", number=x, params=p, block=x % 32) for x, p in params.items()]
        assert 0 < pulls.count("complete") < len(pulls)
        await self.idle()

    @case(
        5, "DROPPED LEASE", r"max_queued|\bqueued?\b", most=1, knows="logs both decode", decode={"pull": ONE_AT_A_TIME}
    )
    async def a_queue_that_is_full(self) -> None:
        """Decode is given eight pulls at once, and its queue takes one; its scheduler drops the others."""
        params = [await self.lend(number) for number in range(1, 9)]
        assert "Overloaded" in await self.decode.ask("pull_at_once", first=1, params=params)
        for number in range(1, 9):
            await self.says("prefill", "lease_ended", request_id=f"cmpl-{number}")
        await self.idle()

    @case(5, "DROPPED WRONG", r"\btokens?\b", knows="logs both decode")
    async def more_tokens_than_were_lent(self) -> None:
        """Decode's scheduler asks for 32 tokens of a request, of which 16 were lent."""
        assert await self.decode.ask("pull_tokens", number=1, params=await self.lend(), tokens=32) != "complete"
        await self.expired()
        await self.idle()

    # -- 6: directions and parties -------------------------------------------------------------------------------------

    @case(
        6,
        "WRONG",
        r"stranger",
        r"\bkeys?\b",
        guilty="guarded stranger-2",
        knows="logs both prefill decode",
        never=r"copy (the )?(public key of )?(prefill|guarded)",
    )
    async def a_new_key_of_decode(self) -> None:
        """Decode was started again with a new key, which is not in prefill's directory yet."""
        secrets, known = self.directory.parent / "secrets", {}
        for name in ("guarded", "stranger", "stranger-2"):
            known[name] = self.directory.parent / f"known-to-{name}"
            known[name].mkdir()
        secrets.mkdir()
        pairs = {name: write_pair(secrets, name, make_pair()) for name in known}
        shutil.copy(pairs["stranger"][1], known["guarded"])
        for name in ("stranger", "stranger-2"):
            shutil.copy(pairs["guarded"][1], known[name])
        keys = {x: {"secret": str(pairs[x][0]), "authorized": str(known[x])} for x in known}
        guarded = await self.start("guarded", keys=keys["guarded"])
        stranger = await self.start("stranger", keys=keys["stranger"])
        [params] = await guarded.ask("lend", number=1, first=9)
        assert await stranger.ask("pull", number=9, params=params) == "complete"
        await stranger.end()
        stranger = await self.start("stranger-2", keys=keys["stranger-2"])
        [params] = await guarded.ask("lend", number=1, first=1)
        assert await stranger.ask("pull", number=1, params=params) != "complete"
        await self.expired("guarded")
        await self.idle()

    @case(6, "WRONG GONE", r"suspend|resum|sleep", guilty="prefill", never=r"\bdied\b|killed|crash")
    async def params_of_before_a_sleep(self) -> None:
        """Prefill slept and woke while the params were under way: its process is the same, its memory is not."""
        params = await self.lend()
        await self.prefill.ask("sleep")
        assert await self.decode.ask("pull", number=1, params=params) != "complete"
        await self.idle()

    @case(
        6, "LEASE DROPPED", r"timeout_s", guilty="decode prefill", also={"decode": "STOPPED"}, knows="logs both decode"
    )
    async def decode_gives_up_before_prefill_lends(self) -> None:
        """Params come early, decode's `timeout_s` is 2 s, and the prompt takes a second longer to compute."""
        params = await self.prefill.ask("make", number=1)
        assert await self.decode.ask("pull", number=1, params=params, timeout_s=2.0) != "complete"
        await self.lives(1.0)
        await self.prefill.ask("lend_it", params=params)
        await self.expired()
        await self.idle()

    # -- 7: roles in time ----------------------------------------------------------------------------------------------

    @case(
        7,
        "GONE",
        r"\b(5|five)\b",
        guilty="decode decode-2 decode-3 decode-4 decode-5",
        most=1,
        knows="logs both decode",
    )
    async def a_crash_loop(self) -> None:
        """Decode ends by itself five times, soon after each start."""
        await self.announced()
        for name in ("decode", "decode-2", "decode-3", "decode-4", "decode-5"):
            process = self.processes[name] if name == "decode" else await self.start(name)
            with contextlib.suppress(Exception):
                await process.ask("crash")
            await self.until(functools.partial(operator.attrgetter("is_lost"), process))
        await self.expired()
        await self.idle()

    @case(7, "GONE", r"closed|in order", guilty="decode other", also={"prefill": "NEVER_CAME", "live": "NEVER_CAME"})
    async def lent_when_all_readers_were_closed(self) -> None:
        """Every decode engine was closed in order, and then two requests are lent."""
        for process in (self.decode, self.other):
            await process.end()
        await self.lives(1.0)
        for number in (1, 2):
            await self.lend(number)
        await self.expired()
        await self.idle()

    @case(7, "GONE WRONG", r"drain|closed|in order", guilty="prefill", never=r"\bdied\b|killed|crash")
    async def params_of_an_engine_that_drains(self) -> None:
        """Prefill made params, then drains for its end before it lends; decode pulls in vain."""
        params = await self.prefill.ask("make", number=1)
        await self.prefill.ask("drain")
        assert await self.decode.ask("pull", number=1, params=params) != "complete"
        await self.prefill.end()
        await self.idle()

    @case(7, "DROPPED", r"999|\bblocks?\b", knows="logs both decode")
    async def two_engines_with_one_id(self) -> None:
        """Two live decode engines have the same id; one of them is given blocks that do not exist."""
        twin = await self.start("decode-2")
        assert await twin.ask("pull", number=2, params=await self.lend(2)) == "complete"
        await self.fails(await self.lend(), block=999)
        assert await twin.ask("pull", number=3, params=await self.lend(3), block=3) == "complete"
        await self.idle()

    @case(7, decode={"shell": OTHER_HOST, "ahead_s": -3600.0})
    async def a_clock_that_is_an_hour_behind(self) -> None:
        """Decode's host is an hour behind; it reads a request, and is closed in order."""
        assert await self.decode.ask("pull", number=1, params=await self.lend()) == "complete"
        await self.idle()
        await self.decode.end()
        assert await self.other.ask("pull", number=2, params=await self.lend(2)) == "complete"
        await self.idle()

    @case(
        7, "GONE", r"clos|in order|restart", guilty="prefill", never=r"\bdied\b|killed|crash", knows="logs both decode"
    )
    async def prefill_restarted_in_order_under_load(self) -> None:
        """Prefill is closed in order and started again between reads; one request is announced before, pulled after."""
        params = await self.announced()
        assert await self.other.ask("pull", number=2, params=await self.lend(2), block=2) == "complete"
        await self.prefill.end()
        self.prefill = await self.start("prefill-2")
        assert await self.decode.ask("pull", number=1, params=params) != "complete"
        for number, decode in ((3, self.decode), (4, self.other), (5, self.decode)):
            assert await decode.ask("pull", number=number, params=await self.lend(number), block=number) == "complete"
        await self.idle()

    @case(7)
    async def a_clock_that_jumps(self) -> None:
        """The clock of decode's host is put back by half an hour, and forward by an hour, between reads."""
        for number, seconds in ((1, -1800.0), (2, 3600.0), (3, 0.0)):
            assert await self.decode.ask("pull", number=number, params=await self.lend(number)) == "complete"
            await self.decode.ask("jump", seconds=seconds)
            await self.idle()

    # -- 8: noise ------------------------------------------------------------------------------------------------------

    @case(8, prefill={"lease_s": 60.0, "grant_s": 20.0})
    async def a_host_that_paused(self) -> None:
        """All processes had no processor for 3 s at once, and no request was late by it."""
        params = await self.announced()
        with self.frozen(self.prefill, self.decode, self.other):
            await self.lives(3.0)
        assert await self.decode.ask("pull", number=1, params=params) == "complete"
        await self.expired()
        await self.idle()

    @case(8, "STOPPED", r"\bhost|processor|at once|\ball\b|every", guilty="prefill decode other", most=1)
    async def a_host_that_paused_for_too_long(self) -> None:
        """All processes had no processor for 7 s at once, and a lease ran out meanwhile."""
        await self.announced()
        with self.frozen(self.prefill, self.decode, self.other):
            await self.lives(7.0)
        await self.expired()
        await self.idle()

    @case(8, "STOPPED", r"throttl|cgroup|limit|quota", guilty="prefill decode other", most=1, also={"decode": "LEASE"})
    async def a_limit_of_processor_time(self) -> None:
        """A cgroup gives all engines a thousandth of a processor for 9 s; pulls fail by it."""
        params = [await self.lend(number) for number in (1, 2)]
        limit = asyncio.create_task(self.throttle(self.prefill, self.decode, self.other, seconds=12.0))
        await self.lives(0.5)
        pulls = [self.decode.ask("pull", number=x, params=params[x - 1], block=x) for x in (1, 2)]
        assert await asyncio.gather(*pulls) != ["complete", "complete"]
        await limit
        await self.idle()


if __name__ == "__main__":
    main(Fresh, __doc__)
