"""A process of doctor's own that uses NIXL, so that nothing but it hangs or dies: it offers memory, or reads it.

`probing.py` starts it with a file that holds its order, and with a socket for what it has to say. The process ends when
the other end of that socket is closed, and with its parent. NIXL is used by the engine's own code, with the engine's
settings.

A stranger's metadata is loaded here, so the parent believes nothing that comes out: it is msgpack of the types below,
one message a packet, and never pickled.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from asynckv.config import NixlConfig
from asynckv.edges.nixl_raw import RawLoop
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.geometry.plan import DescTable, ReadRequest, Span
from asynckv.ports import AgentInfo
from asynckv.tools.doctor.facts import Measured, Spread

__all__ = ["Order", "Place", "Refused", "Result", "Said", "main"]

SIZE = 64 << 20
"""Bytes that are offered, and read in each round."""
SMALL, PIECE, BLOCK = 4 << 10, 16 << 10, 4 << 20
"""Bytes of a small read, of one of many pieces, and of a large read."""
POST_DESCRIPTORS = 512
WINDOW = 32 << 20
SMALL_READS = 300
ROUNDS, LEAST_ROUNDS = 7, 3
LINGER_S = 0.5
PR_SET_PDEATHSIG = 1
NO_CUT = Span(0, 0, 0, 0, 1)


class Place(Struct, frozen=True, tag=True):
    """How memory that is offered is reached."""

    agent: AgentInfo
    memories: tuple[Memory, ...]


class Order(Struct, frozen=True):
    """The task of a process.

    Attributes:
        place: Memory to read; None to offer some.
        read: Bytes are read; else a connection is opened, and no more.
        seconds: How long to measure; 0 for a few reads only.
    """

    name: str
    config: NixlConfig
    place: Place | None = None
    read: bool = True
    seconds: float = 0.0


class Result(Struct, frozen=True, tag=True):
    """The end of a process that has read."""

    measured: Measured | None = None
    plugins: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)


class Refused(Struct, frozen=True, tag=True):
    """NIXL refused what the engine's code asked of it."""

    why: str


Said = Literal["agent", "connect", "read"] | Place | Result | Refused
"""All that such a process can say: the stage that it has come to, or how it ended."""


