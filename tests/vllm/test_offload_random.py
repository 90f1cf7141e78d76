"""Random runs of an engine that offloads: prompts come again, clients leave, caches are forgotten, engines are killed.

A seed decides on the model, the tiers and everything that happens, though not on when copies and files end. Whatever
happens, no engine dies by itself, every text is what it is without an offload, no query reads a wrong byte, what was
stored is found again, in the next life as well, and in the end nothing is held. A seed that failed is run again with
`--seeds N..N`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from asynckv.integrations.vllm.offload.region import path_of
from tests.vllm.engines import Engine, Reply, Server, continued, prompt
from tests.vllm.test_offload import CACHED, MIB, Judge, offloading
from tests.vllm.zoo import MODELS

LIVES, TURNS = 3, 6
LONGEST = 280


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first, _, last = metafunc.config.getoption("--seeds").rpartition("..")
    metafunc.parametrize("seed", range(int(first or 0), int(last) + (1 if first else 0)))


class Run:
    """A random run: some lives of one engine, which share files if it has any."""

    def __init__(self, server: Server, seed: int, folder: Path) -> None:
        self.server, self.rng, self.seed = server, random.Random(seed), seed
        rng = self.rng
        name = rng.choice(CACHED)
        extra: dict[str, Any] = {"host_bytes": rng.choice([1, 2, 8]) * MIB, "policy": rng.choice(["lru", "s3-fifo"])}
        extra["offload_prompt_only"] = rng.random() < 0.5
        if not MODELS[name].has_state:
            extra["blocks_per_chunk"] = rng.choice([1, 1, 2, 4])
            if rng.random() < 0.3:
                extra["sync_load_budget_bytes"] = MIB
        self.has_files = rng.random() < 0.75
        if self.has_files:
            extra |= {"directory": str(folder), "file_bytes": rng.choice([4, 16]) * MIB}
        tp, pp = rng.choice([(1, 1), (1, 1), (2, 1), (1, 2)])
        is_async, blocks = rng.random() < 0.5 and pp == 1, rng.choice([24, 40])
        self.setup = offloading(
            name, extra, num_blocks=blocks, max_model_len=320, async_scheduling=is_async, tp=tp, pp=pp
        )
        self.shared = [prompt(rng, LONGEST) for _ in range(5)]
        self.fetched = 0

    def go(self) -> None:
        """Live some lives, and judge."""
        print(f"seed {self.seed}: {self.setup}")
        for life in range(LIVES):
            (engine,) = self.server.start(self.setup)
            judge = Judge(engine, self.seed * 100 + life)
            for turn in range(TURNS):
                self.turn(judge, f"t{turn}")
            self.find_again(judge)
            kept = judge.kept()
            self.fetched += kept["fetched_blocks"]
            print(f"life {life}: { ({name: count for name, count in kept.items() if count}) }")
            if life + 1 < LIVES and self.rng.random() < 0.5:
                self.kill(judge)
            else:
                judge.settle()
        assert self.fetched or not self.has_files
        assert not path_of(self.setup.name).exists()

    def some(self) -> list[list[int]]:
        """Beginnings of prompts that come again and again."""
        return [self.rng.choice(self.shared)[: self.rng.randrange(20, LONGEST - 10)] for _ in range(4)]

    def turn(self, judge: Judge, name: str) -> None:
        """Requests of some texts, of whose clients some leave while others go on from the same texts."""
        engine, rng = judge.engine, self.rng
        some = self.some()
        staying: list[tuple[Reply, list[int]]] = []
        leaving = []
        for i, tokens in enumerate(some):
            reply = engine.add(f"{name}.{i}", tokens, 30)
            if rng.random() < 0.4:
                leaving.append(f"{name}.{i}")
            else:
                staying.append((reply, tokens))
        if leaving:
            engine.ask(rng.choice(["abort", "abort_in_step"]), leaving)
        others = judge.prompts((rng.randrange(10, LONGEST),))
        judge.generate(*(tokens + prompt(judge.rng, 8) for tokens in some), *others, most=rng.choice([1, 5, 30]))
        engine.finish(*(reply for reply, _ in staying))
        for reply, tokens in staying:
            assert reply.tokens == continued(tokens, 30)
        engine.until(lambda state: not state["requests"])
        if rng.random() < 0.3:
            judge.forget(everywhere=rng.random() < 0.2)

    def find_again(self, judge: Judge) -> None:
        """What the device has forgotten comes from where it was offloaded to."""
        tokens = self.shared[0][:200]
        judge.generate(tokens)
        judge.engine.until(lambda state: not state["has_work"])
        before = judge.kept()["loaded_blocks"]
        judge.forget()
        judge.generate(tokens)
        assert judge.kept()["loaded_blocks"] > before

    def kill(self, judge: Judge) -> None:
        """End it while it works, but not before its files have something."""
        if self.has_files:
            judge.until(written_back_blocks=1)
        engine: Engine = judge.engine
        for i, tokens in enumerate(self.some()):
            engine.add(f"killed.{i}", tokens + prompt(judge.rng, 40), 30)
        engine.ask("state")
        engine.kill()


def test_whatever_happens_texts_are_right_and_nothing_is_held(server: Server, tmp_path: Path, seed: int) -> None:
    Run(server, seed, tmp_path).go()
