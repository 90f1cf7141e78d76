"""What engines of another geometry leave in files: which of it a rank takes, and that they may be using it still."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asynckv.edges.file_index import INDEX, STORED_AT, FileIndex
from asynckv.edges.file_store import OwnerLock
from asynckv.edges.leftovers import left_in, rank_folder
from asynckv.geometry.layout import Layout, fingerprint
from asynckv.geometry.packed import record_form
from tests.offloads import layout_of


def keep(directory: Path, form: Layout, stored_at: int = 0) -> None:
    """Leave a directory."""
    folder = rank_folder(directory, form)
    folder.mkdir(exist_ok=True)
    index = FileIndex(folder)
    index.note(num_bytes=1 << 50, segment_bytes=1 << 20, **{STORED_AT: stored_at})
    (folder / "segment-00003.kv").write_bytes(bytes(4096))
    index.put_layout(fingerprint(form), msgspec.msgpack.encode(form))
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
    (rank_folder(tmp_path, four[3]) / "segment-00003.kv").unlink()  # as `prune` does with what is empty
    left_out: list[str] = []
    assert ranks(tmp_path, two[1], left_out) == []
    assert [cause for cause in left_out if "strange" not in cause] == []


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


@pytest.mark.parametrize("how", ["mode", "name"])
def test_it_takes_nothing_that_somebody_else_may_have_made_up(tmp_path: Path, how: str) -> None:
    (one,), (large,) = forms(1), forms(1, block_size=64)
    keep(tmp_path, large)
    folder = rank_folder(tmp_path, large)
    assert ranks(tmp_path, one) == [(0, 1)]
    if how == "mode":
        folder.chmod(0o777)
    else:
        os.rename(folder, tmp_path / f"\x1b[2J-{fingerprint(large)}")
    left_out: list[str] = []
    assert ranks(tmp_path, one, left_out) == []
    (cause,) = left_out
    assert str(tmp_path) in cause
    assert ("chmod o-w" if how == "mode" else "does not say what its records are") in cause


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


@pytest.mark.parametrize("lost", ["layout", "facts"])
def test_what_says_too_little_of_itself_is_left_out_and_said(tmp_path: Path, lost: str) -> None:
    (one,), (large,) = forms(1), forms(1, block_size=64)
    folder = rank_folder(tmp_path, large)
    folder.mkdir()
    index = FileIndex(folder)
    if lost != "facts":
        index.note(num_bytes=1 << 50, segment_bytes=1 << 20)
    index.put_layout(fingerprint(large), b"no layout" if lost == "layout" else msgspec.msgpack.encode(large))
    index.close()
    left_out: list[str] = []
    (folder / "segment-00000.kv").write_bytes(bytes(4096))
    assert ranks(tmp_path, one, left_out) == []
    (cause,) = left_out
    assert f"{folder} does not say what its records are" in cause
