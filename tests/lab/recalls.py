"""Take requests back from real processes while they read: `python -m tests.lab.recalls --help`.

An owner's own thread recalls a request through its `EngineThread`, and overwrites the blocks with the next instruction.
A reader of another process pulls the request, and compares every byte of what is published. Real NIXL and ZMQ; one
request at a time. The reader says in shared memory when it begins to read and when its last byte has landed, so the
owner recalls at a chosen moment:

- `moving`: at a random time from the first post on, about as long as a read takes;
- `landed`: after the last byte, while a hook holds the reader's last claim back.

A second reader has a planted bug: a grant that still runs proves its reads. It must publish wrong bytes.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import typer

from asynckv import Engine, EngineConfig, LeaseConfig, LogConfig, NixlConfig, PrefillRanks, PullError
from asynckv.core.pull import Pull
from asynckv.core.source import NEVER, Source
from asynckv.core.types import Address, ReplyTo
from asynckv.embed import EngineThread, Lend
from asynckv.tools.bench.processes import Failure
from scripts import command
from tests.lab.arena import BLOCK, allocate, layout_of
from tests.lab.fleet import TRANSPORTS, Fleet, SharedNumber, pattern

MIB = 16  # blocks of 64 KiB
RUBBISH = np.uint64(0xBADC0FFEEBADF00D)
PATIENCE_S = 20.0
OUTCOMES = ("complete", "lease_lost", "revoked")
"""What a pull may come to; `revoked` if it was recalled before anything was granted."""

CONFIG: dict[str, Any] = {
    "lease": LeaseConfig(lease_s=120.0, grant_s=20.0),
    "nixl": NixlConfig(process="never"),
    "log": LogConfig(level="error"),
}


class Moments:
    """Numbers of the newest requests of which a reader has posted a read, and of which all has landed."""

    def __init__(self, folder: str) -> None:
        self.posted, self.landed = (SharedNumber(Path(folder) / name) for name in ("posted", "landed"))


class Owner:
    """An engine on its own thread. Its embedder's thread recalls, and writes at once."""

    def __init__(self, *, folder: str, mib: int) -> None:
        registration, self._words = allocate(layout_of(blocks=MIB * mib))
        self._thread = EngineThread(EngineConfig(engine_id="owner", **CONFIG), registration)
        self._moments, self._ids = Moments(folder), list(range(MIB * mib))

    async def __aenter__(self) -> Self:
        self._thread.start()
        self._group = PrefillRanks("owner", [self._thread.engine.endpoint])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._thread.close()

    def lend(self, number: int) -> dict[str, Any]:
        self._words[:] = pattern(number, self._ids, self._words.shape[1])
        tokens = BLOCK * len(self._ids)
        self._params = self._group.make_params(f"p{number}", [(0, self._ids)], tokens, written=True, recall=True)
        self._thread.submit([Lend(self._params)])
        return self._params

    def recall(self, number: int, moment: Literal["moving", "landed"], delay_s: float) -> float:
        """Wait for a moment, recall, and overwrite, the blocks that are read last first; tell when recall returned."""
        seen = self._moments.posted if moment == "moving" else self._moments.landed
        deadline = time.monotonic() + PATIENCE_S
        while seen.value != number:
            if time.monotonic() > deadline:
                raise Failure(f"request {number} was never {moment}")
            time.sleep(0)
        time.sleep(delay_s)
        others = self._thread.recall([self._params], PATIENCE_S)
        recalled_at = time.monotonic()
        self._words[self._ids[::-1]] = RUBBISH
        self._thread.take_finished()
        if others:
            raise Failure(f"others hold blocks of request {number}: {others}")
        return recalled_at


def prove_by_the_clock(self: Source) -> None:
    """Take a read for proven while any grant runs, as for a request that its owner cannot recall."""
    if not self.proven and self.has_landed:
        self.proven = self.lent_by < self.first_posted_at and NEVER < self.done_at < self.covered_until


