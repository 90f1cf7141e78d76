"""Several remote ranks behind one pull: who is met, who is read, who only hears of the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from asynckv.config import EngineConfig, LeaseConfig, PullConfig
from asynckv.core import routes
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.lease import Lease, LeaseState
from asynckv.core.peer import PeerState
from asynckv.core.pull import Pull, PullRequest
from asynckv.core.types import Endpoint, KVTransferParams, Outcome, Reason, decode_params
from asynckv.errors import LocalProtocolError, PlanRefused
from asynckv.geometry.bounds import BlockRuns
from asynckv.geometry.layout import Layout
from asynckv.scheduler import PrefillRanks
from tests import oracle
from tests.lab.oracles import wrong_in
from tests.oracle import Engine, GroupSpec, LayerSpec, PartSpec
from tests.world import Buffers, Rank, World, begin, make_layout, opened, ranks_of, reason

CONFIG = EngineConfig(
    engine_id="x", lease=LeaseConfig(lease_s=30.0, grant_s=10.0), pull=PullConfig(handshake_s=2.0, drain_s=1.0)
)
ORDER = ("block", "head", "kv", "token", "dim")


class Pair:
    """A prefill and a decode engine of any sizes, and one request between them."""

    def __init__(self, prefill: int, decode: int, heads: int = 12, config: EngineConfig = CONFIG) -> None:
        self.world, self.heads = World(config), heads
        self.prefill = [
            self.add(f"p{r}", make_layout(r, prefill, base=(r + 1) << 40, num_heads=heads), r) for r in range(prefill)
        ]
        self.decode = [
            self.add(f"d{r}", make_layout(r, decode, base=(r + 30) << 40, num_heads=heads, order=ORDER), 50 + r)
            for r in range(decode)
        ]
        self.want: dict[int, list[bytes]] = {}

    def add(self, name: str, layout: Layout, seed: int) -> Rank:
        return self.world.add(name, layout, engine_id={"p": "prefill", "d": "decode"}[name[0]], seed=seed)

    def lend(self, blocks: Sequence[int], tokens: int, **kwargs: object) -> tuple[KVTransferParams, list[Lease]]:
        """Replicas of a head hold the same; then lend on every rank."""
        for head in range(self.heads):
            holds = [p for p in self.prefill if head in range(*p.buffers.layout.views[0].parts[0].held)]
            for block in blocks:
                for other in holds[1:]:
                    for b, (memory, start, length) in enumerate(other.buffers.head_spans(block, head)):
                        source, at, _ = holds[0].buffers.head_spans(block, head)[b]
                        other.buffers.arrays[memory][start : start + length] = holds[0].buffers.arrays[source][
                            at : at + length
                        ]
            self.want[head] = [holds[0].buffers.head(b, head) for b in blocks]
        params = self.world.params(self.prefill, "req-P", blocks, tokens, **{"written": True, **kwargs})
        return params, [self.world.lend(p, params) for p in self.prefill]

    def pull(self, blocks: Sequence[int], params: KVTransferParams) -> list[Pull]:
        return [self.world.pull(d, "req-D", blocks, params) for d in self.decode]

    def check(self, blocks: Sequence[int]) -> None:
        for rank in self.decode:
            for head in range(*rank.buffers.layout.views[0].parts[0].held):
                assert [rank.buffers.head(b, head) for b in blocks] == self.want[head]
        self.world.check()


@pytest.mark.parametrize("heads", [1, 2, 12])
@pytest.mark.parametrize(
    ("prefill", "decode"), [(1, 4), (4, 1), (3, 2), (2, 3), (4, 6), (6, 4), (4, 4), (8, 2), (2, 8)]
)
def test_b1_to_b7_every_head_arrives_and_every_rank_is_freed(prefill: int, decode: int, heads: int) -> None:
    if any(heads % n and n % heads for n in (prefill, decode)):
        heads = 12 if heads == 2 else 24
    it = Pair(prefill, decode, heads)
    params, leases = it.lend([3, 1], 8)
    pulls = it.pull([9, 4], params)
    it.world.run()
    assert [p.reason for p in pulls] == [Reason.COMPLETE] * decode
    it.check([9, 4])
    # Every prefill rank is released, read or not, under the prefill side's request id, by exactly its readers.
    assert [lease.state for lease in leases] == [LeaseState.RELEASED] * prefill
    assert all({x.outcome for x in lease.discharged.values()} == {Outcome.COMPLETE} for lease in leases)
    assert it.world.now == 0.0
    assert all(r.core.is_idle for r in (*it.prefill, *it.decode))
    # A replica that nobody reads is not even met.
    for rank, row in zip(it.decode, pulls, strict=True):
        met = {p.tp_rank for p in rank.core.decode.peers.by_place.values() if p.state is not PeerState.NEW}
        assert met == {source.rank.tp_rank for source in row.sources if source.reads}


def test_b7_replicas_are_skipped() -> None:
    it = Pair(4, 1, heads=2)
    params, _ = it.lend([3], 4)
    [pull] = it.pull([9], params)
    it.world.run()
    assert [source.rank.tp_rank for source in pull.sources if source.reads] == [0, 2]
    assert [source.releases for source in pull.sources] == [1, 1, 1, 1]


def test_a_dead_replica_delays_no_reader() -> None:
    it = Pair(4, 1, heads=2)
    params, leases = it.lend([3], 4)
    del it.world.ranks["p1"]
    [pull] = it.pull([9], params)
    it.world.run()
    assert pull.reason is Reason.COMPLETE
    assert it.world.now == 0.0
    assert [lease.state for lease in leases] == [LeaseState.RELEASED, LeaseState.LENT] + [LeaseState.RELEASED] * 2


def test_one_source_lost_fails_the_pull_once_the_others_have_drained() -> None:
    it = Pair(3, 1)
    params, leases = it.lend([3, 1], 8)
    [pull] = it.pull([9, 4], params)
    [decode] = it.decode
    it.world.deliver_all()
    first = min(decode.reads)
    it.world.tell(decode, TransferEnded(first, Ending.FAILED, "gone", peer_lost=True))
    it.world.deliver_all()
    assert reason(pull) is None
    assert pull.holds_blocks
    it.world.run()
    assert pull.reason is Reason.PEER_LOST
    # The rank that was taken for lost lives, and was told in one word all the same.
    assert [lease.state.value for lease in leases] == ["released"] * 3
    it.world.check()


def half_read() -> tuple[Pair, Pull, list[Lease]]:
    """A pull from two ranks, of which the first has been read and has granted."""
    it = Pair(2, 1)
    params, leases = it.lend([3], 4)
    [pull] = it.pull([9], params)
    [decode] = it.decode
    it.world.deliver_all()
    first = next(source for source in pull.sources if source.rank.tp_rank == 0)
    for transfer_id in list(first.running):
        it.world.complete(decode, transfer_id)
    it.world.deliver_all()
    return it, pull, leases


def test_of_several_failures_the_first_is_told() -> None:
    it = Pair(3, 1)
    params, _ = it.lend([3, 1], 8)
    [pull] = it.pull([9, 4], params)
    [decode] = it.decode
    it.world.deliver_all()
    first, second, *_ = sorted(decode.reads)
    it.world.tell(decode, TransferEnded(first, Ending.FAILED, "the first"))
    it.world.tell(decode, TransferEnded(second, Ending.FAILED, "another", peer_lost=True))
    it.world.run()
    assert pull.reason is Reason.READ_FAILED
    assert "the first" in pull.detail
    it.world.check()


def test_a_request_cancelled_by_its_id_is_discharged_whatever_it_wanted() -> None:
    it = Pair(1, 1)
    params, leases = it.lend([3], 4)
    [decode] = it.decode
    request = PullRequest("d", [(0, [9])], params, is_last=False)
    pull = begin(decode.core, request, 30.0, it.world.time(decode))
    it.world.settle(decode)
    it.world.deliver_all()
    assert decode.core.cancel("d", it.world.time(decode))
    it.world.settle(decode)
    it.world.run()
    assert reason(pull) is Reason.CANCELLED
    assert [lease.state for lease in leases] == [LeaseState.RELEASED]
    assert [str(d.outcome) for d in leases[0].discharged.values()] == ["cancelled"]


def test_a_rank_that_is_proven_may_go() -> None:
    it, pull, _ = half_read()
    [decode], sources = it.decode, {source.rank.tp_rank: source for source in pull.sources}
    assert sources[0].proven
    it.world.forget(decode, sources[0].address)
    assert reason(pull) is None
    it.world.run()
    assert pull.reason is Reason.COMPLETE
    it.check([9])


def test_a_lease_that_ends_after_its_proof_fails_nothing() -> None:
    it, pull, leases = half_read()
    it.prefill[0].core.prefill.revoke(leases[0], it.world.time(it.prefill[0]))
    it.world.settle(it.prefill[0])
    it.world.live(20.0)
    assert leases[0].state is LeaseState.REVOKED
    assert reason(pull) is None
    it.world.run()
    assert pull.reason is Reason.COMPLETE


def test_only_the_rank_that_was_read_too_early_is_read_again() -> None:
    it = Pair(2, 1)
    params = it.world.params(it.prefill, "req", [3], 4)
    it.world.lend(it.prefill[0], params)
    it.world.advance(1.0)
    [pull] = it.pull([9], params)
    [decode] = it.decode
    # The handshakes only: reading begins, the claims are under way.
    it.world.deliver_all()
    it.world.complete_reads(decode)
    it.world.deliver_all()
    assert pull.reason is None
    it.world.advance(1.0)
    it.prefill[1].buffers.overwrite(3, 0x77)
    it.world.lend(it.prefill[1], params)
    it.world.run(1.0)
    assert pull.reason is Reason.COMPLETE
    assert all(set(decode.buffers.head(9, head)) == {0x77} for head in range(6, 12))
    assert pull.measures.rereads == 1


# -- ranges that the usual rule does not predict -----------------------------------------------------------


def swapped(extent: int, rank: int, size: int) -> tuple[int, int]:
    """Neighbours hold each other's share."""
    return oracle.even(extent, rank ^ 1 if size > 1 else rank, size)


