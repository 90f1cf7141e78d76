"""Kill a peer, and see whether UCX takes the survivor with it: `python -m tests.lab.ucx_abort --help`.

NIXL alone: of asynckv only what starts processes and reads command lines, so that it runs under any Python that has
NIXL, numpy and typer, and versions and settings can be compared. Two processes on this host move bytes over TCP. One,
the victim, is killed at a random moment; the other should go on. What was found is in `docs/reliability.md`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import mmap
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import typer

from asynckv.errors import ConfigError
from asynckv.tools.bench.processes import Failure
from scripts import command
from tests.lab.fleet import Fleet, Process, SharedNumber

Survivor = Literal["owner", "initiator", "both"]
Fault = Literal["kill", "stop-kill", "away-kill", "close", "connect-kill"]
Operation = Literal["read", "write"]
ROLES = {
    "owner": "the victim reads (or writes) the survivor's memory",
    "initiator": "the survivor reads (or writes) the victim's memory",
    "both": "each does, at the same time",
}
FAULTS = {
    "kill": "kill -9 the victim in the middle of transfers",
    "stop-kill": "stop the victim, kill it 50 ms later: the survivor has filled its sockets by then",
    "away-kill": "stop the survivor, kill the victim, let the survivor go on: it finds what the dead have asked for",
    "close": "the victim ends its agent in order, in the middle of transfers",
    "connect-kill": "kill the victim while the survivor loads its metadata on a thread, and makes progress meanwhile",
}
SETTINGS = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "WARN"}
BACKEND = {"engine_config": "TCP_TX_SEG_SIZE=64k,TCP_RX_SEG_SIZE=64k"}
COMPLAINT = re.compile(r"(\w+\.(?:c|inl|h|cc|cpp):\d+)\s+(Assertion .*|Fatal: .*)")

SETTLE_S = 0.2
"""Seconds for which a survivor is watched after a fault: a process that dies, dies within milliseconds."""

ANSWER_S = 20.0


def load_nixl() -> Any:
    """Import whichever variant of NIXL is installed."""
    for variant in ("nixl_cu13", "nixl_cu12", "nixl"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{variant}._api")
    raise ConfigError("NIXL is not installed; `pip install nixl` brings it")


class Side:
    """One process: an agent without a progress thread, its memory, and transfers with one peer at a time."""

    def __init__(
        self,
        *,
        name: str,
        ended: str,
        fault: Fault,
        operation: Operation,
        posts: int,
        post_bytes: int,
        keep: bool,
        nixl: dict[str, str],
    ) -> None:
        api = load_nixl()
        self._fault, self._operation, self._keep = fault, operation.upper(), keep
        self._posts, self._post_bytes, self._ended = posts, post_bytes, SharedNumber(Path(ended))
        sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=sync)
        self._agent = api.nixl_agent(name, config)
        self._agent.create_backend("UCX", BACKEND | nixl)
        size = posts * post_bytes
        self._memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self._memory[:] = 1
        self._base = int(self._memory.ctypes.data)
        self._agent.register_memory([(self._base, size, 0, "")], "DRAM")
        self._peer, self._number = "", 0
        self._running: list[Any] = []
        self._lists: tuple[Any, Any] | None = None
        """Of descriptors, here and there, while bytes are to be moved."""
        self._loading: threading.Thread | None = None

    async def __aenter__(self) -> Self:
        self._working = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._working.cancel()
        self._agent, self._lists, self._running = None, None, []  # destroys NIXL's agent

    async def _work(self) -> None:
        """Make progress all the while; without transfers of its own a process sleeps between looks."""
        while True:
            self._move()
            await asyncio.sleep(0 if self._lists is not None else 0.00005)

    def _move(self) -> None:
        """Post what may be posted, and ask for the oldest; a transfer that fails ends the work with this peer."""
        try:
            while self._lists is not None and len(self._running) < self._posts:
                at = np.array([self._number % self._posts], np.int32)
                mine, theirs = self._lists
                handle = self._agent.make_prepped_xfer(self._operation, mine, at, theirs, at)
                self._number += 1
                if self._agent.transfer(handle) == "DONE":
                    self._end(handle)
                else:
                    self._running.append(handle)
            if self._running and self._agent.check_xfer_state(self._running[0]) == "DONE":
                self._end(self._running.pop(0))
            else:
                self._agent.get_new_notifs()
        except Exception:  # the peer is gone, as it should be
            self._give_up()

    def _end(self, handle: Any) -> None:
        self._agent.release_xfer_handle(handle)
        self._ended.value += 1

    def _give_up(self) -> None:
        for handle in self._running:
            with contextlib.suppress(Exception):
                self._agent.release_xfer_handle(handle)
        self._running, self._lists = [], None

    def place(self) -> dict[str, Any]:
        """Say what a peer must know."""
        return {"metadata": self._agent.get_agent_metadata().hex(), "base": self._base}

    def meet(self, name: str, metadata: str, base: int) -> None:
        """Load a peer, and begin to move bytes."""
        arguments = name, bytes.fromhex(metadata), base
        if self._fault == "connect-kill":
            self._loading = threading.Thread(target=self._load, args=arguments, daemon=True)
            self._loading.start()
        else:
            self._load(*arguments)

    def _load(self, name: str, metadata: bytes, base: int) -> None:
        size, agent = self._post_bytes, self._agent
        places = [np.arange(self._posts, dtype=np.uint64) * np.uint64(size) + at for at in (self._base, base)]
        mine, theirs = (np.stack([at, np.full_like(at, size), np.zeros_like(at)], 1) for at in places)
        with contextlib.suppress(Exception):  # it may be dead by now
            agent.add_remote_agent(metadata)
            self._peer = name
            self._lists = agent.prep_xfer_dlist("", mine, "DRAM"), agent.prep_xfer_dlist(name, theirs, "DRAM")

    def forget(self) -> None:
        """Let go of a peer that is gone."""
        if self._loading is not None:
            self._loading.join(ANSWER_S)
            self._loading = None
        self._give_up()
        if self._peer and not self._keep:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(self._peer)
        self._peer = ""


class Player:
    """The driver's view of a process."""

    def __init__(self, name: str, process: Process, ended: SharedNumber, place: dict[str, Any]) -> None:
        self.name, self.process, self.place, self._ended = name, process, place, ended

    @classmethod
    async def start(cls, name: str, fleet: Fleet, setup: Mapping[str, Any]) -> Player:
        """Start a process, and hear where it is."""
        ended = fleet.folder / f"{name}.ended"
        process = await fleet.start(name, "tests.lab.ucx_abort:Side", name=name, ended=str(ended), **setup)
        return cls(name, process, SharedNumber(ended), await process.ask("place"))

    @property
    def num_ended(self) -> int:
        """Transfers of its own that ended well."""
        return self._ended.value

    async def death(self) -> str:
        """Say how it died by itself: the signal, and UCX's words."""
        code = self.process.status
        if code is None:
            await self.process.kill()
            return "does not answer"
        said = COMPLAINT.findall(self.process.log.read_text(errors="replace"))
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return f"{how}: {' '.join(said[-1])}" if said else f"{how}, without a word of UCX"


