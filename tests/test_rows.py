"""Every row of every table of the decode side and of the engine's life, and that each one matters.

The lease's are in `tests/test_lease.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import pytest

from asynckv.config import PullConfig
from asynckv.core import attempts, lease, lifecycle, peer, pull
from asynckv.core.attempts import Request, RequestState
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.flow import InFlight, PeerLine
from asynckv.core.lease import LeaseState
from asynckv.core.lifecycle import Lifecycle, LifeEvent, LifeState
from asynckv.core.peer import Peer, PeerEvent, PeerState
from asynckv.core.pull import Effect, Pull, PullEvent, PullRequest, PullState
from asynckv.core.routes import Route
from asynckv.core.source import RemoteRank, Role, Source
from asynckv.core.types import Address, Cohort, Endpoint, Key, KVTransferParams, PullId, Reason, RequestId, TransferId
from asynckv.core.wire import Granted, NotYet, Refused
from asynckv.errors import LocalProtocolError
from asynckv.geometry.blocks import check_block_ids
from asynckv.geometry.bounds import BlockRuns
from asynckv.geometry.match import assign
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.plan import plan_read
from asynckv.geometry.tables import PeerTables
from tests.rows import unnoticed
from tests.world import make_layout, opened

S = PullState
PLACE = (Address("tcp://127.0.0.1:1"), "i" * 32)
RANK = RemoteRank(0, 0, PLACE, "p/tp0", True)
LIMITS = PullConfig(drain_s=1.0, release_timeout_s=3.0, held_s=30.0)
PARAMS = KVTransferParams(
    engine_id="p",
    request_id="r",
    key=Key("epoch", 0, 7, "0" * 32),
    endpoints=(Endpoint(0, PLACE[0], PLACE[1]),),
    groups=(BlockRuns(0, ((1, 1),)),),
    num_tokens=4,
)
LAYOUT = make_layout()
TABLES = PeerTables(LAYOUT, LAYOUT, assign(LAYOUT, [LAYOUT])[0], itertools.count(1))


def lists_of(*blocks: int) -> BlockLists:
    return BlockLists(check_block_ids(LAYOUT, [(0, list(blocks))], 4), PARAMS.groups, 4)


class Attempt:
    """One pull of one block from one rank, taken as far as a test wants it."""

    def __init__(self, max_bytes: int = 1 << 30, others: int = 0) -> None:
        self.source = Source(PullId("x-1"), RANK, Role.READ)
        self.others = [Source(PullId("x-1"), RANK, Role.RELEASE_ONLY) for _ in range(others)]
        self.pull = Pull(
            PullId("x-1"),
            RequestId("d"),
            PARAMS,
            Cohort("decode"),
            bytes(16),
            [self.source, *self.others],
            Route((RANK,), (PLACE,), {PLACE: 0}),
            dataclasses.replace(LIMITS, max_post_bytes=max_bytes),
            called_at=0.0,
            deadline=100.0,
            history=[(0.0, S.ANNOUNCED)],
        )
        self.now = 0.0

    def later(self) -> float:
        self.now += 1e-3
        return self.now

    def to(self, state: PullState) -> Attempt:
        """Take the usual way, to a state before the outcome."""
        if state is S.ANNOUNCED:
            return self
        self.pull.start(lists_of(2), 100.0, self.later())
        if state is S.CONNECTING:
            return self
        self.pull.routed([TABLES, *[None] * len(self.others)], self.later())
        list(self.pull.make_messages(itertools.count(1), self.later()))
        if state is S.QUEUED:
            return self
        plan = plan_read(TABLES, self.pull.lists or lists_of(2))
        self.pull.admitted([(self.source, plan)], self.later())
        self.pull.posted(self.source, TransferId(1), self.later())
        if state is S.CONFIRMING:
            self.end(Ending.DONE)
        return self

    def end(self, ending: Ending, transfer: int = 1) -> list[Effect]:
        ended = TransferEnded(TransferId(transfer), ending, "why")
        return self.pull.ended(self.source, ended, 64, 0.0, self.later())

    @property
    def states(self) -> list[PullState]:
        return [text for _, text in self.pull.history if isinstance(text, PullState)]

    def grant(self, lent_for_s: float = 50.0) -> list[Effect] | None:
        nonce = next(reversed(self.source.nonces))
        return self.pull.answered(self.source, Granted(PARAMS.key, "x-1", nonce, 10.0, lent_for_s), self.later())

    def not_yet(self) -> list[Effect] | None:
        nonce = next(reversed(self.source.nonces))
        return self.pull.answered(self.source, NotYet(PARAMS.key, "x-1", nonce), self.later())

    def refuse(self) -> None:
        self.pull.met(self.source, self.later())
        list(self.pull.make_messages(itertools.count(1), self.later()))
        nonce = next(reversed(self.source.nonces))
        self.pull.answered(self.source, Refused(PARAMS.key, "x-1", nonce, Reason.REVOKED), self.later())

    def draining(self) -> Attempt:
        self.to(S.READING).pull.fail(Reason.CANCELLED, "cancelled", self.later())
        return self

    def notifying(self, doubt: bool = False) -> Attempt:
        self.to(S.READING).end(Ending.IN_DOUBT if doubt else Ending.FAILED)
        return self

    def quarantined(self) -> Attempt:
        self.notifying(doubt=True).pull.settled(self.source, "acknowledged", self.later())
        return self

    def settle(self) -> None:
        self.pull.settled(self.source, "acknowledged", self.later())

    def fail(self) -> None:
        self.pull.fail(Reason.PEER_LOST, "gone", self.later())

    def expire(self) -> None:
        self.now = max(self.now, self.pull.deadline)
        self.pull.tick(self.later())


def check_pull() -> None:
    """Take every row of a pull's tables once, and see where it leads and what comes of it."""
    for state in (S.ANNOUNCED, S.CONNECTING, S.QUEUED, S.READING, S.CONFIRMING):
        for failing, reason in (
            (Attempt.fail, Reason.PEER_LOST),
            (Attempt.refuse, Reason.REVOKED),
            (lambda x: x.pull.fail(Reason.CANCELLED, "cancelled", x.later()), Reason.CANCELLED),
            (Attempt.expire, Reason.TIMEOUT),
        ):
            it = Attempt().to(state)
            assert it.pull.state is state
            failing(it)
            # What runs when the time is up is not waited for.
            drains = state is S.READING and reason is not Reason.TIMEOUT
            assert it.pull.state is (S.DRAINING if drains else S.NOTIFYING)
            assert it.pull.failure is not None
            assert it.pull.failure[0] is reason
            assert drains or S.DRAINING in [text for _, text in it.pull.history]
    # The usual way.
    it = Attempt()
    assert it.pull.start(lists_of(2), 100.0, it.later()) == []
    assert it.pull.routed([TABLES], it.later()) == [Effect.SEND, Effect.QUEUE]
    list(it.pull.make_messages(itertools.count(1), it.later()))
    assert it.pull.admitted([(it.source, plan_read(TABLES, lists_of(2)))], it.later()) == [Effect.POST]
    it.pull.posted(it.source, TransferId(1), it.later())
    assert it.end(Ending.DONE) == [Effect.LEAVE]
    assert it.grant() == [Effect.RETURN, Effect.TELL, Effect.SEND], "it left when all had landed"
    assert (it.pull.state, it.pull.reason) == (S.NOTIFYING, Reason.COMPLETE)
    it.settle()
    assert it.states == [S.ANNOUNCED, S.CONNECTING, S.QUEUED, S.READING, S.CONFIRMING, S.NOTIFYING, S.RELEASED]
    # A full prefix hit reads nothing.
    it = Attempt()
    it.pull.start(lists_of(), 100.0, it.later())
    assert (it.states, it.pull.reason) == ([S.ANNOUNCED, S.CONNECTING, S.NOTIFYING], Reason.COMPLETE)
    # Answers before the outcome; what is not lent yet goes back to the queue once nothing runs.
    for state in (S.ANNOUNCED, S.CONNECTING, S.QUEUED, S.READING):
        it = Attempt().to(state)
        it.pull.met(it.source, it.later())
        list(it.pull.make_messages(itertools.count(1), it.later()))
        assert it.grant() is not None
        assert it.pull.state is state
    it = Attempt().to(S.CONFIRMING)
    it.not_yet()
    assert it.pull.state is S.CONFIRMING
    it = Attempt().to(S.QUEUED)
    it.not_yet()
    it.pull.admitted([(it.source, plan_read(TABLES, lists_of(2)))], it.later())
    assert it.pull.state is S.QUEUED
    it = Attempt().to(S.READING)
    it.not_yet()
    assert it.pull.state is S.READING
    # Read before it was lent, as far as can be shown: again.
    it = Attempt().to(S.CONFIRMING)
    assert it.grant(lent_for_s=0.0) == [Effect.QUEUE]
    assert (it.pull.state, it.pull.measures.rereads) == (S.QUEUED, 1)
    # Draining takes what comes, and ends when nothing runs.
    for late in (
        Attempt.fail,
        lambda x: x.pull.fail(Reason.CANCELLED, "cancelled", x.later()),
        Attempt.grant,
        Attempt.refuse,
    ):
        it = Attempt().draining()
        late(it)
        assert (it.pull.state, it.pull.reason) == (S.DRAINING, None)
    it = Attempt().draining()
    it.end(Ending.DONE)
    assert (it.pull.state, it.pull.reason) == (S.NOTIFYING, Reason.CANCELLED)
    # One transfer of two is not all, whether it is read or drained.
    for drains in (False, True):
        it = Attempt(max_bytes=64).to(S.READING)
        it.pull.posted(it.source, TransferId(2), it.later())
        if drains:
            it.pull.fail(Reason.CANCELLED, "cancelled", it.later())
        it.end(Ending.DONE)
        assert it.pull.state is (S.DRAINING if drains else S.READING)
        it.end(Ending.DONE, 2)
        assert it.pull.state is (S.NOTIFYING if drains else S.CONFIRMING if it.source.has_landed else S.READING)
        it = Attempt(max_bytes=64).to(S.READING)
        it.pull.posted(it.source, TransferId(2), it.later())
        if drains:
            it.pull.fail(Reason.CANCELLED, "cancelled", it.later())
        it.end(Ending.FAILED)
        assert (it.pull.state, it.pull.reason) == (S.DRAINING, None)
        it.end(Ending.DONE, 2)
        assert (it.pull.state, it.pull.reason) == (S.NOTIFYING, Reason.CANCELLED if drains else Reason.READ_FAILED)
    # One rank of two that is told is not everybody.
    it = Attempt(others=1).notifying()
    it.settle()
    assert it.states[-1] is S.NOTIFYING
    it.pull.settled(it.others[0], "acknowledged", it.later())
    assert it.states[-2:] == [S.NOTIFYING, S.RELEASED]
    # After the outcome.
    it = Attempt().notifying(doubt=True)
    assert it.grant() is None
    assert (it.pull.state, it.pull.is_returned) == (S.NOTIFYING, False)
    assert it.end(Ending.IN_DOUBT) == []
    assert it.end(Ending.DONE) == [Effect.RETURN]
    assert it.states[-1] is S.NOTIFYING
    it = Attempt().quarantined()
    assert it.pull.state is S.QUARANTINED
    assert it.grant() is None
    before = it.states
    it.settle()
    it.end(Ending.IN_DOUBT)
    assert it.states == before
    assert it.end(Ending.FAILED) == [Effect.RETURN, Effect.FINISH]
    assert it.states[-1:] == [S.RELEASED]
    it = Attempt(max_bytes=64).to(S.READING)
    it.pull.posted(it.source, TransferId(2), it.later())
    it.end(Ending.IN_DOUBT)
    it.end(Ending.IN_DOUBT, 2)
    it.settle()
    assert it.end(Ending.DONE) == []
    assert it.end(Ending.DONE, 2) == [Effect.RETURN, Effect.FINISH]
    it = Attempt().notifying()
    it.settle()
    assert it.states[-2:] == [S.NOTIFYING, S.RELEASED]


