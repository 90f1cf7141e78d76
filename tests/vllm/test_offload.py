"""asynckv as a spec of vLLM's `OffloadingConnector`, in vLLM's own engine: every byte that a query reads is compared.

What the device has is forgotten between two requests of one prompt, so that the second one's KV comes from host memory
or from files, or is computed again; which of them it was is counted.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asynckv.edges.files.index import INDEX
from asynckv.integrations.vllm.offload.region import path_of
from asynckv.tools.offload.folder import look
from tests.vllm.engines import Dead, Engine, Server, continued, prompt
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
    # Other tests may run on this host: an engine's memory is found by its name.
    return Setup(f"offloads-{os.getpid()}", MODELS[name], connector, environment={"PYTHONHASHSEED": "0"}, **fields)


def stored_in(directory: Path) -> int:
    """Count the blocks of all models and geometries."""
    return sum(look(path.parent).blocks for path in directory.glob(f"*/{INDEX}"))


class Judge:
    """Asks an engine for texts that are known."""

    def __init__(self, engine: Engine, seed: int = 7) -> None:
        self.engine, self.rng, self.count = engine, random.Random(seed), 0

    @classmethod
    def of(cls, server: Server, setup: Setup) -> Judge:
        """Start an engine."""
        (engine,) = server.start(setup)
        return cls(engine)

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
        """Nothing is held once all has ended, and no slot waits for anybody."""
        state = self.engine.until(lambda state: not state["has_work"])
        assert state["free"] == state["blocks"] - 1, state
        self.engine.until(lambda _: not self.kept()["moves"])
        kept = self.kept()
        left = {name: kept.get(name, 0) for name in ("jobs", "pins", "host_leaving", "file_leaving", "moves_in_doubt")}
        assert not any(left.values()), kept
        assert self.engine.ask("close") < 5


@pytest.mark.parametrize("name", CACHED)
def test_every_byte_comes_back_from_host_memory(server: Server, name: str) -> None:
    judge = Judge.of(server, offloading(name))
    prompts = judge.prompts()
    judge.generate(*prompts)
    judge.forget()
    judge.generate(*prompts, most=40)
    # All of a prompt but its last token is loaded in whole blocks, and of a state only the last one.
    assert judge.kept()["loaded_blocks"] >= sum(count > 64 for count in LENGTHS)
    judge.settle()


@pytest.mark.parametrize("name", CACHED)
def test_every_byte_comes_back_from_files_after_a_restart(server: Server, tmp_path: Path, name: str) -> None:
    setup = offloading(name, {"directory": str(tmp_path), "file_bytes": 64 * MIB})
    judge = Judge.of(server, setup)
    prompts = judge.prompts()
    judge.generate(*prompts)
    stored = judge.kept()["stored_blocks"]
    judge.until(written_back_blocks=stored)
    judge.settle()
    assert stored_in(tmp_path) == stored
    judge = Judge.of(server, setup)
    assert judge.kept()["file_blocks"] == stored
    judge.generate(*prompts)
    assert judge.kept()["fetched_blocks"] > 0
    assert judge.kept()["loaded_blocks"] > 0
    judge.settle()


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)], ids=["tp2", "pp2"])
@pytest.mark.parametrize("name", ["dense", "mla", "window", "mamba2-align"])
def test_ranks_use_the_same_slots(server: Server, tmp_path: Path, name: str, tp: int, pp: int) -> None:
    setup = offloading(name, {"directory": str(tmp_path), "file_bytes": 64 * MIB}, tp=tp, pp=pp)
    judge = Judge.of(server, setup)
    prompts = judge.prompts()
    judge.generate(*prompts)
    judge.forget()
    judge.generate(*prompts)
    assert judge.kept()["loaded_blocks"] > 0
    judge.until(written_back_blocks=judge.kept()["stored_blocks"])
    judge.settle()
    judge = Judge.of(server, setup)
    judge.generate(*prompts)
    assert judge.kept()["loaded_blocks"] > 0
    judge.settle()


@pytest.mark.parametrize("extra", [{"blocks_per_chunk": 2}, {"blocks_per_chunk": 3}, {"sync_load_budget_bytes": MIB}])
@pytest.mark.parametrize("name", ["dense", "window"])
def test_chunks_of_several_blocks_and_loads_within_a_step(server: Server, name: str, extra: Mapping[str, Any]) -> None:
    judge = Judge.of(server, offloading(name, extra))
    prompts = judge.prompts()
    judge.generate(*prompts)
    judge.forget()
    judge.generate(*(tokens[:150] + prompt(judge.rng, 50) for tokens in prompts), *prompts)
    assert judge.kept()["loaded_blocks"] > 0
    judge.settle()


@pytest.mark.parametrize("name", ["dense", "window", "mamba2-align"])
def test_every_byte_is_right_while_steps_overlap_blocks_are_few_and_clients_leave(
    server: Server, tmp_path: Path, name: str
) -> None:
    extra = {"host_bytes": 2 * MIB, "directory": str(tmp_path), "file_bytes": 4 * MIB, "offload_prompt_only": False}
    setup = offloading(name, extra, num_blocks=24, max_model_len=320, async_scheduling=True)
    judge = Judge.of(server, setup)
    shared = judge.prompts((250, 130, 90))
    for turn in range(6):
        some = [judge.rng.choice(shared)[: judge.rng.randrange(20, 250)] for _ in range(4)]
        left = [judge.engine.add(f"left{turn}.{i}", tokens, 30) for i, tokens in enumerate(some)]
        judge.engine.ask("abort" if turn % 2 else "abort_in_step", [f"left{turn}.{i}" for i in range(0, 4, 2)])
        judge.generate(*(tokens + prompt(judge.rng, 8) for tokens in some), *judge.prompts((200,)), most=30)
        judge.engine.finish(*left[1::2])
        judge.engine.until(lambda state: not state["requests"])
        if turn % 3 == 1:
            judge.forget(everywhere=turn == 4)
    assert judge.kept()["loaded_blocks"] > 0
    judge.settle()


def test_a_prompt_larger_than_host_memory_is_loaded_as_far_as_it_fits(server: Server, tmp_path: Path) -> None:
    setup = offloading("dense", {"directory": str(tmp_path), "file_bytes": 64 * MIB})
    judge = Judge.of(server, setup)
    prompts = judge.prompts((900, 900))
    judge.generate(*prompts)
    judge.until(written_back_blocks=judge.kept()["stored_blocks"])
    judge.settle()
    size = 4 * 2 * 32 * 4 * 16 * 2  # layers, keys and values, tokens, heads, elements, bytes
    small = offloading("dense", {"directory": str(tmp_path), "file_bytes": 64 * MIB, "host_bytes": 16 * size})
    judge = Judge.of(server, small)
    judge.generate(prompts[0])
    assert judge.kept()["loaded_blocks"] == 16
    assert judge.kept()["unfetched_blocks"] == 28 - 16
    judge.generate(*prompts)
    judge.settle()


def test_what_a_disk_spoils_is_a_miss(server: Server, tmp_path: Path) -> None:
    setup = offloading("dense", {"directory": str(tmp_path), "file_bytes": 64 * MIB})
    judge = Judge.of(server, setup)
    prompts = judge.prompts((300, 300))
    judge.generate(*prompts)
    judge.until(written_back_blocks=judge.kept()["stored_blocks"])
    judge.settle()
    for path in tmp_path.glob("*/*"):
        if path.stat().st_size > MIB:
            with path.open("r+b") as file:
                for at in range(5000, path.stat().st_size, 100_000):
                    file.seek(at)
                    file.write(b"spoiled")
    judge = Judge.of(server, setup)
    judge.generate(*prompts)
    assert judge.kept()["corrupt_or_unread"] > 0
    judge.generate(*prompts)
    judge.settle()


def test_a_killed_engine_leaves_what_it_had_written_and_no_memory(server: Server, tmp_path: Path) -> None:
    setup = offloading("dense", {"directory": str(tmp_path), "file_bytes": 64 * MIB})
    judge = Judge.of(server, setup)
    prompts = judge.prompts()
    judge.generate(*prompts)
    # What is in the index is found again; it is written a moment after the blocks.
    judge.engine.until(lambda _: stored_in(tmp_path) >= 4)
    judge.engine.kill()
    judge = Judge.of(server, setup)
    assert judge.kept()["file_blocks"] >= 4
    judge.generate(*prompts)
    assert judge.kept()["loaded_blocks"] > 0
    judge.settle()
    assert not path_of(setup.name).exists()


def test_what_is_forgotten_everywhere_is_computed_again(server: Server, tmp_path: Path) -> None:
    judge = Judge.of(server, offloading("dense", {"directory": str(tmp_path), "file_bytes": 64 * MIB}))
    prompts = judge.prompts()
    judge.generate(*prompts)
    judge.forget(everywhere=True)
    judge.generate(*prompts)
    assert judge.kept()["loaded_blocks"] == 0
    judge.forget()
    judge.generate(*prompts)
    assert judge.kept()["loaded_blocks"] > 0
    judge.settle()


def test_stages_of_unequal_bytes_are_refused_with_the_numbers(server: Server) -> None:
    setup = replace(offloading(), model=Model(layers=(Attention(),) * 3, block_size=32), pp=2)
    with pytest.raises(Dead, match=r"divide the host memory by block_bytes=\d+|ranks with different numbers of layers"):
        server.start(setup)
