"""Findings: the mistakes, the worst first, with the remedy, and no text that becomes markup on the page."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from asynckv.account.values import Account, Facts
from asynckv.tools.diagnose.ask import Answer, Trouble
from asynckv.tools.diagnose.axis import Axis
from asynckv.tools.diagnose.causes import HEADING
from asynckv.tools.diagnose.findings import Findings, find
from asynckv.tools.diagnose.join import join
from asynckv.tools.diagnose.leaks_live import records_of, tell
from asynckv.tools.diagnose.leaks_request import find_requests
from asynckv.tools.diagnose.records import Logs, Record, read_logs
from asynckv.tools.diagnose.timeline_model import stories
from asynckv.tools.diagnose.why_page import make
from tests.test_leaks import seen_in
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


def screen(records: list[Record]) -> tuple[Findings, str]:
    logs = Logs(sorted(records, key=lambda x: x.at))
    seen = seen_in(join(logs), logs)
    found = find(seen)
    return found, make(seen, found, ["test.log"], stories(seen.axis))


class Balanced(HTMLParser):
    """A page with tags that have to be closed in order."""

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
    found, page = screen(well())
    assert (found.wrong, found.limits, found.notes) == ([], [], [])
    assert "<p>All is well.</p>" in page


def test_what_is_wrong_comes_worst_first_with_what_to_do() -> None:
    found, page = screen(
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
    late, timeout, lost, away, error = found.wrong
    assert late.what.startswith("1 request late: ")
    assert late.what.endswith(", 7 blocks, held for 30.0 s")
    assert (late.requests, late.blocks, bool(late.remedy)) == (("x",), 7, True)
    said = f"pulls of {DECODE} from prefill failed (2 timeout): not known (still queued behind others)"
    assert (timeout.code, timeout.what) == ("not_known", said)
    assert timeout.evidence == "2 pulls, 2027-01-15 08:01:02.000000Z to 2027-01-15 08:01:03.000000Z"
    said = f"pulls of {DECODE} from prefill failed (1 peer_lost): the connection to the prefill rank broke"
    assert (lost.code, lost.what) == ("connection_lost", said)
    assert away.what == f"the event loop of {DECODE} was away: 2 times, at most 22.0 s"
    assert away.evidence == "until 2027-01-15 08:00:50.000000Z; open: 0 leases, 5 pulls"
    assert error.what == f"1 error internal_error on {PREFILL}"
    assert [(x.code, x.evidence) for x in found.notes] == [("setup_doubtful", "a name that two have")]
    assert "5 things went wrong, the worst first." in page


def test_what_a_decode_engine_refused_by_itself_did_arrive() -> None:
    refused = say(31.0, "pull_refused", DECODE, "warning", request_id="d-x", prefill_request_id="x", peer="prefill",
                  sequence=900, cause="PlanRefused", detail="block 999 is not in 0 ... 31")  # fmt: skip
    lent = say(30.0, "lease_lent", PREFILL, request_id="x", sequence=900, blocks=7, lease_s=30.0)
    over = say(60.0, "lease_ended", PREFILL, "warning", request_id="x", sequence=900, blocks=7, seconds=30.0,
               cause="expired", owed=["*"])  # fmt: skip
    (finding,) = screen([*well(), refused, lent, over])[0].wrong
    assert finding.what == f"{DECODE} refused 1 pull by itself, and began nothing: PlanRefused"
    assert (finding.evidence, finding.requests, finding.blocks) == ("block 999 is not in 0 ... 31", ("x",), 7)
    for records in ([*well(), refused, lent, over], [*well(), refused]):  # its id on either side finds it
        service = join(records)
        [request] = find_requests(service, "d-x")
        assert find_requests(service, "x") == [request]
        [story] = stories(Axis(service), [[request]])
        assert (story.pull, story.others) == ("refused", ("d-x",))
        assert "refused at once: PlanRefused: block 999 is not in 0 ... 31" in [x.text for x in story.marks]


def test_a_refusal_that_a_success_followed_is_over_and_two_requests_of_one_id_are_two() -> None:
    refused = say(31.0, "pull_refused", DECODE, "warning", request_id="d-x", prefill_request_id="x", peer="prefill",
                  sequence=900, cause="Overloaded", detail="ask again later")  # fmt: skip
    done = ended(40.0, request_id="d-x", prefill_request_id="x", sequence=900)
    assert screen([*well(), refused, done])[0].wrong == []
    over = say(60.0, "lease_ended", PREFILL, "warning", request_id="y", sequence=1, blocks=7, seconds=30.0,
               cause="expired", owed=["*"])  # fmt: skip
    failed = ended(70.0, "read_failed", prefill_request_id="y", sequence=2)
    assert [x.code for x in screen([*well(), over, failed])[0].wrong] == ["never_heard_of", "connection_lost"]


def test_a_death_takes_over_only_what_hangs_on_it() -> None:
    """A prefill rank died long after a lease had expired there, for a reader with a loop that was away."""
    died = [x for x in well() if not (x.rank == PREFILL and x.event == "engine_stopped")]
    claims = {DECODE: {"pull_id": "dddddddddddddddd-900", "claimed_s": 0.1, "heard_s": 0.2}}
    early = say(35.0, "lease_ended", PREFILL, "warning", request_id="x", sequence=900, blocks=7, seconds=30.0,
                cause="expired", owed=[DECODE], claims=claims)  # fmt: skip
    pull = ended(36.0, "lease_lost", prefill_request_id="x", pull_id="dddddddddddddddd-900", sequence=900,
                 seconds=30.9, peer_ranks=[PREFILL])  # fmt: skip
    away = say(36.0, "loop_was_away", DECODE, "warning", seconds=30.5, leases=0, pulls=1)
    lost = say(60.0, "peer_changed", DECODE, "warning", peer=PREFILL, peer_incarnation="aaaaaaaa" * 4, state="gone",
               cause="peer_lost", detail="its process has ended")  # fmt: skip
    late, gone = screen([*died, early, pull, away, lost])[0].wrong
    assert (gone.code, gone.requests) == ("died", ())
    assert (late.code, late.requests) == ("decode_loop_away", ("x",))


def test_an_attempt_that_another_one_followed_is_no_failure() -> None:
    retried = [
        ended(2.0, "peer_lost", request_id="d", attempt=1, prefill_request_id="p", sequence=7),
        ended(3.0, request_id="d", attempt=2, prefill_request_id="p", sequence=7),
    ]
    assert screen([*well(), *retried])[0].wrong == []


def test_what_could_not_be_judged_is_said_and_is_no_fault() -> None:
    lent = say(1.0, "lease_lent", PREFILL, request_id="x", sequence=9, blocks=1, lease_s=30.0)
    over = say(2.0, "lease_ended", PREFILL, request_id="x", sequence=9, blocks=1, seconds=1.0, cause="released",
               readers={"other/tp0@bbbbbbbb": "complete"})  # fmt: skip
    found, page = screen([*well(), lent, over])
    assert found.wrong == []
    assert [x.what for x in found.limits] == ["there is no log of other/tp0@bbbbbbbb, which others name"]
    assert "<p>Nothing wrong was found, but not all could be judged.</p>" in page
    found, _ = screen([ended(0.0, "timeout")])
    assert "logged warnings and errors alone" in found.limits[-1].what


def test_a_process_that_died_is_told_with_all_that_came_of_it() -> None:
    died = [x for x in well() if not (x.rank == PREFILL and x.event == "engine_stopped")]
    lost = say(30.0, "peer_changed", DECODE, "warning", peer=PREFILL, peer_incarnation="aaaaaaaa" * 4, state="gone",
               cause="peer_lost", detail="its process has ended")  # fmt: skip
    [gone] = screen([*died, lost, ended(31.0, "peer_lost", peer_ranks=[PREFILL], prefill_request_id="x")])[0].wrong
    assert (gone.code, gone.what.startswith(f"{PREFILL} died")) == ("died", True)
    assert gone.requests == ("x",)
    assert gone.evidence.startswith(f"pulls of {DECODE} from {PREFILL} failed (1 peer_lost): ")


def start_of(rank: str, at: float, start: str, **more: Any) -> Record:
    return say(at, "engine_started", f"{rank}@{start * 8}", host="h", address=f"tcp://h:{start}", lease_s=30.0, **more)


def signs(rank: str, start: str, *times: float) -> list[Record]:
    return [say(at, "engine_alive", f"{rank}@{start * 8}") for at in times]


def test_a_crash_loop_is_one_finding_that_says_how_often_and_from_when_to_when() -> None:
    loop = [start_of("decode/tp0", 100.0 + 40 * i, f"{i}", pid=100 + i) for i in range(6)]
    goes_on = signs("decode/tp0", "5", 315.0, 330.0, 345.0)
    failed = [
        ended(102.0 + 40 * i, "peer_lost", peer_ranks=[f"decode/tp0@{f'{i}' * 8}"], peer="decode") for i in range(5)
    ]
    [gone] = screen([*well(), *loop, *failed, *goes_on])[0].wrong
    said = "decode/tp0 died 5 times, from 08:01:40.000 to 08:04:20.000; decode/tp0@44444444 died: "
    assert (gone.heading, gone.code, gone.what[: len(said)]) == (HEADING.GONE, "died", said)
    assert len(gone.requests) == 5
    bugs = [say(101.0 + 40 * i, "internal_error", f"decode/tp0@{f'{i}' * 8}", "error", error="x") for i in range(5)]
    gone, bug = screen([*well(), *loop, *bugs, *goes_on])[0].wrong
    assert bug.what == "5 errors internal_error on decode/tp0"
    [gone] = screen([*well(), *loop[-2:], *goes_on])[0].wrong
    assert gone.what.startswith("decode/tp0@44444444 died: ")


def test_two_engines_with_one_id_are_two() -> None:
    """Neither is dead because the other one started later, whatever their logs have said by then."""
    one, other = start_of("decode/tp0", 100.0, "1", pid=7), start_of("decode/tp0", 110.0, "2", pid=8)
    for more in (
        [],
        signs("decode/tp0", "1", 115.0),
        [*signs("decode/tp0", "1", 115.0), *signs("decode/tp0", "2", 125.0)],
    ):
        assert screen([*well(), one, other, *more])[0].wrong == []
    # A restart takes its pid or its port; and a living process writes a line every half lease.
    port = start_of("decode/tp0", 110.0, "2", pid=8)
    port.said = {**port.fields, "address": "tcp://h:1"}
    same = {"pid_namespace": 1, "boot_id": "boot"}
    first, again = start_of("decode/tp0", 100.0, "1", pid=1, **same), start_of("decode/tp0", 110.0, "2", pid=1, **same)
    apart = [
        start_of("decode/tp0", at, f"{i}", pid=1, **same | {"pid_namespace": i}) for i, at in ((1, 100.0), (2, 110.0))
    ]
    for records, is_dead in (
        ([one, port], True),
        ([first, again], True),
        (apart, False),
        ([one, other, *signs("decode/tp0", "2", 121.0)], True),
        ([one, other, *signs("decode/tp0", "2", 119.0)], False),
        ([one, *signs("decode/tp0", "1", 111.0), other, *signs("decode/tp0", "2", 121.0)], False),
    ):
        found = screen([*well(), *records])[0].wrong
        assert [x.code for x in found] == ["died"] * is_dead
    # They harm each other where both take one request.
    said = {"cause": "wrong_cohort", "prefill_request_id": "x", "sequence": 9, "peer": "prefill", "seconds": 0.1}
    both = [
        say(117.0, "pull_ended", f"decode/tp0@{x * 8}", "warning", request_id="d", pull_id=f"{x * 16}-1", **said)
        for x in "12"
    ]
    found = screen([*well(), one, other, *both])[0].wrong
    assert [x.code for x in found if x.code == "one_id_twice"] == ["one_id_twice"]


@pytest.mark.parametrize(("made_at", "is_dead"), [(50.0, False), (math.nan, False), (150.0, True)])
def test_a_socket_that_is_younger_than_the_engine_that_answers_is_of_another_one(made_at: float, is_dead: bool) -> None:
    """It is no socket that an earlier start of the rank left."""
    lives = Account(rank="decode/tp0@11111111", incarnation="1" * 32, facts=Facts(uptime_s=100.0))
    answers = [
        Answer(address="/a.sock", account=lives, at=200.0),
        Answer(address="/b.sock", account=Account(rank="decode/tp0@22222222"), error="ended", trouble=Trouble.GONE,
               at=200.0, made_at=made_at),
    ]  # fmt: skip
    service = join(list(records_of(answers, 200.0)))
    tell(service, answers, 200.0)
    found = find(seen_in(service, Logs(), answers))
    assert [x.code for x in found.wrong] == ["no_answer"] * is_dead


def test_times_have_a_date_if_the_logs_are_not_of_one_day() -> None:
    died = [x for x in well() if not (x.rank == PREFILL and x.event == "engine_stopped")]
    lost = say(30.0, "peer_changed", DECODE, "warning", peer=PREFILL, peer_incarnation="aaaaaaaa" * 4, state="gone",
               cause="peer_lost", detail="its process has ended")  # fmt: skip
    [gone] = screen([*died, lost])[0].wrong
    assert "its log ends at 08:00:00.000 without" in gone.what
    for day in (-86400.0, 86400.0, 57600.0):
        [gone] = screen([*died, lost, say(day, "engine_stopped", "other/tp0@cccccccc")])[0].wrong
        assert "its log ends at 2027-01-15 08:00:00.000 without" in gone.what


def away(at: float, seconds: float, rank: str = DECODE, **more: Any) -> Record:
    held = {"leases": 0, "pulls": 1} | more
    return say(at, "loop_was_away", rank, "warning", seconds=seconds, **held)


def slow(at: float, seconds: float = 3.0) -> Record:
    """A pull that failed for a loop that was away until just before."""
    return ended(at, "lease_lost", prefill_request_id="x", seconds=seconds, peer_ranks=[PREFILL])


def test_a_pause_without_a_late_request_is_no_finding() -> None:
    found, _ = screen([*well(), away(40.0, 1.0), away(50.0, 4.0), away(55.0, 30.0, pulls=0)])
    assert found.wrong == found.limits == []
    [also] = found.notes
    assert also.what == "event loops of 1 process were away: 3 times, at most 30.0 s, and nothing was late by it"
    found, _ = screen([*well(), away(40.0, 1.0), slow(40.1)])
    [late] = found.wrong
    assert (late.heading, late.code) == (HEADING.STOPPED, "decode_loop_away")
    assert "nothing was late by it" not in str(found)
    [long] = screen([*well(), away(40.0, 12.0)])[0].wrong
    assert (long.heading, long.code) == (HEADING.STOPPED, "loop_was_away")


def test_pauses_of_all_processes_at_once_are_their_machine() -> None:
    apart = [
        replace(x, said={**x.fields, "pid": i}) if x.event == "engine_started" else x for i, x in enumerate(well(), 1)
    ]
    both = [away(40.0, 3.0), away(40.2, 2.9, PREFILL)]
    found, _ = screen([*apart, *both])
    assert found.wrong == []
    assert "stood still at once, so their machine had no processor time, or was suspended" in found.notes[0].what
    [late] = screen([*apart, *both, slow(40.5)])[0].wrong
    assert (late.code, late.requests) == ("no_processor_time", ("x",))
    assert late.what.startswith("2 processes of h stood still at once")
    # One of them was not away, they were away one after the other, or they are one process.
    for records in ([*apart, both[0]], [*apart, both[0], away(36.9, 2.0, PREFILL)], [*well(), *both]):
        [late] = screen([*records, slow(40.5)])[0].wrong
        assert late.code in ("decode_loop_away", "prefill_loop_away")


@pytest.mark.parametrize(
    ("waited", "says", "remedy"),
    [
        ({"waited_s": 2.8}, "had no processor time: 1 time", "cores"),
        ({"waited_s": 2.8, "throttled_s": 2.7}, "because a CPU limit of their cgroup stopped them: 1 time", "cpu.max"),
        ({"waited_s": 2.8, "throttled_s": 0.2}, "had no processor time: 1 time", "cores"),
    ],
)
def test_a_process_without_a_processor_is_told_so(waited: dict[str, float], says: str, remedy: str) -> None:
    [late] = screen([*well(), away(40.0, 3.0, DECODE, **waited), slow(40.5)])[0].wrong
    assert late.code == "no_processor_time"
    assert says in late.what
    assert remedy in late.remedy
    [late] = screen([*well(), away(40.0, 3.0, waited_s=0.3), slow(40.5)])[0].wrong
    assert late.code == "decode_loop_away"


def test_a_red_request_has_its_cause_on_the_page(tmp_path: Path) -> None:
    seen = seen_in(join(read_logs([service().write(tmp_path)])), Logs())
    requests = page_data(make(seen, Findings(late=seen.late), ["x"], stories(seen.axis)))["requests"]
    [late] = [x for x in requests if x["request_id"] == "chat-20"]
    assert late["is_bad"]
    assert seen.late[0].remedy in late["cause"]
    assert {x["request_id"] for x in requests if "cause" in x} == {leak.request_id for leak in seen.late}


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
