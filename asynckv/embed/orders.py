"""Orders from an engine's worker and their results, as plain values that may cross threads and processes.

A step submits a list of orders in one call, and takes all new results as one `Finished`. Every `Follow`, `Pull`,
`Load`, `Store`, `Lend` and `Lookup` has its end in one list, once, even if the engine is closed meanwhile; failed ones
that still hold blocks are also in `returned` or `retired` later. Other orders are reported only if they are refused.
Results name the request's id, so an id belongs to one order of a kind at a time. A second is reported in `refused`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asynckv.errors import PullError
from asynckv.offload.found import Found
from asynckv.results import LeaseEnd, Loaded, PullResult, Stored
from asynckv.told import PromptsCounted


class Order(msgspec.Struct, frozen=True):
    """Base class of all orders: plain data that may be pickled and sent to a worker."""

    def __repr__(self) -> str:
        """Leave keys and tickets out, because texts such as tracebacks must not reveal them."""
        names = [name for name in self.__struct_fields__ if name not in ("params", "follow", "ticket")]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


class Follow(Order, frozen=True):
    """Wait until the request of a ticket is lent (`Engine.follow`). Always reported: `Finished.offered`, `not_offered`
    or `refused`. A late offer follows `not_offered`."""

    request_id: str
    follow: Mapping[str, Any]
    wait_s: float | None = None
    cohort_id: str = ""
    takes_pieces: bool = False  # True to be told of a first piece too, in an offer of its own (`Offer.is_piece`)


class StartEarly(Order, frozen=True, kw_only=True):
    """Fill the blocks of a request that is followed with pieces, the first of which `params` describe.

    Give `Pull(goes_on=True)` when it is offered, or `Cancel`. Always reported as its pull, once.
    """

    request_id: str
    groups: Sequence[tuple[int, Sequence[int | None]]]
    params: Mapping[str, Any]
    num_tokens: int | None = None
    cohort_id: str = ""
    hashes: Sequence[str] | None = None


class Announce(Order, frozen=True):
    """Say that a request will be pulled: the engine connects, claims it and renews its lease (`Engine.announce`)."""

    request_id: str
    params: Mapping[str, Any]
    wait_s: float | None = None
    cohort_id: str = ""


class Pull(Order, frozen=True, kw_only=True):
    """Fill blocks with a lent request's KV (`Engine.pull`). Always reported: `Finished.finished_recving`, `failed` or
    `refused`. With `goes_on` its `StartEarly` is reported instead, once for both.
    """

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
    goes_on: bool = False  # True behind a `StartEarly` with the same blocks; nothing if that has failed since


class Cancel(Order, frozen=True):
    """Give up a request that is followed, announced, pulled, stored or loaded (`Engine.cancel`, `Offload.cancel`).

    With `params` it also releases a request that this engine does not know. What it ends is reported as usual. With
    `follows_on` a follow goes on, and what it is offered is released at once.
    """

    request_id: str
    params: Mapping[str, Any] | None = None
    cohort_id: str = ""
    follows_on: bool = False


class Lend(Order, frozen=True):
    """Lend blocks (`Engine.lend`). Always reported: in `Finished.finished_sending` or `refused`."""

    params: Mapping[str, Any]
    num_readers: int = 1
    ticket: str = ""


class Withdraw(Order, frozen=True):
    """Declare that a request will never be lent although its params were sent, or take it back (`Engine.withdraw`)."""

    params: Mapping[str, Any]


class WithdrawTicket(Order, frozen=True):
    """Declare that no request will be lent for a ticket (`Engine.withdraw_ticket`)."""

    ticket: str


class LendPiece(Order, frozen=True):
    """Lend finished blocks of a request that is still computed (`Engine.lend_piece`). No end is reported."""

    params: Mapping[str, Any]
    ticket: str


class EndPieces(Order, frozen=True):
    """Take back all pieces of a request (`Engine.end_pieces`)."""

    ticket: str


class Reclaim(Order, frozen=True):
    """Ask for `num_blocks` blocks back, by revoking requests that were lent for long (`Engine.reclaim`).

    Revoked requests are reported in `Finished.finished_sending`.
    """

    num_blocks: int


class CountPrompts(Order, frozen=True):
    """Pass on what the scheduler counts, for logs, metrics and `asynckv why`."""

    counted: PromptsCounted


class Lookup(Order, frozen=True, kw_only=True):
    """Ask how much of a prompt is stored (`Offload.lookup`). Always reported: in `Finished.found` or `refused`."""

    request_id: str
    hashes: Sequence[str | bytes]
    num_tokens: int | None = None


class Store(Order, frozen=True, kw_only=True):
    """Store blocks outside the accelerator (`Offload.store`). Always reported: `Finished.stored`, `offload_failed` or
    `refused`."""

    request_id: str
    groups: Sequence[tuple[int, Sequence[int | None]]]
    hashes: Sequence[str | bytes]


class Load(Order, frozen=True, kw_only=True):
    """Fill blocks with the stored KV of a prompt (`Offload.load`). Always reported: `Finished.loaded`, `offload_failed`
    or `refused`."""

    request_id: str
    groups: Sequence[tuple[int, Sequence[int | None]]]
    hashes: Sequence[str | bytes]
    num_tokens: int
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A failed follow, pull, load or store.

    Attributes:
        request_id: The request's id, as in its order.
        error: Exception that `Engine.follow`, `Engine.pull`, `Offload.load` or `Offload.store` raised. Any other type
            than `AsyncKVError` is a bug. If it names blocks (`PullError.held`), a transfer may still write them, or a
            store may still read them. The request's id then follows in `returned` or `retired` (`offload_returned` or
            `offload_retired` for offload).
    """

    request_id: str
    error: Exception

    @property
    def is_held(self) -> bool:
        """True if blocks may still be written or read. Wait for the id in `returned` or `offload_returned`."""
        return isinstance(self.error, PullError) and bool(self.error.held)

    @property
    def is_unbegun(self) -> bool:
        """True if it was refused before it began. Such a pull released nothing, so `Cancel` it with its params."""
        return not getattr(self.error, "failed_in", "")


