"""The bench of offloading: it moves bytes over NIXL and to files, and says what they are worth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import bench_offload

SMALL = ["--blocks", "2", "--layers", "3", "--heads", "1", "--rounds", "3"]


@pytest.mark.nixl
@pytest.mark.parametrize(("order", "descriptors"), [("nhd", 6.0), ("cross-nhd", 0.5)])
def test_every_way_is_measured(
    order: str, descriptors: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*SMALL, "--order", order, "--runs", "--folder", str(tmp_path), "--json", "-"]
    assert bench_offload.main(options) in (0, 1)
    report = json.loads(capsys.readouterr().out)
    assert list(report["ways"]) == list(bench_offload.ABOUT)
    for each in report["ways"].values():
        assert each["of_raw"]["rounds"] == 3
        assert min(each[name]["low"] for name in ("gb_per_s", "raw_gb_per_s", "of_raw", "request_ms")) > 0
    assert report["block_bytes"] == 2 * 3 * 16 * 256
    assert report["descriptors_per_block"] == descriptors
    assert 0 < report["lookup_us"]["low"] <= report["lookup_us"]["median"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nixl
def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    status = bench_offload.main([*SMALL, "--host-only"])
    said = capsys.readouterr().out
    assert "store" in said
    assert "write" not in said
    assert "6 descriptors and" in " ".join(said.split())
    assert status == (1 if " no " in said else 0)
