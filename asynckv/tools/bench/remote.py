"""A benchmark on two machines: the socket between its halves, and who is let in.

One half listens and *follows*: it starts its own workers from its own options. The other connects, *leads*, and drives
all workers as if they were its own. What it says to a worker there is what it says to one here, line by line: this file
only carries the lines, over a control plane of its own (ZMQ; CURVE with keys), each worker's as a stream of its own,
in numbered pieces: what a plane may lose ends the run instead of going unnoticed. The halves themselves have a stream
as well, for the little they say to each other: who they are, when workers start, that one ended.

Nobody is believed. Whoever comes has to prove a key, and to say which run he is there for; everything that arrives is
decoded into bounded types; a worker is never set up by the other half, nor told to read another process's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
from msgspec import Meta, Struct

from asynckv.arguments import is_loopback_host
from asynckv.core.types import Address, ReplyTo
from asynckv.errors import AsyncKVError, ConfigError
from asynckv.tools.bench import protocol as p
from asynckv.tools.bench.experiment import Experiment, memory_available
from asynckv.tools.bench.options import Options
from asynckv.tools.bench.schedule import Place
from asynckv.tools.bench.workers import Host, Worker, Workers, setups
from asynckv.tools.fleet import LIMIT
from asynckv.version import VERSION

__all__ = ["Half", "Leader", "Link", "facts", "lead", "serve"]

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
HALF = ""
"""The stream of the halves themselves."""

Name = Annotated[str, Meta(max_length=200)]
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


class Gone(Struct, tag="gone", frozen=True):
    """A worker's process has ended."""

    worker: Name
    how: Text


class Interrupted(Struct, tag="interrupted", frozen=True):
    """Ctrl-C on the following half."""


class Bye(Struct, tag="bye", frozen=True):
    """The end, and the exit status that it has."""

    status: Status
    why: Text


Message = Hello | Welcome | Begin | Gone | Interrupted | Bye


class Piece(Struct, frozen=True, array_like=True):
    """Some bytes of a stream, or none: a sign of life."""

    number: Count
    stream: Name
    data: Annotated[bytes, Meta(max_length=PIECE)]


_encoder = msgspec.msgpack.Encoder()
_pieces: msgspec.msgpack.Decoder[Piece] = msgspec.msgpack.Decoder(Piece)
_messages: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class Broken(Exception):
    """The conversation cannot go on."""


class Half:
    """Which half of the run this is.

    Args:
        options: With a role; `bind` (`HOST:PORT` to listen at) makes it the half that follows, `connect` (where the
            other one is; with keys `#` and its public key follow, or the name of its file) the one that leads.

    Raises:
        ConfigError: It is neither or both, or nobody would have to prove who he is.
    """

    def __init__(self, options: Options) -> None:
        self.options, self.role = options, options.role or ""
        self.bind, self.connect = options.bind or "", options.connect or ""
        if bool(self.bind) == bool(self.connect):
            given = "both were given" if self.bind else "neither was given"
            raise ConfigError(
                f"--role {self.role} needs --bind HOST:PORT on one machine and --connect HOST:PORT on the other, but "
                f"{given} here"
            )
        if bool(options.secret) != bool(options.authorized):
            raise ConfigError(
                "--secret and --authorized belong together: this half's own keys, and the directory of those it talks "
                "to; asynckv keygen makes keys"
            )
        if options.secret and options.allow_insecure:
            raise ConfigError("--allow-insecure and --secret contradict each other; leave one of them out")
        option, value = ("--bind", self.bind) if self.bind else ("--connect", self.connect)
        host, _, port = self.address[0].rpartition(":")
        if not host or not port.isdecimal() or not 0 <= int(port) < 65_536 or (self.connect and int(port) == 0):
            raise ConfigError(f"{option} {value!r:.200} is not an address such as 10.0.0.1:9000")
        if host.strip("[]") in ("*", "0.0.0.0", "::"):
            raise ConfigError(f"{option} {value}: a wildcard is nowhere to connect to; name this host's own address")
        if not options.secret and not options.allow_insecure and not is_loopback_host(host):
            raise ConfigError(
                f"{option} {value} goes beyond this host without keys: anybody who reaches it could give orders; give "
                f"--secret and --authorized (asynckv keygen makes keys), or --allow-insecure in a trusted network"
            )

    @property
    def address(self) -> tuple[str, str]:
        """`HOST:PORT`, and what names the other half's key."""
        where, _, key = (self.bind or self.connect).removeprefix("tcp://").partition("#")
        return where, key

    def target(self) -> Address:
        """Where the other half listens, with its key.

        Raises:
            ConfigError: The key is missing, or cannot be read.
        """
        from asynckv.keys import read_public

        where, key = self.address
        if not self.options.secret:
            if key:
                raise ConfigError(
                    f"--connect {self.connect!r:.200} names a key, but this half has none; give --secret and "
                    f"--authorized"
                )
            return Address(f"tcp://{where}")
        if not key:
            raise ConfigError(
                f"--connect {where} names no key; add the other half's, as it prints it, or the name of its file in "
                f"{self.options.authorized}: --connect {where}#NAME"
            )
        if not (len(key) == 64 and all(c in "0123456789abcdef" for c in key)):
            if "/" in key:
                raise ConfigError(f"--connect {self.connect!r:.200}: {key!r} is neither a key nor a name")
            key = read_public(Path(self.options.authorized or "") / f"{key}.key").hex()
        return Address(f"tcp://{where}#{key}")

    def host(self, lends: bool) -> str:
        """Where this half's engines listen: as it does itself; nowhere but on this host, if they never lend."""
        where, _ = self.address
        if self.connect:
            return _own_address(where) if lends else "127.0.0.1"
        return where.rpartition(":")[0]


