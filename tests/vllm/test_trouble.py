"""What goes wrong: engines that die and come back, requests that wait too long, params that are junk, sleep."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.vllm.engines import Reply, Server, continued
from tests.vllm.pairs import ASKED, Pair, settle
from tests.vllm.setups import Connector, Setup
from tests.vllm.test_departures import unlent
from tests.vllm.versions import HAS_SLEEP
from tests.vllm.zoo import MODELS

SHORT = {
    "lease": {"lease_s": 2.0, "parked_s": 4.0},
    "turn_lease_s": 2.0,
    "pull": {"timeout_s": 5.0, "release_timeout_s": 3.0, "gone_s": 3.0},
}
"""Options with which nobody has to wait long for what ends by itself."""


def start(server: Server, connector: Connector, name: str = "dense", tp: int = 1, **fields: Any) -> Pair:
    ours = replace(connector, extra={**connector.extra, **SHORT}) if connector.name == "AsyncKVConnector" else connector
    return Pair.start(server, replace(Setup("prefill", MODELS[name], ours, tp=tp), **fields))


# -- engines that die -------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("name", ["dense", "mamba2-align"])
def test_the_prefill_engine_dies_while_its_blocks_are_awaited(
    server: Server, connector: Connector, name: str, policy: Any, tp: int
) -> None:
    pair = start(server, connector, name, tp, policy=policy)
    params = unlent(pair, tokens := pair.prompt(100))
    reply = pair.ask(tokens, params)
    pair.decode.until(lambda state: "WAITING_FOR_REMOTE_KVS" in state["requests"].values())
    pair.prefill.kill()
    pair.decode.finish(reply)
    judge(policy, reply, tokens)
    pair.settle()


@pytest.mark.parametrize("comes_back", [False, True])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_prefill_engine_is_gone_before_a_reader_asks_and_may_come_back_under_its_name(
    server: Server, connector: Connector, policy: Any, comes_back: bool
) -> None:
    pair = start(server, connector, policy=policy)
    tokens = pair.prompt(100)
    if comes_back:
        pair.generate(pair.prompt(50))
    (params,) = pair.prefilled(tokens)
    pair.prefill.kill()
    if comes_back:
        (pair.prefill,) = server.start(pair.prefill.setup)
        # Its first blocks hold something else by now.
        pair.generate(pair.prompt(100))
    reply = pair.ask(tokens, params)
    pair.decode.finish(reply)
    judge(policy, reply, tokens)
    if comes_back:
        pair.generate(pair.prompt(100))
    pair.settle()


def judge(policy: str, reply: Reply, tokens: list[int]) -> None:
    """A request whose blocks did not come ends as the user has chosen."""
    if policy == "fail":
        assert reply.reason == "error"
        assert reply.tokens == []
    else:
        assert reply.reason == "length"
        assert reply.tokens == continued(tokens, 6)


@pytest.mark.parametrize("is_announced", [True, False])
def test_the_decode_engine_dies_and_blocks_come_back(server: Server, connector: Connector, is_announced: bool) -> None:
    pair = start(server, connector)
    params = unlent(pair, tokens := pair.prompt(100))
    if is_announced:
        pair.ask(tokens, params)
        pair.decode.until(lambda state: "WAITING_FOR_REMOTE_KVS" in state["requests"].values())
    pair.decode.kill()
    pair.prefill.ask("go")
    settle(pair.prefill, 60.0)


# -- waiting ----------------------------------------------------------------------------------------


def test_blocks_that_nobody_asks_for_come_back_when_the_lease_ends(server: Server, connector: Connector) -> None:
    pair = start(server, connector)
    pair.prefilled(*(pair.prompt(100) for _ in range(4)))
    pair.settle(60.0)


def test_a_request_that_is_queued_for_longer_than_its_lease_is_still_read(server: Server, connector: Connector) -> None:
    # Two requests at a time, and the first two take very long: what waits behind them outlives its lease of 2 s.
    pair = start(server, connector, max_num_seqs=2, num_blocks=200, max_model_len=4096)
    slow = [pair.ask(pair.prompt(30), None, 4000) for _ in range(2)]
    tokens = pair.prompt(100)
    (params,) = pair.prefilled(tokens)
    queued = pair.ask(tokens, params)
    began = pair.decode.ask("clock")
    pair.decode.until(lambda state: pair.decode.ask("clock") - began > 6.0)
    pair.decode.ask("abort", ["d-1", "d-2"])
    pair.decode.finish(queued)
    assert slow[0].reason != "error"
    assert queued.tokens == continued(tokens, 6)
    if connector.name == "AsyncKVConnector":
        (look,) = pair.decode.ask("look")
        assert look["counters"]["bytes.read"] > 0, look["counters"]
    pair.settle()


def behind_a_standstill(server: Server, connector: Connector, *, reads_before: bool) -> float:
    """A decode engine stands still and keeps all blocks; return the seconds for which another waits for some."""
    one = Setup("prefill", MODELS["dense"], connector, num_blocks=40, max_model_len=512, policy="recompute")
    prefill, held, well = server.start(
        one, replace(one, name="held", max_num_seqs=1, num_blocks=128), replace(one, name="well")
    )
    pair, other = Pair(prefill, held), Pair(prefill, well, seed=1)
    other.count = 100  # the prefill engine knows requests of both by name
    if reads_before:
        (params,) = other.prefilled(tokens := other.prompt(100))
        well.finish(other.ask(tokens, params))
        settle(prefill)
    # One request runs, four are queued behind it and announced: their leases are renewed without a step.
    prompts = [pair.prompt(280) for _ in range(4)]
    held.ask("hold")
    running = pair.ask(first := pair.prompt(30), None, 40)
    held.ask("step", 2)
    queued = [pair.ask(tokens, params) for tokens, params in zip(prompts, pair.prefilled(*prompts), strict=True)]
    assert held.ask("step", 1) == 5
    assert prefill.ask("state")["free"] == 3
    began = time.monotonic()
    (params,) = other.prefilled(tokens := other.prompt(100))
    waited_s = time.monotonic() - began
    reply = other.ask(tokens, params)
    well.finish(reply)
    assert reply.tokens == continued(tokens, 6)
    held.ask("go")
    held.finish(running, *queued)
    assert running.tokens == continued(first, 40)
    for tokens, each in zip(prompts, queued, strict=True):
        assert each.tokens == continued(tokens, 6)
    for engine in (prefill, held, well):
        settle(engine)
    return waited_s


def test_a_decode_engine_that_stands_still_keeps_no_blocks_from_another(server: Server, connector: Connector) -> None:
    lease_s = 30.0  # NixlConnector's own
    if connector.name == "AsyncKVConnector":
        lease_s = 6.0
        connector = replace(connector, extra={**connector.extra, "lease": {"lease_s": lease_s}})
    assert lease_s / 2 < behind_a_standstill(server, connector, reads_before=False) < lease_s + 3.0


def test_a_decode_engine_that_has_read_lately_waits_for_no_other_that_keeps_all_blocks(server: Server) -> None:
    """The prefill engine has no room, so the one that holds most gives its oldest back, long before it stands still."""
    connector = Connector(extra={"lease": {"lease_s": 60.0, "grant_s": 3.0}})
    assert 2.0 < behind_a_standstill(server, connector, reads_before=True) < 20.0


# -- several requests with the same params ----------------------------------------------------------


@pytest.mark.parametrize("name", ["dense", "window", "mamba2-align"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_several_completions_of_one_prompt_share_its_params(
    server: Server, connector: Connector, name: str, steps: int
) -> None:
    pair = start(server, connector, name)
    tokens = pair.prompt(130)
    (params,) = pair.prefilled(tokens)
    pair.decode.ask("hold")
    replies = []
    for _ in range(3):
        replies.append(pair.ask(tokens, params))
        pair.decode.ask("step", steps)
    pair.decode.ask("go")
    pair.decode.finish(*replies)
    assert [reply.tokens for reply in replies] == [continued(tokens, 6)] * 3
    pair.settle()


# -- junk -------------------------------------------------------------------------------------------

JUNK: Mapping[str, Any] = {
    "flag alone": {"do_remote_prefill": True},
    "both flags": {"do_remote_prefill": True, "do_remote_decode": True},
    "numbers as flags": {"do_remote_prefill": 1, "do_remote_decode": "yes"},
    "no dict": ["do_remote_prefill"],
    "text": "do_remote_prefill",
    "NixlConnector's": {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "x",
        "remote_block_ids": [[1, 2]],
        "remote_request_id": "y",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
    },
    "nested": {"do_remote_prefill": True, "asynckv": {"groups": [[0, [[1, 2, 3]]]], "key": None}},
    "huge": {"do_remote_prefill": True, "key": "x" * 100_000},
    "other types": {"do_remote_prefill": True, "request_id": 5, "roster": 7, "groups": "none", "num_tokens": -1},
    "unknown": {"anything": {"else": [1, 2, 3]}},
    "empty": {},
}


@pytest.mark.parametrize("what", JUNK)
def test_junk_is_a_refused_request_or_none_and_never_the_end_of_an_engine(
    server: Server, connector: Connector, what: str
) -> None:
    pair = start(server, connector)
    for engine in (pair.decode, pair.prefill):
        tokens = pair.prompt(100)
        reply = engine.add(pair.name("junk"), tokens, 6, JUNK[what])
        engine.finish(reply)
        assert reply.reason == "error" or reply.tokens == continued(tokens, 6)
    pair.generate(pair.prompt(100))
    pair.settle()


def damaged(params: Mapping[str, Any], path: tuple[Any, ...], value: Any) -> Any:
    """Params with one value exchanged."""
    if not path:
        return value
    if isinstance(params, Mapping):
        return {**params, path[0]: damaged(params[path[0]], path[1:], value)}
    copy = list(params)
    copy[path[0]] = damaged(params[path[0]], path[1:], value)
    return copy


def paths(value: Any, so_far: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [so_far] if so_far else []
    items: Any = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += paths(inner, (*so_far, key))
    return found


def test_params_with_any_one_value_exchanged_end_no_engine(server: Server, connector: Connector) -> None:
    pair = start(server, connector, num_blocks=400, policy="recompute")
    tokens = pair.prompt(40)
    (whole,) = pair.prefilled(tokens)
    values: list[Any] = [None, -1, (1 << 64) - 1, 0.5, "x", [], {}, True]
    tried = [(path, value) for path in paths(whole) for value in values]
    for path, value in tried:
        params = damaged(whole, path, value)
        reply = pair.ask(tokens, params, 2)
        pair.decode.finish(reply)
        # What is read is either right or not read at all: nothing that a client says makes an engine read wrong.
        assert reply.reason in ("error", "length"), (path, value)
        pair.decode.ask("forget_prefixes")
    pair.settle(60.0)


# -- sleep ------------------------------------------------------------------------------------------

SLEEPS = pytest.mark.skipif(not HAS_SLEEP, reason="this vLLM does not tell a connector that its memory goes")


@SLEEPS
@pytest.mark.parametrize("name", ["dense", "mamba2-align"])
def test_engines_sleep_and_wake_with_other_bytes_in_their_memory(
    server: Server, connector: Connector, name: str
) -> None:
    pair = start(server, connector, name)
    pair.generate(pair.prompt(100))
    pair.settle()
    for engine in (pair.prefill, pair.decode):
        engine.ask("sleep")
        engine.ask("wake")
        pair.generate(pair.prompt(100), pair.prompt(40))
        pair.settle()


@SLEEPS
def test_params_from_before_a_sleep_are_not_read_after_it(server: Server, connector: Connector) -> None:
    pair = start(server, connector, policy="recompute")
    tokens = pair.prompt(100)
    (params,) = pair.prefilled(tokens)
    settle(pair.prefill, 60.0)
    pair.prefill.ask("sleep")
    pair.prefill.ask("wake")
    pair.generate(pair.prompt(100))
    reply = pair.ask(tokens, params)
    pair.decode.finish(reply)
    judge("recompute", reply, tokens)
    pair.settle()


# -- the rest ---------------------------------------------------------------------------------------


def test_the_connector_works_inside_multi_connector(server: Server, connector: Connector) -> None:
    inside = replace(connector, is_inside=True)
    pair = start(server, inside)
    pair.generate(*(pair.prompt(count) for count in (33, 100, 200)))
    tokens = pair.prompt(100)
    (params,) = pair.prefilled(tokens)
    pair.ask(tokens, params, immediately=True)
    pair.settle()


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_what_it_does_does_not_depend_on_the_role(server: Server, connector: Connector, role: str) -> None:
    pair = start(server, connector, role=role)
    pair.generate(pair.prompt(100))
    pair.settle()


def test_engines_shut_down_in_time_while_much_is_under_way(server: Server, connector: Connector) -> None:
    pair = start(server, connector)
    params = unlent(pair, tokens := pair.prompt(100))
    pair.ask(tokens, params)
    pair.prefill.add("p-more", pair.prompt(100), 1, ASKED)
    # vLLM kills a worker five seconds after it has asked it to end.
    assert pair.decode.ask("close") < 5.0
    assert pair.prefill.ask("close") < 5.0


# -- another prompt's KV ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dense", "mamba2-align", "window"])
def test_params_of_another_prompt_leave_nothing_wrong_in_the_prefix_cache(
    server: Server, connector: Connector, name: str
) -> None:
    pair = start(server, connector, name)
    tokens, other = pair.prompt(128), pair.prompt(128)
    (params,) = pair.prefilled(other)
    mixed_up = pair.ask(tokens, params)
    pair.decode.finish(mixed_up)
    innocent = pair.ask(tokens, None)
    pair.decode.finish(innocent)
    assert [mixed_up.tokens, innocent.tokens] == [continued(tokens, 6)] * 2
    pair.generate(tokens, other, pair.prompt(128))
    pair.settle()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_hashes_that_a_client_exchanged_are_refused_by_the_rank_that_lends(
    server: Server, connector: Connector, policy: Any
) -> None:
    pair = start(server, connector, policy=policy)
    tokens, other = pair.prompt(128), pair.prompt(128)
    true, forged = pair.prefilled(tokens, other)
    forged = {**forged, "asynckv": {**forged["asynckv"], "hashes": true["asynckv"]["hashes"]}}
    reply = pair.ask(tokens, forged)
    pair.decode.finish(reply)
    judge(policy, reply, tokens)
    innocent = pair.ask(tokens, None)
    pair.decode.finish(innocent)
    assert innocent.tokens == continued(tokens, 6)
    pair.decode.finish(pair.ask(other, pair.prefilled(other)[0]))
    pair.settle()
