"""Others' routers and clients at tiny engines: programs from their wheels, and a crowd of which some leave."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from asynckv.tools.bench.processes import ROOT
from asynckv.tools.proxy.server import COMPLETIONS
from tests.commands import python
from tests.test_proxy import HEAR_S, START_S, Client, Tiny, asks, said

WHEELS = ROOT / ".tox" / "wheels"
PROMPTS = [f"Client {i} asks what becomes of its blocks" * (1 + i % 4) for i in range(24)]
TOKENS = 8


def python_with(requirements: Path) -> Path:
    """Return the interpreter of an environment with these wheels, which is made once and sees the packages of this one.

    Requirements name everything that is not here, so that pip looks for nothing else.
    """
    home = WHEELS / f"{requirements.stem}-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]}"
    python, done = home / "bin" / "python", home / "done"
    if done.exists():
        return python
    shutil.rmtree(home, ignore_errors=True)
    env = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}  # they need other versions
    venv, pip = ([sys.executable, "-m", name] for name in ("venv", "pip"))
    wheels = ("-q", "--no-deps", "--no-compile", "--only-binary", ":all:", "-r", str(requirements))
    for command in ([*venv, "--without-pip", str(home)], [*pip, "--python", str(python), "install", *wheels]):
        made = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"NOT TESTED: {requirements.name} cannot be installed here: {made.stderr[-500:]}")
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib"))
    done.touch()
    return python


@contextlib.contextmanager
def running(*engines: Tiny) -> Iterator[None]:
    """Wait until engines have started; at the end none is left."""
    try:
        for engine in engines:
            engine.wait_until_started()
        yield
    finally:
        for engine in engines:
            end(engine.process)


def end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextlib.asynccontextmanager
async def router(*command: str | Path, log: Path, port: int, path: str) -> AsyncIterator[str]:
    """Run a router as a process, and yield its URL when `path` is answered with 200."""
    url = f"http://127.0.0.1:{port}"
    process = _started(command, log)
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(START_S):
            status = 0
            while status != 200:
                assert process.poll() is None, _end_of(log)
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with session.get(url + path) as answer:
                        status = answer.status
        yield url
    finally:
        end(process)


def _started(command: Sequence[str | Path], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out)


def _end_of(log: Path) -> str:
    return log.read_text()[-2000:]


class Crowd:
    """Clients of a router, of which every fifth leaves: by turns at once, and at the first event.

    Attributes:
        came: Number of clients by what they got: `right`, `left`, `wrong`, or a status.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, want: Mapping[str, str]) -> None:
        self.url, self.session, self.want = url, session, want
        self.came = Counter[str]()

    async def come(self, clients: Iterator[int], at_once: int = 10) -> None:
        """Serve as many clients as there are, so many at once."""

        async def serve() -> None:
            for client in clients:
                self.came[await self._client(client)] += 1

        await asyncio.gather(*(serve() for _ in range(at_once)))

    async def _client(self, number: int) -> str:
        prompt = PROMPTS[number % len(PROMPTS)]
        body = {**asks(prompt, TOKENS), "stream": number % 2 == 1}
        async with asyncio.timeout(HEAR_S):
            if number % 5 == 0:
                await self._leave(body, is_heard=number % 2 == 1)
                return "left"
            try:
                async with self.session.post(self.url + COMPLETIONS[0], json=body) as answer:
                    data = await answer.read()
            except aiohttp.ClientError:
                return "broken"
        if answer.status != 200:
            return str(answer.status)
        return "right" if said_in(data, is_stream=bool(body["stream"])) == self.want[prompt] else "wrong"

    async def _leave(self, body: Mapping[str, Any], is_heard: bool) -> None:
        at, data = urlsplit(self.url), json.dumps(body).encode()
        head = f"POST {COMPLETIONS[0]} HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        try:
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            await writer.drain()
            # The stream may break before its first event.
            with contextlib.suppress(asyncio.IncompleteReadError):
                if is_heard and b" 200 " in (await reader.readuntil(b"\r\n\r\n")).splitlines()[0]:
                    await reader.readuntil(b"data: ")
        finally:
            writer.transport.abort()


def said_in(data: bytes, is_stream: bool) -> str:
    """Return the text of an answer; of a stream that broke off, what came."""
    if not is_stream:
        return said(json.loads(data))
    events = [line.removeprefix(b"data: ") for line in data.splitlines() if line.strip()]
    return "".join(said(json.loads(event)) for event in events if event != b"[DONE]")


async def texts(engine: Tiny, session: aiohttp.ClientSession) -> dict[str, str]:
    """Return what one engine alone answers to each prompt."""
    found = {}
    for prompt in PROMPTS:
        status, told = await Client(engine.url, session).ask(asks(prompt, TOKENS))
        assert status == 200
        found[prompt] = said(told)
    return found


async def leases(engine: Tiny, session: aiohttp.ClientSession) -> dict[str, int]:
    """Return the number of leases of an engine by how they ended, once none is left."""
    at = Client(engine.url, session)
    ended: dict[str, int] = {}

    async def is_over() -> bool:
        told = await at.metrics()
        ended.update({name.split('"')[-2]: int(told[name]) for name in told if "leases_ended_total" in name})
        return sum(told[name] for name in told if "leases_lent_total" in name) == sum(ended.values())

    await at.until(is_over)
    return {how: count for how, count in ended.items() if count}


def why(*sources: Path) -> dict[str, Any]:
    """Ask `asynckv why`."""
    done = python("-m", "asynckv", "why", *map(str, sources), "--json", "-", COLUMNS="100")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
