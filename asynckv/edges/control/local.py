"""A local socket on which an engine answers questions for its status, and nothing else: no address, no port, no keys.

The file system decides which users may ask: only its user may use the socket (0600) or write to its directory. There is
one socket per rank. It appears under its name only once an engine listens behind it. So a socket that refuses
connections was left by a dead process, and the next engine removes it. Four bytes of length precede each packet.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path

from asynckv.core.types import rank_name
from asynckv.core.wire import MAX_REQUEST_PACKET, Status, StatusRequest, decode_packet, encode_packet
from asynckv.edges.folders import check_parents
from asynckv.errors import BackendError, RemoteProtocolError

SUFFIX = ".sock"
MAX_PATH = 107  # bytes that the system allows for the path of a socket
MAX_GUESTS = 16  # connections at a time; more are closed at once
MAX_STALE = 1024  # sockets that are checked when an engine starts
IDLE_S = 60.0  # a connection that is silent for this long is closed
OnQuestion = Callable[[object, StatusRequest, Callable[[Status], None]], None]  # the guest, its question, the answer


def socket_name(engine_id: str, pp_stage: int, tp_rank: int, incarnation: str) -> str:
    """Return the name of a rank's socket, without characters that a file's name may not have, and shortened."""
    engine = re.sub(r"[^A-Za-z0-9_-]", "_", engine_id)[:32]
    return f"{engine}.pp{pp_stage}.tp{tp_rank}.{incarnation[:8]}{SUFFIX}"


def rank_of(path: Path) -> str:
    """Return the rank that made a socket, as all logs name it; empty if the name has another form."""
    found = re.fullmatch(r"([A-Za-z0-9_-]+)\.pp(\d+)\.tp(\d+)\.(\w+)" + re.escape(SUFFIX), path.name)
    if found is None:
        return ""
    engine, stage, rank, incarnation = found.groups()
    return rank_name(engine, int(rank), int(stage), incarnation)


def write_packet(writer: asyncio.StreamWriter, packet: bytes) -> None:
    writer.write(len(packet).to_bytes(4, "big") + packet)


async def read_packet(reader: asyncio.StreamReader, most: int) -> bytes:
    """Read a packet; raise `EOFError` at the end, and `RemoteProtocolError` if it has more than `most` bytes."""
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > most:
        raise RemoteProtocolError(f"a packet of {length} bytes; at most {most} are taken")
    return await reader.readexactly(length)


def pid_of(connected: socket.socket) -> int:
    """Return the id of the process that listens behind a socket, even if stopped; 0 if it is in another namespace."""
    size = struct.calcsize("3i")
    pid, _, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return max(int(pid), 0)


def is_left_behind(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False  # it is busy, or this process may not find out
    return False


class LocalDoor:
    def __init__(self, directory: str | os.PathLike[str], on_question: OnQuestion) -> None:
        self._directory, self._on_question = Path(directory), on_question
        self._server: asyncio.Server | None = None
        self._guests: set[asyncio.Task[None]] = set()
        self.path: Path | None = None  # of the socket, while it is open

    async def open(self, name: str, incarnation: str) -> None:
        self._check_directory()
        self._incarnation, path = incarnation, self._directory / name
        if (length := len(os.fsencode(path))) > MAX_PATH:
            raise BackendError(
                f"the socket {str(path)!r} would have a path of {length} bytes, and the system has room for "
                f"{MAX_PATH}; choose a shorter inspect.directory"
            )
        hidden = path.with_name(f".{path.name[-40:]}")
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(made.fileno(), 0o600)  # before it has a name
            for old in (hidden, path):
                old.unlink(missing_ok=True)
            made.bind(os.fspath(hidden))
            made.listen(MAX_GUESTS)
            hidden.rename(path)
            self.path = path
            self._server = await asyncio.start_unix_server(self._welcome, sock=made)
        except OSError as exc:
            made.close()
            self.path = None
            for each in (hidden, path):
                each.unlink(missing_ok=True)
            raise BackendError(f"the socket {str(path)!r} cannot be made: {exc.strerror or exc}") from exc

    async def close(self) -> None:
        server, self._server, path, self.path = self._server, None, self.path, None
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        if server is not None:
            # asyncio leaves a connection open that it accepts in the turn before its server is closed (gh-109564).
            asyncio.get_running_loop().remove_reader(server.sockets[0].fileno())
            asyncio.get_running_loop().call_soon(server.close)
        for guest in list(self._guests):
            guest.cancel()
        await asyncio.gather(*self._guests, return_exceptions=True)

    def _check_directory(self) -> None:
        directory = self._directory
        check_parents(directory)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = directory.stat()
        except OSError as exc:
            raise BackendError(f"inspect.directory {str(directory)!r} cannot be used: {exc.strerror or exc}") from exc
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid != os.geteuid() or mode & 0o022:
            raise BackendError(
                f"inspect.directory {str(directory)!r} belongs to user {found.st_uid} with mode {mode:04o}; it must "
                f"belong to this user ({os.geteuid()}), and no other may write to it: chmod go-w, or choose another"
            )
        for n, path in enumerate(directory.glob(f"*{SUFFIX}")):
            if n >= MAX_STALE:
                break
            with contextlib.suppress(OSError):
                # Other files here belong to other programs, and a socket without its final name is about to be used.
                if rank_of(path) and not path.is_symlink() and path.is_socket() and is_left_behind(path):
                    path.unlink(missing_ok=True)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        guest = asyncio.current_task()
        assert guest is not None
        if len(self._guests) >= MAX_GUESTS or self.path is None:  # the door was closed behind it
            writer.close()
            return
        self._guests.add(guest)
        try:
            await self._serve(guest, reader, writer)
        except (OSError, EOFError, RemoteProtocolError, asyncio.CancelledError):
            pass  # the guest left, or sent a message that is not allowed here, or `close` ends this task
        finally:
            self._guests.discard(guest)
            writer.close()

    async def _serve(self, guest: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            async with asyncio.timeout(IDLE_S):
                packet = decode_packet(await read_packet(reader, MAX_REQUEST_PACKET))
            (asked,) = packet.messages[:1] or (None,)
            if not isinstance(asked, StatusRequest) or len(packet.messages) != 1:
                raise RemoteProtocolError("only one question for the status at a time is taken here")
            answered: asyncio.Future[Status] = loop.create_future()

            def answer(status: Status, to: asyncio.Future[Status] = answered) -> None:
                if not to.done():
                    to.set_result(status)

            self._on_question(guest, asked, answer)
            async with asyncio.timeout(IDLE_S):  # a question without an answer must not keep its place
                status = await answered
            write_packet(writer, encode_packet(self._incarnation, packet.sender, [status]))
            async with asyncio.timeout(IDLE_S):
                await writer.drain()
