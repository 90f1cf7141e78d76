"""Prompts that an engine computes by itself are counted and told, so that a router's mistake does not stay silent."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.v1.request import Request

from asynckv.embed.orders import Cancel, Lend, Pull
from asynckv.integrations.vllm.scheduler import NOT_FOR_NIXL
from asynckv.integrations.vllm.stats import SchedulerTally
from asynckv.told import LONG_S, MANY_PROMPTS, PromptsCounted
from tests.vllm.schedulers import Side
from tests.vllm.test_scheduler import brought, is_clean, prompt_of
from tests.vllm.test_stats import Clock

ASKED = {"do_remote_decode": True}


class Decode(Side):
    """A decode engine's scheduler with a clock that a test moves, and what was counted so far."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.clock = Clock()
        self.half.tally = SchedulerTally(self.clock)
        self.count = 0
        self.total = PromptsCounted()

    def come(self, params: Any, number: int = 1, **fields: Any) -> None:
        """Requests arrive, half a second after one another."""
        for _ in range(number):
            self.count += 1
            self.clock.now += 0.5
            self.add(f"r{self.count}", prompt_of(20), params, **fields)

    def counts(self) -> dict[str, dict[str, int]]:
        """What goes to vLLM's Prometheus endpoint with the next step."""
        out = self.scheduler.schedule()
        self.total = getattr(out.kv_connector_metadata, "prompts", None) or self.total
        stats = self.connector.get_kv_connector_stats()
        self.finish(out)
        data: dict[str, dict[str, int]] = {} if stats is None else stats.data
        return {name: data.get(name, {}) for name in ("prompts", "computed_locally")}


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    logger, lines = logging.getLogger("vllm.asynckv"), list[str]()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger.addHandler(handler := Handler(logging.WARNING))
    yield lines
    logger.removeHandler(handler)


# -- without params --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [None, {}, {"do_remote_prefill": False}, {"do_remote_prefill": None, "asynckv": None}]
)
def test_many_prompts_without_params_are_counted_and_warned_of_once(given: Any, warnings: list[str]) -> None:
    side = Decode(max_seqs=256)
    side.come(given, MANY_PROMPTS)
    assert warnings == []  # there were enough of them, but within 25 s
    side.come(given, 200 - MANY_PROMPTS)
    assert side.counts()["prompts"] == {"without_params": 200}
    assert (side.total.without_params, side.total.in_a_row, side.total.in_a_row_s) == (200, 200, 99.5)
    (said,) = warnings
    assert "all 61 prompts of the last 30 s came without params" in said
    assert "the router does not pass on the kv_transfer_params" in said


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"remote_engine_id": "x", "remote_port": 1},
            "they are those of vLLM's NixlConnector (remote_engine_id, remote_port)",
        ),
        (NOT_FOR_NIXL, "the router passed on only NixlConnector's fields"),
        ({}, "the other engine has another connector"),
    ],
)
def test_params_of_nixl_connector_are_called_that(fields: dict[str, Any], says: str, warnings: list[str]) -> None:
    side = Decode()
    side.come({"do_remote_prefill": True, **fields})
    assert says in "".join(warnings)
    assert side.counts()["computed_locally"] == {"no_params": 1}


def test_few_prompts_over_a_long_time_are_no_reason_to_warn(warnings: list[str]) -> None:
    side = Decode(max_seqs=256)
    for _ in range(MANY_PROMPTS - 1):
        side.clock.now += LONG_S
        side.come(None)
    assert warnings == []
    side.come(None)
    assert len(warnings) == 1


def test_after_a_prompt_with_params_the_count_begins_anew(warnings: list[str]) -> None:
    side = Decode(max_seqs=256)
    side.come(None, 60)
    side.come(brought(prompt_of(20)))
    del warnings[:]  # its prompt is another one
    side.come(None, 60)
    assert warnings == []
    side.counts()
    assert (side.total.with_params, side.total.without_params, side.total.in_a_row) == (1, 120, 60)
    side.come(None, 2)
    assert len(warnings) == 1
    side.come(brought(prompt_of(20)))
    side.come(None, 62)
    assert len(warnings) == 2


