"""Every event, as a type: what the log says, what metrics and traces hear of, and what the readers of logs look for.

The name of an event is made of the name of its type: `lease_ended` of `LeaseEnded`. A name is what an event is called
for ever: dashboards and the readers of old logs go by it. Fields may be added; one that is there keeps its meaning, and
a reader must do without the ones that came later. `docs/logging.md` is drawn from these types.

A field that is empty or None is left out of a line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from msgspec import Struct

if TYPE_CHECKING:
    from asynckv.core import wire
    from asynckv.core.lease import Lease
    from asynckv.core.pull import Pull
    from asynckv.core.types import PullId

Level = Literal["debug", "info", "warning", "error"]

MAX_TEXT = 512
"""Letters of what others have said."""

MAX_NAMED = 64
"""Ranks named of one request that has ended."""

MAX_GRANTS = 8
"""Promises of one lease to one reader that are logged, and of those given while it was lent."""

NotLogged = Annotated[int | None, "How many more there were since the last such line."]
SuccessesNotLogged = Annotated[
    int | None, "How many requests ended well, or were lent, without a line since the last line."
]
History = Annotated[list[tuple[float, str]] | None, "Every transition and note: `[seconds since the first, words]`."]
HeldState = Annotated[
    str, "State of the lease or the pull (`docs/structure.md`); left out if the line is about several states."
]
LayoutPrint = Annotated[str, "Fingerprint of the memory's layout."]
ReleaseOutcome = Annotated[str, "What the release says: `complete`, `failed`, `cancelled` or `retry`."]


def short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 4]} ..."


class RefusedMessage(Struct, frozen=True, array_like=True):
    after_s: float
    message: str
    reason: str
    who: str
    detail: str = ""


RefusedMessages = Annotated[
    list[RefusedMessage] | None,
    "Messages about this request that were refused, the first of each kind: `[seconds since it was lent, "
    "claim|renew|release, reason, who, detail]`. The reason `parked_too_long`: a release that came before the request "
    "was lent, and was forgotten.",
]


class LastClaim(Struct, frozen=True):
    """The last attempt of one reader; seconds since the request was lent."""

    pull_id: str
    claimed_s: float
    heard_s: float


class Line(Struct, frozen=True):
    """What every line has, however it is written; `timestamp`, `level` and `log_...` are added by the writer."""

    timestamp: Annotated[str, "When it was logged: ISO 8601, UTC, microseconds."]
    level: Annotated[str, "`debug`, `info`, `warning` or `error`."]
    event: Annotated[str, "The event's name."]
    engine_id: Annotated[str, "The engine that logs the line."]
    tp_rank: Annotated[int, "Its rank."]
    incarnation: Annotated[str, "Names this start of its process; a new one after the engine was resumed."]
    rank: Annotated[str, "The engine's rank and start as everybody writes it: `prefill/pp1/tp3@0a1b2c3d`."]
    log_dropped: Annotated[int, "How many lines before this one are missing in the engine's own log file."] = 0
    log_not_rotated: Annotated[str, "Why the engine's own log file grows beyond `max_bytes`; said once."] = ""


class Told(Struct, omit_defaults=True):
    """Something that happened.

    Attributes:
        event: Its name.
        side: The side that logs it: `prefill`, `decode`, or `both`.
        levels: The levels at which it may be logged; the first unless its maker says another.
        most: How many are logged per second, and how many at once after a silence; all if None.
    """

    event: ClassVar[str]
    side: ClassVar[str] = "both"
    levels: ClassVar[tuple[Level, ...]] = ("info",)
    most: ClassVar[tuple[float, float] | None] = None

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__(**config)
        cls.event = re.sub(r"(?<=.)(?=[A-Z])", "_", cls.__name__).lower()


class OfLease(Told):
    side = "prefill"
    request_id: Annotated[str, "The prefill side's id of the request."]
    sequence: Annotated[int, "The number of its key: the same on all ranks of both sides."]


class OfPull(Told):
    side = "decode"
    request_id: Annotated[str, "The decode side's id of the request."]
    prefill_request_id: Annotated[str, "The prefill side's id of the request."]
    pull_id: Annotated[str, "This attempt: the first half of the reader's incarnation, and a number."]
    peer: Annotated[str, "The prefill engine's id."]
    sequence: Annotated[int, "The number of the request's key: the same on all ranks of both sides."]


class EndedAlike(Told):
    cause: Annotated[str, "Why they ended."]
    requests: Annotated[int, "How many requests."]
    alike: Annotated[dict[str, Any], "Fields that are the same for all of them."]
    each: Annotated[
        dict[str, list[Any]],
        "Field -> its values, one per request (null: left out); `ago_s` is the time since its end.",
    ]


class Incomplete(Told):
    stragglers: Annotated[int, "How many requests had not ended."]
    oldest: Annotated[list[str], "A few of them, in words: request id, why its blocks are held, whom it waits for."]


class EngineStarted(Told):
    """An engine has started. Processes of one host share a wall clock."""

    address: Annotated[str, "Where its control plane listens."]
    layout: LayoutPrint
    bytes: Annotated[int, "Size of the registered memory."]
    host: Annotated[str, "Name of the host."]
    pid: Annotated[int, "Id of the process."]
    version: Annotated[str, "Version of asynckv."]
    lease_s: Annotated[float, "How long an unclaimed request stays lent."]
    grant_s: Annotated[float, "Length of one grant to a reader."]
    max_lease_s: Annotated[float, "How long renewals can keep a request lent."]
    parked_s: Annotated[float, "How long claims and releases of a request that is not lent yet are kept."]
    timeout_s: Annotated[float, "Default deadline of a pull."]
    announce_s: Annotated[float, "How long an announced request may wait to be pulled."]
    held_s: Annotated[float, "When blocks that a transfer may still write are retired."]
    release_timeout_s: Annotated[float, "When an unanswered release is given up."]
    backend: Annotated[str, "NIXL's back end, or `simulated`."]
    nixl: Annotated[str, "Version of NIXL."] = ""
    nixl_variant: Annotated[str, "NIXL's package."] = ""
    ucx_tls: Annotated[str, "The transports that UCX may use."] = ""
    ucx_net_devices: Annotated[str, "The devices that UCX may use."] = ""
    ucx_error_handling_mode: Annotated[str, "Whether UCX notices that a peer is lost."] = ""
    engine_config: Annotated[str, "Further settings of UCX."] = ""
    completions: Annotated[str, "How completed transfers are found."] = ""
    posting_threads: Annotated[str, "Which threads post what."] = ""
    sync_mode: Annotated[str, "How NIXL's agent is locked."] = ""
    serving: Annotated[str, "The process that serves remote readers, if it is a separate one."] = ""
    reading: Annotated[str, "The process that posts this engine's reads, if it is a separate one."] = ""


class EngineStopped(Told):
    """An engine was closed. A log that ends without this line is one of a process that was killed."""

    seconds: Annotated[float, "Since the engine started."]
    cut_short: Annotated[int, "How many requests the end did not wait for."]
    counters: Annotated[dict[str, int], "Leases, pulls and refusals by outcome, as in the statistics; without zeros."]


class EngineSuspended(Told):
    """The engine has released its memory: nothing reads or writes it."""

    cut_short: Annotated[int, "How many requests had not ended by the end of the drain."]


class EngineResumed(Told):
    """The engine has registered its memory again, and has another incarnation from here on."""

    memory_epoch: Annotated[int, "How often the memory was registered anew."]
    layout: LayoutPrint


class EngineClosedWithStragglers(Incomplete):
    """The engine was closed or suspended before all requests had ended."""

    levels = ("warning",)
    how: Annotated[str, "`closed` or `suspended`."]
    promises_cut_short: Annotated[list[str] | None, "Requests whose readers held a grant for longer."] = None


class EngineAlive(Told):
    """A sign of life, every half lease: a log that ends is one of a process that has ended, or hangs."""

    leases: Annotated[int, "Leases that are open."]
    pulls: Annotated[int, "Pulls and announcements that are open."]
    parked: Annotated[int, "Claims and releases that wait for their request to be lent."]
    blocks_held: Annotated[int, "Blocks that are lent, or that a pull writes."]
    waits_for: Annotated[list[str], "Ranks that pulls wait for, the first few."]


class Drained(Told):
    """A drain ended, and no request is under way."""


class DrainIncomplete(Incomplete):
    """A drain ended before all requests had ended."""

    levels = ("warning",)


class PeerChanged(Told):
    """A remote rank's state changed.

    It is a warning if the rank was lost; not if it said goodbye and no pull failed with it.
    """

    side, levels = "decode", ("info", "warning")
    peer: Annotated[str, "The rank and its start."]
    address: Annotated[str, "Where the rank listens."]
    peer_incarnation: Annotated[str, "The incarnation of its process, in full."]
    before: Annotated[str, "The state before."]
    state: Annotated[str, "`connecting` (this side sends its first hello), `loading` (the welcome came), `ready`, ..."]
    cause: Annotated[str, "Why the rank serves this engine no more."] = ""
    detail: Annotated[str, "The same in words."] = ""
    pulls_failed: Annotated[int | None, "How many pulls failed with it."] = None


class PeerDraining(Told):
    """A remote rank drains: it lends nothing new."""

    side = "decode"
    peer: Annotated[str, "The rank and its start."]
    address: Annotated[str, "Where the rank listens."]


class ReaderMet(Told):
    """A reader's process shook hands for the first time. A thousand lines at once, then ten per second."""

    side, most = "prefill", (10.0, 1000.0)
    reader: Annotated[str, "The rank and its start, as the reader says."]
    reader_incarnation: Annotated[str, "The incarnation of its process, in full."]
    minor: Annotated[int, "The minor version of its protocol."]
    not_logged: NotLogged = None


