"""Bugs planted in the offload room, one at a time: each breaks one promise, and a test must notice.

Most are noticed by the example that is about the promise, at once. Those that need an order of events that nobody
thinks of are left to `tests/test_offload_machine.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase

import tests.test_offload_catalogue as example
import tests.test_offload_parts as part
from asynckv.errors import LocalProtocolError
from asynckv.offload.catalogue import Catalogue
from asynckv.offload.cutting import Cutting
from asynckv.offload.entry import Entry
from asynckv.offload.eviction import S3Fifo
from asynckv.offload.job import Jobs
from asynckv.offload.slots import Runs, TierSlots
from asynckv.offload.tier import Tier
from asynckv.offload.traffic import Traffic
from tests.lab.test_simulation_offload import plant
from tests.test_offload_machine import play


class Bug(NamedTuple):
    """What is replaced in one method, and who notices."""

    owner: Any
    method: str
    before: str
    after: str
    noticed_by: Callable[[], Any]


def any_order() -> None:
    play(150, phases=[Phase.generate])


C, T = Catalogue, Tier
PLANTED = {
    "a slot is free though a transfer may touch it": Bug(
        Entry,
        "_settle",
        "condition(self)",
        "{*map(type, self.holders)} <= {int} and self.state.name == 'LEAVING'",
        any_order,
    ),
    "a slot is free though somebody holds it": Bug(
        Entry,
        "_settle",
        "condition(self)",
        "{*map(type, self.holders)} <= {str} and self.state.name == 'LEAVING'",
        any_order,
    ),
    "what is held is evicted": Bug(T, "_is_busy", "entry.holders", "()", example.test_what_is_pinned_stays),
    "what is being written is evicted": Bug(
        T,
        "_is_busy",
        "entry.state is not S.READY",
        "False",
        example.test_what_is_about_to_be_written_is_not_evicted_for_another_group,
    ),
    "a store evicts what it goes on from": Bug(
        T,
        "_is_busy",
        "entry.used == self._spared",
        "False",
        example.test_a_store_does_not_evict_the_prefix_that_it_goes_on_from,
    ),
    "a chain is evicted from its start": Bug(
        T, "make", "reversed(made)", "made", example.test_a_chain_is_evicted_from_its_end
    ),
    "a move in doubt lets go of what it writes": Bug(
        C,
        "_doubt",
        "self.traffic.doubt(running)",
        "self.traffic.doubt(running); [self.host.let_go(i.entry, running.move.move_id) for i in running.items]",
        any_order,
    ),
    "a move in doubt is taken for one that has ended": Bug(
        C, "_doubt", "job.doubtful.add(move.move_id)", "pass", any_order
    ),
    "a block that failed is found": Bug(
        C, "_written_or_lost", "if not is_good:", "if not is_good and int not in map(type, entry.holders):", any_order
    ),
    "what was evicted while it was written is there": Bug(
        T, "_hide", "del self.index[entry.group][entry.hash]", "pass", any_order
    ),
    "corrupt blocks are found": Bug(
        C,
        "ended",
        "is_done and i not in lost",
        "is_done",
        example.test_a_corrupt_block_fails_its_load_and_is_found_no_more,
    ),
    "a corrupt block stays in the file tier": Bug(
        C,
        "ended",
        "self.file.drop(running.sources[i])",
        "pass",
        example.test_a_corrupt_block_fails_its_load_and_is_found_no_more,
    ),
    "the source of a promotion may be evicted": Bug(
        Traffic,
        "begin",
        "for entry in sources:",
        "for entry in sources if kind is MoveKind.WRITE_BACK else ():",
        example.test_the_source_of_a_promotion_stays_until_it_has_ended,
    ),
    "the source of a write-back may be evicted": Bug(
        Traffic,
        "begin",
        "for entry in sources:",
        "for entry in sources if kind is MoveKind.PROMOTION else ():",
        example.test_a_block_is_stored_again_while_its_old_slot_is_written_back,
    ),
    "a cancelled job does not wait for its transfers": Bug(
        C, "cancel", "self._jobs.fail(job", "job.running.clear(); self._jobs.fail(job", any_order
    ),
    "a cancelled store takes others with it": Bug(
        Jobs,
        "_abandon",
        "if heir is not None",
        "if False",
        example.test_a_job_that_waits_for_a_store_that_is_cancelled_stores_it,
    ),
    "who waits for a store is not told that it failed": Bug(
        Jobs, "lost", "self.waiting(entry)", "[]", example.test_a_job_that_waits_for_a_store_that_fails_fails
    ),
    "who waits for a store is not told that it is done": Bug(
        C,
        "_written_or_lost",
        "for job in self._jobs.waiting(entry):",
        "for job in []:",
        example.test_two_that_store_the_same_store_it_once,
    ),
    "a load waits for ever for a slot": Bug(
        C, "moves", "while not moves and", "while False and", example.test_a_load_fails_that_could_only_wait_for_pins
    ),
    "a job's time runs out and nobody notices": Bug(
        Jobs, "time_out", "now >= job.until", "False", example.test_a_job_that_is_not_carried_out_in_time_ends
    ),
    "a block is stored twice": Bug(
        C,
        "store",
        "if entry is None:",
        "if entry is None or entry.state is EntryState.WRITING:",
        example.test_two_that_store_the_same_store_it_once,
    ),
    "a block is promoted twice": Bug(
        Cutting, "_next_absent", "if entry is None:", "if True:", example.test_two_loads_promote_a_block_once
    ),
    "budgets are not kept": Bug(Traffic, "fits", "under_way + more <= self.limits[kind]", "True", any_order),
    "a slot is taken twice": Bug(
        Runs,
        "cut",
        "start + length, end - start - length",
        "start, end - start",
        part.test_neighbours_are_handed_out_together,
    ),
    "chunks overlap": Bug(
        TierSlots,
        "bounds",
        "-(-chunk * self.chunk_bytes // size)",
        "chunk * self.chunk_bytes // size",
        part.test_chunks_that_no_size_divides_do_not_overlap,
    ),
    "a chunk never goes back": Bug(
        TierSlots, "put", "length == hi - lo", "False", part.test_a_chunk_goes_back_with_its_last_slot
    ),
    "a size of record keeps what another has no room for": Bug(
        T, "_evict", "self._evict_chunk(kind, victim.used)", "0", example.test_a_size_of_record_follows_what_is_used
    ),
    "a scan evicts what is used": Bug(
        S3Fifo,
        "choose",
        "len(self._small) * self.SMALL < len(self)",
        "True",
        part.test_s3_fifo_keeps_what_is_used_again_through_a_scan,
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (bug.noticed_by is any_order)) for n, bug in PLANTED.items()]
)
def test_a_planted_bug_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = PLANTED[name]
    plant(bug.owner, bug.method, bug.before, bug.after, monkeypatch)
    with pytest.raises((AssertionError, AttributeError, KeyError, LocalProtocolError, ValueError)):
        bug.noticed_by()
