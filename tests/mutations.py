"""Bugs planted on purpose, one at a time: each breaks one rule of the design, and the simulation must see it."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from asynckv import engine as engine_module
from asynckv.core import decode, prefill
from asynckv.core import lease as lease_module
from asynckv.core import pull as pull_module
from asynckv.core import rank as rank_module
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.flow import Admission
from asynckv.core.lease import Discharge, Lease, Reader
from asynckv.core.ledger import Ledger
from asynckv.core.peer import PeerState
from asynckv.core.pull import Pull, PullState, Source
from asynckv.core.spent import SpentKeys
from asynckv.core.types import Outcome, PullId, Reason
from asynckv.core.wire import Ack, Claim, Granted, Release, Renew
from asynckv.engine import Engine
from asynckv.scheduler import PrefillGroup
from asynckv.testing import service

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTED: dict[str, Plant] = {}


def planted(plant: Plant) -> Plant:
    PLANTED[plant.__name__] = plant
    return plant


@planted
def release_by_count(patch: pytest.MonkeyPatch) -> None:
    """Any release strikes off any reader; a repeated one counts twice."""

    def release(self: Lease, message: Release, source: str, now: float) -> Any:
        speaker = Reader(message.cohort.id, message.cohort.tp_rank, message.cohort.pp_stage)
        if refusal := self._bind(message, speaker):
            return refusal
        self.grants.pop(PullId(message.pull_id), None)
        self.final.add(PullId(message.pull_id))
        owed = self.cohorts[message.cohort.id].owed
        if owed:
            reader = sorted(owed)[0]
            owed.discard(reader)
            self.discharged.setdefault(reader, Discharge(message.outcome, str(reader)))
        return Ack(message.key, message.pull_id)

    patch.setattr(Lease, "_release", release)


@planted
def strikes_off_all_attempts_of_a_rank(patch: pytest.MonkeyPatch) -> None:
    """A release ends every attempt of its rank, not only its own."""
    honest = Lease._release

    def release(self: Lease, message: Release, source: str, now: float) -> Any:
        answer = honest(self, message, source, now)
        if isinstance(answer, Ack):
            reader = Reader(message.cohort.id, message.cohort.tp_rank, message.cohort.pp_stage)
            for pull_id in [p for p, grant in self.grants.items() if grant.reader == reader]:
                del self.grants[pull_id]
            if message.cohort.id in self.cohorts:
                self.cohorts[message.cohort.id].owed.discard(reader)
        return answer

    patch.setattr(Lease, "_release", release)


@planted
def frees_before_it_drained(patch: pytest.MonkeyPatch) -> None:
    """Blocks go back with the outcome, whatever still runs."""
    patch.setattr(Pull, "holds_blocks", property(lambda self: False))


@planted
def trusts_an_exception(patch: pytest.MonkeyPatch) -> None:
    """A transfer that is in doubt is taken for ended."""
    honest = Pull.ended

    def ended(self: Pull, leg: Source, news: TransferEnded, now: float) -> None:
        ending = Ending.FAILED if news.ending is Ending.IN_DOUBT else news.ending
        honest(self, leg, news._replace(ending=ending), now)

    patch.setattr(Pull, "ended", ended)


@planted
def no_fence(patch: pytest.MonkeyPatch) -> None:
    """Bytes are believed because they have arrived."""

    def prove(self: Source) -> None:
        self.proven = self.proven or self.is_done

    patch.setattr(Source, "prove", prove)


@planted
def deadline_from_another_transmission(patch: pytest.MonkeyPatch) -> None:
    """A grant counts from the newest claim, not from the one that it answers."""
    honest = Pull._granted

    def granted(self: Pull, leg: Source, answer: Granted, sent_at: float, now: float) -> None:
        honest(self, leg, answer, max(leg.nonces.values()), now)

    patch.setattr(Pull, "_granted", granted)


@planted
def completion_stamped_before_it_was_observed(patch: pytest.MonkeyPatch) -> None:
    """The clock is read, then the data plane is asked."""

    def on_data(self: Engine) -> None:
        now = self._clock.now()
        news = [each for each in self._data.poll() if isinstance(each, TransferEnded)]
        for ended in news:
            self._core.decode.ended(ended, 0.0, now)
        self._soon()

    patch.setattr(Engine, "_on_data", on_data)


@planted
def revoking_breaks_promises(patch: pytest.MonkeyPatch) -> None:
    """What is revoked is free at once, whoever was promised it."""
    honest = Lease.revoke

    def revoke(self: Lease, now: float) -> Any:
        self.grants.clear()
        return honest(self, now)

    patch.setattr(Lease, "revoke", revoke)


@planted
def expiry_breaks_promises(patch: pytest.MonkeyPatch) -> None:
    """A lease ends at its time, though a grant runs on."""
    honest = Lease._grant

    def grant(self: Lease, ask: Any, reader: Any, sender: str, now: float) -> Any:
        until = self.expires_at
        answer = honest(self, ask, reader, sender, now)
        self.expires_at = until
        return answer

    patch.setattr(Lease, "_grant", grant)


@planted
def keys_are_used_again(patch: pytest.MonkeyPatch) -> None:
    """A scheduler that counts from the start again, and ranks that let it."""
    honest = PrefillGroup.make_params

    def make_params(self: PrefillGroup, *args: Any, **kwargs: Any) -> dict[str, Any]:
        params = honest(self, *args, **kwargs)
        epoch, memory, sequence, _ = params["key"]
        params["key"] = [epoch, memory, sequence % 2, "0" * 32]
        params["request_id"] = "P"
        return params

    honest_lend = prefill.PrefillSide.lend

    def lend(self: prefill.PrefillSide, lent: Any, now: float) -> Any:
        self.spent = SpentKeys()
        self._ended.clear()
        return honest_lend(self, lent, now)

    def digest(*args: Any) -> bytes:
        return bytes(16)

    patch.setattr(PrefillGroup, "make_params", make_params)
    patch.setattr(prefill.PrefillSide, "lend", lend)
    patch.setattr(rank_module, "blocks_digest", digest)
    patch.setattr(lease_module, "blocks_digest", digest)


@planted
def retries_into_the_same_blocks(patch: pytest.MonkeyPatch) -> None:
    """The next attempt does not wait for what the last one may still write."""

    async def wait(self: Any, returned: Any) -> bool:
        returned.close()
        return True

    patch.setattr(service.Attempt, "_wait", wait)
    patch.setattr(Ledger, "_check", lambda self, kind, group, ids: None)


@planted
def skipped_ranks_hear_our_own_id(patch: pytest.MonkeyPatch) -> None:
    """Ranks that were read nothing from are released under the decode side's request id."""
    honest = Pull.due_release

    def due_release(self: Pull, leg: Source, now: float) -> Release | None:
        release = honest(self, leg, now)
        if release is None or leg.reads:
            return release
        return Release(release.key, self.request_id, release.cohort, release.pull_id, release.outcome)

    patch.setattr(Pull, "due_release", due_release)


