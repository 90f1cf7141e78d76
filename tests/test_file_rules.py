"""Rules of the file tier's parts, each by itself: its owner's lock, its segments, how bytes move, and its waking."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asynckv.core.events import Ending
from asynckv.core.types import TransferId
from asynckv.edges.files import tier as file_tier
from asynckv.edges.files.index import FileIndex, IndexRow
from asynckv.edges.files.io import ALIGN, Extent, FileTooShort, transfer
from asynckv.edges.files.store import OWNER, NoRoom, OwnerLock, Segments, check_room
from asynckv.edges.host_pool import HostPool
from asynckv.errors import BackendError
from asynckv.offload.catalogue import Catalogue
from asynckv.offload.keys import StoredGroup
from asynckv.ports import RecordsEnded
from tests.lab.offload_audit import audit, entries_of
from tests.lab.plain_files import PlainFiles
from tests.test_file_tier import COUNT, DONE, PAGE, READ, SIZE, WRITE, Make, make, records

__all__ = ["make"]
"""A fixture of theirs."""


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Segments]]:
    """Segments of four pages in one directory, closed in the end."""
    made: list[Segments] = []

    def open_some(pages: int = 12, **options: Any) -> Segments:
        made.append(Segments(tmp_path, pages * PAGE, 4 * PAGE, **{"direct": False} | options))
        return made[-1]

    yield open_some
    for each in made:
        each.close()


# -- the owner's lock --------------------------------------------------------------------------------------


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[Path] = []

    def flock(fd: int, how: int, lock: Callable[[int, int], None] = fcntl.flock) -> None:
        if not removed:  # between that it was opened and that it is locked
            removed.append(tmp_path / OWNER)
            removed[0].unlink()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = OwnerLock(tmp_path)
    assert (tmp_path / OWNER).exists()
    with pytest.raises(BackendError, match=f"belongs to process {os.getpid()}"):
        OwnerLock(tmp_path)
    lock.release()


def test_a_change_of_the_index_that_failed_changes_nothing_and_the_next_is_whole(tmp_path: Path) -> None:
    index, entry = FileIndex(tmp_path), IndexRow(ALIGN, ALIGN, b"key", 1, "layout", "tag", 1)
    nothing: Any = None  # which the index's table does not take
    wrong = entry._replace(far=0, stored_at=nothing)
    with pytest.raises(sqlite3.IntegrityError):
        index.change({ALIGN: entry, 0: wrong}, [])
    assert index.said().entries == []
    index.change({ALIGN: entry}, [])
    assert index.said().entries == [entry]
    index.close()


def test_an_owner_leaves_nothing_of_what_its_file_said_before(tmp_path: Path) -> None:
    (tmp_path / OWNER).write_text("x" * 4000)
    lock = OwnerLock(tmp_path)
    assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()
    lock.release()


def test_what_is_closed_twice_closes_no_file_of_others(tmp_path: Path, opened: Callable[..., Segments]) -> None:
    for close in (OwnerLock(tmp_path).release, opened().close):
        close()
        others = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]  # the same numbers again
        close()
        for fd in others:
            os.close(fd)


# -- segments ----------------------------------------------------------------------------------------------


def test_a_stretch_is_kept_only_if_all_of_it_was_there(tmp_path: Path, opened: Callable[..., Segments]) -> None:
    opened().close()
    os.truncate(tmp_path / "segment-00001.kv", 2 * PAGE)
    os.truncate(tmp_path / "segment-00002.kv", 0)
    segments = opened()
    # Until the end of what was there, over that end, beyond it, and over the start of a segment that is whole.
    stretches = [(5, 1), (5, 2), (6, 1), (3, 3), (3, 4), (0, 4), (7, 2)]
    assert [segments.has_kept(far * PAGE, n * PAGE) for far, n in stretches] == [1, 0, 0, 1, 0, 1, 0]
    assert not segments.has_kept(12 * PAGE, PAGE)
    assert segments.kept == [4 * PAGE, 2 * PAGE, 0]


def test_a_segment_that_was_longer_gives_its_rest_back_and_keeps_no_more(
    tmp_path: Path, opened: Callable[..., Segments]
) -> None:
    opened().close()
    segments = opened(6)
    assert segments.kept == segments.lengths == [4 * PAGE, 2 * PAGE]
    assert [path.stat().st_size for path in sorted(tmp_path.glob("segment-*"))] == [4 * PAGE, 2 * PAGE]
    assert not segments.has_kept(5 * PAGE, 2 * PAGE)


def test_a_segment_with_holes_takes_its_space_at_the_start(
    tmp_path: Path, opened: Callable[..., Segments], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a write finds the disk full, long after the start has said that there is room."""
    opened().close()
    (tmp_path / "segment-00001.kv").unlink()
    with (tmp_path / "segment-00001.kv").open("wb") as file:
        file.truncate(4 * PAGE)
    taken: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, start, length: taken.append((start, length)))
    opened()
    assert taken == [(0, 4 * PAGE)]


