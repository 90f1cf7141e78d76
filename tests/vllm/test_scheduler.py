"""The scheduler's half in vLLM's own scheduler: every way that a request can go, and what the workers are asked for.

Nothing computes here. A test says what the workers report, and looks at orders, tokens and free blocks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from asynckv.arguments import MAX_INTEGER
from asynckv.core.types import decode_params
from asynckv.embed.ledgers import State
from asynckv.embed.orders import Announce, Cancel, Lend, Pull, Reclaim
from asynckv.errors import AsyncKVError, ConfigError
from asynckv.integrations.vllm.handover import WorkerAddress
from asynckv.integrations.vllm.shape import CacheGroup, Shape
from tests.vllm.schedulers import DENSE, HYBRID, MIXED, STATES, WINDOW, Group, Side

ALL = {"dense": DENSE, "window": WINDOW, "mixed": MIXED, "hybrid": HYBRID, "states": STATES}
SHAPES = pytest.mark.parametrize("groups", ALL.values(), ids=ALL)
FORGETFUL = pytest.mark.parametrize("groups", [WINDOW, MIXED, HYBRID, STATES], ids=list(ALL)[1:])

numbers = itertools.count(1)


def prompt_of(num_tokens: int) -> list[int]:
    """A prompt that nobody has seen."""
    start = next(numbers) * 5000
    return [(start + i) * 7919 % 30_000 for i in range(num_tokens)]


def brought(prompt: Sequence[int], groups: tuple[Group, ...] = DENSE, **fields: Any) -> Any:
    """What a prefill engine hands out for a prompt, as it comes through a router."""
    return json.loads(json.dumps(Side(groups, name="prefill").prefill("at-prefill", prompt, **fields)))


def num_read(pull: Pull) -> int:
    return len([block for block in pull.groups[0][1] if block is not None])


def is_clean(side: Side) -> bool:
    """All is forgotten, free, and asleep."""
    return side.is_idle() and side.num_free() == side.free_blocks and not len(side.half.pulls)


def settle(side: Side) -> None:
    """Make one more step, after which nothing is left."""
    side.step()
    assert is_clean(side)


# -- the prefill engine -------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [DENSE, HYBRID], ids=["dense", "hybrid"])
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 150])
def test_blocks_are_counted_with_the_tokens_of_all_ranks_that_share_them(
    groups: tuple[Group, ...], num_tokens: int
) -> None:
    # Guessed tokens may have a block beyond those of the prompt.
    prefill, side = Side(groups, name="prefill", dcp=4, drafts=3 if groups == DENSE else None), Side(groups, dcp=2)
    prompt = prompt_of(num_tokens + prefill.half.shape.back_off)
    params = prefill.prefill("a", prompt)
    lent = decode_params(params["asynckv"])
    assert (lent.tp_size, lent.num_token_shards, lent.num_tokens) == (4, 4, num_tokens)
    assert sum(count for _, count in lent.groups[0].runs) == -(-num_tokens // 64)
    side.add("b", prompt, params, 2)
    (first, blocks) = side.step().only(Pull).groups[0]
    assert (first, len(blocks)) == (0, -(-num_tokens // 32))


@SHAPES
def test_a_prefilled_request_is_lent_with_the_next_step_and_freed_when_it_is_sent(groups: tuple[Group, ...]) -> None:
    side, prompt = Side(groups), prompt_of(100)
    out = side.prefill("a", prompt)
    assert out["do_remote_prefill"] is True
    assert out["do_remote_decode"] is False
    assert out["asynckv"]["written"] is True
    assert out["asynckv"]["engine_id"] == "engine"
    assert len(out["asynckv"]["groups"]) == len(groups)
    assert not side.is_idle()  # EngineCore makes the step with which the order leaves
    assert side.step().only(Lend).params == out["asynckv"]
    assert side.num_free() < side.free_blocks
    assert side.step().orders == []
    side.step(sent=["a"])
    assert is_clean(side)


def test_all_that_was_computed_is_lent() -> None:
    side = Side()
    out = side.prefill("a", prompt_of(100))["asynckv"]
    assert out["num_tokens"] == 100
    ((first, runs),) = out["groups"]
    assert (first, sum(count for _, count in runs)) == (0, 7)


@FORGETFUL
def test_models_that_forget_stop_one_token_short(groups: tuple[Group, ...]) -> None:
    side = Side(groups)
    assert side.prefill("a", prompt_of(128))["asynckv"]["num_tokens"] == 127
    assert side.scheduler.requests["a"].num_prompt_tokens == 127


@FORGETFUL
def test_a_prompt_of_one_token_is_computed_whole(groups: tuple[Group, ...]) -> None:
    assert Side(groups).prefill("a", prompt_of(1))["asynckv"]["num_tokens"] == 1


@FORGETFUL
def test_prompts_of_embeddings_are_shortened_in_all_their_parts(groups: tuple[Group, ...]) -> None:
    side = Side(groups)
    both = Request("a", prompt_of(40), SamplingParams(max_tokens=1), None, prompt_embeds=torch.zeros(40, 8))
    both.prompt_is_token_ids = [i < 20 for i in range(40)]
    alone = Request("b", None, SamplingParams(max_tokens=1), None, prompt_embeds=torch.zeros(40, 8))
    for request in (both, alone):
        request.kv_transfer_params = {"do_remote_decode": True}
        side.scheduler.add_request(request)
        assert len(request.prompt_embeds) == request.num_tokens == request.num_prompt_tokens == 39
    assert len(both.prompt_token_ids) == len(both.prompt_is_token_ids) == 39


def test_completions_that_share_a_prompt_are_shortened_once_each() -> None:
    side, ids = Side(WINDOW), prompt_of(40)
    for name in ("a", "b"):
        request = Request(name, ids, SamplingParams(max_tokens=1), None)
        request.kv_transfer_params = {"do_remote_decode": True}
        side.scheduler.add_request(request)
        assert request.num_prompt_tokens == 39
    assert len(ids) == 40


@pytest.mark.parametrize("most", [1, 5])
def test_prompts_whose_log_probabilities_are_asked_for_are_not_shortened(most: int) -> None:
    side = Side(WINDOW)
    request = side.add("a", prompt_of(64), {"do_remote_decode": True}, most, prompt_logprobs=1)
    assert request.num_prompt_tokens == 64


@SHAPES
@pytest.mark.parametrize("asynchronous", [False, True], ids=["one at a time", "overlapping"])
def test_a_prompt_in_chunks_is_lent_once_and_whole(groups: tuple[Group, ...], asynchronous: bool) -> None:
    side = Side(groups, max_batched=48, asynchronous=asynchronous)
    out = side.prefill("a", prompt_of(200))["asynckv"]
    assert out["num_tokens"] in (199, 200)
    assert side.step().only(Lend).params == out


def test_an_aborted_prefill_lends_nothing() -> None:
    side = Side(max_batched=32)
    side.add("a", prompt_of(100), {"do_remote_decode": True})
    assert side.step().orders == []
    side.abort("a")
    assert side.step().orders == []
    assert is_clean(side)


def test_an_abort_after_the_end_changes_nothing() -> None:
    side = Side()
    side.prefill("a", prompt_of(100))
    side.step()
    side.abort("a")
    assert side.step().orders == []
    assert side.num_free() < side.free_blocks
    side.step(sent=["a"])
    assert is_clean(side)


def test_what_only_a_step_under_way_has_computed_is_not_lent() -> None:
    side = Side()
    request = SimpleNamespace(num_computed_tokens=5, num_in_flight_tokens=5, num_tokens=5, num_output_tokens=0)
    with pytest.raises(AsyncKVError, match="its blocks or its state are gone"):
        side.half._lists(request, [[1]] * len(side.half.shape.groups))
    request.num_in_flight_tokens = 0
    assert side.half._lists(request, [[1]] * len(side.half.shape.groups)) == ([(0, [1])], 5)


def test_of_a_request_that_was_preempted_and_has_no_blocks_nothing_is_lent() -> None:
    side = Side(HYBRID)
    request = SimpleNamespace(num_computed_tokens=0, num_in_flight_tokens=0, num_tokens=5, num_output_tokens=0)
    with pytest.raises(AsyncKVError, match="its blocks or its state are gone"):
        side.half._lists(request, [[] for _ in side.half.shape.groups])


def test_without_workers_nothing_is_lent() -> None:
    side = Side(is_connected=False)
    assert side.prefill("a", prompt_of(100)) is None
    settle(side)


def test_a_name_that_cannot_be_sent_lends_nothing() -> None:
    side = Side()
    assert side.prefill("a\ud800", prompt_of(100)) is None
    settle(side)


def test_a_request_without_params_is_none_of_ours() -> None:
    side = Side()
    side.add("a", prompt_of(40), None, 2)
    for _ in range(3):
        assert side.step().orders == []
    assert is_clean(side)


@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer", "kv_both"])
def test_blocks_that_a_step_under_way_may_write_are_not_loaded_into(role: str) -> None:
    prompt, side = prompt_of(100), Side(role=role, asynchronous=True, num_blocks=12)
    side.add("x", prompt_of(100), None, 50)
    first, second = side.scheduler.schedule(), side.scheduler.schedule()
    side.finish(first)
    side.abort("x")  # in the middle of the second step
    side.add("y", prompt, brought(prompt), 2)
    assert [type(order) for order in side.scheduler.schedule().kv_connector_metadata.orders] == [Announce]
    side.finish(second)
    assert num_read(side.step().only(Pull)) == 7


def test_ranks_of_all_stages_are_described_and_memory_that_was_registered_anew_is_told() -> None:
    side = Side()
    side.connect(ranks=[(0, 1), (0, 0), (1, 0), (1, 1)])
    out = side.prefill("a", prompt_of(10))["asynckv"]
    assert (out["tp_size"], out["pp_size"]) == (2, 2)
    assert [(e["pp_stage"], e["tp_rank"]) for e in out["endpoints"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    side.connect(epoch=3)
    assert side.prefill("b", prompt_of(10))["asynckv"]["key"][1] == 3


def test_the_latest_registration_of_any_rank_counts() -> None:
    side = Side()
    side.connector.set_xfer_handshake_metadata_pp_aware(
        {(0, tp): WorkerAddress(side.endpoint(0, tp), epoch) for tp, epoch in enumerate((4, 6, 5))}
    )
    assert side.prefill("a", prompt_of(100))["asynckv"]["key"][1] == 6


def test_another_connectors_address_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="name AsyncKVConnector before it"):
        Side(is_connected=False).connector.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})


# -- the decode engine --------------------------------------------------------------------------------


@SHAPES
def test_a_request_that_brings_params_is_pulled_and_goes_on(groups: tuple[Group, ...]) -> None:
    prompt = prompt_of(100)
    side, params = Side(groups), brought(prompt, groups)
    request = side.add("a", prompt, params, 3)
    pull = side.step().only(Pull)
    assert pull.request_id == "a"
    assert decode_params(pull.params) == decode_params(params["asynckv"])
    assert pull.num_tokens == params["asynckv"]["num_tokens"]
    assert request.kv_transfer_params["do_remote_prefill"] is False
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert side.step().orders == []
    side.step(loaded=["a"])
    assert [side.step().tokens.get("a") for _ in range(3)] == [[7]] * 3
    assert side.step().orders == []
    assert is_clean(side)


@pytest.mark.parametrize("length", [127, 128, 129, 63, 64, 65, 33, 17, 16, 2])
@FORGETFUL
def test_windows_and_states_are_whole_for_the_last_token(groups: tuple[Group, ...], length: int) -> None:
    """Whatever the decode engine's lists ask for, the prefill engine's have: at aligned lengths above all."""
    prompt = prompt_of(length)
    side, params = Side(groups), brought(prompt, groups)
    side.add("a", prompt, params, 3)
    pull = side.step().only(Pull)
    assert pull.num_tokens == length - 1
    for (kind, size, *more), (first, ids), (lent_first, runs) in zip(
        groups, pull.groups, params["asynckv"]["groups"], strict=True
    ):
        lent = [start + i if start >= 0 else None for start, count in runs for i in range(count)]
        assert None not in ids
        assert first >= lent_first
        assert first // size - lent_first // size + len(ids) == len(lent)
        if kind == "window":
            # The last token of the prompt sees so many before it, and all are there.
            assert first <= max(length - more[0], 0)
    # vLLM has these blocks, and no others, where the last token is computed.
    blocks = side.scheduler.kv_cache_manager.get_block_ids("a")
    for (_, ids), listed in zip(pull.groups, blocks, strict=True):
        assert [block for block in listed if block] == ids


def test_holes_are_no_blocks_and_a_state_that_is_gone_is_not_lent() -> None:
    shape = Shape((CacheGroup(0, 16, is_window=True), CacheGroup(1, 16, is_state=True)), 1)
    assert shape.held([[0, 5, 0, 7], [0, 0, 0, 9]], 64) == [(16, [5, None, 7]), (48, [9])]
    assert shape.held([[0, 5, 0, 7], [0, 0, 9, 0]], 64) is None
    assert shape.held([[0, 5, 0, 7], [0, 0, 9]], 64) is None


@pytest.mark.parametrize(
    ("groups", "ahead", "back_off"), [(DENSE, 0, 0), (DENSE, 3, 2), (WINDOW, 0, 1), (WINDOW, 3, 2)]
)
def test_drafts_that_look_ahead_leave_those_tokens_to_the_reader(
    groups: tuple[Group, ...], ahead: int, back_off: int
) -> None:
    side, parallel = Side(groups), SimpleNamespace(decode_context_parallel_size=1)
    config = SimpleNamespace(num_prefill_lookahead_tokens=ahead, speculative_config=None, parallel_config=parallel)
    assert Shape.of(config, side.kv).back_off == back_off


@pytest.mark.parametrize(("given", "ordered"), [(-3, -3), (1 << 70, MAX_INTEGER), (-1 << 70, -MAX_INTEGER)])
def test_any_priority_that_a_client_gives_can_be_ordered(given: int, ordered: int) -> None:
    side, prompt = Side(), prompt_of(100)
    side.add("a", prompt, brought(prompt), given={"priority": given})
    assert side.step().only(Pull).priority == ordered


def test_only_what_the_prefix_cache_lacks_is_read() -> None:
    prompt = prompt_of(100)
    side = Side()
    side.compute("before", prompt[:50], 1)
    side.add("a", prompt, brought(prompt), 1)
    pull = side.step().only(Pull)
    ((first, ids),) = pull.groups
    assert (first, len(ids), pull.num_tokens) == (48, 4, 100)


def test_groups_of_different_block_sizes_begin_each_in_their_own_block() -> None:
    prompt = prompt_of(200)
    side = Side(MIXED)
    side.compute("before", prompt[:100], 1)
    params = brought(prompt, MIXED)
    side.add("a", prompt, params, 1)
    pull = side.step().only(Pull)
    (first, ids), (window_first, window_ids) = pull.groups
    assert (first, len(ids)) == (96, 4)
    # 199 tokens, of which the last 47 are seen by the next.
    assert (window_first, len(window_ids)) == (144, 4)


def test_hybrids_take_the_state_after_the_last_token_whatever_the_prefix_cache_has() -> None:
    prompt = prompt_of(200)
    side = Side(HYBRID)
    side.compute("before", prompt[:100], 1, steps=2)
    side.add("a", prompt, brought(prompt, HYBRID), 3)
    pull = side.step().only(Pull)
    (first, ids), (state_first, states) = pull.groups
    assert (first + 16 * len(ids), len(states), state_first) == (208, 1, 192)
    side.step(loaded=["a"])
    assert [side.step().tokens.get("a") for _ in range(3)] == [[7]] * 3


THREE: tuple[Group, ...] = (("attention", 16), ("window", 16, 64), ("states", 16, "align"))


@pytest.mark.parametrize("evicted", [(1,), (2,), (1, 2)])
def test_what_the_prefix_cache_has_of_attention_alone_is_completed(evicted: tuple[int, ...]) -> None:
    """Under pressure states and windows are gone before the blocks of full attention: the load brings them again."""
    prompt = prompt_of(120)
    side = Side(THREE)
    side.compute("before", prompt[:100], 1, steps=3)
    pool, manager = side.scheduler.kv_cache_manager.block_pool, side.scheduler.kv_cache_manager
    cached = {group: set[int]() for group in range(3)}
    for block in pool.blocks:
        if block.block_hash is not None:
            cached[get_group_id(block.block_hash)].add(block.block_id)
    assert all(cached.values())
    manager.evict_blocks({block for group in evicted for block in cached[group]})
    side.add("a", prompt, brought(prompt, THREE), 3)
    pull = side.step().only(Pull)
    (first, ids), (window_first, window), (state_first, states) = pull.groups
    assert pull.num_tokens == 119
    assert first + 16 * len(ids) == 128
    assert (state_first, len(states)) == (112, 1)
    # The next token sees tokens 56 to 119, and what of them is not cached is read.
    has_window = 1 not in evicted and first > 48
    assert window_first == (first if has_window else 48)
    assert window_first + 16 * len(window) == 128
    assert first == 96
    side.step(loaded=["a"])
    assert [side.step().tokens.get("a") for _ in range(3)] == [[7]] * 3


def test_a_load_is_not_split_and_is_not_counted_as_zero_in_block_aligned_splits() -> None:
    """Chunks of 32 tokens, and 599 tokens come at once; what is left is computed in aligned chunks as ever."""
    prompt = prompt_of(600)
    side, params = Side(HYBRID, max_batched=32), brought(prompt[:300], HYBRID)
    params["asynckv"]["num_tokens"] = 299
    request = side.add("a", prompt, params, 2)
    assert side.step().only(Pull).num_tokens == 299
    side.step(loaded=["a"])
    seen = []
    for _ in range(40):
        told = side.step()
        seen.append(request.num_computed_tokens)
        if "a" in told.reasons:
            break
    assert seen[0] > 299
    assert all(b - a <= 32 for a, b in itertools.pairwise([299, *seen]))
    assert is_clean(side) or (side.step() and is_clean(side))


def test_params_of_a_longer_prompt_are_cut_and_of_a_shorter_one_completed() -> None:
    long, side = prompt_of(600), Side()
    side.add("a", long[:560], brought(long), 1)
    assert side.step().only(Pull).num_tokens == 512  # hashes are of 256 tokens, and the last of 88
    side.step(loaded=["a"])
    side.step()
    other = prompt_of(100)
    request = side.add("b", other, brought(other[:60]), 1)
    assert side.step().only(Pull).num_tokens == 60
    side.step(loaded=["b"])
    assert request.num_computed_tokens == 60
    side.step()
    assert request.is_finished()


@FORGETFUL
def test_params_of_a_longer_prompt_are_of_no_use_to_models_that_forget(groups: tuple[Group, ...]) -> None:
    long, side = prompt_of(100), Side(groups)
    side.add("a", long[:60], brought(long, groups), 1)
    told = side.step()
    assert told.kinds() == [Cancel]
    assert (told.tokens or side.step().tokens) == {"a": [7]}  # hybrids compute it in two steps


def test_log_probabilities_of_a_prompt_are_computed_and_its_blocks_given_back_at_once() -> None:
    prompt, side = prompt_of(100), Side(max_seqs=1)
    side.compute("first", prompt_of(10), 50)
    side.add("a", prompt, brought(prompt), 1, prompt_logprobs=1)
    assert side.step().kinds() == [Cancel]  # while it waits in the queue
    side.abort("first")
    told = side.step()
    assert (told.orders, told.tokens) == ([], {"a": [7]})
    settle(side)


def test_a_full_hit_is_discharged_and_nothing_is_reported() -> None:
    """A hybrid stops at N - 1, which the prefix cache can have whole."""
    prompt = prompt_of(65)
    side = Side(HYBRID)
    side.compute("before", prompt, 2, steps=3)
    side.add("a", prompt, brought(prompt, HYBRID), 1)
    told = side.step()
    assert told.kinds() == [Cancel]
    assert told.tokens == {"a": [7]}
    settle(side)


def test_a_request_that_waits_is_announced_once_and_pulled_when_its_turn_comes() -> None:
    prompt, side = prompt_of(100), Side(max_seqs=1)
    side.compute("first", prompt_of(10), 5)
    params = brought(prompt)
    side.add("a", prompt, params, 1)
    announced = side.step().only(Announce)
    assert announced.request_id == "a"
    assert decode_params(announced.params) == decode_params(params["asynckv"])
    for _ in range(3):
        assert side.step().orders == []
    assert side.step().kinds() == [Pull]


def test_a_request_that_finds_no_blocks_asks_again() -> None:
    prompt, side = prompt_of(100), Side(num_blocks=12)
    side.compute("first", prompt_of(80), 4)
    side.add("a", prompt, brought(prompt), 1)
    kinds = [side.step().kinds() for _ in range(5)]
    assert kinds == [[Announce], [], [], [Pull], []]


def test_a_request_that_waits_for_blocks_for_as_long_as_a_grant_has_room_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before, not more often than each second, not for one that waits for something else, and never after."""
    now = [1000.0]
    monkeypatch.setattr("asynckv.integrations.vllm.scheduler.monotonic", lambda: now[0])
    side = Side(num_blocks=12, max_seqs=2)
    params = side.prefill("lent", prompt_of(96))  # 6 of 11 blocks stay lent
    assert params
    side.add("waits", prompt_of(120), None, 4)  # 8 blocks
    side.add("behind", prompt_of(10), None, 4)

    def orders(at: float) -> list[Any]:
        now[0] = 1000.0 + at
        return list(side.step().orders)

    assert [type(order) for order in orders(0.0)] == [Lend]
    assert [orders(at) for at in (5.0, 9.9)] == [[], []]
    assert orders(10.0) == [Reclaim(3)]
    assert [orders(at) for at in (10.5, 11.0, 11.5)] == [[], [Reclaim(3)], []]
    side.abort("waits")
    assert orders(30.0) == []
    assert not side.half._queued
    side.add("too many", prompt_of(10), None, 4)
    side.add("three", prompt_of(10), None, 4)
    assert [orders(at) for at in (31.0, 60.0)] == [[], []], "there is room, but not for so many at a time"
    assert list(side.half._queued) == ["three"]


