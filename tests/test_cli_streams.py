"""stdout that is closed, full, hung up on or not UTF-8, and terminals that are narrow."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from asynckv.tools import cli
from asynckv.tools.diagnose import reading
from asynckv.tools.output import print_table
from asynckv.tools.plan import layout_file
from asynckv.tools.progress import Bar
from scripts import command

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
def test_h_is_help(name: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["asynckv", *name, "-h"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 0
    assert "Usage: " in capsys.readouterr().out


def test_scripts_hear_h_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        """Do something."""

    assert command.script(work, "")(["-h"]) == 0
    assert "Do something." in capsys.readouterr().out


def test_a_name_that_is_nearly_one_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["asynckv", "benhc"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert "Did you mean 'bench'? See " in capsys.readouterr().err


def test_the_version_names_what_it_stands_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["asynckv", "--version"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("asynckv ")
    assert all(f", {name} " in said for name in ("nixl", "torch", "pyzmq", "Python"))


def test_what_the_system_says_of_a_file_names_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "app", lambda **_: (tmp_path / "none" / "x").read_text())
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"asynckv: {tmp_path}/none/x: No such file or directory\n"


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_no_head_and_no_number_is_ever_cut(width: int) -> None:
    stream = io.StringIO()
    print_table(Console(file=stream, width=width), HEADS, ROWS, texts=(4,))
    shown = stream.getvalue()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= max(width, 53)
    for text in ("1,234.567", "1,234,567", "concurrency", "failed", "GB/s"):
        assert text in shown


def test_ctrl_c_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reading, "read_logs", interrupted)
    monkeypatch.setattr(sys, "argv", ["asynckv", "why", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert (caught.value.code, capsys.readouterr()) == (130, ("", "asynckv: interrupted\n"))


def test_ctrl_c_before_the_command_line_is_imported_is_one_line() -> None:
    code = (
        "import builtins, os, signal; from asynckv.__main__ import main; real = builtins.__import__\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def first(name, *rest):\n"
        "    builtins.__import__ = real; os.kill(os.getpid(), signal.SIGINT); return real(name, *rest)\n"
        "builtins.__import__ = first; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "asynckv: interrupted\n")


def test_a_broken_pipe_to_somebody_else_is_no_closed_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(BrokenPipeError):
        cli.main()


def test_ctrl_c_is_told_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(layout_file, "load_layouts", interrupted)
    monkeypatch.setattr(sys, "argv", ["asynckv", "plan", "one.json", "other.json"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130
    assert capsys.readouterr().err.count("interrupted") == 1


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar(Console(file=io.StringIO()), every_s=0.0) as bar:
        bar.begin("starting 2 workers", 2)
        bar.at(1)
        bar.begin("requests", 1000)
        bar.at(500)
        bar.begin("ending the workers")
    assert capsys.readouterr().err.splitlines() == [
        "starting 2 workers: 0/2",
        "starting 2 workers: 1/2",
        "requests: 0/1,000",
        "requests: 500/1,000",
        "ending the workers",
    ]
    with Bar(Console(file=io.StringIO())) as bar:
        bar.begin("requests", 10)
        bar.at(10)
    assert capsys.readouterr().err == ""
