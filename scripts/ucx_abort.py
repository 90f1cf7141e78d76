"""Kill a peer, and see whether UCX takes the survivor with it: `python -m scripts.ucx_abort --help`.

NIXL and numpy alone, no asynckv: it runs under any Python that has NIXL, so that versions and settings can be compared.
Two processes on this host move bytes over TCP. One, the victim, is killed at a random moment; the other should go on.
What was found is in `docs/reliability.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import mmap
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

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
"""How long a survivor is watched after a fault: who dies, dies within milliseconds."""

ANSWER_S = 20.0


def load_nixl() -> Any:
    """Import whichever variant of NIXL is installed."""
    for variant in ("nixl_cu13", "nixl_cu12", "nixl"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{variant}._api")
    sys.exit("NIXL is not installed; `pip install nixl` brings it")


class Side:
    """One process: an agent without a progress thread, its memory, and transfers with one peer at a time."""

    def __init__(self, name: str, pipe: Connection, options: argparse.Namespace, ended: Any) -> None:
        api = load_nixl()
        self._pipe, self._options, self._ended = pipe, options, ended
        sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=sync)
        self._agent = api.nixl_agent(name, config)
        self._agent.create_backend("UCX", BACKEND | pairs(options.nixl))
        size = options.posts * options.post_bytes
        self._memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self._memory[:] = 1
        self._base = int(self._memory.ctypes.data)
        self._agent.register_memory([(self._base, size, 0, "")], "DRAM")
        self._peer, self._number = "", 0
        self._running: list[Any] = []
        self._lists: tuple[Any, Any] | None = None
        """Of descriptors, here and there, while bytes are to be moved."""
        self._loading: threading.Thread | None = None

    def serve(self) -> None:
        """Obey the driver, and make progress all the while."""
        self._pipe.send((self._agent.get_agent_metadata(), self._base))
        orders: dict[str, Callable[..., None]] = {"meet": self.meet, "forget": self.forget}
        while True:
            # Without transfers of its own a process sleeps between looks, as an event loop does.
            if self._pipe.poll(0 if self._lists is not None else 0.00005):
                order, *arguments = self._pipe.recv()
                if order == "end":
                    self._agent, self._lists, self._running = None, None, []  # destroys NIXL's agent
                    return
                orders[order](*arguments)
                self._pipe.send(order)
            self._move()

    def _move(self) -> None:
        """Post what may be posted, and ask for the oldest; a transfer that fails ends the work with this peer."""
        try:
            while self._lists is not None and len(self._running) < self._options.posts:
                at = np.array([self._number % self._options.posts], np.int32)
                mine, theirs = self._lists
                handle = self._agent.make_prepped_xfer(self._options.operation.upper(), mine, at, theirs, at)
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

    def meet(self, name: str, metadata: bytes, base: int) -> None:
        """Load a peer, and begin to move bytes."""
        if self._options.fault == "connect-kill":
            self._loading = threading.Thread(target=self._load, args=(name, metadata, base), daemon=True)
            self._loading.start()
        else:
            self._load(name, metadata, base)

    def _load(self, name: str, metadata: bytes, base: int) -> None:
        size, agent = self._options.post_bytes, self._agent
        places = [np.arange(self._options.posts, dtype=np.uint64) * np.uint64(size) + at for at in (self._base, base)]
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
        if self._peer and not self._options.keep:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(self._peer)
        self._peer = ""


def play(name: str, pipe: Connection, options: argparse.Namespace, log: Path, ended: Any) -> None:
    """Be a process."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    with contextlib.suppress(EOFError):
        Side(name, pipe, options, ended).serve()
    os._exit(0)


