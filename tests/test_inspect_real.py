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

pytestmark = [pytest.mark.anyio, pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(120)]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
PATIENCE_S = 30.0


async def command(*argv: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "asynckv", "inspect", *argv, stdout=pipe, stderr=pipe, env=ENV, limit=1 << 24
    )


async def inspect(*argv: str) -> tuple[int, str]:
    process = await command(*argv)
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    assert err == b""
    assert process.returncode is not None
    return process.returncode, out.decode()


async def inspect_json(*argv: str) -> dict[str, Any]:
    _, out = await inspect("--json", "-", *argv)
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

        # Both live: their words fit together, whichever way they are asked.
        for asked in (addresses, [directory], [addresses[1], "--follow"]):
            found = await inspect_json(*asked)
            ranks = {each["rank"].partition("@")[0]: each for each in found["engines"]}
            assert sorted(ranks) == ["decode/tp0", "prefill/tp0"]
            first = next(each for each in found["joined"] if each["request_id"] == "cmpl-0")
            (reader,) = first["others"]
            assert (reader["rank"], reader["found"]) == (ranks["decode/tp0"]["rank"], "announced")
            assert not any(other["is_amiss"] for each in found["joined"] for other in each["others"])
        status, said = await inspect(directory, "--request", "req-0")
        assert status == 0
        assert "lease cmpl-0" in said
        assert "announced req-0" in said

        # Stopped: who asks is told what can be known.
        decode.signal(signal.SIGSTOP)
        status, said = await inspect(*addresses, "--timeout", "1")
        assert (status, "its process is stopped" in said or "its event loop is away" in said) == (1, True)
        status, said = await inspect(directory, "--timeout", "1")
        assert (status, f"pid {decode.pid} is stopped (T): kill -CONT {decode.pid}" in said) == (1, True)
        decode.signal(signal.SIGCONT)

        # Watched by somebody who is no terminal, and killed meanwhile.
        watcher = await command(directory, "--json", "-", "--watch", "0.2")
        assert watcher.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            assert not any("error" in each for each in json.loads(await watcher.stdout.readline())["engines"])
            reader_name = ranks["decode/tp0"]["rank"]
            await decode.kill()
            while True:
                seen = json.loads(await watcher.stdout.readline())
                amiss = {
                    (each["request_id"], other["rank"], other["verdict"])
                    for each in seen["joined"]
                    for other in each["others"]
                    if other["is_amiss"]
                }
                if amiss:
                    break
            watcher.send_signal(signal.SIGINT)
            _, said_last = await watcher.communicate()
        assert said_last == b"asynckv: interrupted\n"
        assert watcher.returncode == 130
        assert amiss == {("cmpl-0", reader_name, "its process has ended")}
        status, said = await inspect(directory)
        assert status == 0, "a socket that was left behind is nobody's wish"
        assert f"! {reader_name}: its process has ended" in said
        status, said = await inspect(*addresses)
        assert (status, "TCP connection refused" in said) == (1, True)

        # A reader of the pipe that has heard enough.
        watcher = await command(directory, "--watch", "0.2")
        assert watcher.stdout is not None
        assert watcher.stderr is not None
        async with asyncio.timeout(PATIENCE_S):
            await watcher.stdout.readline()
            watcher._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
            assert await watcher.stderr.read() == b""
            assert await watcher.wait() == 141
