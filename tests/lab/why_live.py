"""Causes injected into real processes, and what `asynckv why` says of them: right, honestly not known, or wrong.

Each cause has a service of its own: a prefill engine and two decode engines, on real NIXL and ZMQ, in a directory with
their logs and sockets. When the cause has had its effect, and the service still runs, `asynckv why` is asked in five
ways: with all logs, with the sockets, with both, with the prefill side's log alone, and with the decode side's alone.

  right      Each finding has a heading and a code that the cause may have, and none is about a healthy process; of a
             healthy service: all is well, or "not judged" where one side's logs are missing.
  not known  The answer says that the cause is not known; or it says nothing, and that way nothing is left to be seen.
  wrong      The answer says something else, blames a healthy process, or makes several findings of one.
  missed     The answer says that all is well, and that way could have known better.

A right look *names the cause* if its findings hold the words without which an operator would not find the spot.
`tests.lab.why_fresh` has more causes for the same services and the same judge.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import typer

from asynckv.edges.control.zmq import make_pair
from asynckv.keys import write_pair
from asynckv.tools.diagnose.causes import HEADING
from asynckv.tools.diagnose.why_cli import why
from tests.lab.fleet import Fleet, Process
from tests.lab.strangers import Proxy

PATIENCE_S = 40.0
LEASE_S, GRANT_S = 4.0, 2.0
PULL = {"handshake_s": 1.0, "release_timeout_s": 2.0, "timeout_s": 5.0, "gone_s": 4.0}
ONE_AT_A_TIME = PULL | {"total_requests": 1, "window_requests": 1, "max_queued": 1}
FREEZER = Path("/sys/fs/cgroup/freezer")
NAMES = ("prefill", "decode", "other")
OWNERS = ("prefill", "pair", "guarded")  # how the names of prefill engines begin
WAYS = ("logs", "live", "both", "prefill", "decode")
ONE_SIDE = ("prefill", "decode")
RIGHT, OPEN, WRONG, MISSED = "right", "not known", "wrong", "missed"
NOT_JUDGED = 3  # the exit status
TICKET, OTHER = "5f" * 16, "a0" * 16


class Service:
    """Engines in a directory with their logs and their sockets.

    Attributes:
        faults: What may befall it, by name.
        target: What runs in the engines' processes.
    """

    faults: ClassVar[dict[str, Fault]]
    target = "tests.inspected:Side"
    prefill: Process
    decode: Process
    other: Process

    def __init__(self, fleet: Fleet, directory: Path, stack: contextlib.AsyncExitStack) -> None:
        self.directory, self._fleet, self._stack = directory, fleet, stack
        self.processes: dict[str, Process] = {}

    async def start(self, name: str, *, target: str = "", python: str = sys.executable, **setup: Any) -> Process:
        """Start an engine; `pair.1` is a rank of the engine `pair`, `decode-2` a later start of `decode`."""
        setup = {"lease_s": LEASE_S, "grant_s": GRANT_S, "log": name, "pull": PULL, **setup}
        setup |= {"name": name.partition(".")[0].partition("-")[0], "directory": str(self.directory)}
        process = await self._fleet.start(name, target or self.target, python=python, **setup)
        self.processes[name] = process
        await process.ask("address", PATIENCE_S)  # it has started
        if setup["log"] and "level" not in setup.get("log_options", {}):
            await self.says(name, "engine_started")
        return process

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of an engine's logs so far, those of rotated files first; the last may not be whole yet."""
        return [
            json.loads(line)
            for path in sorted(self.directory.glob(f"{name}-*.jsonl*"), reverse=True)
            if re.fullmatch(rf"{re.escape(name)}-\d+\.jsonl(\.\d+)?", path.name)
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]

    async def says(self, name: str, event: str, since: int = 0, **fields: Any) -> None:
        """Wait until a log has such a line, behind so many others."""
        wanted = {"event": event, **fields}.items()
        await self.until(lambda: any(wanted <= x.items() for x in self.lines(name)[since:]))

    async def until(self, what: Callable[[], object]) -> None:
        """Wait until something holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not what():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def lend(self, number: int = 1) -> dict[str, Any]:
        [params] = await self.prefill.ask("lend", number=1, first=number)
        return dict(params)

    async def announced(self, change: Callable[[Any], Any] = dict, **options: Any) -> dict[str, Any]:
        """Lend a request, and have it announced and granted; the reader is given changed params."""
        params = await self.lend()
        await self.decode.ask("announce", number=1, params=change(params), **options)
        await self.says("prefill", "lease_granted", request_id="cmpl-1")
        return params

    async def followed(self, wait_s: float = 2.0) -> None:
        """Have a ticket followed, until the prefill rank has parked the follower."""
        endpoint = await self.prefill.ask("endpoint")
        await self.decode.ask("begin", follows=True, number=1, endpoint=endpoint, ticket=TICKET, wait_s=wait_s)
        async with asyncio.timeout(PATIENCE_S):
            while not await self.prefill.ask("gauge", name="followers"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def expired(self, name: str = "prefill") -> None:
        """Wait until the lease is over."""
        await self.says(name, "lease_ended", request_id="cmpl-1")

    async def fails(self, params: dict[str, Any], **options: Any) -> None:
        """Have a request pulled in vain, and wait until its lease is over."""
        assert await self.decode.ask("pull", number=1, params=params, **options) != "complete"
        await self.expired()

    async def idle(self) -> None:
        """Wait until each engine that lives gives one more sign of life."""
        for name, process in self.processes.items():
            if not process.is_lost:
                await self.says(name, "engine_alive", len(self.lines(name)))

    async def proxy(self, params: dict[str, Any]) -> Proxy:
        """Stand between a request's readers and its owner."""
        return await self._stack.enter_async_context(Proxy(params["endpoints"][0]["address"]))

    async def tp(self) -> dict[str, Any]:
        """Lend a request on both ranks of an engine `pair`, and have it announced and granted."""
        ranks = [await self.start(f"pair.{x}", rank=x, ranks=2) for x in range(2)]
        params: dict[str, Any] = await ranks[0].ask(
            "make", number=1, endpoints=[await x.ask("endpoint") for x in ranks]
        )
        for rank in ranks:
            await rank.ask("lend_it", params=params)
        await self.decode.ask("announce", number=1, params=params)
        for name in ("pair.0", "pair.1"):
            await self.says(name, "lease_granted", request_id="cmpl-1")
        return params

    @contextlib.contextmanager
    def grouped(self, hierarchy: Path, processes: Sequence[Process]) -> Iterator[Path]:
        """Keep processes in a cgroup of their own, as those of a container are; yields its folder."""
        group = hierarchy / f"asynckv-{os.getpid()}-{processes[0].pid}"
        group.mkdir()
        try:
            for each in processes:
                (group / "cgroup.procs").write_text(str(each.pid))
            yield group
        finally:
            for each in processes:
                (hierarchy / "cgroup.procs").write_text(str(each.pid))
            group.rmdir()

    @contextlib.contextmanager
    def frozen(self, *processes: Process) -> Iterator[None]:
        """Take the processor away from processes, as a container is paused."""
        with self.grouped(FREEZER, processes) as group:
            (group / "freezer.state").write_text("FROZEN")
            try:
                yield
            finally:
                (group / "freezer.state").write_text("THAWED")

    async def ask(self, sources: Sequence[str], out: Path) -> Answer:
        """Run `asynckv why` as an operator runs it."""
        return await run_why(sources, out)

    def stop(self, process: Process) -> None:
        """Stop a process, until the service is over."""
        process.signal(signal.SIGSTOP)
        self._stack.callback(process.signal, signal.SIGCONT)


