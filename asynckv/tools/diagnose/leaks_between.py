"""The exchange between a reader and a prefill rank: whether they met, and whether a release was answered or refused.

Each question is answered from both logs, or from the one that is there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from asynckv import told
from asynckv.core.types import How
from asynckv.tools.diagnose.causes import REFUSED_AS, ReaderView
from asynckv.tools.diagnose.join import (
    GATHERED_S,
    LoggedLease,
    LoggedPull,
    LoggedRequest,
    Process,
    base_name,
    engine_of,
    start_of,
)
from asynckv.tools.diagnose.leaks_values import in_seconds, listed
from asynckv.tools.diagnose.presence import AT_ONCE_S, Presence
from asynckv.tools.diagnose.records import Record

KEYS = frozenset({How.TURNED_AWAY, How.UNLISTED_LISTENER, How.NO_KEY, How.NEEDS_KEYS})


def refused_as(reason: str, limit: str = "") -> ReaderView | None:
    """Return the reader's view that a refusal shows; None if it adds nothing."""
    if limit == "max_lease_s":
        return ReaderView.OVERSTAYED
    found = REFUSED_AS.get(reason, ReaderView.REFUSED)
    return found if found is not ReaderView.ANY else None


def spoken_of(request: LoggedRequest, lease: LoggedLease, name: str) -> list[LoggedPull]:
    """Find the attempts of a reader's name at one lease, by time."""
    claims = lease.claims
    spoke = {start_of(x) for x in (*claims, *lease.released)}

    def is_his(pull: LoggedPull) -> bool:
        if name in claims and claims[name].pull_id == pull.pull_id:
            return True
        if start := start_of(name):
            return pull.process.start == start
        is_named = pull.process.start not in spoke if name == "*" else pull.process.base == base_name(name)
        return is_named and lease.process.base in map(base_name, pull.peer_ranks or (lease.process.rank,))

    found = filter(is_his, request.all_pulls)
    return sorted(found, key=lambda x: x.begun_at if not math.isnan(x.begun_at) else math.inf)


def pulls_of(request: LoggedRequest, lease: LoggedLease, name: str) -> list[LoggedPull]:
    """Find the attempts of a reader's name that explain why it is still awaited."""
    found = spoken_of(request, lease, name)
    # A log that ends before a lease does not show the readers that released it.
    is_cut = name == "*" and lease.ended is None
    return [x for x in found if not (is_cut and has_read(x, lease))]


def shook_hands(presence: Presence, reader: Process, lease: LoggedLease) -> bool:
    """Return True if one of both logs shows that they met before it was over."""
    owner, until = lease.process, lease.lent_at + lease.seconds
    for record in said_of(reader, owner.rank):
        if record.text("state") in ("loading", "ready", "suspect"):
            return presence.when(reader, record.at)[0] <= presence.span(lease)[1]
    met = (x for x in owner.of(told.ReaderMet) if x.text("reader_incarnation") == reader.incarnation)
    return any(x.at <= until for x in met)


def said_of(reader: Process, rank: str) -> Iterator[Record]:
    """Yield a reader's lines about a rank that it reads from."""
    return (x for x in reader.of(told.PeerChanged) if start_of(x.text("peer")) == start_of(rank))


def key_trouble(presence: Presence, pull: LoggedPull, lease: LoggedLease) -> tuple[str, str]:
    """Return how keys kept a reader and a rank apart, with the evidence; empty if they did not."""
    if shook_hands(presence, pull.process, lease):
        return (pull.how, pull.detail) if pull.cause == "peer_unreachable" and pull.how in KEYS else ("", "")
    ours, theirs = presence.address_of(pull.process.rank), presence.address_of(lease.process.rank)
    if (found := key_trouble_at(pull, lease.process.rank, theirs))[0] or not (ours and theirs):
        return found
    if ("#" in ours) is ("#" in theirs):  # after the mark is a key
        return "", ""
    return How.NO_KEY if "#" in ours else How.NEEDS_KEYS, f"one has keys, the other none: {ours}, {theirs}"


def key_trouble_at(pull: LoggedPull, rank: str, address: str = "") -> tuple[str, str]:
    """Return how keys kept a reader from a rank, by the reader's log, with the evidence; empty if they did not."""
    addresses = (address, *(x.text("address") for x in said_of(pull.process, rank)))
    known = {x.partition("#")[0] for x in addresses} - {""}
    for record in pull.process.of(told.Refused):
        peer, cause = record.text("who"), record.text("cause")
        if record.at <= pull.last_at + 1.0 and cause in KEYS and peer.partition("#")[0] in known:
            return cause, f"{cause}: {peer}"
    return (pull.how, pull.detail) if pull.how in KEYS else ("", "")


def turned_away(process: Process, since: float, until: float) -> str:
    """Name the readers that were not let in by a process between two moments of its own clock."""
    records = [x for event in (told.Refused, told.ReaderRefused) for x in process.since(event, since) if x.at <= until]
    return listed(f"{x.text('who') or x.text('reader')} was turned away ({x.text('cause')})" for x in records)


