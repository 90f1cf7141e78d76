"""Compare AsyncKVConnector and NixlConnector inside vLLM, in turns: `python -m scripts.bench vllm --help`.

Both move the same requests between two processes that run vLLM's `EngineCore`, scheduler and KV cache manager over CPU
memory (`tests/vllm`), with real NIXL between them; only the connector's class differs. The model takes no time, so a
step uses the worker's thread only for the connector and vLLM's bookkeeping. The bytes of a first request are compared.

Every round restarts each contender's engines, with another contender first. They never run at the same time, because
NixlConnector's agents have a progress thread that spins.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from asynckv.errors import ConfigError
from scripts import command
from tests.vllm.engines import Engine, Reply, Server, continued, prompt
from tests.vllm.models import Attention, Model
from tests.vllm.pairs import Pair
from tests.vllm.setups import Connector, Setup

SCHEMA = "asynckv.bench_vllm/1"
BLOCK_TOKENS = 32
CONTENDERS = {"asynckv": Connector(), "nixl": Connector("NixlConnector", None)}
QUICK = "1x4096:1:64,32x16384:16:1,32x16384:16:48"
LEAST_REQUESTS = 48
LEASES = {"lease": {"lease_s": 300.0}}
KEYS = ("requests_per_s", "gbytes_per_s", "p50_ms", "p99_ms", "step_p50_ms", "step_p99_ms", "step_most_ms", "cpu_us")


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table: layers, bytes of a block in a layer, blocks of a request, and requests in flight."""

    layers: int
    block_bytes: int
    blocks: int
    in_flight: int

    def __str__(self) -> str:
        return f"{self.layers}x{self.block_bytes}:{self.blocks}:{self.in_flight}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse a case such as `32x16384:16:48`.

        Raises:
            ConfigError: The text is not a case.
        """
        try:
            shape, blocks, in_flight = text.strip().split(":")
            layers, block_bytes = shape.split("x")
            case = cls(int(layers), int(block_bytes), int(blocks), int(in_flight))
        except ValueError:
            case = cls(0, 0, 0, 0)
        if min(case.layers, case.blocks, case.in_flight) < 1 or case.block_bytes % 4096 or not case.block_bytes:
            raise ConfigError(f"{text!r} is not a case such as 32x16384:16:48, with blocks of a multiple of 4096 bytes")
        return case

    @property
    def requests(self) -> int:
        """Return the number of requests that a round measures."""
        return max(LEAST_REQUESTS, 4 * self.in_flight if self.block_bytes * self.blocks * self.layers < 1 << 20 else 0)

    @property
    def bytes(self) -> int:
        """Return the bytes of one request."""
        return self.layers * self.block_bytes * self.blocks


def measure(server: Server, connector: Connector, case: Case, seed: int) -> dict[str, Any]:
    """Start two engines, prefill everything, and time the decode side."""
    # A block of 32 tokens holds keys and values of two bytes per element.
    model = Model((Attention(4, case.block_bytes // (BLOCK_TOKENS * 4 * 4)),) * case.layers, BLOCK_TOKENS)
    if connector.module:
        connector = Connector(connector.name, connector.module, LEASES)
    tokens_each = case.blocks * BLOCK_TOKENS - 2
    setup = Setup(
        "prefill",
        model,
        connector,
        num_blocks=(case.requests + 2) * case.blocks + 8,
        max_model_len=max(64, (case.blocks + 1) * BLOCK_TOKENS),
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        environment={} if connector.module else {"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "600"},
    )
    pair = Pair.start(server, setup)
    rng = random.Random(seed)
    pair.generate(prompt(rng, tokens_each), most=2)
    for engine in (pair.prefill, pair.decode):
        engine.ask("judge", False)
    prompts = [prompt(rng, tokens_each) for _ in range(case.requests)]
    params = pair.prefilled(*prompts)
    for engine in (pair.prefill, pair.decode):
        engine.ask("times")
    began = time.perf_counter()
    latencies = loop(pair.decode, prompts, params, case.in_flight)
    took = time.perf_counter() - began
    times, theirs = pair.decode.ask("times"), pair.prefill.ask("times")
    server.end()
    steps = sorted(times["steps_s"])
    return {
        "requests_per_s": case.requests / took,
        "gbytes_per_s": case.requests * case.bytes / took / 1e9,
        "p50_ms": quantile(latencies, 0.5) * 1e3,
        "p99_ms": quantile(latencies, 0.99) * 1e3,
        "step_p50_ms": quantile(steps, 0.5) * 1e3,
        "step_p99_ms": quantile(steps, 0.99) * 1e3,
        "step_most_ms": steps[-1] * 1e3,
        "steps": len(steps),
        "cpu_us": times["cpu_s"] / case.requests * 1e6,
        "prefill_cpu_us": theirs["cpu_s"] / case.requests * 1e6,
    }


def loop(engine: Engine, prompts: Sequence[list[int]], params: Sequence[Any], in_flight: int) -> list[float]:
    """Keep `in_flight` requests in flight until all are done, and return their sorted latencies."""
    left = list(enumerate(zip(prompts, params, strict=True)))[::-1]
    flying: dict[int, tuple[Reply, float]] = {}
    latencies = []
    while left or flying:
        while left and len(flying) < in_flight:
            number, (tokens, each) = left.pop()
            flying[number] = engine.add(f"timed-{number}", tokens, 1, each), time.perf_counter()
        engine.wait(lambda: any(reply.is_done for reply, _ in flying.values()), 120.0, "for a request")
        now = time.perf_counter()
        for number in [number for number, (reply, _) in flying.items() if reply.is_done]:
            reply, began = flying.pop(number)
            if reply.tokens != continued(prompts[number], 1):
                raise RuntimeError(f"request {number} said {reply}")
            latencies.append(now - began)
    return sorted(latencies)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the sorted values lies."""
    return values[min(len(values) - 1, int(len(values) * share))]


