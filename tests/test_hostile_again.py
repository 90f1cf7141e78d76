"""Faults of head starts that a fourth review found: retries, ends of followings, and sleep."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asynckv import PlanRefused
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.head_start import _agreed
from asynckv.core.pull import PullRequest
from asynckv.core.types import Reason
from asynckv.embed import Cancel, Failed, Finished
from asynckv.errors import NoOffer, PullCancelled
from tests.engines import Bench, pass_until, turn_loop, until
from tests.test_follows import TICKET
from tests.test_head_start import HERE, Service, follow_early, lend_piece, lend_whole, pull_whole, reading_piece, served
from tests.test_ledgers import early
from tests.world import BLOCK


@pytest.mark.parametrize("pieces", ["none", "read meanwhile", "read before"])
def test_a_connection_that_breaks_once_costs_no_request_that_may_be_tried_again(pieces: str) -> None:
    """What claims while a piece is read is no attempt, so its failure is not the reader's last word. An attempt after a
    pause trusts nothing that pieces brought, because nothing holds the blocks meanwhile.
    """
    service, world, prefill, decode = served()
    if pieces != "none":
        service.early(2)
    if pieces == "read before":
        world.run()
    params, (lease,) = service.lend()
    world.deliver_all()
    request = decode.core.pull(PullRequest("d", [(0, list(HERE))], params), 2, 60.0, world.time(decode))
    world.settle(decode)
    world.deliver_all()
    (read,) = decode.reads
    world.tell(decode, TransferEnded(read, Ending.FAILED, "the connection broke", True))
    decode.buffers.overwrite(HERE[0], 77)
    for _ in range(20):
        world.run(0.5)
    assert request.pull is not None
    assert request.pull.reason is Reason.COMPLETE, request.pull.detail
    assert [decode.buffers.block(b) for b in HERE] == service.lent
    assert lease.is_over
    assert prefill.core.is_idle
    assert decode.core.is_idle


async def test_a_head_start_ends_whose_offer_comes_in_the_turn_in_which_its_time_is_over() -> None:
    """The core leaves the offer to the caller, which hears of the end alone."""
    bench = Bench(False)
    async with bench.pair() as (prefill, decode, group):
        driver: Any = decode.engine._driver
        core = driver.core
        follow = follow_early(prefill, decode, wait_s=5.0)
        await lend_piece(prefill, group)
        await until(lambda: "pieces.complete" in decode.engine.statistics().counters)
        await until(lambda: prefill.engine.is_followed(TICKET))
        hear, packets = driver.control._on_packet, list[Any]()
        driver.control._on_packet = lambda *packet: packets.append(packet)
        _, lent = lend_whole(prefill, group)
        await until(lambda: packets)
        driver.control._on_packet = hear
        bench.clock.advance(5.0)
        core.tick(bench.clock.now())
        for packet in packets:  # in the same turn of the loop
            hear(*packet)
        with pytest.raises(NoOffer):
            await follow
        await decode.engine.returned("d")
        await turn_loop(20)
        assert len(core.ledger) == 0, "its blocks have not returned"
        assert lent.is_over, "nobody will read it"
        assert not core.is_early("d")


@pytest.mark.parametrize("how", ["suspend", "aclose"])
@pytest.mark.parametrize("is_early", [False, True])
async def test_a_pull_that_its_own_engine_ends_is_cancelled_also_behind_a_piece(is_early: bool, how: str) -> None:
    """`PeerUnreachable` (engine_closed) says that the prefill engine sleeps, so that its caller prefills elsewhere."""
    bench = Bench(False)
    async with bench.pair() as (prefill, decode, group):
        data = decode.data
        data.deferred = True
        if is_early:
            follow = await reading_piece(prefill, decode, group)
        params, _ = lend_whole(prefill, group)
        if is_early:
            await follow
        pull = pull_whole(decode, params)
        await until(lambda: data.running)
        await turn_loop(20)
        ending = asyncio.create_task(getattr(decode.engine, how)(0.0))
        await turn_loop(20)
        data.finish()
        await pass_until(bench, lambda: pull.done() and ending.done(), 0.05)
        with pytest.raises(PullCancelled) as caught:
            await pull
        assert caught.value.reason == "cancelled"
        assert caught.value.held == {}


def test_a_head_start_whose_prompt_is_cached_is_released_as_soon_as_it_is_offered() -> None:
    """`release` says so of each request; without it the prefill engine waits for the end of the lease."""
    ledger = early()
    ledger.release("a")
    assert Cancel("a", follows_on=True) in ledger.take_orders()


def test_a_head_start_that_fails_is_released_as_soon_as_it_is_offered() -> None:
    """Its prefill engine goes on, and nobody else knows that its loan will not be read."""
    ledger = early(num_ranks=2)
    ledger.update(0, Finished(failed=[Failed("a", PlanRefused("it does not fit"))]))
    (order,) = ledger.take_orders()
    assert isinstance(order, Cancel)
    assert order.follows_on


def test_a_ticket_that_is_followed_on_to_be_released_can_be_followed_anew() -> None:
    """As by a caller that tries a failed head start again."""
    service = Service()
    world, (decode,) = service.world, service.decode
    assert decode.core.cancel("d", world.time(decode), follows_on=True)
    world.settle(decode)
    world.deliver_all()
    anew = service.follow(decode, "again")
    world.run()
    params, (lease,) = service.lend()
    world.run()
    assert anew.params == params
    assert not lease.is_over, "the earlier follow has released it"
    assert decode.inspect.check_integrity() == []


def test_tokens_without_a_hash_on_either_side_are_not_taken_for_the_same() -> None:
    made = {"hashes": ["a"], "hash_tokens": BLOCK}
    service = Service()
    assert _agreed(service.params(3, 0, "p/3", recall=True, **made), service.params(4, 0, "p", **made)) == BLOCK
