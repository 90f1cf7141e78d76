"""The parts of the offload room, each for itself: tables, slots, policies, keys, prefixes."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckv.errors import ConfigError, LocalProtocolError
from asynckv.geometry.layout import ONE_PER_REQUEST, Dim, Group, Layout, Memory, Part, View
from asynckv.offload import entry, job
from asynckv.offload.entry import Entry, EntryEvent, EntryState
from asynckv.offload.eviction import LRU, POLICIES, Policy, S3Fifo, policy_named
from asynckv.offload.found import ABSENT, READY, Found, longest
from asynckv.offload.job import Job, JobEvent, JobKind, JobOutcome, JobState
from asynckv.offload.keys import MAX_HASH_BYTES, StoredGroup, as_hashes, block_hashes, namespace, needed, stored_groups
from asynckv.offload.slots import TierSlots
from tests.lab.offload_audit import audit_slots

examples = settings(deadline=None, max_examples=50)

# -- tables -------------------------------------------------------------------------------------------


def test_every_state_is_in_both_tables() -> None:
    assert set(entry.ON_EVENT) == set(entry.WHEN) == set(EntryState)
    assert set(job.ON_EVENT) == set(job.WHEN) == set(JobState)


@pytest.mark.parametrize("state", EntryState)
@pytest.mark.parametrize("event", EntryEvent)
def test_an_entry_takes_what_its_table_lists_and_nothing_else(state: EntryState, event: EntryEvent) -> None:
    stored = Entry(0, b"key", 7, state, 0)
    stored.hold(1)
    after = entry.ON_EVENT[state].get(event)
    if after is None:
        with pytest.raises(LocalProtocolError, match=event.name):
            stored.receive(event)
        assert stored.state is state
    else:
        stored.receive(event)
        assert stored.state is after


def test_an_entry_is_gone_when_nobody_holds_it_and_nothing_touches_it() -> None:
    for order in itertools.permutations(["pin", "move", "drop"]):
        stored = Entry(0, b"key", 7, EntryState.READY, 0)
        stored.hold("pin")
        stored.hold(1)
        gone = [
            {
                "pin": lambda e=stored: e.let_go("pin"),
                "move": lambda e=stored: e.let_go(1),
                "drop": lambda e=stored: e.receive(EntryEvent.DROPPED),
            }[what]()
            for what in order
        ]
        assert gone == [False, False, True]
        assert stored.state is EntryState.GONE
        assert not stored.let_go("pin")


@pytest.mark.parametrize("state", JobState)
@pytest.mark.parametrize("event", JobEvent)
def test_a_job_takes_what_its_table_lists_and_nothing_else(state: JobState, event: JobEvent) -> None:
    asked = Job("a", JobKind.LOAD)
    asked.state = state
    after = job.ON_EVENT[state].get(event)
    if after is None:
        with pytest.raises(LocalProtocolError, match=event.name):
            asked.receive(event, JobOutcome.FAILED)
        assert asked.state is state
    else:
        asked.receive(event, JobOutcome.FAILED)
        assert asked.state is after


# -- slots --------------------------------------------------------------------------------------------


@examples
@given(data=st.data())
def test_slots_never_overlap_and_none_is_lost(data: st.DataObject) -> None:
    records = data.draw(st.lists(st.sampled_from([1, 2, 5, 7, 11]), min_size=1, max_size=4))
    num_bytes = data.draw(st.integers(352, 500))
    slots = TierSlots(num_bytes, records)
    taken: dict[tuple[int, int], set[int]] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        if data.draw(st.booleans()) and taken:
            kind, slot = data.draw(st.sampled_from(sorted(taken)))
            del taken[kind, slot]
            slots.put(kind, slot)
            continue
        kind = data.draw(st.integers(0, len(slots.sizes) - 1))
        n = data.draw(st.integers(0, 60))
        could = slots.reserve(kind, n)
        found = slots.take(kind, n)
        assert len(found) == could <= n
        for slot in found:
            place = set(range(slot * slots.sizes[kind], (slot + 1) * slots.sizes[kind]))
            assert max(place) < num_bytes
            assert not any(place & other for other in taken.values())
            taken[kind, slot] = place
        assert audit_slots(slots, [{s for k, s in taken if k == kind} for kind in range(len(slots.sizes))]) == []
    for kind, slot in taken:
        slots.put(kind, slot)
    assert slots.owners == [None] * slots.num_chunks  # all chunks are everybody's again
    assert audit_slots(slots, [set() for _ in slots.sizes]) == []


@examples
@given(wanted=st.lists(st.tuples(st.integers(0, 1), st.integers(-2, 90)), max_size=60))
def test_what_was_claimed_is_taken_and_the_rest_is_free(wanted: list[tuple[int, int]]) -> None:
    slots = TierSlots(200, [2, 3])
    claimed = [place for place, is_good in zip(wanted, slots.claim(wanted), strict=True) if is_good]
    assert len(set(claimed)) == len(claimed)
    places = [set(range(s * slots.sizes[k], (s + 1) * slots.sizes[k])) for k, s in claimed]
    assert sum(map(len, places)) == len(set().union(*places))
    assert all(0 <= b < 200 for p in places for b in p)
    assert audit_slots(slots, [{s for k, s in claimed if k == kind} for kind in (0, 1)]) == []


def test_a_slot_that_is_lost_free_twice_or_out_of_its_chunk_is_found() -> None:
    slots = TierSlots(200, [2, 3])
    [slot] = slots.take(0, 1)
    assert audit_slots(slots, [{slot}, set()]) == []
    assert audit_slots(slots, [set(), set()]) == [f"slots [{slot}] of 2 bytes are neither free nor taken"]
    assert audit_slots(slots, [{slot, slot + 1}, set()]) == [f"slots [{slot + 1}] of 2 bytes are free and taken"]
    assert audit_slots(slots, [{slot}, {99}]) == ["slots [99] of 3 bytes lie in no chunk of theirs"]


def test_what_is_claimed_costs_its_records_and_not_the_tier() -> None:
    steps = 0

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal steps
        steps += 1
        assert steps < 1_000, "every slot is looked at"
        return count

    slots = TierSlots(1 << 50, [4096])
    before = sys.gettrace()
    sys.settrace(count)
    try:
        claimed = slots.claim([(0, 5), (0, 1 << 30), (0, 5)])
    finally:
        sys.settrace(before)
    assert claimed == [True, True, False]
    assert slots.take(0, 6) == [6, 7, 8, 9, 10, 11]


def test_chunks_that_no_size_divides_do_not_overlap() -> None:
    slots = TierSlots(1000, [5, 7, 11])
    places = [
        set(range(slot * size, (slot + 1) * size))
        for _ in range(20)
        for kind, size in enumerate(slots.sizes)
        for slot in slots.take(kind, 10)
    ]
    assert len(places) > 100
    assert sum(map(len, places)) == len(set().union(*places))


def test_a_chunk_goes_back_with_its_last_slot() -> None:
    slots = TierSlots(1000, [5, 11])
    for slot in slots.take(0, 1000):
        slots.put(0, slot)
    assert len(slots.take(1, 1000)) > 80


def test_neighbours_are_handed_out_together() -> None:
    slots = TierSlots(1000, [1])
    assert slots.take(0, 600) == list(range(600))
    for slot in [*range(0, 100, 2), *range(200, 264), *range(301, 310)]:
        slots.put(0, slot)
    assert slots.take(0, 30) == list(range(200, 230))  # the shortest run that is long enough: not the holes
    assert slots.take(0, 60) == list(range(600, 660))
    slots.take(0, 340)
    assert slots.take(0, 40)[:34] == list(range(230, 264))  # the longest that is left, and then the next
    assert len(slots.take(0, 1000)) == 50 + 3


def test_a_tier_that_is_too_small_is_refused_with_what_it_needs() -> None:
    with pytest.raises(
        ConfigError, match="num_bytes is 100, which cannot hold records of 4, 64 bytes; give 1024 or more"
    ):
        TierSlots(100, [4, 64])


# -- policies -----------------------------------------------------------------------------------------


def idle(key: int) -> bool:
    return False


def hit_rate(policy: Policy[int], room: int, trace: Sequence[int]) -> float:
    hits = 0
    for key in trace:
        if key in policy:
            hits += 1
            policy.use(key)
        else:
            if len(policy) == room:
                policy.choose(idle)
            policy.add(key)
    return hits / len(trace)


def test_lru_lets_go_of_what_was_not_used_for_longest() -> None:
    lru = LRU[int]()
    for key in (1, 2, 3):
        lru.add(key)
    lru.use(1)
    assert [lru.choose(idle) for _ in range(4)] == [2, 3, 1, None]


def test_s3_fifo_keeps_what_is_used_again_through_a_scan() -> None:
    hot = list(range(20))
    trace = [key for i in range(200) for key in [*hot, *(1000 + 40 * i + k for k in range(40))]]
    assert hit_rate(S3Fifo(), 50, trace) > 0.3  # the hot ones are a third of the trace
    assert hit_rate(LRU(), 50, trace) == 0


def test_s3_fifo_is_no_worse_than_lru_on_a_skewed_trace() -> None:
    rng = random.Random(5)
    trace = [min(int(rng.paretovariate(0.6)), 100_000) for _ in range(8000)]
    assert hit_rate(S3Fifo(), 60, trace) >= hit_rate(LRU(), 60, trace)


@examples
@given(data=st.data(), name=st.sampled_from(sorted(POLICIES)))
def test_a_policy_lets_everything_go_once_and_nothing_that_is_busy(data: st.DataObject, name: str) -> None:
    policy: Policy[int] = policy_named(name)()
    here: set[int] = set()
    busy: set[int] = set()
    for _ in range(data.draw(st.integers(0, 60))):
        key = data.draw(st.integers(0, 12))
        what = data.draw(st.sampled_from(["add", "add", "use", "busy", "remove", "choose"]))
        if what == "add" and key not in here:
            policy.add(key)
            here.add(key)
        elif what == "busy":
            busy.symmetric_difference_update({key})
            if key not in busy:
                policy.idle(key)
        elif what == "choose":
            chosen = policy.choose(busy.__contains__)
            assert (chosen is None) == (here <= busy)
            assert chosen is None or chosen in here - busy
            here -= {chosen}
        elif key in here and what in ("use", "remove"):
            policy.use(key) if what == "use" else policy.remove(key)
            here -= {key} if what == "remove" else set()
        assert len(policy) == len(here)
        assert all((key in policy) == (key in here) for key in range(13))
    for key in busy:
        policy.idle(key)
    assert Counter(iter(lambda: policy.choose(idle), None)) == Counter(here)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_what_is_busy_is_passed_over_once_and_keeps_its_turn(name: str) -> None:
    policy: Policy[int] = policy_named(name)()
    for key in range(1000):
        policy.add(key)
    looks: list[int] = []

    def is_busy(key: int) -> bool:
        looks.append(key)
        return key < 999

    assert policy.choose(is_busy) == 999
    assert looks == list(range(1000))
    for key in range(1000, 1010):  # each finds what came just before
        assert policy.choose(is_busy) is None
        policy.add(key)
        assert policy.choose(idle) == key
    assert len(looks) == 1000
    policy.add(2000)
    for key in (7, 5, 6):
        policy.idle(key)
    assert [policy.choose(idle) for _ in range(5)] == [5, 6, 7, 2000, None]
    assert len(policy) == 996


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_last_key_that_stood_aside_precedes_the_next_that_comes(name: str) -> None:
    policy: Policy[int] = policy_named(name)()
    policy.add(0)
    assert policy.choose(lambda key: True) is None
    policy.add(1)
    policy.idle(0)
    assert [policy.choose(idle), policy.choose(idle)] == [0, 1]


def test_an_unknown_policy_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match="policy 'arc' is unknown; use one of lru, s3-fifo"):
        policy_named("arc")


# -- prefixes -----------------------------------------------------------------------------------------

stored = st.builds(
    lambda size, kind: StoredGroup(
        name="g", block_size=size, record_bytes=1, is_state=kind == 0, window=0 if kind < 2 else kind
    ),
    st.sampled_from([2, 4, 6]),
    st.sampled_from([0, 1, 1, 2, 3, 7, 9]),
)


def can_use(groups: Sequence[StoredGroup], present: Sequence[Any], tokens: int) -> bool:
    """Say token by token what `found` says of arrays."""
    for group, there in zip(groups, present, strict=True):
        if tokens % group.block_size:
            return False
        read = range(max(0, tokens - (group.window - 1)) if group.window else 0, tokens)
        blocks = {tokens // group.block_size - 1} if group.is_state else {t // group.block_size for t in read}
        if tokens and not all(block < len(there) and there[block] for block in blocks):
            return False
    return True


@examples
@given(data=st.data(), groups=st.lists(stored, min_size=1, max_size=3))
def test_the_longest_prefix_is_the_longest_that_every_group_can_use(data: st.DataObject, groups: Any) -> None:
    tokens = data.draw(st.integers(0, 48))
    codes = [
        np.array(
            data.draw(
                st.lists(st.sampled_from([1, 1, 1, 1, 2, 3, 0]), min_size=(n := tokens // g.block_size), max_size=n)
            ),
            np.uint8,
        )
        for g in groups
    ]

    def brute(present: Sequence[Any], of: Sequence[StoredGroup] = groups) -> int:
        return max(t for t in range(tokens + 1) if can_use(of, present, t))

    found: Found = longest(groups, codes)
    assert found.tokens == brute([code != ABSENT for code in codes])
    assert found.ready_tokens == brute([code == READY for code in codes])
    assert found.would_wait == any(
        code[list(needed(group, 0, found.tokens))].max(initial=0) > READY
        for group, code in zip(groups, codes, strict=True)
    )
    for group, code, each in zip(groups, codes, found.groups, strict=True):
        assert each.tokens == brute([code != ABSENT], [group])
        assert each.ready + each.in_file + each.storing == len(needed(group, 0, found.tokens)) or group.window == 1


@examples
@given(group=stored, first=st.integers(0, 40), blocks=st.integers(0, 12))
def test_what_is_needed_is_what_is_read_and_not_there(group: StoredGroup, first: int, blocks: int) -> None:
    tokens = blocks * group.block_size
    read = range(max(first, tokens - (group.window - 1) if group.window else 0), tokens)
    wanted = sorted({t // group.block_size for t in read})
    if group.is_state:
        wanted = [blocks - 1] if first < tokens else []
    assert list(needed(group, first, tokens)) == wanted


# -- keys ---------------------------------------------------------------------------------------------


def layout(*groups: Group, tokens: int = 16, rank: int = 0, size: int = 1, dtype: str = "bfloat16") -> Layout:
    part = Part(
        "kv",
        dtype,
        2,
        0,
        (Dim("head", 8 // size, 2 * tokens), Dim("token", tokens, 2)),
        "head",
        (rank * 8 // size, (rank + 1) * 8 // size),
        8,
    )
    return Layout(
        model="m",
        tp_rank=rank,
        tp_size=size,
        memories=(Memory(0, 1 << 20),),
        groups=groups,
        views=tuple(View(0, g, f"layer{g}", 0, 16 * tokens, (part,)) for g in range(len(groups))),
    )


def test_the_small_queue_of_s3_fifo_holds_a_tenth() -> None:
    queue = S3Fifo[int]()
    for key in range(10):
        queue.add(key)
        queue.use(key)
        queue.use(key)
    assert queue.choose(lambda key: False) == 0  # all were used, and nine are in the main queue now
    queue.add(10)
    assert queue.choose(lambda key: False) == 10
    queue.add(11)
    queue.add(12)
    for key in (11, 12):
        queue.use(key)
        queue.use(key)
    assert queue.choose(lambda key: False) == 1


def test_blocks_are_named_by_the_hash_at_their_end() -> None:
    hashes = [f"h{i}".encode() for i in range(7)]
    assert block_hashes(hashes, 16, 16) == hashes
    assert block_hashes(hashes, 48, 16) == [b"h2", b"h5"]


def test_sizes_that_do_not_align_are_refused_with_those_that_would() -> None:
    with pytest.raises(
        ConfigError, match=r"'g' has blocks of 24 tokens, but hashes cover 16.*\(24, 12, 8, 6\)"
    ) as said:
        stored_groups(layout(Group("g", 24, 8)), [1], 16)
    assert "block_size of 16 or 32" in str(said.value)
    assert "prefix caching" in str(said.value)
    with pytest.raises(ConfigError, match=r"\(8, 4, 2, 1\)"):
        stored_groups(layout(Group("g", 24, 8), Group("h", 16, 8)), [1, 1], 16)
    with pytest.raises(ConfigError, match=r"\(48, 24, 16, 12\)"):  # a state that cannot be stored has no say
        stored_groups(layout(Group("g", 48, 8), Group("s", ONE_PER_REQUEST, 8, kind="state")), [1, 1], 32)
    with pytest.raises(ConfigError, match=r"one state per request.*enable prefix caching"):
        stored_groups(layout(Group("s", ONE_PER_REQUEST, 8, kind="state")), [1], 16)
    with pytest.raises(ConfigError, match="hash_tokens is 0"):
        stored_groups(layout(Group("g", 16, 8)), [1], 0)


def test_a_namespace_says_what_is_stored_and_not_how_it_is_cut() -> None:
    one = layout(Group("g", 16, 8))
    cut = layout(Group("g", 64, 100), tokens=64, rank=1, size=4)
    assert namespace(one, 0, 16, "w") == namespace(cut, 0, 16, "w")
    others = [
        namespace(one, 0, 16, "v"),
        namespace(one, 0, 8, "w"),
        namespace(layout(Group("g", 16, 8), dtype="float16"), 0, 16, "w"),
        namespace(layout(Group("g", 16, 8, window=64)), 0, 16, "w"),
        namespace(layout(Group("g", 16, 8, kind="state")), 0, 16, "w"),
        namespace(layout(Group("f", 16, 8), Group("g", 16, 8)), 1, 16, "w"),
    ]
    assert len({namespace(one, 0, 16, "w"), *others}) == 7
    told = stored_groups(layout(Group("g", 16, 8, window=9)), [4096], 8, "w")[0]
    assert (told.name, told.block_size, told.record_bytes, told.window, told.is_state) == ("g", 16, 4096, 9, False)


@pytest.mark.parametrize(
    "bad",
    ["text", b"bytes", 5, None, [5], [b""], ["a", b""], ["x" * (MAX_HASH_BYTES + 1)], ["\ud800"], {"a": 1}, [None]],
)
def test_what_is_no_list_of_hashes_is_refused(bad: Any) -> None:
    with pytest.raises(LocalProtocolError, match="hash"):
        as_hashes(bad)


def test_hashes_are_texts_or_bytes() -> None:
    assert as_hashes(["ä", b"\xff"]) == ["ä".encode(), b"\xff"]
    assert as_hashes(()) == []
