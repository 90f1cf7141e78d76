"""A decode engine that reads from engines of `NixlConnector` and of `AsyncKVConnector`; either of them may die."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.vllm.conftest import OURS, THEIRS
from tests.vllm.engines import Engine, Reply, Server, continued
from tests.vllm.pairs import ASKED, Pair, settle
from tests.vllm.setups import Connector, Setup
from tests.vllm.test_trouble import SHORT
from tests.vllm.zoo import MODELS

LENGTHS = (2, 31, 33, 64, 100, 200)
EXTRA = {"asynckv": SHORT, "nixl": {"kv_lease_duration": 3}}
DUAL = Connector("DualConnector", extra=EXTRA)
KINDS = {
    "asynckv": replace(OURS, extra=SHORT),
    "nixl": replace(THEIRS, extra=EXTRA["nixl"]),
    "dual": DUAL,
    "dual-as-nixl": replace(DUAL, extra={**EXTRA, "lend_as": "nixl"}),
}
DS = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
"""The order that `NixlConnector` insists on; vLLM chooses it by the connector's name."""


def setup_of(kind: str, model: str = "dense", **fields: Any) -> Setup:
    setup = Setup(kind, MODELS[model], KINDS[kind], environment=DS, max_num_batched_tokens=256)
    return replace(setup, **{"policy": "recompute", **fields})


def start(server: Server, model: str = "dense", **fields: Any) -> tuple[Pair, Pair]:
    """Start a prefill engine of each connector, and a decode engine; `fields` are of the latter."""
    ours, theirs = setup_of("asynckv", model), setup_of("nixl", model)
    ours, theirs, decode = server.start(ours, theirs, setup_of("dual", model, **fields))
    pairs = Pair(ours, decode), Pair(theirs, decode, seed=1)
    pairs[1].count = 10_000  # request ids are the decode engine's
    return pairs


def ask_all(*pairs: Pair, lengths: tuple[int, ...] = LENGTHS, most: int = 6) -> list[tuple[list[int], Reply]]:
    """Prefill prompts everywhere, and send them to the decode engine in turns."""
    prompts = [[pair.prompt(count) for count in lengths] for pair in pairs]
    given = [pair.prefilled(*each) for pair, each in zip(pairs, prompts, strict=True)]
    return [
        (prompts[j][i], pair.ask(prompts[j][i], given[j][i], most))
        for i in range(len(lengths))
        for j, pair in enumerate(pairs)
    ]


def check(engine: Engine, asked: list[tuple[list[int], Reply]], most: int = 6) -> None:
    engine.finish(*(reply for _, reply in asked))
    for tokens, reply in asked:
        assert (reply.reason, reply.tokens) == ("length", continued(tokens, most))


@pytest.mark.parametrize("fields", [{}, {"tp": 2}, {"async_scheduling": True}], ids=["", "tp2", "overlapping"])
@pytest.mark.parametrize("model", ["dense", "mla", "window", "mamba2-align"])
def test_every_byte_arrives_from_engines_of_either_connector(
    server: Server, model: str, fields: dict[str, Any]
) -> None:
    pairs = start(server, model, **fields)
    for _ in range(2):
        check(pairs[0].decode, ask_all(*pairs, most=20), 20)
    for pair in pairs:
        pair.settle()
