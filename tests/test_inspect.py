"""The account that a rank gives of itself: all of it counted, a page of it told, a slice of it per turn."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asynckv import EngineConfig, EngineDesk, EngineThread, InspectConfig, LeaseConfig, Metrics
from asynckv.account import survey
from asynckv.account.inspect import MAX_RANKS, _rank_state
from asynckv.account.values import MAX_ACCOUNT, Account, decode_account
from asynckv.arguments import MAX_NAME
from asynckv.core.peer import PeerState
from asynckv.core.types import Address, Cohort, Reason, ReplyTo
from asynckv.core.wire import MAX_TOLD, Claim, Status, StatusRequest, encode_packet
from asynckv.embed import Announce, Cancel, Lend, Pull
from asynckv.errors import RemoteProtocolError
from asynckv.told import StepWait
from tests.documented import Lines
from tests.engines import Bench, Side, memory, pass_by, until
from tests.observed import registered
from tests.world import Rank, World, alone, make_layout, opened


def asked(world: World, rank: Rank, *questions: StatusRequest, source: bytes = b"asker") -> list[Status]:
    """Ask, and let the rank take as many turns as it wants."""
    said: list[Status] = []
    for question in questions:
        rank.survey.ask(source, question, said.append, world.time(rank))
    while rank.survey.next_at <= world.time(rank):
        rank.survey.tick(world.time(rank))
    return said


CONNECTIONS = itertools.count()


def account(world: World, rank: Rank, most: int = MAX_TOLD, after: str = "", request_id: str = "") -> Account:
    """Ask on a connection of its own."""
    question = StatusRequest(1, most, after, request_id)
    (status,) = asked(world, rank, question, source=f"{next(CONNECTIONS)}".encode())
    return decode_account(status.account)


def pages(world: World, rank: Rank, most: int, between: object = lambda page: None) -> list[Account]:
    found, after = [], ""
    while True:
        world.now += 1.0  # no rank is asked too often
        found.append(account(world, rank, most, after))
        after = found[-1].after
        if not after:
            return found
        between(len(found))  # type: ignore[operator]


def test_an_account_says_which_request_holds_what_since_when_and_what_it_waits_for() -> None:
    world, prefill, decode = opened()
    first, second = (world.params([prefill], f"p{n}", [n], 4, lease_s=20.0) for n in (1, 2))
    world.lend(prefill, first)
    world.now = 2.0
    world.lend(prefill, second)
    world.announce(decode, "d2", second, 30.0)
    world.deliver_all()
    world.now = 3.0
    seen = account(world, prefill)
    assert (seen.engine_id, seen.rank, seen.refused) == ("prefill", "prefill/tp0@prefill-", "")
    assert [(x.kind, x.phase, x.number, x.oldest_s) for x in seen.counts] == [
        ("lease", "granted", 1, 1.0),
        ("lease", "unclaimed", 1, 3.0),
    ]
    assert [(x.request_id, x.age_s, x.waits) for x in seen.requests] == [
        ("p1", 3.0, "not claimed by any reader"),
        ("p2", 1.0, "claimed and renewed by decode/tp0@decode-1"),
    ]
    assert [(x.request_id, x.blocks, x.waits_for) for x in seen.holds] == [
        ("p1", {0: (1,)}, ("*",)),
        ("p2", {0: (2,)}, ("decode/tp0@decode-1",)),
    ]
    assert (seen.num_readers, seen.budgets["blocks_held"]) == (1, (2, 12))
    reads = account(world, decode)
    (announced,) = reads.requests
    assert (announced.kind, announced.prefill_request_id, announced.sequence) == ("announced", "p2", 1)
    assert [(x.rank, x.state, x.pulls) for x in reads.peers] == [("prefill/tp0@prefill-", "ready", 1)]
    assert reads.num_peers == {"ready": 1}
    (straggler,) = decode.inspect.stragglers(world.time(decode))
    assert (straggler.request_id, straggler.reason, straggler.held_s) == ("d2", "announced", 1.0)
    assert straggler.left_s == 29.0
    assert account(world, decode, request_id="p2").requests[0].request_id == "d2"
    assert account(world, prefill, request_id="p2").requests[0].request_id == "p2"
    assert account(world, prefill, request_id="nobody's").requests == ()


def test_a_grant_is_over_at_its_last_moment() -> None:
    source: Any = SimpleNamespace(
        release=None, reads=True, proven=False, has_landed=False, not_lent_yet=False, covered_until=5.0
    )
    peer: Any = SimpleNamespace(state=PeerState.READY)
    assert [_rank_state(source, peer, now) for now in (4.99, 5.0)] == ["granted", "met"]


def test_of_one_request_all_is_told() -> None:
    """Its history, and the messages about it that were turned down."""
    world, prefill, decode = opened()
    params, _ = world.lent(prefill, "p1", [1])
    world.now = 1.0
    claim = Claim(params.key, "p1", decode.core.cohort, "d-1", 1, bytes(16), 5.0)
    prefill.core.receive(ReplyTo(b"way"), encode_packet("d-1", "", [claim]), world.time(prefill))
    world.now = 3.0
    (alone,) = account(world, prefill, request_id="p1").requests
    ((ago, what, reason, name, detail),) = alone.refused
    assert (ago, what, reason, name) == (2.0, "claim", "blocks_differ", "decode/tp0@d-1")
    assert "other blocks" in detail
    assert alone.history[0] == (0.0, "lent")
    world.now = 4.0
    (among_others,) = account(world, prefill).requests
    assert (among_others.refused[0][0], among_others.history) == (3.0, ())


def test_an_account_tells_no_token() -> None:
    """A reader of one could release what it never read."""
    world, prefill, decode = opened()
    params = [world.lent(prefill, f"p{n}", [n])[0] for n in (1, 2)]
    world.pull(decode, "d1", [3], params[0])
    world.deliver()
    for rank in (prefill, decode):
        (status,) = asked(world, rank, StatusRequest(1, 1))
        said = msgspec.msgpack.encode(status)
        assert b"p1" in said
        assert not any(each.key.token.encode() in said or each.key.epoch.encode() in said for each in params)


@pytest.mark.parametrize("most", [1, 3, 7, 256])
def test_pages_tell_all_of_both_sides_once_and_the_oldest_first(most: int) -> None:
    world, prefill, both = opened()
    for n in range(9):
        world.now += n % 3  # some begin at the very same moment
        if n % 2:
            world.lend(both, world.params([both], f"lent{n}", [n], 4))
        else:
            world.pull(both, f"pull{n}", [n], world.params([prefill], f"p{n}", [n], 4))
    found = pages(world, both, most)
    told = [each for page in found for each in page.requests]
    assert sorted(each.request_id for each in told) == sorted(f"{'lent' if n % 2 else 'pull'}{n}" for n in range(9))
    ages = [each.age_s + page for page, each in enumerate(told)] if most == 1 else [each.age_s for each in told]
    assert most != 256 or ages == sorted(ages, reverse=True)
    assert {sum(x.number for x in page.counts) for page in found} == {9}


@pytest.mark.parametrize("most", [1, 2, 256])
def test_what_was_announced_and_is_pulled_keeps_its_place(most: int) -> None:
    """Though the call that counts for it came later than those of others, none is left out behind it."""
    world, prefill, decode = opened()
    params = [world.params([prefill], f"p{n}", [n], 4) for n in range(4)]
    for n, each in enumerate(params):
        world.now = float(n)
        decode.core.announce(f"d{n}", each, "", 60.0, world.time(decode))
    world.now = 5.0
    world.pull(decode, "d0", [1], params[0])
    told = [each.request_id for page in pages(world, decode, most) for each in page.requests]
    assert told == ["d0", "d1", "d2", "d3"]


def test_what_ends_between_pages_hides_nothing_else() -> None:
    world, prefill = alone()
    leases = []
    for n in range(12):
        world.now += 0.5
        leases.append(world.lend(prefill, world.params([prefill], f"p{n}", [n % 12], 4, lease_s=1000.0)))

    def end_one(page: int) -> None:
        prefill.core.prefill.revoke(leases[3 * page - 1], world.time(prefill))  # the last that was told
        world.settle(prefill)

    told = [each.request_id for page in pages(world, prefill, 3, end_one) for each in page.requests]
    assert told == [f"p{n}" for n in range(12)]


def test_all_ages_in_an_answer_are_of_one_moment() -> None:
    """Or what is told in a later turn would seem older than it is."""
    world, prefill = alone()
    for n in range(200):
        world.now += 0.001
        world.lend(prefill, world.params([prefill], f"p{n}", [n % 12], 4, lease_s=1000.0))
    said: list[Status] = []
    prefill.survey.ask(b"asker", StatusRequest(1, MAX_TOLD), said.append, world.time(prefill))
    while not said:
        world.now += 0.1  # between two turns
        prefill.survey.tick(world.time(prefill))
    ages = [each.age_s for each in decode_account(said[0].account).requests]
    assert ages == sorted(ages, reverse=True)
    assert ages[0] - ages[-1] == pytest.approx(0.199)


@pytest.mark.parametrize("place", ["x", "-1", "0x1", "1.0", "1 2", " 1", "\0"])
def test_a_place_that_is_none_is_refused(place: str) -> None:
    assert "the cursor (after) is not a number" in account(*alone(), after=place).refused


def test_a_made_up_cursor_is_only_a_number() -> None:
    world, prefill = alone()
    world.lend(prefill, world.params([prefill], "p1", [1], 4))
    assert [x.request_id for x in account(world, prefill).requests] == ["p1"]
    assert account(world, prefill, after="9" * 200).requests == ()


def test_an_asker_that_asks_too_often_is_told_so_and_others_are_answered() -> None:
    world, prefill = alone()
    said = asked(world, prefill, *[StatusRequest(n, 1) for n in range(survey.BURST + 3)])
    refusals = [x for status in said if (x := decode_account(status.account)).refused]
    assert len(said) == survey.BURST + 3
    assert [(x.refused, x.retry_s > 0) for x in refusals] == [("asked more than 8 times a second", True)] * 3
    (status,) = asked(world, prefill, StatusRequest(1, 1))
    assert decode_account(status.account).refused == "asked more than 8 times a second"
    (status,) = asked(world, prefill, StatusRequest(1, 1), source=b"another")
    assert not decode_account(status.account).refused


def test_many_askers_are_bounded_together() -> None:
    world, prefill = alone()
    said = [
        status
        for n in range(200)
        for status in asked(world, prefill, StatusRequest(n, MAX_TOLD, request_id=f"r{n}"), source=b"%d" % n)
    ]
    refusals = [x for status in said if (x := decode_account(status.account)).refused]
    assert len(refusals) == 200 - survey.TOTAL_BURST // (1 + MAX_TOLD // survey.TOLD_PER_TOKEN)
    assert refusals[0].retry_s > 0
    world.now += 1.0
    assert not account(world, prefill).refused


@pytest.mark.parametrize("enabled", [True, False])
def test_an_asker_that_never_stops_is_not_answered_any_more(enabled: bool) -> None:
    world, prefill = alone(inspect=InspectConfig(enabled=enabled))
    core, now = prefill.core, world.time(prefill)
    for _ in range(20):
        core.receive(ReplyTo(b"way"), encode_packet("s", "", [StatusRequest(n, 1) for n in range(50)]), now)
    while prefill.survey.next_at <= now:
        prefill.survey.tick(now)
    said = sum(map(len, core.outbox.messages.values()))
    assert said == survey.BURST * (2 if enabled else 1)
    assert core.outbox.counters["dropped.too_many_hellos"] == 1000 - said
    world.now += 2.0
    assert asked(world, prefill, StatusRequest(1, 1), source=b"way")


def test_to_look_for_one_among_many_costs_more() -> None:
    world, prefill = alone()
    for n in range(survey.LOOKED_PER_TOKEN // 8):
        world.lend(prefill, world.params([prefill], f"p{n}", [n % 12], 4))

    def answered(request_id: str) -> int:
        questions = ((n, StatusRequest(n, 1, "", request_id and f"{request_id}{n}")) for n in range(survey.TOTAL_BURST))
        world.now += 60.0  # every asker may ask again, and nothing is fresh
        said = [x for n, each in questions for x in asked(world, prefill, each, source=b"%d" % n)]
        return sum(not decode_account(status.account).refused for status in said)

    assert answered("nobody") < 0.95 * survey.TOTAL_BURST


def test_a_question_that_is_repeated_while_it_waits_is_answered_once() -> None:
    world, prefill = alone()
    said: list[Status] = []
    for source in (b"one", b"one", b"another"):
        assert prefill.survey.ask(source, StatusRequest(7, 1), said.append, world.time(prefill))
    said += asked(world, prefill, StatusRequest(8, 1), source=b"third")
    assert [status.nonce for status in said] == [7, 7, 8]


def test_an_engine_may_say_nothing_and_says_that() -> None:
    world, prefill, stranger = opened(inspect=InspectConfig(enabled=False))
    world.lend(prefill, world.params([prefill], "p1", [1], 4))
    for question in (StatusRequest(1), StatusRequest(2, 1)):
        prefill.core.receive(ReplyTo(b"way"), encode_packet("s", "", [question]), world.time(prefill))
        ((_, status),) = [(to, x) for (to, _), xs in prefill.core.outbox.messages.items() for x in xs]
        prefill.core.outbox.take_packets()
        assert isinstance(status, Status)
        assert (status.nonce, status.gauges) == (question.nonce, {})
        assert "turned off" in decode_account(status.account).refused
    assert stranger.address == Address("world://decode")


def test_an_asker_that_knows_of_no_account_gets_gauges_as_ever() -> None:
    world, prefill = alone()
    prefill.core.receive(ReplyTo(b"way"), encode_packet("s", "", [StatusRequest(1)]), world.time(prefill))
    ((status,),) = prefill.core.outbox.messages.values()
    assert isinstance(status, Status)
    assert (status.gauges["leases"], status.account) == (0, b"")


def test_names_of_whatever_length_fit_an_answer() -> None:
    """One claim says of how many ranks its engine is, and what it is called: four bytes a letter."""
    world, prefill = alone()
    cohort = Cohort("\U0001f600" * MAX_NAME, 4096, 0, 1, 0)
    for n in range(4):
        params, lease = world.lent(prefill, f"p{n}", [n])
        claim = Claim(params.key, params.request_id, cohort, f"pull-{n}", 1, lease.digest, 5.0)
        prefill.core.receive(ReplyTo(b"way"), encode_packet("d", "", [claim]), world.time(prefill))
    found = pages(world, prefill, MAX_TOLD)
    assert [x.request_id for page in found for x in page.requests] == ["p0", "p1", "p2", "p3"]
    assert {len(x.ranks) for page in found for x in page.requests} == {MAX_RANKS}
    assert {len(x.waits_for) for page in found for x in page.holds} == {MAX_RANKS}


def test_a_bug_in_one_answer_keeps_no_other_asker_from_its_own() -> None:
    _, prefill = alone()
    said: list[Status] = []
    prefill.survey.facts = lambda: 1 / 0  # type: ignore[assignment,return-value]
    for n in (1, 2):
        prefill.survey.ask(b"asker", StatusRequest(n, 1), said.append, 0.0)
    with pytest.raises(ZeroDivisionError):
        prefill.survey.tick(0.0)
    del prefill.survey.facts
    prefill.survey.facts = type(account(*alone()).facts)
    while prefill.survey.next_at <= 0.0:
        prefill.survey.tick(0.0)
    assert [status.nonce for status in said] == [2]


def test_an_account_that_is_too_long_is_not_looked_at() -> None:
    with pytest.raises(RemoteProtocolError, match=f"at most {MAX_ACCOUNT} are taken"):
        decode_account(bytes(MAX_ACCOUNT + 1))


@pytest.mark.slow
def test_no_turn_is_long_where_there_is_much() -> None:
    """50,000 leases, a page of 256 of them: no turn of more than 32 has an eighth of the page's time."""
    world = World(reuse=False)
    prefill = world.add("p", make_layout(num_blocks=50_000))
    for n in range(50_000):
        world.now += 1e-4
        prefill.core.lend(world.params([prefill], f"p{n}", [n], 4, lease_s=1000.0), 1, world.time(prefill))
    after, longest = "", []
    for _ in range(5):
        world.now += 1.0
        said: list[Status] = []
        prefill.survey.ask(b"asker", StatusRequest(1, MAX_TOLD, after), said.append, world.time(prefill))
        turns: list[float] = []
        while not said:
            began = time.thread_time()
            prefill.survey.tick(world.time(prefill))
            turns.append(time.thread_time() - began)
        after = decode_account(said[0].account).after
        longest.append(max(turns) / sum(turns))
    assert min(longest) < 1 / 8


