"""Bugs planted on purpose, one at a time: each breaks one rule of the design, and the simulation must see it.

Each is said by what a rank with that bug does, as it is seen from outside: at its doors (`rigged.py`). So none of
them knows how the engine is made, and none is lost when that changes. The few that are `inside` break what cannot be
seen from there: they replace public functions instead.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from asynckv.config import PullConfig
from asynckv.core import attempts, prefill, routes, wire
from asynckv.core import lease as lease_module
from asynckv.core.copies import Copies
from asynckv.core.decode import DecodeSide
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.lease import WHEN, Lease, LeaseState
from asynckv.core.ledger import Ledger
from asynckv.core.pull import Pull
from asynckv.core.slots import Slots
from asynckv.core.source import Blame, Source
from asynckv.core.spent import SpentKeys
from asynckv.core.types import Key, KVTransferParams, Outcome, Reason, ReplyTo, TransferId
from asynckv.core.wire import (
    Ack,
    Claim,
    Goodbye,
    Granted,
    Hello,
    NotYet,
    Pack,
    Packed,
    Refused,
    Release,
    Renew,
    Unpack,
    Unwelcome,
    Welcome,
)
from asynckv.errors import AsyncKVError, BlocksRetired, LocalProtocolError, NotLentYet, PullError, PullTimeout
from asynckv.geometry import look, match
from asynckv.geometry.layout import TokenShard
from asynckv.geometry.look import Look
from asynckv.geometry.match import owed_readers, remote_ranks
from asynckv.geometry.pairing import BlockLists
from asynckv.ports import AgentInfo, AgentLost, CopyMade
from asynckv.scheduler import PrefillRanks
from tests.lab.looking import offsets
from tests.lab.rigged import Aliases, EarlyEnd, Other, Rank, Rigged, Said, key_of
from tests.lab.world import Process

Plant = Callable[[Rank], None]


class Bugs:
    """Bugs by name, and how ranks are given one.

    Attributes:
        plants: What a rank does that has the bug.
        inside: Replacements that a bug needs besides, or that are the bug.
    """

    def __init__(self) -> None:
        self.plants: dict[str, Plant] = {}
        self.inside: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}

    def planted(self, plant: Plant) -> Plant:
        self.plants[plant.__name__] = plant
        return plant

    def within(self, name: str = "") -> Callable[[Callable[[pytest.MonkeyPatch], None]], None]:
        """Register a bug that no door shows, or what a planted one needs besides."""

        def add(patch: Callable[[pytest.MonkeyPatch], None]) -> None:
            self.inside[name or patch.__name__] = patch
            self.plants.setdefault(name or patch.__name__, lambda rank: None)

        return add

    def replaced(self, name: str, owner: object, what: str, other: object) -> None:
        """Register a bug that is another value or function in one place."""
        self.within(name)(lambda patch: patch.setattr(owner, what, other))

    def doors(self, name: str, patch: pytest.MonkeyPatch) -> Callable[[Process], Rigged]:
        """Return what makes the ranks of a simulated service have a planted bug."""
        if name in self.inside:
            self.inside[name](patch)
        return partial(Rigged, plant=self.plants[name])


BUGS = Bugs()
PLANTED, planted, inside, replaced, doors = BUGS.plants, BUGS.planted, BUGS.within, BUGS.replaced, BUGS.doors

MARGIN = 1e-3
"""By how much clocks may differ."""

ANSWERS = (Granted, NotYet, Refused)
ASKS = (Claim, Renew)
LONG = 1e5


# -- what several have in common ---------------------------------------------------------------------------------------


def rewording(rank: Rank, reword: Callable[[Release], Outcome]) -> None:
    """Say of how attempts ended something else."""
    rank.sends(Release)(lambda said: said.but(outcome=reword(said.message)))


def lends(rank: Rank, begin: Callable[[Any, EarlyEnd], None] = lambda params, handle: None) -> dict[Key, EarlyEnd]:
    """Remember what is lent, so that it can be given back before its time; `begin` is told of each."""
    lent: dict[Key, EarlyEnd] = {}

    def lend(params: Any, **options: Any) -> EarlyEnd:
        handle = lent[key_of(params)] = EarlyEnd(rank.engine.honest.lend(params, **options))
        begin(params, handle)
        return handle

    rank.engine.lend = lend
    return lent


def withdrawal_frees(rank: Rank, lent: Mapping[Key, EarlyEnd]) -> None:
    """Give back at once what is withdrawn though it is lent."""

    def withdraw(params: Any) -> None:
        rank.engine.honest.withdraw(params)
        if (handle := lent.get(key_of(params))) is not None:
            handle.give_back("revoked")

    rank.engine.withdraw = withdraw


def remembers(rank: Rank) -> tuple[dict[Key, Any], dict[Key, Any]]:
    """Remember what was lent, by its key and with its handle, and what was withdrawn without being lent."""
    lent: dict[Key, Any] = {}
    withdrawn: dict[Key, Any] = {}

    def lend(params: Any, **options: Any) -> Any:
        handle = lent[key_of(params)] = rank.engine.honest.lend(params, **options)
        return handle

    def withdraw(params: Any) -> None:
        rank.engine.honest.withdraw(params)
        if key_of(params) not in lent:
            withdrawn[key_of(params)] = params

    rank.engine.lend, rank.engine.withdraw = lend, withdraw
    return lent, withdrawn


def promises(rank: Rank) -> dict[str, str]:
    """Remember to which start of a process each pull was granted."""
    holders: dict[str, str] = {}

    @rank.sends(Granted)
    def promised(said: Said) -> Said:
        holders.setdefault(said.message.pull_id, said.start)
        return said

    return holders


def questions(rank: Rank) -> dict[tuple[str, Other], dict[int, float]]:
    """Remember of each pull and rank, which questions were asked and when."""
    asked: dict[tuple[str, Other], dict[int, float]] = defaultdict(dict)

    @rank.sends(*ASKS)
    def ask(said: Said) -> Said:
        asked[said.message.pull_id, said.other][said.message.nonce] = rank.now
        return said

    return asked


def releases_to_skipped(rank: Rank, become: Callable[[Said], Said | None]) -> None:
    """Change the messages to ranks that were read nothing from: no reader claims from them."""
    claimed = set[tuple[str, str]]()

    @rank.sends(Claim)
    def claim(said: Said) -> Said:
        claimed.add((said.message.pull_id, said.start))
        return said

    @rank.sends(Release)
    def release(said: Said) -> Said | None:
        return said if (said.message.pull_id, said.start) in claimed else become(said)


def unsaid(rank: Rank, said: Said) -> None:
    """Do not say a release, and believe that it was heard."""
    rank.imagine(Ack(said.message.key, said.message.pull_id), said.other, said.start)


def passing_over(rank: Rank) -> Callable[[Key], bool]:
    """Say of a key that it is not lent, though a later one of its scheduler was lent or withdrawn."""
    lent, withdrawn = remembers(rank)
    return lambda key: (
        key not in lent
        and any(key.epoch == other.epoch and key.sequence <= other.sequence for other in (*lent, *withdrawn))
    )


def retrying(rank: Rank, *, is_patient: bool = True) -> None:
    """Try again by another way than the engine does: each attempt is a pull of its own, with a deadline of its own.

    Args:
        rank: The rank that does it.
        is_patient: It waits for the blocks of the attempt before.
    """
    given_up = set[str]()

    async def pull(
        request_id: str, groups: Any, params: Any, *, retries: int = 0, is_last: bool = True, **options: Any
    ) -> Any:
        honest = rank.engine.honest

        def discharge(token: str) -> None:
            if is_last:
                given_up.add(token)
                with suppress(AsyncKVError):
                    honest.announce(request_id, params)
                    honest.cancel(request_id)

        for left in range(retries, -1, -1):
            try:
                return await honest.pull(request_id, groups, params, is_last=is_last and not left, **options)
            except PullError as exc:
                if not left:
                    raise
                if not exc.is_retryable:
                    discharge(key_of(params).token)
                    raise
                error = exc
            try:
                await asyncio.sleep(0.4)
                if is_patient:
                    await error.returned()
            except BlocksRetired:
                discharge(key_of(params).token)
                raise error from None
            except asyncio.CancelledError:
                discharge(key_of(params).token)
                raise
        return None

    rank.engine.pull = pull

    def reword(release: Release) -> Outcome:
        was_given_up = release.outcome is Outcome.CANCELLED and release.key.token in given_up
        return Outcome.FAILED if was_given_up else release.outcome

    rewording(rank, reword)


# -- the configuration -------------------------------------------------------------------------------------------------

CONFIGURED: Mapping[str, Callable[[PullConfig], PullConfig]] = {
    # A call that waits for blocks that never come back waits for ever.
    "blocks_are_never_retired": lambda pull: replace(pull, held_s=LONG),
    "no_pause_between_handshakes": lambda pull: replace(pull, backoff_s=1e-6, max_backoff_s=1e-6),
    # A rank that does not answer is asked each tenth of a second.
    "hellos_are_repeated_without_patience": lambda pull: replace(pull, hello_retry_s=0.1 / 8),
    # A peer with a full window keeps all others from posting.
    "one_window_for_all_peers": lambda pull: replace(pull, total_bytes=pull.window_bytes),
    # Whatever may be read is posted at once.
    "bytes_in_flight_are_not_counted": lambda pull: replace(pull, window_bytes=1 << 40, total_bytes=1 << 40),
    # The budget is not looked at.
    "more_read_than_are_admitted": lambda pull: replace(pull, window_requests=100, total_requests=100),
    # A pull that waits for one peer waits before all others.
    "one_queue_for_all": lambda pull: replace(pull, total_requests=pull.window_requests),
}
"""Bugs of a reader that are another configuration than the one that the service is judged by."""


def configured(change: Callable[[PullConfig], PullConfig], rank: Rank) -> None:
    rank.pull_config = change


PLANTED |= {name: partial(configured, change) for name, change in CONFIGURED.items()}


# -- the lease ---------------------------------------------------------------------------------------------------------


@planted
def release_by_count(rank: Rank) -> None:
    """Any release strikes off any reader; a repeated one counts twice."""
    known: dict[Any, set[int]] = defaultdict(set)
    struck: dict[Any, set[int]] = defaultdict(set)

    @rank.hears(Claim, Release)
    def count(said: Said) -> Said | list[Said]:
        message = said.message
        place, speaker = (message.key, message.cohort.id), message.cohort
        known[place].add(speaker.tp_rank)
        left = sorted(known[place] - struck[place])
        if isinstance(message, Claim) or message.outcome is Outcome.RETRY or not left:
            return said
        struck[place].add(left[0])
        if left[0] == speaker.tp_rank:
            return said
        other = msgspec.structs.replace(speaker, tp_rank=left[0])
        counted = said.but(cohort=other, pull_id=f"{message.pull_id}~{left[0]}")
        return [said.but(outcome=Outcome.RETRY), counted]


@planted
def strikes_off_all_attempts_of_a_rank(rank: Rank) -> None:
    """A release ends every attempt of its rank, not only its own."""
    attempts: dict[Any, dict[str, str]] = defaultdict(dict)

    @rank.hears(Claim, Release)
    def strike(said: Said) -> Said | list[Said]:
        message = said.message
        known = attempts[message.key, message.cohort]
        if isinstance(message, Claim):
            known.setdefault(message.pull_id, said.start)
        if isinstance(message, Claim) or known.get(message.pull_id) != said.start:
            return said
        outcome = Outcome.FAILED if message.outcome is Outcome.RETRY else message.outcome
        return [Said(said.but(pull_id=p, outcome=outcome).message, said.other, start) for p, start in known.items()]


@planted
def a_release_counts_for_every_stage(rank: Rank) -> None:
    @rank.hears(Release)
    def book(said: Said) -> Said | list[Said]:
        speaker, pull_id = said.message.cohort, said.message.pull_id
        if said.message.outcome is Outcome.RETRY:
            return said
        stages = {stage: msgspec.structs.replace(speaker, pp_stage=stage) for stage in range(speaker.pp_size)}
        del stages[speaker.pp_stage]
        return [said, *(said.but(cohort=other, pull_id=f"{pull_id}~{stage}") for stage, other in stages.items())]


EARLY_S = 0.05
"""By how much an owner or a reader mistakes the end of a grant."""


def lapsing_early(patch: pytest.MonkeyPatch, early_s: float) -> None:
    """Forget grants that are about to run out, whenever anything is heard of their lease."""
    for name in ("receive", "revoke", "tick"):
        honest = getattr(Lease, name)

        def late(self: Lease, *args: Any, _honest: Any = honest) -> Any:
            now = next(arg for arg in args if isinstance(arg, float))
            for grant in self.grants.values():
                if grant.until <= now + early_s:
                    grant.until = min(grant.until, now)
                    heapq.heappush(self.deadlines, (grant.until, grant.pull_id))
            return _honest(self, *args)

        patch.setattr(Lease, name, late)


@inside()
def grants_lapse_early(patch: pytest.MonkeyPatch) -> None:
    """An owner that hears something in the last 50 milliseconds of a grant takes it for lapsed."""
    lapsing_early(patch, EARLY_S)


@inside()
def grants_lapse_a_moment_early(patch: pytest.MonkeyPatch) -> None:
    """The same in the last 3 milliseconds: most of these are the margin that its readers leave."""
    lapsing_early(patch, 0.003)


@inside()
def grants_are_believed_late(patch: pytest.MonkeyPatch) -> None:
    """A reader believes what landed up to 50 milliseconds after its promise had run out."""
    honest = Source.prove

    def prove(self: Source) -> None:
        until, self.covered_until = self.covered_until, self.covered_until + EARLY_S
        honest(self)
        self.covered_until = until

    patch.setattr(Source, "prove", prove)


@planted
def revoking_breaks_promises(rank: Rank) -> None:
    """Revoked blocks are free at once, whatever was promised."""

    def begin(params: Any, handle: EarlyEnd) -> None:
        def revoke() -> None:
            handle.honest.withdraw()
            handle.give_back("revoked")

        handle.withdraw = revoke

    lent = lends(rank, begin)
    withdrawal_frees(rank, lent)

    async def aclose(timeout_s: float | None = None) -> Any:
        for handle in lent.values():
            handle.withdraw()
        return await rank.engine.honest.aclose(timeout_s)

    rank.engine.aclose = aclose


@planted
def expiry_breaks_promises(rank: Rank) -> None:
    """A lease ends at its time, though a grant runs on."""

    def begin(params: Any, handle: EarlyEnd) -> None:
        rank.clock.call_at(rank.now + params["lease_s"], partial(handle.give_back, "expired"))

    lends(rank, begin)


@planted
def keys_are_used_again(rank: Rank) -> None:
    """A scheduler that counts from the start again, and ranks that let it."""
    rank.engine.lend = Aliases(rank, is_trusting=True).lend


@inside("keys_are_used_again")
def _(patch: pytest.MonkeyPatch) -> None:
    honest = PrefillRanks.make_params

    def make_params(self: PrefillRanks, *args: Any, **kwargs: Any) -> dict[str, Any]:
        params = honest(self, *args, **kwargs)
        epoch, memory, sequence, _ = params["key"]
        params["key"] = [epoch, memory, sequence % 2, "0" * 32]
        params["request_id"] = "P"
        return params

    patch.setattr(PrefillRanks, "make_params", make_params)


@inside()
def sharing_ranks_are_owed_by_few(patch: pytest.MonkeyPatch) -> None:
    """A lease owes the readers that answer for its rank, and not those that answer for its neighbours."""

    def owed(rank: int, size: int, other_size: int, shards: int = 1) -> range:
        return owed_readers(rank, size, other_size)

    patch.setattr(lease_module, "_owed_readers", owed)
    patch.setattr(lease_module, "owed_readers", owed)


@inside()
def sharing_ranks_are_released_by_few(patch: pytest.MonkeyPatch) -> None:
    """A reader answers for the ranks that overlap it, and not for their neighbours."""
    patch.setattr(routes, "remote_ranks", lambda rank, size, other_size, shards: remote_ranks(rank, size, other_size))


@inside()
def a_lost_shard_is_not_missed(patch: pytest.MonkeyPatch) -> None:
    """The tokens of a rank that could not be met are taken for read, if its neighbours were."""
    honest = match.holders

    def holders(mine: TokenShard, theirs: Sequence[TokenShard], place: int) -> list[int]:
        return honest(mine, theirs, place) or [at for at, each in enumerate(theirs) if each.size > 1][:1]

    patch.setattr(match, "holders", holders)


@planted
def anybody_may_release(rank: Rank) -> None:
    """A release counts for the pull that it names, from any sender."""
    holders = promises(rank)
    rank.hears(Release)(lambda said: Said(said.message, said.other, holders.get(said.message.pull_id, said.start)))


@planted
def anybody_may_renew(rank: Rank) -> None:
    """A renewal counts for the pull that it names, from any sender."""
    holders = promises(rank)
    rank.hears(Renew)(lambda said: Said(said.message, said.other, holders.get(said.message.pull_id, said.start)))


@planted
def tokens_are_not_compared(rank: Rank) -> None:
    """A key is its epoch and its sequence; the token is decoration."""
    lent, _ = remembers(rank)

    @rank.hears(Claim, Renew, Release)
    def look_up(said: Said) -> Said:
        here = (said.message.key.epoch, said.message.key.sequence)
        return said.but(key=next((key for key in lent if (key.epoch, key.sequence) == here), said.message.key))


@planted
def request_ids_are_not_compared(rank: Rank) -> None:
    """A process that knows a key may call the request what it likes."""
    lent, _ = remembers(rank)

    @rank.hears(Claim, Release)
    def name(said: Said) -> Said:
        handle = lent.get(said.message.key)
        return said if handle is None else said.but(request_id=handle.request_id)


@planted
def any_cohort_may_read(rank: Rank) -> None:
    """A lease is bound to as many cohorts as speak up."""
    bound: dict[Key, dict[str, Any]] = defaultdict(dict)
    readers: dict[Key, int] = {}

    def lend(params: Any, **options: Any) -> Any:
        handle = rank.engine.honest.lend(params, **options)
        readers[key_of(params)] = options.get("num_readers", 1)
        return handle

    rank.engine.lend = lend

    @rank.hears(Claim)
    def let_in(said: Said) -> Said:
        known, speaker = bound[said.message.key], said.message.cohort
        if len(known) < readers.get(said.message.key, 0):
            known.setdefault(speaker.id, speaker)
        if not known or speaker.id in known:
            return said
        return said.but(cohort=next(iter(known.values())))


@inside()
def whoever_has_not_spoken_up_is_not_owed(patch: pytest.MonkeyPatch) -> None:
    """A lease that was lent to several decode engines ends when those have released that it has heard of."""

    def all_known_have_released(lease: Lease, now: float) -> bool:
        return bool(lease.cohorts) and not (lease.grants or any(lease.owing()))

    patch.setitem(WHEN, LeaseState.LENT, {all_known_have_released: LeaseState.RELEASED, **WHEN[LeaseState.LENT]})


# A lease ends early when one of several owed readers is gone.
replaced("one_lost_reader_ends_a_lease", Lease, "is_forsaken", lambda lease: not lease.grants and bool(lease.gone))


@planted
def more_is_promised_than_is_kept(rank: Rank) -> None:
    """A grant says 5 milliseconds more than its owner waits."""
    rank.sends(Granted)(lambda said: said.but(seconds=said.message.seconds + 0.005))


@planted
def closing_breaks_promises(rank: Rank) -> None:
    """An engine that closes does not wait for what it has promised."""
    closing = set[asyncio.Task[None]]()

    async def aclose(timeout_s: float | None = None) -> Any:
        closing.add(asyncio.ensure_future(rank.engine.honest.aclose(timeout_s)))
        await asyncio.sleep(0)
        return ()

    rank.engine.aclose = aclose


@planted
def promises_cut_short_are_not_named(rank: Rank) -> None:
    """An engine that had no time to keep its promises says that it kept them."""

    async def aclose(timeout_s: float | None = None) -> Any:
        await rank.engine.honest.aclose(timeout_s)
        return ()

    rank.engine.aclose = aclose


@planted
def closing_takes_its_time(rank: Rank) -> None:
    """An engine with little time to close waits for every promise all the same."""

    async def aclose(timeout_s: float | None = None) -> Any:
        return await rank.engine.honest.aclose()

    rank.engine.aclose = aclose


@planted
def a_lease_is_cut_short(rank: Rank) -> None:
    """A lease ends at half its time."""
    promised: dict[Key, float] = {}

    @rank.sends(Granted)
    def promise(said: Said) -> Said:
        key = said.message.key
        promised[key] = max(promised.get(key, 0.0), rank.now + said.message.seconds)
        return said

    def end(key: Key, handle: EarlyEnd) -> None:
        if promised.get(key, 0.0) > rank.now:
            rank.clock.call_at(promised[key], partial(end, key, handle))
        elif handle.is_open:
            handle.give_back("expired")
            handle.honest.withdraw()

    def begin(params: Any, handle: EarlyEnd) -> None:
        rank.clock.call_at(rank.now + params["lease_s"] / 2, partial(end, key_of(params), handle))

    lends(rank, begin)


@planted
def a_lease_lasts_as_long_as_any_may(rank: Rank) -> None:
    """A lease that no reader asks for lasts for `max_lease_s`."""

    def lend(params: Any, **options: Any) -> Any:
        return rank.engine.honest.lend(params | {"lease_s": rank.engine.config.lease.max_lease_s}, **options)

    rank.engine.lend = lend


@planted
def revoking_does_nothing(rank: Rank) -> None:
    """A lease that is revoked goes on as before."""

    def begin(params: Any, handle: EarlyEnd) -> None:
        handle.withdraw = lambda: None

    lends(rank, begin)


# -- the proof ---------------------------------------------------------------------------------------------------------


@planted
def no_fence(rank: Rank) -> None:
    """Bytes are believed because they have arrived."""

    @rank.sends(*ASKS)
    def answer(said: Said) -> Said:
        message = said.message
        # It promises nothing; but a reader that asks after all has arrived takes any answer for the proof.
        granted = Granted(message.key, message.pull_id, message.nonce, 0.0, LONG)
        rank.imagine(granted, said.other, said.start)
        return said

    rank.hears(*ANSWERS)(lambda said: said if said.message.nonce == 0 or _promises_nothing(said.message) else None)


def _promises_nothing(message: Any) -> bool:
    return isinstance(message, Granted) and message.seconds == 0.0


@planted
def deadline_from_another_transmission(rank: Rank) -> None:
    """A grant counts from the newest claim, not from the one that it answers."""
    asked = questions(rank)

    @rank.hears(Granted)
    def count(said: Said) -> Said:
        times = asked.get((said.message.pull_id, said.other), {})
        if said.message.nonce not in times:
            return said
        later = max(times.values()) - times[said.message.nonce]
        return said.but(seconds=said.message.seconds + later / (1 - MARGIN))


@planted
def completion_stamped_before_it_was_observed(rank: Rank) -> None:
    """The clock is read, then the data plane is asked."""
    read: list[float] = []

    def poll() -> Sequence[Any]:
        before = rank.clock.honest.now()
        news: Sequence[Any] = rank.data.honest.poll()
        if any(isinstance(each, TransferEnded) for each in news):
            read.append(before)
        return news

    def now() -> float:
        value: float = rank.clock.honest.now()
        return read.pop() if read else value

    rank.data.poll, rank.clock.now = poll, now


@planted
def early_reads_are_believed(rank: Rank) -> None:
    """A read that began before the request was lent is not done again."""
    rank.hears(Granted)(lambda said: said.but(lent_for_s=LONG))


@planted
def rates_are_equal(rank: Rank) -> None:
    """Grants are used to their last moment, as if both clocks ran alike, from when they were received."""
    asked = questions(rank)

    @rank.hears(Granted)
    def count(said: Said) -> Said:
        at = asked.get((said.message.pull_id, said.other), {}).get(said.message.nonce, rank.now)
        return said.but(seconds=(said.message.seconds + rank.now - at) / (1 - MARGIN))


@planted
def grants_are_used_to_their_last_moment(rank: Rank) -> None:
    """No margin is kept for clocks that run at other rates."""
    rank.hears(Granted)(lambda said: said.but(seconds=said.message.seconds / (1 - MARGIN)))


@planted
def answers_need_no_question(rank: Rank) -> None:
    """An answer with a nonce that was never used counts from the newest question."""
    asked = questions(rank)

    @rank.hears(*ANSWERS)
    def match(said: Said) -> Said:
        nonces = asked.get((said.message.pull_id, said.other))
        return said.but(nonce=max(nonces)) if nonces and said.message.nonce not in nonces else said


@planted
def answers_from_anybody_count(rank: Rank) -> None:
    """Neither the key nor the process start of an answer is looked at."""
    asked: dict[tuple[str, Other], tuple[Key, str]] = {}

    @rank.sends(*ASKS)
    def ask(said: Said) -> Said:
        asked[said.message.pull_id, said.other] = said.message.key, said.start
        return said

    @rank.hears(*ANSWERS)
    def match(said: Said) -> Said:
        key, start = asked.get((said.message.pull_id, said.other), (said.message.key, said.start))
        return Said(said.but(key=key).message, said.other, start)


@planted
def claims_leave_after_the_reads(rank: Rank) -> None:
    """Urgent words wait until everything is posted."""

    @rank.sends(Claim)
    def later(said: Said) -> None:
        rank.process.loop.call_later(0.01, rank.say, said)


@planted
def promises_are_not_renewed(rank: Rank) -> None:
    """A promise is asked for again when it has run out."""
    rank.sends(Renew)(lambda said: None)


@planted
def lapsed_promises_are_renewed(rank: Rank) -> None:
    """A promise that has run out is renewed, not claimed anew."""
    granted = set[tuple[str, str]]()

    @rank.hears(Granted)
    def note(said: Said) -> Said:
        granted.add((said.message.pull_id, said.start))
        return said

    @rank.sends(Claim)
    def renew(said: Said) -> Said:
        message = said.message
        if (message.pull_id, said.start) not in granted:
            return said
        return Said(Renew(message.key, message.pull_id, message.nonce, message.seconds), said.other, said.start)


# -- recalls -----------------------------------------------------------------------------------------------------------


def unlike(patch: pytest.MonkeyPatch, of: type, name: str, field: str, value: Callable[[Any], Any]) -> None:
    """Let a method see another value of a field while it runs."""
    honest = getattr(of, name)

    def rigged(self: Any, *args: Any, **options: Any) -> Any:
        before = getattr(self, field)
        setattr(self, field, value(self))
        try:
            return honest(self, *args, **options)
        finally:
            setattr(self, field, before)

    patch.setattr(of, name, rigged)


@inside()
def recalled_reads_are_proven_by_the_clock(patch: pytest.MonkeyPatch) -> None:
    """A promise that runs is believed of a request that may be recalled, too."""
    unlike(patch, Source, "prove", "confirms", lambda source: False)


@inside()
def recalled_reads_are_proven_by_the_nonce_that_counts_for_refusals(patch: pytest.MonkeyPatch) -> None:
    """A reader that was refused because its renewal came too late takes any grant for a newer one."""
    unlike(patch, Source, "prove", "confirmed_nonce", lambda source: source.granted_nonce)


@inside()
def renewals_from_before_the_end_confirm_a_read(patch: pytest.MonkeyPatch) -> None:
    """Any grant that arrives after the last byte confirms a read, whenever it was asked for."""
    honest = Source.granted

    def granted(self: Source, grant: Granted, *args: Any) -> None:
        if self.confirms and self.has_landed:
            self.nonce_when_done = min(self.nonce_when_done, grant.nonce - 1)
        honest(self, grant, *args)

    patch.setattr(Source, "granted", granted)


@inside()
def recalling_keeps_what_was_granted(patch: pytest.MonkeyPatch) -> None:
    """A request that is recalled is only granted no more."""
    honest = Lease.revoke
    patch.setattr(Lease, "revoke", lambda lease, now, by="": honest(lease, now, "kept"))


@inside()
def withdrawing_drops_what_was_granted(patch: pytest.MonkeyPatch) -> None:
    """A request that may not be recalled ends at once as well."""
    honest = Lease.revoke

    def revoke(lease: Lease, now: float, by: str = "") -> Any:
        lease.grants.clear()
        return honest(lease, now, by)

    patch.setattr(Lease, "revoke", revoke)


@inside()
def a_recall_is_ignored_while_a_grant_runs(patch: pytest.MonkeyPatch) -> None:
    """A reader that was refused reads on until its promise runs out."""
    unlike(patch, Source, "refused", "confirms", lambda source: False)


@planted
def recalling_returns_too_soon(rank: Rank) -> None:
    """A recall is carried out a moment after it has returned."""

    def recall(requests: Any) -> tuple[Any, ...]:
        rank.process.loop.call_later(0.01, rank.engine.honest.recall, requests)
        return ()

    rank.engine.recall = recall


@planted
def recalling_does_not_name_other_loans(rank: Rank) -> None:
    """The caller of a recall writes blocks that other requests have lent, because nothing names them."""

    def recall(requests: Any) -> tuple[Any, ...]:
        rank.engine.honest.recall(requests)
        return ()

    rank.engine.recall = recall


@planted
def the_digest_does_not_say_what_may_be_recalled(rank: Rank) -> None:
    """A reader that does not know of recalls is granted what may be recalled."""
    knows_no_recall(rank)


@inside("the_digest_does_not_say_what_may_be_recalled")
def _(patch: pytest.MonkeyPatch) -> None:
    honest = wire.blocks_digest

    def blocks_digest(params: KVTransferParams) -> bytes:
        return honest(msgspec.structs.replace(params, recall=msgspec.UNSET))

    patch.setattr(wire, "blocks_digest", blocks_digest)
    patch.setattr(prefill, "blocks_digest", blocks_digest)


def knows_no_recall(rank: Rank) -> None:
    """Read as a reader before 0.5.0, to which params say nothing of recalls."""
    engine = rank.engine

    def known(params: Any) -> Any:
        return {name: value for name, value in params.items() if name != "recall"}

    def announce(request_id: str, params: Any, **options: Any) -> None:
        engine.honest.announce(request_id, known(params), **options)

    async def pull(request_id: str, groups: Any, params: Any, **options: Any) -> Any:
        return await engine.honest.pull(request_id, groups, known(params), **options)

    engine.announce, engine.pull = announce, pull


# -- second looks ------------------------------------------------------------------------------------------------------


@planted
def looks_are_compared_with_themselves(rank: Rank) -> None:
    """No look ever finds a difference."""

    def blind(news: Any) -> Any:
        return news._replace(difference=None) if isinstance(news, TransferEnded) else news

    rank.data.post_read = lambda *args: blind(rank.data.honest.post_read(*args))
    rank.data.poll = lambda: [blind(news) for news in rank.data.honest.poll()]


@planted
def looks_read_the_packed_copy(rank: Rank) -> None:
    """A look sees again what the packed copy held, and not what the blocks hold."""
    copied = dict[int, int]()  # by offset in our memory

    def prepare(plane: Any, *args: Any) -> Any:
        transfer, is_copy = type(plane).prepare(plane, *args), not isinstance(args[-1], Look) and args[-1].slot >= 0
        pieces = list(transfer.places or transfer.pieces)
        for i, (target, source) in enumerate(pieces):
            at = offsets(transfer.ours[i] if transfer.ours else target, plane.arrays[0]).tolist()
            if is_copy:
                copied.update(zip(at, source.tolist(), strict=True))
            elif not transfer.ours:
                for each in at:
                    copied.pop(each, None)
            elif copied.keys() >= {*at}:
                transfer.pieces[i] = target, np.array([copied[each] for each in at], np.uint8)
        return transfer

    def post_read(*args: Any) -> Any:
        rank.data.honest.prepare = partial(prepare, rank.data.honest)
        return rank.data.honest.post_read(*args)

    rank.data.post_read = post_read


@inside()
def samples_lack_the_last_tokens(patch: pytest.MonkeyPatch) -> None:
    """A sample has the first tokens of each part for certain, and not the last ones."""
    honest = look._in_request
    patch.setattr(look, "_in_request", lambda *args: honest(*args).max() - honest(*args))


@inside()
def samples_lack_a_part(patch: pytest.MonkeyPatch) -> None:
    """A sample has pieces of the first part alone."""
    honest = look._sample

    def sample(*args: Any) -> Any:
        pieces = honest(*args)
        return pieces[pieces[:, 5] == pieces[:, 5].min()]

    patch.setattr(look, "_sample", sample)


@inside()
def looks_go_beyond_the_tokens_that_are_lent(patch: pytest.MonkeyPatch) -> None:
    """All that was read is compared."""
    honest = BlockLists.pairs

    def pairs(self: BlockLists, *args: Any, **options: Any) -> Any:
        return honest(self, *args)

    patch.setattr(BlockLists, "pairs", pairs)


@inside()
def looks_that_hang_give_back_their_places(patch: pytest.MonkeyPatch) -> None:
    """Another look uses the place of one that may still write it."""
    ended, give_back = DecodeSide.ended, Slots.give_back

    def gives_back(self: Slots[Any], user: Any) -> None:
        if user in self._in_use:
            give_back(self, user)

    def rigged(self: DecodeSide, transfer_ended: TransferEnded, *args: Any) -> None:
        ended(self, transfer_ended, *args)
        gives_back(self._places, transfer_ended.transfer_id)

    patch.setattr(Slots, "give_back", gives_back)
    patch.setattr(DecodeSide, "ended", rigged)


@inside()
def looks_that_hang_hold_blocks(patch: pytest.MonkeyPatch) -> None:
    """A look in doubt counts as a read that may still write the blocks."""
    ended = DecodeSide.ended

    def rigged(self: DecodeSide, transfer_ended: TransferEnded, *args: Any) -> None:
        transfer = self.transfers.get(transfer_ended.transfer_id)
        if transfer is not None and isinstance(transfer.read, Look) and transfer_ended.ending is Ending.IN_DOUBT:
            transfer.source.doubtful.add(TransferId(-1))
        ended(self, transfer_ended, *args)

    patch.setattr(DecodeSide, "ended", rigged)


@inside()
def what_is_read_again_is_not_looked_at_again(patch: pytest.MonkeyPatch) -> None:
    """A read that is repeated because it was early is believed without a look."""
    honest = Source.restart

    def restart(self: Source, *args: Any, **options: Any) -> None:
        honest(self, *args, **options | {"looks": None})

    patch.setattr(Source, "restart", restart)


@inside()
def the_proof_leaves_out_the_look(patch: pytest.MonkeyPatch) -> None:
    """A read ends with its first look at the bytes: what is seen later needs no promise."""
    ends, look_again, prove = dict[Source, tuple[float, int]](), Pull._look_again, Source.prove
    honest, times = Pull.ended, dict[Source, float]()

    def ended(self: Pull, source: Source, transfer: TransferEnded, num_bytes: int, detect_s: float, now: float) -> Any:
        times[source] = now
        return honest(self, source, transfer, num_bytes, detect_s, now)

    def begin(self: Pull, source: Source) -> None:
        ends[source] = times[source], max(source.nonces, default=0)
        look_again(self, source)

    def rigged(self: Source) -> None:
        after = self.done_at, self.nonce_when_done
        if self in ends and self.done_at > -np.inf:
            self.done_at, self.nonce_when_done = ends[self]
        prove(self)
        self.done_at, self.nonce_when_done = after

    patch.setattr(Pull, "ended", ended)
    patch.setattr(Pull, "_look_again", begin)
    patch.setattr(Source, "prove", rigged)


@inside()
def differences_are_published(patch: pytest.MonkeyPatch) -> None:
    """A pull is complete though a look has found other bytes."""
    unlike(patch, Pull, "_publish", "looks", lambda pull: False)


@inside()
def differences_are_judged_before_the_proof(patch: pytest.MonkeyPatch) -> None:
    """A pull fails as soon as a look has found other bytes: its owner may have had the blocks back before."""
    honest = Pull.looked

    def looked(self: Pull, source: Source, *args: Any) -> None:
        honest(self, source, *args)
        if source.differs is not None:
            self._fail(Reason.DIFFERS, str(source.differs), self.history[-1][0], Blame((source.name,)))

    patch.setattr(Pull, "looked", looked)


# The engine reads once more what has differed.
replaced("differences_are_tried_again", attempts, "RETRYABLE", attempts.RETRYABLE | {Reason.DIFFERS})


# -- custody of blocks -------------------------------------------------------------------------------------------------


def returning_early(rank: Rank, may: Callable[[bool], bool], *, is_held: bool = True) -> None:
    """Let calls that wait for blocks have them at once.

    Args:
        rank: The rank that does it.
        may: Whether to, of a last attempt or another.
        is_held: A failed pull still says which blocks are held.
    """

    async def at_once(*args: Any) -> None:
        await asyncio.sleep(0)

    async def pull(*args: Any, **options: Any) -> Any:
        try:
            return await rank.engine.honest.pull(*args, **options)
        except PullError as exc:
            if may(options.get("is_last", True)):
                exc.returned = at_once  # type: ignore[method-assign]
                exc.held = exc.held if is_held else {}
            raise

    rank.engine.pull = pull
    if may(True):
        rank.engine.returned = at_once


@planted
def frees_before_it_drained(rank: Rank) -> None:
    """Blocks go back with the outcome, whatever still runs."""
    returning_early(rank, lambda is_last: True, is_held=False)


@planted
def retries_into_the_same_blocks(rank: Rank) -> None:
    """The next attempt does not wait for what the last one may still write."""
    returning_early(rank, lambda is_last: not is_last)


@planted
def trusts_an_exception(rank: Rank) -> None:
    """A transfer that is in doubt is taken for ended."""

    def poll() -> list[Any]:
        news = []
        for each in rank.data.honest.poll():
            is_doubtful = isinstance(each, TransferEnded) and each.ending is Ending.IN_DOUBT
            news.append(
                TransferEnded(each.transfer_id, Ending.FAILED, each.cause, each.peer_lost) if is_doubtful else each
            )
        return news

    rank.data.poll = poll


@planted
def closing_returns_blocks_too_soon(rank: Rank) -> None:
    """Blocks come back when closing begins, not when nothing can write them any more."""
    is_closing = asyncio.Event()

    async def wait(honest: Callable[..., Any], *args: Any) -> None:
        waits = [asyncio.ensure_future(honest(*args)), asyncio.ensure_future(is_closing.wait())]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        if waits[0] in done:
            await waits[0]

    async def pull(*args: Any, **options: Any) -> Any:
        try:
            return await rank.engine.honest.pull(*args, **options)
        except PullError as exc:
            exc.returned = partial(wait, exc.returned)  # type: ignore[method-assign]
            raise

    async def aclose(timeout_s: float | None = None) -> Any:
        is_closing.set()
        return await rank.engine.honest.aclose(timeout_s)

    async def returned(request_id: str) -> None:
        await wait(rank.engine.honest.returned, request_id)

    rank.engine.pull, rank.engine.aclose, rank.engine.returned = pull, aclose, returned


@planted
def retries_do_not_wait_for_their_blocks(rank: Rank) -> None:
    """The next attempt begins while the last one may still write."""
    retrying(rank, is_patient=False)


@inside("retries_do_not_wait_for_their_blocks")
def _(patch: pytest.MonkeyPatch) -> None:
    def check(self: Ledger, kind: str, groups: Mapping[int, Any]) -> dict[int, Any]:
        return {group: np.asarray(ids, np.int64) for group, ids in groups.items() if len(ids)}

    patch.setattr(Ledger, "check", check)


@planted
def sleep_does_not_end_the_agent(rank: Rank) -> None:
    """The memory is let go while transfers may write it."""

    async def suspend(*args: Any) -> Any:
        rank.data.close = lambda: None
        try:
            return await rank.engine.honest.suspend(*args)
        finally:
            del rank.data.close

    rank.engine.suspend = suspend


# -- releases ----------------------------------------------------------------------------------------------------------


@planted
def skipped_ranks_hear_our_own_id(rank: Rank) -> None:
    """Ranks that were read nothing from are released under the decode side's request id."""
    own: dict[Key, str] = {}

    async def pull(request_id: str, groups: Any, params: Any, **options: Any) -> Any:
        own[key_of(params)] = request_id
        return await rank.engine.honest.pull(request_id, groups, params, **options)

    rank.engine.pull = pull
    releases_to_skipped(rank, lambda said: said.but(request_id=own.get(said.message.key, said.message.request_id)))


