"""The catalogue: which keys are where, which slot a store gets, what is evicted, and what is brought back.

It decides and carries nothing. Jobs come in (`store`, `load`, `cancel`), `moves` says which transfers are to be
carried out next, and `ended` tells how one ended; `news` says what became of jobs. It holds no bytes and no thread,
and reads no clock. So it may live beside an engine or in a scheduler's process whose workers carry the moves out: the
slots are the same on all of them.

In which order: after calls and ends of moves, first `moves`, then `forgotten` (what an index on disk must no longer say
of slots, some of which those moves write anew: tell it before they are begun), then `news`.

What goes first
---------------

Loads and stores share the link to the device, promotions and write-backs the file tier; of each two the first is
served first, within budgets of bytes that are under way. At least one move of a kind may always run, and what is in
doubt counts for no budget. A load takes a slot of host memory per block that is promoted, and lets go of it when that
block has reached the device: so a load of any length passes through any number of slots, and what it has yet to load
is held, so that its own promotions do not evict it. If nothing runs, and no slot can be had for a promotion, only pins
hold them, and waiting would be for ever: then the load fails.

A prompt's blocks are used, and so kept, in order from its end: what is evicted first is the end of a chain. A block
whose predecessor is gone is found by no lookup, is not used any more, and leaves."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from asynckv.arguments import integer, shown, text
from asynckv.core.events import Ending
from asynckv.errors import ConfigError, LocalProtocolError
from asynckv.offload.entry import Entry, EntryEvent, EntryState
from asynckv.offload.found import ABSENT, IN_FILE, STORING, Found, longest
from asynckv.offload.job import (
    Item,
    Job,
    JobEnded,
    JobEvent,
    JobKind,
    JobOutcome,
    JobReturned,
    JobState,
    Move,
    MoveKind,
    Piece,
)
from asynckv.offload.keys import StoredGroup, as_hashes, block_hashes, needed
from asynckv.offload.tier import Place, Tier
from asynckv.offload.traffic import Budgets, Running, Traffic

__all__ = ["Budgets", "Catalogue"]

MAX_NAME = 16 * 1024
"""Characters of a job's id, and of a pin's name."""

FEW = 256
"""Blocks that are looked up together: most prompts are not stored, and of these no more is looked at."""

Positions = Sequence[Iterable[int]]


class Catalogue:
    """All that is stored in one rank's tiers, and what is under way.

    Args:
        groups: What is stored, see `asynckv.offload.keys.stored_groups`.
        hash_tokens: Tokens per hash.
        host_bytes: Size of the host tier.
        file_bytes: Size of the file tier; 0 if there is none.
        policy: Who is evicted, by name, see `asynckv.offload.eviction`.
        budgets: How much may be under way.

    Raises:
        ConfigError: A policy that does not exist, a tier that is too small, or a group that hashes cannot name.
    """

    def __init__(
        self,
        groups: Sequence[StoredGroup],
        hash_tokens: int,
        host_bytes: int,
        file_bytes: int = 0,
        *,
        policy: str = "lru",
        budgets: Budgets = Budgets(),  # noqa: B008  # frozen
    ) -> None:
        self.groups = tuple(groups)
        self.hash_tokens = integer("hash_tokens", hash_tokens, 1, error=ConfigError)
        for group in self.groups:
            if group.block_size % hash_tokens:
                raise ConfigError(
                    f"group {shown(group.name)} has blocks of {group.block_size} tokens, and hashes cover {hash_tokens}"
                )
        # What is being written to files cannot be evicted: a disk that stalls must not keep new blocks out.
        budgets = replace(budgets, write_back_bytes=min(budgets.write_back_bytes, host_bytes // 4))
        self.host = Tier(Place.HOST, self.groups, host_bytes, policy)
        self.file = Tier(Place.FILE, self.groups, file_bytes, policy) if file_bytes else None
        self.jobs: dict[str, Job] = {}
        self.pins: dict[str, list[tuple[Tier, Entry]]] = {}
        self.wake_at = math.inf
        """When to call `moves` again though nothing else happens."""
        self.counts = dict.fromkeys(("lookups", "hits", "write_backs_without_room", "corrupt_or_unread"), 0)
        self.traffic = Traffic(budgets)
        self._news: list[JobEnded | JobReturned] = []
        self._tick = 0
        self._deadline = math.inf
        """Of some job the first, or before: jobs are looked at then, and not in every turn."""

    # -- questions ---------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[str | bytes]) -> Found:
        """Say how long the stored prefix of a prompt is, and for what a load of it would wait. Changes nothing."""
        keys = as_hashes(hashes)
        self.counts["lookups"] += 1
        codes = [np.zeros(0, np.uint8)] * len(self.groups)
        most = len(keys) * self.hash_tokens
        # Groups that need every block end at the first gap, and nobody needs what others have beyond it.
        for g in sorted(range(len(self.groups)), key=lambda g: self.groups[g].is_state or self.groups[g].window > 0):
            group = self.groups[g]
            is_chain = not (group.is_state or group.window)
            mine = block_hashes(keys, group.block_size, self.hash_tokens)[: most // group.block_size]
            codes[g] = self._chain(g, mine) if is_chain else self._codes(g, mine)
            if is_chain:
                most = min(most, len(codes[g]) * group.block_size)
        found = longest(self.groups, codes)
        self.counts["hits"] += found.tokens > 0
        return found

    def _chain(self, g: int, hashes: list[bytes]) -> npt.NDArray[np.uint8]:
        """Say what is known of each block up to the first that is absent."""
        parts = [np.zeros(0, np.uint8)]
        for first in range(0, len(hashes), FEW):
            parts.append(self._codes(g, hashes[first : first + FEW]))
            if not parts[-1].all():
                parts[-1] = parts[-1][: int(parts[-1].argmin())]
                break
        return np.concatenate(parts)

    def _codes(self, g: int, hashes: list[bytes]) -> npt.NDArray[np.uint8]:
        """Say of each block what is known; no entry is looked at, for each would be a miss of the processor's cache."""
        host, writing = self.host.index[g], self.host.writing[g]
        codes = np.fromiter(map(host.__contains__, hashes), np.uint8, len(hashes))
        if writing:
            codes[[i for i, key in enumerate(hashes) if key in writing]] = STORING
        if self.file is not None:
            file, writing = self.file.index[g], self.file.writing[g]
            absent = np.flatnonzero(codes == ABSENT)
            rest = [hashes[i] for i in absent.tolist()]
            codes[absent] = IN_FILE * np.fromiter(map(file.__contains__, rest), np.uint8, len(rest))
            if writing:
                codes[[i for i in absent.tolist() if hashes[i] in writing]] = ABSENT
        return codes

    def statistics(self) -> dict[str, int]:
        """Gauges and counters, for metrics."""
        running = self.traffic.running.values()
        said = {f"{kind}_bytes_under_way": n for kind, n in self.traffic.under_way.items()}
        said |= {"jobs": len(self.jobs), "pins": len(self.pins), "moves": len(running)}
        doubtful = [one.move for one in running if one.is_doubtful]
        said |= {"moves_in_doubt": len(doubtful), "blocks_in_doubt": sum(move.num_blocks for move in doubtful)}
        for tier in self._tiers():
            said[f"{tier.place}_blocks"] = sum(map(len, tier.index))
            said[f"{tier.place}_bytes"] = sum(
                len(index) * group.record_bytes for index, group in zip(tier.index, self.groups, strict=True)
            )
            said[f"{tier.place}_leaving"] = len(tier.leaving)
            said[f"{tier.place}_evicted"] = tier.evicted
        return said | {"lost_before_write_back": self.host.lost, "to_write_back": len(self.host.onward)} | self.counts

    def held(self) -> dict[str, int]:
        """Return how many blocks each job and each pin holds, in any tier."""
        return {name: len(job.holding) for name, job in self.jobs.items()} | {
            name: len(entries) for name, entries in self.pins.items()
        }

    def _tiers(self) -> Iterator[Tier]:
        yield self.host
        if self.file is not None:
            yield self.file

    # -- calls -------------------------------------------------------------------------------------

    def store(
        self,
        job_id: str,
        hashes: Sequence[str | bytes],
        tokens: int | None = None,
        *,
        first_token: int = 0,
        positions: Positions | None = None,
        until: float = math.inf,
    ) -> None:
        """Store blocks of a request; `news` says how it ended.

        What is stored already is not stored again, and what another job is storing is waited for. Blocks for which
        there is no room are left out, from the end of each group.

        Args:
            hashes: Of the whole prompt, from its start.
            tokens: Where the prefix ends; all that is hashed if left out.
            first_token: Where it begins to be of interest.
            positions: Per group, the blocks to store; what `needed` says if left out.
            until: When what has not been posted is given up.

        Raises:
            LocalProtocolError: The job is known already, or an argument makes no sense; nothing was changed.
        """
        mine, where = self._request(job_id, hashes, tokens, first_token, positions)
        self._tick_on()
        used = [self._used(self.host, mine, where)]
        used += [self._used(self.file, mine, where)] if self.file else []
        self.host.spare(used[0])
        job = self.jobs[job_id] = Job(job_id, JobKind.STORE, until)
        self._deadline = min(self._deadline, until)
        for g, wanted in enumerate(where):
            new: list[int] = []
            for position in wanted:
                entry = self.host.index[g].get(mine[g][position])
                if entry is None:
                    new.append(position)
                elif entry.state is EntryState.READY:
                    job.known += 1
                else:
                    self._wait(job, entry, position)
            made = self.host.make(g, [mine[g][position] for position in new], spare=self._tick)
            for entry, position in zip(made, new, strict=False):
                job.todo.append(Item(position, entry))
                self._hold(job, entry)
            job.missing += [(g, position) for position in new[len(made) :]]
        # After what is new, so that it stays longer than what goes on from it.
        for tier, entries in zip(self._tiers(), used, strict=True):
            tier.use(entries)
        self._settle(job)

    def load(
        self,
        job_id: str,
        hashes: Sequence[str | bytes],
        tokens: int | None = None,
        *,
        first_token: int = 0,
        positions: Positions | None = None,
        until: float = math.inf,
    ) -> None:
        """Load blocks of a request; `news` says how it ended.

        What is in the file tier alone is promoted first, and what is being stored is waited for. If a block is stored
        nowhere, nothing is moved.

        Args:
            hashes: Of the whole prompt, from its start.
            tokens: Where the prefix ends, as `lookup` said; all that is hashed if left out.
            first_token: The caller has what is before it.
            positions: Per group, the blocks to load; what `needed` says if left out.
            until: When what has not been posted is given up.

        Raises:
            LocalProtocolError: The job is known already, or an argument makes no sense; nothing was changed.
        """
        mine, where = self._request(job_id, hashes, tokens, first_token, positions)
        job = self.jobs[job_id] = Job(job_id, JobKind.LOAD, until)
        self._deadline = min(self._deadline, until)
        found: list[tuple[int, Entry | None, bool]] = []
        for g, wanted in enumerate(where):
            file = self.file.index[g] if self.file else {}
            for position in wanted:
                key = mine[g][position]
                entry = self.host.index[g].get(key)
                is_file = entry is None
                if is_file and (entry := file.get(key)) is not None and entry.state is not EntryState.READY:
                    entry = None
                if entry is None:
                    job.missing.append((g, position))
                found.append((position, entry, is_file))
        if job.missing:
            self._fail(job, JobOutcome.MISSING, f"{len(job.missing)} of {len(found)} blocks are not stored")
            return
        self._use(mine, where)
        for position, entry, is_file in found:
            assert entry is not None
            if is_file:
                self._hold(job, entry)
                job.absent.append(Item(position, entry))
            elif entry.state is EntryState.READY:
                self._hold(job, entry)
                job.todo.append(Item(position, entry))
            else:
                self._wait(job, entry, position)
        self._settle(job)

    def cancel(self, job_id: str) -> bool:
        """Give a job up: what was posted is waited for. False if there is no such job, or not any more."""
        job = self.jobs.get(job_id)
        if job is None:
            return False
        was_running = job.state is JobState.RUNNING
        job.receive(JobEvent.CANCELLED, JobOutcome.CANCELLED)
        if was_running:
            self._abandon(job, "the job that stored it was cancelled")
        self._settle(job)
        return True

    def touch(self, hashes: Sequence[str | bytes], tokens: int | None = None) -> None:
        """Note that a prompt's blocks were used, so that they stay longer."""
        mine, where = self._prefix(hashes, tokens, 0, None)
        self._use(mine, where)

    def pin(
        self,
        name: str,
        hashes: Sequence[str | bytes],
        tokens: int | None = None,
        *,
        first_token: int = 0,
        positions: Positions | None = None,
    ) -> tuple[Piece, ...]:
        """Keep what is stored of a prefix until `unpin`; returns what is in host memory, by group.

        What is in the file tier alone stays there, and what is not stored yet is not pinned.

        Raises:
            LocalProtocolError: There is a pin or a job of that name.
        """
        mine, where = self._request(name, hashes, tokens, first_token, positions)
        self._use(mine, where)
        held = self.pins[name] = []
        pieces = []
        for g, wanted in enumerate(where):
            here: list[Item] = []
            for position in wanted:
                for tier in self._tiers():
                    entry = tier.index[g].get(mine[g][position])
                    if entry is not None and entry.state is EntryState.READY:
                        entry.hold(name)
                        held.append((tier, entry))
                        if tier is self.host:
                            here.append(Item(position, entry))
                        break
            if here:
                slots = tuple(item.entry.slot for item in here)
                positions_here = tuple(item.position for item in here)
                pieces.append(Piece(g, tuple(item.entry.hash for item in here), positions_here, slots, ()))
        return tuple(pieces)

    def unpin(self, name: str) -> bool:
        """Let go of what was pinned; False if there is no pin of that name."""
        held = self.pins.pop(name, None)
        if held is None:
            return False
        for tier, entry in held:
            tier.let_go(entry, name)
        return True

    def evict(self, hashes: Sequence[str | bytes] | None = None, place: Place | None = None) -> int:
        """Let nobody find a prompt's blocks any more, or any block; returns how many there were.

        What is being read is read to its end. With a `place` only what that tier has is evicted.
        """
        doomed: list[tuple[Tier, Entry]] = []
        keys = None if hashes is None else as_hashes(hashes)
        for tier in self._tiers() if place is None else (t for t in self._tiers() if t.place is place):
            for index, group in zip(tier.index, self.groups, strict=True):
                if keys is None:
                    doomed += [(tier, entry) for entry in index.values()]
                else:
                    mine = dict.fromkeys(block_hashes(keys, group.block_size, self.hash_tokens))
                    doomed += [(tier, entry) for key in mine if (entry := index.get(key)) is not None]
        for tier, entry in doomed:
            was_writing = entry.state is EntryState.WRITING
            tier.drop(entry)
            if was_writing and tier is self.host:
                self._lost(entry, JobOutcome.MISSING, "it was evicted while it was written")
        return len(doomed)

    def recover(self, found: Iterable[tuple[int, int, bytes]]) -> int:
        """Take in `(group, slot, hash)` that the file tier found in its index, the least recently used first.

        Returns how many were taken in. What was not is among what is `forgotten`.

        Raises:
            LocalProtocolError: There is no file tier, or it is not empty.
        """
        if self.file is None or any(True for _ in self.file.entries()):
            raise LocalProtocolError("only an empty file tier takes in what was recovered")
        return self.file.recover((g, slot, key) for g, slot, key in found if 0 <= g < len(self.groups))

    def switch_off(self, *, reads: bool = True) -> None:
        """Write nothing to the file tier any more; unless it can still be read, what it has is not found, either."""
        if self.file is None or self.file.is_off:
            return
        self.file.takes_more, self.file.is_off = False, reads
        self.host.onward.clear()
        if not reads:
            return
        for entry in [entry for index in self.file.index for entry in index.values()]:
            self.file.drop(entry)
        for job in [job for job in self.jobs.values() if job.absent]:
            self._fail(job, JobOutcome.MISSING, "the file tier was switched off")

    # -- what is to be done ------------------------------------------------------------------------

    def forgotten(self) -> list[tuple[int, int]]:
        """Return `(group, slot)` of the file tier that hold nothing any more, since the last call."""
        if self.file is None:
            return []
        freed, self.file.freed = self.file.freed, []
        return freed

    def news(self) -> list[JobEnded | JobReturned]:
        """Return what became of jobs, since the last call."""
        news, self._news = self._news, []
        return news

    def moves(self, now: float) -> list[Move]:
        """Return what is to be carried out next, within the budgets; each is told of by `ended`."""
        self.wake_at = math.inf
        self._time_out(now)
        promotions = list(self._promote())
        moves = [*self._cut_all(MoveKind.LOAD, JobKind.LOAD), *self._cut_all(MoveKind.STORE, JobKind.STORE)]
        moves += promotions
        moves += self._write_back(now)
        if not moves and self.traffic.is_idle():
            for job in [job for job in self.jobs.values() if job.absent]:
                self._fail(job, JobOutcome.NO_ROOM, self._why_no_room())
        return moves

    def ended(self, move_id: int, ending: Ending, cause: str = "", lost: Collection[int] = ()) -> None:
        """Note how a move ended; after `IN_DOUBT` another ending may follow, and frees what it touches.

        Args:
            move_id: Which one.
            ending: How.
            cause: For people.
            lost: Of a move that is `DONE`, blocks that are not, counted over its pieces: a file had them corrupt.

        Raises:
            LocalProtocolError: No such move is under way.
        """
        running = self.traffic.get(move_id)
        if ending is Ending.IN_DOUBT:
            if not running.is_doubtful:
                self._doubt(running, cause)
            return
        self.traffic.end(running)
        is_done = ending is Ending.DONE
        end = {
            MoveKind.LOAD: self._load_ended,
            MoveKind.STORE: self._store_ended,
            MoveKind.PROMOTION: self._promotion_ended,
            MoveKind.WRITE_BACK: self._write_back_ended,
        }[running.move.kind]
        if is_done and running.move.kind is MoveKind.PROMOTION:
            for i in lost:  # of a move that failed as a whole, being late for one, nothing is known: they may be good
                assert self.file is not None
                self.counts["corrupt_or_unread"] += 1
                self.file.drop(running.sources[i])
        for i in range(len(running.items)):
            end(running, i, is_done and i not in lost, cause)
        job = running.job
        if job is not None:
            job.running.discard(move_id)
            job.doubtful.discard(move_id)
            if not is_done or lost:
                self._fail(job, JobOutcome.FAILED, cause or f"a transfer ended {ending}")
            else:
                self._settle(job)

    # -- how moves end -----------------------------------------------------------------------------

    def _load_ended(self, running: Running, i: int, is_good: bool, cause: str) -> None:
        (position, entry), job, move_id = running.items[i], running.job, running.move.move_id
        assert job is not None
        if not running.is_doubtful:
            if is_good:
                job.blocks += 1
            else:
                job.missing.append((entry.group, position))
            self._let_go(job, self.host, entry)
        self.host.end(entry, move_id)

    def _store_ended(self, running: Running, i: int, is_good: bool, cause: str) -> None:
        (position, entry), job = running.items[i], running.job
        assert job is not None
        is_kept = self._written_or_lost(entry, is_good, cause)
        if not running.is_doubtful:
            if is_kept:
                job.blocks += 1
            else:
                job.missing.append((entry.group, position))
        self.host.end(entry, running.move.move_id)

    def _promotion_ended(self, running: Running, i: int, is_good: bool, cause: str) -> None:
        assert self.file is not None
        entry, source, move_id = running.items[i].entry, running.sources[i], running.move.move_id
        self._written_or_lost(entry, is_good, cause or "the file tier has it no more, or it was corrupt")
        self.file.end(source, move_id)
        self.host.end(entry, move_id)

    def _write_back_ended(self, running: Running, i: int, is_good: bool, cause: str) -> None:
        assert self.file is not None
        entry, source, move_id = running.items[i].entry, running.sources[i], running.move.move_id
        if is_good:
            self.file.written(entry)
        else:
            self.file.failed(entry, EntryEvent.FAILED)
        self.file.end(entry, move_id)
        self.host.end(source, move_id)

    def _doubt(self, running: Running, cause: str) -> None:
        """Keep what a move touches, without counting on it any more."""
        self.traffic.doubt(running)
        move, job = running.move, running.job
        for position, entry in running.items:
            if move.kind is MoveKind.LOAD:
                assert job is not None
                self._let_go(job, self.host, entry)
            elif move.kind is MoveKind.WRITE_BACK:
                assert self.file is not None
                self.file.failed(entry, EntryEvent.DOUBTED)
            else:
                self.host.failed(entry, EntryEvent.DOUBTED)
                self._lost(entry, JobOutcome.FAILED, f"its transfer is in doubt: {cause}")
            if job is not None:
                job.missing.append((entry.group, position))
        if job is not None:
            job.running.discard(move.move_id)
            job.doubtful.add(move.move_id)
            self._fail(job, JobOutcome.FAILED, cause or "a transfer is in doubt")

    def _written_or_lost(self, entry: Entry, is_good: bool, cause: str) -> bool:
        """Note that a block of host memory was written, or was not; True if it can be found from now on."""
        if not is_good:
            self.host.failed(entry, EntryEvent.FAILED)
        elif self.host.written(entry):
            file = self.file
            if file is not None and file.takes_more and entry.hash not in file.index[entry.group]:
                self.host.onward[entry] = None
            for job in self._waiting(entry):
                position = job.waits.pop(entry)
                if job.kind is JobKind.LOAD:
                    job.todo.append(Item(position, entry))
                else:
                    job.blocks += 1
                    self._let_go(job, self.host, entry)
                    self._settle(job)
            return True
        self._lost(entry, JobOutcome.FAILED, cause)
        return False

    def _lost(self, entry: Entry, outcome: JobOutcome, cause: str) -> None:
        """Fail whoever waits for a block that will not be written."""
        for job in self._waiting(entry):
            if entry in job.waits:  # or it failed with one of the others, for whose blocks it waited, too
                job.missing.append((entry.group, job.waits.pop(entry)))
                self._let_go(job, self.host, entry)
                self._fail(job, outcome, cause)

    def _waiting(self, entry: Entry) -> list[Job]:
        jobs = (self.jobs.get(name) for name in sorted(entry.holders))
        return [job for job in jobs if job is not None and entry in job.waits]

    # -- jobs --------------------------------------------------------------------------------------

    def _request(
        self,
        name: str,
        hashes: Sequence[str | bytes],
        tokens: int | None,
        first_token: int,
        positions: Positions | None,
    ) -> tuple[list[list[bytes]], list[Sequence[int]]]:
        """Check a call's arguments; returns the keys of every group's blocks, and which are meant."""
        text("name", name, MAX_NAME, 1)
        if name in self.jobs or name in self.pins:
            raise LocalProtocolError(f"{shown(name)} names a job or a pin already")
        return self._prefix(hashes, tokens, first_token, positions)

    def _prefix(
        self, hashes: Sequence[str | bytes], tokens: int | None, first_token: int, positions: Positions | None
    ) -> tuple[list[list[bytes]], list[Sequence[int]]]:
        keys = as_hashes(hashes)
        if len(set(keys)) < len(keys):
            raise LocalProtocolError("a hash is there twice: each must cover all tokens before as well")
        most = len(keys) * self.hash_tokens
        tokens = most if tokens is None else integer("tokens", tokens, 0, most)
        integer("first_token", first_token)
        mine = [
            block_hashes(keys, group.block_size, self.hash_tokens)[: tokens // group.block_size]
            for group in self.groups
        ]
        if positions is None:
            return mine, [needed(group, first_token, tokens) for group in self.groups]
        if len(positions) != len(self.groups):
            raise LocalProtocolError(f"positions of {len(positions)} groups are given; there are {len(self.groups)}")
        where = [list(dict.fromkeys(wanted)) for wanted in positions]
        for group, wanted, of in zip(self.groups, where, mine, strict=True):
            for position in wanted:
                if type(position) is not int or not 0 <= position < len(of):
                    raise LocalProtocolError(
                        f"position {shown(position)} of group {shown(group.name)}: {tokens} tokens have "
                        f"{len(of)} blocks"
                    )
        return mine, list(where)

    def _use(self, mine: list[list[bytes]], where: list[Sequence[int]]) -> None:
        """Note that blocks were used, in all tiers, each chain from its end; those before the first are used, too."""
        self._tick_on()
        for tier in self._tiers():
            tier.use(self._used(tier, mine, where))

    def _tick_on(self) -> None:
        self._tick += 1
        for tier in self._tiers():
            tier.tick = self._tick

    def _used(self, tier: Tier, mine: list[list[bytes]], where: list[Sequence[int]]) -> list[Entry]:
        """Return the blocks of a prompt that a tier has, each chain from its end."""
        found: list[Entry] = []
        for g, group in enumerate(self.groups):
            index, keys = tier.index[g], mine[g]
            if not (group.is_state or group.window):
                used = reversed(keys)
            else:
                used = (keys[position] for position in reversed(where[g]))
            found += [entry for key in used if (entry := index.get(key)) is not None]
        return found

    def _hold(self, job: Job, entry: Entry) -> None:
        entry.hold(job.job_id)
        job.holding.add(entry)

    def _wait(self, job: Job, entry: Entry, position: int) -> None:
        self._hold(job, entry)
        job.waits[entry] = position

    def _let_go(self, job: Job, tier: Tier, entry: Entry) -> None:
        job.holding.discard(entry)
        tier.let_go(entry, job.job_id)

    def _fail(self, job: Job, outcome: JobOutcome, cause: str) -> None:
        if job.state in (JobState.RUNNING, JobState.DRAINING):
            was_running = job.state is JobState.RUNNING
            job.receive(JobEvent.FAILED, outcome, cause)
            if was_running:
                self._abandon(job, f"the job that stored it failed: {cause}")
        self._settle(job)

    def _abandon(self, job: Job, cause: str) -> None:
        """Let go of all that was not posted; what others wait for is theirs to store, if they can."""
        todo, waits, absent = job.todo, job.waits, job.absent
        job.todo, job.waits, job.absent = deque(), {}, deque()
        for position, entry in absent:
            assert self.file is not None
            job.missing.append((entry.group, position))
            self._let_go(job, self.file, entry)
        for entry, position in waits.items():
            job.missing.append((entry.group, position))
            self._let_go(job, self.host, entry)
        for position, entry in todo:
            job.missing.append((entry.group, position))
            if job.kind is JobKind.STORE and entry.state is EntryState.WRITING:
                heir = next((other for other in self._waiting(entry) if other.kind is JobKind.STORE), None)
                if heir is not None:
                    heir.todo.append(Item(heir.waits.pop(entry), entry))
                else:
                    self.host.drop(entry)
                    self._lost(entry, JobOutcome.MISSING, cause)
            self._let_go(job, self.host, entry)

    def _settle(self, job: Job) -> None:
        told = job.settle(len(self.groups))
        if told is not None:
            self._news.append(told)
        if job.is_over:
            self.jobs.pop(job.job_id, None)

    def _time_out(self, now: float) -> None:
        if not self.jobs:
            self._deadline = math.inf
        if now >= self._deadline:
            self._deadline = math.inf
            for job in list(self.jobs.values()):
                if job.until < math.inf and job.state is JobState.RUNNING and (job.todo or job.waits or job.absent):
                    if now >= job.until:
                        self._fail(job, JobOutcome.TIMEOUT, "it was not carried out in time")
                    else:
                        self._deadline = min(self._deadline, job.until)
        self.wake_at = min(self.wake_at, self._deadline)

    def _why_no_room(self) -> str:
        held = sum(bool(entry.holders) for entry in self.host.entries())
        return (
            f"no slot of host memory can be had: {held} blocks are held by {len(self.pins)} pins and leases "
            f"({', '.join(shown(name) for name in list(self.pins)[:4])}); unpin some, or give the host tier more bytes"
        )

    # -- cutting moves -----------------------------------------------------------------------------

    def _cut_all(self, kind: MoveKind, of: JobKind) -> Iterator[Move]:
        """Cut moves from jobs of a kind, one of each job in turn."""
        jobs = [job for job in self.jobs.values() if job.kind is of and job.todo]
        while jobs:
            for job in jobs:
                items, num_bytes = [], 0
                while job.todo:
                    entry = job.todo[0].entry
                    size = self.groups[entry.group].record_bytes
                    if not self.traffic.fits(kind, num_bytes, size):
                        break
                    item = job.todo.popleft()
                    if of is JobKind.STORE and entry.state is not EntryState.WRITING:
                        job.missing.append((entry.group, item.position))  # evicted before it was stored
                        self._let_go(job, self.host, entry)
                        continue
                    items.append(item)
                    num_bytes += size
                if items:
                    yield self._post(kind, job, items, num_bytes)
                elif job.todo:
                    return
                else:
                    self._settle(job)
            jobs = [job for job in jobs if job.todo]

    def _post(self, kind: MoveKind, job: Job, items: list[Item], num_bytes: int) -> Move:
        """Hand out a move between the device and host memory."""
        move = self.traffic.begin(kind, job, items, [], num_bytes)
        job.running.add(move.move_id)
        if kind is MoveKind.STORE:  # from now on the move keeps the slots
            for _, entry in items:
                self._let_go(job, self.host, entry)
        return move

    def _promote(self) -> Iterator[Move]:
        """Find slots for what loads need from the file tier, the first job first."""
        for job in [job for job in self.jobs.values() if job.absent]:
            while job.absent:
                items, num_bytes = self._next_absent(job)
                if not items:
                    break
                group = items[0].entry.group
                made = self.host.make(group, [item.entry.hash for item in items])
                job.absent.extendleft(reversed(items[len(made) :]))
                if not made:
                    break
                sources = [item.entry for item in items[: len(made)]]
                for item, entry in zip(items, made, strict=False):
                    self._wait(job, entry, item.position)
                num_bytes = len(made) * self.groups[group].record_bytes
                todo = [Item(item.position, entry) for item, entry in zip(items, made, strict=False)]
                yield self.traffic.begin(MoveKind.PROMOTION, job, todo, sources, num_bytes)
                assert self.file is not None
                for entry in sources:
                    self._let_go(job, self.file, entry)

    def _next_absent(self, job: Job) -> tuple[list[Item], int]:
        """Take blocks of one group that a load needs from the file tier, and that nobody is promoting."""
        assert self.file is not None
        items: list[Item] = []
        num_bytes = 0
        while job.absent and (not items or job.absent[0].entry.group == items[0].entry.group):
            position, source = job.absent[0]
            size = self.groups[source.group].record_bytes
            entry = self.host.index[source.group].get(source.hash)
            if entry is None:
                if not self.traffic.fits(MoveKind.PROMOTION, num_bytes, size):
                    break
                items.append(job.absent.popleft())
                num_bytes += size
                continue
            job.absent.popleft()
            if entry.state is EntryState.READY:
                self._hold(job, entry)
                job.todo.append(Item(position, entry))
            else:
                self._wait(job, entry, position)
            self._let_go(job, self.file, source)
        return items, num_bytes

    def _write_back(self, now: float) -> Iterator[Move]:
        """Copy to the file tier what has been in host memory for longest and is not there."""
        if self.file is None or not self.file.takes_more:
            return
        kind, onward = MoveKind.WRITE_BACK, self.host.onward
        while onward and self.traffic.fits(kind, 0, self._size(next(iter(onward)))):
            if (when := self.traffic.write_back_at(now)) > now:
                self.wake_at = min(self.wake_at, when)
                return
            chosen: list[Entry] = []
            num_bytes = 0
            for entry in onward:
                if not self.traffic.fits(kind, num_bytes, self._size(entry)):
                    break
                chosen.append(entry)
                num_bytes += self._size(entry)
            by_group: dict[int, list[Entry]] = {}
            for entry in chosen:
                del onward[entry]
                if entry.hash not in self.file.index[entry.group]:
                    by_group.setdefault(entry.group, []).append(entry)
            items, sources, num_bytes = [], [], 0
            for g, entries in by_group.items():
                made = self.file.make(g, [entry.hash for entry in entries])
                self.counts["write_backs_without_room"] += len(entries) - len(made)
                items += [Item(0, entry) for entry in made]
                sources += entries[: len(made)]
                num_bytes += len(made) * self.groups[g].record_bytes
            if not items:
                continue
            self.traffic.wrote_back(num_bytes)
            yield self.traffic.begin(kind, None, items, sources, num_bytes)

    def _size(self, entry: Entry) -> int:
        return self.groups[entry.group].record_bytes

    # -- audits ------------------------------------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """Recount everything; a list of what does not add up."""
        wrong = [text for tier in self._tiers() for text in tier.audit()] + self.traffic.audit()
        touched: dict[Entry, set[int]] = {}
        to_write = {item.entry for job in self.jobs.values() if job.kind is JobKind.STORE for item in job.todo}
        for move_id, running in self.traffic.running.items():
            for entry in [*(item.entry for item in running.items), *running.sources]:
                touched.setdefault(entry, set()).add(move_id)
        holders: dict[Entry, set[str]] = {}
        for job in self.jobs.values():
            for entry in job.holding:
                holders.setdefault(entry, set()).add(job.job_id)
            if job.holding != {item.entry for item in (*job.todo, *job.absent)} | set(job.waits) | {
                item.entry
                for running in self.traffic.running.values()
                if running.job is job and running.move.kind is MoveKind.LOAD and not running.is_doubtful
                for item in running.items
            }:
                wrong.append(f"job {job.job_id!r} holds what it does not need, or does not hold what it needs")
        for name, held in self.pins.items():
            for _, entry in held:
                holders.setdefault(entry, set()).add(name)
        known = {entry for tier in self._tiers() for entry in tier.entries()}
        for entry in known | set(touched) | set(holders):
            name = f"slot {entry.slot} of group {entry.group} ({entry.state})"
            if entry not in known:
                wrong.append(f"{name} is in no tier, and is still touched or held")
            if entry.moves != touched.get(entry, set()):
                wrong.append(f"{name}: moves {set(entry.moves)} are noted, and {touched.get(entry)} run")
            if entry.holders != holders.get(entry, set()):
                wrong.append(f"{name}: {set(entry.holders)} are noted, and {holders.get(entry)} hold it")
            if entry.state is EntryState.WRITING and not entry.moves and entry not in to_write:
                wrong.append(f"{name}: nobody writes it")
        return wrong
