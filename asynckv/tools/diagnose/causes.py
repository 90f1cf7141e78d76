"""Why blocks came back late, or pulls failed: the table of verdicts, and the catalogue of causes.

Blocks are **late** if they came back, or will, because time ran out and not because a reader released them: a lease
that expired, or was not over when its engine was closed or died; one that is held beyond its warning age at the end of
the log; an announcement that was not pulled until its time was up; a release that was refused or never answered, if the
prefill rank's log does not show the end of the lease; and blocks of a pull that had its outcome while they might still
be written. Blocks are not late if they were revoked, recalled, withdrawn, or released within their grant, or are
announced and wait, before the announcement's time is up.

The table and the catalogue are in `causes.toml`. `WHY` has a cause for each pair of the owner's view of a reader
(`OwnerView`) and the view of the reader and its process (`ReaderView`). Each cause has one `HEADING`, which says where
to look. Some causes are *classes*: they stand for several that cannot be told apart without the other side's logs.
"""

from __future__ import annotations

import enum
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files


class HEADING(enum.StrEnum):
    GONE = "process gone"
    STOPPED = "stopped or blocked"
    NETWORK = "the network between two ranks"
    NEVER_CAME = "params never came"
    DROPPED = "the decode scheduler dropped or refused it"
    WRONG = "wrong address, key or id"
    LEASE = "the lease against the queue"
    BYTES = "bytes that changed"
    UNKNOWN = "not known"


OwnerView = enum.Enum("OwnerView", "UNCLAIMED CLAIMED RETRYING REFUSED CLOSED DIED UNKNOWN READ FAILED")
"""A prefill rank's view of a reader that it waits for, and the end of its lease, from its log."""

ReaderView = enum.Enum(
    "ReaderView",
    "ANY NO_LOG UNHEARD LEFT_OUT NONE_RUNS ABSENT RENAMED EARLY WRONG_TARGET STALE KEYS KEYS_HERE UNMET REFUSED TWICE "
    "BROKEN REFUSED_HERE OVERSTAYED ANNOUNCED DIED CLOSED AWAY OWNER_AWAY OWNER_CLOSED OWNER_DIED PLANE_DIED "
    "UNANSWERED RETRIES ELSEWHERE READING LATE WAITING TIMED_OUT UNLENT OVERTAKEN STUCK IDLE DIFFERS UNOFFERED "
    "OTHER_TICKET",
)
"""The view of a reader and its process, from logs: the first of these that would have been enough by itself."""

CAUSE = enum.StrEnum(
    "CAUSE",
    # never claimed
    "NEVER_SHOOK_HANDS KEYS_REFUSED LISTENER_UNLISTED WRONG_TARGET STALE_PARAMS NEVER_HEARD_OF NO_READER_RUNS NO_STEP "
    "RANK_NEVER_SPOKE DECODE_UNRESPONSIVE NEVER_CLAIMED "
    # claimed or not, and never released
    "READER_DIED READER_CLOSED NO_ATTEMPT_FOLLOWED RETRIED_ELSEWHERE ANNOUNCED_AND_FORGOTTEN LEASE_TOO_SHORT MAX_LEASE "
    "DECODE_LOOP_AWAY SCHEDULER_STUCK READER_SILENT "
    # the release
    "OTHER_REQUEST_ID RELEASE_REFUSED RELEASE_TOO_EARLY RELEASE_LOST RELEASE_UNANSWERED "
    # the prefill engine
    "PREFILL_LOOP_AWAY PREFILL_DIED PREFILL_CLOSED "
    # bytes
    "BYTES_DIFFER "
    # transfers that might still write
    "STUCK_TRANSFER DATA_PLANE_DIED "
    # neither
    "TIMEOUT_TOO_SHORT NOT_LENT_IN_TIME PREFILL_LENDS_NOTHING NO_OFFER OTHER_TICKET PARAMS_GIVEN_TWICE CONNECTION_LOST "
    "REFUSED_LOCALLY NOT_KNOWN STILL_HELD",
)
"""Causes of late blocks. The values are their names in small letters, and stable."""


@dataclass(frozen=True, slots=True)
class Entry:
    heading: HEADING  # what to look at
    title: str  # a few words, for tables
    sentence: str  # the sentence about a request; names and numbers replace the braces
    remedy: str  # what to do
    is_class: bool = False  # it stands for several causes that cannot be told apart with the logs at hand
    of: Mapping[OwnerView, str] = field(default_factory=dict)  # other sentences, by what the owner knows


_ROWS = tomllib.loads(files(__package__).joinpath("causes.toml").read_text(encoding="utf-8"))
SAID: dict[OwnerView | ReaderView, str] = {OwnerView[name]: words for name, words in _ROWS.pop("owners").items()}
SAID |= {ReaderView[name]: words for name, words in _ROWS.pop("readers").items()}
"""The views in words."""

WELL: Mapping[str, str] = _ROWS.pop("well")
"""Ends of a pull that are no failures, with the reason for which they are well."""
NEVER: Mapping[str, str] = _ROWS.pop("never")  # reasons that never end a pull
FAILED_AS = {reason: ReaderView[name] for name, reasons in _ROWS.pop("failed_as").items() for reason in reasons}
"""Evidence of a pull's cause, if no other event explains it; reasons of later versions are not known."""
REFUSED_AS = {reason: ReaderView[name] for name, reasons in _ROWS.pop("refused_as").items() for reason in reasons}
"""The reader's view that a refusal shows by its reason. It is `ANY` for reasons that add nothing about the missing
release of the lease, and `REFUSED` for reasons that are not listed."""

_REMEDIES: Mapping[str, str] = _ROWS.pop("remedies")
_AS_REASON = {"PlanRefused": "unplannable", "RemoteTooShort": "remote_too_short", "Overloaded": "queue_full"}
"""Reasons of the errors that engines log when they refuse a call."""

CATALOGUE: dict[CAUSE, Entry] = {}
WHY: dict[OwnerView, dict[ReaderView, CAUSE]] = {owner: {} for owner in OwnerView}
"""Causes of late leases, of late blocks of pulls, and of failed pulls."""

for _name, _row in _ROWS.items():
    _cause, _heading = CAUSE(_name), HEADING[_row.pop("heading")]
    for _owner, _readers in _row.pop("cells").items():
        WHY[OwnerView[_owner]].update(dict.fromkeys((ReaderView[x] for x in _readers), _cause))
    _of = {OwnerView[_owner]: sentence for _owner, sentence in _row.pop("of", {}).items()}
    CATALOGUE[_cause] = Entry(_heading, of=_of, **_row)


ANYONE = {
    **{"reader": "the reader", "holder": "the prefill rank", "address": "ADDRESS", "waited_s": "N"},
    **{"gone": "died", "also": "", "waited": ""},
}
"""Words for names that a case does not know, or a page has no case for."""


def in_words(text: str, names: Mapping[str, object] = ANYONE) -> str:
    """Put the names of a case into a text."""
    return text.format_map(
        defaultdict(lambda: "?", ANYONE | {k: x for k, x in names.items() if x not in ("", "*") or k not in ANYONE})
    )


def remedy_of(cause: CAUSE, reason: str = "", names: Mapping[str, object] = ANYONE) -> str:
    """Return what to do about a cause, by a reason or the type of an error if the cause has several of them."""
    return in_words(_REMEDIES.get(_AS_REASON.get(reason, reason)) or CATALOGUE[cause].remedy, names)