@pytest.mark.parametrize(("free", "more", "is_enough"), [(0, 0, True), (0, 1, False), (PAGE, PAGE, True)])
def test_what_the_segments_have_already_need_not_be_free(
    opened: Callable[..., Segments],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    more: int,
    is_enough: bool,
) -> None:
    (there := opened()).close()
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=1, f_bavail=free, f_frsize=1))
    if is_enough:
        check_room(tmp_path, sum(there.lengths) + more)
    else:
        with pytest.raises(NoRoom, match=f"{more} more are needed, and 0 are free"):
            check_room(tmp_path, sum(there.lengths) + more)


def test_a_start_that_finds_no_room_removes_only_what_it_made(
    tmp_path: Path, opened: Callable[..., Segments], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(8).close()

    def full(fd: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BackendError, match="has no room"):
        opened(12)
    assert sorted(path.name for path in tmp_path.glob("segment-*")) == ["segment-00000.kv", "segment-00001.kv"]


# -- how bytes move ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1000, PAGE])
def test_what_the_system_moves_in_pieces_lies_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    data = bytes(range(256)) * 32
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * PAGE))
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: write(fd, view[:step], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:step]], at))
    memory = bytearray(bytes(100) + data + bytes(100))
    fd = os.open(path, os.O_RDWR)
    try:
        transfer(memoryview(memory), Extent(100, fd, PAGE, len(data)), True)
        assert path.read_bytes() == bytes(PAGE) + data + bytes(PAGE)
        memory[:] = bytes(len(memory))
        transfer(memoryview(memory), Extent(100, fd, PAGE, len(data)), False)
        assert memory == bytes(100) + data + bytes(100)
        with pytest.raises(FileTooShort, match=f"cut short to {4 * PAGE} bytes, and {3 * PAGE + len(data)} are needed"):
            transfer(memoryview(memory), Extent(0, fd, 3 * PAGE, len(data)), False)
    finally:
        os.close(fd)


@pytest.mark.parametrize("is_write", [True, False])
def test_a_batch_of_which_one_extent_fails_has_failed(tmp_path: Path, is_write: bool) -> None:
    (tmp_path / "file").write_bytes(bytes(2 * PAGE))
    pool = HostPool(4 * PAGE)
    fd = os.open(tmp_path / "file", os.O_RDWR)
    try:
        io = PlainFiles(pool.memory)
        good, bad = Extent(0, fd, 0, PAGE), Extent(PAGE, -1, PAGE, PAGE)
        for number, extents in enumerate(([good, bad], [bad, good], [good])):
            io.submit(number, extents, is_write)
        assert io.collect() == [(0, False), (1, False), (2, True)]
        assert io.collect() == []
    finally:
        os.close(fd)
        pool.close()


# -- the tier's own ----------------------------------------------------------------------------------------


