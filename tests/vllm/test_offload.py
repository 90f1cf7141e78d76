"""asynckv as a spec of vLLM's `OffloadingConnector`, in vLLM's own engine: every byte that a query reads is compared.

What the device has is forgotten between two requests of one prompt, so that the second one's KV comes from host memory
or from files, or is computed again; which of them it was is counted.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import Engine, Server, continued, prompt
from tests.vllm.models import Attention, Model
from tests.vllm.setups import Connector, Setup
from tests.vllm.zoo import MODELS

MIB = 1 << 20
CACHED = [name for name, model in MODELS.items() if model.mamba_mode == "align" or not model.has_state]
"""Models whose prefixes vLLM caches: others have no blocks that a hash names."""
LENGTHS = (31, 32, 33, 64, 65, 100, 200, 300)


def offloading(name: str = "dense", extra: Mapping[str, Any] | None = None, **fields: Any) -> Setup:
    options = {"spec_name": "AsyncKVOffloadingSpec", "spec_module_path": "asynckv.integrations.vllm.offload"}
    connector = Connector("OffloadingConnector", None, options | {"host_bytes": 64 * MIB} | dict(extra or {}))
    return Setup("offloads", MODELS[name], connector, environment={"PYTHONHASHSEED": "0"}, **fields)


class Judge:
    """Asks an engine for texts that are known."""

    def __init__(self, engine: Engine, seed: int = 7) -> None:
        self.engine, self.rng, self.count = engine, random.Random(seed), 0

    def prompts(self, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
        return [prompt(self.rng, count) for count in lengths]

    def generate(self, *prompts: list[int], most: int = 8) -> None:
        """All at once; every text must be right, and every byte."""
        replies = []
        for tokens in prompts:
            self.count += 1
            replies.append(self.engine.add(f"r{self.count}", tokens, most))
        self.engine.finish(*replies)
        for tokens, reply in zip(prompts, replies, strict=True):
            assert reply.tokens == continued(tokens, most), reply
        assert self.engine.ask("wrong") == []

    def kept(self) -> dict[str, int]:
        found: dict[str, int] = self.engine.ask("kept")
        return found

    def until(self, **least: int) -> dict[str, int]:
        """Wait until counters have come so far."""
        found: dict[str, int] = {}
        self.engine.until(lambda _: all((found := self.kept())[name] >= n for name, n in least.items()))
        return found

    def forget(self, everywhere: bool = False) -> None:
        assert self.engine.ask("forget_prefixes", everywhere)

    def settle(self) -> None:
        """Nothing is held once all has ended."""
        state = self.engine.until(lambda state: not state["has_work"])
        assert state["free"] == state["blocks"] - 1, state
        kept = self.kept()
        assert (kept["jobs"], kept["pins"]) == (0, 0), kept
        assert self.engine.ask("close") < 5


@pytest.mark.parametrize("name", CACHED)
def test_every_byte_comes_back_from_host_memory(server: Server, name: str) -> None:
    (engine,) = server.start(offloading(name))
    judge = Judge(engine)
    prompts = judge.prompts()
    judge.generate(*prompts)
    judge.forget()
    before = judge.kept()
    judge.generate(*prompts, most=40)
    assert judge.kept()["loaded_blocks"] - before["loaded_blocks"] >= 4 * sum(count // 32 - 1 for count in LENGTHS) // 8
    judge.settle()


@pytest.mark.parametrize("name", CACHED)
def test_every_byte_comes_back_from_files_after_a_restart(server: Server, tmp_path: Path, name: str) -> None:
    setup = offloading(name, {"directory": str(tmp_path), "file_bytes": 64 * MIB})
    (engine,) = server.start(setup)
    judge = Judge(engine)
    prompts = judge.prompts()
    judge.generate(*prompts)
    stored = judge.kept()["stored_blocks"]
    judge.until(written_back_blocks=stored)
    judge.settle()
    (engine,) = server.start(setup)
    judge = Judge(engine)
    assert judge.kept()["file_blocks"] == stored
    judge.generate(*prompts)
    assert judge.kept()["fetched_blocks"] > 0
    assert judge.kept()["loaded_blocks"] > 0
    judge.settle()
