"""The printed report of a run: the verdict in one line, then throughput, latencies, costs and configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from asynckv.arguments import without_control
from asynckv.tools.bench import floor, head_start, report
from asynckv.tools.output import print_table


class Part(NamedTuple):
    """Rows that belong together: each a name and a text or, with a head, the cells of a table."""

    rows: Sequence[tuple[str, ...]]
    head: tuple[str, ...] = ()
    texts: Sequence[int] = (0,)
    notes: Sequence[str] = ()


def verdict(found: dict[str, Any]) -> str:
    requests, total = found["requests"], found["config"]["requests"]
    if report.is_good(found):
        is_full = found["config"]["verify"] == "full"
        compared = "every byte verified" if is_full else "no byte compared (--verify off)"
        return f"good: {requests['completed']:,} of {total:,} requests completed, {compared}, no block leaked"
    faults = report.faults(found)[:6]
    incomplete = f"only {requests['completed']:,} of {total:,} requests were completed and verified"
    return f"BAD: {'; '.join(faults) or incomplete}"


def parts(found: dict[str, Any]) -> list[Part]:
    beside_floor, notes = floor.table(found)
    floors = [Part(beside_floor, floor.HEAD, notes=notes)] if beside_floor or notes else []
    turns = [Part(rows, head_start.HEAD)] if (rows := head_start.rows(found)) else []
    return [_reached(found), *turns, _latencies(found), *_histogram(found), _cost(found), *floors, _run(found)]


def show(found: dict[str, Any], console: Console) -> None:
    console.print(escape(without_control(verdict(found))), style="bold green" if report.is_good(found) else "bold red")
    for text in [*found["problems"], *(f"{n} x {cause}" for cause, n in found["errors"].items())]:
        console.print(f"  ! {escape(without_control(text))}", style="red")
    for text in found["warnings"]:
        console.print(f"  ! {escape(without_control(text))}", style="yellow")
    for part in parts(found):
        console.print()
        rows = [tuple(map(without_control, row)) for row in part.rows]
        if part.head:
            print_table(console, part.head, rows, texts=part.texts)
        else:
            table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
            table.add_column(style="bold", min_width=14, no_wrap=True)
            table.add_column()
            for row in rows:
                table.add_row(*map(escape, row))
            console.print(table)
        for note in part.notes:
            console.print(Padding(f"! {escape(note)}", (0, 0, 0, 2)), style="yellow")


def _rows(said: dict[str, str]) -> Part:
    return Part([(name, text) for name, text in said.items() if text])


def _reached(found: dict[str, Any]) -> Part:
    requests, moved, prefix = found["requests"], found["bytes"], found["prefix"]
    total = found["config"]["requests"]
    apart = f", and {requests['read_nothing']:,} that read nothing" if requests["read_nothing"] else ""
    counts = [f"{requests['completed']:,} of {total:,} completed", f"{requests['failed']:,} failed"]
    counts += [f"{left:,} never started"] if (left := total - requests["submitted"]) else []
    compared = f"{moved['verified'] / moved['wanted']:.1%} verified" if moved["wanted"] else "none wanted"
    shared = (
        f"{prefix['hit_rate']:.1%} of {prefix['prompt_tokens']:,} prompt tokens were cached at the reader; "
        f"{prefix['lent_shared']:,} of {prefix['lent_blocks']:,} lent blocks were lent to another request as well"
    )
    blocks = "{prefill_leaked:,} leaked on prefill, {decode_leaked:,} on decode, {quarantined:,} in quarantine"
    speed = "{gbytes_per_s:.3f} GB/s, {requests_per_s:,.1f} requests/s".format(**found["throughput"]) + apart
    return _rows(
        {
            "throughput": "" if "head_start" in found else speed,  # pieces move outside of the windows
            "requests": ", ".join(counts),
            "prefixes": shared if prefix["shared"] else "",
            "bytes": f"{moved['moved']:,} moved, {moved['wanted']:,} wanted, {compared}, {moved['wrong']:,} wrong",
            "blocks": blocks.format(**found["blocks"]),
        }
    )


_HEAD = ("latency", "p50", "p90", "p99", "max")
LEAST_P99 = 200
"""Requests that a p99 needs: of fewer, one in a hundred is a single request, which `max` shows already."""


def _latencies(found: dict[str, Any]) -> Part:
    """Return the latencies of requests, and below them the time of each phase of a pull on a rank."""
    number = sum(x["count"] for x in found["latency_histogram"])
    if not number:
        return Part([("nothing was read", *[""] * 4)], _HEAD)
    clocks = [(f"from the {found['schedule']['clock']}", found["latency_s"])]
    if found["announced_s"]["max"]:
        clocks.append(("  if announced before", found["announced_s"]))
    if found["config"]["arrivals"] != "closed":
        clocks.append(("from the call of pull", found["pull_s"]))
    rows = [(name, *(_seconds(q[at]) for at in _HEAD[1:])) for name, q in clocks]
    # Skip phases without time, such as handshakes, which the warm-up has done.
    for name, q in found["phases_s"].items():
        if q["p99"] and name != "release":
            rows.append((f"  {name}", _seconds(q["p50"]), "", _seconds(q["p99"]), ""))
    release = found["phases_s"]["release"]
    rows.append(("release (after the pull)", _seconds(release["p50"]), "", _seconds(release["p99"]), ""))
    if number < LEAST_P99:
        return Part([(*row[:3], *row[4:]) for row in rows], (f"latency ({number})", *_HEAD[1:3], *_HEAD[4:]))
    return Part(rows, _HEAD)


def _histogram(found: dict[str, Any]) -> list[Part]:
    """Return the distribution of latencies; its ranges have equal ratios, so a long tail does not hide the rest."""
    bars = found["latency_histogram"]
    if len(bars) < 2:
        return []
    most, total = max(bar["count"] for bar in bars), sum(bar["count"] for bar in bars)
    rows = []
    for bar in bars:
        count, share = bar["count"], bar["count"] / total
        rows.append((_seconds(bar["up_to_s"]), f"{count:,}", f"{share:.1%}", "#" * math.ceil(24 * count / most)))
    return [Part(rows, ("latency up to", "requests", "share", "histogram"), texts=(0, 3))]


def _cost(found: dict[str, Any]) -> Part:
    lag, warmup, windows, it = found["loop_lag_s"], found["warmup"], found["windows"], found["schedule"]
    busy = f" (not quiet: above {floor.QUIET_S * 1e3:.0f} ms)" if lag["p99"] > floor.QUIET_S else ""
    several = f", in {windows['count']:,} measurement windows" if windows["count"] > 1 else ""
    warm = "none: the latencies include the first connections"
    if found["config"]["warmup"]:
        slowest = _seconds(warmup["max_latency_s"])
        warm = f"slowest pull {slowest} (with the first connections), {warmup['failed']:,} failed; not in the figures"
    late = ", ".join(f"{name} {_seconds(value)}" for name, value in it["late_s"].items())
    schedule = (
        f"{it['scheduled_per_s']:,.1f} requests/s scheduled, {it['achieved_per_s']:,.1f} achieved; pull was called "
        f"late by {late}"
    )
    return _rows(
        {
            "measured": f"{windows['seconds']:.3f} s{several}",
            "schedule": "" if found["config"]["arrivals"] == "closed" else schedule,
            "CPU": "prefill {prefill:.2f} s, decode {decode:.2f} s".format(**found["cpu_s"]),
            "event loop lag": f"p99 {_seconds(lag['p99'])}, max {_seconds(lag['max'])}{busy}" if lag["p99"] else "",
            "descriptors": "{planned:,} planned, {posted:,} posted after merging".format(**found["descriptors"]),
            "warm-up": warm,
        }
    )


def _run(found: dict[str, Any]) -> Part:
    config, environment = found["config"], found["environment"]
    state = f", {config['state_bytes']:,} per state" if config["state_bytes"] else ""
    capped = config["prompts_capped"]
    return _rows(
        {
            "model": f"{config['model']}, {config['layers']} layers, {config['token_bytes']:,} bytes per token{state}",
            "prefill": _side(config["prefill"]),
            "decode": _side(config["decode"]),
            "workload": _workload(config, found["windows"]),
            "capped": f"{capped:,} prompts were cut by --max-prompt-tokens" if capped else "",
            "transport": f"{environment.get('ucx_transports', '?')}, error mode "
            f"{environment.get('ucx_error_handling_mode', '?')}",
        }
    )


def _workload(config: dict[str, Any], windows: dict[str, Any]) -> str:
    whole = config["prompts_wholly_cached"]
    cached = f"; {whole:,} of {config['requests']:,} are cached whole and read nothing" if whole else ""
    has_hit = config["prefix_cache"] is None and config["prefix_hit"] not in ("0", "0%")
    hit = f", prefix hit {config['prefix_hit']}" if has_hit else ""
    match config["arrivals"]:
        case "closed":
            load = f"{config['concurrency']} in flight"
            # At the beginning and end of every measurement window, fewer requests are in flight.
            if (mean := windows["mean_in_flight"]) < 0.75 * config["concurrency"] and mean:
                load = f"up to {load}, {mean:.1f} on average"
        case "trace":
            load = f"arrivals of the trace at speed {config['speed']:g}"
        case kind:
            load = f"{kind} arrivals at {config['rate']:g}/s"
    engines = config["engines"]
    announced = "; announced: claims are granted before each measurement window opens" if config["announced"] else ""
    several = "; engines: {prefill} prefill, {decode} decode".format(**engines) if sum(engines.values()) > 2 else ""
    return (
        f"{config['prompt_tokens']} tokens{hit}{cached}; {load}, blocks {config['block_order']}, seed "
        f"{config['seed']}{several}{announced}"
    )


def _seconds(value: float) -> str:
    """Return a time in milliseconds, or in microseconds if it is below 0.1 ms."""
    return f"{value * 1e3:,.2f} ms" if value >= 1e-4 or not value else f"{value * 1e6:.1f} µs"


def _side(side: dict[str, Any]) -> str:
    stages = f", pp {side['pp']}" if side["pp"] > 1 else ""
    stages += f", dcp {side['dcp']} by {side['cp_interleave']}" if side.get("dcp", 1) > 1 else ""
    ratio = f" of {side['ratio']} kernel blocks" if side["ratio"] > 1 else ""
    return f"tp {side['tp']}{stages}, {side['block_size']} tokens per block{ratio}, {side['order']}"
