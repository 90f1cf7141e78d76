"""The report of a run's figures, and when a run is good."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import math
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asynckv.errors import ConfigError
from asynckv.tools.bench import figures, rank, report, report_text, ucx
from asynckv.tools.bench.driver import Measured
from asynckv.tools.bench.experiment import Experiment
from asynckv.tools.bench.head_start import WAYS
from asynckv.tools.bench.options import Options
from asynckv.tools.bench.protocol import Outcome
from asynckv.tools.bench.workload import Workload
from asynckv.tools.plan.models import Heads, Model

MODEL = Model("tiny", (Heads(4, 16),) * 2)


def options(**changes: Any) -> Experiment:
    return Experiment(Options(**changes), MODEL, Workload("fixed 32", (32, 32)))


def outcome(number: int, seconds: float = 0.1, **changes: Any) -> Outcome:
    return Outcome(number, seconds=seconds, num_bytes=100, planned=8, posted=2, phases={"read": 0.05}, **changes)


def measured(*outcomes: Outcome, **changes: Any) -> Measured:
    found = Measured(submitted=2, windows_s=[0.5, 0.5], outcomes={0: [], 1: []}, **changes)
    for each in outcomes:
        found.outcomes[each.number].append(each)
    return found


def good() -> Measured:
    return measured(outcome(0), outcome(1, 0.3), bytes=Counter(verified=200, wanted=200))


def test_a_clean_run_is_good() -> None:
    result = report.make(options(), good())
    assert report.is_good(result)
    assert result["requests"] == {"submitted": 2, "completed": 2, "read_nothing": 0, "failed": 0}
    assert result["bytes"] == {"moved": 200, "wanted": 200, "verified": 200, "wrong": 0}
    assert result["throughput"] == {"gbytes_per_s": 200 / 1e9, "requests_per_s": 2.0}
    assert result["latency_s"]["max"] == 0.3
    assert result["descriptors"] == {"planned": 16, "posted": 4}


def test_the_report_has_every_promised_key_and_is_json() -> None:
    result = json.loads(json.dumps(report.make(options(), good())))
    assert {"schema", "config", "environment", "cpu_s", "loop_lag_s", "descriptors"} <= result.keys()
    assert result["blocks"].keys() == {"prefill_leaked", "decode_leaked", "quarantined"}
    assert result["latency_s"].keys() == {"p50", "p90", "p99", "max"}
    assert result["cpu_s"].keys() == {"prefill", "decode"}
    assert result["loop_lag_s"].keys() == {"p99", "max"}
    phases = {"queue", "handshake", "plan", "post", "read", "detect", "confirm", "release"}
    assert result["phases_s"].keys() == phases
    assert all(q.keys() == {"p50", "p99"} for q in result["phases_s"].values())


@pytest.mark.parametrize(
    "changes",
    [
        {"bytes": Counter(verified=200, wanted=200, wrong=1)},
        {"blocks": Counter(prefill_leaked=1)},
        {"blocks": Counter(decode_leaked=1)},
        {"blocks": Counter(quarantined=1)},
        {"problems": ["decode/tp0 was killed"]},
        {"bytes": Counter(verified=199, wanted=200)},
        {"bytes": Counter(verified=201, wanted=201)},
    ],
)
def test_anything_wrong_makes_a_run_bad(changes: dict[str, Any]) -> None:
    found = measured(outcome(0), outcome(1), **{"bytes": Counter(verified=200, wanted=200), **changes})
    assert not report.is_good(report.make(options(), found))


def test_pieces_that_make_it_slow_are_a_line_with_the_remedy() -> None:
    def made(**changes: Any) -> dict[str, Any]:
        return report.make(options(tp="1:4", **changes), good())

    apart = {"order": "nhd:hnd", "block_size": "16:64"}  # what is wanted of a block of 16 lies in several places
    assert made()["warnings"] == []  # packed
    (said,) = made(**apart)["warnings"]
    assert said.startswith("group 0: 4.0 bytes are read for each byte that is needed, ")
    assert report.make(options(tp="2:1"), good())["warnings"] == []  # pieces of 64 bytes, staged
    for unstaged in ({"posting_threads": "0"}, {"memory": "cuda"}):
        (small,) = report.make(options(tp="2:1", **unstaged), good())["warnings"]
        assert small.startswith("group 0 is read in pieces of 64 bytes, 32 per block and layer; ")
        assert "posting threads and staging_bytes stage them" in small
    assert said.endswith(": try --order hnd")
    assert made(order="hnd")["warnings"] == []
    assert f"\n  ! {said}\n" in shown(made(**apart))


def test_a_request_is_complete_only_if_every_rank_completed_it() -> None:
    found = measured(outcome(0, 0.1), outcome(0, 0.4), outcome(1))
    result = report.make(options(tp="1:2"), found)
    assert result["requests"] == {"submitted": 2, "completed": 1, "read_nothing": 0, "failed": 1}
    assert result["latency_s"]["max"] == 0.4  # the slowest rank's
    assert not report.is_good(result)


def test_the_first_line_is_the_verdict_and_everything_fits_a_narrow_terminal() -> None:
    result = report.make(options(), good())
    assert shown(result).startswith("good: 2 of 2 requests completed, every byte verified, no block leaked\n")
    bad = report.make(options(), measured(outcome(0), bytes=Counter(wrong=7), problems=["decode/tp0 was killed"]))
    assert shown(bad).startswith("BAD: 1 of 2 requests failed; 7 bytes wrong; decode/tp0 was killed\n")
    for width in (60, 80):
        text = shown(result, width)
        assert all(len(line.rstrip()) <= width for line in text.splitlines())
        assert "…" not in text
        assert re.search(r"from the call of pull( +300.00 ms){3}", text)


def test_a_p99_is_printed_of_200_requests_or_more() -> None:
    result = report.make(options(), good())
    result["latency_histogram"] = [{"up_to_s": 0.3, "count": 150}, {"up_to_s": 0.4, "count": 49}]
    assert re.search(r"latency \(199\) +p50 +p90 +max\n", shown(result))
    result["latency_histogram"][1]["count"] = 50
    assert re.search(r"latency +p50 +p90 +p99 +max\n", shown(result))


def test_latencies_are_drawn_as_a_histogram() -> None:
    work = Workload("fixed 32", (32,) * 400)
    outcomes = [outcome(i, 0.001 * (1 + i / 100) if i else 1.0) for i in range(400)]
    found = Measured(submitted=400, windows_s=[1.0], outcomes={x.number: [x] for x in outcomes})
    result = report.make(Experiment(Options(), MODEL, work), found)
    bars = result["latency_histogram"]
    assert (len(bars), bars[-1], sum(bar["count"] for bar in bars)) == (10, {"up_to_s": 1.0, "count": 1}, 400)
    ratios = [b["up_to_s"] / a["up_to_s"] for a, b in itertools.pairwise(bars)]
    assert ratios == pytest.approx([ratios[0]] * 9)
    for bar, below in zip(bars, [0.0, *(x["up_to_s"] for x in bars)], strict=False):
        assert bar["count"] == sum(below < x.seconds <= bar["up_to_s"] for x in outcomes)
    lines = shown(result, 60).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("latency up to"))
    assert lines[head].split() == ["latency", "up", "to", "requests", "share", "histogram"]
    drawn = [line.split() for line in lines[head + 1 : head + 11]]
    assert [int(cells[2]) for cells in drawn] == [bar["count"] for bar in bars]
    assert drawn[-1] == ["1,000.00", "ms", "1", "0.2%", "#"]
    longest = max(bars, key=lambda bar: bar["count"])
    assert [len(cells[4]) if len(cells) > 4 else 0 for cells in drawn] == [
        math.ceil(24 * bar["count"] / longest["count"]) for bar in bars
    ]


@pytest.mark.parametrize(("seconds", "counts"), [([], []), ([0.1], [1]), ([0.1] * 7, [7]), ([0.0, 0.0], [2])])
def test_few_latencies_make_few_bars(seconds: list[float], counts: list[int]) -> None:
    assert [bar["count"] for bar in report.histogram(seconds)] == counts


def test_a_load_that_was_not_reached_and_a_machine_that_was_not_quiet_are_said() -> None:
    result = report.make(options(concurrency=2), good())
    assert result["windows"]["mean_in_flight"] == pytest.approx(0.4)
    assert "up to 2 in flight, 0.4 on average" in shown(result)
    result["windows"]["mean_in_flight"] = 1.6
    assert "; 2 in flight, blocks" in shown(result)
    assert "not quiet" not in shown(result)
    result["loop_lag_s"]["p99"] = 0.018
    assert re.search(r"event loop lag +p99 18.00 ms, max .* \(not quiet: above 5 ms\)", shown(result))


def test_nothing_measured_divides_by_nothing() -> None:
    result = report.make(options(), Measured())
    assert result["throughput"] == {"gbytes_per_s": 0.0, "requests_per_s": 0.0}
    assert result["latency_s"]["p99"] == 0.0


def test_the_table_names_capped_prompts_and_errors() -> None:
    capped = Experiment(Options(), MODEL, Workload("trace", (32, 32), 1))
    result = report.make(capped, measured(outcome(0), outcome(1, error="[gone]", reason="peer_lost")))
    text = shown(result)
    assert "1 prompts were cut by --max-prompt-tokens" in text
    assert "1 x peer_lost: [gone]" in text


def test_pools_grow_with_the_concurrency_not_with_the_requests() -> None:
    def blocks(requests: int, concurrency: int) -> int:
        work = Workload("fixed 16384", (16384,) * requests)
        wanted = Options(concurrency=concurrency, pool_mb=8192)
        return Experiment(wanted, Model("small", (Heads(8, 128),) * 2), work).num_blocks()["decode"][0]

    assert blocks(100, 4) == blocks(1_000, 4)
    assert blocks(100, 8) == 2 * blocks(100, 4)


def test_a_prompt_that_fits_no_pool_names_the_remedies() -> None:
    with pytest.raises(ConfigError, match=r"--max-prompt-tokens.*--layers.*--pool-mb"):
        Experiment(Options(pool_mb=1), MODEL, Workload("x", (1 << 20,))).num_blocks()


def test_too_little_memory_is_said_in_units_that_show_something_with_its_cause() -> None:
    many = Experiment(Options(tp="4"), MODEL, Workload("x", (32,)))
    with pytest.raises(ConfigError, match=r"8 worker processes need 5.2 GiB .*\(600.0 MiB each\), but 1.0 GiB .*--tp"):
        many.num_blocks(1 << 30)
    few = Experiment(Options(pool_mb=1), Model("small", (Heads(8, 128),) * 2), Workload("x", (1024,)))
    with pytest.raises(ConfigError, match=r"needs a pool of 8.0 MiB .* 1.0 MiB is available .*raise --pool-mb"):
        few.num_blocks(1 << 40)
    with pytest.raises(ConfigError, match=r"4.0 MiB is available .*free memory"):
        Experiment(Options(), Model("small", (Heads(8, 128),) * 2), Workload("x", (1024,))).num_blocks(
            2 * (600 << 20) + (512 << 20) + (8 << 20)
        )


def test_open_latency_counts_from_the_schedule_and_says_so() -> None:
    found = measured(outcome(0, 0.5, late=0.2), outcome(1, 0.25, late=0.0), scheduled_s=0.25)
    result = report.make(options(rate=10.0), found)
    assert result["schedule"]["clock"] == "scheduled arrival"
    assert result["schedule"]["scheduled_per_s"] == pytest.approx(8.0)
    assert result["schedule"]["achieved_per_s"] == pytest.approx(2.0)
    assert result["schedule"]["late_s"]["max"] == 0.2
    assert result["latency_s"]["max"] == 0.5
    assert result["pull_s"]["max"] == pytest.approx(0.3)
    text = shown(result)
    assert "from the scheduled arrival" in text
    assert "8.0 requests/s scheduled, 2.0 achieved; pull was called late by p50" in text


def test_what_was_cached_and_shared_is_reported() -> None:
    work = Workload("fixed 32", (32, 32)).sharing(16, 1, 0)
    wanted = Experiment(Options(), MODEL, work)
    result = report.make(wanted, measured(outcome(0), outcome(1), lent=Counter(lent_blocks=4, lent_shared=1)))
    assert result["prefix"]["hit_rate"] == 0.25
    text = shown(result)
    assert "25.0% of 64 prompt tokens were cached at the reader; 1 of 4 lent blocks" in text


def shown(result: dict[str, Any], width: int = 300) -> str:
    stream = io.StringIO()
    report_text.show(result, Console(file=stream, width=width))
    return stream.getvalue()


def test_what_reads_nothing_is_no_request_per_second_and_no_latency() -> None:
    nothing = Outcome(1, seconds=0.00001)
    result = report.make(options(), measured(outcome(0), nothing, bytes=Counter(verified=100, wanted=100)))
    assert result["requests"]["completed"] == 2
    assert result["requests"]["read_nothing"] == 1
    assert result["throughput"]["requests_per_s"] == 1.0
    assert result["schedule"]["achieved_per_s"] == 2.0
    assert result["latency_s"] == dict.fromkeys(("p50", "p90", "p99", "max"), 0.1)
    assert result["phases_s"]["read"]["p50"] == 0.05
    assert report.is_good(result)
    assert "1.0 requests/s, and 1 that read nothing" in shown(result)
    assert figures.FIGURES["descriptors"].of(result) == 2.0
    assert "nothing was read" in shown(report.make(options(), measured(nothing, Outcome(0, seconds=0.00001))))


def test_the_report_says_what_else_makes_runs_unlike() -> None:
    config = report.make(options(seed=3, pool_mb=64, posting_threads="2"), good())["config"]
    assert (config["seed"], config["pool_mb"], config["posting_threads"]) == (3, 64, 2)
    assert (config["floor"], config["rounds"]) == (False, None)
    config = report.make(options(floor=True), good())["config"]
    assert (config["floor"], config["rounds"]) == (True, 10)


def test_the_table_says_announced_and_gives_small_times_in_microseconds() -> None:
    found = measured(outcome(0, 0.000042), outcome(1, 0.000042), bytes=Counter(verified=200, wanted=200))
    text = shown(report.make(options(announced=True), found))
    assert "announced: claims are granted before each measurement window opens" in text
    assert re.search(r"p50 +p90 .*\nfrom the call of pull +42.0 µs +42.0 µs", text)
    assert "announced" not in shown(report.make(options(), good()))


def test_followed_requests_are_compared_with_announced_ones() -> None:
    found = measured(outcome(0, 0.2), outcome(1, 0.1), bytes=Counter(verified=200, wanted=200), followed={0})
    result = report.make(options(follow=True), found)
    assert (result["latency_s"]["max"], result["announced_s"]["max"], result["schedule"]["clock"]) == (0.2, 0.1, "loan")
    assert re.search(r"from the loan +200.00 ms.*\n +if announced before +100.00 ms", shown(result))
    assert "announced before" not in shown(report.make(options(follow=True), good()))


def test_a_head_start_is_compared_with_one_pull_and_with_a_chunk_alone() -> None:
    def turns(p50: float, decode: float, pieces: int, read: int = 800) -> list[dict[str, float]]:
        common = {"prefill": 0.03, "wanted": 800}
        return [{"p50_s": p50 * n, "decode": decode, "pieces": pieces, "read": read, **common} for n in (1, 2, 9)]

    found = good()
    found.followed, found.turns = {1}, dict(zip(WAYS, (turns(0.01, 0.2, 5, 816), turns(0.04, 0.1, 0)) * 2, strict=True))
    result = report.make(Experiment(Options(chunks=2), MODEL, Workload("fixed 32", (32,) * 4)), found)
    early = result["head_start"]["head_start"]
    assert (early["p50_s"], early["of_one_chunk"], early["pieces"], early["requests"]) == (0.02, 1.0, 5, 3)
    assert early["of_one_pull"] == {"p50_s": 0.25, "decode": 2.0, "prefill": 1.0}
    assert (early["read"], early["wanted"]) == (816, 800)
    assert (result["latency_s"]["max"], result["announced_s"]["max"]) == (0.3, 0.0)
    text = shown(result)
    assert re.search(
        r"head start \(3\) +20.00 ms +0.25 +1.00 +200.0 ms \(x 2.00\) +30.0 ms \(x 1.00\) +102.0% +5", text
    )
    assert "from the last chunk" in text
    assert "throughput" not in text
    found.turns[WAYS[3]].clear()
    assert "head_start" not in report.make(options(), found)


def test_every_submitted_request_is_in_a_count_when_a_half_dies() -> None:
    # Of four in a window one was pulled by one of two ranks; the others' answers never came.
    work = Workload("fixed 32", (32,) * 6)
    found = Measured(submitted=4, outcomes={0: [outcome(0)], 1: [], 2: [], 3: []}, problems=["decode/tp1 is gone"])
    result = report.make(Experiment(Options(tp="1:2"), MODEL, work), found)
    counts = result["requests"]
    assert counts["failed"] == 4 == counts["submitted"]
    assert "0 of 6 completed, 4 failed, 2 never started" in shown(result)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_stall_is_measured_by_the_clock_on_the_wall(loop: str) -> None:
    if loop == "uvloop":
        pytest.importorskip("uvloop")

    async def stall() -> tuple[float, list[float]]:
        sampler = rank.LagSampler()
        sampler.start()
        until = sampler._due + 0.0127
        while time.perf_counter() < until:
            pass
        while not sampler.lags:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        return time.perf_counter() - until, sampler.stop()

    if loop == "uvloop":
        import uvloop

        over, lags = uvloop.run(stall())
    else:
        over, lags = asyncio.run(stall())
    assert 0.0127 <= lags[0] <= 0.0127 + over + 0.000_001


def test_a_stall_that_goes_on_is_counted_at_the_end() -> None:
    async def stall() -> list[float]:
        sampler = rank.LagSampler()
        sampler.start()
        until = sampler._due + 0.003
        while time.perf_counter() < until:
            pass
        return sampler.stop()

    (lag,) = asyncio.run(stall())
    assert lag >= 0.003


# -- what UCX says it used -------------------------------------------------------------------------------------


LOG = """\
[1.0] [vm:1:0]   +-------+--------+-------------+------------+
[1.0] [vm:1:0]   | decode intra-node cfg#1                   |
[1.0] [vm:1:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.0] [vm:1:0]   | Count | Range  | Description | Config     |
[1.0] [vm:1:0]   |    40 | 0..inf | zero-copy   | cma/memory |
[1.0] [vm:1:0]   | decode intra-node cfg#2                   |
[1.0] [vm:1:0]   | active message by ucp_am_send             |
[1.0] [vm:1:0]   |    70 | 0..8k  | short       | tcp/lo     |
[1.0] [vm:1:0]   +-------+--------+-------------+------------+
[1.0] [vm:1:0] mpool.c:40 UCX WARN something is amiss
"""


def test_reads_are_named_and_complaints_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ucx.1.log").write_text(LOG)
    assert ucx.read(tmp_path) == {"cma/memory (zero-copy)": 40}
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == ("", ["[1.0] [vm:1:0] mpool.c:40 UCX WARN something is amiss"])


def test_what_was_used_most_is_named_first() -> None:
    assert ucx.named(Counter({"tcp/lo": 2, "cma/memory": 5})) == "cma/memory, tcp/lo"


def test_without_a_table_nothing_is_claimed(tmp_path: Path) -> None:
    assert ucx.named(ucx.read(tmp_path)).startswith("unknown")