@pytest.mark.parametrize("table", [pull.ON_EVENT, pull.WHEN], ids=["on_event", "when"])
def test_no_row_of_a_pull_can_be_made_wrong_unnoticed(table: Any) -> None:
    assert unnoticed(table, check_pull) == []


# -- peers -----------------------------------------------------------------------------------------------

CONFIG = PullConfig()


def peer_at(state: PeerState) -> Peer:
    it = Peer("p", 0, 0, *PLACE, PeerLine(InFlight()))
    steps: list[Callable[[], object]] = [
        lambda: it.greet(1, CONFIG, 0.0),
        lambda: it.welcomed("agent", LAYOUT, 7, None, CONFIG, 0.0),
        lambda: it.loaded(0.0),
        lambda: it.receive(peer.PeerEvent.SILENT),
    ]
    for step, there in zip(steps, list(PeerState)[1:], strict=False):
        if it.state is state:
            break
        step()
        assert it.state is there
        assert it.line.is_open is (there is PeerState.READY)
    if state is PeerState.GONE:
        it.lost(Reason.PEER_LOST, "gone", 1.0, 0.0)
    return it


def check_peer() -> None:
    """Take every row of a peer's table once."""
    living = [s for s in PeerState if s is not PeerState.GONE]
    for state in living:
        it = peer_at(state)
        it.lost(Reason.PEER_LOST, "gone", 1.0, 0.0)
        assert it.state is PeerState.GONE
    for state in (PeerState.CONNECTING, PeerState.LOADING):
        it = peer_at(state)
        it.failed(Reason.UNREACHABLE, "no answer", CONFIG, 0.0)
        assert (it.state, it.not_before) == (PeerState.NEW, CONFIG.backoff_s)
    it = peer_at(PeerState.SUSPECT)
    assert it.heard(1.0)
    assert it.state is PeerState.READY
    it = peer_at(PeerState.GONE)
    for event in peer.PeerEvent:
        with pytest.raises(LocalProtocolError):
            it.receive(event)


