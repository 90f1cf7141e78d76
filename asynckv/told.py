"""The events of an engine as types, for its log, and for the tools that read logs.

An event is named after its type: `lease_ended` comes from `LeaseEnded`. A name never changes, because dashboards and
readers of old logs depend on it. Fields may be added. An existing field keeps its meaning, and a reader must work
without fields that were added later. `docs/logging.md` is generated from these types.

A line leaves out each field that is empty or None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import Struct

Level = Literal["debug", "info", "warning", "error"]

MAX_TEXT = 512  # characters that are kept of a text from another process
MAX_NAMED = 64  # ranks that the line about one ended request names at most
MANY_PROMPTS, LONG_S = 50, 30.0  # so many prompts in a row without params, over so many seconds, are a warning
MAX_GRANTS = 8  # grants of one lease to one reader that are logged at most; also of those given while it was lent
RequestText = Annotated[str, "This side's id of the request."]
PrefillText = Annotated[str, "The prefill side's id of the request; empty if the params cannot be read."]
PullText = Annotated[str, "The attempt: the first half of the reader's incarnation, and a number."]
PrefillEngine = Annotated[str, "Id of the prefill engine."]
KeySequence = Annotated[int, "Number of the request's key, the same on all ranks of both sides."]
Peer = Annotated[str, "The remote rank and its process start."]
Detail = Annotated[str, "The cause in words."]
NotLogged = Annotated[int | None, "Events that were not logged since the last such line."]
SuccessesNotLogged = Annotated[int | None, "Requests that ended well, or were lent, without a line since the last one."]
Entry = Annotated[str | dict[str, Any], "The state, or a note: its name (`note`) and its fields."]
History = Annotated[
    list[tuple[float, Entry]] | None, "Every state and note: `[seconds since the first, state or note]`."
]
Lost = Annotated[
    str,
    "How a rank was lost (`goodbye`, `silent`, `broken`, `forgotten`, `replaced`, `left`, `idle`) or could not be met "
    "(`no_answer`, `not_loaded`, `turned_away`, `unlisted_listener`, `no_key`, `needs_keys`, `no_files`, `gave_way`); "
    "`recalled`: it took the blocks back at once.",
]
HeldState = Annotated[str, "State of the lease or pull; left out if the line covers several states."]
Waits = Annotated[str, "The reason for waiting, in words."]
Requests = Annotated[int, "Number of requests that the line covers."]
LayoutPrint = Annotated[str, "Fingerprint of the memory layout."]
Parked = Annotated[int, "Claims, releases and followers that wait for their request to be lent."]
HeldFor = Annotated[float, "Time for which the blocks were held."]
ReleaseOutcome = Annotated[str, "Outcome in the release: `complete`, `failed`, `cancelled` or `retry`."]


ITSELF, ADVICE = ("itself",), ("advice",)
"""Warnings that nothing has to end: see `Told.until`."""


def short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 4]} ..."


class RefusedMessage(Struct, frozen=True, array_like=True):
    after_s: float
    message: str
    reason: str
    who: str
    detail: str = ""
    limit: str = ""


RefusedMessages = Annotated[
    list[RefusedMessage] | None,
    "Refused messages about this request, the first of each kind: `[seconds since it was lent, claim|renew|release, "
    "reason, sender, detail, limit]`; `limit` is `max_lease_s` if that is the reason. `parked_too_long` is a release "
    "that came before the request was lent and was dropped.",
]


class LastClaim(Struct, frozen=True):
    """The last attempt of one reader, in seconds since the request was lent."""

    pull_id: str
    claimed_s: float
    heard_s: float


class StepWait(Struct, frozen=True):
    """Things of one kind that only a step of the engine around this rank can take, and the wait of the oldest."""

    number: int
    seconds: float


StepWaits = Annotated[
    dict[str, StepWait],
    "`number` of things that wait for a step of the engine around this rank, and `seconds` that the oldest has waited: "
    "`result` (not taken), `announcement` (not pulled) or `claim` (of a request that is not lent). Empty while idle.",
]


class Line(Struct, frozen=True):
    """The fields of every line in any format. The writer adds `timestamp`, `level` and `log_...`."""

    timestamp: Annotated[str, "Time of logging: ISO 8601, UTC, microseconds."]
    level: Annotated[str, "`debug`, `info`, `warning` or `error`."]
    event: Annotated[str, "Name of the event."]
    engine_id: Annotated[str, "The engine that logs the line."]
    tp_rank: Annotated[int, "The engine's TP rank."]
    incarnation: Annotated[str, "This start of the process; it changes when the engine resumes."]
    rank: Annotated[str, "The rank and its start as all logs write it: `prefill/pp1/tp3@0a1b2c3d`."]
    log_dropped: Annotated[int, "Lines before this one that are missing in the engine's own log file."] = 0
    log_not_rotated: Annotated[str, "Why the engine's own log file exceeds `max_bytes`; logged once."] = ""


class Told(Struct, omit_defaults=True):
    """An event that engines log.

    Attributes:
        event: Name of the event.
        side: Side that logs the event: `prefill`, `decode`, or `both`.
        levels: Levels at which the event may be logged. The first applies unless the maker of the event names another.
        most: Lines per second, and lines at once after a silence; None logs every event.
        until: Types of the events that end a warning or error about the same subject; `ITSELF` if it is over when it is
            logged, and `ADVICE` if it is about the set-up.
        only_with: A field without which a warning or error is over when it is logged.
    """

    event: ClassVar[str]
    side: ClassVar[str] = "both"
    levels: ClassVar[tuple[Level, ...]] = ("info",)
    most: ClassVar[tuple[float, float] | None] = None
    until: ClassVar[tuple[str, ...]] = ()
    only_with: ClassVar[str] = ""

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__(**config)
        cls.event = re.sub(r"(?<=.)(?=[A-Z])", "_", cls.__name__).lower()


class OfLease(Told):
    side = "prefill"
    request_id: RequestText
    sequence: KeySequence


class OfPull(Told):
    side = "decode"
    request_id: RequestText
    prefill_request_id: PrefillText
    pull_id: PullText
    peer: PrefillEngine
    sequence: KeySequence


class EndedAlike(Told):
    cause: Annotated[str, "Why the requests ended."]
    requests: Requests
    alike: Annotated[dict[str, Any], "Fields that are equal for all of them."]
    each: Annotated[
        dict[str, list[Any]], "Field -> values, one per request (null: left out); `ago_s` is the time since its end."
    ]


class Incomplete(Told):
    stragglers: Annotated[int, "Requests that had not ended."]
    oldest: Annotated[list[str], "Some of them: request id, why its blocks are held, and the ranks that it waits for."]


class EngineStarted(Told):
    """The engine started. Processes of one `boot_id`, or without one of one `host`, share a wall clock."""

    address: Annotated[str, "Address of the control plane."]
    layout: LayoutPrint
    bytes: Annotated[int, "Size of the registered memory."]
    host: Annotated[str, "Host name."]
    pid: Annotated[int, "Process id."]
    version: Annotated[str, "Version of asynckv."]
    lease_s: Annotated[float, "Time that an unclaimed request stays lent."]
    grant_s: Annotated[float, "Length of one grant."]
    max_lease_s: Annotated[float, "Time that renewals can keep a request lent."]
    parked_s: Annotated[float, "Time that early claims and releases are kept."]
    timeout_s: Annotated[float, "Default deadline of a pull."]
    announce_s: Annotated[float, "Time that an announced request may wait to be pulled."]
    held_s: Annotated[float, "Time after which blocks that a transfer may still write are retired."]
    release_timeout_s: Annotated[float, "Time after which an unanswered release is given up."]
    backend: Annotated[str, "NIXL back end, or `simulated`."]
    token_shards: Annotated[
        list[tuple[int, int, int, int]] | None,
        "This rank's share of tokens, per group that ranks share: `[group, number of ranks, its place among them, "
        "consecutive tokens on each]`.",
    ] = None
    boot_id: Annotated[str, "The boot of the machine; with it `host` is not mistaken for another of its name."] = ""
    pid_namespace: Annotated[int | None, "The namespace that `pid` is a number of."] = None
    pid_began: Annotated[int | None, "Start of the process, in clock ticks since the boot."] = None
    nixl: Annotated[str, "Version of NIXL."] = ""
    nixl_variant: Annotated[str, "NIXL's package."] = ""
    ucx_tls: Annotated[str, "Transports that UCX may use."] = ""
    ucx_net_devices: Annotated[str, "Devices that UCX may use."] = ""
    ucx_error_handling_mode: Annotated[str, "Whether UCX notices lost peers."] = ""
    engine_config: Annotated[str, "Further UCX settings."] = ""
    completions: Annotated[str, "How completed transfers are found."] = ""
    posting_threads: Annotated[str, "Which threads post which reads."] = ""
    staged_reads: Annotated[str, "Whether small pieces are staged, with the measured costs that decide."] = ""
    sync_mode: Annotated[str, "Locking of NIXL's agent."] = ""
    serving: Annotated[str, "Separate process that serves remote readers, if any."] = ""
    reading: Annotated[str, "Separate process that posts this engine's reads, if any."] = ""


class EngineStopped(Told):
    """The engine was closed. If a log ends without this line, its process was killed."""

    seconds: Annotated[float, "Time since the engine started."]
    cut_short: Annotated[int, "Requests that the end did not wait for."]
    counters: Annotated[dict[str, int], "Leases, pulls and refusals by outcome, as in the statistics; without zeros."]


class EngineSuspended(Told):
    """The engine released its memory; nothing reads or writes it."""

    cut_short: Annotated[int, "Requests that had not ended after the drain."]


class EngineResumed(Told):
    """The engine registered its memory again, and has another incarnation from here on."""

    memory_epoch: Annotated[int, "Number of times that the memory was registered anew."]
    layout: LayoutPrint


class EngineClosedWithStragglers(Incomplete):
    """The engine was closed or suspended before all requests had ended."""

    levels = ("warning",)
    until = ITSELF
    how: Annotated[str, "`closed` or `suspended`."]
    promises_cut_short: Annotated[list[str] | None, "Requests with readers that held a grant for longer."] = None


class EngineAlive(Told):
    """The engine is alive; logged every half lease. If a log ends, its process has ended or hangs."""

    leases: Annotated[int, "Open leases."]
    pulls: Annotated[int, "Open pulls and announcements."]
    parked: Parked
    blocks_held: Annotated[int, "Blocks that are lent, or that a pull writes."]
    waits_for: Annotated[list[str], "Ranks that pulls wait for, the first few."]
    waits_for_step: StepWaits = {}
    step_s: Annotated[
        float | None,
        "Time since the last step of the engine around this rank; left out if that sleeps until there are results, or "
        "runs this loop itself. An idle engine need not make steps.",
    ] = None
    follows: Annotated[int, "Requests that follow a ticket, and wait for an offer."] = 0
    followers: Annotated[int, "Decode ranks that follow tickets which no request has brought yet."] = 0


class Drained(Told):
    """A drain ended, and no request is under way."""


class DrainIncomplete(Incomplete):
    """A drain ended before all requests had ended."""

    levels = ("warning",)
    until = ("Drained", "EngineStopped", "EngineSuspended")


class PeerChanged(Told):
    """A remote rank's state changed; a warning if it was lost, unless it said goodbye and no pull failed with it."""

    side, levels = "decode", ("info", "warning")
    until = ("PeerChanged",)
    peer: Peer
    address: Annotated[str, "Address of the rank."]
    peer_incarnation: Annotated[str, "The rank's full incarnation."]
    before: Annotated[str, "State before."]
    state: Annotated[str, "`connecting` (this side sends its first hello), `loading` (the welcome came), `ready`, ..."]
    cause: Annotated[str, "Why the rank no longer serves this engine."] = ""
    how: Lost = ""
    detail: Detail = ""
    pulls_failed: Annotated[int | None, "Pulls that failed with the rank."] = None


