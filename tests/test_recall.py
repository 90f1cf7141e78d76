"""Requests that their owner may take back at once: what a reader confirms, and what an owner lets go of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import UNSET

from asynckv import (
    AsyncKVError,
    ConfigError,
    LeaseConfig,
    LeaseLost,
    LocalProtocolError,
    PrefillRanks,
    PullConfig,
    PullError,
    WrongThread,
)
from asynckv.core import notes
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.lease import Lease, LeaseState
from asynckv.core.ledger import Ledger
from asynckv.core.pull import Pull, PullRequest, PullState
from asynckv.core.types import Cohort, KVTransferParams, Reason
from asynckv.core.wire import Claim, Granted, Packed, Refused, Renew
from asynckv.embed import PrefillLedger
from asynckv.geometry.bounds import BlockRuns
from tests.engines import BLOCKS, Bench, Side, passing, until
from tests.offloads import SIZE, chain, layout_of, offloading
from tests.test_packed_copies import Owner, Pair
from tests.test_proof import Reading
from tests.world import Rank, World, alone, make_layout, opened, ranks_of

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
    world, prefill, decode = opened()
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


# -- readers ---------------------------------------------------------------------------------------------


def test_a_renewal_that_came_after_the_end_of_its_grant_claims_anew_once() -> None:
    it = Reading(params=RECALL).granted(1.0)
    _, renewal = it.wait(1.1)[0]
    it.land()
    it.asked()
    it.refuse(renewal, Reason.EXPIRED)
    claim = it.ask()
    assert type(claim) is Claim
    it.refuse(claim, Reason.EXPIRED)
    assert it.outcome is Reason.LEASE_LOST


def test_a_refusal_before_anything_was_granted_is_the_reason_of_the_failure() -> None:
    it = Reading(params=RECALL)
    it.refuse(it.ask(), Reason.WITHDRAWN)
    it.land()
    assert it.outcome is Reason.WITHDRAWN


def test_blocks_are_held_after_a_recall_as_long_as_something_may_write_them() -> None:
    it = Reading(params=RECALL, drain_s=0.5).granted(100.0)
    *_, (_, ask) = it.wait(50.0)
    it.refuse(ask, Reason.REVOKED)
    assert (it.state, it.outcome) == (PullState.DRAINING, None)
    it.wait(51.0)
    assert (it.outcome, it.decode.returned) == (Reason.LEASE_LOST, [])
    it.land()
    assert it.decode.returned == [it.pull]


def test_bytes_that_were_confirmed_stay_proven_whatever_becomes_of_their_owner() -> None:
    world, (a, b), decode, pull, _ = several()
    say(world, a)
    world.forget(decode, a.address)
    world.deliver_all()
    assert pull.reason is Reason.COMPLETE
    assert b.core.prefill.leases == {}


def test_bytes_that_were_not_confirmed_fail_with_their_owner_however_long_its_grant() -> None:
    world, (a, _), decode, pull, _ = several()
    world.forget(decode, a.address)
    world.deliver_all()
    assert pull.reason is Reason.PEER_LOST


def test_an_owner_that_was_restarted_refuses_the_last_claim_of_a_read() -> None:
    it = Reading(params=RECALL).granted(100.0)
    it.land()
    it.refuse(it.ask(), Reason.RESTARTED)
    assert it.outcome is Reason.RESTARTED


def several() -> tuple[World, list[Rank], Rank, Pull, KVTransferParams]:
    """Return two owners and a reader of both, who has read all and asks each for the last time."""
    world = World(reuse=True)
    owners = ranks_of(world, "prefill", 2)
    decode = world.add("d", make_layout(base=1 << 50), engine_id="decode")
    params, _ = world.lent_by(owners, "r", [3], written=True, recall=True)
    pull = world.pull(decode, "d", [5], params)
    world.deliver_all()
    assert [len(lease.grants) for owner in owners for lease in owner.core.prefill.leases.values()] == [1, 1]
    world.complete_all()
    assert (pull.state, len(world.letters)) == (PullState.CONFIRMING, 2)
    return world, owners, decode, pull, params


def say(world: World, owner: Rank) -> None:
    """Let one owner answer what it was asked."""
    while letters := [x for x in world.letters if owner in (x.receiver, x.sender)]:
        world.deliver(world.letters.index(letters[0]))


@pytest.mark.parametrize("first", [0, 1])
def test_a_read_that_one_owner_confirmed_and_another_recalled_is_a_failed_pull(first: int) -> None:
    world, owners, decode, pull, params = several()
    say(world, owners[first])
    assert [source.proven for source in pull.sources] == [i == first for i in range(2)]
    world.withdraw(owners[1 - first], params)
    world.deliver_all()
    assert pull.reason is Reason.LEASE_LOST
    assert decode.returned == [pull]
    world.check()


def test_a_recall_after_the_last_confirmation_takes_nothing_from_the_reader() -> None:
    world, owners, _, pull, params = several()
    for owner in owners:
        say(world, owner)
    assert pull.reason is Reason.COMPLETE
    for owner in owners:
        world.withdraw(owner, params)
    world.run()
    assert [len(owner.leases_ended) for owner in owners] == [1, 1]
    world.check()


def test_a_reader_older_than_the_mark_is_refused_and_told_to_upgrade() -> None:
    """Its params decode without the mark, so its claim has the digest of a request that is never recalled."""
    world, prefill, decode = opened()
    params, lease = world.lent(prefill, "r", [3], written=True, recall=True)
    pull = world.pull(decode, "d", [5], msgspec.structs.replace(params, recall=UNSET))
    world.run()
    assert pull.reason is Reason.BLOCKS_DIFFER
    assert "older than 0.5.0" in pull.detail
    assert "upgrade the reader" in pull.detail
    assert not lease.grants
    plain, lease = world.lent(prefill, "s", [4], written=True)
    marked = world.pull(decode, "e", [6], msgspec.structs.replace(plain, recall=True))
    world.run()
    assert marked.reason is Reason.BLOCKS_DIFFER
    assert "older" not in marked.detail


@pytest.mark.parametrize("state", ["announced", "queued", "reading"])
def test_a_recall_ends_an_attempt_in_every_state_that_it_finds_it_in(state: str) -> None:
    world, prefill, decode = opened(pull=PullConfig(total_requests=1, window_requests=1))
    params, lease = world.lent(prefill, "r", [3], written=True, recall=True)
    if state == "queued":
        other, _ = world.lent(prefill, "first", [4], written=True)
        first = world.pull(decode, "first", [6], other)
        world.deliver_all()
    pull = world.announce(decode, "d", params, 30.0) if state == "announced" else world.pull(decode, "d", [5], params)
    world.deliver_all()
    assert (pull.state.value, len(lease.grants)) == (state, 1)
    world.withdraw(prefill, params)
    assert lease.is_over
    while pull.reason is None and world.now < 10.0:
        world.live(0.5)
    world.run(1.0)
    assert pull.reason is (Reason.REVOKED if state == "announced" else Reason.LEASE_LOST)
    assert state != "queued" or first.reason is Reason.COMPLETE
    assert decode.core.is_idle


class Retried:
    """A request that its owner may recall, with three retries, whose first attempt reads."""

    def __init__(self) -> None:
        self.world, self.prefill, self.decode = opened()
        self.params, _ = self.world.lent(self.prefill, "r", [3], written=True, recall=True)
        wanted = PullRequest("d", [(0, [5])], self.params)
        self.request = self.decode.core.pull(wanted, 3, 20.0, self.world.time(self.decode))
        self.world.settle(self.decode)
        self.world.deliver_all()

    def run(self) -> tuple[int, Reason | None]:
        for _ in range(40):
            self.world.advance(0.5)
            self.world.run()
        assert self.request.pull is not None
        assert self.decode.core.is_idle
        return self.request.attempts, self.request.pull.reason


def test_what_was_recalled_is_not_tried_again() -> None:
    it = Retried()
    it.world.withdraw(it.prefill, it.params)
    assert it.run() == (1, Reason.LEASE_LOST)


def test_what_was_recalled_before_its_pull_began_is_not_tried() -> None:
    it = Retried()
    it.run()
    params, _ = it.world.lent(it.prefill, "s", [4], written=True, recall=True)
    it.world.withdraw(it.prefill, params)
    later = PullRequest("e", [(0, [6])], params)
    it.request = it.decode.core.pull(later, 3, 20.0, it.world.time(it.decode))
    it.world.settle(it.decode)
    assert it.run() == (1, Reason.REVOKED)


def test_what_has_failed_by_itself_is_tried_again() -> None:
    it = Retried()
    (transfer,) = it.decode.reads
    it.world.tell(it.decode, TransferEnded(transfer, Ending.FAILED, "broken", True))
    assert it.run() == (2, Reason.COMPLETE)


# -- owners ----------------------------------------------------------------------------------------------


def test_params_carry_the_mark_only_where_it_was_asked_for() -> None:
    world = World()
    prefill = world.add("p", make_layout())
    plain, marked = [world.params([prefill], "r", [3], 4, **more) for more in ({}, RECALL)]
    assert (plain.recall, marked.recall) == (UNSET, True)
    assert b"recall" not in msgspec.json.encode(plain)
    ledger = PrefillLedger(PrefillRanks("p", [prefill.endpoint]))
    assert ledger.lend("r", [(0, [3])], 4, recall=True)["recall"] is True
    assert "recall" not in ledger.lend("s", [(0, [3])], 4)
    wrong: tuple[Any, ...] = (None, 1, "yes", [])
    for bad in wrong:
        with pytest.raises(ConfigError, match="recall is"):
            ledger.lend("t", [(0, [3])], 4, recall=bad)
    assert ledger.get("t") is None


def test_a_request_that_was_recalled_before_its_lend_is_never_lent_and_its_readers_are_refused() -> None:
    world, prefill, decode = opened()
    params = world.params([prefill], "r", [3], 4, recall=True)
    pull = world.pull(decode, "d", [5], params)
    world.deliver_all()
    world.withdraw(prefill, params)
    world.withdraw(prefill, params)
    world.run()
    assert pull.reason is Reason.WITHDRAWN
    with pytest.raises(LocalProtocolError, match="withdrawn"):
        world.lend(prefill, params)
    assert not prefill.core.ledger.num_held("lent")


@pytest.mark.parametrize("end", ["released", "expired", "revoked"])
def test_a_recall_after_the_end_changes_nothing(end: str) -> None:
    world, prefill, decode = opened()
    params, lease = world.lent(prefill, "r", [3], written=True, recall=True)
    if end == "released":
        world.pull(decode, "d", [5], params)
        world.run()
    elif end == "expired":
        world.advance(1000.0)
    else:
        world.withdraw(prefill, params)
    told = str(lease.state), list(lease.history)
    assert told[0] == end
    world.withdraw(prefill, params)
    assert (str(lease.state), lease.history) == told
    with pytest.raises(LocalProtocolError, match="before"):
        world.lend(prefill, params)


def test_grants_of_a_request_without_the_mark_outlive_its_withdrawal() -> None:
    world, prefill, decode = opened()
    params, lease = world.lent(prefill, "r", [3], written=True)
    pull = world.pull(decode, "d", [5], params)
    world.deliver_all()
    world.withdraw(prefill, params)
    assert (lease.state, lease.revoked_by, len(lease.grants)) == (LeaseState.ENDING, "withdraw", 1)
    world.run()
    assert pull.reason is Reason.COMPLETE


def claimed(lease: Lease, owner: Owner, params: KVTransferParams) -> None:
    claim = Claim(params.key, params.request_id, Cohort("d"), "pull", 1, lease.digest, 600.0)
    (answer,) = owner.says(claim)
    assert isinstance(answer, Granted)


def test_a_slot_whose_copy_is_being_made_as_its_request_is_recalled_is_used_again_once_that_has_ended() -> None:
    owner = Owner(num_slots=1)
    marked, other = [
        owner.world.params([owner.rank], name, blocks, 8, written=True, recall=True)
        for name, blocks in (("m", [4, 5]), ("o", [6, 7]))
    ]
    leases = [owner.lend(params) for params in (marked, other)]
    for lease, params in zip(leases, (marked, other), strict=True):
        claimed(lease, owner, params)
    assert owner.pack(2, params=marked) == []
    (slot,) = owner.rank.making
    owner.world.withdraw(owner.rank, marked)
    assert leases[0].is_over
    assert list(owner.rank.making) == [slot], "nothing interrupts a copy"
    (refused,) = owner.says(Renew(marked.key, "pull", 3, 10.0))
    assert isinstance(refused, Refused)
    assert refused.reason is Reason.REVOKED
    assert owner.pack(4, params=other) == []
    assert len(owner.rank.making) == 1, "the next copy waits for the slot"
    assert owner.made(slot) == []
    assert list(owner.rank.making) == [slot]
    assert owner.made(slot) == [Packed(other.key, "pull", 4, slot)]


@pytest.mark.parametrize("is_made", [False, True])
def test_the_reader_of_a_packed_copy_of_a_recalled_request_is_refused(is_made: bool) -> None:
    """The copy may hold anything: the owner has written its blocks while it was made."""
    pair = Pair()
    pair.ends_well()
    pair.world.auto_pack = False
    params = pair.world.params([pair.owner], "m", [5, 6], 8, written=True, recall=True)
    lease, pull = pair.world.lend(pair.owner, params), pair.start("m", params)
    pair.world.deliver_all()
    assert pair.owner.making
    pair.world.withdraw(pair.owner, params)
    assert lease.is_over
    for block in (5, 6):
        pair.owner.buffers.overwrite(block, 0xEE)
    for _ in range(20):
        for slot in list(pair.owner.making) if is_made else ():
            pair.world.finish_copy(pair.owner, slot)
        pair.world.settle(pair.owner)
        pair.world.advance(0.2)
        pair.world.run()
    for slot in list(pair.owner.making):
        pair.world.finish_copy(pair.owner, slot)
    pair.world.run(1.0)
    assert pull.reason is Reason.LEASE_LOST
    assert pair.is_clean()


QUICK = LeaseConfig(lease_s=20.0, grant_s=10.0)


async def granted(
    prefill: Side, decode: Side, group: PrefillRanks, most: int = 2
) -> tuple[Any, Any, asyncio.Task[Any]]:
    """Lend a request that may be recalled to a reader that has a grant, and whose bytes do not land."""
    decode.data.deferred, ids = True, list(range(1, most + 1))
    params, lent = prefill.lent(group, "r", ids, written=True, recall=True)
    task = asyncio.create_task(decode.engine.pull("d", [(0, ids)], params, timeout_s=3000.0, retries=3))
    await until(lambda: lent._lease.grants and decode.data.running)
    return params, lent, task


WAYS: dict[str, tuple[str, Callable[[Side, Any, Any], Any]]] = {
    "Engine.withdraw": ("recall", lambda side, params, lent: side.engine.withdraw(params)),
    "Engine.recall": ("recall", lambda side, params, lent: side.engine.recall([params])),
    "LentRequest.withdraw": ("recall", lambda side, params, lent: lent.withdraw()),
    "reclaim": ("no_room", lambda side, params, lent: side.engine.reclaim(1000)),
    "aclose": ("closed", lambda side, params, lent: side.engine.aclose(5.0)),
    "suspend": ("suspended", lambda side, params, lent: side.engine.suspend()),
}


@pytest.mark.parametrize("way", WAYS)
async def test_only_a_recall_drops_grants_and_other_ends_keep_them_as_for_every_request(sim: Bench, way: str) -> None:
    by, revoke = WAYS[way]
    async with sim.pair(lease=QUICK) as (prefill, decode, group):
        params, lent, task = await granted(prefill, decode, group, BLOCKS - 2)
        lease = lent._lease
        if way == "reclaim":  # no sooner than after one grant, and from an engine that holds most
            prefill.lent(group, "unclaimed", [0], written=True)
            while sim.clock.now() - lease.lent_at < 1.5 * QUICK.grant_s:
                sim.clock.advance(0.1)
                await asyncio.sleep(0)
            assert lease.grants
        ending = revoke(prefill, params, lent)
        task_of_ending = asyncio.create_task(ending) if asyncio.iscoroutine(ending) else None
        if task_of_ending is not None:
            await until(lambda: lease.state is not LeaseState.LENT)
        assert (lent.is_over, lease.revoked_by) == (by == "recall", by)
        assert (notes.Recalled(1) in [entry for _, entry in lease.history]) is (by == "recall")
        decode.data.finish()
        with pytest.raises(PullError) as caught:
            await passing(sim, task)
        if task_of_ending is not None:
            await passing(sim, task_of_ending)
        else:  # else a peer that is lost may be met again
            assert (caught.value.reason, caught.value.is_retryable, caught.value.attempts) == ("lease_lost", False, 1)


# -- blocks that others hold -----------------------------------------------------------------------------


async def test_a_recall_returns_the_blocks_that_others_hold_and_only_these(sim: Bench) -> None:
    async with sim.pair(lease=QUICK) as (prefill, decode, group):
        params, _, task = await granted(prefill, decode, group)
        prefill.lent(group, "prefix", [1, 9], written=True)
        prefill.lent(group, "also", [2, 1, 10], written=True, recall=True)
        prefill.lent(group, "apart", [11], written=True)
        found = prefill.engine.recall([params])
        assert [(hold.request_id, hold.reason, hold.blocks) for hold in found] == [
            ("prefix", "lent", {0: (1,)}),
            ("also", "lent", {0: (2, 1)}),
        ]
        assert found == prefill.engine.recall([params]), "asked again it tells the same"
        never = group.make_params("never", [(0, [10, 11])], 32, recall=True)
        assert [(x.request_id, x.blocks) for x in prefill.engine.recall([never])] == [
            ("also", {0: (10,)}),
            ("apart", {0: (11,)}),
        ]
        assert [x.request_id for x in prefill.engine.recall(iter([params, never]))] == ["prefix", "also", "apart"]
        assert prefill.engine.recall([]) == ()
        decode.data.finish()
        with pytest.raises(LeaseLost):
            await passing(sim, task)
        for hold in prefill.engine.requests():
            decode.engine.cancel(hold.request_id)


async def test_a_recall_after_the_end_of_an_engine_returns_the_promises_that_the_end_cut_short(sim: Bench) -> None:
    async with sim.pair(lease=QUICK) as (prefill, decode, group):
        decode.data.deferred = True
        plain, lent = prefill.lent(group, "plain", [1, 2], written=True)
        marked, _ = prefill.lent(group, "marked", [2, 3], written=True, recall=True)
        task = asyncio.create_task(decode.engine.pull("d", [(0, [6, 7])], plain, timeout_s=3000.0))
        await until(lambda: lent._lease.grants)
        await passing(sim, asyncio.create_task(prefill.engine.aclose(0.0)))
        (hold,) = prefill.engine.recall([marked])
        assert (hold.request_id, hold.blocks, hold.left_s > 0) == ("plain", {0: (2,)}, True)
        decode.data.finish()
        with pytest.raises(PullError):
            await passing(sim, task)


async def test_blocks_that_the_memory_does_not_have_are_held_by_no_request(sim: Bench) -> None:
    async with sim.pair(lease=QUICK) as (prefill, _, group):
        prefill.lent(group, "r", [BLOCKS - 1], written=True)
        beyond = group.make_params("b", [(0, [BLOCKS, 1_000_000])], 32, recall=True)
        groups = group.make_params("g", [(0, [1]), (0, [BLOCKS - 1]), (0, [BLOCKS - 1])], 16, recall=True)
        assert prefill.engine.recall([beyond, groups]) == ()
        ragged = group.make_params("c", [(0, list(range(BLOCKS - 1, BLOCKS + 9)))], 160, recall=True)
        assert [hold.blocks for hold in prefill.engine.recall([ragged])] == [{0: (BLOCKS - 1,)}]


@pytest.mark.parametrize("bad", ["unmarked", "another engine's", "malformed"])
async def test_requests_beside_a_bad_one_are_not_recalled(sim: Bench, bad: str) -> None:
    async with sim.pair(lease=QUICK) as (prefill, _, group):
        good, lent = prefill.lent(group, "r", [1], written=True, recall=True)
        wrong = {
            "unmarked": group.make_params("u", [(0, [2])], 16),
            "another engine's": good | {"engine_id": "other"},
            "malformed": good | {"recall": 1},
        }[bad]
        for requests in ([good, wrong], [wrong, good]):
            with pytest.raises(AsyncKVError, match="|".join(("recall=True", "'other'", "malformed"))):
                prefill.engine.recall(requests)
        assert not lent.is_over
        prefill.engine.recall([good])
        assert lent.is_over


def test_a_recall_on_an_engine_that_was_not_started_is_refused() -> None:
    with pytest.raises(WrongThread):
        Bench(False).side("prefill", 1).engine.recall([])


async def test_a_recall_returns_blocks_that_an_offload_stores() -> None:
    async with offloading(layout_of()) as (rank, offload):
        group = PrefillRanks("worker", [rank.engine.endpoint])
        params = group.make_params("r", [(0, [1, 2, 3])], 3 * SIZE, written=True, recall=True)
        lent = rank.engine.lend(params)
        storing = await rank.begun(offload.store("s", [(0, [2, 3, 4, 5])], chain("p", 4)))
        (hold,) = rank.engine.recall([params])
        assert (hold.request_id, hold.reason, hold.blocks) == ("s", "storing", {0: (2, 3)})
        assert lent.is_over
        rank.copies.finish()
        await storing
        assert rank.engine.recall([params]) == ()


def runs(*some: tuple[int, int]) -> BlockRuns:
    return BlockRuns(0, some)


def shared(ledger: Ledger, *requests: tuple[BlockRuns, ...]) -> list[tuple[str, dict[int, list[int]]]]:
    return [(hold.holder, {g: ids.tolist() for g, ids in hold.blocks.items()}) for hold in ledger.shared(requests)]


def held(num_blocks: list[int], pools: list[int], **holders: dict[int, list[int]]) -> Ledger:
    ledger = Ledger(num_blocks, pools)
    for name, blocks in holders.items():
        ledger.hold(name, "lent", name, {g: np.array(ids, np.int64) for g, ids in blocks.items()}, 0.0)
    return ledger


def test_a_block_of_groups_that_share_their_pages_is_shared_whichever_group_holds_it() -> None:
    """Hybrid layouts: an id of groups 0 and 1 means the same memory, one of group 2 means another."""
    ledger = held([8, 8, 8], [0, 0, 2], a={0: [1, 2], 2: [5]}, b={1: [3, 4], 2: [6]}, c={2: [1, 3]})
    assert shared(ledger, (runs((3, 1)), runs(), runs())) == [("b", {1: [3]})]
    assert shared(ledger, (runs(), runs((2, 2)), runs((6, 1)))) == [("a", {0: [2]}), ("b", {1: [3], 2: [6]})]
    assert shared(ledger, (runs(), runs(), runs((1, 2)))) == [("c", {2: [1]})]
    assert shared(ledger, (runs(), runs(), runs((2, 1)))) == shared(ledger) == []
    assert shared(ledger, (runs((1, 1)), runs(), runs()), (runs(), runs(), runs((3, 1)))) == [
        ("a", {0: [1]}),
        ("c", {2: [3]}),
    ]


def test_blocks_that_are_written_are_shared_too() -> None:
    ledger = Ledger([8])
    ledger.hold("w", "writing", "w", {0: np.array([2, 3], np.int64)}, 0.0)
    assert shared(ledger, (runs((3, 4)),)) == [("w", {0: [3]})]


def test_lists_of_any_length_and_ids_beyond_the_memory_are_harmless() -> None:
    ledger = held([8], [0], a={0: [6, 7]})
    beyond = (1 << 31) - 1
    assert shared(ledger, (runs((beyond, 1), (8, beyond), (7, beyond), (-1, beyond)),)) == [("a", {0: [7]})]
    assert shared(ledger, (runs((-1, 1)),)) == shared(ledger, ()) == shared(ledger, (runs((0, 1)), runs((6, 2)))) == []
    many = tuple((i % 6, 1) for i in range(100_000))
    assert shared(ledger, (runs(*many),)) == []
    assert shared(ledger, (runs(*many, (0, 8)),)) == [("a", {0: [6, 7]})]


def test_a_withdrawn_request_is_not_lent_after_the_memory_was_registered_anew() -> None:
    """Its key may be of an epoch that this rank had not reached, because another rank was suspended before."""
    world, prefill = alone()
    params = world.params([prefill], "r", [3], 4, written=True, recall=True)
    key = msgspec.structs.replace(params.key, memory_epoch=1)
    prefill.core.withdraw(msgspec.structs.replace(params, key=key), world.time(prefill))
    assert prefill.core.prefill.memory_epoch == 1, "the next epoch is a later one, and refuses this key"


@pytest.mark.parametrize("other", [{"recall": True}, {"groups": [[0, [[8, 2]]]]}, {"num_tokens": 1}])
async def test_params_that_are_not_those_of_the_loan_recall_nothing(sim: Bench, other: dict[str, Any]) -> None:
    """A mark that was added later says nothing to a reader, which goes by the params that it was given."""
    async with sim.pair(lease=QUICK) as (prefill, _, group):
        marked = "recall" not in other
        params = group.make_params("r", [(0, [3, 4])], 2, written=True, recall=marked)
        good = group.make_params("good", [(0, [5])], 1, written=True, recall=True)
        loans = [prefill.engine.lend(each) for each in (params, good)]
        with pytest.raises(LocalProtocolError, match="was lent with other params"):
            prefill.engine.recall([good, {**params, **other}])
        assert [loan.is_over for loan in loans] == [False, False]
        assert prefill.engine.recall([good, params] if marked else [good]) == ()
