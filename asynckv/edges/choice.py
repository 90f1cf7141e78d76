"""The choice where NIXL runs: in the engine's process, or in its own if UCX emulates remote reads (`transports.py`).

With emulated reads a dying reader can end the process. With `process="auto"`, unshareable memory is only warned of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from asynckv.config import EngineConfig
from asynckv.edges.nic.nixl import NixlPlane
from asynckv.edges.sharing import Shares
from asynckv.edges.survivor.keeper import check_processes
from asynckv.edges.survivor.process import ServingPlane
from asynckv.edges.survivor.taster import Taster
from asynckv.edges.transports import has_cma, is_emulated, is_loopback, rdma_devices, ucx_setting
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.ports import DataPlane


def choose_plane(
    config: EngineConfig, memories: Sequence[Memory], agent_name: str, warn: Callable[[str], None]
) -> DataPlane:
    """Return a data plane as `NixlConfig.process` says; call `warn`, now or at its start, if a safeguard is missing."""
    nixl = config.nixl

    def untried(cause: str) -> None:
        warn(f"peers' NIXL metadata is loaded without a trial, because no process can be started for it: {cause}")

    taster = None
    if nixl.try_metadata != "never":
        taster = Taster(nixl, f"{agent_name}-tries", untried if nixl.try_metadata == "auto" else None)
    looks = config.pull.second_look > 0
    here = NixlPlane(nixl, agent_name, taster, looks=looks)
    if nixl.process == "never" or (nixl.process == "auto" and not _is_emulated(config)):
        return here

    def go_on(cause: str) -> None:
        warn(
            f"UCX has to emulate remote reads, where it can end the process when a reader dies, and NIXL cannot run in "
            f'a process of its own: {cause} (or set NixlConfig(process="never"))'
        )

    if nixl.process == "auto":
        try:
            check_processes()
            Shares(memories).close()
        except BackendError as exc:
            go_on(str(exc))
            return here
    reader = NixlPlane(nixl, f"{agent_name}-reads", taster, looks=looks)
    return ServingPlane(nixl, agent_name, reader, go_on=go_on if nixl.process == "auto" else None)


def _is_emulated(config: EngineConfig) -> bool:
    nixl = config.nixl
    return nixl.backend == "UCX" and is_emulated(
        ucx_setting("TLS", os.environ, nixl.params),
        ucx_setting("NET_DEVICES", os.environ, nixl.params),
        rdma_devices(),
        is_local=all(is_loopback(address) for address in (config.bind, config.advertise) if address),
        is_copied=has_cma(),
    )
