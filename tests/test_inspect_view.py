"""What engines said, put side by side and shown: on a screen of any width, as JSON, and however hostile it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from asynckv.core.account import Account, PhaseCount
from asynckv.core.inspect import RankStatus, RequestStatus
from asynckv.tools.diagnose.ask import Answer, Trouble
from asynckv.tools.diagnose.inspect_join import join, unrepeated
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
        (silent(DECODE, trouble=Trouble.GONE), "its process has ended", True),
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


@pytest.mark.parametrize(
    ("line", "file", "text"),
    [
        ("0::/docker/ab12", "docker/ab12/cgroup.events", "populated 1\nfrozen 1\n"),
        ("4:freezer:/docker/ab12", "freezer/docker/ab12/freezer.state", "FROZEN\n"),
    ],
)
def test_a_paused_container_is_told_from_a_device_that_hangs(line: str, file: str, text: str, tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "stat").write_text(f"7 (python) D {' '.join(map(str, range(4, 40)))}\n")
    (proc / "7" / "cgroup").write_text(f"1:cpu:/\n{line}\n")
    (cgroups / file).parent.mkdir(parents=True)
    for state, is_paused in ((text, True), ("populated 1\nfrozen 0\n" if "::" in line else "THAWED\n", False)):
        (cgroups / file).write_text(state)
        said = verdict(Seen(7), look(7, proc, cgroups))
        assert ("paused: its cgroup /docker/ab12 is frozen" in said) is is_paused
        assert ("waits for a device" in said) is not is_paused


def test_a_process_is_found_whatever_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = " ".join(["T", *map(str, range(4, 40))])
    (tmp_path / "7" / "stat").write_text(f"7 (a) S (b) {fields}\n")
    seen = look(7, tmp_path)
    assert (seen.state, seen.began) == ("T", 22)
    assert seen.cpu_s == (14 + 15) / os.sysconf("SC_CLK_TCK")
    assert look(8, tmp_path) == Seen(8)
    assert look(os.getpid()).state == "R"