# -- Waits for a step of the engine around it -------------------------------------------------------------------------

LEASE_S = LeaseConfig().lease_s

LEASE = LeaseConfig(lease_s=30.0)


def waits(world: World, rank: Rank) -> dict[str, StepWait]:
    """Return what all three outputs read, after comparing it with the answer to a live question."""
    found = rank.inspect.waits_for_step(world.time(rank))
    assert account(world, rank).waits_for_step == found
    return found


def shown(side: Side) -> dict[str, float]:
    registry = registered(Metrics(side.engine))
    samples = [x for family in registry.collect() for x in family.samples]
    return {x.labels["what"]: x.value for x in samples if x.name == "asynckv_waits_for_step_seconds"}


async def test_results_that_are_not_taken_are_logged_answered_and_shown(sim: Bench, logs: Lines) -> None:
    async with sim.pair(lease=LEASE) as (prefill, decode, group):
        desks = prefill_desk, desk = EngineDesk(prefill.engine), EngineDesk(decode.engine)
        params = group.make_params("r", [(0, [1])], 16, written=True)
        prefill_desk.submit([Lend(params)])
        desk.submit([Pull(request_id="d", groups=[(0, [6])], params=params)])
        await until(lambda: all(each.has_news for each in desks))
        told_at = sim.clock.now()
        await pass_by(sim, 40.0, 0.5)
        waited_s = sim.clock.now() - told_at
        for side in (prefill, decode):
            wait = side.engine._driver.inspect.waits_for_step(sim.clock.now())
            assert list(wait) == ["result"]
            assert (wait["result"].number, abs(wait["result"].seconds - waited_s) < 0.01) == (1, True)
            assert shown(side) == {"result": wait["result"].seconds, "announcement": 0.0, "claim": 0.0}
        said = [e["waits_for_step"] for e in logs.of("engine_alive") if e.get("waits_for_step")]
        assert [x["result"]["number"] for x in said] == [1] * 4
        for each in desks:
            each.take_finished()
        so_far = len([*logs])
        await pass_by(sim, 3600.0, 0.5)
        idle = [e for e in [*logs][so_far:] if e["event"] == "engine_alive"]
        assert (len(idle), [e for e in idle if e.get("waits_for_step")]) == (2 * 3600 // 15, []), "an hour of idling"
        assert shown(decode) == {"result": 0.0, "announcement": 0.0, "claim": 0.0}
        desk.submit([Cancel("d", {"nonsense": 1})])  # refused, and no scheduler waits for that
        await until(lambda: desk.has_news)
        await pass_by(sim, 5.0, 0.5)
        assert decode.engine._driver.inspect.waits_for_step(sim.clock.now()) == {}


def test_announcements_wait_for_an_engine_that_makes_no_steps_also_when_they_were_let_go() -> None:
    world, prefill, decode = opened()
    params, _ = world.lent(prefill, "r", [3], written=True)
    decode.core.decode.alive_at = world.time(decode)
    world.now += 2.0
    pull = world.announce(decode, "d", params, 3600.0)
    world.run()
    for seconds in range(1, 61):
        world.run(1.0)
        found = waits(world, decode)["announcement"]
        assert found.number == 1
        # Once the announcement was let go, the wait goes on: its engine still owes a pull or a cancellation.
        assert found.seconds == (seconds + 2.0 if pull.reason else seconds)
    assert pull.reason is Reason.STANDSTILL
    decode.core.decode.alive_at = world.time(decode)
    world.run(10.0)
    assert waits(world, decode) == {}


@pytest.mark.parametrize("alive", [True, False], ids=["makes steps", "runs this loop itself"])
def test_announcements_wait_for_no_step_of_an_engine_that_makes_steps_or_runs_this_loop(*, alive: bool) -> None:
    world, prefill, decode = opened()
    params, _ = world.lent(prefill, "r", [3], written=True)
    decode.core.announce("d", params, "", 3600.0, world.time(decode))
    for _ in range(120):
        decode.core.decode.alive_at = world.time(decode) if alive else math.inf
        world.run(0.5)
        assert waits(world, decode) == {}


def test_a_claim_waits_for_a_lend_as_long_as_it_is_repeated() -> None:
    world, prefill, decode = opened()
    params = [world.params([prefill], f"r{i}", [i + 1], 4) for i in range(3)]
    for i in range(2):
        world.pull(decode, f"d{i}", [i], params[i], timeout=600.0)
    world.run()
    assert waits(world, prefill) == {}, "so far it has only just come"
    for seconds in range(1, 100):  # a parked claim is dropped after 30 s, and the next one is parked anew
        world.run(1.0)
        found = waits(world, prefill).get("claim")
        if found is None:  # a long prompt takes as long
            assert seconds <= LEASE_S
        else:
            assert (found.number, abs(found.seconds - seconds) <= 0.5) == (2, True)
    world.lend(prefill, params[2])
    assert waits(world, prefill) == {}, "it lends others meanwhile"
    world.run(LEASE_S + 5.0)
    assert waits(world, prefill) == {"claim": StepWait(2, LEASE_S + 5.0)}
    for i in range(2):
        world.lend(prefill, params[i])
    world.run(60.0)
    assert waits(world, prefill) == {}


def test_a_claim_waits_for_no_step_of_an_engine_that_makes_steps() -> None:
    world, prefill, decode = opened()
    world.pull(decode, "d", [1], world.params([prefill], "r", [1], 4), timeout=600.0)
    for _ in range(120):
        prefill.core.decode.alive_at = world.time(prefill)
        world.run(0.5)
        assert waits(world, prefill) == {}
    world.run(7.0)
    assert waits(world, prefill) == {"claim": StepWait(1, 7.5)}


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("listen", "is_asleep"),
    [
        (lambda thread: thread.take_finished(), False),
        (lambda thread: thread.wait(0.0), False),
        (EngineThread.fileno, True),
    ],
    ids=["take_finished", "wait", "fileno"],
)
def test_a_thread_that_waited_for_news_once_is_not_taken_for_asleep(
    listen: Callable[[EngineThread], object], *, is_asleep: bool
) -> None:
    """Only a thread that may watch the descriptor counts as alive without a call."""
    with EngineThread(EngineConfig(engine_id="e"), memory(1)[0]) as thread:
        listen(thread)
        thread.take_finished()
        assert math.isinf(thread.engine._driver.core.decode.alive_at) is is_asleep
        thread.submit([Announce("d", {"nonsense": 1})])  # refused, which is no news for a scheduler


def test_the_wait_is_one_value_that_old_readers_skip_and_new_ones_miss_in_old_answers() -> None:
    from asynckv.account.values import Account, decode_account, encode_account

    said = Account(engine_id="e", waits_for_step={"claim": StepWait(2, 7.0)})
    assert decode_account(encode_account(said)) == said
    old = msgspec.msgpack.encode({"engine_id": "e"})
    assert decode_account(old).waits_for_step == {}
