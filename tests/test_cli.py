"""The command line: one line and exit status 2 for bad input; a small run end to end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asynckv.tools.bench.driver import Measured
from asynckv.tools.bench.processes import MARK, Processes
from asynckv.tools.bench.protocol import Ended, encode
from asynckv.tools.bench.workers import Worker
from tests.commands import Command, asynckv, python

SMALL = ["bench", "--layers", "2", "--prompt-tokens", "64:300", "--concurrency", "4"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--model", "lama-3.1-8b"], "did you mean llama-3.1-8b?"),
        (["--hf-config", "NONE/config.json"], "No such file"),
        (["--trace", "NONE/trace.jsonl"], "No such file"),
        (["--prompt-tokens", "5:2"], "'5:2'"),
        (["--dtype", "int3"], "'int3'"),
        (["--layers", "0"], "--layers 0"),
        (["--kv-heads", "-1"], "--kv-heads -1"),
        (["--requests", "0"], "Invalid value for '--requests'"),
        (["--concurrency", "0"], "Invalid value for '--concurrency'"),
        (["--block-size", "0"], "--block-size 0"),
        (["--tp", "0"], "--tp 0"),
        (["--tp", "3"], "--tp 3 (prefill side): 8 entries cannot be cut evenly over tp_size 3"),
        (["--tp", "1:0"], "--tp 1:0: '0' (decode side) is no number from 1 to 1024"),
        (["--block-size", "0:16"], "--block-size 0:16: '0' (prefill side) is no number"),
        (["--tp", "2:x"], "--tp 2:x: 'x' (decode side) is no number"),
        (["--order", "hnd:zigzag"], "order 'zigzag' is unknown; use one of nhd, hnd,"),
        (["--prefix-hit", "101%"], "--prefix-hit '101%'"),
        (["--prefix-hit", "-1"], "--prefix-hit '-1'"),
        (["--dcp", "8:0"], "--dcp 8:0: '0' (decode side) is no number from 1 to 1024"),
        (["--cp-interleave", "x"], "--cp-interleave x: 'x' (prefill side) is no number from 1 to"),
        (["--tp", "8", "--dcp", "1:8"], "--tp 8 --dcp 8 --cp-interleave 1 (decode side): dcp 8 shares tokens over"),
        (["--model", "deepseek-v3", "--tp", "8", "--dcp", "3"], "tp_rank 0 of 8 cannot have shard 0 of 3"),
        (
            ["--model", "deepseek-v3", "--dcp", "2"],
            "(prefill side): group 0 ('0: latents'), tokens 0 of 2 by 1: tp_rank 0",
        ),
        (
            ["--model", "deepseek-v3", "--tp", "1:8", "--dcp", "1:8", "--cp-interleave", "1:3"],
            "(decode side): group 0 ('0: latents'), tokens 0 of 8 by 3: an interleave of 3 does not fit 2 tokens",
        ),
        (["--model", "mamba2-2.7b", "--tp", "2", "--dcp", "2"], "mamba2-2.7b keeps only states and sliding windows"),
        (["--pp", "99:1"], "pp_size 99 does not exist for 32 layers"),
        (["--model", "deepseek-v3", "--kv-heads", "2"], "--kv-heads 2: deepseek-v3"),
        (["--seed", "-1"], "Invalid value for '--seed'"),
        (["--timeout-s", "nan"], "Invalid value for '--timeout-s'"),
        (["--timeout-s", "1"], "Invalid value for '--timeout-s'"),
        (["--timeout-s", "inf"], "Invalid value for '--timeout-s'"),
        (["--pool-mb", "1"], "--max-prompt-tokens"),
        (["--posting-threads", "two"], "posting_threads is 'two'; it must be 0 (post on the loop) to 16"),
        (["--posting-threads", "17"], "posting_threads is 17"),
        (["--json", "NONE/report.json"], "--json NONE/report.json"),
        (["--log", "NONE/log.jsonl"], "--log NONE/log.jsonl"),
        (["--log", "/dev/null", "--json", "/dev/null"], "name the same file, /dev/null"),
        (["--prompt-tokens", "128:0.8,x:1"], "'x:1' is no length and weight"),
        (["--prompt-tokens", "128:0.8,256"], "'256' is no length and weight"),
        (["--prompt-tokens", "128:1,256:-1"], "'256:-1'"),
        (["--prompt-tokens", "1:1e308,2:1e308"], "add up to inf"),
        (["--rate", "0"], "Invalid value for '--rate'"),
        (["--rate", "nan"], "Invalid value for '--rate'"),
        (["--speed", "10"], "--speed 10 needs a --trace with a timestamp"),
        (["--speed", "10", "--rate", "5"], "--rate 5 and --speed 10 contradict each other"),
        (["--engines", "0"], "--engines 0: '0' (prefill side) is no number from 1 to 256"),
        (["--engines", "1:1000"], "--engines 1:1000"),
        (["--shared-prefix", "0"], "--shared-prefix 0"),
        (["--shared-prefix", "64:0"], "--shared-prefix 64:0: the prefixes are outside 1 ..."),
        (["--shared-prefix", "64:x"], "--shared-prefix '64:x' is neither a length"),
        (["--shared-prefix", "64", "--prefix-hit", "10%"], "--prefix-hit 10% was given, but for prompts"),
        (["--shared-prefix", "64", "--prefix-cache", "-1"], "Invalid value for '--prefix-cache'"),
        (["--floor", "--announced"], "leave out --announced"),
        (["--remote-host", "10.0.0.1"], "--remote-host has no effect without --remote"),
        (["--remote", "ssh host asynckv bench worker"], "--remote needs --remote-host"),
        (["--remote", "ssh host", "--remote-host", "0.0.0.0"], "--remote needs --remote-host"),
        (["--remote", "ssh host", "--remote-host", "no.such.invalid"], "--remote-host no.such.invalid: "),
        (["--remote", " ", "--remote-host", "127.0.0.1"], "--remote is empty"),
        (["--remote", "ssh host", "--remote-host", "127.0.0.1", "--floor"], "leave out --remote"),
    ],
)
def test_bad_input_is_one_line_and_status_2(argv: list[str], says: str, tmp_path: Path, command: Command) -> None:
    none = str(tmp_path / "none")
    said = command.complaint("bench", *(x.replace("NONE", none) for x in argv))
    assert says.replace("NONE", none) in said


def test_a_trace_and_lengths_contradict_each_other(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 5}\n')
    said = command.complaint("bench", "--trace", path, "--prompt-tokens", "64")
    assert "--prompt-tokens and --trace were both given" in said


def test_a_config_that_does_not_parse_names_the_file(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    assert f"--hf-config {path}: is not JSON" in command.complaint("bench", "--hf-config", path)


@pytest.mark.slow
def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from asynckv.tools import cli\n"
        "assert not {'torch', 'nixl', 'zmq', 'numpy', 'structlog'} & sys.modules.keys()\n"
    )
    loaded = python("-c", code)
    assert loaded.returncode == 0, loaded.stderr
    shown = asynckv("bench", "--help")
    assert shown.returncode == 0
    assert "--max-prompt-tokens" in shown.stdout


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, []),
        (2, ["--rate", "10", "--timeout-s", "2"]),  # most are due later than a lease of theirs would last
        (3, ["--tp", "1:2", "--follow"]),
        (3, ["--tp", "2:1", "--order", "hnd", "--prefix-hit", "37", "--block-size", "48:16"]),
        (3, ["--model", "nemotron-h-8b", "--tp", "1:2", "--prefix-hit", "30%", "--order", "nhd:hnd"]),
        (5, ["--model", "deepseek-v3", "--tp", "1:4", "--dcp", "1:4", "--prefix-hit", "37"]),
        (5, ["--model", "qwen3-next-80b-a3b", "--tp", "4:1", "--dcp", "2:1", "--cp-interleave", "2"]),
        (6, ["--model", "deepseek-v3", "--tp", "2:4", "--dcp", "2:4", "--block-size", "48:32", "--prefix-hit", "30%"]),
    ],
)
def test_a_small_run_verifies_every_byte(ranks: int, options: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    # UCX warns of a variable that it does not know.
    argv = [*SMALL, "--requests", "30", *options, "--json", "-", "--log", str(log)]
    done = python("-m", "asynckv", *argv, UCX_NO_SUCH="1")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)  # nothing else on stdout
    assert report["requests"] == {"submitted": 30, "completed": 30, "read_nothing": 0, "failed": 0}
    assert report["bytes"]["moved"] >= report["bytes"]["wanted"] == report["bytes"]["verified"] > 0
    assert report["bytes"]["wrong"] == 0
    assert not any(report["blocks"].values())
    events = [json.loads(line) for line in log.read_text().splitlines()]
    started = next(e for e in events if e["event"] == "workers_started")
    assert len(set(started["pids"].values())) == ranks
    assert all(not os.path.exists(f"/proc/{pid}") for pid in started["pids"].values())


def trace_of_three_conversations(path: Path) -> Path:
    """Thirty requests 20 ms apart; every one is 100 tokens longer than the one before in its conversation."""
    lines = []
    for i in range(30):
        client, tokens = i % 3, 400 + 100 * (i // 3)
        chunks = [1000 * client + j for j in range(tokens // 512)] + [100_000 + i] * (tokens % 512 > 0)
        lines.append(json.dumps({"timestamp": 20 * i, "input_length": tokens, "output_length": 1, "hash_ids": chunks}))
    path.write_text("\n".join(lines))
    return path


@pytest.mark.nixl
@pytest.mark.slow
def test_a_trace_is_played_with_its_times_and_prefixes(tmp_path: Path) -> None:
    trace = trace_of_three_conversations(tmp_path / "trace.jsonl")
    argv = ["--trace", str(trace), "--speed", "2", "--engines", "3:1", "--json", "-"]
    done = asynckv("bench", "--layers", "2", *argv)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["requests"]["completed"] == 30
    assert report["bytes"]["verified"] == report["bytes"]["wanted"]
    # Prompts of 600 to 1,000 tokens begin with one full chunk, those of 1,100 to 1,300 with two; each is new once.
    assert report["prefix"]["hit_tokens"] == 3 * 512 * ((5 - 1) + 1 + (3 - 1) * 2)
    assert report["prefix"]["lent_shared"] > 0
    assert report["schedule"]["scheduled_per_s"] == pytest.approx(30 / 0.29)
    assert report["windows"]["seconds"] >= 0.29
    assert report["latency_s"]["p50"] >= report["pull_s"]["p50"]
    assert len(report["processes"]) == 4


@pytest.mark.nixl
@pytest.mark.slow
def test_who_waits_behind_a_window_that_took_too_long_is_late_by_that_much() -> None:
    argv = ["--requests", "60", "--prompt-tokens", "4096", "--rate", "100000", "--pool-mb", "256", "--verify", "off"]
    done = asynckv("bench", "--layers", "2", *argv, "--json", "-")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    schedule, windows = report["schedule"], report["windows"]
    assert windows["count"] == 8
    behind = windows["seconds"] - 60 / schedule["scheduled_per_s"]
    # The pulls that ended last had come by the end of the schedule, and waited through all windows.
    assert report["latency_s"]["max"] > 0.95 * behind > 0
    assert schedule["late_s"]["max"] > report["pull_s"]["p50"]


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.parametrize("killed", ["prefill/tp0", "decode/tp0"])
def test_a_killed_worker_is_status_1_and_leaks_nothing(killed: str, tmp_path: Path) -> None:
    result = interfered(tmp_path, killed, signal.SIGKILL)
    assert result["exit"] == 1
    assert not any(result["report"]["blocks"].values())
    assert any(killed in text for text in result["report"]["problems"])


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_run_without_a_report_and_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    result = interfered(tmp_path, "", number)
    assert (result["exit"], result["errors"], result["report"]) == (130, "asynckv: interrupted\n", None)


STAGED = """
import os, signal, sys
from asynckv.__main__ import main
from asynckv.tools.bench import driver, processes
cls, name, calls = CLASS, NAME, [0]
real = getattr(cls, name)
def staged(*given):
    calls[0] += 1
    if calls[0] == CALL:
        os.kill(os.getpid(), signal.SIGINT)
    return real(*given)
