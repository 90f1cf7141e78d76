"""Tickets and followers in vLLM's own scheduler: how each of them can go, and what the workers are asked for.

Nothing computes here. A test says what the workers report, and looks at orders, tokens and free blocks.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from asynckv.embed.orders import Announce, Cancel, Failed, Follow, Lend, Offer, Pull, Reclaim, WithdrawTicket
from asynckv.errors import NoOffer
from asynckv.integrations.vllm.connector import AsyncKVConnector
from asynckv.integrations.vllm.handover import FollowReports
from asynckv.integrations.vllm.scheduler import REPORT_S
from tests.vllm.schedulers import DENSE, HYBRID, WINDOW, Group, Side, Told
from tests.vllm.test_scheduler import FORGETFUL, SHAPES, is_clean, num_read, prompt_of, settle

WHERE = "asynckv.integrations.vllm.scheduler"
tickets = (f"{number:032x}" for number in itertools.count(0xA5_0000))


class Pair:
    """A prefill and a decode engine's scheduler, and a router that sends both legs at once."""

    def __init__(self, groups: tuple[Group, ...] = DENSE, **fields: Any) -> None:
        self.prefill, self.decode = Side(groups, name="prefill"), Side(groups, name="decode", **fields)
        self.ticket = next(tickets)

    @property
    def follow(self) -> dict[str, Any]:
        """What the decode leg brings: the prefill engine's identity, with the ticket."""
        identity = {"engine_id": "prefill", "tp_size": 1, "pp_size": 1, "endpoints": [self.prefill.endpoint()]}
        return {"do_remote_prefill": True, "asynckv_follow": {"ticket": self.ticket, **identity}}

    def add(self, name: str, prompt: list[int], most: int = 1, **fields: Any) -> Any:
        return self.decode.add(name, prompt, json.loads(json.dumps(self.follow)), most, **fields)

    def following(self, num_tokens: int = 100, most: int = 1) -> list[int]:
        """Let a request begin to follow, and return its prompt."""
        self.add("a", prompt := prompt_of(num_tokens), most)
        self.decode.step()
        return prompt

    def lent(self, prompt: list[int]) -> dict[str, Any]:
        """Prefill the prompt, and return its params as they come from the prefill engine's rank."""
        self.prefill.add(self.ticket, prompt, {"do_remote_decode": True, "asynckv_ticket": self.ticket})
        params = self.prefill.ended(self.ticket).params[self.ticket]["asynckv"]
        assert self.prefill.step().only(Lend).ticket == self.ticket
        return dict(json.loads(json.dumps(params)))

    def offer(self, name: str, prompt: list[int], **fields: Any) -> FollowReports:
        return FollowReports([Offer(name, self.lent(prompt), **fields)], [])


def refusal(name: str, reason: str = "withdrawn") -> FollowReports:
    error = NoOffer("the prefill rank ended it", request_id=name, reason=reason, failed_in="follow")
    return FollowReports([], [Failed(name, error)])