class PeerDraining(Told):
    """A remote rank drains and lends nothing new."""

    side = "decode"
    peer: Peer
    address: Annotated[str, "Address of the rank."]


class FollowFailed(Told):
    """A request followed a ticket, and was not offered its params. At most 100 lines at once, then ten per second."""

    side, levels, most, until = "decode", ("warning", "info", "debug"), (10.0, 100.0), ITSELF
    request_id: RequestText
    pull_id: PullText
    peer: PrefillEngine
    cause: Annotated[str, "`no_offer` if its time was over, or why its prefill rank offers nothing."]
    detail: Detail
    seconds: Annotated[float, "Time for which it followed."]
    peer_ranks: Annotated[list[str], "The prefill rank that it followed."]
    not_logged: NotLogged = None


class ReaderMet(Told):
    """A reader's process shook hands for the first time. At most 1,000 lines at once, then ten per second."""

    side, most = "prefill", (10.0, 1000.0)
    reader: Annotated[str, "The rank and its start, as the reader names itself."]
    reader_incarnation: Annotated[str, "The reader's full incarnation."]
    minor: Annotated[int, "Minor version of the reader's protocol."]
    not_logged: NotLogged = None


class ReaderRefused(Told):
    """This process refused to serve a reader. At most ten lines at once, then one per second."""

    side, levels, most = "prefill", ("warning",), (1.0, 10.0)
    until = ITSELF
    reader: Annotated[str, "The rank and its start, as the reader names itself; empty if it speaks another protocol."]
    said: Annotated[str, "The refused message: `hello`, `claim`, `renew`, `release` or `pack`."]
    cause: Annotated[str, "`wrong_target`, `restarted`, `engine_closed` or `protocol_version`."]
    detail: Annotated[str, "The words that the reader was sent."]
    not_logged: NotLogged = None


