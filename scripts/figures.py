"""Record the figures of README, docs/performance.md and docs/versus.md: `python -m scripts.figures --help`.

docs/figures.json holds the recorded runs, each with its command, date, machine and load. The pages are drawn from it
(`scripts/draw/figures.py`), so that no two pages tell different figures of the same run. A section is replaced only
when all of its runs have ended well; the others keep their own dates and machines.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from asynckv.tools.bench.machine import environment
from scripts import command
from scripts.draw.drawing import DOCS
from scripts.draw.figures import files

ROOT = DOCS.parent
FIGURES = DOCS / "figures.json"
REPORT = "asynckv bench --model llama-3.1-8b --layers 4 --prompt-tokens 1024 --requests 200 --concurrency 16"
SMALL = (
    "asynckv bench --model llama-3.1-8b --layers 1 --kv-heads 1 --prompt-tokens 8 --verify off --requests 20000"
    " --concurrency 64"
)
SIDES = (
    "python -m scripts.bench vs_vllm --contenders asynckv,vllm,vllm-no-progress-thread --steps-ms 10,0"
    " --cases 1x4096:1:1,1x4096:1:64,32x16384:16:16,32x16384:64:16"
)
IN_VLLM = (
    "HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONHASHSEED=0 VLLM_LOGGING_LEVEL=WARNING VLLM_NO_USAGE_STATS=1"
    " VLLM_TARGET_DEVICE=cpu"
)
"""The environment of `tox run -e vllm`, besides its paths."""


class Failed(Exception):
    """A benchmark ended with an error."""


@dataclass(frozen=True, slots=True)
class Given:
    """Options of a recording."""

    is_quick: bool
    vllm_python: Path
    vllm_source: Path


@dataclass(frozen=True, slots=True)
class Section:
    """One recorded run.

    Attributes:
        shown: Command that the pages show.
        minutes: Time that it takes on two quiet cores.
        quick: Further options that make it short.
        trim: Takes what the pages need from a run's JSON, or from its `printed` text.
        rows: Names of runs in turns, with their further options.
        rounds: Number of turns.
    """

    shown: str
    minutes: float
    quick: str
    trim: Callable[[dict[str, Any]], dict[str, Any]]
    rows: Mapping[str, str] = field(default_factory=lambda: {"": ""})
    rounds: int = 1

    def take(self, given: Given) -> dict[str, Any]:
        """Run everything, and return what the pages need."""
        taken: dict[str, list[dict[str, Any]]] = {name: [] for name in self.rows}
        for number in range(1 if given.is_quick else self.rounds):
            for name, options in self.rows.items():
                print(f"  round {number + 1}: {name or self.shown}", file=sys.stderr, flush=True)
                found = run(f"{self.shown} {options} {self.quick if given.is_quick else ''}", given)
                taken[name].append(self.trim(found))
        if self.rounds == 1:
            return taken[""][0]
        rows = {name: {key: [each[key] for each in every] for key in every[0]} for name, every in taken.items()}
        return {"rows": {name: {"options": self.rows[name], **row} for name, row in rows.items()}}


def run(shown: str, given: Given) -> dict[str, Any]:
    """Run a command as pages show it, and return its JSON, with figures of four digits, and what it `printed`.

    Raises:
        Failed: It ended with another status than 0.
    """
    program, *options = shlex.split(shown)
    argv, env = [sys.executable, *(["-m", program] if program != "python" else []), *options], {"COLUMNS": "80"}
    source = given.vllm_source
    if "vs_vllm" in options:
        argv += ["--vllm-python", str(given.vllm_python), "--vllm-source", str(source)]
    elif "vllm" in options:
        argv[0] = str(given.vllm_python)
        env |= dict(each.split("=") for each in IN_VLLM.split())
        env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{source}", "HF_HOME": str(source.parent / "models")}
        env |= {"VLLM_CACHE_ROOT": str(source.parent / "cache")}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        argv += ["--json", str(file)] if "bench" in shown else []
        done = subprocess.run(argv, cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise Failed(f"status {done.returncode} of {shlex.join(argv)}")
        found = json.loads(file.read_text(), parse_float=lambda x: rounded(float(x))) if file.exists() else {}
    return {**found, "printed": done.stdout}


def rounded(value: float) -> float:
    """Return a figure with four digits, because more would be noise."""
    return float(f"{value:.4g}")


def bench(report: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of `asynckv bench`."""
    found = {
        "requests_per_s": report["throughput"]["requests_per_s"],
        "gbytes_per_s": report["throughput"]["gbytes_per_s"],
        "p50_ms": report["latency_s"]["p50"] * 1e3,
        "p99_ms": report["latency_s"]["p99"] * 1e3,
        "decode_us": report["cpu_s"]["decode"] / report["requests"]["completed"] * 1e6,
    }
    if "ratio_to_floor" in report:
        found["of_floor"] = report["ratio_to_floor"]["raw_nixl"]["gbytes_per_s"]["median"]
        found["floor_gbytes_per_s"] = report["floor"]["raw_nixl"]["gbytes_per_s"]["median"]
    return {key: rounded(value) for key, value in found.items()}


