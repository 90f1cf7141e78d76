"""Requests that are followed through the real ledgers and the router, while ranks and the router are killed."""

from __future__ import annotations

import pytest

from tests.lab import tickets

pytestmark = [pytest.mark.slow, pytest.mark.nixl, pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    ("prefill", "decode", "victims"),
    [(2, 1, ("prefill",)), (1, 2, ("decode",)), (2, 2, ("prefill", "decode", "router"))],
)
async def test_what_followers_read_is_right_and_nothing_is_left(
    prefill: int, decode: int, victims: tuple[str, ...]
) -> None:
    found = await tickets.run(prefill, decode, victims, seed=prefill + 2 * decode)
    assert found["left"] == {}
    assert found["decode"]["wrong"] == 0
    assert found["decode"]["compared"] > 0
    assert found["decode"]["followed"] > len(victims) * tickets.MORE
    assert found["clients"].keys() <= {"200", "503", "left", "router_lost"}


@pytest.mark.parametrize(
    ("prefill", "decode", "victims", "sizes"),
    [
        (2, 1, ("prefill", "decode"), (16, 64)),
        (1, 2, ("decode", "prefill"), (16, 4)),
        (2, 2, ("prefill", "decode", "router"), (16, 16)),
    ],
)
async def test_what_was_read_while_it_was_computed_is_right_and_nothing_is_left(
    prefill: int, decode: int, victims: tuple[str, ...], sizes: tuple[int, int]
) -> None:
    found = await tickets.run(prefill, decode, victims, seed=prefill + 2 * decode, chunk=5, sizes=sizes)
    assert found["left"] == {}
    assert found["decode"]["wrong"] == 0
    assert found["decode"]["compared"] > 0
    assert found["clients"].keys() <= {"200", "503", "left", "router_lost"}
    assert found["prefill"]["preempted"] > 0
    assert found["decode"]["early"] > 0
    assert found["pieces"]["pieces.complete"] > 0
