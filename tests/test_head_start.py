"""A head start: pieces of a request that is still computed, lent by a prefill rank and read by a decode rank."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckv import LocalProtocolError, NoOffer, PieceSizes, PlanRefused, PrefillRanks, PullConfig, PullResult
from asynckv.core.attempts import Request, RequestState
from asynckv.core.following import Following
from asynckv.core.head_start import HeadStart
from asynckv.core.lease import Lease
from asynckv.core.pull import Kind, Pull, PullRequest
from asynckv.core.types import Cohort, FollowParams, KVTransferParams, Outcome, Reason, ReplyTo, decode_params
from asynckv.core.wire import Claim, Follow, Release
from asynckv.embed import EngineDesk, StartEarly
from asynckv.embed import Follow as FollowOrder
from asynckv.engine import LentRequest
from asynckv.geometry.blocks import check_block_ids
from tests.engines import Bench, Side, cancel, news_of, until
from tests.test_follows import TICKET, sent, target_of
from tests.world import BLOCK, Rank, World, make_layout, opened, ranks_of

HERE, THERE = (1, 2, 3, 4), (7, 5, 6, 3)  # the blocks of the request on either side


class Service:
    """A prefill engine that computes one prompt of four blocks, and a decode engine that follows it, in one world."""

    def __init__(self, prefill_size: int = 1, decode_size: int = 1, **options: Any) -> None:
        if prefill_size == decode_size == 1:
            self.world, *ranks = opened(**options)
            self.prefill, self.decode = [ranks[0]], [ranks[1]]
        else:
            self.world = World()
            self.prefill = ranks_of(self.world, "prefill", prefill_size)
            self.decode = ranks_of(self.world, "decode", decode_size, base=16)
        self.ranks: PrefillRanks | None = None
        self.follows = [self.follow(rank) for rank in self.decode]
        self.world.run()
        self.requests: list[Request] = []

    def follow(self, rank: Rank, name: str = "d") -> Following:
        core = rank.core
        target = {x: getattr(self.params(4, 0, "target"), x) for x in ("engine_id", "tp_size", "pp_size", "endpoints")}
        following = core.follow(
            name, FollowParams(ticket=TICKET, **target), "", 60.0, self.world.time(rank), takes_pieces=True
        )
        self.world.settle(rank)
        return following

    def params(self, end: int, first: int, name: str, **kwargs: Any) -> KVTransferParams:
        group = [(first * BLOCK, list(THERE[first:end]))]
        if self.ranks is None:
            layout = self.prefill[0].core.identity
            self.ranks = PrefillRanks(layout.engine_id, [rank.endpoint for rank in self.prefill])
        return decode_params(self.ranks.make_params(name, group, end * BLOCK, written=True, **kwargs))

    def piece(self, first: int, end: int, ranks: Sequence[Rank] = (), **kwargs: Any) -> KVTransferParams:
        params = self.params(end, first, f"p/{end}", recall=True, **kwargs)
        for rank in ranks or self.prefill:
            rank.core.lend(params, 1, self.world.time(rank), TICKET, is_piece=True)
            self.world.settle(rank)
        return params

    def lend(self, **kwargs: Any) -> tuple[KVTransferParams, list[Lease]]:
        params = self.params(4, 0, "p", **kwargs)
        self.lent = [self.prefill[0].buffers.block(b) for b in THERE]
        return params, [self.world.lend(rank, params, ticket=TICKET) for rank in self.prefill]

    def start(self, piece: KVTransferParams, hashes: Sequence[str] | None = None) -> list[Request]:
        wanted = PullRequest("d", [(0, list(HERE))], piece, hashes=hashes)
        for rank in self.decode:
            self.requests.append(rank.core.start_early(wanted, self.world.time(rank)))
            self.world.settle(rank)
        return self.requests

    def early(self, end: int = 1, ranks: Sequence[Rank] = ()) -> KVTransferParams:
        """Lend the first piece, and give the request blocks once it is offered."""
        piece = self.piece(0, end, ranks)
        self.world.run()
        self.start(piece)
        return piece

    def pull(self, params: KVTransferParams, timeout_s: float = 30.0) -> list[Pull | None]:
        wanted = PullRequest("d", [(0, list(HERE))], params)
        for rank in self.decode:
            request = rank.core.pull(wanted, 0, timeout_s, self.world.time(rank))
            self.world.settle(rank)
            assert request in self.requests
        return [request.pull for request in self.requests]

    def ended_well(self) -> None:
        """All ends, and the request has what was lent. (Heads of blocks are compared where each side has one rank.)"""
        self.world.run(0.1)
        for request in self.requests:
            assert request.state is RequestState.OVER
            assert request.pull is not None
            assert (request.pull.reason, request.pull.kind in (Kind.PULL, Kind.HIT)) == (Reason.COMPLETE, True)
        if len(self.prefill) == len(self.decode) == 1:
            assert [self.decode[0].buffers.block(b) for b in HERE] == self.lent
        self.world.check()
        for rank in self.prefill:
            offers = rank.core.prefill.offers
            assert [offers.pieces, offers._pieces, offers.lent, offers.unread] == [{}, {}, {}, set()]
            assert rank.core.is_idle
        assert all(rank.core.is_idle for rank in self.decode)


def served(**options: Any) -> tuple[Service, World, Rank, Rank]:
    """Return a service with a rank of each side, its world and both ranks."""
    service = Service(**options)
    return service, service.world, service.prefill[0], service.decode[0]


def counters(rank: Rank, prefix: str = "pieces.") -> dict[str, int]:
    return {name: n for name, n in rank.core.outbox.counters.items() if name.startswith(prefix)}


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_the_last_pull_reads_only_what_pieces_did_not_bring(prefill_size: int, decode_size: int) -> None:
    service = Service(prefill_size, decode_size)
    service.early(1)
    service.world.run()
    service.piece(1, 3)
    service.world.run()
    params, leases = service.lend()
    service.world.run()
    assert [following.params for following in service.follows] == [params] * decode_size
    pulls = service.pull(params)
    service.ended_well()
    for pull in pulls:
        assert pull is not None
        assert pull.lists is not None
        assert [first for first, _ in pull.lists.local] == [3 * BLOCK]
    for rank in service.decode:
        assert counters(rank) == {"pieces.complete": 2}
    assert all(lease.is_over for lease in leases)


def test_a_piece_is_claimed_only_after_its_read_and_is_never_released() -> None:
    service, world, _, decode = served()
    service.early(1)
    assert decode.reads
    assert sent(world, Claim) == []
    world.complete_all()
    (claim,) = sent(world, Claim)
    (follow,) = sent(world, Follow)
    assert len(world.letters) == 1, "both leave in one packet"
    assert (follow.have, claim.request_id) == (BLOCK, "p/1")
    world.deliver_all()
    assert service.requests[0].head is not None
    assert service.requests[0].head.have == BLOCK
    assert decode.core.outbox.counters["sent.release"] == 0
    assert not decode.core.decode.pulls, "the piece is over"


def test_a_piece_is_offered_once_and_then_only_the_loan_until_there_are_blocks() -> None:
    service, _, prefill, decode = served()
    service.piece(0, 1)
    service.world.run(5.0)
    assert counters(prefill) == {"pieces.lent": 1, "pieces.offered": 1}
    assert service.follows[0].have == -1
    params, _ = service.lend()
    service.world.run()
    assert service.follows[0].params == params
    assert decode.core.decode.between == {}


def test_a_follower_without_have_is_offered_the_loan_alone() -> None:
    service, _, prefill, decode = served()
    plain = service.world.follow(service.world.add("other", make_layout(base=1 << 42), seed=3), "d", [prefill], TICKET)
    service.piece(0, 2)
    service.world.run()
    assert plain.is_open
    assert not prefill.core.prefill.offers.is_followed("f" * 32)
    assert counters(prefill) == {"pieces.lent": 1, "pieces.offered": 1}
    assert decode.core.outbox.counters["sent.claim"] == 0


def test_pieces_are_offered_to_one_cohort() -> None:
    service, _, prefill, _ = served()
    second = service.world.add("second", make_layout(base=1 << 42), seed=3, engine_id="another")
    follow = service.follow(second)
    service.world.run()
    service.piece(0, 2)
    service.world.run()
    assert follow.have == 0, "it was offered nothing"
    assert service.follows[0].have == -1
    assert not prefill.core.prefill.offers.is_followed(TICKET), "no piece would be offered"


def test_a_piece_that_was_taken_back_while_it_was_read_counts_for_nothing_and_the_next_is_read_anew() -> None:
    service, world, prefill, decode = served()
    service.early(2)
    prefill.core.prefill.offers.end_pieces(TICKET)
    for block in THERE[:2]:
        prefill.buffers.overwrite(block, 0xDD)
    world.run()
    assert counters(decode) == {"pieces.unknown_key": 1}
    assert service.requests[0].head is not None
    assert service.requests[0].head.have == 0
    service.piece(0, 3)
    world.run()
    assert service.requests[0].head.have == 3 * BLOCK
    service.pull(service.lend()[0])
    service.ended_well()


def test_what_came_before_a_preemption_is_kept_and_a_piece_begins_behind_it() -> None:
    service = Service()
    service.early(2)
    service.world.run()
    service.prefill[0].core.prefill.offers.end_pieces(TICKET)
    service.piece(0, 1)
    service.world.run()
    assert counters(service.decode[0]) == {"pieces.complete": 1}, "the new piece adds nothing"
    service.piece(1, 3)
    service.world.run()
    assert counters(service.decode[0]) == {"pieces.complete": 2}
    service.pull(service.lend()[0])
    service.ended_well()


def test_the_last_pull_begins_once_nothing_of_a_piece_can_write_any_more() -> None:
    service, world, _, decode = served()
    service.early(2)
    (read,) = decode.reads
    params, _ = service.lend()
    (pull,) = service.pull(params)
    world.deliver_all()
    assert pull is not None
    assert pull.kind is Kind.PIECE
    assert list(decode.reads) == [read]
    assert service.requests[0].state is RequestState.PAUSING
    service.ended_well()
    assert counters(decode) == {"pieces.complete": 1}


def test_a_piece_that_hangs_fails_the_pull_at_its_deadline_and_the_loan_is_released() -> None:
    service, world, _, decode = served()
    service.early(2)
    params, (lease,) = service.lend()
    service.pull(params, 5.0)
    (request,) = service.requests
    world.live(6.0)
    assert decode.requests_ended == [request]
    assert request.pull is not None
    assert (request.attempts, request.pull.reason, request.is_free) == (0, Reason.TIMEOUT, False)
    assert request.discharge is Reason.TIMEOUT
    assert lease.is_over, "its reader has said that it does not come"
    assert decode.requests_returned == []
    world.run()
    assert decode.requests_returned == [request]
    world.check()
    assert decode.core.is_idle


@pytest.mark.parametrize("is_read", [False, True])
def test_a_head_start_that_is_cancelled_ends_once_and_gives_its_blocks_back(is_read: bool) -> None:
    service, world, prefill, decode = served()
    service.early(2)
    if is_read:
        world.run()
    world.cancel(decode, "d")
    world.run(0.1)
    assert decode.requests_ended == service.requests
    assert service.requests[0].is_free
    assert not service.follows[0].is_open
    assert prefill.core.prefill.parking.num_parked == 0
    world.check()
    assert decode.core.is_idle


def test_a_head_start_whose_loan_is_known_releases_it_when_it_is_cancelled() -> None:
    service, world, _, decode = served()
    service.early(2)
    world.run()
    params, (lease,) = service.lend()
    world.run()
    decode.core.cancel("d", world.time(decode), params=params)
    world.settle(decode)
    world.run()
    assert lease.is_over
    assert decode.requests_ended == service.requests
    assert decode.core.is_idle


@pytest.mark.parametrize("way", ["release", "revoke", "withdraw", "withdraw_ticket", "close"])
def test_pieces_end_with_their_loan_or_ticket_in_the_same_call(way: str) -> None:
    service, world, prefill, _ = served()
    core, offers = prefill.core, prefill.core.prefill.offers
    service.piece(0, 2)
    assert offers.pieces
    if way == "withdraw_ticket":
        core.withdraw_ticket(TICKET)
    elif way == "close":
        core.close(world.time(prefill))
    else:
        params, (lease,) = service.lend()
        assert offers.pieces, "a reader may still read it"
        if way == "revoke":
            core.prefill.revoke(lease, world.time(prefill))
        elif way == "withdraw":
            core.withdraw(params, world.time(prefill))
        else:
            cohort = Cohort("c")
            release = Release(params.key, "p", cohort, "x", Outcome.COMPLETE)
            core.prefill.receive(release, ReplyTo(b""), "s", world.time(prefill))
        assert lease.is_over
    assert [offers.pieces, offers.unread] == [{}, set()]


def test_no_piece_is_lent_under_a_ticket_that_has_ended_or_is_lent() -> None:
    for is_lent in (True, False):
        service, _, prefill, _ = served()
        if is_lent:
            service.lend()
        else:
            prefill.core.withdraw_ticket(TICKET)
        service.piece(0, 2)
        assert [prefill.core.prefill.offers.pieces, prefill.core.prefill.offers._pieces] == [{}] * 2


def test_a_claim_that_comes_before_its_piece_waits_for_it() -> None:
    """A rank gets the order to lend later than the rank whose offer the reader heard."""
    service = Service(2, 1)
    world, (first, second) = service.world, service.prefill
    params = service.early(2, [first])
    world.run()
    assert service.requests[0].head is not None
    assert service.requests[0].head.have == 0
    second.core.lend(params, 1, world.time(second), TICKET, is_piece=True)
    world.settle(second)
    world.run()
    assert service.requests[0].head.have == 2 * BLOCK
    service.pull(service.lend()[0])
    service.ended_well()


def test_a_difference_at_a_second_look_ends_the_request() -> None:
    service, world, prefill, decode = served(pull=PullConfig(second_look=1.0))
    service.early(2)
    world.complete_reads(decode)
    prefill.buffers.overwrite(THERE[0], 0xDD)
    world.run(0.1)
    (request,) = service.requests
    assert service.follows[0].have == -1
    params, (lease,) = service.lend()
    world.run()
    service.pull(params)
    world.run(0.1)
    assert decode.requests_ended == [request]
    assert request.pull is not None
    assert (request.attempts, request.stopped, request.pull.reason) == (0, Reason.DIFFERS, Reason.DIFFERS)
    assert lease.discharged, "it is released as failed, and nothing of it was published"
    assert decode.core.is_idle


def test_a_pull_with_other_blocks_is_refused_and_changes_nothing() -> None:
    service, world, _, decode = served()
    service.early(2)
    world.run()
    params, _ = service.lend()
    with pytest.raises(LocalProtocolError, match="names other blocks"):
        decode.core.pull(PullRequest("d", [(0, [1, 9, 3, 4])], params), 0, 30.0, world.time(decode))
    assert service.requests[0].state is RequestState.EARLY
    service.pull(params)
    service.ended_well()


def test_nothing_else_fills_or_lends_the_blocks_of_a_head_start_between_its_pieces() -> None:
    service, world, prefill, decode = served()
    service.early(1)
    world.run()
    assert not decode.reads
    other, _ = world.lent(prefill, "other", [9])
    for call in (
        lambda: decode.core.pull(PullRequest("x", [(0, [2])], other), 0, 30.0, world.time(decode)),
        lambda: decode.core.start_early(PullRequest("y", [(0, [4])], other), world.time(decode)),
        lambda: world.lent(decode, "z", [3]),
    ):
        with pytest.raises(LocalProtocolError, match="still being written by a pull of 'd'"):
            call()
    service.pull(service.lend()[0])
    world.run(0.1)
    assert decode.inspect.holds(0.0) == ()
    assert len(decode.core.ledger) == 0
    assert reason_of(service) is Reason.COMPLETE


def reason_of(service: Service) -> Reason | None:
    (request,) = service.requests
    return None if request.pull is None else request.pull.reason


def test_a_piece_of_another_prompt_is_not_read_and_the_whole_is() -> None:
    service, world, _, decode = served()
    piece = service.piece(0, 1, hashes=["x"], hash_tokens=BLOCK)
    world.run()
    service.start(piece, hashes=["y", "y"])
    world.run()
    assert not decode.core.outbox.counters["bytes.read"]
    assert service.follows[0].have == -1
    service.pull(service.lend()[0])
    service.ended_well()


def test_an_offer_behind_a_gap_is_not_read() -> None:
    service = Service()
    service.early(1)
    service.world.run()
    (request,), (decode,) = service.requests, service.decode
    gap = service.params(4, 2, "p/4", recall=True)
    decode.core.decode.follows.on_piece(service.follows[0], gap, service.world.time(decode))
    assert request.head is not None
    assert (request.head.have, request.head.waiting) == (BLOCK, None)
    assert not decode.reads


def test_a_piece_is_no_request_on_either_side() -> None:
    service, world, prefill, decode = served()
    service.early(2)
    assert prefill.inspect.requests(0.0) == ()
    assert prefill.inspect.holds(0.0) == ()
    assert prefill.core.prefill.reclaim(100, world.time(prefill)) == ()
    world.run()
    assert prefill.leases_ended == []
    assert decode.core.outbox.counters["pulls.started"] == 0
    assert prefill.inspect.gauges()["blocks_lent"] == 0


def test_a_rank_makes_progress_for_readers_until_all_of_them_have_the_newest_piece() -> None:
    service = Service(1, 2)
    world, (prefill,), (first, second) = service.world, service.prefill, service.decode
    service.early(2)
    for rank in (first, second):
        assert prefill.core.prefill.offers.unread
        world.complete_reads(rank)
        world.deliver_all()
    assert not prefill.core.prefill.offers.unread


# -- what a head start keeps ---------------------------------------------------------------------------------------


def head(first: int = 0, num_blocks: int = 4) -> HeadStart:
    layout = make_layout()
    return HeadStart(layout, "e", check_block_ids(layout, [(first, list(range(1, 1 + num_blocks)))]), None)


def test_a_head_start_begins_behind_what_is_cached() -> None:
    it, service = head(BLOCK, 3), Service()
    assert it.have == BLOCK
    lists = it.lists(service.params(3, 0, "p", recall=True))
    assert lists is not None
    ((first, ids),) = lists.local
    assert (first, ids.tolist()) == (BLOCK, [1, 2])


@given(have=st.integers(0, 2 * BLOCK), num_tokens=st.integers(0, 4 * BLOCK))
def test_the_rest_is_all_that_pieces_did_not_bring_from_a_whole_block_on(have: int, num_tokens: int) -> None:
    it, piece = head(), PIECE
    it.took(piece, 100)
    it.have = have
    blocks = it.blocks
    ((first, ids),) = it.rest(blocks, num_tokens, piece)
    least = min(have, max(num_tokens - 1, 0))  # some is read of the loan in any case
    assert first == least - least % BLOCK
    assert ids.tolist() == blocks[0][1].tolist()[first // BLOCK :]


def test_pieces_of_which_the_loan_says_another_prompt_are_read_again() -> None:
    service, it = Service(), head()
    it.took(service.params(2, 0, "p", recall=True, hashes=["a", "b"], hash_tokens=BLOCK), 1)
    for hashes, begins in ((["a", "b", "c"], 2), (["a", "x", "c"], 1), (["x", "b", "c"], 0)):
        loan = service.params(4, 0, "p", hashes=hashes, hash_tokens=BLOCK)
        ((first, _),) = it.rest(it.blocks, 4 * BLOCK, loan)
        assert first == begins * BLOCK


# -- which chunks become a piece -------------------------------------------------------------------------------------


def pieces_of(num_chunks: int, chunks_per_read: float) -> list[range]:
    """Return the pieces of a prompt whose reader takes so many chunks of time to read one chunk."""
    sizes, free_at, out = PieceSizes(), 0.0, list[range]()
    for done in range(1, num_chunks):
        if (piece := sizes.take(done, num_chunks, is_followed=done >= free_at)) is not None:
            out.append(piece)
            free_at = done + chunks_per_read * len(piece)
    return out


@pytest.mark.parametrize("chunks_per_read", [0.05, 0.3, 0.9, 1.5, 10.0])
def test_pieces_follow_each_other_without_a_gap(chunks_per_read: float) -> None:
    pieces = pieces_of(32, chunks_per_read)
    assert [piece.start for piece in pieces] == [0, *[piece.stop for piece in pieces[:-1]]]


def test_a_quick_reader_is_given_few_pieces_and_little_is_left() -> None:
    pieces = pieces_of(32, 0.05)
    assert pieces[-1].stop == 31
    assert [len(piece) for piece in pieces] == [1, 2, 4, 8, 9, 4, 2, 1]


def test_a_slow_reader_is_given_all_that_is_finished_when_it_asks() -> None:
    pieces = pieces_of(32, 1.5)
    assert pieces[-1].stop >= 22, "it reads nearly without a pause"
    assert pieces_of(32, 100.0) == [range(1)]


PIECE = Service().params(2, 0, "p", recall=True)


# -- engines ---------------------------------------------------------------------------------------------------------


def follow_early(prefill: Side, decode: Side, **options: Any) -> asyncio.Task[dict[str, Any]]:
    """Follow a request of four blocks with a head start."""
    follow = decode.engine.follow("d", target_of(prefill.engine), groups=[(0, list(HERE))], **options)
    return asyncio.create_task(follow)


async def lend_piece(prefill: Side, group: PrefillRanks) -> dict[str, Any]:
    """Lend the first two of its blocks once it is followed."""
    await until(lambda: prefill.engine.is_followed(TICKET))
    piece = group.make_params("p/2", [(0, list(THERE[:2]))], 32, written=True, recall=True)
    prefill.engine.lend_piece(piece, TICKET)
    return piece


def lend_whole(prefill: Side, group: PrefillRanks, ticket: str = TICKET) -> tuple[dict[str, Any], LentRequest]:
    params = group.make_params("p", [(0, list(THERE))], 64, written=True)
    return params, prefill.engine.lend(params, ticket=ticket)


def pull_whole(decode: Side, params: dict[str, Any], **options: Any) -> asyncio.Task[PullResult]:
    return asyncio.create_task(decode.engine.pull("d", [(0, list(HERE))], params, **options))


async def beginning(prefill: Side, decode: Side, group: PrefillRanks) -> asyncio.Task[dict[str, Any]]:
    """Follow a request with a head start, and read a piece of it."""
    follow = follow_early(prefill, decode)
    await lend_piece(prefill, group)
    await until(lambda: prefill.engine.is_followed(TICKET))
    return follow


async def reading_piece(prefill: Side, decode: Side, group: PrefillRanks) -> asyncio.Task[dict[str, Any]]:
    """Follow a request with a head start, and read a piece of it until the test says that the read ends."""
    decode.data.deferred = True
    follow = follow_early(prefill, decode)
    await lend_piece(prefill, group)
    await until(lambda: decode.data.running)
    return follow


async def offered_piece(prefill: Side, desk: EngineDesk, group: PrefillRanks, **options: Any) -> dict[str, Any]:
    """Let a desk follow a request, and return the params of the piece that it is offered."""
    desk.submit([FollowOrder("d", target_of(prefill.engine), takes_pieces=True, **options)])
    await lend_piece(prefill, group)
    (offer,) = (await news_of(desk)).offered
    return dict(offer.params)


async def offered_whole(prefill: Side, desk: EngineDesk, group: PrefillRanks) -> dict[str, Any]:
    """Let a desk follow a request with a head start until it is offered the loan, and return its params."""
    piece = await offered_piece(prefill, desk, group)
    desk.submit([StartEarly(request_id="d", groups=[(0, list(HERE))], params=piece)])
    await until(lambda: prefill.engine.is_followed(TICKET))
    params, _ = lend_whole(prefill, group)
    await news_of(desk)
    return params


@pytest.mark.parametrize("real", [False, True])
async def test_an_engine_reads_ahead_and_then_the_rest(real: bool) -> None:
    async with Bench(real).pair() as (prefill, decode, group):
        follow = await beginning(prefill, decode, group)
        params, lent = lend_whole(prefill, group)
        assert await follow == params
        result = await pull_whole(decode, params)
        assert result.num_tokens == 64
        assert decode.blocks(list(HERE)) == prefill.blocks(list(THERE))
        assert (await lent.wait_released()).cause == "released"
        counters = decode.engine.statistics().counters
        assert (counters["pieces.complete"], counters["pulls.complete"]) == (1, 1)


@pytest.mark.parametrize("how", ["cancel", "withdrawn", "close"])
async def test_an_engine_gives_the_blocks_back_when_what_it_follows_ends(how: str) -> None:
    async with Bench(False).pair() as (prefill, decode, group):
        follow = await beginning(prefill, decode, group)
        assert [hold.reason for hold in decode.engine.holds()] != []
        if how == "cancel":
            follow.cancel()
        elif how == "withdrawn":
            prefill.engine.withdraw_ticket(TICKET)
        else:
            await decode.engine.aclose()
        with pytest.raises((asyncio.CancelledError, NoOffer)):
            await follow
        if how != "close":
            await decode.engine.returned("d")
            await until(lambda: not decode.engine.holds())


async def test_an_offer_that_its_caller_does_not_hear_of_is_released_also_with_a_head_start() -> None:
    async with Bench(False).pair() as (prefill, decode, group):
        follow = await beginning(prefill, decode, group)
        lent = prefill.engine.lend(group.make_params("p", [(0, list(THERE))], 64), ticket=TICKET)
        await until(lambda: not decode.engine._driver.core.decode.follows.by_id)
        await cancel(follow)
        assert (await lent.wait_released()).cause == "released"


async def test_a_loan_that_is_refused_ends_its_pieces() -> None:
    async with Bench(False).pair() as (prefill, decode, group):
        follow = await beginning(prefill, decode, group)
        offers = prefill.engine._driver.core.prefill.offers
        assert offers.pieces
        with pytest.raises(PlanRefused):
            prefill.engine.lend(group.make_params("p", [(0, [1, 99])], 32), ticket=TICKET)
        assert not offers.pieces
        await cancel(follow)


async def test_a_piece_is_written_and_may_be_taken_back_or_is_refused() -> None:
    async with Bench(False).pair() as (prefill, _, group):
        for flags in list[dict[str, Any]](({"written": True}, {"recall": True}, {})):
            with pytest.raises(LocalProtocolError, match="written=True and recall=True"):
                prefill.engine.lend_piece(group.make_params("p", [(0, [1])], 16, **flags), TICKET)
        assert not prefill.engine.statistics().counters.get("pieces.lent")