def test_a_paused_scheduler_announces_all_the_same() -> None:
    prompt, side = prompt_of(100), Side()
    side.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    side.add("a", prompt, brought(prompt), 1)
    assert not side.is_idle()
    assert side.step().kinds() == [Announce]
    assert side.is_idle()
    side.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert side.step().kinds() == [Pull]


# -- ends, at every stage -----------------------------------------------------------------------------


ABORTED: dict[str, list[Sequence[str]]] = {
    "arrived": [],
    "queued": [()],
    "loading": [()],
    "loaded": [(), "a"],
    "computing": [(), "a", ()],
}
"""Stages of a request, and the loads that the steps until then report."""


@pytest.mark.parametrize("stage", ABORTED)
def test_an_abort_gives_back_what_is_lent_still_in_every_stage(stage: str) -> None:
    prompt, side = prompt_of(100), Side(max_seqs=1)
    if stage == "queued":
        side.compute("first", prompt_of(10), 50)
    side.add("a", prompt, brought(prompt), 5)
    for loaded in ABORTED[stage]:
        side.step(loaded=loaded)
    side.abort("a")
    assert not side.is_idle()
    told = side.step()
    assert told.kinds() == ([Cancel] if stage in ("arrived", "queued", "loading") else [])
    if stage == "loading":
        assert told.orders == [Cancel("a")], "the workers know its params"
        assert side.num_free() < side.free_blocks, "until they report"
        assert not side.is_idle()
        assert side.step().orders == []
        side.step(failed=["a"])
    side.abort("first")
    settle(side)


