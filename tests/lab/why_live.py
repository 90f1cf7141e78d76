"""Causes injected into real processes, and what `asynckv why` says of them: right, honestly not known, or wrong.

Each cause has a service of its own: a prefill engine and two decode engines, on real NIXL and ZMQ, in a directory with
their logs and sockets. When the cause has had its effect, and the service still runs, `asynckv why` is asked in five
ways: with all logs, with the sockets, with both, with the prefill side's log alone, and with the decode side's alone.

  right      Each finding has a heading and a code that the cause may have, and none is about a healthy process.
  not known  It says that it does not know; or it says nothing, and that way nothing is left to be seen.
  wrong      It says something else, blames a healthy process, or says nothing though it could know.

One side's logs alone need not say anything, but nothing wrong, and not that all is well.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
RIGHT, OPEN, WRONG = "right", "not known", "wrong"


class Service:
    """Engines in a directory with their logs and their sockets."""

    prefill: Process
    decode: Process
    other: Process

    def __init__(self, fleet: Fleet, directory: Path, stack: contextlib.AsyncExitStack) -> None:
        self.directory, self._fleet, self._stack = directory, fleet, stack
        self.processes: dict[str, Process] = {}

    async def start(self, name: str, **setup: Any) -> Process:
        """Start an engine; `pair.1` is a rank of the engine `pair`, `decode-2` a later start of `decode`."""
        setup = {"lease_s": LEASE_S, "grant_s": GRANT_S, "log": name, "pull": PULL, **setup}
        setup |= {"name": name.partition(".")[0].partition("-")[0], "directory": str(self.directory)}
        process = self.processes[name] = await self._fleet.start(name, "tests.inspected:Side", **setup)
        await process.ask("address")  # it has started
        await self.says(name, "engine_started")
        return process

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return a log's lines so far; the last one may not be whole yet."""
        log = self.directory / f"{name}-{self.processes[name].pid}.jsonl"
        return [json.loads(x) for x in log.read_text().splitlines(keepends=True) if x.endswith("\n")]

    async def says(self, name: str, event: str, since: int = 0, **fields: Any) -> None:
        """Wait until a log has such a line, behind so many others."""
        async with asyncio.timeout(PATIENCE_S):
            while not any({"event": event, **fields}.items() <= x.items() for x in self.lines(name)[since:]):  # noqa: ASYNC110
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

    def freeze(self, process: Process) -> None:
        """Pause a process, as a container is paused."""
        group = FREEZER / f"asynckv-{os.getpid()}-{process.pid}"
        group.mkdir()
        self._stack.callback(group.rmdir)
        self._stack.callback((FREEZER / "cgroup.procs").write_text, str(process.pid))
        self._stack.callback((group / "freezer.state").write_text, "THAWED")
        (group / "cgroup.procs").write_text(str(process.pid))
        (group / "freezer.state").write_text("FROZEN")

    def stop(self, process: Process) -> None:
        """Stop a process, until the service is over."""
        process.signal(signal.SIGSTOP)
        self._stack.callback(process.signal, signal.SIGCONT)


def at(params: dict[str, Any], address: str) -> dict[str, Any]:
    """Say that a request is at another address."""
    return params | {"endpoints": [x | {"address": address} for x in params["endpoints"]]}


# -- what is done ------------------------------------------------------------------------------------------------------


Inject = Callable[[Any], Awaitable[None]]


class Cause(NamedTuple):
    """Something that may befall a service, and what is right to say of it."""

    inject: Inject
    may_say: dict[str, set[str]]  # codes by heading; empty: all is well
    about: tuple[str, ...]  # processes that may be blamed, besides the prefill engine
    is_seen_live: bool  # when all are asked, something is left to be seen
    setup: dict[str, dict[str, Any]]  # of processes


CAUSES: dict[str, Cause] = {}


def cause(*may_say: str, about: str = "decode", live: bool = False, **setup: Any) -> Callable[[Inject], Inject]:
    """Register a cause, with what may be said: `HEADING code code`."""

    def register(inject: Inject) -> Inject:
        said = {HEADING[x.split()[0]].value: set(x.split()[1:]) for x in may_say}
        CAUSES[inject.__name__] = Cause(inject, said, tuple(about.split()), live, setup)
        return inject

    return register


