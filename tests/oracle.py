"""A model's cache as plain global arrays, cut by rank and laid out any way, to judge plans by.

Nothing here knows how plans are made: what must be where is derived from the declared layouts element by
element, plans are run as memory copies, and every byte of the destination is looked at.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from asynckv.geometry.blocks import runs_of
from asynckv.geometry.bounds import NULL, BlockRuns
from asynckv.geometry.check import check_layout
from asynckv.geometry.gather import Gathered, Ranges, Recipe, check_recipe, recipe
from asynckv.geometry.layout import Dim, Group, Layout, Memory, Part, TokenShard, View, shard
from asynckv.geometry.match import assign, remote_ranks
from asynckv.geometry.packed import ALIGN, placed, record_form
from asynckv.geometry.pairing import BlockLists, Padding
from asynckv.geometry.plan import Plan, ReadRequest, plan_read
from asynckv.geometry.staging import ReadCosts
from asynckv.geometry.tables import DescTable, PeerTables
from tests.world import Buffers

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Held = Callable[[int, int, int], tuple[int, int]]
Lists = Sequence[tuple[int, Sequence[int | None]]]


def even(extent: int, rank: int, size: int) -> tuple[int, int]:
    """Cut an axis as evenly as whole entries allow; some ranks share one where there are too few."""
    if extent < size:
        lo = rank * extent // size
        return lo, lo + 1
    return rank * extent // size, (rank + 1) * extent // size


@dataclass(frozen=True)
class PartSpec:
    """A part of the whole model. `dims` are global, without tokens; `entry` 0 covers a whole kernel block."""

    name: str
    dims: tuple[tuple[str, int], ...]
    axis: str = ""
    itemsize: int = 2
    entry: int = 1
    held: Held = shard

    @property
    def dtype(self) -> str:
        return {1: "int8", 2: "float16", 4: "float32"}[self.itemsize]


@dataclass(frozen=True)
class LayerSpec:
    """A layer of the whole model."""

    name: str
    parts: tuple[PartSpec, ...]
    kind: str = "tokens"
    window: int = 0


@dataclass(frozen=True)
class GroupSpec:
    """Some layers as one engine pages them."""

    layers: tuple[int, ...]
    block_size: int
    ratio: int = 1
    num_blocks: int = 8
    share: tuple[int, int] = (1, 1)
    """How many neighbouring ranks share the tokens of a block, and in which stretches (the interleave)."""


@functools.cache
def slots(block_size: int, share: tuple[int, int], tp_rank: int) -> tuple[int, ...]:
    """Return the token in every slot of a rank's block, counted from the block's begin.

    This is the kernel of vLLM 0.33.0 that gives each position its slot, for one block and in its words:
    v1/worker/block_table.py, lines 351 to 376 (the second runner's, v1/worker/gpu/block_table.py, lines 391 to 398, is
    the same). `dcp_rank` is `tp_rank % size`, because neighbours share (distributed/parallel_state.py, line 2256).
    """
    total_cp_world_size, interleave = share
    found = [-1] * (block_size // total_cp_world_size)
    virtual_block_size = len(found) * total_cp_world_size
    for pos in range(block_size):
        virtual_block_offset = pos - pos // virtual_block_size * virtual_block_size
        if (virtual_block_offset // interleave) % total_cp_world_size == tp_rank % total_cp_world_size:
            rounds = virtual_block_offset // (total_cp_world_size * interleave)
            found[rounds * interleave + virtual_block_offset % interleave] = pos
    assert -1 not in found
    return tuple(found)


@dataclass(frozen=True)
class Engine:
    """One engine: its parallel sizes, its groups, and how it lays things out."""

    layers: tuple[LayerSpec, ...]
    groups: tuple[GroupSpec, ...]
    tp_size: int = 1
    pp_size: int = 1
    seed: int = 0
    style: str = "layers"
    """`layers`: a memory per layer. `split`: parts in regions of their own. `cross`: all layers of a block
    adjacent. `pages`: one memory for all groups, page by page."""
    orders: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Part name -> order of its dims, slowest first; drawn from the seed for the others."""
    pad: int = 0
    declare: Callable[[tuple[int, int], int, int], tuple[int, int, int]] | None = None
    """What a rank that holds `[lo, hi)` declares, by its place and the number of ranks: a range and an extent, which
    may be wrong; None for the truth."""
    guessed_axis: str | msgspec.UnsetType = msgspec.UNSET

    def stage_of(self, layer: int) -> int:
        return layer * self.pp_size // len(self.layers)

    @property
    def num_token_shards(self) -> int:
        return max(group.share[0] for group in self.groups)


