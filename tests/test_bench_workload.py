"""Prompt lengths: drawn and traced."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynckv.errors import ConfigError
from asynckv.tools.bench.memory import POISON, Lists, Pool
from asynckv.tools.bench.options import share_of
from asynckv.tools.bench.workload import cached_tokens, drawn, traced
from asynckv.tools.plan.layouts import CONV_ORDERS, ORDERS, model_layout
from asynckv.tools.plan.models import Heads, Index, Latent, Model, Projection, State


def test_one_length_or_a_range() -> None:
    assert drawn("1024", 3, 0).prompt_tokens == (1024, 1024, 1024)
    lengths = drawn("128:130", 200, 0).prompt_tokens
    assert set(lengths) == {128, 129, 130}


def test_a_seed_repeats_its_lengths() -> None:
    assert drawn("1:5000", 50, 7) == drawn("1:5000", 50, 7)
    assert drawn("1:5000", 50, 7) != drawn("1:5000", 50, 8)


@pytest.mark.parametrize("spec", ["", "x", "0", "-5", "5:2", "1:", ":3", "1:2:3", "1e3", "99999999999"])
def test_a_malformed_length_is_named(spec: str) -> None:
    if spec == "1:":  # an open end reads as one length
        assert drawn(spec, 1, 0).prompt_tokens == (1,)
        return
    with pytest.raises(ConfigError, match="--prompt-tokens"):
        drawn(spec, 1, 0)


def test_capping_says_how_many(tmp_path: Path) -> None:
    work = drawn("100", 5, 0)
    assert work.capped(None) is work
    assert work.capped(100).num_capped == 0
    assert (work.capped(60).num_capped, set(work.capped(60).prompt_tokens)) == (5, {60})


def test_a_trace_gives_its_first_requests(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"input_length": 5, "output_length": 1}\n\n{"prompt_tokens": 7}\n{"input_length": 9}\n')
    assert traced(path, None).prompt_tokens == (5, 7, 9)
    assert traced(path, 2).prompt_tokens == (5, 7)
    with pytest.raises(ConfigError, match="holds 3 requests, fewer than --requests 4"):
        traced(path, 4)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: Input data was truncated"),
        ("[]", "line 2: Expected `object`"),
        ('{"x": 1}', "line 2: has neither input_length nor prompt_tokens"),
        ('{"input_length": 0}', "line 2: Expected `int` >= 1 - at `$.input_length`"),
        ('{"input_length": true}', "line 2: Expected `int | null`, got `bool` - at `$.input_length`"),
        ('{"input_length": "5"}', "got `str` - at `$.input_length`"),
        ('{"input_length": 5, "timestamp": "now"}', "got `str` - at `$.timestamp`"),
        ('{"input_length": 5, "timestamp": NaN}', "line 2: JSON is malformed"),
        ('{"input_length": 5, "timestamp": 3}', "line 1: has no timestamp, but other lines have"),
        ('{"input_length": 5, "hash_ids": 7}', "line 2: Expected `array`, got `int` - at `$.hash_ids`"),
        ('{"input_length": 5, "hash_ids": [true]}', "got `bool` - at `$.hash_ids["),
        ('{"input_length": 5, "hash_ids": [-1]}', "line 2: Expected `int` >= 0 - at `$.hash_ids["),
        ('{"input_length": 513, "hash_ids": [1]}', "line 2: hash_ids has 1 entries, but 513 tokens need 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"input_length": 5}\n' + line + "\n")
    with pytest.raises(ConfigError) as caught:
        traced(path, None)
    assert complaint in str(caught.value)


def test_a_trace_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, complaint in (("empty", "no requests"), ("binary", "UTF-8"), ("none", "No such file")):
        with pytest.raises(ConfigError, match=complaint):
            traced(tmp_path / name, None)


def test_a_mix_has_its_lengths_in_their_shares() -> None:
    work = drawn("128:3,8192:1", 4000, 1)
    assert set(work.prompt_tokens) == {128, 8192}
    assert 0.22 < work.prompt_tokens.count(8192) / 4000 < 0.28
    assert drawn("128:3,8192:1", 50, 1).prompt_tokens == drawn("128:0.75,8192:0.25", 50, 1).prompt_tokens


def test_a_trace_brings_its_arrivals_and_chunks(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 500, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}\n'
        '{"timestamp": 500, "input_length": 512, "hash_ids": [0]}\n'
        '{"timestamp": 3500, "input_length": 1100, "hash_ids": [0, 4, 5]}\n'
    )
    work = traced(path, None)
    assert work.arrivals_s == (0.0, 0.0, 3.0)
    assert work.chunks == ((0, 1), (0,), (0, 4, 5))
    assert work.capped(700).chunks == ((0, 1), (0,), (0, 4))
    with pytest.raises(ConfigError, match="--shared-prefix was given, but the hash_ids"):
        work.sharing(5, 1, 0)


def test_a_trace_that_goes_back_in_time_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 5, "input_length": 6}\n\n{"timestamp": 4, "input_length": 6}\n')
    with pytest.raises(ConfigError, match="line 3: timestamp 4 is before 5 of the line above; sort the file"):
        traced(path, None)


@pytest.mark.parametrize(("tokens", "size"), [(1024, 16), (100, 4), (7, 1)])
def test_shared_prefixes_are_cut_so_that_they_end_with_a_chunk(tokens: int, size: int) -> None:
    work = drawn("64:0.5,2048:0.5", 50, 0).sharing(tokens, 2, 0)
    assert work.chunk_tokens == size
    for length, chunks in zip(work.prompt_tokens, work.chunks, strict=True):
        assert len(chunks) == min(tokens, length) // size
    longest = {c for c in work.chunks if len(c) == tokens // size}
    assert len(longest) == 2
    first, second = longest
    assert not set(first) & set(second)
    assert all(c == first[: len(c)] or c == second[: len(c)] for c in work.chunks)


def test_shares() -> None:
    assert (share_of("--x", "5%"), share_of("--x", "0.5"), cached_tokens("50%", 9)) == (0.05, 0.5, 4)
    for text in ("", "%", "101%", "-1", "nan", "x"):
        with pytest.raises(ConfigError, match="--x"):
            share_of("--x", text)


# -- The pattern in memory --------------------------------------------------------------------------------------------

STATE = State((Projection("x", 8, 4), Projection("b", 2, 8)), 3, 8, (4, 8), "float32")
MODEL = Model("tiny", (Heads(4, 16), Heads(4, 16, window=20), Latent(32, 8), STATE, Heads(4, 16)))
LISTS: Lists = [(0, [1, 2, 3]), (0, [None, 2, 3]), (0, [1, 2, 3]), (0, [5])]
TOKENS = 40
SIZE = 2 * 40 * 4 * 16 * 2 * 2 + 19 * 4 * 16 * 2 * 2 + 40 * 40 * 2 + (8 * 4 + 2 * 8) * 3 * 2 + 8 * 4 * 8 * 4


def pool(order: str = "nhd", seed: int = 1, model: Model = MODEL, **sizes: Any) -> Pool:
    return Pool(model_layout(model, num_blocks=8, order=order, **sizes), seed)


@pytest.mark.parametrize("conv_order", CONV_ORDERS)
@pytest.mark.parametrize("order", ORDERS)
def test_what_was_filled_is_right_and_poison_is_wrong(order: str, conv_order: str) -> None:
    it = pool(order, conv_order=conv_order, ratio=2)
    it.poison(LISTS)
    compared, wrong = it.check(3, LISTS, TOKENS)
    assert compared == SIZE == it.wanted(LISTS, TOKENS)
    assert wrong > 0.98 * SIZE
    it.fill(3, LISTS, TOKENS)
    assert it.check(3, LISTS, TOKENS) == (SIZE, 0)


def test_one_wrong_byte_is_counted_once() -> None:
    it = pool()
    it.fill(3, LISTS, TOKENS)
    view = it.registration.layout.views[0]
    at = it.registration.layout.memories[view.memory].base + view.offset + 2 * view.stride + view.parts[1].offset + 3
    ctypes.c_ubyte.from_address(at).value ^= 1
    assert it.check(3, LISTS, TOKENS) == (SIZE, 1)


@pytest.mark.parametrize("changed", [{"request": 4}, {"tokens": 39}, {"lists": [(0, [2, 1, 3]), *LISTS[1:]]}])
def test_another_request_state_or_order_does_not_pass(changed: dict[str, Any]) -> None:
    it = pool()
    it.fill(3, LISTS, TOKENS)
    _, wrong = it.check(changed.get("request", 3), changed.get("lists", LISTS), changed.get("tokens", TOKENS))
    assert wrong > 500


def test_what_was_cached_must_stay_untouched() -> None:
    it = pool()
    lists = [(20, [2, 3]), (20, [2, 3]), (20, [2, 3]), (20, [5])]
    it.poison(lists)
    assert it.check(3, lists, TOKENS)[1] > 0
    it.fill(3, lists, TOKENS)
    compared, wrong = it.check(3, lists, TOKENS)
    # `fill` writes whole blocks: tokens 16 to 19 were cached, and are no longer what they were.
    assert wrong > 0.9 * 4 * (2 * 4 * 16 * 2 * 2 + 40 * 2)
    assert compared == it.wanted(lists, TOKENS)


@pytest.mark.parametrize("order", ["nhd", "cross-hnd"])
def test_ranks_hold_their_shares_of_one_pattern(order: str) -> None:
    one = Model("one", (Heads(4, 16), STATE))
    lists: Lists = [(0, [1, 2]), (0, [5])]
    whole = Pool(model_layout(one, num_blocks=8, order=order), 1)
    halves = [Pool(model_layout(one, num_blocks=8, order=order, tp_rank=r, tp_size=2), 1) for r in range(2)]
    for it in (whole, *halves):
        it.fill(3, lists, 20)
    for field, shares in zip(whole._fields, zip(*(h._fields for h in halves), strict=True), strict=True):
        axis = field.array.ndim - field.places.ndim
        for half, share in enumerate(shares):
            size = share.array.shape[axis]
            cut = [slice(None)] * axis + [slice(half * size, (half + 1) * size)]
            assert (field.array[tuple(cut)] == share.array).all()


SHARED = Model("shared", (Heads(1, 16), Heads(1, 16, window=20), Latent(32, 8, index=Index(8, "int8", 1)), STATE))
SHARES = [(2, 1, 1), (2, 4, 1), (4, 2, 1), (4, 1, 2), (2, 8, 2), (8, 2, 2)]
"""Ranks that share tokens, tokens in a row on one, and kernel blocks per block of 32 tokens."""


def pools(size: int, interleave: int, ratio: int) -> list[Pool]:
    """Make the pool of a rank that holds all tokens, and those of ranks that share them."""
    sizes: dict[str, Any] = {"num_blocks": 8, "block_size": 32, "ratio": ratio}
    ranks: list[dict[str, Any]] = [
        {"tp_rank": r, "tp_size": size, "dcp": size, "cp_interleave": interleave} for r in range(size)
    ]
    return [Pool(model_layout(SHARED, **sizes, **rank), 1) for rank in ({}, *ranks)]


@pytest.mark.parametrize(("size", "interleave", "ratio"), SHARES)
def test_ranks_that_share_tokens_hold_their_own_of_one_pattern(size: int, interleave: int, ratio: int) -> None:
    lists: Lists = [(0, [1, 3, 2]), (0, [None, 3, 2]), (0, [1, 3, 2]), (0, [5])]
    whole, *ranks = pools(size, interleave, ratio)
    for it in (whole, *ranks):
        it.fill(3, lists, 90)
    for field, *shares in zip(whole._fields, *(rank._fields for rank in ranks), strict=True):
        for token in range(90) if field.group in (0, 2) else ():
            block, offset = lists[field.group][1][token // 32], token % 32
            assert block is not None
            kernel, place = divmod(offset, 32 // ratio)
            # vLLM's rule (block_table.py): the offset within the block decides the rank, and the place on it.
            rank, here = offset // interleave % size, offset // (interleave * size) * interleave + offset % interleave
            kernel_here, place_here = divmod(here, 32 // ratio // size)
            one, other = field.array[block * ratio + kernel, place], shares[rank].array
            assert (one == other[block * ratio + kernel_here, place_here]).all()


@pytest.mark.parametrize(("size", "interleave", "ratio"), SHARES)
@pytest.mark.parametrize(("first", "tokens"), [(0, 90), (0, 1), (33, 90), (40, 64), (41, 42)])
def test_ranks_that_share_tokens_check_their_own_and_together_all(
    size: int, interleave: int, ratio: int, first: int, tokens: int
) -> None:
    whole, *ranks = pools(size, interleave, ratio)
    blocks: list[int | None] = [1, 3, 2]
    taken = blocks[first // 32 : -(-tokens // 32)]
    lists: Lists = [(first, taken), (first, []), (first, taken), (first, [])]
    compared = 0
    for rank, it in enumerate(ranks):
        it.poison(lists)
        it.fill(3, lists, tokens)
        for field in it._fields:
            # `fill` writes whole blocks; those before the first token were cached, and stay as they were.
            shard, at = field.shard, first // 32 * 32
            held = [t for t in range(at, at + 96) if t // interleave % size == rank]
            for i, token in enumerate(held):
                if token < first and field.group in (0, 2):
                    kernel, place = divmod(i, field.array.shape[1])
                    ids = [b * ratio + k for b in taken if b is not None for k in range(ratio)]
                    field.array[ids[kernel], place] = np.uint64(POISON) >> field.shift
            assert str(shard) in (f"tokens {rank} of {size} by {interleave}", "all tokens")
        found, wrong = it.check(3, lists, tokens)
        assert (found, wrong) == (it.wanted(lists, tokens), 0)
        compared += found
        if found:
            assert it.check(4, lists, tokens)[1] > 0.9 * found
    assert compared == whole.wanted(lists, tokens)


def test_the_bytes_of_another_share_do_not_pass() -> None:
    lists: Lists = [(0, [1, 3, 2]), (0, [None, 3, 2]), (0, [1, 3, 2]), (0, [5])]
    _, one, other = pools(2, 1, 1)
    for it in (one, other):
        it.fill(3, lists, 90)
    for mine, theirs in zip(one._fields, other._fields, strict=True):
        mine.array[...] = theirs.array
    compared, wrong = one.check(3, lists, 90)
    shared = sum(45 * field.token_bytes for field in one._fields if field.group in (0, 2))
    assert wrong > 0.9 * shared > 0.3 * compared


def test_other_blocks_stay_untouched() -> None:
    it = pool()
    others: Lists = [(0, [4, 5]), (0, [4, 5]), (0, [4, 5]), (0, [1])]
    it.fill(3, others, 30)
    it.fill(4, LISTS, TOKENS)
    assert it.check(3, others, 30)[1] == 0


@pytest.mark.parametrize("order", ["nhd", "cross-hnd"])
def test_requests_that_share_chunks_share_their_tokens_and_nothing_else(order: str) -> None:
    one = Model("one", (Heads(4, 16), STATE))
    it = Pool(model_layout(one, num_blocks=8, order=order), 1)
    mine, theirs = (16, [7, 8]), (16, [7, 9])
    it.fill(3, [(0, [1, 2, 3]), (0, [5])], TOKENS, mine)
    it.fill(4, [(0, [None, 4, 6]), (0, [7])], TOKENS, theirs)
    # The first block is the same for both; the second is another chunk, and the third everybody's own.
    assert it.check(4, [(0, [1, 4, 6]), (0, [7])], TOKENS, theirs)[1] == 0
    assert it.check(3, [(0, [1, 2, 3]), (0, [5])], TOKENS, mine)[1] == 0
    for blocks, state in (([1, 2, 6], 7), ([1, 4, 3], 7), ([1, 4, 6], 5)):
        assert it.check(4, [(0, blocks), (0, [state])], TOKENS, theirs)[1] > 500
    assert it.check(3, [(0, [1, 2, 3]), (0, [5])], TOKENS)[1] > 500
