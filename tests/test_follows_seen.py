"""What is seen of requests that follow a ticket: in accounts, gauges, logs, metrics and `why`; and never the ticket."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from asynckv import LogConfig, Metrics, NoOffer
from asynckv.core.following import Following
from asynckv.core.lease import LeaseState
from asynckv.core.types import PullId
from asynckv.core.wire import MAX_TOLD, StatusRequest
from asynckv.tools.diagnose.causes import CAUSE, HEADING
from asynckv.tools.diagnose.findings import find
from asynckv.tools.diagnose.reading import Looking
from asynckv.tools.diagnose.why_report import report
from tests.engines import Bench, until
from tests.observed import registered
from tests.test_follows import OTHER, TICKET, followed, following_of, params_of, target_of
from tests.test_inspect import account, asked, pages
from tests.test_inspect_ask import looking, pair
from tests.world import opened


def test_a_request_that_follows_is_listed_with_its_rank_and_its_time_and_without_its_ticket() -> None:
    world, prefill, decode, _ = followed()
    world.now += 3.0
    seen = account(world, decode)
    (status,) = seen.requests
    ((rank, state),) = ((x.rank, x.state) for x in status.ranks)
    assert (status.kind, status.request_id, status.state, status.blocks) == ("follow", "d", "following", 0)
    assert (status.age_s, status.prefill_request_id, rank, state) == (3.0, "", "prefill/tp0@prefill-", "not_lent")
    assert status.left_s == pytest.approx(57.0)
    assert [(x.kind, x.phase, x.number, x.oldest_s) for x in seen.counts] == [("follow", "following", 1, 3.0)]
    assert [(x.pulls, x.follows) for x in seen.peers] == [(0, 1)]
    assert account(world, decode, request_id="d").requests[0].history == ((0.0, "following"),)
    assert decode.inspect.requests(world.time(decode)) == (status,)
    assert decode.inspect.gauges()["follows"] == 1
    assert (prefill.inspect.gauges()["followers"], prefill.inspect.gauges()["parked"]) == (1, 1)
    for each in (prefill, decode):
        (said,) = asked(world, each, StatusRequest(1, MAX_TOLD))
        assert TICKET.encode() not in msgspec.msgpack.encode(said)


@pytest.mark.parametrize("state", ["connecting", "silent"])
def test_a_rank_that_cannot_be_asked_is_shown_as_such(state: str) -> None:
    if state == "silent":
        world, _, decode, _ = followed()
        for _ in range(40):
            world.live(0.5, is_heard=False)
            if any(x.state == state for each in decode.inspect.requests(world.time(decode)) for x in each.ranks):
                break
    else:
        world, prefill, decode = opened()
        world.follow(decode, "d", [prefill], TICKET)
    (status,) = decode.inspect.requests(world.time(decode))
    assert [x.state for x in status.ranks] == [state]


@pytest.mark.parametrize("most", [1, 3, 256])
def test_pages_list_what_follows_among_leases_and_pulls_in_the_order_of_their_begin(most: int) -> None:
    world, prefill, both = opened()
    for n in range(9):
        world.now += 1.0
        if n % 3 == 0:
            world.follow(both, f"r{n}", [prefill], f"{n:032x}")
        elif n % 3 == 1:
            world.lend(both, world.params([both], f"r{n}", [n], 4))
        else:
            world.announce(both, f"r{n}", world.params([prefill], f"p{n}", [n], 4), 100.0)
    told = [each.request_id for page in pages(world, both, most) for each in page.requests]
    assert told == [f"r{n}" for n in range(9)]


def test_gauges_of_tickets_and_followers_end_with_them() -> None:
    world, prefill, decode, _ = followed()
    lease = world.lend(prefill, params_of(world, prefill), ticket=TICKET)
    assert (prefill.inspect.gauges()["tickets"], prefill.inspect.gauges()["followers"]) == (1, 0)
    world.run()
    assert lease.offers == 1
    assert decode.inspect.gauges()["follows"] == 0
    world.revoke(prefill, lease)
    assert lease.state is LeaseState.REVOKED
    assert prefill.inspect.gauges()["tickets"] == 0
    world.follow(decode, "e", [prefill], OTHER)
    world.run()
    assert prefill.inspect.gauges()["followers"] == 1
    world.cancel(decode, "e")
    world.run()
    assert prefill.inspect.gauges()["followers"] == 0


def forgotten_at_its_rank(following: Following, decode: Any) -> None:
    decode.peers.by_place[following.rank.place].follows.clear()


def forgotten_by_its_timer(following: Following, decode: Any) -> None:
    decode._timers.forget(following)


def forgotten_by_its_id(following: Following, decode: Any) -> None:
    del decode.follows.by_id[following.follow_id]


def kept_for_ever(following: Following, decode: Any) -> None:
    decode.follows.by_request["other"] = following


def asked_for_nobody(following: Following, decode: Any) -> None:
    decode.peers.by_place[following.rank.place].follows.add(PullId("nobody"))


@pytest.mark.parametrize(
    "fault",
    [forgotten_at_its_rank, forgotten_by_its_timer, forgotten_by_its_id, kept_for_ever, asked_for_nobody],
    ids=lambda x: x.__name__,
)
def test_integrity_finds_a_following_that_something_has_forgotten(fault: Any) -> None:
    _, _, decode, following = followed()
    assert decode.inspect.check_integrity() == []
    fault(following, decode.core.decode)
    wrong = decode.inspect.check_integrity()
    assert wrong
    assert TICKET not in str(wrong)


def test_integrity_finds_a_ticket_that_outlives_its_request() -> None:
    world, prefill, _ = opened()
    params = params_of(world, prefill)
    world.lend(prefill, params, ticket=TICKET)
    assert prefill.inspect.check_integrity() == []
    prefill.core.prefill.offers.lent[OTHER] = prefill.core.prefill.offers.lent[TICKET]
    assert prefill.inspect.check_integrity() == ["tickets are not those of lent requests and of pieces"]


def test_counts_tell_what_became_of_followings() -> None:
    world, prefill, decode, _ = followed()
    world.follow(decode, "late", [prefill], OTHER, seconds=5.0)
    world.live(6)
    world.lend(prefill, params_of(world, prefill), ticket=TICKET)
    world.run()
    counters = decode.core.outbox.counters
    assert {x: n for x, n in counters.items() if x.startswith("follows.")} == {
        "follows.started": 2,
        "follows.no_offer": 1,
        "follows.offered": 1,
    }
    assert prefill.core.outbox.counters["offers.made"] == 1


# -- engines, their logs, and what `why` says ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meanwhile", "heading", "code"),
    [
        ("nothing", HEADING.NEVER_CAME, CAUSE.NO_OFFER),
        ("another ticket", HEADING.WRONG, CAUSE.OTHER_TICKET),
        ("lent later", HEADING.LEASE, CAUSE.NOT_LENT_IN_TIME),
    ],
)
async def test_a_log_shows_why_nothing_was_offered(meanwhile: str, heading: str, code: str, tmp_path: Path) -> None:
    async with pair(log=LogConfig(file=str(tmp_path / "{engine_id}.jsonl"))) as (prefill, decode, group):
        params = group.make_params("p", [(0, [1])], 16)
        follow = asyncio.create_task(decode.follow("d", target_of(prefill), wait_s=1.0))
        await until(lambda: prefill.statistics().gauges["followers"])
        if meanwhile == "another ticket":
            prefill.lend(params, ticket=OTHER)
        with pytest.raises(NoOffer) as raised:
            await follow
        assert raised.value.reason == "no_offer"
        ended = time.time()
        if meanwhile == "lent later":
            await until(lambda: time.time() > ended + 0.05)  # the times of lines are compared to the millisecond
            prefill.lend(params, ticket=TICKET)
    text = "".join((tmp_path / f"{name}.jsonl").read_text() for name in ("prefill", "decode"))
    assert not any(ticket in text for ticket in (TICKET, OTHER))
    (failed,) = (x for x in map(json.loads, text.splitlines()) if x["event"] == "follow_failed")
    assert (failed["request_id"], failed["cause"], failed["level"]) == ("d", "no_offer", "warning")
    found = find(Looking([str(tmp_path)], None, None, None, 1.0).look())
    assert [(x.heading, x.requests) for x in found.wrong if x.code == code] == [(heading, ("d",))]
    look = Looking([str(tmp_path)], "d", None, None, 1.0)
    (story,) = look.stories(look.look())
    assert [(lane.process.engine_id, [bar.phase for bar in lane.bars]) for lane in story.lanes] == [
        ("decode", ["follow"])
    ]


async def test_why_names_a_request_that_waits_for_an_offer_and_for_which_rank_and_since_when() -> None:
    async with pair() as (prefill, decode, _):
        follow = asyncio.create_task(decode.follow("d", target_of(prefill)))
        await until(lambda: prefill.statistics().gauges["followers"])
        seen, (story,) = await anyio.to_thread.run_sync(looking, decode.endpoint.address, "d")
        found = find(seen)
        assert [(x.code, x.requests, [rank.partition("@")[0] for rank in x.ranks]) for x in found.notes] == [
            ("follow", ("d",), ["decode/tp0", "prefill/tp0"])
        ]
        assert found.wrong == []
        assert [(bar.phase, bar.is_open) for lane in story.lanes for bar in lane.bars] == [("follow", True)]
        assert TICKET not in json.dumps(report(found, seen))
        decode.cancel("d")
        with pytest.raises(NoOffer):
            await follow


async def test_metrics_show_followings_and_offers_and_no_ticket() -> None:
    async with Bench(False).pair() as (prefill, decode, group):
        follow = await following_of(prefill, decode, group)
        registry = registered(Metrics(prefill.engine, decode.engine))

        def value(name: str, engine: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"asynckv_{name}", {"engine_id": engine, "rank": "tp0", **labels})

        assert (value("follows", "decode"), value("followers", "prefill")) == (1, 1)
        prefill.engine.withdraw_ticket(TICKET)
        with pytest.raises(NoOffer):
            await follow
        assert value("follows_ended_total", "decode", reason="withdrawn") == 1
        assert value("follows_ended_total", "decode", reason="no_offer") == 0
        assert value("offers_refused_total", "prefill", reason="withdrawn") == 1
        assert value("follows_started_total", "decode") == 1
        prefill.engine.lend(group.make_params("p", [(0, [1])], 16), ticket=OTHER)
        await decode.engine.follow("e", target_of(prefill, OTHER))
        assert (value("tickets", "prefill"), value("offers_made_total", "prefill")) == (1, 1)
        assert not any(
            OTHER in text for sample in registry.collect() for x in sample.samples for text in x.labels.values()
        )
