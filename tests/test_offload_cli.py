"""`asynckv offload`: what it says of a directory, what it finds wrong, and what it gives back."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from asynckv import cli
from asynckv.edges.file_index import INDEX
from asynckv.edges.file_store import OWNER, OwnerLock, owner_of
from tests.test_cli import complaint
from tests.test_file_tier import COUNT, RANGE, SEGMENT, SIZE, Tier, overwrite, records

Run = Callable[..., tuple[int, str]]


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
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit status and stdout of a command."""

    def run_it(*argv: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["asynckv", "offload", *map(str, argv)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, _ = capsys.readouterr()
        return int(caught.value.code or 0), out

    return run_it


def test_inspect_says_what_is_there_and_who_has_it(folder: Path, run: Run) -> None:
    lock = OwnerLock(folder)
    status, out = run("inspect", folder, "--json", "-")
    lock.release()
    found = json.loads(out)
    assert (status, found["blocks"], found["bytes_stored"]) == (0, COUNT, COUNT * SIZE)
    assert (found["is_live"], found["num_bytes"], found["segments"]) == (True, RANGE, -(-RANGE // SEGMENT))
    assert found["kinds"] == [{"tag": "group", "layout": "layout", "blocks": COUNT, "bytes": COUNT * SIZE}]
    status, out = run("inspect", folder)
    assert status == 0
    assert "(has ended)" in out
    assert f"{COUNT}, 288.0 KiB, stored 20" in out


def test_names_from_an_index_do_no_harm_on_a_terminal(folder: Path, run: Run) -> None:
    with closing(sqlite3.connect(folder / INDEX, isolation_level=None)) as db:
        db.execute("UPDATE kinds SET tag = ?, layout = ?", ("\x1b[2J[bold]", "\x07"))
        db.execute("INSERT INTO records VALUES (0, 4096, 'text', 0, 1, 0)")
        db.execute("UPDATE records SET stored_at = ?", (1 << 60,))
    (folder / OWNER).write_text('{"pid": 1, "host": "\\u001b[2J", "since": "2026\\u202e"}')
    assert owner_of(folder) == (None, False)
    status, out = run("inspect", folder)
    assert status == 0
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "1 rows of the index make no sense" in out
    assert "at no sensible time" in out


def test_verify_finds_what_is_not_sound_and_drops_it_when_told(folder: Path, run: Run) -> None:
    assert run("verify", folder)[0] == 0
    overwrite(folder, records(3)[0].far, b"!")
    (folder / "segment-00012.kv").unlink()
    gone = {r.key for r in records(*range(COUNT)) if r.far // SEGMENT == 12 or (r.far + SIZE - 1) // SEGMENT == 12}
    status, out = run("verify", folder, "--json", "-")
    found = json.loads(out)
    assert status == 1
    assert found["bad"] == {"its file is missing": len(gone), "its bytes are not what was stored": 1}
    assert (found["sound"], found["dropped"]) == (COUNT - 1 - len(gone), False)
    status, out = run("verify", folder, "--drop")
    assert status == 1
    assert "they were forgotten" in out
    status, out = run("verify", folder)
    assert status == 0
    assert f"{COUNT - 1 - len(gone)} of {COUNT - 1 - len(gone)} blocks are sound" in out


def test_a_record_that_an_index_makes_too_long_takes_no_memory(folder: Path, run: Run) -> None:
    with closing(sqlite3.connect(folder / INDEX, isolation_level=None)) as db:
        db.execute("UPDATE records SET size = ? WHERE far = (SELECT max(far) FROM records)", (1 << 60,))
    status, out = run("verify", folder, "--json", "-")
    assert (status, json.loads(out)["bad"]) == (1, {"the index says nothing sensible of it": 1})


def test_prune_forgets_what_was_named_and_removes_files_without_blocks(folder: Path, run: Run) -> None:
    some = [r.far for r in records(*range(10))]
    with closing(sqlite3.connect(folder / INDEX, isolation_level=None)) as db:
        db.executemany(
            "UPDATE records SET stored_at = ? WHERE far = ?", [(int(time.time()) - 7200, far) for far in some]
        )
    status, out = run("prune", folder, "--older-than", "1h", "--json", "-")
    assert (status, json.loads(out)["blocks"]) == (0, 10)
    kept = [r.far for r in records(*range(10, COUNT))]
    expected = {n for far in kept for n in range(far // SEGMENT, (far + SIZE - 1) // SEGMENT + 1)}
    assert {int(path.stem[-5:]) for path in folder.glob("segment-*")} == expected
    assert json.loads(run("verify", folder, "--json", "-")[1])["sound"] == COUNT - 10
    assert run("prune", folder, "--layout", "lay")[1].startswith(f"{COUNT - 10} of {COUNT - 10} blocks forgotten")
    assert run("prune", folder, "--all")[0] == 0
    assert not list(folder.glob("segment-*"))


def test_bad_input_is_said_in_a_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, says in (
        ("inspect /none", "is no directory"),
        ("verify /proc", "holds no stored blocks"),
        ("inspect ABOVE", "name one of those in it: tier"),
        ("prune DIR", "give one of"),
        ("prune DIR --all --older-than 1d", "give one of"),
        ("prune DIR --older-than 7", "is no age"),
        ("prune DIR --older-than nand", "is no age"),
        ("prune DIR --layout z", "there are layout"),
        ("inspect DIR --json /none/x", "cannot be written"),
    ):
        argv = [{"DIR": str(folder), "ABOVE": str(folder.parent)}.get(word, word) for word in words.split()]
        assert says in complaint(["offload", *argv], monkeypatch, capsys)


def test_who_has_a_directory_is_said_and_a_damaged_index_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = OwnerLock(folder)
    for words in (["verify", str(folder)], ["prune", str(folder), "--all"]):
        assert "belongs to process" in complaint(["offload", *words], monkeypatch, capsys)
    lock.release()
    (folder / INDEX).write_bytes(b"x" * 10_000)
    for words in (["inspect", str(folder)], ["verify", str(folder)]):
        assert "is damaged" in complaint(["offload", *words], monkeypatch, capsys)
    assert (folder / INDEX).read_bytes() == b"x" * 10_000
