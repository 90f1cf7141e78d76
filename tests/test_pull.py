"""One pull, as people and other machines see it: what it says that it went through, and what it waits for."""

from __future__ import annotations

import pytest
from msgspec import structs

from asynckv.account.waits import waits
from asynckv.config import EngineConfig, PullConfig
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.lease import LeaseState
from asynckv.core.pull import Pull, PullState
from asynckv.core.source import RemoteRank, Role, Source
from asynckv.core.types import Address, KVTransferParams, PullId, Reason
from asynckv.observe.setup import configure_logging
from tests.documented import Lines
from tests.engines import Bench
from tests.world import Rank, World, make_layout, opened, reason


def said(pull: Pull) -> list[str]:
    """Its history, by words alone."""
    return [str(text) for _, text in pull.history]


NAME = "prefill/tp0@prefill-"


def test_a_pull_says_what_it_went_through() -> None:
    world, prefill, decode = opened()
    params, _ = world.lent(prefill, "r", [3], written=True)
    pull = world.pull(decode, "d", [9], params)
    world.run()
    assert said(pull) == [
        "announced",
        "connecting",
        "queued",
        "reading",
        f"{NAME} granted 10 s",
        "confirming",
        "notifying",
        f"release {NAME}: acknowledged",
        "released",
    ]


def test_a_pull_that_came_before_its_request_says_so_and_that_it_reads_again() -> None:
    world, prefill, decode = opened()
    params = world.params([prefill], "r", [3], 4)
    pull = world.pull(decode, "d", [9], params)
    world.deliver_all()
    assert said(pull) == ["announced", "connecting", "queued", "reading", f"{NAME} not yet"]
    world.lend(prefill, params)
    world.run()
    assert said(pull)[5:] == [
        f"{NAME} granted 10 s",
        "confirming",
        "queued",
        f"{NAME} read before it was lent, reading again",
        "reading",
        "confirming",
        "notifying",
        f"release {NAME}: acknowledged",
        "released",
    ]
    assert pull.measures.rereads == 1


def test_a_pull_that_waits_and_then_reads_nothing_repeats_its_release_in_time() -> None:
    """Its block is before the sliding window. Its timer was set for a renewal, long after the release is due again."""
    world = World(EngineConfig(engine_id="x", pull=PullConfig(total_requests=1, window_requests=1)))
    layout = make_layout()
    layout = structs.replace(layout, groups=(structs.replace(layout.groups[0], window=4),))
    prefill, decode = world.add("prefill", layout), world.add("decode", layout, seed=1)
    every = [
        world.params([prefill], name, blocks, 16, written=True)
        for name, blocks in (("a", [1, 2, 3, 4]), ("b", [5, 6, 7, 8]))
    ]
    for params in every:
        world.lend(prefill, params)
    world.pull(decode, "first", [1, 2, 3, 4], every[0])
    pull = world.pull(decode, "second", [5, None, None, None], every[1])
    world.deliver_all()
    world.advance(1)
    world.deliver_all()
    assert pull.state is PullState.QUEUED
    world.complete_all()
    assert (pull.state, pull.measures.num_bytes) == (PullState.NOTIFYING, 0)
    world.letters.clear()
    world.advance(2 * pull.limits.release_retry_s)
    world.deliver_all()
    assert pull.is_over


async def test_at_debug_every_step_of_a_pull_and_of_its_lease_is_logged_once_and_in_order(sim: Bench) -> None:
    logs = Lines()
    configure_logging("debug", stream=logs.stream)
    async with sim.pair() as (prefill, decode, group):
        params, lent = prefill.lent(group, "r", [1], written=True)
        await decode.engine.pull("d", [(0, [6])], params)
        await lent.wait_released()
    steps = {kind: [each["to"] for each in logs.of(f"{kind}_transition")] for kind in ("pull", "lease")}
    notes = [each for each in steps["pull"] if isinstance(each, dict)]
    assert [(each["note"], each.get("how", "")) for each in notes] == [("promised", ""), ("settled", "acknowledged")]
    assert [each for each in steps["pull"] if each not in notes] == [
        "announced",
        "connecting",
        "queued",
        "reading",
        "confirming",
        "notifying",
        "released",
    ]
    names = [each if isinstance(each, str) else each["note"] for each in steps["lease"]]
    assert names == ["lent", "granted", "released", "released"]


def test_how_late_an_end_was_found_is_that_of_the_latest_read_that_landed() -> None:
    world, prefill, decode = opened(pull=PullConfig(max_post_descriptors=1))
    params, _ = world.lent(prefill, "r", [3], written=True)
    pull = world.pull(decode, "d", [9], params)
    world.deliver_all()
    one, two, three, four = decode.reads
    world.advance(5.0)
    for transfer, ending, seconds in (
        (one, Ending.DONE, 0.25),
        (two, Ending.DONE, 0.125),
        (three, Ending.IN_DOUBT, 4.0),
        (three, Ending.FAILED, 2.0),
        (four, Ending.DONE, 0.5),
    ):
        decode.core.decode.ended(TransferEnded(transfer, ending), seconds, world.time(decode))
        world.settle(decode)
    assert (pull.measures.detect_s, pull.reason) == (0.5, Reason.READ_FAILED)


