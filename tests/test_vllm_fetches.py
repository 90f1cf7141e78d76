"""The life of a request whose KV comes from another engine, without vLLM: the table, and what is ordered on the way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import pytest

from asynckv.core.types import Params, decode_params
from asynckv.embed.orders import Announce, Cancel, Discharge, Order, Pull
from asynckv.errors import LocalProtocolError
from asynckv.integrations.vllm.fetches import MAX_SPENT, ON_EVENT, Event, Fetch, Fetches, State
from asynckv.integrations.vllm.shape import CacheGroup, Shape
from asynckv.scheduler import PrefillGroup

GROUP = PrefillGroup("prefill", [{"tp_rank": 0, "address": "tcp://127.0.0.1:1", "incarnation": "a"}])


def brought() -> tuple[Params, dict[str, Any]]:
    """Params that nobody has seen."""
    params = decode_params(GROUP.make_params("there", [(0, [1, 2])], 32, written=True))
    return params, msgspec.to_builtins(params)


def kinds(fetches: Fetches) -> list[type[Order]]:
    return [type(order) for order in fetches.take_orders()]


def act(fetches: Fetches, fetch: Fetch, event: Event) -> None:
    match event:
        case Event.ALLOCATED:
            fetches.allocate(fetch, [(0, [1, 2])], 32)
        case Event.SPARED:
            fetches.spare(fetch)
        case Event.REPORTED:
            fetches.report(fetch.request_id)
        case Event.ENDED:
            fetches.end(fetch.request_id)


def at(state: State) -> tuple[Fetches, Fetch]:
    """A request in a state, whose orders have left."""
    fetches, (params, plain) = Fetches(), brought()
    if state is State.WAITING:
        fetches.add("reader", params, plain)
    fetches.add("a", params, plain)
    fetch = fetches.get("a")
    assert fetch is not None
    way = {State.LOADING: [Event.ALLOCATED], State.ENDING: [Event.ALLOCATED, Event.ENDED], State.OVER: [Event.SPARED]}
    for event in way.get(state, []):
        act(fetches, fetch, event)
    assert fetch.state is state
    fetches.take_orders()
    return fetches, fetch


@pytest.mark.parametrize("state", [s for s in State if s is not State.OVER])
@pytest.mark.parametrize("event", Event)
def test_every_event_in_every_state_does_what_the_table_says(state: State, event: Event) -> None:
    fetches, fetch = at(state)
    after = ON_EVENT[state].get(event)
    if after is None:
        with pytest.raises(LocalProtocolError, match=rf"is {state.value}: {event.value}"):
            act(fetches, fetch, event)
        assert fetch.state is state
        assert not fetches.has_orders
        return
    act(fetches, fetch, event)
    assert fetch.state is after
    assert (fetches.get("a") is None) is (after is State.OVER)
    ordered: dict[tuple[State, State], list[type[Order]]] = {
        (State.ANNOUNCED, State.LOADING): [Pull],
        (State.ANNOUNCED, State.OVER): [Discharge],
        (State.LOADING, State.ENDING): [Cancel],
    }
    assert kinds(fetches) == ordered.get((state, after), [])


def test_what_is_said_of_requests_that_are_not_here_is_not_heard() -> None:
    fetches = Fetches()
    fetches.report("somebody")
    fetches.end("somebody")
    assert not fetches.has_orders
    assert fetches.get("somebody") is None


def test_a_request_that_was_just_queued_has_nothing_yet_and_the_first_order_is_number_1() -> None:
    fetches = Fetches()
    assert fetches.add("a", *brought())
    fetch = fetches.get("a")
    assert fetch is not None
    assert (fetch.num_same, fetch.first_token, fetch.announcement) == (0, 0, 1)


def test_an_announcement_is_made_unless_what_it_announces_comes_at_once() -> None:
    for event in (Event.ALLOCATED, Event.SPARED, Event.ENDED):
        for has_left in (False, True):
            fetches, (params, plain) = Fetches(), brought()
            fetches.add("a", params, plain)
            first = kinds(fetches) if has_left else []
            fetch = fetches.get("a")
            assert fetch is not None
            act(fetches, fetch, event)
            assert [*first, *kinds(fetches)] == [Announce] * has_left + [
                Pull if event is Event.ALLOCATED else Discharge
            ]


def test_orders_leave_in_the_sequence_in_which_they_were_given() -> None:
    fetches = Fetches()
    for name in "abc":
        fetches.add(name, *brought())
    (b,) = [fetches.get("b")]
    assert b is not None
    fetches.allocate(b, [(0, [1, 2])], 32, priority=3)
    fetches.end("b")
    orders = fetches.take_orders()
    assert [(type(order), getattr(order, "request_id", None)) for order in orders] == [
        (Announce, "a"),
        (Announce, "c"),
        (Pull, "b"),
        (Cancel, "b"),
    ]
    assert isinstance(orders[2], Pull)
    assert orders[2].priority == 3
    assert fetches.take_orders() == ()


def test_siblings_wait_for_the_first_and_read_nothing_themselves() -> None:
    fetches, (params, plain) = Fetches(), brought()
    assert fetches.add("a", params, plain)
    assert fetches.add("b", params, plain)
    a, b = fetches.get("a"), fetches.get("b")
    assert a is not None
    assert b is not None
    assert (fetches.must_wait(a), fetches.must_wait(b)) == (False, True)
    fetches.allocate(a, [(0, [1, 2])], 32)
    assert fetches.must_wait(b)
    fetches.report("a")
    assert not fetches.must_wait(b)
    fetches.spare(b)
    assert kinds(fetches) == [Pull]
    assert not fetches.add("c", params, plain)
    assert len(fetches) == 0


def test_keys_that_were_used_up_are_remembered_for_a_while_and_no_longer() -> None:
    fetches, first = Fetches(), brought()
    for i in range(MAX_SPENT + 1):
        params, plain = first if i == 0 else brought()
        assert fetches.add(f"r{i}", params, plain)
        assert not fetches.add(f"r{i}", params, plain)
        fetches.end(f"r{i}")
    assert not fetches.add("again", params, plain)
    assert fetches.add("again", *first)


@pytest.mark.parametrize("seed", range(30))
def test_any_life_orders_one_read_or_one_discharge_per_key_and_leaves_nothing(seed: int) -> None:
    chance, fetches, alive = random.Random(seed), Fetches(), list[Fetch]()
    keys, seen = [brought() for _ in range(8)], list[Order]()
    for step in range(300):
        if chance.random() < 0.4:
            name = f"r{step}"
            if fetches.add(name, *chance.choice(keys)):
                fetch = fetches.get(name)
                assert fetch is not None
                alive.append(fetch)
        elif alive:
            fetch = chance.choice(alive)
            possible = [e for e in ON_EVENT[fetch.state] if e is not Event.SPARED or not fetches.must_wait(fetch)]
            if possible:
                act(fetches, fetch, chance.choice(possible))
        alive = [fetch for fetch in alive if fetch.state is not State.OVER]
        if chance.random() < 0.5:
            seen += fetches.take_orders()
    for fetch in alive:
        while fetch.state is not State.OVER:
            act(fetches, fetch, Event.ENDED if Event.ENDED in ON_EVENT[fetch.state] else Event.REPORTED)
    seen += fetches.take_orders()
    ends = Counter(str(order.params["key"]) for order in seen if isinstance(order, Pull | Discharge))
    assert set(ends.values()) <= {1}
    announced = [order.request_id for order in seen if isinstance(order, Announce)]
    ended = [order.request_id for order in seen if isinstance(order, Pull | Discharge)]
    assert len(set(announced)) == len(announced)
    assert set(announced) <= set(ended)
    where = {order.request_id: i for i, order in enumerate(seen) if isinstance(order, Pull | Discharge)}
    for i, order in enumerate(seen):
        if isinstance(order, Announce):
            assert i < where[order.request_id]
        elif isinstance(order, Cancel):
            assert i > where[order.request_id]
    assert len(fetches) == 0
    assert not fetches.has_orders


# -- vLLM's lists of blocks ---------------------------------------------------------------------------


class Block(NamedTuple):
    """One of vLLM's blocks, as far as anybody looks at it here."""

    block_id: int
    block_hash: str | None

    @property
    def is_null(self) -> bool:
        return self.block_id == 0


