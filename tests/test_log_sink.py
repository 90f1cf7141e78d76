"""An engine's own log file: complete, rotated, and nobody waits for it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

import asynckv
from asynckv import ConfigError, EngineConfig, LogConfig
from asynckv.integrations.vllm.options import Options
from asynckv.observe import sink as sinks
from asynckv.observe.sampling import Rate, Sampler
from asynckv.observe.sink import FileSink, file_name
from asynckv.version import VERSION
from tests.engines import Bench, memory
from tests.ways import WAYS

MIB = 1 << 20


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


@contextlib.contextmanager
def opened(path: Path | str, max_bytes: int = MIB, backups: int = 2) -> Iterator[FileSink]:
    sink = FileSink.shared(os.fspath(path), max_bytes, backups)
    try:
        yield sink
    finally:
        sink.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are not gathered for long."""
    monkeypatch.setattr(sinks, "GATHER_S", 0.01)


def until(condition: Any) -> None:
    """Wait for another thread."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        os.sched_yield()


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def test_a_warning_waits_for_no_more_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "GATHER_S", 1000.0)
    path = tmp_path / "a.jsonl"
    with opened(path) as sink:
        for number in range(3):
            sink.put("info", "some", {}, {"number": number})
            sink.put("warning", "some", {}, {"number": number})
            until(lambda number=number: path.exists() and len(lines(path)) == 2 * number + 2)


def test_a_value_that_cannot_be_written_takes_no_other_line_with_it(tmp_path: Path) -> None:
    class Unspeakable:
        def __repr__(self) -> str:
            raise RuntimeError

    path = tmp_path / "a.jsonl"
    with opened(path) as sink:
        for number, value in enumerate(("good", Unspeakable(), "good")):
            sink.put("info", "some", {}, {"number": number, "value": value})
    assert [line["number"] for line in lines(path)] == [0, 2]
    assert sink.num_dropped == 1


# -- engines ----------------------------------------------------------------------------------------


async def test_an_engine_writes_its_own_file_where_the_application_configures_nothing(
    sim: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = LogConfig(file=tmp_path / "new" / "{engine_id}-{rank}-{pid}.jsonl")
    async with sim.pair(log=config) as (prefill, decode, group):
        params, lent = prefill.lent(group, "r", [1], written=True)
        await decode.engine.pull("d", [(0, [6])], params)
        await lent.wait_released()
        assert decode.engine.statistics().counters["log.dropped"] == 0
    assert not structlog.is_configured()
    here = tmp_path / "new" / f"prefill-tp0-{os.getpid()}.jsonl"
    said = lines(here)
    assert [e["event"] for e in said] == [
        "engine_started",
        "reader_met",
        "lease_lent",
        "lease_granted",
        "lease_ended",
        "engine_stopped",
    ] or {e["event"] for e in said} >= {"engine_started", "lease_lent", "lease_ended", "engine_stopped"}
    assert list(said[0])[:7] == ["timestamp", "level", "event", "engine_id", "tp_rank", "incarnation", "rank"]
    assert said[0]["timestamp"].endswith("Z")
    assert len(said[0]["timestamp"]) == len("2026-11-22T16:01:28.123456Z")
    assert said[0]["rank"] == f"prefill/tp0@{prefill.engine.incarnation[:8]}"
    assert {e["level"] for e in said} == {"info"}
    assert lines(tmp_path / "new" / f"decode-tp0-{os.getpid()}.jsonl")[-1]["event"] == "engine_stopped"
    # The application hears what it heard before: warnings, of which there are none.
    assert caplog.records == []


async def test_the_file_has_a_level_of_its_own(sim: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with sim.pair(log=LogConfig(file=tmp_path / "all.jsonl", level="debug")) as (prefill, _, group):
        lent = prefill.engine.lend(group.make_params("r", [(0, [1])], 16, written=True))
        sim.clock.advance(31)
        await lent.wait_released()
    said = lines(tmp_path / "all.jsonl")  # of both: engines of one process may share a file
    assert {e["engine_id"] for e in said} == {"prefill", "decode"}
    assert {e["level"] for e in said} == {"debug", "info", "warning"}
    assert {r.levelno for r in caplog.records} == {logging.WARNING}


async def test_the_version_is_that_of_the_code_which_runs(
    sim: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder on PYTHONPATH, where `importlib.metadata` finds nothing, or another copy."""
    monkeypatch.setattr(importlib.metadata.Distribution, "discover", lambda **_: iter(()))
    async with sim.pair(log=LogConfig(file=tmp_path / "all.jsonl")):
        pass
    assert {e["version"] for e in lines(tmp_path / "all.jsonl") if e["event"] == "engine_started"} == {VERSION}
    assert asynckv.__version__ == VERSION


