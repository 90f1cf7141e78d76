"""Structured logs: one event when a request ends, when a lease ends, when a peer changes.

Where they go is said in `setup.py`, what each of them means in `events.py`, and which of those that went well are in
the log in `sampling.py`.

An event costs some 50 microseconds, ten times what the request cost the core. So levels are checked
before anything is formatted, and requests that ended well are logged up to a rate, slow ones up to one of their
own; those that failed always are, with their whole history, or with the name of one that has just failed in the
same words. Many that fail alike share lines, in which each is named.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from asynckv.config import EngineConfig, LogConfig
from asynckv.core.inspect import RequestStatus
from asynckv.core.lease import Grant, Lease, LeaseState
from asynckv.core.limits import Limiter
from asynckv.core.outbox import HeldForLong
from asynckv.core.peer import Peer, PeerState
from asynckv.core.pull import Pull
from asynckv.core.types import Key, Params, PullId, Reason
from asynckv.geometry.bounds import NULL
from asynckv.observe.events import EVENT
from asynckv.observe.sampling import Rate, Sampler
from asynckv.observe.setup import LEVELS, file_sink, logger_for
from asynckv.version import VERSION

__all__ = ["LEVELS", "Recorder", "phases", "started"]

SAME_S = 1.0
"""For so long a failure with the same words as another is logged in short."""

AWAY_PER_S, MAX_AWAY = 0.1, 3.0
"""Warnings that the loop was away, at most: so many at once."""
LONGER = 1.5
"""An absence that exceeds the last that was told of by this factor is told of in any case."""
MAX_RANKS = 8
"""Named of one request."""

MAX_REFUSALS = 10
"""Refusals logged at once; then one per second."""

MAX_TOLD = 32
"""Requests that end alike and have a line each, at once and then one per second; the others share lines."""

MAX_MET, MET_PER_S = 1000, 10.0
"""Readers that are met, at once and then per second: a whole fleet may start with its prefill engine."""

MAX_NAMED = 64
"""Ranks named of one request that has ended."""

DOCTOR = "asynckv-doctor-"
"""How the cohort of `asynckv doctor --to` begins (`tools/doctor/peer.py`)."""

NEVER = logging.CRITICAL + 1
MAX_FIELD = 4096
"""Letters of any field, whoever made it so long."""

MAX_HISTORY = 128
"""Entries of a history that are logged: the first quarter, and the last."""

MAX_GRANTS = 8
"""Promises for one lease that are logged."""

MAX_TEXT = 512
"""Letters of what others have said."""

LATE_S = 0.1
"""A lease that expired so much later than its time was up says so: the loop was away."""


def phases(pull: Pull) -> dict[str, float]:
    """How long a pull spent in what, in seconds.

    `handshake` until the peer was ready, `queue` until it may read (it waits for others, or to be lent) and again until
    its first post, `plan` between the two, `post` inside posting
    calls (local transports copy there), `read` from the first post to the last completion, `detect` at
    most between a completion and its discovery, `confirm` from then to the proof, `release` in the
    background until every rank acknowledged. One that failed was in the phase in which it failed until then, and in
    `drain` until its outcome was told; one that was only announced has `announced` for all but these two.
    """
    release_s = max(pull.released_at - pull.published_at, 0.0) if pull.released_at < math.inf else 0.0
    end = pull.published_at if pull.failed_at == math.inf else pull.failed_at
    failed = {"drain": pull.published_at - end} if pull.failed_at < math.inf else {}
    if pull.begun_at == math.inf:
        return {"announced": end - pull.history[0][0], **failed, "release": release_s}
    ready, first = min(pull.ready_at, end), min(pull.posted_at, end)
    plan_s = max(min(pull.planned_at, end) - min(pull.admitted_at, end), 0.0)
    # Of several ranks one may have been read long before it failed, and what is read may have to wait to be lent.
    read_at = end if pull.failed_in == "read" else min(max(pull.read_at, first), end)
    confirm_s = 0.0 if pull.failed_in == "queue" else end - read_at
    handshake_s, read_s = ready - pull.begun_at, read_at - first
    return {
        "handshake": handshake_s,
        "queue": max(end - pull.begun_at - handshake_s - plan_s - read_s - confirm_s, 0.0),
        "plan": plan_s,
        "post": pull.post_s,
        "read": read_s,
        "detect": pull.detect_s,
        "confirm": confirm_s,
        **failed,
        "release": release_s,
    }


def started(config: EngineConfig) -> dict[str, Any]:
    """What a reader of logs needs to know of a process: where it runs, and how long things last there."""
    lease, pull = config.lease, config.pull
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "version": VERSION,
        "lease_s": lease.lease_s,
        "grant_s": lease.grant_s,
        "max_lease_s": lease.max_lease_s,
        "parked_s": lease.parked_s,
        "timeout_s": pull.timeout_s,
        "announce_s": pull.announce_s,
        "held_s": pull.held_s,
        "release_timeout_s": pull.release_timeout_s,
    }


class Recorder:
    """Turns what ended into events."""

    def __init__(self, config: LogConfig, **bound: Any) -> None:
        self._config = config
        self._log, self._log_level = logger_for(**bound)
        self._bound, self._sink, self._sink_level = bound, None if not config.file else file_sink(config, bound), 0
        self._sink_level = LEVELS[config.level] if self._sink is not None else NEVER
        self._level = min(self._log_level, self._sink_level)
        self._sampler = Sampler(config.successes_per_s)
        self._slow = Limiter(config.slow_per_s, max(config.slow_per_s, 1.0) if config.slow_per_s else 0.0)
        self._skipped = 0
        self._is_closed = False
        self.num_failed = 0
        """Events that the application's logging raised at."""
        self._refusals, self._turned_down = Rate(1.0, MAX_REFUSALS), Rate(1.0, MAX_REFUSALS)
        self._met, self._bugs = Rate(MET_PER_S, MAX_MET), Rate(1.0, MAX_REFUSALS)
        self._failures: dict[tuple[Reason | None, str], tuple[float, str]] = {}
        self._told, self._groups = Limiter(1.0, MAX_TOLD), dict[tuple[EVENT, Any, str], list[dict[str, Any]]]()
        self._away, self._away_s, self._away_said_s = Rate(AWAY_PER_S, MAX_AWAY), 0.0, 0.0

    def bind(self, **bound: Any) -> None:
        """Change what every event says of this engine."""
        self._log = self._log.bind(**bound)
        self._bound = self._bound | bound

    @property
    def num_dropped(self) -> int:
        """Lines that the log file has not got."""
        return self._sink.num_dropped if self._sink is not None else 0

    async def aclose(self, timeout_s: float = math.inf) -> None:
        """Let what is still to be written be written, for so long at most, and in any case for a bounded time."""
        if self._sink is not None and not self._is_closed:
            self._is_closed = True
            try:
                closing = asyncio.get_running_loop().run_in_executor(None, self._sink.close, timeout_s)
            except RuntimeError:  # the interpreter exits: there are no threads to be had, and nobody else to wait
                self._sink.close(timeout_s)
            else:
                await closing

    def listen(self, logger: Any, level: int) -> None:
        """Log to another logger of structlog's, from this level on."""
        self._log, self._log_level = logger.bind(**self._bound), level
        self._level = min(level, self._sink_level)

    @property
    def is_tracing(self) -> bool:
        """Every transition is wanted."""
        return self._level <= logging.DEBUG

    def event(self, level: Literal["debug", "info", "warning", "error"], name: str, **fields: Any) -> None:
        """Log an event, if anybody listens."""
        number = LEVELS[level]
        if number < self._level:
            return
        for field, value in fields.items():
            if type(value) is str and len(value) > MAX_FIELD:
                fields[field] = f"{value[: MAX_FIELD - 4]} ..."
        if number >= self._sink_level and self._sink is not None:
            self._sink.put(level, name, self._bound, fields)
        if number >= self._log_level:
            try:
                getattr(self._log, level)(name, **fields)
            except Exception:  # the application's logging is broken; no request is to suffer for it
                self.num_failed += 1

    def pull_ended(self, pull: Pull, now: float) -> None:
        """Log the end of a decode side's request."""
        took = pull.published_at - pull.called_at
        is_discharge = pull.reason is Reason.DISCHARGED
        good = is_discharge or pull.reason in (Reason.COMPLETE, Reason.CANCELLED)
        slow = took > self._config.slow_s and not is_discharge  # nobody waited for that
        if self._level > logging.WARNING or (good and not self._may_log(pull.params.key, now, slow)):
            return
        held: dict[str, int] = {}
        if not pull.is_returned:
            held = {
                "held_transfers": sum(len(x.running | x.doubtful) for x in pull.sources),
                "blocks": _written_blocks(pull),
            }
        if not good and (like := self._same_as(pull, now)):
            short = {"cause": pull.reason, "same_as": like, **_names(pull), "seconds": round(took, 6), **held}
            short |= {"attempt": pull.attempt} if pull.attempt > 1 else {}
            self._ended_alike(EVENT.PULL_ENDED, EVENT.PULLS_ENDED_ALIKE, pull.params.engine_id, short, now)
            return
        self.event(
            "info" if good and not slow else "warning",
            EVENT.PULL_ENDED,
            cause=pull.reason,
            **(_why(pull) if pull.failed_in and not is_discharge else {}),
            **_names(pull),
            **({"attempt": pull.attempt} if pull.attempt > 1 else {}),
            peer_ranks=[source.name for source in pull.sources[:MAX_NAMED]],
            read_ranks=[source.name for source in pull.sources if source.reads][:MAX_NAMED],
            seconds=round(took, 6),
            bytes=pull.num_bytes if pull.reason is Reason.COMPLETE else 0,
            descriptors=pull.num_descriptors,
            posts=pull.num_posted,
            rereads=pull.rereads,
            phases={k: round(v, 6) for k, v in phases(pull).items()},
            **held,
            **({"unanswered": list(pull.unanswered[:MAX_NAMED])} if pull.unanswered else {}),
            **({} if good and not slow else {"history": _relative(pull.history)}),
            **self._skip_count(),
        )

    def _same_as(self, pull: Pull, now: float) -> str:
        """Name the pull of which all was said that there is to say of this one: one peer fails hundreds at once."""
        what = (pull.reason, pull.detail)
        at, like = self._failures.get(what, (-math.inf, ""))
        if now - at < SAME_S:
            return like
        if len(self._failures) >= MAX_NAMED:
            self._failures.clear()
        self._failures[what] = now, pull.pull_id
        return ""

    def _ended_alike(self, one: EVENT, many: EVENT, whom: str, said: dict[str, Any], now: float) -> None:
        """Log that a request failed; beyond the first few of its cause in a line that several share."""
        group = (many, said["cause"], whom)
        # Of a lease that was lent, granted once to each reader and ended, `seconds` and `claims` tell as much.
        lived = sum(not x[1].startswith(("grant lapsed", "gone")) for x in said.get("history", ()))
        if "refused" in said or lived > 2 + len(said.get("claims", ())) or self._told.take(group, now):
            self.event("warning", one, **said)
            return
        rows = self._groups.setdefault(group, [])
        rows.append({name: value for name, value in said.items() if name != "history"} | {"ago_s": now})
        if len(rows) >= MAX_NAMED or len(self._groups) > MAX_NAMED:
            self.tell_groups(now)

    def tell_groups(self, now: float, waited_s: float = 0.0) -> None:
        """Log the ends that wait for others like them, if the first has waited for so long."""
        if not self._groups or now - next(iter(self._groups.values()))[0]["ago_s"] < waited_s:
            return
        groups, self._groups = self._groups, {}
        for (many, cause, _), rows in groups.items():
            rows = [{**row, "ago_s": round(now - row["ago_s"], 3)} for row in rows]
            each = {name: [row.get(name) for row in rows] for name in dict.fromkeys(k for row in rows for k in row)}
            alike = {name: x[0] for name, x in each.items() if x == x[:1] * len(x) and name != "request_id"}
            each = {name: x for name, x in each.items() if name not in alike}
            self.event("warning", many, cause=cause, requests=len(rows), alike=alike, each=each)

    def pull_retried(self, pull: Pull, attempt: int, after_s: float) -> None:
        """Log that another attempt follows."""
        self.event(
            "info", EVENT.PULL_RETRIED, cause=pull.reason, **_names(pull), attempt=attempt, after_s=round(after_s, 6)
        )

    def blocks_returned(self, pull: Pull, now: float) -> None:
        """Log blocks that came back after their pull had failed."""
        said = {"blocks": _written_blocks(pull), "seconds_after_failure": round(now - pull.published_at, 6)}
        self.event("warning", EVENT.BLOCKS_RETURNED, **_names(pull), **said)

    def blocks_retired(self, pull: Pull, now: float) -> None:
        """Log blocks that are given up: the alarm of a transfer that does not end."""
        self.event(
            "error",
            EVENT.BLOCKS_RETIRED,
            **_names(pull),
            blocks=_written_blocks(pull),
            held_by=[x.where for x in pull.sources if x.running or x.doubtful],
            transfers=sum(len(x.running | x.doubtful) for x in pull.sources),
            seconds_after_failure=round(now - pull.published_at, 6),
            history=_relative(pull.history),
        )

    def refused(self, cause: str, who: str, now: float) -> None:
        """Log that somebody was not let in, or may not be talked to: strangers cannot fill the log."""
        if LEVELS["warning"] < self._level:
            return
        if self._refusals.take(now):
            self.event("warning", EVENT.REFUSED, cause=cause, who=_short(who), **self._refusals.left_out())

    def loop_was_away(self, seconds: float, gauges: Mapping[str, int], now: float) -> None:
        """Log that the event loop did not come to us for long: a step loop that is always away cannot fill the log.

        It is why promises lapse, and nothing else tells of it: a longer absence is not left out for a shorter one's
        sake. (Each is longer by a factor, so that between two that the limit lets through there are a few.)
        """
        if seconds < LONGER * self._away_said_s and not self._away.take(now):
            self._away_s += seconds
            return
        more_s, self._away_s, self._away_said_s = self._away_s, 0.0, seconds
        self.event(
            "warning",
            EVENT.LOOP_WAS_AWAY,
            seconds=round(seconds, 3),
            leases=gauges["leases"],
            pulls=gauges["pulls"],
            parked=gauges["parked"],
            **self._away.left_out(),
            **({"not_logged_s": round(more_s, 3)} if more_s else {}),
        )

    def release_unanswered(self, pull: Pull, ranks: Sequence[str], cause: str, detail: str, now: float) -> None:
        """Log that ranks never acknowledged a pull's release."""
        self.event(
            "warning",
            EVENT.RELEASE_UNANSWERED,
            cause=cause,
            **({"detail": _short(detail)} if detail else {}),
            **_names(pull),
            outcome=pull.outcome,
            ranks=list(ranks[:MAX_NAMED]),
            seconds=round(now - pull.published_at, 6),
        )

    def release_refused(self, pull: Pull, rank: str, cause: str, detail: str) -> None:
        """Log that a rank turned a pull's release down."""
        said = {"cause": cause, "detail": _short(detail), **_names(pull), "outcome": pull.outcome, "ranks": [rank]}
        self.event("warning", EVENT.RELEASE_REFUSED, **said)

    def reader_met(self, name: str, incarnation: str, minor: int, now: float) -> None:
        """Log that a start of a reader's process was welcomed for the first time.

        `asynckv doctor --to` shakes hands as a reader does, and never reads: a log that named it would have people look
        for the log of a process that has long ended.
        """
        if not name.startswith(DOCTOR) and self._met.take(now):
            self.event(
                "info",
                EVENT.READER_MET,
                reader=name,
                reader_incarnation=incarnation,
                minor=minor,
                **self._met.left_out(),
            )

    def reader_refused(self, name: str, what: str, cause: str, detail: str, now: float) -> None:
        """Log that a reader is not served by this start of the process, or not at all."""
        if self._turned_down.take(now):
            self.event(
                "warning",
                EVENT.READER_REFUSED,
                reader=name,
                said=what,
                cause=cause,
                detail=_short(detail),
                **self._turned_down.left_out(),
            )

    def internal_error(self, exc: Exception, now: float) -> None:
        """Log a bug of ours, with its traceback."""
        if self._bugs.take(now):
            text = "".join(traceback.format_exception(exc))
            if len(text) > MAX_FIELD:
                text = f"... {text[4 - MAX_FIELD :]}"  # the last call matters most
            self.event("error", EVENT.INTERNAL_ERROR, error=repr(exc), traceback=text, **self._bugs.left_out())

    def lease_ended(self, lease: Lease, now: float) -> None:
        """Log the end of a prefill side's lease; one that expired names the readers still owed."""
        good = lease.state is LeaseState.RELEASED
        if self._level > logging.WARNING or (good and not lease.is_sampled):
            return
        said: dict[str, Any] = {
            "cause": lease.state.value if lease.is_over else "closed",
            **_lease_names(lease),
            "seconds": round(min(lease.ended_at, now) - lease.lent_at, 6),
            "readers": {x.name: x.outcome.value for _, x in sorted(lease.discharged.items())[:MAX_NAMED]},
            "blocks": _num_blocks(lease),
        }
        if good:
            self.event("info", EVENT.LEASE_ENDED, **said, **self._skip_count())
            return
        said |= {**_why_kept(lease, now), **self._skip_count()}
        self._ended_alike(EVENT.LEASE_ENDED, EVENT.LEASES_ENDED_ALIKE, str(said["owed"]), said, now)

    def withdrawn(self, params: Params, waited: Sequence[str]) -> None:
        """Log that a request will never be lent, and how many pulls waited for it."""
        self.event(
            "info",
            EVENT.REQUEST_WITHDRAWN,
            request_id=params.request_id,
            sequence=params.key.sequence,
            waited=len(waited),
            pull_ids=list(waited[:8]),
        )

    def lease_lent(self, lease: Lease, now: float) -> None:
        """Log that a request was lent, and decide whether its grants and its good end are logged as well."""
        if not self._may_log(lease.lent.key, now):
            return
        lease.sample()
        self.event(
            "info",
            EVENT.LEASE_LENT,
            request_id=lease.lent.request_id,
            sequence=lease.lent.key.sequence,
            blocks=_num_blocks(lease),
            lease_s=lease.lent.lease_s,
            **({"readers": lease.lent.readers} if lease.lent.readers > 1 else {}),
            **self._skip_count(),
        )
        for pull_id in lease.grants:  # claimed before it was lent
            self.lease_granted(lease, pull_id, now)

    def lease_granted(self, lease: Lease, pull_id: PullId, now: float) -> None:
        """Log that a reader was promised the blocks of a sampled lease."""
        grant = lease.grants.get(pull_id)
        if grant is not None and lease.attempts[grant.reader] <= MAX_GRANTS:
            self.event(
                "info",
                EVENT.LEASE_GRANTED,
                request_id=lease.lent.request_id,
                sequence=lease.lent.key.sequence,
                reader=grant.name,
                pull_id=pull_id,
                seconds=round(grant.until - grant.since, 6),
                after_s=round(grant.since - lease.lent_at, 6),
            )

    def held_for_long(self, held: HeldForLong, oldest: Sequence[RequestStatus]) -> None:
        """Log what has been held for long, with the oldest of it."""
        is_lease = bool(oldest) and oldest[0].kind == "lease"
        self.event(
            "warning",
            EVENT.LEASE_HELD if is_lease else EVENT.PULL_HELD,
            **({"state": held.state} if held.state else {}),
            waits=held.waits,
            requests=held.number,
            oldest=[
                _lease_entry(x, status) if isinstance(x, Lease) else _pull_entry(x, status)
                for x, status in zip(held.oldest, oldest, strict=True)
            ],
        )

    def peer_changed(self, peer: Peer, before: PeerState, after: PeerState) -> None:
        """Log a peer's transition; an end that was announced, and took no pull along, is no warning."""
        name = peer.name.partition("@")[0]
        if after is PeerState.READY and str(self._bound.get("rank", "")).startswith(f"{name}@"):
            both = f"this rank and the one at {peer.address} are both {name}"
            self.event("warning", EVENT.SETUP_DOUBTFUL, detail=f"{both}; give each engine an engine_id of its own")
        over = after is PeerState.GONE
        bad = after in (PeerState.SUSPECT, PeerState.NEW) or (over and (peer.num_failed or not peer.is_orderly))
        said = peer.detail and (bad or over)
        self.event(
            "warning" if bad else "info",
            EVENT.PEER_CHANGED,
            peer=peer.name,
            address=peer.address,
            peer_incarnation=peer.incarnation,
            before=before.value,
            state=after.value,
            **({"cause": peer.reason, "detail": peer.detail} if said else {}),
            **({"pulls_failed": peer.num_failed} if said and peer.num_failed else {}),
        )

    def traced(self, subject: Pull | Lease, entries: Sequence[tuple[float, str]]) -> None:
        """Log transitions one by one, at debug level."""
        if isinstance(subject, Pull):
            kind, names = EVENT.PULL_TRANSITION, _names(subject)
            start = subject.history[0][0]
        else:
            kind, names = EVENT.LEASE_TRANSITION, _lease_names(subject)
            start = subject.lent_at
        for at, text in entries:
            self.event("debug", kind, to=str(text), at_s=round(at - start, 6), **names)

    def _may_log(self, key: Key, now: float, is_slow: bool = False) -> bool:
        """Let successes and slow successes through, each up to the configured rate, and count what is left out."""
        if self._level > (logging.WARNING if is_slow else logging.INFO):
            return False
        if self._slow.take("", now) if is_slow else self._sampler.take(key.token, now):
            return True
        self._skipped += 1
        return False

    def _skip_count(self) -> dict[str, int]:
        skipped, self._skipped = self._skipped, 0
        return {"successes_not_logged": skipped} if skipped else {}