@planted
def skipped_ranks_hear_nothing(patch: pytest.MonkeyPatch) -> None:
    """Ranks that were read nothing from are not released at all."""
    honest = Pull.due_release

    def due_release(self: Pull, leg: Source, now: float) -> Release | None:
        release = honest(self, leg, now)
        if release is not None and not leg.reads:
            self.settled(leg, "forgotten", now)
            return None
        return release

    patch.setattr(Pull, "due_release", due_release)


@planted
def releases_are_sent_once(patch: pytest.MonkeyPatch) -> None:
    """A release that was lost stays lost."""
    honest = Pull.due_release

    def due_release(self: Pull, leg: Source, now: float) -> Release | None:
        release = honest(self, leg, now)
        if release is not None:
            leg.release_at = math.inf
        return release

    patch.setattr(Pull, "due_release", due_release)


@planted
def early_reads_are_believed(patch: pytest.MonkeyPatch) -> None:
    """A read that began before the request was lent is not done again."""
    patch.setattr(Source, "is_early", property(lambda self: False))


@planted
def rates_are_equal(patch: pytest.MonkeyPatch) -> None:
    """Grants are used to their last moment, as if both clocks ran alike, from when they were received."""
    honest = Pull._granted

    def granted(self: Pull, leg: Source, answer: Granted, sent_at: float, now: float) -> None:
        honest(self, leg, answer, now, now)

    patch.setattr(Pull, "_granted", granted)


