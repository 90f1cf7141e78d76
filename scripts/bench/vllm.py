"""Compare AsyncKVConnector and NixlConnector inside vLLM, in turns: `python -m scripts.bench vllm --help`.

Both move the same requests between two processes that run vLLM's `EngineCore`, scheduler and KV cache manager over CPU
memory (`tests/vllm`), with real NIXL between them; only the connector's class differs. Every page of the caches is
touched before the clock, as in an engine that has served for a while. A forward of the model takes as long as `--step`
says, and other requests decode all the time, because a transfer is paid by them. The bytes of a first request are
compared.

The engines of all contenders are alive at once. Those that are not measured are stopped (SIGSTOP), because
NixlConnector's agents have a progress thread that spins. Every window measures each contender once, the first one in
turns; ratios are taken within a window.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console

from asynckv.errors import ConfigError
from asynckv.tools.bench.machine import environment
from asynckv.tools.bench.report import quantiles
from asynckv.tools.output import consoles, print_table, write_json
from scripts import command
from tests.vllm.engines import Engine, Reply, Server, continued, prompt
from tests.vllm.models import Attention, Model
from tests.vllm.pairs import Pair
from tests.vllm.setups import Connector, Setup

SCHEMA = "asynckv.bench_vllm/2"
BLOCK_TOKENS = 32
CONTENDERS = {"asynckv": Connector(extra={"lease": {"lease_s": 300.0}}), "nixl": Connector("NixlConnector", None)}
QUICK = {"32x16384:16:1": "0:0,3:7", "1x4096:1:64": "0:0"}
ALL = {
    "32x16384:16:1": "0:0,3:7,0:10",
    "32x16384:16:1:random": "0:0",
    "32x16384:16:1:contiguous": "0:0",
    "32x16384:16:16": "3:7",
    "32x16384:16:48": "0:0",
    "1x4096:1:64": "0:0,3:7",
}
"""Cases, and the steps with which each is measured."""
LEAST_REQUESTS, MOST_BYTES = 48, 1 << 30
OTHERS, OTHERS_TOKENS, ALONE_TOKENS = 4, 2048, 40
MORE_WINDOWS, WIDE = 3, 0.2
"""Windows are so many times as many if the quartiles of the ratio are further apart than this share of it."""
RATIOS = ("requests_per_s", "p50_ms", "cpu_ms", "others_tokens_per_s")
COLUMNS = {
    "requests_per_s": "requests/s",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "step_p50_ms": "step p50",
    "step_p99_ms": "step p99",
    "step_most_ms": "longest",
    "cpu_ms": "CPU ms",
    "prefill_cpu_ms": "prefill CPU ms",
    "faults": "faults",
    "prefill_faults": "prefill faults",
    "others_tokens_per_s": "others' tokens/s",
    "others_alone_tokens_per_s": "alone",
}


@dataclass(frozen=True, slots=True)
class Case:
    """Layers, bytes of a block in a layer, blocks of a request, requests in flight, and the order of free blocks.

    Without an order it is what vLLM's pool makes of the windows before. In an engine that starts, blocks follow each
    other, and NIXL and asynckv merge them; later they rarely do.
    """

    layers: int
    block_bytes: int
    blocks: int
    in_flight: int
    order: str = ""

    def __str__(self) -> str:
        order = f":{self.order}" * bool(self.order)
        return f"{self.layers}x{self.block_bytes}:{self.blocks}:{self.in_flight}{order}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse a case such as `32x16384:16:48` or `32x16384:16:48:random`.

        Raises:
            ConfigError: The text is not a case.
        """
        found = re.fullmatch(r"(\d+)x(\d+):(\d+):(\d+)(?::(random|contiguous))?", text.strip())
        layers, size, blocks, in_flight = map(int, found.groups()[:4]) if found else (0, 0, 0, 0)
        if found is None or min(layers, size, blocks, in_flight) < 1 or size % 4096:
            raise ConfigError(f"{text!r} is not a case such as 32x16384:16:48, with blocks of a multiple of 4096 bytes")
        return cls(layers, size, blocks, in_flight, found[5] or "")

    @property
    def bytes(self) -> int:
        """Return the bytes of one request."""
        return self.layers * self.block_bytes * self.blocks

    @property
    def requests(self) -> int:
        """Return the number of requests of a window: some turns of all that are in flight, if they fit into memory."""
        return max(LEAST_REQUESTS, min(4 * self.in_flight, MOST_BYTES // self.bytes))


@dataclass(frozen=True, slots=True)
class Step:
    """The milliseconds that each forward of the model takes in Python, and then outside of it."""

    python_ms: float
    outside_ms: float

    def __str__(self) -> str:
        return f"{self.python_ms:g}:{self.outside_ms:g}"

    @classmethod
    def parse(cls, text: str) -> Step:
        """Parse a step such as `3:7`; 0:0 is idle.

        Raises:
            ConfigError: The text is not a step.
        """
        try:
            python_ms, outside_ms = map(float, text.split(":"))
        except ValueError:
            python_ms = outside_ms = -1.0
        # The others would end before the window does if steps were shorter.
        if min(python_ms, outside_ms) < 0 or not (python_ms + outside_ms == 0 or 1 <= python_ms + outside_ms <= 1000):
            raise ConfigError(
                f"{text!r} is not a step such as 3:7 (ms in Python, ms outside; 0:0, or 1 to 1000 in all)"
            )
        return cls(python_ms, outside_ms)


@dataclass(frozen=True, slots=True)
class Row:
    """A case, the steps of the model in it, and the number of other requests that decode all the time."""

    case: Case
    step: Step
    others: int

    def __str__(self) -> str:
        return f"{self.case}, steps {self.step}, {self.others} others"


class Contender:
    """A prefill and a decode engine of one connector, stopped except in their own windows."""

    def __init__(self, server: Server, name: str, row: Row) -> None:
        case, connector = row.case, CONTENDERS[name]
        self._row, self._tokens = row, case.blocks * BLOCK_TOKENS - 2
        # A block of 32 tokens holds keys and values of two bytes per element.
        model = Model((Attention(4, case.block_bytes // (BLOCK_TOKENS * 4 * 4)),) * case.layers, BLOCK_TOKENS)
        longest = max(self._tokens + 2, OTHERS_TOKENS if row.others else 0) + BLOCK_TOKENS
        setup = Setup(
            "prefill",
            model,
            connector,
            num_blocks=(case.requests + 2) * case.blocks + row.others * longest // BLOCK_TOKENS + 8,
            max_model_len=longest,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            environment={} if connector.module else {"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "600"},
        )
        self._pair = pair = Pair.start(server, setup)
        self._engines = pair.prefill, pair.decode
        pair.generate(prompt(random.Random(0), self._tokens), most=2)
        for engine in self._engines:
            engine.ask("judge", False)
            engine.ask("touch")
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for engine in self._engines:
            os.kill(engine.process.pid, number)

    def window(self, number: int) -> dict[str, float]:
        """Have new prompts prefilled, and time the decode side."""
        self._signal(signal.SIGCONT)
        row, rng, requests = self._row, random.Random(number), self._row.case.requests
        prefill, decode = self._engines
        for engine in self._engines if row.case.order else ():
            engine.ask("arrange", row.case.order, number)
        prompts = [prompt(rng, self._tokens) for _ in range(requests)]
        params = self._pair.prefilled(*prompts)
        decode.ask("model_time", row.step.python_ms / 1e3, row.step.outside_ms / 1e3)
        names = [f"other-{number}-{i}" for i in range(row.others)]
        others = [decode.add(name, prompt(rng, BLOCK_TOKENS // 2), OTHERS_TOKENS) for name in names]
        alone = alone_tokens_per_s(decode, others)
        for engine in self._engines:
            engine.ask("times")
        before, began = said(others), time.perf_counter()
        latencies = loop(decode, f"timed-{number}", prompts, params, row.case.in_flight)
        took, tokens = time.perf_counter() - began, said(others) - before
        times, theirs = decode.ask("times"), prefill.ask("times")
        if any(each.is_done for each in others):
            raise RuntimeError(f"{row}: other requests ended before the window did")
        decode.ask("model_time", 0.0, 0.0)
        decode.ask("abort", names)
        self._pair.settle()
        decode.replies.clear()
        self._signal(signal.SIGSTOP)
        return {
            "requests_per_s": requests / took,
            **quantiles([1e3 * each for each in latencies], p50_ms=0.5, p99_ms=0.99),
            **quantiles([1e3 * each for each in times["steps_s"]], step_p50_ms=0.5, step_p99_ms=0.99, step_most_ms=1.0),
            "cpu_ms": times["cpu_s"] / requests * 1e3,
            "prefill_cpu_ms": theirs["cpu_s"] / requests * 1e3,
            "faults": times["faults"] / requests,
            "prefill_faults": theirs["faults"] / requests,
            "others_tokens_per_s": tokens / took,
            "others_alone_tokens_per_s": alone,
        }


def said(replies: Sequence[Reply]) -> int:
    """Return the number of tokens of all replies so far."""
    return sum(len(reply.tokens) for reply in replies)


def alone_tokens_per_s(engine: Engine, others: Sequence[Reply]) -> float:
    """Wait until each request has said some tokens, and return the rate of all of them meanwhile."""
    if not others:
        return 0.0
    engine.wait(lambda: all(each.tokens for each in others), what="for the others")
    before, began = said(others), time.perf_counter()
    engine.wait(lambda: said(others) - before >= ALONE_TOKENS * len(others), what="for tokens of the others")
    return (said(others) - before) / (time.perf_counter() - began)


def loop(engine: Engine, name: str, prompts: Sequence[list[int]], params: Sequence[Any], in_flight: int) -> list[float]:
    """Keep `in_flight` requests in flight until all are done, and return their latencies."""
    left = list(enumerate(zip(prompts, params, strict=True)))[::-1]
    flying: dict[int, tuple[Reply, float]] = {}
    latencies = []
    while left or flying:
        while left and len(flying) < in_flight:
            number, (tokens, each) = left.pop()
            flying[number] = engine.add(f"{name}-{number}", tokens, 1, each), time.perf_counter()
        engine.wait(lambda: any(reply.is_done for reply, _ in flying.values()), 120.0, "for a request")
        now = time.perf_counter()
        for number in [number for number, (reply, _) in flying.items() if reply.is_done]:
            reply, began = flying.pop(number)
            if reply.tokens != continued(prompts[number], 1):
                raise RuntimeError(f"request {number} said {reply}")
            latencies.append(now - began)
    return latencies


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median and both quartiles."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {"median": median, "low": low, "high": high}


def ratios(taken: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the quartiles of asynckv's figures over NixlConnector's, window by window; no ratio where one is 0."""
    pairs = [*zip(taken["asynckv"], taken["nixl"], strict=True)] if len(taken) == len(CONTENDERS) else []
    return {
        key: quartiles([mine[key] / theirs[key] for mine, theirs in pairs])
        for key in RATIOS
        if pairs and all(theirs[key] for _, theirs in pairs)
    }


def is_wide(found: Mapping[str, Mapping[str, float]]) -> bool:
    """Return True if the quartiles of a ratio of requests/s are so far apart that more windows are needed."""
    ratio = found.get("requests_per_s")
    return ratio is not None and ratio["high"] - ratio["low"] > WIDE * ratio["median"]


def measure(server: Server, row: Row, names: Sequence[str], windows: int) -> dict[str, Any]:
    """Measure all contenders in turns, and summarise the windows; the first one is not counted."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    running = {name: Contender(server, name, row) for name in names}
    most = windows
    for number in itertools.count(-1):
        if number == windows and is_wide(ratios(taken)):
            most = MORE_WINDOWS * windows
        if number == most:
            break
        told = []
        for name in names[:: 1 if number % 2 else -1]:
            found = running[name].window(number)
            told.append(f"{name} {found['requests_per_s']:.3g}/s")
            if number >= 0:
                taken[name].append(found)
        print(f"{row}: window {number + 1} of {most}: {', '.join(told)}", file=sys.stderr, flush=True)
    server.end()
    return {
        "case": str(row.case),
        "step": str(row.step),
        "others": row.others,
        "windows": most,
        "contenders": {name: {key: quartiles([w[key] for w in taken[name]]) for key in COLUMNS} for name in names},
        "ratios": ratios(taken),
    }


def machine() -> dict[str, Any]:
    """Return a description of this machine, once nothing is measured any more: importing vLLM takes seconds of CPU."""
    import vllm

    versions = {name: metadata.version(name) for name in ("nixl", "torch")}
    return environment() | {"versions": {"vllm": vllm.__version__} | versions}


def compare(
    cases: Annotated[
        str | None,
        typer.Option(help="LAYERSxBLOCK_BYTES:BLOCKS:IN_FLIGHT[:random or :contiguous blocks], comma-separated."),
    ] = None,
    step: Annotated[
        str | None, typer.Option(help="PYTHON:OUTSIDE, ms of each forward in Python and then outside; comma-separated.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Measure all cases that the documentation shows.")] = False,
    others: Annotated[int, typer.Option(help="Other requests that decode all the time; none with steps 0:0.")] = OTHERS,
    contenders: Annotated[str, typer.Option(help="Contenders, comma-separated.")] = ",".join(CONTENDERS),
    windows: Annotated[int, typer.Option(help="Windows of each row; three times as many if the ratio varies.")] = 10,
    json: command.TableJson = None,
) -> int:
    """Measure connectors inside vLLM on the same requests, in turns; needs the environment of `tox run -e vllm`."""
    names = command.chosen([name.strip() for name in contenders.split(",")], CONTENDERS, "contender")
    command.check(1 <= windows <= 100, f"--windows {windows} is outside 1 ... 100")
    command.check(0 <= others <= 64, f"--others {others} is outside 0 ... 64")
    console, _ = consoles(json)
    rows = chosen(cases, step, all_, others)
    server, load = Server(), os.getloadavg()
    try:
        measured = [measure(server, row, names, windows) for row in rows]
    finally:
        server.close()
    report = {
        "schema": SCHEMA,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "load_before": load,
        "load_after": os.getloadavg(),
        "rows": measured,
    }
    write_json(json, report)
    show(measured, console)
    console.print(f"load average {load[0]:.1f} before, {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores")
    return 0


def chosen(cases: str | None, step: str | None, is_all: bool, others: int) -> list[Row]:
    """Return the rows to measure.

    Raises:
        ConfigError: A case or a step is none, or `--all` is given beside them.
    """
    command.check(not (is_all and (cases or step)), "--all chooses cases and steps itself")
    plan = ALL if is_all else QUICK
    if cases or step:
        plan = dict.fromkeys((cases or ",".join(QUICK)).split(","), step or "0:0")
    pairs = [(Case.parse(case), Step.parse(each)) for case, steps in plan.items() for each in steps.split(",")]
    return [Row(case, each, others if str(each) != "0:0" else 0) for case, each in pairs]


def show(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print medians of the windows, and the ratios with their quartiles."""
    figures, ratios = [], []
    for row in rows:
        name = f"{row['case']} {row['step']}"
        for contender, each in row["contenders"].items():
            figures.append((name, contender, *(f"{each[key]['median']:.3g}" for key in COLUMNS)))
        found = [row["ratios"].get(key) for key in RATIOS]
        cells = [f"{each['median']:.2f} ({each['low']:.2f} to {each['high']:.2f})" if each else "" for each in found]
        ratios.append((name, str(row["windows"]), *cells))
    console.print("Medians of the windows")
    print_table(console, ("row", "connector", *COLUMNS.values()), figures, texts=(0, 1))
    console.print("asynckv over NixlConnector, window by window: median (quartiles)")
    print_table(console, ("row", "windows", *RATIOS), ratios)


EPILOG = """
[bold]Columns[/bold]  requests per second; latency from a request's arrival in the decode engine to its first token;
time of a step on the decode worker's thread, without what the model takes outside of Python (median, 99th percentile,
longest); CPU of the decode process and of the prefill process per request, and minor page faults; tokens per second of
the other requests, and the same before the window, without transfers.

[bold]Exit status[/bold]  0 measured, 1 a request failed, 2 bad input, 130 Ctrl-C
"""
main = command.script(compare, EPILOG)
