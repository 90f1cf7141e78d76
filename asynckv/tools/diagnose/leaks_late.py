"""What is late, of leases, announcements and blocks of failed pulls. (What that means: `causes.py`.)

What follows from a log that *lacks* a line rests on what logs always have: expiries, failures, releases that nobody
answered and orderly ends are never left out.
"""

from __future__ import annotations

import math

from asynckv.tools.diagnose.join import Lease, Pull, Request, start_of
from asynckv.tools.diagnose.leaks_between import has_read, pulls_of
from asynckv.tools.diagnose.presence import DEFAULT_LEASE_S, Presence
from asynckv.tools.diagnose.records import number

GATHERED_S = 11.0
"""A warning may come so much later than it is due."""


def was_read_since(request: Request, lease: Lease) -> bool:
    """All that it waits for have read it, and told it, by their own logs: its log ends before it could say so."""
    owed = lease.owed
    return bool(owed) and all(
        start_of(name) and any(has_read(x, lease) for x in pulls_of(request, lease, name)) for name in owed
    )


def how_late(presence: Presence, lease: Lease) -> str:
    """How a lease's blocks came back late, or did not; empty if they are not."""
    if lease.ended is not None:
        return {"expired": "expired", "closed": "closed"}.get(lease.state, "")
    fate = presence.fate(lease.process)
    if fate.kind == "stopped" or not _is_open(lease):
        return ""  # closing ends all leases, and says so of those that do not end well
    if fate.kind == "died" or presence.last_end > _due(presence, lease):
        return "died"
    overdue = lease.seconds > (lease.lease_s if not math.isnan(lease.lease_s) else DEFAULT_LEASE_S)
    return "held" if lease.held or overdue else ""


def _due(presence: Presence, lease: Lease) -> float:
    """Until when, in everybody's time, an owner that lives has spoken of an open lease again."""
    if lease.held:
        record, entry = lease.held[-1]
        due = record.at + number(entry.get("lent_s"), 0.0)
    else:
        due = lease.lent_at + (lease.lease_s if not math.isnan(lease.lease_s) else DEFAULT_LEASE_S)
    return presence.when(lease.process.incarnation, max(due, lease.process.last_at) + GATHERED_S)[1]


def is_forgotten(presence: Presence, pull: Pull) -> bool:
    """An announcement that nobody pulled, for as long as it may last."""
    if pull.ended is not None:
        return pull.cause == "timeout" and pull.failed_in == "announced"
    return pull.state == "announced" and presence.fate(pull.process).kind in ("silent", "alive") and _is_last_word(pull)


def _is_open(lease: Lease) -> bool:
    """It is held when the log ends. What ended well without a word was not sampled."""
    if lease.lent is not None:
        return True
    if not lease.held:
        return False
    record, entry = lease.held[-1]
    if not lease.process.says_info:
        # A release is no warning: only a warning past its lease says that it was not released.
        lent_s = number(entry.get("lent_s"), 0.0)
        promised = (number(x.get("lent_s")) + number(x.get("left_s")) for _, x in lease.held[:-1])
        if not any(until <= lent_s for until in promised):
            return False
    due = number(entry.get("lent_s"), 0.0) + GATHERED_S
    if not lease.claims:
        due = min(due, number(entry.get("left_s"), math.inf) + 1.0)  # then it would have expired, and been told
    return lease.process.last_at <= record.at + due


def is_kept(pull: Pull) -> bool:
    """Its blocks were not free when it had its outcome."""
    if pull.ended is None and pull.state == "quarantined":
        return _is_last_word(pull)
    return pull.held_transfers > 0 or pull.returned is not None or pull.retired is not None


def is_overdue(pull: Pull) -> bool:
    """An announcement's time was up before its process's log ends."""
    if pull.ended is not None or not pull.held:
        return True
    record, entry = pull.held[-1]
    return number(entry.get("left_s"), 0.0) <= pull.process.last_at - record.at


def _is_last_word(pull: Pull) -> bool:
    """Nothing more of a pull was due before its process's log ends."""
    record, entry = pull.held[-1]
    return pull.process.last_at <= record.at + number(entry.get("state_s"), 0.0) + GATHERED_S