class Refused(Told):
    """A connection was rejected, or this engine refused to connect. At most ten lines at once, then one per second."""

    levels, most = ("warning",), (1.0, 10.0)
    until = ITSELF
    cause: Annotated[str, "Name of the counter `control.*` (`docs/security.md`)."]
    who: Annotated[str, "The address, and the public key if there is one."]
    not_logged: NotLogged = None


class LeaseLent(OfLease):
    """Blocks were lent. Sampled: a request with this line also has a line for its end."""

    blocks: Annotated[int, "Number of blocks."]
    lease_s: Annotated[float, "Length of the lease if no reader claims it."]
    readers: Annotated[int | None, "Decode engines that may read the request, if more than one."] = None
    successes_not_logged: SuccessesNotLogged = None


class LeaseGranted(OfLease):
    """A reader got its first grant of a sampled lease."""

    reader: Annotated[str, "The reading rank and its start."]
    pull_id: PullText
    seconds: Annotated[float, "Length of the grant."]
    after_s: Annotated[float, "Time since the request was lent."]


class HeldLease(Struct, frozen=True, omit_defaults=True):
    request_id: RequestText
    sequence: KeySequence
    lent_s: Annotated[float, "Time since the request was lent."]
    claims: Annotated[
        dict[str, LastClaim],
        "Reader -> `pull_id`, `claimed_s` and `heard_s` (both since it was lent) of its last attempt. Lines of older "
        "versions lack `claimed_s`; there `heard_s` counts back from the line.",
    ]
    left_s: Annotated[float | None, "Longest time that this can still last, unless a reader asks for more."] = None
    refused: RefusedMessages = None
    owed: Annotated[list[str] | None, "Readers that have not released, as in `lease_ended`."] = None


