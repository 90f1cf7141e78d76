"""Processes that store records in file tiers until they are killed, and check what those before them have left.

A record's bytes are a function of its key. Each process reads all that it finds, says how much of it was served, lost
or wrong, and then forgets and writes over random places under new keys, as fast as it can, until it is killed at a
random moment. Meanwhile another process reads along, and between two lives the index is damaged, or files of two
directories are exchanged.

With system calls each is forked from this one, which has imported everything; with NIXL each is a process of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from asynckv.core.events import Ending
from asynckv.core.types import TransferId
from asynckv.edges.files.index import IndexRow, checksum, read_index
from asynckv.edges.files.store import segment_extents, segment_path
from asynckv.edges.files.tier import FileTier
from asynckv.edges.host_pool import HostPool
from asynckv.errors import BackendError
from asynckv.ports import CopyOp, Record, RecordsEnded
from asynckv.tools.offload.folder import prune_folder
from tests.lab.plain_files import plain

PLACES, SIZE, AT_ONCE = 64, 16 * 4096, 8
EVERY = 3
"""One life in this many has a process that reads along."""

MOST_S = 0.05
"""Until a kill, from when the first record was stored."""

BackEnd = Literal["plain", "nixl"]


def contents(key: bytes, size: int = SIZE) -> npt.NDArray[np.uint8]:
    seed = np.uint64(checksum(key, b"") & 0xFFFFFFFFFFFFFFFF)
    return (np.arange(size // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ seed).view(np.uint8)


class Life:
    """A tier, and what is heard of it."""

    def __init__(self, folder: Path, back_end: BackEnd, name: str, *, read_only: bool = False) -> None:
        self.pool = HostPool(PLACES * SIZE)
        assert self.pool.array is not None
        self.places = self.pool.array.reshape(PLACES, SIZE)
        io = plain if back_end == "plain" else None
        self.tier = FileTier(folder, PLACES * SIZE, open_io=io, segment_bytes=10 * SIZE, name=name, read_only=read_only)
        self._ended: dict[int, RecordsEnded] = {}
        self._event, self._ids = asyncio.Event(), itertools.count(1)

    def _ready(self) -> None:
        for each in self.tier.poll():
            assert isinstance(each, RecordsEnded), each
            self._ended[each.move_id] = each
        self._event.set()

    async def move(self, op: CopyOp, *moves: list[Record]) -> list[RecordsEnded]:
        """Carry out some moves at once."""
        ids = [TransferId(next(self._ids)) for _ in moves]
        for move_id, records in zip(ids, moves, strict=True):
            self.tier.post(move_id, op, records)
        while not all(move_id in self._ended for move_id in ids):
            self._event.clear()
            await self._event.wait()
        return [self._ended.pop(move_id) for move_id in ids]

    async def check(self, between: Callable[[], None] = lambda: None) -> dict[str, int]:
        """Start, read all that is there, and say what became of it."""
        found = [
            Record(s.key, i * SIZE, s.far, s.size) for i, s in enumerate(self.tier.start(self.pool.memory, self._ready))
        ]
        between()
        (ended,) = await self.move(CopyOp.READ, found)
        assert ended.ending is Ending.DONE or ended.lost, ended
        wrong = [
            record.key.decode()
            for i, record in enumerate(found)
            if i not in ended.lost and not np.array_equal(self.places[i], contents(record.key))
        ]
        return {"served": len(found) - len(ended.lost), "lost": len(ended.lost), "wrong": len(wrong), **self.tier.found}


async def live(folder: Path, back_end: BackEnd, out: int, number: int) -> None:
    """Check what is there, say so, and store for ever."""
    life = Life(folder, back_end, f"killed-{number}")
    os.write(out, json.dumps(await life.check()).encode() + b"\n")
    chance, count = random.Random(number), 0
    while True:
        records = []
        for near, far in enumerate(chance.sample(range(PLACES), 2 * AT_ONCE)):
            key = f"{number}-{count}".encode()
            count += 1
            life.places[near] = contents(key)
            records.append(Record(key, near * SIZE, far * SIZE, SIZE, "layout", "group"))
        life.tier.forget(record.far for record in records[::2])
        ended = await life.move(CopyOp.WRITE, records[:AT_ONCE], records[AT_ONCE:])
        assert all(each.ending is Ending.DONE for each in ended), ended
        os.write(out, b"+")


async def read_along(folder: Path) -> dict[str, int]:
    """Read what is there beside the process that stores, which writes over it between the start and the reads."""
    life = Life(folder, "plain", "along", read_only=True)
    try:
        # Nothing is waited for: others are to have time.
        return await life.check(lambda: time.sleep(0.002))
    finally:
        life.tier.close()
        life.pool.close()


def unsound(folder: Path) -> list[IndexRow]:
    """Name the blocks of an index that are not what was stored, and have not been given up since they were read."""
    said, found = read_index(folder), []
    for entry in said.entries:
        data = b""
        for number, extent in segment_extents(entry.far, entry.size, said.facts["segment_bytes"]):
            with segment_path(folder, number).open("rb") as file:
                file.seek(extent.offset)
                data += file.read(extent.size)
        if checksum(entry.key, data) != entry.checksum:
            found.append(entry)
    still = read_index(folder).entries if found else ()
    return [entry for entry in found if entry in still]


def meddle(folder: Path, other: Path, chance: random.Random) -> str:
    """Do something to what is left, and say what."""
    match what := chance.choice(("nothing", "nothing", "cut", "scribble", "exchange")):
        case "cut" | "scribble":
            path = chance.choice(sorted(folder.glob("index.sqlite*")))
            at = chance.randrange(path.stat().st_size + 1)
            if what == "cut":
                os.truncate(path, at)
            else:
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(chance.randbytes(64))
        case "exchange":
            names = [path.name for path in folder.glob("segment-*") if (other / path.name).exists()]
            for name in chance.sample(names, min(2, len(names))):
                (folder / name).rename(folder / "aside")
                (other / name).rename(folder / name)
                (folder / "aside").rename(other / name)
        case "nothing":
            pass
    return what


def begin(folder: Path, back_end: BackEnd, number: int) -> tuple[int, int]:
    """Start one; its process id, and where it says what it finds."""
    heard, said = os.pipe()
    if back_end == "nixl":
        command = [sys.executable, "-m", "tests.killed", "live", str(folder), str(said), str(number)]
        process = subprocess.Popen(command, pass_fds=[said])
        process.returncode = 0  # it is waited for by its id
        child = process.pid
    elif not (child := os.fork()):
        os.close(heard)
        asyncio.run(live(folder, back_end, said, number))
    os.close(said)
    return child, heard


def main(root: Path, kills: int, back_end: BackEnd) -> Counter[str]:
    """Kill so many, and add up what they said."""
    total: Counter[str] = Counter()
    chance = random.Random(kills)
    folders = [root / "a", root / "b"]
    spoiled: set[Path] = set()
    """Directories with a damaged index."""
    for number in range(kills + 1):
        folder, other = chance.sample(folders, 2)
        child, heard = begin(folder, back_end, number)
        text = b""
        try:
            while b"\n+" not in text:
                part = os.read(heard, 4096)
                if not part:
                    raise SystemExit(f"process {number} ended by itself after {text!r}")
                text += part
            if number % EVERY == 1:
                found = asyncio.run(read_along(folder))
                total.update({f"along_{name}": found[name] for name in ("served", "lost", "wrong")})
                total["unsound"] += len(unsound(folder))
                try:
                    prune_folder(folder)
                except BackendError as exc:
                    total["refused"] += f"belongs to process {child}" in str(exc)
            if number < kills:
                # Nothing is waited for: the moment of the kill is what is chosen.
                select.select([], [], [], chance.uniform(0, MOST_S))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        while part := os.read(heard, 4096):
            text += part
        os.close(heard)
        facts, _, stored = text.partition(b"\n")
        said = json.loads(facts)
        total["damaged_by_a_kill"] += said["index_damaged"] and folder not in spoiled
        spoiled.discard(folder)
        total.update(said)
        total["kills"] += number < kills
        total["stored"] += 2 * AT_ONCE * len(stored)
        total["killed_while_writing"] += len(stored) > 0
        total["unsound"] += len(unsound(folder))
        what = meddle(folder, other, chance)
        total[f"meddled_{what}"] += 1
        if what in ("cut", "scribble"):
            spoiled.add(folder)
    return total


if __name__ == "__main__":
    if sys.argv[1] == "live":
        asyncio.run(live(Path(sys.argv[2]), "nixl", int(sys.argv[3]), int(sys.argv[4])))
    else:
        print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), "nixl" if sys.argv[3] == "nixl" else "plain")))
