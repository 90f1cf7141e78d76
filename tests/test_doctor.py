"""`asynckv doctor` for real: traps that this machine can set, and what is gathered of it."""

from __future__ import annotations

import json
import os
import platform
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asynckv.edges.control.zmq import make_pair
from asynckv.keys import write_pair
from asynckv.tools.doctor import host, probing, software
from asynckv.tools.doctor.checks import examine
from asynckv.tools.doctor.facts import Facts
from asynckv.tools.doctor.probe import Order, Place, Refused, Result
from asynckv.tools.doctor.ucx_log import read_log
from tests.commands import Command
from tests.test_bench_remote import namespaces

DOCTOR = [sys.executable, "-m", "asynckv", "doctor"]


def run(*argv: str, before: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run doctor; its report."""
    command = [*before, *DOCTOR, "--json", "-", *argv]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=50, env={**os.environ, **(environment or {})}
    )
    assert (done.stderr, bool(done.stdout)) == ("", True)
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["schema"] == "asynckv.doctor/1"
    assert done.returncode == (0 if report["good"] else 1)
    return report


def levels(report: dict[str, Any]) -> dict[str, str]:
    return {each["code"]: each["level"] for each in report["findings"]}


def bad(report: dict[str, Any]) -> set[str]:
    machine = {"one-core", "throttled", "nofile", "shm-small", "shm-full", "rdma-unusable", "cma-forbidden"}
    return {code for code, level in levels(report).items() if level in ("warning", "error")} - machine


# -- UCX's log -------------------------------------------------------------------------------------------

LOG = """
[1795.4] [vm:15660:0] ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded from /x/libucp.so.0, git <unknown>)
[1795.4] [vm:15660:0] parser.c:2578 UCX  WARN  unused environment variables: UCX_TSL (maybe: UCX_TLS?); UCX_Q
[1795.4] [vm:15660:0] parser.c:2578 UCX  WARN  (set UCX_WARN_UNUSED_ENV_VARS=n to suppress this warning)
[1795.4] [vm:15660:0] ucp_worker.c:1997 UCX  INFO    o self cfg#0 rma_am(tcp/lo)  am(tcp/lo cma/memory)
[1795.4] [vm:15660:0] ucp_worker.c:1997 UCX  INFO    o intra-node cfg#1 rma_am(tcp/eth0)  am(tcp/eth0 cma/memory)
[1795.4] [vm:15663:0]   +-------+--------+-------------+-----------------------------------+
[1795.4] [vm:15663:0]   | i intra-node cfg#1                                               |
[1795.4] [vm:15663:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1795.4] [vm:15663:0]   +-------+--------+-------------+-----------------------------------+
[1795.4] [vm:15663:0]   | Count | Range  | Description |              Config               |
[1795.4] [vm:15663:0]   |     7 | 0..inf | zero-copy   | cma/memory                        |
[1795.4] [vm:15663:0]   |     9 | 8..16  | software emulation | tcp/lo                     |
[1795.4] [vm:15663:0]   | active message by ucp_am_send* from host memory |
[1795.4] [vm:15663:0]   |    99 | 0..inf | copy-in | tcp/lo |
[1795.5] [vm:15869:0] ucp_context.c:1508 UCX  WARN  transport 'rc' is not available, please use one or more of: cma
[1795.5] [vm:15869:0] select.c:722  UCX  ERROR   no active messages transport to <no debug data>: posix/memory
[vm:1234:0:1234]    stubs.c:107  Assertion `0' failed
"""


def test_ucxs_log_is_read() -> None:
    said = read_log(LOG.splitlines())
    assert (said.version, said.library) == ("1.23.0", "/x/libucp.so.0")
    assert said.lanes == ("tcp/eth0", "cma/memory")
    assert [(u.count, u.how, u.transport) for u in said.uses] == [
        (9, "software emulation", "tcp/lo"),
        (7, "zero-copy", "cma/memory"),
    ]
    assert said.unknown == (("UCX_TSL", "UCX_TLS"), ("UCX_Q", ""))
    assert said.unavailable == ("transport 'rc' is not available, please use one or more of: cma",)
    assert said.errors == (
        "no active messages transport to <no debug data>: posix/memory",
        "stubs.c:107 Assertion `0' failed",
    )


