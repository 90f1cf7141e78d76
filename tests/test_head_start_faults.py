"""Faults of head starts that reviews found, each with the order of events that showed it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from asynckv import BytesDiffer, LocalProtocolError, PrefillRanks, PullConfig
from asynckv.core.attempts import RequestState
from asynckv.core.parking import AT_ONCE
from asynckv.core.pull import Kind, PullRequest
from asynckv.core.types import Cohort, Endpoint, FollowParams, KVTransferParams, Reason, ReplyTo, decode_params
from asynckv.core.wire import Follow, Offered, Unfollow, decode_packet, encode_offer
from asynckv.embed import EngineDesk, Finished, Lend, PrefillLedger, Pull, Refused, StartEarly
from tests.engines import Bench, turn_loop, until
from tests.test_follows import OTHER, TICKET
from tests.test_head_start import (
    HERE,
    THERE,
    Service,
    counters,
    follow_early,
    head,
    lend_piece,
    lend_whole,
    offered_whole,
    pull_whole,
    reading_piece,
    served,
)
from tests.test_ledgers import early
from tests.world import BLOCK, World, make_layout, ranks_of

# -- wrong bytes, and blocks that are given back too early -----------------------------------------------------------


def test_pieces_of_a_second_request_under_a_ticket_do_not_outlive_its_loan() -> None:
    """A router gives one ticket to two requests; the second one's loan is not known by the ticket."""
    service, world, prefill, decode = served()
    others = [8, 9, 10, 11]
    piece = world.params([prefill], "y/2", others[:2], 2 * BLOCK, written=True, recall=True)
    prefill.core.lend(piece, 1, world.time(prefill), TICKET, is_piece=True)
    world.settle(prefill)
    world.run()
    service.start(piece)
    assert decode.reads, "the piece is being read"
    params, _ = service.lend()  # of another request, with the same ticket
    loan = world.params([prefill], "y", others, 4 * BLOCK)
    world.lend(prefill, loan, ticket=TICKET)
    world.withdraw(prefill, loan)  # and so its blocks are used for something else
    world.run()
    service.pull(params)
    service.ended_well()


async def test_a_cancelled_pull_waits_until_the_piece_under_way_has_its_outcome() -> None:
    async with Bench(False).pair() as (prefill, decode, group):
        data, follow = decode.data, await reading_piece(prefill, decode, group)
        params, _ = lend_whole(prefill, group)
        await follow
        pull = pull_whole(decode, params)
        await until(lambda: any(x.state is RequestState.PAUSING for x in decode.engine._driver.core.requests))
        pull.cancel()
        await turn_loop(20)
        was_done = pull.done()
        data.finish()
        with pytest.raises(asyncio.CancelledError):
            await pull
        assert not was_done, "NIXL may still write, as after any other pull"


def test_pieces_of_two_prompts_are_not_put_together() -> None:
    """A ticket is used again, and the reader gives no hashes: then those of both pieces say that they do not match."""
    service, it = Service(), head()
    it.took(service.params(1, 0, "x", recall=True, hashes=["x"], hash_tokens=BLOCK), 1)
    second = service.params(2, 1, "y", recall=True, hashes=["y", "z"], hash_tokens=BLOCK)
    if it.lists(second) is not None:
        it.took(second, 1)
    ((first, _),) = it.rest(it.blocks, 4 * BLOCK, service.params(4, 0, "y", hashes=["y", "z", "w"], hash_tokens=BLOCK))
    assert first == 0


def test_a_piece_without_hashes_is_not_trusted_where_the_loan_has_some() -> None:
    service, it = Service(), head()
    it.took(service.params(2, 0, "x", recall=True), 1)
    loan = service.params(4, 0, "y", hashes=["y", "z"], hash_tokens=BLOCK)
    assert it.rest(it.blocks, 4 * BLOCK, loan)[0][0] == 0


async def test_a_loan_that_its_desk_refuses_ends_its_pieces() -> None:
    async with Bench(False).pair() as (prefill, _, group):
        desk = EngineDesk(prefill.engine)
        piece = group.make_params("p/2", [(0, list(THERE[:2]))], 32, written=True, recall=True)
        prefill.engine.lend_piece(piece, TICKET)
        desk.submit(
            [Lend(group.make_params("p", [(0, [9])], 16)), Lend(group.make_params("p", [(0, [10])], 16), 1, TICKET)]
        )
        await until(lambda: desk.has_news)
        assert isinstance(desk.take_finished().refused[0].error, LocalProtocolError)
        assert not prefill.engine._driver.core.prefill.offers.pieces, "its caller takes the blocks for free"


