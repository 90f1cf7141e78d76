"""Requests on one time axis, and `asynckv why`: what is drawn, how sure it is, and that no log does harm."""

from __future__ import annotations

import io
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from asynckv.tools.diagnose import why_page, why_text
from asynckv.tools.diagnose.axis import CLOCKS_S, LATE_S, Axis, Offset, Pair, shown_offset, shown_seconds
from asynckv.tools.diagnose.findings import Findings, Seen, find
from asynckv.tools.diagnose.join import Process, Service, join
from asynckv.tools.diagnose.leaks import find_leaks
from asynckv.tools.diagnose.presence import Presence
from asynckv.tools.diagnose.records import Logs, read_logs
from asynckv.tools.diagnose.timeline_model import PHASES, Bar, Story, ground, stories
from asynckv.tools.diagnose.why_page import make
from asynckv.tools.diagnose.why_report import report
from tests.commands import Command
from tests.timeline_logs import AHEAD, BEGIN, DECODE, PREFILL, D, P, Written, service


def axis_of(written: Written, directory: Path) -> Axis:
    return Axis(join(read_logs([written.write(directory)])))


@pytest.fixture
def axis(tmp_path: Path) -> Axis:
    return axis_of(service(), tmp_path)


def named(axis: Axis, name: str) -> Story:
    return next(x for x in stories(axis) if x.name == name)


def bars(story: Story, rank: str, what: str = "") -> list[tuple[str, float, float]]:
    """Phases of a lane: since the story's start, rounded to 10 ms (its clock is not surer than some)."""
    lane = next(x for x in story.lanes if x.process.rank == rank and what in ("", x.what))
    return [(b.phase, round(b.start - story.start, 2), round(b.seconds, 4)) for b in lane.bars]


# -- the axis ----------------------------------------------------------------------------------------


def test_the_decode_hosts_clock_is_found(axis: Axis) -> None:
    for start in DECODE:
        process = axis.service.processes[start]
        offset = axis.offset(process)
        assert abs(offset.seconds - AHEAD) <= offset.within_s < 0.01
    assert [x.rank for x in axis.references] == [P]
    assert axis.notes() == []
    assert "+5000" in axis.compared(axis.service.processes[DECODE[0]])
    assert axis.compared(axis.service.processes[PREFILL]) == "by its own clock, which is the axis's"


@pytest.mark.parametrize(
    ("offset", "text"),
    [
        (Offset(0.0123, 0.0004), "+12.30 ms ± 0.40 ms"),
        (Offset(-7200.0, 0.002), "-7200.0000 s ± 0.0020 s"),
        (Offset(0.0, 0.0), "+0.000 ms ± 0.000 ms"),
        (Offset(5.0, 0.9), "+5000 ms ± 900 ms"),
    ],
)
def test_an_offset_is_written_as_sharply_as_it_is_known(offset: Offset, text: str) -> None:
    assert shown_offset(offset) == text


def test_a_duration_has_three_digits() -> None:
    assert [shown_seconds(x) for x in (0, 1.5e-5, 0.0009999, 0.00123, 0.0999, 0.09999, 1.5, 123.4)] == [
        "0 µs",
        "15 µs",
        "1.00 ms",
        "1.23 ms",
        "99.9 ms",
        "100 ms",
        "1.50 s",
        "123 s",
    ]


# -- the model ---------------------------------------------------------------------------------------


def test_a_request_that_went_well(axis: Axis) -> None:
    story = named(axis, "chat-2")
    assert (story.level, story.others) == ("info", ("gen-2",))
    assert story.seconds == pytest.approx(0.009, abs=1e-5)
    assert story.ended == "lease released, pull complete"
    assert [x.process.rank for x in story.lanes] == [P, D[0]]
    assert bars(story, P) == [("lent", 0.0, 0.003), ("granted", 0.0, 0.006)]
    names = [(phase, seconds) for phase, _, seconds in bars(story, D[0])]
    assert names == [("queue", 0.001), ("plan", 0.001), ("read", 0.004), ("confirm", 0.001)]
    read = next(b for b in story.lanes[1].bars if b.phase == "read")
    assert read.inside == {"post": 0.0005, "detect": 0.0001}
    # Truly it began a millisecond after it was lent.
    lane = story.lanes[1]
    assert abs(lane.bars[0].start - story.start - 0.001) <= lane.within_s
    assert "outcome complete after 7.00 ms, with 2 pieces read before it" in [x.text for x in story.marks]
    assert (lane.fields["pieces"], lane.fields["piece_bytes"]) == ("2", "8192")


