"""Common parts of the scripts' command lines, with the conventions of `asynckv`.

Every script is one typer command. Bad input is reported before anything starts, in one line on stderr with exit status
2; Ctrl-C ends with 130. Results are JSON, on stdout or in the file of `--json`; progress goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from asynckv.errors import ConfigError
from asynckv.tools.bench.processes import ROOT
from asynckv.tools.streams import Unwritten, prepare

Json = Annotated[str, typer.Option("--json", metavar="FILE", help="Write JSON to this file; - is stdout.")]
TableJson = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write JSON to this file; - is stdout, without the tables.")
]
VllmPython = Annotated[Path, typer.Option(help="Python of tox's environment `vllm`.")]
VllmSource = Annotated[Path, typer.Option(help="Source of vLLM.")]
VLLM_PYTHON, VLLM_SOURCE = ROOT / ".tox/vllm/bin/python", ROOT / ".tox/vllm-source/vllm-0.33.0"
Scenarios = Annotated[list[str] | None, typer.Argument(metavar="SCENARIO", help="Scenarios to run; by default all.")]
USAGE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def script(work: Callable[..., Any], epilog: str) -> Callable[..., int]:
    """Return a script's `main`, which runs the command line and returns the exit status."""
    spec = sys.modules[work.__module__].__spec__
    path = (spec.name if spec else work.__module__).removesuffix(".__main__")
    folder, _, name = path.rpartition(".")
    called = f"{folder} {name}" if folder == "scripts.bench" else path
    app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    app.command(epilog=epilog, context_settings={"help_option_names": ["-h", "--help"]})(work)

    def main(arguments: Sequence[str] | None = None) -> int:
        prepare()
        try:
            found = app(arguments, prog_name=f"python -m {called}", standalone_mode=False)
            sys.stdout.flush()
        except (typer.Abort, KeyboardInterrupt):
            return 130
        except (USAGE_ERROR, ConfigError) as exc:
            text = str(exc) if isinstance(exc, ConfigError) else " ".join(exc.format_message().split())
            print(f"{name}: {text}", file=sys.stderr)
            return 2
        except Unwritten as exc:
            text, status = exc.told()
            if text:
                print(f"{name}: {text}", file=sys.stderr)
            return status
        return int(found or 0)

    return main


def listed(about: Mapping[str, str]) -> str:
    """Return names with their meanings, as paragraphs of a command's epilog."""
    return "\n\n".join(f"  [cyan]{name}[/cyan]: {text}" for name, text in about.items())


def first_lines(works: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    """Return the first line of each function's docstring."""
    return {name: (work.__doc__ or "").splitlines()[0] for name, work in works.items()}


def chosen(names: Sequence[str] | None, known: Iterable[str], what: str = "scenario") -> list[str]:
    """Return the names after a check, or all known names if none is given.

    Raises:
        ConfigError: A name is unknown.
    """
    known = list(known)
    for name in names or ():
        if name not in known:
            raise ConfigError(f"unknown {what} {name!r}; choose from {', '.join(known)}")
    return list(names or known)


def check(is_so: bool, text: str) -> None:
    """Refuse bad input.

    Raises:
        ConfigError: `is_so` is false.
    """
    if not is_so:
        raise ConfigError(text)


def check_vllm(python: Path, source: Path) -> None:
    """Refuse to run without vLLM's environment.

    Raises:
        ConfigError: Its Python or vLLM's source is not there.
    """
    for option, path in (("--vllm-python", python), ("--vllm-source", source)):
        check(path.exists(), f"{option} {path} is not there; `tox run -e vllm` makes it")


@contextlib.contextmanager
def output(target: str) -> Iterator[TextIO]:
    """Open the file of `--json`.

    Raises:
        ConfigError: The file cannot be written.
    """
    if target == "-":
        yield sys.stdout
        return
    try:
        file = open(target, "w", encoding="utf-8")  # noqa: SIM115
    except OSError as exc:
        raise ConfigError(f"--json {target}: {exc.strerror}") from exc
    with file:
        yield file


def report(target: str, runs: Iterable[Callable[[], dict[str, Any]]]) -> int:
    """Run scenarios one by one, write a line of JSON for each, and return the exit status."""
    status = 0
    with output(target) as out:
        for work in runs:
            record = work()
            name = record["scenario"]
            print(json.dumps(record), file=out, flush=True)
            verdict = "good" if record["ok"] else "FAILED: " + "; ".join(record["problems"])
            print(f"[{name}] {record['seconds']} s, {verdict}", file=sys.stderr, flush=True)
            status |= not record["ok"]
    return status
