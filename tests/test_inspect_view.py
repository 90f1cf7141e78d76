"""What engines said, put side by side and shown: on a screen of any width, as JSON, and however hostile it is."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asynckv.core.account import Account, Facts, Lag, PeerStatus, PhaseCount
from asynckv.core.inspect import HeldBlocks, RankStatus, RequestStatus
from asynckv.tools import cli
from asynckv.tools.diagnose.ask import Answer
from asynckv.tools.diagnose.inspect_cli import merged
from asynckv.tools.diagnose.inspect_join import Joined, as_json, has_doubts, join, unrepeated
from asynckv.tools.diagnose.inspect_view import one_request, overview, span
from asynckv.tools.diagnose.process import Seen, look, verdict

PREFILL, DECODE = "prefill/tp0@aaaaaaaa", "decode/tp0@bbbbbbbb"


def lease(reader: str = DECODE, state: str = "granted", pull_id: str = "bb-1", **changed: Any) -> RequestStatus:
    rank = RankStatus(reader, state, pull_id=pull_id, granted_s=5.0, heard_s=1.0)
    values: dict[str, Any] = {
        "kind": "lease",
        "request_id": "p1",
        "prefill_request_id": "p1",
        "state": "lent",
        "age_s": 4.0,
        "state_s": 4.0,
        "left_s": 26.0,
        "blocks": 2,
        "waits": f"claimed and renewed by {reader}",
        "ranks": (rank,),
        "sequence": 7,
    }
    return RequestStatus(**values | changed)


def pull(owner: str = PREFILL, said: str = "granted", **changed: Any) -> RequestStatus:
    rank = RankStatus(owner, said, address="tcp://p:1", granted_s=5.0, bytes_planned=4096, transfers=1)
    values: dict[str, Any] = {
        "kind": "pull",
        "request_id": "d1",
        "prefill_request_id": "p1",
        "state": "reading",
        "age_s": 3.0,
        "state_s": 2.0,
        "left_s": None,
        "blocks": 2,
        "waits": f"bytes from {owner}",
        "ranks": (rank,),
        "pull_id": "bb-1",
        "sequence": 7,
    }
    return RequestStatus(**values | changed)


def answer(rank: str, *requests: RequestStatus, **changed: Any) -> Answer:
    counts = tuple(PhaseCount(kind=x.kind, phase=x.state, number=1, oldest_s=x.age_s) for x in requests)
    account = Account(engine_id=rank.partition("/")[0], rank=rank, requests=requests, counts=counts)
    values: dict[str, Any] = {"address": f"tcp://{rank}:1", "engine_id": account.engine_id, "account": account}
    return Answer(**values | changed)


def silent(rank: str = "", **changed: Any) -> Answer:
    return Answer(address="tcp://x:1", error="no answer within 5 s", account=Account(rank=rank), **changed)


def verdicts(*answers: Answer) -> list[tuple[str, bool]]:
    return [(other.verdict, other.is_amiss) for each in join(answers) for other in each.others]


def shown(answers: Sequence[Answer], *, width: int = 100, top: int = 20, request: str = "") -> str:
    console = Console(width=width, force_terminal=False, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(one_request(answers, request) if request else overview(answers, top))
    return captured.get()


# -- side by side ----------------------------------------------------------------------------------------


def test_a_lease_stands_beside_its_readers_attempt() -> None:
    found = join([answer(DECODE, pull()), answer(PREFILL, lease())])
    assert [(each.rank, each.request.kind, each.is_amiss) for each in found] == [
        (PREFILL, "lease", False),
        (DECODE, "pull", False),
    ]
    assert [other.found and other.found.request_id for each in found for other in each.others] == ["d1", "p1"]
    assert [each.rank for each in unrepeated(found)] == [PREFILL]


@pytest.mark.parametrize(
    ("reader", "says", "is_amiss"),
    [
        (answer(DECODE), "knows nothing of it", True),
        (answer(DECODE, pull(sequence=8)), "knows nothing of it", True),
        (answer(DECODE, is_cut=True), "not among the oldest requests that it reported", False),
        (answer("decode/tp0@cccccccc"), "its process has ended: decode/tp0@cccccccc is there now", True),
        (silent(DECODE), "does not answer", True),
        (silent(DECODE, is_left_behind=True), "its process has ended", True),
        (silent(), "was not asked", False),
        (answer(DECODE, pull(pull_id="bb-2")), "another attempt than the one that was granted", False),
    ],
)
def test_a_reader_that_does_not_fit_its_lease_is_marked(reader: Answer, says: str, is_amiss: bool) -> None:
    ((verdict, amiss), *_) = verdicts(answer(PREFILL, lease()), reader)
    assert says in verdict
    assert amiss is is_amiss


def test_a_reader_under_another_name_is_known_by_its_process() -> None:
    """A cohort may be called otherwise than its engine."""
    named = lease(reader="sibling-2/tp0@bbbbbbbb", pull_id="bb-9")
    ((verdict, amiss), *_) = verdicts(answer(PREFILL, named), answer(DECODE))
    assert ("knows nothing of it" in verdict, amiss) == (True, True)
    ((verdict, amiss), *_) = verdicts(answer(PREFILL, named), answer(DECODE, pull(pull_id="bb-9")))
    assert (verdict, amiss) == ("", False)


def test_an_unclaimed_lease_is_found_where_it_is_announced() -> None:
    unclaimed = lease(reader="*", state="unclaimed", pull_id="")
    announced = pull(kind="announced", state="announced")
    assert verdicts(answer(PREFILL, unclaimed), answer(DECODE, announced))[0] == (
        "announced there, and has not claimed it",
        False,
    )
    assert verdicts(answer(PREFILL, unclaimed), answer(DECODE)) == [("no engine that was asked knows of it", False)]
    assert verdicts(answer(PREFILL, unclaimed)) == [("", False)]


def test_an_attempt_at_what_is_not_lent_is_marked() -> None:
    assert verdicts(answer(PREFILL), answer(DECODE, pull(said="not_lent"))) == [("not lent there yet", False)]
    assert verdicts(answer(PREFILL), answer(DECODE, pull()))[0][1]
    for over in ("released", "only_released"):
        assert verdicts(answer(PREFILL), answer(DECODE, pull(said=over))) == [("", False)]
    assert verdicts(answer(PREFILL, lease(state="complete")), answer(DECODE)) == [("", False)]


def test_what_one_engine_calls_by_two_names_is_told_once() -> None:
    before, after = answer(DECODE, pull()), answer(DECODE, pull(), pull(request_id="d2", pull_id="bb-2"))
    both = merged(before, after)
    assert [each.request_id for each in both.requests] == ["d1", "d2"]
    assert merged(silent(), after).error


# -- on a screen -----------------------------------------------------------------------------------------


def whole() -> list[Answer]:
    facts = Facts(
        version="0.2.0", host="h", pid=7, life="draining", uptime_s=3700, planes={"nixl": "1.5.1"}, lag=Lag(was_away=2)
    )
    peers = (
        PeerStatus(rank=PREFILL, address="tcp://p:1", state="ready", heard_s=0.1),
        PeerStatus(rank="p2/tp0@dd", address="tcp://p:2", state="gone", cause="refused the handshake", pulls=3),
    )
    decode = answer(DECODE, pull())
    account = decode.account
    more = Account(
        rank=DECODE,
        facts=facts,
        counts=(*account.counts, PhaseCount(kind="pull", phase="quarantined", number=2, oldest_s=99.0)),
        requests=account.requests,
        holds=(HeldBlocks("d1", "reading", {0: tuple(range(200))}, 2.0, math.inf, (), "bb-1"),),
        num_peers={"ready": 1, "gone": 1},
        peers=peers,
        budgets={"blocks_held": (2, 32), "bytes_in_flight": (4096, 1 << 28), "pulls_reading": (1, 1)},
        closed_as="draining",
    )
    reads = Answer(address="tcp://d:1", engine_id="decode", account=more, gauges={"blocks_quarantined": 4})
    return [answer(PREFILL, lease()), reads, silent("gone/tp0@ee")]


def test_one_screen_answers_who_holds_what() -> None:
    said = shown(whole())
    for words in (
        "prefill/tp0@aaaaaaaa",
        "draining for 62 min",
        "pid 7 on h, asynckv 0.2.0, NIXL 1.5.1, takes nothing new: draining",
        "blocks held 2 of 32 · 4 quarantined · reading 1 of 1 · in flight 4.0 KiB of 256.0 MiB",
        "pull: reading 1 (oldest 3.0 s) · quarantined 2 (oldest 99 s)",
        "p2/tp0@dd gone, never heard, 3 requests: refused the handshake",
        "p1  prefill/tp0@aaaaaaaa",
        "claimed and renewed by decode/tp0@bbbbbbbb",
        "decode/tp0@bbbbbbbb: d1 is reading there for 2.0 s",
        "no answer within 5 s",
        "... and 2 more: --top N shows more of them",
    ):
        assert words in said, said
    assert said.count("d1") == 1


LONG = "cmpl-7d3c8a90-1111-2222-3333-444455556666"


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_it_fits_any_screen_and_nothing_is_cut(width: int) -> None:
    said = [shown(whole(), width=width), shown(whole(), width=width, request="d1")]
    said.append(shown([answer(PREFILL, lease(request_id=LONG))], width=width))
    for line in "\n".join(said).splitlines():
        assert len(line) <= width
        assert not line.endswith(("…", " "))
    requests = said[-1].partition("held by")[2]
    assert PREFILL in requests
    assert LONG in requests or width < len(LONG)
    assert "".join(requests.split()).count(LONG) == 1


def test_what_both_may_have_missed_is_found_twice_before_it_is_told() -> None:
    """Under load, requests begin and end between the two questions."""
    lost, passing = lease(request_id="lost"), lease(request_id="passing", pull_id="bb-2", sequence=8)
    first = [answer(PREFILL, lost), answer(DECODE)]
    second = [answer(PREFILL, lost, passing), answer(DECODE)]
    assert has_doubts(first)
    assert not has_doubts([answer(PREFILL, lease()), answer(DECODE, pull())])
    marked = {each.request.request_id: each.is_amiss for each in join(second, first)}
    assert marked == {"lost": True, "passing": False}
    assert {each["request_id"]: each["others"][0]["is_amiss"] for each in as_json(second, first)["joined"]} == marked


def test_a_request_that_nobody_knows_is_looked_for_in_the_logs() -> None:
    assert "asynckv timeline LOGS --request p9" in shown([answer(PREFILL)], request="p9")


# -- what the kernel says of who is silent ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "cpu_s", "says"),
    [
        ("T", 0.0, "pid 7 is stopped (T): kill -CONT 7"),
        ("t", 0.0, "stopped by a debugger (t)"),
        ("D", 0.0, "waits for a device or a file system (D)"),
        ("Z", 0.0, "pid 7 has ended (Z)"),
        ("R", 4.9, "computes (R, 98% of a core) and its event loop is away; py-spy dump --pid 7 shows where"),
        ("S", 0.1, "waits (S, 2% of a core): its event loop is blocked, or the engine is closing"),
    ],
)
def test_a_process_that_does_not_answer_is_told_with_what_to_do(state: str, cpu_s: float, says: str) -> None:
    before = Seen(7, "S", 100, 10.0, 50.0)
    assert says in verdict(before, Seen(7, state, 100, 10.0 + cpu_s, 55.0))
    assert "has ended meanwhile" in verdict(before, Seen(7))
    assert "has ended meanwhile" in verdict(before, Seen(7, state, 200, 0.0, 55.0)), "another with this pid"
    assert verdict(Seen(7), Seen(7)) == "pid 7 listens, and its event loop is away"


def test_a_process_is_found_whatever_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = " ".join(["T", *map(str, range(4, 40))])
    (tmp_path / "7" / "stat").write_text(f"7 (a) S (b) {fields}\n")
    seen = look(7, tmp_path)
    assert (seen.state, seen.began) == ("T", 22)
    assert seen.cpu_s == (14 + 15) / os.sysconf("SC_CLK_TCK")
    assert look(8, tmp_path) == Seen(8)
    assert look(os.getpid()).state == "R"


def test_a_long_line_goes_on_indented() -> None:
    lines = shown(whole(), width=40).split("\n\n")[0].splitlines()
    names = tuple(each.rank[:8] for each in whole())
    assert [line for line in lines if not line.startswith((*names, " ")) and line] == []


def test_who_did_not_answer_may_hold_what_nobody_speaks_of() -> None:
    assert "by the engines that answered" in shown([answer(PREFILL), silent()])
    assert "by the engines that answered" not in shown([answer(PREFILL)])


def test_one_request_is_shown_with_all_that_is_known() -> None:
    said = shown(whole(), request="d1")
    for words in (
        "lease p1",
        "pull d1",
        "p1, sequence 7",
        "2 held as reading for 2.0 s",
        "(200 told)",
        "0 bytes of 4.0 KiB read",
    ):
        assert words in said, said
    told = lease(refused=((2.0, "claim", "wrong_cohort", DECODE, "not this one"),), history=((0.5, "granted"),))
    said = shown([answer(PREFILL, told)], request="p1")
    assert f"! a claim of {DECODE} was refused 2.0 s ago: wrong_cohort, not this one" in said
    assert "0.5 s  granted" in said
    assert "none of the 1 that answered knows of 'd1\\x1b'" in shown([answer(PREFILL), silent()], request="d1\x1b")


WILD = "\x1b]0;owned\x07[red]\u202e\n" * 50


REFUSED: dict[str, Any] = {"refused": ((math.nan, WILD, WILD, WILD, WILD),)}


def test_strangers_write_nothing_onto_the_terminal_but_letters() -> None:
    hostile = Account(
        rank=WILD,
        facts=Facts(life=WILD, host=WILD, pid=1, version=WILD, uptime_s=math.nan, planes={"nixl": WILD}),
        counts=(PhaseCount(kind=WILD, phase=WILD, number=1, oldest_s=-math.inf),),
        requests=(
            lease(
                request_id=WILD,
                state=WILD,
                waits=WILD,
                age_s=math.nan,
                reader=WILD,
                left_s=math.inf,
                history=((math.nan, WILD),),
                **REFUSED,
            ),
        ),
        holds=(HeldBlocks(WILD, WILD, {0: (1,)}, math.nan, math.inf, (WILD,)),),
        num_peers={WILD: 1},
        peers=(PeerStatus(rank=WILD, address=WILD, state=WILD, cause=WILD),),
        budgets={"bytes_in_flight": (-5, 10**18)},
    )
    answers = [
        Answer(address=WILD, account=hostile, gauges={WILD: 1}),
        Answer(address=WILD, error=WILD),
    ]
    for said in (shown(answers), shown(answers, request=WILD)):
        assert "\\x1b" in said
        assert all(letter.isprintable() or letter == "\n" for letter in said)
        assert len(said.splitlines()) < 150
    json.loads(json.dumps(as_json(answers)), parse_constant=lambda name: None)


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        (None, "-"),
        (math.inf, "-"),
        (math.nan, "-"),
        (0.0004, "0.4 ms"),
        (0.05, "50 ms"),
        (0.4, "0.4 s"),
        (61, "61 s"),
        (3600.0, "60 min"),
        (7300.0, "2.0 h"),
        (1e6, "12 d"),
    ],
)
def test_a_duration_is_written_for_people(seconds: float | None, says: str) -> None:
    assert span(seconds) == says


def test_what_json_says_is_stable() -> None:
    document = as_json(whole())
    assert list(document) == ["schema", "asked_at", "engines", "joined"]
    assert document["schema"] == "asynckv.inspect/1"
    prefill, decode, gone = document["engines"]
    assert list(gone) == ["address", "took_s", "error", "is_left_behind", "pid"]
    names = """address budgets closed_as counted_s counts engine_id facts gauges holds incarnation is_cut memory_epoch
        num_peers num_readers peers pp_size pp_stage rank requests took_s tp_rank tp_size"""
    assert sorted(prefill) == names.split()
    assert prefill["requests"][0]["ranks"][0]["rank"] == DECODE
    assert list(decode["holds"][0]["blocks"]["0"][:2]) == [0, 1]
    assert document["joined"][0] == {
        "rank": PREFILL,
        "kind": "lease",
        "request_id": "p1",
        "sequence": 7,
        "others": [{"rank": DECODE, "state": "granted", "found": "reading", "verdict": "", "is_amiss": False}],
    }
    assert isinstance(join(whole())[0], Joined)


# -- the command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nowhere"], "is not an address"),
        (["tcp://127.0.0.1:0"], "names no port"),
        (["h:1", "--top", "0"], "--top 0 is outside 1"),
        (["h:1", "--watch", "0.1"], "--watch 0.1 is outside 0.2"),
        (["h:1", "--watch", "1", "2"], "--watch takes one number"),
        (["--watch", "1"], "--watch takes one number"),
        (["h:1", "--keys", "x"], "--keys and --authorized belong together"),
        (["h:1", "--keys", "NONE/x.key_secret", "--authorized", "NONE"], "cannot be read"),
        (["h:1", "--timeout", "0"], "timeout_s is 0"),
        (["h:1", "--request", "x" * 20_000], "has 20000 characters"),
        ([], "Missing argument"),
        ([""], "an address is empty"),
        (["http://127.0.0.1:8000"], "is an HTTP server's"),
        (["h:1", "--watch", "--json", "x.json"], "give --json -"),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [x.replace("NONE", str(tmp_path / "none")) for x in argv]
    monkeypatch.setattr(sys, "argv", ["asynckv", "inspect", *given])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
    assert says in err


# -- tiers -----------------------------------------------------------------------------------------------


def with_tiers(planes: dict[str, str], **gauges: int) -> Answer:
    """An engine with an offload."""
    counters = {"offload.tokens.looked_up": 4000, "offload.tokens.found": 3000, "offload.tokens.missed": 16}
    facts = Facts(
        life="running", counters=counters | {"offload.evicted.host": 7, "offload.not_stored.no_room": 9}, planes=planes
    )
    now = {"kept.host": 3, "kept_bytes.host": 3 << 20, "limit_bytes.host": 4 << 20, "to_write_back": 2, "jobs": 1}
    now |= {
        "kept.file": 10,
        "kept_bytes.file": 10 << 20,
        "limit_bytes.file": 1 << 30,
        "reads.file": 1,
        "writes.file": 1,
    }
    account = Account(engine_id="w", rank="w/tp0@aaaaaaaa", facts=facts)
    said = {f"offload.{name}": value for name, value in (now | gauges).items()}
    return Answer(address="tcp://w:1", engine_id="w", account=account, gauges=said)


def test_tiers_are_shown_with_how_full_they_are_and_what_is_found() -> None:
    lines = shown([with_tiers({"offload.folder": "/nvme/kv/tp0of1-ab"})], width=140).splitlines()
    at = next(i for i, line in enumerate(lines) if "offload" in line)
    assert [line.strip() for line in lines[at : at + 3]] == [
        "offload: stores and loads under way: 1 · found 3,000 of 4,000 tokens (75%) · 16 of them missed by loads · "
        "9 blocks not stored",
        "host   3 blocks, 3.0 MiB of 4.0 MiB (75%) · 2 to be written back · 7 evicted",
        "file   10 blocks, 10.0 MiB of 1.0 GiB (1%) · /nvme/kv/tp0of1-ab",
    ]
    assert not any("offload" in line or "MiB" in line for line in shown([answer(PREFILL)]).splitlines())


def test_what_another_geometry_has_left_is_shown_as_only_read() -> None:
    said = shown([with_tiers({}, **{"kept.others": 5, "kept_bytes.others": 5 << 10})])
    assert "others 5 blocks, 5.0 KiB · stored by ranks of another geometry, only read" in said


@pytest.mark.parametrize(("reads", "says"), [(1, "takes no more blocks: the disk is full"), (0, "is off: the disk is")])
def test_a_tier_that_is_off_says_why(reads: int, says: str) -> None:
    planes = {"offload.files_off": "the disk is full\x1b[2J"}
    said = shown([with_tiers(planes, **{"reads.file": reads, "writes.file": 0})])
    assert says in said
    assert "\x1b" not in said


def test_an_offload_that_is_off_says_why_and_of_its_files_nothing_more() -> None:
    off = with_tiers({"offload.off": "its engine is suspended"}, **{"reads.file": 0, "writes.file": 0})
    said = shown([off], width=80)
    assert "nothing is stored or loaded: its engine is suspended" in said
    assert "is off" not in said