@planted
def peers_are_removed_under_transfers(patch: pytest.MonkeyPatch) -> None:
    """A peer that is lost leaves the data plane at once."""
    honest = decode.DecodeSide._reap

    def reap(self: decode.DecodeSide, peer: Any) -> None:
        transfers, peer.transfers = peer.transfers, set()
        try:
            honest(self, peer)
        finally:
            peer.transfers = transfers

    patch.setattr(decode.DecodeSide, "_reap", reap)


@planted
def a_failed_attempt_says_it_was_the_last(patch: pytest.MonkeyPatch) -> None:
    """An attempt that will be retried discharges its reader."""
    honest: Any = Pull.__dict__["_outcome"].fget

    def outcome(self: Pull) -> Outcome:
        found: Outcome = honest(self)
        return Outcome.FAILED if found is Outcome.RETRY else found

    patch.setattr(Pull, "_outcome", property(outcome))


@planted
def closing_returns_blocks_too_soon(patch: pytest.MonkeyPatch) -> None:
    """Blocks come back when closing begins, not when nothing can write them any more."""
    honest = Engine._close_planes

    async def close_planes(self: Engine) -> None:
        self._is_destroyed = True
        for waiting in self._waiting.values():
            waiting.returned.set()
        await honest(self)

    patch.setattr(Engine, "_close_planes", close_planes)


@planted
def whoever_was_lost_stays_lost(patch: pytest.MonkeyPatch) -> None:
    """A peer that was given up is never met again."""
    honest = decode.DecodeSide._peer

    def peer(self: decode.DecodeSide, pull: Pull, leg: Source, now: float) -> Any:
        known = self.peers.get((leg.address, leg.incarnation))
        return known if known is not None and known.state.value == "gone" else honest(self, pull, leg, now)

    patch.setattr(decode.DecodeSide, "_peer", peer)


@planted
def failed_announcements_are_final(patch: pytest.MonkeyPatch) -> None:
    """Whatever cannot be met while a request is announced discharges its reader."""
    honest: Any = Pull.__dict__["_outcome"].fget

    def outcome(self: Pull) -> Outcome:
        found: Outcome = honest(self)
        return Outcome.FAILED if found is Outcome.RETRY and self.is_announced else found

    patch.setattr(Pull, "_outcome", property(outcome))


@planted
def the_deadline_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Nothing ends a pull that waits."""
    honest = Pull.tick

    def tick(self: Pull, now: float) -> None:
        if now < self.deadline:
            honest(self, now)
        else:
            self._advance(now)

    patch.setattr(Pull, "tick", tick)
    patch.setattr(
        Pull, "wake_at", property(lambda self: min(self._claims_due, *(leg.release_at for leg in self.sources)))
    )


@planted
def one_window_for_all_peers(patch: pytest.MonkeyPatch) -> None:
    """Whoever's window is full keeps all others from posting."""
    honest = decode.DecodeSide.next_post

    def next_post(self: decode.DecodeSide, now: float) -> Any:
        for peer in self._turns:
            post = peer.queue[0][1].next_post if peer.queue and peer.is_usable else None
            if post and not peer.window.fits(post):
                return None
        return honest(self, now)

    patch.setattr(decode.DecodeSide, "next_post", next_post)


@planted
def one_handshake_at_a_time(patch: pytest.MonkeyPatch) -> None:
    """A rank that does not answer keeps us from meeting any other."""
    honest = decode.DecodeSide._hello

    def hello(self: decode.DecodeSide, peer: Any, now: float) -> None:
        if any(p is not peer and p.state is PeerState.CONNECTING and p.hellos for p in self.peers.values()):
            peer.retry_at = now + 0.05
        else:
            honest(self, peer, now)

    patch.setattr(decode.DecodeSide, "_hello", hello)


@planted
def anybody_may_release(patch: pytest.MonkeyPatch) -> None:
    """A release counts for the pull that it names, whoever sends it."""
    honest = Lease._release

    def release(self: Lease, message: Release, source: str, now: float) -> Any:
        hold = self.grants.get(PullId(message.pull_id))
        return honest(self, message, source if hold is None else hold.sender, now)

    patch.setattr(Lease, "_release", release)