def test_an_abort_in_the_step_that_reports_asks_for_nothing_wrong() -> None:
    prompt, side = prompt_of(100), Side()
    side.add("a", prompt, brought(prompt), 1)
    side.step()
    out = side.scheduler.schedule()
    side.abort("a")  # while the step runs
    side.finish(out, loaded=["a"])
    assert side.step().orders == [Cancel("a")]  # of a load that is over: the workers have nothing to give up
    assert is_clean(side)


@SHAPES
def test_a_failed_load_fails_its_request_alone(groups: tuple[Group, ...]) -> None:
    prompt, other, side = prompt_of(100), prompt_of(50), Side(groups)
    side.add("a", prompt, brought(prompt, groups), 5)
    side.add("b", other, brought(other, groups), 1)
    side.step()
    told = side.step(failed=["a"], loaded=["b"])
    assert told.reasons == {"a": "error"}
    assert side.step().tokens == {"b": [7]}
    settle(side)


@pytest.mark.parametrize("other", [(), ("b",)], ids=["alone", "with another's load"])
def test_an_error_of_another_cause_while_loading_cancels_and_fails_no_sibling(other: tuple[str, ...]) -> None:
    prompt, short, side = prompt_of(100), prompt_of(50), Side()
    params = brought(prompt)
    side.add("b", short, brought(short))
    side.add("a", prompt, params)
    side.step()
    side.add("sibling", prompt, dict(params))
    side.step()
    side.scheduler.encoder_cache_mismatch_reqs.add("a")
    assert side.step(loaded=other).reasons == {"a": "error"}
    told = side.step(loaded={"b"} - {*other})
    assert told.only(Cancel).request_id == "a"
    side.step(loaded=["a"])
    reasons: dict[str, str] = {}
    while not side.is_idle():
        reasons |= side.step().reasons
    assert reasons["sibling"] == "length"
    assert is_clean(side)


