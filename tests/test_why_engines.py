"""What running engines say, as `asynckv why` shows it, however hostile it is; bad input of the command."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asynckv.account.inspect import HeldBlocks, RankStatus, RequestStatus
from asynckv.account.values import Account, Facts, Lag, PeerStatus, PhaseCount
from asynckv.layout import TokenShard
from asynckv.tools.diagnose import why_cli
from asynckv.tools.diagnose.ask import Answer
from asynckv.tools.diagnose.axis import Axis
from asynckv.tools.diagnose.findings import Seen, find
from asynckv.tools.diagnose.join import join
from asynckv.tools.diagnose.leaks_live import records_of
from asynckv.tools.diagnose.presence import Presence
from asynckv.tools.diagnose.records import Logs
from asynckv.tools.diagnose.timeline_model import ground
from asynckv.tools.diagnose.why_report import report
from asynckv.tools.diagnose.why_text import show_engines, show_findings
from tests.commands import Command

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
    values: dict[str, Any] = {"address": f"tcp://{rank}:1", "account": account}
    return Answer(**values | changed)


def shown(answers: list[Answer], *, width: int = 100, top: int = 20) -> str:
    out = io.StringIO()
    show_engines(answers, top, Console(file=out, width=width))
    return out.getvalue()


def found_in(answers: list[Answer]) -> tuple[dict[str, Any], str]:
    records = list(records_of(answers, 1e9))
    presence = Presence(Axis(join(records)))
    seen = Seen(Logs(records), presence, ground(presence), [], answers=answers)
    document = report(find(seen), seen)
    out = io.StringIO()
    show_findings(document, Console(file=out, width=100))
    return document, out.getvalue()


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
    reads = Answer(address="tcp://d:1", account=more, gauges={"blocks_quarantined": 4})
    return [
        answer(PREFILL, lease()),
        reads,
        Answer(address="tcp://x:1", error="no answer within 5 s", account=Account(rank="gone/tp0@ee")),
    ]


def test_one_screen_answers_who_holds_what() -> None:
    said = shown(whole())
    for words in (
        "prefill/tp0@aaaaaaaa",
        "draining for 3700 s, pid 7 on h",
        "takes nothing new: draining",
        "blocks held 2 of 32, ",
        "pulls reading 1 of 1, blocks quarantined 4, ",
        "pull reading 1 (oldest 3.00 s), pull quarantined 2 (oldest 99.0 s)",
        "p2/tp0@dd gone, never heard, 3 requests: refused the handshake",
        "p1 on prefill/tp0@aaaaaaaa: lent for 4.00 s, 26.0 s left, 2 blocks",
        "claimed and renewed by decode/tp0@bbbbbbbb",
        "no answer within 5 s",
        "and 2 more; --top N shows more of them",
    ):
        assert words in said, said


def test_who_does_not_answer_is_what_is_wrong() -> None:
    document, text = found_in(whole())
    assert [(x["code"], x["what"]) for x in document["findings"]] == [("no_answer", "gone/tp0@ee does not answer")]
    assert text.startswith("One thing is wrong.")
    engines = document["engines"]
    assert [("error" in x) for x in engines] == [False, False, True]
    assert engines[0]["requests"][0]["ranks"][0]["rank"] == DECODE


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
    answers = [Answer(address=WILD, account=hostile, gauges={WILD: 1}), Answer(address=WILD, error=WILD)]
    document, text = found_in(answers)
    for said in (shown(answers), text):
        assert "\\x1b" in said
        assert all(letter.isprintable() or letter == "\n" for letter in said)
    assert json.loads(json.dumps(document))["schema"] == "asynckv.why/1"


# -- the command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nowhere"], "'nowhere' is no file, directory or address"),
        (["gone/good.jsonl", "other.jsonl"], "gone/good.jsonl: No such file or directory"),
        (["tcp://127.0.0.1:0"], "names no port"),
        (["h:1", "--top", "-1"], "'--top': Input should be greater"),
        (["h:1", "--watch", "--html", "x.html"], "--watch asks running engines"),
        (["h:1", "--watch", "--json", "x.json"], "at most --json -"),
        (["h:1", "--keys", "x"], "--keys and --authorized belong together"),
        (["h:1", "--keys", "NONE/x.key_secret", "--authorized", "NONE"], "cannot be read"),
        (["h:1", "--timeout", "0"], "timeout_s is 0"),
        ([], "Missing argument"),
        ([""], "names nothing"),
        (["", "h:1"], "names nothing"),
        (["http://127.0.0.1:8000"], "is an HTTP server's"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], says: str, tmp_path: Path, command: Command) -> None:
    given = [x.replace("NONE", str(tmp_path / "none")) for x in argv]
    assert says in command.complaint("why", *given)


@pytest.mark.parametrize(
    ("given", "request_"),
    [
        (["tcp://127.0.0.1:5555", "logs"], None),
        (["127.0.0.1:5555", "logs"], None),
        (["[::1]:5555", "logs"], None),
        (["prefill.invalid:42", "logs"], "prefill.invalid:42"),
        (["prefill.invalid:42"], None),
        (["prefill#42", "logs"], "prefill#42"),
        (["chat:7#1", "logs"], "chat:7#1"),
    ],
)
def test_what_names_no_host_is_a_request(given: list[str], request_: str | None) -> None:
    assert why_cli._request(given) == (request_, given if request_ is None else given[1:])


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
    return Answer(address="tcp://w:1", account=account, gauges=said)


def test_a_rank_that_shares_tokens_is_shown_with_those_that_it_holds() -> None:
    account = Account(rank=PREFILL, token_shards=(TokenShard(0, 8, 3, 1), TokenShard(2, 8, 3, 1)))
    said = shown([Answer(address="tcp://p:1", account=account)])
    assert f"{PREFILL} (tcp://p:1): ? for 0 µs, tokens 3 of 8 by 1\n" in said


def test_tiers_are_shown_with_how_full_they_are() -> None:
    said = shown([with_tiers({})], width=140)
    assert "offload, host: 3 blocks, 3.0 MiB of 4.0 MiB\n" in said
    assert "offload, file: 10 blocks, 10.0 MiB of 1.0 GiB\n" in said
    assert "offload" not in shown([answer(PREFILL)])


def test_a_tier_that_is_off_says_why() -> None:
    said = shown([with_tiers({"offload.files_off": "the disk is full\x1b[2J"})])
    assert "offload.files_off: the disk is full" in said
    assert "\x1b" not in said
