"""The soak itself: a small one on real NIXL and ZMQ, and whether its judges are awake."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.lab import soak


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.lab.soak", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_three_thousand_transfers_with_faults_leave_nothing_behind() -> None:
    done = run("--transfers", "3000", "--faults", "5%", "--seed", "3")
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["good"] and not result["wrong"]  # noqa: PT018
    assert sum(result["outcomes"].values()) == 3000
    assert {name.split(":")[0] for name in result["faults"]} == soak.FAULTS.keys()
    assert result["forgets"] == 1
    assert result["compared_bytes"] > 5e6
    for point in result["points"]:
        assert not point["prefill"]["left"]
        assert not point["decode"]["left"]


def sample(**changes: Any) -> dict[str, Any]:
    point = {"rss": 100_000_000, "fds": 30, "tasks": 1, "left": {}}
    side = {"errors": [], "late_bytes": 0, "expired": 0}
    result: dict[str, Any] = {
        "outcomes": {"complete": 20_000},
        "exit_status": [0, 0],
        "wrong_bytes": 0,
        "forgets": 2,
        "lost": 3,
        "points": [
            {"transfers": n, "prefill": dict(point), "decode": dict(point)} for n in (1_000, 10_000, 15_000, 20_000)
        ],
        "prefill": copy.deepcopy(side),
        "decode": copy.deepcopy(side),
    }
    return copy.deepcopy(result | changes)


def test_what_grew_is_named() -> None:
    assert soak.judge(sample()) == []
    result = sample()
    result["points"][-1]["decode"] |= {"rss": 105_100_000, "fds": 41, "tasks": 2}
    assert soak.judge(result) == [
        "decode: 41 fds at the end, 30 after the first 1000 transfers",
        "decode: 2 tasks at the end, 1 after the first 1000 transfers",
        "decode: memory grew by 5.1 MB after the first 10000 transfers",
    ]
    # What grew before the first 10,000 is no growth, and one descriptor per forget is UCX's.
    result = sample()
    result["points"][0]["prefill"]["rss"] = 1
    result["points"][-1]["prefill"]["fds"] = 32
    assert soak.judge(result) == []


def test_wrong_and_late_bytes_are_named() -> None:
    result = sample(wrong_bytes=8, exit_status=[0, 1])
    result["prefill"] |= {"expired": 4, "late_bytes": 16}
    result["decode"]["errors"].append("not quiet")
    assert soak.judge(result) == [
        "8 published bytes are wrong",
        "the workers ended with [0, 1]",
        "4 leases expired, but only 3 readers were lost",
        "prefill: 16 bytes were written into free blocks",
        "decode: not quiet",
    ]
    assert soak.judge({"transfers": 3}) == ["a worker ended before its time"]


def test_a_write_into_a_free_block_is_seen() -> None:
    async def main() -> None:
        pool, blocks = soak.make_memory("decode", 0)
        ids = await blocks.take(3)
        pool.fill(1, [(0, ids)], 12)
        blocks.give(ids)
        blocks.audit()
        assert blocks.stray == 0
        pool.fill(1, [(0, ids[:1])], 1)
        blocks.audit()
        assert blocks.stray > 100
        assert blocks.num_taken == 0

    asyncio.run(main())


def test_both_sides_draw_the_same_requests_and_all_faults() -> None:
    drawn = [soak.request(7, n, 0.01) for n in range(5000)]
    assert drawn == [soak.request(7, n, 0.01) for n in range(5000)]
    assert {it.fault for it in drawn} == {"", *soak.FAULTS}
    assert 25 < sum(it.fault != "" for it in drawn) < 85
    assert {-(-it.tokens // soak.BLOCK_SIZE) for it in drawn} == {1, 2, 3, 4}
    assert not any(soak.request(7, n, 0.0).fault for n in range(1000))
