"""The measured figures in README, docs/performance.md and docs/versus.md, from docs/figures.json."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from scripts.draw.drawing import DOCS, between, table

Report = Mapping[str, Any]
PERFORMANCE, VERSUS, README = DOCS / "performance.md", DOCS / "versus.md", DOCS.parent / "README.md"
RIVALS = {"vllm": "NixlConnector as shipped", "vllm-no-progress-thread": "without NIXL's progress thread"}
JUDGED = {
    "requests_per_s": "requests/s",
    "p50_ms": "time to the first token",
    "others_tokens_per_s": "tokens/s of the others",
}
INSIDE = {
    "requests_per_s": "requests/s",
    "p50_ms": "first token, p50 ms",
    "step_p99_ms": "step p99 ms",
    "cpu_ms": "CPU ms",
    "others_tokens_per_s": "tokens/s of others",
}
SMALL = {"requests_per_s": "requests/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms", "decode_us": "decode CPU µs"}
BULK = {"gbytes_per_s": "GB/s", "of_floor": "share of the raw loop", "floor_gbytes_per_s": "its GB/s"}
ENGINE = {
    "handshake.ms": "handshake with a new peer, 64 layers, 20,000 blocks: ms",
    "handshake.wire_kib": "the same, on the wire: KiB",
    "idle.cpu_percent": "100 connected peers, nothing owed, all CPU: % of a core",
    "memory.kib_per_request": "memory of a request in flight, both sides: KiB",
    "flight.ratio_1024": "CPU per request with 1,024 in flight, relative to 64",
    "flight.ratio_10000": "the same with 10,000 in flight",
    "peers.ratio_256": "CPU per request with one in flight at each of 256 peers, relative to 16 peers",
}


def files() -> dict[Path, str]:
    """Return the three pages with all their marks filled."""
    recorded = json.loads((DOCS / "figures.json").read_text())
    made: dict[Path, str] = {}
    for page, marks in MARKS.items():
        for name, (sections, render) in marks.items():
            text = render(*(recorded[section]["report"] for section in sections))
            if name != "answers":  # whose sections follow on the same page
                text += "".join(f"\n{origin(recorded[section])}\n" for section in sections)
            made |= between(page, name, text, made.get(page))
    return made


def origin(section: Mapping[str, Any]) -> str:
    """Say when, where and by which command a section was recorded."""
    machine, load = section["machine"], section["load"] and "{:g} before, {:g} after".format(*section["load"])
    versions = ", ".join(f"{name} {each}" for name, each in machine["versions"].items() if name != "asynckv_source")
    where = f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}"
    return f"Recorded {section['date']} on {where}, {versions}; load {load or 'not recorded'}: `{section['command']}`"


def figure(value: float) -> str:
    """Write a figure with three digits."""
    value = float(f"{value:.3g}")
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:g}"


def rounds(values: Sequence[float] | None) -> str:
    """Write the median of all rounds, with the least and the largest if they look different; or nothing."""
    if not values:
        return ""
    middle, low, high = map(figure, (median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def interval(ratio: Mapping[str, float]) -> str:
    """Write a ratio with its interval."""
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def spread(values: Iterable[float]) -> str:
    """Write the least and the largest value."""
    values = sorted(values)
    low, high = f"{values[0]:.2f}", f"{values[-1]:.2f}"
    return low if low == high else f"{low} to {high}"


def verdict(rows: Sequence[tuple[str, Mapping[str, float]]], *, is_less_better: bool = False) -> str:
    """Say in how many rows asynckv is ahead, and name those in which it is not, with their ratios."""
    ahead: list[str] = []
    behind: list[str] = []
    unsure: list[str] = []
    for name, ratio in rows:
        is_more, is_less = ratio["low"] > 1, ratio["high"] < 1
        is_ahead, is_behind = (is_less, is_more) if is_less_better else (is_more, is_less)
        (ahead if is_ahead else behind if is_behind else unsure).append(f"{name} ({ratio['median']:.2f})")
    text = f"ahead in {len(ahead)} of {len(rows)} rows"
    return text + "".join(f", {word}: {'; '.join(x)}" for word, x in (("behind", behind), ("undecided", unsure)) if x)


def verdicts(report: Report, where: str, keys: Mapping[str, str]) -> str:
    """Return a conclusion about each kind of ratio, as a list."""
    lines = []
    for key, told in keys.items():
        rows = [(", ".join(named(row)), row["ratios"][key]) for row in report["rows"] if key in row["ratios"]]
        lines.append(f"- {where}, {told}: {verdict(rows, is_less_better=key.endswith('_ms'))}.\n")
    return "".join(lines)


def named(row: Report) -> tuple[str, str]:
    """Return the names of a row's request and step: its case is `LAYERSxBLOCK_BYTES:BLOCKS:IN_FLIGHT[:ORDER]`."""
    layers, block, blocks, in_flight, *order = re.split("[x:]", row["case"])
    number = int(layers) * int(block) * int(blocks)
    size = f"{number >> 20} MiB" if number >> 20 else f"{number >> 10} KiB"
    if ":" in row["step"]:
        python, outside = row["step"].split(":")
        step = "idle" if row["step"] == "0:0" else f"{python} + {outside} ms"
    else:
        step = row["step"]
    return ", ".join([size, f"{in_flight} in flight", *order]), step


