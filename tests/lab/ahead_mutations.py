"""Bugs planted on purpose in what engines do with prompts that are still computed, one at a time.

Each breaks one rule of the design by a replacement in the core, in a ledger, or in a scheduler of the simulation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from asynckv.core.attempts import Request, RequestState
from asynckv.core.decode import DecodeSide
from asynckv.core.head_start import HeadStart
from asynckv.core.offers import Offers, Pieces
from asynckv.core.pull import Kind, Pull
from asynckv.core.rank import RankCore
from asynckv.core.source import Source
from asynckv.core.types import Reason
from asynckv.core.wire import Follow
from asynckv.embed import EngineDesk
from asynckv.embed.ledgers import PrefillLedger
from tests.lab import ahead
from tests.lab.recalls import prove_by_the_clock

PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def planted(patch: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    PLANTED[patch.__name__] = patch
    return patch


# -- prefill engines ---------------------------------------------------------------------------------------------------


@planted
def lent_before_it_was_written(patch: pytest.MonkeyPatch) -> None:
    """A scheduler makes a piece of what is computed in the step that runs."""
    patch.setattr(ahead.Prefill, "step", lent_with_the_step(ahead.Prefill.step))
    patch.setattr(ahead.Prefill, "ready", lambda side, job: job.computed)


def lent_with_the_step(honest: Callable[[Any], None]) -> Callable[[Any], None]:
    """Let a scheduler decide over pieces while ranks compute, too."""

    def step(side: ahead.Prefill) -> None:
        if side._passing and not side.ledger._missing:
            for job in list(side.running):
                side.lend(job)
        honest(side)

    return step


@planted
def rank_b_writes_after_a_has_offered(patch: pytest.MonkeyPatch) -> None:
    """A scheduler makes a piece of what its first rank has written."""
    patch.setattr(ahead.Prefill, "step", lent_with_the_step(ahead.Prefill.step))
    patch.setattr(ahead.Prefill, "ready", lambda side, job: job.written.get(0, 0))


class Haunted(dict[Any, Any]):
    """Pieces, and those that were ended."""

    def __init__(self) -> None:
        self.ended: dict[Any, Any] = {}

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key) or self.ended.get(key, default)


@planted
def a_piece_that_outlives_the_last_loan(patch: pytest.MonkeyPatch) -> None:
    """A rank that has a loan back still grants its pieces."""
    honest, begin = Offers.lease_ended, Offers.__init__

    def lease_ended(self: Offers, key: Any, *args: Any) -> None:
        lent = self._pieces.get(self.tickets[key], Pieces()).lent
        self.pieces.ended.update({piece.lease.lent.key: piece.lease for piece in lent})  # type: ignore[attr-defined]
        honest(self, key, *args)

    def init(self: Offers, *args: Any) -> None:
        begin(self, *args)
        self.pieces = Haunted()

    patch.setattr(Offers, "lease_ended", lease_ended)
    patch.setattr(Offers, "__init__", init)


@planted
def pieces_kept_at_a_preemption(patch: pytest.MonkeyPatch) -> None:
    """A scheduler takes the blocks of a prompt, and leaves its pieces lent."""
    patch.setattr(PrefillLedger, "end_pieces", lambda ledger, ticket: None)


@planted
def the_last_loan_recallable(patch: pytest.MonkeyPatch) -> None:
    """An engine takes the blocks of its last loan back at once, as it may with pieces."""
    patch.setattr(
        ahead.Prefill, "withdrawn", lambda side, job, rank: rank.overwrite(job.blocks) if not job.is_over else None
    )


@planted
def an_offer_of_another_ticket(patch: pytest.MonkeyPatch) -> None:
    """A rank offers the newest piece of any ticket."""

    def behind(self: Offers, follow: Follow) -> Any:
        found = [each.behind(msgspec.structs.replace(follow, ticket=ticket)) for ticket, each in self._pieces.items()]
        return next((piece for piece in reversed(found) if piece is not None), None)

    patch.setattr(Offers, "_piece_behind", behind)


# -- decode engines ----------------------------------------------------------------------------------------------------


@planted
def a_gap_taken_for_read(patch: pytest.MonkeyPatch) -> None:
    """A rank offers the newest piece, wherever that begins, and its reader counts from there."""

    def behind(pieces: Pieces, follow: Follow) -> Any:
        return pieces.lent[-1].params if follow.have >= 0 and pieces.lent else None

    patch.setattr(Pieces, "behind", behind)
    honest = HeadStart.lists

    def lists(self: HeadStart, piece: Any) -> Any:
        self.have = max(self.have, *(runs.first_token for runs in piece.groups if runs.runs))
        return honest(self, piece)

    patch.setattr(HeadStart, "lists", lists)


def taking(patch: pytest.MonkeyPatch, then: Callable[[HeadStart], None]) -> None:
    """Do something after a piece was counted."""
    honest = HeadStart.took

    def took(self: HeadStart, *args: Any) -> None:
        honest(self, *args)
        then(self)

    patch.setattr(HeadStart, "took", took)


@planted
def padding_taken_for_tokens(patch: pytest.MonkeyPatch) -> None:
    """A piece counts to the end of the reader's last block."""

    def fill(head: HeadStart) -> None:
        size = head.layout.groups[0].block_size
        head.have = -(-head.have // size) * size

    taking(patch, fill)


@planted
def a_tail_cleared_over_the_next_piece(patch: pytest.MonkeyPatch) -> None:
    """An engine clears what a piece leaves of its last block, a little after its end."""
    honest = DecodeSide._piece_ended

    def ended(self: DecodeSide, pull: Pull, now: float) -> None:
        honest(self, pull, now)
        if pull.reason is Reason.COMPLETE and pull.lists is not None:
            PADDED.append(tuple(pull.lists.padding(self._layout)))

    patch.setattr(DecodeSide, "_piece_ended", ended)
    news, PADDED[:] = ahead.Rank._done, []

    def done(self: ahead.Rank, *args: Any) -> None:
        news(self, *args)
        padded, PADDED[:] = PADDED[:], []
        for pad in (pad for each in padded for pad in each):
            self.words[pad.group][pad.block_id, :, :, pad.first_token : pad.first_token + pad.num_tokens] = 0

    patch.setattr(ahead.Rank, "_done", done)


PADDED: list[Any] = []


@planted
def an_unproven_piece_counted(patch: pytest.MonkeyPatch) -> None:
    """A piece counts once its bytes have landed, whatever its owner says."""
    honest = DecodeSide._piece_ended

    def ended(self: DecodeSide, pull: Pull, now: float) -> None:
        if pull.reason is not Reason.COMPLETE and all(s.has_landed and s.bytes_read for s in pull.sources if s.reads):
            request: Any = pull.owner
            request.head.took(pull.params, 0)
        honest(self, pull, now)

    patch.setattr(DecodeSide, "_piece_ended", ended)


@planted
def a_recallable_loan_believed_by_its_grant(patch: pytest.MonkeyPatch) -> None:
    """A read of what may be recalled is proven by a grant that still runs."""
    patch.setattr(Source, "prove", prove_by_the_clock)
    patch.setattr(Pull, "met", claiming_pieces(Pull.met))


def claiming_pieces(honest: Callable[..., Any]) -> Callable[..., Any]:
    """Claim a piece before it is read, as other loans."""

    def met(self: Pull, *args: Any) -> Any:
        kind, self.kind = self.kind, Kind.PULL if self.kind is Kind.PIECE else self.kind
        try:
            return honest(self, *args)
        finally:
            self.kind = kind

    return met


@planted
def the_first_claim_taken_for_the_proof(patch: pytest.MonkeyPatch) -> None:
    """A piece is claimed before it is read, and any grant proves it."""
    honest = Source.prove

    def prove(self: Source) -> None:
        self.nonce_when_done = 0
        honest(self)

    patch.setattr(Source, "prove", prove)
    patch.setattr(Pull, "met", claiming_pieces(Pull.met))


def free_if(patch: pytest.MonkeyPatch, state: RequestState) -> None:
    """Take a request's blocks for free in a state, whatever writes them."""
    honest: Any = Request.is_free
    patch.setattr(Request, "is_free", property(lambda request: request.state is state or honest.fget(request)))


@planted
def the_last_pull_beside_a_read_that_hangs(patch: pytest.MonkeyPatch) -> None:
    """The rest is read while a piece may still write."""
    free_if(patch, RequestState.PAUSING)


@planted
def two_pieces_at_once(patch: pytest.MonkeyPatch) -> None:
    """A rank asks for the next piece when it begins to read one."""
    free_if(patch, RequestState.EARLY)
    honest = RankCore._ahead

    def ahead_of(self: RankCore, request: Request, now: float) -> None:
        before = request.pull
        honest(self, request, now)
        following = self.decode.follows.by_request.get(request.wanted.request_id)  # type: ignore[call-overload]
        if request.pull is not None and request.pull is not before and following is not None:
            self.decode.follows.ask(following, request.pull.params.num_tokens, now)

    patch.setattr(RankCore, "_ahead", ahead_of)
    lists = HeadStart.lists

    def lists_of(self: HeadStart, piece: Any) -> Any:
        have, self.have = self.have, min(runs.first_token for runs in piece.groups if runs.runs)
        found = lists(self, piece)
        self.have = have
        return found

    patch.setattr(HeadStart, "lists", lists_of)


@planted
def what_one_rank_has_taken_for_all(patch: pytest.MonkeyPatch) -> None:
    """Every rank of an engine begins the rest where the first one may."""
    most: dict[tuple[int, ...], HeadStart] = {}

    def first_of(head: HeadStart) -> HeadStart:
        return max(most.get(tuple(head.blocks[0][1].tolist()), head), head, key=lambda each: each.have)

    taking(patch, lambda head: most.update({tuple(head.blocks[0][1].tolist()): first_of(head)}))
    honest = HeadStart.rest

    def rest(self: HeadStart, *args: Any) -> Any:
        first = first_of(self)
        self.have, self.newest, self.groups = first.have, first.newest, first.groups
        return honest(self, *args)

    patch.setattr(HeadStart, "rest", rest)


@planted
def what_is_there_applied_to_a_window(patch: pytest.MonkeyPatch) -> None:
    """The rest of a window begins where pieces of other groups end."""
    honest = HeadStart.rest

    def rest(self: HeadStart, *args: Any) -> Any:
        groups = self.groups
        if groups:
            self.groups = frozenset(i for i, group in enumerate(self.layout.groups) if group.kind != "state")
        try:
            return honest(self, *args)
        finally:
            self.groups = groups

    patch.setattr(HeadStart, "rest", rest)


@planted
def a_pull_that_begins_anew(patch: pytest.MonkeyPatch) -> None:
    """A rank whose head start has failed, and was reported, pulls the whole request after all."""
    honest = EngineDesk._go_on

    def go_on(self: EngineDesk, order: Any, flight: Any, given: dict[str, Any]) -> None:
        if flight is not None:
            honest(self, order, flight, given)
        else:
            self._begin(order, self.engine._begin_pull, self.engine._result_of, given)

    patch.setattr(EngineDesk, "_go_on", go_on)
