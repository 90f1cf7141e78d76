"""Faults of head starts that hostile peers and wrong calls show, each with the order of events that showed it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from asynckv import LocalProtocolError, PrefillRanks, PullConfig
from asynckv.core.head_start import HeadStart
from asynckv.core.types import Cohort, Endpoint, Outcome, Reason, ReplyTo
from asynckv.core.wire import Follow, Offered, Release
from asynckv.embed import EndPieces, EngineDesk, Finished, Offer, PrefillLedger, Pull, StartEarly
from asynckv.errors import AsyncKVError, PullTimeout
from asynckv.geometry.blocks import check_block_ids
from asynckv.geometry.bounds import MAX_TOKENS
from tests.engines import Bench, cancel, news_of, passing, turn_loop, until
from tests.test_follows import OTHER, TICKET, sent, target_of
from tests.test_head_start import (
    HERE,
    THERE,
    beginning,
    counters,
    follow_early,
    lend_piece,
    lend_whole,
    offered_piece,
    offered_whole,
    pull_whole,
    reading_piece,
    served,
)
from tests.test_ledgers import early, new_params
from tests.world import BLOCK, make_layout


def test_nothing_else_fills_what_pieces_brought_while_the_rest_is_pulled() -> None:
    """A scheduler gives a block to two requests, which a plain pull notices."""
    service, world, prefill, decode = served()
    service.early(2)
    world.run()
    params, _ = service.lend()
    world.run()
    service.pull(params)
    world.deliver_all()
    assert decode.reads
    other, _ = world.lent(prefill, "other", [9])
    with pytest.raises(LocalProtocolError, match="still being written by a pull of 'd'"):
        world.pull(decode, "x", [HERE[0]], other)
    world.discharge(decode, "x", other)
    service.ended_well()


@pytest.mark.parametrize("early", [False, True])
async def test_a_follow_that_is_cancelled_as_its_request_is_pulled_releases_nothing(early: bool) -> None:
    """As on the ranks that were not the first to be offered it: `pull` what another rank was offered, and cancel."""
    async with Bench(False).pair() as (prefill, decode, group):
        if early:
            follow = await beginning(prefill, decode, group)
        else:
            follow = asyncio.create_task(decode.engine.follow("d", target_of(prefill.engine)))
            await until(lambda: decode.engine._driver.core.decode.follows.by_id)
        params, _ = lend_whole(prefill, group, ticket="")
        pull = pull_whole(decode, params)
        await until(lambda: not decode.engine._driver.core.decode.follows.by_id)
        await cancel(follow)
        assert (await pull).num_tokens == 64


async def test_a_follow_that_is_cancelled_as_its_request_is_announced_releases_nothing() -> None:
    async with Bench(False).pair() as (prefill, decode, group):
        follow = asyncio.create_task(decode.engine.follow("d", target_of(prefill.engine)))
        await until(lambda: decode.engine._driver.core.decode.follows.by_id)
        params, _ = lend_whole(prefill, group, ticket="")
        decode.engine.announce("d", params)
        await cancel(follow)
        await turn_loop(20)
        assert (await pull_whole(decode, params)).num_tokens == 64


def test_an_offer_that_crosses_a_cancellation_is_released_while_a_piece_is_still_read() -> None:
    service, world, prefill, decode = served()
    service.early(2)
    prefill.core.prefill.offers.end_pieces(TICKET)  # of a prompt that was preempted, so that followers wait
    world.live(3.0)  # the read takes so long that its follower repeats itself
    assert prefill.core.prefill.parking.num_parked
    assert decode.reads
    _, (lease,) = service.lend()
    assert sent(world, Offered)
    world.cancel(decode, "d")
    world.run(0.1)
    assert lease.is_over, "the blocks of a long prompt would wait for the end of its lease"


@pytest.mark.parametrize("how", ["engine", "restart"])
def test_pieces_of_one_engine_are_not_put_together_with_the_loan_of_another(how: str) -> None:
    """A router had it computed again elsewhere, or the engine was restarted, perhaps with other weights."""
    service, world, _, decode = served()
    service.early(2)
    world.run()
    name = {"engine": "second", "restart": "prefill"}[how]
    other = world.add("second", make_layout(base=1 << 42), seed=9, engine_id=name)
    params = world.params([other], "p", list(THERE), 4 * BLOCK, written=True)
    world.lend(other, params)
    lent = [other.buffers.block(b) for b in THERE]
    try:
        service.pull(params)
    except LocalProtocolError:
        return
    world.run(0.1)
    assert [decode.buffers.block(b) for b in HERE] == lent


async def test_blocks_of_a_cancelled_head_start_can_be_used_once_they_have_returned() -> None:
    async with Bench(False).pair() as (prefill, decode, group):
        data, follow = decode.data, await reading_piece(prefill, decode, group)
        params, _ = prefill.lent(group, "q", list(range(10, 14)))
        await cancel(follow)

        async def waits() -> None:
            await decode.engine.returned("d")
            data.deferred = False
            await decode.engine.pull("e", [(0, list(HERE))], params)

        task = asyncio.create_task(waits())
        await turn_loop(5)
        data.finish()
        await task


def test_a_head_start_begins_behind_what_is_cached_of_the_groups_that_pieces_bring() -> None:
    """A group of states has its list from the first token on, however much of the prompt is cached."""
    layout = make_layout()
    groups = (layout.groups[0], msgspec.structs.replace(layout.groups[0], window=2 * BLOCK))
    layout = msgspec.structs.replace(layout, groups=groups)
    it = HeadStart(layout, "e", check_block_ids(layout, [(BLOCK, [2, 3, 4]), (0, [5, 6, 7, 8])]), None)
    assert it.have == BLOCK


async def test_a_pull_that_is_ordered_twice_behind_a_head_start_is_refused_and_changes_nothing() -> None:
    async with Bench(False).pair() as (prefill, decode, group):
        desk = EngineDesk(decode.engine)
        params = await offered_whole(prefill, desk, group)
        order = Pull(request_id="d", groups=[(0, list(HERE))], params=params, goes_on=True)
        desk.submit([order, order])
        found = Finished()
        while not (found.finished_recving or found.failed):
            found = await news_of(desk)
        assert not found.failed, found.failed
        assert found.finished_recving[0].num_tokens == 64


@pytest.mark.parametrize("wrong", ["num_tokens", "groups", "decode_engines", "waits"])
def test_a_loan_that_a_ledger_refuses_ends_its_pieces(wrong: str) -> None:
    ledger = PrefillLedger(PrefillRanks("p", [Endpoint(0, "tcp://1", "one")]))
    ledger.take_ticket(TICKET)
    ledger.lend_piece("r", TICKET, [(0, [1])], 16)
    given: dict[str, Any] = {"groups": [(0, [1, 2])], "num_tokens": 32, "ticket": TICKET}
    if wrong == "waits":
        ledger.lend("r", [(0, [5])], 16, written=False)
    else:
        given[wrong] = {"num_tokens": -1, "groups": [(0, ["x"])], "decode_engines": [7]}[wrong]
    ledger.take_orders()
    with pytest.raises(AsyncKVError):
        ledger.lend("r", **given)
    assert EndPieces(TICKET) in ledger.take_orders(), "its caller takes the blocks for free"


def test_a_pull_with_malformed_blocks_is_refused_with_a_clear_error() -> None:
    ledger = early(Offer("a", new_params()))
    for groups in (None, [None], [(0, None)], 7):
        with pytest.raises(LocalProtocolError):
            ledger.pull("a", groups)  # type: ignore[arg-type]


def test_a_follower_that_can_take_nothing_keeps_no_other_engine_from_a_head_start() -> None:
    service, _, prefill, _ = served()
    offers = prefill.core.prefill.offers
    offers.follow(Follow(OTHER, 1, Cohort("broken"), MAX_TOKENS), ReplyTo(b"x"), "s", 0.0, "", "")
    prefill.core.lend(service.params(1, 0, "p/1", recall=True), 1, 0.0, OTHER, is_piece=True)
    offers.follow(Follow(OTHER, 2, Cohort("broken"), MAX_TOKENS), ReplyTo(b"x"), "s", 0.0, "", "")
    offers.follow(Follow(OTHER, 3, Cohort("well"), 0), ReplyTo(b"y"), "t", 0.0, "", "")
    assert counters(prefill)["pieces.offered"] == 1


def test_a_piece_looks_at_followers_that_wait_once_and_not_at_each_earlier_piece() -> None:
    """With 2,048 followers and 256 pieces the loop was away for 60 ms, each time that a piece was lent."""
    service, _, prefill, _ = served()
    offers, looks = prefill.core.prefill.offers, 0

    class Tokens(int):
        def __lt__(self, other: object) -> bool:  # `piece.begin <= have < piece.end`
            nonlocal looks
            looks += 1
            return int(self) < other  # type: ignore[operator]

    for number in range(100):
        follow = Follow(OTHER, number, Cohort("c"), Tokens(MAX_TOKENS))
        offers.follow(follow, ReplyTo(b"x"), f"s{number}", 0.0, "", "")
    for number in range(20):
        looks = 0
        prefill.core.lend(service.params(1, 0, f"p/{number}", recall=True), 1, 0.0, OTHER, is_piece=True)
    assert looks <= 200


def test_a_loan_does_not_run_out_while_its_reader_waits_for_the_end_of_a_piece() -> None:
    """A pull claims and renews from the beginning, however long it queues or reads."""
    service, world, _, decode = served()
    service.early(2)
    assert decode.reads
    params, (lease,) = service.lend()
    world.deliver_all()
    service.pull(params, 120.0)
    world.live(params.lease_s + 10.0)
    assert not lease.is_over
    service.ended_well()


def test_the_params_of_pieces_take_a_bounded_number_of_bytes() -> None:
    """Each piece of a long prompt repeats all hashes before it: 4 MB of 65,536 hashes, 256 times."""
    service, _, prefill, _ = served()
    hashes = [f"{number:064x}" for number in range(1 << 16)]
    for number in range(16):
        piece = service.params(1, 0, f"p/{number}", recall=True, hashes=hashes, hash_tokens=1)
        prefill.core.lend(piece, 1, 0.0, OTHER, is_piece=True)
    lent = prefill.core.prefill.offers._pieces[OTHER].lent
    assert sum(len(memoryview(each.params)) for each in lent) <= 1 << 25


async def test_a_head_start_that_is_never_pulled_is_too_late_and_not_refused_by_a_piece_of_long_ago() -> None:
    bench = Bench(False)
    async with bench.pair(pull=PullConfig(announce_s=5.0)) as (prefill, decode, group):
        desk, data = EngineDesk(decode.engine), decode.data
        piece = await offered_piece(prefill, desk, group, wait_s=5.0)
        data.deferred = True
        desk.submit([StartEarly(request_id="d", groups=[(0, list(HERE))], params=piece)])
        await until(lambda: data.running)
        prefill.engine.end_pieces(TICKET)  # its prompt is preempted
        data.deferred = False
        data.finish()
        await until(lambda: "pieces.unknown_key" in decode.engine.statistics().counters)
        failed = list[Any]()
        while not failed:
            bench.clock.advance(0.5)
            await turn_loop(5)
            failed = desk.take_finished().failed
        assert failed[0].error.reason == "timeout"


@pytest.mark.parametrize("way", ["recall", "withdraw"])
async def test_a_piece_that_is_taken_back_by_its_params_is_granted_no_more(way: str) -> None:
    """Its params say `recall=True`, and `recall` promises that nothing of what it names is lent when it returns."""
    async with Bench(False).pair() as (prefill, decode, group):
        data = decode.data
        data.deferred = True
        follow = follow_early(prefill, decode)
        piece = await lend_piece(prefill, group)
        await until(lambda: data.running)
        if way == "recall":
            assert prefill.engine.recall([piece]) == ()
        else:
            prefill.engine.withdraw(piece)
        for array in prefill.arrays:
            array[:] = 0xDD
        data.deferred = False
        data.finish()
        await until(lambda: any(x.startswith("pieces.") for x in decode.engine.statistics().counters))
        assert "pieces.complete" not in decode.engine.statistics().counters
        await cancel(follow)


def test_a_piece_that_a_reader_has_ended_is_offered_no_more() -> None:
    """Only a reader of another version, or a hostile one, releases a piece."""
    service, _, prefill, _ = served()
    offers = prefill.core.prefill.offers
    piece = service.params(1, 0, "p/1", recall=True)
    prefill.core.lend(piece, 1, 0.0, OTHER, is_piece=True)
    release = Release(piece.key, piece.request_id, Cohort("evil"), "x", Outcome.COMPLETE)
    prefill.core.prefill.receive(release, ReplyTo(b"x"), "s", 0.0)
    offers.follow(Follow(OTHER, 1, Cohort("evil"), 0), ReplyTo(b"x"), "s", 0.0, "", "")
    assert counters(prefill).get("pieces.offered", 0) == 0
    assert offers.unread == set()


@pytest.mark.parametrize("stage", ["piece", "rest"])
async def test_the_error_of_a_head_start_names_all_blocks_that_are_held(stage: str) -> None:
    """Its caller gives the others to another request at once."""
    bench = Bench(False)
    async with bench.pair() as (prefill, decode, group):
        data, follow = decode.data, await reading_piece(prefill, decode, group)
        if stage == "rest":
            data.finish()
            await until(lambda: prefill.engine.is_followed(TICKET))
        params, _ = lend_whole(prefill, group)
        await follow
        pull = pull_whole(decode, params, timeout_s=1.0)
        await until(lambda: data.running)
        with pytest.raises(PullTimeout) as caught:
            await passing(bench, pull, 0.1)
        ledger = decode.engine._driver.core.ledger
        assert caught.value.held[0] == tuple(b for b in HERE if ledger.holders_of(0, b))
        data.finish()
        await caught.value.returned()
        assert not len(ledger)


def test_the_loan_decides_also_where_pieces_brought_all_of_it() -> None:
    """A prefill engine forgets the ticket when it lends, so that the pieces outlive the loan."""
    service, world, prefill, _ = served()
    piece = service.piece(0, 4)
    world.run()
    params = service.params(4, 0, "p")
    lease = world.lend(prefill, params)  # without its ticket
    world.revoke(prefill, lease)
    assert lease.is_over
    for block in THERE:
        prefill.buffers.overwrite(block, 0xDD)
    service.start(piece)
    world.run()
    service.pull(params)
    world.run(0.1)
    (request,) = service.requests
    assert request.pull is not None
    assert request.pull.reason is not Reason.COMPLETE


@pytest.mark.parametrize("ticket", ["", OTHER])
def test_a_loan_without_the_ticket_of_its_pieces_ends_them(ticket: str) -> None:
    ledger = PrefillLedger(PrefillRanks("p", [Endpoint(0, "tcp://1", "one")]))
    ledger.take_ticket(TICKET)
    ledger.lend_piece("r", TICKET, [(0, [1])], 16)
    ledger.take_orders()
    ledger.lend("r", [(0, [1, 2])], 32, ticket=ticket)
    assert EndPieces(TICKET) in ledger.take_orders(), "nothing else would end them with the loan"