def at(params: dict[str, Any], address: str) -> dict[str, Any]:
    """Say that a request is at another address."""
    return params | {"endpoints": [x | {"address": address} for x in params["endpoints"]]}


# -- what is done ------------------------------------------------------------------------------------------------------


Inject = Callable[[Any], Awaitable[None]]
Answer = tuple[int, dict[str, Any]]
"""The exit status of `asynckv why`, and what it says."""


class Fault(NamedTuple):
    """Something that may befall a service, and the truth about it."""

    inject: Inject
    kind: int  # of the issue
    may: Mapping[str, frozenset[str]]  # headings, and codes; no code: any; no heading: all is well
    names: tuple[str, ...]  # patterns that findings hold which name the cause
    guilty: tuple[str, ...]  # processes, besides those of the prefill engine
    knows: frozenset[str]  # ways that may not say that all is well
    never: str  # pattern that no finding holds
    most: int  # findings
    open: frozenset[str]  # ways that have to say that something could not be judged, because all is well elsewhere
    also: dict[str, str]  # headings that one way may say besides, because it sees no more
    setup: dict[str, dict[str, Any]]  # of processes


def fault(
    table: dict[str, Fault],
    kind: int = 0,
    may: str = "",
    *names: str,
    guilty: str = "decode",
    knows: str = "logs both",
    never: str = "",
    most: int = 9,
    open: str = "",
    also: dict[str, str] | None = None,
    **setup: dict[str, Any],
) -> Callable[[Inject], Inject]:
    """Register a fault, with what may be said of it: `HEADING code code HEADING`."""
    said: dict[str, list[str]] = {}
    for word in may.split():
        if word in HEADING.__members__:
            codes = said[word] = []
        else:
            codes.append(word)
    truth = {heading: frozenset(each) for heading, each in said.items()}
    ways = frozenset(knows.split() if may else WAYS), never, most, frozenset(open.split()), also or {}

    def register(inject: Inject) -> Inject:
        table[inject.__name__] = Fault(inject, kind, truth, names, tuple(guilty.split()), *ways, setup)
        return inject

    return register


