"""Tickets: what a prefill rank offers under them, and what a decode rank that follows one hears."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from asynckv import Engine, LeaseConfig, LocalProtocolError, NoOffer, Overloaded, PlanRefused, PrefillRanks, PullConfig
from asynckv.core.following import Following, FollowState
from asynckv.core.lease import LeaseState
from asynckv.core.types import FollowParams, KVTransferParams, Reason
from asynckv.core.wire import Follow, Offered, Unfollow, decode_packet, encode_packet
from tests.engines import Bench, Side, cancel, until
from tests.world import Rank, World, make_layout, opened, ranks_of

TICKET, OTHER = "0123456789abcdef" * 2, "f" * 32


def sent(world: World, kind: type) -> list[Any]:
    """Return the messages of a kind that are under way."""
    return [m for letter in world.letters for m in decode_packet(letter.data).messages if type(m) is kind]


def followed(**options: Any) -> tuple[World, Rank, Rank, Following]:
    """Return a world in which a decode rank follows a ticket that the prefill rank has parked."""
    world, prefill, decode = opened(**options)
    following = world.follow(decode, "d", [prefill], TICKET)
    world.run()
    assert following.state is FollowState.FOLLOWING
    assert prefill.core.prefill.parking.num_parked == 1
    return world, prefill, decode, following


def params_of(world: World, prefill: Rank, request_id: str = "p") -> KVTransferParams:
    return world.params([prefill], request_id, [3], 4, written=True)


def test_a_follower_is_offered_the_params_when_the_request_is_lent_and_not_before() -> None:
    world, prefill, decode, following = followed()
    params = params_of(world, prefill)
    world.run(1.0)
    assert following.is_open
    assert decode.follows_ended == []
    world.lend(prefill, params, ticket=TICKET)
    world.run()
    assert (following.state, following.params) == (FollowState.OFFERED, params)
    assert decode.follows_ended == [following]
    assert prefill.core.prefill.parking.num_parked == 0
    pull = world.pull(decode, "d", [1], params)
    world.run()
    assert pull.reason is Reason.COMPLETE
    world.check()


def test_a_follower_that_comes_after_the_loan_is_offered_it_at_once_and_so_is_a_second_one() -> None:
    world, prefill, decode = opened()
    second = world.add("second", make_layout(base=1 << 42), seed=3)
    params = params_of(world, prefill)
    world.lend(prefill, params, ticket=TICKET)
    both = [world.follow(each, "d", [prefill], TICKET) for each in (decode, second)]
    world.run()
    assert [each.params for each in both] == [params, params]


def test_a_lost_offer_costs_one_repeat() -> None:
    world, prefill, _, following = followed()
    params = params_of(world, prefill)
    world.lend(prefill, params, ticket=TICKET)
    assert len(sent(world, Offered)) == 1
    world.letters.clear()
    world.run(2.0)
    assert following.params == params


def test_an_offer_that_is_repeated_begins_nothing_and_is_not_released() -> None:
    world, prefill, decode, following = followed()
    world.lend(prefill, params_of(world, prefill), ticket=TICKET)
    (offer,) = [letter for letter in world.letters if letter.answer]
    world.deliver(world.letters.index(offer), keep=True)
    world.run()
    assert following.state is FollowState.OFFERED
    assert decode.follows_ended == [following]
    assert decode.core.outbox.counters["sent.release"] == 0


def test_another_ticket_is_not_offered() -> None:
    world, prefill, _, following = followed()
    world.lend(prefill, params_of(world, prefill), ticket=OTHER)
    world.run(5.0)
    assert following.is_open


def test_a_ticket_belongs_to_the_first_request_that_is_lent_under_it() -> None:
    world, prefill, decode = opened()
    first, second = params_of(world, prefill), world.params([prefill], "q", [5], 4)
    world.lend(prefill, first, ticket=TICKET)
    lease = world.lend(prefill, second, ticket=TICKET)
    following = world.follow(decode, "d", [prefill], TICKET)
    world.run()
    assert following.params == first
    assert lease.state is LeaseState.LENT
    assert prefill.core.outbox.counters["tickets.taken"] == 1


def test_the_end_of_the_loan_ends_its_ticket() -> None:
    world, prefill, decode = opened()
    params = params_of(world, prefill)
    world.lend(prefill, params, ticket=TICKET)
    world.pull(decode, "d", [1], params)
    world.run()
    following = world.follow(decode, "e", [prefill], TICKET)
    world.run()
    assert following.reason is Reason.CONSUMED
    assert not prefill.core.prefill.offers.lent


def test_a_loan_that_is_revoked_is_offered_no_more_though_a_grant_runs() -> None:
    world, prefill, decode = opened()
    params = params_of(world, prefill)
    lease = world.lend(prefill, params, ticket=TICKET)
    world.announce(decode, "d", params, 60)
    world.run()
    world.revoke(prefill, lease)
    assert lease.state is LeaseState.ENDING
    following = world.follow(decode, "e", [prefill], TICKET)
    world.run()
    assert following.reason is Reason.REVOKED


@pytest.mark.parametrize("is_early", [True, False])
def test_a_ticket_that_is_withdrawn_refuses_its_followers(is_early: bool) -> None:
    world, prefill, decode = opened()
    if not is_early:
        prefill.core.withdraw_ticket(TICKET)
    following = world.follow(decode, "d", [prefill], TICKET)
    world.run()
    if is_early:
        prefill.core.withdraw_ticket(TICKET)
        world.settle(prefill)
        world.run()
    assert following.reason is Reason.WITHDRAWN
    assert sent(world, Unfollow) == []


def test_a_closed_engine_refuses_followers_and_one_that_drains_still_offers_what_is_lent() -> None:
    world, prefill, decode, following = followed()
    world.lend(prefill, params_of(world, prefill), ticket=OTHER)
    prefill.core.shut()
    world.settle(prefill)
    world.run()
    assert following.reason is Reason.ENGINE_CLOSED
    lent = world.follow(decode, "e", [prefill], OTHER)
    world.run()
    assert lent.params is not None


def test_a_follower_that_is_cancelled_is_offered_nothing_more() -> None:
    world, prefill, decode, following = followed()
    world.cancel(decode, "d")
    world.run()
    assert following.reason is Reason.CANCELLED
    assert prefill.core.prefill.parking.num_parked == 0
    world.lend(prefill, params_of(world, prefill), ticket=TICKET)
    assert sent(world, Offered) == []


def test_an_offer_that_crosses_the_end_is_released_once() -> None:
    world, prefill, decode, following = followed()
    lease = world.lend(prefill, params_of(world, prefill), ticket=TICKET)
    world.cancel(decode, "d")
    world.run()
    assert following.state is FollowState.LATE
    assert lease.state is LeaseState.RELEASED
    assert decode.follows_ended == [following, following]
    assert decode.core.outbox.counters["sent.release"] == 1
    world.check()


def test_a_follower_that_is_offered_nothing_in_time_ends_and_says_so() -> None:
    world, prefill, decode = opened()
    following = world.follow(decode, "d", [prefill], TICKET, seconds=10)
    world.live(11)
    assert following.reason is Reason.NO_OFFER
    assert prefill.core.prefill.parking.num_parked == 0
    assert decode.core.is_idle


def test_a_rank_that_cannot_be_reached_ends_its_followers() -> None:
    world, prefill, decode = opened()
    following = world.follow(decode, "d", [prefill], TICKET)
    world.live(20, is_heard=False)
    assert following.reason is Reason.UNREACHABLE


def test_a_rank_that_falls_silent_ends_its_followers_though_nothing_is_read() -> None:
    world, _, _, following = followed()
    world.live(30, is_heard=False)
    assert following.reason is Reason.PEER_LOST


def test_the_successor_of_a_rank_refuses_the_followers_of_that_rank_at_once() -> None:
    world, prefill, decode, following = followed()
    again = world.add("prefill", prefill.buffers.layout, seed=1)
    assert again.address == prefill.address
    world.advance(3.0)
    world.run()
    assert following.reason is Reason.RESTARTED
    assert decode.core.is_idle


def test_a_rank_of_an_older_protocol_is_not_asked() -> None:
    world, prefill, decode = opened()
    world.follow(decode, "first", [prefill], OTHER)
    world.run()
    (peer,) = decode.core.decode.peers.by_place.values()
    peer.minor = 6
    following = world.follow(decode, "d", [prefill], TICKET)
    assert following.reason is Reason.PROTOCOL
    assert "upgrade it" in following.detail
    assert sent(world, Follow) == []


def test_params_of_other_ranks_than_were_followed_are_not_taken() -> None:
    world, prefill, decode, following = followed()
    stranger = world.add("stranger", make_layout(base=1 << 43), seed=4)
    theirs = world.params([stranger], "x", [3], 4, written=True)
    params = msgspec.structs.replace(theirs, key=params_of(world, prefill).key)
    offer = Offered(TICKET, following.nonces[-1], msgspec.Raw(msgspec.msgpack.encode(params)))
    address = prefill.address
    packet = encode_packet(prefill.core.identity.incarnation, decode.core.identity.incarnation, [offer])
    decode.core.receive(address, packet, world.time(decode))
    world.settle(decode)
    assert following.reason is Reason.WRONG_TARGET
    assert following.params is None


def test_an_offer_of_a_stranger_is_not_taken() -> None:
    world, prefill, decode, following = followed()
    params = params_of(world, prefill)
    raw = msgspec.Raw(msgspec.msgpack.encode(params))
    for sender, nonce in (
        (prefill.core.identity.incarnation, following.nonces[-1] + 1000),
        ("other", following.nonces[-1]),
    ):
        packet = encode_packet(sender, decode.core.identity.incarnation, [Offered(TICKET, nonce, raw)])
        decode.core.receive(prefill.address, packet, world.time(decode))
    assert following.is_open


def test_a_flood_of_followers_has_the_room_of_early_claims() -> None:
    world, prefill, decode = opened(lease=LeaseConfig(max_parked=16))
    for number in range(40):
        world.follow(decode, f"d{number}", [prefill], f"{number:032x}", seconds=100)
    world.run()
    assert prefill.core.prefill.parking.num_parked == 8  # half, for whoever comes first
    assert prefill.core.outbox.counters["parked.refused"] >= 32
    world.live(50)
    assert prefill.core.prefill.parking.num_parked <= 8
    world.lend(prefill, params_of(world, prefill), ticket=f"{39:032x}")
    world.run(3.0)
    assert decode.core.outbox.counters["follows.offered"] == 1


def test_only_one_rank_is_asked_and_it_is_one_that_is_read() -> None:
    world = World()
    prefill = ranks_of(world, "prefill", 2)
    decode = ranks_of(world, "decode", 2, base=10)
    for rank in decode:
        world.follow(rank, "d", prefill, TICKET)
    world.run()
    assert [rank.core.prefill.parking.num_parked for rank in prefill] == [1, 1]


@pytest.mark.parametrize("how", ["announced", "pulled", "released"])
def test_params_that_another_rank_was_offered_end_the_following(how: str) -> None:
    world, prefill, decode, following = followed()
    params = params_of(world, prefill)
    lease = world.lend(prefill, params, ticket=TICKET)
    world.letters.clear()  # the offer is lost
    if how == "announced":
        world.announce(decode, "d", params, 60)
    elif how == "pulled":
        world.pull(decode, "d", [1], params)
    else:
        world.discharge(decode, "d", params)
    assert (following.state, following.params) == (FollowState.OFFERED, params)
    world.run()
    assert lease.state is (LeaseState.LENT if how == "announced" else LeaseState.RELEASED)
    assert decode.follows_ended == [following]
    world.check()


def test_a_rank_follows_a_bounded_number_of_requests() -> None:
    world, prefill, decode = opened(pull=PullConfig(max_queued=2))
    for number in range(2):
        world.follow(decode, f"d{number}", [prefill], f"{number:032x}")
    with pytest.raises(Overloaded, match="2 requests are followed already"):
        world.follow(decode, "d", [prefill], TICKET)


def test_a_ticket_or_a_request_is_followed_once() -> None:
    world, prefill, decode, _ = followed()
    for request_id, ticket in (("d", OTHER), ("e", TICKET)):
        with pytest.raises(LocalProtocolError, match=r"follows (a|this) ticket already"):
            world.follow(decode, request_id, [prefill], ticket)
    assert len(decode.core.decode.follows.by_id) == 1


def test_a_rank_does_not_follow_itself_nor_a_part_of_an_engine() -> None:
    world, prefill, decode = opened()
    with pytest.raises(PlanRefused, match="lent by this very rank"):
        world.follow(prefill, "d", [prefill], TICKET)
    target = FollowParams(ticket=TICKET, engine_id="prefill", tp_size=2, endpoints=(prefill.endpoint,))
    with pytest.raises(PlanRefused, match="must be listed once"):
        decode.core.follow("d", target, "", 60, 0.0)
    assert decode.core.is_idle


# -- engines ---------------------------------------------------------------------------------------------


def target_of(prefill: Side | Engine, ticket: str = TICKET) -> dict[str, Any]:
    endpoint = msgspec.to_builtins((prefill.engine if isinstance(prefill, Side) else prefill).endpoint)
    return {"ticket": ticket, "engine_id": "prefill", "tp_size": 1, "pp_size": 1, "endpoints": [endpoint]}


async def following_of(prefill: Side, decode: Side, group: PrefillRanks) -> asyncio.Task[dict[str, Any]]:
    task = asyncio.create_task(decode.engine.follow("d", target_of(prefill)))
    await until(lambda: prefill.engine._driver.core.prefill.parking.num_parked)
    return task


@pytest.mark.parametrize("real", [False, True])
async def test_an_engine_follows_and_pulls_what_it_is_offered(real: bool) -> None:
    async with Bench(real).pair() as (prefill, decode, group):
        task = await following_of(prefill, decode, group)
        params = group.make_params("p", [(0, [1])], 16)
        prefill.engine.lend(params, ticket=TICKET)
        assert await task == params
        await decode.engine.pull("d", [(0, [6])], params)
        assert decode.blocks([6]) == prefill.blocks([1])


async def test_an_engine_is_told_that_a_ticket_was_withdrawn() -> None:
    async with Bench(False).pair() as (prefill, decode, group):
        task = await following_of(prefill, decode, group)
        prefill.engine.withdraw_ticket(TICKET)
        with pytest.raises(NoOffer) as raised:
            await task
        assert (raised.value.reason, raised.value.failed_in) == ("withdrawn", "follow")
        assert TICKET not in str(raised.value)


async def test_a_task_that_is_cancelled_and_an_engine_that_is_closed_follow_no_more() -> None:
    async with Bench(False).pair() as (prefill, decode, group):
        task = await following_of(prefill, decode, group)
        task.cancel()
        await until(lambda: not prefill.engine._driver.core.prefill.parking.num_parked)
        with pytest.raises(asyncio.CancelledError):
            await task
        again = await following_of(prefill, decode, group)
        await decode.engine.suspend()
        with pytest.raises(NoOffer, match="engine was closed"):
            await again


def test_a_follower_that_repeats_itself_stays_parked_beyond_the_time_of_one_message() -> None:
    world, prefill, _, following = followed(lease=LeaseConfig(parked_s=3.0))
    for _ in range(20):
        world.live(0.5)
        assert prefill.core.prefill.parking.num_parked == 1
    assert prefill.core.outbox.counters["parked.expired"] == 0
    world.lend(prefill, params_of(world, prefill), ticket=TICKET)
    world.deliver_all()
    assert following.params is not None, "it is offered at once, and not at its next repeat"


def test_a_caller_that_needs_nothing_is_ended_and_the_offer_is_released() -> None:
    world, prefill, decode, following = followed()
    assert decode.core.cancel("d", world.time(decode), follows_on=True)
    world.settle(decode)
    assert (following.state, following.reason) == (FollowState.SPARED, Reason.CANCELLED)
    again = world.follow(decode, "d", [prefill], OTHER)
    world.run()
    lease = world.lend(prefill, params_of(world, prefill), ticket=TICKET)
    world.run()
    assert (following.state, lease.state, again.is_open) == (FollowState.LATE, LeaseState.RELEASED, True)
    assert decode.core.decode.follows.audit() == []
    world.check()


def test_a_late_offer_of_what_is_read_already_is_not_released() -> None:
    world, prefill, decode, following = followed()
    params = params_of(world, prefill)
    lease = world.lend(prefill, params, ticket=TICKET)
    world.announce(decode, "other name", params, 60)
    world.cancel(decode, "d")
    world.run()
    assert following.state is FollowState.LATE
    assert lease.state is LeaseState.LENT
    pull = world.pull(decode, "other name", [1], params)
    world.run()
    assert pull.reason is Reason.COMPLETE


def test_no_message_shows_a_ticket() -> None:
    world, prefill, decode, _ = followed()
    world.advance(3.0)
    world.lend(prefill, params := params_of(world, prefill), ticket=TICKET)
    world.cancel(decode, "d")
    shown = "".join(repr(message) for kind in (Follow, Unfollow, Offered) for message in sent(world, kind))
    assert shown.count("nonce") >= 3
    assert not any(secret in shown for secret in (TICKET, params.key.token))


async def test_an_offer_that_its_caller_does_not_hear_of_is_released() -> None:
    async with Bench(False).pair() as (prefill, decode, group):
        task = await following_of(prefill, decode, group)
        params = group.make_params("p", [(0, [1])], 16)
        lent = prefill.engine.lend(params, ticket=TICKET)
        follows = decode.engine._driver.core.decode.follows
        await until(lambda: not follows.by_id)
        await cancel(task)
        assert (await lent.wait_released()).cause == "released"
