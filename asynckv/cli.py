"""The command line. Exit status: 0 good, 1 something went wrong, 2 bad input, 130 interrupted."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
import typer.core

from asynckv.bench import options as o
from asynckv.bench.cli import bench_app
from asynckv.bench.parameters import taking_options
from asynckv.diagnose import doctor_cli, inspect_cli, leaks_cli, report_cli, timeline_cli
from asynckv.errors import AsyncKVError, BackendError, ConfigError
from asynckv.observe.output import help_of, write, write_json
from asynckv.observe.streams import Unwritten, prepare
from asynckv.tools.offload_cli import offload_app

__all__ = ["main", "run"]

START_EPILOG = """
[bold]Begin with[/bold]

  asynckv doctor

  asynckv bench --layers 4 --requests 400 --floor

[bold]Every command has[/bold] -h with its options, examples and exit status

[bold]Exit status[/bold]  0 good, 1 something is wrong, 2 bad input, 130 Ctrl-C, 141 the reader of stdout has left
"""


class Root(typer.core.TyperGroup):
    """All commands. Ctrl-C is told in a line, unless somebody who knows more has told it; typer only ends with 130."""

    def make_context(self, *given: Any, **options: Any) -> Any:
        with _telling():
            return super().make_context(*given, **options)

    def invoke(self, ctx: Any) -> Any:
        with _telling():
            return super().invoke(ctx)


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as exc:
        if not getattr(exc, "__notes__", ()):
            _say("interrupted", 130)
        raise


app = typer.Typer(
    cls=Root,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Move KV cache between prefill and decode workers: NIXL carries the bytes, ZMQ the decisions.",
    epilog=START_EPILOG,
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions of asynckv and what it stands on, and exit.")
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


MOST_DRAWN = 32
MOST_WRITTEN = 1 << 17
"""Layers of all ranks in one layout file."""
GEOMETRY, WORK, RUN, OUT = "Geometry", "Workload", "Run", "Output"

F = TypeVar("F", bound=Callable[..., Any])


MEASURE, LOOK, PREPARE = "Measure", "Look into a service", "Prepare and try out"


def command(epilog: str, panel: str) -> Callable[[F], F]:
    """Register a command."""

    def register(function: F) -> F:
        return app.command(epilog=epilog, help=help_of(function), rich_help_panel=panel)(function)

    return register


app.add_typer(bench_app, name="bench", rich_help_panel=MEASURE)
command(doctor_cli.EPILOG, MEASURE)(doctor_cli.doctor)
command(inspect_cli.EPILOG, LOOK)(inspect_cli.inspect)
command(leaks_cli.EPILOG, LOOK)(leaks_cli.leaks)
command(timeline_cli.EPILOG, LOOK)(timeline_cli.timeline)
command(report_cli.EPILOG, LOOK)(report_cli.report)
app.add_typer(offload_app, name="offload", rich_help_panel=LOOK)


LAYOUT_EPILOG = """
[bold]Examples[/bold]

  asynckv layout --model llama-3.1-8b --tp 4 -o prefill.json

  asynckv layout --hf-config config.json --tp 2 --rank 1 --block-size 32 --order hnd -o decode-1.json

[bold]Exit status[/bold]  0 written, 2 bad input
"""

PLAN_EPILOG = """
[bold]Examples[/bold]

  asynckv layout --model llama-3.1-8b --tp 4 -o prefill.json; asynckv layout --model llama-3.1-8b --tp 2 -o decode.json

  asynckv plan decode.json prefill.json --tokens 4096 --prefix-hit 25%

  asynckv plan decode.json prefill.json --json - | jq .ranks