def test_a_log_that_is_long_or_none_is_bounded() -> None:
    flood = [f"[1.0] [vm:1:0] x.c:1 UCX  ERROR  trouble {i} {'x' * 10_000}" for i in range(1000)]
    said = read_log(flood)
    assert len(said.errors) == 20
    assert max(map(len, said.errors)) <= 500
    assert read_log(["\x00\xff", "", "| 1 |"]).errors == ()


# -- this machine ------------------------------------------------------------------------------------------


def test_this_machine_is_described() -> None:
    here = host.machine()
    assert here.cores_allowed == len(os.sched_getaffinity(0))
    assert here.memory_bytes > 1 << 28
    assert here.nofile == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert {each.name for each in host.network().interfaces if each.is_loopback} == {"lo"}


def test_what_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    here = host.machine(tmp_path, tmp_path)
    codes = {each.code for each in examine(Facts(machine=here)) if each.level in ("warning", "error")}
    assert not codes - {"cma-forbidden", "nofile", "one-core", "shm-small", "shm-full", "busy"}
    assert host.gpu(tmp_path, tmp_path).count == 0


V2 = {"cpu.max": "150000 100000", "memory.max": "1000", "memory.current": "999"}
V1 = {"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}
V1 |= {"memory/memory.limit_in_bytes": "1000\n", "memory/memory.usage_in_bytes": "999\n"}
WIDE = {"pods/cpu.max": "max 100000", "pods/memory.max": "2000", "memory/pods/memory.limit_in_bytes": f"{2**63}\n"}
WIDE |= {"cpu/pods/cpu.cfs_quota_us": "-1\n", "cpu/pods/cpu.cfs_period_us": "100000\n"}
STAT = dict.fromkeys(("cpu.stat", "cpu/cpu.stat"), "nr_periods 100\nnr_throttled 25\n")


@pytest.mark.parametrize("files", [V2, V1])
def test_limits_of_a_control_group_are_read(files: dict[str, str], tmp_path: Path) -> None:
    found = {f"fs/cgroup/{name}": text for name, text in (WIDE | STAT | files).items()}
    for name, text in {**found, "self/cgroup": "0::/pods\n1:cpu,cpuacct:/pods\n2:memory:/pods\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    here = host.machine(tmp_path, tmp_path)
    assert (here.cpu_quota, here.throttled, here.memory_limit, here.memory_used) == (1.5, 0.25, 1000, 999)
    assert {"throttled", "memory-limit"} <= {each.code for each in examine(Facts(machine=here))}


def test_the_yama_scope_and_namespaces_are_read(tmp_path: Path) -> None:
    (tmp_path / "sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "sys/kernel/yama/ptrace_scope").write_text("2\n")
    assert host.machine(tmp_path, tmp_path).ptrace_scope == 2


def test_rdma_devices_are_listed_with_why_they_cannot_be_used(tmp_path: Path) -> None:
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    (found,) = host.network(tmp_path).rdma
    assert (found.name, found.state, found.usable) == ("mlx5_0", "DOWN", False)


def test_gpus_are_counted(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"driver/nvidia/gpus/000{number}").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1  Mon\n")
    (tmp_path / "module/nvidia_peermem").mkdir(parents=True)
    found = host.gpu(tmp_path, tmp_path)
    assert (found.count, found.driver, found.peermem) == (2, "570.1", True)


def test_names_are_resolved_or_it_is_said_why_not() -> None:
    assert host.resolve("127.0.0.1") == (("127.0.0.1",), "")
    addresses, error = host.resolve("no-such-host.invalid")
    assert not addresses
    assert error


def test_both_variants_of_nixl_are_seen_and_one_is_chosen() -> None:
    has = software.software()
    assert has.variant in has.variants
    assert has.curve
    assert has.nixl


def test_a_folder_without_plug_ins_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder, text in ((tmp_path, "holds no libplugin_UCX.so"), (tmp_path / "none", "is no directory")):
        monkeypatch.setenv("NIXL_PLUGIN_DIR", str(folder))
        assert text in software.software().plugin_dir_error


def test_secrets_in_the_environment_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIXL_ETCD_TOKEN", "planted")
    assert "planted" not in repr(software.software())


# -- processes that do not do what they are to -----------------------------------------------------------------


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_told_and_left_behind_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with probing.Probe(Order("dies"), tmp_path) as dying:
        os.kill(dying._popen.pid, signal.SIGKILL)
        with pytest.raises(probing.Ended, match="SIGKILL") as ended:
            dying.hear(Place)
    assert ended.value.how == "died"
    with probing.Probe(Order("hangs"), tmp_path) as hanging:
        os.kill(hanging._popen.pid, signal.SIGSTOP)
        monkeypatch.setattr(probing, "START_S", 0.1)
        with pytest.raises(probing.Ended) as ended:
            hanging.hear(Place)
        hanging.end(0)
    assert ended.value.how == "hung"
    for each in (dying, hanging):
        assert not Path(f"/proc/{each._popen.pid}").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "its message cannot be read"),
        (msgspec.msgpack.encode(Refused("x"))[:-1], "its message cannot be read"),
        (b"\x91" * 100_000, "its message cannot be read"),
        (msgspec.msgpack.encode(Result()), "it sent Result instead of Place"),
    ],
)
def test_a_process_that_a_stranger_has_taken_over_is_believed_in_nothing(
    packet: bytes, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "packet").write_bytes(packet)
    say = f"socket.socket(fileno=int(sys.argv[2])).send(open({str(path)!r}, 'rb').read())"
    monkeypatch.setattr(probing, "START", f"import socket, sys; {say}")
    with probing.Probe(Order("lies"), tmp_path) as lying, pytest.raises(probing.Ended, match=why) as ended:
        lying.hear(Place)
    assert ended.value.how == "died"


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.nixl
@pytest.mark.slow
def test_reads_on_this_host_are_compared() -> None:
    report = run()
    assert not bad(report)
    assert report["facts"]["ucx"]["wrong"] == 0
    assert report["facts"]["ucx"]["uses"]


