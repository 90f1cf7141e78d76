"""NIXL's metadata from a peer that lies: refused before NIXL loads it, or by a process of its own that dies of it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from asynckv import BackendError, EngineConfig, NixlConfig
from asynckv.edges.choice import choose_plane
from asynckv.edges.nic import nixl
from asynckv.edges.nic.agent import Agent
from asynckv.edges.nic.metadata import is_known, renamed
from asynckv.edges.survivor.taster import Taster
from asynckv.geometry.layout import Memory
from asynckv.ports import AgentInfo
from tests.test_process import children

pytestmark = [pytest.mark.nixl, pytest.mark.anyio]

SIZE = 1 << 16


class Owner:
    """A real agent with two regions."""

    def __init__(self, name: str = "owner") -> None:
        self.arrays = [np.zeros(SIZE, np.uint8) for _ in range(2)]
        self.memories = [Memory(a.ctypes.data, SIZE) for a in self.arrays]
        self.agent = Agent(nixl.load_nixl(), name, "UCX", nixl.DEFAULTS)
        self.agent.register(self.memories)
        self.metadata = self.agent.info().metadata

    @property
    def address_at(self) -> int:
        """Where UCX's worker address begins."""
        return self.metadata.index(b"|c", 40) + 2 + 8

    @property
    def key_at(self) -> int:
        """Where the last memory key begins."""
        return self.metadata.rindex(b"|", 0, -1) + 1 + 8 + 24


@pytest.fixture
def owner() -> Iterator[Owner]:
    each = Owner()
    yield each
    each.agent.close()


def mutations(metadata: bytes, count: int, seed: int) -> Iterator[bytes]:
    chosen = random.Random(seed)
    for _ in range(count):
        blob, at = bytearray(metadata), chosen.randrange(len(metadata))
        match chosen.randrange(5):
            case 0:
                blob[at] ^= 1 << chosen.randrange(8)
            case 1:
                for _ in range(chosen.randrange(1, 9)):
                    blob[chosen.randrange(len(blob))] = chosen.choice((0, 127, 255, chosen.randrange(256)))
            case 2:
                del blob[at : at + chosen.randrange(1, 30)]
            case 3:
                blob[at:at] = chosen.randbytes(chosen.randrange(1, 30))
            case _:
                blob[at : at + chosen.randrange(1, 9)] = chosen.randbytes(chosen.randrange(1, 9))
        yield bytes(blob)


def with_byte(blob: bytes, at: int, value: int) -> bytes:
    return blob[:at] + bytes([value]) + blob[at + 1 :]


def test_an_agents_own_metadata_is_known_and_can_have_another_name(owner: Owner) -> None:
    assert is_known(owner.metadata)
    again = renamed(owner.metadata, "owner", "söme other name")
    assert is_known(again)
    assert renamed(again, "söme other name", "owner") == owner.metadata


def test_metadata_that_would_end_the_process_is_refused_before_nixl_has_it(owner: Owner) -> None:
    reader = Owner("reader")
    try:
        for wrong, cause in (
            (b"", "does not begin"),
            (owner.metadata[:-1], "field"),
            (owner.metadata + b"x", "1 bytes follow"),
            (with_byte(owner.metadata, owner.address_at, 0x2F), "worker address is of a version"),
            (with_byte(owner.metadata, owner.metadata.index(b"|t\x04") + 2 + 8, 9), "of a kind"),
            (with_byte(owner.metadata, owner.key_at + 7, 0x40), "memory keys is incomplete"),
            (with_byte(owner.metadata, owner.key_at, 0xFF)[: owner.key_at + 3], "field"),
        ):
            with pytest.raises(
                BackendError, match=f"^NIXL refuses the metadata of owner, or would end the process: .*{cause}"
            ):
                reader.agent.load(AgentInfo("owner", wrong), owner.memories)
        with pytest.raises(BackendError, match="is of agent 'owner', but 'other' was announced"):
            reader.agent.load(AgentInfo("other", owner.metadata), owner.memories)
    finally:
        reader.agent.close()


def test_a_load_that_nixl_refuses_does_not_spoil_the_name(owner: Owner) -> None:
    """Inside NIXL it does: whoever lied about a rank's metadata first would have kept that rank away for ever."""
    reader = Owner("reader")
    nothing = owner.metadata[: owner.metadata.index(b"|n\x08") + 2 + 8] + bytes(8) + b"|"  # the connection is good
    try:
        with pytest.raises(BackendError, match=r"^NIXL refuses the metadata of owner: nixlNotFound"):
            reader.agent.load(AgentInfo("owner", nothing), owner.memories)
        reader.agent.load(AgentInfo("owner", owner.metadata), owner.memories)
        assert reader.agent.is_connected("owner")
    finally:
        reader.agent.close()


def test_no_mutation_ends_in_anything_but_a_refusal(owner: Owner) -> None:
    taken = 0
    for blob in mutations(owner.metadata, 20_000, 1):
        try:
            renamed(blob, "owner", "other")
            taken += 1
        except BackendError:
            pass
    assert 1000 < taken < 15_000  # what is UCX's own is opaque


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_thousands_of_mutations_end_no_process_but_one_that_tries_them(owner: Owner) -> None:
    taster, taken = Taster(NixlConfig(), "tries", None), 0
    for blob in (owner.metadata, *mutations(owner.metadata, 4000, 5), owner.metadata):
        try:
            await taster.try_out(AgentInfo("owner", blob), owner.memories)
            taken += 1
        except BackendError:
            if blob == owner.metadata:
                raise
        owner.agent.sweep()
    assert taken > 100
    assert taken + taster.num_refused == 4002
    await taster.quiesce()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "is_trusted", "tries"),
    [("auto", True, 0), ("auto", False, 1), ("always", True, 1), ("always", False, 1), ("never", False, 0)],
)
async def test_peers_that_nobody_vouches_for_are_tried_first(
    owner: Owner, wanted: Any, is_trusted: bool, tries: int
) -> None:
    reader, before = Owner("reader"), children()
    config = NixlConfig(try_metadata=wanted, process="never", posting_threads=0)
    said: list[str] = []
    plane = choose_plane(EngineConfig(engine_id="e", nixl=config), reader.memories, "reads", said.append)
    await plane.start(reader.memories, lambda: None)
    try:
        await plane.add_remote_agent(AgentInfo("owner", owner.metadata, is_trusted), owner.memories)
        assert len(children() - before) == tries
        with pytest.raises(BackendError, match="NIXL refuses the metadata of liar"):
            await plane.add_remote_agent(AgentInfo("liar", owner.metadata[:-1], is_trusted), owner.memories)
        assert plane.statistics()["metadata_refused"] == tries
        assert not said
    finally:
        await plane.quiesce()
        plane.close()
        reader.agent.close()
    assert children() == before


async def test_the_end_of_a_process_that_tried_nobody_is_not_the_next_peers_fault(owner: Owner) -> None:
    taster = Taster(NixlConfig(), "tries", None)
    remote = AgentInfo("owner", owner.metadata)
    await taster.try_out(remote, owner.memories)
    assert taster._child is not None
    os.kill(taster._child.keeper.pid, signal.SIGKILL)
    async with asyncio.timeout(10.0):
        while taster._child.keeper.pid:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.01)
    await taster.try_out(remote, owner.memories)
    assert taster.num_refused == 0
    await taster.quiesce()
