"""One suite for the simulated planes and for the real ones: the fake is verified."""

from __future__ import annotations

import pytest

from asynckv.config import NixlConfig
from asynckv.edges.control.zmq import ZmqPlane
from asynckv.edges.nic.nixl import NixlPlane
from asynckv.edges.survivor.process import ServingPlane
from asynckv.testing import SimControl, SimData, SimNetwork
from tests.lab.conformance import check_control_plane, check_data_plane


async def test_simulated_control_plane() -> None:
    network = SimNetwork()
    await check_control_plane(lambda: SimControl(network))


async def test_zmq_control_plane() -> None:
    await check_control_plane(lambda: ZmqPlane("tcp://127.0.0.1:0"))


async def test_simulated_data_plane() -> None:
    network = SimNetwork()
    await check_data_plane(lambda name: SimData(network, name))


@pytest.mark.nixl
@pytest.mark.parametrize("posting_threads", [0, 1, 2])
async def test_nixl_data_plane(posting_threads: int) -> None:
    """With posting threads every read is bulk."""
    config = NixlConfig(posting_threads=posting_threads, bulk_bytes=1)
    await check_data_plane(lambda name: NixlPlane(config, name, looks=True))


@pytest.mark.nixl
@pytest.mark.slow
async def test_nixl_data_plane_that_is_served_by_a_process_of_its_own() -> None:
    config = NixlConfig(posting_threads=0)
    await check_data_plane(
        lambda name: ServingPlane(config, name, NixlPlane(config, f"{name}-reads", looks=True)), shared=True
    )