def unusual(prefill: int, held: oracle.Held, num_heads: int = 8) -> tuple[World, list[Rank], Rank]:
    layers = (LayerSpec("a", (PartSpec("kv", (("head", num_heads), ("dim", 2)), "head", held=held),)),)
    world = World(CONFIG)
    sides = [
        (world.add(f"p{r}", oracle.Rank(there, r, base=(r + 1) << 40).layout, engine_id="prefill", seed=r))
        for there in [Engine(layers, (GroupSpec((0,), 4),), prefill)]
        for r in range(prefill)
    ]
    here = Engine(layers, (GroupSpec((0,), 4),), 1, orders={"kv": ("token", "head", "dim")})
    return world, sides, world.add("d0", oracle.Rank(here, 0, base=1 << 50).layout, engine_id="decode", seed=99)


def heads(buffers: Buffers, block: int) -> dict[int, bytes]:
    return {h: b"".join(sorted_head(buffers, block, h)) for h in range(*buffers.layout.views[0].parts[0].held)}


def sorted_head(buffers: Buffers, block: int, head: int) -> list[bytes]:
    """One head's elements by token and dim, whatever the order in memory."""
    view = buffers.layout.views[0]
    part = view.parts[0]
    dims = {d.name: d for d in part.dims}
    base = view.offset + part.offset + block * view.stride + (head - part.held[0]) * dims["head"].stride
    return [
        buffers.arrays[view.memory][at : at + part.itemsize].tobytes()
        for t in range(dims["token"].size)
        for d in range(dims["dim"].size)
        for at in [base + t * dims["token"].stride + d * dims["dim"].stride]
    ]


