"""`asynckv offload`: what it says of a directory, and what it gives back."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from asynckv.edges.files.index import INDEX
from asynckv.edges.files.store import OWNER, OwnerLock, owner_of
from tests.commands import Command
from tests.test_file_tier import COUNT, RANGE, SEGMENT, SIZE, Tier, records

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a tier that has ended."""

    async def store() -> None:
        tier = Tier(tmp_path / "tier", back_end="plain")
        tier.start()
        await tier.store(records(*range(COUNT)))
        tier.plane.close()
        tier.pool.close()

    asyncio.run(store())
    return tmp_path / "tier"


@pytest.fixture
def run(command: Command) -> Run:
    return partial(command.run, "offload")


def state(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All that is in a directory, and when it was written."""
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


def test_inspect_says_what_is_there_and_who_has_it(folder: Path, run: Run) -> None:
    lock = OwnerLock(folder)
    status, out, _ = run("inspect", folder, "--json", "-")
    lock.release()
    found = json.loads(out)
    assert (status, found["blocks"], found["bytes_stored"]) == (0, COUNT, COUNT * SIZE)
    assert (found["is_live"], found["num_bytes"], found["segments"]) == (True, RANGE, -(-RANGE // SEGMENT))
    assert found["kinds"] == [{"tag": "group", "layout": "layout", "blocks": COUNT, "bytes": COUNT * SIZE}]
    before = state(folder)
    status, out, _ = run("inspect", folder)
    assert (status, state(folder)) == (0, before)
    assert "(has ended)" in out
    assert f"{COUNT}, 288.0 KiB, stored 20" in out


def test_names_from_an_index_do_no_harm_on_a_terminal(folder: Path, run: Run) -> None:
    with closing(sqlite3.connect(folder / INDEX, isolation_level=None)) as db:
        db.execute("UPDATE kinds SET tag = ?, layout = ?", ("\x1b[2J[bold]", "\x07"))
        db.execute("INSERT INTO records VALUES (0, 4096, 'text', 0, 1, 0)")
        db.execute("UPDATE records SET stored_at = ?", (1 << 60,))
    (folder / OWNER).write_text('{"pid": 1, "host": "\\u001b[2J", "since": "2026\\u202e"}')
    assert owner_of(folder) == (None, False)
    status, out, _ = run("inspect", folder)
    assert status == 0
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "1 rows of the index make no sense" in out
    assert "at no sensible time" in out


def test_of_a_killed_owner_everything_stays_as_it_is_until_something_is_to_be_changed(folder: Path, run: Run) -> None:
    """Its newest blocks are in a log beside the index, which only a process that has the directory puts in order."""
    killed, far = folder.parent / "killed", records(3)[0].far
    with closing(sqlite3.connect(folder / INDEX, isolation_level=None)) as db:
        db.execute("DELETE FROM records WHERE far = ?", (far,))
        shutil.copytree(folder, killed)
    for name in (f"{INDEX}-shm", "none"):
        (killed / name).unlink(missing_ok=True)
        before = state(killed)
        assert f"{INDEX}-wal" in before
        status, out, _ = run("inspect", killed, "--json", "-")
        assert (status, json.loads(out)["blocks"], state(killed)) == (0, COUNT - 1, before)


def test_prune_leaves_what_is_not_its_own(folder: Path, run: Run) -> None:
    (folder / "mine").touch()
    assert "the directory stays, because it holds mine" in run("prune", folder, "--all")[1]
    assert [path.name for path in folder.iterdir()] == ["mine"]


@pytest.mark.parametrize("how", ["as it is", "no owner", "no index", "damaged"])
def test_prune_removes_a_directory_in_any_state(folder: Path, run: Run, how: str) -> None:
    if how == "damaged":
        spoil(folder)
    elif how != "as it is":
        (folder / (OWNER if how == "no owner" else INDEX)).unlink()
    status, out, _ = run("prune", folder, "--all", "--json", "-")
    assert (status, json.loads(out)["removed"], folder.exists()) == (0, True, False)


def spoil(folder: Path) -> None:
    """Damage a page of an index that nothing but a thorough look finds."""
    with (folder / INDEX).open("r+b") as file:
        file.seek(5 * 4096)
        file.write(bytes(reversed(range(256))) * 16)


def test_the_directory_above_stands_for_all_of_them_and_what_cannot_be_read_is_told(folder: Path, run: Run) -> None:
    above = folder.parent
    for name in ("tp0of2-a", "tp1of2-b"):
        shutil.copytree(folder, above / name)
    (above / "else").mkdir()
    shutil.rmtree(folder)
    status, out, _ = run("inspect", above)
    assert status == 0
    assert "tp0of2-a" in out
    assert f"2 directories, {2 * COUNT} blocks" in out
    (above / "tp1of2-b" / INDEX).unlink()
    status, out, err = run("inspect", above, "--json", "-")
    first, second = json.loads(out)
    assert (status, first["blocks"]) == (2, COUNT)
    assert "has no index" in second["error"]
    assert second["folder"] == str(above / "tp1of2-b")
    assert "tp1of2-b has no index" in err
    status, out, _ = run("prune", above, "--all")
    assert status == 0
    assert [path.name for path in above.iterdir()] == ["else"]


def test_bad_input_is_said_in_a_line(folder: Path, tmp_path: Path, command: Command) -> None:
    places = {"DIR": str(folder), "FILE": str(folder / INDEX), "NONE": str(tmp_path / "none")}
    for words, says in (
        ("inspect NONE", "is not a directory"),
        ("inspect /proc", "holds no stored blocks"),
        ("inspect FILE", "is not a directory"),
        ("prune DIR", "give --all"),
        ("inspect DIR --json NONE/x", "cannot be written"),
    ):
        argv = ["/".join(places.get(part, part) for part in word.split("/")) for word in words.split()]
        assert says in command.complaint("offload", *argv)


def test_who_has_a_directory_is_said_and_a_damaged_index_is_left(folder: Path, command: Command) -> None:
    lock = OwnerLock(folder)
    assert "belongs to process" in command.complaint("offload", "prune", folder, "--all")
    lock.release()
    for how in (spoil, lambda folder: (folder / INDEX).write_bytes(b"x" * 10_000)):
        how(folder)
        before = state(folder)
        said = command.complaint("offload", "inspect", folder)
        assert "is damaged" in said
        assert "\\n" not in said
        assert state(folder) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_told_to_be_the_one_it_belongs_to(folder: Path, command: Command) -> None:
    with TemporaryDirectory() as above:  # pytest's own are root's all the way up
        Path(above).chmod(0o755)
        shutil.copytree(folder, f"{above}/tp0of1-a")
        os.seteuid(4711)
        try:
            for name, *more in (["inspect"], ["prune", "--all"]):
                said = command.complaint("offload", name, f"{above}/tp0of1-a", *more)
                assert f"Permission denied: {above}/tp0of1-a belongs to user 0 (mode 700)" in said
                assert "this process is user 4711; run as its user" in said
                assert "name another directory" not in said
        finally:
            os.seteuid(0)