def bench(columns: Mapping[str, str]) -> Callable[[Report], str]:
    """Return a renderer of a section of `asynckv bench`, with the titles of these keys."""

    def render(report: Report) -> str:
        rows = [(name, *(rounds(row.get(key)) for key in columns), row["options"]) for name, row in rows_of(report)]
        return table(f"| | {' | '.join(columns.values())} | options |", rows)

    return render


def rows_of(report: Report) -> list[tuple[str, Report]]:
    """Return the names and rows of `asynckv bench`, with their options as code."""
    return [(x, row | {"options": f"`{row['options']}`" * bool(row["options"])}) for x, row in report["rows"].items()]


def shares_of(report: Report) -> dict[str, float]:
    """Return the rate of each pair of engines, relative to equal ones with the decode side's TP and order."""
    rates = {row["options"]: row["requests_per_s"] for row in report["rows"].values()}
    equal = {
        options: re.sub(r"--block-size \S+ ?|--tp 1(?!\S) ?", "", re.sub(r"\w+:", "", options)) for options in rates
    }
    return {
        name: median(mine / theirs for mine, theirs in zip(rates[x], rates[equal[x].strip()], strict=True))
        for name, x in ((name, row["options"]) for name, row in report["rows"].items())
        if equal[x].strip() != x
    }


def differ(report: Report) -> str:
    """Return the table of engines that differ."""
    shares = shares_of(report)
    rows = [
        (name, rounds(row["requests_per_s"]), f"{shares.get(name, 1.0):.2f}", row["options"])
        for name, row in rows_of(report)
    ]
    return table("| engines; bytes of a piece, reads | requests/s | relative to the equal case | options |", rows)


def beside(report: Report) -> str:
    """Return the table of `vs_vllm`."""
    rows = []
    for row in report["rows"]:
        cells = [(figure(row["requests_per_s"][name]), interval(row["ratios"][name])) for name in RIVALS]
        rows.append((*named(row), figure(row["requests_per_s"]["asynckv"]), *cells[0], *cells[1]))
    titles = "".join(f" {name} | ratio |" for name in RIVALS.values())
    told = verdicts(report, "Outside of vLLM's scheduler, requests/s", RIVALS)
    return table(f"| request | steps | asynckv requests/s |{titles}", rows) + f"\n{told}"