class ReaderRefused(Told):
    """This process refuses to serve a reader. Ten lines at once, then one per second."""

    side, levels, most = "prefill", ("warning",), (1.0, 10.0)
    reader: Annotated[str, "The rank and its start, as the reader says; empty if it speaks another protocol."]
    said: Annotated[str, "The message that was refused: `hello`, `claim`, `renew` or `release`."]
    cause: Annotated[str, "`wrong_target`, `restarted`, `engine_closed` or `protocol_version`."]
    detail: Annotated[str, "The words that the reader was sent."]
    not_logged: NotLogged = None


class Refused(Told):
    """The listener rejected a connection, or this engine refused to connect to an address.

    Ten lines at once, then one per second.
    """

    levels, most = ("warning",), (1.0, 10.0)
    cause: Annotated[str, "The name of the counter `control.*` (`docs/security.md`)."]
    who: Annotated[str, "Address, and public key if there is one."]
    not_logged: NotLogged = None


class LeaseLent(OfLease):
    """Blocks were lent. Sampled: if this line is in the log, the end of the lease is, too."""

    blocks: Annotated[int, "How many blocks."]
    lease_s: Annotated[float, "How long the lease lasts if nobody claims it."]
    readers: Annotated[int | None, "How many decode engines may read it, if more than one."] = None
    successes_not_logged: SuccessesNotLogged = None