CAUSES: dict[str, Fault] = {}


def cause(
    may: str = "", *, guilty: str = "decode", live: bool = False, also: dict[str, str] | None = None, **setup: Any
) -> Callable[[Inject], Inject]:
    """Register a cause of which every way knows; where it leaves nothing behind (not `live`), sockets do not."""
    return fault(
        CAUSES, 0, may, guilty=guilty, knows=" ".join(x for x in WAYS if live or x != "live"), also=also, **setup
    )


GONE = "GONE died no_answer reader_died prefill_died"
STOPPED = "STOPPED stopped no_answer loop_was_away decode_loop_away prefill_loop_away decode_unresponsive"


class Injected(Service):
    """A service, and what may befall it."""

    faults = CAUSES

    async def ask(self, sources: Sequence[str], out: Path) -> Answer:
        """Ask in this process, which is quicker."""
        return await asyncio.to_thread(ask, sources, out)

    @cause(GONE, live=True)
    async def decode_killed_after_its_announcement(self) -> None:
        await self.announced()
        await self.decode.kill()
        await self.expired()

    @cause(GONE, live=True)
    async def the_only_decode_engine_killed(self) -> None:
        await self.other.end()
        await self.announced()
        await self.decode.kill()
        await self.expired()

    @cause(f"{GONE} NEVER_CAME never_heard_of", live=True)
    async def decode_killed_before_it_heard(self) -> None:
        await self.lend()
        await self.decode.kill()
        await self.expired()

    @cause(GONE, guilty="decode decode-2")
    async def decode_restarted_under_its_name(self) -> None:
        await self.announced()
        await self.decode.kill()
        await self.start("decode-2")
        await self.expired()

    @cause("GONE no_reader_runs")
    async def the_only_decode_engine_closed_in_order(self) -> None:
        await self.other.end()
        await self.decode.end()
        await self.lend()
        await self.expired()

    @cause("GONE reader_closed")
    async def decode_closed_without_its_release(self) -> None:
        proxy = await self.proxy(await self.prefill.ask("make", number=9))
        await self.announced(lambda x: at(x, proxy.address))
        proxy.flow.clear()
        await self.decode.end()
        await self.expired()

    @cause(GONE, live=True)
    async def prefill_killed_while_it_lends(self) -> None:
        await self.announced()
        await self.prefill.kill()
        await self.says("decode", "peer_changed", state="gone")
        await self.idle()

    @cause(GONE, guilty="prefill-2 decode")
    async def prefill_restarted_under_its_name(self) -> None:
        params = await self.announced()
        await self.prefill.kill()
        await self.start("prefill-2")
        assert await self.decode.ask("pull", number=1, params=params) != "complete"
        await self.idle()

    @cause("GONE prefill_closed")
    async def prefill_closed_while_it_lends(self) -> None:
        await self.announced()
        await self.prefill.end()
        await self.idle()

    @cause(GONE, guilty="pair.0 pair.1 decode", live=True)
    async def a_prefill_rank_killed_while_it_lends(self) -> None:
        await self.tp()
        await self.processes["pair.1"].kill()
        await self.says("decode", "peer_changed", state="gone")
        await self.idle()

    @cause(GONE, guilty="decode.0 decode.1", live=True)
    async def a_decode_rank_killed_after_its_announcement(self) -> None:
        pair = [await self.start(f"decode.{x}", rank=x, ranks=2) for x in range(2)]
        params = await self.lend()
        for rank in pair:
            await rank.ask("announce", number=1, params=params)
        await self.says("prefill", "lease_granted", request_id="cmpl-1", reader=str(self.lines("decode.1")[0]["rank"]))
        await pair[1].kill()
        await pair[0].ask("cancel", number=1, params=params)
        await self.expired()

    # -- stopped or blocked --------------------------------------------------------------------------------------------

    @cause(STOPPED, live=True)
    async def decode_stopped_after_its_announcement(self) -> None:
        await self.announced()
        self.stop(self.decode)
        await self.expired()

    @cause(STOPPED, live=True)
    async def decode_paused_by_its_container(self) -> None:
        await self.announced()
        self._stack.enter_context(self.frozen(self.decode))
        await self.expired()

    @cause(STOPPED, live=True)
    async def decode_stopped_before_it_heard(self) -> None:
        self.stop(self.decode)
        await self.lend()
        await self.expired()

    @cause(STOPPED, live=True)
    async def decode_loop_blocked_until_now(self) -> None:
        await self.announced()
        await self.decode.ask("block", seconds=20.0)
        await self.expired()

    @cause(STOPPED)
    async def decode_loop_was_blocked(self) -> None:
        await self.announced()
        await self.decode.ask("block", seconds=LEASE_S + 1.0)
        await self.expired()
        await self.idle()

    @cause(STOPPED, live=True)
    async def prefill_stopped_while_it_lends(self) -> None:
        await self.announced()
        self.stop(self.prefill)
        await self.says("decode", "peer_changed", state="gone")

    @cause(STOPPED)
    async def prefill_loop_was_blocked(self) -> None:
        params = await self.lend()
        await self.prefill.ask("block", seconds=LEASE_S + 3.0)
        await self.fails(params)
        await self.idle()

    @cause(STOPPED, guilty="pair.0 pair.1 decode", live=True)
    async def a_prefill_rank_stopped_while_it_lends(self) -> None:
        params = await self.tp()
        self.stop(self.processes["pair.1"])
        assert await self.decode.ask("pull", number=1, params=params, timeout_s=6.0) != "complete"

    # -- the network ---------------------------------------------------------------------------------------------------

    @cause("NETWORK never_shook_hands")
    async def params_with_a_wrong_port(self) -> None:
        await self.fails(at(await self.lend(), "tcp://127.0.0.1:9"))

    @cause("NETWORK never_shook_hands")
    async def a_network_that_swallows_everything(self) -> None:
        params = await self.lend()
        proxy = await self.proxy(params)
        proxy.flow.clear()
        await self.fails(at(params, proxy.address))

    @cause("NETWORK release_lost no_answer")
    async def a_network_that_swallows_the_release(self) -> None:
        proxy = await self.proxy(await self.prefill.ask("make", number=9))
        params = await self.announced(lambda x: at(x, proxy.address))
        proxy.flow.clear()
        await self.decode.ask("cancel", number=1, params=at(params, proxy.address))
        await self.expired()
        await self.says("decode", "release_unanswered")

    @cause("NETWORK release_lost connection_lost")
    async def a_network_that_is_cut_for_good(self) -> None:
        proxy = await self.proxy(await self.prefill.ask("make", number=9))
        await self.announced(lambda x: at(x, proxy.address))
        await proxy.__aexit__()
        await self.expired()
        await self.says("decode", "peer_changed", state="gone")

    # -- dropped or refused --------------------------------------------------------------------------------------------

    @cause("NEVER_CAME never_heard_of", guilty="")
    async def params_dropped_while_healthy_engines_idle(self) -> None:
        await self.lend()
        await self.expired()
        await self.idle()

    @cause("DROPPED PlanRefused")
    async def blocks_that_are_not_there(self) -> None:
        await self.fails(await self.lend(), block=999)

    @cause("DROPPED LocalProtocolError")
    async def blocks_that_another_pull_holds(self) -> None:
        waits = await self.prefill.ask("make", number=7)
        await self.decode.ask("begin", number=7, params=waits, timeout_s=20.0)
        await self.fails(await self.lend())
        await self.prefill.ask("lend_it", params=waits)

    @cause("DROPPED refused_locally", guilty="wide")
    async def a_geometry_that_does_not_fit(self) -> None:
        self.decode = await self.start("wide", head_dim=64)
        await self.fails(await self.lend())

    @cause("DROPPED Overloaded", decode={"pull": ONE_AT_A_TIME})
    async def a_queue_that_is_full(self) -> None:
        for number in (7, 8):
            waits = await self.prefill.ask("make", number=number)
            await self.decode.ask("begin", number=number, params=waits, block=number, timeout_s=5.0)
        await self.fails(await self.lend())

    @cause("DROPPED RemoteProtocolError")
    async def params_that_a_router_garbled(self) -> None:
        await self.fails(await self.lend() | {"endpoints": "none"})

    @cause("DROPPED announced_and_forgotten")
    async def announced_and_never_pulled(self) -> None:
        await self.announced(wait_s=2.0)
        await self.expired()

    @cause("DROPPED no_attempt_followed LEASE not_lent_in_time")
    async def another_attempt_promised_and_never_made(self) -> None:
        params = await self.prefill.ask("make", number=1)
        assert await self.decode.ask("pull", number=1, params=params, timeout_s=0.1, is_last=False) != "complete"
        await self.prefill.ask("lend_it", params=params)
        await self.expired()

    @cause("DROPPED rank_never_spoke", guilty="decode.1")
    async def a_decode_rank_that_never_pulls(self) -> None:
        pair = [await self.start(f"decode.{x}", rank=x, ranks=2) for x in range(2)]
        assert await pair[0].ask("pull", number=1, params=await self.lend()) == "complete"
        await self.expired()
        await self.idle()

    # -- a wrong address, key or id ------------------------------------------------------------------------------------

    @cause("WRONG other_request_id")
    async def id_changed_by_a_router(self) -> None:
        await self.fails(await self.lend() | {"request_id": "changed"})

    @cause("WRONG wrong_target")
    async def params_with_another_engines_address(self) -> None:
        await self.fails(at(await self.lend(), await self.other.ask("address")))

    @cause("WRONG stale_params")
    async def params_of_an_earlier_start(self) -> None:
        params = await self.lend()
        [endpoint] = params["endpoints"]
        await self.fails(params | {"endpoints": [endpoint | {"incarnation": endpoint["incarnation"][::-1]}]})

    @cause("WRONG keys_refused", guilty="guarded stranger")
    async def keys_that_are_not_known(self) -> None:
        await self._keys("guarded")

    async def _keys(self, unaware: str) -> None:
        """Start two engines with keys, of which one does not know the other's."""
        folder, found, public = self.directory.parent, dict[str, Any](), {}
        for name in ("guarded", "stranger"):
            secret, public[name] = write_pair(folder, name, make_pair())
            found[name] = {"secret": str(secret), "authorized": str(folder / f"known-by-{name}")}
        for name in found:
            (folder / f"known-by-{name}").mkdir()
            for other in found if name != unaware else [name]:
                shutil.copy(public[other], folder / f"known-by-{name}")
        guarded, stranger = [await self.start(x, keys=found[x]) for x in found]
        [params] = await guarded.ask("lend", number=1, first=1)
        assert await stranger.ask("pull", number=1, params=params) != "complete"
        await self.expired("guarded")

    @cause("WRONG listener_unlisted", guilty="guarded stranger")
    async def a_listeners_key_that_is_not_known(self) -> None:
        await self._keys("stranger")

    @cause("WRONG params_given_twice", guilty="other")
    async def params_sent_to_two_engines(self) -> None:
        params = await self.lend()
        outcomes = [await x.ask("pull", number=1, params=params) for x in (self.decode, self.other)]
        assert outcomes[0] == "complete" != outcomes[1]
        await self.idle()

    @cause("WRONG params_given_twice")
    async def params_sent_twice(self) -> None:
        params = await self.lend()
        outcomes = [await self.decode.ask("pull", number=x, params=params, block=x) for x in (1, 2)]
        assert outcomes[0] == "complete" != outcomes[1]
        await self.idle()

    # -- the lease against the queue -----------------------------------------------------------------------------------

    @cause("LEASE lease_too_short")
    async def pulled_when_its_lease_was_over(self) -> None:
        params = await self.lend()
        await self.expired()
        await self.fails(params)
        await self.idle()

    @cause("LEASE max_lease lease_too_short", prefill={"lease": {"max_lease_s": LEASE_S + 1.0}})
    async def renewed_until_the_longest_lease_was_over(self) -> None:
        await self.announced()
        await self.expired()

    @cause("LEASE release_too_early", prefill={"lease": {"parked_s": 0.3}})
    async def released_long_before_it_was_lent(self) -> None:
        params = await self.prefill.ask("make", number=1)
        await self.decode.ask("cancel", number=1, params=params)
        for parked in (1, 0):
            while await self.prefill.ask("gauge", name="parked") != parked:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await self.prefill.ask("lend_it", params=params)
        await self.expired()

    # -- followers -----------------------------------------------------------------------------------------------------

    @cause("NEVER_CAME no_offer")
    async def a_ticket_that_no_request_brings(self) -> None:
        await self.followed()
        await self.says("decode", "follow_failed", cause="no_offer")
        await self.idle()

    @cause("WRONG other_ticket NEVER_CAME no_offer never_heard_of")
    async def legs_with_different_tickets(self) -> None:
        await self.followed()
        await self.prefill.ask("lend_it", params=await self.prefill.ask("make", number=1), ticket=OTHER)
        await self.says("decode", "follow_failed", cause="no_offer")
        await self.expired()

    @cause("LEASE not_lent_in_time NEVER_CAME no_offer never_heard_of")
    async def a_prompt_that_was_queued_for_longer_than_it_was_followed(self) -> None:
        await self.followed()
        await self.says("decode", "follow_failed", cause="no_offer")
        await self.prefill.ask("lend_it", params=await self.prefill.ask("make", number=1), ticket=TICKET)
        await self.expired()

    @cause(GONE, live=True)
    async def prefill_killed_while_it_is_followed(self) -> None:
        await self.followed(60.0)
        await self.prefill.kill()
        await self.says("decode", "follow_failed", cause="peer_lost")
        await self.idle()

    @cause(guilty="")
    async def a_follower_that_waits_in_order(self) -> None:
        await self.followed(60.0)
        await self.idle()

    @cause(guilty="")
    async def a_ticket_that_was_withdrawn(self) -> None:
        await self.followed()
        await self.prefill.ask("withdraw_ticket", ticket=TICKET)
        await self.says("decode", "follow_failed", cause="withdrawn")
        await self.idle()

    # -- nothing is wrong ----------------------------------------------------------------------------------------------

    @cause(guilty="")
    async def healthy_engines_that_idle(self) -> None:
        await self.idle()

    @cause(guilty="", also={"prefill": "UNKNOWN"})  # its log does not show that the reader still renews
    async def announced_and_waiting_in_order(self) -> None:
        await self.announced()
        await self.says("prefill", "lease_held")
        await self.says("decode", "pull_held")

    @cause(guilty="")
    async def cancelled_by_its_caller(self) -> None:
        await self.decode.ask("cancel", number=1, params=await self.announced())
        await self.expired()

    @cause(guilty="")
    async def withdrawn_by_the_prefill_side(self) -> None:
        await self.prefill.ask("withdraw", params=await self.announced())
        await self.expired()


