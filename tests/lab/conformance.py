"""Checks of what every implementation of a port must do, which run on any of them: the fake is verified.

The checks are plain coroutines that raise `AssertionError`; call them from any test runner, on the
event loop that the planes will live on.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import anyio
import numpy as np
import numpy.typing as npt

from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import Address, ReplyTo, TransferId
from asynckv.edges.sharing import shared_memory
from asynckv.errors import BackendError
from asynckv.geometry.bounds import BlockRuns
from asynckv.geometry.layout import Group, Layout, Memory, attention_view
from asynckv.geometry.look import Differing, differing, looks
from asynckv.geometry.match import assign
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.plan import ReadRequest
from asynckv.geometry.tables import DescTable, PeerTables, Span
from asynckv.ports import AgentInfo, ControlPlane, DataPlane

PATIENCE_S = 10.0
BLOCKS, TOKENS, HEADS, DIM = 16, 4, 2, 8

Indices = npt.NDArray[np.int32]
ZERO: Indices = np.zeros(1, np.int32)


class _Inbox:
    """Collects packets."""

    def __init__(self) -> None:
        self.packets: list[tuple[Address | ReplyTo, bytes]] = []
        self._event = asyncio.Event()

    def __call__(self, origin: Address | ReplyTo, packet: bytes, principal: str) -> None:
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
        assert asker.host(listener.address), "a link goes to a host"

        # Packets of a link stay in order, whatever is in them.
        bodies = [bytes([i % 256]) * (1 + i * 37 % 3000) for i in range(500)]
        for body in bodies:
            assert asker.send(listener.address, body)
        await heard.wait(501)
        assert [packet for _, packet in heard.packets[1:]] == bodies
        assert {origin for origin, _ in heard.packets} == {route}

        # No peer there, or nonsense: never an exception.
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
            model="conformance",
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
        self.news: list[TransferEnded] = []

    async def start(self) -> AgentInfo:
        return await self.plane.start(self.layout.memories, self.ready.set)

    def blocks(self, order: tuple[str, ...], ids: list[int]) -> bytes:
        """Content of blocks, dims in logical order."""
        sizes = {"kv": 2, "block": BLOCKS, "token": TOKENS, "head": HEADS, "dim": DIM * 2}
        logical = ("kv", "block", "token", "head", "dim")
        out = b""
        for array in self.arrays:
            shaped = array.reshape([sizes[d] for d in order]).transpose([order.index(d) for d in logical])
            out += np.ascontiguousarray(shaped[:, ids]).tobytes()
        return out


async def _until(sides: list[_Side], count: int) -> list[TransferEnded]:
    """Poll both sides, as engines do, until the first one has so much news."""
    with anyio.fail_after(PATIENCE_S):
        while True:
            for side in sides:
                side.ready.clear()
                side.news += [news for news in side.plane.poll() if isinstance(news, TransferEnded)]
            if len(sides[0].news) >= count:
                news, sides[0].news = sides[0].news, []
                return news
            waiting = [asyncio.ensure_future(side.ready.wait()) for side in sides]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def _refused(side: _Side, agent: AgentInfo, memories: Sequence[Memory], why: str) -> None:
    try:
        await side.plane.add_remote_agent(agent, memories)
    except BackendError:
        return
    raise AssertionError(f"{why} is refused")


def _one_row(table_id: int, offset: int, memory: int = 1) -> DescTable:
    """A table of one descriptor of 64 bytes: of the owner's second memory, or of another, to our first."""
    length, mine, theirs = (np.array(x, np.int64) for x in ([64], [[0, 0, 64]], [[memory, offset, 64]]))
    return DescTable(table_id, Span(0, 0, 0, 0, 1), length, mine, theirs, 1, 1)