SETTINGS: dict[str, tuple[dict[str, str], set[str]]] = {
    "no such transport": ({"UCX_TLS": "nosuch"}, {"ucx-no-transport", "ucx-unavailable"}),
    "no such device": ({"UCX_NET_DEVICES": "eth9"}, {"ucx-no-transport", "ucx-unavailable"}),
    "misspelt, and small": ({"UCX_TSL": "tcp", "UCX_TCP_TX_SEG_SIZE": "8k"}, {"ucx-variable", "tcp-segments"}),
    "emulated": ({"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_NONSENSE": "1"}, {"ucx-variable"}),
    "no number": ({"UCX_TCP_TX_SEG_SIZE": "banana"}, {"ucx-value"}),
    "no plug-ins": ({"NIXL_PLUGIN_DIR": "/nonexistent"}, {"nixl-plugins"}),
}


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_ucx_that_are_traps(name: str) -> None:
    given, wanted = SETTINGS[name]
    report = run(environment=given)
    assert bad(report) == wanted
    assert ("reads-emulated-asked" in levels(report)) == (given.get("UCX_TLS") == "tcp")


FORBID = """
import ctypes, os, struct, sys
# Load the number of the call; if it is process_vm_readv or process_vm_writev, it fails with EPERM.
code = [(0x20, 0, 0, 0), (0x15, 1, 0, 310), (0x15, 0, 1, 311), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
class Filter(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("code", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Filter(len(code), ctypes.addressof(program)))) == 0, ctypes.get_errno()
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the filter knows this machine's numbers of system calls only"
)
def test_a_filter_that_forbids_process_vm_readv_is_seen() -> None:
    report = run(before=[sys.executable, "-c", FORBID])
    found = levels(report)
    assert found["cma-forbidden"] == found["reads-emulated"] == "warning"
    assert "process-unforeseen" not in found  # "auto" makes the same call, and protects such an engine
    assert report["facts"]["machine"]["seccomp"]
    (text,) = [each["found"] for each in report["findings"] if each["code"] == "reads-emulated"]
    assert "process_vm_readv is forbidden" in text


@pytest.mark.slow
def test_a_small_dev_shm_and_few_descriptors_are_seen() -> None:
    script = 'mount -t tmpfs -o size=64m none /dev/shm && ulimit -n 12 && ulimit -l 64 && exec "$@"'
    before = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if subprocess.run([*before, "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces cannot be made here")
    report = run(before=before)
    assert report["facts"]["machine"]["memlock"] == 64 << 10
    found = levels(report)
    assert found["shm-small"] == "warning"
    assert found["nofile"] == "error"
    assert found["nixl-died"] == "error"  # UCX aborts where it gets no epoll descriptor


ASK = """
import asyncio, sys
from asynckv.tools.doctor import checks, facts, peer
for address in sys.argv[1:]:
    asked = asyncio.run(peer.ask(address, None, lambda text: None))
    print(*[each.code for each in checks.examine(facts.Facts(peer=asked.facts)) if each.level == "error"])
