"""The page of a report: well formed, loads nothing, says why it is empty, and nothing in a log becomes markup."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asynckv.observe.log import phases as logged_phases
from asynckv.tools import cli, frame
from asynckv.tools.diagnose import report_bench, report_page, report_plots
from asynckv.tools.diagnose.colours import PHASES, STATES, WITHIN
from asynckv.tools.diagnose.records import Logs
from asynckv.tools.diagnose.report_text import bytes_text, duration, share, verdict
from asynckv.tools.diagnose.summary import summarise
from tests.test_bench_page import Found
from tests.test_cli import complaint
from tests.test_report_summary import DECODE, PREFILL, ended, lease_ended, lent, say, summed

VOID = {"meta", "br", "wbr", "img", "link", "input", "hr"}


class Balanced(Found):
    """A page whose tags have to be closed in order."""

    def __init__(self, text: str) -> None:
        self.open: list[str] = []
        self.ids: list[str] = []
        super().__init__(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        self.ids += [str(v) for k, v in attrs if k == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def text_of(page: str) -> str:
    """What is to be read, without scripts."""
    text = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", text)).split())


def rich() -> Logs:
    """A bit of everything."""
    records = [
        say(0.0, "engine_started", PREFILL, host="h1", pid=1, version="0.2.0"),
        say(0.0, "engine_started", DECODE, host="h2", pid=2, version="0.2.0"),
        say(0.1, "peer_changed", peer=PREFILL, state="connecting"),
        say(0.2, "peer_changed", peer=PREFILL, state="ready"),
        *(ended(1.0 + i, seconds=0.01 * (i + 1), successes_not_logged=3) for i in range(8)),
        ended(9.0, "timeout", failed_in="queue", detail="not lent yet"),
        ended(9.1, "peer_lost", held_transfers=1, pull_id="x-1"),
        say(9.5, "blocks_returned", level="warning", pull_id="x-1", seconds_after_failure=0.4),
        lent(1.0, 1, 10),
        lease_ended(9.0, 1, 10, 8.0),
        lease_ended(9.2, 2, 10, 8.0, "expired", owed=["*"]),
        say(9.3, "loop_was_away", level="warning", seconds=2.0, leases=1, pulls=1),
        say(9.4, "lease_held", PREFILL, "warning", waits="not claimed", requests=1, oldest=[{"request_id": "p"}]),
        say(9.6, "peer_changed", level="warning", peer=PREFILL, state="gone"),
        say(9.9, "engine_stopped", PREFILL),
    ]
    return Logs(sorted(records, key=lambda x: x.at))


def test_the_page_is_whole_and_loads_nothing() -> None:
    page = report_page.make(summarise(rich()), "service")
    found = Balanced(page)
    assert [x for x in found.loads if not x.startswith("#")] == []
    assert {x[1:] for x in found.loads} <= set(found.ids)
    assert "default-src 'none'" in page
    assert found.tags.count("figure") == len(found.plots) == len(found.labels) == 10
    assert page.count("plotly.js v") == 1
    assert "@@" not in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert "34 pulls ended within 9.90 s; 2 (5.9 %) failed" in text_of(page)


def test_every_plot_says_what_it_shows_in_words_and_has_a_unit() -> None:
    found = Balanced(report_page.make(summarise(rich()), "service"))
    assert all(len(label) > 30 for label in found.labels)
    for plot in found.plots:
        axes = [plot["layout"][x]["title"]["text"] for x in ("xaxis", "yaxis")]
        assert any(axes)
        assert all(trace["name"] and "hovertemplate" in trace for trace in plot["data"])


def test_a_log_that_just_ends_is_told_first_and_some_seconds_are_no_news() -> None:
    records = rich().records
    page = text_of(report_page.make(summarise(Logs([*records, say(12.0, "engine_resumed", PREFILL)])), "x"))
    assert "before the last line of all" not in page
    page = text_of(report_page.make(summarise(Logs([*records, say(60.0, "engine_resumed", PREFILL)])), "x"))
    early = "UTC, 50.4 s before the last line of all, without a goodbye: it died, is stopped, or logged nothing more."
    page = page.replace("\u00a0", " ")
    assert early in page
    assert page.index("Look here") < page.index(early) < page.index("34 pulls ended")
    assert "≥ 2.00 s since 08:00:09: a log ends" in page  # the tile: what it did since then is not known


def test_a_process_that_was_not_there_is_told_before_what_came_of_it() -> None:
    """Its time of day, in the first sentence; a band through the plots, and a row of its own among the peers."""
    records = [x for x in rich().records if x.event != "loop_was_away"]
    away = say(70.0, "loop_was_away", level="warning", seconds=60.2, leases=1, pulls=1)
    cancelled = [ended(70.1 + i / 10, "cancelled", pull_id=f"c-{i}") for i in range(2)]
    summary = summarise(Logs([*records, away, *cancelled]))
    said, is_good = verdict(summary)
    assert not is_good
    assert said[0] == f"The event loop of {DECODE} was away for 60.2\u00a0s, 08:00:09 to 08:01:10 UTC."
    assert any("; 2 were cancelled." in x for x in said)
    found = Balanced(report_page.make(summary, "x"))
    shapes = [plot["layout"].get("shapes", []) for plot in found.plots if plot["layout"]["xaxis"].get("type") == "date"]
    assert shapes
    assert all([x["x1"] - x["x0"] for x in each] == [pytest.approx(60_200)] for each in shapes)
    [states] = [x for x in found.plots if any(y["name"] == "suspect" or y["name"] == "ready" for y in x["data"])]
    assert states["layout"]["yaxis"]["ticktext"][0] == f"{DECODE} itself"
    # One that is silent for longer than it ever was may be away now.
    silent = [*records, *(ended(10.0 + i, pull_id=f"d-{i}") for i in range(5)), say(90.0, "of_later", PREFILL)]
    said, is_good = verdict(summarise(Logs(silent)))
    assert not is_good
    assert said[0].startswith(f"The log of {DECODE} ends at 08:00:14 UTC, 76.0\u00a0s before the last line of all")


def test_names_stay_whole_and_code_is_code() -> None:
    shown = frame.table(["a", "why"], [["x-1", "`docs/a.md` of decode-1/tp0@0a1b2c3d & <b>"]], label="t", texts=["why"])
    rank = '<span class="name">decode-1/</span><wbr><span class="name">tp0@0a1b2c3d</span>'
    assert f"<code>docs/a.md</code> of {rank} &amp; &lt;b&gt;" in shown
    assert '<span class="name">x-1</span>' in shown


def test_few_failures_are_counted_in_whole_ticks() -> None:
    plot = report_plots.failures(summarise(rich()))
    assert '"dtick":1' in plot.replace(" ", "")


def test_nothing_is_shown_where_nothing_is_known_and_the_page_says_why() -> None:
    text = text_of(report_page.make(summed(say(0.0, "engine_started"), say(5.0, "engine_stopped")), "idle"))
    for said in (
        "No pull ended within 5.00 s.",
        "No pull ended in these logs",
        "Nothing failed",
        "No block came back late",
        "No lease is in these logs",
        "No peer is named",
        "No event loop was away",
        "Nothing was held for so long",
    ):
        assert said in text
    assert "Nothing to judge: No pull ended" in text
    assert "There is no event of asynckv's" in text_of(report_page.make(summarise(Logs()), "nothing"))


def test_a_page_with_late_blocks_and_no_failure_says_that_these_are_two_things() -> None:
    said = "Failed pulls and late blocks are counted apart."
    records = [say(0.0, "engine_started", PREFILL), lent(1.0, 1, 10), *(ended(1.0 + i) for i in range(3))]
    assert said not in text_of(report_page.make(summarise(Logs(records)), "well"))
    records.append(lease_ended(31.0, 1, 10, 30.0, "expired", owed=["*"]))
    text = text_of(report_page.make(summarise(Logs(records)), "late"))
    assert "none failed" in text
    assert "came back late, at 08:00:31 UTC:" in text
    assert said in text


def test_logs_of_warnings_alone_are_said_to_know_nothing_of_what_went_well() -> None:
    text = text_of(report_page.make(summed(ended(0.0, "timeout"), ended(1.0, "peer_lost")), "bad"))
    assert "These logs hold warnings and errors only" in text
    assert "No pull that completed is in these logs" in text


def test_texts_of_logs_never_become_markup() -> None:
    evil = "</script><img src=x onerror=alert(1)><b>@@title@@\x1b[31m\u202e"
    rank = f"{evil}/tp0@dddddddd"
    records = [
        say(0.0, "engine_started", rank, host=evil, version=evil),
        say(0.1, "peer_changed", rank, peer=evil, state=evil, cause=evil, level="warning"),
        ended(1.0, rank=rank, request_id=evil, read_ranks=[evil], peer=evil),
        ended(2.0, evil, rank=rank, request_id=evil, detail=evil, failed_in=evil, read_ranks=[evil]),
        lease_ended(3.0, 1, 1, 1.0, evil, request_id=evil, owed=[evil]),
        say(3.5, "lease_held", rank, "warning", waits=evil, state=evil, requests=1, oldest=[{"request_id": evil}]),
        say(4.0, "loop_was_away", rank, "warning", seconds=1.5),
        say(5.0, evil, rank, "error", cause=evil, error=evil),
    ]
    found = Balanced(report_page.make(summed(*records), evil))
    assert "img" not in found.tags
    # As many as there are cards.
    assert found.tags.count("b") == 7
    shown = [
        t
        for plot in found.plots
        for t in (*(x["name"] for x in plot["data"]), *plot["layout"]["yaxis"].get("ticktext", []))
    ]
    assert any("&lt;img" in x for x in shown)
    assert not any("<" in x or "\x1b" in x or "\u202e" in x for x in shown)


def test_a_phase_has_one_colour_on_every_page() -> None:
    assert set(PHASES) | set(WITHIN) >= {
        "announced",
        "drain",
        "release",
        "post",
        "detect",
        "handshake",
        "queue",
        "plan",
    }
    assert logged_phases.__doc__ is not None
    assert all(name in PHASES for name in WITHIN.values())
    for colours in (PHASES, STATES):
        assert len({x.light for x in colours.values()}) == len({x.dark for x in colours.values()}) == len(colours)
    pages = report_page.make(summarise(rich()), "a")
    stacked = next(
        p for p in Found(pages).plots if p["layout"].get("barmode") == "stack" and "mean" in str(p["layout"])
    )
    assert {t["name"]: t["meta"] for t in stacked["data"]} == {n: list(PHASES[n]) for n in ("queue", "read")}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.0123, "12.3 ms"),
        (1e-6, "1.00 µs"),
        (1.5, "1.50 s"),
        (119.0, "119 s"),
        (150.0, "2.5 min"),
        (7300, "2.0 h"),
    ],
)
def test_durations_have_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert duration(seconds).replace("\u00a0", " ") == text


def test_bytes_and_shares_are_said_as_people_do() -> None:
    assert [bytes_text(x).replace("\u00a0", " ") for x in (0, 999, 1500, 2.5e9)] == [
        "0 B",
        "999 B",
        "1.50 kB",
        "2.50 GB",
    ]
    assert [share(*x).replace("\u00a0", " ") for x in ((0, 5), (1, 3), (1, 30), (5, 5), (1, 1_000_000), (0, 0))] == [
        "0 %",
        "33 %",
        "3.3 %",
        "100 %",
        "< 0.01 %",
        "0 %",
    ]


# -- benchmarks ---------------------------------------------------------------------------------------------------


FLOOR = {"median": 0.75, "low": 0.6, "high": 0.8, "level": 0.97, "rounds": 13}


def bench(**changes: Any) -> dict[str, Any]:
    """A report of a run on this machine, kept in the tree."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "data/bench.json").read_text())
    return found | changes


