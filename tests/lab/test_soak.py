"""The soak itself: a small one on real NIXL and ZMQ, and whether its judges are awake."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
from typing import Any

import pytest

from tests.commands import python
from tests.lab import soak
from tests.lab.arena import layout_of
from tests.lab.fleet import Blocks


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "tests.lab.soak", *argv, timeout_s=100)


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_three_thousand_transfers_with_faults_leave_nothing_behind() -> None:
    done = run("--transfers", "3000", "--faults", "0.05", "--seed", "3")
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["good"] and not result["wrong"]  # noqa: PT018
    decode = result["decode"]
    assert sum(decode["outcomes"].values()) == 3000
    assert {name.split(":")[0] for name in decode["faults"]} == soak.FAULTS.keys()
    assert decode["forgets"] == 1
    assert decode["compared_bytes"] > 5e6
    assert [point["transfers"] for point in result["points"]] == [1000, 3000]


def sample(**changes: Any) -> dict[str, Any]:
    point = {"rss_mib": 100, "fds": 30, "tasks": 1}
    side = {"errors": [], "expired": 0, "outcomes": {"complete": 20_000}, "wrong_bytes": 0, "forgets": 2, "lost": 3}
    result: dict[str, Any] = {
        "problems": [],
        "exit_status": [0, 0],
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
    result["points"][-1]["decode"] |= {"rss_mib": 106, "fds": 41, "tasks": 2}
    assert soak.judge(result) == [
        "decode: 41 fds at the end, 30 after the first 1000 transfers",
        "decode: 2 tasks at the end, 1 after the first 1000 transfers",
        "decode: memory grew by 6 MiB after the first 10000 transfers",
    ]
    # What grew before the first 10,000 is no growth, and one descriptor per forget is UCX's.
    result = sample()
    result["points"][0]["prefill"]["rss_mib"] = 1
    result["points"][-1]["prefill"]["fds"] = 32
    assert soak.judge(result) == []


def test_wrong_and_late_bytes_are_named() -> None:
    result = sample(problems=["prefill: 16 bytes were written into free blocks"], exit_status=[0, 1])
    result["prefill"]["expired"] = 4
    result["decode"] |= {"wrong_bytes": 8, "errors": ["request 7 failed"]}
    assert soak.judge(result) == [
        "prefill: 16 bytes were written into free blocks",
        "8 published bytes are wrong",
        "the workers ended with [0, 1]",
        "4 leases expired, but only 3 readers were lost",
        "decode: request 7 failed",
    ]
    assert soak.judge({"problems": []}) == ["a worker ended before its time"]


def test_a_write_into_a_free_block_is_seen() -> None:
    async def main() -> None:
        pool, words = soak.make_memory(layout_of((2, 32), 2, 64, soak.BLOCK_SIZE), 0)
        blocks = Blocks(words)
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
