"""The usual pairing of blocks says what the general rule says, and the core's other shortcuts keep their guards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckv.config import EngineConfig
from asynckv.core import routes
from asynckv.core.rank import RankCore
from asynckv.core.readers import Identity
from asynckv.core.types import Endpoint, Key, KVTransferParams
from asynckv.errors import PlanRefused, RemoteTooShort
from asynckv.geometry.bounds import NULL, BlockRuns
from asynckv.geometry.layout import Group
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.tables import GroupPair
from tests.world import make_layout

FAR = 2**31


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Blocks of one group on both sides: ratios, windows, placeholders, runs, ids up to the largest there can be."""
    size = draw(st.sampled_from([1, 2, 4, 16]))
    window = draw(st.sampled_from([0, 0, 0, 1, 7, 40]))
    ratios = [draw(st.sampled_from([1, 1, 2, 3])) for _ in "ab"]
    here = Group(
        "g", ratios[0] * size, 200, ratios[0], window=window, null_block=draw(st.sampled_from([NULL, NULL, 0]))
    )
    many = draw(st.sampled_from([40, 200, FAR // ratios[1] - 5]))
    there = Group(
        "g", ratios[1] * size, many, ratios[1], window=window, null_block=draw(st.sampled_from([NULL, NULL, 0, 5]))
    )
    tokens = draw(st.integers(1, 120))
    first = draw(st.integers(0, tokens + 3))
    most = max(0, -(-tokens // here.block_size) - first // here.block_size) + 1
    ids = draw(st.lists(st.integers(1, 199) | st.just(NULL), max_size=most))
    block = st.integers(0, 45) | st.just(NULL) | st.integers(FAR - 40, FAR - 1)
    runs = draw(st.lists(st.tuples(block, st.integers(1, 60)), max_size=3))
    offer = BlockRuns(draw(st.sampled_from([0, 0, 0, 5, 17])), tuple(runs))
    return {"here": here, "there": there, "lists": ((first, ids), offer, tokens)}


def outcome(case: dict[str, Any]) -> Any:
    (first, ids), offer, tokens = case["lists"]
    lists = BlockLists([(first, np.array(ids, np.int64))], [offer], tokens)
    try:
        found = list(lists._pair_tokens(GroupPair(0, 0, case["here"], case["there"], 1)))
    except (PlanRefused, RemoteTooShort) as exc:
        return type(exc), str(exc)
    return [(tuple(p.span), p.local.tolist(), p.remote.tolist(), p.local.dtype, p.remote.dtype) for p in found]


@given(case=cases())
@settings(max_examples=400)
def test_the_usual_pairing_is_the_general_one(case: dict[str, Any]) -> None:
    usual = outcome(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockLists, "_pair_aligned", lambda self, *args: ())
        assert usual == outcome(case)


def test_a_first_block_that_is_filled_in_part_comes_last_either_way() -> None:
    group = Group("g", 4, 200, 2)
    case = {"here": group, "there": group, "lists": ((1, [1, 4]), BlockRuns(0, ((0, 2),)), 8)}
    assert [(span, local) for span, local, *_ in outcome(case)] == [
        ((0, 0, 0, 0, 2), [3, 8, 9]),
        ((0, 0, 1, 1, 1), [2]),
    ]
    with pytest.MonkeyPatch.context() as patch:
        usual = outcome(case)
        patch.setattr(BlockLists, "_pair_aligned", lambda self, *args: ())
        assert usual == outcome(case)


def test_a_window_of_one_token_needs_nothing() -> None:
    here, there = (Group("g", 16, n, window=1) for n in (200, 40))
    assert outcome({"here": here, "there": there, "lists": ((80, [1]), BlockRuns(0, ()), 96)}) == []


@pytest.mark.parametrize("run", [[5, 0], [5, -1], [-2, 1], [FAR, 1], [5, FAR]])
def test_runs_outside_their_bounds_never_arrive(run: list[int]) -> None:
    assert msgspec.convert([0, [[NULL, 1], [FAR - 1, FAR - 1]]], BlockRuns).runs == ((NULL, 1), (FAR - 1, FAR - 1))
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert([0, [run]], BlockRuns)


@pytest.mark.parametrize("runs", [((4, 3),), ((4, 2), (8, 1))])
def test_a_placeholder_of_theirs_inside_a_run_is_no_block(runs: Any) -> None:
    group = Group("g", 4, 40, null_block=5)
    case = {"here": Group("g", 4, 40), "there": group, "lists": ((0, [1, 2, 3]), BlockRuns(0, runs), 12)}
    kind, text = outcome(case)
    assert kind is RemoteTooShort
    assert "token 4" in text


def test_ids_beyond_what_indices_can_say_are_refused_and_not_wrapped() -> None:
    there = Group("g", 4, FAR - 1)
    case = {"here": Group("g", 4, 40), "there": there, "lists": ((0, [1, 2]), BlockRuns(0, ((FAR - 2, 2),)), 8)}
    kind, text = outcome(case)
    assert kind is PlanRefused
    assert str(FAR - 1) in text


@pytest.mark.parametrize(
    ("runs", "named"), [(((37, 4),), 40), (((40, 1),), 40), (((37, 3), (41, 1)), 41), (((41, 1), (1, 3)), 41)]
)
def test_a_block_that_the_other_side_never_declared_is_refused_wherever_it_stands(runs: Any, named: int) -> None:
    group = Group("g", 4, 40)
    tokens = 4 * sum(count for _, count in runs)
    lists = ((0, list(range(1, tokens // 4 + 1))), BlockRuns(0, runs), tokens)
    kind, text = outcome({"here": Group("g", 4, 40), "there": group, "lists": lists})
    assert kind is PlanRefused
    assert f"block {named}," in text


@pytest.mark.parametrize(("window", "size"), [(5, 4), (6, 4), (5, 2), (6, 2)])
def test_of_a_window_every_token_that_the_next_one_sees_has_to_be_there(window: int, size: int) -> None:
    """Of 16 tokens, a window of 6 lets the next one see 11 ... 15, and one of 5 only the last block."""
    here, there = Group("g", 4, 40, window=window), Group("g", size, 40, window=window)
    lent = 4 // size  # blocks in the last four tokens
    case = {"here": here, "there": there, "lists": ((0, [1, 2, 3, 4]), BlockRuns(0, ((NULL, 3 * lent), (7, lent))), 16)}
    if window == 6:
        kind, text = outcome(case)
        assert kind is RemoteTooShort
        assert f"token {12 - size} on" in text
    else:
        assert [local for _, local, *_ in outcome(case)] == [[4]] * lent


# -- what is remembered of endpoints -----------------------------------------------------------------


def make_node() -> RankCore:
    return RankCore(Identity("d", "b" * 32, "agent", b"", make_layout()), EngineConfig(engine_id="d"))


def params(number: int, endpoints: Sequence[Endpoint], changes: dict[str, Any]) -> KVTransferParams:
    given: dict[str, Any] = {
        "engine_id": "p",
        "request_id": f"r{number}",
        "key": Key("epoch", 0, number, "f" * 32),
        "tp_size": len(endpoints),
        "endpoints": tuple(endpoints),
        "groups": (BlockRuns(0, ((0, 1),)),),
        "num_tokens": 4,
    }
    return KVTransferParams(**given | changes)


def places(core: RankCore, number: int, endpoints: Sequence[Endpoint], **changes: Any) -> list[tuple[int, str]]:
    """Announce a request, and say which ranks it answers for."""
    pull = core.announce(f"d{number}", params(number, endpoints, changes), "", 30.0, 0.0)
    return [(source.rank.tp_rank, source.address) for source in pull.sources]


def endpoints(count: int, port: int) -> list[Endpoint]:
    return [Endpoint(rank, f"tcp://127.0.0.1:{port + rank}", "c" * 32) for rank in range(count)]


def test_a_group_is_known_by_all_of_its_ranks() -> None:
    core = make_node()
    one, other = endpoints(2, 1000), endpoints(2, 1000)
    other[1] = msgspec.structs.replace(other[1], address="tcp://127.0.0.1:2000")
    assert places(core, 1, one) == [(0, "tcp://127.0.0.1:1000"), (1, "tcp://127.0.0.1:1001")]
    assert places(core, 2, other)[1] == (1, "tcp://127.0.0.1:2000")
    assert places(core, 3, one) == places(core, 4, list(one))


def test_endpoints_may_be_a_list() -> None:
    core, listed = make_node(), endpoints(1, 1000)
    pull = core.announce("d1", params(1, tuple(listed), {"endpoints": listed}), "", 30.0, 0.0)
    assert [(source.rank.tp_rank, source.address) for source in pull.sources] == [(0, "tcp://127.0.0.1:1000")]


def test_endpoints_are_not_remembered_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_ENDPOINTS", 8)
    core = make_node()
    for number in range(20):
        places(core, number, endpoints(3, 1000 + 10 * number))
        assert sum(len(listed) for _, listed, _, _ in core.decode.routes._groups) <= 8


def test_a_group_that_is_not_whole_is_refused_every_time() -> None:
    core = make_node()
    for number in (1, 2):
        with pytest.raises(PlanRefused, match="must be listed"):
            places(core, number, endpoints(1, 1000), tp_size=2)


@pytest.mark.parametrize("rank", [1, 3])
def test_a_rank_that_there_cannot_be_makes_no_group_whole(rank: int) -> None:
    listed = [*endpoints(1, 1000), Endpoint(rank, "tcp://127.0.0.1:2000", "c" * 32)]
    if rank == 1:
        assert len(places(make_node(), 1, listed)) == 2
        return
    with pytest.raises(PlanRefused, match="must be listed"):
        places(make_node(), 1, listed, tp_size=2)


# -- what may wait a turn --------------------------------------------------------------------------


def test_only_releases_wait_for_company() -> None:
    from asynckv.core.outbox import Outbox
    from asynckv.core.types import Cohort, Outcome, ReplyTo
    from asynckv.core.wire import Ack, Ping, Release

    key, to = Key("epoch", 0, 1, "f" * 32), ReplyTo(b"r")
    outbox = Outbox("b" * 32)
    outbox.send(to, "", Release(key, "r", Cohort("d"), "pull", Outcome.COMPLETE))
    assert (bool(outbox.messages), outbox.is_urgent) == (True, False)
    for message in (Ping(1), Ack(key, "pull")):
        outbox.send(to, "", message)
        assert outbox.is_urgent
        assert len(list(outbox.take_packets())) == 1
        assert (bool(outbox.messages), outbox.is_urgent) == (False, False)


@pytest.mark.parametrize(
    ("here", "there", "filled"),
    [
        (Group("g", 64, 8, 4, window=100), Group("g", 64, 8, 4, window=100), [0, 128]),
        (Group("g", 64, 8, 1, window=100), Group("g", 16, 32, 1, window=100), [0, 128]),
        (Group("g", 16, 32, 1, window=100), Group("g", 64, 8, 1, window=100), [16, 128]),
    ],
    ids=["kernel blocks", "smaller there", "larger there"],
)
def test_of_a_window_the_first_block_is_read_whole(here: Group, there: Group, filled: list[int]) -> None:
    """A prefix cache gives a block to a prompt that ends sooner as well, which needs its first tokens."""
    lists = BlockLists([(0, np.arange(128 // here.block_size))], [BlockRuns(0, ((0, 128 // there.block_size),))], 128)
    pair = GroupPair(0, 0, here, there, 1)
    size, tokens = pair.local_size, set[int]()
    for pairs in lists._pair_tokens(pair):
        for block in pairs.local.tolist():
            begin = block * size + pairs.span.local_offset
            tokens |= set(range(begin, begin + pairs.span.tokens))
    assert tokens == set(range(*filled))
