"""The reading side of a rank, put together: what it knows of ranks that were lost and met anew, and what it lets go."""

from __future__ import annotations

import math

import pytest

from asynckv.core import decode as decode_side
from asynckv.core.peer import PeerState
from asynckv.core.types import Address, Reason
from tests.test_admission import ask, world_of
from tests.test_sources import Pair


def test_what_still_ran_of_a_rank_that_was_met_anew_keeps_nothing_loaded_once_it_has_ended() -> None:
    """The data plane counts who uses an agent: one that was never given back would stay loaded for ever."""
    world, (prefill,), decode = world_of()
    ask(world, prefill, decode, 1)
    world.deliver_all()
    [transfer] = decode.reads
    decode.core.decode.forget(prefill.address, world.time(decode))
    world.settle(decode)
    for _ in range(40):
        world.advance(0.25)
        world.deliver_all()
    again = ask(world, prefill, decode, 2)
    world.deliver_all()
    assert decode.nic.remotes["agent-p0"].users == 2
    world.complete(decode, transfer)
    assert decode.nic.remotes["agent-p0"].users == 1
    world.run()
    assert again.reason is Reason.COMPLETE


@pytest.mark.parametrize("said", ["tcp://prefill:5557", "tcp://prefill:5557#key"])
def test_a_router_that_knows_no_keys_forgets_a_rank_all_the_same(said: str) -> None:
    world, (prefill,), decode = world_of()
    prefill.address = Address("tcp://prefill:5557#key")
    prefill.open()
    pull = ask(world, prefill, decode, 1)
    world.deliver_all()
    for other in ("tcp://prefill:555", "tcp://prefill", ""):
        decode.core.decode.forget(Address(other), world.time(decode))
    assert pull.failure is None
    decode.core.decode.forget(Address(said), world.time(decode))
    assert pull.failure == (Reason.PEER_LOST, "forgotten by request")
    assert [peer.state for peer in decode.core.decode.peers.by_place.values()] == [PeerState.GONE]


def test_a_request_that_was_let_go_is_not_read_though_its_ranks_are_ready() -> None:
    world, (prefill,), decode = world_of()
    ask(world, prefill, decode, 1)
    world.run()
    params = world.params([prefill], "r", [2], 4, written=True)
    world.lend(prefill, params)
    decode.core.decode.abandoned[params.key] = "it was let go"
    pull = world.pull(decode, "d", [2], params)
    assert (pull.reason, pull.detail, decode.reads) == (Reason.STANDSTILL, "it was let go", {})
    world.check()


def test_of_requests_that_were_let_go_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_side, "MAX_ABANDONED", 3)
    world, (prefill,), decode = world_of()
    made = [world.params([prefill], f"r{i}", [i], 4) for i in range(5)]
    for i, params in enumerate(made):
        pull = decode.core.announce(f"d{i}", params, "", 30.0, world.time(decode))
        decode.core.decode._abandon(pull, world.time(decode))
    assert list(decode.core.decode.abandoned) == [params.key for params in made[2:]]


def test_nobody_is_woken_for_a_pull_that_is_over() -> None:
    """Its deadline is far away, and a pull that waits for it is kept, with all that it has read."""
    world, (prefill,), decode = world_of()
    pull = ask(world, prefill, decode, 1, timeout=500.0)
    world.deliver_all()
    assert pull.scheduled_at < math.inf
    world.run()
    assert (pull.is_over, pull.scheduled_at) == (True, math.inf)


def test_a_replica_that_was_forgotten_is_released_as_any_other() -> None:
    """What is known of ranks that are read holds no longer than what is known of those that are only released."""
    it = Pair(4, 1, heads=2)
    decode = it.decode[0]
    for number in range(2):
        params, leases = it.lend([3], 4)
        pull = it.world.pull(decode, f"d{number}", [9], params)
        it.world.run()
        assert pull.unanswered == ()
        assert all(lease.is_over for lease in leases)
        peers = decode.core.decode.peers
        for peer in [p for p in peers.by_place.values() if p.state is PeerState.NEW]:
            peers._drop(peer)
            it.world.settle(decode)
        assert len(peers.by_place) == 2
    it.world.check()