def facts(experiment: Experiment) -> dict[str, str]:
    """What both halves have to agree on, by the option that says it."""
    options, work, model = experiment.options, experiment.workload, experiment.model
    digest = hashlib.sha256(repr((work.prompt_tokens, work.chunks, work.arrivals_s)).encode()).hexdigest()[:12]
    layers = hashlib.sha256(msgspec.json.encode(model)).hexdigest()[:12]
    found = {
        "version": VERSION,
        # First of all, because it makes other workloads of the same options.
        "--seed": str(options.seed),
        "model": f"{model.name}, {len(model.layers)} layers, {model.dtype} ({layers})",
        **{f"{role} side": str(msgspec.to_builtins(shape)) for role, shape in experiment.sides.items()},
        "engines": str(experiment.engines),
        "workload": f"{len(work.prompt_tokens)} requests, {work.source[:200]} ({digest})",
        "arrivals": str(experiment.arrivals),
        "--cancel": f"{options.cancel:g} within {options.cancel_within_s:g} s",
    }
    return found | {name: text for name, text in options.agreed().items() if name not in found}


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


class Link:
    """Streams to and from one other half: whole and in order, or not at all.

    Args:
        send: Sends a packet to the other half, or returns False if there is no room.
    """

    def __init__(self, send: Callable[[bytes], bool]) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._sent = self._taken = 0
        self._unsent: deque[bytes] = deque()
        self._streams: dict[str, asyncio.StreamReader] = {}
        self._half = self.open(HALF)
        self._broken = ""
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

    def open(self, stream: str) -> asyncio.StreamReader:
        """Expect lines of a stream."""
        reader = self._streams[stream] = asyncio.StreamReader(limit=LIMIT)
        return reader

    def close(self, stream: str) -> None:
        """Expect no more of them."""
        self._streams.pop(stream).feed_eof()

    def write(self, stream: str, data: bytes) -> None:
        """Send as soon as there is room."""
        for at in range(0, max(len(data), 1), PIECE):
            self._unsent.append(_encoder.encode(Piece(self._sent, stream, data[at : at + PIECE])))
            self._sent += 1
        self._flush()

    def tell(self, message: Message) -> None:
        """Say something to the other half itself."""
        self.write(HALF, msgspec.json.encode(message) + b"\n")

    async def hear(self, timeout_s: float | None = None) -> Message:
        """Wait for what the other half says itself.

        Raises:
            Broken: It will say nothing any more.
            TimeoutError: It said nothing in time.
        """
        try:
            line = await asyncio.wait_for(self._half.readline(), timeout_s)
            if line.endswith(b"\n"):
                return _messages.decode(line)
        except p.MALFORMED as exc:
            self.break_off(f"a message is malformed: {exc}")
        except ValueError:
            self.break_off(f"a message is longer than {LIMIT} bytes")
        raise Broken(self._broken)

    def take(self, piece: Piece) -> None:
        """Take what the plane delivered for this conversation."""
        if piece.number != self._taken:
            return self.break_off(f"piece {self._taken} of the conversation was lost")
        self._taken += 1
        self._heard_at = self._loop.time()
        if self._broken or not piece.data:
            return None
        if piece.stream not in self._streams:
            return self.break_off(f"it speaks to {piece.stream!r:.80}, which is not there")
        return self._streams[piece.stream].feed_data(piece.data)

    def break_off(self, why: str) -> None:
        """There is nobody to talk to any more."""
        if not self._broken:
            self._broken = why
            self._half.feed_eof()

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
            self.write(HALF, b"")
        self._beat = self._loop.call_later(BEAT_S, self._tick)


# -- the half that leads -------------------------------------------------------------------------------


