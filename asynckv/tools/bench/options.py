"""Every option of `asynckv bench`, each declared once.

A field of `Options` is an option: its name, type and default, and beside them (`Option`) its help, its panel, its
bounds and what else becomes of it. Made from the declarations, and nowhere spelled again:

- the command line (`asynckv.tools.bench.cli` makes its parameters), and with it the parameters of sweeps;
- what a worker is told (`protocol.Setup` carries the options whole);
- the JSON record: `config` has an option under its own name, unless it stands there in another form;
- the check of bounds, and its words.

So a new option is one field here, and its use. What options amount to together (a model, a workload, pools) is the next
room's (`asynckv.tools.bench.experiment`). Loads nothing heavy: `--help` reads it.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Struct

from asynckv.config import MIN_LEASE_S
from asynckv.errors import ConfigError

if TYPE_CHECKING:
    from asynckv.geometry.layout import Layout
    from asynckv.tools.plan.models import Model

__all__ = ["DEFAULT_MODEL", "MOST", "Option", "Options", "Shape", "declared", "flag", "share_of"]

DEFAULT_MODEL = "llama-3.1-8b"
MOST = 1 << 20
MOST_S = 86_400.0
MOST_RATE = 1e6


@dataclass(frozen=True, slots=True)
class Option:
    """What an option is beside its name, type and default.

    Attributes:
        panel: Of the help, where it stands.
        names: How it is spelled, if not only as its name with dashes.
        shown: What the help gives as its default, if that is not the field's.
        least, most, unit: Its bounds; `most` may be open.
        read: Makes the value of what the command line has as text, by the option's name; its default is then `shown`.
        is_file: Names a file that the run reads: a sweep takes other content for another sweep.
        in_record: It stands in the JSON record as it is. Otherwise the record has what became of it, or nothing.
        is_single: Means nothing for a sweep, whose points are many runs.
    """

    panel: str
    help: str
    names: tuple[str, ...] = ()
    metavar: str | None = None
    shown: str | None = None
    least: float | None = None
    most: float | None = None
    unit: str = ""
    read: Callable[[str, str], Any] | None = None
    is_file: bool = False
    in_record: bool = True
    is_single: bool = False

    def check(self, name: str, value: Any) -> None:
        """Refuse what is out of bounds.

        Raises:
            ConfigError: It is.
        """
        if self.least is None or value is None:
            return
        if self.most is None:
            if not value >= self.least:
                raise ConfigError(f"{name} {value} must be {self.least} or more")
        elif not self.least <= value <= self.most:
            value, least, most = (f"{x:g}" if isinstance(x, float) else x for x in (value, self.least, self.most))
            raise ConfigError(f"{name} {value} is outside {least} ... {most} {self.unit}".rstrip())


def flag(name: str) -> str:
    """Spell an option as the command line does."""
    return "--" + name.replace("_", "-")


def share_of(option: str, text: str) -> float:
    """Return a share given as `5%` or `0.05`.

    Raises:
        ConfigError: It is neither.
    """
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"{option} {text!r} is no share such as 5% or 0.05")
    return share


def _number_or_word(option: str, text: str) -> int | str:
    return int(text) if text.isdecimal() else text


class Shape(Struct, frozen=True, kw_only=True):
    """How one of the two engines is cut and laid out."""

    tp: int = 1
    pp: int = 1
    block_size: int = 16
    ratio: int = 1
    order: str = "nhd"
    conv_order: str = "channel"

    def layout(self, model: Model, tp_rank: int, pp_stage: int, num_blocks: int | Sequence[int] = 1) -> Layout:
        """One rank's layout.

        Raises:
            LayoutError: The sizes do not fit the model.
        """
        from asynckv.tools.plan.layouts import model_layout

        return model_layout(
            model,
            tp_rank=tp_rank,
            tp_size=self.tp,
            pp_stage=pp_stage,
            pp_size=self.pp,
            block_size=self.block_size,
            ratio=self.ratio,
            num_blocks=num_blocks,
            order=self.order,
            conv_order=self.conv_order,
        )


# The record has the model, the two shapes and the engines that these make.
common = partial(Option, "Begin with these")
geometry = partial(Option, "Geometry", in_record=False)
work = partial(Option, "Workload")
run = partial(Option, "Run")
apart = partial(Option, "Two machines", in_record=False)
output = partial(Option, "Output", in_record=False, is_single=True)

Order = Literal["nhd", "hnd", "block-nhd", "block-hnd", "cross-nhd", "cross-hnd"]
ConvOrder = Literal["channel", "row"]

# What `asynckv layout` asks for as well.
HfConfig = Annotated[str | None, geometry("A Hugging Face config.json, instead of a preset.", is_file=True)]
Layers = Annotated[int | None, geometry("Layers, instead of the model's; one of every kind is kept.")]
KvHeads = Annotated[int | None, geometry("KV heads, instead of the model's.")]
HeadDim = Annotated[int | None, geometry("Head dimension, instead of the model's.")]
Dtype = Annotated[str | None, geometry("Element type, such as bfloat16 or float8_e4m3fn.")]
BlockSize = Annotated[int, geometry("Tokens per block.")]
Ratio = Annotated[int, geometry("Kernel blocks per block.")]


class Options(Struct, frozen=True, kw_only=True):
    """One run, as it was asked for."""

    model: Annotated[
        str | None,
        common(
            "Preset, such as llama-3.1-8b, gemma-3-4b, deepseek-v3, nemotron-h-8b, qwen3-next-80b-a3b; "
            "an unknown name lists all.",
            shown=DEFAULT_MODEL,
            in_record=False,
        ),
    ] = None
    layers: Annotated[
        int | None, common("Layers, instead of the model's; one of every kind is kept.", in_record=False)
    ] = None
    hf_config: HfConfig = None
    kv_heads: KvHeads = None
    head_dim: HeadDim = None
    dtype: Dtype = None
    block_size: BlockSize = 16
    prefill_block_size: Annotated[int | None, geometry("Tokens per block of the prefill side, if others.")] = None
    ratio: Ratio = 1
    prefill_ratio: Annotated[int | None, geometry("Kernel blocks per block of the prefill side.")] = None
    order: Annotated[
        Order,
        geometry(
            "Memory order: token before head (nhd) or after (hnd); block-nhd, block-hnd: K and V in one block; "
            "cross-nhd, cross-hnd: all layers of a block adjacent.",
            metavar="ORDER",
        ),
    ] = "nhd"
    prefill_order: Annotated[
        Order | None, geometry("Memory order of the prefill side, if another.", metavar="ORDER")
    ] = None
    conv_order: Annotated[ConvOrder, geometry("Which dim of a convolution's state varies slowest.")] = "channel"
    prefill_conv_order: Annotated[ConvOrder | None, geometry("The same for the prefill side, if another.")] = None
    tp: Annotated[int, geometry("Ranks of each engine: so many prefill and so many decode processes.")] = 1
    prefill_tp: Annotated[int | None, geometry("Ranks of the prefill engine, if others.")] = None
    decode_tp: Annotated[int | None, geometry("Ranks of the decode engine, if others.")] = None
    prefill_pp: Annotated[int, geometry("Pipeline stages of the prefill engine.")] = 1
    decode_pp: Annotated[int, geometry("Pipeline stages of the decode engine.")] = 1

    prompt_tokens: Annotated[
        str,
        common(
            "Prompt length: 1024, 128:4096 for uniform ones, 128:0.8,8192:0.2 for a mix with weights.", in_record=False
        ),
    ] = "1024"
    trace: Annotated[
        str | None,
        work(
            "Take requests from a file in Mooncake's format, one JSON object per line: input_length, and where "
            "they are there hash_ids (shared prefixes) and timestamp (for --arrivals trace).",
            is_file=True,
            in_record=False,
        ),
    ] = None
    max_prompt_tokens: Annotated[
        int | None, work("Cut longer prompts; the report says how many.", least=1, most=MOST, in_record=False)
    ] = None
    prefix_hit: Annotated[
        str, work("How much of every prompt the decode side has already: tokens (512) or a share (50%).")
    ] = "0"
    shared_prefix: Annotated[
        int | None,
        work("Let every prompt begin with one of --prefix-groups prefixes of so many tokens.", in_record=False),
    ] = None
    prefix_groups: Annotated[int | None, work("How many such prefixes there are.", shown="8", in_record=False)] = None
    prefix_cache: Annotated[
        int,
        work(
            "Tokens that the modelled prefix cache of each reading engine holds, where prompts share prefixes; "
            "0 for none.",
            least=0,
            most=1 << 40,
            unit="tokens",
        ),
    ] = 1 << 20
    requests: Annotated[
        int | None, common("How many requests; 100, or all of the trace.", least=1, most=MOST, in_record=False)
    ] = None
    concurrency: Annotated[int, common("Pulls in flight on each decode rank (closed loop).", least=1)] = 16
    rate: Annotated[
        float | None,
        work("Open loop: requests per second, however slow they are served.", least=1e-6, most=MOST_RATE),
    ] = None
    arrivals: Annotated[
        Literal["closed", "trace", "poisson", "uniform"] | None,
        work(
            "When requests come: closed (one begins when another ends), at the trace's times, or with --rate at "
            "random (poisson) or evenly (uniform).",
            shown="closed, or poisson with --rate",
            metavar="KIND",
            in_record=False,
        ),
    ] = None
    speed: Annotated[float, work("How many times as fast the trace's clock runs.", least=1e-6, most=MOST_RATE)] = 1.0
    cancel: Annotated[
        float,
        work("Share of the pulls that are cancelled while they run, such as 5%.", shown="0%", read=share_of),
    ] = 0.0
    cancel_within_s: Annotated[
        float,
        work(
            "A random moment within so long after its call cancels such a pull.", least=0.0, most=MOST_S, unit="seconds"
        ),
    ] = 0.05
    prefill_engines: Annotated[
        int, work("Prefill engines; requests take turns among them.", least=1, most=256, in_record=False)
    ] = 1
    decode_engines: Annotated[
        int, work("Decode engines; requests take turns among them.", least=1, most=256, in_record=False)
    ] = 1
    both_ways: Annotated[
        bool,
        work(
            "Every second request goes from decode to prefill: all lend, all pull.",
            names=("--both-ways",),
            in_record=False,
        ),
    ] = False
    warmup: Annotated[
        int,
        work(
            "Requests between every two engines before the clock runs, so that figures hold no first connections.",
            least=0,
            most=10_000,
        ),
    ] = 1
    block_order: Annotated[Literal["runs", "random"], work("Whether a request's blocks lie in runs or anywhere.")] = (
        "runs"
    )
    seed: Annotated[int, work("Of the pattern, the lengths and the block order.", least=0)] = 0

    verify: Annotated[
        Literal["full", "sample", "off"],
        run("Compare every byte, a sample of blocks, or nothing (and fill nothing)."),
    ] = "full"
    lease_s: Annotated[
        float,
        run(
            "How long prefill holds the blocks of a request that nobody claims.",
            least=MIN_LEASE_S,
            most=MOST_S,
            unit="seconds",
        ),
    ] = 30.0
    timeout_s: Annotated[float, run("Deadline of each pull.", least=0.001, most=MOST_S, unit="seconds")] = 30.0
    pool_mb: Annotated[
        int | None,
        run(
            "Largest KV pool per rank, in MiB; by default what the concurrency needs and memory allows.",
            least=1,
            most=MOST,
        ),
    ] = None
    transport: Annotated[
        Literal["auto", "tcp"],
        run("What UCX may use: its own choice (shared memory on one host), or TCP on loopback."),
    ] = "auto"
    posting_threads: Annotated[
        int | str,
        run(
            "Threads per rank that post bulk reads; 0 posts everything on the event loop.",
            metavar="N|auto",
            shown="auto",
            read=_number_or_word,
        ),
    ] = "auto"
    process: Annotated[
        Literal["auto", "serving", "always", "never"],
        run(
            "What of NIXL runs in a process of its own: what serves remote readers (serving), reads as well (always), "
            "nothing (never), or as engines choose by themselves (auto).",
            metavar="WHAT",
        ),
    ] = "auto"
    announced: Annotated[
        bool,
        run(
            "Announce every request, and have its claim granted, before its window opens: as where the decode "
            "engine hears of a request when its prefill begins.",
            names=("--announced",),
        ),
    ] = False
    loop: Annotated[
        Literal["auto", "asyncio", "uvloop"],
        run(
            "Event loop of the workers: asyncio, uvloop, or auto: uvloop where it is installed.",
            metavar="LOOP",
        ),
    ] = "auto"
    floor: Annotated[
        bool,
        common(
            "Beside every wave move the same bytes by a raw NIXL loop, without the engine, and report how much of that "
            "the engine reaches.",
            names=("--floor",),
        ),
    ] = False
    rounds: Annotated[
        int,
        run(
            "With --floor: how many waves the requests are cut into. (A sweep has --rounds of its own.)",
            names=("--rounds", "--floor-rounds"),
        ),
    ] = 10
    net_device: Annotated[str, run("Network device that UCX may use, such as eth0.", metavar="DEVICE")] = ""
    memory: Annotated[Literal["host", "cuda"], run("Where the pools lie: host memory, or a GPU's.")] = "host"

    remote: Annotated[
        str | None,
        apart(
            "Start every worker of one side by this command, such as 'ssh HOST asynckv bench worker': it speaks over "
            "its stdin and stdout.",
            metavar="COMMAND",
        ),
    ] = None
    remote_host: Annotated[
        str | None,
        apart("The address at which engines there listen, reachable from here.", metavar="ADDRESS"),
    ] = None
    remote_role: Annotated[Literal["prefill", "decode"], apart("Which side it is.")] = "prefill"

    json: Annotated[
        str | None,
        common(
            "Write the report there; - for stdout. asynckv report draws it, asynckv bench compare compares two.",
            metavar="FILE",
            in_record=False,
            is_single=True,
        ),
    ] = None
    log: Annotated[str | None, output("Write all processes' structured logs there, as JSON lines.", metavar="FILE")] = (
        None
    )
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        output(
            "debug (every transition), info, warning or error; info with --log, else error to stderr.", metavar="LEVEL"
        ),
    ] = None

    def __post_init__(self) -> None:
        for name, (_, option) in declared().items():
            option.check(flag(name), getattr(self, name))

    def shape(self, role: str) -> Shape:
        """How one side is cut and laid out: as both are, but for what was said of it alone."""

        def of(name: str) -> Any:
            own = getattr(self, f"{role}_{name}", None)
            return getattr(self, name) if own is None else own

        return Shape(
            tp=of("tp"),
            pp=self.prefill_pp if role == "prefill" else self.decode_pp,
            block_size=of("block_size"),
            ratio=of("ratio"),
            order=of("order"),
            conv_order=of("conv_order"),
        )

    @property
    def level(self) -> Literal["debug", "info", "warning", "error"]:
        """Of the logs."""
        return self.log_level or ("info" if self.log else "error")

    def record(self) -> dict[str, Any]:
        """What stands in the JSON record as it is."""
        return {name: getattr(self, name) for name, (_, option) in declared().items() if option.in_record}


@functools.cache
def declared() -> Mapping[str, tuple[Any, Option]]:
    """Name every option, with its type and its declaration, as they stand above."""
    found = {}
    for name, hint in typing.get_type_hints(Options, include_extras=True).items():
        kind, option = typing.get_args(hint)
        found[name] = kind, option
    return MappingProxyType(found)
