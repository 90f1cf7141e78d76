"""A head start in vLLM's own scheduler: which pieces are lent, when they end, and what a follower is asked for.

Nothing computes here. A test knows which tokens are written, because it says which outputs have come.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from asynckv.core.types import KVTransferParams, decode_params
from asynckv.embed.ledgers import MAX_TICKETS
from asynckv.embed.orders import (
    Cancel,
    EndPieces,
    Follow,
    Lend,
    LendPiece,
    Offer,
    Order,
    Pull,
    StartEarly,
    WithdrawTicket,
)
from asynckv.errors import ConfigError
from asynckv.hashes import token_hashes
from asynckv.integrations.vllm import pieces as pieces_module
from asynckv.integrations.vllm.handover import FollowReports
from asynckv.integrations.vllm.options import Options
from asynckv.integrations.vllm.scheduler import REPORT_S
from tests.vllm.schedulers import DENSE, HYBRID, MIXED, WINDOW, Group, Side
from tests.vllm.test_follow import Clock, Pair, clock, counted, ended, leg, refusal, tickets  # noqa: F401
from tests.vllm.test_scheduler import is_clean, prompt_of, settle
from tests.vllm.versions import run_by

EARLY = {"head_start_tokens": 512}
SHAPES = {"dense": DENSE, "window": WINDOW, "mixed": MIXED, "hybrid": HYBRID}


class Prefill(Side):
    """An engine that computes prompts while they are followed, with up to `depth` steps under way.

    Every order is checked against what is written, and against the blocks of the request at that time.
    """

    def __init__(
        self, groups: tuple[Group, ...] = DENSE, depth: int = 1, is_followed: bool = True, **fields: Any
    ) -> None:
        given: dict[str, Any] = {"extra": EARLY, "max_batched": 300} | fields
        super().__init__(groups, asynchronous=depth > 1, **given)
        self.depth, self.is_followed = depth, is_followed
        self.under_way: deque[tuple[Any, set[str]]] = deque()
        self.written: dict[str, int] = {}  # tokens from the prompt's start of which the output has come
        self.lent: dict[str, list[KVTransferParams]] = {}  # pieces that have not ended, by ticket
        self.orders: list[Order] = []
        self.done: set[str] = set()

    def prompt(self, name: str, prompt: list[int], ticket: str | None = None, most: int = 1) -> str:
        ticket = ticket or next(tickets)
        self.add(name, prompt, leg(ticket), most)
        return ticket

    def turn(self, sent: Collection[str] = ()) -> list[Order]:
        """Schedule a step, and take the output of the oldest one if `depth` are under way."""
        out = self.scheduler.schedule()
        for name in out.preempted_req_ids or ():
            self.written.pop(name, None)
        whole = {
            n for n in out.num_scheduled_tokens if (r := self.scheduler.requests[n]).num_computed_tokens >= r.num_tokens
        }
        self.under_way.append((out, whole))
        orders = list(self._of("orders", out.kv_connector_metadata))
        for order in orders:
            self.judge(order)
        self.orders += orders
        if len(self.under_way) >= self.depth or not out.num_scheduled_tokens:
            self.output(sent)
        return orders

    def judge(self, order: Order) -> None:
        if isinstance(order, EndPieces):
            self.lent.pop(order.ticket)
        if not isinstance(order, LendPiece):
            return
        params = decode_params(order.params)
        name, end = params.request_id.partition(" tokens of ")[2], params.num_tokens
        assert params.written
        assert params.recall is True
        request, held = self.scheduler.requests[name], self.scheduler.kv_cache_manager.get_block_ids(name)
        assert end <= self.written[name], f"a piece of {name} up to {end} is lent before it is written"
        assert end < request.num_prompt_tokens
        earlier = self.lent.setdefault(order.ticket, [])
        begin = earlier[-1].num_tokens if earlier else 0
        earlier.append(params)
        for group, lent in zip(self.half.shape.groups, params.groups, strict=True):
            if group.is_window or group.is_state:
                assert not lent.runs
                continue
            size = group.block_size
            assert (lent.first_token, begin % size, end % size) == (begin, 0, 0)
            ids = [i for first, count in lent.runs for i in range(first, first + count)]
            assert ids == held[group.index][begin // size : end // size]
        every = params.hash_tokens
        assert list(params.hashes) == token_hashes(request.all_token_ids[:end], every)

    def output(self, sent: Collection[str] = ()) -> None:
        """The oldest step has ended on all ranks."""
        out, whole = self.under_way.popleft()
        for new in out.scheduled_new_reqs:
            self.written[new.req_id] = new.num_computed_tokens
        cached = out.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self.written[name] = computed
        for name, count in out.num_scheduled_tokens.items():
            self.written[name] += count
        ids = list(out.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={each: i for i, each in enumerate(ids)},
            sampled_token_ids=[[7] if name in whole else [] for name in ids],
        )
        followed = [*self.half._tickets.values()] if self.is_followed else []
        reports = FollowReports([], [], followed) if followed else None
        output.kv_connector_output = KVConnectorOutput(
            finished_sending=set(sent) or None, kv_connector_worker_meta=reports
        )
        for each in (self.scheduler.update_from_output(out, output) or {}).values():
            self.done |= {one.request_id for one in each.outputs if one.finish_reason is not None}

    def until(self, is_so: Callable[[], bool]) -> None:
        for _ in range(500):
            if is_so():
                return
            self.turn()
        raise AssertionError(self.orders)

    def all(self, kind: type[Any]) -> list[Any]:
        return [order for order in self.orders if isinstance(order, kind)]

    def preempt(self, name: str) -> None:
        """vLLM takes a running request's blocks, as it does when they run out."""
        request = self.scheduler.requests[name]
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)

    def drain(self) -> None:
        """Nothing is left."""
        for _ in range(3):
            self.turn()
        self.turn(sent={str(order.params["request_id"]) for order in self.all(Lend)})
        while self.under_way:
            self.output()
        assert is_clean(self)


