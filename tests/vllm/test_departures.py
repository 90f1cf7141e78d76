"""Clients leave at every moment, on both sides: blocks return, leases end, and both engines go on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.vllm.engines import Server, continued
from tests.vllm.pairs import ASKED, Pair
from tests.vllm.setups import Connector, Setup
from tests.vllm.zoo import MODELS

KINDS = ["dense", "mamba2-align"]


def start(server: Server, connector: Connector, name: str, tp: int = 1, **fields: object) -> Pair:
    one = replace(Setup("prefill", MODELS[name], connector, tp=tp), **fields)  # type: ignore[arg-type]
    return Pair.start(server, one)


def unlent(pair: Pair, tokens: list[int]) -> dict[str, object]:
    """Params of a request that has been prefilled, but whose lending waits for a step that the test has not made."""
    pair.prefill.ask("hold")
    name = pair.name("p")
    reply = pair.prefill.add(name, tokens, 1, ASKED)
    while not reply.is_done:
        pair.prefill.ask("step", 1)
        pair.prefill.pause()
    return dict(reply.params or {})


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_a_client_leaves_before_its_blocks_are_there(
    server: Server, connector: Connector, name: str, steps: int, tp: int
) -> None:
    pair = start(server, connector, name, tp)
    params = unlent(pair, tokens := pair.prompt(100))
    pair.decode.ask("hold")
    pair.ask(tokens, params)
    pair.decode.ask("step", steps)
    pair.decode.ask("abort", [f"d-{pair.count}"])
    pair.decode.ask("go")
    pair.prefill.ask("go")
    pair.settle()
    pair.generate(pair.prompt(100))
    pair.settle()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", KINDS)
def test_a_client_leaves_while_its_blocks_come_or_after(
    server: Server, connector: Connector, name: str, steps: int
) -> None:
    pair = start(server, connector, name)
    tokens = pair.prompt(300)
    (params,) = pair.prefilled(tokens)
    pair.decode.ask("hold")
    pair.ask(tokens, params, 50)
    pair.decode.ask("step", steps)
    pair.decode.ask("abort_in_step", [f"d-{pair.count}"])
    pair.decode.ask("go")
    pair.settle()


@pytest.mark.parametrize("name", KINDS)
def test_a_request_that_is_rejected_on_arrival_gives_its_blocks_back(
    server: Server, connector: Connector, name: str
) -> None:
    pair = start(server, connector, name)
    tokens = pair.prompt(100)
    (params,) = pair.prefilled(tokens)
    pair.ask(tokens, params, immediately=True)
    # Nobody sends anything more to the decode engine, which is idle from now on.
    pair.settle()


def test_a_client_leaves_while_its_request_is_queued(server: Server, connector: Connector) -> None:
    pair = start(server, connector, "dense", max_num_seqs=1)
    first = pair.ask(pair.prompt(50), None, 400)
    tokens = pair.prompt(100)
    (params,) = pair.prefilled(tokens)
    pair.ask(tokens, params)
    left = f"d-{pair.count}"
    pair.decode.ask("abort", [left])
    pair.decode.finish(first)
    pair.settle()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 6])
@pytest.mark.parametrize("name", KINDS)
def test_a_client_leaves_while_its_prompt_is_computed(
    server: Server, connector: Connector, name: str, steps: int
) -> None:
    pair = start(server, connector, name, max_num_batched_tokens=64)
    tokens = pair.prompt(200)
    pair.prefill.ask("hold")
    pair.prefill.add("p-left", tokens, 1, ASKED)
    pair.prefill.ask("step", steps)
    pair.prefill.ask("abort", ["p-left"])
    pair.prefill.ask("go")
    # What has been prefilled by then is lent, until nobody asks for it.
    reply = pair.prefill.replies["p-left"]
    if reply.params:
        pair.decode.finish(pair.ask(tokens, reply.params))
    pair.settle(within_s=60.0)


def test_requests_leave_among_many_and_the_rest_are_right(server: Server, connector: Connector) -> None:
    pair = start(server, connector, "dense", num_blocks=400)
    prompts = [pair.prompt(40 + 9 * i) for i in range(24)]
    all_params = pair.prefilled(*prompts)
    first = pair.count + 1
    replies = [pair.ask(tokens, params, 12) for tokens, params in zip(prompts, all_params, strict=True)]
    pair.decode.ask("abort", [f"d-{first + i}" for i in range(0, 24, 3)])
    stay = [i for i in range(24) if i % 3]
    pair.decode.finish(*(replies[i] for i in stay))
    assert [replies[i].tokens for i in stay] == [continued(prompts[i], 12) for i in stay]
    pair.settle()


@pytest.mark.parametrize("flag", [{}, {"do_remote_prefill": None}], ids=["missing", "null"])
def test_blocks_that_nothing_asks_to_read_return_long_before_their_lease_ends(
    server: Server, flag: dict[str, None]
) -> None:
    pair = start(server, Connector(), "dense")
    (params,) = pair.prefilled(tokens := pair.prompt(100))
    reply = pair.ask(tokens, {"asynckv": params["asynckv"], **flag})
    pair.decode.finish(reply)
    assert reply.tokens == continued(tokens, 6)
    pair.settle(within_s=10.0)  # of 30 s
    assert pair.decode.ask("counted")["computed_locally"] == {"not_asked": 1}
