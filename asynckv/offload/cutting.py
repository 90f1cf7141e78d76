"""Cuts waiting jobs into moves that fit the budgets: the oldest job first, one move of each in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asynckv.offload.entry import Entry, EntryState
from asynckv.offload.job import Item, Job, JobKind, Jobs, Move, MoveKind
from asynckv.offload.keys import StoredGroup
from asynckv.offload.tier import Tier
from asynckv.offload.traffic import Running, Traffic

LOOKED_AT = 64  # most waiting loads that one turn looks at


class Cutting:
    def __init__(self, groups: Sequence[StoredGroup], host: Tier, file: Tier, jobs: Jobs, traffic: Traffic) -> None:
        self._groups, self._host, self._file, self._jobs, self._traffic = groups, host, file, jobs, traffic
        self._turn = 0

    def of(self, kind: MoveKind, of: JobKind) -> list[Move]:
        moves, ready = list[Move](), self._jobs.ready[of]
        while ready:
            over, is_full = list[Job](), False
            for job in ready.values():
                items, num_bytes = self._next(kind, job)
                if items:
                    moves.append(self._post(kind, job, items, num_bytes))
                if not job.todo:
                    over.append(job)
                elif is_full := not items:
                    break
            for job in over:
                del ready[job.job_id]
                self._jobs.settle(job)
            if is_full:
                break
        return moves

    def _next(self, kind: MoveKind, job: Job) -> tuple[list[Item], int]:
        items, num_bytes = list[Item](), 0
        while job.todo:
            position, entry = job.todo[0]
            size = self._groups[entry.group].record_bytes
            if not self._traffic.fits(kind, num_bytes, size):
                break
            item = job.todo.popleft()
            if kind is MoveKind.STORE and entry.state is not EntryState.WRITING:
                job.missing.append((entry.group, position))  # evicted before it was stored
                self._host.let_go(entry, job.job_id)
                continue
            items.append(item)
            num_bytes += size
        return items, num_bytes

    def _post(self, kind: MoveKind, job: Job, items: list[Item], num_bytes: int) -> Move:
        if kind is MoveKind.STORE:  # the move itself keeps the slots
            for _, entry in items:
                self._host.let_go(entry, job.job_id)
        move = self._traffic.begin(kind, job, items, self._host, [], num_bytes)
        job.running.add(move.move_id)
        return move

    def promotions(self, patience: float = LOOKED_AT) -> Iterator[Move]:
        """Find slots for blocks that loads need from the file tier; if many loads wait, look at some in turn."""
        absent, full = self._jobs.absent, set[int]()
        jobs, waiting = list(absent.values()), 0
        for i, job in enumerate(jobs):
            if waiting >= patience:
                rest = jobs[i:]
                self._turn %= len(rest)
                for other in rest[self._turn : self._turn + LOOKED_AT]:
                    yield from self._promotions_of(other, full)
                self._turn += LOOKED_AT
                break
            yield from self._promotions_of(job, full)
            waiting += bool(job.absent)

    def _promotions_of(self, job: Job, full: set[int]) -> Iterator[Move]:
        while job.absent:
            items = self._next_absent(job, full)
            if not items:
                break
            group = items[0].entry.group
            made = self._host.make(group, [item.entry.hash for item in items])
            job.absent.extendleft(reversed(items[len(made) :]))
            if len(made) < len(items):
                full.add(self._host.slots.kinds[group])
            if made:
                yield self._promote(job, items, made)
        if not job.absent:
            del self._jobs.absent[job.job_id]

    def _promote(self, job: Job, items: list[Item], made: list[Entry]) -> Move:
        todo = [Item(item.position, entry) for item, entry in zip(items, made, strict=False)]
        for position, entry in todo:
            self._jobs.wait(job, position, entry)
        sources = [item.entry for item in items[: len(made)]]
        num_bytes = len(made) * self._groups[made[0].group].record_bytes
        move = self._traffic.begin(MoveKind.PROMOTION, job, todo, self._file, sources, num_bytes)
        for entry in sources:
            self._file.let_go(entry, job.job_id)
        return move

    def _next_absent(self, job: Job, full: set[int]) -> list[Item]:
        """Take blocks of one group that a load needs from the file tier, except those that are being promoted."""
        items: list[Item] = []
        num_bytes = 0
        while job.absent and (not items or job.absent[0].entry.group == items[0].entry.group):
            position, source = job.absent[0]
            size = self._groups[source.group].record_bytes
            entry = self._host.index[source.group].get(source.hash)
            if entry is None:
                is_full = self._host.slots.kinds[source.group] in full
                if is_full or not self._traffic.fits(MoveKind.PROMOTION, num_bytes, size):
                    break
                items.append(job.absent.popleft())
                num_bytes += size
                continue
            job.absent.popleft()
            if entry.state is EntryState.READY:
                self._host.hold(entry, job.job_id)
                self._jobs.do(job, position, entry)
            else:
                self._jobs.wait(job, position, entry)
            self._file.let_go(source, job.job_id)
        return items


TRIES = 3  # writes of a block to the file tier before it stays in host memory only


class WriteBack:
    """Writes blocks of host memory to the file tier.

    Attributes:
        without_room: Number of blocks for which the file tier had no room.
        failed: Number of blocks that could not be written in all `TRIES`.
        lost: Number of blocks that were not written because the file tier takes no more.
    """

    def __init__(self, groups: Sequence[StoredGroup], host: Tier, file: Tier, traffic: Traffic) -> None:
        self._groups, self._host, self._file, self._traffic = groups, host, file, traffic
        self.without_room = self.failed = self.lost = 0

    def want(self, entry: Entry) -> None:
        """Queue a block of host memory for writing, unless the file tier has it."""
        if entry.hash in self._file.index[entry.group]:
            return
        if self._file.takes_more:
            self._host.onward[entry] = None
        else:
            self.lost += self._file.slots.num_bytes > 0

    def switch_off(self) -> None:
        self._file.takes_more = False
        self.lost += len(self._host.onward)
        self._host.onward.clear()

    def moves(self) -> list[Move]:
        """Return the next moves within the budget."""
        moves: list[Move] = []
        if not self._file.takes_more:
            return moves
        kind, onward = MoveKind.WRITE_BACK, self._host.onward
        while onward and self._traffic.fits(kind, 0, self._size(next(iter(onward)))):
            items, sources = self._take()
            if items:
                num_bytes = sum(self._size(item.entry) for item in items)
                moves.append(self._traffic.begin(kind, None, items, self._host, sources, num_bytes))
        return moves

    def _take(self) -> tuple[list[Item], list[Entry]]:
        chosen, num_bytes = list[Entry](), 0
        for entry in self._host.onward:
            if not self._traffic.fits(MoveKind.WRITE_BACK, num_bytes, self._size(entry)):
                break
            chosen.append(entry)
            num_bytes += self._size(entry)
        by_group: dict[int, list[Entry]] = {}
        for entry in chosen:
            del self._host.onward[entry]
            if entry.hash not in self._file.index[entry.group]:
                by_group.setdefault(entry.group, []).append(entry)
        items, sources = list[Item](), list[Entry]()
        for g, entries in by_group.items():
            made = self._file.make(g, [entry.hash for entry in entries])
            self.without_room += len(entries) - len(made)
            items += [Item(0, entry) for entry in made]
            sources += entries[: len(made)]
        return items, sources

    def ended(self, running: Running, i: int, is_good: bool, cause: str) -> None:
        """Note the end of a block's write-back; a failed one is repeated up to `TRIES` times."""
        entry, source, move_id = running.items[i].entry, running.sources[i], running.move.move_id
        if is_good:
            self._file.written(entry)
        else:
            self._file.failed(entry)
            source.tries += 1
            if source.tries < TRIES and source.state is EntryState.READY:
                self.want(source)
            else:
                self.failed += 1
        self._file.let_go(entry, move_id)
        self._host.let_go(source, move_id)

    def _size(self, entry: Entry) -> int:
        return self._groups[entry.group].record_bytes
