"""Recalls of real processes: a short run of `tests.lab.recalls`, and what it judges by."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.lab import recalls

GOOD = Counter(
    recalls=300, moving=100, landed=20, complete=1, lease_lost=299, withheld_wrong=1, planted_published_wrong=1
)


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_no_wrong_byte_is_published_of_requests_that_are_recalled_and_overwritten_at_once() -> None:
    record = await recalls.run(60, seed=1, mib=16)
    total = record["total"]
    # How many recalls come in time says what else this machine does.
    assert [text for text in record["problems"] if not text.startswith("only ")] == []
    assert (total["recalls"], total["published_bytes"], total["published_wrong"]) == (60, 0, 0)
    assert min(total[name] for name in ("moving", "landed", "complete", "planted_published_bytes")) > 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, []),
        ({"published_bytes": 8}, ["8 wrong bytes were published"]),
        ({"else": 1}, ["1 pulls ended otherwise than complete, lease_lost, revoked"]),
        ({"moving": 99}, ["only 99 of 300 recalls came while bytes moved"]),
        ({"landed": 19}, ["only 19 of 300 recalls came between the last byte and its grant"]),
        ({"complete": 0}, ["no pull was complete"]),
        ({"withheld_wrong": 0}, ["no failed pull had wrong bytes, so nothing was tried"]),
        ({"planted_published_wrong": 0}, ["a reader that trusts its clock published no wrong bytes"]),
    ],
)
def test_a_run_that_shows_nothing_is_no_good_run(change: dict[str, int], says: list[str]) -> None:
    assert recalls.problems(Counter(GOOD | change), 300) == says
