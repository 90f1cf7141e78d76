"""The JSON lines between the driver and its workers. A worker ends when its stdin is closed."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any, Literal

import msgspec
from msgspec import Struct

from asynckv.core.types import Endpoint
from asynckv.geometry.layout import Layout
from asynckv.keys import KeyPair
from asynckv.ports import AgentInfo
from asynckv.tools.bench.options import Options
from asynckv.tools.bench.processes import LIMIT
from asynckv.tools.plan.models import Model
from asynckv.version import VERSION


class Setup(Struct, tag=True, kw_only=True):
    """The first line to a worker: its rank and the options of the run.

    Without `keys` the control plane stays on this host. `env` does not replace variables that the worker already has.
    If `log` is None, the worker logs to stderr.
    """

    version: str = VERSION
    options: Options
    role: str
    engine_id: str
    tp_rank: int
    pp_stage: int
    model: Model
    num_blocks: list[int]
    bind: str
    keys: KeyPair | None
    env: dict[str, str]
    log: str | None


class Ready(Struct, tag=True):
    pid: int
    endpoint: Endpoint
    environment: dict[str, str]
    floor: Opened | None = None


class Work(Struct):
    """One request of a wave, as one side sees it."""

    number: int
    lists: list[tuple[int, list[int | None]]]
    tokens: int
    params: dict[str, Any]
    prefix: tuple[int, tuple[int, ...]] = 1, ()
    """Tokens per chunk, and the ids of the leading chunks, which determine the pattern of their tokens."""
    ticket: str = ""
    """With a ticket, the side that pulls gets what it follows as `params`."""
    num_chunks: int = 0
    """Chunks that the prefill side computes before it lends; the side that pulls takes pieces if it is told of them."""
    arrival_s: float = 0.0
    """Arrival in seconds from the opening of the window (negative if earlier); open loop only."""


class Prepare(Struct, tag=True):
    """Fill the blocks of the requests to lend, and prepare to pull the others."""

    lent: list[Work]
    pulled: list[Work]


class Do(Struct, tag=True):
    """Carry out a command without parameters.

    `lend` the filled requests; their leases start now. `verify` the pulled bytes. `serve` the floor's reader, or `rest`
    again. `stop`: drain, audit, report and end.
    """

    what: Literal["lend", "verify", "serve", "rest", "stop"]


class Done(Struct, tag=True):
    cpu_s: float = 0.0  # only `lend` has figures
    lent_at: float = 0.0  # by the clock of this host


class Go(Struct, tag=True):
    """Open the window: pull with this many in flight, or each request at its arrival if this is 0."""

    concurrency: int


class Outcome(Struct):
    number: int
    error: str = ""
    reason: str = ""
    seconds: float = 0.0
    """Seconds from the scheduled arrival in an open loop, otherwise from the call of `pull`."""
    late: float = 0.0
    """Seconds between the scheduled arrival and the call of `pull`."""
    num_bytes: int = 0
    pieces: int = 0
    planned: int = 0
    posted: int = 0
    phases: dict[str, float] = {}
    ended_at: float = 0.0  # by the clock of this host


class Pulled(Struct, tag=True):
    window_s: float
    cpu_s: float
    lags: list[float]
    outcomes: list[Outcome]
    read_bytes: int = 0
    held: int = 0
    """Number of blocks of failed pulls that a transfer may still write."""


class Verified(Struct, tag=True):
    """Report the comparison, in bytes; `wanted` is the total of the completed requests."""

    verified: int
    wanted: int
    wrong: int


class Finish(Struct, tag=True):
    """Wait until every lease of the wave has ended."""

    patience_s: float


class Ended(Struct, tag=True):
    causes: dict[str, int]
    leaked_blocks: int
    lags: list[float]
    cpu_s: float


class Report(Struct, tag=True):
    gauges: dict[str, int]
    release_s: list[float]
    integrity: str
    peak_rss_bytes: int
    pool_bytes: int
    transports: dict[str, int] = {}


class Opened(Struct):
    """Agent and layout by which the raw NIXL loop reads this side's memory (`asynckv.tools.bench.floor`)."""

    agent: AgentInfo
    layout: Layout


class Measure(Struct, tag=True):
    """Move the wave's requests again from the opened memory, by the raw NIXL loop."""

    opened: Opened
    concurrency: int


class Sample(Struct, tag=True):
    """Report a wave that was moved without the engine."""

    ends: list[float]
    window_s: float
    num_bytes: int
    cpu_s: float
    wrong: int
    error: str = ""


class Failed(Struct, tag=True):
    """Report that the worker cannot continue; `config` is true if the input is the cause."""

    message: str
    config: bool


Command = Setup | Prepare | Do | Go | Finish | Measure
Answer = Ready | Done | Pulled | Verified | Ended | Report | Failed | Sample

MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_encoder = msgspec.json.Encoder()
commands: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def encode(message: Command | Answer) -> bytes:
    return _encoder.encode(message) + b"\n"


class Pipe:
    """The worker's end: its stdin, and its original stdout."""

    def __init__(self, reader: asyncio.StreamReader, stdout: int) -> None:
        self._reader, self._stdout = reader, stdout

    @classmethod
    async def open(cls, stdin: int, stdout: int) -> Pipe:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=LIMIT)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(stdin, "rb", 0))
        return cls(reader, stdout)

    async def read(self) -> Command | None:
        """Wait for a command; return None when the driver is gone."""
        line = await self._reader.readline()
        return commands.decode(line) if line else None

    def write(self, answer: Answer) -> None:
        """Write an answer; no effect without a driver. The driver always reads, so this does not block for long."""
        data = encode(answer)
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._stdout, data) :]
