"""Simulated services whose decode engines read prompts that are still computed.

A prefill engine computes prompts in steps, a chunk of each, and lends finished chunks as pieces. Decode engines give
blocks to a request at its first piece. The schedulers are the package's ledgers, beside all processes. Each engine has
blocks for two prompts.

Each computation of a prompt writes values of its own. Each byte of a decode engine's memory remembers which pull wrote
it. So whatever is published is compared, token by token, with the loan that it was read from. The blocks of a piece or
a loan are overwritten at its end.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from asynckv.config import EngineConfig
from asynckv.core.pull import Kind, Pull
from asynckv.core.rank import RankCore
from asynckv.core.types import Key, Reason, TransferId
from asynckv.core.wire import Claim, Follow, Offered, Unfollow, decode_offer, encode_packet
from asynckv.embed import EngineDesk, LendPiece, Order
from asynckv.embed import Follow as FollowOrder
from asynckv.embed.ledgers import DecodeLedger, Fetch, PrefillLedger, State
from asynckv.embed.orders import Finished
from asynckv.errors import AsyncKVError, EngineClosed, NoOffer, PlanRefused
from asynckv.geometry.layout import (
    ONE_PER_REQUEST,
    Group,
    Layout,
    Memory,
    TokenShard,
    View,
    attention_view,
    dense_part,
    shard,
)
from asynckv.scheduler import PieceSizes, PrefillRanks
from asynckv.testing.fabric import Transfer
from tests.lab.ahead_script import (
    CLAIMED,
    FOLLOWED,
    FULL,
    LANDED,
    MOMENTS,
    MOST_TOKENS,
    OFFERED,
    PIECE,
    PULLED,
    READ,
    STATE,
    WINDOW,
    WINDOW_TOKENS,
    AheadAsk,
    AheadScript,
)
from tests.lab.decoder import OWN_S, STEP_S
from tests.lab.doors import Doors
from tests.lab.following import DEATH_S, FollowService, Lines, _in_one_go
from tests.lab.oracles import Wire, wrong_in
from tests.lab.script import Fault
from tests.lab.service import (
    COPY_BYTES,
    FREED,
    LEASE,
    NUM_COPIES,
    PACKED,
    PULL,
    UNUSED,
    Listener,
    Service,
    Stage,
    StagedRank,
    number_of,
)
from tests.lab.ticket_rules import about_tickets
from tests.lab.world import Process, WorldData
from tests.oracle import STAGED

HEADS, DIM, QUIET_S, PROBE, PATIENCE_S = 2, 2, 40.0, 1_000, 8.0
Blocks = list[list[int]]
Words = npt.NDArray[np.uint16]
Lists = list[tuple[int, list[int]]]


def values(computation: int, group: int, heads: range, tokens: npt.NDArray[np.int64]) -> Words:
    """Return what a computation of a prompt writes by token, head, and key or value: never what unused memory has."""
    at = tokens.astype(np.uint64)[:, None, None] * np.uint64(0x9E3779B97F4A7C15)
    at = at + np.array(heads, np.uint64)[:, None] * np.uint64(0xC2B2AE3D27D4EB4F)
    at = at + np.arange(2, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    at = at + np.uint64((computation * 8 + group) * 0xA0761D6478BD642F % (1 << 64))
    at = (at ^ (at >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((at ^ (at >> np.uint64(32))) % np.uint64(0xD000) + np.uint64(1)).astype(np.uint16)


@dataclass(slots=True, eq=False)
class Job:
    """A request in the prefill engine, over all computations of its prompt."""

    ask: AheadAsk
    ticket: str
    computation: int = 0
    blocks: Blocks = field(default_factory=list)
    computed: int = 0
    written: dict[int, int] = field(default_factory=dict)
    """Tokens that each rank has reported as written."""
    lent_to: int = 0
    sizes: PieceSizes = field(default_factory=PieceSizes)
    params: dict[str, Any] | None = None
    """Of its last loan."""
    is_over: bool = False

    @property
    def name(self) -> str:
        return f"P{self.ask.number}"


@dataclass(frozen=True, slots=True)
class Loan:
    """Something that the prefill engine lends."""

    number: int
    computation: int
    is_piece: bool


class Rank(StagedRank):
    """One rank of an engine: its memory, and what passes between its desk and its scheduler."""

    def __init__(self, service: AheadService, role: str, engine: int, index: int, name: str) -> None:
        super().__init__(service.world, name)
        script = service.script
        self.service, self.role, self.index, self.engine_number = service, role, index, engine
        size = script.prefill if role == "prefill" else script.decode
        self.block_size = script.sizes[role == "decode"]
        lo, hi = shard(HEADS, index, size)
        self.sharing, interleave = script.shards[role == "decode"]
        shared = TokenShard(0, self.sharing, index % self.sharing, interleave)
        of_shared = range(*shard(HEADS, index // self.sharing, size // self.sharing))
        self.shares = [shared if kind == FULL else TokenShard(0) for kind in script.groups]
        self.heads = [of_shared if kind == FULL else range(lo, hi) for kind in script.groups]
        self.naps = 0
        self.num_blocks = [2 if kind == STATE else 2 * -(-MOST_TOKENS // self.block_size) for kind in script.groups]
        groups, views, memories = [], [], []
        for g, kind in enumerate(script.groups):
            heads, tokens = self.heads[g], self.tokens_held(g)
            length = self.num_blocks[g] * tokens * len(heads) * 2 * DIM * 2
            memories.append(Memory((1 + index + 8 * g + 64 * (role == "decode") + 128 * engine) << 36, length))
            window = WINDOW_TOKENS if kind == WINDOW else 0
            if kind == STATE:
                groups.append(Group(f"g{g}", ONE_PER_REQUEST, self.num_blocks[g], kind="state"))
                dims = [("unit", len(heads) * 2 * DIM)]
                held = (lo * 2 * DIM, hi * 2 * DIM)
                part = dense_part("state", "float16", dims, axis="unit", held=held, extent=HEADS * 2 * DIM)
                views.append(View(g, g, f"l{g}", 0, dims[0][1] * 2, (part,)))
                continue
            groups.append(Group(f"g{g}", self.block_size, self.num_blocks[g], window=window))
            prefill = ("block", "kv", "token", "head", "dim")
            order = prefill if role == "prefill" else ("block", "head", "kv", "token", "dim")
            sizes = {"kv": 2, "block": self.num_blocks[g], "token": tokens, "head": len(heads), "dim": DIM}
            view = attention_view(
                layer=f"l{g}",
                order=order,
                sizes=sizes,
                dtype="float16",
                heads=(heads.start, heads.stop),
                num_heads=HEADS,
                memory=g,
                group=g,
            )
            views.append(view)
        self.layout = Layout(
            schema=min(self.sharing, 2),
            tp_rank=index,
            tp_size=size,
            memories=tuple(memories),
            groups=tuple(groups),
            views=tuple(views),
            token_shards=tuple(msgspec.structs.replace(x, group=g) for g, x in enumerate(self.shares) if x.size > 1)
            or msgspec.UNSET,
        )
        self.owner: dict[tuple[int, int], object] = {}
        """Decode: which request has a block."""

    @property
    def engine_id(self) -> str:
        return f"{self.role}{self.engine_number}"

    def tokens_held(self, g: int) -> int:
        """Return the number of tokens per block of a group that this rank holds."""
        return 1 if self.service.script.groups[g] == STATE else self.block_size // self.shares[g].size

    def held_of(self, g: int, begin: int, end: int) -> Any:
        """Return those of some tokens that this rank holds."""
        tokens = np.arange(begin, end)
        return tokens[self.shares[g].holds(tokens)]

    def start(self) -> None:
        process, script = self.begin(), self.service.script
        arrays = [np.full(memory.length // 2, UNUSED, np.uint16) for memory in self.layout.memories]
        self.shadows = [np.zeros(memory.length, np.uint16) for memory in self.layout.memories]
        self.words = [self._shaped(g, array) for g, array in enumerate(arrays)]
        self.writer = [self._shaped(g, array[::2]) for g, array in enumerate(self.shadows)]
        self.arrays = [array.view(np.uint8) for array in arrays]
        self.writers: list[Pull | None] = [None]
        self.owner, self.reads = {}, dict[int, tuple[str, str]]()
        self.owners: dict[int, dict[tuple[int, int], object]] = {}
        self.dropped: set[int] = set()
        """Prefill: computations whose blocks were taken back."""
        self.pieces: defaultdict[str, list[str]] = defaultdict(list)
        self.ended: Counter[str] = Counter()
        self.unfit: set[int] = set()
        """Decode: requests of which it begins no head start."""
        data = WorldData(process, f"agent-{process.name}", self.arrays, self.layout.memories)
        data.on_post, data.on_land, data.on_done = self._posted, self._landing, self._done
        data.costs = STAGED if script.seed % 2 else None
        if script.seed % 4 == 3:
            data.costs = PACKED
            data.make_copies(NUM_COPIES, COPY_BYTES)
        config = EngineConfig(
            engine_id=self.engine_id, lease=LEASE, pull=replace(PULL, second_look=script.looks, retries=script.retries)
        )
        self.engine = self.connect(self.service, config, self.layout, data)
        self.data = data
        self._watch(process)
        self.desk = EngineDesk(self.engine, on_news=partial(self._news, process))
        process.spawn(self.engine.start)

    def _shaped(self, g: int, array: Words) -> Words:
        """Return a memory's words by block, head, key or value, token and dim."""
        heads, tokens = len(self.heads[g]), self.tokens_held(g)
        if self.role == "prefill" and self.service.script.groups[g] != STATE:
            return array.reshape(-1, 2, tokens, heads, DIM).transpose(0, 3, 1, 2, 4)
        return array.reshape(-1, heads, 2, tokens, DIM)

    # -- what a prefill engine does with blocks ---------------------------------------------------------

    def write(self, job: Job, computation: int, blocks: Blocks, begin: int, end: int) -> None:
        """Write tokens of a prompt, and the states after the last of them."""
        if computation in self.dropped or self.process.is_dead:
            return
        for g, kind in enumerate(self.service.script.groups):
            tokens = self.held_of(g, begin, end) if kind != STATE else np.array([end])
            at = np.array(blocks[g])[tokens // self.block_size if kind != STATE else [0]]
            places = self.shares[g].place(tokens) % self.tokens_held(g)
            self.words[g][at, :, :, places] = values(computation, g, self.heads[g], tokens)[..., None]

    def overwrite(self, blocks: Blocks, computation: int = -1) -> None:
        """Overwrite blocks that came back."""
        self.dropped.add(computation)
        for g, ids in enumerate(blocks):
            self.words[g][ids] = FREED

    def _watch(self, process: Process) -> None:
        """Note what a rank lends, for the rules about packets."""
        wire, service = self.service.wire, self.service
        engine: Any = self.engine
        lend, lend_piece, begin_pull = engine.lend, engine.lend_piece, engine._begin_pull

        def token_of(params: Any) -> str:
            token = msgspec.convert(params["key"], Key).token
            wire.lent(process, engine.incarnation, token)
            return token

        def lends(params: Any, **options: Any) -> Any:
            token = token_of(params)
            handle = lend(params, **options)
            wire.spent(process, engine.incarnation, token)
            return handle

        def lends_piece(params: Any, ticket: str) -> None:
            self.pieces[ticket].append(token := token_of(params))
            lend_piece(params, ticket)
            wire.spent(process, engine.incarnation, token)
            service.met(PIECE, service.tickets[ticket], process)

        def begins(waiter: Any, request_id: str, *args: Any, is_early: bool = False, **options: Any) -> Any:
            if is_early and number_of(request_id) in self.unfit:
                raise PlanRefused(f"request {request_id} does not fit")
            return begin_pull(waiter, request_id, *args, is_early=is_early, **options)

        engine.lend, engine.lend_piece, engine._begin_pull = lends, lends_piece, begins

    def pieces_ended(self, process: Process, ticket: str) -> None:
        for token in self.pieces.pop(ticket, ()):
            self.service.wire.ended(process, self.engine.incarnation, token)

    # -- what a decode engine's memory is told -----------------------------------------------------------

    def _posted(self, transfer: Transfer) -> None:
        if transfer.ours:
            return
        service, posted = self.service, self.engine._driver.core.decode.transfers
        pull, number = posted[transfer.transfer_id].pull, int(transfer.transfer_id)
        blocks = {(memory, start // self._block_bytes(memory)) for memory, start, _ in transfer.spots}
        if strange := [block for block in blocks if self.owner.get(block) != (self.process, pull.request_id)]:
            service.world.violate(f"{self.process.name} reads {pull.request_id} into block {strange[0]}, not its own")
        self.owners[number] = {block: self.owner.get(block) for block in blocks}
        self.reads[number] = posted[transfer.transfer_id].source.rank.place[1], pull.pull_id
        service.wire.posted(self.process, *self.reads[number])
        if pull not in self.writers:
            self.writers.append(pull)
        if pull.kind is not Kind.PIECE and not service.wire.has_asked(
            self.process, f"sim://{transfer.owner.host.partition('#')[0]}", pull.pull_id
        ):
            service.world.violate(f"{self.process.name} reads for {pull.request_id} before it claims")
        for other in self.data.running.values():
            theirs = posted.get(other.transfer_id)
            if other is transfer or other.is_dead or other.is_detached or other.ours:
                continue
            if theirs is not None and theirs.pull is pull:
                continue
            if theirs is not None and theirs.pull.request_id == pull.request_id:
                service.world.violate(f"{self.process.name} reads twice at a time for {pull.request_id}")
            if blocks & {(memory, start // self._block_bytes(memory)) for memory, start, _ in other.spots}:
                service.world.violate(f"two pulls of {self.process.name} write one block at a time")
        service.met(READ if pull.kind is Kind.PIECE else PULLED, number_of(pull.request_id), self.process)

    def _block_bytes(self, memory: int) -> int:
        return self.layout.memories[memory].length // self.num_blocks[memory]

    def _landing(self, transfer: Transfer, spots: Sequence[tuple[int, int, int]]) -> None:
        """Nothing lands in a block that was given back; note which pull writes what."""
        if not spots:
            return
        if self.is_asleep:
            self.service.world.violate(f"{self.process.name} is written while it sleeps")
        owners = self.owners[int(transfer.transfer_id)]
        if late := [block for block, owner in owners.items() if self.owner.get(block) != owner]:
            self.service.world.violate(f"a read of {self.process.name} writes block {late[0]} after it came back")
        self.service.wire.landed(self.process, *self.reads[int(transfer.transfer_id)])
        writer = next(
            i
            for i, pull in enumerate(self.writers)
            if pull and pull.pull_id == self.reads[int(transfer.transfer_id)][1]
        )
        begun = transfer.landed
        pieces = transfer.places if transfer.is_staged else transfer.pieces[begun : begun + len(spots)]
        for (memory, _, _), (target, _) in zip(spots, pieces, strict=True):
            at = target.ctypes.data - self.arrays[memory].ctypes.data
            strides = [2 * step for step in target.strides]
            np.ndarray(target.shape, np.uint16, self.shadows[memory].data, 2 * at, strides)[...] = writer

    def _done(self, transfer_id: TransferId) -> None:
        posted = self.engine._driver.core.decode.transfers.get(transfer_id)
        if posted is None or int(transfer_id) not in self.reads:
            return
        source, pull = posted.source, posted.pull
        self.service.wire.done(self.process, source.rank.place[1], pull.pull_id)
        if (
            pull.kind is Kind.PIECE
            and source.next_read is None
            and not source.doubtful
            and source.running <= {transfer_id}
        ):
            self.service.met(LANDED, number_of(pull.request_id), self.process)

    def verify(self, process: Process, ask: AheadAsk, lists: Lists, result: Any) -> None:
        """Compare what is published with the loans that it was read from."""
        if self.process is not process:
            return
        world, script, end = self.service.world, self.service.script, result.num_tokens
        what = f"request {ask.number} on {process.name}"
        if end != self.service.tokens_of(ask):
            world.violate(f"{what} has {end} tokens instead of {self.service.tokens_of(ask)}")
        if any(p and p.request_id == result.request_id and p.reason is Reason.DIFFERS for p in self.writers):
            world.violate(f"{what} is published, and a look at a piece has found a difference")
        for pad in result.padding:
            self.words[pad.group][pad.block_id, :, :, pad.first_token : pad.first_token + pad.num_tokens] = 0
        for g, kind in enumerate(script.groups):
            first, ids = lists[g]
            begin = max(first, end - WINDOW_TOKENS + 1) if kind == WINDOW else first
            tokens = self.held_of(g, begin, end) if kind != STATE else np.array([end] * (first < end))
            if not len(tokens):
                continue
            if kind == STATE:
                at, places = np.array(ids), np.array([0])
            else:
                at, places = (
                    np.array(ids)[tokens // self.block_size - first // self.block_size],
                    self.shares[g].place(tokens) % self.tokens_held(g),
                )
                below = self.shares[g].count(first % self.block_size)
                if (self.words[g][ids[0], :, :, :below] != UNUSED).any():
                    world.violate(f"{what}: something is written below token {first} of group {g}")
            found, writers = self.words[g][at, :, :, places], self.writer[g][at, :, :, places]
            for index in np.unique(writers).tolist():
                pull, mine = self.writers[index], writers == index
                told = f"{what}: of group {g}, token {tokens[mine.any((1, 2, 3))][0]} "
                if pull is None:
                    world.violate(f"{told}was never read")
                    return
                loan = self.service.loans[pull.params.key.token]
                if loan.number != ask.number:
                    world.violate(f"{told}was read from request {loan.number}")
                if pull.reason is not Reason.COMPLETE or (
                    pull.kind is not Kind.PIECE and pull.pull_id != result.pull_id
                ):
                    world.violate(f"{told}was brought by a pull that is {pull.reason}")
                if pull.params.recall:
                    self.confirmed(pull)
                if loan.computation in self.service.scribbled:
                    continue
                wanted = values(loan.computation, g, self.heads[g], tokens)[..., None]
                if (wrong := mine & (found != wanted)).any():
                    values_found = sorted({hex(x) for x in found[wrong].tolist()})[:4]
                    world.violate(
                        f"{told}is wrong: {values_found}, read from {'a piece' * loan.is_piece or 'the loan'}"
                    )

    def confirmed(self, pull: Pull) -> None:
        """What was read of something that may be recalled is proven by a claim that was granted after the read."""
        if owners := self.service.wire.unconfirmed(self.process, pull.params.key.token, pull.pull_id):
            self.service.world.violate(
                f"{self.process.name} believes {pull.pull_id}, unconfirmed by {len(owners)} ranks"
            )

    # -- the scheduler's orders and reports --------------------------------------------------------------

    def _news(self, process: Process) -> None:
        finished, service = self.desk.take_finished(), self.service
        side: Any = service.prefill if self.role == "prefill" else service.decoders[self.engine_number]
        side.judge(self, process, finished)

        def arrive() -> None:
            if side.processes[self.index] is process:
                side.report(self.index, finished)

        process.loop.call_soon(
            lambda: service.world.at(service.lines.next_at((process, "reports"), process.now), arrive)
        )

    def hand(self, orders: Sequence[Order], then: Callable[[], None]) -> None:
        """Give orders to the desk, and do something once they are carried out."""
        process = self.process
        at = self.service.lines.next_at((process, "orders"), self.world.now)

        def carry_out() -> None:
            with suppress(EngineClosed):
                self.desk.submit(orders)
            process.loop.call_soon(lambda: self.world.at(process.now, carried_out))

        def carried_out() -> None:
            if self.process is process:
                then()

        process.call_at(at, carry_out)


class Side:
    """The scheduler of an engine, and the lives of its ranks as it knows them."""

    def __init__(self, service: AheadService, ranks: Sequence[Rank]) -> None:
        self.service, self.world, self.ranks = service, service.world, ranks
        self.dice = self.world.random_of("scheduler", ranks[0].engine_id)
        self.processes: list[Process | None] = [rank.process for rank in ranks]
        self.free = [list(range(count)) for count in ranks[0].num_blocks]
        self._steps_at = math.inf

    def wake(self, seconds: float = 0.0) -> None:
        """Take a step soon."""
        at = self.world.now + seconds + self.dice.random() * 1e-3

        def step() -> None:
            if self._steps_at == at:
                self._steps_at = math.inf
                self.step()

        if at < self._steps_at:
            self._steps_at = at
            self.world.at(at, step)

    def step(self) -> None:
        raise NotImplementedError

    def living(self) -> list[Rank]:
        return [rank for rank, process in zip(self.ranks, self.processes, strict=True) if rank.process is process]

    def take(self, counts: Sequence[int]) -> Blocks | None:
        """Take so many blocks of each group, if there are."""
        if any(len(free) < count for free, count in zip(self.free, counts, strict=True)):
            return None
        for free in self.free:
            self.dice.shuffle(free)
        return [[free.pop() for _ in range(count)] for free, count in zip(self.free, counts, strict=True)]

    def back(self, blocks: Blocks) -> None:
        for free, ids in zip(self.free, blocks, strict=True):
            free += ids

    def counts_of(self, tokens: int, cached: int = 0) -> list[int]:
        size = self.ranks[0].block_size
        return [1 if kind == STATE else -(-tokens // size) - cached // size for kind in self.service.script.groups]

    def died(self, rank: Rank, process: Process) -> None:
        if self.processes[rank.index] is process:
            self.processes[rank.index] = None
            self.lost(rank.index)

    def joined(self, rank: Rank, process: Process) -> None:
        """Take a rank in the place of one that died, once that has started."""
        if rank.process is not process or process.is_dead:
            return
        if rank.engine._started_at == math.inf:
            self.world.at(self.world.now + 5e-3, partial(self.joined, rank, process))
            return
        if (before := self.processes[rank.index]) is not None:
            self.died(rank, before)
        self.processes[rank.index] = process
        self.found(rank)

    def lost(self, index: int) -> None:
        raise NotImplementedError

    def found(self, rank: Rank) -> None:
        raise NotImplementedError


class Prefill(Side):
    """The scheduler of the prefill engine. It computes up to two prompts at a time, and each by a chunk in a step."""

    def __init__(self, service: AheadService, ranks: Sequence[Rank]) -> None:
        super().__init__(service, ranks)
        endpoints = [rank.engine.endpoint for rank in ranks]
        token_hex = self.world.token("group")
        self.ledger = PrefillLedger(
            PrefillRanks(
                ranks[0].engine_id, endpoints, lease=LEASE, token_hex=token_hex, num_token_shards=ranks[0].sharing
            )
        )
        self.jobs: dict[int, Job] = {}
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self._passing: dict[int, list[tuple[Job, int, int]]] = {}
        """Ranks that compute, and what: requests, computations, and where their chunks end."""
        self._num_computations = 0

    # -- what the router and faults bring ----------------------------------------------------------------

    def ask(self, job: Job) -> None:
        if not self.ledger.take_ticket(job.ticket):
            self.world.violate(f"the ticket of request {job.ask.number} was taken for another's")
        self.jobs[job.ask.number] = job
        self.waiting.append(job)
        self.wake()

    def preempt(self, job: Job) -> None:
        """Take the blocks of a prompt that is computed; it is computed anew, in others."""
        if job in self.running:
            self.service.outcomes["preempted"] += 1
            self.ledger.end_pieces(job.ticket)
            self._stop(job)
            self.waiting.append(job)

    def abort(self, job: Job) -> None:
        if job.is_over:
            return
        if job.params is not None:
            self.withdraw(job)
            return
        self.service.outcomes["aborted"] += 1
        self.ledger.withdraw_ticket(job.ticket)
        if job in self.running:
            self._stop(job)
        else:
            self.waiting.remove(job)
            self._send()
        job.is_over = True

    def _stop(self, job: Job) -> None:
        """Compute a prompt no more, and have its blocks overwritten by each rank in the call that ends its pieces."""
        blocks, computation = job.blocks, job.computation
        self.running.remove(job)
        job.blocks, job.computed, job.written, job.lent_to, job.sizes = [], 0, {}, 0, PieceSizes()
        self.back(blocks)

        def taken_back(rank: Rank) -> None:
            rank.pieces_ended(rank.process, job.ticket)
            rank.overwrite(blocks, computation)

        self._send(taken_back)

    def withdraw(self, job: Job) -> None:
        if job.params is not None and not job.is_over:
            self.ledger.withdraw(job.name)
            self._send(partial(self.withdrawn, job))

    def withdrawn(self, job: Job, rank: Rank) -> None:
        """A rank has withdrawn a loan: its blocks come back once its grants have ended."""

    def recall(self, job: Job) -> None:
        """Take a loan back at once."""
        if (params := job.params) is None or job.is_over or not job.ask.recall:
            return
        for rank in self.living():
            process = rank.process

            def recall(rank: Rank = rank, process: Process = process) -> None:
                with suppress(EngineClosed):
                    if rank.engine.recall([params]):
                        self.world.violate(f"{rank.name} holds blocks of request {job.ask.number} for others")
                    self._lent_no_more(rank, process, job)

            process.call_at(self.service.lines.next_at((process, "orders"), self.world.now), recall)
        self.ledger.withdraw(job.name)
        self._send()

    def scribble(self, job: Job) -> None:
        """Write into the blocks of a prompt, on a rank."""
        if job.blocks and not job.is_over:
            self.service.scribbled.add(job.computation)
            rank = self.dice.choice(self.ranks)
            for g, ids in enumerate(job.blocks):
                rank.words[g][ids] ^= 1

    # -- steps -------------------------------------------------------------------------------------------

    def step(self) -> None:
        for loan in self.ledger.take_free():
            job = self.jobs[int(loan.request_id[1:])]
            job.is_over = True
            self.back(job.blocks)
        if not self._passing and not self.ledger._missing:
            for job in list(self.running):
                self.lend(job)
            while self.waiting and len(self.running) < 2:
                if (blocks := self.take(self.counts_of(self.waiting[0].ask.tokens))) is None:
                    break
                job = self.waiting.popleft()
                self._num_computations += 1
                job.blocks, job.computation = blocks, self._num_computations
                self.running.append(job)
            if self.running:
                self._compute()
        self._send()
        if self.running or self.waiting or len(self.ledger):
            self.wake(STEP_S)

    def ready(self, job: Job) -> int:
        """Return the tokens that are written on every rank."""
        return min(job.written.get(rank, 0) for rank in range(len(self.ranks)))

    def lend(self, job: Job) -> None:
        """Lend what is finished: the whole prompt, or a piece."""
        ask, size = job.ask, self.ranks[0].block_size
        options: dict[str, Any] = {}
        if per := self.service.script.hash_tokens:
            options = {"hashes": self.service.hashes(ask, ask.tokens // per, is_ours=False), "hash_tokens": per}
        if min(job.written.get(rank, 0) for rank in range(len(self.ranks))) == ask.tokens:
            self.running.remove(job)
            lists: Lists = [(0, ids) for ids in job.blocks]
            job.params = self.ledger.lend(
                job.name, lists, ask.tokens, ticket=job.ticket, lease_s=ask.lease_s, recall=ask.recall, **options
            )
            self._know(job, job.params, is_piece=False)
            return
        whole, is_followed = self.ready(job) // size * size, job.ticket in self.ledger.followed
        if self.service.script.is_eager:
            tokens = range(job.lent_to, whole) if whole > job.lent_to else None
        else:
            tokens = job.sizes.take(whole, ask.tokens, is_followed=is_followed)
        if tokens is None:
            return
        job.lent_to, before = tokens.stop, self.ledger._num_orders
        is_brought = [kind not in (WINDOW, STATE) for kind in self.service.script.groups]
        begin, end = tokens.start // size, tokens.stop // size
        lists = [
            (tokens.start if is_so else 0, ids[begin:end] if is_so else [])
            for ids, is_so in zip(job.blocks, is_brought, strict=True)
        ]
        if per:
            options["hashes"] = options["hashes"][: tokens.stop // per]
        self.ledger.lend_piece(job.name, job.ticket, lists, tokens.stop, **options)
        order = self.ledger._orders.get(before + 1)
        if isinstance(order, LendPiece):
            self.service.outcomes["pieces"] += 1
            self._know(job, order.params, is_piece=True)

    def _know(self, job: Job, params: Any, is_piece: bool) -> None:
        token = msgspec.convert(params["key"], Key).token
        for endpoint in self.ledger.ranks.endpoints if params.get("recall") else ():
            self.service.wire.may_recall(endpoint.incarnation, token)
        self.service.loans[token] = Loan(job.ask.number, job.computation, is_piece)

    def _compute(self) -> None:
        works = []
        for job in self.running:
            begin, job.computed = job.computed, min(job.computed + self.service.script.chunk, job.ask.tokens)
            works.append((job, job.computation, job.blocks, begin, job.computed))
        done = [(job, computation, end) for job, computation, _, _, end in works]
        for rank in self.living():
            self._passing[rank.index] = done
            takes_s = self.service.script.pace_s * self.dice.uniform(0.5, 1.0)
            rank.hand((), partial(self._forward, rank, rank.process, works, takes_s))

    def _forward(self, rank: Rank, process: Process, works: Sequence[Any], takes_s: float) -> None:
        naps = rank.naps

        def write() -> None:
            if rank.process is process and not process.is_dead and rank.naps == naps:
                for work in works:
                    rank.write(*work)
                at = self.service.lines.next_at((process, "reports"), max(process.now, self.world.now))
                self.world.at(at, partial(self._computed, rank.index, process, naps))

        self.world.at(self.world.now + takes_s, write)

    def _computed(self, index: int, process: Process, naps: int = 0) -> None:
        if (
            self.processes[index] is process
            and self.ranks[index].naps == naps
            and (done := self._passing.pop(index, None)) is not None
        ):
            for job, computation, end in done:
                if job.computation == computation and job in self.running:
                    job.written[index] = end
            self.wake()

    def _send(self, then: Callable[[Rank], None] = lambda rank: None) -> None:
        orders = self.ledger.take_orders()
        for rank in self.living():
            rank.hand(orders, partial(then, rank))

    # -- reports -----------------------------------------------------------------------------------------

    def judge(self, rank: Rank, process: Process, finished: Finished) -> None:
        for refused in finished.refused:
            if not isinstance(refused.error, EngineClosed) and "withdrawn" not in str(refused.error):
                self.world.violate(f"{rank.name} refuses {refused.order}: {refused.error}")
        for end in finished.finished_sending:
            self.service.outcomes[f"lease.{end.cause}"] += 1
            self._lent_no_more(rank, process, self.jobs[int(end.request_id[1:])])

    def _lent_no_more(self, rank: Rank, process: Process, job: Job) -> None:
        """A rank has a loan back, and its pieces with it: it is overwritten at once."""
        assert job.params is not None
        key = msgspec.convert(job.params["key"], Key)
        self.service.wire.ended(process, rank.engine.incarnation, key.token)
        rank.pieces_ended(process, job.ticket)

        def overwrite() -> None:
            if rank.process is process and not process.is_dead and job.computation not in rank.dropped:
                self.service.check_belief(rank, key, job.ask)
                rank.overwrite(job.blocks, job.computation)

        self.world.at(process.now, overwrite)

    def report(self, index: int, finished: Finished) -> None:
        self.ledger.update(index, finished)
        self.wake()

    # -- lives -------------------------------------------------------------------------------------------

    def lost(self, index: int) -> None:
        self._passing.pop(index, None)
        self.ledger.rank_died(index)
        for job in list(self.running):
            (self.abort if self.dice.random() < 0.5 else self.preempt)(job)
        self._send()
        self.wake()

    def found(self, rank: Rank) -> None:
        ranks = self.ledger.ranks
        ranks.memory_epoch = max(ranks.memory_epoch, *(r.engine.memory_epoch for r in self.ranks), 0)
        self.ledger.rank_joined(rank.index, rank.engine.endpoint)
        self.wake()


@dataclass(slots=True, eq=False)
class Wanted:
    """A request in a decode engine."""

    ask: AheadAsk
    fetch: Fetch
    lists: Lists = field(default_factory=list)
    is_early: bool = False
    waits_since: float = math.inf
    """When it was offered, and there were no blocks for it."""


class Decode(Side):
    """The scheduler of a decode engine. Offered requests get blocks first, and head starts have half at most."""

    def __init__(self, service: AheadService, ranks: Sequence[Rank]) -> None:
        super().__init__(service, ranks)
        self.ledger = DecodeLedger(len(ranks))
        self.wanted: dict[str, Wanted] = {}
        self.held: dict[str, Wanted] = {}
        self.outcomes: dict[str, str] = {}

    def follow(self, ask: AheadAsk, follow: dict[str, Any], name: str) -> None:
        fetch = self.ledger.follow(name, follow, takes_pieces=ask.takes_pieces)
        if fetch is None:
            self.outcomes[name] = "known"
            return
        self.wanted[name] = Wanted(ask, fetch)
        self.world.at(self.world.now + PULL.follow_s + OWN_S, partial(self._time_is_over, name))
        self.step()

    def _time_is_over(self, name: str) -> None:
        if (wanted := self.wanted.get(name)) is not None and wanted.fetch.params is None:
            self.ledger.refuse(name, NoOffer("nothing in time", reason="no_offer", failed_in="follow"))
            self.step()

    def cancel(self, name: str, *, releases: bool = False) -> None:
        if (wanted := self.wanted.get(name)) is not None:
            how = f"cancelled.{wanted.fetch.state.value}"
            (self.ledger.release if releases else self.ledger.cancel)(name)
            self._over(name, how)
            self.step()

    def _over(self, name: str, how: str) -> None:
        self.service.outcomes[f"request.{how}"] += 1
        if name in self.outcomes:
            self.world.violate(f"{name} is {self.outcomes[name]}, and then {how}")
        self.outcomes[name] = how
        del self.wanted[name]

    def step(self) -> None:
        outcome = self.ledger.take_outcome()
        for fetch in outcome.received:
            if self.held[fetch.name].is_early:
                self.service.outcomes["request.early"] += 1
            self._over(fetch.request_id, "received")
        for fetch in outcome.failed:
            self._over(fetch.request_id, f"failed.{getattr(next(iter(fetch.errors.values())), 'reason', '')}")
        for fetch in (*outcome.received, *outcome.free):
            self._returned(fetch)
        # Those that are offered come first.
        for name, wanted in sorted(self.wanted.items(), key=lambda item: item[1].fetch.params is None):
            may, fetch = self.ledger.may_pull(name), wanted.fetch
            if may is False and fetch.state not in (State.PULLING, State.ENDING, State.HELD, State.RECEIVED):
                self.ledger.cancel(name)
                self._over(name, "refused")
            elif may and fetch.state in (State.EARLY, State.QUEUED):
                self._pull(wanted)
            elif fetch.piece is not None and fetch.state is State.FOLLOWING:
                self._start_early(wanted)
        if orders := self.ledger.take_orders():
            for rank in self.living():
                rank.hand(orders, lambda: None)

    def _place(self, wanted: Wanted) -> bool:
        """Give a request blocks, if there are."""
        ask = wanted.ask
        if (blocks := self.take(self.counts_of(ask.tokens, ask.cached))) is None:
            return False
        wanted.lists = [(ask.cached, ids) for ids in blocks]
        self.held[wanted.fetch.name] = wanted
        for rank in self.ranks:
            for g, ids in enumerate(blocks):
                rank.words[g][ids], rank.writer[g][ids] = UNUSED, 0
                rank.owner.update({(g, block): (rank.process, wanted.fetch.name) for block in ids})
        return True

    def _options(self, ask: AheadAsk) -> dict[str, Any]:
        per = self.service.script.hash_tokens
        hashes = {"hashes": self.service.hashes(ask, ask.tokens // per, is_ours=True)} if per else {}
        return {"num_tokens": ask.wanted or None} | hashes

    def _pull(self, wanted: Wanted) -> None:
        if not wanted.lists and not self._place(wanted):
            wanted.waits_since = min(wanted.waits_since, self.world.now)
            if wanted.waits_since + PATIENCE_S < self.world.now:  # others hold them, perhaps for ever
                self.world.at(self.world.now, partial(self.cancel, wanted.fetch.request_id))
            else:
                self.wake(0.05)
            return
        self.service.met(OFFERED, wanted.ask.number)
        self.ledger.pull(wanted.fetch.request_id, wanted.lists, **self._options(wanted.ask))

    def _start_early(self, wanted: Wanted) -> None:
        early = sum(
            len(other.lists[0][1]) for other in self.held.values() if other.is_early and other.fetch.params is None
        )
        ask = wanted.ask
        if early + self.counts_of(ask.tokens, ask.cached)[0] > self.ranks[0].num_blocks[0] // 2:
            self.service.outcomes["early.no_room"] += 1
        elif self._place(wanted):
            wanted.is_early = True
            self.service.outcomes["early"] += 1
            self.ledger.start_early(wanted.fetch.request_id, wanted.lists, **self._options(ask))

    def _returned(self, fetch: Fetch) -> None:
        """The blocks of a request came back from all ranks: they are overwritten at once."""
        blocks = [ids for _, ids in self.held.pop(fetch.name).lists]
        for rank in self.ranks:
            for g, ids in enumerate(blocks):
                rank.words[g][ids] = FREED
                for block in ids:
                    rank.owner.pop((g, block), None)
        self.back(blocks)

    def judge(self, rank: Rank, process: Process, finished: Finished) -> None:
        for result in finished.finished_recving:
            self._judge_end(rank, process, result.request_id)
            if (wanted := self.held.get(result.request_id)) is not None:
                self.world.at(process.now, partial(rank.verify, process, wanted.ask, wanted.lists, result))
            else:
                self.world.violate(f"{rank.name} has filled blocks of {result.request_id}, which came back")
        for failed in finished.failed:
            self._judge_end(rank, process, failed.request_id)
            self.service.outcomes[f"pull.{getattr(failed.error, 'reason', type(failed.error).__name__)}"] += 1
            if not isinstance(failed.error, AsyncKVError):
                self.world.violate(f"{rank.name} fails {failed.request_id} with {failed.error!r}")
            if getattr(failed.error, "reason", "") == "differs" and not self.service.scribbled:
                self.world.violate(f"{rank.name} says that bytes differ, and nothing changes any")
        for refused in finished.refused:
            # When a rank has joined, those that follow already are ordered to, too.
            if not isinstance(refused.order, FollowOrder) and not isinstance(refused.error, EngineClosed):
                self.world.violate(f"{rank.name} refuses {refused.order}: {refused.error}")
        self.service.outcomes["retired"] += len(finished.retired)

    def _judge_end(self, rank: Rank, process: Process, name: str) -> None:
        rank.ended[name] += 1
        if rank.ended[name] > 1:
            self.world.violate(f"{process.name} has told {rank.ended[name]} ends of {name}")

    def report(self, index: int, finished: Finished) -> None:
        self.ledger.update(index, finished)
        self.step()

    def lost(self, index: int) -> None:
        self.ledger.rank_died(index)
        self.step()

    def found(self, rank: Rank) -> None:
        self.ledger.rank_joined(rank.index)
        self.step()


def left_in(core: RankCore) -> dict[str, object]:
    """Return what a rank knows of requests, where it should know of none."""
    offers = core.prefill.offers
    left = {
        "internal errors": core.outbox.counters["internal_errors"],
        "followed requests": core.decode.follows.by_id,
        "offered requests": offers.lent or offers.tickets,
        "pieces": offers.pieces or offers._pieces or offers.unread,
        "parked messages": core.prefill.parking.num_parked,
        "head starts": core.decode.between,
    }
    return {what: count for what, count in left.items() if count}


class AheadService(Stage):
    """A prefill engine, decode engines, and the router that sends both legs at once."""

    _fate: Any = Service._fate
    _transfer_fate: Any = Service._transfer_fate
    _arrives: Any = FollowService._arrives
    _meet_agent: Any = Service._meet_agent
    _lose_agent: Any = Service._lose_agent
    _meet_forget: Any = Service._meet_forget
    _meet_garbage: Any = Service._meet_garbage
    _meet_hostile: Any = Service._meet_hostile
    check_belief: Any = Service._check_belief

    def __init__(
        self, script: AheadScript, doors: Callable[[Process], Doors] = Doors, listeners: Sequence[Listener] = ()
    ) -> None:
        super().__init__(script, doors, listeners, 0.0)
        self.script, world = script, self.world
        self.dice = world.random_of("ahead")
        self.lines = Lines(self)
        self.wire = wire = Wire(world, PULL, LEASE.grant_s / 3, not any(f.kind == "forget" for f in script.faults))
        world.is_calm = lambda until: not script.faults
        world.fate, world.transfer_fate, world.censor = self._fate, self._transfer_fate, self._censor
        world.on_sent, world.on_delivered, world.on_heard = wire.sent, wire.delivered, self._heard
        self.loans: dict[str, Loan] = {}
        self.tickets: dict[str, int] = {}
        self.scribbled: set[int] = set()
        """Computations into whose blocks somebody else has written."""
        self.is_garbled = bool({"garbage", "hostile"} & {fault.kind for fault in script.faults})
        self._moments: list[Fault] = []
        own = [Rank(self, "prefill", 0, i, name) for i, name in enumerate(script.prefill_names)]
        others = [
            [Rank(self, "decode", e, i, name) for i, name in enumerate(names)]
            for e, names in enumerate(script.decode_names)
        ]
        self.ranks = {rank.name: rank for rank in (*own, *(rank for ranks in others for rank in ranks))}
        for rank in self.ranks.values():
            rank.start()
        self.prefill, self.decoders = Prefill(self, own), [Decode(self, ranks) for ranks in others]

    def run(self) -> None:
        """Play the script to its end, and check; the world knows what was violated."""
        for ask in self.script.asks:
            self.world.at(ask.at, partial(self._ask, ask))
        with _in_one_go():
            self._play(self.script.faults, QUIET_S, self._check, self._probe)

    def _ask(self, ask: AheadAsk) -> None:
        """Send both legs of a request."""
        job = Job(ask, self.world.token("ticket", ask.number)(16))
        self.tickets[job.ticket] = ask.number
        ranks = self.prefill.ledger.ranks
        endpoints = [msgspec.to_builtins(each) for each in ranks.endpoints]
        follow = {"engine_id": ranks.engine_id, "endpoints": endpoints, "tp_size": ranks.tp_size, "pp_size": 1}
        if ranks.num_token_shards > 1:
            follow["num_token_shards"] = ranks.num_token_shards
        self.world.at(self.world.now + self.dice.random() * 0.01, partial(self.prefill.ask, job))
        for engine in (ask.engine, ask.stranger) if ask.stranger >= 0 else (ask.engine,):
            at = self.world.now + ask.late_s + self.dice.random() * 0.01
            bearing = follow | {"ticket": job.ticket}
            self.world.at(at, partial(self.decoders[engine].follow, ask, bearing, f"D{ask.number}"))
            if ask.again_s >= 0.0:
                again = partial(self.decoders[engine].follow, ask, bearing, f"D{ask.number}~n1")
                self.world.at(at + ask.again_s, again)

    def hashes(self, ask: AheadAsk, count: int, *, is_ours: bool) -> list[str]:
        """Return the hashes of a prompt, as the decode engine (`is_ours`) or the prefill engine has them."""
        agrees = ask.tokens if ask.agrees < 0 or not is_ours else ask.agrees
        per = self.script.hash_tokens
        return [f"{ask.number}:{i}{'' if (i + 1) * per <= agrees else '?'}" for i in range(count)]

    def tokens_of(self, ask: AheadAsk) -> int:
        """Return the tokens that a pull brings."""
        per, wanted = self.script.hash_tokens, ask.wanted or ask.tokens
        if not per or ask.agrees < 0:
            return wanted
        agreed = ask.agrees // per
        return wanted if agreed >= ask.tokens // per else min(agreed * per, wanted)

    # -- faults ------------------------------------------------------------------------------------------

    def _meet(self, fault: Fault) -> None:
        if fault.when in MOMENTS:
            self._moments.append(fault)
        elif meet := getattr(self, f"_meet_{fault.kind}", None):
            for name in fault.who:
                meet(self.ranks[name], fault)

    def met(self, moment: str, number: int, process: Process | None = None) -> None:
        """Let what waits for such a moment of a request happen, a little after it."""
        for fault in self._moments if self.world.now <= self._seconds else ():
            if fault.when == moment and fault.who[0] == str(number):
                self._moments.remove(fault)
                self.outcomes[f"moment.{fault.kind}"] += 1
                now = self.world.now if process is None else process.now
                delay = self.dice.choice([0.0, 1e-4, 1e-3 * self.script.data, 3e-3 * self.script.wire])
                self.world.at(now + delay, partial(self._happens, fault))
                return

    def _happens(self, fault: Fault) -> None:
        number = int(fault.who[0])
        job, ask = self.prefill.jobs.get(number), next(ask for ask in self.script.asks if ask.number == number)
        match fault.kind:
            case "crash" | "close":
                ranks = self.prefill.ranks if fault.who[1] == "p" else self.decoders[ask.engine].ranks
                getattr(self, f"_meet_{fault.kind}")(self.dice.choice(ranks), fault)
            case "cancel" | "cached":
                name = f"D{number}{'~n1' * (ask.again_s >= 0.0 and self.dice.random() < 0.3)}"
                self.decoders[ask.engine].cancel(name, releases=fault.kind == "cached")
            case "unfit":
                self.dice.choice(self.decoders[ask.engine].ranks).unfit.add(number)
            case kind if job is not None:
                getattr(self.prefill, kind)(job)
            case _:
                pass  # its prefill leg has not come

    def _meet_crash(self, rank: Rank, fault: Fault, only: Process | None = None) -> None:
        process = rank.process
        if process.is_dead or only not in (None, process):
            return
        process.kill()
        side = self.prefill if rank.role == "prefill" else self.decoders[rank.engine_number]
        for other in self.ranks.values():
            if other is not rank and not other.process.is_dead:
                other.data.lose(rank.data)

        def restart() -> None:
            rank.start()
            side.joined(rank, rank.process)

        self.world.at(self.world.now + self.dice.random() * DEATH_S, partial(side.died, rank, process))
        self.world.at(self.world.now + fault.seconds, restart)

    def _meet_close(self, rank: Rank, fault: Fault) -> None:
        process, engine = rank.process, rank.engine
        if process.is_dead or rank.is_moving:
            return
        rank.is_moving = True

        async def close() -> None:
            await engine.aclose()
            self.world.at(process.now, partial(self._meet_crash, rank, replace(fault, seconds=0.1), process))

        process.spawn(close)

    def _meet_sleep(self, rank: Rank, fault: Fault) -> None:
        process, engine = rank.process, rank.engine
        if process.is_dead or rank.is_moving or not engine._home.is_settled:
            return
        side = self.prefill if rank.role == "prefill" else self.decoders[rank.engine_number]
        core = engine._driver.core

        def change(process: Process, is_asleep: bool) -> None:
            if rank.process is not process or process.is_dead:
                return
            rank.is_asleep = rank.is_moving = is_asleep
            if is_asleep:
                rank.naps += 1
                self.outcomes["sleeps." + rank.role] += 1
                self.wire.forget(process)
                if left_in(core) or len(core.ledger):
                    self.world.violate(
                        f"{rank.name} sleeps, and holds {len(core.ledger)} requests or has {left_in(core)}"
                    )
                rank.pieces.clear()
                for words in rank.words:
                    words[...] = FREED
                for other in self.ranks.values():
                    if other is not rank and not other.process.is_dead:
                        other.data.lose(rank.data)
                side.died(rank, process)

        rank.sleep(fault.seconds, change, lambda: self.world.at(process.now, partial(side.joined, rank, process)))

    def _meet_freeze(self, rank: Rank, fault: Fault) -> None:
        rank.process.freeze(min(fault.seconds, self._seconds - self.world.now))

    def _meet_pause(self, rank: Rank, fault: Fault) -> None:
        rank.process.pauses = fault.p
        self.world.at(self.world.now + fault.seconds, partial(setattr, rank.process, "pauses", 0.0))

    # -- messages ----------------------------------------------------------------------------------------

    def _heard(self, process: Process, packet: bytes) -> None:
        self.wire.heard(process, packet)
        for message in found.messages if (found := about_tickets(packet)) else ():
            if isinstance(message, Follow) and message.ticket in self.tickets:
                self.met(FOLLOWED, self.tickets[message.ticket], process)
        for loan in [self.loans.get(m.key.token) for m in found.messages if isinstance(m, Claim)] if found else ():
            if loan is not None and loan.is_piece:
                self.met(CLAIMED, loan.number, process)

    def _censor(self, source: Process, target: Process, packet: bytes) -> bytes:
        """Judge offers, and lose some of what is said about tickets, or let it come later, or once more."""
        if (found := about_tickets(packet)) is None:
            return packet
        left = []
        for message in found.messages:
            if isinstance(message, Offered) and message.reason is None:
                loan = self.loans[decode_offer(message).key.token]
                self.outcomes["offers.of_pieces" if message.is_piece else "offers"] += 1
                if (loan.number, loan.is_piece) != (self.tickets[message.ticket], message.is_piece):
                    self.world.violate(
                        f"{source.name} offers {loan} under the ticket of {self.tickets[message.ticket]}"
                    )
            is_about = isinstance(message, Follow | Unfollow | Offered)
            if not is_about or self._arrives(source, target, found, message):
                left.append(message)
        if len(left) == len(found.messages):
            return packet
        return encode_packet(found.sender, found.target, left) if left else b""

    # -- judgement ---------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Everything has had its time: one outcome each, nothing is left, and all blocks are free."""
        for side in self.decoders:
            if side.wanted:
                name, wanted = next(iter(side.wanted.items()))
                self.world.violate(f"{side.ranks[0].engine_id} waits for {name} for ever: {wanted.fetch.state.value}")
            if left := [f.name for f in side.ledger._fetches.values() if not f.is_retired]:
                self.world.violate(f"the ledger of {side.ranks[0].engine_id} still knows {left}")
            if held := [wanted for wanted in side.held.values() if not wanted.fetch.is_retired]:
                self.world.violate(f"{side.ranks[0].engine_id} has lost the blocks of request {held[0].ask.number}")
        for job in self.prefill.jobs.values():
            if not job.is_over:
                self.world.violate(f"request {job.ask.number} is never over in the prefill engine")
        if len(self.prefill.ledger) or any(
            len(free) != count for free, count in zip(self.prefill.free, self.prefill.ranks[0].num_blocks, strict=True)
        ):
            self.world.violate("the prefill engine has lost blocks, or loans that never end")
        if followed := self.prefill.ledger.followed:
            self.world.violate(f"{len(followed)} tickets of requests that are over are followed for ever")
        for rank in self.ranks.values():
            if not rank.process.is_dead:
                self._check_rank(rank)

    def _check_rank(self, rank: Rank) -> None:
        core = rank.engine._driver.core
        wrong = rank.engine._driver.inspect.check_integrity() + wrong_in(core.decode)
        is_stuck = any(not t.is_over for t in rank.data.running.values())
        left = left_in(core) | {
            "malformed packets": not self.is_garbled and core.outbox.counters["dropped.malformed"],
            "busy parts": not is_stuck and not core.is_idle,
            "held blocks": not is_stuck and len(core.ledger),
        }
        wrong += [f"{what}: {count}" for what, count in left.items() if count]
        if wrong:
            self.world.violate(f"{rank.name}: {'; '.join(wrong)}")
        self.outcomes.update({n: c for n, c in core.outbox.counters.items() if n.startswith("pieces.")})

    def _probe(self) -> None:
        """A fresh request must be received by every engine that has room."""
        now = self.world.now
        for engine, side in enumerate(self.decoders):
            if all(2 * len(free) >= count for free, count in zip(side.free, side.ranks[0].num_blocks, strict=True)):
                ask = AheadAsk(PROBE + engine, now, 40, 0, engine, -1, 0.0, -1.0, 0, -1, True, False, 4.0)
                self._ask(ask)
                self.world.run(self.world.now + 10.0)
                if side.outcomes.get(f"D{ask.number}") != "received":
                    self.world.violate(f"a fresh request is {side.outcomes.get(f'D{ask.number}')}")
