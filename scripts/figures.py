"""Record the figures of README, docs/performance.md and docs/versus.md: `python -m scripts.figures --help`.

docs/figures.json holds the recorded runs: the command and rows that a recording runs, and what the last one found, with
its date, machine and load. The pages are drawn from it (`scripts/draw/figures.py`), so that no two pages tell different
figures of the same run. A section is replaced only when all of its runs have ended well.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from asynckv.tools.bench.machine import environment
from scripts import command
from scripts.draw.drawing import DOCS
from scripts.draw.figures import files

ROOT = DOCS.parent
FIGURES = DOCS / "figures.json"
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


def take(name: str, section: Mapping[str, Any], given: Given) -> dict[str, Any]:
    """Run everything of a section, its rows in turns, and return what the pages need."""
    options = {row: x["options"] for row, x in section["report"].get("rows", {}).items()} if section["rounds"] else {}
    taken: dict[str, list[dict[str, Any]]] = {row: [] for row in options or [name]}
    for number in range(1 if given.is_quick else section["rounds"] or 1):
        for row, every in taken.items():
            print(f"  round {number + 1}: {row}", file=sys.stderr, flush=True)
            more = f"{options.get(row, '')} {section['quick'] if given.is_quick else ''}"
            every.append(TRIM[name](run(f"{section['command']} {more}", given)))
    if not options:
        return taken[name][0]
    rows = {row: {key: [each[key] for each in every] for key in every[0]} for row, every in taken.items()}
    return {"rows": {row: {"options": options[row], **figures} for row, figures in rows.items()}}


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
    return {"rows": rows, "versions": report["versions"].get("vllm", {})}


def inside(report: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of `vllm`, and the versions of vLLM's environment."""
    return {"rows": report["rows"], "versions": report["machine"]["versions"]}


def picked(*keys: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that takes these keys of a report."""
    return lambda report: {key: report[key] for key in keys}


TRIM: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "report": lambda found: {"text": [line.rstrip() for line in found["printed"].strip().splitlines()]},
    **dict.fromkeys(("small", "bulk", "differ"), bench),
    "alone": picked("p50_us", "ratios", "goal"),
    "engine": picked("figures", "goals"),
    "beside": beside,
    "inside": inside,
}
"""What the pages need of each section, from the JSON of its command, or from its `printed` text."""


def record(name: str, given: Given, path: Path) -> None:
    """Run a section, and replace it in the file.

    Raises:
        Failed: A benchmark ended with an error.
    """
    sections = json.loads(path.read_text())
    before = os.getloadavg()
    found, here = take(name, sections[name], given), environment()
    versions = {key: here[key] for key in ("asynckv", "asynckv_source", "nixl")} | found.pop("versions", {})
    sections[name] |= {
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
    written = path.with_suffix(".tmp")
    written.write_text(json.dumps(sections, indent=1, ensure_ascii=False) + "\n")
    written.replace(path)


def figures(
    sections: Annotated[list[str] | None, typer.Argument(metavar="SECTION", help="Sections; by default all.")] = None,
    vllm_python: command.VllmPython = command.VLLM_PYTHON,
    vllm_source: command.VllmSource = command.VLLM_SOURCE,
    file: Annotated[Path, typer.Option(help="File to record anew.")] = FIGURES,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run little, to try this command; give another --file.")
    ] = False,
) -> int:
    """Run benchmarks on this machine, write docs/figures.json, and draw the pages that show it.

    Nothing else should run meanwhile. A section whose run fails keeps its former figures.
    """
    command.check(file.exists(), f"--file {file} is not there; copy docs/figures.json")
    recipes = json.loads(file.read_text())
    names = command.chosen(sections, recipes, "section")
    is_shown = file.resolve() == FIGURES
    command.check(not (quick and is_shown), "--quick measures too little for the pages: give another --file")
    if {"inside", "beside"} & set(names):
        command.check_vllm(vllm_python, vllm_source)
    # The path of the environment's Python stays as it is: resolved, it would be another environment's.
    given, status = Given(quick, vllm_python.absolute(), vllm_source.resolve()), 0
    for number, name in enumerate(names, 1):
        began, minutes = time.monotonic(), recipes[name]["minutes"]
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


EPILOG = """
[bold]Exit status[/bold]  0 recorded, 1 a section failed, 2 bad input, 130 Ctrl-C
"""
main = command.script(figures, EPILOG)

if __name__ == "__main__":
    sys.exit(main())
