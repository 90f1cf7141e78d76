"""Simulated ranks that behave as if they had a bug: what passes through their doors is changed, whatever is inside.

A bug is a function of a `Rank`, called each time that a process starts. It sets what it changes: methods of the engine
as its owner calls it, of the planes and of the clock; fields of the configuration; and what becomes of single messages.
What it has to remember it keeps for itself, as that process would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from asynckv.config import EngineConfig, LeaseConfig, PullConfig
from asynckv.core.types import Address, Key, ReplyTo, decode_params
from asynckv.core.wire import (
    Ack,
    Claim,
    Granted,
    Message,
    NotYet,
    Refused,
    Release,
    Renew,
    blocks_digest,
    decode_packet,
    encode_packet,
)
from asynckv.errors import RemoteProtocolError
from asynckv.results import LeaseEnd
from tests.lab.doors import Doors
from tests.lab.world import Process

Other = Address | ReplyTo


class Door:
    """Stands for something honest: what is set here comes first, all else is as it was."""

    honest: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.honest, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def open(self, honest: Any) -> Any:
        """Begin to stand for it."""
        self.honest = honest
        return self


@dataclass(frozen=True, slots=True)
class Said:
    """A message on its way.

    Attributes:
        other: Where it goes, or the way it came.
        start: Which start of a process it is for, or from.
    """

    message: Any
    other: Other
    start: str

    def but(self, **changes: Any) -> Said:
        """The same with other words."""
        return replace(self, message=msgspec.structs.replace(self.message, **changes))


Passed = Said | Iterable[Said] | None
Hook = tuple[tuple[type, ...], Callable[[Said], Passed]]


def _passed(hooks: list[Hook], said: Said) -> list[Said]:
    out = [said]
    for kinds, hook in hooks:
        before, out = out, []
        for each in before:
            found: Passed = hook(each) if isinstance(each.message, kinds) else each
            out += [found] if isinstance(found, Said) else list(found or ())
    return out


class Rank:
    """One start of a rank, from outside."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.engine, self.data, self.control, self.clock = Door(), Door(), Door(), Door()
        self.pull_config: Callable[[PullConfig], PullConfig] = lambda config: config
        self.lease_config: Callable[[LeaseConfig], LeaseConfig] = lambda config: config
        self.token_hex: Callable[[Callable[[int], str]], Callable[[int], str]] = lambda honest: honest
        self._senders: list[Hook] = []
        self._hearers: list[Hook] = []
        self._on_packet: Callable[[Other, bytes, str], bool | None] = lambda origin, packet, principal: None
        self.control.send, self.control.start = self._send, self._start

    @property
    def now(self) -> float:
        return self.process.epoch + self.process.now * self.process.rate

    def sends(self, *kinds: type) -> Callable[[Callable[[Said], Passed]], None]:
        """Decide what becomes of messages of these kinds that leave."""
        return lambda hook: self._senders.append((kinds, hook))

    def hears(self, *kinds: type) -> Callable[[Callable[[Said], Passed]], None]:
        """Decide what becomes of messages of these kinds that arrive."""
        return lambda hook: self._hearers.append((kinds, hook))

    def say(self, said: Said) -> None:
        """Send a message that was not asked for, or was asked for before."""
        self.control.honest.send(said.other, encode_packet(self.engine.incarnation, said.start, [said.message]))

    def imagine(self, message: Message, other: Other, start: str) -> None:
        """Hear, in a moment, a message that was never sent."""
        packet = encode_packet(start, self.engine.incarnation, [message])
        self.process.loop.call_soon(self._on_packet, other, packet, "")

    async def _start(self, on_packet: Callable[[Other, bytes, str], bool | None], *args: Any) -> None:
        self._on_packet = on_packet
        await self.control.honest.start(self._hear, *args)

    def _send(self, to: Other, packet: bytes) -> bool:
        if not self._senders:
            return bool(self.control.honest.send(to, packet))
        found = decode_packet(packet)
        before = [Said(message, to, found.target) for message in found.messages]
        after = [said for each in before for said in _passed(self._senders, each)]
        if after == before:
            return bool(self.control.honest.send(to, packet))
        sent = [
            self.control.honest.send(said.other, encode_packet(found.sender, said.start, [said.message]))
            for said in after
        ]
        return all(sent)

    def _hear(self, origin: Other, packet: bytes, principal: str) -> None:
        try:
            found = decode_packet(packet) if self._hearers else None
        except RemoteProtocolError:
            found = None
        if found is None:
            self._on_packet(origin, packet, principal)
            return
        before = [Said(message, origin, found.sender) for message in found.messages]
        after = [said for each in before for said in _passed(self._hearers, each)]
        if after == before:
            self._on_packet(origin, packet, principal)
            return
        for said in after:
            self._on_packet(said.other, encode_packet(said.start, found.target, [said.message]), principal)