# -- what is said of it -----------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """An answer of one way to ask, and how right it was."""

    way: str
    verdict: str
    is_named: bool
    said: str
    status: int


def ask(sources: Sequence[str], out: Path) -> Answer:
    """Return the exit status of `asynckv why`, and its answer as JSON."""
    status = 0
    try:
        why(list(sources), json=str(out), timeout=1.0)
    except typer.Exit as exc:
        status = exc.exit_code
    return status, json.loads(out.read_text())


async def run_why(sources: Sequence[str], out: Path) -> Answer:
    """Run the command as an operator runs it; what it prints goes to a file beside its answer."""
    pipe = asyncio.subprocess.PIPE
    argv = ("-m", "asynckv", "why", *sources, "--json", str(out), "--timeout", "1")
    env = {**os.environ, "COLUMNS": "120"}
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=pipe, stderr=pipe, env=env)
    text, errors = await process.communicate()
    out.with_suffix(".txt").write_bytes(text + errors)
    assert process.returncode is not None
    return process.returncode, json.loads(await asyncio.to_thread(out.read_text))


def text_of(finding: dict[str, Any]) -> str:
    return " ".join(str(finding[x]) for x in ("what", "evidence", "remedy"))


def faults_of(fault: Fault, way: str, ranks: dict[str, set[str]], findings: list[dict[str, Any]]) -> Iterator[str]:
    """Tell what is wrong with findings, of which some may claim to know."""
    may = {HEADING[x].value: codes for x, codes in fault.may.items()}
    may |= {HEADING[x].value: frozenset[str]() for x in fault.also.get(way, "").split()}
    guilty = {rank for x in fault.guilty for rank in ranks.get(x, ())}
    healthy = [x for x in ranks if x not in fault.guilty and not x.startswith(OWNERS)]
    known = [x for x in findings if x["heading"] != HEADING.UNKNOWN.value]
    for each in known:
        if each["heading"] not in may:
            yield f"heading {each['heading']!r}"
        elif (codes := may[each["heading"]]) and each["code"] not in codes:
            yield f"code {each['code']!r}"
        if fault.never and re.search(fault.never, text_of(each), re.IGNORECASE):
            yield f"/{fault.never}/"
    for each in findings:
        if not any(rank in each["what"] for rank in guilty):
            yield from (f"{x} is blamed" for x in healthy if any(rank in each["what"] for rank in ranks[x]))
    if len(known) > fault.most:
        yield f"{len(known)} findings of one cause"