class Remote(Worker):
    """A worker of the other half."""

    def __init__(self, name: str, link: Link) -> None:
        super().__init__(name, link.open(name))
        self._link = link
        self._how = ""

    def write(self, line: bytes) -> None:
        self._link.write(self.name, line)

    async def how(self) -> str:
        return self._how

    async def end(self, within_s: float = 0.0) -> None:
        self.is_lost = True

    def gone(self, how: str) -> None:
        """Take it that it will say nothing any more."""
        if not self._how:
            self._how = how
            self._link.close(self.name)


class Leader:
    """The other half, as the one that leads sees it.

    Attributes:
        memory_available: Bytes of memory that the other half's host can give.
        on_interrupt: Called when Ctrl-C was pressed there.
    """

    def __init__(self, own_role: str, where: str, link: Link, memory: int) -> None:
        self.memory_available = memory
        self.on_interrupt: Callable[[], None] = lambda: None
        self._own_role, self._where, self._link = own_role, where, link
        self._workers: dict[str, Remote] = {}
        self._lost = ""
        self._listening = asyncio.create_task(self._listen())

    def workers(self, experiment: Experiment, num_blocks: dict[str, list[int]]) -> Workers:
        """Have the other half start its workers."""
        self._link.tell(Begin(num_blocks))
        found: dict[Place, list[Worker]] = {}
        others = [role for role in experiment.sides if role != self._own_role]
        for name, place, _ in setups(experiment, others, num_blocks):
            worker = self._workers[name] = Remote(name, self._link)
            found.setdefault(place, []).append(worker)
            if self._lost:
                worker.gone(self._lost)
        return found

    async def farewell(self, status: int, why: str) -> None:
        """End the conversation."""
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        self._link.tell(Bye(status, why[:2000]))

    async def _listen(self) -> None:
        try:
            while True:
                match await self._link.hear():
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


@contextlib.asynccontextmanager
async def lead(experiment: Experiment, half: Half, say: Callable[[str], None]) -> AsyncIterator[Leader]:
    """Connect to the other half, and agree with it.

    Yields:
        A `Leader`. Call its `farewell` before leaving.

    Raises:
        ConfigError: It cannot be reached, or has other options.
    """
    from asynckv.edges.zmq import ZmqPlane

    target = half.target()
    where = half.address[0]
    plane = ZmqPlane("tcp://127.0.0.1:0", keys=half.options.keys())
    if refusal := plane.refusal(target):
        raise ConfigError(f"--connect {where}: {refusal}")
    link = Link(partial(plane.send, target))

    def on_packet(origin: Address | ReplyTo, data: bytes, principal: str) -> None:
        with contextlib.suppress(*p.MALFORMED):
            if origin == target:
                link.take(_pieces.decode(data))

    def on_refused(cause: str, who: str) -> None:
        if cause == "turned_away":
            link.break_off(
                "it turns this half's connection away: this half's .key file has to be in its --authorized directory"
            )

    await plane.start(on_packet, on_refused)
    try:
        link.tell(Hello(facts(experiment), half.role))
        say(f"waiting for the other half at {where}")
        memory = await _welcomed(link, where)
        link.begin()
        yield Leader(half.role, where, link, memory)
    finally:
        link.end()
        await plane.aclose()


async def _welcomed(link: Link, where: str) -> int:
    loop = asyncio.get_running_loop()
    until = loop.time() + CONNECT_S
    while True:
        try:
            match await link.hear(BEAT_S):
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
            link.write(HALF, b"")
        except Broken as exc:
            raise ConfigError(f"--connect {where}: {exc}") from exc


# -- the half that follows -----------------------------------------------------------------------------