@planted
def skipped_ranks_hear_nothing(rank: Rank) -> None:
    """Ranks that were read nothing from are not released at all."""
    releases_to_skipped(rank, lambda said: unsaid(rank, said))


@planted
def releases_are_sent_once(rank: Rank) -> None:
    """A release that was lost stays lost."""
    sent = set[tuple[str, str]]()

    @rank.sends(Release)
    def once(said: Said) -> Said | None:
        place = said.message.pull_id, said.start
        if place in sent:
            return None
        sent.add(place)
        return said


@planted
def a_failed_attempt_says_it_was_the_last(rank: Rank) -> None:
    """An attempt that will be retried discharges its reader."""
    rewording(rank, lambda release: Outcome.FAILED if release.outcome is Outcome.RETRY else release.outcome)


@planted
def a_curable_failure_discharges(rank: Rank) -> None:
    """The first attempt lets go of the request that the second wants."""
    retried = set[Key]()

    async def pull(request_id: str, groups: Any, params: Any, **options: Any) -> Any:
        if options.get("retries"):
            retried.add(key_of(params))
        return await rank.engine.honest.pull(request_id, groups, params, **options)

    rank.engine.pull = pull

    def reword(release: Release) -> Outcome:
        is_retried = release.outcome is Outcome.RETRY and release.key in retried
        return Outcome.FAILED if is_retried else release.outcome

    rewording(rank, reword)


