"""What one connection may cost: floods and rubbish are dropped, counted, and nobody else notices."""

from __future__ import annotations

import pytest

from asynckv import ConfigError, LimitsConfig
from asynckv.account import survey
from asynckv.core import limits
from asynckv.core.limits import MAX_BUCKETS, Limiter
from asynckv.core.types import Cohort, Reason, ReplyTo
from asynckv.core.wire import MAJOR, MINOR, Hello, Ping, StatusRequest, encode_packet
from tests.world import alone, opened


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    limiter = Limiter(10.0, 5.0)
    assert sum(limiter.take("a", 0.0) for _ in range(100)) == 5
    assert sum(limiter.take("a", 1.0) for _ in range(100)) == 5
    assert sum(limiter.take("a", 1.1) for _ in range(100)) == 1
    # What somebody else has is his.
    assert limiter.take("b", 1.1)


def test_what_is_dear_makes_debts_that_end() -> None:
    limiter = Limiter(10.0, 5.0)
    limiter.charge("a", 0.0, 1e9)
    assert not limiter.take("a", 0.5)
    assert limiter.take("a", 0.65)


def test_only_so_many_senders_are_remembered() -> None:
    limiter = Limiter(1.0, 1.0)
    for i in range(2 * MAX_BUCKETS):
        limiter.take(i, 0.0)
    assert len(limiter.buckets) == MAX_BUCKETS


@pytest.mark.parametrize("charged", [False, True])
def test_the_sender_that_was_silent_for_longest_is_forgotten_and_one_that_spoke_lately_is_not(
    monkeypatch: pytest.MonkeyPatch, charged: bool
) -> None:
    """Else whoever floods us would only have to wait for others to come, and begin anew."""
    monkeypatch.setattr(limits, "MAX_BUCKETS", 2)
    limiter = Limiter(1.0, 2.0)

    def spend(whose: str) -> None:
        if charged:
            limiter.charge(whose, 0.0, 1.0)
        else:
            assert limiter.take(whose, 0.0)

    for whose in ("flood", "other", "flood", "newcomer"):
        spend(whose)
    assert not limiter.take("flood", 0.0)
    assert limiter.take("newcomer", 0.0)
    assert [limiter.take("other", 0.0) for _ in range(3)] == [True, True, False]


def test_a_flood_is_dropped_and_others_are_served() -> None:
    world, prefill, decode = opened()
    core, flood = prefill.core, ReplyTo(b"flood")
    burst = core.config.limits.message_burst
    packet = encode_packet("stranger", "", [Ping(1)])
    for _ in range(burst + 100):
        core.receive(flood, packet, 0.0)
    assert core.outbox.counters["dropped.too_many"] == 100
    assert core.outbox.counters["sent.pong"] == burst
    list(core.outbox.take_packets())
    params, _ = world.lent(prefill, "r", [3], written=True)
    pull = world.pull(decode, "d", [4], params)
    world.run()
    assert pull.reason is Reason.COMPLETE


def test_rubbish_costs_its_sender_a_hundredfold() -> None:
    core = alone(limits=LimitsConfig(message_burst=1000))[1].core
    for _ in range(1000):
        core.receive(ReplyTo(b"r"), b"\x00rubbish", 0.0)
    assert core.outbox.counters["dropped.malformed"] == 10
    assert core.outbox.counters["dropped.too_many"] == 990
    # After a second of silence it has a thousand again.
    core.receive(ReplyTo(b"r"), encode_packet("stranger", "", [Ping(1)]), 1.0)
    assert core.outbox.counters["sent.pong"] == 1


def test_messages_cost_the_same_in_one_packet_as_in_many() -> None:
    core = alone(limits=LimitsConfig(message_burst=1000))[1].core
    full = encode_packet("stranger", "", [Ping(i) for i in range(500)])
    one = encode_packet("stranger", "", [Ping(1)])
    for _ in range(2):
        core.receive(ReplyTo(b"r"), full, 0.0)
    assert core.outbox.counters["sent.pong"] == 1000
    core.receive(ReplyTo(b"r"), one, 0.0)
    assert core.outbox.counters["dropped.too_many"] == 1
    # A last packet may be dearer than what was left, and its sender has to make up for it.
    core.receive(ReplyTo(b"s"), one, 0.0)
    core.receive(ReplyTo(b"s"), full, 0.0)
    core.receive(ReplyTo(b"s"), full, 0.0)
    core.receive(ReplyTo(b"s"), one, 0.0)
    assert core.outbox.counters["dropped.too_many"] == 2


