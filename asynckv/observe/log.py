"""Structured logs: an event whenever a request ends, a lease ends or a peer changes.

`setup.py` chooses where events go, `told.py` defines them, and `sampling.py` chooses which successes are logged.
Most events are made where they happen. The ends of pulls and leases are made here, because few of them are logged.

An event costs about 50 microseconds, ten times as much as the core spends on the request. Therefore levels are checked
before anything is formatted. Failures are always logged, with their history or with the id of a pull that failed in the
same words. Many similar failures share lines.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
import os
import socket
import traceback
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import msgspec

from asynckv import told
from asynckv.account.inspect import Inspector, RequestStatus
from asynckv.account.waits import last_grants, waits_for
from asynckv.account.watch import HeldAlike
from asynckv.arguments import is_text
from asynckv.config import EngineConfig, LogConfig
from asynckv.core.attempts import head_start_of
from asynckv.core.lease import RECALL, Lease, LeaseState
from asynckv.core.limits import Limiter
from asynckv.core.news import lease_granted, pull_ids
from asynckv.core.notes import History, Lapsed, Note, ReaderGone
from asynckv.core.peer import Peer, PeerState
from asynckv.core.pull import Pull
from asynckv.core.types import Key, KVTransferParams, Reason
from asynckv.geometry.bounds import NULL
from asynckv.observe.observer import Observer
from asynckv.observe.sampling import Rate, Sampler
from asynckv.observe.setup import LEVELS, file_sink, logger_for
from asynckv.told import MAX_NAMED, Told, short
from asynckv.version import VERSION

SAME_S = 1.0  # seconds after a failure in which further ones with the same words get a short line
AWAY_PER_S, MAX_AWAY = 0.1, 3.0  # rate and burst of the warnings that the loop was away
LONGER = 1.5  # factor over the last logged absence from which an absence is logged whatever the rate
MAX_RANKS = 8

MAX_TOLD = 32  # number of similar ends that get a line each, at once and then one per second; the others share lines
PROMPTS_PER_S, MAX_PROMPTS = 1 / 60, 6.0  # rate and burst of the lines about prompts that were counted, except warnings
NEVER = logging.CRITICAL + 1
NO_MORE: Mapping[str, Any] = MappingProxyType({})
MAX_FIELD = 4096  # maximum length of any field, in characters
MAX_HISTORY = 128  # number of logged entries of a history: the first quarter, then the last ones
LATE_S = 0.1  # delay from which an expiry is logged as late, because the loop was away


def phases(pull: Pull) -> dict[str, float]:
    """Return the seconds that a pull spent in each phase (`docs/logging.md`).

    `handshake` lasts until the peer is ready, `queue` until the pull may read and again until its first post, `plan`
    between the two. `post` is spent in posting calls, where local transports copy. `read` lasts from the first
    post to the last completion, and `confirm` until the proof. `detect` is the longest time that a completion was not
    noticed. `release` runs in the background until every rank acknowledged. A failed pull was in its last phase until
    it failed, then in `drain`. A pull that was only announced has `announced` for all but these two.
    """
    seen = pull.measures
    release_s = max(seen.released_at - pull.published_at, 0.0) if seen.released_at < math.inf else 0.0
    end = pull.published_at if seen.failed_at == math.inf else seen.failed_at
    failed = {"drain": pull.published_at - end} if seen.failed_at < math.inf else {}
    if pull.begun_at == math.inf:
        return {"announced": end - pull.history[0][0], **failed, "release": release_s}
    ready, first = min(seen.ready_at, end), min(seen.posted_at, end)
    plan_s = max(min(seen.planned_at, end) - min(seen.admitted_at, end), 0.0)
    # One of several ranks may have been read long before the failure, and data may be read before it is lent.
    read_at = end if pull.failed_in == "read" else min(max(seen.read_at, first), end)
    confirm_s = 0.0 if pull.failed_in == "queue" else end - read_at
    handshake_s, read_s = ready - pull.begun_at, read_at - first
    return {
        "handshake": handshake_s,
        "queue": max(end - pull.begun_at - handshake_s - plan_s - read_s - confirm_s, 0.0),
        "plan": plan_s,
        "post": seen.post_s,
        "read": read_s,
        "detect": seen.detect_s,
        "confirm": confirm_s,
        **failed,
        "release": release_s,
    }


def process_facts(config: EngineConfig) -> dict[str, Any]:
    """Return facts that explain a process's logs: where it runs, and its configured durations."""
    durations = {name: getattr(config.lease, name) for name in ("lease_s", "grant_s", "max_lease_s", "parked_s")}
    durations |= {
        name: getattr(config.pull, name) for name in ("timeout_s", "announce_s", "held_s", "release_timeout_s")
    }
    return {"host": socket.gethostname(), "pid": os.getpid(), "version": VERSION, **durations}