def beside(report: dict[str, Any]) -> dict[str, Any]:
    """Return the rates and ratios of `vs_vllm`."""
    rows = []
    for row in report["rows"]:
        rates = {name: each["requests_per_s"]["median"] for name, each in row["figures"].items()}
        ratios = {name.partition(" / ")[2]: each["requests_per_s"] for name, each in row["ratios"].items()}
        step = f"{row['step_ms']:g} ms" if row["step_ms"] else "busy loop"
        rows.append({"case": row["case"], "step": step, "requests_per_s": rates, "ratios": ratios})
    return {"rows": rows}


def inside(report: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of `vllm`, and the versions of vLLM's environment."""
    return {"rows": report["rows"], "versions": report["machine"]["versions"]}


def picked(*keys: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that takes these keys of a report."""
    return lambda report: {key: report[key] for key in keys}


ROWS: dict[str, dict[str, str]] = {
    "small": {
        "64 in flight": "",
        "1,024 in flight": "--concurrency 1024",
        "one at a time": "--concurrency 1 --requests 5000",
        "one at a time, announced": "--concurrency 1 --requests 5000 --announced",
    },
    "bulk": {
        "0, in runs, CMA": "--posting-threads 0",
        "1, in runs, CMA": "--posting-threads 1",
        "2, in runs, CMA (the default here)": "--posting-threads 2",
        "1, random, CMA": "--posting-threads 1 --block-order random",
        "2, random, CMA": "--posting-threads 2 --block-order random",
        "1, in runs, TCP": "--posting-threads 1 --transport tcp",
    },
    "differ": {
        "equal: TP 1, `nhd`; 32 KiB, in runs": "",
        "equal: TP 1, `hnd`; 32 KiB, in runs": "--order hnd",
        "equal: TP 2, `nhd`; 16 KiB, in runs": "--tp 2",
        "equal: TP 4, `nhd`; 8 KiB, in runs": "--tp 4",
        "TP 2 and 1, `hnd`; 16 KiB, direct": "--tp 2:1 --order hnd",
        "`nhd`, then `hnd`; 256 bytes, staged": "--order nhd:hnd",
        "TP 2 and 1, `nhd`; 1 KiB, staged": "--tp 2:1",
        "blocks of 16 and 64, `hnd`; 4 KiB, staged": "--block-size 16:64 --order hnd",
        "TP 1 and 2, `nhd`; 1 KiB, staged": "--tp 1:2",
        "TP 1 and 4, `nhd`; 512 bytes, packed": "--tp 1:4",
    },
}
"""Options of the rows of each section of `asynckv bench`."""
SECTIONS: dict[str, Section] = {
    "report": Section(
        REPORT,
        0.2,
        "--prompt-tokens 64",
        lambda found: {"text": [line.rstrip() for line in found["printed"].strip().splitlines()]},
    ),
    "small": Section(SMALL, 2, "--requests 200", bench, ROWS["small"], 3),
    "bulk": Section(
        "asynckv bench --floor --layers 4 --requests 640 --concurrency 16",
        3,
        "--prompt-tokens 64 --requests 320",
        bench,
        ROWS["bulk"],
        2,
    ),
    "differ": Section(
        "asynckv bench --layers 4 --requests 64 --concurrency 8",
        3,
        "--requests 16 --prompt-tokens 64",
        bench,
        ROWS["differ"],
        3,
    ),
    "alone": Section(
        "python -m scripts.bench alone", 0.2, "--rounds 1 --requests 20", picked("p50_us", "ratios", "goal")
    ),
    "engine": Section(
        "python -m scripts.bench engine --cases handshake,idle,memory,flight,peers",
        3,
        "--cases handshake",
        picked("figures", "goals"),
    ),
    "beside": Section(SIDES, 4, "--cases 1x4096:1:1 --rounds 2 --seconds 0.1", beside),
    "inside": Section("python -m scripts.bench vllm --all", 12, "--windows 1", inside),
}


def record(name: str, given: Given, path: Path) -> None:
    """Run a section, and replace it in the file.

    Raises:
        Failed: A benchmark ended with an error.
    """
    section, before = SECTIONS[name], os.getloadavg()
    found, here = section.take(given), environment()
    versions = {key: here[key] for key in ("asynckv", "asynckv_source", "nixl")} | found.pop("versions", {})
    entry = {
        "command": section.shown,
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "cpu": here["cpu"],
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "python": here["python"],
            "versions": versions,
        },
        "load": [round(load, 2) for load in (before[0], os.getloadavg()[0])],
        "report": found,
    }
    sections = {**(json.loads(path.read_text()) if path.exists() else {}), name: entry}
    written = path.with_suffix(".tmp")
    written.write_text(json.dumps({key: sections[key] for key in SECTIONS if key in sections}, indent=1) + "\n")
    written.replace(path)


def figures(
    sections: Annotated[list[str] | None, typer.Argument(metavar="SECTION", help="Sections; by default all.")] = None,
    vllm_python: Annotated[Path, typer.Option(help="Python of tox's environment `vllm`.")] = ROOT
    / ".tox/vllm/bin/python",
    vllm_source: Annotated[Path, typer.Option(help="Source of vLLM.")] = ROOT / ".tox/vllm-source/vllm-0.33.0",
    file: Annotated[Path, typer.Option(help="File to write.")] = FIGURES,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run little, to try this command; give another --file.")
    ] = False,
) -> int:
    """Run benchmarks on this machine, write docs/figures.json, and draw the pages that show it.

    Nothing else should run meanwhile. A section whose run fails keeps its former figures.
    """
    names = command.chosen(sections, SECTIONS, "section")
    is_shown = file.resolve() == FIGURES
    command.check(not (quick and is_shown), "--quick measures too little for the pages: give another --file")
    if {"inside", "beside"} & set(names):
        for option, path in (("--vllm-python", vllm_python), ("--vllm-source", vllm_source)):
            command.check(path.exists(), f"{option} {path} is not there; `tox run -e vllm` makes it")
    # The path of the environment's Python stays as it is: resolved, it would be another environment's.
    given, status = Given(quick, vllm_python.absolute(), vllm_source.resolve()), 0
    for number, name in enumerate(names, 1):
        began, minutes = time.monotonic(), SECTIONS[name].minutes
        print(f"[{number}/{len(names)}] {name}: about {minutes:.1f} min", file=sys.stderr, flush=True)
        try:
            record(name, given, file)
        except Failed as exc:
            print(f"figures: {name} keeps its former figures: {exc}", file=sys.stderr)
            status = 1
        print(f"  took {(time.monotonic() - began) / 60:.1f} min", file=sys.stderr, flush=True)
    if is_shown:
        for page, text in files().items():
            page.write_text(text, encoding="utf-8")
    return status


EPILOG = f"""
[bold]Sections[/bold]

{command.listed({name: section.shown for name, section in SECTIONS.items()})}

[bold]Exit status[/bold]  0 recorded, 1 a section failed, 2 bad input, 130 Ctrl-C
"""
main = command.script(figures, EPILOG)

if __name__ == "__main__":
    sys.exit(main())
