"""Findings from facts of this host: the machine, the network, versions. The checks are pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from asynckv.arguments import is_loopback_host
from asynckv.config import CORES_FOR_TWO
from asynckv.tools.console import size
from asynckv.tools.doctor.catalogue import LEVELS, TOPICS, Finding, Level, finding
from asynckv.tools.doctor.checks_peer import about_peer
from asynckv.tools.doctor.checks_ucx import UCX_CHECKS
from asynckv.tools.doctor.facts import Facts

Check = Callable[[Facts], Iterator[Finding]]

SHM_SMALL = 256 << 20  # Docker's own is 64 MiB
SHM_FULL = 0.05
MEMORY_FULL = 0.95
NOFILE_LOW, NOFILE_NONE = 1024, 64
MEMLOCK_MUCH = 1 << 40
THROTTLED = 0.01
SCOPE_RESTRICTED = 2
MTU_LOW = 1280
PORTS_FEW = 8
GOOD_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "timebase", "stp", "")


def examine(facts: Facts) -> list[Finding]:
    """Look at everything that was gathered; the worst comes first, then by topic."""
    found = [each for check in CHECKS for each in check(facts)]
    topics = list(TOPICS)
    return sorted(found, key=lambda each: (LEVELS.index(each.level), topics.index(each.topic)))


def is_good(found: Sequence[Finding]) -> bool:
    return all(each.level in ("note", "good") for each in found)


# -- processes and shared memory ---------------------------------------------------------------------------


def cma(facts: Facts) -> Iterator[Finding]:
    here = facts.machine
    if here.cma_error:
        filtered = "; a seccomp filter is on" if here.seccomp else ""
        yield finding("cma-forbidden", f"between two processes of ours it said {here.cma_error}{filtered}")
    else:
        yield finding("cma", "a process of ours was read from")
    if here.ptrace_scope >= SCOPE_RESTRICTED:
        yield finding("ptrace-scope", f"kernel.yama.ptrace_scope is {here.ptrace_scope}")
    if here.child_error:
        yield finding("no-child", here.child_error)
    if here.own_pid_namespace:
        where = f" ({here.container})" if here.container else ""
        yield finding("pid-namespace", f"it is not the host's own{where}")


def shared_memory(facts: Facts) -> Iterator[Finding]:
    here = facts.machine
    use = here.shm_use or f"{size(here.shm_free)} of {size(here.shm_bytes)} are free"
    if not here.shm_bytes:
        yield finding("shm-none", "/dev/shm is no file system of its own")
    elif here.shm_bytes < SHM_SMALL:
        yield finding("shm-small", use)
    elif here.shm_free < SHM_FULL * here.shm_bytes:
        yield finding("shm-full", use)
    if here.shmem_huge_pages in ("never", "deny"):
        yield finding("huge-pages", f"shmem_enabled is {here.shmem_huge_pages}, for private memory {here.huge_pages}")
    if here.memory_limit and here.memory_used > MEMORY_FULL * here.memory_limit:
        yield finding("memory-limit", f"{size(here.memory_used)} of {size(here.memory_limit)} are used")


# -- limits and CPU ------------------------------------------------------------------------------------------


def limits(facts: Facts) -> Iterator[Finding]:
    here = facts.machine
    if 0 <= here.nofile < NOFILE_LOW:
        level: Level = "error" if here.nofile < NOFILE_NONE else "warning"
        most = max(0, (here.nofile - 64) // 4)
        yield finding(
            "nofile", f"{here.nofile} (ulimit -n): enough for some {most} ranks of the other side", level=level
        )
    usable = [each.name for each in facts.network.rdma if each.usable]
    if usable and 0 <= here.memlock < MEMLOCK_MUCH:
        yield finding("memlock", f"{size(here.memlock)} (ulimit -l), with {', '.join(usable)}")


def cpu(facts: Facts) -> Iterator[Finding]:
    here = facts.machine
    if here.cores_allowed < CORES_FOR_TWO:
        yield finding("one-core", f"{here.cores_allowed} of {here.cores_present} cores")
    if here.throttled > THROTTLED:
        yield finding("throttled", f"in {here.throttled:.0%} of its periods, with {here.cpu_quota:g} cores granted")
    elif 0 < here.cpu_quota < here.cores_allowed:
        yield finding("cpu-quota", f"{here.cpu_quota:g} cores are granted, {here.cores_allowed} are seen")
    if here.load > here.cores_present:
        yield finding("busy", f"a load of {here.load:.1f} on {here.cores_present} cores")
    if here.numa_nodes > 1 and here.cores_allowed > here.cores_present // here.numa_nodes:
        yield finding(
            "numa", f"{here.numa_nodes} nodes, and this process may run on {here.cores_allowed} cores of them"
        )
    if here.clocksource not in GOOD_CLOCKS:
        yield finding("clocksource", f"the kernel uses {here.clocksource}")


# -- network and addresses -------------------------------------------------------------------------------------


def devices(facts: Facts) -> Iterator[Finding]:
    here = facts.network
    outside = [each for each in here.interfaces if not each.is_loopback]
    if not outside:
        yield finding("only-loopback", "no other interface is up")
    usable = [each for each in here.rdma if each.usable]
    unusable = [each for each in here.rdma if not each.usable]
    named = "UCX_NET_DEVICES" in facts.software.environment
    if len(outside) + len(usable) > 1 and not named:
        names = ", ".join([each.name for each in usable] + [each.name for each in outside])
        yield finding("many-devices", f"{names}; UCX_NET_DEVICES is not set")
    for each in outside:
        if 0 < each.mtu < MTU_LOW:
            yield finding("small-mtu", f"{each.name} has an MTU of {each.mtu}")
    if usable:
        yield finding("rdma", ", ".join(f"{each.name} ({each.rate or each.state})" for each in usable))
    if unusable:
        yield finding("rdma-unusable", ", ".join(f"{each.name} ({each.state})" for each in unusable))
    if facts.gpu.count and usable and not facts.gpu.peermem:
        yield finding(
            "gpu-peermem", f"{facts.gpu.count} GPUs, {len(usable)} RDMA devices, and the module is not loaded"
        )
    if here.hostname_addresses and all(map(is_loopback_host, here.hostname_addresses)) and outside:
        yield finding("hostname-loopback", f"{here.hostname} resolves to {', '.join(here.hostname_addresses)}")


def ports(facts: Facts) -> Iterator[Finding]:
    given = facts.software.environment.get("UCX_TCP_PORT_RANGE", "0")
    if match := re.fullmatch(r"(\d+)-(\d+)", given):
        count = int(match[2]) - int(match[1]) + 1
        if count < PORTS_FEW:
            yield finding("ucx-few-ports", f"UCX_TCP_PORT_RANGE={given}: {max(0, count)} ports")


# -- versions ------------------------------------------------------------------------------------------------------


def versions(facts: Facts) -> Iterator[Finding]:
    has = facts.software
    if not has.curve:
        yield finding("zmq-no-curve", f"libzmq {has.libzmq}")
    if len(has.variants) > 1:
        yield finding("two-variants", f"{', '.join(has.variants)}; asynckv loads {has.variant}")
    wanted = f"nixl_cu{has.torch_cuda.partition('.')[0]}"
    if has.torch_cuda and has.variants and wanted not in has.variants:
        yield finding(
            "variant-clash",
            f"torch {has.torch} is built for CUDA {has.torch_cuda}, and there is {', '.join(has.variants)}",
            remedy=f"pip install {wanted.replace('_', '-')}",
        )
    told = {name: number for name, number in [("nixl", has.nixl), *has.variants.items()] if number}
    if len(set(told.values())) > 1:
        yield finding("nixl-mixed", ", ".join(f"{name} {number}" for name, number in told.items()))
    if facts.gpu.count and has.torch and not has.torch_cuda:
        yield finding("gpu-torch", f"{facts.gpu.count} GPUs, torch {has.torch}")


CHECKS: tuple[Check, ...] = (*UCX_CHECKS, about_peer, cma, shared_memory, limits, cpu, devices, ports, versions)
