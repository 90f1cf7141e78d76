"""Chains of hashes: two prompts share what their chains say, and a chain cannot be exchanged on its way."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckv import LocalProtocolError, token_hashes
from asynckv.core.types import KVTransferParams, Reason
from asynckv.core.wire import blocks_digest
from asynckv.geometry.pairing import common_prefix
from tests.commands import python
from tests.world import World, make_layout, reason

TOKENS = st.lists(st.integers(0, 3), max_size=12)
ALSO = st.lists(st.tuples(st.integers(0, 13), st.sampled_from(["", "a", "b", "ab"])), max_size=3)


@given(TOKENS, TOKENS, ALSO, ALSO, st.integers(1, 5))
def test_two_chains_agree_on_what_two_prompts_have_in_common(
    one: list[int], other: list[int], also: list[tuple[int, str]], others: list[tuple[int, str]], every: int
) -> None:
    """Each hash against what it covers, in plain words."""

    def covered(tokens: list[int], depends: list[tuple[int, str]], end: int) -> object:
        end = min(end, len(tokens))
        order = sorted((each for each in depends if each[0] < end), key=lambda each: each[0] // every)
        return end, tokens[:end], order

    left, right = token_hashes(one, every, also=also), token_hashes(other, every, also=others)
    assert (len(left), len(right)) == (-(-len(one) // every), -(-len(other) // every))
    for i, (a, b) in enumerate(zip(left, right, strict=False), 1):
        assert (a == b) is (covered(one, also, i * every) == covered(other, others, i * every))


@given(TOKENS, st.lists(st.integers(0, 3), max_size=12), st.integers(1, 5))
def test_every_token_of_what_two_engines_agree_on_is_the_same(lent: list[int], mine: list[int], every: int) -> None:
    """The reader hashes as many tokens as were lent; nothing is taken on trust."""
    most = min(len(lent), len(mine))
    same = common_prefix(token_hashes(mine[: len(lent)], every), token_hashes(lent, every), every, most)
    assert lent[:same] == mine[:same]
    first = next((i for i in range(most) if lent[i] != mine[i]), most)
    assert same == most or same == first // every * every
    assert same >= first // every * every


def test_all_kinds_of_integers_make_one_chain() -> None:
    kinds: list[Any] = [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), range(1, 4)]
    chains = [token_hashes(kind, 2) for kind in kinds]
    assert chains == [chains[0]] * 4
    assert token_hashes([1], 1, also=[(0, b"x")]) == token_hashes([1], 1, also=[(0, "x")])


def test_chains_are_the_same_in_every_process() -> None:
    """Also a promise to other versions: an engine of another one makes these."""
    recorded = [
        "dMhnLBJNjDcNBYHyBWaUVIqT341gzndq",
        "vjrcgmOlej35VFVdnfC+Y0YcmS9oIuGF",
        "/nEfPqFqZH7ZP7LEjoAj2pwz/z86Fe+g",
    ]
    code = "import asynckv, json; print(json.dumps(asynckv.token_hashes(range(5), 2, also=[(0, 'a'), (4, 'é')])))"
    for seed in ("0", "1"):
        done = python("-c", code, PYTHONHASHSEED=seed)
        assert (done.returncode, json.loads(done.stdout)) == (0, recorded)


@pytest.mark.parametrize(
    ("tokens", "every", "also"),
    [
        (["a"], 1, ()),
        ("text", 1, ()),
        ([1.5], 1, ()),
        ([1 << 63], 1, ()),
        (None, 1, ()),
        ([1], 0, ()),
        ([1], True, ()),
        ([1], 1, [(-1, "x")]),
        ([1], 1, [("x", 0)]),
        ([1], 1, [(0, 0)]),
        ([1], 1, [0]),
        ([1], 1, 0),
    ],
)
def test_what_is_no_prompt_is_refused(tokens: Any, every: Any, also: Any) -> None:
    with pytest.raises(LocalProtocolError):
        token_hashes(tokens, every, also=also)


# -- bound to what is lent ------------------------------------------------------------------------------


def lent(world: World, **changed: Any) -> tuple[KVTransferParams, Any]:
    """A prompt of 8 tokens, lent with its chain; the decode rank."""
    prefill = world.add("prefill", make_layout())
    chain = token_hashes(range(8), 3)
    params, _ = world.lent(prefill, "request", [3, 4], written=True, hashes=chain, hash_tokens=3)
    return msgspec.structs.replace(params, **changed), world.add("decode", make_layout(), seed=1)


@pytest.mark.parametrize(
    "changed",
    [
        {"hashes": tuple(token_hashes(range(1, 9), 3))},
        {"hash_tokens": 4},
        {"hashes": (), "hash_tokens": 0},
        {"hashes": tuple(token_hashes(range(8), 3)[:1])},
    ],
)
def test_hashes_that_were_exchanged_on_their_way_are_refused(changed: dict[str, Any]) -> None:
    world = World()
    params, decode = lent(world, **changed)
    pull = world.pull(decode, "d", [5, 6], params)
    world.run()
    assert reason(pull) is Reason.BLOCKS_DIFFER


def test_hashes_as_they_were_made_are_read() -> None:
    world = World()
    params, decode = lent(world)
    pull = world.pull(decode, "d", [5, 6], params)
    world.run()
    assert reason(pull) is Reason.COMPLETE


@pytest.mark.parametrize(("tokens", "read"), [(range(8), 8), ([*range(7), 9], 6), ([0, 1, 9, *range(3, 8)], 0)])
def test_a_pull_with_hashes_reads_what_they_cover(tokens: Any, read: int) -> None:
    world = World()
    params, decode = lent(world)
    pull = world.pull(decode, "d", [5, 6], params, hashes=token_hashes(tokens, 3))
    world.run()
    assert reason(pull) is Reason.COMPLETE
    assert pull.lists is not None
    assert pull.lists.num_tokens == read


def test_without_hashes_the_digest_is_the_one_that_it_always_was() -> None:
    plain, _ = lent(World(), hashes=(), hash_tokens=0)
    of_size = msgspec.structs.replace(plain, hash_tokens=16)
    assert blocks_digest(plain) == blocks_digest(of_size)
    assert blocks_digest(plain) != blocks_digest(msgspec.structs.replace(of_size, hashes=("x",)))
