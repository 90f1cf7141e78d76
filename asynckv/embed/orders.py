"""Orders of an engine's worker and their ends: plain values that cross threads and processes.

A step hands over a list of orders in one call, and takes all new ends as one `Finished`. Every order ends in one place,
once, also if the engine is closed meanwhile. Ends name the request's id, so an id belongs to one order of a kind at a
time: a second one is in `refused`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asynckv.errors import PullError
from asynckv.offload.found import Found
from asynckv.results import LeaseEnd, Loaded, PullResult, Stored


class Order(msgspec.Struct, frozen=True):
    """Something that an engine is to do, as plain data: it may be pickled, and sent to a worker."""


class Announce(Order, frozen=True):
    """Say that a request will be pulled: the engine meets its ranks, claims it and keeps it (`Engine.announce`).

    Ends in `Finished.refused` if it was refused, and is not reported otherwise.
    """

    request_id: str
    params: Mapping[str, Any]
    wait_s: float | None = None
    cohort_id: str = ""


class Pull(Order, frozen=True, kw_only=True):
    """Fill blocks with a lent request's KV (`Engine.pull`). Ends in `Finished.finished_recving` or `failed`, always."""

    request_id: str
    groups: Sequence[tuple[int, Sequence[int | None]]]
    params: Mapping[str, Any]
    num_tokens: int | None = None
    timeout_s: float | None = None
    cohort_id: str = ""
    hashes: Sequence[str] | None = None
    priority: int = 0
    retries: int | None = None
    is_last: bool = True


class Cancel(Order, frozen=True):
    """Give up a request that is announced, pulled, stored or loaded (`Engine.cancel`, `Offload.cancel`).

    With `params` it releases a request that this engine knows nothing of, too. Ends in `Finished.refused` if it was
    refused, else nowhere; what it gave up ends where it always does.
    """

    request_id: str
    params: Mapping[str, Any] | None = None
    cohort_id: str = ""


class Lend(Order, frozen=True):
    """Lend blocks (`Engine.lend`). Ends in `Finished.finished_sending` or `refused`, always."""

    params: Mapping[str, Any]
    num_readers: int = 1


class Withdraw(Order, frozen=True):
    """Declare that a request with params that have left will never be lent, or take it back (`Engine.withdraw`).

    Ends in `Finished.refused` if it was refused, and is not reported otherwise.
    """

    params: Mapping[str, Any]


class Reclaim(Order, frozen=True):
    """Ask for `num_blocks` blocks back: requests that were lent for long are revoked (`Engine.reclaim`).

    Ends in `Finished.refused` if it was refused, else nowhere; what it revokes ends in `Finished.finished_sending`.
    """

    num_blocks: int


class Lookup(Order, frozen=True, kw_only=True):
    """Ask how much of a prompt is kept (`Offload.lookup`). Ends in `Finished.found` or `refused`, always."""

    request_id: str
    hashes: Sequence[str | bytes]
    num_tokens: int | None = None


class Store(Order, frozen=True, kw_only=True):
    """Keep blocks outside of the accelerator (`Offload.store`). Ends in `Finished.stored` or `offload_failed`."""

    request_id: str
    groups: Sequence[tuple[int, Sequence[int | None]]]
    hashes: Sequence[str | bytes]


class Load(Order, frozen=True, kw_only=True):
    """Fill blocks with what is kept of a prompt (`Offload.load`). Ends in `Finished.loaded` or `offload_failed`."""

    request_id: str
    groups: Sequence[tuple[int, Sequence[int | None]]]
    hashes: Sequence[str | bytes]
    num_tokens: int
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A pull, load or store that ended badly.

    Attributes:
        request_id: The request's id, as in its order.
        error: What `Engine.pull`, `Offload.load` or `Offload.store` raised: an `AsyncKVError`, or else a bug. If it
            names blocks (`PullError.held`), a transfer may still write them, or a store still read them; the request's
            id follows in `returned` or `retired`, or in the lists of the same names for offload.
    """

    request_id: str
    error: Exception

    @property
    def is_held(self) -> bool:
        """Whether blocks may still be written or read. Then wait for the id in `returned` or `offload_returned`."""
        return isinstance(self.error, PullError) and bool(self.error.held)

    @property
    def is_unbegun(self) -> bool:
        """Whether it was refused before it began. Such a pull has released nothing; give a `Cancel` with its params."""
        return not getattr(self.error, "failed_in", "")


@dataclass(frozen=True, slots=True)
class Refused:
    """An order that was refused; nothing was done.

    Attributes:
        order: The order.
        error: Why: an `AsyncKVError`, or else a bug.
    """

    order: Order
    error: Exception


@dataclass(slots=True)
class Finished:
    """Orders that have ended since the last call. Each end is reported once.

    Attributes:
        finished_sending: Lent requests with blocks that are this engine's again, released or not (`LeaseEnd.cause`).
            Exception: blocks that `close` returned as cut short must not be written before the process ends.
        finished_recving: Pulls with their bytes in place; failed ones are in `failed`.
        found: Results of lookups, each with its request's id.
        stored: Stores that have ended; their blocks are the engine's again.
        loaded: Loads that have ended, with `Loaded.num_tokens` tokens in place.
        failed: Pulls that failed.
        returned: Ids of failed pulls with held blocks that nothing can write any more.
        retired: Ids of failed pulls with held blocks that must never be used again (`BlocksRetired`).
        offload_failed: Loads and stores that failed.
        offload_returned: Ids of failed loads and stores with held blocks that nothing can write or read any more.
        offload_retired: Ids of failed loads and stores with held blocks that must never be used again.
        refused: Orders that were refused. Of pulls, loads and stores only those with an id that was under way.
    """

    finished_sending: list[LeaseEnd] = field(default_factory=list)
    finished_recving: list[PullResult] = field(default_factory=list)
    found: list[tuple[str, Found]] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    loaded: list[Loaded] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)
    retired: list[str] = field(default_factory=list)
    offload_failed: list[Failed] = field(default_factory=list)
    offload_returned: list[str] = field(default_factory=list)
    offload_retired: list[str] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)
