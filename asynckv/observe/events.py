"""All events, in one place: their names, levels, fields and meaning.

What logs say, what readers of logs look for and what `docs/events.md` lists is this. A name is what an event is
called for ever: dashboards and the readers of old logs go by it. Fields may be added; one that is there keeps its
meaning, and a reader must do without the ones that came later.

A test compares what every test's engines log with this table (`problems`): a field that is not documented, or not of
its kind, or missing though it is always there, fails it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["COMMON", "EVENT", "EVENTS", "Event", "Field", "problems"]


class EVENT(enum.StrEnum):
    """What may be logged."""

    ENGINE_STARTED = "engine_started"
    ENGINE_STOPPED = "engine_stopped"
    ENGINE_SUSPENDED = "engine_suspended"
    ENGINE_RESUMED = "engine_resumed"
    ENGINE_CLOSED_WITH_STRAGGLERS = "engine_closed_with_stragglers"
    DRAINED = "drained"
    DRAIN_INCOMPLETE = "drain_incomplete"
    # the network
    PEER_CHANGED = "peer_changed"
    PEER_DRAINING = "peer_draining"
    READER_MET = "reader_met"
    READER_REFUSED = "reader_refused"
    REFUSED = "refused"
    # a prefill side's requests
    LEASE_LENT = "lease_lent"
    LEASE_GRANTED = "lease_granted"
    LEASE_HELD = "lease_held"
    LEASE_ENDED = "lease_ended"
    LEASE_TRANSITION = "lease_transition"
    REQUEST_WITHDRAWN = "request_withdrawn"
    # a decode side's
    PULL_HELD = "pull_held"
    PULL_RETRIED = "pull_retried"
    PULL_ENDED = "pull_ended"
    PULL_TRANSITION = "pull_transition"
    RELEASE_REFUSED = "release_refused"
    RELEASE_UNANSWERED = "release_unanswered"
    BLOCKS_RETURNED = "blocks_returned"
    BLOCKS_RETIRED = "blocks_retired"
    # an offload's
    OFFLOAD_STARTED = "offload_started"
    OFFLOAD_MOVED = "offload_moved"
    OFFLOAD_STOPPED = "offload_stopped"
    OFFLOAD_FAILED = "offload_failed"
    OFFLOAD_RETURNED = "offload_returned"
    OFFLOAD_RETIRED = "offload_retired"
    OFFLOAD_FILES_LOST = "offload_files_lost"
    OFFLOAD_BROKEN = "offload_broken"
    OFFLOAD_FILES_DAMAGED = "offload_files_damaged"
    OFFLOAD_LEFT_OUT = "offload_left_out"
    # the process
    LOOP_WAS_AWAY = "loop_was_away"
    INTERNAL_ERROR = "internal_error"
    SLOW_GEOMETRY = "slow_geometry"
    TABLE_REFUSED = "table_refused"
    DATA_PLANE_RESTARTED = "data_plane_restarted"
    DATA_PLANE_BROKEN = "data_plane_broken"
    DATA_PLANE_IN_PROCESS = "data_plane_in_process"


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an event.

    Attributes:
        kind: `text`, `integer`, `seconds`, `list` or `object`.
        meaning: For people.
        always: It is in every event of its kind.
        of: What the entries of a list of objects hold.
    """

    name: str
    kind: str
    meaning: str
    always: bool = True
    of: tuple[Field, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """What one kind of event says.

    Attributes:
        side: Who logs it: `prefill`, `decode`, or `both`.
        levels: At which it may be.
        meaning: In a sentence or two.
    """

    side: str
    levels: tuple[str, ...]
    meaning: str
    fields: tuple[Field, ...] = ()


TEXT: Final = "text"
INTEGER: Final = "integer"
SECONDS: Final = "seconds"
LIST: Final = "list"
OBJECT: Final = "object"
KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    TEXT: (str,),
    INTEGER: (int,),
    SECONDS: (int, float),
    LIST: (list,),
    OBJECT: (dict,),
}


