"""The bench of the core: what it counts is exact, and what became worse is said."""

import json
import sys
from pathlib import Path

import pytest

from asynckv.account.inspect import Inspector
from scripts.bench import core as bench_core


def report_of(path: Path) -> dict[str, dict[str, float]]:
    cases: dict[str, dict[str, float]] = json.loads(path.read_text())["cases"]
    return cases


def test_a_pull_is_four_messages_in_few_packets(tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    cases = "pull/1-in-flight,pull/64-*,ledger/1,message/of-64,plan/1x1"
    argv = ["--cases", cases, "--scale", "0.01", "--rounds", "1", "--no-instructions", "--json", str(path)]
    assert bench_core.main(argv) == 0
    found = report_of(path)
    assert set(found) == {
        "pull/1-in-flight",
        "pull/64-in-flight",
        "pull/64-announced",
        "ledger/1",
        "message/of-64",
        "plan/1x1",
    }
    assert all(row["us"] > 0 for row in found.values())
    # Claim, grant, release and receipt; alone each goes in a packet of its own, together they share.
    assert found["pull/1-in-flight"]["messages"] == found["pull/1-in-flight"]["packets"] == 4.0
    assert found["pull/64-in-flight"]["messages"] == 4.0
    assert found["pull/64-in-flight"]["packets"] < 1.0
    assert found["pull/64-announced"]["messages"] == 4.0


def test_peers_take_turns() -> None:
    pulls = bench_core.Pulls(24, in_flight=6, peers=3)
    pulls.run(24)
    assert [Inspector(side.core).check_integrity() for side in (pulls.decode, *pulls.prefill)] == [[]] * 4
    # The one that was met, and a third of the requests each.
    assert {side.core.outbox.counters["received.claim"] for side in pulls.prefill} == {9}
    assert pulls.decode.core.outbox.counters["pulls.complete"] == 27


def test_what_takes_more_instructions_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = {"cases": {"ledger/1": {"instructions": 1000.0}, "ledger/1024": {"instructions": None}}}
    new = {"cases": {"ledger/1": {"instructions": 1060.0}, "ledger/1024": {"instructions": 5.0}}}
    assert bench_core.worse(new, old, 6.1) == []
    (text,) = bench_core.worse(new, old, 5.0)
    assert "ledger/1 takes 1,060 instructions, 6.0% more than 1,000" in text


def test_a_report_of_another_version_or_scale_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.json"
    for report, says in (
        ({"schema": "x", "scale": 1, "cases": {}}, "is of another version"),
        ({"schema": bench_core.SCHEMA, "scale": 0.5, "cases": {}}, "was made with --scale 0.5; give the same"),
    ):
        path.write_text(json.dumps(report))
        assert bench_core.main(["--compare", str(path)]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.slow
def test_instructions_are_counted() -> None:
    tool = bench_core.counter()
    if not tool:
        pytest.skip("neither perf nor valgrind can count here")
    loops = (bench_core._counted(tool, [sys.executable, "-c", f"for _ in range({n}): pass"]) for n in (1_000, 101_000))
    few, many = (count or 0 for count in loops)
    assert 100_000 < many - few < 50_000_000
    if tool == "valgrind":
        return  # its runs of an operation take minutes
    case = next(c for c in bench_core.CASES if c.name == "ledger/1")
    first, second = (bench_core.instructions(tool, case, 200) for _ in range(2))
    assert first is not None
    assert second is not None
    assert 1_000 < first < 1_000_000
    assert abs(first - second) < 0.1 * first