GONE = "GONE died no_answer reader_died prefill_died"
STOPPED = "STOPPED stopped no_answer loop_was_away decode_loop_away prefill_loop_away decode_unresponsive"


class Injected(Service):
    """A service, and what may befall it."""

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

    @cause(GONE, "NEVER_CAME never_heard_of", live=True)
    async def decode_killed_before_it_heard(self) -> None:
        await self.lend()
        await self.decode.kill()
        await self.expired()

    @cause(GONE, about="decode decode-2")
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

    @cause(GONE, about="prefill-2 decode")
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

    @cause(GONE, about="pair.0 pair.1 decode", live=True)
    async def a_prefill_rank_killed_while_it_lends(self) -> None:
        await self.tp()
        await self.processes["pair.1"].kill()
        await self.says("decode", "peer_changed", state="gone")
        await self.idle()

    @cause(GONE, about="decode.0 decode.1", live=True)
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
        self.freeze(self.decode)
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

    @cause(STOPPED, about="pair.0 pair.1 decode", live=True)
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

    @cause("NEVER_CAME never_heard_of", about="")
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

    @cause("DROPPED refused_locally", decode={"head_dim": 64})
    async def a_geometry_that_does_not_fit(self) -> None:
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

    @cause("DROPPED no_attempt_followed", "LEASE not_lent_in_time")
    async def another_attempt_promised_and_never_made(self) -> None:
        params = await self.prefill.ask("make", number=1)
        assert await self.decode.ask("pull", number=1, params=params, timeout_s=0.1, is_last=False) != "complete"
        await self.prefill.ask("lend_it", params=params)
        await self.expired()

    @cause("DROPPED rank_never_spoke", about="decode.1")
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

    @cause("WRONG keys_refused", about="guarded stranger")
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

    @cause("WRONG listener_unlisted", about="guarded stranger")
    async def a_listeners_key_that_is_not_known(self) -> None:
        await self._keys("stranger")

    @cause("WRONG params_given_twice", about="other")
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

    # -- nothing is wrong ----------------------------------------------------------------------------------------------

    @cause(about="")
    async def healthy_engines_that_idle(self) -> None:
        await self.idle()

    @cause(about="")
    async def announced_and_waiting_in_order(self) -> None:
        await self.announced()
        await self.says("prefill", "lease_held")
        await self.says("decode", "pull_held")

    @cause(about="")
    async def cancelled_by_its_caller(self) -> None:
        await self.decode.ask("cancel", number=1, params=await self.announced())
        await self.expired()

    @cause(about="")
    async def withdrawn_by_the_prefill_side(self) -> None:
        await self.prefill.ask("withdraw", params=await self.announced())
        await self.expired()


# -- what is said of it -----------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """An answer of one way to ask, and how right it was."""

    way: str
    verdict: str
    said: str
    document: dict[str, Any]


def ask(sources: Sequence[str], out: Path) -> dict[str, Any]:
    """Return the answer of `asynckv why`."""
    with contextlib.suppress(RuntimeError):  # typer's, of an exit status
        why(list(sources), json=str(out), timeout=1.0)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def judge(cause: Cause, way: str, ranks: dict[str, str], found: dict[str, Any]) -> Look:
    """Compare what is said with what was done."""
    findings, one_side = found["findings"], way in ("prefill", "decode")
    said = "; ".join(dict.fromkeys(f"{HEADING(x['heading']).name} {x['code']}" for x in findings)) or "nothing"
    if late := sorted({x["cause"] for x in found["late"]} - {x["code"] for x in findings}):
        said += f" ({', '.join(late)})"
    known = [x for x in findings if x["heading"] != HEADING.UNKNOWN.value]
    healthy = [rank for name, rank in ranks.items() if name not in (*cause.about, "prefill")]
    blamed = [rank for rank in healthy if any(rank in x["what"] for x in findings)]
    is_strange = any(x["code"] not in cause.may_say.get(x["heading"], ()) for x in known)
    if is_strange or blamed:
        return Look(way, WRONG, said + "".join(f" of {x}" for x in blamed), found)
    if not findings:
        said = "all is well" if found["is_well"] else "not judged: " + ", ".join(x["code"] for x in found["limits"])
    if not cause.may_say and not findings:
        # The other side's log is missing.
        return Look(way, RIGHT if found["is_well"] is not one_side else WRONG, said, found)
    if bool(findings) is bool(cause.may_say) and bool(known) is bool(findings):
        return Look(way, RIGHT, said, found)
    is_unseen = way == "live" and bool(cause.may_say) and not cause.is_seen_live
    may_be_open = is_unseen or (not found["is_well"] and (one_side or bool(cause.may_say)))
    return Look(way, RIGHT if known else OPEN if may_be_open else WRONG, said, found)


