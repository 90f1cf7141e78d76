"""Every limit of the router, each declared once: as a field of `Limits`, and by it as an option of `asynckv proxy`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import typer


def _limit(default: Any, help: str, **bounds: Any) -> Any:
    bounds = bounds or {"min": 1e-6, "max": 1e6}
    return field(default=default, metadata={"option": typer.Option(help=help, **bounds)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits for engines and clients; times are seconds.

    Each request also needs a connection to an engine, so a third of the process's descriptors is a limit too. After
    `idle_s` a connection is closed if it has not sent a whole request, or does not read its answer.
    """

    attempts: int = _limit(3, "Attempts per request, including the first.", min=1)
    connect_s: float = _limit(2.0, "Time-out for connecting to an engine, and for its health check.")
    prefill_s: float = _limit(120.0, "Time-out for one prefill.")
    silence_s: float = _limit(300.0, "Longest time without data in a stream from an engine.")
    health_s: float = _limit(2.0, "Interval between health checks of an engine.")
    refresh_s: float = _limit(5.0, "Interval at which FILE is read and names are resolved.")
    max_requests: int = _limit(1024, "Requests in flight; more are refused with 503.", min=1)
    max_body_mib: float = _limit(16.0, "Largest body; a larger one is refused with 413.")
    max_bodies_mib: float = _limit(1024.0, "Largest sum of all bodies; more are refused with 503.")
    body_s: float = _limit(60.0, "Time-out for the arrival of a body; then 408.")
    idle_s: float = _limit(75.0, "Time-out for lack of a whole header, or for reading nothing.")
    max_connections: int = _limit(2048, "Connections of clients; more get 503. At most a third of `ulimit -Hn`.", min=1)
    max_connections_per_host: int = _limit(1536, "Per client address, or load balancer.", min=1)
    drain_s: float = _limit(30.0, "Time for requests to finish after Ctrl-C or SIGTERM.")
