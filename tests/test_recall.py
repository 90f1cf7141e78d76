"""Requests that their owner may take back at once: what a reader confirms, and what an owner lets go of."""

from __future__ import annotations

import pytest

from asynckv.core import notes
from asynckv.core.lease import LeaseState
from asynckv.core.pull import PullState
from asynckv.core.types import Reason
from asynckv.core.wire import Claim, Renew
from tests.test_proof import Reading
from tests.world import World, make_layout

RECALL = {"recall": True}


def test_a_long_grant_alone_proves_no_read_of_a_request_that_may_be_recalled() -> None:
    it = Reading(params=RECALL).granted(100.0)
    it.wait(1.0)
    it.land()
    assert it.state is PullState.CONFIRMING
    last = it.ask()
    assert type(last) is Renew
    it.grant(last, 10.0)
    assert it.outcome is Reason.COMPLETE


def test_a_read_is_confirmed_at_once_though_its_first_claim_has_no_answer_yet() -> None:
    it = Reading(params=RECALL)
    first = it.ask()
    it.land()
    last = it.ask()
    assert type(last) is Claim
    it.grant(first, 100.0)
    assert it.outcome is None
    it.grant(last, 100.0)
    assert it.outcome is Reason.COMPLETE


def test_a_renewal_that_is_under_way_when_the_read_ends_proves_nothing() -> None:
    it = Reading(params=RECALL).granted(10.0)
    *_, (_, renewal) = it.wait(5.0)
    it.land()
    last = it.ask()
    it.grant(renewal, 10.0)
    assert it.outcome is None
    again = it.wait(it.world.now + 0.6)
    assert again, "it is repeated like a claim, and does not wait for a renewal's time"
    it.grant(last, 10.0)
    assert it.outcome is Reason.COMPLETE


def test_an_old_grant_that_is_repeated_after_an_expired_renewal_proves_nothing() -> None:
    """The nonce that counts is the newest that was granted: `refused` raises `granted_nonce` beyond it."""
    it = Reading(params=RECALL)
    first = it.ask()
    it.grant(first, 10.0)
    *_, (_, renewal) = it.wait(5.0)
    it.land()
    it.ask()
    it.refuse(renewal, Reason.EXPIRED)
    it.grant(first, 10.0)
    assert it.outcome is None
    for ask in it.asked():
        it.grant(ask, 10.0)
    assert it.outcome is Reason.COMPLETE


@pytest.mark.parametrize("lands", [False, True])
def test_a_refusal_ends_the_attempt_though_a_grant_runs(lands: bool) -> None:
    it = Reading(params=RECALL).granted(100.0)
    *_, (_, ask) = it.wait(50.0)
    if lands:
        it.land()
        ask = it.ask()
    it.refuse(ask, Reason.REVOKED)
    it.land()
    assert it.outcome is Reason.LEASE_LOST


def test_withdrawing_ends_the_lease_in_the_same_call_whatever_was_granted() -> None:
    world = World()
    prefill = world.add("p", make_layout(), engine_id="prefill")
    decode = world.add("d", make_layout(base=1 << 41), engine_id="decode")
    params, lease = world.lent(prefill, "r", [3], written=True, recall=True)
    pull = world.pull(decode, "d", [5], params)
    world.deliver()
    world.deliver()
    world.deliver()
    assert lease.grants
    prefill.core.withdraw(params, world.time(prefill))
    assert lease.state is LeaseState.REVOKED
    assert lease.revoked_by == "recall"
    assert notes.Recalled(1) in [entry for _, entry in lease.history]
    assert not prefill.core.ledger.num_held("lent")
    world.run()
    assert pull.reason is Reason.LEASE_LOST
