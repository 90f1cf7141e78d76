"""A prefill and a decode engine, the router between them, and what must hold once nothing is left to do."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.vllm.engines import Engine, Reply, Server, continued, prompt
from tests.vllm.setups import Setup

ASKED = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a router asks of a prefill engine, whichever connector it has."""


class Pair:
    """Two engines, and a router."""

    def __init__(self, prefill: Engine, decode: Engine, seed: int = 0) -> None:
        self.prefill, self.decode = prefill, decode
        self.rng = random.Random(seed)
        self.count = 0

    @classmethod
    def start(cls, server: Server, prefill: Setup, decode: Setup | None = None, seed: int = 0) -> Pair:
        """Start both; the decode engine is like the prefill engine, unless it is described."""
        one, other = server.start(
            replace(prefill, name="prefill"), replace(prefill if decode is None else decode, name="decode")
        )
        return cls(one, other, seed)

    def name(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}-{self.count}"

    def prompt(self, count: int) -> list[int]:
        return prompt(self.rng, count)

    def prefilled(self, *prompts: Sequence[int], **fields: Any) -> list[Mapping[str, Any]]:
        """Have prompts prefilled; returns what came out for each."""
        replies = [self.prefill.add(self.name("p"), tokens, 1, ASKED, **fields) for tokens in prompts]
        self.prefill.finish(*replies)
        for reply in replies:
            assert reply.reason == "length", reply
            assert reply.params is not None
        return [dict(reply.params or {}) for reply in replies]

    def ask(self, tokens: Sequence[int], params: Mapping[str, Any] | None, most: int = 6, **fields: Any) -> Reply:
        """Send a request to the decode engine."""
        return self.decode.add(self.name("d"), tokens, most, params, **fields)

    def generate(self, *prompts: Sequence[int], most: int = 6) -> list[Reply]:
        """Prefill and decode, and compare what was said."""
        all_params = self.prefilled(*prompts)
        replies = [self.ask(tokens, params, most) for tokens, params in zip(prompts, all_params, strict=True)]
        self.decode.finish(*replies)
        for tokens, reply in zip(prompts, replies, strict=True):
            assert reply.reason == "length", reply
            assert reply.tokens == continued(tokens, most)
        return replies

    def settle(self, within_s: float = 30.0) -> None:
        """Nothing is left: no request, no block, no lease, nothing wrong in any cache."""
        for engine in (self.prefill, self.decode):
            if not engine.is_dead:
                settle(engine, within_s)


def settle(engine: Engine, within_s: float = 30.0) -> None:
    """Wait until an engine has nothing left to do; none of it may depend on a step that nobody makes."""
    state = engine.until(lambda state: not state["requests"] and not state["has_work"], within_s)
    # Block 0 is the null block, which nobody gets.
    assert state["free"] == state["blocks"] - 1, (engine.setup.name, state)
    assert state["unreported"] == [], (engine.setup.name, state)
    assert engine.ask("wrong") == []
    deadline = time.monotonic() + within_s
    while left := [each for each in engine.ask("look") if each and (each["requests"] or each["holds"])]:
        assert time.monotonic() < deadline, (engine.setup.name, left)
        engine.pause()