class Recorder(Observer):
    def __init__(self, config: LogConfig, **bound: Any) -> None:
        self._config = config
        self._log, self._log_level = logger_for(**bound)
        self._bound, self._sink = bound, file_sink(config, bound) if config.file else None
        self._sink_level = LEVELS[config.level] if self._sink is not None else NEVER
        self._level = min(self._log_level, self._sink_level)
        self._sampler = Sampler(config.successes_per_s)
        self._slow = Limiter(config.slow_per_s, max(config.slow_per_s, 1.0) if config.slow_per_s else 0.0)
        self._skipped = 0
        self._is_closed = False
        self.num_failed = 0  # number of events for which the application's logging raised
        self._rates: dict[type[Told], Rate] = {}
        self._failures: dict[tuple[Reason | None, str], tuple[float, str]] = {}
        self._told, self._groups = Limiter(1.0, MAX_TOLD), dict[tuple[Any, str, str], list[dict[str, Any]]]()
        self.prompts: told.PromptsCounted | None = None  # the last counts; None if no scheduler counts prompts
        self._is_due = False  # True if these counts wait to be logged
        self._prompts_rate = Rate(PROMPTS_PER_S, MAX_PROMPTS)
        self._away, self._away_s, self._away_said_s = Rate(AWAY_PER_S, MAX_AWAY), 0.0, 0.0

    def bind(self, **bound: Any) -> None:
        self._log = self._log.bind(**bound)
        self._bound = self._bound | bound

    @property
    def num_dropped(self) -> int:
        return self._sink.num_dropped if self._sink is not None else 0

    async def aclose(self, timeout_s: float = math.inf) -> None:
        if self._sink is not None and not self._is_closed:
            self._is_closed = True
            try:
                closing = asyncio.get_running_loop().run_in_executor(None, self._sink.close, timeout_s)
            except RuntimeError:  # the interpreter exits, so there are no more threads, and no loop to hold up
                self._sink.close(timeout_s)
            else:
                await closing

    @property
    def is_tracing(self) -> bool:
        return self._level <= logging.DEBUG

    def log(
        self, event: Told, now: float = math.nan, level: told.Level | None = None, more: Mapping[str, Any] = NO_MORE
    ) -> None:
        """Log an event, if its level is enabled.

        Args:
            event: The event.
            now: Time, which rate-limited events need.
            level: One of the event's levels, if not the first.
            more: Fields that the event's type does not define.
        """
        level = level or event.levels[0]
        if LEVELS[level] < self._level:
            return
        if event.most is not None:
            kind = type(event)
            if (rate := self._rates.get(kind)) is None:
                rate = self._rates[kind] = Rate(*event.most)
            if not rate.take(now):
                return
            more = rate.left_out()
        self.write(level, event.event, _fields(event) | {**more})

    def write(self, level: told.Level, name: str, fields: dict[str, Any]) -> None:
        """Write a line to the file and to the application's logging, if their levels include it."""
        number = LEVELS[level]
        for field, value in fields.items():
            if type(value) is str and len(value) > MAX_FIELD:
                fields[field] = f"{value[: MAX_FIELD - 4]} ..."
        if number >= self._sink_level and self._sink is not None:
            self._sink.put(level, name, self._bound, fields)
        if number >= self._log_level:
            try:
                getattr(self._log, level)(name, **fields)
            except Exception:  # broken application logging must not harm a request
                self.num_failed += 1

    def pull_ended(self, pull: Pull, now: float) -> None:
        took = pull.published_at - pull.called_at
        is_discharge = pull.reason is Reason.DISCHARGED
        good = is_discharge or pull.reason in (Reason.COMPLETE, Reason.CANCELLED)
        slow = took > self._config.slow_s and not is_discharge  # no caller waited for a discharge
        if self._level > logging.WARNING or (good and not self._may_log(pull.params.key, now, slow)):
            return
        like = "" if good else self._same_as(pull, now)
        ended = told.PullEnded(
            *pull_ids(pull),
            cause=str(pull.reason),
            seconds=round(took, 6),
            same_as=like,
            attempt=pull.attempt if pull.attempt > 1 else None,
            held_transfers=None if pull.is_returned else sum(len(x.running | x.doubtful) for x in pull.sources),
            blocks=None if pull.is_returned else written_blocks(pull),
        )
        if like:
            self._ended_alike(ended, told.PullsEndedAlike, pull.params.engine_id, now)
            return
        ended = msgspec.structs.replace(
            ended,
            failed_with=[*pull.blame.ranks[:MAX_NAMED]] or None,
            how=pull.blame.how or "",
            peer_ranks=[source.name for source in pull.sources[:MAX_NAMED]],
            read_ranks=[source.name for source in pull.sources if source.reads][:MAX_NAMED],
            bytes=pull.measures.num_bytes if pull.reason is Reason.COMPLETE else 0,
            descriptors=pull.measures.num_descriptors,
            posts=pull.num_posted,
            rereads=pull.measures.rereads,
            packed=pull.measures.num_packed or None,
            looked_bytes=pull.measures.looked_bytes or None,
            phases={k: round(v, 6) for k, v in phases(pull).items()},
            unanswered=list(pull.unanswered[:MAX_NAMED]) or None,
            history=None if good and not slow else _relative(pull.history),
            successes_not_logged=self._skip_count(),
        )
        if pull.failed_in and not is_discharge:
            ended.failed_in, ended.detail, ended.waited_for = pull.failed_in, pull.detail, short(pull.waited_for)
        if (head := head_start_of(pull)) is not None:
            ended.pieces, ended.piece_bytes = head.num_pieces, head.num_bytes
        self.log(ended, level="info" if good and not slow else "warning")

    def _same_as(self, pull: Pull, now: float) -> str:
        what = (pull.reason, pull.detail)
        at, like = self._failures.get(what, (-math.inf, ""))
        if now - at < SAME_S:
            return like
        if len(self._failures) >= MAX_NAMED:
            self._failures.clear()
        self._failures[what] = now, pull.pull_id
        return ""

    def _ended_alike(
        self, ended: Told, many: type[told.EndedAlike], about: str, now: float, history: History | None = None
    ) -> None:
        """Log that a request failed. After the first few of a cause, several failures share a line."""
        said = _fields(ended)
        group = (many, said["cause"], about)
        # The history of a lease that was granted once to each reader says no more than `seconds` and `claims`.
        lived = sum(not isinstance(what, Lapsed | ReaderGone) for _, what in history or ())
        if "refused" in said or lived > 2 + len(said.get("claims", ())) or self._told.take(group, now):
            self.write("warning", ended.event, said)
            return
        rows = self._groups.setdefault(group, [])
        rows.append({name: value for name, value in said.items() if name != "history"} | {"ago_s": now})
        if len(rows) >= MAX_NAMED or len(self._groups) > MAX_NAMED:
            self.tell_groups(now)

    def tell_groups(self, now: float, waited_s: float = 0.0) -> None:
        """Log the ends that wait to share a line, if the first has waited for `waited_s`, and the prompts' counts."""
        if self.prompts is not None and self._is_due and (not waited_s or self._prompts_rate.take(now)):
            self._is_due = False
            self.log(self.prompts)
        if not self._groups or now - next(iter(self._groups.values()))[0]["ago_s"] < waited_s:
            return
        groups, self._groups = self._groups, {}
        for (many, cause, _), rows in groups.items():
            rows = [{**row, "ago_s": round(now - row["ago_s"], 3)} for row in rows]
            each = {name: [row.get(name) for row in rows] for name in dict.fromkeys(k for row in rows for k in row)}
            alike = {name: x[0] for name, x in each.items() if x == x[:1] * len(x) and name != "request_id"}
            each = {name: x for name, x in each.items() if name not in alike}
            self.log(many(cause, len(rows), alike, each))

    def prompts_counted(self, counted: told.PromptsCounted) -> None:
        """Log the counts soon, or at once if there is something new to warn of."""
        before, self.prompts = self.prompts or told.PromptsCounted(), counted
        is_new = counted.is_alarming > before.is_alarming
        self._is_due = not is_new and counted.computed_locally.keys() <= before.computed_locally.keys()
        if not self._is_due:
            self.log(counted, level="warning")

    def pull_refused(
        self, request_id: str, params: KVTransferParams | Mapping[str, Any], exc: Exception, now: float
    ) -> None:
        refused = told.PullRefused(request_id, type(exc).__name__, short(str(exc)))
        # Malformed params may still name their request.
        given = msgspec.structs.asdict(params) if isinstance(params, KVTransferParams) else params
        given = given if isinstance(given, Mapping) else {}
        names = given.get("request_id"), given.get("engine_id")
        refused.prefill_request_id, refused.peer = (short(str(x)) if is_text(x) else "" for x in names)
        if isinstance(key := given.get("key"), Key):
            refused.sequence = key.sequence
        self.log(refused, now)

    def alive(self, inspect: Inspector, waits_for: list[str], now: float) -> None:
        gauges, waits, step_s = inspect.gauges(), inspect.waits_for_step(now), inspect.step_s(now)
        blocks = gauges["blocks_lent"] + gauges["blocks_writing"]
        held = gauges["leases"], gauges["pulls"], gauges["parked"], blocks
        self.log(told.EngineAlive(*held, waits_for, waits, step_s, gauges["follows"], gauges["followers"]))

    def pull_tried_again(self, pull: Pull, after_s: float) -> None:
        cause, attempt = str(pull.reason), pull.attempt + 1
        self.log(told.PullRetried(*pull_ids(pull), cause=cause, attempt=attempt, after_s=round(after_s, 6)))

    def blocks_returned(self, pull: Pull, now: float) -> None:
        seconds = round(now - pull.published_at, 6)
        self.log(told.BlocksReturned(*pull_ids(pull), blocks=written_blocks(pull), seconds_after_failure=seconds))

    def blocks_retired(self, pull: Pull, now: float) -> None:
        self.log(
            told.BlocksRetired(
                *pull_ids(pull),
                blocks=written_blocks(pull),
                held_by=[x.where for x in pull.sources if x.running or x.doubtful],
                transfers=sum(len(x.running | x.doubtful) for x in pull.sources),
                seconds_after_failure=round(now - pull.published_at, 6),
                history=_relative(pull.history),
            )
        )

    def loop_was_away(self, seconds: float, figures: Mapping[str, float], now: float) -> None:
        """Log that the loop was away, at a limited rate, because a step loop may always be away. An absence that is
        longer than the last logged one by `LONGER` is always logged. `figures` has the values of the event's fields.
        """
        if seconds < LONGER * self._away_said_s and not self._away.take(now):
            self._away_s += seconds
            return
        more_s, self._away_s, self._away_said_s = self._away_s, 0.0, seconds
        known: dict[str, Any] = {x: figures[x] for x in told.LoopWasAway.__struct_fields__ if x in figures}
        away = told.LoopWasAway(seconds=round(seconds, 3), **known, not_logged_s=round(more_s, 3) or None)
        self.log(away, more=self._away.left_out())

    def internal_error(self, exc: Exception, now: float) -> None:
        text = "".join(traceback.format_exception(exc))
        if len(text) > MAX_FIELD:
            text = f"... {text[4 - MAX_FIELD :]}"  # the innermost call matters most
        self.log(told.InternalError(repr(exc), text), now)

    def lease_ended(self, lease: Lease, now: float) -> None:
        """Log the end of a lease, with the readers that are still owed if it did not end by releases."""
        good = lease.state is LeaseState.RELEASED or lease.revoked_by == RECALL  # engines that preempt recall often
        if self._level > logging.WARNING or (good and not lease.is_sampled):
            return
        ended = told.LeaseEnded(
            *_lease_ids(lease),
            cause=lease.state.value if lease.is_over else "closed",
            seconds=round(min(lease.ended_at, now) - lease.lent_at, 6),
            readers={
                lease.discharged[x].name: lease.discharged[x].outcome.value
                for x in heapq.nsmallest(MAX_NAMED, lease.discharged)
            },
            blocks=lent_blocks(lease),
            packed=lease.num_packed or None,
            offers=lease.offers,
            successes_not_logged=self._skip_count(),
        )
        if lease.state is LeaseState.EXPIRED and (late_s := min(lease.ended_at, now) - lease.expires_at) > LATE_S:
            ended.late_s = round(late_s, 3)
        if lease.state is not LeaseState.RELEASED:
            ended.owed, ended.claims = list(waits_for(lease, MAX_NAMED)), _claims(lease)
            ended.refused, ended.revoked_by, ended.history = _refused(lease), lease.revoked_by, _relative(lease.history)
        if good:
            self.log(ended)
        else:
            self._ended_alike(ended, told.LeasesEndedAlike, str(ended.owed), now, lease.history)

    def lease_lent(self, lease: Lease, params: KVTransferParams, now: float) -> None:
        """Log that a request was lent, and decide whether its grants and its successful end are logged too."""
        if not self._may_log(lease.lent.key, now):
            return
        lease.is_sampled = True
        readers = lease.lent.readers
        self.log(
            told.LeaseLent(
                *_lease_ids(lease),
                blocks=lent_blocks(lease),
                lease_s=lease.lent.lease_s,
                readers=readers if readers > 1 else None,
                successes_not_logged=self._skip_count(),
            )
        )
        for pull_id in itertools.islice(lease.grants, told.MAX_GRANTS):  # these readers claimed before it was lent
            self.log(lease_granted(lease, pull_id))

    def held_for_long(self, held: HeldAlike, oldest: Sequence[RequestStatus]) -> None:
        found = list(zip(held.oldest, oldest, strict=True))
        level: told.Level = "info" if held.is_orderly else "warning"
        for lease in (x for x, _ in found if isinstance(x, Lease)):
            lease.is_sampled = True  # otherwise no line may say that this warning is over
        alike: dict[str, Any] = {"state": held.state, "waits": held.waits, "requests": held.number}
        if leases := [_held_lease(x, status) for x, status in found if isinstance(x, Lease)]:
            self.log(told.LeaseHeld(**alike, oldest=leases), level=level)
        elif pulls := [_held_pull(x, status) for x, status in found if isinstance(x, Pull)]:
            self.log(told.PullHeld(**alike, oldest=pulls), level=level)

    def peer_changed(self, peer: Peer, before: PeerState, after: PeerState, now: float) -> None:
        """Log a peer's transition. A peer that said goodbye, and with which no pull failed, is no warning."""
        name = peer.name.partition("@")[0]
        if after is PeerState.READY and str(self._bound.get("rank", "")).startswith(f"{name}@"):
            both = f"this rank and the one at {peer.address} are both {name}"
            self.log(told.SetupDoubtful(f"{both}; give each engine an engine_id of its own"))
        over = after is PeerState.GONE
        bad = after in (PeerState.SUSPECT, PeerState.NEW) or (over and (peer.num_failed or not peer.is_orderly))
        changed = told.PeerChanged(peer.name, peer.address, peer.incarnation, before.value, after.value)
        if peer.detail and (bad or over):
            changed.cause, changed.how, changed.detail = str(peer.reason), peer.how or "", peer.detail
            changed.pulls_failed = peer.num_failed or None
        self.log(changed, level="warning" if bad else "info")

    def traced(self, subject: Pull | Lease, entries: Sequence[tuple[float, str | Note]]) -> None:
        start = subject.history[0][0]
        for at, what in entries:
            to, at_s = _entry(what), round(at - start, 6)
            if isinstance(subject, Pull):
                self.log(told.PullTransition(*pull_ids(subject), to=to, at_s=at_s))
            else:
                self.log(told.LeaseTransition(*_lease_ids(subject), to=to, at_s=at_s))

    def _may_log(self, key: Key, now: float, is_slow: bool = False) -> bool:
        """Return True for successes and slow successes up to their configured rates; count the others."""
        if self._level > (logging.WARNING if is_slow else logging.INFO):
            return False
        if self._slow.take("", now) if is_slow else self._sampler.take(key.token, now):
            return True
        self._skipped += 1
        return False

    def _skip_count(self) -> int | None:
        skipped, self._skipped = self._skipped, 0
        return skipped or None