class LeaseGranted(OfLease):
    """A reader got its first grant of a sampled lease."""

    reader: Annotated[str, "The rank and its start."]
    pull_id: Annotated[str, "The reader's attempt."]
    seconds: Annotated[float, "How long the grant runs."]
    after_s: Annotated[float, "Since the request was lent."]


class HeldLease(Struct, frozen=True, omit_defaults=True):
    request_id: Annotated[str, "The prefill side's id of the request."]
    sequence: Annotated[int, "The number of its key: the same on all ranks of both sides."]
    lent_s: Annotated[float, "For how long the request has been lent."]
    claims: Annotated[
        dict[str, LastClaim],
        "Reader -> `pull_id`, `claimed_s` and `heard_s` (both since it was lent) of its last attempt. A line "
        "without `claimed_s` is of an older version; there `heard_s` says how long ago it was.",
    ]
    left_s: Annotated[float | None, "How long this can last at most, unless a reader asks for more."] = None
    refused: RefusedMessages = None


class LeaseHeld(Told, kw_only=True):
    """Requests have been lent for a third of their lease (`log.held_fraction`), or twice as long, and so on.

    Requests that wait for the same share a line; a few lines in ten seconds. It is no warning while all readers renew.
    """

    side, levels = "prefill", ("warning", "info")
    state: HeldState = ""
    waits: Annotated[str, "What they wait for, in words."]
    requests: Annotated[int, "How many requests wait for the same."]
    oldest: Annotated[list[HeldLease], "The three that have been held longest."]