@planted
def anybody_may_renew(patch: pytest.MonkeyPatch) -> None:
    """A renewal counts for the pull that it names, whoever sends it."""
    honest = Lease._renew

    def renew(self: Lease, message: Renew, sender: str, now: float) -> Any:
        grant = self.grants.get(PullId(message.pull_id))
        return honest(self, message, sender if grant is None else grant.sender, now)

    patch.setattr(Lease, "_renew", renew)


@planted
def tokens_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A key is its epoch and its sequence; the token is decoration."""
    honest = prefill.PrefillSide.receive

    def receive(self: prefill.PrefillSide, message: Any, route: Any, source: str, now: float) -> None:
        here = (message.key.epoch, message.key.sequence)
        key = next((k for k in self.leases if (k.epoch, k.sequence) == here), message.key)
        honest(self, msgspec.structs.replace(message, key=key), route, source, now)

    patch.setattr(prefill.PrefillSide, "receive", receive)


@planted
def request_ids_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """Whoever knows a key may call the request what he likes."""
    honest = Lease._bind

    def bind(self: Lease, message: Any, reader: Any) -> Any:
        return honest(self, msgspec.structs.replace(message, request_id=self.lent.request_id), reader)

    patch.setattr(Lease, "_bind", bind)


@planted
def any_cohort_may_read(patch: pytest.MonkeyPatch) -> None:
    """A lease is bound to as many cohorts as speak up."""
    honest = Lease._bind

    def bind(self: Lease, message: Any, reader: Any) -> Any:
        if message.cohort.id not in self.cohorts and len(self.cohorts) >= self.lent.readers:
            self.lent = msgspec.structs.replace(self.lent, readers=self.lent.readers + 1)
        return honest(self, message, reader)

    patch.setattr(Lease, "_bind", bind)


@planted
def answers_need_no_question(patch: pytest.MonkeyPatch) -> None:
    """An answer with a nonce that was never used counts from the newest question."""
    honest = Pull.answered

    def answered(self: Pull, leg: Source, answer: Any, now: float) -> bool:
        if leg.nonces and answer.nonce not in leg.nonces:
            answer = msgspec.structs.replace(answer, nonce=next(reversed(leg.nonces)))
        return honest(self, leg, answer, now)

    patch.setattr(Pull, "answered", answered)


@planted
def answers_from_anybody_count(patch: pytest.MonkeyPatch) -> None:
    """Neither the key nor the process start of an answer is looked at."""
    honest = decode.DecodeSide._claim_answered

    def claim_answered(self: decode.DecodeSide, answer: Any, address: Any, source: str, now: float) -> None:
        pull = self.pulls.get(PullId(answer.pull_id))
        leg = next((x for x in pull.sources if x.address == address), None) if pull else None
        if pull and leg:
            answer, source = msgspec.structs.replace(answer, key=pull.params.key), leg.incarnation
        honest(self, answer, address, source, now)

    patch.setattr(decode.DecodeSide, "_claim_answered", claim_answered)


@planted
def grants_are_used_to_their_last_moment(patch: pytest.MonkeyPatch) -> None:
    """No margin is kept for clocks that run at other rates."""
    patch.setattr(pull_module, "RATE_MARGIN", 0.0)


@planted
def more_is_promised_than_is_kept(patch: pytest.MonkeyPatch) -> None:
    """A grant says 5 milliseconds more than its owner waits."""
    honest = Lease._grant

    def grant(self: Lease, ask: Any, reader: Any, source: str, now: float) -> Any:
        answer = honest(self, ask, reader, source, now)
        if isinstance(answer, Granted):
            answer = msgspec.structs.replace(answer, seconds=answer.seconds + 0.005)
        return answer

    patch.setattr(Lease, "_grant", grant)


@planted
def closing_breaks_promises(patch: pytest.MonkeyPatch) -> None:
    """An engine that closes does not wait for what it has promised."""
    honest = rank_module.RankCore.close

    def close(self: rank_module.RankCore, now: float) -> None:
        honest(self, now)
        for lease in list(self.prefill.leases.values()):
            lease.grants.clear()
            self.prefill.tick_lease(lease, now)

    patch.setattr(rank_module.RankCore, "close", close)


@planted
def a_lease_is_cut_short(patch: pytest.MonkeyPatch) -> None:
    """What is lent comes back at half its time."""
    honest = Lease.__init__

    def begin(self: Lease, lent: Any, now: float) -> None:
        honest(self, lent, now)
        self.expires_at = self.lent_at + self.lent.lease_s / 2

    patch.setattr(Lease, "__init__", begin)


@planted
def a_lease_lasts_as_long_as_any_may(patch: pytest.MonkeyPatch) -> None:
    """What nobody asks for stays lent for `max_lease_s`."""
    honest = Lease.__init__

    def begin(self: Lease, lent: Any, now: float) -> None:
        honest(self, lent, now)
        self.expires_at = self.lent_at + self.lent.max_lease_s

    patch.setattr(Lease, "__init__", begin)


@planted
def revoking_does_nothing(patch: pytest.MonkeyPatch) -> None:
    """A lease that is revoked goes on as before."""
    patch.setattr(Lease, "revoke", Lease.tick)


@planted
def cancelling_does_nothing(patch: pytest.MonkeyPatch) -> None:
    """`cancel` says that it did."""
    patch.setattr(rank_module.RankCore, "cancel", lambda self, request_id, now: request_id in self.decode.by_request)


@planted
def blocks_are_never_retired(patch: pytest.MonkeyPatch) -> None:
    """Whoever waits for blocks that never come back waits for ever."""
    patch.setattr(Pull, "retire_at", property(lambda self: math.inf))


@planted
def every_release_says_complete(patch: pytest.MonkeyPatch) -> None:
    """The prefill side hears of no failure."""
    honest: Any = Pull.__dict__["_outcome"].fget

    def outcome(self: Pull) -> Outcome:
        return Outcome.RETRY if honest(self) is Outcome.RETRY else Outcome.COMPLETE

    patch.setattr(Pull, "_outcome", property(outcome))


@planted
def promises_are_not_renewed(patch: pytest.MonkeyPatch) -> None:
    """A promise is asked for again when it has run out."""
    honest = Pull._granted

    def granted(self: Pull, leg: Source, answer: Granted, sent_at: float, now: float) -> None:
        honest(self, leg, answer, sent_at, now)
        if leg.claim_at < math.inf:
            leg.claim_at = max(leg.claim_at, leg.covered_until)

    patch.setattr(Pull, "_granted", granted)


@planted
def no_pause_between_handshakes(patch: pytest.MonkeyPatch) -> None:
    """Whoever could not be met is asked again at once."""
    honest = decode.DecodeSide._failed

    def failed(self: decode.DecodeSide, peer: Any, reason: Any, detail: str, now: float) -> None:
        honest(self, peer, reason, detail, now)
        peer.not_before = now

    patch.setattr(decode.DecodeSide, "_failed", failed)


@planted
def hellos_are_repeated_without_patience(patch: pytest.MonkeyPatch) -> None:
    """A rank that does not answer is asked each tenth of a second."""
    honest = decode.DecodeSide._hello

    def hello(self: decode.DecodeSide, peer: Any, now: float) -> None:
        honest(self, peer, now)
        peer.retry_at = now + 0.1

    patch.setattr(decode.DecodeSide, "_hello", hello)


# -- under pressure ---------------------------------------------------------------------------------------------------


@planted
def a_place_is_never_given_back(patch: pytest.MonkeyPatch) -> None:
    """A pull that fails or is cancelled counts for ever."""
    honest = Admission.leave

    def leave(self: Admission, pull: Pull) -> None:
        if pull.reason in (None, Reason.COMPLETE):
            honest(self, pull)

    patch.setattr(Admission, "leave", leave)


@planted
def more_read_than_are_admitted(patch: pytest.MonkeyPatch) -> None:
    """The budget is not looked at."""
    honest = Admission.__init__

    def init(self: Admission, total: int, window: int) -> None:
        honest(self, 100, 100)

    patch.setattr(Admission, "__init__", init)


@planted
def one_queue_for_all(patch: pytest.MonkeyPatch) -> None:
    """Whoever waits for one peer waits before everybody."""
    honest = Admission.ask

    def ask(self: Admission, key: Any, pull: Pull) -> None:
        honest(self, (), pull)

    patch.setattr(Admission, "ask", ask)


@planted
def the_queue_lets_leases_run_out(patch: pytest.MonkeyPatch) -> None:
    """Who waits does not claim."""
    honest = Pull.due_claim

    def due_claim(self: Pull, leg: Source, nonce: int, now: float) -> Any:
        if self.state is PullState.QUEUED and now >= leg.claim_at:
            leg.claim_at = now + 0.5
            return None
        return honest(self, leg, nonce, now)

    patch.setattr(Pull, "due_claim", due_claim)


@planted
def retries_do_not_wait_for_their_blocks(patch: pytest.MonkeyPatch) -> None:
    """The next attempt begins while the last one may still write."""

    async def first(self: Any, work: Any) -> Any:
        work.close()
        return (None,)

    patch.setattr(engine_module._Retrying, "first", first)
    patch.setattr(Ledger, "_check", lambda self, kind, group, ids: None)


@planted
def retries_have_time_without_end(patch: pytest.MonkeyPatch) -> None:
    """Every attempt has the whole deadline."""
    honest = Engine._attempt

    async def attempt(self: Engine, ask: Any, seconds: float, retry: Any) -> Any:
        return await honest(self, ask, self.config.pull.timeout_s, retry)

    patch.setattr(Engine, "_attempt", attempt)


@planted
def nobody_says_that_no_attempt_follows(patch: pytest.MonkeyPatch) -> None:
    """What was told that it will be tried again waits until its lease runs out."""
    patch.setattr(Engine, "_discharge", lambda self, ask, reason: None)


@planted
def a_curable_failure_discharges(patch: pytest.MonkeyPatch) -> None:
    """The first attempt lets go of the request that the second wants."""
    honest = rank_module.RankCore.pull

    def pull(self: rank_module.RankCore, *args: Any) -> Any:
        found = honest(self, *args)
        found.retryable = frozenset()
        return found

    patch.setattr(rank_module.RankCore, "pull", pull)


@planted
def draining_revokes(patch: pytest.MonkeyPatch) -> None:
    """Who drains takes back what it has lent."""
    honest = rank_module.RankCore.shut

    def shut(self: rank_module.RankCore, how: str = "draining") -> None:
        honest(self, how)
        for lease in list(self.prefill.leases.values()):
            self.prefill.revoke(lease, 0.0)

    patch.setattr(rank_module.RankCore, "shut", shut)


@planted
def draining_lends(patch: pytest.MonkeyPatch) -> None:
    """Who drains goes on lending."""
    patch.setattr(rank_module.RankCore, "_check_open", lambda self: None)


@planted
def draining_forgets_who_is_left(patch: pytest.MonkeyPatch) -> None:
    """At its deadline a drain says that all is done."""
    patch.setattr(rank_module.RankCore, "stragglers", lambda self, now: ())


@planted
def sleep_does_not_end_the_agent(patch: pytest.MonkeyPatch) -> None:
    """The memory is let go while transfers may write it."""
    honest = Engine._suspend

    async def suspend(self: Engine, *args: Any) -> Any:
        close, self._data.close = self._data.close, lambda: None  # type: ignore[method-assign]
        try:
            return await honest(self, *args)
        finally:
            self._data.close = close  # type: ignore[method-assign]

    patch.setattr(Engine, "_suspend", suspend)


@planted
def sleep_breaks_promises(patch: pytest.MonkeyPatch) -> None:
    """The memory is let go while somebody was promised it."""
    patch.setattr(Engine, "_wait", lambda self, is_over, seconds: asyncio.sleep(0))


@planted
def old_references_are_served_after_sleep(patch: pytest.MonkeyPatch) -> None:
    """Who wakes up is who fell asleep."""
    honest = Engine.resume

    async def resume(self: Engine, registration: Any = None) -> None:
        incarnation, token_hex = self.incarnation, self._token_hex
        self._token_hex = lambda size: incarnation if size == 16 else token_hex(size)
        self._core.prefill.memory_epoch -= 1
        try:
            await honest(self, registration)
        finally:
            self._token_hex = token_hex

    patch.setattr(Engine, "resume", resume)


@planted
def whoever_floods_fills_the_memory_for_early_claims(patch: pytest.MonkeyPatch) -> None:
    """Nobody counts who parked what."""
    honest = prefill.PrefillSide._park

    def park(self: prefill.PrefillSide, *args: Any) -> None:
        self._parked_by = Counter(dict.fromkeys(self._parked_by, 0))
        honest(self, *args)

    patch.setattr(prefill.PrefillSide, "_park", park)


class _Floor(SpentKeys):
    """Whatever lies below the newest number is spent."""

    def __contains__(self, key: Any) -> bool:
        runs = self._runs.get(key.epoch)
        return runs is not None and key.sequence <= runs[1][-1]


def _floored(self: prefill.PrefillSide) -> SpentKeys:
    floor = _Floor()
    floor._runs = self.spent._runs
    return floor


@planted
def claims_below_the_newest_are_refused(patch: pytest.MonkeyPatch) -> None:
    """A request is taken for ended because a later one was lent before it."""
    honest = prefill.PrefillSide.receive

    def receive(self: prefill.PrefillSide, message: Any, route: Any, source: str, now: float) -> None:
        if isinstance(message, Claim) and message.key not in self.leases and message.key in _floored(self):
            self._refuse(message, route, source, self._ended.get(message.key, Reason.UNKNOWN))
        else:
            honest(self, message, route, source, now)

    patch.setattr(prefill.PrefillSide, "receive", receive)


@planted
def early_releases_below_the_newest_are_lost(patch: pytest.MonkeyPatch) -> None:
    """A release that comes before its request is lent is taken for one that comes after its end."""
    honest = prefill.PrefillSide.receive

    def receive(self: prefill.PrefillSide, message: Any, route: Any, source: str, now: float) -> None:
        if isinstance(message, Release) and message.key not in self.leases and message.key in _floored(self):
            self._outbox.send(route, source, Ack(message.key, message.pull_id))
        else:
            honest(self, message, route, source, now)

    patch.setattr(prefill.PrefillSide, "receive", receive)


@planted
def lending_one_spends_all_before_it(patch: pytest.MonkeyPatch) -> None:
    """Requests have to be lent in the order in which their params were made."""
    patch.setattr(prefill, "SpentKeys", _Floor)


@planted
def what_has_ended_may_be_lent_again(patch: pytest.MonkeyPatch) -> None:
    """Lending spends no key."""
    patch.setattr(prefill.PrefillSide, "_is_spent", lambda self, key: key in self.leases)


@planted
def what_was_withdrawn_may_be_lent(patch: pytest.MonkeyPatch) -> None:
    """Withdrawing a request spends no key."""
    honest = prefill.PrefillSide.withdraw

    def withdraw(self: prefill.PrefillSide, key: Any, now: float) -> None:
        spent, self.spent = self.spent, SpentKeys()
        try:
            honest(self, key, now)
            self._ended.pop(key, None)
        finally:
            self.spent = spent

    patch.setattr(prefill.PrefillSide, "withdraw", withdraw)


@planted
def withdrawing_leaves_early_claims_waiting(patch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a request that is withdrawn is not told."""
    honest = prefill.PrefillSide.withdraw

    def withdraw(self: prefill.PrefillSide, key: Any, now: float) -> None:
        parked = self._parked.pop(key, None)
        honest(self, key, now)
        if parked:
            self._parked[key] = parked

    def receive(self: prefill.PrefillSide, message: Any, route: Any, source: str, now: float) -> None:
        if isinstance(message, Claim) and self._ended.get(message.key) is Reason.WITHDRAWN:
            self._park(message, route, source, now)
        else:
            honest_receive(self, message, route, source, now)

    honest_receive = prefill.PrefillSide.receive
    patch.setattr(prefill.PrefillSide, "withdraw", withdraw)
    patch.setattr(prefill.PrefillSide, "receive", receive)