def _fields(event: Told | Note) -> dict[str, Any]:
    said: dict[str, Any] = msgspec.to_builtins(event)
    return said


def lent_blocks(lease: Lease) -> int:
    """Return the number of blocks that were lent; places without a block do not count."""
    return sum(n for g in lease.lent.groups for first, n in g.runs if first != NULL)


def _lease_ids(lease: Lease) -> tuple[str, int]:
    return lease.lent.request_id, lease.lent.key.sequence


def written_blocks(pull: Pull) -> int:
    """Return the number of blocks that a pull fills; 0 if it has none yet."""
    return sum(int((ids >= 0).sum()) for _, ids in pull.lists.local) if pull.lists else 0


def _claims(lease: Lease) -> dict[str, told.LastClaim]:
    """Return the last attempts of the first few readers that are owed or hold a grant."""
    grants, at = heapq.nsmallest(MAX_RANKS, last_grants(lease).values(), key=attrgetter("reader")), lease.lent_at
    return {x.name: told.LastClaim(x.pull_id, round(x.since - at, 3), round(x.asked_at - at, 3)) for x in grants}


def _refused(lease: Lease) -> list[told.RefusedMessage] | None:
    return [
        told.RefusedMessage(round(x.at - lease.lent_at, 3), x.what, x.reason, short(x.who), short(x.detail), x.limit)
        for x in lease.refused
    ] or None