def test_ranges_of_any_kind_are_read_where_they_are() -> None:
    world, prefill, decode = unusual(4, swapped)
    want = {h: b for p in prefill for h, b in heads(p.buffers, 3).items()}
    params, leases = world.lent_by(prefill, "req", [3], written=True)
    pull = world.pull(decode, "d", [5], params)
    world.run()
    assert pull.reason is Reason.COMPLETE
    assert heads(decode.buffers, 5) == want
    assert all(lease.state is LeaseState.RELEASED for lease in leases)


def alternating(extent: int, rank: int, size: int) -> tuple[int, int]:
    """Heads dealt out like cards (what GQA replicas must not be: CASES B6)."""
    return (rank % extent, rank % extent + 1) if size > 1 else (0, extent)


@pytest.mark.parametrize("missing", ["", "p3", "p1"])
def test_where_the_rule_fails_all_are_asked_and_a_replica_may_be_missing(missing: str) -> None:
    world, prefill, decode = unusual(4, alternating, num_heads=2)
    want = {h: b for p in prefill[:2] for h, b in heads(p.buffers, 3).items()}
    for twin, other in ((2, 0), (3, 1)):
        prefill[twin].buffers.arrays[0][:] = prefill[other].buffers.arrays[0]
    params, _ = world.lent_by(prefill, "req", [3], written=True)
    world.ranks.pop(missing, None)
    pull = world.pull(decode, "d", [5], params)
    for _ in range(30):
        world.run(0.1)
    assert pull.reason is Reason.COMPLETE
    assert heads(decode.buffers, 5) == want
    read = [source.rank.tp_rank for source in pull.sources if source.reads]
    assert read == ([0, 3] if missing == "p1" else [0, 1])


