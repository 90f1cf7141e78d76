"""The cost of a warm small pull in Python calls: few, on either side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import count_calls

MOST = {"decode": 123, "prefill": 46}
"""Calls per pull of everything above the ports. What counts is CPU time (`--cpu`); these tell where it went."""
MOST_CHANGES = {"decode": 80, "prefill": 35}
"""Calls per pull into another file than that of the call before: a reader turns so many pages."""


def test_a_small_pull_makes_few_calls(capsys: pytest.CaptureFixture[str]) -> None:
    count_calls.main(warm=20, pulls=20, functions=0, to_json="-")
    found = json.loads(capsys.readouterr().out)
    for side, most in MOST.items():
        assert 20 < found[side] <= most
        assert 20 < found["changes"][side] <= MOST_CHANGES[side]
        assert found[side] == pytest.approx(sum(n for name, n in found["files"].items() if name.startswith(side)), 0.1)


def test_functions_are_listed_from_the_most_called_down(capsys: pytest.CaptureFixture[str]) -> None:
    count_calls.main(warm=2, pulls=4, functions=1, to_json="")
    out = capsys.readouterr().out
    assert "engine/driver.py:Driver._turn" in out
    assert "core/lease.py" in out


def test_cpu_of_a_pull_is_compared_with_another_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    here = Path(count_calls.PACKAGE).parent
    count_calls.show_cpu(here, rounds=2, warm=1, pulls=4)
    first, second, ratio = capsys.readouterr().out.splitlines()
    assert first.partition(" (")[0].startswith(f"{here}: ")
    assert second.partition(":")[0] == str(here)
    assert float(ratio.split()[5]) > 0.0
