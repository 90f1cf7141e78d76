"""Faults of head starts that a fourth review found: retries, ends of followings, and sleep."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from asynckv import DecodeLedger, PlanRefused
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.head_start import _agreed
from asynckv.core.pull import PullRequest
from asynckv.core.types import Reason
from asynckv.embed import Cancel, Failed, Finished, Offer
from asynckv.errors import NoOffer, PullCancelled
from tests.engines import Bench, pass_until, turn_loop, until
from tests.test_follows import TICKET, target_of
from tests.test_head_start import HERE, THERE, Service
from tests.world import BLOCK


@pytest.mark.parametrize("pieces", ["none", "read meanwhile", "read before"])
def test_a_connection_that_breaks_once_costs_no_request_that_may_be_tried_again(pieces: str) -> None:
    """What claims while a piece is read is no attempt, so its failure is not the reader's last word. An attempt after a
    pause trusts nothing that pieces brought, because nothing holds the blocks meanwhile.
    """
    service = Service()
    world, (prefill,), (decode,) = service.world, service.prefill, service.decode
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
        follow = asyncio.create_task(
            decode.engine.follow("d", target_of(prefill.engine), groups=[(0, list(HERE))], wait_s=5.0)
        )
        await until(lambda: prefill.engine.is_followed(TICKET))
        piece = group.make_params("p/2", [(0, list(THERE[:2]))], 32, written=True, recall=True)
        prefill.engine.lend_piece(piece, TICKET)
        await until(lambda: "pieces.complete" in decode.engine.statistics().counters)
        await until(lambda: prefill.engine.is_followed(TICKET))
        hear, packets = driver.control._on_packet, list[Any]()
        driver.control._on_packet = lambda *packet: packets.append(packet)
        params = group.make_params("p", [(0, list(THERE))], 64, written=True)
        lent = prefill.engine.lend(params, ticket=TICKET)
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
            follow = asyncio.create_task(decode.engine.follow("d", target_of(prefill.engine), groups=[(0, list(HERE))]))
            await until(lambda: prefill.engine.is_followed(TICKET))
            piece = group.make_params("p/2", [(0, list(THERE[:2]))], 32, written=True, recall=True)
            prefill.engine.lend_piece(piece, TICKET)
            await until(lambda: data.running)
        params = group.make_params("p", [(0, list(THERE))], 64, written=True)
        prefill.engine.lend(params, ticket=TICKET)
        if is_early:
            await follow
        pull = asyncio.create_task(decode.engine.pull("d", [(0, list(HERE))], params))
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


def early_of(num_ranks: int = 1) -> DecodeLedger:
    """Return the ledger of a decode engine with a request that has a head start, and is not offered yet."""
    service, ledger = Service(), DecodeLedger(num_ranks)
    ledger.follow("d", msgspec.to_builtins(service.follows[0].target), takes_pieces=True)
    ledger.take_orders()
    piece = msgspec.to_builtins(service.params(1, 0, "p/1", recall=True))
    ledger.update(0, Finished(offered=[Offer("d", piece, is_piece=True)]))
    ledger.start_early("d", [(0, [1])])
    ledger.take_orders()
    return ledger


def test_a_head_start_whose_prompt_is_cached_is_released_as_soon_as_it_is_offered() -> None:
    """`release` says so of each request; without it the prefill engine waits for the end of the lease."""
    ledger = early_of()
    ledger.release("d")
    assert Cancel("d", follows_on=True) in ledger.take_orders()


def test_a_head_start_that_fails_is_released_as_soon_as_it_is_offered() -> None:
    """Its prefill engine goes on, and nobody else knows that its loan will not be read."""
    ledger = early_of(2)
    ledger.update(0, Finished(failed=[Failed("d", PlanRefused("it does not fit"))]))
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
