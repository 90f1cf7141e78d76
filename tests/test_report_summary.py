"""What a report says of a service: numbers against truth that was worked out by hand, and totals that add up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asynckv.tools.diagnose.records import Logs, Record
from asynckv.tools.diagnose.report_page import make
from asynckv.tools.diagnose.report_text import unseen_text, verdict
from asynckv.tools.diagnose.summary import align, summarise
from asynckv.tools.diagnose.summary_model import Summary
from asynckv.tools.diagnose.summary_time import Windows, quantiles

DECODE, PREFILL = "decode/tp0@dddddddd", "prefill/tp0@aaaaaaaa"
START = 1_800_000_000.0
_ids = itertools.count()


def say(at: float, event: str, rank: str = DECODE, level: str = "info", **fields: Any) -> Record:
    """One event, so many seconds after the start."""
    base, _, start = rank.partition("@")
    return Record(START + at, event, level, base.split("/")[0], rank, start * 4, fields, f"test.log:{next(_ids)}")


def ended(at: float, cause: str = "complete", rank: str = DECODE, **fields: Any) -> Record:
    """A pull that ended."""
    number = next(_ids)
    said: dict[str, Any] = {
        "cause": cause,
        "request_id": f"d-{number}",
        "prefill_request_id": f"p-{number}",
        "pull_id": f"dddddddddddddddd-{number}",
        "sequence": number,
        "peer": "prefill",
        "read_ranks": [PREFILL],
        "seconds": 0.01,
        "bytes": 1000 if cause == "complete" else 0,
        "phases": {"handshake": 0.0, "queue": 0.004, "plan": 0.0, "read": 0.006, "confirm": 0.0, "release": 0.001},
    }
    good = cause in ("complete", "cancelled", "discharged")
    return say(at, "pull_ended", rank, "info" if good else "warning", **said | fields)


def summed(*records: Record) -> Summary:
    return summarise(Logs(sorted(records, key=lambda x: x.at)))


def overall(summary: Summary, series: Iterable[float]) -> float:
    """A rate's total."""
    return math.fsum(series) * summary.window_s


# -- time ----------------------------------------------------------------------------------------------


spans = st.tuples(st.floats(0, 1e5), st.floats(0, 1e5)).map(sorted)


@settings(max_examples=50)
@given(spans, spans, st.integers(0, 10_000))
def test_a_span_is_split_among_windows_without_loss(whole: list[float], part: list[float], values: int) -> None:
    windows = Windows(whole[0], whole[1], values)
    assert 1 <= windows.count <= 102
    assert windows.first <= whole[0]
    assert windows.first + windows.count * windows.seconds > whole[1] - 1e-6
    start, end = (min(max(x, whole[0]), whole[1]) for x in part)
    assert math.fsum(s for _, s in windows.parts(start, end)) == pytest.approx(end - start, abs=1e-6)
    spread = windows.zeros()
    windows.spread(spread, start, end, 7.0)
    assert math.fsum(spread) == pytest.approx(7.0)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), min_size=1), st.floats(0.001, 1))
def test_quantiles_of_weighted_values_are_those_of_repeated_ones(rows: list[tuple[float, int]], q: float) -> None:
    repeated = sorted(value for value, weight in rows for _ in range(weight))
    wanted = repeated[math.ceil(q * len(repeated) * (1 - 1e-12)) - 1]
    assert quantiles([(v, float(w)) for v, w in rows], q) == [wanted]


def test_quantiles_come_in_the_order_asked_for() -> None:
    assert quantiles([(float(i), 1.0) for i in range(1, 11)], 1.0, 0.5, 0.1) == [10.0, 5.0, 1.0]
    assert quantiles([], 0.5, 0.9) == [0.0, 0.0]


# -- pulls ----------------------------------------------------------------------------------------------


