"""The two halves of the driver on two machines: their conversation, and the half that follows.

One half listens and *follows*: it starts its own workers from its own options, and relays between them and
the other half, which connects, *leads*, and runs the benchmark as if all workers were its own. The conversation
goes over a control plane of its own (ZMQ; CURVE with keys), in numbered pieces: what a plane may lose ends the run
instead of going unnoticed. Everything that arrives is decoded into bounded types.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import secrets
import signal
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from asynckv.bench import protocol as p
from asynckv.bench import report
from asynckv.bench.children import Child, Reach, Worker, WorkerLost, environment, setups
from asynckv.bench.driver import Measured, Options, memory_available, run
from asynckv.config import KeysConfig
from asynckv.core.types import Address, ReplyTo
from asynckv.errors import AsyncKVError, ConfigError

__all__ = ["Half", "Leader", "facts", "lead", "measure", "serve"]

PIECE = 96 << 10
CONNECT_S = 60.0
BEAT_S = 0.5
SILENCE_S = 6.0
"""A half that says nothing for so long is gone; it says something every half second."""
END_S = 90.0
"""How long the following half waits for the other to end in order, after Ctrl-C."""
FULL_S = 0.02
MOST_NAMED = 10
"""How many connections that were turned away are worth a line."""
NAME = 200

Name = Annotated[str, Meta(max_length=NAME)]
Text = Annotated[str, Meta(max_length=2000)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Status = Annotated[int, Meta(ge=0, le=255)]


class Hello(Struct, tag="hello", frozen=True):
    """The leading half introduces itself."""

    facts: Annotated[dict[Name, Text], Meta(max_length=64)]
    role: Name


class Welcome(Struct, tag="welcome", frozen=True):
    """The other one agrees."""

    memory_available: Count


class Begin(Struct, tag="begin", frozen=True):
    """Start your workers with pools of so many blocks per group."""

    num_blocks: Annotated[
        dict[Name, Annotated[list[Annotated[int, Meta(ge=1, lt=1 << 40)]], Meta(max_length=256)]], Meta(max_length=2)
    ]


class Tell(Struct, tag="tell", frozen=True):
    """Pass a command on to a worker."""

    worker: Name
    line: Annotated[bytes, Meta(max_length=p.LIMIT)]


class Heard(Struct, tag="heard", frozen=True):
    """A worker's answer."""

    worker: Name
    line: Annotated[bytes, Meta(max_length=p.LIMIT)]


class Gone(Struct, tag="gone", frozen=True):
    """A worker's process has ended."""

    worker: Name
    how: Text


class Beat(Struct, tag="beat", frozen=True):
    """Still there."""


class Interrupted(Struct, tag="interrupted", frozen=True):
    """Ctrl-C on the following half."""


class Bye(Struct, tag="bye", frozen=True):
    """The end, and the exit status that it has."""

    status: Status
    why: Text


Message = Hello | Welcome | Begin | Tell | Heard | Gone | Beat | Interrupted | Bye


class Piece(Struct, frozen=True, array_like=True):
    """Some of a message."""

    session: Annotated[bytes, Meta(min_length=16, max_length=16)]
    number: Count
    is_last: bool
    data: Annotated[bytes, Meta(max_length=PIECE)]


MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises, whoever wrote it and however deep it is nested."""

_encoder = msgspec.msgpack.Encoder()
_pieces: msgspec.msgpack.Decoder[Piece] = msgspec.msgpack.Decoder(Piece)
_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Broken(Exception):
    """The conversation cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """Which half of the driver this is.

    Attributes:
        role: The engines that run here.
        bind: `HOST:PORT` to listen at, for the half that follows.
        connect: `HOST:PORT` of the other half, for the one that leads; with keys `#` and the other's public key
            follow, or the name of its file in the authorized directory.
        secret, authorized: As in `KeysConfig`; empty without keys.
        allow_insecure: Go without keys beyond loopback.
    """

    role: str
    bind: str = ""
    connect: str = ""
    secret: str = ""
    authorized: str = ""
    allow_insecure: bool = False

    def __post_init__(self) -> None:
        if bool(self.bind) == bool(self.connect):
            given = "both were given" if self.bind else "neither was given"
            raise ConfigError(
                f"--role {self.role} needs --bind HOST:PORT on one machine and --connect HOST:PORT on the other, but "
                f"{given} here"
            )
        if bool(self.secret) != bool(self.authorized):
            raise ConfigError(
                "--secret and --authorized belong together: this half's own keys, and the directory of those it talks "
                "to; asynckv keygen makes keys"
            )
        if self.secret and self.allow_insecure:
            raise ConfigError("--allow-insecure and --secret contradict each other; leave one of them out")
        option, value = ("--bind", self.bind) if self.bind else ("--connect", self.connect)
        host, _, port = self.address[0].rpartition(":")
        if not host or not port.isdecimal() or not 0 <= int(port) < 65_536 or (self.connect and int(port) == 0):
            raise ConfigError(f"{option} {value!r:.200} is not an address such as 10.0.0.1:9000")
        if host.strip("[]") in ("*", "0.0.0.0", "::"):
            raise ConfigError(f"{option} {value}: a wildcard is nowhere to connect to; name this host's own address")
        if not self.secret and not self.allow_insecure and not _is_loopback(host):
            raise ConfigError(
                f"{option} {value} goes beyond this host without keys: anybody who reaches it could give orders; give "
                f"--secret and --authorized (asynckv keygen makes keys), or --allow-insecure in a trusted network"
            )

    @property
    def address(self) -> tuple[str, str]:
        """`HOST:PORT`, and what names the other half's key."""
        where, _, key = (self.bind or self.connect).removeprefix("tcp://").partition("#")
        return where, key

    @property
    def keys(self) -> KeysConfig | None:
        """For planes and engines."""
        return KeysConfig(secret=self.secret, authorized=self.authorized) if self.secret else None

    def target(self) -> Address:
        """Where the other half listens, with its key.

        Raises:
            ConfigError: The key is missing, or cannot be read.
        """
        from asynckv.keys import read_public

        where, key = self.address
        if not self.secret:
            if key:
                raise ConfigError(
                    f"--connect {self.connect!r:.200} names a key, but this half has none; give --secret and "
                    f"--authorized"
                )
            return Address(f"tcp://{where}")
        if not key:
            raise ConfigError(
                f"--connect {where} names no key; add the other half's, as it prints it, or the name of its file in "
                f"{self.authorized}: --connect {where}#NAME"
            )
        if not (len(key) == 64 and all(c in "0123456789abcdef" for c in key)):
            if "/" in key:
                raise ConfigError(f"--connect {self.connect!r:.200}: {key!r} is neither a key nor a name")
            key = read_public(Path(self.authorized) / f"{key}.key").hex()
        return Address(f"tcp://{where}#{key}")

    def reach(self, lends: bool) -> Reach:
        """Where this half's engines listen: as it does itself; nowhere but on this host, if they never lend."""
        where, _ = self.address
        host = where.rpartition(":")[0]
        if self.connect:
            host = _own_address(where) if lends else "127.0.0.1"
        return Reach(host=host, secret=self.secret, authorized=self.authorized, allow_insecure=self.allow_insecure)


def facts(options: Options) -> dict[str, str]:
    """What both halves have to agree on, by the option that says it."""
    work = options.workload
    digest = hashlib.sha256(repr((work.prompt_tokens, work.chunks, work.arrivals_s)).encode()).hexdigest()[:12]
    model = hashlib.sha256(msgspec.json.encode(options.model)).hexdigest()[:12]
    return {
        "version": version("asynckv"),
        "--seed": str(options.seed),
        "model": f"{options.model.name}, {len(options.model.layers)} layers, {options.model.dtype} ({model})",
        "prefill side": str(msgspec.to_builtins(options.prefill)),
        "decode side": str(msgspec.to_builtins(options.decode)),
        "engines": str(options.engines),
        "workload": f"{len(work.prompt_tokens)} requests, {work.source[:200]} ({digest})",
        "arrivals": str(options.arrivals),
        "--prefix-hit": options.prefix_hit[:200],
        "--prefix-cache": str(options.prefix_cache),
        "--cancel": f"{options.cancel:g} within {options.cancel_within_s:g} s",
        "--concurrency": str(options.concurrency),
        "--warmup": str(options.warmup),
        "--block-order": options.block_order,
        "--verify": options.verify,
        "--lease-s": f"{options.lease_s:g}",
        "--timeout-s": f"{options.timeout_s:g}",
        "--pool-mb": str(options.pool_mb),
        "--transport": options.transport,
        "--announced": str(options.announced),
        "--memory": options.memory,
    }


