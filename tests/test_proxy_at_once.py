"""Both legs at once: when the router sends them so, and what becomes of one leg when the other fails.

The engines do what a test says, behind real sockets. A prefill engine that `offers` answers while its `hears` is set,
and a decode engine that `follows` answers once its ticket was offered. Each test of a fault counts the prefills.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from asynckv.tools.proxy import engines as engines_module
from asynckv.tools.proxy.limits import Limits
from asynckv.tools.proxy.router import RESPONSES, Loan
from asynckv.tools.proxy.server import COMPLETIONS
from tests.engines import cancel
from tests.test_proxy import (
    ASK,
    HEAR_S,
    IMPATIENT,
    QUICK,
    RARELY,
    REFUSES,
    Act,
    Client,
    Fake,
    dies,
    error,
    given_back,
    hangs,
    lent,
    no_http,
    routed,
    says,
    says_events,
    serve_two_thousand,
    streams,
)

FOLLOWS = {"asynckv_follows": True}
EVENT = b'data: {"choices": [{"text": "three", "finish_reason": null}], "kv_transfer_params": null}\n\n'
FINISH = (
    b'data: {"choices": [{"text": "", "finish_reason": "stop"}], "kv_transfer_params": {"asynckv_follows": true}}\n\n'
)
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"
EVENTS = "text/event-stream"
COMPLETED = b'event: response.completed\ndata: {"type": "response.completed", "response": {"output": "%b", %b}}\n\n' % (
    b"x" * 100_000,
    b'"kv_transfer_params": {"asynckv_follows": true}',
)


def identity(name: str, **more: Any) -> dict[str, Any]:
    return {"engine_id": name, "tp_size": 2, "pp_size": 1, "endpoints": [{"address": "tcp://10.0.0.7:1"}], **more}


def offers(name: str = "p1", *, beside: Mapping[str, Any] | None = None, **more: Any) -> Act:
    """Lend as `name` when the test says so, each loan with another number, and take everything back."""

    async def act(fake: Fake, request: web.Request) -> web.StreamResponse:
        number = len(fake.asked)
        if number in lent(fake):
            await asyncio.wait_for(fake.hears.wait(), HEAR_S)
            OFFERED[ticket_of(await request.json())].set()
        params = {"asynckv": {**identity(name, **more), "number": number}, "asynckv_offers": True, **(beside or {})}
        return web.json_response({"choices": [], "kv_transfer_params": {"do_remote_prefill": True, **params}})

    return act


def after(act: Act) -> Act:
    """Do so once the test says so."""

    async def later(fake: Fake, request: web.Request) -> web.StreamResponse:
        await asyncio.wait_for(fake.hears.wait(), HEAR_S)
        return await act(fake, request)

    return later


def follows(act: Act) -> Act:
    """Do so once the ticket of the leg was offered."""

    async def later(fake: Fake, request: web.Request) -> web.StreamResponse:
        if ticket := ticket_of(await request.json()):
            await asyncio.wait_for(OFFERED[ticket].wait(), HEAR_S)
        return await act(fake, request)

    return later


SAYS = says({"choices": [{"text": "three"}], "kv_transfer_params": FOLLOWS})
ANSWERS = follows(SAYS)
SAYS_EVENTS = says_events(EVENT + FINISH + USAGE + DONE)


OFFERED: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)


def ticket_of(body: Mapping[str, Any]) -> str:
    params = body.get("kv_transfer_params", {})
    return str(params.get("asynckv_ticket") or params.get("asynckv_follow", {}).get("ticket", ""))


def told(fake: Fake) -> list[dict[str, Any]]:
    """The params of everything that an engine was asked for, but not what it takes back."""
    params: list[dict[str, Any]] = [body.get("kv_transfer_params", {}) for body, _ in fake.asked]
    return [it for it in params if not it.get("give_back")]


def tickets(fake: Fake) -> list[str]:
    """The tickets that an engine was asked with; an empty text for none."""
    return [ticket_of({"kv_transfer_params": it}) for it in told(fake)]


async def apt(client: Client, role: str) -> list[bool]:
    return [it["at_once"] for it in (await client.ready())[1][role]]


@contextlib.asynccontextmanager
async def taught(
    prefill: Sequence[Fake], decode: Sequence[Fake], limits: Limits = RARELY, **more: Any
) -> AsyncIterator[Client]:
    """A router with engines that have said that both legs may leave at once; what they do first was for this."""
    at = [[it.url or it for it in side] for side in (prefill, decode)]  # some run already
    acts = {fake: fake.acts[1:] or fake.acts for fake in (*prefill, *decode)}
    async with routed(at[0], at[1], limits, **more) as client:
        for fake in acts:
            fake.acts = fake.acts[:1]
        for _ in range(max(len(prefill), len(decode))):
            assert (await client.ask())[0] == 200
        assert all(await apt(client, "prefill") + await apt(client, "decode"))
        for fake, fake.acts in acts.items():
            fake.asked.clear()
            fake.busy.clear()
        yield client


async def leaves(fake: Fake) -> None:
    await asyncio.wait_for(fake.left.wait(), HEAR_S)


async def begins(fake: Fake) -> None:
    await asyncio.wait_for(fake.busy.wait(), HEAR_S)


def counts(metrics: Mapping[str, float], name: str) -> dict[str, float]:
    """The values of a metric that are not 0, by its labels."""
    return {key[len(name) :]: value for key, value in metrics.items() if key.startswith(f"{name}{{") and value}


# -- when both legs leave at once --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        (COMPLETIONS[0], ANSWERS),
        (COMPLETIONS[1], ANSWERS),
        (RESPONSES, ANSWERS),
        (COMPLETIONS[0], SAYS_EVENTS),
        (COMPLETIONS[1], streams(EVENT, FINISH, USAGE, DONE)),
        (RESPONSES, says_events(EVENT + COMPLETED)),
    ],
    ids=["whole", "whole chat", "whole response", "stream", "stream in pieces", "stream of a response"],
)
async def test_both_legs_leave_at_once_once_both_engines_have_said_so(path: str, answer: Act) -> None:
    prefill, decode = Fake(offers()), Fake(answer)
    asked = {"prompt": "one two", "stream": answer not in (ANSWERS,)}
    async with routed([prefill], [decode]) as client:

        async def ask() -> int:
            async with client.post(asked, path) as answered:
                decode.go_on.set()
                async for _ in answered.content:
                    decode.go_on.set()
                return answered.status

        assert await ask() == 200
        (first,), (second,) = told(prefill), told(decode)
        params = {"do_remote_prefill": True, "asynckv": {**identity("p1"), "number": 1}, "asynckv_offers": True}
        assert (first, second) == ({"do_remote_decode": True}, {**params, "asynckv_ask": True})
        for _ in range(2):
            decode.busy.clear()
            prefill.hears.clear()
            asking = asyncio.create_task(ask())
            await begins(decode)  # before the prefill engine has answered
            prefill.hears.set()
            assert await asking == 200
        *_, first = told(prefill)
        *_, second = told(decode)
        assert first == {"do_remote_decode": True, "asynckv_ticket": tickets(prefill)[-1]}
        follow = {"ticket": tickets(prefill)[-1], **identity("p1")}
        assert second == {"do_remote_prefill": True, "asynckv_follow": follow, "asynckv_ask": True}
        assert all(re.fullmatch("[0-9a-f]{32}", ticket) for ticket in tickets(prefill)[1:])
        assert len(set(tickets(prefill))) == 3
        # The answer of the prefill leg is not passed on, because its engine has offered the KV cache itself.
        assert (len(told(prefill)), len(decode.asked)) == (3, 3)


async def test_what_was_read_before_the_prefill_leg_has_answered_is_not_given_back() -> None:
    prefill, decode = Fake(offers()), Fake(ANSWERS, SAYS)
    async with taught([prefill], [decode]) as client:
        prefill.hears.clear()
        assert (await client.ask())[0] == 200
        prefill.hears.set()
        assert (await client.ask())[0] == 200
    assert (len(told(prefill)), given_back(prefill)) == (2, [])


async def test_neighbours_that_share_tokens_and_several_answers_are_followed_too() -> None:
    prefill, decode = Fake(offers(num_token_shards=2)), Fake(ANSWERS)
    async with taught([prefill], [decode]) as client:
        assert (await client.ask({**ASK, "n": 3}))[0] == 200
        assert told(decode)[0]["asynckv_follow"] == {
            "ticket": tickets(prefill)[0],
            **identity("p1", num_token_shards=2),
        }
    assert "n" not in prefill.asked[0][0]
    assert (len(told(prefill)), len(decode.asked)) == (1, 1)


TEXT = {"text": '"kv_transfer_params": {"asynckv_follows": true}'}
NOT_SAID: list[tuple[Act, Act, int]] = [
    (offers(beside={"asynckv_offers": False}), ANSWERS, 32),
    (offers(beside={"asynckv_offers": "yes"}), ANSWERS, 32),
    (offers(beside={"asynckv": {"engine_id": "p1", "number": 0}}), ANSWERS, 32),
    (offers(beside={"asynckv": [1]}), ANSWERS, 32),
    (says({"kv_transfer_params": {"do_remote_prefill": True, "remote": 1, "asynckv_offers": True}}), ANSWERS, 32),
    (offers(), says({"choices": [TEXT], "metadata": FOLLOWS, "kv_transfer_params": None}), 32),
    (offers(), says({"choices": [], "kv_transfer_params": {"asynckv_follows": 1}}), 32),
    (
        offers(),
        says_events(b"data: " + json.dumps({"choices": [TEXT], "tools": FOLLOWS}).encode() + b"\n\n" + DONE),
        32,
    ),
    (offers(), ANSWERS, 0),
]


@pytest.mark.parametrize(("offer", "answer", "ahead"), NOT_SAID)
async def test_otherwise_one_leg_follows_the_other(offer: Act, answer: Act, ahead: int) -> None:
    prefill, decode = Fake(offer), Fake(answer)
    async with routed([prefill], [decode], ahead=ahead) as client:
        for _ in range(3):
            async with client.streaming(stream=answer is NOT_SAID[-2][1]) as answered:
                assert answered.status == 200
                await answered.read()
        metrics = await client.metrics()
    assert told(prefill) == [{"do_remote_decode": True}] * 3
    assert tickets(decode) == [""] * 3
    assert metrics['pd_proxy_seconds_count{until="end",way="in_turn"}'] == 3


async def test_decode_engines_that_do_not_follow_still_take_turns() -> None:
    prefill, decode = Fake(offers()), [Fake(says({"choices": []})) for _ in range(2)]
    async with routed([prefill], decode) as client:
        for _ in range(6):
            assert (await client.ask())[0] == 200
    assert [len(it.asked) for it in decode] == [3, 3]


@pytest.mark.parametrize("at", ["prefill", "decode"])
@pytest.mark.parametrize("why", ["fault", "health"])
async def test_a_fault_or_a_restart_forgets_what_an_engine_has_said(at: str, why: str) -> None:
    fails = [says(b"oh", 500)] if why == "fault" else []
    prefill = Fake(offers(), *(fails if at == "prefill" else []), offers())
    decode = Fake(ANSWERS, *(fails if at == "decode" else []), ANSWERS)
    engine = prefill if at == "prefill" else decode
    async with taught([prefill], [decode], QUICK) as client:
        if why == "health":
            engine.health = 500

            async def is_(trouble: bool) -> bool:
                return bool((await client.ready())[1][at][0]["trouble"]) is trouble

            await client.until(lambda: is_(True))
            engine.health = 200
            await client.until(lambda: is_(False))
            assert await apt(client, at) == [False]
        assert (await client.ask())[0] == 200
        # With a fault, it is the attempt after the one that failed.
        assert tickets(decode)[-1] == ""
        assert all(await apt(client, "prefill") + await apt(client, "decode"))
        assert (await client.ask())[0] == 200
        assert tickets(decode)[-1] == tickets(prefill)[-1] != ""


async def test_a_prefill_engine_that_restarted_unseen_is_followed_from_the_next_request_on() -> None:
    prefill, decode = Fake(offers("p1"), offers("p2")), Fake(ANSWERS, hangs, ANSWERS)
    async with taught([prefill], [decode]) as client:
        assert (await client.ask())[0] == 200
        await leaves(decode)
        first, second = told(decode)
        assert first["asynckv_follow"]["engine_id"] == "p1"
        assert second["asynckv"]["engine_id"] == "p2"
        assert len(told(prefill)) == 1
        assert counts(await client.metrics(), "pd_proxy_retries_total") == {'{why="identity"}': 1}
        assert (await client.ask())[0] == 200
    assert told(decode)[2]["asynckv_follow"]["engine_id"] == "p2"
    assert (len(told(prefill)), len(decode.asked)) == (2, 3)


async def test_an_identity_that_comes_back_belongs_to_one_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for names, most in ((["p1", "p2", "p1", "p2"], 1000), (["p1", "p2", "p3", "p3"], 2)):
        monkeypatch.setattr(engines_module, "MOST_IDENTITIES", most)
        prefill, decode = Fake(*map(offers, names)), Fake(ANSWERS)
        with capture_logs() as events:
            async with routed([prefill], [decode]) as client:
                for is_apt in (True, True, False, False):
                    assert (await client.ask())[0] == 200
                    assert await apt(client, "prefill") == [is_apt]
        assert [bool(ticket) for ticket in tickets(prefill)] == [False, True, True, False]
        identities = [event["has_ranks"] for event in events if event["event"] == "engine_identity"]
        assert identities == [False, False, True]


async def test_so_many_decode_legs_wait_at_an_engine_and_other_requests_take_the_other_way() -> None:
    prefill, decode = Fake(offers()), Fake(ANSWERS, after(ANSWERS))
    async with taught([prefill], [decode], ahead=2) as client:
        prefill.hears.clear()
        decode.hears.clear()
        asked = [asyncio.create_task(client.ask()) for _ in range(5)]
        await client.until_seen(lambda: len(told(prefill)) == 5 and len(decode.asked) == 2)
        assert (await client.ready())[1]["decode"][0]["ahead"] == 2
        prefill.hears.set()

        async def wait_no_more() -> bool:
            return not (await client.ready())[1]["decode"][0]["ahead"]

        await client.until(wait_no_more)  # for an offer, although they have not answered
        await client.until_seen(lambda: len(decode.asked) == 5)
        prefill.hears.clear()
        asked.append(asyncio.create_task(client.ask()))
        await client.until_seen(lambda: len(decode.asked) == 6)  # there is room again
        prefill.hears.set()
        decode.hears.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 6
        metrics = await client.metrics()
    assert sorted(map(bool, tickets(decode))) == [False] * 3 + [True] * 3
    assert len(told(prefill)) == 6
    ways = {'{until="end",way="at_once"}': 3, '{until="end",way="in_turn"}': 4}
    assert ways.items() <= counts(metrics, "pd_proxy_seconds_count").items()


# -- the prefill leg fails ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "act",
    [says(b"busy", 503), says(b"busy", 429), says(b"oh", 500), dies, no_http, says(b"<html>")],
    ids=["503", "429", "500", "dies", "no_http", "html"],
)
async def test_a_prefill_leg_that_fails_ends_the_decode_leg_and_both_leave_anew(act: Act) -> None:
    bad, good = Fake(offers("bad"), after(act)), Fake(offers("good"))
    decode = Fake(ANSWERS, hangs, ANSWERS)
    async with taught([bad, good], [decode]) as client:
        bad.hears.clear()
        asked = asyncio.create_task(client.ask())
        await begins(decode)
        bad.hears.set()
        assert (await asked)[0] == 200
        await leaves(decode)
        assert [len(it.asked) for it in (bad, good, decode)] == [1, 1, 2]
        assert tickets(decode) == tickets(bad) + tickets(good)
        assert len({*tickets(decode), ""}) == 3
        assert [it["asynckv_follow"]["engine_id"] for it in told(decode)] == ["bad", "good"]
        ends = (await client.ready())[1]
        assert not any(it["outstanding"] or it["ahead"] for it in (*ends["prefill"], *ends["decode"]))


async def test_without_params_the_decode_leg_ends_and_the_prompt_is_computed_there() -> None:
    prefill, decode = Fake(offers(), says({"choices": [], "kv_transfer_params": None})), Fake(ANSWERS, hangs, ANSWERS)
    async with taught([prefill], [decode]) as client:
        assert (await client.ask())[0] == 200
        await leaves(decode)
        metrics = await client.metrics()
    assert decode.asked[1][0] == ASK
    assert (len(told(prefill)), len(decode.asked)) == (1, 2)
    assert counts(metrics, "pd_proxy_decode_only_total") == {'{cause="no_params"}': 1}
    assert metrics['pd_proxy_seconds_count{until="end",way="alone"}'] == 1


async def test_a_prefill_leg_that_takes_too_long_ends_the_decode_leg() -> None:
    prefill, decode = Fake(offers(), hangs), Fake(ANSWERS, hangs, ANSWERS)
    async with taught([prefill], [decode], IMPATIENT["prefill"]) as client:
        assert (await client.ask())[0] == 200
        await leaves(decode)
        assert counts(await client.metrics(), "pd_proxy_decode_only_total") == {'{cause="prefill_failed"}': 1}
    assert decode.asked[1][0] == ASK
    assert len(told(prefill)) == 1


@pytest.mark.parametrize("at", ["prefill", "decode"])
async def test_what_one_engine_refuses_ends_both_legs_and_is_passed_on(at: str) -> None:
    refuses = says(error("BadRequestError", 400), 400)
    prefill = Fake(offers(), after(refuses) if at == "prefill" else hangs)
    decode = Fake(ANSWERS, refuses if at == "decode" else hangs)
    async with taught([prefill], [decode]) as client:
        prefill.hears.clear()
        asked = asyncio.create_task(client.ask())
        await begins(decode)
        prefill.hears.set()
        assert await asked == (400, error("BadRequestError", 400))
        await leaves(decode if at == "prefill" else prefill)
        assert not counts(await client.metrics(), "pd_proxy_engine_faults_total")
    assert (len(told(prefill)), len(decode.asked)) == (1, 1)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (says(b"oh", 500), "failed"),
        (says(b"busy", 503), "overloaded"),
        (dies, "lost"),
        (says(error("BadRequestError", 400), 400), ""),
        (says({"kv_transfer_params": None}), ""),
        (offers("another"), ""),
    ],
    ids=["500", "503", "dies", "400", "no_params", "identity"],
)
async def test_a_prefill_leg_that_fails_after_the_first_piece_is_only_counted(act: Act, why: str) -> None:
    prefill, decode = Fake(offers(), after(act)), Fake(ANSWERS, streams(EVENT, FINISH, DONE))
    async with taught([prefill], [decode]) as client:
        prefill.hears.clear()
        async with client.streaming() as answer:
            assert await answer.content.readexactly(len(EVENT)) == EVENT
            prefill.hears.set()

            async def has_ended() -> bool:
                return not (await client.ready())[1]["prefill"][0]["outstanding"]

            await client.until(has_ended)
            decode.go_on.set()
            assert await answer.content.readexactly(len(FINISH)) == FINISH
            decode.go_on.set()
            assert await answer.content.readexactly(len(DONE)) == DONE
            decode.go_on.set()
            assert await answer.content.read() == b""
        metrics = await client.metrics()
        if act.__qualname__.startswith("offers"):  # nobody reads what this engine has lent
            await client.until_given_back(prefill)
    assert (len(told(prefill)), len(decode.asked)) == (1, 1)
    faults = counts(metrics, "pd_proxy_engine_faults_total")
    assert faults == ({f'{{engine="{prefill.url}",role="prefill",why="{why}"}}': 1} if why else {})
    assert not counts(metrics, "pd_proxy_retries_total")
    assert metrics['pd_proxy_requests_total{path="/v1/completions",status="200"}'] == 2


async def test_a_prefill_leg_that_fails_with_the_first_piece_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_now(loan: Loan) -> None:
        assert loan.follower is not None
        loan.follower.reschedule(0)
        reads(loan)

    reads = Loan.reads
    prefill, decode = Fake(offers()), Fake(ANSWERS, follows(streams(EVENT, DONE)))
    async with taught([prefill], [decode]) as client:
        monkeypatch.setattr(Loan, "reads", fails_now)
        async with client.streaming() as answer:
            assert await answer.content.readexactly(len(EVENT)) == EVENT
            for piece in (DONE, b""):
                await client.ready()  # the end would have come by now
                decode.go_on.set()
                assert await answer.content.read(len(DONE)) == piece
    assert len(told(prefill)) == len(decode.asked) == 1


# -- the decode leg fails ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_apt", [True, False], ids=["follows", "in_turn"])
@pytest.mark.parametrize("act", [says(b"full", 503), says(b"full", 429), None], ids=["503", "429", "unreachable"])
async def test_another_decode_engine_follows_the_same_ticket_if_one_has_no_room(act: Act | None, is_apt: bool) -> None:
    prefill, full, other = Fake(offers()), Fake(ANSWERS, act or hangs), Fake(ANSWERS)
    async with contextlib.AsyncExitStack() as life:
        await life.enter_async_context(full.running())
        async with taught([prefill], [full, other], attempts=1) as client:
            if act is None:
                await life.aclose()
            first, second = client.router.engines.of("decode")
            second.is_apt = is_apt
            prefill.hears.clear()
            asked = asyncio.create_task(client.ask())
            await client.until_seen(lambda: other.asked if is_apt else first.faults)
            await client.until_seen(lambda: prefill.asked)
            prefill.hears.set()
            assert (await asked)[0] == 200
            assert (len(told(prefill)), len(full.asked), len(other.asked)) == (1, int(act is not None), 1)
            (ticket,) = tickets(prefill)
            assert tickets(full) == [ticket][: len(full.asked)]
            assert tickets(other) == [ticket if is_apt else ""]
            assert told(other)[0].get("asynckv", {}).get("number") == (None if is_apt else 1)
            assert given_back(prefill) == []


async def test_without_another_decode_engine_the_prefill_leg_ends_too_and_what_it_lends_is_given_back() -> None:
    prefill, full = Fake(offers()), Fake(ANSWERS, says(b"full", 503))
    async with taught([prefill], [full]) as client:
        prefill.hears.clear()
        status, told_client = await client.ask()
        assert (status, told_client["error"]["type"]) == (503, "overloaded")
        prefill.hears.set()  # it is waited for a little, because it may just have lent
        await client.until_given_back(prefill)
    assert (len(lent(prefill)), len(full.asked)) == (1, 1)


FAULTS = [says(b"oh", 500), dies, no_http, says(b"<html>"), says_events(b""), REFUSES, hangs]


@pytest.mark.parametrize("act", FAULTS, ids=["500", "dies", "no_http", "html", "empty", "kv_transfer_error", "silent"])
async def test_after_any_other_fault_both_legs_end_and_the_prompt_is_prefilled_anew(act: Act) -> None:
    prefill, bad, good = Fake(offers(), hangs, offers()), Fake(ANSWERS, act), Fake(ANSWERS)
    async with taught([prefill], [bad, good]) as client:
        asked = asyncio.create_task(client.ask())
        await begins(prefill)
        await begins(bad)
        if act is hangs:
            client.fall_silent(bad)
        assert (await asked)[0] == 200
        await leaves(prefill)
        # An engine that only reports that it could not fetch the KV cache may be asked again.
        assert (len(told(prefill)), len(bad.asked) + len(good.asked)) == (2, 2)
        first, second = tickets(prefill)
        assert tickets(bad)[0] == first != second
        assert second in (*tickets(good), *tickets(bad))
        assert list(counts(await client.metrics(), "pd_proxy_retries_total").values()) == [1]


async def test_what_a_prefill_leg_lends_after_the_decode_leg_failed_is_given_back() -> None:
    prefill, decode = Fake(offers()), Fake(ANSWERS, says(b"oh", 500), hangs)
    async with taught([prefill], [decode], is_computed=False, attempts=1) as client:
        prefill.hears.clear()
        assert (await client.ask())[0] == 502
        prefill.hears.set()
        await client.until_given_back(prefill)
    assert (len(lent(prefill)), len(decode.asked)) == (1, 1)


async def test_a_decode_leg_that_fails_after_the_offer_has_its_params_given_back() -> None:
    prefill, bad, good = Fake(offers()), Fake(ANSWERS, after(says(b"oh", 500))), Fake(ANSWERS)
    async with taught([prefill], [bad, good]) as client:
        bad.hears.clear()
        asked = asyncio.create_task(client.ask())
        await begins(bad)
        engine = client.router.engines.of("decode")[0]
        await client.until_seen(lambda: prefill.asked and not engine.ahead)
        bad.hears.set()
        assert (await asked)[0] == 200
        await client.until_seen(lambda: given_back(prefill))
        assert (given_back(prefill), len(told(prefill))) == ([1], 2)
        assert tickets(bad) + tickets(good) == tickets(prefill)
    assert len(good.asked) == 1


async def test_silence_of_a_decode_leg_counts_from_the_answer_of_the_prefill_leg_on() -> None:
    limits = Limits(connect_s=5, prefill_s=HEAR_S, silence_s=0.1, health_s=1000)
    prefill, decode = Fake(offers()), Fake(ANSWERS, hangs)
    async with taught([prefill], [decode], limits, warn_s=0.05) as client:
        prefill.hears.clear()
        with capture_logs() as events:
            asked = asyncio.create_task(client.ask({**ASK, "stream": True}))
            await begins(decode)

            async def waits_long() -> bool:
                (longest,) = (await client.ready())[1]["silent_longest"]
                assert longest["engine"] == prefill.url
                return bool(longest["silent_s"] >= 5 * limits.silence_s)

            await client.until(waits_long)
            assert not decode.left.is_set()
            assert [(it["role"], it["engine"]) for it in events if it["event"] == "request_waits"] == [
                ("prefill", prefill.url)
            ]
            began = asyncio.get_running_loop().time()
            prefill.hears.set()
            status, answer = await asked
            assert asyncio.get_running_loop().time() - began > limits.silence_s
        assert (status, answer["error"]["type"]) == (504, "timeout")
        await leaves(decode)
    assert (len(lent(prefill)), len(decode.asked)) == (1, 1)


# -- clients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["asked", "lent"])
async def test_a_client_that_leaves_ends_both_legs_and_gives_back_what_is_lent(at: str) -> None:
    prefill, decode = Fake(offers()), Fake(ANSWERS, hangs)
    async with taught([prefill], [decode]) as client:
        engine = client.router.engines.of("decode")[0]
        prefill.hears.clear()
        asked = asyncio.create_task(client.ask())
        await begins(decode)
        if at == "lent":
            prefill.hears.set()
            await client.until_seen(lambda: prefill.asked and not engine.ahead)
        asked.cancel()
        await leaves(decode)
        prefill.hears.set()
        await client.until_given_back(prefill)
        await client.until_counted("pd_proxy_in_flight", 0)
        assert not engine.ahead
    assert (len(lent(prefill)), len(decode.asked)) == (1, 1)


async def test_a_client_that_leaves_ends_a_prefill_that_goes_on_for_long() -> None:
    prefill, decode = Fake(offers(), hangs), Fake(ANSWERS, hangs)
    async with taught([prefill], [decode]) as client:
        asked = asyncio.create_task(client.ask())
        await begins(prefill)
        await begins(decode)
        asked.cancel()
        await leaves(decode)
        began = asyncio.get_running_loop().time()
        await leaves(prefill)
        assert asyncio.get_running_loop().time() - began < 1 + HEAR_S / 3
    assert (len(told(prefill)), len(decode.asked)) == (1, 1)


async def test_a_prompt_that_decode_has_cached_is_answered_at_once_and_its_prefill_ends() -> None:
    prefill, decode = Fake(offers(), hangs), Fake(ANSWERS, SAYS)
    async with taught([prefill], [decode]) as client:
        assert (await client.ask())[0] == 200
        await leaves(prefill)
        assert (await client.metrics())['pd_proxy_seconds_count{until="end",way="at_once"}'] == 1
    assert (len(told(prefill)), len(decode.asked)) == (1, 1)


# -- what is seen of it -------------------------------------------------------------------------------------------


async def test_log_metrics_and_readiness_tell_both_ways_apart() -> None:
    prefill, decode = Fake(offers()), Fake(ANSWERS)
    with capture_logs() as events:
        async with routed([prefill], [decode]) as client:
            for at_once in (False, True):
                state = {"trouble": "", "outstanding": 0, "at_once": at_once, "ahead": 0}
                _, ready = await client.ready()
                assert ready["prefill"] == [{"engine": prefill.url, **state}]
                assert ready["decode"] == [{"engine": decode.url, **state}]
                assert (await client.ask())[0] == 200
            await client.ask(b"{")
            metrics = await client.metrics()
    ended = [event for event in events if event["event"] == "request"]
    assert [event.get("way") for event in ended] == ["in_turn", "at_once", None]
    assert (ended[1]["prefill"], ended[1]["decode"], ended[1]["attempts"]) == (prefill.url, decode.url, 1)
    assert counts(metrics, "pd_proxy_seconds_count") == {
        '{until="prefill",way="in_turn"}': 1,
        '{until="end",way="in_turn"}': 1,
        '{until="prefill",way="at_once"}': 1,
        '{until="end",way="at_once"}': 1,
        '{until="end",way="none"}': 1,
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_two_thousand_clients_at_once_are_served_both_ways_and_each_prompt_is_computed_once() -> None:
    prefill, decode = Fake(offers()), Fake(ANSWERS, follows(SAYS_EVENTS))
    async with taught([prefill], [decode], Limits()) as client:
        await serve_two_thousand(client)
        assert len(told(prefill)) == len(decode.asked) == 2000
        assert set(map(bool, tickets(decode))) == {True, False}


@pytest.mark.parametrize("offered", ["another", "none", "busy", "refused"])
async def test_a_follower_that_is_refused_first_waits_for_what_the_prefill_leg_says(offered: str) -> None:
    """The ranks refuse followers of an incarnation that is gone at once, and the prefill's answer comes later."""
    none = says({"choices": [], "kv_transfer_params": None})
    act = {"another": offers("p2"), "none": none, "busy": says(b"full", 503), "refused": says(error("bad", 400), 400)}[
        offered
    ]
    refuses = says({"error": {"message": "no offer", "type": "kv_transfer_error", "code": 500}}, 500)
    prefill, decode = Fake(offers(), after(act)), Fake(ANSWERS, refuses, SAYS)
    async with taught([prefill], [decode]) as client:
        asking = asyncio.create_task(client.ask())
        async with asyncio.timeout(HEAR_S):
            while await apt(client, "decode") != [False]:  # its fault is counted
                pass
        assert not asking.done()
        prefill.hears.set()
        status = (await asking)[0]
    assert len(told(prefill)) == 1
    assert status == (400 if offered == "refused" else 200)
    assert len(told(decode)) == 1 + (offered != "refused")


