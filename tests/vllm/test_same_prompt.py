"""KV is read for the prompt that it was computed of, and for no other: what the scheduler's half compares."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from asynckv.core.types import decode_params
from asynckv.embed.orders import Announce, Cancel, Lend, Pull
from asynckv.integrations.vllm.chain import MAX_CHAIN, chain_of, hash_tokens_of
from asynckv.integrations.vllm.scheduler import CAUSES
from tests.vllm.schedulers import DENSE, HYBRID, STATES, WINDOW, Group, Side
from tests.vllm.test_follow import _nothing_is_taken_by_vllm, counted  # noqa: F401
from tests.vllm.test_scheduler import FORGETFUL, SHAPES, brought, is_clean, prompt_of, settle

Given = Mapping[str, Any]


def adapter(name: str = "adapter", number: int = 1, path: str = "/adapters/1") -> Given:
    return {"lora_request": LoRARequest(name, number, path)}


@SHAPES
def test_params_of_another_prompt_of_equal_length_are_not_read(groups: tuple[Group, ...]) -> None:
    side, mine, other = Side(groups), prompt_of(128), prompt_of(128)
    side.add("a", mine, brought(other, groups), 1)
    told = side.step()
    assert told.kinds() == [Cancel]
    assert (told.tokens or side.step().tokens) == {"a": [7]}
    settle(side)


@FORGETFUL
@pytest.mark.parametrize(("length", "place"), [(128, 0), (128, 63), (128, 126), (600, 256), (600, 598)])
def test_models_that_forget_read_all_of_a_prompt_or_nothing(groups: tuple[Group, ...], length: int, place: int) -> None:
    side, prompt = Side(groups), prompt_of(length)
    other = [*prompt[:place], prompt[place] + 1, *prompt[place + 1 :]]
    side.add("a", prompt, brought(other, groups), 1)
    assert side.step().kinds() == [Cancel]


def test_the_last_token_of_a_prompt_that_forgets_is_nobodys() -> None:
    """The prefill engine has not computed it, and the decode engine computes it."""
    side, prompt = Side(WINDOW), prompt_of(128)
    side.add("a", prompt, brought([*prompt[:-1], prompt[-1] + 1], WINDOW), 1)
    assert side.step().only(Pull).num_tokens == 127


@pytest.mark.parametrize(("place", "read"), [(0, 0), (255, 0), (256, 256), (511, 256), (599, 512)])
def test_what_two_prompts_begin_with_is_read_in_whole_hashes(place: int, read: int) -> None:
    side, prompt = Side(), prompt_of(600)
    other = [*prompt[:place], prompt[place] + 1, *prompt[place + 1 :]]
    side.add("a", prompt, brought(other), 1)
    told = side.step()
    assert [order.num_tokens for order in told.orders if isinstance(order, Pull)] == ([read] if read else [])
    assert counted(side, "computed_locally") == {"other_end" if read else "other_prompt": 1}


def test_with_drafts_a_prompt_that_ends_otherwise_is_not_read() -> None:
    side, prompt = Side(drafts=2), prompt_of(600)
    side.add("a", prompt, brought([*prompt[:-1], prompt[-1] + 1]), 1)
    assert side.step().kinds() == [Cancel]
    again = prompt_of(600)
    side.add("b", again, brought(again), 1)
    assert side.step().only(Pull).num_tokens == 600


@pytest.mark.parametrize(
    ("there", "here", "is_read"),
    [
        (adapter(), adapter(number=9), True),
        (adapter(), {}, False),
        ({}, adapter(), False),
        (adapter(), adapter(name="other"), False),
        (adapter(), adapter(path="/adapters/2"), False),
        ({"cache_salt": "tenant"}, {"cache_salt": "tenant"}, True),
        ({"cache_salt": "tenant"}, {}, False),
        ({}, {"cache_salt": "tenant"}, False),
        ({"cache_salt": "tenant"}, {"cache_salt": "other"}, False),
        ({**adapter(), "cache_salt": "tenant"}, {**adapter(), "cache_salt": "tenant"}, True),
    ],
)
def test_adapters_and_salts_are_compared(there: Given, here: Given, is_read: bool) -> None:
    side, prompt = Side(), prompt_of(100)
    side.add("a", prompt, brought(prompt, given=there), 1, here)
    assert side.step().kinds() == [Pull if is_read else Cancel]


def embedded(seed: int, dtype: torch.dtype = torch.float32) -> Given:
    return {"prompt_embeds": torch.randn(300, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)}


def changed(row: int) -> Given:
    embeds = embedded(1)["prompt_embeds"].clone()
    embeds[row, 3] += 1.0
    return {"prompt_embeds": embeds}


@pytest.mark.parametrize(
    ("here", "read"),
    [(embedded(1), 300), (embedded(2), 0), (embedded(1, torch.bfloat16), 0), (changed(0), 0), (changed(290), 256)],
)
def test_prompts_of_embeddings_are_compared_by_their_bytes(here: Given, read: int) -> None:
    params = json.loads(json.dumps(Side(name="prefill").prefill("p", None, given=embedded(1))))
    side = Side()
    side.add("a", None, params, 1, here)
    pulls = [order.num_tokens for order in side.step().orders if isinstance(order, Pull)]
    assert pulls == ([read] if read else [])


def of_images(*images: tuple[int, str], kind: str = "image", length: int = 20, **fields: Any) -> Request:
    features = [
        MultiModalFeatureSpec(None, kind, identifier, PlaceholderRange(offset=place, length=length))
        for place, identifier in images
    ]
    return Request("r", list(range(600)), SamplingParams(max_tokens=1), None, mm_features=features, **fields)


def same(one: Request, other: Request) -> int:
    """How many hashes of 256 tokens two prompts begin with."""
    chains = zip(chain_of(one, 600, 256), chain_of(other, 600, 256), strict=True)
    return sum(a == b for a, b in chains)


def test_images_are_compared_from_their_first_token_on() -> None:
    one = of_images((10, "x"), (400, "y"))
    assert same(one, of_images((10, "x"), (400, "y"))) == 3
    assert same(one, of_images((10, "z"), (400, "y"))) == 0
    assert same(one, of_images((10, "x"), (400, "z"))) == 1
    assert same(one, of_images((10, "x"), (401, "y"))) == 1
    assert same(one, of_images((10, "x"))) == 1
    assert same(one, of_images((10, "y"), (400, "x"))) == 0
    assert same(one, of_images((10, "x"), (400, "y"), length=21)) == 0
    assert same(one, of_images((10, "x"), (400, "y"), kind="video")) == 0


def test_embeddings_among_tokens_are_told_from_tokens() -> None:
    mask = [True] * 600
    mixed = {"prompt_embeds": torch.zeros(600, 4)}
    one = Request("r", [0] * 600, SamplingParams(max_tokens=1), None, prompt_is_token_ids=mask, **mixed)
    other = Request("r", [0] * 600, SamplingParams(max_tokens=1), None, prompt_is_token_ids=[*mask[1:], False], **mixed)
    assert same(one, one) == 3
    assert same(one, other) == 2


@SHAPES
def test_the_next_turn_is_compared_with_all_that_was_said(groups: tuple[Group, ...]) -> None:
    prompt, decode = prompt_of(100), Side(groups, name="decode")
    decode.read("d", prompt, {**brought(prompt, groups), "do_remote_decode": True}, 20)
    told = decode.ended("d")
    for said, kind in (([7] * 20, Pull), ([7] * 18 + [8, 7], Cancel)):
        back = json.loads(json.dumps(told.params["d"]))
        side = Side(groups)
        side.add("next", [*prompt, *said, *prompt_of(30)], back, 1)
        assert side.step().kinds() == [kind]


def test_params_without_hashes_are_read_only_where_that_is_allowed() -> None:
    prompt = prompt_of(100)
    params = brought(prompt)
    del params["asynckv"]["hashes"], params["asynckv"]["hash_tokens"]
    side = Side()
    side.add("a", prompt, json.loads(json.dumps(params)), 1)
    assert side.step().kinds() == [Cancel]
    assert counted(side, "computed_locally") == {"no_hashes": 1}
    trusting = Side(extra={"allow_unhashed": True})
    trusting.add("a", prompt, params, 1)
    assert trusting.step().only(Pull).num_tokens == 100


def test_a_chain_that_a_client_made_long_is_not_computed() -> None:
    side, prompt = Side(), prompt_of(3000)
    params = brought(prompt)
    for every in (0, 1, 11):
        params["asynckv"] |= {"hashes": ["x"] * 3000, "hash_tokens": every}
        params["asynckv"]["key"][3] = f"{every:032}"
        side.add(f"r{every}", prompt, json.loads(json.dumps(params)), 1)
    assert counted(side, "computed_locally") == {"other_prompt": 3}


def test_chains_of_long_prompts_are_short() -> None:
    request = Request("r", list(range(131_072)), SamplingParams(max_tokens=1), None)
    for num_tokens, number in ((1_000, 4), (8_000, 32), (65_536, 256), (65_537, 129), (131_072, 256)):
        chain = chain_of(request, num_tokens, hash_tokens_of(num_tokens))
        assert len(chain) == number <= MAX_CHAIN
    assert len(json.dumps(chain)) < 10_000
    began = time.process_time()
    chain_of(request, 131_072, 512)
    assert time.process_time() - began < 0.1  # about 2 ms


def test_each_cause_is_logged_once_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    side = Side()
    for number in range(5):
        side.add(f"r{number}", prompt_of(50), brought(prompt_of(50)), 1)
        side.add(f"junk{number}", prompt_of(50), {"do_remote_prefill": True, "asynckv": {"x": 1}}, 1)
    for text in ("another prompt", "not understood"):
        (found,) = [record for record in caplog.records if text in record.getMessage()]
        assert "Further requests are only counted" in found.getMessage()
    stats = side.half.tally.take(at_once=True)
    assert stats is not None
    assert stats.data["computed_locally"] == {"other_prompt": 5, "malformed": 5}
    assert stats.reduce()["Num prompts computed locally"] == 10
    assert side.half.tally.take(at_once=True) is None


def check_counted(side: Side, cause: str) -> None:
    """The one request of this side is computed, and counted with its cause."""
    for _ in range(10):
        side.step()
    assert counted(side, "computed_locally") == {cause: 1}
    assert is_clean(side)


@pytest.mark.parametrize(
    ("cause", "params"),
    [
        ("no_params", {"do_remote_prefill": True}),
        ("no_params", {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [[1]]}),
        ("malformed", {"do_remote_prefill": True, "asynckv": {"key": 5}}),
        ("malformed", "do_remote_prefill"),
    ],
)
def test_params_that_are_none_of_ours_are_counted(cause: str, params: Any) -> None:
    side = Side()
    side.add("a", prompt_of(50), params, 1)
    check_counted(side, cause)


@FORGETFUL
def test_what_reaches_too_far_for_a_model_that_forgets_is_counted(groups: tuple[Group, ...]) -> None:
    """The engine that made it has not left the last token to this one, as with a model of attention alone."""
    side, prompt = Side(groups), prompt_of(100)
    decode = Side(groups, name="decode")
    decode.read("d", prompt, {**brought(prompt, groups), "do_remote_decode": True}, 20)
    told = decode.ended("d")
    whole = json.loads(json.dumps(told.params["d"]))
    side.add("a", [*prompt, *[7] * 19], whole, 1)
    check_counted(side, "too_far")


def test_params_that_were_used_up_are_counted() -> None:
    side, prompt = Side(), prompt_of(100)
    params = brought(prompt)
    side.read("a", prompt, params, 1)
    side.add("b", prompt, dict(params), 1)
    check_counted(side, "spent")


def test_a_prompt_of_which_log_probabilities_are_asked_for_is_counted() -> None:
    side, prompt = Side(), prompt_of(100)
    side.add("a", prompt, brought(prompt), 1, prompt_logprobs=1)
    check_counted(side, "prompt_logprobs")


def test_a_prompt_in_an_engine_that_shares_prefills_is_counted() -> None:
    side, prompt = Side(role="kv_producer", pcp=2), prompt_of(100)
    side.add("a", prompt, brought(prompt), 1)
    check_counted(side, "prefill_only")
    assert side.prefill("b", prompt)["do_remote_prefill"]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_completions_that_the_prefix_cache_does_not_serve_are_counted(prefix_caching: bool) -> None:
    side, prompt = Side(prefix_caching=prefix_caching), prompt_of(100)
    params = brought(prompt)
    for name in "abc":
        side.add(name, prompt, dict(params), 1)
    side.step()
    side.step(loaded=["a"])
    for _ in range(5):
        side.step()
    assert counted(side, "computed_locally") == ({} if prefix_caching else {"sibling": 2})
    assert is_clean(side)


def test_what_cannot_be_lent_is_counted_where_it_was_computed() -> None:
    side = Side(is_connected=False)
    assert side.prefill("a", prompt_of(100)) is None
    check_counted(side, "not_lent")


def test_every_cause_has_its_sentence_and_its_row_in_the_documents() -> None:
    page = Path("docs/vllm.md").read_text()
    assert all(f"`{cause}`" in page for cause in CAUSES)


def test_a_request_that_waits_for_another_is_compared_as_well() -> None:
    """The first reads and the second has another prompt: it neither reads nor ends what the first reads."""
    side, prompt = Side(max_seqs=1), prompt_of(100)
    side.compute("first", prompt_of(10), 50)
    params = brought(prompt)
    side.add("a", prompt, params, 1)
    side.add("b", prompt_of(100), json.loads(json.dumps(params)), 1)
    assert side.step().kinds() == [Announce]
    side.abort("first")
    assert side.step().only(Pull).request_id == "a"


# -- what is lent, with drafts and overlapping steps ------------------------------------------------------------------


@pytest.mark.parametrize("groups", [HYBRID, STATES])
@pytest.mark.parametrize("drafts", [None, 2])
@pytest.mark.parametrize("most", [2, 4])
def test_a_state_after_guessed_tokens_is_not_lent(groups: tuple[Group, ...], drafts: int | None, most: int) -> None:
    """Only the workers know which of the states that were kept of all guesses is the one after the last token."""
    side, prompt = Side(groups, drafts=drafts), prompt_of(100)
    side.read("a", prompt, {**brought(prompt, groups), "do_remote_decode": True}, most)
    told = side.ended("a")
    assert ("a" in told.params) is (drafts is None)
    assert side.step().kinds() == ([Lend] if drafts is None else [])


@pytest.mark.parametrize("groups", [HYBRID, STATES])
def test_a_state_after_the_first_token_is_lent_with_drafts_as_well(groups: tuple[Group, ...]) -> None:
    side = Side(groups, drafts=2)
    assert side.prefill("a", prompt_of(100))["asynckv"]["num_tokens"] == 99


@pytest.mark.parametrize("groups", [DENSE, WINDOW])
def test_tokens_of_a_step_under_way_are_not_lent(groups: tuple[Group, ...]) -> None:
    """The request stops while the next step computes one token more: nobody knows yet when its KV is written."""
    side, prompt = Side(groups, asynchronous=True), prompt_of(100)
    params = {**brought(prompt, groups), "do_remote_decode": True}
    side.read("a", prompt, params, 20, stop_token_ids=[9])
    first, second = side.scheduler.schedule(), side.scheduler.schedule()
    request = side.scheduler.requests["a"]
    told = side.finish(first, token=9)
    assert told.reasons == {"a": "stop"}
    assert request.num_in_flight_tokens == 1
    lent = decode_params(told.params["a"]["asynckv"])
    assert (request.num_tokens, lent.num_tokens) == (101, 100)
    side.finish(second)


def test_states_that_a_step_under_way_changes_are_not_lent() -> None:
    side, prompt = Side(HYBRID, asynchronous=True), prompt_of(100)
    side.read("a", prompt, {**brought(prompt, HYBRID), "do_remote_decode": True}, 20, stop_token_ids=[9])
    first, second = side.scheduler.schedule(), side.scheduler.schedule()
    told = side.finish(first, token=9)
    assert told.reasons == {"a": "stop"}
    assert "a" not in told.params
    side.finish(second)
