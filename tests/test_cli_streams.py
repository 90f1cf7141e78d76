"""stdout that is closed, full, hung up on or not UTF-8, and terminals that are narrow."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer.core
from rich.console import Console
from typer.testing import CliRunner

from asynckv.tools import cli, output
from asynckv.tools.output import print_table
from asynckv.tools.plan import layout_file
from asynckv.tools.progress import Bar
from scripts.command import script
from tests.commands import Command, python

HEADS = ("concurrency", "prefill-block-size", "GB/s", "decode CPU µs", "")
ROWS = [("1", "16", "1,234.567", "1,234,567", ""), ("16", "32", "2.5", "9", "failed")]


def run(argv: list[str], how: str) -> subprocess.CompletedProcess[str]:
    command = " ".join([sys.executable, "-m", "asynckv", *argv, how])
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "how", "status", "says"),
    [
        (["layout", "--layers", "1"], ">&-", 0, ""),
        (["plan", "-h"], ">&-", 0, ""),
        (["-h"], ">/dev/full", 2, "asynckv: the output cannot be written: No space left on device\n"),
        (["layout", "--layers", "64", "--tp", "64"], "| true; exit ${PIPESTATUS[0]}", 141, ""),
        (["-h"], ">/dev/null 2>&-", 0, ""),
    ],
)
def test_a_stdout_that_takes_nothing_is_one_line(argv: list[str], how: str, status: int, says: str) -> None:
    done = run(argv, how)
    assert (done.returncode, done.stderr) == (status, says)


@pytest.mark.slow
def test_a_terminal_with_ascii_alone_shows_something_for_every_letter() -> None:
    code = (
        "from asynckv.tools.streams import prepare; from asynckv.tools.output import write; prepare()\n"
        "print('3 µs × 2 … é'); write('--json', '-', '\"µ\"')"
    )
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=50, check=True)
    assert done.stdout == b"3 \\xb5s \\xd7 2 \\u2026 \\xe9\n" + '"µ"'.encode()


@pytest.mark.parametrize("name", [[], ["bench"], ["bench", "sweep"], ["offload"], ["offload", "prune"], ["plan"]])
def test_h_is_help(name: list[str], command: Command) -> None:
    status, out, _ = command.run(*name, "-h")
    assert status == 0
    assert "Usage: " in out


def test_scripts_hear_h_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        """Do something."""

    assert script(work, "")(["-h"]) == 0
    assert "Do something." in capsys.readouterr().out


def test_a_name_that_is_nearly_one_is_told(command: Command) -> None:
    assert "Did you mean 'bench'? See " in command.complaint("benhc")


def test_the_version_names_what_it_stands_on(command: Command) -> None:
    status, said, _ = command.run("--version")
    assert status == 0
    assert said.startswith("asynckv ")
    assert all(f", {name} " in said for name in ("nixl", "torch", "pyzmq", "Python"))


def test_what_the_system_says_of_a_file_names_the_file(
    monkeypatch: pytest.MonkeyPatch, command: Command, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "app", lambda **_: (tmp_path / "none" / "x").read_text())
    assert command.complaint() == f"asynckv: {tmp_path}/none/x: No such file or directory\n"


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_no_head_and_no_number_is_ever_cut(width: int) -> None:
    stream = io.StringIO()
    print_table(Console(file=stream, width=width), HEADS, ROWS, texts=(4,))
    shown = stream.getvalue()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= max(width, 53)
    for text in ("1,234.567", "1,234,567", "concurrency", "failed", "GB/s"):
        assert text in shown


def test_ctrl_c_before_the_command_line_is_imported_is_one_line() -> None:
    code = (
        "import builtins, os, signal; from asynckv.__main__ import main; real = builtins.__import__\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def first(name, *rest):\n"
        "    builtins.__import__ = real; os.kill(os.getpid(), signal.SIGINT); return real(name, *rest)\n"
        "builtins.__import__ = first; main()"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "asynckv: interrupted\n")


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def broken_off(*_: object, **__: object) -> None:
    try:
        interrupted()
    except KeyboardInterrupt as exc:
        raise ImportError("initialization failed") from exc  # as modules in C++ do


@pytest.mark.parametrize(
    ("where", "name", "what"),
    [
        (cli, "prepare", interrupted),
        (typer.core.TyperGroup, "_main_shell_completion", interrupted),
        (typer.core.TyperGroup, "parse_args", interrupted),
        (typer.core.TyperGroup, "resolve_command", interrupted),
        (layout_file, "load_layouts", interrupted),
        (layout_file, "load_layouts", broken_off),
    ],
)
def test_ctrl_c_is_one_line_at_every_stage(
    where: object, name: str, what: Any, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr(where, name, what)
    assert command.run("plan", "one.json", "other.json") == (130, "", "asynckv: interrupted\n")


@pytest.mark.parametrize(
    ("stage", "status", "says"),
    [
        # A callback can raise nothing, so Python would print the error and go on.
        ("class X:\n    def __del__(self): ctrl_c()\ndef run(): X(); time.sleep(30)", 130, "asynckv: interrupted\n"),
        ("def run():\n    try: ctrl_c()\n    finally: ctrl_c()", 130, ""),
        ("import atexit\natexit.register(ctrl_c)\ndef run(): return 3", 3, ""),
    ],
)
def test_ctrl_c_where_python_would_print_a_traceback(stage: str, status: int, says: str) -> None:
    code = (
        "import os, signal, sys, time, types; from asynckv.__main__ import main\n"
        "def ctrl_c(): os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"{stage}\n"
        "import asynckv.tools\n"
        "stub = types.ModuleType('asynckv.tools.cli'); stub.run = run\n"
        "asynckv.tools.cli = sys.modules['asynckv.tools.cli'] = stub; main()"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", says)


def test_a_broken_pipe_to_somebody_else_is_no_closed_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(BrokenPipeError):
        sys.exit(cli.run())


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal() -> None:
    said = io.StringIO()
    with Bar(Console(file=said), every_s=0.0) as bar:
        bar.begin("starting 2 workers", 2)
        bar.at(1)
        bar.begin("requests", 1000)
        bar.at(500)
        bar.begin("ending the workers")
    assert said.getvalue().splitlines() == [
        "starting 2 workers: 0/2",
        "starting 2 workers: 1/2",
        "requests: 0/1,000",
        "requests: 500/1,000",
        "ending the workers",
    ]
    said = io.StringIO()
    with Bar(Console(file=said)) as bar:
        bar.begin("requests", 10)
        bar.at(10)
    assert said.getvalue() == ""
    quiet = Console(file=said, quiet=True)
    with Bar(quiet, every_s=0.0) as bar:
        bar.begin("requests", 10)
    assert said.getvalue() == ""


DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["plan", "prefill.json", "decode.json"], 0),
        (["plan", "prefill.json", "other.json"], 1),
        (["bench", "compare", "before.json", "after.json"], 0),
        (["bench", "offload", "--layers", "1", "--requests", "4", "--shared-prefix", "64"], 0),
        (["why", str(DATA / "leaks.jsonl")], 1),
        (["why", "late", str(DATA / "leaks.jsonl")], 1),
    ],
)
def test_json_on_stdout_is_alone(
    argv: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Nothing but errors is written beside it: no text for people, no progress, and no warning of a library."""
    monkeypatch.chdir(tmp_path)
    for name, argv_of in (("prefill", []), ("decode", []), ("other", ["--head-dim", "64"])):
        made = CliRunner().invoke(cli.app, ["layout", "--layers", "1", *argv_of, "-o", f"{name}.json"])
        assert made.exit_code == 0
    for name in ("before", "after"):
        shutil.copy(DATA / "bench.json", f"{name}.json")
    written = output.write_json

    def warning(*given: Any) -> None:
        warnings.warn("a library says", stacklevel=1)
        written(*given)

    for module in ("plan.cli", "bench.cli", "bench.offload_cli", "diagnose.why_cli"):
        monkeypatch.setattr(f"asynckv.tools.{module}.write_json", warning)
    code, out, err = command.run(*argv, "--json", "-")
    assert (code, err) == (status, "")
    assert json.loads(out)["schema"].startswith("asynckv.")
