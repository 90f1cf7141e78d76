"""Logs as they come: rotated, compressed, cut short, wrapped, of other configurations, mixed with others', hostile."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from asynckv import told
from asynckv.config import LogConfig
from asynckv.errors import ConfigError
from asynckv.observe.log import Recorder
from asynckv.tools.cli import app
from asynckv.tools.diagnose import files, records
from asynckv.tools.diagnose.axis import Axis
from asynckv.tools.diagnose.join import Service, base_name, join, start_of
from asynckv.tools.diagnose.presence import Presence
from asynckv.tools.diagnose.records import Record, read_logs
from asynckv.tools.diagnose.standing import missing

START = "0a1b2c3d4e5f60718293a4b5c6d7e8f9"


def row(event: str = "lease_ended", at: str = "2026-11-22T15:46:42.123456Z", **fields: Any) -> dict[str, Any]:
    bound = {"engine_id": "prefill", "tp_rank": 0, "incarnation": START, "rank": "prefill/tp0@0a1b2c3d"}
    return {**bound, "request_id": "a", **fields, "event": event, "level": "info", "timestamp": at}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def test_a_line_becomes_a_record(tmp_path: Path) -> None:
    logs = read_logs([write(tmp_path / "a.log", row(seconds=1.5, owed=["*"]))])
    [record] = logs.records
    assert (record.event, record.level, record.rank, record.incarnation) == (
        "lease_ended",
        "info",
        "prefill/tp0@0a1b2c3d",
        START,
    )
    assert record.at == pytest.approx(1795362402.123456)
    assert record.number("seconds") == 1.5
    assert record.texts("owed") == ("*",)
    assert record.text("request_id") == "a"
    assert record.where == f"{tmp_path / 'a.log'}:1"
    assert "engine_id" not in record.fields


def test_pieces_in_any_order_and_twice_are_one_log(tmp_path: Path) -> None:
    rows = [row(request_id=str(i), at=f"2026-11-22T15:46:{i:02}Z") for i in range(9)]
    write(tmp_path / "a.log", *rows[6:])
    write(tmp_path / "a.log.1", *rows[3:7])
    with gzip.open(tmp_path / "a.log.2.gz", "wt") as file:
        file.writelines(json.dumps(x) + "\n" for x in rows[:3])
    link = tmp_path / "b.log"
    link.symlink_to(tmp_path / "a.log")
    logs = read_logs([tmp_path / "a.log.1", tmp_path, link])
    assert [x.text("request_id") for x in logs.records] == [str(i) for i in range(9)]
    assert logs.total.num_repeated == 1
    assert not logs.skipped
    assert len(logs.sources) == 3


@pytest.mark.parametrize(
    "line",
    [
        {**row(), "timestamp": None, "time": 1795362402.5},
        {**row(), "timestamp": None, "ts": 1795362402500},
        {**row(), "timestamp": None, "@timestamp": 1795362402500000},
        {**row(), "timestamp": 1795362402500000000},
        {**row(), "timestamp": 1795362402.5},
        {**row(), "timestamp": "1795362402.5"},
        {**row(), "timestamp": None, "ts": 1795362402.5, "event": None, "msg": "lease_ended", "level": "INFO"},
        {**row(), "timestamp": "1795362402500"},
        {**row(), "timestamp": "1795362402500.0"},
        {**row(), "timestamp": "2026-11-22T15:46:42.5"},
        {**row(), "timestamp": "2026-11-22T16:46:42.5+01:00"},
        {**row(), "timestamp": None, "asctime": "2026-11-22 15:46:42,500"},
        {
            "log": json.dumps(row(at="2026-11-22T15:46:42.5Z")) + "\n",
            "stream": "stderr",
            "time": "2026-11-22T15:46:50Z",
        },
        {"MESSAGE": json.dumps(row(at="2026-11-22T15:46:42.5Z")), "__REALTIME_TIMESTAMP": "1795362402500000"},
        {"MESSAGE": json.dumps({**row(), "timestamp": None}), "__REALTIME_TIMESTAMP": "1795362402500000"},
        "2026-11-22T15:46:43Z stderr F " + json.dumps(row(at="2026-11-22T15:46:42.5Z")),
        {"log": row(at="2026-11-22T15:46:42.5Z"), "stream": "stderr", "time": "2026-11-22T15:46:50Z"},
        {"log": {**row(), "timestamp": None}, "time": "2026-11-22T15:46:42.5Z"},
        {"log": "as text, not decoded", "log_processed": row(at="2026-11-22T15:46:42.5Z")},
        {"jsonPayload": {"message": {**row(), "timestamp": None}}, "timestamp": "2026-11-22T15:46:42.5Z", "labels": {}},
        {"message": {"log": json.dumps(row(at="2026-11-22T15:46:42.5Z"))}, "resource": {"type": "k8s_container"}},
        {
            "body": "lease_ended",
            "message": "lease_ended",
            "severity": "INFO",
            "timestamp": "2026-11-22T15:46:42.5Z",
            "attributes": {k: v for k, v in row().items() if k not in ("event", "timestamp", "level")},
        },
        {**row(at="2026-11-22T15:46:42.5Z"), "event": None, "message": "lease_ended engine_id=prefill cause=expired"},
    ],
)
def test_other_configurations_say_the_same(tmp_path: Path, line: Any) -> None:
    logs = read_logs([write(tmp_path / "a.log", line)])
    [record] = logs.records
    assert (record.at, record.event, record.text("request_id")) == (1795362402.5, "lease_ended", "a")


@pytest.mark.parametrize(
    "at", ["2016-12-31T23:60:00Z", "2016-12-31T23:59:61Z", "60", "1e9", "1.2.3", "", "-1.5", "٣.5"]
)
def test_a_time_that_is_none_is_told(tmp_path: Path, at: str) -> None:
    logs = read_logs([write(tmp_path / "a.log", row(at=at))])
    assert [x.at for x in logs.records] == ([60.0] if at == "60" else [])
    assert len(logs.skipped) == (at != "60")


def test_the_standard_logger_with_a_json_formatter(tmp_path: Path) -> None:
    """Fields are attributes of the record there, and formatters call the time and the level what they like."""
    stream = io.StringIO()

    class Formatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            known = set(vars(logging.makeLogRecord({})))
            extra = {k: v for k, v in vars(record).items() if k not in known}
            said = {"asctime": self.formatTime(record), "levelname": record.levelname, "message": record.getMessage()}
            return json.dumps(said | extra)

    handler = logging.StreamHandler(stream)
    handler.setFormatter(Formatter())
    logger = logging.getLogger("asynckv")
    logger.addHandler(handler)
    before, logger.level = logger.level, logging.INFO
    structlog.reset_defaults()
    try:
        Recorder(LogConfig(), engine_id="prefill", tp_rank=0, incarnation=START, rank="prefill/tp0@0a1b2c3d").log(
            told.LeaseEnded("a", 0, cause="expired", seconds=1.0, readers={}, blocks=1), level="warning"
        )
    finally:
        logger.removeHandler(handler)
        logger.level = before
    [record] = read_logs([write(tmp_path / "a.log", stream.getvalue())]).records
    assert (record.event, record.level, record.text("request_id")) == ("lease_ended", "warning", "a")


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    whole = json.dumps(row())
    path = tmp_path / "a.log"
    path.write_bytes(
        b"\n".join(
            [
                b"GET /health",
                whole.encode(),
                whole.encode()[:-20],
                ('{"incarnation": ' + "[" * 100_000).encode(),
                json.dumps(row(at="yesterday")).encode(),
                b'{"incarnation": "' + b"x" * (files.MAX_LINE + 5) + b'"}',
                b'["incarnation"]',
                json.dumps({**row(), "event": "Something else"}).encode(),
                json.dumps(row("of_the_future", number=float("inf"), other=float("nan"))).encode(),
                whole.encode()[: -len(whole) // 2],
            ]
        )
    )
    logs = read_logs([path])
    assert [x.event for x in logs.records] == ["lease_ended", "of_the_future"]
    skipped = {x.reason: (x.lines, x.where) for x in logs.skipped}
    assert skipped == {
        "cut short": (1, f"{path}:3"),  # the last line is perhaps being written just now
        "nested too deeply": (1, f"{path}:4"),
        "without a time that can be read (timestamp, time, ts, @timestamp, asctime)": (1, f"{path}:5"),
        "longer than 1,048,576 bytes": (1, f"{path}:6"),
    }
    assert logs.total.num_others == 3
    assert logs.total.num_lines == 10
    assert logs.records[1].number("number") != logs.records[1].number("number")


def test_a_damaged_archive_gives_what_is_whole(tmp_path: Path) -> None:
    text = "".join(json.dumps(row(request_id=str(i))) + "\n" for i in range(20_000))
    (tmp_path / "a.gz").write_bytes(gzip.compress(text.encode())[:-500])
    logs = read_logs([tmp_path / "a.gz"])
    assert len(logs.records) > 1000
    assert any("compressed, and cut short" in x.reason for x in logs.skipped)
    # A short one gives its lines up to the cut too; what was put behind it follows.
    lines = [json.dumps(row(request_id=hashlib.sha256(str(i).encode()).hexdigest())) + "\n" for i in range(200)]
    whole = gzip.compress("".join(lines).encode())
    (tmp_path / "a.gz").write_bytes(whole[: len(whole) // 2])
    logs = read_logs([tmp_path / "a.gz"])
    assert 50 < len(logs.records) < 150
    assert {x.reason.partition(" (")[0] for x in logs.skipped} == {"compressed, and cut short or damaged"}
    (tmp_path / "a.gz").write_bytes(whole + gzip.compress(json.dumps(row(request_id="last")).encode()))
    logs = read_logs([tmp_path / "a.gz"])
    assert (len(logs.records), logs.skipped) == (201, [])


def test_a_log_without_events_says_why(tmp_path: Path) -> None:
    assert "nothing is in there" in read_logs([write(tmp_path / "empty")]).nothing
    assert "of other programs" in read_logs([write(tmp_path / "other", "GET /health", {"event": "x"})]).nothing
    text = f"lease_ended engine_id=prefill incarnation={START} cause=expired"
    assert "as text" in read_logs([write(tmp_path / "text", text)]).nothing
    assert "cannot be read" in read_logs([write(tmp_path / "cut", json.dumps(row())[:-5])]).nothing
    assert not read_logs([write(tmp_path / "good", row())]).nothing


def test_bad_input(tmp_path: Path) -> None:
    for paths in ([], [tmp_path / "none.log"], ["a\0b"]):
        with pytest.raises(ConfigError):
            read_logs(paths)


def test_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tmp_path / "given"
    given.write_text(json.dumps(row()) + "\n")
    with given.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        logs = read_logs(["-", "-"])
    assert [x.where for x in logs.records] == ["stdin:1"]


def test_progress_and_choice(tmp_path: Path) -> None:
    seen: list[str] = []
    path = write(tmp_path / "a.log", *[row(request_id=str(i)) for i in range(9000)], row("pull_transition"))
    logs = read_logs([path], seen.append)
    assert "pull_transition" not in {x.event for x in logs.records}, "only for a request"
    assert seen == [f"{path}, {i + 1} MiB" for i in range(path.stat().st_size >> 20)]
    assert "pull_transition" in {x.event for x in read_logs([path], request="0").records}


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
KEYS = st.sampled_from([*row(), *records.TIMES, *records.EVENTS, *records.WRAPS, "cause", "owed", "history"])


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.binary(max_size=60) | st.dictionaries(KEYS, JSON).map(lambda x: json.dumps(row() | x).encode())))
def test_anything_can_be_read(lines: list[bytes]) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"\n".join(lines))
        file.flush()
        logs = read_logs([file.name])
    assert len(logs.records) <= len(lines)


def test_half_letters_and_numbers_beyond_all_measure_can_be_written_and_added(tmp_path: Path) -> None:
    lone = row(request_id="\ud800a") | {"\udc00": ["\ud83d", "😀"]}
    wrapped = {"log": json.dumps(row(request_id="\ud800b")) + "\n"}
    vast = row(blocks=10**400, seconds=10**400, sequence=10**300)
    logs = read_logs([write(tmp_path / "a.log", lone, wrapped, vast)])
    assert [x.text("request_id")[1:] for x in logs.records] == ["a", "b", ""]
    assert logs.records[0].fields["\ufffd"] == ["\ufffd", "😀"]
    assert json.dumps([dict(x.fields) for x in logs.records], ensure_ascii=False).encode()
    assert (logs.records[2].integer("blocks"), logs.records[2].number("seconds", 7.0)) == (-1, 7.0)
    assert not join(logs).requests[-1].sequence > 0


def test_no_command_stumbles_over_numbers_of_another_world(tmp_path: Path) -> None:
    start = {"engine_id": "decode", "rank": "decode/tp0@bbbbbbbb", "incarnation": "b" * 32}
    pulls = [
        row("pull_ended") | start | {"cause": "complete", "seconds": s, "bytes": n, "phases": {"read": n}}
        for s, n in ((1e308, 1e308), (1e308, -1e308), (-1e300, 10**400), (-5, 1e308))
    ]
    leases = [
        row("lease_ended", cause="expired", seconds=10**400, blocks=10**400),
        row("lease_held", oldest=[pulls[2]]),
    ]
    log = write(tmp_path / "a.log", *pulls, *leases)
    outputs = ["--html", str(tmp_path / "a.html"), "--json", str(tmp_path / "a.json")]
    result = CliRunner().invoke(app, ["why", *outputs, str(log)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    json.loads((tmp_path / "a.json").read_text())


def test_what_is_no_number_is_as_if_it_were_not_said(tmp_path: Path) -> None:
    """Python's own encoder writes NaN and Infinity, which no browser reads."""
    fields: dict[str, Any] = {
        "cause": "complete",
        "seconds": float("nan"),
        "bytes": float("inf"),
        "phases": {"read": float("nan")},
    }
    log = write(tmp_path / "a.log", row("pull_ended", **fields))
    assert "NaN" in log.read_text()
    (record,) = read_logs([log]).records
    assert (record.number("seconds", 7.0), record.integer("bytes")) == (7.0, -1)
    result = CliRunner().invoke(app, ["why", "--html", str(tmp_path / "a.html"), str(log)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert (
        "NaN" not in (tmp_path / "a.html").read_text().partition('type="application/json"')[2].partition("</script>")[0]
    )


# -- Logs of one service joined ---------------------------------------------------------------------------------------

PREFILL, DECODE = "8a5aabf2" + "0" * 24, "be26aa13" + "1" * 24


def say(at: float, event: str, start: str = PREFILL, rank: str = "", **fields: Any) -> Record:
    engine = "prefill" if start.startswith("8") else "decode"
    return Record(at, event, "info", engine, f"{rank or engine + '/tp0'}@{start[:8]}", start, fields)


def pull(at: float, pull_id: str, **fields: Any) -> Record:
    both: dict[str, Any] = {
        "request_id": "gen-a",
        "prefill_request_id": "a",
        "sequence": 0,
        "peer": "prefill",
        "seconds": 1.0,
    }
    return say(at, "pull_ended", DECODE, pull_id=pull_id, **(both | fields))


def only(service: Service) -> Any:
    [request] = service.requests
    return request


def test_names() -> None:
    assert base_name("prefill/pp1/tp3@0a1b2c3d") == "prefill/pp1/tp3"
    assert base_name("prefill/tp3 (tcp://127.0.0.1:5555)") == "prefill/tp3"
    assert start_of("a/b@c/tp3@0a1b2c3d (tcp://127.0.0.1:5555)") == "0a1b2c3d"
    assert (start_of("*"), base_name("*"), start_of("decode/tp1")) == ("", "*", "")


def test_both_sides_of_a_request_meet() -> None:
    service = join(
        [
            say(0, "engine_started", host="h1", lease_s=30.0),
            say(1, "lease_lent", request_id="a", sequence=0, blocks=2, lease_s=20.0),
            pull(3, f"{DECODE[:16]}-1", cause="complete", peer_ranks=["prefill/tp0@8a5aabf2"]),
            say(4, "lease_ended", request_id="a", sequence=0, cause="released", seconds=3.0, blocks=2),
        ]
    )
    request = only(service)
    [lease], [one] = request.leases.values(), request.pulls.values()
    assert (lease.state, lease.lent_at, lease.blocks, lease.lease_s) == ("released", 1, 2, 20.0)
    assert (one.cause, one.begun_at, one.process.rank) == ("complete", 2, "decode/tp0@be26aa13")
    assert [x.at for x in request.records()] == [1, 3, 4]
    assert service.processes[PREFILL].lends
    assert service.processes[PREFILL].host == "h1"
    assert not missing(Presence(Axis(service)))


def test_a_lease_tells_what_its_readers_said() -> None:
    claimed = {"reader": "decode/tp0@be26aa13", "pull_id": "be26aa1311111111-1"}
    history = [
        [0.0, "lent"],
        [1.0, {"note": "granted", **claimed}],
        [5.0, {"note": "released", **claimed, "outcome": "retry"}],
    ]
    held = {"request_id": "a", "sequence": 0, "lent_s": 10.0, "claims": {"decode/tp0@be26aa13": {"heard_s": 8.0}}}
    service = join(
        [
            say(11, "lease_held", state="lent", oldest=[held, "rubbish", {"request_id": 5}]),
            say(31, "lease_ended", request_id="a", sequence=0, cause="expired", seconds=30.0, history=history,
                owed=["decode/tp0@be26aa13"], refused=[[2.5, "claim", "wrong_request", "decode/tp1", "x"], 5]),
        ]
    )  # fmt: skip
    lease = service.requests[0].leases["prefill/tp0@8a5aabf2"]
    claim = lease.claims["decode/tp0@be26aa13"]
    assert (lease.lent_at, claim.claimed_s, claim.pull_id) == (1, 1.0, "be26aa1311111111-1")
    assert lease.retrying == {"decode/tp0@be26aa13"}
    [refusal] = lease.refused
    assert (refusal.after_s, refusal.message, refusal.reason) == (2.5, "claim", "wrong_request")
    assert missing(Presence(Axis(service))) == ["decode/tp0@be26aa13"]


def test_when_a_reader_was_heard_of_counts_from_when_it_was_lent_or_is_an_age() -> None:
    reader = "decode/tp0@be26aa13"
    claim = {"pull_id": "be26aa1311111111-1", "claimed_s": 0.464, "heard_s": 17.136}

    def heard(**said: Any) -> tuple[float, float]:
        held = {"request_id": "a", "sequence": 0, "lent_s": 20.253, "claims": {reader: said}}
        service = join([say(21, "lease_held", state="lent", oldest=[held])])
        found = service.requests[0].leases["prefill/tp0@8a5aabf2"].claims[reader]
        return round(found.claimed_s, 3), round(found.heard_s, 3)

    assert heard(**claim) == (0.464, 17.136)
    assert heard(heard_s=8.0)[1] == 12.253
    ended = say(31, "lease_ended", request_id="a", sequence=0, cause="expired", seconds=30.0, claims={reader: claim})
    assert join([ended]).requests[0].leases["prefill/tp0@8a5aabf2"].claims[reader].heard_s == 17.136


def test_a_pull_of_another_request_id_is_found_by_its_key() -> None:
    service = join(
        [
            say(1, "lease_lent", request_id="a", sequence=7),
            pull(
                3, "x-1", cause="wrong_request", sequence=7, prefill_request_id="b", peer_ranks=["prefill/tp0@8a5aabf2"]
            ),
            pull(4, "x-2", cause="complete", sequence=7, prefill_request_id="c", peer_ranks=["prefill/tp0@8a5aabf2"]),
        ]
    )
    request, other = service.requests
    assert not request.pulls
    assert list(request.others) == ["x-1"]
    assert (other.request_id, list(other.pulls)) == ("c", ["x-2"])


def test_a_scheduler_that_counts_from_zero_again_is_another() -> None:
    again = "8bbbbbbb" + "2" * 24
    service = join(
        [
            say(1, "lease_lent", request_id="a", sequence=0),
            say(50, "engine_started", again),
            say(51, "lease_lent", again, request_id="a", sequence=0),
            pull(53, "x-1", cause="complete", peer_ranks=["prefill/tp0@8bbbbbbb"]),
        ]
    )
    first, second = service.requests
    assert not first.pulls
    assert list(second.pulls) == ["x-1"]
    assert service.processes[PREFILL].successor is service.processes[again]


def test_ranks_of_one_request_are_together_and_short_failures_find_theirs() -> None:
    service = join(
        [
            say(1, "lease_lent", rank="prefill/tp0", request_id="a", sequence=0),
            say(1, "lease_lent", "81111111" + "0" * 24, rank="prefill/tp1", request_id="a", sequence=0),
            say(1, "lease_lent", request_id="b", sequence=1),
            pull(3, "x-1", cause="peer_lost", failed_in="read", peer_ranks=["prefill/tp0@8a5aabf2"]),
            say(3, "pull_ended", DECODE, pull_id="x-2", cause="peer_lost", same_as="x-1", prefill_request_id="b"),
        ]
    )
    first, second = service.requests
    assert sorted(first.leases) == ["prefill/tp0@8a5aabf2", "prefill/tp1@81111111"]
    assert second.pulls["x-2"].failed_in == "read"


@pytest.mark.slow
def test_one_key_that_is_used_again_and_again_costs_no_square() -> None:
    number = 3_000
    starts = [f"8{i:07x}" + "8" * 24 for i in range(number)]
    ours = [say(i, "lease_lent", x, "prefill/tp0", request_id="a", sequence=0) for i, x in enumerate(starts)]
    told = [
        pull(i + 0.5, f"{DECODE[:16]}-{i}", cause="timeout", peer_ranks=[f"prefill/tp0@{x[:8]}"])
        for i, x in enumerate(starts)
    ]
    began = time.process_time()
    service = join([*ours, *told])
    assert time.process_time() - began < 5.0  # a square takes a minute
    assert len(service.requests) == number
    assert all(len(x.pulls) == len(x.leases) == 1 for x in service.requests)
