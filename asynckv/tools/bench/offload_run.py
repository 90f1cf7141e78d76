"""A workload against real tiers: one rank's engine with its offload, over NIXL and files, every loaded byte compared.

Requests go in waves of as many as are under way together. The clock of loads runs while a wave's loads do, and that of
stores while its stores do; blocks are poisoned, compared and filled between them. Write-backs go on all the time, as
beside an engine that computes. Requests of one wave do not find what another one of it stores.

What belongs into a block follows from the tokens that it holds, see `asynckv.tools.bench.memory`. A state is the
pattern of the hash it is kept under.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import anyio.to_thread

from asynckv.config import EngineConfig, OffloadConfig
from asynckv.engine.engine import Engine
from asynckv.engine.offload import Offload
from asynckv.errors import AsyncKVError, PullError
from asynckv.geometry.layout import Group
from asynckv.offload.found import Found
from asynckv.offload.keys import StoredGroup
from asynckv.tools.bench.memory import Lists, Pool
from asynckv.tools.bench.offload_replay import MODEL, Prompt, Prompts, Tally, Tiers
from asynckv.tools.bench.report import quantiles

DRAIN_S = 60.0
"""How long the last write-backs are waited for."""

Blocks = list[list[int]]
"""Per group."""


class Taken(NamedTuple):
    """A request of a wave: its blocks from the first token on that the accelerator has not."""

    prompt: Prompt
    found: Found
    blocks: Blocks

    def since(self, groups: Sequence[Group], first: int) -> Lists:
        """The blocks from a later token on."""
        skipped = [first // g.block_size - self.prompt.cached // g.block_size for g in groups]
        return [(first, ids[skip:]) for ids, skip in zip(self.blocks, skipped, strict=True)]


def blocks_needed(prompts: Prompts, groups: Sequence[Group], concurrency: int) -> list[int]:
    """Blocks per group that a wave takes at most."""
    longest = sorted(prompts.workload.prompt_tokens, reverse=True)[:concurrency]
    return [max(1, sum(tokens // group.block_size for tokens in longest)) for group in groups]


def run(
    prompts: Prompts,
    groups: Sequence[StoredGroup],
    tiers: Tiers,
    pool: Pool,
    directory: str,
    concurrency: int,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """Serve all requests; a run of the report.

    Args:
        prompts: Of the workload.
        groups: What is kept.
        tiers: Sizes and policy.
        pool: The engine's memory.
        directory: Where files are made and removed.
        concurrency: Requests per wave.
        progress: Told how many requests are done.

    Raises:
        ConfigError: A tier is too small.
        AsyncKVError: The tiers cannot be had, or do not add up.
    """
    with tempfile.TemporaryDirectory("", "akv-", directory or None) as folder:
        config = OffloadConfig(
            model=MODEL,
            hash_tokens=prompts.hash_tokens,
            host_bytes=tiers.host_bytes,
            directory=folder if tiers.file_bytes else "",
            file_bytes=tiers.file_bytes,
            policy=tiers.policy,  # type: ignore[arg-type]
        )
        return asyncio.run(_served(_Run(prompts, groups, pool), config, concurrency, progress))


async def _served(it: _Run, config: OffloadConfig, concurrency: int, progress: Callable[[int], None]) -> dict[str, Any]:
    engine = Engine(EngineConfig(engine_id="bench-offload"), it.pool.registration)
    async with engine, Offload(config, engine) as offload:
        began, prompts = time.perf_counter(), iter(it.prompts)
        while wave := list(itertools.islice(prompts, concurrency)):
            await it.wave(offload, wave)
            progress(len(wave))
        spent, since = time.perf_counter() - began, time.perf_counter()
        while (now := offload.statistics().gauges)["moves"] or now["to_write_back"]:
            if time.perf_counter() - since > DRAIN_S:
                break
            await asyncio.sleep(0.01)
        offload.check_integrity()
        return it.told(offload, spent)


class _Run:
    """What one run has measured so far."""

    def __init__(self, prompts: Prompts, groups: Sequence[StoredGroup], pool: Pool) -> None:
        self.prompts, self.pool, self.tally = prompts, pool, Tally(groups)
        self.groups = pool.registration.layout.groups
        self.load_s: list[float] = []
        self.file_load_s: list[float] = []
        self.store_s: list[float] = []
        self.windows: dict[str, list[tuple[int, float]]] = {"load": [], "load_from_host": [], "store": []}
        """Bytes and seconds of waves."""
        self.faults = dict.fromkeys(("wrong_bytes", "failed"), 0)
        self.short = 0
        self.compared = 0
        self.errors: dict[str, int] = {}

    async def wave(self, offload: Offload, prompts: Sequence[Prompt]) -> None:
        """Look up, load, compare, fill, store."""
        taken = []
        for each, blocks in self._placed(prompts):
            found = self.tally.looked_up(partial(offload.lookup, each.hashes, each.tokens - 1))
            taken.append(Taken(each, found, blocks))
        for new in taken:
            await anyio.to_thread.run_sync(self.pool.poison, self._all(new))
        wanted = [new for new in taken if new.found.tokens > new.prompt.cached]
        began = time.perf_counter()
        results = await asyncio.gather(*(self._load(offload, new) for new in wanted))
        seconds = time.perf_counter() - began
        self._count("load", sum(size for _, size, _ in results), seconds)
        if not any(from_file for *_, from_file in results):
            self._count("load_from_host", sum(size for _, size, _ in results), seconds)
        ends = {new.prompt.number: tokens for new, (tokens, *_) in zip(wanted, results, strict=True)}
        for new in taken:
            end = ends.get(new.prompt.number, 0)
            self.tally.count(new.prompt, new.found, end)
            await anyio.to_thread.run_sync(self._check_and_fill, new, end)
        rests = [(new, max(ends.get(new.prompt.number, 0), new.prompt.cached)) for new in taken]
        began = time.perf_counter()
        sizes = await asyncio.gather(*(self._store(offload, new, first) for new, first in rests))
        self._count("store", sum(sizes), time.perf_counter() - began)

    def _placed(self, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, Blocks]]:
        at = [0] * len(self.groups)
        for prompt in prompts:
            whole, blocks = len(prompt.hashes) * self.prompts.hash_tokens, []
            for g, group in enumerate(self.groups):
                count = max(0, whole // group.block_size - prompt.cached // group.block_size)
                blocks.append(list(range(at[g], at[g] + count)))
                at[g] += count
            yield prompt, blocks

    def _all(self, taken: Taken) -> Lists:
        return taken.since(self.groups, taken.prompt.cached)

    async def _load(self, offload: Offload, taken: Taken) -> tuple[int, int, bool]:
        """Tokens in place, bytes, and whether some came from files."""
        prompt = taken.prompt
        name = f"request-{prompt.number}"
        try:
            loaded = await offload.load(name, self._all(taken), prompt.hashes, num_tokens=taken.found.tokens)
        except AsyncKVError as exc:
            self._failed(exc)
            return 0, 0, False
        # Another load of the wave may have made room with what this one was told of.
        self.short += loaded.num_tokens < taken.found.tokens
        (self.file_load_s if loaded.file_bytes else self.load_s).append(loaded.seconds)
        return loaded.num_tokens, loaded.num_bytes, loaded.file_bytes > 0

    async def _store(self, offload: Offload, taken: Taken, first: int) -> int:
        lists = taken.since(self.groups, first)
        if not any(ids for _, ids in lists):
            return 0
        try:
            stored = await offload.store(f"request-{taken.prompt.number}", lists, taken.prompt.hashes)
        except AsyncKVError as exc:
            self._failed(exc)
            if isinstance(exc, PullError):  # a copy that failed may read the blocks still
                await exc.returned()
            return 0
        self.store_s.append(stored.seconds)
        return stored.num_bytes

    def _failed(self, exc: AsyncKVError) -> None:
        self.faults["failed"] += 1
        text = f"{type(exc).__name__}: {exc}"[:300]
        if text in self.errors or len(self.errors) < 10:
            self.errors[text] = self.errors.get(text, 0) + 1

    def _count(self, what: str, num_bytes: int, seconds: float) -> None:
        if num_bytes:
            self.windows[what].append((num_bytes, seconds))

    # -- bytes -------------------------------------------------------------------------------------

    def _check_and_fill(self, taken: Taken, end: int) -> None:
        """Compare what was loaded, and write what is computed."""
        prompt, whole = taken.prompt, len(taken.prompt.hashes) * self.prompts.hash_tokens
        workload = self.prompts.workload
        prefix = workload.chunk_tokens, workload.chunks[prompt.number] if workload.chunks else ()
        if end > prompt.cached:
            loaded = self._of_tokens(self._all(taken), end)
            self._compared(*self.pool.check(prompt.number, loaded, end, prefix))
            for key, lists in self._states(taken, range(end - 1, end)):
                self._compared(*self.pool.check(key, lists, end))
        first = max(end, prompt.cached)
        self.pool.fill(prompt.number, self._of_tokens(taken.since(self.groups, first), whole), whole, prefix)
        for key, lists in self._states(taken, range(first, whole)):
            self.pool.fill(key, lists, lists[0][0] + 1)

    def _compared(self, num_bytes: int, wrong: int) -> None:
        self.compared += num_bytes
        self.faults["wrong_bytes"] += wrong

    def _of_tokens(self, lists: Lists, end: int) -> Lists:
        """Blocks of tokens up to some token, without states."""
        return [
            (first, [] if group.kind == "state" else ids[: max(0, end // group.block_size - first // group.block_size)])
            for group, (first, ids) in zip(self.groups, lists, strict=True)
        ]

    def _states(self, taken: Taken, tokens: range) -> Iterator[tuple[int, Lists]]:
        """What states there are after these tokens: the number of their pattern, and where they lie."""
        for g, (group, blocks) in enumerate(zip(self.groups, taken.blocks, strict=True)):
            if group.kind != "state":
                continue
            start = taken.prompt.cached // group.block_size
            for place in range(tokens.start // group.block_size, tokens.stop // group.block_size):
                end = (place + 1) * group.block_size
                key = taken.prompt.hashes[end // self.prompts.hash_tokens - 1]
                number = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())
                yield number, [(end - 1, [blocks[place - start]] if i == g else []) for i in range(len(self.groups))]

    # -- what is said ------------------------------------------------------------------------------

    def told(self, offload: Offload, seconds: float) -> dict[str, Any]:
        """Say it, as it stands in the report."""
        now = offload.statistics()
        said, gauges = now.counters, now.gauges
        kinds = ("load", "store", "promotion", "write_back")
        self.faults |= {"moves_failed": said["moves_failed"], "records_lost": said["records_lost"]}
        return self.tally.told() | {
            "seconds": round(seconds, 6),
            "requests_per_s": round(self.tally.requests / max(seconds, 1e-9), 3),
            "blocks": {tier: gauges.get(f"kept.{tier}", 0) for tier in ("host", "file")},
            "evicted": {tier: said[f"evicted.{tier}"] for tier in ("host", "file")},
            "not_written_back": sum(n for name, n in said.items() if name.startswith("not_written_back.")),
            "bytes": {kind: said[f"bytes.{kind}"] for kind in kinds},
            "gb_per_s": {
                name: round(sum(n for n, _ in each) / sum(s for _, s in each) / 1e9, 6) if each else 0.0
                for name, each in self.windows.items()
            },
            "load_s": quantiles(self.load_s, p50=0.5, p99=0.99, max=1.0),
            "load_with_files_s": quantiles(self.file_load_s, p50=0.5, p99=0.99, max=1.0),
            "store_s": quantiles(self.store_s, p50=0.5, p99=0.99, max=1.0),
            "short_loads": self.short,
            "compared_bytes": self.compared,
            "faults": self.faults,
            "errors": self.errors,
            "tiers": offload.describe(),
        }
