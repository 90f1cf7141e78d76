"""Many logs become one service: processes, and requests of both sides."""

from __future__ import annotations

import time
from typing import Any

import pytest

from asynckv.tools.diagnose.axis import make_axis
from asynckv.tools.diagnose.join import Service, base_name, join, start_of
from asynckv.tools.diagnose.presence import Presence
from asynckv.tools.diagnose.records import Record
from asynckv.tools.diagnose.standing import missing

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
    assert not missing(Presence(make_axis(service)))


def test_a_lease_tells_what_its_readers_said() -> None:
    history = [
        [0.0, "lent"],
        [1.0, "granted to decode/tp0@be26aa13, pull be26aa1311111111-1"],
        [5.0, "released by decode/tp0@be26aa13, pull be26aa1311111111-1: retry"],
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
    assert missing(Presence(make_axis(service))) == ["decode/tp0@be26aa13"]


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


def test_a_scheduler_that_counts_from_zero_again_is_somebody_else() -> None:
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
