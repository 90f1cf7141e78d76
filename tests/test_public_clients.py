"""Public clients and vLLM's router, from their wheels, at tiny engines.

The wheels' environments are made once, under .tox/. Where one cannot be made, its test is skipped and says why.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asynckv.tools.proxy.server import COMPLETIONS
from scripts.bench.versus.vllm_side import free_port
from tests.lab.crowd import Crowd, leases, python_with, router, running, texts, why
from tests.test_proxy import Client, Tiny, routed

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(600)]

WHEELS = Path(__file__).parent / "clients"
LEASE_S = 8
"""Long enough for a busy machine, and short enough to wait for its end."""

Service = tuple[Path, Tiny, list[Tiny]]


def options_of(folder: str | Path) -> tuple[str, ...]:
    return ("--dir", str(folder), "--lease-s", str(LEASE_S), "--step-ms", "1")


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A prefill engine, two decode engines, and the directory of their logs."""
    with tempfile.TemporaryDirectory(prefix="akv-") as folder:
        engines = [Tiny(role, *options_of(folder)) for role in ("prefill", "decode", "decode")]
        with running(*engines):
            yield Path(folder), engines[0], engines[1:]


# -- what clients get -----------------------------------------------------------------------------------------


def run(*command: Any) -> str:
    """Run a program of others to its end, and return what it printed."""
    env = {**os.environ, "GUIDELLM__MAX_WORKER_PROCESSES": "1"}  # each imports pandas and PyTorch
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
async def test_openais_sdk_at_the_router(service: Service) -> None:
    python = python_with(WHEELS / "openai.txt")
    _, prefill, decode = service
    async with routed([prefill.url], [decode[0].url]) as client:
        found = json.loads(await asyncio.to_thread(run, python, WHEELS / "openai_sdk.py", client.url))
        counts = await client.metrics()
    assert found["models"] == ["tiny"]

    # A content in parts is the same prompt as its text, and the stream's events add up to it.
    plain, parts = found["chat"]
    assert plain["choices"] == parts["choices"]
    (choice,) = plain["choices"]
    assert (choice["finish_reason"], choice["index"], choice["logprobs"]) == ("length", 0, None)
    assert choice["message"]["role"] == "assistant"
    first, *others, last = found["chat streamed"]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(each["choices"][0]["delta"]["content"] for each in others) == choice["message"]["content"]
    assert [each["choices"][0]["finish_reason"] for each in others] == [None] * (len(others) - 1) + ["length"]
    assert (last["choices"], last["usage"]) == ([], used(plain))
    assert not any("usage" in each for each in (first, *others))

    # Texts and tokens, one and several: a choice for each prompt, and usage over all.
    text, tokens, texts, lists = found["whole"]
    assert [len(each["choices"]) for each in found["whole"]] == [1, 1, 2, 2]
    assert text["choices"] == tokens["choices"] == texts["choices"][:1] == lists["choices"][:1]
    assert [each["index"] for each in texts["choices"] + lists["choices"]] == [0, 1, 0, 1]
    assert [each["usage"]["prompt_tokens"] for each in found["whole"]] == [3, 3, 7, 4]
    for whole, events in zip([text, texts, lists], found["streamed"], strict=True):
        *others, last = events
        said = dict.fromkeys(range(len(whole["choices"])), "")
        for each in others:
            said[each["choices"][0]["index"]] += each["choices"][0]["text"]
        assert list(said.values()) == [each["text"] for each in whole["choices"]]
        assert (last["choices"], last["usage"]) == ([], used(whole))

    kind, status, body = found["image"]
    assert (kind, status, "'image_url'" in body["message"]) == ("BadRequestError", 400, True)
    kind, status, body = found["model"]
    assert (kind, status, body["type"], body["param"]) == ("NotFoundError", 404, "NotFoundError", "model")

    # Several prompts went to a decode engine alone; all others were transferred.
    alone = {name: value for name, value in counts.items() if name.startswith("pd_proxy_decode_only_total") and value}
    assert alone == {'pd_proxy_decode_only_total{cause="prompts"}': 4}


def used(answer: dict[str, Any]) -> dict[str, int]:
    return {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


@pytest.mark.slow
async def test_every_event_tells_usage_if_it_is_asked_to(service: Service) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["a", "bc"], "stream": True, "max_tokens": 2, "stream_options": options}
    async with aiohttp.ClientSession() as session, session.post(service[1].url + COMPLETIONS[0], json=body) as answer:
        lines = (await answer.read()).splitlines()
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]
    told = [(event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]) for event in events]
    assert told == [(2, 1), (2, 2), (3, 1), (3, 2), (5, 4)]