@planted
def failed_announcements_are_final(rank: Rank) -> None:
    """Whatever cannot be met while a request is announced discharges its reader."""
    announced: dict[str, Key] = {}

    def announce(request_id: str, params: Any, **options: Any) -> None:
        rank.engine.honest.announce(request_id, params, **options)
        announced[request_id] = key_of(params)

    async def pull(request_id: str, *args: Any, **options: Any) -> Any:
        announced.pop(request_id, None)
        return await rank.engine.honest.pull(request_id, *args, **options)

    rank.engine.announce, rank.engine.pull = announce, pull

    def reword(release: Release) -> Outcome:
        is_announced = release.outcome is Outcome.RETRY and release.key in announced.values()
        return Outcome.FAILED if is_announced else release.outcome

    rewording(rank, reword)


@planted
def every_release_says_complete(rank: Rank) -> None:
    """The prefill side hears of no failure."""
    rewording(rank, lambda release: Outcome.RETRY if release.outcome is Outcome.RETRY else Outcome.COMPLETE)


@planted
def nobody_says_that_no_attempt_follows(rank: Rank) -> None:
    """A lease that was told of another attempt waits until it runs out."""
    claimed, retried = set[str](), set[Key]()

    @rank.sends(Claim)
    def claim(said: Said) -> Said:
        claimed.add(said.message.pull_id)
        return said

    @rank.sends(Release)
    def forget(said: Said) -> Said | None:
        message = said.message
        if message.outcome is Outcome.RETRY:
            retried.add(message.key)
        elif message.key in retried and message.pull_id not in claimed:
            unsaid(rank, said)
            return None
        return said