class Reader:
    """An engine that pulls one request at a time.

    Args:
        planted: True if it has the bug.
    """

    def __init__(self, *, name: str, folder: str, mib: int, planted: bool) -> None:
        registration, self._words = allocate(layout_of(blocks=MIB * mib))
        self._engine, self._ids = Engine(EngineConfig(engine_id=name, **CONFIG), registration), list(range(MIB * mib))
        self._moments, self._number, self._at = Moments(folder), 0, dict[str, float]()
        self._kept: list[tuple[Address | ReplyTo, bytes]] | None = None
        self._control = self._engine._driver.control
        self._send, self._control.send = self._control.send, self._hold_back  # type: ignore[method-assign]
        if planted:
            Source.prove = prove_by_the_clock  # type: ignore[method-assign]
        self._posted, self._ended = Pull.posted, Pull.ended
        Pull.posted = lambda *said: self._on_post(*said)  # type: ignore[method-assign]
        Pull.ended = lambda *said: self._on_end(*said)  # type: ignore[method-assign]

    async def __aenter__(self) -> Self:
        await self._engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._engine.aclose()

    def _on_post(self, pull: Pull, *said: Any) -> Any:
        self._moments.posted.value = self._number
        self._at.setdefault("posted", time.monotonic())
        return self._posted(pull, *said)

    def _on_end(self, pull: Pull, *said: Any) -> Any:
        effects = self._ended(pull, *said)
        if all(source.has_landed for source in pull.sources):
            self._moments.landed.value = self._number
            self._at.setdefault("landed", time.monotonic())
        return effects

    def _hold_back(self, to: Address | ReplyTo, packet: bytes) -> bool:
        if self._kept is None or "posted" not in self._at:
            return self._send(to, packet)
        self._kept.append((to, packet))
        return True

    async def pull(self, number: int, params: dict[str, Any], is_held_back: bool) -> dict[str, Any]:
        """Pull a request, and tell what came of it, when, and how many bytes are wrong."""
        self._words[:] = 0
        self._number, self._at, self._kept = number, {}, [] if is_held_back else None
        reason, name = "complete", f"d{number}"
        try:
            await self._engine.pull(name, [(0, self._ids)], params, timeout_s=PATIENCE_S)
        except PullError as exc:
            reason = str(exc.reason)
        self._at["ended"] = time.monotonic()
        await self._engine.returned(name)
        wrong = 8 * int(np.count_nonzero(self._words != pattern(number, self._ids, self._words.shape[1])))
        return {"reason": reason, "wrong": wrong, **self._at}

    def let_go(self) -> None:
        """Send what was held back."""
        kept, self._kept = self._kept or [], None
        for to, packet in kept:
            self._send(to, packet)


class Run:
    """An owner and its readers, with one transport."""

    def __init__(self, transport: str, seed: int, mib: int) -> None:
        self.transport, self._mib, self._rng = transport, mib, random.Random(f"{seed}/{transport}")
        self.counts, self._number, self._read_s = Counter[str](), 0, 0.01

    async def work(self, recalls: int) -> dict[str, Any]:
        async with Fleet(TRANSPORTS[self.transport]) as fleet:
            setup: dict[str, Any] = {"folder": str(fleet.folder), "mib": self._mib}
            self._owner = await fleet.start("owner", "tests.lab.recalls:Owner", **setup)
            self._reader = await fleet.start("reader", "tests.lab.recalls:Reader", name="r", planted=False, **setup)
            bad = await fleet.start("planted", "tests.lab.recalls:Reader", name="b", planted=True, **setup)
            for number in range(recalls):
                await self._one(self._reader, "landed" if number % 6 == 5 else "moving", "")
                if number % 5 == 4:
                    await self._one(bad, "moving", "planted_")
            await fleet.stop()
        return {"read_ms": round(1e3 * self._read_s, 1), **self.counts}

    async def _one(self, reader: Any, moment: str, kind: str) -> None:
        self._number += 1
        number, is_held_back = self._number, moment == "landed"
        params = await self._owner.ask("lend", number=number)
        pulled = asyncio.create_task(
            reader.ask("pull", 2 * PATIENCE_S, number=number, params=params, is_held_back=is_held_back)
        )
        delay_s = self._rng.uniform(0.0, 0.002 if is_held_back else 1.1 * self._read_s)
        at = await self._owner.ask("recall", 2 * PATIENCE_S, number=number, moment=moment, delay_s=delay_s)
        if is_held_back:
            await reader.ask("let_go")
        told = await pulled
        self._read_s += 0.1 * (told["landed"] - told["posted"] - self._read_s)
        moments = {"moving": told["landed"], "landed": told["ended"]}
        when = next((name for name, end in moments.items() if told["posted"] <= at < end), "after")
        outcome = told["reason"] if told["reason"] in OUTCOMES else "else"
        what = "published" if outcome == "complete" else "withheld"
        counts = {"recalls": 1, when: 1, outcome: 1, f"{what}_wrong": told["wrong"] > 0, f"{what}_bytes": told["wrong"]}
        self.counts.update({f"{kind}{name}": int(count) for name, count in counts.items()})


