"""All jobs of a catalogue that are not over: what each holds and waits for, and what is to be told of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence

from asynckv.offload.entry import Entry, EntryState
from asynckv.offload.job import Item, Job, JobEnded, JobEvent, JobKind, JobOutcome, JobReturned, JobState
from asynckv.offload.tier import Tier


class Jobs:
    """Jobs that are not over, by name; those that can go on are listed apart, so that no turn looks at jobs that
    wait."""

    def __init__(self, num_groups: int, host: Tier, file: Tier | None) -> None:
        self._num_groups, self._host, self._file = num_groups, host, file
        self.by_name: dict[str, Job] = {}
        self.ready: dict[JobKind, dict[str, Job]] = {kind: {} for kind in JobKind}
        self.absent: dict[str, Job] = {}
        self.pins: dict[str, list[tuple[Tier, Entry]]] = {}
        self._news: list[JobEnded | JobReturned] = []
        self._deadline = math.inf  # of some job the first, or before: jobs are looked at then, and not in every turn

    def begin(self, job_id: str, kind: JobKind, until: float, *, is_pinning: bool = False) -> Job:
        job = self.by_name[job_id] = Job(job_id, kind, until, is_pinning=is_pinning)
        self._deadline = min(self._deadline, until)
        return job

    def news(self) -> list[JobEnded | JobReturned]:
        news, self._news = self._news, []
        return news

    def hold(self, job: Job, tier: Tier, entry: Entry) -> None:
        tier.hold(entry, job.job_id)
        job.holding.add(entry)

    def let_go(self, job: Job, tier: Tier, entry: Entry) -> None:
        job.holding.discard(entry)
        tier.let_go(entry, job.job_id)

    def let_go_all(self, job: Job, items: Sequence[Item]) -> None:
        name, let_go = job.job_id, self._host.let_go
        job.holding.difference_update([entry for _, entry in items])
        for _, entry in items:
            let_go(entry, name)

    def do(self, job: Job, position: int, entry: Entry) -> None:
        job.todo.append(Item(position, entry))
        self.ready[job.kind][job.job_id] = job

    def do_all(self, job: Job, items: Sequence[Item]) -> None:
        """A job needs blocks of host memory that can be moved."""
        if items:
            name, hold = job.job_id, self._host.hold
            for _, entry in items:
                hold(entry, name)
            job.holding.update([entry for _, entry in items])
            job.todo += items
            self.ready[job.kind][name] = job

    def wait(self, job: Job, position: int, entry: Entry) -> None:
        """A job waits until somebody else has written a block."""
        self.hold(job, self._host, entry)
        job.waits[entry] = position

    def fetch(self, job: Job, position: int, source: Entry) -> None:
        """A job needs a block of the file tier."""
        assert self._file is not None
        self.hold(job, self._file, source)
        job.absent.append(Item(position, source))
        self.absent[job.job_id] = job

    def waiting(self, entry: Entry) -> list[Job]:
        """Return who waits for a block."""
        if not entry.holders:
            return []
        jobs = (self.by_name.get(name) for name in sorted(entry.holders))
        return [job for job in jobs if job is not None and entry in job.waits]

    def cancel(self, job: Job) -> None:
        was_running = job.state is JobState.RUNNING
        job.receive(JobEvent.CANCELLED, JobOutcome.CANCELLED)
        if was_running:
            self._abandon(job, "the job that stored it was cancelled")
        self.settle(job)

    def fail(self, job: Job, outcome: JobOutcome, cause: str) -> None:
        if job.state in (JobState.RUNNING, JobState.DRAINING):
            was_running = job.state is JobState.RUNNING
            job.receive(JobEvent.FAILED, outcome, cause)
            if was_running:
                self._abandon(job, f"the job that stored it failed: {cause}")
        self.settle(job)

    def lost(self, entry: Entry, outcome: JobOutcome, cause: str) -> None:
        """Fail whoever waits for a block that will not be written."""
        for job in self.waiting(entry):
            if entry in job.waits:  # or it failed with one of the others, for whose blocks it waited, too
                job.missing.append((entry.group, job.waits.pop(entry)))
                self.let_go(job, self._host, entry)
                self.fail(job, outcome, cause)

    def _abandon(self, job: Job, cause: str) -> None:
        """Let go of all that was not posted; what others wait for is theirs to store, if they can."""
        todo, waits, absent, loaded = job.todo, job.waits, job.absent, job.loaded
        job.todo, job.waits, job.absent, job.loaded = deque(), {}, deque(), []
        self.ready[job.kind].pop(job.job_id, None)
        self.absent.pop(job.job_id, None)
        for entry in loaded:
            self.let_go(job, self._host, entry)
        for position, entry in absent:
            assert self._file is not None
            job.missing.append((entry.group, position))
            self.let_go(job, self._file, entry)
        for entry, position in waits.items():
            job.missing.append((entry.group, position))
            self.let_go(job, self._host, entry)
        for position, entry in todo:
            job.missing.append((entry.group, position))
            if job.kind is JobKind.STORE and entry.state is EntryState.WRITING:
                heir = next((other for other in self.waiting(entry) if other.kind is JobKind.STORE), None)
                if heir is not None:
                    self.do(heir, heir.waits.pop(entry), entry)
                else:
                    self._host.drop(entry)
                    self.lost(entry, JobOutcome.MISSING, cause)
            self.let_go(job, self._host, entry)

    def settle(self, job: Job) -> None:
        if (told := job.settle(self._num_groups)) is not None:
            self._news.append(told)
        if job.is_over and self.by_name.pop(job.job_id, None) is not None and job.is_pinning:
            if job.outcome is JobOutcome.DONE:
                self.pins[job.job_id] = [(self._host, entry) for entry in job.loaded]

    def time_out(self, now: float) -> float:
        """Fail those whose time is over; returns when to call again."""
        if not self.by_name:
            self._deadline = math.inf
        if now >= self._deadline:
            self._deadline = math.inf
            for job in list(self.by_name.values()):
                if job.until < math.inf and job.state is JobState.RUNNING and (job.todo or job.waits or job.absent):
                    if now >= job.until:
                        self.fail(job, JobOutcome.TIMEOUT, "it was not carried out in time")
                    else:
                        self._deadline = min(self._deadline, job.until)
        return self._deadline

    def to_write(self) -> Iterator[Entry]:
        return (item.entry for job in self.by_name.values() if job.kind is JobKind.STORE for item in job.todo)

    def audit(self) -> list[str]:
        jobs, wrong = self.by_name.values(), list[str]()
        ready = {name for some in self.ready.values() for name in some}
        if ready != {job.job_id for job in jobs if job.todo}:
            wrong.append(f"jobs {sorted(ready)} are listed as those that have something to be moved")
        if self.absent.keys() != {job.job_id for job in jobs if job.absent}:
            wrong.append(f"jobs {sorted(self.absent)} are listed as those that need the file tier")
        return wrong