def test_pulls_are_counted_by_hand() -> None:
    found = summed(
        ended(0.0, seconds=0.010),
        ended(1.0, seconds=0.020),
        ended(2.0, seconds=0.030, bytes=4000),
        ended(3.0, "cancelled"),
        ended(4.0, "discharged"),
        ended(5.0, "timeout", failed_in="queue", detail="not lent"),
        ended(6.0, "peer_lost", failed_in="read"),
        ended(7.0, "peer_lost", failed_in="read"),
    )
    pulls = found.pulls
    assert (pulls.ended, pulls.logged, pulls.complete, pulls.cancelled, pulls.discharged) == (8, 8, 3, 1, 1)
    assert (pulls.failed, pulls.retried) == (3, 0)
    assert pulls.num_bytes == pytest.approx(6000)
    assert pulls.latency_s is not None
    assert (pulls.latency_s.p50, pulls.latency_s.max) == (0.020, 0.030)
    assert pulls.latency_s.mean == pytest.approx(0.020)
    assert pulls.slowest["seconds"] == 0.030
    assert pulls.phases_s["queue"].p50 == 0.004
    assert overall(found, pulls.failed_per_s) == pytest.approx(3)
    assert [(x.side, x.cause, x.count, x.failed_in) for x in found.failures] == [
        ("pull", "peer_lost", 2, {"read": 2}),
        ("pull", "timeout", 1, {"queue": 1}),
    ]
    assert found.failures[1].detail == "not lent"


