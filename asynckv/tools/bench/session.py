"""One run from its options to its report: with all workers here, or together with the half on another machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from asynckv.errors import AsyncKVError, ConfigError
from asynckv.tools.bench import report
from asynckv.tools.bench.driver import Driver, Measured
from asynckv.tools.bench.experiment import Experiment, memory_available
from asynckv.tools.bench.remote import Half, lead
from asynckv.tools.bench.workers import END_S, Host, Workers
from asynckv.tools.progress import Steps

__all__ = ["alone", "leading"]

Found = tuple[Measured, dict[str, Any]]


async def alone(experiment: Experiment, progress: Steps | None = None, log: Any = None) -> Found:
    """Run a benchmark on this machine; nothing is left running.

    Args:
        experiment: What to run.
        progress: Is told how far the run is.
        log: A structlog logger for the driver's own events.

    Returns:
        What was found, and the report.

    Raises:
        ConfigError: The input cannot be run.
        AsyncKVError: A worker cannot go on.
    """
    num_blocks = await asyncio.to_thread(experiment.num_blocks)
    driver = await asyncio.to_thread(Driver, experiment, num_blocks, progress, log)
    return await _drive(driver, experiment, Host(experiment, tuple(experiment.sides), num_blocks), {})


async def leading(
    experiment: Experiment,
    half: Half,
    say: Callable[[str], None],
    progress: Steps | None = None,
    log: Any = None,
) -> Found:
    """Run a benchmark together with the other half, as if all workers were our own.

    Returns:
        What was found, and the report.

    Raises:
        ConfigError: The input cannot be run, or the other half cannot be reached or has other options.
        AsyncKVError: A worker cannot go on.
    """
    lends = any(experiment.engines.lends(place) for place in experiment.engines.places if place.role == half.role)
    async with lead(experiment, half, say) as link:
        try:
            if experiment.options.floor:
                raise ConfigError(
                    "--floor is measured on one machine: it reads the other process's memory; leave out --role"
                )
            available = min(memory_available(), link.memory_available)
            # In threads, what may take long: the other half expects to hear from us.
            num_blocks = await asyncio.to_thread(experiment.num_blocks, available)
            driver = await asyncio.to_thread(Driver, experiment, num_blocks, progress, log)
            link.on_interrupt = driver.interrupt
            host = Host(experiment, (half.role,), num_blocks, half.host(lends))
            found, result = await _drive(driver, experiment, host, link.workers(experiment, num_blocks))
        except AsyncKVError as exc:
            await link.farewell(2 if isinstance(exc, ConfigError) else 1, str(exc))
            raise
        status = report.status(found, result)
        words = {0: "all good", 130: "interrupted"}
        await link.farewell(status, words.get(status, "not all good, see the report there"))
        return found, result


async def _drive(driver: Driver, experiment: Experiment, host: Host, others: Workers) -> Found:
    with driver.heeding_signals():
        try:
            found = await driver.run({**others, **await host.start()})
        finally:
            # Who is interrupted while workers start does not wait for what they do first.
            await host.end(0.5 if driver.found.interrupted and driver.found.stage == "start" else END_S)
    found.environment["ucx_transports"] = host.transports
    return found, await asyncio.to_thread(report.make, experiment, found)