def ends(side: Prefill) -> list[int]:
    return [order.params["num_tokens"] for order in side.all(LendPiece)]


# -- what is lent ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("chunk", [64, 200, 256, 300, 1000])
@pytest.mark.parametrize("groups", SHAPES.values(), ids=SHAPES)
def test_whole_blocks_are_lent_once_every_rank_has_written_them(
    groups: tuple[Group, ...], chunk: int, depth: int
) -> None:
    side = Prefill(groups, depth, max_batched=chunk)
    ticket = side.prompt("a", prompt_of(2100))
    side.until(lambda: "a" in side.done)
    assert ends(side)
    assert all(order.ticket == ticket for order in side.all(LendPiece))
    side.turn()
    assert side.all(Lend)[-1].ticket == ticket
    assert not side.all(EndPieces)  # the loan ends them
    side.drain()


@pytest.mark.parametrize("size", [8, 16, 24, 64, 528])
@pytest.mark.parametrize("dcp", [1, 2])
def test_pieces_end_with_blocks_of_any_size(size: int, dcp: int) -> None:
    side = Prefill((("attention", size),), max_batched=700, dcp=dcp)
    side.prompt("a", prompt_of(4000))
    side.until(lambda: "a" in side.done)
    assert ends(side) or size == 528
    side.until(lambda: bool(side.all(Lend)))


def test_pieces_of_a_long_prompt_have_the_hashes_of_the_whole() -> None:
    side = Prefill(max_batched=500)
    side.prompt("a", prompt := prompt_of(4000))
    side.until(lambda: bool(side.all(Lend)))
    (loan,) = side.all(Lend)
    for order in side.all(LendPiece):
        assert order.params["hash_tokens"] == loan.params["hash_tokens"]
        assert order.params["hashes"] == loan.params["hashes"][: len(order.params["hashes"])]
    assert len(prompt) == loan.params["num_tokens"]


def test_nothing_is_lent_before_a_reader_waits() -> None:
    side = Prefill(is_followed=False)
    side.prompt("a", prompt_of(2000))
    for _ in range(4):
        assert not side.turn()
    side.is_followed = True
    side.until(lambda: bool(side.all(LendPiece)))
    assert ends(side) == [1280]  # all that is written by then
    side.until(lambda: "a" in side.done)
    side.drain()


def test_a_ticket_may_be_followed_before_its_request_has_come() -> None:
    side, ticket = Prefill(is_followed=False), next(tickets)
    side.add("other", prompt_of(10), None, 50)
    out = side.scheduler.schedule()
    side.finish(out, reports=FollowReports([], [], [ticket, *(next(tickets) for _ in range(1000))]))
    side.prompt("a", prompt_of(2000), ticket)
    side.until(lambda: bool(side.all(LendPiece)))


