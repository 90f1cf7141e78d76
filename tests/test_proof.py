"""What a reader asks for and when it believes its bytes, as it is heard at its door.

A prefill rank promises that lent blocks stay as they are for some seconds, and nothing else tells a reader that what it
has read is what was lent. Here the reader is real and the prefill rank is played: after the handshake every claim and
renewal comes to the test, which answers as it likes, late, twice, in any order, or never. Times are the reader's clock,
from the moment at which it first claims.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from asynckv.config import EngineConfig, LeaseConfig, PullConfig
from asynckv.core.pull import PullState
from asynckv.core.source import MAX_CLAIM_PAUSE_S, MAX_NONCES, MIN_RENEW_S
from asynckv.core.types import Reason
from asynckv.core.wire import Claim, Granted, Message, NotYet, Refused, Release, Renew, decode_packet, encode_packet
from tests.world import World, make_layout

Ask = Claim | Renew
LONG = 50.0
"""A request that has been lent for so long was lent before anybody read it."""


class Reading:
    """One pull whose reads run, from a rank that says what the test has it say.

    Args:
        blocks: How many are pulled.
        timeout: Deadline of the pull.
        params: What the prefill side says of the request.
        config: How the reader is set up.
    """

    def __init__(self, blocks: int = 1, timeout: float = 100.0, params: Any = None, **config: Any) -> None:
        pull = PullConfig(**{"gone_s": 1000.0} | config)
        self.world = World(EngineConfig(engine_id="x", lease=LeaseConfig(lease_s=30.0, grant_s=10.0), pull=pull))
        self.prefill = self.world.add("p", make_layout(), engine_id="prefill")
        self.decode = self.world.add("d", make_layout(base=1 << 41), engine_id="decode")
        ids = list(range(blocks))
        given = self.world.params([self.prefill], "r", ids, 4 * blocks, written=True)
        given = msgspec.structs.replace(given, **(params or {}))
        self.pull = self.world.pull(self.decode, "d", ids, given, timeout=timeout)
        self.world.deliver()  # Hello
        self.world.deliver()  # Welcome: it claims, and reads

    @property
    def outcome(self) -> Reason | None:
        return self.pull.reason

    @property
    def state(self) -> PullState:
        return self.pull.state

    def said(self) -> list[Message]:
        letters, self.world.letters = self.world.letters, []
        return [message for letter in letters for message in decode_packet(letter.data).messages]

    def asked(self) -> list[Ask]:
        return [message for message in self.said() if isinstance(message, Claim | Renew)]

    def ask(self) -> Ask:
        """The one thing that it has asked for."""
        (ask,) = self.asked()
        return ask

    def wait(self, until: float) -> list[tuple[float, Ask]]:
        """Answer nothing until a moment; return what was asked meanwhile, and when."""
        heard = []
        while self.world.now < until:
            self.world.advance(min(0.01, until - self.world.now))
            heard += [(self.world.now, ask) for ask in self.asked()]
        return heard

    def say(self, message: Message) -> None:
        """Let the prefill rank say something."""
        here, there = self.decode.core.identity.incarnation, self.prefill.core.identity.incarnation
        packet = encode_packet(there, here, [message])
        self.decode.core.receive(self.prefill.address, packet, self.world.time(self.decode))
        self.world.settle(self.decode)

    def grant(self, ask: Ask, seconds: float, lent_for_s: float = LONG) -> None:
        self.say(Granted(ask.key, ask.pull_id, ask.nonce, seconds, lent_for_s))

    def granted(self, seconds: float) -> Reading:
        """Grant what is asked for first."""
        self.grant(self.ask(), seconds)
        return self

    def refuse(self, ask: Ask, reason: Reason) -> None:
        self.say(Refused(ask.key, ask.pull_id, ask.nonce, reason))

    def land(self) -> None:
        """Let all that runs arrive; not what follows it."""
        self.world.complete_reads(self.decode)


# -- which promise covers a read -----------------------------------------------------------------------


@pytest.mark.parametrize(("lands_at", "is_covered"), [(9.98, True), (9.995, False), (10.5, False)])
def test_a_promise_counts_from_before_its_claim_was_sent_less_a_margin_for_the_clocks(
    lands_at: float, is_covered: bool
) -> None:
    """Not from when the answer came, and not from a later claim: the owner may have counted from the first moment."""
    it = Reading()
    first = it.ask()
    assert len(it.wait(8.0)) > 1
    it.grant(first, 10.0)
    it.wait(lands_at)
    it.land()
    assert it.outcome is (Reason.COMPLETE if is_covered else None)
    assert is_covered or it.state is PullState.CONFIRMING


def test_a_shorter_promise_takes_nothing_from_a_longer_one() -> None:
    it = Reading().granted(10.0)
    (_, renewal), *_ = it.wait(5.0)
    it.grant(renewal, 1.0)
    it.wait(8.0)
    it.land()
    assert it.outcome is Reason.COMPLETE


def test_only_a_claim_that_left_after_the_last_byte_confirms_it() -> None:
    """Where every promise was too short, one that is asked for once all has arrived proves it without any clock.

    Asked for before, it proves nothing: the blocks may have been another's between the promise's end and the last byte.
    """
    it = Reading()
    first = it.ask()
    it.grant(first, 0.1)
    *_, (_, earlier) = it.wait(0.5)
    it.land()
    assert it.state is PullState.CONFIRMING
    later = it.ask()
    for ask in (earlier, first):
        it.grant(ask, 0.001)
        assert it.outcome is None
    it.grant(later, 0.001)
    assert it.outcome is Reason.COMPLETE


def test_what_is_granted_while_bytes_are_missing_confirms_none_that_come_later() -> None:
    it = Reading().granted(0.1)
    it.wait(0.5)
    it.land()
    assert it.outcome is None


@pytest.mark.parametrize(("lent_for_s", "is_younger"), [(5.02, True), (5.0025, False), (1.0, False)])
def test_a_read_that_may_be_older_than_the_loan_is_done_again(lent_for_s: float, is_younger: bool) -> None:
    """Params may travel ahead of the data: before it was lent, a block holds anything. Clocks may differ here too."""
    it = Reading(params={"written": False})
    first = it.ask()
    it.wait(5.0)
    it.grant(first, 10.0, lent_for_s)
    it.land()
    assert it.outcome is (Reason.COMPLETE if is_younger else None)
    assert bool(it.decode.reads) is not is_younger


def test_what_is_read_again_needs_a_proof_of_its_own() -> None:
    """What confirmed the first read, of blocks that were not lent yet, says nothing about the second."""
    it = Reading(params={"written": False})
    it.wait(1.0)
    it.land()
    *_, (_, ask) = it.wait(3.0)
    it.grant(ask, 0.001, lent_for_s=0.5)
    assert it.pull.state is PullState.READING
    *_, (_, ask) = it.wait(6.0)
    it.land()
    assert it.state is PullState.CONFIRMING
    it.grant(ask, 0.001, lent_for_s=3.0)
    assert it.outcome is None
    it.grant(it.ask(), 0.001, lent_for_s=3.0)
    assert it.outcome is Reason.COMPLETE


# -- what is asked for, and how often -------------------------------------------------------------------


def test_a_promise_that_runs_is_renewed_and_one_that_has_run_out_is_claimed_anew() -> None:
    """A renewal of what has lapsed is refused: it would cost the reader a round trip that it may not have."""
    it = Reading().granted(5.0)
    asked = it.wait(8.0)
    assert {type(ask) for at, ask in asked if at < 4.99} == {Renew}
    assert {type(ask) for at, ask in asked if at > 5.01} == {Claim}


def test_a_lapsed_promise_counts_for_nothing_once_the_owner_has_said_so() -> None:
    """A renewal crossed the end of its promise: the request is claimed anew at once, and as if for the first time."""
    it = Reading(timeout=20.0).granted(1.0)
    _, renewal = it.wait(1.1)[0]
    it.refuse(renewal, Reason.EXPIRED)
    assert isinstance(it.ask(), Claim)
    assert it.decode.inspect.gauges()["pulls_unanswered"] == 1
    it.land()
    it.wait(20.1)
    assert it.outcome is Reason.TIMEOUT
    assert it.pull.detail.startswith("no answer to the claim from prefill/tp0")


def test_a_claim_that_is_refused_as_expired_is_the_end() -> None:
    """It is claimed anew once: whoever says it again means the lease, not the promise."""
    it = Reading().granted(1.0)
    _, renewal = it.wait(1.1)[0]
    it.refuse(renewal, Reason.EXPIRED)
    it.refuse(it.ask(), Reason.EXPIRED)
    it.land()
    assert it.outcome is Reason.LEASE_LOST


def test_a_late_refusal_of_an_older_claim_changes_nothing() -> None:
    """What was said first may be heard last: of claims that crossed, the newest that was granted counts."""
    it = Reading()
    claims = [it.ask(), *(ask for _, ask in it.wait(1.0))]
    assert len(claims) > 2
    it.grant(claims[-1], 10.0)
    it.grant(claims[0], 10.0)
    for reason in (Reason.UNKNOWN, Reason.EXPIRED, Reason.OVERLOADED):
        it.refuse(claims[1], reason)
        it.refuse(claims[0], reason)
    assert it.outcome is None
    assert it.state is PullState.READING
    it.land()
    assert it.outcome is Reason.COMPLETE


@pytest.mark.parametrize("reason", [Reason.REVOKED, Reason.EXPIRED])
def test_what_is_not_renewed_may_be_read_as_long_as_it_was_promised(reason: Reason) -> None:
    it = Reading().granted(10.0)
    (_, renewal), *_ = it.wait(4.0)
    it.refuse(renewal, reason)
    assert it.wait(9.0) == []
    it.land()
    assert it.outcome is Reason.COMPLETE


def gaps(asked: list[tuple[float, Ask]]) -> list[float]:
    """Seconds between questions."""
    return [round(b - a, 1) for (a, _), (b, _) in itertools.pairwise(asked)]


def test_unanswered_claims_are_repeated_ever_more_seldom_but_never_given_up() -> None:
    it = Reading(claim_retry_s=0.2)
    asked = [(0.0, it.ask()), *it.wait(12.0)]
    assert gaps(asked) == [0.2, 0.4, 0.8, 1.6, *[MAX_CLAIM_PAUSE_S] * 4]
    assert len({ask.nonce for _, ask in asked}) == len(asked)


def test_a_reader_that_was_answered_is_patient_anew() -> None:
    """One packet that is lost must not cost as much as a rank that is silent."""
    it = Reading(claim_retry_s=0.2)
    *_, (_, last) = it.wait(8.0)
    it.grant(last, 4.0)
    assert gaps(it.wait(12.0))[:3] == [0.2, 0.4, 0.8]


@pytest.mark.parametrize(("seconds", "renew_s"), [(4.0, 3.0), (4.0, 1.0)])
def test_a_promise_is_renewed_at_half_its_time_or_when_the_owner_says(seconds: float, renew_s: float) -> None:
    it = Reading(params={"renew_s": renew_s}).granted(seconds)
    (at, renewal), *_ = it.wait(seconds)
    assert isinstance(renewal, Renew)
    assert at == pytest.approx(min(seconds / 2, renew_s), abs=0.02)


def test_no_lender_makes_a_reader_renew_without_pause() -> None:
    """An owner that grants a millisecond at a time, however quick its answers."""
    it = Reading().granted(0.001)
    count = 0
    while it.world.now < 2.0:
        for _, ask in it.wait(it.world.now + 0.01):
            count += 1
            it.grant(ask, 0.001)
    assert count <= 2.0 / MIN_RENEW_S + 1


def test_what_has_arrived_too_late_is_asked_for_at_once_and_not_again_and_again() -> None:
    it = Reading(claim_retry_s=0.2).granted(0.1)
    it.wait(3.0)
    it.land()
    assert isinstance(it.ask(), Claim)
    for _ in range(5):
        it.world.advance(0.001)
        assert it.asked() == []


def test_no_more_is_asked_for_than_the_deadline_leaves() -> None:
    """What is lent to nobody who still wants it is the owner's again so much sooner."""
    it = Reading(timeout=7.0)
    assert it.ask().seconds == pytest.approx(7.0)
    assert [ask.seconds for at, ask in it.wait(6.0) if ask.seconds > 7.0 - at + 0.02] == []


