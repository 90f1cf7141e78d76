"""`asynckv doctor --serve`: memory that is there to be measured against from another host.

It listens as an engine does, with the same keys, and says to be `asynckv-doctor`. The memory, its NIXL agent and the
raw socket are in a process of their own, which is started anew when it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from asynckv.config import EngineConfig
from asynckv.core.types import Address, Reason, ReplyTo
from asynckv.core.wire import (
    Hello,
    Message,
    Ping,
    Pong,
    Status,
    StatusRequest,
    Unwelcome,
    decode_packet,
    encode_packet,
)
from asynckv.edges import zmq
from asynckv.errors import BackendError, RemoteProtocolError
from asynckv.tools.doctor import probing, words
from asynckv.tools.doctor.facts import Software

__all__ = ["serve", "versions"]

LOOK_S = 0.5
MOST_RESTARTS = 20


def versions(has: Software, ucx: str = "") -> dict[str, str]:
    """What the other side may compare."""
    found = {"asynckv": has.asynckv, "python": has.python, "nixl": has.nixl, "variant": has.variant, "ucx": ucx}
    return {name: value for name, value in found.items() if value}


async def serve(config: EngineConfig, has: Software, say: Callable[[str], None]) -> int:
    """Serve until SIGINT or SIGTERM; which of them it was.

    Raises:
        ConfigError: An engine would not listen so.
        BackendError: The address cannot be bound, or no NIXL agent can be made here.
    """
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def stop(number: int) -> None:
        if not stopped.done():  # whoever is impatient sends several
            stopped.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    plane = zmq.ZmqPlane(config.bind, config.advertise, config.allow_insecure, config.keys)
    with tempfile.TemporaryDirectory(prefix="asynckv-doctor-") as folder, contextlib.ExitStack() as stack:
        here = _Scratch(config, has, Path(folder), stack)
        here.start()
        await plane.start(
            lambda origin, data, principal: here.answer(plane, origin, data),
            lambda cause, who: say(f"turned a connection away: {cause} {who}"),
        )
        try:
            say(f"asynckv doctor --to {plane.address}")
            while not stopped.done():
                await asyncio.wait([stopped], timeout=LOOK_S)
                if not stopped.done() and here.restart():
                    say("the process that offers memory died, and was started anew")
        finally:
            await plane.aclose()
    return stopped.result()


class _Scratch:
    """The memory, and what is said of it."""

    def __init__(self, config: EngineConfig, has: Software, folder: Path, stack: contextlib.ExitStack) -> None:
        self._config, self._has, self._folder, self._stack = config, has, folder, stack
        self._probe: probing.Probe | None = None
        self._place: words.Place | None = None
        self._num_starts = 0
        name = zmq._host(config.bind)
        self._host = "0.0.0.0" if name == "*" else name

    def start(self) -> None:
        """Start a process that offers memory.

        Raises:
            BackendError: It does not come to that.
        """
        from dataclasses import replace

        self._num_starts += 1
        nixl = replace(self._config.nixl, posting_threads=0)
        name = f"doctor-scratch-{self._num_starts}"
        try:
            self._probe, said = self._stack.enter_context(probing.offer(nixl, self._folder, self._host, name))
        except probing.Ended as exc:
            raise BackendError(f"no memory can be offered: {exc}; asynckv doctor says more") from exc
        self._place = said.place

    def restart(self) -> bool:
        """Start another if it died."""
        if self._probe is None or self._probe.is_alive() or self._num_starts > MOST_RESTARTS:
            return False
        self._place = None
        self.start()
        return True

    def answer(self, plane: zmq.ZmqPlane, origin: Address | ReplyTo, data: bytes) -> None:
        """Answer a stranger."""
        if isinstance(origin, str):
            return
        if (question := words.decode_ask(data)) is not None:
            plane.send(origin, msgspec.json.encode(self._offer(question.nonce)))
            return
        with contextlib.suppress(RemoteProtocolError):
            answers: list[Message] = []
            for message in decode_packet(data).messages:
                match message:
                    case Ping(nonce):
                        answers.append(Pong(nonce))
                    case StatusRequest(nonce):
                        answers.append(Status(nonce, words.DOCTOR, 0, 1, {}))
                    case Hello(nonce):
                        text = "asynckv doctor --serve listens here, and lends nothing"
                        answers.append(Unwelcome(nonce, Reason.WRONG_TARGET, text))
                    case _:
                        pass
            if answers:
                plane.send(origin, encode_packet(words.DOCTOR, "", answers))

    def _offer(self, nonce: int) -> words.Offer:
        place, told = self._place, versions(self._has, self._probe.log().version if self._probe else "")
        if place is None:
            return words.Offer(nonce, "its process has died; ask again", time.time(), told)
        digest = hashlib.sha256(place.metadata.encode()).hexdigest()
        return words.Offer(
            nonce, "", time.time(), told, place.name, place.metadata, digest, place.memories, place.port, place.token
        )
