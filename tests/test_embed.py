"""One suite over the three ways to embed an engine: a worker is told the same, whichever loop runs the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import pytest

from asynckv import (
    AsyncKVError,
    ConfigError,
    Engine,
    EngineClosed,
    EngineConfig,
    LeaseConfig,
    LeaseRefused,
    LocalProtocolError,
    NixlConfig,
    PeerLost,
    PeerUnreachable,
    PrefillRanks,
    PullCancelled,
    PullConfig,
    PullError,
    RemoteProtocolError,
)
from asynckv.edges.nic.nixl import NixlPlane
from asynckv.embed import (
    Announce,
    Cancel,
    EndPieces,
    EngineDesk,
    EngineThread,
    Finished,
    Follow,
    Lend,
    LendPiece,
    Offer,
    Order,
    Pull,
    Reclaim,
    StartEarly,
    Withdraw,
    WithdrawTicket,
)
from asynckv.engine import ending
from tests.engines import BLOCKS, memory
from tests.test_arguments import HOSTILE
from tests.test_follows import TICKET, target_of
from tests.ways import PATIENCE_S, WAYS, Held, Native, until

pytestmark = pytest.mark.nixl


class Side:
    """An engine in one of the ways, its memory, and all that it has told so far."""

    def __init__(self, way: str, engine_id: str, seed: int, **config: Any) -> None:
        registration, self.arrays = memory(seed)
        pull = PullConfig(handshake_s=5.0, drain_s=0.2)
        settings: dict[str, Any] = {
            "lease": LeaseConfig(lease_s=2.0, grant_s=0.5),
            "pull": pull,
            "nixl": NixlConfig(posting_threads=0),
        }
        self.way = WAYS[way](EngineConfig(engine_id=engine_id, **(settings | config)), registration)
        self.told = Finished()

    def hold(self) -> Held:
        """Let this engine's transfers seem to run on, until told otherwise."""
        driver = self.way.engine._driver
        plane = driver.data = Held(cast(NixlPlane, driver.data))
        return plane

    def submit(self, *orders: Order) -> None:
        self.way.submit(orders)

    def take(self) -> Finished:
        """Take what has ended, and keep it with what had."""
        for each in dataclasses.fields(news := self.way.take_finished()):
            getattr(self.told, each.name).extend(getattr(news, each.name))
        return self.told

    def blocks(self, ids: list[int]) -> bytes:
        return b"".join(a.reshape(2, BLOCKS, -1)[:, ids].tobytes() for a in self.arrays)


class Pair:
    """A prefill and a decode engine, both in the same way."""

    def __init__(self, way: str, **config: Any) -> None:
        self.prefill, self.decode = Side(way, "prefill", 1, **config), Side(way, "decode", 100, **config)

    def start(self) -> Pair:
        self.prefill.way.start()
        self.decode.way.start()
        self.group = PrefillRanks("prefill", [self.prefill.way.engine.endpoint])
        return self

    def close(self) -> None:
        # The decode side first: its goodbye is heard, and what was granted to it need not run out.
        self.decode.way.close()
        self.prefill.way.close()

    def params(self, name: str, blocks: list[int]) -> dict[str, Any]:
        return self.group.make_params(name, [(0, blocks)], 16 * len(blocks), written=True)

    def until(self, condition: Callable[[Finished, Finished], object]) -> None:
        """Let both run until what they have told is as wanted."""
        until(lambda: condition(self.prefill.take(), self.decode.take()), self.prefill.way, self.decode.way)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "thread":
        # While one of two closes, the other's loop does not run: to wait for its answers is in vain.
        monkeypatch.setattr(ending, "GRACE_S", 0.1)
    return str(request.param)


@pytest.fixture
def pair(way: str) -> Iterator[Pair]:
    pair = Pair(way).start()
    try:
        yield pair
    finally:
        pair.close()


def holding(way: str, **config: Any) -> tuple[Pair, Held]:
    """Return a started pair whose reads can be held."""
    pair = Pair(way, **config)
    plane = pair.decode.hold()
    return pair.start(), plane


def pull(name: str, blocks: list[int], params: dict[str, Any], **more: Any) -> Pull:
    return Pull(request_id=name, groups=[(0, blocks)], params=params, **more)


# -- what ends well --------------------------------------------------------------------------------------


