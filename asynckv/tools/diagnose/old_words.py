"""Codes of events for lines that have words alone, as asynckv 0.2.0 logged them. No other module reads words.

A line with a code is left as it is.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from asynckv import told
from asynckv.core.notes import GrantedTo, Note, Promised, Released, Revoked
from asynckv.core.types import How
from asynckv.tools.diagnose.causes import OLD_WORDS
from asynckv.tools.diagnose.records import Record

_FIELD = {"pull_id": "[^ ,]+", "outcome": "[a-z]+", "seconds": "[0-9.e+-]+", "owed": "[0-9]+", "held": "[0-9]+"}
_NOTES: Mapping[type[Note], re.Pattern[str]] = {
    kind: re.compile(
        re.sub(r"{(\w+)(:g)?}", lambda found: f"(?P<{found[1]}>{_FIELD.get(found[1], '.+')})", kind.words) + r"\Z",
        re.DOTALL,
    )
    for kind in (GrantedTo, Released, Revoked, Promised)
}
"""Notes that a reader looks for, by their words."""


def coded(record: Record) -> Record:
    """Return a record with the codes that its words stand for."""
    fields = record.fields
    more: dict[str, Any] = {}
    if record.event in (told.PeerChanged.event, told.PullEnded.event) and not {"how", "failed_with"} & fields.keys():
        if detail := record.text("detail"):
            how = next((how for words, how in OLD_WORDS.items() if words in detail), None)
            is_lost = record.text("cause") == "peer_lost" and record.event == told.PeerChanged.event
            more["how"] = how or (How.BROKEN if is_lost else "")
            more["failed_with"] = [x for x in record.texts("peer_ranks") if x in detail]
    if record.event == told.LeaseHeld.event:
        rows = [(x, _limited(x)) for x in record.entries("oldest")]
        more |= {"oldest": [{**x, **y} for x, y in rows]} if any(y for _, y in rows) else {}
    elif record.event == told.LeaseEnded.event:
        more |= _limited(fields)
    entries = fields.get("history")
    if isinstance(entries, list) and (notes := {i: _note_of(x[1]) for i, x in enumerate(entries) if _is_text(x)}):
        more["history"] = [[x[0], notes[i]] if i in notes else x for i, x in enumerate(entries)]
    if " " in record.text("to"):
        more["to"] = _note_of(record.text("to"))
    return replace(record, said={**fields, **more}) if more else record


def _is_text(entry: object) -> bool:
    """Return True for an entry of a history with the words of a note; a state's name has no space."""
    return isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str) and " " in entry[1]


def _note_of(words: str) -> object:
    """Return the fields of the note that words stand for; the words of other notes stay as they are."""
    for kind, pattern in _NOTES.items():
        if (found := pattern.match(words)) is not None:
            with contextlib.suppress(msgspec.ValidationError):
                fields: object = msgspec.to_builtins(msgspec.convert(found.groupdict(), kind, strict=False))
                return fields
    return words


def _limited(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the refused messages of a lease, if one was refused for a limit that only its words name."""
    refused = row.get("refused")
    rows = refused if isinstance(refused, list) else []
    is_old = [isinstance(x, list) and len(x) == 5 and "max_lease_s" in str(x[4]) for x in rows]
    more = [[*x, "max_lease_s"] if old else x for x, old in zip(rows, is_old, strict=True)]
    return {"refused": more} if any(is_old) else {}