async def test_a_start_that_fails_leaves_no_thread(sim: Bench, tmp_path: Path) -> None:
    side = sim.side("prefill", 1, log=LogConfig(file=tmp_path / "x.jsonl"))
    side.data.start = None  # type: ignore[method-assign,assignment]
    with pytest.raises(TypeError):
        await side.engine.start()
    assert not [t for t in threading.enumerate() if t.name.startswith("asynckv log")]


async def test_a_full_disk_ends_no_request(sim: Bench) -> None:
    async with sim.pair(log=LogConfig(file="/dev/full")) as (prefill, decode, group):
        for i in range(3):
            params, lent = prefill.lent(group, f"r{i}", [i], written=True)
            await decode.engine.pull(f"d{i}", [(0, [i])], params)
            await lent.wait_released()
        until(lambda: decode.engine.statistics().counters["log.dropped"])


# -- the file ---------------------------------------------------------------------------------------


def test_the_log_is_rotated_and_no_line_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with opened(path, max_bytes=20_000, backups=30) as sink:
        for i in range(3000):
            sink.put("info", "x", {"engine_id": "e"}, {"i": i, "text": "\u2028 \n \x1b[31m"})
    files = sorted(tmp_path.iterdir())
    assert len(files) > 10
    assert max(f.stat().st_size for f in files) <= 20_000
    assert sorted(e["i"] for f in files for e in lines(f)) == list(range(3000))
    assert all(f.read_bytes().isascii() for f in files)


def test_only_so_many_are_kept(tmp_path: Path) -> None:
    with opened(tmp_path / "a.jsonl", max_bytes=5_000, backups=2) as sink:
        for i in range(3000):
            sink.put("info", "x", {}, {"i": i})
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.1", "a.jsonl.2"]
    assert sink.num_dropped == 0


def test_a_folder_that_vanishes_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.jsonl"
    with opened(path) as sink:
        sink.put("info", "first", {}, {})
        until(lambda: path.read_text().count("\n") == 1)
        shutil.rmtree(path.parent)
        sink.put("info", "second", {}, {})
    assert [e["event"] for e in lines(path)] == ["second"]


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("one_by_one", [False, True])  # then each says in vain how many were lost before
def test_lines_that_cannot_be_written_are_counted_and_told(tmp_path: Path, one_by_one: bool) -> None:
    path = tmp_path / "logs" / "a.jsonl"
    with opened(path) as sink:
        sink.put("info", "first", {}, {})
        until(lambda: path.exists() and path.read_text().count("\n") == 1)
        shutil.rmtree(path.parent)
        path.parent.write_text("a file is in the way")
        for n in range(1, 6):
            sink.put("info", "lost", {}, {})
            if one_by_one or n == 5:
                until(lambda n=n: sink.num_dropped == n)
        path.parent.unlink()
        sink.put("info", "second", {}, {})
        sink.put("info", "third", {}, {})
    assert [(e["event"], e.get("log_dropped")) for e in lines(path)] == [("second", 5), ("third", None)]


