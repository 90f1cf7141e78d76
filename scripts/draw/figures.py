"""The measured figures in README, docs/performance.md and docs/versus.md, from docs/figures.json."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.draw.drawing import DOCS, between, table

Report = Mapping[str, Any]
Compared = tuple[str, Mapping[str, float]]
"""The name of a row, and the median, low and high of a ratio in it."""

PERFORMANCE, VERSUS, README = DOCS / "performance.md", DOCS / "versus.md", DOCS.parent / "README.md"
RIVALS = {"vllm": "NixlConnector as shipped", "vllm-no-progress-thread": "without NIXL's progress thread"}
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
            if page != VERSUS and name not in ("answers", "share"):
                text += f"\n{origin(recorded[sections[0]], is_full=page == PERFORMANCE)}\n"
            made |= between(page, name, text, made.get(page))
    return made


def origin(section: Mapping[str, Any], *, is_full: bool) -> str:
    """Say when, where and by which command a section was recorded."""
    machine, (before, after) = section["machine"], section["load"]
    versions = ", ".join(f"{name} {each}" for name, each in machine["versions"].items() if name != "asynckv_source")
    where = f"{machine['cpu']}, {machine['cores']} cores"
    text = f"Recorded {section['date']} on {where}, Linux {machine['kernel']}, Python {machine['python']}, {versions}"
    if not is_full:
        return f"(Recorded {section['date']} on {where}, UCX over CMA.)"
    return f"{text}; load {before:g} before, {after:g} after: `{section['command']}`"


def figure(value: float) -> str:
    """Write a figure with three digits."""
    value = float(f"{value:.3g}")
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:g}"


def median(row: Mapping[str, Any], key: str) -> str:
    """Write the median of a row's rounds, with the least and the largest if they look different; or nothing."""
    values = row.get(key)
    if not values:
        return ""
    middle, low, high = map(figure, (statistics.median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def interval(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Write the least and the largest value."""
    values = sorted(values)
    low, high = (f"{value:.{digits}f}" for value in (values[0], values[-1]))
    return low if low == high else f"{low} to {high}"


def verdict(rows: Sequence[Compared], *, is_less_better: bool = False) -> str:
    """Say in how many rows asynckv is ahead, and name those in which it is not."""
    ahead, behind, unsure = [], [], []
    for name, ratio in rows:
        best, worst = (ratio["high"], ratio["low"]) if not is_less_better else (1 / ratio["low"], 1 / ratio["high"])
        where = ahead if worst > 1 else behind if best < 1 else unsure
        where.append(f"{name.replace('; ', ', ')} ({ratio['median']:.2f})")
    parts = [f"ahead in {len(ahead)} of {len(rows)} rows" if ahead else f"ahead in none of {len(rows)} rows"]
    parts += [f"{word} with {'; '.join(which)}" for word, which in (("behind", behind), ("undecided", unsure)) if which]
    return ", ".join(parts)


# -- each mark -------------------------------------------------------------------------------------


def bench(*columns: tuple[str, str]) -> Callable[[Report], str]:
    """Return a renderer of a section of `asynckv bench`, with these titles and keys."""

    def render(report: Report) -> str:
        rows = [
            (name, *(median(row, key) for _, key in columns), code(row["options"]))
            for name, row in report["rows"].items()
        ]
        return table(f"| | {' | '.join(title for title, _ in columns)} | options |", rows)

    return render


def differ(report: Report) -> str:
    shares = shares_of(report)
    rows = [
        (name, median(row, "requests_per_s"), f"{shares.get(name, 1.0):.2f}", code(row["options"]))
        for name, row in report["rows"].items()
    ]
    head = "| prefill, decode; bytes of a piece, reads | requests/s | relative to the equal case | options |"
    return table(head, rows)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def shares_of(report: Report) -> dict[str, float]:
    """Return the rate of each pair of unequal engines, relative to equal ones with the decode side's TP and order."""
    equal = {name.partition(";")[0]: row for name, row in report["rows"].items() if name.startswith("equal")}
    found = {}
    for name, row in report["rows"].items():
        if name not in EQUAL:
            continue
        pairs = zip(row["requests_per_s"], equal[f"equal: {EQUAL[name]}"]["requests_per_s"], strict=False)
        found[name] = statistics.median(mine / theirs for mine, theirs in pairs)
    return found


EQUAL = {
    "TP 2 and 1, `hnd`; 16 KiB, direct": "TP 1, `hnd`",
    "`nhd`, then `hnd`; 256 bytes, staged": "TP 1, `hnd`",
    "TP 2 and 1, `nhd`; 1 KiB, staged": "TP 1, `nhd`",
    "blocks of 16 and 64, `hnd`; 4 KiB, staged": "TP 1, `hnd`",
    "TP 1 and 2, `nhd`; 1 KiB, staged": "TP 2, `nhd`",
    "TP 1 and 4, `nhd`; 512 bytes, packed": "TP 4, `nhd`",
}
"""The equal case of each row: it has the TP size and the order of the decode side."""


def share(report: Report) -> str:
    kept = spread(shares_of(report).values())
    return (
        f"Small pieces are staged or packed: engines in host memory that differ keep {kept} of the [throughput of "
        "equal ones](docs/performance.md#engines-that-differ).\n"
    )


def size(case: str) -> str:
    """Name a case `LAYERSxBLOCK_BYTES:BLOCKS:IN_FLIGHT` by the size of its requests."""
    shape, blocks, in_flight = case.split(":")[:3]
    layers, block = map(int, shape.split("x"))
    number = layers * block * int(blocks)
    text = f"{number >> 20} MiB" if number >> 20 else f"{number >> 10} KiB"
    return f"{text}, {in_flight} in flight"


def step(text: str) -> str:
    python, outside = text.split(":")
    return "idle" if text == "0:0" else f"{python} + {outside} ms"


def beside(report: Report) -> str:
    rows = []
    for row in report["rows"]:
        mine, *others = (row["figures"][name]["requests_per_s"] for name in ("asynckv", *RIVALS))
        cells = [
            cell
            for name, each in zip(RIVALS, others, strict=True)
            for cell in (figure(each), interval(row["ratios"][name]))
        ]
        rows.append((*beside_name(row).split("; "), figure(mine), *cells))
    head = "".join(f" {name} | ratio |" for name in RIVALS.values())
    return table(f"| request | steps | asynckv requests/s |{head}", rows)


def beside_name(row: Report) -> str:
    return f"{size(row['case'])}; " + (f"{row['step_ms']:g} ms" if row["step_ms"] else "busy loop")


def beside_verdicts(report: Report) -> str:
    lines = []
    for name, told in RIVALS.items():
        rows = [(beside_name(row), row["ratios"][name]) for row in report["rows"]]
        lines.append(f"- Outside of vLLM's scheduler, requests/s, {told}: {verdict(rows)}.\n")
    return "".join(lines)


INSIDE = {
    "requests_per_s": "requests/s",
    "p50_ms": "first token, p50 ms",
    "step_p99_ms": "step p99 ms",
    "cpu_ms": "CPU ms",
}
JUDGED = {
    "requests_per_s": "requests/s",
    "p50_ms": "time to the first token",
    "others_tokens_per_s": "tokens/s of the others",
}


def inside(report: Report) -> str:
    rows = []
    for row in report["rows"]:
        both = [row["contenders"][name] for name in ("asynckv", "nixl")]
        cells = [pair(both, key) for key in (*INSIDE, "others_tokens_per_s")]
        rows.append((*inside_name(row).split("; "), *cells, interval(row["ratios"]["requests_per_s"])))
    titles = " | ".join([*INSIDE.values(), "tokens/s of 4 others"])
    return table(f"| request | step | {titles} | requests/s, ratio |", rows)


def pair(both: Sequence[Report], key: str) -> str:
    values = [each[key]["median"] for each in both if each.get(key)]
    return f"{figure(values[0])}; {figure(values[1])}" if len(values) == 2 and any(values) else ""


def inside_name(row: Report) -> str:
    return f"{size(row['case'])}; {step(row['step'])}" + (", untouched" if row["untouched"] else "")


def inside_verdicts(report: Report) -> str:
    lines = []
    for key, told in JUDGED.items():
        rows = [(inside_name(row), row["ratios"][key]) for row in report["rows"] if key in row["ratios"]]
        if rows:
            lines.append(f"- Inside vLLM, {told}: {verdict(rows, is_less_better=key == 'p50_ms')}.\n")
    return "".join(lines)


def versus(within: Report, outside: Report) -> str:
    return inside_verdicts(within) + beside_verdicts(outside)


def alone(report: Report) -> str:
    times = report["p50_us"]
    rows = [
        (name, *(f"{figure(statistics.median(times[way]))} µs" for way in (name, bare)), spread(report["ratios"][name]))
        for name, bare in (("asynckv", "bare"), ("asynckv, announced", "bare, announced"))
    ]
    return table(
        f"| one request of 8 KiB | p50 | bare ZMQ and NIXL | ratio (goal without announcement: {report['goal']:g}) |",
        rows,
    )


def engine(report: Report) -> str:
    figures, goals = report["figures"], report["goals"]
    rows = [(told, figure(figures[name]), f"{goals[name]:g}") for name, told in ENGINE.items() if name in figures]
    return table("| | measured | goal |", rows)


def printed(report: Report) -> str:
    return "```text\n" + "\n".join(report["text"]) + "\n```\n"


def answers(small: Report, bulk: Report, unequal: Report, within: Report, alone: Report, engine: Report) -> str:
    """Answer the questions of the first table."""
    rate = figure(statistics.median(small["rows"]["64 in flight"]["requests_per_s"]))
    floor = spread(statistics.median(row["of_floor"]) for row in bulk["rows"].values())
    kept = spread(shares_of(unequal).values())
    ratio = {key: spread(r["ratios"][key]["median"] for r in within["rows"] if key in r["ratios"]) for key in JUDGED}
    both = [[r["contenders"][name] for r in within["rows"]] for name in ("asynckv", "nixl")]
    step, theirs = (figure(max(r["step_p99_ms"]["median"] for r in rows if "step_p99_ms" in r)) for rows in both)
    single = spread(alone["ratios"]["asynckv"])
    idle = figure(engine["figures"]["idle.cpu_percent"])
    rows = (
        (
            "Is it faster than NixlConnector inside vLLM?",
            f"requests/s are {ratio['requests_per_s']} times NixlConnector's, the time to the first token "
            f"{ratio['p50_ms']} times",
            "[inside vLLM](#inside-vllm)",
        ),
        (
            "What do the step and other requests lose?",
            f"a step takes at most {step} ms (p99), with NixlConnector {theirs} ms; others decode "
            f"{ratio['others_tokens_per_s']} times as many tokens/s",
            "[inside vLLM](#inside-vllm)",
        ),
        (
            "How many small requests does one decode rank read?",
            f"{rate} per second; one alone takes {single} times as long as with bare ZMQ and NIXL",
            "[small requests](#small-requests)",
        ),
        ("How much of a bare NIXL loop on one thread is reached in bulk?", floor, "[bulk](#bulk-beside-the-floor)"),
        (
            "What does it cost if the two engines differ?",
            f"{kept} of the throughput is kept, on GPUs far less",
            "[engines that differ](#engines-that-differ)",
        ),
        (
            "What do idle engines cost?",
            f"{idle} % of a core for 101 connected engines",
            "[many at once](#many-at-once-and-idle)",
        ),
    )
    return table("| question | answer | |", rows)


SMALL_COLUMNS = (
    ("requests/s", "requests_per_s"),
    ("p50 ms", "p50_ms"),
    ("p99 ms", "p99_ms"),
    ("decode CPU µs", "decode_us"),
)
BULK_COLUMNS = (
    ("GB/s", "gbytes_per_s"),
    ("share of the raw loop", "of_floor"),
    ("its GB/s", "floor_gbytes_per_s"),
    ("loop lag p99 ms", "lag_p99_ms"),
)
MARKS: dict[Path, dict[str, tuple[tuple[str, ...], Callable[..., str]]]] = {
    README: {"report": (("report",), printed), "share": (("differ",), share)},
    PERFORMANCE: {
        "answers": (("small", "bulk", "differ", "inside", "alone", "engine"), answers),
        "inside": (("inside",), lambda report: inside(report) + "\n" + inside_verdicts(report)),
        "beside": (("beside",), lambda report: beside(report) + "\n" + beside_verdicts(report)),
        "small": (("small",), bench(*SMALL_COLUMNS)),
        "alone": (("alone",), alone),
        "bulk": (("bulk",), bench(*BULK_COLUMNS)),
        "differ": (("differ",), differ),
        "engine": (("engine",), engine),
    },
    VERSUS: {"versus": (("inside", "beside"), versus)},
}
"""The marks of each page, with the recorded sections that they show; the first one's origin is told below."""