def test_orders_of_a_step_move_the_right_bytes_and_each_is_told_once(pair: Pair) -> None:
    prefill, decode = pair.prefill, pair.decode
    every = {f"r{i}": pair.params(f"r{i}", [i, i + 8]) for i in range(8)}
    prefill.submit(*(Lend(params) for params in every.values()))
    decode.submit(
        *(Announce(name, params) for name, params in every.items()),
        *(pull(name, [31 - i, i], every[name]) for i, name in enumerate(every)),
    )
    pair.until(lambda p, d: len(p.finished_sending) == len(d.finished_recving) == 8)
    assert {result.request_id for result in decode.told.finished_recving} == set(every)
    assert {(end.request_id, end.cause) for end in prefill.told.finished_sending} == {
        (name, "released") for name in every
    }
    for i in range(8):
        assert decode.blocks([31 - i, i]) == prefill.blocks([i, i + 8])
    told = len(decode.told.finished_recving), len(prefill.told.finished_sending)
    decode.way.turn()
    assert not decode.way.take_finished()
    assert not prefill.way.take_finished()
    assert told == (8, 8)
    assert not any((decode.told.failed, decode.told.refused, prefill.told.refused))


def test_a_full_prefix_hit_is_discharged_without_a_read(pair: Pair) -> None:
    first, second, third = (pair.params(name, [1]) for name in ("a", "b", "c"))
    pair.prefill.submit(Lend(first), Lend(second), Lend(third))
    # Announced or not, and as a pull of nothing.
    pair.decode.submit(Announce("b", second), Cancel("a", first), Cancel("b", second))
    pair.decode.submit(Pull(request_id="c", groups=[(0, [])], params=third))
    pair.until(lambda p, d: len(p.finished_sending) == 3 and d.finished_recving)
    assert {end.cause for end in pair.prefill.told.finished_sending} == {"released"}
    assert [result.num_bytes for result in pair.decode.told.finished_recving] == [0]
    assert not pair.decode.told.refused


def test_what_is_lent_later_is_read_when_it_is_there(pair: Pair) -> None:
    params = pair.params("r", [3])
    pair.decode.submit(pull("r", [5], params))
    until(lambda: gauge(pair.prefill, "parked"), pair.decode.way, pair.prefill.way)
    pair.prefill.submit(Lend(params))
    pair.until(lambda p, d: d.finished_recving and p.finished_sending)
    assert pair.decode.blocks([5]) == pair.prefill.blocks([3])


def test_what_is_followed_is_offered_when_it_is_lent_and_then_pulled(pair: Pair) -> None:
    other, engine = f"{2:032x}", pair.prefill.way.engine
    pair.decode.submit(Follow("d", target_of(engine)), Follow("e", target_of(engine, other)))
    until(lambda: gauge(pair.prefill, "parked") == 2, pair.decode.way, pair.prefill.way)
    params = pair.params("r", [3])
    pair.prefill.submit(Lend(params, ticket=TICKET), WithdrawTicket(other))
    pair.until(lambda p, d: d.offered and d.not_offered)
    assert pair.decode.told.offered == [Offer("d", params)]
    assert [(each.request_id, getattr(each.error, "reason", "")) for each in pair.decode.told.not_offered] == [
        ("e", "withdrawn")
    ]
    pair.decode.submit(Announce("d", params), pull("d", [5], params))
    pair.until(lambda p, d: d.finished_recving and p.finished_sending)
    assert pair.decode.blocks([5]) == pair.prefill.blocks([3])
    assert not pair.decode.told.refused


def ahead(pair: Pair) -> tuple[dict[str, Any], list[int]]:
    """Read a piece of two blocks of a request that is followed, and return the params of all four, and their places."""
    mine, decode, prefill = [5, 9, 7, 8], pair.decode, pair.prefill
    decode.submit(Follow("d", target_of(prefill.way.engine), takes_pieces=True))
    pair.until(lambda p, d: p.followed)
    piece = pair.group.make_params("r/2", [(0, [3, 1])], 32, written=True, recall=True)
    prefill.submit(LendPiece(piece, TICKET))
    pair.until(lambda p, d: d.offered)
    assert decode.told.offered == [Offer("d", piece, is_piece=True)]
    decode.submit(StartEarly(request_id="d", groups=[(0, mine)], params=piece))
    pair.until(lambda p, d: len(p.followed) == 2)
    assert set(prefill.told.followed) == {TICKET}
    return pair.params("r", [3, 1, 4, 2]), mine


def test_a_head_start_and_its_pull_are_told_as_one(pair: Pair) -> None:
    prefill, decode = pair.prefill, pair.decode
    params, mine = ahead(pair)
    prefill.submit(Lend(params, ticket=TICKET))
    pair.until(lambda p, d: len(d.offered) == 2)
    assert decode.told.offered[1] == Offer("d", params)
    decode.submit(pull("d", mine, params, goes_on=True))
    pair.until(lambda p, d: d.finished_recving and p.finished_sending)
    assert decode.blocks(mine) == prefill.blocks([3, 1, 4, 2])
    assert [result.num_tokens for result in decode.told.finished_recving] == [64]
    assert [end.request_id for end in prefill.told.finished_sending] == ["r"], "a piece is no request"
    assert not any((decode.told.failed, decode.told.refused, prefill.told.refused))