def _num_blocks(lease: Lease) -> int:
    return sum(n for g in lease.lent.groups for first, n in g.runs if first != NULL)


def _names(pull: Pull) -> dict[str, Any]:
    """What joins a decode side's request with the prefill side's."""
    params = pull.params
    return {
        "request_id": pull.request_id,
        "prefill_request_id": params.request_id,
        "pull_id": pull.pull_id,
        "peer": params.engine_id,
        "sequence": params.key.sequence,
    }


def _lease_names(lease: Lease) -> dict[str, Any]:
    """What joins a prefill side's request with the decode side's."""
    return {"request_id": lease.lent.request_id, "sequence": lease.lent.key.sequence}


def _why(pull: Pull) -> dict[str, Any]:
    """Why a pull failed: in which phase, in what words, and what it waited for then."""
    waited_for = {"waited_for": _short(pull.waited_for)} if pull.waited_for else {}
    return {"failed_in": pull.failed_in, "detail": pull.detail, **waited_for}


def _why_kept(lease: Lease, now: float) -> dict[str, Any]:
    """Why a lease did not end well: who is owed, when each of them was heard of last, and what was turned down."""
    late_s = min(lease.ended_at, now) - lease.expires_at if lease.state is LeaseState.EXPIRED else 0.0
    return {
        "owed": list(lease.waits_for()[:MAX_NAMED]),
        "claims": {x.name: _claim(x, lease.lent_at) for x in lease.claims()[:MAX_RANKS]},
        **_refused(lease),
        **({"revoked_by": lease.revoked_by} if lease.revoked_by else {}),
        **({"late_s": round(late_s, 3)} if late_s > LATE_S else {}),
        "history": _relative(lease.history),
    }


