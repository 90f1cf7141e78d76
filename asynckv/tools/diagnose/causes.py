"""Why blocks came back late: the catalogue.

**Late** are blocks that came back, or will, because time ran out and not because somebody said that he was done:

- a lease that expired;
- a lease that was not over when its engine was closed, or when its process died;
- a lease that was held for longer than its warning age when the log ends, and of which no log says that it has ended;
- a lease that was renewed for an announcement that nobody pulled, until the announcement's time was up;
- a lease whose release was refused or never answered, where the prefill rank's log is not there to say that it expired;
- the blocks of a pull that had its outcome while something might still write them, whether they came back later
  (`blocks_returned`), were given up (`blocks_retired`), or neither yet.

Not late is what was revoked or withdrawn by the prefill engine, and what was released by its readers within its
promise, however long that took: a slow read, a pull that failed, a retry. A release whose acknowledgement was lost was
heard: if the prefill rank's log is there and tells of no expiry, nothing was late.

Every cause here has a sentence, what evidence it needs, and what to do. Some are *classes*: what one side's logs alone
can say. They name whose logs would say more, and stand for several causes that cannot be told apart without them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "CATALOGUE",
    "CAUSE",
    "Entry",
]


class CAUSE(enum.StrEnum):
    """Why blocks came back late. The values are stable."""

    # nobody claimed
    NEVER_SHOOK_HANDS = "never_shook_hands"
    KEYS_REFUSED = "keys_refused"
    WRONG_TARGET = "wrong_target"
    STALE_PARAMS = "stale_params"
    DIED_BEFORE_CLAIM = "died_before_claim"
    NEVER_HEARD_OF = "never_heard_of"
    CAME_TOO_LATE = "came_too_late"
    EXPIRED_WHILE_QUEUED = "expired_while_queued"
    RANK_NEVER_SPOKE = "rank_never_spoke"
    DECODE_UNRESPONSIVE = "decode_unresponsive"
    NEVER_CLAIMED = "never_claimed"
    # claimed, and never released
    DIED_AFTER_CLAIM = "died_after_claim"
    READER_CLOSED = "reader_closed"
    NO_ATTEMPT_FOLLOWED = "no_attempt_followed"
    LEASE_TOO_SHORT = "lease_too_short"
    MAX_LEASE = "max_lease"
    DECODE_LOOP_AWAY = "decode_loop_away"
    READER_SILENT = "reader_silent"
    # announced
    ANNOUNCED_AND_FORGOTTEN = "announced_and_forgotten"
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
    READ_FROM_THE_DEAD = "read_from_the_dead"
    DATA_PLANE_DIED = "data_plane_died"
    # neither
    STILL_HELD = "still_held"
    INTERNAL_ERROR = "internal_error"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True)
class Entry:
    """One cause, for people.

    Attributes:
        title: In some words, for tables.
        sentence: What is said of a request, with names and numbers in place of the braces.
        prefill: What the prefill side's logs must show.
        decode: What the decode side's logs must show; empty if they are not needed.
        alone: What is said without one of the two.
        remedy: What to do.
        is_class: It stands for several causes that cannot be told apart with the logs at hand.
    """

    title: str
    sentence: str
    prefill: str
    decode: str
    alone: str
    remedy: str
    is_class: bool = False


C = CAUSE
_SAID_BY_PREFILL = "`never_claimed` without the decode side's logs"
_SILENT = "`reader_silent` without the decode side's logs"

CATALOGUE: Mapping[CAUSE, Entry] = {
    C.NEVER_SHOOK_HANDS: Entry(
        "the reader never shook hands",
        "{reader} could not shake hands with {holder}: {why}",
        "expired, and this reader is owed without a claim",
        "its pull failed in the handshake, or hangs there",
        f"{_SAID_BY_PREFILL}; the same without the prefill side's, where nobody says that it expired",
        "Look at the address in the params and the route to it: `asynckv doctor --to ADDRESS` on the reader's host.",
    ),
    C.KEYS_REFUSED: Entry(
        "keys were refused",
        "{reader} was turned away by {holder}: {why}",
        "expired, and this reader is owed without a claim",
        "its pull failed in the handshake, and `refused` or the pull's detail says so",
        f"{_SAID_BY_PREFILL}, with who was turned away meanwhile; the same without the prefill side's",
        "Put the reader's public key into the prefill engine's authorized keys, or correct the key in its address.",
    ),
    C.WRONG_TARGET: Entry(
        "the params name a wrong address",
        "{reader} asked at an address where another engine answers: {why}",
        "expired, and this reader is owed without a claim",
        "its pull failed with `wrong_target`",
        f"{_SAID_BY_PREFILL}; the same without the prefill side's",
        "The endpoints in the params belong to another engine or rank: correct the PrefillGroup, or `advertise`.",
    ),
    C.STALE_PARAMS: Entry(
        "the params name a process that has ended",
        "{reader} asked for a process, or for memory, that has been replaced since: {why}",
        "expired, and this reader is owed",
        "its pull failed with `restarted` or `stale_memory`",
        f"{_SAID_BY_PREFILL}; `release_refused` without the prefill side's",
        "After a restart or resume make a new PrefillGroup of the new endpoints before you send new params.",
    ),
    C.DIED_BEFORE_CLAIM: Entry(
        "the reader died before its claim",
        "nobody claimed it; {reader} {gone} meanwhile ({why})",
        "expired, and this reader is owed without a claim",
        "its process ended without a goodbye while the request was lent (by aligned clocks it may have lived then; one "
        "that only fell silent wrote a line not long before), and a log shows that it had come for the request: it "
        "shook hands with the rank that lends, or began to, spoke of no request, and this was the only one not claimed "
        "there meanwhile. (Without such a log, lost params look the same: `never_claimed`.)",
        _SAID_BY_PREFILL,
        "Find out why the process died. Its blocks came back when the lease ran out: a death costs lease_s.",
    ),
    C.NEVER_HEARD_OF: Entry(
        "no decode engine ever heard of it",
        "nobody claimed it, and no log of the decode side ({why}) speaks of it: its params never arrived, or were "
        "dropped before they were announced or pulled{died}",
        "expired, and nobody claimed",
        "logs of the decode side are there, nobody in them speaks of the request, and none of them died meanwhile",
        _SAID_BY_PREFILL,
        "Look for the request in the router and in the decode engine's scheduler. Whoever drops a request has to call "
        "`discharge` with its params, or `withdraw` on the prefill side.",
    ),
    C.CAME_TOO_LATE: Entry(
        "its reader came when its lease was over",
        "{reader} first spoke of it to {holder} when its lease of {lease_s} s was over: {why}",
        "expired, and nobody claimed",
        "its pull or announcement was refused with `expired` (or `unknown_key`) at once; or it read nothing of this "
        "rank, and was done when the lease was over",
        _SAID_BY_PREFILL,
        "The params were under way, or waited in the decode engine's scheduler, for longer than the lease: announce "
        "requests as they arrive, or lend for longer.",
    ),
    C.EXPIRED_WHILE_QUEUED: Entry(
        "it expired while it waited on the decode side",
        "{reader} knew of it for {waited_s} s, and did not claim it within its lease of {lease_s} s: {why}",
        "expired, and this reader is owed without a claim",
        "its pull waited in the handshake or queue, or for other ranks to lend it, and was then refused or timed out",
        _SAID_BY_PREFILL,
        "See what it waited for. Lend for longer, or give up sooner (`timeout_s`).",
    ),
    C.RANK_NEVER_SPOKE: Entry(
        "one rank of the reader never spoke up",
        "{reader} neither claimed nor released it, though other ranks of its engine did ({why})",
        "expired; others of the same engine spoke up, this rank is owed without a claim",
        "its log is there, it lives, and does not speak of the request",
        "the same without the decode side's logs, with the remark that it may have died",
        "Every rank of a decode engine has to pull, announce or discharge each request, even if it needs none of it.",
    ),
    C.DECODE_UNRESPONSIVE: Entry(
        "a decode engine was not there",
        "it was not claimed: {reader} {given}, but {why}",
        "expired, or held, and nobody claimed",
        "nobody speaks of the request, and a reader was not there: its engine was asked and does not answer; or its "
        "`loop_was_away` covers half of the lease's time or more; or its log ends without a goodbye, before the last "
        "line of all by more than a lease and ten of its usual pauses. All readers that may be meant are named",
        _SAID_BY_PREFILL,
        "See whether the process lives (`asynckv inspect`; `ps -o stat`: T is stopped) and what blocks its loop: "
        "`docs/stuck.md`. If it had only nothing to say, look for the request in the router.",
        is_class=True,
    ),
    C.NEVER_CLAIMED: Entry(
        "nobody ever claimed it",
        "nobody ever claimed it{why}",
        "expired, or held when the log ends, and nobody claimed",
        "",
        "this is all that the prefill side's logs can say",
        "Look into the decode side's logs: a reader never shook hands or died, the params never arrived or came too "
        "late, or the request was dropped there.",
        is_class=True,
    ),
    C.DIED_AFTER_CLAIM: Entry(
        "the reader died after its claim",
        "{reader} claimed it, was heard of last {heard_s} s after it was lent (at {heard_at}), and {gone} ({why})",
        "expired, and the reader that is owed had claimed",
        "its process's log ends without a goodbye and without an outcome of this pull",
        f"{_SILENT}; nothing is said of the request without the prefill side's",
        "Find out why the process died or hangs (a process that hangs for good looks the same). Its logs do not say "
        "whether it died before, during or after its read.",
    ),
    C.READER_CLOSED: Entry(
        "the reader's engine was closed before it released",
        "{reader} was closed or suspended before its release was acknowledged: {why}",
        "expired, and the reader that is owed had claimed",
        "`engine_stopped` or `engine_suspended` with this pull unanswered or without an outcome",
        f"{_SILENT}; nothing is said of the request without the prefill side's",
        "Give `drain` and `aclose` more time: they wait for `pull.release_timeout_s` at most.",
    ),
    C.NO_ATTEMPT_FOLLOWED: Entry(
        "another attempt was promised and never made",
        "{reader} released it in order to try again, and did not try again: {why}",
        "expired; the reader's last release said `retry`",
        "the pull failed, its process lives, and nothing follows",
        "the same without the decode side's logs, with the remark that it may have died",
        "Whoever passes `is_last=False` has to pull again or call `discharge`.",
    ),
    C.LEASE_TOO_SHORT: Entry(
        "the grant ended before the reader was done",
        "{reader} had claimed it and lost its grant before it was done: {why}",
        "expired, and the reader that is owed had claimed",
        "its pull ended with `lease_lost` or `expired`, or ran out of time, and no loop was away",
        _SILENT,
        "If the pull ran out of time, see what it waited for: no grant goes beyond the caller's `timeout_s`. Otherwise "
        "renewals did not arrive in time: lend for longer, with a longer `lease.grant_s`.",
    ),
    C.MAX_LEASE: Entry(
        "max_lease_s was reached",
        "{reader} renewed it until max_lease_s was reached: {why}",
        "expired at `max_lease_s` (`engine_started` names it), and this reader had renewed it until then; or a renewal "
        "was refused because of it",
        "",
        "the same",
        "Find out why the reader needs so long (announced and never pulled?), or raise `lease.max_lease_s`.",
    ),
    C.DECODE_LOOP_AWAY: Entry(
        "the reader's loop was away",
        "the event loop of {reader} was away for {away_s} s, so that it did not claim, renew or release in time",
        "expired, and this reader is owed",
        "`loop_was_away` between the beginning and the end of its pull; or over half of the lease's time or more, and "
        "it first spoke of the request as it came back, or other ranks of its engine had",
        f"{_SILENT}, or {_SAID_BY_PREFILL}",
        "Something blocks the decode engine's loop, or its process was stopped (SIGSTOP, a debugger, a paused "
        "container). Run asynckv on a thread of its own (`docs/embedding.md`).",
    ),
    C.READER_SILENT: Entry(
        "the reader fell silent after its claim",
        "{reader} claimed it, was heard of last {heard_s} s after it was lent (at {heard_at}), and never released",
        "expired, or held and overdue when the log ends; the reader that is owed had claimed",
        "",
        "this is all that the prefill side's logs can say, or both sides' if they end a few seconds later",
        "Look for the process of this name in the decode side's logs, and in later ones: it died, its loop was away, "
        "or its release was lost.",
        is_class=True,
    ),
    C.ANNOUNCED_AND_FORGOTTEN: Entry(
        "announced and never pulled",
        "{reader} announced it, and its engine neither pulled nor discharged it within {seconds} s",
        "held, and renewed by its reader",
        "the announcement's time was up, or it is overdue when the log ends",
        "`still_held` or nothing without the decode side's logs; the same without the prefill side's",
        "Whoever announces a request has to pull it or call `discharge`, also if it is aborted before it is scheduled.",
    ),
    C.OTHER_REQUEST_ID: Entry(
        "released or claimed under another request id",
        "{reader} spoke of it as {other}, so that its {message} was refused",
        "a claim or release for its key was refused with `wrong_request`",
        "the same, or a pull of this key with another prefill request id",
        "the same with either",
        "The router, or the decode engine, changed `request_id` in the params: pass them on unchanged.",
    ),
    C.RELEASE_REFUSED: Entry(
        "its claim or release was refused",
        "a message of {reader} about it was refused: {why}",
        "a claim or release for its key was refused, and the reader stays owed",
        "`release_refused`, or a claim that was refused",
        "the same with either",
        "The reason names it: another cohort id or size, a rank that is not owed, other blocks, too many attempts.",
    ),
    C.RELEASE_TOO_EARLY: Entry(
        "its release came too long before it was lent",
        "{reader} released it before it was lent, and the release was forgotten until then: {why}",
        "a release was given up as parked for too long",
        "or: its pull had ended before it was lent, and its release was answered",
        "the same",
        "Withdraw requests that are lent long after their params left, or raise `lease.parked_s`.",
    ),
    C.RELEASE_LOST: Entry(
        "the release never arrived",
        "{reader} released it, and {holder} never heard of that ({why})",
        "expired; nothing was heard of the release",
        "`release_unanswered`, or the prefill rank was given up when the pull ended",
        f"{_SILENT}; `release_unanswered` without the prefill side's",
        "The connection between both was broken for longer than `pull.release_timeout_s`: look at the network.",
    ),
    C.RELEASE_UNANSWERED: Entry(
        "the release was never acknowledged",
        "{reader} released it, and {holder} never acknowledged that ({why}): its blocks came back when the lease ran "
        "out, unless only the answer was lost",
        "",
        "`release_unanswered`, or the prefill rank was given up when the pull ended",
        "this is all that the decode side's logs can say",
        "Look into the prefill side's log: it has every lease that expired.",
        is_class=True,
    ),
    C.PREFILL_LOOP_AWAY: Entry(
        "the prefill engine's loop was away",
        "the event loop of {holder} was away for {away_s} s, and heard nothing meanwhile",
        "`loop_was_away` while it was lent, until it expired or was released; or while a read was under way",
        "",
        "the same without the decode side's logs; `release_unanswered` or `stuck_transfer` without the prefill side's",
        "Something blocks the prefill engine's loop: run asynckv on a thread of its own (`docs/embedding.md`).",
    ),
    C.PREFILL_DIED: Entry(
        "the prefill process died while it lent the blocks",
        "{holder} {gone} while it lent it ({why}): its blocks are gone with the process",
        "it was lent, no end is logged, and the process ended without a goodbye",
        "or: its readers lost the process (`peer_changed`)",
        "`release_unanswered` without the prefill side's logs",
        "Find out why the process died. Decode engines recompute what they had not read.",
    ),
    C.PREFILL_CLOSED: Entry(
        "the prefill engine was closed while it lent the blocks",
        "{holder} was closed before {owed} had released it ({why})",
        "`lease_ended` with `closed`, or `promises_cut_short`",
        "",
        "the same; `release_unanswered` without the prefill side's",
        "Drain before you close, and give `aclose` at least `grant_s` and a second.",
    ),
    C.STUCK_TRANSFER: Entry(
        "a transfer did not end",
        "{reader} kept its blocks {held}, because a transfer from {holder} might still write them ({why})",
        "nothing; or expired, and the reader that is owed had claimed: it does not release what it may still read",
        "`held_transfers` in `pull_ended`, `blocks_returned` or `blocks_retired`, while the prefill rank lives",
        "the same without the prefill side's logs",
        "Look at the network and the prefill rank. A failed pull waits for `pull.drain_s` at most.",
    ),
    C.READ_FROM_THE_DEAD: Entry(
        "the rank that was read from died",
        "{reader} kept its blocks {held}: {holder} died or was lost while they were read ({why})",
        "the process ended without a goodbye",
        "or: the pull failed with `peer_lost` or `restarted`, and blocks were kept",
        "the same without the prefill side's logs",
        "Find out why the prefill process died, or was silent.",
    ),
    C.DATA_PLANE_DIED: Entry(
        "a data plane died",
        "{reader} kept its blocks {held}: the data plane of {holder} died while they were read ({why})",
        "`data_plane_restarted` or `data_plane_broken` while they were read, here or there",
        "a pull failed meanwhile, and blocks were kept",
        "`stuck_transfer` where the log with `data_plane_restarted` is missing",
        "See its exit status. `docs/reliability.md` has what is known of deaths inside UCX.",
    ),
    C.STILL_HELD: Entry(
        "held when the log ends",
        "{holder} has held it for {seconds} s; {why}",
        "warned of (`lease_held`), and no end is logged",
        "or: warned of (`pull_held`) with blocks that may still be written",
        "this is all that one side's logs can say before it is over",
        "Wait for its end, or look into the other side's logs.",
        is_class=True,
    ),
    C.INTERNAL_ERROR: Entry(
        "a bug of asynckv",
        "{reader} logged an internal error meanwhile, and nothing else explains it: {why}",
        "expired, or held",
        "`internal_error` between the beginning and the end, on either side",
        "the same where it was logged",
        "Report it, with the traceback.",
    ),
    C.UNEXPLAINED: Entry(
        "the logs do not say why",
        "{reader} never released it, and nothing in the logs of both sides says why ({why})",
        "expired, or held",
        "the reader's log is there, goes on, and has nothing that explains it",
        "",
        "Look whether parts of a log are missing, or its level is above warning. If not, log all at level debug.",
        is_class=True,
    ),
}