@pytest.mark.parametrize("is_offered", [False, True])
def test_a_pull_behind_a_head_start_that_has_failed_fills_nothing_and_releases(pair: Pair, is_offered: bool) -> None:
    prefill, decode = pair.prefill, pair.decode
    params, mine = ahead(pair)
    decode.submit(Cancel("d"))
    pair.until(lambda p, d: d.failed)
    (failure,) = decode.told.failed
    assert (type(failure.error), failure.is_held, failure.is_unbegun) == (PullCancelled, False, False)
    if is_offered:
        prefill.submit(Lend(params, ticket=TICKET))
    decode.submit(pull("d", mine, params, goes_on=True))
    if not is_offered:
        prefill.submit(Lend(params, ticket=TICKET))
    pair.until(lambda p, d: p.finished_sending)
    assert [end.cause for end in prefill.told.finished_sending] == ["released"]
    assert decode.blocks([7, 8]) != prefill.blocks([4, 2])
    assert len(decode.told.failed) == 1
    assert decode.told.finished_recving == []


def test_pieces_that_were_taken_back_are_read_again(pair: Pair) -> None:
    prefill, decode = pair.prefill, pair.decode
    params, mine = ahead(pair)
    prefill.submit(EndPieces(TICKET), Lend(params, ticket=TICKET))
    pair.until(lambda p, d: len(d.offered) == 2)
    decode.submit(pull("d", mine, params, goes_on=True))
    pair.until(lambda p, d: d.finished_recving)
    assert decode.blocks(mine) == prefill.blocks([3, 1, 4, 2]), "what was proven before stays"


def gauge(side: Side, name: str) -> int:
    return side.way.statistics(0.0).gauges[name]


# -- what does not ---------------------------------------------------------------------------------------


def test_a_cancelled_request_is_discharged_in_every_stage(pair: Pair) -> None:
    prefill, decode = pair.prefill, pair.decode
    announced, waiting, at_once = (pair.params(name, [i]) for i, name in enumerate(("announced", "waiting", "at once")))
    # Before it is known, announced, in the same hand-over as its pull, and while it waits to be lent.
    decode.submit(Cancel("unknown"), Announce("announced", announced), pull("at once", [2], at_once), Cancel("at once"))
    decode.submit(pull("waiting", [3], waiting))
    # Two claims, and a release of what was given up at once.
    until(lambda: gauge(prefill, "parked") == 3, decode.way, prefill.way)
    decode.submit(Cancel("announced"), Cancel("waiting"))
    pair.until(lambda p, d: len(d.failed) == 2)
    assert {(f.request_id, type(f.error), f.is_held) for f in decode.told.failed} == {
        ("at once", PullCancelled, False),
        ("waiting", PullCancelled, False),
    }
    prefill.submit(Lend(announced), Lend(waiting), Lend(at_once))
    pair.until(lambda p, d: len(p.finished_sending) == 3)
    assert {end.cause for end in prefill.told.finished_sending} == {"released"}
    assert not decode.told.refused
    until(lambda: gauge(decode, "pulls") == 0, decode.way, prefill.way)


def cancel_while_read(pair: Pair, plane: Held, block: int = 2) -> None:
    """Lend a request, pull it, and cancel that while the read may still write the block."""
    plane.is_holding, before = True, plane.running
    params = pair.params(f"lent {block}", [1])
    pair.prefill.submit(Lend(params))
    pair.decode.submit(pull("r", [block], params))
    until(lambda: plane.running > before, pair.prefill.way, pair.decode.way)
    pair.decode.submit(Cancel("r"))


def test_blocks_that_may_still_be_written_are_held_and_then_returned(way: str) -> None:
    pair, plane = holding(way)
    cancel_while_read(pair, plane)
    pair.until(lambda p, d: d.failed)
    [failed] = pair.decode.told.failed
    assert failed.is_held
    assert isinstance(failed.error, PullError)
    assert failed.error.held == {0: (2,)}
    assert not pair.decode.told.returned
    pair.decode.way.call(plane.let_go(), PATIENCE_S)
    pair.until(lambda p, d: d.returned and p.finished_sending)
    assert pair.decode.told.returned == ["r"]
    assert not pair.decode.told.retired
    pair.close()


