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
    LEASES_ENDED_ALIKE = "leases_ended_alike"
    LEASE_TRANSITION = "lease_transition"
    REQUEST_WITHDRAWN = "request_withdrawn"
    # a decode side's
    PULL_HELD = "pull_held"
    PULL_RETRIED = "pull_retried"
    PULL_ENDED = "pull_ended"
    PULLS_ENDED_ALIKE = "pulls_ended_alike"
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
    SETUP_DOUBTFUL = "setup_doubtful"


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
    always(TEXT, "engine_id", "The engine that logs the line."),
    always(INTEGER, "tp_rank", "Its rank."),
    always(TEXT, "incarnation", "Names this start of its process; a new one after the engine was resumed."),
    always(TEXT, "rank", "The engine's rank and start as everybody writes it: `prefill/pp1/tp3@0a1b2c3d`."),
    maybe(INTEGER, "log_dropped", "How many lines before this one are missing in the engine's own log file."),
    maybe(TEXT, "log_not_rotated", "Why the engine's own log file grows beyond `max_bytes`; said once."),
)
"""What every line has, however it is written; `timestamp`, `level` and `log_...` are added by who writes it."""

LEASE_IDS = (
    always(TEXT, "request_id", "The prefill side's id of the request."),
    always(INTEGER, "sequence", "The number of its key: the same on all ranks of both sides."),
)
PULL_IDS = (
    always(TEXT, "request_id", "The decode side's id of the request."),
    always(TEXT, "prefill_request_id", "The prefill side's id of the request."),
    always(TEXT, "pull_id", "This attempt: the first half of the reader's incarnation, and a number."),
    always(TEXT, "peer", "The prefill engine's id."),
    always(INTEGER, "sequence", "The number of the request's key: the same on all ranks of both sides."),
)
NOT_LOGGED = maybe(INTEGER, "not_logged", "How many more there were since the last such line.")
SUCCESSES = maybe(
    INTEGER, "successes_not_logged", "How many requests ended well, or were lent, without a line since the last line."
)
HISTORY = "Every transition and note: `[seconds since the first, words]`."
REFUSED_MESSAGES = maybe(
    LIST,
    "refused",
    "Messages about this request that were refused, the first of each kind: `[seconds since it was lent, "
    "claim|renew|release, reason, who, detail]`. The reason `parked_too_long`: a release that came before the request "
    "was lent, and was forgotten.",
)
OUTCOME = always(TEXT, "outcome", "What the release says: `complete`, `failed`, `cancelled` or `retry`.")
WAITS = (
    maybe(
        TEXT,
        "state",
        "State of the lease or the pull (`docs/states.md`); left out if the line is about several states.",
    ),
    always(TEXT, "waits", "What they wait for, in words."),
    always(INTEGER, "requests", "How many requests wait for the same."),
)
ALIKE = (
    always(TEXT, "cause", "Why they ended."),
    always(INTEGER, "requests", "How many requests."),
    always(OBJECT, "alike", "Fields that are the same for all of them."),
    always(OBJECT, "each", "Field -> its values, one per request (null: left out); `ago_s` is the time since its end."),
)
LAYOUT = always(TEXT, "layout", "Fingerprint of the memory's layout.")
STRAGGLERS = (
    always(INTEGER, "stragglers", "How many requests had not ended."),
    always(LIST, "oldest", "A few of them, in words: request id, why its blocks are held, whom it waits for."),
)

