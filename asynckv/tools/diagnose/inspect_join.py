"""Puts what several engines said side by side: for each lease the reader's own attempt at it, and for each attempt the
lease. Pure: answers go in, values for people and for JSON come out.

A lease and an attempt belong together if the attempt names the rank that lends (with the start of its process) and both
have the same key (`sequence`) and prefill request id. What one of them says and the other does not know of is marked
*amiss* if the other has told all that it has. The two are not asked at the very same moment, and under load requests
come and go in between, so it has to be found twice: `join` also takes what the same engines said before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from asynckv.core.inspect import HeldBlocks, RankStatus, RequestStatus
from asynckv.tools.diagnose.ask import Answer, Trouble

NOT_ASKED = "was not asked"
KNOWS_NOTHING = "knows nothing of it"

OVER = {"complete", "failed", "cancelled", "released", "only_released"}
"""Of a rank in a request: nothing more is expected of it."""


@dataclass(frozen=True, slots=True)
class Other:
    """A rank of the other side of a request.

    Attributes:
        rank: Its name, as this side knows it; `*` for a decode engine that never spoke up.
        said: What this side says of it.
        found: What it says itself, if it was asked and knows the request.
        verdict: What follows of both, in words; empty if nothing is to be said.
        is_amiss: The two do not fit together.
    """

    rank: str
    said: RankStatus
    found: RequestStatus | None
    verdict: str
    is_amiss: bool

    @property
    def is_known(self) -> bool:
        """It could have been found: its rank was asked."""
        return self.verdict != NOT_ASKED


@dataclass(frozen=True, slots=True)
class Joined:
    """A request as one rank knows it, with the other side's word.

    Attributes:
        rank: Whose request it is.
        request: As that rank tells it.
        hold: The blocks that it holds there, if any.
        others: The ranks of the other side.
    """

    rank: str
    request: RequestStatus
    hold: HeldBlocks | None
    others: tuple[Other, ...]

    @property
    def is_amiss(self) -> bool:
        """Something of it does not fit together."""
        return any(other.is_amiss for other in self.others)


class _Asked:
    """All answers, by what one looks for."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.by_rank = {answer.account.rank: answer for answer in answers if not answer.error and answer.account.rank}
        self.by_start = {start: rank for rank in self.by_rank if (start := _start(rank))}
        self.silent = {start: answer for answer in answers if answer.error and (start := _start(answer.rank))}
        self.starts = {rank.partition("@")[0]: rank for rank in self.by_rank}
        """Rank without the start of its process -> the start that answered."""
        self.leases: dict[tuple[str, int | None, str], RequestStatus] = {}
        self.pulls: dict[tuple[str, int | None, str], list[tuple[str, RequestStatus]]] = {}
        """By the rank that lends, sequence and prefill request id: who pulls it."""
        for rank, answer in self.by_rank.items():
            for each in answer.requests:
                key = each.sequence, each.prefill_request_id
                if each.kind == "lease":
                    self.leases[rank, *key] = each
                else:
                    for source in each.ranks:
                        self.pulls.setdefault((source.rank, *key), []).append((rank, each))


def join(answers: Sequence[Answer], before: Sequence[Answer] = ()) -> list[Joined]:
    """Put every request that was told beside what the other side says of it, the oldest first.

    Args:
        answers: What all engines say.
        before: What they said a moment earlier. What one side did not know of then has to be unknown to it now as well,
            or nothing is said about it. Without it, once is enough.
    """
    if before:
        known = _doubts(join(before))
        return [
            replace(each, others=tuple(_settled(x, _name_of(each, x) in known) for x in each.others))
            for each in join(answers)
        ]
    asked = _Asked(answers)
    found = []
    for rank, answer in asked.by_rank.items():
        holds = {(hold.pull_id or hold.request_id): hold for hold in answer.holds}
        for request in answer.requests:
            side = _reader if request.kind == "lease" else _lender
            others = tuple(side(asked, rank, request, each) for each in request.ranks)
            found.append(Joined(rank, request, holds.get(request.pull_id or request.request_id), others))
    return sorted(found, key=lambda each: -each.request.age_s)


