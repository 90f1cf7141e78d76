"""Side by side with vLLM: what both sides share is checked here, and asynckv's side runs; vLLM's needs vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.bench import vs_vllm as bench_vs_vllm
from scripts.bench.versus.workload import Checks, Memory, Setup, Window, slots, sources


def a_setup(blocks: int = 16) -> Setup:
    return Setup(role="consumer", layers=2, block_bytes=4096, num_blocks=blocks, seed=3, folder="")


def test_both_sides_get_the_same_requests() -> None:
    assert sources(3, 64, 4) == sources(3, 64, 4) != sources(4, 64, 4)
    for ids in sources(3, 64, 4):
        assert len(set(ids)) == 4
        assert all(0 <= i < 64 for i in ids)
    assert sorted(i for ids in slots(3, 4, 5) for i in ids) == list(range(20))


def test_a_wrong_byte_is_seen() -> None:
    memory, remote = Memory(a_setup()), Memory(a_setup(blocks=64))
    remote.fill()
    window = Window(first=0, requests=3, blocks=2, concurrency=3)
    checks = Checks(memory, window, remote_blocks=64)
    for number in range(3):
        local = checks.free.popleft()
        for mine, theirs in zip(memory.arrays, remote.arrays, strict=True):
            mine[local] = theirs[checks.source(number)]
        if number == 1:
            memory.arrays[1][local[1], 7] ^= np.uint64(1)
        checks.done(number, local, 0.5)
    found = checks.result()
    assert (found["requests"], found["checked"], found["wrong"]) == (3, 3, 1)
    assert found["p50_ms"] == 500.0


@pytest.mark.parametrize("option", ["--vllm-python", "--vllm-source"])
def test_without_vllm_it_says_how_to_get_it(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_vs_vllm.main(["--vllm-python", sys.executable, option, "/nowhere"]) == 2
    assert f"vs_vllm: {option} /nowhere is not there; `tox run -e vllm` makes it" in capsys.readouterr().err


@pytest.mark.nixl
@pytest.mark.slow
def test_asynckvs_side_moves_the_right_bytes(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    argv = ["--contenders", "asynckv", "--cases", "2x4096:3:4,2x4096:2:1", "--steps-ms", "0,1"]
    assert bench_vs_vllm.main([*argv, "--rounds", "2", "--seconds", "0.02", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["case"], row["step_ms"]) for row in rows] == [
        ("2x4096:3:4", 0.0),
        ("2x4096:3:4", 1.0),
        ("2x4096:2:1", 0.0),
        ("2x4096:2:1", 1.0),
    ]
    for row in rows:
        for each in row["rounds"]:
            assert all(
                0 < found["prefill_cpu_us"] == pytest.approx(found["both_cpu_us"] - found["cpu_us"])
                for found in each.values()
            )
            assert all(max(found["faults"], found["prefill_faults"]) < 5 for found in each.values())
            assert all(found["wrong"] == found["failed"] == 0 < found["checked"] for found in each.values())
