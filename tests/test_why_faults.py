"""Faults of real processes while the service runs: what is wrong is named, or said not to be known; nothing else is."""

from __future__ import annotations

import os

import pytest

from tests.lab.why_live import CAUSES, FREEZER, MISSED, RIGHT, WRONG, Injected, Look, examine_all

pytestmark = [pytest.mark.anyio, pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(300)]

LEFT_TO_THE_COMMAND = [
    "the_only_decode_engine_killed",
    "decode_killed_before_it_heard",
    "decode_restarted_under_its_name",
    "prefill_restarted_under_its_name",
    "a_decode_rank_killed_after_its_announcement",
    "decode_stopped_before_it_heard",
    "decode_loop_blocked_until_now",
    "prefill_loop_was_blocked",
    "a_network_that_swallows_everything",
    "a_network_that_is_cut_for_good",
    "a_geometry_that_does_not_fit",
    "blocks_that_another_pull_holds",
    "a_queue_that_is_full",
    "params_that_a_router_garbled",
    "params_sent_to_two_engines",
    "params_sent_twice",
    "a_listeners_key_that_is_not_known",
    "the_only_decode_engine_closed_in_order",
    "a_decode_rank_that_never_pulls",
    "healthy_engines_that_idle",
    "cancelled_by_its_caller",
    "withdrawn_by_the_prefill_side",
]
"""They have much in common with others, and each takes its seconds."""


async def test_what_is_wrong_is_named_and_nothing_else() -> None:
    assert set(LEFT_TO_THE_COMMAND) < set(CAUSES)
    found: dict[str, list[Look]] = {}
    may_freeze = os.access(FREEZER, os.W_OK)
    names = [x for x in CAUSES if x not in LEFT_TO_THE_COMMAND and (may_freeze or "paused" not in x)]
    await examine_all(Injected, names, 2, found.__setitem__)
    wrong = [(name, x.way, x.said) for name, looks in found.items() for x in looks if x.verdict in (WRONG, MISSED)]
    assert wrong == []
    with_logs = {name: {x.verdict for x in looks if x.way in ("logs", "both")} for name, looks in found.items()}
    assert [name for name, verdicts in with_logs.items() if RIGHT not in verdicts] == []
