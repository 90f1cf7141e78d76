"""Why blocks came back late, or pulls failed: the table of verdicts, and the catalogue of causes.

**Late** are blocks that came back, or will, because time ran out and not because a reader said that it was done: a
lease that expired, or was not over when its engine was closed or died; one that was held beyond its warning age when
the log ends; an announcement that nobody pulled until its time was up; a release that was refused or never answered,
where the prefill rank's log does not say what became of the lease; and blocks of a pull that had its outcome while
something might still write them. Not late is what was revoked, withdrawn, or released within its promise; nor what is
announced and waits, before the announcement's time is up.

`WHY` has a cause for each pair of what the owner knows of a reader (`Owner`) and what the reader and its process know
(`Reader`). Above each cause stands the one `HEADING` that says what to look at. Some causes are *classes*: they stand
for several that cannot be told apart without the other side's logs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


class HEADING(enum.StrEnum):
    """What to look at: every cause has one of these above it."""

    GONE = "process gone"
    STOPPED = "stopped or blocked"
    NETWORK = "the network between two ranks"
    NEVER_CAME = "params never came"
    DROPPED = "the decode scheduler dropped or refused it"
    WRONG = "wrong address, key or id"
    LEASE = "the lease against the queue"
    UNKNOWN = "not known"


class Owner(enum.Enum):
    """What a prefill rank knows of a reader that it waits for, and what became of its lease; as its log shows it."""

    UNCLAIMED = "expired or held, and the reader that is owed never claimed"
    CLAIMED = "expired or held, and the reader that is owed had claimed"
    RETRYING = "expired or held, and the reader's last release said `retry`"
    REFUSED = "expired or held, and a message about it was refused (by either side's log)"
    CLOSED = "`lease_ended` with `closed`, or `promises_cut_short`"
    DIED = "lent, no end is logged, and the process ended without a goodbye"
    UNKNOWN = "its log is missing, ends before the lease could have expired, or tells of no end yet"
    READ = "a pull that reads from it has failed, and its blocks might still be written"
    FAILED = "a pull that reads from it, or was to, has failed"


class Reader(enum.Enum):
    """What a reader and its process know: the first of these that would have been enough by itself; as logs show it."""

    ANY = ""
    NO_LOG = (
        "no log says more: it is missing, has warnings only, ends too early, or ends where the process may have "
        "died with the params in its hands"
    )
    UNHEARD = "logs of the decode side are there, and none of them speaks of the request"
    LEFT_OUT = "others of its engine spoke of the request; its log does not, and goes on"
    ABSENT = (
        "no log speaks of the request, and every reader that may be meant does not answer, or was away for most of "
        "the lease's time (`loop_was_away`)"
    )
    RENAMED = "`wrong_request`, or a pull of this key with another prefill request id"
    EARLY = "its pull was over before the request was lent, and its release was answered or parked for too long"
    WRONG_TARGET = "its pull failed with `wrong_target`"
    STALE = "`restarted` or `stale_memory`; or its params name another start of the rank"
    KEYS = "its pull failed in the handshake, and `refused` or the pull's detail speaks of keys"
    UNMET = "its pull failed in the handshake, or hangs there"
    REFUSED = "`release_refused`, or a claim that was refused"
    BROKEN = "its pull failed with `peer_lost` or `read_failed`, and nobody is known to have died"
    REFUSED_HERE = "its engine refused the pull: it cannot be planned, its blocks are in use, or a queue is full"
    OVERSTAYED = "it was lent for `max_lease_s` (`engine_started` names it), or a renewal was refused because of it"
    ANNOUNCED = "the announcement's time was up, or it is overdue when the log ends"
    DIED = (
        "its process ended without a goodbye and without an outcome of this pull; one that never spoke of any "
        "request had met this rank, and this is the only request that was not claimed there meanwhile"
    )
    CLOSED = "`engine_stopped` or `engine_suspended` with this pull unanswered or without an outcome"
    AWAY = "`loop_was_away` during its pull, or for most of the lease's time just before it asked"
    OWNER_AWAY = "the rank that lends was away meanwhile (`loop_was_away`, or `late_s` of `lease_ended`)"
    OWNER_DIED = "the rank that lends died meanwhile, or its readers lost it (`peer_changed`)"
    PLANE_DIED = "`data_plane_restarted` or `data_plane_broken` before the pull failed, here or there"
    UNANSWERED = "`release_unanswered`, or the prefill rank was given up as the pull ended"
    RETRIES = "its attempt failed and promised another (`retry`); none follows, and its process lives"
    READING = "`held_transfers` in `pull_ended`, and no other reason for it in any log"
    LATE = "its first word came, or its pull ended, when the lease was over; nothing kept it from being heard"
    WAITING = "its pull has no outcome yet, or the lease was renewed just before the log ends: nothing is over"
    BUG = "nothing else explains it, and `internal_error` is logged meanwhile, on either side"


class CAUSE(enum.StrEnum):
    """Why blocks came back late. The values are stable."""

    # never claimed
    NEVER_SHOOK_HANDS = "never_shook_hands"
    KEYS_REFUSED = "keys_refused"
    WRONG_TARGET = "wrong_target"
    STALE_PARAMS = "stale_params"
    NEVER_HEARD_OF = "never_heard_of"
    RANK_NEVER_SPOKE = "rank_never_spoke"
    DECODE_UNRESPONSIVE = "decode_unresponsive"
    NEVER_CLAIMED = "never_claimed"
    # claimed or not, and never released
    READER_DIED = "reader_died"
    READER_CLOSED = "reader_closed"
    NO_ATTEMPT_FOLLOWED = "no_attempt_followed"
    ANNOUNCED_AND_FORGOTTEN = "announced_and_forgotten"
    LEASE_TOO_SHORT = "lease_too_short"
    MAX_LEASE = "max_lease"
    DECODE_LOOP_AWAY = "decode_loop_away"
    READER_SILENT = "reader_silent"
    # the release
    OTHER_REQUEST_ID = "other_request_id"
    RELEASE_REFUSED = "release_refused"
    RELEASE_TOO_EARLY = "release_too_early"
    RELEASE_LOST = "release_lost"
    RELEASE_UNANSWERED = "release_unanswered"
    # the prefill engine
    PREFILL_LOOP_AWAY = "prefill_loop_away"
    PREFILL_DIED = "prefill_died"
    PREFILL_CLOSED = "prefill_closed"
    # transfers that might still write
    STUCK_TRANSFER = "stuck_transfer"
    DATA_PLANE_DIED = "data_plane_died"
    # neither
    CONNECTION_LOST = "connection_lost"
    REFUSED_LOCALLY = "refused_locally"
    NOT_KNOWN = "not_known"
    STILL_HELD = "still_held"
    INTERNAL_ERROR = "internal_error"


C, H, W, R = CAUSE, HEADING, Owner, Reader

_ALWAYS: Mapping[Reader, CAUSE] = {
    R.ANNOUNCED: C.ANNOUNCED_AND_FORGOTTEN,
    R.DIED: C.READER_DIED,
    R.AWAY: C.DECODE_LOOP_AWAY,
    R.OWNER_AWAY: C.PREFILL_LOOP_AWAY,
    R.UNANSWERED: C.RELEASE_LOST,
}
"""What is the cause whether or not the reader had claimed."""

WHY: Mapping[Owner, Mapping[Reader, CAUSE]] = {
    W.UNCLAIMED: {
        **_ALWAYS,
        R.NO_LOG: C.NEVER_CLAIMED,
        R.UNHEARD: C.NEVER_HEARD_OF,
        R.LEFT_OUT: C.RANK_NEVER_SPOKE,
        R.ABSENT: C.DECODE_UNRESPONSIVE,
        R.RENAMED: C.OTHER_REQUEST_ID,
        R.EARLY: C.RELEASE_TOO_EARLY,
        R.WRONG_TARGET: C.WRONG_TARGET,
        R.STALE: C.STALE_PARAMS,
        R.KEYS: C.KEYS_REFUSED,
        R.UNMET: C.NEVER_SHOOK_HANDS,
        R.CLOSED: C.READER_CLOSED,
        R.LATE: C.LEASE_TOO_SHORT,
        R.BUG: C.INTERNAL_ERROR,
    },
    W.CLAIMED: {
        **_ALWAYS,
        R.NO_LOG: C.READER_SILENT,
        R.OVERSTAYED: C.MAX_LEASE,
        R.CLOSED: C.READER_CLOSED,
        R.RETRIES: C.NO_ATTEMPT_FOLLOWED,
        R.READING: C.STUCK_TRANSFER,
        R.LATE: C.LEASE_TOO_SHORT,
        R.BUG: C.INTERNAL_ERROR,
        R.WAITING: C.STILL_HELD,
    },
    W.RETRYING: {
        **_ALWAYS,
        R.NO_LOG: C.NO_ATTEMPT_FOLLOWED,
        R.OVERSTAYED: C.MAX_LEASE,
        R.CLOSED: C.NO_ATTEMPT_FOLLOWED,
        R.RETRIES: C.NO_ATTEMPT_FOLLOWED,
    },
    W.REFUSED: {
        R.RENAMED: C.OTHER_REQUEST_ID,
        R.EARLY: C.RELEASE_TOO_EARLY,
        R.STALE: C.STALE_PARAMS,
        R.OVERSTAYED: C.MAX_LEASE,
        R.REFUSED: C.RELEASE_REFUSED,
    },
    W.CLOSED: {R.ANY: C.PREFILL_CLOSED},
    W.DIED: {R.ANY: C.PREFILL_DIED},
    W.UNKNOWN: {
        R.ANNOUNCED: C.ANNOUNCED_AND_FORGOTTEN,
        R.RENAMED: C.OTHER_REQUEST_ID,
        R.EARLY: C.RELEASE_TOO_EARLY,
        R.STALE: C.STALE_PARAMS,
        R.OVERSTAYED: C.MAX_LEASE,
        R.REFUSED: C.RELEASE_REFUSED,
        R.KEYS: C.KEYS_REFUSED,
        R.UNMET: C.NEVER_SHOOK_HANDS,
        R.WRONG_TARGET: C.WRONG_TARGET,
        R.OWNER_DIED: C.PREFILL_DIED,
        R.UNANSWERED: C.RELEASE_UNANSWERED,
    },
    W.READ: {
        R.READING: C.STUCK_TRANSFER,
        R.OWNER_DIED: C.PREFILL_DIED,
        R.OWNER_AWAY: C.PREFILL_LOOP_AWAY,
        R.PLANE_DIED: C.DATA_PLANE_DIED,
    },
    W.FAILED: {
        R.NO_LOG: C.NOT_KNOWN,
        R.OWNER_DIED: C.PREFILL_DIED,
        R.OWNER_AWAY: C.PREFILL_LOOP_AWAY,
        R.AWAY: C.DECODE_LOOP_AWAY,
        R.PLANE_DIED: C.DATA_PLANE_DIED,
        R.WRONG_TARGET: C.WRONG_TARGET,
        R.STALE: C.STALE_PARAMS,
        R.RENAMED: C.OTHER_REQUEST_ID,
        R.KEYS: C.KEYS_REFUSED,
        R.UNMET: C.NEVER_SHOOK_HANDS,
        R.LATE: C.LEASE_TOO_SHORT,
        R.CLOSED: C.READER_CLOSED,
        R.BROKEN: C.CONNECTION_LOST,
        R.REFUSED_HERE: C.REFUSED_LOCALLY,
    },
}
"""Why a lease or the blocks of a pull were late, and why a pull failed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One cause, for people.

    Attributes:
        heading: What to look at.
        title: In some words, for tables.
        sentence: What is said of a request, with names and numbers in place of the braces.
        remedy: What to do.
        is_class: It stands for several causes that cannot be told apart with the logs at hand.
        of: Other sentences, by what the owner knows.
    """

    heading: HEADING
    title: str
    sentence: str
    remedy: str
    is_class: bool = False
    of: Mapping[Owner, str] = field(default_factory=dict)


def cells(cause: CAUSE) -> Iterator[tuple[Owner, Reader]]:
    """Go through the pairs of the table that have a cause."""
    return ((owner, reader) for owner, row in WHY.items() for reader, found in row.items() if found is cause)


_SILENT = "{reader} claimed it, was heard of last {heard_s} s after it was lent (at {heard_at}), and "

CATALOGUE: Mapping[CAUSE, Entry] = {
    C.NEVER_SHOOK_HANDS: Entry(
        H.NETWORK,
        "the reader never shook hands",
        "{reader} could not shake hands with {holder}: {why}",
        "Look at the address in the params and the route to it: `asynckv doctor --to ADDRESS` on the reader's host.",
    ),
    C.KEYS_REFUSED: Entry(
        H.WRONG,
        "keys were refused",
        "{reader} was turned away by {holder}: {why}",
        "Put the reader's public key into the prefill engine's authorized keys, or correct the key in its address.",
    ),
    C.WRONG_TARGET: Entry(
        H.WRONG,
        "the params name a wrong address",
        "{reader} asked at an address where another engine answers: {why}",
        "The endpoints in the params belong to another engine or rank: correct the PrefillRanks, or `advertise`.",
    ),
    C.STALE_PARAMS: Entry(
        H.WRONG,
        "the params name a process that has ended",
        "{reader} asked for a process, or for memory, that has been replaced since: {why}",
        "After a restart or resume make a new PrefillRanks of the new endpoints before you send new params.",
    ),
    C.NEVER_HEARD_OF: Entry(
        H.NEVER_CAME,
        "no decode engine ever heard of it",
        "no reader claimed it, and no log of the decode side ({why}) speaks of it: its params never arrived, or were "
        "dropped before they were announced or pulled{also}",
        "Look for the request in the router and in the decode engine's scheduler. Whatever drops a request has to call "
        "`cancel` with its params, or `withdraw` on the prefill side.",
    ),
    C.RANK_NEVER_SPOKE: Entry(
        H.DROPPED,
        "one rank of the reader never spoke up",
        "{reader} neither claimed nor released it, though other ranks of its engine did ({why})",
        "Every rank of a decode engine has to pull, announce or discharge each request, even if it needs none of it.",
    ),
    C.DECODE_UNRESPONSIVE: Entry(
        H.STOPPED,
        "a decode engine was not there",
        "it was not claimed: {reader} {given}, but {why}",
        "See whether the process lives (`asynckv why`; `ps -o stat`: T is stopped) and what blocks its loop: "
        "`docs/stuck.md`. If it had only nothing to say, look for the request in the router.",
        is_class=True,
    ),
    C.NEVER_CLAIMED: Entry(
        H.UNKNOWN,
        "it was never claimed",
        "no reader ever claimed it{why}",
        "Look into the decode side's logs: a reader never shook hands or died, the params never arrived or came too "
        "late, or the request was dropped there.",
        is_class=True,
    ),
    C.READER_DIED: Entry(
        H.GONE,
        "the reader died",
        _SILENT + "{gone} ({why})",
        "Find out why the process died or hangs (a process that hangs for good looks the same). Its logs do not say "
        "whether it died before, during or after its read. Its blocks came back when the lease ran out.",
        of={W.UNCLAIMED: "no reader claimed it; {reader} {gone} meanwhile ({why})"},
    ),
    C.READER_CLOSED: Entry(
        H.GONE,
        "the reader's engine was closed before it released",
        "{reader} was closed or suspended before its release was acknowledged: {why}",
        "Give `drain` and `aclose` more time: they wait for `pull.release_timeout_s` at most.",
    ),
    C.NO_ATTEMPT_FOLLOWED: Entry(
        H.DROPPED,
        "another attempt was promised and never made",
        "{reader} released it in order to try again, and did not try again: {why}",
        "A caller that passes `is_last=False` has to pull again or call `cancel` with the params.",
    ),
    C.ANNOUNCED_AND_FORGOTTEN: Entry(
        H.DROPPED,
        "announced and never pulled",
        "{reader} announced it, and its engine neither pulled nor discharged it within {seconds} s",
        "A scheduler that announces a request has to pull it or call `cancel`, also if it is aborted before it is "
        "scheduled.",
    ),
    C.LEASE_TOO_SHORT: Entry(
        H.LEASE,
        "its lease was over before the reader was done",
        "{reader} had claimed it and lost its grant before it was done: {why}",
        "See where the time went: under way, in the decode engine's scheduler (announce requests as they arrive), in "
        "the queue, or until the caller's `timeout_s`, which bounds every grant. Else lend for longer: `lease_s`, "
        "`lease.grant_s`.",
        of={W.UNCLAIMED: "{reader} did not claim it from {holder} within its lease of {lease_s} s: {why}{waited}"},
    ),
    C.MAX_LEASE: Entry(
        H.LEASE,
        "max_lease_s was reached",
        "{reader} renewed it until max_lease_s was reached: {why}",
        "Find out why the reader needs so long (announced and never pulled?), or raise `lease.max_lease_s`.",
    ),
    C.DECODE_LOOP_AWAY: Entry(
        H.STOPPED,
        "the reader's loop was away",
        "the event loop of {reader} was away for {away_s} s, so that it did not claim, renew or release in time",
        "Something blocks the decode engine's loop, or its process was stopped (SIGSTOP, a debugger, a paused "
        "container). Run asynckv on a thread of its own (`docs/embedding.md`).",
    ),
    C.READER_SILENT: Entry(
        H.UNKNOWN,
        "the reader fell silent after its claim",
        _SILENT + "has not released it ({why})",
        "Look for the process of this name in the decode side's logs, and in later ones: it died, its loop was away, "
        "or its release was lost. If its log is there and goes on, log all at level debug.",
        is_class=True,
    ),
    C.OTHER_REQUEST_ID: Entry(
        H.WRONG,
        "released or claimed under another request id",
        "{reader} spoke of it as {other}, so that its {message} was refused",
        "The router, or the decode engine, changed `request_id` in the params: pass them on unchanged.",
    ),
    C.RELEASE_REFUSED: Entry(
        H.WRONG,
        "its claim or release was refused",
        "a message of {reader} about it was refused: {why}",
        "The reason names it: another cohort id or size, a rank that is not owed, other blocks, too many attempts.",
    ),
    C.RELEASE_TOO_EARLY: Entry(
        H.LEASE,
        "its release came too long before it was lent",
        "{reader} released it before it was lent, and the release was forgotten until then: {why}",
        "Withdraw requests that are lent long after their params left, or raise `lease.parked_s`.",
    ),
    C.RELEASE_LOST: Entry(
        H.NETWORK,
        "the release never arrived",
        "{reader} released it, and {holder} never heard of that ({why})",
        "The connection between both was broken for longer than `pull.release_timeout_s`: look at the network.",
    ),
    C.RELEASE_UNANSWERED: Entry(
        H.UNKNOWN,
        "the release was never acknowledged",
        "{reader} released it, and {holder} never acknowledged that ({why}): its blocks came back when the lease ran "
        "out, unless only the answer was lost",
        "Look into the prefill side's log: it has every lease that expired.",
        is_class=True,
    ),
    C.PREFILL_LOOP_AWAY: Entry(
        H.STOPPED,
        "the prefill engine's loop was away",
        "the event loop of {holder} was away for {away_s} s, and heard nothing meanwhile",
        "Something blocks the prefill engine's loop: run asynckv on a thread of its own (`docs/embedding.md`).",
    ),
    C.PREFILL_DIED: Entry(
        H.GONE,
        "the prefill process died",
        "{holder} {gone} while it lent it ({why}): its blocks are gone with the process",
        "Find out why the process died, or was silent. Decode engines recompute what they had not read.",
        of={W.READ: "{reader} kept its blocks {held}: {holder} died or was lost while they were read ({why})"},
    ),
    C.PREFILL_CLOSED: Entry(
        H.GONE,
        "the prefill engine was closed while it lent the blocks",
        "{holder} was closed before {owed} had released it ({why})",
        "Drain before you close, and give `aclose` at least `grant_s` and a second.",
    ),
    C.STUCK_TRANSFER: Entry(
        H.NETWORK,
        "a transfer did not end",
        "{reader} kept its blocks {held}, because a transfer from {holder} might still write them ({why})",
        "Look at the network and the prefill rank. A failed pull waits for `pull.drain_s` at most.",
    ),
    C.DATA_PLANE_DIED: Entry(
        H.GONE,
        "a data plane died",
        "{reader} kept its blocks {held}: the data plane of {holder} died while they were read ({why})",
        "See its exit status. `docs/reliability.md` has what is known of deaths inside UCX.",
    ),
    C.CONNECTION_LOST: Entry(
        H.NETWORK,
        "the connection to the prefill rank broke",
        "{reader} lost {holder} while it read: {why}",
        "Look at the network between both, and at the prefill rank: `asynckv doctor --to ADDRESS`.",
    ),
    C.REFUSED_LOCALLY: Entry(
        H.DROPPED,
        "the decode engine refused it",
        "{reader} refused the pull itself: {why}",
        "The reason names it: blocks that another pull still holds, geometries that do not fit, a full queue.",
    ),
    C.NOT_KNOWN: Entry(
        H.UNKNOWN,
        "not known",
        "{reader} failed to pull from {holder}: {why}",
        "Look at the detail of its `pull_ended`, and at the other side's logs.",
        is_class=True,
    ),
    C.STILL_HELD: Entry(
        H.UNKNOWN,
        "held when the log ends",
        "{holder} has held it for {seconds} s; {why}",
        "Wait for its end, or look into the other side's logs.",
        is_class=True,
    ),
    C.INTERNAL_ERROR: Entry(
        H.UNKNOWN,
        "a bug of asynckv",
        "{reader} logged an internal error meanwhile, and nothing else explains it: {why}",
        "Report it, with the traceback.",
    ),
}