class LeaseEnded(OfLease):
    """The blocks are the prefill engine's again.

    Sampled if they were released; else a warning, which is always logged.
    """

    levels = ("info", "warning")
    cause: Annotated[str, "`released`, `expired`, `revoked`, or `closed` (the engine ended before the lease)."]
    seconds: Annotated[float, "For how long the request was lent."]
    readers: Annotated[dict[str, str], "Reader -> how it released: `complete`, `failed` or `cancelled`."]
    blocks: Annotated[int, "How many blocks."]
    owed: Annotated[list[str] | None, "Readers that never released; `*` is a decode engine that never spoke up."] = None
    claims: Annotated[
        dict[str, LastClaim] | None,
        "Reader in `owed` -> `pull_id`, `claimed_s` and `heard_s` (both since it was lent) of its last attempt.",
    ] = None
    refused: RefusedMessages = None
    revoked_by: Annotated[
        str,
        "Who revoked it: `caller` (`LentRequest.revoke`), `withdraw`, `no_room` (`Engine.reclaim`), or how the "
        "engine ended: `closed`, `suspended`. That is no leak.",
    ] = ""
    late_s: Annotated[float | None, "How late the expiry was noticed, because the event loop was away."] = None
    history: History = None
    successes_not_logged: SuccessesNotLogged = None


class LeasesEndedAlike(EndedAlike):
    """Up to 64 leases ended alike: beyond the first 32 `lease_ended` of one cause and the same owed readers."""

    side, levels = "prefill", ("warning",)


class LeaseTransition(OfLease):
    """One entry of a lease's history."""

    levels = ("debug",)
    to: Annotated[str, "The state, or a note."]
    at_s: Annotated[float, "Since it was lent."]


class RequestWithdrawn(OfLease):
    """A request will never be lent."""

    waited: Annotated[int, "How many pulls waited for the request."]
    pull_ids: Annotated[list[str], "Some of these pulls."]


class HeldPull(Struct, frozen=True, omit_defaults=True):
    request_id: Annotated[str, "The decode side's id of the request."]
    prefill_request_id: Annotated[str, "The prefill side's id of the request."]
    pull_id: Annotated[str, "This attempt: the first half of the reader's incarnation, and a number."]
    peer: Annotated[str, "The prefill engine's id."]
    sequence: Annotated[int, "The number of the request's key: the same on all ranks of both sides."]
    state_s: Annotated[float, "For how long the request has been in this state."]
    ranks: Annotated[dict[str, str], "Prefill rank -> how far the request has come with it."]
    left_s: Annotated[float | None, "How long this can last at most."] = None


class PullHeld(Told, kw_only=True):
    """Announcements or pulls have been in one state for a third of their lease (`log.held_fraction`), or twice as long,
    and so on. Those that wait for the same share a line; a few lines in ten seconds. An announcement may wait until
    `announce_s` is over, so a line about announcements is no warning.
    """

    side, levels = "decode", ("warning", "info")
    state: HeldState = ""
    waits: Annotated[str, "What they wait for, in words."]
    requests: Annotated[int, "How many requests wait for the same."]
    oldest: Annotated[list[HeldPull], "The three that have been held longest."]


class PullRefused(Told):
    """This engine refused to pull or to announce a request by itself, and began nothing.

    Ten lines at once, then one per second.
    """

    side, levels, most = "decode", ("warning",), (1.0, 10.0)
    request_id: Annotated[str, "The decode side's id of the request."]
    cause: Annotated[str, "The name of the error that the caller was given."]
    detail: Annotated[str, "Its words."]
    prefill_request_id: Annotated[str, "The prefill side's id of the request; empty if the params cannot be read."] = ""
    peer: Annotated[str, "The prefill engine's id."] = ""
    sequence: Annotated[int | None, "The number of the request's key: the same on all ranks of both sides."] = None
    not_logged: NotLogged = None


