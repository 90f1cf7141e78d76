"""Random runs: requests arrive, are preempted, leave, find prefixes, wait; engines pause, sleep, wake and die.

A seed decides on the engines and on everything that happens to them, though not on when transfers end. Whatever
happens, no engine dies by itself, no cache holds a wrong byte, every request that stays says what it must, and in the
end nothing is left. A seed that failed is run again with `--seeds N..N`.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import pytest

from tests.vllm.engines import WITHIN_S, Dead, Engine, Reply, Server, continued, prompt
from tests.vllm.pairs import ASKED, Pair
from tests.vllm.setups import Connector, Setup
from tests.vllm.versions import HAS_SLEEP
from tests.vllm.zoo import MODELS

DEEDS = {
    "send": 12,
    "abort": 4,
    "abort in step": 2,
    "leave prefill": 1,
    "pause": 2,
    "kill prefill": 1,
    "kill decode": 1,
    "kill a rank": 1,
    "twice": 1,
    "reject": 1,
    "sleep": int(HAS_SLEEP),
    "crowd": 1,
}
LENGTHS = (1, 2, 20, 31, 32, 33, 63, 64, 65, 96, 129, 200)
NUM_DEEDS = 60
MOST_DEATHS = 3
LEASE_S = 4.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        first, _, last = metafunc.config.getoption("--seeds").rpartition("..")
        metafunc.parametrize("seed", range(int(first or 0), int(last) + (1 if first else 0)))


@pytest.fixture(scope="module")
def met() -> Iterator[Counter[str]]:
    """What the runs have met; enough of them have to meet everything that they are for."""
    seen: Counter[str] = Counter()
    yield seen
    print(dict(seen))
    if seen["runs"] >= 6:
        rare = {"preempted", "chunks", "cached", *(name for name, weight in DEEDS.items() if weight)} - set(+seen)
        assert not rare, f"no run has met {sorted(rare)}: {dict(seen)}"


class Run:
    """A random run over a pair of engines."""

    def __init__(self, server: Server, connector: Connector, seed: int) -> None:
        self.server, self.rng = server, random.Random(seed)
        rng = self.rng
        name = rng.choice([name for name in MODELS if "none" not in name])
        self.policy: Literal["fail", "recompute"] = "fail" if rng.random() < 0.5 else "recompute"
        if connector.name == "AsyncKVConnector":
            extra = {"lease": {"lease_s": LEASE_S}, "pull": {"timeout_s": 8.0, "release_timeout_s": 4.0, "gone_s": 4.0}}
            connector = replace(connector, extra=extra, is_inside=connector.is_inside or rng.random() < 0.2)
        prefill = Setup(
            "prefill",
            MODELS[name],
            connector,
            tp=rng.choice([1, 1, 2]),
            num_blocks=rng.choice([40, 120]),
            max_model_len=512,
            max_num_seqs=rng.choice([2, 16, 16]),
            max_num_batched_tokens=rng.choice([64, 64, 512]),
            policy=self.policy,
            async_scheduling=rng.random() < 0.5,
        )
        decode = replace(prefill, tp=rng.choice([1, 1, 2]), num_blocks=rng.choice([40, 120]))
        self.pair = Pair.start(server, prefill, replace(decode, async_scheduling=rng.random() < 0.5), seed)
        self.base = prompt(rng, max(LENGTHS))
        self.prefilling: list[tuple[str, Reply, list[int]]] = []
        self.decoding: dict[str, tuple[Reply, list[int], int]] = {}
        self.left: set[str] = set()
        self.dead = 0
        self.met: Counter[str] = Counter(runs=1)
        self.held: dict[str, float] = {}
        self.slept = False

    def go(self) -> None:
        """Do everything, and judge."""
        deeds = self.rng.choices(list(DEEDS), list(DEEDS.values()), k=NUM_DEEDS)
        for deed in deeds:
            if getattr(self, deed.replace(" ", "_"))() is not False:
                self.met[deed] += 1
            self.pass_on()
        for engine in (self.pair.prefill, self.pair.decode):
            self.let_go(engine)
        while self.prefilling:
            self.pair.prefill.pause()
            self.pass_on()
        stay = {name: each for name, each in self.decoding.items() if name not in self.left}
        self.pair.decode.finish(*(reply for reply, _, _ in stay.values()))
        for name, (reply, tokens, most) in stay.items():
            if reply.reason == "error":
                assert self.policy == "fail", (name, reply)
                assert self.dead or self.slept, f"{name} failed, but no engine has died or made no steps for long"
            else:
                assert reply.tokens == continued(tokens, most), name
        self.pair.settle(60.0)
        self.count()

    def count(self, *engines: Engine) -> None:
        """Add up what engines have met, before they die."""
        for engine in engines or (self.pair.prefill, self.pair.decode):
            self.met.update(engine.ask("met"))

    def pass_on(self) -> None:
        """The router sends on what has been prefilled."""
        self.pair.prefill.pause()
        for each in [each for each in self.prefilling if each[1].is_done]:
            self.prefilling.remove(each)
            name, reply, tokens = each
            if name not in self.left and reply.params is not None:
                self.to_decode(tokens, reply.params)

    def prefilled(self, tokens: list[int]) -> Mapping[str, Any]:
        """Prefill a prompt at once.

        The prompt may have to wait for blocks of prompts that are lent. The router hands those on meanwhile: leases
        end while no decode engine has heard of them.
        """
        self.let_go(self.pair.prefill)
        reply = self.pair.prefill.add(self.pair.name("p"), tokens, 1, ASKED)
        deadline = time.monotonic() + WITHIN_S
        while not reply.is_done:
            assert time.monotonic() < deadline, self.pair.prefill.ask("state")
            self.pass_on()
        assert reply.reason == "length", reply
        assert reply.params is not None
        return reply.params

    def to_decode(self, tokens: list[int], params: Any, **fields: Any) -> str:
        name, most = self.pair.name("d"), self.rng.choice([1, 3, 40])
        self.decoding[name] = self.pair.decode.add(name, tokens, most, params, **fields), tokens, most
        return name

    # -- deeds

    def send(self) -> None:
        shared = self.rng.choice([0, 0, 32, 64, 100])
        tokens = self.base[:shared] + prompt(self.rng, self.rng.choice(LENGTHS))
        name = self.pair.name("p")
        self.prefilling.append((name, self.pair.prefill.add(name, tokens, 1, ASKED), tokens))

    def twice(self) -> None:
        """One prompt, two completions."""
        tokens = prompt(self.rng, self.rng.choice(LENGTHS))
        params = self.prefilled(tokens)
        self.to_decode(tokens, params)
        self.to_decode(tokens, params)

    def reject(self) -> None:
        tokens = prompt(self.rng, self.rng.choice(LENGTHS))
        params = self.prefilled(tokens)
        self.left.add(self.to_decode(tokens, params, immediately=True))

    def _one(self) -> list[str]:
        names = [name for name, (reply, _, _) in self.decoding.items() if not reply.is_done]
        chosen = self.rng.sample(names, min(len(names), self.rng.choice([1, 1, 3])))
        self.left.update(chosen)
        return chosen

    def abort(self) -> None:
        self.pair.decode.ask("abort", self._one())

    def abort_in_step(self) -> None:
        if names := self._one():
            # The queue is looked at in a step, and requests keep the engine making them.
            self.pair.decode.ask("abort_in_step", names)

    def leave_prefill(self) -> None:
        if self.prefilling:
            name = self.rng.choice(self.prefilling)[0]
            self.left.add(name)
            self.prefilling = [each for each in self.prefilling if each[0] != name]
            self.pair.prefill.ask("abort", [name])

    def pause(self) -> None:
        """An engine makes a few steps and then none, until it is let go."""
        engine = self.rng.choice([self.pair.prefill, self.pair.decode])
        if self.rng.random() < 0.5:
            self.let_go(engine)
        else:
            self.held.setdefault(engine.setup.name, time.monotonic())
            engine.ask("hold")
            engine.ask("step", self.rng.randrange(4))

    def let_go(self, engine: Engine) -> None:
        """A scheduler that makes no steps hands no orders over, and leases do not wait for it."""
        if (since := self.held.pop(engine.setup.name, None)) is not None:
            self.slept |= time.monotonic() - since > LEASE_S / 2
        engine.ask("go")

    def sleep(self) -> None:
        """An engine that has nothing to do sleeps, as vLLM has it, and wakes with other bytes in its memory."""
        engine = self.rng.choice([self.pair.prefill, self.pair.decode])
        for each in (self.pair.prefill, self.pair.decode):
            self.let_go(each)
        self._leave(engine)
        engine.until(lambda state: not state["has_work"])
        engine.ask("sleep")
        engine.ask("wake")

    def crowd(self) -> None:
        """More long answers than there is room for: some are preempted."""
        for _ in range(8):
            name, tokens = self.pair.name("d"), prompt(self.rng, 129)
            self.decoding[name] = self.pair.decode.add(name, tokens, 150), tokens, 150

    def _leave(self, engine: Engine) -> None:
        """All clients of an engine leave."""
        if engine is self.pair.prefill:
            names = [name for name, _, _ in self.prefilling]
            self.prefilling.clear()
        else:
            names = [name for name, (reply, _, _) in self.decoding.items() if not reply.is_done]
        self.left.update(names)
        engine.ask("abort", names)

    def kill_prefill(self) -> bool:
        """The prefill engine dies, and comes back under its name."""
        return self._die(self.pair.prefill)

    def kill_decode(self) -> bool:
        """The decode engine dies, with all that it was asked for, and comes back under its name."""
        return self._die(self.pair.decode)

    def kill_a_rank(self) -> bool:
        """One of an engine's workers dies, and the engine with it, as vLLM has it."""
        for engine in (self.pair.prefill, self.pair.decode):
            if engine.setup.tp > 1:
                return self._die(engine, rank=self.rng.randrange(engine.setup.tp))
        return False

    def _die(self, engine: Engine, rank: int | None = None) -> bool:
        if self.dead == MOST_DEATHS:
            return False
        self.dead += 1
        self.held.pop(engine.setup.name, None)
        self.count(engine)
        if rank is not None:
            engine.ask("go")
            engine.ask("kill_rank", rank)
            with suppress(Dead):
                engine.until(lambda state: False, 1.0)
        engine.kill()
        (again,) = self.server.start(engine.setup)
        if engine is self.pair.prefill:
            self.pair.prefill = again
            self.prefilling.clear()
        else:
            self.pair.decode = again
            self.left.update(name for name, (reply, _, _) in self.decoding.items() if not reply.is_done)
        return True


def test_nothing_is_wrong_or_left_after_a_random_run(
    server: Server, connector: Connector, seed: int, met: Counter[str]
) -> None:
    run = Run(server, connector, seed)
    run.go()
    met.update(run.met)
