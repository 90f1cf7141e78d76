"""Processes that store records in a file tier until they are killed, and check what those before them have left.

A record's bytes are a function of its key. Each process reads all that it finds, says how much of it was served, lost
or wrong, and then writes over random places under new keys, as fast as it can, until it is killed at a random moment.
With system calls each is forked from this one, which has imported everything; with NIXL each is a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from asynckv.core.events import Ending
from asynckv.core.types import TransferId
from asynckv.edges.file_index import checksum
from asynckv.edges.file_tier import FileTier
from asynckv.edges.host_pool import HostPool
from asynckv.ports import CopyOp, Record, RecordNews, RecordsEnded

PLACES, SIZE, AT_ONCE = 64, 16 * 4096, 8
MOST_S = 0.08
"""Until a kill, from when the first record was stored."""

BackEnd = Literal["plain", "nixl"]


def contents(key: bytes) -> npt.NDArray[np.uint8]:
    seed = np.uint64(checksum(key, b"") & 0xFFFFFFFFFFFFFFFF)
    return (np.arange(SIZE // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ seed).view(np.uint8)


async def live(folder: Path, back_end: BackEnd, out: int, number: int) -> None:
    """Check what is there, say so, and store for ever."""
    pool = HostPool(PLACES * SIZE)
    assert pool.array is not None
    places = pool.array.reshape(PLACES, SIZE)
    tier = FileTier(folder, PLACES * SIZE, back_end=back_end, segment_bytes=10 * SIZE, name=f"killed-{number}")
    heard: asyncio.Queue[RecordNews] = asyncio.Queue()

    def ready() -> None:
        for each in tier.poll():
            heard.put_nowait(each)

    async def move(move_id: int, op: CopyOp, records: list[Record]) -> RecordsEnded:
        tier.post(TransferId(move_id), op, records)
        ended = await heard.get()
        assert isinstance(ended, RecordsEnded), ended
        return ended

    found = [Record(s.key, i * SIZE, s.far, s.size) for i, s in enumerate(tier.start(pool.memory, ready))]
    ended = await move(1, CopyOp.READ, found)
    assert ended.ending is Ending.DONE or ended.lost, ended
    wrong = [
        record.key.decode()
        for i, record in enumerate(found)
        if i not in ended.lost and not np.array_equal(places[i], contents(record.key))
    ]
    facts = {"served": len(found) - len(ended.lost), "lost": len(ended.lost), "wrong": len(wrong), **tier.found}
    os.write(out, json.dumps(facts).encode() + b"\n")
    chance, count = random.Random(number), 0
    while True:
        records = []
        for near, far in enumerate(chance.sample(range(PLACES), AT_ONCE)):
            key = f"{number}-{count}".encode()
            count += 1
            places[near] = contents(key)
            records.append(Record(key, near * SIZE, far * SIZE, SIZE, "layout", "group"))
        ended = await move(count + 1, CopyOp.WRITE, records)
        assert ended.ending is Ending.DONE, ended
        os.write(out, b"+")


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


def main(folder: Path, kills: int, back_end: BackEnd) -> Counter[str]:
    """Kill so many, and add up what they said."""
    total: Counter[str] = Counter()
    chance = random.Random(kills)
    for number in range(kills + 1):
        child, heard = begin(folder, back_end, number)
        text = b""
        try:
            while b"\n+" not in text:
                part = os.read(heard, 4096)
                if not part:
                    raise SystemExit(f"process {number} ended by itself after {text!r}")
                text += part
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
        total.update(json.loads(facts))
        total["kills"] += number < kills
        total["stored"] += AT_ONCE * len(stored)
        total["killed_while_writing"] += len(stored) > 0
    return total


if __name__ == "__main__":
    if sys.argv[1] == "live":
        asyncio.run(live(Path(sys.argv[2]), "nixl", int(sys.argv[3]), int(sys.argv[4])))
    else:
        print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), "nixl" if sys.argv[3] == "nixl" else "plain")))