class Listed(NamedTuple):
    """A request's blocks, as vLLM hands them over."""

    blocks: Sequence[Sequence[Block]]

    def get_block_ids(self) -> list[list[int]]:
        return [[block.block_id for block in blocks] for blocks in self.blocks]


def new(*groups: Sequence[int], cached: Sequence[int] = ()) -> Listed:
    return Listed([[Block(i, "hash" if i in cached else None) for i in ids] for ids in groups])


TOKENS, WINDOW, STATE = CacheGroup(0, 16), CacheGroup(2, 32, is_window=True), CacheGroup(3, 64, is_state=True)
SLOT = CacheGroup(1, 4096, is_state=True)


def test_lists_begin_in_the_block_of_the_first_token_and_end_with_the_last() -> None:
    shape = Shape((TOKENS,), 0)
    assert shape.missing(new([5, 6, 7, 8, 9]), 0, 64) == [(0, [5, 6, 7, 8])]
    assert shape.missing(new([5, 6, 7, 8, 9]), 32, 65) == [(32, [7, 8, 9])]
    assert shape.missing(new([5, 6, 7, 8, 9]), 40, 65) == [(40, [7, 8, 9])]
    assert shape.held([[5, 6, 7, 8, 9]], 70) == [(0, [5, 6, 7, 8, 9])]


