"""Ask running engines for their state, over the network or a socket of this host.

    answers = await ask_all(["tcp://10.0.0.1:5555"])

An answer holds the engine's status, or the reason for which there is none. Only the types and bounds of a status are
checked; its texts are foreign and must be escaped before a person sees them.

An engine answers on its event loop, and not while the loop is blocked. If there is no answer, the asker gets the facts
that can be found from here: whether a process listens, whether its libraries still speak, whether it wants keys, and
for a socket of this host also the process and its state in the kernel.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import math
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from asynckv.account.inspect import HeldBlocks, RequestStatus
from asynckv.account.survey import MAX_PEERS
from asynckv.account.values import MAX_ACCOUNT, Account, PeerStatus, decode_account
from asynckv.arguments import number
from asynckv.config import KeysConfig
from asynckv.core.types import Address, ReplyTo
from asynckv.core.wire import MAX_TOLD, OtherVersion, Status, StatusRequest, decode_packet, encode_packet
from asynckv.edges.control.local import SUFFIX, is_left_behind, pid_of, rank_of, read_packet, write_packet
from asynckv.edges.control.zmq import ZmqPlane, host_and_port
from asynckv.errors import ConfigError, RemoteProtocolError
from asynckv.tools.diagnose.process import Seen, is_same, look, verdict
from asynckv.tools.greeting import Greeted, look_at_port

TIMEOUT_S = 5.0
REPEAT_S = 1.0  # an unanswered question is asked again
PROBE_S = 1.0  # time for a listener's greeting
MAX_AT_ONCE = 64  # engines that are asked at the same time
MAX_SOCKETS = 4096  # sockets of one directory
_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}(#.{16,})?\Z")


class Trouble(enum.Enum):
    """Reasons for a missing answer."""

    NONE = "it answered"
    GONE = "no process is behind this socket or port any more"
    AWAY = "the process lives, and its event loop is away, or it is stopped"
    NETWORK = "no connection comes about"
    KEYS = "it may have answered, had it known our key"
    OTHER = "it refuses, or its answer cannot be read"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One engine's status, or the reason for which there is none."""

    address: str  # the address that was asked
    error: str = ""  # why there is no answer, and what to do about it; empty if there is one
    trouble: Trouble = Trouble.NONE  # what kind of reason that is
    pid: int = 0  # of the process behind a socket that gave no answer; 0 if it is not known
    gauges: Mapping[str, int] = field(default_factory=dict)  # what is owed and held
    account: Account = field(default_factory=Account)  # everything else; `after` if it holds more requests than asked
    peers_left_out: int = 0  # engines that it reads from, and that were not asked because they are too many
    took_s: float = 0.0  # how long the answer took
    at: float = math.nan  # when it came, by this host's clock
    made_at: float = math.nan  # when a socket without an answer was made

    @property
    def rank(self) -> str:
        """The rank's name as in all logs (`prefill/tp0@0a1b2c3d`), or the address if it did not answer."""
        return self.account.rank or self.address

    @property
    def has_told(self) -> bool:
        """True if it says of which process it is, and with that what the process holds."""
        return not self.error and self.account.incarnation != ""

    @property
    def requests(self) -> tuple[RequestStatus, ...]:
        """The oldest requests, with those between two attempts last."""
        return self.account.requests + self.account.facts.retrying


