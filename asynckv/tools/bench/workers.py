"""Workers as the driver sees them: told and heard in lines (`asynckv.tools.bench.protocol`), wherever they run.

A worker on this machine is a process of a fleet (`asynckv.tools.fleet`) and speaks over its socket (`Local`). One on
another machine is the same process, behind the half that runs there (`asynckv.tools.bench.remote`).
`Host` has all workers of this machine: it names them, starts them, and sees them off.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from asynckv.errors import AsyncKVError, ConfigError
from asynckv.tools.bench import protocol as p
from asynckv.tools.bench import ucx
from asynckv.tools.bench.experiment import Experiment
from asynckv.tools.bench.schedule import Place
from asynckv.tools.fleet import Child, Failure, Fleet

__all__ = ["END_S", "Host", "Local", "Worker", "WorkerLost", "Workers", "setups"]

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
CODE = "from asynckv.tools.bench.rank import main; main()"
END_S = 15.0
"""How long a worker may take to end in order."""


class WorkerLost(Exception):
    """A worker process ended before it was told to."""


class Worker(ABC):
    """One rank of one engine.

    Args:
        name: Such as `decode/tp0`.
        lines: What it says.
    """

    def __init__(self, name: str, lines: asyncio.StreamReader) -> None:
        self.name = name
        self.is_lost = False
        self._lines = lines

    @abstractmethod
    def write(self, line: bytes) -> None:
        """Pass a line on to it; harmless if it is gone."""

    @abstractmethod
    async def how(self) -> str:
        """Wait for its end, and say how it came."""

    @abstractmethod
    async def end(self, within_s: float = END_S) -> None:
        """Make sure that the process is gone; it may take so long to end in order."""

    def __str__(self) -> str:
        return self.name

    def tell(self, command: p.Command) -> None:
        """Send a command; harmless if it is lost."""
        if not self.is_lost:
            self.write(p.encode(command))

    async def line(self) -> bytes:
        """Wait for a line as it is written; empty when the process is gone."""
        try:
            return await self._lines.readline()
        except ConnectionError:  # it had not read everything
            return b""

    async def hear(self, kind: type[T], timeout_s: float) -> T:
        """Wait for the answer to the last command.

        Raises:
            WorkerLost: The process ended, said nothing in time, or said what nobody understands.
            ConfigError: It blames the input.
            AsyncKVError: It cannot go on.
        """
        while True:
            try:
                answer = await self._next(timeout_s)
            except WorkerLost:
                self.is_lost = True
                raise
            if isinstance(answer, p.Failed):
                raise ConfigError(answer.message) if answer.config else AsyncKVError(f"{self.name}: {answer.message}")
            if isinstance(answer, kind):
                return answer
            # Left over from a step that was given up because another worker died.

    async def _next(self, timeout_s: float) -> p.Answer:
        try:
            line = await asyncio.wait_for(self.line(), timeout_s)
        except TimeoutError:
            raise WorkerLost(f"{self} did not answer within {timeout_s:.0f} s") from None
        if not line:
            raise WorkerLost(await self.how())
        try:
            return p.answers.decode(line)
        except p.MALFORMED as exc:
            raise WorkerLost(f"{self.name} answered what cannot be understood: {exc}") from exc


Workers = Mapping[Place, Sequence[Worker]]
"""Of every engine, its ranks."""


class Local(Worker):
    """A worker on this machine."""

    def __init__(self, child: Child) -> None:
        super().__init__(child.name, child.reader)
        self._child = child

    def __str__(self) -> str:
        return str(self._child)

    def write(self, line: bytes) -> None:
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._child.writer.write(line)

    async def how(self) -> str:
        return await self._child.ended()

    async def end(self, within_s: float = END_S) -> None:
        with contextlib.suppress(Failure):  # it was killed
            await self._child.end(within_s)


class Planned(NamedTuple):
    """A worker that is to be started."""

    name: str
    place: Place
    setup: p.Setup


def setups(
    experiment: Experiment, roles: Sequence[str], num_blocks: Mapping[str, list[int]], host: str = LOOPBACK
) -> Iterator[Planned]:
    """Name every rank of every engine of these roles, stage by stage.

    Args:
        experiment: What they run.
        roles: Of the engines.
        num_blocks: Size of the pools per group, by role.
        host: The address at which they listen.
    """
    engines = experiment.engines
    for place in engines.places:
        if place.role not in roles:
            continue
        shape, engine_id = experiment.sides[place.role], engines.name(place)
        for stage in range(shape.pp):
            for rank in range(shape.tp):
                name = f"{engine_id}/pp{stage}/tp{rank}" if shape.pp > 1 else f"{engine_id}/tp{rank}"
                setup = p.Setup(
                    options=experiment.options,
                    role=place.role,
                    engine_id=engine_id,
                    pulls=engines.pulls(place),
                    tp_rank=rank,
                    pp_stage=stage,
                    shape=shape,
                    model=experiment.model,
                    num_blocks=num_blocks[place.role],
                    bind=f"tcp://{host}:0",
                )
                yield Planned(name, place, setup)


class Host:
    """The workers of this machine.

    Args:
        experiment: What they run.
        roles: Of the engines that run here.
        num_blocks: Size of the pools per group, by role.
        host: The address at which they listen.

    Attributes:
        workers: As far as they were started.
        transports: What UCX used to read; known at the end.
    """

    def __init__(
        self, experiment: Experiment, roles: Sequence[str], num_blocks: Mapping[str, list[int]], host: str = LOOPBACK
    ) -> None:
        self._planned = list(setups(experiment, roles, num_blocks, host))
        self._fleet = Fleet(_environment(experiment))
        self.workers: dict[Place, list[Worker]] = {planned.place: [] for planned in self._planned}
        self.transports = ""

    async def start(self) -> Workers:
        """Start all of them, and tell them who they are; they come up meanwhile."""
        folder = (await self._fleet.__aenter__()).folder
        logging = ucx.ENV | {"UCX_LOG_FILE": str(folder / ucx.ENV["UCX_LOG_FILE"])}
        for name, place, setup in self._planned:
            worker = Local(await self._fleet.start_other(name, CODE, logging if setup.pulls else {}))
            self.workers[place].append(worker)
            worker.tell(setup)
        return self.workers

    async def end(self, within_s: float = END_S) -> None:
        """End every worker; none is left."""
        await asyncio.gather(*(worker.end(within_s) for workers in self.workers.values() for worker in workers))
        self.transports = ucx.read(self._fleet.folder)
        await self._fleet.__aexit__()


def _environment(experiment: Experiment) -> dict[str, str]:
    """Make what is special about the environment of worker processes."""
    options, env = experiment.options, dict[str, str]()
    if options.loop != "auto":
        env["ASYNCKV_BENCH_LOOP"] = options.loop
    if options.transport == "tcp":
        env |= {"UCX_TLS": "tcp,cuda_copy" if options.memory == "cuda" else "tcp"}
        env |= {"UCX_NET_DEVICES": options.net_device or "lo"}
    elif options.net_device:
        env |= {"UCX_NET_DEVICES": options.net_device}
    return env