def test_no_row_of_a_peer_can_be_made_wrong_unnoticed() -> None:
    assert unnoticed(peer.ON_EVENT, check_peer) == []


# -- attempts --------------------------------------------------------------------------------------------


def request(*, is_last: bool = True) -> Request:
    wanted = PullRequest("d", [(0, [2])], PARAMS, is_last=is_last)
    it = Request(wanted, 2, 0.1, 50.0, 0.0)
    attempt = Attempt()
    attempt.pull.is_last, attempt.pull.retryable = is_last, it.retryable
    it.pull = attempt.to(S.READING).pull
    return it


def failed(it: Request, doubt: bool = False) -> Request:
    """Its attempt fails in a way that another may get over."""
    attempt = Attempt()
    attempt.pull.is_last, attempt.pull.retryable = it.wanted.is_last, it.retryable
    attempt.notifying(doubt)
    it.pull = attempt.pull
    it.ended(1.0)
    return it


def time_is_over(it: Request) -> None:
    it.time(2.0)


def refused(it: Request) -> None:
    it.refused(LocalProtocolError("a block is in use"))


def check_attempts() -> None:
    """Take every row of a request's tables once."""
    it, attempt = request(), Attempt().to(S.CONFIRMING)
    attempt.grant()
    it.pull = attempt.pull
    it.ended(1.0)
    assert (it.state, it.discharge) == (RequestState.OVER, None)
    it, attempt = request(), Attempt().draining()
    attempt.end(Ending.DONE)
    it.pull = attempt.pull
    it.ended(1.0)
    assert it.state is RequestState.OVER
    it = request()
    refused(it)
    assert it.state is RequestState.OVER
    # The next attempt follows the pause.
    it = failed(request())
    assert (it.state, it.next_at, it.attempts) == (RequestState.PAUSING, 1.1, 1)
    it.time(2.0)
    assert (it.state, it.attempts, it.discharge) == (RequestState.TRYING, 2, None)
    # Given up: who was told that another attempt follows hears that none does.
    it = failed(request(), doubt=True)
    it.time(2.0)
    assert (it.state, it.discharge) == (RequestState.PAUSING, None)
    it.time(50.0)
    assert (it.state, it.discharge) == (RequestState.OVER, Reason.READ_FAILED)
    for step in (time_is_over, refused):
        with pytest.raises(LocalProtocolError):
            step(it)
    # A head start: its first attempt follows when its params are known.
    for stopped in (False, True):
        it = Request(PullRequest("d", [(0, [2])], PARAMS), 0, 0.1, math.inf, 0.0, RequestState.EARLY, 0, is_known=False)
        with pytest.raises(LocalProtocolError):
            it.time(1.0)
        if stopped:
            it.stop(Reason.CANCELLED)
            assert (it.state, it.discharge) == (RequestState.OVER, None)
            continue
        it.known(it.wanted, 1, 50.0, 1.0)
        assert (it.state, it.attempts) == (RequestState.PAUSING, 0)
        it.time(1.0)
        assert (it.state, it.attempts) == (RequestState.TRYING, 1)