"""


@pytest.mark.slow
def test_a_network_that_swallows_packets_is_told_from_a_closed_port() -> None:
    script = (
        "ip link set lo up && ip link add akv0 type veth peer name akv1 && ip addr add 10.231.8.1/24 dev akv0 "
        "&& ip link set akv0 up && ip link set akv1 up "
        # A foreign address: packets arrive there, and no process takes them.
        '&& ip neigh add 10.231.8.2 lladdr 02:00:00:00:00:07 dev akv0 && exec "$@"'
    )
    before = ["unshare", "--net", "sh", "-c", script, "sh"]
    if subprocess.run([*before, "true"], capture_output=True).returncode:
        pytest.skip("network namespaces cannot be made here")
    addresses = [f"tcp://{address}:5555" for address in ("10.231.8.2", "10.231.8.1", "10.231.9.2")]
    done = subprocess.run([*before, sys.executable, "-c", ASK, *addresses], capture_output=True, text=True, timeout=50)
    assert done.stdout.split() == ["to-timeout", "to-refused", "to-no-route"], done.stderr


ENGINE = """
import asyncio, sys
from asynckv import Engine, EngineConfig, KeysConfig
from tests.engines import memory

async def main():
    bind, *keys = sys.argv[1:]
    keys = KeysConfig(secret=keys[0], authorized=keys[1]) if keys else None
    config = EngineConfig(engine_id="prefill", bind=bind, keys=keys, allow_insecure=not keys)
    async with Engine(config, memory(1)[0]) as engine:
        print(engine.endpoint.address, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        print(engine.statistics().counters.get("data.restarts", 0), len(engine.holds()), flush=True)

asyncio.run(main())
"""


@pytest.mark.nixl
@pytest.mark.slow
def test_an_engine_is_asked_connected_to_and_left_as_it_was() -> None:
    command = [sys.executable, "-c", ENGINE, "tcp://127.0.0.1:0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        report = run("--to", engine.stdout.readline().strip())
        out, _ = engine.communicate("", timeout=30)
    assert not bad(report)
    assert {"to-engine", "to-cma", "to-loopback"} <= levels(report).keys()
    assert report["facts"]["peer"]["ucx"]["uses"] == []  # none of its bytes were read
    assert out.splitlines()[-1] == "0 0", out


@pytest.mark.nixl
@pytest.mark.slow
def test_an_engine_on_another_host_is_reached_with_keys(tmp_path: Path) -> None:
    for name in ("here", "there"):
        write_pair(tmp_path, name, make_pair())
    (tmp_path / "authorized").mkdir()
    for path in tmp_path.glob("*.key"):
        path.rename(tmp_path / "authorized" / path.name)
    secrets, authorized = [str(tmp_path / f"{name}.key_secret") for name in ("there", "here")], tmp_path / "authorized"
    environment = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "akv1"}
    with namespaces() as (there, here):
        inside = [("ip", "netns", "exec", each) for each in (there, here)]
        command = [*inside[0], sys.executable, "-c", ENGINE, "tcp://10.231.7.1:0", secrets[0], str(authorized)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
            assert engine.stdout is not None
            address = engine.stdout.readline().strip()
            assert "#" in address
            keys = [f"--keys={secrets[1]}", f"--authorized={authorized}"]
            report = run("--to", address, *keys, before=inside[1], environment=environment)
            engine.communicate("", timeout=30)
    assert not bad(report)
    assert report["facts"]["peer"]["ucx"]["lanes"] == ["tcp/akv1"]
    assert "to-emulated" in levels(report)
    secret = Path(secrets[0]).read_text().split('"')[-2]
    assert secret not in json.dumps(report)


CONNECT = """
import asyncio, sys
from msgspec.structs import replace
from asynckv.tools.doctor import checks, facts, peer, probing
probing.CONNECT_S = 1.0
asked = asyncio.run(peer.ask(sys.argv[1], None, lambda text: None))
ucx = probing.try_nixl(lambda text: None, asked.place)
found = checks.examine(facts.Facts(peer=replace(asked.facts, ucx=ucx)))
print(*[each.code for each in found if each.level == "error"])
"""


@pytest.mark.nixl
@pytest.mark.slow
def test_a_firewall_before_ucxs_ports_is_told_from_one_before_the_engines() -> None:
    environment = os.environ | {"UCX_TLS": "tcp"}
    with namespaces() as (there, here):
        inside = ("ip", "netns", "exec", there)
        # Data is offered on another network; packets from here arrive, and no process takes them.
        for argv in (
            ("-n", there, "link", "add", "akv2", "type", "veth", "peer", "name", "akv3"),
            ("-n", there, "addr", "add", "10.231.9.1/24", "dev", "akv2"),
            ("-n", there, "link", "set", "akv2", "up"),
            ("-n", there, "link", "set", "akv3", "up"),
            ("-n", here, "route", "add", "10.231.9.0/24", "dev", "akv1"),
            ("-n", here, "neigh", "add", "10.231.9.1", "lladdr", "02:00:00:00:00:07", "dev", "akv1"),
        ):
            subprocess.run(["ip", *argv], check=True, timeout=20)
        command = [*inside, sys.executable, "-c", ENGINE, "tcp://10.231.7.1:0"]
        offered = environment | {"UCX_NET_DEVICES": "akv2"}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=offered) as engine:
            assert engine.stdout is not None
            address = engine.stdout.readline().strip()
            asking = ["ip", "netns", "exec", here, sys.executable, "-c", CONNECT, address]
            done = subprocess.run(asking, capture_output=True, text=True, timeout=50, env=environment)
            engine.communicate("", timeout=30)
    assert done.stdout.split() == ["to-data"], done.stderr


def test_bad_input_is_refused(tmp_path: Path, command: Command) -> None:
    secret, _ = write_pair(tmp_path / "keys", "prefill", make_pair())
    keys = ["--keys", str(secret), "--authorized", str(tmp_path)]
    for argv, text in (
        (["--to", "nonsense"], "is not an address"),
        (["--keys", "x"], "--keys and --authorized belong together"),
        (["--secret", "x"], "No such option: --secret"),
        (keys, "are for --to"),
        (["--to", "tcp://127.0.0.1:5", *keys], "authorized"),
        (["--json", str(tmp_path / "none/x.json")], "cannot be written"),
    ):
        assert text in command.complaint("doctor", *argv)


@pytest.mark.slow
def test_ctrl_c_leaves_nobody_behind() -> None:
    with subprocess.Popen(DOCTOR, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 20
        started: list[str] = []
        while not started and time.monotonic() < deadline:
            started = [pid for pid in children.read_text().split() if b"doctor.probe" in command_of(pid)]
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    assert started
    while any(b"doctor.probe" in command_of(pid) for pid in started):  # each was sent the signal, and ends by itself
        assert time.monotonic() < deadline + 20


def command_of(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
