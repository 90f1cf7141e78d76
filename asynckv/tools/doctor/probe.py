"""A process of doctor's own that uses NIXL, so that nothing but it hangs or dies: it offers memory, or reads it.

It uses NIXL by the engine's own code. It loads a stranger's metadata, so `probing.py` believes nothing that it says: a
message is msgpack of the types below, one a packet. The process ends with its parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import signal
import socket
import sys
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from asynckv.config import NixlConfig
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.geometry.plan import ReadRequest
from asynckv.geometry.tables import DescTable, Span
from asynckv.ports import AgentInfo
from asynckv.tools.bench.nixl_raw import RawLoop

SIZE = 64 << 20  # bytes that are offered, and read twice
PIECE, BLOCK = 16 << 10, 4 << 20  # bytes of one of many pieces, and of a large read
POST_DESCRIPTORS = 512
WINDOW = 32 << 20
LINGER_S = 0.5
PR_SET_PDEATHSIG = 1
NO_CUT = Span(0, 0, 0, 0, 1)


class Place(Struct, frozen=True, tag=True):
    agent: AgentInfo
    memories: tuple[Memory, ...]


class Order(Struct, frozen=True):
    """The task of a process: memory to read, or None to offer some. Without `read` it only opens a connection."""

    name: str
    place: Place | None = None
    read: bool = True


class Result(Struct, frozen=True, tag=True):
    """The end of a process that has read."""

    wrong: int = 0
    plugins: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)


class Refused(Struct, frozen=True, tag=True):
    """NIXL refused a call of the engine's code."""

    why: str


Said = Literal["agent", "connect", "read"] | Place | Result | Refused
"""All that such a process can say: the stage that it has come to, or how it ended."""


def main() -> None:
    """Obey the order in the file that is named first, and tell over the socket of the number that follows."""
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
    raw = np.frombuffer(mmap.mmap(-1, SIZE if order.read else PIECE), np.uint8)
    memory = Memory(int(raw.ctypes.data), len(raw))
    plane = RawLoop(NixlConfig(posting_threads=0), order.name)
    agent = plane.open([memory])
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
        name, wrong = order.place.agent.name, 0
        await plane.add_remote_agent(order.place.agent, order.place.memories)
        if order.read:
            _say(link, "read")
            wrong = _wrong_bytes(plane, name, raw)
        else:
            # The other side opens its half of the connection in its own time, and would complain about a missing peer.
            plane.watch(True)
            await asyncio.sleep(LINGER_S)
        plugins = tuple(sorted(plane._agent._agent.plugin_list)) if plane._agent is not None else ()
        facts = plane.describe()
        plane.remove_remote_agent(name)
        _say(link, Result(wrong, plugins, facts))
    finally:
        plane.close()


def _pattern() -> npt.NDArray[np.uint8]:
    return np.arange(1, SIZE // 4 + 1, dtype=np.uint32).view(np.uint8)


def _wrong_bytes(plane: RawLoop, name: str, raw: npt.NDArray[np.uint8]) -> int:
    """Read all of it in large blocks, then in small pieces, and count the bytes that are others than they should be."""
    wrong = 0
    for number, length in enumerate((BLOCK, PIECE), 1):
        count = SIZE // length
        pieces = np.array([[0, 0, length]], np.int64)
        table = DescTable(number, NO_CUT, np.array([length], np.int64), pieces, pieces, count, count)
        order = np.random.default_rng(1).permutation(count).astype(np.int32)
        parts = np.split(order, range(POST_DESCRIPTORS, count, POST_DESCRIPTORS))
        requests = [[ReadRequest(table, p, p, length * len(p), len(p))] for p in parts]
        raw[:] = 0
        lists = plane.prepare_lists(name, requests)
        plane.read_all(lists, requests, concurrency=16, window_bytes=WINDOW, window_descriptors=8192)
        wrong += int(np.count_nonzero(raw != _pattern()))
    return wrong