def test_tickets_that_no_request_brings_are_forgotten() -> None:
    side = Side(extra=EARLY)
    side.half.reported(FollowReports([], [], [next(tickets) for _ in range(MAX_TICKETS + 9)]))
    assert len(side.half.loans.followed) == MAX_TICKETS


@pytest.mark.parametrize(("tokens", "least"), [(511, 512), (2000, 0), (2000, 2001)])
def test_short_prompts_have_no_pieces(tokens: int, least: int) -> None:
    side = Prefill(extra={"head_start_tokens": least}, max_batched=100)
    side.prompt("a", prompt_of(tokens))
    side.until(lambda: bool(side.all(Lend)))
    assert not side.all(LendPiece)
    pair = Pair(extra={"head_start_tokens": least})
    pair.add("a", prompt_of(tokens))
    assert not pair.decode.step().only(Follow).takes_pieces


def test_a_prompt_of_one_chunk_has_no_piece() -> None:
    side = Prefill(max_batched=2048)
    side.prompt("a", prompt_of(2000))
    side.until(lambda: bool(side.all(Lend)))
    assert not side.all(LendPiece)


@pytest.mark.parametrize("depth", [1, 2], ids=["in turn", "overlapping"])
def test_a_cached_prefix_is_lent_once_the_step_that_writes_it_has_ended(depth: int) -> None:
    """The second request finds the blocks of the first in the prefix cache before they are written."""
    side, prompt = Prefill(depth=depth, max_batched=1000, prefix_caching=True), prompt_of(2000)
    for name in "ab":
        side.prompt(name, prompt)
    written = 0
    while not (side.all(LendPiece) and {"a", "b"} <= side.done):
        before = len(side.orders)
        side.turn()
        for order in side.orders[before:]:
            if isinstance(order, LendPiece):
                assert order.params["num_tokens"] <= written
        written = max([*side.written.values(), written])
    side.drain()


def test_a_prefix_that_was_cached_long_before_is_part_of_the_first_piece() -> None:
    side, prompt = Prefill(prefix_caching=True), prompt_of(2000)
    side.add("before", prompt[:1024], None)
    side.until(lambda: "before" in side.done)
    side.prompt("a", prompt)
    side.until(lambda: bool(side.all(LendPiece)))
    assert ends(side)[0] > 1024
    (first, _) = side.all(LendPiece)[0].params["groups"][0]
    assert first == 0


@pytest.mark.parametrize("marks", [(False, False), (False, True)])
def test_groups_with_layers_of_a_drafter_travel_with_the_loan(marks: tuple[bool, bool], monkeypatch: Any) -> None:
    monkeypatch.setattr(
        "asynckv.integrations.vllm.compat.holds_drafts",
        lambda config, kv, index: config.speculative_config is not None and (marks[index] or not any(marks)),
    )
    side = Prefill((("attention", 16), ("attention", 16)), drafts=2, max_batched=256)
    side.judge = lambda order: None  # type: ignore[method-assign]
    side.prompt("a", prompt_of(2000))
    side.until(lambda: bool(side.all(Lend)))
    for order in side.all(LendPiece):
        end = order.params["num_tokens"]
        assert order.params["groups"][0][1]
        assert order.params["groups"][1] == [end, ()]
    assert bool(side.all(LendPiece)) is any(marks)


# -- what ends pieces ------------------------------------------------------------------------------------


def begun(side: Prefill, name: str = "a", tokens: int = 2000, count: int = 1) -> str:
    """A request of which some pieces are lent, and others are still computed."""
    ticket = side.prompt(name, prompt_of(tokens))
    side.until(lambda: len(side.lent.get(ticket, ())) >= count)
    return ticket


DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["in turn", "overlapping"])
RUNNERS = pytest.mark.parametrize("runner", ["0", "1"], ids=["first runner", "second runner"])


