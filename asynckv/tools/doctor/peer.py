"""Ask the engine at an address for its identity and the way to its memory, as a reader would, without reading a block.

The engine's own protocol is tried first. Only if there is no answer, a plain TCP connection finds the reason, which
adds a refused connection to the engine's log.
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
from typing import Any, NamedTuple

from msgspec.structs import astuple, replace

from asynckv.account.values import decode_account
from asynckv.config import KeysConfig
from asynckv.core import wire
from asynckv.core.readers import DOCTOR
from asynckv.core.types import Address, Cohort, ReplyTo
from asynckv.edges.control import zmq
from asynckv.errors import LayoutError, RemoteProtocolError
from asynckv.geometry.check import decode_layout
from asynckv.geometry.layout import fingerprint
from asynckv.ports import AgentInfo
from asynckv.tools.doctor import host
from asynckv.tools.doctor.facts import PeerFacts
from asynckv.tools.doctor.probe import Place
from asynckv.tools.greeting import look_at_port

ANSWER_S = 4.0
SILENCE_S = 1.0  # then the port itself is looked at
SLOW_S = ANSWER_S - SILENCE_S
RETRY_S = 0.25
CONNECT_S = 3.0
GREETING_S = 2.0
HUNG_UP = 0x0200 | 0x0800 | 0x2000 | 0x4000  # ZMQ's events: disconnected, or a handshake that failed

IP_MTU, IPV6_MTU = 14, 24


class Asked(NamedTuple):
    """Return facts, and the way to memory if there is one. No memory is read."""

    facts: PeerFacts
    place: Place | None = None


def check_address(address: str) -> tuple[str, int, bytes | None]:
    """Return the host, the port, and the key, or refuse what is no address."""
    endpoint, key = zmq._split(address)
    port = endpoint.rpartition(":")[2]
    return zmq._host(endpoint), 0 if port == "*" else int(port), key


async def ask(address: str, keys: KeysConfig | None, note: Callable[[str], None]) -> Asked:
    name, port, key = check_address(address)
    facts = PeerFacts(
        address=address, stage="resolve", has_key=key is not None, has_keys=keys is not None, our_minor=wire.MINOR,
        addresses=(),
    )  # fmt: skip
    if zmq._is_wildcard(name) or not port:
        return Asked(facts)
    note(f"resolving {name}")
    addresses, error = await asyncio.to_thread(host.resolve, name)
    facts = replace(facts, addresses=addresses, error=error)
    if error:
        return Asked(facts)
    there = zmq._endpoint(addresses[0], str(port)) + "".join(address.partition("#")[1:])  # resolved already
    return await _Asking(Address(there), port, keys, facts, note).run()


class _Asking:
    def __init__(
        self, address: Address, port: int, keys: KeysConfig | None, facts: PeerFacts, note: Callable[[str], None]
    ) -> None:
        self._address, self._number, self._port, self._note = address, facts.addresses[0], port, note
        self.facts = facts
        self.place: Place | None = None
        self._sender = secrets.token_hex(8)
        self._nonces = iter(range(secrets.randbits(40), 1 << 62))
        self._waiting: dict[int, asyncio.Future[wire.Message]] = {}
        self._foreign = ""
        self._plane = zmq.ZmqPlane("tcp://127.0.0.1:0", keys=keys)

    def _know(self, **facts: object) -> None:
        self.facts = replace(self.facts, **facts)

    async def run(self) -> Asked:
        refusal = self._plane.refusal(self._address)
        self._know(stage="connect", local="", key_refusal=refusal)
        if self._find_route() and not refusal:
            await self._plane.start(self._hear, self._refused)
            link = self._plane._connect(self._address)
            hung_up: Any = None if link is None else link.socket.get_monitor_socket(HUNG_UP)
            try:
                await self._talk()
                self._know(hung_up=hung_up is not None and bool(hung_up.poll(0)))
            finally:
                if hung_up is not None and link is not None:
                    with suppress(Exception):  # the link was given up, and the monitor with it
                        link.socket.disable_monitor()
                    hung_up.close(0)
                await self._plane.aclose()
        return Asked(self.facts, self.place)

    def _find_route(self) -> bool:
        """See which way packets would take; nothing is sent."""
        is_six = ":" in self._number
        with socket.socket(socket.AF_INET6 if is_six else socket.AF_INET, socket.SOCK_DGRAM) as asking:
            try:
                asking.connect((self._number, self._port))
            except OSError as exc:
                self._know(error=exc.strerror or str(exc), errno=exc.errno or 0)
                return False
            self._know(local=str(asking.getsockname()[0]))
            with suppress(OSError):
                self._know(path_mtu=asking.getsockopt(41, IPV6_MTU) if is_six else asking.getsockopt(0, IP_MTU))
        return True

    async def _talk(self) -> None:
        self._note(f"asking {self._number}")
        status = await self._answer(wire.StatusRequest(0), SILENCE_S)
        if status is None and not self._foreign:
            self._note("no answer; looking at the port itself")
            seen = await asyncio.to_thread(look_at_port, self._number, self._port, CONNECT_S, GREETING_S)
            stage = "speak" if seen.connected else self.facts.stage
            self._know(stage=stage, mechanism=seen.mechanism, error=seen.error, errno=seen.errno)
            if seen.mechanism and not self.facts.turned_away:
                # The listener speaks ZMQ, so it may be slow; if it asks for keys, a hang-up is the likelier cause.
                seconds = SILENCE_S if seen.mechanism == "CURVE" else SLOW_S
                status = await self._answer(wire.StatusRequest(0), seconds)
        if isinstance(status, wire.Status):
            rank = f"tp{status.tp_rank} of {status.tp_size}"
            self._know(stage="hello", engine_id=status.engine_id, rank=rank, gauges=dict(status.gauges))
            await self._ask_account()
            await self._shake_hands(status)
        elif self._foreign or self.facts.turned_away:
            self._know(stage="speak", error=self._foreign)

    async def _ask_account(self) -> None:
        """Ask for versions and settings, which an engine tells if it is asked for an account (`asynckv why`)."""
        answer = await self._answer(wire.StatusRequest(0, most=1), SILENCE_S)
        if not isinstance(answer, wire.Status) or not answer.account:
            return  # it is older, or does not want to
        with suppress(RemoteProtocolError):
            there = decode_account(answer.account).facts
            told = {"asynckv": there.version, "nixl": there.planes.get("nixl", "")}
            versions = {name: value for name, value in told.items() if value}
            self._know(versions=versions, planes=dict(there.planes), life=there.life, away_s=there.lag.most_s)

    async def _shake_hands(self, status: wire.Status) -> None:
        stage, cohort = 0, Cohort(f"{DOCTOR}{os.getpid()}")
        for _ in range(2):
            hello = wire.Hello(0, wire.MAJOR, wire.MINOR, status.engine_id, status.tp_rank, cohort, stage)
            answer = await self._answer(hello, ANSWER_S)
            found = re.search(r"/pp(\d+)/", answer.detail) if isinstance(answer, wire.Unwelcome) else None
            if found is None or int(found[1]) == stage:
                break
            stage = int(found[1])  # only the engine knows the stage, and reports it
        match answer:
            case wire.Welcome():
                self._take_welcome(answer)
            case wire.Unwelcome(reason=reason, detail=detail):
                self._know(unwelcome=f"{reason.value}: {detail}")
            case _:
                self._know(error=f"a hello was not answered within {ANSWER_S:g} s")

    def _take_welcome(self, answer: wire.Welcome) -> None:
        is_whole = hashlib.sha256(answer.metadata).digest() == answer.digest
        self._know(major=answer.major, minor=answer.minor, agent=answer.agent_name, digest_ok=is_whole)
        self._know(metadata_bytes=len(answer.metadata))
        try:
            layout = decode_layout(bytes(answer.layout))
        except (LayoutError, RemoteProtocolError) as exc:
            self._know(error=str(exc))
            return
        self._know(
            layout=fingerprint(layout),
            token_shards=tuple([astuple(each) for each in layout.token_shards or ()]),
            memories=len(layout.memories),
            memory_bytes=sum(m.length for m in layout.memories),
            memory_kinds=tuple(sorted({m.kind for m in layout.memories})),
            stage="done",
        )
        if is_whole:
            self.place = Place(AgentInfo(answer.agent_name, answer.metadata), layout.memories[:1])

    async def _answer(self, question: wire.StatusRequest | wire.Hello, seconds: float) -> wire.Message | None:
        """Ask under a nonce of its own until an answer comes, the time is up, or it is clear that none will come."""
        nonce = next(self._nonces)
        packet = wire.encode_packet(self._sender, "", [replace(question, nonce=nonce)])
        future: asyncio.Future[wire.Message] = asyncio.get_running_loop().create_future()
        self._waiting[nonce] = future
        try:
            deadline = time.monotonic() + seconds
            while (left := deadline - time.monotonic()) > 0 and not self._foreign and not self.facts.turned_away:
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
            packet = wire.decode_packet(data)
        except wire.OtherVersion as exc:
            self._foreign = str(exc)
            return
        except RemoteProtocolError:
            return
        for message in packet.messages:
            if isinstance(message, wire.Status | wire.Welcome | wire.Unwelcome):
                self._know(incarnation=packet.sender)
                future = self._waiting.get(message.nonce)
                if future is not None and not future.done():
                    future.set_result(message)

    def _refused(self, cause: str, peer: str) -> None:
        if cause == "turned_away":
            self._know(turned_away=True)
