"""The experiment that the options of a run describe: model, workload, both sides, schedule, and sizes of the pools."""

from __future__ import annotations

import itertools
import math
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asynckv.config import NixlConfig
from asynckv.edges.pages import memory_available
from asynckv.errors import ConfigError, LayoutError
from asynckv.geometry.check import check_layout
from asynckv.geometry.gather import packs
from asynckv.geometry.layout import Layout
from asynckv.geometry.match import assign, remote_ranks
from asynckv.geometry.packed import record_sizes
from asynckv.geometry.staging import TYPICAL
from asynckv.geometry.tables import PeerTables
from asynckv.tools.bench.head_start import WAYS
from asynckv.tools.bench.options import DEFAULT_MODEL, PROMPT_TOKENS, Options, Shape
from asynckv.tools.bench.schedule import Engines, Place, Request, make_schedule
from asynckv.tools.bench.workload import Workload, cached_tokens, drawn, traced
from asynckv.tools.console import size
from asynckv.tools.plan.layouts import model_groups
from asynckv.tools.plan.models import Model, State, chosen

MiB = 1 << 20
PROCESS_BYTES = 600 * MiB  # memory of a process without its pool
PREFIXES = 8
LOOPBACK = "127.0.0.1"
OPEN_BYTES = 2048 * MiB
"""Largest pool in an open loop: a large one makes few windows, because each window waits for its last pulls."""

_ALONE = (
    "needs one prefill and one decode rank on this machine, host memory, a closed loop, and claims within the measured "
    "time"  # claims that were granted before the window are not timed, so the engine's share would look too good
)
_ALONE_WITHOUT = ("tp", "pp", "engines", "rate", "speed", "memory", "remote", "announced")
NOT_WITH = {
    "floor": (_ALONE, (*_ALONE_WITHOUT, "follow", "chunks")),
    "chunks": (
        f"{_ALONE}, one request at a time that has nothing cached",
        (*_ALONE_WITHOUT, "concurrency", "trace", "shared_prefix", "prefix_hit"),
    ),
    "follow": (
        "counts from loans to results, by one clock, in a closed loop",
        ("rate", "speed", "remote", "announced"),
    ),
}
"""Needs of an option, and the options that it cannot be given with."""


