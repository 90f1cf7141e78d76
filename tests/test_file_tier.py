"""The file tier: what is stored is found again by the next process, and nothing else is ever served."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import anyio
import numpy as np
import numpy.typing as npt
import pytest

from asynckv.core.events import Ending
from asynckv.core.types import TransferId
from asynckv.edges import aside
from asynckv.edges.control.local import LocalDoor
from asynckv.edges.files import nixl as file_nixl
from asynckv.edges.files import tier as file_tier
from asynckv.edges.files import worker as file_worker
from asynckv.edges.files.index import INDEX, DamagedIndex, FileIndex, IndexRow, read_index, typed
from asynckv.edges.files.io import Extent
from asynckv.edges.files.store import OWNER, OwnerLock, owner_of
from asynckv.edges.files.tier import FileTier
from asynckv.edges.files.worker import Worker
from asynckv.edges.host_pool import HostPool
from asynckv.edges.nic.agent import Agent
from asynckv.errors import BackendError, ConfigError
from asynckv.geometry.layout import Memory
from asynckv.ports import CopyOp, Record, RecordNews, RecordPlane, RecordsEnded, RecordsLost, StoredRecord
from asynckv.tools.offload.folder import look, prune_folder
from tests.commands import python
from tests.engines import Polled
from tests.killed import EVERY, contents, unsound
from tests.lab import plain_files
from tests.lab.plain_files import PlainFiles

PATIENCE_S = 10.0
PAGE = 4096
SIZE = 3 * PAGE
COUNT = 24
RANGE = 2 * COUNT * SIZE
SEGMENT = 7 * PAGE
"""Some records go over the end of one."""

READ, WRITE = CopyOp.READ, CopyOp.WRITE
DONE = Ending.DONE


class Tier(Polled[RecordNews]):
    """A file tier over a pool of `COUNT` records, polled whenever it asks to be."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__()
        self.pool = HostPool(COUNT * SIZE)
        num_bytes = options.pop("num_bytes", RANGE)
        options["open_io"] = plain_files.plain if options.pop("back_end", "nixl") == "plain" else None
        self.plane: RecordPlane = FileTier(folder, num_bytes, **{"segment_bytes": SEGMENT} | options)
        self._numbers = itertools.count(1)

    def start(self, **layouts: bytes) -> Sequence[StoredRecord]:
        return self.plane.start(self.pool.memory, self._poll, None, layouts)

    def started(self) -> Tier:
        self.start()
        return self

    def _poll(self) -> None:
        self.news += self.plane.poll()
        self.changed.set()

    async def ended(self) -> RecordsEnded:
        """Wait for the end of a move, whatever else is told."""
        await self.until(lambda: any(isinstance(news, RecordsEnded) for news in self.news))
        found = next(news for news in self.news if isinstance(news, RecordsEnded))
        self.news.remove(found)
        return found

    @property
    def worker(self) -> Worker:
        assert isinstance(self.plane, FileTier)
        assert self.plane._worker is not None
        return self.plane._worker

    def refuse_index(self) -> None:
        """Let the index take no more changes."""
        assert self.worker._index is not None
        self.worker._index._db.execute("PRAGMA query_only = ON")

    def found(self, name: str) -> int:
        """Return what the last start has counted."""
        assert isinstance(self.plane, FileTier)
        return self.plane.found[name]

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        assert self.pool.array is not None
        return self.pool.array

    def fill(self, records: Sequence[Record]) -> None:
        for record in records:
            self.bytes[record.near : record.near + record.size] = contents(record.key, record.size)

    def post(self, op: CopyOp, records: Sequence[Record]) -> TransferId:
        number = TransferId(next(self._numbers))
        self.plane.post(number, op, records)
        return number

    async def store(self, records: Sequence[Record]) -> RecordsEnded:
        self.fill(records)
        self.post(WRITE, records)
        return await self.ended()

    async def put(self, records: Sequence[Record]) -> None:
        """Store records in one start of the tier."""
        self.start()
        await self.store(records)
        self.plane.close()

    async def load(self, records: Sequence[Record]) -> RecordsEnded:
        """Read, and check that all that is not lost is what belongs to the key."""
        self.bytes[:] = 0
        self.post(READ, records)
        ended = await self.ended()
        if ended.ending is DONE or ended.lost:
            for i, record in enumerate(records):
                if i not in ended.lost:
                    found = self.bytes[record.near : record.near + record.size]
                    assert np.array_equal(found, contents(record.key, record.size)), record
        return ended

    def count(self, name: str) -> int:
        return self.plane.statistics().get(name, 0)


def records(*numbers: int, word: str = "key") -> list[Record]:
    """Records with other places in memory than in the files."""
    return [
        Record(f"{word}-{i}".encode(), i % COUNT * SIZE, (2 * COUNT - 1 - i) * SIZE, SIZE, "layout", "group")
        for i in numbers
    ]


Make = Callable[..., Tier]


@pytest.fixture
def make(anyio_backend: str, tmp_path: Path) -> Iterator[Make]:
    """Tiers in one directory, by system calls unless something else is asked for; closed in the end."""
    made: list[Tier] = []

    def make_one(**options: Any) -> Tier:
        made.append(Tier(options.pop("folder", tmp_path / "tier"), **{"back_end": "plain"} | options))
        return made[-1]

    yield make_one
    for tier in made:
        tier.plane.close()
        tier.pool.close()


both = pytest.mark.parametrize("back_end", ["plain", pytest.param("nixl", marks=pytest.mark.nixl)])