async def check_data_plane(make: Callable[[str], DataPlane], *, shared: bool = False) -> None:
    """Check a data plane: `make(agent_name)` returns a new one, not started. `shared`: in memory that can be shared."""
    orders = ("kv", "block", "token", "head", "dim"), ("block", "head", "kv", "token", "dim")
    reader, owner = (
        _Side(make(name), seed, order, shared)
        for name, seed, order in (("reader", 1, orders[0]), ("owner", 2, orders[1]))
    )
    sides = [reader, owner]
    try:
        _, agent = [await side.start() for side in sides]
        assert agent.name == "owner"
        owner.plane.watch(True)
        peer = PeerTables(reader.layout, owner.layout, assign(reader.layout, [owner.layout])[0], itertools.count(1))
        table, theirs = peer.regular[0], owner.layout.memories
        rows = np.arange(table.num_rows, dtype=np.int32)[:, None] * np.int32(BLOCKS)

        async def post(number: int, name: str, table: DescTable, local: Indices, remote: Indices) -> TransferEnded:
            read = ReadRequest(table, local, remote, len(local) * int(table.length.max()), len(local))
            posted = reader.plane.post_read(TransferId(number), name, read)
            (ended,) = [posted] if posted is not None else await _until(sides, 1)
            assert ended.transfer_id == number
            return ended

        early = await post(0, "owner", table, rows[0], rows[0])
        assert early.ending is Ending.FAILED, "a read needs a remote agent that was added"
        await _refused(reader, AgentInfo("somebody", agent.metadata), theirs, "metadata under another name")
        # One process may be met under two addresses: it is there until both have been removed.
        await reader.plane.add_remote_agent(agent, theirs)
        await reader.plane.add_remote_agent(agent, theirs)
        reader.plane.remove_remote_agent("owner")

        # Bytes land where the table says, and nowhere else.
        before = reader.blocks(orders[0], [b for b in range(BLOCKS) if b not in (3, 9, 4)])
        local, remote = np.array([3, 9, 4], np.int32), np.array([5, 6, 0], np.int32)
        whole = (rows + local).ravel(), (rows + remote).ravel()
        assert await post(1, "owner", table, *whole) == TransferEnded(TransferId(1), Ending.DONE)
        assert reader.blocks(orders[0], [3, 9, 4]) == owner.blocks(orders[1], [5, 6, 0])
        assert reader.blocks(orders[0], [b for b in range(BLOCKS) if b not in (3, 9, 4)]) == before

        # One name is one agent: what comes under a name that is taken changes nothing.
        await _refused(reader, AgentInfo("owner", agent.metadata + b"x"), theirs, "other metadata under a known name")

        # A look finds what has changed since, below the number of tokens, and writes nothing of ours.
        lists = BlockLists([(0, local.astype(np.int64))], [BlockRuns(0, ((5, 2), (0, 1)))], 2 * TOKENS + 2)
        theirs_by_token = owner.arrays[1].reshape(BLOCKS, HEADS, 2, TOKENS, DIM * 2)
        kept = [array.copy() for array in reader.arrays]

        async def look(first: int) -> list[Differing]:
            found = []
            for number, each in enumerate(looks(peer, lists, None, 0, 1 << 20, 512)):
                posted = reader.plane.post_read(TransferId(first + number), "owner", replace(each, place=number))
                (ended,) = [posted] if posted is not None else await _until(sides, 1)
                assert ended._replace(difference=None) == TransferEnded(TransferId(first + number), Ending.DONE)
                found += [differing(peer, lists, each, ended.difference)] if ended.difference is not None else []
            assert all((array == before).all() for array, before in zip(reader.arrays, kept, strict=True))
            return found

        assert await look(100) == []
        theirs_by_token[0, :, :, 2:] ^= 1
        assert await look(200) == [], "the owner goes on behind the tokens that it has lent"
        theirs_by_token[0, 1, 1, 1, 3] ^= 1
        (found,) = await look(300)
        assert (found.layer, found.part, found.first_token, found.num_tokens) == ("1", "v", 2 * TOKENS, 2)
        assert int(found.read[:2], 16) ^ int(found.seen[:2], 16) == 1
        reads = reader.plane.statistics()["posts"]

        # News comes once per transfer, for many as for one.
        posted = [
            reader.plane.post_read(
                TransferId(10 + i),
                "owner",
                ReadRequest(table, (rows + i).ravel(), (rows + (BLOCKS - 1 - i)).ravel(), table.block_bytes, len(rows)),
            )
            for i in range(BLOCKS)
        ]
        done = [ended for ended in posted if ended is not None]
        if len(done) < BLOCKS:
            done += await _until(sides, BLOCKS - len(done))
        assert sorted(e.transfer_id for e in done) == list(range(10, 10 + BLOCKS))
        assert {e.ending for e in done} == {Ending.DONE}
        assert reader.plane.poll() == []
        assert reader.blocks(orders[0], list(range(BLOCKS))) == owner.blocks(orders[1], list(range(BLOCKS))[::-1])
        assert reader.plane.statistics()["running"] == 0
        assert reader.plane.statistics()["posts"] == reads + BLOCKS

        # A table is known by itself: neither by its number, nor by where in memory a former one lay.
        for number in range(20, 40):
            reader.arrays[0][:64] = 0
            other = _one_row(table.table_id, number * 64)
            assert (await post(number, "owner", other, ZERO, ZERO)).ending is Ending.DONE
            assert bytes(reader.arrays[0][:64]) == bytes(owner.arrays[1][number * 64 : (number + 1) * 64])
            del other

        # What cannot be posted is news as well, at once or later, never an exception.
        outside = np.array([table.num_rows * BLOCKS + 7], np.int32)
        refused = await post(40, "owner", table, outside, outside)
        assert (refused.ending, refused.peer_lost) == (Ending.FAILED, False)
        assert (await post(41, "nobody", table, rows[0], rows[0])).ending is Ending.FAILED
        # So is a table that cannot be prepared, and others can be read as before.
        refused = await post(42, "owner", _one_row(1, 0, memory=2), ZERO, ZERO)
        assert (refused.ending, refused.peer_lost) == (Ending.REFUSED, False)
        assert (await post(43, "owner", table, *whole)).ending is Ending.DONE

        # A remote agent that was removed can be added again.
        reader.plane.remove_remote_agent("owner", keep=True)
        reader.plane.remove_remote_agent("nobody")
        await reader.plane.add_remote_agent(agent, theirs)
        assert (await post(44, "owner", table, *whole)).ending is Ending.DONE

        # After its end a plane can start again, as another agent, which is met anew.
        reader.plane.remove_remote_agent("owner")
        assert (await post(45, "owner", table, *whole)).ending is Ending.FAILED
        owner.plane.close()
        again = await owner.start()
        assert again.name != "owner"
        owner.plane.watch(True)
        await reader.plane.add_remote_agent(again, theirs)
        assert await post(50, again.name, table, *whole) == TransferEnded(TransferId(50), Ending.DONE)
        assert reader.blocks(orders[0], [3, 9, 4]) == owner.blocks(orders[1], [5, 6, 0])
        owner.plane.watch(False)
        assert all(isinstance(v, int) for v in reader.plane.statistics().values())
        assert all(isinstance(v, str) for v in reader.plane.describe().values())
    finally:
        for side in sides:
            side.plane.close()
            side.plane.close()
