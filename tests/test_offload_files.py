"""An engine that finds less in its files than it should: it says so once, with the numbers, and serves the rest."""

from __future__ import annotations

import dataclasses
import errno
import os
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from asynckv.edges.files.index import INDEX
from asynckv.edges.files.leftovers import rank_folder
from asynckv.edges.files.store import OWNER, segment_path
from asynckv.edges.files.tier import FileTier
from asynckv.geometry.packed import record_form
from asynckv.tiers.rank import _left_by_others
from tests.documented import Lines
from tests.engines import until
from tests.lab.plain_files import plain
from tests.lab.tiers import SimDisk
from tests.offloads import RECORD, SIZE, Rank, chain, layout_of

COUNT = 8


def rank_on(folder: Path, *, model: str = "toy") -> Rank:
    """A rank on simulated copies, and on files by system calls."""
    rank = Rank(layout_of(), disk=SimDisk(64 * RECORD), model=model)
    rank.offload._tiers.own.records = FileTier(folder, 64 * RECORD, open_io=plain, segment_bytes=2 * RECORD)
    return rank


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """Of a rank that has stored some blocks and ended."""
    async with (rank := rank_on(tmp_path / "tier")).engine, rank.offload as offload:
        await offload.store("a", [(0, list(range(COUNT)))], chain("p", COUNT))
        await until(lambda: offload.statistics().counters["blocks.write_back"] == COUNT)
    return tmp_path / "tier"


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("nothing", None),
        ("index", {"index_damaged": 1, "found": 0}),
        ("segment", {"missing": 2, "found": COUNT - 2}),
        ("length", {"unfit": 1, "found": COUNT}),
        ("model", None),
    ],
)
async def test_what_is_missing_at_the_start_is_told_once(
    folder: Path, logs: Lines, how: str, says: dict[str, int] | None
) -> None:
    with closing(sqlite3.connect(folder / INDEX, isolation_level=None)) as db:
        last = db.execute("SELECT max(far) FROM records").fetchone()[0]
        if how == "length":
            db.execute("UPDATE records SET size = size + 4096 WHERE far = ?", (last,))
    if how == "index":
        (folder / INDEX).write_bytes(b"x" * 10_000)
    elif how == "segment":
        segment_path(folder, last // (2 * RECORD)).unlink()
    rank = rank_on(folder, model="other" if how == "model" else "toy")
    async with rank.engine, rank.offload:
        pass
    if says is None:
        assert logs.of("offload_files_damaged") == []
    else:
        line = logs.one("offload_files_damaged")
        assert line["level"] == "warning"
        assert line["folder"] == str(folder)
        numbers = {name: line[name] for name in ("index_damaged", "missing", "malformed", "overlapping", "unfit")}
        assert {name: count for name, count in numbers.items() if count} | {"found": line["found"]} == says


async def test_a_rollback_finds_what_the_model_had_stored(folder: Path) -> None:
    def in_files(rank: Rank) -> int:
        return rank.offload.lookup(chain("p", COUNT)).groups[0].in_file

    async with (rank := rank_on(folder, model="next")).engine, rank.offload as offload:
        assert in_files(rank) == 0
        await offload.store("a", [(0, [0, 1])], chain("p", 2))  # the same prompt: another model's blocks
        await until(lambda: offload.statistics().counters["blocks.write_back"] == 2)
    async with (rank := rank_on(folder)).engine, rank.offload as offload:
        assert in_files(rank) == COUNT
        loaded = await offload.load("b", [(0, list(range(COUNT)))], chain("p", COUNT), num_tokens=COUNT * SIZE)
        assert loaded.num_tokens == COUNT * SIZE
    async with (rank := rank_on(folder, model="next")).engine, rank.offload:
        assert in_files(rank) == 2


@pytest.mark.parametrize("how", ["full", "quota", "owner"])
async def test_files_on_a_disk_that_others_have_filled_are_read_on(
    folder: Path, logs: Lines, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != OWNER}

    def refuse(*given: object) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    segment_path(folder, 31).unlink()  # nothing was stored there
    with monkeypatch.context() as patch:
        if how == "quota":
            patch.setattr(os, "posix_fallocate", refuse)
        else:
            free, found = 1000, os.statvfs(folder)
            full = SimpleNamespace(f_bavail=free, f_frsize=1, f_blocks=found.f_blocks)
            patch.setattr(os, "statvfs", lambda _: full)
        if how == "owner":
            patch.setattr(os, "pwrite", refuse)
        before = state()
        async with (rank := rank_on(folder)).engine, rank.offload as offload:
            loaded = await offload.load("a", [(0, list(range(COUNT)))], chain("p", COUNT), num_tokens=COUNT * SIZE)
            assert loaded.num_tokens == COUNT * SIZE
            assert (await offload.store("b", [(0, [8, 9])], chain("q", 2))).num_missed == 0  # in host memory
            said = offload.statistics()
            assert (said.gauges["reads.file"], said.gauges["writes.file"]) == (1, 0)
            assert said.counters["not_written_back.files_lost"] == 2
            cause = offload.describe()["files_off"]
    line = logs.one("offload_files_lost")
    assert (line["level"], line["cause"], line["reads"]) == ("warning", cause, 0)
    assert cause.startswith(f"{folder} has no room for {64 * RECORD} bytes: ")
    assert "free some" in cause
    if how != "quota":
        wanted = int(cause.partition("bytes: ")[2].partition(" ")[0])
        assert wanted > free
        assert "1000 are free" in cause
    assert state() == before
    async with (rank := rank_on(folder)).engine, rank.offload as offload:
        await offload.store("c", [(0, [8, 9])], chain("q", 2))
        await until(lambda: offload.statistics().counters["blocks.write_back"] == 2)
        assert offload.lookup(chain("p", COUNT)).tokens == COUNT * SIZE


async def test_a_block_that_is_not_what_was_stored_is_named(folder: Path, logs: Lines) -> None:
    with closing(sqlite3.connect(folder / INDEX, isolation_level=None)) as db:
        far, key = db.execute("SELECT far, key FROM records LIMIT 1").fetchone()
    path, offset = segment_path(folder, far // (2 * RECORD)), far % (2 * RECORD)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"!!")
    async with (rank := rank_on(folder)).engine, rank.offload as offload:
        await offload.load("b", [(0, list(range(COUNT)))], chain("p", COUNT), num_tokens=COUNT * SIZE)
    detail = logs.one("offload_failed")["detail"]
    name = rank.layout.groups[0].name
    cause = "its bytes are not what was stored"
    assert f"group {name!r}, hash {key[16:24].hex()}..., at {offset} of {path}: {cause}" in detail


async def test_files_of_another_geometry_that_cannot_be_read_are_told(tmp_path: Path, logs: Lines) -> None:
    other = rank_folder(tmp_path, record_form(layout_of(block_size=2 * SIZE)))
    other.mkdir()
    (other / INDEX).write_bytes(b"x" * 10_000)
    rank = rank_on(tmp_path / "own")
    tiers = rank.offload._tiers
    tiers.config = dataclasses.replace(tiers.config, directory=str(tmp_path))
    tiers._leftovers = partial(_left_by_others, tiers._left_out)
    async with rank.engine, rank.offload:
        pass
    line = logs.one("offload_left_out")
    assert line["level"] == "warning"
    assert f"the index of {other} is damaged" in line["cause"]
