"""Workers elsewhere: a command with stdin and stdout as the lines, on this host and in another network."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asynckv.tools.bench.options import Options
from asynckv.tools.bench.protocol import Setup, encode
from asynckv.tools.plan.models import Heads, Model

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

ASYNCKV = [sys.executable, "-m", "asynckv"]
WORKER = [*ASYNCKV, "bench", "worker"]
SMALL = ["bench", "--layers", "2", "--prompt-tokens", "64:300", "--concurrency", "4", "--timeout-s", "5"]


def remote(*before: str, host: str = "127.0.0.1") -> list[str]:
    """Options of a run with a prefill side that a command starts."""
    return ["--remote", shlex.join([*before, *WORKER]), "--remote-host", host]


def run(*argv: str, inside: tuple[str, ...] = (), status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a small benchmark to its end."""
    command = [*inside, *ASYNCKV, *SMALL, *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == status, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done


def check(report: Path, requests: int) -> str:
    """Every byte has arrived; returns how."""
    found = json.loads(report.read_text())
    assert found["requests"] == {"submitted": requests, "completed": requests, "read_nothing": 0, "failed": 0}
    assert found["bytes"]["verified"] == found["bytes"]["wanted"] > 0
    assert found["bytes"]["wrong"] == 0
    assert not any(found["blocks"].values())
    return str(found["environment"]["ucx_transports"])


# -- what the lines carry ------------------------------------------------------------------------------


def test_a_command_is_a_worker_and_its_log_comes_here(tmp_path: Path) -> None:
    # What UCX prints to stdout is none of the lines.
    command = remote("env", "UCX_LOG_LEVEL=info")
    report, log = tmp_path / "report.json", tmp_path / "log"
    done = run("--requests", "20", "--json", str(report), "--log", str(log), *command)
    assert check(report, 20) != ""
    assert "UCX" in done.stderr
    started = [e["engine_id"] for e in map(json.loads, log.read_text().splitlines()) if e["event"] == "engine_started"]
    assert sorted(started) == ["decode", "prefill"]


def test_two_networks_move_every_byte(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with namespaces() as spaces:
        before = ["ip", "netns", "exec", spaces[1], "env", "UCX_NET_DEVICES=akv1"]
        run(
            *("--requests", "30", "--transport", "tcp"),
            *("--json", str(report)),
            *remote(*before, host="10.231.7.2"),
            inside=("ip", "netns", "exec", spaces[0], "env", "UCX_NET_DEVICES=akv0"),
        )
    assert "tcp/akv" in check(report, 30)


# -- what goes wrong -----------------------------------------------------------------------------------


def test_a_command_that_fails_says_why_itself() -> None:
    done = run("--remote", "sh -c 'echo no such host >&2; exit 7'", "--remote-host", "127.0.0.1", status=1)
    assert "no such host" in done.stderr
    assert "prefill/tp0 (process " in done.stdout
    assert "exited with status 7" in done.stdout


def test_a_command_that_cannot_be_run_or_greets_is_named() -> None:
    done = run("--remote", "/nowhere/ssh host", "--remote-host", "127.0.0.1", status=2)
    assert "--remote /nowhere/ssh host: /nowhere/ssh cannot be run: No such file" in done.stderr
    assert ": No closing quotation" in run("--remote", "'", "--remote-host", "127.0.0.1", status=2).stderr
    done = run("--remote", "echo Welcome", "--remote-host", "127.0.0.1", status=1)
    assert "prefill/tp0 answered b'Welcome\\n', which is not a valid answer" in " ".join(done.stdout.split())


def test_a_worker_refuses_another_version_and_what_is_no_driver() -> None:
    model = Model("tiny", (Heads(4, 16),) * 2)
    rank: dict[str, Any] = {"role": "prefill", "engine_id": "prefill", "tp_rank": 0, "pp_stage": 0, "model": model}
    rest: dict[str, Any] = {"num_blocks": [4], "bind": "tcp://127.0.0.1:0", "keys": None, "env": {}, "log": None}
    setup = Setup(version="0.0.1", options=Options(), **rank, **rest)
    done = subprocess.run(WORKER, input=encode(setup), capture_output=True, timeout=50)
    assert json.loads(done.stdout)["message"].endswith("but its driver is 0.0.1; install the same version on both")
    done = subprocess.run(WORKER, input=b"hello\n", capture_output=True, timeout=50)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"stdin is not from a driver" in done.stderr


@contextmanager
def long_run(log: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A run that is under way, and far from its end, with its workers; the one elsewhere takes itself for no child."""
    command = [*ASYNCKV, *SMALL, "--requests", "100000", "--log", str(log), *remote("env", "-u", "ASYNCKV_FLEET")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        while not log.exists() or '"pull_ended"' not in log.read_text():
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.05)
        pid = process.pid
        yield process, [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_workers_end_with_their_driver(number: int, status: int, tmp_path: Path) -> None:
    with long_run(tmp_path / "log") as (process, workers):
        assert len(workers) == 2
        process.send_signal(number)
        assert process.wait(60) == status
        wait_until_gone(workers)


def test_the_end_of_a_worker_elsewhere_is_reported(tmp_path: Path) -> None:
    with long_run(tmp_path / "log") as (process, workers):
        os.kill(workers[0], signal.SIGKILL)
        assert process.wait(60) == 1
        wait_until_gone(workers)


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 40
    for pid in pids:
        while os.path.exists(f"/proc/{pid}"):
            assert time.monotonic() < deadline, f"process {pid} is still there"
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            select.select([handle], [], [], 1)
            os.close(handle)


@contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them: 10.231.7.1 at `akv0`, 10.231.7.2 at `akv1`."""
    names = f"akv{os.getpid()}a", f"akv{os.getpid()}b"

    def ip(*argv: str) -> None:
        subprocess.run(["ip", *argv], check=True, capture_output=True, timeout=20)

    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ip("link", "add", "akv0", "netns", names[0], "type", "veth", "peer", "name", "akv1", "netns", names[1])
            for i, name in enumerate(names):
                ip("-n", name, "addr", "add", f"10.231.7.{i + 1}/24", "dev", f"akv{i}")
                ip("-n", name, "link", "set", f"akv{i}", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as exc:
            why = exc.stderr.decode().strip() if isinstance(exc, subprocess.CalledProcessError) else str(exc)
            pytest.skip(f"network namespaces cannot be made here: {why}")
        yield names
    finally:
        for name in made:
            ip("netns", "del", name)
