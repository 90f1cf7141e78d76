"""Compares what an offload keeps with what is under way; everything that does not add up is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from asynckv.errors import AsyncKVError
from asynckv.offload.catalogue import Catalogue
from asynckv.offload.entry import Entry, EntryState
from asynckv.offload.eviction import Policy, S3Fifo
from asynckv.offload.job import JobKind, MoveKind
from asynckv.offload.slots import TierSlots
from asynckv.offload.tier import Tier
from asynckv.tiers.offload import Offload


def check(offload: Offload) -> None:
    """Raise `AsyncKVError` if what is kept and what is under way contradict each other."""
    mover = offload._mover
    wrong = [text for shelf in mover.shelves for text in audit(shelf.catalogue)]
    ledger = mover._driver.core.ledger
    idle = sorted(job_id for job_id, job in mover.jobs.items() if job.ids and ledger.get(job_id) is None)
    wrong += [f"job {job_id} holds no blocks" for job_id in idle]
    if wrong:
        raise AsyncKVError("integrity: " + "; ".join(wrong))


def audit(catalogue: Catalogue) -> list[str]:
    """Say what does not add up in a catalogue."""
    tiers, running, jobs = list(catalogue._tiers()), catalogue.traffic.running, catalogue.jobs.values()
    wrong = [text for tier in tiers for text in _tier(tier)] + _traffic(catalogue) + _listed(catalogue)
    touched: dict[Entry, set[int]] = {}
    to_write = {item.entry for job in jobs if job.kind is JobKind.STORE for item in job.todo}
    for move_id, one in running.items():
        for entry in [*(item.entry for item in one.items), *one.sources]:
            touched.setdefault(entry, set()).add(move_id)
    holders: dict[Entry, set[str]] = {}
    for job in jobs:
        reads = [
            item
            for one in running.values()
            if one.job is job and one.move.kind is MoveKind.LOAD and not one.is_doubtful
            for item in one.items
        ]
        for entry in (*(item.entry for item in (*job.todo, *job.absent, *reads)), *job.waits, *job.loaded):
            holders.setdefault(entry, set()).add(job.job_id)
    for name, held in catalogue.pins.items():
        for _, entry in held:
            holders.setdefault(entry, set()).add(name)
    known = {entry for tier in tiers for entry in entries_of(tier)}
    for entry in known | set(touched) | set(holders):
        name = f"slot {entry.slot} of group {entry.group} ({entry.state})"
        if entry not in known:
            wrong.append(f"{name} is in no tier, and is still touched or held")
        moves = touched.get(entry, set())
        if entry.holders != holders.get(entry, set()) | moves:
            wrong.append(f"{name}: {set(entry.holders)} are noted, {holders.get(entry)} hold it, and {moves} run")
        if entry.state is EntryState.WRITING and not moves and entry not in to_write:
            wrong.append(f"{name}: nobody writes it")
    return wrong


def _traffic(catalogue: Catalogue) -> list[str]:
    traffic, under_way = catalogue.traffic, dict.fromkeys(MoveKind, 0)
    for one in traffic.running.values():
        if not one.is_doubtful:
            under_way[one.move.kind] += one.move.num_bytes
    if under_way == traffic.under_way:
        return []
    return [f"{traffic.under_way} bytes are counted under way, and {under_way} are"]


def _listed(catalogue: Catalogue) -> list[str]:
    jobs, wrong = catalogue._jobs, list[str]()
    ready = {name for some in jobs.ready.values() for name in some}
    if ready != {job.job_id for job in jobs.by_name.values() if job.todo}:
        wrong.append(f"jobs {sorted(ready)} are listed as those that have something to be moved")
    if jobs.absent.keys() != {job.job_id for job in jobs.by_name.values() if job.absent}:
        wrong.append(f"jobs {sorted(jobs.absent)} are listed as those that need the file tier")
    return wrong


def entries_of(tier: Tier) -> list[Entry]:
    return [*(entry for index in tier.index for entry in index.values()), *_unfound(tier), *tier.leaving]


def _unfound(tier: Tier) -> list[Entry]:
    doomed = [entry for index in tier._doomed for entry in index.values() if entry.state is EntryState.READY]
    return doomed + [entry for others in tier.others for entry in others]


def _tier(tier: Tier) -> list[str]:
    wrong, taken = [], [set[int]() for _ in tier.slots.sizes]
    idle = Counter(entry.chunk for entry in entries_of(tier) if tier._is_idle(entry))
    if idle != Counter(dict(enumerate(tier._idle_in))) or tier._idle != [
        sum(n for chunk, n in idle.items() if tier.slots.owners[chunk] == kind) for kind in range(len(tier._idle))
    ]:
        wrong.append(f"{tier.place} counts {tier._idle} blocks as idle, and {sum(idle.values())} are")
    unfound = set(_unfound(tier))
    entries = [(True, entry) for index in tier.index for entry in index.values()]
    for is_found, entry in entries + [(False, entry) for entry in (*tier.leaving, *unfound)]:
        kind, name = entry.kind, f"{tier.place} slot {entry.slot} of group {entry.group}"
        if entry.slot in taken[kind]:
            wrong.append(f"{name} has two blocks")
        taken[kind].add(entry.slot)
        is_kept = is_found or entry in unfound
        if is_kept != (entry.state in (EntryState.WRITING, EntryState.READY)) or entry.state is EntryState.GONE:
            wrong.append(f"{name} is {entry.state}, and {'found' if is_found else 'not found'} by its key")
        if (entry in tier.policies[kind]) != is_kept:
            wrong.append(f"{name} is {entry.state}, which its policy does not know")
        if tier._is_idle(entry) and any(entry in aside for aside in _aside(tier.policies[kind])):
            wrong.append(f"{name} is idle, and its policy does not know")
        if is_found and (entry.hash in tier.writing[entry.group]) != (entry.state is EntryState.WRITING):
            wrong.append(f"{name} is {entry.state}, and is listed otherwise")
        if is_found and tier.index[entry.group].get(entry.hash) is not entry:
            wrong.append(f"{name} is found by another key than its own")
        if entry in tier.onward and entry.state is not EntryState.READY:
            wrong.append(f"{name} is {entry.state}, and is to be copied onward")
    if sum(map(len, tier.writing)) != sum(entry.state is EntryState.WRITING for _, entry in entries):
        wrong.append(f"{tier.place} lists blocks as being written that are not there")
    if sum(map(len, tier.policies)) != len(entries) + len(unfound):
        wrong.append(f"the policies of {tier.place} know blocks that are not there")
    if tier._is_mixed:
        placed = {entry for some in tier._in_chunk for entry in some}
        if placed != set(entries_of(tier)) or any(each not in tier._in_chunk[each.chunk] for each in placed):
            wrong.append(f"the blocks in the chunks of {tier.place} are not those that there are")
    return wrong + [f"{tier.place}: {text}" for text in audit_slots(tier.slots, taken)]


def _aside(policy: Policy[Entry]) -> Iterator[dict[Entry, int]]:
    for queue in (policy._small, policy._main) if isinstance(policy, S3Fifo) else (policy,):
        yield queue.aside


def audit_slots(slots: TierSlots, taken: Sequence[set[int]]) -> list[str]:
    """Compare with the slots that are taken, per size of record."""
    wrong = []
    for kind, some in enumerate(taken):
        size = slots.sizes[kind]
        free = {s for start, length in slots._runs[kind]._lengths.items() for s in range(start, start + length)}
        if both := free & some:
            wrong.append(f"slots {sorted(both)[:8]} of {size} bytes are free and taken")
        own = {s for c, owner in enumerate(slots.owners) if owner == kind for s in range(*slots.bounds(kind, c))}
        if lost := own - free - some:
            wrong.append(f"slots {sorted(lost)[:8]} of {size} bytes are neither free nor taken")
        if strange := (free | some) - own:
            wrong.append(f"slots {sorted(strange)[:8]} of {size} bytes lie in no chunk of theirs")
        if len(free) != slots._runs[kind].total:
            wrong.append(f"{len(free)} slots of {size} bytes are free, and {slots._runs[kind].total} are counted")
    return wrong