@dataclass(frozen=True, slots=True)
class Offer:
    """The params of a request that was followed.

    Attributes:
        request_id: The request's id, as in its `Follow`.
        params: The params, as `Announce` and `Pull` take them.
        is_late: True if it was reported in `not_offered` before. This rank has released it; the others have to.
        is_piece: True if they are of a first piece: give the request blocks (`StartEarly`), or leave it. It is followed
            on, and the offer of the whole comes later.
    """

    request_id: str
    params: dict[str, Any] = field(repr=False)
    is_late: bool = False
    is_piece: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """An order that was refused and had no effect.

    Attributes:
        order: The order.
        error: Reason of the refusal. Any other type than `AsyncKVError` is a bug.
    """

    order: Order
    error: Exception


@dataclass(slots=True)
class Finished:
    """Results of orders since the last call. Each result is reported once.

    Attributes:
        finished_sending: Lent requests that ended, released or not (`LeaseEnd.cause`). Their blocks may be reused.
            Exception: blocks that `close` returned as cut short must not be written before the process ends.
        finished_recving: Pulls that completed: their KV is in place.
        offered: Followed requests with their params.
        followed: Tickets of followers that wait for a piece of the request (`LendPiece`).
        not_offered: Followed requests that are not offered.
        found: Results of lookups, each with its request's id.
        stored: Stores that completed. Their blocks may be reused.
        loaded: Loads that completed, with `Loaded.num_tokens` tokens in place.
        failed: Pulls that failed.
        returned: Ids of failed pulls. Their held blocks can no longer be written, so they may be reused.
        retired: Ids of failed pulls. Their held blocks must never be used again (`BlocksRetired`).
        offload_failed: Loads and stores that failed.
        offload_returned: Ids of failed loads and stores. Their held blocks can no longer be written or read.
        offload_retired: Ids of failed loads and stores. Their held blocks must never be used again.
        refused: Refused orders. A follow, pull, load or store is here only if its id was in flight already.
    """

    finished_sending: list[LeaseEnd] = field(default_factory=list)
    finished_recving: list[PullResult] = field(default_factory=list)
    offered: list[Offer] = field(default_factory=list)
    followed: list[str] = field(default_factory=list)
    not_offered: list[Failed] = field(default_factory=list)
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