class Experiment:
    """One run, derived from its options and checked as a whole."""

    def __init__(self, options: Options, model: Model | None = None, workload: Workload | None = None) -> None:
        self.options = replace(options, concurrency=1, follow=True) if options.chunks else options
        self.model = model or chosen(options.model, options.hf_config, DEFAULT_MODEL).resized(
            layers=options.layers, kv_heads=options.kv_heads, dtype=options.dtype
        )
        self.workload = _workload(options) if workload is None else workload
        self.sides: dict[str, Shape] = {role: options.shape(role) for role in ("prefill", "decode")}
        self.engines = Engines(*(options.number("engines", role) for role in self.sides))
        if options.rate is not None and options.speed is not None:
            raise ConfigError(
                f"--rate {options.rate:g} and --speed {options.speed:g} contradict each other, because --speed uses "
                f"the trace's own times; omit one of them"
            )
        self.is_open = options.arrivals != "closed"
        if any(self.workload.chunks) and options.prefix_hit not in ("0", "0%"):
            raise ConfigError(
                f"--prefix-hit {options.prefix_hit} was given, but for prompts that share prefixes the modelled cache "
                f"decides the hits; set its size by --prefix-cache, or omit --prefix-hit"
            )
        self.hosts = _hosts(options)
        self._check_together(options)
        if options.chunks is None and options.compute_ms is not None:
            raise ConfigError("--compute-ms is the time of a chunk; give --chunks as well")
        NixlConfig(posting_threads=options.posters)
        cached_tokens(options.prefix_hit, 1)
        for role in self.sides:
            self.block_bytes(role)

    def _check_together(self, options: Options) -> None:
        for name, (needs, others) in NOT_WITH.items():
            found = [f"--{x.replace('_', '-')}" for x in others if getattr(options, name) and options.is_given(x)]
            if found:
                raise ConfigError(f"--{name} {needs}; leave out {', '.join(found)}")
        lengths = self.workload.prompt_tokens
        least = (options.chunks or 0) * max(side.block_size for side in self.sides.values())
        if options.chunks and (len(set(lengths)) > 1 or len(lengths) < len(WAYS) or lengths[0] < least):
            raise ConfigError(
                f"--chunks {options.chunks} needs {len(WAYS)} --requests or more of one length, with a block for each "
                f"chunk: --prompt-tokens {least} or more"
            )

    def schedule(self) -> list[Request]:
        return make_schedule(self.workload, self.options, self.engines)

    def places(self, role: str, tokens: int, cached: int = 0) -> list[tuple[int, list[bool]]]:
        """Return per group the first token, and for every place of its list whether there is a block.

        As in engines, there are no blocks before a sliding window or for cached tokens, and one state per request.
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
        shape = self.sides[role]
        try:
            check_layout(layout := shape.layout(self.model, tp_rank, pp_stage, num_blocks))
        except LayoutError as exc:
            raise ConfigError(f"{shape.ranks} ({role} side): {exc}") from exc
        return layout

    def small_pieces(self) -> list[str]:
        """Return warnings where the two geometries cut reads into pieces so small that they are slow."""
        costs = TYPICAL if self.options.memory == "host" and self.options.posters != 0 else None
        ours, theirs = self.sides["decode"], self.sides["prefill"]
        found: dict[str, None] = {}
        for stage in range(ours.pp):
            here = self.layout("decode", 0, stage)
            ranks = remote_ranks(here.tp_rank, ours.tp, theirs.tp, theirs.dcp)
            there = [self.layout("prefill", rank, s) for s in range(theirs.pp) for rank in ranks]
            for other, shares in zip(there, assign(here, there), strict=True):
                if shares:
                    pack_bytes = packs(other) if costs is not None else 0
                    tables = PeerTables(here, other, shares, itertools.count(1), costs, pack_bytes)
                    found |= dict.fromkeys(tables.warnings)
        return list(found)

    def block_bytes(self, role: str) -> list[int]:
        """Return the bytes of one block of each group, on the rank that holds most of it."""
        stages = [record_sizes(self.layout(role, 0, stage)) for stage in range(self.sides[role].pp)]
        return [max(record.num_bytes for record in records) for records in zip(*stages, strict=True)]

    def num_blocks(self, available: int | None = None) -> dict[str, list[int]]:
        """Return every engine's blocks per group, by role: twice the concurrency's blocks, if memory allows.

        An open loop gets as many as the schedule needs or as fit into `pool_mb` (or `OPEN_BYTES`), to have few waves.
        """
        uses: dict[str, dict[Place, list[list[int]]]] = {role: {} for role in self.sides}
        for r in self.schedule():
            for place, cached in ((r.lender, 0), (r.reader, r.cached)):
                needed = [sum(there) for _, there in self.places(place.role, r.tokens, cached)]
                uses[place.role].setdefault(place, []).append(needed)
        wanted, least = {}, {}
        for role in self.sides:
            sizes = self.block_bytes(role)
            columns = [list(zip(*needs, strict=True)) for needs in uses[role].values()] or [[(1,)] * len(sizes)]
            least[role] = [max(1, *(max(c[g]) for c in columns)) for g in range(len(sizes))]
            wanted[role] = [
                max(1, *(self._wanted(sorted(c[g], reverse=True), size) for c in columns))
                for g, size in enumerate(sizes)
            ]
        processes = {role: side.tp * side.pp * getattr(self.engines, role) for role, side in self.sides.items()}
        ranks = sum(processes.values())
        have = memory_available()[0] if available is None else available
        room = max(0, have - ranks * PROCESS_BYTES - 512 * MiB)
        total = sum(processes[role] * self.pool_bytes(role, wanted[role]) for role in self.sides)
        most = math.inf if self.options.pool_mb is None else self.options.pool_mb * MiB
        share = min(1.0, room / total, *(most / self.pool_bytes(role, wanted[role]) for role in self.sides))
        if not room:
            raise ConfigError(
                f"{ranks} worker processes need {size(ranks * PROCESS_BYTES + 512 * MiB)} of memory in addition to "
                f"their pools ({size(PROCESS_BYTES)} each), but {size(have)} are available; use fewer ranks (--tp) "
                f"or engines"
            )
        for role in self.sides:
            limit = most if math.isfinite(most) else room // ranks
            if (need := self.pool_bytes(role, least[role])) > limit:
                raise ConfigError(
                    f"the longest prompt ({max(self.workload.prompt_tokens):,} tokens) needs a pool of "
                    f"{size(need)} on each of the {processes[role]} {role} ranks, but {size(limit)} is "
                    f"available for each of {ranks} processes; shorten it with --max-prompt-tokens, use fewer --layers "
                    f"or ranks, or {'raise --pool-mb' if limit < room // ranks else 'free memory'}"
                )
        return {
            role: [max(a, int(b * share)) for a, b in zip(least[role], wanted[role], strict=True)]
            for role in self.sides
        }

    def _wanted(self, needs: Sequence[int], block_bytes: int) -> int:
        """Return the size of one engine's pool of one group; `needs` are those of its requests, largest first."""
        size = max(block_bytes, 1)
        if self.is_open:
            room = OPEN_BYTES if self.options.pool_mb is None else self.options.pool_mb * MiB
            return min(sum(needs), max(needs[0], room // size))
        return min(max(2 * sum(needs[: self.options.concurrency]), 64 * MiB // size), sum(needs))

    def pool_bytes(self, role: str, blocks: Sequence[int]) -> int:
        return max(1, sum(n * size for n, size in zip(blocks, self.block_bytes(role), strict=True)))


def _hosts(options: Options) -> dict[str, str]:
    """Return the address at which each side's engines listen, as the other side reaches it."""
    if options.remote is None:
        if options.remote_host is not None:
            raise ConfigError("--remote-host has no effect without --remote; give a command as well")
        return {"prefill": LOOPBACK, "decode": LOOPBACK}
    there = (options.remote_host or "").strip("[]")
    if not options.remote.split():
        raise ConfigError("--remote is empty; give a command, such as 'ssh HOST asynckv bench worker'")
    if there in ("", "*", "0.0.0.0", "::"):
        raise ConfigError(
            "--remote needs --remote-host: the address of the other host in the data network, at which its engines "
            "listen"
        )
    try:
        # Connecting a UDP socket finds our own address on that route; nothing is sent.
        family, kind, _, _, address = socket.getaddrinfo(there, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own: str = probe.getsockname()[0]
    except OSError as exc:
        raise ConfigError(f"--remote-host {there}: {exc.strerror or exc}; check the address and the route") from exc
    return {role: f"[{x}]" if ":" in x else x for role, x in (("prefill", there), ("decode", own))}


def _workload(options: Options) -> Workload:
    if options.trace is not None:
        if options.prompt_tokens is not None:
            raise ConfigError(
                "--prompt-tokens and --trace were both given, but the trace sets the prompt lengths; choose one"
            )
        found = traced(Path(options.trace), options.requests)
    else:
        found = drawn(options.prompt_tokens or PROMPT_TOKENS, options.requests or 100, options.seed)
    found = found.capped(options.max_prompt_tokens)
    if options.shared_prefix is not None:
        tokens, colon, groups = options.shared_prefix.partition(":")
        if not tokens.isdecimal() or not (groups.isdecimal() or not colon):
            raise ConfigError(
                f"--shared-prefix {options.shared_prefix!r} is neither a length (1024) nor 1024:8 (8 such prefixes)"
            )
        return found.sharing(int(tokens), int(groups or PREFIXES), options.seed)
    return found
