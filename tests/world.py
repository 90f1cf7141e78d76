"""Several nodes in one process with no event loop: real cores, real bytes, messages in our hands.

Prefill memory is overwritten the moment the core gives its blocks back, and a read copies what is there
when it *lands*, so that a core that frees or believes too early is caught by the bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import UNSET

from asynckv.account.inspect import Inspector
from asynckv.account.survey import Survey
from asynckv.account.watch import HeldAlike, Watch
from asynckv.config import EngineConfig
from asynckv.core.attempts import Request
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.following import Following
from asynckv.core.lease import Lease, LeaseState
from asynckv.core.outbox import (
    DetachRead,
    FollowReached,
    LeaseOver,
    LoadPeer,
    Milestone,
    PackBlocks,
    PullReached,
    RemovePeer,
    RequestReached,
)
from asynckv.core.peer import Peer
from asynckv.core.pull import Pull, PullRequest
from asynckv.core.rank import RankCore
from asynckv.core.readers import Identity
from asynckv.core.types import Address, Endpoint, FollowParams, KVTransferParams, Reason, TransferId, decode_params
from asynckv.geometry.blocks import check_block_ids
from asynckv.geometry.bounds import BlockRuns
from asynckv.geometry.gather import Gathered, Packing
from asynckv.geometry.layout import Group, Layout, Memory, TokenShard, attention_view, shard
from asynckv.geometry.look import Look
from asynckv.geometry.match import assign
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.plan import ReadRequest
from asynckv.geometry.staging import ReadCosts
from asynckv.geometry.tables import PeerTables
from asynckv.scheduler import PrefillRanks
from asynckv.testing.fabric import Fabric, Nic, Origin, Port
from tests.lab.oracles import wrong_in

NUM_BLOCKS = 12
BLOCK = 4
HEADS = 4


def make_layout(
    tp_rank: int = 0,
    tp_size: int = 1,
    *,
    base: int = 1 << 40,
    num_blocks: int = NUM_BLOCKS,
    block_size: int = BLOCK,
    layers: int = 2,
    num_heads: int = HEADS,
    head_dim: int = 2,
    order: Sequence[str] = ("kv", "block", "token", "head", "dim"),
    dtype: str = "float16",
    ratio: int = 1,
    model: str = "toy",
    shards: int = 1,
    interleave: int = 1,
) -> Layout:
    """A small attention layout, one memory per layer. `shards` neighbours hold the same heads, and share the tokens."""
    heads = shard(num_heads, tp_rank // shards, tp_size // shards)
    sizes = {
        "kv": 2,
        "block": num_blocks * ratio,
        "token": block_size // ratio // shards,
        "head": heads[1] - heads[0],
        "dim": head_dim,
    }
    views = [
        attention_view(
            layer=f"layers.{i}", order=order, sizes=sizes, dtype=dtype, heads=heads, num_heads=num_heads, memory=i
        )
        for i in range(layers)
    ]
    size = 2 * num_blocks * block_size // shards * sizes["head"] * head_dim * 2
    shared = (TokenShard(0, shards, tp_rank % shards, interleave),) if shards > 1 else UNSET
    return Layout(
        schema=1 + (shards > 1),
        model=model,
        tp_rank=tp_rank,
        tp_size=tp_size,
        memories=tuple(Memory(base + i * (size + 4096), size) for i in range(layers)),
        groups=(Group("attention", block_size, num_blocks, ratio),),
        views=tuple(views),
        token_shards=shared,
    )


def peer_map(here: Layout, there: Layout) -> PeerTables:
    """The map of a single remote rank."""
    return PeerTables(here, there, assign(here, [there])[0], itertools.count(1))


def block_lists(
    here: Layout, local: Sequence[tuple[int, Sequence[int | None]]], remote: Sequence[BlockRuns], num_tokens: int
) -> BlockLists:
    """Block lists as a caller gives them."""
    return BlockLists(check_block_ids(here, local), remote, num_tokens)


class Buffers:
    """The bytes behind a layout."""

    def __init__(self, layout: Layout, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.layout = layout
        self.arrays = [rng.integers(0, 256, m.length, dtype=np.uint8) for m in layout.memories]

    def block_spans(self, block_id: int) -> list[tuple[int, int, int]]:
        """Every `(memory, start, length)` of a block of group 0, element runs along the innermost dim."""
        spans = []
        ratio = self.layout.groups[0].ratio
        for view in self.layout.views:
            for part in view.parts:
                for kernel in range(block_id * ratio, (block_id + 1) * ratio):
                    starts = [view.offset + part.offset + kernel * view.stride]
                    for dim in part.dims:
                        starts = [s + i * dim.stride for s in starts for i in range(dim.size)]
                    spans += [(view.memory, s, part.itemsize) for s in starts]
        return spans

    def head_spans(self, block_id: int, head: int) -> list[tuple[int, int, int]]:
        """Every `(memory, start, length)` of one head of the model in a block, by layer, part, token and dim."""
        spans = []
        for view in self.layout.views:
            for part in view.parts:
                starts = [view.offset + part.offset + block_id * view.stride]
                for dim in sorted(part.dims, key=lambda d: ("head", "token", "dim").index(d.name)):
                    steps = [head - part.held[0]] if dim.name == "head" else range(dim.size)
                    starts = [s + i * dim.stride for s in starts for i in steps]
                spans += [(view.memory, s, part.itemsize) for s in starts]
        return spans

    def head(self, block_id: int, head: int) -> bytes:
        """What a block holds of one head of the model, whatever the order in memory."""
        return b"".join(self.arrays[m][s : s + n].tobytes() for m, s, n in self.head_spans(block_id, head))

    def block(self, block_id: int) -> bytes:
        """A block's content in logical order (layer, part, dims as declared)."""
        return b"".join(self.arrays[m][s : s + n].tobytes() for m, s, n in self.block_spans(block_id))

    def overwrite(self, block_id: int, value: int) -> None:
        """Somebody else's data."""
        for memory, start, length in self.block_spans(block_id):
            self.arrays[memory][start : start + length] = value