@SHAPES
def test_a_failed_load_is_computed_instead(groups: tuple[Group, ...]) -> None:
    prompt, side = prompt_of(100), Side(groups, policy="recompute")
    request = side.add("a", prompt, brought(prompt, groups), 1)
    assert side.step().kinds() == [Pull]
    side.step(failed=["a"])
    for _ in range(10):
        told = side.step()
        assert told.orders == []
        if "a" in told.reasons:
            break
    assert told.tokens == {"a": [7]}
    assert request.num_preemptions == 0
    settle(side)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["one at a time", "overlapping"])
def test_a_preempted_request_does_not_read_again(asynchronous: bool) -> None:
    prompt, side = prompt_of(100), Side(num_blocks=16, asynchronous=asynchronous)
    side.compute("old", prompt_of(96), 60)
    side.add("a", prompt, brought(prompt), 30)
    told = side.step()
    assert told.kinds() == [Pull]
    side.step(loaded=["a"])
    request = side.scheduler.requests["a"]
    for _ in range(200):
        assert side.step().orders == []
        if request.is_finished():
            break
    assert request.num_preemptions > 0
    assert request.is_finished()


def test_a_request_that_is_preempted_while_others_load_touches_none_of_them() -> None:
    prompt, side = prompt_of(64), Side(num_blocks=20)
    side.compute("old", prompt_of(96), 200)
    side.add("a", prompt, brought(prompt), 1)
    side.step()
    for _ in range(150):
        side.step()
    assert side.half.pulls.get("a").state is State.PULLING
    side.step(loaded=["a"])
    for _ in range(5):
        side.step()
    assert "a" not in side.scheduler.requests


