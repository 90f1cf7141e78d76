"""Workers as the driver sees them: on this machine, or started elsewhere by `--remote`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TypeVar

from asynckv.errors import AsyncKVError, ConfigError
from asynckv.tools.bench import protocol as p
from asynckv.tools.bench.experiment import Experiment
from asynckv.tools.bench.processes import Child, Failure, Processes
from asynckv.tools.bench.schedule import Place

T = TypeVar("T")

HERE = (sys.executable, "-c", "from asynckv.tools.bench.worker import main; main()")
END_S = 15.0


class WorkerLost(Exception):
    """Raised if a worker process ended too early."""


class Worker:
    def __init__(self, child: Child) -> None:
        self.name, self.is_lost, self._child = child.name, False, child

    def tell(self, command: p.Command) -> None:
        """Send a command; no effect if the worker is lost."""
        if not self.is_lost:
            with contextlib.suppress(ConnectionError, RuntimeError):
                self._child.writer.write(p.encode(command))

    async def hear(self, kind: type[T], timeout_s: float) -> T:
        """Wait for the answer to the last command; raise `WorkerLost`, or the failure that the worker reports."""
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
            # Ignore an answer to a step that was abandoned because another worker died.

    async def end(self, within_s: float = END_S) -> None:
        """End the process in order within this time, or kill it."""
        with contextlib.suppress(Failure):  # it was killed
            await self._child.end(within_s)

    async def _next(self, timeout_s: float) -> p.Answer:
        line = b""
        try:
            with contextlib.suppress(ConnectionError):  # the worker had not read everything
                async with asyncio.timeout(timeout_s):
                    line = await self._child.reader.readline()
        except TimeoutError:
            raise WorkerLost(f"{self._child} did not answer within {timeout_s:.0f} s") from None
        if not line:
            raise WorkerLost(await self._child.ended())
        try:
            return p.answers.decode(line)
        except p.MALFORMED as exc:
            raise WorkerLost(f"{self.name} answered {line[:80]!r}, which is not a valid answer: {exc}") from exc


Workers = Mapping[Place, Sequence[Worker]]


class Host:
    """All workers of a run: their names, their start and their end."""

    def __init__(self, experiment: Experiment, num_blocks: Mapping[str, list[int]]) -> None:
        self._experiment, self._options = experiment, experiment.options
        self._num_blocks, self._env = num_blocks, _environment(experiment)
        self._processes = Processes(self._env)
        self._logs: list[asyncio.Task[None]] = []
        self.workers: dict[Place, list[Worker]] = {place: [] for place in experiment.engines.places}

    async def start(self) -> Workers:
        """Start all workers, stage by stage, and send each its setup; they get ready in the background."""
        experiment, options, keys = self._experiment, self._options, None
        if options.remote is not None:
            from asynckv.edges.control.zmq import make_pair

            keys = make_pair()
        for place in experiment.engines.places:
            shape, engine_id = experiment.sides[place.role], experiment.engines.name(place)
            is_remote = options.remote is not None and place.role == "prefill"
            for stage, rank in product(range(shape.pp), range(shape.tp)):
                name = f"{engine_id}/pp{stage}/tp{rank}" if shape.pp > 1 else f"{engine_id}/tp{rank}"
                worker = Worker(await self._start(name, is_remote=is_remote))
                self.workers[place].append(worker)
                setup = p.Setup(
                    options=options,
                    role=place.role,
                    engine_id=engine_id,
                    tp_rank=rank,
                    pp_stage=stage,
                    model=experiment.model,
                    num_blocks=self._num_blocks[place.role],
                    bind=f"tcp://{experiment.hosts[place.role]}:0",
                    keys=keys,
                    env=self._env,
                    # A remote worker logs to stderr, which the command brings here.
                    log=None if is_remote else options.log,
                )
                worker.tell(setup)
        return self.workers

    async def end(self, within_s: float = END_S) -> None:
        await asyncio.gather(*(worker.end(within_s) for workers in self.workers.values() for worker in workers))
        await self._processes.stop()
        await asyncio.gather(*self._logs)

    async def _start(self, name: str, *, is_remote: bool) -> Child:
        remote, log = self._options.remote or "", self._options.log
        try:
            command = shlex.split(remote) if is_remote else HERE
        except ValueError as exc:
            raise ConfigError(f"--remote {remote}: {exc}") from exc
        errors = asyncio.subprocess.PIPE if is_remote and log else None
        try:
            child = await self._processes.start_command(name, command, errors)
        except OSError as exc:
            raise ConfigError(f"--remote {remote}: {command[0]} cannot be run: {exc.strerror}") from exc
        if log and child.errors is not None:
            self._logs.append(asyncio.create_task(_sort(child.errors, Path(log))))
        return child


async def _sort(errors: asyncio.StreamReader, log: Path) -> None:
    """Append a remote worker's log lines to the local log; show everything else from its stderr."""
    with log.open("ab", buffering=0) as file:
        async for line in errors:
            (file if line.startswith(b"{") else sys.stderr.buffer).write(line)
            sys.stderr.flush()


def _environment(experiment: Experiment) -> dict[str, str]:
    """Return the environment variables that workers get in addition."""
    options, env = experiment.options, dict[str, str]()
    if options.json == "-":  # stderr has errors only
        quiet = {"UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
        env |= {name: os.environ.get(name, value) for name, value in quiet.items()}
    if options.transport == "tcp":
        env["UCX_TLS"] = "tcp,cuda_copy" if options.memory == "cuda" else "tcp"
    if (device := os.environ.get("UCX_NET_DEVICES")) is not None:
        env["UCX_NET_DEVICES"] = device
    elif options.transport == "tcp" and options.remote is None:
        env["UCX_NET_DEVICES"] = "lo"
    return env