def would_be_given_up(presence: Presence, reader: Process, ended_at: float) -> bool:
    """Return True if a reader that did not die lived for long enough to log a release that was never answered."""
    given_up_at = ended_at + reader.durations.get("release_timeout_s", 30.0)
    # A reader that stops gives up all releases, and says so.
    return presence.fate(reader).kind == "stopped" or presence.last >= presence.when(reader, given_up_at)[1]


def unanswered_ranks(pull: LoggedPull) -> list[str]:
    """List the prefill ranks that never took a pull's release, by its reader's word."""
    ranks = [x for record in pull.unanswered for x in record.texts("ranks")]
    return ranks + list(pull.ended.texts("unanswered") if pull.ended is not None else ())


def is_unanswered(pull: LoggedPull, lease: LoggedLease) -> bool:
    """Return True if a reader's log shows that this rank never took its release."""
    ranks = [*unanswered_ranks(pull), *_given_up(pull)]
    return any(start_of(x) == lease.process.start or base_name(x) == lease.process.base for x in ranks)


def _given_up(pull: LoggedPull) -> list[str]:
    """Name ranks that were given up as a pull failed, if a short line does not say that they are not told."""
    if pull.ended is None or not pull.ended.text("same_as") or pull.cause not in ("peer_lost", "restarted"):
        return []
    low, high = pull.ended.at - AT_ONCE_S, pull.ended.at + AT_ONCE_S
    changed = itertools.takewhile(lambda x: x.at <= high, pull.process.since(told.PeerChanged, low))
    return [x.text("peer") for x in changed if x.text("state") == "gone" and x.text("cause") == pull.cause]


def has_read(pull: LoggedPull, lease: LoggedLease) -> bool:
    """Return True if everything was read and this rank was told, by the reader's log."""
    return pull.cause in ("complete", "discharged") and not pull.refused and not is_unanswered(pull, lease)


def how_unanswered(pull: LoggedPull) -> str:
    """Describe the way in which a release was given up."""
    for record in pull.unanswered:
        cause, detail = record.text("cause"), record.text("detail")
        after = f"given up {in_seconds(record.number('seconds'))} s after its pull had ended: {cause or 'no answer'}"
        return f"{after}, {detail}" if detail else after
    return f"the pull ended as {pull.cause}{f', {pull.detail}' if pull.detail else ''}"


def is_only_released(pull: LoggedPull, lease: LoggedLease) -> bool:
    """Return True if nothing is to be read from this rank, so that it hears nothing before the pull is done."""
    base = lease.process.base
    if pull.ended is not None and (pull.ended.texts("read_ranks") or pull.cause in ("complete", "discharged")):
        return base not in map(base_name, pull.ended.texts("read_ranks"))
    states = {base_name(x): state for held in pull.held for x, state in held.mapping("ranks").items()}
    return states.get(base) == "only_released"


def tried_elsewhere(presence: Presence, request: LoggedRequest, pull: LoggedPull) -> str:
    """Name the other request by which a reader tried again; empty if it did not."""
    every = presence.attempts[pull.process.incarnation, pull.request_id] if pull.request_id else []
    others = (x for x, other in every if x is not request and other.begun_at > pull.begun_at)
    return next((f"{x.name or 'another'} of {x.engine_id or 'another engine'}" for x in others), "")


# -- announcements -----------------------------------------------------------------------------------------------------


def is_forgotten(presence: Presence, request: LoggedRequest, pull: LoggedPull) -> bool:
    """Return True for an announcement that was not pulled within its time, or when others of its engine pulled."""
    if pull.ended is not None:
        return pull.cause == "timeout" and pull.failed_in == "announced"
    if not pull.is_announced or presence.fate(pull.process).is_over:
        return False
    held = pull.held[-1]
    is_overdue = held.number("left_s", 0.0) <= pull.process.last_at - held.at
    # All ranks of an engine get the same orders, so it is left behind if another had read the request long before.
    at = presence.when(pull.process, held.at)[0]
    return is_overdue or any(done + GATHERED_S < at for done in read_beside(presence, request, pull))


def read_beside(presence: Presence, request: LoggedRequest, pull: LoggedPull) -> Iterator[float]:
    """Yield when other ranks of a pull's engine had read its request; NaN of those of which an answer only says so."""
    process = pull.process
    for other in request.all_pulls:
        is_beside = other.process is not process and other.process.engine_id == process.engine_id
        if is_beside and other.ended is not None and other.cause == "complete":
            yield presence.when(other.process, other.ended.at)[1]
    for lease in request.leases.values():
        names = lease.held[-1].texts("complete") if lease.held else ()
        yield from (math.nan for x in names if engine_of(x) == process.engine_id and start_of(x) != process.start)