def test_without_another_holder_the_missing_rank_is_the_cause() -> None:
    world, prefill, decode = unusual(4, lambda e, r, s: ((0, 1) if r < 3 else (1, 2)) if s > 1 else (0, e), num_heads=2)
    params = world.params(prefill, "req", [3], 4, written=True)
    world.ranks.pop("p3")
    pull = world.pull(decode, "d", [5], params)
    for _ in range(30):
        world.run(0.1)
    assert pull.reason is Reason.UNREACHABLE
    assert "p3" in pull.detail


def staged() -> tuple[World, list[Rank], Rank]:
    layers = (
        LayerSpec("a", (PartSpec("kv", (("head", 2),), "head"),)),
        LayerSpec("b", (PartSpec("kv", (("head", 2),), "head"),)),
    )
    world = World(CONFIG)
    there = Engine(layers, (GroupSpec((0, 1), 4),), 1, 2)
    prefill = [
        world.add(f"p{s}", oracle.Rank(there, 0, s, base=(s + 1) << 40).layout, engine_id="prefill", seed=s)
        for s in range(2)
    ]
    here = Engine(layers, (GroupSpec((0, 1), 4),), 1)
    return world, prefill, world.add("d0", oracle.Rank(here, 0, base=1 << 50).layout, engine_id="decode", seed=99)


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("missing", [["p0"], ["p1"], ["p0", "p1"]])
def test_stages_that_are_missing_fail_the_pull_and_never_complete_it(missing: list[str], announced: bool) -> None:
    world, prefill, decode = staged()
    params, _ = world.lent_by(prefill, "req", [3], written=True)
    for name in missing:
        del world.ranks[name]
    for i in range(3):
        now = world.time(decode)
        if announced:
            decode.core.announce(f"d{i}", params, "", 60.0, now)
            world.settle(decode)
            for _ in range(25):
                world.run(0.1)
        try:
            pull = world.pull(decode, f"d{i}", [5 + i], params)
        except LocalProtocolError:
            continue
        for _ in range(25):
            world.run(0.1)
        # A failed attempt strikes its reader off on the ranks that are there.
        assert pull.reason in (Reason.UNREACHABLE, *([Reason.CONSUMED] if i else []))
        assert pull.published_at - pull.called_at <= 2.1
    world.check()


