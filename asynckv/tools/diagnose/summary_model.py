"""What a report says: the values of `asynckv.report/1`, as `asynckv report --json` writes them.

Times are seconds since 1970, durations seconds, and series have one value for each window of time, in order.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

__all__ = [
    "SCHEMA",
    "Away",
    "Bench",
    "Engine",
    "Failure",
    "Held",
    "Kind",
    "Late",
    "Leases",
    "Pair",
    "Pulls",
    "Quarantine",
    "Read",
    "Summary",
    "Unseen",
    "Warned",
]

SCHEMA = "asynckv.report/1"


class Kind(Struct, kw_only=True):
    """Quantiles and mean of what took time, in seconds."""

    p50: float
    p90: float
    p99: float
    max: float
    mean: float


class Pulls(Struct, kw_only=True):
    """What ended on decode sides: one pull is one request on one decode rank, or one attempt of it.

    Attributes:
        ended: All, with those that were left out of the logs; so are the next three, and `num_bytes`.
        failed: For good. Every one of them is in the logs.
        retried: Attempts that failed, and were tried again.
        logged: How many are in the logs.
        latency_s: From the call to usable bytes, of those that completed.
        slowest: The longest of them: request id, where, and seconds.
        phases_s: Of those that completed.
        ended_per_s: In each window; so are all that follow, with null where nothing is known.
        mean_phases_s: Of those that completed in each window.
    """

    ended: float = 0.0
    complete: float = 0.0
    cancelled: float = 0.0
    discharged: float = 0.0
    failed: int = 0
    retried: int = 0
    logged: int = 0
    num_bytes: float = 0.0
    latency_s: Kind | None = None
    slowest: dict[str, Any] = field(default_factory=dict)
    phases_s: dict[str, Kind] = field(default_factory=dict)
    ended_per_s: list[float] = field(default_factory=list)
    failed_per_s: list[float] = field(default_factory=list)
    bytes_per_s: list[float] = field(default_factory=list)
    p50_s: list[float | None] = field(default_factory=list)
    p99_s: list[float | None] = field(default_factory=list)
    max_s: list[float | None] = field(default_factory=list)
    mean_phases_s: dict[str, list[float | None]] = field(default_factory=dict)


class Leases(Struct, kw_only=True):
    """What prefill sides lent.

    Attributes:
        lent: All, with those that were left out of the logs.
        logged: How many are in the logs.
        ended_badly: Expired or revoked; every one of them is in the logs.
        open: Lent, and no end in the logs.
        blocks: Mean number that was lent in each window, with those that were left out.
        blocks_logged: The same of what is in the logs alone: a lower bound.
        blocks_badly: Of leases that ended badly.
    """

    lent: float = 0.0
    logged: int = 0
    ended_badly: int = 0
    open: int = 0
    blocks: list[float] = field(default_factory=list)
    blocks_logged: list[float] = field(default_factory=list)
    blocks_badly: list[float] = field(default_factory=list)


class Quarantine(Struct, kw_only=True):
    """Failed pulls into whose blocks a transfer could still write.

    Attributes:
        pulls: Mean number in each window.
        returned: How many came back.
        retired: How many never did, and gave up their blocks.
        open: Neither, as far as the logs go.
        longest_s: For the longest time.
    """

    pulls: list[float] = field(default_factory=list)
    returned: int = 0
    retired: int = 0
    open: int = 0
    longest_s: float = 0.0


class Failure(Struct, kw_only=True):
    """One way to fail.

    Attributes:
        side: `pull`, `attempt` (tried again), or `lease`.
        failed_in: In which phases, and how often.
        detail: What the first one says.
        counts: In each window.
    """

    side: str
    cause: str
    count: int
    first: float
    last: float
    failed_in: dict[str, int]
    detail: str
    where: str
    counts: list[int]


class Pair(Struct, kw_only=True):
    """A peer, as one process saw it.

    Attributes:
        pulls: From it, with those that were left out; a pull from several ranks counts for each.
        num_bytes: Of a pull from several ranks an equal part for each.
        states: `[state, since, until]`.
        not_ready_s: Seconds in which it was not ready after it had been once.
        last_good: When something last went well: a pull, by either side's log, or it became ready.
        released: By outcome, leases that the peer's own log says this process released.
    """

    peer: str
    reader: str
    pulls: float = 0.0
    num_bytes: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)
    states: list[tuple[str, float, float]] = field(default_factory=list)
    not_ready_s: float = 0.0
    last_good: float | None = None
    released: dict[str, int] = field(default_factory=dict)


class Unseen(Struct, kw_only=True):
    """A process that pulls, of which other logs say more than its own.

    Attributes:
        ends: When its log ends, without a goodbye; None if there is no log of it.
        released: By outcome, requests that prefill sides say it released, and whose end is not in its log: at least so
            many, for successes are sampled.
        owed: Requests whose leases ended badly without its release, that it does not speak of.
    """

    rank: str
    ends: float | None
    released: dict[str, int]
    owed: int = 0


class Away(Struct, kw_only=True):
    """An event loop did not come to its engine; `not_logged`: how often more, since that was last logged."""

    rank: str
    since: float
    until: float
    seconds: float
    leases: int
    pulls: int
    not_logged: int
    not_logged_s: float


class Held(Struct, kw_only=True):
    """What was held for long and waited for the same."""

    side: str
    state: str
    waits: str
    warnings: int
    most: int
    oldest_s: float
    first: float
    last: float
    example: str


class Warned(Struct, kw_only=True):
    """Other warnings and errors of one name."""

    event: str
    level: str
    count: int
    first: float
    last: float
    example: str


class Engine(Struct, kw_only=True):
    """One start of one rank's process.

    Attributes:
        started: None if the logs do not have its start.
        stopped: None if its log just ends.
        last: Its last word.
    """

    rank: str
    engine_id: str
    host: str = ""
    pid: int | None = None
    version: str = ""
    started: float | None = None
    stopped: float | None = None
    first: float = 0.0
    last: float = 0.0
    events: int = 0
    warnings: int = 0
    errors: int = 0
    pulls: float = 0.0
    leases: float = 0.0


class Offload(Struct, kw_only=True):
    """What one rank has kept outside of the accelerator, as far as its log says.

    Attributes:
        counters: What was counted, as in `offload_stopped`: of the whole run if it has stopped, else as far as told.
        told_at: When that was last told, in seconds since 1970; None if it never was.
        has_stopped: It was told as it stopped: nothing is missing.
        blocks: Tier -> blocks that were kept there when that was last told.
        failed: Stores and loads that failed, with those that were not logged.
        host_bytes, file_bytes: Of the tiers; None if its start is not in the logs.
        files_lost: Why its files are not used any more; empty while they are.
    """

    rank: str
    counters: dict[str, int] = field(default_factory=dict)
    told_at: float | None = None
    has_stopped: bool = False
    blocks: dict[str, int] = field(default_factory=dict)
    failed: int = 0
    host_bytes: int | None = None
    file_bytes: int | None = None
    files_lost: str = ""


class Offloads(Struct, kw_only=True):
    """What was kept outside of the accelerator.

    Attributes:
        ranks: Those that keep something.
        bytes_per_s: Kind of move -> bytes per second, by window.
    """

    ranks: list[Offload] = field(default_factory=list)
    bytes_per_s: dict[str, list[float]] = field(default_factory=dict)


class Read(Struct, kw_only=True):
    """What was read."""

    files: int = 0
    lines: int = 0
    events: int = 0
    others: int = 0
    repeated: int = 0
    skipped: list[dict[str, Any]] = field(default_factory=list)


class Late(Struct, kw_only=True):
    """Blocks that came back late: what `asynckv leaks` finds.

    Attributes:
        requests: How many.
        causes: By cause: its title, how many `requests` and `blocks`, the `longest_s`, an `example`, a `remedy`.
        worst: Of those that were held longest: as in the report of `asynckv leaks`.
    """

    requests: int = 0
    causes: dict[str, dict[str, Any]] = field(default_factory=dict)
    worst: list[dict[str, Any]] = field(default_factory=list)


class Bench(Struct, kw_only=True):
    """A report of `asynckv bench`, as it is."""

    name: str
    is_good: bool
    report: dict[str, Any]


class Summary(Struct, kw_only=True):
    """The report.

    Attributes:
        first: Of the events that count, seconds since 1970, as all times.
        windows: Beginnings of the windows.
        clocks: What must be known about the clocks of several hosts.
        missing: Processes that others name, and of which no log was given.
        unseen: What is known from others of processes whose logs are missing, or end.
    """

    schema: str = SCHEMA
    first: float = 0.0
    last: float = 0.0
    window_s: float = 0.0
    windows: list[float] = field(default_factory=list)
    read: Read = field(default_factory=Read)
    pulls: Pulls = field(default_factory=Pulls)
    leases: Leases = field(default_factory=Leases)
    quarantine: Quarantine = field(default_factory=Quarantine)
    failures: list[Failure] = field(default_factory=list)
    clocks: list[str] = field(default_factory=list)
    late: Late = field(default_factory=Late)
    peers: list[Pair] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unseen: list[Unseen] = field(default_factory=list)
    away: list[Away] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    warned: list[Warned] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    offloads: Offloads = field(default_factory=Offloads)
    bench: list[Bench] = field(default_factory=list)
