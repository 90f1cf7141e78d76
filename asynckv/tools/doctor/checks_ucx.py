"""Findings from NIXL and UCX between two processes of this host, and from their environment. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Literal

from asynckv.edges.transports import QUEUES, RDMA, SAME_HOST, is_emulated
from asynckv.tools.doctor.catalogue import Finding, finding
from asynckv.tools.doctor.facts import Facts, Ucx

Way = Literal["rdma", "cma", "memory", "tcp", ""]

SEGMENT = 64 << 10
FATAL = ("no usable transports", "no active messages transport", "no remote registered memory access transport")
UNITS = {"": 1, "b": 1, "k": 1 << 10, "kb": 1 << 10, "m": 1 << 20, "mb": 1 << 20, "g": 1 << 30, "gb": 1 << 30}


def way_of(ucx: Ucx) -> Way:
    """Say how remote memory is read: by what was used, else by what the connection has lanes for."""
    if ucx.uses:
        most = ucx.uses[0]
        names = [part.strip().partition("/")[0] for part in re.split(r"\band\b|,", most.transport)]
        names = [re.sub(r"^\d+% on ", "", name) for name in names]
        if "emulation" in most.how:
            return "tcp" if any(name.startswith("tcp") for name in names) else "memory"
    else:
        names = [lane.partition("/")[0] for lane in ucx.lanes]
    for way, transports in (("rdma", RDMA), ("cma", SAME_HOST)):
        if any(name == each or name.startswith(f"{each}_") for name in names for each in transports):
            return way  # type: ignore[return-value]
    if any(name.startswith(QUEUES[1:]) for name in names):
        return "memory"
    return "tcp" if any(name.startswith("tcp") for name in names) else ""


def installed(facts: Facts) -> Iterator[Finding]:
    if not facts.software.variant:
        yield finding("nixl-missing", "neither nixl_cu12 nor nixl_cu13 can be imported")
    if facts.software.plugin_dir_error:
        yield finding("nixl-plugins", facts.software.plugin_dir_error)


def environment(facts: Facts) -> Iterator[Finding]:
    given = facts.software.environment
    small = {
        name: given[name]
        for name in ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE")
        if name in given and 0 < _bytes(given[name]) < SEGMENT
    }
    if small:
        yield finding("tcp-segments", ", ".join(f"{name}={value}" for name, value in small.items()))
    if given.get("UCX_RNDV_THRESH", "auto") not in ("auto", "inf"):
        yield finding("rendezvous", f"UCX_RNDV_THRESH={given['UCX_RNDV_THRESH']}")
    if given.get("UCX_PROTO_ENABLE", "y").lower() in ("n", "no", "0", "off"):
        yield finding("proto-off", f"UCX_PROTO_ENABLE={given['UCX_PROTO_ENABLE']}")
    if given.get("NIXL_TELEMETRY_EXPORTER", "").lower() == "prometheus":
        yield finding("telemetry-port", "NIXL_TELEMETRY_EXPORTER=prometheus")
    tls = given.get("UCX_TLS", "")
    listed = {entry.partition(":")[0] for entry in tls.split(",")}
    if facts.gpu.count and tls and not tls.startswith("^") and not listed & {"all", "cuda", "cuda_copy", "gpu"}:
        yield finding("gpu-transports", f"{facts.gpu.count} GPUs, and UCX_TLS={tls}")


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    return int(match[1]) * UNITS.get(match[2], 0) if match else 0


def here(facts: Facts) -> Iterator[Finding]:
    """Yield findings about the two processes, and about UCX's choices between them."""
    ucx = facts.ucx
    if ucx is None:
        return
    yield from said(ucx)
    if ucx.failure:
        yield from _failed(facts, ucx)
    else:
        yield from _chosen(facts, ucx)
        if ucx.wrong:
            yield finding("wrong-bytes", f"{ucx.wrong} bytes differ")


def said(ucx: Ucx) -> Iterator[Finding]:
    for name, meant in ucx.unknown:
        hint = f"; UCX suggests {meant}" if meant else ""
        yield finding("ucx-variable", f"{name}{hint}", remedy=f"set {meant} instead, or unset {name}" if meant else "")
    for text in ucx.unavailable:
        yield finding("ucx-unavailable", text)
    for text in ucx.errors:
        if text.startswith("Invalid value"):
            yield finding("ucx-value", text)
        elif not any(each in text for each in FATAL) and "Failed to read iface config" not in text:
            yield finding("ucx-complains", text)


def _failed(facts: Facts, ucx: Ucx) -> Iterator[Finding]:
    fatal = [text for text in ucx.errors if any(each in text for each in FATAL)]
    given = facts.software.environment
    named = [f"{k}={v}" for k, v in given.items() if k in ("UCX_TLS", "UCX_NET_DEVICES", "NIXL_PLUGIN_DIR")]
    settings = f" ({', '.join(named)})" if named else ""
    if ucx.failure == "died":
        yield finding("nixl-died", f"at the stage {ucx.stage}: {ucx.detail}{settings}")
    elif ucx.failure == "hung":
        yield finding("nixl-hung", f"{ucx.detail}{settings}")
    elif fatal:
        yield finding("ucx-no-transport", f"{fatal[0]}{settings}")
    else:
        known = facts.software.plugin_dir_error or any(e.startswith("Invalid value") for e in ucx.errors)
        if not known and facts.software.variant:
            yield finding("nixl-refused", f"at the stage {ucx.stage}: {ucx.detail}{settings}")


def _chosen(facts: Facts, ucx: Ucx) -> Iterator[Finding]:
    given = facts.software.environment
    way = way_of(ucx)
    used = ucx.uses[0] if ucx.uses else None
    by = f"{used.transport}, {used.how}" if used else f"lanes {', '.join(ucx.lanes)}"
    why = reasons(facts, way)
    text = f"{by}; {why}" if why else by
    expected = is_emulated(
        given.get("UCX_TLS", ""),
        given.get("UCX_NET_DEVICES", ""),
        [each.name for each in facts.network.rdma if each.usable],
        is_local=True,
        is_copied=not facts.machine.cma_error,
    )
    if not way:
        yield finding("ucx-complains", f"which way reads took could not be told ({by})")
    elif way == "tcp":
        yield finding("reads-emulated-asked" if expected and given.get("UCX_TLS") else "reads-emulated", text)
    else:
        yield finding(f"reads-{way}", text)
    if way in ("tcp", "memory") and not expected:
        yield finding("process-unforeseen", f"reads went by {by}")
    if ucx.library and "nixl_cu" not in ucx.library:
        yield finding("ucx-elsewhere", f"UCX {ucx.version} of {ucx.library}")
    if ucx.facts.get("completions") == "polling":
        yield finding("completions", f"UCX {ucx.version}")


def reasons(facts: Facts, way: Way) -> str:
    """Say why UCX chose that way between two processes of this host."""
    given = facts.software.environment
    tls, device = given.get("UCX_TLS", ""), given.get("UCX_NET_DEVICES", "")
    forbidden = facts.machine.cma_error
    causes = {
        "process_vm_readv works between processes of this host": way == "cma",
        f"UCX_TLS={tls}": tls,
        f"process_vm_readv is forbidden ({forbidden})": forbidden and way in ("tcp", "memory"),
        f"UCX_NET_DEVICES={device}": device,
        "no RDMA device": way != "rdma" and not facts.network.rdma,
    }
    found = [cause for cause, is_there in causes.items() if is_there]
    return "because " + ", ".join(found) if found else ""


UCX_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (installed, environment, here)
