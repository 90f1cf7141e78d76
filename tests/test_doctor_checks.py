"""Every finding that doctor knows: facts that provoke it, and that a host on which nothing is wrong provokes none."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from msgspec.structs import replace

from asynckv.tools.doctor.catalogue import KINDS, LEVELS, TOPICS
from asynckv.tools.doctor.checks import examine, is_good
from asynckv.tools.doctor.facts import Facts, Gpu, Interface, Machine, Network, PeerFacts, Rdma, Software, Ucx, Use

DOCS = Path(__file__).parents[1] / "docs"
GOOD = Facts(ucx=Ucx())
LO = Interface(name="lo", mtu=65_536, addresses=("127.0.0.1",), is_loopback=True)
ETH = Interface(name="eth0", addresses=("10.0.0.1",))
CARD = Rdma(name="mlx5_0", rate="200 Gb/sec")
TCP = (Use(count=1, sizes="0..inf", how="software emulation", transport="tcp/lo"),)
NO_WAY = "no active messages transport to <no debug data>: posix/memory - no peer failure handler"
TO = "tcp://10.0.0.2:5555"
ENGINE = PeerFacts(
    address=TO, engine_id="prefill", rank="tp0 of 1", incarnation="0a1b2c3d", minor=2, our_minor=2, agent="prefill-1",
    memories=2, memory_bytes=1 << 30, memory_kinds=("cpu",), ucx=Ucx(uses=(), lanes=("rc_mlx5/mlx5_0:1",)),
)  # fmt: skip


def machine(**given: object) -> Facts:
    return replace(GOOD, machine=Machine(**given))  # type: ignore[arg-type]


def network(*interfaces: Interface, **given: object) -> Facts:
    return replace(GOOD, network=Network(interfaces=(LO, *interfaces), **given))  # type: ignore[arg-type]


def software(**given: object) -> Facts:
    return replace(GOOD, software=Software(**given))  # type: ignore[arg-type]


def environment(**given: str) -> Facts:
    return software(environment=given)


def ucx(**given: object) -> Facts:
    return replace(GOOD, ucx=Ucx(**given))  # type: ignore[arg-type]


def peer(**given: object) -> Facts:
    return replace(GOOD, peer=replace(ENGINE, **given))


def silent(**given: object) -> Facts:
    return replace(GOOD, peer=PeerFacts(address=TO, **given))  # type: ignore[arg-type]


PROVOKED: dict[str, list[Facts]] = {
    "nixl-missing": [software(variant="", variants={})],
    "nixl-plugins": [software(plugin_dir_error="NIXL_PLUGIN_DIR=/x is no directory")],
    "nixl-refused": [ucx(failure="refused", stage="agent", detail="NIXL_ERR_BACKEND")],
    "nixl-died": [ucx(failure="died", stage="read", detail="SIGSEGV")],
    "nixl-hung": [
        ucx(failure="hung", stage="connect", detail="nothing was heard of it any more"),
        peer(ucx=Ucx(failure="hung", stage="agent", detail="nothing was heard of it any more")),
    ],
    "ucx-no-transport": [
        ucx(failure="refused", stage="agent", errors=(NO_WAY,)),
        ucx(failure="refused", errors=("no usable transports/devices (asked nosuch on network)",)),
    ],
    "ucx-unavailable": [ucx(unavailable=("network device 'eth9' is not available, please use one or more of: 'lo'",))],
    "ucx-variable": [ucx(unknown=(("UCX_TSL", "UCX_TLS"),)), ucx(unknown=(("UCX_NONSENSE", ""),))],
    "ucx-value": [ucx(failure="refused", errors=("Invalid value for TX_SEG_SIZE: 'banana'",))],
    "ucx-complains": [ucx(errors=("something else",)), ucx(uses=(), lanes=())],
    "reads-rdma": [ucx(lanes=("rc_mlx5/mlx5_0:1",), uses=())],
    "reads-cma": [GOOD, ucx(uses=())],
    "reads-memory": [
        ucx(uses=(Use(count=1, sizes="0..inf", how="software emulation", transport="posix/memory"),)),
        ucx(uses=(), lanes=("posix/memory", "tcp/lo")),
    ],
    "reads-emulated": [ucx(uses=TCP)],
    "reads-emulated-asked": [replace(environment(UCX_TLS="tcp"), ucx=Ucx(uses=TCP))],
    "process-unforeseen": [ucx(uses=TCP)],
    "tcp-segments": [environment(UCX_TCP_TX_SEG_SIZE="8k"), environment(UCX_TCP_RX_SEG_SIZE="8192")],
    "rendezvous": [environment(UCX_RNDV_THRESH="64k")],
    "proto-off": [environment(UCX_PROTO_ENABLE="n")],
    "telemetry-port": [environment(NIXL_TELEMETRY_EXPORTER="prometheus")],
    "completions": [ucx(facts={"completions": "polling"})],
    "ucx-elsewhere": [ucx(library="/usr/lib/libucp.so.0")],
    "gpu-transports": [replace(environment(UCX_TLS="rc,tcp"), gpu=Gpu(count=8))],
    "wrong-bytes": [ucx(wrong=1)],
    "cma": [GOOD],
    "cma-forbidden": [machine(cma_error="EPERM: Operation not permitted", seccomp=True)],
    "ptrace-scope": [machine(ptrace_scope=2), machine(ptrace_scope=3)],
    "no-child": [machine(child_error="this system does not let a process be watched (pidfd_open: ...)")],
    "pid-namespace": [machine(own_pid_namespace=True, container="Docker")],
    "shm-none": [machine(shm_bytes=0, shm_free=0)],
    "shm-small": [machine(shm_bytes=64 << 20, shm_free=64 << 20)],
    "shm-full": [machine(shm_bytes=16 << 30, shm_free=100 << 20)],
    "huge-pages": [machine(shmem_huge_pages="never")],
    "memory-limit": [machine(memory_limit=16 << 30, memory_used=(16 << 30) - 1)],
    "nofile": [machine(nofile=256), machine(nofile=40)],
    "memlock": [replace(machine(memlock=65_536), network=Network(rdma=(CARD,), interfaces=(LO,)))],
    "one-core": [machine(cores_allowed=1)],
    "throttled": [machine(throttled=0.2, cpu_quota=2)],
    "cpu-quota": [machine(cpu_quota=2)],
    "busy": [machine(load=40.0)],
    "numa": [machine(numa_nodes=2)],
    "clocksource": [machine(clocksource="hpet")],
    "only-loopback": [network()],
    "many-devices": [network(ETH, Interface(name="docker0", addresses=("172.17.0.1",)))],
    "small-mtu": [network(Interface(name="tun0", mtu=576, addresses=("10.0.0.1",)))],
    "hostname-loopback": [network(ETH, hostname_addresses=("127.0.1.1",))],
    "rdma": [replace(network(rdma=(CARD,)), software=Software(environment={"UCX_NET_DEVICES": "mlx5_0:1"}))],
    "rdma-unusable": [network(ETH, rdma=(Rdma(name="mlx5_0", state="DOWN", usable=False),))],
    "gpu-peermem": [replace(network(rdma=(CARD,)), gpu=Gpu(count=1))],
    "ucx-few-ports": [environment(UCX_TCP_PORT_RANGE="20000-20001")],
    "zmq-no-curve": [software(curve=False)],
    "two-variants": [software(variants={"nixl_cu12": "1.5.1", "nixl_cu13": "1.5.1"})],
    "variant-clash": [software(torch="2.13", torch_cuda="13.0")],
    "nixl-mixed": [software(nixl="1.4.0")],
    "gpu-torch": [replace(software(torch="2.13.0+cpu"), gpu=Gpu(count=1))],
    "to-name": [silent(stage="resolve", addresses=(), error="Name or service not known")],
    "to-wildcard": [replace(GOOD, peer=PeerFacts(address="tcp://0.0.0.0:5555", stage="resolve"))],
    "to-port-zero": [replace(GOOD, peer=PeerFacts(address="tcp://10.0.0.2:0", stage="resolve"))],
    "to-refused": [silent(stage="connect", errno=errno.ECONNREFUSED, error="Connection refused")],
    "to-timeout": [silent(stage="connect", errno=errno.ETIMEDOUT, error="no answer within 3 s")],
    "to-no-route": [silent(stage="connect", errno=errno.ENETUNREACH, error="Network is unreachable")],
    "to-not-zmq": [silent(stage="speak", error="it said b'HTTP/1.1 400'")],
    "to-silent": [
        silent(stage="speak", mechanism="NULL"),
        silent(stage="speak", mechanism="CURVE", has_keys=True, has_key=True),
        silent(stage="speak", errno=errno.ETIMEDOUT, error="no answer within 2 s"),
        peer(stage="hello", agent="", ucx=None, error="a hello was not answered within 4 s"),
    ],
    "to-turned-away": [silent(stage="speak", turned_away=True, has_keys=True, has_key=True, mechanism="CURVE")],
    "to-wrong-key": [silent(stage="speak", has_keys=True, has_key=True, mechanism="CURVE", hung_up=True)],
    "to-unlisted": [silent(stage="connect", has_keys=True, has_key=True, key_refusal="its key is not ...")],
    "to-no-key": [silent(stage="connect", has_keys=True, key_refusal="its address names no key")],
    "to-needs-keys": [
        silent(stage="connect", has_key=True, key_refusal="its address names a key"),
        silent(stage="speak", mechanism="CURVE"),
    ],
    "to-keyless": [silent(stage="speak", has_keys=True, has_key=True, mechanism="NULL")],
    "to-version": [silent(stage="speak", error="protocol version 2 is not 1; upgrade the older side")],
    "to-minor": [peer(minor=1)],
    "to-unwelcome": [peer(stage="hello", agent="", ucx=None, unwelcome="engine_closed: the engine is draining")],
    "to-damaged": [peer(digest_ok=False, ucx=None)],
    "to-engine": [peer()],
    "to-loopback": [peer(address="tcp://127.0.0.1:5555", addresses=("127.0.0.1",))],
    "to-name-loopback": [peer(address="tcp://vm:5555", addresses=("127.0.1.1",))],
    "to-mtu": [peer(path_mtu=1400)],
    "to-data": [peer(ucx=Ucx(failure="hung", stage="connect", detail="nothing was heard of it any more"))],
    "to-rdma": [peer()],
    "to-cma": [peer(ucx=Ucx())],
    "to-emulated": [peer(ucx=Ucx(uses=(), lanes=("tcp/eth0",)))],
    "to-not-rdma": [
        replace(peer(ucx=Ucx(uses=(), lanes=("tcp/eth0",))), network=Network(interfaces=(LO,), rdma=(CARD,)))
    ],
    "to-life": [peer(life="draining")],
    "to-away": [peer(away_s=6.0)],
    "to-device": [peer(planes={"ucx_net_devices": "lo"})],
    "to-error-mode": [peer(planes={"ucx_error_handling_mode": "none"})],
    "to-versions": [peer(versions={"nixl": "1.6.0"}), peer(versions={"ucx": "1.20.0"})],
}

BESIDE = {
    "reads-emulated": {"process-unforeseen"},
    "process-unforeseen": {"reads-emulated"},
    "reads-memory": {"process-unforeseen"},
}
"""Findings that are worse than a note and found with it, because they are true as well."""


def test_every_finding_is_provoked() -> None:
    assert PROVOKED.keys() == KINDS.keys()


@pytest.mark.parametrize(("code", "facts"), [(code, each) for code, some in PROVOKED.items() for each in some])
def test_facts_that_provoke_it_provoke_it_and_nothing_worse(code: str, facts: Facts) -> None:
    found = examine(facts)
    assert code in {each.code for each in found}
    others = {each.code for each in found if each.level in ("warning", "error")} - {code}
    assert others <= BESIDE.get(code, set())


def test_where_nothing_is_wrong_nothing_is_found() -> None:
    found = examine(GOOD)
    assert {each.code for each in found} == {"cma", "reads-cma"}
    assert is_good(found)


def test_what_is_worse_than_a_note_counts() -> None:
    assert not is_good(examine(machine(ptrace_scope=2)))
    assert is_good(examine(machine(shmem_huge_pages="never")))


def test_the_worst_comes_first() -> None:
    facts = replace(machine(nofile=40, shmem_huge_pages="never", ptrace_scope=2))
    levels = [LEVELS.index(each.level) for each in examine(facts)]
    assert levels == sorted(levels)
    assert levels[0] == 0


def test_few_open_files_are_an_error_where_not_even_the_listener_starts() -> None:
    assert [each.level for f in PROVOKED["nofile"] for each in examine(f) if each.code == "nofile"] == [
        "warning",
        "error",
    ]


def test_every_kind_has_a_topic_a_remedy_and_a_page_that_is_there() -> None:
    for code, kind in KINDS.items():
        assert kind.topic in TOPICS
        assert kind.level in LEVELS
        assert kind.remedy or kind.level == "good", code
        page, _, anchor = kind.link.partition("#")
        text = (DOCS.parent / page).read_text()
        assert not anchor or anchor in anchors(text), kind.link


def anchors(text: str) -> set[str]:
    """Names of headings, as the documentation's own links spell them."""
    kept = "".join
    return {
        kept(c for c in line.lstrip("# ").lower().replace(" ", "-") if c.isalnum() or c in "-_")
        for line in text.splitlines()
        if line.startswith("#")
    }