@pytest.mark.slow
async def test_params_belong_to_one_prompt(service: Service) -> None:
    """A router that hands several prompts over gets no params, and no block is lent; nor is one token lent."""
    _, prefill, decode = service
    async with aiohttp.ClientSession() as session:
        for prompt in (["a", "b"], [5]):
            asked = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
            status, told = await Client(prefill.url, session).ask(asked)
            assert (status, told["kv_transfer_params"]) == (200, None)
        params: dict[str, Any] = {"do_remote_prefill": True, "asynckv": {}}
        status, told = await Client(decode[0].url, session).ask({"prompt": ["a", "b"], "kv_transfer_params": params})
        assert (status, told["error"]["message"]) == (400, "kv_transfer_params belong to one prompt, but there are 2")


@pytest.mark.clients
@pytest.mark.parametrize("path", COMPLETIONS)
async def test_a_load_generator_at_the_router(service: Service, path: str, tmp_path: Path) -> None:
    python = python_with(WHEELS / "guidellm.txt")
    _, prefill, decode = service
    (tmp_path / "prompts.txt").write_text("".join(f"Once upon a time {i}\n" for i in range(60)))
    out = tmp_path / "out.json"
    async with routed([prefill.url], [decode[0].url]) as client:
        backend = f"kind=openai_http,target={client.url},max_tokens=8,request_format={path}"
        limits = ("--profile", "kind=concurrent,streams=6", "--constraint", "kind=max_requests,count=60")
        data = ("--data", f"kind=text_file,path={tmp_path / 'prompts.txt'}", "--output", f"kind=json,path={out}")
        command = (python, "-m", "guidellm", "run", "--backend", backend, *limits, *data, "--disable-console")
        await asyncio.to_thread(run, *command)
        counts = await client.metrics()
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"] == {"successful": 60, "errored": 0, "incomplete": 0, "total": 60}
    of_each = {name: metrics[name]["successful"] for name in ("prompt_token_count", "output_token_count")}
    least = len("Once upon a time 0\n")
    assert least < of_each["prompt_token_count"]["min"] <= of_each["prompt_token_count"]["max"] < 2 * least
    assert of_each["output_token_count"]["total_sum"] == 60 * 8
    assert not any(value for name, value in counts.items() if name.startswith("pd_proxy_decode_only_total"))


# -- another router ------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_vllms_router_with_clients_that_leave_and_an_engine_that_dies(service: Service, tmp_path: Path) -> None:
    """A lease expires only if the decode engine was not there, or the client left before it was asked."""
    folder, prefill, (decode, mortal) = service
    router_program = python_with(WHEELS / "vllm-router.txt").with_name("vllm-router")
    port = free_port()
    engines = ("--prefill", prefill.url, "--decode", decode.url, "--decode", mortal.url, "--policy", "round_robin")
    ports = ("--port", str(port), "--prometheus-port", str(free_port()))
    quick = ("--health-check-interval-secs", "1", "--cb-timeout-duration-secs", "1")
    command = (router_program, "--vllm-pd-disaggregation", *engines, *ports, *quick)
    async with (
        router(*command, log=tmp_path / "router.log", port=port, path="/health") as url,
        aiohttp.ClientSession() as session,
    ):
        crowd = Crowd(url, session, await texts(decode, session))
        await crowd.come(iter(range(50)))
        assert crowd.came == {"right": 40, "left": 10}
        assert (await leases(prefill, session)).get("expired", 0) <= 5  # of clients that left at once

        def clients() -> Iterator[int]:
            yield from range(50, 70)
            mortal.process.kill()
            yield from range(70, 130)

        await crowd.come(clients())
        lost = crowd.came.total() - crowd.came["right"] - crowd.came["left"]
        assert set(crowd.came) <= {"right", "left", "500", "broken"}, crowd.came
        assert lost
        with running(Tiny("decode", *options_of(folder), "--port", mortal.url.rpartition(":")[2])):
            again = Client(mortal.url, session)

            async def serves() -> bool:
                await crowd.come(iter(range(20)))
                pulls = await again.metrics()
                return any("pulls_ended_total" in name and "complete" in name and pulls[name] for name in pulls)

            await again.until(serves)
            assert lost == crowd.came.total() - crowd.came["right"] - crowd.came["left"]
            ended = await leases(prefill, session)
            found = why(folder)
    # The engine that died had read for some of those that were answered by an error: at most for the ten in flight.
    assert lost - 10 <= ended["expired"] <= lost + crowd.came["left"]
    assert len(found["late"]) == ended["expired"]
    assert {x["cause"] for x in found["late"]} <= {"never_claimed", "never_heard_of", "reader_died"}
    gone = [x["what"] for x in found["findings"] if x["heading"] == "process gone"]
    assert len(gone) == 1
    assert f"pid {mortal.process.pid} is not there any more" in gone[0]