def test_an_id_is_returned_when_no_attempt_under_it_holds_blocks(way: str) -> None:
    pair, plane = holding(way)
    cancel_while_read(pair, plane, 2)
    pair.until(lambda p, d: len(d.failed) == 1)
    cancel_while_read(pair, plane, 3)
    pair.until(lambda p, d: len(d.failed) == 2)
    pair.decode.way.call(plane.let_go(), PATIENCE_S)
    pair.until(lambda p, d: d.returned and len(p.finished_sending) == 2)
    assert [failed.is_held for failed in pair.decode.told.failed] == [True, True]
    assert pair.decode.told.returned == ["r"]
    pair.close()


def test_blocks_that_never_return_are_retired(way: str) -> None:
    pair, plane = holding(way, pull=PullConfig(drain_s=0.05, held_s=0.2))
    cancel_while_read(pair, plane)
    pair.until(lambda p, d: d.retired)
    assert [(f.request_id, f.is_held) for f in pair.decode.told.failed] == [("r", True)]
    assert pair.decode.told.retired == ["r"]
    assert not pair.decode.told.returned
    pair.decode.way.call(plane.let_go(), PATIENCE_S)
    pair.close()


@pytest.mark.slow
def test_a_lent_request_expires_or_is_taken_back(pair: Pair) -> None:
    revoked, never = pair.params("revoked", [2]), pair.params("never", [3])
    expired = pair.group.make_params("expired", [(0, [1])], 16, written=True, lease_s=2.0)
    pair.prefill.submit(Lend(expired), Lend(revoked), Withdraw(revoked), Withdraw(never), Reclaim(9))
    pair.until(lambda p, d: p.finished_sending)
    assert [(end.request_id, end.cause) for end in pair.prefill.told.finished_sending] == [("revoked", "revoked")]
    # What was withdrawn is refused, and by the owner.
    pair.decode.submit(pull("revoked", [1], revoked), pull("never", [2], never))
    pair.until(lambda p, d: len(d.failed) == 2)
    assert {type(f.error) for f in pair.decode.told.failed} == {LeaseRefused}
    pair.until(lambda p, d: len(p.finished_sending) == 2)
    assert (pair.prefill.told.finished_sending[1].request_id, pair.prefill.told.finished_sending[1].cause) == (
        "expired",
        "expired",
    )
    pair.decode.submit(pull("expired", [1], expired))
    pair.until(lambda p, d: len(d.failed) == 3)
    assert isinstance(pair.decode.told.failed[2].error, LeaseRefused)


def test_what_is_wrong_with_one_order_loses_none_of_the_others(pair: Pair) -> None:
    good, used = pair.params("good", [1]), pair.params("used", [2])
    foreign = PrefillRanks("other", [pair.prefill.way.engine.endpoint]).make_params("f", [(0, [1])], 16)
    wrong: list[Any] = [
        Lend({"junk": True}),
        Lend(foreign),
        Lend(cast(Any, 7)),
        None,
        "an order",
        Lend(used),
        Lend(used),
        Announce(cast(Any, 7), good),
        Cancel("d", {}),
        Cancel(cast(Any, None)),
        Withdraw(cast(Any, object())),
        Lend(good),
    ]
    pair.prefill.way.submit(wrong)
    pulls: list[Any] = [
        Pull(request_id="no groups", groups=cast(Any, None), params=good),
        Pull(request_id=cast(Any, ["unhashable"]), groups=[], params=good),
        pull("junk", [1], {"junk": True}),
        pull("no blocks", [BLOCKS + 1], good),
        Pull(request_id="no time", groups=[(0, [1])], params=good, timeout_s=cast(Any, "long")),
        pull("good", [3], good),
    ]
    pair.decode.way.submit(pulls)
    pair.until(
        lambda p, d: d.finished_recving and len(p.finished_sending) == 1 and len(d.failed) == 5 and len(p.refused) == 10
    )
    refused = pair.prefill.told.refused
    assert [r.order for r in refused] == [order for i, order in enumerate(wrong) if i not in (5, 11)]
    kinds = {type(r.error) for r in refused}
    assert kinds == {RemoteProtocolError, LocalProtocolError}
    assert [f.request_id for f in pair.decode.told.failed] == [order.request_id for order in pulls[:-1]]
    assert pair.decode.blocks([3]) == pair.prefill.blocks([1])
    assert [r.request_id for r in pair.decode.told.finished_recving] == ["good"]


