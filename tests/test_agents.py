"""An agent that has ended, and a rank that is said to be gone."""

from __future__ import annotations

from asynckv.core.outbox import PeerChanged
from asynckv.core.peer import PeerState
from asynckv.core.wire import Hello, decode_packet
from tests.world import World, make_layout


def test_a_rank_whose_agent_has_ended_welcomes_nobody_until_it_has_another() -> None:
    world = World()
    prefill, decode = world.add("prefill", make_layout()), world.add("decode", make_layout(), seed=1)
    params = world.params([prefill], "r", [3], 4, written=True)
    world.lend(prefill, params)
    world.lose_agent(prefill)
    pull = world.pull(decode, "d", [9], params)
    for _ in range(3):
        kinds = [type(message) for letter in world.letters for message in decode_packet(letter.data).messages]
        assert set(kinds) == {Hello}
        world.deliver_all()
        assert world.letters == []
        world.advance(decode.core.config.pull.hello_retry_s * 4)
    world.replace_agent(prefill)
    while not decode.reads:
        world.deliver_all()
        world.advance(1.0)
    assert {peer.agent_name for peer in decode.core.decode.peers.by_place.values()} == {"agent-prefill-2"}
    world.run()
    assert pull.is_over


def test_a_rank_that_a_router_says_is_gone_has_left_in_good_order() -> None:
    world = World()
    prefill, decode = world.add("prefill", make_layout()), world.add("decode", make_layout(), seed=1)
    params = world.params([prefill], "r", [3], 4, written=True)
    world.lend(prefill, params)
    world.pull(decode, "d", [9], params)
    world.run()
    decode.core.decode.forget(prefill.address, world.time(decode))
    ((peer, before, after),) = [
        (c.peer, c.before, c.after) for c in decode.core.outbox.commands if isinstance(c, PeerChanged)
    ]
    assert (peer.is_orderly, before, after) == (True, PeerState.READY, PeerState.GONE)


def test_a_rank_that_was_never_greeted_takes_nobodys_handshake_along_when_it_goes() -> None:
    world = World()
    ranks = [world.add(f"p{r}", make_layout(r, 4, base=(r + 1) << 40, num_heads=2), engine_id="p") for r in range(4)]
    decode = world.add("d", make_layout(base=30 << 40, num_heads=2), engine_id="d")
    params = world.params(ranks, "r", [3], 4, written=True)
    for rank in ranks:
        world.lend(rank, params)
    world.pull(decode, "d-r", [9], params)
    greeted = {letter.to for letter in world.letters}
    unmet = [rank for rank in ranks if rank.address not in greeted]
    assert len(greeted) == len(unmet) == 2
    for rank in unmet:
        decode.core.decode.forget(rank.address, world.time(decode))
    world.settle(decode)
    world.deliver_all()
    assert len(decode.reads) == 2
