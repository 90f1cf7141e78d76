"""Output of findings: lines for people, one object as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from asynckv.tools.console import printable, size
from asynckv.tools.doctor.catalogue import LEVELS, TOPICS, Finding, Level
from asynckv.tools.doctor.checks import is_good
from asynckv.tools.doctor.facts import Facts

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = "asynckv.doctor/1"
STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "good": "green"}


def as_json(facts: Facts, found: Sequence[Finding], seconds: float) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "good": is_good(found),
        "counts": {level: sum(each.level == level for each in found) for level in LEVELS},
        "findings": msgspec.to_builtins(found),
        "facts": msgspec.to_builtins(facts),
        "seconds": round(seconds, 3),
    }


def show(facts: Facts, found: Sequence[Finding], console: Console) -> None:
    from rich.padding import Padding

    def say(line: str, indent: int = 0) -> None:
        # Terminals get whole words, pipes whole lines.
        text = Padding(line, (0, 0, 0, indent)) if console.is_terminal else " " * indent + line
        console.print(text, soft_wrap=not console.is_terminal)

    for line in _headline(facts):
        say(printable(line))
    worst = {topic: min(LEVELS.index(e.level) for e in found if e.topic == topic) for topic in {e.topic for e in found}}
    for topic in sorted(worst, key=lambda each: (worst[each], list(TOPICS).index(each))):
        say(f"\n[bold]{TOPICS[topic]}[/bold]")
        for each in found:
            if each.topic != topic:
                continue
            title, more = printable(f"{each.code}: {each.title}"), printable([each.found, each.why, each.remedy])
            say(f"{_coloured(each.level)} [bold]{title}[/bold]: {more[0]}", 2)
            if each.level != "good":
                if each.why:
                    say(more[1], 4)
                say(f"-> {more[2]} [dim]{printable(f'[{each.link}]')}[/dim]", 4)
    counts = [
        f"{n} {level}{'s' if n != 1 and level != 'good' else ''}"
        for level in LEVELS
        if (n := sum(e.level == level for e in found))
    ]
    say(f"\n{', '.join(counts)}")
    for each in found:
        if each.level in ("error", "warning"):  # so that a reader of the last lines knows what to scroll up to
            say(f"{_coloured(each.level)} {printable(f'{each.code}: {each.title}')}")


def _coloured(level: Level) -> str:
    return f"[{STYLES[level]}]{level}[/]"


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
