"""A finding with its evidence: what was said and heard of each claim and release, and the last line of each side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from asynckv.tools.diagnose.causes import Reader
from asynckv.tools.diagnose.join import Lease, Pull, Request, base_name
from asynckv.tools.diagnose.leaks_between import pulls_of
from asynckv.tools.diagnose.leaks_values import Leak, Word, in_seconds, moment
from asynckv.tools.diagnose.leaks_why import Verdict
from asynckv.tools.diagnose.presence import Presence
from asynckv.tools.diagnose.records import Record


def words_of(presence: Presence, request: Request, leases: Iterable[Lease]) -> Iterator[Word]:
    """Say what became of each claim and release."""
    for lease in leases:
        claims, retrying = lease.claims, lease.retrying
        readers = dict.fromkeys((*lease.owed, *lease.released, *claims))
        for name in readers:
            refused = [x for x in lease.refused if base_name(x.who) == base_name(name) or name == "*"]
            claim = claims.get(name)
            turned_down = next((x for x in refused if x.message in ("claim", "renew")), None)
            if claim is not None:
                said = f"came after {in_seconds(claim.claimed_s)} s, heard of last after {in_seconds(claim.heard_s)} s"
            elif turned_down is not None:
                said = f"was refused after {in_seconds(turned_down.after_s)} s: {turned_down.reason}"
            else:
                said = "is not told" if name in lease.released else "never came"
            pulls = pulls_of(request, lease, name)
            denied = next((x for x in refused if x.message == "release"), None)
            if name in lease.released:
                release = f"came: {lease.released[name]}"
            elif denied is not None:
                release = f"was refused: {denied.reason}"
            elif name in retrying:
                release = "came: retry, and no other followed"
            elif pulls:
                release = what_became_of_release(pulls[-1], lease.process.rank)
            else:
                known = name != "*" and presence.service.process_named(name) is not None
                release = "was never sent, as far as its log goes" if known else "never came"
            yield Word(lease.process.rank, name, said, release)


def make_leak(presence: Presence, request: Request, found: Sequence[Verdict], **fields: Any) -> Leak:
    """Make a finding of a request's verdicts, the first of which counts, with what both sides have said last."""
    verdict = found[0]
    also = tuple(dict.fromkeys(x.sentence for x in found[1:] if x.cause is not verdict.cause))
    pulls = request.all_pulls
    owners = {x.process.incarnation for x in request.leases.values()}
    records = request.records()
    here = next((x for x in reversed(records) if x.incarnation in owners), None)
    there = next((x for x in reversed(records) if x.incarnation not in owners), None)
    if there is None:  # what its reader said last, of whatever
        process = next(
            (p for n in fields.get("owed", ()) if (p := presence.service.process_named(n)) is not None), None
        )
        ends = presence.fate(process).why.partition(";")[0] if process is not None else ""
        last_decode = f"nothing of this request; {process.rank}: {ends}" if process is not None else ""
    else:
        last_decode = _told(there)
    reader = str(verdict.names.get("reader", ""))
    return Leak(
        cause=verdict.cause,
        sentence=verdict.sentence,
        cell=(verdict.owner, verdict.reader),
        engine_id=request.engine_id,
        request_id=request.request_id,
        sequence=request.sequence,
        decode_request_ids=tuple(dict.fromkeys(x.request_id for x in pulls if x.request_id)),
        last_prefill=_told(here) if here is not None else "",
        last_decode=last_decode,
        missing=tuple(dict.fromkeys((*fields.pop("missing", ()), *verdict.missing))),
        # Of a reader that may have been meant, nothing is known.
        reader=reader if "/tp" in reader and verdict.reader is not Reader.ABSENT else "",
        told_at=records[-1].at if records else math.nan,
        other_request_id=verdict.names.get("other_id", "") if verdict.reader is Reader.RENAMED else "",
        also=fields.pop("also", also),
        **fields,
    )


def what_became_of_release(pull: Pull, rank: str) -> str:
    """Say what became of a pull's release to a rank, by the decode side's log."""
    for record in pull.refused:
        if rank in record.texts("ranks"):
            return f"was refused: {record.text('cause')}"
    for record in pull.unanswered:
        if rank in record.texts("ranks"):
            return f"was never answered, given up after {in_seconds(record.number('seconds'))} s"
    if pull.ended is None:
        return "was never sent: the pull has no outcome"
    if rank in pull.ended.texts("unanswered"):
        return "was sent once, to a rank that was gone"
    return f"was sent as the pull ended ({pull.cause})"


def _told(record: Record) -> str:
    said = record.text("cause") or record.text("state") or record.text("to")
    return f"{moment(record.at)} {record.rank}: {record.event}{f' ({said})' if said else ''}"