async def examine(name: str) -> list[Look]:
    """Start a service with engines that have met, inject a cause, and ask in each way."""
    cause = CAUSES[name]
    with tempfile.TemporaryDirectory(prefix="why-") as kept:
        async with Fleet() as fleet, contextlib.AsyncExitStack() as stack:
            return await _examine(Path(kept), fleet, stack, cause)


async def _examine(folder: Path, fleet: Fleet, stack: contextlib.AsyncExitStack, cause: Cause) -> list[Look]:
    service = Injected(fleet, folder / "s", stack)
    started = await asyncio.gather(*(service.start(x, **cause.setup.get(x, {})) for x in NAMES))
    service.prefill, service.decode, service.other = started
    for number, decode in ((20, service.decode), (21, service.other)):
        await decode.ask("pull", number=number, params=await service.lend(number))
    try:
        await cause.inject(service)
    except Exception as exc:
        return [Look("", WRONG, f"it could not be injected: {exc!r}", {})]
    ranks = {x: str(service.lines(x)[0]["rank"]) for x in service.processes}
    logs = sorted(map(str, service.directory.glob("*.jsonl")))
    sockets = sorted(map(str, service.directory.glob("*.sock")))
    mine = [x for x in logs if Path(x).name.startswith(("prefill", "pair", "guarded"))]
    theirs = [x for x in logs if x not in mine]
    sources = {"logs": logs, "live": sockets, "both": [str(folder / "s")], "prefill": mine, "decode": theirs}
    sources = {way: x for way, x in sources.items() if x}  # engines that were closed have no sockets
    asked = [asyncio.to_thread(ask, x, folder / f"{way}.json") for way, x in sources.items()]
    found = await asyncio.gather(*asked)
    return [judge(cause, way, ranks, each) for way, each in zip(sources, found, strict=True)]


async def examine_all(names: Sequence[str], at_once: int, told: Callable[[str, list[Look]], None]) -> None:
    """Examine causes, so many services at once."""
    turn = asyncio.Semaphore(at_once)

    async def one(name: str) -> None:
        async with turn:
            told(name, await examine(name))

    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(one(name))


def main() -> None:
    """Inject, ask, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("causes", nargs="*", metavar="CAUSE", help=f"all, if left out: {', '.join(CAUSES)}")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="services at once (default: 2)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write what was said there, as JSON")
    given = parser.parse_args()
    if unknown := set(given.causes) - set(CAUSES):
        parser.error(f"no such cause: {', '.join(sorted(unknown))}")
    counts, out = dict.fromkeys((RIGHT, OPEN, WRONG), 0), sys.stdout

    def told(name: str, looks: list[Look]) -> None:
        expected = "; ".join(f"{HEADING(x).name} {'/'.join(sorted(y))}" for x, y in CAUSES[name].may_say.items())
        print(f"{name}: {expected or 'nothing'}", file=out)
        for look in looks:
            counts[look.verdict] += 1
            print(f"  {look.way:8} {look.verdict:10} {look.said}", file=out, flush=True)
            if given.keep:
                given.keep.mkdir(parents=True, exist_ok=True)
                (given.keep / f"{name}-{look.way}.json").write_text(json.dumps(look.document, indent=1))

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        asyncio.run(examine_all(given.causes or list(CAUSES), given.at_once, told))
    print(", ".join(f"{number} {what}" for what, number in counts.items()))
    sys.exit(bool(counts[WRONG]))


if __name__ == "__main__":
    main()