@planted
def retries_have_time_without_end(rank: Rank) -> None:
    """Every attempt has the whole deadline."""
    retrying(rank)


# -- peers -------------------------------------------------------------------------------------------------------------


@planted
def peers_are_removed_under_transfers(rank: Rank) -> None:
    """A peer that is lost leaves the data plane at once."""
    agents: dict[str, str] = {}
    posted: dict[int, str] = {}
    removed: list[str] = []

    def remove(agent: str) -> None:
        if agent in posted.values() and agent not in removed:
            removed.append(agent)
            rank.data.honest.remove_remote_agent(agent)

    def post_read(transfer_id: int, agent: str, *args: Any) -> Any:
        found = rank.data.honest.post_read(transfer_id, agent, *args)
        if found is None:
            posted[transfer_id] = agent
        return found

    def poll() -> Sequence[Any]:
        news: Sequence[Any] = rank.data.honest.poll()
        for each in news:
            if isinstance(each, TransferEnded):
                agent = posted.get(each.transfer_id, "")
                if each.ending is not Ending.IN_DOUBT:
                    posted.pop(each.transfer_id, None)
                if each.peer_lost:
                    remove(agent)
        return news

    def remove_remote_agent(agent: str, **options: Any) -> None:
        if agent in removed:
            removed.remove(agent)
        else:
            rank.data.honest.remove_remote_agent(agent, **options)

    rank.data.post_read, rank.data.poll, rank.data.remove_remote_agent = post_read, poll, remove_remote_agent

    @rank.hears(Welcome, Goodbye)
    def note(said: Said) -> Said:
        if isinstance(said.message, Welcome):
            agents[said.start] = said.message.agent_name
        else:
            remove(agents.get(said.start, ""))
        return said


