"""The command line. Exit status: 0 good, 1 something went wrong, 2 bad input, 130 interrupted."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from asynckv.bench.cli import bench_app, refuse_options
from asynckv.errors import AsyncKVError, ConfigError
from asynckv.observe.output import columns as _columns
from asynckv.observe.output import write as _write

__all__ = ["main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Move KV cache between prefill and decode workers: NIXL carries the bytes, ZMQ the decisions.",
)

EPILOG = """
[bold]Examples[/bold]

  asynckv bench --model llama-3.1-8b --layers 4 --requests 200 --concurrency 16

  asynckv bench sweep --concurrency 1,16,64 --prompt-tokens 128,1024 --layers 4 --rounds 5 --out sweep.jsonl

  asynckv bench --model qwen3-32b --layers 2 --tp 2 --prompt-tokens 128:4096 --json report.json

  asynckv bench --model nemotron-h-8b --layers 4 --prefill-tp 1 --decode-tp 2 --prefill-block-size 64 --prefix-hit 30%

  asynckv bench --hf-config config.json --trace trace.jsonl --max-prompt-tokens 8192 --transport tcp

  asynckv bench --layers 4 --requests 400 --floor

  asynckv bench --trace trace.jsonl --arrivals trace --speed 10 --requests 500 --layers 2 --prefill-engines 3

  asynckv bench --prompt-tokens 128:0.8,8192:0.2 --shared-prefix 1024 --prefix-groups 8 --rate 200 --cancel 5%

  asynckv bench --role prefill --bind 10.0.0.1:9000 --secret keys/prefill.key_secret --authorized authorized

  asynckv bench --role decode --connect 10.0.0.1:9000#prefill --secret keys/decode.key_secret --authorized authorized

