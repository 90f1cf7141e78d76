"""Sweeps: the grid that options span, a journal that survives any crash, and a real one interrupted and resumed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from asynckv.errors import ConfigError
from asynckv.tools import cli
from asynckv.tools.bench import figures, noise, report, sweep, table
from asynckv.tools.bench.driver import Measured
from asynckv.tools.bench.experiment import Experiment
from asynckv.tools.bench.options import Options
from asynckv.tools.bench.table import Head, Journal, Place, Row
from asynckv.tools.bench.workload import Workload
from asynckv.tools.plan.models import Heads, Model
from tests.commands import Command

COMMANDS: Any = typer.main.get_command(cli.app)
BENCH = COMMANDS.commands["bench"]

KEYS = ("a", "b", "c")
HERE = {"host": "here", "asynckv": "1"}


def head(rounds: int = 1, keys: tuple[str, ...] = KEYS, **changes: Any) -> Head:
    fields: dict[str, Any] = {
        "command": "asynckv bench sweep",
        "rounds": rounds,
        "axes": {"concurrency": list(keys)},
        "points": [Place(k, {"concurrency": k}) for k in keys],
        "environment": HERE,
    }
    return Head(**fields | changes)


def row(key: str, number: int = 1, status: Any = "good", **changes: Any) -> Row:
    fields: dict[str, Any] = {
        "key": key,
        "round": number,
        "axes": {"concurrency": key},
        "params": {"concurrency": key},
        "command": f"asynckv bench --concurrency {key}",
        "status": status,
        "reason": "" if status == "good" else "gone",
        "seconds": 1.0,
        "at": "2026-01-01T00:00:00+00:00",
        "report": None,
    }
    return Row(**fields | changes)


def loaded(path: Path) -> table.Sweep:
    return table.read(path.read_bytes(), str(path))


def made() -> dict[str, Any]:
    wanted = Experiment(Options(), Model("tiny", (Heads(4, 16),)), Workload("fixed 32", (32,)))
    return report.make(wanted, Measured())


# -- the grid --------------------------------------------------------------------------------------


def test_every_combination_is_a_point_and_the_last_axis_varies_fastest() -> None:
    found = sweep.expand(BENCH, ["--concurrency", "1,16", "--layers=2", "--transport", "auto,tcp"])
    assert found.axes == {"concurrency": ["1", "16"], "transport": ["auto", "tcp"]}
    assert [tuple(p.axes.values()) for p in found.points] == [
        ("1", "auto"),
        ("1", "tcp"),
        ("16", "auto"),
        ("16", "tcp"),
    ]
    assert found.points[1].argv == ("--concurrency", "1", "--layers", "2", "--transport", "tcp")
    assert found.points[1].params["concurrency"] == 1
    assert found.points[1].params["transport"] == "tcp"
    assert found.points[1].params["block_size"] == "16"  # defaults are part of a point


@given(st.lists(st.integers(1, 500), min_size=1, max_size=4, unique=True), st.permutations(["tp", "seed", "layers"]))
def test_a_points_key_knows_neither_the_order_of_options_nor_the_sweep(sizes: list[int], names: list[str]) -> None:
    args = [x for name in names for x in (f"--{name}", "2")]
    found = sweep.expand(BENCH, [*args, "--concurrency", ",".join(map(str, sizes))])
    assert len({p.key for p in found.points}) == len(sizes)
    for point, size in zip(found.points, sizes, strict=True):
        alone = sweep.expand(BENCH, ["--concurrency", str(size), "--seed", "2", "--layers", "2", "--tp", "2"])
        assert alone.points[0].key == point.key


def test_semicolons_separate_values_that_hold_commas() -> None:
    assert sweep.values("1, 16,") == ["1", "16"]
    assert sweep.values("128:0.8,8192:0.2;1024") == ["128:0.8,8192:0.2", "1024"]
    assert sweep.values("128:0.8,8192:0.2;") == ["128:0.8,8192:0.2"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--concurency", "1"], "No such option: --concurency"),
        (["--concurrency", "1", "--concurrency", "2"], "given twice"),
        (["--concurrency"], "Option '--concurrency' requires an argument"),
        (["--concurrency", ","], "holds no value"),
        (["--layers", "1,,2"], "--layers '1,,2': a value of the list is empty; remove the extra comma"),
        (["--prompt-tokens", "1;;2"], "remove the extra semicolon"),
        (["--concurrency", "1,x"], "Invalid value for '--concurrency'"),
        (["--concurrency", "1,1"], "two points of the sweep are the same: concurrency 1"),
        (["--seed", ",".join(map(str, range(101))), "--tp", ",".join(map(str, range(101)))], "10201 points"),
        (["--json", "x"], "is for single runs"),
        (["--chunks", "2,4"], "is for single runs"),
        (["--rounds", "0"], "'--rounds': Input should be greater"),
        (["--out", "x.json"], "neither a FILE.jsonl nor a directory"),
        (["--out", "/etc/passwd"], "--out /etc/passwd is neither a FILE.jsonl nor a directory"),
        (["--out", "/proc/none/sweep.jsonl"], "cannot be written"),
    ],
)
def test_a_bad_sweep_is_one_line_and_status_2(argv: list[str], says: str, tmp_path: Path, command: Command) -> None:
    out = [] if "--out" in argv else ["--out", str(tmp_path / "s.jsonl")]
    assert says in command.complaint("bench", "sweep", *argv, *out)
    assert not list(tmp_path.iterdir())  # nothing was begun


def test_options_before_a_subcommand_are_refused(command: Command) -> None:
    text = command.complaint("bench", "--tp", "2", "sweep", "--out", "x")
    assert "--tp stands before sweep" in text


# -- the journal -----------------------------------------------------------------------------------


class Opened:
    """A journal that is closed in the end."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.book = Journal(path, **options)

    def __enter__(self) -> Journal:
        return self.book

    def __exit__(self, *error: object) -> None:
        self.book.close()