def always(kind: str, name: str, meaning: str, of: tuple[Field, ...] = ()) -> Field:
    """A field that every event of its kind has."""
    return Field(name, kind, meaning, True, of)


def maybe(kind: str, name: str, meaning: str, of: tuple[Field, ...] = ()) -> Field:
    """A field that is left out where there is nothing to say."""
    return Field(name, kind, meaning, False, of)


COMMON: Final = (
    always(TEXT, "timestamp", "When it was logged: ISO 8601, UTC, microseconds."),
    always(TEXT, "level", "`debug`, `info`, `warning` or `error`."),
    always(TEXT, "event", "The event's name."),
    always(TEXT, "engine_id", "The engine that logs."),
    always(INTEGER, "tp_rank", "Its rank."),
    always(TEXT, "incarnation", "This start of its process; another after the engine was resumed."),
    always(TEXT, "rank", "The engine's rank and start as everybody writes it: `prefill/pp1/tp3@0a1b2c3d`."),
    maybe(INTEGER, "log_dropped", "Lines before this one that the engine's own log file has not got."),
    maybe(TEXT, "log_not_rotated", "Why the engine's own log file goes on though it is full: said once."),
)
"""What every line has, however it is written; `timestamp`, `level` and `log_...` are added by who writes it."""

LEASE_IDS = (
    always(TEXT, "request_id", "The prefill side's id of the request."),
    always(INTEGER, "sequence", "Of its key: the same on all ranks of both sides."),
)
PULL_IDS = (
    always(TEXT, "request_id", "The decode side's id of the request."),
    always(TEXT, "prefill_request_id", "The prefill side's."),
    always(TEXT, "pull_id", "This attempt: the first half of the reader's incarnation, and a number."),
    always(TEXT, "peer", "The prefill engine's id."),
    always(INTEGER, "sequence", "Of the request's key: the same on all ranks of both sides."),
)
NOT_LOGGED = maybe(INTEGER, "not_logged", "How many more there were since the last line that said so.")
SUCCESSES = maybe(
    INTEGER, "successes_not_logged", "Requests that ended well, or were lent, and are not in the log, since the last."
)
HISTORY = "Every transition and note: `[seconds since the first, words]`."
REFUSED_MESSAGES = maybe(
    LIST,
    "refused",
    "Messages about this very request that were turned down, the first of each kind: `[seconds since it was lent, "
    "claim|renew|release, reason, who, detail]`. `parked_too_long`: a release that came before the request was lent, "
    "and "
    "was forgotten.",
)
OUTCOME = always(TEXT, "outcome", "What the release says: `complete`, `failed`, `cancelled` or `retry`.")
WAITS = (
    maybe(TEXT, "state", "Of the lease or the pull (`docs/states.md`); left out where several are said together."),
    always(TEXT, "waits", "What they wait for, in words."),
    always(INTEGER, "requests", "How many wait for the same."),
)
LAYOUT = always(TEXT, "layout", "Fingerprint of the memory's layout.")
STRAGGLERS = (
    always(INTEGER, "stragglers", "How many requests were left."),
    always(LIST, "oldest", "A few of them, in words: request id, why its blocks are held, whom it waits for."),
)