def judge(fault: Fault, way: str, ranks: dict[str, set[str]], status: int, document: dict[str, Any]) -> Look:
    """Compare what is said with the truth."""
    findings = document["findings"]
    known = [x for x in findings if x["heading"] != HEADING.UNKNOWN.value]
    said = "; ".join(f"[{x['heading']}] {x['code']}: {x['what']}" for x in findings) or f"nothing, status {status}"
    if wrong := list(dict.fromkeys(faults_of(fault, way, ranks, findings))):
        return Look(way, WRONG, False, f"{', '.join(wrong)}: {said}", status)
    if known:
        text = " ".join(map(text_of, known))
        return Look(way, RIGHT, all(re.search(x, text) for x in fault.names), said, status)
    if fault.may:
        return Look(way, OPEN if status or way not in fault.knows else MISSED, False, said, status)
    if findings and "UNKNOWN" in fault.also.get(way, "").split():
        return Look(way, OPEN, False, said, status)
    is_right = status == (NOT_JUDGED if way in fault.open or way in ONE_SIDE else 0)
    return Look(way, RIGHT if is_right else WRONG if status else MISSED, is_right, said, status)


async def examine(service: type[Service], name: str, keep: Path | None = None, tries: int = 1) -> list[Look]:
    """Start a service with engines that have met, inject a fault, and ask in each way; try again if that fails."""
    error = ""
    for _ in range(tries):
        with tempfile.TemporaryDirectory(prefix="why-") as kept:
            try:
                async with Fleet() as fleet, contextlib.AsyncExitStack() as stack:
                    return await _examine(service(fleet, Path(kept, "s"), stack), service.faults[name])
            except Exception as exc:
                error = repr(exc)
            finally:
                if keep is not None:
                    shutil.rmtree(keep / name, ignore_errors=True)
                    shutil.copytree(kept, keep / name, ignore=shutil.ignore_patterns("*.sock"))
    return [Look("", WRONG, False, f"it could not be injected: {error}", -1)]