def _held_lease(lease: Lease, status: RequestStatus) -> told.HeldLease:
    lent_s, left_s = round(status.age_s, 3), _rounded(status.left_s)
    owed = list(waits_for(lease, MAX_NAMED))
    return told.HeldLease(*_lease_ids(lease), lent_s, _claims(lease), left_s, _refused(lease), owed)


def _held_pull(pull: Pull, status: RequestStatus) -> told.HeldPull:
    ranks = {x.rank: x.state for x in status.ranks[:MAX_RANKS]}
    state_s, left_s = round(status.state_s, 3), _rounded(status.left_s)
    return told.HeldPull(*pull_ids(pull), state_s=state_s, ranks=ranks, left_s=left_s)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _relative(history: History) -> told.History:
    """Return a history with its times as seconds since the first entry."""
    first = history[0][0]
    entries = [*history]
    if left_out := max(len(entries) - MAX_HISTORY, 0):
        few = MAX_HISTORY // 4
        entries[few : few + left_out] = [(entries[few][0], f"{left_out} entries are left out")]
    return [(round(at - first, 6), _entry(what)) for at, what in entries]


def _entry(what: str | Note) -> told.Entry:
    """Return a state's name, or a note with its fields, so that no reader of logs has to take words apart."""
    if not isinstance(what, Note):
        return short(str(what))
    return {name: short(x) if isinstance(x, str) else x for name, x in _fields(what).items()}