def test_groups_that_are_not_transferred_are_left_out_and_the_others_keep_their_block_sizes() -> None:
    shape = Shape((TOKENS, WINDOW), 1)
    lists: list[list[int]] = [[1, 2, 3, 4, 5, 6, 7], [99], [0, 0, 8, 9]]
    assert shape.held(lists, 100) == [(0, [1, 2, 3, 4, 5, 6, 7]), (64, [8, 9])]
    assert shape.missing(new(*lists, cached=[8]), 96, 100) == [(96, [7]), (96, [9])]


def test_of_a_window_that_is_not_cached_as_far_as_the_rest_the_whole_is_read() -> None:
    shape = Shape((TOKENS, WINDOW), 1)
    lists: list[list[int]] = [[1, 2, 3, 4, 5, 6, 7], [99], [0, 10, 8, 9]]
    assert shape.missing(new(*lists, cached=[1, 2, 3, 4, 5, 6]), 96, 100) == [(96, [7]), (32, [10, 8, 9])]
    assert shape.missing(new(*lists, cached=[1, 2, 3, 4, 5, 6, 10]), 96, 100) == [(96, [7]), (64, [8, 9])]
    assert shape.missing(new(*lists), 80, 100) == [(80, [6, 7]), (32, [10, 8, 9])]


def test_gaps_are_none() -> None:
    assert Shape((WINDOW,), 1).held([[], [], [3, 0, 4]], 96) == [(0, [3, None, 4])]


def test_of_the_states_only_the_last_is_listed() -> None:
    shape = Shape((STATE, SLOT), 1)
    assert shape.has_states
    lists: list[list[int]] = [[], [7, 8, 9], [], [1, 0, 2, 3]]
    assert shape.held(lists, 129) == [(128, [2]), (0, [7])]
    assert shape.held(lists, 128) is None  # that state is gone
    assert shape.missing(new(*lists), 0, 256) == [(192, [3]), (0, [7])]


def test_nothing_is_held_where_there_is_no_block() -> None:
    assert Shape((TOKENS, WINDOW), 0).held([[], [], []], 10) is None
    assert Shape((SLOT,), 1).held([[], []], 10) is None
