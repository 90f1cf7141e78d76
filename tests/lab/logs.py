"""The logs of every process of a simulated service, as the files on its host would hold them.

A real engine's recorder writes here as it does everywhere, at the level that is asked for and in the form of
`asynckv.configure_logging(form="json")`. What differs is the time: each line bears that of the host that its process
is on, and hosts disagree: some by seconds, all a little more each second. Only this module knows by how much,
so that a reader of the files that aligns their clocks can be told how well that went (`clocks.json`).

Each process start has a file of its own, and nothing global is configured. The same seed writes the same files. (To
log takes an engine a reading of its clock now and then, so that a service that is listened to differs in microseconds.)
"""

from __future__ import annotations

import io
import json
from bisect import bisect_right
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from asynckv.engine import Engine
from asynckv.observe.setup import LEVELS
from tests.lab.world import Process, World

BEGIN = 1_800_000_000.0
"""When simulated services begin: seconds since 1970."""

OFFSETS = (0.0, 0.0002, 0.003, 0.05, 1.5, 7.0)
"""Seconds by which a host's clock is wrong, at most: well kept, or not kept at all."""

MAX_DRIFT = 2e-5
"""Drift per second, at most: an undisciplined quartz often drifts by this, and rarely by twice as much."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host's wall clock: it reads `BEGIN + t + offset_s + drift * t` at the time `t` of the simulation."""

    name: str
    offset_s: float
    drift: float

    def reads(self, t: float) -> float:
        return BEGIN + t + self.offset_s + self.drift * t


@dataclass(slots=True)
class ProcessLog:
    """Lines that one start of a process wrote.

    Attributes:
        process: Its name in the simulation, such as `d0.1#2`: the rank, and which of its starts.
        of: The process itself.
        engine_id, tp_rank: The rank that it belongs to.
    """

    process: str
    of: Process
    engine_id: str
    tp_rank: int
    host: Host
    stream: io.StringIO = field(default_factory=io.StringIO)
    times: list[float] = field(default_factory=list)
    """When it wrote each line, in the simulation's time."""

    @property
    def file_name(self) -> str:
        return f"{self.process.replace('#', '-')}.jsonl"

    @property
    def text(self) -> str:
        """All of its lines."""
        return self.stream.getvalue()

    def until(self, at: float) -> str:
        """Return the text that was written by a time of the simulation's."""
        return "".join(self.text.splitlines(keepends=True)[: bisect_right(self.times, at)])

    def put_back(self, at: float, seconds: float) -> str:
        """All of its lines, if its host's clock had been put back at a time of the simulation's."""
        lines = [json.loads(x) for x in self.text.splitlines()]
        for line in lines[bisect_right(self.times, at) :]:
            then = datetime.fromisoformat(line["timestamp"]) - timedelta(seconds=seconds)
            line["timestamp"] = then.isoformat()
        return "".join(f"{json.dumps(x)}\n" for x in lines)


class Logs:
    """All that the processes of one service log.

    Args:
        level: From which level on, as for `asynckv.configure_logging`.
    """

    def __init__(self, level: str = "info") -> None:
        self.level = LEVELS[level]
        self.processes: list[ProcessLog] = []
        self._hosts: dict[str, Host] = {}

    def listen(self, process: Process, engine: Engine) -> None:
        """Have an engine that was just made write here."""
        host = self._host_of(process, engine.config.engine_id)
        tp_rank = engine.registration.layout.tp_rank
        log = ProcessLog(process.name, process, engine.config.engine_id, tp_rank, host)
        self.processes.append(log)
        logger = structlog.wrap_logger(
            structlog.WriteLogger(log.stream),
            processors=[
                structlog.processors.add_log_level,
                partial(_stamp, log, len(self.processes)),
                structlog.processors.JSONRenderer(),
            ],
            wrapper_class=structlog.make_filtering_bound_logger(self.level),
            context_class=dict,
            cache_logger_on_first_use=False,
        )
        recorder = engine._recorder
        recorder._log, recorder._log_level = logger.bind(**recorder._bound), self.level
        recorder._level = min(self.level, recorder._sink_level)

    def _host_of(self, process: Process, engine_id: str) -> Host:
        """Hosts have one rank, or all ranks of an engine."""
        world: World = process.world
        is_shared = world.random_of("hosts").random() < 0.5
        name = f"host-{engine_id if is_shared else process.name.partition('#')[0]}"
        if (host := self._hosts.get(name)) is None:
            rng = world.random_of("host", name)
            offset = rng.choice(OFFSETS) * rng.uniform(-1, 1)
            host = self._hosts[name] = Host(name, offset, rng.uniform(-MAX_DRIFT, MAX_DRIFT))
        return host

    def files(self) -> dict[str, str]:
        """Return what is in each file."""
        return {log.file_name: log.text for log in self.processes}

    def clocks(self) -> dict[str, Any]:
        """Say how wrong each file's timestamps are: `timestamp = begin + t + offset_s + drift * t`."""
        return {
            "schema": "asynckv.simulated_clocks/1",
            "begin": BEGIN,
            "files": {
                log.file_name: {
                    "host": log.host.name,
                    "engine_id": log.engine_id,
                    "tp_rank": log.tp_rank,
                    "offset_s": log.host.offset_s,
                    "drift": log.host.drift,
                }
                for log in self.processes
            },
        }

    def write(self, directory: Path) -> list[Path]:
        """Write the files, and beside them the truth about their clocks as `clocks.json`; return the logs' paths."""
        directory.mkdir(parents=True, exist_ok=True)
        paths = []
        for name, text in self.files().items():
            paths.append(directory / name)
            paths[-1].write_text(text)
        (directory / "clocks.json").write_text(json.dumps(self.clocks(), indent=1) + "\n")
        return paths


def _stamp(
    log: ProcessLog, pid: int, logger: Any, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Say when it was, by the clock of a host, and where."""
    if "host" in event:
        event["host"] = event["boot_id"] = log.host.name
    if "pid" in event:
        event["pid"] = pid
    log.times.append(log.of.now)
    now = datetime.fromtimestamp(log.host.reads(log.of.now), UTC)
    event["timestamp"] = now.isoformat(timespec="microseconds").replace("+00:00", "Z")
    return event