class PullRetried(OfPull):
    """A pull failed and is tried again."""

    cause: Annotated[str, "Why it failed."]
    attempt: Annotated[int, "The number of the next attempt."]
    after_s: Annotated[float, "How long until the next attempt."]


class PullEnded(OfPull):
    """A pull has ended, or a request that was never pulled is done (`discharged`), announced or not.

    Sampled if it went well; a warning if it failed (always logged) or was slow. If another failed in the same words
    within the last second, the line is short.
    """

    levels = ("info", "warning")
    cause: Annotated[str, "`complete`, `cancelled`, `discharged`, or why it failed."]
    seconds: Annotated[float, "From the call to the outcome."]
    same_as: Annotated[str, "The pull that failed in the same words just before; its line has the rest."] = ""
    failed_in: Annotated[str, "The phase in which it failed."] = ""
    detail: Annotated[str, "Why, in words."] = ""
    waited_for: Annotated[str, "What the pull waited for when it failed, in words."] = ""
    attempt: Annotated[int | None, "The number of the attempt, if it is not the first."] = None
    peer_ranks: Annotated[list[str] | None, "Prefill ranks to which this pull owes a release."] = None
    read_ranks: Annotated[list[str] | None, "Prefill ranks that it read, or was to read."] = None
    bytes: Annotated[int | None, "Bytes that were read; 0 if the pull failed."] = None
    descriptors: Annotated[int | None, "Descriptors that were planned, before NIXL merges them."] = None
    posts: Annotated[int | None, "Transfers that were posted."] = None
    rereads: Annotated[int | None, "How often the pull read again, because it had read too early."] = None
    phases: Annotated[dict[str, float] | None, "Phase -> seconds (`docs/logging.md`)."] = None
    held_transfers: Annotated[
        int | None, "How many transfers may still write its blocks; `blocks_returned` follows."
    ] = None
    blocks: Annotated[int | None, "How many blocks transfers may still write."] = None
    unanswered: Annotated[
        list[str] | None, "Ranks that were gone: the release was sent once, and may not have arrived."
    ] = None
    history: History = None
    successes_not_logged: SuccessesNotLogged = None


class PullsEndedAlike(EndedAlike):
    """Up to 64 pulls failed alike: beyond the first 32 short `pull_ended` of one cause and peer."""

    side, levels = "decode", ("warning",)


class PullTransition(OfPull):
    """One entry of a pull's history."""

    levels = ("debug",)
    to: Annotated[str, "The state, or a note."]
    at_s: Annotated[float, "Since the first entry."]


class ReleaseRefused(OfPull):
    """A prefill rank refused a pull's release: what it lent will expire."""

    levels = ("warning",)
    cause: Annotated[str, "The rank's reason, such as `wrong_request`: the key belongs to another request id."]
    detail: Annotated[str, "The rank's words."]
    outcome: ReleaseOutcome
    ranks: Annotated[list[str], "The rank."]


class ReleaseUnanswered(OfPull):
    """Prefill ranks never acknowledged a pull's release, and it is not sent again: if they live, what they lent will
    expire.
    """

    levels = ("warning",)
    cause: Annotated[str, "`timeout` (`release_timeout_s`), `engine_closed`, or why the rank is gone."]
    outcome: ReleaseOutcome
    ranks: Annotated[list[str], "The ranks."]
    seconds: Annotated[float, "Since the outcome."]
    detail: Annotated[str, "The same in words."] = ""


class BlocksReturned(OfPull):
    """Nothing can write the blocks of a failed pull any more."""

    levels = ("warning",)
    seconds_after_failure: Annotated[float, "How long the blocks were held."]
    blocks: Annotated[int | None, "How many blocks."] = None


class BlocksRetired(OfPull):
    """A transfer did not end within `pull.held_s` after its pull had failed: its blocks must never be used again."""

    levels = ("error",)
    blocks: Annotated[int, "How many blocks."]
    held_by: Annotated[list[str], "Ranks whose transfers may still write them, with addresses."]
    transfers: Annotated[int, "How many blocks."]
    seconds_after_failure: Annotated[float, "How long the blocks were held."]
    history: History