def test_no_row_of_the_attempts_can_be_made_wrong_unnoticed() -> None:
    assert unnoticed(attempts.ON_EVENT, check_attempts) == []


def test_a_request_stopped_while_blocks_come_back_is_not_tried_again() -> None:
    for reason in (Reason.CANCELLED, Reason.ENGINE_CLOSED):
        it = failed(request(), doubt=True)
        it.stop(reason)
        it.time(2.0)
        assert (it.state, it.attempts) == (RequestState.OVER, 1)
        assert it.discharge is reason


def test_no_attempt_follows_after_the_deadline_or_a_refusal_that_stays() -> None:
    it = request()
    it.deadline = 1.05
    assert failed(it).state is RequestState.OVER
    attempt = Attempt().to(S.READING)
    nonce = next(iter(attempt.source.nonces))
    attempt.pull.answered(attempt.source, Refused(PARAMS.key, "x-1", nonce, Reason.EXPIRED), attempt.later())
    attempt.end(Ending.DONE)
    it = request()
    it.pull = attempt.pull
    it.ended(1.0)
    assert it.state is RequestState.OVER, "the same params cannot get over what has expired"


# -- the engine's life -----------------------------------------------------------------------------------

L, X = LifeState, LifeEvent
LIVES: Mapping[tuple[LifeEvent, ...], LifeState] = {
    (): L.NEW,
    (X.STARTED,): L.RUNNING,
    (X.SHUT,): L.SHUT,
    (X.SHUT, X.DESTROYED): L.CLOSED,
    (X.STARTED, X.DRAIN): L.DRAINING,
    (X.STARTED, X.DRAIN, X.DRAIN): L.DRAINING,
    (X.STARTED, X.SUSPEND): L.SUSPENDING,
    (X.STARTED, X.CLOSE): L.CLOSING,
    (X.STARTED, X.DRAIN, X.SUSPEND): L.SUSPENDING,
    (X.STARTED, X.DRAIN, X.CLOSE): L.CLOSING,
    (X.STARTED, X.SUSPEND, X.DRAIN): L.SUSPENDING,
    (X.STARTED, X.SUSPEND, X.SUSPEND): L.SUSPENDING,
    (X.STARTED, X.SUSPEND, X.CLOSE): L.CLOSING,
    (X.STARTED, X.SUSPEND, X.LET_GO): L.SUSPENDED,
    (X.STARTED, X.SUSPEND, X.LET_GO, X.DRAIN): L.SUSPENDED,
    (X.STARTED, X.SUSPEND, X.LET_GO, X.RESUMED): L.RUNNING,
    (X.STARTED, X.SUSPEND, X.LET_GO, X.SHUT): L.SHUT,
    (X.STARTED, X.CLOSE, X.DRAIN): L.CLOSING,
    (X.STARTED, X.CLOSE, X.CLOSE): L.CLOSING,
    (X.STARTED, X.CLOSE, X.SHUT, X.SHUT): L.SHUT,
    (X.DRAIN,): L.NEW,
    (X.STARTED, X.CLOSE, X.SHUT): L.SHUT,
    (X.STARTED, X.CLOSE, X.SHUT, X.DRAIN): L.SHUT,
    (X.STARTED, X.CLOSE, X.SHUT, X.STUCK): L.STUCK,
    (X.STARTED, X.CLOSE, X.SHUT, X.STUCK, X.DRAIN): L.STUCK,
    (X.STARTED, X.CLOSE, X.SHUT, X.STUCK, X.SHUT): L.SHUT,
    (X.STARTED, X.CLOSE, X.SHUT, X.DESTROYED): L.CLOSED,
    (X.STARTED, X.CLOSE, X.SHUT, X.DESTROYED, X.DRAIN): L.CLOSED,
}
"""What happens to engines, and where that leaves them; nothing else may happen at any of these points."""


