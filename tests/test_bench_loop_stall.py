"""The script that measures stalls: what it does not take."""

from __future__ import annotations

import sys

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
def test_bad_values_are_argparses_errors(
    argv: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["loop_stall", "bulk", *argv])
    with pytest.raises(SystemExit) as caught:
        loop_stall.main()
    assert caught.value.code == 2
    assert says in capsys.readouterr().err
