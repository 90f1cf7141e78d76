"""Both legs at once between two engines: the decode engine follows a ticket, and is told when its prompt is lent."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.vllm.engines import Dead, Engine, Reply, Server, continued
from tests.vllm.pairs import ASKED, Pair, settle
from tests.vllm.setups import Connector, Setup
from tests.vllm.test_together import DRAFTED, read
from tests.vllm.test_trouble import SHORT, SLEEPS, judge
from tests.vllm.zoo import MODELS

LENGTHS = (2, 31, 33, 64, 100, 200)


def following(lease_s: float = 20.0, follow_s: float = 30.0) -> Connector:
    pull: Any = SHORT["pull"]
    lease = {"lease_s": lease_s, "parked_s": 4.0}
    return Connector(extra={**SHORT, "lease": lease, "pull": {**pull, "timeout_s": 20.0, "follow_s": follow_s}})


FOLLOWS = following()
EXPIRES = following(lease_s=3.0)
"""For tests in which nobody reads what is lent."""


class Legs:
    """A router that knows of both engines that they can, and sends both legs at once."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        (answer,) = pair.prefilled(tokens := pair.prompt(40))
        self.identity = self._of(answer)
        pair.decode.finish(asked := pair.ask(tokens, {**answer, "asynckv_ask": True}, 1))
        assert asked.params == {"asynckv_follows": True}

    @staticmethod
    def _of(answer: Mapping[str, Any]) -> dict[str, Any]:
        assert answer["asynckv_offers"] is True
        names = ("engine_id", "tp_size", "pp_size", "endpoints", "num_token_shards")
        return {name: answer["asynckv"][name] for name in names if name in answer["asynckv"]}

    @staticmethod
    def ticket() -> str:
        return secrets.token_hex(16)

    def prefill(self, tokens: list[int], ticket: str) -> Reply:
        return self.pair.prefill.add(self.pair.name("p"), tokens, 1, {**ASKED, "asynckv_ticket": ticket})

    def decode(
        self, tokens: list[int], ticket: str, most: int = 6, engine: Engine | None = None, **fields: Any
    ) -> Reply:
        follow = {"do_remote_prefill": True, "asynckv_follow": {"ticket": ticket, **self.identity}}
        return (engine or self.pair.decode).add(self.pair.name("d"), tokens, most, follow, **fields)

    def generate(self, *prompts: list[int], most: int = 6) -> None:
        """Send both legs of each, the decode leg first every other time, and compare what was said."""
        replies = []
        for number, tokens in enumerate(prompts):
            ticket = self.ticket()
            if number % 2:
                self.prefill(tokens, ticket)
            replies.append(self.decode(tokens, ticket, most))
            if not number % 2:
                self.prefill(tokens, ticket)
        self.pair.decode.finish(*replies)
        for tokens, reply in zip(prompts, replies, strict=True):
            assert (reply.reason, reply.tokens) == ("length", continued(tokens, most))

    def settle(self) -> None:
        self.pair.settle(60.0)


def start(server: Server, name: str = "dense", connector: Connector = FOLLOWS, **fields: Any) -> Legs:
    return Legs(Pair.start(server, setup_of(name, connector, **fields)))


def setup_of(name: str, connector: Connector = FOLLOWS, **fields: Any) -> Setup:
    model = MODELS[name]
    has_prefixes = model.mamba_mode == "align" or not model.has_state
    return replace(Setup("prefill", model, connector, prefix_caching=has_prefixes, num_blocks=256), **fields)


def last(legs: Legs) -> str:
    return f"d-{legs.pair.count}"


def steps_on(engine: Engine, count: int = 3) -> dict[str, Any]:
    """Wait until the engine has made some steps, and return its state."""
    before = engine.ask("state")["steps"]
    return engine.until(lambda state: state["steps"] >= before + count)


