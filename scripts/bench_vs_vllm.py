"""asynckv and vLLM's own NixlConnector on the same workload, alternating: `python -m scripts.bench_vs_vllm --help`.

Both move the same blocks of the same memory, in the same order, between two processes on this host over NIXL (UCX)
and check the bytes. Whoever is not being measured is stopped (SIGSTOP): vLLM's idle processes use a core each. Every
round measures each contender once, each time another first; ratios are taken within a round.

Contenders:
  asynckv                  driven by steps, like vLLM: submits when a step begins, takes results when it ends, and the
                           engine's loop runs on its own between (with steps of 0 ms: whenever the loop turns)
  asynckv-announced        the same; requests are announced a round of the loop ahead, so that claims are ahead
  asynckv-asyncio          no steps: a task per request in flight, as an asyncio application pulls (beside 0 ms steps)
  vllm                     NixlConnector as shipped, with NIXL's progress thread
  vllm-no-progress-thread  the same code with an agent made without it: the harder bar on a small host
  vllm-pinned              as shipped, with vLLM's CPU pinning of the worker kept

Cases are LAYERSxBLOCK_BYTES:BLOCKS:IN_FLIGHT, or with :contiguous instead of random block ids; `quick`, `all`.

vLLM is not a dependency. To install it beside (no GPU, nothing is compiled, a few minutes):
  python3.11 -m venv VENV
  VENV/bin/pip install torch==2.13.0 numpy setuptools setuptools_scm setuptools-rust wheel packaging jinja2 cmake ninja
  VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.33.0 SETUPTOOLS_SCM_PRETEND_VERSION=0.33.0 \\
    VENV/bin/pip download --no-deps --no-build-isolation --no-binary vllm vllm==0.33.0 && tar xzf vllm-0.33.0.tar.gz
  VENV/bin/pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1 -r scripts/versus/requirements-vllm.txt
then: python -m scripts.bench_vs_vllm --vllm-python VENV/bin/python --vllm-source vllm-0.33.0
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from asynckv.bench.noise import Interval, median_of
from scripts.versus.vllm_side import write_config
from scripts.versus.workload import Board, Setup, Window

SCHEMA = "asynckv.versus/1"
ROOT = Path(__file__).parents[1]
REMOTE_BLOCKS = 1024
START_S, WINDOW_S = 180.0, 180.0
MOST_REQUESTS = 200_000
KEYS = ("requests_per_s", "gbytes_per_s", "p50_ms", "p99_ms", "cpu_us", "prefill_cpu_us", "step_p99_ms")
RATIOS = ("requests_per_s", "p50_ms", "p99_ms", "cpu_us", "both_cpu_us")

ENGINES = {
    "asynckv": "asynckv",
    "asynckv-announced": "asynckv",
    "asynckv-asyncio": "asynckv",
    "vllm": "vllm",
    "vllm-no-progress-thread": "vllm-no-progress-thread",
    "vllm-pinned": "vllm-pinned",
}
"""Contender -> the processes that it is measured in."""

QUICK = "1x4096:1:1,1x4096:1:64,32x16384:16:16"
ALL = (
    "1x4096:1:1,1x4096:1:64,1x4096:1:256,32x16384:16:1,32x16384:16:16,32x16384:16:64,32x16384:16:256,32x16384:64:1,"
    "32x16384:64:16,32x16384:64:64,32x16384:16:16:contiguous,32x16384:64:16:contiguous"
)


class Trouble(Exception):
    """Something that ends the run, said in a line."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    layers: int
    block_bytes: int
    blocks: int
    concurrency: int
    order: str

    def __str__(self) -> str:
        order = ":contiguous" if self.order == "contiguous" else ""
        return f"{self.layers}x{self.block_bytes}:{self.blocks}:{self.concurrency}{order}"

    @property
    def geometry(self) -> tuple[int, int]:
        """What processes are started for."""
        return self.layers, self.block_bytes

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read `32x16384:16:64` or `...:contiguous`.

        Raises:
            ValueError: It is something else.
        """
        shape, blocks, concurrency, *order = text.strip().split(":")
        layers, block_bytes = shape.split("x")
        case = cls(int(layers), int(block_bytes), int(blocks), int(concurrency), *(order or ["random"]))
        limits = ((case.layers, 1024), (case.blocks, REMOTE_BLOCKS), (case.concurrency, 4096))
        sizes = (4096, 8192) if case.block_bytes < 16384 else range(16384, 1 << 24, 16384)
        if not all(1 <= value <= most for value, most in limits) or case.block_bytes not in sizes:
            raise ValueError(text)
        if case.order not in ("random", "contiguous"):
            raise ValueError(text)
        return case


class Process:
    """One of a contender's two processes."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        self.name, self._errors = name, folder / f"{name}.stderr"
        with self._errors.open("wb") as stderr:
            self._popen = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=dict(env), text=True
            )

    def tell(self, command: Mapping[str, Any]) -> None:
        """Send a line."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(json.dumps(command) + "\n")
            self._popen.stdin.flush()

    def hear(self, seconds: float) -> dict[str, Any]:
        """Wait for a line.

        Raises:
            Trouble: The process ended or said nothing; with the end of what it wrote to stderr.
        """
        assert self._popen.stdout is not None
        timer = threading.Timer(seconds, self._popen.kill)
        timer.start()
        try:
            line = self._popen.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            status = self._popen.wait()
            words = self._errors.read_text(errors="replace").strip().splitlines()[-12:]
            raise Trouble(
                f"{self.name} ended (status {status}) or was silent for {seconds:.0f} s:\n" + "\n".join(words)
            )
        found: dict[str, Any] = json.loads(line)
        return found

    def signal(self, number: int) -> None:
        """Stop it, or let it go on."""
        if self._popen.poll() is None:
            self._popen.send_signal(number)

    def end(self) -> None:
        """Make sure that it is gone."""
        self.signal(signal.SIGCONT)
        for stream in (self._popen.stdin, self._popen.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self._popen.wait(15.0)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


class Engine:
    """A prefill and a decode process of one kind, stopped except in their own windows."""

    def __init__(self, kind: str, case: Case, local_blocks: int, given: argparse.Namespace, folder: Path) -> None:
        self.kind, self._first, self._processes = kind, 0, list[Process]()
        folder = folder / kind
        folder.mkdir()
        Board.create(folder)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        paths = [str(ROOT)]
        if kind == "asynckv":
            argv = [sys.executable, "-m", "scripts.versus.asynckv_side"]
            paths.append(env.get("PYTHONPATH", ""))
        else:
            argv = [given.vllm_python, "-m", "scripts.versus.vllm_side"]
            paths.append(str(given.vllm_source))
        env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
        setup = Setup(
            role="producer",
            layers=case.layers,
            block_bytes=case.block_bytes,
            num_blocks=REMOTE_BLOCKS,
            seed=given.seed,
            folder=str(folder),
            progress_thread=kind != "vllm-no-progress-thread",
            keep_affinity=kind == "vllm-pinned",
        )
        write_config(setup)
        try:
            self._prefill = self._start("prefill", argv, env, folder, setup)
            consumer = replace(setup, role="consumer", num_blocks=local_blocks)
            self._decode = self._start("decode", argv, env, folder, consumer)
            peer = self._prefill.hear(START_S)
            self.versions = self._decode.hear(START_S)["versions"]
            self._decode.tell(peer)
        except BaseException:
            self.end()
            raise
        self.pause()

    def _start(self, role: str, argv: Sequence[str], env: Mapping[str, str], folder: Path, setup: Setup) -> Process:
        process = Process(f"{self.kind}-{role}", argv, env, folder)
        self._processes.append(process)
        process.tell(msgspec.to_builtins(setup))
        return process

    def window(self, window: Window) -> dict[str, Any]:
        """Measure once.

        Raises:
            Trouble: A process ended, a request was not released, failed, or held wrong bytes.
        """
        window = replace(window, first=self._first)
        self._first += window.requests
        for process in self._processes:
            process.signal(signal.SIGCONT)
        for process in self._processes:
            process.tell(msgspec.to_builtins(window))
        found = self._decode.hear(WINDOW_S)
        served = self._prefill.hear(WINDOW_S)
        self.pause()
        if found["wrong"] or found["failed"] or served["left"] or found["requests"] != window.requests:
            raise Trouble(
                f"{self.kind}: of {window.requests} requests {found['failed']} failed, {found['wrong']} of "
                f"{found['checked']} compared held wrong bytes, {served['left']} were not released"
            )
        # Of both processes: a side that polls pays for what the other one saves.
        found["prefill_cpu_us"] = served["cpu_s"] / window.requests * 1e6
        found["both_cpu_us"] = found["cpu_us"] + found["prefill_cpu_us"]
        return found

    def pause(self) -> None:
        """Stop both processes."""
        for process in self._processes:
            process.signal(signal.SIGSTOP)

    def end(self) -> None:
        """End both processes."""
        for process in reversed(self._processes):
            process.end()


@contextlib.contextmanager
def engines(cases: Sequence[Case], given: argparse.Namespace) -> Iterator[dict[str, Engine]]:
    """Start what is needed for cases of one geometry."""
    local_blocks = max(case.blocks * case.concurrency for case in cases)
    with tempfile.TemporaryDirectory(prefix="asynckv-versus-") as folder, contextlib.ExitStack() as stack:
        found = {}
        for kind in dict.fromkeys(ENGINES[name] for name in given.contenders):
            said(f"starting {kind} for {cases[0].layers} x {cases[0].block_bytes} bytes ...")
            found[kind] = engine = Engine(kind, cases[0], local_blocks, given, Path(folder))
            stack.callback(engine.end)
        yield found


def measure(case: Case, step_ms: float, running: Mapping[str, Engine], given: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one case at one length of step."""
    names = [n for n in given.contenders if n != "asynckv-asyncio" or not step_ms]
    windows: dict[str, Window] = {}
    for name in names:
        window = Window(
            first=0,
            requests=max(2 * case.concurrency, 16),
            blocks=case.blocks,
            concurrency=case.concurrency,
            order=case.order,
            step_ms=None if name == "asynckv-asyncio" else step_ms,
            announced=name == "asynckv-announced",
        )
        # The first window is compared in full; the second tells how many requests last `--seconds`.
        running[ENGINES[name]].window(replace(window, check_all=True))
        rate = running[ENGINES[name]].window(window)["requests_per_s"]
        most = max(3 * case.concurrency, min(int(rate * given.seconds), MOST_REQUESTS))
        windows[name] = replace(window, requests=most)
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(given.rounds):
        said(f"{case}, steps of {step_ms:g} ms, round {number + 1} of {given.rounds}")
        turn = number % len(names)
        rounds.append({name: running[ENGINES[name]].window(windows[name]) for name in names[turn:] + names[:turn]})
    measured = (*KEYS, "both_cpu_us")
    figures = {name: {key: median_of([r[name][key] for r in rounds]) for key in measured} for name in names}
    ratios = {
        f"{mine} / {theirs}": {
            key: median_of([r[mine][key] / r[theirs][key] for r in rounds if r[theirs][key]]) for key in RATIOS
        }
        for mine in names
        if mine.startswith("asynckv")
        for theirs in names
        if theirs.startswith("vllm")
    }
    return {"case": str(case), "step_ms": step_ms, "figures": figures, "ratios": ratios, "rounds": rounds}