EVENTS: Final[Mapping[EVENT, Event]] = {
    EVENT.ENGINE_STARTED: Event(
        "both",
        ("info",),
        "An engine has started. Processes of one host share a wall clock.",
        (
            always(TEXT, "address", "Where its control plane listens."),
            LAYOUT,
            always(INTEGER, "bytes", "Size of the registered memory."),
            always(TEXT, "host", "Name of the host."),
            always(INTEGER, "pid", "Id of the process."),
            always(TEXT, "version", "Version of asynckv."),
            always(SECONDS, "lease_s", "How long an unclaimed request stays lent."),
            always(SECONDS, "grant_s", "Length of one grant to a reader."),
            always(SECONDS, "max_lease_s", "How long renewals can keep a request lent."),
            always(SECONDS, "parked_s", "How long claims and releases of a request that is not lent yet are kept."),
            always(SECONDS, "timeout_s", "Default deadline of a pull."),
            always(SECONDS, "announce_s", "How long an announced request may wait to be pulled."),
            always(SECONDS, "held_s", "When blocks that a transfer may still write are retired."),
            always(SECONDS, "release_timeout_s", "When an unanswered release is given up."),
            always(TEXT, "backend", "NIXL's back end, or `simulated`."),
            maybe(TEXT, "nixl", "Version of NIXL."),
            maybe(TEXT, "nixl_variant", "NIXL's package."),
            maybe(TEXT, "ucx_tls", "The transports that UCX may use."),
            maybe(TEXT, "ucx_net_devices", "The devices that UCX may use."),
            maybe(TEXT, "ucx_error_handling_mode", "Whether UCX notices that a peer is lost."),
            maybe(TEXT, "engine_config", "Further settings of UCX."),
            maybe(TEXT, "completions", "How completed transfers are found."),
            maybe(TEXT, "posting_threads", "Which threads post what."),
            maybe(TEXT, "sync_mode", "How NIXL's agent is locked."),
            maybe(TEXT, "serving", "The process that serves remote readers, if it is a separate one."),
            maybe(TEXT, "reading", "The process that posts this engine's reads, if it is a separate one."),
        ),
    ),
    EVENT.ENGINE_STOPPED: Event(
        "both",
        ("info",),
        "An engine was closed. A log that ends without this line is one of a process that was killed.",
        (
            always(SECONDS, "seconds", "Since the engine started."),
            always(INTEGER, "cut_short", "How many requests the end did not wait for."),
            always(OBJECT, "counters", "Leases, pulls and refusals by outcome, as in the statistics; without zeros."),
        ),
    ),
    EVENT.ENGINE_SUSPENDED: Event(
        "both",
        ("info",),
        "The engine has released its memory: nothing reads or writes it.",
        (always(INTEGER, "cut_short", "How many requests had not ended by the end of the drain."),),
    ),
    EVENT.ENGINE_RESUMED: Event(
        "both",
        ("info",),
        "The engine has registered its memory again, and has another incarnation from here on.",
        (always(INTEGER, "memory_epoch", "How often the memory was registered anew."), LAYOUT),
    ),
    EVENT.ENGINE_CLOSED_WITH_STRAGGLERS: Event(
        "both",
        ("warning",),
        "The engine was closed or suspended before all requests had ended.",
        (
            always(TEXT, "how", "`closed` or `suspended`."),
            *STRAGGLERS,
            maybe(LIST, "promises_cut_short", "Requests whose readers held a grant for longer."),
        ),
    ),
    EVENT.DRAINED: Event("both", ("info",), "A drain ended, and no request is under way."),
    EVENT.DRAIN_INCOMPLETE: Event("both", ("warning",), "A drain ended before all requests had ended.", STRAGGLERS),
    EVENT.PEER_CHANGED: Event(
        "decode",
        ("info", "warning"),
        "A remote rank's state changed. It is a warning if the rank was lost; not if it said goodbye and no pull "
        "failed with it.",
        (
            always(TEXT, "peer", "The rank and its start."),
            always(TEXT, "address", "Where the rank listens."),
            always(TEXT, "peer_incarnation", "The incarnation of its process, in full."),
            always(TEXT, "before", "The state before."),
            always(
                TEXT,
                "state",
                "`connecting` (this side sends its first hello), `loading` (the welcome came), `ready`, ...",
            ),
            maybe(TEXT, "cause", "Why the rank serves this engine no more."),
            maybe(TEXT, "detail", "The same in words."),
            maybe(INTEGER, "pulls_failed", "How many pulls failed with it."),
        ),
    ),
    EVENT.PEER_DRAINING: Event(
        "decode",
        ("info",),
        "A remote rank drains: it lends nothing new.",
        (always(TEXT, "peer", "The rank and its start."), always(TEXT, "address", "Where the rank listens.")),
    ),
    EVENT.READER_MET: Event(
        "prefill",
        ("info",),
        "A reader's process shook hands for the first time. A thousand lines at once, then ten per second.",
        (
            always(TEXT, "reader", "The rank and its start, as the reader says."),
            always(TEXT, "reader_incarnation", "The incarnation of its process, in full."),
            always(INTEGER, "minor", "The minor version of its protocol."),
            NOT_LOGGED,
        ),
    ),
    EVENT.READER_REFUSED: Event(
        "prefill",
        ("warning",),
        "This process refuses to serve a reader. Ten lines at once, then one per second.",
        (
            always(TEXT, "reader", "The rank and its start, as the reader says; empty if it speaks another protocol."),
            always(TEXT, "said", "The message that was refused: `hello`, `claim`, `renew` or `release`."),
            always(TEXT, "cause", "`wrong_target`, `restarted`, `engine_closed` or `protocol_version`."),
            always(TEXT, "detail", "The words that the reader was sent."),
            NOT_LOGGED,
        ),
    ),
    EVENT.REFUSED: Event(
        "both",
        ("warning",),
        "The listener rejected a connection, or this engine refused to connect to an address. Ten lines at once, then "
        "one per second.",
        (
            always(TEXT, "cause", "The name of the counter `control.*` (`docs/security.md`)."),
            always(TEXT, "who", "Address, and public key if there is one."),
            NOT_LOGGED,
        ),
    ),
    EVENT.LEASE_LENT: Event(
        "prefill",
        ("info",),
        "Blocks were lent. Sampled: if this line is in the log, the end of the lease is, too.",
        (
            *LEASE_IDS,
            always(INTEGER, "blocks", "How many blocks."),
            always(SECONDS, "lease_s", "How long the lease lasts if nobody claims it."),
            maybe(INTEGER, "readers", "How many decode engines may read it, if more than one."),
            SUCCESSES,
        ),
    ),
    EVENT.LEASE_GRANTED: Event(
        "prefill",
        ("info",),
        "A reader got its first grant of a sampled lease.",
        (
            *LEASE_IDS,
            always(TEXT, "reader", "The rank and its start."),
            always(TEXT, "pull_id", "The reader's attempt."),
            always(SECONDS, "seconds", "How long the grant runs."),
            always(SECONDS, "after_s", "Since the request was lent."),
        ),
    ),
    EVENT.LEASE_HELD: Event(
        "prefill",
        ("warning",),
        "Requests have been lent for a third of their lease (`log.held_fraction`), or twice as long, and so on. "
        "Requests that wait for the same share a line; a few lines in ten seconds.",
        (
            *WAITS,
            always(
                LIST,
                "oldest",
                "The three that have been held longest.",
                (
                    *LEASE_IDS,
                    always(SECONDS, "lent_s", "For how long the request has been lent."),
                    maybe(SECONDS, "left_s", "How long this can last at most, if nobody asks for more."),
                    always(
                        OBJECT,
                        "claims",
                        "Reader -> `pull_id`, `claimed_s` and `heard_s` (both since it was lent) of its last attempt. "
                        "A line without `claimed_s` is of an older version; there `heard_s` says how long ago it was.",
                    ),
                    REFUSED_MESSAGES,
                ),
            ),
        ),
    ),
    EVENT.LEASE_ENDED: Event(
        "prefill",
        ("info", "warning"),
        "The blocks are the prefill engine's again. Sampled if they were released; else a warning, which is always "
        "logged.",
        (
            always(TEXT, "cause", "`released`, `expired`, `revoked`, or `closed` (the engine ended before the lease)."),
            *LEASE_IDS,
            always(SECONDS, "seconds", "For how long the request was lent."),
            always(OBJECT, "readers", "Reader -> how it released: `complete`, `failed` or `cancelled`."),
            always(INTEGER, "blocks", "How many blocks."),
            maybe(LIST, "owed", "Readers that never released; `*` is a decode engine that never spoke up."),
            maybe(
                OBJECT,
                "claims",
                "Reader in `owed` -> `pull_id`, `claimed_s` and `heard_s` (both since it was lent) of its last "
                "attempt.",
            ),
            REFUSED_MESSAGES,
            maybe(
                TEXT,
                "revoked_by",
                "Who revoked it: `caller` (`LentRequest.revoke`), `withdraw`, `no_room` (`Engine.reclaim`), or how the "
                "engine ended: `closed`, `suspended`. That is no leak.",
            ),
            maybe(SECONDS, "late_s", "How late the expiry was noticed, because the event loop was away."),
            maybe(LIST, "history", HISTORY),
            SUCCESSES,
        ),
    ),
    EVENT.LEASES_ENDED_ALIKE: Event(
        "prefill",
        ("warning",),
        "Up to 64 leases ended alike: beyond the first 32 `lease_ended` of one cause and the same owed readers.",
        ALIKE,
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
            always(INTEGER, "waited", "How many pulls waited for the request."),
            always(LIST, "pull_ids", "Some of these pulls."),
        ),
    ),
    EVENT.PULL_HELD: Event(
        "decode",
        ("warning",),
        "Announcements or pulls have been in one state for a third of their lease (`log.held_fraction`), or twice as "
        "long, and so on. Those that wait for the same share a line; a few lines in ten seconds.",
        (
            *WAITS,
            always(
                LIST,
                "oldest",
                "The three that have been held longest.",
                (
                    *PULL_IDS,
                    always(SECONDS, "state_s", "For how long the request has been in this state."),
                    maybe(SECONDS, "left_s", "How long this can last at most."),
                    always(OBJECT, "ranks", "Prefill rank -> how far the request has come with it."),
                ),
            ),
        ),
    ),
    EVENT.PULL_RETRIED: Event(
        "decode",
        ("info",),
        "A pull failed and is tried again.",
        (
            always(TEXT, "cause", "Why it failed."),
            *PULL_IDS,
            always(INTEGER, "attempt", "The number of the next attempt."),
            always(SECONDS, "after_s", "How long until the next attempt."),
        ),
    ),
    EVENT.PULL_ENDED: Event(
        "decode",
        ("info", "warning"),
        "A pull has ended, or a request that was never pulled is done (`discharged`), announced or not. Sampled if it "
        "went well; a warning if it failed (always logged) or was slow. If another failed in the same words within the "
        "last second, the line is short.",
        (
            always(TEXT, "cause", "`complete`, `cancelled`, `discharged`, or why it failed."),
            maybe(TEXT, "same_as", "The pull that failed in the same words just before; its line has the rest."),
            maybe(TEXT, "failed_in", "The phase in which it failed."),
            maybe(TEXT, "detail", "Why, in words."),
            maybe(TEXT, "waited_for", "What the pull waited for when it failed, in words."),
            *PULL_IDS,
            maybe(INTEGER, "attempt", "The number of the attempt, if it is not the first."),
            maybe(LIST, "peer_ranks", "Prefill ranks to which this pull owes a release."),
            maybe(LIST, "read_ranks", "Prefill ranks that it read, or was to read."),
            always(SECONDS, "seconds", "From the call to the outcome."),
            maybe(INTEGER, "bytes", "Bytes that were read; 0 if the pull failed."),
            maybe(INTEGER, "descriptors", "Descriptors that were planned, before NIXL merges them."),
            maybe(INTEGER, "posts", "Transfers that were posted."),
            maybe(INTEGER, "rereads", "How often the pull read again, because it had read too early."),
            maybe(OBJECT, "phases", "Phase -> seconds (`docs/logging.md`)."),
            maybe(
                INTEGER, "held_transfers", "How many transfers may still write its blocks; `blocks_returned` follows."
            ),
            maybe(INTEGER, "blocks", "How many blocks transfers may still write."),
            maybe(LIST, "unanswered", "Ranks that were gone: the release was sent once, and may not have arrived."),
            maybe(LIST, "history", HISTORY),
            SUCCESSES,
        ),
    ),
    EVENT.PULLS_ENDED_ALIKE: Event(
        "decode",
        ("warning",),
        "Up to 64 pulls failed alike: beyond the first 32 short `pull_ended` of one cause and peer.",
        ALIKE,
    ),
    EVENT.PULL_TRANSITION: Event(
        "decode",
        ("debug",),
        "One entry of a pull's history.",
        (*PULL_IDS, always(TEXT, "to", "The state, or a note."), always(SECONDS, "at_s", "Since the first entry.")),
    ),
    EVENT.RELEASE_REFUSED: Event(
        "decode",
        ("warning",),
        "A prefill rank refused a pull's release: what it lent will expire.",
        (
            always(TEXT, "cause", "The rank's reason, such as `wrong_request`: the key belongs to another request id."),
            always(TEXT, "detail", "The rank's words."),
            *PULL_IDS,
            OUTCOME,
            always(LIST, "ranks", "The rank."),
        ),
    ),
    EVENT.RELEASE_UNANSWERED: Event(
        "decode",
        ("warning",),
        "Prefill ranks never acknowledged a pull's release, and it is not sent again: if they live, what they lent "
        "will expire.",
        (
            always(TEXT, "cause", "`timeout` (`release_timeout_s`), `engine_closed`, or why the rank is gone."),
            maybe(TEXT, "detail", "The same in words."),
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
            maybe(INTEGER, "blocks", "How many blocks."),
            always(SECONDS, "seconds_after_failure", "How long the blocks were held."),
        ),
    ),
    EVENT.BLOCKS_RETIRED: Event(
        "decode",
        ("error",),
        "A transfer did not end within `pull.held_s` after its pull had failed: its blocks must never be used again.",
        (
            *PULL_IDS,
            always(INTEGER, "blocks", "How many blocks."),
            always(LIST, "held_by", "Ranks whose transfers may still write them, with addresses."),
            always(INTEGER, "transfers", "How many blocks."),
            always(SECONDS, "seconds_after_failure", "How long the blocks were held."),
            always(LIST, "history", HISTORY),
        ),
    ),
    EVENT.OFFLOAD_STARTED: Event(
        "both",
        ("info",),
        "An offload has started: blocks are kept outside the accelerator from now on. The line also has what the tiers "
        "run on, under the names of `Offload.describe`.",
        (
            always(INTEGER, "host_bytes", "Size of the host memory tier."),
            always(INTEGER, "file_bytes", "Size of the file tier; 0 if there is none."),
            always(INTEGER, "blocks_found", "Blocks that were in the files already."),
            always(SECONDS, "seconds", "How long the start took."),
            always(OBJECT, "tiers", "Versions, transports and modes."),
        ),
    ),
    EVENT.OFFLOAD_MOVED: Event(
        "both",
        ("info",),
        "What was moved between the tiers since the last such line. The lines come after one second, two, four and so "
        "on, later once a minute at most; none while nothing is moved, and one at the end.",
        (
            always(SECONDS, "seconds", "Since the last such line, or the start."),
            always(OBJECT, "counters", "What was counted in this time, as in `offload_stopped`, if above 0."),
            always(OBJECT, "blocks", "Tier -> how many blocks it keeps now."),
        ),
    ),
    EVENT.OFFLOAD_STOPPED: Event(
        "both",
        ("info",),
        "The offload has ended: nothing is stored or loaded any more.",
        (
            always(OBJECT, "counters", "What was counted since the start."),
            always(INTEGER, "written_back", "Blocks that were written to files while the offload closed."),
            always(INTEGER, "lost", "Blocks that were in host memory only, although there is a file tier."),
        ),
    ),
    EVENT.OFFLOAD_FAILED: Event(
        "both",
        ("warning",),
        "A store or a load failed, took too long, or found no room; its blocks are misses. Ten lines at once, then one "
        "per second; of stores without room one per minute; with `held` always.",
        (
            always(
                TEXT,
                "cause",
                "`failed`, `timeout`, or `no_room`: host memory is pinned, so a load cannot bring blocks from files, "
                "or a store does not fit.",
            ),
            always(TEXT, "detail", "The same in words."),
            always(TEXT, "what", "`store` or `load`."),
            always(TEXT, "request_id", "The request's id."),
            always(TEXT, "job", "The rank's id of the store or load."),
            always(INTEGER, "blocks", "How many blocks were not moved."),
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
            always(TEXT, "request_id", "The request's id."),
            always(TEXT, "job", "The rank's id of the store or load."),
            always(INTEGER, "blocks", "How many blocks."),
            always(SECONDS, "seconds_after_failure", "How long the blocks were held."),
        ),
    ),
    EVENT.OFFLOAD_RETIRED: Event(
        "both",
        ("error",),
        "A copy did not end within `offload.held_s` after its store or load had failed. If it was a load, its blocks "
        "must never be used again.",
        (
            always(TEXT, "what", "`store` or `load`."),
            always(TEXT, "request_id", "The request's id."),
            always(TEXT, "job", "The rank's id of the store or load."),
            always(INTEGER, "blocks", "How many blocks."),
            always(SECONDS, "seconds_after_failure", "How long the blocks were held."),
        ),
    ),
    EVENT.OFFLOAD_FILES_LOST: Event(
        "both",
        ("warning",),
        "The file tier takes no more writes, or is off: the disk is full or broken, or somebody removed files. Host "
        "memory goes on.",
        (
            always(TEXT, "cause", "What happened, and the remedy."),
            always(INTEGER, "reads", "1 if nothing is read either."),
        ),
    ),
    EVENT.OFFLOAD_FILES_DAMAGED: Event(
        "both",
        ("warning",),
        "At its start the file tier did not find all blocks that it should have. They are misses, nothing else. Once "
        "per start.",
        (
            always(TEXT, "folder", "The rank's directory."),
            always(INTEGER, "found", "Blocks that were found."),
            always(
                INTEGER, "index_damaged", "1 if the index was damaged and set aside (`*.damaged`): nothing is found."
            ),
            always(INTEGER, "missing", "Blocks whose file is gone, or was cut short."),
            always(INTEGER, "malformed", "Blocks whose index entry makes no sense."),
            always(INTEGER, "overlapping", "Blocks that newer ones have overwritten."),
            always(INTEGER, "unfit", "Blocks of another length."),
        ),
    ),
    EVENT.OFFLOAD_LEFT_OUT: Event(
        "both",
        ("warning",),
        "Files that ranks of another geometry left cannot be read here, so their blocks are not found.",
        (
            always(
                TEXT,
                "cause",
                "Which directory, and why: its index is damaged or of another format, its files are gone, "
                "somebody else may write it, its blocks are too large to pass through, or there is no memory for "
                "them. `asynckv offload prune --all` removes what nobody needs.",
            ),
        ),
    ),
    EVENT.OFFLOAD_BROKEN: Event(
        "both",
        ("error",),
        "The offload is off: the engine was resumed with memory that cannot be used for it; or opening it at the start "
        "did not end, and was abandoned.",
        (always(TEXT, "cause", "Why."),),
    ),
    EVENT.LOOP_WAS_AWAY: Event(
        "both",
        ("warning",),
        "The event loop did not run the engine for longer than `log.away_s`: nobody was answered. It was away for the "
        "`seconds` before the line's timestamp, and up to 2.5 s longer if nothing was under way. Three lines at once, "
        "then one in ten seconds, and any that is longer by half than the last one logged.",
        (
            always(SECONDS, "seconds", "How late the engine's timer was."),
            always(INTEGER, "leases", "Leases that were open meanwhile."),
            always(INTEGER, "pulls", "Pulls that were open meanwhile."),
            always(INTEGER, "parked", "Claims and releases that waited for their request to be lent."),
            NOT_LOGGED,
            maybe(SECONDS, "not_logged_s", "For how long the loop was away in those."),
        ),
    ),
    EVENT.INTERNAL_ERROR: Event(
        "both",
        ("error",),
        "A bug of asynckv. What it was working on was dropped, and the engine goes on. Ten lines at once, then one per "
        "second.",
        (always(TEXT, "error", "The exception."), always(TEXT, "traceback", "Where it was raised."), NOT_LOGGED),
    ),
    EVENT.SLOW_GEOMETRY: Event(
        "decode",
        ("warning",),
        "The two sides' memory orders fit badly: reads need many small pieces.",
        (always(TEXT, "peer", "The rank and its start."), always(TEXT, "detail", "How many, and why.")),
    ),
    EVENT.TABLE_REFUSED: Event(
        "decode",
        ("error",),
        "NIXL cannot prepare reads from a rank.",
        (always(TEXT, "peer", "The rank and its start."), always(TEXT, "detail", "NIXL's words.")),
    ),
    EVENT.DATA_PLANE_RESTARTED: Event(
        "both",
        ("warning",),
        "The data plane's process died, and another one serves.",
        (
            always(TEXT, "cause", "Exit status or signal."),
            always(TEXT, "agent", "Name of the new agent."),
            always(SECONDS, "seconds", "For how long no process served."),
            always(INTEGER, "transfers_failed", "How many of this engine's transfers failed."),
        ),
    ),
    EVENT.DATA_PLANE_BROKEN: Event(
        "both",
        ("error",),
        "The data plane's process died too often: the next one starts after a pause.",
        (always(TEXT, "cause", "Exit status or signal."), always(SECONDS, "pause_s", "How long the pause is.")),
    ),
    EVENT.DATA_PLANE_IN_PROCESS: Event(
        "both",
        ("warning",),
        "UCX can end this process when a reader dies, because the memory cannot be shared with a separate data plane "
        "process.",
        (always(TEXT, "detail", "Which memory, and what to do."),),
    ),
    EVENT.SETUP_DOUBTFUL: Event(
        "both",
        ("warning",),
        "The engine works, but a mistake in its configuration would not be noticed: its layout does not name the "
        "model, or it reads from a rank that calls itself by the same name.",
        (always(TEXT, "detail", "Which of them, and what to do."),),
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
