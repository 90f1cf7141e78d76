"""Faults of real processes while the service runs: what is wrong is named, or said not to be known; nothing else is."""

from __future__ import annotations

import os

import pytest

from tests.lab.why_live import CAUSES, FREEZER, RIGHT, WRONG, Look, examine_all

pytestmark = [pytest.mark.anyio, pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(400)]


async def test_what_is_wrong_is_named_and_nothing_else() -> None:
    found: dict[str, list[Look]] = {}
    needs_root = () if os.access(FREEZER, os.W_OK) else ("decode_paused_by_its_container",)
    await examine_all([x for x in CAUSES if x not in needs_root], 2, found.__setitem__)
    wrong = [(name, x.way, x.said) for name, looks in found.items() for x in looks if x.verdict == WRONG]
    assert wrong == []
    unseen = [
        name for name, looks in found.items() if RIGHT not in {x.verdict for x in looks if x.way in ("logs", "both")}
    ]
    assert unseen == []