def problems(found: Counter[str], recalls: int) -> list[str]:
    """Judge the counts of all transports together."""
    moving, landed, wrong = found["moving"], found["landed"], found["planted_published_wrong"]
    said = {
        f"{found['published_bytes']} wrong bytes were published": found["published_bytes"] > 0,
        f"{found['else']} pulls ended otherwise than {', '.join(OUTCOMES)}": found["else"] > 0,
        f"only {moving} of {recalls} recalls came while bytes moved": moving < recalls / 3,
        f"only {landed} of {recalls} recalls came between the last byte and its grant": landed < recalls / 15,
        "no pull was complete": not found["complete"],
        "no failed pull had wrong bytes, so nothing was tried": not found["withheld_wrong"],
        "a reader that trusts its clock published no wrong bytes": not wrong,
    }
    return [text for text, is_so in said.items() if is_so]


async def run(
    recalls: int, seed: int = 0, transports: tuple[str, ...] = ("cma", "tcp"), mib: int = 32
) -> dict[str, Any]:
    """Recall so many requests, shared by the transports; return the record."""
    began, by_transport, wrong = time.monotonic(), dict[str, dict[str, Any]](), list[str]()
    for transport in transports:
        try:
            by_transport[transport] = await Run(transport, seed, mib).work(recalls // len(transports))
        except Failure as exc:
            wrong.append(f"{transport}: {exc}")
    total = Counter[str]()
    for found in by_transport.values():
        total.update({name: count for name, count in found.items() if name != "read_ms"})
    wrong += problems(total, recalls)
    seconds = round(time.monotonic() - began, 1)
    return {
        "scenario": "recalls",
        "ok": not wrong,
        "problems": wrong,
        "seconds": seconds,
        "total": total,
        **by_transport,
    }


def recalls(
    recalls: Annotated[
        int, typer.Option(min=20, max=100_000, help="Requests, half of them over each transport.")
    ] = 300,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
    mib: Annotated[int, typer.Option(min=1, max=512, help="MiB of each request.")] = 32,
    json: command.Json = "-",
) -> int:
    """Recall requests while real processes read them over CMA and TCP, and overwrite them at once."""
    return command.report(json, [lambda: asyncio.run(run(recalls, seed, mib=mib))])


EPILOG = """
`moving`, `landed`, `after`: recalls that returned while bytes moved, before the last grant, and after the pull's end.
`*_wrong`, `*_bytes`: pulls with wrong bytes, and these. `planted_*`: the reader that trusts its clock.

[bold]Exit status[/bold]  0 all good, 1 wrong bytes or too few recalls in time, 2 bad input, 130 Ctrl-C
"""
main = command.script(recalls, EPILOG)


if __name__ == "__main__":
    sys.exit(main())
