"""Asks the engine at an address who it is and how its memory is reached, as a reader would; reads none of its blocks.

First everything is tried over the engine's own protocol, with keys if there are any. Only when that is not answered, a
plain TCP connection tells why: whether anything listens, and by its greeting whether it speaks ZMQ, with keys or
without. (Done first, it would be one more stranger in the engine's log.)
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from asynckv.config import KeysConfig
from asynckv.core.account import decode_account
from asynckv.core.readers import DOCTOR
from asynckv.core.types import Address, Cohort, ReplyTo
from asynckv.core.wire import (
    MAJOR,
    MINOR,
    Hello,
    Message,
    OtherVersion,
    Status,
    StatusRequest,
    Unwelcome,
    Welcome,
    decode_packet,
    encode_packet,
)
from asynckv.edges import zmq
from asynckv.errors import LayoutError, RemoteProtocolError
from asynckv.geometry.check import decode_layout
from asynckv.geometry.layout import fingerprint
from asynckv.ports import AgentInfo
from asynckv.tools.doctor import host
from asynckv.tools.doctor.facts import PeerFacts
from asynckv.tools.doctor.probe import Place
from asynckv.tools.greeting import look_at_port

ANSWER_S = 4.0
SILENCE_S = 1.0
"""After so long without an answer the port itself is looked at."""

RETRY_S = 0.25
CONNECT_S = 3.0
GREETING_S = 2.0
HUNG_UP = 0x0200 | 0x0800 | 0x2000 | 0x4000
"""ZMQ's events: disconnected, and a handshake that failed for whatever cause."""

IP_MTU, IPV6_MTU = 14, 24


class Asked(msgspec.Struct):
    """What came of it: facts, and the way to memory if there is one, none of which is read."""

    facts: PeerFacts
    place: Place | None = None


def check_address(address: str) -> tuple[str, str, int, bytes | None]:
    """Return what ZMQ connects to, the host, the port, and the key."""
    endpoint, key = zmq._split(address)
    name, port = zmq._host(endpoint), endpoint.rpartition(":")[2]
    if port == "*":
        port = "0"
    return endpoint, name, int(port), key


async def ask(address: str, keys: KeysConfig | None, note: Callable[[str], None]) -> Asked:
    """Ask."""
    _, name, port, key = check_address(address)
    first = PeerFacts(
        address=address, stage="resolve", has_key=key is not None, has_keys=keys is not None, our_minor=MINOR,
        addresses=(),
    )  # fmt: skip
    if zmq._is_wildcard(name) or not port:
        return Asked(first)
    note(f"resolving {name}")
    addresses, error = await asyncio.to_thread(host.resolve, name)
    first = msgspec.structs.replace(first, addresses=addresses, error=error)
    if error:
        return Asked(first)
    there = zmq._endpoint(addresses[0], str(port)) + "".join(address.partition("#")[1:])  # resolved already
    return await _Asking(there, addresses[0], port, keys, first, note).run()