class OffloadStarted(Told):
    """An offload has started: blocks are kept outside the accelerator from now on.

    The line also has what the tiers run on, under the names of `Offload.describe`.
    """

    host_bytes: Annotated[int, "Size of the host memory tier."]
    file_bytes: Annotated[int, "Size of the file tier; 0 if there is none."]
    blocks_found: Annotated[int, "Blocks that were in the files already."]
    seconds: Annotated[float, "How long the start took."]
    tiers: Annotated[dict[str, str], "Versions, transports and modes."]


class OffloadMoved(Told):
    """What was moved between the tiers since the last such line.

    The lines come after one second, two, four and so on, later once a minute at most; none while nothing is moved, and
    one at the end.
    """

    seconds: Annotated[float, "Since the last such line, or the start."]
    counters: Annotated[dict[str, int], "What was counted in this time, as in `offload_stopped`, if above 0."]
    blocks: Annotated[dict[str, int], "Tier -> how many blocks it keeps now."]


class OffloadStopped(Told):
    """The offload has ended: nothing is stored or loaded any more."""

    counters: Annotated[dict[str, int], "What was counted since the start."]
    written_back: Annotated[int, "Blocks that were written to files while the offload closed."]
    lost: Annotated[int, "Blocks that were in host memory only, although there is a file tier."]


class OffloadFailed(Told):
    """A store or a load failed, took too long, or found no room; its blocks are misses.

    Ten lines at once, then one per second; of stores without room one per minute; with `held` always.
    """

    levels = ("warning",)
    cause: Annotated[
        str,
        "`failed`, `timeout`, or `no_room`: host memory is pinned, so a load cannot bring blocks from files, or a "
        "store does not fit.",
    ]
    detail: Annotated[str, "The same in words."]
    what: Annotated[str, "`store` or `load`."]
    request_id: Annotated[str, "The request's id."]
    job: Annotated[str, "The rank's id of the store or load."]
    blocks: Annotated[int, "How many blocks were not moved."]
    held: Annotated[int, "1 if a copy in doubt may still touch the caller's blocks."]
    seconds: Annotated[float, "From the call to its end."]
    not_logged: NotLogged = None


class OffloadLate(Told):
    what: Annotated[str, "`store` or `load`."]
    request_id: Annotated[str, "The request's id."]
    job: Annotated[str, "The rank's id of the store or load."]
    blocks: Annotated[int, "How many blocks."]
    seconds_after_failure: Annotated[float, "How long the blocks were held."]


class OffloadReturned(OffloadLate):
    """Nothing can read or write the blocks of a failed store or load any more."""

    levels = ("warning",)


class OffloadRetired(OffloadLate):
    """A copy did not end within `offload.held_s` after its store or load had failed.

    If it was a load, its blocks must never be used again.
    """

    levels = ("error",)


class OffloadFilesLost(Told):
    """The file tier takes no more writes, or is off: the disk is full or broken, or somebody removed files.

    Host memory goes on.
    """

    levels = ("warning",)
    cause: Annotated[str, "What happened, and the remedy."]
    reads: Annotated[int, "1 if nothing is read either."]


class OffloadFilesDamaged(Told):
    """At its start the file tier did not find all blocks that it should have.

    They are misses, nothing else. Once per start.
    """

    levels = ("warning",)
    folder: Annotated[str, "The rank's directory."]
    found: Annotated[int, "Blocks that were found."]
    index_damaged: Annotated[int, "1 if the index was damaged and set aside (`*.damaged`): nothing is found."]
    missing: Annotated[int, "Blocks whose file is gone, or was cut short."]
    malformed: Annotated[int, "Blocks whose index entry makes no sense."]
    overlapping: Annotated[int, "Blocks that newer ones have overwritten."]
    unfit: Annotated[int, "Blocks of another length."]


class OffloadLeftOut(Told):
    """Files that ranks of another geometry left cannot be read here, so their blocks are not found."""

    levels = ("warning",)
    cause: Annotated[
        str,
        "Which directory, and why: its index is damaged or of another format, its files are gone, somebody else "
        "may write it, its blocks are too large to pass through, or there is no memory for them. `asynckv offload "
        "prune --all` removes what nobody needs.",
    ]


class OffloadBroken(Told):
    """The offload is off: the engine was resumed with memory that cannot be used for it; or opening it at the start did
    not end, and was abandoned.
    """

    levels = ("error",)
    cause: Annotated[str, "Why."]


