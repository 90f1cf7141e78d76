"""What the catalogue decides, by example: `tests/test_offload_machine.py` has the properties."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from asynckv.core.events import Ending
from asynckv.errors import LocalProtocolError
from asynckv.offload.catalogue import Catalogue
from asynckv.offload.entry import Entry, EntryState
from asynckv.offload.job import Item, Job, JobEnded, JobOutcome, JobReturned, Move, MoveKind
from asynckv.offload.keys import StoredGroup, block_hashes
from asynckv.offload.tier import SLICE, Place, Tier
from tests.lab.offload_audit import audit, entries_of

KIB = 1024
FULL = StoredGroup(name="full", block_size=16, record_bytes=KIB)
WINDOW = StoredGroup(name="window", block_size=32, record_bytes=3 * KIB, window=40)
STATE = StoredGroup(name="state", block_size=64, record_bytes=5 * KIB, is_state=True)


def prompt(n: int, name: str = "p") -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(n)]


def carry_out(
    catalogue: Catalogue, how: Callable[[Move], Ending | None] = lambda move: Ending.DONE, now: float = 0.0
) -> list[Move]:
    """Carry out whatever moves come; returns them. `how` says how they end, None that they run on."""
    done = []
    while moves := catalogue.moves(now):
        for move in moves:
            done.append(move)
            if (ending := how(move)) is not None:
                catalogue.ended(move.move_id, ending)
        assert audit(catalogue) == []
    return done


def only(kind: MoveKind, ending: Ending | None) -> Callable[[Move], Ending | None]:
    return lambda move: ending if move.kind is kind else Ending.DONE


def outcomes(catalogue: Catalogue) -> dict[str, JobOutcome]:
    return {told.job_id: told.outcome for told in catalogue.news() if isinstance(told, JobEnded)}


def put(catalogue: Catalogue, *args: Any, **more: Any) -> None:
    """Store blocks, and carry it out."""
    catalogue.store(*args, **more)
    carry_out(catalogue)


def holding(keys: list[bytes], host_bytes: int) -> Catalogue:
    """Return a catalogue that has stored a prompt."""
    catalogue = Catalogue([FULL], 16, host_bytes)
    put(catalogue, "a", keys)
    return catalogue


def last_end(catalogue: Catalogue) -> JobEnded:
    told = catalogue.news()[-1]
    assert isinstance(told, JobEnded)
    return told


def with_file(blocks: int = 100, stored: int = 10, **more: Any) -> Catalogue:
    """A catalogue whose file tier alone has a prompt."""
    catalogue = Catalogue([FULL], 16, blocks * KIB, 100 * KIB, **more)
    for i in range(0, stored, blocks):
        put(catalogue, f"warm {i}", prompt(stored), positions=[range(i, min(stored, i + blocks))])
        catalogue.evict(place=Place.HOST)
    catalogue.news()
    return catalogue


def test_what_is_stored_is_found_and_loaded() -> None:
    catalogue = Catalogue([FULL, WINDOW, STATE], 16, 1 << 20)
    catalogue.store("a", prompt(12))
    assert catalogue.lookup(prompt(12)).would_wait
    carry_out(catalogue)
    found = catalogue.lookup([*prompt(12), b"more"])
    assert (found.tokens, found.ready_tokens, found.would_wait) == (192, 192, False)
    catalogue.load("b", prompt(12), found.tokens)
    moved = carry_out(catalogue)[0]
    assert [piece.positions for piece in moved.pieces] == [tuple(range(12)), (4, 5), (2,)]
    assert outcomes(catalogue) == {"a": JobOutcome.DONE, "b": JobOutcome.DONE}
    assert catalogue.statistics()["host_blocks"] == 15


def test_a_prefix_ends_where_all_groups_can_go_on() -> None:
    catalogue = Catalogue([FULL, STATE], 16, 1 << 20)
    put(catalogue, "a", prompt(12), positions=[range(12), [0, 1]])
    found = catalogue.lookup(prompt(12))
    assert (found.tokens, [group.tokens for group in found.groups]) == (128, [192, 128])


def test_a_chain_is_evicted_from_its_end() -> None:
    for policy in ("lru", "s3-fifo"):
        catalogue = Catalogue([FULL], 16, 10 * KIB, policy=policy)
        put(catalogue, "a", prompt(10))
        put(catalogue, "b", prompt(4, "q"))
        assert catalogue.lookup(prompt(10)).tokens == 6 * 16
        assert catalogue.lookup(prompt(4, "q")).tokens == 4 * 16


def test_a_store_does_not_evict_the_prefix_that_it_goes_on_from() -> None:
    catalogue = holding(prompt(8), 10 * KIB)
    put(catalogue, "b", prompt(20))
    told = last_end(catalogue)
    assert (told.outcome, told.blocks, told.known, told.missing) == (JobOutcome.DONE, 2, 8, (tuple(range(10, 20)),))
    assert catalogue.lookup(prompt(20)).tokens == 160


def test_a_load_of_the_end_of_a_chain_uses_its_start_as_well() -> None:
    catalogue = Catalogue([FULL], 16, 20 * KIB)
    catalogue.store("a", prompt(10))
    put(catalogue, "b", prompt(10, "q"))
    catalogue.load("c", prompt(10), positions=[range(5, 10)])
    carry_out(catalogue)
    catalogue.store("d", prompt(10, "r"))
    assert catalogue.lookup(prompt(10)).tokens == 160
    assert catalogue.lookup(prompt(10, "q")).tokens == 0


def test_a_store_of_known_blocks_uses_them() -> None:
    catalogue = Catalogue([FULL], 16, 20 * KIB)
    for name, prefix in (("a", "p"), ("b", "q"), ("c", "p")):
        put(catalogue, name, prompt(10, prefix))
    catalogue.store("d", prompt(10, "r"))
    assert catalogue.lookup(prompt(10)).tokens == 160
    assert catalogue.lookup(prompt(10, "q")).tokens == 0


def test_a_block_in_the_middle_that_is_gone_ends_the_prefix() -> None:
    catalogue = holding(prompt(10), 1 << 20)
    catalogue.evict([b"p5"])
    assert catalogue.lookup(prompt(10)).tokens == 80
    catalogue.load("b", prompt(10))
    told = last_end(catalogue)
    assert (told.outcome, told.missing) == (JobOutcome.MISSING, ((5,),))
    catalogue.store("c", prompt(10))
    assert [piece.positions for move in carry_out(catalogue) for piece in move.pieces] == [(5,)]
    assert catalogue.lookup(prompt(10)).tokens == 160


@pytest.mark.parametrize("policy", ["lru", "s3-fifo"])
def test_of_a_prompt_that_is_too_large_the_beginning_is_stored_that_can_be_used(policy: str) -> None:
    catalogue = Catalogue([FULL, WINDOW, STATE], 16, 200 * KIB, policy=policy)
    for number in range(3):
        name, all_of, evicted = f"p{number}", [range(100), range(50), range(25)], catalogue.host.evicted
        catalogue.store(name, prompt(100, name), positions=all_of, is_prefix=True)  # 375 KiB
        assert sum(move.num_bytes for move in carry_out(catalogue)) > 120 * KIB
        [told] = [each for each in catalogue.news() if isinstance(each, JobEnded)]
        missed = sum(map(len, told.missing))
        assert told.outcome is JobOutcome.DONE
        kept = sum(map(len, catalogue.host.index))
        assert f"for {missed} of 175 blocks: it keeps {kept}, of which {175 - missed} are being written" in told.cause
        tokens = catalogue.lookup(prompt(100, name)).tokens
        assert 9 * 64 <= tokens < 100 * 16
        for group, index in zip(catalogue.groups, catalogue.host.index, strict=True):
            mine = set(block_hashes(prompt(100, name), group.block_size, 16))
            assert len(mine & index.keys()) == tokens // group.block_size
        assert catalogue.host.evicted - evicted <= told.blocks


@pytest.mark.parametrize("policy", ["lru", "s3-fifo"])
def test_a_store_that_one_group_has_no_room_for_evicts_nothing_of_others(policy: str) -> None:
    state = StoredGroup(name="state", block_size=16, record_bytes=2 * KIB, is_state=True)
    catalogue = Catalogue([FULL, state], 16, 256 * KIB, policy=policy)
    for i in range(16):
        put(catalogue, f"a{i}", prompt(14, f"a{i}"), positions=[range(14), [13]])
    for i in range(16):
        catalogue.pin(f"lease{i}", prompt(14, f"a{i}"), positions=[[0], [13]])
    before = [dict(index) for index in catalogue.host.index]
    for blocks in (20, 200):
        catalogue.store(f"b{blocks}", prompt(blocks, "b"), positions=[range(blocks), [blocks - 1]], is_prefix=True)
        assert not carry_out(catalogue)
    assert catalogue.host.evicted == 0
    assert catalogue.host.index == before
    catalogue.unpin("lease3")
    put(catalogue, "c", prompt(100, "c"), positions=[range(100), [99]], is_prefix=True)
    assert catalogue.lookup(prompt(100, "c")).tokens == 1600


@pytest.mark.parametrize("seed", range(6))
def test_no_store_evicts_for_nothing(seed: int) -> None:
    rng = random.Random(seed)
    groups = [FULL, WINDOW, STATE]
    catalogue = Catalogue(groups, 16, rng.randrange(130, 400) * KIB, policy=rng.choice(["lru", "s3-fifo"]))
    for i in range(50):
        blocks, name, evicted = rng.randrange(4, 150), f"p{rng.randrange(12)}", catalogue.host.evicted
        ends = [blocks * 16 // group.block_size for group in groups]
        positions = [range(max(0, end - 2) if end < blocks and rng.random() < 0.5 else 0, end) for end in ends]
        catalogue.store(f"s{i}", prompt(blocks, name), positions=positions, is_prefix=True)
        assert f"s{i}" in catalogue.jobs or catalogue.host.evicted == evicted
        carry_out(catalogue)
        if rng.random() < 0.5 and not catalogue.unpin(pin := f"pin{rng.randrange(3)}"):
            catalogue.pin(pin, prompt(rng.randrange(1, 150), f"p{rng.randrange(12)}"))


def test_of_a_prompt_that_is_too_large_no_unusable_block_is_stored() -> None:
    catalogue = Catalogue([FULL, STATE], 16, 80 * KIB)
    put(catalogue, "small", prompt(4, "q"), positions=[range(4), [0]])
    catalogue.pin("pin", prompt(4, "q"))
    catalogue.store("large", prompt(100), positions=[range(100), [24]], is_prefix=True)
    assert not carry_out(catalogue)
    assert catalogue.lookup(prompt(4, "q")).tokens == 64
    put(catalogue, "less", prompt(100), positions=[range(100), [2, 24]], is_prefix=True)
    assert catalogue.lookup(prompt(100)).tokens == 3 * 64


def test_two_that_store_the_same_store_it_once() -> None:
    catalogue = Catalogue([FULL], 16, 1 << 20)
    catalogue.store("a", prompt(5))
    catalogue.store("b", prompt(8))
    moves = carry_out(catalogue)
    assert [(move.job_id, move.num_blocks) for move in moves] == [("a", 5), ("b", 3)]
    assert {told.job_id: told.blocks for told in catalogue.news() if isinstance(told, JobEnded)} == {"a": 5, "b": 8}


def test_a_job_that_waits_for_a_store_that_is_cancelled_stores_it() -> None:
    catalogue = Catalogue([FULL], 16, 1 << 20)
    catalogue.store("a", prompt(5))
    catalogue.store("b", prompt(5))
    catalogue.load("c", prompt(5))
    assert catalogue.cancel("a")
    assert [(m.job_id, m.kind) for m in carry_out(catalogue)] == [("b", MoveKind.STORE), ("c", MoveKind.LOAD)]
    assert outcomes(catalogue) == {"a": JobOutcome.CANCELLED, "b": JobOutcome.DONE, "c": JobOutcome.DONE}
    assert not catalogue.cancel("a")


def test_a_job_that_waits_for_a_store_that_fails_fails() -> None:
    catalogue = Catalogue([FULL], 16, 1 << 20)
    catalogue.store("a", prompt(5))
    catalogue.store("b", prompt(5))
    catalogue.load("c", prompt(5))
    carry_out(catalogue, only(MoveKind.STORE, Ending.FAILED))
    assert outcomes(catalogue) == dict.fromkeys("abc", JobOutcome.FAILED)
    assert catalogue.lookup(prompt(5)).tokens == 0


def test_a_job_that_waits_for_two_that_fail_one_with_the_other_fails_once() -> None:
    catalogue = Catalogue([FULL], 16, 1 << 20)
    catalogue.store("a", prompt(2))
    [move] = catalogue.moves(0.0)
    catalogue.store("b", prompt(4))  # waits for a, and has to store two more
    catalogue.load("c", prompt(4))  # waits for both
    catalogue.ended(move.move_id, Ending.FAILED)
    told = {told.job_id: told for told in catalogue.news() if isinstance(told, JobEnded)}
    assert [told[name].outcome for name in "abc"] == [JobOutcome.FAILED, JobOutcome.FAILED, JobOutcome.MISSING]
    assert told["b"].missing == told["c"].missing == ((0, 1, 2, 3),)
    assert audit(catalogue) == []


def test_a_cancelled_job_ends_when_what_was_posted_has_ended() -> None:
    catalogue = Catalogue([FULL], 16, 1 << 20)
    catalogue.store("a", prompt(5))
    [move] = catalogue.moves(0.0)
    catalogue.cancel("a")
    assert catalogue.news() == []
    catalogue.ended(move.move_id, Ending.DONE)
    assert outcomes(catalogue) == {"a": JobOutcome.CANCELLED}
    assert catalogue.lookup(prompt(5)).tokens == 80  # it was stored all the same


def test_what_is_in_doubt_keeps_its_slots_and_its_callers_blocks() -> None:
    catalogue = Catalogue([FULL], 16, 10 * KIB)
    catalogue.store("a", prompt(5))
    [move] = catalogue.moves(0.0)
    catalogue.ended(move.move_id, Ending.IN_DOUBT, "slow")
    [told] = catalogue.news()
    assert isinstance(told, JobEnded)
    assert (told.outcome, told.is_held, told.cause) == (JobOutcome.FAILED, True, "slow")
    catalogue.store("b", prompt(10))
    used = {slot for move in carry_out(catalogue) for piece in move.pieces for slot in piece.host_slots}
    assert len(used) == 5
    assert not used & set(move.pieces[0].host_slots)
    catalogue.news()
    catalogue.ended(move.move_id, Ending.DONE)
    assert catalogue.news() == [JobReturned("a")]
    catalogue.store("c", prompt(10))
    assert sum(move.num_blocks for move in carry_out(catalogue)) == 5


def test_a_lookup_of_1000_keys_takes_less_than_a_millisecond() -> None:
    """The best of some: what else the machine does is not ours."""
    catalogue = Catalogue([FULL, WINDOW, STATE], 16, 1 << 24)
    put(catalogue, "a", prompt(1000), positions=[range(1000), range(500), range(250)])
    keys, took = prompt(1000), []
    for _ in range(20):
        began = time.perf_counter()
        found = catalogue.lookup(keys)
        took.append(time.perf_counter() - began)
        assert found.tokens == 16_000
    assert min(took) < 1e-3


def looked_at(catalogue: Catalogue) -> list[Entry]:
    """Have noted which entries of the host tier are asked whether they are busy."""
    found: list[Entry] = []

    def look(entry: Entry) -> bool:
        found.append(entry)
        return Tier._is_busy(catalogue.host, entry)

    catalogue.host._is_busy = look  # type: ignore[method-assign]
    return found


def test_a_tier_that_is_pinned_is_not_searched_again_and_again() -> None:
    catalogue = holding(prompt(200), 200 * KIB)
    catalogue.pin("lease", prompt(200))
    looks = looked_at(catalogue)
    for i in range(10):
        catalogue.store(f"b{i}", prompt(3, f"b{i}"))
    assert looks == []  # nothing is idle, which is known
    catalogue.store("b", prompt(3, "b"))
    assert (catalogue.jobs, {name: len(held) for name, held in catalogue.pins.items()}) == ({}, {"lease": 200})


@pytest.mark.parametrize("policy", ["lru", "s3-fifo"])
def test_what_is_pinned_is_not_passed_again_by_each_store(policy: str) -> None:
    catalogue = Catalogue([FULL], 16, 201 * KIB, policy=policy)
    put(catalogue, "a", prompt(200))
    catalogue.pin("lease", prompt(200))
    looks = looked_at(catalogue)
    for i in range(100):  # all through one slot
        catalogue.store(f"b{i}", prompt(1, f"b{i}"))
        assert sum(move.num_blocks for move in carry_out(catalogue)) == 1
        catalogue.pin("nothing", prompt(1, "c"))
        catalogue.unpin("nothing")
    assert len(looks) <= 200 + 100
    assert audit(catalogue) == []
    catalogue.unpin("lease")
    catalogue.store("all", prompt(201, "all"))
    assert len(catalogue.jobs["all"].todo) == 201


def test_what_is_pinned_stays() -> None:
    for policy in ("lru", "s3-fifo"):
        catalogue = Catalogue([FULL], 16, 10 * KIB, policy=policy)
        put(catalogue, "a", prompt(5))
        [piece] = catalogue.pin("lease", prompt(5))
        assert (piece.positions, piece.host_slots) == (tuple(range(5)), tuple(range(5)))
        for i in range(5):
            put(catalogue, f"b{i}", prompt(10, f"other{i}"))
        assert catalogue.lookup(prompt(5)).ready_tokens == 80
        assert catalogue.unpin("lease")
        assert not catalogue.unpin("lease")
        for i in range(3):
            put(catalogue, f"c{i}", prompt(10, f"more{i}"))
        assert catalogue.lookup(prompt(5)).tokens == 0


def test_a_load_of_many_blocks_passes_through_few_slots() -> None:
    catalogue = with_file(blocks=4, stored=50)
    assert catalogue.lookup(prompt(50)).groups[0].in_file == 50
    catalogue.load("a", prompt(50))
    moves = carry_out(catalogue)
    loaded = [p for move in moves if move.kind is MoveKind.LOAD for piece in move.pieces for p in piece.positions]
    assert loaded == list(range(50))
    assert outcomes(catalogue) == {"a": JobOutcome.DONE}


def test_promotions_do_not_evict_what_their_job_needs() -> None:
    """Half is in host memory and half in files, and host memory is full of other blocks that are held."""
    catalogue = with_file(blocks=16, stored=16)
    catalogue.store("a", prompt(8))
    put(catalogue, "b", prompt(6, "held"))
    catalogue.pin("lease", prompt(6, "held"))
    catalogue.load("c", prompt(16))
    moves = carry_out(catalogue)
    assert sum(move.num_blocks for move in moves if move.kind is MoveKind.PROMOTION) == 8
    assert outcomes(catalogue) == {"a": JobOutcome.DONE, "b": JobOutcome.DONE, "c": JobOutcome.DONE}


def test_loads_that_wait_for_room_are_not_all_looked_at_in_every_turn() -> None:
    catalogue = with_file(blocks=8, stored=16, budgets={MoveKind.PROMOTION: KIB}, move_bytes=KIB)
    looks, look = 0, catalogue._cutting._next_absent

    def count(job: Job, full: set[int]) -> list[Item]:
        nonlocal looks
        looks += 1
        return look(job, full)

    catalogue._cutting._next_absent = count  # type: ignore[method-assign]
    for i in range(1000):
        catalogue.load(f"{i}", prompt(16), positions=[[i % 16]])
    turns = 0
    while moves := catalogue.moves(0.0):
        turns += 1
        assert looks <= 300 * turns + 1000
        for move in moves:
            catalogue.ended(move.move_id, Ending.DONE)
    assert list(outcomes(catalogue).values()) == [JobOutcome.DONE] * 1000
    assert audit(catalogue) == []


def test_a_load_fails_that_could_only_wait_for_pins() -> None:
    catalogue = with_file(blocks=10, stored=8)
    put(catalogue, "a", prompt(10, "held"))
    catalogue.pin("the lease", prompt(10, "held"))
    catalogue.load("b", prompt(8))
    assert catalogue.moves(0.0) == []
    told = last_end(catalogue)
    assert told.outcome is JobOutcome.NO_ROOM
    assert "10 of 10 blocks are held by 1 pins and leases ('the lease'); let some go, or raise host_by" in told.cause
    catalogue.unpin("the lease")
    catalogue.load("c", prompt(8))
    carry_out(catalogue)
    assert outcomes(catalogue) == {"c": JobOutcome.DONE}


def test_of_loads_that_pin_what_they_load_the_last_gives_way() -> None:
    catalogue = Catalogue([FULL], 16, 10 * KIB, 100 * KIB, budgets={MoveKind.PROMOTION: 2 * KIB}, move_bytes=2 * KIB)
    for name in "pqrs":
        put(catalogue, name, prompt(4, name))
    catalogue.evict(place=Place.HOST)
    for name in "pqrs":
        catalogue.load(f"load {name}", prompt(4, name), is_pinning=name != "s")
    carry_out(catalogue)
    told = {each.job_id: each for each in catalogue.news() if isinstance(each, JobEnded)}
    assert [told[f"load {name}"].outcome.value for name in "pqrs"] == ["done", "done", "no_room", "done"]
    assert "10 of 10 blocks are held by 3 pins" in told["load r"].cause
    assert {name: len(held) for name, held in catalogue.pins.items()} == {"load p": 4, "load q": 4}
    for name in "pq":
        assert catalogue.unpin(f"load {name}")
    catalogue.load("again", prompt(4, "r"))
    carry_out(catalogue)
    assert outcomes(catalogue) == {"again": JobOutcome.DONE}


def test_two_loads_promote_a_block_once() -> None:
    catalogue = with_file()
    catalogue.load("a", prompt(10))
    catalogue.load("b", prompt(6))
    moves = carry_out(catalogue)
    assert [(move.kind, move.num_blocks) for move in moves] == [
        (MoveKind.PROMOTION, 10),
        (MoveKind.LOAD, 10),
        (MoveKind.LOAD, 6),
    ]
    assert outcomes(catalogue) == {"a": JobOutcome.DONE, "b": JobOutcome.DONE}


def test_a_corrupt_block_fails_its_load_and_is_found_no_more() -> None:
    catalogue = with_file()
    catalogue.load("a", prompt(10))
    [move] = catalogue.moves(0.0)
    catalogue.ended(move.move_id, Ending.DONE, lost=[3])
    carry_out(catalogue)
    told = last_end(catalogue)
    assert (told.outcome, 3 in told.missing[0]) == (JobOutcome.FAILED, True)
    assert catalogue.lookup(prompt(10)).tokens == 48
    assert catalogue.forgotten() == [(0, 3)]


def test_what_a_load_needs_is_loaded_though_it_is_evicted() -> None:
    catalogue = holding(prompt(5), 10 * KIB)
    catalogue.load("b", prompt(5))
    assert catalogue.evict() == (5, 0)
    catalogue.store("c", prompt(10, "q"))
    moves = {move.job_id: set(move.pieces[0].host_slots) for move in carry_out(catalogue)}
    assert (len(moves["b"]), len(moves["c"]), moves["b"] & moves["c"]) == (5, 5, set())
    assert set(outcomes(catalogue).values()) == {JobOutcome.DONE}


def test_what_is_evicted_before_it_is_stored_is_not_waited_for() -> None:
    catalogue = Catalogue([FULL], 16, 10 * KIB)
    catalogue.store("a", prompt(5))
    catalogue.store("b", prompt(3))
    catalogue.load("c", prompt(3))
    catalogue.evict(prompt(3))
    assert outcomes(catalogue) == {"b": JobOutcome.MISSING, "c": JobOutcome.MISSING}
    [move] = carry_out(catalogue)
    assert move.pieces[0].positions == (3, 4)
    [told] = catalogue.news()
    assert isinstance(told, JobEnded)
    assert (told.job_id, told.missing) == ("a", ((0, 1, 2),))


def test_the_source_of_a_promotion_stays_until_it_has_ended() -> None:
    catalogue = with_file()
    catalogue.load("a", prompt(10))
    [move] = catalogue.moves(0.0)
    catalogue.evict(place=Place.FILE)
    assert catalogue.forgotten() == []
    catalogue.ended(move.move_id, Ending.DONE)
    assert len(catalogue.forgotten()) == 10


def test_a_block_that_is_still_written_to_a_file_is_not_loaded_from_there() -> None:
    catalogue = Catalogue([FULL], 16, 10 * KIB, 100 * KIB)
    catalogue.store("a", prompt(1))
    carry_out(catalogue, only(MoveKind.WRITE_BACK, None))
    catalogue.evict(prompt(1), Place.HOST)
    catalogue.load("b", prompt(1))
    assert outcomes(catalogue) == {"a": JobOutcome.DONE, "b": JobOutcome.MISSING}


def test_a_block_is_stored_again_while_its_old_slot_is_written_back() -> None:
    catalogue = Catalogue([FULL], 16, 10 * KIB, 100 * KIB)
    catalogue.store("a", prompt(1))
    moves = carry_out(catalogue, only(MoveKind.WRITE_BACK, None))
    [old] = [move for move in moves if move.kind is MoveKind.WRITE_BACK]
    catalogue.evict(prompt(1), Place.HOST)
    catalogue.store("b", prompt(1))
    [new] = carry_out(catalogue)
    assert new.pieces[0].host_slots != old.pieces[0].host_slots
    assert (new.kind, catalogue.lookup(prompt(1)).ready_tokens) == (MoveKind.STORE, 16)
    catalogue.ended(old.move_id, Ending.DONE)
    assert catalogue.moves(0.0) == []  # the file tier has it already
    assert audit(catalogue) == []


def test_a_job_that_is_not_carried_out_in_time_ends() -> None:
    catalogue = Catalogue([FULL], 16, 10 * KIB, budgets={MoveKind.STORE: KIB}, move_bytes=KIB)
    catalogue.store("a", prompt(2), until=5.0)
    [move] = catalogue.moves(0.0)
    assert catalogue.wake_at == 5.0
    assert catalogue.moves(5.0) == []
    catalogue.ended(move.move_id, Ending.DONE)
    [told] = catalogue.news()
    assert isinstance(told, JobEnded)
    assert (told.outcome, told.blocks, told.missing) == (JobOutcome.TIMEOUT, 1, ((1,),))


def test_a_disk_that_stalls_keeps_a_quarter_of_host_memory_and_no_more() -> None:
    catalogue = Catalogue([FULL], 16, 16 * KIB, 64 * KIB)
    for name in ("p", "q", "r"):
        catalogue.store(name, prompt(12, name))
        carry_out(catalogue, only(MoveKind.WRITE_BACK, None))
        assert catalogue.lookup(prompt(12, name)).ready_tokens == 12 * 16
        if name == "p":
            catalogue.evict()  # what is being written leaves its slots later
    assert set(outcomes(catalogue).values()) == {JobOutcome.DONE}
    assert catalogue.traffic.under_way[MoveKind.WRITE_BACK] == 4 * KIB
    assert catalogue.statistics()["host_leaving"] == 4


def test_what_is_about_to_be_written_is_not_evicted_for_another_group() -> None:
    second = StoredGroup(name="second", block_size=16, record_bytes=KIB)
    catalogue = Catalogue([FULL, second], 16, 100 * KIB, 4 * KIB)
    catalogue.store("a", prompt(4))
    moves = carry_out(catalogue)
    assert [move.num_blocks for move in moves] == [8, 4]
    assert catalogue.statistics()["write_backs_without_room"] == 4
    tier = Tier(Place.FILE, [FULL], 5 * KIB, "lru")
    tier.make(0, prompt(4))
    [old] = tier.make(0, [b"old"])
    tier.written(old)
    assert len(tier.make(0, prompt(2, "new"))) == 1
    assert set(tier.index[0]) == {*prompt(4), b"new0"}


def test_loads_come_before_stores_promotions_and_write_backs() -> None:
    catalogue = with_file()
    catalogue.store("a", prompt(3, "new"))
    carry_out(catalogue, only(MoveKind.WRITE_BACK, None))
    catalogue.store("b", prompt(3, "newer"))
    catalogue.load("c", prompt(10))
    catalogue.load("d", prompt(3, "new"))
    assert [move.kind for move in catalogue.moves(0.0)] == [MoveKind.LOAD, MoveKind.STORE, MoveKind.PROMOTION]


def test_many_jobs_take_turns() -> None:
    catalogue = Catalogue([FULL], 16, 1 << 20, move_bytes=2 * KIB)
    catalogue.store("a", prompt(6))
    catalogue.store("b", prompt(4, "q"))
    assert [move.job_id for move in catalogue.moves(0.0)] == ["a", "b", "a", "b", "a"]


def test_a_file_tier_that_is_switched_off_is_a_miss() -> None:
    catalogue = with_file()
    catalogue.load("a", prompt(10))
    catalogue.switch_off()
    catalogue.switch_off()
    assert outcomes(catalogue) == {"a": JobOutcome.MISSING}
    assert catalogue.lookup(prompt(10)).tokens == 0
    catalogue.store("b", prompt(10))
    assert {move.kind for move in carry_out(catalogue)} == {MoveKind.STORE}


def test_what_a_file_tier_takes_no_more_is_counted() -> None:
    catalogue = Catalogue([FULL], 16, 100 * KIB, 100 * KIB, budgets={MoveKind.WRITE_BACK: 2 * KIB})
    catalogue.store("a", prompt(10))
    carry_out(catalogue, only(MoveKind.WRITE_BACK, None))
    [back] = [move_id for move_id, running in catalogue.traffic.running.items() if running.move.num_blocks == 2]
    catalogue.switch_off(reads=False)
    assert catalogue.statistics()["write_backs_lost"] == 8
    catalogue.ended(back, Ending.FAILED)
    assert catalogue.statistics()["write_backs_lost"] == 10
    put(catalogue, "b", prompt(12))
    assert catalogue.statistics()["write_backs_lost"] == 12
    assert not carry_out(catalogue)


def test_all_that_is_evicted_is_found_no_more_at_once_and_dropped_little_by_little() -> None:
    catalogue = Catalogue([FULL], 16, 5000 * KIB, 5000 * KIB)
    catalogue.store("a", prompt(4000))
    catalogue.store("b", prompt(3, "q"))
    stores = [move for move in catalogue.moves(0.0) if move.kind is MoveKind.STORE]
    catalogue.ended(stores[0].move_id, Ending.DONE)
    catalogue.pin("pin", prompt(7))
    assert catalogue.evict() == (3996, 7)
    assert catalogue.lookup(prompt(4000)).tokens == 7 * 16
    assert outcomes(catalogue) == {"a": JobOutcome.DONE}
    turns, left = 0, math.inf
    while catalogue.wake_at == 0.0 or not turns:
        moves = catalogue.moves(0.0)
        assert [each.num_blocks for each in moves] == [7] * (not turns), "what nobody finds is written to files"
        for move in moves:
            catalogue.ended(move.move_id, Ending.DONE)
        assert audit(catalogue) == []
        before, left = left, len(entries_of(catalogue.host))
        assert before == math.inf or before - left <= SLICE
        turns += 1
    assert (turns, left) == (7, 10)
    catalogue.ended(stores[1].move_id, Ending.DONE)
    catalogue.unpin("pin")
    assert catalogue.evict() == (14, 0)
    assert not entries_of(catalogue.host)
    put(catalogue, "c", prompt(5000, "new"))
    assert catalogue.lookup(prompt(5000, "new")).tokens == 5000 * 16


def test_room_is_made_by_what_is_to_be_dropped_anyway() -> None:
    catalogue = holding(prompt(2000), 2000 * KIB)
    catalogue.evict()
    put(catalogue, "b", prompt(1990, "q"))
    assert catalogue.lookup(prompt(1990, "q")).tokens == 1990 * 16


def test_a_write_back_that_failed_is_tried_again_a_few_times() -> None:
    catalogue = Catalogue([FULL], 16, 100 * KIB, 100 * KIB)
    catalogue.store("a", prompt(4))
    endings = iter([Ending.FAILED, Ending.REFUSED, Ending.DONE])
    moved = carry_out(catalogue, lambda move: next(endings) if move.kind is MoveKind.WRITE_BACK else Ending.DONE)
    assert [move.kind for move in moved] == [MoveKind.STORE] + [MoveKind.WRITE_BACK] * 3
    assert catalogue.statistics()["file_blocks"] == 4
    catalogue.store("b", prompt(4, "q"))
    assert len(carry_out(catalogue, only(MoveKind.WRITE_BACK, Ending.FAILED))) == 4
    assert (catalogue.statistics()["file_blocks"], catalogue.statistics()["write_backs_failed"]) == (4, 4)
    assert catalogue.lookup(prompt(4, "q")).ready_tokens == 64


def test_a_write_back_that_failed_is_not_tried_again_of_what_was_given_up() -> None:
    catalogue = Catalogue([FULL], 16, 100 * KIB, 100 * KIB)
    catalogue.store("a", prompt(4))
    [back] = [
        move for move in carry_out(catalogue, only(MoveKind.WRITE_BACK, None)) if move.kind is MoveKind.WRITE_BACK
    ]
    catalogue.evict()
    catalogue.ended(back.move_id, Ending.FAILED)
    assert not carry_out(catalogue)
    assert not entries_of(catalogue.host)


def test_what_a_file_tier_recovered_is_found() -> None:
    catalogue = Catalogue([FULL, WINDOW], 16, 64 * KIB, 64 * KIB)
    recovered = [(0, 3, b"p0"), (0, 4, b"p1"), (1, 9, b"p1"), (0, 4, b"taken"), (0, 5, b"p0"), (1, 10**6, b"x")]
    assert catalogue.recover(recovered) == 3
    assert catalogue.lookup(prompt(2)).groups[0].in_file == 2
    assert audit(catalogue) == []
    assert set(catalogue.forgotten()) == {(0, 3), (1, 10**6)}


@pytest.mark.parametrize("policy", ["lru", "s3-fifo"])
def test_other_models_blocks_are_not_found_and_go_first_the_oldest_of_them_before(policy: str) -> None:
    catalogue = Catalogue([FULL], 16, 64 * KIB, 20 * KIB, policy=policy)
    mine, others = prompt(8, "mine"), [(0, 10 + i) for i in range(10)]
    # Its own are the older ones, and are not used: any policy would choose them.
    assert catalogue.recover([(0, i, h) for i, h in reversed(list(enumerate(mine)))], [*others, (0, 10**6)]) == 8
    assert catalogue.forgotten() == [(0, 10**6)]
    assert audit(catalogue) == []
    assert catalogue.statistics()["file_blocks"] == 8
    catalogue.store("a", prompt(2, "a"))  # into the room that is free
    carry_out(catalogue)
    assert catalogue.forgotten() == []
    put(catalogue, "b", prompt(3, "b"))
    assert catalogue.forgotten() == others[:3]
    catalogue.evict()  # of its own prompts: those of others stay
    carry_out(catalogue)
    assert not set(catalogue.forgotten()) & set(others[3:])
    put(catalogue, "c", prompt(20, "c"))
    assert set(others[3:]) <= set(catalogue.forgotten())
    catalogue.evict(place=Place.HOST)
    assert catalogue.lookup(prompt(20, "c")).tokens == 320


@pytest.mark.parametrize("policy", ["lru", "s3-fifo"])
def test_chunks_of_other_models_blocks_go_before_any_of_its_own(policy: str) -> None:
    catalogue = Catalogue([FULL, STATE], 16, 1 << 20, 400 * KIB, policy=policy)
    assert catalogue.file is not None
    slots = catalogue.file.slots
    places = [
        [slot for c in range(slots.num_chunks) for slot in range(*slots.bounds(k, c)) if c % 2 == k] for k in (0, 1)
    ]
    mine, others = prompt(len(places[0]), "mine"), [(1, slot) for slot in places[1]]
    assert catalogue.recover([(0, slot, h) for slot, h in zip(places[0], mine, strict=True)], others) == len(mine)
    assert audit(catalogue) == []
    count = len(places[0]) // 2
    put(catalogue, "a", prompt(count, "a"), positions=[range(count), ()])
    gone = catalogue.forgotten()
    assert gone
    assert {group for group, _ in gone} == {1}
    assert catalogue.lookup(mine).groups[0].tokens == 16 * len(mine)


def test_a_size_of_record_gets_room_that_another_has_not_used_for_longest() -> None:
    catalogue = Catalogue([FULL, STATE], 16, 400 * KIB)
    for i in range(8):  # all room is taken by the blocks of one group
        put(catalogue, f"a{i}", prompt(48, f"a{i}"), positions=[range(48), ()])
    put(catalogue, "b", prompt(48, "b"), positions=[(), range(12)])
    assert catalogue.lookup(prompt(48, "a0")).groups[0].tokens < 48 * 16
    assert catalogue.lookup(prompt(48, "a7")).groups[0].tokens == 48 * 16
    assert len(catalogue.host.index[1]) == 12


def test_a_size_of_record_follows_what_is_used() -> None:
    catalogue = Catalogue([FULL, STATE], 16, 400 * KIB)
    for i in range(8):
        put(catalogue, f"a{i}", prompt(48, f"a{i}"), positions=[range(48), range(1)])
    for i in range(30):
        put(catalogue, f"b{i}", prompt(40, f"b{i}"), positions=[(), range(10)])
    assert catalogue.host.slots.owners.count(1) > 0.8 * catalogue.host.slots.num_chunks


def test_an_audit_says_what_does_not_add_up() -> None:
    catalogue = Catalogue([FULL, STATE], 16, 400 * KIB)
    catalogue.store("a", prompt(8))
    put(catalogue, "b", prompt(4, "q"))
    assert catalogue.statistics()["host_evicted"] == 0
    first, second, third, *_ = entries_of(catalogue.host)
    first.hold("nobody")
    second.hold(99)
    third.state = EntryState.LEAVING
    catalogue.traffic.under_way[MoveKind.LOAD] = 5
    wrong = "\n".join(audit(catalogue))
    for words in (
        "host slot 2 of group 0 is leaving, and found by its key",
        "{'nobody'} are noted, None hold it, and set() run",
        "{99} are noted, None hold it, and set() run",
        "bytes are counted under way",
    ):
        assert words in wrong


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tokens": 81}, "tokens is 81; it must be an integer from 0 to 80"),
        ({"positions": []}, "positions of 0 groups are given, but it has 1"),
        ({"positions": [[5]]}, "position 5 of group 'full': 80 tokens have 5 blocks"),
        ({"positions": [["x"]]}, "position 'x'"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(more: dict[str, Any], words: str) -> None:
    catalogue = Catalogue([FULL], 16, 10 * KIB)
    for ask in (catalogue.store, catalogue.load):
        with pytest.raises(LocalProtocolError, match=words):
            ask("a", prompt(5), **more)
    assert not catalogue.jobs
    assert catalogue.moves(0.0) == []


def test_names_and_hashes_are_unique() -> None:
    catalogue = Catalogue([FULL], 16, 10 * KIB)
    catalogue.store("a", prompt(5))
    for again in (catalogue.store, catalogue.load, catalogue.pin):
        with pytest.raises(LocalProtocolError, match="'a' names a job or a pin already"):
            again("a", prompt(5))
    with pytest.raises(LocalProtocolError, match="a hash is given twice"):
        catalogue.store("b", [b"x", b"y", b"x"])
    with pytest.raises(LocalProtocolError, match="move 99 is not under way"):
        catalogue.ended(99, Ending.DONE)
