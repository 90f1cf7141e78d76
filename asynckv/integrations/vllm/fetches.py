"""Requests whose KV comes from another engine: who reads what, and what is said to the workers at which point.

A request that brings params is *announced* the moment it is queued, so that handshake and claim run while it waits, and
its lease is renewed for as long as it does. Then exactly one of three things happens: it gets blocks and is *pulled*,
it turns out not to need them and is *discharged*, or it ends before that, and is discharged as well. A pull that its
request did not live to see is *cancelled*; the workers report it like any other once nothing writes its blocks.

Several requests may bring the same params: a client that asks for several answers to one prompt. What was lent can be
read once, so the first of them to come is the *reader* and the others wait for it; then the local prefix cache has what
they need, and they compute the rest. A key that was used up is remembered for a while, for a sibling that comes late.

Nothing is kept of a request that has neither a claim nor a read in flight. Orders go out in the sequence in which they
were given, so that what is said of one request arrives in the sequence in which it was meant. An announcement that is
followed by what it announces before it has left is not made: most requests do not wait.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asynckv.core.types import Key, Params
from asynckv.embed.orders import Announce, Cancel, Discharge, Order, Pull
from asynckv.errors import LocalProtocolError

MAX_SPENT = 4096
"""Keys that are remembered once they were used up."""

Blocks = Sequence[tuple[int, Sequence[int | None]]]


class State(enum.Enum):
    """Where a request is."""

    ANNOUNCED = "announced"
    """Queued; its ranks are met and the claim is renewed."""
    WAITING = "waiting"
    """Queued behind a request with the same params, which reads for it."""
    LOADING = "loading"
    """Its blocks are being filled."""
    ENDING = "ending"
    """It is gone, and its blocks may still be written."""
    OVER = "over"


class Event(enum.Enum):
    """What vLLM says of a request."""

    ALLOCATED = "allocated"
    """It has blocks for what is to be read."""
    SPARED = "spared"
    """It has blocks, and nothing is to be read."""
    REPORTED = "reported"
    """All workers have said that its load is over, well or badly."""
    ENDED = "ended"
    """It finished, was aborted, rejected or failed."""


ON_EVENT: dict[State, dict[Event, State]] = {
    State.ANNOUNCED: {Event.ALLOCATED: State.LOADING, Event.SPARED: State.OVER, Event.ENDED: State.OVER},
    State.WAITING: {Event.SPARED: State.OVER, Event.ENDED: State.OVER},
    State.LOADING: {Event.REPORTED: State.OVER, Event.ENDED: State.ENDING},
    State.ENDING: {Event.REPORTED: State.OVER},
    State.OVER: {},
}
"""What does not stand here is not possible, and refused. (vLLM says more than this of requests that were over long ago;
those are not here any more.)"""


@dataclass(slots=True, eq=False)
class Fetch:
    """One request that brought params.

    Attributes:
        request_id: vLLM's.
        params: What it brought, checked.
        plain: The same, as it travels.
        state: Where it is.
        num_same: Tokens from the start on which its prompt is known to be the one that was lent.
        first_token: First token that the local prefix cache lacks, as it was last asked.
        announcement: The number of its announcement among all orders.
    """

    request_id: str
    params: Params
    plain: dict[str, Any]
    state: State = State.ANNOUNCED
    num_same: int = 0
    first_token: int = 0
    announcement: int = -1


@dataclass(slots=True)
class Fetches:
    """All of them, and the orders that are to go out with the next step."""

    _orders: dict[int, Order] = field(default_factory=dict)
    """In the sequence in which they were given, by number."""
    _num_orders: int = 0
    _by_id: dict[str, Fetch] = field(default_factory=dict)
    _readers: dict[Key, Fetch] = field(default_factory=dict)
    """Who is to read what, and has not yet."""
    _spent: dict[Key, None] = field(default_factory=dict)
    """Keys that were read or given up, oldest first."""

    def get(self, request_id: str) -> Fetch | None:
        """A request that is still announced, waiting, loading or ending."""
        return self._by_id.get(request_id)

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def has_orders(self) -> bool:
        """Something waits for the next step."""
        return bool(self._orders)

    def order(self, order: Order) -> int:
        """Give an order, which goes out with the next step."""
        self._num_orders += 1
        self._orders[self._num_orders] = order
        return self._num_orders

    def take_orders(self) -> Sequence[Order]:
        """What goes out with this step."""
        if not self._orders:
            return ()
        orders, self._orders = list(self._orders.values()), {}
        return orders

    def add(self, request_id: str, params: Params, plain: dict[str, Any]) -> bool:
        """A request was queued; False if what it brought is used up, so that it is like any other request."""
        if params.key in self._spent or request_id in self._by_id:
            return False
        fetch = self._by_id[request_id] = Fetch(request_id, params, plain)
        if params.key in self._readers:
            fetch.state = State.WAITING
        else:
            self._readers[params.key] = fetch
            fetch.announcement = self.order(Announce(request_id, plain))
        return True

    def limit(self, request_id: str, num_same: int) -> None:
        """So many tokens of a request are those that were lent."""
        self._by_id[request_id].num_same = num_same

    def must_wait(self, fetch: Fetch) -> bool:
        """Another request reads the same, and will have it in the prefix cache."""
        return fetch.state is State.WAITING and fetch.params.key in self._readers

    def allocate(self, fetch: Fetch, blocks: Blocks, num_tokens: int, priority: int = 0) -> None:
        """It has blocks: read into them."""
        self._move(fetch, Event.ALLOCATED)
        self.order(
            Pull(
                request_id=fetch.request_id,
                groups=blocks,
                params=fetch.plain,
                num_tokens=num_tokens,
                priority=priority,
            )
        )

    def spare(self, fetch: Fetch) -> None:
        """It needs nothing of what was lent."""
        self._move(fetch, Event.SPARED)

    def report(self, request_id: str) -> None:
        """All workers said that a load is over. (Of requests that were lent this is said as well.)"""
        if (fetch := self._by_id.get(request_id)) is not None:
            self._move(fetch, Event.REPORTED)

    def end(self, request_id: str) -> None:
        """A request finished, whatever it was at."""
        if (fetch := self._by_id.get(request_id)) is not None:
            self._move(fetch, Event.ENDED)

    def _move(self, fetch: Fetch, event: Event) -> None:
        before, after = fetch.state, ON_EVENT[fetch.state].get(event)
        if after is None:
            raise LocalProtocolError(f"request {fetch.request_id!r} is {before.value}: {event.value} is not possible")
        fetch.state = after
        if before is State.ANNOUNCED:
            self._orders.pop(fetch.announcement, None)
            if after is State.OVER:
                self.order(Discharge(fetch.request_id, fetch.plain))
        if after is State.ENDING:
            self.order(Cancel(fetch.request_id))
        if after is State.OVER:
            del self._by_id[fetch.request_id]
            if before is not State.WAITING:
                self._spend(fetch.params.key)

    def _spend(self, key: Key) -> None:
        del self._readers[key]
        self._spent[key] = None
        if len(self._spent) > MAX_SPENT:
            del self._spent[next(iter(self._spent))]