@planted
def what_was_detached_is_placed_after_all(rank: Rank) -> None:
    """The plane promises to place nothing, and forgets it."""

    def detach(transfer_id: TransferId) -> bool:
        transfer = rank.data.honest.running.get(transfer_id)
        return transfer is not None and transfer.is_staged

    rank.data.detach = detach


@planted
def what_was_detached_counts_as_ended(rank: Rank) -> None:
    """A detached read is reported as failed at once, though it still runs, and nothing is heard of it again."""
    detached, news = set[TransferId](), list[TransferEnded]()

    def detach(transfer_id: TransferId) -> bool:
        if is_staged := rank.data.honest.detach(transfer_id):
            detached.add(transfer_id)
            news.append(TransferEnded(transfer_id, Ending.FAILED, "it was detached"))
            rank.process.call_at(rank.process.world.now, rank.data.honest._on_ready)
        return bool(is_staged)

    def poll() -> list[Any]:
        found = [each for each in rank.data.honest.poll() if getattr(each, "transfer_id", None) not in detached]
        told, news[:] = list(news), []
        return told + found

    rank.data.detach, rank.data.poll = detach, poll


@planted
def staged_reads_are_done_before_they_are_placed(rank: Rank) -> None:
    """The plane says that a read is done when it has landed, and places it a moment later."""

    def post_read(*args: Any) -> Any:
        plane, place = rank.data.honest, type(rank.data.honest)._place

        def late(transfer: Any) -> Ending:
            if transfer.is_detached or not transfer.is_staged:
                return place(plane, transfer)  # type: ignore[no-any-return]
            world = rank.process.world
            world.at(world.now + 0.05, lambda: place(plane, transfer))
            return Ending.DONE

        plane._place = late
        return plane.post_read(*args)

    rank.data.post_read = post_read


