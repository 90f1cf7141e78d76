"""The transition tables: complete, reachable, and illegal events change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import pytest

from asynckv.core import lease, peer, pull
from asynckv.core.flow import InFlight, PeerLine
from asynckv.core.lease import LeaseState
from asynckv.core.peer import Peer, PeerEvent, PeerState
from asynckv.core.pull import PullEvent, PullState
from asynckv.core.types import Address
from asynckv.errors import LocalProtocolError
from asynckv.geometry.pairing import BlockLists
from tests.world import World, make_layout

TABLES: dict[str, tuple[Any, Enum, Mapping[Any, Mapping[Any, Any]], Mapping[Any, Mapping[Any, Any]]]] = {
    "pull": (PullState, PullState.ANNOUNCED, pull.ON_EVENT, pull.WHEN),
    "lease": (LeaseState, LeaseState.LENT, lease.ON_EVENT, lease.WHEN),
    "peer": (PeerState, PeerState.NEW, peer.ON_EVENT, {}),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_state_has_a_row_and_is_reachable(name: str) -> None:
    states, start, on_event, when = TABLES[name]
    assert set(on_event) == set(states)
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for after in [*on_event[state].values(), *when.get(state, {}).values()]:
            if after not in seen:
                seen.add(after)
                todo.append(after)
    assert seen == set(states)


@pytest.mark.parametrize("state", PeerState)
@pytest.mark.parametrize("event", PeerEvent)
def test_an_impossible_peer_event_changes_nothing(state: PeerState, event: PeerEvent) -> None:
    it = Peer("engine", 0, 0, Address("tcp://127.0.0.1:1"), "incarnation", PeerLine(InFlight()), state)
    if event in peer.ON_EVENT[state]:
        it.receive(event)
        assert it.state is peer.ON_EVENT[state][event]
    else:
        with pytest.raises(LocalProtocolError, match=event.name):
            it.receive(event)
        assert it.state is state


def test_an_impossible_pull_event_changes_nothing() -> None:
    world = World()
    prefill, decode = world.add("p", make_layout()), world.add("d", make_layout(base=1 << 41))
    params = world.params([prefill], "req", [1], 4)
    it = world.pull(decode, "d-req", [1], params)
    before = (it.state, list(it.history))
    assert PullEvent.STARTED not in pull.ON_EVENT[it.state]
    with pytest.raises(LocalProtocolError, match="STARTED"):
        it.start(BlockLists(((0, np.array([2])),), params.groups, 4), 10.0, 0.0)
    assert (it.state, it.history) == before
