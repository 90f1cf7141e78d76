"""Every option of `asynckv bench`, each declared once, as a field of `Options`.

The declarations make the command line and the parameters of sweeps, what a worker is told (`protocol.Setup`), the JSON
record's `config`, and the check of bounds. `--help` reads this, so it loads nothing heavy.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from msgspec import Struct
from msgspec.structs import asdict

from asynckv.config import MIN_LEASE_S, LeaseConfig
from asynckv.errors import ConfigError

if TYPE_CHECKING:
    from asynckv.geometry.layout import Layout
    from asynckv.tools.plan.models import Model

C = TypeVar("C", bound=Callable[..., Any])

DEFAULT_MODEL = "llama-3.1-8b"
PROMPT_TOKENS = "1024"
MOST = 1 << 20
MOST_S = 86_400.0
MOST_OF = {"tp": 1024, "pp": 1024, "block_size": MOST, "engines": 256}
MOST_RATE = 1e6


def share_of(option: str, text: str) -> float:
    """Return a share given as `5%` or `0.05`."""
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"{option} {text!r} is no share such as 5% or 0.05")
    return share


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


def _in(panel: str, *, in_record: bool = True, is_single: bool = False) -> Callable[..., Any]:
    """Make what declares an option of a panel of the help.

    With `in_record` its value stands in the JSON record; otherwise the record has what became of it, or nothing. An
    option that `is_single` means nothing for a sweep, whose points are many runs.
    """

    def declare(default: Any, help: str, *names: str, **more: Any) -> Any:
        option = typer.Option(*names, help=help, rich_help_panel=panel, **more)
        return field(default=default, metadata={"option": option, "in_record": in_record, "is_single": is_single})

    return declare


SIDES = "N|PREFILL:DECODE"
# The record has the model, the two shapes and the engines that these make.
common = _in("Begin with these")
asked = _in("Begin with these", in_record=False)
geometry = _in("Geometry", in_record=False)
work = _in("Workload")
source = _in("Workload", in_record=False)
run = _in("Run")
apart = _in("Two machines", in_record=False)
report = _in("Begin with these", in_record=False, is_single=True)
output = _in("Output", in_record=False, is_single=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run, as it was asked for. What may differ between the engines is text: one value, or `PREFILL:DECODE`."""

    model: str | None = asked(
        None,
        "Preset, such as llama-3.1-8b, gemma-3-4b, deepseek-v3, nemotron-h-8b, qwen3-next-80b-a3b; "
        "an unknown name lists all.",
        show_default=DEFAULT_MODEL,
    )
    layers: int | None = asked(None, "Layers, instead of the model's; one of every kind is kept.")
    hf_config: str | None = geometry(None, "A Hugging Face config.json, instead of a preset.")
    kv_heads: int | None = geometry(None, "KV heads, instead of the model's.")
    dtype: str | None = geometry(None, "Element type, such as bfloat16 or float8_e4m3fn.")
    tp: str = geometry("1", "Ranks of each engine, or of prefill and decode, such as 2:1.", metavar=SIDES)
    pp: str = geometry("1", "Pipeline stages, in the same way.", metavar=SIDES)
    block_size: str = geometry("16", "Tokens per block, in the same way.", metavar=SIDES)
    order: str = geometry(
        "nhd",
        "Memory order, in the same way: token before head (nhd) or after (hnd); block-nhd, block-hnd: K and V in "
        "one block; cross-nhd, cross-hnd: all layers of a block adjacent.",
        metavar="ORDER|PREFILL:DECODE",
    )

    prompt_tokens: str | None = asked(
        None,
        "Prompt length: 1024, 128:4096 for uniform ones, 128:0.8,8192:0.2 for a mix with weights.",
        show_default=PROMPT_TOKENS,
    )
    trace: str | None = source(
        None,
        "Take requests from a file in Mooncake's format, one JSON object per line: input_length, and where "
        "they are there hash_ids (shared prefixes) and timestamp (for --speed).",
    )
    max_prompt_tokens: int | None = source(None, "Cut longer prompts; the report says how many.", min=1, max=MOST)
    prefix_hit: str = work("0", "How much of every prompt the decode side has already: tokens (512) or a share (50%).")
    shared_prefix: str | None = source(
        None,
        "Let every prompt begin with one of 8 prefixes of so many tokens; 1024:32 for one of 32 prefixes.",
        metavar="TOKENS[:PREFIXES]",
    )
    prefix_cache: int = work(
        1 << 20,
        "Tokens that the modelled prefix cache of each reading engine holds, where prompts share prefixes; 0 for none.",
        min=0,
        max=1 << 40,
    )
    requests: int | None = asked(None, "How many requests; 100, or all of the trace.", min=1, max=MOST)
    concurrency: int = common(16, "Pulls in flight on each decode rank (closed loop).", min=1)
    rate: float | None = work(
        None,
        "Open loop: requests per second at random, however slow they are served.",
        min=1e-6,
        max=MOST_RATE,
    )
    speed: float | None = work(
        None, "Open loop: requests come at the trace's times, so many times as fast.", min=1e-6, max=MOST_RATE
    )
    engines: str = geometry("1", "Engines, in the same way; requests take turns among them.", metavar=SIDES)
    warmup: int = work(
        1,
        "Requests between every two engines before the clock runs, so that figures hold no first connections.",
        min=0,
        max=10_000,
    )
    block_order: Literal["runs", "random"] = work("runs", "Whether a request's blocks lie in runs or anywhere.")
    seed: int = work(0, "Of the pattern, the lengths and the block order.", min=0)

    verify: Literal["full", "off"] = run("full", "Compare every byte, or nothing (and fill nothing).")
    timeout_s: float = run(
        30.0,
        "Deadline of each pull, and how long prefill holds the blocks of a request that nobody claims.",
        min=MIN_LEASE_S,
        max=MOST_S,
    )
    pool_mb: int | None = run(
        None,
        "Largest KV pool per rank, in MiB; by default what the concurrency needs and memory allows.",
        min=1,
        max=MOST,
    )
    transport: Literal["auto", "tcp"] = run(
        "auto", "What UCX may use: its own choice (shared memory on one host), or TCP on loopback."
    )
    posting_threads: str = run(
        "auto",
        "Threads per rank that post bulk reads; 0 posts everything on the event loop.",
        metavar="N|auto",
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
        "--announced",
    )
    floor: bool = common(
        False,
        "Beside every wave move the same bytes by a raw NIXL loop, without the engine, and report how much of that "
        "the engine reaches.",
        "--floor",
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

    json: str | None = report(
        None,
        "Write the report there; - for stdout. asynckv bench compare compares two.",
        metavar="FILE",
    )
    log: str | None = output(None, "Write all processes' structured logs there, as JSON lines.", metavar="FILE")

    def of_side(self, name: str, role: str) -> str:
        """Return the value that an option has for one side."""
        prefill, colon, decode = str(getattr(self, name)).partition(":")
        return decode if colon and role == "decode" else prefill

    def number(self, name: str, role: str) -> int:
        text, most = self.of_side(name, role), MOST_OF[name]
        if not text.isdecimal() or not 1 <= int(text) <= most:
            option = f"--{name.replace('_', '-')} {getattr(self, name)}"
            raise ConfigError(f"{option}: {text!r} ({role} side) is no number from 1 to {most}")
        return int(text)

    def shape(self, role: str) -> Shape:
        sizes: Any = {name: self.number(name, role) for name in ("tp", "pp", "block_size")}
        return Shape(**sizes, order=self.of_side("order", role))

    @property
    def arrivals(self) -> Literal["closed", "poisson", "trace"]:
        """In a closed loop the next request comes when one ends; else by a clock, however slow they are served."""
        return "poisson" if self.rate is not None else "trace" if self.speed is not None else "closed"

    @property
    def posters(self) -> int | str:
        return int(self.posting_threads) if self.posting_threads.isdecimal() else self.posting_threads

    @property
    def lease(self) -> LeaseConfig:
        return LeaseConfig(lease_s=self.timeout_s, grant_s=min(10.0, self.timeout_s))

    @property
    def level(self) -> Literal["info", "error"]:
        return "info" if self.log else "error"

    def record(self) -> dict[str, Any]:
        """What stands in the JSON record as it is."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.metadata["in_record"]}
        return found | {"posting_threads": self.posters}


DECLARED = {each.name: each for each in fields(Options)}
OF_SINGLE_RUNS = {name for name, each in DECLARED.items() if each.metadata["is_single"]}

# What `asynckv layout` asks for as well.
HfConfig = Annotated[str | None, DECLARED["hf_config"].metadata["option"]]
KvHeads = Annotated[int | None, DECLARED["kv_heads"].metadata["option"]]
Dtype = Annotated[str | None, DECLARED["dtype"].metadata["option"]]


def taking_options(command: C, *, names: Iterable[str] = DECLARED) -> C:
    """Give a command, in place of its `**given`, all options or those that are named."""
    hints, kinds = typing.get_type_hints(command, include_extras=True), typing.get_type_hints(Options)
    annotated: Any = Annotated
    made = [x for x in inspect.signature(command).parameters.values() if x.kind is not inspect.Parameter.VAR_KEYWORD]
    made = [each.replace(annotation=hints[each.name]) for each in made]
    for name in names:
        hint = annotated[kinds[name], DECLARED[name].metadata["option"]]
        kind = inspect.Parameter.KEYWORD_ONLY
        made.append(inspect.Parameter(name, kind, default=DECLARED[name].default, annotation=hint))
    command.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in made}
    return command
