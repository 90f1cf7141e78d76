"""A process of doctor's own that uses NIXL, so that nothing but it hangs or dies: it offers memory, or reads it.

Started by `probing.py` as `python -m asynckv.tools.doctor.probe`. One order comes in on stdin; what it has to say
goes out on stdout, a line each. It ends when stdin is closed, and with its parent. NIXL is used by the engine's own
code, with the engine's settings.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.geometry.plan import DescTable, ReadRequest, Span
from asynckv.ports import AgentInfo
from asynckv.tools.doctor import words
from asynckv.tools.doctor.facts import Measured, Spread

if TYPE_CHECKING:
    from asynckv.edges.nixl_raw import RawLoop

__all__ = ["BLOCK", "PIECE", "SCRATCH", "main"]

SCRATCH = 64 << 20
SMALL, PIECE, BLOCK = 4 << 10, 16 << 10, 4 << 20
"""Bytes of a small read, of one of many pieces, and of a large read."""
POST_DESCRIPTORS = 512
WINDOW = 32 << 20
SMALL_READS = 300
ROUNDS = 7
LEAST_ROUNDS = 3
ROUND_S = 0.6
"""How long a round may take; where the wire is slow fewer bytes are moved."""
LINGER_S = 0.5
PR_SET_PDEATHSIG = 1
NO_CUT = Span(0, 0, 0, 0, 1)


def main() -> None:
    """Take one order, and obey it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when its parent has seen what it says
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    order = words.decode_order(sys.stdin.buffer.readline())
    # What a library prints must not get between the lines.
    out = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)

    def say(said: words.Said) -> None:
        out.write(msgspec.json.encode(said) + b"\n")

    try:
        asyncio.run(_offer(order, say) if order.place is None else _read(order, order.place, say))
    except BackendError as exc:
        say(words.Result(refused=str(exc)))


def _start(order: words.Ordered, num_bytes: int) -> tuple[RawLoop, npt.NDArray[np.uint8], AgentInfo]:
    from asynckv.edges.nixl_raw import RawLoop

    raw = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    raw[::4096] = 0  # pages are there before any clock runs
    plane = RawLoop(order.config, order.name)
    agent = plane.begin([Memory(int(raw.ctypes.data), num_bytes)], lambda: _progress(plane))
    return plane, raw, agent


def _progress(plane: RawLoop) -> None:
    plane.poll()