class Rank:
    """One rank of an engine with its bytes."""

    def __init__(self, engine: Engine, tp_rank: int, pp_stage: int = 0, *, base: int = 1 << 40) -> None:
        self.engine, self.tp_rank, self.pp_stage = engine, tp_rank, pp_stage
        rng = np.random.default_rng((engine.seed, 7))
        kind = {g: engine.layers[s.layers[0]].kind for g, s in enumerate(engine.groups)}
        groups = tuple(
            Group(f"g{i}", s.block_size, s.num_blocks, s.ratio, kind[i], engine.layers[s.layers[0]].window)  # type: ignore[arg-type]
            for i, s in enumerate(engine.groups)
        )
        plans: list[tuple[int, int, list[Part], int]] = []
        for g, spec in enumerate(engine.groups):
            for layer in spec.layers:
                parts, at = [], 0
                for part in engine.layers[layer].parts:
                    made = self._part(part, g, groups[g], at if engine.style != "split" else 0, rng)
                    parts.append(made)
                    span = made.itemsize * math.prod(d.size for d in made.dims)
                    at = at + span if engine.style != "split" else max(at, span)
                if engine.stage_of(layer) == pp_stage:
                    plans.append((g, layer, parts, at + engine.pad * (engine.style != "cross")))
        views, lengths = self._place(plans, groups)
        rng = np.random.default_rng((engine.seed, tp_rank, pp_stage, base & 0xFFFF))
        self.arrays = [rng.integers(0, 256, n, dtype=np.uint8) for n in lengths]
        starts = [base + i * ((max(lengths) | 4095) + 1) for i in range(len(lengths))]
        shards = [(i, s.share) for i, s in enumerate(engine.groups) if s.share[0] > 1]
        self.layout = Layout(
            schema=2 if shards else 1,
            tp_rank=tp_rank,
            tp_size=engine.tp_size,
            pp_stage=pp_stage,
            pp_size=engine.pp_size,
            memories=tuple(Memory(a, n) for a, n in zip(starts, lengths, strict=True)),
            groups=groups,
            views=tuple(views),
            guessed_axis=engine.guessed_axis,
            token_shards=tuple(TokenShard(i, size, tp_rank % size, by) for i, (size, by) in shards) or msgspec.UNSET,
        )
        check_layout(self.layout)

    def held(self, spec: PartSpec, group: int) -> tuple[int, int]:
        """Return the range that this rank really holds; ranks that share tokens hold the same one."""
        size = self.engine.groups[group].share[0]
        extent, place = dict(spec.dims).get(spec.axis, 0), (self.tp_rank // size, self.engine.tp_size // size)
        return spec.held(extent, *place) if spec.axis else (0, 0)

    def slots(self, group: int) -> tuple[int, ...]:
        spec = self.engine.groups[group]
        return slots(spec.block_size, spec.share, self.tp_rank)

    def _part(self, spec: PartSpec, number: int, group: Group, offset: int, rng: np.random.Generator) -> Part:
        held = self.held(spec, number)
        sizes = {n: held[1] - held[0] if n == spec.axis else size for n, size in spec.dims}
        if group.kind == "tokens" and spec.entry:
            sizes = {"token": group.kernel_size // self.engine.groups[number].share[0] // spec.entry, **sizes}
        order = list(self.engine.orders.get(spec.name) or rng.permutation(list(sizes)).tolist())
        dims, step = [], spec.itemsize
        for name in reversed(order):
            dims.append(Dim(name, sizes[name], step))
            step *= sizes[name]
        extent = dict(spec.dims)[spec.axis] if spec.axis else 0
        if self.engine.declare and spec.axis:
            *_, extent = lo, hi, _ = self.engine.declare(held, self.tp_rank, self.engine.tp_size)
            held = lo, hi
        return Part(
            spec.name, spec.dtype, spec.itemsize, offset, tuple(dims), spec.axis, held, extent, max(spec.entry, 1)
        )

    def _place(
        self, plans: list[tuple[int, int, list[Part], int]], groups: tuple[Group, ...]
    ) -> tuple[list[View], list[int]]:
        names = self.engine.layers
        views: list[View] = []
        lengths: list[int] = []
        if self.engine.style in ("layers", "split"):
            for g, layer, parts, stride in plans:
                n = groups[g].num_kernel_blocks
                if self.engine.style == "split":
                    parts = [msgspec.structs.replace(p, offset=i * n * stride) for i, p in enumerate(parts)]
                views.append(View(len(lengths), g, names[layer].name, 0, stride, tuple(parts)))
                lengths.append(n * stride * (len(parts) if self.engine.style == "split" else 1))
            return views, lengths or [8]
        sums = {g: sum(s for h, _, _, s in plans if h == g) for g in range(len(groups))}
        if self.engine.style == "cross":
            memory = {g: i for i, g in enumerate(sorted({g for g, *_ in plans}))}
            at = dict.fromkeys(memory, 0)
            for g, layer, parts, size in plans:
                views.append(View(memory[g], g, names[layer].name, at[g], sums[g], tuple(parts)))
                at[g] += size
            return views, [sums[g] * groups[g].num_kernel_blocks for g in memory] or [8]
        ratios = math.lcm(*(g.ratio for g in groups))
        page = max(s * g.ratio for s, g in zip(sums.values(), groups, strict=True))
        page = -(-page // ratios) * ratios
        at = dict.fromkeys(sums, 0)
        for g, layer, parts, size in plans:
            views.append(View(0, g, names[layer].name, at[g], page // groups[g].ratio, tuple(parts)))
            at[g] += size
        return views, [max(page * max(g.num_blocks for g in groups), 8)]

    # -- where things are --------------------------------------------------------------------------

    def places(self, view: View, part: Part, spec: PartSpec, kernel_block: int) -> Int64s:
        """Byte offsets of a kernel block's elements: `[entries, dims of the spec ...]`."""
        dims = {d.name: d for d in part.dims}
        out = np.array([view.offset + part.offset + kernel_block * view.stride], np.int64)
        for name in (["token"] if "token" in dims else []) + [n for n, _ in spec.dims]:
            out = out[..., None] + np.arange(dims[name].size) * dims[name].stride
        return out[0] if "token" in dims else out

    def each(self) -> list[tuple[int, View, Part, PartSpec]]:
        """Every part with its global spec and the number of its layer."""
        number = {layer.name: i for i, layer in enumerate(self.engine.layers)}
        out = []
        for view in self.layout.views:
            specs = {p.name: p for p in self.engine.layers[number[view.layer]].parts}
            out += [(number[view.layer], view, part, specs[part.name]) for part in view.parts]
        return out


class Cache:
    """The request's KV and states, as global arrays."""

    def __init__(self, layers: Sequence[LayerSpec], seed: int) -> None:
        self.layers, self.seed = layers, seed
        self._made: dict[tuple[int, int, int], Bytes] = {}

    def entry(self, layer: int, spec: PartSpec, index: int, held: tuple[int, int]) -> Bytes:
        """One entry along the tokens, or the state after `index` tokens: `[dims ..., itemsize]`, cut to a rank."""
        key = layer, self.layers[layer].parts.index(spec), index
        if (whole := self._made.get(key)) is None:
            whole = self._made[key] = np.random.default_rng((self.seed, *key)).integers(
                0, 256, (*(n for _, n in spec.dims), spec.itemsize), dtype=np.uint8
            )
        cut = tuple(slice(*held) if n == spec.axis else slice(None) for n, _ in spec.dims)
        return whole[cut]


Cells = list[tuple[int, Int64s, Bytes, bool]]
"""Memory, byte offsets, what belongs there, and whether it must be there (else it may)."""


def cells(
    rank: Rank, lists: Lists, cache: Cache, tokens: int, wanted: int | None = None, exact: Container[int] = ()
) -> Cells:
    """Return the content of a rank's blocks; `wanted` tells how many tokens must be there, and where states go.

    Nothing else may be there of `exact` layers, apart from tokens that share an entry, in any part, with the last one.
    """
    out: Cells = []
    goal = tokens if wanted is None else wanted
    for layer, view, part, spec in rank.each():
        group = rank.layout.groups[view.group]
        first, ids = lists[view.group]
        size, start, held = group.block_size, first // group.block_size, rank.held(spec, view.group)
        for i, block in enumerate(ids):
            if block is None:
                continue
            if group.kind == "state":
                after = min((start + i + 1) * size, tokens)
                must = goal > first and start + i == (goal - 1) // size
                data = cache.entry(layer, spec, goal if wanted is not None and must else after, held)
                if wanted is None or must:
                    out.append((view.memory, rank.places(view, part, spec, block), data, True))
                continue
            at = rank.slots(view.group)
            each, rows = spec.entry or group.kernel_size, len(at) // group.ratio
            together = math.lcm(*(p.entry for p in rank.engine.layers[layer].parts))
            end = -(-goal // together) * together if layer in exact else math.inf
            begin = max(first, goal - group.window + 1 if group.window else 0)
            for kernel in range(group.ratio):
                places = rank.places(view, part, spec, block * group.ratio + kernel)
                for token, place in zip(at[kernel * rows : (kernel + 1) * rows : each], places, strict=True):
                    lo = (start + i) * size + token
                    must = lo < goal and lo + each > begin < goal
                    if lo + each > first and lo < end:
                        out.append((view.memory, place, cache.entry(layer, spec, lo // each, held), must))
    return out


def fill(rank: Rank, lists: Lists, cache: Cache, tokens: int) -> None:
    """Write the request's KV and states as the prefill engine does."""
    for memory, places, data, _ in cells(rank, lists, cache, tokens):
        at = places[..., None] + np.arange(data.shape[-1])
        rank.arrays[memory][at.ravel()] = data.ravel()


def execute(
    plan: Plan,
    local: Rank | Buffers,
    remote: Rank | Buffers,
    written: list[npt.NDArray[np.bool_]],
    limits: tuple[int, int],
    *,
    store: bool = False,
    lent: Lists = (),
) -> int:
    """Run a plan as memory copies, the other way round to store; no byte may be written twice. Returns the bytes."""
    posts, total = list(plan.posts(*limits)), 0
    assert plan.count_posts(*limits) == (len(posts), sum(post.num_descriptors for post in posts))
    for post in posts:
        table = post.table
        assert 1 <= post.num_descriptors <= min(len(post.local), limits[1])
        assert post.num_bytes <= limits[0] or len(post.local) == 1
        if table.boxes:
            first, count = post.rows
            assert len(set(table.length[first : first + count].tolist())) == 1
        if table.pack_bytes:
            total += execute_packed(post, local, remote, written, lent)
            check_pieces(post, local, remote)
            continue
        moved = wanted = 0
        for a, b in zip(post.local.tolist(), post.remote.tolist(), strict=True):
            (row, mine), (other, theirs) = divmod(a, table.local_blocks), divmod(b, table.remote_blocks)
            assert row == other
            n = int(table.length[row])
            m, start, stride = (int(x) for x in table.local[row])
            r, source, step = (int(x) for x in table.remote[row])
            start, source = start + mine * stride, source + theirs * step
            assert 0 <= source <= source + n <= len(remote.arrays[r])
            assert n <= step or table.remote_blocks == 1, "a read reaches into another block"
            moved += n
            for at, run_at, length in _pieces(table, row):
                assert 0 <= start + at <= start + at + length <= len(local.arrays[m])
                assert 0 <= run_at <= run_at + length <= n
                here = local.arrays[m][start + at : start + at + length]
                there = remote.arrays[r][source + run_at : source + run_at + length]
                done = (
                    written[r][source + run_at : source + run_at + length]
                    if store
                    else written[m][start + at : start + at + length]
                )
                assert not done.any(), "a byte is written twice"
                wanted += length
                done[:] = True
                to, of = (there, here) if store else (here, there)
                to[:] = of
        assert moved == post.num_bytes
        if table.boxes:
            check_pieces(post, local, remote)
        total += wanted
    assert total == plan.num_bytes
    return total


def offers(lists: Lists) -> list[BlockRuns]:
    """The prefill side's lists as they travel."""
    return [BlockRuns(first, runs_of(list(ids))) for first, ids in lists]


def check_pieces(post: ReadRequest, local: Rank | Buffers, remote: Rank | Buffers) -> None:
    """What a plane without a slot reads piece by piece is what was just copied."""
    for memory, start, other, source, length in post.pieces().tolist():
        assert (local.arrays[memory][start : start + length] == remote.arrays[other][source : source + length]).all(), (
            "a wrong piece"
        )


def _pieces(table: DescTable, row: int) -> Iterator[tuple[int, int, int]]:
    """The pieces of a row: offset in our block, in what is read, and length."""
    if not table.boxes:
        yield 0, 0, int(table.length[row])
        return
    piece, shape, in_local, in_run, skip = table.box(row)
    for steps in itertools.product(*map(range, shape)):
        at, run_at = (sum(map(operator.mul, steps, strides)) for strides in (in_local, in_run))
        yield at, skip + run_at, piece


MAX_STAGED = 1 << 20  # bytes of a transfer that is checked staged as well, piece by piece
STAGED = ReadCosts(descriptor_s=1.0, read_s=0.0, place_s=0.0, slot_bytes=8192)
"""Costs by which everything that differs is staged, in slots that hold few blocks."""

PACKED = STAGED._replace(ask_s=-1.0)
"""Costs by which everything is packed that lies densely here."""

PACK_BYTES = 3000


def maps(
    local: Rank, remotes: Sequence[Rank], costs: ReadCosts | None = None, pack_bytes: int = 0
) -> list[PeerTables | None]:
    """Return the tables of what is read of each remote rank."""
    shares = assign(local.layout, [r.layout for r in remotes])
    ids = iter(range(1, 1 << 30))
    return [
        PeerTables(local.layout, r.layout, s, ids, costs, pack_bytes) if s else None
        for r, s in zip(remotes, shares, strict=True)
    ]


class Arrays(Protocol):
    @property
    def arrays(self) -> list[Bytes]: ...


def gather(gathered: Gathered, owner: Arrays) -> Bytes:
    """Make a packed copy piece by piece."""
    out = []
    for memory, offset, stride, piece, shape, strides in gathered.rows:
        for block, steps in itertools.product(gathered.blocks.tolist(), itertools.product(*map(range, shape))):
            at = offset + block * stride + sum(map(operator.mul, steps, strides))
            assert 0 <= at <= at + piece <= len(owner.arrays[memory])
            out.append(owner.arrays[memory][at : at + piece])
    return np.concatenate(out)


def execute_packed(
    post: ReadRequest, local: Rank | Buffers, remote: Rank | Buffers, written: list[npt.NDArray[np.bool_]], lent: Lists
) -> int:
    """Read a packed copy that the owner makes of lent blocks; no byte may be written twice. Returns the bytes."""
    asked = msgspec.msgpack.decode(msgspec.msgpack.encode(recipe(post)), type=Recipe)
    ids = np.array(sorted(block for block in lent[asked.group][1] if block is not None), np.int64)
    gathered = check_recipe(asked, Ranges(remote.layout), ids, post.table.pack_bytes)
    copy, at = gather(gathered, remote), 0
    assert len(copy) == gathered.num_bytes == post.num_bytes
    places = post.places().tolist()
    assert len(places) <= post.num_descriptors
    for memory, start, length in places:
        assert 0 <= start < start + length <= len(local.arrays[memory])
        done = written[memory][start : start + length]
        assert not done.any(), "a byte is written twice"
        done[:] = True
        local.arrays[memory][start : start + length] = copy[at : at + length]
        at += length
    assert at == post.num_bytes
    return at


def peers_of(local: Rank, remotes: Sequence[Rank]) -> list[Rank]:
    """The remote ranks that a rank answers for."""
    there = remotes[0].engine
    ranks = remote_ranks(local.tp_rank, local.engine.tp_size, there.tp_size, there.num_token_shards)
    return [r for r in remotes if r.tp_rank in ranks]


def check_transfer(
    local: Rank,
    remotes: Sequence[Rank],
    mine: Lists,
    theirs: Lists,
    cache: Cache,
    tokens: int,
    *,
    wanted: int | None = None,
    limits: tuple[int, int] = (1 << 20, 512),
) -> list[Plan | None]:
    """Plan, copy, and compare every byte of the destination with what the request's arrays say."""
    wanted = tokens if wanted is None else wanted
    answered = peers_of(local, remotes)
    exact = {layer for e in (local.engine, remotes[0].engine) for g in e.groups if g.share[0] > 1 for layer in g.layers}
    lists = BlockLists(arrays(mine), offers(theirs), wanted, tokens)
    assert list(lists.padding(local.layout)) == list(padding(local, mine, wanted))
    packed, staged, plans = (
        [plan_read(peer, lists) if peer is not None else None for peer in maps(local, answered, costs, pack_bytes)]
        for costs, pack_bytes in ((PACKED, PACK_BYTES), (STAGED, 0), (None, 0))
    )
    before = [a.copy() for a in local.arrays]
    for each in (packed, staged):
        if sum(plan.num_bytes for plan in each if plan is not None) < MAX_STAGED:
            check_plans(local, answered, each, mine, cache, tokens, wanted, limits, theirs, exact)
            for now, was in zip(local.arrays, before, strict=True):
                now[:] = was
    check_plans(local, answered, plans, mine, cache, tokens, wanted, limits, exact=exact)
    return plans


def padding(local: Rank, mine: Lists, wanted: int) -> Iterator[Padding]:
    """Yield the slots of our blocks with tokens behind all that are wanted."""
    for index, (group, (first, ids)) in enumerate(zip(local.layout.groups, mine, strict=True)):
        at = np.array(local.slots(index) if group.kind == "tokens" else ())
        for start, block in enumerate(ids, first // group.block_size):
            free = np.flatnonzero(start * group.block_size + at >= max(wanted, first))
            if len(free) and block is not None:
                yield Padding(index, block, int(free[0]), len(free))


def arrays(mine: Lists) -> list[tuple[int, Int64s]]:
    """Our lists as they are planned with."""
    return [(f, np.array([NULL if b is None else b for b in ids], np.int64)) for f, ids in mine]


def check_plans(
    local: Rank,
    remotes: Sequence[Rank],
    plans: Sequence[Plan | None],
    mine: Lists,
    cache: Cache,
    tokens: int,
    wanted: int,
    limits: tuple[int, int] = (1 << 20, 512),
    lent: Lists = (),
    exact: Container[int] = (),
) -> None:
    """Copy what plans say, and compare every byte of the destination with what the request's arrays say."""
    before = [a.copy() for a in local.arrays]
    written = [np.zeros(len(a), np.bool_) for a in local.arrays]
    for remote, plan in zip(remotes, plans, strict=True):
        if plan is not None:
            execute(plan, local, remote, written, limits, lent=lent)
    may = [np.zeros(len(a), np.bool_) for a in local.arrays]
    for memory, places, data, must in cells(local, mine, cache, tokens, wanted, exact):
        at = places[..., None] + np.arange(data.shape[-1])
        may[memory][at.ravel()] = True
        if must:
            assert written[memory][at.ravel()].all(), "something that is wanted was not read"
            assert (local.arrays[memory][at] == data).all(), "a wrong byte"
    for now, was, wrote, allowed in zip(local.arrays, before, written, may, strict=True):
        assert not (wrote & ~allowed).any(), "something was written that is nobody's"
        assert (now[~wrote] == was[~wrote]).all()


# -- where blocks are only kept --------------------------------------------------------------------


def packed(layout: Layout, capacity: int, *, base: int = 0, align: int = ALIGN) -> Layout:
    """Make a range of `capacity` bytes that keeps blocks of a layout."""
    return placed(record_form(layout, align=align), base, capacity)


class Kept(Rank):
    """The range in which a rank keeps its blocks, with its bytes."""

    def __init__(self, rank: Rank, capacity: int, *, base: int = 1 << 50, align: int = 4096) -> None:
        self.engine, self.tp_rank, self.pp_stage = rank.engine, rank.tp_rank, rank.pp_stage
        self.layout = packed(rank.layout, capacity, base=base, align=align)
        self.arrays = [np.random.default_rng(base & 0xFFFF).integers(0, 256, capacity, dtype=np.uint8)]


def check_copies(
    rank: Rank,
    kept: Kept,
    plan: Plan,
    blocks: Sequence[Sequence[tuple[int, int]]],
    *,
    store: bool,
    limits: tuple[int, int] = (1 << 20, 512),
) -> None:
    """Copy blocks to their slots or back, `(block, slot)` per group; element by element, and nothing else."""
    to = kept if store else rank
    before = [a.copy() for a in to.arrays]
    written = [np.zeros(len(a), np.bool_) for a in to.arrays]
    execute(plan, rank, kept, written, limits, store=store)
    twins = {(layer, part.name): (view, part) for layer, view, part, _ in kept.each()}
    expected = [np.zeros(len(a), np.bool_) for a in to.arrays]
    for layer, view, part, spec in rank.each():
        other, twin = twins[layer, part.name]
        ratio = rank.layout.groups[view.group].ratio
        for block, slot in blocks[view.group]:
            for kernel in range(ratio):
                here = rank.places(view, part, spec, block * ratio + kernel)[..., None] + np.arange(part.itemsize)
                there = kept.places(other, twin, spec, slot * ratio + kernel)[..., None] + np.arange(part.itemsize)
                record = slot * ratio * other.stride
                assert record <= there.min() <= there.max() < record + ratio * other.stride, "outside of its record"
                assert (rank.arrays[view.memory][here] == kept.arrays[0][there]).all(), "a wrong byte"
                expected[0 if store else view.memory][(there if store else here).ravel()] = True
    for now, was, wrote, should in zip(to.arrays, before, written, expected, strict=True):
        assert (wrote == should).all(), "something else was written than what blocks consist of"
        assert (now[~wrote] == was[~wrote]).all()