async def test_a_request_is_lent_though_no_thread_is_to_be_had_for_the_log(sim: Bench, tmp_path: Path) -> None:
    path = tmp_path / "{engine_id}.jsonl"
    async with sim.pair(log=LogConfig(file=path)) as (prefill, _, group):
        sink = FileSink._open[os.fspath(tmp_path / "prefill.jsonl")]
        sink.end()
        room = resource.getrlimit(resource.RLIMIT_AS)
        used = address_space()
        threading.stack_size(512 * MIB)
        resource.setrlimit(resource.RLIMIT_AS, (used + 64 * MIB, room[1]))
        try:
            lent = prefill.engine.lend(group.make_params("r", [(0, [1])], 16))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, room)
            threading.stack_size(0)
        assert not lent.is_over
        assert sink.num_dropped == 1
        prefill.engine.lend(group.make_params("r2", [(0, [2])], 16))  # now there is one
    said = {e["event"]: e for e in lines(tmp_path / "prefill.jsonl")}
    assert said["lease_lent"]["request_id"] == "r2"
    assert said["lease_lent"]["log_dropped"] == 1
    assert "engine_stopped" in said


def test_a_thread_that_ends_with_the_interpreter_is_heard(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    code = (
        "import atexit\n"
        "from asynckv.observe.sink import FileSink\n"
        f"sink = FileSink.shared({os.fspath(path)!r}, 0, 1)\n"
        "atexit.register(sink.put, 'info', 'last', {}, {})\n"
        "sink.put('info', 'first', {}, {})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert [e["event"] for e in lines(path)] == ["first", "last"]


def test_a_forked_process_has_a_thread_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    code = (
        "import os\n"
        "from asynckv.observe.sink import FileSink\n"
        f"sink = FileSink.shared({os.fspath(path)!r}, 0, 1)\n"
        "sink.put('info', 'parent', {}, {})\n"
        "if not (child := os.fork()):\n"
        "    sink.put('info', 'child', {}, {})\n"
        "    sink.close()\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert sorted(e["event"] for e in lines(path)) == ["child", "parent"]


def test_a_line_that_was_cut_short_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"event": "whole"}\n{"event": "cut sh')
    with opened(path) as sink:
        sink.put("info", "after", {}, {})
    first, cut, after = path.read_text().splitlines()
    assert (json.loads(first)["event"], cut, json.loads(after)["event"]) == ("whole", '{"event": "cut sh', "after")


def test_no_caller_waits_for_a_disk_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "CLOSE_S", 0.05)
    monkeypatch.setattr(sinks, "MAX_WAITING", 1 << 20)
    reader, writer = os.pipe()  # which nobody reads: it takes 64 KiB, and then who writes waits
    began = time.perf_counter()
    try:
        with opened(f"/proc/self/fd/{writer}") as sink:
            for i in range(500):
                sink.put("info", "x", {}, {"i": i, "text": "y" * 4000})
        assert sink.num_dropped >= 500 - (1 << 20) // 4000
        assert time.perf_counter() - began < 5
    finally:
        os.close(reader)
        os.close(writer)


def test_lines_that_wait_take_no_more_memory_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "CLOSE_S", 0.05)
    monkeypatch.setattr(sinks, "MAX_WAITING", 1 << 20)
    reader, writer = os.pipe()  # which nobody reads
    tracemalloc.start()
    try:
        with opened(f"/proc/self/fd/{writer}") as sink:
            for i in range(60):  # failures with their history, some 5 MB in all
                history = [[n / 7, f"{i} {n} " + "x" * 500] for n in range(128)]
                sink.put("info", "x", {}, {"history": history, "readers": {f"{i}-{n}": "lost" for n in range(64)}})
                if i == 0:
                    until(lambda: sink._lines._num_taken)  # the thread waits for the pipe with this one
            assert sink.num_dropped > 40
            assert tracemalloc.get_traced_memory()[0] < 1.5 * 2**20
    finally:
        tracemalloc.stop()
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("backups", [1, 2])
@pytest.mark.usefixtures("hasty")
def test_a_file_that_cannot_be_renamed_goes_on_for_a_while(tmp_path: Path, backups: int) -> None:
    path = tmp_path / "a.jsonl"
    in_the_way = tmp_path / f"a.jsonl.{backups}"
    with opened(path, max_bytes=5_000, backups=backups) as sink:
        number = 0

        def put(count: int) -> None:
            nonlocal number
            for _ in range(count):
                sink.put("warning", "x", {}, {"i": number})
                number += 1
                until(lambda: sink._lines._num_bytes == 0)

        if backups == 2:
            put(100)  # so that there is one to be renamed
            assert sorted(f.name for f in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.1"]
        (in_the_way / "x").mkdir(parents=True)
        put(100)
        first = number
        files = [f for f in tmp_path.iterdir() if f.is_file()]
        said = sorted((e for f in files for e in lines(f)), key=lambda e: e["i"])
        assert [e["i"] for e in said] == list(range(number))
        assert sink.num_dropped == 0
        (told,) = (e["log_not_rotated"] for e in said if "log_not_rotated" in e)
        assert told == f"Is a directory: {in_the_way}"
        put(200)
        assert 5_000 * backups < path.stat().st_size <= 5_000 * (backups + 1)
        dropped = sink.num_dropped
        assert 0 < dropped < 200
        (in_the_way / "x").rmdir()
        in_the_way.rmdir()
        put(1)
    assert path.stat().st_size < 5_000
    (last,) = lines(path)
    assert (last["i"], last["log_dropped"]) == (first + 200, dropped)


def test_what_is_no_file_is_never_renamed(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    link = tmp_path / "a.jsonl"
    link.symlink_to(f"/proc/self/fd/{writer}")
    try:
        with opened(link, max_bytes=1_000) as sink:
            for i in range(100):
                sink.put("info", "x", {}, {"i": i})
        assert os.read(reader, 1 << 16).count(b"\n") == 100
        assert [f.name for f in tmp_path.iterdir()] == ["a.jsonl"]
    finally:
        os.close(reader)
        os.close(writer)


async def test_an_engine_without_time_to_close_does_not_wait_for_a_disk_either(sim: Bench) -> None:
    reader, writer = os.pipe()
    try:
        side = sim.side("e", 1, log=LogConfig(file=f"/proc/self/fd/{writer}"))
        await side.engine.start()
        sink = FileSink._open[f"/proc/self/fd/{writer}"]
        for _ in range(100):
            sink.put("info", "x", {}, {"text": "y" * 4000})
        began = time.perf_counter()
        await side.engine.aclose(0.0)
        assert time.perf_counter() - began < sinks.CLOSE_S / 2
    finally:
        os.close(reader)
        os.close(writer)


def test_a_file_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "file" / "a.jsonl", tmp_path, tmp_path / "fifo"):
        with pytest.raises(ConfigError, match=r"the log file .* cannot be written: "):
            FileSink.shared(os.fspath(path), MIB, 1)
        assert os.fspath(path) not in FileSink._open


def test_a_value_that_json_does_not_know_is_written_for_people(tmp_path: Path) -> None:
    with opened(tmp_path / "a.jsonl") as sink:
        sink.put("info", "x", {}, {"path": Path("/a"), "set": {1}, "bytes": b"\n"})
    (said,) = lines(tmp_path / "a.jsonl")
    assert (said["set"], said["bytes"]) == ([1], "b'\\n'")


def test_what_is_put_in_for_a_name_is_no_path() -> None:
    assert file_name("/logs/{engine_id}.jsonl", "../../etc/passwd") == "/logs/_.._etc_passwd.jsonl"
    assert file_name("/logs/{engine_id}-{rank}.jsonl", "a b\n/\x00ü", "pp1-tp3") == "/logs/a_b_-pp1-tp3.jsonl"
    assert file_name("/logs/{engine_id}", "...") == "/logs/_"


def test_the_last_line_is_there_though_the_sink_was_never_closed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    code = (
        "import structlog, asynckv\n"
        f"asynckv.configure_logging('info', file={os.fspath(path)!r})\n"
        "for i in range(1000): structlog.get_logger().info('x', i=i)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert [e["i"] for e in lines(path)] == list(range(1000))


# -- the configuration ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"file": 3},
        {"file": "{nobody}.jsonl"},
        {"file": "{}.jsonl"},
        {"file": "{pid!r}"},
        {"file": "{pid:>90000000}"},
        {"file": "{engine_id.__class__}"},
        {"file": "{"},
        {"file": "a\0b"},
        {"level": "loud"},
        {"level": 10},
        {"max_bytes": -1},
        {"backups": 0},
        {"backups": 1.5},
    ],
)
def test_what_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LogConfig(**wrong)


def test_a_stream_and_a_file_are_too_much(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both stream and file"):
        asynckv.configure_logging("info", stream=sys.stderr, file=tmp_path / "a")


def test_vllm_can_be_told_of_a_file(tmp_path: Path) -> None:
    given = {"log": {"file": f"{tmp_path}/{{engine_id}}-{{rank}}.jsonl", "level": "debug", "backups": 7}}
    config = Options.parse(given).engine_config("engine", 0)
    assert isinstance(config, EngineConfig)
    assert (config.log.level, config.log.backups) == ("debug", 7)
    assert str(config.log.file).endswith("{engine_id}-{rank}.jsonl")


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_file_is_whole_however_the_engine_is_embedded(way: str, tmp_path: Path) -> None:
    registration, _ = memory(1)
    engine = WAYS[way](EngineConfig(engine_id="e", log=LogConfig(file=tmp_path / "{engine_id}.jsonl")), registration)
    engine.start()
    engine.close()
    assert [e["event"] for e in lines(tmp_path / "e.jsonl")] == ["engine_started", "engine_stopped"]
    assert not [t for t in threading.enumerate() if t.name.startswith("asynckv log")]


# -- Samples of requests that end well --------------------------------------------------------------------------------


def token(rng: random.Random) -> str:
    return f"{rng.getrandbits(128):032x}"


def test_an_engine_with_few_requests_logs_them_all() -> None:
    rng, sampler = random.Random(1), Sampler(10.0)
    assert all(sampler.take(token(rng), i * 0.2) for i in range(200))
    assert sampler.zeros == 0


@pytest.mark.parametrize("per_s", [30, 1000, 20_000])
def test_no_more_than_configured_and_not_many_fewer(per_s: int) -> None:
    rng, sampler = random.Random(2), Sampler(10.0)
    seconds = 20
    chosen = sum(sampler.take(token(rng), i / per_s) for i in range(per_s * seconds))
    assert 10 * seconds / 3 < chosen <= 10 * (seconds + 1)


@pytest.mark.parametrize("ratio", [1, 3, 8])
def test_what_one_side_logs_the_other_mostly_does_too(ratio: int) -> None:
    """A prefill engine serves several decode engines: it sees `ratio` times as many requests."""
    rng = random.Random(3)
    prefill, decode = Sampler(10.0), Sampler(10.0)
    both: list[tuple[bool, bool]] = []
    for i in range(60_000):
        now, name = i / 3000, token(rng)
        lent = prefill.take(name, now)
        if i % ratio == 0:
            both.append((lent, decode.take(name, now + 0.05)))
    lent_here = [read for lent, read in both if lent]
    assert len(lent_here) > 10
    assert sum(lent_here) / len(lent_here) > 0.75


def test_after_a_burst_all_are_logged_again() -> None:
    rng, sampler = random.Random(4), Sampler(10.0)
    for i in range(50_000):
        sampler.take(token(rng), i / 50_000)
    assert sampler.zeros > 5
    now = 1.0
    while sampler.zeros:
        now += 1.0
        sampler.take(token(rng), now)
    assert now < 15
    sampler.take(token(rng), now + 1000)
    assert sampler.take(token(rng), now + 1001)


def test_a_time_of_silence_forgets_the_burst() -> None:
    rng, sampler = random.Random(5), Sampler(10.0)
    for i in range(50_000):
        sampler.take(token(rng), i / 50_000)
    sampler.take(token(rng), 3600.0)
    assert sampler.zeros <= 1


def test_none_are_logged_if_none_are_wanted() -> None:
    sampler = Sampler(0.0)
    assert not sampler.take("0" * 32, 1.0)


def test_what_is_left_out_is_counted_once() -> None:
    rate = Rate(1.0, 2.0)
    assert [rate.take(0.0) for _ in range(5)] == [True, True, False, False, False]
    assert rate.left_out() == {"not_logged": 3}
    assert rate.left_out() == {}
    assert rate.take(1.0)
