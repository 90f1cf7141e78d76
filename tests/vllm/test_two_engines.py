"""Two engines: what the prefill engine stored is what the decode engine reads, and nothing is left behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.vllm.engines import Server, continued
from tests.vllm.models import Attention, Model
from tests.vllm.pairs import Pair
from tests.vllm.setups import Connector, Setup
from tests.vllm.zoo import ATTENTION, MODELS

LENGTHS = (2, 31, 32, 33, 64, 65, 100, 200)
"""Tokens of prompts: around the ends of blocks of 32, and longer than a window."""


def setup_of(name: str, connector: Connector, **fields: object) -> Setup:
    model = MODELS[name]
    has_prefixes = model.mamba_mode == "align" or not model.has_state
    return replace(Setup("prefill", model, connector, prefix_caching=has_prefixes), **fields)  # type: ignore[arg-type]


def check(pair: Pair, most: int = 6) -> None:
    """Prompts of all lengths arrive whole, and nothing is left."""
    pair.generate(*(pair.prompt(count) for count in LENGTHS), most=most)
    pair.settle()


@pytest.mark.parametrize("name", MODELS)
def test_every_byte_arrives(server: Server, connector: Connector, name: str) -> None:
    pair = Pair.start(server, setup_of(name, connector))
    for count in LENGTHS:
        pair.generate(pair.prompt(count))
    check(pair, most=40)


@pytest.mark.parametrize("name", ["dense", "mamba2-align", "window"])
def test_every_byte_arrives_while_steps_overlap(server: Server, connector: Connector, name: str) -> None:
    pair = Pair.start(server, setup_of(name, connector, async_scheduling=True))
    check(pair, most=40)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [((1, 1), (2, 1)), ((2, 1), (1, 1)), ((2, 1), (2, 1)), ((1, 2), (1, 2)), ((1, 2), (1, 1)), ((1, 1), (1, 2))],
    ids=lambda ranks: f"tp{ranks[0]}pp{ranks[1]}",
)
@pytest.mark.parametrize("name", ["dense", "mla", "window", "mamba2-align", "gdn-align"])
def test_every_byte_arrives_between_engines_of_several_ranks(
    server: Server, connector: Connector, name: str, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    one = setup_of(name, connector, tp=prefill[0], pp=prefill[1])
    pair = Pair.start(server, one, setup_of(name, connector, tp=decode[0], pp=decode[1]))
    check(pair)


def test_one_head_that_two_ranks_share_is_read_by_both(server: Server, connector: Connector) -> None:
    model = Model(layers=(Attention(heads=1),) * 4, block_size=32)
    one = Setup("prefill", model, connector, tp=2)
    pair = Pair.start(server, one, replace(one, tp=1))
    check(pair)
    other = Pair.start(server, replace(one, tp=1), one)
    check(other)


def mixed(*heads: int, said: int | None = None, **of_last: Any) -> Model:
    """Two layers of each number of heads; `of_last` is said of the last two."""
    layers = [Attention(heads=each, **of_last if i == len(heads) - 1 else {}) for i, each in enumerate(heads)]
    return Model(layers=tuple(x for x in layers for _ in range(2)), block_size=32, said_heads=said)


HEADS = {
    "gemma-4": mixed(1, 4, said=4, window=48),
    "mimo": mixed(1, 2, said=1, window=48),
    "draft": mixed(1, 2, said=1, is_draft=True),
    "said-too-many": mixed(1, 2, said=4),
}
"""Models whose layers differ in their KV heads, and what the configuration says of all of them."""


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("name", HEADS)
def test_layers_may_differ_in_their_heads(
    server: Server, connector: Connector, name: str, prefill: int, decode: int
) -> None:
    one = Setup("prefill", HEADS[name], connector, tp=prefill)
    pair = Pair.start(server, one, replace(one, tp=decode))
    check(pair)


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC", "BHLNC"])
def test_memory_may_be_in_another_order_on_the_other_side(server: Server, connector: Connector, layout: str) -> None:
    one = setup_of("dense", connector)
    pair = Pair.start(server, replace(one, layout=layout), one)
    check(pair)


@pytest.mark.parametrize("name", MODELS)
def test_only_what_a_prefix_cache_lacks_is_read(server: Server, connector: Connector, name: str) -> None:
    pair = Pair.start(server, setup_of(name, connector))
    base = pair.prompt(150)
    for cut in (0, 1, 32, 64, 96, 100, 127, 128, 150):
        # The decode engine has seen the cut's tokens; the prefill engine sees some of them for the second time.
        pair.generate(base[:cut] + pair.prompt(20 + cut), most=3)
    pair.settle()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [64, 65, 90, 129])
def test_a_prompt_that_is_cached_whole_leaves_no_blocks_behind(
    server: Server, connector: Connector, name: str, count: int
) -> None:
    pair = Pair.start(server, setup_of(name, connector))
    tokens = pair.prompt(count)
    local = pair.ask(tokens, None, 40)
    pair.decode.finish(local)
    pair.generate(tokens, most=3)
    pair.generate(tokens, most=3)
    pair.settle()


@pytest.mark.parametrize("name", MODELS)
def test_a_request_without_params_is_computed_where_it_arrives(server: Server, connector: Connector, name: str) -> None:
    pair = Pair.start(server, setup_of(name, connector))
    tokens = pair.prompt(100)
    replies = [pair.ask(tokens, None), pair.prefill.add("plain", tokens, 6)]
    pair.decode.finish(replies[0])
    pair.prefill.finish(replies[1])
    assert [reply.tokens for reply in replies] == [continued(tokens, 6)] * 2
    pair.settle()


@pytest.mark.parametrize("name", ATTENTION)
def test_requests_that_are_preempted_read_once_and_then_compute(
    server: Server, connector: Connector, name: str
) -> None:
    one = setup_of(name, connector, max_model_len=320)
    pair = Pair.start(server, one, replace(one, num_blocks=26))
    prompts = [pair.prompt(count) for count in (60, 100, 31, 130, 90, 64)]
    all_params = pair.prefilled(*prompts)
    replies = [pair.ask(tokens, params, 150) for tokens, params in zip(prompts, all_params, strict=True)]
    pair.decode.finish(*replies)
    for tokens, reply in zip(prompts, replies, strict=True):
        assert reply.tokens == continued(tokens, 150)
    pair.settle()


def test_a_long_prompt_that_is_prefilled_in_chunks_arrives_whole(server: Server, connector: Connector) -> None:
    one = setup_of("dense", connector, max_num_batched_tokens=64)
    pair = Pair.start(server, one)
    pair.generate(pair.prompt(500), pair.prompt(300), pair.prompt(64))
    pair.settle()


def test_forty_eight_requests_of_eight_mebibytes_at_once(server: Server, connector: Connector) -> None:
    # 32 layers of 16 KiB a block, 16 blocks a request.
    model = Model(layers=(Attention(heads=4, size=32),) * 32, block_size=32)
    pair = Pair.start(server, Setup("prefill", model, connector, num_blocks=1000, max_num_batched_tokens=8192))
    pair.generate(*(pair.prompt(510) for _ in range(48)), most=2)
    pair.settle()
