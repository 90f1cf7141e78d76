"""One lent request alone: every row of its tables, and the rules that a table does not show."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest

from asynckv.account.waits import readers, waits
from asynckv.core import lease as lease_module
from asynckv.core.lease import Effects, Lease, LeaseState, Lent, Reader
from asynckv.core.notes import ReaderGone
from asynckv.core.types import Cohort, Key, Outcome, Reason, RequestId
from asynckv.core.wire import Ack, Claim, Granted, Refused, Release, Renew
from asynckv.errors import LocalProtocolError
from asynckv.geometry.bounds import BlockRuns
from asynckv.geometry.match import owed_readers, remote_ranks
from tests.rows import unnoticed

KEY = Key("epoch", 0, 7, "0" * 32)
AT = 1000.0
"""When everything here is lent."""


def lend(**changed: Any) -> Lease:
    """Lend for ten seconds, with grants of four."""
    given: dict[str, Any] = {"num_tokens": 4, "lease_s": 10.0, "grant_s": 4.0, "max_lease_s": 60.0, "readers": 1}
    place: dict[str, Any] = {
        "key": KEY,
        "request_id": RequestId("r"),
        "groups": (BlockRuns(0, ((3, 1),)),),
        "tp_rank": 0,
        "tp_size": 1,
    }
    return Lease(Lent(**(given | place | changed)), AT, bytes(range(16)))


class Reading:
    """A decode rank that speaks to a lease.

    Args:
        size: Ranks of its decode engine.
    """

    def __init__(
        self, lease: Lease, rank: int = 0, size: int = 1, *, pull: str = "pull", cohort: str = "decode"
    ) -> None:
        self.lease, self.pull = lease, f"{pull}-{rank}"
        self.cohort = Cohort(cohort, size, rank)
        self.sender = f"process-{rank}"
        self.key = ""

    def claim(self, after_s: float, seconds: float = 60.0, **changed: Any) -> Effects:
        given: dict[str, Any] = {"key": KEY, "request_id": "r", "cohort": self.cohort, "pull_id": self.pull, "nonce": 1}
        claim = Claim(**(given | {"digest": self.lease.digest, "seconds": seconds} | changed))
        return self.lease.receive(claim, self.sender, AT + after_s, self.key)

    def renew(self, after_s: float, seconds: float = 60.0) -> Effects:
        return self.lease.receive(Renew(KEY, self.pull, 2, seconds), self.sender, AT + after_s, self.key)

    def release(self, after_s: float, outcome: Outcome = Outcome.COMPLETE, sender: str = "") -> Effects:
        release = Release(KEY, "r", self.cohort, self.pull, outcome)
        return self.lease.receive(release, sender or self.sender, AT + after_s, self.key)


def lent_to_one() -> tuple[Lease, Reading]:
    return (lease := lend()), Reading(lease)


def lent_to_two() -> tuple[Lease, Reading, Reading]:
    return (lease := lend()), Reading(lease, 0, 2), Reading(lease, 1, 2)


def state_of(lease: Lease) -> LeaseState:
    return lease.state


def refused(effects: Effects) -> Reason | None:
    return effects.answer.reason if isinstance(effects.answer, Refused) else None


def granted(effects: Effects) -> float:
    assert isinstance(effects.answer, Granted), effects
    return effects.answer.seconds


def test_of_many_readers_that_are_waited_for_a_few_are_named() -> None:
    for ranks, end in ((4, "tp3@process-"), (5, "tp3@process- and 1 more")):
        lease = lend()
        for rank in range(ranks):
            Reading(lease, rank, ranks).claim(0.0)
        assert waits(lease, AT + 0.1).endswith(end), waits(lease, AT + 0.1)


# -- what the tables say -------------------------------------------------------------------------------


def test_a_request_is_lent_until_everybody_has_released() -> None:
    lease, one, two = lent_to_two()
    assert one.claim(0.0).first_grant == one.pull
    assert state_of(lease) is LeaseState.LENT
    assert one.claim(0.1).first_grant is None
    assert two.claim(0.1).first_grant == two.pull
    assert granted(one.renew(1.0)) == 4.0
    assert state_of(lease) is LeaseState.LENT
    effects = one.release(2.0)
    assert isinstance(effects.answer, Ack)
    assert (lease.state, effects.has_ended, lease.owed()) == (LeaseState.LENT, False, ("decode/tp1",))
    effects = two.release(3.0)
    assert (lease.state, effects.has_ended, effects.wake_at) == (LeaseState.RELEASED, True, math.inf)
    assert lease.ended_at == AT + 3.0
    ended = {reader.tp_rank: x.outcome for reader, x in lease.discharged.items()}
    assert ended == {0: Outcome.COMPLETE, 1: Outcome.COMPLETE}


def test_a_request_that_was_lent_to_two_decode_engines_waits_for_both() -> None:
    """Also for one that nobody has heard of when the other is done."""
    lease = lend(readers=2)
    one, other = Reading(lease, cohort="one"), Reading(lease, pull="other", cohort="other")
    assert (lease.is_owed(), lease.owed()) == (True, ("*", "*"))
    one.claim(0.0)
    assert not one.release(1.0).has_ended
    assert (state_of(lease), lease.is_owed(), lease.owed()) == (LeaseState.LENT, True, ("*",))
    assert lease.tick(AT + 4.0).wake_at == AT + 10.0
    assert granted(other.claim(9.0)) == 4.0
    assert lease.owed() == ("other/tp0",)
    assert other.release(10.0).has_ended
    assert (state_of(lease), lease.is_owed(), lease.owed()) == (LeaseState.RELEASED, False, ())


def test_a_decode_engine_that_never_comes_costs_the_time_of_the_lease() -> None:
    lease = lend(readers=2)
    Reading(lease).release(1.0)
    assert not lease.tick(AT + 9.9).has_ended
    assert lease.tick(AT + 10.0).has_ended
    assert (state_of(lease), lease.owed()) == (LeaseState.EXPIRED, ("*",))


def test_no_reader_with_a_grant_is_passed_over_though_none_is_owed() -> None:
    lease = lend()
    first, second = Reading(lease, pull="first"), Reading(lease, pull="second")
    first.claim(0.0)
    second.claim(1.0)
    assert not first.release(2.0).has_ended
    assert state_of(lease) is LeaseState.LENT
    assert not lease.tick(AT + 4.9).has_ended
    assert lease.tick(AT + 5.0).has_ended
    assert state_of(lease) is LeaseState.RELEASED


def test_a_request_without_a_reader_expires_at_its_time() -> None:
    lease = lend()
    assert lease.wake_at == AT + 4.0  # to see whether a grant has run out
    assert lease.tick(AT + 4.0).wake_at == AT + 10.0
    assert not lease.tick(AT + 9.9).has_ended
    assert state_of(lease) is LeaseState.LENT
    assert lease.tick(AT + 10.0) == Effects(math.inf, has_ended=True)
    assert (lease.state, lease.owed()) == (LeaseState.EXPIRED, ("*",))


def test_a_lease_ends_after_its_last_grant_though_its_time_was_up_before() -> None:
    lease, reading = lent_to_one()
    reading.claim(8.0)
    assert not lease.tick(AT + 11.9).has_ended
    assert (lease.state, lease.until) == (LeaseState.LENT, AT + 12.0)
    assert lease.tick(AT + 12.0).has_ended
    assert state_of(lease) is LeaseState.EXPIRED


def test_a_reader_that_gives_a_grant_back_to_try_again_finds_the_request_for_as_long_as_it_was_granted() -> None:
    lease, reading = lent_to_one()
    lease.tick(AT + 4.0)
    reading.claim(8.0)
    assert reading.release(8.5, Outcome.RETRY).wake_at == AT + 12.0
    assert not lease.tick(AT + 11.9).has_ended
    assert lease.tick(AT + 12.0).has_ended
    assert state_of(lease) is LeaseState.EXPIRED


def test_a_revoked_request_is_the_engines_at_once_if_no_reader_was_promised_it() -> None:
    lease = lend()
    assert lease.revoke(AT + 1.0).has_ended
    assert state_of(lease) is LeaseState.REVOKED


def test_revoking_stops_new_grants_and_keeps_old_ones() -> None:
    lease = lend()
    one, two, three = (Reading(lease, i, 3) for i in range(3))
    one.claim(0.0)
    two.claim(1.0)
    three.claim(1.0)
    assert not lease.revoke(AT + 2.0).has_ended
    assert state_of(lease) is LeaseState.ENDING
    assert not lease.revoke(AT + 2.1).has_ended
    assert state_of(lease) is LeaseState.ENDING
    assert refused(one.claim(2.2)) is Reason.REVOKED
    assert state_of(lease) is LeaseState.ENDING
    assert refused(one.renew(2.2)) is Reason.REVOKED
    assert state_of(lease) is LeaseState.ENDING
    assert not one.release(3.0).has_ended
    assert state_of(lease) is LeaseState.ENDING
    assert not two.release(3.0).has_ended
    assert not lease.tick(AT + 4.9).has_ended
    assert state_of(lease) is LeaseState.ENDING
    assert lease.tick(AT + 5.0).has_ended
    assert state_of(lease) is LeaseState.REVOKED


def test_what_is_over_takes_no_event_and_nothing_changes() -> None:
    ended = [lend(), lend(), lend()]
    Reading(ended[0]).release(1.0)
    ended[1].tick(AT + 10.0)
    ended[2].revoke(AT + 1.0)
    assert [x.state for x in ended] == [LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.REVOKED]
    for lease in ended:
        before = (lease.state, list(lease.history), lease.final.copy(), lease.since)
        late = Reading(lease, pull="late")
        for event in (late.claim, late.renew, late.release):
            with pytest.raises(LocalProtocolError, match=f"while the lease of request 'r' is {lease.state.name}"):
                event(11.0)
        with pytest.raises(LocalProtocolError, match="Revoke while"):
            lease.revoke(AT + 11.0)
        with pytest.raises(LocalProtocolError, match="Gone while"):
            lease.lose([], AT + 11.0)
        assert lease.tick(AT + 11.0) == Effects(math.inf)
        assert (lease.state, lease.history, lease.final, lease.since) == before


def test_a_lease_ends_early_only_if_all_readers_that_it_waits_for_are_gone() -> None:
    lease, one, two = lent_to_two()
    one.claim(0.0)
    two.claim(1.0)
    effects = lease.tick(AT + 4.0)
    assert effects.wake_at == AT + 5.0
    assert [stray.sender for stray in effects.strays] == [one.sender]
    assert not lease.lose([Reader("decode", 0)], AT + 4.1).has_ended  # the other one's grant runs
    assert state_of(lease) is LeaseState.LENT
    assert [stray.sender for stray in lease.tick(AT + 5.0).strays] == [two.sender]
    assert state_of(lease) is LeaseState.LENT  # the other one may claim again
    assert {name: state for name, state, _ in readers(lease)} == {
        "decode/tp0@process-": "gone",
        "decode/tp1@process-": "lapsed",
    }
    assert waits(lease, AT + 5.0).startswith("claimed and no longer renewed by decode/tp1")
    assert lease.lose([Reader("decode", 1)], AT + 6.0).has_ended
    assert (lease.state, lease.owed()) == (LeaseState.EXPIRED, ("decode/tp0", "decode/tp1"))
    assert lease.history[-2:] == [(AT + 6.0, ReaderGone("decode/tp1@process-")), (AT + 6.0, "expired")]


def test_a_lease_does_not_end_early_while_a_reader_that_is_not_owed_holds_a_grant() -> None:
    """It released one attempt for good, and another one of it reads."""
    lease, one, two = lent_to_two()
    more = Reading(lease, 1, 2, pull="more")
    one.claim(0.0)
    two.claim(1.0)
    more.claim(2.0)
    two.release(3.0)
    lease.tick(AT + 4.0)
    assert not lease.lose([Reader("decode", 0)], AT + 4.0).has_ended
    assert lease.grants
    assert lease.tick(AT + 6.0).has_ended
    assert state_of(lease) is LeaseState.EXPIRED


def test_a_lease_does_not_end_early_before_every_decode_engine_has_spoken_up() -> None:
    lease = lend(readers=2)
    Reading(lease).claim(0.0)
    lease.tick(AT + 4.0)
    assert not lease.lose([Reader("decode", 0)], AT + 4.0).has_ended
    assert not lease.tick(AT + 9.9).has_ended
    assert state_of(lease) is LeaseState.LENT


def test_a_reader_that_claims_again_is_not_gone() -> None:
    """The next start of its process, or the same over another connection."""
    lease, one, two = lent_to_two()
    one.claim(0.0)
    two.claim(0.0)
    lease.tick(AT + 4.0)
    lease.lose([Reader("decode", 0)], AT + 4.0)
    again = Reading(lease, 0, 2, pull="again")
    assert granted(again.claim(4.5)) == 4.0
    assert not lease.lose([Reader("decode", 1)], AT + 5.0).has_ended
    assert lease.tick(AT + 6.0).strays == ()  # a reader with a grant that runs is not looked for
    assert [stray.pull_id for stray in lease.tick(AT + 8.5).strays] == [again.pull]
    assert state_of(lease) is LeaseState.LENT


def test_a_reader_that_was_revoked_and_is_gone_ends_nothing_early() -> None:
    lease, one, two = lent_to_two()
    one.claim(0.0)
    two.claim(2.0)
    lease.revoke(AT + 3.0)
    lease.tick(AT + 4.0)
    assert not lease.lose([Reader("decode", 0)], AT + 4.0).has_ended
    assert state_of(lease) is LeaseState.ENDING
    assert lease.tick(AT + 6.0).has_ended
    assert state_of(lease) is LeaseState.REVOKED


def test_a_reader_that_will_try_again_may_be_gone_as_well() -> None:
    lease, reading = lent_to_one()
    reading.claim(0.0)
    reading.release(1.0, Outcome.RETRY)
    assert [stray.pull_id for stray in lease.tick(AT + 5.0).strays] == [reading.pull]
    assert lease.lose([Reader("decode", 0)], AT + 5.0).has_ended


def test_a_silent_reader_is_looked_at_less_and_less_often() -> None:
    lease = lend(lease_s=30.0)
    Reading(lease).claim(0.0, 2.0)
    looks, at = [], lease.wake_at
    while not lease.tick(at).has_ended:
        looks.append(at - AT)
        at = lease.wake_at
    assert looks == [2.0, 3.0, 4.0, 6.0, 10.0, 18.0]
    assert (at, lease.state) == (AT + 30.0, LeaseState.EXPIRED)


TABLE_TESTS = (
    test_a_lease_ends_early_only_if_all_readers_that_it_waits_for_are_gone,
    test_a_reader_that_was_revoked_and_is_gone_ends_nothing_early,
    test_a_request_is_lent_until_everybody_has_released,
    test_no_reader_with_a_grant_is_passed_over_though_none_is_owed,
    test_a_request_without_a_reader_expires_at_its_time,
    test_a_lease_ends_after_its_last_grant_though_its_time_was_up_before,
    test_a_revoked_request_is_the_engines_at_once_if_no_reader_was_promised_it,
    test_revoking_stops_new_grants_and_keeps_old_ones,
    test_what_is_over_takes_no_event_and_nothing_changes,
)


def check_tables() -> None:
    for test in TABLE_TESTS:
        test()


@pytest.mark.parametrize("table", [lease_module.ON_EVENT, lease_module.WHEN], ids=["on_event", "when"])
def test_no_row_can_be_made_wrong_unnoticed(table: Any) -> None:
    assert unnoticed(table, check_tables) == []


def test_a_table_that_leads_in_a_circle_is_seen_and_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {LeaseState.ENDING: {lease_module.no_grant_runs: LeaseState.LENT}}
    rows |= {LeaseState.LENT: {lease_module.no_grant_runs: LeaseState.ENDING}}
    monkeypatch.setattr(lease_module, "WHEN", dict(lease_module.WHEN) | rows)
    with pytest.raises(AssertionError, match="have a cycle through"):
        lend().tick(AT)


# -- how long a grant lasts ----------------------------------------------------------------------------


def test_a_grant_is_as_long_as_one_may_be_or_as_the_reader_needs() -> None:
    lease = lend()
    assert granted(Reading(lease).claim(0.0)) == 4.0
    assert granted(Reading(lease, pull="quick").claim(0.0, 1.5)) == 1.5


def test_no_grant_outlives_the_longest_lease_and_no_reader_is_granted_more_after_it() -> None:
    lease = lend(max_lease_s=15.0)
    reading = Reading(lease)
    reading.claim(0.0)
    ends = [after_s + granted(reading.renew(after_s)) for after_s in (3.0, 6.0, 9.0, 12.0, 14.0)]
    assert ends == [7.0, 10.0, 13.0, 15.0, 15.0]
    assert lease.until == AT + 15.0
    late = reading.renew(14.9995)
    assert refused(late) is Reason.EXPIRED
    assert isinstance(late.answer, Refused)
    assert late.answer.detail == "lent for longer than max_lease_s 15.0"
    # A new attempt gets no more than the old one.
    assert refused(Reading(lease, pull="other").claim(14.9995)) is Reason.EXPIRED
    assert lease.tick(AT + 15.0).has_ended


def test_a_reader_that_asks_for_nothing_is_refused_for_that_and_not_for_the_time_that_has_passed() -> None:
    for seconds in (0.0, 0.0009):
        answer = Reading(lend()).claim(0.0, seconds).answer
        assert isinstance(answer, Refused)
        assert answer.detail == f"{seconds:g} s were asked for, but the shortest grant is 1 ms"


def test_a_late_reader_is_served_until_the_lease_was_looked_at_and_never_after() -> None:
    """Time is looked at after an event: until it was seen to be up, the blocks are what they were, and may stay so."""
    lease = lend()
    reader = Reading(lease)
    assert granted(reader.claim(10.5)) == 4.0
    assert not lease.tick(AT + 14.4).has_ended
    assert granted(reader.renew(14.6)) == 4.0  # of a promise that had run out
    assert not lease.tick(AT + 18.5).has_ended
    assert lease.tick(AT + 18.7).has_ended
    assert state_of(lease) is LeaseState.EXPIRED
    lease = lend()
    reader, other = Reading(lease), Reading(lease, pull="other")
    reader.claim(0.0)
    other.claim(4.5)  # whatever it is that makes somebody look
    assert refused(reader.renew(4.6)) is Reason.EXPIRED
    lease.tick(AT + 10.0)
    with pytest.raises(LocalProtocolError):
        reader.claim(10.0)


def test_a_lease_that_is_ending_looks_at_each_grant_in_turn_and_ends_with_the_last() -> None:
    lease = lend()
    for rank, seconds in enumerate((1.0, 4.0, 2.0)):
        Reading(lease, rank, 3).claim(0.0, seconds)
    assert lease.revoke(AT + 0.5).wake_at == AT + 1.0
    assert lease.tick(AT + 1.0).wake_at == AT + 2.0
    assert lease.tick(AT + 2.0).wake_at == AT + 4.0
    assert lease.tick(AT + 4.0).has_ended


def test_a_lease_wakes_when_its_time_is_up_or_when_it_is_worth_a_word() -> None:
    lease = lend(warn_s=3.0)
    assert lease.wake_at == AT + 3.0
    assert not lease.tick(AT + 2.9).is_overdue
    assert lease.tick(AT + 3.0) == Effects(AT + 4.0, is_overdue=True)
    assert lease.tick(AT + 4.0) == Effects(AT + 6.0)
    assert lease.tick(AT + 7.0) == Effects(AT + 10.0, is_overdue=True)
    assert Reading(lease).claim(8.0).wake_at == AT + 12.0


# -- who may say what ----------------------------------------------------------------------------------


def test_only_the_process_that_claimed_renews_and_releases() -> None:
    lease = lend()
    reading, stranger = Reading(lease), Reading(lease)
    stranger.sender = "stranger"
    reading.claim(0.0)
    assert refused(stranger.claim(1.0)) is Reason.FOREIGN_PULL
    assert refused(stranger.renew(1.0)) is Reason.EXPIRED
    assert refused(stranger.release(1.0)) is Reason.FOREIGN_PULL
    assert (lease.until, lease.owed()) == (AT + 10.0, ("decode/tp0",))


def test_another_key_says_nothing_in_the_name_of_a_reader() -> None:
    """Also if it knows all that the reader knows: key, pull id, process start and cohort."""
    lease = lend()
    reading, thief = Reading(lease), Reading(lease)
    reading.key, thief.key = "key:reader", "key:thief"
    reading.claim(0.0)
    assert refused(thief.claim(1.0)) is Reason.FOREIGN_PULL
    assert refused(thief.renew(1.0)) is Reason.FOREIGN_PULL
    assert refused(thief.release(1.0)) is Reason.FOREIGN_PULL
    thief.pull = "another"
    assert refused(thief.claim(1.0)) is Reason.FOREIGN_PULL
    assert refused(thief.release(1.0, Outcome.RETRY)) is Reason.FOREIGN_PULL
    assert (lease.until, lease.owed(), len(lease.grants)) == (AT + 10.0, ("decode/tp0",), 1)
    # The reader itself may come again by another connection: it proves the same key.
    assert granted(reading.renew(2.0)) == 4.0
    assert reading.release(3.0).has_ended


def test_a_message_costs_the_same_however_often_a_reader_has_tried() -> None:
    lease = lend(lease_s=3000.0, max_lease_s=6000.0)
    for number in range(lease_module.MAX_ATTEMPTS):
        granted(Reading(lease, pull=f"try {number}").claim(0.0))
    late = Reading(lease, pull="one too many")
    assert refused(late.claim(1.0)) is Reason.OVERLOADED
    assert refused(late.release(1.0)) is Reason.OVERLOADED
    # Those that hold a grant are served, and another reader has room of its own.
    assert granted(Reading(lease, pull="try 0").renew(1.0)) == 4.0
    assert isinstance(Reading(lease, pull="try 0").release(1.0).answer, Ack)


def steps_of(number: int) -> list[int]:
    """Count the bytecodes of a renewal, a refused one, a claim and a release, beside so many grants."""
    lease = lend(lease_s=3000.0, max_lease_s=6000.0)
    readings = [Reading(lease, rank, 4096) for rank in range(number)]
    for reading in readings:
        granted(reading.claim(0.0))
    first, counts = readings[0], list[int]()
    says: tuple[Callable[[], Effects], ...] = (
        lambda: first.renew(1.0),
        lambda: Reading(lease, 0, 4096, pull="none").renew(1.0),
        lambda: Reading(lease, 0, 4096, pull="next").claim(1.0),
        lambda: first.release(1.0, Outcome.RETRY),
    )
    for say in says:
        seen = [0]

        def note(frame: Any, event: str, arg: Any, seen: list[int] = seen) -> Any:
            if frame.f_code.co_filename == lease_module.__file__:
                frame.f_trace_opcodes = True
                seen[0] += event == "opcode"
            return note

        before = sys.gettrace()
        sys.settrace(note)
        try:
            say()
        finally:
            sys.settrace(before)
        counts.append(seen[0])
    return counts


def test_a_message_takes_no_more_steps_beside_4096_grants_than_beside_one() -> None:
    # Fewer are possible: history is full by then.
    one, many = steps_of(1), steps_of(4096)
    assert min(one) > 20
    assert all(there <= here + 20 for here, there in zip(one, many, strict=True)), (one, many)


def test_a_grant_that_was_renewed_lapses_at_its_later_end() -> None:
    lease = lend(lease_s=60.0)
    reading = Reading(lease)
    reading.claim(0.0)
    reading.renew(3.0)
    lease.tick(AT + 4.0)
    assert len(lease.grants) == 1
    lease.tick(AT + 7.0)
    assert not lease.grants
    assert lease.past[Reader("decode", 0)].pull_id == "pull-0"


def test_an_attempt_that_will_be_tried_again_strikes_no_reader_off() -> None:
    lease = lend()
    first, second = Reading(lease, pull="first"), Reading(lease, pull="second")
    first.claim(0.0)
    first.release(1.0, Outcome.RETRY)
    assert lease.owed() == ("decode/tp0",)
    assert [(name, state) for name, state, _ in readers(lease)] == [("decode/tp0@process-", "retrying")]
    assert refused(first.claim(1.1)) is Reason.RELEASED_ALREADY
    assert granted(second.claim(1.1)) == 4.0
    assert second.release(2.0).has_ended
    assert [(name, state) for name, state, _ in readers(lease)] == [("decode/tp0@process-", "complete")]


def test_what_is_refused_leaves_nothing_behind() -> None:
    lease, reading = lent_to_one()
    for changed, reason in (
        ({"request_id": "other"}, Reason.WRONG_REQUEST),
        ({"digest": bytes(16)}, Reason.BLOCKS_DIFFER),
        ({"cohort": Cohort("decode", 2, 2)}, Reason.WRONG_COHORT),
        ({"cohort": Cohort("decode", 8192, 0)}, Reason.WRONG_COHORT),
    ):
        assert refused(reading.claim(0.0, **changed)) is reason
        assert (lease.cohorts, lease.grants, lease.final) == ({}, {}, set())
    reading.claim(0.0)
    assert refused(reading.claim(0.0, pull_id="p", cohort=Cohort("decode", 2, 0))) is Reason.WRONG_COHORT
    assert refused(reading.claim(0.0, pull_id="p", cohort=Cohort("other"))) is Reason.WRONG_COHORT
    assert [*lease.grants] == [reading.pull]


def test_a_reader_that_another_rank_serves_is_not_owed() -> None:
    lease = lend(tp_rank=1, tp_size=2)
    assert refused(Reading(lease, 0, 2).claim(0.0)) is Reason.NOT_OWED
    assert granted(Reading(lease, 1, 2).claim(0.0)) == 4.0


def test_a_lease_owes_exactly_the_readers_that_answer_for_it_for_all_sizes_and_shards() -> None:
    for prefill, decode in itertools.product(range(1, 9), repeat=2):
        for shards in (n for n in range(1, prefill + 1) if prefill % n == 0):
            answers = {(d, p) for d in range(decode) for p in remote_ranks(d, decode, prefill, shards)}
            # Neighbours that share tokens are what one of `whole` ranks is otherwise.
            whole = prefill // shards
            assert answers == {
                (d, p)
                for d, p in itertools.product(range(decode), range(prefill))
                if d * whole < (p // shards + 1) * decode and p // shards * decode < (d + 1) * whole
            }
            assert answers == {(d, p) for p in range(prefill) for d in owed_readers(p, prefill, decode, shards)}
            assert {p for _, p in answers} == set(range(prefill))
            for p in range(prefill):
                lease = lend(tp_rank=p, tp_size=prefill, num_token_shards=shards)
                readers = [Reading(lease, d, decode) for d in range(decode)]
                owed = [d for d, reading in enumerate(readers) if refused(reading.claim(0.0)) is not Reason.NOT_OWED]
                assert owed == [d for d in range(decode) if (d, p) in answers]
                assert lease.num_readers == len(owed)
                for d in owed:
                    assert not lease.is_over
                    readers[d].release(1.0)
                assert lease.state is LeaseState.RELEASED


def test_a_reader_that_is_not_owed_hears_how_many_neighbours_share_tokens() -> None:
    answer = Reading(lend(tp_rank=1, tp_size=8, num_token_shards=4), 1, 2).claim(0.0).answer
    assert isinstance(answer, Refused)
    assert answer.detail == (
        "decode tp_rank 1 of 2 does not answer for prefill tp_rank 1 of 8, of which each 4 neighbours share tokens"
    )


def test_a_reader_whose_next_start_will_try_again_is_not_gone() -> None:
    lease = lend(lease_s=100.0, max_lease_s=200.0)
    one, other = Reading(lease, 0, 2), Reading(lease, 1, 2)
    one.claim(0.0)
    other.claim(1.0)
    lease.lose([stray.reader for stray in lease.tick(AT + 4.0).strays], AT + 4.5)
    assert lease.gone == {Reader("decode", 0)}
    again = Reading(lease, 0, 2, pull="again")
    again.sender = "next start"
    again.release(4.6, Outcome.RETRY)
    other.release(4.7)
    assert (lease.state, lease.gone) == (LeaseState.LENT, set())


def test_a_reader_that_was_never_granted_anything_is_looked_at_once_it_has_spoken() -> None:
    lease = lend(lease_s=100.0, max_lease_s=200.0)
    lease.tick(AT + 4.0)
    assert lease.look_at == math.inf
    effects = Reading(lease).release(5.0, Outcome.RETRY)
    assert effects.wake_at == AT + 9.0
    assert lease.tick(AT + 9.0).strays


# -- what a lease owes, and to whom ----------------------------------------------------------------------------


def test_a_shorter_grant_takes_nothing_back_of_a_longer_one() -> None:
    """Its reader may go by the longer one: blocks that return before that is over would be read with others' bytes."""
    lease, reading = lent_to_one()
    assert granted(reading.claim(0.0)) == 4.0
    assert granted(reading.renew(1.0, seconds=1.0)) == 1.0
    assert not lease.revoke(AT + 2.0).has_ended
    assert lease.until == AT + 4.0
    assert not lease.tick(AT + 3.9).has_ended
    assert lease.tick(AT + 4.0).has_ended


