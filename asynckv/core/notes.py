"""Notes: what stands in the history of a lease or a pull beside its states. Words are made where they are shown."""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct, structs

from asynckv.core.types import Outcome, PullId, Reason


class Note(Struct, frozen=True):
    """Something that happened to a lease or a pull; `words` are its words, with its fields in braces."""

    words: ClassVar[str]

    def __str__(self) -> str:
        return self.words.format(**structs.asdict(self))


History = list[tuple[float, str | Note]]
"""States and notes, each with its time."""


class Granted(Note, frozen=True):
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


class Gone(Note, frozen=True):
    words = "gone: {reader}"
    reader: str


class Revoked(Note, frozen=True):
    words = "ending: revoked, owed {owed}, held {held}"
    owed: int
    held: int


class Promised(Note, frozen=True):
    words = "{rank} granted {seconds:g} s"
    rank: str
    seconds: float


class NotYet(Note, frozen=True):
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
