"""Comparisons: what is noise and what is not, which points belong together, and what is refused."""

from __future__ import annotations

import copy
import io
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from asynckv.errors import ConfigError
from asynckv.tools.bench import noise, table
from asynckv.tools.bench.compare import compare, judge, show
from asynckv.tools.bench.table import Run, Side
from tests.commands import Command, asynckv
from tests.test_bench_report import good, options
from tests.test_bench_sweep import head, row

RUNS = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=12)


def made(rate: float = 100.0, p99: float = 0.1, **config: Any) -> dict[str, Any]:
    from asynckv.tools.bench import report

    found = copy.deepcopy(report.make(options(), good()))
    found["throughput"]["requests_per_s"] = rate
    found["latency_s"]["p99"] = p99
    found["config"] |= config
    return found


def floored(ratio: float, spread: float = 0.0) -> dict[str, Any]:
    def measured(middle: float) -> dict[str, float]:
        return {"median": middle, "low": middle - spread, "high": middle + spread, "level": 0.97, "rounds": 10}

    figures = {"gbytes_per_s": 6.0, "requests_per_s": 50.0, "p50_s": 0.001, "cpu_s_per_request": 0.0001}
    floor = {name: {k: measured(v) for k, v in figures.items()} for name in ("engine", "raw_nixl")}
    return {
        "floor": floor | {"not_measured": {}},
        "ratio_to_floor": {"raw_nixl": {k: measured(ratio) for k in figures}},
    }


def side(name: str, *reports: dict[str, Any]) -> Side:
    return Side(name, False, [Run({}, r, f"{name}/{n}.json") for n, r in enumerate(reports)])


def verdicts(result: dict[str, Any], metric: str) -> list[str]:
    return [point["metrics"][metric]["verdict"] for point in result["points"]]


# -- noise -----------------------------------------------------------------------------------------


@given(RUNS, RUNS)
def test_turning_the_sides_round_turns_the_verdict_round(a: list[float], b: list[float]) -> None:
    there, back = judge(a, b, "higher"), judge(b, a, "higher")
    turned = {"better": "worse", "worse": "better"}
    assert back.verdict == turned.get(there.verdict, there.verdict)
    assert there.ratio is not None
    assert back.ratio == pytest.approx(1 / there.ratio)


@given(RUNS)
def test_a_side_is_within_its_own_noise(runs: list[float]) -> None:
    change = judge(runs, runs, "lower")
    assert change.ratio == 1.0
    assert change.verdict == ("unsure" if len(runs) == 1 else "noise")


@given(RUNS, RUNS)
def test_the_interval_holds_the_ratio(a: list[float], b: list[float]) -> None:
    change = judge(a, b, "lower")
    if change.low is not None:
        assert change.high is not None
        assert change.ratio is not None
        assert change.low <= change.ratio * (1 + 1e-9)
        assert change.ratio <= change.high * (1 + 1e-9)


def test_few_runs_apart_are_unsure_and_enough_are_not() -> None:
    assert judge([100], [50], "higher").verdict == "unsure"
    assert judge([100, 101], [50, 51], "higher").verdict == "unsure"
    assert judge([100, 101, 99, 100], [50, 51, 49, 50], "higher").verdict == "worse"
    assert judge([100, 101, 99, 100], [50, 51, 49, 50], "lower").verdict == "better"
    assert judge([100, 101, 99, 100], [99.5, 103, 98, 100], "higher").verdict == "noise"


@pytest.mark.parametrize("runs", [4, 8])
def test_without_a_change_hardly_one_in_ten_is_called_one(runs: int) -> None:
    rng = np.random.default_rng(1)
    called = sum(
        judge(rng.lognormal(0, 0.1, runs).tolist(), rng.lognormal(0, 0.1, runs).tolist(), "higher").verdict != "noise"
        for _ in range(100)
    )
    assert called <= 10


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 4), (5, 3), (6, 6)])
def test_an_interval_of_ratios_is_worth_what_counting_all_deals_says(before: int, after: int) -> None:
    wrong = [sum(place - i for i, place in enumerate(places)) for places in combinations(range(before + after), before)]
    chances = np.bincount(wrong) / len(wrong)
    assert np.allclose(noise._rank_sums(before, after), chances)
    levels = [level for level in 1 - 2 * np.cumsum(chances) if level >= 0.95]
    found = noise.ratio_of([float(i) for i in range(10, 10 + before)], [float(i) for i in range(20, 20 + after)])
    ratios = sorted(b / a for a in range(10, 10 + before) for b in range(20, 20 + after))
    cut = max(len(levels) - 1, 0)
    assert (found.low, found.high) == (ratios[cut], ratios[-1 - cut])
    assert found.level == pytest.approx(levels[-1] if levels else 1 - 2 * chances[0])


