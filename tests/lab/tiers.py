"""Tiers that are told what to do: a copy plane and a record plane without threads, on a test's own loop.

They keep the promises of `asynckv/ports.py` and nothing beyond them: a copy that was posted takes the bytes that are
there when it *lands*, so that a block that is given to another request too early is caught by its bytes. By default a
move lands in the loop's next turn; a plane that is `deferred` lets moves wait until a test says what becomes of them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import TransferId
from asynckv.geometry.layout import Memory
from asynckv.geometry.plan import ReadRequest
from asynckv.ports import CopyOp, Record, RecordNews, RecordsEnded, RecordsLost, StoredRecord
from asynckv.testing.fabric import Bytes, bytes_at


def _copies(read: ReadRequest) -> Iterator[tuple[int, int, int, int, int]]:
    table = read.table
    rows, blocks = np.divmod(read.local, table.local_blocks)
    others, slots = np.divmod(read.remote, table.remote_blocks)
    assert (rows == others).all(), "a descriptor names two different rows"
    for row, block, slot in zip(rows.tolist(), blocks.tolist(), slots.tolist(), strict=True):
        memory, offset, stride = table.local[row].tolist()
        other, start, step = table.remote[row].tolist()
        yield memory, offset + block * stride, other, start + slot * step, int(table.length[row])


class _Move:
    """One that was posted and has not ended."""

    def __init__(self, op: CopyOp, far: str, pieces: Iterator[ReadRequest]) -> None:
        self.op, self.far, self.pieces = op, far, pieces
        self.is_cancelled = False
        self.flying = next(pieces, None)
        """The piece that cannot be called back."""


class SimCopies:
    """A copy plane.

    Attributes:
        deferred: Moves wait for `step`, `finish`, `fail` or `doubt`.
        moves: Those that have not ended, the oldest first.
        fate: Told every move that is posted; what it returns becomes of it (`finish` by default).
    """

    def __init__(self) -> None:
        self.deferred = False
        self.moves: dict[TransferId, _Move] = {}
        self.posts = self.num_bytes = self.num_staged = 0
        self.fate: Callable[[TransferId, CopyOp], str] = lambda move_id, op: "finish"
        self.is_open = False
        self.on_land: Callable[[TransferId, CopyOp, int, int, int], None] = lambda *_: None
        """Called with the memory, start and length on the near side, before bytes are copied."""
        self._near: list[Bytes] = []
        self._far: dict[str, list[Bytes]] = {}
        self._news: list[TransferEnded] = []
        self._on_ready: Callable[[], None] = lambda: None

    def start(self, near: Sequence[Memory], far: Mapping[str, Sequence[Memory]], on_ready: Callable[[], None]) -> None:
        """Know the memory."""
        assert not self.is_open
        self.is_open, self._on_ready = True, on_ready
        self._near = [bytes_at(memory) for memory in near]
        self._far = {name: [bytes_at(memory) for memory in memories] for name, memories in far.items()}

    def post(self, move_id: TransferId, op: CopyOp, far: str, pieces: Iterable[ReadRequest]) -> None:
        """Begin a move; its fate says how it goes on, unless all are deferred."""
        assert self.is_open, "a copy was posted on a plane that is closed"
        assert move_id not in self.moves
        self.posts += 1
        self.moves[move_id] = _Move(op, far, iter(pieces))
        if not self.deferred:
            asyncio.get_running_loop().call_soon(self._go_on, move_id, self.fate(move_id, op))

    def _go_on(self, move_id: TransferId, fate: str) -> None:
        if move_id not in self.moves:
            return
        if fate != "wait":
            {"finish": self.finish, "fail": self.fail, "doubt": self.doubt}[fate](move_id)

    def cancel(self, move_id: TransferId) -> None:
        """Post nothing more of it; what flies goes on."""
        if (move := self.moves.get(move_id)) is not None:
            move.is_cancelled = True

    def step(self, move_id: TransferId) -> bool:
        """Let the piece that flies land; False if it was the last, and the move has ended."""
        move = self.moves[move_id]
        if move.flying is not None:
            self._land(move_id, move, move.flying)
        following = next(move.pieces, None) if move.flying is not None else None
        move.flying = None if move.is_cancelled else following
        if move.flying is not None:
            return True
        del self.moves[move_id]
        was_cut = move.is_cancelled and following is not None
        self._tell(
            TransferEnded(move_id, Ending.FAILED, "cancelled") if was_cut else TransferEnded(move_id, Ending.DONE)
        )
        return False

    def finish(self, move_id: TransferId | None = None) -> None:
        """Let one move, or all, land."""
        for one in [move_id] if move_id is not None else list(self.moves):
            while self.step(one):
                pass

    def fail(self, move_id: TransferId) -> None:
        """End a move after what flies has landed; nothing of it is written any more."""
        move = self.moves.pop(move_id)
        if move.flying is not None:
            self._land(move_id, move, move.flying)
        self._tell(TransferEnded(move_id, Ending.FAILED, "failed on request"))

    def doubt(self, move_id: TransferId) -> None:
        """Report trouble with a move that goes on: `step`, `finish` or `fail` may follow."""
        self._tell(TransferEnded(move_id, Ending.IN_DOUBT, "in doubt on request"))

    def _tell(self, news: TransferEnded) -> None:
        self._news.append(news)
        self._ring(self._on_ready)

    def _ring(self, on_ready: Callable[[], None]) -> None:
        """Say that there are news."""
        asyncio.get_running_loop().call_soon(on_ready)

    def _land(self, move_id: TransferId, move: _Move, read: ReadRequest) -> None:
        assert move.op is CopyOp.READ or not read.table.boxes, "a store places pieces"
        self.num_staged += read.is_staged
        for memory, begin, other, there, length in read.pieces().tolist() if read.is_staged else _copies(read):
            near = self._near[memory][begin : begin + length]
            far = self._far[move.far][other][there : there + length]
            assert len(near) == len(far) == length, "a copy goes beyond its memory"
            self.on_land(move_id, move.op, memory, begin, length)
            if move.op is CopyOp.READ:
                near[:] = far
            else:
                far[:] = near
            self.num_bytes += length

    def poll(self) -> Sequence[TransferEnded]:
        """Return news."""
        news, self._news = self._news, []
        return news

    def statistics(self) -> dict[str, int]:
        """Count posts."""
        return {"posts": self.posts, "running": len(self.moves)}

    def describe(self) -> dict[str, str]:
        """Say what this is."""
        return {"copies": "simulated"}

    async def quiesce(self, timeout_s: float | None = None) -> None:
        """There are no threads."""

    def close(self) -> None:
        """Nothing is written afterwards: what had not landed never does."""
        self.is_open = False
        self.moves.clear()
        self._near.clear()
        self._far.clear()


class SimDisk:
    """The part that outlives the process: records by their place, each with a checksum over its key and its bytes.

    Attributes:
        records: Place -> record and bytes.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.records: dict[int, tuple[Record, bytes]] = {}
        self.sums: dict[int, bytes] = {}
        self.layouts: dict[str, bytes] = {}

    def put(self, record: Record, data: bytes, checksum: bytes = b"") -> None:
        """Write a record in the place of one that begins there; no other may know any of these bytes for its own."""
        end = record.far + record.size
        assert end <= self.num_bytes, "a record beyond the disk's end"
        for far, (other, _) in self.records.items():
            if far != record.far and far < end and record.far < far + other.size:
                raise AssertionError(f"a record at {record.far} is written over one at {far} that was not forgotten")
        self.records[record.far] = record, data
        self.sums[record.far] = checksum or digest(record.key, data)

    def rot(self, keys: Iterable[bytes]) -> None:
        """Let the bytes of some keys be others than were stored."""
        wanted = set(keys)
        for far, (record, data) in self.records.items():
            if record.key in wanted:
                self.records[far] = record, bytes([data[0] ^ 1]) + data[1:]

    def is_good(self, far: int) -> bool:
        """Whether a record's bytes are what was stored under its key."""
        record, data = self.records[far]
        return self.sums[far] == digest(record.key, data)


