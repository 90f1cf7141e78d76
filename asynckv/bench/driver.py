"""The driver: spawns one process per rank, plays the two schedulers and the router, collects figures.

Work goes in *waves*. For each: fill the blocks that are lent, lend, tell the ranks that pull, open the window
in which they pull (in a closed loop, or by the schedule's clock), close it, verify, wait until every lease is
over. Only the windows are timed. The pools are sized by the concurrency, not by the number of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from asynckv.bench import protocol as p
from asynckv.bench import ucx
from asynckv.bench.blocks import Allocation, Allocator
from asynckv.bench.children import Child, Reach, Worker, WorkerLost, environment, setups
from asynckv.bench.floor import KINDS, Round
from asynckv.bench.schedule import Arrivals, Engines, Place, Request, make_schedule
from asynckv.bench.workload import Workload, cached_tokens
from asynckv.config import MIN_LEASE_S, LeaseConfig, NixlConfig
from asynckv.core.types import Endpoint
from asynckv.errors import AsyncKVError, ConfigError, LayoutError
from asynckv.geometry.layout import Layout
from asynckv.scheduler import PrefillGroup
from asynckv.tools.layouts import model_groups, model_layout
from asynckv.tools.models import Model, State

if TYPE_CHECKING:
    from asynckv.bench.remote import Leader

__all__ = ["Measured", "Options", "memory_available", "run"]

Groups = dict[Place, PrefillGroup]

START_S = 120.0
GRACE_S = 30.0
MiB = 1 << 20
MOST_WARMUP = 10_000
MOST_RANKS = 1024
MOST_BLOCK_SIZE = 1 << 20
MOST_S = 86_400.0
MOST_CACHE = 1 << 40
PROCESS_BYTES = 600 * MiB
"""What a process may use beside its pool."""
OPEN_BYTES = 2048 * MiB
"""A pool's size in an open loop, if the schedule needs more: every window's end costs the time of its last pulls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One benchmark run.

    Attributes:
        prefix_hit: Tokens, or with a `%` the share of every prompt, that the decode side has already.
        warmup: Requests between every two engines that go before the clock runs, so that connections are there.
        engines: How many there are, and who lends to whom.
        arrivals: When requests come.
        prefix_cache: Tokens that each reader's prefix cache holds, as it is modelled where prompts share chunks.
        cancel: Share of the requests that are cancelled.
        cancel_within_s: Those are, at a random moment of so many seconds after their pull began.
        announced: Requests are announced, and their claims granted, before their window opens.
        loop: `asyncio`, `uvloop`, or `auto`: uvloop where it is installed.
        memory: Where the pools lie.
        net_device: What UCX may use of the network, such as `eth0`; empty for its choice.
        floor: Measure the floor before or after every wave.
        rounds: With `floor`, how many waves at least.
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
    posting_threads: int | str = "auto"
    process: Literal["auto", "serving", "always", "never"] = "auto"
    announced: bool = False
    loop: str = "auto"
    engines: Engines = field(default_factory=Engines)
    arrivals: Arrivals = field(default_factory=Arrivals)
    prefix_cache: int = 1 << 20
    cancel: float = 0.0
    cancel_within_s: float = 0.05
    memory: Literal["host", "cuda"] = "host"
    net_device: str = ""
    log_path: str = ""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    floor: bool = False
    rounds: int = 10

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
            ("--cancel-within-s", self.cancel_within_s, 0.0),
        ):
            if not least <= seconds <= MOST_S:
                raise ConfigError(f"{option} {seconds:g} is outside {least:g} ... {MOST_S:g} seconds")
        if not 0 <= self.prefix_cache <= MOST_CACHE:
            raise ConfigError(f"--prefix-cache {self.prefix_cache} is outside 0 ... {MOST_CACHE} tokens")
        if any(self.workload.chunks) and self.prefix_hit not in ("0", "0%"):
            raise ConfigError(
                f"--prefix-hit {self.prefix_hit} was given for prompts that share prefixes, of which the modelled "
                f"cache says what is there; use --prefix-cache to size that, or leave --prefix-hit out"
            )
        if self.floor:
            self._check_floor()
        NixlConfig(posting_threads=self.posting_threads)
        self.cached(1)
        for role in self.sides:
            self.block_bytes(role)

    def _check_floor(self) -> None:
        requests = len(self.workload.prompt_tokens)
        ranks = [side.tp * side.pp for side in self.sides.values()]
        if max(ranks) > 1 or len(self.engines.places) > 2 or self.engines.both_ways:
            raise ConfigError(
                "--floor compares one decode rank with one prefill rank; leave out --tp, --pp, --prefill-engines, "
                "--decode-engines and --both-ways"
            )
        if self.arrivals.is_open or self.cancel or self.memory != "host":
            raise ConfigError(
                "--floor compares closed loops in host memory; leave out --rate, --arrivals, --cancel and --memory"
            )
        if self.announced:
            raise ConfigError(
                "--floor and --announced: claims that are granted before the window opens are not in it, so the "
                "engine's part of the floor would flatter; leave one of them out"
            )
        if not 1 <= self.rounds <= requests:
            raise ConfigError(f"--rounds {self.rounds} is outside 1 ... {requests} (--requests): each has one at least")

    @property
    def sides(self) -> dict[str, p.Side]:
        """Both engines."""
        return {"prefill": self.prefill, "decode": self.decode}

    def num_ranks(self, number: int) -> int:
        """Ranks that pull a request; it is complete when all of them have it."""
        side = self.sides[self.engines.route(number)[1].role]
        return side.tp * side.pp

    def schedule(self) -> list[Request]:
        """Work every request out.

        Raises:
            ConfigError: The trace has no times.
        """
        return make_schedule(
            self.workload,
            engines=self.engines,
            arrivals=self.arrivals,
            cache_tokens=self.prefix_cache,
            cached=self.cached,
            cancel=self.cancel,
            cancel_within_s=self.cancel_within_s,
            seed=self.seed,
        )

    def cached(self, tokens: int) -> int:
        """Tokens of a prompt that the decode side has already.

        Raises:
            ConfigError: It is neither a number nor a percentage.
        """
        return cached_tokens(self.prefix_hit, tokens)

    def num_needed(self, role: str, tokens: int, cached: int = 0) -> list[int]:
        """Blocks of each group that one request takes on one side."""
        return [sum(there) for _, there in self.places(role, tokens, cached)]

    def places(self, role: str, tokens: int, cached: int = 0) -> list[tuple[int, list[bool]]]:
        """Per group the first token, and for every place of its list whether there is a block.

        Like engines do: nothing before a sliding window, nothing that is cached, one state per request.
        """
        side = self.sides[role]
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

    def num_blocks(self, available: int | None = None) -> dict[str, list[int]]:
        """Size of every engine's pools per group, by role: twice the concurrency's blocks, as far as memory goes.

        In an open loop as many as the schedule needs, or as fit into `pool_mb` (`OPEN_BYTES`): waves are then few.

        Args:
            available: Bytes of memory that may be used; what this host has if left out.

        Raises:
            ConfigError: Not even one request fits.
        """
        uses: dict[str, dict[Place, list[list[int]]]] = {role: {} for role in self.sides}
        for r in self.schedule():
            for place, cached in ((r.lender, 0), (r.reader, r.cached)):
                uses[place.role].setdefault(place, []).append(self.num_needed(place.role, r.tokens, cached))
        wanted, least = {}, {}
        for role in self.sides:
            sizes = self.block_bytes(role)
            columns = [list(zip(*needs, strict=True)) for needs in uses[role].values()] or [[(1,)] * len(sizes)]
            least[role] = [max(1, *(max(c[g]) for c in columns)) for g in range(len(sizes))]
            wanted[role] = [
                max(1, *(self._wanted(sorted(c[g], reverse=True), size) for c in columns))
                for g, size in enumerate(sizes)
            ]
        engines = {role: sum(place.role == role for place in self.engines.places) for role in self.sides}
        processes = {role: side.tp * side.pp * engines[role] for role, side in self.sides.items()}
        ranks = sum(processes.values())
        room = max(0, (memory_available() if available is None else available) - ranks * PROCESS_BYTES - 512 * MiB)
        total = sum(processes[role] * self._pool(role, wanted[role]) for role in self.sides)
        share = min(1.0, room / total)
        if self.pool_mb is not None:
            share = min(share, *(self.pool_mb * MiB / self._pool(role, wanted[role]) for role in self.sides))
        out = {}
        for role in self.sides:
            out[role] = [max(a, int(b * share)) for a, b in zip(least[role], wanted[role], strict=True)]
        need = {role: self._pool(role, least[role]) for role in self.sides}
        for role in self.sides:
            limit = self.pool_mb * MiB if self.pool_mb is not None else room // ranks
            if need[role] > limit:
                raise ConfigError(
                    f"the longest prompt ({max(self.workload.prompt_tokens)} tokens) needs a pool of "
                    f"{need[role] / MiB:.0f} MiB on each of "
                    f"the {processes[role]} {role} ranks, but {limit / MiB:.0f} MiB can be had for each of {ranks} "
                    f"processes; shorten it "
                    f"with --max-prompt-tokens, use fewer --layers or ranks, or raise --pool-mb"
                )
        return out

    def _wanted(self, needs: Sequence[int], block_bytes: int) -> int:
        """Blocks that one engine's pool of one group had better have, given what its requests need, largest first."""
        size = max(block_bytes, 1)
        if self.arrivals.is_open:
            room = OPEN_BYTES if self.pool_mb is None else self.pool_mb * MiB
            return min(sum(needs), max(needs[0], room // size))
        return min(max(2 * sum(needs[: self.concurrency]), 64 * MiB // size), sum(needs))

    def _pool(self, role: str, blocks: Sequence[int]) -> int:
        return max(1, sum(n * size for n, size in zip(blocks, self.block_bytes(role), strict=True)))


def memory_available() -> int:
    """Bytes of memory that this host could still give away."""
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
    scheduled_s: float = 0.0
    """When the last request that was submitted should have come."""
    lent_places: int = 0
    shared_places: int = 0
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
    floor: list[Round] = field(default_factory=list)


class _Run:
    """One run's state."""

    def __init__(
        self, options: Options, progress: Callable[[int, int], None], reach: Reach, link: Leader | None = None
    ) -> None:
        self.options, self.progress = options, progress
        self.found = Measured()
        self.engines: dict[Place, list[Worker]] = {place: [] for place in options.engines.places}
        self.schedule = options.schedule()
        self._reach, self._link = reach, link
        if options.floor and link is not None:
            raise ConfigError(
                "--floor is measured on one machine: it reads the other process's memory; leave out --role"
            )
        available = None if link is None else min(memory_available(), link.memory_available)
        self.num_blocks = options.num_blocks(available)
        self._stop = asyncio.Event()
        self._rng = np.random.default_rng(options.seed)
        self._cpu_at: dict[str, float] = {}
        self._ucx = tempfile.TemporaryDirectory(prefix="asynckv-ucx-")
        self._ucx_env = ucx.ENV | {"UCX_LOG_FILE": str(Path(self._ucx.name) / ucx.ENV["UCX_LOG_FILE"])}

    def _of(self, wanted: Callable[[Place], bool]) -> list[Worker]:
        return [worker for place, workers in self.engines.items() if wanted(place) for worker in workers]

    @property
    def lenders(self) -> list[Worker]:
        """Ranks of the engines that lend."""
        return self._of(self.options.engines.lends)

    @property
    def readers(self) -> list[Worker]:
        """Ranks of the engines that pull."""
        return self._of(self.options.engines.pulls)

    @property
    def workers(self) -> list[Worker]:
        """All ranks."""
        return self._of(lambda place: True)

    # -- processes ---------------------------------------------------------------------------------

    async def start(self) -> dict[Place, PrefillGroup]:
        """Bring all workers up; returns the schedulers' views of the engines that lend."""
        options, env = self.options, environment(self.options)
        if self._link is not None:
            self._link.begin(self.num_blocks)
        for name, place, setup in setups(options, tuple(options.sides), self.num_blocks, self._reach):
            worker: Worker
            if self._link is not None and place.role != self._link.own_role:
                worker = self._link.worker(name)
                self.engines[place].append(worker)
                continue
            worker = await Child.spawn(name, env | self._ucx_env if options.engines.pulls(place) else env)
            self.engines[place].append(worker)
            self.found.pids[name] = worker.pid
            worker.tell(setup)
        endpoints: dict[Place, list[Endpoint]] = {}
        for place, workers in self.engines.items():
            for worker in workers:
                ready = await worker.hear(p.Ready, START_S)
                self.found.environment = ready.environment
                self.found.pids[worker.name] = ready.pid
                endpoints.setdefault(place, []).append(ready.endpoint)
        lease = LeaseConfig(lease_s=options.lease_s, grant_s=min(10.0, options.lease_s))
        ids = {
            place: setup.engine_id
            for _, place, setup in setups(options, ("prefill", "decode"), self.num_blocks, self._reach)
        }
        return {
            place: PrefillGroup(ids[place], endpoints[place], lease=lease, pp_size=options.sides[place.role].pp)
            for place in self.engines
            if options.engines.lends(place)
        }

    async def end(self) -> None:
        """End every worker."""
        await asyncio.gather(*(worker.end() for worker in self.workers))
        self.found.environment["ucx_transports"] = ucx.read(Path(self._ucx.name))
        self._ucx.cleanup()

    # -- waves -------------------------------------------------------------------------------------

    async def waves(self, groups: Groups) -> None:
        """Run all requests."""
        if self.options.floor:
            await self._open_floor()
        await self._warm_up(groups)
        done, clock_s, total = 0, 0.0, len(self.schedule)
        most = -(-total // self.options.rounds) if self.options.floor else total
        while done < total and not self._stop.is_set():
            wave = self._allocate(self.schedule[i] for i in range(done, min(done + most, total)))
            await self._wave(groups, wave, clock_s)
            # The schedule's clock stands still between windows, and goes on where the last one closed: who would
            # have waited behind a window that took too long is late by that much.
            clock_s += self.found.windows_s[-1]
            self.found.scheduled_s = wave[-1].request.arrival_s
            done += len(wave)
            self.progress(self.found.submitted, len(self.schedule))

    async def _warm_up(self, groups: Groups) -> None:
        """Move some requests of the workload before the clock runs; only their faults count."""
        found, pairs, todo = self.found, dict[tuple[Place, Place], list[Request]](), list[Request]()
        for request in self.schedule:
            pairs.setdefault((request.lender, request.reader), []).append(request)
        for requests in pairs.values():
            for i in range(self.options.warmup):
                # Under numbers that no measured request has.
                number = len(self.schedule) + len(todo)
                todo.append(replace(requests[i % len(requests)], number=number, chunks=(), cancel_s=None))
        while todo and not self._stop.is_set():
            wave = self._allocate(todo)
            todo = todo[len(wave) :]
            await self._wave(groups, wave, 0.0, is_open=False)
            for request, _, _ in wave:
                found.warmup += found.outcomes.pop(request.number)
        found.submitted, found.bytes_verified, found.bytes_wanted = 0, 0, 0
        found.lent_places = found.shared_places = 0
        found.windows_s, found.lags, found.lease_ends, found.floor = [], [], {}, []
        found.cpu_s = dict.fromkeys(found.cpu_s, 0.0)

    async def _wave(
        self, groups: Groups, wave: Sequence[Allocation], clock_s: float, *, is_open: bool | None = None
    ) -> None:
        options, found = self.options, self.found
        if is_open is None:
            is_open = options.arrivals.is_open
        lend: dict[Place, list[p.Work]] = {place: [] for place in self.engines}
        pull: dict[Place, list[p.Work]] = {place: [] for place in self.engines}
        for r, lent, pulled in wave:
            params = groups[r.lender].make_params(f"prefill-{r.number}", lent, r.tokens, written=True)
            chunks = list(r.chunks)
            lend[r.lender].append(p.Work(r.number, lent, r.tokens, params, options.workload.chunk_tokens, chunks))
            pull[r.reader].append(
                p.Work(
                    r.number,
                    pulled,
                    r.tokens,
                    params,
                    options.workload.chunk_tokens,
                    chunks,
                    r.arrival_s - clock_s if is_open else 0.0,
                    r.cancel_s,
                )
            )
        patience = (
            GRACE_S
            + sum(
                n * size * len(workers)
                for place, workers in self.engines.items()
                for n, size in zip(self.num_blocks[place.role], options.block_bytes(place.role), strict=True)
            )
            / 2e8
        )
        for place, workers in self.engines.items():
            for worker in workers:
                if options.engines.lends(place):
                    worker.tell(p.Lend(lend[place]))
                if options.engines.pulls(place):
                    worker.tell(p.Prepare(pull[place]))
        for place, workers in self.engines.items():
            for worker in workers:
                if options.engines.lends(place):
                    self._cpu_at[worker.name] = (await worker.hear(p.Done, patience)).cpu_s
                if options.engines.pulls(place):
                    await worker.hear(p.Done, patience)
        samples: list[p.Sample] = []
        if options.floor and len(found.floor) % 2:
            samples = await self._measure_floor(patience)
            (reader,) = self.readers
            reader.tell(p.Prepare(pull[Place("decode", 0)]))
            await reader.hear(p.Done, patience)
        found.submitted += len(wave)
        for request, _, _ in wave:
            found.outcomes[request.number] = []
        for worker in self.readers:
            worker.tell(p.Go(0 if is_open else options.concurrency))
        span_s = max(wave[-1].request.arrival_s - clock_s, 0.0) if is_open else 0.0
        rounds, cpu_s = 1 if is_open else -(-len(wave) // options.concurrency), found.cpu_s["decode"]
        await self._collect(span_s + rounds * (options.timeout_s + GRACE_S) + options.timeout_s + patience)
        cpu_s = found.cpu_s["decode"] - cpu_s
        await self._verify(wave, patience)
        await self._finish()
        if options.floor and not self._stop.is_set():
            samples = samples or await self._measure_floor(patience)
            good = [o for r, _, _ in wave for o in found.outcomes[r.number] if not o.error and o.num_bytes]
            seconds, moved = [o.seconds for o in good], sum(o.num_bytes for o in good)
            found.floor.append(Round(found.windows_s[-1], seconds, moved, cpu_s, options.concurrency, samples))

    async def _open_floor(self) -> None:
        (lender,), (reader,) = self.lenders, self.readers
        lender.tell(p.Open())
        reader.tell(p.Connect(await lender.hear(p.Opened, START_S)))
        await reader.hear(p.Done, START_S)

    async def _measure_floor(self, patience_s: float) -> list[p.Sample]:
        """Move the wave without the engine; another kind goes first each time."""
        (lender,), (reader,) = self.lenders, self.readers
        kinds = KINDS[self.options.transport]
        turn = len(self.found.floor) % len(kinds)
        lender.tell(p.Serve(True))
        await lender.hear(p.Done, GRACE_S)
        reader.tell(p.Measure([*kinds[turn:], *kinds[:turn]], self.options.concurrency))
        samples = (await reader.hear(p.Floored, 4 * patience_s)).samples
        lender.tell(p.Serve(False))
        await lender.hear(p.Done, GRACE_S)
        return sorted(samples, key=lambda sample: kinds.index(sample.kind))

    def _allocate(self, requests: Iterable[Request]) -> list[Allocation]:
        """Give the first requests their blocks, as many as fit at once."""
        options, out = self.options, []
        allocator = Allocator(
            self.num_blocks,
            options.engines.places,
            places=options.places,
            block_size={role: side.block_size for role, side in options.sides.items()},
            shareable=[not isinstance(layer, State) for layer, _ in model_groups(options.model)],
            chunk_tokens=options.workload.chunk_tokens,
            rng=self._rng if options.block_order == "random" else None,
        )
        for request in requests:
            if (taken := allocator.take(request)) is None:
                break
            out.append(taken)
        self.found.lent_places += allocator.num_lent
        self.found.shared_places += allocator.num_shared
        return out

    async def _collect(self, patience_s: float) -> None:
        found, windows = self.found, []
        for place, workers in self.engines.items():
            for worker in self._alive(workers) if self.options.engines.pulls(place) else ():
                try:
                    pulled = await worker.hear(p.Pulled, patience_s)
                except WorkerLost as exc:
                    self._lost(str(exc))
                    continue
                windows.append(pulled.window_s)
                found.cpu_s[place.role] += pulled.cpu_s
                found.lags += pulled.lags
                found.decode_leaked += pulled.held
                for outcome in pulled.outcomes:
                    if outcome.number not in found.outcomes:
                        self._lost(f"{worker.name} answers for request {outcome.number}, which nobody gave it")
                        continue
                    found.outcomes[outcome.number].append(outcome)
        found.windows_s.append(max(windows, default=0.0))

    async def _verify(self, wave: Sequence[Allocation], patience_s: float) -> None:
        alive = self._alive(self.readers)
        # What one rank completed and another cancelled is nobody's request.
        cut = [
            a.request.number
            for a in wave
            if a.request.cancel_s is not None and any(o.error for o in self.found.outcomes[a.request.number])
        ]
        for worker in alive:
            worker.tell(p.Verify(cut))
        for worker in alive:
            try:
                verified = await worker.hear(p.Verified, patience_s)
            except WorkerLost as exc:
                self._lost(str(exc))
                continue
            self.found.bytes_verified += verified.num_bytes
            self.found.bytes_wanted += verified.wanted
            self.found.bytes_wrong += verified.wrong
            self.found.wrong_requests += verified.wrong_requests

    async def _finish(self) -> None:
        found, alive = self.found, self._alive(self.lenders)
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
            if child not in self.readers:
                found.cpu_s["prefill"] += ended.cpu_s - self._cpu_at[child.name]

    async def reports(self) -> None:
        """Ask every worker for its last words."""
        found, alive = self.found, self._alive(self.workers)
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
            if child in self.lenders:
                found.prefill_leaked += report.gauges.get("blocks_lent", 0)
            if child in self.readers:
                quarantined = report.gauges.get("blocks_quarantined", 0)
                found.quarantined += quarantined
                found.decode_leaked += report.gauges.get("blocks_writing", 0) - quarantined
            if report.integrity:
                found.problems.append(f"{child.name}: {report.integrity}")

    def interrupt(self) -> None:
        """Ctrl-C: stop pulling, then end in order."""
        self.found.interrupted = True
        self._stop.set()
        for worker in self._alive(self.readers):
            worker.tell(p.Cancel())

    def _alive(self, workers: Sequence[Worker]) -> list[Worker]:
        return [worker for worker in workers if not worker.is_lost]

    def _lost(self, what: str) -> None:
        if what not in self.found.problems:
            self.found.problems.append(what)
        self._stop.set()


async def run(
    options: Options,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    log: Any = None,
    reach: Reach | None = None,
    link: Leader | None = None,
) -> Measured:
    """Run a benchmark; bounded in time, and nothing is left running.

    Args:
        options: What to run.
        progress: Called with requests done and in all, after each wave.
        log: A structlog logger for the driver's own events.
        reach: Where this host's engines listen.
        link: The half of the driver that runs on another machine, if there is one.

    Raises:
        ConfigError: The input cannot be run.
        AsyncKVError: A worker cannot go on.
    """
    it = await asyncio.to_thread(_Run, options, progress, reach or Reach(), link)
    loop = asyncio.get_running_loop()
    if link is not None:
        link.on_interrupt = it.interrupt
    loop.add_signal_handler(signal.SIGINT, it.interrupt)
    loop.add_signal_handler(signal.SIGTERM, it.interrupt)
    started = time.monotonic()
    try:
        groups = await it.start()
        if log is not None:
            log.info("workers_started", pids=it.found.pids, seconds=round(time.monotonic() - started, 3))
        with contextlib.suppress(WorkerLost):
            await _or_note(it, it.waves(groups))
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
