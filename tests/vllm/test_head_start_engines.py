"""A head start between two engines: pieces of a prompt travel while it is computed. Every byte is compared."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.vllm.engines import Engine, Reply, Server, continued
from tests.vllm.pairs import Pair, settle
from tests.vllm.setups import Connector, Setup
from tests.vllm.test_follow_engines import FOLLOWS, Legs, following, last, steps_on
from tests.vllm.test_together import DRAFTED
from tests.vllm.test_trouble import SLEEPS, judge
from tests.vllm.zoo import MODELS

WITHIN_S = 30.0
EARLY = Connector(extra={**FOLLOWS.extra, "head_start_tokens": 512})
EXPIRES = Connector(extra={**following(lease_s=3.0).extra, "head_start_tokens": 512})
LENGTHS = (511, 600, 1500, 2100)
SECOND_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def setup_of(name: str = "dense", block_size: int = 32, chunk: int = 64, **fields: Any) -> Setup:
    model = replace(MODELS[name], block_size=block_size)
    has_prefixes = model.mamba_mode == "align" or not model.has_state
    given: dict[str, Any] = {"model": model, "connector": EARLY, "num_blocks": 16_384 // block_size, **fields}
    given = {"max_model_len": 2432, "max_num_batched_tokens": chunk, "prefix_caching": has_prefixes} | given
    return Setup("prefill", **given)


def start(server: Server, prefill: Setup, decode: Setup | None = None) -> Legs:
    legs = Legs(Pair.start(server, prefill, decode))
    legs.pair.prefill.ask("model_time", 0.0, 0.008)
    return legs


def counted(engine: Engine) -> Counter[str]:
    total = Counter[str]()
    for rank in engine.ask("look"):
        total.update(rank.get("counters", {}))
    return total


def count(engine: Engine, what: str) -> int:
    return counted(engine)[what]


def until(engine: Engine, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline, counted(engine)
        engine.pause()


def begin(legs: Legs, tokens: list[int], most: int = 6, num_pieces: int = 1) -> Reply:
    """Both legs of a request, of which pieces were read, and which is still computed; the prefill engine is held."""
    pair, ticket = legs.pair, legs.ticket()
    before = count(pair.decode, "pieces.complete")
    pair.prefill.ask("hold")
    legs.prefill(tokens, ticket)
    reply = legs.decode(tokens, ticket, most)

    def is_read() -> bool:
        if count(pair.decode, "pieces.complete") >= before + num_pieces:
            return True
        assert pair.prefill.ask("step", 1), "it is computed, and no piece was read"
        return False

    until(pair.decode, is_read)
    assert "WAITING_FOR_REMOTE_KVS" in pair.decode.ask("state")["requests"].values()
    return reply


def computed(legs: Legs) -> str:
    """The id of the request that the prefill engine computes."""
    (name,) = legs.pair.prefill.ask("state")["requests"]
    return str(name)


# -- every byte -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", [{}, SECOND_RUNNER], ids=["first runner", "second runner"])
@pytest.mark.parametrize("is_async", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("name", MODELS)
def test_every_byte_arrives(server: Server, name: str, is_async: bool, runner: dict[str, str]) -> None:
    legs = start(server, setup_of(name, async_scheduling=is_async, environment=runner))
    prompts = [legs.pair.prompt(length) for length in LENGTHS]
    for tokens in prompts:
        legs.generate(tokens, most=40)
    legs.generate(*(tokens + legs.pair.prompt(300) for tokens in prompts))  # a part of each is cached
    zeroes = MODELS[name].has_state and bool(runner)
    assert (count(legs.pair.decode, "pieces.complete") > 0) is not zeroes
    legs.settle()


@pytest.mark.parametrize("chunk", [64, 100, 256, 600, 1000])
@pytest.mark.parametrize("sizes", [(32, 32), (16, 64), (64, 16), (32, 128)], ids=str)
def test_every_byte_arrives_with_chunks_and_blocks_of_any_size(
    server: Server, sizes: tuple[int, int], chunk: int
) -> None:
    legs = start(server, setup_of("dense", sizes[0], chunk), setup_of("dense", sizes[1], 2048))
    for length in LENGTHS:
        legs.generate(legs.pair.prompt(length))
    legs.generate(*(legs.pair.prompt(length) for length in LENGTHS))
    assert count(legs.pair.decode, "pieces.complete") > 0
    legs.settle()


RANKS = pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (2, 2)], ids=lambda ranks: f"tp{ranks[0]} to tp{ranks[1]}")


@RANKS
@pytest.mark.parametrize("sizes", [(32, 32), (16, 64), (64, 16)], ids=str)
def test_every_byte_arrives_between_engines_of_several_ranks(
    server: Server, ranks: tuple[int, int], sizes: tuple[int, int]
) -> None:
    legs = start(server, setup_of("dense", sizes[0], 72, tp=ranks[0]), setup_of("dense", sizes[1], 2048, tp=ranks[1]))
    for length in (2300, *LENGTHS):
        legs.generate(legs.pair.prompt(length))
    legs.generate(*(legs.pair.prompt(length) for length in LENGTHS))
    assert count(legs.pair.decode, "pieces.complete") > 0
    legs.settle()


@pytest.mark.parametrize("pp", [(2, 1), (1, 2)], ids=str)
def test_every_byte_arrives_between_stages(server: Server, pp: tuple[int, int]) -> None:
    legs = start(server, setup_of(pp=pp[0], chunk=200), setup_of(pp=pp[1], chunk=200))
    for length in LENGTHS:
        legs.generate(legs.pair.prompt(length))
    assert count(legs.pair.decode, "pieces.complete") > 0
    legs.settle()


@pytest.mark.parametrize("kind", ["inside", "dual"])
def test_every_byte_arrives_inside_of_other_connectors(server: Server, kind: str) -> None:
    dual = Connector("DualConnector", extra={"asynckv": EARLY.extra, "nixl": {"kv_lease_duration": 3}})
    connector = replace(EARLY, is_inside=True) if kind == "inside" else dual
    legs = start(server, setup_of(connector=connector, environment={"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}))
    for length in LENGTHS:
        legs.generate(legs.pair.prompt(length))
    assert count(legs.pair.decode, "pieces.complete") > 0
    legs.settle()


def test_an_engine_with_drafts_in_all_groups_lends_no_pieces(server: Server) -> None:
    setup = setup_of(model=DRAFTED["dense"], drafts=3)
    legs = start(server, setup)
    for length in LENGTHS:
        legs.generate(legs.pair.prompt(length), most=20)
    assert not count(legs.pair.prefill, "pieces.lent")
    legs.settle()


@pytest.mark.parametrize("is_prefill", [False, True])
def test_one_engine_without_a_head_start(server: Server, is_prefill: bool) -> None:
    none, both = setup_of(connector=FOLLOWS), setup_of()
    legs = start(server, none if is_prefill else both, both if is_prefill else none)
    legs.generate(legs.pair.prompt(2000))
    assert not count(legs.pair.decode, "pieces.complete")
    legs.settle()


@pytest.mark.parametrize("is_async", [False, True], ids=["in turn", "overlapping"])
def test_requests_of_one_prompt_are_computed_at_once(server: Server, is_async: bool) -> None:
    """vLLM's prefix cache names blocks that a step under way still writes."""
    legs = start(server, setup_of(chunk=600, async_scheduling=is_async), setup_of(prefix_caching=False))
    for length in (*LENGTHS, 2300, 2200):
        tokens = legs.pair.prompt(length)
        legs.generate(tokens, tokens, tokens)
    assert count(legs.pair.decode, "pieces.complete") > 0
    legs.settle()