setattr(cls, name, staged)
main()
"""


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "name", "call"), [("processes.Processes", "start_command", 2), ("driver.Driver", "_ready", 1)]
)
def test_ctrl_c_while_the_workers_start_is_one_line_and_leaves_no_process(of: str, name: str, call: int) -> None:
    code = STAGED.replace("CLASS", of).replace("NAME", repr(name)).replace("CALL", str(call))
    with subprocess.Popen(
        [sys.executable, "-c", code, *SMALL, "--requests", "30"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        said = driver.communicate(timeout=50)
    assert (driver.returncode, said) == (130, ("", "asynckv: interrupted\n"))
    mark = f"{MARK}={driver.pid}-".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            assert mark not in path.read_bytes()


def test_ctrl_c_while_the_report_is_written_is_one_line(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    async def run(*_: object) -> Measured:
        return Measured()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("asynckv.tools.bench.driver.run", run)
    monkeypatch.setattr("asynckv.tools.output.write", interrupted)
    assert command.run(*SMALL, "--json", "-") == (130, "", "asynckv: interrupted\n")


@pytest.mark.parametrize("turns", range(5))
async def test_a_cancellation_that_meets_an_answer_of_a_worker_is_not_lost(turns: int) -> None:
    processes = Processes({})
    child = await processes.start_command("prefill/tp0", ["cat"])
    try:
        hearing = asyncio.create_task(Worker(child).hear(Ended, 10))
        await asyncio.sleep(0)
        child.reader.feed_data(encode(Ended({}, 0, [], 0.0)))
        for _ in range(turns):
            await asyncio.sleep(0)
        was_cancelled = hearing.cancel()
        await asyncio.wait([hearing])
        assert hearing.cancelled() is was_cancelled
    finally:
        await processes.stop()


def interfered(tmp_path: Path, victim: str, what: signal.Signals) -> dict[str, Any]:
    """Start a run that is far too long, send a signal once windows are under way, and collect the rest."""
    log, out = tmp_path / "log.jsonl", tmp_path / "report.json"
    argv = [*SMALL, "--requests", "20000", "--timeout-s", "5", "--log", str(log), "--json", str(out)]
    with subprocess.Popen(
        [sys.executable, "-m", "asynckv", *argv], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stderr is not None
        pids = wait_for_pids(log, driver)
        os.kill(pids[victim] if victim else driver.pid, what)
        errors = driver.stderr.read()
        driver.wait(40)
    assert "Traceback" not in errors
    assert all(not os.path.exists(f"/proc/{pid}") for pid in pids.values())
    found = json.loads(out.read_text()) if out.exists() else None
    return {"exit": driver.returncode, "report": found, "errors": errors}


def wait_for_pids(log: Path, driver: subprocess.Popen[str]) -> dict[str, int]:
    """Wait until a request was logged, so that a window is certainly open or near."""
    pids: dict[str, int] = {}
    while driver.poll() is None:
        for line in log.read_text().splitlines() if log.exists() else ():
            if line.endswith("}"):
                entry = json.loads(line)
                pids = entry["pids"] if entry["event"] == "workers_started" else pids
                if pids and entry["event"] == "pull_ended":
                    return pids
        try:
            driver.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("the driver ended too early")


def test_processes_that_tests_start_compile_the_package_once() -> None:
    done = python("-c", "import sys; print(sys.dont_write_bytecode)")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