async def serve(experiment: Experiment, half: Half, say: Callable[[str], None]) -> int:
    """Listen, agree with the half that connects, and run this half's workers for it.

    Returns:
        The exit status that the run had.

    Raises:
        ConfigError: The address cannot be had, or the halves do not agree.
        AsyncKVError: The other half is gone.
    """
    from asynckv.edges.zmq import ZmqPlane

    plane = ZmqPlane(f"tcp://{half.address[0]}", allow_insecure=half.options.allow_insecure, keys=half.options.keys())
    follower = _Follower(experiment, half, plane.send, say)
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
        self, experiment: Experiment, half: Half, send: Callable[[ReplyTo, bytes], bool], say: Callable[[str], None]
    ) -> None:
        self._experiment, self._half, self._send, self._say = experiment, half, send, say
        self._link: Link | None = None
        self._peer: ReplyTo | None = None
        self._came: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._host: Host | None = None
        self._relays: list[asyncio.Task[None]] = []
        self._is_interrupted = False

    def on_packet(self, origin: Address | ReplyTo, data: bytes, principal: str = "") -> None:
        """Take a piece; whatever does not belong to the one conversation is dropped.

        An origin is one connection, which has proven its key: who comes again is a stranger.
        """
        if isinstance(origin, str):
            return
        try:
            piece = _pieces.decode(data)
        except p.MALFORMED:
            return
        if self._link is not None:
            if origin == self._peer:
                self._link.take(piece)
            elif piece.number == 0:
                # Once, whether or not there is room: whoever asks often costs no more.
                busy = msgspec.json.encode(Bye(2, "it serves somebody else already")) + b"\n"
                self._send(origin, _encoder.encode(Piece(0, HALF, busy)))
            return
        # Who begins has to say who he is, in one piece.
        try:
            message = _messages.decode(piece.data) if piece.number == 0 and piece.stream == HALF else None
        except p.MALFORMED:
            return
        if isinstance(message, Hello):
            self._peer = origin
            self._link = Link(partial(self._send, origin))
            self._link.take(piece)
            if not self._came.done():
                self._came.set_result(message)

    def interrupt(self) -> None:
        """Ctrl-C: the other half ends the run in order; a second one does not wait for that."""
        if self._link is None or self._is_interrupted or not self._came.done():
            if self._link is not None:
                self._link.break_off("interrupted twice")
            if not self._came.done():
                self._came.cancel()
            return
        self._is_interrupted = True
        self._say("interrupted; the other half ends the run")
        self._link.tell(Interrupted())
        asyncio.get_running_loop().call_later(
            END_S, self._link.break_off, f"it did not end the run within {END_S:.0f} s"
        )

    async def run(self) -> int:
        try:
            hello = await self._came
        except asyncio.CancelledError:
            return 130
        assert self._link is not None
        link = self._link
        try:
            await link.hear()
            differs = difference(facts(self._experiment), hello.facts, self._half.role, hello.role)
            if hello.role == self._half.role:
                differs = (
                    f"both halves are {hello.role} halves; give one of them --role prefill, the other --role decode"
                )
            if differs:
                self._refuse(link, differs)
            self._say(f"the {hello.role} half is here")
            link.tell(Welcome(memory_available()))
            link.begin()
            return await self._follow(link, hello.role)
        except Broken as exc:
            if self._is_interrupted:
                return 130
            raise AsyncKVError(f"the {hello.role} half is gone: {exc}; ended this half's workers") from exc
        finally:
            link.end()
            for relay in self._relays:
                relay.cancel()
            await asyncio.gather(*self._relays, return_exceptions=True)
            if self._host is not None:
                await self._host.end()

    def _refuse(self, link: Link, why: str) -> NoReturn:
        link.tell(Bye(2, why))
        raise ConfigError(why)

    async def _follow(self, link: Link, other: str) -> int:
        while True:
            match await link.hear():
                case Begin(num_blocks) if self._host is None:
                    await self._begin(link, num_blocks)
                case Bye(status, why):
                    self._say(f"the {other} half has ended the run: {why}")
                    return status
                case message:
                    raise Broken(f"it said {type(message).__name__}, which is out of order")

    async def _begin(self, link: Link, num_blocks: dict[str, list[int]]) -> None:
        experiment, own = self._experiment, self._half.role
        for role in experiment.sides:
            sizes = experiment.block_bytes(role)
            blocks = num_blocks.get(role, [])
            if len(blocks) != len(sizes):
                raise Broken(f"it wants {len(blocks)} groups of blocks for {role}, not {len(sizes)}")
            need = sum(n * size for n, size in zip(blocks, sizes, strict=True))
            if role == own and need > (room := memory_available()):
                self._refuse(link, f"pools of {need} bytes were asked for, and {room} are available here")
        self._host = Host(experiment, (own,), num_blocks, self._half.host(lends=True))
        for workers in (await self._host.start()).values():
            for worker in workers:
                lines = link.open(worker.name)
                for relay in (self._pass_up(link, worker), self._pass_down(link, worker, lines)):
                    self._relays.append(asyncio.create_task(relay))

    async def _pass_up(self, link: Link, worker: Worker) -> None:
        while line := await worker.line():
            link.write(worker.name, line)
        link.tell(Gone(worker.name, (await worker.how())[:2000]))

    async def _pass_down(self, link: Link, worker: Worker, lines: asyncio.StreamReader) -> None:
        try:
            while line := await lines.readline():
                worker.tell(_admitted(line))
        except (Broken, ValueError) as exc:
            link.break_off(str(exc))


def _admitted(line: bytes) -> p.Command:
    """Decode what the other half may tell a worker of ours.

    Raises:
        Broken: It may not tell it that.
    """
    try:
        command = p.commands.decode(line)
    except p.MALFORMED as exc:
        raise Broken(f"a command is malformed: {exc}") from exc
    if isinstance(command, p.Setup):
        # Who a worker is, where it listens and what it writes is said by its own half's command line.
        raise Broken("it tried to set a worker up")
    if isinstance(command, p.FloorCommand):
        # It reads other processes' memory where it is told to: only a driver on this machine may say where.
        raise Broken("it tried to measure the floor, which is for one machine")
    return command


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