[bold]Exit status[/bold]  0 can be planned, 1 refused or a problem found, 2 bad input
"""


@command(LAYOUT_EPILOG, PREPARE)
@taking_options
def layout(
    model: Annotated[
        str | None,
        typer.Option(show_default=o.DEFAULT_MODEL, help="Preset; an unknown name lists all.", rich_help_panel=GEOMETRY),
    ] = None,
    hf_config: o.HfConfig = None,
    layers: o.Layers = None,
    kv_heads: o.KvHeads = None,
    head_dim: o.HeadDim = None,
    dtype: o.Dtype = None,
    block_size: o.BlockSize = 16,
    ratio: o.Ratio = 1,
    num_blocks: Annotated[
        int, typer.Option(help="Blocks in every group, as the engine declares them.", rich_help_panel=GEOMETRY)
    ] = 4096,
    order: Annotated[o.Order, typer.Option(help="Memory order, as for bench.", rich_help_panel=GEOMETRY)] = "nhd",
    conv_order: Annotated[
        o.ConvOrder, typer.Option(help="Order of a convolution's state.", rich_help_panel=GEOMETRY)
    ] = "channel",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.", rich_help_panel=GEOMETRY)] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.", rich_help_panel=GEOMETRY)] = 1,
    rank: Annotated[
        int | None, typer.Option(help="Only this tensor-parallel rank; all if left out.", rich_help_panel=OUT)
    ] = None,
    stage: Annotated[
        int | None, typer.Option(help="Only this pipeline stage; all if left out.", rich_help_panel=OUT)
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="Where to write; - for stdout.", rich_help_panel=OUT, metavar="FILE")
    ] = "-",
) -> None:
    """Write the layout of an engine's ranks: what each holds, and where it would lie.

    The file is for `asynckv plan`; its fields are those of `asynckv.Layout`, so an engine can write its own.
    """
    from asynckv.errors import LayoutError
    from asynckv.geometry.check import register_memory
    from asynckv.tools import models
    from asynckv.tools.layout_file import dump_layouts

    chosen = models.chosen(model, hf_config, o.DEFAULT_MODEL).resized(
        layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype
    )
    for name, number, size in (("--rank", rank, tp), ("--stage", stage, pp)):
        if number is not None and not 0 <= number < size:
            raise ConfigError(f"{name} {number} is outside its group of {size}; use 0 ... {size - 1}")
    for name, number in (("--tp", tp), ("--pp", pp), ("--num-blocks", num_blocks)):
        if not 1 <= number <= o.MOST:
            raise ConfigError(f"{name} {number} is outside 1 ... {o.MOST}")
    if not 1 <= block_size <= o.MOST:
        raise ConfigError(f"--block-size {block_size} is outside 1 ... {o.MOST}")
    ranks = (tp if rank is None else 1) * (pp if stage is None else 1)
    # Every stage writes its own layers.
    if ranks * len(chosen.layers) > MOST_WRITTEN * pp:
        raise ConfigError(
            f"{ranks} ranks x {len(chosen.layers)} layers are more than can be written into one file ({MOST_WRITTEN}); "
            f"choose some with --rank and --stage, or fewer --layers"
        )
    if not 1 <= ratio <= o.MOST or block_size % ratio:
        raise ConfigError(
            f"--ratio {ratio} does not divide --block-size {block_size}; a block is so many kernel blocks of equal size"
        )
    shape = o.Shape(tp=tp, pp=pp, block_size=block_size, ratio=ratio, order=order, conv_order=conv_order)
    try:
        made = [
            shape.layout(chosen, r, s, num_blocks)
            for s in (range(pp) if stage is None else [stage])
            for r in (range(tp) if rank is None else [rank])
        ]
    except LayoutError as exc:
        raise ConfigError(f"--tp {tp}: {exc}") from exc
    for each in (made[0], made[-1]):
        try:
            register_memory(each)
        except LayoutError as exc:
            raise ConfigError(f"these sizes make no layout: {exc}") from exc
    write("--output", output, dump_layouts(made))


@command(PLAN_EPILOG, PREPARE)
def plan(
    local: Annotated[Path, typer.Argument(help="Layouts of the decode ranks, from asynckv layout or an engine.")],
    remote: Annotated[Path, typer.Argument(help="Layouts of the prefill ranks.")],
    tokens: Annotated[int, typer.Option(help="Length of the request.", rich_help_panel=WORK)] = 1024,
    prefix_hit: Annotated[
        str,
        typer.Option(
            help="How much of it the decode side has already: tokens (512) or a share (50%).", rich_help_panel=WORK
        ),
    ] = "0",
    json: Annotated[
        str | None, typer.Option(help="Write the report there; - for stdout.", rich_help_panel=OUT, metavar="FILE")
    ] = None,
    picture: Annotated[
        str | None,
        typer.Option(help="Draw who reads what from whom, as SVG; - for stdout.", rich_help_panel=OUT, metavar="FILE"),
    ] = None,
) -> None:
    """Explain a transfer before anything runs: who reads what from whom, who releases whom, and how many pieces.

    Runs the planner of a running engine on two files. Give all ranks of both engines to see the whole group.
    """
    from rich.console import Console

    from asynckv.bench.workload import cached_tokens
    from asynckv.observe.progress import Bar
    from asynckv.tools import explain
    from asynckv.tools.layout_file import load_layouts
    from asynckv.tools.pictures import to_svg

    if not 1 <= tokens <= 1 << 24:
        raise ConfigError(f"--tokens {tokens} is outside 1 ... {1 << 24}")
    if json == "-" and picture == "-":
        raise ConfigError("--json - and --picture - cannot share stdout; give one of them a file")
    mine, theirs = load_layouts(local), load_layouts(remote)
    cached = cached_tokens(prefix_hit, tokens)
    with Bar() as bar:
        bar.begin("ranks", len(mine))
        report = explain.explain(mine, theirs, tokens, cached, bar.advance)
    write_json(json, report)
    console = Console(stderr="-" in (json, picture))
    explain.show(report, console)
    if report["plannable"]:
        if picture is not None:
            # Room for a name in every rank's bar.
            width = max(72, 8 * max(len(mine), len(theirs)))
            drawn = list(explain.pictures(mine, theirs, report, width))
            write("--picture", picture, to_svg(*drawn, width=width + 38, name="asynckv-plan"))
        drawn = list(explain.pictures(mine, theirs, report, max(min(72, console.width - 18), 20)))
        if len(mine) + len(theirs) > MOST_DRAWN:
            if picture is None:
                console.print(
                    f"{len(mine) + len(theirs)} ranks are too many to draw here; --picture FILE.svg draws them",
                    highlight=False,
                )
            drawn = []
        for each in drawn:
            console.print(each, highlight=False)
    elif picture is not None:
        console.print(f"--picture {picture}: nothing to draw, the plan is refused", highlight=False)
    good = report["plannable"] and report["written_exactly_once"] is not False and not report["problems"]
    raise typer.Exit(0 if good else 1)


SIMULATE_EPILOG = """
[bold]Examples[/bold]

  asynckv simulate --seeds 10000

  asynckv simulate --first-seed 4711 --seeds 1 --faults loss,crash --events 500

  asynckv simulate --first-seed 4711 --seeds 1 --logs DIR; asynckv leaks DIR/seed-4711/*.jsonl

  asynckv simulate --offload --seeds 1000

[bold]Exit status[/bold]  0 clean, 1 a violation, 2 bad input, 130 Ctrl-C
"""


@command(SIMULATE_EPILOG, PREPARE)
def simulate(
    seeds: Annotated[
        int, typer.Option(help="How many services to simulate, one per seed.", rich_help_panel=RUN)
    ] = 1000,
    first_seed: Annotated[int, typer.Option(help="The first seed.", rich_help_panel=RUN)] = 0,
    faults: Annotated[
        str, typer.Option(help="What may go wrong: all, none, or kinds with commas between.", rich_help_panel=RUN)
    ] = "all",
    offload: Annotated[
        bool, typer.Option("--offload", help="Engines that offload, and faults of tiers.", rich_help_panel=RUN)
    ] = False,
    jobs: Annotated[int, typer.Option(help="Processes; 0 for one per core.", rich_help_panel=RUN)] = 0,
    events: Annotated[
        int, typer.Option(help="Events to print before a violation, after minimising.", rich_help_panel=OUT)
    ] = 120,
    json: Annotated[
        str | None, typer.Option(help="Write the counts there; - for stdout.", rich_help_panel=OUT, metavar="FILE")
    ] = None,
    logs: Annotated[
        Path | None,
        typer.Option(
            help="Write there what each process logs, in a directory per seed, with how wrong its clock is.",
            rich_help_panel=OUT,
            metavar="DIR",
        ),
    ] = None,
) -> None:
    """Simulate whole services under faults, with virtual time, and look for anything that must never happen.

    Every seed stands for some prefill and decode ranks, requests, and a script of faults: lost, late and repeated
    packets, crashes, restarts, freezes, pauses anywhere, transfers that fail, never end, or land after their end.
    Real engines run on simulated planes; freed memory is overwritten at once. The same seed gives the same run.
    """
    from rich.console import Console

    from asynckv.observe.progress import Bar
    from asynckv.testing import simulation

    known = simulation.TIER_FAULTS if offload else simulation.FAULTS
    make = simulation.make_tier_script if offload else simulation.make_script
    chosen = known if faults == "all" else () if faults == "none" else tuple(x.strip() for x in faults.split(","))
    if strange := [x for x in chosen if x not in known]:
        raise ConfigError(f"--faults {strange[0]!r} is unknown; use all, none, or some of {', '.join(known)}")
    for name, number, least in (
        ("--seeds", seeds, 1),
        ("--first-seed", first_seed, 0),
        ("--jobs", jobs, 0),
        ("--events", events, 0),
    ):
        if not least <= number <= 1 << 40:
            raise ConfigError(f"{name} {number} is outside {least} ... {1 << 40}")
    if logs is not None:
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"--logs {logs}: cannot be written: {exc.strerror}") from exc
    with Bar() as bar:
        bar.begin("seeds", seeds)
        found = simulation.simulate_many(
            range(first_seed, first_seed + seeds), chosen, jobs or os.cpu_count() or 1, bar.advance, logs, make
        )
    report = {
        "schema": "asynckv.simulate/1",
        "seeds": found.seeds,
        "requested": seeds,
        "interrupted": found.interrupted,
        "first_seed": first_seed,
        "faults": list(chosen),
        "violations": dict(found.violations),
        "counts": dict(sorted(found.counts.items())),
        "seconds": round(found.seconds, 3),
    }
    write_json(json, report)
    console = Console(stderr=json == "-")
    rate = found.seeds / found.seconds if found.seconds else 0.0
    num_faults = sum(n for k, n in found.counts.items() if k.startswith("fault."))
    done = "load.done" if offload else "pull.complete"
    console.print(
        f"{found.seeds:,} services in {found.seconds:.1f} s ({rate:.0f} per second): "
        f"{found.counts[done]:,} {done.partition('.')[0]}s complete, {num_faults:,} faults, "
        f"{len(found.violations)} violations",
        highlight=False,
    )
    # What is pasted into a shell, or comes out of a script, is neither broken into lines nor read as markup.
    say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    again = f"asynckv simulate{' --offload' * offload}"
    if found.interrupted:
        failed = f"; of these failed: {', '.join(map(str, found.violations)) or 'none'}" if found.seeds else ""
        say(
            f"INTERRUPTED after {found.seeds:,} of {seeds:,} seeds (from {first_seed}){failed}\n"
            f"go on: {again} --faults {faults} --first-seed {first_seed + found.seeds} --seeds {seeds - found.seeds}",
            style="yellow",
        )
        raise typer.Exit(130)
    if found.violations:
        seed, violation = next(iter(found.violations.items()))
        console.print(f"\nseed {seed}: {violation}\nminimised:", highlight=False, markup=False)
        small = simulation.minimise(make(seed, chosen))
        for line in small.explain(events):
            say(line)
        say(f"\nagain, all of it: {again} --first-seed {seed} --seeds 1 --faults {faults}")
        drawn = f"{make.__name__}({seed}{'' if faults == 'all' else f', {chosen}'})"
        say(f"minimised, in Python: from asynckv.testing.simulation import *; minimise({drawn})")
        if others := [str(other) for other in found.violations if other != seed]:
            say(f"other seeds with a violation: {', '.join(others)}")
        raise typer.Exit(1)


KEYGEN_EPILOG = """
[bold]Example[/bold]  two engines that trust each other

  asynckv keygen prefill-0; asynckv keygen decode-0

  mkdir authorized; cp keys/*.key authorized/

  KeysConfig(secret="keys/prefill-0.key_secret", authorized="authorized")

Each engine's host gets its own secret, and a copy of authorized/. Pass KeysConfig as EngineConfig(keys=...).

[bold]Exit status[/bold]  0 written, 2 bad input
"""


@command(KEYGEN_EPILOG, PREPARE)
def keygen(
    name: Annotated[str, typer.Argument(help="Of the engine that will own the keys, such as prefill-0.")],
    dir: Annotated[Path, typer.Option("--dir", help="Where to write them.", metavar="DIR")] = Path("keys"),
) -> None:
    """Make the keys of one engine, for a control plane that is authenticated and encrypted.

    NAME.key_secret is the engine's own: it stays there, readable by its user only. NAME.key is public:
    copy it into the authorized directory of every engine that this one talks to. Nothing is overwritten.
    """
    from asynckv.edges.zmq import make_pair
    from asynckv.keys import write_pair

    secret, public = write_pair(dir, name, make_pair())
    typer.echo(f"{secret}  secret: only for {name} (KeysConfig.secret); never leaves its host, mode 0600")
    typer.echo(f"{public}  public: for the authorized directory of each engine that {name} talks to")


def main() -> NoReturn:
    """Run the command line; errors are one line on stderr."""
    sys.exit(run())


def run() -> int:
    """Run the command line; errors are one line on stderr. Returns the exit status."""
    prepare()
    try:
        return _run()
    except Unwritten as exc:
        text, status = exc.told()
        return _say(text, status) if text else status


def _run() -> int:
    try:
        found = app(standalone_mode=False)
        status = found if isinstance(found, int) else 0
    except (typer.Abort, KeyboardInterrupt):
        status = 130
    except USAGE_ERROR as exc:
        # Otherwise there were no arguments, and the help has been printed.
        return _say(_usage(exc), exc.exit_code) if exc.format_message() else int(exc.exit_code)
    except ConfigError as exc:
        return _say(exc, 2)
    except AsyncKVError as exc:
        return _say(exc, 2 if isinstance(exc, BackendError) else 1)
    except OSError as exc:
        if exc.filename is None:
            raise
        return _say(f"{os.fsdecode(exc.filename)}: {exc.strerror}", 2)
    # Whoever has hung up is noticed here, and not by the interpreter at exit.
    sys.stdout.flush()
    return status


USAGE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""What wrong options raise: of click, or of the copy of it that newer releases of typer have inside."""


def _usage(exc: Any) -> str:
    """Say what is wrong with an option in one line."""
    context = getattr(exc, "ctx", None)
    text = " ".join(exc.format_message().split()).rstrip(".").replace("Value error, ", "")
    if context is None:
        return text
    return f"{text}{' See' if text.endswith('?') else '; see'} {context.command_path} --help"


def _say(exc: object, status: int) -> int:
    from asynckv.observe.console import without_control

    print(f"asynckv: {without_control(str(exc))}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
