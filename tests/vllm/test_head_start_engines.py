"""A head start between two engines: pieces of a prompt travel while it is computed. Every byte is compared."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.vllm.engines import Engine, Server, continued
from tests.vllm.pairs import Pair
from tests.vllm.setups import Connector, Setup
from tests.vllm.test_follow_engines import FOLLOWS, Legs
from tests.vllm.zoo import MODELS

EARLY = Connector(extra={**FOLLOWS.extra, "head_start_tokens": 512})


def setup_of(name: str = "dense", **fields: Any) -> Setup:
    given = {"max_model_len": 4096, "max_num_batched_tokens": 96, "num_blocks": 400} | fields
    return replace(Setup("prefill", MODELS[name], EARLY), **given)


def start(server: Server, prefill: Setup, decode: Setup | None = None) -> Legs:
    return Legs(Pair.start(server, prefill, decode))


def counted(engine: Engine) -> Counter[str]:
    total = Counter[str]()
    for rank in engine.ask("look"):
        total.update(rank.get("counters", {}))
    return total


def test_smoke(server: Server) -> None:
    legs = start(server, setup_of())
    pair = legs.pair
    pair.prefill.ask("model_time", 0.0, 0.01)
    prompts = [pair.prompt(count) for count in (2000, 600, 2111)]
    for tokens in prompts:
        ticket = legs.ticket()
        legs.prefill(tokens, ticket)
        pair.decode.finish(reply := legs.decode(tokens, ticket))
        assert (reply.reason, reply.tokens) == ("length", continued(tokens, 6))
        print({k: v for k, v in counted(pair.decode).items() if "pieces" in k or "bytes" in k or "pulls" in k})
        print({k: v for k, v in counted(pair.prefill).items() if "pieces" in k or "offers" in k})
    legs.settle()