def test_what_failed_has_its_attempts_its_pause_and_its_blocks(axis: Axis) -> None:
    story = named(axis, "chat-8")
    assert (story.pull, story.level) == ("complete", "warning")
    assert [x.what for x in story.lanes if x.side == "decode"] == ["attempt 1", "attempt 2"]
    assert bars(story, D[1], "attempt 1") == [
        ("announced", 0.05, 0.05),
        ("queue", 0.1, 0.01),
        ("plan", 0.11, 0.01),
        ("read", 0.12, 0.18),
        ("drain", 0.3, 0.1),
        ("pause", 0.4, 0.5),
        ("quarantine", 0.4, 0.2),
    ]
    texts = [x.text for x in story.marks]
    assert any("read_failed" in x for x in texts)
    assert any(x.startswith("attempt 2 follows") for x in texts)
    assert "its blocks came back" in texts
    assert [x.at for x in story.marks] == sorted(x.at for x in story.marks)


def test_what_has_not_ended_is_open(axis: Axis) -> None:
    story = named(axis, "chat-21")
    (lane,) = story.lanes
    assert [(b.phase, b.is_open) for b in lane.bars] == [("announced", True)]
    assert lane.bars[0].seconds == pytest.approx(30.0, abs=0.1)
    assert story.pull == "announced"


def test_a_lease_without_a_claim(axis: Axis) -> None:
    story = named(axis, "chat-20")
    assert bars(story, P) == [("lent", 0.0, 30.0)]
    assert (story.lease, story.level) == ("expired", "warning")
    assert [x.text for x in story.marks] == [
        "lent, 7 blocks",
        "held for long: not claimed by any reader",
        "expired after 30.0 s, owed by *",
    ]


def test_a_claim_is_drawn_though_the_lend_was_written_late_and_the_log_ends_with_the_grant(tmp_path: Path) -> None:
    written = Written()
    written.begin()
    ids: dict[str, Any] = {"request_id": "chat-9", "sequence": 9}
    written.line("lease_lent", 2.3, P, **ids, blocks=1, lease_s=30.0)
    written.line("lease_granted", 3.0, P, **ids, reader=D[0], pull_id=f"{'c' * 16}-9", seconds=10.0, after_s=1.0)
    (story,) = stories(axis_of(written, tmp_path))
    assert bars(story, P) == [("lent", 0.0, 0.7), ("granted", 0.7, 0.0)]
    assert [(bar.note, bar.is_open) for bar in story.lanes[0].bars] == [("", False), ("", True)]


def test_the_ground_has_starts_ends_and_when_the_loop_was_away(axis: Axis) -> None:
    by_rank = {x.process.rank: x for x in ground(Presence(axis))}
    (away,) = by_rank[D[1]].away
    assert away.seconds == pytest.approx(0.15)
    assert abs(away.end - BEGIN - 2.2) <= axis.offset(by_rank[D[1]].process).within_s
    assert [x.text for x in by_rank[P].marks] == ["engine started", f"met {D[0]}", f"met {D[1]}"]
    assert any(x.text == "engine stopped" for x in by_rank[D[0]].marks)


def test_a_reader_whose_log_is_not_there_is_named_by_what_the_prefill_side_knows(tmp_path: Path) -> None:
    written = Written()
    written.begin()
    granted = {"note": "granted", "reader": D[1], "pull_id": f"{'c' * 16}-9"}
    steps = [[0.0, "lent"], [1.0, granted], [2.0, "expired"]]
    why: dict[str, Any] = {"cause": "expired", "owed": [D[1]], "readers": {}, "history": steps}
    written.line("lease_ended", 6.0, P, "warning", request_id="chat-9", sequence=9, seconds=2.0, blocks=1, **why)
    axis = axis_of(written, tmp_path)
    (story,) = stories(axis)
    assert bars(story, P) == [("lent", 0.0, 1.0), ("granted", 1.0, 1.0)]
    assert f"granted to {D[1]}, pull {'c' * 16}-9" in [x.text for x in story.marks]
    assert story.pull_ids == (f"{'c' * 16}-9",)
    assert (story.lease, story.pull) == ("expired", "")
    check_outputs(axis, [story])