async def _examine(service: Service, fault: Fault) -> list[Look]:
    service.directory.mkdir()
    started = await asyncio.gather(*(service.start(x, **fault.setup.get(x, {})) for x in NAMES))
    service.prefill, service.decode, service.other = started
    for number, decode in ((20, service.decode), (21, service.other)):
        assert await decode.ask("pull", number=number, params=await service.lend(number)) == "complete"
    await fault.inject(service)
    ranks = {x: {y["rank"] for y in service.lines(x)} for x in service.processes}  # two, if it slept
    logs = sorted(map(str, service.directory.glob("*.jsonl*")))
    mine = [x for x in logs if Path(x).name.startswith(OWNERS)]
    theirs = [x for x in logs if x not in mine]
    sockets = sorted(map(str, service.directory.glob("*.sock")))
    sources = zip(WAYS, (logs, sockets, [str(service.directory)], mine, theirs), strict=True)
    given = {way: x for way, x in sources if x}  # engines that were closed have no sockets
    found = await asyncio.gather(
        *(service.ask(x, service.directory.parent / f"{way}.json") for way, x in given.items())
    )
    return [judge(fault, way, ranks, *each) for way, each in zip(given, found, strict=True)]


async def examine_all(
    service: type[Service],
    names: Sequence[str],
    at_once: int,
    told: Callable[[str, list[Look]], None],
    keep: Path | None = None,
    tries: int = 1,
) -> None:
    """Examine faults, so many services at once."""
    turn = asyncio.Semaphore(at_once)

    async def one(name: str) -> None:
        async with turn:
            told(name, await examine(service, name, keep, tries))

    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(one(name))