def whole() -> bytes:
    lines = [head(2), row("a"), row("b", status="failed"), row("c", report=made()), row("c", 2), row("b", 2)]
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


# No deadline: every line waits for the disk.
@given(st.integers(0, len(whole())), st.binary(max_size=30).filter(lambda b: b"\n" not in b))
def test_a_sweep_torn_anywhere_goes_on_with_its_whole_lines(tmp_path_factory: Any, cut: int, rest: bytes) -> None:
    path = tmp_path_factory.mktemp("torn") / "s.jsonl"
    kept = whole()[:cut]
    # Whatever a crash left after the last whole line, it is not a line.
    data = kept + rest if b"\n" in kept else kept
    path.write_bytes(data)
    lines = kept.count(b"\n")
    with Opened(path) as book:
        assert len(book.sweep.rows) == max(0, lines - 1)
        book.begin(head(2))
        for number, key in book.sweep.missing():
            book.add(row(key, number))
    found = loaded(path)
    assert found.torn == 0
    assert not found.missing()
    assert len(found.rows) == 6
    assert [r for r in found.rows if r.status == "failed"] == [row("b", status="failed")][: lines > 2]


@given(st.integers(0, len(whole()) - 2), st.integers(0, 255))
def test_a_damaged_line_is_a_clear_error_or_another_line(place: int, byte: int) -> None:
    data = bytearray(whole())
    data[place] = byte
    try:
        table.read(bytes(data), "s.jsonl")
    except ConfigError as exc:
        assert str(exc).startswith("s.jsonl")  # noqa: PT017


@given(st.integers(1, 5), st.sets(st.tuples(st.sampled_from(KEYS), st.integers(1, 5))))
def test_what_is_missing_and_what_is_there_make_the_whole(rounds: int, there: set[tuple[str, int]]) -> None:
    found = table.Sweep([head(rounds)], [row(k, n) for k, n in sorted(there)])
    missing = [(k, n) for n, k in found.missing()]
    assert len(missing) == len(set(missing))
    assert set(missing) == set(product(KEYS, range(1, rounds + 1))) - there


def test_every_second_round_runs_backwards() -> None:
    assert [k for _, k in table.Sweep([head(2)]).missing()] == ["a", "b", "c", "c", "b", "a"]


def test_more_rounds_add_to_what_is_there_and_fewer_take_nothing_away(tmp_path: Path) -> None:
    with Opened(tmp_path / "s.jsonl") as book:
        book.begin(head(1))
        for key in KEYS:
            book.add(row(key))
        assert not book.sweep.missing()
        book.begin(head(2))
        assert book.sweep.missing() == [(2, "c"), (2, "b"), (2, "a")]
        book.begin(head(1))
        assert book.sweep.head.rounds == 2


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (head(keys=("a", "b")), "holds another sweep .*use another --out, or remove the file"),
        (head(environment=HERE | {"host": "there"}), "another environment: host was here, is there; use another --out"),
        (head(environment={"host": "here", "asynckv": "2"}), "asynckv was 1, is 2"),
    ],
)
def test_another_sweep_machine_or_version_is_refused(tmp_path: Path, other: Head, says: str) -> None:
    path = tmp_path / "s.jsonl"
    with Opened(path) as book:
        book.begin(head())
        book.add(row("a"))
    held = path.read_bytes()
    with Opened(path) as book, pytest.raises(ConfigError, match=says):
        book.begin(other)
    assert path.read_bytes() == held


