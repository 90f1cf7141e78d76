"""The driver: spawns one process per rank, plays the two schedulers and the router, collects figures.

Work goes in *waves*. For each: fill the prefill blocks, lend, tell the decode ranks, open the window in
which they pull in a closed loop, close it, verify, wait until every lease is over. Only the windows are
timed. The pools are sized by the concurrency, not by the number of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from asynckv.bench import protocol as p
from asynckv.bench import ucx
from asynckv.bench.models import Geometry
from asynckv.bench.workload import Workload
from asynckv.config import LeaseConfig
from asynckv.core.group import PrefillGroup
from asynckv.errors import AsyncKVError, ConfigError

__all__ = ["Measured", "Options", "run"]

T = TypeVar("T")

START_S = 120.0
GRACE_S = 30.0
MiB = 1 << 20
PROCESS_BYTES = 600 * MiB
"""What a process may use beside its pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One benchmark run."""

    geometry: Geometry
    workload: Workload
    concurrency: int = 16
    tp: int = 1
    block_size: int = 16
    order: str = "nhd"
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
        for name in ("concurrency", "tp", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)} must be 1 or more")
        LeaseConfig(lease_s=self.lease_s, grant_s=min(10.0, max(self.lease_s, 0.1)))
        if not 0 < self.timeout_s <= 86_400:
            raise ConfigError(f"--timeout-s {self.timeout_s} must be above 0 and at most a day")
        if self.geometry.num_kv_heads % self.tp and self.tp % self.geometry.num_kv_heads:
            raise ConfigError(
                f"--tp {self.tp} cannot share {self.geometry.num_kv_heads} KV heads; use a divisor or a multiple of it"
            )

    def blocks(self, tokens: int) -> int:
        """Blocks that a prompt takes."""
        return -(-tokens // self.block_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on one rank, over all layers."""
        return self.geometry.token_bytes(max(1, self.geometry.num_kv_heads // self.tp)) * self.block_size

    def num_blocks(self) -> int:
        """Size of every pool: twice the concurrency's blocks, at least 64 MiB, as far as memory goes.

        Raises:
            ConfigError: Not even one request fits.
        """
        sizes = sorted((self.blocks(t) for t in self.workload.prompt_tokens), reverse=True)
        wanted = max(2 * sum(sizes[: self.concurrency]), 64 * MiB // self.block_bytes)
        wanted = min(wanted, sum(sizes))
        available = _memory_available()
        room = available - 2 * self.tp * PROCESS_BYTES - 512 * MiB
        limit = self.pool_mb * MiB if self.pool_mb is not None else max(0, room) // (2 * self.tp)
        num_blocks = min(wanted, limit // self.block_bytes)
        if num_blocks < sizes[0]:
            need, have = sizes[0] * self.block_bytes / MiB, limit / MiB
            raise ConfigError(
                f"the longest prompt ({max(self.workload.prompt_tokens)} tokens) needs a pool of {need:.0f} MiB per "
                f"rank, but {have:.0f} MiB can be had for each of the {2 * self.tp} ranks; shorten it with "
                f"--max-prompt-tokens, use fewer --layers, or raise --pool-mb"
            )
        return num_blocks


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
    windows_s: list[float] = field(default_factory=list)
    bytes_verified: int = 0
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
    pool_bytes: int = 0
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
            for rank in range(options.tp):
                own = env if role == "prefill" else env | self._ucx_env
                child = await _Child.spawn(f"{role}/tp{rank}", own)
                children.append(child)
                self.found.pids[child.name] = child.pid
                child.tell(self._setup(role, rank))
        for child in (*self.prefill, *self.decode):
            ready = await child.hear(p.Ready, START_S)
            self.found.environment = ready.environment
            if child in self.prefill:
                endpoints.append(ready.endpoint)
        lease = LeaseConfig(lease_s=options.lease_s, grant_s=min(10.0, options.lease_s))
        return PrefillGroup("prefill", endpoints, lease=lease)

    def _setup(self, role: str, rank: int) -> p.Setup:
        o = self.options
        return p.Setup(
            role=role,
            tp_rank=rank,
            tp_size=o.tp,
            geometry=o.geometry,
            order=o.order,
            block_size=o.block_size,
            num_blocks=self.num_blocks,
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
        while todo and not self._stop.is_set():
            size, blocks = 0, 0
            for _, tokens in todo:
                blocks += self.options.blocks(tokens)
                if blocks > self.num_blocks:
                    break
                size += 1
            wave, todo = todo[:size], todo[size:]
            await self._wave(group, wave)
            self.progress(self.found.submitted, len(self.options.workload.prompt_tokens))

    async def _wave(self, group: PrefillGroup, wave: Sequence[tuple[int, int]]) -> None:
        options, found = self.options, self.found
        sizes = [options.blocks(tokens) for _, tokens in wave]
        mine, theirs = self._allocate(sizes), self._allocate(sizes)
        params = [
            group.make_params(f"prefill-{number}", [(0, blocks)], tokens, written=True)
            for (number, tokens), blocks in zip(wave, mine, strict=True)
        ]
        lend, prepare = (
            [p.Work(number, b, tokens, q) for (number, tokens), b, q in zip(wave, blocks, params, strict=True)]
            for blocks in (mine, theirs)
        )
        num_bytes = sum(sizes) * options.block_bytes
        patience = GRACE_S + num_bytes / 2e8
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

    def _allocate(self, sizes: Sequence[int]) -> list[list[int]]:
        ids = np.arange(self.num_blocks)
        if self.options.block_order == "random":
            self._rng.shuffle(ids)
        cuts = np.cumsum([0, *sizes])
        return [ids[a:b].tolist() for a, b in pairwise(cuts.tolist())]

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
            found.pool_bytes = report.pool_bytes
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
