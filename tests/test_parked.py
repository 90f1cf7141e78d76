"""What a prefill rank remembers of requests that it does not lend yet, or lent once: for how long, and how much."""

from __future__ import annotations

import math

import msgspec
import pytest

from asynckv.config import LeaseConfig
from asynckv.core import prefill
from asynckv.core.types import KVTransferParams, Outcome, Reason
from asynckv.core.wire import Ack, NotYet, Refused, Release
from asynckv.errors import PlanRefused
from tests.test_prefill import READER, claim, prefill_rank, say
from tests.world import Rank, World, make_layout

PARKED = LeaseConfig(lease_s=10.0, grant_s=4.0, parked_s=5.0, max_parked=8)


def release(params: KVTransferParams, pull_id: str = "pull") -> Release:
    return Release(params.key, params.request_id, READER, pull_id, Outcome.COMPLETE)


def many(world: World, rank: Rank, number: int) -> list[KVTransferParams]:
    return [world.params([rank], f"r{i}", [3], 4) for i in range(number)]


def test_nothing_is_kept_of_a_request_whose_messages_were_parked_for_too_long() -> None:
    world, rank = prefill_rank(PARKED)
    for params in many(world, rank, 4):
        assert isinstance(say(rank, claim(params), 0.0)[0], NotYet)
    side = rank.core.prefill
    side.tick(4.9)
    assert (len(side._parked), side.num_parked) == (4, 4)
    side.tick(5.0)
    assert (len(side._parked), side.num_parked, len(side._parked_order), side.next_at) == (0, 0, 0, math.inf)


def test_a_release_that_takes_the_place_of_a_claim_has_all_of_its_own_time() -> None:
    """It was acknowledged, so nobody repeats it: if it were forgotten with the claim the lease would have to expire."""
    world, rank = prefill_rank(PARKED)
    [params] = many(world, rank, 1)
    say(rank, claim(params), 0.0)
    assert isinstance(say(rank, release(params), 3.0)[0], Ack)
    rank.core.prefill.tick(5.0)
    assert rank.core.prefill.num_parked == 1
    world.now = 7.9
    assert world.lend(rank, params).is_over


def test_what_is_remembered_of_what_was_parked_is_bounded_however_much_is_lent_meanwhile() -> None:
    world, rank = prefill_rank(PARKED)
    for params in many(world, rank, 300):
        say(rank, release(params), 0.0)
        assert world.lend(rank, params).is_over
    assert len(rank.core.prefill._parked_order) <= 8 * PARKED.max_parked + 1


def test_of_releases_that_were_given_up_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MAX_FORGOTTEN", 3)
    world, rank = prefill_rank(LeaseConfig(lease_s=10.0, grant_s=4.0, parked_s=5.0))
    made = many(world, rank, 5)
    for at, params in enumerate(made):
        say(rank, release(params), 0.1 * at)
    rank.core.prefill.tick(6.0)
    world.now = 6.0
    refused = [[(x.what, x.reason) for x in world.lend(rank, params).refused] for params in made]
    assert refused == [[], [], *[[("release", "parked_too_long")]] * 3]


def test_who_asks_late_hears_how_the_request_ended_though_the_memory_is_another_by_now() -> None:
    world, rank = prefill_rank(PARKED)
    ended, never = many(world, rank, 2)
    world.lend(rank, ended)
    say(rank, release(ended), 1.0)
    rank.core.prefill.memory_epoch += 1
    reasons = []
    for params in (ended, never):
        (answer,) = say(rank, claim(params), 2.0)
        assert isinstance(answer, Refused)
        reasons.append(answer.reason)
    assert reasons == [Reason.CONSUMED, Reason.STALE_MEMORY]


def test_nobody_is_woken_for_a_lease_that_is_over() -> None:
    """Its time is far away, and a lease that waits for it is kept."""
    world, rank = prefill_rank(PARKED)
    [params] = many(world, rank, 1)
    lease = world.lend(rank, params)
    assert rank.core.timers.next_at == 4.0  # to see whether a grant has run out
    say(rank, release(params), 1.0)
    assert (lease.is_over, lease.scheduled_at, rank.core.timers.next_at) == (True, math.inf, math.inf)


@pytest.mark.parametrize("blocks", [[3, 5], list(range(3, 9)), [3, 4, 6]])
def test_a_placeholder_that_is_named_as_a_block_is_refused_however_few_there_are(blocks: list[int]) -> None:
    """The engine's placeholder holds no KV: what it is lent as would be read as zeros, or as anything."""
    layout = make_layout()
    [group] = layout.groups
    world = World()
    rank = world.add("p", msgspec.structs.replace(layout, groups=(msgspec.structs.replace(group, null_block=5),)))
    params = world.params([rank], "r", blocks, 4 * len(blocks))
    if 5 in blocks:
        with pytest.raises(PlanRefused, match="names block 5, which is its placeholder"):
            world.lend(rank, params)
    else:
        world.lend(rank, params)