def begin(core: RankCore, wanted: PullRequest, timeout_s: float, now: float, retries: int = 0) -> Pull:
    """Begin a request; return its first attempt."""
    pull = core.pull(wanted, retries, timeout_s, now).pull
    assert pull is not None
    return pull


class Rank(Port):
    """One rank: its core, its memory, and a clock of its own."""

    def __init__(self, world: World, name: str, core: RankCore, buffers: Buffers, rate: float, epoch: float) -> None:
        super().__init__(world, f"world://{name}", name)
        self.core, self.buffers, self.rate, self.epoch = core, buffers, rate, epoch
        self.nic = Nic(world, core.identity.agent_name, name, buffers.arrays)
        if (packing := core.identity.packing) is not None:
            self.nic.make_copies(packing.num_slots, packing.slot_bytes)
        self.making: dict[int, Gathered] = {}
        """Packed copies that are being made, by slot."""
        self.peers, self.reads = self.nic.remotes, self.nic.running
        self.posts: dict[TransferId, ReadRequest] = {}
        """All reads that were ever posted."""
        self.looks: list[Look] = []
        self.ended: list[Pull] = []
        self.returned: list[Pull] = []
        self.returned_late: list[Pull] = []
        """Those whose blocks were held at the outcome."""
        self.requests_ended: list[Request] = []
        self.requests_returned: list[Request] = []
        self.leases_ended: list[Lease] = []
        self.follows_ended: list[Following] = []
        self.loading: list[Peer] = []
        self.said: list[tuple[float, HeldAlike]] = []
        self.inspect, self.watch = Inspector(core), Watch()
        self.survey = Survey(core, self.inspect)
        core.on_question, core.on_overdue = self.survey.hear, self.watch.add
        self.nic.begin(buffers.layout.memories, lambda: None)
        self.open()

    @property
    def endpoint(self) -> Endpoint:
        layout = self.core.identity.layout
        return Endpoint(layout.tp_rank, self.address, self.core.identity.incarnation, layout.pp_stage)

    @property
    def next_at(self) -> float:
        return min(self.core.next_at, self.watch.next_at, self.survey.next_at)

    def tick(self, now: float) -> None:
        self.said += [(now, alike) for alike in self.watch.tick(now)]
        self.survey.tick(now)
        self.core.tick(now)


@dataclass
class Letter:
    """A packet under way."""

    sender: Port
    receiver: Port
    origin: Origin
    data: bytes

    @property
    def to(self) -> Address:
        return self.receiver.address

    @property
    def answer(self) -> bool:
        return isinstance(self.origin, str)


