"""The floor: it moves the very bytes that the engine moves, and sums rounds up soundly."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from asynckv.config import NixlConfig, PullConfig
from asynckv.core.types import Endpoint
from asynckv.edges.nic.agent import Agent
from asynckv.errors import ConfigError
from asynckv.geometry.plan import ReadRequest
from asynckv.geometry.tables import DescTable
from asynckv.scheduler import PrefillRanks
from asynckv.tools.bench import floor, report
from asynckv.tools.bench.driver import Measured
from asynckv.tools.bench.experiment import Experiment
from asynckv.tools.bench.memory import Pool
from asynckv.tools.bench.nixl_raw import RawLoop
from asynckv.tools.bench.noise import median_of
from asynckv.tools.bench.options import Options
from asynckv.tools.bench.protocol import Outcome, Sample, Work
from asynckv.tools.bench.workload import Workload
from asynckv.tools.plan.layouts import model_layout
from asynckv.tools.plan.models import Heads, Model
from tests.commands import asynckv

MODEL = Model("tiny", (Heads(4, 16),) * 2)


def sample(seconds: float, **changes: Any) -> Sample:
    return Sample([seconds / 2, seconds], seconds, 1000, seconds, 0, **changes)


def a_round(engine_s: float, of: Sample) -> floor.Round:
    return floor.Round(engine_s, [engine_s / 2, engine_s / 2], 1000, engine_s, 1, of)


class ClockOfPreparing:
    """A clock on which nothing takes time but preparing descriptor lists: a second each."""

    def __init__(self, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._prepare = agent.prepare
        monkeypatch.setattr(agent, "prepare", self.prepare)
        monkeypatch.setattr(floor, "time", self)

    def prepare(self, name: str, table: DescTable) -> Any:
        self.now += 1.0
        return self._prepare(name, table)

    def perf_counter(self) -> float:
        return self.now

    process_time = perf_counter


@contextmanager
def polled(server: floor.Floor) -> Iterator[None]:
    """Let a server make progress in a thread, while the loop does nothing but read."""
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.is_set():
            server.plane.poll()

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.nixl
@pytest.mark.slow
async def test_descriptor_lists_are_prepared_before_the_clock_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = model_layout(MODEL, num_blocks=8)
    there, here = Pool(layout, seed=5), Pool(layout, seed=5)
    group = PrefillRanks("prefill", [Endpoint(0, "tcp://127.0.0.1:1", "one")])
    params = group.make_params("p", [(0, [2, 3])], 32, written=True)
    there.fill(0, [(0, [2, 3])], 32)
    work = Work(0, [(0, [4, 5])], 32, params)
    server, probe = (floor.Floor(pool, False, PullConfig()) for pool in (there, here))
    try:
        await probe.connect(server.open())
        assert probe.plane._agent is not None
        clock = ClockOfPreparing(probe.plane._agent, monkeypatch)
        with polled(server):
            found = await probe.measure([work], 1)
    finally:
        probe.close()
        server.close()
    assert clock.now >= 1.0
    assert (found.error, len(found.ends), found.window_s, found.cpu_s) == ("", 1, 0.0, 0.0)
    assert here.check(0, work.lists, 32) == (found.num_bytes, 0)


def test_latencies_are_those_of_a_closed_loop() -> None:
    assert floor.latencies([1.0, 2.0, 4.0, 7.0], 1) == [1.0, 1.0, 2.0, 3.0]
    assert floor.latencies([1.0, 2.0, 4.0, 7.0], 2) == [1.0, 2.0, 3.0, 5.0]
    assert floor.latencies([2.0, 1.0, 4.0], 2) == [2.0, 1.0, 3.0]  # the second made room for the third


@pytest.mark.parametrize(
    ("number", "low", "high", "level"),
    [(1, 0, 0, 0.0), (5, 0, 4, 0.9375), (10, 1, 8, 0.978515625), (20, 5, 14, 0.9586)],
)
def test_the_interval_is_the_sign_tests(number: int, low: float, high: float, level: float) -> None:
    found = median_of([float(i) for i in reversed(range(number))])
    assert (found.median, found.low, found.high, found.rounds) == ((number - 1) / 2, low, high, number)
    assert found.level == pytest.approx(level, abs=1e-4)


QUIET = {"config": {"posting_threads": 0}, "loop_lag_s": {"p99": 0.0}}
"""The rest of a report, as far as the table of floors reads it."""


def test_ratios_are_taken_within_a_round() -> None:
    # The host became slower from round to round, and the engine kept its distance.
    rounds = [a_round(t, sample(t / 2)) for t in (1.0, 2.0, 4.0)]
    found = floor.summary(rounds)
    assert found["floor"]["raw_nixl"]["gbytes_per_s"]["median"] == pytest.approx(1e-6)
    for key, value in (("gbytes_per_s", 0.5), ("requests_per_s", 0.5), ("p50_s", 2.0), ("cpu_s_per_request", 2.0)):
        ratio = found["ratio_to_floor"]["raw_nixl"][key]
        assert (ratio["median"], ratio["low"], ratio["high"]) == (value, value, value)
    rows, _ = floor.table(QUIET | found)
    assert ("raw NIXL loop", "0.000", "500.00 ms", "50.0% (50.0%-50.0%)", "2.00", "2.00") in rows


def test_the_table_says_when_the_engine_has_more_threads_than_the_floor() -> None:
    found = floor.summary([a_round(1.0, sample(0.00005))])
    for threads, said in ((0, False), (1, False), (2, True), ("auto", True)):
        rows, notes = floor.table(QUIET | found | {"config": {"posting_threads": threads}})
        assert any(f"the engine posts with --posting-threads {threads}" in note for note in notes) == said
        assert rows[0][2] == "25.0 µs"


def test_the_table_says_when_the_machine_was_not_quiet() -> None:
    found = floor.summary([a_round(1.0, sample(0.5))] * 6)
    assert not any("quiet" in note for note in floor.table(QUIET | found | {"loop_lag_s": {"p99": 0.004}})[1])
    (note,) = [n for n in floor.table(QUIET | found | {"loop_lag_s": {"p99": 0.018}})[1] if "quiet" in n]
    assert "event loop lag p99 18 ms" in note


def test_ratios_of_too_few_requests_say_so_and_how_many_are_enough() -> None:
    one = a_round(1.0, sample(0.5))
    few = msgspec.structs.replace(one, seconds=[0.1] * 31, concurrency=16)
    enough = msgspec.structs.replace(few, seconds=[0.1] * 32)
    (text,) = floor.caveats([enough] * 9 + [few])
    assert "31 requests in a round with 16 in flight; give --requests 320" in text
    assert floor.summary([enough] * 9 + [few])["floor"]["caveats"] == [text]
    (text,) = floor.caveats([enough] * 5)
    assert "5 rounds, of which 6 make an interval; give --requests 320" in text
    assert floor.caveats([enough] * 6) == []


def test_rounds_with_failed_requests_are_in_no_ratio() -> None:
    good = a_round(1.0, sample(0.5))
    nothing_came = msgspec.structs.replace(good, seconds=[], num_bytes=0, cpu_s=0.0, failed=2)
    half_came = msgspec.structs.replace(good, seconds=[9.0], num_bytes=500, failed=1)
    found = floor.summary([nothing_came, good, good, half_came])
    assert found["ratio_to_floor"] == floor.summary([good, good])["ratio_to_floor"]
    assert found["floor"]["engine"]["p50_s"]["median"] == 0.5
    assert "requests failed in 2 of 4 rounds: these rounds are in no ratio" in floor.table(QUIET | found)[1]
    found = floor.summary([nothing_came])
    assert found["ratio_to_floor"] == {}
    assert floor.table(QUIET | found) == ([], ["requests failed in 1 of 1 rounds: these rounds are in no ratio"])


def test_a_floor_that_is_wrong_or_fails_is_a_problem() -> None:
    def judged(of: Sample) -> dict[str, Any]:
        found = Measured(submitted=1, windows_s=[1.0], bytes=Counter(verified=100, wanted=100))
        found.outcomes = {0: [Outcome(0, seconds=0.1, num_bytes=100)]}
        found.floor = [a_round(1.0, of)]
        return report.make(Experiment(Options(), MODEL, Workload("fixed 32", (32,))), found)

    assert report.is_good(judged(sample(0.5)))
    assert not report.is_good(judged(Sample([0.5], 0.5, 100, 0.1, 7)))
    failed = judged(Sample([], 0, 0, 0, 0, "a read failed"))
    assert not report.is_good(failed)
    assert "the raw NIXL loop was not measured: a read failed" in floor.table(failed)[1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tp": "1:2"}, "leave out --tp."),
        ({"engines": "1:2", "tp": "1:1"}, "leave out --engines."),
        ({"rate": 5.0}, "leave out --rate."),
        ({"announced": True}, "leave out --announced."),
        ({"follow": True}, "leave out --follow."),
        ({"chunks": 2, "pp": "2"}, "leave out --pp, --chunks."),
        ({"floor": False, "chunks": 2, "tp": "2:1"}, "--chunks needs one prefill and one decode rank"),
        ({"floor": False, "chunks": 2, "rate": 5.0}, "leave out --rate."),
        ({"floor": False, "chunks": 2, "prefix_hit": "50%"}, "nothing cached; leave out --prefix-hit."),
        ({"floor": False, "chunks": 2, "concurrency": 4}, "leave out --concurrency."),
        ({"floor": False, "chunks": 2}, "needs 4 --requests or more of one length"),
        ({"floor": False, "compute_ms": 60.0}, "give --chunks as well"),
        ({"floor": False, "follow": True, "announced": True}, "in a closed loop; leave out --announced."),
    ],
)
def test_what_cannot_be_compared_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Experiment(Options(**{"floor": True, **changes}), MODEL, Workload("fixed 32", (32, 32)))
    assert says in f"{caught.value}."


def test_a_chunk_has_blocks_of_its_own() -> None:
    work = Workload("fixed 32", (32,) * 4)
    assert Experiment(Options(chunks=2), MODEL, work).options.concurrency == 1
    with pytest.raises(ConfigError, match="--prompt-tokens 48 or more"):
        Experiment(Options(chunks=3), MODEL, work)


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_the_floor_is_measured_beside_the_engine(transport: str) -> None:
    argv = ["--layers", "2", "--prompt-tokens", "200", "--requests", "24", "--concurrency", "4"]
    argv += ["--block-order", "random"]
    argv += ["--prefix-hit", "40", "--block-size", "64:16", "--floor", "--transport", transport]
    done = asynckv("bench", *argv, "--json", "-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == []
    assert found["floor"]["not_measured"] == {}
    assert set(found["ratio_to_floor"]) == {"raw_nixl"}
    for ratios in found["ratio_to_floor"].values():
        assert all(ratio["rounds"] == 8 and ratio["median"] > 0 for ratio in ratios.values())
    assert found["bytes"]["verified"] == found["bytes"]["wanted"] > 0


@pytest.mark.nixl
@pytest.mark.slow
def test_a_head_start_reads_every_byte_once_beside_one_pull() -> None:
    argv = ["--layers", "2", "--prompt-tokens", "700", "--requests", "8", "--block-size", "64:16", "--chunks", "6"]
    done = asynckv("bench", *argv, "--compute-ms", "20", "--json", "-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ways = found["head_start"]
    assert found["problems"] == []
    assert [each["requests"] for each in ways.values()] == [2] * 4
    assert [each["pieces"] > 0 for each in ways.values()] == [True, False, False, False]
    assert all(1.0 <= each["read"] / each["wanted"] < 1.2 for each in ways.values())
    assert found["bytes"]["verified"] == found["bytes"]["wanted"] > 0


class Raw:
    """NIXL's binding, as far as a plain loop calls it; a transfer has ended when it was asked for twice."""

    def __init__(self) -> None:
        self.asked: dict[int, int] = {}
        self.made = self.most = 0

    def makeXferReq(self, *_: object) -> int:
        self.made += 1
        return self.made

    def postXferReq(self, handle: int, _: bytes) -> int:
        self.asked[handle] = 0
        self.most = max(self.most, len(self.asked))
        return 1

    def getXferStatus(self, handle: int) -> int:
        self.asked[handle] += 1
        return int(self.asked[handle] < 2)

    def releaseXferReq(self, handle: int) -> None:
        del self.asked[handle]


@pytest.mark.parametrize(
    ("concurrency", "window_bytes", "window_descriptors", "most"),
    [(8, 1000, 1000, 8), (3, 1000, 1000, 3), (8, 20, 1000, 2), (8, 1000, 4, 2), (8, 9, 1000, 1), (8, 1000, 1, 1)],
)
def test_the_plain_loop_keeps_the_engines_windows(
    concurrency: int, window_bytes: int, window_descriptors: int, most: int
) -> None:
    raw, loop = Raw(), RawLoop(NixlConfig(), "raw")
    loop._agent = SimpleNamespace(_raw=raw, _read=0)  # type: ignore[assignment]
    table: Any = SimpleNamespace()
    handles = {id(table): (None, SimpleNamespace(_handle=1), SimpleNamespace(_handle=2))}
    post = ReadRequest(table, np.zeros(1, np.int32), np.zeros(1, np.int32), 10, 2)
    ends = loop.read_all(
        handles, [[post]] * 8, concurrency=concurrency, window_bytes=window_bytes, window_descriptors=window_descriptors
    )
    assert (raw.most, raw.asked) == (most, {})
    assert ends == sorted(ends)
    assert min(ends) > 0
