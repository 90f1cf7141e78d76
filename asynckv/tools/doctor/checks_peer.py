"""Findings from the other side's answers. The checks are pure functions."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from asynckv.arguments import is_loopback_host
from asynckv.tools.doctor.catalogue import Finding, finding
from asynckv.tools.doctor.checks_ucx import said, way_of
from asynckv.tools.doctor.facts import Facts, PeerFacts

AWAY_S = 1.0
MOST_PACKET = 65_535  # largest IP packet: loopback's own MTU is above it
WILDCARDS = ("*", "0.0.0.0", "::")


def _name(address: str) -> tuple[str, str]:
    host, _, port = address.partition("#")[0].removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), port


def address(facts: Facts, peer: PeerFacts) -> Iterator[Finding]:
    name, port = _name(peer.address)
    if name in WILDCARDS:
        yield finding("to-wildcard", peer.address)
    elif port in ("0", "*"):
        yield finding("to-port-zero", peer.address)
    elif peer.stage == "resolve" and peer.error:
        yield finding("to-name", f"{name}: {peer.error}")
    elif peer.addresses and all(map(is_loopback_host, peer.addresses)):
        leads = f"{name} is {', '.join(peer.addresses)}"
        yield finding("to-loopback" if name in (*peer.addresses, "localhost") else "to-name-loopback", leads)


def reached(facts: Facts, peer: PeerFacts) -> Iterator[Finding]:
    if peer.stage == "resolve":
        return
    name = f"{peer.address.partition('#')[0]}"
    if peer.key_refusal:
        code = "to-needs-keys" if not peer.has_keys else "to-unlisted" if peer.has_key else "to-no-key"
        yield finding(code, peer.key_refusal)
    elif peer.stage == "connect":
        if peer.errno == errno.ECONNREFUSED:
            yield finding("to-refused", f"{name}: {peer.error}")
        elif peer.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            yield finding("to-no-route", f"{name}: {peer.error}", remedy=f"ip route get {_name(peer.address)[0]}")
        else:
            yield finding("to-timeout", f"{name}: {peer.error}")
    elif peer.stage == "speak":
        yield from _speechless(peer, name)
    elif peer.unwelcome:
        yield finding("to-unwelcome", peer.unwelcome)
    elif peer.error:
        yield finding("to-silent", f"{name}: {peer.error}")


def _speechless(peer: PeerFacts, name: str) -> Iterator[Finding]:
    if "protocol version" in peer.error:
        yield finding("to-version", f"{name}: {peer.error}")
    elif peer.mechanism == "NULL" and peer.has_key:
        yield finding("to-keyless", f"{name} offers NULL")
    elif peer.turned_away:
        yield finding(
            "to-turned-away", f"{name} refuses the key of this side{f' ({peer.local})' if peer.local else ''}"
        )
    elif not peer.mechanism and peer.errno == errno.ETIMEDOUT:
        yield finding("to-silent", f"{name} takes connections, and does not even greet")
    elif not peer.mechanism:
        yield finding("to-not-zmq", f"{name}: {peer.error or 'it does not greet'}")
    elif peer.mechanism == "CURVE" and not peer.has_keys:
        yield finding("to-needs-keys", f"{name} asks for CURVE")
    elif peer.mechanism == "CURVE" and peer.has_key and peer.hung_up:
        yield finding("to-wrong-key", f"{name} asks for CURVE, and does not accept packets for the key in the address")
    else:
        yield finding("to-silent", f"{name} greets ({peer.mechanism}), and answers nothing")


def answered(facts: Facts, peer: PeerFacts) -> Iterator[Finding]:
    if not peer.engine_id:
        return
    if not peer.unwelcome:
        shares = [f"tokens {rank} of {size} by {stretch}" for _, size, rank, stretch in peer.token_shards]
        layout = ", ".join([f"layout {peer.layout[:12]}", *dict.fromkeys(shares)])
        busy = ", ".join(f"{name} {value}" for name, value in peer.gauges.items() if value and "." not in name)
        memory = f"{peer.memory_bytes / 1e9:.3g} GB in {peer.memories} regions of {'/'.join(peer.memory_kinds)} memory"
        yield finding(
            "to-engine",
            f"{peer.engine_id} {peer.rank}@{peer.incarnation[:8]}, protocol {peer.major}.{peer.minor}, "
            f"{layout}, {memory}, metadata {peer.metadata_bytes} bytes; {busy or 'idle'}",
        )
    if peer.agent and peer.minor != peer.our_minor:
        yield finding("to-minor", f"{peer.major}.{peer.minor} there, {peer.major}.{peer.our_minor} here")
    if not peer.digest_ok:
        yield finding("to-damaged", f"{peer.metadata_bytes} bytes do not have the digest that came with them")
    yield from _differences(facts, peer)


def settings(facts: Facts, peer: PeerFacts) -> Iterator[Finding]:
    if peer.life not in ("", "running"):
        yield finding("to-life", f"it is {peer.life}")
    if peer.away_s > AWAY_S:
        yield finding("to-away", f"for {peer.away_s:.1f} s at most since its start")
    device = peer.planes.get("ucx_net_devices", "")
    if device == "lo" and not all(map(is_loopback_host, peer.addresses)):
        yield finding("to-device", f"UCX_NET_DEVICES={device} there")
    if peer.planes.get("ucx_error_handling_mode", "").startswith("none"):
        yield finding("to-error-mode", "ucx_error_handling_mode is none there")


def _differences(facts: Facts, peer: PeerFacts) -> Iterator[Finding]:
    sending = {a: each.mtu for each in facts.network.interfaces for a in each.addresses}.get(peer.local, 0)
    if 0 < peer.path_mtu < min(sending, MOST_PACKET):
        yield finding("to-mtu", f"{peer.path_mtu} on the way, {sending} at {peer.local}")
    has = facts.software
    ours = {"asynckv": has.asynckv, "nixl": has.nixl, "ucx": peer.ucx.version if peer.ucx else ""}
    differ = [f"{k} {v} here, {peer.versions[k]} there" for k, v in ours.items() if v and peer.versions.get(k, v) != v]
    if differ:
        yield finding("to-versions", ", ".join(differ))


def data(facts: Facts, peer: PeerFacts) -> Iterator[Finding]:
    if peer.ucx is None:
        return
    ucx = peer.ucx
    yield from said(ucx)
    if ucx.failure:
        complaint = f"; UCX: {ucx.errors[0]}" if ucx.errors else ""
        code = "nixl-died" if ucx.failure == "died" else "to-data" if ucx.stage == "connect" else "nixl-hung"
        yield finding(code, f"at the stage {ucx.stage}: {ucx.detail}{complaint}")
        return
    way = way_of(ucx)
    lanes = f"lanes {', '.join(ucx.lanes)}"
    text = f"{ucx.uses[0].transport}, {ucx.uses[0].how}; {lanes}" if ucx.uses else lanes
    usable = [each.name for each in facts.network.rdma if each.usable]
    yield finding(f"to-{way}" if way in ("rdma", "cma") else "to-emulated", text)
    if way not in ("rdma", "cma") and usable:
        yield finding("to-not-rdma", f"{', '.join(usable)} here; {lanes}")


def about_peer(facts: Facts) -> Iterator[Finding]:
    for check in (address, reached, answered, settings, data):
        yield from check(facts, facts.peer) if facts.peer is not None else ()
