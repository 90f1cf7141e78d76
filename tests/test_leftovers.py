"""What engines of another geometry leave in files: which of it a rank takes, and that they may be using it still."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asynckv.config import OffloadConfig
from asynckv.edges.files.index import INDEX, STORED_AT, DamagedIndex, FileIndex, IndexRow, read_index
from asynckv.edges.files.io import ALIGN
from asynckv.edges.files.leftovers import left_in, rank_folder
from asynckv.edges.files.store import OwnerLock
from asynckv.geometry.layout import Layout, fingerprint
from asynckv.geometry.packed import record_form
from asynckv.tiers.rank import MAX_THROUGH_BYTES, _left_by_others
from asynckv.tiers.shelf import Shelf
from tests.offloads import layout_of


def keep(directory: Path, form: Layout, stored_at: int = 0) -> None:
    """Leave a directory."""
    folder = rank_folder(directory, form)
    folder.mkdir(exist_ok=True)
    index = FileIndex(folder)
    layouts = {fingerprint(form): msgspec.msgpack.encode(form)}
    index.prepare([], layouts, num_bytes=1 << 50, segment_bytes=1 << 20, **{STORED_AT: stored_at})
    (folder / "segment-00003.kv").write_bytes(bytes(4096))
    index.close()


def forms(size: int, **more: Any) -> list[Layout]:
    return [record_form(layout_of(rank, size, **more)) for rank in range(size)]


def ranks(directory: Path, own: Layout, left_out: list[str] | None = None) -> list[tuple[int, int]]:
    found = left_in(directory, own, left_out if left_out is not None else [])
    return sorted((left.form.tp_rank, left.form.tp_size) for left in found)


def test_a_rank_takes_what_it_needs_of_another_engine_and_never_what_its_siblings_are_to_open(tmp_path: Path) -> None:
    four, two = forms(4), forms(2)
    for form in (*four[:3], *two):
        keep(tmp_path, form)
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / INDEX).write_bytes(b"no index")
    assert ranks(tmp_path, four[0]) == ranks(tmp_path, four[1]) == [(0, 2)]  # both
    assert ranks(tmp_path, two[1]) == []  # one of four is missing
    keep(tmp_path, four[3])
    assert ranks(tmp_path, two[1]) == [(2, 4), (3, 4)]
    assert ranks(tmp_path / "nothing", two[0]) == []
    assert {left.num_bytes for left in left_in(tmp_path, two[1], [])} == {(3 << 20) + 4096}  # of files that are there


def test_it_takes_those_of_the_engine_that_stored_last_and_has_left_all(tmp_path: Path) -> None:
    four, two, (one,) = forms(4), forms(2), forms(1)
    for form in (*four, *two):
        keep(tmp_path, form, stored_at=5)
    keep(tmp_path, four[0], stored_at=7)
    turned = forms(2, order=("kv", "block", "head", "token", "dim"))[1]
    assert ranks(tmp_path, one) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    keep(tmp_path, two[1], stored_at=9)
    assert ranks(tmp_path, one) == [(0, 2), (1, 2)]
    assert [left.form for left in left_in(tmp_path, turned, [])] == [two[1]]  # its own, in another order
    for form in forms(2, order=("kv", "block", "head", "token", "dim")):  # of two orders of one size, the last one
        keep(tmp_path, form, stored_at=11)
    assert {left.form for left in left_in(tmp_path, one, [])}.isdisjoint(two)
    for form in forms(2, order=("kv", "block", "head", "token", "dim")):
        (rank_folder(tmp_path, form) / INDEX).unlink()
    (rank_folder(tmp_path, two[0]) / INDEX).unlink()
    assert ranks(tmp_path, one) == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_ranks_that_share_tokens_are_another_engine_than_ranks_with_all_tokens(tmp_path: Path) -> None:
    plain, sharing = forms(2, num_heads=1), forms(2, num_heads=1, shards=2)
    for form in plain:
        keep(tmp_path, form, stored_at=5)
    assert ranks(tmp_path, sharing[1]) == [(1, 2)]  # its own part of the tokens is in either
    (by_two,) = forms(2, num_heads=1, shards=2, interleave=2)[:1]
    for form in sharing:
        keep(tmp_path, form, stored_at=7)
    assert ranks(tmp_path, plain[0]) == ranks(tmp_path, by_two) == [(0, 2), (1, 2)]


@pytest.mark.parametrize("how", ["mode", "group", "name"])
def test_it_takes_nothing_that_somebody_else_may_have_made_up(tmp_path: Path, how: str) -> None:
    (one,), (large,) = forms(1), forms(1, block_size=64)
    keep(tmp_path, large)
    folder = rank_folder(tmp_path, large)
    assert ranks(tmp_path, one) == [(0, 1)]
    if how == "mode":
        folder.chmod(0o777)
    elif how == "group":
        folder.chmod(0o770)
    else:
        os.rename(folder, tmp_path / f"\x1b[2J-{fingerprint(large)}")
    left_out: list[str] = []
    assert ranks(tmp_path, one, left_out) == []
    (cause,) = left_out
    assert {"mode": "chmod o-w", "group": "chmod g-w", "name": "does not say what its records are"}[how] in cause
    assert (str(folder) in cause) == (how != "name")


def test_what_cannot_be_read_is_said_unless_somebody_has_it(tmp_path: Path) -> None:
    (one,), (large,) = forms(1), forms(1, block_size=64)
    keep(tmp_path, large)
    folder = rank_folder(tmp_path, large)
    (folder / INDEX).write_bytes(b"x" * 10_000)
    lock, left_out = OwnerLock(folder), list[str]()
    assert ranks(tmp_path, one, left_out) == []
    assert left_out == []  # it may be starting
    lock.release()
    assert ranks(tmp_path, one, left_out) == []
    (cause,) = left_out
    assert f"the index of {folder} is damaged" in cause


def spoil(folder: Path, script: str) -> None:
    with closing(sqlite3.connect(folder / INDEX)) as db:
        db.executescript(script)


ENDLESS = """
    ALTER TABLE layouts RENAME TO layouts2;
    CREATE VIEW layouts AS WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c)
    SELECT 'a' AS fingerprint, 1 AS body FROM c;