@planted
def withdrawing_what_is_lent_does_nothing(patch: pytest.MonkeyPatch) -> None:
    """A request that is lent already is not revoked."""
    honest = prefill.PrefillSide.withdraw

    def withdraw(self: prefill.PrefillSide, key: Any, now: float) -> None:
        if key not in self.leases:
            honest(self, key, now)

    patch.setattr(prefill.PrefillSide, "withdraw", withdraw)


@planted
def withdrawing_frees_at_once(patch: pytest.MonkeyPatch) -> None:
    """A request that is lent is taken back although promises run."""
    honest = prefill.PrefillSide.withdraw

    def withdraw(self: prefill.PrefillSide, key: Any, now: float) -> None:
        if (lease := self.leases.get(key)) is not None:
            lease.grants.clear()
        honest(self, key, now)

    patch.setattr(prefill.PrefillSide, "withdraw", withdraw)


@planted
def what_has_ended_long_ago_is_not_lent_yet(patch: pytest.MonkeyPatch) -> None:
    """Only those endings are known that are remembered one by one."""
    honest = prefill.PrefillSide.receive

    def receive(self: prefill.PrefillSide, *args: Any) -> None:
        spent, self.spent = self.spent, SpentKeys()
        try:
            honest(self, *args)
        finally:
            self.spent = spent

    patch.setattr(prefill.PrefillSide, "receive", receive)


