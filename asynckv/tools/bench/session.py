"""One run from its options to its report."""

from __future__ import annotations

import asyncio
from typing import Any

from asynckv.tools.bench import report
from asynckv.tools.bench.driver import Driver, Measured
from asynckv.tools.bench.experiment import Experiment
from asynckv.tools.bench.workers import END_S, Host
from asynckv.tools.progress import Steps

__all__ = ["run"]


async def run(
    experiment: Experiment, progress: Steps | None = None, log: Any = None
) -> tuple[Measured, dict[str, Any]]:
    """Run a benchmark; nothing is left running.

    Args:
        experiment: The run.
        progress: Is told how far the run is.
        log: A structlog logger for the driver's own events.

    Returns:
        The findings, and the report.

    Raises:
        ConfigError: The input cannot be run.
        AsyncKVError: A worker cannot go on.
    """
    num_blocks = await asyncio.to_thread(experiment.num_blocks)
    driver = await asyncio.to_thread(Driver, experiment, num_blocks, progress, log)
    host = Host(experiment, num_blocks)
    with driver.heeding_signals():
        try:
            found = await driver.run(await host.start())
        finally:
            # Who is interrupted while workers start does not wait for what they do first.
            await host.end(0.5 if driver.found.interrupted and driver.found.stage == "start" else END_S)
    return found, await asyncio.to_thread(report.make, experiment, found)
