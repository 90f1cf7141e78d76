"""`asynckv layout` and `asynckv plan`: layouts of ranks, and a transfer explained before it runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from asynckv.errors import ConfigError, LayoutError
from asynckv.tools.bench import options as o
from asynckv.tools.output import HELP, consoles, write, write_json

MOST_WRITTEN = 1 << 17  # layers of all ranks in one file
geometry, work, out = (partial(typer.Option, rich_help_panel=panel) for panel in ("Geometry", "Workload", "Output"))

counted = partial(geometry, min=1, max=o.MOST)


def layout(
    model: Annotated[str | None, geometry(show_default=o.DEFAULT_MODEL, help=HELP["layout"]["model"])] = None,
    hf_config: o.HfConfig = None,
    layers: Annotated[int | None, geometry(help=HELP["layout"]["layers"])] = None,
    kv_heads: o.KvHeads = None,
    head_dim: Annotated[int | None, geometry(help=HELP["layout"]["head_dim"])] = None,
    dtype: o.Dtype = None,
    block_size: Annotated[int, counted(help=HELP["layout"]["block_size"])] = 16,
    ratio: Annotated[int, counted(help=HELP["layout"]["ratio"])] = 1,
    num_blocks: Annotated[int, counted(help=HELP["layout"]["num_blocks"])] = 4096,
    order: Annotated[str, geometry(help=HELP["layout"]["order"])] = "nhd",
    conv_order: Annotated[str, geometry(help=HELP["layout"]["conv_order"])] = "channel",
    tp: Annotated[int, counted(help=HELP["layout"]["tp"])] = 1,
    pp: Annotated[int, counted(help=HELP["layout"]["pp"])] = 1,
    dcp: Annotated[int, counted(help=HELP["layout"]["dcp"])] = 1,
    cp_interleave: Annotated[int, counted(help=HELP["layout"]["cp_interleave"])] = 1,
    role: Annotated[Literal["prefill", "decode"] | None, out(help=HELP["layout"]["role"])] = None,
    output: Annotated[str, out("--output", "-o", help=HELP["layout"]["output"], metavar="FILE")] = "-",
) -> None:
    """Write the layout of an engine's ranks: the parts that each holds, and their places in memory.

    The file is for `asynckv plan`; its fields are those of `asynckv.layout.Layout`, so an engine can write its own.
    """
    from asynckv.geometry.check import register_memory
    from asynckv.tools.plan import models
    from asynckv.tools.plan.layout_file import dump_layouts

    chosen = models.chosen(model, hf_config, o.DEFAULT_MODEL).resized(
        layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype
    )
    # Pipeline stages share the layers, so their number adds nothing.
    if tp * len(chosen.layers) > MOST_WRITTEN:
        raise ConfigError(
            f"{tp * pp} ranks x {len(chosen.layers)} layers are more than can be written into one file "
            f"({MOST_WRITTEN}); use fewer --layers"
        )
    sizes = {"tp": tp, "pp": pp, "dcp": dcp, "cp_interleave": cp_interleave, "block_size": block_size, "ratio": ratio}
    shape = o.Shape(**sizes, order=order, conv_order=conv_order)
    try:
        made = [shape.layout(chosen, r, s, num_blocks) for s in range(pp) for r in range(tp)]
        for each in (made[0], made[-1]):
            register_memory(each)
    except LayoutError as exc:
        raise ConfigError(f"{shape.ranks}: these sizes make no layout: {exc}") from exc
    write("--output", output, dump_layouts(made, role))


def plan(
    prefill: Annotated[Path, typer.Argument(help=HELP["plan"]["prefill"])],
    decode: Annotated[Path, typer.Argument(help=HELP["plan"]["decode"])],
    tokens: Annotated[int, work(help=HELP["plan"]["tokens"], min=1, max=1 << 24)] = 1024,
    prefix_hit: Annotated[str, work(help=HELP["plan"]["prefix_hit"])] = "0",
    nic_gbit: Annotated[float, work(min=0.1, max=1e5, help=HELP["plan"]["nic_gbit"])] = 400.0,
    prefill_rate: Annotated[float | None, work(min=1, max=1e9, help=HELP["plan"]["prefill_rate"])] = None,
    chunk_tokens: Annotated[int, work(min=1, max=1 << 24, help=HELP["plan"]["chunk_tokens"])] = 8192,
    json: Annotated[str | None, out(help=HELP["plan"]["json"], metavar="FILE")] = None,
) -> None:
    """Explain a transfer before it runs: the ranks read and released, the pieces, and a bound over RDMA.

    The planner is that of a running engine, and reads two files. Give all ranks of both engines to see all transfers.
    """
    from asynckv.tools.bench.workload import cached_tokens
    from asynckv.tools.plan import explain
    from asynckv.tools.plan.layout_file import load_layouts
    from asynckv.tools.progress import Bar

    if prefill_rate is None and chunk_tokens != explain.CHUNK_TOKENS:
        raise ConfigError("--chunk-tokens is the size of a chunk of a head start; give --prefill-rate as well")
    shown, errors = consoles(json)
    theirs, mine = load_layouts(prefill, "prefill"), load_layouts(decode, "decode")
    cached = cached_tokens(prefix_hit, tokens)
    with Bar(errors) as bar:
        bar.begin("ranks", len(mine))
        report = explain.explain(mine, theirs, tokens, cached, bar.advance, nic_gbit, prefill_rate, chunk_tokens)
    write_json(json, report)
    explain.show(report, shown)
    raise typer.Exit(0 if report["plannable"] and not report["problems"] else 1)
