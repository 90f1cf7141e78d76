"""A second look at what was read: when it is made, what is believed of it, and what becomes of a difference."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from asynckv import BytesDiffer
from asynckv.config import LeaseConfig, PullConfig
from asynckv.core.attempts import RequestState
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.pull import Pull, PullRequest, PullState
from asynckv.core.types import Outcome, Reason, TransferId
from asynckv.core.wire import Claim, Packed, Release, Renew, decode_packet
from asynckv.errors import ConfigError
from asynckv.geometry import strides
from asynckv.geometry.look import NUM_PLACES
from tests import test_packed_copies
from tests.documented import Lines
from tests.engines import Bench, until
from tests.test_packed_copies import Pair
from tests.test_proof import Reading
from tests.world import BLOCK, Letter, Rank, World, make_layout, opened, ranks_of

ALL: Literal["all"] = "all"


def settings(second_look: float = 1.0, second_look_bytes: int | Literal["all"] = ALL, **more: Any) -> PullConfig:
    return PullConfig(second_look=second_look, second_look_bytes=second_look_bytes, **more)


def make(pull: PullConfig | None = None) -> tuple[World, Rank, Rank]:
    return opened(lease=LeaseConfig(lease_s=30.0, grant_s=10.0), pull=pull or settings())


def looks_of(decode: Rank) -> list[TransferId]:
    return [transfer_id for transfer_id, transfer in decode.reads.items() if transfer.ours]


def read(world: World, decode: Rank) -> None:
    """Let all reads land, up to the second look."""
    for _ in range(40):
        if world.letters:
            world.deliver()
        for transfer_id in [t for t, transfer in decode.reads.items() if not transfer.ours]:
            world.complete(decode, transfer_id)


def pulled(pull: PullConfig | None = None, **more: Any) -> tuple[World, Rank, Rank, Pull]:
    """Return a pull that has landed, and whose look runs, or waits for a place."""
    world, prefill, decode = make(pull)
    params, _ = world.lent(prefill, "r", [3, 5, 6], 10, written=True, **more)
    begun = world.pull(decode, "d", [5, 1, 2], params)
    read(world, decode)
    return world, prefill, decode, begun


def outcomes(world: World) -> list[Outcome]:
    """Return what the releases say that are under way."""
    messages = [message for letter in world.letters for message in decode_packet(letter.data).messages]
    return [message.outcome for message in messages if isinstance(message, Release)]


def is_clean(*decodes: Rank) -> bool:
    sides = [decode.core.decode for decode in decodes]
    return not any(side._places.num_in_use or side._to_look or side.transfers or side.pulls for side in sides)


def test_a_pull_completes_once_its_second_look_has_landed() -> None:
    world, _, decode, pull = pulled()
    assert pull.reason is None
    world.run()
    assert pull.reason is Reason.COMPLETE
    assert pull.measures.looked_bytes == pull.measures.num_bytes * 10 // 12
    assert decode.core.outbox.counters["bytes.looked_at"] == pull.measures.looked_bytes
    assert decode.core.outbox.counters["bytes.read"] == pull.measures.num_bytes
    assert is_clean(decode)
    world.check()


def test_bytes_that_change_between_the_two_reads_fail_the_pull_for_good() -> None:
    world, prefill, decode, pull = pulled()
    prefill.buffers.overwrite(3, 0x77)
    world.run()
    assert pull.reason is Reason.DIFFERS
    assert pull.outcome is Outcome.FAILED
    assert "part 'k' of layer 'layers.0', tokens 0 to 3" in pull.detail
    assert (pull.failed_in, pull.waited_for) == ("confirm", "")
    assert pull.blame.ranks == (pull.sources[0].name,)
    assert decode.core.outbox.counters["pulls.differs"] == 1
    assert is_clean(decode)


def test_a_token_that_the_owner_writes_next_is_no_difference() -> None:
    world, prefill, _, pull = pulled()
    for memory, start, length in prefill.buffers.block_spans(6)[: 2 * 4 * 4 * 2]:
        token = (start // (4 * 2 * 2)) % BLOCK
        if token >= 2:
            prefill.buffers.arrays[memory][start : start + length] ^= 0xFF
    world.run()
    assert pull.reason is Reason.COMPLETE


# -- the look is a part of the read, and so of its proof -----------------------------------------------------


def early() -> tuple[World, Rank, Rank, Pull, list[Letter]]:
    """Return a pull that reads what is not lent yet, and its claims."""
    world, prefill, decode = make()
    pull = world.pull(decode, "d", [5], world.params([prefill], "r", [3], 4))
    world.deliver()  # Hello
    world.deliver()  # Welcome: it claims, and reads
    claims, world.letters = world.letters, []
    return world, prefill, decode, pull, claims


def test_a_look_at_blocks_that_were_not_lent_yet_is_made_anew() -> None:
    """Whatever the early look has found: the blocks may have held anything before they were lent."""
    world, prefill, decode, pull, claims = early()
    world.complete_all()
    assert pull.state is PullState.CONFIRMING
    first = len(decode.looks)
    prefill.buffers.overwrite(3, 0x77)
    world.lend(prefill, pull.params)
    world.letters = claims
    world.run()
    assert pull.reason is Reason.COMPLETE
    assert (pull.measures.rereads, len(decode.looks)) == (1, 2 * first)
    assert decode.buffers.block(5) == b"\x77" * len(decode.buffers.block(5))


def test_a_difference_that_an_early_look_has_found_is_forgotten() -> None:
    world, prefill, decode, pull, claims = early()
    world.complete_reads(decode)
    prefill.buffers.overwrite(3, 0x77)
    world.complete_all()
    assert pull.sources[0].differs is not None
    world.lend(prefill, pull.params)
    world.letters = claims
    world.run()
    assert pull.reason is Reason.COMPLETE


def reading(**more: Any) -> Reading:
    return Reading(second_look=1.0, second_look_bytes=ALL, **more)


def landed(it: Reading) -> Reading:
    """Let a read land, whose look runs then, and will find a difference."""
    it.land()
    assert looks_of(it.decode)
    it.prefill.buffers.overwrite(0, 0x77)
    return it


def test_a_grant_that_covers_both_reads_lets_a_difference_be_told() -> None:
    it = landed(reading().granted(10.0))
    it.land()
    assert it.outcome is Reason.DIFFERS


@pytest.mark.parametrize("is_granted", [False, True])
def test_a_grant_that_ended_before_the_look_is_no_difference_until_a_later_one_covers_it(is_granted: bool) -> None:
    it = landed(reading().granted(1.0))
    (*_, (_, ask)) = it.wait(2.0)
    it.land()
    assert it.outcome is None
    if is_granted:
        it.grant(it.ask(), 5.0)
    else:
        it.refuse(ask if isinstance(ask, Claim) else it.ask(), Reason.EXPIRED)
        for each in it.asked():
            it.refuse(each, Reason.EXPIRED)
    assert it.outcome is (Reason.DIFFERS if is_granted else Reason.LEASE_LOST)


@pytest.mark.parametrize("is_granted", [False, True])
def test_the_last_claim_of_a_request_that_may_be_recalled_follows_its_look(is_granted: bool) -> None:
    it = reading(params={"recall": True}).granted(100.0)
    landed(it)
    assert it.asked() == []
    it.land()
    assert it.state is PullState.CONFIRMING
    last = it.ask()
    assert type(last) is Renew
    if is_granted:
        it.grant(last, 10.0)
    else:
        it.refuse(last, Reason.REVOKED)
    assert it.outcome is (Reason.DIFFERS if is_granted else Reason.LEASE_LOST)


def test_a_recall_while_a_look_runs_is_no_difference() -> None:
    world, prefill, decode, pull = pulled(recall=True)
    prefill.core.withdraw(pull.params, world.time(prefill))
    world.settle(prefill)  # its blocks are overwritten
    world.run()
    assert pull.reason is Reason.LEASE_LOST
    assert is_clean(decode)


# -- what follows a difference, and a look that fails ----------------------------------------------------------


@pytest.mark.parametrize("is_last", [True, False])
def test_a_difference_is_not_tried_again_and_releases_as_failed(is_last: bool) -> None:
    world, prefill, decode = make()
    params, lease = world.lent(prefill, "r", [3], written=True)
    wanted = PullRequest("d", [(0, [5])], params, is_last=is_last)
    request = decode.core.pull(wanted, 3, 30.0, world.time(decode))
    world.settle(decode)
    read(world, decode)
    prefill.buffers.overwrite(3, 0x77)
    world.complete_all()
    assert outcomes(world) == [Outcome.FAILED]
    world.run(10.0)
    assert (request.state, request.attempts) == (RequestState.OVER, 1)
    assert request.pull is not None
    assert request.pull.reason is Reason.DIFFERS
    assert lease.is_over
    assert is_clean(decode)


def test_a_look_that_fails_is_a_failed_read_and_is_tried_again() -> None:
    world, prefill, decode = make()
    params, _ = world.lent(prefill, "r", [3], written=True)
    request = decode.core.pull(PullRequest("d", [(0, [5])], params), 1, 30.0, world.time(decode))
    world.settle(decode)
    read(world, decode)
    (look,) = looks_of(decode)
    world.tell(decode, TransferEnded(look, Ending.FAILED, "it cannot be compared"))
    assert request.state is RequestState.PAUSING
    assert request.pull is not None
    assert (request.pull.reason, request.pull.is_returned) == (Reason.READ_FAILED, True)
    assert decode.core.decode._places.num_in_use == 0
    world.run(1.0)
    assert (request.attempts, request.pull.reason) == (2, Reason.COMPLETE)
    assert is_clean(decode)


def test_a_look_in_doubt_keeps_its_place_and_not_the_blocks() -> None:
    world, prefill, decode, pull = pulled()
    look, other = looks_of(decode)
    world.tell(decode, TransferEnded(look, Ending.IN_DOUBT, "unheard of"))
    assert (pull.reason, pull.is_returned, pull.was_held) == (Reason.READ_FAILED, True, False)
    assert decode.returned == [pull]
    assert decode.core.decode._places.num_in_use == 2
    assert decode.core.outbox.counters["transfers.in_doubt"] == 0
    prefill.buffers.overwrite(3, 0x77)
    for each in (look, other):
        world.complete(decode, each)
    world.run()
    assert pull.reason is Reason.READ_FAILED
    assert is_clean(decode)


def test_a_deadline_that_passes_while_a_look_runs_holds_no_blocks() -> None:
    world, _, decode, pull = pulled()
    world.live(31.0)
    assert (pull.reason, pull.is_returned) == (Reason.TIMEOUT, True)
    assert pull.detail == f"still reading from {pull.sources[0].where} when the deadline passed"
    assert decode.returned == [pull]
    assert decode.core.decode._places.num_in_use == 2
    world.run()
    assert is_clean(decode)


@pytest.mark.parametrize("how", ["cancel", "close", "forget", "peer lost"])
def test_whatever_ends_a_pull_while_its_look_runs_leaves_nothing_behind(how: str) -> None:
    world, prefill, decode, pull = pulled()
    look, _ = looks_of(decode)
    match how:
        case "cancel":
            world.cancel(decode, pull)
        case "close":
            world.close(decode)
        case "forget":
            world.forget(decode, prefill.address)
        case _:
            world.tell(decode, TransferEnded(look, Ending.FAILED, "the remote process is gone", True))
    world.deliver_all()
    assert pull.reason not in (None, Reason.COMPLETE, Reason.DIFFERS)
    assert pull.is_returned
    world.run(40.0)
    assert is_clean(decode)
    world.check()


def test_a_look_that_takes_too_many_pieces_fails_its_pull_before_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    world, prefill, decode, _ = pulled()
    world.run()
    params, _ = world.lent(prefill, "s", [3], 3, written=True)
    monkeypatch.setattr(strides, "MAX_RANGES", 0)
    pull = world.pull(decode, "e", [5], params)
    world.run()
    assert (pull.reason, pull.is_returned) == (Reason.UNPLANNABLE, True)
    assert pull.detail.startswith("the two memory orders share only pieces of")
    assert is_clean(decode)


# -- places ------------------------------------------------------------------------------------------------------


def hanging() -> tuple[World, list[Rank], Rank, list[Pull]]:
    """Return pulls of five engines whose looks are more than there are places."""
    world, prefill, decode = make()
    prefills = [prefill]
    prefills += [
        world.add(f"p{number}", make_layout(base=(3 + number) << 42), engine_id=f"prefill{number}")
        for number in range(4)
    ]
    pulls = []
    for number, rank in enumerate(each for each in prefills for _ in range(2 if each is not prefill else 4)):
        params, _ = world.lent(rank, f"r{number}", [number % 4], written=True)
        pulls.append(world.pull(decode, f"d{number}", [number], params))
        read(world, decode)
    return world, prefills, decode, pulls


def test_a_look_waits_for_a_place_and_no_peer_has_all_of_them() -> None:
    world, _, decode, pulls = hanging()
    side = decode.core.decode
    assert side._places.num_in_use == NUM_PLACES
    places = [look.place for look in decode.looks]
    assert sorted(places) == list(range(NUM_PLACES))
    assert len(side._to_look) == len(pulls) - NUM_PLACES
    assert all(pull.reason is None for pull in pulls)
    world.complete(decode, looks_of(decode)[0])
    assert (side._places.num_in_use, len(side._to_look)) == (NUM_PLACES, len(pulls) - NUM_PLACES - 1)
    world.run()
    assert {pull.reason for pull in pulls} == {Reason.COMPLETE}
    assert is_clean(decode)


def test_pulls_go_without_a_look_while_all_places_hang_and_nothing_leaks() -> None:
    world, _, decode, pulls = hanging()
    side, stuck = decode.core.decode, looks_of(decode)
    waits = [pull for pull in pulls if not any(source.running for source in pull.sources)]
    assert len(waits) == len(pulls) - NUM_PLACES
    for look in stuck:
        world.tell(decode, TransferEnded(look, Ending.IN_DOUBT, "unheard of"))
    world.live(1.0)
    assert {pull.reason for pull in waits} == {Reason.COMPLETE}
    assert decode.core.outbox.counters["looks.skipped"] == len(waits)
    assert all(pull.is_returned for pull in pulls)
    assert not side._to_look
    assert side._places.num_in_use == NUM_PLACES
    for look in stuck:
        world.complete(decode, look)
    world.run()
    assert is_clean(decode)
    params, _ = world.lent(world.ranks["prefill"], "again", [9], written=True)
    again = world.pull(decode, "again", [11], params)
    world.run()
    assert again.reason is Reason.COMPLETE


def test_a_peer_whose_looks_hang_is_not_looked_at_again_while_others_are() -> None:
    world, _, decode, pulls = hanging()
    side = decode.core.decode
    own = [pull for pull in pulls if pull.params.engine_id == "prefill"]
    for pull in own:
        for look in [*pull.sources[0].running]:
            world.tell(decode, TransferEnded(look, Ending.IN_DOUBT, "unheard of"))
    params, _ = world.lent(world.ranks["prefill"], "again", [9], written=True)
    again = world.pull(decode, "again", [0], params)
    read(world, decode)
    assert again.reason is Reason.COMPLETE
    assert side._to_look, "looks of other peers wait for those that run"
    assert (decode.core.outbox.counters["looks.skipped"], again.measures.looked_bytes) == (1, 0)


def test_a_pull_that_is_cancelled_while_its_look_waits_leaves_the_line() -> None:
    world, _, decode, pulls = hanging()
    waits = [pull for pull in pulls if pull.sources[0] in decode.core.decode._to_look]
    for pull in waits:
        world.cancel(decode, pull)
        assert (pull.reason, pull.is_returned) == (Reason.CANCELLED, True)
    assert not decode.core.decode._to_look
    world.run()
    assert is_clean(decode)


def test_all_is_looked_at_piece_by_piece_within_the_budget_of_a_peer() -> None:
    pull = settings(window_bytes=100, total_bytes=1000, max_post_bytes=64)
    world, _, decode, done = pulled(pull)
    posting = decode.core.decode.posting
    while looks_of(decode):
        running = [decode.core.decode.transfers[look].read.num_bytes for look in looks_of(decode)]
        assert posting.in_flight.num_bytes == sum(running)
        assert sum(running) <= 100 or len(running) == 1
        world.complete(decode, looks_of(decode)[0])
    world.run()
    assert done.reason is Reason.COMPLETE


# -- what is looked at -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_every_rank_is_looked_at_for_itself(bad: int | None) -> None:
    world, _, decode = make()
    prefills = ranks_of(world, "others", 2, base=50)
    params, leases = world.lent_by(prefills, "r", [3, 4], written=True)
    pull = world.pull(decode, "d", [5, 6], params)
    read(world, decode)
    assert len(looks_of(decode)) >= 2
    if bad is not None:
        prefills[bad].buffers.overwrite(4, 0x77)
    world.run()
    assert pull.reason is (Reason.COMPLETE if bad is None else Reason.DIFFERS)
    assert all(lease.is_over for lease in leases)
    if bad is not None:
        assert pull.blame.ranks == (pull.sources[bad].name,)
        assert re.search(rf"what others/tp{bad}@.*tokens 4 to 7: our block has \w+, and the lent one 7777", pull.detail)
    assert is_clean(decode)


def test_without_a_share_there_is_no_place_and_no_look() -> None:
    _, _, decode, pull = pulled(PullConfig())
    assert pull.reason is Reason.COMPLETE
    assert (decode.looks, decode.core.decode._places.number) == ([], 0)


def test_a_quarter_of_the_pulls_looks_twice() -> None:
    world, prefill, decode = make(settings(0.25))
    looks = 0
    for number in range(4000):
        params = world.params([prefill], f"r{number}", [number % 12], 4)
        pull = decode.core.announce(f"d{number}", params, "", 30.0, world.time(decode))
        looks += pull.looks
    assert 900 < looks < 1100


def test_a_full_prefix_hit_has_nothing_to_look_at() -> None:
    world, prefill, decode = make()
    params, _ = world.lent(prefill, "r", [3], written=True)
    pull = world.pull(decode, "d", [], params, first=4)
    world.run()
    assert (pull.reason, decode.looks) == (Reason.COMPLETE, [])


@pytest.mark.parametrize("overwritten", [False, True])
def test_a_read_of_a_packed_copy_is_compared_with_the_blocks_and_not_with_the_copy(
    overwritten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_before = test_packed_copies.config()
    monkeypatch.setattr(test_packed_copies, "config", lambda: replace(as_before, pull=settings()))
    pair = Pair()
    pair.until(Packed)
    pair.world.deliver()
    assert len(pair.reader.reads) == 4
    if overwritten:
        pair.owner.buffers.overwrite(1, 0x77)  # the copy was made before
    pair.world.run()
    assert pair.pull.measures.num_packed == 8
    assert pair.pull.reason is (Reason.DIFFERS if overwritten else Reason.COMPLETE)
    assert all(look.place >= 0 for look in pair.reader.looks)
    assert sum(look.num_bytes for look in pair.reader.looks) == pair.pull.measures.num_bytes


# -- what people hear of it --------------------------------------------------------------------------------------


async def test_a_difference_is_raised_and_logged_once_per_peer(sim: Bench, logs: Lines) -> None:
    async with sim.pair(pull=settings()) as (prefill, decode, group):
        decode.data.deferred = True
        for number in range(2):
            params, lent = prefill.lent(group, f"r{number}", [number], 10, written=True)
            task = asyncio.create_task(decode.engine.pull(f"d{number}", [(0, [number])], params))
            await until(lambda: decode.data.running)
            decode.data.finish()
            await until(lambda: decode.data.running)
            for array in prefill.arrays:
                array ^= 1
            decode.data.finish()
            with pytest.raises(BytesDiffer, match="lent, or our copy, has changed since it was read") as raised:
                await task
            assert (raised.value.is_retryable, raised.value.failed_in) == (False, "confirm")
            await lent.wait_released()
        counters = decode.engine.statistics().counters
    assert counters["pulls.differs"] == 2
    assert counters["bytes.looked_at"] > 0
    (told,) = logs.of("bytes_differ")
    assert (told["level"], told["request_id"]) == ("error", "d0")
    assert (told["layer"], told["part"], told["first_token"], told["num_tokens"]) == ("layers.0", "k", 0, 10)
    assert bytes.fromhex(told["read"]) == bytes(each ^ 1 for each in bytes.fromhex(told["seen"]))
    ended = [event for event in logs.of("pull_ended") if "request_id" in event]
    assert [event["cause"] for event in ended] == ["differs", "differs"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, -0.1, 1.5, 2, "some", True, None, [0.5]], ids=repr)
def test_a_share_that_is_none_is_refused_with_its_bounds(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"second_look is .*; it must be a finite number from 0 to 1"):
        PullConfig(second_look=value)


@pytest.mark.parametrize("value", [0, -1, 1 << 60, 0.5, 1e6, float("nan"), "some", "ALL", "", True, None], ids=repr)
def test_a_size_that_is_none_is_refused_with_its_bounds(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"second_look_bytes is .* integer from 1 to 2\^53, or 'all'"):
        PullConfig(second_look_bytes=value)


def test_the_settings_take_any_number_and_keep_a_plain_one() -> None:
    config = PullConfig(second_look=np.float32(0.5), second_look_bytes=np.int64(4096))  # type: ignore[arg-type]
    assert (type(config.second_look), config.second_look) == (float, 0.5)
    assert (type(config.second_look_bytes), config.second_look_bytes) == (int, 4096)
    assert PullConfig(second_look=1).second_look == 1.0
    assert PullConfig(second_look_bytes=ALL).second_look_bytes == "all"
