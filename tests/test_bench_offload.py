"""The bench of offloading: it moves bytes over NIXL and to files, and says what they are worth."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from scripts.bench import offload as bench_offload
from scripts.bench import offload_copies
from scripts.bench.offload_copies import ABOUT

ROUNDED = 0.0006
"""Error of a figure that is told with three digits."""

SMALL = ["--blocks", "2", "--layers", "3", "--heads", "1", "--rounds", "3"]


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("order", "descriptors", "least", "status"), [("nhd", 6.0, 0.0, 0), ("cross-nhd", 0.5, math.inf, 1)]
)
def test_every_way_is_measured(
    order: str,
    descriptors: float,
    least: float,
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However fast this machine is: all of it is enough if nothing is asked for, and nothing if all is."""
    monkeypatch.setattr(offload_copies, "LEAST", least)
    options = [*SMALL, "--order", order, "--runs", "--folder", str(tmp_path), "--json", "-"]
    assert bench_offload.main(options) == status
    report = json.loads(capsys.readouterr().out)
    assert list(report["ways"]) == list(ABOUT)
    moved = report["blocks"] * report["block_bytes"]
    for each in report["ways"].values():
        for name in ("gb_per_s", "raw_gb_per_s", "of_raw", "request_ms"):
            assert each[name]["rounds"] == 3
            assert 0 < each[name]["low"] <= each[name]["median"] <= each[name]["high"]
        speed, took = each["gb_per_s"]["median"], each["request_ms"]["median"]
        assert speed * took == pytest.approx(moved / 1e6, abs=ROUNDED * (speed + took + ROUNDED))
    assert report["block_bytes"] == 2 * 3 * 16 * 256
    assert report["descriptors_per_block"] == descriptors
    assert 0 < report["lookup_us"]["low"] <= report["lookup_us"]["median"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nixl
def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_copies, "LEAST", math.inf)
    assert bench_offload.main([*SMALL, "--host-only"]) == 1
    said = capsys.readouterr().out
    assert "store" in said
    assert "write" not in said
    assert "6 descriptors and" in " ".join(said.split())
    assert " no " in said
    assert " yes " not in said


@pytest.mark.parametrize(("low", "high", "said"), [(0.9, 1.1, "yes"), (0.8, 0.95, "maybe"), (0.7, 0.89, "no")])
def test_less_than_the_floor_is_said_only_where_it_is_sure(low: float, high: float, said: str) -> None:
    assert offload_copies.met({"low": low, "high": high}) == said