def test_a_benchmark_has_its_figures_phases_and_floors() -> None:
    summary = summarise(Logs())
    ratios = {"raw_nixl": {"gbytes_per_s": FLOOR, "p50_s": FLOOR, "cpu_s_per_request": FLOOR}}
    floors = {"raw_nixl": dict.fromkeys(("gbytes_per_s", "requests_per_s", "p50_s"), FLOOR), "not_measured": {}}
    found = bench(ratio_to_floor=ratios, floor=floors)
    summary.bench = [report_bench.read(found, "one.json"), report_bench.read(bench(), "other.json")]
    page = report_page.make(summary, "bench")
    parsed, text = Balanced(page), text_of(page)
    assert len(parsed.plots) == 3
    floor = next(p for p in parsed.plots if "floor" in p["layout"]["xaxis"]["title"]["text"])
    assert floor["data"][0]["x"] == [75.0]
    assert "side by side" in text
    assert f"{found['throughput']['requests_per_s']:,.4g}" in text
    assert found["environment"]["platform"] in text


def test_runs_with_faults_come_first_however_many_there_are() -> None:
    summary = summarise(Logs())
    bad = bench(requests=bench()["requests"] | {"failed": 6, "completed": 34}, problems=["decode/tp0 was killed"])
    summary.bench = [report_bench.read(bench(), f"{i}.json") for i in range(9)]
    summary.bench.append(report_bench.read(bad, "9.json"))
    text = text_of(report_page.make(summary, "bench"))
    assert text.index("9.json: ") < text.index("0.json: ") < text.index("And 7 more runs of the benchmark, below.")
    assert "3.json: " not in text[: text.index("And 7 more runs")]
    assert "requests failed" in text
    assert "nhd, nhd" in text


