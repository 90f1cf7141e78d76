"""Every option of `asynckv bench`, each declared once, as a field of `Options`.

The declarations make the command line, the parameters of sweeps, the setup that a worker gets (`protocol.Setup`), the
`config` of the JSON report, and the check of bounds. Their texts are in `tools/help.toml`. `--help` imports this
module, so it loads nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from msgspec import Struct
from msgspec.structs import asdict

from asynckv.config import MIN_LEASE_S, LeaseConfig
from asynckv.errors import ConfigError
from asynckv.tools.output import HELP

if TYPE_CHECKING:
    from asynckv.geometry.layout import Layout
    from asynckv.tools.plan.models import Model

DEFAULT_MODEL = "llama-3.1-8b"
PROMPT_TOKENS = "1024"
MOST = 1 << 20
MOST_S = 86_400.0
MOST_OF = {"tp": 1024, "pp": 1024, "dcp": 1024, "cp_interleave": MOST, "block_size": MOST, "engines": 256}
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
    dcp: int = 1
    cp_interleave: int = 1
    block_size: int = 16
    ratio: int = 1
    order: str = "nhd"
    conv_order: str = "channel"

    def layout(self, model: Model, tp_rank: int, pp_stage: int, num_blocks: int | Sequence[int] = 1) -> Layout:
        from asynckv.tools.plan.layouts import model_layout

        how = asdict(self)
        sizes = {"tp_size": how.pop("tp"), "pp_size": how.pop("pp")}
        return model_layout(model, tp_rank=tp_rank, pp_stage=pp_stage, num_blocks=num_blocks, **sizes, **how)

    @property
    def ranks(self) -> str:
        """Return the options that cut the model, for errors."""
        return f"--tp {self.tp}" + (f" --dcp {self.dcp} --cp-interleave {self.cp_interleave}" * (self.dcp > 1))


def _in(panel: str, *, in_record: bool = True, is_single: bool = False) -> Callable[..., Any]:
    """Return a function that declares an option in one panel of the help.

    With `in_record`, the JSON report has the option's value; without, it has derived values or nothing. An option that
    `is_single` applies to a single run only, so sweeps refuse it.
    """

    def declare(default: Any, *names: str, **more: Any) -> Any:
        option = typer.Option(*names, rich_help_panel=panel, **more)
        return field(default=default, metadata={"option": option, "in_record": in_record, "is_single": is_single})

    return declare


SIDES = "N|PREFILL:DECODE"
# The report has no raw value of these: it has the model, the two shapes and the engines that they make.
common = _in("Start with these")
asked = _in("Start with these", in_record=False)
geometry = _in("Geometry", in_record=False)
work = _in("Workload")
source = _in("Workload", in_record=False)
run = _in("Run")
apart = _in("Two machines", in_record=False)
report = _in("Start with these", in_record=False, is_single=True)
output = _in("Output", in_record=False, is_single=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one run. An option that may differ by side is text: one value, or `PREFILL:DECODE`."""

    model: str | None = asked(None, show_default=DEFAULT_MODEL)
    layers: int | None = asked(None)
    hf_config: str | None = geometry(None)
    kv_heads: int | None = geometry(None)
    dtype: str | None = geometry(None)
    tp: str = geometry("1", metavar=SIDES)
    pp: str = geometry("1", metavar=SIDES)
    dcp: str = geometry("1", metavar=SIDES)
    cp_interleave: str = geometry("1", metavar=SIDES)
    block_size: str = geometry("16", metavar=SIDES)
    order: str = geometry("nhd", metavar="ORDER|PREFILL:DECODE")

    prompt_tokens: str | None = asked(None, show_default=PROMPT_TOKENS)
    trace: str | None = source(None)
    max_prompt_tokens: int | None = source(None, min=1, max=MOST)
    prefix_hit: str = work("0")
    shared_prefix: str | None = source(None, metavar="TOKENS[:PREFIXES]")
    prefix_cache: int = work(1 << 20, min=0, max=1 << 40)
    requests: int | None = asked(None, min=1, max=MOST)
    concurrency: int = common(16, min=1)
    rate: float | None = work(None, min=1e-6, max=MOST_RATE)
    speed: float | None = work(None, min=1e-6, max=MOST_RATE)
    engines: str = geometry("1", metavar=SIDES)
    warmup: int = work(1, min=0, max=10_000)
    block_order: Literal["runs", "random"] = work("runs")
    seed: int = work(0, min=0)

    verify: Literal["full", "off"] = run("full")
    timeout_s: float = run(30.0, min=MIN_LEASE_S, max=MOST_S)
    pool_mb: int | None = run(None, min=1, max=MOST)
    transport: Literal["auto", "tcp"] = run("auto")
    posting_threads: str = run("auto", metavar="N|auto")
    process: Literal["auto", "serving", "never"] = run("auto", metavar="WHAT")
    announced: bool = run(False, "--announced")
    follow: bool = run(False, "--follow")
    chunks: int | None = run(None, min=2, max=256)
    compute_ms: float | None = run(None, min=0, max=60_000, show_default="60")
    second_look: float = run(0.0, min=0, max=1, metavar="SHARE")
    floor: bool = common(False, "--floor")
    memory: Literal["host", "cuda"] = run("host")

    remote: str | None = apart(None, metavar="COMMAND")
    remote_host: str | None = apart(None, metavar="ADDRESS")

    json: str | None = report(None, metavar="FILE")
    log: str | None = output(None, metavar="FILE")

    def is_given(self, name: str) -> bool:
        """Return whether an option differs from its default on any side."""
        return set(str(getattr(self, name)).split(":")) != {str(type(self).__dataclass_fields__[name].default)}

    def of_side(self, name: str, role: str) -> str:
        prefill, colon, decode = str(getattr(self, name)).partition(":")
        return decode if colon and role == "decode" else prefill

    def number(self, name: str, role: str) -> int:
        text, most = self.of_side(name, role), MOST_OF[name]
        if not text.isdecimal() or not 1 <= int(text) <= most:
            option = f"--{name.replace('_', '-')} {getattr(self, name)}"
            raise ConfigError(f"{option}: {text!r} ({role} side) is no number from 1 to {most}")
        return int(text)

    def shape(self, role: str) -> Shape:
        sizes: Any = {name: self.number(name, role) for name in MOST_OF if name != "engines"}
        return Shape(**sizes, order=self.of_side("order", role))

    @property
    def arrivals(self) -> Literal["closed", "poisson", "trace"]:
        """Return how requests arrive: the closed loop starts one when another ends, the others follow a clock."""
        return "poisson" if self.rate is not None else "trace" if self.speed is not None else "closed"

    @property
    def posters(self) -> int | str:
        return int(self.posting_threads) if self.posting_threads.isdecimal() else self.posting_threads

    @property
    def lease(self) -> LeaseConfig:
        return LeaseConfig(lease_s=self.timeout_s, grant_s=min(10.0, self.timeout_s))

    @property
    def computed_s(self) -> float:
        return (self.chunks or 0) * (60.0 if self.compute_ms is None else self.compute_ms) / 1e3

    @property
    def level(self) -> Literal["info", "error"]:
        return "info" if self.log else "error"

    def record(self) -> dict[str, Any]:
        """Return the options that the JSON report repeats unchanged."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.metadata["in_record"]}
        return found | {"posting_threads": self.posters}


DECLARED = {each.name: each for each in fields(Options)}
for _name, _text in HELP["bench"].items():
    DECLARED[_name].metadata["option"].help = _text
OF_SINGLE_RUNS = {name for name, each in DECLARED.items() if each.metadata["is_single"]}

# `asynckv layout` has these options as well.
HfConfig = Annotated[str | None, DECLARED["hf_config"].metadata["option"]]
KvHeads = Annotated[int | None, DECLARED["kv_heads"].metadata["option"]]
Dtype = Annotated[str | None, DECLARED["dtype"].metadata["option"]]
