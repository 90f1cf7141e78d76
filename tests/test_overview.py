"""The first screen of a timeline's page: what is wrong, worst first, what to do, and that no text becomes markup."""

from __future__ import annotations

import itertools
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from asynckv.tools.diagnose.axis import make_axis
from asynckv.tools.diagnose.join import join
from asynckv.tools.diagnose.leaks import find_leaks
from asynckv.tools.diagnose.overview import Line, overview
from asynckv.tools.diagnose.records import Logs, Record, read_logs
from asynckv.tools.diagnose.timeline_model import families, ground, stories
from asynckv.tools.diagnose.timeline_page import make
from tests.test_timeline import page_data
from tests.timeline_logs import service

DECODE, PREFILL = "decode/tp0@dddddddd", "prefill/tp0@aaaaaaaa"
START = 1_800_000_000.0
_ids = itertools.count()


def say(at: float, event: str, rank: str = DECODE, level: str = "info", **fields: Any) -> Record:
    """One event, so many seconds after the start."""
    base, _, start = rank.partition("@")
    return Record(START + at, event, level, base.split("/")[0], rank, start * 4, fields, f"test.log:{next(_ids)}")


def ended(at: float, cause: str = "complete", **fields: Any) -> Record:
    """A pull that ended."""
    number = next(_ids)
    said: dict[str, Any] = {
        "cause": cause,
        "request_id": f"d-{number}",
        "prefill_request_id": f"p-{number}",
        "pull_id": f"dddddddddddddddd-{number}",
        "sequence": number,
        "peer": "prefill",
        "seconds": 0.01,
    }
    good = cause in ("complete", "cancelled", "discharged")
    return say(at, "pull_ended", DECODE, "info" if good else "warning", **said | fields)


def well() -> list[Record]:
    """Two processes that start, do something and stop."""
    return [
        *(say(0.0, "engine_started", rank, host="h", pid=1) for rank in (PREFILL, DECODE)),
        *(ended(1.0 + i) for i in range(3)),
        *(say(90.0, "engine_stopped", rank) for rank in (PREFILL, DECODE)),
    ]


def screen(records: list[Record]) -> tuple[list[Line], str]:
    """What is said, and the page."""
    logs = Logs(sorted(records, key=lambda x: x.at))
    joined = join(logs)
    axis, leaks = make_axis(joined), find_leaks(joined)
    grounds = ground(axis)
    lines = overview(logs, axis, families(joined.requests), grounds, leaks)
    return lines, make(axis, stories(axis), grounds, ["test.log"], lines, leaks)


