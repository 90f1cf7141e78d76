"""What the kernel says of a process that does not answer."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from asynckv import told
from asynckv.edges.kernel import identity, processor_waits
from asynckv.engine.lag import LoopLag
from asynckv.tools.diagnose.join import Service, join
from asynckv.tools.diagnose.leaks_live import look_here
from asynckv.tools.diagnose.process import Seen, look, verdict
from asynckv.tools.diagnose.records import Record


@pytest.mark.parametrize(
    ("state", "cpu_s", "says"),
    [
        ("T", 0.0, "pid 7 is stopped (T): kill -CONT 7"),
        ("t", 0.0, "stopped by a debugger (t)"),
        ("D", 0.0, "waits for a device or a file system (D)"),
        ("Z", 0.0, "pid 7 has ended (Z)"),
        ("R", 4.9, "computes (R, 98% of a core) and its event loop is away; py-spy dump --pid 7 shows where"),
        ("S", 0.1, "waits (S, 2% of a core): its event loop is blocked, or the engine is closing"),
    ],
)
def test_a_process_that_does_not_answer_is_told_with_what_to_do(state: str, cpu_s: float, says: str) -> None:
    before = Seen(7, "S", 100, 10.0, 50.0)
    assert says in verdict(before, Seen(7, state, 100, 10.0 + cpu_s, 55.0))
    assert "has ended meanwhile" in verdict(before, Seen(7))
    assert "has ended meanwhile" in verdict(before, Seen(7, state, 200, 0.0, 55.0)), "another with this pid"
    assert verdict(Seen(7), Seen(7)) == "pid 7 listens, and its event loop is away"


@pytest.mark.parametrize(
    ("line", "file", "text"),
    [
        ("0::/docker/ab12", "docker/ab12/cgroup.events", "populated 1\nfrozen 1\n"),
        ("4:freezer:/docker/ab12", "freezer/docker/ab12/freezer.state", "FROZEN\n"),
    ],
)
def test_a_paused_container_is_told_from_a_device_that_hangs(line: str, file: str, text: str, tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "stat").write_text(f"7 (python) D {' '.join(map(str, range(4, 40)))}\n")
    (proc / "7" / "cgroup").write_text(f"1:cpu:/\n{line}\n")
    (cgroups / file).parent.mkdir(parents=True)
    for state, is_paused in ((text, True), ("populated 1\nfrozen 0\n" if "::" in line else "THAWED\n", False)):
        (cgroups / file).write_text(state)
        said = verdict(Seen(7), look(7, proc, cgroups))
        assert ("paused: its cgroup /docker/ab12 is frozen" in said) is is_paused
        assert ("waits for a device" in said) is not is_paused


def test_a_process_is_found_whatever_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = " ".join(["T", *map(str, range(4, 40))])
    (tmp_path / "7" / "stat").write_text(f"7 (a) S (b) {fields}\n")
    seen = look(7, tmp_path)
    assert (seen.state, seen.began) == ("T", 22)
    assert seen.cpu_s == (14 + 15) / os.sysconf("SC_CLK_TCK")
    assert look(8, tmp_path) == Seen(8)
    assert look(os.getpid()).state == "R"


IDENTITY = """
import json, os
from asynckv.edges.kernel import identity
print(json.dumps({"pid": os.getpid()} | identity()), flush=True)
input()
"""


@contextmanager
def process(*wrapped: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that says what it is, and lives until this is over."""
    command = [*wrapped, sys.executable, "-c", IDENTITY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def looked(*processes: dict[str, Any]) -> Service:
    """Look for engines of this host that said so as they started."""
    records = []
    for i, said in enumerate(processes):
        start = f"{i:x}" * 32
        rank = f"engine{i}/tp0@{start[:8]}"
        fields = {"host": socket.gethostname(), **said}
        records.append(Record(1e9, told.EngineStarted.event, "info", f"engine{i}", rank, start, fields))
    look_here(service := join(records))
    return service


def test_the_pids_of_two_containers_are_not_those_of_their_host() -> None:
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("PID namespaces were not tried: unshare --pid needs root")
    unshare = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    me = {"pid": os.getpid()} | identity()
    with ExitStack() as stack:
        children = [stack.enter_context(process(*x)) for x in (unshare, unshare, ())]
        one, two, here = (json.loads(x.stdout.readline()) for x in children if x.stdout is not None)
        assert one["pid"] == two["pid"] == 1
        assert one["boot_id"] == two["boot_id"] == here["boot_id"]
        assert len({x["pid_namespace"] for x in (one, two, here)}) == 3
        service = looked(one, two, here, me)
        assert not any(x.gone or x.halted or x.is_elsewhere for x in service.processes.values())
        children[2].kill()
        children[2].wait()
        service = looked(one, two, here, me)
        assert {x.start: x.gone for x in service.processes.values() if x.gone} == {
            "22222222": f"pid {here['pid']} is not there any more"
        }


def test_the_kernel_says_for_how_long_there_was_no_processor(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "thread-self").mkdir(parents=True)
    (proc / "self").mkdir()
    (proc / "self/cgroup").write_text("4:cpu,cpuacct:/old\n0::/pod/engine\n")
    assert processor_waits(proc, cgroups)() == {}
    (proc / "thread-self/schedstat").write_text("5000000000 1500000000 7\n")
    assert processor_waits(proc, cgroups)() == {"waited_s": 1.5}
    for path, text in (
        ("pod", "throttled_usec 2250000"),
        ("pod/engine", "usage_usec 1"),
        ("cpu/old", "throttled_time 9"),
    ):
        (cgroups / path).mkdir(parents=True)
        (cgroups / path / "cpu.stat").write_text(f"nr_periods 1\n{text}\n")
    assert processor_waits(proc, cgroups)() == {"waited_s": 1.5, "throttled_s": 2.25}
    assert set(processor_waits()()) <= {"waited_s", "throttled_s"}


def test_a_pause_says_how_much_of_it_had_no_processor() -> None:
    counted = {"waited_s": 1.0, "throttled_s": 0.5}
    lag = LoopLag(1.0, lambda: dict(counted))
    assert lag.note(10.0) == {}, "there is no earlier reading"
    counted["waited_s"] = 3.25
    assert lag.note(13.0) == {"waited_s": 2.25, "throttled_s": 0.0}
    assert LoopLag(1.0).note(0.0) == {}