def check_life() -> None:
    """Live every life, and see that nothing else can happen on the way."""
    for events, state in LIVES.items():
        it = Lifecycle()
        for event in events:
            it.receive(event)
        assert it.state is state
        assert it.is_shut is (state in (L.SHUT, L.STUCK, L.CLOSED))
        possible = {e for more in LIVES for e in more[len(events) : len(events) + 1] if more[: len(events)] == events}
        if any(len(more) > len(events) and more[: len(events)] == events for more in LIVES):
            known = {e for path, there in LIVES.items() if there is state for e in _following(path)}
            assert possible <= known


def _following(path: tuple[LifeEvent, ...]) -> set[LifeEvent]:
    return {more[len(path)] for more in LIVES if len(more) > len(path) and more[: len(path)] == path}


def test_no_row_of_the_engines_life_can_be_made_wrong_unnoticed() -> None:
    assert unnoticed(lifecycle.ON_EVENT, check_life) == []


@pytest.mark.parametrize("event", LifeEvent)
@pytest.mark.parametrize("state", LifeState)
def test_what_cannot_happen_to_an_engine_changes_nothing(state: LifeState, event: LifeEvent) -> None:
    it = Lifecycle()
    it.state = state
    if event not in lifecycle.ON_EVENT[state]:
        with pytest.raises(LocalProtocolError, match=event.name):
            it.receive(event)
        assert it.state is state


