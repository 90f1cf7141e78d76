"""Any order of calls and of ends of moves: the promises of the catalogue hold, over memory that is played.

Two tiers are played as pages that remember what was written into them. A move in doubt may scribble until its last
ending. So a slot that is given away too early, or two blocks in one, is seen as wrong content, whoever noticed nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import asynckv.offload.tier as tier_module
from asynckv.core.events import Ending
from asynckv.offload.catalogue import Catalogue
from asynckv.offload.entry import EntryState
from asynckv.offload.job import JobEnded, JobKind, JobOutcome, JobReturned, Move, MoveKind
from asynckv.offload.keys import StoredGroup, block_hashes, needed
from asynckv.offload.tier import Place
from tests.lab.offload_audit import audit, entries_of

PAGE = 1024
MODELS = (
    (StoredGroup(name="full", block_size=2, record_bytes=2 * PAGE),),
    (
        StoredGroup(name="full", block_size=2, record_bytes=2 * PAGE),
        StoredGroup(name="window", block_size=2, record_bytes=3 * PAGE, window=5),
    ),
    (
        StoredGroup(name="full", block_size=4, record_bytes=2 * PAGE),
        StoredGroup(name="window", block_size=2, record_bytes=2 * PAGE, window=3),
        StoredGroup(name="state", block_size=8, record_bytes=5 * PAGE, is_state=True),
    ),
)
SIZES = {1: (6, 12), 2: (64, 96), 3: (100, 140)}
"""Pages of the two tiers, by the number of groups: few, so that room is short."""

LONGEST = 12
"""Hashes of a prompt."""


def prompt(family: int, fork: int, length: int) -> list[bytes]:
    """A prompt; those of one family share what is before the fork."""
    return [f"{family}.{0 if i < 4 else fork}.{i}".encode() for i in range(length)]


prompts = st.builds(
    prompt, st.integers(0, 2), st.sampled_from([0, 0, 1, 2]), st.sampled_from([LONGEST, LONGEST, 8, 5, 0])
)


class Memory:
    """One tier's pages."""

    def __init__(self, groups: Sequence[StoredGroup], num_bytes: int) -> None:
        self.sizes = [group.record_bytes // PAGE for group in groups]
        self.pages: list[object] = [None] * (num_bytes // PAGE)

    def where(self, group: int, slot: int) -> range:
        size = self.sizes[group]
        assert slot in range(len(self.pages) // size), "a slot lies outside its tier"
        return range(slot * size, (slot + 1) * size)

    def write(self, group: int, slot: int, content: object) -> None:
        for i, page in enumerate(self.where(group, slot)):
            self.pages[page] = (content, i)

    def holds(self, group: int, slot: int, content: object) -> bool:
        return [self.pages[page] for page in self.where(group, slot)] == [
            (content, i) for i in range(self.sizes[group])
        ]


class Machine(RuleBasedStateMachine):
    policies = ("lru", "s3-fifo")

    @initialize(
        model=st.sampled_from(MODELS),
        has_file=st.sampled_from([True, True, True, False]),
        is_warm=st.booleans(),
        policy=st.sampled_from(policies),
        small=st.booleans(),
    )
    def start(self, model: Any, has_file: bool, is_warm: bool, policy: str, small: bool) -> None:
        self.groups, self.policy = model, policy
        self.num_bytes = [PAGE * pages for pages in SIZES[len(model)]]
        n = 4 * PAGE if small else 1 << 20
        self.budgets, self.move_bytes = dict.fromkeys(MoveKind, n) | {MoveKind.STORE: 2 * n}, n
        self.has_file = has_file
        self.memories = [Memory(model, n) for n in self.num_bytes]
        self.now = 0.0
        self.count = 0
        self.boot()
        if has_file and not is_warm:  # another model has filled the files
            num_slots = [self.num_bytes[1] // group.record_bytes for group in model]
            self.catalogue.recover([], [(g, slot) for g, n in enumerate(num_slots) for slot in range(g, n, len(model))])
            self.catalogue.forgotten()
        if has_file and is_warm:
            for family in range(3):
                hashes = prompt(family, 0, LONGEST)
                keys = [block_hashes(hashes, group.block_size, 2) for group in model]
                self.catalogue.store(f"warm{family}", hashes, positions=[range(len(mine)) for mine in keys])
                self.wanted[f"warm{family}"] = JobKind.STORE, keys
                self.size[f"warm{family}"] = sum(map(len, keys))
            self.end_all()
            self.now += 1e3
            self.end_all()
            self.catalogue.evict(place=Place.HOST)

    def boot(self) -> None:
        host, file = self.num_bytes
        self.catalogue = Catalogue(
            self.groups,
            2,
            host,
            file if self.has_file else 0,
            policy=self.policy,
            budgets=self.budgets,
            move_bytes=self.move_bytes,
        )
        self.posted: dict[int, Move] = {}
        self.doubtful: set[int] = set()
        self.wanted: dict[str, tuple[JobKind, list[list[bytes]]]] = {}
        self.size: dict[str, int] = {}
        self.told: dict[str, JobEnded] = {}
        self.returned: set[str] = set()
        self.loaded: dict[str, set[tuple[int, int]]] = {}
        self.pinning: set[str] = set()

    # -- callers -----------------------------------------------------------------------------------

    def begin(self, kind: JobKind, hashes: list[bytes], tokens: int = 0, first: int = 0) -> str:
        """Note what is asked for; of a load, the blocks that are needed."""
        self.count += 1
        name = f"{kind}{self.count}"
        self.wanted[name] = kind, [block_hashes(hashes, group.block_size, 2) for group in self.groups]
        self.size[name] = sum(len(needed(group, first, tokens)) for group in self.groups)
        return name

    @rule(
        hashes=prompts,
        is_all=st.booleans(),
        patience=st.sampled_from([1.0, 1e9]),
        soon=st.booleans(),
        is_prefix=st.booleans(),
    )
    def store(self, hashes: list[bytes], is_all: bool, patience: float, soon: bool, is_prefix: bool) -> None:
        name = self.begin(JobKind.STORE, hashes, 2 * len(hashes))
        positions = [range(len(keys)) for keys in self.wanted[name][1]] if is_all else None
        if positions is not None:
            self.size[name] = sum(map(len, positions))
        self.catalogue.store(name, hashes, positions=positions, until=self.now + patience, is_prefix=is_prefix)
        if soon:
            self.post()

    @rule(
        hashes=prompts,
        patience=st.sampled_from([1.0, 1e9]),
        first=st.sampled_from([0, 0, 3]),
        soon=st.booleans(),
        is_pinning=st.booleans(),
    )
    def load(self, hashes: list[bytes], patience: float, first: int, soon: bool, is_pinning: bool) -> None:
        found = self.catalogue.lookup(hashes)
        name = self.begin(JobKind.LOAD, hashes, found.tokens, first)
        until = self.now + patience
        wanted = [needed(group, first, found.tokens) for group in self.groups]
        self.catalogue.load(name, hashes, found.tokens, positions=wanted, until=until, is_pinning=is_pinning)
        if is_pinning:
            self.pinning.add(name)
        ended = next((x for x in self.catalogue._jobs._news if isinstance(x, JobEnded) and x.job_id == name), None)
        assert ended is None or ended.outcome is not JobOutcome.MISSING, "a lookup promised too much"
        if soon:
            self.post()

    @precondition(lambda self: self.count % 3 == 1)
    @rule(hashes=prompts, is_load=st.booleans())
    def touch(self, hashes: list[bytes], is_load: bool) -> None:
        if is_load:
            self.catalogue.load(self.begin(JobKind.LOAD, hashes, 2 * len(hashes)), hashes)
        else:
            self.catalogue.touch(hashes)

    @precondition(lambda self: self.count % 3 == 2)
    @rule(hashes=prompts, name=st.sampled_from(["pin one", "pin two"]))
    def pin(self, hashes: list[bytes], name: str) -> None:
        if not self.catalogue.unpin(name):
            for piece in self.catalogue.pin(name, hashes):
                for key, slot in zip(piece.hashes, piece.host_slots, strict=True):
                    assert self.memories[0].holds(piece.group, slot, key)

    @precondition(lambda self: self.count % 3 == 1)
    @rule(hashes=prompts, is_all=st.booleans(), place=st.sampled_from([None, Place.HOST, Place.HOST, Place.FILE]))
    def evict(self, hashes: list[bytes], is_all: bool, place: Place | None) -> None:
        found = [(tier, entry) for pin in self.catalogue.pins.values() for tier, entry in pin]
        pinned = {entry for tier, entry in found if tier.index[entry.group].get(entry.hash) is entry}
        self.catalogue.evict(None if is_all else hashes, place)
        assert place is not None or pinned or self.catalogue.lookup(hashes).tokens == 0
        left = {entry for tier, entry in found if tier.index[entry.group].get(entry.hash) is entry}
        assert left == pinned, "what is pinned was evicted"

    @precondition(lambda self: self.catalogue.jobs and self.count % 3 == 0)
    @rule(i=st.integers(0, 100))
    def cancel(self, i: int) -> None:
        jobs = list(self.catalogue.jobs)
        assert self.catalogue.cancel(jobs[i % len(jobs)])

    @precondition(lambda self: self.count % 3 == 2)
    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 50.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # -- whoever carries bytes ---------------------------------------------------------------------

    def touched(self, move: Move) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        """Pages that a move reads and writes, `(tier, page)`."""
        host, file = (
            {
                (tier, page)
                for piece in move.pieces
                for slot in (piece.file_slots if tier else piece.host_slots)
                for page in self.memories[tier].where(piece.group, slot)
            }
            for tier in (0, 1)
        )
        return {
            MoveKind.LOAD: (host, set()),
            MoveKind.STORE: (set(), host),
            MoveKind.PROMOTION: (file, host),
            MoveKind.WRITE_BACK: (host, file),
        }[move.kind]

    @rule()
    def post(self) -> None:
        self.catalogue.forgotten()
        for move in self.catalogue.moves(self.now):
            reads, writes = self.touched(move)
            for other in self.posted.values():
                other_reads, other_writes = self.touched(other)
                assert not writes & (other_reads | other_writes), "a slot is written that a transfer may still touch"
                assert not reads & other_writes, "a slot is read that a transfer may still write"
            self.check_sources(move)
            for _, page in {x for x in writes if x[0] == 0}:
                self.memories[0].pages[page] = "torn"
            for _, page in {x for x in writes if x[0] == 1}:
                self.memories[1].pages[page] = "torn"
            if move.kind in (MoveKind.LOAD, MoveKind.STORE):
                assert move.job_id not in self.told, "a job that has ended begins a transfer"
            self.posted[move.move_id] = move

    def check_sources(self, move: Move) -> None:
        for piece in move.pieces:
            for i, key in enumerate(piece.hashes):
                if move.kind in (MoveKind.LOAD, MoveKind.WRITE_BACK):
                    assert self.memories[0].holds(piece.group, piece.host_slots[i], key), "not what was to be read"
                if move.kind is MoveKind.PROMOTION:
                    assert self.memories[1].holds(piece.group, piece.file_slots[i], key), "not what was to be read"
                if piece.positions:
                    assert self.wanted[move.job_id][1][piece.group][piece.positions[i]] == key

    @precondition(lambda self: self.posted)
    @rule(i=st.integers(0, 100), lost=st.sampled_from([(), (), (), (0,), (1, 2)]), soon=st.booleans())
    def end_well(self, i: int, lost: tuple[int, ...], soon: bool) -> None:
        self.end(i, Ending.DONE, lost)
        if soon:
            self.post()

    @precondition(lambda self: self.posted)
    @rule(i=st.integers(0, 100), ending=st.sampled_from([Ending.FAILED, Ending.IN_DOUBT, Ending.REFUSED]))
    def end_badly(self, i: int, ending: Ending) -> None:
        self.end(i, ending, ())

    def end(self, i: int, ending: Ending, lost: tuple[int, ...]) -> None:
        move = self.posted[list(self.posted)[i % len(self.posted)]]
        lost = tuple(position for position in lost if position < move.num_blocks)
        if ending is Ending.IN_DOUBT:
            self.doubtful.add(move.move_id)
        else:
            self.check_sources(move)
            if ending is Ending.DONE:
                self.carry(move, lost)
            del self.posted[move.move_id]
            self.doubtful.discard(move.move_id)
        self.catalogue.ended(move.move_id, ending, "played", lost if ending is Ending.DONE else ())
        self.hear()

    def carry(self, move: Move, lost: Sequence[int]) -> None:
        i = 0
        for piece in move.pieces:
            for k, key in enumerate(piece.hashes):
                if i not in lost:
                    if move.kind in (MoveKind.STORE, MoveKind.PROMOTION):
                        self.memories[0].write(piece.group, piece.host_slots[k], key)
                    elif move.kind is MoveKind.WRITE_BACK:
                        self.memories[1].write(piece.group, piece.file_slots[k], key)
                    else:
                        self.loaded.setdefault(move.job_id, set()).add((piece.group, piece.positions[k]))
                i += 1

    @precondition(lambda self: self.count % 4 == 3)
    @rule()
    def all_goes_well(self) -> None:
        self.end_all()

    def end_all(self) -> None:
        """Let everything go well until nothing is left to do."""
        self.post()
        for _ in range(200):
            if not (running := [m for m in self.posted if m not in self.doubtful]):
                break
            for move_id in running:
                self.carry(move := self.posted.pop(move_id), ())
                self.check_sources(move)
                self.catalogue.ended(move_id, Ending.DONE)
            self.post()
        self.hear()
        waiting = [job for job in self.catalogue.jobs.values() if not job.doubtful]
        assert not waiting, "a job waits for nothing"

    @precondition(lambda self: self.has_file and self.count % 8 == 7)
    @rule(is_clean=st.booleans(), every=st.integers(1, 3))
    def restart(self, is_clean: bool, every: int) -> None:
        """Die, and begin with what the file tier has on disk, some of it another model's; or switch it off."""
        assert self.catalogue.file is not None
        if not is_clean:
            self.catalogue.switch_off()
            return
        found = [
            (entry.group, entry.slot, entry.hash)
            for index in self.catalogue.file.index
            for entry in index.values()
            if entry.state is EntryState.READY
        ]
        mine, others = found[::every], {each[:2] for each in found} - {each[:2] for each in found[::every]}
        self.boot()
        outside = [(0, 10_000, b"outside"), (99, 0, b"strange")]
        assert self.catalogue.recover([*mine, *outside], [*others, (0, 10_001)]) == len(mine)
        assert {(0, 10_000), (0, 10_001)} == set(self.catalogue.forgotten())

    # -- promises ----------------------------------------------------------------------------------

    def hear(self) -> None:
        for news in self.catalogue.news():
            if isinstance(news, JobReturned):
                assert self.told[news.job_id].is_held, "blocks are returned that were not held"
                assert news.job_id not in self.returned, "blocks are returned twice"
                self.returned.add(news.job_id)
                continue
            assert news.job_id not in self.told, "a job has ended twice"
            self.told[news.job_id] = news
            mine = {m for m, move in self.posted.items() if move.job_id == news.job_id}
            mine = {m for m in mine if self.posted[m].kind in (MoveKind.LOAD, MoveKind.STORE)}
            assert mine <= self.doubtful, "a job has ended, and a transfer of it runs"
            assert bool(mine) == news.is_held
            if news.outcome is not JobOutcome.MISSING or news.blocks:
                said = news.blocks + news.known + sum(map(len, news.missing))
                assert said == self.size[news.job_id], "a job has ended, and says nothing of some blocks"
            if news.kind is JobKind.LOAD and news.outcome is JobOutcome.DONE:
                assert not any(news.missing)
                assert len(self.loaded.get(news.job_id, ())) == news.blocks
            assert (news.job_id in self.catalogue.pins) == (
                news.job_id in self.pinning and news.outcome is JobOutcome.DONE
            ), "only what was loaded completely is pinned"
            if (pinned := self.catalogue.pins.get(news.job_id)) is not None:
                assert len(pinned) == news.blocks
                assert all(self.memories[0].holds(e.group, e.slot, e.hash) for _, e in pinned), "it was not kept"
                self.catalogue.unpin(news.job_id)

    @invariant()
    def nothing_is_wrong(self) -> None:
        self.hear()
        assert audit(self.catalogue) == []
        assert set(self.catalogue.jobs) == set(self.wanted) - (
            set(self.told) - {j for j, news in self.told.items() if news.is_held and j not in self.returned}
        )
        for tier, memory in zip(self.catalogue._tiers(), self.memories, strict=False):
            for entry in entries_of(tier):
                if entry.state is EntryState.READY and entry.hash:
                    assert memory.holds(entry.group, entry.slot, entry.hash), "what is READY was not written"

    @invariant()
    def budgets_are_kept(self) -> None:
        by_kind: dict[MoveKind, list[int]] = {}
        for move_id, move in self.posted.items():
            if move_id not in self.doubtful:
                by_kind.setdefault(move.kind, []).append(move.num_bytes)
            assert move.num_bytes <= self.move_bytes or move.num_blocks == 1
        for kind, sizes in by_kind.items():
            assert len(sizes) == 1 or sum(sizes) <= self.catalogue.traffic.limits[kind]

    def teardown(self) -> None:
        if not hasattr(self, "catalogue"):
            return
        for move_id in list(self.doubtful):
            del self.posted[move_id]
            self.catalogue.ended(move_id, Ending.FAILED)
        self.doubtful.clear()
        for name in list(self.catalogue.pins):
            self.catalogue.unpin(name)
        self.end_all()
        self.nothing_is_wrong()
        assert not self.catalogue.jobs
        assert self.told.keys() == self.wanted.keys()
        for tier in self.catalogue._tiers():
            assert not any(entry.holders for entry in entries_of(tier))
            assert not tier.leaving


@patch.object(tier_module, "SLICE", 2)
def play(examples: int, steps: int = 40, phases: Sequence[Phase] = tuple(Phase)) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_any_order_of_calls_and_ends_keeps_the_promises() -> None:
    play(120)