# -- leaks -----------------------------------------------------------------------------------------------------------


async def test_a_follow_that_is_cancelled_just_before_it_hears_of_a_piece_leaves_nothing() -> None:
    async with Bench(False).pair() as (prefill, decode, group):
        follow = follow_early(prefill, decode)
        await until(lambda: prefill.engine.is_followed(TICKET))
        control: Any = decode.engine._driver.control
        hear = control._on_packet

        def cancelled_first(origin: Any, packet: bytes, principal: str) -> object:
            if any(isinstance(m, Offered) for m in decode_packet(packet).messages):
                follow.cancel()
            return hear(origin, packet, principal)

        control._on_packet = cancelled_first
        await lend_piece(prefill, group)
        with pytest.raises(asyncio.CancelledError):
            await follow
        await turn_loop(20)
        left = dict(decode.engine._driver.core.decode.between)
        decode.engine.cancel("d")
        assert left == {}


def test_a_head_start_that_is_never_pulled_nor_cancelled_ends() -> None:
    """Every hold ends, as that of an announcement does (`pull.announce_s`)."""
    service = Service()
    service.early(1)
    service.world.run()
    service.lend()
    service.world.run()
    service.world.live(7200.0, 60.0)
    assert service.decode[0].core.decode.between == {}


def test_a_prefill_ledger_forgets_that_a_ticket_was_followed() -> None:
    ledger = PrefillLedger(PrefillRanks("p", [Endpoint(0, "tcp://1", "one")]))
    ledger.take_ticket(TICKET)
    ledger.lend("r", [(0, [1])], 16, ticket=TICKET)
    ledger.take_orders()
    ledger.update(0, Finished(followed=[TICKET]))  # told before the rank had lent the request
    ledger.ended("r")
    assert len(ledger.take_free()) == 1
    assert not ledger.followed


# -- outcomes and internal errors ------------------------------------------------------------------------------------


def test_a_rank_that_meets_its_prefill_rank_late_takes_the_offer_that_it_has_asked_for() -> None:
    """A piece was offered to another rank, and this one cannot read it. So it asks while it still meets its rank."""
    service, world, prefill, decode = served()
    world.cancel(decode, "d")
    world.run()
    late = world.add("late", decode.buffers.layout, seed=5, engine_id="decode")
    world.auto_load = False
    service.follows = [service.follow(late)]
    world.deliver_all()
    assert late.loading
    piece = service.params(1, 0, "p/1", recall=True, hashes=["x"], hash_tokens=BLOCK)
    late.core.start_early(PullRequest("d", [(0, list(HERE))], piece, hashes=["y"]), world.time(late))
    world.settle(late)
    world.lend(prefill, service.params(4, 0, "p"), ticket=TICKET)
    world.deliver_all()  # the core raises: OFFER while MEETING


def test_a_head_start_that_was_cancelled_ends_no_later_follow_of_the_same_name() -> None:
    service, world, _, decode = served()
    service.early(2)
    world.cancel(decode, "d")
    assert decode.reads, "it drains"
    target = service.follows[0].target
    try:
        again = decode.core.follow(
            "d", msgspec.structs.replace(target, ticket=OTHER), "", 60.0, world.time(decode), takes_pieces=True
        )
    except LocalProtocolError:
        return  # it is refused, as a pull would be
    world.settle(decode)
    world.run(0.1)
    assert again.is_open, again.detail
    assert again.have == 0


def test_a_piece_that_a_rank_never_lends_does_not_fail_the_request() -> None:
    """The order of one rank was overtaken by its recall, so that its claim is answered `NotYet` for ever."""
    service = Service(2, 1)
    service.early(2, service.prefill[:1])
    service.world.run()
    params, _ = service.lend()
    service.world.run()
    service.pull(params, 5.0)
    for _ in range(12):
        service.world.run(0.5)
    (request,) = service.requests
    assert request.pull is not None
    assert (request.pull.kind, request.pull.reason) == (Kind.PULL, Reason.COMPLETE)


def test_a_pull_that_is_too_late_behind_a_piece_is_too_late_and_not_cancelled() -> None:
    service = Service(2, 1)
    service.early(2, service.prefill[:1])
    service.world.run()
    service.pull(service.params(4, 0, "p"), 5.0)
    for _ in range(12):
        service.world.run(0.5)
    (request,) = service.requests
    assert request.state is RequestState.OVER
    assert request.pull is not None
    assert request.pull.reason is not Reason.CANCELLED, "its caller would hear of `PullCancelled`"