class Process:
    """The driver's view of one."""

    def __init__(self, name: str, options: argparse.Namespace, logs: Path) -> None:
        context = multiprocessing.get_context("fork")  # NIXL's Python is loaded, UCX is not yet
        self.name, self.log = name, logs / f"{name}.log"
        self._ended: Any = context.Value("Q", lock=False)
        self._pipe, theirs = context.Pipe()
        arguments = (name, theirs, options, self.log, self._ended)
        self.process: BaseProcess = context.Process(target=play, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.place: tuple[bytes, int] = self._hear()

    @property
    def num_ended(self) -> int:
        """Transfers of its own that ended well."""
        return int(self._ended.value)

    def _hear(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError(f"{self.name} did not answer within {ANSWER_S:g} s")
        return self._pipe.recv()

    def ask(self, order: str, *arguments: Any) -> None:
        """Have something done."""
        self._pipe.send((order, *arguments))
        self._hear()

    def end(self) -> None:
        """Let it end its agent in order; killed if it does not."""
        self._pipe.send(("end",))
        self.process.join(5)
        self.kill()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()

    def death(self) -> str:
        """Say how it died by itself: the signal, and UCX's words."""
        self.process.join(5)
        code = self.process.exitcode
        if code is None:
            self.kill()
            return "does not answer"
        said = COMPLAINT.findall(self.log.read_text(errors="replace"))
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return f"{how}: {' '.join(said[-1])}" if said else f"{how}, without a word of UCX"


def hurt(survivor: Process, victim: Process, fault: str) -> None:
    """End the victim."""
    if fault == "close":
        victim.end()
        return
    if fault == "stop-kill":
        victim.signal(signal.SIGSTOP)
        time.sleep(0.05)
    elif fault == "away-kill":
        survivor.signal(signal.SIGSTOP)
        time.sleep(0.02)
    victim.kill()
    if fault == "away-kill":
        survivor.signal(signal.SIGCONT)


def trial(survivor: Process, victim: Process, options: argparse.Namespace, rng: random.Random) -> None:
    """Connect, work, end the victim at a random moment, and see whether the survivor answers."""
    meetings = [(victim, survivor)] * (options.survivor != "initiator") + [(survivor, victim)] * (
        options.survivor != "owner"
    )
    for mover, owner in meetings:
        before = mover.num_ended
        mover.ask("meet", owner.name, *owner.place)
        deadline = time.monotonic() + ANSWER_S
        # Connecting takes a while; the fault is to come in the middle of transfers.
        while options.fault != "connect-kill" and mover.num_ended == before and time.monotonic() < deadline:
            time.sleep(0.0005)
    time.sleep(rng.uniform(0, options.moment_s))
    hurt(survivor, victim, options.fault)
    time.sleep(SETTLE_S)
    survivor.ask("forget")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Do all trials, each with a new victim, and with the same survivor until it dies."""
    rng, began = random.Random(options.seed), time.monotonic()
    deaths, done, ended = Counter[str](), 0, 0
    survivor: Process | None = None
    with tempfile.TemporaryDirectory(prefix="ucx-abort-") as folder:
        while done < options.trials and time.monotonic() - began < options.seconds:
            if survivor is None:
                survivor = Process(f"survivor-{done}", options, Path(folder))
            victim, before = Process(f"victim-{done}", options, Path(folder)), survivor.num_ended
            done += 1
            died = False
            try:
                trial(survivor, victim, options, rng)
            except (EOFError, ConnectionError, TimeoutError):
                died = True
            victim.kill()
            ended += victim.num_ended + survivor.num_ended - before
            if died:
                death = survivor.death()
                deaths[death] += 1
                if options.verbose and deaths[death] == 1:
                    print(f"{death}\n{survivor.log.read_text(errors='replace')[-6000:]}", file=sys.stderr)
                survivor = None
        if survivor is not None:
            survivor.kill()
    said = ("survivor", "fault", "operation", "posts", "post_bytes", "ucx", "nixl", "seed")
    return {key: getattr(options, key) for key in said} | {
        "trials": done,
        "died": deaths.total(),
        "deaths": dict(deaths.most_common()),
        "transfers_ended": ended,
        "seconds": round(time.monotonic() - began, 1),
    }


def pairs(entries: list[str]) -> dict[str, str]:
    """Read KEY=VALUE entries."""
    return {key: value for key, _, value in (entry.partition("=") for entry in entries)}


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line says; returns the exit status."""
    lines = [f"  {name:13} {text}" for name, text in (*ROLES.items(), *FAULTS.items())]
    roles, faults = "\n".join(lines[: len(ROLES)]), "\n".join(lines[len(ROLES) :])
    parser = argparse.ArgumentParser(
        prog="python -m scripts.ucx_abort",
        description=(__doc__ or "").partition("\n\n")[2],
        epilog=f"who survives:\n{roles}\n\nfaults:\n{faults}\n\n"
        "examples:\n"
        "  python -m scripts.ucx_abort --fault away-kill                    # kills about every second owner\n"
        "  python -m scripts.ucx_abort --fault away-kill --operation write  # kills none\n"
        "  python -m scripts.ucx_abort --fault away-kill --ucx UCX_TLS=posix,sysv,tcp\n"
        "  python -m scripts.ucx_abort --fault away-kill --nixl ucx_error_handling_mode=none\n\n"
        "exit status: 0 nobody died, 1 a survivor died, 2 bad input",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--survivor", choices=tuple(ROLES), default="owner", help="who should go on (default owner)")
    parser.add_argument("--fault", choices=tuple(FAULTS), default="kill", help="what happens (default kill)")
    parser.add_argument("--operation", choices=("read", "write"), default="read", help="of NIXL (default read)")
    parser.add_argument("--trials", type=int, default=40, help="how often (default 40)")
    parser.add_argument("--seconds", type=float, default=300.0, help="no trial begins after so many (default 300)")
    parser.add_argument("--posts", type=int, default=16, help="transfers in flight (default 16)")
    parser.add_argument("--post-bytes", type=int, default=1 << 20, help="of one transfer (default 1 MiB)")
    parser.add_argument("--moment-s", type=float, default=0.05, help="the fault comes so late at most (default 0.05)")
    parser.add_argument("--keep", action="store_true", help="the survivor does not remove the victim from its agent")
    parser.add_argument("--ucx", action="append", default=[], metavar="UCX_KEY=VALUE", help="environment; repeatable")
    parser.add_argument("--nixl", action="append", default=[], metavar="KEY=VALUE", help="of the back end; repeatable")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    parser.add_argument("--verbose", action="store_true", help="show what the first of each kind of dead survivor said")
    options = parser.parse_args(arguments)
    for name in ("trials", "seconds", "posts", "post_bytes"):
        if not 0 < getattr(options, name) <= 1 << 30:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name):g} is outside [1, {1 << 30}]")
    if not 0 <= options.moment_s <= 60:
        parser.error(f"--moment-s {options.moment_s:g} is outside [0, 60]")
    for entry in (*options.ucx, *options.nixl):
        if "=" not in entry:
            parser.error(f"{entry!r} is not KEY=VALUE")
    os.environ.update(SETTINGS | pairs(options.ucx))
    load_nixl()
    record = run(options)
    print(json.dumps(record))
    return int(record["died"] > 0)


if __name__ == "__main__":
    sys.exit(main())
