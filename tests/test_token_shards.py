"""Ranks that share tokens, in every way and with every other way, against the oracle, which has vLLM's formula."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asynckv.core import wire
from asynckv.edges.torch import TensorPart, register_parts, register_tensors
from asynckv.errors import LayoutError, RemoteTooShort
from asynckv.geometry import check, match
from asynckv.geometry.check import check_layout, decode_layout
from asynckv.geometry.layout import Dim, Group, Layout, Memory, Part, TokenShard, View, fingerprint
from asynckv.geometry.match import NotCovered, remote_ranks
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.plan import plan_read
from asynckv.geometry.tables import GroupPair, _Alike
from tests import oracle
from tests.lab.test_simulation_offload import plant
from tests.oracle import PACKED, Cache, Engine, GroupSpec, LayerSpec, PartSpec, Rank, check_transfer
from tests.test_compatibility import packets
from tests.test_geometry import allocate, attention, engines, is_covered, latent, mamba2, models, parts
from tests.test_register_tensors import DECLARED, kv

change = msgspec.structs.replace

SIZES = [(1, 1), *[(tp, n) for tp in (2, 3, 4, 6, 8) for n in range(2, tp + 1) if tp % n == 0], (4, 1), (8, 1)]
"""Tensor-parallel sizes, and how many neighbours share tokens."""

# -- any two ways ------------------------------------------------------------------------------------------


@st.composite
def sharing(draw: st.DrawFn, layers: tuple[LayerSpec, ...], tokens: int) -> Engine:
    """An engine whose neighbours share the tokens of most groups that may be shared; the other groups are whole."""
    made = draw(engines(layers, tokens, stages=True))
    tp, size = draw(st.sampled_from(SIZES))
    groups = []
    for group in made.groups:
        layer = layers[group.layers[0]]
        if layer.kind == "tokens" and not layer.window:
            here = group.block_size * draw(st.sampled_from([1, 1, 3, 4]))
            entry, kernel = math.lcm(*(p.entry for p in layer.parts)), here // group.ratio
            of = draw(st.sampled_from([size, size, size, 1]))
            fits = [n for n in range(entry, here + 1, entry) if not here % n and (not kernel % n or not n % kernel)]
            share = (of, draw(st.sampled_from(fits[:2] + fits))) if of > 1 else (1, 1)
            group = replace(group, block_size=here * of, share=share)
        groups.append(group)
    return replace(made, tp_size=tp, groups=tuple(groups))


@st.composite
def pairs(draw: st.DrawFn) -> dict[str, Any]:
    layers = (LayerSpec("shared", draw(parts("tokens"))), *draw(st.one_of(st.just(()), models())))
    tokens = draw(st.integers(0, 64))
    prefill, decode = draw(sharing(layers, tokens)), draw(sharing(layers, tokens))
    is_plain = all(layer.kind == "tokens" and not layer.window for layer in layers)
    entries = [math.lcm(*(p.entry for i in group.layers for p in layers[i].parts)) for group in decode.groups]
    cached = [draw(st.integers(0, tokens // entry)) * entry for entry in entries]
    return {
        "engines": (prefill, decode),
        "tokens": tokens,
        "wanted": draw(st.integers(0, tokens)) if is_plain else tokens,
        "cached": cached,
        "lent_from": draw(st.integers(0, min(cached))) if is_plain else 0,
        "lean": draw(st.tuples(st.booleans(), st.booleans())),
        "rank": (draw(st.integers(0, decode.tp_size - 1)), draw(st.integers(0, decode.pp_size - 1))),
        "limits": draw(st.sampled_from([(1, 1), (7, 3), (1 << 20, 512)])),
        "seed": draw(st.integers(0, 1 << 32)),
    }


def judge(pair: dict[str, Any]) -> None:
    """Read a request with one decode rank, and compare every byte: direct, staged, and by packed copies."""
    (prefill, decode), tokens, rng = pair["engines"], pair["tokens"], np.random.default_rng(pair["seed"])
    theirs = allocate(prefill, tokens, rng, [pair["lent_from"]] * len(prefill.groups), lean=pair["lean"][0])
    mine = allocate(decode, tokens, rng, pair["cached"], lean=pair["lean"][1])
    cache, local = Cache(prefill.layers, 11), Rank(decode, *pair["rank"])
    remotes = ranks_of(prefill, local)
    for remote in remotes:
        oracle.fill(remote, theirs, cache, tokens)
    if local.layout.views and is_covered(local, remotes):
        check_transfer(local, remotes, mine, theirs, cache, tokens, wanted=pair["wanted"], limits=pair["limits"])


def ranks_of(prefill: Engine, local: Rank) -> list[Rank]:
    """Make the prefill ranks that a decode rank answers for."""
    answered = remote_ranks(local.tp_rank, local.engine.tp_size, prefill.tp_size, prefill.num_token_shards)
    return [Rank(prefill, r, s, base=(1 + r + 8 * s) << 41) for s in range(prefill.pp_size) for r in answered]


@given(pair=pairs())
@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
def test_every_token_is_where_vllm_has_it_and_no_other_byte_is_touched(pair: dict[str, Any]) -> None:
    judge(pair)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@given(pair=pairs())
@settings(max_examples=int(os.environ.get("ASYNCKV_PAIRS", "2000")), suppress_health_check=[HealthCheck.too_slow])
def test_every_token_is_where_vllm_has_it_in_very_many_pairs(pair: dict[str, Any]) -> None:
    """By default some of the pairs that are run before a release, with `ASYNCKV_PAIRS=100000`."""
    judge(pair)


# -- all small ways ----------------------------------------------------------------------------------------

TOKENS, WIDTH = 40, 3
TRUTH = np.random.default_rng(5).integers(0, 256, (2 * TOKENS, WIDTH), np.uint8)
WAYS = [
    (block, (size, by))
    for size in range(1, 5)
    for block in range(size, 13, size)
    for by in range(1, 4 if size > 1 else 2)
    if block // size % by == 0
]
SHARED = [pair for pair in itertools.product(WAYS, WAYS) if pair != ((pair[0][0], (1, 1)), (pair[1][0], (1, 1)))]


def small(way: tuple[int, tuple[int, int]], base: int) -> tuple[list[Rank], list[int]]:
    """All ranks of an engine with one layer, and the blocks of a request."""
    block, share = way
    part = PartSpec("kv", (("dim", WIDTH),), itemsize=1)
    ids = np.random.default_rng(block).permutation(-(-TOKENS // block) + 2)
    group = GroupSpec((0,), block, num_blocks=len(ids), share=share)
    made = Engine((LayerSpec("mla", (part,)),), (group,), share[0], orders={"kv": ("token", "dim")})
    return [Rank(made, rank, base=(base + rank) << 40) for rank in range(share[0])], ids[2:].tolist()


def rows(rank: Rank, ids: list[int], first: int = 0, end: int = 2 * TOKENS) -> Iterator[tuple[Any, Any]]:
    """Yield per block of a request its slots for some tokens, as an index of `[block, slot]`, and these tokens."""
    at = np.array(rank.slots(0))
    for place, block in enumerate(ids):
        tokens = place * rank.layout.groups[0].block_size + at
        chosen = (tokens >= first) & (tokens < end)
        yield (block, np.flatnonzero(chosen)), tokens[chosen]


def check_small(
    there: tuple[int, tuple[int, int]], here: tuple[int, tuple[int, int]], each: slice = slice(None)
) -> None:
    """Read rests of a prompt from one engine to another, direct and packed, and compare all memory."""
    (remotes, theirs), (locals_, mine) = small(there, 1), small(here, 100)
    for remote in remotes:
        for index, tokens in rows(remote, theirs):
            remote.arrays[0].reshape(len(theirs) + 2, -1, WIDTH)[index] = TRUTH[tokens]
    for local in locals_:
        tried = [oracle.maps(local, remotes, *how) for how in ((None, 0), (PACKED, oracle.PACK_BYTES))]
        before = local.arrays[0].copy()
        for first in range(TOKENS + 1)[each]:
            asked = [(first, np.array(mine[first // here[0] :], np.int64))]
            lists = BlockLists(asked, oracle.offers([(0, theirs)]), TOKENS)
            expected = before.copy()
            for index, tokens in rows(local, mine, first, TOKENS):
                expected.reshape(len(mine) + 2, -1, WIDTH)[index] = TRUTH[tokens]
            for peers in tried:
                local.arrays[0][:] = before
                written = [np.zeros(len(before), np.bool_)]
                for remote, table in zip(remotes, peers, strict=True):
                    if table is not None:
                        plan = plan_read(table, lists)
                        oracle.execute(plan, local, remote, written, (1 << 20, 512), lent=[(0, theirs)])
                assert (local.arrays[0] == expected).all(), (there, here, local.tp_rank, first)


def test_a_share_counts_the_tokens_that_vllm_places_on_a_rank() -> None:
    for block, share in WAYS:
        for rank in range(share[0]):
            each, tokens = TokenShard(0, share[0], rank, share[1]), np.arange(3 * block)
            held = [first + at for first in range(0, 3 * block, block) for at in oracle.slots(block, share, rank)]
            assert tokens[each.holds(tokens)].tolist() == held
            assert each.place(np.array(held)).tolist() == list(range(len(held)))
            assert [each.count(n) for n in tokens] == [sum(token < n for token in held) for n in tokens]


@pytest.mark.parametrize(("there", "here"), SHARED[:: len(SHARED) // 12])
def test_some_small_ways_to_share_tokens_are_right_in_every_byte(there: Any, here: Any) -> None:
    check_small(there, here, slice(None))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_small_ways_to_share_tokens_are_right_in_every_byte() -> None:
    for i, (there, here) in enumerate(SHARED):  # each pair with every third rest, which takes turns
        check_small(there, here, slice(i % 3, None, 3))


# -- windows and guesses -----------------------------------------------------------------------------------


def read_window(
    there: tuple[int, tuple[int, int]], size: int, window: int, tokens: int, first: int, gone: set[int]
) -> None:
    """Read a layer that has a window only here, of an engine that shares its tokens and has not kept some blocks."""
    (block, share), cache = there, Cache((attention(2),), 7)
    prefill = Engine((attention(2),), (GroupSpec((0,), block, 1, 48, share),), share[0])
    local = Rank(Engine((attention(2, window=window),), (GroupSpec((0,), size, 1, 48),)), 0)
    ids, remotes = range(-(-tokens // block)), ranks_of(prefill, local)
    for remote in remotes:
        oracle.fill(remote, [(0, ids)], cache, tokens)
    lent: oracle.Lists = [(0, [None if i in gone else i for i in ids])]
    mine: oracle.Lists = [(first, range(-(-tokens // size) - first // size) if first < tokens else [])]
    if any(token // block in gone for token in range(max(first, tokens - window + 1, 0), tokens)):
        with pytest.raises(RemoteTooShort):
            check_transfer(local, remotes, mine, lent, cache, tokens)
    else:
        check_transfer(local, remotes, mine, lent, cache, tokens)


@given(data=st.data())
@settings(max_examples=150)
def test_a_window_is_read_of_ranks_that_share_all_tokens_if_all_that_it_sees_is_lent(data: st.DataObject) -> None:
    there = data.draw(st.sampled_from([way for way in WAYS if way[0] >= 6 > way[1][0] > 1]), label="there")
    window, tokens = data.draw(st.integers(2, 9), label="window"), data.draw(st.integers(1, 40), label="tokens")
    gone = data.draw(st.sets(st.sampled_from(range(-(-tokens // there[0])))), label="gone")
    size = data.draw(st.sampled_from([2, 4, 12, 24]), label="here")
    read_window(there, size, window, tokens, data.draw(st.integers(0, tokens), label="cached"), gone)


def test_a_window_that_begins_behind_the_first_of_several_stretches_misses_no_token() -> None:
    read_window((12, (2, 1)), 12, 3, 12, 0, {0})


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("here", [(8, 1), (8, 2), (4, 2)])
@pytest.mark.parametrize("there", [(4, 1), (8, 2), (8, 4)])
def test_ranks_that_share_tokens_and_do_not_know_the_number_of_heads_hold_the_same_ones(
    there: tuple[int, int], here: tuple[int, int], heads: int
) -> None:
    def guessing(tp: int, size: int) -> Engine:
        part = PartSpec("kv", (("head", heads), ("dim", 2)), "head")
        group, share = GroupSpec((0,), 4 * size, 1, 12, (size, 1)), lambda held, rank, size: (rank, rank + 1, size)
        return Engine((LayerSpec("a", (part,)),), (group,), tp, declare=share, guessed_axis="head")

    prefill, decode, cache = guessing(*there), guessing(*here), Cache(guessing(*there).layers, 7)
    for rank in range(decode.tp_size):
        local = Rank(decode, rank)
        remotes = ranks_of(prefill, local)
        for remote in remotes:
            oracle.fill(remote, [(0, range(12))], cache, 40)
        check_transfer(local, remotes, [(3, range(12)[: -(-40 // (4 * here[1]))])], [(0, range(12))], cache, 40)


# -- ranks that are read -----------------------------------------------------------------------------------


def mla(tp: int, size: int, by: int = 1) -> Engine:
    """An engine with a layer that `size` ranks share by token, and with a draft that is whole on every rank."""
    groups = GroupSpec((0,), 12 * size, 1, 12, (size, by)), GroupSpec((1,), 12, 1, 12)
    return Engine((latent("mla"), latent("draft")), groups, tp)


def bytes_read(prefill: Engine, decode: Engine) -> list[Counter[int]]:
    """Per group, the bytes that all decode ranks together read of each prefill rank."""
    found, cache = [Counter[int]() for _ in prefill.groups], Cache(prefill.layers, 3)
    theirs, mine = ([(0, range(-(-96 // group.block_size))) for group in e.groups] for e in (prefill, decode))
    for rank in range(decode.tp_size):
        local = Rank(decode, rank)
        remotes = ranks_of(prefill, local)
        for remote in remotes:
            oracle.fill(remote, theirs, cache, 96)
        for remote, plan in zip(remotes, check_transfer(local, remotes, mine, theirs, cache, 96), strict=True):
            for section in plan.sections if plan else ():
                num_bytes = section.table.placed_bytes * len(section.local)
                found[section.table.span.remote_group][remote.tp_rank] += num_bytes
    return found


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((8, 8, 1), (8, 8, 4)),
        ((8, 8, 1), (8, 1, 1)),
        ((8, 4, 1), (8, 2, 1)),
        ((8, 4, 1), (4, 2, 1)),
        ((4, 4, 1), (8, 8, 2)),
        ((8, 1, 1), (8, 8, 1)),
    ],
)
def test_all_ranks_are_read_alike_also_of_a_layer_that_is_whole(prefill: Any, decode: Any) -> None:
    shared, whole = bytes_read(mla(*prefill), mla(*decode))
    assert len({shared[rank] for rank in range(prefill[0])}) == 1
    # Each decode rank reads a whole layer of one prefill rank, so fewer readers cannot read all.
    assert len(whole) == min(prefill[0], decode[0])
    assert len(set(whole.values())) == 1


def test_tokens_that_no_rank_holds_are_refused_by_name() -> None:
    local, remotes = Rank(mla(1, 1), 0), [Rank(mla(4, 4), rank, base=(1 + rank) << 41) for rank in range(4)]
    assert all(oracle.maps(local, remotes))
    for lost in range(4):
        kept = [remote for remote in remotes if remote.tp_rank != lost]
        with pytest.raises(
            NotCovered, match=r"held tokens of layer 'mla': .* needs part 'kv', all tokens, remote holds"
        ):
            oracle.maps(local, kept)
    # The tokens of rank 0 of 2 are those of ranks 0 and 2 of 4, so the other two may be missing.
    local = Rank(mla(2, 2), 0)
    assert all(oracle.maps(local, remotes[::2]))
    with pytest.raises(NotCovered, match=r"tokens 0 of 2 by 1, remote holds tp0 tokens 0 of 4 by 1, tp1 tokens 1 of 4"):
        oracle.maps(local, remotes[:2])


def test_a_peer_that_says_very_many_ranks_is_refused_at_the_first_that_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may say them of each layer, and the event loop waits."""
    asked, meet = [], match._meet

    def counted(one: TokenShard, other: TokenShard) -> bool:
        asked.append(other.rank)
        return meet(one, other)

    monkeypatch.setattr(match, "_meet", counted)
    assert match.holders(TokenShard(0), [TokenShard(0, 65_536, 0, 1)], 0) == []
    assert asked == [0, 1]