class Balanced(HTMLParser):
    """A page whose tags have to be closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_of_a_service_that_is_well_nothing_is_said() -> None:
    lines, page = screen(well())
    assert lines == []
    assert "<p>All well.</p>" in page


def test_what_is_wrong_comes_worst_first_with_what_to_do() -> None:
    lines, page = screen(
        [
            *well(),
            say(40.0, "loop_was_away", DECODE, "warning", seconds=8.0, leases=0, pulls=2),
            say(50.0, "loop_was_away", DECODE, "warning", seconds=22.0, leases=0, pulls=5),
            say(31.0, "lease_lent", PREFILL, request_id="x", sequence=900, blocks=7, lease_s=30.0),
            say(61.0, "lease_ended", PREFILL, "warning", request_id="x", sequence=900, blocks=7, seconds=30.0,
                cause="expired", owed=["*"]),
            *(ended(62.0 + i, "timeout", detail="still queued behind others") for i in range(2)),
            ended(64.0, "peer_lost"),
            say(65.0, "internal_error", PREFILL, "error", error="ValueError: 1"),
            say(66.0, "setup_doubtful", PREFILL, "warning", detail="a name that two have"),
        ]
    )  # fmt: skip
    said = [x.what for x in lines]
    assert said[0] == f"The event loop of {DECODE} was away: 2 times, at most 22.0 s"
    assert lines[0].example == "until 2027-01-15 08:00:50.000000Z; open: 0 leases, 5 pulls"
    assert said[1].startswith("Blocks came back late: ")
    assert "(1 request, 7 blocks, held for 30.0 s at most)" in said[1]
    assert lines[1].remedy
    assert said[2] == "2 requests failed: timeout, 2027-01-15 08:01:02.000000Z to 2027-01-15 08:01:03.000000Z"
    assert lines[2].example == "still queued behind others"
    assert said[3:] == [
        "1 request failed: peer_lost, 2027-01-15 08:01:04.000000Z",
        "1 error internal_error",
        "1 warning setup_doubtful",
    ]
    assert [x.is_bad for x in lines] == [True] * 5 + [False]
    assert "Look here: 5 things went wrong." in page


def test_an_attempt_that_another_one_followed_is_no_failure() -> None:
    retried = [
        ended(2.0, "peer_lost", request_id="d", attempt=1, prefill_request_id="p", sequence=7),
        ended(3.0, request_id="d", attempt=2, prefill_request_id="p", sequence=7),
    ]
    assert screen([*well(), *retried])[0] == []


def test_what_could_not_be_judged_is_said_and_is_no_fault() -> None:
    lent = say(1.0, "lease_lent", PREFILL, request_id="x", sequence=9, blocks=1, lease_s=30.0)
    over = say(2.0, "lease_ended", PREFILL, request_id="x", sequence=9, blocks=1, seconds=1.0, cause="released",
               readers={"other/tp0@bbbbbbbb": "complete"})  # fmt: skip
    lines, page = screen([*well(), lent, over])
    assert [x.what for x in lines] == ["There is no log of other/tp0@bbbbbbbb"]
    assert not lines[0].is_bad
    assert "<p>All well.</p>" in page
    lines, _ = screen([ended(0.0, "timeout")])
    assert "logged warnings and errors alone" in lines[-1].what


def test_a_process_that_died_is_told_before_all_that_came_of_it() -> None:
    died = [x for x in well() if not (x.rank == PREFILL and x.event == "engine_stopped")]
    lost = say(30.0, "peer_changed", DECODE, "warning", peer=PREFILL, peer_incarnation="aaaaaaaa" * 4, state="gone",
               cause="peer_lost", detail="its process has ended")  # fmt: skip
    lines, _ = screen([*died, lost, ended(31.0, "peer_lost")])
    assert lines[0].what.startswith(f"{PREFILL} died")
    assert "1 request failed: peer_lost" in lines[1].what


def test_a_red_request_has_its_cause_on_the_page(tmp_path: Path) -> None:
    joined = join(read_logs([service().write(tmp_path)]))
    axis, leaks = make_axis(joined), find_leaks(joined)
    requests = page_data(make(axis, stories(axis), ground(axis), ["x"], [], leaks))
    texts = requests["texts"]
    [late] = [x for x in requests["requests"] if x[0] == "chat-20"]
    assert late[3] == 1
    assert leaks[0].remedy in texts[late[10]]
    assert all(texts[x[10]] == "" for x in requests["requests"] if x[0] not in {leak.request_id for leak in leaks})


def test_texts_of_logs_never_become_markup() -> None:
    evil = "</script><img src=x onerror=alert(1)><b>@@title@@\x1b[31m\u202e"
    rank = f"{evil}/tp0@dddddddd"
    page = screen(
        [
            say(0.0, "engine_started", rank, host=evil, version=evil),
            say(1.0, "loop_was_away", rank, "warning", seconds=math.pi),
            ended(2.0, evil, request_id=evil, detail=evil, failed_in=evil),
            say(3.0, "lease_ended", PREFILL, "warning", request_id=evil, sequence=1, cause="expired", owed=[evil]),
            say(5.0, "of_later", rank, "error", cause=evil, error=evil),
        ]
    )[1]
    assert "img" not in Balanced(page).tags
    assert "\x1b" not in page
    assert "\u202e" not in page