def test_an_order_whose_end_could_be_taken_for_that_of_another_is_refused(way: str) -> None:
    pair, plane = holding(way)
    plane.is_holding = True
    params, other = pair.params("r", [1]), pair.params("r", [4])
    pair.prefill.submit(Lend(params), Lend(other))
    pair.decode.submit(pull("r", [2], params), pull("r", [3], other))
    pair.until(lambda p, d: p.refused and d.refused)
    assert [r.order for r in pair.prefill.told.refused] == [Lend(other)]
    (told,) = pair.decode.told.refused
    assert isinstance(told.order, Pull)
    assert told.order.groups == [(0, [3])]
    pair.decode.way.call(plane.let_go(), PATIENCE_S)
    pair.until(lambda p, d: d.finished_recving and p.finished_sending)
    assert pair.decode.blocks([2]) == pair.prefill.blocks([1])
    pair.close()


@pytest.mark.slow
def test_a_prefill_engine_that_is_gone_fails_its_pulls_and_no_others(way: str) -> None:
    pair, other = Pair(way, pull=PullConfig(handshake_s=1.0)).start(), Side(way, "other", 7)
    other.way.start()
    gone = PrefillRanks("other", [other.way.engine.endpoint]).make_params("gone", [(0, [1])], 16)
    other.way.close()
    good = pair.params("good", [1])
    pair.prefill.submit(Lend(good))
    pair.decode.submit(pull("gone", [4], gone), pull("good", [5], good))
    pair.until(lambda p, d: d.failed and d.finished_recving)
    assert [type(f.error) for f in pair.decode.told.failed] == [PeerUnreachable]
    pair.close()


