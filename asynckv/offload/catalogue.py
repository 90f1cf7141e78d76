"""The catalogue: knows the place of every stored block, and decides on slots, evictions and moves.

Jobs come in (`store`, `load`, `cancel`). `moves` returns the transfers to carry out next, `ended` takes their results,
and `news` returns the results of jobs. The catalogue has no bytes, thread or clock, so it may live in a scheduler while
workers carry out the moves. Call first `moves`, then `forgotten` (records to delete from an index on disk before those
moves begin), then `news`.

Loads and stores share the link to the device, and promotions and write-backs share the file tier; within budgets loads
and promotions come first. A load takes a slot of host memory per promoted block, until the block has reached the
device. If nothing runs and only pins hold the slots, the load fails.

A prompt's blocks are marked as used from its end, so the end of a chain is evicted first. A block without its
predecessor is found by no lookup, so it is not used any more, and leaves.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from asynckv.arguments import integer, shown, text
from asynckv.core.events import Ending
from asynckv.errors import LocalProtocolError
from asynckv.offload.cutting import Cutting, WriteBack
from asynckv.offload.entry import Entry, EntryState
from asynckv.offload.found import Found, known, longest, make_room
from asynckv.offload.job import Item, JobEnded, JobKind, JobOutcome, JobReturned, Jobs, JobState, Move, MoveKind, Piece
from asynckv.offload.keys import StoredGroup, as_hashes, block_hashes, needed
from asynckv.offload.tier import Place, Tier
from asynckv.offload.traffic import BUDGETS, MOVE_BYTES, Running, Traffic, piece_of

MAX_NAME = 16 * 1024  # characters of a job's id, and of a pin's name
Positions = Sequence[Iterable[int]]


class Catalogue:
    """The stored blocks of one rank's tiers, and the moves in flight.

    Args:
        hash_tokens: Tokens that a hash covers; it divides the block size of every group (`stored_groups`).
        file_bytes: Size of the file tier; one of 0 bytes is off from the start.
        policy: Name of the eviction policy, see `asynckv.offload.eviction`.
        budgets: Most bytes in flight, by kind of move; those of `BUDGETS` for other kinds.
    """

    def __init__(
        self,
        groups: Sequence[StoredGroup],
        hash_tokens: int,
        host_bytes: int,
        file_bytes: int = 0,
        *,
        policy: str = "lru",
        budgets: Mapping[MoveKind, int] = BUDGETS,
        move_bytes: int = MOVE_BYTES,
    ) -> None:
        self.groups, self.hash_tokens = tuple(groups), hash_tokens
        # Blocks that are being written to files cannot be evicted, so a disk that stalls must not hold all of them.
        limits = {**BUDGETS, **budgets}
        limits[MoveKind.WRITE_BACK] = min(limits[MoveKind.WRITE_BACK], host_bytes // 4)
        self.host = Tier(Place.HOST, self.groups, host_bytes, policy)
        self.file = Tier(Place.FILE, self.groups, file_bytes, policy)
        self.wake_at = math.inf  # when to call `moves` again though nothing else happens
        self.corrupt_or_unread = 0
        self.traffic = Traffic(limits, move_bytes)
        self._jobs = Jobs(len(self.groups), self.host, self.file)
        self.jobs, self.pins = self._jobs.by_name, self._jobs.pins
        self._cutting = Cutting(self.groups, self.host, self.file, self._jobs, self.traffic)
        self._write_back = WriteBack(self.groups, self.host, self.file, self.traffic)

    # -- questions ---------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[str | bytes]) -> Found:
        """Return the length of a prompt's stored prefix, and the blocks that a load would wait for. Changes nothing."""
        by_index, keys = dict(enumerate(self.groups)), as_hashes(hashes)
        return longest(self.groups, known(by_index, self.hash_tokens, self.host, self.file, keys))

    def statistics(self) -> dict[str, int]:
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
        back = self._write_back
        return said | {
            "lost_before_write_back": self.host.lost,
            "to_write_back": len(self.host.onward),
            "write_backs_without_room": back.without_room,
            "write_backs_failed": back.failed,
            "write_backs_lost": back.lost,
            "corrupt_or_unread": self.corrupt_or_unread,
        }

    def _tiers(self, place: Place | None = None) -> Iterator[Tier]:
        return (tier for tier in (self.host, self.file) if tier.slots.num_bytes and place in (None, tier.place))

    # -- calls -------------------------------------------------------------------------------------

    def store(
        self,
        job_id: str,
        hashes: Sequence[str | bytes],
        tokens: int | None = None,
        *,
        positions: Positions | None = None,
        until: float = math.inf,
        is_prefix: bool = False,
    ) -> None:
        """Store blocks of a request; `news` returns the result.

        Stored blocks are not stored again. Blocks without room are left out, from the end of each group.

        Args:
            hashes: Hashes of the whole prompt, from its start.
            tokens: End of the prefix; the end of the hashes if left out.
            positions: Per group, the blocks to store; those of `needed` if left out.
            until: Time after which no further move is posted.
            is_prefix: If there is no room for all, store a beginning that a lookup of this prompt can use.

        Raises:
            LocalProtocolError: The job is known already, or an argument makes no sense; nothing was changed.
        """
        mine, where = self._request(job_id, hashes, tokens, positions)
        self._tick_on()
        used = [self._used(tier, mine, where) for tier in self._tiers()]
        self.host.spare(used[0])
        job = self._jobs.begin(job_id, JobKind.STORE, until)
        new: list[list[int]] = [[] for _ in where]
        for g, wanted in enumerate(where):
            for position in wanted:
                entry = self.host.index[g].get(mine[g][position])
                if entry is None:
                    new[g].append(position)
                elif entry.state is EntryState.READY:
                    job.known += 1
                else:
                    self._jobs.wait(job, position, entry)
        if is_prefix:
            new = [*map(sorted, new)]
            made = make_room(self.groups, self.host, self.file, mine, new, used[0])
        else:
            made = [
                self.host.make(g, [mine[g][position] for position in some], spares=True) for g, some in enumerate(new)
            ]
        for g, (entries, some) in enumerate(zip(made, new, strict=True)):
            self._jobs.do_all(job, list(map(Item, some, entries)))
            job.missing += [(g, position) for position in some[len(entries) :]]
        if job.missing:
            job.cause = self._why_not_stored(len(job.missing), sum(map(len, where)))
        # Used blocks come after the new ones, so that they stay longer than the blocks that follow them.
        for tier, entries in zip(self._tiers(), used, strict=True):
            tier.use(entries)
        self._jobs.settle(job)

    def load(
        self,
        job_id: str,
        hashes: Sequence[str | bytes],
        tokens: int | None = None,
        *,
        positions: Positions | None = None,
        until: float = math.inf,
        is_pinning: bool = False,
    ) -> None:
        """Load blocks of a request, with `store`'s arguments; `news` returns the result.

        Blocks that are only in the file tier are promoted first, and blocks that are being stored are waited for. If a
        block is stored nowhere, nothing is moved.

        Args:
            is_pinning: Keep loaded blocks in host memory; if all were loaded, until `unpin` of the job's id.
        """
        mine, where = self._request(job_id, hashes, tokens, positions)
        job = self._jobs.begin(job_id, JobKind.LOAD, until, is_pinning=is_pinning)
        found: list[tuple[int, Entry | None, bool]] = []
        for g, wanted in enumerate(where):
            file = self.file.index[g]
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
            self._jobs.fail(job, JobOutcome.MISSING, f"{len(job.missing)} of {len(found)} blocks are not stored")
            return
        self._use(mine, where)
        ready = list[Item]()
        for position, entry, is_file in found:
            assert entry is not None
            if is_file:
                self._jobs.fetch(job, position, entry)
            elif entry.state is EntryState.READY:
                ready.append(Item(position, entry))
            else:
                self._jobs.wait(job, position, entry)
        self._jobs.do_all(job, ready)
        self._jobs.settle(job)

    def cancel(self, job_id: str) -> bool:
        """Cancel a job, which then waits for its posted moves. Return False if there is no such job any more."""
        job = self.jobs.get(job_id)
        if job is None:
            return False
        self._jobs.fail(job, JobOutcome.CANCELLED)
        return True

    def touch(self, hashes: Sequence[str | bytes], tokens: int | None = None) -> None:
        mine, where = self._prefix(hashes, tokens, None)
        self._use(mine, where)

    def pin(
        self,
        name: str,
        hashes: Sequence[str | bytes],
        tokens: int | None = None,
        *,
        positions: Positions | None = None,
        place: Place | None = None,
    ) -> tuple[Piece, ...]:
        """Keep the stored blocks of a prefix (in one `place`) until `unpin`; return those in host memory, by group."""
        mine, where = self._request(name, hashes, tokens, positions)
        self._use(mine, where)
        held = self.pins[name] = []
        tiers, pieces = list(self._tiers(place)), []
        for g, wanted in enumerate(where):
            here: list[Item] = []
            for position in wanted:
                for tier in tiers:
                    entry = tier.index[g].get(mine[g][position])
                    if entry is not None and entry.state is EntryState.READY:
                        tier.hold(entry, name)
                        held.append((tier, entry))
                        if tier is self.host:
                            here.append(Item(position, entry))
                        break
            if here:
                pieces.append(piece_of(MoveKind.LOAD, here, []))
        return tuple(pieces)

    def unpin(self, name: str) -> bool:
        held = self.pins.pop(name, None)
        if held is None:
            return False
        for tier, entry in held:
            tier.let_go(entry, name)
        return True

    def evict(self, hashes: Sequence[str | bytes] | None = None, place: Place | None = None) -> tuple[int, int]:
        """Evict a prompt's blocks, or all; with a `place` only that tier's. Running reads go on to their end.

        Returns:
            The number of evicted blocks, and the number of blocks that stay because they are pinned.
        """
        keys, count, left = None if hashes is None else as_hashes(hashes), 0, 0
        pinned = {entry for held in self.pins.values() for _, entry in held if entry.state is EntryState.READY}
        for tier in self._tiers(place):
            if keys is None:
                count += sum(map(len, tier.index))
                writing = tier.drop_all(pinned)
                left += sum(map(len, tier.index))
            else:
                doomed = list[Entry]()
                for index, group in zip(tier.index, self.groups, strict=True):
                    mine = dict.fromkeys(block_hashes(keys, group.block_size, self.hash_tokens))
                    doomed += [entry for key in mine if (entry := index.get(key)) is not None]
                writing = [entry for entry in doomed if entry.state is EntryState.WRITING]
                count += len(doomed)
                left += len(pinned.intersection(doomed))
                for entry in doomed:
                    if entry not in pinned:
                        tier.drop(entry)
            for entry in writing if tier is self.host else ():
                self._jobs.lost(entry, JobOutcome.MISSING, "it was evicted while it was written")
        return count - left, left

    def recover(self, found: Iterable[tuple[int, int, bytes]], others: Iterable[tuple[int, int]] = ()) -> int:
        """Take in `(group, slot, hash)` of an empty file tier, least recently used first; return the number taken.

        Blocks that were not taken are `forgotten`. `others` are `(group, slot)` of other models' blocks, which are
        evicted first.
        """
        return self.file.recover(((g, slot, key) for g, slot, key in found if 0 <= g < len(self.groups)), others)

    def switch_off(self, *, reads: bool = True) -> None:
        """Write nothing to the file tier any more; with `reads` its blocks are not found any more either."""
        if self.file.is_off:
            return
        self.file.is_off = reads
        self._write_back.switch_off()
        if not reads:
            return
        self.file.drop_all()
        for job in list(self._jobs.absent.values()):
            self._jobs.fail(job, JobOutcome.MISSING, "the file tier was switched off")

    # -- what is to be done ------------------------------------------------------------------------

    def forgotten(self) -> list[tuple[int, int]]:
        """Return the `(group, slot)` of the file tier that became empty since the last call."""
        freed, self.file.freed = self.file.freed, []
        return freed

    def news(self) -> list[JobEnded | JobReturned]:
        return self._jobs.news()

    def moves(self, now: float) -> list[Move]:
        """Return the moves to carry out next, within the budgets; report the end of each by `ended`."""
        self.wake_at = self._jobs.time_out(now)
        for tier in self._tiers():
            if tier.drop_some():
                self.wake_at = now
        promotions = list(self._cutting.promotions())
        moves = [*self._cutting.of(MoveKind.LOAD, JobKind.LOAD), *self._cutting.of(MoveKind.STORE, JobKind.STORE)]
        moves += [*promotions, *self._write_back.moves()]
        while not moves and self.traffic.is_idle() and self._jobs.absent:
            moves = [*self._cutting.promotions(math.inf), *self._cutting.of(MoveKind.LOAD, JobKind.LOAD)]
            if not moves and self._jobs.absent:
                jobs, why = list(self._jobs.absent.values()), self._why_no_room()
                partly = [job for job in jobs if job.loaded]
                for job in partly[-1:] or jobs:  # fail the last job that holds slots, or all if none does
                    self._jobs.fail(job, JobOutcome.NO_ROOM, why)
        return moves

    def _why_no_room(self) -> str:
        held = {id(entry) for entries in self.pins.values() for tier, entry in entries if tier is self.host}
        held |= {id(entry) for job in self.jobs.values() for entry in job.loaded}
        names = [*self.pins, *(name for name, job in self.jobs.items() if job.loaded)]
        return (
            f"no slot of host memory can be had: {len(held)} of {sum(map(len, self.host.index))} blocks are held by "
            f"{len(names)} pins and leases ({', '.join(map(shown, names[:4]))}); let some go, or raise host_bytes"
        )

    def _why_not_stored(self, missing: int, wanted: int) -> str:
        kept, writing = sum(map(len, self.host.index)), sum(map(len, self.host.writing))
        held = max(0, kept - writing - self.host.num_idle)  # counted so, because pins may be long
        return (
            f"no room in host memory for {missing} of {wanted} blocks: it keeps {kept}, of which {writing} are being "
            f"written and {held} are pinned, lent or being copied; store less at a time, or raise host_bytes"
        )

    def ended(self, move_id: int, ending: Ending, cause: str = "", lost: Collection[int] = ()) -> None:
        """Note the end of a move. After `IN_DOUBT` another ending may follow, which frees the blocks that it touches.

        Args:
            lost: Indices, over all pieces of a `DONE` move, of blocks that a file had corrupt.
        """
        running = self.traffic.get(move_id)
        if ending is Ending.IN_DOUBT:
            if not running.is_doubtful:
                self._doubt(running, cause)
            return
        self.traffic.end(running)
        is_done = ending is Ending.DONE
        end = {
            MoveKind.LOAD: self._copy_ended,
            MoveKind.STORE: self._copy_ended,
            MoveKind.PROMOTION: self._promotion_ended,
            MoveKind.WRITE_BACK: self._write_back.ended,
        }[running.move.kind]
        if is_done and running.move.kind is MoveKind.PROMOTION:
            for i in lost:  # only here: the records of a move that failed as a whole, say by being late, may be good
                self.corrupt_or_unread += 1
                self.file.drop(running.sources[i])
        for i in range(len(running.items)):
            end(running, i, is_done and i not in lost, cause)
        job = running.job
        if job is not None:
            job.running.discard(move_id)
            job.doubtful.discard(move_id)
            if not is_done or lost:
                self._jobs.fail(job, JobOutcome.FAILED, cause or f"a transfer ended {ending}")
            else:
                self._jobs.settle(job)

    def overdue(self, move_id: int, cause: str) -> None:
        """Give up a move after its job's time-out: it is in doubt until it has `ended`."""
        running = self.traffic.get(move_id)
        if running.job is not None:
            self._jobs.fail(running.job, JobOutcome.TIMEOUT, cause)
        self._doubt(running, cause)

    # -- how moves end -----------------------------------------------------------------------------

    def _copy_ended(self, running: Running, i: int, is_good: bool, cause: str) -> None:
        (position, entry), job, is_load = running.items[i], running.job, running.move.kind is MoveKind.LOAD
        assert job is not None
        if not is_load:
            is_good = self._written_or_lost(entry, is_good, cause)
        if not running.is_doubtful:
            if is_good:
                job.blocks += 1
            else:
                job.missing.append((entry.group, position))
            if is_good and job.is_pinning and job.state is JobState.RUNNING:
                job.loaded.append(entry)
            elif is_load:
                self.host.let_go(entry, job.job_id)
        self.host.let_go(entry, running.move.move_id)

    def _promotion_ended(self, running: Running, i: int, is_good: bool, cause: str) -> None:
        entry, source, move_id = running.items[i].entry, running.sources[i], running.move.move_id
        self._written_or_lost(entry, is_good, cause or "the file tier no longer has it, or it was corrupt")
        self.file.let_go(source, move_id)
        self.host.let_go(entry, move_id)

    def _doubt(self, running: Running, cause: str) -> None:
        """Keep the blocks that a move touches, but do not count on their content any more."""
        self.traffic.doubt(running)
        move, job = running.move, running.job
        for position, entry in running.items:
            if move.kind is MoveKind.LOAD:
                assert job is not None
                self.host.let_go(entry, job.job_id)
            elif move.kind is MoveKind.WRITE_BACK:
                self.file.failed(entry)
            else:
                self.host.failed(entry)
                self._jobs.lost(entry, JobOutcome.FAILED, f"its transfer is in doubt: {cause}")
            if job is not None:
                job.missing.append((entry.group, position))
        if job is not None:
            job.running.discard(move.move_id)
            job.doubtful.add(move.move_id)
            self._jobs.fail(job, JobOutcome.FAILED, cause or "a transfer is in doubt")

    def _written_or_lost(self, entry: Entry, is_good: bool, cause: str) -> bool:
        """Note whether a block of host memory was written; return True if it can be found from now on."""
        if not is_good:
            self.host.failed(entry)
        elif self.host.written(entry):
            self._write_back.want(entry)
            for job in self._jobs.waiting(entry):
                position = job.waits.pop(entry)
                if job.kind is JobKind.LOAD:
                    self._jobs.do(job, position, entry)
                else:
                    job.blocks += 1
                    self.host.let_go(entry, job.job_id)
                    self._jobs.settle(job)
            return True
        self._jobs.lost(entry, JobOutcome.FAILED, cause)
        return False

    # -- what calls mean ---------------------------------------------------------------------------

    def _request(
        self, name: str, hashes: Sequence[str | bytes], tokens: int | None, positions: Positions | None
    ) -> tuple[list[list[bytes]], list[Sequence[int]]]:
        """Check a call's arguments; return the keys of every group's blocks, and the chosen positions."""
        text("name", name, MAX_NAME, 1)
        if name in self.jobs or name in self.pins:
            raise LocalProtocolError(f"{shown(name)} names a job or a pin already")
        return self._prefix(hashes, tokens, positions)

    def _prefix(
        self, hashes: Sequence[str | bytes], tokens: int | None, positions: Positions | None
    ) -> tuple[list[list[bytes]], list[Sequence[int]]]:
        keys = as_hashes(hashes)
        if len(set(keys)) < len(keys):
            raise LocalProtocolError("a hash is given twice: each must cover all tokens before as well")
        most = len(keys) * self.hash_tokens
        tokens = most if tokens is None else integer("tokens", tokens, 0, most)
        mine = [
            block_hashes(keys, group.block_size, self.hash_tokens)[: tokens // group.block_size]
            for group in self.groups
        ]
        if positions is None:
            return mine, [needed(group, 0, tokens) for group in self.groups]
        if len(positions) != len(self.groups):
            raise LocalProtocolError(f"positions of {len(positions)} groups are given, but it has {len(self.groups)}")
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
        """Note that blocks and their predecessors were used, in all tiers, each chain from its end."""
        self._tick_on()
        for tier in self._tiers():
            tier.use(self._used(tier, mine, where))

    def _tick_on(self) -> None:
        for tier in (self.host, self.file):
            tier.tick += 1

    def _used(self, tier: Tier, mine: list[list[bytes]], where: list[Sequence[int]]) -> list[Entry]:
        found: list[Entry] = []
        for g, group in enumerate(self.groups):
            index, keys = tier.index[g], mine[g]
            used = keys if group.needs_all else [keys[position] for position in where[g]]
            found += [entry for key in reversed(used) if (entry := index.get(key)) is not None]
        return found