[bold]Exit status[/bold]  0 all good, 1 a request failed, a byte was wrong or a block leaked, 2 bad input, 130 Ctrl-C
"""


class Verify(StrEnum):
    full = "full"
    sample = "sample"
    off = "off"


class Order(StrEnum):
    nhd = "nhd"
    hnd = "hnd"
    block_nhd = "block-nhd"
    block_hnd = "block-hnd"
    cross_nhd = "cross-nhd"
    cross_hnd = "cross-hnd"


class ConvOrder(StrEnum):
    channel = "channel"
    row = "row"


class BlockOrder(StrEnum):
    runs = "runs"
    random = "random"


class Transport(StrEnum):
    auto = "auto"
    tcp = "tcp"


class Process(StrEnum):
    auto = "auto"
    serving = "serving"
    always = "always"
    never = "never"


class ArrivalKind(StrEnum):
    closed = "closed"
    trace = "trace"
    poisson = "poisson"
    uniform = "uniform"


class MemoryKind(StrEnum):
    host = "host"
    cuda = "cuda"


class Role(StrEnum):
    prefill = "prefill"
    decode = "decode"


class Loop(StrEnum):
    auto = "auto"
    asyncio = "asyncio"
    uvloop = "uvloop"


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        import asynckv

        typer.echo(asynckv.__version__)
        raise typer.Exit


MOST = 1 << 20
MOST_DRAWN = 32
MOST_WRITTEN = 1 << 17
"""Layers of all ranks in one layout file."""
DEFAULT_MODEL = "llama-3.1-8b"
GEOMETRY, WORK, RUN, APART, OUT = "Geometry", "Workload", "Run", "Two machines", "Output"


# What `bench` and `layout` both ask for.
HfConfig = Annotated[
    Path | None, typer.Option(help="A Hugging Face config.json, instead of a preset.", rich_help_panel=GEOMETRY)
]
Layers = Annotated[
    int | None,
    typer.Option(help="Layers, instead of the model's; one of every kind is kept.", rich_help_panel=GEOMETRY),
]
KvHeads = Annotated[int | None, typer.Option(help="KV heads, instead of the model's.", rich_help_panel=GEOMETRY)]
HeadDim = Annotated[int | None, typer.Option(help="Head dimension, instead of the model's.", rich_help_panel=GEOMETRY)]
Dtype = Annotated[
    str | None, typer.Option(help="Element type, such as bfloat16 or float8_e4m3fn.", rich_help_panel=GEOMETRY)
]
BlockSize = Annotated[int, typer.Option(help="Tokens per block.", rich_help_panel=GEOMETRY)]
Ratio = Annotated[int, typer.Option(help="Kernel blocks per block.", rich_help_panel=GEOMETRY)]


app.add_typer(bench_app, name="bench")


@bench_app.callback(invoke_without_command=True, epilog=EPILOG)
def bench(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            show_default=DEFAULT_MODEL,
            help="Preset, such as llama-3.1-8b, gemma-3-4b, deepseek-v3, nemotron-h-8b, qwen3-next-80b-a3b; "
            "an unknown name lists all.",
            rich_help_panel=GEOMETRY,
        ),
    ] = None,
    hf_config: HfConfig = None,
    layers: Layers = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    dtype: Dtype = None,
    block_size: BlockSize = 16,
    prefill_block_size: Annotated[
        int | None, typer.Option(help="Tokens per block of the prefill side, if others.", rich_help_panel=GEOMETRY)
    ] = None,
    ratio: Ratio = 1,
    prefill_ratio: Annotated[
        int | None, typer.Option(help="Kernel blocks per block of the prefill side.", rich_help_panel=GEOMETRY)
    ] = None,
    order: Annotated[
        Order,
        typer.Option(
            help="Memory order: token before head (nhd) or after (hnd); block-...: K and V in one block; "
            "cross-...: all layers of a block adjacent.",
            rich_help_panel=GEOMETRY,
        ),
    ] = Order.nhd,
    prefill_order: Annotated[
        Order | None, typer.Option(help="Memory order of the prefill side, if another.", rich_help_panel=GEOMETRY)
    ] = None,
    conv_order: Annotated[
        ConvOrder,
        typer.Option(help="Which dim of a convolution's state varies slowest.", rich_help_panel=GEOMETRY),
    ] = ConvOrder.channel,
    prefill_conv_order: Annotated[
        ConvOrder | None, typer.Option(help="The same for the prefill side, if another.", rich_help_panel=GEOMETRY)
    ] = None,
    tp: Annotated[
        int,
        typer.Option(
            help="Ranks of each engine: so many prefill and so many decode processes.", rich_help_panel=GEOMETRY
        ),
    ] = 1,
    prefill_tp: Annotated[
        int | None, typer.Option(help="Ranks of the prefill engine, if others.", rich_help_panel=GEOMETRY)
    ] = None,
    decode_tp: Annotated[
        int | None, typer.Option(help="Ranks of the decode engine, if others.", rich_help_panel=GEOMETRY)
    ] = None,
    prefill_pp: Annotated[
        int, typer.Option(help="Pipeline stages of the prefill engine.", rich_help_panel=GEOMETRY)
    ] = 1,
    decode_pp: Annotated[int, typer.Option(help="Pipeline stages of the decode engine.", rich_help_panel=GEOMETRY)] = 1,
    prompt_tokens: Annotated[
        str,
        typer.Option(
            help="Prompt length: 1024, 128:4096 for uniform ones, 128:0.8,8192:0.2 for a mix with weights.",
            rich_help_panel=WORK,
        ),
    ] = "1024",
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Take requests from a file in Mooncake's format, one JSON object per line: input_length, and where "
            "they are there hash_ids (shared prefixes) and timestamp (for --arrivals trace).",
            rich_help_panel=WORK,
        ),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Cut longer prompts; the report says how many.", rich_help_panel=WORK),
    ] = None,
    prefix_hit: Annotated[
        str,
        typer.Option(
            help="How much of every prompt the decode side has already: tokens (512) or a share (50%).",
            rich_help_panel=WORK,
        ),
    ] = "0",
    shared_prefix: Annotated[
        int | None,
        typer.Option(
            help="Let every prompt begin with one of --prefix-groups prefixes of so many tokens.", rich_help_panel=WORK
        ),
    ] = None,
    prefix_groups: Annotated[
        int | None, typer.Option(help="How many such prefixes there are.", show_default="8", rich_help_panel=WORK)
    ] = None,
    prefix_cache: Annotated[
        int,
        typer.Option(
            help="Tokens that the modelled prefix cache of each reading engine holds, where prompts share prefixes; "
            "0 for none.",
            rich_help_panel=WORK,
        ),
    ] = 1 << 20,
    requests: Annotated[
        int | None, typer.Option(help="How many requests; 100, or all of the trace.", rich_help_panel=WORK)
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="Pulls in flight on each decode rank (closed loop).", rich_help_panel=WORK)
    ] = 16,
    rate: Annotated[
        float | None,
        typer.Option(help="Open loop: requests per second, however slow they are served.", rich_help_panel=WORK),
    ] = None,
    arrivals: Annotated[
        ArrivalKind | None,
        typer.Option(
            help="When requests come: closed (one begins when another ends), at the trace's times, or with --rate at "
            "random (poisson) or evenly (uniform).",
            show_default="closed, or poisson with --rate",
            rich_help_panel=WORK,
        ),
    ] = None,
    speed: Annotated[
        float, typer.Option(help="How many times as fast the trace's clock runs.", rich_help_panel=WORK)
    ] = 1.0,
    cancel: Annotated[
        str,
        typer.Option(help="Share of the pulls that are cancelled while they run, such as 5%.", rich_help_panel=WORK),
    ] = "0%",
    cancel_within_s: Annotated[
        float,
        typer.Option(help="A random moment within so long after its call cancels such a pull.", rich_help_panel=WORK),
    ] = 0.05,
    prefill_engines: Annotated[
        int, typer.Option(help="Prefill engines; requests take turns among them.", rich_help_panel=WORK)
    ] = 1,
    decode_engines: Annotated[
        int, typer.Option(help="Decode engines; requests take turns among them.", rich_help_panel=WORK)
    ] = 1,
    both_ways: Annotated[
        bool,
        typer.Option(
            "--both-ways",
            help="Every second request goes from decode to prefill: all lend, all pull.",
            rich_help_panel=WORK,
        ),
    ] = False,
    warmup: Annotated[
        int,
        typer.Option(
            help="Requests between every two engines before the clock runs, so that figures hold no first connections.",
            rich_help_panel=WORK,
        ),
    ] = 1,
    block_order: Annotated[
        BlockOrder, typer.Option(help="Whether a request's blocks lie in runs or anywhere.", rich_help_panel=WORK)
    ] = BlockOrder.runs,
    seed: Annotated[
        int, typer.Option(help="Of the pattern, the lengths and the block order.", rich_help_panel=WORK)
    ] = 0,
    verify: Annotated[
        Verify,
        typer.Option(
            help="Compare every byte, a sample of blocks, or nothing (and fill nothing).", rich_help_panel=RUN
        ),
    ] = Verify.full,
    lease_s: Annotated[
        float,
        typer.Option(help="How long prefill holds the blocks of a request that nobody claims.", rich_help_panel=RUN),
    ] = 30.0,
    timeout_s: Annotated[float, typer.Option(help="Deadline of each pull.", rich_help_panel=RUN)] = 30.0,
    pool_mb: Annotated[
        int | None,
        typer.Option(
            help="Largest KV pool per rank, in MiB; by default what the concurrency needs and memory allows.",
            rich_help_panel=RUN,
        ),
    ] = None,
    transport: Annotated[
        Transport,
        typer.Option(
            help="What UCX may use: its own choice (shared memory on one host), or TCP on loopback.",
            rich_help_panel=RUN,
        ),
    ] = Transport.auto,
    posting_threads: Annotated[
        str,
        typer.Option(
            help="Threads per rank that post bulk reads; 0 posts everything on the event loop.",
            rich_help_panel=RUN,
            metavar="N|auto",
        ),
    ] = "auto",
    process: Annotated[
        Process,
        typer.Option(
            help="What of NIXL runs in a process of its own: what serves remote readers, reads as well, or nothing.",
            rich_help_panel=RUN,
        ),
    ] = Process.auto,
    announced: Annotated[
        bool,
        typer.Option(
            "--announced",
            help="Announce every request, and have its claim granted, before its window opens: as where the decode "
            "engine hears of a request when its prefill begins.",
            rich_help_panel=RUN,
        ),
    ] = False,
    loop: Annotated[
        Loop, typer.Option(help="Event loop of the workers: uvloop where it is installed.", rich_help_panel=RUN)
    ] = Loop.auto,
    floor: Annotated[
        bool,
        typer.Option(
            help="With every wave move the same bytes without the engine (memory copy, process_vm_readv or a TCP "
            "socket, and a raw NIXL loop) and report how much of that the engine reaches.",
            rich_help_panel=RUN,
        ),
    ] = False,
    rounds: Annotated[
        int,
        typer.Option(
            "--rounds",
            "--floor-rounds",
            help="With --floor: how many waves the requests are cut into. (A sweep has --rounds of its own.)",
            rich_help_panel=RUN,
        ),
    ] = 10,
    net_device: Annotated[
        str,
        typer.Option(help="Network device that UCX may use, such as eth0.", rich_help_panel=RUN, metavar="DEVICE"),
    ] = "",
    memory: Annotated[
        MemoryKind, typer.Option(help="Where the pools lie: host memory, or a GPU's.", rich_help_panel=RUN)
    ] = MemoryKind.host,
    role: Annotated[
        Role | None,
        typer.Option(
            help="Run only these engines here, and the others on another machine, where the same command has the other "
            "--role. One of the two has --bind, the other one --connect: that one drives, and reports.",
            rich_help_panel=APART,
        ),
    ] = None,
    bind: Annotated[
        str | None, typer.Option(help="Where to wait for the other half.", rich_help_panel=APART, metavar="HOST:PORT")
    ] = None,
    connect: Annotated[
        str | None,
        typer.Option(
            help="Where the other half waits; with keys, its public one or the name of its file in --authorized.",
            rich_help_panel=APART,
            metavar="HOST:PORT[#KEY]",
        ),
    ] = None,
    secret: Annotated[
        str | None,
        typer.Option(
            help="This half's own keys (asynckv keygen), for its engines and for what the halves say to each other.",
            rich_help_panel=APART,
            metavar="NAME.key_secret",
        ),
    ] = None,
    authorized: Annotated[
        str | None,
        typer.Option(help="Directory with the .key files of both halves.", rich_help_panel=APART, metavar="DIR"),
    ] = None,
    allow_insecure: Annotated[
        bool, typer.Option("--allow-insecure", help="Go without keys, in a trusted network.", rich_help_panel=APART)
    ] = False,
    json: Annotated[
        str | None, typer.Option(help="Write the report there; - for stdout.", rich_help_panel=OUT, metavar="FILE")
    ] = None,
    log: Annotated[
        str | None,
        typer.Option(
            help="Write all processes' structured logs there, as JSON lines.", rich_help_panel=OUT, metavar="FILE"
        ),
    ] = None,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(help="info with --log, else error to stderr; debug logs every transition.", rich_help_panel=OUT),
    ] = None,
) -> None:
    """Drive prefill and decode processes, verify every byte, report what was measured.

    Real NIXL and real ZMQ between one process per rank. Requests go in waves: blocks are filled with a
    seeded pattern, lent, pulled while the clock runs, and compared afterwards. In a closed loop so many are in
    flight at any time; in an open loop (--rate, --arrivals) they come by a schedule, and latency counts from there.
    """
    if context.invoked_subcommand is not None:
        refuse_options(context)
        return
    from asynckv.bench import workload
    from asynckv.bench.driver import Options
    from asynckv.bench.protocol import Side
    from asynckv.bench.schedule import Arrivals, Engines

    chosen = _model(model, hf_config).resized(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    decode = Side(
        tp=tp if decode_tp is None else decode_tp,
        pp=decode_pp,
        block_size=block_size,
        ratio=ratio,
        order=order.value,
        conv_order=conv_order.value,
    )
    prefill = Side(
        tp=tp if prefill_tp is None else prefill_tp,
        pp=prefill_pp,
        block_size=block_size if prefill_block_size is None else prefill_block_size,
        ratio=ratio if prefill_ratio is None else prefill_ratio,
        order=(prefill_order or order).value,
        conv_order=(prefill_conv_order or conv_order).value,
    )
    for name, number in (("--requests", requests), ("--max-prompt-tokens", max_prompt_tokens), ("--pool-mb", pool_mb)):
        if number is not None and not 1 <= number <= MOST:
            raise ConfigError(f"{name} {number} is outside 1 ... {MOST}")
    if seed < 0:
        raise ConfigError(f"--seed {seed} must be 0 or more")
    if trace is not None:
        work = workload.traced(trace, requests).capped(max_prompt_tokens)
    else:
        work = workload.drawn(prompt_tokens, requests or 100, seed).capped(max_prompt_tokens)
    if shared_prefix is not None:
        work = work.sharing(shared_prefix, 8 if prefix_groups is None else prefix_groups, seed)
    elif prefix_groups is not None:
        raise ConfigError(
            f"--prefix-groups {prefix_groups} says nothing without --shared-prefix; give the prefixes' length as well"
        )
    _refuse_idle(context, floor=floor, prefixes=shared_prefix is not None or trace is not None)
    kind = arrivals or (ArrivalKind.closed if rate is None else ArrivalKind.poisson)
    options = Options(
        model=chosen,
        workload=work,
        prefill=prefill,
        decode=decode,
        prefix_hit=prefix_hit,
        concurrency=concurrency,
        warmup=warmup,
        block_order=block_order.value,
        verify=verify.value,
        seed=seed,
        lease_s=lease_s,
        timeout_s=timeout_s,
        pool_mb=pool_mb,
        transport=transport.value,
        announced=announced,
        posting_threads=int(posting_threads) if posting_threads.isdecimal() else posting_threads,
        process=process.value,
        loop=loop.value,
        floor=floor,
        rounds=rounds,
        engines=Engines(prefill_engines, decode_engines, both_ways),
        arrivals=Arrivals(kind.value, rate, speed),
        prefix_cache=prefix_cache,
        cancel=workload.share_of("--cancel", cancel),
        cancel_within_s=cancel_within_s,
        memory=memory.value,
        net_device=net_device,
        log_path=_log_path(log),
        log_level=(log_level or (LogLevel.info if log else LogLevel.error)).value,
    )
    half = _half(role, bind, connect, secret, authorized, allow_insecure)
    if half is not None and half.bind:
        if json is not None:
            raise ConfigError(f"--json {json}: the half with --connect has the report; leave it out here")
        raise typer.Exit(_serve(options, half))
    raise typer.Exit(_bench(options, json, half))


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


@app.command(epilog=LAYOUT_EPILOG)
def layout(
    model: Annotated[
        str | None,
        typer.Option(show_default=DEFAULT_MODEL, help="Preset; an unknown name lists all.", rich_help_panel=GEOMETRY),
    ] = None,
    hf_config: HfConfig = None,
    layers: Layers = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    dtype: Dtype = None,
    block_size: BlockSize = 16,
    ratio: Ratio = 1,
    num_blocks: Annotated[
        int, typer.Option(help="Blocks in every group, as the engine declares them.", rich_help_panel=GEOMETRY)
    ] = 4096,
    order: Annotated[Order, typer.Option(help="Memory order, as for bench.", rich_help_panel=GEOMETRY)] = Order.nhd,
    conv_order: Annotated[
        ConvOrder, typer.Option(help="Order of a convolution's state.", rich_help_panel=GEOMETRY)
    ] = ConvOrder.channel,
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
    from asynckv.tools.layout_file import dump_layouts
    from asynckv.tools.layouts import model_layout

    chosen = _model(model, hf_config).resized(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    for name, number, size in (("--rank", rank, tp), ("--stage", stage, pp)):
        if number is not None and not 0 <= number < size:
            raise ConfigError(f"{name} {number} is outside its group of {size}; use 0 ... {size - 1}")
    for name, number in (("--tp", tp), ("--pp", pp), ("--num-blocks", num_blocks)):
        if not 1 <= number <= MOST:
            raise ConfigError(f"{name} {number} is outside 1 ... {MOST}")
    if not 1 <= block_size <= MOST:
        raise ConfigError(f"--block-size {block_size} is outside 1 ... {MOST}")
    ranks = (tp if rank is None else 1) * (pp if stage is None else 1)
    # Every stage writes its own layers.
    if ranks * len(chosen.layers) > MOST_WRITTEN * pp:
        raise ConfigError(
            f"{ranks} ranks x {len(chosen.layers)} layers are more than can be written into one file ({MOST_WRITTEN}); "
            f"choose some with --rank and --stage, or fewer --layers"
        )
    if not 1 <= ratio <= MOST or block_size % ratio:
        raise ConfigError(
            f"--ratio {ratio} does not divide --block-size {block_size}; a block is so many kernel blocks of equal size"
        )
    try:
        made = [
            model_layout(
                chosen,
                tp_rank=r,
                tp_size=tp,
                pp_stage=s,
                pp_size=pp,
                block_size=block_size,
                ratio=ratio,
                num_blocks=num_blocks,
                order=order.value,
                conv_order=conv_order.value,
            )
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
    _write("--output", output, dump_layouts(made))


@app.command(epilog=PLAN_EPILOG)
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
    import msgspec
    from rich.console import Console
    from rich.progress import Progress

    from asynckv.bench.workload import cached_tokens
    from asynckv.tools import explain
    from asynckv.tools.layout_file import load_layouts
    from asynckv.tools.pictures import to_svg

    if not 1 <= tokens <= 1 << 24:
        raise ConfigError(f"--tokens {tokens} is outside 1 ... {1 << 24}")
    if json == "-" and picture == "-":
        raise ConfigError("--json - and --picture - cannot share stdout; give one of them a file")
    mine, theirs = load_layouts(local), load_layouts(remote)
    cached = cached_tokens(prefix_hit, tokens)
    errors = Console(stderr=True)
    with Progress(*_columns(), console=errors, disable=not errors.is_terminal, transient=True) as bar:
        task = bar.add_task("ranks", total=len(mine))
        report = explain.explain(mine, theirs, tokens, cached, lambda: bar.advance(task))
    if json is not None:
        _write("--json", json, msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
    console = Console(stderr="-" in (json, picture))
    explain.show(report, console)
    if report["plannable"]:
        if picture is not None:
            # Room for a name in every rank's bar.
            width = max(72, 8 * max(len(mine), len(theirs)))
            drawn = list(explain.pictures(mine, theirs, report, width))
            _write("--picture", picture, to_svg(*drawn, width=width + 38, name="asynckv-plan"))
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


def _model(name: str | None, hf_config: Path | None) -> Any:
    from asynckv.tools import models

    if name is not None and hf_config is not None:
        raise ConfigError(f"--model {name} and --hf-config {hf_config} were both given; choose one")
    return models.read_hf_config(hf_config) if hf_config else models.preset(name or DEFAULT_MODEL)


SIMULATE_EPILOG = """
[bold]Examples[/bold]

  asynckv simulate --seeds 10000

  asynckv simulate --first-seed 4711 --seeds 1 --faults loss,crash --events 500

