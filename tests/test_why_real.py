"""Processes that hold blocks, one of them killed: the command names it, on a screen, as JSON, and again and again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from asynckv.tools.bench.processes import ROOT
from tests.lab.fleet import Fleet, Process

pytestmark = [pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(120)]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
PATIENCE_S = 30.0


async def command(*argv: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "asynckv", "why", *argv, stdout=pipe, stderr=pipe, env=ENV, limit=1 << 24
    )


async def why(*argv: str) -> tuple[int, str]:
    process = await command(*argv)
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    assert err == b""
    assert process.returncode is not None
    return process.returncode, out.decode()


async def why_json(*argv: str) -> dict[str, Any]:
    _, out = await why("--json", "-", *argv)
    assert out.endswith("}\n")
    found: dict[str, Any] = json.loads(out)
    return found


async def until_claimed(prefill: Process) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while "granted" not in await prefill.ask("states"):  # noqa: ASYNC110 - it announces that to nobody
            await asyncio.sleep(0.02)


async def test_a_reader_that_was_killed_is_named(short_path: Path) -> None:
    directory = str(short_path / "sockets")
    async with Fleet() as fleet:
        prefill, decode = [
            # What is lent to a killed reader returns with its last grant: that has to be long enough to be looked at.
            await fleet.start(name, "tests.inspected:Side", name=name, directory=directory, grant_s=60.0)
            for name in ("prefill", "decode")
        ]
        params = await prefill.ask("lend", number=3)
        await decode.ask("announce", number=0, params=params[0])
        await until_claimed(prefill)
        addresses = [await each.ask("address") for each in (prefill, decode)]

        # Both live, whichever way they are asked; who is read from is asked as well.
        for asked in (addresses, [directory], addresses[1:]):
            found = await why_json(*asked)
            ranks = {each["rank"].partition("@")[0]: each["rank"] for each in found["engines"]}
            assert sorted(ranks) == ["decode/tp0", "prefill/tp0"]
            assert (found["is_well"], found["findings"]) == (True, [])
        status, said = await why("req-0", directory)
        assert status == 0
        assert said.startswith("cmpl-0 (decode: req-0)  lease lent, pull announced")

        # Stopped: who asks is told what can be known.
        decode.signal(signal.SIGSTOP)
        status, said = await why(*addresses, "--timeout", "1")
        assert (status, "its process is stopped" in said or "its event loop is away" in said) == (1, True)
        status, said = await why(directory, "--timeout", "1")
        assert (status, f"pid {decode.pid} is stopped (T): kill -CONT {decode.pid}" in said) == (1, True)
        decode.signal(signal.SIGCONT)

        # Watched by somebody who is no terminal, and killed meanwhile.
        watcher = await command(directory, "--json", "-", "--watch")
        assert watcher.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            assert not any("error" in x for x in json.loads(await watcher.stdout.readline())["engines"])
            await decode.kill()
            is_told = False
            while not is_told:
                seen = json.loads(await watcher.stdout.readline())
                is_told = "process gone" in [x["heading"] for x in seen["findings"]]
            watcher.send_signal(signal.SIGINT)
            _, said_last = await watcher.communicate()
        assert said_last == b"asynckv: interrupted\n"
        assert watcher.returncode == 130
        gone = seen["findings"][0]
        assert (gone["heading"], gone["what"].startswith(ranks["decode/tp0"])) == ("process gone", True)
        status, said = await why(directory)
        assert (status, f"process gone: {ranks['decode/tp0']}" in said) == (1, True)
        status, said = await why(*addresses)
        assert (status, "TCP connection refused" in said) == (1, True)

        # A reader of the pipe that has heard enough.
        watcher = await command(directory, "--watch")
        assert watcher.stdout is not None
        assert watcher.stderr is not None
        async with asyncio.timeout(PATIENCE_S):
            await watcher.stdout.readline()
            watcher._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
            assert await watcher.stderr.read() == b""
            assert await watcher.wait() == 141
