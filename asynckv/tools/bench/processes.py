"""Processes that always end with their driver. This module imports the standard library only.

A driver talks to a child over stdin and stdout, and ends it by closing stdin. If the driver dies, the kernel kills its
children on the same host. Grandchildren that outlive a child are found by a mark in their environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import random
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

ANSWER_S = 20.0
LIMIT = 1 << 28  # bytes of one line
ROOT = Path(__file__).resolve().parents[3]
MARK = "ASYNCKV_FLEET"
PR_SET_PDEATHSIG = 1

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Failure(Exception):
    """Raised if an experiment cannot continue."""


class Child:
    """A process, with the streams to and from it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, streams: Streams) -> None:
        self.name = name
        self.reader, self.writer = streams
        self.errors = process.stderr
        self._process = process
        self._is_ending = False

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid})"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Return code of `asyncio.subprocess`; None while the process runs."""
        return self._process.returncode

    async def ended(self) -> str:
        status = await self._process.wait()
        return f"{self} was killed by signal {-status}" if status < 0 else f"{self} exited with status {status}"

    async def kill(self) -> None:
        self._is_ending = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self.close()

    async def close(self) -> None:
        self.writer.close()

    async def end(self, within_s: float = ANSWER_S) -> None:
        self._is_ending = True
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.write_eof()
        try:
            async with asyncio.timeout(within_s):
                await self._process.wait()
        except TimeoutError:
            raise Failure(f"{self.name} did not end in order within {within_s:g} s") from None
        finally:
            await self.kill()


class Processes:
    """All processes of one driver; none is left after `stop`."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._children: list[Child] = []
        self._mark = f"{os.getpid()}-{random.getrandbits(64):x}"
        # One thread per library, because the engine is measured and not a thread pool of numpy.
        self._env = dict(os.environ) | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._env |= {**env, MARK: self._mark}
        self._env["PYTHONPATH"] = os.pathsep.join(x for x in (str(ROOT), self._env.get("PYTHONPATH")) if x)

    async def start_command(self, name: str, command: Sequence[str], errors: int | None = None) -> Child:
        """Start a command, to talk to over its stdin and stdout."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=self._env,
            limit=LIMIT,
            process_group=0,  # signals of the terminal are for the driver only
        )
        assert process.stdin is not None
        assert process.stdout is not None
        child = Child(name, process, (process.stdout, process.stdin))
        self._children.append(child)
        return child

    async def stop(self) -> list[int]:
        """Kill every process; return the ids of grandchildren that outlived them and were killed as well."""
        for process in reversed(self._children):
            await process.kill()
        left: list[int] = []
        for _ in range(30):  # a worker's own child soon ends by itself
            if not (left := _marked(self._mark)):
                return left
            await asyncio.sleep(0.1)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left


def _marked(mark: str) -> list[int]:
    """Return the ids of processes with the mark in their environment."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{name}/environ").read_bytes():
                found.append(int(name))
    return found


def end_with_driver() -> None:
    """Ignore Ctrl-C, which the driver handles, and end when the driver ends."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if MARK in os.environ:  # the driver itself started this process, not a daemon such as sshd
        # A stopped process could not notice the driver's death, so the kernel must kill it.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