def test_what_holds_an_outcome_back_is_bounded_and_says_until_when() -> None:
    """Nobody acknowledges the release, and a transfer may still write: each has a time of its own."""
    world, prefill, decode = opened(pull=PullConfig(release_timeout_s=20.0, held_s=5.0, gone_s=600.0))
    params, _ = world.lent(prefill, "r", [3], written=True)
    pull = world.pull(decode, "d", [9], params)
    world.deliver_all()
    (transfer,) = decode.reads
    world.live(8.0, 2.0)  # the pull has taken longer than `held_s` when it ends
    world.tell(decode, TransferEnded(transfer, Ending.IN_DOUBT, "trouble"))
    del world.ranks[prefill.name]
    world.letters.clear()
    ended = world.now

    def left() -> tuple[str, float | None]:
        (status,) = decode.inspect.requests(world.time(decode))
        return status.state, status.left_s and round(status.left_s, 6)

    assert left() == ("notifying", 20.0)
    world.advance(4.5)
    assert not pull.is_retired
    world.advance(0.6)
    assert (pull.is_retired, round(world.now - ended, 6)) == (True, 5.1)
    assert left() == ("notifying", 14.9)
    world.advance(15.0)
    assert left() == ("quarantined", None)
    assert f"release {NAME}: given up, the lease will expire" in said(pull)
    decode.reads[transfer].land()
    world.tell(decode, TransferEnded(transfer, Ending.DONE))
    assert pull.is_over


def test_answers_count_to_the_last_eight_claims() -> None:
    rank = RemoteRank(0, 0, (Address("tcp://a"), "start"), "a/tp0", True)
    source = Source(PullId("p"), rank, Role.READ)
    for nonce in range(1, 12):
        source.claimed(nonce, 0.1, float(nonce))
    assert list(source.nonces) == [4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("first_s", [0.25, 0.001])
def test_claims_and_releases_that_are_not_answered_are_repeated_ever_less_often(first_s: float) -> None:
    """The longest pause is 64 times the first, 2 s between claims, and 5 s between releases."""
    world, prefill, decode = opened(pull=PullConfig(claim_retry_s=first_s, release_retry_s=first_s))
    pull = world.pull(decode, "d", [9], world.params([prefill], "r", [3], 4))
    source, pauses = pull.sources[0], list[tuple[float, float]]()
    for number in range(10):
        source.claims = source.releases = number
        source.claimed(number, pull.limits.claim_retry_s, 100.0)
        pull.make_release(source, 100.0)
        pauses.append((source.claim_at - 100.0, source.release_at - 100.0))
    doubled = [first_s * min(2**n, 64) for n in range(10)]
    assert pauses == [pytest.approx((min(pause, 2), min(pause, 5))) for pause in doubled]


def test_while_one_rank_is_read_another_that_has_not_lent_is_named_beside_it() -> None:
    world = World()
    first, second = (world.add(f"p{r}", make_layout(r, 2, base=(r + 1) << 40), engine_id="prefill") for r in (0, 1))
    decode = world.add("d", make_layout(base=30 << 40), engine_id="decode")
    params = world.params([first, second], "r", [3], 4)
    world.lend(first, params)
    pull = world.pull(decode, "d-r", [1], params, timeout=3.0)
    world.deliver_all()
    running = [read.agent_name for read in decode.reads.values()]
    words = waits(pull, world.time(decode))
    assert running == ["agent-p0", "agent-p1"]
    assert words.startswith("still reading from prefill/tp0@p0-0 (world://p0), prefill/tp1@p1-1 (world://p1), and not ")
    assert words.endswith(" lent yet by prefill/tp1@p1-1 (world://p1)")
    for transfer, read in list(decode.reads.items()):
        if read.agent_name == "agent-p1":
            world.complete(decode, transfer)
    world.advance(4.0)
    assert pull.reason is Reason.TIMEOUT
    words = "still reading from prefill/tp0@p0-0 (world://p0), and not lent yet by prefill/tp1@p1-1 ("
    assert pull.detail.startswith(words)


def _announced(world: World, decode: Rank, params: KVTransferParams) -> Pull:
    pull = world.announce(decode, "d", params, 3600.0)
    world.run()
    return pull


def test_what_is_only_announced_is_let_go_within_a_lease_when_its_embedder_stands_still() -> None:
    world, prefill, decode = opened()
    params, lease = world.lent(prefill, "r", [3], written=True)
    pull = _announced(world, decode, params)
    decode.core.decode.alive_at = world.time(decode)
    for _ in range(30):
        world.run(1.0)
    assert pull.reason is Reason.STANDSTILL
    assert "call take_finished" in pull.detail
    assert lease.is_over
    again = world.pull(decode, "d", [9], params)
    world.run()
    assert (again.reason, again.detail) == (Reason.STANDSTILL, pull.detail)
    assert again.is_over


def test_what_is_announced_is_renewed_while_its_embedder_lives() -> None:
    world, prefill, decode = opened()
    params, lease = world.lent(prefill, "r", [3], written=True)
    pull = _announced(world, decode, params)
    for _ in range(120):
        decode.core.decode.alive_at = world.time(decode)
        world.run(1.0)
    assert (pull.reason, lease.is_over) == (None, False)
    world.pull(decode, "d", [9], params)
    world.run()
    assert (reason(pull), lease.state) == (Reason.COMPLETE, LeaseState.RELEASED)


def test_what_is_being_read_is_renewed_however_long_its_embedder_stands_still() -> None:
    world, prefill, decode = opened()
    params, lease = world.lent(prefill, "r", [3], written=True)
    pull = world.pull(decode, "d", [9], params, timeout=600.0)
    world.deliver_all()
    decode.core.decode.alive_at = world.time(decode)
    world.live(120.0, 1.0)
    assert (pull.reason, lease.is_over) == (None, False)
    world.run()
    assert pull.reason is Reason.COMPLETE