@planted
def copies_make_way_at_once(rank: Rank) -> None:
    """The slot of a packed copy is used again as soon as its reader is told of it."""

    @rank.sends(Packed)
    def told(said: Said) -> Said:
        packed = said.message
        if packed.slot >= 0:
            rank.imagine(Unpack(packed.key, packed.pull_id, packed.nonce), said.other, said.start)
        return said


@planted
def copies_are_told_of_before_they_are_made(rank: Rank) -> None:
    """The plane says at once that a packed copy is made."""
    news = list[CopyMade]()

    def pack(slot: int, gathered: Any) -> None:
        rank.data.honest.pack(slot, gathered)
        news.append(CopyMade(slot))
        rank.process.call_at(rank.process.world.now, rank.data.honest._on_ready)

    def poll() -> list[Any]:
        found = [each for each in rank.data.honest.poll() if not isinstance(each, CopyMade)]
        told, news[:] = list(news), []
        return found + told

    rank.data.pack, rank.data.poll = pack, poll


@planted
def copies_are_packed_backwards(rank: Rank) -> None:
    """A reader asks for the pieces of a packed copy in another order than it reads them in."""

    @rank.sends(Pack)
    def turn(said: Said) -> Said:
        recipe = said.message.recipe
        boxes = tuple([(piece, dims[::-1]) for piece, dims in recipe.boxes])
        return said.but(recipe=msgspec.structs.replace(recipe, boxes=boxes))


# Packed copies keep their slots when their request is over.
replaced("copies_stay_after_their_grants", Copies, "settle", lambda self, lease: None)


@planted
def whoever_was_lost_stays_lost(rank: Rank) -> None:
    """A peer that was given up is never met again."""
    handshakes: dict[tuple[Other, str], int] = {}
    met: dict[tuple[Other, str], int] = {}

    @rank.sends(Hello)
    def once(said: Said) -> Said | None:
        place = said.other, said.start
        if place in met and met[place] != said.message.nonce:
            return None
        handshakes[place] = said.message.nonce
        return said

    @rank.hears(Welcome)
    def meet(said: Said) -> Said:
        place = said.other, said.start
        if handshakes.get(place) == said.message.nonce:
            met.setdefault(place, said.message.nonce)
        return said