def _pattern(num_bytes: int) -> npt.NDArray[np.uint8]:
    return np.arange(1, num_bytes // 4 + 1, dtype=np.uint32).view(np.uint8)


# -- who offers ------------------------------------------------------------------------------------------


async def _offer(order: words.Ordered, say: Callable[[words.Said], None]) -> None:
    say(words.Stage("agent"))
    plane, raw, agent = _start(order, order.size)
    try:
        raw[:] = _pattern(order.size)
        plane.watch(True)  # as an engine does that has lent something
        place = words.Place(agent.name, agent.metadata.hex(), (Memory(int(raw.ctypes.data), order.size),))
        say(words.Offered(place, plane.describe()))
        closed = asyncio.Event()
        asyncio.get_running_loop().add_reader(0, lambda: None if os.read(0, 1 << 12) else closed.set())
        await closed.wait()
    finally:
        plane.close()


# -- who reads -------------------------------------------------------------------------------------------


async def _read(order: words.Ordered, place: words.Place, say: Callable[[words.Said], None]) -> None:
    say(words.Stage("agent"))
    size = place.memories[0].length if order.read else SMALL
    plane, raw, _ = _start(order, size)
    try:
        say(words.Stage("connect"))
        await plane.add_remote_agent(AgentInfo(place.name, bytes.fromhex(place.metadata)), place.memories)
        measured = None
        if order.read:
            say(words.Stage("read"))
            measured = _Reader(plane, place, raw).measure(order.seconds)
        else:
            # The other side opens its half of the connection, in its own time; it would find nobody, and complain.
            plane.watch(True)
            await asyncio.sleep(LINGER_S)
        plugins = tuple(sorted(plane._agent._agent.plugin_list)) if plane._agent is not None else ()
        facts = plane.describe()
        plane.remove_remote_agent(place.name)
        say(words.Result(measured=measured, plugins=plugins, facts=facts))
    finally:
        plane.close()


class _Reader:
    """Moves the same bytes in several ways, in turns."""

    def __init__(self, plane: RawLoop, place: words.Place, raw: npt.NDArray[np.uint8]) -> None:
        self._plane, self._place, self._raw = plane, place, raw
        self._size = len(raw)
        self._source = np.ones(self._size, np.uint8)  # what the copy within memory reads: as much as the owner has
        self._tables = {
            length: DescTable(
                number,
                NO_CUT,
                np.array([length], np.int64),
                np.array([[0, 0, length]], np.int64),
                np.array([[0, 0, length]], np.int64),
                self._size // length,
                self._size // length,
            )
            for number, length in enumerate((SMALL, PIECE, BLOCK), 1)
        }

    def measure(self, seconds: float) -> Measured:
        """Measure for about so long; with 0 a few reads are made, and no figures."""
        size = 2 * BLOCK
        wrong, taken = self._check(self._bulk, size)
        if not seconds:
            nothing = Spread(median=0, least=0, most=0)
            p50 = _quantile(self._small(20), 0.5)
            return Measured(
                rounds=0,
                read_p50=p50,
                read_p99=0,
                read=nothing,
                scattered=nothing,
                copied=None,
                of_copy=None,
                wrong=wrong,
            )
        began = time.perf_counter()
        # The first reads of a connection are slow, so they say too little rather than too much.
        size = self._affordable(size / taken)
        for move in (self._bulk, self._scattered):
            more, taken = self._check(move, size)
            wrong += more
        size = self._affordable(min(self._round(size)))
        small = self._small(SMALL_READS, seconds / 6)
        rounds: list[tuple[float, float, float]] = []
        while len(rounds) < ROUNDS and (len(rounds) < LEAST_ROUNDS or time.perf_counter() - began < seconds):
            rounds.append(self._round(size))
        read, scattered, copied = zip(*rounds, strict=True)
        return Measured(
            rounds=len(rounds),
            block_bytes=BLOCK,
            piece_bytes=PIECE,
            read_p50=_quantile(small, 0.5),
            read_p99=_quantile(small, 0.99),
            read=_spread(read),
            scattered=_spread(scattered),
            copied=_spread(copied),
            of_copy=_spread([a / b for a, b in zip(read, copied, strict=True)]),
            wrong=wrong,
        )

    def _round(self, size: int) -> tuple[float, float, float]:
        return size / self._bulk(size), size / self._scattered(size), size / self._copy(size)

    def _affordable(self, rate: float) -> int:
        """How many bytes may be moved in each of three ways within a round."""
        return min(self._size, max(2 * BLOCK, int(ROUND_S * rate / 3) // BLOCK * BLOCK))

    def _check(self, read: Callable[[int], float], size: int) -> tuple[int, float]:
        """Read so many bytes: how many are others than they should be, and how long it took."""
        here = self._raw[:size]
        here[:] = 0
        taken = read(size)
        return int(np.count_nonzero(here != _pattern(size))), taken

    def _bulk(self, size: int) -> float:
        blocks = np.arange(size // BLOCK, dtype=np.int32)[:, None]
        return self._run([ReadRequest(self._tables[BLOCK], b, b, BLOCK, 1) for b in blocks])[-1]

    def _scattered(self, size: int) -> float:
        order = np.random.default_rng(1).permutation(size // PIECE).astype(np.int32)
        table = self._tables[PIECE]
        parts = [order[i : i + POST_DESCRIPTORS] for i in range(0, len(order), POST_DESCRIPTORS)]
        return self._run([ReadRequest(table, p, p, PIECE * len(p), len(p)) for p in parts])[-1]

    def _small(self, count: int, seconds: float = math.inf) -> list[float]:
        """Return how long small reads took, one after the other."""
        table, at = self._tables[SMALL], np.zeros(1, np.int32)
        taken: list[float] = []
        began = time.perf_counter()
        while len(taken) < count and time.perf_counter() - began < seconds:
            ends = self._run([ReadRequest(table, at, at, SMALL, 1)] * 20, 1)
            taken += [b - a for a, b in zip([0.0, *ends], ends, strict=False)]
        return taken

    def _run(self, posts: Sequence[ReadRequest], concurrency: int = 16) -> list[float]:
        requests = [[post] for post in posts]
        lists = self._plane.prepare_lists(self._place.name, requests)
        return self._plane.read_all(
            lists, requests, concurrency=concurrency, window_bytes=WINDOW, window_descriptors=8192
        )

    def _copy(self, size: int) -> float:
        to, source = self._raw.ctypes.data, self._source.ctypes.data
        began = time.perf_counter()
        for at in range(0, size, BLOCK):
            ctypes.memmove(to + at, source + at, min(BLOCK, size - at))
        return time.perf_counter() - began


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median=median(values), least=min(values), most=max(values))


if __name__ == "__main__":
    main()