@pytest.mark.parametrize("content", [b"my thesis", b"my thesis\n", b'{"schema": "asynckv.bench/1"}', b"[1]\n"])
def test_a_strangers_file_is_never_touched(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a sweep"):
        Journal(path)
    assert path.read_bytes() == content


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(whole().replace(b"asynckv.sweep/1", b"asynckv.sweep/9"))
    with pytest.raises(ConfigError, match=r"is not a sweep of schema asynckv\.sweep/1"):
        loaded(path)


def test_two_sweeps_do_not_write_one_file(tmp_path: Path) -> None:
    with Opened(tmp_path / "s.jsonl"), pytest.raises(ConfigError, match="another sweep is writing it"):
        Journal(tmp_path / "s.jsonl")


# -- points ----------------------------------------------------------------------------------------


def test_a_point_is_judged_by_its_status_and_report() -> None:
    good = json.dumps(made()).encode()
    assert sweep.judged(0, good, b"")[0] == "good"
    assert sweep.judged(2, b"", b"noise\nasynckv: no memory\n") == ("failed", "no memory", None)
    assert sweep.judged(-9, b"", b"") == ("failed", "killed by signal 9", None)
    assert sweep.judged(0, b"half a rep", b"") == ("failed", "exit status 0", None)
    wrong = made()
    wrong["bytes"]["wrong"], wrong["requests"]["failed"], wrong["problems"] = 3, 2, ["decode/tp0 died"]
    assert sweep.judged(1, json.dumps(wrong).encode(), b"")[:2] == (
        "bad",
        "2 of 1 requests failed; 3 bytes wrong; decode/tp0 died",
    )


def test_rounds_are_taken_together_and_reasons_said_once() -> None:
    one, two = made(), made()
    one["throughput"]["gbytes_per_s"], two["throughput"]["gbytes_per_s"] = 1.0, 3.0
    rows = [row("a", report=one), row("a", 2, report=two), row("b", 1, "failed"), row("b", 2, "failed")]
    a, b = table.Sweep([head(2)], rows).points()
    assert a.interval(figures.FIGURES["gbytes_per_s"]) == noise.Interval(2.0, 1.0, 3.0, 0.5, 2)
    assert b.interval(figures.FIGURES["p50"]) is None
    assert b.faults == ["failed: gone"]


def printed(found: table.Sweep) -> str:
    stream = io.StringIO()
    sweep.show(found, Console(file=stream, width=200))
    return stream.getvalue()


def test_the_table_of_an_unfinished_sweep_says_how_many_rounds_it_has() -> None:
    rows = [row(key, n, report=made()) for n in (1, 2, 3) for key in KEYS]
    assert "medians of 3 rounds\n" in printed(table.Sweep([head(3)], rows))
    assert "medians of 1 to 2 of 3 rounds\n" in printed(table.Sweep([head(3)], rows[:4]))
    assert "medians of 1 of 3 rounds; 1 of 3 points have none yet" in printed(table.Sweep([head(3)], rows[:2]))


def test_the_table_has_the_floor_where_it_was_measured() -> None:
    ratio = {"median": 0.725, "low": 0.7, "high": 0.75, "level": 0.97, "rounds": 10}
    floored = made() | {"ratio_to_floor": {"raw_nixl": {"gbytes_per_s": ratio}}}
    text = printed(table.Sweep([head()], [row("a", report=floored), row("b", report=made())]))
    assert "GB/s / raw NIXL" in text
    assert "72.5%" in text
    assert "GB/s / raw NIXL" not in printed(table.Sweep([head()], [row("a", report=made())]))


# -- for real --------------------------------------------------------------------------------------


@pytest.mark.nixl
@pytest.mark.slow
def test_a_sweep_is_interrupted_and_goes_on_and_a_point_that_fails_does_not_stop_it(tmp_path: Path) -> None:
    options = ["--concurrency", "1,4", "--prompt-tokens", "64,4000000", "--layers", "1", "--kv-heads", "1"]
    options += ["--requests", "20", "--pool-mb", "64", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "asynckv", "bench", "sweep", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        # A point is done, so the next one has begun or is about to.
        first = running.stderr.readline()
        running.send_signal(signal.SIGINT)
        rest = running.stderr.read()
        assert running.wait(40) == 130
    path = tmp_path / "sweep.jsonl"
    found = loaded(path)
    assert first.startswith("1/4 concurrency 1, prompt-tokens 64: ")
    assert f"interrupted after {len(found.rows)} of 4 runs; to continue, repeat the command" in rest
    assert "Traceback" not in rest
    assert 1 <= len(found.rows) < 4

    with path.open("ab") as file:
        file.write(b'{"kind":"point","key":"to')
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1, done.stderr
    assert "failed: the longest prompt (4,000,000 tokens) needs a pool" in done.stderr
    found = loaded(path)
    assert not found.missing()
    assert len(found.rows) == 4
    assert [r.status for r in sorted(found.rows, key=lambda r: r.params["prompt_tokens"])] == [
        "failed",
        "failed",
        "good",
        "good",
    ]
    pids = [pid for r in found.rows if r.report for pid in r.report["processes"].values()]
    assert all(not os.path.exists(f"/proc/{pid}") for pid in pids)

    other = subprocess.run([*command, "--seed", "1"], capture_output=True, text=True, timeout=50, check=False)
    assert (other.returncode, other.stderr.count("\n")) == (2, 1)
    assert "holds another sweep" in other.stderr