def test_a_process_that_died_is_marked_where_its_log_ends_with_who_noticed_when(tmp_path: Path) -> None:
    written = Written()
    written.begin()
    written.complete(1, 2.0)
    lost: dict[str, Any] = {"peer": P, "peer_incarnation": PREFILL, "before": "ready", "state": "gone"}
    lost |= {"cause": "peer_lost", "detail": "\x1b[31mthe remote process is gone"}
    for at, rank in ((3.0, D[0]), (17.0, D[1])):
        written.line("peer_changed", at, rank, "warning", **lost)
    written.line("engine_stopped", 34.0, D[0])
    written.line("engine_stopped", 34.0, D[1])
    axis = axis_of(written, tmp_path)
    prefill, *readers = ground(Presence(axis))
    assert [x.gone for x in readers] == [None, None], "an end in order is no death"
    gone = prefill.gone
    assert gone is not None
    assert (gone.kind, gone.gone, gone.is_proved) == ("died", "died", True)
    # Its last line was written at 2.012, and who lost it first did at 3.0, by a clock that is as sure as this.
    assert gone.before - prefill.end == pytest.approx(0.988, abs=2 * axis.offset(readers[0].process).within_s)
    check_outputs(axis, stories(axis))
    found = seen_of(axis)
    (finding,) = find(found).wrong
    assert finding.what.startswith(f"{P} died: its log ends at ")
    assert f"{D[0]} lost it: \x1b[31mthe remote process is gone" in finding.what
    said = io.StringIO()
    why_text.show_findings(report(find(found), found), Console(file=said, width=80))
    assert "\x1b" not in said.getvalue()
    assert "lost it: \\x1b[31mthe remote process is gone" in said.getvalue()
    page = make(found, find(found), ["x.log"], stories(axis))
    assert f"{P} died: " in page
    drawn = [x.get("gone") for x in page_data(page)["processes"]]
    assert [x and x["how"] for x in drawn] == ["died", None, None]


def test_a_log_that_only_ends_early_is_no_death(tmp_path: Path) -> None:
    written = Written()
    written.begin()
    written.complete(1, 2.0, D[1])
    written.complete(2, 25.0)
    axis = axis_of(written, tmp_path)
    gone = {x.process.rank: x.gone for x in ground(Presence(axis))}
    assert gone[P] is gone[D[0]] is None, "all logs end at some time"
    early = gone[D[1]]
    assert early is not None
    assert early.kind == "silent"
    # By the axis's clock: its own is five seconds ahead.
    assert early.text.startswith(f"its log ends at {axis.moment(BEGIN + 2.011)[:-1]}"), early.text
    assert "it may live and have nothing to say" in early.text
    check_outputs(axis, stories(axis))


def test_a_bar_with_fewer_cells_than_phases_is_of_the_longest() -> None:
    bars_ = [Bar("queue", 0.0, 2.6), Bar("plan", 2.6, 2.9), Bar("read", 2.9, 3.0), Bar("confirm", 3.0, 4.1)]
    for width in (80, 120):
        assert why_text.bar_line(bars_, 0.0, 2000.0, width).plain.strip() == "q"
    assert why_text.bar_line(bars_, 0.0, 4.1, 3).plain == "qqq"
    assert set(why_text.bar_line(bars_, 0.0, 4.1, 80).plain) == set("qpRc")


def test_half_of_the_logs_is_enough(tmp_path: Path) -> None:
    both = service()
    for rank in (P, "decode"):
        kept = Written()
        kept.lines = [x for x in both.lines if json.loads(x[1])["rank"].startswith(rank)]
        axis = axis_of(kept, tmp_path)
        found = stories(axis)
        assert len(found) >= 9
        assert {x.side for story in found for x in story.lanes} == {"prefill" if rank == P else "decode"}
        if rank != P:
            assert len(axis.references) == 1, "one host"
        check_outputs(axis, found)