@pytest.mark.parametrize("runs", [5, 12, 30])
def test_where_counting_ends_the_interval_hardly_changes(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.lognormal(0, 0.1, (2, runs)).tolist()
    exact = [noise._rank_sums.__wrapped__(runs, runs)]
    monkeypatch.setattr(noise, "MOST_EXACT", 0 if runs * runs <= noise.MOST_EXACT else 1000)
    exact.append(noise._rank_sums.__wrapped__(runs, runs))
    half = runs * runs // 2
    assert np.abs(np.cumsum(exact[0])[:half] - np.cumsum(exact[1])[:half]).max() < 0.02
    assert noise.ratio_of(a, b).low < noise.ratio_of(a, b).median < noise.ratio_of(a, b).high


def test_nothing_is_divided_by_zero() -> None:
    assert judge([0.0], [5.0], "lower").verdict == "undefined"
    assert judge([0.0], [0.0], "lower").verdict == "noise"
    assert judge([5.0, 5.0], [0.0, 0.0], "higher").excess == 1.0


# -- matching --------------------------------------------------------------------------------------


def test_what_has_one_value_on_each_side_is_what_was_changed() -> None:
    before = side("a", *(made(100, concurrency=c, transport="auto") for c in (1, 16)))
    after = side("b", *(made(80, concurrency=c, transport="tcp") for c in (1, 16)))
    result = compare(before, after)
    assert result["changed"] == {"transport": ["auto", "tcp"]}
    assert [p["point"] for p in result["points"]] == [{"concurrency": 1}, {"concurrency": 16}]
    assert [p["metrics"]["requests_per_s"]["ratio"] for p in result["points"]] == [0.8, 0.8]
    assert result["overall"]["requests_per_s"]["geometric_mean"] == pytest.approx(0.8)


def test_points_of_one_side_only_are_named() -> None:
    before = side("a", *(made(concurrency=c) for c in (1, 16)))
    after = side("b", *(made(concurrency=c) for c in (16, 64)))
    result = compare(before, after)
    assert (result["only_before"], result["only_after"]) == ([{"concurrency": 1}], [{"concurrency": 64}])
    result = compare(before, after, fail_above=0.05)
    assert [(e["point"], e["metric"]) for e in result["exceeded"]] == [({"concurrency": 1}, "missing")]


def test_nothing_in_common_says_what_differs() -> None:
    before = side("a", *(made(concurrency=c) for c in (1, 2)))
    after = side("b", *(made(concurrency=c) for c in (3, 4)))
    with pytest.raises(ConfigError, match=r"no point of a is in b: they differ in concurrency \(1, 2 against 3, 4\)"):
        compare(before, after)


def test_only_what_is_worse_and_beyond_noise_exceeds() -> None:
    steady, noisy = (98, 99, 100, 101), (70, 90, 110, 130)
    assert not compare(side("a", *map(made, steady)), side("b", *map(made, noisy)), fail_above=0.0)["exceeded"]
    slower = side("b", *(made(r * 0.9) for r in steady))
    assert compare(side("a", *map(made, steady)), slower, fail_above=0.05)["exceeded"][0]["metric"] == "requests_per_s"
    assert not compare(side("a", *map(made, steady)), slower, fail_above=0.15)["exceeded"]
    faster = side("b", *(made(r * 2) for r in steady))
    assert not compare(side("a", *map(made, steady)), faster, fail_above=0.05)["exceeded"]


def test_new_faults_exceed_whatever_the_figures_say() -> None:
    faulty = made(200)
    faulty["bytes"]["wrong"] = 1
    result = compare(side("a", made()), side("b", faulty), fail_above=0.05)
    assert result["points"][0]["unhealthy"] == [0, 1]
    assert "unhealthy_runs" in [e["metric"] for e in result["exceeded"]]


def printed(result: dict[str, Any], width: int = 80) -> str:
    out = io.StringIO()
    show(result, Console(file=out, width=width))
    return out.getvalue()


def test_runs_with_faults_are_named_first_and_left_out() -> None:
    faulty = made(2.0)
    faulty["requests"]["failed"] = 6
    faulty["errors"] = {"expired: the [b]lease\x1b ended": 6}
    result = compare(side("a", made(100), made(101)), side("b", made(99), faulty, made(98)))
    (point,) = result["points"]
    assert (point["runs"], point["judged"], point["unhealthy"]) == ([2, 3], [2, 2], [0, 1])
    assert point["metrics"]["requests_per_s"]["after"] == 98.5
    text = printed(result)
    assert "! b/1.json: 6 of 2 requests failed; 6 x expired: the [b]lease" in text
    assert "\x1b" not in text
    assert text.index("b/1.json") < text.index("after: the figures exclude these runs") < text.index("requests/s")
    result = compare(side("a", made(100)), side("b", faulty))
    assert result["points"][0]["metrics"]["requests_per_s"]["after"] == 2.0
    assert "after: every run had faults, so the figures include them" in printed(result)


def test_a_large_change_is_a_factor_and_every_figure_has_a_verdict() -> None:
    slow = [made(100 / 36 + n / 100, p99=0.1 * 11_559) for n in range(4)]
    fast = [made(100 + n) for n in range(4)]
    text = printed(compare(side("a", *fast), side("b", *slow)))
    rows = {line.split("  ")[1].strip(): line for line in text.splitlines() if line.startswith("  ")}
    assert "1/36" in rows["requests/s"]
    assert "x11,559" in rows["p99 ms"]
    assert rows["descriptors"].endswith("within noise")
    assert all(row.rstrip().endswith(("worse", "within noise")) for name, row in rows.items() if name)
    assert max(map(len, text.splitlines())) <= 80
    assert "unsure" in printed(compare(side("a", fast[0]), side("b", slow[0])))


def test_caveats_of_reports_are_carried() -> None:
    doubtful = made() | floored(0.7)
    doubtful["floor"]["caveats"] = ["too few requests"]
    result = compare(side("a", made()), side("b", doubtful, made()))
    assert result["points"][0]["caveats"] == {"too few requests": [0, 1]}
    assert "! too few requests (0 of 1 runs before, 1 of 2 after)" in printed(result)


def test_ratios_to_floors_are_compared_where_all_reports_have_them() -> None:
    a, b = (side(n, made() | floored(r)) for n, r in (("a", 0.9), ("b", 0.8)))
    found = compare(a, b)["points"][0]["metrics"]
    assert found["ratio_to_floor.raw_nixl.gbytes_per_s"]["better"] == "higher"
    assert found["ratio_to_floor.raw_nixl.p50_s"]["better"] == "lower"
    assert not [name for name in compare(side("a", made()), b)["overall"] if "floor" in name]


def test_a_single_runs_own_rounds_are_its_noise() -> None:
    name = "ratio_to_floor.raw_nixl.gbytes_per_s"

    def verdict(before: float, after: float, spread: float) -> str:
        a, b = (side("x", made() | floored(ratio, spread)) for ratio in (before, after))
        return verdicts(compare(a, b), name)[0]

    assert verdict(0.9, 0.8, 0.02) == "worse"
    assert verdict(0.8, 0.9, 0.02) == "better"
    assert verdict(0.9, 0.8, 0.06) == "noise"


# -- files -----------------------------------------------------------------------------------------


def saved(path: Path, found: Any) -> str:
    path.write_text(json.dumps(found))
    return str(path)


def sweep(path: Path, *rates: float, rounds: int = 1, **changes: Any) -> str:
    """A sweep of points a, b, c, each round a little faster than the last."""
    rows = [
        row(key, n, report=made(rate * (1 + 0.01 * n)))
        for key, rate in zip("abc", rates, strict=False)
        for n in range(1, rounds + 1)
    ]
    lines = [head(rounds, **changes), *rows]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return str(path)


def test_sweeps_match_by_point_and_their_rounds_are_the_noise(tmp_path: Path) -> None:
    before = table.load(sweep(tmp_path / "a.jsonl", 100, 200, 300, rounds=4))
    after = table.load(sweep(tmp_path / "b.jsonl", 100, 100, 600, rounds=4))
    result = compare(before, after)
    assert verdicts(result, "requests_per_s") == ["noise", "worse", "better"]
    assert [p["runs"] for p in result["points"]] == [[4, 4]] * 3


def test_other_machines_and_code_are_named(tmp_path: Path) -> None:
    before = table.load(sweep(tmp_path / "a.jsonl", 1, 2, 3))
    after = table.load(sweep(tmp_path / "b.jsonl", 1, 2, 3, environment={"host": "there", "asynckv": "1"}))
    assert compare(before, after)["environment"] == {"host": [["here"], ["there"]]}


def test_a_directory_is_several_runs(tmp_path: Path) -> None:
    for n in range(4):
        saved(tmp_path / f"{n}.json", made(100 + n))
    assert len(table.load(str(tmp_path)).runs) == 4


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is neither a report of asynckv bench nor a sweep"),
        ("[]", "is neither"),
        ("{}", "is neither"),
        ('{"schema": "asynckv.bench/9"}', "has schema asynckv.bench/9, but this asynckv compares asynckv.bench/1"),
        ('{"schema": "asynckv.sweep/9"}\n', "is not a sweep of schema asynckv.sweep/1"),
        ('{"schema": "asynckv.bench/1"}', "is damaged: config, environment, blocks, requests.completed"),
        (json.dumps(made() | {"requests": {}}), "is damaged: requests.completed, requests.failed cannot be read"),
        ("\x00\xff", "is neither"),
        ('{"kind":"sweep","schema":"asynckv.sweep/1"', "holds no sweep yet"),
        ('{"kind":"sweep","schema":"asynckv.sweep/1"}\n', "line 1: is damaged"),
    ],
)
def test_what_is_no_whole_report_is_one_line_and_status_2(
    content: str, says: str, tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "b.json"
    path.write_text(content)
    text = command.complaint("bench", "compare", saved(tmp_path / "a.json", made()), str(path))
    assert says in text
    assert str(path) in text


@pytest.mark.parametrize(
    "unlike", [{"loop": "uvloop"}, {"floor": True}, {"rounds": 3}, {"pool_mb": 64}, {"posting_threads": 2}]
)
def test_unlike_runs_are_not_taken_for_runs_of_one_point(unlike: dict[str, Any]) -> None:
    before, after = side("a", made(100), made(200, **unlike)), side("b", made(100), made(200, **unlike))
    assert [p["runs"] for p in compare(before, after)["points"]] == [[1, 1], [1, 1]]


def damaged(part: str, name: str, value: Any) -> dict[str, Any]:
    found = made()
    found[part][name] = value
    return found


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (damaged("throughput", "gbytes_per_s", "fast"), "is damaged: throughput.gbytes_per_s cannot be read"),
        (damaged("latency_s", "p99", None), "is damaged: latency_s.p99 cannot be read"),
        (made() | {"cpu_s": {"prefill": 1.0}}, "is damaged: cpu_s.decode cannot be read"),
        (made() | {"throughput": {}}, "is damaged: throughput.gbytes_per_s, throughput.requests_per_s cannot be read"),
    ],
)
def test_a_figure_that_is_no_number_cannot_pass_for_unchanged(
    found: dict[str, Any], says: str, tmp_path: Path, command: Command
) -> None:
    a, b = saved(tmp_path / "a.json", made()), saved(tmp_path / "b.json", found)
    assert says in command.complaint("bench", "compare", a, b, "--fail-above", "5%")


def test_a_file_that_is_given_twice_is_refused_by_whatever_name(tmp_path: Path, command: Command) -> None:
    a = saved(tmp_path / "a.json", made())
    (tmp_path / "c.json").symlink_to(a)
    for other in (a, str(tmp_path)):
        assert "was given twice" in command.complaint("bench", "compare", a, other)
    text = command.complaint("bench", "compare", a, str(tmp_path / "c.json"))
    assert f"c.json: was given twice (as {a}); give each file once" in text


def test_an_unfinished_sweep_says_how_to_finish_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is unfinished, with 2 of 3 runs; continue by: asynckv bench sweep"):
        table.load(sweep(tmp_path / "a.jsonl", 1, 2))


@pytest.mark.slow
def test_the_command_pipes_json_and_its_status_is_for_ci(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a.json", made(100)), saved(tmp_path / "b.json", made(90))
    done = asynckv("bench", "compare", a, b, "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["schema"] == "asynckv.compare/1"
    done = asynckv("bench", "compare", a, b, "--fail-above", "5%")
    assert done.returncode == 1
    assert "the noise of the figures is unknown" in " ".join(done.stdout.split())
    assert "! the run: requests_per_s is worse by 10.0%" in done.stdout