# -- several answers to one prompt --------------------------------------------------------------------


@pytest.mark.parametrize("is_same", [False, True], ids=["equal params", "one dictionary"])
def test_siblings_read_once_and_the_others_wait_for_it(is_same: bool) -> None:
    prompt, side = prompt_of(100), Side()
    params = brought(prompt)
    for name in "abc":
        side.add(name, prompt, params if is_same else json.loads(json.dumps(params)), 2)
    told = side.step()
    assert told.kinds() == [Pull]
    assert told.only(Pull).request_id == "a"
    assert side.step().orders == []
    assert [side.scheduler.requests[name].num_computed_tokens for name in "bc"] == [0, 0]
    side.step(loaded=["a"])
    told = side.step()
    assert told.orders == []
    assert told.tokens == {"a": [7], "b": [7], "c": [7]}
    side.step()
    settle(side)


def test_a_sibling_that_comes_late_does_not_read() -> None:
    prompt, side = prompt_of(100), Side()
    params = brought(prompt)
    side.read("a", prompt, params, 1)
    side.step()
    side.add("b", prompt, {**params, "do_remote_prefill": True}, 1)
    told = side.step()
    assert (told.orders, told.tokens) == ([], {"b": [7]})


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("groups", [DENSE, WINDOW, STATES])
def test_siblings_of_a_failed_load_end_as_it_does(groups: tuple[Group, ...], prefix_caching: bool, policy: str) -> None:
    prompt, side = prompt_of(100), Side(groups, policy=policy, prefix_caching=prefix_caching)
    params = brought(prompt, groups)
    for name in "abcd":
        side.add(name, prompt, dict(params), 3)
    assert side.step().only(Pull).request_id == "a"
    side.abort("d")
    ends: dict[str, str] = {}
    told = side.step(failed=["a"])
    for _ in range(20):
        assert told.orders == []  # what has failed is not given up once more
        ends |= told.reasons
        told = side.step()
    assert ends == dict.fromkeys("abc", "error" if policy == "fail" else "length")
    assert is_clean(side)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_siblings_of_one_that_was_aborted_compute(steps: int) -> None:
    prompt, side = prompt_of(100), Side()
    params = brought(prompt)
    side.add("a", prompt, params, 1)
    side.add("b", prompt, dict(params), 1)
    for _ in range(steps):
        side.step()
    side.abort("a")
    told = side.step(failed=["a"] if steps == 2 else [])
    assert told.kinds() == [Cancel]
    if steps == 1:
        side.step(failed=["a"])
    tokens = told.tokens or side.step().tokens
    assert tokens == {"b": [7]}
    settle(side)


