"""What a lease owes to whom: what was promised stands, and what is said in another's name changes nothing."""

from __future__ import annotations

import pytest

from asynckv.core.lease import LeaseState, Reader
from asynckv.core.types import Cohort, Outcome, Reason
from tests.test_lease import AT, Reading, granted, lend, refused, state_of


def test_a_shorter_grant_takes_nothing_back_of_a_longer_one() -> None:
    """Its reader may go by the longer one: blocks that return before that is over would be read with others' bytes."""
    lease = lend()
    reading = Reading(lease)
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
def test_a_stage_that_there_cannot_be_is_no_reader_and_binds_nobody(stage: int) -> None:
    lease = lend()
    reading = Reading(lease)
    reading.cohort = Cohort("decode", 1, 0, 2, stage)
    assert refused(reading.claim(0.0)) is (Reason.WRONG_COHORT if stage == 2 else None)
    assert list(lease.cohorts) == ([] if stage == 2 else ["decode"])


def test_how_a_reader_released_first_is_how_it_released() -> None:
    lease = lend()
    one, two = Reading(lease, 0, 2), Reading(lease, 1, 2)
    again = Reading(lease, 0, 2, pull="again")
    two.claim(0.0)
    one.release(1.0)
    again.release(2.0, Outcome.CANCELLED)
    assert {reader: x.outcome for reader, x in lease.discharged.items()} == {Reader("decode", 0): Outcome.COMPLETE}


def test_who_wanted_it_back_first_is_who_wanted_it_back() -> None:
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