def test_requests_that_no_prefill_engine_could_have_computed_do_not_count(warnings: list[str]) -> None:
    side = Decode(max_seqs=256)
    for _ in range(60):
        side.come(ASKED)
        side.come({**ASKED, "do_remote_prefill": False})
        side.come(None, prompt_logprobs=1)
        side.count += 1
        pooling = Request(f"r{side.count}", prompt_of(20), None, PoolingParams(task="embed"))
        side.scheduler.add_request(pooling)
        side.come(None, given={"abort_immediately": True})
        side.abort(f"r{side.count}")
        side.abort(pooling.request_id)
    assert warnings == []
    assert side.counts()["prompts"] == {}
    side.come({**ASKED, **brought(prompt_of(20)), "do_remote_decode": True})
    assert side.counts()["prompts"] == {"with_params": 1}  # it reads and is lent


def test_an_engine_that_serves_both_kinds_warns_of_nothing(warnings: list[str]) -> None:
    side = Decode(max_seqs=256)
    for i in range(120):
        prompt = prompt_of(20)
        side.clock.now += 1.0
        side.add(f"b{i}", prompt, None if i % 30 == 7 else brought(prompt))
    assert warnings == []
    assert side.counts()["prompts"] == {"with_params": 116, "without_params": 4}


# -- with params that are not read -----------------------------------------------------------------


def test_counts_of_a_burst_are_told_at_once_although_nothing_follows(warnings: list[str]) -> None:
    side = Decode()
    side.come({"do_remote_prefill": True})
    told = [side.counts()]
    side.come({"do_remote_prefill": True}, 29)
    side.clock.now -= 14.5  # all within one second
    told.append(side.counts())
    assert [x["computed_locally"] for x in told] == [{"no_params": 1}, {"no_params": 29}]
    assert side.total.computed_locally == {"no_params": 30}
    assert (side.total.with_params, len(warnings)) == (30, 1)
    for _ in range(3):
        side.step()
    assert is_clean(side)


@pytest.mark.parametrize("flag", [True, "true", 1, "false", [0], 0.5])
def test_params_are_read_if_vllms_connectors_would_read_them(flag: Any, warnings: list[str]) -> None:
    prompt, side = prompt_of(100), Decode()
    request = side.add("a", prompt, brought(prompt) | {"do_remote_prefill": flag}, 2)
    assert side.step().only(Pull).request_id == "a"
    assert request.kv_transfer_params["do_remote_prefill"] is False
    side.step(loaded=["a"])
    assert warnings == []


@pytest.mark.parametrize("flag", [None, "missing", 0, "", [], {}])
def test_valid_params_that_nothing_asks_to_read_are_told_and_give_their_loan_back(
    flag: Any, warnings: list[str]
) -> None:
    prompt, side = prompt_of(100), Decode()
    params = brought(prompt)
    if flag == "missing":
        del params["do_remote_prefill"]
    else:
        params["do_remote_prefill"] = flag
    side.add("a", prompt, params, 2)
    told = side.step()
    assert told.only(Cancel).params["request_id"] == "at-prefill"
    assert told.kinds() == [Cancel]
    (said,) = warnings
    assert "do_remote_prefill beside it is missing" in said
    assert "not_asked" in said
    for _ in range(3):
        side.step()
    assert is_clean(side)


def test_params_that_are_not_asked_for_are_counted() -> None:
    prompt, side = prompt_of(100), Decode()
    side.add("a", prompt, {"asynckv": brought(prompt)["asynckv"]})
    assert side.counts() == {"prompts": {"with_params": 1}, "computed_locally": {"not_asked": 1}}


def test_false_says_that_nothing_is_to_be_read(warnings: list[str]) -> None:
    prompt, side = prompt_of(100), Decode()
    side.add("a", prompt, brought(prompt) | {"do_remote_prefill": False}, 2)
    assert side.counts()["computed_locally"] == {}
    assert [side.step().orders for _ in range(3)] == [[]] * 3
    assert warnings == []