def digest(key: bytes, data: bytes) -> bytes:
    """Return a digest that binds bytes to their key."""
    return hashlib.blake2b(data, key=key[:64], digest_size=8).digest()


class SimRecords:
    """A record plane on a `SimDisk`.

    Attributes:
        deferred: Moves wait for `finish`, `fail` or `doubt`.
        moves: Those that have not ended, the oldest first.
    """

    def __init__(self, disk: SimDisk) -> None:
        self.disk = disk
        self.deferred = self.is_open = False
        self.moves: dict[TransferId, tuple[CopyOp, Sequence[Record]]] = {}
        self.writes = self.reads = 0
        self._news: list[RecordNews] = []
        self._memory: Bytes = np.zeros(0, np.uint8)
        self._broken: dict[CopyOp, str] = {}
        self._on_ready: Callable[[], None] = lambda: None

    def start(
        self,
        memory: Memory,
        on_ready: Callable[[], None],
        loop: asyncio.AbstractEventLoop | None = None,
        layouts: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Sequence[StoredRecord]:
        """Say what is there."""
        assert not self.is_open
        self.disk.layouts |= layouts
        self.is_open, self._on_ready, self._memory = True, on_ready, bytes_at(memory)
        return [StoredRecord(r.key, far, r.size, r.layout, r.tag) for far, (r, _) in self.disk.records.items()]

    def post(self, move_id: TransferId, op: CopyOp, records: Sequence[Record]) -> None:
        """Begin a move."""
        assert self.is_open, "records were posted on a plane that is closed"
        assert move_id not in self.moves
        self.moves[move_id] = op, tuple(records)
        if not self.deferred:
            asyncio.get_running_loop().call_soon(self._finish_if_there, move_id)

    def _finish_if_there(self, move_id: TransferId) -> None:
        if move_id in self.moves:
            self.finish(move_id)

    def finish(self, move_id: TransferId | None = None) -> None:
        """Let one move, or all, be done."""
        for one in [move_id] if move_id is not None else list(self.moves):
            op, records = self.moves.pop(one)
            if op in self._broken:
                self._tell(RecordsEnded(one, Ending.FAILED, self._broken[op]))
                continue
            lost = []
            for at, record in enumerate(records):
                near = self._memory[record.near : record.near + record.size]
                if op is CopyOp.WRITE:
                    self.writes += 1
                    self.disk.put(record, near.tobytes())
                    continue
                self.reads += 1
                kept = self.disk.records.get(record.far)
                if kept is None or kept[0].key != record.key or not self.disk.is_good(record.far):
                    lost.append(at)
                else:
                    near[:] = np.frombuffer(kept[1], np.uint8)
            ending = Ending.FAILED if lost else Ending.DONE
            self._tell(RecordsEnded(one, ending, "not what was stored" if lost else "", tuple(lost)))

    def fail(self, move_id: TransferId) -> None:
        """End a move; what it has read or written is rubbish."""
        op, records = self.moves.pop(move_id)
        for record in records[:1]:
            if op is CopyOp.READ:
                self._memory[record.near : record.near + record.size] = 0xEE
            else:
                self.disk.records.pop(record.far, None)
        self._tell(RecordsEnded(move_id, Ending.FAILED, "failed on request"))

    def doubt(self, move_id: TransferId) -> None:
        """Report trouble with a move that goes on."""
        self._tell(RecordsEnded(move_id, Ending.IN_DOUBT, "in doubt on request"))

    def lose(self, cause: str = "the disk is gone", *, reads: bool = True) -> None:
        """Take nothing any more."""
        self._broken = dict.fromkeys(CopyOp if reads else (CopyOp.WRITE,), cause)
        self._tell(RecordsLost(cause, reads))
        for move_id, (op, _) in list(self.moves.items()):
            if op in self._broken:
                self.finish(move_id)

    def forget(self, places: Iterable[int]) -> None:
        """Drop what is stored."""
        for far in places:
            self.disk.records.pop(far, None)

    def _tell(self, news: RecordNews) -> None:
        self._news.append(news)
        self._ring(self._on_ready)

    def _ring(self, on_ready: Callable[[], None]) -> None:
        """Say that there are news."""
        asyncio.get_running_loop().call_soon(on_ready)

    def poll(self) -> Sequence[RecordNews]:
        """Return news."""
        news, self._news = self._news, []
        return news

    def statistics(self) -> dict[str, int]:
        """Count records."""
        return {"records": len(self.disk.records), "written": self.writes, "read": self.reads}

    def describe(self) -> dict[str, str]:
        """Say what this is."""
        return {"files": "simulated"}

    async def quiesce(self, timeout_s: float | None = None) -> None:
        """There are no threads."""

    def close(self) -> None:
        """Drop all that had not been written."""
        self.is_open = False
        self.moves.clear()
