"""Simulated engines that offload: nothing wrong is served and nothing leaks; and the simulation sees planted bugs."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
import textwrap
from typing import Any, NamedTuple

import pytest

from asynckv.offload.catalogue import Catalogue
from asynckv.offload.entry import Entry
from asynckv.offload.tier import Tier
from asynckv.tiers import copying
from asynckv.tiers.copying import ByTokens, SlotBySlot
from asynckv.tiers.jobs import OffloadJob
from asynckv.tiers.mover import Mover
from asynckv.tiers.offload import Offload
from asynckv.tiers.rank import Tiers
from asynckv.tiers.shelf import Shelf
from tests.lab.simulation import TIER_FAULTS, make_tier_script, simulate, simulate_many
from tests.lab.tiers import SimRecords


def violation(seed: int) -> str:
    return simulate(seed, TIER_FAULTS, make=make_tier_script).violation


def test_an_engine_that_offloads_keeps_every_promise() -> None:
    found = simulate_many(range(21, 22), TIER_FAULTS, make=make_tier_script)
    assert found.violations == {}
    assert found.counts["blocks.judged"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_engines_that_offload_keep_every_promise() -> None:
    found = simulate_many(range(100, 150), TIER_FAULTS, make=make_tier_script)
    assert found.violations == {}
    # It was no walk in the park.
    loads = ("load.from_files", "load.from_others", "load.staged", "load.cancelled")
    for what in (*loads, "store.failed", "store.closed", "pull.done"):
        assert found.counts[what] > 0, what
    assert {fault.kind for seed in range(300) for fault in make_tier_script(seed).faults} == set(TIER_FAULTS)
    scripts = [make_tier_script(seed) for seed in range(100, 150)]
    shared = [
        s for s in scripts if any(x.shards_of(s.model, g) > 1 for x in s.shapes for g in range(len(s.model.groups)))
    ]
    assert len(shared) > 10


@pytest.mark.slow
def test_without_faults_every_call_is_done() -> None:
    found = simulate_many(range(500, 506), (), make=make_tier_script)
    assert found.violations == {}


@pytest.mark.slow
def test_a_seed_of_tiers_gives_the_same_run_in_any_process() -> None:
    code = (
        "from tests.lab.test_simulation_offload import *; import hashlib;"
        "run = lambda seed: simulate(seed, TIER_FAULTS, make=make_tier_script).events(1 << 30);"
        "print(*(hashlib.sha256(repr(list(run(seed))).encode()).hexdigest() for seed in range(20, 23)))"
    )
    runs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
        for _ in range(2)
    }
    assert len(runs) == 1


class Bug(NamedTuple):
    """What is replaced in one method, and a seed that was seen to notice: it is tried first."""

    owner: Any
    method: str
    before: str
    after: str
    seed: int = 0


PLANTED = {
    "a block is loaded before its copy has ended": Bug(
        Catalogue, "load", "elif entry.state is EntryState.READY:", "elif entry.state:"
    ),
    "a slot is free though a copy may touch it": Bug(
        Entry, "_settle", "condition(self)", "{*map(type, self.holders)} <= {int} and self.state.name == 'LEAVING'", 10
    ),
    "a slot is given up under a reader": Bug(Tier, "_is_busy", "entry.holders", "()", 62),
    "a pin is ignored": Bug(Catalogue, "pin", "tier.hold(entry, name)", "pass", 1),
    "a checksum is not compared": Bug(SimRecords, "finish", "not self.disk.is_good(record.far)", "False", 108),
    "a cancelled load's blocks are given back at once": Bug(
        Catalogue, "cancel", "self._jobs.fail(job", "job.running.clear(); self._jobs.fail(job", 20
    ),
    "a copy in doubt is taken for one that has ended": Bug(
        Mover,
        "_ended",
        "move = posted.move",
        "move = posted.move; ending = Ending(ending.value.replace('in_doubt', 'failed'))",
        1,
    ),
    "a failed copy is taken for a good one": Bug(
        Mover, "_ended", "if ending is Ending.FAILED and lost:", "if ending is Ending.FAILED:", 30
    ),
    "a store that fails says nothing of who reads": Bug(
        OffloadJob, "how_it_ended", "ended.is_held or ended.outcome", "ended.outcome", 10
    ),
    "held blocks are free": Bug(Mover, "_take_news", "job.held_by.add(shelf.far)", "pass", 10),
    "slots of another geometry are off by one": Bug(ByTokens, "pieces", "slots[p] for p", "slots[first] for p", 6),
    "blocks of another geometry are put elsewhere": Bug(
        ByTokens, "pieces", "BlockRuns(first * size,", "BlockRuns((first + (first > 0)) * size,", 7
    ),
    "a list that begins later is taken for one from the start": Bug(
        SlotBySlot, "pieces", "- first // self._groups[index].block_size", "- 0", 1
    ),
    "what is loaded of smaller blocks is not whole": Bug(
        copying,
        "_in_whole_blocks",
        "-(-(group.window - 1) // group.block_size) * group.block_size + 1",
        "group.window",
        106,
    ),
    "what another geometry has left is not evicted": Bug(
        Offload, "evict", "for shelf in (self._own, *self._tiers.others)", "for shelf in (self._own,)", 4
    ),
    "what another geometry has left is found and cannot be loaded": Bug(
        Tiers, "sources", "tokens == self._left(whole).tokens", "tokens == 0", 7
    ),
    "a place in the files is written again before it was forgotten": Bug(
        Shelf, "forget", "self.records.forget(self.block_records.places(freed))", "pass", 53
    ),
    "a store waits for ever for a copy": Bug(Mover, "_doubt", "else self._config.timeout_s", "else math.inf", 12),
    "a job that has ended holds its blocks for ever": Bug(Mover, "_release", "core.ledger.drop(job.job_id)", "pass", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = PLANTED[name]
    plant(bug.owner, bug.method, bug.before, bug.after, monkeypatch)
    assert any(violation(seed) for seed in (bug.seed, *range(150)))


def plant(owner: Any, method: str, before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace something in the source of a method or a cached property of a class, or of a module's function."""
    found = getattr(owner, method)
    source = textwrap.dedent(inspect.getsource(getattr(found, "func", found)))
    assert source.count(before) == 1, f"{before!r} is not, or not once, in {method}"
    namespace = dict(vars(inspect.getmodule(owner)))
    exec(compile(source.replace(before, after), "planted", "exec"), namespace)
    if isinstance(made := namespace[method], functools.cached_property):
        made.__set_name__(owner, method)
    monkeypatch.setattr(owner, method, made)
