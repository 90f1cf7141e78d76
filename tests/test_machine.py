"""Any order of events, two clocks, lost and repeated letters: the invariants of the design hold.

Up to three prefill ranks and three decode ranks, each decode rank reading its heads from one or several
prefill ranks, some of which hold replicas. Rules deliver,
lose, repeat and reorder letters; complete, fail and leave transfers in doubt; end agents and replace them; let time
pass; cancel, revoke, forget. Freed prefill blocks are overwritten at once, so a byte believed too long is seen.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from asynckv.config import EngineConfig, LeaseConfig, PullConfig
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import KVTransferParams, Reason
from asynckv.errors import LocalProtocolError
from asynckv.geometry.match import remote_ranks
from asynckv.observe.log import phases
from tests.world import BLOCK, NUM_BLOCKS, Rank, World, make_layout

CONFIG = EngineConfig(
    engine_id="x",
    lease=LeaseConfig(lease_s=4.0, grant_s=2.0, max_lease_s=20.0, parked_s=5.0),
    pull=PullConfig(
        timeout_s=6.0, announce_s=6.0, drain_s=1.0, release_timeout_s=5.0, max_post_bytes=64, window_bytes=256
    ),
)


class Machine(RuleBasedStateMachine):
    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.world = World(CONFIG)
        self.prefill: list[Rank] = []
        self.decode: list[Rank] = []
        self.source: dict[tuple[str, str], list[bytes]] = {}
        self.pulls: list[tuple[Rank, Any, KVTransferParams, list[int]]] = []
        self.leases: list[tuple[Rank, Any]] = []
        self.checked: set[str] = set()
        self.count = 0
        self.doubtful: list[tuple[Rank, Any]] = []
        self.without_agent: list[Rank] = []

    @initialize(
        sizes=st.sampled_from([(1, 1), (2, 2), (1, 2), (2, 1), (3, 2), (2, 3), (3, 1)]),
        heads=st.sampled_from([6, 6, 1]),
        rate=st.sampled_from([0.9996, 1.0, 1.0004]),
    )
    def start(self, sizes: tuple[int, int], heads: int, rate: float) -> None:
        n_prefill, n_decode = sizes
        for r in range(n_prefill):
            layout = make_layout(r, n_prefill, base=(r + 1) << 40, num_heads=heads)
            self.prefill.append(self.world.add(f"p{r}", layout, engine_id="prefill", seed=r))
        for r in range(n_decode):
            order = ("block", "head", "kv", "token", "dim")
            layout = make_layout(r, n_decode, base=(r + 11) << 40, order=order, num_heads=heads)
            self.decode.append(
                self.world.add(f"d{r}", layout, engine_id="decode", rate=rate, epoch=1e6 * r, seed=50 + r)
            )

    @rule(target=requests, data=st.data())
    def make(self, data: st.DataObject) -> KVTransferParams:
        blocks = data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=3, unique=True))
        self.count += 1
        return self.world.params(self.prefill, f"req:{self.count},\n", blocks, len(blocks) * BLOCK - 1, lease_s=4.0)

    @rule(params=requests, r=st.integers(0, 2), fill=st.integers(1, 200), readers=st.sampled_from([1, 1, 1, 2]))
    def lend(self, params: KVTransferParams, r: int, fill: int, readers: int) -> None:
        rank = self.prefill[r % len(self.prefill)]
        blocks = [b for f, n in params.groups[0].runs for b in range(f, f + n)]
        lent = {b for hold in rank.core.ledger for b in hold.blocks.get(0, ())}
        if lent & set(blocks) or (rank.name, params.key.token) in self.source:
            return
        for i, b in enumerate(blocks):
            rank.buffers.overwrite(b, (fill + i) % 256)
        self.source[rank.name, params.key.token] = [rank.buffers.block(b) for b in blocks]
        self.leases.append((rank, self.world.lend(rank, params, readers)))

    @rule(params=requests, r=st.integers(0, 2), announce=st.booleans(), data=st.data())
    def pull(self, params: KVTransferParams, r: int, announce: bool, data: st.DataObject) -> None:
        rank = self.decode[r % len(self.decode)]
        n = sum(count for _, count in params.groups[0].runs)
        blocks = data.draw(st.permutations(range(NUM_BLOCKS)))[:n]
        name = f"d-{params.request_id}"
        now = self.world.time(rank)
        try:
            if announce:
                rank.core.announce(name, params, "", 6.0, now)
                self.world.settle(rank)
            else:
                self.pulls.append((rank, self.world.pull(rank, name, blocks, params, timeout=6.0), params, blocks))
        except LocalProtocolError:
            self.world.settle(rank)

    @precondition(lambda self: self.world.letters)
    @rule(i=st.integers(0, 1000), how=st.sampled_from(["deliver", "deliver", "deliver", "lose", "repeat"]))
    def post(self, i: int, how: str) -> None:
        i %= len(self.world.letters)
        if how == "lose":
            self.world.letters.pop(i)
        else:
            self.world.deliver(i, keep=how == "repeat")

    @rule()
    def deliver_all(self) -> None:
        for _ in range(len(self.world.letters)):
            self.world.deliver()

    @precondition(lambda self: any(r.reads for r in self.decode))
    @rule(i=st.integers(0, 1000), how=st.sampled_from(["done"] * 6 + ["failed", "doubt", "lost"]))
    def end_read(self, i: int, how: str) -> None:
        rank = next(r for r in self.decode if r.reads)
        transfer_id = list(rank.reads)[i % len(rank.reads)]
        if how == "done":
            self.world.complete(rank, transfer_id)
        elif how == "doubt":
            self.doubtful.append((rank, transfer_id))
            self.world.tell(rank, TransferEnded(transfer_id, Ending.IN_DOUBT, "doubt"))
        else:
            self.world.tell(rank, TransferEnded(transfer_id, Ending.FAILED, "failed", how == "lost"))

    @rule(r=st.integers(0, 5))
    def lose_agent(self, r: int) -> None:
        ranks = self.prefill + self.decode
        rank = ranks[r % len(ranks)]
        if rank not in self.without_agent:
            self.without_agent.append(rank)
            self.world.lose_agent(rank)

    @precondition(lambda self: self.without_agent)
    @rule()
    def replace_agent(self) -> None:
        self.world.replace_agent(self.without_agent.pop(0))

    @rule(seconds=st.sampled_from([0.0001, 0.05, 0.3, 1.0, 1.99, 2.01, 3.0]))
    def wait(self, seconds: float) -> None:
        self.world.advance(seconds)

    @precondition(lambda self: self.pulls)
    @rule(i=st.integers(0, 1000))
    def cancel(self, i: int) -> None:
        rank, pull, _, _ = self.pulls[i % len(self.pulls)]
        self.world.cancel(rank, pull)

    @precondition(lambda self: self.leases)
    @rule(i=st.integers(0, 1000))
    def revoke(self, i: int) -> None:
        rank, lease = self.leases[i % len(self.leases)]
        self.world.revoke(rank, lease)

    @invariant()
    def published_bytes_are_right(self) -> None:
        for rank, pull, params, blocks in self.pulls:
            if pull.reason is not Reason.COMPLETE or pull.pull_id in self.checked:
                continue
            self.checked.add(pull.pull_id)
            d, part = rank.core.identity.layout.tp_rank, rank.buffers.layout.views[0].parts[0]
            answered = [self.prefill[p] for p in remote_ranks(d, len(self.decode), len(self.prefill))]
            # Of replicas one is read: another than the first if that could not be met.
            read = {source.rank.tp_rank for source in pull.sources if source.reads}
            answered = [p for p in answered if p.core.identity.layout.tp_rank in read]
            for head in range(*part.held):
                holds = [p for p in answered if head in range(*p.buffers.layout.views[0].parts[0].held)]
                lent = self.source[holds[0].name, params.key.token]
                # Blocks are filled with one value each, so any share of a block is that value.
                for block, was in zip(blocks[:-1], lent[:-1], strict=True):
                    assert set(rank.buffers.head(block, head)) == set(was)

    @invariant()
    def nothing_is_lost_or_owned_twice(self) -> None:
        self.world.check()
        for rank, pull, _, _ in self.pulls:
            assert pull.is_returned or rank.core.ledger.get(pull.pull_id) is not None
            if pull.reason is not None:
                assert pull.published_at <= max(pull.deadline, pull.called_at + 6.0) + 0.001

    @invariant()
    def every_request_can_be_listed(self) -> None:
        for rank in (*self.prefill, *self.decode):
            core = rank.core
            requests = rank.inspect.requests(self.world.time(rank))
            listed = [r.pull_id or (r.request_id, r.sequence) for r in requests]
            known: list[Any] = [(key.lent.request_id, key.lent.key.sequence) for key in core.prefill.leases.values()]
            assert sorted(listed, key=str) == sorted([*known, *core.decode.pulls], key=str)
            assert sum(r.blocks for r in requests) == sum(hold.num_blocks for hold in core.ledger)
            assert json.loads(json.dumps([dataclasses.asdict(r) for r in requests], allow_nan=False)) or not requests
            for request in requests:
                assert request.waits or request.kind == "lease"
                assert all(x.bytes_read <= x.bytes_planned for x in request.ranks)

    @invariant()
    def phases_add_up_to_what_a_pull_took(self) -> None:
        for rank in self.decode:
            for pull in rank.ended:
                spans = phases(pull)
                in_turn = ("announced", "handshake", "queue", "plan", "read", "confirm", "drain")
                began = pull.begun_at if pull.begun_at < math.inf else pull.history[0][0]
                assert min(spans.values()) >= 0
                assert sum(spans.get(x, 0.0) for x in in_turn) == pytest.approx(pull.published_at - began)
                assert (pull.failed_in in in_turn[:-1]) is (pull.reason is not Reason.COMPLETE)

    def teardown(self) -> None:
        """Let everything end: afterwards every core is idle and every ledger empty."""
        if not self.prefill:
            return
        while self.without_agent:
            self.replace_agent()
        for _ in range(40):
            for rank in self.decode:
                self.world.complete_reads(rank)
            for _ in range(len(self.world.letters)):
                self.world.deliver()
            self.published_bytes_are_right()
            self.world.advance(1.0)
        self.world.check()
        for rank in (*self.prefill, *self.decode):
            assert rank.core.is_idle, rank.inspect.gauges()
            assert len(rank.core.ledger) == 0
        for rank, pull, _, _ in self.pulls:
            assert pull.reason is not None
            assert rank.ended.count(pull) == 1
            assert rank.returned.count(pull) == 1
        for rank, lease in self.leases:
            assert rank.leases_ended.count(lease) == 1


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=60, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_invariants_hold_over_many_more_orders() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=300, stateful_step_count=80, suppress_health_check=list(HealthCheck))
    )