async def hurt(survivor: Player, victim: Player, fault: Fault) -> None:
    """End the victim."""
    if fault == "close":
        with contextlib.suppress(Failure):  # late, and killed
            await victim.process.end(5.0)
        return
    if fault == "stop-kill":
        victim.process.signal(signal.SIGSTOP)
        await asyncio.sleep(0.05)
    elif fault == "away-kill":
        survivor.process.signal(signal.SIGSTOP)
        await asyncio.sleep(0.02)
    await victim.process.kill()
    if fault == "away-kill":
        survivor.process.signal(signal.SIGCONT)


async def trial(players: tuple[Player, Player], role: Survivor, fault: Fault, moment_s: float) -> None:
    """Connect, work, end the victim at a random moment, and see whether the survivor answers."""
    survivor, victim = players
    meetings = [(victim, survivor)] * (role != "initiator") + [(survivor, victim)] * (role != "owner")
    for mover, owner in meetings:
        before = mover.num_ended
        await mover.process.ask("meet", name=owner.name, **owner.place)
        deadline = time.monotonic() + ANSWER_S
        # Connecting takes a while; the fault is to come in the middle of transfers.
        is_seen = fault != "connect-kill"
        while is_seen and mover.num_ended == before and time.monotonic() < deadline:  # noqa: ASYNC110 - it rings no bell
            await asyncio.sleep(0.0005)
    await asyncio.sleep(moment_s)
    await hurt(survivor, victim, fault)
    await asyncio.sleep(SETTLE_S)
    await survivor.process.ask("forget")