class LeaseHeld(Told, kw_only=True):
    """Requests have been lent for a third of their lease (`log.held_fraction`), or for 2, 4 ... times as long. Those
    that wait for the same share a line, and there are a few lines in ten seconds. The level is info while all readers
    renew.
    """

    side, levels = "prefill", ("warning", "info")
    until = ("LeaseEnded", "LeasesEndedAlike")
    state: HeldState = ""
    waits: Waits
    requests: Requests
    oldest: Annotated[list[HeldLease], "The three that have been held longest."]


class LeaseEnded(OfLease):
    """The blocks belong to the prefill engine again. Sampled if all readers released, or if recalled; else a warning,
    always logged.
    """

    levels = ("info", "warning")
    until = ITSELF
    cause: Annotated[str, "`released`, `expired`, `revoked`, or `closed` (the engine ended before the lease)."]
    seconds: Annotated[float, "Time for which the request was lent."]
    readers: Annotated[dict[str, str], "Reader -> outcome of its release: `complete`, `failed` or `cancelled`."]
    blocks: Annotated[int, "Number of blocks."]
    packed: Annotated[int | None, "Packed copies that readers asked for, if any."] = None
    offers: Annotated[int | None, "Offers to ranks that followed its ticket; left out if it had none."] = None
    owed: Annotated[list[str] | None, "Readers that never released; `*`: a decode engine not heard of at all."] = None
    claims: Annotated[
        dict[str, LastClaim] | None,
        "Reader in `owed` -> `pull_id`, `claimed_s` and `heard_s` (both since it was lent) of its last attempt.",
    ] = None
    refused: RefusedMessages = None
    revoked_by: Annotated[
        str,
        "Origin of the revocation: `caller` (`LentRequest.withdraw`), `withdraw`, `recall` (either, of a request that "
        "may be recalled), `no_room` (`Engine.reclaim`), or the engine's end: `closed`, `suspended`. This is no leak.",
    ] = ""
    late_s: Annotated[float | None, "Delay in noticing the expiry, because the event loop was blocked."] = None
    history: History = None
    successes_not_logged: SuccessesNotLogged = None