def test_a_sibling_that_leaves_takes_nothing_from_the_one_that_reads() -> None:
    prompt, side = prompt_of(100), Side()
    params = brought(prompt)
    side.add("a", prompt, params, 1)
    side.add("b", prompt, dict(params), 1)
    side.step()
    side.abort("b")
    assert side.step().orders == []
    side.step(loaded=["a"])
    assert side.step().tokens == {"a": [7]}


# -- conversations ------------------------------------------------------------------------------------


@SHAPES
def test_a_turn_goes_to_the_decode_engine_and_back(groups: tuple[Group, ...]) -> None:
    prompt = prompt_of(100)
    prefill, decode = Side(groups, name="prefill"), Side(groups, name="decode")
    params = json.loads(json.dumps(prefill.prefill("p1", prompt)))
    request = decode.add("d1", prompt, {**params, "do_remote_decode": True}, 20)
    assert request.num_prompt_tokens == 100
    decode.step()
    decode.step(loaded=["d1"])
    told = decode.ended("d1")
    back = json.loads(json.dumps(told.params["d1"]))
    assert back["asynckv"]["num_tokens"] == 119
    assert back["asynckv"]["lease_s"] == 480
    assert decode.step().kinds() == [Lend]
    # The next turn begins with all of it.
    longer = [*prompt, *[7] * 20, *prompt_of(30)]
    prefill.add("p2", longer, {**back, "do_remote_decode": True}, 1)
    pull = prefill.step().only(Pull)
    assert pull.num_tokens == 119
    assert pull.groups[0][0] in (0, 96)  # what this engine still has of the first turn is not read again
    prefill.step(loaded=["p2"])
    told = prefill.ended("p2")
    assert told.params["p2"]["asynckv"]["num_tokens"] in (149, 150)
    assert prefill.step().kinds() == [Lend]


# -- what clients send --------------------------------------------------------------------------------


def test_params_that_are_no_dictionary_are_taken_from_vllm_before_it_trips() -> None:
    side = Side()
    for given in (1, "x", [1], True, 0.5, [{"do_remote_prefill": True}]):
        request = side.add(f"r{next(numbers)}", prompt_of(5), given, 1)
        assert request.kv_transfer_params is None
    side.step()
    settle(side)