class World(Fabric):
    """Ranks, the letters between them, and time."""

    def __init__(self, config: EngineConfig | None = None, *, reuse: bool = True) -> None:
        super().__init__()
        self.now = 0.0
        self.ranks: dict[str, Rank] = {}
        self.letters: list[Letter] = []
        self.groups: dict[str, PrefillRanks] = {}
        self.config = config
        self.reuse = reuse
        self.auto_load = self.auto_pack = True

    def add(
        self,
        name: str,
        layout: Layout,
        *,
        engine_id: str = "",
        rate: float = 1.0,
        epoch: float = 0.0,
        seed: int = 0,
        costs: ReadCosts | None = None,
        packing: Packing | None = None,
    ) -> Rank:
        config = self.config or EngineConfig(engine_id="x")
        engine_id = engine_id or name
        agent = f"agent-{name}", name.encode()
        identity = Identity(engine_id, f"{name}-{len(self.ranks)}", *agent, layout, 1000, packing=packing)
        config = replace(config, engine_id=engine_id)
        core = RankCore(identity, config, costs)
        rank = self.ranks[name] = Rank(self, name, core, Buffers(layout, seed), rate, epoch)
        return rank

    def carry(self, sender: Port, receiver: Port, origin: Origin, packet: bytes) -> None:
        self.letters.append(Letter(sender, receiver, origin, packet))

    def time(self, rank: Rank) -> float:
        return rank.epoch + self.now * rank.rate

    # -- calls ---------------------------------------------------------------------------------------

    def params(
        self, ranks: Sequence[Rank], request_id: str, blocks: Sequence[int | None], num_tokens: int, **kwargs: object
    ) -> KVTransferParams:
        endpoints = [r.endpoint for r in ranks]
        names = "+".join(e.incarnation for e in endpoints)
        if names not in self.groups:
            layout = ranks[0].core.identity.layout
            self.groups[names] = PrefillRanks(
                ranks[0].core.identity.engine_id,
                endpoints,
                pp_size=layout.pp_size,
                num_token_shards=layout.num_token_shards,
            )
        group = self.groups[names]
        return decode_params(group.make_params(request_id, [(0, blocks)], num_tokens, **kwargs))  # type: ignore[arg-type]

    def lend(self, rank: Rank, params: KVTransferParams, readers: int = 1, ticket: str = "") -> Lease:
        lease = rank.core.lend(params, readers, self.time(rank), ticket)
        self.settle(rank)
        return lease

    def lent(
        self,
        rank: Rank,
        request_id: str,
        blocks: Sequence[int | None],
        num_tokens: int = 0,
        *,
        readers: int = 1,
        **kwargs: object,
    ) -> tuple[KVTransferParams, Lease]:
        """Lend full blocks of one rank, or `num_tokens` in them."""
        params = self.params([rank], request_id, blocks, num_tokens or BLOCK * len(blocks), **kwargs)
        return params, self.lend(rank, params, readers)

    def lent_by(
        self, ranks: Sequence[Rank], request_id: str, blocks: Sequence[int | None], **kwargs: object
    ) -> tuple[KVTransferParams, list[Lease]]:
        """Lend full blocks of all ranks of an engine."""
        params = self.params(ranks, request_id, blocks, BLOCK * len(blocks), **kwargs)
        return params, [self.lend(rank, params) for rank in ranks]

    def withdraw(self, rank: Rank, params: KVTransferParams) -> None:
        rank.core.withdraw(params, self.time(rank))
        self.settle(rank)

    def revoke(self, rank: Rank, lease: Lease) -> None:
        rank.core.prefill.revoke(lease, self.time(rank))
        self.settle(rank)

    def pull(
        self,
        rank: Rank,
        request_id: str,
        blocks: Sequence[int | None],
        params: KVTransferParams,
        *,
        first: int = 0,
        timeout: float = 30,
        cohort_id: str = "",
    ) -> Pull:
        wanted = PullRequest(request_id, [(first, blocks)], params, cohort_id)
        pull = begin(rank.core, wanted, timeout, self.time(rank))
        self.settle(rank)
        return pull

    def follow(self, rank: Rank, request_id: str, ranks: Sequence[Rank], ticket: str, seconds: float = 60) -> Following:
        """Follow a ticket of the engine of `ranks`."""
        layout = ranks[0].core.identity.layout
        target = FollowParams(
            ticket=ticket,
            engine_id=ranks[0].core.identity.engine_id,
            tp_size=layout.tp_size,
            pp_size=layout.pp_size,
            endpoints=tuple(r.endpoint for r in ranks),
        )
        following = rank.core.follow(request_id, target, "", seconds, self.time(rank))
        self.settle(rank)
        return following

    def announce(self, rank: Rank, request_id: str, params: KVTransferParams, seconds: float) -> Pull:
        pull = rank.core.announce(request_id, params, "", seconds, self.time(rank))
        self.settle(rank)
        return pull

    def discharge(self, rank: Rank, request_id: str, params: KVTransferParams) -> None:
        rank.core.discharge(request_id, params, "", self.time(rank))
        self.settle(rank)

    def cancel(self, rank: Rank, what: Pull | str) -> None:
        """Cancel a request by its name, or one of its attempts."""
        if isinstance(what, str):
            rank.core.cancel(what, self.time(rank))
        else:
            rank.core.decode.cancel(what, self.time(rank))
        self.settle(rank)

    def forget(self, rank: Rank, address: Address) -> None:
        rank.core.decode.forget(address, self.time(rank))
        self.settle(rank)

    def close(self, rank: Rank) -> None:
        rank.core.close(self.time(rank))
        self.settle(rank)

    # -- what the edges do -----------------------------------------------------------------------------

    def settle(self, rank: Rank) -> None:
        """Do what the core wants: letters first, then commands, then posts."""
        core = rank.core
        while True:
            for to, data in core.outbox.take_packets():
                if not rank.send(to, data) and not isinstance(to, str):
                    core.prefill.unreachable(to)
            commands, core.outbox.commands = core.outbox.commands, []
            for command in commands:
                match command:
                    case LoadPeer(peer, metadata):
                        owner = self.ranks[metadata.decode()]
                        rank.nic.load(peer.agent_name, owner.nic, owner.buffers.layout.memories)
                        rank.loading.append(peer)
                        if self.auto_load:
                            self.load(rank)
                    case RemovePeer(peer, keep):
                        rank.nic.remove_remote_agent(peer.agent_name, keep=keep)
                    case DetachRead(transfer_id, is_posted, is_look):
                        if is_posted and any(post.transfer_id == transfer_id for post in core.decode.answered):
                            continue  # it is not posted any more
                        assert rank.nic.detach(transfer_id) or is_look or not is_posted
                        ending = Ending.DETACHED if is_posted else Ending.FAILED
                        core.decode.ended(TransferEnded(transfer_id, ending), 0.0, self.time(rank))
                    case PackBlocks(slot, gathered):
                        assert slot not in rank.making, "two copies in one slot"
                        rank.making[slot] = gathered
                        if self.auto_pack:
                            self.finish_copy(rank, slot)
                    case PullReached(pull, Milestone.ENDED):
                        assert pull not in rank.ended, "two outcomes"
                        rank.ended.append(pull)
                        if pull.is_returned:
                            self._returned(rank, pull)
                    case PullReached(pull, Milestone.RETURNED):
                        assert pull not in rank.returned_late, "returned twice"
                        rank.returned_late.append(pull)
                        if pull not in rank.returned:  # else its blocks came back before its outcome was told
                            self._returned(rank, pull)
                    case RequestReached(request, Milestone.ENDED):
                        assert request not in rank.requests_ended, "a request ended twice"
                        rank.requests_ended.append(request)
                    case RequestReached(request, Milestone.RETURNED | Milestone.RETIRED):
                        assert request in rank.requests_ended, "its blocks are told before its end"
                        rank.requests_returned.append(request)
                    case FollowReached(following):
                        rank.follows_ended.append(following)
                    case LeaseOver(lease):
                        rank.leases_ended.append(lease)
                        if self.reuse:
                            still = {b for h in core.ledger for b in h.blocks.get(0, ())}
                            for b in (b for f, n in lease.lent.groups[0].runs for b in range(f, f + n)):
                                if b not in still:
                                    rank.buffers.overwrite(b, 0xEE)
                    case _:
                        pass
            posts = False
            while (post := core.decode.next_read(self.time(rank))) is not None:
                posts = True
                if isinstance(post.read, Look):
                    rank.looks.append(post.read)
                else:
                    rank.posts[post.transfer_id] = post.read
                rank.reads[post.transfer_id] = rank.nic.prepare(post.transfer_id, post.agent_name, post.read)
            posts = core.decode.admit(self.time(rank)) is not None or posts
            if not commands and not posts and not core.outbox.messages:
                assert all(pull.scheduled_at <= pull.wake_at for pull in core.decode.pulls.values()), "woken too late"
                return

    def _returned(self, rank: Rank, pull: Pull) -> None:
        mine = {t for source in pull.sources for t in source.running | source.doubtful}
        assert not mine & rank.reads.keys(), "returned while something can write"
        rank.returned.append(pull)

    def finish_copy(self, rank: Rank, slot: int, failure: str = "") -> None:
        gathered = rank.making.pop(slot)
        if not failure:
            rank.nic.gather(slot, gathered)
        rank.core.prefill.copies.made(slot, failure)

    def load(self, rank: Rank) -> None:
        while rank.loading:
            rank.core.decode.load_ended(rank.loading.pop(0), "", self.time(rank))
        self.settle(rank)

    def deliver(self, index: int = 0, *, keep: bool = False) -> None:
        letter = self.letters[index] if keep else self.letters.pop(index)
        if (to := self.ranks.get(letter.receiver.name)) is not None:
            to.core.receive(letter.origin, letter.data, self.time(to))
            self.settle(to)

    def deliver_all(self) -> None:
        while self.letters:
            self.deliver()

    def complete(self, rank: Rank, transfer_id: TransferId) -> None:
        transfer = rank.reads[transfer_id]
        transfer.land()
        if not transfer.is_detached:
            transfer.place()
        ending = Ending.FAILED if transfer.is_detached else Ending.DONE
        self.tell(rank, TransferEnded(transfer_id, ending, difference=transfer.difference))

    def complete_reads(self, rank: Rank) -> None:
        for transfer_id in list(rank.reads):
            self.complete(rank, transfer_id)

    def complete_all(self) -> None:
        while any(r.reads for r in self.ranks.values()):
            for rank in self.ranks.values():
                self.complete_reads(rank)

    def tell(self, rank: Rank, news: TransferEnded) -> None:
        if news.ending not in (Ending.IN_DOUBT, Ending.DETACHED):
            rank.reads.pop(news.transfer_id, None)
        rank.core.decode.ended(news, 0.0, self.time(rank))
        self.settle(rank)

    def lose_agent(self, rank: Rank) -> None:
        """The agent that serves a rank's memory dies, and reads of that memory fail."""
        rank.core.agent_lost()
        self.settle(rank)
        for other in self.ranks.values():
            for transfer_id, read in list(other.reads.items()):
                if transfer_id in other.reads and read.owner is rank.nic:
                    self.tell(other, TransferEnded(transfer_id, Ending.FAILED, "its agent died", True))

    def replace_agent(self, rank: Rank) -> None:
        """Another agent serves a rank's memory."""
        rank.nic.starts += 1
        rank.core.agent_replaced(rank.nic.join().name, rank.name.encode())
        self.settle(rank)

    def advance(self, seconds: float) -> None:
        """Let time pass, waking every rank when it wants."""
        end = self.now + seconds
        while True:
            due = [(max((r.next_at - r.epoch) / r.rate, self.now), r.name) for r in self.ranks.values()]
            when, name = min(due)
            if when > end:
                break
            rank = self.ranks[name]
            self.now = max(when, self.now)
            rank.tick(max(self.time(rank), rank.next_at))
            self.settle(rank)
        self.now = end

    def tick(self, rank: Rank) -> None:
        """Wake one rank, whether it wants that or not."""
        rank.core.tick(self.time(rank))
        self.settle(rank)

    def live(self, seconds: float, step: float = 0.5, *, is_heard: bool = True) -> None:
        """Let time pass in steps. After each, letters arrive or are lost; no read ends."""
        for _ in range(round(seconds / step)):
            self.advance(step)
            if is_heard:
                self.deliver_all()
            self.letters.clear()

    def run(self, seconds: float = 0.0) -> None:
        """Deliver and complete everything until nothing moves."""
        for _ in range(50):
            self.deliver_all()
            self.complete_all()
            if not self.letters:
                break
        if seconds:
            self.advance(seconds)
            self.run()

    def check(self) -> None:
        for rank in self.ranks.values():
            assert rank.inspect.check_integrity() + wrong_in(rank.core.decode) == []
            for lease in rank.core.prefill.leases.values():
                assert lease.is_owed() == bool(lease.owed()), lease.owed()
            for lease in rank.leases_ended:
                assert lease.state is not LeaseState.RELEASED or not lease.owed(), lease.owed()


def alone(*, reuse: bool = True, **options: Any) -> tuple[World, Rank]:
    """Return a world with a prefill rank, by options of its configuration."""
    world = World(EngineConfig(engine_id="x", **options), reuse=reuse)
    return world, world.add("prefill", make_layout(), seed=1)


def opened(*, reuse: bool = True, **options: Any) -> tuple[World, Rank, Rank]:
    """Return a world of a prefill and a decode rank, whose clocks began at different times."""
    world, prefill = alone(reuse=reuse, **options)
    return world, prefill, world.add("decode", make_layout(base=1 << 41), seed=2, epoch=5e5)


def ranks_of(world: World, engine_id: str, tp_size: int, *, base: int = 1, **sizes: Any) -> list[Rank]:
    """Add the ranks of an engine, named by its first letter and their number."""
    return [
        world.add(
            f"{engine_id[0]}{r}", make_layout(r, tp_size, base=(base + r) << 40, **sizes), engine_id=engine_id, seed=r
        )
        for r in range(tp_size)
    ]


def reason(pull: Pull) -> Reason | None:
    """The outcome, re-read: mypy would remember what it was before."""
    return pull.reason