class LeasesEndedAlike(EndedAlike):
    """Up to 64 leases ended alike: one cause and the same owed readers, beyond the first 32 `lease_ended`."""

    side, levels = "prefill", ("warning",)
    until = ITSELF


class LeaseTransition(OfLease):
    """One entry of a lease's history."""

    levels = ("debug",)
    to: Entry
    at_s: Annotated[float, "Time since the request was lent."]


class RequestWithdrawn(OfLease):
    """A request will never be lent."""

    waited: Annotated[int, "Pulls that waited for the request."]
    pull_ids: Annotated[list[str], "Some of these pulls."]


class HeldPull(Struct, frozen=True, omit_defaults=True):
    request_id: RequestText
    prefill_request_id: PrefillText
    pull_id: PullText
    peer: PrefillEngine
    sequence: KeySequence
    state_s: Annotated[float, "Time in this state."]
    ranks: Annotated[dict[str, str], "Prefill rank -> progress of the request there."]
    left_s: Annotated[float | None, "Longest time that this can still last."] = None


class PullHeld(Told, kw_only=True):
    """Announcements or pulls have been in one state for a third of their lease (`log.held_fraction`), or for 2, 4 ...
    times as long. Those that wait for the same share a line, and there are a few lines in ten seconds. A line about
    announcements has level info, because an announcement may wait for `announce_s`.
    """

    side, levels = "decode", ("warning", "info")
    until = ("PullEnded", "PullsEndedAlike", "PullRetried", "BlocksReturned", "BlocksRetired")
    state: HeldState = ""
    waits: Waits
    requests: Requests
    oldest: Annotated[list[HeldPull], "The three that have been held longest."]


class PullRefused(Told):
    """This engine itself refused to pull or announce a request, and began nothing. At most ten lines at once, then one
    per second.
    """

    side, levels, most = "decode", ("warning",), (1.0, 10.0)
    until = ITSELF
    request_id: RequestText
    cause: Annotated[str, "Name of the error that was raised."]
    detail: Annotated[str, "Text of the error."]
    prefill_request_id: PrefillText = ""
    peer: PrefillEngine = ""
    sequence: Annotated[int | None, "Number of the request's key, the same on all ranks of both sides."] = None
    not_logged: NotLogged = None


class PullRetried(OfPull):
    """A pull failed and is tried again."""

    cause: Annotated[str, "Why the pull failed."]
    attempt: Annotated[int, "Number of the next attempt."]
    after_s: Annotated[float, "Time until the next attempt."]


class PullEnded(OfPull):
    """A pull ended, or a request was discharged without one, announced or not. Successes are sampled. A failed pull is
    a warning, and always logged; a slow one is a warning. The line is short if another pull failed in the same words
    within the last second.
    """

    levels = ("info", "warning")
    until, only_with = ("BlocksReturned", "BlocksRetired"), "held_transfers"
    cause: Annotated[str, "`complete`, `cancelled`, `discharged`, or why the pull failed."]
    seconds: Annotated[float, "Time from the call to the outcome."]
    same_as: Annotated[str, "The earlier pull that failed in the same words; its line has the rest."] = ""
    failed_in: Annotated[str, "Phase in which the pull failed."] = ""
    failed_with: Annotated[list[str] | None, "Prefill ranks that the failure is about."] = None
    how: Lost = ""
    detail: Detail = ""
    waited_for: Annotated[str, "What the pull waited for when it failed, in words."] = ""
    attempt: Annotated[int | None, "Number of the attempt, if it is not the first."] = None
    peer_ranks: Annotated[list[str] | None, "Prefill ranks to which this pull owes a release."] = None
    read_ranks: Annotated[list[str] | None, "Prefill ranks that were read, or were to be read."] = None
    bytes: Annotated[int | None, "Bytes that were read; 0 if the pull failed."] = None
    pieces: Annotated[int | None, "Pieces that were read before, in a head start."] = None
    piece_bytes: Annotated[int | None, "Bytes that they brought; `bytes` is without them."] = None
    descriptors: Annotated[int | None, "Planned descriptors, before NIXL merges them."] = None
    posts: Annotated[int | None, "Posted transfers."] = None
    rereads: Annotated[int | None, "Reads that were repeated because they had begun too early."] = None
    packed: Annotated[int | None, "Packed copies that were read, if any."] = None
    looked_bytes: Annotated[int | None, "Bytes that were read a second time and compared, if any."] = None
    phases: Annotated[dict[str, float] | None, "Phase -> seconds (`docs/logging.md`)."] = None
    held_transfers: Annotated[int | None, "Transfers that may still write its blocks; `blocks_returned` follows."] = (
        None
    )
    blocks: Annotated[int | None, "Blocks that transfers may still write."] = None
    unanswered: Annotated[list[str] | None, "Lost ranks: the release was sent once, and may not have arrived."] = None
    history: History = None
    successes_not_logged: SuccessesNotLogged = None


