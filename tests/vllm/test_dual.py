"""A decode engine that reads from engines of `NixlConnector` and of `AsyncKVConnector`; either of them may die."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.v1.request import RequestStatus

from asynckv.errors import ConfigError
from asynckv.integrations.vllm.dual import expanded
from asynckv.integrations.vllm.stats import AsyncKVStats
from tests.vllm.conftest import OURS, THEIRS
from tests.vllm.engines import Engine, Reply, Server, continued
from tests.vllm.pairs import Pair, settle
from tests.vllm.schedulers import DENSE, HYBRID, MIXED, STATES, WINDOW, Group, Side
from tests.vllm.setups import Connector, Setup
from tests.vllm.test_trouble import SHORT, judge
from tests.vllm.zoo import MODELS as ZOO

HAS_AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
MODELS = {**ZOO, "mla": replace(ZOO["mla"], block_size=32 if HAS_AMX else 16)}
"""The block size of vLLM's MLA on this CPU, as NixlConnector insists on."""
LENGTHS = (2, 31, 33, 64, 100, 200)
EXTRA: dict[str, Any] = {"asynckv": SHORT, "nixl": {"kv_lease_duration": 3}}
DUAL = Connector("DualConnector", extra=EXTRA)
KINDS = {
    "asynckv": replace(OURS, extra=SHORT),
    "nixl": replace(THEIRS, extra=EXTRA["nixl"]),
    "dual": DUAL,
    "dual-as-nixl": replace(DUAL, extra={**EXTRA, "lend_as": "nixl"}),
}
DS = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
"""The order that `NixlConnector` insists on; vLLM chooses it by the connector's name."""