def test_attempts_with_new_params_are_one_request(tmp_path: Path) -> None:
    written = Written()
    written.begin()
    for number, attempt, at in ((1, 1, 1.0), (2, 2, 2.0)):
        common: dict[str, Any] = {
            "request_id": "gen",
            "prefill_request_id": f"chat-{number}",
            "sequence": number,
            "peer": "prefill",
        }
        cause = "complete" if attempt == 2 else "read_failed"
        more: dict[str, Any] = {"attempt": 2} if attempt == 2 else {}
        written.line("pull_ended", at, D[0], cause=cause, **common, pull_id=f"{'b' * 16}-{number}", seconds=0.1, **more)
    # The same id once more is another request.
    written.line(
        "pull_ended",
        9.0,
        D[0],
        cause="complete",
        request_id="gen",
        prefill_request_id="chat-3",
        sequence=3,
        peer="prefill",
        pull_id=f"{'b' * 16}-9",
        seconds=0.1,
    )
    found = stories(axis_of(written, tmp_path))
    assert [len(x.pull_ids) for x in found] == [2, 1]
    assert found[0].seconds == pytest.approx(1.1)


# -- what it is shown as -------------------------------------------------------------------------------


class Checked(HTMLParser):
    """Collects a page's scripts and tags."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def seen_of(axis: Axis) -> Seen:
    presence = Presence(axis)
    return Seen(Logs(), presence, ground(presence), find_leaks(presence))


def check_outputs(axis: Axis, found: list[Story]) -> None:
    seen = seen_of(axis)
    findings = find(seen)
    page = make(seen, findings, ["x.log"], found)
    data = page_data(page)
    assert len(data["requests"]) == len(found)
    checked = Checked()
    checked.feed(page)
    assert checked.links == []
    assert checked.tags["script"] == 2
    for each in (Console(file=io.StringIO(), width=80), Console(file=io.StringIO(), width=200, force_terminal=True)):
        why_text.show_findings(report(findings, seen), each)
        why_text.show_late(axis, findings.late, each)
        for story in found[-4:]:
            json.dumps(report(findings, seen, story), allow_nan=False)
            why_text.show_story(axis, story, seen.grounds, each)


def page_data(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_every_form_holds_together(axis: Axis) -> None:
    check_outputs(axis, stories(axis))


def test_one_request_on_a_narrow_screen(axis: Axis) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, no_color=True, color_system=None)
    why_text.show_story(axis, named(axis, "chat-8"), ground(Presence(axis)), console)
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(x) <= 80 for x in out.splitlines())
    assert "± " in out
    assert "its event loop was away for 150 ms" in out
    assert "against prefill/tp0@aaaaaaaa" in out
    lane = next(x for x in out.splitlines() if x.startswith("attempt 1, decode/tp1@ccc"))
    assert re.search(r" a+q+p?R+d+X+\.+ ", lane), lane
    assert "\x1b" not in out, "what a log says does not reach the terminal"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_id_is_cut_on_a_narrow_screen(width: int, tmp_path: Path) -> None:
    written, long = service(), "cmpl-7d3c8a90-1111-2222-3333-444455556666-"
    written.lines = [(at, text.replace('"chat-', f'"{long}')) for at, text in written.lines]
    axis = axis_of(written, tmp_path)
    found = stories(axis)
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, no_color=True, color_system=None)
    seen = seen_of(axis)
    why_text.show_findings(report(find(seen), seen), console)
    why_text.show_matches(found, "cmpl", console)
    assert "…" not in out.getvalue()
    assert f"{long}20" in out.getvalue()


def test_colours_come_only_on_a_terminal(axis: Axis) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="truecolor")
    why_text.show_story(axis, named(axis, "chat-8"), ground(Presence(axis)), console)
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[7" in out
    assert "\x1b[31mremote" not in out


def test_every_phase_has_a_letter_and_a_colour_of_its_own() -> None:
    for kind in ("letter", "light", "dark"):
        assert len({getattr(x, kind) for x in PHASES.values()}) == len(PHASES)


def test_a_hostile_name_stays_text(tmp_path: Path) -> None:
    written = service()
    evil = "</script><script>alert(1)</script><b>\x1b]0;x\x07\u202e[red]"
    written.lines = [(at, text.replace('"chat-3"', json.dumps(evil))) for at, text in written.lines]
    axis = axis_of(written, tmp_path)
    found = stories(axis)
    check_outputs(axis, found)
    page = make(seen_of(axis), Findings(), ["<i>.log"], found)
    assert "<script>alert" not in page
    assert "<i>" not in page
    console = Console(file=io.StringIO(), width=100)
    why_text.show_story(axis, next(x for x in found if "alert" in x.name), [], console)
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[red]" in out
    assert "\x07" not in out
    assert "\u202e" not in out


def test_nonsense_in_fields_does_no_harm(tmp_path: Path) -> None:
    written = service()
    wrong: tuple[Any, ...] = (
        None,
        [],
        {},
        "x",
        -1e308,
        1e308,
        [[1, 2, 3]],
        {"read": "x"},
        [["x", "lent"], [1e300, "lent"]],
    )
    lines = list(written.lines)
    for i, (at, text) in enumerate(lines):
        fields = json.loads(text)
        for j, name in enumerate(
            [x for x in fields if x not in ("engine_id", "rank", "incarnation", "event", "timestamp")]
        ):
            fields[name] = wrong[(i + j) % len(wrong)]
        written.lines.append((at, json.dumps(fields)))
    axis = axis_of(written, tmp_path)
    check_outputs(axis, stories(axis))


# -- the command -----------------------------------------------------------------------------------------


Why = Callable[..., tuple[int, str, str]]


@pytest.fixture
def why(monkeypatch: pytest.MonkeyPatch, command: Command) -> Why:
    monkeypatch.setenv("COLUMNS", "100")
    return partial(command.run, "why")


@pytest.fixture
def log(tmp_path: Path) -> str:
    return service().write(tmp_path)


def test_an_id_that_only_one_side_knows_finds_its_request(tmp_path: Path, why: Why) -> None:
    written = service()
    # A router changed the id: the claim was refused, and so was the release.
    other = {"request_id": "gen-30", "prefill_request_id": "30", "pull_id": "c" * 16 + "-30", "sequence": 30}
    refused = {"cause": "wrong_request", "peer": "prefill"}
    written.line("pull_ended", 5.0, D[1], "warning", **refused, **other, peer_ranks=[P], read_ranks=[P], seconds=0.001)
    written.line("release_refused", 5.0, D[1], "warning", **refused, **other, ranks=[P])
    lease: dict[str, Any] = {"request_id": "P:4,\n", "sequence": 30, "blocks": 1, "readers": {}, "owed": ["*"]}
    written.line("lease_ended", 5.0, P, "warning", cause="expired", **lease, seconds=1.0)
    # A pull that the prefill side alone speaks of: two grants to one reader, and the first is no longer its last.
    granted = {"note": "granted", "reader": D[1]}
    steps = [[0.0, "lent"], *([i / 10, {**granted, "pull_id": f"{'c' * 16}-4{i}"}] for i in (1, 2)), [1.0, "expired"]]
    lease = {"request_id": "chat-40", "sequence": 40, "blocks": 1, "readers": {}, "owed": [D[1]], "history": steps}
    written.line("lease_ended", 6.0, P, "warning", cause="expired", **lease, seconds=1.0)
    log = written.write(tmp_path)
    for name in ("30", "gen-30", "P:4,\n", r"P:4,\n"):
        code, out, err = why(name, log)
        assert (code, err) == (1, "")
        assert out.startswith(r"P:4,\n (decode: gen-30)"), out
        assert f"release refused by {P}: wrong_request" in out
        assert "speaks of it under another prefill request id: 30\n" in out
        assert "lent, 1 block\n" in out
    for name in ("chat-40", "c" * 16 + "-41", "c" * 16 + "-42"):
        code, out, err = why(name, log)
        assert (code, err) == (1, "")
        assert out.startswith("chat-40"), out
        assert f"granted to {D[1]}, pull {'c' * 16}-41" in out


def test_several_that_match_are_listed(log: str, why: Why) -> None:
    code, out, _ = why("chat-2", log)
    assert code == 0, "what is exact comes first"
    code, out, _ = why("chat", log)
    assert code == 2
    for name in ("prefill:chat-3", "#3"):
        code, out, _ = why(name, log)
        assert (code, out.startswith("chat-3 (decode: gen-3)")) == (0, True)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--json", "-", "--html", "-"], "--html and --json cannot share stdout"),
        (["--html", "NONE/x.html"], "NONE/x.html: cannot be written"),
        (["--watch"], "--watch asks running engines: give addresses alone"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], says: str, log: str, tmp_path: Path, why: Why) -> None:
    none = str(tmp_path / "none")
    code, out, err = why(log, *(x.replace("NONE", none) for x in argv))
    assert code == 2
    assert out == ""
    assert says.replace("NONE", none) in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("text", "says"), [("hello\n", "of other programs"), ("", "nothing is in there")])
def test_a_log_without_events_is_bad_input(text: str, says: str, tmp_path: Path, why: Why) -> None:
    (tmp_path / "x.log").write_text(text)
    code, _, err = why(str(tmp_path))
    assert code == 2
    assert "no event of asynckv's" in err
    assert says in err


def test_files_and_stdout(log: str, tmp_path: Path, why: Why) -> None:
    page = tmp_path / "x.html"
    code, out, err = why(log, "--html", str(page), "--json", "-")
    assert code == 1
    value = json.loads(out)
    assert value["schema"] == "asynckv.why/1"
    assert sorted(x["request_id"] for x in value["late"]) == ["chat-20", "chat-8"]
    ahead = {x["rank"]: (x["ahead_s"], x["within_s"]) for x in value["processes"]}
    assert abs(ahead[D[0]][0] - AHEAD) <= ahead[D[0]][1]
    assert err == ""
    assert len(page_data(page.read_text())["requests"]) == 11


def test_of_too_many_those_that_went_wrong_are_kept(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: Why
) -> None:
    monkeypatch.setattr(why_page, "MOST_SHOWN", 4)
    page = tmp_path / "x.html"
    why(log, "--html", str(page))
    text = page.read_text()
    assert "7 more that went well and were shorter are left out" in text
    assert {x["request_id"] for x in page_data(text)["requests"]} >= {"chat-8", "chat-20", "chat-21"}


# -- Offsets between clocks -------------------------------------------------------------------------------------------


def aligned(
    ahead: Mapping[str, float], talk: Sequence[tuple[str, float, str, float]], hosts: Mapping[str, str] | None = None
) -> tuple[Axis, dict[str, Process]]:
    """Align processes of which each is so far ahead; the first is the reference. Times of exchanges are true ones."""
    processes = {
        name: Process(name, name, f"{name}/tp0", host=(hosts or {}).get(name, ""), lends=i == 0, num_records=-i)
        for i, name in enumerate(ahead)
    }
    pairs = [
        Pair(processes[cause], left + ahead[cause], processes[effect], came + ahead[effect])
        for cause, left, effect, came in talk
    ]
    return Axis(Service(processes), pairs), processes


def talked(
    names: Sequence[str], rng: random.Random, number: int = 40, ways: Sequence[tuple[str, str]] = ()
) -> list[tuple[str, float, str, float]]:
    """Exchanges at random: delays that are mostly short, and lines that are written a little late."""
    out = []
    for _ in range(number):
        cause, effect = rng.choice(ways or [(a, b) for a in names for b in names if a != b])
        sent = rng.uniform(0, 100)
        came = sent + rng.choice((0.0, rng.expovariate(1000), rng.expovariate(10)))
        out.append((cause, sent + rng.uniform(0, LATE_S), effect, came + rng.expovariate(200)))
    return out


def both(*ways: tuple[str, str]) -> list[tuple[str, str]]:
    return [*ways, *((b, a) for a, b in ways)]


@settings(max_examples=30)
@given(st.integers(0, 1 << 32), st.lists(st.floats(-1e5, 1e5), min_size=2, max_size=5), st.integers(3, 120))
def test_the_true_offset_lies_inside(seed: int, shifts: list[float], number: int) -> None:
    ahead = {f"p{i}": shift for i, shift in enumerate(shifts)}
    axis, processes = aligned(ahead, talked(list(ahead), random.Random(seed), number))
    assert axis.conflicts == []
    for name, process in processes.items():
        reference = axis.references[axis.group(process)]
        offset = axis.offset(process)
        # Rounding: times of today have 0.2 us, and so have clocks that are a day apart.
        assert abs(ahead[name] - ahead[reference.incarnation] - offset.seconds) <= offset.within_s + 1e-4
        assert axis.at(process, 50.0 + ahead[name]) == pytest.approx(
            50.0 + ahead[reference.incarnation], abs=offset.within_s + 1e-4
        )


def test_more_exchanges_make_it_sharper() -> None:
    ahead = {"a": 0.0, "b": 12.3}
    found = [aligned(ahead, talked("ab", random.Random(1), number)) for number in (6, 600)]
    few, many = (axis.offset(processes["b"]).within_s for axis, processes in found)
    assert many < few
    assert LATE_S / 4 < many < 0.01


def test_a_clock_that_was_set_is_told_and_both_values_lie_inside() -> None:
    before = [("a", float(at), "b", at + 0.001) for at in range(5)]
    after = [("a", float(at), "b", at + 4.001) for at in range(10, 20)]
    after += [("b", at + 4.0, "a", at + 0.001) for at in range(10, 20)]
    axis, processes = aligned({"a": 0.0, "b": 5.0}, [*before, *after])
    ((one, other, seconds),) = axis.conflicts
    assert (one, other) == ("a", "b")
    assert seconds == pytest.approx(4.0, abs=0.01)
    assert any("a clock was set" in x for x in axis.notes())
    offset = axis.offset(processes["b"])
    for shift in (5.0, 9.0):
        assert abs(offset.seconds - shift) <= offset.within_s + 1e-9


def test_lines_that_are_late_widen_the_interval() -> None:
    talk = [*talked("ab", random.Random(3), 1000), ("a", 50.3, "b", 50.0)]
    axis, processes = aligned({"a": 0.0, "b": 7.0}, talk)
    assert axis.conflicts == [], "too little to be told"
    offset = axis.offset(processes["b"])
    assert offset.seconds + offset.within_s == pytest.approx(7.0, abs=2 * LATE_S)
    assert offset.within_s < 0.16


def test_processes_of_one_host_share_its_clock() -> None:
    ahead = {"a": 0.0, "b1": 5.0, "b2": 5.0}
    talk = talked("", random.Random(4), ways=both(("a", "b1")))
    axis, processes = aligned(ahead, talk, {"a": "one", "b1": "two", "b2": "two"})
    assert axis.references == [processes["a"]]
    assert axis.offset(processes["b2"]) == axis.offset(processes["b1"])
    assert axis.notes() == []


def test_one_host_is_exact_and_exchanges_that_contradict_it_are_told() -> None:
    hosts = {"a": "localhost", "b": "localhost"}
    for shift in (0.0, 5.0):
        axis, processes = aligned({"a": 0.0, "b": shift}, talked("ab", random.Random(6)), hosts)
        assert axis.offset(processes["b"]) == Offset(0.0, 0.0)
        assert len(axis.references) == 1
        assert [x[:2] for x in axis.conflicts] == ([("localhost", "localhost")] if shift else [])
        assert any("two machines have one name" in x for x in axis.notes()) is bool(shift)


def test_processes_that_never_met_cannot_be_compared() -> None:
    ways = both(("a", "b"), ("c", "d"))
    axis, processes = aligned({"a": 0.0, "b": 1.0, "c": 2.0, "d": 3.0}, talked("", random.Random(7), ways=ways))
    assert [axis.group(x) for x in processes.values()] == [0, 0, 1, 1]
    assert axis.references == [processes["a"], processes["c"]]
    assert axis.when(processes["d"], 50.0) == (50.0 - CLOCKS_S, 50.0 + CLOCKS_S)
    # Of a process that was only heard, and never answered, nothing is known.
    one_way, _ = aligned({"a": 0.0, "b": 1.0}, talked("", random.Random(8), ways=[("a", "b")]))
    assert len(one_way.references) == 2


def test_a_way_round_is_as_good_as_its_parts() -> None:
    ahead = {f"p{i}": 100.0 * i for i in range(5)}
    ways = both(*((f"p{i}", f"p{i + 1}") for i in range(4)))
    axis, processes = aligned(ahead, talked("", random.Random(9), 400, ways))
    widths = [axis.offset(x).within_s for x in processes.values()]
    assert widths == sorted(widths)
    assert 0.0 == widths[0] < widths[4] < 0.1


def test_nothing_is_needed() -> None:
    assert aligned({}, [])[0].references == []
    axis, processes = aligned({"a": 0.0, "b": 0.0}, [], {"b": "x"})
    assert axis.references == list(processes.values())
    assert axis.at(processes["a"], 5.0) == 5.0
