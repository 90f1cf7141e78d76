"""Attack real workers, and check that healthy peers do not notice: `python -m tests.lab.attack --help`.

Real processes, NIXL over UCX on CPU memory, ZMQ on 127.0.0.1; twice, with keys and without. Healthy pulls go on all
the time, and every byte of them is compared. Meanwhile a malicious peer with a listed key floods both listeners
with mutated packets and frames of 100 MB, repeats what it said, and forges claims, releases and grants; strangers
without a listed key try to get in; raw connections send garbage, or one byte at a time. Processes choose routing ids,
send messages of thousands of empty parts, or fill all queues, and then end by `os._exit`.

A good peer asks the prefill engine again and again, alone and under each of these; the record compares how long it
waits for the answers. That depends on what else the machine does, so it is reported and not judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Annotated, Any, Self

import typer
import zmq
from rich.console import Console
from rich.progress import Progress

from asynckv.core import wire as m
from asynckv.core.types import Cohort, Key, KVTransferParams, Outcome, Reason, decode_params
from asynckv.edges.control import zmq as edge
from asynckv.keys import KeyPair, write_pair
from asynckv.tools.bench.processes import Failure
from scripts import command
from tests.lab import strangers
from tests.lab.arena import PATIENCE_S, Arena, Side, Worker, arena, layout_of
from tests.lab.strangers import HUGE, Proxy, Stranger, connected, every_message, mutate, packets, place

BATCH = 250
SLOW = 100
"""Slow connections at a time."""

GROWTH_MIB = 64
"""Most that a victim's memory may grow: queues of several attackers' connections fit, what they sent does not."""

RUDE_S, RUDE = 2.0, 2
"""Seconds for which each kind of rude process is sent, and their number at a time."""

PARTS = 4000
"""Empty parts of one message."""

FIRST_ID = 0x6B8B4567
"""Where libzmq begins to number connections in every process, since nothing seeds `rand()`."""

PROCESSES = multiprocessing.get_context("spawn")
CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
HANDSHAKE_COMMANDS = {b"WELCOME", b"ERROR"}
"""Commands that a listener with keys may send to a peer that has not proven a key."""


# -- what attackers do -------------------------------------------------------------------------------


@dataclass(slots=True)
class Flood:
    """One attacker's connection, in a thread of its own: sends what `make` makes, and reads what comes back."""

    address: str
    pair: KeyPair | None
    make: Callable[[], bytes]
    number: int
    sent: int = 0
    answers: int = 0
    """Packets that came back."""
    cut: int = 0
    """Connections that had to be made anew, since nothing was taken from the last one."""
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        stranger = Stranger(self.address, self.pair, 2.0)
        try:
            while self.sent < self.number and not self.stop.is_set():
                try:
                    for _ in range(min(BATCH, self.number - self.sent)):
                        stranger.socket.send(self.make())
                        self.sent += 1
                except zmq.Again:
                    self.cut += 1
                    stranger.close()
                    stranger = Stranger(self.address, self.pair, 2.0)
                with contextlib.suppress(zmq.Again):
                    while True:
                        stranger.socket.recv(zmq.NOBLOCK)
                        self.answers += 1
            # What was sent is to arrive before the connection goes.
            ping = m.Ping((1 << 40) + self.sent)
            with contextlib.suppress(zmq.Again):
                stranger.socket.send(m.encode_packet("stranger", "", [ping]))
                while m.Pong(ping.nonce) not in m.decode_packet(stranger.socket.recv()).messages:
                    self.answers += 1
        finally:
            stranger.close()


async def drip(address: str, was_cut: Callable[[float], None]) -> None:
    """Hold a connection as long as it is let, saying a byte of a greeting now and then; for ever."""
    while True:
        with contextlib.suppress(OSError):  # while ended connections have left much behind, no new one is taken
            await _drip(address, was_cut)
        await asyncio.sleep(0.01)


async def _drip(address: str, was_cut: Callable[[float], None]) -> None:
    async with connected(*place(address)) as (reader, writer):
        began, listening = time.monotonic(), asyncio.create_task(reader.read())
        try:
            for byte in itertools.chain(CURVE_GREETING[:11], itertools.repeat(0)):
                writer.write(bytes([byte]))
                if (await asyncio.wait({listening}, timeout=0.9))[0]:
                    break
            was_cut(time.monotonic() - began)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


