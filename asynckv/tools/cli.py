"""The command line. Exit status: 0 good, 1 something is wrong, 2 bad input, 130 interrupted."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from asynckv.arguments import without_control
from asynckv.errors import AsyncKVError, BackendError, ConfigError
from asynckv.tools.bench.cli import bench_app
from asynckv.tools.diagnose import why_cli
from asynckv.tools.doctor import cli as doctor_cli
from asynckv.tools.keygen import keygen
from asynckv.tools.offload.cli import offload_app
from asynckv.tools.output import HELP, help_of
from asynckv.tools.plan import cli as plan_cli
from asynckv.tools.proxy import cli as proxy_cli
from asynckv.tools.streams import Unwritten, prepare

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Move KV cache between prefill and decode workers: NIXL carries the bytes, ZMQ the control messages.",
    epilog=HELP["epilogs"]["asynckv"],
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions of asynckv and its dependencies, and exit.")
    ] = False,
) -> None:
    if version:
        from importlib import metadata

        from asynckv.version import VERSION

        found = [f"asynckv {VERSION}"]
        for name in ("nixl", "torch", "pyzmq"):
            try:
                found.append(f"{name} {metadata.version(name)}")
            except metadata.PackageNotFoundError:
                found.append(f"{name} is not installed")
        typer.echo(f"{', '.join(found)}, Python {sys.version.split()[0]}")
        raise typer.Exit


INTERRUPTED = 130
MEASURE, LOOK, PREPARE, RUN = "Measure", "Look into a service", "Prepare and try out", "Run a service"


def command(function: Callable[..., Any], panel: str) -> None:
    app.command(epilog=HELP["epilogs"][function.__name__], help=help_of(function), rich_help_panel=panel)(function)


app.add_typer(bench_app, name="bench", rich_help_panel=MEASURE)
command(doctor_cli.doctor, MEASURE)
command(why_cli.why, LOOK)
app.add_typer(offload_app, name="offload", rich_help_panel=LOOK)
command(plan_cli.layout, PREPARE)
command(plan_cli.plan, PREPARE)
command(keygen, PREPARE)
command(proxy_cli.proxy, RUN)


def run() -> int:
    """Run the command line, with errors as one line on stderr; return the exit status."""
    try:
        prepare()
        return _run()
    except Unwritten as exc:
        text, status = exc.told()
        return _say(text, status) if text else status
    except BaseException as exc:
        # An error that Ctrl-C caused, such as an import that it broke off, is no error.
        cause: BaseException | None = exc
        while cause is not None and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        return _say("interrupted", INTERRUPTED)


def _run() -> int:
    try:
        found = app(standalone_mode=False)
        status = found if isinstance(found, int) else 0
        if status == INTERRUPTED:  # which typer makes of Ctrl-C, without a word
            _say("interrupted", status)
    except USAGE_ERROR as exc:
        # Without a message there were no arguments, and the help has been printed.
        return _say(_usage(exc), exc.exit_code) if exc.format_message() else int(exc.exit_code)
    except ConfigError as exc:
        return _say(exc, 2)
    except AsyncKVError as exc:
        return _say(exc, 2 if isinstance(exc, BackendError) else 1)
    except OSError as exc:
        if exc.filename is None:
            raise
        return _say(f"{os.fsdecode(exc.filename)}: {exc.strerror}", 2)
    # A closed stdout must be noticed here, not by the interpreter at exit.
    sys.stdout.flush()
    return status


USAGE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""The error that wrong options raise: click's, or that of the copy of click in newer releases of typer."""


def _usage(exc: Any) -> str:
    context = getattr(exc, "ctx", None)
    text = " ".join(exc.format_message().split()).rstrip(".").replace("Value error, ", "")
    if context is None:
        return text
    return f"{text}{' See' if text.endswith('?') else '; see'} {context.command_path} --help"


def _say(exc: object, status: int) -> int:
    print(f"asynckv: {without_control(str(exc))}", file=sys.stderr)
    return status
