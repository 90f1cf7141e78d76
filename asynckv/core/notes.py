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
    """A reader was promised the blocks of a lease."""

    words = "granted to {reader}, pull {pull_id}"
    reader: str
    pull_id: PullId


class Released(Note, frozen=True):
    """A reader released a lease."""

    words = "released by {reader}, pull {pull_id}: {outcome}"
    reader: str
    pull_id: PullId
    outcome: Outcome


class Lapsed(Note, frozen=True):
    """The promise to a reader ran out."""

    words = "grant lapsed to {reader}, pull {pull_id}"
    reader: str
    pull_id: PullId


class Gone(Note, frozen=True):
    """The process of a reader ended, and the lease waits for the reader no more."""

    words = "gone: {reader}"
    reader: str


class Revoked(Note, frozen=True):
    """A lease grants nothing any more, because its owner wants the blocks back."""

    words = "ending: revoked, owed {owed}, held {held}"
    owed: int
    held: int


class Promised(Note, frozen=True):
    """A rank promised its blocks to a pull."""

    words = "{rank} granted {seconds:g} s"
    rank: str
    seconds: float


class NotYet(Note, frozen=True):
    """A rank has not lent the request yet."""

    words = "{rank} not yet"
    rank: str


class Unrenewed(Note, frozen=True):
    """A rank promises a pull nothing more."""

    words = "{rank} grants no more: {reason}"
    rank: str
    reason: Reason


class ReadAgain(Note, frozen=True):
    """A pull read a rank before the request was lent."""

    words = "{rank} read before it was lent, reading again"
    rank: str


class Failed(Note, frozen=True):
    """A pull failed."""

    words = "{reason}: {detail}"
    reason: Reason
    detail: str


class Settled(Note, frozen=True):
    """A rank needs no release any more."""

    words = "release {rank}: {how}"
    rank: str
    how: str


class Retired(Note, frozen=True):
    """The blocks of a pull are given up."""

    words = "blocks retired"
