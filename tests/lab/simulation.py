"""Whole services in one thread: real engines, simulated planes, a seeded script of faults, a hostile allocator.

`simulate(seed)` runs some prefill and decode ranks for a few virtual seconds while everything goes wrong that
the script says: packets are lost, repeated, late; processes crash, restart, freeze, pause anywhere; transfers
are slow, fail, are in doubt, never end, and land after they were reported dead. Blocks that are given back are
overwritten at once, on both sides. Afterwards: one outcome per request and in time, every published byte right,
no byte written into a block that was given back, no block lost, everything idle.

With `make=make_follow_script` the same services get most requests with a ticket, which decode engines follow.

With `make=make_ahead_script` decode engines read prompts that are still computed.

With `make=make_tier_script` seeds stand for engines that offload: tiers fail, fill up, hang and rot, and ranks die and
come back on their disks with another geometry.

The same seed gives the same run, event by event.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any

from asynckv.core.wire import decode_packet
from asynckv.errors import AsyncKVError
from tests.lab.ahead import AheadService
from tests.lab.ahead_script import AHEAD_FAULTS, AheadScript, make_ahead_script
from tests.lab.doors import Doors
from tests.lab.follow_script import FOLLOW_FAULTS, make_follow_script
from tests.lab.following import FollowService
from tests.lab.logs import Logs
from tests.lab.script import FAULTS, Ask, Fault, Script, make_script
from tests.lab.service import Service
from tests.lab.tier_script import TIER_FAULTS, TierScript, make_tier_script
from tests.lab.tier_service import TierService
from tests.lab.world import Process

__all__ = [
    "AHEAD_FAULTS",
    "FAULTS",
    "FOLLOW_FAULTS",
    "TIER_FAULTS",
    "Ask",
    "Fault",
    "Found",
    "Outcome",
    "Script",
    "make_ahead_script",
    "make_follow_script",
    "make_script",
    "make_tier_script",
    "minimise",
    "play",
    "simulate",
    "simulate_many",
]

AnyScript = Script | TierScript | AheadScript
Make = Callable[[int, Sequence[str]], AnyScript]


@dataclass(slots=True)
class Outcome:
    """The result of a run.

    Attributes:
        script: What was run.
        violation: What happened that must never happen; empty if nothing did.
        counts: How often each thing happened.
        trace: Everything that happened: when, at which process, what, and details; `events` formats it.
    """

    script: AnyScript
    violation: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    trace: list[tuple[float, str, str, Any]] = field(default_factory=list)

    def events(self, last: int = 200) -> Iterator[str]:
        """Tell the last events before the end."""
        for at, name, what, detail in self.trace[-last:]:
            if isinstance(detail, bytes):
                detail = _messages(detail)
            yield f"{at:11.6f}  {name:<12} {what} {detail}".rstrip()

    def explain(self, last: int = 200) -> Iterator[str]:
        """Tell what was violated, by which requests and faults, and the last events."""
        script = self.script
        yield f"{self.violation or 'no violation'}"
        yield from script.explain()
        yield from map(str, script.asks)
        yield from map(str, script.faults)
        yield from self.events(last)


def _messages(packet: bytes) -> str:
    try:
        return ", ".join(type(m).__name__ for m in decode_packet(packet).messages)
    except AsyncKVError as exc:
        return f"garbage ({exc})"


@contextmanager
def _silent() -> Iterator[None]:
    logger = logging.getLogger("asynckv")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def play(script: AnyScript, doors: Callable[[Process], Doors] = Doors, logs: Logs | None = None) -> Outcome:
    """Run one script.

    Args:
        script: What to run.
        doors: As for `simulate`.
        logs: As for `simulate`.
    """
    listeners = [logs] if logs is not None else []
    service: Service | TierService | AheadService
    with _silent():
        if isinstance(script, TierScript):
            service = TierService(script, doors, listeners)
        elif isinstance(script, AheadScript):
            service = AheadService(script, doors, listeners)
        else:
            is_followed = any(ask.legs is not None for ask in script.asks)
            service = (FollowService if is_followed else Service)(script, doors, listeners)
        service.run()
    world = service.world
    trace = sorted(world.trace + world.asides, key=itemgetter(0))
    return Outcome(script, world.violation, service.outcomes + world.counts, trace)


def simulate(
    seed: int,
    faults: Sequence[str] = FAULTS,
    doors: Callable[[Process], Doors] = Doors,
    logs: Logs | None = None,
    make: Make = make_script,
) -> Outcome:
    """Run the service, requests and faults that a seed stands for.

    Args:
        seed: The same seed gives the same run.
        faults: Kinds of faults that may happen.
        doors: What passes through the doors of each process; for ranks that are not honest.
        logs: Has afterwards what the processes have logged.
        make: Makes the script of a seed. With `make_tier_script` (and `TIER_FAULTS`) it is an engine that offloads.
    """
    return play(make(seed, faults), doors, logs)


@dataclass(slots=True)
class Found:
    """The results of many seeds.

    Attributes:
        seeds: How many are done: the first ones.
        interrupted: Ctrl-C came before the last.
    """

    seeds: int = 0
    violations: dict[int, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    interrupted: bool = False


CHUNK = 25
MOST_VIOLATIONS = 20


def _chunk(
    seeds: Sequence[int], faults: Sequence[str], directory: Path | None, make: Make
) -> tuple[int, dict[int, str], Counter[str]]:
    violations, counts = {}, Counter[str]()
    for seed in seeds:
        logs = None if directory is None else Logs()
        outcome = simulate(seed, faults, logs=logs, make=make)
        if logs is not None and directory is not None:
            logs.write(directory / f"seed-{seed}")
        counts += outcome.counts
        if outcome.violation:
            violations[seed] = outcome.violation
    return len(seeds), violations, counts


@contextmanager
def _deaf() -> Iterator[None]:
    """Let processes that are started meanwhile ignore Ctrl-C: this one decides what it means."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _heeding() -> Iterator[threading.Event]:
    """Tell of Ctrl-C between two seeds: an exception may come where it is not passed on, and leave a seed half run.

    A second one is an exception.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def heed(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before)
        asked.set()

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, heed)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def simulate_many(
    seeds: Sequence[int],
    faults: Sequence[str] = FAULTS,
    jobs: int = 1,
    progress: Callable[[int], None] = lambda done: None,
    directory: Path | None = None,
    make: Make = make_script,
) -> Found:
    """Run many seeds on several processes. It stops early at many violations, and at Ctrl-C.

    Args:
        seeds: The seeds to run.
        faults: Kinds of faults that may happen.
        jobs: How many processes run them.
        progress: Called with how many more seeds are done.
        directory: Where to write the logs, each seed's in a directory of its own; nowhere if left out.
        make: Makes the script of a seed.
    """
    found, begun = Found(), time.perf_counter()
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    asked = threading.Event()
    with ExitStack() as stack:
        results: Iterator[tuple[int, dict[int, str], Counter[str]]]
        if jobs == 1 or len(chunks) == 1:
            asked = stack.enter_context(_heeding())
            ones = itertools.takewhile(lambda seed: not asked.is_set(), seeds)
            results = (_chunk([seed], faults, directory, make) for seed in ones)
        else:
            context = multiprocessing.get_context("spawn")
            with _deaf():
                pool = stack.enter_context(context.Pool(min(jobs, len(chunks))))
            results = pool.imap(partial(_chunk, faults=faults, directory=directory, make=make), chunks)
        try:
            for done, violations, counts in results:
                found.seeds += done
                found.violations |= violations
                found.counts += counts
                progress(done)
                if len(found.violations) >= MOST_VIOLATIONS:
                    break
        except KeyboardInterrupt:
            found.interrupted = True
        found.interrupted |= asked.is_set()
    found.seconds = time.perf_counter() - begun
    return found


def minimise(script: AnyScript, most: int = 200, doors: Callable[[Process], Doors] = Doors) -> Outcome:
    """Make a script that fails smaller: leave out faults and requests while the same kind of violation comes.

    Args:
        script: A script that ends in a violation.
        most: How many runs this may take.
        doors: As for `simulate`.
    """
    best = play(script, doors)
    kind = _kind(best.violation)
    changed = True
    while changed and most > 0:
        changed = False
        for what in ("faults", "asks"):
            items = getattr(best.script, what)
            for item in items:
                most -= 1
                left = tuple(x for x in items if x is not item)
                changes: dict[str, Any] = {what: left}
                smaller = replace(best.script, **changes)
                found = play(smaller, doors)
                if found.violation and _kind(found.violation) == kind:
                    best, changed = found, True
                    break
                if most <= 0:
                    break
            if changed:
                break
    return best


def _kind(violation: str) -> str:
    return "".join(c for c in violation if not c.isdigit())[:40]