def main() -> None:
    """Take one order, and obey it.

    Its arguments are the file of the order, and the number of the socket.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when its parent has seen what it says
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    order = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=Order)
    link = socket.socket(fileno=int(sys.argv[2]))
    try:
        asyncio.run(_obey(order, link))
    except BackendError as exc:
        _say(link, Refused(str(exc)))


def _say(link: socket.socket, what: Said) -> None:
    link.sendall(msgspec.msgpack.encode(what))


async def _obey(order: Order, link: socket.socket) -> None:
    _say(link, "agent")
    raw = np.frombuffer(mmap.mmap(-1, SIZE if order.read else SMALL), np.uint8)
    raw[::4096] = 0  # pages are there before any clock runs
    memory = Memory(int(raw.ctypes.data), len(raw))
    plane = RawLoop(order.config, order.name)
    agent = plane.begin([memory], lambda: _progress(plane))
    try:
        if order.place is None:
            raw[:] = _pattern()
            plane.watch(True)  # as an engine does that has lent something
            _say(link, Place(agent, (memory,)))
            closed = asyncio.Event()
            asyncio.get_running_loop().add_reader(link.fileno(), closed.set)
            await closed.wait()
            return
        _say(link, "connect")
        name, measured = order.place.agent.name, None
        await plane.add_remote_agent(order.place.agent, order.place.memories)
        if order.read:
            _say(link, "read")
            measured = _Reader(plane, name, raw).measure(order.seconds)
        else:
            # The other side opens its half of the connection, in its own time; it would find nobody, and complain.
            plane.watch(True)
            await asyncio.sleep(LINGER_S)
        plugins = tuple(sorted(plane._agent._agent.plugin_list)) if plane._agent is not None else ()
        facts = plane.describe()
        plane.remove_remote_agent(name)
        _say(link, Result(measured, plugins, facts))
    finally:
        plane.close()


def _progress(plane: RawLoop) -> None:
    plane.poll()


def _pattern() -> npt.NDArray[np.uint8]:
    return np.arange(1, SIZE // 4 + 1, dtype=np.uint32).view(np.uint8)


class _Reader:
    """Moves the same bytes in several ways, in turns."""

    def __init__(self, plane: RawLoop, name: str, raw: npt.NDArray[np.uint8]) -> None:
        self._plane, self._name, self._raw = plane, name, raw
        self._source = np.ones(SIZE, np.uint8)  # what the copy within memory reads: as much as the owner has
        self._tables = {
            length: DescTable(
                number,
                NO_CUT,
                np.array([length], np.int64),
                np.array([[0, 0, length]], np.int64),
                np.array([[0, 0, length]], np.int64),
                SIZE // length,
                SIZE // length,
            )
            for number, length in enumerate((SMALL, PIECE, BLOCK), 1)
        }

    def measure(self, seconds: float) -> Measured:
        """Measure for about so long; with 0 the bytes are only compared."""
        wrong = self._wrong(self._bulk) + self._wrong(self._scattered)
        if not seconds:
            return Measured(wrong=wrong)
        began = time.perf_counter()
        small = self._small(seconds / 6)
        rounds: list[tuple[float, float, float]] = []
        while len(rounds) < ROUNDS and (len(rounds) < LEAST_ROUNDS or time.perf_counter() - began < seconds):
            rounds.append((SIZE / self._bulk(), SIZE / self._scattered(), SIZE / self._copy()))
        read, scattered, copied = zip(*rounds, strict=True)
        return Measured(
            rounds=len(rounds),
            block_bytes=BLOCK,
            piece_bytes=PIECE,
            read_p50=float(np.quantile(small, 0.5)),
            read_p99=float(np.quantile(small, 0.99)),
            read=_spread(read),
            scattered=_spread(scattered),
            copied=_spread(copied),
            of_copy=_spread([a / b for a, b in zip(read, copied, strict=True)]),
            wrong=wrong,
        )

    def _wrong(self, read: Callable[[], float]) -> int:
        """Read, and count the bytes that are others than they should be."""
        self._raw[:] = 0
        read()
        return int(np.count_nonzero(self._raw != _pattern()))

    def _bulk(self) -> float:
        blocks = np.arange(SIZE // BLOCK, dtype=np.int32)[:, None]
        return self._run([ReadRequest(self._tables[BLOCK], b, b, BLOCK, 1) for b in blocks])[-1]

    def _scattered(self) -> float:
        order = np.random.default_rng(1).permutation(SIZE // PIECE).astype(np.int32)
        parts = np.split(order, range(POST_DESCRIPTORS, len(order), POST_DESCRIPTORS))
        return self._run([ReadRequest(self._tables[PIECE], p, p, PIECE * len(p), len(p)) for p in parts])[-1]

    def _small(self, seconds: float) -> list[float]:
        """Return how long small reads took, one after the other."""
        table, at = self._tables[SMALL], np.zeros(1, np.int32)
        taken: list[float] = []
        began = time.perf_counter()
        while len(taken) < SMALL_READS and time.perf_counter() - began < seconds:
            ends = self._run([ReadRequest(table, at, at, SMALL, 1)] * 20, 1)
            taken += np.diff(ends, prepend=0.0).tolist()
        return taken

    def _run(self, posts: Sequence[ReadRequest], concurrency: int = 16) -> list[float]:
        requests = [[post] for post in posts]
        lists = self._plane.prepare_lists(self._name, requests)
        return self._plane.read_all(
            lists, requests, concurrency=concurrency, window_bytes=WINDOW, window_descriptors=8192
        )

    def _copy(self) -> float:
        to, source = self._raw.ctypes.data, self._source.ctypes.data
        began = time.perf_counter()
        for at in range(0, SIZE, BLOCK):
            ctypes.memmove(to + at, source + at, BLOCK)
        return time.perf_counter() - began


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median=median(values), least=min(values), most=max(values))
