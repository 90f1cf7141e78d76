"""Gather facts of this machine from /proc and /sys. A fact that cannot be read gets a value that passes every check."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import platform
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path

from asynckv.edges.aside import Aside
from asynckv.edges.kernel import FIRST_PID_NAMESPACE, inode
from asynckv.edges.pages import CGROUP_FILES, control_groups, text_of
from asynckv.edges.sharing import shm_use
from asynckv.edges.survivor.keeper import check_processes
from asynckv.edges.transports import copy_from, rdma_devices
from asynckv.errors import BackendError
from asynckv.tools.bench.machine import field
from asynckv.tools.doctor.facts import Gpu, Interface, Machine, Network, Rdma

NO_LIMIT = 1 << 60
SIOCGIFADDR = 0x8915
UP, LOOPBACK = 0x1, 0x8
TRY_S = 5.0
RESOLVE_S = 3.0

TARGET = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(0x59616d61, -1, 0, 0, 0)  # as UCX does: PR_SET_PTRACER, PR_SET_PTRACER_ANY
text = ctypes.create_string_buffer(b"asynckv doctor")
print(ctypes.addressof(text), flush=True)
sys.stdin.read()
"""


def machine(proc: Path = Path("/proc"), system: Path = Path("/sys")) -> Machine:
    quota, throttled, limit, used = _control_group(system / "fs/cgroup", proc)
    shm_bytes, shm_free = _free("/dev/shm")
    huge = system / "kernel/mm/transparent_hugepage"
    try:
        check_processes()
        child_error = ""
    except BackendError as exc:
        child_error = str(exc)
    return Machine(
        kernel=platform.release(),
        cpu=field(proc / "cpuinfo", "model name") or platform.machine(),
        cores_present=os.cpu_count() or 1,
        cores_allowed=len(os.sched_getaffinity(0)),
        cpu_quota=quota,
        throttled=throttled,
        load=os.getloadavg()[0],
        numa_nodes=max(1, len(list((system / "devices/system/node").glob("node[0-9]*")))),
        memory_bytes=_number(field(proc / "meminfo", "MemTotal")) << 10,
        memory_limit=limit,
        memory_used=used,
        huge_pages=_chosen(text_of(huge / "enabled")),
        shmem_huge_pages=_chosen(text_of(huge / "shmem_enabled")),
        shm_bytes=shm_bytes,
        shm_free=shm_free,
        shm_use=shm_use() if shm_free < shm_bytes // 2 else "",
        nofile=_soft(resource.RLIMIT_NOFILE),
        memlock=_soft(resource.RLIMIT_MEMLOCK),
        ptrace_scope=_number(text_of(proc / "sys/kernel/yama/ptrace_scope")),
        seccomp=field(proc / "self/status", "Seccomp") == "2",
        container=_container(proc),
        own_pid_namespace=inode(proc / "self/ns/pid") not in (0, FIRST_PID_NAMESPACE),
        uid=os.geteuid(),
        cma_error=try_process_vm_readv(),
        child_error=child_error,
        clocksource=text_of(system / "devices/system/clocksource/clocksource0/current_clocksource").strip(),
    )


def _number(text: str) -> int:
    match = re.match(r"\s*(\d+)", text)
    return int(match[1]) if match else 0


