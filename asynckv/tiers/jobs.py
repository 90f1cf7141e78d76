"""A store or a load, its callers, and the custody of its blocks.

The outcome is bounded in time and the custody of the blocks is not, so callers wait for them separately, as for a pull.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from asynckv.core.types import Waiter
from asynckv.errors import BlocksRetired, EngineClosed, PullCancelled, PullError, PullTimeout, ReadFailed
from asynckv.geometry.blocks import BlockList
from asynckv.geometry.bounds import Int64s
from asynckv.offload.catalogue import Positions
from asynckv.offload.job import JobEnded, JobKind, JobOutcome
from asynckv.tiers.shelf import Shelf

Shorter = Callable[["OffloadJob"], tuple[int, Mapping[Shelf, Positions]] | None]
"""Says which prefix can still be loaded, and which blocks of which shelves make it up."""


@dataclass(eq=False)
class OffloadJob:
    """One job of the catalogue, and its caller's blocks."""

    job_id: str
    request_id: str
    kind: JobKind
    blocks: Sequence[BlockList]  # per group of the layout, the caller's list
    ids: Mapping[int, Int64s]  # per group of the layout, those of its blocks that are read or written
    begun_at: float
    until: float
    chain: list[bytes]
    tokens: int  # of the prefix that is being loaded: `wanted`, or less if some of it is lost
    shorter: Shorter | None  # of a load, says what is left of it where some of it is lost; None once it is given up
    waiter: Waiter[OffloadJob] | None = None
    num_bytes: int = 0
    file_bytes: int = 0
    retired_at: float = math.inf
    is_retired: bool = False
    is_free: bool = False
    parts: dict[str, JobEnded | None] = field(default_factory=dict)  # by shelf: a prefix may be on several
    held_by: set[str] = field(default_factory=set)  # shelves that may still touch the blocks, though it has ended there
    ended: JobEnded | None = None
    ended_at: float = math.inf
    is_over: asyncio.Event = field(default_factory=asyncio.Event)  # set once it has ended, or was closed before its end
    is_returned: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.wanted = self.tokens

    # -- as the engine's inspector sees it -----------------------------------------------------------

    @property
    def what(self) -> str:
        return self.kind.value

    @property
    def held_as(self) -> tuple[str, float]:
        """Why it holds blocks, and until when at most."""
        if self.is_retired:
            return "retired", math.inf
        if self.ended is not None:
            return "quarantined", self.retired_at
        return ("storing" if self.kind is JobKind.STORE else "loading"), self.until

    def waits_for(self) -> tuple[str, ...]:
        return ("a copy in doubt",) if self.ended is not None else ("the host tier",)

    # -- its end -------------------------------------------------------------------------------------

    def end(self, now: float, held_s: float) -> JobEnded:
        """It has ended everywhere; its blocks may follow. Returns what counts: the first that was not well."""
        parts = [part for part in self.parts.values() if part is not None]
        worst = sorted(parts, key=lambda part: (part.outcome is JobOutcome.DONE, part.cause == ""))[0]
        blocks = sum(part.blocks for part in parts)
        ended = self.ended = structs.replace(worst, blocks=blocks, is_held=bool(self.held_by))
        self.ended_at = now
        if ended.is_held:
            self.retired_at = now + held_s
        self.is_over.set()
        return ended

    def closed(self) -> None:
        if self.ended is None:
            self.is_over.set()
            self.tell_ended()

    def tell_ended(self) -> None:
        if self.waiter is not None:
            self.waiter.ended(self)

    def tell_returned(self) -> None:
        """Say that nothing touches the blocks any more, or that they are given up."""
        self.is_returned.set()
        if self.waiter is not None:
            self.waiter.returned(self, not self.is_free)

    def how_it_ended(self) -> JobEnded:
        """Return the end; raise an error if the job was given up or closed, or its blocks are held."""
        if (ended := self.ended) is None:
            raise EngineClosed("the offload was closed")
        if ended.is_held or ended.outcome is JobOutcome.CANCELLED:
            raise self.error()
        return ended

    async def until_returned(self) -> None:
        """Wait for the blocks; raise `BlocksRetired` if they were given up."""
        await self.is_returned.wait()
        if self.is_retired and not self.is_free:
            raise BlocksRetired("a copy that does not end may still write these blocks; never use them again")

    def error(self) -> PullError:
        """Return the error of a call with blocks that may still be in use, or that was cancelled by its id."""
        ended = self.ended
        assert ended is not None
        kinds: Mapping[JobOutcome, type[PullError]] = {
            JobOutcome.CANCELLED: PullCancelled,
            JobOutcome.TIMEOUT: PullTimeout,
        }
        touch = "write" if self.kind is JobKind.LOAD else "read"
        return kinds.get(ended.outcome, ReadFailed)(
            f"request {self.request_id[:200]!r}: its {self.kind.value} ended as {ended.outcome.value}"
            f"{f' ({ended.cause})' if ended.cause else ''}"
            f"{f'; a copy may still {touch} the blocks that are held' if ended.is_held else ''}",
            request_id=self.request_id,
            pull_id=self.job_id,
            reason=ended.outcome.value,
            held={g: tuple(ids.tolist()) for g, ids in self.ids.items()} if ended.is_held else {},
            wait_returned=self.until_returned,
            failed_in=self.kind.value,
        )
