"""The script that measures stalls: what it does not take."""

from __future__ import annotations

import json

import pytest

from scripts import loop_stall


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--requests", "0"], "--requests: '0' is no number in 1 ... 1000000"),
        (["--requests", "x"], "--requests: 'x' is no number"),
        (["--posting-threads", "99"], "--posting-threads: '99' is no number in 0 ... 16"),
        (["--posting-threads", "two"], "--posting-threads: 'two' is no number"),
    ],
)
def test_bad_values_end_with_status_2(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert loop_stall.main(["bulk", *argv]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.nixl
@pytest.mark.slow
def test_a_short_run_prints_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert loop_stall.main(["bulk", "--requests", "16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gbytes"] == 0.27
    assert found["lag_ms"]["samples"] > 0
