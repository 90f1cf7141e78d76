"""How findings are shown: a table on a terminal, lines where it is piped, one object as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from asynckv.tools.console import printable
from asynckv.tools.doctor.catalogue import LEVELS, TOPICS, Finding
from asynckv.tools.doctor.checks import is_good, size
from asynckv.tools.doctor.checks_ucx import rows
from asynckv.tools.doctor.facts import Facts

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["SCHEMA", "as_json", "show"]

SCHEMA = "asynckv.doctor/1"
STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "good": "green"}


def as_json(facts: Facts, found: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "schema": SCHEMA,
        "good": is_good(found),
        "counts": {level: sum(each.level == level for each in found) for level in LEVELS},
        "findings": msgspec.to_builtins(found),
        "facts": msgspec.to_builtins(facts),
        "seconds": round(seconds, 3),
    }


def show(facts: Facts, found: Sequence[Finding], console: Console) -> None:
    """Print what was found by topic, the topic with the worst first; where it is piped, a line for each thing said."""
    from rich.padding import Padding
    from rich.table import Table

    for line in _headline(facts):
        console.print(printable(line), highlight=False, soft_wrap=True)
    worst = {topic: min(LEVELS.index(e.level) for e in found if e.topic == topic) for topic in {e.topic for e in found}}
    for topic in sorted(worst, key=lambda each: (worst[each], list(TOPICS).index(each))):
        console.print(f"\n[bold]{TOPICS[topic]}[/bold]", highlight=False)
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True, width=8)
        table.add_column(overflow="fold")
        for each in found:
            if each.topic != topic:
                continue
            if not console.is_terminal:
                _plain(each, console)
                continue
            text = f"[bold]{printable(each.title)}[/bold] [dim]({each.code})[/dim]: {printable(each.found)}"
            if each.level != "good":
                text += f"\n{printable(each.why)}" if each.why else ""
                text += f"\n[bold]->[/bold] {printable(each.remedy)}  [dim]{each.link}[/dim]"
            table.add_row(f"[{STYLES[each.level]}]{each.level}[/]", text)
        if table.row_count:
            console.print(Padding(table, (0, 0, 0, 2)), highlight=False)
        if topic == "speed" and facts.ucx is not None and facts.ucx.measured is not None and facts.ucx.measured.rounds:
            for name, value in rows(facts.ucx.measured):
                console.print(f"    {name:26}{value}", highlight=False)
    counts = [
        f"{n} {level}{'s' if n != 1 and level != 'good' else ''}"
        for level in LEVELS
        if (n := sum(e.level == level for e in found))
    ]
    console.print(f"\n{', '.join(counts)}", highlight=False)
    for each in found:
        if each.level in ("error", "warning"):  # whoever sees only the end of it knows what to scroll up to
            console.print(
                f"[{STYLES[each.level]}]{each.level}[/] {printable(f'{each.code}: {each.title}')}", highlight=False
            )


def _plain(each: Finding, console: Console) -> None:
    lines = [f"  {each.level} {each.code}: {each.title}: {each.found}"]
    if each.level != "good":
        lines += [f"    {text}" for text in (each.why, f"-> {each.remedy} [{each.link}]") if text]
    for line in lines:
        console.print(printable(line), highlight=False, soft_wrap=True)


def _headline(facts: Facts) -> list[str]:
    here, has, ucx = facts.machine, facts.software, facts.ucx
    version = f", UCX {ucx.version}" if ucx is not None and ucx.version else ""
    cuda = f" (CUDA {has.torch_cuda})" if has.torch_cuda else ""
    lines = [
        f"{facts.network.hostname}: {here.cores_allowed} of {here.cores_present} cores, {here.cpu}, "
        f"{size(here.memory_bytes)}, Linux {here.kernel}{f', in {here.container}' if here.container else ''}",
        f"asynckv {has.asynckv}, Python {has.python}, NIXL {has.nixl or 'unknown'} ({has.variant or 'none'}){version}, "
        f"pyzmq {has.pyzmq}, torch {has.torch or 'none'}{cuda}",
        "interfaces "
        + ", ".join(
            f"{each.name} {' '.join(each.addresses[:2])} (MTU {each.mtu})" for each in facts.network.interfaces
        ),
    ]
    if ucx is not None and not ucx.failure:
        lines.append(
            f"connection {', '.join(ucx.lanes)}; error mode {ucx.facts.get('ucx_error_handling_mode', 'unknown')}; "
            f"no progress thread, {facts.posting_threads} posting threads; "
            f"woken by {ucx.facts.get('completions', 'unknown')}"
        )
        lines.append(f"plug-ins of NIXL: {', '.join(ucx.plugins)}")
    if has.environment:
        lines.append(" ".join(f"{name}={value}" for name, value in has.environment.items()))
    return lines