class Rigged(Doors):
    """The doors of a rank with a bug."""

    def __init__(self, process: Process, plant: Callable[[Rank], None]) -> None:
        super().__init__(process)
        self._rank = Rank(process)
        plant(self._rank)

    def config(self, config: EngineConfig) -> EngineConfig:
        rank = self._rank
        return replace(config, pull=rank.pull_config(config.pull), lease=rank.lease_config(config.lease))

    def data(self, plane: Any) -> Any:
        return self._rank.data.open(plane)

    def control(self, plane: Any) -> Any:
        return self._rank.control.open(plane)

    def clock(self, clock: Any) -> Any:
        return self._rank.clock.open(clock)

    def token_hex(self, token_hex: Callable[[int], str]) -> Callable[[int], str]:
        return self._rank.token_hex(token_hex)

    def engine(self, engine: Any) -> Any:
        return self._rank.engine.open(engine)


def key_of(params: Any) -> Key:
    """Under which key a request is lent."""
    return msgspec.convert(params["key"], Key)


class EarlyEnd(Door):
    """A lent request that may return to its owner too early."""

    def __init__(self, handle: Any) -> None:
        self.honest = handle
        self._end: asyncio.Future[LeaseEnd] = asyncio.get_running_loop().create_future()
        self._waiting = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        end = await self.honest.wait_released()
        if not self._end.done():
            self._end.set_result(end)

    @property
    def is_open(self) -> bool:
        """It has not ended, truly or not."""
        return not self.honest.is_over and not self._end.done()

    def give_back(self, cause: str) -> None:
        """Say that it has ended."""
        if self.is_open:
            self._end.set_result(LeaseEnd(self.honest.request_id, cause, {}, ("*",), 0.0))

    async def wait_released(self) -> LeaseEnd:
        """As its owner sees it."""
        return await asyncio.shield(self._end)


class Aliases:
    """Lends spent keys again, under keys that the core has not seen: outside it goes unnoticed.

    Args:
        rank: The rank that does it.
        is_trusting: Blocks and names are not compared either.
    """

    def __init__(self, rank: Rank, *, is_trusting: bool = False) -> None:
        self._rank = rank
        self._inside: dict[Key, Key] = {}
        self._outside: dict[Key, Key] = {}
        lent: dict[Key, tuple[str, bytes]] = {}
        self._lent = lent

        def inward(said: Said) -> Said:
            key = self._inside.get(said.message.key)
            if key is None:
                return said
            said = said.but(key=key)
            name, digest = lent[key]
            if is_trusting and not isinstance(said.message, Renew):
                said = said.but(request_id=name)
            return said.but(digest=digest) if is_trusting and isinstance(said.message, Claim) else said

        def outward(said: Said) -> Said:
            key = self._outside.get(said.message.key)
            return said if key is None else said.but(key=key)

        rank.hears(Claim, Renew, Release)(inward)
        rank.sends(Granted, NotYet, Refused, Ack)(outward)

    def lend(self, params: Any, **options: Any) -> Any:
        """Lend it as something new."""
        outside, count = key_of(params), len(self._outside)
        epoch = self._rank.engine.memory_epoch
        inside = Key(f"{outside.epoch[:50]}~{count}", max(epoch, outside.memory_epoch), 0, f"{count:032x}")
        found = decode_params(params)
        self._lent[inside] = found.request_id, blocks_digest(found)
        plain = msgspec.to_builtins(msgspec.structs.replace(found, key=inside))
        handle = self._rank.engine.honest.lend(plain, **options)
        self._inside[outside], self._outside[inside] = inside, outside
        return handle