def test_a_pull_of_one_reader_is_no_other_readers() -> None:
    """Ranks of one process may say which rank they are; a pull was granted to one of them."""
    lease = lend()
    one, two = Reading(lease, 0, 2, pull="pull"), Reading(lease, 1, 2, pull="pull")
    two.pull, two.sender = one.pull, one.sender
    assert granted(one.claim(0.0)) == 4.0
    assert refused(two.claim(1.0)) is Reason.FOREIGN_PULL
    assert refused(two.release(1.0)) is Reason.FOREIGN_PULL
    assert lease.owed() == ("decode/tp0", "decode/tp1")
    assert granted(one.renew(2.0)) == 4.0


def test_every_reader_of_an_engine_has_the_key_with_which_it_spoke_up_itself() -> None:
    lease = lend()
    one, two, thief = Reading(lease, 0, 2), Reading(lease, 1, 2), Reading(lease, 1, 2)
    one.key, two.key, thief.key = "key:one", "key:two", "key:thief"
    one.claim(0.0)
    two.claim(0.0)
    assert refused(thief.renew(1.0)) is Reason.FOREIGN_PULL
    assert refused(thief.release(1.0)) is Reason.FOREIGN_PULL
    assert lease.owed() == ("decode/tp0", "decode/tp1")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_impossible_stage_is_no_reader_and_binds_none(stage: int) -> None:
    lease, reading = lent_to_one()
    reading.cohort = Cohort("decode", 1, 0, 2, stage)
    assert refused(reading.claim(0.0)) is (Reason.WRONG_COHORT if stage == 2 else None)
    assert list(lease.cohorts) == ([] if stage == 2 else ["decode"])


def test_how_a_reader_released_first_is_how_it_released() -> None:
    lease, one, two = lent_to_two()
    again = Reading(lease, 0, 2, pull="again")
    two.claim(0.0)
    one.release(1.0)
    again.release(2.0, Outcome.CANCELLED)
    assert {reader: x.outcome for reader, x in lease.discharged.items()} == {Reader("decode", 0): Outcome.COMPLETE}


def test_the_first_cause_of_a_revocation_stays_its_cause() -> None:
    lease = lend()
    Reading(lease).claim(0.0)
    lease.revoke(AT + 1.0, "withdraw")
    lease.revoke(AT + 2.0, "closed")
    assert (state_of(lease), lease.revoked_by) == (LeaseState.ENDING, "withdraw")


def test_what_ends_wakes_when_its_promise_is_over_or_when_that_takes_too_long() -> None:
    lease = lend(warn_s=2.0)
    Reading(lease).claim(0.0)
    assert lease.revoke(AT + 1.0).wake_at == AT + 2.0
    effects = lease.tick(AT + 2.0)
    assert (effects.is_overdue, effects.wake_at, lease.until) == (True, AT + 4.0, AT + 4.0)