@planted
def gaps_are_closed_by_forgetting_what_was_lent(patch: pytest.MonkeyPatch) -> None:
    """Where memory runs out, it is what was spent that is forgotten, not what is open."""

    def close_oldest(self: SpentKeys) -> None:
        firsts, lasts = max(self._runs.values(), key=lambda runs: len(runs[0]))
        del firsts[1], lasts[1]
        self.num_gaps -= 1

    patch.setattr(SpentKeys, "_close_oldest", close_oldest)


@planted
def gaps_are_kept_without_end(patch: pytest.MonkeyPatch) -> None:
    """Requests that are never lent take memory for ever."""
    patch.setattr(SpentKeys, "_close_oldest", lambda self: None)


@planted
def endings_are_taken_for_all_that_is_spent(patch: pytest.MonkeyPatch) -> None:
    """What has ended long ago may be lent again."""
    patch.setattr(prefill.PrefillSide, "_is_spent", lambda self, key: key in self.leases or key in self._ended)


@planted
def whoever_is_late_was_told_to_wait(patch: pytest.MonkeyPatch) -> None:
    """Every deadline that passes is blamed on a request that is not lent."""
    honest = Pull._waiting_for
    patch.setattr(Pull, "_waiting_for", lambda self, now: (Reason.NOT_LENT_YET, honest(self, now)[1]))


