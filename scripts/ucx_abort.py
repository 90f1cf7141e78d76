"""Kill a peer, and see whether UCX takes the survivor with it: `python -m scripts.ucx_abort --help`.

NIXL and numpy alone, no asynckv: it runs under any Python that has NIXL, so that versions can be compared. Two processes
on this host move bytes over UCX_TLS=tcp. One is the victim: it is killed at a random moment. The other should go on.
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

FAULTS = {
    "kill": "kill -9 the victim",
    "stop-kill": "stop the victim, kill it 50 ms later: the survivor has filled its sockets by then",
    "away-kill": "stop the survivor, kill the victim, let the survivor go on: it finds requests of a dead process",
    "stop": "stop the victim and let it go on; nobody dies",
    "close": "the victim ends its agent in order, in the middle of transfers",
    "connect-kill": "kill the victim in the moment in which the survivor loads its metadata, on another thread",
}
ASSERTION = re.compile(r"(\w+\.(?:c|inl|h|cc|cpp):\d+)\s+(Assertion .*|Fatal: .*)")
SETTLE_S = 0.2
"""How long a survivor is watched after a fault; what dies does so within milliseconds."""


def load_nixl() -> Any:
    """Import whichever variant of NIXL is installed."""
    for variant in ("nixl_cu13", "nixl_cu12", "nixl"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{variant}._api")
    sys.exit("NIXL is not installed; `pip install nixl` brings it")


class Side:
    """One process: an agent, its memory, and transfers with one peer at a time."""

    def __init__(self, name: str, pipe: Connection, options: argparse.Namespace, ended: Any) -> None:
        self.ended = ended
        self.api, self.pipe, self.options = load_nixl(), pipe, options
        sync = self.api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = self.api.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=sync)
        self.agent = self.api.nixl_agent(name, config)
        params = {"engine_config": "TCP_TX_SEG_SIZE=64k,TCP_RX_SEG_SIZE=64k"}
        self.agent.create_backend("UCX", params | dict(each.split("=", 1) for each in options.nixl))
        size = options.posts * options.post_bytes
        self.memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self.memory[:] = 1
        self.base = int(self.memory.ctypes.data)
        self.agent.register_memory([(self.base, size, 0, "")], "DRAM")
        self.peer, self.running = "", list[Any]()
        self.lists: tuple[Any, Any] | None = None
        self.moved = 0
        self.loading: threading.Thread | None = None

    def serve(self) -> None:
        """Obey the driver, and make progress all the while."""
        self.pipe.send((self.agent.get_agent_metadata(), self.base))
        while True:
            busy = bool(self.running) or self.lists is not None
            # Without transfers of its own a process sleeps between looks, as an event loop does.
            if self.pipe.poll(0 if busy else self.options.nap):
                order, *arguments = self.pipe.recv()
                answer = getattr(self, order)(*arguments)
                if order == "end":
                    return
                self.pipe.send(answer)
            self.move()

    def move(self) -> None:
        """Post what may be posted, and ask for what runs; a transfer that fails ends the work with this peer."""
        try:
            while self.lists is not None and len(self.running) < self.options.posts:
                number = np.array([self.moved % self.options.posts], np.int32)
                operation = self.options.operation.upper()
                handle = self.agent.make_prepped_xfer(operation, self.lists[0], number, self.lists[1], number)
                self.moved += 1
                if self.agent.transfer(handle) == "DONE":
                    self.agent.release_xfer_handle(handle)
                    self.ended.value += 1
                else:
                    self.running.append(handle)
            if self.running and self.agent.check_xfer_state(self.running[0]) == "DONE":
                self.agent.release_xfer_handle(self.running.pop(0))
                self.ended.value += 1
            else:
                self.agent.get_new_notifs()
        except Exception:
            self.stop()

    def stop(self) -> None:
        for handle in self.running:
            with contextlib.suppress(Exception):
                self.agent.release_xfer_handle(handle)
        self.running, self.lists = [], None

    def meet(self, name: str, metadata: bytes, base: int, works: bool) -> None:
        """Load a peer, and begin to move bytes if asked to."""

        def load() -> None:
            with contextlib.suppress(Exception):
                self.agent.add_remote_agent(metadata)
                self.peer = name
                if works:
                    size, posts = self.options.post_bytes, self.options.posts
                    mine, theirs = (np.array([(at + i * size, size, 0) for i in range(posts)], np.uint64) for at in (self.base, base))
                    lists = self.agent.prep_xfer_dlist("", mine, "DRAM"), self.agent.prep_xfer_dlist(name, theirs, "DRAM")
                    self.lists = lists

        if self.options.fault == "connect-kill":
            self.loading = threading.Thread(target=load, daemon=True)
            self.loading.start()
        else:
            load()

    def forget(self) -> int:
        """After the peer's end."""
        if self.loading is not None:
            self.loading.join(10)
            self.loading = None
        self.stop()
        if self.peer and not self.options.keep:
            with contextlib.suppress(Exception):
                self.agent.remove_remote_agent(self.peer)
        self.peer = ""
        return self.moved

    def ping(self) -> int:
        return self.moved

    def end(self) -> None:
        self.agent = self.lists = None
        self.running = []


