"""The queue in front of a rank's reads: whoever asks beforehand whether he would wait is told what then happens."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from asynckv.core.flow import Admission, FlowKey
from asynckv.core.types import Address, PullId

KEYS: list[FlowKey] = [((Address(f"tcp://{name}"), "start"),) for name in "ab"]


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["expect", "ask", "next", "leave"]), st.integers(0, 1), st.integers(0, 9))),
)
@settings(max_examples=200)
def test_who_would_have_to_wait_is_who_waits(total: int, window: int, steps: list[Any]) -> None:
    """Those who are on their way have their places already: they came first."""
    admission = Admission(total, window)
    stage: dict[PullId, tuple[str, int]] = {}
    for arrival, (what, which, number) in enumerate(steps):
        pull = PullId(f"{number}")
        at, where = stage.get(pull, ("", which))
        if what == "expect" and not at:
            admission.expect(KEYS[where], pull)
            stage[pull] = "coming", where
        elif what == "ask" and at == "coming":
            admission.ask(KEYS[where], pull, 0, arrival)
            stage[pull] = "waiting", where
        elif what == "leave":
            admission.leave(pull)
            stage.pop(pull, None)
        elif what == "next" and (found := admission.next()) is not None:
            stage[found] = "admitted", stage[found][1]
        for flow, key in enumerate(KEYS):
            mine = [at for at, where in stage.values() if where == flow]
            in_all = sum(at in ("coming", "admitted") for at, _ in stage.values())
            full = "waiting" in mine or mine.count("coming") + mine.count("admitted") >= window or in_all >= total
            assert admission.would_block(key) == full
