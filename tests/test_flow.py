"""Who takes room from whom, at the door of a rank: what is in the way of others, and what is not."""

from __future__ import annotations

from asynckv.config import EngineConfig, LeaseConfig, PullConfig
from asynckv.core.peer import PeerState
from asynckv.core.pull import Pull, PullState
from asynckv.core.types import Reason, TransferId
from tests.test_admission import ask, world_of
from tests.world import Rank, World, make_layout, reason


def posted_at(decode: Rank, prefill: str) -> list[TransferId]:
    return [t for t, read in decode.reads.items() if read.agent_name == f"agent-{prefill}"]


def state(pull: Pull) -> PullState:
    """Read anew: mypy would remember what it was before."""
    return pull.state


def test_who_hears_in_the_queue_that_its_request_is_not_lent_yet_makes_way_for_the_next() -> None:
    world, (prefill,), decode = world_of(total_requests=1, window_requests=1)
    first = ask(world, prefill, decode, 1)
    early, late = ask(world, prefill, decode, 2, lend=False), ask(world, prefill, decode, 3)
    world.deliver_all()
    assert [state(p) for p in (first, early, late)] == [PullState.READING, PullState.QUEUED, PullState.QUEUED]
    admission = decode.core.decode.admission
    assert [admission.waits(p.pull_id) for p in (early, late)] == [False, True]
    world.complete(decode, next(iter(decode.reads)))
    assert [state(p) for p in (early, late)] == [PullState.QUEUED, PullState.READING]
    world.run()
    assert reason(late) is Reason.COMPLETE
    world.lend(prefill, early.params)
    world.run()
    assert reason(early) is Reason.COMPLETE
    world.check()


def test_who_has_its_bytes_from_a_silent_rank_and_reads_from_another_counts_as_before() -> None:
    """A rank that falls silent takes only those out of the budget who wait for it."""
    config = EngineConfig(
        engine_id="x",
        lease=LeaseConfig(lease_s=60.0, grant_s=20.0),
        pull=PullConfig(total_requests=1, window_requests=1, max_post_bytes=64),
    )
    world = World(config)
    first, second = (world.add(f"p{r}", make_layout(r, 2, base=(r + 1) << 40), engine_id="prefill") for r in (0, 1))
    other = world.add("q", make_layout(base=9 << 40), engine_id="other")
    decode = world.add("d", make_layout(base=30 << 40), engine_id="decode")
    params = world.params([first, second], "r", [3, 4, 5, 6], 16, written=True)
    for rank in (first, second):
        world.lend(rank, params)
    pull = world.pull(decode, "d-r", [1, 2, 3, 4], params)
    world.deliver_all()
    while posted_at(decode, "p0"):
        world.complete(decode, posted_at(decode, "p0")[0])
        world.deliver_all()
    assert [source.proven for source in pull.sources] == [True, False]
    del world.ranks["p0"]
    for _ in range(5):
        # The other one lives, and something arrives from it now and then.
        world.advance(decode.core.config.pull.suspect_s / 2)
        world.complete(decode, posted_at(decode, "p1")[0])
        world.deliver_all()
    states = {p.tp_rank: p.state for p in decode.core.decode.peers.by_place.values() if p.engine_id == "prefill"}
    assert states == {0: PeerState.SUSPECT, 1: PeerState.READY}
    assert pull.state is PullState.READING
    next_params = world.params([other], "r2", [3], 4, written=True)
    world.lend(other, next_params)
    waiting = world.pull(decode, "d-r2", [6], next_params)
    world.deliver_all()
    assert state(waiting) is PullState.QUEUED, "the only place is taken"
    while reason(pull) is None:
        world.complete(decode, posted_at(decode, "p1")[0])
        world.deliver_all()
    assert state(waiting) is PullState.READING
