"""The script that measures stalls: what it does not take."""

from __future__ import annotations

import json

import pytest

from scripts.bench import loop_stall


@pytest.mark.nixl
@pytest.mark.slow
def test_a_short_run_prints_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert loop_stall.main(["bulk", "--requests", "16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gbytes"] == 0.27
    assert found["lag_ms"]["samples"] > 0