def test_a_pull_that_waits_for_a_piece_that_has_not_begun_is_not_overtaken() -> None:
    service, world, prefill, decode = served(pull=PullConfig(window_requests=1, total_requests=1))
    busy, _ = world.lent(prefill, "busy", [8])
    first = world.pull(decode, "busy", [8], busy)
    world.deliver_all()
    piece = service.piece(0, 2)
    world.deliver_all()
    service.start(piece)
    params, _ = service.lend()
    world.deliver_all()
    service.pull(params)
    world.deliver_all()
    later, _ = world.lent(prefill, "later", [9])
    after = world.pull(decode, "later", [9], later)
    world.deliver_all()
    while not first.is_over:
        world.complete_reads(decode)
        world.deliver_all()
    assert not after.num_posted, "it came last, and has the same priority"


def test_a_pull_that_was_taken_before_a_drain_is_carried_out() -> None:
    service, _, _, decode = served()
    service.early(2)
    params, _ = service.lend()
    service.pull(params)
    decode.core.shut()
    service.ended_well()


def test_a_piece_without_any_block_is_refused_or_offered_to_nobody() -> None:
    """As that of a model whose groups are all states or windows."""
    service, world, prefill, _ = served()
    assert service.ranks is not None
    empty = service.ranks.make_params("p/1", [(0, [])], BLOCK, written=True, recall=True)
    try:
        prefill.core.lend(decode_params(empty), 1, world.time(prefill), TICKET, is_piece=True)
    except LocalProtocolError:
        return
    world.settle(prefill)
    world.run(3.0)  # the follower repeats itself, and the core raises


def test_a_decode_ledger_hears_of_a_head_start_that_is_refused() -> None:
    ledger, order = early(), StartEarly(request_id="a", groups=[(0, [1, 2])], params={})
    ledger.update(0, Finished(refused=[Refused(order, LocalProtocolError("in flight already"))]))
    ledger.take_orders()
    assert [fetch.request_id for fetch in ledger.take_outcome().failed] == ["a"]


def test_a_prefill_ledger_lends_pieces_of_a_request_with_a_long_id() -> None:
    ledger = PrefillLedger(PrefillRanks("p", [Endpoint(0, "tcp://1", "one")]))
    ledger.take_ticket(TICKET)
    name = "x" * (16 * 1024)
    ledger.lend_piece(name, TICKET, [(0, [1])], 16)
    ledger.lend(name, [(0, [1, 2])], 32, ticket=TICKET)


# -- growth, and what others pay -------------------------------------------------------------------------------------


async def test_a_follower_that_repeats_itself_adds_nothing_to_the_news() -> None:
    async with Bench(False).pair() as (prefill, _, _):
        desk = EngineDesk(prefill.engine)
        driver = prefill.engine._driver
        for nonce in range(100):
            follow = Follow(TICKET, nonce, Cohort("c"), 0)
            driver.core.prefill.offers.follow(follow, ReplyTo(b"x"), "s", driver.clock.now(), "", "")
            driver.at_once()
        assert len(desk._news) <= 1, "an engine without steps never takes them"


def test_a_piece_is_offered_to_few_followers_at_once() -> None:
    service, _, prefill, _ = served()
    offers = prefill.core.prefill.offers
    for number in range(4 * AT_ONCE):
        offers.follow(Follow(OTHER, number, Cohort("c"), 0), ReplyTo(b"x"), f"s{number}", 0.0, "", "")
    params = service.params(1, 0, "p/1", recall=True)
    prefill.core.lend(params, 1, 0.0, OTHER, is_piece=True)
    assert counters(prefill)["pieces.offered"] <= AT_ONCE, "the others repeat themselves, as for a loan"


def test_a_grant_of_a_request_without_a_ticket_looks_at_no_piece() -> None:
    service, world, prefill, decode = served()
    service.piece(0, 1)
    prefill.core.prefill.offers.piece_granted = pytest.fail  # type: ignore[method-assign, assignment]
    params, _ = world.lent(prefill, "plain", [8])
    pull = world.pull(decode, "plain", [8], params)
    world.run()
    assert pull.reason is Reason.COMPLETE


def test_a_piece_that_waits_refuses_no_pull() -> None:
    service, world, prefill, decode = served(pull=PullConfig(window_requests=1, total_requests=1, max_queued=1))
    busy, _ = world.lent(prefill, "busy", [8])
    world.pull(decode, "busy", [8], busy)
    world.deliver_all()
    piece = service.piece(0, 2)
    world.deliver_all()
    service.start(piece)
    later, _ = world.lent(prefill, "later", [9])
    world.pull(decode, "later", [9], later)  # raises Overloaded