async def ask_all(
    addresses: Sequence[str],
    keys: KeysConfig | None = None,
    timeout_s: float = TIMEOUT_S,
    *,
    most: int = MAX_TOLD,
    with_peers: bool = False,
) -> list[Answer]:
    """Ask several engines at the same time; one answer for each address, in their order.

    Args:
        addresses: As `targets` returns them: `tcp://host:port`, with the engine's key behind it (`#...`) if it has one,
            or the path of a socket.
        keys: The asker's keys and the trusted engines' keys; needed for engines with keys, over the network.
        timeout_s: Seconds that an engine may take for one answer.
        most: Number of oldest requests that each engine lists; all are counted in any case. More than 256 take several
            questions, of which an engine answers some eight a second.
        with_peers: Also ask the engines that these read from, as soon as they are named; their answers follow. Of the
            peers in one answer the first `MAX_PEERS` count, as many as an engine sends.

    Raises:
        ConfigError: A key file cannot be used.
    """
    asker = _Asker(keys, timeout_s, most)
    known = {*addresses, *(rank_of(Path(x)) for x in addresses)}
    named: list[tuple[PeerStatus, asyncio.Task[Answer]]] = []
    await asker.plane.start(asker.on_packet)
    try:
        async with asyncio.TaskGroup() as group:

            async def ask(address: str) -> Answer:
                answer = await asker.ask(address)
                if not with_peers:
                    return answer
                live = [x for x in answer.account.peers if x.state != "gone"]
                for peer in live[:MAX_PEERS]:
                    if _is_network(peer.address) and not known & {peer.address, peer.rank}:
                        known.add(peer.address)
                        named.append((peer, group.create_task(asker.ask(peer.address))))
                counted = sum(number for state, number in answer.account.num_peers.items() if state != "gone")
                return replace(answer, peers_left_out=max(len(live), counted) - min(len(live), MAX_PEERS))

            asked = [group.create_task(ask(x)) for x in addresses]
    finally:
        await asker.plane.aclose()
    answers = [x.result() for x in asked]
    there = {x.account.incarnation for x in answers} - {""}
    for peer, task in named:
        # The operator did not name these, so their silence here proves nothing if their readers hear from them.
        answer = task.result()
        if peer.state != "ready" if answer.error else answer.account.incarnation not in there:
            answers.append(answer)
    return answers


def _is_network(address: str) -> bool:
    with suppress(ConfigError):
        return address.startswith("tcp://") and bool(host_and_port(address))
    return False


