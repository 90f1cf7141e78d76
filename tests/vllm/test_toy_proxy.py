"""vLLM's own example of a router, from the archive that holds its tests, between two tiny engines."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

import aiohttp
import vllm

from scripts.bench.versus.vllm_side import free_port
from tests.lab.crowd import Crowd, leases, router, running, texts, why
from tests.test_proxy import Tiny

PROXY = Path(vllm.__file__).parents[1] / "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
CLIENTS, LEFT = 150, 30


def test_it_answers_right_and_leaves_only_leases_of_clients_that_left(tmp_path: Path) -> None:
    asyncio.run(_between_two_engines(tmp_path))


async def _between_two_engines(folder: Path) -> None:
    options = ("--dir", str(folder), "--lease-s", "10", "--step-ms", "2")
    prefill, decode = Tiny("prefill", *options), Tiny("decode", *options)
    with running(prefill, decode):
        port = free_port()
        ports = [x.url.rpartition(":")[2] for x in (prefill, decode)]
        hosts = ("--prefiller-hosts", "127.0.0.1", "--decoder-hosts", "127.0.0.1")
        named = ("--prefiller-ports", ports[0], "--decoder-ports", ports[1], "--port", str(port))
        command = (sys.executable, str(PROXY), *hosts, *named)
        async with (
            router(*command, log=folder / "toy_proxy.txt", port=port, path="/healthcheck") as url,
            aiohttp.ClientSession() as session,
        ):
            crowd = Crowd(url, session, await texts(decode, session))
            await crowd.come(iter(range(CLIENTS)))
            assert crowd.came == {"right": CLIENTS - LEFT, "left": LEFT}
            ended = await leases(prefill, session)
            found = why(folder)
    assert ended == {"released": CLIENTS - ended["expired"], "expired": ended["expired"]}
    # The proxy computes the prompts of clients that left before their first event, and asks no decode engine.
    assert 0 < ended["expired"] <= LEFT // 2
    assert Counter(x["cause"] for x in found["late"]) == {"never_heard_of": ended["expired"]}
    assert all("in the router" in x["remedy"] for x in found["late"])
