"""Benchmarks inside vLLM: `vllm` measures over pages that were touched before, and `legs` sends both legs at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench import legs
from scripts.bench import vllm as bench_vllm

# 1 MiB per request: 256 pages of 4 KiB on either side.
CASE = "16x16384:4:2:random"


def test_no_page_is_touched_for_the_first_time_while_the_clock_runs(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    arguments = ["--cases", CASE, "--step", "1:2", "--others", "2", "--windows", "1", "--json", str(path)]
    assert bench_vllm.main(arguments) == 0
    report = json.loads(path.read_text())
    assert report["schema"] == "asynckv.bench_vllm/2"
    assert set(report["machine"]["versions"]) == {"vllm", "nixl", "torch"}
    (row,) = report["rows"]
    assert (row["case"], row["step"], row["others"]) == (CASE, "1:2", 2)
    assert set(row["contenders"]) == {"asynckv", "nixl"}
    for figures in row["contenders"].values():
        assert set(figures) == set(bench_vllm.COLUMNS)
        assert figures["faults"]["median"] < 50
        assert figures["prefill_faults"]["median"] < 50
        assert figures["step_p50_ms"]["median"] >= 1.0
        # Two others say a token each per step of at least 3 ms.
        assert 0 < figures["others_tokens_per_s"]["median"] <= 2 / 0.003
        assert 0 < figures["others_alone_tokens_per_s"]["median"] <= 2 / 0.003
    assert set(row["ratios"]) == set(bench_vllm.RATIOS)


def test_behind_vllms_own_server_both_legs_leave_at_once_and_prompts_are_computed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert legs.main(["1000:1", "--rounds", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    for way in legs.WAYS:
        assert found[way]["prefills"] == found[way]["requests"] == legs.REQUESTS["1000:1"]
        assert found[way]["gap_p50_ms"] > 0
        assert not found[way].keys() & {"computed_by_decode", "given_back"}
    assert "at_once" not in found["in_turn"]
    assert found["at_once"]["at_once"] == legs.REQUESTS["1000:1"]