# -- what is kept ------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("direct", [True, False])
async def test_what_is_stored_is_found_by_the_next_start(
    make: Make, tmp_path: Path, back_end: str, direct: bool
) -> None:
    tier, all_of_it = make(back_end=back_end, direct=direct), records(*range(COUNT))
    assert tier.start(layout=b"how it lies") == []
    assert (await tier.store(all_of_it)).ending is DONE
    assert (await tier.load(all_of_it)).ending is DONE
    await tier.plane.quiesce()
    tier.plane.close()
    found = tier.start()
    assert sorted(found) == sorted(StoredRecord(r.key, r.far, r.size, "layout", "group") for r in all_of_it)
    assert read_index(tmp_path / "tier").layouts == {"layout": b"how it lies"}
    elsewhere = [r._replace(near=(COUNT - 1) * SIZE - r.near) for r in all_of_it]
    assert (await tier.load(elsewhere)).ending is DONE


async def test_a_range_that_a_disk_has_no_room_for_takes_none_of_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("it begins to fill the disk"))
    tier = make(num_bytes=1 << 50, segment_bytes=1 << 36)
    with pytest.raises(BackendError, match=f"no room for {1 << 50} bytes"):
        tier.start()
    assert not list(tmp_path.rglob("segment-*"))  # noqa: ASYNC240


async def test_others_cannot_read_it_and_it_follows_no_links(make: Make, tmp_path: Path) -> None:
    tier = make().started()
    await tier.store(records(0))
    (index,) = tmp_path.rglob("index.sqlite")  # noqa: ASYNC240
    assert not any(path.stat().st_mode & 0o077 for path in index.parent.iterdir())
    tier.plane.close()
    index.rename(tmp_path / "elsewhere")
    index.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BackendError, match="a link"):
        tier.start()


