"""Notes in the history of a lease or a pull, between its states. A note becomes words only where it is shown."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, ClassVar

from msgspec import Struct, structs

from asynckv.core.types import Outcome, PullId, Reason


class Note(Struct, frozen=True, tag_field="note", tag=str.lower):
    """An event in the life of a lease or a pull. `words` is its text, with the fields in braces; a log has the fields,
    and the name of the type as `note`.
    """

    words: ClassVar[str]

    def __str__(self) -> str:
        return self.words.format(**structs.asdict(self))


History = list[tuple[float, str | Note]]  # states and notes, each with a time


class GrantedTo(Note, frozen=True, tag="granted"):
    words = "granted to {reader}, pull {pull_id}"
    reader: str
    pull_id: PullId


class Released(Note, frozen=True):
    words = "released by {reader}, pull {pull_id}: {outcome}"
    reader: str
    pull_id: PullId
    outcome: Outcome


class Lapsed(Note, frozen=True):
    words = "grant lapsed to {reader}, pull {pull_id}"
    reader: str
    pull_id: PullId


class ReaderGone(Note, frozen=True, tag="gone"):
    words = "gone: {reader}"
    reader: str


class Revoked(Note, frozen=True):
    words = "ending: revoked, owed {owed}, held {held}"
    owed: int
    held: int


class Recalled(Note, frozen=True):
    words = "recalled; grants dropped: {dropped}"
    dropped: int


class Promised(Note, frozen=True):
    words = "{rank} granted {seconds:g} s"
    rank: str
    seconds: float


class AnsweredNotYet(Note, frozen=True, tag="notyet"):
    words = "{rank} not yet"
    rank: str


class Unrenewed(Note, frozen=True):
    words = "{rank} grants no more: {reason}"
    rank: str
    reason: Reason


class ReadAgain(Note, frozen=True):
    words = "{rank} read before it was lent, reading again"
    rank: str


class Failed(Note, frozen=True):
    words = "{reason}: {detail}"
    reason: Reason
    detail: str


class Settled(Note, frozen=True):
    words = "release {rank}: {how}"
    rank: str
    how: str


class Retired(Note, frozen=True):
    words = "blocks retired"


AnyNote: Any = reduce(or_, Note.__subclasses__())  # one of the above, which their tags tell apart