class PullsEndedAlike(EndedAlike):
    """Up to 64 pulls failed alike: one cause and peer, beyond the first 32 short `pull_ended`."""

    side, levels = "decode", ("warning",)
    until = ITSELF


class PullTransition(OfPull):
    """One entry of a pull's history."""

    levels = ("debug",)
    to: Entry
    at_s: Annotated[float, "Time since the first entry."]


class ReleaseRefused(OfPull):
    """A prefill rank refused a pull's release, so its lease will expire."""

    levels = ("warning",)
    until = ("LeaseEnded", "LeasesEndedAlike")
    cause: Annotated[str, "The rank's reason, such as `wrong_request`: the key belongs to another request id."]
    detail: Annotated[str, "The rank's words."]
    outcome: ReleaseOutcome
    ranks: Annotated[list[str], "The rank."]


class ReleaseUnanswered(OfPull):
    """Prefill ranks never acknowledged a pull's release, which is not sent again. If they live, their leases expire."""

    levels = ("warning",)
    until = ("LeaseEnded", "LeasesEndedAlike")
    cause: Annotated[str, "`timeout` (`release_timeout_s`), `engine_closed`, or why the rank is gone."]
    outcome: ReleaseOutcome
    ranks: Annotated[list[str], "The ranks."]
    seconds: Annotated[float, "Time since the outcome."]
    detail: Detail = ""


class BlocksReturned(OfPull):
    """Nothing can write the blocks of a failed pull any more."""

    levels = ("warning",)
    until = ITSELF
    seconds_after_failure: HeldFor
    blocks: Annotated[int | None, "Number of blocks."] = None


class BlocksRetired(OfPull):
    """A transfer did not end within `pull.held_s` after its pull had failed; its blocks must never be used again."""

    levels = ("error",)
    until = ("EngineStopped",)
    blocks: Annotated[int, "Number of blocks."]
    held_by: Annotated[list[str], "Ranks with transfers that may still write the blocks, with addresses."]
    transfers: Annotated[int, "Number of transfers."]
    seconds_after_failure: HeldFor
    history: History


class OffloadStarted(Told):
    """The offload started: blocks are kept outside the accelerator from now on. The line also has the fields of
    `Offload.describe`.
    """

    host_bytes: Annotated[int, "Size of the host memory tier."]
    file_bytes: Annotated[int, "Size of the file tier; 0 if there is none."]
    blocks_found: Annotated[int, "Blocks that were in the files already."]
    seconds: Annotated[float, "Duration of the start."]
    tiers: Annotated[dict[str, str], "Versions, transports and modes."]


class OffloadMoved(Told):
    """Moves between the tiers since the last such line. Logged after one second, two, four and so on, later at most
    once a minute. There is no line while nothing moves, and one at the end.
    """

    seconds: Annotated[float, "Time since the last such line, or the start."]
    counters: Annotated[dict[str, int], "Counts of this time that are above 0, as in `offload_stopped`."]
    blocks: Annotated[dict[str, int], "Tier -> blocks that it keeps now."]


