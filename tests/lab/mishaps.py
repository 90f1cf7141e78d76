"""Mishaps of single requests of a simulated service, so that their blocks come back late: exactly.

A `Fault` befalls ranks for a while, with all processes that run there then. A `Mishap` befalls a request at some of its
its params are thrown away, its reader dies between two messages, its release is lost each time that it is said. So it
is known why that request's blocks were late, while others around it go well. Scripts of both kinds can be mixed.

Packets are opened for it: what is lost or changed of them is one message about one request, and all others arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from asynckv.core.events import Ending
from asynckv.core.types import Address, Key
from asynckv.core.wire import Ack, Claim, Granted, Message, Refused, Release, Renew, decode_packet, encode_packet
from asynckv.errors import AsyncKVError
from asynckv.testing.fabric import Transfer
from tests.lab.world import Process, TransferFate

MISHAPS = {
    "params_lost": "the router throws the params away",
    "aborted": "the params arrive, and the decode engine's scheduler drops the request without a word",
    "announced": "the request is announced and never pulled",
    "late": "the params are under way for longer than the lease runs",
    "renamed": "the router changes the prefill request id in the params",
    "dies_before_claim": "the reader's process dies as it is about to claim",
    "dies_reading": "it dies when it has claimed, in the middle of a read",
    "dies_before_release": "it dies when it has read all, as it is about to release",
    "release_lost": "its releases of the request are lost, each time that they are sent",
    "release_renamed": "its releases bear another prefill request id on arrival",
    "ack_lost": "what is lost are the acknowledgements: nothing is late",
    "retry_never": "the pull fails, its caller has said that another attempt follows, and makes none",
    "stuck": "its transfers never end",
    "slow": "its transfers end long after it has failed",
    "doubt": "its transfers fail, and end seconds later",
    "cancelled": "it is cancelled in the middle of a long read",
    "unmet": "nothing passes between its readers and the prefill engine",
    "keys_refused": "the prefill engine does not know its readers' keys",
    "reader_away": "its reader's loop is away for seconds when it has claimed",
    "owner_away": "the prefill engine's loop is away for seconds when it has been read",
    "owner_dies": "a rank of the prefill engine dies when it has been claimed",
    "owner_closes": "it closes",
    "owner_sleeps": "it is suspended, and resumed",
}
"""Mishaps of a request, by name."""


@dataclass(frozen=True, slots=True)
class Mishap:
    """A mishap of one request.

    Attributes:
        kind: One of `MISHAPS`.
        ask: The request's number.
        readers: Names of the decode ranks that it befalls.
        owners: Names of the prefill ranks concerned; all if empty.
        seconds: Time for which a rank is away, down or cut off, or by which a message is late.
    """

    kind: str
    ask: int
    readers: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"request {self.ask}: {self.kind} at {' '.join(self.readers)}"
            f"{f', {self.owners}' if self.owners else ''} ({self.seconds:.2f} s)"
        )


class Mishaps:
    """Brings them about in one service.

    Args:
        service: A `Service` (`tests.lab.service`), which is about to begin.
        mishaps: What is to befall its requests.
    """

    def __init__(self, service: Any, mishaps: Iterable[Mishap]) -> None:
        self.service = service
        self._at: dict[tuple[int, str], Mishap] = {(m.ask, name): m for m in mishaps for name in m.readers}
        self._tokens: dict[str, int] = {}
        """Requests by the tokens of their keys."""
        self._doomed: set[Process] = set()
        """They say nothing any more: the world has yet to come to their death."""
        self._happened: set[tuple[Mishap, str]] = set()
        self._cut: list[Mishap] = [m for m in mishaps if m.kind in ("unmet", "keys_refused")]
        if self._at:
            service.world.censor = self._censor

    def at(self, ask: int, reader: str, *kinds: str) -> Mishap | None:
        """Say what befalls a request at a reader, if it is one of these."""
        mishap = self._at.get((ask, reader))
        return mishap if mishap is not None and mishap.kind in kinds else None

    def asked(self, number: int, params: dict[str, Any]) -> None:
        """A request has its key."""
        self._tokens[msgspec.convert(params["key"], Key).token] = number

    def params(self, ask: int, reader: str, params: dict[str, Any]) -> dict[str, Any]:
        """Return the params that a reader gets, of those of a request."""
        renamed = self.at(ask, reader, "renamed")
        return params | {"request_id": f"{params['request_id']}'"} if renamed else params

    def is_turned_away(self, reader: str, owner: str, at: float) -> bool:
        """Whether an owner does not know a reader's key."""
        return any(
            m.kind == "keys_refused" and at < m.seconds and reader in m.readers and (not m.owners or owner in m.owners)
            for m in self._cut
        )

    # -- reads ---------------------------------------------------------------------------------------------------------

    def fate_of(self, rank: Any, transfer: Transfer, fate: TransferFate) -> TransferFate:
        """Return the fate of a read."""
        posted = rank.engine._driver.core.decode.transfers.get(transfer.transfer_id)
        ask = None if posted is None else self._tokens.get(posted.pull.params.key.token)
        mishap = None if ask is None else self._at.get((ask, rank.name))
        match mishap.kind if mishap is not None else "":
            case "stuck":
                return TransferFate(math.inf)
            case "slow":
                assert mishap is not None
                return TransferFate(mishap.seconds)
            case "doubt":
                assert mishap is not None
                return TransferFate(0.001, Ending.IN_DOUBT, lands=0.5, after_s=mishap.seconds, cause="in doubt")
            case "retry_never":
                return TransferFate(0.001, Ending.FAILED, lands=0.5, cause="failed")
            case "dies_reading" | "cancelled":
                return replace(fate, seconds=max(fate.seconds, 3.0), inline=False)
            case _:
                return fate

    # -- packets -------------------------------------------------------------------------------------------------------

    def _censor(self, source: Process, target: Process, packet: bytes) -> bytes:
        """Return the rest of a packet."""
        if source in self._doomed:
            return b""
        names = source.name.partition("#")[0], target.name.partition("#")[0]
        if any(self._is_cut(mishap, source, target, *names) for mishap in self._cut):
            return b""
        try:
            opened = decode_packet(packet)
        except AsyncKVError:
            return packet
        left = [x for m in opened.messages if (x := self._message(m, source, target, *names)) is not None]
        if left == list(opened.messages) and source not in self._doomed:
            return packet
        return encode_packet(opened.sender, opened.target, left) if left and source not in self._doomed else b""

    def _is_cut(self, mishap: Mishap, source: Process, target: Process, sender: str, receiver: str) -> bool:
        if self.service.world.now >= mishap.seconds or sender[0] == receiver[0] == "d":
            return False
        reader, owner = (sender, receiver) if sender in mishap.readers else (receiver, sender)
        if reader not in mishap.readers or (mishap.owners and owner not in mishap.owners):
            return False
        if mishap.kind == "keys_refused" and sender == reader:
            self._turn_away(source, target, reader, owner)
        return True

    def _turn_away(self, source: Process, target: Process, reader: str, owner: str) -> None:
        """Give both sides the messages about a key that is not known."""
        place = (Mishap("", 0), f"{source.name} {target.name}")
        ranks = self.service.ranks
        if place in self._happened:
            return
        self._happened.add(place)
        at = self.service.world.now + 1e-3
        target.call_at(at, ranks[owner].engine._driver.on_refused, "unlisted_key", f"{reader} with key {reader}")
        source.call_at(at, ranks[reader].engine._driver.on_refused, "turned_away", Address(f"sim://{owner}"))

    def _message(
        self, message: Message, source: Process, target: Process, sender: str, receiver: str
    ) -> Message | None:
        """Return the rest of one message."""
        if not isinstance(message, Claim | Renew | Granted | Refused | Release | Ack):
            return message
        ask = self._tokens.get(message.key.token)
        is_question = isinstance(message, Claim | Renew | Release)
        reader, owner = (sender, receiver) if is_question else (receiver, sender)
        mishap = None if ask is None else self._at.get((ask, reader))
        if mishap is None or (mishap.owners and owner not in mishap.owners):
            return message
        process = source if is_question else target
        match mishap.kind, message:
            case ("dies_before_claim", Claim()) | ("dies_before_release", Release()):
                self._die(mishap, process, reader)
                return None
            case "dies_reading", Granted():
                self._die(mishap, process, reader, 0.05)
            case "release_lost", Release():
                return None
            case "release_renamed", Release():
                return msgspec.structs.replace(message, request_id=f"{message.request_id}'")
            case "ack_lost", Ack():
                return None
            case "reader_away", Granted():
                self._once(mishap, reader, 0.05, lambda: process.freeze(mishap.seconds))
            case "owner_away", Granted():
                self._once(mishap, owner, 0.0, lambda: source.freeze(mishap.seconds))
            case "owner_dies", Granted():
                crash = partial(self.service._crash, self.service.ranks[owner], mishap.seconds)
                self._once(mishap, owner, 0.05, crash)
            case "owner_closes", Granted():
                self._once(mishap, owner, 0.05, partial(self.service._close, self.service.ranks[owner]))
            case "owner_sleeps", Granted():
                sleep = partial(self.service._sleep, self.service.ranks[owner], mishap.seconds)
                self._once(mishap, owner, 0.05, sleep)
            case "cancelled", Granted():
                self._once(mishap, "", 0.05, partial(self.service._cancel, mishap.ask))
            case _:
                pass
        return message

    def _once(self, mishap: Mishap, name: str, after_s: float, happen: Callable[[], object]) -> bool:
        if (mishap, name) in self._happened:
            return False
        self._happened.add((mishap, name))
        world = self.service.world
        world.note("script", mishap.kind, mishap)
        world.counts[f"mishap.{mishap.kind}"] += 1
        world.at(world.now + after_s, happen)
        return True

    def _die(self, mishap: Mishap, process: Process, name: str, after_s: float = 0.0) -> None:
        """End a process; what is said until the world is there is not heard."""
        service, rank = self.service, self.service.ranks[name]

        def die() -> None:
            self._doomed.add(process)
            if rank.process is process:
                service._crash(rank, mishap.seconds)

        if self._once(mishap, name, after_s, die) and not after_s:
            self._doomed.add(process)