PREFILL = """
import json, sys
from asynckv import EngineConfig, EngineThread, PrefillRanks
from tests.engines import memory

with EngineThread(EngineConfig(engine_id="prefill"), memory(1)[0]) as thread:
    group = PrefillRanks("prefill", [thread.engine.endpoint])
    print(json.dumps([group.make_params(name, [(0, [1])], 16) for name in ("waiting", "announced")]), flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_prefill_process_that_is_killed_fails_its_pulls(way: str) -> None:
    decode = Side(way, "decode", 1, pull=PullConfig(heartbeat_s=0.1, suspect_s=0.3, gone_s=1.0))
    decode.way.start()
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PREFILL], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        waiting, announced = json.loads(process.stdout.readline())
        decode.submit(pull("waiting", [2], waiting), Announce("announced", announced))
        until(lambda: decode.way.statistics(0.0).counters.get("sent.claim", 0) >= 2, decode.way)
        process.kill()
    until(lambda: decode.take().failed, decode.way)
    decode.submit(pull("announced", [3], announced))
    until(lambda: len(decode.take().failed) == 2, decode.way)
    assert {type(f.error) for f in decode.told.failed} <= {PeerLost, PeerUnreachable}
    decode.way.close()


# -- life ------------------------------------------------------------------------------------------------


def test_a_drained_engine_takes_nothing_new_and_names_what_is_left(pair: Pair) -> None:
    params, late = pair.params("r", [1]), pair.params("late", [2])
    pair.prefill.submit(Lend(params))
    until(lambda: gauge(pair.prefill, "leases"), pair.prefill.way)
    [left] = pair.prefill.way.call(pair.prefill.way.engine.drain(0.0), PATIENCE_S)
    assert left.request_id == "r"
    pair.prefill.submit(Lend(late))
    pair.decode.submit(pull("r", [3], params))
    pair.until(lambda p, d: p.refused and d.finished_recving and p.finished_sending)
    assert [(r.order, type(r.error)) for r in pair.prefill.told.refused] == [(Lend(late), EngineClosed)]
    assert pair.prefill.way.call(pair.prefill.way.engine.drain(1.0), PATIENCE_S) == ()


def test_a_suspended_engine_tells_what_was_cut_short_and_serves_anew(pair: Pair) -> None:
    prefill, decode = pair.prefill, pair.decode
    params = pair.params("r", [1])
    prefill.submit(Lend(params))
    decode.submit(pull("w", [9], pair.params("w", [2])))
    until(lambda: gauge(prefill, "parked") and gauge(prefill, "leases"), prefill.way, decode.way)
    for side in (decode, prefill):
        side.way.call(side.way.engine.suspend(0.0), PATIENCE_S)
    pair.until(lambda p, d: p.finished_sending and d.failed)
    assert [end.cause for end in prefill.told.finished_sending] == ["revoked"]
    decode.submit(pull("asleep", [1], params))
    pair.until(lambda p, d: len(d.failed) == 2)
    assert isinstance(decode.told.failed[1].error, EngineClosed)
    for side in (decode, prefill):
        side.way.call(side.way.engine.resume(), PATIENCE_S)
    engine = prefill.way.engine
    pair.group = PrefillRanks("prefill", [engine.endpoint], memory_epoch=engine.memory_epoch)
    again = pair.params("again", [4])
    prefill.submit(Lend(again))
    decode.submit(pull("again", [6], again))
    pair.until(lambda p, d: d.finished_recving and len(p.finished_sending) == 2)
    assert decode.blocks([6]) == prefill.blocks([4])


@pytest.mark.slow
def test_a_promise_is_cut_short_by_an_engine_that_closes_without_time(way: str) -> None:
    pair, plane = holding(way, lease=LeaseConfig(grant_s=10.0))
    params = pair.params("r", [1])
    pair.prefill.submit(Lend(params))
    plane.is_holding = True
    pair.decode.submit(pull("r", [2], params))
    until(lambda: plane.running and not gauge(pair.decode, "pulls_unanswered"), pair.prefill.way, pair.decode.way)
    [left] = pair.prefill.way.close(4.0)
    assert left.request_id == "r"
    assert [end.cause for end in pair.prefill.take().finished_sending] == ["closed"]
    pair.decode.way.call(plane.let_go(), PATIENCE_S)
    until(lambda: pair.decode.take().failed, pair.decode.way)
    pair.close()


def test_closing_tells_of_everything_that_was_under_way(way: str) -> None:
    pair = Pair(way).start()
    prefill, decode = pair.prefill, pair.decode
    lent, waiting = pair.params("lent", [1]), pair.params("waiting", [2])
    prefill.submit(Lend(lent))
    decode.submit(pull("waiting", [3], waiting), Announce("announced", pair.params("a", [5])))
    until(lambda: gauge(prefill, "parked") == 2 and gauge(prefill, "leases"), prefill.way, decode.way)
    late = pair.params("late", [6])
    decode.submit(pull("just handed over", [7], late))
    prefill.submit(Lend(late))
    decode.way.close()
    prefill.way.close()
    told = decode.take()
    failed, received = {f.request_id for f in told.failed}, {r.request_id for r in told.finished_recving}
    # What was just handed over may be read before the engine looks at its end, and is then told as received.
    assert "waiting" in failed
    assert sorted([*failed, *received]) == ["just handed over", "waiting"]
    # A read may have been under way; when the engine has closed, nothing is.
    assert {f.request_id for f in told.failed if f.is_held} == set(told.returned)
    assert not told.retired
    ended = prefill.take()
    assert {end.request_id for end in ended.finished_sending} | {
        cast(Lend, r.order).params["request_id"] for r in ended.refused
    } == {"lent", "late"}
    for side in (prefill, decode):
        with pytest.raises(EngineClosed):
            side.submit(Cancel("r"))
        assert not side.way.take_finished()
        side.way.close() if not isinstance(side.way, Native) else None


def test_a_call_returns_what_its_coroutine_does_and_raises_what_it_raises(pair: Pair) -> None:
    way = pair.decode.way

    async def answer() -> int:
        return 42

    async def fail() -> None:
        raise ZeroDivisionError("in here")

    assert way.call(answer(), 1.0) == 42
    with pytest.raises(ZeroDivisionError, match="in here"):
        way.call(fail(), 1.0)


def test_a_call_that_takes_too_long_is_cancelled(pair: Pair) -> None:
    way, ends = pair.decode.way, []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append(True)

    with pytest.raises(TimeoutError):
        way.call(forever(), 0.01)
    until(lambda: ends, way)
    assert way.call(asyncio.sleep(0, 7), PATIENCE_S) == 7


def test_requests_leave_no_garbage_that_only_the_collector_finds(pair: Pair) -> None:
    def some(first: int) -> None:
        every = [pair.params(f"{first}-{i}", [i]) for i in range(8)]
        pair.prefill.submit(*map(Lend, every))
        pair.decode.submit(*(pull(p["request_id"], [8 + i], p) for i, p in enumerate(every)))
        pair.decode.submit(pull("junk", [BLOCKS], every[0]), Cancel("junk", {}))
        pair.until(lambda p, d: len(p.finished_sending) == len(d.finished_recving) == 8 and d.failed and d.refused)
        pair.prefill.told, pair.decode.told = Finished(), Finished()

    some(0)
    while gc.collect():
        pass  # what other tests left may take several rounds: simulated planes make types
    gc.disable()
    try:
        for i in range(1, 5):
            some(i)
        assert gc.collect() < 16, "32 requests and 8 failures"
    finally:
        gc.enable()


def test_statistics_are_a_snapshot(pair: Pair) -> None:
    params = pair.params("r", [1])
    pair.prefill.submit(Lend(params))
    pair.decode.submit(pull("r", [2], params))
    pair.until(lambda p, d: d.finished_recving and p.finished_sending)
    until(lambda: pair.decode.way.statistics(0.0).counters.get("data.posts"), pair.decode.way)
    if not isinstance(pair.decode.way, Native):
        counters = pair.decode.way.statistics(3600.0).counters
        assert counters["embed.orders"] == 1


# -- whatever is given -----------------------------------------------------------------------------------


def test_whatever_stands_in_an_order_it_is_told_once_and_the_others_are_carried_out(pair: Pair) -> None:
    orders: list[Any] = list(HOSTILE.values())
    params = pair.params("r", [1])
    for good in (
        Announce("a", params),
        pull("p", [2], params),
        Cancel("d", params),
        Cancel("c"),
        Lend(params, ticket=TICKET),
        Withdraw(params),
        Reclaim(1),
        WithdrawTicket(TICKET),
        Follow("f", target_of(pair.prefill.way.engine)),
        StartEarly(request_id="e", groups=[(0, [4])], params=params),
        LendPiece(params | {"written": True, "recall": True}, TICKET),
        EndPieces(TICKET),
    ):
        orders += [
            msgspec.structs.replace(good, **{name: value})
            for name in good.__struct_fields__
            for what, value in HOSTILE.items()
            if not (isinstance(good, Pull) and ((name == "timeout_s" and value is None) or name == "goes_on"))
        ]
    late = pair.params("late", [3])
    pair.decode.way.submit([*orders, pull("late", [9], late)])
    pair.prefill.submit(Lend(late))
    until(
        lambda: pair.decode.take().finished_recving and pair.prefill.take().finished_sending,
        pair.decode.way,
        pair.prefill.way,
    )
    pair.close()
    told = pair.decode.take()
    pulls = [order for order in orders if isinstance(order, Pull | StartEarly)]
    refused = [r.order for r in told.refused if isinstance(r.order, Pull | StartEarly)]
    assert {order.request_id for order in refused} <= {"p", "e", "3"}, "only one at a time can have an id"
    assert len(told.failed) + len(told.finished_recving) + len(refused) == len(pulls) + 1
    assert [id(r.order) for r in told.refused[: len(HOSTILE)]] == [id(value) for value in HOSTILE.values()]
    follows = [order for order in orders if isinstance(order, Follow)]
    unfollowed = [r.order for r in told.refused if isinstance(r.order, Follow)]
    assert len(told.not_offered) + len(unfollowed) == len(follows)
    assert {order.request_id for order in unfollowed} <= {"f"}
    lends = [r for r in told.refused if isinstance(r.order, Lend)]
    assert len(lends) == sum(isinstance(order, Lend) for order in orders), "these params are another engine's"
    for error in [f.error for f in (*told.failed, *told.not_offered)] + [r.error for r in told.refused]:
        assert isinstance(error, AsyncKVError), error
        assert len(str(error)) < 2000


def test_arguments_are_refused_by_name() -> None:
    config, registration = EngineConfig(engine_id="e", lease=LeaseConfig(grant_s=0.5)), memory(1)[0]
    for value in HOSTILE.values():
        with pytest.raises(ConfigError):
            EngineThread(cast(Any, value), registration)
        with pytest.raises(ConfigError):
            EngineThread(config, cast(Any, value))
    with EngineThread(config, registration) as engine:
        calls: dict[str, Callable[[Any], object]] = {
            "timeout_s": engine.close,
            "max_age_s": engine.statistics,
            "work": lambda value: engine.call(value, 1.0),
            "time": lambda value: engine.call(asyncio.sleep(0), value),
            "turn": engine.wait,
        }
        for name, call in calls.items():
            for what in ("none", "true", "nan", "-1", "10^400", "text", "list", "object", "numpy array"):
                with pytest.raises(LocalProtocolError):
                    call(HOSTILE[what])
                assert name
        for what in ("none", "1.5", "object", "function"):
            with pytest.raises(LocalProtocolError, match="give a list of orders"):
                engine.submit(cast(Any, HOSTILE[what]))


def test_a_worker_that_stands_still_lets_go_of_what_it_only_announced() -> None:
    pair = Pair("thread").start()
    try:
        lease = LeaseConfig(lease_s=2.0, grant_s=0.5)
        group = PrefillRanks("prefill", [pair.prefill.way.engine.endpoint], lease=lease)
        params = group.make_params("p", [(0, [3])], 16, written=True)
        pair.prefill.submit(Lend(params=params))
        pair.decode.submit(Announce(request_id="d", params=params, wait_s=3600.0))
        until(lambda: pair.prefill.take().finished_sending, pair.prefill.way)  # nothing is taken of the decode engine
        pair.decode.submit(pull("d", [5], params))
        until(lambda: pair.decode.take().failed, pair.decode.way)
        assert pair.decode.told.failed[0].error.reason == "standstill"  # type: ignore[attr-defined]
    finally:
        pair.close()


def test_news_that_come_while_others_are_taken_are_not_those_that_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that stops right then has news that it does not take, and that shows."""
    with EngineThread(EngineConfig(engine_id="e"), memory(1)[0]) as engine:
        engine.fileno()  # it sleeps until there is news
        engine.take_finished()
        assert engine.engine._driver.core.decode.alive_at == math.inf
        monkeypatch.setattr(EngineThread, "_has_news", True)
        engine.take_finished()
        assert engine.engine._driver.core.decode.alive_at <= engine.engine._driver.clock.now()


