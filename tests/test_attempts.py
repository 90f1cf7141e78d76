"""The core owns a request over its attempts: it begins them, ends them, and says when their blocks are free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asynckv.config import EngineConfig, LeaseConfig, PullConfig
from asynckv.core.attempts import Request, RequestState
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.pull import Pull, PullRequest
from asynckv.core.types import Reason
from asynckv.errors import EngineClosed, LocalProtocolError
from tests.world import Rank, World, make_layout

CONFIG = EngineConfig(engine_id="x", lease=LeaseConfig(lease_s=60.0), pull=PullConfig(retry_s=0.1, held_s=5.0))
Act = Callable[["One"], object]


class One:
    """A request with retries, whose first attempt reads."""

    def __init__(self, retries: int = 3, timeout_s: float = 20.0, is_last: bool = True) -> None:
        self.world = World(CONFIG)
        self.prefill = self.world.add("p", make_layout(), engine_id="prefill", seed=1)
        self.decode: Rank = self.world.add("d", make_layout(base=1 << 41), engine_id="decode", seed=2)
        self.core = self.decode.core
        params, self.lease = self.world.lent(self.prefill, "r", [3], written=True)
        self.wanted = PullRequest("d", [(0, [9])], params, is_last=is_last)
        self.request: Request = self.core.pull(self.wanted, retries, timeout_s, 0.0)
        self.world.settle(self.decode)
        self.world.deliver_all()

    @property
    def state(self) -> RequestState:
        return self.request.state

    def fail(self, ending: Ending = Ending.FAILED) -> Any:
        """Let the attempt's transfer fail."""
        [transfer] = self.decode.reads
        self.world.tell(self.decode, TransferEnded(transfer, ending, "because"))
        return transfer

    def do(self, act: Callable[..., object], *args: object) -> None:
        act(*args, self.world.time(self.decode))
        self.world.settle(self.decode)

    def outcomes(self) -> list[str]:
        """Return the prefill rank's view of its readers, once everything is said."""
        self.world.run(0.2)
        return [str(reader.outcome) for reader in self.lease.discharged.values()]

    def is_told_once(self) -> bool:
        return self.decode.requests_ended == [self.request] and self.core.requests == []


def test_timers_begin_the_next_attempt_after_the_pause_in_the_time_that_is_left() -> None:
    one = One(timeout_s=3.0)
    one.world.advance(1.0)
    one.fail()
    assert (one.state, one.request.next_at, one.core.is_bound, one.core.is_idle) == (
        RequestState.PAUSING,
        1.1,
        True,
        False,
    )
    assert [hold.reason for hold in one.decode.inspect.holds(1.0)] == ["retrying"]
    one.world.advance(0.05)
    assert one.state is RequestState.PAUSING
    one.world.advance(0.1)
    assert one.request.pull is not None
    assert (one.state, one.request.attempts, one.request.pull.deadline) == (RequestState.TRYING, 2, 3.0)
    assert not one.decode.requests_ended
    assert one.outcomes() == ["complete"]
    assert one.is_told_once()


def test_a_deadline_that_passes_while_blocks_are_held_ends_the_request_and_then_returns_them() -> None:
    one = One(timeout_s=3.0)
    transfer = one.fail(Ending.IN_DOUBT)
    one.world.advance(2.9)
    assert one.state is RequestState.PAUSING
    one.world.advance(0.2)
    assert one.is_told_once()
    assert not one.decode.requests_returned
    one.world.tell(one.decode, TransferEnded(transfer, Ending.FAILED, "its agent is gone"))
    assert one.decode.requests_returned == [one.request]
    assert one.outcomes() == ["failed"]


def test_blocks_that_are_given_up_end_the_request_which_is_told_both() -> None:
    one = One(timeout_s=50.0)
    transfer = one.fail(Ending.IN_DOUBT)
    one.world.advance(4.9)
    assert one.state is RequestState.PAUSING
    one.world.advance(0.3)
    assert one.is_told_once()
    assert one.decode.requests_returned == [one.request]
    assert one.request.pull is not None
    assert one.request.pull.is_retired
    one.world.tell(one.decode, TransferEnded(transfer, Ending.FAILED, "late"))
    assert one.decode.requests_returned == [one.request], "they stay given up"


def test_blocks_are_given_up_after_the_end_of_their_request_too() -> None:
    one = One(retries=0)
    one.fail(Ending.IN_DOUBT)
    assert one.is_told_once()
    assert not one.decode.requests_returned
    one.world.advance(5.1)
    assert one.decode.requests_returned == [one.request]
    one.world.advance(300.0)  # its pull is woken, to warn that it is held for long
    assert one.decode.requests_returned == [one.request]
    assert one.core.outbox.counters["blocks.retired"] == 1