@pytest.mark.parametrize("completed", [0, 7])
def test_an_interrupted_benchmark_is_never_taken_for_a_whole_one(completed: int) -> None:
    requests = bench()["requests"] | {"completed": completed}
    cut = {"during": "run", "completed": completed, "requested": 400, "says": "while <it> ran"}
    one = report_bench.read(bench(interrupted=True, interruption=cut, requests=requests), "one.json")
    assert not one.is_good
    said = report_bench.verdict(one)
    assert said.startswith("one.json was INTERRUPTED while <it> ran")
    assert ("GB/s" in said) == bool(report_bench.cards(one, "")) == bool(completed)
    old = bench(interrupted=True, requests=requests)
    old.pop("interruption", None)
    assert "not those of the whole run" in report_bench.verdict(report_bench.read(old, "one.json"))


def test_a_damaged_benchmark_is_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "b", str(tmp_path / "out.html")
    damages: list[dict[str, Any]] = [
        {"phases_s": {"read": {}}},
        {"problems": None},
        {"config": {}},
        {"ratio_to_floor": {"a": {"gbytes_per_s": {"x": 1}}}},
    ]
    for changes in damages:
        path.write_text(json.dumps(bench(**changes), indent=1, sort_keys=True))
        assert "is damaged" in complaint(["report", str(path), "-o", out], monkeypatch, capsys)