# -- Ends of threads and processes ------------------------------------------------------------------------------------


async def test_a_pull_that_was_carried_out_just_before_the_engine_ends_has_begun() -> None:
    """Its prefill ranks are told that it ends. Nothing else would tell them, and its lease would have to run out."""
    (ours, _), (theirs, _) = memory(1), memory(2)
    async with Engine(EngineConfig(engine_id="prefill"), ours) as prefill:
        decode = Engine(EngineConfig(engine_id="decode"), theirs)
        await decode.start()
        params = PrefillRanks("prefill", [prefill.endpoint]).make_params("r", [(0, [1])], 16, written=True)
        lent, desk = prefill.lend(params), EngineDesk(decode, lambda: None)
        desk.submit([Pull(request_id="r", groups=[(0, [1])], params=params)])
        desk.carry_out()
        await desk.finish()
        assert list(decode._driver.core.decode.by_request) == ["r"]
        await decode.aclose()
        await desk.settle()
        (failed,) = desk.take_finished().failed
        assert isinstance(failed.error, PullError)
        assert (await lent.wait_released()).cause == "released"


async def test_an_interrupt_in_the_middle_of_an_order_is_raised_and_the_order_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Engine(EngineConfig(engine_id="prefill"), memory(1)[0]) as engine:
        desk = EngineDesk(engine, lambda: None)

        def interrupted(*args: Any, **more: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(engine, "announce", interrupted)
        orders = [Announce("a", {}), Lend({"from": "behind"})]
        desk.submit(orders)
        with pytest.raises(KeyboardInterrupt):
            desk.carry_out()
        desk.carry_out()
        told = [(each.order, type(each.error)) for each in desk.take_finished().refused]
        assert told == [(orders[0], EngineClosed), (orders[1], RemoteProtocolError)]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_child_of_a_fork_takes_nothing_that_its_parent_is_told() -> None:
    with EngineThread(EngineConfig(engine_id="prefill"), memory(1)[0]) as engine:
        engine.submit([Lend({"number": 1})])
        until = time.monotonic() + 10
        while not engine._desk.has_news and time.monotonic() < until:
            engine.wait(0.01)
        if not (pid := os.fork()):
            try:
                found = bool(engine.take_finished())
            except EngineClosed:
                found = False
            finally:
                os._exit(found)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert [type(each.order) for each in engine.take_finished().refused] == [Lend]
        engine.submit([Cancel("r")])


async def test_a_loan_of_which_no_end_is_told_is_told_as_closed_once() -> None:
    """A loop that ends in an unusual way tells no more ends; a worker waits for each of its orders."""
    async with Engine(EngineConfig(engine_id="prefill"), memory(1)[0]) as engine:
        params = PrefillRanks("prefill", [engine.endpoint]).make_params("r", [(0, [1])], 16, written=True)
        desk = EngineDesk(engine, lambda: None)
        desk.submit([Lend(params)])
        desk.carry_out()
        desk._abandon(RuntimeError("the loop is gone"))
        engine.withdraw(params)
        await asyncio.sleep(0)
        [sent] = desk.take_finished().finished_sending
        assert (sent.request_id, sent.cause, sent.owed) == ("r", "closed", ("*",))


def test_what_is_handed_over_while_orders_are_carried_out_wakes_the_loop_again(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = EngineThread(EngineConfig(engine_id="prefill"), memory(1)[0])
    thread._wake()
    with monkeypatch.context() as patch:
        patch.setattr(thread._desk, "carry_out", thread._wake)
        for _ in range(2):
            thread._on_bell()
            assert select.select([thread._bell.fileno()], [], [], 0)[0], "else what was handed over waits for ever"
    silence = thread._bell.silence

    def silence_late() -> None:
        thread._wake()  # just before
        silence()

    monkeypatch.setattr(thread._bell, "silence", silence_late)
    thread._on_bell()
    thread._wake()
    assert select.select([thread._bell.fileno()], [], [], 0)[0], "else no later order wakes the loop"