def test_hellos_by_the_hundred_get_few_large_answers() -> None:
    rank = alone()[1]
    core = rank.core
    for i in range(500):
        hello = Hello(i, MAJOR, MINOR, "prefill", 0, Cohort("stranger"))
        core.receive(ReplyTo(b"r"), encode_packet("stranger", "", [hello]), 0.0)
    assert core.outbox.counters["sent.welcome"] == 256
    assert core.outbox.counters["dropped.too_many_hellos"] == 244
    # Several in one packet are several.
    core.receive(ReplyTo(b"s"), encode_packet("stranger", "", [hello] * 300), 0.0)
    assert core.outbox.counters["sent.welcome"] == 512


def test_a_key_or_a_host_gets_no_more_large_answers_by_more_connections() -> None:
    rank = alone()[1]
    core = rank.core
    hello = encode_packet("stranger", "", [Hello(1, MAJOR, MINOR, "prefill", 0, Cohort("stranger")), StatusRequest(2)])
    for principal in ("key:ab", "host:10.0.0.7"):
        before = core.outbox.counters["sent.welcome"] + core.outbox.counters["sent.status"]
        for i in range(400):
            core.receive(ReplyTo(f"{principal}{i}".encode()), hello, 0.0, principal)
        sent = core.outbox.counters["sent.welcome"] + core.outbox.counters["sent.status"]
        assert sent - before == core.config.limits.hello_burst
    core.receive(ReplyTo(b"else"), hello, 0.0, "host:10.0.0.8")
    assert core.outbox.counters["sent.welcome"] + core.outbox.counters["sent.status"] == sent + 2


def test_one_connection_leaves_hellos_to_others_of_its_host() -> None:
    rank = alone()[1]
    core = rank.core
    for i in range(300):
        for route in (b"many", b"one") if i == 299 else (b"many",):
            hello = encode_packet("stranger", "", [Hello(i, MAJOR, MINOR, "prefill", 0, Cohort("stranger"))])
            core.receive(ReplyTo(route), hello, 0.0, "host:10.0.0.7")
    assert core.outbox.counters["sent.welcome"] == core.config.limits.hello_burst // 4 + 1


def test_a_key_or_a_host_asks_no_more_questions_by_more_connections() -> None:
    rank = alone()[1]
    core = rank.core
    for i in range(100):
        question = encode_packet("stranger", "", [StatusRequest(i, 1)])
        core.receive(ReplyTo(b"%d" % i), question, 0.0, "host:10.0.0.7")
    while rank.survey.next_at <= 0.0:
        rank.survey.tick(0.0)
    # As many answers and as many refusals as one connection gets.
    assert core.outbox.counters["sent.status"] == 2 * survey.BURST
    assert core.outbox.counters["dropped.too_many_hellos"] == 100 - 2 * survey.BURST
    core.receive(ReplyTo(b"else"), question, 0.0, "host:10.0.0.8")
    while rank.survey.next_at <= 0.0:
        rank.survey.tick(0.0)
    assert core.outbox.counters["sent.status"] == 2 * survey.BURST + 1


def test_many_connections_of_a_host_that_ask_without_end_cost_little_and_are_not_heard_for_a_while() -> None:
    rank = alone()[1]
    core = rank.core
    questions = encode_packet("stranger", "", [StatusRequest(i, 256) for i in range(500)])
    hellos = encode_packet("stranger", "", [Hello(1, MAJOR, MINOR, "prefill", 0, Cohort("x"))] * 500)
    most, counters = core.config.limits.hello_burst, core.outbox.counters
    muted = [core.receive(ReplyTo(b"%d" % n), questions, 0.0, "host:10.0.0.7") for n in range(2 * most)]
    assert counters["received.statusrequest"] < 2 * most + 100, "the rest of a packet is not taken"
    assert muted == [False] * most + [True] * most
    # Many readers of one host may greet at once, so they are heard again.
    assert not any(core.receive(ReplyTo(b"%d" % n), hellos, 0.0, "host:10.0.0.7") for n in range(2 * most))
    assert counters["received.hello"] <= 3 * most
    # A connection of that host that asks nothing is served, and so is one question of another host.
    ping = encode_packet("stranger", "", [Ping(1)])
    assert not core.receive(ReplyTo(b"good"), ping, 0.0, "host:10.0.0.7")
    question = encode_packet("stranger", "", [StatusRequest(2)])
    assert not core.receive(ReplyTo(b"else"), question, 0.0, "host:10.0.0.8")
    assert counters["sent.pong"] == 1


@pytest.mark.parametrize("name", ["messages_per_s", "message_burst", "hellos_per_s", "hello_burst"])
def test_limits_of_nothing_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0; it must be (a positive|an integer from 1)"):
        LimitsConfig(**{name: 0})
