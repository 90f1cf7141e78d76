"""What one warm small pull costs in Python calls: few, and counted the same each time."""

from __future__ import annotations

import pytest

from scripts import count_calls
from tests.engines import needs_python_core

MOST = {"prefill": 80}
"""Calls of the core alone; what the engine adds comes on top."""


@needs_python_core
def test_a_small_pull_makes_few_calls() -> None:
    first, second = (count_calls.count(20) for _ in range(2))
    assert first.by_function == second.by_function
    for side, most in MOST.items():
        calls = sum(n for (where, _), n in first.by_entry.items() if where == side) / 20
        assert 20 < calls <= most
        assert calls == sum(n for (where, _), n in first.by_function.items() if where == side) / 20


def test_what_is_counted_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert count_calls.main(["--pulls", "5", "--functions"]) == 0
    out = capsys.readouterr().out
    assert "prefill" in out
    if "rank.RankCore.lend" not in out:
        pytest.skip("the core is compiled, and its calls are not seen")
    assert "lease.Lease.receive" in out
    with pytest.raises(SystemExit):
        count_calls.main(["--pulls", "0"])