# -- in mid-prompt --------------------------------------------------------------------------------------


@RANKS
@pytest.mark.parametrize("is_async", [False, True], ids=["in turn", "overlapping"])
def test_a_prompt_is_preempted_again_and_again(server: Server, ranks: tuple[int, int], is_async: bool) -> None:
    """32 chunks. The pool holds one prompt, so that blocks of pieces are overwritten at once."""
    given: dict[str, Any] = {"async_scheduling": is_async, "environment": SECOND_RUNNER if is_async else {}}
    prefill = setup_of(num_blocks=77, prefix_caching=False, tp=ranks[0], **given)
    legs = start(server, prefill, setup_of(tp=ranks[1]))
    pair = legs.pair
    for num_pieces in (1, 2, 3, 1):
        reply = begin(legs, tokens := pair.prompt(2100), num_pieces=num_pieces)
        for steps in (3, 9):
            pair.prefill.ask("preempt", computed(legs))
            pair.prefill.ask("step", steps)
        pair.prefill.ask("go")
        pair.decode.finish(reply)
        assert reply.tokens == continued(tokens, 6)
    legs.settle()


@pytest.mark.parametrize("is_planted", [False, True])
def test_a_piece_that_outlives_a_preemption_is_caught(server: Server, is_planted: bool) -> None:
    """The decode engine gives the first piece blocks when its own were computed anew with other tokens in them."""
    legs = start(server, setup_of(num_blocks=77, chunk=256, prefix_caching=False), setup_of())
    pair, ticket, tokens = legs.pair, legs.ticket(), legs.pair.prompt(2100)
    if is_planted:
        pair.prefill.ask("plant", "asynckv.embed.ledgers", "PrefillLedger", "end_pieces")
    for engine in (pair.prefill, pair.decode):
        engine.ask("hold")
    reply = legs.decode(tokens, ticket)
    pair.decode.ask("step", 1)
    legs.prefill(tokens, ticket)

    def is_offered() -> bool:
        if count(pair.prefill, "pieces.offered"):
            return True
        assert pair.prefill.ask("step", 1)
        return False

    until(pair.prefill, is_offered)
    pair.prefill.ask("preempt", computed(legs))
    pair.prefill.ask("step", 7)
    pair.decode.ask("step", 3)  # the first piece gets blocks
    until(pair.decode, lambda: bool(count(pair.decode, "pieces.complete" if is_planted else "pieces.unknown_key")))
    for engine in (pair.prefill, pair.decode):
        engine.ask("go")
    pair.decode.finish(reply)
    assert reply.tokens == continued(tokens, 6)
    assert bool(pair.decode.ask("wrong")) is is_planted
    legs.settle()