async def shout(address: str, rng: random.Random, counts: Counter[str]) -> None:
    """Send raw garbage on connection after connection; for ever."""
    hello = CURVE_GREETING + b"\x04\xc8\x05HELLO\x01\x00" + bytes(72)
    while True:
        said = (
            rng.randbytes(rng.randint(1, 4096)),
            mutate(rng, strangers.HANDSHAKE) + rng.randbytes(100),
            mutate(rng, hello + rng.randbytes(120)),
            CURVE_GREETING + bytes([rng.choice((0, 1, 2, 4, 6))]) + rng.randbytes(300),
            b"GET /metrics HTTP/1.1\r\n\r\n",
        )
        with contextlib.suppress(OSError, TimeoutError):
            async with connected(*place(address)) as (reader, writer), asyncio.timeout(1.0):
                writer.write(rng.choice(said))
                writer.write_eof()
                while await reader.read(1 << 16):
                    pass
        counts["raw_connections"] += 1
        await asyncio.sleep(0.01)


def end_rudely(kind: str, address: str, pair: KeyPair | None, next_id: int, all_there: Barrier) -> None:
    """Misbehave for a while in a process of its own, and end without closing anything."""
    all_there.wait(PATIENCE_S)
    ends, strangers = time.monotonic() + RUDE_S, [Stranger(address, pair, 0.1)]
    while time.monotonic() < ends:
        stranger = strangers[-1]
        with contextlib.suppress(zmq.Again):
            if kind == "parts":
                stranger.socket.send_multipart([b""] * PARTS)
            elif kind == "queues":  # of the victim's answers none is read
                stranger.socket.send(m.encode_packet("stranger", "", [m.Ping(1 << 50)] * 64))
            elif len(strangers) < 96:
                # Others' names, and those that libzmq would give next: its own, which begin with a zero byte. Then
                # connections that libzmq has to name.
                following = b"\0" + (next_id + RUDE * len(strangers) // 2).to_bytes(4, "big")
                for chosen in (b"decode", following) if len(strangers) < 64 else (b"",):
                    strangers.append(Stranger(address, pair, 0.1, routing_id=chosen))
                    strangers[-1].socket.send(m.encode_packet("stranger", "", [m.Ping(1 << 50)]))
            else:
                time.sleep(0.01)  # an attacker has a machine of its own: it must not take the victim's processors
    os._exit(1)


def ask_well(address: str, pair: KeyPair | None, told: Connection) -> None:
    """Be a good peer in a process of its own: ask, wait for the answer, and tell all times when asked for them."""
    seconds = list[float]()
    stranger = Stranger(address, pair, PATIENCE_S)
    for nonce in itertools.count(1 << 41):
        began = time.monotonic()
        stranger.socket.send(m.encode_packet("good", "", [m.Ping(nonce)]))
        while m.Pong(nonce) not in m.decode_packet(stranger.socket.recv()).messages:
            pass
        seconds.append(time.monotonic() - began)
        if told.poll(0.002):
            told.recv()
            told.send(seconds)
            seconds = []


class Timed(Side):
    """A rank that knows how long the longest turn of its loop was."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._longest_s, self._turns = 0.0, asyncio.create_task(self._watch())
        return self

    async def _watch(self) -> None:
        while True:
            began = time.thread_time()  # what other processes take of the core is no turn's fault
            await asyncio.sleep(0.001)
            self._longest_s = max(self._longest_s, time.thread_time() - began)

    async def turns(self) -> dict[str, float]:
        """Tell the longest turn since this was asked last; the arena's own work is in it."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return {"longest_s": longest_s, "admitted": self.engine.statistics().counters["control.connections.admitted"]}


# -- a victim, healthy readers, and the attackers ----------------------------------------------------


class Watched(Worker):
    """A worker with params that a malicious peer has seen, as a router would."""

    def __init__(self, arena: Arena, name: str) -> None:
        super().__init__(arena, name)
        self.seen: list[KVTransferParams] = []

    async def lend(self, blocks: int = 0, lease_s: float | None = None, reads: bool = False) -> dict[str, Any]:
        lent = await super().lend(blocks, lease_s, reads)
        self.seen = [*self.seen[-31:], decode_params(lent["params"])]
        return lent


class Attack:
    """One victim under every attack."""

    def __init__(self, arena: Arena, frames: int, tell: Callable[[int], None]) -> None:
        self.arena, self.frames, self.tell = arena, frames, tell
        self.rng, self.counts = arena.rng, Counter[str]()
        self.victim = Watched(arena, "prefill")
        arena.prefill.append(self.victim)
        self.mallory: KeyPair | None = None
        self.good: KeyPair | None = None
        self.felt: dict[str, dict[str, float]] = {}
        """Latencies that the good peer and the loop measured in each flood."""
        """Keys that both workers have listed."""
        self.listed: KeyPair | None = None

    def make_keys(self, path: Path) -> None:
        """Give every worker keys, and the malicious peer as well."""
        pairs = {name: edge.make_pair() for name in ("decode", "prefill", "mallory", "good")}
        for name, pair in pairs.items():
            secret, public = write_pair(path / "secret", name, pair)
            (path / "authorized").mkdir(exist_ok=True)
            public.rename(path / "authorized" / public.name)
            self.arena.keys[name] = {"secret": str(secret), "authorized": str(path / "authorized")}
        self.mallory, self.listed, self.good = pairs["mallory"], pairs["decode"], pairs["good"]

    async def run(self) -> dict[str, Any]:
        """Attack, and judge; the record says what was tried and how it was met."""
        arena, victim = self.arena, self.victim
        await arena.decode.start()
        await victim.start()
        lived, everyone_cut = list[float](), asyncio.Event()

        def was_cut(seconds: float) -> None:
            lived.append(seconds)
            if len(lived) >= SLOW:
                everyone_cut.set()

        began = time.monotonic()
        self.told, told = PROCESSES.Pipe()
        good = PROCESSES.Process(target=ask_well, args=(victim.address, self.good, told), daemon=True)
        good.start()
        told.close()
        async with victim.load(3):
            await victim.more(20)
            await self.felt_of("quiet", lambda: asyncio.sleep(RUDE_S))
            before = [(await x.ask("state", wait_s=0))["usage"]["rss_mib"] for x in (arena.decode, victim)]
            async with asyncio.TaskGroup() as group:
                raw = [group.create_task(drip(victim.address, was_cut)) for _ in range(SLOW)]
                raw += [group.create_task(shout(victim.address, self.rng, self.counts)) for _ in range(2)]
                await self.felt_of("raw", lambda: asyncio.sleep(RUDE_S))
                await self.felt_of("packets", self.flood)
                await self.felt_of("huge", self.huge)
                for kind in ("parts", "queues", "ids"):
                    await self.rude(kind)
                if self.mallory is not None:
                    await self.strangers()
                await victim.more(20)
                async with asyncio.timeout(PATIENCE_S):
                    await everyone_cut.wait()
                for task in raw:
                    task.cancel()
            await victim.more(20)
            await self.felt_of("afterwards", lambda: asyncio.sleep(RUDE_S))
        arena.check(not victim.aborts + arena.decode.aborts, "an engine was ended")
        good.kill()
        good.join()
        seconds = time.monotonic() - began
        await arena.finish(victim)
        states = [await x.state() for x in (arena.decode, victim)]
        grown = [s["usage"]["rss_mib"] - b for s, b in zip(states, before, strict=True)]
        limit = edge.HANDSHAKE_IVL_MS / 1000
        arena.check(max(lived) < limit + 3, f"a connection without a handshake lived {max(lived):.1f} s")
        arena.check(max(grown) < GROWTH_MIB, f"the memory of decode and prefill grew by {grown} MiB")
        found = [
            {
                k.removeprefix("control."): v
                for k, v in s["counters"].items()
                if k.startswith(("control.", "dropped.", "internal"))
            }
            for s in states
        ]
        for worker, counters in zip(("decode", "prefill"), found, strict=True):
            arena.check(not counters.get("internal_errors"), f"{worker}: internal errors were counted")
            sent = sum(n for k, n in self.counts.items() if k.endswith(f"to_{worker}"))
            arena.check(counters["packets_in"] >= sent, f"{worker}: took {counters['packets_in']} of {sent} packets")
        return {
            "keys": self.mallory is not None,
            "seconds": round(seconds, 2),
            "sent": dict(self.counts),
            "pulls": victim.record(),
            "felt": self.felt,
            "frames_per_s": round(self.frames / max(self.flood_s, 1e-9)),
            "slow_connections": len(lived),
            "slowest_cut_s": round(max(lived), 2),
            "rss_grown_mib": dict(zip(("decode", "prefill"), grown, strict=True)),
            "decode": found[0],
            "prefill": found[1],
            "left": {"decode": states[0]["left"], "prefill": states[1]["left"]},
        }

    async def felt_of(self, name: str, flood: Callable[[], Awaitable[None]]) -> None:
        """See how a flood is felt by the good peer and by the victim's loop."""
        await self.answered()
        await self.victim.ask("turns")
        await flood()
        seconds = await self.answered()
        p99 = statistics.quantiles(seconds, n=100)[98] if len(seconds) > 1 else max(seconds)
        quiet = self.felt.get("quiet", {}).get("p99_ms", 1e3 * p99)
        self.felt[name] = {
            "asked": len(seconds),
            "p50_ms": round(1e3 * statistics.median(seconds), 2),
            "p99_ms": round(1e3 * p99, 2),
            "times_quiet": round(1e3 * p99 / quiet, 1),
            "longest_turn_ms": round(1e3 * (await self.victim.ask("turns"))["longest_s"], 1),
        }

    async def answered(self) -> list[float]:
        """Return how long the good peer waited for each answer since this was asked last."""
        found: list[float] = []
        try:
            self.told.send(None)
            while not found:
                found = await asyncio.to_thread(self.told.recv)
        except (OSError, EOFError):
            raise Failure("the good peer did not survive") from None
        return found

    async def rude(self, kind: str) -> None:
        """Send processes that end with all their queues full."""
        next_id, all_there = FIRST_ID + (await self.victim.ask("turns"))["admitted"], PROCESSES.Barrier(RUDE + 1)
        their = (kind, self.victim.address, self.mallory)
        sent = [PROCESSES.Process(target=end_rudely, args=(*their, next_id + i, all_there)) for i in range(RUDE)]
        for each in sent:
            each.start()
        await asyncio.to_thread(all_there.wait, PATIENCE_S)

        async def until_ended() -> None:
            for each in sent:
                await asyncio.to_thread(each.join)

        await self.felt_of(kind, until_ended)
        self.counts[f"rude_{kind}"] += len(sent)

    # -- attacks by a peer with a listed key --------------------------------------------------------

    async def flood(self) -> None:
        """Mutated, repeated and forged packets to both listeners at once."""
        arena, victim, rng = self.arena, self.victim, self.rng
        # A mutated claim may bind it to a cohort that no reader is in; then it has to expire.
        own = decode_params((await victim.lend(lease_s=15.0))["params"])
        self.reader = await asyncio.to_thread(self.incarnation, arena.decode.address)
        said = every_message(own, layout_of(), Cohort("mallory"))
        targets = {"prefill": own.endpoints[0].incarnation, "decode": self.reader}
        valid = {name: packets("mallory", target, said) for name, target in targets.items()}

        def mutated(name: str) -> Callable[[], bytes]:
            mine = random.Random(rng.getrandbits(32))
            return lambda: mutate(mine, mine.choice(valid[name]))

        def repeated() -> bytes:
            return repeats[next(numbers) % len(repeats)]

        def forged(name: str) -> Callable[[], bytes]:
            mine = random.Random(rng.getrandbits(32))
            return lambda: m.encode_packet(
                mine.choice((targets["decode"], targets["prefill"], "mallory")), targets[name], [self.forge(mine, name)]
            )

        repeats, numbers = valid["prefill"][3:9], itertools.count()
        tenth = max(1, self.frames // 10)
        floods = {
            "mutated_to_prefill": (victim.address, mutated("prefill"), self.frames * 3 // 4),
            "mutated_to_decode": (arena.decode.address, mutated("decode"), self.frames - self.frames * 3 // 4),
            "repeated_to_prefill": (victim.address, repeated, tenth),
            "forged_to_prefill": (victim.address, forged("prefill"), tenth),
            "forged_to_decode": (arena.decode.address, forged("decode"), tenth),
        }
        running = {k: Flood(to, self.mallory, make, n) for k, (to, make, n) in floods.items()}
        began, told = time.monotonic(), 0
        tasks = [asyncio.create_task(asyncio.to_thread(x.run)) for x in running.values()]
        try:
            while (await asyncio.wait(tasks, timeout=0.2))[1]:
                done = sum(x.sent for k, x in running.items() if k.startswith("mutated"))
                self.tell(done - told)
                told = done
        finally:
            for each in running.values():
                each.stop.set()
            await asyncio.gather(*tasks)
        self.flood_s = time.monotonic() - began
        self.tell(sum(x.sent for k, x in running.items() if k.startswith("mutated")) - told)
        self.counts.update({k: x.sent for k, x in running.items()})
        self.counts["connections_not_taken_from"] = sum(x.cut for x in running.values())
        for name, each in running.items():
            arena.check(each.sent == each.number, f"{name}: only {each.sent} of {each.number} were taken")

    def incarnation(self, address: str) -> str:
        """Ask a listener for its incarnation; any peer may."""
        stranger = Stranger(address, self.mallory)
        try:
            stranger.socket.send(m.encode_packet("mallory", "", [m.Ping(1)]))
            return m.decode_packet(stranger.socket.recv()).sender
        finally:
            stranger.close()

    def forge(self, rng: random.Random, name: str) -> m.Message:
        """Speak for others: about requests that are being pulled, with every part right but what cannot be known."""
        params = rng.choice(self.victim.seen)
        key, cohort, nonce = params.key, Cohort("decode"), rng.choice((rng.getrandbits(62), rng.randrange(1 << 12)))
        pull = f"{self.reader[:16]}-{rng.randrange(5_000)}"  # any process that pings the reader can guess these
        if name == "decode":
            # Grants, refusals and farewells under true keys, but not from the one that was asked.
            return rng.choice(
                (
                    m.Granted(key, pull, nonce, 1000.0, 1000.0),
                    m.Refused(key, pull, nonce, Reason.EXPIRED),
                    m.NotYet(key, pull, nonce),
                    m.Ack(key, pull),
                    m.Unwelcome(nonce, Reason.WRONG_TARGET, ""),
                    m.Goodbye(),
                )
            )
        guessed = Key(key.epoch, key.memory_epoch, key.sequence + rng.randrange(3), f"{rng.getrandbits(128):032x}")
        digest = m.blocks_digest(params)
        return rng.choice(
            (
                m.Claim(guessed, params.request_id, cohort, pull, nonce, digest, 1000.0),
                m.Renew(guessed, pull, nonce, 1000.0),
                m.Release(guessed, params.request_id, cohort, pull, Outcome.COMPLETE),
                m.Goodbye(),
            )
        )

    async def huge(self) -> None:
        """Send frames of 100 MB, with a key that is listed and on raw connections."""
        for worker in (self.victim, self.arena.decode):
            stranger = Stranger(worker.address, self.mallory)
            try:
                was_cut = await asyncio.to_thread(stranger.send_huge)
            finally:
                stranger.close()
            self.arena.check(was_cut, f"a frame of 100 MB did not end its connection to {worker.name}")
            head = strangers.HANDSHAKE + b"\x02" + HUGE.to_bytes(8, "big")
            took = await strangers.shout(worker.address, [head, *[bytes(HUGE // 100)] * 100])
            self.arena.check(took < HUGE, f"{worker.name} took a frame of 100 MB from a raw connection")
            self.counts["huge_frames"] += 2

    # -- what everybody else can do ----------------------------------------------------------------

    async def strangers(self) -> None:
        """Try to get in without a key, with an unlisted one, and with a public key that was stolen."""
        assert self.listed is not None
        unlisted = edge.make_pair()
        tried = {"no_key": None, "unlisted_key": unlisted, "wrong_key": KeyPair(self.listed.public, unlisted.secret)}
        question = m.encode_packet("stranger", "", [m.Ping(1), m.StatusRequest(2), m.StatusRequest(3, m.MAX_TOLD)])
        for worker in (self.victim, self.arena.decode):
            for cause, pair in tried.items():
                before = (await worker.ask("state", wait_s=0))["counters"]
                name = f"control.rejected.{cause}"
                async with Proxy(worker.address) as between:
                    stranger = Stranger(between.address, pair, 0.5)
                    try:
                        stranger.socket.send(question)
                        for _ in range(50):  # libzmq tells of it in its own time, if the stranger stays for so long
                            after = (await worker.ask("state", wait_s=0))["counters"]
                            if after.get(name, 0) > before.get(name, 0):
                                break
                            await asyncio.sleep(0.1)
                        heard = await asyncio.to_thread(stranger.socket.poll, 500)
                    finally:
                        stranger.close()
                    said = between.commands()
                self.counts[f"strangers_with_{cause}"] += 1
                self.counts["bytes_to_strangers"] += len(between.answered)
                problem = f"{worker.name}: a stranger ({cause})"
                self.arena.check(not heard, f"{problem} was answered")
                self.arena.check(said <= HANDSHAKE_COMMANDS, f"{problem} was sent {sorted(said)}")
                self.arena.check(after.get(name, 0) > before.get(name, 0), f"{problem} was not counted")


# -- the command line --------------------------------------------------------------------------------


async def attack(frames: int, seed: int, tell: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
    """Attack workers with keys, then without; half of the mutated frames each."""
    began, rounds, problems = time.monotonic(), list[dict[str, Any]](), list[str]()
    for has_keys, number in ((True, frames - frames // 2), (False, frames // 2)):
        async with arena("keys" if has_keys else "no keys", seed, target="tests.lab.attack:Timed") as made:
            work = Attack(made, number, tell)
            if not has_keys:
                # Once with limits, as it should be, and once without, so that everything is looked at.
                made.setup["limits"] = {"messages_per_s": 1e9, "message_burst": 10**9}
            with tempfile.TemporaryDirectory(prefix="asynckv-keys-") as path:
                if has_keys:
                    work.make_keys(Path(path))
                rounds.append(await work.run())
        problems += [f"{made.name}: {x}" for x in made.problems]
    return {
        "schema": "asynckv.attack/1",
        "ok": not problems,
        "problems": problems,
        "frames": frames,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 2),
        "rounds": rounds,
    }


def assail(
    frames: Annotated[int, typer.Option(help="Mutated frames, half with keys and half without.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="Of mutations, sizes and moments.")] = 0,
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Where the record goes; - is stdout, in one line.")
    ] = None,
) -> int:
    """Attack real workers on this host while healthy pulls go on, and compare every byte of those.

    A malicious peer with a listed key, strangers without one, raw garbage, slow connections, huge frames.
    """
    command.check(10 <= frames <= 1 << 30, f"--frames {frames} is outside 10 ... {1 << 30}")
    errors = Console(stderr=True)
    with command.output(json_to or "-") as out:
        with Progress(console=errors, disable=not errors.is_terminal, transient=True) as bar:
            task = bar.add_task("mutated frames", total=frames)
            record = asyncio.run(attack(frames, seed, lambda n: bar.advance(task, n)))
        print(json.dumps(record, indent=None if json_to == "-" else 2), file=out, flush=True)
    verdict = "nobody noticed" if record["ok"] else "FAILED: " + "; ".join(record["problems"])
    print(f"[attack] {frames} mutated frames, {record['seconds']} s: {verdict}", file=sys.stderr)
    return 0 if record["ok"] else 1


EPILOG = """
[bold]Examples[/bold]

  python -m tests.lab.attack

  python -m tests.lab.attack --frames 20000 --json - | jq .rounds[0].prefill

[bold]Exit status[/bold]  0 nobody noticed, 1 something went wrong, 2 bad input, 130 Ctrl-C
"""
main = command.script(assail, EPILOG)


if __name__ == "__main__":
    sys.exit(main())