class OffloadStopped(Told):
    """The offload ended; nothing is stored or loaded any more."""

    counters: Annotated[dict[str, int], "Counts since the start."]
    written_back: Annotated[int, "Blocks that were written to files while the offload closed."]
    lost: Annotated[int, "Blocks that were in host memory only, although there is a file tier."]


class OffloadFailed(Told):
    """A store or load failed, took too long, or found no room; its blocks are misses. At most ten lines at once, then
    one per second; one per minute for stores without room; always if `held` is 1.
    """

    levels = ("warning",)
    until, only_with = ("OffloadReturned", "OffloadRetired"), "held"
    cause: Annotated[
        str,
        "`failed`, `timeout`, or `no_room`: host memory is pinned, so a load cannot bring blocks from files, or a "
        "store does not fit.",
    ]
    detail: Detail
    what: Annotated[str, "`store` or `load`."]
    request_id: RequestText
    job: Annotated[str, "The rank's id of the store or load."]
    blocks: Annotated[int, "Blocks that were not moved."]
    held: Annotated[int, "1 if a copy in doubt may still touch the caller's blocks."]
    seconds: Annotated[float, "Time from the call to its end."]
    not_logged: NotLogged = None


class OffloadLate(Told):
    what: Annotated[str, "`store` or `load`."]
    request_id: RequestText
    job: Annotated[str, "The rank's id of the store or load."]
    blocks: Annotated[int, "Number of blocks."]
    seconds_after_failure: HeldFor


class OffloadReturned(OffloadLate):
    """Nothing can read or write the blocks of a failed store or load any more."""

    levels = ("warning",)
    until = ITSELF


class OffloadRetired(OffloadLate):
    """A copy did not end within `offload.held_s` after its job had failed. A load's blocks must never be used again."""

    levels = ("error",)
    until = ("EngineStopped",)


class OffloadFilesLost(Told):
    """The file tier takes no more writes, or is off: the disk is full or broken, or files were removed. Host memory
    goes on.
    """

    levels = ("warning",)
    until = ("EngineStopped", "OffloadStopped")
    cause: Annotated[str, "The failure and its remedy."]
    reads: Annotated[int, "1 if nothing is read either."]


class OffloadFilesDamaged(Told):
    """At its start the file tier found fewer blocks than expected; the rest are misses, nothing else."""

    levels = ("warning",)
    until = ITSELF
    folder: Annotated[str, "The rank's directory."]
    found: Annotated[int, "Blocks that were found."]
    index_damaged: Annotated[int, "1 if the index was damaged and set aside (`*.damaged`): nothing is found."]
    missing: Annotated[int, "Blocks in a file that is gone or was cut short."]
    malformed: Annotated[int, "Blocks with an invalid index entry."]
    overlapping: Annotated[int, "Blocks that newer ones have overwritten."]
    unfit: Annotated[int, "Blocks of another length."]


class OffloadLeftOut(Told):
    """Files that ranks of another geometry left cannot be read here, so their blocks are not found."""

    levels = ("warning",)
    until = ADVICE
    cause: Annotated[
        str,
        "The directory and the reason: a damaged index or one of another format, missing files, another possible "
        "writer, blocks too large to pass through, or no memory for them. `asynckv offload prune --all` removes files "
        "that no process needs.",
    ]


class OffloadBroken(Told):
    """The offload is off: the engine resumed with memory that the offload cannot use, or opening at the start hung and
    was abandoned.
    """

    levels = ("error",)
    until = ("EngineStopped", "EngineResumed")
    cause: Annotated[str, "The reason."]


class PromptsCounted(Told):
    """Prompts that the scheduler has seen since its start; behind vLLM the first worker logs them. While they change,
    there are six lines at once, then one per minute; also a warning of each new cause, and of many without params.
    """

    levels = ("info", "warning")
    until = ITSELF
    with_params: Annotated[int, "Prompts with params for a transfer, or whose router asked for one."] = 0
    without_params: Annotated[int, "Prompts without any. Requests that are to be lent do not count."] = 0
    computed_locally: Annotated[
        dict[str, int], "Cause -> requests that were computed instead of a transfer (`docs/vllm.md`)."
    ] = {}
    in_a_row: Annotated[int, "Prompts without params since the last one that had some."] = 0
    in_a_row_s: Annotated[float, "Time from the first to the last of these."] = 0.0

    @property
    def is_alarming(self) -> bool:
        return self.in_a_row >= MANY_PROMPTS and self.in_a_row_s >= LONG_S


