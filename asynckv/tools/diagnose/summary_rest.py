"""What logs say beside pulls and leases: late blocks, peers, processes, loops that were away, other warnings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from asynckv.core import told
from asynckv.tools.diagnose import leaks_page
from asynckv.tools.diagnose.join import Lease, Request, Service, start_of
from asynckv.tools.diagnose.leaks import find_leaks
from asynckv.tools.diagnose.leaks_values import Leak
from asynckv.tools.diagnose.records import Logs, Record, number
from asynckv.tools.diagnose.summary_model import Away, Engine, Held, Late, Pair, Unseen, Warned
from asynckv.tools.diagnose.summary_samples import bounded

__all__ = ["GOOD", "MAX_CAUSES", "MAX_TEXT", "away", "engine", "held", "late", "peers", "unseen", "warned"]

GOOD = ("complete", "cancelled", "discharged")
"""How a pull ends that nobody has to look at."""

MAX_STATES = 200
"""States of one peer that are kept."""

MAX_LATE = 200
"""Requests with late blocks that are told one by one."""

MAX_TEXT = 300
MAX_CAUSES = 200
"""Different causes: what comes after is counted as `other`."""


def late(logs: Logs, service: Service, moved: Callable[[str, float], float], since: float, until: float) -> Late:
    """Find blocks that came back late, while these events happened; holders' clocks are moved to that of the report."""

    def counts(leak: Leak) -> bool:
        begun = moved(leak.holders[0], leak.since) if leak.holders else leak.since
        return math.isnan(begun) or (
            begun <= until and begun + (0.0 if math.isnan(leak.seconds) else leak.seconds) >= since
        )

    leaks = [x for x in find_leaks(service) if counts(x)]
    found = leaks_page.report(leaks, service, logs)
    for entry in found["leaks"]:
        found["causes"][entry["cause"]].setdefault("example", entry["sentence"])
    worst = sorted(found["leaks"], key=lambda x: -(x["seconds"] or 0.0))
    return Late(requests=len(leaks), causes=found["causes"], worst=worst[:MAX_LATE])


def peers(by_process: Mapping[str, Sequence[Record]], weights: Mapping[int, float]) -> list[Pair]:
    """Sum up what each process saw of each peer."""
    pairs: dict[tuple[str, str], Pair] = {}

    def pair(peer: str, reader: str) -> Pair:
        return pairs.setdefault((peer, reader), Pair(peer=peer, reader=reader))

    for reader, records in by_process.items():
        said = {r.text("pull_id"): r for r in records if r.event == told.PullEnded.event}
        for record in records:
            if record.event == told.PeerChanged.event and (peer := record.text("peer")):
                seen, state = pair(peer, reader), record.text("state")[:40]
                if seen.states:
                    seen.states[-1] = (*seen.states[-1][:2], record.at)
                if len(seen.states) < MAX_STATES:
                    seen.states.append((state, record.at, record.at))
                if state == "ready":
                    seen.last_good = max(seen.last_good or record.at, record.at)
            elif record.event == told.PullEnded.event:
                full = said.get(record.text("same_as"), record)
                ranks = full.texts("read_ranks") or full.texts("peer_ranks") or (full.text("peer"),)
                cause, weight = record.text("cause"), weights.get(id(record), 1.0)
                for peer in filter(None, ranks):
                    seen = pair(peer, reader)
                    seen.pulls += weight
                    seen.num_bytes += bounded(record.number("bytes", 0.0)) * weight / len(ranks)
                    if cause == "complete":
                        seen.last_good = max(seen.last_good or record.at, record.at)
                    elif cause not in GOOD:
                        seen.failures[cause] = seen.failures.get(cause, 0) + 1
            elif record.event == told.LeaseEnded.event:
                # What the prefill side heard, whether or not the reader's log is there; seen from the reader.
                for name, how in record.mapping("readers").items():
                    if isinstance(how, str) and start_of(name):
                        heard = pair(reader, name)
                        heard.released[how[:40]] = heard.released.get(how[:40], 0) + 1
                        if how == "complete":
                            heard.last_good = max(heard.last_good or record.at, record.at)
    for seen in pairs.values():
        if seen.states:
            state, since, _ = seen.states[-1]
            seen.states[-1] = state, since, by_process[seen.reader][-1].at
            seen.not_ready_s = _not_ready(seen.states)
    return sorted(pairs.values(), key=lambda x: (-sum(x.failures.values()), -x.not_ready_s, x.peer, x.reader))