def play(name: str, pipe: Connection, options: argparse.Namespace, log: str, ended: Any) -> None:
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
        context = multiprocessing.get_context("fork")
        self.name, self.log = name, logs / f"{name}.log"
        self.pipe, theirs = context.Pipe()
        self.ended: Any = context.Value("Q", lock=False)
        self.process: BaseProcess = context.Process(target=play, args=(name, theirs, options, str(self.log), self.ended), daemon=True)
        self.process.start()
        theirs.close()
        self.place: tuple[bytes, int] = self.hear(20.0)

    def hear(self, within_s: float) -> Any:
        if not self.pipe.poll(within_s):
            raise TimeoutError(f"{self.name} did not answer within {within_s:g} s")
        return self.pipe.recv()

    def ask(self, order: str, *arguments: Any, within_s: float = 10.0) -> Any:
        self.pipe.send((order, *arguments))
        return self.hear(within_s)

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def death(self) -> str:
        """How it died by itself: the signal, and UCX's words."""
        self.process.join(5)
        code = self.process.exitcode
        if code is None:
            self.kill()
            return "hangs"
        text = self.log.read_text(errors="replace")
        found = ASSERTION.findall(text)
        frames = re.findall(r"^\s*\d+ .*?\b((?:uc[pst]|nixl)\w+)\s*\(", text, re.M)
        name = signal.Signals(-code).name if code < 0 else f"exit {code}"
        where = " ".join(found[-1]).strip() if found else "no assertion"
        return f"{name} {where}" + (f" in {' < '.join(frames[:6])}" if frames else "")


def trial(survivor: Process, victim: Process, options: argparse.Namespace, rng: random.Random) -> int:
    """One victim's life and death."""
    role, fault = options.survivor, options.fault
    if fault == "connect-kill":
        survivor.ask("meet", victim.name, *victim.place, role != "owner")
    else:
        if role in ("owner", "both"):
            victim.ask("meet", survivor.name, *survivor.place, True)
        if role in ("initiator", "both"):
            survivor.ask("meet", victim.name, *victim.place, True)
    time.sleep(rng.uniform(0, options.moment))
    if fault == "stop-kill":
        victim.signal(signal.SIGSTOP)
        time.sleep(0.05)
    elif fault == "away-kill":
        survivor.signal(signal.SIGSTOP)
        time.sleep(0.02)
    elif fault == "stop":
        victim.signal(signal.SIGSTOP)
        time.sleep(0.2)
        victim.signal(signal.SIGCONT)
        time.sleep(0.02)
    if fault == "close":
        victim.pipe.send(("end",))
        victim.process.join(5)
    victim.kill()
    if fault == "away-kill":
        survivor.signal(signal.SIGCONT)
    time.sleep(SETTLE_S)
    moved: int = survivor.ask("forget")
    survivor.ask("ping")
    return moved


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All trials; bounded in time."""
    rng, deaths, done, moved, ended = random.Random(options.seed), Counter[str](), 0, 0, 0
    began, survivor, examples = time.monotonic(), None, dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="ucx-abort-") as folder:
        while done < options.trials and time.monotonic() - began < options.seconds:
            if survivor is None:
                survivor, moved = Process(f"survivor{done}", options, Path(folder)), 0
            victim = Process(f"victim{done}", options, Path(folder))
            done += 1
            try:
                moved = trial(survivor, victim, options, rng)
            except (EOFError, ConnectionError, TimeoutError):
                death = survivor.death()
                deaths[death] += 1
                if death not in examples:
                    examples[death] = survivor.log.read_text(errors="replace")[-6000:]
                survivor = None
            finally:
                victim.kill()
                ended += victim.ended.value
        if survivor is not None:
            survivor.kill()
    if options.verbose:
        for death, text in examples.items():
            print(f"--- {death}\n{text}", file=sys.stderr)
    return {
        "survivor": options.survivor, "fault": options.fault, "operation": options.operation, "trials": done,
        "died": deaths.total(), "deaths": dict(deaths.most_common()), "ucx": options.ucx, "nixl": options.nixl,
        "posts": options.posts, "post_bytes": options.post_bytes, "last_moved": moved, "victims_ended": ended,
        "seconds": round(time.monotonic() - began, 1),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.ucx_abort",
        description=__doc__,
        epilog="faults:\n" + "\n".join(f"  {name:13} {text}" for name, text in FAULTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--survivor", choices=("owner", "initiator", "both"), default="owner")
    parser.add_argument("--fault", choices=tuple(FAULTS), default="kill")
    parser.add_argument("--operation", choices=("read", "write"), default="read")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--posts", type=int, default=16)
    parser.add_argument("--post-bytes", type=int, default=1 << 20)
    parser.add_argument("--moment", type=float, default=0.05)
    parser.add_argument("--nap", type=float, default=0.001)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--ucx", action="append", default=[], metavar="UCX_KEY=VALUE")
    parser.add_argument("--nixl", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(arguments)
    os.environ.update({"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "WARN"})
    os.environ.update(dict(each.split("=", 1) for each in options.ucx))
    load_nixl()
    record = run(options)
    print(json.dumps(record))
    return int(record["died"] > 0)


if __name__ == "__main__":
    sys.exit(main())
