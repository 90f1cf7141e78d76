"""A second look at what was read: what is compared, and what becomes of a difference."""

from __future__ import annotations

from typing import Literal

from asynckv.config import EngineConfig, LeaseConfig, PullConfig
from asynckv.core.pull import Pull
from asynckv.core.types import Outcome, Reason
from tests.world import Rank, World, make_layout

ALL: Literal["all"] = "all"


def make(second_look: float = 1.0, second_look_bytes: int | Literal["all"] = ALL) -> tuple[World, Rank, Rank]:
    pull = PullConfig(second_look=second_look, second_look_bytes=second_look_bytes)
    world = World(EngineConfig(engine_id="x", lease=LeaseConfig(lease_s=30.0, grant_s=10.0), pull=pull))
    prefill = world.add("p", make_layout(), engine_id="prefill")
    return world, prefill, world.add("d", make_layout(base=1 << 41), engine_id="decode", seed=9)


def read(world: World, decode: Rank) -> None:
    """Let all reads land, up to the second look."""
    for _ in range(20):
        if world.letters:
            world.deliver()
        for transfer_id in [t for t, transfer in decode.reads.items() if not transfer.ours]:
            world.complete(decode, transfer_id)


def pulled(world: World, prefill: Rank, decode: Rank) -> Pull:
    params, _ = world.lent(prefill, "r", [3, 5, 6], 10, written=True)
    pull = world.pull(decode, "d", [5, 1, 2], params)
    read(world, decode)
    return pull


def test_a_pull_completes_once_its_second_look_has_landed() -> None:
    world, prefill, decode = make()
    pull = pulled(world, prefill, decode)
    assert pull.reason is None
    world.run()
    assert pull.reason is Reason.COMPLETE
    assert pull.measures.looked_bytes == pull.measures.num_bytes * 10 // 12


def test_bytes_that_change_between_the_two_reads_fail_the_pull_for_good() -> None:
    world, prefill, decode = make()
    pull = pulled(world, prefill, decode)
    prefill.buffers.overwrite(3, 0x77)
    world.run()
    assert pull.reason is Reason.DIFFERS
    assert pull.outcome is Outcome.FAILED
    assert "part 'k' of layer 'layers.0', tokens 0 to 3" in pull.detail