def test_stages_that_are_there_are_read_for_what_they_have() -> None:
    world, prefill, decode = staged()
    params, leases = world.lent_by(prefill, "req", [3], written=True)
    pull = world.pull(decode, "d", [5], params)
    world.run()
    assert pull.reason is Reason.COMPLETE
    assert pull.measures.num_bytes == 2 * 4 * 2 * 2
    assert all(lease.state is LeaseState.RELEASED for lease in leases)


@pytest.mark.parametrize("first", [0, 1])
def test_stages_of_another_model_are_refused_whichever_answers_first(first: int) -> None:
    def stage_of(names: tuple[str, ...], stage: int, size: int) -> Layout:
        layout = make_layout(layers=len(names), base=(stage + 1) << 40)
        views = tuple(msgspec.structs.replace(v, layer=n) for v, n in zip(layout.views, names, strict=True))
        return msgspec.structs.replace(layout, pp_stage=stage, pp_size=size, views=views)

    world = World()
    layers = (("a", "b"), ("c", "d"))
    prefill = [world.add(f"p{s}", stage_of(layers[s], s, 2), engine_id="prefill") for s in range(2)]
    decode = world.add("d", stage_of(("a", "b"), 0, 1))
    params, _ = world.lent_by(prefill, "r", [1])
    pull = world.pull(decode, "d", [1], params)
    # The hellos are answered in either order.
    order = [x for x in world.letters if x.to == prefill[first].address]
    order += [x for x in world.letters if x.to != prefill[first].address]
    world.letters[:] = order
    world.run()
    assert pull.reason is Reason.GEOMETRY
    assert "layers only on one side: local none, remote ['c', 'd']" in pull.detail


def test_a_rank_that_holds_nothing_of_what_is_wanted_is_not_waited_for() -> None:
    layers = tuple(LayerSpec(n, (PartSpec("kv", (("head", 2),), "head"),)) for n in "ab")
    groups = (GroupSpec((0,), 4), GroupSpec((1,), 4))
    world = World(CONFIG)
    there = Engine(layers, groups, 1, 2)
    prefill = [
        world.add(f"p{s}", oracle.Rank(there, 0, s, base=(s + 1) << 40).layout, engine_id="prefill", seed=s)
        for s in range(2)
    ]
    decode = world.add("d0", oracle.Rank(Engine(layers, groups), 0, base=1 << 50).layout, engine_id="decode", seed=99)
    key = PrefillRanks("prefill", [p.endpoint for p in prefill], pp_size=2)
    del world.ranks["p1"]
    for i, wanted in enumerate([[(0, [5]), (4, [])], [(0, [6]), (4, [7])]]):
        params = decode_params(key.make_params(f"req{i}", [(0, [3 + i]), (0, [3 + i])], 4, written=True))
        world.lend(prefill[0], params)
        pull = begin(decode.core, PullRequest(f"d{i}", wanted, params), 30.0, world.time(decode))
        world.settle(decode)
        world.run()
        # Group 1 is all in the cache, or has room for tokens to come: its stage may be dead.
        assert pull.reason is Reason.COMPLETE
        assert world.now == 0.0
    world.check()


def sharing(**config: Any) -> tuple[World, list[Rank], Rank]:
    """Return two prefill ranks with the even and the odd tokens, and a decode rank with all."""
    world = World(EngineConfig(engine_id="x", **config))
    return world, ranks_of(world, "prefill", 2, shards=2, num_heads=1), world.add("d0", make_layout(num_heads=1))


def test_a_rank_whose_tokens_are_not_wanted_is_not_renewed_and_is_released() -> None:
    world, prefill, decode = sharing(lease=LeaseConfig(lease_s=8.0, grant_s=4.0))
    params = world.params(prefill, "req", [3], 1, written=True)
    leases = [world.lend(rank, params) for rank in prefill]
    pull = world.pull(decode, "d", [5], params)
    world.deliver_all()
    assert [source.plan is not None and source.plan.num_bytes > 0 for source in pull.sources] == [True, False]
    assert [source.claim_at < math.inf for source in pull.sources] == [True, False]
    world.run()
    assert (pull.reason, [lease.state for lease in leases]) == (Reason.COMPLETE, [LeaseState.RELEASED] * 2)
    world.check()


