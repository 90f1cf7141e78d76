"""One rank's process: an engine, a pool of blocks, and commands from the parent.

Run as `python -m asynckv.bench.worker FD PARENT_PID`. It ends when it is told to, when the parent's end
of the socket closes, and at the latest when the parent dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
from abc import ABC, abstractmethod
from typing import IO, Literal, cast

import msgspec

from asynckv import (
    AsyncKVError,
    ConfigError,
    BackendError,
    Engine,
    EngineConfig,
    LeaseConfig,
    NixlConfig,
    PullConfig,
    configure_logging,
    register_memory,
)
from asynckv.bench.measure import LoopLag, peak_rss_bytes
from asynckv.bench.pattern import Pattern
from asynckv.bench.pool import Custody, Pool
from asynckv.bench.wire import (
    Command,
    Crashed,
    Finish,
    Finished,
    Job,
    News,
    Ready,
    Reply,
    Start,
    read_frame,
    write_frame,
)

__all__ = ["Rank", "ids_of", "main"]

_PR_SET_PDEATHSIG = 1


def ids_of(job: Job) -> list[int]:
    """List the block ids of a job."""
    return [b for first, count in job.runs for b in range(first, first + count)]


class Rank(ABC):
    """What prefill and decode ranks have in common."""

    def __init__(self, start: Start, engine: Engine, pool: Pool, writer: asyncio.StreamWriter) -> None:
        self.start = start
        self.engine = engine
        self.pool = pool
        self.pattern = Pattern(pool, start.seed)
        self.custody = Custody(start.pool.num_blocks)
        self.lag = LoopLag()
        self._writer = writer

    @abstractmethod
    async def do(self, command: Command) -> Reply:
        """Carry out one command of the role's own."""

    @abstractmethod
    def stock(self) -> tuple[int, int]:
        """Count the blocks that leaked, and those in quarantine."""

    async def wait_returned(self, timeout_s: float) -> None:
        """Wait for blocks that are still held, as long as that."""

    def news(self, message: News) -> None:
        """Tell the parent something it did not ask for."""
        write_frame(self._writer, 0, message)

    async def finish(self, timeout_s: float) -> Finished:
        """Drain and take stock."""
        await self.wait_returned(timeout_s / 2)
        await self.engine.drain(timeout_s / 2)
        integrity = ""
        try:
            self.engine.check_integrity()
        except AsyncKVError as exc:
            integrity = str(exc)
        statistics = self.engine.statistics()
        leaked, quarantined = self.stock()
        return Finished(
            leaked,
            quarantined,
            integrity,
            peak_rss_bytes(),
            list(statistics.release_s),
            dict(statistics.counters),
            dict(statistics.gauges),
            self.engine.describe(),
        )


def main() -> None:
    """Serve the parent until it is done."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    # Ctrl-C in a terminal reaches the whole process group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    with contextlib.suppress(ConnectionError):
        asyncio.run(_serve(socket.socket(fileno=fd)))


async def _serve(sock: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    body = await read_frame(reader)
    if body is None:
        return
    call, start = msgspec.msgpack.decode(body, type=tuple[int, Start])
    try:
        _log_to(start.log_path, start.log_level)
        pool = Pool(start.pool)
        engine = Engine(_config(start), register_memory(pool.layout, owners=pool.owners))
        rank = _rank(start, engine, pool, writer)
        async with engine:
            write_frame(writer, call, Ready(os.getpid(), engine.endpoint, engine.describe()))
            await _commands(reader, writer, rank)
    except Exception as exc:
        write_frame(writer, call, _crash(exc))
    with contextlib.suppress(ConnectionError):
        await writer.drain()
        writer.close()
        await writer.wait_closed()


async def _commands(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rank: Rank) -> None:
    """Carry out commands, several at a time if the parent asks so; return after the last."""
    decoder = msgspec.msgpack.Decoder(tuple[int, Command])
    tasks: set[asyncio.Task[None]] = set()

    async def answer(call: int, command: Command) -> None:
        try:
            reply = await rank.finish(command.timeout_s) if isinstance(command, Finish) else await rank.do(command)
        except Exception as exc:
            reply = _crash(exc)
        write_frame(writer, call, reply)

    while (body := await read_frame(reader)) is not None:
        call, command = decoder.decode(body)
        task = asyncio.create_task(answer(call, command))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        if isinstance(command, Finish):
            await task
            break
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _rank(start: Start, engine: Engine, pool: Pool, writer: asyncio.StreamWriter) -> Rank:
    from asynckv.bench.decode import DecodeRank
    from asynckv.bench.prefill import PrefillRank

    kind = PrefillRank if start.role == "prefill" else DecodeRank
    return kind(start, engine, pool, writer)


def _config(start: Start) -> EngineConfig:
    return EngineConfig(
        engine_id=f"{start.role}-0",
        bind=start.bind,
        lease=LeaseConfig(lease_s=start.lease_s),
        pull=PullConfig(timeout_s=start.timeout_s),
        nixl=NixlConfig(backend=start.backend),
    )


def _crash(exc: Exception) -> Crashed:
    if isinstance(exc, MemoryError | OSError):
        return Crashed(f"{type(exc).__name__}: {exc}; a smaller --pool-mb needs less memory", True)
    is_input = isinstance(exc, ConfigError | BackendError)
    return Crashed(str(exc) if is_input else f"{type(exc).__name__}: {exc}", is_input)


class _Lines:
    """A stream whose every flush is one write, so that processes can share a file of lines."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pending: list[str] = []

    def write(self, text: str) -> int:
        """Keep text until the flush."""
        self._pending.append(text)
        return len(text)

    def flush(self) -> None:
        """Write it all at once."""
        data = "".join(self._pending).encode("utf-8", "backslashreplace")
        self._pending.clear()
        while data:
            data = data[os.write(self._fd, data) :]


def _log_to(path: str, level: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if path else 2
    form: Literal["json", "console"] = "json" if path else "console"
    known = cast(Literal["debug", "info", "warning", "error"], level)
    configure_logging(known, form=form, stream=cast(IO[str], _Lines(fd)))


if __name__ == "__main__":
    main()