def ended(told: Told) -> list[Any]:
    """The keys of what is released, and None for each follow that is given up. There are no other orders."""
    keys = []
    for order in told.orders:
        assert isinstance(order, Cancel)
        keys.append(None if order.params is None else order.params["key"])
    return keys


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr(f"{WHERE}.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture(autouse=True)
def _nothing_is_taken_by_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take no statistics, because the test does."""
    monkeypatch.setattr(AsyncKVConnector, "get_kv_connector_stats", lambda self: None)


def counted(side: Side, what: str) -> dict[str, int]:
    stats = side.half.tally.take(at_once=True)
    return {} if stats is None else stats.data[what]


# -- what engines say of themselves ---------------------------------------------------------------------


@pytest.mark.parametrize("reads", [False, True])
def test_a_decode_engine_that_is_asked_says_that_it_can_follow(reads: bool) -> None:
    pair, prompt = Pair(), prompt_of(50)
    params = {"do_remote_prefill": True, "asynckv": pair.lent(prompt)} if reads else {"do_remote_prefill": False}
    pair.decode.add("a", prompt, {**params, "asynckv_ask": True})
    pair.decode.add("b", prompt_of(50), None)
    told = [pair.decode.step(), pair.decode.step(loaded=["a"] if reads else []), pair.decode.step()]
    assert [each.params for each in told if each.params] == [{"a": {"asynckv_follows": True}}]
    assert {name for each in told for name in each.tokens} == {"a", "b"}


@pytest.mark.parametrize("asks", [True, False])
def test_a_request_that_is_lent_says_that_its_engine_can_offer(asks: bool) -> None:
    side = Side()
    side.add("a", prompt_of(50), {"do_remote_decode": True, "asynckv_ask": asks})
    answer = side.ended("a").params["a"]
    assert answer["asynckv_offers"] is True
    assert ("asynckv_follows" in answer) is asks


def test_an_engine_that_cannot_follow_does_not_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = Side(pcp=2, role="kv_producer")
    monkeypatch.delattr(AsyncKVConnector.__mro__[1], "build_connector_worker_meta")
    for side in (shares, Side()):
        side.add("a", prompt_of(50), {"asynckv_ask": True})
        assert side.ended("a").params == {}


# -- tickets --------------------------------------------------------------------------------------------


def leg(ticket: Any) -> dict[str, Any]:
    return {"do_remote_decode": True, "asynckv_ticket": ticket}


@SHAPES
def test_a_ticket_goes_with_the_order_to_lend_and_belongs_to_the_first_request(groups: tuple[Group, ...]) -> None:
    side, ticket = Side(groups), next(tickets)
    for name in "ab":
        side.add(name, prompt_of(100), leg(ticket))
    told = [side.step() for _ in range(4)]
    params = {name: answer for each in told for name, answer in each.params.items()}
    assert set(params) == {"a", "b"}
    assert ticket not in json.dumps(params)
    lends = [order for each in told for order in each.orders if isinstance(order, Lend)]
    assert {str(order.params["request_id"]): order.ticket for order in lends} == {"a": ticket, "b": ""}


def aborted(side: Side) -> None:
    side.abort("a")


def erred(side: Side) -> None:
    side.step()
    side.abort("a", RequestStatus.FINISHED_ERROR)


def preempted_for_ever(side: Side) -> None:
    side.step()
    assert side.scheduler.requests["a"].num_computed_tokens
    side.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert side.scheduler.requests["a"].status is RequestStatus.PREEMPTED
    side.abort("a")


def put_to_sleep(side: Side) -> None:
    side.step()
    side.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)  # as `pause_scheduler` with mode abort
    side.scheduler.set_pause_state(PauseState.PAUSED_NEW)


def lost_its_blocks(side: Side) -> None:
    side.half.shape = type(side.half.shape)(side.half.shape.groups, 0, has_drafts=True)
    lists = side.half._lists
    side.half._lists = lambda request, ids: lists(request, [[] for _ in ids])
    side.ended("a")


ENDS: list[Callable[[Side], None]] = [aborted, erred, preempted_for_ever, put_to_sleep, lost_its_blocks]


@pytest.mark.parametrize("end", ENDS)
def test_a_request_that_ends_without_a_loan_withdraws_its_ticket(end: Callable[[Side], None]) -> None:
    side, ticket = Side(max_batched=64), next(tickets)
    side.add("a", prompt_of(200), leg(ticket), 4)
    end(side)
    assert not side.is_idle()  # EngineCore makes the step with which the order leaves
    told = side.step()
    assert told.only(WithdrawTicket).ticket == ticket
    assert Lend not in told.kinds()
    assert side.step().orders == []
    assert is_clean(side)


def test_a_request_that_is_rejected_withdraws_its_ticket() -> None:
    """As `EngineCore.add_request` does with a request that comes while generation is paused."""
    side, ticket = Side(), next(tickets)
    request = side.add("a", prompt_of(50), leg(ticket))
    request.abort_immediately = True
    side.abort("a")
    assert side.step().only(WithdrawTicket).ticket == ticket


@pytest.mark.parametrize("ticket", ["x" * 32, "A" * 32, "0" * 31, 7, ["0" * 32], {"a": 1}, "", True])
def test_a_malformed_ticket_is_counted_and_logged_once_and_not_shown(
    ticket: Any, caplog: pytest.LogCaptureFixture
) -> None:
    side = Side()
    for name in "abc":
        side.add(name, prompt_of(50), leg(ticket))
    assert set(side.step().params) == {"a", "b", "c"}
    assert [getattr(order, "ticket", None) for order in side.step().orders] == ["", "", ""]
    assert counted(side, "computed_locally") == {"malformed": 3}
    (said,) = [record.getMessage() for record in caplog.records if "not understood" in record.getMessage()]
    assert "ticket" in said
    assert str(ticket) not in said or not ticket


def test_a_ticket_before_the_workers_are_known_changes_nothing() -> None:
    side = Side(is_connected=False)
    side.add("a", prompt_of(50), leg(next(tickets)))
    assert side.ended("a").params == {}
    assert side.step().orders == []
    assert is_clean(side)


@pytest.mark.parametrize("ticket", [None, "0" * 32])
def test_with_drafts_a_loan_leaves_out_that_it_is_written(ticket: str | None) -> None:
    side = Side(drafts=2)
    side.add("a", prompt_of(100), {"do_remote_decode": True} if ticket is None else leg(ticket))
    params = side.ended("a").params["a"]["asynckv"]
    assert not params.get("written")
    order = side.step().only(Lend)
    assert (order.params, order.ticket) == (params, ticket or "")
    side.step(sent=["a"])
    assert is_clean(side)


# -- a request that follows -----------------------------------------------------------------------------


@SHAPES
def test_a_request_follows_and_gets_blocks_when_it_was_offered(groups: tuple[Group, ...]) -> None:
    pair, prompt = Pair(groups), prompt_of(100)
    side = pair.decode
    pair.add("a", prompt, 2)
    order = side.step().only(Follow)
    assert (order.request_id, order.follow["ticket"], order.follow["engine_id"]) == ("a", pair.ticket, "prefill")
    for _ in range(3):
        assert side.step().orders == []
        assert side.num_free() == side.free_blocks
        assert not side.is_idle()
    offer = pair.offer("a", prompt)
    assert side.step(reports=offer).orders == []
    (pull,) = side.step().orders
    assert isinstance(pull, Pull)
    assert pull.params["key"] == offer.offered[0].params["key"]
    assert pull.num_tokens == 100 - side.half.shape.back_off
    side.step(loaded=["a"])
    assert side.ended("a").tokens == {"a": [7]}
    settle(side)
    assert counted(side, "prompts") == {"with_params": 1}


def test_a_pull_has_the_id_that_vllm_knows_however_often_it_is_used() -> None:
    pair = Pair()
    side = pair.decode
    for _ in range(3):
        pair.ticket, prompt = next(tickets), prompt_of(100)
        pair.add("a", prompt)
        side.step(reports=pair.offer(side.step().only(Follow).request_id, prompt))
        assert side.step().only(Pull).request_id == "a"
        side.step(loaded=["a"])
        side.ended("a")
    settle(side)


def test_a_request_that_follows_stops_nobody_else() -> None:
    pair = Pair(max_seqs=2)
    for number in range(4):
        pair.ticket = next(tickets)
        pair.add(f"f{number}", prompt_of(50))
    for number in range(3):
        pair.decode.add(f"r{number}", prompt_of(50), None)
    done = [*pair.decode.step().tokens, *pair.decode.step().tokens]
    assert done == ["r0", "r1", "r2"]


@SHAPES
def test_what_a_prefix_cache_has_is_not_read(groups: tuple[Group, ...]) -> None:
    pair, prompt = Pair(groups), prompt_of(200)
    side = pair.decode
    side.add("before", prompt[:100], None)
    side.ended("before")
    pair.add("a", prompt)
    assert Follow in side.step().kinds()
    side.step(reports=pair.offer("a", prompt))
    pull = side.step().only(Pull)
    size = groups[0][1]
    cached = 0 if groups[-1][0] == "states" and groups[-1][2] == "none" else 96
    assert num_read(pull) == -(-(200 - side.half.shape.back_off) // size) - cached // size


def test_an_offer_of_another_prompt_is_released_and_the_prompt_computed() -> None:
    pair = Pair()
    side = pair.decode
    pair.following()
    offer = pair.offer("a", prompt_of(100))
    side.step(reports=offer)
    told = side.step()
    assert told.only(Cancel).params["key"] == offer.offered[0].params["key"]
    assert Pull not in told.kinds()
    assert (told.tokens or side.step().tokens) == {"a": [7]}
    assert counted(side, "computed_locally") == {"other_prompt": 1}
    settle(side)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_follower_that_is_refused_fails_as_a_load(policy: str, asynchronous: bool) -> None:
    pair = Pair(policy=policy, asynchronous=asynchronous)
    side = pair.decode
    for reason in ("withdrawn", "withdrawn", "peer_lost"):
        pair.ticket = next(tickets)
        pair.add("a", prompt_of(100), 2)
        side.step(reports=refusal(side.step().only(Follow).request_id, reason))
        told = side.step()
        assert ended(told) == [None]  # for the other workers
        if policy == "fail":
            assert told.reasons == {"a": "error"}
        else:
            assert not told.reasons
            assert side.ended("a").reasons == {"a": "length"}
        settle(side)
    assert counted(side, "failed") == {"no_offer": 3}


@pytest.mark.parametrize("reason", ["no_offer", "engine_closed", "wrong_target"])
def test_a_refusal_by_the_first_worker_decides_and_a_later_offer_is_released(reason: str) -> None:
    pair = Pair(policy="recompute")
    side, prompt = pair.decode, pair.following()
    side.step(reports=refusal("a", reason).aggregate(offer := pair.offer("a", prompt)))
    assert ended(side.step()) == [None, offer.offered[0].params["key"]]
    side.step(reports=FollowReports([offer.offered[0]], []))  # another worker's
    assert not [order for _ in range(3) for order in side.step().orders]
    assert is_clean(side)


def test_a_late_offer_is_released() -> None:
    pair = Pair(policy="recompute")
    side, prompt = pair.decode, pair.following()
    side.step(reports=refusal("a", "no_offer"))
    for _ in range(4):
        side.step()
    assert is_clean(side)
    side.finish(side.scheduler.schedule(), reports=pair.offer("a", prompt, is_late=True))
    assert not side.is_idle()
    assert side.step().only(Cancel).params is not None
    assert is_clean(side)


def test_the_first_offer_decides_for_all_workers_and_others_are_released() -> None:
    pair = Pair()
    side, prompt = pair.decode, pair.following()
    first = pair.offer("a", prompt)
    pair.ticket = next(tickets)
    other = pair.offer("a", prompt)
    outputs = []
    for reports in (first, FollowReports([Offer("a", dict(first.offered[0].params))], []), other):
        made = ModelRunnerOutput(req_ids=[], req_id_to_index={})
        made.kv_connector_output = KVConnectorOutput(kv_connector_worker_meta=reports)
        outputs.append(made)
    merged = KVOutputAggregator(3).aggregate(outputs)
    assert merged is not None
    assert merged.kv_connector_output is not None
    side.step(reports=merged.kv_connector_output.kv_connector_worker_meta)
    told = side.step()
    assert told.only(Pull).params["key"] == first.offered[0].params["key"]
    assert told.only(Cancel).params["key"] == other.offered[0].params["key"]


# -- its own time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pause", [PauseState.UNPAUSED, PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_follower_of_which_no_worker_reports_runs_out(clock: Clock, pause: PauseState) -> None:
    """A sleep may take the report, or a rank that died. `wait` pauses new requests, and `keep` all of them."""
    pair = Pair()
    side, follow_s = pair.decode, pair.decode.half.options.pull.follow_s
    assert follow_s == 600
    pair.following()
    side.scheduler.set_pause_state(pause)
    clock.now += follow_s
    assert side.step().orders == []
    side.scheduler.set_pause_state(PauseState.UNPAUSED)
    clock.now += REPORT_S - 0.01
    assert side.step().orders == []
    clock.now += 0.02
    told = [side.step() for _ in range(3)]
    assert [order.params for each in told for order in each.orders if isinstance(order, Cancel)] == [None]
    assert {name: reason for each in told for name, reason in each.reasons.items()} == {"a": "error"}
    assert counted(side, "failed") == {"no_offer": 1}
    assert is_clean(side)


def test_an_offered_request_that_waits_long_for_its_turn_is_not_refused(clock: Clock) -> None:
    pair = Pair(max_seqs=1)
    side = pair.decode
    side.compute("first", prompt_of(10), 500)
    prompt = pair.following()
    side.step(reports=pair.offer("a", prompt))
    for _ in range(3):
        clock.now += 500.0
        assert Cancel not in side.step().kinds()
    side.abort("first")
    assert side.step().only(Pull).request_id == "a"


def test_a_follower_has_no_room_made_for_it_before_it_is_offered(clock: Clock) -> None:
    pair = Pair(num_blocks=20)
    side = pair.decode
    side.prefill("lent", prompt_of(200))
    prompt = pair.following(200)
    clock.now += 60.0
    assert side.step().orders == []
    side.step(reports=pair.offer("a", prompt))
    side.step()
    clock.now += 60.0
    assert side.step().kinds() == [Reclaim]


# -- followers that need no KV, or go -------------------------------------------------------------------


def cached(groups: tuple[Group, ...], length: int) -> tuple[Pair, list[int]]:
    """A decode engine that has computed this prompt before, and follows another engine for it."""
    pair, prompt = Pair(groups), prompt_of(length)
    pair.decode.add("before", prompt, None)
    pair.decode.ended("before")
    pair.decode.step()
    pair.add("a", prompt)
    return pair, prompt


@pytest.mark.parametrize("length", [65, 90, 129])
@pytest.mark.parametrize("groups", [DENSE, WINDOW, HYBRID], ids=["dense", "window", "hybrid"])
def test_a_prompt_that_is_cached_whole_begins_at_once_and_releases_what_it_is_offered(
    groups: tuple[Group, ...], length: int
) -> None:
    pair, prompt = cached(groups, length)
    side = pair.decode
    told = side.step()
    assert told.kinds() == [Follow, Cancel]
    assert told.only(Cancel).follows_on
    assert told.tokens == {"a": [7]}
    side.step()
    assert side.is_idle()
    offer = pair.offer("a", prompt)
    side.finish(side.scheduler.schedule(), reports=offer)
    assert side.step().only(Cancel).params["key"] == offer.offered[0].params["key"]
    assert is_clean(side)


def test_a_prompt_that_is_cached_whole_while_it_waits_begins() -> None:
    pair = Pair()
    side, prompt = pair.decode, pair.following()
    side.add("b", prompt, None)
    assert side.step().tokens == {"b": [7]}
    assert side.step().tokens == {"a": [7]}
    side.finish(side.scheduler.schedule(), reports=refusal("a"))
    settle(side)
    assert counted(side, "failed") == {}


def test_a_prompt_that_is_cached_in_part_waits() -> None:
    pair, prompt = Pair(), prompt_of(100)
    side = pair.decode
    side.add("before", prompt[:80], None)
    side.ended("before")
    pair.add("a", prompt)
    assert side.step().kinds() == [Follow]
    assert side.step().tokens == {}
    assert "a" in side.scheduler.requests


def test_a_prompt_shorter_than_a_block_waits() -> None:
    pair = Pair()
    prompt = pair.following(5)
    pair.decode.step(reports=pair.offer("a", prompt))
    assert pair.decode.step().only(Pull).num_tokens == 5


@pytest.mark.parametrize("is_told", [False, True], ids=["in its first step", "later"])
def test_a_follower_that_leaves_says_so_and_an_offer_that_crosses_it_is_released(is_told: bool) -> None:
    pair, prompt = Pair(), prompt_of(100)
    side = pair.decode
    pair.add("a", prompt)
    if is_told:
        side.step()
    side.abort("a")
    told = side.step()
    if is_told:
        assert ended(told) == [None]
    assert is_clean(side)
    side.finish(side.scheduler.schedule(), reports=(offer := pair.offer("a", prompt)))
    assert side.step().only(Cancel).params["key"] == offer.offered[0].params["key"]
    assert is_clean(side)


def test_a_follower_that_leaves_when_it_was_offered_releases_it() -> None:
    pair = Pair(max_seqs=1)
    side = pair.decode
    side.compute("first", prompt_of(10), 50)
    prompt = pair.following()
    side.step(reports=(offer := pair.offer("a", prompt)))
    side.abort("a")
    assert side.step().only(Cancel).params["key"] == offer.offered[0].params["key"]


@FORGETFUL
def test_a_follower_of_which_every_token_is_computed_begins_and_releases_what_it_is_offered(
    groups: tuple[Group, ...],
) -> None:
    pair, prompt = Pair(groups), prompt_of(100)
    side = pair.decode
    pair.add("a", prompt, prompt_logprobs=1)
    told = side.step()
    assert told.kinds() == [Follow, Cancel]
    assert told.only(Cancel).follows_on
    while not told.tokens:
        told = side.step()
    assert counted(side, "computed_locally") == {"prompt_logprobs": 1}
    side.finish(side.scheduler.schedule(), reports=pair.offer("a", prompt))
    assert side.step().only(Cancel).params is not None
    assert is_clean(side)


@pytest.mark.parametrize("marked", ["abort_immediately", "give_back", "not_asked", "not_wanted"])
def test_a_request_that_does_not_want_to_read_follows_nobody(marked: str) -> None:
    """Nothing is lent to it yet. If it released an offer, another decode engine could not read it any more."""
    pair = Pair()
    side, given = pair.decode, pair.follow
    if marked in ("not_asked", "not_wanted"):
        given["do_remote_prefill"] = None if marked == "not_asked" else False
    elif marked == "give_back":
        given["give_back"] = True
    immediately = {"abort_immediately": True} if marked == "abort_immediately" else {}
    side.add("a", prompt_of(50), given, 1, immediately)
    if immediately:
        side.abort("a")
    assert side.step().orders == []
    settle(side)
    assert counted(side, "computed_locally") == ({"not_asked": 1} if marked == "not_asked" else {})


# -- what routers send ----------------------------------------------------------------------------------


def damaged(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    def damage(follow: dict[str, Any]) -> Any:
        return {k: v for k, v in follow.items() if k != name} if value is None else {**follow, name: value}

    return damage


DAMAGES: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "no ticket": damaged("ticket", None),
    "short ticket": damaged("ticket", "5" * 31),
    "upper case": damaged("ticket", "A" * 32),
    "a ticket of another type": damaged("ticket", 7),
    "no engine": damaged("engine_id", None),
    "no endpoints": damaged("endpoints", []),
    "endpoints of another type": damaged("endpoints", [1]),
    "a size too large": damaged("tp_size", 2**40),
    "a list": lambda follow: [follow],
    "a number": lambda _: 5,
    "a text": lambda follow: json.dumps(follow),
    "nothing in it": lambda _: {},
    "false": lambda _: False,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_cannot_be_followed_is_counted_logged_once_and_never_raised(
    damage: Callable[[dict[str, Any]], Any], caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair()
    side = pair.decode
    for name in "abc":
        given = pair.follow
        side.add(name, prompt_of(50), {**given, "asynckv_follow": damage(given["asynckv_follow"])})
    told = side.step()
    assert set(told.tokens) == {"a", "b", "c"}
    assert told.orders == []
    assert counted(side, "computed_locally") == {"malformed": 3}
    said = [record.getMessage() for record in caplog.records if "not understood" in record.getMessage()]
    assert len(said) == 1
    assert pair.ticket not in caplog.text
    settle(side)


def test_no_line_and_no_count_shows_a_ticket(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    caplog.set_level("DEBUG")
    pair, prompt = Pair(policy="recompute"), prompt_of(50)
    pair.add("a", prompt)
    pair.add("b", prompt)
    pair.decode.step()
    clock.now += 700.0
    for _ in range(5):
        pair.decode.step()
    pair.decode.add("c", prompt, [pair.follow])
    pair.prefill.add("p", prompt, leg(pair.ticket))
    pair.prefill.add("q", prompt, leg(pair.ticket))
    pair.prefill.abort("p")
    for _ in range(3):
        pair.prefill.step()
        pair.decode.step()
    assert "no worker has reported" in caplog.text
    assert pair.ticket not in caplog.text
    assert pair.ticket not in repr([pair.decode.half.tally._stats.data, pair.prefill.half.tally._stats.data])


def test_params_that_came_with_a_follow_are_read_at_once() -> None:
    pair, prompt = Pair(), prompt_of(100)
    params = pair.lent(prompt)
    pair.decode.add("a", prompt, {**pair.follow, "asynckv": params})
    assert pair.decode.step().kinds() == [Pull]


def test_a_ticket_that_was_read_is_not_followed_again() -> None:
    pair = Pair(prefix_caching=False)
    side, prompt = pair.decode, pair.following()
    side.step(reports=pair.offer("a", prompt))
    side.step()
    side.step(loaded=["a"])
    side.ended("a")
    pair.add("b", prompt)
    told = side.step()
    assert told.orders == []
    assert told.tokens == {"b": [7]}
    assert counted(side, "computed_locally") == {"spent": 1}


# -- completions of one prompt --------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_completions_of_one_ticket_follow_once_and_one_reads_for_all(prefix_caching: bool) -> None:
    pair, prompt = Pair(prefix_caching=prefix_caching), prompt_of(100)
    side = pair.decode
    for name in "abc":
        pair.add(name, prompt)
    assert side.step().only(Follow).request_id == "a"
    side.step(reports=pair.offer("a", prompt))
    told = side.step()
    assert told.kinds() == [Pull]
    assert not told.tokens
    done = dict(side.step(loaded=["a"]).tokens)
    for _ in range(5):
        done |= side.step().tokens
    assert set(done) == {"a", "b", "c"}
    assert counted(side, "computed_locally") == ({} if prefix_caching else {"sibling": 2})
    assert is_clean(side)


def test_completions_of_one_ticket_fail_together() -> None:
    pair, prompt = Pair(), prompt_of(100)
    side = pair.decode
    for name in "abc":
        pair.add(name, prompt)
    side.step()
    side.step(reports=refusal("a"))
    assert set(side.step().reasons) == {"a", "b", "c"}
    assert counted(side, "failed") == {"no_offer": 3}
    settle(side)


@pytest.mark.parametrize("offered", [False, True])
def test_the_first_of_several_completions_leaves_and_the_others_are_served(offered: bool) -> None:
    """The next one follows in its place, or computes the prompt; it is never left waiting."""
    pair, prompt = Pair(policy="recompute"), prompt_of(100)
    side = pair.decode
    for name in "abc":
        pair.add(name, prompt)
    side.step()
    offer = pair.offer("a", prompt)
    side.step(reports=offer if offered else None)
    side.abort("a")
    done: dict[str, list[int]] = {}
    followed: list[str] = []
    for _ in range(8):
        told = side.step()
        followed += [order.request_id for order in told.orders if isinstance(order, Follow)]
        done |= told.tokens
    for name in followed:
        side.step(reports=FollowReports([Offer(name, offer.offered[0].params)], []))
    for _ in range(8):
        told = side.step()
        pulls = [order.request_id for order in told.orders if isinstance(order, Pull)]
        done |= told.tokens
        done |= side.step(loaded=pulls).tokens
    assert set(done) == {"b", "c"}
    assert is_clean(side)


# -- beside other connectors ----------------------------------------------------------------------------


def test_a_dual_engine_follows_engines_of_asynckv() -> None:
    pair, prompt = Pair(connector="DualConnector", is_connected=False), prompt_of(100)
    side = pair.decode
    pair.add("a", prompt)
    assert side.step().kinds() == [Follow]
    side.step(reports=pair.offer("a", prompt))
    assert side.step().only(Pull).request_id == "a"
    side.step(loaded=["a"])
    side.add("b", prompt_of(50), {"asynckv_ask": True})
    assert side.ended("b").params["b"] == {"asynckv_follows": True}


def test_a_dual_engine_that_lends_as_nixl_takes_no_ticket() -> None:
    side = Side(connector="DualConnector", extra={"lend_as": "nixl"}, is_connected=False)
    request = side.add("a", prompt_of(100), leg(next(tickets)))
    assert request.kv_transfer_params == {"do_remote_decode": True}
    assert "asynckv_offers" not in side.ended("a").params["a"]


# -- its costs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_cached", [0, 8192])
def test_a_step_with_a_thousand_followers_takes_a_millisecond(num_cached: int) -> None:
    """Of the half alone: vLLM's own look at each waiting request comes on top."""
    pair = Pair()
    requests = []
    for number in range(1000):
        pair.ticket = next(tickets)
        requests.append(pair.add(f"r{number}", [1] * 16_000 if num_cached else [number] * 30))
    connector, half = pair.decode.connector, pair.decode.half
    half.take_orders()

    def step() -> float:
        began = time.thread_time()
        for request in requests:
            connector.get_num_new_matched_tokens(request, num_cached)
        half.take_orders()
        return time.thread_time() - began

    assert connector.get_num_new_matched_tokens(requests[0], num_cached) == (None, False)
    assert any(step() < 0.001 for _ in range(300))  # about 0.4 ms, unless other processes take the caches


def test_a_step_announces_nothing_while_nothing_follows() -> None:
    """A request without a ticket: its orders are as before."""
    side, prompt = Side(), prompt_of(100)
    pair = Pair()
    params = {"do_remote_prefill": True, "asynckv": pair.lent(prompt)}
    side.add("a", prompt, params)
    assert side.step().kinds() == [Pull]
    pair.decode.add("first", prompt_of(10), None, 50)
    for _ in range(2):
        pair.decode.step()
    assert Announce not in pair.decode.step().kinds()