EVENTS: Final[Mapping[EVENT, Event]] = {
    EVENT.ENGINE_STARTED: Event(
        "both",
        ("info",),
        "An engine is up. Processes of one host share a wall clock.",
        (
            always(TEXT, "address", "Where its control plane listens."),
            LAYOUT,
            always(INTEGER, "bytes", "Of memory that is registered."),
            always(TEXT, "host", "Name of the host."),
            always(INTEGER, "pid", "Of the process."),
            always(TEXT, "version", "Of asynckv."),
            always(SECONDS, "lease_s", "How long an unclaimed request stays lent."),
            always(SECONDS, "grant_s", "Length of one promise to a reader."),
            always(SECONDS, "max_lease_s", "Longest that renewals keep a request lent."),
            always(SECONDS, "parked_s", "How long what is said of a request that is not lent yet is remembered."),
            always(SECONDS, "timeout_s", "Default deadline of a pull."),
            always(SECONDS, "announce_s", "How long an announced request may wait to be pulled."),
            always(SECONDS, "held_s", "When blocks that a transfer may still write are given up."),
            always(SECONDS, "release_timeout_s", "When an unanswered release is given up."),
            always(TEXT, "backend", "NIXL's back end, or `simulated`."),
            maybe(TEXT, "nixl", "Version of NIXL."),
            maybe(TEXT, "nixl_variant", "Its package."),
            maybe(TEXT, "ucx_tls", "The transports that UCX may choose."),
            maybe(TEXT, "ucx_net_devices", "The devices that it may use."),
            maybe(TEXT, "ucx_error_handling_mode", "Whether it notices that a peer is lost."),
            maybe(TEXT, "engine_config", "Further settings of UCX."),
            maybe(TEXT, "completions", "How ends of transfers are found."),
            maybe(TEXT, "posting_threads", "What is posted where."),
            maybe(TEXT, "sync_mode", "How NIXL's agent is locked."),
            maybe(TEXT, "serving", "The process that serves remote readers, if it is another."),
            maybe(TEXT, "reading", "Where our own reads are posted, if that is another process."),
        ),
    ),
    EVENT.ENGINE_STOPPED: Event(
        "both",
        ("info",),
        "An engine was closed. A log that just stops is one of a process that was killed.",
        (
            always(SECONDS, "seconds", "Since it started."),
            always(INTEGER, "cut_short", "How many requests were not waited for."),
            always(OBJECT, "counters", "Leases, pulls and refusals by outcome, as in the statistics; without zeros."),
        ),
    ),
    EVENT.ENGINE_SUSPENDED: Event(
        "both",
        ("info",),
        "The memory was let go: nothing reads or writes it.",
        (always(INTEGER, "cut_short", "How many requests had not ended by the end of the drain."),),
    ),
    EVENT.ENGINE_RESUMED: Event(
        "both",
        ("info",),
        "Memory was registered again; from here on under another incarnation.",
        (always(INTEGER, "memory_epoch", "How often it was registered anew."), LAYOUT),
    ),
    EVENT.ENGINE_CLOSED_WITH_STRAGGLERS: Event(
        "both",
        ("warning",),
        "Closing or suspending did not wait longer for what was under way.",
        (
            always(TEXT, "how", "`closed` or `suspended`."),
            *STRAGGLERS,
            maybe(LIST, "promises_cut_short", "Requests whose readers were promised their blocks for longer."),
        ),
    ),
    EVENT.DRAINED: Event("both", ("info",), "A drain ended, and nothing is under way."),
    EVENT.DRAIN_INCOMPLETE: Event("both", ("warning",), "A drain ended before what was under way.", STRAGGLERS),
    EVENT.PEER_CHANGED: Event(
        "decode",
        ("info", "warning"),
        "A remote rank's state changed; a warning if it went badly, and not if it was announced and took no pull "
        "along.",
        (
            always(TEXT, "peer", "The rank and its start."),
            always(TEXT, "address", "Where it listens."),
            always(TEXT, "peer_incarnation", "Its start, in full."),
            always(TEXT, "before", "Its state before."),
            always(TEXT, "state", "`connecting` (our first hello leaves), `loading` (its welcome came), `ready`, ..."),
            maybe(TEXT, "cause", "Why it serves us no more."),
            maybe(TEXT, "detail", "In words."),
            maybe(INTEGER, "pulls_failed", "How many pulls it took along."),
        ),
    ),
    EVENT.PEER_DRAINING: Event(
        "decode",
        ("info",),
        "A remote rank has said that it lends nothing new.",
        (always(TEXT, "peer", "The rank and its start."), always(TEXT, "address", "Where it listens.")),
    ),
    EVENT.READER_MET: Event(
        "prefill",
        ("info",),
        "A start of a reader's process was welcomed for the first time. A thousand at once, then ten per second.",
        (
            always(TEXT, "reader", "Its name and start, as it says."),
            always(TEXT, "reader_incarnation", "Its start, in full."),
            always(INTEGER, "minor", "Which minor version of the protocol it speaks."),
            NOT_LOGGED,
        ),
    ),
    EVENT.READER_REFUSED: Event(
        "prefill",
        ("warning",),
        "A reader is not served by this start of the process, or not at all. Ten at once, then one per second.",
        (
            always(TEXT, "reader", "Its name and start, as it says; empty if it speaks another protocol."),
            always(TEXT, "said", "What it had said: `hello`, `claim`, `renew` or `release`."),
            always(TEXT, "cause", "`wrong_target`, `restarted`, `engine_closed` or `protocol_version`."),
            always(TEXT, "detail", "In words, as it was told."),
            NOT_LOGGED,
        ),
    ),
    EVENT.REFUSED: Event(
        "both",
        ("warning",),
        "The listener turned a connection away, or this side may not connect to an address. Ten at once, then one per "
        "second.",
        (
            always(TEXT, "cause", "As in the counters `control.*` (`docs/security.md`)."),
            always(TEXT, "who", "Address, and public key if there is one."),
            NOT_LOGGED,
        ),
    ),
    EVENT.LEASE_LENT: Event(
        "prefill",
        ("info",),
        "Blocks were lent. Sampled: who finds it finds the end of the lease, too.",
        (
            *LEASE_IDS,
            always(INTEGER, "blocks", "How many."),
            always(SECONDS, "lease_s", "How long the lease lasts if nobody asks for it."),
            maybe(INTEGER, "readers", "Decode engines that may read it, if more than one."),
            SUCCESSES,
        ),
    ),
    EVENT.LEASE_GRANTED: Event(
        "prefill",
        ("info",),
        "A reader was promised the blocks of a sampled lease for the first time.",
        (
            *LEASE_IDS,
            always(TEXT, "reader", "Its name and start."),
            always(TEXT, "pull_id", "Its attempt."),
            always(SECONDS, "seconds", "How long the promise runs."),
            always(SECONDS, "after_s", "Since the request was lent."),
        ),
    ),
    EVENT.LEASE_HELD: Event(
        "prefill",
        ("warning",),
        "Requests have been lent for a third of their lease (`log.held_fraction`), or twice as long, and so on. What "
        "waits "
        "for the same is one line; a few lines in ten seconds.",
        (
            *WAITS,
            always(
                LIST,
                "oldest",
                "The three that are held longest.",
                (
                    *LEASE_IDS,
                    always(SECONDS, "lent_s", "For how long it has been lent."),
                    maybe(SECONDS, "left_s", "How long this can last if nobody asks for more."),
                    always(
                        OBJECT,
                        "claims",
                        "Reader -> `pull_id`, `claimed_s` and `heard_s` (both since it was lent) of its last attempt. "
                        "Where `claimed_s` is missing, the line is an old one, and `heard_s` says how long ago it was.",
                    ),
                    REFUSED_MESSAGES,
                ),
            ),
        ),
    ),
    EVENT.LEASE_ENDED: Event(
        "prefill",
        ("info", "warning"),
        "Blocks are the prefill engine's again. Sampled if it was released; else a warning, which is always logged.",
        (
            always(TEXT, "cause", "`released`, `expired`, `revoked`, or `closed`: the engine ended before it."),
            *LEASE_IDS,
            always(SECONDS, "seconds", "For how long it was lent."),
            always(OBJECT, "readers", "Reader -> how it released: `complete`, `failed` or `cancelled`."),
            always(INTEGER, "blocks", "How many."),
            maybe(LIST, "owed", "Readers that never released; `*` is a decode engine that never spoke up."),
            maybe(
                OBJECT,
                "claims",
                "Reader that is owed -> `pull_id`, `claimed_s` and `heard_s` (both since it was lent) of its last "
                "attempt.",
            ),
            REFUSED_MESSAGES,
            maybe(
                TEXT,
                "revoked_by",
                "Who took it back: `caller` (`LentRequest.revoke`), `withdraw`, or how the engine ended: `closed`, "
                "`suspended`. That is no leak.",
            ),
            maybe(SECONDS, "late_s", "So long after its time was up it was looked at: the loop was away."),
            maybe(LIST, "history", HISTORY),
            SUCCESSES,
        ),
    ),
    EVENT.LEASE_TRANSITION: Event(
        "prefill",
        ("debug",),
        "One entry of a lease's history.",
        (*LEASE_IDS, always(TEXT, "to", "The state, or a note."), always(SECONDS, "at_s", "Since it was lent.")),
    ),
    EVENT.REQUEST_WITHDRAWN: Event(
        "prefill",
        ("info",),
        "A request will never be lent.",
        (
            *LEASE_IDS,
            always(INTEGER, "waited", "How many pulls waited for it."),
            always(LIST, "pull_ids", "Some of them."),
        ),
    ),
    EVENT.PULL_HELD: Event(
        "decode",
        ("warning",),
        "Announcements or pulls have been in one state for a third of their lease (`log.held_fraction`), or twice as "
        "long, "
        "and so on. What waits for the same is one line; a few lines in ten seconds.",
        (
            *WAITS,
            always(
                LIST,
                "oldest",
                "The three that are held longest.",
                (
                    *PULL_IDS,
                    always(SECONDS, "state_s", "For how long it has been in this state."),
                    maybe(SECONDS, "left_s", "How long this can last at most."),
                    always(OBJECT, "ranks", "Prefill rank -> how far the request has come with it."),
                ),
            ),
        ),
    ),
    EVENT.PULL_RETRIED: Event(
        "decode",
        ("info",),
        "A pull failed, and is tried again.",
        (
            always(TEXT, "cause", "Why it failed."),
            *PULL_IDS,
            always(INTEGER, "attempt", "The attempt that follows."),
            always(SECONDS, "after_s", "In so many seconds."),
        ),
    ),
    EVENT.PULL_ENDED: Event(
        "decode",
        ("info", "warning"),
        "A pull has its outcome, or an announcement or a request that was never pulled is done with (`discharged`). "
        "Sampled "
        "if it went well; a warning, which is always logged, if it failed or was slow. One that failed as another has "
        "within "
        "the last second is said in short.",
        (
            always(TEXT, "cause", "`complete`, `cancelled`, `discharged`, or why it failed."),
            maybe(TEXT, "same_as", "The pull that has failed in the same words just before; the rest is said there."),
            maybe(TEXT, "failed_in", "The phase in which it failed."),
            maybe(TEXT, "detail", "Why, in words."),
            maybe(TEXT, "waited_for", "What it waited for when it failed, in words."),
            *PULL_IDS,
            maybe(INTEGER, "attempt", "Which attempt at the request it is, if not the first."),
            maybe(LIST, "peer_ranks", "Prefill ranks that it answers for."),
            maybe(LIST, "read_ranks", "Those that it read, or was to read."),
            always(SECONDS, "seconds", "From the call to the outcome."),
            maybe(INTEGER, "bytes", "That were read; 0 if it failed."),
            maybe(INTEGER, "descriptors", "That were planned, before NIXL merges them."),
            maybe(INTEGER, "posts", "Transfers that were posted."),
            maybe(INTEGER, "rereads", "How often it read again, because it had been too early."),
            maybe(OBJECT, "phases", "Phase -> seconds (`docs/logging.md`)."),
            maybe(INTEGER, "held_transfers", "That may still write its blocks: `blocks_returned` follows."),
            maybe(INTEGER, "blocks", "How many these are, where transfers may still write them."),
            maybe(LIST, "unanswered", "Ranks that were gone: they were told once, and may not have heard it."),
            maybe(LIST, "history", HISTORY),
            SUCCESSES,
        ),
    ),
    EVENT.PULL_TRANSITION: Event(
        "decode",
        ("debug",),
        "One entry of a pull's history.",
        (*PULL_IDS, always(TEXT, "to", "The state, or a note."), always(SECONDS, "at_s", "Since the first.")),
    ),
    EVENT.RELEASE_REFUSED: Event(
        "decode",
        ("warning",),
        "A prefill rank turned a pull's release down: what it lent will expire.",
        (
            always(TEXT, "cause", "The rank's reason, such as `wrong_request`: the key belongs to another request id."),
            always(TEXT, "detail", "In the rank's words."),
            *PULL_IDS,
            OUTCOME,
            always(LIST, "ranks", "The rank."),
        ),
    ),
    EVENT.RELEASE_UNANSWERED: Event(
        "decode",
        ("warning",),
        "Prefill ranks never acknowledged a pull's release, and are told no more: if they live, what they lent will "
        "expire.",
        (
            always(TEXT, "cause", "`timeout` (`release_timeout_s`), `engine_closed`, or why the rank is gone."),
            maybe(TEXT, "detail", "In words."),
            *PULL_IDS,
            OUTCOME,
            always(LIST, "ranks", "The ranks."),
            always(SECONDS, "seconds", "Since the outcome."),
        ),
    ),
    EVENT.BLOCKS_RETURNED: Event(
        "decode",
        ("warning",),
        "Nothing can write the blocks of a failed pull any more.",
        (
            *PULL_IDS,
            maybe(INTEGER, "blocks", "How many."),
            always(SECONDS, "seconds_after_failure", "How long they were held."),
        ),
    ),
    EVENT.BLOCKS_RETIRED: Event(
        "decode",
        ("error",),
        "A transfer did not end within `pull.held_s` after its pull had failed: its blocks must never be used again.",
        (
            *PULL_IDS,
            always(INTEGER, "blocks", "How many."),
            always(LIST, "held_by", "Ranks whose transfers may still write them, with addresses."),
            always(INTEGER, "transfers", "How many."),
            always(SECONDS, "seconds_after_failure", "How long they were held."),
            always(LIST, "history", HISTORY),
        ),
    ),
    EVENT.OFFLOAD_STARTED: Event(
        "both",
        ("info",),
        "Blocks are kept outside of the accelerator from now on. Besides, what the tiers run on, by the names that "
        "`Offload.describe` gives.",
        (
            always(INTEGER, "host_bytes", "Of host memory."),
            always(INTEGER, "file_bytes", "Of files; 0 if there are none."),
            always(INTEGER, "blocks_found", "Blocks that the files had kept."),
            always(SECONDS, "seconds", "How long the start took."),
            always(OBJECT, "tiers", "Versions, transports and modes."),
        ),
    ),
    EVENT.OFFLOAD_MOVED: Event(
        "both",
        ("info",),
        "What was moved between the tiers since the last line that said so: after a second, two, four and so on, then "
        "one line a minute at most; none while nothing is moved, and one at the end.",
        (
            always(SECONDS, "seconds", "Since the last such line, or the start."),
            always(OBJECT, "counters", "What was counted in these, as in `offload_stopped`, if above 0."),
            always(OBJECT, "blocks", "Tier -> how many blocks are kept there now."),
        ),
    ),
    EVENT.OFFLOAD_STOPPED: Event(
        "both",
        ("info",),
        "Nothing is stored or loaded any more.",
        (
            always(OBJECT, "counters", "What was counted since the start."),
            always(INTEGER, "written_back", "Blocks that were written to files while it closed."),
            always(INTEGER, "lost", "Blocks that were in host memory alone, though there are files."),
        ),
    ),
    EVENT.OFFLOAD_FAILED: Event(
        "both",
        ("warning",),
        "A store or a load failed, took too long, or found no room; what was wanted of it is a miss. Ten at once, then "
        "one per second; of stores without room one per minute; with `held` always.",
        (
            always(
                TEXT,
                "cause",
                "`failed`, `timeout`, or `no_room`: host memory is pinned, so a load cannot bring what is in files; or "
                "it has no room for all that was to be stored.",
            ),
            always(TEXT, "detail", "In words."),
            always(TEXT, "what", "`store` or `load`."),
            always(TEXT, "request_id", "Whose."),
            always(TEXT, "job", "What the rank calls it."),
            always(INTEGER, "blocks", "How many were not moved."),
            always(INTEGER, "held", "1 if a copy in doubt may still touch the caller's blocks."),
            always(SECONDS, "seconds", "From the call to its end."),
            NOT_LOGGED,
        ),
    ),
    EVENT.OFFLOAD_RETURNED: Event(
        "both",
        ("warning",),
        "Nothing can read or write the blocks of a failed store or load any more.",
        (
            always(TEXT, "what", "`store` or `load`."),
            always(TEXT, "request_id", "Whose."),
            always(TEXT, "job", "What the rank calls it."),
            always(INTEGER, "blocks", "How many."),
            always(SECONDS, "seconds_after_failure", "How long they were held."),
        ),
    ),
    EVENT.OFFLOAD_RETIRED: Event(
        "both",
        ("error",),
        "A copy did not end within `offload.held_s` after its store or load had failed: if it was a load, its blocks "
        "must never be used again.",
        (
            always(TEXT, "what", "`store` or `load`."),
            always(TEXT, "request_id", "Whose."),
            always(TEXT, "job", "What the rank calls it."),
            always(INTEGER, "blocks", "How many."),
            always(SECONDS, "seconds_after_failure", "How long they were held."),
        ),
    ),
    EVENT.OFFLOAD_FILES_LOST: Event(
        "both",
        ("warning",),
        "The file tier takes no more writes, or nothing at all: a disk that is full or broken, or files that somebody "
        "has removed. Host memory goes on.",
        (
            always(TEXT, "cause", "What happened, and the remedy."),
            always(INTEGER, "reads", "1 if nothing is read either."),
        ),
    ),
    EVENT.OFFLOAD_FILES_DAMAGED: Event(
        "both",
        ("warning",),
        "At its start the file tier has not found all that it should have: misses, and nothing else. Once per start.",
        (
            always(TEXT, "folder", "The rank's directory."),
            always(INTEGER, "found", "Blocks that it has."),
            always(INTEGER, "index_damaged", "1 if its index was damaged, and thrown away: nothing is found."),
            always(INTEGER, "missing", "Blocks whose file is gone, or was cut short."),
            always(INTEGER, "malformed", "Blocks of which the index says nothing sensible."),
            always(INTEGER, "overlapping", "Blocks in the place of newer ones."),
            always(INTEGER, "unfit", "Blocks of another `model`, `hash_tokens` or length."),
        ),
    ),
    EVENT.OFFLOAD_LEFT_OUT: Event(
        "both",
        ("warning",),
        "What ranks of another geometry have left in files cannot be read here, and is not found.",
        (
            always(
                TEXT,
                "cause",
                "Which directory, and why: its index is damaged, of another format or not read in time, its files are "
                "gone, somebody else may write it, its blocks are too large to pass through, or there is no memory for "
                "them. `asynckv offload prune --all` removes what nobody needs.",
            ),
        ),
    ),
    EVENT.OFFLOAD_BROKEN: Event(
        "both",
        ("error",),
        "The engine was resumed, and its memory cannot be used for offload any more; or what is opened at the start "
        "has not come to an end, and was left behind.",
        (always(TEXT, "cause", "Why."),),
    ),
    EVENT.LOOP_WAS_AWAY: Event(
        "both",
        ("warning",),
        "The event loop did not come to the engine for longer than `log.away_s`: nobody was answered. It was away for "
        "`seconds` up to the line's own timestamp. Three at once, then one in ten seconds, and any that is longer "
        "by half than the last that was told of.",
        (
            always(SECONDS, "seconds", "How late the engine's timer was."),
            always(INTEGER, "leases", "That were open meanwhile."),
            always(INTEGER, "pulls", "That were open."),
            always(INTEGER, "parked", "Claims and releases that waited for their request to be lent."),
            NOT_LOGGED,
            maybe(SECONDS, "not_logged_s", "How long it was away in those."),
        ),
    ),
    EVENT.INTERNAL_ERROR: Event(
        "both",
        ("error",),
        "A bug of asynckv's own; what met it was dropped, and the engine goes on. Ten at once, then one per second.",
        (always(TEXT, "error", "What was raised."), always(TEXT, "traceback", "Where."), NOT_LOGGED),
    ),
    EVENT.SLOW_GEOMETRY: Event(
        "decode",
        ("warning",),
        "Two memory orders cost many pieces.",
        (always(TEXT, "peer", "The rank and its start."), always(TEXT, "detail", "How many, and why.")),
    ),
    EVENT.TABLE_REFUSED: Event(
        "decode",
        ("error",),
        "NIXL cannot prepare what is to be read of a rank.",
        (always(TEXT, "peer", "The rank and its start."), always(TEXT, "detail", "What it says.")),
    ),
    EVENT.DATA_PLANE_RESTARTED: Event(
        "both",
        ("warning",),
        "The data plane's process died, and another serves.",
        (
            always(TEXT, "cause", "Exit status or signal."),
            always(TEXT, "agent", "Name of the new agent."),
            always(SECONDS, "seconds", "For how long there was none."),
            always(INTEGER, "transfers_failed", "Of our own."),
        ),
    ),
    EVENT.DATA_PLANE_BROKEN: Event(
        "both",
        ("error",),
        "It died too often: the next serves after a pause.",
        (always(TEXT, "cause", "Exit status or signal."), always(SECONDS, "pause_s", "How long.")),
    ),
    EVENT.DATA_PLANE_IN_PROCESS: Event(
        "both",
        ("warning",),
        "UCX can end this process when a reader dies, and the memory cannot be shared with a process of its own.",
        (always(TEXT, "detail", "Which memory, and what to do."),),
    ),
}


def problems(level: str, name: str, said: Mapping[str, Any]) -> list[str]:
    """Say how an event is not what this table says; empty is right. `said` is without the fields of `COMMON`."""
    event = EVENTS.get(name)  # type: ignore[call-overload]
    if event is None:
        return [f"event {name!r} is not documented"]
    wrong = [f"{name}: level {level} is not documented"] if level not in event.levels else []
    return wrong + _differences(name, event.fields, said)


def _differences(where: str, fields: Iterable[Field], said: Mapping[str, Any]) -> list[str]:
    known = {field.name: field for field in fields}
    wrong = [f"{where}: field {name!r} is not documented" for name in said if name not in known]
    for name, field in known.items():
        if name not in said:
            wrong += [f"{where}: field {name!r} is missing"] if field.always else []
            continue
        value = said[name]
        if value is None and not field.always:
            continue
        if not isinstance(value, KINDS[field.kind]) or isinstance(value, bool):
            wrong.append(f"{where}: field {name!r} is {value!r}, which is no {field.kind}")
        elif field.of:
            for entry in said[name]:
                wrong += _differences(f"{where}.{name}", field.of, entry)
    return wrong