async def test_a_leg_that_generates_is_not_ahead_any_more() -> None:
    prefill, decode = Fake(offers(), after(offers())), Fake(ANSWERS, streams(EVENT, FINISH, DONE))
    async with taught([prefill], [decode], ahead=1) as client:
        asking = asyncio.create_task(client.ask({**ASK, "stream": True}))
        async with asyncio.timeout(HEAR_S):
            while (await client.ready())[1]["decode"][0]["ahead"] or not told(decode):
                pass
        await cancel(asking)


@pytest.mark.parametrize("how", [400, 500, "event", "abort"])
@pytest.mark.parametrize("at", ["prefill", "decode"])
async def test_a_ticket_is_shown_by_no_error_log_or_metric(at: str, how: int | str) -> None:
    async def echoes(fake: Fake, request: web.Request) -> web.StreamResponse:
        if isinstance(how, int):
            return web.Response(body=b"bad: " + await request.read(), status=how)
        said = f"bad: {ticket_of(await request.json())}"
        if how == "abort":
            return web.json_response({"choices": [{"text": said, "finish_reason": "abort"}]})
        return web.Response(body=b'data: {"error": {"message": "%s"}}\n\n' % said.encode(), content_type=EVENTS)

    prefill = Fake(offers(), echoes if at == "prefill" else offers())
    decode = Fake(ANSWERS, echoes if at == "decode" else hangs)
    with capture_logs() as events:
        async with taught([prefill], [decode], is_computed=False, attempts=1) as client:
            async with client.streaming(stream=how == "event") as answer:
                assert answer.status == (400 if how == 400 else 502)
                text = await answer.text()
            async with client.session.get(f"{client.url}/metrics") as answer:
                text += await answer.text()
            text += str(await client.ready()) + str(events)
    (ticket,) = tickets(prefill)
    assert "bad: " in text or (at, how) == ("prefill", "event"), "its answer is no stream, and is not quoted"
    assert len(ticket) == 32
    assert not [ticket[i : i + 8] for i in range(25) if ticket[i : i + 8] in text]
