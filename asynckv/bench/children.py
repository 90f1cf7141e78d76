"""Worker processes as the driver sees them: started, told, heard, ended. Also which ones an engine has."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from asynckv.bench import protocol as p
from asynckv.bench.schedule import Place
from asynckv.errors import AsyncKVError, ConfigError

if TYPE_CHECKING:
    from asynckv.bench.driver import Options

__all__ = ["Child", "Reach", "Worker", "WorkerLost", "environment", "setups"]

T = TypeVar("T")


class WorkerLost(Exception):
    """A worker process ended before it was told to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Where the engines of this host listen, and with which keys.

    Attributes:
        host: Address without a port.
        secret, authorized: As in `KeysConfig`; empty without keys.
        allow_insecure: Listen there although nothing is encrypted.
    """

    host: str = "127.0.0.1"
    secret: str = ""
    authorized: str = ""
    allow_insecure: bool = False


class Worker(ABC):
    """One rank of one engine, on this host or another."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_lost = False

    @property
    @abstractmethod
    def pid(self) -> int:
        """Its process, on its host."""

    @abstractmethod
    def tell(self, command: p.Command) -> None:
        """Send a command; harmless if it is lost."""

    @abstractmethod
    async def end(self) -> None:
        """Make sure that the process is gone."""

    @abstractmethod
    async def _next(self, timeout_s: float) -> p.Answer:
        """Wait for any answer.

        Raises:
            WorkerLost: The process ended, or said nothing in time.
        """

    async def hear(self, kind: type[T], timeout_s: float) -> T:
        """Wait for the answer to the last command.

        Raises:
            WorkerLost: The process ended, or said nothing in time.
            ConfigError: It blames the input.
            AsyncKVError: It cannot go on.
        """
        while True:
            answer = await self._next(timeout_s)
            if isinstance(answer, p.Failed):
                raise ConfigError(answer.message) if answer.config else AsyncKVError(f"{self.name}: {answer.message}")
            if isinstance(answer, kind):
                return answer
            # Left over from a step that was given up because another worker died.


class Child(Worker):
    """A worker process of our own."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        super().__init__(name)
        self._process = process

    @classmethod
    async def spawn(cls, name: str, env: Mapping[str, str]) -> Child:
        """Start one."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "asynckv.bench.rank",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=env,
            limit=p.LIMIT,
        )
        return cls(name, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, command: p.Command) -> None:
        if not self.is_lost and self._process.stdin is not None:
            with contextlib.suppress(ConnectionError, RuntimeError):
                self._process.stdin.write(p.encode(command))

    async def line(self) -> bytes:
        """Wait for an answer as it is written; empty when the process is gone."""
        assert self._process.stdout is not None
        return await self._process.stdout.readline()

    async def how(self) -> str:
        """Wait for the end, and say how it came."""
        status = await self._process.wait()
        ending = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        return f"{self.name} (process {self.pid}) {ending}"

    async def _next(self, timeout_s: float) -> p.Answer:
        try:
            line = await asyncio.wait_for(self.line(), timeout_s)
        except TimeoutError:
            self.is_lost = True
            raise WorkerLost(f"{self.name} (process {self.pid}) did not answer within {timeout_s:.0f} s") from None
        if not line:
            self.is_lost = True
            raise WorkerLost(await self.how())
        return p.answers.decode(line)

    async def end(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 15.0)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


class Planned(NamedTuple):
    """A worker that is to be started."""

    name: str
    place: Place
    setup: p.Setup


def setups(
    options: Options, roles: Sequence[str], num_blocks: Mapping[str, list[int]], reach: Reach
) -> Iterator[Planned]:
    """Name every rank of every engine of these roles, stage by stage."""
    engines = options.engines
    for place in engines.places:
        role, number = place
        if role not in roles:
            continue
        side = options.sides[role]
        several = (engines.prefill if role == "prefill" else engines.decode) > 1
        engine_id = f"{role}-{number}" if several else role
        for stage in range(side.pp):
            for rank in range(side.tp):
                name = f"{engine_id}/pp{stage}/tp{rank}" if side.pp > 1 else f"{engine_id}/tp{rank}"
                setup = p.Setup(
                    role=role,
                    engine_id=engine_id,
                    pulls=engines.pulls(place),
                    tp_rank=rank,
                    pp_stage=stage,
                    side=side,
                    model=options.model,
                    num_blocks=num_blocks[role],
                    seed=options.seed,
                    verify=options.verify,
                    lease_s=options.lease_s,
                    timeout_s=options.timeout_s,
                    bind=f"tcp://{reach.host}:0",
                    secret=reach.secret,
                    authorized=reach.authorized,
                    allow_insecure=reach.allow_insecure,
                    memory=options.memory,
                    announced=options.announced,
                    posting_threads=options.posting_threads,
                    process=options.process,
                    log_path=options.log_path,
                    log_level=options.log_level,
                )
                yield Planned(name, place, setup)


def environment(options: Options) -> dict[str, str]:
    """Make the environment of a worker process."""
    env = dict(os.environ) | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(x for x in (str(Path(__file__).parents[2]), env.get("PYTHONPATH")) if x)
    if options.loop != "auto":
        env["ASYNCKV_BENCH_LOOP"] = options.loop
    if options.transport == "tcp":
        env |= {"UCX_TLS": "tcp,cuda_copy" if options.memory == "cuda" else "tcp"}
        env |= {"UCX_NET_DEVICES": options.net_device or "lo"}
    elif options.net_device:
        env |= {"UCX_NET_DEVICES": options.net_device}
    return env
