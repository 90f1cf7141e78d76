"""Every option of `asynckv bench`, each declared once, as a field of `Options`.

The declarations make the command line and the parameters of sweeps, what a worker is told (`protocol.Setup`), the JSON
record's `config`, and the check of bounds. `--help` reads this, so it loads nothing heavy.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

from msgspec import Struct
from msgspec.structs import asdict

from asynckv.config import MIN_LEASE_S, LeaseConfig
from asynckv.errors import ConfigError

if TYPE_CHECKING:
    from asynckv.geometry.layout import Layout
    from asynckv.tools.plan.models import Model

T = TypeVar("T")
Order = Literal["nhd", "hnd", "block-nhd", "block-hnd", "cross-nhd", "cross-hnd"]
ConvOrder = Literal["channel", "row"]

DEFAULT_MODEL = "llama-3.1-8b"
PROMPT_TOKENS = "1024"
PREFIX_CACHE = 1 << 20
MOST = 1 << 20
MOST_S = 86_400.0
MOST_RATE = 1e6


@dataclass(frozen=True, slots=True)
class Option:
    """What an option is beside its name, type and default.

    Attributes:
        read: Makes the value of the command line's text, by the option's name; its default is then `shown`.
        in_record: It stands in the JSON record as it is. Otherwise the record has what became of it, or nothing.
    """

    panel: str
    help: str
    metavar: str | None = None
    shown: str | None = None  # what the help gives as its default, if that is not the field's
    least: float | None = None
    most: float | None = None
    read: Callable[[str, str], Any] | None = None
    is_file: bool = False  # names a file that the run reads: a sweep takes other content for another sweep
    in_record: bool = True
    is_single: bool = False  # means nothing for a sweep, whose points are many runs

    def check(self, name: str, value: Any) -> None:
        if self.least is None or value is None:
            return
        if self.most is None:
            if not value >= self.least:
                raise ConfigError(f"{name} {value} must be {self.least} or more")
        elif not self.least <= value <= self.most:
            value, least, most = (f"{x:g}" if isinstance(x, float) else x for x in (value, self.least, self.most))
            raise ConfigError(f"{name} {value} is outside {least} ... {most}")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def share_of(option: str, text: str) -> float:
    """Return a share given as `5%` or `0.05`."""
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"{option} {text!r} is no share such as 5% or 0.05")
    return share


def _number_or_word(option: str, text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _number(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{option} {text!r} is no number") from None


def _order(option: str, text: str) -> Order:
    if text not in (known := typing.get_args(Order)):
        raise ConfigError(f"{option} {text!r} is none of {', '.join(known)}")
    return cast(Order, text)


def _of_sides(one: Callable[[str, str], T]) -> Callable[[str, str], T | tuple[T, T]]:
    """Make what reads one value for both engines, or `PREFILL:DECODE`."""

    def read(option: str, text: str) -> T | tuple[T, T]:
        prefill, colon, decode = text.partition(":")
        return (one(option, prefill), one(option, decode)) if colon else one(option, text)

    return read


class Shape(Struct, frozen=True, kw_only=True):
    tp: int = 1
    pp: int = 1
    block_size: int = 16
    ratio: int = 1
    order: str = "nhd"
    conv_order: str = "channel"

    def layout(self, model: Model, tp_rank: int, pp_stage: int, num_blocks: int | Sequence[int] = 1) -> Layout:
        from asynckv.tools.plan.layouts import model_layout

        how = asdict(self)
        sizes = {"tp_size": how.pop("tp"), "pp_size": how.pop("pp")}
        return model_layout(model, tp_rank=tp_rank, pp_stage=pp_stage, num_blocks=num_blocks, **sizes, **how)


def _in(panel: str, **usual: Any) -> Callable[..., Any]:
    """Make what declares an option of a panel of the help: its default, its help, and what else it is."""

    def declare(default: Any, help: str, **more: Any) -> Any:
        return field(default=default, metadata={"option": Option(panel, help, **(usual | more))})

    return declare


GEOMETRY = "Geometry"
# The record has the model, the two shapes and the engines that these make.
common = _in("Begin with these")
geometry = _in(GEOMETRY, in_record=False)
sizes = _in(GEOMETRY, in_record=False, metavar="N|PREFILL:DECODE", read=_of_sides(_number))
work = _in("Workload")
run = _in("Run")
apart = _in("Two machines", in_record=False)
output = _in("Output", in_record=False, is_single=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run, as it was asked for. What may differ between the engines is one value, or prefill's and decode's."""

    model: str | None = common(
        None,
        "Preset, such as llama-3.1-8b, gemma-3-4b, deepseek-v3, nemotron-h-8b, qwen3-next-80b-a3b; "
        "an unknown name lists all.",
        shown=DEFAULT_MODEL,
        in_record=False,
    )
    layers: int | None = common(None, "Layers, instead of the model's; one of every kind is kept.", in_record=False)
    hf_config: str | None = geometry(None, "A Hugging Face config.json, instead of a preset.", is_file=True)
    kv_heads: int | None = geometry(None, "KV heads, instead of the model's.")
    dtype: str | None = geometry(None, "Element type, such as bfloat16 or float8_e4m3fn.")
    tp: int | tuple[int, int] = sizes(1, "Ranks of each engine, or of prefill and decode, such as 2:1.", shown="1")
    pp: int | tuple[int, int] = sizes(1, "Pipeline stages, in the same way.", shown="1")
    block_size: int | tuple[int, int] = sizes(16, "Tokens per block, in the same way.", shown="16")
    order: Order | tuple[Order, Order] = geometry(  # noqa: RUF009 - a field
        "nhd",
        "Memory order, in the same way: token before head (nhd) or after (hnd); block-nhd, block-hnd: K and V in "
        "one block; cross-nhd, cross-hnd: all layers of a block adjacent.",
        metavar="ORDER|PREFILL:DECODE",
        read=_of_sides(_order),
        shown="nhd",
    )

    prompt_tokens: str | None = common(
        None,
        "Prompt length: 1024, 128:4096 for uniform ones, 128:0.8,8192:0.2 for a mix with weights.",
        shown=PROMPT_TOKENS,
        in_record=False,
    )
    trace: str | None = work(
        None,
        "Take requests from a file in Mooncake's format, one JSON object per line: input_length, and where "
        "they are there hash_ids (shared prefixes) and timestamp (for --speed).",
        is_file=True,
        in_record=False,
    )
    max_prompt_tokens: int | None = work(
        None, "Cut longer prompts; the report says how many.", least=1, most=MOST, in_record=False
    )
    prefix_hit: str = work("0", "How much of every prompt the decode side has already: tokens (512) or a share (50%).")
    shared_prefix: str | None = work(
        None,
        "Let every prompt begin with one of 8 prefixes of so many tokens; 1024:32 for one of 32 prefixes.",
        metavar="TOKENS[:PREFIXES]",
        in_record=False,
    )
    prefix_cache: int | None = work(
        None,
        "Tokens that the modelled prefix cache of each reading engine holds, where prompts share prefixes; 0 for none.",
        shown=str(PREFIX_CACHE),
        least=0,
        most=1 << 40,
    )
    requests: int | None = common(
        None, "How many requests; 100, or all of the trace.", least=1, most=MOST, in_record=False
    )
    concurrency: int = common(16, "Pulls in flight on each decode rank (closed loop).", least=1)
    rate: float | None = work(
        None,
        "Open loop: requests per second at random, however slow they are served.",
        least=1e-6,
        most=MOST_RATE,
    )
    speed: float | None = work(
        None, "Open loop: requests come at the trace's times, so many times as fast.", least=1e-6, most=MOST_RATE
    )
    engines: int | tuple[int, int] = sizes(1, "Engines, in the same way; requests take turns among them.", shown="1")
    warmup: int = work(
        1,
        "Requests between every two engines before the clock runs, so that figures hold no first connections.",
        least=0,
        most=10_000,
    )
    block_order: Literal["runs", "random"] = work("runs", "Whether a request's blocks lie in runs or anywhere.")
    seed: int = work(0, "Of the pattern, the lengths and the block order.", least=0)

    verify: Literal["full", "off"] = run("full", "Compare every byte, or nothing (and fill nothing).")
    timeout_s: float = run(
        30.0,
        "Deadline of each pull, and how long prefill holds the blocks of a request that nobody claims.",
        least=MIN_LEASE_S,
        most=MOST_S,
    )
    pool_mb: int | None = run(
        None,
        "Largest KV pool per rank, in MiB; by default what the concurrency needs and memory allows.",
        least=1,
        most=MOST,
    )
    transport: Literal["auto", "tcp"] = run(
        "auto", "What UCX may use: its own choice (shared memory on one host), or TCP on loopback."
    )
    posting_threads: int | str = run(
        "auto",
        "Threads per rank that post bulk reads; 0 posts everything on the event loop.",
        metavar="N|auto",
        shown="auto",
        read=_number_or_word,
    )
    process: Literal["auto", "serving", "never"] = run(
        "auto",
        "What of NIXL runs in a process of its own: what serves remote readers (serving), nothing (never), or as "
        "engines choose by themselves (auto).",
        metavar="WHAT",
    )
    announced: bool = run(
        False,
        "Announce every request, and have its claim granted, before its window opens: as where the decode "
        "engine hears of a request when its prefill begins.",
    )
    floor: bool = common(
        False,
        "Beside every wave move the same bytes by a raw NIXL loop, without the engine, and report how much of that "
        "the engine reaches.",
    )
    memory: Literal["host", "cuda"] = run("host", "Where the pools lie: host memory, or a GPU's.")

    remote: str | None = apart(
        None,
        "Start every prefill worker by this command, such as 'ssh HOST asynckv bench worker': it speaks "
        "over its stdin and stdout.",
        metavar="COMMAND",
    )
    remote_host: str | None = apart(
        None, "The address at which engines there listen, reachable from here.", metavar="ADDRESS"
    )

    json: str | None = common(
        None,
        "Write the report there; - for stdout. asynckv bench compare compares two.",
        metavar="FILE",
        in_record=False,
        is_single=True,
    )
    log: str | None = output(None, "Write all processes' structured logs there, as JSON lines.", metavar="FILE")

    def __post_init__(self) -> None:
        for name, (_, option) in declared().items():
            option.check(flag(name), getattr(self, name))

    def shape(self, role: str) -> Shape:
        sides = {name: getattr(self, name) for name in ("tp", "pp", "block_size", "order")}
        return Shape(**{k: v[role == "decode"] if isinstance(v, tuple) else v for k, v in sides.items()})

    @property
    def lease(self) -> LeaseConfig:
        return LeaseConfig(lease_s=self.timeout_s, grant_s=min(10.0, self.timeout_s))

    @property
    def level(self) -> Literal["info", "error"]:
        return "info" if self.log else "error"

    def record(self) -> dict[str, Any]:
        """What stands in the JSON record as it is."""
        return {name: getattr(self, name) for name, (_, option) in declared().items() if option.in_record}


@functools.cache
def declared() -> Mapping[str, tuple[Any, Option]]:
    """Name every option, with its type and its declaration, as they stand above."""
    hints = typing.get_type_hints(Options)
    return MappingProxyType({each.name: (hints[each.name], each.metadata["option"]) for each in fields(Options)})


# What `asynckv layout` asks for as well.
HfConfig = Annotated[str | None, declared()["hf_config"][1]]
Layers = Annotated[int | None, Option(GEOMETRY, declared()["layers"][1].help)]
KvHeads = Annotated[int | None, declared()["kv_heads"][1]]
HeadDim = Annotated[int | None, Option(GEOMETRY, "Head dimension, instead of the model's.")]
Dtype = Annotated[str | None, declared()["dtype"][1]]
BlockSize = Annotated[int, Option(GEOMETRY, "Tokens per block.")]
Ratio = Annotated[int, Option(GEOMETRY, "Kernel blocks per block.")]