@DEPTHS
@RUNNERS
@pytest.mark.parametrize("count", [1, 2])
def test_pieces_end_in_the_step_of_a_preemption_and_begin_anew(
    depth: int, runner: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_by(runner, monkeypatch)
    side = Prefill(depth=depth)
    ticket = begun(side, count=count)
    side.preempt("a")
    orders = side.turn()
    assert [order.ticket for order in orders if isinstance(order, EndPieces)] == [ticket]
    assert not [order for order in orders if isinstance(order, LendPiece)]
    assert not side.lent
    side.until(lambda: "a" in side.done)
    assert side.lent[ticket]  # `judge` has compared them with the new blocks, from token 0 on
    side.drain()


@DEPTHS
@RUNNERS
def test_pieces_end_when_blocks_run_out(depth: int, runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM preempts the last request, and gives its blocks away in the same step."""
    run_by(runner, monkeypatch)
    side, others = Prefill(depth=depth, num_blocks=145), [f"other-{i}" for i in range(16)]
    for i, name in enumerate(others):
        side.add(name, prompt_of(i + 1), {}, 500)  # each step one of them needs a block more
    ticket = begun(side, tokens=2000)
    side.until(lambda: bool(side.all(EndPieces)))
    assert side.all(EndPieces)[0].ticket == ticket
    for name in others:
        side.abort(name)
    side.until(lambda: "a" in side.done)
    side.drain()


@DEPTHS
@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
@pytest.mark.parametrize("is_preempted", [False, True])
def test_pieces_end_with_the_step_after_an_abort(depth: int, status: Any, is_preempted: bool) -> None:
    side = Prefill(depth=depth)
    ticket = begun(side)
    if is_preempted:
        side.preempt("a")
    side.abort("a", status)
    assert not side.is_idle()  # EngineCore makes the step with which the orders leave
    orders = side.turn()
    assert [(type(order), getattr(order, "ticket", "")) for order in orders] == [
        (EndPieces, ticket),
        (WithdrawTicket, ticket),
    ]
    side.drain()


def test_without_pieces_nothing_is_taken_back() -> None:
    side = Prefill(is_followed=False)
    side.prompt("a", prompt_of(2000))
    side.turn()
    side.preempt("a")
    side.turn()
    side.abort("a")
    assert [type(order) for order in side.turn()] == [WithdrawTicket]
    side.drain()


def test_pieces_end_before_a_pull_that_may_fill_their_blocks() -> None:
    pair, side = Pair(), Prefill(name="decode")
    begun(side)
    side.abort("a")
    prompt = prompt_of(300)
    side.add("b", prompt, {"do_remote_prefill": True, "asynckv": pair.lent(prompt)})
    kinds = [type(order) for order in side.turn()]
    assert kinds.index(EndPieces) < kinds.index(Pull)


@pytest.mark.parametrize(("runner", "groups"), [("1", HYBRID), ("0", HYBRID), ("1", DENSE)])
def test_no_piece_is_lent_if_blocks_are_zeroed_before_the_hook(
    runner: str, groups: tuple[Group, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_by(runner, monkeypatch)
    side = Prefill(groups)
    is_late = runner == "1" and groups == HYBRID
    for name in "ab":
        side.prompt(name, prompt_of(2000))
        side.until(lambda name=name: name in side.done)  # type: ignore[misc]
    assert bool(side.all(LendPiece)) is not is_late
    assert [r.getMessage() for r in caplog.records if "handle_preemptions" in r.getMessage()] == (
        [f"asynckv: {pieces_module.TOO_LATE}"] if is_late else []
    )


def test_no_piece_is_lent_once_a_step_has_copied_blocks_before_the_hook(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_by("1", monkeypatch)
    side = Prefill()
    side.prompt("a", prompt_of(2000))
    side.turn()
    manager = side.scheduler.kv_cache_manager
    monkeypatch.setattr(manager, "take_kv_cache_block_copies", lambda: ([(1, 2)], []))
    side.turn()
    monkeypatch.undo()
    side.until(lambda: "a" in side.done)
    assert not side.all(LendPiece)
    assert "handle_preemptions" in caplog.text


def test_a_piece_that_cannot_be_made_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **fields: Any) -> None:
        raise ConfigError("too many runs")

    side = Prefill()
    monkeypatch.setattr(side.half.loans, "lend_piece", refuse)
    side.prompt("a", prompt_of(2000))
    side.until(lambda: bool(side.all(Lend)))
    assert "too many runs" in caplog.text
    side.drain()


def test_options_of_a_head_start_are_checked() -> None:
    assert Options.parse({}).head_start_tokens == 32_768
    for wrong in (-1, 1.5, "a", True):
        with pytest.raises(ConfigError, match="head_start_tokens"):
            Options.parse({"head_start_tokens": wrong})


# -- a request that follows -----------------------------------------------------------------------------


class Early(Pair):
    """A decode engine that follows, and is offered pieces of what another engine computes."""

    def __init__(self, groups: tuple[Group, ...] = DENSE, **fields: Any) -> None:
        super().__init__(groups, **{"extra": EARLY} | fields)
        self.groups = groups

    def piece(self, name: str, prompt: list[int], end: int = 512, every: int = 256, **fields: Any) -> FollowReports:
        lists = [
            (0, list(range(1, end // group[1] + 1))) if group[0] == "attention" else (end, []) for group in self.groups
        ]
        hashes = token_hashes(prompt[:end], every)
        given = {"written": True, "recall": True, "hashes": hashes, "hash_tokens": every} | fields
        params = self.prefill.half.loans.ranks.make_params("p", lists, end, **given)
        return FollowReports([Offer(name, json.loads(json.dumps(params)), is_piece=True)], [])

    def begun(self, tokens: int = 1000, most: int = 2) -> list[int]:
        """A request with a head start; returns its prompt."""
        prompt = self.following(tokens, most)
        self.decode.step(reports=self.piece("a", prompt))
        assert self.decode.step().only(StartEarly).request_id == "a"
        return prompt


@pytest.mark.parametrize("groups", SHAPES.values(), ids=SHAPES)
def test_a_follower_gets_blocks_at_the_first_piece_and_the_loan_fills_the_same(groups: tuple[Group, ...]) -> None:
    pair, prompt = Early(groups), prompt_of(1000)
    side = pair.decode
    pair.add("a", prompt, 2)
    assert side.step().only(Follow).takes_pieces
    assert side.step(reports=pair.piece("a", prompt)).orders == []
    (start,) = side.step().orders
    assert isinstance(start, StartEarly)
    end = 1000 - side.half.shape.back_off
    assert (start.request_id, start.num_tokens, start.params["num_tokens"]) == ("a", end, 512)
    assert start.hashes == token_hashes(prompt[: side.scheduler.requests["a"].num_prompt_tokens], 256)
    assert len(start.groups[0][1]) == -(-end // groups[0][1])
    assert side.step(reports=pair.piece("a", prompt, 768)).orders == []  # a second one changes nothing
    assert not side.is_idle()
    offer = pair.offer("a", prompt)
    side.step(reports=offer)
    (pull,) = side.step().orders
    assert isinstance(pull, Pull)
    assert (pull.request_id, pull.num_tokens, pull.goes_on) == ("a", end, True)
    assert pull.groups == start.groups
    assert pull.params["key"] == offer.offered[0].params["key"]
    side.step(loaded=["a"])
    assert side.ended("a").tokens == {"a": [7]}
    settle(side)
    assert not side.half._early
    assert counted(side, "computed_locally") == {}


@pytest.mark.parametrize("kind", ["other prompt", "no hashes", "short hashes"])
def test_a_piece_of_another_prompt_gets_no_blocks(kind: str) -> None:
    pair = Early()
    side, prompt = pair.decode, pair.following(1000)
    piece = {
        "other prompt": lambda: pair.piece("a", prompt_of(1000)),
        "no hashes": lambda: pair.piece("a", prompt, hashes=(), hash_tokens=0),
        "short hashes": lambda: pair.piece("a", prompt, every=1),
    }[kind]()
    side.step(reports=piece)
    assert [order for _ in range(3) for order in side.step().orders] == []
    side.step(reports=pair.offer("a", prompt))
    assert not side.step().only(Pull).goes_on


def test_hashes_that_a_chain_of_which_would_take_long_are_not_made() -> None:
    pair = Early()
    prompt = pair.following(1000)
    pair.decode.step(reports=pair.piece("a", prompt, 256, every=2))
    assert pair.decode.step().orders == []


@pytest.mark.parametrize(("num_blocks", "count"), [(300, 2), (127, 1), (126, 0), (1000, 4)])
def test_head_starts_hold_half_of_the_blocks_at_most(num_blocks: int, count: int) -> None:
    """A prompt of 1000 tokens has 63 blocks; block 0 is nobody's."""
    pair = Early(num_blocks=num_blocks)
    side, prompts = pair.decode, {name: prompt_of(1000) for name in "abcd"}
    for name, prompt in prompts.items():
        pair.ticket = next(tickets)
        pair.add(name, prompt)
    side.step()
    for name, prompt in prompts.items():
        side.step(reports=pair.piece(name, prompt))
    side.step()
    assert len(side.half._early) == count
    held = sum(len(fetch.fetch.groups[0][1]) for fetch in side.half._early.values())
    assert 2 * held <= side.free_blocks


def test_a_head_start_waits_for_requests_that_were_offered() -> None:
    pair, prompts = Early(num_blocks=200), {name: prompt_of(1000) for name in "ab"}
    side = pair.decode
    side.compute("large", prompt_of(2500), 50, steps=2)
    tickets_of = {}
    for name, prompt in prompts.items():
        tickets_of[name] = pair.ticket = next(tickets)
        pair.add(name, prompt)
    side.step()
    # "b" waits for blocks with params, so "a" gets none, although it is the older one and would have its half.
    pair.ticket = tickets_of["b"]
    side.step(reports=pair.offer("b", prompts["b"]))
    side.half.pool = type("Pool", (), {"get_num_free_blocks": lambda self: 1000})()
    pair.ticket = tickets_of["a"]
    side.step(reports=pair.piece("a", prompts["a"]))
    for _ in range(3):
        assert StartEarly not in side.step().kinds()
    side.abort("large")
    orders = [order for _ in range(3) for order in side.step().orders]
    assert [type(order) for order in orders] == [Pull, StartEarly]
    assert not side.half._offered


def test_completions_that_wait_for_another_one_keep_no_blocks_from_a_head_start() -> None:
    pair, prompt = Early(), prompt_of(1000)
    side, params = pair.decode, {"do_remote_prefill": True, "asynckv": pair.lent(shared := prompt_of(300))}
    pair.ticket = next(tickets)
    pair.add("a", prompt)
    for name in "bc":
        side.add(name, shared, json.loads(json.dumps(params)))
    assert set(side.step().kinds()) == {Follow, Pull}
    side.step(reports=pair.piece("a", prompt))
    assert side.half._offered == {"c"}
    assert side.step().kinds() == [StartEarly]


def test_a_cached_part_is_not_asked_for() -> None:
    pair, prompt = Early(), prompt_of(1000)
    side = pair.decode
    side.add("before", prompt[:400], None)
    side.ended("before")
    pair.add("a", prompt)
    side.step()
    side.step(reports=pair.piece("a", prompt))
    start = side.step().only(StartEarly)
    assert start.groups[0][0] == 400
    side.step(reports=pair.offer("a", prompt))
    assert side.step().only(Pull).groups == start.groups


POLICIES = pytest.mark.parametrize("policy", ["fail", "recompute"])


def failed_once(side: Side, policy: str) -> None:
    """The workers report the end of what was ordered, and vLLM goes on as its policy says."""
    told = side.step(loaded=["a"], failed=["a"])
    if policy == "fail":
        assert told.reasons == {"a": "error"}
    else:
        assert side.ended("a").reasons == {"a": "length"}
    for _ in range(2):
        assert side.step().orders == []
    assert not side.half._early
    assert is_clean(side)


@POLICIES
@pytest.mark.parametrize("shorter", [False, True])
def test_a_loan_that_does_not_cover_what_was_told_fails_as_a_load_once(policy: str, shorter: bool) -> None:
    pair = Early(policy=policy)
    side, prompt = pair.decode, pair.begun()
    offer = pair.offer("a", prompt[:900] if shorter else prompt[:512] + prompt_of(488))
    side.step(reports=offer)
    cancel = side.step().only(Cancel)
    assert cancel.params["key"] == offer.offered[0].params["key"]  # for workers that know it not
    assert side.num_free() < side.free_blocks
    failed_once(side, policy)


@POLICIES
@pytest.mark.parametrize("reason", ["withdrawn", "no_offer", "peer_lost"])
def test_a_refusal_ends_a_head_start_as_a_failed_load_once(policy: str, reason: str) -> None:
    pair = Early(policy=policy)
    side = pair.decode
    pair.begun()
    side.step(reports=refusal("a", reason).aggregate(refusal("a", reason)))
    assert ended(side.step()) == [None]
    assert side.num_free() < side.free_blocks
    failed_once(side, policy)


@POLICIES
def test_a_head_start_that_fails_by_itself_is_a_failed_load(policy: str) -> None:
    pair = Early(policy=policy)
    pair.begun()
    failed_once(pair.decode, policy)


def test_a_late_offer_behind_a_failed_head_start_is_released() -> None:
    pair = Early()
    side, prompt = pair.decode, pair.begun()
    side.step(reports=refusal("a"))
    side.step()
    side.step(loaded=["a"], failed=["a"])
    side.finish(side.scheduler.schedule(), reports=(offer := pair.offer("a", prompt)))
    assert side.step().only(Cancel).params["key"] == offer.offered[0].params["key"]
    assert is_clean(side)


@pytest.mark.parametrize("when", ["in its first step", "later", "offered"])
def test_a_request_that_leaves_with_a_head_start_keeps_its_blocks_until_the_workers_report(when: str) -> None:
    pair = Early()
    side, prompt = pair.decode, pair.following(1000)
    side.step(reports=pair.piece("a", prompt))
    out = side.scheduler.schedule()
    if when != "in its first step":
        side.finish(out, reports=pair.offer("a", prompt) if when == "offered" else None)
    side.abort("a")
    if when == "in its first step":
        side.finish(out)
    orders = [order for _ in range(2) for order in side.step().orders]
    assert [type(order) for order in orders if not isinstance(order, Pull)] == [Cancel]
    assert side.num_free() < side.free_blocks
    side.step(loaded=["a"], failed=["a"])
    assert not side.half._early
    assert not side.half._offered
    settle(side)


def test_a_head_start_without_any_report_ends_in_time(clock: Clock) -> None:  # noqa: F811
    pair = Early(extra={**EARLY, "pull": {"follow_s": 10.0}})
    pair.begun()
    clock.now += 10.0 + REPORT_S
    assert ended(pair.decode.step()) == [None]
    clock.now += 100.0
    assert pair.decode.step().orders == []
    failed_once(pair.decode, "fail")


def test_completions_of_one_ticket_wait_for_the_one_with_a_head_start() -> None:
    pair, prompt = Early(), prompt_of(1000)
    side = pair.decode
    for name in "abc":
        pair.add(name, prompt)
    side.step()
    side.step(reports=pair.piece("a", prompt))
    assert side.step().kinds() == [StartEarly]
    side.step(reports=pair.offer("a", prompt))
    assert side.step().kinds() == [Pull]
    done = dict(side.step(loaded=["a"]).tokens)
    for _ in range(5):
        done |= side.step().tokens
    assert set(done) == {"a", "b", "c"}
    assert is_clean(side)


@pytest.mark.parametrize("kind", ["dual", "first", "last"])
def test_a_head_start_beside_other_connectors(kind: str) -> None:
    shelf = {"kv_connector": "Shelf", "kv_connector_module_path": "tests.vllm.beside", "kv_role": "kv_both"}
    where: dict[str, Any] = {"connector": "DualConnector", "extra": {"asynckv": EARLY}, "is_connected": False}
    pair, prompt = (
        Early(**(where if kind == "dual" else {"beside": [shelf], "is_last": kind == "last"})),
        prompt_of(1000),
    )
    side = pair.decode
    pair.add("a", prompt)
    assert side.step().only(Follow).takes_pieces
    side.step(reports=pair.piece("a", prompt))
    groups = side.step().only(StartEarly).groups
    side.step(reports=pair.offer("a", prompt))
    assert side.step().only(Pull).groups == groups
    side.step(loaded=["a"])
    assert side.step().tokens or side.is_idle()


def test_what_another_connector_has_is_not_read_early() -> None:
    shelf = {"kv_connector": "Shelf", "kv_connector_module_path": "tests.vllm.beside", "kv_role": "kv_both"}
    pair, prompt = Early(beside=[shelf], is_last=True), prompt_of(1000)
    side = pair.decode
    pair.add("shelf", prompt)
    side.step()
    side.step(reports=pair.piece("shelf", prompt))
    assert side.step().only(Cancel).follows_on
    side.step(loaded=["shelf"])
    assert "shelf" not in side.half._early
