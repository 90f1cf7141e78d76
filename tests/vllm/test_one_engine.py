"""What judges must itself be right: an engine without a connector finds in its caches what it wrote there."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.vllm.engines import Server, continued, prompt
from tests.vllm.setups import Setup
from tests.vllm.zoo import MODELS


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_async", [False, True], ids=["in-turn", "async-scheduling"])
def test_an_engine_reads_what_it_wrote_with_prefix_hits_and_preemption(
    server: Server, name: str, is_async: bool
) -> None:
    model = MODELS[name]
    has_cache = model.mamba_mode == "align" or not model.has_state
    setup = Setup(
        "alone", model, None, num_blocks=24, max_model_len=320, prefix_caching=has_cache, async_scheduling=is_async
    )
    (engine,) = server.start(setup)
    rng = random.Random(7)
    first = prompt(rng, 130)
    prompts = [first, first[:64] + prompt(rng, 50), *(prompt(rng, rng.randrange(1, 200)) for _ in range(8))]
    replies = [engine.add(f"r{i}", tokens, 40) for i, tokens in enumerate(prompts)]
    engine.finish(*replies)
    for tokens, reply in zip(prompts, replies, strict=True):
        assert reply.tokens == continued(tokens, 40)
    assert engine.ask("wrong") == []
    state = engine.ask("state")
    assert state["free"] == state["blocks"] - 1


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["dense", "mla", "mamba2-align"])
def test_ranks_share_the_work(server: Server, name: str, tp: int, pp: int) -> None:
    (engine,) = server.start(replace(Setup("alone", MODELS[name], None), tp=tp, pp=pp))
    rng = random.Random(7)
    prompts = [prompt(rng, count) for count in (1, 31, 32, 33, 100)]
    replies = [engine.add(f"r{i}", tokens, 20) for i, tokens in enumerate(prompts)]
    engine.finish(*replies)
    for tokens, reply in zip(prompts, replies, strict=True):
        assert reply.tokens == continued(tokens, 20)
    assert engine.ask("wrong") == []


def test_a_wrong_byte_is_found(server: Server) -> None:
    (engine,) = server.start(Setup("alone", MODELS["dense"], None))
    tokens = prompt(random.Random(7), 70)
    engine.ask("hold")
    reply = engine.add("r", tokens, 20)
    engine.ask("step", 1)
    engine.ask("scribble")
    engine.ask("go")
    engine.finish(reply)
    assert "layer 0 holds wrong bytes for 70 of" in engine.ask("wrong")[0]