"""
TRIGGER = "CREATE TRIGGER forged AFTER DELETE ON records BEGIN DELETE FROM meta; END"
SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "a view without end": (lambda folder: spoil(folder, ENDLESS), "its tables are not those of an index"),
    "a trigger": (lambda folder: spoil(folder, TRIGGER), "its tables are not those of an index"),
    "another column": (lambda folder: spoil(folder, "ALTER TABLE meta ADD more"), "its tables are not those"),
    "a layout of no sense": (lambda folder: spoil(folder, "UPDATE layouts SET body = x'00'"), "makes no sense"),
    "no layout": (lambda folder: spoil(folder, "DELETE FROM layouts"), "does not say what its records are"),
    "no numbers": (lambda folder: spoil(folder, "DELETE FROM meta"), "'segment_bytes'"),
    "no files": (lambda folder: (folder / "segment-00003.kv").unlink(), "has no files of blocks any more"),
    "a strange file": (lambda folder: (folder / "segment-x.kv").touch(), "makes no sense"),
    "a pipe": (lambda folder: os.mkfifo(folder / f"{INDEX}-wal"), "is a named pipe"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_one_rank_that_cannot_be_used_is_named_with_its_cause(tmp_path: Path, how: str) -> None:
    two, (one,) = forms(2), forms(1)
    for form in two:
        keep(tmp_path, form)
    folder = rank_folder(tmp_path, two[1])
    change, cause = SPOILT[how]
    change(folder)
    left_out: list[str] = []
    assert ranks(tmp_path, one, left_out) == []
    (told,) = left_out
    assert cause in told.replace("num_bytes", "segment_bytes")
    assert str(folder) in told


def test_an_index_whose_pages_lead_back_to_themselves_is_damaged(tmp_path: Path) -> None:
    index = FileIndex(tmp_path)
    index.change({at: IndexRow(at * ALIGN, ALIGN, b"key", 0, "form", "tag", 0) for at in range(20_000)}, [])
    index.close()
    assert len(read_index(tmp_path).entries) == 20_000
    # All that the root of the records' tree says is to be found below is one page now, over and over again.
    path = tmp_path / INDEX
    with closing(sqlite3.connect(path)) as db:
        (root,) = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'records'").fetchone()
        (page,) = db.execute("PRAGMA page_size").fetchone()
        db.execute("PRAGMA journal_mode = DELETE")
    data = bytearray(path.read_bytes())
    at = (root - 1) * page
    cells = int.from_bytes(data[at + 3 : at + 5])
    assert data[at] == 5  # an inner page
    first = at + int.from_bytes(data[at + 12 : at + 14])
    leaf = data[first : first + 4]
    for cell in range(cells):
        begin = at + int.from_bytes(data[at + 12 + 2 * cell : at + 14 + 2 * cell])
        data[begin : begin + 4] = root.to_bytes(4)
    data[at + 8 : at + 12] = leaf
    path.write_bytes(data)
    with pytest.raises(DamagedIndex, match="is damaged"):
        read_index(tmp_path)


@pytest.mark.parametrize(("size", "is_taken"), [(20 << 20, True), (40 << 20, False)])
def test_what_needs_too_much_memory_to_pass_through_is_left_out_with_the_numbers(
    tmp_path: Path, size: int, is_taken: bool
) -> None:
    head_dim = 8 * size // record_form(layout_of(block_size=64)).memories[0].length
    (large,), (one,) = forms(1, block_size=64, head_dim=head_dim), forms(1, head_dim=head_dim)
    keep(tmp_path, large)
    os.truncate(rank_folder(tmp_path, large) / "segment-00003.kv", size)
    config = OffloadConfig(model="toy", hash_tokens=16, host_bytes=size, directory=str(tmp_path), file_bytes=1 << 20)
    left_out: list[str] = []
    shelves = _left_by_others(left_out, config, Shelf("host", one, config, host_bytes=size, file_bytes=0), "name")
    assert [shelf.form for shelf in shelves] == [large][: int(is_taken)]
    if not is_taken:
        (cause,) = left_out
        for number in (size, 16 * size, MAX_THROUGH_BYTES):
            assert str(number) in cause