def test_answers_to_the_last_few_claims_count_and_to_no_others() -> None:
    """Each is remembered with the moment before it was sent, and a rank that is silent must not fill the memory."""
    it = Reading(timeout=1000.0)
    asked = [it.ask(), *(ask for _, ask in it.wait(60.0))]
    assert len(asked) > MAX_NONCES
    for ask in asked[:-MAX_NONCES]:
        it.grant(ask, 600.0)
    it.land()
    assert it.outcome is None
    it.grant(asked[-MAX_NONCES], 600.0)
    assert it.outcome is Reason.COMPLETE


# -- the outcome -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lands_at", [0.2, 3.0], ids=["while it drains", "after the outcome"])
def test_a_pull_that_has_failed_asks_for_nothing_and_reads_nothing_more(lands_at: float) -> None:
    """What runs is waited for, as long as that may take; what was still to be posted is not."""
    it = Reading(8, max_post_bytes=64, window_bytes=128, drain_s=1.0).granted(20.0)
    first, second = it.decode.reads
    it.world.cancel(it.decode, it.pull)
    it.wait(lands_at)
    assert it.outcome is (Reason.CANCELLED if lands_at > 1.0 else None)
    it.world.complete(it.decode, first)
    assert list(it.decode.reads) == [second]
    it.world.complete(it.decode, second)
    assert it.outcome is Reason.CANCELLED
    assert (it.decode.reads, [source.next_read for source in it.pull.sources]) == ({}, [None])
    assert it.decode.returned == [it.pull]
    assert it.wait(15.0) == []


def test_an_unacknowledged_release_is_repeated_ever_more_seldom_and_given_up_in_time() -> None:
    """Its lease runs out by itself: to say so saves its owner that time, and is worth no more than that."""
    it = Reading(release_retry_s=0.2, release_timeout_s=30.0).granted(10.0)
    it.land()
    said = list[float]()
    while it.world.now < 40.0:
        said += [it.world.now for message in it.said() if isinstance(message, Release)]
        it.world.advance(0.02)
    pauses = [b - a for a, b in itertools.pairwise(said)]
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, *[5.0] * 4], abs=0.03)
    assert it.state is PullState.RELEASED


def test_bytes_that_are_proven_stay_so_whatever_is_said_of_the_lease() -> None:
    it = Reading()
    ask = it.ask()
    it.grant(ask, 10.0)
    it.land()
    it.refuse(ask, Reason.EXPIRED)
    it.say(NotYet(ask.key, ask.pull_id, ask.nonce))
    assert it.outcome is Reason.COMPLETE
    assert [type(message) for message in it.said()] == [Release]