# -- every byte -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("name", MODELS)
def test_every_byte_arrives(server: Server, name: str, is_async: bool) -> None:
    legs = start(server, name, async_scheduling=is_async)
    prompts = [legs.pair.prompt(count) for count in LENGTHS]
    legs.generate(*prompts, most=40)
    assert read(legs.pair.decode) > 0
    legs.generate(*(tokens + legs.pair.prompt(40) for tokens in prompts))  # a part of each is cached
    legs.settle()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [((1, 1), (2, 1)), ((2, 1), (1, 1)), ((2, 1), (2, 1)), ((1, 2), (1, 1)), ((1, 1), (1, 2))],
    ids=lambda ranks: f"tp{ranks[0]}pp{ranks[1]}",
)
def test_every_byte_arrives_between_engines_of_several_ranks(
    server: Server, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    one = setup_of("dense", tp=prefill[0], pp=prefill[1])
    legs = Legs(Pair.start(server, one, replace(one, tp=decode[0], pp=decode[1])))
    for _ in range(3):
        legs.generate(*(legs.pair.prompt(count) for count in LENGTHS))
    legs.settle()


@pytest.mark.parametrize("model", DRAFTED)
def test_every_byte_arrives_with_drafts(server: Server, model: str) -> None:
    setup = Setup("prefill", DRAFTED[model], FOLLOWS, drafts=3, num_blocks=512)
    legs = Legs(Pair.start(server, setup))
    legs.generate(*(legs.pair.prompt(count) for count in LENGTHS), most=40)
    assert read(legs.pair.decode) > 0
    for engine in (legs.pair.decode, legs.pair.prefill):
        for wrong in engine.ask("wrong"):
            assert "layer 4 holds wrong bytes for 1 of " in wrong  # as in `test_together`
            assert model == "window"
    legs.settle()


@pytest.mark.parametrize("kind", ["inside", "dual"])
def test_every_byte_arrives_inside_of_other_connectors(server: Server, kind: str) -> None:
    dual = Connector("DualConnector", extra={"asynckv": FOLLOWS.extra, "nixl": {"kv_lease_duration": 3}})
    connector = replace(FOLLOWS, is_inside=True) if kind == "inside" else dual
    layout = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
    legs = start(server, connector=connector, environment=layout, num_blocks=256)
    legs.generate(*(legs.pair.prompt(count) for count in LENGTHS))
    legs.settle()


# -- while it waits -------------------------------------------------------------------------------------


def test_a_follower_holds_no_blocks_and_stops_nobody_while_the_prefill_is_queued(server: Server) -> None:
    legs = start(server)
    pair, ticket, tokens = legs.pair, legs.ticket(), legs.pair.prompt(200)
    pair.prefill.ask("hold")
    reply = legs.decode(tokens, ticket)
    state = steps_on(pair.decode)
    assert state["requests"] == {last(legs): "WAITING"}
    assert state["free"] == state["blocks"] - 1
    other = pair.ask(first := pair.prompt(50), None)
    pair.decode.finish(other)
    assert other.tokens == continued(first, 6)
    legs.prefill(tokens, ticket)
    steps_on(pair.decode)
    assert not reply.is_done
    pair.prefill.ask("go")
    pair.decode.finish(reply)
    assert reply.tokens == continued(tokens, 6)
    legs.settle()


def test_a_decode_leg_that_comes_late_is_offered_what_is_lent_already(server: Server) -> None:
    legs = start(server)
    ticket, tokens = legs.ticket(), legs.pair.prompt(200)
    legs.pair.prefill.finish(legs.prefill(tokens, ticket))
    legs.pair.decode.finish(reply := legs.decode(tokens, ticket))
    assert reply.tokens == continued(tokens, 6)
    assert read(legs.pair.decode) > 0
    legs.settle()


def test_a_prompt_that_is_cached_whole_begins_at_once_and_its_blocks_return(server: Server) -> None:
    legs = start(server)
    pair, ticket, tokens = legs.pair, legs.ticket(), legs.pair.prompt(129)
    pair.decode.finish(pair.ask(tokens, None))
    before = read(pair.decode)
    pair.prefill.ask("hold")
    prefill = legs.prefill(tokens, ticket)
    pair.decode.finish(reply := legs.decode(tokens, ticket))
    assert reply.tokens == continued(tokens, 6)
    pair.prefill.ask("go")
    pair.prefill.finish(prefill)
    legs.settle()
    assert read(pair.decode) == before
    (look,) = pair.prefill.ask("look")
    assert not [name for name in look["counters"] if "expired" in name], look["counters"]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_several_completions_follow_one_ticket(server: Server, steps: int) -> None:
    legs = start(server)
    pair, ticket, tokens = legs.pair, legs.ticket(), legs.pair.prompt(130)
    pair.decode.ask("hold")
    replies = []
    for _ in range(3):
        replies.append(legs.decode(tokens, ticket))
        pair.decode.ask("step", steps)
    legs.prefill(tokens, ticket)
    pair.decode.ask("go")
    pair.decode.finish(*replies)
    assert [reply.tokens for reply in replies] == [continued(tokens, 6)] * 3
    legs.settle()


# -- what ends a follow ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_prefill_leg_that_ends_without_a_loan_ends_its_follower_at_once(server: Server, policy: Any, tp: int) -> None:
    legs = start(server, policy=policy, tp=tp)
    pair, ticket, tokens = legs.pair, legs.ticket(), legs.pair.prompt(200)
    pair.prefill.ask("hold")
    legs.prefill(tokens, ticket)
    gone = f"p-{pair.count}"
    reply = legs.decode(tokens, ticket)
    steps_on(pair.decode)
    pair.prefill.ask("abort", [gone])
    pair.prefill.ask("go")
    pair.decode.finish(reply, within_s=10.0)  # of 30
    judge(policy, reply, tokens)
    late = legs.decode(tokens, ticket)
    pair.decode.finish(late, within_s=10.0)
    judge(policy, late, tokens)
    legs.settle()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_prefill_engine_dies_while_it_is_followed(server: Server, policy: Any, comes_back: bool) -> None:
    legs = start(server, policy=policy)
    pair, ticket, tokens = legs.pair, legs.ticket(), legs.pair.prompt(200)
    pair.prefill.ask("hold")
    legs.prefill(tokens, ticket)
    reply = legs.decode(tokens, ticket)
    steps_on(pair.decode)
    pair.prefill.kill()
    if comes_back:
        (pair.prefill,) = server.start(pair.prefill.setup)
    pair.decode.finish(reply)
    judge(policy, reply, tokens)
    late = legs.decode(pair.prompt(200), legs.ticket())
    pair.decode.finish(late)
    assert late.reason == ("error" if policy == "fail" else "length")
    if comes_back:
        Legs(pair).generate(pair.prompt(100))
    pair.settle(60.0)


def test_a_client_leaves_while_its_request_follows_and_nothing_is_left(server: Server) -> None:
    legs = start(server, connector=EXPIRES)
    pair, ticket, tokens = legs.pair, legs.ticket(), legs.pair.prompt(200)
    pair.prefill.ask("hold")
    prefill = legs.prefill(tokens, ticket)
    legs.decode(tokens, ticket)
    steps_on(pair.decode)
    pair.decode.ask("abort", [last(legs)])
    settle(pair.decode, 1.0)
    pair.prefill.ask("go")
    pair.prefill.finish(prefill)
    legs.settle()


def test_a_decode_engine_dies_and_another_follows_the_same_ticket(server: Server) -> None:
    one = setup_of("dense")
    prefill, first, other = server.start(one, replace(one, name="first"), replace(one, name="other"))
    legs = Legs(Pair(prefill, first))
    ticket, tokens = legs.ticket(), legs.pair.prompt(200)
    prefill.ask("hold")
    legs.prefill(tokens, ticket)
    legs.decode(tokens, ticket)
    steps_on(first)
    first.kill()
    reply = legs.decode(tokens, ticket, engine=other)
    prefill.ask("go")
    other.finish(reply)
    assert reply.tokens == continued(tokens, 6)
    for engine in (prefill, other):
        settle(engine, 60.0)


def test_a_ticket_that_never_comes_runs_out(server: Server) -> None:
    legs = start(server, connector=following(follow_s=1.0))
    reply = legs.decode(legs.pair.prompt(100), legs.ticket())
    legs.pair.decode.finish(reply, within_s=10.0)
    assert reply.reason == "error"
    legs.settle()


def test_a_strangers_ticket_is_not_offered_to_it(server: Server) -> None:
    """The prefill leg of one ticket ends, and the follower of another waits on."""
    legs = start(server, connector=EXPIRES)
    pair, tokens = legs.pair, legs.pair.prompt(100)
    reply = legs.decode(tokens, legs.ticket())
    pair.prefill.finish(legs.prefill(tokens, legs.ticket()))
    steps_on(pair.decode, 20)
    assert not reply.is_done
    pair.decode.ask("abort", [last(legs)])
    legs.settle()


@pytest.mark.parametrize("name", ["dense", "mamba2-align"])
@pytest.mark.parametrize("is_prefill", [False, True])
def test_clients_leave_at_every_step_on_either_side(server: Server, name: str, is_prefill: bool) -> None:
    legs = start(server, name, EXPIRES, policy="recompute", max_num_batched_tokens=64)
    pair = legs.pair
    for steps in range(7):
        ticket, tokens = legs.ticket(), pair.prompt(200)
        engine = pair.prefill if is_prefill else pair.decode
        engine.ask("hold")
        if is_prefill:
            legs.prefill(tokens, ticket)
            gone = f"p-{pair.count}"
            reply = legs.decode(tokens, ticket)
        else:
            legs.prefill(tokens, ticket)
            reply = legs.decode(tokens, ticket)
            gone = last(legs)
        engine.ask("step", steps)
        engine.ask("abort_in_step", [gone])
        engine.ask("go")
        if is_prefill:
            pair.decode.finish(reply)
            assert reply.tokens == continued(tokens, 6)
    legs.generate(pair.prompt(100))
    legs.settle()


# -- sleep ----------------------------------------------------------------------------------------------


@SLEEPS
@pytest.mark.parametrize("mode", ["keep", "wait"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_decode_engine_sleeps_while_its_request_follows(server: Server, mode: str, policy: Any) -> None:
    """The sleep ends the follow, and the request fails as a load does once the engine is awake."""
    legs = start(server, connector=EXPIRES, policy=policy)
    pair, ticket, tokens = legs.pair, legs.ticket(), legs.pair.prompt(200)
    running = pair.ask(first := pair.prompt(30), None, 200)
    reply = legs.decode(tokens, ticket)
    steps_on(pair.decode)
    pair.decode.ask("sleep", mode)
    assert pair.decode.ask("state")["requests"][last(legs)] == "WAITING"
    while_asleep = legs.decode(other := pair.prompt(100), legs.ticket())
    pair.decode.until(lambda state: not state["has_work"])
    pair.decode.ask("wake")
    pair.decode.finish(running, reply, while_asleep, within_s=20.0)
    assert running.tokens == continued(first, 200)
    judge(policy, reply, tokens)
    judge(policy, while_asleep, other)
    pair.prefill.finish(legs.prefill(tokens, ticket))
    Legs(pair).generate(pair.prompt(100))
    legs.settle()


@SLEEPS
@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_prefill_engine_sleeps_while_it_is_followed(server: Server, mode: str) -> None:
    legs = start(server, policy="recompute")
    pair, ticket, tokens = legs.pair, legs.ticket(), legs.pair.prompt(200)
    pair.prefill.ask("hold")
    legs.prefill(tokens, ticket)
    reply = legs.decode(tokens, ticket)
    steps_on(pair.decode)
    pair.prefill.ask("sleep", mode)
    pair.prefill.ask("go")
    pair.decode.finish(reply, within_s=20.0)
    judge("recompute", reply, tokens)
    pair.prefill.ask("wake")
    Legs(pair).generate(pair.prompt(100))
    legs.settle()


# -- junk -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["list", "no ticket", "other engine", "no rank", "itself"])
def test_what_cannot_be_followed_ends_no_engine(server: Server, what: str) -> None:
    legs = start(server, policy="recompute")
    pair, tokens = legs.pair, legs.pair.prompt(100)
    good = {"ticket": legs.ticket(), **legs.identity}
    pair.decode.finish(own := pair.decode.add(pair.name("x"), pair.prompt(40), 1, ASKED))
    follow: Any = {
        "list": [good],
        "no ticket": legs.identity,
        "other engine": {**good, "engine_id": "another"},
        "no rank": {**good, "endpoints": [{**good["endpoints"][0], "address": "tcp://127.0.0.1:1"}]},
        "itself": {**good, **legs._of(own.params or {})},
    }[what]
    reply = pair.decode.add(pair.name("d"), tokens, 6, {"do_remote_prefill": True, "asynckv_follow": follow})
    pair.decode.finish(reply)
    assert reply.tokens == continued(tokens, 6)
    legs.generate(pair.prompt(50))
    legs.settle()


def test_a_decode_engine_that_ends_is_not_waited_for(server: Server) -> None:
    legs = start(server)
    legs.decode(legs.pair.prompt(100), legs.ticket())
    steps_on(legs.pair.decode)
    assert legs.pair.decode.ask("close") < 5.0
    with pytest.raises(Dead):
        legs.pair.decode.ask("state", within_s=1.0)
    settle(legs.pair.prefill, 60.0)