def test_conditions_that_lead_in_a_circle_are_seen_and_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {S.READING: {pull.LANDED: S.CONFIRMING}, S.CONFIRMING: {pull.LANDED: S.READING}}
    monkeypatch.setattr(pull, "WHEN", dict(pull.WHEN) | rows)
    with pytest.raises(AssertionError, match="have a cycle through"):
        Attempt().to(S.CONFIRMING)


# -- The tables themselves --------------------------------------------------------------------------------------------

MACHINES: dict[str, tuple[Any, Enum, Mapping[Any, Mapping[Any, Any]], Mapping[Any, Mapping[Any, Any]]]] = {
    "pull": (PullState, PullState.ANNOUNCED, pull.ON_EVENT, pull.WHEN),
    "lease": (LeaseState, LeaseState.LENT, lease.ON_EVENT, lease.WHEN),
    "peer": (PeerState, PeerState.NEW, peer.ON_EVENT, {}),
}


@pytest.mark.parametrize("name", MACHINES)
def test_every_state_has_a_row_and_is_reachable(name: str) -> None:
    states, start, on_event, when = MACHINES[name]
    assert set(on_event) == set(states)
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for after in [*on_event[state].values(), *when.get(state, {}).values()]:
            if after not in seen:
                seen.add(after)
                todo.append(after)
    assert seen == set(states)


@pytest.mark.parametrize("state", PeerState)
@pytest.mark.parametrize("event", PeerEvent)
def test_an_impossible_peer_event_changes_nothing(state: PeerState, event: PeerEvent) -> None:
    it = Peer("engine", 0, 0, Address("tcp://127.0.0.1:1"), "incarnation", PeerLine(InFlight()), state)
    if event in peer.ON_EVENT[state]:
        it.receive(event)
        assert it.state is peer.ON_EVENT[state][event]
    else:
        with pytest.raises(LocalProtocolError, match=event.name):
            it.receive(event)
        assert it.state is state


def test_an_impossible_pull_event_changes_nothing() -> None:
    world, prefill, decode = opened()
    params = world.params([prefill], "req", [1], 4)
    it = world.pull(decode, "d-req", [1], params)
    before = (it.state, list(it.history))
    assert PullEvent.STARTED not in pull.ON_EVENT[it.state]
    with pytest.raises(LocalProtocolError, match="STARTED"):
        it.start(BlockLists(((0, np.array([2])),), params.groups, 4), 10.0, 0.0)
    assert (it.state, it.history) == before
