"""Any order of events, in vLLM's own scheduler: it never raises, every order fits, and in the end nothing is left.

The workers of these tests obey the rules of the connector: every pull that they were given is reported once, some steps
later, well or badly; so is every lent request. What breaks a rule ends EngineCore: the scheduler asserts.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from asynckv.embed.orders import Announce, Cancel, Failed, Follow, Lend, Offer, Order, Pull, WithdrawTicket
from asynckv.errors import NoOffer
from asynckv.hashes import token_hashes
from asynckv.integrations.vllm.chain import HASH_TOKENS
from asynckv.integrations.vllm.handover import FollowReports
from asynckv.scheduler import PrefillRanks
from tests.vllm.schedulers import DENSE, HYBRID, MIXED, STATES, WINDOW, Group, Side

SHELF = {
    "kv_connector": "Shelf",
    "kv_connector_module_path": "tests.vllm.beside",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"tokens": 32, "keeps": True},
}
GROUP = PrefillRanks("prefill", [{"tp_rank": 0, "address": "tcp://127.0.0.1:9", "incarnation": "a"}], null_block=0)


def lent(groups: tuple[Group, ...], num_tokens: int, prompt: Sequence[int]) -> dict[str, Any]:
    """What a prefill engine gives out for so many tokens of a prompt, or of one that begins with it."""
    lists: list[tuple[int, list[int | None]]] = []
    for kind, size, *more in groups:
        end = -(-num_tokens // size)
        begin = 0 if kind == "attention" else end - 1
        if kind == "window":
            begin = max(num_tokens - more[0] + 1, 0) // size
        lists.append((begin * size, list(range(1 + begin, 1 + end))))
    tokens = [*prompt, *range(num_tokens)][:num_tokens]
    params = GROUP.make_params(
        "there", lists, num_tokens, written=True, hashes=token_hashes(tokens, HASH_TOKENS), hash_tokens=HASH_TOKENS
    )
    return {"do_remote_prefill": True, "do_remote_decode": False, "asynckv": json.loads(json.dumps(params))}


class Life:
    """An engine, its clients and its workers."""

    def __init__(self, side: Side, groups: tuple[Group, ...], seed: int) -> None:
        self.side, self.groups, self.chance = side, groups, random.Random(seed)
        self.orders: list[Order] = []
        self.pulling: list[str] = []
        self.lent: list[str] = []
        self.others: list[str] = []
        self.failed: set[str] = set()
        """Loads of the other connector."""
        self.num_added = 0
        self.families: list[tuple[list[int], dict[str, Any]]] = []
        self.tickets: dict[str, tuple[list[int], int]] = {}
        """Prompts that are followed, and how many tokens of each are lent in the end."""
        self.followers: set[str] = set()
        self.brought: set[str] = set()
        self.waits: list[tuple[str, str]] = []
        """What each of two workers follows and has not reported yet: name and ticket."""
        self.offered: dict[str, dict[str, Any]] = {}
        self.is_dense = len(groups) == 1

    def prompt(self) -> list[int]:
        start = self.chance.choice([0, 0, 1 + self.num_added])  # half of them share a prefix
        return [
            (start * 977 + i * 31) % 30_000 for i in range(self.chance.choice([1, 2, 15, 16, 17, 33, 64, 65, 120, 200]))
        ]

    def add(self) -> None:
        self.num_added += 1
        kind = self.chance.choice(
            ["plain", "fetch", "fetch", "follow", "follow", "sibling", "prefill", "both", "junk", "logprobs"]
        )
        name = f"{'shelf' if self.chance.random() < 0.3 else 'r'}{self.num_added}"
        prompt, most, fields = self.prompt(), self.chance.choice([1, 1, 2, 5, 30]), dict[str, Any]()
        params: Any = None
        if kind in ("fetch", "both", "logprobs", "follow"):
            num_tokens = max(
                1, len(prompt) - (0 if self.is_dense else 1) + self.chance.choice([0, 0, 0, 0, -1, -20, 7])
            )
            if kind == "follow" or self.chance.random() < 0.1:
                ticket = f"{self.num_added:032x}"
                self.tickets[ticket] = prompt, num_tokens
                follow = {
                    "ticket": ticket,
                    "engine_id": "prefill",
                    "endpoints": lent(self.groups, 1, [1])["asynckv"]["endpoints"],
                }
                params = {"do_remote_prefill": True, "asynckv_follow": follow}
            else:
                params = lent(self.groups, num_tokens, prompt)
            self.families.append((prompt, params))
        elif kind == "sibling" and self.families:
            prompt, params = self.chance.choice(self.families[-6:])
            params = copy.deepcopy(params) if self.chance.random() < 0.7 else params
            params["do_remote_prefill"] = True
        elif kind == "prefill":
            params, most = {"do_remote_decode": True, "remote_block_ids": None}, self.chance.choice([1, 1, 1, 5])
            if self.chance.random() < 0.5:
                params["asynckv_ticket"] = f"{self.num_added - self.chance.choice([0, 0, 1]):032x}"
                self.brought.add(params["asynckv_ticket"])
        elif kind == "junk":
            params = {"do_remote_prefill": True, "asynckv": self.chance.choice([None, 3, {"key": []}, [1]])}
        if kind == "both":
            params["do_remote_decode"] = True
        if kind == "logprobs":
            fields["prompt_logprobs"] = 1
        if isinstance(params, dict) and "asynckv_follow" in params:
            self.followers.add(name)
        self.side.add(name, prompt, params, most, **fields)
        if self.chance.random() < 0.08:
            self.side.abort(name)  # rejected before it was admitted

    def abort(self) -> None:
        alive = [r for r in self.side.scheduler.requests.values() if not r.is_finished()]
        if alive:
            status = self.chance.choice([RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
            name = self.chance.choice(alive).request_id
            self.side.abort(name, status)

    def step(self, patience: float = 0.3) -> None:
        """One step; of what the workers have under way some ends."""
        loaded, failed, sent = set[str](), set[str](), set[str]()
        out = self.side.scheduler.schedule()
        self.note(self.side._of("orders", out.kv_connector_metadata))
        failing = self.side._of("failing", out.kv_connector_metadata)  # reported with this step
        for request in self.side.scheduler.requests.values():
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                name = request.request_id
                told = self.side.scheduler.finished_recving_kv_req_ids
                if not any(name in known for known in (self.pulling, self.others, told, failing)):
                    self.others.append(name)
        for name in list(self.pulling):
            if self.chance.random() < patience:
                self.pulling.remove(name)
                (failed if self.chance.random() < 0.3 else loaded).add(name)
                self.failed |= failed
        for name in list(self.lent):
            if self.chance.random() < patience:
                self.lent.remove(name)
                sent.add(name)
        for name in list(self.others):
            if self.chance.random() < patience:
                self.others.remove(name)
                loaded.add(name)
        if self.chance.random() < 0.1:
            self.abort()  # while the step runs
        self.side.finish(out, loaded, failed, sent, reports=self.report(patience / 3))

    def report(self, patience: float) -> FollowReports:
        """What two workers report of what they follow: in any order, offers and refusals, and late ones."""
        reports = FollowReports([], [])
        for one in list(self.waits):
            if self.chance.random() < patience:
                self.waits.remove(one)
                name, ticket = one
                reason = self.chance.choice(["", "", "", "withdrawn", "no_offer"])
                if reason:
                    reports.not_offered.append(Failed(name, NoOffer("no", reason=reason, failed_in="follow")))
                if not reason or self.chance.random() < 0.2:
                    prompt, num_tokens = self.tickets[ticket]
                    params = self.offered.get(ticket)
                    if params is None:
                        params = self.offered[ticket] = lent(self.groups, num_tokens, prompt)["asynckv"]
                    reports.offered.append(Offer(name, params, is_late=bool(reason)))
        return reports

    def note(self, orders: Any) -> None:
        for order in orders:
            self.orders.append(order)
            if isinstance(order, Pull):
                assert order.request_id not in self.pulling
                self.pulling.append(order.request_id)
            elif isinstance(order, Lend):
                self.lent.append(str(order.params["request_id"]))
            elif isinstance(order, Follow):
                assert order.request_id not in [name for name, _ in self.waits]
                self.waits += [(order.request_id, order.follow["ticket"])] * 2

    def check(self) -> None:
        """Every key was read or given back once, unless a read failed; what a request was told came in sequence."""
        ending = [o for o in self.orders if isinstance(o, Pull | Cancel) and o.params is not None]
        ends = Counter(str(order.params["key"]) for order in ending if order.params is not None)
        assert {str(params["key"]) for params in self.offered.values()} <= set(ends)
        # Another request may try after one that has failed; the ranks that lend decide.
        tried = {str(o.params["key"]) for o in self.orders if isinstance(o, Pull) and o.request_id in self.failed}
        assert {key for key, count in ends.items() if count > 1} <= tried
        where = {o.request_id: i for i, o in enumerate(self.orders) if o in ending}
        pulled = {o.request_id for o in self.orders if isinstance(o, Pull)}
        for i, order in enumerate(self.orders):
            if isinstance(order, Announce):
                assert i < where[order.request_id]
            elif isinstance(order, Cancel) and order.params is None and order.request_id not in self.followers:
                assert i > where[order.request_id]
                assert order.request_id in pulled
        carried = [order.ticket for order in self.orders if isinstance(order, Lend | WithdrawTicket) and order.ticket]
        assert sorted(carried) == sorted(self.brought)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("asynchronous", [False, True], ids=["one at a time", "overlapping"])
@pytest.mark.parametrize(
    "groups", [DENSE, WINDOW, MIXED, HYBRID, STATES], ids=["dense", "window", "mixed", "hybrid", "states"]
)
def test_any_life_ends_well(groups: tuple[Group, ...], asynchronous: bool, seed: int) -> None:
    side = Side(
        groups,
        num_blocks=[60, 120, 600][seed % 3],
        policy=["fail", "recompute"][seed // 3 % 2],
        role=["kv_both", "kv_consumer", "kv_producer"][seed % 3],
        asynchronous=asynchronous,
        max_batched=[64, 256, 2048][seed // 2 % 3],
        max_seqs=[3, 16][seed % 2],
    )
    live(side, groups, seed)


def live(side: Side, groups: tuple[Group, ...], seed: int, num_steps: int = 120) -> Life:
    life = Life(side, groups, seed)
    for _ in range(num_steps):
        for _ in range(life.chance.choice([0, 0, 1, 1, 2])):
            life.add()
        if life.chance.random() < 0.1:
            life.abort()
        if life.chance.random() < 0.02:
            side.connect(epoch=life.num_added)
        if not side.is_idle():
            life.step()
    for _ in range(3000):
        if side.is_idle() and not life.waits:
            break
        life.step(patience=0.8)
    assert side.is_idle()
    life.check()
    assert not life.pulling
    assert not life.lent
    assert not life.waits
    assert not side.half.has_orders
    assert len(side.half.pulls) == 0
    assert side.scheduler.requests == {}
    assert side.num_free() == side.free_blocks
    assert {Pull, Cancel, Lend, Follow} <= {type(order) for order in life.orders}
    return life


# -- what clients send --------------------------------------------------------------------------------


def junk(chance: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can carry, and some that it cannot."""
    simple: list[Any] = [None, True, False, 0, -1, 1, 7, 2**31, 2**63, 2**200, -(2**64), 0.5, math.nan, -math.inf]
    simple += ["", "x", "\ud800", "tcp://10.0.0.1:1", "a" * 20_000, b"bytes"]
    if depth > 3 or chance.random() < 0.5:
        return chance.choice(simple)
    if chance.random() < 0.5:
        return [junk(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {chance.choice(["key", "groups", "num_tokens", "x", "endpoints"]): junk(chance, depth + 1) for _ in range(3)}


def deep(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def damage(chance: random.Random, params: dict[str, Any]) -> Any:
    """Params of a prefill engine that somebody has had their hands on."""
    ours = params["asynckv"]
    match chance.randrange(12):
        case 0:
            return junk(chance)
        case 1:
            params["asynckv"] = junk(chance)
        case 2:
            del ours[chance.choice(list(ours))]
        case 3:
            ours[chance.choice(list(ours))] = junk(chance)
        case 4:
            ours["num_tokens"] = chance.choice([-1, 0, 1, 10**9, 1 << 40, 1 << 41, 2.5, "12", None, math.nan])
        case 5:
            ours["groups"] = chance.choice([[], [[0, []]], ours["groups"] * 3, [[0, [[1, 1]] * 300_000]], [[-1, []]]])
        case 6:
            ours["endpoints"] = chance.choice([[], ours["endpoints"] * 300, [{"tp_rank": 0}], "x"])
        case 7:
            ours["engine_id"] = chance.choice(["another", "engine", "", "x" * 10_000])
        case 8:
            params = {name: junk(chance) for name in params}
        case 9:
            ours[chance.choice(list(ours))] = deep(5000)
        case 10:
            ours["more"], params["more"] = deep(5000), deep(5000)
        case _:
            params["do_remote_prefill"] = junk(chance)
            params["do_remote_decode"] = junk(chance)
    return params


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("groups", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_no_params_are_too_strange(groups: tuple[Group, ...], seed: int) -> None:
    """Whatever a client sends, requests end, blocks come back and EngineCore lives."""
    chance, side = random.Random(seed), Side(groups, policy="recompute")
    for i in range(40):
        prompt = [chance.randrange(30_000) for _ in range(chance.choice([1, 20, 64, 100]))]
        side.add(f"r{i}", prompt, damage(chance, lent(groups, len(prompt), prompt)), chance.choice([1, 3]))
        if chance.random() < 0.2:
            side.abort(f"r{i}")
    done: set[str] = set()
    for _ in range(300):
        if side.is_idle():
            break
        out = side.scheduler.schedule()
        orders = side._of("orders", out.kv_connector_metadata)
        failed = {order.request_id for order in orders if isinstance(order, Pull)}
        for order in orders:
            assert len(json.dumps(getattr(order, "params", {}))) < 5_000_000  # what is handed on is plain, and shallow
        sent = {str(order.params["request_id"]) for order in orders if isinstance(order, Lend)}
        done |= set(side.finish(out, failed=failed, sent=sent).reasons)
    assert side.is_idle()
    assert side.num_free() == side.free_blocks
    assert len(side.half.pulls) == 0


def test_what_is_wrong_is_said_once_per_request(caplog: pytest.LogCaptureFixture) -> None:
    side = Side()
    with caplog.at_level("WARNING", logger="vllm.asynckv"):
        logger = __import__("logging").getLogger("vllm.asynckv")
        logger.addHandler(caplog.handler)
        try:
            side.add("a", [1] * 40, {"do_remote_prefill": True, "asynckv": {"key": 3}}, 3)
            for _ in range(6):
                side.step()
        finally:
            logger.removeHandler(caplog.handler)
    said = [record.getMessage() for record in caplog.records if record.name == "vllm.asynckv"]
    assert len(set(said)) == 1
    assert "params are malformed" in said[0]


# -- beside others ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_last", [False, True], ids=["ours first", "ours last"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("groups", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_any_life_inside_multi_connector_never_raises(groups: tuple[Group, ...], seed: int, is_last: bool) -> None:
    side = Side(
        groups, beside=[{**SHELF, "kv_connector_extra_config": {"tokens": 32}}], is_last=is_last, policy="recompute"
    )
    live(side, groups, seed)


def test_a_request_that_another_connector_loads_gives_back_what_was_lent() -> None:
    side = Side(beside=[SHELF], is_last=True)
    side.add("shelf1", list(range(100)), lent(DENSE, 100, range(100)), 1)
    assert side.step().kinds() == [Cancel]
    assert side.scheduler.requests["shelf1"].num_computed_tokens == 32
    side.step(loaded=["shelf1"])
    assert side.step().tokens == {"shelf1": [7]}


def test_a_request_that_we_load_is_ours_inside_multi_connector() -> None:
    side = Side(beside=[SHELF])
    side.add("shelf1", list(range(100)), lent(DENSE, 100, range(100)), 1)
    told = side.step()
    assert told.kinds() == [Pull]
    side.step(loaded=["shelf1"])
    assert side.step().tokens == {"shelf1": [7]}


def test_what_comes_out_stands_beside_what_others_give_out() -> None:
    side = Side(beside=[SHELF])
    out = side.prefill("a", list(range(50)))
    assert out["shelf"] == 1
    assert out["do_remote_prefill"] is True
    side.step(sent=["a"])  # both keep the blocks, and vLLM waits for both in the workers
    assert side.is_idle()