def _written_blocks(pull: Pull) -> int:
    """How many of this side's blocks a pull writes."""
    return sum(int((ids >= 0).sum()) for _, ids in pull.lists.local) if pull.lists else 0


def _claim(grant: Grant, lent_at: float) -> dict[str, Any]:
    """A reader's last attempt: when it claimed, and was heard of last, since the request was lent."""
    claimed_s, heard_s = round(grant.since - lent_at, 3), round(grant.asked_at - lent_at, 3)
    return {"pull_id": grant.pull_id, "claimed_s": claimed_s, "heard_s": heard_s}


def _refused(lease: Lease) -> dict[str, Any]:
    """What readers said of a lease and was turned down: seconds since it was lent, what, why, who, in what words."""
    said = [[round(x.at - lease.lent_at, 3), x.what, x.reason, _short(x.who), _short(x.detail)] for x in lease.refused]
    return {"refused": said} if said else {}


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 4]} ..."


def _lease_entry(lease: Lease, status: RequestStatus) -> dict[str, Any]:
    """One lease among those that are held for long."""
    claims = [(name, _claim(grant, lease.lent_at)) for name, _, grant in lease.readers() if grant is not None]
    return {
        **_lease_names(lease),
        "lent_s": _rounded(status.age_s),
        "left_s": _rounded(status.left_s),
        "claims": dict(claims[:MAX_RANKS]),
        **_refused(lease),
    }


def _pull_entry(pull: Pull, status: RequestStatus) -> dict[str, Any]:
    """One pull among those that are held for long."""
    return {
        **_names(pull),
        "state_s": _rounded(status.state_s),
        "left_s": _rounded(status.left_s),
        "ranks": {x.rank: x.state for x in status.ranks[:MAX_RANKS]},
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _relative(history: Sequence[tuple[float, str]]) -> list[list[Any]]:
    """Times as seconds since the first entry."""
    first = history[0][0]
    entries = [*history]
    if left_out := max(len(entries) - MAX_HISTORY, 0):
        few = MAX_HISTORY // 4
        entries[few : few + left_out] = [(entries[few][0], f"{left_out} entries are left out")]
    return [[round(at - first, 6), _short(str(text))] for at, text in entries]