@planted
def one_handshake_at_a_time(rank: Rank) -> None:
    """A rank that does not answer keeps us from meeting any other."""
    waiting: dict[tuple[Other, str], Said] = {}
    busy: list[tuple[Other, str]] = []

    def begin(said: Said) -> None:
        busy[:] = [(said.other, said.start)]
        rank.process.loop.call_later(rank.engine.config.pull.handshake_s, end, busy[0])

    def end(place: tuple[Other, str]) -> None:
        if busy == [place]:
            busy.clear()
            if waiting:
                said = waiting.pop(next(iter(waiting)))
                begin(said)
                rank.say(said)

    @rank.sends(Hello)
    def hold(said: Said) -> Said | None:
        place = said.other, said.start
        if busy and busy != [place]:
            waiting[place] = said
            return None
        if not busy:
            begin(said)
        return said

    @rank.hears(Welcome, Unwelcome)
    def answered(said: Said) -> Said:
        if busy and busy[0][0] == said.other:
            rank.process.loop.call_soon(end, busy[0])
        return said


@planted
def a_dead_agent_is_given_out(rank: Rank) -> None:
    """Peers that shake hands are told of the first agent for ever."""
    first: list[Welcome] = []

    async def start(*args: Any) -> AgentInfo:
        first.clear()
        return await rank.data.honest.start(*args)  # type: ignore[no-any-return]

    rank.data.start = start

    @rank.sends(Welcome)
    def tell(said: Said) -> Said:
        first.append(said.message)
        old = first[0]
        return said.but(agent_name=old.agent_name, metadata=old.metadata, digest=old.digest)


@planted
def nobody_is_greeted_after_the_agent_died(rank: Rank) -> None:
    """Hellos that come while there is no agent are never answered, nor those after them."""
    lost: list[AgentLost] = []

    async def start(*args: Any) -> AgentInfo:
        lost.clear()
        return await rank.data.honest.start(*args)  # type: ignore[no-any-return]

    def poll() -> Sequence[Any]:
        news: Sequence[Any] = rank.data.honest.poll()
        lost.extend(each for each in news if isinstance(each, AgentLost))
        return news

    rank.data.start, rank.data.poll = start, poll
    rank.hears(Hello)(lambda said: None if lost else said)


# -- calls -------------------------------------------------------------------------------------------------------------


@planted
def the_deadline_is_forgotten(rank: Rank) -> None:
    """Nothing ends a pull that waits."""

    async def pull(*args: Any, **options: Any) -> Any:
        return await rank.engine.honest.pull(*args, **options | {"timeout_s": LONG})

    rank.engine.pull = pull


@planted
def discharging_does_nothing(rank: Rank) -> None:
    """A lease that no reader needs is kept for its reader until it runs out."""

    def cancel(request_id: str, params: Any = None, **options: Any) -> bool:
        return params is not None or bool(rank.engine.honest.cancel(request_id))

    rank.engine.cancel = cancel


@planted
def a_discharge_is_a_cancellation(rank: Rank) -> None:
    """The prefill side is told that something was broken off."""

    def cancel(request_id: str, params: Any = None, **options: Any) -> bool:
        honest = rank.engine.honest
        if params is not None:
            with suppress(AsyncKVError):
                honest.announce(request_id, params, **options)
        return bool(honest.cancel(request_id))

    rank.engine.cancel = cancel


@planted
def cancelling_does_nothing(rank: Rank) -> None:
    """`cancel` says that it did."""
    known = set[str]()

    def announce(request_id: str, *args: Any, **options: Any) -> None:
        rank.engine.honest.announce(request_id, *args, **options)
        known.add(request_id)

    async def pull(request_id: str, *args: Any, **options: Any) -> Any:
        known.add(request_id)
        try:
            return await rank.engine.honest.pull(request_id, *args, **options)
        finally:
            known.discard(request_id)

    def cancel(request_id: str) -> bool:
        return request_id in known

    rank.engine.announce, rank.engine.pull, rank.engine.cancel = announce, pull, cancel


@planted
def whoever_is_late_was_told_to_wait(rank: Rank) -> None:
    """Every deadline that passes is blamed on a request that is not lent."""

    async def pull(*args: Any, **options: Any) -> Any:
        try:
            return await rank.engine.honest.pull(*args, **options)
        except PullTimeout as exc:
            raise NotLentYet(
                str(exc),
                request_id=exc.request_id,
                pull_id=exc.pull_id,
                reason=Reason.NOT_LENT_YET,
                held=exc.held,
                wait_returned=exc.returned,
            ) from exc

    rank.engine.pull = pull


@planted
def draining_revokes(rank: Rank) -> None:
    """Draining takes back what was lent."""
    lent, _ = remembers(rank)

    async def drain(timeout_s: float) -> Any:
        for handle in lent.values():
            handle.withdraw()
        return await rank.engine.honest.drain(timeout_s)

    rank.engine.drain = drain


@planted
def draining_lends(rank: Rank) -> None:
    async def drain(timeout_s: float) -> Any:
        await asyncio.sleep(timeout_s)
        return await rank.engine.honest.drain(0.0)

    rank.engine.drain = drain


@planted
def draining_forgets_who_is_left(rank: Rank) -> None:
    """At its deadline a drain says that all is done."""

    async def drain(timeout_s: float) -> Any:
        await rank.engine.honest.drain(timeout_s)
        return ()

    rank.engine.drain = drain


@planted
def sleep_breaks_promises(rank: Rank) -> None:
    """The memory is let go while a reader was promised it."""
    lent = lends(rank)
    falling: list[asyncio.Task[Any]] = []

    async def suspend(*args: Any) -> Any:
        falling.append(asyncio.ensure_future(rank.engine.honest.suspend(*args)))
        if not any(handle.is_open for handle in lent.values()):
            return await falling[-1]
        await asyncio.sleep(0)
        return ()

    async def resume(*args: Any) -> None:
        await asyncio.gather(*falling)
        await rank.engine.honest.resume(*args)

    rank.engine.suspend, rank.engine.resume = suspend, resume


@planted
def old_references_are_served_after_sleep(rank: Rank) -> None:
    """A rank that wakes up is the one that fell asleep."""
    names, spent, before = list[str](), set[Key](), dict[Key, Key]()

    def renewed(key: Key) -> Key:
        epoch = rank.engine.memory_epoch
        if key.memory_epoch >= epoch or key in spent:
            return key
        new = msgspec.structs.replace(key, memory_epoch=epoch)
        before[new] = key
        return new

    def lend(params: Any, **options: Any) -> Any:
        key = key_of(params)
        handle = rank.engine.honest.lend(params | {"key": msgspec.to_builtins(renewed(key))}, **options)
        if rank.engine.memory_epoch == key.memory_epoch:
            spent.add(key)
        return handle

    def withdraw(params: Any) -> None:
        rank.engine.honest.withdraw(params | {"key": msgspec.to_builtins(renewed(key_of(params)))})
        if rank.engine.memory_epoch == key_of(params).memory_epoch:
            spent.add(key_of(params))

    rank.engine.lend, rank.engine.withdraw = lend, withdraw
    rank.hears(Claim, Renew, Release)(lambda said: said.but(key=renewed(said.message.key)))
    rank.sends(*ANSWERS, Ack)(lambda said: said.but(key=before.get(said.message.key, said.message.key)))

    def named(honest: Callable[[int], str]) -> Callable[[int], str]:
        def token_hex(size: int) -> str:
            token = honest(size)
            names.extend([token] if size == 16 else [])
            return names[0] if size == 16 else token

        return token_hex

    rank.token_hex = named


# -- under pressure ----------------------------------------------------------------------------------------------------


@planted
def a_place_is_never_given_back(rank: Rank) -> None:
    """A pull that fails or is cancelled counts for ever."""
    failed: dict[str, int] = defaultdict(int)

    async def pull(request_id: str, groups: Any, params: Any, **options: Any) -> Any:
        config, engine = rank.engine.config.pull, params["engine_id"]
        if failed[engine] >= config.window_requests:
            await asyncio.sleep(config.timeout_s)
            text = f"request {request_id!r} failed in queue: still queued behind others when the deadline passed"
            raise PullTimeout(text, request_id=request_id, reason=Reason.TIMEOUT)
        try:
            return await rank.engine.honest.pull(request_id, groups, params, **options)
        except (PullError, asyncio.CancelledError):
            failed[engine] += 1
            raise

    rank.engine.pull = pull