class _Asking:
    """One conversation."""

    def __init__(
        self,
        address: str,
        number: str,
        port: int,
        keys: KeysConfig | None,
        facts: PeerFacts,
        note: Callable[[str], None],
    ) -> None:
        self._address, self._number, self._port, self._note = Address(address), number, port, note
        self._told: dict[str, object] = {}
        self._first = facts
        self._sender = secrets.token_hex(8)
        self._nonces = iter(range(secrets.randbits(40), 1 << 62))
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._foreign = ""
        self._turned_away = False
        self._plane = zmq.ZmqPlane("tcp://127.0.0.1:0", keys=keys)

    async def run(self) -> Asked:
        """Go as far as it leads."""
        refusal = self._plane.refusal(self._address)
        self._know(stage="connect", local="", key_refusal=refusal)
        if not await self._route() or refusal:
            return self._done()
        await self._plane.start(self._hear, self._refused)
        link = self._plane._connect(self._address)
        hung_up: Any = None if link is None else link.socket.get_monitor_socket(HUNG_UP)
        try:
            asked = await self._talk()
            if hung_up is not None and hung_up.poll(0):
                asked.facts = msgspec.structs.replace(asked.facts, hung_up=True)
            return asked
        finally:
            if hung_up is not None and link is not None:
                with suppress(Exception):  # the link was given up, and the monitor with it
                    link.socket.disable_monitor()
                hung_up.close(0)
            await self._plane.aclose()

    async def _talk(self) -> Asked:
        self._note(f"asking {self._number}")
        status = await self._answer(StatusRequest, SILENCE_S)
        if status is None and not self._foreign:
            self._note("no answer; looking at the port itself")
            await asyncio.to_thread(self._look_at_port)
            mechanism = self._told.get("mechanism")
            if mechanism and not self._turned_away:
                # It is ZMQ, so it may be slow; where keys are asked for, a hang-up is the likelier cause.
                status = await self._answer(StatusRequest, SILENCE_S if mechanism == "CURVE" else ANSWER_S - SILENCE_S)
        if not isinstance(status, Status):
            if self._foreign or self._turned_away:
                self._know(stage="speak", error=self._foreign, turned_away=self._turned_away)
            return self._done()
        self._know(stage="hello", engine_id=status.engine_id)
        self._know(rank=f"tp{status.tp_rank} of {status.tp_size}", gauges=dict(status.gauges))
        await self._ask_account()
        return await self._shake_hands(status)

    # -- how far away ----------------------------------------------------------------------------------

    async def _route(self) -> bool:
        """See which way packets would take; nothing is sent."""
        family = socket.AF_INET6 if ":" in self._number else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            try:
                asking.connect((self._number, self._port))
            except OSError as exc:
                self._know(error=exc.strerror or str(exc), errno=exc.errno or 0)
                return False
            self._know(local=str(asking.getsockname()[0]))
            with suppress(OSError):
                level, what = (41, IPV6_MTU) if family == socket.AF_INET6 else (0, IP_MTU)
                self._know(path_mtu=asking.getsockopt(level, what))
        return True

    def _look_at_port(self) -> None:
        """Say what listens there, if anything does."""
        found = look_at_port(self._number, self._port, CONNECT_S, GREETING_S)
        stage = "speak" if found.connected else self._told["stage"]
        self._know(stage=stage, mechanism=found.mechanism, error=found.error, errno=found.errno)

    async def _ask_account(self) -> None:
        """Ask for versions and settings, which an engine tells if it is asked for an account (`asynckv why`)."""
        answer = await self._answer(lambda nonce: StatusRequest(nonce, most=1), SILENCE_S)
        if not isinstance(answer, Status) or not answer.account:
            return  # it is older, or does not want to
        with suppress(RemoteProtocolError):
            there = decode_account(answer.account).facts
            told = {"asynckv": there.version, "nixl": there.planes.get("nixl", "")}
            self._know(
                versions={name: value for name, value in told.items() if value},
                planes=dict(there.planes),
                life=there.life,
                away_s=there.lag.most_s,
            )

    # -- what it has -------------------------------------------------------------------------------------

    async def _shake_hands(self, status: Status) -> Asked:
        stage = 0
        for _ in range(2):
            make = _hello(status, stage)
            answer = await self._answer(make, ANSWER_S)
            found = re.search(r"/pp(\d+)/", answer.detail) if isinstance(answer, Unwelcome) else None
            if found is None or int(found[1]) == stage:
                break
            stage = int(found[1])  # which stage it is only the engine knows, and says
        match answer:
            case Welcome():
                return self._take_welcome(answer)
            case Unwelcome(reason=reason, detail=detail):
                self._know(unwelcome=f"{reason.value}: {detail}")
            case _:
                self._know(error=f"a hello was not answered within {ANSWER_S:g} s")
        return self._done()

    def _take_welcome(self, answer: Welcome) -> Asked:
        self._know(
            major=answer.major,
            minor=answer.minor,
            agent=answer.agent_name,
            metadata_bytes=len(answer.metadata),
            digest_ok=hashlib.sha256(answer.metadata).digest() == answer.digest,
        )
        try:
            layout = decode_layout(bytes(answer.layout))
        except (LayoutError, RemoteProtocolError) as exc:
            self._know(error=str(exc))
            return self._done()
        self._know(
            layout=fingerprint(layout),
            memories=len(layout.memories),
            memory_bytes=sum(m.length for m in layout.memories),
            memory_kinds=tuple(sorted({m.kind for m in layout.memories})),
            stage="done",
        )
        asked = self._done()
        if asked.facts.digest_ok:
            asked.place = Place(AgentInfo(answer.agent_name, answer.metadata), layout.memories[:1])
        return asked

    # -- packets ---------------------------------------------------------------------------------------------

    async def _answer(self, make: Callable[[int], Message], seconds: float) -> Message | None:
        """Ask until it is answered, or the time is up, or it is clear that it will not be."""
        nonce = next(self._nonces)
        packet = encode_packet(self._sender, "", [make(nonce)])
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[nonce] = future
        try:
            deadline = time.monotonic() + seconds
            while (left := deadline - time.monotonic()) > 0 and not self._foreign and not self._turned_away:
                self._plane.send(self._address, packet)
                done, _ = await asyncio.wait([future], timeout=min(left, RETRY_S))
                if done:
                    return future.result()
        finally:
            del self._waiting[nonce]
        return None

    def _hear(self, origin: Address | ReplyTo, data: bytes, principal: str) -> None:
        if origin != self._address:
            return
        try:
            packet = decode_packet(data)
        except OtherVersion as exc:
            self._foreign = str(exc)
            return
        except RemoteProtocolError:
            return
        for message in packet.messages:
            if isinstance(message, Status | Welcome | Unwelcome):
                self._know(incarnation=packet.sender)
                self._tell(message.nonce, message)

    def _tell(self, nonce: int, answer: Message) -> None:
        future = self._waiting.get(nonce)
        if future is not None and not future.done():
            future.set_result(answer)

    def _refused(self, cause: str, who: str) -> None:
        if cause == "turned_away":
            self._turned_away = True

    def _know(self, **facts: object) -> None:
        self._told |= facts

    def _done(self) -> Asked:
        return Asked(msgspec.structs.replace(self._first, **self._told))


def _hello(status: Status, stage: int) -> Callable[[int], Message]:
    cohort = Cohort(f"{DOCTOR}{os.getpid()}")
    return lambda nonce: Hello(nonce, MAJOR, MINOR, status.engine_id, status.tp_rank, cohort, stage)