def has_doubts(answers: Sequence[Answer]) -> bool:
    """Whether one side does not know what another speaks of, so that both have to be asked again."""
    return bool(_doubts(join(answers)))


def _doubts(joined: Sequence[Joined]) -> set[tuple[object, ...]]:
    return {
        _name_of(each, other)
        for each in joined
        for other in each.others
        if other.is_amiss and other.verdict.startswith(KNOWS_NOTHING)
    }


def _name_of(each: Joined, other: Other) -> tuple[object, ...]:
    request = each.request
    return each.rank, request.kind, request.request_id, request.pull_id, request.sequence, other.rank


def _settled(other: Other, is_known: bool) -> Other:
    if is_known or not other.verdict.startswith(KNOWS_NOTHING):
        return other
    return replace(other, verdict="", is_amiss=False)


def unrepeated(joined: Sequence[Joined]) -> list[Joined]:
    """Leave out attempts that stand beside a lease anyway; the order stays."""
    beside = {
        id(other.found)
        for each in joined
        if each.request.kind == "lease"
        for other in each.others
        if other.found is not None
    }
    return [each for each in joined if id(each.request) not in beside]


def _reader(asked: _Asked, rank: str, lease: RequestStatus, said: RankStatus) -> Other:
    """Look for the attempt of a reader at what a rank lends."""
    pulls = asked.pulls.get((rank, lease.sequence, lease.prefill_request_id), [])
    if said.rank == "*":
        if not pulls:
            return Other(
                "*", said, None, "no engine that was asked knows of it" if len(asked.by_rank) > 1 else "", False
            )
        who, pull = pulls[0]
        return Other(who, said, pull, f"{pull.state} there, and has not claimed it", False)
    if said.state in OVER:
        return Other(said.rank, said, None, "", False)
    mine = [(who, pull) for who, pull in pulls if pull.pull_id == said.pull_id or _is_same(who, said.rank)]
    if mine:
        who, pull = next((each for each in mine if each[1].pull_id == said.pull_id), mine[0])
        is_newer = bool(said.pull_id) and pull.pull_id != said.pull_id
        return Other(who, said, pull, "another attempt than the one that was granted" if is_newer else "", False)
    return _unknown(asked, said, "it ended there or never began, so nobody renews or releases it")


def _lender(asked: _Asked, rank: str, pull: RequestStatus, said: RankStatus) -> Other:
    """Look for the lease that an attempt is about."""
    if said.state in OVER:
        return Other(said.rank, said, None, "", False)
    lease = asked.leases.get((said.rank, pull.sequence, pull.prefill_request_id))
    if lease is not None:
        return Other(said.rank, said, lease, "", False)
    if said.state == "not_lent" and said.rank in asked.by_rank:
        return Other(said.rank, said, None, "not lent there yet", False)
    return _unknown(asked, said, "it is not lent there: not yet, or no longer")


def _unknown(asked: _Asked, said: RankStatus, why: str) -> Other:
    """Say what it means that the other side has not told of a request."""
    start = _start(said.rank)
    if (rank := asked.by_start.get(start)) is not None:
        if asked.by_rank[rank].is_cut:
            return Other(said.rank, said, None, "not among the oldest requests that it reported", False)
        return Other(said.rank, said, None, f"{KNOWS_NOTHING}: {why}", True)
    if (silent := asked.silent.get(start)) is not None:
        gone = "its process has ended" if silent.trouble is Trouble.GONE else "does not answer"
        return Other(said.rank, said, None, gone, True)
    now = asked.starts.get(said.rank.partition("@")[0])
    if now is not None and start:
        return Other(said.rank, said, None, f"its process has ended: {now} is there now", True)
    return Other(said.rank, said, None, NOT_ASKED, False)


def _start(rank: str) -> str:
    """What tells one start of one process from all others, whatever its engine is called; empty if it is not known."""
    last = rank.rpartition("/")[2]
    return last if "@" in last else ""


def _is_same(who: str, said: str) -> bool:
    """Whether a rank is the one that was named, with the start of its process or without."""
    return who == said or ("@" not in said and who.partition("@")[0] == said)
