"""Every limit of the router: a field of `Limits`, an option of `asynckv proxy`, and a text in `help.toml`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import typer

from asynckv.tools.output import HELP


def _limit(default: Any, **bounds: Any) -> Any:
    bounds = bounds or {"min": 1e-6, "max": 1e6}
    return field(default=default, metadata={"option": typer.Option(**bounds)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits for engines and clients; times are seconds.

    `max_requests` is there for memory: a request takes about 40 KiB, and its body until it ends.

    Each request also needs connections to two engines, so a third of the process's descriptors is a limit too. After
    `idle_s` a connection is closed if it has not sent a whole request, or does not read its answer.
    """

    attempts: int = _limit(3, min=1)
    ahead: int = _limit(32, min=0)
    connect_s: float = _limit(2.0)
    prefill_s: float = _limit(120.0)
    silence_s: float = _limit(300.0)
    health_s: float = _limit(2.0)
    refresh_s: float = _limit(5.0)
    max_requests: int = _limit(4096, min=1)
    max_body_mib: float = _limit(16.0)
    max_bodies_mib: float = _limit(1024.0)
    body_s: float = _limit(60.0)
    idle_s: float = _limit(75.0)
    max_connections: int = _limit(4096, min=1)
    max_connections_per_host: int = _limit(3072, min=1)
    drain_s: float = _limit(30.0)


for _each in fields(Limits):
    _each.metadata["option"].help = HELP["proxy"][_each.name]
