"""Processes of an experiment are asked, stopped and ended, whatever happens; and blocks show what went wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from asynckv.tools.bench.processes import Failure
from tests.lab.fleet import (
    Blocks,
    Fleet,
    Lost,
    Process,
    Refused,
    SharedNumber,
    answer,
    connect,
    family,
    memory_kib,
    pattern,
    usage,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


class Side:
    def __init__(self, *, number: int = 0, folder: str = "", stays: bool = False) -> None:
        self._number, self._folder, self._stays = number, Path(folder), stays
        self._release = asyncio.Event()

    async def __aenter__(self) -> Self:
        print("hello from a library")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._stays:
            await asyncio.Event().wait()
        if self._folder != Path():
            (self._folder / "ended").touch()

    def plus(self, other: int) -> int:
        return self._number + other

    async def fail(self) -> None:
        raise KeyError("nothing of this name")

    async def wait(self) -> str:
        await self._release.wait()
        return "released"

    async def release(self) -> AsyncIterator[str]:
        yield "answered"
        self._release.set()

    async def die(self, status: int) -> None:
        os._exit(status)

    async def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def spawn(self) -> int:
        return subprocess.Popen(["sleep", "60"]).pid

    async def listen(self, path: str) -> None:
        self._server = await asyncio.start_unix_server(lambda r, w: answer(self, r, w), path)

    async def ask_other(self, path: str) -> Any:
        link = await connect(path, "the other")
        try:
            return await link.ask("plus", other=1)
        finally:
            await link.close()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def start(fleet: Fleet, name: str = "one", **setup: Any) -> Process:
    return await fleet.start(name, "tests.lab.test_fleet:Side", **setup)


async def test_what_is_asked_is_answered_in_whatever_order() -> None:
    async with Fleet({"TESTED": "yes"}) as fleet:
        one = await start(fleet, number=41)
        waiting = asyncio.create_task(one.ask("wait"))
        assert await one.ask("plus", other=1) == 42
        assert await one.ask("environment", name="TESTED") == "yes"
        assert not waiting.done()
        assert await one.ask("release") == "answered"
        assert await waiting == "released"
        assert "hello from a library" in one.last_words()


async def test_what_fails_says_so_and_the_process_goes_on() -> None:
    async with Fleet() as fleet:
        one = await start(fleet)
        with pytest.raises(Refused, match="one: fail: KeyError") as raised:
            await one.ask("fail")
        assert raised.value.kind == "KeyError"
        with pytest.raises(Refused, match="no attribute 'nothing'"):
            await one.ask("nothing")
        with pytest.raises(Refused, match="private"):
            await one.ask("__aexit__")
        with pytest.raises(Failure, match=r"one did not answer .wait. within 0\.01 s"):
            await one.ask("wait", 0.01)
        assert await one.ask("plus", other=1) == 1


async def test_who_is_asked_and_dies_is_lost_and_who_watches_is_told_first() -> None:
    told: list[str] = []
    async with Fleet() as fleet:
        one = await fleet.start("one", "tests.lab.test_fleet:Side", on_abort=told.append)
        with pytest.raises(Lost, match=r"one \(process \d+\) exited with status 3"):
            await one.ask("die", status=3)
        assert told == ["one ended by itself, status 3"]
        with pytest.raises(Lost, match="one is gone"):
            await one.ask("plus", other=1)
        again = await start(fleet)
        assert await again.ask("plus", other=1) == 1
        await again.kill()
        assert again.status == -signal.SIGKILL
        assert len(told) == 1


async def test_a_process_ends_in_order_when_it_is_told_to_and_else_it_is_killed(tmp_path: Path) -> None:
    async with Fleet() as fleet:
        one, two = await start(fleet, folder=str(tmp_path)), await start(fleet, "two", stays=True)
        await two.ask("plus", other=1)
        await one.end()
        assert one.status == 0
        assert (tmp_path / "ended").exists()
        with pytest.raises(Failure, match=r"two did not end in order within 0\.1 s"):
            await two.end(0.1)
        assert two.status == -signal.SIGKILL


ECHO = "import os, sys\nfor line in sys.stdin: print(os.environ['GREETING'] + ', ' + line, end='', flush=True)"


async def test_a_command_may_have_a_conversation_of_its_own() -> None:
    command = (sys.executable, "-c", ECHO)
    async with Fleet({"GREETING": "hello"}) as fleet:
        polite, killed = [await fleet.start_command(name, command) for name in ("polite", "killed")]
        polite.writer.write(b"you\n")
        assert await polite.reader.readline() == b"hello, you\n"
        await polite.end()
        assert (await polite.ended(), polite.status) == (f"polite (process {polite.pid}) exited with status 0", 0)
    assert await killed.ended() == f"killed (process {killed.pid}) was killed by signal 9"


async def test_nobody_outlives_a_fleet() -> None:
    async with Fleet() as fleet:
        one, stopped = await start(fleet), await start(fleet, "stopped")
        child = await one.ask("spawn")
        assert family(one.pid) == [one.pid, child]
        stopped.signal(signal.SIGSTOP)
        assert await fleet.stop() == [child]
        assert not any(map(is_running, (one.pid, stopped.pid)))
    assert not fleet.folder.exists()


async def test_processes_end_with_their_driver(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, signal\n"
        "from tests.lab.test_fleet import Fleet, start\n"
        "async def main():\n"
        "    async with Fleet() as fleet:\n"
        "        one = await start(fleet)\n"
        "        await one.ask('plus', other=1)\n"
        "        one.signal(signal.SIGSTOP)\n"
        "        print(one.pid, flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # what it leaves behind
    command = [sys.executable, "-c", code]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, env=env)
    pid = int(done.stdout)
    while is_running(pid):  # noqa: ASYNC110 - the system's kill is on its way
        await asyncio.sleep(0.001)


async def test_processes_can_ask_each_other(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    async with Fleet() as fleet:
        one, two = await start(fleet, number=1), await start(fleet, "two")
        await one.ask("listen", path=path)
        assert await two.ask("ask_other", path=path) == 2


def test_a_number_is_shared(tmp_path: Path) -> None:
    one, other = SharedNumber(tmp_path / "number"), SharedNumber(tmp_path / "number")
    one.value = 77
    assert other.value == 77


def test_what_a_process_uses_is_counted() -> None:
    found = usage()
    assert found["fds"] > 2
    assert found["threads"] >= 1
    assert 0 < found["rss_mib"] <= memory_kib() >> 10 <= memory_kib("VmHWM") >> 10


async def test_blocks_show_what_was_written_while_they_were_free() -> None:
    blocks = Blocks(np.zeros((64, 16), np.uint64), rubbish=7)
    ids = await blocks.take(3)
    blocks.fill(5, ids)
    assert blocks.wrong(5, ids) == 0
    assert blocks.wrong(5, ids[1:], first=1) == 0
    assert blocks.wrong(6, ids) == blocks.words[ids].nbytes
    blocks.give(ids)
    blocks.audit()
    assert blocks.stray == 0
    blocks.words[ids[1], 9] += 1
    waiting = asyncio.create_task(blocks.take(64))
    assert sorted(await waiting) == list(range(64))
    assert (blocks.stray, blocks.num_taken) == (8, 64)


async def test_whoever_takes_blocks_waits_until_there_are_enough() -> None:
    blocks = Blocks(np.zeros((8, 4), np.uint64))
    first, second = await blocks.take(3), await blocks.take(5)
    assert await blocks.take(0) == []
    waiting = asyncio.create_task(blocks.take(4))
    blocks.give(first)
    await asyncio.sleep(0)
    assert not waiting.done()
    blocks.give(second)
    assert len(set(await waiting)) == 4


def test_no_two_words_of_what_belongs_together_are_equal() -> None:
    words = np.concatenate([pattern(key, range(32), 64) for key in range(8)])
    assert len(np.unique(words)) == words.size
