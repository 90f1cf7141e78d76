"""The driver: spawns one process per rank, plays the two schedulers and the router, collects figures.

Work goes in *waves*. For each: fill the prefill blocks, lend, tell the decode ranks, open the window in
which they pull in a closed loop, close it, verify, wait until every lease is over. Only the windows are
timed. The pools are sized by the concurrency, not by the number of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from asynckv.bench import protocol as p
from asynckv.bench import ucx
from asynckv.bench.workload import Workload, cached_tokens
from asynckv.config import MIN_LEASE_S, LeaseConfig
from asynckv.core.group import PrefillGroup
from asynckv.core.layout import Layout
from asynckv.errors import AsyncKVError, ConfigError, LayoutError
from asynckv.layouts import model_groups, model_layout
from asynckv.models import Model, State

__all__ = ["Measured", "Options", "run"]

T = TypeVar("T")

START_S = 120.0
GRACE_S = 30.0
MiB = 1 << 20
MOST_WARMUP = 10_000
MOST_RANKS = 1024
MOST_BLOCK_SIZE = 1 << 20
MOST_S = 86_400.0
PROCESS_BYTES = 600 * MiB
"""What a process may use beside its pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One benchmark run.

    Attributes:
        prefix_hit: Tokens, or with a `%` the share of every prompt, that the decode side has already.
        warmup: Requests that go before the clock runs, so that connections are there.
    """

    model: Model
    workload: Workload
    prefill: p.Side = field(default_factory=p.Side)
    decode: p.Side = field(default_factory=p.Side)
    prefix_hit: str = "0"
    concurrency: int = 16
    warmup: int = 1
    block_order: str = "runs"
    verify: str = "full"
    seed: int = 0
    lease_s: float = 30.0
    timeout_s: float = 30.0
    pool_mb: int | None = None
    transport: str = "auto"
    log_path: str = ""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"--concurrency {self.concurrency} must be 1 or more")
        if not 0 <= self.warmup <= MOST_WARMUP:
            raise ConfigError(f"--warmup {self.warmup} is outside 0 ... {MOST_WARMUP}")
        for role, side in self.sides.items():
            for name, value, most in (
                ("tp", side.tp, MOST_RANKS),
                ("pp", side.pp, MOST_RANKS),
                ("block-size", side.block_size, MOST_BLOCK_SIZE),
                ("ratio", side.ratio, MOST_BLOCK_SIZE),
            ):
                if not 1 <= value <= most:
                    raise ConfigError(f"--{name} {value} ({role} side) is outside 1 ... {most}")
            if side.block_size % side.ratio:
                raise ConfigError(
                    f"--ratio {side.ratio} ({role} side) does not divide --block-size {side.block_size}; a block is so "
                    f"many kernel blocks of equal size"
                )
        for option, seconds, least in (
            ("--lease-s", self.lease_s, MIN_LEASE_S),
            ("--timeout-s", self.timeout_s, 0.001),
        ):
            if not least <= seconds <= MOST_S:
                raise ConfigError(f"{option} {seconds:g} is outside {least:g} ... {MOST_S:g} seconds")
        self.cached(1)
        for role in self.sides:
            self.block_bytes(role)

    @property
    def sides(self) -> dict[str, p.Side]:
        """Both engines."""
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def num_decode(self) -> int:
        """Decode ranks; a request is complete when all of them have it."""
        return self.decode.tp * self.decode.pp

    def cached(self, tokens: int) -> int:
        """Tokens of a prompt that the decode side has already.

        Raises:
            ConfigError: It is neither a number nor a percentage.
        """
        return cached_tokens(self.prefix_hit, tokens)

    def num_needed(self, role: str, tokens: int) -> list[int]:
        """Blocks of each group that one request takes on one side."""
        out = []
        for first, ids in self.places(role, tokens):
            out.append(sum(ids) if first < tokens else 0)
        return out

    def places(self, role: str, tokens: int) -> list[tuple[int, list[bool]]]:
        """Per group the first token, and for every place of its list whether there is a block.

        Like engines do: nothing before a sliding window, nothing that is cached, one state per request.
        """
        side, cached = self.sides[role], self.cached(tokens) if role == "decode" else 0
        out: list[tuple[int, list[bool]]] = []
        for layer, _ in model_groups(self.model):
            if isinstance(layer, State):
                out.append((cached, [True] * (cached < tokens)))
                continue
            size = side.block_size
            start, end = cached // size, -(-tokens // size)
            begin = max(0, tokens - layer.window + 1) // size if layer.window else 0
            out.append((cached, [i >= begin for i in range(start, end)] if cached < tokens else []))
        return out

    def layout(self, role: str, tp_rank: int, pp_stage: int, num_blocks: int | Sequence[int] = 1) -> Layout:
        """One rank's layout.

        Raises:
            ConfigError: The sizes do not fit the model.
        """
        side = self.sides[role]
        try:
            return model_layout(
                self.model,
                tp_rank=tp_rank,
                tp_size=side.tp,
                pp_stage=pp_stage,
                pp_size=side.pp,
                block_size=side.block_size,
                ratio=side.ratio,
                num_blocks=num_blocks,
                order=side.order,
                conv_order=side.conv_order,
            )
        except LayoutError as exc:
            raise ConfigError(f"--{role}-tp {side.tp}: {exc}") from exc

    def block_bytes(self, role: str) -> list[int]:
        """Bytes of one block of each group, on the rank that holds most of it."""
        side, most = self.sides[role], [0] * len(model_groups(self.model))
        for stage in range(side.pp):
            layout = self.layout(role, 0, stage)
            sums = [0] * len(most)
            for view in layout.views:
                size = sum(part.itemsize * math.prod(d.size for d in part.dims) for part in view.parts)
                sums[view.group] += size * layout.groups[view.group].ratio
            most = [max(a, b) for a, b in zip(most, sums, strict=True)]
        return most

    def num_blocks(self) -> dict[str, list[int]]:
        """Size of every side's pools per group: twice the concurrency's blocks, as far as memory goes.

        Raises:
            ConfigError: Not even one request fits.
        """
        wanted, least = {}, {}
        longest = sorted(self.workload.prompt_tokens, reverse=True)
        for role in self.sides:
            needs = [self.num_needed(role, t) for t in longest]
            columns = list(zip(*needs, strict=True))
            least[role] = [max(1, max(column)) for column in columns]
            wanted[role] = [
                max(1, min(max(2 * sum(sorted(c, reverse=True)[: self.concurrency]), 64 * MiB // max(size, 1)), sum(c)))
                for c, size in zip(columns, self.block_bytes(role), strict=True)
            ]
        ranks = sum(side.tp * side.pp for side in self.sides.values())
        room = max(0, _memory_available() - ranks * PROCESS_BYTES - 512 * MiB)
        total = sum(side.tp * side.pp * self._pool(role, wanted[role]) for role, side in self.sides.items())
        share = min(1.0, room / total)
        if self.pool_mb is not None:
            share = min(share, *(self.pool_mb * MiB / self._pool(role, wanted[role]) for role in self.sides))
        out = {}
        for role in self.sides:
            out[role] = [max(a, int(b * share)) for a, b in zip(least[role], wanted[role], strict=True)]
        need = {role: self._pool(role, least[role]) for role in self.sides}
        for role, side in self.sides.items():
            limit = self.pool_mb * MiB if self.pool_mb is not None else room // ranks
            if need[role] > limit:
                raise ConfigError(
                    f"the longest prompt ({longest[0]} tokens) needs a pool of {need[role] / MiB:.0f} MiB on each of "
                    f"the {side.tp * side.pp} {role} ranks, but {limit / MiB:.0f} MiB can be had for each of {ranks} "
                    f"processes; shorten it "
                    f"with --max-prompt-tokens, use fewer --layers or ranks, or raise --pool-mb"
                )
        return out

    def _pool(self, role: str, blocks: Sequence[int]) -> int:
        return max(1, sum(n * size for n, size in zip(blocks, self.block_bytes(role), strict=True)))


def _memory_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 8 << 30


@dataclass(slots=True)
class Measured:
    """What a run found."""

    submitted: int = 0
    outcomes: dict[int, list[p.Outcome]] = field(default_factory=dict)
    warmup: list[p.Outcome] = field(default_factory=list)
    windows_s: list[float] = field(default_factory=list)
    bytes_verified: int = 0
    bytes_wanted: int = 0
    bytes_wrong: int = 0
    wrong_requests: list[int] = field(default_factory=list)
    prefill_leaked: int = 0
    decode_leaked: int = 0
    quarantined: int = 0
    cpu_s: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0})
    lags: list[float] = field(default_factory=list)
    lease_ends: dict[str, int] = field(default_factory=dict)
    release_s: list[float] = field(default_factory=list)
    peak_rss: dict[str, int] = field(default_factory=dict)
    pool_bytes: dict[str, int] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    interrupted: bool = False
    pids: dict[str, int] = field(default_factory=dict)


class WorkerLost(Exception):
    """A worker process ended before it was told to."""


class _Child:
    """One worker process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self._process = name, process
        self.is_lost = False

    @classmethod
    async def spawn(cls, name: str, env: dict[str, str]) -> _Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "asynckv.bench.rank",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=env,
            limit=p.LIMIT,
        )
        return cls(name, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, command: p.Command) -> None:
        if not self.is_lost and self._process.stdin is not None:
            with contextlib.suppress(ConnectionError, RuntimeError):
                self._process.stdin.write(p.encode(command))

    async def hear(self, kind: type[T], timeout_s: float) -> T:
        """Wait for the answer to the last command.

        Raises:
            WorkerLost: The process ended, or said nothing in time.
            ConfigError: It blames the input.
            AsyncKVError: It cannot go on.
        """
        while True:
            answer = await self._next(timeout_s)
            if isinstance(answer, p.Failed):
                raise ConfigError(answer.message) if answer.config else AsyncKVError(f"{self.name}: {answer.message}")
            if isinstance(answer, kind):
                return answer
            # Left over from a step that was given up because another worker died.

    async def _next(self, timeout_s: float) -> p.Answer:
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        except TimeoutError:
            self.is_lost = True
            raise WorkerLost(f"{self.name} (process {self.pid}) did not answer within {timeout_s:.0f} s") from None
        if not line:
            self.is_lost = True
            status = await self._process.wait()
            how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
            raise WorkerLost(f"{self.name} (process {self.pid}) {how}")
        return p.answers.decode(line)

    async def end(self) -> None:
        """Make sure that the process is gone."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 15.0)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


class _Run:
    """One run's state."""

    def __init__(self, options: Options, progress: Callable[[int, int], None]) -> None:
        self.options, self.progress = options, progress
        self.found = Measured()
        self.prefill: list[_Child] = []
        self.decode: list[_Child] = []
        self.num_blocks = options.num_blocks()
        self._stop = asyncio.Event()
        self._rng = np.random.default_rng(options.seed)
        self._cpu_at: dict[str, float] = {}
        self._ucx = tempfile.TemporaryDirectory(prefix="asynckv-ucx-")
        self._ucx_env = ucx.ENV | {"UCX_LOG_FILE": str(Path(self._ucx.name) / ucx.ENV["UCX_LOG_FILE"])}

    # -- processes ---------------------------------------------------------------------------------

    async def start(self) -> PrefillGroup:
        """Bring all workers up; returns the prefill scheduler's view of them."""
        options = self.options
        env = dict(os.environ) | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join(x for x in (str(Path(__file__).parents[2]), env.get("PYTHONPATH")) if x)
        if options.transport == "tcp":
            env |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
        endpoints = []
        for role, children in (("prefill", self.prefill), ("decode", self.decode)):
            side = options.sides[role]
            for stage in range(side.pp):
                for rank in range(side.tp):
                    own = env if role == "prefill" else env | self._ucx_env
                    name = f"{role}/pp{stage}/tp{rank}" if side.pp > 1 else f"{role}/tp{rank}"
                    child = await _Child.spawn(name, own)
                    children.append(child)
                    self.found.pids[child.name] = child.pid
                    child.tell(self._setup(role, rank, stage))
        for child in (*self.prefill, *self.decode):
            ready = await child.hear(p.Ready, START_S)
            self.found.environment = ready.environment
            if child in self.prefill:
                endpoints.append(ready.endpoint)
        lease = LeaseConfig(lease_s=options.lease_s, grant_s=min(10.0, options.lease_s))
        return PrefillGroup("prefill", endpoints, lease=lease, pp_size=options.prefill.pp)

    def _setup(self, role: str, rank: int, stage: int) -> p.Setup:
        o = self.options
        return p.Setup(
            role=role,
            tp_rank=rank,
            pp_stage=stage,
            side=o.sides[role],
            model=o.model,
            num_blocks=self.num_blocks[role],
            seed=o.seed,
            verify=o.verify,
            lease_s=o.lease_s,
            timeout_s=o.timeout_s,
            log_path=o.log_path,
            log_level=o.log_level,
        )

    async def end(self) -> None:
        """End every child."""
        await asyncio.gather(*(child.end() for child in (*self.prefill, *self.decode)))
        self.found.environment["ucx_transports"] = ucx.read(Path(self._ucx.name))
        self._ucx.cleanup()

    # -- waves -------------------------------------------------------------------------------------

    async def waves(self, group: PrefillGroup) -> None:
        """Run all requests."""
        todo = list(enumerate(self.options.workload.prompt_tokens))
        await self._warm_up(group)
        while todo and not self._stop.is_set():
            size = self._fitting([tokens for _, tokens in todo])
            wave, todo = todo[:size], todo[size:]
            await self._wave(group, wave)
            self.progress(self.found.submitted, len(self.options.workload.prompt_tokens))

    async def _warm_up(self, group: PrefillGroup) -> None:
        """Move some requests of the workload before the clock runs; only their faults count."""
        lengths, found = self.options.workload.prompt_tokens, self.found
        # Numbers that no measured request has.
        todo = [(len(lengths) + i, lengths[i % len(lengths)]) for i in range(self.options.warmup)]
        while todo and not self._stop.is_set():
            size = self._fitting([tokens for _, tokens in todo])
            wave, todo = todo[:size], todo[size:]
            await self._wave(group, wave)
            for number, _ in wave:
                for outcome in found.outcomes.pop(number):
                    found.warmup.append(outcome)
        found.submitted, found.bytes_verified, found.bytes_wanted = 0, 0, 0
        found.windows_s, found.lags, found.lease_ends = [], [], {}
        found.cpu_s = dict.fromkeys(found.cpu_s, 0.0)

    async def _wave(self, group: PrefillGroup, wave: Sequence[tuple[int, int]]) -> None:
        options, found = self.options, self.found
        lengths = [tokens for _, tokens in wave]
        mine, theirs = self._allocate("prefill", lengths), self._allocate("decode", lengths)
        params = [
            group.make_params(f"prefill-{number}", lists, tokens, written=True)
            for (number, tokens), lists in zip(wave, mine, strict=True)
        ]
        lend, prepare = (
            [p.Work(number, b, tokens, q) for (number, tokens), b, q in zip(wave, lists, params, strict=True)]
            for lists in (mine, theirs)
        )
        patience = (
            GRACE_S
            + sum(
                n * size * len(children)
                for role, children in (("prefill", self.prefill), ("decode", self.decode))
                for n, size in zip(self.num_blocks[role], options.block_bytes(role), strict=True)
            )
            / 2e8
        )
        for child in self.prefill:
            child.tell(p.Lend(lend))
        for child in self.decode:
            child.tell(p.Prepare(prepare))
        for child in self.prefill:
            self._cpu_at[child.name] = (await child.hear(p.Done, patience)).cpu_s
        for child in self.decode:
            await child.hear(p.Done, patience)
        found.submitted += len(wave)
        for number, _ in wave:
            found.outcomes[number] = []
        for child in self.decode:
            child.tell(p.Go(options.concurrency))
        rounds = -(-len(wave) // options.concurrency)
        await self._collect(rounds * (options.timeout_s + GRACE_S) + patience)
        await self._verify(patience)
        await self._finish()

    def _fitting(self, lengths: Sequence[int]) -> int:
        """How many of these requests fit into all pools at once."""
        taken = {role: [0] * len(blocks) for role, blocks in self.num_blocks.items()}
        for size, tokens in enumerate(lengths):
            for role, blocks in self.num_blocks.items():
                taken[role] = [a + b for a, b in zip(taken[role], self.options.num_needed(role, tokens), strict=True)]
                if any(a > b for a, b in zip(taken[role], blocks, strict=True)):
                    return size
        return len(lengths)

    def _allocate(self, role: str, lengths: Sequence[int]) -> list[list[tuple[int, list[int | None]]]]:
        """Give every request its blocks, group by group."""
        pools: list[list[int]] = []
        for blocks in self.num_blocks[role]:
            ids = np.arange(blocks)
            if self.options.block_order == "random":
                self._rng.shuffle(ids)
            pools.append(ids[::-1].tolist())
        return [
            [
                (first, [pool.pop() if there else None for there in places])
                for pool, (first, places) in zip(pools, self.options.places(role, tokens), strict=True)
            ]
            for tokens in lengths
        ]

    async def _collect(self, patience_s: float) -> None:
        found, windows = self.found, []
        for child in self._alive(self.decode):
            try:
                pulled = await child.hear(p.Pulled, patience_s)
            except WorkerLost as exc:
                self._lost(str(exc))
                continue
            windows.append(pulled.window_s)
            found.cpu_s["decode"] += pulled.cpu_s
            found.lags += pulled.lags
            for outcome in pulled.outcomes:
                found.outcomes[outcome.number].append(outcome)
        found.windows_s.append(max(windows, default=0.0))

    async def _verify(self, patience_s: float) -> None:
        alive = self._alive(self.decode)
        for child in alive:
            child.tell(p.Verify())
        for child in alive:
            try:
                verified = await child.hear(p.Verified, patience_s)
            except WorkerLost as exc:
                self._lost(str(exc))
                continue
            self.found.bytes_verified += verified.num_bytes
            self.found.bytes_wanted += verified.wanted
            self.found.bytes_wrong += verified.wrong
            self.found.wrong_requests += verified.wrong_requests

    async def _finish(self) -> None:
        found, alive = self.found, self._alive(self.prefill)
        # Where a reader never came, the lease has to run out first.
        patience = self.options.lease_s + 2 * min(10.0, self.options.lease_s) + 10.0
        for child in alive:
            child.tell(p.Finish(patience))
        for child in alive:
            try:
                ended = await child.hear(p.Ended, patience + GRACE_S)
            except WorkerLost as exc:
                self._lost(str(exc))
                continue
            for cause, n in ended.causes.items():
                found.lease_ends[cause] = found.lease_ends.get(cause, 0) + n
            found.prefill_leaked += ended.leaked_blocks
            found.lags += ended.lags
            found.cpu_s["prefill"] += ended.cpu_s - self._cpu_at[child.name]

    async def reports(self) -> None:
        """Ask every worker for its last words."""
        found, alive = self.found, self._alive((*self.prefill, *self.decode))
        for child in alive:
            child.tell(p.Stop())
        for child in alive:
            try:
                report = await child.hear(p.Report, self.options.timeout_s + 2 * GRACE_S)
            except (WorkerLost, AsyncKVError) as exc:
                self._lost(str(exc))
                continue
            found.peak_rss[child.name] = report.peak_rss_bytes
            found.pool_bytes[child.name] = report.pool_bytes
            found.release_s += report.release_s
            if child in self.prefill:
                found.prefill_leaked += report.gauges["blocks_lent"]
            else:
                found.quarantined += report.gauges["blocks_quarantined"]
                found.decode_leaked += report.gauges["blocks_writing"] - report.gauges["blocks_quarantined"]
            if report.integrity:
                found.problems.append(f"{child.name}: {report.integrity}")

    def interrupt(self) -> None:
        """Ctrl-C: stop pulling, then end in order."""
        self.found.interrupted = True
        self._stop.set()
        for child in self._alive(self.decode):
            child.tell(p.Cancel())

    def _alive(self, children: Sequence[_Child]) -> list[_Child]:
        return [child for child in children if not child.is_lost]

    def _lost(self, what: str) -> None:
        self.found.problems.append(what)
        self._stop.set()


async def run(
    options: Options, *, progress: Callable[[int, int], None] = lambda done, total: None, log: Any = None
) -> Measured:
    """Run a benchmark; bounded in time, and nothing is left running.

    Args:
        options: What to run.
        progress: Called with requests done and in all, after each wave.
        log: A structlog logger for the driver's own events.

    Raises:
        ConfigError: The input cannot be run.
        AsyncKVError: A worker cannot go on.
    """
    it = _Run(options, progress)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, it.interrupt)
    loop.add_signal_handler(signal.SIGTERM, it.interrupt)
    started = time.monotonic()
    try:
        group = await it.start()
        if log is not None:
            log.info("workers_started", pids=it.found.pids, seconds=round(time.monotonic() - started, 3))
        with contextlib.suppress(WorkerLost):
            await _or_note(it, it.waves(group))
        await it.reports()
    except WorkerLost as exc:
        it.found.problems.append(str(exc))
    finally:
        await it.end()
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)
    return it.found


async def _or_note(it: _Run, work: Any) -> None:
    try:
        await work
    except WorkerLost as exc:
        it._lost(str(exc))
        # Whoever is left still has leases to see off.
        await it._finish()