def test_ranks_with_different_heads_do_not_hold_one_head_together() -> None:
    def half(rank: int) -> Rank:
        """A rank with every second token of one of two heads."""
        part = PartSpec("k", (("head", 2), ("dim", 2)), "head", held=lambda extent, place, size: (rank, rank + 1))
        made = Engine((LayerSpec("attn", (part,)),), (GroupSpec((0,), 8, share=(2, 1)),), 2)
        return Rank(made, rank, base=(1 + rank) << 41)

    local = Rank(Engine((attention(2, parts="k"),), (GroupSpec((0,), 8),)), 0)
    with pytest.raises(NotCovered, match=r"held tokens .* needs \[0, 2\) of 2 along 'head' of part 'k', all tokens"):
        oracle.maps(local, [half(0), half(1)])


def test_blocks_that_begin_together_too_rarely_are_refused_with_the_number() -> None:
    def read(*blocks: tuple[int, int]) -> None:
        """Pairs of groups, each with our block size and theirs, which two ranks share."""
        layers = tuple(LayerSpec(f"l{i}", (PartSpec("kv", (("x", 1),)),)) for i in range(len(blocks)))
        local = tuple(GroupSpec((i,), here, num_blocks=1) for i, (here, _) in enumerate(blocks))
        remote = tuple(GroupSpec((i,), there, num_blocks=1, share=(2, 1)) for i, (_, there) in enumerate(blocks))
        ranks = [Rank(Engine(layers, remote, tp_size=2), rank, base=1 << 41) for rank in range(2)]
        oracle.maps(Rank(Engine(layers, local), 0), ranks)

    read((4, 65_536))
    with pytest.raises(
        LayoutError, match=r"\[3\] tokens here and \[65536\] there, .* every 196608 tokens in all, .* 65536"
    ):
        read((3, 65_536))
    with pytest.raises(LayoutError, match=r"groups \[0, 1\], .* 65544 tokens in all"):
        read((4, 65_536), (8, 8))


