"""A worker of either engine: one tensor-parallel rank in its own process, with an `EngineThread`."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection

from scenery import KVCache

from asynckv import EngineConfig, EngineThread, InspectConfig, LogConfig, configure_logging


def work(engine_id: str, tp_rank: int, tp_size: int, directory: str, pipe: Connection) -> None:
    """Run the steps that the scheduler sends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the scheduler handles Ctrl-C, and ends its workers
    configure_logging("error")  # for stderr; the engine's log file (below) has everything
    cache = KVCache(tp_rank, tp_size)
    with EngineThread(configuration(engine_id, directory), cache.register()) as thread:
        pipe.send(thread.engine.endpoint)  # for the scheduler's PrefillRanks
        while (step := pipe.recv()) is not None:
            # Submit the orders first, so that the engine's thread carries them out while the model computes. From here
            # on nothing else may write the blocks of these orders: an engine that clears or poisons fresh blocks, or
            # copies a shared block for a new writer, does so before.
            thread.submit(step.orders)
            for prompt, blocks in step.compute:
                cache.compute(prompt, blocks)
            right = [cache.is_right(prompt, blocks) for prompt, blocks in step.check]
            # This does not wait: operations that end later are reported in a later step.
            pipe.send((thread.take_finished(), right))
        # Let readers finish their reads. Leaving the `with` block then closes the engine.
        thread.call(thread.engine.drain(timeout_s=2.0), timeout_s=5.0)


def configuration(engine_id: str, directory: str) -> EngineConfig:
    """Return the configuration, which is the same for all ranks of an engine: they share one `engine_id`."""
    if not directory:
        return EngineConfig(engine_id=engine_id)
    log = LogConfig(file=f"{directory}/{{engine_id}}-{{rank}}.jsonl")  # `asynckv why DIRECTORY` reads them all
    return EngineConfig(engine_id=engine_id, log=log, inspect=InspectConfig(directory=directory))
