"""A prefill and a decode engine that do well and badly, as metrics and traces are to tell it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from asynckv import AsyncKVError, Engine, LeaseConfig, Metrics, PrefillRanks, PullConfig
from asynckv.account.values import decode_account
from asynckv.core.wire import Status, StatusRequest
from asynckv.tools.diagnose.ask import Answer
from tests.engines import Bench, Side, pass_until, until

QUICK: dict[str, Any] = {"lease": LeaseConfig(lease_s=4.0, grant_s=2.0), "pull": PullConfig(held_s=30.0)}
Make = Callable[..., dict[str, Any]]


def registered(*collectors: Metrics) -> CollectorRegistry:
    registry = CollectorRegistry()
    for each in collectors:
        registry.register(each)
    return registry


async def answer_of(engine: Engine) -> Answer:
    """Ask an engine of this process, as `asynckv why` asks those that run."""
    said: list[Status] = []
    engine._driver.on_question("me", StatusRequest(1, most=10), said.append)
    await until(lambda: said)
    return Answer(address="/run/e.sock", gauges=said[0].gauges, account=decode_account(said[0].account))


async def passing(bench: Bench, task: asyncio.Task[Any]) -> Any:
    """Let time pass until a task is done; what it returned or raised."""
    await pass_until(bench, task.done)
    with suppress(AsyncKVError):
        return await task
    return task.exception()


async def story(sim: Bench, prefill: Side, decode: Side, group: PrefillRanks, make: Make | None = None) -> None:
    """Live through it all: five requests end in five ways, and one is held on at the end.

    In turn: `well`, `retried` (its first read fails), `cancelled`, `withdrawn`, `expired` (lent, and never claimed),
    and `stuck`, whose read does not end, so that its blocks are retired.
    """
    make = make or group.make_params

    def lend(name: str, block: int) -> dict[str, Any]:
        params = make(name, [(0, [block])], 16, written=True)
        prefill.engine.lend(params)
        return params

    def pull(name: str, params: dict[str, Any], block: int, **how: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(decode.engine.pull(f"d-{name}", [(0, [block])], params, **how))

    await passing(sim, pull("well", lend("well", 1), 1))
    decode.data.deferred = True
    task = pull("retried", lend("retried", 2), 2, retries=1)
    await until(lambda: decode.data.running)
    decode.data.fail(next(iter(decode.data.running)))
    decode.data.deferred = False
    await passing(sim, task)
    task = pull("cancelled", make("cancelled", [(0, [3])], 16), 3)
    await until(lambda: any(r.request_id == "d-cancelled" for r in decode.engine.requests()))
    decode.engine.cancel("d-cancelled")
    await passing(sim, task)
    params = make("withdrawn", [(0, [4])], 16)
    task = pull("withdrawn", params, 4)
    await until(lambda: any(r.request_id == "d-withdrawn" for r in decode.engine.requests()))
    prefill.engine.withdraw(params)
    await passing(sim, task)
    lent = prefill.engine.lend(make("expired", [(0, [5])], 16, written=True))
    await pass_until(sim, lambda: lent.is_over, 0.25)
    decode.data.deferred = True
    task = pull("stuck", lend("stuck", 6), 6, timeout_s=3.0)
    await until(lambda: decode.data.running)
    await passing(sim, task)
    await pass_until(sim, lambda: any(hold.reason == "retired" for hold in decode.engine.holds()), 0.25)


async def end(decode: Side) -> None:
    """Let what is stuck end."""
    decode.data.finish()
    await until(lambda: not decode.engine.holds())


async def lived(sim: Bench) -> str:
    """Return the metrics of a whole story."""
    registry = CollectorRegistry()
    async with sim.pair(**QUICK) as (prefill, decode, group):
        registry.register(Metrics(prefill.engine, decode.engine))
        await story(sim, prefill, decode, group)
        text = generate_latest(registry).decode()
        await end(decode)
    return text