# -- head starts that are lost without need --------------------------------------------------------------------------


def test_a_first_piece_of_what_is_cached_is_followed_by_the_next() -> None:
    service, world, _, decode = served()
    piece = service.piece(0, 1)
    world.run()
    wanted = PullRequest("d", [(BLOCK, list(HERE[1:]))], piece)
    service.requests = [decode.core.start_early(wanted, world.time(decode))]
    world.settle(decode)
    service.piece(1, 3)
    world.run(3.0)
    assert counters(decode) == {"pieces.complete": 1}


def test_a_prefill_ledger_knows_of_followers_that_came_before_their_request() -> None:
    """Its rank tells of a follower once, or with each repeat, and these come every 2 s."""
    ledger = PrefillLedger(PrefillRanks("p", [Endpoint(0, "tcp://1", "one")]))
    ledger.update(0, Finished(followed=[TICKET]))
    ledger.take_ticket(TICKET)
    assert TICKET in ledger.followed


# -- more ------------------------------------------------------------------------------------------------------------


def test_what_pieces_brought_is_not_taken_for_a_later_request_of_the_same_name() -> None:
    """Its caller pulled nothing after the offer, and uses the name and the blocks again."""
    service, world, prefill, decode = served()
    service.early(2)
    world.run()
    service.lend()
    world.run()
    assert not service.follows[0].is_open
    params, _ = world.lent(prefill, "other", [8, 9, 10, 11])
    lent = [prefill.buffers.block(b) for b in (8, 9, 10, 11)]
    try:
        decode.core.pull(PullRequest("d", [(0, list(HERE))], params), 0, 30.0, world.time(decode))
    except LocalProtocolError:
        return
    world.settle(decode)
    world.run(0.1)
    assert [decode.buffers.block(b) for b in HERE] == lent


async def test_a_difference_in_a_piece_fails_the_request_also_after_its_offer() -> None:
    bench = Bench(False)
    async with bench.pair(pull=PullConfig(second_look=1.0)) as (prefill, decode, group):
        data, follow = decode.data, await reading_piece(prefill, decode, group)
        reads = set(data.running)
        data.finish()
        await until(lambda: data.running and not reads & set(data.running))
        params, _ = lend_whole(prefill, group)
        await follow
        for array in prefill.arrays:
            array[:] = 0xDD  # somebody writes into what is lent
        data.finish()
        await until(lambda: "pieces.differs" in decode.engine.statistics().counters)
        data.deferred = False
        bench.clock.advance(0.01)
        with pytest.raises(BytesDiffer):
            await pull_whole(decode, params)


def test_a_head_start_that_differs_releases_its_loan_when_it_is_cancelled() -> None:
    service, world, prefill, decode = served(pull=PullConfig(second_look=1.0))
    service.early(2)
    world.complete_reads(decode)
    params, (lease,) = service.lend()
    world.deliver_all()
    prefill.buffers.overwrite(THERE[0], 0xDD)
    world.complete_all()
    world.deliver_all()
    assert counters(decode) == {"pieces.differs": 1}
    decode.core.cancel("d", world.time(decode), params=params)
    world.settle(decode)
    world.run(0.1)
    assert lease.is_over


def test_a_piece_that_waits_for_long_makes_no_warning() -> None:
    service = Service(2, 1)
    service.early(2, service.prefill[:1])
    for _ in range(80):
        service.world.run(0.5)
    assert service.decode[0].said == []


def test_a_prefill_rank_that_offers_what_is_of_no_use_is_not_asked_without_end() -> None:
    service, world, _, decode = served()
    service.early(1)
    world.run()
    (following,) = service.follows
    before = decode.core.outbox.counters["sent.follow"]
    gap = encode_offer(service.params(4, 2, "p/4", recall=True))
    address, sender = following.rank.place
    for _ in range(100):
        offered = Offered(TICKET, following.nonces[-1], gap, is_piece=True)
        decode.core.decode.receive(offered, address, sender, world.time(decode))
    assert decode.core.outbox.counters["sent.follow"] - before <= 2