# -- registration, and older versions ----------------------------------------------------------------------

SHARD = TokenShard(0, 2, 1, 1)
GROUP = Group("mla", 16, 8)
LATENT = TensorPart(layer="a", name="kv", tensor=kv(8, 4, 16), order=("block", "token", "dim"))


def declared(*shards: TokenShard, rows: int = 8, entry: int = 1, name: str = "token", **fields: Any) -> Layout:
    """Rank 1 of 4 with a latent, of which it holds `rows` entries of some tokens per kernel block."""
    part = Part("kv", "int8", 1, 0, (Dim(name, rows, 4), Dim("dim", 4, 1)), tokens_per_entry=entry)
    made = Layout(
        schema=2,
        tp_rank=1,
        tp_size=4,
        memories=(Memory(1 << 30, 1 << 16),),
        groups=(GROUP,),
        views=(View(0, 0, "l", 0, rows * 4, (part,)),),
        token_shards=shards or (SHARD,),
    )
    return change(made, **fields)


def test_a_share_of_the_tokens_is_registered_beside_groups_that_are_whole() -> None:
    check_layout(declared())
    layers = latent(), attention(2, window=5), mamba2(2), latent("draft")
    groups = GroupSpec((0,), 8, share=(2, 2)), *(GroupSpec((i,), 4) for i in (1, 2, 3))
    assert [str(Rank(Engine(layers, groups, 4), 3).layout.shard(i)) for i in range(4)] == [
        "tokens 1 of 2 by 2", *["all tokens"] * 3
    ]  # fmt: skip
    made = register_tensors({"a": kv()}, **{**DECLARED, "block_size": 8}, tp_rank=3, tp_size=4, token_shard=(2, 1, 4))
    assert (made.layout.schema, made.layout.token_shards) == (2, (TokenShard(0, 2, 1, 4),))
    of: dict[str, Any] = {"groups": [Group("g", 8, 8)], "tp_rank": 3, "tp_size": 4}
    assert register_parts([LATENT], **of, token_shards=[TokenShard(0, 2, 1, 4)]).layout.num_token_shards == 2
    with pytest.raises(LayoutError, match=r"token_shards is \[\(2, 1, 4\)\]; give a sequence of TokenShard"):
        register_parts([LATENT], **of, token_shards=[(2, 1, 4)])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (declared(schema=1), "schema 1 and 1 token_shards; give schema=2 with any"),
        (declared(token_shards=msgspec.UNSET), "schema 2 and 0 token_shards"),
        (declared(schema=1, token_shards=()), "schema 1 and 0 token_shards; give .* and no token_shards"),
        (declared(SHARD, SHARD), r"\(group, size\) \[\(0, 2\), \(0, 2\)\]; give one per group"),
        (declared(SHARD, TokenShard(1, 4, 1), groups=(GROUP, GROUP)), r"\[\(0, 2\), \(1, 4\)\]; .* all of one size"),
        (declared(TokenShard(1, 2, 1)), "names group 1, but the layout has 1 groups"),
        (
            declared(groups=(change(GROUP, kind="state"),)),
            r"group 0 \('mla'\), tokens 1 of 2 by 1: a group with states",
        ),
        (declared(groups=(change(GROUP, window=9),)), "a window of 9 tokens cannot be shared by token; keep it whole"),
        (declared(TokenShard(0, 3, 1)), "tp_rank 1 of 4 cannot have shard 1 of 3; the size .* divides tp_size"),
        (declared(TokenShard(0, 2, 0)), "tp_rank 1 of 4 cannot have shard 0 of 2; .* rank is tp_rank modulo the size"),
        (declared(TokenShard(0, 1, 0)), "tp_rank 1 of 4 cannot have shard 0 of 1; the size is 2 or more"),
        (declared(groups=(Group("mla", 15, 8),)), "kernel blocks of 15 tokens on all ranks cannot be shared by 2"),
        (declared(groups=(Group("mla", 12, 8, 4),)), "kernel blocks of 3 tokens .* make it a multiple"),
        (declared(TokenShard(0, 2, 1, 3)), "an interleave of 3 does not fit 8 tokens per block and 8 per kernel block"),
        (declared(TokenShard(0, 2, 1, 16)), "an interleave of 16 does not fit 8 tokens per block"),
        (
            declared(TokenShard(0, 2, 1, 4), groups=(Group("mla", 48, 8, 4),)),
            "an interleave of 4 does not fit 24 tokens per block and 6 per kernel block on each of 2 ranks",
        ),
        (declared(rows=4, entry=2), "entries of 2 tokens would be cut by tokens 1 of 2 by 1; make .* a multiple of 2"),
        (declared(name="row"), "no dim named 'token', so it covers whole kernel blocks and cannot be shared by token"),
        (
            declared(rows=16),
            "holds 16 tokens per kernel block, .* / ratio 1 = 16 / 2 ranks = 8; .* give 32, or tensors that hold less",
        ),
    ],
)
def test_a_share_that_does_not_fit_is_refused_with_its_numbers(layout: Layout, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_layout(layout)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((2, 1), r"token_shard is \(2, 1\); give \(size, rank, interleave\)"),
        ((2, 1, 0), "token shard 0 interleave is 0: expected `int` >= 1"),
        ((2, 0, 1), "tp_rank 1 of 2 cannot have shard 0 of 2"),
    ],
)
def test_a_share_that_is_none_is_refused_where_tensors_are_registered(given: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        register_tensors({"a": kv()}, **{**DECLARED, "block_size": 8}, tp_rank=1, tp_size=2, token_shard=given)


@pytest.mark.parametrize("version", ["0.2.0", "0.3.0"])
def test_a_layout_without_shares_keeps_the_bytes_and_the_digest_that_older_versions_recorded(version: str) -> None:
    [packet] = [data for name, data, _ in packets(version) if name == "Welcome"]
    [welcome] = wire.decode_packet(packet).messages
    assert isinstance(welcome, wire.Welcome)
    layout = decode_layout(bytes(welcome.layout))
    assert msgspec.msgpack.encode(layout) == bytes(welcome.layout)
    assert fingerprint(layout) == "8ef457a230edfdea"


def test_version_0_2_0_refuses_shared_tokens_by_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `decode_layout` was the same but for the bound of `schema`, and passed over fields that it did not know."""
    old = msgspec.defstruct("Layout", [("schema", Annotated[int, msgspec.Meta(ge=1, le=1)], 1)], kw_only=True)
    monkeypatch.setattr(check, "_decoder", msgspec.msgpack.Decoder(old))
    with pytest.raises(LayoutError, match=r"^schema is 2: expected `int` <= 1$"):
        decode_layout(msgspec.msgpack.encode(declared()))
    decode_layout(msgspec.msgpack.encode(declared(schema=1, token_shards=msgspec.UNSET)))


# -- planted bugs ------------------------------------------------------------------------------------------


class Bug(NamedTuple):
    """What is replaced in the planner, and what notices it."""

    owner: Any
    name: str
    before: str
    after: str
    noticed_by: Callable[[], object]


def ways(there: Any, here: Any) -> Callable[[], None]:
    return lambda: check_small(there, here)


def staged_reads() -> None:
    bytes_read(mla(2, 2), mla(1, 1))


ONE, TWO, TWO_BY_2 = (12, (1, 1)), (12, (2, 1)), (8, (2, 2))
PLANTED = {
    "the place is not divided by the size": Bug(
        TokenShard, "place", "token // (self.interleave * self.size)", "token // self.interleave", ways(TWO, ONE)
    ),
    "the rank is that of another formula": Bug(
        TokenShard, "holds", "token // self.interleave % self.size", "token % self.size", ways(TWO_BY_2, ONE)
    ),
    "the period is the greater block": Bug(
        GroupPair,
        "period",
        "math.lcm(period, group.kernel_size if is_fine else group.block_size)",
        "max(period, group.kernel_size)",
        ways(TWO, TWO_BY_2),
    ),
    "the first period is not cut": Bug(
        GroupPair, "cuts", "-(-first // period), end // period", "first // period, end // period", ways(TWO_BY_2, TWO)
    ),
    "the last period is not cut": Bug(
        GroupPair,
        "cuts",
        "-(-first // period), end // period",
        "-(-first // period), -(-end // period)",
        ways(TWO, TWO),
    ),
    "a missing shard is taken for covered": Bug(
        match, "holders", "break", "continue", test_tokens_that_no_rank_holds_are_refused_by_name
    ),
    "the replica of another shard is taken": Bug(
        match, "holders", "replicas[rank][", "replicas[(rank + 1) % size][", ways(TWO, TWO)
    ),
    "the first replica is taken": Bug(
        match,
        "holders",
        "place % len(replicas[rank])",
        "0",
        lambda: test_all_ranks_are_read_alike_also_of_a_layer_that_is_whole((8, 8, 1), (8, 8, 4)),
    ),
    "a staged table has one stretch of several": Bug(
        _Alike, "cheapest_run", "self._dims(span)", "self._dims(span._replace(count=1))", staged_reads
    ),
    "a recipe has one stretch of several": Bug(
        oracle, "recipe", "zip(box.shape, box.in_run, strict=True)", "()", ways(ONE, TWO)
    ),
    "the first stretch of several is compared with the window": Bug(
        BlockLists,
        "_pair_tokens",
        "(spans[3] - 1) * spans[4]",
        "0",
        test_a_window_that_begins_behind_the_first_of_several_stretches_misses_no_token,
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_bug_that_is_planted_in_the_planner_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = PLANTED[name]
    plant(*bug[:4], monkeypatch)
    with pytest.raises((AssertionError, IndexError, RemoteTooShort, pytest.fail.Exception)):
        bug.noticed_by()
