"""`asynckv layout` and `asynckv plan`: what ranks hold, and a transfer explained before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asynckv.errors import ConfigError, LayoutError
from asynckv.tools.bench import options as o
from asynckv.tools.output import write, write_json
from asynckv.tools.parameters import taking_options

MOST_WRITTEN = 1 << 17  # layers of all ranks in one file
GEOMETRY, WORK, OUT = "Geometry", "Workload", "Output"

LAYOUT_EPILOG = """
[bold]Examples[/bold]

  asynckv layout --model llama-3.1-8b --tp 4 -o prefill.json

  asynckv layout --hf-config config.json --tp 2 --block-size 32 --order hnd -o decode.json

[bold]Exit status[/bold]  0 written, 2 bad input
"""

PLAN_EPILOG = """
[bold]Examples[/bold]

  asynckv layout --model llama-3.1-8b --tp 4 -o prefill.json; asynckv layout --model llama-3.1-8b --tp 2 -o decode.json

  asynckv plan decode.json prefill.json --tokens 4096 --prefix-hit 25%

  asynckv plan decode.json prefill.json --json - | jq .ranks

[bold]Exit status[/bold]  0 can be planned, 1 refused or a problem found, 2 bad input
"""


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
    output: Annotated[
        str, typer.Option("--output", "-o", help="Where to write; - for stdout.", rich_help_panel=OUT, metavar="FILE")
    ] = "-",
) -> None:
    """Write the layout of an engine's ranks: what each holds, and where it would lie.

    The file is for `asynckv plan`; its fields are those of `asynckv.layout.Layout`, so an engine can write its own.
    """
    from asynckv.geometry.check import register_memory
    from asynckv.tools.plan import models
    from asynckv.tools.plan.layout_file import dump_layouts

    chosen = models.chosen(model, hf_config, o.DEFAULT_MODEL).resized(
        layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype
    )
    for name, number in (("--tp", tp), ("--pp", pp), ("--num-blocks", num_blocks)):
        if not 1 <= number <= o.MOST:
            raise ConfigError(f"{name} {number} is outside 1 ... {o.MOST}")
    if not 1 <= block_size <= o.MOST:
        raise ConfigError(f"--block-size {block_size} is outside 1 ... {o.MOST}")
    # Every stage writes its own layers.
    if tp * len(chosen.layers) > MOST_WRITTEN:
        raise ConfigError(
            f"{tp * pp} ranks x {len(chosen.layers)} layers are more than can be written into one file "
            f"({MOST_WRITTEN}); use fewer --layers"
        )
    if not 1 <= ratio <= o.MOST or block_size % ratio:
        raise ConfigError(
            f"--ratio {ratio} does not divide --block-size {block_size}; a block is so many kernel blocks of equal size"
        )
    shape = o.Shape(tp=tp, pp=pp, block_size=block_size, ratio=ratio, order=order, conv_order=conv_order)
    try:
        made = [shape.layout(chosen, r, s, num_blocks) for s in range(pp) for r in range(tp)]
    except LayoutError as exc:
        raise ConfigError(f"--tp {tp}: {exc}") from exc
    for each in (made[0], made[-1]):
        try:
            register_memory(each)
        except LayoutError as exc:
            raise ConfigError(f"these sizes make no layout: {exc}") from exc
    write("--output", output, dump_layouts(made))


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
) -> None:
    """Explain a transfer before anything runs: who reads what from whom, who releases whom, and how many pieces.

    Runs the planner of a running engine on two files. Give all ranks of both engines to see the whole group.
    """
    from rich.console import Console

    from asynckv.tools.bench.workload import cached_tokens
    from asynckv.tools.plan import explain
    from asynckv.tools.plan.layout_file import load_layouts
    from asynckv.tools.progress import Bar

    if not 1 <= tokens <= 1 << 24:
        raise ConfigError(f"--tokens {tokens} is outside 1 ... {1 << 24}")
    mine, theirs = load_layouts(local), load_layouts(remote)
    cached = cached_tokens(prefix_hit, tokens)
    with Bar() as bar:
        bar.begin("ranks", len(mine))
        report = explain.explain(mine, theirs, tokens, cached, bar.advance)
    write_json(json, report)
    explain.show(report, Console(stderr=json == "-"))
    raise typer.Exit(0 if report["plannable"] and not report["problems"] else 1)