# -- the command --------------------------------------------------------------------------------------------------


def run(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str, str]:
    """Run in this process; return the exit status, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["asynckv", *argv])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    return caught.value.code or 0, out, err


def write(path: Path, logs: Logs) -> Path:
    """Write a log file as engines do."""
    lines = []
    for record in logs.records:
        at = f"{record.at:.6f}"
        said = {"timestamp": float(at), "level": record.level, "event": record.event, "engine_id": record.engine_id}
        lines.append(json.dumps(dict(record.fields) | said | {"incarnation": record.incarnation, "rank": record.rank}))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_inputs_are_told_apart_by_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write(tmp_path / "looks-like.json", rich())
    report = tmp_path / "looks-like.log"
    report.write_text(json.dumps(bench(), sort_keys=True, indent=2))
    page = tmp_path / "out.html"
    status, out, err = run(
        ["report", str(log), str(report), "-o", str(page), "--json", "-", "--title", "T <1>"], monkeypatch, capsys
    )
    assert status == 0
    found = json.loads(out)
    assert found["schema"] == "asynckv.report/1"
    assert (found["pulls"]["failed"], len(found["bench"]), len(found["engines"])) == (2, 1, 2)
    assert "<title>T &lt;1&gt;</title>" in page.read_text()
    assert "MB" in err


def test_a_time_is_a_moment_or_so_long_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(write(tmp_path / "a.log", rich()))

    def pulls(*options: str) -> Any:
        status, out, _ = run(["report", log, "--json", "-", *options], monkeypatch, capsys)
        assert status == 0
        return json.loads(out)["pulls"]["logged"]

    assert (pulls(), pulls("--since", "2s"), pulls("--until", "2s")) == (10, 3, 7)
    assert pulls("--since", "2027-01-15T08:00:08.5") == 2
    assert pulls("--since", "2027-01-15T09:00:08.5+01:00") == 2
    assert "is no time" in complaint(["report", log, "--json", "-", "--since", "noon"], monkeypatch, capsys)
    assert "no event is between" in complaint(["report", log, "--json", "-", "--until", "1h"], monkeypatch, capsys)


def test_without_plotly_json_is_written_and_a_page_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(frame, "is_installed", lambda: False)
    log = str(write(tmp_path / "a.log", rich()))
    empty = str(write(tmp_path / "empty.log", Logs()))
    assert "all are of other programs" in complaint(["report", empty], monkeypatch, capsys), "what is read comes first"
    text = complaint(["report", log], monkeypatch, capsys)
    assert "pip install 'asynckv[plots]'" in text
    assert "--json" in text
    status, out, _ = run(["report", log, "--json", "-"], monkeypatch, capsys)
    assert (status, json.loads(out)["pulls"]["logged"]) == (0, 10)


def test_bad_input_is_one_line_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "x", ["-o", str(tmp_path / "out.html")]
    path.write_text('{"kind":"sweep","schema":"asynckv.sweep/1"}\n{"kind":"point"}\n')
    assert "asynckv bench page" in complaint(["report", str(path), *out], monkeypatch, capsys)
    path.write_text('{"schema": "asynckv.compare/1"}')
    assert "asynckv.bench/1" in complaint(["report", str(path), *out], monkeypatch, capsys)
    path.write_text("nothing of ours\n")
    assert "no event of asynckv's" in complaint(["report", str(path), *out], monkeypatch, capsys)
    assert "name a log" in complaint(["report", str(tmp_path / "none"), *out], monkeypatch, capsys)
    path.write_bytes(msgspec.json.encode({"schema": "asynckv.bench/1"}))
    assert "is damaged" in complaint(["report", str(path), *out], monkeypatch, capsys)
    both = ["report", str(path), "-o", "-", "--json", "-"]
    assert "cannot share stdout" in complaint(both, monkeypatch, capsys)
    assert "cannot be written" in complaint(["report", str(path), "-o", str(tmp_path / "no/x")], monkeypatch, capsys)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed here, so nothing can open the page")
@pytest.mark.timeout(180)
def test_a_browser_draws_every_plot_without_an_error(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    summary = summarise(rich())
    summary.bench = [report_bench.read(bench(), "one.json")]
    page = report_page.make(summary, "</script><script>throw 1</script>")
    # Errors are written into the page itself, where they are seen.
    catch = "<script>addEventListener('error', e => document.documentElement.dataset.failed = e.message);</script>"
    path = tmp_path / "report.html"
    path.write_text(page.replace("<head>", f"<head>{catch}", 1))
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    quiet += [
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command = [CHROMIUM, *quiet, "--virtual-time-budget=5000", "--dump-dom", f"file://{path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    assert "data-failed" not in done.stdout
    drawn = done.stdout.count('class="main-svg"')
    # Each plot has three layers.
    assert drawn >= 2 * len(Found(page).plots) > 0
    assert done.stdout.count("js-plotly-plot") >= len(Found(page).plots)
