"""One pull, as people and other machines see it: what it says that it went through, and what it waits for."""

from __future__ import annotations

from asynckv.core.pull import Pull
from tests.world import Rank, World, make_layout


def two() -> tuple[World, Rank, Rank]:
    world = World()
    return world, world.add("prefill", make_layout()), world.add("decode", make_layout(), seed=1)


def said(pull: Pull) -> list[str]:
    """Its history, by words alone."""
    return [str(text) for _, text in pull.history]


NAME = "prefill/tp0@prefill-"


def test_a_pull_says_what_it_went_through() -> None:
    world, prefill, decode = two()
    params = world.params([prefill], "r", [3], 4, written=True)
    world.lend(prefill, params)
    pull = world.pull(decode, "d", [9], params)
    world.run()
    assert said(pull) == [
        "announced",
        "connecting",
        "queued",
        "reading",
        f"{NAME} granted 10 s",
        "confirming",
        "notifying",
        f"release {NAME}: acknowledged",
        "released",
    ]


def test_a_pull_that_came_before_its_request_says_so_and_that_it_reads_again() -> None:
    world, prefill, decode = two()
    params = world.params([prefill], "r", [3], 4)
    pull = world.pull(decode, "d", [9], params)
    world.deliver_all()
    assert said(pull) == ["announced", "connecting", "queued", "reading", f"{NAME} not yet"]
    world.lend(prefill, params)
    world.run()
    assert said(pull)[5:] == [
        f"{NAME} granted 10 s",
        "confirming",
        "queued",
        f"{NAME} read before it was lent, reading again",
        "reading",
        "confirming",
        "notifying",
        f"release {NAME}: acknowledged",
        "released",
    ]
    assert pull.rereads == 1
