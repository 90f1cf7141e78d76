"""The reading side of a rank, put together: what it knows of ranks that were lost and met anew, and what it lets go."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from msgspec import structs

from asynckv.core import decode as decode_side
from asynckv.core.flow import InFlight
from asynckv.core.peer import TOMBSTONE_S, PeerState
from asynckv.core.pull import PullRequest, PullState
from asynckv.core.types import Address, Reason, TransferId
from asynckv.core.wire import MINOR, Hello, Welcome
from asynckv.errors import LocalProtocolError, Overloaded
from asynckv.geometry import tables
from tests.test_admission import ask, asking, world_of
from tests.test_peers import said, say, welcome
from tests.test_sources import Pair
from tests.world import World, make_layout


def test_what_still_ran_of_a_rank_that_was_met_anew_keeps_nothing_loaded_once_it_has_ended() -> None:
    """The data plane counts who uses an agent: one that was never given back would stay loaded for ever."""
    world, (prefill,), decode = world_of()
    ask(world, prefill, decode, 1)
    world.deliver_all()
    [transfer] = decode.reads
    world.forget(decode, prefill.address)
    world.live(10.0, 0.25)
    again = ask(world, prefill, decode, 2)
    world.deliver_all()
    assert decode.nic.remotes["agent-p0"].users == 2
    world.complete(decode, transfer)
    assert decode.nic.remotes["agent-p0"].users == 1
    world.run()
    assert again.reason is Reason.COMPLETE
    [peer] = decode.core.decode.peers.by_place.values()
    world.advance(TOMBSTONE_S + 10.0)
    world.run()
    assert list(decode.core.decode.peers.by_place.values()) == [peer], "it was met anew, and is not forgotten for that"


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
    params, _ = world.lent(prefill, "r", [2], written=True)
    decode.core.decode.abandoned[params.key] = (0.0, "it was let go")
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


def test_a_pull_that_is_over_wakes_no_timer() -> None:
    """Its deadline is far away, and a pull that waits for it is kept, with all that it has read."""
    world, _, _, pull = asking(1, timeout=500.0)
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
            peers.drop(peer)
            it.world.settle(decode)
        assert len(peers.by_place) == 2
    it.world.check()


def test_tables_of_odd_first_tokens_are_bounded_however_many_requests_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_TABLES", 4)
    world = World()
    prefill, decode = (world.add(name, make_layout(block_size=16, base=n << 40)) for n, name in enumerate("pd", 1))
    for first in range(16):
        params, _ = world.lent(prefill, f"r{first}", [3], num_tokens=16, written=True)
        pull = world.pull(decode, f"d{first}", [9], params, first=first)
        world.run()
        assert pull.reason is Reason.COMPLETE
    [peer] = decode.core.decode.peers.by_place.values()
    [made] = peer.tables.values()
    assert len(made._tables) == 4


def test_a_rank_that_could_not_be_met_while_a_request_was_announced_is_tried_again_when_it_is_pulled() -> None:
    """That may be long ago; meanwhile the replica that might have stood in for it has died."""
    it = Pair(4, 1, heads=2)
    params, _ = it.lend([3], 4)
    world, [decode], away = it.world, it.decode, it.prefill[0]
    pull = world.announce(decode, "req-D", params, 30.0)
    for _ in range(10):
        world.letters[:] = [letter for letter in world.letters if away not in (letter.sender, letter.receiver)]
        world.deliver_all()
        world.advance(0.25)
    assert (pull.failure, [s.reads for s in pull.sources]) == (None, [False, False, True, False])
    del world.ranks["p1"]
    world.advance(5.0)
    assert it.pull([9], params) == [pull]
    world.run()
    assert (pull.reason, [s.reads for s in pull.sources]) == (Reason.COMPLETE, [True, False, True, False])


def test_a_rank_that_was_lost_while_it_was_loaded_is_unloaded_when_that_is_done() -> None:
    world, (prefill,), decode = world_of()
    world.auto_load = False
    ask(world, prefill, decode, 1)
    world.deliver_all()
    assert [peer.agent_name for peer in decode.loading] == ["agent-p0"]
    world.forget(decode, prefill.address)
    world.load(decode)
    assert decode.nic.remotes == {}


def test_what_a_rank_says_that_it_holds_is_checked_before_anything_is_read_of_it() -> None:
    """It lies: its blocks would end behind its memory."""
    world, prefill, decode, pull = asking(1)
    [hello] = said(world, decode)
    assert isinstance(hello, Hello)
    honest = welcome(world, prefill, hello)
    assert isinstance(honest, Welcome)
    layout = prefill.buffers.layout
    short = structs.replace(layout, memories=(structs.replace(layout.memories[0], length=64), *layout.memories[1:]))
    say(world, prefill, decode, structs.replace(honest, layout=msgspec.Raw(msgspec.msgpack.encode(short))))
    assert (pull.reason, decode.nic.remotes) == (Reason.GEOMETRY, {})
    assert "its layout cannot be used" in pull.detail


@pytest.mark.parametrize("minor", [4, MINOR])
def test_a_refused_layout_of_an_older_version_names_the_upgrade(minor: int) -> None:
    """An older one does not say what it guesses, so a newer one may fit."""
    world, prefill, decode, pull = asking(1)
    [hello] = said(world, decode)
    assert isinstance(hello, Hello)
    honest = welcome(world, prefill, hello)
    assert isinstance(honest, Welcome)
    other = msgspec.Raw(msgspec.msgpack.encode(make_layout(num_heads=8)))
    say(world, prefill, decode, structs.replace(honest, layout=other, minor=minor))
    assert pull.reason is Reason.GEOMETRY
    assert ("speaks protocol 1.4; if the models agree, upgrade it to 1.5" in pull.detail) == (minor == 4)


# -- the queue -----------------------------------------------------------------------------------------------


def test_nothing_is_kept_of_prefill_engines_without_a_reader() -> None:
    world, prefills, decode = world_of(3)
    for i, prefill in enumerate(prefills):
        ask(world, prefill, decode, i)
    world.run()
    assert (decode.core.decode.admission._flows, decode.core.decode.admission._places) == ({}, {})


def test_an_urgent_pull_takes_its_engine_ahead_of_those_that_wait_already() -> None:
    world, (busy, one, other), decode = world_of(3, total_requests=1, window_requests=1)
    first = ask(world, busy, decode, 1)
    world.deliver_all()
    usual = [ask(world, prefill, decode, n, priority=5) for prefill, n in ((one, 2), (other, 3))]
    world.deliver_all()
    urgent = ask(world, other, decode, 4, priority=1)
    world.deliver_all()
    order = []
    for _ in range(4):
        [at] = [pull for pull in (first, *usual, urgent) if pull.state is PullState.READING]
        order.append(at.request_id)
        world.complete(decode, next(iter(decode.reads)))
        world.deliver_all()
    assert order == ["d1", "d4", "d2", "d3"]


def test_a_transfer_takes_room_once_and_gives_it_back_once() -> None:
    in_flight = InFlight()
    for _ in range(2):
        in_flight.enter(TransferId(1), 64, 2)
    assert (len(in_flight), in_flight.num_bytes, in_flight.num_descriptors) == (1, 64, 2)
    for _ in range(2):
        in_flight.leave(TransferId(1))
    assert (len(in_flight), in_flight.num_bytes, in_flight.num_descriptors) == (0, 0, 0)


# -- calls that fail, and calls that end -----------------------------------------------------------------------


def test_what_fails_as_it_begins_fills_no_blocks_behind_its_callers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    world, (prefill,), decode = world_of()
    params, lease = world.lent(prefill, "r", [2], written=True)
    with monkeypatch.context() as patch:
        patch.setattr(decode.core.decode, "_route", lambda *args, **more: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            world.pull(decode, "d", [2], params)
    world.settle(decode)
    world.run()
    assert (decode.posts, decode.core.decode.by_request, len(decode.core.ledger)) == ({}, {}, 0)
    assert lease.is_over, "its rank was told"
    world.check()


def test_a_request_of_which_no_attempt_follows_is_released_for_good_whatever_its_caller_had_in_mind() -> None:
    world, (prefill,), decode = world_of()
    params, lease = world.lent(prefill, "r", [2], written=True)
    request = PullRequest("d", [(0, [2])], params, is_last=False)
    decode.core.let_go(request, Reason.CANCELLED, world.time(decode))
    world.settle(decode)
    world.run()
    assert (lease.is_over, [str(x.outcome) for x in lease.discharged.values()]) == (True, ["cancelled"])


@pytest.mark.parametrize("changed", [{"engine_id": "another"}, {"tp_size": 2}, {"pp_size": 2}])
def test_params_of_another_engine_or_of_another_size_are_neither_lent_nor_withdrawn(changed: dict[str, Any]) -> None:
    """Who is owed a release is worked out from the sizes: with others the lease would wait for the wrong readers."""
    world, (prefill,), _ = world_of()
    params = structs.replace(world.params([prefill], "r", [2], 4), **changed)
    for call in (lambda: prefill.core.lend(params, 1, 0.0), lambda: prefill.core.withdraw(params, 0.0)):
        with pytest.raises(LocalProtocolError, match="the params are for engine"):
            call()
    assert not prefill.core.prefill.leases


def test_a_request_that_was_taken_once_is_not_turned_away_between_its_attempts() -> None:
    world, (prefill,), decode = world_of(total_requests=1, window_requests=1, max_queued=1)
    params, _ = world.lent(prefill, "r", [3], written=True)
    request = decode.core.pull(PullRequest("d", [(0, [3])], params), 1, 30.0, world.time(decode))
    world.settle(decode)
    assert request.pull is not None
    decode.core.decode.fail(request.pull, Reason.READ_FAILED, "because", world.time(decode))
    for number in (1, 2):
        ask(world, prefill, decode, number)
        world.deliver_all()
    with pytest.raises(Overloaded, match="1 pulls wait already"):
        world.pull(decode, "e", [4], params)
    world.run(1.0)
    assert (request.attempts, request.pull.reason) == (2, Reason.COMPLETE)


def test_params_that_name_a_rank_wrongly_and_are_only_released_keep_no_others_from_it() -> None:
    """A client, or a router, gives another engine's name with a good address; nobody is met for a discharge."""
    world, (prefill,), decode = world_of()
    params = world.params([prefill], "r", [1], 4, written=True)
    wrong = structs.replace(params, engine_id="nobody")
    world.discharge(decode, "wrong", wrong)
    world.run()
    pull = ask(world, prefill, decode, 2)
    world.run()
    assert pull.reason is Reason.COMPLETE
    # What has answered keeps its name, and only params that name another one fail.
    world.discharge(decode, "wrong again", wrong)
    failed = world.pull(decode, "wrong pull", [5], wrong)
    world.run()
    assert failed.reason is Reason.WRONG_TARGET
    again = ask(world, prefill, decode, 3)
    world.run()
    assert again.reason is Reason.COMPLETE


def test_a_rank_that_never_said_anything_is_forgotten_when_its_release_is_given_up() -> None:
    """Made-up ones would take the room of those that are waited for, for as long as a connection is kept."""
    world, (prefill,), decode = world_of()
    params = world.params([prefill], "r", [1], 4, written=True)
    world.discharge(decode, "made up", params)
    del world.ports[prefill.address]
    world.letters.clear()
    timeout_s = decode.core.config.pull.release_timeout_s
    world.advance(timeout_s - 1.0)
    world.letters.clear()
    assert decode.core.decode.peers.by_place
    world.advance(2.0)
    assert not decode.core.decode.peers.by_place
    prefill.open()  # one that has answered is kept, for whoever comes next
    world.discharge(decode, "answered", structs.replace(params, request_id="s"))
    world.run()
    world.advance(timeout_s + 60.0)
    world.run()
    assert decode.core.decode.peers.by_place