class LoopWasAway(Told):
    """The event loop did not run the engine for longer than `log.away_s`: nobody was answered.

    It was away for the `seconds` before the line's timestamp, and up to 2.5 s longer if nothing was under way. Three
    lines at once, then one in ten seconds, and any that is longer by half than the last one logged.
    """

    levels = ("warning",)
    seconds: Annotated[float, "How late the engine's timer was."]
    leases: Annotated[int, "Leases that were open meanwhile."]
    pulls: Annotated[int, "Pulls that were open meanwhile."]
    parked: Annotated[int, "Claims and releases that waited for their request to be lent."]
    not_logged: NotLogged = None
    not_logged_s: Annotated[float | None, "For how long the loop was away in those."] = None


class InternalError(Told):
    """A bug of asynckv.

    What it was working on was dropped, and the engine goes on. Ten lines at once, then one per second.
    """

    levels, most = ("error",), (1.0, 10.0)
    error: Annotated[str, "The exception."]
    traceback: Annotated[str, "Where it was raised."]
    not_logged: NotLogged = None


class SlowGeometry(Told):
    """The two sides' memory orders fit badly: reads need many small pieces."""

    side, levels = "decode", ("warning",)
    peer: Annotated[str, "The rank and its start."]
    detail: Annotated[str, "How many, and why."]


class TableRefused(Told):
    """NIXL cannot prepare reads from a rank."""

    side, levels = "decode", ("error",)
    peer: Annotated[str, "The rank and its start."]
    detail: Annotated[str, "NIXL's words."]


class DataPlaneRestarted(Told):
    """The data plane's process died, and another one serves."""

    levels = ("warning",)
    cause: Annotated[str, "Exit status or signal."]
    agent: Annotated[str, "Name of the new agent."]
    seconds: Annotated[float, "For how long no process served."]
    transfers_failed: Annotated[int, "How many of this engine's transfers failed."]


class DataPlaneBroken(Told):
    """The data plane's process died too often: the next one starts after a pause."""

    levels = ("error",)
    cause: Annotated[str, "Exit status or signal."]
    pause_s: Annotated[float, "How long the pause is."]


class DataPlaneInProcess(Told):
    """UCX can end this process when a reader dies, because the memory cannot be shared with a separate data plane
    process.
    """

    levels = ("warning",)
    detail: Annotated[str, "Which memory, and what to do."]


class SetupDoubtful(Told):
    """The engine works, but a mistake in its configuration would not be noticed: its layout does not name the model, or
    it reads from a rank that calls itself by the same name.
    """

    levels = ("warning",)
    detail: Annotated[str, "Which of them, and what to do."]


EVENTS: Final[Mapping[str, type[Told]]] = {
    kind.event: kind
    for kind in tuple(globals().values())
    if isinstance(kind, type) and issubclass(kind, Told) and not kind.__subclasses__()
}
"""All of them, by their names; a class that others are made of is none."""


def pull_ids(pull: Pull) -> tuple[str, str, str, str, int]:
    """Return the fields of `OfPull`."""
    params = pull.params
    return pull.request_id, params.request_id, pull.pull_id, params.engine_id, params.key.sequence


def release_unanswered(pull: Pull, ranks: Sequence[str], cause: str, now: float, detail: str = "") -> ReleaseUnanswered:
    seconds = round(now - pull.published_at, 6)
    return ReleaseUnanswered(*pull_ids(pull), cause, pull.outcome, list(ranks[:MAX_NAMED]), seconds, short(detail))


def release_refused(pull: Pull, rank: str, answer: wire.Refused) -> ReleaseRefused:
    return ReleaseRefused(*pull_ids(pull), answer.reason, short(answer.detail), pull.outcome, [rank])


def lease_granted(lease: Lease, pull_id: PullId) -> LeaseGranted:
    grant, sequence = lease.grants[pull_id], lease.lent.key.sequence
    seconds, after_s = round(grant.until - grant.since, 6), round(grant.since - lease.lent_at, 6)
    return LeaseGranted(lease.lent.request_id, sequence, grant.name, pull_id, seconds, after_s)