@pytest.mark.parametrize("flag", [1, "true"])
def test_a_prompt_is_lent_if_vllms_connectors_would_lend_it(flag: Any) -> None:
    side = Decode()
    side.add("a", prompt_of(100), {"do_remote_decode": flag})
    params = side.step().params["a"]
    assert side.step().only(Lend).params == params["asynckv"]


# -- requests that only give a loan back -----------------------------------------------------------


def test_a_router_gives_a_loan_back_without_a_count_or_a_warning(warnings: list[str]) -> None:
    side, params = Decode(), brought(prompt_of(100))
    side.add("a", [0], params | {"do_remote_prefill": None, "give_back": True}, 1)
    assert side.step().only(Cancel).params["request_id"] == "at-prefill"
    assert side.counts() == {"prompts": {}, "computed_locally": {}}
    assert warnings == []


@pytest.mark.parametrize("flag", [True, "true", None])
@pytest.mark.parametrize("is_paused", [False, True], ids=["rejected", "paused"])
def test_a_request_that_only_gives_a_loan_back_is_no_prompt(flag: Any, is_paused: bool, warnings: list[str]) -> None:
    """vLLM makes one with the prompt `[0]` if it rejects a request, and with the whole prompt while it is paused."""
    side, prompt = Decode(), prompt_of(100)
    params = brought(prompt) | {"do_remote_prefill": flag}
    side.add("a", prompt if is_paused else [0], params, given={"abort_immediately": True})
    side.abort("a")
    told = side.step()
    assert told.kinds() == [Cancel]
    assert told.only(Cancel).params["request_id"] == "at-prefill"
    assert warnings == []
    assert side.counts() == {"prompts": {}, "computed_locally": {}}
    assert is_clean(side)
    side.add("b", prompt_of(100), brought(prompt))
    assert "other_prompt" in warnings[0]
    assert side.counts()["computed_locally"] == {"other_prompt": 1}


@pytest.mark.parametrize("junk", ["junk", {"do_remote_prefill": True}, {"do_remote_prefill": True, "asynckv": 3}])
def test_a_marker_with_junk_params_changes_nothing(junk: Any, warnings: list[str]) -> None:
    side = Decode()
    side.add("a", [0], junk, given={"abort_immediately": True})
    side.abort("a")
    assert side.step().orders == []
    assert warnings == []
    assert side.counts() == {"prompts": {}, "computed_locally": {}}
    assert is_clean(side)


def test_junk_of_a_client_does_not_hide_that_the_router_passes_no_params(warnings: list[str]) -> None:
    side = Decode()
    for i in range(60):
        side.come(None)
        side.come(("junk", {"asynckv": 5}, [])[i % 3])
    assert len([x for x in warnings if "came without params" in x]) == 1


def test_a_prefill_engine_with_canaries_is_not_told_that_its_router_is_wrong(warnings: list[str]) -> None:
    side = Decode()
    for _ in range(120):
        side.come(None)
        side.come(ASKED)
    assert warnings == []


# -- adapters that are loaded again ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("again", "is_warned"),
    [
        (LoRARequest("sql", 1, "/adapters/sql", load_inplace=True), True),
        (LoRARequest("sql", 2, "/adapters/sql"), True),  # unloaded, and loaded as another one
        (LoRARequest("sql", 1, "/adapters/sql"), False),
        (LoRARequest("sql", 1, "/adapters/sql-2"), False),  # the path tells both apart
    ],
)
@pytest.mark.parametrize("params", [None, ASKED], ids=["decode", "prefill"])
def test_an_adapter_that_is_loaded_again_is_warned_of_once(
    again: Any, is_warned: bool, params: Any, warnings: list[str]
) -> None:
    side = Decode()
    side.come(params, 2, given={"lora_request": LoRARequest("sql", 1, "/adapters/sql")})
    assert warnings == []
    side.come(params, 3, given={"lora_request": again})
    assert len(warnings) == is_warned
    if is_warned:
        assert "adapter ('sql', '/adapters/sql') was loaded again" in warnings[0]
        assert "load them from a new path" in warnings[0]