def compare(
    cases: Annotated[str, typer.Option(help="LAYERSxBLOCK_BYTES:BLOCKS:IN_FLIGHT, comma-separated.")] = QUICK,
    contenders: Annotated[str, typer.Option(help="Contenders, comma-separated.")] = ",".join(CONTENDERS),
    rounds: Annotated[int, typer.Option(help="Measurements of each contender.")] = 3,
    json_: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the report here.")] = None,
) -> int:
    """Measure connectors inside vLLM on the same requests, in turns; needs the environment of `tox run -e vllm`."""
    chosen = [Case.parse(text) for text in cases.split(",")]
    names = [name.strip() for name in contenders.split(",")]
    command.check(not (set(names) - set(CONTENDERS)), f"--contenders: choose from {', '.join(CONTENDERS)}")
    command.check(1 <= rounds <= 100, f"--rounds {rounds} is outside 1 ... 100")
    server = Server()
    measured: dict[str, dict[str, list[dict[str, Any]]]] = {str(case): {name: [] for name in names} for case in chosen}
    load = os.getloadavg()
    try:
        for turn in range(rounds):
            for case in chosen:
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    measured[str(case)][name].append(measure(server, CONTENDERS[name], case, turn))
    finally:
        server.close()
    rows = []
    for case in chosen:
        for name in names:
            taken = measured[str(case)][name]
            medians = {key: statistics.median(each[key] for each in taken) for key in taken[0]}
            medians["step_most_ms"] = max(each["step_most_ms"] for each in taken)
            rows.append({"case": asdict(case), "contender": name, "rounds": taken} | medians)
    report = {"schema": SCHEMA, "cores": os.cpu_count(), "load_before": load, "load_after": os.getloadavg()}
    if json_:
        Path(json_).write_text(json.dumps(report | {"rows": rows}, indent=1))
    show(rows)
    print(f"load average {load[0]:.1f} before, {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores")
    return 0


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print medians over rounds; the longest step is that of all rounds."""
    table = Table(*("case", "connector", *KEYS))
    for row in rows:
        case = Case(**row["case"])
        table.add_row(str(case), row["contender"], *(f"{row[key]:.3g}" for key in KEYS))
    (Console() if sys.stdout.isatty() else Console(width=160)).print(table)


EPILOG = """
[bold]Columns[/bold]  requests per second; latency from a request's arrival in the decode engine to its first token;
time of a step on the decode worker's thread (median, 99th percentile, longest of all rounds); CPU of the decode process
per request.

[bold]Exit status[/bold]  0 measured, 1 a request failed, 2 bad input, 130 Ctrl-C
"""
main = command.script(compare, EPILOG)
