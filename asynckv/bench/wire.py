"""What the parent and its workers say to each other, over one socket pair per worker.

A frame is four bytes of length and a msgpack `(call, message)`. Every command gets one reply under the
number of its call; news that nobody asked for has number 0.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from msgspec import Struct

from asynckv.bench.pool import PoolSpec
from asynckv.core.types import Endpoint

__all__ = [
    "Close",
    "Closed",
    "Command",
    "Crashed",
    "Done",
    "Fill",
    "Finish",
    "Finished",
    "Job",
    "Lend",
    "Load",
    "News",
    "Pulled",
    "Ready",
    "Reply",
    "Run",
    "Settle",
    "Settled",
    "Start",
    "Stop",
    "Verified",
    "Verify",
    "read_frame",
    "write_frame",
]

Runs = tuple[tuple[int, int], ...]


# -- from the parent ---------------------------------------------------------------------------------


class Start(Struct, frozen=True, tag=True):
    """Be this rank. Answered by `Ready` or `Crashed`."""

    role: str
    pool: PoolSpec
    seed: int
    verify: str
    lease_s: float
    timeout_s: float
    concurrency: int
    bind: str
    backend: str
    log_path: str
    log_level: str


class Job(Struct, frozen=True, array_like=True):
    """One request on one rank."""

    request: int
    runs: Runs
    num_tokens: int = 0
    params: dict[str, Any] = {}


class Fill(Struct, frozen=True, tag=True):
    """Prefill: fill these requests' blocks. Answered by `Done`."""

    jobs: tuple[Job, ...]


class Lend(Struct, frozen=True, tag=True):
    """Prefill: lend them. Answered by `Done`."""

    jobs: tuple[Job, ...]


class Load(Struct, frozen=True, tag=True):
    """Decode: these will be pulled next. Answered by `Done`."""

    jobs: tuple[Job, ...]


class Run(Struct, frozen=True, tag=True):
    """The window opens. Prefill answers `Done` at once, decode `Pulled` once all jobs ended."""


class Close(Struct, frozen=True, tag=True):
    """Prefill: the window closed. Answered by `Closed`."""


class Verify(Struct, frozen=True, tag=True):
    """Decode: compare the blocks of what was pulled, then free them. Answered by `Verified`."""


class Settle(Struct, frozen=True, tag=True):
    """Prefill: wait until every lease ended, revoking them first if nobody will come."""

    timeout_s: float
    revoke: bool


class Stop(Struct, frozen=True, tag=True):
    """Decode: cancel what is under way, start nothing more. Answered by `Done`."""


class Finish(Struct, frozen=True, tag=True):
    """Drain, take stock, close. Answered by `Finished`; then the worker exits."""

    timeout_s: float


Command = Start | Fill | Lend | Load | Run | Close | Verify | Settle | Stop | Finish


# -- from a worker -----------------------------------------------------------------------------------


class Ready(Struct, frozen=True, tag=True):
    """The engine runs."""

    pid: int
    endpoint: Endpoint
    describe: dict[str, str]


class Crashed(Struct, frozen=True, tag=True):
    """A command could not be done. `is_input`: the user's configuration is at fault."""

    message: str
    is_input: bool


class Done(Struct, frozen=True, tag=True):
    """It is done."""


class Pulled(Struct, frozen=True, tag=True):
    """What became of a wave on one decode rank; columns, one entry per job that was started.

    Attributes:
        causes: Empty for success, else `ErrorName: text`.
        began: On the host's monotonic clock, which all processes share.
        held: Blocks that a failed pull still holds.
        not_started: Requests that were given up before they were started.
    """

    requests: list[int]
    causes: list[str]
    began: list[float]
    took: list[float]
    num_bytes: list[int]
    phases: dict[str, list[float]]
    held: list[int]
    not_started: list[int]
    opened_at: float
    closed_at: float
    cpu_s: float
    lag: list[float]


class Closed(Struct, frozen=True, tag=True):
    """What a window cost a prefill rank."""

    cpu_s: float
    lag: list[float]


class Verified(Struct, frozen=True, tag=True):
    """What comparing gave."""

    num_bytes: int
    num_wrong: int
    wrong_requests: list[int]


class Settled(Struct, frozen=True, tag=True):
    """How a wave's leases ended.

    Attributes:
        causes: Leases by cause; `open` did not end in time.
        expired: `(request id, owed readers)` of those that were not released.
    """

    causes: dict[str, int]
    expired: list[tuple[str, tuple[str, ...]]]


class Finished(Struct, frozen=True, tag=True):
    """Last words of a worker."""

    num_leaked: int
    num_quarantined: int
    integrity: str
    peak_rss_bytes: int
    release_s: list[float]
    counters: dict[str, int]
    gauges: dict[str, int]
    describe: dict[str, str]


class News(Struct, frozen=True, tag=True):
    """Progress within a window."""

    num_done: int
    num_bytes: int


Reply = Ready | Crashed | Done | Pulled | Closed | Verified | Settled | Finished | News


def write_frame(writer: asyncio.StreamWriter, call: int, message: Command | Reply) -> None:
    """Queue one frame."""
    body = msgspec.msgpack.encode((call, message))
    writer.write(len(body).to_bytes(4, "big") + body)


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Read one frame's body; None once the other side is gone."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
