"""A check whether UCX has to emulate one-sided reads here, because its code for that can end the process.

Over TCP a read is emulated: the owner's process sends the bytes (`docs/reliability.md`). RDMA reads without that
process, and so does CMA within one host. Many containers forbid CMA's system calls, so they are tried.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from asynckv.arguments import is_loopback_host

SAME_HOST = ("cma", "knem", "xpmem", "sm", "shm")  # UCX's transports, and aliases, that read another process's memory
QUEUES = ("tcp", "posix", "sysv", "mm")  # transports that only carry messages
RDMA = ("rc", "dc", "srd", "gga", "ib")  # also with a suffix, such as `rc_mlx5`; `ud` sends messages only
USUAL = {SAME_HOST: ("cma", {"sm", "shm"}), QUEUES: ("tcp", set[str]()), RDMA: ("rc", {"ib"})}  # the usual, and aliases


YAMA_ADMIN, CAP_SYS_PTRACE = 2, 1 << 19


def is_emulated(tls: str, net_devices: str, rdma: Iterable[str], *, is_local: bool, is_copied: bool = True) -> bool:
    """Return True if reads of this engine's memory may have to be answered by its process.

    Args:
        tls, net_devices: UCX's settings; empty if all may be used.
        is_local: True if only processes of this host can reach the engine.
        is_copied: True if processes of this host can copy from each other's memory (`has_cma`).
    """
    wanted = _entries(net_devices)
    has_rdma = any(
        not wanted or wanted & {"all"} or device in {entry.partition(":")[0] for entry in wanted} for device in rdma
    )
    if has_rdma and _allows(tls, RDMA):
        return False
    if is_local or not _allows(tls, ("tcp",)):
        return _allows(tls, QUEUES) and not (is_copied and _allows(tls, SAME_HOST))
    return True


def _entries(setting: str) -> set[str]:
    return {entry.strip() for entry in setting.split(",") if entry.strip()}


def _allows(tls: str, transports: tuple[str, ...]) -> bool:
    """Return True if a `TLS` setting allows any of some transports: a list of allowed ones, or forbidden after `^`."""
    is_negated = tls.startswith("^")
    listed = {entry.partition(":")[0].lstrip("\\") for entry in _entries(tls.removeprefix("^"))}
    if not listed or (listed & {"all"} and not is_negated):
        return True
    if is_negated:
        usual, aliases = USUAL[transports] if transports in USUAL else (transports[0], set[str]())
        return usual not in listed and not aliases & listed
    return any(entry == each or entry.startswith(f"{each}_") for entry in listed for each in transports)


def ucx_setting(name: str, environment: Mapping[str, str], params: Mapping[str, str]) -> str:
    """Return a UCX setting such as `TLS`: from the environment, else from NIXL's `engine_config`, else empty."""
    if (found := environment.get(f"UCX_{name}")) is not None:
        return found
    # The parameter is a list of KEY=VALUE, and a value may be a list as well.
    match = re.search(rf"(?:^|,)(?:UCX_)?{name}=(.*?)(?=,\w+=|$)", params.get("engine_config", ""))
    return match[1] if match else ""


def rdma_devices(
    devices: Path = Path("/sys/class/infiniband"), verbs: Path = Path("/dev/infiniband")
) -> tuple[str, ...]:
    """Return this host's RDMA devices that have an active port; empty if this process may open none."""
    if not devices.is_dir() or not any(os.access(each, os.R_OK | os.W_OK) for each in verbs.glob("uverbs*")):
        return ()
    return tuple(sorted(each.name for each in devices.iterdir() if _is_up(each)))


def _is_up(device: Path) -> bool:
    with suppress(OSError):
        return any("ACTIVE" in (port / "state").read_text() for port in (device / "ports").iterdir())
    return False


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def copy_from(pid: int, address: int, size: int, call: str = "process_vm_readv") -> bytes:
    """Copy from a process's memory (or to it, with `process_vm_writev`), as UCX's CMA does."""
    here = ctypes.create_string_buffer(size)
    ours, theirs = _Piece(ctypes.addressof(here), size), _Piece(address, size)
    copy = getattr(ctypes.CDLL(None, use_errno=True), call)
    copy.restype = ctypes.c_ssize_t
    if copy(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, ctypes.c_ulong(0)) != size:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return here.raw


def has_cma(yama: Path = Path("/proc/sys/kernel/yama/ptrace_scope"), status: Path = Path("/proc/self/status")) -> bool:
    """Return True if UCX can copy between processes of this host, found by a trial of its system calls."""
    if any(os.path.exists(f"/dev/{module}") for module in ("knem", "xpmem")):
        return True
    place = ctypes.create_string_buffer(8)
    try:
        for call in ("process_vm_readv", "process_vm_writev"):
            copy_from(os.getpid(), ctypes.addressof(place), len(place), call)
    except (OSError, AttributeError):
        return False
    with suppress(OSError, ValueError, IndexError):
        privileges = int(re.findall(r"CapEff:\s*(\w+)", status.read_text())[0], 16)
        return int(yama.read_text()) < YAMA_ADMIN or bool(privileges & CAP_SYS_PTRACE)
    return True


def is_loopback(address: str) -> bool:
    return is_loopback_host(urlsplit(address).hostname or "")
