"""Memory that others can fill is bounded, and a bug that one lease meets ends no deadline."""

from __future__ import annotations

import math

import pytest

from asynckv.core import readers
from asynckv.core.lease import Lease
from asynckv.core.timers import Timers
from asynckv.core.types import Address, Cohort, Reason, ReplyTo
from asynckv.core.wire import (
    MAJOR,
    MINOR,
    Draining,
    Goodbye,
    Hello,
    Message,
    Unwelcome,
    Welcome,
    decode_packet,
    encode_packet,
)
from tests.world import Rank, World, make_layout


class Woken:
    """Something that wants to be woken."""

    scheduled_at = math.inf


def test_what_is_never_to_be_woken_is_not_kept_until_its_time() -> None:
    timers, kept = Timers(), Woken()
    timers.wake(kept, 1e6)
    for number in range(1000):
        item = Woken()
        timers.wake(item, 2e6 + number)
        timers.forget(item)
    assert len(timers._heap) < 150
    assert timers.next_at == 1e6
    assert timers.pop(1e6) is kept


# -- readers -----------------------------------------------------------------------------------------------


def greeted(rank: Rank, number: int, minor: int = MINOR) -> list[Message]:
    """Let a reader shake hands, and return what it is answered."""
    hello = Hello(number, MAJOR, minor, "prefill", 0, Cohort(f"decode-{number}"))
    route = ReplyTo(b"%d" % number)
    rank.core.readers.greet(hello, route, f"start-{number}", "", rank.core.prefill.closed_as, False)
    return heard(rank)


def heard(rank: Rank) -> list[Message]:
    return [m for _, data in rank.core.outbox.take_packets() for m in decode_packet(data).messages]


def prefill_rank() -> Rank:
    return World().add("p", make_layout(), engine_id="prefill")


def test_of_those_who_shook_hands_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_READERS", 3)
    rank = prefill_rank()
    for number in (1, 2, 3, 1, 4, 5):
        assert len(greeted(rank, number)) == 1
    side = rank.core.readers
    assert [source for source, _ in side.minor_versions] == ["start-1", "start-4", "start-5"]
    assert len(side._met) == 3
    rank.core.readers.say_goodbye()
    assert len(heard(rank)) == 3


def test_who_can_understand_it_hears_at_once_that_an_engine_drains() -> None:
    rank = prefill_rank()
    for minor in (0, 1):
        assert [type(m) for m in greeted(rank, minor, minor)] == [Welcome]
    rank.core.readers.say_draining()
    assert [type(m) for m in heard(rank)] == [Draining]


def test_a_packet_of_another_version_is_answered_in_words_of_this_one() -> None:
    rank = prefill_rank()
    (body,) = [encode_packet("start-1", "", [Goodbye()])]
    rank.core.receive(ReplyTo(b"1"), body.replace(bytes([0x90 + 4, MAJOR]), bytes([0x90 + 4, MAJOR + 1]), 1), 0.0)
    (answer,) = heard(rank)
    assert isinstance(answer, Unwelcome)
    assert (answer.nonce, answer.reason) == (0, Reason.PROTOCOL)
    assert f"protocol version {MAJOR + 1} is not {MAJOR}" in answer.detail


def test_an_answer_that_nobody_here_asks_for_is_counted_once() -> None:
    rank = prefill_rank()
    rank.core.receive(ReplyTo(b"1"), encode_packet("start-1", "", [Draining()]), 0.0)
    rank.core.receive(Address("world://q"), encode_packet("start-2", "", [Hello(1, 1, 1, "q", 0, Cohort("d"))]), 0.0)
    assert rank.core.outbox.counters["dropped.unexpected"] == 2
    assert heard(rank) == []


def test_of_those_who_ask_while_there_is_no_agent_so_many_are_answered_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others ask again."""
    monkeypatch.setattr(readers, "MAX_WAITING", 3)
    rank = prefill_rank()
    rank.core.agent_lost()
    assert [greeted(rank, number) for number in (1, 2, 3, 4, 5, 2)] == [[]] * 6
    rank.core.agent_replaced("another", b"metadata")
    assert len(heard(rank)) == 3
    assert len(greeted(rank, 4)) == 1


def test_a_bug_that_one_lease_meets_ends_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    rank = world.add("p", make_layout(), engine_id="prefill")
    lease = world.lend(rank, world.params([rank], "r", [3], 4))
    tick_lease, met = rank.core.prefill.tick_lease, list[float]()

    def fail(lease: Lease, now: float) -> bool:
        if not met:
            met.append(now)
            raise RuntimeError("a bug")
        return tick_lease(lease, now)

    monkeypatch.setattr(rank.core.prefill, "tick_lease", fail)
    with pytest.raises(RuntimeError):
        rank.core.tick(10.0)
    assert rank.core.next_at == 11.0
    for now in (11.0, 30.0):
        rank.core.tick(now)
    assert lease.is_over