def unseen(service: Service, moved: Callable[[str, float], float], since: float, until: float) -> list[Unseen]:
    """Say what prefill sides know of processes that pull, and their own logs do not: missing, or cut short."""
    found: dict[str, Unseen] = {}

    def of(name: str) -> Unseen | None:
        process = service.process_named(name)
        if process is not None and process.stopped is not None:
            return None
        ends = moved(process.rank, process.last_at) if process is not None else None
        return found.setdefault(name, Unseen(rank=name, ends=ends, released={}))

    for request in service.requests:
        known = {x.process.start for x in request.all_pulls if x.ended is not None}
        for name, (lease, how) in _heard(request).items():
            if start_of(name) in known or lease.ended is None:
                continue
            ended = moved(lease.process.rank, lease.ended.at)
            if not since <= ended <= until or (seen := of(name)) is None:
                continue
            if seen.ends is not None and seen.ends > ended:
                continue  # its log goes on: successes are sampled
            if how:
                seen.released[how] = seen.released.get(how, 0) + 1
            else:
                seen.owed += 1
    return sorted((x for x in found.values() if x.released or x.owed), key=lambda x: x.rank)


def _heard(request: Request) -> dict[str, tuple[Lease, str]]:
    """Return the readers of a request that its prefill side names, and how they released; empty if they did not."""
    out: dict[str, tuple[Lease, str]] = {}
    for lease in request.leases.values():
        out |= {name: (lease, "") for name in lease.owed if start_of(name) and name not in out}
        out |= {name: (lease, how[:40]) for name, how in lease.released.items() if start_of(name)}
    return out


def _not_ready(states: Sequence[tuple[str, float, float]]) -> float:
    was_ready, seconds = False, 0.0
    for state, since, until in states:
        was_ready = was_ready or state == "ready"
        if was_ready and state != "ready":
            seconds += until - since
    return seconds


def away(records: Iterable[Record]) -> list[Away]:
    """List when event loops did not come to their engines."""
    return [
        Away(
            rank=record.rank,
            since=record.at - seconds,
            until=record.at,
            seconds=seconds,
            leases=record.integer("leases", 0),
            pulls=record.integer("pulls", 0),
            not_logged=record.integer("not_logged", 0),
            not_logged_s=record.number("not_logged_s", 0.0),
        )
        for record in records
        if record.event == told.LoopWasAway.event and (seconds := record.number("seconds", 0.0)) > 0
    ]


def held(records: Iterable[Record]) -> list[Held]:
    """Sum up what was held for long, by what it waited for."""
    found: dict[tuple[str, str], Held] = {}
    for record in records:
        if record.event not in (told.LeaseHeld.event, told.PullHeld.event):
            continue
        side = "lease" if record.event == told.LeaseHeld.event else "pull"
        key = side, record.text("waits")[:MAX_TEXT]
        oldest = record.entries("oldest")
        ages = [x for e in oldest for n in ("lent_s", "state_s") if (x := number(e.get(n))) >= 0]
        if (held := found.get(key)) is None:
            if len(found) >= MAX_CAUSES:
                continue
            name = oldest[0].get("request_id") if oldest else ""
            held = found[key] = Held(
                side=side,
                state=record.text("state")[:40],
                waits=key[1],
                warnings=0,
                most=0,
                oldest_s=0.0,
                first=record.at,
                last=record.at,
                example=str(name)[:MAX_TEXT],
            )
        held.warnings += 1
        held.last = record.at
        held.most = max(held.most, record.integer("requests", 0))
        held.oldest_s = max([held.oldest_s, *ages])
    return sorted(found.values(), key=lambda x: (-x.most, -x.oldest_s, x.waits))


TOLD = {told.PullEnded.event, told.LeaseEnded.event, told.LeaseHeld.event, told.PullHeld.event, told.LoopWasAway.event}
"""What other parts of the report tell."""


def warned(records: Iterable[Record]) -> list[Warned]:
    """Sum up other warnings and errors, by name."""
    found: dict[str, Warned] = {}
    for record in records:
        if record.level not in ("warning", "error") or record.event in TOLD:
            continue
        if (warned := found.get(record.event)) is None:
            if len(found) >= MAX_CAUSES:
                continue
            texts = [x for n in ("cause", "detail", "error", "who", "peer", "reader") if (x := record.text(n))]
            warned = found[record.event] = Warned(
                event=record.event,
                level=record.level,
                count=0,
                first=record.at,
                last=record.at,
                example=", ".join([record.rank, *texts])[:MAX_TEXT],
            )
        warned.count += 1
        warned.last = record.at
    return sorted(found.values(), key=lambda x: (x.level != "error", -x.count, x.event))


def engine(rank: str, records: Sequence[Record]) -> Engine:
    """Sum up one process."""
    levels = Counter(record.level for record in records)
    found = Engine(
        rank=rank,
        engine_id=records[0].engine_id,
        first=records[0].at,
        last=records[-1].at,
        events=len(records),
        warnings=levels["warning"],
        errors=levels["error"],
    )
    for record in records:
        if record.event == told.EngineStarted.event:
            found.started = record.at if found.started is None else found.started
            found.host, found.version = record.text("host")[:MAX_TEXT], record.text("version")[:MAX_TEXT]
            found.pid = pid if (pid := record.integer("pid", 0)) > 0 else None
        elif record.event == told.EngineStopped.event:
            found.stopped = record.at
    return found