class LoopWasAway(Told):
    """The event loop did not run the engine for longer than `log.away_s`, so no message was answered. The loop was away
    for the `seconds` before the line's timestamp, and up to 2.5 s longer if nothing was under way. At most three lines
    at once, then one in ten seconds, and any that is half as long again as the last one logged.
    """

    levels = ("warning",)
    until = ITSELF
    seconds: Annotated[float, "Delay of the engine's timer."]
    leases: Annotated[int, "Leases that were open meanwhile."]
    pulls: Annotated[int, "Pulls that were open meanwhile."]
    parked: Parked
    waited_s: Annotated[
        float | None, "Time for which the loop's thread was ready to run and had no processor, by the kernel."
    ] = None
    throttled_s: Annotated[float | None, "Time for which a CPU limit of its control groups stopped it."] = None
    not_logged: NotLogged = None
    not_logged_s: Annotated[float | None, "Time that the loop was away in the events that were not logged."] = None


class InternalError(Told):
    """asynckv has a bug. The engine dropped the work at hand and goes on. At most ten lines at once, then one per
    second.
    """

    levels, most = ("error",), (1.0, 10.0)
    until = ITSELF
    error: Annotated[str, "The exception."]
    traceback: Annotated[str, "Where the exception was raised."]
    not_logged: NotLogged = None


class SlowGeometry(Told):
    """The two sides' memory orders or shares of tokens fit badly, so reads need many small pieces."""

    side, levels = "decode", ("warning",)
    until = ADVICE
    peer: Peer
    detail: Annotated[str, "Number of pieces, and the reason."]


class BytesDiffer(Told):
    """A second look found other bytes than the read. Logged once per peer; `pull_ended` tells of each."""

    side, levels = "decode", ("error",)
    until = ITSELF
    peer: Peer
    request_id: Annotated[str, "The request of this side."]
    layer: Annotated[str, "The layer."]
    part: Annotated[str, "The part of it, such as `k`."]
    first_token: Annotated[int, "The first token of the block. A state is the one after the block's last token."]
    num_tokens: Annotated[int, "Number of tokens of the block that were lent."]
    read: Annotated[str, "The first bytes that differ, as this side has them, in hex."]
    seen: Annotated[str, "The same bytes of the lent block, at the second look."]


class TableRefused(Told):
    """NIXL cannot prepare reads from a rank."""

    side, levels = "decode", ("error",)
    until = ITSELF
    peer: Peer
    detail: Annotated[str, "NIXL's words."]


class DataPlaneRestarted(Told):
    """The data plane's process died, and another one serves."""

    levels = ("warning",)
    until = ITSELF
    cause: Annotated[str, "Exit status or signal."]
    agent: Annotated[str, "Name of the new agent."]
    seconds: Annotated[float, "Time for which no process served."]
    transfers_failed: Annotated[int, "Always 0: the reads of this engine run in its own process."]


class DataPlaneBroken(Told):
    """The data plane's process died too often; the next one starts after a pause."""

    levels = ("error",)
    until = ("DataPlaneRestarted", "EngineStopped")
    cause: Annotated[str, "Exit status or signal."]
    pause_s: Annotated[float, "Length of the pause."]


class DataPlaneInProcess(Told):
    """UCX can end this process when a reader dies, because the memory cannot be shared with a separate data plane
    process.
    """

    levels = ("warning",)
    until = ADVICE
    detail: Annotated[str, "The memory concerned, and the remedy."]


class SetupDoubtful(Told):
    """The engine works, but a mistake in its configuration would go unnoticed: its layout does not name the model, or
    it reads from a rank with its own name.
    """

    levels = ("warning",)
    until = ADVICE
    detail: Annotated[str, "Which of them, and the remedy."]


EVENTS: Final[Mapping[str, type[Told]]] = {
    kind.event: kind
    for kind in tuple(globals().values())
    if isinstance(kind, type) and issubclass(kind, Told) and not kind.__subclasses__()
}
"""All events by name, without the base classes."""

ENDS: Final[Mapping[str, frozenset[str]]] = {
    name: frozenset(globals()[x].event for x in kind.until)
    for name, kind in EVENTS.items()
    if kind.until not in ((), ITSELF, ADVICE)
}
"""Warnings and errors that are open until one of some events, all by name."""
