"""Whether UCX has to emulate one-sided reads here: then its code can end the process, and belongs into one of its own.

Over TCP a read is emulated: the owner's process sends the bytes. That code ends the whole process on some of its paths
when a connection breaks (`docs/reliability.md`). RDMA reads without it, and so does CMA within one host.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["is_emulated", "is_loopback", "rdma_devices", "ucx_setting"]

SAME_HOST = ("sm", "shm", "cma", "knem", "xpmem")
"""UCX's transports, and aliases, that read another process's memory."""

QUEUES = ("tcp", "posix", "sysv", "mm")
"""Those that only carry messages."""

RDMA = ("ib", "rc", "dc", "ud", "srd", "gga")
"""Those that read by RDMA; `rc_mlx5` and the like begin so."""


def is_emulated(tls: str, net_devices: str, rdma: Iterable[str], *, is_local: bool) -> bool:
    """Say whether reads of this engine's memory may have to be answered by its process.

    Args:
        tls: UCX's `TLS` setting; empty if there is none, and all may be used.
        net_devices: UCX's `NET_DEVICES` setting; empty if there is none.
        rdma: The RDMA devices of this host.
        is_local: Only processes of this host can reach the engine.
    """
    wanted = _entries(net_devices)
    has_rdma = any(not wanted or wanted & {"all"} or any(_names(w, device) for w in wanted) for device in rdma)
    if has_rdma and _allows(tls, RDMA):
        return False
    if is_local or not _allows(tls, ("tcp",)):
        return _allows(tls, QUEUES) and not _allows(tls, SAME_HOST)
    return True


def _entries(setting: str) -> set[str]:
    return {entry.strip() for entry in setting.split(",") if entry.strip()}


def _names(entry: str, device: str) -> bool:
    """An entry is a device, with a port or not."""
    return entry.partition(":")[0] == device


def _allows(tls: str, transports: tuple[str, ...]) -> bool:
    """Say whether a `TLS` setting allows any of some transports: a list of what may be used, or, after `^`, may not."""
    is_negated = tls.startswith("^")
    listed = {entry.partition(":")[0].lstrip("\\") for entry in _entries(tls.removeprefix("^"))}
    if not listed or (listed & {"all"} and not is_negated):
        return True
    if is_negated:
        return any(each not in listed for each in transports)
    return any(entry == each or entry.startswith(f"{each}_") for entry in listed for each in transports)


def ucx_setting(name: str, environment: Mapping[str, str], params: Mapping[str, str]) -> str:
    """Return a UCX setting such as `TLS`: of the environment, which wins, or of NIXL's `engine_config`; else empty."""
    if (found := environment.get(f"UCX_{name}")) is not None:
        return found
    # A list of KEY=VALUE, whose values may be lists as well.
    match = re.search(rf"(?:^|,)(?:UCX_)?{name}=(.*?)(?=,\w+=|$)", params.get("engine_config", ""))
    return match[1] if match else ""


def rdma_devices() -> tuple[str, ...]:
    """Name this host's RDMA devices."""
    folder = Path("/sys/class/infiniband")
    return tuple(sorted(os.listdir(folder))) if folder.is_dir() else ()


def is_loopback(address: str) -> bool:
    """Say whether an address such as `tcp://127.0.0.1:0` is reached from this host only."""
    host = urlsplit(address).hostname or ""
    with suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False