@planted
def withdrawing_tells_one_reader(patch: pytest.MonkeyPatch) -> None:
    """Of several that wait for a request that is withdrawn, the first is told."""
    honest = prefill.PrefillSide.withdraw

    def withdraw(self: prefill.PrefillSide, key: Any, now: float) -> Any:
        for slot in list(self._parked.get(key, {}))[1:]:
            self._unpark(self._parked[key].pop(slot))
        return honest(self, key, now)

    patch.setattr(prefill.PrefillSide, "withdraw", withdraw)


@planted
def early_claims_are_called_withdrawn(patch: pytest.MonkeyPatch) -> None:
    """A request that is not lent is taken for one that never will be."""
    honest = prefill.PrefillSide._park

    def park(self: prefill.PrefillSide, message: Any, route: Any, source: str, now: float) -> None:
        if isinstance(message, Claim):
            self._refuse(message, route, source, Reason.WITHDRAWN)
        else:
            honest(self, message, route, source, now)

    patch.setattr(prefill.PrefillSide, "_park", park)


@planted
def peers_outlive_the_agent_that_loaded_them(patch: pytest.MonkeyPatch) -> None:
    """What was loaded is taken for loaded, whatever became of our agent."""
    patch.setattr(decode.DecodeSide, "unloaded", lambda self, cause, now: None)


@planted
def a_dead_agent_is_given_out(patch: pytest.MonkeyPatch) -> None:
    """Whoever shakes hands is told of the first agent for ever."""
    patch.setattr(
        rank_module.RankCore, "agent_replaced", lambda self, agent_name, metadata: setattr(self, "_has_agent", True)
    )


@planted
def nobody_is_greeted_after_the_agent_died(patch: pytest.MonkeyPatch) -> None:
    """Hellos that come while there is no agent are never answered, nor those after them."""
    honest = rank_module.RankCore.agent_replaced

    def replaced(self: rank_module.RankCore, agent_name: str, metadata: bytes) -> None:
        honest(self, agent_name, metadata)
        self._has_agent = False

    patch.setattr(rank_module.RankCore, "agent_replaced", replaced)