[bold]Exit status[/bold]  0 clean, 1 a violation, 2 bad input, 130 Ctrl-C
"""


@app.command(epilog=SIMULATE_EPILOG)
def simulate(
    seeds: Annotated[
        int, typer.Option(help="How many services to simulate, one per seed.", rich_help_panel=RUN)
    ] = 1000,
    first_seed: Annotated[int, typer.Option(help="The first seed.", rich_help_panel=RUN)] = 0,
    faults: Annotated[
        str, typer.Option(help="What may go wrong: all, none, or kinds with commas between.", rich_help_panel=RUN)
    ] = "all",
    jobs: Annotated[int, typer.Option(help="Processes; 0 for one per core.", rich_help_panel=RUN)] = 0,
    events: Annotated[
        int, typer.Option(help="Events to print before a violation, after minimising.", rich_help_panel=OUT)
    ] = 120,
    json: Annotated[
        str | None, typer.Option(help="Write the counts there; - for stdout.", rich_help_panel=OUT, metavar="FILE")
    ] = None,
) -> None:
    """Simulate whole services under faults, with virtual time, and look for anything that must never happen.

    Every seed stands for some prefill and decode ranks, requests, and a script of faults: lost, late and repeated
    packets, crashes, restarts, freezes, pauses anywhere, transfers that fail, never end, or land after their end.
    Real engines run on simulated planes; freed memory is overwritten at once. The same seed gives the same run.
    """
    import msgspec
    from rich.console import Console
    from rich.progress import Progress

    from asynckv.testing import simulation

    known = simulation.FAULTS
    chosen = known if faults == "all" else () if faults == "none" else tuple(x.strip() for x in faults.split(","))
    if strange := [x for x in chosen if x not in known]:
        raise ConfigError(f"--faults {strange[0]!r} is unknown; use all, none, or some of {', '.join(known)}")
    for name, number, least in (("--seeds", seeds, 1), ("--first-seed", first_seed, 0), ("--jobs", jobs, 0)):
        if not least <= number <= 1 << 40:
            raise ConfigError(f"{name} {number} is outside {least} ... {1 << 40}")
    errors = Console(stderr=True)
    with Progress(*_columns(), console=errors, disable=not errors.is_terminal, transient=True) as bar:
        task = bar.add_task("seeds", total=seeds)
        found = simulation.simulate_many(
            range(first_seed, first_seed + seeds), chosen, jobs or os.cpu_count() or 1, lambda n: bar.advance(task, n)
        )
    report = {
        "schema": "asynckv.simulate/1",
        "seeds": found.seeds,
        "first_seed": first_seed,
        "faults": list(chosen),
        "violations": dict(found.violations),
        "counts": dict(sorted(found.counts.items())),
        "seconds": round(found.seconds, 3),
    }
    if json is not None:
        _write("--json", json, msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
    console = Console(stderr=json == "-")
    rate = found.seeds / found.seconds if found.seconds else 0.0
    num_faults = sum(n for k, n in found.counts.items() if k.startswith("fault."))
    console.print(
        f"{found.seeds:,} services in {found.seconds:.1f} s ({rate:.0f} per second): "
        f"{found.counts['pull.complete']:,} pulls complete, {num_faults:,} faults, {len(found.violations)} violations",
        highlight=False,
    )
    if found.violations:
        seed, violation = next(iter(found.violations.items()))
        console.print(f"\nseed {seed}: {violation}\nminimised:", highlight=False, markup=False)
        small = simulation.minimise(simulation.make_script(seed, chosen))
        for line in small.explain(events):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        console.print(f"\nagain: asynckv simulate --first-seed {seed} --seeds 1 --faults {faults}", highlight=False)
        raise typer.Exit(1)


KEYGEN_EPILOG = """
[bold]Example[/bold]  two engines that trust each other

  asynckv keygen prefill-0; asynckv keygen decode-0

  mkdir authorized; cp keys/*.key authorized/

  KeysConfig(secret="keys/prefill-0.key_secret", authorized="authorized")

Each engine's host gets its own secret, and a copy of authorized/. Pass KeysConfig as EngineConfig(keys=...).

[bold]Exit status[/bold]  0 written, 2 bad input
"""


@app.command(epilog=KEYGEN_EPILOG)
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


def _refuse_idle(context: typer.Context, *, floor: bool, prefixes: bool) -> None:
    """Refuse options that would do nothing beside the others.

    Raises:
        ConfigError: One was given.
    """

    def given(name: str) -> bool:
        source = context.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    for name, has_use, remedy in (
        ("rounds", floor, "--rounds says nothing without --floor, whose rounds it counts; give --floor as well"),
        ("cancel_within_s", given("cancel"), "--cancel-within-s says nothing without --cancel; give --cancel 5%"),
        (
            "prefix_cache",
            prefixes,
            "--prefix-cache says nothing where prompts share no prefixes; give --shared-prefix or a --trace as well",
        ),
        (
            "prompt_tokens",
            not given("trace"),
            "--prompt-tokens and --trace were both given, and the trace says how long prompts are; choose one",
        ),
    ):
        if given(name) and not has_use:
            raise ConfigError(remedy)


def _log_path(target: str | None) -> str:
    if target is None:
        return ""
    if target == "-":
        raise ConfigError("--log -: stdout is not for logs; give a file, or leave it out for errors on stderr")
    path = Path(target)
    try:
        path.write_text("")
    except OSError as exc:
        raise ConfigError(f"--log {path}: cannot be written: {exc.strerror}") from exc
    return str(path.resolve())


def _half(
    role: str | None,
    bind: str | None,
    connect: str | None,
    secret: str | None,
    authorized: str | None,
    allow_insecure: bool,
) -> Any:
    from asynckv.bench.remote import Half

    others = {"--bind": bind, "--connect": connect, "--secret": secret, "--authorized": authorized}
    if role is None:
        given = [f"{k} {v}" for k, v in others.items() if v is not None] + ["--allow-insecure"] * allow_insecure
        if given:
            raise ConfigError(
                f"{given[0]} is for a benchmark on two machines; give --role prefill or --role decode as well"
            )
        return None
    return Half(
        role=str(role),
        bind=bind or "",
        connect=connect or "",
        secret=secret or "",
        authorized=authorized or "",
        allow_insecure=allow_insecure,
    )


def _logs(options: Any) -> Any:
    from asynckv.observe.log import configure

    stream = open(options.log_path, "a", buffering=1, encoding="utf-8") if options.log_path else sys.stderr  # noqa: SIM115
    configure(options.log_level, stream=stream)
    return stream


def _serve(options: Any, half: Any) -> int:
    from asynckv.bench import remote

    _logs(options)
    return asyncio.run(remote.serve(options, half, lambda text: _say(half.role, text)))


def _say(role: str, text: str) -> None:
    from asynckv.observe.console import without_control

    print(f"asynckv: {role} half: {without_control(text)}", file=sys.stderr, flush=True)


def _bench(options: Any, json: str | None, half: Any = None) -> int:
    import msgspec
    import structlog
    from rich.console import Console
    from rich.progress import Progress

    from asynckv.bench import driver, remote, report

    if json not in (None, "-"):
        try:
            Path(str(json)).open("a").close()
        except OSError as exc:
            raise ConfigError(f"--json {json}: cannot be written: {exc.strerror}") from exc
    errors = Console(stderr=True)
    stream = _logs(options)
    log = structlog.get_logger("asynckv.bench")
    with Progress(*_columns(), console=errors, disable=not errors.is_terminal, transient=True) as bar:
        task = bar.add_task("requests", total=len(options.workload.prompt_tokens))

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        async def measure() -> tuple[Any, dict[str, Any]]:
            if half is None:
                found = await driver.run(options, progress=progress, log=log)
                return found, report.make(options, found)
            return await remote.measure(options, half, lambda text: _say(half.role, text), progress, log)

        found, result = asyncio.run(measure())
    text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"
    if json == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    elif json is not None:
        Path(json).write_text(text)
    report.show(result, errors if json == "-" else Console())
    if stream is not sys.stderr:
        stream.close()
    return report.status(found, result)


def main() -> None:
    """Run the command line; errors are one line on stderr."""
    try:
        sys.exit(app(standalone_mode=False))
    except typer.Abort:
        sys.exit(130)
    except USAGE_ERROR as exc:
        if not exc.format_message():
            # Without arguments: the help has been printed.
            sys.exit(2)
        _fail(_usage(exc), exc.exit_code)
    except ConfigError as exc:
        _fail(exc, 2)
    except AsyncKVError as exc:
        _fail(exc, 2 if type(exc).__name__ == "BackendError" else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has heard enough; nothing more must be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(f"the output cannot be written: {exc.strerror}", 2)


USAGE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""What wrong options raise: of click, or of the copy of it that newer releases of typer have inside."""


def _usage(exc: Any) -> str:
    """Say what is wrong with an option in one line."""
    context = getattr(exc, "ctx", None)
    hint = f"; see {context.command_path} --help" if context is not None else ""
    text = " ".join(exc.format_message().split()).rstrip(".").replace("Value error, ", "")
    return f"{text}{hint}"


def _fail(exc: object, status: int) -> None:
    from asynckv.observe.console import without_control

    print(f"asynckv: {without_control(str(exc))}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