def inside(report: Report) -> str:
    """Return the table of `vllm`, with asynckv's figure and NixlConnector's in each cell."""
    rows = []
    for row in report["rows"]:
        both = [row["contenders"][name] for name in ("asynckv", "nixl")]
        pairs = [[each[key]["median"] for each in both if key in each] for key in INSIDE]
        cells = ("; ".join(map(figure, pair)) if any(pair) else "" for pair in pairs)
        rows.append((*named(row), *cells, interval(row["ratios"]["requests_per_s"])))
    head = f"| request | step | {' | '.join(INSIDE.values())} | requests/s, ratio |"
    return table(head, rows) + f"\n{verdicts(report, 'Inside vLLM', JUDGED)}"


def alone(report: Report) -> str:
    """Return the table of `alone`."""
    rows = []
    for name, bare in (("asynckv", "bare"), ("asynckv, announced", "bare, announced")):
        times = (figure(median(report["p50_us"][way])) for way in (name, bare))
        rows.append((name, *times, spread(report["ratios"][name])))
    goal = f"ratio (goal if not announced: {report['goal']:g})"
    return table(f"| one request of 8 KiB | p50 µs | bare ZMQ and NIXL | {goal} |", rows)


def engine(report: Report) -> str:
    """Return the table of `engine`."""
    found, goals = report["figures"], report["goals"]
    rows = ((told, figure(found[name]), f"{goals[name]:g}") for name, told in ENGINE.items() if name in found)
    return table("| | measured | goal |", rows)


def answers(small: Report, bulk: Report, unequal: Report, within: Report, single: Report, idle: Report) -> str:
    """Answer the questions of the first table."""
    ratio = {key: spread(r["ratios"][key]["median"] for r in within["rows"] if key in r["ratios"]) for key in JUDGED}
    both = [[r["contenders"][name] for r in within["rows"]] for name in ("asynckv", "nixl")]
    step, theirs = (figure(max(r["step_p99_ms"]["median"] for r in rows if "step_p99_ms" in r)) for rows in both)
    rate = figure(median(small["rows"]["64 in flight"]["requests_per_s"]))
    floor, kept = (
        spread(x) for x in ((median(r["of_floor"]) for r in bulk["rows"].values()), shares_of(unequal).values())
    )
    told = {
        "inside vLLM": f"requests/s are {ratio['requests_per_s']} times those of NixlConnector, the time to the first "
        f"token {ratio['p50_ms']} times, tokens/s of other requests {ratio['others_tokens_per_s']} times; a step takes "
        f"at most {step} ms (p99), with NixlConnector {theirs} ms",
        "small requests": f"{rate} per second on a decode rank; one alone takes {spread(single['ratios']['asynckv'])} "
        "times as long as with bare ZMQ and NIXL",
        "bulk, beside the floor": f"{floor} of a bare NIXL loop on one thread",
        "engines that differ": f"{kept} of the throughput of equal ones",
        "many at once, and idle": f"101 idle engines take {figure(idle['figures']['idle.cpu_percent'])} % of a core",
    }
    rows = ((f"[{x}](#{x.lower().replace(',', '').replace(' ', '-')})", text) for x, text in told.items())
    return table("| section | short answer |", rows)


MARKS: dict[Path, dict[str, tuple[tuple[str, ...], Callable[..., str]]]] = {
    README: {"report": (("report",), lambda report: "\n".join(["```text", *report["text"], "```", ""]))},
    PERFORMANCE: {
        "answers": (("small", "bulk", "differ", "inside", "alone", "engine"), answers),
        "inside": (("inside",), inside),
        "beside": (("beside",), beside),
        "small": (("small",), bench(SMALL)),
        "alone": (("alone",), alone),
        "bulk": (("bulk",), bench(BULK)),
        "differ": (("differ",), differ),
        "engine": (("engine",), engine),
    },
    VERSUS: {
        "versus": (
            ("inside", "beside"),
            lambda within, outside: (
                verdicts(within, "Inside vLLM", JUDGED)
                + verdicts(outside, "Outside of vLLM's scheduler, requests/s", RIVALS)
            ),
        )
    },
}
"""The marks of each page, and the recorded sections that they show; their origins are told below."""