@RANKS
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_prefill_engine_dies_in_mid_prompt(server: Server, ranks: tuple[int, int], policy: Any) -> None:
    legs = start(server, setup_of(tp=ranks[0]), setup_of(tp=ranks[1], policy=policy))
    reply = begin(legs, tokens := legs.pair.prompt(2100))
    legs.pair.prefill.kill()
    legs.pair.decode.finish(reply)
    judge(policy, reply, tokens)
    legs.settle()


@RANKS
def test_a_decode_engine_dies_in_mid_prompt_and_another_takes_the_loan(server: Server, ranks: tuple[int, int]) -> None:
    one = setup_of(tp=ranks[1])
    prefill, first, other = server.start(setup_of(tp=ranks[0]), replace(one, name="first"), replace(one, name="other"))
    legs = Legs(Pair(prefill, first))
    prefill.ask("hold")
    ticket, tokens = legs.ticket(), legs.pair.prompt(2100)
    legs.prefill(tokens, ticket)
    legs.decode(tokens, ticket)

    def is_read() -> bool:
        return bool(count(first, "pieces.complete")) or not prefill.ask("step", 1)

    until(first, is_read)
    first.kill()
    reply = legs.decode(tokens, ticket, engine=other)
    prefill.ask("go")
    other.finish(reply)
    assert reply.tokens == continued(tokens, 6)
    for engine in (prefill, other):
        settle(engine, 60.0)


