"""`asynckv bench`, and its subcommands: sweep, compare, offload and worker."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import shlex
import sys
from functools import partial
from typing import Annotated, Any

import typer

from asynckv.errors import ConfigError
from asynckv.tools.bench import offload_cli
from asynckv.tools.bench.options import Options, share_of
from asynckv.tools.console import printable
from asynckv.tools.output import HELP, consoles, help_of, taking_options, write, write_json

bench_app = typer.Typer(rich_markup_mode="rich", add_completion=False)
bench_app.command(epilog=HELP["epilogs"]["bench offload"])(offload_cli.offload)

output = partial(typer.Option, rich_help_panel="Output")
grid = partial(typer.Option, rich_help_panel="Grid")

# -- one run ---------------------------------------------------------------------------------------


@partial(taking_options, declared=Options)
def bench(context: typer.Context, **given: Any) -> None:
    """Measure how fast KV cache moves from prefill to decode processes, and verify every byte.

    A first run takes half a minute: asynckv bench --layers 4 --requests 400 --floor

    The benchmark starts one process per rank, on this host or (with --remote) on two, with real NIXL and real ZMQ, but
    without a model. Requests go in waves. Prefill ranks fill blocks with a seeded pattern and lend them; decode ranks
    pull them while the clock runs, and compare them afterwards. A closed loop keeps --concurrency pulls in flight. An
    open loop (--rate, --speed) starts requests by a schedule, and latency counts from the scheduled time.
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    from asynckv.observe.setup import configure_logging
    from asynckv.tools.bench import driver, report, report_text
    from asynckv.tools.bench.experiment import Experiment
    from asynckv.tools.progress import Bar

    experiment = Experiment(Options(**given))
    json, target = experiment.options.json, experiment.options.log
    shown, errors = consoles(json)
    if target == "-":
        raise ConfigError("--log -: logs cannot go to stdout; give a file, or omit --log to see errors on stderr")
    if target is not None:
        if target == json:
            raise ConfigError(f"--log and --json name the same file, {target}; give each its own")
        write("--log", target, "")
    try:
        with contextlib.nullcontext(sys.stderr) if target is None else open(target, "a", 1, "utf-8") as stream:
            configure_logging(experiment.options.level, stream=stream)
            with Bar(errors) as bar:
                bar.begin("sizing the pools")
                found = asyncio.run(driver.run(experiment, bar))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except OSError as exc:
        if target is None or exc.errno != errno.ENOSPC:
            raise
        raise ConfigError(f"--log {target}: cannot be written: {exc.strerror}") from None
    result = report.make(experiment, found)
    result["command"] = shlex.join(["asynckv", *sys.argv[1:]])
    try:
        write_json(json, result)
    finally:  # a long run is not lost with the file
        report_text.show(result, shown)
    raise typer.Exit(0 if report.is_good(result) else 1)


bench_app.callback(invoke_without_command=True, epilog=HELP["epilogs"]["bench"], help=help_of(bench))(bench)


def _refuse_options(context: typer.Context) -> None:
    """Refuse options of a single run before a subcommand, where they would have no effect."""
    for param in context.command.params:
        source = context.get_parameter_source(str(param.name))
        if source is not None and source.name == "COMMANDLINE":
            name = context.invoked_subcommand
            raise ConfigError(f"{param.opts[0]} stands before {name}; put options after it: asynckv bench {name} ...")


@bench_app.command()
def worker() -> None:
    """Run one worker for a driver on another machine; --remote starts this command.

    The worker reads commands on stdin, answers on stdout and logs to stderr. It ends when stdin is closed.
    """
    from asynckv.tools.bench.worker import main

    main()


# -- sweeps, comparisons ------------------------------------------------------------------------------


@bench_app.command(
    epilog=HELP["epilogs"]["bench sweep"],
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="[OPTIONS] [ANY OPTION OF asynckv bench, ITS VALUE OR A LIST OF VALUES]...",
)
def sweep(
    context: typer.Context,
    out: Annotated[str, output(help=HELP["bench sweep"]["out"], metavar="DIR|FILE.jsonl")],
    rounds: Annotated[int, grid(help=HELP["bench sweep"]["rounds"], min=1, max=1000)] = 1,
) -> None:
    """Run `asynckv bench` over a grid: any of its options takes a list of values, separated by commas.

    Every combination of values is a point, and every point is a separate run. A finished run becomes a JSON line with
    its whole report. If a run fails, its line has the reason, and the sweep continues. Where a value contains commas,
    separate the values by semicolons.
    """
    from asynckv.tools.bench import sweep as sweeps
    from asynckv.tools.bench import table
    from asynckv.tools.progress import Bar

    target = sweeps.target_of(out)
    made = sweeps.expand(typer.main.get_command(bench_app), context.args)
    command = shlex.join(["asynckv", "bench", "sweep", *context.args, "--rounds", str(rounds), "--out", out])
    console, errors = consoles(None)
    with contextlib.closing(table.Journal(target)) as book:
        book.begin(made.head(command, rounds))
        rounds = book.sweep.head.rounds
        total = len(made.points) * rounds
        with Bar(errors, math.inf) as bar:
            bar.begin("runs", total)

            def step(done: int, point: sweeps.Point, number: int, row: table.Row | None) -> None:
                name = printable(table.label(point.axes)) or "the only point"
                name += f" (round {number} of {rounds})" if rounds > 1 else ""
                bar.at(done)
                bar.note(name)
                if row is not None:
                    style, text = "" if row.status == "good" else "red", f"{done}/{total} {name}: {sweeps.result(row)}"
                    errors.print(text, style=style, soft_wrap=True)

            was_interrupted = sweeps.run(book, made.points, step)
    latest = book.sweep.latest()
    sweeps.show(book.sweep, console)
    if was_interrupted:
        text = f"interrupted after {len(latest)} of {total} runs; to continue, repeat the command:\n  {command}"
        errors.print(text, markup=False, soft_wrap=True)
        raise typer.Exit(130)
    console.print(str(target), markup=False, soft_wrap=True)
    raise typer.Exit(0 if all(row.status == "good" for row in latest.values()) else 1)


@bench_app.command(epilog=HELP["epilogs"]["bench compare"])
def compare(
    before: Annotated[str, typer.Argument(help=HELP["bench compare"]["before"])],
    after: Annotated[str, typer.Argument(help=HELP["bench compare"]["after"])],
    fail_above: Annotated[str | None, typer.Option(help=HELP["bench compare"]["fail_above"], metavar="PERCENT")] = None,
    json: Annotated[str | None, output(help=HELP["bench compare"]["json"], metavar="FILE")] = None,
) -> None:
    """Compare two reports or sweeps, and show which changes are more than noise.

    Points of sweeps match by their parameters. A parameter that has one value before and another value after is
    reported as changed. To know the noise, give several runs of each point on each side.
    """
    from asynckv.tools.bench import compare as comparing
    from asynckv.tools.bench import table

    shown, _ = consoles(json)
    limit = None if fail_above is None else share_of("--fail-above", fail_above)
    table.refuse_repeated([before, after])
    result = comparing.compare(table.load(before), table.load(after), limit)
    write_json(json, result)
    comparing.show(result, shown)
    raise typer.Exit(1 if result["exceeded"] else 0)


for each in bench_app.registered_commands:
    each.help = help_of(each.callback) if each.callback else None