@planted
def the_queue_lets_leases_run_out(rank: Rank) -> None:
    """A pull that waits does not claim."""

    @rank.sends(*ASKS)
    def wait(said: Said) -> Said | None:
        waiting = {r.pull_id for r in rank.engine.requests() if r.state == "queued" and r.state_s > 0.05}
        return None if said.message.pull_id in waiting else said


@planted
def whoever_floods_fills_the_memory_for_early_claims(rank: Rank) -> None:
    """Parked messages are not counted by sender."""
    known, ways = set[str](), dict[ReplyTo, Other]()

    @rank.hears(Hello)
    def meet(said: Said) -> Said:
        known.add(said.start)
        return said

    @rank.hears(Claim, Release)
    def come(said: Said) -> Said:
        if said.start in known:
            return said
        # As if each came by a way of its own.
        way = ReplyTo(bytes(said.other) + said.message.pull_id.encode())  # type: ignore[arg-type]
        ways[way] = said.other
        return Said(said.message, way, said.start)

    @rank.sends(Granted, NotYet, Refused, Ack)
    def answer(said: Said) -> Said:
        return Said(said.message, ways.get(said.other, said.other), said.start)  # type: ignore[arg-type]


# -- what is spent -----------------------------------------------------------------------------------------------------


@planted
def claims_below_the_newest_are_refused(rank: Rank) -> None:
    """A request is taken for ended because a later one was lent before it."""
    is_passed_over = passing_over(rank)

    @rank.hears(Claim)
    def refuse(said: Said) -> Said | None:
        message = said.message
        if not is_passed_over(message.key):
            return said
        refused = Refused(message.key, message.pull_id, message.nonce, Reason.UNKNOWN)
        rank.say(Said(refused, said.other, said.start))
        return None


@planted
def early_releases_below_the_newest_are_lost(rank: Rank) -> None:
    """A release that comes before its request is lent is taken for one that comes after its end."""
    is_passed_over = passing_over(rank)

    @rank.hears(Release)
    def lose(said: Said) -> Said | None:
        if not is_passed_over(said.message.key):
            return said
        rank.say(Said(Ack(said.message.key, said.message.pull_id), said.other, said.start))
        return None


@planted
def lending_one_spends_all_before_it(rank: Rank) -> None:
    """Requests have to be lent in the order in which their params were made."""
    is_passed_over = passing_over(rank)
    lend = rank.engine.lend

    def lend_in_order(params: Any, **options: Any) -> Any:
        if is_passed_over(key_of(params)):
            raise LocalProtocolError(f"request {params['request_id']!r} was lent or withdrawn before")
        return lend(params, **options)

    rank.engine.lend = lend_in_order


def lending_again(rank: Rank, may: Callable[[Key, dict[Key, Any], dict[Key, Any]], bool]) -> None:
    """Lend what is spent, if it may."""
    lent, withdrawn = remembers(rank)
    lend, aliases = rank.engine.lend, Aliases(rank)

    def lend_again(params: Any, **options: Any) -> Any:
        key = key_of(params)
        is_spent = key in withdrawn or (key in lent and lent[key].is_over)
        return (aliases.lend if is_spent and may(key, lent, withdrawn) else lend)(params, **options)

    rank.engine.lend = lend_again


@planted
def what_has_ended_may_be_lent_again(rank: Rank) -> None:
    """Lending spends no key."""
    lending_again(rank, lambda key, lent, withdrawn: key in lent)


@planted
def what_was_withdrawn_may_be_lent(rank: Rank) -> None:
    """Withdrawing a request spends no key."""
    lending_again(rank, lambda key, lent, withdrawn: key in withdrawn)


@planted
def endings_are_taken_for_all_that_is_spent(rank: Rank) -> None:
    """A request that has ended long ago may be lent again."""

    def is_long_ago(key: Key, lent: dict[Key, Any], withdrawn: dict[Key, Any]) -> bool:
        others = [k for k, handle in lent.items() if handle.is_over] + list(withdrawn)
        return others[-1] != key

    lending_again(rank, is_long_ago)


@planted
def withdrawing_leaves_early_claims_waiting(rank: Rank) -> None:
    """Readers that wait for a withdrawn request are not told."""
    lent, withdrawn = remembers(rank)
    lend = rank.engine.lend

    def withdraw(params: Any) -> None:
        if key_of(params) in lent:
            rank.engine.honest.withdraw(params)
        else:
            withdrawn[key_of(params)] = params

    def lend_others(params: Any, **options: Any) -> Any:
        if key_of(params) in withdrawn:
            raise LocalProtocolError(f"request {params['request_id']!r} was withdrawn")
        return lend(params, **options)

    rank.engine.withdraw, rank.engine.lend = withdraw, lend_others


@planted
def withdrawing_what_is_lent_does_nothing(rank: Rank) -> None:
    """A request that is lent already is not revoked."""
    lent, _ = remembers(rank)
    honest = rank.engine.withdraw

    def withdraw(params: Any) -> None:
        if key_of(params) not in lent:
            honest(params)

    rank.engine.withdraw = withdraw


@planted
def withdrawing_frees_at_once(rank: Rank) -> None:
    """A request that is lent is taken back although promises run."""
    withdrawal_frees(rank, lends(rank))


@planted
def what_has_ended_long_ago_is_not_lent_yet(rank: Rank) -> None:
    """Only those endings are known that are remembered one by one."""
    lent, withdrawn = remembers(rank)

    @rank.hears(Claim, Release)
    def forget(said: Said) -> Said | None:
        key = said.message.key
        over = [k for k, handle in lent.items() if handle.is_over] + list(withdrawn)
        if key not in over or key == over[-1]:
            return said
        wait(rank, said)
        return None


def wait(rank: Rank, said: Said) -> None:
    """Tell readers that claim that the request is not lent yet, and take what they release for that time."""
    message = said.message
    is_claim = isinstance(message, Claim)
    answer = NotYet(message.key, message.pull_id, message.nonce) if is_claim else Ack(message.key, message.pull_id)
    rank.say(Said(answer, said.other, said.start))


@planted
def gaps_are_closed_by_forgetting_what_was_lent(rank: Rank) -> None:
    """Where memory runs out, it is what was spent that is forgotten, not what is open."""

    def is_forgotten(key: Key, lent: dict[Key, Any], withdrawn: dict[Key, Any]) -> bool:
        """Of each scheduler two runs of spent numbers are remembered: the first ones, and the newest."""
        numbers = {k.sequence for k in (*lent, *withdrawn) if k.epoch == key.epoch}
        first = next(n for n in range(len(numbers) + 1) if n not in numbers)
        begin = next(n for n in range(max(numbers, default=-1), -2, -1) if n not in numbers)
        return first <= key.sequence <= begin

    lending_again(rank, is_forgotten)


@inside()
def gaps_are_kept_without_end(patch: pytest.MonkeyPatch) -> None:
    """Requests that are never lent take memory for ever."""
    honest = SpentKeys.__init__
    patch.setattr(SpentKeys, "__init__", lambda self, *args: honest(self, 1 << 60))


@planted
def withdrawing_tells_one_reader(rank: Rank) -> None:
    """Of several that wait for a request that is withdrawn, the first is told."""
    asked: dict[Key, set[int]] = defaultdict(set)
    waiting: dict[Key, set[int]] = {}
    honest_withdraw = rank.engine

    @rank.hears(Claim)
    def ask(said: Said) -> Said:
        if said.message.key not in waiting:
            asked[said.message.key].add(said.message.nonce)
        return said

    def withdraw(params: Any) -> None:
        waiting.setdefault(key_of(params), asked[key_of(params)])
        honest_withdraw.honest.withdraw(params)

    rank.engine.withdraw = withdraw
    told: dict[Key, str] = {}

    @rank.sends(Refused)
    def tell(said: Said) -> Said | None:
        message = said.message
        if message.nonce not in waiting.get(message.key, ()):
            return said
        return said if told.setdefault(message.key, message.pull_id) == message.pull_id else None


@planted
def early_claims_are_called_withdrawn(rank: Rank) -> None:
    """A request that is not lent is taken for one that never will be."""

    @rank.sends(NotYet)
    def refuse(said: Said) -> Said:
        message = said.message
        return Said(Refused(message.key, message.pull_id, message.nonce, Reason.WITHDRAWN), said.other, said.start)
