"""What the kernel says of a process that does not answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asynckv.tools.diagnose.process import Seen, look, verdict


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