def said(text: str) -> None:
    """Say what goes on."""
    print(text, file=sys.stderr, flush=True)


def show(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print two tables: what each did, and the ratios."""
    table = Table(title="Medians over the rounds (and interval)", box=None, padding=(0, 1))
    cpu = ("decode CPU µs/request", "prefill CPU µs/request")
    for title in ("case", "steps", "contender", "requests/s", "GB/s", "p50 ms", "p99 ms", *cpu, "step p99"):
        table.add_column(title, justify="left" if title in ("case", "contender") else "right", no_wrap=True)
    for row in rows:
        for name, figures in row["figures"].items():
            cells = [_figure(figures[key]) for key in KEYS]
            table.add_row(row["case"], _steps(row, name), name, *cells)
        table.add_section()
    console.print(table)
    table = Table(title="Ratios within a round: median (and interval)", box=None, padding=(0, 1))
    for title in ("case", "steps", "ratio", "requests/s", "p50", "p99", "decode CPU", "CPU of both sides"):
        table.add_column(title, justify="left" if title in ("case", "ratio") else "right", no_wrap=True)
    for row in rows:
        for name, ratios in row["ratios"].items():
            table.add_row(row["case"], _steps(row, name), name, *(_figure(ratios[key]) for key in RATIOS))
        table.add_section()
    if table.row_count:
        console.print(table)
    level = min((i.level for row in rows for r in row["figures"].values() for i in r.values()), default=0.0)
    console.print(
        f"More requests/s is better, less of everything else. CPU: all threads of a process, per request. Intervals "
        f"hold the true median with {level:.0%} if rounds are independent."
    )


def _steps(row: Mapping[str, Any], name: str) -> str:
    if "asynckv-asyncio" in name:
        return "none"
    return f"{row['step_ms']:g} ms" if row["step_ms"] else "busy"


def _figure(value: Interval) -> str:
    return f"{_short(value.median)} ({_short(value.low)}–{_short(value.high)})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; what is wrong with it ends with status 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="python of the environment that holds vLLM's requirements")
    parser.add_argument("--vllm-source", type=Path, help="folder of vLLM's source, if it is not installed there")
    parser.add_argument("--cases", default="quick", help="comma-separated, or `quick` or `all` (%(default)s)")
    parser.add_argument(
        "--contenders", default="asynckv,asynckv-announced,asynckv-asyncio,vllm,vllm-no-progress-thread"
    )
    parser.add_argument("--steps-ms", default="0,10,30", help="lengths of a model step; 0 is a busy loop (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one window, about (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of block ids")
    parser.add_argument("--json", metavar="PATH", help="write the report; '-' is stdout, without the tables")
    given = parser.parse_args(argv)
    given.cases = {"quick": QUICK, "all": ALL}.get(given.cases, given.cases)
    try:
        given.cases = [Case.parse(text) for text in given.cases.split(",")]
    except (ValueError, TypeError):
        parser.error(
            f"--cases {given.cases!r}: a case is LAYERSxBLOCK_BYTES:BLOCKS:IN_FLIGHT[:contiguous], block bytes 4096, "
            f"8192 or a multiple of 16384, at most {REMOTE_BLOCKS} blocks"
        )
    given.contenders = [name.strip() for name in given.contenders.split(",")]
    if unknown := [name for name in given.contenders if name not in ENGINES]:
        parser.error(f"--contenders: {', '.join(unknown)} unknown; choose from {', '.join(ENGINES)}")
    try:
        given.steps = [float(text) for text in given.steps_ms.split(",")]
    except ValueError:
        given.steps = []
    if not given.steps or not all(0 <= step <= 10_000 for step in given.steps):
        parser.error(f"--steps-ms {given.steps_ms!r} is no list of milliseconds such as 0,10,30")
    if not 1 <= given.rounds <= 1000 or not 0 < given.seconds <= 600:
        parser.error(f"--rounds {given.rounds} must be in 1 ... 1000, --seconds {given.seconds:g} in (0, 600]")
    if given.json not in (None, "-"):
        try:
            Path(given.json).open("a").close()
        except OSError as exc:
            parser.error(f"--json {given.json}: cannot be written: {exc.strerror}")
    if any(name.startswith("vllm") for name in given.contenders) and (why := missing(given)):
        parser.exit(2, f"bench_vs_vllm: {why}\n{(__doc__ or '')[(__doc__ or '').index('To install') :]}")
    return given


def missing(given: argparse.Namespace) -> str:
    """Say why vLLM cannot be run, or nothing."""
    if not given.vllm_python:
        return "vLLM is not installed here: give --vllm-python (and --vllm-source), or --contenders asynckv"
    check = (
        "import importlib.util, sys\n"
        "sys.exit(' '.join(n for n in sys.argv[1:] if not importlib.util.find_spec(n)) or 0)"
    )
    env = {**os.environ, "PYTHONPATH": str(given.vllm_source or "")}
    try:
        argv = [given.vllm_python, "-c", check, "vllm", "nixl", "torch"]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    except OSError as exc:
        return f"--vllm-python {given.vllm_python}: {exc.strerror}"
    if done.returncode:
        return f"vLLM is not installed: {given.vllm_python} lacks {done.stderr.strip() or 'something'}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    given = parse(argv)
    rows: list[dict[str, Any]] = []
    versions: dict[str, Any] = {}
    try:
        for geometry in dict.fromkeys(case.geometry for case in given.cases):
            cases = [case for case in given.cases if case.geometry == geometry]
            with engines(cases, given) as running:
                versions |= {kind: engine.versions for kind, engine in running.items()}
                rows += [measure(case, step, running, given) for case in cases for step in given.steps]
    except Trouble as exc:
        said(f"bench_vs_vllm: {exc}")
        return 1
    except KeyboardInterrupt:
        return 130
    report = {"schema": SCHEMA, "versions": versions, "cpu_count": os.cpu_count(), "seed": given.seed, "rows": rows}
    if given.json == "-":
        print(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())
    else:
        if given.json:
            Path(given.json).write_bytes(msgspec.json.encode(report))
        show(rows, Console() if sys.stdout.isatty() else Console(width=240))
    return 0


if __name__ == "__main__":
    sys.exit(main())