def _chosen(text: str) -> str:
    """Return the word in brackets: `always [madvise] never`."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else ""


def _soft(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _free(path: str) -> tuple[int, int]:
    """Return size and free bytes of a file system of its own; zeros if there is none."""
    with suppress(OSError):
        if os.path.ismount(path):
            found = os.statvfs(path)
            return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return 0, 0


def _container(proc: Path) -> str:
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "Kubernetes"
    if Path("/.dockerenv").exists():
        return "Docker"
    if Path("/run/.containerenv").exists():
        return "Podman"
    found = re.search(r"docker|kubepods|containerd|lxc", text_of(proc / "self/cgroup"))
    return found[0] if found else ""


def _control_group(root: Path, proc: Path) -> tuple[float, float, int, int]:
    """Return the cores and the memory that are granted, how often they were short, and the memory in use."""
    cores, memory = list[tuple[float, float]](), list[tuple[int, int]]()
    for controller, names in (("", ["cpu.max"]), ("cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"])):
        for at in control_groups(controller, proc, root):
            limit = re.match(r"(\d+)\s+(\d+)", " ".join(text_of(at / name) for name in names))
            if limit and int(limit[2]):
                cores.append((int(limit[1]) / int(limit[2]), _throttled(at / "cpu.stat")))
    for controller, (limit_file, use_file, *_) in CGROUP_FILES.items():
        for at in control_groups(controller, proc, root):
            if 0 < (most := _number(text_of(at / limit_file))) < NO_LIMIT:
                memory.append((most, _number(text_of(at / use_file))))
    return *min(cores, default=(0.0, 0.0)), *min(memory, default=(0, 0))  # the tightest counts


def _throttled(path: Path) -> float:
    stat = dict(re.findall(r"(\w+) (\d+)", text_of(path)))
    return int(stat.get("nr_throttled", 0)) / max(1, int(stat.get("nr_periods", 0)))


def try_process_vm_readv() -> str:
    """Read a child's memory as UCX's CMA would, and return the fault, or nothing."""
    if not sys.executable:
        return ""
    command = [sys.executable, "-S", "-E", "-c", TARGET]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        timer = threading.Timer(TRY_S, child.kill)
        timer.start()
        try:
            assert child.stdout is not None
            said = child.stdout.readline()
            return _read_of(child.pid, int(said)) if said else "the child that was to be read from did not start"
        finally:
            timer.cancel()
            child.kill()


def _read_of(pid: int, address: int) -> str:
    try:
        found = copy_from(pid, address, 14)
    except OSError as exc:
        return f"{errno.errorcode.get(exc.errno or 0, exc.errno)}: {exc.strerror}"
    return "" if found == b"asynckv doctor" else "process_vm_readv brought other bytes"


# -- network -------------------------------------------------------------------------------------------


def network(system: Path = Path("/sys")) -> Network:
    name = socket.gethostname()
    addresses, _ = resolve(name)
    interfaces, rdma = _interfaces(system / "class/net"), _rdma(system / "class/infiniband")
    return Network(hostname=name, hostname_addresses=addresses, interfaces=interfaces, rdma=rdma)


def resolve(name: str) -> tuple[tuple[str, ...], str]:
    """Resolve a name: its addresses, or what was said. A resolver may take minutes, so it gets a deadline."""
    asked = Aside("asynckv-name").submit(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM)
    if not wait([asked], RESOLVE_S).done:
        return (), f"no answer within {RESOLVE_S:g} s"
    try:
        return tuple(dict.fromkeys(str(info[4][0]) for info in asked.result())), ""
    except (OSError, UnicodeError) as exc:
        return (), getattr(exc, "strerror", None) or str(exc)


def _interfaces(root: Path) -> tuple[Interface, ...]:
    sixes: dict[str, list[str]] = {}
    for line in text_of(Path("/proc/net/if_inet6")).splitlines():
        digits, _, _, scope, _, name = line.split()
        if scope != "20":  # link-local ones are of no use without their scope
            sixes.setdefault(name, []).append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            flags = int(text_of(root / name / "flags").strip() or "0", 16)
            if not flags & UP:
                continue
            addresses = []
            with suppress(OSError):
                answer = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                addresses.append(socket.inet_ntoa(answer[20:24]))
            mtu, known = _number(text_of(root / name / "mtu")), (*addresses, *sixes.get(name, ()))
            found.append(Interface(name=name, mtu=mtu, addresses=known, is_loopback=bool(flags & LOOPBACK)))
    return tuple(found)


def _rdma(root: Path) -> tuple[Rdma, ...]:
    usable = rdma_devices(root)
    found = []
    with suppress(OSError):
        for device in sorted(root.iterdir()):
            ports = sorted((device / "ports").glob("*"))
            state = ", ".join(text_of(p / "state").partition(":")[2].strip() for p in ports) or "no port"
            rate = ", ".join(text_of(p / "rate").strip() for p in ports)
            found.append(Rdma(name=device.name, state=state, rate=rate, usable=device.name in usable))
    return tuple(found)


def gpu(proc: Path = Path("/proc"), system: Path = Path("/sys")) -> Gpu:
    """Count NVIDIA GPUs by what their driver says; nothing is loaded."""
    folder = proc / "driver/nvidia"
    version = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", text_of(folder / "version"))
    peermem = any((system / "module" / name).is_dir() for name in ("nvidia_peermem", "nv_peer_mem"))
    return Gpu(count=len(list((folder / "gpus").glob("*"))), driver=version[1] if version else "", peermem=peermem)