def test_no_other_rank_stands_in_for_one_whose_tokens_it_has_not() -> None:
    world, prefill, decode = sharing(pull=PullConfig(handshake_s=2.0))
    params, leases = world.lent_by(prefill, "req", [3], written=True)
    del world.ranks["p1"]
    pull = world.pull(decode, "d", [5], params)
    for _ in range(25):
        world.run(0.1)
    assert (pull.reason, "p1" in pull.detail) == (Reason.UNREACHABLE, True)
    assert not decode.posts
    assert leases[0].state is LeaseState.RELEASED
    world.check()


def test_a_rank_that_shares_tokens_is_lost_while_it_is_read_and_its_neighbour_is_released() -> None:
    world, prefill, decode = sharing()
    params, leases = world.lent_by(prefill, "req", [3], written=True)
    pull = world.pull(decode, "d", [5], params)
    world.deliver_all()
    assert len({source.rank.tp_rank for source in pull.sources if source.running}) == 2
    del world.ranks["p1"]
    world.forget(decode, prefill[1].address)
    world.run(2.0)
    assert pull.reason is Reason.PEER_LOST
    assert leases[0].state is LeaseState.RELEASED
    world.check()


def test_a_replica_stands_in_for_one_that_is_dead() -> None:
    it = Pair(4, 1, heads=2)
    params, _ = it.lend([3], 4)
    del it.world.ranks["p0"]
    [pull] = it.pull([9], params)
    for _ in range(25):
        it.world.run(0.1)
    assert pull.reason is Reason.COMPLETE
    assert [source.rank.tp_rank for source in pull.sources if source.reads] == [1, 2]
    it.check([9])


def test_peers_that_could_not_be_met_are_forgotten_with_their_links() -> None:
    it = Pair(2, 1)
    for rank in it.prefill:
        rank.core.close(0.0)
    for i in range(5):
        params = it.world.params(it.prefill, f"req{i}", [3], 4)
        it.world.pull(it.decode[0], f"d{i}", [9], params)
        it.world.run()
    for _ in range(100):
        it.world.run(40.0)
    assert it.decode[0].core.is_idle
    assert not it.decode[0].core.decode.peers.by_place


def test_peers_that_nothing_is_read_from_are_forgotten_and_met_anew() -> None:
    it = Pair(2, 1)
    for i in range(2):
        params, _ = it.lend([3 + i], 4)
        [pull] = [it.world.pull(it.decode[0], f"d{i}", [9], params)]
        it.world.run()
        assert pull.reason is Reason.COMPLETE
        assert len(it.decode[0].peers) == 2
        for _ in range(14):
            it.world.run(50.0)
        assert not it.decode[0].core.decode.peers.by_place
        assert not it.decode[0].peers


def test_an_address_that_is_met_again_at_once_keeps_its_link() -> None:
    """Its hello would leave first, and the answer be lost with the link that is closed behind it."""
    it = Pair(1, 1)
    decode = it.decode[0]
    params, _ = it.lend([3], 4)
    again, _ = it.lend([4], 4)
    it.world.pull(decode, "d", [9], params)
    it.world.run()
    now = it.world.time(decode)
    for after in (601.0, 662.0):  # idle, then forgotten
        decode.core.tick(now + after)
    assert not decode.core.decode.peers.by_place
    assert list(decode.core.outbox.unlinked) == [it.prefill[0].address]
    begin(decode.core, PullRequest("again", [(0, [9])], again), 30.0, now + 662.0)
    assert not decode.core.outbox.unlinked


def hit(it: Pair, rank: Rank, request_id: str, params: KVTransferParams) -> None:
    """All of a request's blocks are here already: its ranks are only released."""
    pull = begin(rank.core, PullRequest(request_id, [(0, [])], params), 30.0, it.world.time(rank))
    for to, data in rank.core.outbox.take_packets():
        rank.send(to, data)
    while it.world.letters:
        letter = it.world.letters.pop()
        if letter.answer:
            rank.core.receive(letter.origin, letter.data, it.world.time(rank))
        else:
            it.world.letters.append(letter)
            it.world.deliver(len(it.world.letters) - 1)
    assert (pull.reason, pull.is_over) == (Reason.COMPLETE, True)


