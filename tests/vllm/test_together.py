"""Beside what else vLLM does: offloading, drafts, data-parallel ranks, adapters. Every byte is compared."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from itertools import product

import pytest

from tests.vllm.conftest import OURS
from tests.vllm.engines import Engine, Server, continued
from tests.vllm.models import Attention, Model
from tests.vllm.pairs import Pair, settle
from tests.vllm.setups import Connector, Setup
from tests.vllm.test_offload import LENGTHS, Judge, offloading
from tests.vllm.test_seen import free_ports
from tests.vllm.test_trouble import SHORT
from tests.vllm.zoo import MODELS


def read(engine: Engine) -> int:
    """Count the bytes that an engine has read from others."""
    return sum(rank["counters"].get("bytes.read", 0) for rank in engine.ask("look"))


def both(name: str, model: str, is_last: bool) -> Setup:
    """An engine with vLLM's offloading connector and ours in its MultiConnector, in either order."""
    setup = offloading(model)
    assert setup.connector is not None
    inner = replace(setup, connector=replace(OURS, extra=SHORT)), setup
    children = [{k: v for k, v in each.connector_fields().items() if k != "engine_id"} for each in inner]
    connector = Connector("MultiConnector", None, {"connectors": children[::-1] if is_last else children})
    return replace(setup, name=f"{name}-{os.getpid()}", connector=connector)


@pytest.mark.parametrize("is_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("model", ["dense", "window", "mamba2-align"])
def test_offloading_and_ours_in_either_order(server: Server, model: str, is_last: bool) -> None:
    prefill, decode = server.start(both("prefill", model, is_last), both("decode", model, is_last))
    pair = Pair(prefill, decode)
    prompts = [pair.prompt(count) for count in LENGTHS]
    judge = Judge(pair.decode)
    pair.generate(*prompts)
    pair.settle()
    once = read(pair.decode)
    assert once > 0
    judge.forget()
    judge.generate(*prompts)  # without params, from host memory
    loaded = judge.kept()["loaded_blocks"]
    assert loaded > 0
    judge.forget()
    pair.generate(*prompts, most=20)  # whichever comes first has them; host memory has no prompt shorter than a block
    again = read(pair.decode) - once
    assert again < once if is_last else again == once
    assert (judge.kept()["loaded_blocks"] > loaded) is is_last
    pair.settle()
    pair.prefill.kill()
    judge.forget()
    judge.generate(*prompts, *judge.prompts())
    settle(pair.decode)
    judge.settle()


DRAFTED = {
    "dense": Model(layers=(*MODELS["dense"].layers, Attention(is_draft=True)), block_size=32),
    "window": Model(layers=(*MODELS["window"].layers, Attention(is_draft=True)), block_size=32),
    "mla": Model(
        layers=(*MODELS["mla"].layers, Attention(heads=1, size=64, is_mla=True, is_draft=True)), block_size=32
    ),
}
"""Models with a layer that guesses, whose KV depends on the token that follows."""


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize("model", DRAFTED)
def test_engines_that_guess_tokens_read_what_a_draft_layer_stored(server: Server, model: str, drafts: int) -> None:
    setup = Setup("prefill", DRAFTED[model], OURS, drafts=drafts, num_blocks=512)
    pair = Pair.start(server, setup)
    prompts = [pair.prompt(count) for count in LENGTHS]
    pair.generate(*prompts, most=40)
    pair.generate(*prompts, *(tokens + pair.prompt(40) for tokens in prompts), most=40)
    assert read(pair.decode) > 0
    # Where one token less is prefilled, the layer's last entry there is of the token that was sampled instead. The text
    # does not depend on it, because drafts are verified.
    for wrong in pair.decode.ask("wrong"):
        assert model == "window", wrong
        assert re.match(r"rank 0: d-\d+: layer 4 holds wrong bytes for 1 of ", wrong)
    pair.settle()


@pytest.mark.parametrize(
    ("model", "is_read"), [(MODELS["dense"], True), (DRAFTED["dense"], False)], ids=["ngram", "eagle"]
)
def test_only_the_decode_engine_guesses_and_a_draft_layer_is_on_both_sides_or_not_read(
    server: Server, model: Model, is_read: bool
) -> None:
    one = Setup("prefill", MODELS["dense"], replace(OURS, extra=SHORT), policy="recompute")
    pair = Pair.start(server, one, replace(one, model=model, drafts=3))
    pair.generate(*(pair.prompt(count) for count in LENGTHS), most=40)
    assert (read(pair.decode) > 0) is is_read
    pair.settle()


def test_data_parallel_ranks_are_engines_on_ports_that_follow(server: Server) -> None:
    def replicas(name: str) -> list[Setup]:
        connector = replace(OURS, extra={**SHORT, "bind": f"tcp://127.0.0.1:{free_ports(4)}"})
        setup = Setup(name, MODELS["dense"], connector, tp=2, policy="recompute")
        return [replace(setup, name=f"{name}_dp{i}", replica=i) for i in range(2)]

    engines = server.start(*replicas("prefill"), *replicas("decode"))
    pairs = [Pair(*each, seed=i) for i, each in enumerate(product(engines[:2], engines[2:]))]
    for i, pair in enumerate(pairs):
        pair.count = 1000 * i
        pair.generate(*(pair.prompt(count) for count in LENGTHS))
    for pair in pairs:
        pair.settle()
    engines[0].kill()
    for pair in pairs[2:]:
        pair.generate(*(pair.prompt(count) for count in LENGTHS))
        pair.settle()


def test_an_adapter_has_its_own_kv_whatever_its_number_is(server: Server) -> None:
    pair = Pair.start(server, Setup("prefill", MODELS["dense"], replace(OURS, extra=SHORT)))
    adapter, other = ("adapter", "/adapters/1"), ("adapter", "/adapters/2")
    for here, is_read in [((7, *adapter), True), ((3, *other), False), (None, False)]:
        before, tokens = read(pair.decode), pair.prompt(100)
        (params,) = pair.prefilled(tokens, adapter=(3, *adapter))
        reply = pair.ask(tokens, params, adapter=here)
        pair.decode.finish(reply)
        assert reply.tokens == continued(tokens, 6)
        assert (read(pair.decode) > before) is is_read
    pair.settle()