STOPS: dict[str, tuple[Act, list[str], list[str]]] = {
    "cancelled": (lambda one: one.do(one.core.cancel, "d"), ["cancelled"], ["cancelled"]),
    "abandoned": (lambda one: one.do(one.core.abandon, one.request), ["cancelled"], []),
    "closed": (lambda one: one.do(one.core.close), ["failed"], []),
}
"""What ends a request, and what the prefill rank hears of a request that is its caller's last and of another."""


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("is_last", [True, False])
def test_a_request_that_is_stopped_between_two_attempts_is_over_at_once(stop: str, is_last: bool) -> None:
    one = One(is_last=is_last)
    one.fail()
    act, *heard = STOPS[stop]
    act(one)
    assert one.is_told_once()
    assert one.core.is_pulled("d") is False
    assert one.outcomes() == heard[not is_last]
    assert one.lease.is_over == bool(heard[not is_last])
    one.world.advance(5.0)
    assert one.request.attempts == 1


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("is_last", [True, False])
def test_an_attempt_that_fails_first_and_drains_is_not_followed_once_its_request_is_stopped(
    stop: str, is_last: bool
) -> None:
    """Its ranks hear that another attempt follows, because of the failure, and then that none does."""
    one = One(is_last=is_last)
    one.core.decode.fail(one.request.pull, Reason.READ_FAILED, "because", 0.0)  # type: ignore[arg-type]
    one.world.settle(one.decode)
    act, *heard = STOPS[stop]
    act(one)
    assert one.core.requests == [one.request]
    one.fail()
    assert one.state is RequestState.OVER
    assert one.outcomes() == heard[not is_last]
    assert one.is_told_once()


@pytest.mark.parametrize("stop", STOPS)
def test_a_request_that_is_stopped_after_its_end_stays_as_it_is(stop: str) -> None:
    one = One(retries=0)
    one.fail()
    STOPS[stop][0](one)
    assert one.is_told_once()
    assert one.outcomes() == ["failed"]


def test_an_id_is_taken_until_its_request_is_over() -> None:
    one = One()
    one.fail()
    now = one.world.time(one.decode)
    with pytest.raises(LocalProtocolError, match="is being pulled already"):
        one.core.pull(one.wanted, 0, 5.0, now)
    with pytest.raises(LocalProtocolError, match="is being pulled already"):
        one.core.announce("d", one.wanted.params, "", 5.0, now)
    assert one.core.is_pulled("d")
    one.do(one.core.cancel, "d")
    assert one.core.cancel("d", now) is False
    one.core.announce("d", one.wanted.params, "", 5.0, now)


def test_an_attempt_that_cannot_begin_ends_its_request_with_the_reason() -> None:
    one = One()
    one.fail()
    one.core.ledger.hold("other", "writing", "other", {0: np.array([9], np.int64)}, 0.0)
    one.world.advance(0.2)
    assert isinstance(one.request.refusal, LocalProtocolError)
    assert one.is_told_once()
    assert one.outcomes() == ["failed"]


@pytest.mark.parametrize("where", ["_make_pull", "start"])
def test_a_bug_that_the_next_attempt_meets_ends_its_request_and_is_raised(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = One()
    one.fail()
    monkeypatch.setattr(one.core.decode if where == "start" else one.core, where, lambda *args, **more: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        one.core.tick(0.2)
    monkeypatch.undo()
    one.world.advance(3.0)
    assert isinstance(one.request.refusal, ZeroDivisionError)
    assert one.is_told_once()
    assert one.request.discharge is Reason.UNPLANNABLE, "its ranks expect another attempt"


def test_the_end_of_the_agent_ends_what_is_left() -> None:
    """No request is left then, but for a bug; its caller would wait for ever."""
    for acts in ([], ["fail"], ["doubt"]):
        one = One()
        if acts:
            one.fail(Ending.FAILED if acts == ["fail"] else Ending.IN_DOUBT)
        one.decode.reads.clear()
        one.do(one.core.destroyed)
        assert one.is_told_once()
        assert isinstance(one.request.refusal, EngineClosed) is False
        assert one.request.attempts == 1
    one = One(retries=0)
    one.core.decode.transfers.clear()
    one.do(one.core.destroyed)
    assert isinstance(one.request.refusal, EngineClosed)
    assert one.is_told_once()


def test_a_bug_after_the_first_attempt_failed_leaves_no_request_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    one = One()
    one.do(one.core.cancel, "d")
    one.do(one.core.decode.forget, one.prefill.address)  # its next pull fails for now, within `pull` itself
    one.outcomes()
    params, _ = one.world.lent(one.prefill, "r2", [4], written=True)
    monkeypatch.setattr(Pull, "make_release", lambda *args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        one.core.pull(PullRequest("d2", [(0, [8])], params), 1, 20.0, one.world.time(one.decode))
    monkeypatch.undo()
    assert one.core.requests == []
    one.do(one.core.tick)
    one.core.close(one.world.time(one.decode))