def test_a_rank_that_is_only_released_keeps_its_link_for_the_next_and_is_forgotten_in_the_end() -> None:
    """Full prefix hits come one after the other: a link for each would be made anew, and nobody's short cut hold."""
    it = Pair(1, 1)
    decode = it.decode[0]
    peers = decode.core.decode.peers
    changes = peers.num_changes
    for number in range(3):
        params, _ = it.lend([3 + number], 4)
        hit(it, decode, f"d{number}", params)
        assert not decode.core.outbox.unlinked
        assert [peer.state for peer in peers.by_place.values()] == [PeerState.NEW]
    assert peers.num_changes == changes
    it.world.run()
    for _ in range(13):
        it.world.run(50.0)
    assert not peers.by_place


def test_what_is_known_of_a_group_of_ranks_holds_until_one_of_them_ceases_to_be_ready() -> None:
    it = Pair(2, 1)
    peers = it.decode[0].core.decode.peers
    params, _ = it.lend([3], 4)
    it.world.pull(it.decode[0], "d", [9], params)
    it.world.run()
    assert peers.num_changes == 0, "that they were met ends nothing that was known of others"
    it.world.advance(1.0)
    again, _ = it.lend([4], 4)
    it.world.pull(it.decode[0], "again", [9], again)
    it.world.live(2.0, 0.25, is_heard=False)
    assert {peer.state for peer in peers.by_place.values()} == {PeerState.SUSPECT}
    assert peers.num_changes == 2


def test_too_many_ranks_are_refused_at_once() -> None:
    it = Pair(1, 1)
    params, _ = it.lend([3], 4)
    crowd = tuple(Endpoint(r, f"tcp://127.0.0.1:{r + 1}", "i") for r in range(2000))
    with pytest.raises(PlanRefused, match="2000 x 1 prefill ranks, more than 128"):
        it.world.pull(it.decode[0], "d", [9], msgspec.structs.replace(params, tp_size=2000, endpoints=crowd))


@pytest.mark.parametrize("lie", [{"num_tokens": 8}, {"written": True}])
def test_params_that_were_changed_on_the_way_prove_nothing(lie: dict[str, Any]) -> None:
    it = Pair(1, 1)
    params, _ = it.lend([3, 4], 5, written=False)
    pull = it.world.pull(it.decode[0], "d", [8, 9], msgspec.structs.replace(params, **lie))
    it.world.run()
    assert pull.reason is Reason.BLOCKS_DIFFER


def test_other_params_under_the_same_key_are_refused() -> None:
    it = Pair(1, 1)
    params, _ = it.lend([3], 4)
    [decode] = it.decode
    decode.core.announce("req-D", params, "", 60.0, it.world.time(decode))
    other = msgspec.structs.replace(params, groups=(BlockRuns(0, ((6, 1),)),))
    with pytest.raises(LocalProtocolError, match="announced with other params"):
        it.world.pull(decode, "req-D", [9], other)


def test_a_gap_is_refused_at_the_handshake_with_the_ranges() -> None:
    world, prefill, decode = unusual(2, lambda extent, rank, size: (0, 4) if size > 1 else (0, extent))
    params, _ = world.lent_by(prefill, "req", [3], written=True)
    pull = world.pull(decode, "d", [5], params)
    world.run()
    assert pull.reason is Reason.GEOMETRY
    assert "needs [4, 8) of 8 along 'head' of part 'kv', remote holds tp0 [0, 4), tp1 [0, 4)" in pull.detail
    assert not decode.reads
    world.check()