async def test_what_was_stored_first_is_told_first(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, clock = make(), itertools.count(1)
    monkeypatch.setattr(file_worker, "now", lambda: next(clock))
    tier.start()
    for i in (2, 0, 3, 1):
        await tier.store(records(i))
    tier.plane.close()
    assert [stored.key for stored in tier.start()] == [r.key for i in (2, 0, 3, 1) for r in records(i)]


async def test_a_place_holds_what_was_put_there_last(make: Make, tmp_path: Path) -> None:
    tier = make().started()
    old, new = records(1, 2, word="old"), records(1, word="new")
    await tier.store(old)
    await tier.store(new)
    ended = await tier.load([*old, *new, *records(5)])
    assert (ended.ending, ended.lost) == (Ending.FAILED, (0, 3))  # whose first cause is told
    number, offset = divmod(old[0].far, SEGMENT)
    name = tmp_path / "tier" / f"segment-{number:05}.kv"
    assert ended.cause == f"group 'group', hash {b'old-1'.hex()}..., at {offset} of {name}: it is not stored there"
    tier.plane.forget([old[1].far, 12345])
    assert (await tier.load(old)).lost == (0, 1)
    tier.plane.close()
    assert [stored.key for stored in tier.start()] == [b"new-1"]


async def test_a_shorter_range_keeps_what_is_within_it_and_gives_the_rest_back(make: Make, tmp_path: Path) -> None:
    tier = make()
    await tier.put(records(*range(COUNT)))
    half = (2 * COUNT - COUNT // 2) * SIZE
    tier = make(num_bytes=half, segment_bytes=PAGE)  # a directory keeps the size of its files
    assert {stored.key for stored in tier.start()} == {r.key for r in records(*range(COUNT // 2, COUNT))}
    assert sum(path.stat().st_size for path in (tmp_path / "tier").glob("segment-*")) == half


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 100},
        {"size": 0},
        {"near": 8},
        {"near": COUNT * SIZE},
        {"near": -PAGE},
        {"far": 100},
        {"far": RANGE - PAGE},
        {"far": -PAGE},
        {"key": b"k" * 1025},
    ],
    ids=str,
)
async def test_a_record_that_cannot_be_is_refused_before_anything_moves(make: Make, wrong: dict[str, Any]) -> None:
    tier = make().started()
    (good,) = records(1)
    tier.fill([good])
    tier.post(WRITE, [good, good._replace(**wrong)])
    ended = await tier.ended()
    assert (ended.ending, ended.lost) == (Ending.FAILED, ())
    assert (await tier.load([good])).lost == (0,)


async def test_no_records_are_moved_at_once_and_a_closed_tier_moves_none(make: Make) -> None:
    tier = make().started()
    tier.post(READ, [])
    assert await tier.heard() == [RecordsEnded(TransferId(1), DONE)]
    with pytest.raises(BackendError, match="not ended"):
        tier.start()
    tier.plane.close()
    tier.post(READ, records(1))
    assert await tier.heard() == [RecordsEnded(TransferId(2), Ending.FAILED, "the file tier is closed")]


@pytest.mark.parametrize("options", [{"num_bytes": 100}, {"segment_bytes": 1}, {"slow_s": 0}, {"slow_s": float("nan")}])
def test_bad_numbers_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FileTier(tmp_path, **{"num_bytes": RANGE} | options)


# -- what is in the files is not what was stored -----------------------------------------------------------


def overwrite(folder: Path, at: int, data: bytes, segment: int = SEGMENT) -> None:
    with (folder / f"segment-{at // segment:05}.kv").open("r+b") as file:
        file.seek(at % segment)
        file.write(data)


@both
async def test_corrupted_and_exchanged_bytes_are_lost_and_nothing_else_is(
    make: Make, tmp_path: Path, back_end: str
) -> None:
    tier, all_of_it = make(back_end=back_end, segment_bytes=RANGE).started(), records(*range(COUNT))
    await tier.store(all_of_it)
    overwrite(tmp_path / "tier", all_of_it[3].far + SIZE - 1, b"!", RANGE)
    for one, other in ((5, 6), (6, 5)):
        overwrite(tmp_path / "tier", all_of_it[one].far, contents(all_of_it[other].key, SIZE).tobytes(), RANGE)
    assert (await tier.load(all_of_it)).lost == (3, 5, 6)
    assert tier.count("corrupted") == 3
    tier.plane.close()
    assert len(tier.start()) == COUNT - 3


async def test_a_missing_or_short_segment_costs_its_records_only(make: Make, tmp_path: Path) -> None:
    tier, some = make(segment_bytes=4 * SIZE), records(*range(COUNT))
    await tier.put(some)
    (tmp_path / "tier" / "segment-00007.kv").unlink()
    os.truncate(tmp_path / "tier" / "segment-00009.kv", SIZE + 1)
    found = {stored.far // SIZE for stored in tier.start()}
    assert {r.far // SIZE for r in some} - found == {28, 29, 30, 31, 37, 38, 39}
    there = [r for r in some if r.far // SIZE in found]
    assert (await tier.load(there)).ending is DONE
    assert tier.found("missing") == 7
    assert (await tier.store(some)).ending is DONE
    assert (await tier.load(some)).ending is DONE


TORN: dict[str, Callable[[bytearray], bytes | bytearray]] = {
    "cut short": lambda data: data[: len(data) // 2 + 100],
    "empty": lambda data: b"",
    "nonsense": lambda data: bytes(reversed(data)),
    "a page lost": lambda data: data[:4096] + bytes(4096) + data[8192:],
}


@pytest.mark.parametrize("how", TORN)
async def test_a_torn_index_is_set_aside_and_the_tier_works(make: Make, tmp_path: Path, how: str) -> None:
    tier, some = make(), records(*range(COUNT))
    await tier.put(some)
    path = tmp_path / "tier" / INDEX
    aside = path.with_name(f"{INDEX}.damaged")
    aside.write_bytes(b"an older one")
    path.write_bytes(torn := bytes(TORN[how](bytearray(path.read_bytes()))))
    assert tier.start() == []
    assert tier.found("index_damaged") == (how != "empty")
    assert aside.read_bytes() == (torn if how != "empty" else b"an older one")
    assert (await tier.load(some)).lost == tuple(range(COUNT))
    assert (await tier.store(some)).ending is DONE
    tier.plane.close()
    assert len(tier.start()) == COUNT


def spoil(folder: Path, good: bytes, at: int) -> None:
    """Make one byte of an index 0xFF."""
    for suffix in ("", "-wal", "-shm"):
        (folder / f"{INDEX}{suffix}").unlink(missing_ok=True)
    (folder / INDEX).write_bytes(good[:at] + b"\xff" + good[at + 1 :])


@pytest.mark.slow
def test_a_wrong_byte_of_the_first_page_is_told_or_changes_nothing(tmp_path: Path) -> None:
    """All 4,096 of them: each either leaves every record, or is damage, for the owner and for other readers."""
    (index := FileIndex(tmp_path)).change({0: IndexRow(0, PAGE, b"key", 0, "layout", "group", 0)}, [])
    index.note(segment_bytes=SEGMENT)
    index.close()
    good, said = (tmp_path / INDEX).read_bytes(), read_index(tmp_path)
    told = {"owner": 0, "other": 0}
    for at in range(PAGE):
        spoil(tmp_path, good, at)
        try:
            assert read_index(tmp_path) == said, at
        except DamagedIndex:
            told["other"] += 1
        try:
            with closing(FileIndex(tmp_path)) as index, typed(tmp_path):
                assert index.said() == said, at
        except DamagedIndex:
            told["owner"] += 1
    assert all(400 < count < 800 for count in told.values()), told


FIRST_PAGE = sorted({18, 19, 59, 63, 68, *random.Random(26).sample(range(PAGE), 60)})
"""Bytes of it: those that make it read-only, of another kind of text, format or application; and some."""


async def test_over_an_index_with_a_wrong_byte_every_start_ends_well(make: Make, tmp_path: Path) -> None:
    folder, tier = tmp_path / "tier", make(num_bytes=4 * SIZE)
    some = [r._replace(far=i * SIZE) for i, r in enumerate(records(0, 1))]
    await tier.put(some)
    good, told = (folder / INDEX).read_bytes(), 0
    for at in FIRST_PAGE:
        spoil(folder, good, at)
        with suppress(BackendError):
            look(folder)
        found = tier.start()
        assert (len(found), tier.found("index_damaged")) in ((2, 0), (0, 1)), at
        told += tier.found("index_damaged")
        tier.plane.close()
        assert tier.start() == found, at
        assert tier.found("index_damaged") == 0
        tier.plane.close()
    assert 5 <= told < len(FIRST_PAGE)


@contextmanager
def database(folder: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(folder / INDEX, isolation_level=None)) as db:
        yield db


async def test_rows_of_no_sense_are_dropped_and_of_two_in_one_place_the_older(make: Make, tmp_path: Path) -> None:
    tier = make()
    await tier.put(records(*range(COUNT)))
    with database(tmp_path / "tier") as db:
        row = "INSERT INTO records VALUES (?, ?, ?, ?, 1, ?)"
        for values in (
            (-PAGE, PAGE, b"k", 0, 0),
            (1, PAGE, b"k", 0, 0),
            (0, 1 << 60, b"k", 0, 0),
            (PAGE, "much", b"k", 0, 0),
            (2 * PAGE, PAGE, "text", 0, 0),
            (1 << 50, PAGE, b"k", 0, 0),
        ):
            db.execute(row, values)
        at = db.execute("SELECT min(far), max(far) FROM records WHERE CAST(key AS TEXT) LIKE 'key-%'").fetchone()
        db.execute(row, (at[0] + PAGE, PAGE, b"newer", 0, 1 << 40))
        db.execute(row, (at[1] - PAGE, 2 * PAGE, b"older", 0, 0))
        db.execute("INSERT INTO meta VALUES ('strange', 'value')")
        db.execute("INSERT INTO layouts VALUES ('strange', 1000000000000)")
    found = {stored.key for stored in tier.start()}
    assert found == {r.key for r in records(*range(COUNT - 1))} | {b"newer"}
    assert read_index(tmp_path / "tier").layouts == {}
    tier.plane.close()
    with database(tmp_path / "tier") as db:
        assert db.execute("SELECT count(*) FROM records").fetchone() == (COUNT,)


async def test_another_format_and_another_database_are_left_alone(make: Make, tmp_path: Path) -> None:
    tier = make().started()
    tier.plane.close()
    for change, message in (
        ("PRAGMA user_version = 7", "format 7"),
        ("PRAGMA application_id = 5; CREATE TABLE theirs (x)", "not an index of stored blocks"),
    ):
        with database(tmp_path / "tier") as db:
            db.executescript(change)
        with pytest.raises(BackendError, match=message):
            tier.start()
    assert (tmp_path / "tier" / INDEX).exists()


# -- owners ------------------------------------------------------------------------------------------------


async def test_one_directory_has_one_owner_which_is_named_to_others(make: Make) -> None:
    tier, other = make().started(), make()
    with pytest.raises(BackendError, match=rf"belongs to process {os.getpid()} on .* since 20"):
        other.start()
    await tier.store(records(1))
    tier.plane.close()
    assert len(other.start()) == 1


async def test_others_read_along_without_a_trace_and_never_what_was_written_since(make: Make, tmp_path: Path) -> None:
    """Beside a living owner, one after its end, and one that gives files back under it."""
    folder, some, new = tmp_path / "tier", records(*range(6)), records(4, word="new")
    owner, first, second = make(), make(read_only=True), make(read_only=True)
    owner.start()
    await owner.store(some)

    def state() -> dict[str, tuple[int, int, bytes]]:
        paths = [path for path in folder.iterdir() if not path.name.endswith(("-shm", "-wal"))]
        return {path.name: (path.stat().st_mtime_ns, path.stat().st_blocks, path.read_bytes()) for path in paths}

    with anyio.fail_after(PATIENCE_S):
        while not owner.count("commits"):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.001)
    before = state()
    for reader in (first, second):
        assert {stored.key for stored in reader.start(x=b"y")} == {r.key for r in some}
        assert (await reader.load(some)).ending is DONE
        ended = await reader.store(new)
        assert (ended.ending, "read only" in ended.cause) == (Ending.FAILED, True)
        reader.plane.forget([some[5].far])
        assert (await reader.load(some)).lost == (5,)
    assert state() == before
    await owner.store(new)
    assert (await first.load(some)).lost == (4, 5)
    assert first.count("corrupted") == 1
    assert (await owner.load([*some[:4], *new, some[5]])).ending is DONE
    owner.plane.close()
    prune_folder(folder)
    assert not list(folder.glob("segment-*"))
    assert (await second.load(some)).lost == (4, 5)
    owner.start()
    assert (await owner.store(some)).ending is DONE
    assert (await second.load(some[:4])).ending is DONE
    assert not any(isinstance(news, RecordsLost) for news in (*first.news, *second.news))


async def test_what_others_read_may_be_cut_short_or_gone(make: Make, tmp_path: Path) -> None:
    owner, reader, some = make(segment_bytes=4 * SIZE), make(read_only=True), records(*range(COUNT))
    await owner.put(some)
    (tmp_path / "tier" / "segment-00007.kv").unlink()
    assert len(reader.start()) == COUNT - 4
    assert not (tmp_path / "tier" / "segment-00007.kv").exists()
    os.truncate(tmp_path / "tier" / "segment-00009.kv", 0)
    ended = await reader.load(some)
    assert {some[i].far // SIZE for i in ended.lost} == {28, 29, 30, 31, 36, 37, 38, 39}
    reader.plane.close()
    os.fstat(0)  # what it never had open is still there
    (tmp_path / "tier" / INDEX).write_bytes(b"x" * 10_000)
    with pytest.raises(BackendError, match="is damaged"):
        make(read_only=True).start()
    assert (tmp_path / "tier" / INDEX).read_bytes() == b"x" * 10_000


async def test_a_directory_that_others_may_write_is_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, folder = make().started(), tmp_path / "tier"
    tier.plane.close()
    me = os.geteuid()
    if me:
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    else:
        os.chown(folder, 1234, -1)
    with pytest.raises(BackendError, match=r"belongs to user \d.*run as that user"):
        tier.start()
    monkeypatch.undo()
    os.chown(folder, me, -1)
    folder.chmod(0o757)
    with pytest.raises(BackendError, match=r"mode 757.*chmod o-w"):
        tier.start()
    folder.chmod(0o770)
    with pytest.raises(BackendError, match=rf"group {os.getegid()} may write .*mode 770.*chmod g-w"):
        tier.start()
    folder.chmod(0o2770)  # as of a container's volume
    tier.start()
    tier.plane.close()
    monkeypatch.setattr(os, "getegid", lambda: -1)
    monkeypatch.setattr(os, "getgroups", lambda: [])
    with pytest.raises(BackendError, match=r"mode 2770.*chmod g-w"):
        tier.start()


root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@root
@pytest.mark.parametrize("name", ["segment-00000.kv", INDEX, OWNER])
async def test_a_file_of_another_user_is_named_with_its_owner(make: Make, tmp_path: Path, name: str) -> None:
    tier = make()
    await tier.put(records(0, 1))
    os.chown(tmp_path / "tier" / name, 1234, -1)
    for each in tier, make(read_only=True):
        with pytest.raises(BackendError, match=rf"^\S+/tier/{name} belongs to user 1234, .* this process is user 0"):
            each.start()


@root
async def test_a_segment_that_only_root_may_write_is_named_with_its_owner(make: Make) -> None:
    with TemporaryDirectory() as above:  # pytest's own are root's all the way up
        os.chown(above, 4711, -1)
        tier = make(folder=Path(above, "tier"))
        os.seteuid(4711)
        try:
            await tier.put(records(0, 1))
            os.seteuid(0)
            os.chown(f"{above}/tier/segment-00001.kv", 0, -1)
            os.seteuid(4711)
            with pytest.raises(BackendError, match=r"/segment-00001.kv belongs to user 0 .mode 600., .* is user 4711"):
                tier.start()
        finally:
            os.seteuid(0)


def link(above: Path) -> Path:
    """Put a link in the place of a directory; returns where that is."""
    there = above.rename(f"{above}-there")
    above.symlink_to(there)
    return there


ABOVE: dict[str, tuple[Callable[[Path], object], str]] = {
    "another user's": (lambda above: os.chown(above, 65534, -1), "{} belongs to user 65534, .* is user 0.*run as that"),
    "everybody's": (lambda above: above.chmod(0o777), "any user may write {} .mode 777, of user 0.*chmod o-w or"),
    "another user's link": (
        lambda above: os.chown(link(above).parent / above.name, 65534, -1, follow_symlinks=False),
        "{} belongs to user 65534",
    ),
    "a link into another user's": (lambda above: os.chown(link(above), 65534, -1), "{}-there belongs to user 65534"),
}


@root
@pytest.mark.parametrize("what", ["files", "files to read", "socket"])
@pytest.mark.parametrize("how", ABOVE)
async def test_nothing_is_written_below_a_directory_in_which_others_can_exchange_it(
    make: Make, tmp_path: Path, how: str, what: str
) -> None:
    (above := tmp_path / "above").mkdir()
    change, says = ABOVE[how]
    change(above)
    tier = make(folder=above / "x" / "y", read_only=what == "files to read")
    door = LocalDoor(above / "x" / "y", lambda peer, asked, answer: None)
    with pytest.raises(BackendError, match=says.format(above)):
        await door.open("e.sock", "i") if what == "socket" else tier.start()
    assert os.listdir(above) == []


@root
async def test_a_sticky_directory_of_everybody_may_be_above(make: Make, tmp_path: Path) -> None:
    (above := tmp_path / "above").mkdir()
    above.chmod(0o1777)
    assert make(folder=above / "x" / "y").start() == []


@root
async def test_a_mount_point_of_everybody_may_be_above(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An emptyDir of Kubernetes: mode 777, no sticky bit, and only the pod's containers see it."""
    (above := tmp_path / "above").mkdir()
    above.chmod(0o777)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == above)
    assert make(folder=above / "x" / "y").start() == []


@pytest.mark.parametrize("how", ["removed", "renamed", "another's"])
def test_a_process_that_locks_a_removed_owner_file_owns_nothing(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening the owner file and locking it, the file is taken away; and perhaps the directory."""
    lock, others, held = fcntl.flock, list[OwnerLock](), tmp_path / OWNER

    def late(fd: int, what: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        if how == "renamed":
            held.rename(tmp_path / "elsewhere")
        else:
            held.unlink()
        if how == "another's":
            others.append(OwnerLock(tmp_path))
        lock(fd, what)

    monkeypatch.setattr(fcntl, "flock", late)
    if how == "another's":
        with pytest.raises(BackendError, match="belongs to process"):
            OwnerLock(tmp_path)
    else:
        others.append(OwnerLock(tmp_path))
    assert owner_of(tmp_path)[1]
    with pytest.raises(BackendError, match="belongs to process"):
        OwnerLock(tmp_path)
    others[0].release()
    assert not owner_of(tmp_path)[1]


def test_an_owner_file_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Opening a pipe would wait for a writer."""
    os.mkfifo(tmp_path / OWNER)
    assert owner_of(tmp_path) == (None, False)


async def test_a_segment_that_is_no_file_is_refused_by_name(make: Make, tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    os.mkfifo(tmp_path / "tier" / "segment-00000.kv")
    with pytest.raises(BackendError, match=r"segment-00000\.kv is not a regular file"):
        make(direct=False).start()


async def test_a_child_of_a_fork_does_not_keep_the_directory(make: Make) -> None:
    tier, other = make().started(), make()
    heard, said = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of forks beside threads
        child = os.fork()
    if not child:
        while True:
            os.write(said, b"-" if aside._started else b"+")  # it waits for no thread in its end
            signal.pause()
    try:
        assert os.read(heard, 1) == b"+"
        tier.plane.close()
        other.start()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)  # noqa: ASYNC222 - it is dead
        os.close(heard)
        os.close(said)


@pytest.mark.nixl
async def test_a_start_that_fails_leaves_no_agent(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Agent] = []

    def refuse(agent: Agent, files: object) -> None:
        left.append(agent)
        raise BackendError("no room for files")

    tier = make(back_end="nixl")
    with monkeypatch.context() as patch:
        patch.setattr(Agent, "register_files", refuse)
        with pytest.raises(BackendError, match="no room for files"):
            tier.start()
    assert left[0]._agent is None
    tier.start()


# -- a disk that fails -------------------------------------------------------------------------------------


def fds_of(tier: Tier) -> list[int]:
    return tier.worker._segments.fds


def put_in_place(fd: int, path: str, flags: int) -> None:
    """Let a descriptor lead to something else, as if the disk under it had changed its nature."""
    other = os.open(path, flags)
    os.dup2(other, fd, inheritable=False)
    os.close(other)


@pytest.mark.slow
def test_no_room_is_said_with_the_numbers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    # A limit on the size of files, because a file system of one's own needs root; Python ignores its signal.
    code = (
        "import asyncio, resource, sys\n"
        "from asynckv.edges.files.tier import FileTier\n"
        "from tests.lab.plain_files import plain\n"
        "from asynckv.edges.host_pool import HostPool\n"
        "from asynckv.errors import BackendError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "async def main():\n"
        "    tier = FileTier(sys.argv[1], 64 << 20, open_io=plain)\n"
        "    try:\n"
        "        tier.start(HostPool(4096).memory, lambda: None)\n"
        "    except BackendError as exc:\n"
        "        print(exc)\n"
        "asyncio.run(main())\n"
    )
    done = python("-c", code, str(tmp_path / "x"))
    assert done.returncode == 0, done.stderr
    assert "has no room for 67108864 bytes: " in done.stdout
    assert "give the file tier fewer" in done.stdout
    assert not list((tmp_path / "x").glob("segment*"))


async def test_a_folder_that_cannot_be_written_is_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (Path("/proc/asynckv"), tmp_path / "file"):
        with pytest.raises(BackendError, match="name another directory"):
            make(folder=folder).start()


@pytest.mark.parametrize("back_end", ["plain", pytest.param("nixl", marks=[pytest.mark.nixl, pytest.mark.slow])])
async def test_segments_that_are_cut_short_under_it_lose_what_was_in_them(
    make: Make, tmp_path: Path, back_end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_worker, "BATCH_BYTES", SIZE)  # so that others are on their way
    tier, some = make(back_end=back_end, segment_bytes=4 * SIZE).started(), records(*range(COUNT))
    await tier.store(some)
    for number, size in ((7, SIZE), (9, 0), (10, 0)):
        os.truncate(tmp_path / "tier" / f"segment-{number:05}.kv", size)
    ended = await tier.load(some)
    assert {some[i].far // SIZE for i in ended.lost} == {29, 30, 31, *range(36, 44)}
    assert "reading failed" in ended.cause
    assert (tier.count("io_errors"), tier.count("is_off")) == (11, 0)
    assert (await tier.store(some)).ending is DONE
    assert (await tier.load(some)).ending is DONE


@both
async def test_a_disk_that_is_full_or_read_only_takes_no_more_writes_and_is_read_on(make: Make, back_end: str) -> None:
    tier, old, new = make(back_end=back_end, segment_bytes=RANGE, direct=False).started(), records(1, 2), records(3, 4)
    await tier.store(old)
    (fd,) = fds_of(tier)
    kept = os.dup(fd)
    put_in_place(fd, "/dev/full", os.O_RDWR)
    ended = await tier.store(new)
    assert (ended.ending, ended.lost) == (Ending.FAILED, (0, 1))
    (off,) = await tier.heard()
    assert isinstance(off, RecordsLost)
    assert (off.reads, "No space left" in off.cause) == (False, True)
    os.dup2(kept, fd, inheritable=False)
    os.close(kept)
    ended = await tier.store(new)
    assert (ended.ending, ended.cause) == (Ending.FAILED, off.cause)
    assert (await tier.load(old)).ending is DONE
    assert (tier.count("is_read_only"), tier.count("is_off")) == (1, 0)


@both
async def test_a_disk_that_only_fails_is_given_up_and_said_once(make: Make, back_end: str) -> None:
    tier, some = make(back_end=back_end, segment_bytes=RANGE).started(), records(*range(COUNT))
    await tier.store(some)
    put_in_place(fds_of(tier)[0], "/proc/self/mem", os.O_RDONLY)  # answers EIO to whatever is asked
    ended = await tier.load(some)
    assert ended.ending is Ending.FAILED
    (off,) = await tier.heard()
    assert isinstance(off, RecordsLost)
    assert (off.reads, "reading failed for 8 records in a row" in off.cause) == (True, True)
    for op in (READ, WRITE):
        tier.post(op, some)
    assert await tier.heard(2) == [RecordsEnded(TransferId(n), Ending.FAILED, off.cause) for n in (3, 4)]
    assert tier.news == []


def break_segments(tier: Tier, numbers: Iterable[int]) -> None:
    """Have the system refuse whatever is asked of some files."""
    for number in numbers:
        put_in_place(fds_of(tier)[number], "/proc/self/mem", os.O_RDONLY)


@both
async def test_failures_among_records_that_do_not_fail_are_not_in_a_row(make: Make, back_end: str) -> None:
    tier, some = make(back_end=back_end, segment_bytes=SIZE).started(), records(*range(COUNT))
    await tier.store(some)
    broken = {2 * COUNT - 1 - i for i in range(0, COUNT, 2)}
    break_segments(tier, broken)
    for ended in (await tier.store(some), await tier.load(some)):
        assert set(ended.lost) == set(range(0, COUNT, 2))
    assert (tier.count("is_read_only"), tier.count("is_off"), tier.news) == (0, 0, [])


@both
async def test_few_bad_places_that_are_tried_again_and_again_end_nothing(make: Make, back_end: str) -> None:
    tier, some = make(back_end=back_end, segment_bytes=SIZE).started(), records(*range(3))
    break_segments(tier, range(2 * COUNT - 3, 2 * COUNT))
    for _ in range(4):
        assert (await tier.store(some)).lost == (0, 1, 2)
    assert (tier.count("io_errors"), tier.count("is_read_only"), tier.news) == (12, 0, [])


@both
async def test_a_disk_that_takes_no_writes_is_read_on(make: Make, back_end: str) -> None:
    tier, some = make(back_end=back_end, segment_bytes=SIZE), records(*range(COUNT))
    old, new = some[: COUNT // 2], some[COUNT // 2 :]
    tier.start()
    await tier.store(old)
    break_segments(tier, range(COUNT, 2 * COUNT - len(old)))
    ended = await tier.store(new)
    assert ended.lost == tuple(range(len(new)))
    (off,) = await tier.heard()
    assert isinstance(off, RecordsLost)
    assert (off.reads, "writing failed for 8 records in a row" in off.cause) == (False, True)
    assert (await tier.load(old)).ending is DONE
    ended = await tier.store(new)
    assert (ended.ending, ended.cause) == (Ending.FAILED, off.cause)


async def test_an_index_that_cannot_be_written_ends_the_writes(make: Make) -> None:
    tier = make().started()
    tier.refuse_index()
    assert (await tier.store(records(1))).ending is DONE
    (off,) = await tier.heard()
    assert isinstance(off, RecordsLost)
    assert (off.reads, "index" in off.cause) == (False, True)
    assert (await tier.load(records(1))).ending is DONE  # it is known to this process


async def test_a_place_is_forgotten_before_it_is_written_over_or_it_is_not_written(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index is sound whenever a process is killed."""
    folder, tier = tmp_path / "tier", make()
    await tier.put(records(*range(COUNT)))
    tier.start()
    seen: list[int] = []
    submit = PlainFiles.submit

    def watch(self: PlainFiles, number: int, extents: Sequence[Extent], is_write: bool) -> None:
        seen.append(len(read_index(folder).entries))
        submit(self, number, extents, is_write)

    monkeypatch.setattr(PlainFiles, "submit", watch)
    tier.plane.forget([records(9)[0].far])
    assert (await tier.store(records(4, 5, word="new"))).ending is DONE
    assert seen == [COUNT - 3]
    tier.refuse_index()
    assert (await tier.store(records(6, word="new"))).ending is Ending.FAILED
    assert len(seen) == 1
    assert (await tier.load(records(7))).ending is DONE
    tier.plane.close()
    assert unsound(folder) == []


@pytest.mark.parametrize("what", ["", "segment-00003.kv", INDEX])
async def test_files_that_are_removed_under_it_take_no_more_and_it_is_said(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(file_worker, "LOOK_S", 0.05)
    tier = make().started()
    assert (await tier.store(records(1))).ending is DONE
    if what:
        (tmp_path / "tier" / what).unlink()
    else:
        shutil.rmtree(tmp_path / "tier")
    tier.post(WRITE, records(2))
    (off,) = [news for news in await tier.heard(2) if isinstance(news, RecordsLost)]
    assert off.reads is False
    assert f"was removed from {tmp_path / 'tier'} while it was in use" in off.cause
    assert (await tier.load(records(1))).ending is DONE
    assert (await tier.store(records(3))).ending is Ending.FAILED


class Stuck(PlainFiles):
    """A disk that answers when it is let."""

    entered, leave = threading.Event(), threading.Event()
    where = "submit"

    def _wait(self, where: str) -> None:
        if where == self.where:
            self.entered.set()
            assert self.leave.wait(PATIENCE_S)

    def submit(self, number: int, extents: Sequence[Extent], is_write: bool) -> None:
        self._wait("submit")
        super().submit(number, extents, is_write)

    def close(self) -> None:
        self._wait("close")


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Stuck]]:
    monkeypatch.setattr(Stuck, "entered", threading.Event())
    monkeypatch.setattr(Stuck, "leave", threading.Event())
    monkeypatch.setattr(plain_files, "PlainFiles", Stuck)
    yield Stuck
    Stuck.leave.set()


@pytest.mark.slow
async def test_a_disk_that_does_not_answer_makes_misses_within_a_bound(make: Make, stuck: type[Stuck]) -> None:
    tier, some = make(slow_s=0.2).started(), records(*range(COUNT))
    tier.post(READ, [])
    await tier.heard()
    tier.fill(some)
    began = anyio.current_time()
    tier.post(WRITE, some)
    tier.post(READ, some)
    heard = await tier.heard(3)
    assert anyio.current_time() - began < 2.0
    (off,) = (news for news in heard if isinstance(news, RecordsLost))
    assert (off.reads, "has not answered for 0.2 s" in off.cause) == (True, True)
    endings = {news.move_id: news.ending for news in heard if isinstance(news, RecordsEnded)}
    assert endings == {2: Ending.IN_DOUBT, 3: Ending.FAILED}
    tier.post(READ, some)
    assert await tier.heard() == [RecordsEnded(TransferId(4), Ending.FAILED, off.cause)]
    stuck.leave.set()
    assert await tier.heard() == [RecordsEnded(TransferId(2), Ending.FAILED, off.cause)]
    tier.plane.close()
    assert tier.start() == []


async def test_a_disk_that_is_always_busy_is_not_taken_for_one_that_does_not_answer(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for an answer counts anew from the end of each batch, though another one is in flight."""
    tier = make()
    tier.start()
    worker = cast(Any, tier.plane)._worker
    collect, landed, since = worker._io.collect, list[Any](), list[float]()

    def one_by_one() -> list[Any]:
        landed.extend(collect())
        if len(landed) < 2 and not since:
            return []
        since.append(worker._busy_since)
        return [landed.pop(0)]

    monkeypatch.setattr(worker._io, "collect", one_by_one)
    for number in (0, 1):
        tier.post(WRITE, records(number))
    assert [(await tier.ended()).ending for _ in range(2)] == [DONE] * 2
    assert since[0] < since[1]


@pytest.mark.parametrize("where", ["submit", "close"])
async def test_closing_under_a_disk_that_does_not_answer_says_so_and_may_be_tried_again(
    make: Make, stuck: type[Stuck], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(stuck, "where", where)
    monkeypatch.setattr(file_tier, "CLOSE_S", 0.01)
    tier = make().started()
    tier.post(WRITE, records(1))
    if where == "submit":
        assert stuck.entered.wait(PATIENCE_S)
    await tier.plane.quiesce()
    late = tier.post(READ, records(1))
    assert await tier.heard() == [RecordsEnded(late, Ending.FAILED, "closed")]
    with pytest.raises(BackendError, match="call close"):
        tier.plane.close()
    with pytest.raises(BackendError, match="belongs to process"):
        make().start()
    stuck.leave.set()
    monkeypatch.setattr(file_tier, "CLOSE_S", PATIENCE_S)
    tier.plane.close()
    make().start()


async def test_what_is_read_goes_before_what_is_written(make: Make, stuck: type[Stuck]) -> None:
    tier, some = make().started(), records(1, 2, 3)
    numbers = [tier.post(op, [record]) for op, record in zip((WRITE, WRITE, READ), some, strict=True)]
    stuck.leave.set()
    ended = [news.move_id for news in await tier.heard(3) if isinstance(news, RecordsEnded)]
    assert ended.index(numbers[2]) < ended.index(numbers[1])


async def test_a_read_that_waits_too_long_is_a_miss_and_a_write_waits_on(make: Make, stuck: type[Stuck]) -> None:
    tier = make().started()
    tier.fill(records(1, 2))
    tier.post(WRITE, records(1))
    assert stuck.entered.wait(PATIENCE_S)
    tier.post(WRITE, records(2))
    tier.post(READ, records(1))
    for move in tier.worker._moves.values():
        move.posted_at -= file_tier.SLOW_S
    tier.plane._look()  # type: ignore[attr-defined]
    stuck.leave.set()
    late = RecordsEnded(TransferId(3), Ending.FAILED, "it took more than 10 s")
    assert await tier.heard(3) == [late, *(RecordsEnded(TransferId(n), DONE) for n in (1, 2))]


async def test_a_thread_that_breaks_switches_the_tier_off(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*args: Any) -> None:
        raise RuntimeError("broken")

    tier = make(slow_s=0.05).started()
    monkeypatch.setattr(PlainFiles, "submit", breaks)
    tier.post(READ, [])
    await tier.heard()
    tier.fill(records(1))
    tier.post(WRITE, records(1))
    news = await tier.heard(2)
    assert "broken" in next(each for each in news if isinstance(each, RecordsLost)).cause
    assert {each.ending for each in news if isinstance(each, RecordsEnded)} == {Ending.IN_DOUBT}
    tier.plane.close()
    assert [each.ending for each in tier.plane.poll() if isinstance(each, RecordsEnded)] == [Ending.FAILED]


# -- anything, in any order --------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
async def test_what_is_served_is_what_a_dict_would_serve(
    make: Make, tmp_path: Path, back_end: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores, loads, restarts and damage, many at a time; a place is in one move at a time."""
    monkeypatch.setattr(file_worker, "BATCH_BYTES", 2 * SIZE)
    chance, tier = random.Random(seed), make(back_end=back_end)
    tier.start()
    kept: dict[int, bytes] = {}
    damaged: set[int] = set()
    count = 0
    for _ in range(20 if seed == 1 else 60):
        free = chance.sample(range(COUNT), COUNT)  # of places, and of room in memory
        wanted: dict[TransferId, list[Record]] = {}
        stored: set[TransferId] = set()
        tier.bytes[:] = 0
        while len(free) > 4:
            places, free = free[:4], free[4:]
            some = [Record(kept.get(far, b"none"), far * SIZE, far * SIZE, SIZE) for far in places]
            if is_store := chance.random() < 0.5:
                some = [record._replace(key=f"{seed}-{count + i}".encode()) for i, record in enumerate(some)]
                count += len(some)
                tier.fill(some)
            number = tier.post(WRITE if is_store else READ, some)
            wanted[number] = some
            stored |= {number} if is_store else set()
        while wanted:
            ended = await tier.ended()
            some = wanted.pop(ended.move_id)
            if ended.move_id in stored:
                assert ended.ending is DONE
                for record in some:
                    damaged.discard(record.far // SIZE)
                    kept[record.far // SIZE] = record.key
                continue
            assert ended.ending is DONE or ended.lost
            for i, record in enumerate(some):
                place = record.far // SIZE
                assert (i in ended.lost) == (place not in kept or place in damaged), ended
                if i in ended.lost:
                    kept.pop(place, None)
                    damaged.discard(place)
                else:
                    found = tier.bytes[record.near : record.near + SIZE]
                    assert np.array_equal(found, contents(record.key, SIZE))
        for place in chance.sample(sorted(kept), min(len(kept), 1)):
            at = chance.randrange(SIZE)
            overwrite(tmp_path / "tier", place * SIZE + at, bytes([contents(kept[place], SIZE)[at] ^ 0xFF]))
            damaged.add(place)
        if gone := chance.sample(sorted(kept), min(len(kept), 2)):
            tier.plane.forget([place * SIZE for place in gone])
            for place in gone:
                kept.pop(place)
                damaged.discard(place)
        if chance.random() < 0.2:
            await tier.plane.quiesce()
            tier.plane.close()
            assert {(s.far // SIZE, s.key) for s in tier.start()} == set(kept.items())


# -- processes that are killed -----------------------------------------------------------------------------


def killed(folder: Path, kills: int, back_end: str) -> dict[str, int]:
    """Let processes store until they are killed, and say what the next ones found."""
    done = python("-m", "tests.killed", str(folder), str(kills), back_end)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("back_end", "kills"), [("plain", 100), pytest.param("nixl", 3, marks=pytest.mark.nixl)])
def test_nothing_wrong_is_served_after_a_kill_at_any_instant(tmp_path: Path, back_end: str, kills: int) -> None:
    found = killed(tmp_path / "tier", kills, back_end)
    assert found["kills"] == kills
    assert found["wrong"] == found["along_wrong"] == found["damaged_by_a_kill"] == found["unsound"] == 0
    assert found["refused"] == len(range(1, kills + 1, EVERY))
    if kills >= 100:  # else it is a matter of luck
        assert found["served"] > kills
        assert found["along_served"] > 0
        assert found["killed_while_writing"] > kills / 2


def test_work_aside_that_ends_its_thread_is_an_error_of_its_caller() -> None:
    with pytest.raises(SystemExit):
        aside.Aside("ends").submit(sys.exit).result(10)


def test_an_agent_that_cannot_have_the_files_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Refusing:
        def __init__(self, *_: object) -> None: ...

        def register(self, memories: object) -> None: ...

        def register_files(self, fds: object) -> None:
            raise BackendError("no such file")

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(file_nixl, "Agent", Refusing)
    monkeypatch.setattr(file_nixl, "load_nixl", lambda: None)
    with pytest.raises(BackendError, match="no such file"):
        file_nixl.NixlFiles("a", Memory(0, 4096), {3: 4096})
    assert len(closed) == 1