def test_a_logged_success_stands_for_those_that_were_left_out_near_it() -> None:
    found = summed(
        ended(0.0, seconds=0.010),
        # Between the two 9 more ended.
        ended(10.0, seconds=0.030, bytes=3000, successes_not_logged=9),
        ended(10.0, "timeout"),
    )
    pulls = found.pulls
    assert (pulls.logged, pulls.failed) == (3, 1)
    assert pulls.ended == pytest.approx(12)
    assert pulls.complete == pytest.approx(11)
    assert overall(found, pulls.ended_per_s) == pytest.approx(12)
    # Half of them ended while the first was the nearest that is known, half while the second was.
    assert pulls.latency_s is not None
    assert pulls.latency_s.mean == pytest.approx(0.020, rel=0.05)
    # In windows without any the mean of all is taken.
    assert pulls.num_bytes == pytest.approx(11 * 2000, rel=0.1)
    middle = found.pulls.ended_per_s[len(found.windows) // 2]
    assert middle == pytest.approx(0.9, rel=0.1)


def test_a_process_that_stops_in_order_says_how_many_there_were() -> None:
    counters = {"pulls.started": 99, "pulls.complete": 60, "pulls.cancelled": 4, "pulls.timeout": 1}
    counters |= {"pulls.overloaded": 7, "leases.lent": 30, "leases.released": 29, "leases.expired": 1}
    stopped = say(20.0, "engine_stopped", counters=counters)
    rows = [
        ended(1.0),
        ended(10.0, successes_not_logged=40),
        ended(11.0, "timeout"),
        say(12.0, "lease_lent", request_id="p", sequence=1, blocks=2),
        say(19.0, "lease_ended", level="warning", request_id="q", sequence=2, blocks=2, seconds=5.0, cause="expired"),
    ]
    found = summed(say(0.0, "engine_started"), *rows, stopped)
    assert [found.pulls.ended, found.leases.lent] == pytest.approx([65, 30])
    assert (found.pulls.complete, found.pulls.cancelled, found.pulls.failed) == (60, 4, 1)
    assert overall(found, found.pulls.ended_per_s) == pytest.approx(65)
    assert [found.engines[0].pulls, found.engines[0].leases] == pytest.approx([65, 30])
    # Without its start they may be of more than these logs.
    found = summed(*rows, stopped)
    assert found.pulls.ended + found.leases.lent == pytest.approx(2 + 40 + 1 + 1)


def test_what_is_slow_is_no_sample_of_what_is_not() -> None:
    slow = dict(ended(1.0, seconds=9.0, successes_not_logged=98).fields)
    found = summed(ended(0.0), say(1.0, "pull_ended", level="warning", **slow))
    assert found.pulls.complete == pytest.approx(100)
    assert found.pulls.latency_s is not None
    assert found.pulls.latency_s.p90 == 0.01
    assert found.pulls.latency_s.max == 9.0


def test_an_attempt_that_is_tried_again_is_no_failure() -> None:
    first = ended(0.0, "peer_lost", request_id="d", pull_id="x-1")
    retried = say(0.1, "pull_retried", cause="peer_lost", request_id="d", pull_id="x-1", attempt=2)
    second = ended(1.0, "peer_lost", request_id="d", pull_id="x-2", attempt=2)
    third = ended(2.0, request_id="d", pull_id="x-3", attempt=3)
    for records in ([first, retried, second, third], [first, second, third]):
        found = summed(*records)
        assert (found.pulls.ended, found.pulls.retried, found.pulls.failed, found.pulls.complete) == (3, 2, 0, 1)
        assert [(x.side, x.cause, x.count) for x in found.failures] == [("attempt", "peer_lost", 2)]


def test_a_failure_in_short_is_told_by_the_one_it_names() -> None:
    first = ended(0.0, "peer_lost", failed_in="read", detail="gone", pull_id="x-1")
    short = say(
        0.1, "pull_ended", level="warning", cause="peer_lost", same_as="x-1", pull_id="x-2", request_id="d", seconds=1.0
    )
    (failure,) = summed(first, short).failures
    assert (failure.count, failure.failed_in, failure.detail) == (2, {"read": 2}, "gone")
    (pair,) = summed(first, short).peers
    assert (pair.peer, pair.failures) == (PREFILL, {"peer_lost": 2})


causes = st.sampled_from(["complete", "complete", "cancelled", "discharged", "timeout", "peer_lost", "strange"])
lines = st.lists(
    st.tuples(st.floats(0, 1000), causes, st.sampled_from([DECODE, "decode/tp1@eeeeeeee"]), st.integers(0, 50)),
    min_size=1,
    max_size=60,
)


@settings(max_examples=30)
@given(lines)
def test_totals_add_up(rows: list[tuple[float, str, str, int]]) -> None:
    records = [
        ended(at, cause, rank, **({"successes_not_logged": n} if n else {}), peer_ranks=[PREFILL])
        for at, cause, rank, n in rows
    ]
    found, left_out = summed(*records), sum(n for *_, n in rows)
    pulls = found.pulls
    assert pulls.logged == len(rows)
    assert pulls.ended == pytest.approx(len(rows) + left_out)
    assert overall(found, pulls.ended_per_s) == pytest.approx(pulls.ended)
    assert overall(found, pulls.bytes_per_s) == pytest.approx(pulls.num_bytes)
    failed = sum(cause in ("timeout", "peer_lost", "strange") for _, cause, _, _ in rows)
    assert pulls.failed == sum(x.count for x in found.failures) == failed
    assert all(sum(x.counts) == x.count for x in found.failures)
    assert sum(sum(x.failures.values()) for x in found.peers) == failed
    sampled = {rank for _, cause, rank, _ in rows if cause in ("complete", "cancelled", "discharged")}
    # Where a process logged no success at all nobody knows what those were that it left out.
    of_unknown = sum(n for _, _, rank, n in rows if rank not in sampled)
    assert pulls.complete + pulls.cancelled + pulls.discharged + failed == pytest.approx(pulls.ended - of_unknown)
    assert sum(x.pulls for x in found.peers) == pytest.approx(pulls.ended - of_unknown)
    for p50, p99, most in zip(pulls.p50_s, pulls.p99_s, pulls.max_s, strict=True):
        assert (p50 is None) == (p99 is None) == (most is None)
        assert p50 is None or (p99 is not None and most is not None and p50 <= p99 <= most)


# -- leases and blocks -----------------------------------------------------------------------------------------


def lent(at: float, number: int, blocks: int, **fields: Any) -> Record:
    return say(at, "lease_lent", PREFILL, request_id=f"p-{number}", sequence=number, blocks=blocks, **fields)


def lease_ended(at: float, number: int, blocks: int, seconds: float, cause: str = "released", **fields: Any) -> Record:
    said = {"request_id": f"p-{number}", "sequence": number, "blocks": blocks, "seconds": seconds, "cause": cause}
    return say(at, "lease_ended", PREFILL, "info" if cause == "released" else "warning", **said | fields)


def test_blocks_lent_are_integrated_by_hand() -> None:
    found = summed(
        say(0.0, "engine_started", PREFILL, host="h1", pid=7, version="0.2.0"),
        lent(10.0, 1, 100),
        lease_ended(30.0, 1, 100, 20.0),
        # Not among the samples, but it failed.
        lease_ended(60.0, 2, 10, 30.0, "expired", owed=["*"]),
        # Its end is not in the logs.
        lent(90.0, 3, 5),
        say(100.0, "engine_stopped", PREFILL),
    )
    leases = found.leases
    assert (leases.lent, leases.logged, leases.ended_badly, leases.open) == (3, 3, 1, 1)
    assert overall(found, leases.blocks) == pytest.approx(100 * 20 + 10 * 30 + 5 * 10)
    assert overall(found, leases.blocks_badly) == pytest.approx(10 * 30)
    assert leases.blocks == leases.blocks_logged
    assert [(x.side, x.cause, x.count) for x in found.failures] == [("lease", "expired", 1)]
    (engine,) = found.engines
    assert (engine.host, engine.pid, engine.version) == ("h1", 7, "0.2.0")
    assert (engine.started, engine.stopped) == (START, START + 100)
    assert found.late.requests == 1


def test_blocks_of_leases_that_were_left_out_are_estimated_and_bounded_from_below() -> None:
    found = summed(lent(0.0, 1, 10), lent(10.0, 2, 10, successes_not_logged=8), lease_ended(20.0, 1, 10, 20.0))
    assert (found.leases.lent, found.leases.logged, found.leases.open) == (10, 2, 1)
    assert overall(found, found.leases.blocks_logged) == pytest.approx(10 * 20 + 10 * 10)
    # Four of the eight are taken to be like the first, four like the second.
    assert overall(found, found.leases.blocks) == pytest.approx(5 * (10 * 20 + 10 * 10), rel=0.1)


def test_quarantine_lasts_until_its_blocks_are_back_or_for_ever() -> None:
    found = summed(
        ended(0.0, "timeout", pull_id="x-1", held_transfers=2),
        say(20.0, "blocks_returned", level="warning", pull_id="x-1", seconds_after_failure=20.0),
        ended(30.0, "timeout", pull_id="x-2", held_transfers=1),
        say(40.0, "blocks_retired", level="error", pull_id="x-2", seconds_after_failure=10.0),
        ended(50.0, "timeout", pull_id="x-3", held_transfers=1),
        say(100.0, "engine_stopped"),
    )
    quarantine = found.quarantine
    assert (quarantine.returned, quarantine.retired, quarantine.open) == (1, 1, 1)
    assert quarantine.longest_s == 50.0
    assert overall(found, quarantine.pulls) == pytest.approx(20 + 70 + 50)


# -- peers, loops, warnings ------------------------------------------------------------------------------------


def test_a_peer_has_its_states_pulls_and_failures() -> None:
    def changed(at: float, state: str) -> Record:
        return say(at, "peer_changed", peer=PREFILL, state=state)

    found = summed(
        changed(0.0, "connecting"),
        changed(1.0, "ready"),
        ended(5.0, bytes=600, read_ranks=[PREFILL, "prefill/tp1@bbbbbbbb"]),
        changed(10.0, "suspect"),
        changed(12.0, "ready"),
        ended(13.0, "peer_lost"),
        changed(14.0, "gone"),
        say(20.0, "engine_stopped"),
    )
    first, second = found.peers
    assert (first.peer, first.reader, first.pulls, first.num_bytes) == (PREFILL, DECODE, 2, 300)
    assert first.failures == {"peer_lost": 1}
    spans = [(state, since - START, until - START) for state, since, until in first.states]
    assert spans == [("connecting", 0, 1), ("ready", 1, 10), ("suspect", 10, 12), ("ready", 12, 14), ("gone", 14, 20)]
    assert first.not_ready_s == 8.0
    assert first.last_good == START + 12
    assert (second.peer, second.pulls, second.num_bytes) == ("prefill/tp1@bbbbbbbb", 1, 300)


def test_what_a_process_does_not_say_is_known_from_the_prefill_side() -> None:
    """One whose log is missing, one that was killed before it wrote, and one whose successes are sampled."""
    killed, missing, alive = (f"decode/tp{i}@{x * 8}" for i, x in enumerate("bcd", 1))

    def lease(number: int, at: float, reader: str, **fields: Any) -> Record:
        return lease_ended(at, number, 1, 0.5, **{"readers": {reader: "complete"}, **fields})

    summary = summed(
        say(0.0, "peer_changed", killed, peer=PREFILL, state="loading"),
        say(0.0, "engine_started", alive),
        lease(1, 1.0, killed),
        lease(2, 2.0, killed),
        lease(3, 3.0, missing),
        lease(4, 3.0, missing, cause="expired", readers={}, owed=[missing]),
        lease(5, 3.0, alive),
        say(9.0, "peer_changed", alive, peer=PREFILL, state="ready"),
    )
    assert summary.missing == [missing]
    ends = {x.rank: (x.ends, x.released, x.owed) for x in summary.unseen}
    assert ends == {killed: (START, {"complete": 2}, 0), missing: (None, {"complete": 1}, 1)}
    pairs = {x.reader: x for x in summary.peers}
    assert (pairs[killed].released, pairs[killed].last_good, pairs[killed].pulls) == ({"complete": 2}, START + 2, 0)
    said, _ = verdict(summary)
    assert "Prefill sides heard of 3 pulls that ended (3 complete), at least: by 2 processes whose logs" in " ".join(
        said
    )
    assert "one request that it never released" in unseen_text(summary.unseen[1])
    assert "no pull" not in " ".join(said).lower()


def test_loops_held_requests_and_warnings_are_listed() -> None:
    oldest = [{"request_id": "p-1", "lent_s": 10.0}]
    found = summed(
        say(5.0, "loop_was_away", level="warning", seconds=3.0, leases=2, pulls=7, not_logged=2, not_logged_s=4.0),
        say(6.0, "lease_held", PREFILL, "warning", state="lent", waits="for a", requests=3, oldest=oldest),
        say(16.0, "lease_held", PREFILL, "warning", state="lent", waits="for a", requests=2, oldest=[{"lent_s": 20.0}]),
        say(17.0, "refused", PREFILL, "warning", cause="unknown_key", who="10.0.0.9"),
        say(18.0, "internal_error", level="error", error="KeyError()"),
    )
    (away,) = found.away
    assert (away.since, away.until, away.seconds, away.not_logged) == (START + 2, START + 5, 3.0, 2)
    (held,) = found.held
    assert (held.side, held.warnings, held.most, held.oldest_s, held.example) == ("lease", 2, 3, 20.0, "p-1")
    assert [(x.event, x.level, x.count) for x in found.warned] == [
        ("internal_error", "error", 1),
        ("refused", "warning", 1),
    ]
    assert "unknown_key" in found.warned[1].example
    assert {x.rank: (x.warnings, x.errors) for x in found.engines} == {DECODE: (1, 1), PREFILL: (3, 0)}


def test_tiers_are_summed_up_by_rank_and_over_time() -> None:
    moved = {"bytes.load": 600, "bytes.store": 0, "tokens.found": 32, "tokens.looked_up": 64, "odd": "x"}
    found = summed(
        say(0.0, "offload_started", host_bytes=1000, file_bytes=5000, blocks_found=0, seconds=0.1, tiers={}),
        say(60.0, "offload_moved", seconds=60.0, counters=moved, blocks={"host": 5, "file": 7}),
        say(61.0, "offload_failed", level="warning", cause="failed", not_logged=4),
        say(62.0, "offload_files_lost", level="warning", cause="the disk is full"),
        say(90.0, "offload_moved", seconds=30.0, counters={"bytes.load": 60}, blocks={"host": 6}),
        say(100.0, "offload_stopped", PREFILL, counters={"bytes.store": 9}),
    )
    mine, other = found.offloads.ranks
    assert (mine.rank, other.rank) == (DECODE, PREFILL)
    assert mine.counters == {"bytes.load": 660, "tokens.found": 32, "tokens.looked_up": 64}
    assert (mine.blocks, mine.failed, mine.host_bytes, mine.file_bytes) == ({"host": 6, "file": 0}, 5, 1000, 5000)
    assert mine.files_lost == "the disk is full"
    assert other.counters == {"bytes.store": 9}
    assert (mine.told_at, mine.has_stopped, other.has_stopped) == (START + 90, False, True)
    loads = found.offloads.bytes_per_s["load"]
    assert sum(loads) * found.window_s == pytest.approx(660)
    assert loads[0] == pytest.approx(10)
    page = make(found, "t")
    assert "Bytes moved between tiers per second" in page
    assert "lost: the disk is full" in page
    assert "its end" in page
    assert "Offload" not in make(summed(say(0.0, "engine_started")), "t")


def test_events_outside_the_time_asked_for_do_not_count() -> None:
    records = [ended(float(i)) for i in range(10)]
    found = summarise(Logs(records), START + 3, START + 6)
    assert found.pulls.ended == 4
    assert (found.first, found.last) == (START + 3, START + 6)


@pytest.mark.parametrize(
    ("since", "until"), [(0, 3600), (3000, 3600), (3300, 3590), (3530, 3600), (1830, 1890), (5, 70)]
)
def test_what_was_left_out_beyond_the_edges_does_not_count(since: float, until: float) -> None:
    """Ten pulls in a second, of which one in a minute is in the log."""
    logged = [ended(60.0 * i, successes_not_logged=599) for i in range(1, 61)]
    found = summarise(Logs([say(0.0, "engine_started"), *logged]), START + since, START + until)
    assert found.pulls.ended == pytest.approx(10 * (until - since), abs=2)


def test_a_time_before_the_end_is_by_the_clock_of_the_report() -> None:
    ahead = 3600.0
    named = {"peer": PREFILL, "peer_incarnation": "aaaaaaaa" * 4, "address": "tcp://h1:1"}
    lease = {"request_id": "late", "sequence": 1, "blocks": 1, "cause": "expired", "readers": {}, "owed": ["*"]}
    logs = Logs(
        sorted(
            [
                say(0.0, "engine_started", PREFILL, host="h1"),
                say(ahead, "engine_started", host="h2"),
                say(ahead + 1.0, "peer_changed", before="new", state="connecting", **named),
                say(1.001, "reader_met", PREFILL, reader=DECODE, reader_incarnation="dddddddd" * 4),
                say(ahead + 1.002, "peer_changed", before="connecting", state="loading", **named),
                say(40.0, "lease_ended", PREFILL, "warning", seconds=30.0, **lease),
                *(ended(ahead + i) for i in range(2, 50)),
            ],
            key=lambda x: x.at,
        )
    )
    aligned = align(logs)
    last = aligned.records[-1].at
    assert last - aligned.records[0].at < 60.0
    found = summarise(logs, last - 10.0, last, aligned)
    assert (found.pulls.ended, found.late.requests) == (11, 1)
    assert summarise(logs, last - 5.0, last, aligned).late.requests == 0


def test_clocks_of_two_hosts_are_aligned_by_what_they_say_to_each_other() -> None:
    ahead = 100.0
    named = {"peer": PREFILL, "peer_incarnation": "aaaaaaaa" * 4, "address": "tcp://h1:1"}
    found = summed(
        say(0.0, "engine_started", PREFILL, host="h1"),
        say(ahead, "engine_started", host="h2"),
        say(ahead + 1.0, "peer_changed", before="new", state="connecting", **named),
        say(1.001, "reader_met", PREFILL, reader=DECODE, reader_incarnation="dddddddd" * 4),
        say(ahead + 1.002, "peer_changed", before="connecting", state="loading", **named),
        say(ahead + 1.003, "peer_changed", before="loading", state="ready", **named),
        ended(ahead + 2.0),
        say(3.0, "engine_stopped", PREFILL),
    )
    assert found.last - found.first == pytest.approx(3.0, abs=0.1)
    assert "aligned" in found.clocks[0]
    (pair,) = found.peers
    assert pair.last_good == pytest.approx(START + 2.0, abs=0.01)


JUNK: list[Any] = [None, True, -1, 1 << 80, 1e308, math.nan, "text", [], {}, [1], {"a": 1}]


@settings(max_examples=30)
@example([(7, None, 1e308), (7, None, 1e308)])
@example([(7, 10**400, 10**400), (8, 10**400, 10**400), (9, 10**400, 10**400)])
@given(st.lists(st.tuples(st.integers(0, 100), st.sampled_from(JUNK), st.sampled_from(JUNK)), min_size=1))
def test_fields_of_any_kind_raise_nothing(rows: list[tuple[int, Any, Any]]) -> None:
    events = [
        "pull_ended",
        "lease_lent",
        "lease_ended",
        "peer_changed",
        "loop_was_away",
        "lease_held",
        "blocks_retired",
    ]
    names = ["seconds", "bytes", "blocks", "phases", "cause", "peer", "oldest", "successes_not_logged", "read_ranks"]
    records = []
    for at, one, other in rows:
        fields = {name: one if (at + i) % 2 else other for i, name in enumerate(names)}
        fields["successes_not_logged"] = min(at, 9)
        records.append(say(float(at), events[at % len(events)], **fields))
    assert summed(*records).read.events == len(rows)


def test_logs_without_events_make_an_empty_summary() -> None:
    found = summarise(Logs())
    assert (found.windows, found.engines, found.pulls.ended) == ([], [], 0)