def test_a_proven_rank_that_goes_does_not_keep_the_others_from_being_read_again() -> None:
    world = World()
    decode = world.add("d", make_layout(0, 1))
    first, second = (world.add(f"p{i}", make_layout(i, 2), engine_id="p") for i in (0, 1))
    met, _ = world.lent_by([first, second], "r0", [3])
    world.pull(decode, "x0", [4], met)
    world.run()
    params = world.params([first, second], "r", [1], 4)
    world.lend(first, params)
    pull = world.pull(decode, "x", [2], params, timeout=20)  # ahead of the second rank's data
    world.complete_all()
    world.deliver_all()
    world.complete_all()
    assert [source.proven for source in pull.sources] == [True, False]
    world.forget(decode, first.address)
    world.lend(second, params)
    world.run(3)
    assert pull.reason == "complete"
    assert decode.inspect.check_integrity() + wrong_in(decode.core.decode) == []


def test_a_rank_that_was_taken_for_gone_is_released_until_it_acknowledges() -> None:
    world = World()
    decode = world.add("d", make_layout(0, 1, num_heads=1))
    ranks = [world.add(f"p{i}", make_layout(i, 2, num_heads=1), engine_id="p") for i in (0, 1)]

    def ask(number: int) -> list[Lease]:
        params = world.params(ranks, f"r{number}", [number], 4, written=True)
        leases = [world.lend(rank, params) for rank in ranks]
        world.pull(decode, f"x{number}", [number], params)
        return leases

    ask(1)
    world.run()
    decode.core.decode.forget(ranks[1].address, world.time(decode))  # a router was wrong about the replica
    world.settle(decode)
    ask(2)  # within the back-off
    world.run()
    world.advance(10)
    leases, lost = ask(3), 0
    for _ in range(60):
        for letter in [x for x in world.letters if x.sender is decode and x.to == ranks[1].address and not lost]:
            world.letters.remove(letter)
            lost += 1
        world.deliver_all()
        world.complete_all()
        if not world.letters:
            world.advance(0.2)
    assert lost
    assert [lease.state.value for lease in leases] == ["released", "released"]


def test_nothing_is_kept_of_ranks_that_are_gone() -> None:
    world, prefill, decode = opened()
    params, _ = world.lent(prefill, "r", [1], written=True)
    world.pull(decode, "x", [2], params)
    world.run()
    (route,) = decode.core.decode.routes._groups.values()
    assert route.ready
    world.forget(decode, prefill.address)
    assert not route.ready
    # Nor of a handshake that was under way.
    world.advance(1.0)
    world.pull(decode, "y", [3], world.params([prefill], "s", [2], 4))
    assert len(decode.core.decode.peers._hellos) == 1
    decode.core.decode.forget(prefill.address, world.time(decode))
    assert not decode.core.decode.peers._hellos


@pytest.mark.parametrize("what", ["groups", "choices"])
def test_what_is_remembered_of_prefill_groups_is_bounded(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_ENDPOINTS", 4)
    monkeypatch.setattr(routes, "MAX_CHOICES", 4)
    world = World()
    decode = world.add("d", make_layout())
    for i in range(9):
        prefill = world.add(f"p{i}", make_layout(base=(i + 2) << 41), engine_id=f"prefill{i}", seed=i)
        params, _ = world.lent(prefill, "r", [1], written=True)
        pull = world.pull(decode, f"x{i}", [2], params)
        world.run()
        assert pull.reason is Reason.COMPLETE
    known = decode.core.decode.routes
    assert len(known._groups if what == "groups" else known._chosen) <= 4


def test_a_rank_that_is_still_being_loaded_is_not_loaded_a_second_time() -> None:
    world, prefill, decode = opened()
    world.auto_load = False
    for i in range(3):
        params, _ = world.lent(prefill, f"r{i}", [1 + i], written=True)
        pull = world.pull(decode, f"x{i}", [2 + i], params)
        world.deliver_all()
        assert len(decode.loading) == 1
        world.forget(decode, prefill.address)
        assert reason(pull) is Reason.PEER_LOST
        world.advance(5.0)
        world.letters.clear()
    world.auto_load = True
    world.load(decode)
    params, _ = world.lent(prefill, "again", [5], written=True)
    pull = world.pull(decode, "again", [8], params)
    world.run()
    assert reason(pull) is Reason.COMPLETE