async def run(
    role: Survivor,
    setup: Mapping[str, Any],
    *,
    trials: int,
    seconds: float,
    moment_s: float,
    seed: int,
    ucx: Mapping[str, str],
    verbose: bool,
) -> dict[str, Any]:
    """Do all trials, each with a new victim, and with the same survivor until it dies."""
    rng, began = random.Random(seed), time.monotonic()
    deaths, done, ended = Counter[str](), 0, 0
    survivor: Player | None = None
    async with Fleet(SETTINGS | dict(ucx)) as fleet:
        while done < trials and time.monotonic() - began < seconds:
            if survivor is None:
                survivor = await Player.start(f"survivor-{done}", fleet, setup)
            victim, before = await Player.start(f"victim-{done}", fleet, setup), survivor.num_ended
            done += 1
            died = False
            try:
                await trial((survivor, victim), role, setup["fault"], rng.uniform(0, moment_s))
            except Failure:
                died = True
            await victim.process.kill()
            ended += victim.num_ended + survivor.num_ended - before
            if died:
                death = await survivor.death()
                deaths[death] += 1
                if verbose and deaths[death] == 1:
                    print(f"{death}\n{survivor.process.log.read_text(errors='replace')[-6000:]}", file=sys.stderr)
                survivor = None
    return {
        "survivor": role,
        **{key: setup[key] for key in ("fault", "operation", "posts", "post_bytes")},
        "ucx": [f"{k}={v}" for k, v in ucx.items()],
        "nixl": [f"{k}={v}" for k, v in setup["nixl"].items()],
        "seed": seed,
        "trials": done,
        "died": deaths.total(),
        "deaths": dict(deaths.most_common()),
        "transfers_ended": ended,
        "seconds": round(time.monotonic() - began, 1),
    }


def pairs(entries: Sequence[str] | None) -> dict[str, str]:
    """Read KEY=VALUE entries.

    Raises:
        ConfigError: One is something else.
    """
    for entry in entries or ():
        command.check("=" in entry, f"{entry!r} is not KEY=VALUE")
    return {key: value for key, _, value in (entry.partition("=") for entry in entries or ())}


def abort(
    survivor: Annotated[Survivor, typer.Option(help="Who should go on.")] = "owner",
    fault: Annotated[Fault, typer.Option(help="What happens.")] = "kill",
    operation: Annotated[Operation, typer.Option(help="Of NIXL.")] = "read",
    trials: Annotated[int, typer.Option(help="How often.")] = 40,
    seconds: Annotated[float, typer.Option(help="No trial begins after so many.")] = 300.0,
    posts: Annotated[int, typer.Option(help="Transfers in flight.")] = 16,
    post_bytes: Annotated[int, typer.Option(help="Of one transfer.")] = 1 << 20,
    moment_s: Annotated[float, typer.Option(help="The fault comes so late at most.")] = 0.05,
    keep: Annotated[
        bool, typer.Option("--keep", help="The survivor does not remove the victim from its agent.")
    ] = False,
    ucx: Annotated[list[str] | None, typer.Option(metavar="UCX_KEY=VALUE", help="Environment; repeatable.")] = None,
    nixl: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Of the back end; repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show what the first of each kind of dead survivor said.")
    ] = False,
) -> int:
    """Kill a peer, and see whether UCX takes the survivor with it: NIXL alone, two processes on this host over TCP.

    One, the victim, is killed at a random moment while bytes move; the other should go on.
    """
    numbers = {"--trials": trials, "--seconds": seconds, "--posts": posts, "--post-bytes": post_bytes}
    for name, value in numbers.items():
        command.check(0 < value <= 1 << 30, f"{name} {value:g} is outside [1, {1 << 30}]")
    command.check(0 <= moment_s <= 60, f"--moment-s {moment_s:g} is outside [0, 60]")
    setup: dict[str, Any] = {
        "fault": fault,
        "operation": operation,
        "posts": posts,
        "post_bytes": post_bytes,
        "keep": keep,
    }
    setup |= {"nixl": pairs(nixl)}
    environment = pairs(ucx)
    load_nixl()
    record = asyncio.run(
        run(
            survivor,
            setup,
            trials=trials,
            seconds=seconds,
            moment_s=moment_s,
            seed=seed,
            ucx=environment,
            verbose=verbose,
        )
    )
    print(json.dumps(record))
    return int(record["died"] > 0)


EPILOG = f"""
[bold]Who survives[/bold]

{command.listed(ROLES)}

[bold]Faults[/bold]

{command.listed(FAULTS)}

[bold]Examples[/bold]

  python -m tests.lab.ucx_abort --fault away-kill                    (kills about every second owner)

  python -m tests.lab.ucx_abort --fault away-kill --operation write  (kills none)

  python -m tests.lab.ucx_abort --fault away-kill --ucx UCX_TLS=posix,sysv,tcp

  python -m tests.lab.ucx_abort --fault away-kill --nixl ucx_error_handling_mode=none

[bold]Exit status[/bold]  0 nobody died, 1 a survivor died, 2 bad input, 130 Ctrl-C
"""
main = command.script(abort, EPILOG)


if __name__ == "__main__":
    sys.exit(main())
