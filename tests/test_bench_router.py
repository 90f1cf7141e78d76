"""The script that compares routers, and what it is for: no client of a burst is refused."""

from __future__ import annotations

import json

import pytest

from scripts.bench import router


@pytest.mark.slow
@pytest.mark.parametrize(("case", "spin"), [("burst-2000", "0"), ("burst-1000", "8")])
def test_all_clients_of_a_burst_are_served(case: str, spin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert router.main([case, "--rounds", "1", "--spin", spin]) == 0
    plain, ours = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [plain["router"], ours["router"]] == ["plain", "asynckv"]
    assert ours["served"] == plain["served"] == [ours["of"]]


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert router.main(["burst-3"]) == 2
    assert "unknown scenario 'burst-3'; choose from steady, burst-500" in capsys.readouterr().err