@RANKS
@pytest.mark.parametrize("is_async", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_prefill_leg_leaves_in_mid_prompt(
    server: Server, ranks: tuple[int, int], is_async: bool, policy: Any
) -> None:
    """Its blocks are overwritten at once by the next prompt."""
    prefill = setup_of(num_blocks=77, prefix_caching=False, tp=ranks[0], async_scheduling=is_async)
    legs = start(server, prefill, setup_of(tp=ranks[1], policy=policy))
    pair = legs.pair
    for num_pieces in (1, 2, 3):
        reply = begin(legs, tokens := pair.prompt(2100), num_pieces=num_pieces)
        pair.prefill.ask("abort" if num_pieces % 2 else "abort_in_step", [computed(legs)])
        pair.prefill.ask("go")
        legs.generate(pair.prompt(2100))
        pair.decode.finish(reply)
        judge(policy, reply, tokens)
    legs.settle()


@RANKS
def test_a_decode_leg_leaves_in_mid_prompt(server: Server, ranks: tuple[int, int]) -> None:
    legs = start(server, setup_of(tp=ranks[0], connector=EXPIRES), setup_of(tp=ranks[1]))
    pair = legs.pair
    for num_pieces in (1, 2, 3):
        begin(legs, pair.prompt(2100), num_pieces=num_pieces)
        pair.decode.ask("abort" if num_pieces % 2 else "abort_in_step", [last(legs)])
        settle(pair.decode, 10.0)  # long before the loan
        pair.prefill.ask("go")
        pair.prefill.until(lambda state: not state["has_work"])
    legs.generate(pair.prompt(2100))
    legs.settle()


@pytest.mark.parametrize("is_async", [False, True], ids=["in turn", "overlapping"])
def test_clients_leave_at_every_step_on_either_side(server: Server, is_async: bool) -> None:
    short: dict[str, Any] = {"connector": EXPIRES, "chunk": 256, "async_scheduling": is_async}
    legs = start(server, setup_of(num_blocks=77, **short), setup_of(**short, policy="recompute"))
    pair = legs.pair
    pair.prefill.ask("model_time", 0.0, 0.0)
    for steps in range(12):
        for engine in (pair.prefill, pair.decode):
            engine.ask("hold")
        ticket, tokens = legs.ticket(), pair.prompt(2100)
        legs.prefill(tokens, ticket)
        gone = f"p-{pair.count}"
        reply = legs.decode(tokens, ticket)
        for _ in range(steps):
            for engine in (pair.prefill, pair.decode):
                engine.ask("step", 1)
        if steps % 2:
            pair.prefill.ask("abort_in_step", [gone])
        else:
            pair.decode.ask("abort_in_step", [last(legs)])
        for engine in (pair.prefill, pair.decode):
            engine.ask("go")
        if steps % 2:
            pair.decode.finish(reply)
            assert reply.tokens == continued(tokens, 6)
    legs.generate(pair.prompt(2100))
    legs.settle()


@SLEEPS
@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_engines_sleep_in_mid_prompt(server: Server, mode: str) -> None:
    """Pieces do not outlive the memory of their engine."""
    legs = start(server, setup_of(policy="recompute"))
    pair = legs.pair
    reply = begin(legs, tokens := pair.prompt(2100))
    pair.prefill.ask("go")
    pair.prefill.ask("sleep", mode)
    pair.prefill.ask("wake")
    pair.decode.finish(reply)
    judge("recompute", reply, tokens)
    begin(legs := Legs(pair), pair.prompt(2100))
    pair.decode.ask("sleep", "abort")
    pair.prefill.ask("go")
    pair.decode.ask("wake")
    Legs(pair).generate(pair.prompt(1000))
    legs.settle()


def test_two_engines_with_room_for_few_prompts_read_from_each_other(server: Server) -> None:
    """A head start leaves room for the prompt that its engine computes for the other one."""
    legs = start(server, setup_of(num_blocks=4 * 66, chunk=128, max_model_len=2112))
    legs.pair.decode.ask("model_time", 0.0, 0.008)
    back = Legs(Pair(legs.pair.decode, legs.pair.prefill))
    back.pair.count = 1000
    for _ in range(4):
        replies = []
        for one in (legs, back):
            ticket, tokens = one.ticket(), legs.pair.prompt(2000)
            replies.append((one.pair.decode, one.decode(tokens, ticket), tokens))
            one.prefill(tokens, ticket)
        for engine, reply, tokens in replies:
            engine.finish(reply, within_s=10.0)
            assert reply.tokens == continued(tokens, 6)
    assert count(legs.pair.prefill, "pieces.complete")
    assert count(legs.pair.decode, "pieces.complete")
    legs.settle()


def test_requests_that_do_not_follow_are_served_as_before(server: Server) -> None:
    legs = start(server, setup_of())
    before = steps_on(legs.pair.decode, 0)
    legs.pair.generate(*(legs.pair.prompt(length) for length in LENGTHS))
    assert before["steps"] < legs.pair.decode.ask("state")["steps"]
    assert not count(legs.pair.prefill, "pieces.lent")
    legs.settle()