BROUGHT: dict[str, Any] = {
    **{"do_remote_prefill": True, "do_remote_decode": False, "remote_num_tokens": 100, "remote_block_ids": [[1] * 7]},
    **{"remote_engine_id": "e", "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 9, "tp_size": 1},
}
"""What `NixlConnector` gives out for a prompt of 100 tokens."""


def scheduler(groups: tuple[Group, ...], **extra: Any) -> Side:
    return Side(groups, connector="DualConnector", extra=extra, is_connected=False)


def reads(groups: tuple[Group, ...], length: int, given: dict[str, Any]) -> bool:
    """Ask a scheduler of both for a prompt; says whether NixlConnector reads it, otherwise it is computed."""
    side = scheduler(groups)
    request = side.add("q", range(length), given)
    out = side.scheduler.schedule()
    assert ("q" in out.num_scheduled_tokens) is (request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS)
    return request.status is RequestStatus.WAITING_FOR_REMOTE_KVS


def setup_of(kind: str, model: str = "dense", **fields: Any) -> Setup:
    setup = Setup(kind, MODELS[model], KINDS[kind], environment=DS, max_num_batched_tokens=256)
    return replace(setup, **{"policy": "recompute", **fields})


def start(server: Server, model: str = "dense", **fields: Any) -> tuple[Pair, Pair]:
    """Start a prefill engine of each connector, and a decode engine; `fields` are of the latter."""
    prefill = [setup_of(kind, model, role="kv_producer") for kind in ("asynckv", "nixl")]
    ours, theirs, decode = server.start(*prefill, setup_of("dual", model, role="kv_consumer", **fields))
    pairs = Pair(ours, decode), Pair(theirs, decode, seed=1)
    pairs[1].count = 10_000  # request ids are the decode engine's
    return pairs


def ask_all(*pairs: Pair, lengths: tuple[int, ...] = LENGTHS, most: int = 6) -> list[tuple[list[int], Reply]]:
    """Prefill prompts everywhere, and send them to the decode engine in turns."""
    prompts = [[pair.prompt(count) for count in lengths] for pair in pairs]
    given = [pair.prefilled(*each) for pair, each in zip(pairs, prompts, strict=True)]
    return [
        (prompts[j][i], pair.ask(prompts[j][i], given[j][i], most))
        for i in range(len(lengths))
        for j, pair in enumerate(pairs)
    ]


def check(engine: Engine, asked: list[tuple[list[int], Reply]], most: int = 6) -> None:
    engine.finish(*(reply for _, reply in asked))
    for tokens, reply in asked:
        assert (reply.reason, reply.tokens) == ("length", continued(tokens, most))


@pytest.mark.parametrize("fields", [{}, {"tp": 2}, {"async_scheduling": True}], ids=["", "tp2", "overlapping"])
@pytest.mark.parametrize("model", ["dense", "mla", "window", "mamba2-align"])
def test_every_byte_arrives_from_engines_of_either_connector(
    server: Server, model: str, fields: dict[str, Any]
) -> None:
    pairs = start(server, model, **fields)
    for _ in range(2):
        check(pairs[0].decode, ask_all(*pairs, most=20), 20)
    for pair in pairs:
        pair.settle()


@pytest.mark.parametrize("model", ["dense", "mamba2-align"])
@pytest.mark.parametrize("dies", ["asynckv", "nixl", "dual"])
def test_an_engine_dies_while_its_blocks_move_and_the_others_go_on(server: Server, dies: str, model: str) -> None:
    pairs = start(server, model)
    decode = pairs[0].decode
    check(decode, ask_all(*pairs, lengths=(100,)))
    asked = ask_all(*pairs, lengths=(200,) * 12)
    (lost,) = [each for each in (pairs[0].prefill, pairs[1].prefill, decode) if each.setup.name == dies]
    lost.kill()
    if lost is decode:
        for pair in pairs:
            settle(pair.prefill)
    else:
        check(decode, asked)
        # What is asked of an engine that is gone is computed; what is asked of the other is read.
        check(decode, ask_all(*(pair for pair in pairs if pair.prefill is not lost)))
    (again,) = server.start(lost.setup)
    for pair in pairs:
        pair.prefill = again if pair.prefill is lost else pair.prefill
        pair.decode = again if pair.decode is lost else pair.decode
    check(pairs[0].decode, ask_all(*pairs))
    for pair in pairs:
        pair.settle()


@pytest.mark.parametrize("dies", ["asynckv", "nixl"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_params_of_an_engine_that_is_gone_fail_by_the_policy(server: Server, dies: str, policy: str) -> None:
    pairs = start(server, policy=policy)
    decode = pairs[0].decode
    (lost,) = [pair for pair in pairs if pair.prefill.setup.name == dies]
    tokens = lost.prompt(100)
    (params,) = lost.prefilled(tokens)
    lost.prefill.kill()
    reply = lost.ask(tokens, params)
    decode.finish(reply)
    judge(policy, reply, tokens)
    left = [pair for pair in pairs if pair is not lost]
    check(decode, ask_all(*left))
    left[0].settle()


@pytest.mark.parametrize("is_queued", [True, False], ids=["queued", "rejected"])
def test_a_client_leaves_and_its_blocks_come_back_from_either_connector(server: Server, is_queued: bool) -> None:
    pairs = start(server, max_num_seqs=1)
    decode = pairs[0].decode
    long = pairs[0].prompt(50)
    first = pairs[0].ask(long, None, 200)
    for pair in pairs:
        tokens = pair.prompt(100)
        (params,) = pair.prefilled(tokens)
        pair.ask(tokens, params, immediately=not is_queued)
        if is_queued:
            decode.ask("abort", [f"d-{pair.count}"])
    check(decode, [(long, first)], 200)
    for pair in pairs:
        pair.settle()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("dual", "asynckv"), ("dual-as-nixl", "nixl"), ("dual", "dual-as-nixl"), ("dual-as-nixl", "dual")],
)
def test_an_engine_of_both_lends_as_one_of_them(server: Server, prefill: str, decode: str) -> None:
    one, other = server.start(setup_of(prefill, name="one"), setup_of(decode, name="other"))
    pair = Pair(one, other)
    check(pair.decode, ask_all(pair))
    pair.settle()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_plain_decode_engine_of_nixl_connector_goes_on_without_what_asynckv_lent(server: Server, policy: str) -> None:
    one, other = server.start(setup_of("asynckv"), setup_of("nixl", policy=policy))
    pair = Pair(one, other)
    prompts = [pair.prompt(count) for count in (*LENGTHS, 90)]
    *read, _ = [
        pair.ask(tokens, params, immediately=len(tokens) == 90)
        for tokens, params in zip(prompts, pair.prefilled(*prompts), strict=True)
    ]
    pair.decode.finish(*read)
    for tokens, reply in zip(prompts, read, strict=False):
        judge(policy, reply, tokens)
    pair.settle()


def test_both_sleep_and_wake(server: Server) -> None:
    pairs = start(server)
    check(pairs[0].decode, ask_all(*pairs))
    for engine in (pairs[0].decode, pairs[0].prefill, pairs[1].prefill):
        settle(engine)
        engine.ask("sleep")
        engine.ask("wake")
    check(pairs[0].decode, ask_all(*pairs))
    for pair in pairs:
        pair.settle()


def test_params_of_neither_connector_or_of_both_end_no_engine(server: Server) -> None:
    pairs = start(server)
    decode = pairs[0].decode
    asked = []
    for pair in pairs:
        tokens = pair.prompt(100)
        (good,) = pair.prefilled(tokens)
        values: list[Any] = [None, -1, 1, 1 << 40, "x", [[-1]], [[1]] * 9, [[1, 2, 3, 1 << 20]], {"a": {}}]
        junk = [{**good, name: value} for name in good for value in values]
        junk = [each for each in junk if each.get("do_remote_decode") is False]
        asked += [(tokens, pair.ask(tokens, each)) for each in [*junk, {**good, "asynckv": 1}, {**good, "asynckv": {}}]]
    check(decode, asked)
    for pair in pairs:
        pair.settle()


def test_params_of_a_shorter_prompt_are_not_given_to_nixl_connector_which_would_end(server: Server) -> None:
    pair = start(server)[1]
    (params,) = pair.prefilled(pair.prompt(50))
    check(pair.decode, [(tokens := pair.prompt(200), pair.ask(tokens, params))])
    pair.settle()


@pytest.mark.parametrize(
    "junk",
    [
        {"do_remote_prefill": 1},
        {"do_remote_prefill": "x"},
        *({"remote_num_tokens": given} for given in ("x", 90, 90.5, math.nan)),
        {"_p_side_truncated": True},
    ],
    ids=str,
)
def test_of_a_prefills_params_nixl_connector_gets_nothing_but_that_it_is_one(junk: dict[str, Any]) -> None:
    side = scheduler(HYBRID, lend_as="nixl")
    side.add("q", range(100), {**BROUGHT, "do_remote_prefill": False, "do_remote_decode": True, **junk})
    told = next(told for told in (side.step() for _ in range(9)) if told.reasons)
    assert told.reasons == {"q": "length"}
    assert told.params["q"]["remote_num_tokens"] == 99


@pytest.mark.parametrize(
    ("groups", "length", "lent", "blocks", "is_read"),
    [
        (DENSE, 100, 100, [7], True),
        (DENSE, 100, 100, [6], False),
        (DENSE, 100, 99, [7], False),
        (DENSE, 100, 100, [7, 7], False),
        (WINDOW, 64, 64, [4, 4], True),
        (WINDOW, 65, 64, [4, 4], False),
        (WINDOW, 65, 64, [5, 5], False),
        (WINDOW, 200, 200, [13, 5], True),
        (WINDOW, 200, 200, [13, 4], False),
        (HYBRID, 100, 99, [7, 1], True),
        (HYBRID, 100, 98, [7, 1], False),
        (HYBRID, 100, 99, [7, 0], False),
    ],
)
def test_nixl_connector_gets_what_has_all_that_it_will_read(
    groups: tuple[Group, ...], length: int, lent: int, blocks: list[int], is_read: bool
) -> None:
    given = {**BROUGHT, "remote_num_tokens": lent, "remote_block_ids": [[1] * count for count in blocks]}
    assert reads(groups, length, given) is is_read


@pytest.mark.parametrize("length", [2, 16, 17, 64, 65, 100, 200])
@pytest.mark.parametrize("groups", [DENSE, WINDOW, MIXED, HYBRID, STATES], ids=str)
def test_nixl_connector_gets_all_that_it_lends(groups: tuple[Group, ...], length: int) -> None:
    given = json.loads(json.dumps(scheduler(groups, lend_as="nixl").prefill("r", range(length))))
    assert reads(groups, length, given)


@pytest.mark.parametrize("name", ["remote_engine_id", "remote_request_id", "remote_host"])
def test_nixl_connector_gets_no_text_that_cannot_be_sent(name: str) -> None:
    assert reads(DENSE, 100, BROUGHT)
    assert not reads(DENSE, 100, {**BROUGHT, name: "\ud800"})


def config(extra: Any, **fields: Any) -> KVTransferConfig:
    path = "asynckv.integrations.vllm"
    given = {"kv_connector": "DualConnector", "kv_connector_module_path": path, "kv_role": "kv_consumer", **fields}
    return KVTransferConfig(kv_connector_extra_config=extra, **given)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"bind": "tcp://127.0.0.1:0"}, "has no option 'bind'; it takes asynckv .the options of AsyncKVConnector"),
        ({"asynckv": []}, r"kv_connector_extra_config.asynckv is \[\]; it must be an object"),
        ({"lend_as": "both"}, "kv_connector_extra_config.lend_as is 'both'; it must be 'asynckv' or 'nixl'"),
    ],
)
def test_an_option_that_is_wrong_is_named(extra: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        expanded(config(extra))


def test_vllm_finds_what_each_of_both_supports_and_counts() -> None:
    given = config({"nixl": {"backends": ["UCX"]}})
    assert KVConnectorFactory.supports_hma_config(given)
    assert KVConnectorFactory.get_connector_class(given).supports_sleep_mode(given)
    assert not KVConnectorFactory.get_connector_class(given).supports_sleep_mode(config({"nixl": {"backends": ["X"]}}))
    logging, lines = KVConnectorLogging(given), []
    ours, nixl = AsyncKVStats(), NixlKVConnectorStats()
    ours.data["failed"]["peer_lost"] = 2
    nixl.record_failed_transfer()
    logging.observe({"AsyncKVConnector": ours.to_dict(), "NixlPullConnector": nixl.to_dict()})
    logging.log(lambda *line: lines.append(line))
    assert "'Num failed pulls': 2" in lines[0][1]
    assert "'Num failed transfers': 1" in lines[0][1]