def targets(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate logs from engines in the sources that the operator names; a directory may have sockets, logs, or both.

    Returns:
        Files and directories of logs; and the addresses of engines, each once.

    Raises:
        ConfigError: An address is none.
    """
    logs: list[str] = []
    found: list[str] = []
    for text in given:
        path = Path(text)
        if text.startswith(("http://", "https://")):
            raise ConfigError(
                f"{text!r:.200} is an HTTP server's; give where asynckv itself listens (address in engine_started of "
                f"its log), or the inspect.directory with its sockets"
            )
        if path.is_dir():
            sockets = [str(each) for each in sorted(path.glob(f"*{SUFFIX}")) if each.is_socket()]
            found += sockets[:MAX_SOCKETS]
            logs += [text] if not sockets or any(x.is_file() for x in path.rglob("*")) else []
        elif "://" in text or path.is_socket():
            found.append(text)
        elif not path.exists() and _HOST_PORT.match(text):
            found.append(f"tcp://{text}")
        else:
            logs.append(text)
    for address in (x for x in found if "://" in x):
        host_and_port(address)
    return logs, list(dict.fromkeys(found))


def is_of_no_host(text: str) -> bool:
    """Return True if `HOST:PORT` names no known host, so that it is the `ENGINE:ID` of a request."""
    if "://" in text or not (found := _HOST_PORT.match(text)):
        return False
    try:
        socket.getaddrinfo(found[1].strip("[]"), None)
    except (OSError, UnicodeError):
        return True
    return False


_Ask = Callable[[StatusRequest], Awaitable[Status]]  # ask one question over a connection, until there is an answer


class _Asker:
    def __init__(self, keys: KeysConfig | None, timeout_s: float, most: int) -> None:
        self._timeout_s = number("timeout_s", timeout_s, 0.01, 3600.0, ConfigError)
        self._most, self._has_keys = most, keys is not None
        self.plane = ZmqPlane(None, keys=keys)
        self._name = secrets.token_hex(16)
        self._asked: dict[int, tuple[str, asyncio.Future[Status]]] = {}
        self._behind: dict[str, Seen] = {}  # the process behind each socket, when it was last connected to
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)

    async def ask(self, address: str) -> Answer:
        loop = asyncio.get_running_loop()
        over = self._over_network if address.startswith("tcp://") else self._over_socket
        async with self._at_once:
            began = loop.time()
            try:
                async with over(address) as ask:
                    answer = await self._converse(ask, address)
            except (_Vain, TimeoutError) as exc:
                vain = exc if isinstance(exc, _Vain) else await self._why(address)
                behind = self._behind.get(address) if vain.trouble is not T.GONE else None
                account, pid = Account(rank=rank_of(Path(address))), behind.pid if behind is not None else 0
                answer = Answer(address=address, error=str(vain), trouble=vain.trouble, account=account, pid=pid)
                with suppress(OSError):
                    answer = replace(answer, made_at=os.stat(address).st_mtime)
            return replace(answer, took_s=loop.time() - began, at=time.time())

    async def _converse(self, ask: _Ask, address: str) -> Answer:
        """Ask page after page."""
        loop, told, after = asyncio.get_running_loop(), 0, ""
        first: Account | None = None
        requests: dict[tuple[str, str, int | None], RequestStatus] = {}
        holds: list[HeldBlocks] = []
        patience = loop.time() + self._timeout_s
        while True:
            async with asyncio.timeout(self._timeout_s):
                status = await ask(StatusRequest(secrets.randbits(62), min(self._most - told, MAX_TOLD), after))
            if not status.account:
                raise _Vain("it says gauges only: it is of an older version, ask it with its own asynckv")
            try:
                account = decode_account(status.account)
            except RemoteProtocolError as exc:
                raise _Vain(f"its answer cannot be read: {exc}") from exc
            if account.refused:
                if account.retry_s > 0 and loop.time() + account.retry_s < patience:
                    await asyncio.sleep(min(account.retry_s, REPEAT_S))
                    continue
                raise _Vain(f"it refuses to answer: {account.refused[:1000]}")
            first, patience = first or account, loop.time() + self._timeout_s
            before = len(requests)
            requests |= {(each.kind, each.pull_id or each.request_id, each.sequence): each for each in account.requests}
            holds += account.holds
            told, after = told + len(account.requests), account.after
            if not after or told >= self._most or len(requests) == before:
                break
        return Answer(
            address=address,
            gauges=status.gauges,
            account=msgspec.structs.replace(first, requests=tuple(requests.values()), holds=tuple(holds), after=after),
        )

    @asynccontextmanager
    async def _over_network(self, address: str) -> AsyncIterator[_Ask]:
        if "#" in address and not self._has_keys:
            raise _Vain("it has keys, as its address says: give --keys and --authorized", T.KEYS)
        if self.plane.refusal(Address(address)):
            raise _Vain(
                "its key is not in the directory of --authorized: put the engine's .key file there"
                if "#" in address
                else "with keys an address ends in the engine's own, as its endpoint says: tcp://host:port#...",
                T.KEYS,
            )

        async def ask(question: StatusRequest) -> Status:
            answered: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
            self._asked[question.nonce] = address, answered
            try:
                while not answered.done():
                    self.plane.send(Address(address), encode_packet(self._name, "", [question]))
                    await asyncio.wait([answered], timeout=REPEAT_S)
                    if not answered.done() and (await _look(address)).errno == errno.ECONNREFUSED:
                        raise _Vain(NO_LISTENER, T.GONE)
                return answered.result()
            finally:
                del self._asked[question.nonce]

        try:
            yield ask
        except BaseException:
            # ZMQ does not try again after a refusal, so a later question to that address has to ask again.
            self.plane.disconnect(Address(address))
            raise

    @asynccontextmanager
    async def _over_socket(self, address: str) -> AsyncIterator[_Ask]:
        try:
            if not stat.S_ISSOCK(os.stat(address).st_mode):
                raise _Vain("it is no socket, and no address such as tcp://10.0.0.1:5555")
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await asyncio.open_unix_connection(address)
            if pid := pid_of(connected := writer.get_extra_info("socket")):
                self._behind[address] = look(pid)
            elif not _has_peer(connected):  # asyncio reports a connection even if the queue is full
                writer.close()
                if address in self._behind:
                    raise TimeoutError
                raise _Vain(f"its connections are not accepted and no more fit: {AWAY}", T.AWAY)
        except ConnectionRefusedError:
            raise _Vain(
                "its process has ended without taking the socket away: it was killed, or has crashed", T.GONE
            ) from None
        except (OSError, ValueError) as exc:
            if isinstance(exc, TimeoutError):
                raise
            raise _Vain(f"the socket cannot be used: {getattr(exc, 'strerror', None) or exc}") from exc

        async def ask(question: StatusRequest) -> Status:
            write_packet(writer, encode_packet(self._name, "", [question]))
            try:
                await writer.drain()
                for message in decode_packet(await read_packet(reader, 2 * MAX_ACCOUNT)).messages:
                    if isinstance(message, Status) and message.nonce == question.nonce:
                        return message
            except (OSError, EOFError):
                raise _Vain("it closed the connection: the engine has closed, or too many ask it") from None
            except RemoteProtocolError as exc:
                raise _Vain(f"its answer cannot be read: {exc}") from exc
            raise _Vain("its answer is to another question")

        try:
            yield ask
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def on_packet(self, origin: Address | ReplyTo, data: bytes, principal: str) -> None:
        try:
            packet = decode_packet(data)
        except OtherVersion as exc:
            # No engine of another major version could read the question, so the answer is to none in particular.
            for address, answered in self._asked.values():
                if address == origin and not answered.done():
                    version = str(exc).partition(";")[0]
                    answered.set_exception(_Vain(f"it lives, but {version}: ask it with its own asynckv"))
            return
        except RemoteProtocolError:
            return
        for message in packet.messages:
            if isinstance(message, Status) and message.nonce in self._asked:
                address, answered = self._asked[message.nonce]
                if address == origin and not answered.done():
                    answered.set_result(message)

    async def _why(self, address: str) -> _Vain:
        """Return the known facts about an engine that did not answer."""
        late = f"no answer within {self._timeout_s:g} s: "
        if not address.startswith("tcp://"):
            if (before := self._behind.get(address)) is not None:
                now = look(before.pid)
                return _Vain(late + verdict(before, now), T.AWAY if is_same(before, now) else T.GONE)
            if is_left_behind(Path(address)):
                return _Vain(late + "its process has ended meanwhile", T.GONE)
            return _Vain(late + f"it listens, so {AWAY}", T.AWAY)
        match found := await _look(address):
            case Greeted(mechanism="CURVE") if not self._has_keys:
                how = T.KEYS, "it wants keys: give --keys and --authorized, and its address with what follows the #"
            case Greeted(mechanism="CURVE"):
                said = "it has keys and may not know ours: put our .key file among its authorized keys"
                how = T.KEYS, f"{said}; or {AWAY}"
            case Greeted(mechanism=greeted) if greeted and self._has_keys:
                how = T.KEYS, f"it has no keys, and we have; or {AWAY}"
            case Greeted(mechanism=greeted) if greeted:
                how = T.AWAY, f"TCP connects and ZMQ greets, so {AWAY}"
            case Greeted(connected=True, errno=errno.ETIMEDOUT):
                how = T.AWAY, "TCP connects, but nothing greets: its process is stopped, or it is no engine"
            case Greeted(connected=True):
                how = T.OTHER, f"TCP connects, but what listens is no engine: {found.error}"
            case Greeted(errno=errno.ECONNREFUSED):
                how = T.GONE, NO_LISTENER
            case Greeted(errno=errno.ETIMEDOUT):
                how = T.NETWORK, "no TCP connection either; the host is down, or a firewall is in between"
            case _:
                how = T.NETWORK, f"no TCP connection either ({found.error})"
        return _Vain(late + how[1], how[0])


T = Trouble
NO_LISTENER = "no process listens there (TCP connection refused): it is gone, or the port is another"
AWAY = "its process lives but its event loop is away (busy, blocked or stopped), or the engine is closing"


async def _look(address: str) -> Greeted:
    host, port = host_and_port(address)
    return await asyncio.to_thread(look_at_port, host.strip("[]"), port, PROBE_S, PROBE_S)


def _has_peer(connected: socket.socket) -> bool:
    """Return True if a connection was really made."""
    with suppress(OSError):
        return connected.getpeername() is not None
    return False


class _Vain(Exception):
    """No answer will come, for a known reason."""

    def __init__(self, why: str, trouble: Trouble = Trouble.OTHER) -> None:
        super().__init__(why)
        self.trouble = trouble
