"""Faults of head starts behind vLLM that a review found, each with the steps that showed it."""

from __future__ import annotations

from typing import Any

import pytest

from asynckv.core.head_start import _agreed
from asynckv.core.types import decode_params
from asynckv.embed.orders import Lend, WithdrawTicket
from asynckv.integrations.vllm import scheduler as scheduler_module
from asynckv.integrations.vllm.chain import chain_of
from tests.vllm.test_head_start import Early, Prefill, begun


def test_the_chain_of_a_prompt_is_made_once_however_many_workers_are_offered_a_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes milliseconds of a long prompt, and eight workers may report in one step."""
    pair = Early()
    prompt = pair.following(1000)
    made: list[int] = []

    def counted(request: Any, *given: Any) -> list[str]:
        made.append(1)
        return list(chain_of(request, *given))

    monkeypatch.setattr(scheduler_module, "chain_of", counted)
    reports = pair.piece("a", prompt)
    for _ in range(7):
        reports = reports.aggregate(pair.piece("a", prompt))
    pair.decode.step(reports=reports)
    assert len(made) == 1


def test_kv_from_before_a_reset_is_not_put_together_with_kv_from_after_it() -> None:
    """vLLM resets its caches when weights were updated, and computes running requests anew."""
    side = Prefill()
    ticket = begun(side)
    (piece, *_) = side.lent[ticket]
    assert side.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    side.until(lambda: "a" in side.done or bool(side.all(WithdrawTicket)))
    side.turn()
    for lend in side.all(Lend):
        assert _agreed(piece, decode_params(lend.params)) == 0, "its reader would keep what this piece brought"
