"""What every implementation of a port must do, as checks that run on any: the fake is verified.

The checks are plain coroutines that raise `AssertionError`; call them from any test runner, on the
event loop that the planes will live on.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import AsyncExitStack

import anyio
import numpy as np

from asynckv.core.types import Address, ReplyTo, TransferId
from asynckv.edges.sharing import shared_memory
from asynckv.errors import BackendError
from asynckv.geometry.layout import Group, Layout, Memory, attention_view
from asynckv.geometry.match import assign
from asynckv.geometry.plan import PeerTables
from asynckv.ports import ControlPlane, DataPlane, Ended, Ending

__all__ = ["check_control_plane", "check_data_plane"]

PATIENCE_S = 10.0
BLOCKS, TOKENS, HEADS, DIM = 16, 4, 2, 8


class _Inbox:
    """Collects packets."""

    def __init__(self) -> None:
        self.packets: list[tuple[Address | ReplyTo, bytes]] = []
        self._event = asyncio.Event()

    def __call__(self, origin: Address | ReplyTo, packet: bytes) -> None:
        self.packets.append((origin, packet))
        self._event.set()

    async def wait(self, count: int) -> None:
        with anyio.fail_after(PATIENCE_S):
            while len(self.packets) < count:
                self._event.clear()
                await self._event.wait()


async def check_control_plane(make: Callable[[], ControlPlane]) -> None:
    """Check a control plane: `make` returns a new one, not started."""
    async with AsyncExitStack() as stack:
        listener, asker = make(), make()
        for plane in (listener, asker):
            stack.push_async_callback(plane.aclose)
        heard, answered = _Inbox(), _Inbox()
        await listener.start(heard)
        await asker.start(answered)
        assert listener.address != asker.address, "every plane has an address of its own"

        # A question arrives under a route, by which it can be answered; the answer, under the address.
        assert asker.send(listener.address, b"question")
        await heard.wait(1)
        route, packet = heard.packets[0]
        assert isinstance(route, bytes)
        assert packet == b"question"
        assert listener.send(ReplyTo(route), b"answer")
        await answered.wait(1)
        assert answered.packets == [(listener.address, b"answer")]

        # Packets of a link stay in order, whatever is in them.
        bodies = [bytes([i % 256]) * (1 + i * 37 % 3000) for i in range(500)]
        for body in bodies:
            assert asker.send(listener.address, body)
        await heard.wait(501)
        assert [packet for _, packet in heard.packets[1:]] == bodies
        assert {origin for origin, _ in heard.packets} == {route}

        # Nobody there, or nonsense: never an exception.
        assert not listener.send(ReplyTo(b"nobody"), b"lost")
        asker.disconnect(Address("tcp://127.0.0.1:1"))
        for plane in (listener, asker):
            statistics = plane.statistics()
            assert all(isinstance(v, int) for v in statistics.values())
        assert asker.statistics()["packets_out"] == 501
        assert listener.statistics()["packets_in"] == 501

        # A link that was dropped is made anew by the next packet.
        asker.disconnect(listener.address)
        assert asker.send(listener.address, b"again")
        await heard.wait(502)
        assert heard.packets[-1][1] == b"again"

        for plane in (listener, asker):
            await plane.aclose()
            await plane.aclose()
        assert not asker.send(listener.address, b"late"), "a closed plane sends nothing"


class _Side:
    """One data plane with memory of its own."""

    def __init__(self, plane: DataPlane, seed: int, order: tuple[str, ...], shared: bool) -> None:
        self.plane = plane
        sizes = {"kv": 2, "block": BLOCKS, "token": TOKENS, "head": HEADS, "dim": DIM}
        size = 2 * BLOCKS * TOKENS * HEADS * DIM * 2
        rng = np.random.default_rng(seed)
        self.arrays = [rng.integers(0, 256, size, np.uint8) for _ in range(2)]
        if shared:
            content, self.arrays = self.arrays, [np.frombuffer(shared_memory(size), np.uint8) for _ in range(2)]
            for array, each in zip(self.arrays, content, strict=True):
                array[:] = each
        self.layout = Layout(
            memories=tuple(Memory(a.ctypes.data, a.nbytes) for a in self.arrays),
            groups=(Group("attention", TOKENS, BLOCKS),),
            views=tuple(
                attention_view(
                    layer=f"{i}", order=order, sizes=sizes, dtype="float16", heads=(0, HEADS), num_heads=HEADS, memory=i
                )
                for i in range(2)
            ),
        )
        self.ready = asyncio.Event()
        self.news: list[Ended] = []

    def start(self) -> None:
        self.plane.start(self.ready.set)
        self.plane.register(self.layout.memories)

    def blocks(self, order: tuple[str, ...], ids: list[int]) -> bytes:
        """Content of blocks, dims in logical order."""
        sizes = {"kv": 2, "block": BLOCKS, "token": TOKENS, "head": HEADS, "dim": DIM * 2}
        logical = ("kv", "block", "token", "head", "dim")
        out = b""
        for array in self.arrays:
            shaped = array.reshape([sizes[d] for d in order]).transpose([order.index(d) for d in logical])
            out += np.ascontiguousarray(shaped[:, ids]).tobytes()
        return out


async def _until(sides: list[_Side], count: int) -> list[Ended]:
    """Poll both sides, as engines do, until the first one has so much news."""
    with anyio.fail_after(PATIENCE_S):
        while True:
            for side in sides:
                side.ready.clear()
                side.news += [news for news in side.plane.poll() if isinstance(news, Ended)]
            if len(sides[0].news) >= count:
                news, sides[0].news = sides[0].news, []
                return news
            waiting = [asyncio.ensure_future(side.ready.wait()) for side in sides]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def check_data_plane(make: Callable[[str], DataPlane], *, shared: bool = False) -> None:
    """Check a data plane: `make(agent_name)` returns a new one, not started. `shared`: in memory that can be shared."""
    orders = ("kv", "block", "token", "head", "dim"), ("block", "head", "kv", "token", "dim")
    reader, owner = (
        _Side(make(name), seed, order, shared)
        for name, seed, order in (("reader", 1, orders[0]), ("owner", 2, orders[1]))
    )
    sides = [reader, owner]
    try:
        for side in sides:
            side.start()
        assert owner.plane.agent_name == "owner"
        owner.plane.watch(True)
        peer = PeerTables(reader.layout, owner.layout, assign(reader.layout, [owner.layout])[0], itertools.count(1))
        table = peer.regular[0]
        mine, theirs = reader.layout.memories, owner.layout.memories
        metadata = owner.plane.metadata()
        try:
            reader.plane.add_table("owner", table, mine, theirs)
        except BackendError:
            pass
        else:
            raise AssertionError("a table needs a peer that is prepared")
        try:
            await reader.plane.prepare_peer("somebody", metadata)
        except BackendError:
            pass
        else:
            raise AssertionError("metadata under another name is refused")
        # One process may be met under two addresses: it is there until both have been removed.
        await reader.plane.prepare_peer("owner", metadata)
        await reader.plane.prepare_peer("owner", metadata)
        reader.plane.remove_peer("owner")
        reader.plane.add_table("owner", table, mine, theirs)

        # Bytes land where the table says, and nowhere else.
        before = reader.blocks(orders[0], [b for b in range(BLOCKS) if b not in (3, 9, 4)])
        rows = np.arange(table.num_rows, dtype=np.int32)[:, None] * np.int32(BLOCKS)
        local, remote = np.array([3, 9, 4], np.int32), np.array([5, 6, 0], np.int32)
        posted = reader.plane.post_read(
            TransferId(1), "owner", table.table_id, (rows + local).ravel(), (rows + remote).ravel()
        )
        news = [posted] if posted is not None else await _until(sides, 1)
        assert news == [Ended(TransferId(1), Ending.DONE)]
        assert reader.blocks(orders[0], [3, 9, 4]) == owner.blocks(orders[1], [5, 6, 0])
        assert reader.blocks(orders[0], [b for b in range(BLOCKS) if b not in (3, 9, 4)]) == before

        # News comes once per transfer, for many as for one.
        early = [
            reader.plane.post_read(
                TransferId(10 + i), "owner", table.table_id, (rows + i).ravel(), (rows + (BLOCKS - 1 - i)).ravel()
            )
            for i in range(BLOCKS)
        ]
        done = [ended for ended in early if ended is not None]
        if len(done) < BLOCKS:
            done += await _until(sides, BLOCKS - len(done))
        assert sorted(e.transfer_id for e in done) == list(range(10, 10 + BLOCKS))
        assert {e.ending for e in done} == {Ending.DONE}
        assert reader.plane.poll() == []
        assert reader.blocks(orders[0], list(range(BLOCKS))) == owner.blocks(orders[1], list(range(BLOCKS))[::-1])
        assert reader.plane.statistics()["running"] == 0
        assert reader.plane.statistics()["posts"] == 1 + BLOCKS

        # What cannot be posted is news as well, at once or later, never an exception.
        outside = np.array([table.num_rows * BLOCKS + 7], np.int32)
        refused = reader.plane.post_read(TransferId(40), "owner", table.table_id, outside, outside)
        news = [refused] if refused is not None else await _until(sides, 1)
        assert [(e.transfer_id, e.ending, e.peer_lost) for e in news] == [(TransferId(40), Ending.FAILED, False)]
        unknown = reader.plane.post_read(TransferId(41), "nobody", table.table_id, rows[0], rows[0])
        news = [unknown] if unknown is not None else await _until(sides, 1)
        assert [(e.transfer_id, e.ending) for e in news] == [(TransferId(41), Ending.FAILED)]

        # Neither is a table that was removed.
        reader.plane.remove_table("owner", table.table_id)
        reader.plane.remove_table("owner", 4711)
        gone = reader.plane.post_read(TransferId(42), "owner", table.table_id, rows[0], rows[0])
        news = [gone] if gone is not None else await _until(sides, 1)
        assert [(e.transfer_id, e.ending) for e in news] == [(TransferId(42), Ending.FAILED)]

        # A peer that was removed can be prepared again.
        reader.plane.remove_peer("owner", keep=True)
        reader.plane.remove_peer("nobody")
        await reader.plane.prepare_peer("owner", metadata)

        # After its end a plane can start again, as another agent, which is met anew.
        reader.plane.remove_peer("owner")
        owner.plane.close()
        owner.start()
        name = owner.plane.agent_name
        assert name != "owner"
        owner.plane.watch(True)
        await reader.plane.prepare_peer(name, owner.plane.metadata())
        reader.plane.add_table(name, table, mine, theirs)
        again = reader.plane.post_read(
            TransferId(50), name, table.table_id, (rows + local).ravel(), (rows + remote).ravel()
        )
        news = [again] if again is not None else await _until(sides, 1)
        assert news == [Ended(TransferId(50), Ending.DONE)]
        assert reader.blocks(orders[0], [3, 9, 4]) == owner.blocks(orders[1], [5, 6, 0])
        owner.plane.watch(False)
        assert all(isinstance(v, int) for v in reader.plane.statistics().values())
        assert all(isinstance(v, str) for v in reader.plane.describe().values())
    finally:
        for side in sides:
            side.plane.close()
            side.plane.close()