async def test_moves_under_way_have_one_timer_and_a_closed_tier_none(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[asyncio.TimerHandle] = []
    loop = asyncio.get_running_loop()
    later = loop.call_later

    def call_later(delay: float, call: Callable[..., object], *args: Any, **more: Any) -> asyncio.TimerHandle:
        timers.append(later(delay, call, *args, **more))
        return timers[-1]

    tier = make(slow_s=4000.0).started()
    monkeypatch.setattr(loop, "call_later", call_later)
    for some in (records(1), records(2), records(3)):
        tier.plane.post(TransferId(100 + some[0].far), WRITE, some)
    monkeypatch.undo()
    assert len(timers) == 1
    tier.plane.close()
    assert timers[0].cancelled()


async def test_a_look_at_what_takes_long_is_followed_by_the_next(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make(slow_s=4000.0).started()
    plane: Any = tier.plane
    tier.post(WRITE, records(1))
    first = plane._timer
    monkeypatch.setattr(plane._worker, "look", lambda: True)
    plane._look()
    assert plane._timer not in (None, first)
    first.cancel()
    monkeypatch.setattr(plane._worker, "look", lambda: False)
    plane._timer.cancel()
    plane._look()
    assert plane._timer is None


async def test_each_move_of_a_closed_tier_is_told_and_wakes_the_loop_anew(make: Make) -> None:
    tier = make().started()
    tier.plane.close()
    for number in (1, 2):
        assert tier.post(READ, records(1)) == number
        assert await tier.heard() == [RecordsEnded(TransferId(number), Ending.FAILED, "the file tier is closed")]


async def test_what_had_ended_when_the_tier_was_closed_is_told_after_it_and_not_after_the_next_start(
    make: Make,
) -> None:
    tier = make().started()
    await tier.store(records(*range(COUNT)))
    for again in (False, True):
        move = tier.post(WRITE, records(1))
        tier.plane.close()
        if again:
            tier.start()
        told: Sequence[Any] = [*tier.news, *tier.plane.poll()]
        tier.news.clear()
        assert [x.move_id for x in told if isinstance(x, RecordsEnded)] == ([] if again else [move])
        if not again:
            tier.start()
    assert (await tier.load(records(2))).ending is DONE


async def test_neighbours_are_not_taken_for_records_that_overlap(make: Make) -> None:
    tier = make().started()
    some = records(*range(COUNT))
    assert some[0].far - some[1].far == SIZE
    await tier.store(some)
    tier.plane.close()
    assert len(tier.start()) == COUNT
    assert tier.count("found_overlapping") == 0


async def test_a_close_after_one_that_was_bounded_waits_as_long_as_usual(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    tier = make()
    for bound in (0.0, None):
        tier.start()
        plane: Any = tier.plane
        join = plane._worker.join

        def wait(left: float, join: Callable[[float], None] = join) -> None:
            waits.append(left)
            join(10.0)

        monkeypatch.setattr(plane._worker, "join", wait)
        if bound is not None:
            await tier.plane.quiesce(bound)
        tier.plane.close()
    assert waits[0] == 0.0
    assert waits[1] == pytest.approx(file_tier.CLOSE_S, abs=1.0)


def test_a_group_that_has_most_of_a_prompt_does_not_bound_what_another_stores() -> None:
    groups = [StoredGroup(name=name, block_size=16, record_bytes=1024) for name in ("one", "other")]
    catalogue = Catalogue(groups, 16, 13 * 1024)
    hashes = [f"p{i}".encode() for i in range(8)]

    def carry_out() -> None:
        while moves := catalogue.moves(0.0):
            for move in moves:
                catalogue.ended(move.move_id, Ending.DONE)

    catalogue.store("a", hashes, positions=[range(1, 8), []])
    carry_out()
    catalogue.store("b", hashes, is_prefix=True)  # one block of the first group is new, and eight of the other
    carry_out()
    assert catalogue.lookup(hashes).ready_tokens == 5 * 16


def test_a_pinning_load_that_was_cancelled_keeps_nothing_of_what_lands_later() -> None:
    catalogue = Catalogue([StoredGroup(name="one", block_size=16, record_bytes=1024)], 16, 16 * 1024)
    hashes = [f"p{i}".encode() for i in range(4)]
    catalogue.store("a", hashes)
    for move in catalogue.moves(0.0):
        catalogue.ended(move.move_id, Ending.DONE)
    catalogue.load("b", hashes, is_pinning=True)
    moves = catalogue.moves(0.0)
    catalogue.cancel("b")
    for move in moves:
        catalogue.ended(move.move_id, Ending.DONE)
    assert (catalogue.jobs, catalogue.pins, audit(catalogue)) == ({}, {}, [])
    assert catalogue.evict() == (4, 0)
    assert not entries_of(catalogue.host)