def main(service: type[Service], about: str | None) -> None:
    """Inject, ask, and print a table."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all, if left out: {', '.join(service.faults)}")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="services at once (default: 2)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and answers there, a folder for each fault")
    parser.add_argument("--json", action="store_true", help="print the looks as JSON")
    given = parser.parse_args()
    if unknown := set(given.names) - set(service.faults):
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    looks, out = dict[str, list[Look]](), sys.stdout

    def told(name: str, found: list[Look]) -> None:
        looks[name] = found
        if not given.json:
            may = service.faults[name].may.items()
            print(f"{name}: {'; '.join(' '.join([x, *sorted(y)]) for x, y in may) or 'all is well'}", file=out)
            for x in found:
                line = f"  {x.way:8}{x.verdict:10}{'named' if x.is_named else '-':6} {x.said}"
                print(line, file=out, flush=True)

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        asyncio.run(examine_all(service, given.names or list(service.faults), given.at_once, told, given.keep, 2))
    every = [look for found in looks.values() for look in found]
    counts = {x: sum(look.verdict == x for look in every) for x in (RIGHT, OPEN, WRONG, MISSED)}
    unnamed = [x for x, found in looks.items() if not any(y.is_named for y in found if y.way in ("logs", "both"))]
    if given.json:
        print(json.dumps({x: [y._asdict() for y in found] for x, found in looks.items()}, indent=1))
    print(
        f"{', '.join(f'{number} {what}' for what, number in counts.items())}; {sum(x.is_named for x in every)} of "
        f"{len(every)} looks name the cause; named neither by logs nor by both: {', '.join(unnamed) or 'none'}",
        file=sys.stderr if given.json else out,
    )
    sys.exit(bool(counts[WRONG] or counts[MISSED]))


if __name__ == "__main__":
    main(Injected, __doc__)
