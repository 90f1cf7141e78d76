"""Holders of blocks, with groups that see the same pages; few blocks and many are held by the same rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckv.config import EngineConfig
from asynckv.core.ledger import FEW, Kind, Ledger
from asynckv.core.rank import RankCore
from asynckv.core.readers import Identity
from asynckv.core.types import Address, Endpoint, decode_params
from asynckv.errors import LocalProtocolError
from asynckv.scheduler import PrefillRanks
from tests.world import BLOCK, make_layout

MANY = [*range(20, 21 + 2 * FEW)]
"""Blocks beside which one is held as one of many."""


def take(ledger: Ledger, holder: str, kind: Kind, request_id: str, groups: Mapping[int, Sequence[int]]) -> None:
    ledger.hold(holder, kind, request_id, ledger.check(kind, groups), 0.0)


def test_a_page_is_one_block_whatever_group_names_it() -> None:
    ledger = Ledger([10, 8, 10], (0, 1, 0))
    take(ledger, "lease", "lent", "r1", {0: [5], 1: [3]})
    with pytest.raises(LocalProtocolError, match="block 5 of group 2 cannot be filled: it is lent to 'r1'"):
        take(ledger, "pull", "writing", "r2", {2: [5]})
    take(ledger, "other", "lent", "r3", {2: [5]})
    take(ledger, "pull", "writing", "r2", {1: [5], 2: [6]})
    assert (ledger.num_held("lent"), ledger.num_held("writing")) == (2, 2)
    assert ledger.audit() == []
    with pytest.raises(LocalProtocolError, match="block 7 is named in two groups that share its page"):
        take(ledger, "two", "writing", "r4", {0: [7], 2: [7]})
    for holder in ("lease", "other", "pull"):
        ledger.drop(holder)
    assert (ledger.num_held("lent"), ledger.num_held("writing"), len(ledger)) == (0, 0, 0)
    take(ledger, "pull", "writing", "r2", {2: [5, -1]})
    assert ledger.audit() == []


def test_a_rank_knows_which_of_its_groups_see_the_same_pages() -> None:
    """One page is lent through one group at a time, and never filled through another while it is lent."""
    whole = make_layout(layers=2)
    shared = (whole.views[0], msgspec.structs.replace(whole.views[1], memory=0, group=1))
    groups = tuple(msgspec.structs.replace(whole.groups[0], name=name) for name in "ab")
    layout = msgspec.structs.replace(whole, memories=whole.memories[:1], groups=groups, views=shared)
    core = RankCore(Identity("p", "a" * 32, "agent", b"", layout), EngineConfig(engine_id="p"))
    group = PrefillRanks("p", [Endpoint(0, Address("tcp://127.0.0.1:1"), "a" * 32)])

    def lend(name: str, *blocks: int) -> None:
        core.lend(decode_params(group.make_params(name, [(0, [b]) for b in blocks], BLOCK, written=True)), 1, 0.0)

    with pytest.raises(LocalProtocolError, match="block 3 is named in two groups that share its page"):
        lend("both", 3, 3)
    lend("apart", 3, 4)
    with pytest.raises(LocalProtocolError, match="block 3 of group 1 cannot be filled: it is lent to 'apart'"):
        core.ledger.check("writing", {1: [3]})
    assert core.ledger.num_held("lent") == 2


@pytest.mark.parametrize("beside", [[], MANY], ids=["few", "many"])
def test_dropping_one_lender_leaves_the_others(beside: list[int]) -> None:
    ledger = Ledger([100])
    for name in ("one", "two"):
        take(ledger, name, "lent", name, {0: [5, *beside]})
    ledger.drop("one")
    assert ledger.audit() == []
    assert [h.holder for h in ledger.holders_of(0, 5)] == ["two"]
    with pytest.raises(LocalProtocolError, match=r"block 5 of group 0 cannot be filled: it is lent to 'two'"):
        take(ledger, "pull", "writing", "r", {0: [5]})
    ledger.drop("two")
    take(ledger, "pull", "writing", "r", {0: [5]})


@pytest.mark.parametrize("beside", [[], MANY], ids=["few", "many"])
@pytest.mark.parametrize(("held", "wanted"), [("lent", "writing"), ("writing", "lent"), ("writing", "writing")])
def test_a_writer_is_alone(held: Kind, wanted: Kind, beside: list[int]) -> None:
    ledger = Ledger([100])
    take(ledger, "holder", held, "theirs", {0: [5, *beside]})
    for blocks in ([7, 5], [5, 7, *range(60, 60 + 2 * FEW)]):
        with pytest.raises(LocalProtocolError, match=r"block 5 of group 0 cannot be .* wait until it is returned"):
            take(ledger, "other", wanted, "ours", {0: blocks})
        # What was refused took nothing.
        assert (ledger.audit(), ledger.get("other")) == ([], None)
        assert ledger.holders_of(0, 7) == []


BLOCKS = st.lists(st.integers(-1, 39), unique=True, max_size=40)
STEP = st.tuples(st.sampled_from("abcd"), st.sampled_from(["lent", "writing", "drop"]), BLOCKS)


@given(st.lists(STEP, max_size=20))
def test_it_is_a_set_of_holders_per_block(steps: Sequence[tuple[str, str, list[int]]]) -> None:
    ledger, model = Ledger([40]), dict[str, tuple[str, set[int]]]()
    for holder, how, given_blocks in steps:
        blocks = {b for b in given_blocks if b >= 0}
        if how == "drop":
            ledger.drop(holder)
            model.pop(holder, None)
        elif holder in model:
            continue
        elif any(blocks & theirs and "writing" in (how, kind) for kind, theirs in model.values()):
            with pytest.raises(LocalProtocolError):
                take(ledger, holder, "lent" if how == "lent" else "writing", holder, {0: given_blocks})
        else:
            take(ledger, holder, "lent" if how == "lent" else "writing", holder, {0: given_blocks})
            model[holder] = how, blocks
        assert ledger.audit() == []
        assert {h.holder for h in ledger} == set(model)
        for block in range(40):
            assert {h.holder for h in ledger.holders_of(0, block)} == {h for h, (_, x) in model.items() if block in x}
        for kind in ("lent", "writing"):
            held = {b for how_held, theirs in model.values() if how_held == kind for b in theirs}
            assert ledger.num_held("lent" if kind == "lent" else "writing") == len(held)