def test_a_rank_that_needs_nothing_of_a_piece_asks_for_the_next() -> None:
    """Two decode ranks share the tokens of a block, so that each piece of four tokens is of one of them."""
    world = World()
    prefill = world.add("prefill", make_layout(), seed=1)
    ranks = ranks_of(world, "decode", 2, base=16, block_size=8, shards=2, interleave=4)
    target = {x: getattr(world.params([prefill], "t", [0], 1), x) for x in ("engine_id", "tp_size", "endpoints")}
    follow = FollowParams(ticket=TICKET, pp_size=1, **target)
    for rank in ranks:
        rank.core.follow("d", follow, "", 60.0, world.time(rank), takes_pieces=True)
        world.settle(rank)
    world.run()
    heads = []
    for end in (1, 2, 3, 4):
        piece = decode_params(
            world.groups[prefill.endpoint.incarnation].make_params(
                f"p/{end}", [((end - 1) * BLOCK, [THERE[end - 1]])], end * BLOCK, written=True, recall=True
            )
        )
        prefill.core.lend(piece, 1, world.time(prefill), TICKET, is_piece=True)
        world.settle(prefill)
        world.run()
        for rank in ranks if end == 1 else ():
            heads.append(rank.core.start_early(PullRequest("d", [(0, [1, 2])], piece), world.time(rank)).head)
            world.settle(rank)
        world.run(3.0)
    assert [None if it is None else it.have for it in heads] == [4 * BLOCK] * 2


def test_a_piece_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    service, _, prefill, _ = served()
    offers, encoded = prefill.core.prefill.offers, list[KVTransferParams]()

    def encode(params: KVTransferParams) -> msgspec.Raw:
        encoded.append(params)
        return encode_offer(params)

    monkeypatch.setattr("asynckv.core.offers.encode_offer", encode)
    service.piece(0, 1)
    for number in range(10):
        offers.follow(Follow(TICKET, 99 + number, Cohort("decode"), 0), ReplyTo(b"x"), "s", 0.0, "", "")
    assert len(encoded) == 1, "as a loan is; params of a long prompt take a millisecond"


async def test_a_pull_that_does_not_say_that_it_goes_on_leaves_no_flight() -> None:
    """When the desk is closed, such a flight is reported as failed and retired, though its request is complete."""
    async with Bench(False).pair() as (prefill, decode, group):
        desk = EngineDesk(decode.engine)
        params = await offered_whole(prefill, desk, group)
        desk.submit([Pull(request_id="d", groups=[(0, list(HERE))], params=params)])
        await until(lambda: desk.has_news)
        assert not desk._flights


def test_a_difference_is_not_forgotten_when_a_later_piece_is_read_well() -> None:
    service, world, prefill, decode = served(pull=PullConfig(second_look=1.0))
    service.early(1)
    world.complete_reads(decode)
    prefill.buffers.overwrite(THERE[0], 0xDD)
    (following,) = service.follows
    nonce = following.nonces[-1]  # of a follow that the prefill rank has answered before it hears of another one
    world.run()
    assert counters(decode) == {"pieces.differs": 1}
    again = encode_offer(service.piece(0, 3))
    address, sender = following.rank.place
    decode.core.decode.receive(Offered(TICKET, nonce, again, is_piece=True), address, sender, world.time(decode))
    world.settle(decode)
    world.run(0.1)
    assert counters(decode) in ({"pieces.differs": 1}, {"pieces.differs": 1, "pieces.complete": 1})
    service.pull(service.lend()[0])
    world.run(0.1)
    (request,) = service.requests
    assert request.pull is not None
    assert request.pull.reason is not Reason.COMPLETE, "the request names the same blocks"


def test_a_rank_whose_follow_has_ended_pulls_what_another_rank_was_offered() -> None:
    """Its time was over just before the order to pull came."""
    service = Service(1, 2)
    world, (_, second) = service.world, service.decode
    service.early(1)
    world.run()
    late = service.follows[1]
    second.core.decode.follows.end(late, Reason.NO_OFFER, "offered nothing in time", world.time(second))
    world.settle(second)
    world.run()
    params, _ = service.lend()
    world.run()
    assert service.follows[0].params == params
    service.pull(params)
    service.ended_well()


async def test_followers_of_tickets_without_end_add_a_bounded_number_of_news() -> None:
    async with Bench(False).pair() as (prefill, _, _):
        desk = EngineDesk(prefill.engine)
        driver = prefill.engine._driver
        offers = driver.core.prefill.offers
        for number in range(20_000):
            ticket = f"{number:032x}"
            offers.follow(Follow(ticket, number, Cohort("c"), 0), ReplyTo(b"x"), "s", driver.clock.now(), "", "")
            offers.unfollow(Unfollow(ticket, number), ReplyTo(b"x"), "s")
            if number % 100 == 0:
                driver.at_once()
        driver.at_once()
        assert len(desk._news) < 20_000, "an engine without steps never takes them"