def difference(mine: Mapping[str, str], theirs: Mapping[str, str], my_role: str, their_role: str) -> str:
    """Name the first thing that two halves do not agree on; empty if there is none."""
    for name in [*mine, *theirs]:
        a, b = mine.get(name, "nothing"), theirs.get(name, "nothing")
        if a != b:
            return (
                f"the two halves differ in {name}: {a} on the {my_role} half, {b} on the {their_role} half; give both "
                f"the same options and the same version"
            )
    return ""


class Conversation:
    """Messages to and from one other half, whole and in order, or not at all.

    Args:
        send: Sends a packet to the other half, or returns False if there is no room.
        session: Sixteen bytes that no other conversation has.
    """

    def __init__(self, send: Callable[[bytes], bool], session: bytes) -> None:
        self.session = session
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._sent = self._taken = 0
        self._unsent: deque[bytes] = deque()
        self._parts: list[bytes] = []
        self._size = 0
        self._inbox: asyncio.Queue[Message | Broken] = asyncio.Queue()
        self._heard_at = self._loop.time()
        self._retry: asyncio.TimerHandle | None = None
        self._beat: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Say something twice a second from here on, and expect the same."""
        self._heard_at = self._loop.time()
        self._tick()

    def end(self) -> None:
        """Say nothing more."""
        for handle in (self._retry, self._beat):
            if handle is not None:
                handle.cancel()

    def send(self, message: Message) -> None:
        """Send as soon as there is room."""
        data = _encoder.encode(message)
        for at in range(0, len(data), PIECE):
            piece = Piece(self.session, self._sent, at + PIECE >= len(data), data[at : at + PIECE])
            self._unsent.append(_encoder.encode(piece))
            self._sent += 1
        self._flush()

    async def receive(self, timeout_s: float | None = None) -> Message:
        """Wait for a message.

        Raises:
            Broken: There will be none any more.
            TimeoutError: None came in time.
        """
        message = await asyncio.wait_for(self._inbox.get(), timeout_s)
        if isinstance(message, Broken):
            self._inbox.put_nowait(message)
            raise message
        return message

    def take(self, piece: Piece) -> None:
        """Take what the plane delivered for this conversation."""
        if piece.number != self._taken:
            return self.break_off(f"piece {self._taken} of the conversation was lost")
        self._taken += 1
        self._heard_at = self._loop.time()
        self._size += len(piece.data)
        if self._size > p.LIMIT:
            return self.break_off(f"a message is longer than {p.LIMIT} bytes")
        if not piece.data and not piece.is_last:
            return self.break_off("a piece is empty, and not the last of its message")
        self._parts.append(piece.data)
        if not piece.is_last:
            return None
        data, self._parts, self._size = b"".join(self._parts), [], 0
        try:
            message = _messages.decode(data)
        except MALFORMED as exc:
            return self.break_off(f"a message is malformed: {exc}")
        if not isinstance(message, Beat):
            self._inbox.put_nowait(message)
        return None

    def break_off(self, why: str) -> None:
        """There is nobody to talk to any more."""
        self._inbox.put_nowait(Broken(why))

    def _flush(self) -> None:
        while self._unsent and self._send(self._unsent[0]):
            self._unsent.popleft()
        if self._retry is not None:
            self._retry.cancel()
        self._retry = self._loop.call_later(FULL_S, self._flush) if self._unsent else None

    def _tick(self) -> None:
        if (silent := self._loop.time() - self._heard_at) > SILENCE_S:
            self.break_off(f"it has said nothing for {silent:.0f} s")
        if not self._unsent:
            self.send(Beat())
        self._beat = self._loop.call_later(BEAT_S, self._tick)


# -- the half that leads -------------------------------------------------------------------------------


class Leader:
    """The other half, as the one that leads sees it.

    Attributes:
        own_role: The engines that run here.
        memory_available: Bytes of memory that the other half's host can give.
        on_interrupt: Called when Ctrl-C was pressed there.
    """

    def __init__(self, own_role: str, where: str, talk: Conversation, memory: int) -> None:
        self.own_role, self.memory_available = own_role, memory
        self.on_interrupt: Callable[[], None] = lambda: None
        self._where, self._talk = where, talk
        self._workers: dict[str, Remote] = {}
        self._lost = ""
        self._listening = asyncio.create_task(self._listen())

    def begin(self, num_blocks: dict[str, list[int]]) -> None:
        """Have the other half start its workers."""
        self._talk.send(Begin(num_blocks))

    def worker(self, name: str) -> Worker:
        """Return one of its workers."""
        worker = self._workers[name] = Remote(name, self._talk)
        if self._lost:
            worker.gone(self._lost)
        return worker

    async def farewell(self, status: int, why: str) -> None:
        """End the conversation."""
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        self._talk.send(Bye(status, why[:2000]))

    async def _listen(self) -> None:
        try:
            while True:
                match await self._talk.receive():
                    case Heard(name, line) if name in self._workers:
                        self._workers[name].heard(line)
                    case Gone(name, how) if name in self._workers:
                        self._workers[name].gone(how)
                    case Interrupted():
                        self.on_interrupt()
                    case Bye(_, why):
                        self._lose(f"the other half at {self._where} ended: {why}")
                        return
                    case other:
                        raise Broken(f"it said {type(other).__name__}, which is out of order")
        except Broken as exc:
            self._lose(f"the other half at {self._where} is gone: {exc}")

    def _lose(self, why: str) -> None:
        self._lost = why
        for worker in self._workers.values():
            worker.gone(why)


class Remote(Worker):
    """A worker of the other half."""

    def __init__(self, name: str, talk: Conversation) -> None:
        super().__init__(name)
        self._talk = talk
        self._answers: asyncio.Queue[bytes | str] = asyncio.Queue()

    @property
    def pid(self) -> int:
        return 0

    def tell(self, command: p.Command) -> None:
        if not self.is_lost:
            self._talk.send(Tell(self.name, p.encode(command)))

    async def end(self) -> None:
        self.is_lost = True

    def heard(self, line: bytes) -> None:
        """Take an answer."""
        self._answers.put_nowait(line)

    def gone(self, how: str) -> None:
        """Take it that there will be no answer any more."""
        self._answers.put_nowait(how)

    async def _next(self, timeout_s: float) -> p.Answer:
        try:
            found = await asyncio.wait_for(self._answers.get(), timeout_s)
        except TimeoutError:
            self.is_lost = True
            raise WorkerLost(f"{self.name} did not answer within {timeout_s:.0f} s") from None
        if isinstance(found, str):
            self.is_lost = True
            raise WorkerLost(found)
        try:
            return p.answers.decode(found)
        except MALFORMED as exc:
            self.is_lost = True
            raise WorkerLost(f"{self.name} answered what cannot be understood: {exc}") from exc


@contextlib.asynccontextmanager
async def lead(options: Options, half: Half, say: Callable[[str], None]) -> AsyncIterator[Leader]:
    """Connect to the other half, and agree with it.

    Yields:
        A `Leader`. Call its `farewell` before leaving.

    Raises:
        ConfigError: It cannot be reached, or has other options.
    """
    from asynckv.edges.zmq import ZmqPlane

    target = half.target()
    where = half.address[0]
    plane = ZmqPlane("tcp://127.0.0.1:0", keys=half.keys)
    if refusal := plane.refusal(target):
        raise ConfigError(f"--connect {where}: {refusal}")
    session = secrets.token_bytes(16)
    talk: Conversation | None = None
    trouble = ""

    def on_packet(origin: Address | ReplyTo, data: bytes) -> None:
        with contextlib.suppress(*MALFORMED):
            piece = _pieces.decode(data)
            if talk is not None and origin == target and piece.session == session:
                talk.take(piece)

    def on_refused(cause: str, who: str) -> None:
        nonlocal trouble
        if cause == "turned_away" and talk is not None:
            trouble = (
                "it turns this half's connection away: this half's .key file has to be in its --authorized directory"
            )
            talk.break_off(trouble)

    await plane.start(on_packet, on_refused)
    try:
        talk = Conversation(partial(plane.send, target), session)
        talk.send(Hello(facts(options), half.role))
        say(f"waiting for the other half at {where}")
        memory = await _welcomed(talk, where)
        talk.begin()
        yield Leader(half.role, where, talk, memory)
    finally:
        if talk is not None:
            talk.end()
        await plane.aclose()


async def _welcomed(talk: Conversation, where: str) -> int:
    loop = asyncio.get_running_loop()
    until = loop.time() + CONNECT_S
    while True:
        try:
            match await talk.receive(BEAT_S):
                case Welcome(memory):
                    return memory
                case Bye(_, why):
                    raise ConfigError(f"the other half at {where} refuses: {why}")
                case other:
                    raise ConfigError(f"--connect {where}: it answered {type(other).__name__}; is it another program?")
        except TimeoutError:
            if loop.time() >= until:
                raise ConfigError(
                    f"--connect {where}: nobody answered within {CONNECT_S:.0f} s; start the other half with --bind "
                    f"{where} first, give both keys or neither, and see that the network lets this through"
                ) from None
            # Also how a connection that was turned away is noticed.
            talk.send(Beat())
        except Broken as exc:
            raise ConfigError(f"--connect {where}: {exc}") from exc


async def measure(
    options: Options,
    half: Half,
    say: Callable[[str], None],
    progress: Callable[[int, int], None] = lambda done, total: None,
    log: Any = None,
) -> tuple[Measured, dict[str, Any]]:
    """Run a benchmark together with the other half.

    Returns:
        What was found, and the report.

    Raises:
        ConfigError: The input cannot be run, or the other half cannot be reached or has other options.
        AsyncKVError: A worker cannot go on.
    """
    lends = any(options.engines.lends(place) for place in options.engines.places if place.role == half.role)
    async with lead(options, half, say) as link:
        try:
            found = await run(options, progress=progress, log=log, reach=half.reach(lends), link=link)
            # In a thread, like all that may take long: the other half expects to hear from us.
            result = await asyncio.to_thread(report.make, options, found)
        except AsyncKVError as exc:
            await link.farewell(2 if isinstance(exc, ConfigError) else 1, str(exc))
            raise
        status = report.status(found, result)
        words = {0: "all good", 130: "interrupted"}
        await link.farewell(status, words.get(status, "not all good, see the report there"))
        return found, result


# -- the half that follows -----------------------------------------------------------------------------


async def serve(options: Options, half: Half, say: Callable[[str], None]) -> int:
    """Listen, agree with the half that connects, and run this half's workers for it.

    Returns:
        The exit status that the run had.

    Raises:
        ConfigError: The address cannot be had, or the halves do not agree.
        AsyncKVError: The other half is gone.
    """
    from asynckv.edges.zmq import ZmqPlane

    plane = ZmqPlane(f"tcp://{half.address[0]}", allow_insecure=half.allow_insecure, keys=half.keys)
    follower = _Follower(options, half, plane.send, say)
    loop = asyncio.get_running_loop()
    turned_away: set[tuple[str, str]] = set()

    def on_refused(cause: str, who: str) -> None:
        if (cause, who) not in turned_away and len(turned_away) < MOST_NAMED:
            turned_away.add((cause, who))
            say(f"turned a connection away: {cause} {who}".rstrip())

    await plane.start(follower.on_packet, on_refused)
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, follower.interrupt)
        say(f"listening; start the other half with --connect {plane.address.removeprefix('tcp://')}")
        return await follower.run()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        await plane.aclose()


class _Follower:
    def __init__(
        self, options: Options, half: Half, send: Callable[[ReplyTo, bytes], bool], say: Callable[[str], None]
    ) -> None:
        self._options, self._half, self._send, self._say = options, half, send, say
        self._talk: Conversation | None = None
        self._peer: ReplyTo | None = None
        self._came: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._children: dict[str, Child] = {}
        self._relays: list[asyncio.Task[None]] = []
        self._is_interrupted = False

    def on_packet(self, origin: Address | ReplyTo, data: bytes) -> None:
        """Take a piece; whatever does not belong to the one conversation is dropped."""
        if isinstance(origin, str):
            return
        try:
            piece = _pieces.decode(data)
        except MALFORMED:
            return
        if self._talk is not None:
            if origin == self._peer and piece.session == self._talk.session:
                self._talk.take(piece)
            elif piece.number == 0:
                # Once, whether or not there is room: whoever asks often costs no more.
                busy = _encoder.encode(Bye(2, "it serves somebody else already"))
                self._send(origin, _encoder.encode(Piece(piece.session, 0, True, busy)))
            return
        # Who begins has to say who he is, in one piece.
        try:
            message = _messages.decode(piece.data) if piece.number == 0 and piece.is_last else None
        except MALFORMED:
            return
        if isinstance(message, Hello):
            self._peer = origin
            self._talk = Conversation(partial(self._send, origin), piece.session)
            self._talk.take(piece)
            if not self._came.done():
                self._came.set_result(message)

    def interrupt(self) -> None:
        """Ctrl-C: the other half ends the run in order; a second one does not wait for that."""
        if self._talk is None or self._is_interrupted or not self._came.done():
            if self._talk is not None:
                self._talk.break_off("interrupted twice")
            if not self._came.done():
                self._came.cancel()
            return
        self._is_interrupted = True
        self._say("interrupted; the other half ends the run")
        self._talk.send(Interrupted())
        asyncio.get_running_loop().call_later(
            END_S, self._talk.break_off, f"it did not end the run within {END_S:.0f} s"
        )

    async def run(self) -> int:
        try:
            hello = await self._came
        except asyncio.CancelledError:
            return 130
        assert self._talk is not None
        talk = self._talk
        try:
            await talk.receive()
            differs = difference(facts(self._options), hello.facts, self._half.role, hello.role)
            if hello.role == self._half.role:
                differs = (
                    f"both halves are {hello.role} halves; give one of them --role prefill, the other --role decode"
                )
            if differs:
                return await self._refuse(differs)
            self._say(f"the {hello.role} half is here")
            talk.send(Welcome(memory_available()))
            talk.begin()
            return await self._follow(hello.role)
        except Broken as exc:
            if self._is_interrupted:
                return 130
            raise AsyncKVError(f"the {hello.role} half is gone: {exc}; ended this half's workers") from exc
        finally:
            talk.end()
            for relay in self._relays:
                relay.cancel()
            await asyncio.gather(*self._relays, return_exceptions=True)
            await asyncio.gather(*(child.end() for child in self._children.values()))

    async def _refuse(self, why: str) -> int:
        assert self._talk is not None
        self._talk.send(Bye(2, why))
        raise ConfigError(why)

    async def _follow(self, other: str) -> int:
        assert self._talk is not None
        while True:
            match await self._talk.receive():
                case Begin(num_blocks) if not self._children:
                    await self._begin(num_blocks)
                case Tell(name, line) if name in self._children:
                    self._pass_on(name, line)
                case Bye(status, why):
                    self._say(f"the {other} half has ended the run: {why}")
                    return status
                case message:
                    raise Broken(f"it said {type(message).__name__}, which is out of order")

    async def _begin(self, num_blocks: dict[str, list[int]]) -> None:
        options = self._options
        for role in options.sides:
            sizes = options.block_bytes(role)
            blocks = num_blocks.get(role, [])
            if len(blocks) != len(sizes):
                raise Broken(f"it wants {len(blocks)} groups of blocks for {role}, not {len(sizes)}")
            need = sum(n * size for n, size in zip(blocks, sizes, strict=True))
            if role == self._half.role and need > (room := memory_available()):
                await self._refuse(f"pools of {need} bytes were asked for, and {room} are available here")
        env = environment(options)
        reach = self._half.reach(lends=True)
        for name, _, setup in setups(options, (self._half.role,), num_blocks, reach):
            child = self._children[name] = await Child.spawn(name, env)
            child.tell(setup)
            self._relays.append(asyncio.create_task(self._relay(child)))

    async def _relay(self, child: Child) -> None:
        assert self._talk is not None
        while line := await child.line():
            self._talk.send(Heard(child.name, line))
        self._talk.send(Gone(child.name, (await child.how())[:2000]))

    def _pass_on(self, name: str, line: bytes) -> None:
        try:
            command = p.commands.decode(line)
        except MALFORMED as exc:
            raise Broken(f"a command is malformed: {exc}") from exc
        if isinstance(command, p.Setup):
            # Who a worker is, where it listens and what it writes is said by its own half's command line.
            raise Broken("it tried to set a worker up")
        if isinstance(command, p.FloorCommand):
            # It reads other processes' memory where it is told to: only a driver on this machine may say where.
            raise Broken("it tried to measure the floor, which is for one machine")
        self._children[name].tell(command)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _own_address(where: str) -> str:
    """The address of ours from which another one is reached; nothing is sent.

    Raises:
        ConfigError: It is not reached at all.
    """
    host, _, port = where.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own: str = probe.getsockname()[0]
    except OSError as exc:
        raise ConfigError(f"--connect {where}: {exc.strerror or exc}; check the address and the route to it") from exc
    return f"[{own}]" if ":" in own else own
